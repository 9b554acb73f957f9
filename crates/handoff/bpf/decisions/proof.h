/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * Proof that a client's packets pass the steering programs with the sequence numbers of its
 * server's socket (../proof.h). A flow is the connection's record in the map `flows`. LOCAL are the
 * sequence numbers of the frontend's kernel, CLIENT those that the client sees.
 */
#ifndef DECISIONS_PROOF_H
#define DECISIONS_PROOF_H

#include <linux/bpf.h>

#include "../steering.h"
#include "numbers.h"

/* Whether a handshake is this socket's, and was answered within HANDSHAKE_SECONDS before `now`. The
 * kernel keeps no initial sequence numbers. It keeps the number of bytes that have followed
 * them. */
static __always_inline bool is_handshake_of(const struct handshake *seen,
                                            const struct bpf_tcp_sock *tcp, __u64 now)
{
    return seen->answered && now - seen->answered_ns < HANDSHAKE_SECONDS * 1000000000ULL &&
           seen->client_isn + 1 + (__u32) tcp->bytes_received == tcp->rcv_nxt &&
           seen->server_isn + 1 + (__u32) tcp->bytes_acked == tcp->snd_una;
}

/* Whether the packets that the flow has noted are proof. Under the flow's lock. `next`: the next
 * sequence number that the socket will send, CLIENT space. */
static __always_inline bool is_proven(const struct flow *flow, const struct bpf_tcp_sock *tcp,
                                      __u32 next)
{
    const __u8 both = FLOW_SEEN_IN | FLOW_SEEN_OUT;
    __u32 outstanding = tcp->snd_nxt - tcp->snd_una;
    bool acked = next - flow->client_ack <= outstanding || next - flow->furthest_ack <= outstanding;

    return (flow->flags & both) == both && acked && tcp->snd_nxt - flow->server_end <= outstanding;
}

/* Begins to collect proof: only packets that pass from now on count. Under the flow's lock. */
static __always_inline void begin_proof(struct flow *flow, const struct bpf_tcp_sock *tcp)
{
    flow->flags &= ~(FLOW_SEEN_IN | FLOW_SEEN_OUT);
    flow->rcv_nxt = tcp->rcv_nxt;
    flow->server_ack = tcp->rcv_nxt;
}

/* Notes a segment at fe_out, whose bytes end at `end` (LOCAL). Under the flow's lock. */
static __always_inline void note_segment(struct flow *flow, __u32 end)
{
    if (!(flow->flags & FLOW_SEEN_OUT) || is_before(flow->server_end, end))
        flow->server_end = end;
    flow->flags |= FLOW_SEEN_OUT;
}

#endif
