/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * Translation of sequence numbers between the LOCAL space of a flow (the frontend's kernel counts
 * these numbers) and its CLIENT space (the client sees these). A flow is a client connection, and a
 * region a range of its CLIENT numbers that a backend sends: one payload. A break is the record of
 * one region: where it begins in each space, and its length (struct flow_break of steering.h).
 *
 * Serial arithmetic (RFC 1982) tells before from after only within 2^31, and a region may be longer
 * than that. So a CLIENT number is compared with a point of the region that is known to be near.
 * While the region is active, this is the end of what the client has acknowledged; later it is the
 * region's end. When a flow has continued for 2^30 bytes behind its last region, an anchor takes
 * that region's place as the point of comparison. An anchor is a break of length 0.
 */
#ifndef SPACES_H
#define SPACES_H

#include "../steering.h"
#include "numbers.h"

#define ANCHOR_BYTES (1u << 30)
#define NO_BREAK     (-1)

/* Index in `breaks` of the n-th newest break. */
static __always_inline __u32 slot_of(const struct spaces *s, __u32 n)
{
    return (s->made - 1 - n) & (BREAKS - 1);
}

/* The n-th newest break, counted from 0. */
static __always_inline const struct flow_break *nth_break(const struct spaces *s, __u32 n)
{
    return &s->breaks[slot_of(s, n)];
}

static __always_inline struct flow_break *newest_break(struct spaces *s)
{
    return &s->breaks[slot_of(s, 0)];
}

static __always_inline struct flow_break *next_break(struct spaces *s)
{
    s->made++;
    return newest_break(s);
}

/* Whether the newest region is open, that is, active or cancelled, and not complete. */
static __always_inline bool is_open(const struct spaces *s)
{
    return s->status != SHUNT_REGION_COMPLETE;
}

/* Returns the position of a CLIENT number in a break's payload: the number of bytes from the
 * payload's start, negative before it. `reached`: a position that is known to be near. */
static __always_inline __s64 position(const struct flow_break *b, __u64 reached, __u32 seq)
{
    return (__s64) reached + (__s32) (seq - (b->start + (__u32) reached));
}

static __always_inline __s64 nth_position(const struct spaces *s, __u32 n, __u32 seq)
{
    const struct flow_break *b = nth_break(s, n);
    return position(b, n == 0 && is_open(s) ? s->acked : b->length, seq);
}

/* Translates CLIENT to LOCAL. All numbers of a payload become one LOCAL number: that of the place
 * where the payload was inserted. */
static __always_inline __u32 to_local(const struct spaces *s, __u32 seq)
{
    __u32 delta = 0;

    for (__u32 n = 0; n < BREAKS && n < s->made; n++) {
        const struct flow_break *b = nth_break(s, n);
        __s64 at = nth_position(s, n, seq);
        if (at > 0) {
            bool behind = at > (__s64) b->length && !(n == 0 && is_open(s));
            return b->local + (behind ? (__u32) (at - b->length) : 0);
        }
        delta = b->start - b->local;
    }
    return seq - delta;
}

/*
 * Translates LOCAL to CLIENT, for a segment [seq, end) outside an open region. Returns false for a
 * segment that lies on both sides of a break: it has no place in CLIENT space.
 */
static __always_inline bool to_client(const struct spaces *s, __u32 seq, __u32 end, __u32 *client)
{
    __u32 delta = 0;

    for (__u32 n = 0; n < BREAKS && n < s->made; n++) {
        const struct flow_break *b = nth_break(s, n);
        delta = b->start - b->local;
        if (!is_before(seq, b->local)) {
            delta += b->length;
            break;
        }
        if (b->length && is_before(b->local, end))
            return false;
    }
    *client = seq + delta;
    return true;
}

/* A region, and the position in it that the numbers of a packet for its backend are compared with
 * (`reached` of position()). */
struct region {
    struct flow_break payload;
    __u64 reached;
};

static __always_inline struct region nth_region(const struct spaces *s, __u32 n)
{
    struct region r = {.payload = *nth_break(s, n)};
    r.reached = n == 0 && is_open(s) ? s->acked : r.payload.length;
    return r;
}

/* The CLIENT number within the region that is nearest to `seq`. */
static __always_inline __u32 clamp_to(const struct region *r, __u32 seq)
{
    __s64 at = position(&r->payload, r->reached, seq);
    if (at < 0)
        at = 0;
    if (at > (__s64) r->payload.length)
        at = r->payload.length;
    return r->payload.start + (__u32) at;
}

/* Returns n if the n-th newest region has all bytes from `left` to before `right`, and is not open.
 * Returns NO_BREAK if there is no such region. */
static __always_inline int region_of(const struct spaces *s, __u32 left, __u32 right)
{
    for (__u32 n = 0; n < BREAKS && n < s->made; n++) {
        if (n == 0 && is_open(s))
            continue;
        if (nth_position(s, n, left) >= 0 &&
            nth_position(s, n, right) <= (__s64) nth_break(s, n)->length)
            return n;
    }
    return NO_BREAK;
}

/*
 * Makes an anchor if the flow has continued far behind its last region (see the head of this file).
 * Called only for the frontend's own segments: a stranger could make up a client's ACKs.
 */
static __always_inline void move_anchor(struct spaces *s, __u32 local, __u32 client)
{
    if (s->made == 0 || is_open(s) ||
        (__s32) (local - nth_break(s, 0)->local) <= (__s32) ANCHOR_BYTES)
        return;
    struct flow_break *b = next_break(s);
    b->local = local;
    b->start = client;
    b->length = 0;
    b->peer = 0;
    b->end = 0;
}

#endif
