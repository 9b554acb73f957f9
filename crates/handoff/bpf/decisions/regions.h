/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * Changes to a flow when its server asks for a region, for a longer one, for another backend, or
 * for a region's end (include/shunt.h). Most of these functions use the state of the server's
 * socket. All run under the flow's lock, with the socket locked. A flow is the record of a client
 * connection. A region is a range of the client's sequence numbers that a backend sends: one
 * payload. A break is the flow's record of one region. An anchor is a break of length 0, a point
 * that later numbers are compared with (spaces.h).
 */
#ifndef REGIONS_H
#define REGIONS_H

#include <linux/bpf.h>

#include "../../../../include/shunt.h"
#include "../steering.h"
#include "behind.h"
#include "claims.h"
#include "connection.h"
#include "numbers.h"
#include "proof.h"
#include "spaces.h"

/* Exclusive upper bound of a region's length, in bytes. */
#define LENGTH_MAX (1ull << 48)

/* Makes a flow without regions, whose two sequence spaces are equal. */
static __always_inline struct flow flow_of(const struct asked *a, __u32 token)
{
    struct flow fresh = {
        .spaces.status = SHUNT_REGION_COMPLETE,
        .client_ack = a->tcp->snd_una,
        .furthest_ack = a->tcp->snd_una,
        .rcv_nxt = a->tcp->rcv_nxt,
        .server_ack = a->tcp->rcv_nxt,
        .copied = {a->tcp->rcv_nxt, a->tcp->rcv_nxt},
        .server_end = a->tcp->snd_nxt,
        .client_window = a->connection.snd_wnd >> a->connection.snd_wscale,
        .snd_wscale = a->connection.snd_wscale,
        .server_edge = a->connection.rcv_edge,
        .rcv_wscale = a->connection.rcv_wscale,
        .token = token,
        .flags = a->seen_to_begin ? FLOW_SEEN_IN | FLOW_SEEN_OUT : 0,
    };
    fresh.edge = later(fresh.server_end, fresh.client_ack + a->connection.snd_wnd);
    return fresh;
}

/* Notes the socket's state. Its window and timestamps are brought up to date from packets that the
 * socket has not got: while a region is active, most of the client's ACKs go to a backend only. */
static __always_inline void note_connection(struct flow *flow, const struct connection *c)
{
    bool passed = flow->flags & FLOW_TIMESTAMPS;
    __u32 edge = client_edge(flow);

    flow->tsval = not_behind_echo(flow, c->tsval);
    flow->ts_recent = passed ? later(c->ts_recent, flow->client_tsval) : c->ts_recent;
    flow->snd_wnd = is_before(flow->start, edge) ? edge - flow->start : 0;
    flow->rcv_wscale = c->rcv_wscale;
    flow->server_edge = c->rcv_edge;
    flow->options = c->options;
}

static __always_inline void note_socket(struct flow *flow, const struct bpf_tcp_sock *tcp)
{
    flow->rcv_nxt = tcp->rcv_nxt;
    flow->server_ack = tcp->rcv_nxt;
    flow->copied[0] = flow->copied[1] = flow->server_ack;
    flow->snd_cwnd = tcp->snd_cwnd;
    flow->snd_ssthresh = tcp->snd_ssthresh;
    flow->srtt_us = tcp->srtt_us >> 3;
    /* The path MTU bounds the MSS. Routers report it to this socket, not to the backend. */
    flow->mss = tcp->mss_cache;
}

/* Notes the ACK number and the window that the socket knows of its client, if the flow knows older
 * ones or has had no region yet. The flow may know newer ones, because packets pass fe_in (on
 * ingress) first. The flow may lack the numbers of packets that came in fragments. `start`:
 * sequence number of the server's next byte, as the client sees it. */
static __always_inline void note_client_of(struct flow *flow, const struct asked *a, __u32 start)
{
    const struct connection *c = &a->connection;
    __u32 una = a->tcp->snd_una;
    __u32 acked = start;

    barrier_var(una); /* the verifier allows no arithmetic on fields of the socket's pointer */
    to_client(&flow->spaces, una, una, &acked);
    if (flow->spaces.made == 0 || is_before(flow->client_ack, acked)) {
        flow->client_ack = acked;
        flow->client_window = c->snd_wnd >> c->snd_wscale;
    }
    flow->edge = later(flow->edge, later(start, acked + c->snd_wnd));
}

/* Notes a handoff: the ring that hears of its completion, where its backend begins to send, and the
 * socket's state. */
static __always_inline void note_handoff(struct flow *flow, __u64 handoff, __u32 ring, __u32 start,
                                         const struct asked *a)
{
    flow->handoff = handoff;
    flow->ring = ring;
    flow->start = start;
    flow->hold_until = 0;
    flow->idle_ns = 0;
    note_socket(flow, a->tcp);
    note_connection(flow, &a->connection);
}

/* Begins a region. Under the flow's lock. */
static __always_inline enum steer_counter begin_region(struct flow *flow,
                                                       const struct shunt_begin *begin,
                                                       const struct asked *a, bool is_appended)
{
    const struct bpf_tcp_sock *tcp = a->tcp;
    const struct connection *c = &a->connection;
    struct spaces *s = &flow->spaces;
    __u32 local = c->write_seq;
    __u32 start = local;

    if (s->status == SHUNT_REGION_ACTIVE)
        return FE_REFUSED_ACTIVE;
    if (s->status == SHUNT_REGION_CANCELLED || flow->flags & FLOW_RESET)
        return FE_REFUSED_ENDED;
    /* The kernel must have sent all bytes that the server has written: it repeats those that are
     * lost. Bytes that still wait for the client's window might wait for ever: the payload would
     * overtake them, and might fill the client's memory. Then no window is left for them. */
    if (local != tcp->snd_nxt)
        return FE_REFUSED_UNSENT;

    to_client(s, local, local, &start);
    /* What the flow has noted may be from forged packets, so it has to match the socket. */
    if (!a->seen_to_begin && !is_proven(flow, tcp, start)) {
        begin_proof(flow, tcp);
        flow->edge =
            later(flow->edge, later(start, start - (tcp->snd_nxt - tcp->snd_una) + c->snd_wnd));
        return FE_REFUSED_UNPROVEN;
    }
    note_client_of(flow, a, start);
    if (s->made == 0 || nth_break(s, 0)->peer != begin->peer)
        flow->ack_spacing = 0;
    struct flow_break *b = next_break(s);
    b->local = local;
    b->start = start;
    b->length = begin->length;
    b->peer = begin->peer;
    b->end = 0;
    s->acked = 0;
    s->status = SHUNT_REGION_ACTIVE;

    flow->regions++;
    note_handoff(flow, begin->handoff, begin->ring, start, a);
    flow->ahead = 0;
    flow->flags &= ~(FLOW_START_ACKED | FLOW_QUEUES);
    /* A server that writes behind the region waits for the ACK of the region's end, which opens the
     * window (behind.h). A client that forges that ACK harms only itself: it loses its own bytes.
     * Nobody records how many bytes it got. So no confirmation is needed. */
    if (is_appended)
        flow->flags |= FLOW_QUEUES;
    else
        b->end = end_of_new_region(flow, begin->length);
    if (tcp->snd_una == local)
        flow->flags |= FLOW_START_ACKED;
    return FE_BEGUN;
}

/* Returns the newest region, if it is active, belongs to this handoff, was made by SHUNT_APPEND,
 * and its server has written nothing behind it. Returns NULL otherwise. Under the flow's lock. */
static __always_inline struct flow_break *open_end(struct flow *flow, __u64 handoff,
                                                   const struct connection *c)
{
    if (flow->spaces.made == 0 || !is_queueing(flow) || flow->handoff != handoff)
        return NULL;
    struct flow_break *b = newest_break(&flow->spaces);
    return b->local == c->write_seq ? b : NULL;
}

/* Makes the newest region longer, or begins one. Under the flow's lock. */
static __always_inline enum steer_counter
append_region(struct flow *flow, const struct shunt_begin *begin, const struct asked *a)
{
    struct flow_break *b = open_end(flow, begin->handoff, &a->connection);

    if (!b)
        return begin_region(flow, begin, a, true);
    if (b->peer != begin->peer || b->length + begin->length >= LENGTH_MAX)
        return FE_REFUSED_ARGUMENT;
    b->length += begin->length;
    return FE_APPENDED;
}

/* Removes a region of which the client has acknowledged nothing. Its break becomes an anchor, a
 * break of length 0 (spaces.h). Under the flow's lock. */
static __always_inline enum steer_counter undo_region(struct flow *flow, __u64 handoff,
                                                      const struct connection *c)
{
    struct flow_break *b = open_end(flow, handoff, c);

    if (!b || flow->spaces.acked)
        return FE_REFUSED_ENDED;
    b->length = 0;
    b->peer = 0;
    flow->spaces.status = SHUNT_REGION_COMPLETE;
    return FE_UNDONE;
}

/* Notes how many bytes from `start` on the client may have from the backend that sent so far: those
 * up to the right edge of the client's window. */
static __always_inline void note_ahead(struct flow *flow)
{
    flow->ahead = is_before(flow->start, flow->edge) ? flow->edge - flow->start : 0;
}

/* Notes that another backend sends the rest of the active region. Under the flow's lock. */
static __always_inline enum steer_counter
move_region(struct flow *flow, const struct shunt_move *move, const struct asked *a)
{
    struct spaces *s = &flow->spaces;

    if (s->made == 0 || s->status != SHUNT_REGION_ACTIVE || flow->flags & FLOW_RESET)
        return FE_REFUSED_ENDED;
    struct flow_break *b = newest_break(s);
    if (move->from >= b->length)
        return FE_REFUSED_ARGUMENT;
    b->peer = move->peer;
    b->end &= END_WORD;
    flow->ack_spacing = 0;
    note_handoff(flow, move->handoff, move->ring, b->start + (__u32) move->from, a);
    note_ahead(flow);
    return FE_MOVED;
}

/* Ends the active region at what the client has acknowledged. If that is nothing, the break becomes
 * an anchor, a break of length 0 (spaces.h). Under the flow's lock. */
static __always_inline enum steer_counter take_region(struct flow *flow, __u64 handoff, __u32 when)
{
    struct spaces *s = &flow->spaces;

    if (s->made == 0 || s->status != SHUNT_REGION_ACTIVE || flow->flags & FLOW_RESET ||
        flow->handoff != handoff || is_queueing(flow))
        return FE_REFUSED_ENDED;
    struct flow_break *b = newest_break(s);
    if ((when == SHUNT_TAKE_WHOLE && s->acked != b->length) ||
        (when == SHUNT_TAKE_NONE && s->acked))
        return FE_REFUSED_ENDED;
    b->length = s->acked;
    if (!b->length)
        b->peer = 0;
    flow->start = b->start + (__u32) s->acked;
    note_ahead(flow);
    s->status = SHUNT_REGION_COMPLETE;
    return FE_TAKEN;
}

/* Fills in the answer to a server. Under the flow's lock. */
static __always_inline void describe_flow(const struct flow *flow, struct shunt_state *state)
{
    state->handoff = flow->handoff;
    state->acked = flow->spaces.acked;
    state->regions = flow->regions;
    state->status = flow->regions ? flow->spaces.status : SHUNT_REGION_NONE;
    state->flow.start = flow->start;
    state->flow.rcv_nxt = flow->rcv_nxt;
    state->flow.tsval = flow->tsval;
    state->flow.ts_recent = flow->ts_recent;
    state->flow.snd_wnd = flow->snd_wnd;
    state->flow.snd_cwnd = flow->snd_cwnd;
    state->flow.snd_ssthresh = flow->snd_ssthresh;
    state->flow.srtt_us = flow->srtt_us;
    state->flow.ack_spacing = flow->ack_spacing;
    state->flow.ahead = flow->ahead;
    state->flow.token = flow->token;
    state->flow.mss = flow->mss;
    state->flow.snd_wscale = flow->snd_wscale;
    state->flow.rcv_wscale = flow->rcv_wscale;
    state->flow.first = flow->regions == 1;
    state->flow.options = flow->options;
    if (nth_break(&flow->spaces, 0)->end & END_WORD)
        state->flow.options |= SHUNT_OPTION_WORD;
    state->answered = flow->answered;
    state->shut = flow->spaces.acked < nth_break(&flow->spaces, 0)->length &&
                  (__u32) flow->client_window << flow->snd_wscale < flow->mss;
}

/* Returns the status that tells the server of a refused SHUNT_BEGIN where a later one may succeed
 * (include/shunt.h). Returns SHUNT_REGION_NONE for all other refusals, which get no record in the
 * ring. */
static __always_inline __u32 status_of(enum steer_counter refusal)
{
    if (refusal == FE_REFUSED_UNPROVEN)
        return SHUNT_REGION_UNPROVEN;
    if (refusal == FE_REFUSED_UNSENT)
        return SHUNT_REGION_UNSENT;
    if (refusal == FE_REFUSED_PEER)
        return SHUNT_REGION_NO_PEER;
    if (refusal == FE_REFUSED_FAMILY)
        return SHUNT_REGION_FAMILY;
    return SHUNT_REGION_NONE;
}

#endif
