/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * Proof that a connection can be steered. In a handoff, a backend sends a payload on the client's
 * connection. Meanwhile the steering programs translate sequence numbers, and send the client's
 * ACKs on to the backend. That is right only if fe_in (on ingress) sees the client's packets and
 * fe_out (on egress) the server's, with the addresses and sequence numbers that the server's socket
 * has. Otherwise steering would corrupt the connection. No setting can promise that. Between these
 * programs and the socket, netfilter may change a connection's addresses, ports (DNAT,
 * REDIRECT) or sequence numbers (SYNPROXY). A tunnel's packets pass the programs inside other
 * packets, and an interface may be missing in the configuration.
 *
 * Each of these two is proof:
 *
 *   handshake   fe_in has seen the connection's SYN and fe_out its SYN-ACK, with the socket's
 *               addresses, ports and initial sequence numbers (RFC 9293, 3.4). So even the first
 *               response of a connection can be handed off. Handshakes are noted only on ports on
 *               which handoffs are requested. A handshake that was answered more than
 *               HANDSHAKE_SECONDS ago is no proof: it may be of an earlier connection with the same
 *               addresses and ports.
 *   packets     only for a connection that has a flow, its entry in the map `flows`. fe_in has seen
 *               an ACK number of the client, and fe_out the end of a segment of the server. Both
 *               lie between the socket's snd_una and snd_nxt. It is enough if either the newest or
 *               the highest ACK number lies there: a stranger may have sent the highest, and the
 *               newest may be in an old packet that came late. A connection whose handshake was not
 *               seen gets a flow when a handoff is refused, and may be handed off from its next
 *               response on.
 *
 * A SYN alone proves nothing: only the server's answer completes a handshake. So a forged SYN does
 * not change what is known of a connection. A sender of many SYNs can push other handshakes out of
 * the map. Then the first response of each of those connections is not handed off.
 */
#ifndef PROOF_H
#define PROOF_H

#include <linux/bpf.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "counters.h"
#include "decisions/numbers.h"
#include "decisions/packet.h"
#include "decisions/proof.h"
#include "steering.h"

struct {
    __uint(type, BPF_MAP_TYPE_LRU_HASH);
    __uint(max_entries, MAX_HANDSHAKES);
    __type(key, struct flow_key);
    __type(value, struct handshake);
    __uint(pinning, LIBBPF_PIN_BY_NAME);
} handshakes SEC(".maps");

/* Ports on which handoffs are requested. The index is a port in the machine's byte order. The value
 * is 1 if handoffs are requested on that port. Only a process with a socket on a port can set its
 * entry. */
struct {
    __uint(type, BPF_MAP_TYPE_ARRAY);
    __uint(max_entries, PORTS);
    __type(key, __u32);
    __type(value, __u8);
    __uint(pinning, LIBBPF_PIN_BY_NAME);
} watched_ports SEC(".maps");

static __always_inline __u8 *watch_of(__be16 port)
{
    __u32 index = bpf_ntohs(port);
    return bpf_map_lookup_elem(&watched_ports, &index);
}

static __always_inline void watch_port(__be16 port)
{
    __u8 *watched = watch_of(port);
    if (watched && port)
        *watched = 1;
}

static __always_inline bool is_watched(__be16 port)
{
    __u8 *watched = watch_of(port);
    return watched && *watched;
}

/* Notes a SYN at fe_in. */
static __noinline int note_syn(const struct flow_key *key, const struct packet *p)
{
    if (p->flags & TH_ACK || !is_watched(p->destination_port))
        return 0;
    struct handshake *seen = bpf_map_lookup_elem(&handshakes, key);
    if (seen) {
        seen->offered_isn = p->seq;
        return 0;
    }
    struct handshake begun = {.offered_isn = p->seq};
    bpf_map_update_elem(&handshakes, key, &begun, BPF_ANY);
    return 0;
}

/* Notes a SYN-ACK at fe_out. */
static __noinline int note_syn_ack(const struct packet *p)
{
    struct flow_key key = {.server_port = p->source_port, .client_port = p->destination_port};

    if (!(p->flags & TH_ACK) || !is_watched(p->source_port))
        return 0;
    __builtin_memcpy(key.client_address, p->destination, sizeof(key.client_address));
    __builtin_memcpy(key.server_address, p->source, sizeof(key.server_address));
    struct handshake *seen = bpf_map_lookup_elem(&handshakes, &key);
    if (!seen || seen->offered_isn + 1 != p->ack)
        return 0;
    if (!seen->answered || seen->client_isn != seen->offered_isn || seen->server_isn != p->seq)
        count(FE_HANDSHAKE);
    seen->client_isn = p->ack - 1;
    seen->server_isn = p->seq;
    seen->answered = 1;
    seen->answered_ns = bpf_ktime_get_ns();
    return 0;
}

/* Whether the programs have seen this connection's own handshake, answered less than
 * HANDSHAKE_SECONDS ago. */
static __always_inline bool was_seen_to_begin(const struct flow_key *key,
                                              const struct bpf_tcp_sock *tcp)
{
    struct handshake *seen = bpf_map_lookup_elem(&handshakes, key);

    return seen && is_handshake_of(seen, tcp, bpf_ktime_get_ns());
}

#endif
