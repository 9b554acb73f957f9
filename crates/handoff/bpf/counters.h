/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/* Counters of the programs. Each core has its own: they need no atomics, and are summed when
 * read. */
#ifndef COUNTERS_H
#define COUNTERS_H

#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

#include "decisions/numbers.h"
#include "steering.h"

struct {
    __uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
    __uint(max_entries, STEER_COUNTERS);
    __type(key, __u32);
    __type(value, __u64);
    __uint(pinning, LIBBPF_PIN_BY_NAME);
} counters SEC(".maps");

/* Version of the pinned maps' contents: STEERING_LAYOUT of the agent that made them. */
struct {
    __uint(type, BPF_MAP_TYPE_ARRAY);
    __uint(max_entries, 1);
    __type(key, __u32);
    __type(value, __u32);
    __uint(pinning, LIBBPF_PIN_BY_NAME);
} layout SEC(".maps");

static __always_inline void count(enum steer_counter which)
{
    __u32 index = which;
    __u64 *value = bpf_map_lookup_elem(&counters, &index);
    if (value)
        (*value)++;
}

#endif
