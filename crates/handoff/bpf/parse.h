/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/* Reads a frame into a struct packet. */
#ifndef PARSE_H
#define PARSE_H

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "decisions/numbers.h"
#include "decisions/packet.h"
#include "edit.h"

#define TCPOPT_EOL         0
#define TCPOPT_NOP         1
#define TCPOPT_SACK        5
#define TCPOPT_TIMESTAMP   8
/* The options of nearly every packet: two NOPs, then timestamps (RFC 7323, appendix A). */
#define USUAL_OPTIONS      bpf_htonl(0x0101080a)
#define USUAL_HEADER_BYTES 32

#define EXTENSIONS_MAX 8
#define IP6_OFFSET     0xfff8

enum parsed {
    PARSED_TCP,
    PARSED_OTHER, /* not TCP, malformed, or a fragment behind the first: not for these programs */
    PARSED_SHORT, /* the headers are not all in the linear part of the skb */
};

static __always_inline void load_timestamps(struct __sk_buff *skb, struct packet *p, __u32 tsval_at)
{
    __be32 *option = tcp_field(skb, p, tsval_at, 2 * sizeof(*option));
    if (!option)
        return;
    p->timestamps = tsval_at;
    p->tsval = bpf_ntohl(option[0]);
    p->tsecr = bpf_ntohl(option[1]);
}

static __always_inline void note_option(struct __sk_buff *skb, struct packet *p, __u32 at,
                                        __u8 kind, __u8 bytes)
{
    if (kind == TCPOPT_TIMESTAMP && bytes == 10)
        load_timestamps(skb, p, at + 2);
    if (kind == TCPOPT_SACK && bytes >= 10 && bytes <= 34 && bytes % 8 == 2) {
        p->sack = at;
        p->sack_blocks = bytes / 8;
    }
}

/*
 * Finds the timestamps and SACK options, in any order and at any offset. A malformed option ends
 * the search, as in the kernel. Not static, so that the verifier checks it once, and not for each
 * caller.
 */
__noinline int scan_options(struct __sk_buff *skb, struct packet *p)
{
    __u32 at = TCP_HEADER_MIN;

    if (!p)
        return PARSED_OTHER;

    for (int i = 0; i < TCP_HEADER_MAX - TCP_HEADER_MIN; i++) {
        /* Changes nothing, but makes every round look the same to the verifier. */
        at &= 63;
        barrier_var(at);
        if (at >= p->header_bytes)
            break;
        __u8 *option = tcp_field(skb, p, at, 1);
        if (!option || option[0] == TCPOPT_EOL)
            break;
        if (option[0] == TCPOPT_NOP) {
            at++;
            continue;
        }
        option = tcp_field(skb, p, at, 2);
        if (!option || option[1] < 2 || at + option[1] > p->header_bytes)
            break;
        note_option(skb, p, at, option[0], option[1]);
        at += option[1];
    }
    return PARSED_TCP;
}

struct extension {
    __u8 next;
    __u8 eights;     /* length in units of 8 bytes, the first 8 bytes not counted (RFC 8200, 4.2) */
    __be16 fragment; /* of a fragment header (4.5): offset; lowest bit: more fragments follow */
};

/*
 * Moves p->transport, the offset of the TCP header, behind IPv6's extension headers. Refuses kinds
 * of headers that clients do not use on their connections, and more headers than fit before
 * TRANSPORT_MAX. Not static, so that the verifier checks it only once.
 */
__noinline int skip_extensions(struct __sk_buff *skb, struct packet *p, __u32 next)
{
    if (!p)
        return PARSED_OTHER;
    for (int i = 0; i < EXTENSIONS_MAX && next != IPPROTO_TCP; i++) {
        struct extension *at = tcp_field(skb, p, 0, sizeof(*at));
        if (!at)
            return PARSED_SHORT;
        __u32 bytes = 8 + 8 * at->eights;
        if (next == IPPROTO_FRAGMENT) {
            if (at->fragment & bpf_htons(IP6_OFFSET))
                return PARSED_OTHER;
            bytes = 8;
        } else if (next != IPPROTO_HOPOPTS && next != IPPROTO_ROUTING && next != IPPROTO_DSTOPTS) {
            return PARSED_OTHER;
        }
        next = at->next;
        p->transport += bytes;
        if (p->transport > TRANSPORT_MAX)
            return PARSED_OTHER;
    }
    return next == IPPROTO_TCP ? PARSED_TCP : PARSED_OTHER;
}

/* Parses the IP headers. Sets `end` to the offset in the frame at which the packet ends, by its own
 * length field. */
static __always_inline enum parsed parse_ip(struct __sk_buff *skb, struct packet *p, __u32 *end)
{
    struct ethhdr *eth = (void *) (long) skb->data;
    if ((void *) (eth + 1) > (void *) (long) skb->data_end)
        return PARSED_SHORT;
    if (eth->h_proto == bpf_htons(ETH_P_IP)) {
        struct iphdr *ip = ipv4_header(skb);
        if (!ip)
            return PARSED_SHORT;
        __u32 bytes = ip->ihl * 4;
        if (ip->protocol != IPPROTO_TCP || bytes < sizeof(*ip) ||
            ip->frag_off & bpf_htons(IP_OFFSET))
            return PARSED_OTHER;
        p->is_odd = bytes != sizeof(*ip) || ip->frag_off & bpf_htons(IP_MF);
        map_ipv4(p->source, ip->saddr);
        map_ipv4(p->destination, ip->daddr);
        p->transport = sizeof(struct ethhdr) + bytes;
        *end = sizeof(struct ethhdr) + bpf_ntohs(ip->tot_len);
        return PARSED_TCP;
    }
    if (eth->h_proto == bpf_htons(ETH_P_IPV6)) {
        struct ipv6hdr *ip = ipv6_header(skb);
        if (!ip)
            return PARSED_SHORT;
        __builtin_memcpy(p->source, &ip->saddr, sizeof(p->source));
        __builtin_memcpy(p->destination, &ip->daddr, sizeof(p->destination));
        p->is_ipv6 = 1;
        p->transport = sizeof(struct ethhdr) + sizeof(*ip);
        *end = p->transport + bpf_ntohs(ip->payload_len);
        if (ip->nexthdr == IPPROTO_TCP)
            return PARSED_TCP;
        p->is_odd = 1;
        __u32 next = ip->nexthdr;
        return skip_extensions(skb, p, next);
    }
    return PARSED_OTHER;
}

static __noinline int parse_linear(struct __sk_buff *skb, struct packet *p)
{
    __u32 end = 0;
    enum parsed parsed = parse_ip(skb, p, &end);
    if (parsed != PARSED_TCP)
        return parsed;

    /* The ports are read even if a first fragment ends within the TCP header (RFC 1858): be_in
     * drops such packets by their port. */
    __be16 *ports = tcp_field(skb, p, 0, 2 * sizeof(*ports));
    if (!ports)
        return PARSED_SHORT;
    p->source_port = ports[0];
    p->destination_port = ports[1];
    struct tcphdr *tcp = tcp_header(skb, p);
    if (!tcp)
        return PARSED_SHORT;
    p->header_bytes = tcp->doff * 4;
    /* A packet that is too long for its length field (BIG TCP) has 0 there: then the frame's own
     * length counts. */
    if (skb->len > 0xffff)
        end = skb->len;
    if (p->header_bytes < TCP_HEADER_MIN || p->transport + p->header_bytes > end || end > skb->len)
        return PARSED_OTHER;
    if ((void *) (long) skb->data + (p->transport & TRANSPORT_MAX) + (p->header_bytes & 63) >
        (void *) (long) skb->data_end)
        return PARSED_SHORT;
    p->payload_bytes = end - p->transport - p->header_bytes;
    p->seq = bpf_ntohl(tcp->seq);
    p->ack = bpf_ntohl(tcp->ack_seq);
    p->window = bpf_ntohs(tcp->window);
    p->flags = ((__u8 *) tcp)[13];

    if (p->header_bytes == TCP_HEADER_MIN)
        return PARSED_TCP;
    __be32 *options = tcp_field(skb, p, TCP_HEADER_MIN, sizeof(*options));
    if (options && p->header_bytes == USUAL_HEADER_BYTES && *options == USUAL_OPTIONS)
        load_timestamps(skb, p, TCP_HEADER_MIN + 4);
    else
        return scan_options(skb, p);
    return PARSED_TCP;
}

/* Parses a packet. Returns false if these programs do not handle it. Invalidates packet pointers.
 */
static __always_inline bool parse(struct __sk_buff *skb, struct packet *p)
{
    __builtin_memset(p, 0, sizeof(*p));
    int parsed = parse_linear(skb, p);
    if (parsed != PARSED_SHORT)
        return parsed == PARSED_TCP;
    __u32 wanted = skb->len < HEADERS_MAX ? skb->len : HEADERS_MAX;
    return !bpf_skb_pull_data(skb, wanted) && parse_linear(skb, p) == PARSED_TCP;
}

#endif
