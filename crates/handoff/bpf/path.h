/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * Reports of a smaller path MTU (icmp.h) as they arrive at the frontend, passed on as
 * decisions/reports.h says. An active region is a range of sequence numbers that a backend is
 * sending.
 */
#ifndef PATH_H
#define PATH_H

#include <linux/bpf.h>
#include <linux/pkt_cls.h>

#include <bpf/bpf_helpers.h>

#include "counters.h"
#include "decisions/numbers.h"
#include "decisions/reports.h"
#include "decisions/spaces.h"
#include "edit.h"
#include "flows.h"
#include "icmp.h"
#include "steering.h"

static __always_inline int report_to_backend(struct __sk_buff *skb, const struct too_big *t,
                                             __u32 sender)
{
    struct edit e = {};
    struct steer_peer *peer = bpf_map_lookup_elem(&peers, &sender);

    if (!peer)
        return TC_ACT_SHOT;
    const __u32 *address = (const __u32 *) (is_icmpv6(t) ? peer->ipv6 : peer->ipv4);
    if (!leaves_its_vlan(skb) || !put_report_addresses(skb, t, &e, t->source, address) ||
        !put_cited_source(skb, t, &e, address, peer->port) || !icmp_sum_follows(skb, t, &e)) {
        count(FE_DROP_REWRITE);
        return TC_ACT_SHOT;
    }
    count(FE_IN_TOO_BIG);
    return bpf_redirect_neigh(is_icmpv6(t) ? peer->ipv6_ifindex : peer->ipv4_ifindex, NULL, 0, 0);
}

static __always_inline int report_to_server(struct __sk_buff *skb, const struct too_big *t,
                                            __u32 local)
{
    struct edit e = {};

    if (local != t->seq && (!put_cited_seq(skb, t, &e, local) || !icmp_sum_follows(skb, t, &e))) {
        count(FE_DROP_REWRITE);
        return TC_ACT_SHOT;
    }
    return PASS;
}

/* Handles a packet that parse() refuses. A report of a smaller path MTU on a known connection (map
 * `flows`) goes to its backend or to the frontend's stack, or is dropped. All other packets are
 * passed on. */
static __noinline int steer_report(struct __sk_buff *skb)
{
    struct too_big t = {};

    if (!load_too_big(skb, &t))
        return PASS;
    struct flow *flow = flow_of_servers(t.source, t.source_port, t.destination, t.destination_port);
    if (!flow)
        return PASS;
    bpf_spin_lock(&flow->lock);
    enum cites which = cites(flow, t.seq);
    __u32 sender = nth_break(&flow->spaces, 0)->peer;
    __u32 local = to_local(&flow->spaces, t.seq);
    bpf_spin_unlock(&flow->lock);
    if (which == OUTSTANDING_PAYLOAD)
        return report_to_backend(skb, &t, sender);
    if (which == SERVERS_BYTE)
        return report_to_server(skb, &t, local);
    count(FE_DROP_TOO_BIG);
    return TC_ACT_SHOT;
}

#endif
