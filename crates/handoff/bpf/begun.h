/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/* Regions that servers have begun or moved, for the agent, which finds them without a system call.
 */
#ifndef BEGUN_H
#define BEGUN_H

#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

#include "decisions/numbers.h"
#include "steering.h"

/* Of each agent's own: whoever comes after it looks among the flows. */
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

/* For the agent, which hears of this handoff by the server that is `ring`'s, after this call. A row
 * that is half old and half new is no server's. */
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

/* Its region is over, or another name's. A function of its own: fe_in's stack is full. */
static __noinline int forget_begun(__u64 handoff, __u32 ring)
{
    struct begun *b = begun_at(handoff, ring);

    if (b && b->handoff == handoff)
        b->handoff = 0;
    return 0;
}

#endif
