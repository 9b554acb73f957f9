/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * The frontend's maps. The map `flows` has a record of each client connection on which a server has
 * asked for a handoff. Also here: how the kernel tells a server, by its ring (a BPF ring buffer),
 * that the client has acknowledged all of a payload.
 */
#ifndef FLOWS_H
#define FLOWS_H

#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

#include "../../../include/shunt.h"
#include "counters.h"
#include "decisions/numbers.h"
#include "steering.h"

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

/* Connections that are in the flow tables of other layouts. A layout is a version of these maps.
 * The programs of the other layouts translate these connections, and ours begin no handoff on them.
 * Written by the agent (crates/handoff/src/noted.rs). */
struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(max_entries, MAX_FLOWS);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __type(key, struct flow_key);
    __type(value, __u8);
    __uint(pinning, LIBBPF_PIN_BY_NAME);
} older_flows SEC(".maps");

/* Not 0 if `older_flows` has all connections of other layouts. Written by the agent. Not pinned, so
 * it is 0 for newly loaded programs: until they are attached, other layouts may begin handoffs. */
struct {
    __uint(type, BPF_MAP_TYPE_ARRAY);
    __uint(max_entries, 1);
    __type(key, __u32);
    __type(value, __u32);
} older_noted SEC(".maps");

/* Returns the flow of a packet from the server to the client, or NULL. */
static __always_inline struct flow *flow_of_servers(const void *server, __be16 server_port,
                                                    const void *client, __be16 client_port)
{
    struct flow_key key = {.server_port = server_port, .client_port = client_port};

    __builtin_memcpy(key.client_address, client, sizeof(key.client_address));
    __builtin_memcpy(key.server_address, server, sizeof(key.server_address));
    return bpf_map_lookup_elem(&flows, &key);
}

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

/* Owners of the rings: for each ring, the user (uid) whose processes may name it. */
struct {
    __uint(type, BPF_MAP_TYPE_ARRAY);
    __uint(max_entries, MAX_RINGS);
    __type(key, __u32);
    __type(value, __u32);
    __uint(pinning, LIBBPF_PIN_BY_NAME);
} ring_owners SEC(".maps");

/*
 * Returns the ring with the number `index`, if it belongs to the user who makes this system call;
 * else NULL. Without this check, another user's process could put false records into a worker's
 * ring: ring numbers are easy to guess, as they count from 0 on.
 */
static __always_inline void *ring_of_caller(__u32 index)
{
    __u32 *owner = bpf_map_lookup_elem(&ring_owners, &index);
    if (!owner || *owner != (__u32) bpf_get_current_uid_gid())
        return NULL;
    return bpf_map_lookup_elem(&rings, &index);
}

static __always_inline void emit(__u32 ring_index, const struct shunt_event *event)
{
    void *ring = bpf_map_lookup_elem(&rings, &ring_index);
    if (!ring || bpf_ringbuf_output(ring, (void *) event, sizeof(*event), 0))
        count(FE_EVENT_LOST);
}

#endif
