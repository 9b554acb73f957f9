/* SPDX-License-Identifier: MIT */
/*
 * Stands in for the steering programs (BPF), so that the module's shortcut (a body that bypasses
 * nginx) can be tested without them. Preloaded into nginx, it answers the options of SHUNT_SOL
 * itself. At SHUNT_BEGIN, it passes nginx's socket for the client to the test's agent. The agent
 * writes the payload into the socket, as a backend would. Only a BPF program can write into the
 * worker's ring (BPF ring buffer), and the agent has such a program. So this library sends the
 * kernel's answers to the agent, and waits until the answers are in the ring.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include <netinet/in.h>
#include <linux/tcp.h>

#include "shunt.h"

#define FDS 4096

static struct region {
    struct shunt_state state;
    struct shunt_begin begin;
    uint64_t
        base; /* value of tcpi_bytes_acked when all bytes before the payload are acknowledged */
    uint32_t port; /* client's port; if it differs, the descriptor has a later connection */
} regions[FDS];

static char path[108];
static int (*real_set)(int, int, int, const void *, socklen_t);

__attribute__((constructor)) static void shim_start(void)
{
    const char *p = getenv("SHUNT_SHIM");

    real_set = (int (*)(int, int, int, const void *, socklen_t)) dlsym(RTLD_NEXT, "setsockopt");

    if (p) {
        strncpy(path, p, sizeof(path) - 1);
    }
}

static void tcp(int fd, struct tcp_info *info)
{
    socklen_t len = sizeof(*info);

    memset(info, 0, sizeof(*info));
    getsockopt(fd, IPPROTO_TCP, TCP_INFO, info, &len);
}

static uint32_t peer_port(int fd)
{
    struct sockaddr_in6 sa;
    socklen_t len = sizeof(sa);

    memset(&sa, 0, sizeof(sa));
    getpeername(fd, (struct sockaddr *) &sa, &len);
    return sa.sin6_port;
}

/* Sends the option's number, a struct shunt_begin, a struct shunt_state and the socket to the
 * agent. The agent answers with one byte, a dot on success. */
static int tell(int what, int fd)
{
    int s, rc;
    char done;
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    struct iovec iov[3] = {{&what, sizeof(what)},
                           {&regions[fd].begin, sizeof(regions[fd].begin)},
                           {&regions[fd].state, sizeof(regions[fd].state)}};
    char control[CMSG_SPACE(sizeof(int))] = {0};
    struct msghdr msg = {.msg_iov = iov,
                         .msg_iovlen = 3,
                         .msg_control = control,
                         .msg_controllen = sizeof(control)};
    struct cmsghdr *c = CMSG_FIRSTHDR(&msg);

    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(c), &fd, sizeof(int));

    s = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    rc = bind(s, (struct sockaddr *) &sa, sizeof(sa.sun_family)); /* a free name, for the answer */
    strcpy(sa.sun_path, path);
    if (rc == 0) {
        rc = connect(s, (struct sockaddr *) &sa, sizeof(sa));
    }
    if (rc == 0) {
        rc = sendmsg(s, &msg, MSG_NOSIGNAL) == -1 || recv(s, &done, 1, 0) != 1 || done != '.' ? -1
                                                                                              : 0;
    }
    close(s);
    return rc;
}

static void address(const struct sockaddr_in6 *sa, uint8_t out[16], uint16_t *port)
{
    const struct sockaddr_in *in = (const struct sockaddr_in *) sa;

    *port = sa->sin6_port;
    if (sa->sin6_family == AF_INET6) {
        memcpy(out, &sa->sin6_addr, 16);
        return;
    }

    memset(out, 0, 10);
    memset(out + 10, 0xff, 2);
    memcpy(out + 12, &in->sin_addr, 4);
}

/* Fills in what the steering programs read from the kernel's socket. */
static void describe(int fd, const struct tcp_info *info, struct shunt_state *state)
{
    struct sockaddr_in6 sa;
    socklen_t len = sizeof(sa);

    getpeername(fd, (struct sockaddr *) &sa, &len);
    address(&sa, state->flow.client_address, &state->flow.client_port);
    len = sizeof(sa);
    getsockname(fd, (struct sockaddr *) &sa, &len);
    address(&sa, state->flow.server_address, &state->flow.server_port);
    len = sizeof(state->flow.tsval);
    getsockopt(fd, IPPROTO_TCP, TCP_TIMESTAMP, &state->flow.tsval, &len);
    state->flow.snd_wnd = info->tcpi_snd_wnd;
    state->flow.snd_cwnd = info->tcpi_snd_cwnd;
    state->flow.srtt_us = info->tcpi_rtt;
    state->flow.mss = info->tcpi_snd_mss;
    state->flow.snd_wscale = info->tcpi_snd_wscale;
    state->flow.rcv_wscale = info->tcpi_rcv_wscale;
    state->flow.options =
        info->tcpi_options & (SHUNT_OPTION_TIMESTAMPS | SHUNT_OPTION_SACK | SHUNT_OPTION_WSCALE);
}

/* Whether SHUNT_BEGIN is to fail: a test then puts a file named `refuse` beside the agent's
 * socket. */
static int refuses(void)
{
    char file[sizeof(path)];
    char *end;

    strcpy(file, path);
    end = strrchr(file, '/');
    if (end) {
        strcpy(end, "/refuse");
    }

    return access(file, F_OK) == 0;
}

static int begin(int fd, const struct shunt_begin *begin)
{
    struct tcp_info info;

    if (refuses()) {
        errno = EPERM;
        return -1;
    }

    if (regions[fd].port != peer_port(fd)) {
        memset(&regions[fd], 0, sizeof(regions[fd]));
        regions[fd].port = peer_port(fd);
    }

    tcp(fd, &info);
    regions[fd].base = info.tcpi_bytes_sent - info.tcpi_bytes_retrans;
    regions[fd].begin = *begin;
    regions[fd].state.handoff = begin->handoff;
    regions[fd].state.kind = SHUNT_EVENT_STATE;
    regions[fd].state.acked = 0;
    describe(fd, &info, &regions[fd].state);
    regions[fd].state.regions++;
    regions[fd].state.flow.first = regions[fd].state.regions == 1;
    regions[fd].state.status = SHUNT_REGION_ACTIVE;

    if (tell(SHUNT_BEGIN, fd) == -1) {
        regions[fd].state.status = SHUNT_REGION_NONE;
        errno = EPERM;
        return -1;
    }

    return 0;
}

static void note_acked(int fd)
{
    struct tcp_info info;

    tcp(fd, &info);
    regions[fd].state.acked =
        info.tcpi_bytes_acked > regions[fd].base ? info.tcpi_bytes_acked - regions[fd].base : 0;
    if (regions[fd].state.acked > regions[fd].begin.length) {
        regions[fd].state.acked = regions[fd].begin.length;
    }
}

/* Whether a test has created a file with this name, by which it says how the client behaves. */
static int is_wanted(const char *what)
{
    char file[sizeof(path) + 8];

    snprintf(file, sizeof(file), "%s.%s", path, what);

    return access(file, F_OK) == 0;
}

/* Tells a test that something has happened, by an empty file with this name. */
static void say(const char *what)
{
    char file[sizeof(path) + 8];

    snprintf(file, sizeof(file), "%s.%s", path, what);
    close(open(file, O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
}

static int may_take(const struct region *region, uint32_t when)
{
    return (when != SHUNT_TAKE_WHOLE || region->state.acked == region->begin.length) &&
           (when != SHUNT_TAKE_NONE || region->state.acked == 0);
}

static int state(int fd, uint32_t ring)
{
    note_acked(fd);
    regions[fd].begin.ring = ring;

    return tell(SHUNT_STATE, fd);
}

static int move(int fd, const struct shunt_move *move)
{
    note_acked(fd);

    if (regions[fd].state.status != SHUNT_REGION_ACTIVE || move->from > regions[fd].state.acked) {
        errno = EPERM;
        return -1;
    }

    regions[fd].begin.ring = move->ring;
    regions[fd].begin.handoff = move->handoff;
    regions[fd].state.handoff = move->handoff;

    return tell(SHUNT_MOVE, fd);
}

int setsockopt(int fd, int level, int name, const void *value, socklen_t len)
{
    int rc;

    /* The module switches keepalive on to probe the client. The client seems to answer at once,
     * unless a test wants "mute". */
    if (level == SOL_SOCKET && name == SO_KEEPALIVE && fd < FDS && *(const int *) value) {
        regions[fd].state.answered += !is_wanted("mute");
        say("asked");
    }

    if (level != SHUNT_SOL || !path[0] || fd >= FDS) {
        return real_set(fd, level, name, value, len);
    }

    switch (name) {

    case SHUNT_BEGIN:
        return begin(fd, value);

    case SHUNT_MOVE:
        return move(fd, value);

    case SHUNT_WATCH:
        return tell(SHUNT_WATCH, fd);

    case SHUNT_TAKE:
        note_acked(fd);
        if (regions[fd].state.status != SHUNT_REGION_ACTIVE ||
            !may_take(&regions[fd], ((const struct shunt_take *) value)->when)) {
            errno = EPERM;
            return -1;
        }
        rc = state(fd, ((const struct shunt_take *) value)->ring);
        regions[fd].state.status = SHUNT_REGION_COMPLETE;
        return rc;

    case SHUNT_CANCEL:
        regions[fd].state.status = SHUNT_REGION_CANCELLED;
        /* has close() send a reset: the steering programs would turn every FIN into one */
        real_set(fd, SOL_SOCKET, SO_LINGER, &(struct linger){.l_onoff = 1}, sizeof(struct linger));
        return tell(SHUNT_CANCEL, fd);

    default:
        note_acked(fd);
        regions[fd].begin.ring = *(const uint32_t *) value;
        /* with "ahead", the client seems to have acknowledged 1000 bytes more */
        regions[fd].state.acked += is_wanted("ahead") ? 1000 : 0;
        if (is_wanted("all")) { /* the client claims to have all */
            regions[fd].state.acked = regions[fd].begin.length;
        }
        if (is_wanted("none")) { /* the client's ACKs come only after this question */
            regions[fd].state.acked = 0;
        }
        regions[fd].state.shut = is_wanted("shut");
        if (regions[fd].state.shut) {
            say("looked");
        }
        return tell(SHUNT_STATE, fd);
    }
}
