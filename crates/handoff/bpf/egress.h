/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * Segments of the frontend's kernel on their way to a client: rewritten as decisions/departures.h
 * says. CLIENT are the sequence numbers that the client sees, LOCAL those of this kernel.
 */
#ifndef EGRESS_H
#define EGRESS_H

#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "counters.h"
#include "decisions/departures.h"
#include "decisions/numbers.h"
#include "decisions/packet.h"
#include "edit.h"
#include "flows.h"
#include "marks.h"
#include "parse.h"
#include "proof.h"
#include "reset.h"
#include "steering.h"

static __always_inline void count_departure(const struct packet *p, const struct departure *d)
{
    if (d->fate == TRANSLATED)
        count(FE_OUT_TRANSLATED);
    else if (d->fate == ACK_MOVED)
        count(FE_OUT_ACK_MOVED);
    else if (d->fate == ACK_HELD)
        count(FE_OUT_ACK_HELD);
    else if (d->fate == RST_MOVED)
        count(FE_OUT_RST_MOVED);
    else if (d->fate == FIN_TO_RST)
        count(FE_OUT_FIN_TO_RST);
    else if (d->fate == WAITS)
        count(FE_OUT_WAITS);
    else if (d->fate == DROPPED)
        count(FE_DROP_EARLY_WRITE);
    if (d->cancelled)
        count(FE_CANCELLED);
    if (d->tsval != p->tsval)
        count(FE_OUT_TS_RAISED);
}

static __noinline bool rewrite_departure(struct __sk_buff *skb, const struct packet *p,
                                         const struct departure *d)
{
    struct edit e = {};
    struct tcphdr *tcp = tcp_header(skb, p);
    if (!tcp)
        return false;
    if (d->seq != p->seq)
        put32(&e.plain, &tcp->seq, bpf_htonl(d->seq));
    if (d->fate == FIN_TO_RST)
        put_flags(&e, tcp, TH_FIN | TH_PSH | TH_URG, TH_RST | TH_ACK);
    if (d->cut_fin)
        put_flags(&e, tcp, TH_FIN, 0);
    if (d->tsval != p->tsval) {
        __be32 *tsval = tcp_field(skb, p, p->timestamps, sizeof(*tsval));
        if (!tsval)
            return false;
        put_option32(&e.plain, p->timestamps, tsval, bpf_htonl(d->tsval));
    }
    if (d->fate == FIN_TO_RST && p->payload_bytes)
        return cut_payload(skb, p, &e) == 0;
    return sums_follow(skb, p, &e);
}

/* Sends the client a probe in place of a segment that must not leave. */
static __noinline void ask_client(struct __sk_buff *skb, const struct packet *p, __u32 client_ack)
{
    struct edit e = {};
    struct tcphdr *tcp = tcp_header(skb, p);
    if (!tcp)
        return;
    put32(&e.plain, &tcp->seq, bpf_htonl(client_ack - 1));
    put_flags(&e, tcp, TH_FIN | TH_PSH | TH_URG, TH_ACK);
    if (p->payload_bytes ? cut_payload(skb, p, &e) : !sums_follow(skb, p, &e))
        return;
    put_mark(skb, RESET_MARK);
    bpf_clone_redirect(skb, skb->ifindex, 0);
}

SEC("tc")
int fe_out(struct __sk_buff *skb)
{
    struct packet p;

    if (take_mark(skb, RESET_MARK) != NOT_MARKED)
        return PASS;
    /* A forwarded packet may be a backend's segment, which is already in CLIENT space. */
    if (skb->ingress_ifindex || !parse(skb, &p))
        return PASS;
    if (p.flags & TH_SYN) {
        note_syn_ack(&p);
        return PASS;
    }
    struct flow *flow = flow_of_servers(p.source, p.source_port, p.destination, p.destination_port);
    if (!flow)
        return PASS;

    __u64 now = bpf_ktime_get_coarse_ns();
    struct departure d = {};
    bpf_spin_lock(&flow->lock);
    depart(flow, &p, now, &d);
    bpf_spin_unlock(&flow->lock);

    count_departure(&p, &d);
    if (d.asks)
        ask_client(skb, &p, d.edge);
    if (d.fate == DROPPED || d.fate == ACK_HELD || d.fate == WAITS)
        return TC_ACT_SHOT;
    if (d.fate == UNTOUCHED)
        return PASS;
    bool is_reset = d.fate == RST_MOVED || d.fate == FIN_TO_RST;
    if (!rewrite_departure(skb, &p, &d) || (is_reset && !spread_reset(skb, &p, d.edge))) {
        count(FE_DROP_REWRITE);
        return TC_ACT_SHOT;
    }
    return PASS;
}

#endif
