/* SPDX-License-Identifier: MIT */
/*
 * The system calls on a client's connection. A file of its own because nginx includes
 * <netinet/tcp.h>, whose struct tcp_info ends before tcpi_snd_wnd; <linux/tcp.h> has it, and both
 * cannot be included.
 */
#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <netinet/in.h>
#include <linux/tcp.h>

#include "ngx_http_shunt_kernel.h"

#define TCP_ESTABLISHED 1 /* include/net/tcp_states.h: the same number in every kernel */

_Static_assert(TCPI_OPT_TIMESTAMPS == SHUNT_OPTION_TIMESTAMPS, "tcpi_options");
_Static_assert(TCPI_OPT_SACK == SHUNT_OPTION_SACK, "tcpi_options");
_Static_assert(TCPI_OPT_WSCALE == SHUNT_OPTION_WSCALE, "tcpi_options");

int ngx_http_shunt_kernel_tcp(int fd, ngx_http_shunt_tcp_t *tcp)
{
    struct tcp_info info;
    socklen_t len = sizeof(info);

    memset(&info, 0, sizeof(info));

    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &len) == -1) {
        return -1;
    }

    if (len < offsetof(struct tcp_info, tcpi_snd_wnd) + sizeof(info.tcpi_snd_wnd)) {
        errno = ENOPROTOOPT; /* before Linux 5.4 */
        return -1;
    }

    tcp->established = info.tcpi_state == TCP_ESTABLISHED;
    tcp->notsent = info.tcpi_notsent_bytes;
    tcp->snd_wnd = info.tcpi_snd_wnd;
    tcp->mss = info.tcpi_snd_mss;
    tcp->snd_wscale = info.tcpi_snd_wscale;
    tcp->rcv_wscale = info.tcpi_rcv_wscale;
    tcp->options =
        info.tcpi_options & (SHUNT_OPTION_TIMESTAMPS | SHUNT_OPTION_SACK | SHUNT_OPTION_WSCALE);
    tcp->timestamp = 0;

    return 0;
}

int ngx_http_shunt_kernel_timestamp(int fd, ngx_http_shunt_tcp_t *tcp)
{
    socklen_t len = sizeof(tcp->timestamp);

    if (!(tcp->options & SHUNT_OPTION_TIMESTAMPS)) {
        return 0;
    }

    return getsockopt(fd, IPPROTO_TCP, TCP_TIMESTAMP, &tcp->timestamp, &len);
}

int ngx_http_shunt_kernel_begin(int fd, const struct shunt_begin *begin)
{
    return setsockopt(fd, SHUNT_SOL, SHUNT_BEGIN, begin, sizeof(*begin));
}

int ngx_http_shunt_kernel_state(int fd, struct shunt_state *state)
{
    socklen_t len = sizeof(*state);

    memset(state, 0, sizeof(*state));
    return getsockopt(fd, SHUNT_SOL, SHUNT_STATE, state, &len);
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
