/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * A connection's state that only the kernel's own structures have. The fields below are found by
 * name (CO-RE), at any offset. All of them have to exist, except tcp_usec_ts. The fields are read
 * with bpf_probe_read_kernel, because a cgroup program has no typed pointer to a struct tcp_sock in
 * Linux 5.15.
 */
#ifndef KERNEL_H
#define KERNEL_H

#include <linux/bpf.h>

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#include "../../../include/shunt.h"
#include "decisions/connection.h"
#include "decisions/numbers.h"

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct tcp_options_received {
    __u32 ts_recent;
    __u16 tstamp_ok : 1, wscale_ok : 1, sack_ok : 3, snd_wscale : 4, rcv_wscale : 4;
};

struct tcp_sock {
    __u32 write_seq;
    __u32 snd_wnd;
    __u32 rcv_wup;
    __u32 rcv_wnd;
    __u32 tsoffset;
    __u8 tcp_usec_ts : 1; /* since Linux 6.7 */
    struct tcp_options_received rx_opt;
};

#pragma clang attribute pop

#define OPTION_BIT(tcp, field) BPF_CORE_READ_BITFIELD_PROBED(tcp, rx_opt.field)

/* The socket's address, as a plain pointer. A bpf_sock pointer has the same value, but the verifier
 * allows no offset to be added to that type. */
static __always_inline void *address_of(struct bpf_sock *sk)
{
    void *address = NULL;
    bpf_probe_read_kernel(&address, sizeof(address), &sk);
    return address;
}

static __always_inline void load_connection(struct bpf_sock *sk, struct connection *c)
{
    struct tcp_sock *tcp = address_of(sk);

    c->write_seq = BPF_CORE_READ(tcp, write_seq);
    c->snd_wnd = BPF_CORE_READ(tcp, snd_wnd);
    c->rcv_edge = BPF_CORE_READ(tcp, rcv_wup) + BPF_CORE_READ(tcp, rcv_wnd);
    /* tcp_clock_ms() + tsoffset, like getsockopt(TCP_TIMESTAMP) */
    c->tsval = bpf_ktime_get_ns() / 1000000 + BPF_CORE_READ(tcp, tsoffset);
    c->ts_recent = BPF_CORE_READ(tcp, rx_opt.ts_recent);
    c->snd_wscale = OPTION_BIT(tcp, snd_wscale);
    c->rcv_wscale = OPTION_BIT(tcp, rcv_wscale);
    c->options = (OPTION_BIT(tcp, tstamp_ok) ? SHUNT_OPTION_TIMESTAMPS : 0) |
                 (OPTION_BIT(tcp, sack_ok) ? SHUNT_OPTION_SACK : 0) |
                 (OPTION_BIT(tcp, wscale_ok) ? SHUNT_OPTION_WSCALE : 0);
    c->usable = !bpf_core_field_exists(tcp->tcp_usec_ts) ||
                !BPF_CORE_READ_BITFIELD_PROBED(tcp, tcp_usec_ts);
}

#endif
