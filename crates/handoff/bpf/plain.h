/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * Client packets with IP options, IPv6 extension headers, or in fragments. They pass here before
 * the kernel reassembles fragments. Only the first fragment has the TCP header. The checksum in it
 * covers all fragments, but can be updated for a change of the header alone (RFC 1624). So the
 * frontend's stack gets such packets translated, but otherwise as they came.
 *
 * Packets for a backend, or back to the client, are made plain first: a backend needs the TCP
 * header alone, and drops anything else (be_in).
 */
#ifndef PLAIN_H
#define PLAIN_H

#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "decisions/numbers.h"
#include "decisions/packet.h"
#include "edit.h"

static __always_inline bool store_plain_ipv4(struct __sk_buff *skb, __u32 extra)
{
    struct iphdr *ip = ipv4_header(skb);
    __u32 sum = 0;

    if (!ip)
        return false;
    *(__u8 *) ip = 4 << 4 | sizeof(*ip) / 4;
    ip->tot_len = bpf_htons(bpf_ntohs(ip->tot_len) - extra);
    ip->frag_off = 0;
    ip->check = 0;
    __be16 *words = (__be16 *) ip;
    for (int i = 0; i < sizeof(*ip) / 2; i++)
        sum += words[i];
    ip->check = ~fold16(sum);
    return true;
}

static __always_inline bool store_plain_ipv6(struct __sk_buff *skb, __u32 extra)
{
    struct ipv6hdr *ip = ipv6_header(skb);

    if (!ip)
        return false;
    ip->nexthdr = IPPROTO_TCP;
    ip->payload_len = bpf_htons(bpf_ntohs(ip->payload_len) - extra);
    return true;
}

/*
 * Removes what lies between the IP and the TCP header, and the flag that more fragments follow. The
 * TCP checksum of a first fragment is wrong afterwards. It is computed anew when the caller cuts
 * the packet's data off (cut_payload).
 */
static __noinline int make_plain(struct __sk_buff *skb, struct packet *p)
{
    __u32 plain = ETHERNET_BYTES + (is_ipv6(p) ? sizeof(struct ipv6hdr) : sizeof(struct iphdr));
    __u32 extra = p->transport - plain;

    if (extra > TRANSPORT_MAX)
        return -1;
    if (extra && bpf_skb_adjust_room(skb, -(__s32) extra, BPF_ADJ_ROOM_NET, 0))
        return -1;
    if (is_ipv6(p) ? !store_plain_ipv6(skb, extra) : !store_plain_ipv4(skb, extra))
        return -1;
    p->transport = plain;
    p->is_odd = 0;
    return 0;
}

#endif
