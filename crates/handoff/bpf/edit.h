/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * Changes to a TCP packet and its checksums.
 *
 * Fields are written in place, through direct packet access, and every change is added up in a
 * struct edit. One or two helper calls at the end bring the TCP checksum up to date. The helpers
 * know what the program cannot see: whether skb->ip_summed is CHECKSUM_PARTIAL, in which case the
 * checksum field holds the pseudo header's sum only (net/core/utils.c,
 * inet_proto_csum_replace_by_diff).
 *
 * Every helper call invalidates packet pointers, so none is kept across functions.
 */
#ifndef EDIT_H
#define EDIT_H

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "decisions/numbers.h"
#include "decisions/packet.h"

/* Constants of Ethernet and IP headers. The headers that BPF code can include lack some of them. */
#define ETH_P_IP       0x0800
#define ETH_P_IPV6     0x86DD
#define ETHERNET_BYTES 14
#define IP_OFFSET      0x1fff
#define IP_MF          0x2000

/* Verdict that leaves the decision to later filters: other programs may share the interface. */
#define PASS TC_ACT_UNSPEC

#define TCP_HEADER_MIN  20
#define TCP_HEADER_MAX  60
#define TCP_CHECKSUM_AT 16
/* Largest offset of the TCP header in the frame, behind IPv4's options or some IPv6 extension
 * headers. One less than a power of two. */
#define TRANSPORT_MAX   127
#define HEADERS_MAX     (TRANSPORT_MAX + TCP_HEADER_MAX)

/* Sums of the changes that are not in a packet's TCP checksum yet, in the packet's byte order (RFC
 * 1624). */
struct edit {
    __u64 pseudo; /* changes of the pseudo header: addresses and length */
    __u64 plain;  /* changes of the TCP header */
};

static __always_inline bool is_ipv6(const struct packet *p)
{
    return p->is_ipv6;
}

static __always_inline void map_ipv4(__u32 *address, __be32 ipv4)
{
    address[0] = 0;
    address[1] = 0;
    address[2] = bpf_htonl(0xffff);
    address[3] = ipv4;
}

/* ---- writing ---- */

static __always_inline void put16(__u64 *sum, __be16 *field, __be16 value)
{
    *sum += (__u16) ~*field;
    *sum += value;
    *field = value;
}

static __always_inline void put32(__u64 *sum, __be32 *field, __be32 value)
{
    *sum += (__u32) ~*field;
    *sum += value;
    *field = value;
}

/* Returns what a word at an offset adds to the checksum: at an odd offset, the word rotated by a
 * byte. */
static __always_inline __u64 at_offset(__u32 word, __u32 offset)
{
    return offset & 1 ? (word >> 8 | word << 24) : word;
}

static __always_inline void put_option32(__u64 *sum, __u32 offset, __be32 *field, __be32 value)
{
    *sum += at_offset(~*field, offset);
    *sum += at_offset(value, offset);
    *field = value;
}

static __always_inline __u32 fold32(__u64 sum)
{
    sum = (sum & 0xffffffff) + (sum >> 32);
    sum = (sum & 0xffffffff) + (sum >> 32);
    return sum;
}

static __always_inline __u16 fold16(__u64 sum)
{
    __u32 folded = fold32(sum);
    folded = (folded & 0xffff) + (folded >> 16);
    folded = (folded & 0xffff) + (folded >> 16);
    return folded;
}

/* Returns a pointer to the fixed part of the TCP header. The pointer is never NULL after parse(),
 * but the verifier requires a check. */
static __always_inline struct tcphdr *tcp_header(struct __sk_buff *skb, const struct packet *p)
{
    void *end = (void *) (long) skb->data_end;
    struct tcphdr *tcp = (void *) (long) skb->data + (p->transport & TRANSPORT_MAX);
    return (void *) (tcp + 1) > end ? NULL : tcp;
}

/* Returns a pointer to byte `offset` of the TCP header. Returns NULL if the packet has fewer than
 * `bytes` bytes from there on. */
static __always_inline void *tcp_field(struct __sk_buff *skb, const struct packet *p, __u32 offset,
                                       __u32 bytes)
{
    void *end = (void *) (long) skb->data_end;
    void *field = (void *) (long) skb->data + (p->transport & TRANSPORT_MAX) + (offset & 63);
    return field + bytes > end ? NULL : field;
}

static __always_inline struct iphdr *ipv4_header(struct __sk_buff *skb)
{
    void *end = (void *) (long) skb->data_end;
    struct iphdr *ip = (void *) (long) skb->data + sizeof(struct ethhdr);
    return (void *) (ip + 1) > end ? NULL : ip;
}

static __always_inline struct ipv6hdr *ipv6_header(struct __sk_buff *skb)
{
    void *end = (void *) (long) skb->data_end;
    struct ipv6hdr *ip = (void *) (long) skb->data + sizeof(struct ethhdr);
    return (void *) (ip + 1) > end ? NULL : ip;
}

/* Updates an IPv4 header's checksum, which is complete in every packet, and so needs no helper. */
static __always_inline void ipv4_sum_follows(struct iphdr *ip, __u64 change)
{
    ip->check = ~fold16((__u16) ~ip->check + change);
}

enum direction { SOURCE, DESTINATION };

static __always_inline bool put_address(struct __sk_buff *skb, const struct packet *p,
                                        struct edit *e, enum direction which, const __u32 *address)
{
    if (is_ipv6(p)) {
        struct ipv6hdr *ip = ipv6_header(skb);
        if (!ip)
            return false;
        __be32 *field = which == SOURCE ? ip->saddr.in6_u.u6_addr32 : ip->daddr.in6_u.u6_addr32;
        for (int i = 0; i < 4; i++)
            put32(&e->pseudo, &field[i], address[i]);
        return true;
    }
    struct iphdr *ip = ipv4_header(skb);
    if (!ip)
        return false;
    __u64 change = 0;
    put32(&change, which == SOURCE ? &ip->saddr : &ip->daddr, address[3]);
    ipv4_sum_follows(ip, change);
    e->pseudo += change;
    return true;
}

/* Sets the TTL to that of a new packet. This packet is not forwarded: it has arrived, and is sent
 * anew. */
static __always_inline bool put_fresh_ttl(struct __sk_buff *skb, const struct packet *p)
{
    if (is_ipv6(p)) {
        struct ipv6hdr *ip = ipv6_header(skb);
        if (!ip)
            return false;
        ip->hop_limit = 64;
        return true;
    }
    struct iphdr *ip = ipv4_header(skb);
    if (!ip)
        return false;
    __u64 change = 0;
    __be16 *ttl_and_protocol = (__be16 *) &ip->ttl;
    put16(&change, ttl_and_protocol, bpf_htons(64 << 8 | IPPROTO_TCP));
    ipv4_sum_follows(ip, change);
    return true;
}

/* Changes flags, in byte 13 of the TCP header. Byte 12, the header's length, is the other half of
 * their checksum word. */
static __always_inline void put_flags(struct edit *e, struct tcphdr *tcp, __u8 clear, __u8 set)
{
    __be16 *field = (__be16 *) ((void *) tcp + 12);
    put16(&e->plain, field, (*field & ~bpf_htons(clear)) | bpf_htons(set));
}

/*
 * Removes a packet's VLAN tag (IEEE 802.1Q). The kernel has moved the tag from the frame to the skb
 * before we see it, and puts it back when the packet leaves by any link. The tag belongs to the
 * link on which the packet came in. On the link by which we send the packet, it means something
 * else, or nothing. Packets for this host's stack keep the tag, because the stack finds its
 * sub-interface by it. A second tag (802.1ad) stays in the frame, where the IP protocol would be,
 * and parse() refuses a packet with one.
 */
static __always_inline bool leaves_its_vlan(struct __sk_buff *skb)
{
    return !skb->vlan_present || !bpf_skb_vlan_pop(skb);
}

/* ---- checksums ---- */

static __always_inline __u32 checksum_offset(const struct packet *p)
{
    return p->transport + TCP_CHECKSUM_AT;
}

static __always_inline bool sums_follow(struct __sk_buff *skb, const struct packet *p,
                                        const struct edit *e)
{
    __u32 at = checksum_offset(p);
    if (e->plain && bpf_l4_csum_replace(skb, at, 0, fold32(e->plain), 0))
        return false;
    return !e->pseudo || !bpf_l4_csum_replace(skb, at, 0, fold32(e->pseudo), BPF_F_PSEUDO_HDR);
}

static __always_inline __s32 load_checksum(struct __sk_buff *skb, const struct packet *p)
{
    __sum16 *field = tcp_field(skb, p, TCP_CHECKSUM_AT, sizeof(*field));
    return field ? *field : -1;
}

/* Whether a packet is CHECKSUM_PARTIAL. The helper leaves the checksum field of such a packet alone
 * when something outside the pseudo header changes, so one change is tried. Any other packet has a
 * wrong checksum afterwards, and the caller computes it anew. */
static __always_inline bool is_partial(struct __sk_buff *skb, const struct packet *p)
{
    __s32 before = load_checksum(skb, p);
    bpf_l4_csum_replace(skb, checksum_offset(p), 0, 1, 0);
    return load_checksum(skb, p) == before;
}

/* Returns the sum that the checksum of a TCP packet without data is made from, pseudo header
 * included. */
static __noinline int header_sum(struct __sk_buff *skb, const struct packet *p)
{
    __u64 sum = bpf_htons(IPPROTO_TCP);
    sum += bpf_htons(p->header_bytes);

    if (is_ipv6(p)) {
        struct ipv6hdr *ip = ipv6_header(skb);
        if (!ip)
            return 0;
        for (int i = 0; i < 4; i++)
            sum += (__u64) ip->saddr.in6_u.u6_addr32[i] + ip->daddr.in6_u.u6_addr32[i];
    } else {
        struct iphdr *ip = ipv4_header(skb);
        if (!ip)
            return 0;
        sum += (__u64) ip->saddr + ip->daddr;
    }
    for (__u32 at = 0; at < TCP_HEADER_MAX && at < p->header_bytes; at += 4) {
        __u32 *word = tcp_field(skb, p, at, sizeof(*word));
        if (!word)
            return 0;
        sum += *word;
    }
    return fold16(sum);
}

/*
 * Removes the data of a packet, and brings its lengths and checksums up to date, with the changes
 * in `e`. The data is not read: a checksum that is not partial is computed anew.
 */
static __noinline int cut_payload(struct __sk_buff *skb, const struct packet *p, struct edit *e)
{
    __be16 old_bytes = bpf_htons(p->header_bytes + p->payload_bytes);
    __be16 new_bytes = bpf_htons(p->header_bytes);

    if (bpf_skb_change_tail(skb, p->transport + p->header_bytes, 0))
        return -1;
    if (is_ipv6(p)) {
        struct ipv6hdr *ip = ipv6_header(skb);
        if (!ip)
            return -1;
        ip->payload_len = bpf_htons(p->transport - ETHERNET_BYTES - sizeof(*ip) + p->header_bytes);
    } else {
        struct iphdr *ip = ipv4_header(skb);
        if (!ip)
            return -1;
        __u64 change = 0;
        put16(&change, &ip->tot_len, bpf_htons(p->transport - ETHERNET_BYTES + p->header_bytes));
        ipv4_sum_follows(ip, change);
    }
    put16(&e->pseudo, &old_bytes, new_bytes);
    if (is_partial(skb, p)) {
        e->plain = 0;
        return sums_follow(skb, p, e) ? 0 : -1;
    }
    __sum16 *field = tcp_field(skb, p, TCP_CHECKSUM_AT, sizeof(*field));
    if (!field)
        return -1;
    *field = 0;
    __u16 sum = ~header_sum(skb, p);
    field = tcp_field(skb, p, TCP_CHECKSUM_AT, sizeof(*field));
    if (!field)
        return -1;
    *field = sum;
    return 0;
}

#endif
