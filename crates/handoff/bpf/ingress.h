/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * Client packets as they arrive at the frontend. decisions/arrivals.h decides who gets each, and
 * this file rewrites it for its receiver. A flow is the record of a client connection, and a region
 * a range of its sequence numbers that a backend sends. A flow's token is a random number, by which
 * be_in, the backend's program, recognizes copies.
 *
 * A packet for both the frontend's stack and a backend is cloned into this interface's ingress with
 * a mark. The clone passes fe_in, the program of this file, a second time and becomes the backend's
 * copy. So the original, whose data the frontend waits for, is neither delayed nor reordered.
 */
#ifndef INGRESS_H
#define INGRESS_H

#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "../../../include/shunt.h"
#include "begun.h"
#include "counters.h"
#include "decisions/arrivals.h"
#include "decisions/numbers.h"
#include "decisions/packet.h"
#include "decisions/spaces.h"
#include "edit.h"
#include "flows.h"
#include "marks.h"
#include "parse.h"
#include "path.h"
#include "plain.h"
#include "proof.h"
#include "reset.h"
#include "sack.h"
#include "steering.h"

/* Mark of a clone. The number in it is the index, in the flow's array `breaks`, of the region that
 * the copy is for. */
#define COPY_MARK MARK_OF(0)

/* ---- to the frontend's stack ---- */

static __noinline int sack_to_local(struct __sk_buff *skb, const struct packet *p,
                                    struct flow *flow, struct edit *e)
{
    struct sack sack = {};
    sack.blocks = load_sack(skb, p, &sack);
    bpf_spin_lock(&flow->lock);
    blocks_to_local(&flow->spaces, &sack);
    bpf_spin_unlock(&flow->lock);
    return store_sack(skb, p, e, &sack);
}

static __noinline int to_server(struct __sk_buff *skb, const struct packet *p, struct flow *flow,
                                __u32 ack, __u16 window)
{
    struct edit e = {};
    struct tcphdr *tcp = tcp_header(skb, p);
    if (!tcp)
        return TC_ACT_SHOT;
    if (ack != p->ack)
        put32(&e.plain, &tcp->ack_seq, bpf_htonl(ack));
    if (window != p->window)
        put16(&e.plain, &tcp->window, bpf_htons(window));
    if (p->sack) {
        count(FE_IN_SACK);
        if (sack_to_local(skb, p, flow, &e)) {
            count(FE_DROP_REWRITE);
            return TC_ACT_SHOT;
        }
    }
    if (!sums_follow(skb, p, &e)) {
        count(FE_DROP_REWRITE);
        return TC_ACT_SHOT;
    }
    return PASS;
}

/* ---- to a backend ---- */

static __noinline int sack_to_region(struct __sk_buff *skb, const struct packet *p,
                                     const struct region *region, __u32 ack, struct edit *e)
{
    struct sack sack = {};
    sack.blocks = load_sack(skb, p, &sack);
    blocks_of_region(region, ack, &sack);
    return store_sack(skb, p, e, &sack);
}

/*
 * Turns the packet into the ACK that a backend gets: it is about the backend's region alone, and
 * without data. The sequence field has the frontend's newest ACK number, which be_in takes from
 * there. The urgent pointer, which no receiver reads without URG, has half of the flow's token.
 * This is always inlined: with one more function on the path to store_sack, the stacks of all
 * functions on that path would exceed the verifier's 512 bytes.
 */
static __always_inline bool rewrite_copy(struct __sk_buff *skb, const struct packet *p,
                                         const struct steer_peer *peer, const struct copy *copy)
{
    struct edit e = {};
    __u32 ack = copy->ack;

    if (!put_address(skb, p, &e, DESTINATION,
                     (const __u32 *) (is_ipv6(p) ? peer->ipv6 : peer->ipv4)) ||
        !put_fresh_ttl(skb, p))
        return false;
    struct tcphdr *tcp = tcp_header(skb, p);
    if (!tcp)
        return false;
    put16(&e.plain, &tcp->dest, peer->port);
    put32(&e.plain, &tcp->seq, bpf_htonl(copy->server_ack));
    put32(&e.plain, &tcp->ack_seq, bpf_htonl(ack));
    put16(&e.plain, &tcp->window, bpf_htons(copy->window));
    put_flags(&e, tcp, TH_FIN | TH_PSH | TH_URG, TH_ACK);
    put16(&e.plain, &tcp->urg_ptr, bpf_htons(copy->token));
    if (p->sack && sack_to_region(skb, p, &copy->region, ack, &e))
        return false;
    if (p->payload_bytes == 0)
        return sums_follow(skb, p, &e);
    count(FE_IN_STRIPPED);
    return cut_payload(skb, p, &e) == 0;
}

static __noinline int to_backend(struct __sk_buff *skb, struct packet *p, struct flow *flow,
                                 __u32 index)
{
    if (p->is_odd && make_plain(skb, p)) {
        count(FE_DROP_REWRITE);
        return TC_ACT_SHOT;
    }
    struct copy copy = {};
    bpf_spin_lock(&flow->lock);
    copy_for_backend(flow, p, index, &copy);
    bpf_spin_unlock(&flow->lock);

    struct steer_peer *peer = bpf_map_lookup_elem(&peers, &copy.region.payload.peer);
    if (!peer || !(is_ipv6(p) ? peer->ipv6_ifindex : peer->ipv4_ifindex)) {
        count(FE_DROP_COPY);
        return TC_ACT_SHOT;
    }
    if (!leaves_its_vlan(skb) || !rewrite_copy(skb, p, peer, &copy)) {
        count(FE_DROP_REWRITE);
        return TC_ACT_SHOT;
    }
    /* Looks up route and neighbour as for a packet of this machine. bpf_fib_lookup would not do: it
     * requires that the interface forwards packets (sysctl forwarding). */
    return bpf_redirect_neigh(is_ipv6(p) ? peer->ipv6_ifindex : peer->ipv4_ifindex, NULL, 0, 0);
}

/* ---- the program ---- */

/* Whether the kernel already has a connection with the packet's addresses and ports, so that a SYN
 * does not begin a new one (RFC 5961, 4). Connections in TIME-WAIT, and those whose handshake is
 * not complete, do not count. */
static __noinline bool has_connection(struct __sk_buff *skb, const struct packet *p)
{
    struct bpf_sock_tuple t = {};
    __u32 bytes = sizeof(t.ipv4);

    if (is_ipv6(p)) {
        bytes = sizeof(t.ipv6);
        __builtin_memcpy(t.ipv6.saddr, p->source, sizeof(t.ipv6.saddr));
        __builtin_memcpy(t.ipv6.daddr, p->destination, sizeof(t.ipv6.daddr));
        t.ipv6.sport = p->source_port;
        t.ipv6.dport = p->destination_port;
    } else {
        t.ipv4.saddr = p->source[3];
        t.ipv4.daddr = p->destination[3];
        t.ipv4.sport = p->source_port;
        t.ipv4.dport = p->destination_port;
    }
    struct bpf_sock *sk = bpf_skc_lookup_tcp(skb, &t, bytes, BPF_F_CURRENT_NETNS, 0);
    if (!sk)
        return false;
    __u32 state = sk->state;
    bpf_sk_release(sk);
    return state != BPF_TCP_LISTEN && state != BPF_TCP_TIME_WAIT && state != BPF_TCP_NEW_SYN_RECV;
}

static __always_inline void report(const struct route *r)
{
    if (r->event.kind == SHUNT_EVENT_COMPLETE) {
        count(FE_COMPLETED);
    } else {
        count(FE_CLIENT_RESET);
        forget_begun(r->event.handoff, r->ring);
    }
    emit(r->ring, &r->event);
}

/* Clones the packet into this interface's ingress, marked as a copy. */
static __always_inline void send_copy(struct __sk_buff *skb, __u32 index)
{
    struct marks before = put_mark(skb, COPY_MARK | index);
    if (bpf_clone_redirect(skb, skb->ifindex, BPF_F_INGRESS))
        count(FE_DROP_REWRITE);
    restore_marks(skb, &before);
}

/*
 * Decides who gets a client's packet, and notes in the flow what the packet says. Neither this
 * function nor steer() is inlined, because of stack depth: the stacks of all active functions may
 * have 512 bytes together. Older kernels round each up to a multiple of 32 (kernel/bpf/verifier.c,
 * check_max_stack_depth). This function has returned, and its stack is free, when packets are
 * rewritten.
 */
static __noinline void choose_route(struct __sk_buff *skb, const struct packet *p,
                                    struct flow *flow, struct route *r)
{
    __u64 now = bpf_ktime_get_coarse_ns();
    struct sack sack = {};
    if (p->sack)
        sack.blocks = load_sack(skb, p, &sack);

    bpf_spin_lock(&flow->lock);
    route(flow, p, &sack, now, r);
    bpf_spin_unlock(&flow->lock);
}

static __noinline int steer(struct __sk_buff *skb, struct packet *p, struct flow *flow)
{
    struct route r = {.copy = NO_BREAK};

    choose_route(skb, p, flow, &r);
    if (r.untouched)
        return PASS;
    if (r.event.kind)
        report(&r);
    if (r.nobody) {
        count(FE_DROP_BAD_ACK);
        return TC_ACT_SHOT;
    }
    if (r.ended) {
        count(FE_IN_ENDED);
        return answer_with_reset(skb, p);
    }
    if (r.clamped)
        count(FE_IN_CLAMPED);
    if (r.held) {
        count(FE_IN_HELD);
        return TC_ACT_SHOT;
    }
    if (r.late)
        count(FE_IN_DSACK);
    if (r.strange)
        count(FE_IN_STRANGE);
    if (!r.server) {
        count(FE_IN_BACKEND);
        return to_backend(skb, p, flow, r.copy);
    }
    count(r.copy == NO_BREAK ? FE_IN_SERVER : FE_IN_BOTH);
    if (r.copy != NO_BREAK)
        send_copy(skb, r.copy);
    if (r.behind && !move_seq(skb, p, flow->server_ack)) {
        count(FE_DROP_REWRITE);
        return TC_ACT_SHOT;
    }
    return to_server(skb, p, flow, r.ack, r.window);
}

static __always_inline void key_of_client(const struct packet *p, struct flow_key *key)
{
    __builtin_memcpy(key->client_address, p->source, sizeof(key->client_address));
    __builtin_memcpy(key->server_address, p->destination, sizeof(key->server_address));
    key->client_port = p->source_port;
    key->server_port = p->destination_port;
}

/* Looks up the flow of a client's packet. This function and the next two are not inlined, so that
 * the key is on their own stack and not on fe_in's. */
static __noinline struct flow *flow_of_clients(const struct packet *p)
{
    struct flow_key key = {};

    key_of_client(p, &key);
    return bpf_map_lookup_elem(&flows, &key);
}

/* Forgets the flow of a client that opens a new connection, if the kernel has no socket of the old
 * one. Nothing else would end the old connection's region, so the region is reported as reset. */
static __noinline void forget_flow(const struct packet *p, struct flow *flow)
{
    struct route r = {};
    struct flow_key key = {};

    bpf_spin_lock(&flow->lock);
    if (flow->spaces.status == SHUNT_REGION_ACTIVE)
        end_region(flow, &r, SHUNT_REGION_CANCELLED, SHUNT_EVENT_RESET);
    bpf_spin_unlock(&flow->lock);
    if (r.event.kind)
        report(&r);
    key_of_client(p, &key);
    bpf_map_delete_elem(&flows, &key);
}

static __noinline int note_syn_of(const struct packet *p)
{
    struct flow_key key = {};

    key_of_client(p, &key);
    return note_syn(&key, p);
}

SEC("tc")
int fe_in(struct __sk_buff *skb)
{
    int index = take_mark(skb, COPY_MARK);
    struct packet p;

    if (!parse(skb, &p))
        return steer_report(skb);
    struct flow *flow = flow_of_clients(&p);
    if (index != NOT_MARKED) {
        if (flow)
            return to_backend(skb, &p, flow, index & (BREAKS - 1));
        count(FE_DROP_COPY);
        return TC_ACT_SHOT;
    }
    if (p.flags & TH_SYN) {
        if (flow && has_connection(skb, &p))
            return PASS;
        if (flow)
            forget_flow(&p, flow);
        note_syn_of(&p);
        return PASS;
    }
    if (!flow)
        return PASS;
    return steer(skb, &p, flow);
}

#endif
