/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * Client packets as they arrive at the frontend: who gets which. With an active region:
 *
 *   packet                                   frontend's stack           its backend
 *   ACK at or below the region's start       yes, old delta             only if its SACK blocks
 *                                                                       lie in the region, or it
 *                                                                       opens the window
 *   first ACK past the start                 yes, clamped to it         yes
 *   later pure ACKs inside                   no                         yes, each that it needs
 *   of these, probes                         yes, clamped: it answers   yes
 *   ACK at the end                           yes: complete, where its   yes
 *                                            backend's word is not
 *                                            needed, or there (claims.h)
 *   ACK past the end, or past what the       nobody: nobody sent that   no
 *   client had room for (claims.h)
 *   data, FIN, URG                           yes, ACK clamped           its ACK part
 *   RST at the next sequence number, or      yes, at the next           yes
 *   at the one that its backend knows
 *
 * Without one, all goes to the frontend, translated; a report of duplicates in an older region
 * (RFC 2883) also to that region's backend, which has missed the client's last ACK. Where the
 * server has left its client with half a response, each packet is answered by a reset (../reset.h).
 *
 * A backend whose window holds much needs few ACKs, and says so (ack_may_wait): the others end
 * here.
 *
 * Packets with IP options, extension headers and first fragments are routed alike (../plain.h); of
 * a fragment, all behind the first belongs to the stack alone, which gets it as it is.
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

/* A round trip and as long a silence between two ACKs, and a sender may have timed out: that takes
 * a round trip and 200 ms at least (RTO_MIN). Over a long way a round trip's silence is the rule:
 * the window is sent at once, and its ACKs come together. */
#define SILENCE_NS 100000000

struct route {
    bool server;    /* the frontend's stack gets it */
    bool nobody;    /* drop: acknowledges what nobody has sent */
    bool clamped;   /* the frontend's ACK number is the region's start */
    bool late;      /* the copy is a report of late duplicates */
    bool held;      /* nobody gets it: no news */
    bool strange;   /* outside the client's window: the frontend's stack drops it */
    bool ended;     /* nobody: its server has ended half a response, and a reset says so */
    bool untouched; /* the frontend's stack gets it as it is: a socket that is gone answers so */
    bool behind;    /* a reset at an older number: the frontend's stack takes it at its own */
    int copy;       /* index of the break whose backend gets a copy, or NO_BREAK */
    __u32 ack;      /* for the frontend: LOCAL */
    __u16 window;   /* for the frontend */
    __u32 ring;
    struct shunt_event event; /* kind 0: none */
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

/* Only the next sequence number that we expect makes a reset one (RFC 5961, 3.2). A client whose
 * socket is gone answers a backend's segment with what that acknowledges, which is what the newest
 * copies said: where it has closed since, a FIN's number less. */
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

/* A first block below the ACK number reports duplicates. */
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
 * ACKs that only say that more has arrived are for a sender to go on with; one that may have many
 * times more outstanding than lies between two of them does not wait for each. ack_spacing is a
 * quarter of its congestion window at most, and a quarter of the client's window bounds it here.
 * What could be loss or congestion shrinks a congestion window, so from its first sign every ACK
 * goes. At least one goes in each tick of the coarse clock, which is a jiffy: the timers of a
 * sender that is paced are longer. One that pauses, for its disk, may miss the last ACK before the
 * pause and probe with a segment too many (RFC 8985, 7); the duplicate report of that is a sign
 * too.
 */
static __always_inline bool ack_may_wait(struct flow *flow, const struct packet *p,
                                         const struct sack *sack, __u64 at, __u64 now)
{
    bool duplicate = at == flow->spaces.acked && p->window == flow->client_window;
    bool silence = now - flow->passed_ns > SILENCE_NS + flow->srtt_us * 1000ull;

    if (sack->blocks || p->flags & TH_ECE || duplicate || silence)
        flow->ack_spacing = 0;
    return flow->ack_spacing && at > flow->spaces.acked && at < flow->hold_until &&
           now == flow->passed_ns;
}

/* Of an ACK that its backend gets. */
static __always_inline void note_passed(struct flow *flow, const struct packet *p, __u64 at,
                                        __u64 now)
{
    __u64 quarter = ((__u64) p->window << flow->snd_wscale) / 4;

    flow->passed_ns = now;
    flow->hold_until = at + (quarter < flow->ack_spacing ? quarter : flow->ack_spacing);
}

/*
 * With the number before the next, a client asks whether the frontend is still there (RFC 9293,
 * 3.8.4) or has room again (3.8.6.1): only the frontend's stack has the answer.
 */
static __always_inline bool is_probe(const struct flow *flow, const struct packet *p)
{
    return is_before(p->seq, flow->server_ack);
}

/*
 * Of an ACK at the region's start: whether it gives a backend room that it waits for. A backend
 * knows of the window what the claim says; where that holds its first flight, or all, the ACKs of
 * those bytes tell the rest. Also each later ACK that says so, for the first may come before its
 * socket is there.
 */
static __always_inline bool opens_window(const struct flow *flow, const struct packet *p)
{
    __u64 length = nth_break(&flow->spaces, 0)->length;
    __u64 flight = (__u64) flow->snd_cwnd * flow->mss;
    __u32 window = (__u32) p->window << flow->snd_wscale;

    return window > flow->snd_wnd && flow->snd_wnd < length && flow->snd_wnd < flight;
}

/* `at`: the ACK's place in the region. */
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
        if (reaches_region(s, sack) || (at == 0 && opens_window(flow, p)))
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

/* A connection without a region is its kernel's, which knows what has been sent. */
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
 * Of a region that its server has taken (SHUNT_TAKE), the client may have bytes behind a hole, and
 * once that is filled, its ACK is ahead of what the frontend's kernel has sent, which would drop it
 * (RFC 9293, 3.10.7.4): it is one of all that has been sent. As be_in does it for a backend that
 * goes on for another.
 */
static __always_inline __u32 known_to_server(const struct flow *flow, __u32 ack)
{
    __u32 local = to_local(&flow->spaces, ack);
    __u32 sent = flow->server_end + !!(flow->flags & FLOW_SERVER_FIN);
    bool is_ahead = flow->ahead && !is_open(&flow->spaces) &&
                    !is_before(flow->start + flow->ahead, ack) && is_before(sent, local);

    return is_ahead ? sent : local;
}

/* The window field of an ACK whose number is raised to a region's start: what the client has room
 * for ends where it did. Else a backend sends more than that, and fe_in drops the client's word of
 * it (claims_too_much), again and again. */
static __always_inline __u16 window_from(const struct packet *p, __u32 ack, __u8 scale)
{
    __u32 room = (__u32) p->window << scale;
    __u32 raised = is_before(p->ack, ack) ? ack - p->ack : 0;

    return room > raised ? (room - raised) >> scale : 0;
}

/* Who gets a client's packet. Notes in the flow what it says. */
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
        r->server = true; /* its kernel drops it, and says what it expects */
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

/* Of a copy for a backend: its numbers. */
struct copy {
    struct region region;
    __u32 ack;
    __u32 server_ack;
    __u16 window;
    __u16 token;
};

/* `index`: of the break, among the flow's. Notes the copy in the flow. */
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

/* What of a client's blocks lies in a region, whose copy acknowledges `ack`. */
static __always_inline void blocks_of_region(const struct region *region, __u32 ack,
                                             struct sack *sack)
{
    for (int i = 0; i < SACK_BLOCKS_MAX; i++) {
        sack->left[i] = clamp_to(region, sack->left[i]);
        sack->right[i] = clamp_to(region, sack->right[i]);
        /* A lost header leaves a block from the region's first byte on, where the ACK number is
         * too. RFC 2018 has no such block and the kernel ignores one: give up its first byte. */
        if (sack->left[i] == ack && is_before(ack, sack->right[i]))
            sack->left[i]++;
    }
}

/* A client's blocks, for the frontend's kernel. */
static __always_inline void blocks_to_local(const struct spaces *s, struct sack *sack)
{
    for (int i = 0; i < SACK_BLOCKS_MAX; i++) {
        sack->left[i] = to_local(s, sack->left[i]);
        sack->right[i] = to_local(s, sack->right[i]);
    }
}

#endif
