/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * A backend's sender: what its socket and its client have said, in whose sequence space, and what
 * of that is believed. Its slot (struct sender_slot) is written by the agent between two payloads.
 */
#ifndef SENDER_H
#define SENDER_H

#include "../steering.h"
#include "numbers.h"
#include "packet.h"

/* A socket that has been restored has no timestamp of its client until an ACK brings one, and one
 * that was parked has an old one. */
static __always_inline __u32 tsecr_of(const struct packet *p, const struct sender_slot *slot)
{
    bool stale = p->tsecr == 0 || is_before(p->tsecr, slot->ts_recent);
    return stale ? slot->ts_recent : p->tsecr;
}

/* A socket sends in order, and this runs in its sending: no two at once. */
static __always_inline void note_sent(struct sender_slot *slot, const struct packet *p)
{
    __u32 end = p->seq + p->payload_bytes;

    if (is_before(slot->sent, end))
        slot->sent = end;
    if (is_before(slot->edge, end))
        slot->edge = end;
}

/*
 * An ACK number in the socket's own space. A parked socket's late ACK of an older payload lies in
 * front of the header between. In a payload of more than 2 GiB, `start` would come to lie ahead of
 * what is new: note_acked has it follow.
 */
static __always_inline __u32 own_ack(const struct sender_slot *slot, __u32 ack)
{
    return (is_before(ack, slot->start) ? slot->start : ack) - slot->seq_delta;
}

/* An ACK of what is older tells the socket nothing that it needs. That of an older payload, in
 * front of the header between, is not so old. */
#define LATE_MAX (1u << 24)

/*
 * Whether an ACK is of bytes that nobody has sent, `sent` being noted before a segment leaves, or
 * of bytes that were acknowledged long ago. A client that gets away with the first would be sent
 * more than its way can carry, and a stranger's would have this socket forget bytes that the client
 * has not got (RFC 5961, 5).
 */
static __always_inline bool acknowledges_unsent(const struct sender_slot *slot,
                                                const struct packet *p)
{
    bool is_old = is_before(p->ack, slot->acked + slot->seq_delta - LATE_MAX);

    return !(p->flags & TH_RST) && (is_old || is_before(slot->edge, own_ack(slot, p->ack)));
}

/*
 * Where a sender's socket stands by an ACK, in its own space. Of a payload that another backend has
 * begun, the client may have more than the frontend knew: an ACK of what this one has not sent
 * would be ignored (RFC 9293, 3.10.7.4), but what has been sent is acknowledged by it. `ahead`:
 * whether it is one.
 */
static __always_inline __u32 ack_for_sender(const struct sender_slot *slot, __u32 ack, bool *ahead)
{
    __u32 own = own_ack(slot, ack);

    *ahead = is_before(slot->sent, own);
    return *ahead ? slot->sent : own;
}

/* No ACK of a client's is older than the largest window, which is 2^30 (RFC 7323, 2.3). */
#define OLD_MAX (1u << 30)

static __always_inline void note_acked(struct sender_slot *slot, __u32 own)
{
    if (!is_before(slot->acked, own))
        return;
    slot->acked = own;
    __u32 oldest = own + slot->seq_delta - OLD_MAX;
    if (is_before(slot->start, oldest))
        slot->start = oldest;
}

/*
 * The frontend puts its newest rcv_nxt into the sequence field, which moves on with what the client
 * sends meanwhile, and little from one copy to the next; and half of the flow's token into the
 * urgent pointer. Whoever makes up a packet has to guess both: the socket itself, whose sequence
 * numbers always fit, would take any.
 */
#define STEP_MAX       (1u << 24)
#define STEP_MAX_RESET (1u << 20)

static __always_inline bool is_made_up(const struct sender_slot *slot, const struct packet *p,
                                       __u16 token)
{
    __u32 step = p->seq - slot->ack;

    if (token != (__u16) slot->rcv_nxt)
        return true;
    if (p->flags & TH_RST)
        return step > STEP_MAX_RESET;
    return step > STEP_MAX && -step > STEP_MAX;
}

#endif
