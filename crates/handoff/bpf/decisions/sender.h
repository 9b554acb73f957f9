/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * State of a backend's sender: what its socket and its client have sent, in which sequence space,
 * and what of that is believed. The agent writes the sender's slot (struct sender_slot) between two
 * payloads.
 */
#ifndef SENDER_H
#define SENDER_H

#include "../steering.h"
#include "numbers.h"
#include "packet.h"

/* TSecr of a segment. A restored socket has no timestamp of its client until an ACK brings one, and
 * a parked one has an old timestamp. */
static __always_inline __u32 tsecr_of(const struct packet *p, const struct sender_slot *slot)
{
    bool stale = p->tsecr == 0 || is_before(p->tsecr, slot->ts_recent);
    return stale ? slot->ts_recent : p->tsecr;
}

/* Notes a segment that leaves. A socket sends in order, and this runs as it sends, so no two calls
 * for one socket overlap. */
static __always_inline void note_sent(struct sender_slot *slot, const struct packet *p)
{
    __u32 end = p->seq + p->payload_bytes;

    if (is_before(slot->sent, end))
        slot->sent = end;
    if (is_before(slot->edge, end))
        slot->edge = end;
}

/*
 * Translates an ACK number to the socket's own space. A late ACK of a parked socket's older payload
 * lies before the header that was sent in between, and is raised to `start`. In a payload of more
 * than 2 GiB, new numbers would compare as before `start`, so note_acked moves it.
 */
static __always_inline __u32 own_ack(const struct sender_slot *slot, __u32 ack)
{
    return (is_before(ack, slot->start) ? slot->start : ack) - slot->seq_delta;
}

/* Distance behind the newest ACK from which an ACK tells the socket nothing that it needs. A late
 * ACK of the payload before is nearer than that: only a header lies in between. */
#define LATE_MAX (1u << 24)

/*
 * Whether an ACK is of bytes that nobody has sent, or of bytes that were acknowledged long ago.
 * `sent` is noted before a segment leaves. With such ACKs a client could get more than its path can
 * carry. A stranger could make this socket forget bytes that the client has not got (RFC 5961, 5).
 */
static __always_inline bool acknowledges_unsent(const struct sender_slot *slot,
                                                const struct packet *p)
{
    bool is_old = is_before(p->ack, slot->acked + slot->seq_delta - LATE_MAX);

    return !(p->flags & TH_RST) && (is_old || is_before(slot->edge, own_ack(slot, p->ack)));
}

/*
 * An ACK number in the socket's own space, no further than the socket has sent. Where another
 * backend has begun the payload, the client may have more of it than the frontend knew. The socket
 * would ignore an ACK of bytes that it has not sent (RFC 9293, 3.10.7.4), but all that it has sent
 * is acknowledged by it. Sets `ahead` for such an ACK.
 */
static __always_inline __u32 ack_for_sender(const struct sender_slot *slot, __u32 ack, bool *ahead)
{
    __u32 own = own_ack(slot, ack);

    *ahead = is_before(slot->sent, own);
    return *ahead ? slot->sent : own;
}

/* Largest age of a client's ACK, in bytes: the largest window (RFC 7323, 2.3). */
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
 * Checks of a steered packet. The frontend puts its newest rcv_nxt into the sequence field: it
 * moves with what the client sends meanwhile, and little from one copy to the next. The urgent
 * pointer has half of the flow's token. A forger has to guess both numbers. Without this check the
 * socket would accept any packet, because it gets sequence numbers that always fit.
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
