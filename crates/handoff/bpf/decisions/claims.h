/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * How far a client's claims are believed. With the ACK number and the SACK blocks of its packets, a
 * client claims that it has received bytes. A flow is a client connection's record, and a region a
 * range of its sequence numbers that a backend sends: one payload. A stranger has to guess as much
 * as with plain Linux (RFC 9293, 3.10.7.4; RFC 5961, 5):
 *
 *   sequence number    in the window that the frontend's kernel has offered, or the byte before it
 *   ACK, SACK blocks   not past the window that the client had offered before this packet
 *
 * A frontend can check no more than that. Only the backend knows how much of the window has been
 * sent, and its program be_in drops packets that acknowledge more. So a flow's fields hold claims.
 * The newest claim counts, not the highest: a stranger's claim may lie ahead of the client's, but
 * the client sends more packets than the stranger, and answers probes. CLIENT are the sequence
 * numbers that the client sees.
 *
 * A forger can move claims forward by a window at a time. So a claim alone completes only a payload
 * of at most 1 MiB that fitted the client's window when it began. For a longer payload the
 * backend's agent must confirm, before or after the claim, that its socket has got the ACK of the
 * payload's end (fe_delivered).
 */
#ifndef CLAIMS_H
#define CLAIMS_H

#include "../steering.h"
#include "numbers.h"
#include "packet.h"
#include "spaces.h"

/* Window that a backend's segments offer to the client, in bytes (RCV_WND of
 * crates/handoff/src/sender/connection.rs). The client's packets within that window go to the
 * frontend's kernel. */
#define SENDER_WINDOW 65535

/* Largest distance of a flow's `rcv_nxt` behind its `server_ack`, in bytes, while no region is open
 * (active or cancelled). The two are equal when a region begins. Sequence numbers can be compared
 * only if they are less than 2^31 apart. */
#define UPLOADED_MAX (1U << 30)

/* Right edge of the client's window, CLIENT space: the first byte that it has no room for. */
static __always_inline __u32 client_edge(const struct flow *flow)
{
    return flow->client_ack + ((__u32) flow->client_window << flow->snd_wscale);
}

/*
 * Whether the frontend's kernel would accept a segment. Such a segment begins in the window that
 * was offered to the client. It ends at the kernel's ACK number or later, or, if it is a probe, one
 * byte earlier. All other segments are guesses of strangers, or very old. They must not change a
 * region. They must not reach a backend either: its socket would accept them, because be_in gives
 * every copy the sequence number that the socket expects.
 *
 * A client that uploads meanwhile is offered a window by two machines. If the backend's window is
 * smaller, and the frontend's newest ACK is still under way, the client's pure ACKs lie at the end
 * of the smaller window (tcp_acceptable_seq). That may be before the kernel's ACK number. So
 * segments up to a window earlier than that number are accepted, too.
 */
static __always_inline bool is_acceptable(const struct flow *flow, const struct packet *p)
{
    __u32 edge = later(flow->server_edge, flow->server_ack + SENDER_WINDOW);

    __u32 least = later(flow->rcv_nxt, flow->server_ack - (edge - flow->server_ack));

    return !is_before(p->seq + p->payload_bytes + 1, least) && !is_before(edge, p->seq);
}

/* Notes an ACK number of the server's kernel. While no region is open, rcv_nxt stays within
 * UPLOADED_MAX of server_ack. Otherwise all of the client's packets would compare as older than
 * rcv_nxt after a very long upload. */
static __always_inline void note_server_ack(struct flow *flow, __u32 ack)
{
    if (is_before(flow->server_ack, ack))
        flow->server_ack = ack;
    if (!is_open(&flow->spaces))
        flow->rcv_nxt = later(flow->rcv_nxt, flow->server_ack - UPLOADED_MAX);
}

/* Whether a packet acknowledges bytes beyond the client's window, which nobody can have sent. */
static __always_inline bool claims_too_much(const struct flow *flow, const struct packet *p,
                                            const struct sack *sack)
{
    for (int i = 0; i < SACK_BLOCKS_MAX; i++)
        if (i < sack->blocks && is_before(flow->edge, sack->right[i]))
            return true;
    return is_before(flow->edge, p->ack);
}

/* Whether a packet's numbers are noted. The client sends no ACK that is older than a window (RFC
 * 5961, 5.2), so such an ACK is ignored. The exception is while a probe is unanswered: a stranger's
 * claims may have moved client_ack ahead of the client by more than a window. Then the client's
 * answer is an old ACK. */
static __always_inline bool is_believed(const struct flow *flow, const struct packet *p)
{
    __s32 back = flow->client_ack - p->ack;

    return back <= (__s64) (flow->edge - flow->client_ack) || flow->asked != flow->answered;
}

/* Largest payload that a claim alone can complete, in bytes. The client's window is no sufficient
 * bound, because a client that wants to claim much can offer a large one. For longer payloads a
 * confirmation costs nothing compared with sending them. */
#define CLAIM_MAX (1u << 20)

/* Returns the END_* bits of a new region of `length` bytes: END_WORD, if a claim alone cannot
 * complete it. */
static __always_inline __u32 end_of_new_region(const struct flow *flow, __u64 length)
{
    __u32 room = is_before(flow->start, flow->edge) ? flow->edge - flow->start : 0;

    return length > room || length > CLAIM_MAX ? END_WORD : 0;
}

static __always_inline bool is_delivered(const struct flow_break *b)
{
    return b->end & END_CLAIMED && (!(b->end & END_WORD) || b->end & END_DELIVERED);
}

/* Notes that a packet acknowledges all of a region. Returns whether that completes the region. */
static __always_inline bool claims_end(struct flow *flow)
{
    struct flow_break *b = newest_break(&flow->spaces);

    flow->spaces.acked = b->length;
    b->end |= END_CLAIMED;
    return is_delivered(b);
}

/* A timestamp of the frontend is raised by fewer ticks of 1 ms than this, if a backend's timestamp
 * clock is ahead of the frontend's. The two clocks are equal when a region begins, and drift apart
 * by the error of their machines' clocks. If a backend's clock is further ahead, the client drops
 * the frontend's next segments until the frontend's clock has caught up. */
#define CLOCK_APART 8192

/* Returns a timestamp of the frontend, raised to the newest timestamp that the client has echoed,
 * which may be a backend's. A client drops segments with a timestamp that it takes for older (RFC
 * 7323, 5.3). The raise is limited: otherwise a stranger's made-up echo would raise the frontend's
 * timestamps so far that the client drops all later segments. */
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

/* Notes the numbers of a packet that does not claim too much. `at`: number of bytes of the newest
 * region that it acknowledges. */
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
    /* While a client's window was closed, its silence does not count (behind.h). */
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
