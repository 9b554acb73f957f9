/* SPDX-License-Identifier: MIT */
/* What the module asks the kernel about a client's connection. */
#ifndef NGX_HTTP_SHUNT_KERNEL_H
#define NGX_HTTP_SHUNT_KERNEL_H

#include "shunt.h"

/* Each returns 0, or -1 with errno. */
int ngx_http_shunt_kernel_begin(int fd, const struct shunt_begin *begin);
int ngx_http_shunt_kernel_move(int fd, const struct shunt_move *move);
/* A struct shunt_state goes into the ring. */
int ngx_http_shunt_kernel_take(int fd, const struct shunt_take *take);
int ngx_http_shunt_kernel_state(int fd, uint32_t ring);
/* Of a socket that listens: its clients' first responses may be handed off. */
int ngx_http_shunt_kernel_watch(int fd);
int ngx_http_shunt_kernel_cancel(int fd);
int ngx_http_shunt_kernel_reset_on_close(int fd);
int ngx_http_shunt_kernel_give_up_soon(int fd);
/* The errno that the connection failed with, taken from it, or 0. */
int ngx_http_shunt_kernel_error(int fd);

#endif
