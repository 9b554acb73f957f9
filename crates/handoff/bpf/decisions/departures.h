/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * Segments of the frontend's kernel on their way to a client: from LOCAL to CLIENT space. While a
 * region is open, the frontend sends nothing but repeated headers, pure ACKs, and a reset.
 */
#ifndef DEPARTURES_H
#define DEPARTURES_H

#include "../../../../include/shunt.h"
#include "../steering.h"
#include "behind.h"
#include "claims.h"
#include "numbers.h"
#include "packet.h"
#include "proof.h"
#include "spaces.h"

/* Outcomes for a segment. */
enum fate {
    TRANSLATED,
    ACK_MOVED,  /* a pure ACK, moved to the right edge of the window: never old, never data */
    RST_MOVED,  /* a reset, moved to the number where the client accepts it (reset.h) */
    FIN_TO_RST, /* made a reset: the server has ended after half a response */
    ACK_HELD,   /* dropped, see may_acknowledge */
    UNTOUCHED,
    DROPPED,
    WAITS, /* kept in the server's queue (behind.h) */
};

#define ACK_AHEAD_BYTES 16384

struct departure {
    enum fate fate;
    __u32 seq;
    __u32 edge; /* of a reset: right edge of the window; of a probe: the client's ACK number */
    __u32 tsval;
    bool cancelled;
    bool cut_fin;
    bool unheard;  /* neither side has sent a packet for UNHEARD_NS */
    bool asks;     /* a probe is sent in its place */
    bool given_up; /* nobody sends the region any more */
};

static __always_inline void cancel_region(struct flow *flow, struct departure *d)
{
    d->cancelled = flow->spaces.status == SHUNT_REGION_ACTIVE;
    flow->spaces.status = SHUNT_REGION_CANCELLED;
}

static __always_inline void translate(struct flow *flow, __u32 seq, __u32 end, struct departure *d)
{
    d->fate = to_client(&flow->spaces, seq, end, &d->seq) ? TRANSLATED : DROPPED;
}

/*
 * Whether an ACK may leave. The backend's first segments acknowledge what the frontend had received
 * when the region began. A client that has seen a newer ACK takes one that is older than its window
 * for forged (RFC 5961, 5.2), and drops the payload with it. The backend learns the newest number
 * from the client's first ACK of the payload. Until then the frontend acknowledges no more than any
 * window covers.
 */
static __always_inline bool may_acknowledge(const struct flow *flow, __u32 ack)
{
    return flow->spaces.status != SHUNT_REGION_ACTIVE || flow->spaces.acked ||
           !is_before(flow->rcv_nxt + ACK_AHEAD_BYTES, ack);
}

/* Keeps a segment in the server's queue where it lies behind the region. The client's next ACK then
 * tells the server's kernel that there is no window. */
static __always_inline void depart_queueing(struct flow *flow, const struct packet *p, __u32 end,
                                            struct departure *d)
{
    if (lies_behind(flow, p, end)) {
        d->fate = WAITS;
        d->asks = d->unheard;
        d->edge = flow->client_ack;
        flow->flags &= ~FLOW_START_ACKED;
        return;
    }
    d->cut_fin = p->flags & TH_FIN;
    translate(flow, p->seq, end, d);
}

/*
 * A segment while the newest region is open. The kernel repeats a FIN only where the client has
 * acknowledged what lies before it and has room: else it repeats the header, or probes the window.
 * After a cancel these become resets, too. Pure ACKs stay what they are: a client that opens a new
 * connection from the same port takes an ACK for a sign of the old connection, and resets that (RFC
 * 9293, 3.5.2).
 */
static __always_inline void depart_open(struct flow *flow, const struct packet *p, __u32 end,
                                        struct departure *d)
{
    __u32 local = nth_break(&flow->spaces, 0)->local;
    bool repeats = p->payload_bytes || is_before(p->seq, local);

    if (!d->given_up && is_queueing(flow) && !(p->flags & TH_RST) &&
        (p->payload_bytes || p->flags & TH_FIN)) {
        depart_queueing(flow, p, end, d);
        return;
    }
    d->seq = flow->client_ack;
    if (p->flags & (TH_RST | TH_FIN) || d->given_up ||
        (repeats && flow->spaces.status == SHUNT_REGION_CANCELLED)) {
        d->fate = p->flags & TH_RST ? RST_MOVED : FIN_TO_RST;
        d->edge = client_edge(flow);
        cancel_region(flow, d);
        flow->flags |= FLOW_SERVER_FIN;
    } else if (p->payload_bytes) {
        if (is_before(local, end)) {
            d->fate = DROPPED;
            return;
        }
        /* The kernel repeats the header: it has not got the client's ACK of it, which has passed
         * here. */
        translate(flow, p->seq, end, d);
        flow->flags &= ~FLOW_START_ACKED;
    } else if (is_before(p->seq, local)) {
        /* A keepalive probe. The next ACK must reach the kernel, or it takes its client for
         * dead. */
        translate(flow, p->seq, end, d);
        flow->flags &= ~FLOW_START_ACKED;
        flow->asked++;
    } else {
        d->fate = may_acknowledge(flow, p->ack) ? ACK_MOVED : ACK_HELD;
        d->seq = client_edge(flow);
    }
}

/* Decides what becomes of a segment at the time `now`. Notes in the flow what the segment says. */
static __always_inline void depart(struct flow *flow, const struct packet *p, __u64 now,
                                   struct departure *d)
{
    __u32 end = p->seq + p->payload_bytes;

    d->unheard = now - flow->last_seen_ns > UNHEARD_NS;
    d->given_up = is_queueing(flow) && is_given_up(flow, now);
    flow->last_seen_ns = now;
    if (p->flags & TH_ACK)
        note_server_ack(flow, p->ack);
    note_segment(flow, end);
    if (p->flags & TH_ACK)
        flow->server_edge =
            later(flow->server_edge, p->ack + ((__u32) p->window << flow->rcv_wscale));
    d->tsval = p->timestamps ? not_behind_echo(flow, p->tsval) : p->tsval;

    if (p->flags & TH_RST && flow->flags & FLOW_RESET) {
        d->fate = UNTOUCHED; /* it has the client's own numbers, from a packet that passed fe_in */
    } else if (is_open(&flow->spaces)) {
        depart_open(flow, p, end, d);
    } else {
        translate(flow, p->seq, end, d);
        if (d->fate == TRANSLATED && p->payload_bytes)
            move_anchor(&flow->spaces, p->seq, d->seq);
    }
    if (p->flags & TH_RST)
        flow->flags |= FLOW_RESET;
    if (p->flags & TH_FIN && d->fate != WAITS && !d->cut_fin)
        flow->flags |= FLOW_SERVER_FIN;
}

#endif
