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
 */
#ifndef CLAIMS_H
#define CLAIMS_H

/* What a backend's segments offer the client, whose packets the frontend's kernel judges: RCV_WND
 * of crates/handoff/src/sender/connection.rs. */
#define SENDER_WINDOW 65535

static __always_inline __u32 later(__u32 a, __u32 b)
{
    return is_before(a, b) ? b : a;
}

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

/* Whether a packet acknowledges what nobody can have sent: its client had no room for that. */
static __always_inline bool claims_too_much(const struct flow *flow, const struct packet *p,
                                            const struct sack *sack)
{
    for (int i = 0; i < SACK_BLOCKS_MAX; i++)
        if (i < sack->blocks && is_before(flow->edge, sack->right[i]))
            return true;
    return is_before(flow->edge, p->ack);
}

/* An ACK that is older than a window is none of the client's (RFC 5961, 5.2). */
static __always_inline bool is_believed(const struct flow *flow, const struct packet *p)
{
    __s32 back = flow->client_ack - p->ack;

    return back <= (__s64) (flow->edge - flow->client_ack);
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

/* Of a packet that claims no more than it may. `at`: what it acknowledges of an active region. */
static __always_inline void note_client(struct flow *flow, const struct packet *p, __s64 at)
{
    __u32 window = (__u32) p->window << flow->snd_wscale;
    bool is_news = is_believed(flow, p);

    flow->edge = later(flow->edge, p->ack + window);
    if (p->flags & TH_FIN)
        flow->flags |= FLOW_CLIENT_FIN;
    if (!is_news)
        return;
    flow->client_ack = p->ack;
    flow->client_window = p->window;
    flow->flags |= FLOW_SEEN_IN;
    if (flow->spaces.status == SHUNT_REGION_ACTIVE)
        flow->spaces.acked = at > 0 ? at : 0;
    if (p->timestamps)
        note_timestamps(flow, p);
}

#endif
