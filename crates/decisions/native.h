/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * The decisions of the steering programs as ordinary functions, from which build.rs generates the
 * Rust declarations. Each does what its program does with the flow (the record of a client
 * connection) or with the slot (the record of a backend's socket), and nothing else. At the
 * frontend, fe_in and fe_out run on ingress and egress, and fe_setsockopt answers servers. At the
 * backend, be_in and be_out run on ingress and egress.
 */
#ifndef NATIVE_H
#define NATIVE_H

#include <linux/bpf.h>

#include "../../include/shunt.h"
#include "../handoff/bpf/decisions/arrivals.h"
#include "../handoff/bpf/decisions/connection.h"
#include "../handoff/bpf/decisions/departures.h"
#include "../handoff/bpf/decisions/numbers.h"
#include "../handoff/bpf/decisions/packet.h"
#include "../handoff/bpf/decisions/proof.h"
#include "../handoff/bpf/decisions/regions.h"
#include "../handoff/bpf/decisions/reports.h"
#include "../handoff/bpf/decisions/requests.h"
#include "../handoff/bpf/decisions/sender.h"
#include "../handoff/bpf/steering.h"

/* Decisions of fe_in. */
void native_route(struct flow *flow, const struct packet *p, const struct sack *sack, __u64 now,
                  struct route *r);
void native_copy(struct flow *flow, const struct packet *p, __u32 index, struct copy *copy);
void native_blocks_of_region(const struct region *region, __u32 ack, struct sack *sack);
void native_blocks_to_local(const struct spaces *s, struct sack *sack);
enum cites native_cites(const struct flow *flow, __u32 seq);

/* Decisions of fe_out. */
void native_depart(struct flow *flow, const struct packet *p, __u64 now, struct departure *d);

/* Decisions of fe_setsockopt. */
bool native_is_handshake_of(const struct handshake *seen, const struct bpf_tcp_sock *tcp,
                            __u64 now);
void native_new_flow(const struct asked *a, __u32 token, struct flow *flow);
enum steer_counter native_begin(struct flow *flow, const struct shunt_begin *begin,
                                const struct asked *a);
enum steer_counter native_append(struct flow *flow, const struct shunt_begin *begin,
                                 const struct asked *a);
enum steer_counter native_undo(struct flow *flow, __u64 handoff, const struct connection *c);
enum steer_counter native_move(struct flow *flow, const struct shunt_move *move,
                               const struct asked *a);
enum steer_counter native_take(struct flow *flow, __u64 handoff, __u32 when);
void native_describe(const struct flow *flow, struct shunt_state *state);

/* Decisions on requests of agents. */
bool native_space_acks(struct flow *flow, __u32 peer, __u32 bytes);
bool native_deliver(struct flow *flow, __u32 peer, __u64 handoff, struct route *r);
bool native_cancel(struct flow *flow, __u64 handoff);

/* Decisions of be_out and be_in. */
void native_note_sent(struct sender_slot *slot, const struct packet *p);
bool native_is_made_up(const struct sender_slot *slot, const struct packet *p, __u16 token);
bool native_acknowledges_unsent(const struct sender_slot *slot, const struct packet *p);
__u32 native_take_ack(struct sender_slot *slot, __u32 ack, bool *ahead);

/* Translation between the numbers of the frontend's kernel (local) and the client's. */
__u32 native_to_local(const struct spaces *s, __u32 seq);
bool native_to_client(const struct spaces *s, __u32 seq, __u32 end, __u32 *client);

#endif
