/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * Path MTU discovery (RFC 1191, RFC 8201). A router that cannot forward a packet reports that to
 * the packet's source address, and cites its head. Payload segments carry the frontend's address,
 * so the report comes to the frontend, while the kernel that has to make them smaller is the
 * backend's. fe_in changes the report to one about the backend's socket, and be_in changes it to
 * that socket's own sequence numbers. The backend's kernel then acts as for any connection, and
 * makes the final check that the number is in its window (net/ipv4/tcp_ipv4.c, tcp_v4_err).
 *
 *   Ethernet | IP | ICMP: type, code, checksum, MTU | IP | TCP: ports, sequence number ...
 *                                                     ^ cited
 */
#ifndef ICMP_H
#define ICMP_H

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "decisions/numbers.h"
#include "edit.h"

#define ICMP_DEST_UNREACH 3
#define ICMP_FRAG_NEEDED  4
#define ICMPV6_PKT_TOOBIG 2
#define IP_OFFSET         0x1fff
#define TOO_BIG_BYTES     (14 + 2 * 40 + 2 * 8) /* bytes of a report's frame that are read */
#define IPV4_ICMP_AT      (14 + 20)
#define IPV6_ICMP_AT      (14 + 40)

struct icmp_error {
    __u8 type;
    __u8 code;
    __sum16 checksum;
    __be32 mtu; /* in ICMPv4, the lower half only */
};

/* Part of a TCP header that every error cites (RFC 792). */
struct cited {
    __be16 source_port;
    __be16 destination_port;
    __be32 seq;
};

/* A report. Addresses, ports and `seq` are those of the cited packet, which was sent to a client:
 * by this machine, or by a backend in this machine's name. */
struct too_big {
    __u32 source[4]; /* IPv4 mapped */
    __u32 destination[4];
    __be16 source_port;
    __be16 destination_port;
    __u32 seq;
    __u32 icmp; /* offset of the ICMP header in the frame */
    __u32 ip;   /* offsets of the cited headers in the frame */
    __u32 tcp;
};

static __always_inline void *frame_field(struct __sk_buff *skb, __u32 offset, __u32 bytes)
{
    void *field = (void *) (long) skb->data + (offset & 127);
    return field + bytes > (void *) (long) skb->data_end ? NULL : field;
}

static __always_inline bool is_icmpv6(const struct too_big *t)
{
    return t->icmp == IPV6_ICMP_AT;
}

static __always_inline bool load_ipv4_report(struct __sk_buff *skb, struct too_big *t)
{
    struct iphdr *ip = ipv4_header(skb);
    if (!ip || ip->protocol != IPPROTO_ICMP || ip->ihl != sizeof(*ip) / 4 ||
        ip->frag_off & bpf_htons(IP_MF | IP_OFFSET))
        return false;
    t->icmp = IPV4_ICMP_AT;
    t->ip = t->icmp + sizeof(struct icmp_error);
    t->tcp = t->ip + sizeof(*ip);
    struct icmp_error *icmp = frame_field(skb, IPV4_ICMP_AT, sizeof(*icmp));
    if (!icmp || icmp->type != ICMP_DEST_UNREACH || icmp->code != ICMP_FRAG_NEEDED)
        return false;
    ip = frame_field(skb, t->ip, sizeof(*ip));
    if (!ip || ip->version != 4 || ip->ihl != sizeof(*ip) / 4 || ip->protocol != IPPROTO_TCP ||
        ip->frag_off & bpf_htons(IP_OFFSET))
        return false;
    map_ipv4(t->source, ip->saddr);
    map_ipv4(t->destination, ip->daddr);
    return true;
}

static __always_inline bool load_ipv6_report(struct __sk_buff *skb, struct too_big *t)
{
    struct ipv6hdr *ip = ipv6_header(skb);
    if (!ip || ip->nexthdr != IPPROTO_ICMPV6)
        return false;
    t->icmp = IPV6_ICMP_AT;
    t->ip = t->icmp + sizeof(struct icmp_error);
    t->tcp = t->ip + sizeof(*ip);
    struct icmp_error *icmp = frame_field(skb, IPV6_ICMP_AT, sizeof(*icmp));
    if (!icmp || icmp->type != ICMPV6_PKT_TOOBIG)
        return false;
    ip = frame_field(skb, t->ip, sizeof(*ip));
    if (!ip || ip->version != 6 || ip->nexthdr != IPPROTO_TCP)
        return false;
    __builtin_memcpy(t->source, &ip->saddr, sizeof(t->source));
    __builtin_memcpy(t->destination, &ip->daddr, sizeof(t->destination));
    return true;
}

/* Reads a report of a smaller path MTU. Returns 0 if the packet is none. Invalidates packet
 * pointers. */
static __noinline int load_too_big(struct __sk_buff *skb, struct too_big *t)
{
    __u32 wanted = skb->len < TOO_BIG_BYTES ? skb->len : TOO_BIG_BYTES;
    if (bpf_skb_pull_data(skb, wanted))
        return 0;
    struct ethhdr *eth = frame_field(skb, 0, sizeof(*eth));
    if (!eth)
        return 0;
    __be16 protocol = eth->h_proto;
    if (!(protocol == bpf_htons(ETH_P_IP) && load_ipv4_report(skb, t)) &&
        !(protocol == bpf_htons(ETH_P_IPV6) && load_ipv6_report(skb, t)))
        return 0;
    struct cited *tcp = frame_field(skb, t->tcp, sizeof(*tcp));
    if (!tcp)
        return 0;
    t->source_port = tcp->source_port;
    t->destination_port = tcp->destination_port;
    t->seq = bpf_ntohl(tcp->seq);
    return 1;
}

/* Changes the source of the cited packet. */
static __always_inline bool put_cited_source(struct __sk_buff *skb, const struct too_big *t,
                                             struct edit *e, const __u32 *address, __be16 port)
{
    if (is_icmpv6(t)) {
        struct ipv6hdr *ip = frame_field(skb, t->ip, sizeof(*ip));
        if (!ip)
            return false;
        for (int i = 0; i < 4; i++)
            put32(&e->plain, &ip->saddr.in6_u.u6_addr32[i], address[i]);
    } else {
        struct iphdr *ip = frame_field(skb, t->ip, sizeof(*ip));
        if (!ip)
            return false;
        /* The ICMP checksum stays: the cited IPv4 checksum makes up for the address. */
        __u64 change = 0;
        put32(&change, &ip->saddr, address[3]);
        ipv4_sum_follows(ip, change);
    }
    struct cited *tcp = frame_field(skb, t->tcp, sizeof(*tcp));
    if (!tcp)
        return false;
    put16(&e->plain, &tcp->source_port, port);
    return true;
}

static __always_inline bool put_cited_seq(struct __sk_buff *skb, const struct too_big *t,
                                          struct edit *e, __u32 seq)
{
    struct cited *tcp = frame_field(skb, t->tcp, sizeof(*tcp));
    if (!tcp)
        return false;
    put32(&e->plain, &tcp->seq, bpf_htonl(seq));
    return true;
}

/*
 * Changes source and destination of the report. The source is no longer the router: the path to the
 * backend may lead through it, and a router accepts no packet from itself. The checksum of ICMPv6
 * covers the addresses, too (RFC 4443, 2.3).
 */
static __always_inline bool put_report_addresses(struct __sk_buff *skb, const struct too_big *t,
                                                 struct edit *e, const __u32 *source,
                                                 const __u32 *destination)
{
    if (is_icmpv6(t)) {
        struct ipv6hdr *ip = ipv6_header(skb);
        if (!ip)
            return false;
        for (int i = 0; i < 4; i++) {
            put32(&e->pseudo, &ip->saddr.in6_u.u6_addr32[i], source[i]);
            put32(&e->pseudo, &ip->daddr.in6_u.u6_addr32[i], destination[i]);
        }
        return true;
    }
    struct iphdr *ip = ipv4_header(skb);
    if (!ip)
        return false;
    __u64 change = 0;
    put32(&change, &ip->saddr, source[3]);
    put32(&change, &ip->daddr, destination[3]);
    ipv4_sum_follows(ip, change);
    return true;
}

static __always_inline bool icmp_sum_follows(struct __sk_buff *skb, const struct too_big *t,
                                             const struct edit *e)
{
    __u32 at = t->icmp + offsetof(struct icmp_error, checksum);
    if (e->plain && bpf_l4_csum_replace(skb, at, 0, fold32(e->plain), 0))
        return false;
    return !e->pseudo || !bpf_l4_csum_replace(skb, at, 0, fold32(e->pseudo), BPF_F_PSEUDO_HDR);
}

#endif
