/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * Regions that servers have begun or moved. The agent finds them in a map without a system call. A
 * region is a range of a client connection's sequence numbers that another machine sends, for one
 * handoff of a server. Each server has a ring (a BPF ring buffer), and an equal share of the map.
 */
#ifndef BEGUN_H
#define BEGUN_H

#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

#include "decisions/numbers.h"
#include "steering.h"

/* Not pinned: each agent has its own map. A new agent finds older handoffs in the map `flows`. */
struct {
    __uint(type, BPF_MAP_TYPE_ARRAY);
    __uint(max_entries, BEGUN);
    __uint(map_flags, BPF_F_MMAPABLE);
    __type(key, __u32);
    __type(value, struct begun);
} begun SEC(".maps");

static __always_inline struct begun *begun_at(__u64 handoff, __u32 ring)
{
    __u32 index = ring * BEGUN_OF_A_RING + (handoff & (BEGUN_OF_A_RING - 1));

    return bpf_map_lookup_elem(&begun, &index);
}

/* Notes a region for the agent. The server that owns the ring `ring` tells the agent of the handoff
 * after its setsockopt has returned. While an element is being written, its `handoff` is 0, which
 * stands for no region. */
static __always_inline void note_begun(const struct flow_key *key, __u64 handoff, __u32 ring,
                                       __u32 peer, __u64 now)
{
    struct begun *b = begun_at(handoff, ring);

    if (!b)
        return;
    b->handoff = 0;
    barrier();
    b->begun_ns = now;
    b->flow = *key;
    b->peer = peer;
    barrier();
    b->handoff = handoff;
}

/* Forgets a region that a call or a reset has ended, or whose handoff has another number now. Not
 * inlined, because fe_in's stack is full. */
static __noinline int forget_begun(__u64 handoff, __u32 ring)
{
    struct begun *b = begun_at(handoff, ring);

    if (b && b->handoff == handoff)
        b->handoff = 0;
    return 0;
}

#endif
