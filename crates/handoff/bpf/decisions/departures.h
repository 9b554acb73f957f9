/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * Segments of the frontend's kernel on their way to a client: translated from LOCAL numbers, which
 * that kernel counts, to CLIENT numbers, which the client sees. While a region is open (a range of
 * numbers that a backend sends), only repeated headers, pure ACKs, probes and resets of the
 * frontend leave. A flow is the connection's record in the map `flows`.
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
    ACK_MOVED,  /* a pure ACK; its sequence number becomes the right edge of the client's window */
    RST_MOVED,  /* a reset, moved to the number where the client accepts it (reset.h) */
    FIN_TO_RST, /* turned into a reset: the server has ended inside a response */
    ACK_HELD,   /* a pure ACK, dropped: the client must not see it yet (may_acknowledge) */
    UNTOUCHED,
    DROPPED,
    WAITS, /* kept in the server's queue (behind.h) */
};

/* Number of bytes by which the frontend's ACKs may exceed the ACK number that it had when the
 * region began (may_acknowledge). */
#define ACK_AHEAD_BYTES 16384

struct departure {
    enum fate fate;
    __u32 seq;
    __u32 edge; /* of a reset: right edge of the window; of a probe: the client's ACK number */
    __u32 tsval;
    bool cancelled; /* the segment has ended an active region */
    bool cut_fin;   /* the segment leaves without its FIN */
    bool unheard;   /* neither side has sent a packet for UNHEARD_NS */
    bool asks;      /* a probe is sent in place of the segment */
    bool given_up;  /* the region makes no progress: nobody seems to send it (is_given_up) */
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
 * Whether the frontend may send an ACK to the client. The backend's first segments still have the
 * ACK number of the moment when the region began. A client that has seen a newer ACK drops a
 * segment, with its payload, if the segment's ACK number is older by more than the largest window
 * that the client was offered (RFC 5961, 5.2). The client's first ACK of the payload brings the
 * backend the frontend's newest ACK number. Until then, the frontend acknowledges at most
 * ACK_AHEAD_BYTES more than when the region began: any such window is larger.
 */
static __always_inline bool may_acknowledge(const struct flow *flow, __u32 ack)
{
    return flow->spaces.status != SHUNT_REGION_ACTIVE || flow->spaces.acked ||
           !is_before(flow->rcv_nxt + ACK_AHEAD_BYTES, ack);
}

/* Keeps a segment in the server's queue if it lies behind the region. The client's next ACK then
 * goes to the server's kernel, and tells it that there is no window. */
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
 * Decides on a segment while the newest region is open. If the client is given up (is_given_up),
 * any segment becomes a reset. Otherwise, if the server may write behind the region,
 * depart_queueing handles its bytes and FINs. Any other FIN becomes a reset, because it ends the
 * response early. The kernel repeats its FIN only if the client has acknowledged all before it, and
 * has room. Otherwise it repeats the header, or probes the window. After a cancel, these segments
 * become resets, too. Pure ACKs otherwise never become resets: a client that opens a new connection
 * from the same port takes an ACK for a sign of the old connection, and resets that one (RFC 9293,
 * 3.5.2).
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
        /* The kernel repeats the header, because it has not got the client's ACK of it. The next
         * ACK must reach the kernel. */
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

    d->unheard = is_longer_ago(flow->last_seen_ns, now, UNHEARD_NS);
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
        d->fate = UNTOUCHED; /* its numbers are from a client's packet that fe_in left unchanged */
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
