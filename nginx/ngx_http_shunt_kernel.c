/* SPDX-License-Identifier: MIT */
/* System calls on clients' connections and on listening sockets. This file does not depend on
 * nginx. */
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#ifndef SO_NETNS_COOKIE
#define SO_NETNS_COOKIE 71
#endif

#include "ngx_http_shunt_kernel.h"

int ngx_http_shunt_kernel_begin(int fd, const struct shunt_begin *begin)
{
    return setsockopt(fd, SHUNT_SOL, SHUNT_BEGIN, begin, sizeof(*begin));
}

int ngx_http_shunt_kernel_move(int fd, const struct shunt_move *move)
{
    return setsockopt(fd, SHUNT_SOL, SHUNT_MOVE, move, sizeof(*move));
}

int ngx_http_shunt_kernel_take(int fd, const struct shunt_take *take)
{
    return setsockopt(fd, SHUNT_SOL, SHUNT_TAKE, take, sizeof(*take));
}

int ngx_http_shunt_kernel_state(int fd, uint32_t ring)
{
    return setsockopt(fd, SHUNT_SOL, SHUNT_STATE, &ring, sizeof(ring));
}

static int kernel_set_keepalive(int fd, const ngx_http_shunt_keepalive_t *to)
{
    /* TCP_KEEPIDLE is last: its timer includes the time for which the client has been silent
     * already, while SO_KEEPALIVE's timer starts at 0 (tcp_sock_set_keepidle_locked,
     * tcp_set_keepalive). */
    if (setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &to->on, sizeof(int)) == -1 ||
        setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &to->interval, sizeof(int)) == -1 ||
        setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &to->count, sizeof(int)) == -1) {
        return -1;
    }

    return setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &to->idle, sizeof(int));
}

int ngx_http_shunt_kernel_probe(int fd, ngx_http_shunt_keepalive_t *before)
{
    socklen_t len = sizeof(int);
    ngx_http_shunt_keepalive_t often = {.on = 1, .idle = 1, .interval = 1, .count = 127};

    if (getsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &before->on, &len) == -1 ||
        getsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &before->idle, &len) == -1 ||
        getsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &before->interval, &len) == -1 ||
        getsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &before->count, &len) == -1) {
        return -1;
    }

    return kernel_set_keepalive(fd, &often);
}

void ngx_http_shunt_kernel_probe_end(int fd, const ngx_http_shunt_keepalive_t *before)
{
    (void) kernel_set_keepalive(fd, before);
}

int ngx_http_shunt_kernel_watch(int fd)
{
    uint32_t any = 1;

    return setsockopt(fd, SHUNT_SOL, SHUNT_WATCH, &any, sizeof(any));
}

/* Returns the cookie of a socket's network namespace; 0: the kernel does not tell it. */
uint64_t ngx_http_shunt_kernel_netns(int fd)
{
    uint64_t cookie = 0;
    socklen_t len = sizeof(cookie);

    return getsockopt(fd, SOL_SOCKET, SO_NETNS_COOKIE, &cookie, &len) == -1 ? 0 : cookie;
}

int ngx_http_shunt_kernel_cancel(int fd)
{
    uint32_t any = 1;

    return setsockopt(fd, SHUNT_SOL, SHUNT_CANCEL, &any, sizeof(any));
}

int ngx_http_shunt_kernel_reset_on_close(int fd)
{
    struct linger linger = {.l_onoff = 1, .l_linger = 0};

    return setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof(linger));
}

/*
 * Limits the time for which the kernel repeats a FIN. To be called after SHUNT_CANCEL: from then
 * on, the steering programs (BPF programs of the agent) turn every FIN of the connection into a
 * reset. One reset is not enough, because a client that only reads would wait forever if the reset
 * got lost. But a client does not answer a reset, so without this limit the kernel would repeat the
 * FIN for a long time.
 */
int ngx_http_shunt_kernel_give_up_soon(int fd)
{
    unsigned int ms = 5000;

    return setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &ms, sizeof(ms));
}

int ngx_http_shunt_kernel_error(int fd)
{
    int error = 0;
    socklen_t len = sizeof(error);

    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &len) == -1) {
        return errno;
    }

    return error;
}
