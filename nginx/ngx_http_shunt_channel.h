/* SPDX-License-Identifier: MIT */
/*
 * One connection of a worker (a process of nginx) to shuntd, the agent of this machine: types and
 * functions that channel.c provides for agent.c. A worker has one or two such connections. A ring
 * is a BPF ring buffer by which the kernel tells a worker what becomes of its handoffs.
 */
#ifndef NGX_HTTP_SHUNT_CHANNEL_H
#define NGX_HTTP_SHUNT_CHANNEL_H

#include "ngx_http_shunt.h"

#define NGX_HTTP_SHUNT_FDS_MAX 4

typedef struct {
    size_t size;
    int fds[NGX_HTTP_SHUNT_FDS_MAX]; /* -1: none, or another function owns it now */
    ngx_uint_t cut; /* 1: some descriptors were dropped, because there was no room for them */
    union {
        struct shunt_header header;
        struct shunt_welcome welcome;
        struct shunt_ended ended;
        struct shunt_fetched fetched;
        struct shunt_digest digest;
        u_char bytes[512];
    } body;
} ngx_http_shunt_received_t;

typedef struct {
    /* set by the owner */
    uint32_t kind; /* SHUNT_CHANNEL_* */
    /* called for every message but the welcome; NGX_ERROR: the connection has to be closed */
    ngx_int_t (*received)(ngx_http_shunt_received_t *in);
    /* called when the connection, or an attempt to connect, has failed; may be NULL */
    void (*lost)(void);
    ngx_event_handler_pt writable; /* called when the socket has room again */

    /* set by the agent's welcome; valid while `welcomed` is 1 */
    ngx_uint_t welcomed;
    uint32_t worker;
    uint32_t offers; /* offers made under this `worker`; lower half of the newest one's number */
    ngx_http_shunt_ring_t *ring;

    ngx_http_shunt_ring_t *newest; /* ring of the last welcome that brought one; NULL: none did */
    ngx_connection_t *connection;  /* NULL: waiting to try again */
    ngx_str_t path;
    ngx_event_t retry;
    ngx_msec_t backoff; /* ms; the next pause is twice as long, at most 5 s; 0: first attempt */
    ngx_uint_t refused; /* 1: the agent does not serve this worker's user */
    ngx_err_t said; /* errno that was logged for a missing agent; 0: none since the last welcome */
} ngx_http_shunt_channel_t;

void ngx_http_shunt_channel_open(ngx_http_shunt_channel_t *ch, ngx_str_t *path, ngx_log_t *log);
void ngx_http_shunt_channel_lost(ngx_http_shunt_channel_t *ch);
void ngx_http_shunt_channel_close(ngx_http_shunt_channel_t *ch);

#endif
