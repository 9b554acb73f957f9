/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * A server's socket when a region is requested on it (kernel.h, sockopt.h). A region is a range of
 * the connection's next sequence numbers, which another machine is to send. The answer goes into
 * the server's ring, a BPF ring buffer.
 */
#ifndef CONNECTION_H
#define CONNECTION_H

#include <linux/bpf.h>

#include "../steering.h"
#include "numbers.h"

/* State of a connection at one moment. */
struct connection {
    __u32 write_seq;
    __u32 snd_wnd;
    __u32 rcv_edge; /* right edge of the window that the socket has offered to the client */
    __u32 tsval;    /* the socket's timestamp clock */
    __u32 ts_recent;
    __u8 snd_wscale;
    __u8 rcv_wscale;
    __u8 options; /* SHUNT_OPTION_* */
    bool usable;  /* the socket's timestamps tick in milliseconds, as a backend's do */
};

/* A request for a region: its connection, the socket's state, and the ring for the answer. */
struct asked {
    struct flow_key key;
    void *ring; /* the caller's completion ring */
    struct bpf_tcp_sock *tcp;
    struct connection connection;
    /* Whether the connection had no flow (record) yet, and its handshake is proof (proof.h). */
    bool seen_to_begin;
};

#endif
