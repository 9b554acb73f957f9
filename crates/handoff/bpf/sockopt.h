/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * SHUNT_BEGIN and what else there is (include/shunt.h), as a cgroup program: it runs in the system
 * call of whoever owns the socket, with the socket locked, so that nothing can be sent between
 * reading where it is and the region being there.
 */
#ifndef SOCKOPT_H
#define SOCKOPT_H

#define REFUSED 0 /* EPERM */
#define ALLOWED 1

#define LENGTH_MAX    (1ull << 48)
/* Where an option's value is longer than the kernel shows to programs, they must say that they
 * have not touched it, or the call fails (Documentation/bpf/prog_cgroup_sockopt.rst). */
#define VISIBLE_BYTES 4096

static __always_inline bool is_ours(struct bpf_sockopt *ctx)
{
    return !netns_cookie || bpf_get_netns_cookie(ctx) == netns_cookie;
}

static __always_inline int not_ours(struct bpf_sockopt *ctx)
{
    if (ctx->optlen > VISIBLE_BYTES)
        ctx->optlen = 0;
    return ALLOWED;
}

/* False: not a connection that can be handed off. */
static __always_inline bool flow_key_of(struct bpf_sock *sk, struct flow_key *key)
{
    __u32 *client = (__u32 *) key->client_address;
    __u32 *server = (__u32 *) key->server_address;

    if (sk->protocol != IPPROTO_TCP)
        return false;
    if (sk->state != BPF_TCP_ESTABLISHED && sk->state != BPF_TCP_CLOSE_WAIT)
        return false;
    if (sk->family == AF_INET) {
        map_ipv4(client, sk->dst_ip4);
        map_ipv4(server, sk->src_ip4);
    } else if (sk->family == AF_INET6) { /* IPv4 on a dual-stack socket is mapped already */
        client[0] = sk->dst_ip6[0];
        client[1] = sk->dst_ip6[1];
        client[2] = sk->dst_ip6[2];
        client[3] = sk->dst_ip6[3];
        server[0] = sk->src_ip6[0];
        server[1] = sk->src_ip6[1];
        server[2] = sk->src_ip6[2];
        server[3] = sk->src_ip6[3];
    } else {
        return false;
    }
    key->client_port = sk->dst_port;
    key->server_port = bpf_htons(sk->src_port);
    return true;
}

static __always_inline bool is_mapped(const __u8 *address)
{
    const __u32 *word = (const __u32 *) address;
    return word[0] == 0 && word[1] == 0 && word[2] == bpf_htonl(0xffff);
}

/* RFC 4291, 2.5.6; RFC 3927. */
static __always_inline bool is_link_local(const __u8 *address)
{
    const __u32 *word = (const __u32 *) address;
    if (is_mapped(address))
        return (word[3] & bpf_htonl(0xffff0000)) == bpf_htonl(0xa9fe0000);
    return (word[0] & bpf_htonl(0xffc00000)) == bpf_htonl(0xfe800000);
}

/*
 * Whether another machine can send to the client as this one. What this machine sends to itself
 * crosses no interface that is steered, and a link-local address, of either end, means another host
 * on each link.
 */
static __always_inline bool is_elsewhere(const struct flow_key *key)
{
    const __u32 *client = (const __u32 *) key->client_address;
    const __u32 *server = (const __u32 *) key->server_address;

    if (client[3] == server[3] && client[2] == server[2] && client[1] == server[1] &&
        client[0] == server[0])
        return false;
    if (is_mapped(key->client_address) &&
        (client[3] & bpf_htonl(0xff000000)) == bpf_htonl(0x7f000000))
        return false;
    return !is_link_local(key->client_address) && !is_link_local(key->server_address);
}

/* What a region needs to know of the socket that it is asked for on. */
struct asked {
    struct flow_key key;
    void *ring; /* where the caller waits */
    struct bpf_tcp_sock *tcp;
    struct connection connection;
    bool seen_to_begin; /* its flow is new, and its handshake is proof (proof.h) */
};

/* Whether `peer` may send a region of this socket; else why not. */
static __always_inline bool may_send(__u32 index, const struct flow_key *key,
                                     enum steer_counter *refusal)
{
    struct steer_peer *peer = bpf_map_lookup_elem(&peers, &index);

    if (!peer || !peer->up)
        *refusal = FE_REFUSED_PEER;
    else if (!is_elsewhere(key))
        *refusal = FE_REFUSED_CLIENT;
    else if (!(is_mapped(key->client_address) ? peer->ipv4_ifindex : peer->ipv6_ifindex))
        *refusal = FE_REFUSED_FAMILY;
    else
        return true;
    return false;
}

static __always_inline bool load_asked(struct bpf_sock *sk, __u32 ring, __u32 peer, struct asked *a,
                                       enum steer_counter *refusal)
{
    *refusal = FE_REFUSED_ARGUMENT;
    if (!flow_key_of(sk, &a->key))
        return false;
    a->ring = ring_of_caller(ring);
    if (!a->ring || !may_send(peer, &a->key, refusal))
        return false;
    a->tcp = bpf_tcp_sock(sk);
    if (!a->tcp)
        return false;
    load_connection(sk, &a->connection);
    return a->connection.usable;
}

/* A flow whose sequence spaces are still the same. */
static __always_inline struct flow *find_or_insert(struct asked *a)
{
    struct flow *flow = bpf_map_lookup_elem(&flows, &a->key);
    if (flow)
        return flow;
    a->seen_to_begin = was_seen_to_begin(&a->key, a->tcp);
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
        .token = bpf_get_prandom_u32(),
        .flags = a->seen_to_begin ? FLOW_SEEN_IN | FLOW_SEEN_OUT : 0,
    };
    fresh.edge = later(fresh.server_end, fresh.client_ack + a->connection.snd_wnd);
    bpf_map_update_elem(&flows, &a->key, &fresh, BPF_NOEXIST);
    return bpf_map_lookup_elem(&flows, &a->key);
}

/* Of the socket, brought up to date by what has passed by it: while a region is active its ACKs,
 * with window and timestamps, go to a backend. */
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
    flow->mss =
        tcp->mss_cache; /* bounded by the path: the backend hears of no router's complaint */
}

/* What the client has said to the socket. Later packets may have passed here, and earlier ones need
 * not have: what came in fragments went past fe_in. */
static __always_inline void note_client_of(struct flow *flow, const struct asked *a, __u32 start)
{
    const struct connection *c = &a->connection;
    __u32 una = a->tcp->snd_una;
    __u32 acked = start;

    barrier_var(una); /* the verifier takes no arithmetic on the socket's pointer */
    to_client(&flow->spaces, una, una, &acked);
    if (flow->spaces.made == 0 || is_before(flow->client_ack, acked)) {
        flow->client_ack = acked;
        flow->client_window = c->snd_wnd >> c->snd_wscale;
    }
    flow->edge = later(flow->edge, later(start, acked + c->snd_wnd));
}

/* Whose completion `ring` hears of, and from where on its backend sends. */
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

/* Under the flow's lock. */
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
    /* What has been sent is sent again where it is lost. What waits for the client's window might
     * wait for ever: a payload that fills its memory first leaves no window for what lies before.
     */
    if (local != tcp->snd_nxt)
        return FE_REFUSED_UNSENT;

    to_client(s, local, local, &start);
    /* A packet that has passed since the flow was made may claim anything. */
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
    /* A server that writes on waits for the ACK of the end, which opens the window (behind.h). A
     * client that makes it up loses its own bytes, and nobody keeps a record of those. */
    if (is_appended)
        flow->flags |= FLOW_QUEUES;
    else
        b->end = end_of_new_region(flow, begin->length);
    if (tcp->snd_una == local)
        flow->flags |= FLOW_START_ACKED;
    return FE_BEGUN;
}

/* Under the flow's lock: the newest region, if it is that handoff's, and nothing lies behind it. */
static __always_inline struct flow_break *open_end(struct flow *flow, __u64 handoff,
                                                   const struct connection *c)
{
    if (flow->spaces.made == 0 || !is_queueing(flow) || flow->handoff != handoff)
        return NULL;
    struct flow_break *b = newest_break(&flow->spaces);
    return b->local == c->write_seq ? b : NULL;
}

/* Under the flow's lock. */
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

/* Under the flow's lock. A break of no bytes is an anchor (spaces.h). */
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

/* Of a sender that is lost the client may have bytes up to where it had room. */
static __always_inline void note_ahead(struct flow *flow)
{
    flow->ahead = is_before(flow->start, flow->edge) ? flow->edge - flow->start : 0;
}

/* Under the flow's lock. */
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

/* Under the flow's lock. A break of no bytes is an anchor (spaces.h). */
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

static __always_inline void describe(const struct flow_key *key, struct flow *flow,
                                     struct shunt_state *state)
{
    __builtin_memset(state, 0, sizeof(*state)); /* padding too: it leaves the kernel */
    __builtin_memcpy(state->client_address, key->client_address, sizeof(state->client_address));
    __builtin_memcpy(state->server_address, key->server_address, sizeof(state->server_address));
    state->client_port = key->client_port;
    state->server_port = key->server_port;
    state->kind = SHUNT_EVENT_STATE;
    if (!flow)
        return;
    bpf_spin_lock(&flow->lock);
    state->handoff = flow->handoff;
    state->acked = flow->spaces.acked;
    state->regions = flow->regions;
    state->status = flow->regions ? flow->spaces.status : SHUNT_REGION_NONE;
    state->start = flow->start;
    state->rcv_nxt = flow->rcv_nxt;
    state->tsval = flow->tsval;
    state->ts_recent = flow->ts_recent;
    state->snd_wnd = flow->snd_wnd;
    state->snd_cwnd = flow->snd_cwnd;
    state->snd_ssthresh = flow->snd_ssthresh;
    state->srtt_us = flow->srtt_us;
    state->ack_spacing = flow->ack_spacing;
    state->ahead = flow->ahead;
    state->token = flow->token;
    state->mss = flow->mss;
    state->snd_wscale = flow->snd_wscale;
    state->rcv_wscale = flow->rcv_wscale;
    state->options = flow->options;
    if (newest_break(&flow->spaces)->end & END_WORD)
        state->options |= SHUNT_OPTION_WORD;
    state->answered = flow->answered;
    state->shut = flow->spaces.acked < newest_break(&flow->spaces)->length &&
                  (__u32) flow->client_window << flow->snd_wscale < flow->mss;
    bpf_spin_unlock(&flow->lock);
}

/* The caller looks into the ring when its call returns: no need to wake it. */
static __always_inline void report_state(void *ring, const struct flow_key *key, struct flow *flow)
{
    struct shunt_state state;
    describe(key, flow, &state);
    if (bpf_ringbuf_output(ring, &state, sizeof(state), BPF_RB_NO_WAKEUP))
        count(FE_EVENT_LOST);
}

/* Of a refused SHUNT_BEGIN; none: another one on that connection will do no better. */
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

static __always_inline void report_refusal(void *ring, __u64 handoff, enum steer_counter refusal)
{
    struct shunt_state state = {.handoff = handoff,
                                .kind = SHUNT_EVENT_STATE,
                                .status = status_of(refusal)};

    if (state.status == SHUNT_REGION_NONE)
        return;
    if (bpf_ringbuf_output(ring, &state, sizeof(state), BPF_RB_NO_WAKEUP))
        count(FE_EVENT_LOST);
}

static __always_inline struct begun *begun_at(__u64 handoff, __u32 ring)
{
    __u32 index = ring * BEGUN_OF_A_RING + (handoff & (BEGUN_OF_A_RING - 1));

    return bpf_map_lookup_elem(&begun, &index);
}

/* For the agent, which hears of this handoff by the server that is `ring`'s, after this call. A row
 * that is half old and half new is no server's. */
static __always_inline void note_begun(const struct asked *a, __u64 handoff, __u32 ring, __u32 peer,
                                       __u64 now)
{
    struct begun *b = begun_at(handoff, ring);

    if (!b)
        return;
    b->handoff = 0;
    barrier();
    b->begun_ns = now;
    b->flow = a->key;
    b->peer = peer;
    barrier();
    b->handoff = handoff;
}

/* Its region is over, or another name's. A function of its own: fe_in's stack is full. */
static __noinline int forget_begun(__u64 handoff, __u32 ring)
{
    struct begun *b = begun_at(handoff, ring);

    if (b && b->handoff == handoff)
        b->handoff = 0;
    return 0;
}

static __always_inline enum steer_counter begin(struct bpf_sockopt *ctx, struct bpf_sock *sk,
                                                bool is_appended)
{
    struct shunt_begin *value = ctx->optval;
    enum steer_counter result;
    struct asked asked = {};

    if ((void *) (value + 1) > ctx->optval_end)
        return FE_REFUSED_ARGUMENT;
    struct shunt_begin begin = *value;
    if (begin.length == 0 || begin.length >= LENGTH_MAX)
        return FE_REFUSED_ARGUMENT;
    if (!load_asked(sk, begin.ring, begin.peer, &asked, &result)) {
        if (asked.ring && !is_appended)
            report_refusal(asked.ring, begin.handoff, result);
        return result;
    }
    struct flow *flow = find_or_insert(&asked);
    if (!flow)
        return FE_REFUSED_FULL;
    __u64 now = bpf_ktime_get_ns();
    flow->last_seen_ns = now;
    bpf_spin_lock(&flow->lock);
    if (is_appended)
        result = append_region(flow, &begin, &asked);
    else
        result = begin_region(flow, &begin, &asked, false);
    bpf_spin_unlock(&flow->lock);
    if (result == FE_BEGUN) {
        note_begun(&asked, begin.handoff, begin.ring, begin.peer, now);
        report_state(asked.ring, &asked.key, flow);
    } else if (result == FE_REFUSED_UNPROVEN || !is_appended) {
        report_refusal(asked.ring, begin.handoff, result);
    }
    if (result == FE_REFUSED_UNPROVEN)
        watch_port(asked.key.server_port); /* connections to come are watched from the beginning */
    return result;
}

static __always_inline enum steer_counter move(struct bpf_sockopt *ctx, struct bpf_sock *sk)
{
    struct shunt_move *value = ctx->optval;
    enum steer_counter result;
    struct asked asked = {};

    if ((void *) (value + 1) > ctx->optval_end)
        return FE_REFUSED_ARGUMENT;
    struct shunt_move move = *value;
    if (!load_asked(sk, move.ring, move.peer, &asked, &result))
        return result;
    struct flow *flow = bpf_map_lookup_elem(&flows, &asked.key);
    if (!flow)
        return FE_REFUSED_ARGUMENT;
    bpf_spin_lock(&flow->lock);
    __u64 before = flow->handoff;
    __u32 ring_before = flow->ring;
    result = move_region(flow, &move, &asked);
    bpf_spin_unlock(&flow->lock);
    if (result == FE_MOVED) {
        forget_begun(before, ring_before);
        note_begun(&asked, move.handoff, move.ring, move.peer, bpf_ktime_get_ns());
        report_state(asked.ring, &asked.key, flow);
    }
    return result;
}

static __always_inline enum steer_counter undo(struct bpf_sockopt *ctx, struct bpf_sock *sk)
{
    __u64 *value = ctx->optval;
    struct flow_key key = {};
    struct connection connection = {};

    if ((void *) (value + 1) > ctx->optval_end || !flow_key_of(sk, &key))
        return FE_REFUSED_ARGUMENT;
    __u64 handoff = *value;
    struct flow *flow = bpf_map_lookup_elem(&flows, &key);
    if (!flow)
        return FE_REFUSED_ARGUMENT;
    load_connection(sk, &connection);
    bpf_spin_lock(&flow->lock);
    enum steer_counter result = undo_region(flow, handoff, &connection);
    __u32 ring = flow->ring;
    bpf_spin_unlock(&flow->lock);
    if (result == FE_UNDONE)
        forget_begun(handoff, ring);
    return result;
}

static __always_inline enum steer_counter take(struct bpf_sockopt *ctx, struct bpf_sock *sk)
{
    struct shunt_take *value = ctx->optval;
    struct flow_key key = {};

    if ((void *) (value + 1) > ctx->optval_end || !flow_key_of(sk, &key))
        return FE_REFUSED_ARGUMENT;
    __u64 handoff = value->handoff;
    __u32 when = value->when;
    void *ring = ring_of_caller(value->ring);
    struct flow *flow = bpf_map_lookup_elem(&flows, &key);
    if (!ring || !flow)
        return FE_REFUSED_ARGUMENT;
    bpf_spin_lock(&flow->lock);
    enum steer_counter result = take_region(flow, handoff, when);
    __u32 ring_before = flow->ring;
    bpf_spin_unlock(&flow->lock);
    if (result == FE_TAKEN) {
        forget_begun(handoff, ring_before);
        report_state(ring, &key, flow);
    }
    return result;
}

static __always_inline void cancel(struct bpf_sock *sk)
{
    struct flow_key key = {};
    struct flow *flow = flow_key_of(sk, &key) ? bpf_map_lookup_elem(&flows, &key) : NULL;
    if (!flow)
        return;
    bpf_spin_lock(&flow->lock);
    bool was_active = flow->spaces.status == SHUNT_REGION_ACTIVE;
    if (was_active)
        flow->spaces.status = SHUNT_REGION_CANCELLED;
    __u64 handoff = flow->handoff;
    __u32 ring = flow->ring;
    bpf_spin_unlock(&flow->lock);
    if (was_active) {
        forget_begun(handoff, ring);
        count(FE_CANCELLED);
    }
}

/* False: no such ring, or not a connection. */
static __always_inline bool tell_state(struct bpf_sockopt *ctx, struct bpf_sock *sk)
{
    __u32 *value = ctx->optval;
    struct flow_key key = {};

    if ((void *) (value + 1) > ctx->optval_end || !flow_key_of(sk, &key))
        return false;
    __u32 index = *value;
    void *ring = ring_of_caller(index);
    if (!ring)
        return false;
    report_state(ring, &key, bpf_map_lookup_elem(&flows, &key));
    return true;
}

SEC("cgroup/setsockopt")
int fe_setsockopt(struct bpf_sockopt *ctx)
{
    if (ctx->level != SHUNT_SOL || !is_ours(ctx))
        return not_ours(ctx);

    struct bpf_sock *sk = ctx->sk;
    if (!sk)
        return REFUSED;
    if (ctx->optname == SHUNT_BEGIN) {
        enum steer_counter result = begin(ctx, sk, false);
        count(result);
        if (result != FE_BEGUN)
            return REFUSED;
    } else if (ctx->optname == SHUNT_APPEND) {
        enum steer_counter result = begin(ctx, sk, true);
        count(result);
        if (result != FE_BEGUN && result != FE_APPENDED)
            return REFUSED;
    } else if (ctx->optname == SHUNT_UNDO) {
        enum steer_counter result = undo(ctx, sk);
        count(result);
        if (result != FE_UNDONE)
            return REFUSED;
    } else if (ctx->optname == SHUNT_MOVE) {
        enum steer_counter result = move(ctx, sk);
        count(result);
        if (result != FE_MOVED)
            return REFUSED;
    } else if (ctx->optname == SHUNT_TAKE) {
        enum steer_counter result = take(ctx, sk);
        count(result);
        if (result != FE_TAKEN)
            return REFUSED;
    } else if (ctx->optname == SHUNT_CANCEL) {
        cancel(sk);
    } else if (ctx->optname == SHUNT_WATCH) {
        if (sk->protocol != IPPROTO_TCP)
            return REFUSED;
        watch_port(bpf_htons(sk->src_port));
    } else if (ctx->optname == SHUNT_STATE) {
        if (!tell_state(ctx, sk))
            return REFUSED;
    } else {
        return ALLOWED; /* to the kernel, which says ENOPROTOOPT */
    }
    ctx->optlen = -1; /* all done: the kernel need not look */
    return ALLOWED;
}

#endif
