/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * SHUNT_BEGIN and the other options of include/shunt.h, as a cgroup program. It runs in the system
 * call of the socket's owner with the socket locked. So nothing can be sent between the moment that
 * the socket's state is read and the moment that the region exists. A region is a range of the
 * connection's sequence numbers that a backend sends. A flow is a connection's record in the map
 * `flows`. A layout is a version of the maps' contents; programs of another layout may run beside
 * these. A ring is a BPF ring buffer, which brings a server the answers to its calls.
 */
#ifndef SOCKOPT_H
#define SOCKOPT_H

#include <linux/bpf.h>
#include <linux/in.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "../../../include/shunt.h"
#include "begun.h"
#include "counters.h"
#include "decisions/connection.h"
#include "decisions/numbers.h"
#include "decisions/regions.h"
#include "edit.h"
#include "flows.h"
#include "kernel.h"
#include "proof.h"
#include "steering.h"

/* <sys/socket.h>, which a BPF target cannot include. */
#define AF_INET  2
#define AF_INET6 10

#define REFUSED 0 /* EPERM */
#define ALLOWED 1
#define HANDLED 2 /* allowed, and answered: the kernel has nothing left to do */

/* Largest number of bytes of an option's value that the kernel shows to the program. For a longer
 * value, the program must set optlen to 0, which means unchanged, or the call fails
 * (Documentation/bpf/prog_cgroup_sockopt.rst). */
#define VISIBLE_BYTES 4096

/* Writes a field of the program's context, which describes the call. For an assignment in C, the
 * compiler may first compute the field's address, to share one store between two paths. The
 * verifier refuses that for the context. */
#define SET_FIELD(ctx, field, value)                                                        \
    asm volatile("*(u32 *)(%0 + %1) = %2"                                                   \
                 :                                                                          \
                 : "r"(ctx), "i"(__builtin_offsetof(struct bpf_sockopt, field)), "r"(value) \
                 : "memory")

/* Cookie of the agent's network namespace, set by the loader; 0: any. Several agents may share a
 * machine, one in each network namespace, and a cgroup program runs for all of them. */
const volatile __u64 netns_cookie = 0;

/* 1 if there are programs of other layouts, set by the loader. If it is 0, the verifier skips the
 * code that looks for their connections. */
const volatile __u8 has_older = 0;

static __always_inline bool is_ours(struct bpf_sockopt *ctx)
{
    return !netns_cookie || bpf_get_netns_cookie(ctx) == netns_cookie;
}

static __always_inline int not_ours(struct bpf_sockopt *ctx)
{
    if (ctx->optlen > VISIBLE_BYTES)
        SET_FIELD(ctx, optlen, 0);
    return ALLOWED;
}

/* Fills in the key of a socket's flow. Returns false if the socket is not a connection that can be
 * handed off. */
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

/* Whether an address is link-local (RFC 4291, 2.5.6; for IPv4, RFC 3927). */
static __always_inline bool is_link_local(const __u8 *address)
{
    const __u32 *word = (const __u32 *) address;
    if (is_mapped(address))
        return (word[3] & bpf_htonl(0xffff0000)) == bpf_htonl(0xa9fe0000);
    return (word[0] & bpf_htonl(0xffc00000)) == bpf_htonl(0xfe800000);
}

/*
 * Whether another machine can send to the client in this machine's name. No machine can if the
 * client is this machine (with the server's own address, or in 127.0.0.0/8): what a machine sends
 * to itself crosses no steered interface. No machine can if either end's address is link-local:
 * such an address means a different host on each link.
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

/* Whether the peer with this index may send a region of this connection. Sets `refusal` if not. */
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

static __always_inline struct flow *find_or_insert(struct asked *a)
{
    struct flow *flow = bpf_map_lookup_elem(&flows, &a->key);
    if (flow)
        return flow;
    a->seen_to_begin = was_seen_to_begin(&a->key, a->tcp);
    struct flow fresh = flow_of(a, bpf_get_prandom_u32());
    bpf_map_update_elem(&flows, &a->key, &fresh, BPF_NOEXIST);
    return bpf_map_lookup_elem(&flows, &a->key);
}

static __always_inline void describe(const struct flow_key *key, struct flow *flow,
                                     struct shunt_state *state)
{
    __builtin_memset(state, 0, sizeof(*state)); /* padding, too: user space will see it */
    __builtin_memcpy(state->flow.client_address, key->client_address,
                     sizeof(state->flow.client_address));
    __builtin_memcpy(state->flow.server_address, key->server_address,
                     sizeof(state->flow.server_address));
    state->flow.client_port = key->client_port;
    state->flow.server_port = key->server_port;
    state->kind = SHUNT_EVENT_STATE;
    if (!flow)
        return;
    bpf_spin_lock(&flow->lock);
    describe_flow(flow, state);
    bpf_spin_unlock(&flow->lock);
}

/* Puts the flow's state into the ring. The caller reads the ring when its call returns, so nothing
 * needs to be woken. */
static __always_inline void report_state(void *ring, const struct flow_key *key, struct flow *flow)
{
    struct shunt_state state;
    describe(key, flow, &state);
    if (bpf_ringbuf_output(ring, &state, sizeof(state), BPF_RB_NO_WAKEUP))
        count(FE_EVENT_LOST);
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
        note_begun(&asked.key, begin.handoff, begin.ring, begin.peer, now);
        report_state(asked.ring, &asked.key, flow);
    } else if (result == FE_REFUSED_UNPROVEN || !is_appended) {
        report_refusal(asked.ring, begin.handoff, result);
    }
    if (result == FE_REFUSED_UNPROVEN)
        watch_port(asked.key.server_port); /* the handshakes of later connections are noted */
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
        note_begun(&asked.key, move.handoff, move.ring, move.peer, bpf_ktime_get_ns());
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

/* Answers SHUNT_STATE. Returns false if the caller has no ring of that number, the socket is no
 * connection, or the value is too short. */
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

/* Whether the programs of another layout steer the connection, or may steer it. A connection in our
 * flow table is ours. Any other is theirs if it is in `older_flows`, and may be theirs until
 * `older_flows` has all of theirs. */
static __noinline bool is_of_older(struct bpf_sock *sk)
{
    struct flow_key key = {};
    __u32 zero = 0;

    if (!flow_key_of(sk, &key) || bpf_map_lookup_elem(&flows, &key))
        return false;
    __u32 *are_all_noted = bpf_map_lookup_elem(&older_noted, &zero);
    return !are_all_noted || !*are_all_noted || bpf_map_lookup_elem(&older_flows, &key);
}

/* Answers a call on a connection of another layout. A call that would begin or move a region is
 * refused. All other calls are left to that layout's program, which runs after this one. */
static __always_inline int answer_for_older(struct bpf_sockopt *ctx)
{
    if (ctx->optname != SHUNT_BEGIN && ctx->optname != SHUNT_APPEND && ctx->optname != SHUNT_MOVE)
        return not_ours(ctx);
    count(FE_REFUSED_OLDER);
    SET_FIELD(ctx, level, 0);
    return REFUSED;
}

/* Returns REFUSED, HANDLED, or, for an unknown option, ALLOWED (the kernel answers ENOPROTOOPT). */
static __always_inline int answer(struct bpf_sockopt *ctx, struct bpf_sock *sk)
{
    enum steer_counter result;
    bool done;

    if (ctx->optname == SHUNT_BEGIN) {
        result = begin(ctx, sk, false);
        done = result == FE_BEGUN;
    } else if (ctx->optname == SHUNT_APPEND) {
        result = begin(ctx, sk, true);
        done = result == FE_BEGUN || result == FE_APPENDED;
    } else if (ctx->optname == SHUNT_UNDO) {
        result = undo(ctx, sk);
        done = result == FE_UNDONE;
    } else if (ctx->optname == SHUNT_MOVE) {
        result = move(ctx, sk);
        done = result == FE_MOVED;
    } else if (ctx->optname == SHUNT_TAKE) {
        result = take(ctx, sk);
        done = result == FE_TAKEN;
    } else if (ctx->optname == SHUNT_CANCEL) {
        cancel(sk);
        return HANDLED;
    } else if (ctx->optname == SHUNT_WATCH) {
        if (sk->protocol != IPPROTO_TCP)
            return REFUSED;
        watch_port(bpf_htons(sk->src_port));
        return HANDLED;
    } else if (ctx->optname == SHUNT_STATE) {
        return tell_state(ctx, sk) ? HANDLED : REFUSED;
    } else {
        return ALLOWED;
    }
    count(result);
    return done ? HANDLED : REFUSED;
}

SEC("cgroup/setsockopt")
int fe_setsockopt(struct bpf_sockopt *ctx)
{
    if (ctx->level != SHUNT_SOL || !is_ours(ctx))
        return not_ours(ctx);

    struct bpf_sock *sk = ctx->sk;
    if (!sk)
        return REFUSED;
    if (has_older && is_of_older(sk))
        return answer_for_older(ctx);
    int answered = answer(ctx, sk);
    if (answered == ALLOWED)
        return ALLOWED;
    /* After this program, those of other layouts run for the same call. While an agent starts, this
     * program may run twice for a call (crates/handoff/src/calls.rs). With another level, the later
     * programs leave the call alone. */
    SET_FIELD(ctx, level, 0);
    if (answered == REFUSED)
        return REFUSED;
    SET_FIELD(ctx, optlen, -1); /* the kernel skips its own setsockopt */
    return ALLOWED;
}

#endif
