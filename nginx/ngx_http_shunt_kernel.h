/* SPDX-License-Identifier: MIT */
/*
 * The module's system calls on clients' connections and on listening sockets. The kernel's longer
 * answers come in a ring, a BPF ring buffer that this worker reads.
 */
#ifndef NGX_HTTP_SHUNT_KERNEL_H
#define NGX_HTTP_SHUNT_KERNEL_H

#include "shunt.h"

/* Keepalive settings of a connection; times in seconds (tcp(7)). */
typedef struct {
    int on;
    int idle;
    int interval;
    int count; /* number of unanswered probes that end the connection */
} ngx_http_shunt_keepalive_t;

/* These functions return 0, or -1 with errno, unless their comment says otherwise. If the
 * first four calls succeed, the kernel answers with a struct shunt_state in the ring. */
int ngx_http_shunt_kernel_begin(int fd, const struct shunt_begin *begin);
int ngx_http_shunt_kernel_move(int fd, const struct shunt_move *move);
int ngx_http_shunt_kernel_take(int fd, const struct shunt_take *take);
int ngx_http_shunt_kernel_state(int fd, uint32_t ring);
/* Has the kernel probe an idle client once a second. The kernel ends the
 * connection only after 127 unanswered probes. `before` gets the former settings, for probe_end. */
int ngx_http_shunt_kernel_probe(int fd, ngx_http_shunt_keepalive_t *before);
void ngx_http_shunt_kernel_probe_end(int fd, const ngx_http_shunt_keepalive_t *before);
/* Has the kernel note handshakes at a listening socket's port, so that even the first response to a
 * client may be handed off. */
int ngx_http_shunt_kernel_watch(int fd);
/* Returns the cookie of the socket's network namespace, or 0. */
uint64_t ngx_http_shunt_kernel_netns(int fd);
int ngx_http_shunt_kernel_cancel(int fd);
int ngx_http_shunt_kernel_reset_on_close(int fd);
int ngx_http_shunt_kernel_give_up_soon(int fd);
/* Returns the errno that the connection failed with, and clears it in the socket; 0: no failure. */
int ngx_http_shunt_kernel_error(int fd);

#endif
