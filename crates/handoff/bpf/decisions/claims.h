/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * What a client's packet claims, and how much of that is believed. A stranger has to guess as much
 * as with plain Linux (RFC 9293, 3.10.7.4; RFC 5961, 5):
 *
 *   sequence number    in the window that the frontend's kernel has offered, or the byte before it
 *   ACK, SACK blocks   no more than the client had offered to take before this packet
 *
 * The second is all that a frontend can know: how much of that has been sent, only the backend
 * knows, and drops what acknowledges more (be_in). So what is noted here are claims. The newest one
 * counts, and not the highest: a stranger's may lie ahead of the client's, but the client says more
 * than he does, and answers where it is asked.
 *
 * Claims may be walked forward by a window at a time. So only a payload of 1 MiB at most, within
 * the room that the client had when it began, is complete by a claim. A longer one needs the word
 * of its backend's agent, too, that its socket has had that ACK (fe_delivered), before or after.
 */
#ifndef CLAIMS_H
#define CLAIMS_H

#include "../steering.h"
#include "numbers.h"
#include "packet.h"
#include "spaces.h"

/* What a backend's segments offer the client, whose packets the frontend's kernel judges: RCV_WND
 * of crates/handoff/src/sender/connection.rs. */
#define SENDER_WINDOW 65535

/* How far before the server's newest ACK the last region may have begun: sequence numbers compare
 * over less than 2^31. */
#define UPLOADED_MAX (1U << 30)

/* First byte that the client has no room for, CLIENT space. */
static __always_inline __u32 client_edge(const struct flow *flow)
{
    return flow->client_ack + ((__u32) flow->client_window << flow->snd_wscale);
}

/*
 * Whether a segment lies where the frontend's kernel takes one: it ends no earlier than what that
 * kernel has acknowledged, or by the one byte of a probe, and begins in the window that was
 * offered. All else is some stranger's guess, or very old. Neither may move a region on, nor reach
 * a backend, whose socket gets a sequence number that always fits.
 *
 * A client that uploads meanwhile has the window from two machines. Where the backend's is the
 * smaller one, and the frontend's newest ACK is still on its way, its own ACKs lie at that window's
 * end (tcp_acceptable_seq), which may be before what the frontend has acknowledged.
 */
static __always_inline bool is_acceptable(const struct flow *flow, const struct packet *p)
{
    __u32 edge = later(flow->server_edge, flow->server_ack + SENDER_WINDOW);

    __u32 least = later(flow->rcv_nxt, flow->server_ack - (edge - flow->server_ack));

    return !is_before(p->seq + p->payload_bytes + 1, least) && !is_before(edge, p->seq);
}

/* The server's kernel has acknowledged so much. Where the client has uploaded very much since the
 * last region, all its packets would seem to lie before that one's. */
static __always_inline void note_server_ack(struct flow *flow, __u32 ack)
{
    if (is_before(flow->server_ack, ack))
        flow->server_ack = ack;
    if (!is_open(&flow->spaces))
        flow->rcv_nxt = later(flow->rcv_nxt, flow->server_ack - UPLOADED_MAX);
}

/* Whether a packet acknowledges what nobody can have sent: its client had no room for that. */
static __always_inline bool claims_too_much(const struct flow *flow, const struct packet *p,
                                            const struct sack *sack)
{
    for (int i = 0; i < SACK_BLOCKS_MAX; i++)
        if (i < sack->blocks && is_before(flow->edge, sack->right[i]))
            return true;
    return is_before(flow->edge, p->ack);
}

/* An ACK that is older than a window is none of the client's (RFC 5961, 5.2), but where it has been
 * asked: a stranger's claims may have gone on by more. */
static __always_inline bool is_believed(const struct flow *flow, const struct packet *p)
{
    __s32 back = flow->client_ack - p->ack;

    return back <= (__s64) (flow->edge - flow->client_ack) || flow->asked != flow->answered;
}

/* A client that wants to claim much offers much room. Payloads of more bytes always need a word,
 * which is nothing beside what it costs to send them. */
#define CLAIM_MAX (1u << 20)

/* END_* of a region that begins. */
static __always_inline __u32 end_of_new_region(const struct flow *flow, __u64 length)
{
    __u32 room = is_before(flow->start, flow->edge) ? flow->edge - flow->start : 0;

    return length > room || length > CLAIM_MAX ? END_WORD : 0;
}

static __always_inline bool is_delivered(const struct flow_break *b)
{
    return b->end & END_CLAIMED && (!(b->end & END_WORD) || b->end & END_DELIVERED);
}

/* Of a packet that acknowledges all of a region: whether that completes it. */
static __always_inline bool claims_end(struct flow *flow)
{
    struct flow_break *b = newest_break(&flow->spaces);

    flow->spaces.acked = b->length;
    b->end |= END_CLAIMED;
    return is_delivered(b);
}

/* How far the clock of a backend's segments may be before that of the frontend, in ticks of 1 ms.
 * Both begin as one with a region, and go by their machines' clocks: apart they are by what one of
 * these is wrong. Beyond, the frontend's next segments wait until its clock has caught up. */
#define CLOCK_APART 8192

/* A timestamp of the frontend's that is not behind what the client has echoed, which a backend has
 * sent. A client drops what it takes for older (RFC 7323, 5.3). So it would everything, if a
 * timestamp that a stranger makes up reached it: none is raised far. */
static __always_inline __u32 not_behind_echo(const struct flow *flow, __u32 tsval)
{
    __u32 behind = flow->client_tsecr - tsval;

    return flow->flags & FLOW_TIMESTAMPS && behind < CLOCK_APART ? flow->client_tsecr : tsval;
}

static __always_inline void note_timestamps(struct flow *flow, const struct packet *p)
{
    bool first = !(flow->flags & FLOW_TIMESTAMPS);

    if (first || is_before(flow->client_tsval, p->tsval))
        flow->client_tsval = p->tsval;
    if (first || is_before(flow->client_tsecr, p->tsecr))
        flow->client_tsecr = p->tsecr;
    flow->flags |= FLOW_TIMESTAMPS;
}

static __always_inline void note_seen_in(struct flow *flow, __u32 ack)
{
    if (!(flow->flags & FLOW_SEEN_IN) || is_before(flow->furthest_ack, ack))
        flow->furthest_ack = ack;
    flow->flags |= FLOW_SEEN_IN;
}

/* Of a packet that claims no more than it may. `at`: what it acknowledges of an active region. */
static __always_inline void note_client(struct flow *flow, const struct packet *p, __s64 at)
{
    __u32 window = (__u32) p->window << flow->snd_wscale;
    bool is_news = is_believed(flow, p);

    if (is_news)
        flow->edge = later(flow->edge, p->ack + window);
    if (p->flags & TH_FIN)
        flow->flags |= FLOW_CLIENT_FIN;
    if (!is_news)
        return;
    flow->answered = flow->asked;
    /* Who takes nothing waits as long as it likes (behind.h). */
    if ((__u32) flow->client_window << flow->snd_wscale < flow->mss)
        flow->idle_ns = 0;
    flow->client_ack = p->ack;
    flow->client_window = p->window;
    note_seen_in(flow, p->ack);
    if (flow->spaces.status == SHUNT_REGION_ACTIVE)
        flow->spaces.acked = at > 0 ? at : 0;
    if (p->timestamps)
        note_timestamps(flow, p);
}

#endif
