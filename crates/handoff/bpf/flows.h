/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/* The frontend's maps, and how a completion reaches the worker that waits for it. */
#ifndef FLOWS_H
#define FLOWS_H

struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(max_entries, MAX_FLOWS);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __type(key, struct flow_key);
    __type(value, struct flow);
    __uint(pinning, LIBBPF_PIN_BY_NAME);
} flows SEC(".maps");

struct {
    __uint(type, BPF_MAP_TYPE_ARRAY);
    __uint(max_entries, MAX_PEERS);
    __type(key, __u32);
    __type(value, struct steer_peer);
    __uint(pinning, LIBBPF_PIN_BY_NAME);
} peers SEC(".maps");

struct ring {
    __uint(type, BPF_MAP_TYPE_RINGBUF);
    __uint(max_entries, RING_BYTES);
};

struct {
    __uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
    __uint(max_entries, MAX_RINGS);
    __type(key, __u32);
    __uint(pinning, LIBBPF_PIN_BY_NAME);
    __array(values, struct ring);
} rings SEC(".maps");

static __always_inline void emit(__u32 ring_index, const struct shunt_event *event)
{
    void *ring = bpf_map_lookup_elem(&rings, &ring_index);
    if (!ring || bpf_ringbuf_output(ring, (void *) event, sizeof(*event), 0))
        count(FE_EVENT_LOST);
}

#endif
