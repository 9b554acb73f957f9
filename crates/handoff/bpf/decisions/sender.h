/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * Decisions on the packets of a sender, a backend's socket that sends payloads to one client:
 * translation to and from the socket's own sequence numbers, and how far a client's ACKs are
 * believed. The ACKs come as copies, which the frontend's programs have rewritten for the backend.
 * The state is in the sender's slot (struct sender_slot), which the agent writes between two
 * payloads. A sender is parked while it waits for its connection's next payload.
 */
#ifndef SENDER_H
#define SENDER_H

#include "../steering.h"
#include "numbers.h"
#include "packet.h"

/* Returns the TSecr that a segment leaves with: the socket's, or the slot's if that is newer. A
 * restored socket has no timestamp of its client until an ACK brings one, and a parked socket has
 * an old one. */
static __always_inline __u32 tsecr_of(const struct packet *p, const struct sender_slot *slot)
{
    bool stale = p->tsecr == 0 || is_before(p->tsecr, slot->ts_recent);
    return stale ? slot->ts_recent : p->tsecr;
}

/* Notes a segment that leaves. A socket sends one segment after the other, and this runs as it
 * sends, so no two calls for one socket overlap. */
static __always_inline void note_sent(struct sender_slot *slot, const struct packet *p)
{
    __u32 end = p->seq + p->payload_bytes;

    if (is_before(slot->sent, end))
        slot->sent = end;
    if (is_before(slot->edge, end))
        slot->edge = end;
}

/*
 * Translates an ACK number to the socket's own space. A late ACK of the socket's previous payload
 * lies before the header that the frontend has sent in between, and is raised to `start`. In a
 * payload of more than 2 GiB, new numbers would compare as before `start`, so note_acked moves
 * `start` forward.
 */
static __always_inline __u32 own_ack(const struct sender_slot *slot, __u32 ack)
{
    return (is_before(ack, slot->start) ? slot->start : ack) - slot->seq_delta;
}

/* Distance behind the newest ACK number, in bytes, beyond which an ACK is dropped: it tells the
 * socket nothing that it needs. A late ACK of the previous payload is nearer, because only a header
 * lies in between. */
#define LATE_MAX (1u << 24)

/*
 * Whether an ACK is of bytes that nobody has sent, or of bytes that were acknowledged long ago.
 * `edge` is noted before a segment leaves, so no true ACK is ahead of it. With ACKs of unsent bytes
 * a client could get more than its path can carry. A stranger could make this socket forget bytes
 * that the client has not got (RFC 5961, 5).
 */
static __always_inline bool acknowledges_unsent(const struct sender_slot *slot,
                                                const struct packet *p)
{
    bool is_old = is_before(p->ack, slot->acked + slot->seq_delta - LATE_MAX);

    return !(p->flags & TH_RST) && (is_old || is_before(slot->edge, own_ack(slot, p->ack)));
}

/*
 * Returns an ACK number in the socket's own space, no further than the socket has sent. If another
 * backend has begun the payload, the client may have more of it than the frontend knew. The socket
 * would ignore an ACK of bytes that it has not sent (RFC 9293, 3.10.7.4). So such an ACK becomes
 * one of all that the socket has sent, and `ahead` is set.
 */
static __always_inline __u32 ack_for_sender(const struct sender_slot *slot, __u32 ack, bool *ahead)
{
    __u32 own = own_ack(slot, ack);

    *ahead = is_before(slot->sent, own);
    return *ahead ? slot->sent : own;
}

/* Largest distance of `start` behind the newest ACK number, in bytes. It is the largest window (RFC
 * 7323, 2.3), so no late ACK of the same payload lies before `start`. */
#define OLD_MAX (1u << 30)

/* Notes an ACK number of the socket's own space. Moves `start` so that it stays within OLD_MAX. */
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
 * Checks of a copy. The frontend puts its newest ACK number into the copy's sequence field. That
 * number grows with what the client sends meanwhile, by little from one copy to the next. The
 * urgent pointer has half of the connection's token, a random number. A forger has to guess both
 * numbers. Without these checks the socket would accept any packet, because be_in gives each packet
 * the sequence number that the socket expects.
 */
#define STEP_MAX       (1u << 24) /* largest difference between two copies, in either direction */
#define STEP_MAX_RESET (1u << 20) /* largest growth from the last copy to a reset */

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
