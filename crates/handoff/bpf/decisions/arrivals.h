/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * Client packets as they arrive at the frontend: who gets which. A flow is a client connection, and
 * a region a range of its sequence numbers that a backend sends. A break is the record of a region.
 * A copy is a packet as fe_in rewrites it for the backend. LOCAL are the sequence numbers of the
 * frontend's kernel. While a region is active:
 *
 *   packet                                   frontend's stack           the region's backend
 *   ACK at or below the region's start       yes                        only if its SACK blocks
 *                                                                       lie in the region, it
 *                                                                       repeats the ACK of the
 *                                                                       start (without SACK), or
 *                                                                       it opens the window
 *   first ACK past the start                 yes, clamped               yes
 *   later pure ACKs inside the region        no                         yes, each that it needs
 *   of these, probes                         yes, clamped: only the     yes
 *                                            frontend can answer
 *   ACK at the end                           yes; clamped, if the       yes
 *                                            backend's confirmation is
 *                                            missing (claims.h)
 *   ACK past the end, or past the window     no: nobody sent that       no
 *   that the client has had (claims.h)
 *   data, FIN, URG                           yes, clamped               its ACK, without data
 *   RST at the next sequence number, or      yes, with the next         yes
 *   at one that the backend knows            sequence number
 *
 * Clamped: the packet's ACK number becomes the region's start, because the frontend's kernel has
 * sent nothing behind that.
 *
 * If no region is active, all packets go to the frontend, translated. A report of duplicates in an
 * older region (RFC 2883) goes to that region's backend, too: the backend has sent bytes again,
 * because the client's last ACK was lost. If the server has ended in the middle of a response, each
 * packet is answered by a reset (../reset.h).
 *
 * A backend with a large window needs few ACKs, and tells the frontend so. fe_in, the frontend's
 * program on ingress, then drops the others (ack_may_wait).
 *
 * Packets with IP options or extension headers, and first fragments, are routed like all others
 * (../plain.h). All fragments behind the first go to the stack unchanged.
 */
#ifndef ARRIVALS_H
#define ARRIVALS_H

#include "../../../../include/shunt.h"
#include "../steering.h"
#include "behind.h"
#include "claims.h"
#include "numbers.h"
#include "packet.h"
#include "spaces.h"

/* Time in nanoseconds. If two ACKs are apart by no more than this time and a round trip, no sender
 * has timed out in between: a timeout takes a round trip and at least 200 ms (RTO_MIN). The round
 * trip is added because a silence of a round trip is normal on a long path: a sender sends its
 * whole window at once, and the ACKs of the window come together. */
#define SILENCE_NS 100000000

struct route {
    bool server;    /* the frontend's stack gets the packet */
    bool nobody;    /* drop: acknowledges what nobody has sent */
    bool clamped;   /* the frontend's stack gets it with the region's start as ACK number */
    bool late;      /* the copy reports late duplicates to the backend of an older region */
    bool held;      /* drop: a pure ACK that the backend does not need */
    bool strange;   /* outside the window: the frontend's stack gets it, and drops it */
    bool ended;     /* drop, and answer by a reset: the server has ended inside a response */
    bool untouched; /* the stack gets it unchanged, and answers with numbers from the packet */
    bool behind;    /* a reset at an older number; the stack gets it with the expected number */
    int copy;       /* index of the break whose backend gets a copy, or NO_BREAK */
    __u32 ack;      /* ACK number for the frontend, LOCAL space */
    __u16 window;   /* window field for the frontend */
    __u32 ring;     /* number of the server's ring (BPF ring buffer), which gets `event` */
    struct shunt_event event; /* kind 0: no event */
};

static __always_inline int break_index(const struct spaces *s, __u32 n)
{
    return (s->made - 1 - n) & (BREAKS - 1);
}

static __always_inline void end_region(struct flow *flow, struct route *r, __u32 status, __u32 kind)
{
    flow->spaces.status = status;
    flow->ahead = 0;
    r->event.kind = kind;
    r->event.handoff = flow->handoff;
    r->event.acked = flow->spaces.acked;
    r->ring = flow->ring;
}

/* Routes a reset. It counts only at the next expected sequence number (RFC 5961, 3.2), or at the
 * numbers in the newest two copies. The reason: a backend's segment acknowledges the number of the
 * newest copy. A client whose socket is gone answers that segment with a reset at the number that
 * the segment acknowledges. If the client has sent a FIN since the copy, that number is one less
 * than the next one. */
static __always_inline void route_reset(struct flow *flow, const struct packet *p, struct route *r)
{
    if (p->seq != flow->server_ack && p->seq != flow->copied[0] && p->seq != flow->copied[1])
        return;
    r->behind = p->seq != flow->server_ack;
    flow->flags |= FLOW_RESET;
    if (nth_break(&flow->spaces, 0)->length)
        r->copy = break_index(&flow->spaces, 0);
    if (flow->spaces.status == SHUNT_REGION_ACTIVE)
        end_region(flow, r, SHUNT_REGION_CANCELLED, SHUNT_EVENT_RESET);
}

/* Routes a report of duplicates, which is a first SACK block below the ACK number (RFC 2883). */
static __always_inline void route_late(const struct spaces *s, const struct packet *p,
                                       const struct sack *sack, struct route *r)
{
    if (sack->blocks == 0 || !is_before(sack->left[0], sack->right[0]) ||
        is_before(p->ack, sack->right[0]))
        return;
    int n = region_of(s, sack->left[0], sack->right[0]);
    if (n == NO_BREAK)
        return;
    r->copy = break_index(s, n);
    r->late = true;
}

static __always_inline bool reaches_region(const struct spaces *s, const struct sack *sack)
{
    for (int i = 0; i < SACK_BLOCKS_MAX; i++)
        if (i < sack->blocks && nth_position(s, 0, sack->right[i]) > 0)
            return true;
    return false;
}

/*
 * Whether a backend can do without an ACK. An ACK that only advances tells the backend's socket
 * (the sender) to continue. A sender whose window is many times the distance of two ACKs need not
 * wait for each. The distance is ack_spacing payload bytes, at most a quarter of the sender's
 * congestion window. note_passed also bounds it by a quarter of the client's window.
 *
 * Signs of loss or congestion shrink a congestion window, so from the first sign on every ACK goes
 * to the backend. In each jiffy (tick of the coarse clock) in which ACKs come, at least one goes to
 * the backend: the timers of a paced sender are longer. If a sender pauses to wait for its disk,
 * the last ACK before the pause may have been dropped. The sender then repeats a segment as a probe
 * (RFC 8985, 7). The client has that segment, and its report of the duplicate counts as a sign of
 * loss, too.
 */
static __always_inline bool ack_may_wait(struct flow *flow, const struct packet *p,
                                         const struct sack *sack, __u64 at, __u64 now)
{
    bool duplicate = at == flow->spaces.acked && p->window == flow->client_window;
    bool silence = is_longer_ago(flow->passed_ns, now, SILENCE_NS + flow->srtt_us * 1000ll);

    if (sack->blocks || p->flags & TH_ECE || duplicate || silence)
        flow->ack_spacing = 0;
    return flow->ack_spacing && at > flow->spaces.acked && at < flow->hold_until &&
           now == flow->passed_ns;
}

/* Notes an ACK that goes to its backend. */
static __always_inline void note_passed(struct flow *flow, const struct packet *p, __u64 at,
                                        __u64 now)
{
    __u64 quarter = ((__u64) p->window << flow->snd_wscale) / 4;

    flow->passed_ns = now;
    flow->hold_until = at + (quarter < flow->ack_spacing ? quarter : flow->ack_spacing);
}

/*
 * Whether a packet is a probe: its sequence number lies before the next expected one. With a probe
 * a client asks whether the frontend is still there (RFC 9293, 3.8.4) or has opened its window
 * (3.8.6.1). Only the frontend's stack can answer.
 */
static __always_inline bool is_probe(const struct flow *flow, const struct packet *p)
{
    return is_before(p->seq, flow->server_ack);
}

/*
 * Whether an ACK at the region's start opens a window that the backend waits for. A backend knows
 * the client's window of the moment when the region began (snd_wnd). If that window has room for
 * the backend's first flight, or for the whole payload, the backend does not wait: the ACKs of
 * these bytes bring it newer windows. Later ACKs that open the window count, too, because the first
 * one may come before the backend has its socket.
 */
static __always_inline bool opens_window(const struct flow *flow, const struct packet *p)
{
    __u64 length = nth_break(&flow->spaces, 0)->length;
    __u64 flight = (__u64) flow->snd_cwnd * flow->mss;
    __u32 window = (__u32) p->window << flow->snd_wscale;

    return window > flow->snd_wnd && flow->snd_wnd < length && flow->snd_wnd < flight;
}

/*
 * Whether a client without SACK repeats its ACK of the region's start. It does so when payload has
 * come, but not the first segment. The backend's kernel takes three of these for the loss of this
 * segment (RFC 5681, 3.2). Otherwise it would wait for a timeout, which is 3 s while it has no RTT.
 * With SACK, the blocks tell (reaches_region).
 */
static __always_inline bool repeats_start(const struct flow *flow, const struct packet *p, __s64 at,
                                          bool pure)
{
    return at == 0 && pure && !(flow->options & SHUNT_OPTION_SACK) && p->ack == flow->client_ack &&
           p->window == flow->client_window && !is_probe(flow, p);
}

/* Routes an ACK while a region is active. `at`: number of bytes of the region that it acknowledges;
 * negative, if its number lies before the region. */
static __always_inline void route_active(struct flow *flow, const struct packet *p,
                                         const struct sack *sack, __s64 at, __u64 now,
                                         struct route *r)
{
    struct spaces *s = &flow->spaces;
    __s64 length = nth_break(s, 0)->length;
    bool pure = p->payload_bytes == 0 && !(p->flags & (TH_FIN | TH_URG));

    if (at > length) {
        r->nobody = true;
        return;
    }
    r->server = true;
    if (at <= 0) {
        bool lost = reaches_region(s, sack) || repeats_start(flow, p, at, pure);
        if (lost)
            flow->ack_spacing = 0;
        if (lost || (at == 0 && opens_window(flow, p)))
            r->copy = break_index(s, 0);
        else
            route_late(s, p, sack, r);
        return;
    }
    bool only_backend = pure && flow->flags & FLOW_START_ACKED && at < length;
    r->held = ack_may_wait(flow, p, sack, at, now) && only_backend && !is_probe(flow, p);
    if (r->held)
        return;
    r->copy = break_index(s, 0);
    note_passed(flow, p, at, now);
    if (at == length && claims_end(flow)) {
        end_region(flow, r, SHUNT_REGION_COMPLETE, SHUNT_EVENT_COMPLETE);
        return;
    }
    r->server = !only_backend || is_probe(flow, p);
    r->clamped = r->server;
    flow->flags |= FLOW_START_ACKED;
}

/* Routes a packet that acknowledges too much. If no region is open, the frontend's stack gets it:
 * then only the frontend's kernel sends on the connection, and it knows what has been sent. */
static __always_inline void route_too_much(const struct flow *flow, struct route *r)
{
    r->nobody = is_open(&flow->spaces);
    r->server = !r->nobody;
    r->strange = !r->nobody;
}

static __always_inline void route_ack(struct flow *flow, const struct packet *p,
                                      const struct sack *sack, __u64 now, struct route *r)
{
    __s64 at = nth_position(&flow->spaces, 0, p->ack);

    if (flow->spaces.status == SHUNT_REGION_ACTIVE) {
        route_active(flow, p, sack, at, now, r);
        if (r->nobody)
            return;
    } else if (flow->spaces.status == SHUNT_REGION_CANCELLED && flow->flags & FLOW_SERVER_FIN) {
        r->ended = true;
    } else {
        r->server = true;
        route_late(&flow->spaces, p, sack, r);
    }
    note_client(flow, p, at);
}

/*
 * Returns the LOCAL ACK number for the frontend's kernel. After SHUNT_TAKE the server itself sends
 * the rest of a lost backend's payload. The client may already have bytes of that backend behind a
 * hole. Once the kernel has filled the hole, the client's ACK is ahead of what the kernel has sent,
 * and the kernel would drop it (RFC 9293, 3.10.7.4). So the ACK's number is lowered to the end of
 * what the kernel has sent. be_in does the same for a backend that continues another one's payload.
 */
static __always_inline __u32 known_to_server(const struct flow *flow, __u32 ack)
{
    __u32 local = to_local(&flow->spaces, ack);
    __u32 sent = flow->server_end + !!(flow->flags & FLOW_SERVER_FIN);
    bool is_ahead = flow->ahead && !is_open(&flow->spaces) &&
                    !is_before(flow->start + flow->ahead, ack) && is_before(sent, local);

    return is_ahead ? sent : local;
}

/* Returns the window field for an ACK whose number is raised to a region's start. The right edge of
 * the window stays the same. Otherwise a backend would send beyond the client's window, and fe_in
 * would drop the client's ACKs of these bytes (claims_too_much), again and again. */
static __always_inline __u16 window_from(const struct packet *p, __u32 ack, __u8 scale)
{
    __u32 room = (__u32) p->window << scale;
    __u32 raised = is_before(p->ack, ack) ? ack - p->ack : 0;

    return room > raised ? (room - raised) >> scale : 0;
}

/* Decides who gets a client's packet. Notes in the flow what the packet says. */
static __always_inline void route(struct flow *flow, const struct packet *p,
                                  const struct sack *sack, __u64 now, struct route *r)
{
    flow->last_seen_ns = now;
    r->untouched = flow->flags & FLOW_RESET || !(p->flags & (TH_ACK | TH_RST));
    r->ack = p->ack;
    r->window = p->window;
    if (!r->untouched && p->flags & TH_RST) {
        r->server = true;
        route_reset(flow, p, r);
    } else if (!r->untouched && !is_acceptable(flow, p)) {
        r->server = true; /* the kernel drops it, and answers with the number that it expects */
        r->strange = true;
    } else if (!r->untouched && claims_too_much(flow, p, sack)) {
        route_too_much(flow, r);
    } else if (!r->untouched) {
        route_ack(flow, p, sack, now, r);
    }
    if (p->flags & TH_ACK)
        r->ack = known_to_server(flow, p->ack);
    if (p->flags & TH_ACK && !(p->flags & TH_RST) && is_queueing(flow))
        r->window = window_before(flow, r->ack, p->window);
}

/* Numbers of a copy for a backend. */
struct copy {
    struct region region;
    __u32 ack;
    __u32 server_ack;
    __u16 window;
    __u16 token;
};

/* Makes the numbers of a copy, and notes them in the flow. `index`: index in the flow's `breaks` of
 * the payload that the copy is for. */
static __always_inline void copy_for_backend(struct flow *flow, const struct packet *p, __u32 index,
                                             struct copy *copy)
{
    __u32 n = (flow->spaces.made - 1 - index) & (BREAKS - 1);

    copy->region = nth_region(&flow->spaces, n);
    copy->ack = clamp_to(&copy->region, p->ack);
    copy->server_ack = flow->server_ack;
    copy->token = flow->token;
    copy->window = window_from(p, copy->ack, flow->snd_wscale);
    flow->copied[1] = flow->copied[0];
    flow->copied[0] = copy->server_ack;
}

/* Cuts a client's SACK blocks to a region. `ack`: ACK number of the region's copy. */
static __always_inline void blocks_of_region(const struct region *region, __u32 ack,
                                             struct sack *sack)
{
    for (int i = 0; i < SACK_BLOCKS_MAX; i++) {
        sack->left[i] = clamp_to(region, sack->left[i]);
        sack->right[i] = clamp_to(region, sack->right[i]);
        /* If the header is lost, a block may begin at the region's first byte, which is the copy's
         * ACK number, too. RFC 2018 allows no block that begins at the ACK number, and the kernel
         * ignores such a block. So the block loses its first byte. */
        if (sack->left[i] == ack && is_before(ack, sack->right[i]))
            sack->left[i]++;
    }
}

/* Translates a client's SACK blocks for the frontend's kernel. */
static __always_inline void blocks_to_local(const struct spaces *s, struct sack *sack)
{
    for (int i = 0; i < SACK_BLOCKS_MAX; i++) {
        sack->left[i] = to_local(s, sack->left[i]);
        sack->right[i] = to_local(s, sack->right[i]);
    }
}

#endif
