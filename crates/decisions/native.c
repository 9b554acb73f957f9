/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/* The functions of native.h. Each calls the code of crates/handoff/bpf/decisions. */
#include "native.h"

void native_route(struct flow *flow, const struct packet *p, const struct sack *sack, __u64 now,
                  struct route *r)
{
    route(flow, p, sack, now, r);
}

void native_copy(struct flow *flow, const struct packet *p, __u32 index, struct copy *copy)
{
    copy_for_backend(flow, p, index, copy);
}

void native_blocks_of_region(const struct region *region, __u32 ack, struct sack *sack)
{
    blocks_of_region(region, ack, sack);
}

void native_blocks_to_local(const struct spaces *s, struct sack *sack)
{
    blocks_to_local(s, sack);
}

enum cites native_cites(const struct flow *flow, __u32 seq)
{
    return cites(flow, seq);
}

void native_depart(struct flow *flow, const struct packet *p, __u64 now, struct departure *d)
{
    depart(flow, p, now, d);
}

bool native_is_handshake_of(const struct handshake *seen, const struct bpf_tcp_sock *tcp, __u64 now)
{
    return is_handshake_of(seen, tcp, now);
}

void native_new_flow(const struct asked *a, __u32 token, struct flow *flow)
{
    *flow = flow_of(a, token);
}

enum steer_counter native_begin(struct flow *flow, const struct shunt_begin *begin,
                                const struct asked *a)
{
    return begin_region(flow, begin, a, false);
}

enum steer_counter native_append(struct flow *flow, const struct shunt_begin *begin,
                                 const struct asked *a)
{
    return append_region(flow, begin, a);
}

enum steer_counter native_undo(struct flow *flow, __u64 handoff, const struct connection *c)
{
    return undo_region(flow, handoff, c);
}

enum steer_counter native_move(struct flow *flow, const struct shunt_move *move,
                               const struct asked *a)
{
    return move_region(flow, move, a);
}

enum steer_counter native_take(struct flow *flow, __u64 handoff, __u32 when)
{
    return take_region(flow, handoff, when);
}

void native_describe(const struct flow *flow, struct shunt_state *state)
{
    describe_flow(flow, state);
}

bool native_space_acks(struct flow *flow, __u32 peer, __u32 bytes)
{
    return space_acks(flow, peer, bytes);
}

bool native_deliver(struct flow *flow, __u32 peer, __u64 handoff, struct route *r)
{
    return deliver(flow, peer, handoff, r);
}

bool native_cancel(struct flow *flow, __u64 handoff)
{
    return cancel_handoff(flow, handoff);
}

void native_note_sent(struct sender_slot *slot, const struct packet *p)
{
    note_sent(slot, p);
}

bool native_is_made_up(const struct sender_slot *slot, const struct packet *p, __u16 token)
{
    return is_made_up(slot, p, token);
}

bool native_acknowledges_unsent(const struct sender_slot *slot, const struct packet *p)
{
    return acknowledges_unsent(slot, p);
}

__u32 native_take_ack(struct sender_slot *slot, __u32 ack, bool *ahead)
{
    __u32 own = ack_for_sender(slot, ack, ahead);

    note_acked(slot, own);
    return own;
}

__u32 native_to_local(const struct spaces *s, __u32 seq)
{
    return to_local(s, seq);
}

bool native_to_client(const struct spaces *s, __u32 seq, __u32 end, __u32 *client)
{
    return to_client(s, seq, end, client);
}
