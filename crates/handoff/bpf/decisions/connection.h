/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/* A server's socket, as the programs find it (kernel.h, sockopt.h), when a region is asked for. */
#ifndef CONNECTION_H
#define CONNECTION_H

#include <linux/bpf.h>

#include "../steering.h"
#include "numbers.h"

/* Of a connection, at one moment. */
struct connection {
    __u32 write_seq;
    __u32 snd_wnd;
    __u32 rcv_edge; /* first byte that the client was given no room for */
    __u32 tsval;    /* our timestamp clock */
    __u32 ts_recent;
    __u8 snd_wscale;
    __u8 rcv_wscale;
    __u8 options; /* SHUNT_OPTION_* */
    bool usable;  /* its timestamps tick in milliseconds, as the backend's will */
};

/* What a region needs to know of the socket that it is asked for on. */
struct asked {
    struct flow_key key;
    void *ring; /* where the caller waits */
    struct bpf_tcp_sock *tcp;
    struct connection connection;
    bool seen_to_begin; /* its flow is new, and its handshake is proof (proof.h) */
};

#endif
