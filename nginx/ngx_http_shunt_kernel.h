/* SPDX-License-Identifier: MIT */
/* What the module asks the kernel about a client's connection. */
#ifndef NGX_HTTP_SHUNT_KERNEL_H
#define NGX_HTTP_SHUNT_KERNEL_H

#include "shunt.h"

/* Keepalive probes of a connection, in seconds (tcp(7)). */
typedef struct {
    int on;
    int idle;
    int interval;
    int count; /* unanswered probes that end the connection; not a time */
} ngx_http_shunt_keepalive_t;

/* Each returns 0, or -1 with errno. */
int ngx_http_shunt_kernel_begin(int fd, const struct shunt_begin *begin);
int ngx_http_shunt_kernel_move(int fd, const struct shunt_move *move);
/* A struct shunt_state goes into the ring. */
int ngx_http_shunt_kernel_take(int fd, const struct shunt_take *take);
int ngx_http_shunt_kernel_state(int fd, uint32_t ring);
/* Has the kernel probe an idle client once a second, and end nothing. `before`: what it did. */
int ngx_http_shunt_kernel_probe(int fd, ngx_http_shunt_keepalive_t *before);
void ngx_http_shunt_kernel_probe_end(int fd, const ngx_http_shunt_keepalive_t *before);
/* Of a socket that listens: its clients' first responses may be handed off. */
int ngx_http_shunt_kernel_watch(int fd);
uint64_t ngx_http_shunt_kernel_netns(int fd);
int ngx_http_shunt_kernel_cancel(int fd);
int ngx_http_shunt_kernel_reset_on_close(int fd);
int ngx_http_shunt_kernel_give_up_soon(int fd);
/* The errno that the connection failed with, taken from it, or 0. */
int ngx_http_shunt_kernel_error(int fd);

#endif
