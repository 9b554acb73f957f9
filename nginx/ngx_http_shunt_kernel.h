/* SPDX-License-Identifier: MIT */
/* What the module asks the kernel about a client's connection. Free of nginx's headers: see the .c
 * file. */
#ifndef NGX_HTTP_SHUNT_KERNEL_H
#define NGX_HTTP_SHUNT_KERNEL_H

#include "shunt.h"

typedef struct {
    int established;    /* state ESTABLISHED: neither side has closed */
    uint32_t notsent;   /* bytes written but not yet sent once */
    uint32_t snd_wnd;   /* bytes, scaled */
    uint32_t mss;       /* of data segments, options already subtracted */
    uint8_t snd_wscale; /* the client's */
    uint8_t rcv_wscale; /* ours */
    uint8_t options;    /* SHUNT_OPTION_* */
    uint32_t timestamp; /* our clock, as TSval shows it; 0 without timestamps */
} ngx_http_shunt_tcp_t;

/* Each returns 0, or -1 with errno. */
int ngx_http_shunt_kernel_tcp(int fd, ngx_http_shunt_tcp_t *tcp);
int ngx_http_shunt_kernel_timestamp(int fd, ngx_http_shunt_tcp_t *tcp);
int ngx_http_shunt_kernel_begin(int fd, const struct shunt_begin *begin);
int ngx_http_shunt_kernel_state(int fd, struct shunt_state *state);
int ngx_http_shunt_kernel_cancel(int fd);
int ngx_http_shunt_kernel_reset_on_close(int fd);

#endif
