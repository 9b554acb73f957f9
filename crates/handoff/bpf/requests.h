/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * Requests of the agent about flows, which are the records of client connections in the map
 * `flows`. The programs get no packets: the agent runs them (BPF_PROG_TEST_RUN) with its request
 * behind an Ethernet header. The reason is that packets change flows at any time. User space can
 * neither change a single field of a flow, nor delete a flow on the condition that it is unchanged.
 *
 * A region is a range of a flow's sequence numbers that a backend sends, for one handoff. The
 * requests are structs of steering.h.
 */
#ifndef REQUESTS_H
#define REQUESTS_H

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/pkt_cls.h>

#include <bpf/bpf_helpers.h>

#include "counters.h"
#include "decisions/arrivals.h"
#include "decisions/requests.h"
#include "edit.h"
#include "flows.h"
#include "ingress.h"
#include "steering.h"

/* Sets how many payload bytes may lie between two ACKs that a flow's backend gets. Request: struct
 * spacing. */
SEC("tc")
int fe_spacing(struct __sk_buff *skb)
{
    struct spacing *spacing = (void *) (long) skb->data + sizeof(struct ethhdr);
    if ((void *) (spacing + 1) > (void *) (long) skb->data_end)
        return TC_ACT_SHOT;
    struct flow_key key = spacing->flow;
    __u32 peer = spacing->peer;
    __u32 bytes = spacing->bytes;
    struct flow *flow = bpf_map_lookup_elem(&flows, &key);
    if (!flow)
        return TC_ACT_SHOT;
    bpf_spin_lock(&flow->lock);
    bool its_own = space_acks(flow, peer, bytes);
    bpf_spin_unlock(&flow->lock);
    return its_own ? PASS : TC_ACT_SHOT;
}

/* Notes a backend's confirmation that the client has acknowledged a whole payload. Request: struct
 * delivery. The region is complete once fe_in has seen the client's ACK of its end, too. */
SEC("tc")
int fe_delivered(struct __sk_buff *skb)
{
    struct delivery *delivery = (void *) (long) skb->data + sizeof(struct ethhdr);
    if ((void *) (delivery + 1) > (void *) (long) skb->data_end)
        return TC_ACT_SHOT;
    struct flow_key key = delivery->flow;
    __u32 peer = delivery->peer;
    __u64 handoff = delivery->handoff;
    struct route r = {.copy = NO_BREAK};
    struct flow *flow = bpf_map_lookup_elem(&flows, &key);
    if (!flow)
        return TC_ACT_SHOT;
    bpf_spin_lock(&flow->lock);
    bool is_its_own = deliver(flow, peer, handoff, &r);
    bpf_spin_unlock(&flow->lock);
    if (!is_its_own)
        return TC_ACT_SHOT;
    count(FE_DELIVERED);
    if (r.event.kind)
        report(&r);
    return PASS;
}

/* Cancels the region of a handoff. Request: struct cancelling. If the server's kernel then still
 * sends a segment other than a pure ACK, fe_out turns that segment into a reset. */
SEC("tc")
int fe_cancel(struct __sk_buff *skb)
{
    struct cancelling *cancelling = (void *) (long) skb->data + sizeof(struct ethhdr);
    if ((void *) (cancelling + 1) > (void *) (long) skb->data_end)
        return TC_ACT_SHOT;
    struct flow_key key = cancelling->flow;
    __u64 handoff = cancelling->handoff;
    struct flow *flow = bpf_map_lookup_elem(&flows, &key);
    if (!flow)
        return TC_ACT_SHOT;
    bpf_spin_lock(&flow->lock);
    bool is_its_own = cancel_handoff(flow, handoff);
    bpf_spin_unlock(&flow->lock);
    if (is_its_own)
        count(FE_CANCELLED);
    return is_its_own ? PASS : TC_ACT_SHOT;
}

/* Deletes a flow, if no packet has come since the agent read it. So the flow of a newer connection
 * with the same addresses and ports stays. Request: struct forgetting. */
SEC("tc")
int fe_forget(struct __sk_buff *skb)
{
    struct forgetting *forgetting = (void *) (long) skb->data + sizeof(struct ethhdr);
    if ((void *) (forgetting + 1) > (void *) (long) skb->data_end)
        return TC_ACT_SHOT;
    struct flow_key key = forgetting->flow;
    __u64 last_seen_ns = forgetting->last_seen_ns;
    struct flow *flow = bpf_map_lookup_elem(&flows, &key);
    if (!flow)
        return TC_ACT_SHOT;
    bpf_spin_lock(&flow->lock);
    bool is_same = flow->last_seen_ns == last_seen_ns;
    bpf_spin_unlock(&flow->lock);
    if (!is_same)
        return TC_ACT_SHOT;
    bpf_map_delete_elem(&flows, &key);
    return PASS;
}

#endif
