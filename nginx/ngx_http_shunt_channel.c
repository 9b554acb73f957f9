/* SPDX-License-Identifier: MIT */
/*
 * One connection to shuntd. It is made, and made again 0.1 to 5 seconds after it was lost. This
 * file handles the agent's welcome, which brings shared memory and the ring, and receives whole
 * messages with their descriptors. agent.c handles the messages' contents. A worker is a process of
 * nginx. A ring is a BPF ring buffer by which the kernel tells this worker what becomes of its
 * handoffs.
 */
#include "ngx_http_shunt_channel.h"

#define NGX_HTTP_SHUNT_BACKOFF_MIN 100  /* ms */
#define NGX_HTTP_SHUNT_BACKOFF_MAX 5000 /* ms */
#define NGX_HTTP_SHUNT_START_WAIT  1    /* s, longest wait for the welcome at a worker's start */

static const char *ngx_http_shunt_channel_name(const ngx_http_shunt_channel_t *ch)
{
    return ch->kind == SHUNT_CHANNEL_CONTROL ? "handoffs" : "offers";
}

/* ---- receiving ---- */

static void ngx_http_shunt_take_fds(struct msghdr *msg, int *fds)
{
    size_t i, n, taken = 0;
    int fd;
    struct cmsghdr *cmsg;

    for (i = 0; i < NGX_HTTP_SHUNT_FDS_MAX; i++) {
        fds[i] = -1;
    }

    for (cmsg = CMSG_FIRSTHDR(msg); cmsg; cmsg = CMSG_NXTHDR(msg, cmsg)) {
        if (cmsg->cmsg_level != SOL_SOCKET || cmsg->cmsg_type != SCM_RIGHTS) {
            continue;
        }

        n = (cmsg->cmsg_len - CMSG_LEN(0)) / sizeof(int);

        for (i = 0; i < n; i++) {
            ngx_memcpy(&fd, CMSG_DATA(cmsg) + i * sizeof(int), sizeof(int));

            if (taken < NGX_HTTP_SHUNT_FDS_MAX) {
                fds[taken++] = fd;

            } else {
                close(fd);
            }
        }
    }
}

static void ngx_http_shunt_close_fds(ngx_http_shunt_received_t *in)
{
    ngx_uint_t i;

    for (i = 0; i < NGX_HTTP_SHUNT_FDS_MAX; i++) {
        if (in->fds[i] != -1) {
            close(in->fds[i]);
            in->fds[i] = -1;
        }
    }
}

/* Receives a message. NGX_OK: a whole one. NGX_AGAIN: none yet. NGX_ERROR: the connection has to be
 * closed. Fields that the agent leaves out are zero. */
static ngx_int_t ngx_http_shunt_receive_message(int fd, ngx_http_shunt_received_t *in)
{
    ssize_t n;
    struct iovec iov = {&in->body, sizeof(in->body)};
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(NGX_HTTP_SHUNT_FDS_MAX * sizeof(int))];
    } control;
    struct msghdr msg = {.msg_iov = &iov,
                         .msg_iovlen = 1,
                         .msg_control = &control,
                         .msg_controllen = sizeof(control)};

    n = recvmsg(fd, &msg, MSG_CMSG_CLOEXEC);

    if (n == -1) {
        return ngx_errno == NGX_EAGAIN || ngx_errno == NGX_EINTR ? NGX_AGAIN : NGX_ERROR;
    }

    ngx_http_shunt_take_fds(&msg, in->fds);
    in->size = n;

    in->cut = (msg.msg_flags & MSG_CTRUNC) != 0;

    if ((size_t) n < sizeof(struct shunt_header) || (msg.msg_flags & MSG_TRUNC) ||
        in->body.header.size != (size_t) n) {
        ngx_http_shunt_close_fds(in);
        return NGX_ERROR;
    }

    ngx_memzero(in->body.bytes + n, sizeof(in->body) - n);

    return NGX_OK;
}

/* Keeps the channel's ring until a welcome brings another, also after the connection is lost. */
static void ngx_http_shunt_keep_newest(ngx_http_shunt_channel_t *ch)
{
    if (ch->ring == NULL) {
        return;
    }

    if (ch->newest) {
        ngx_http_shunt_ring_release(ch->newest);
    }

    ngx_http_shunt_ring_hold(ch->ring);
    ch->newest = ch->ring;
}

static ngx_int_t ngx_http_shunt_welcomed(ngx_http_shunt_channel_t *ch,
                                         ngx_http_shunt_received_t *in, ngx_log_t *log)
{
    if (in->size < SHUNT_THROUGH(struct shunt_welcome, ring) || ch->welcomed || in->cut) {
        return NGX_ERROR;
    }

    /* Board (memory in which the agent lists its peers) and counters. The welcome of an OFFERS
     * connection may lack them, because the CONTROL connection's welcome always brings them. */
    if (in->fds[0] != -1 && in->fds[1] != -1) {
        if (ngx_http_shunt_board_map(in->fds[0], in->fds[1], log) != NGX_OK) {
            return NGX_ERROR;
        }

    } else if (ch->kind == SHUNT_CHANNEL_CONTROL) {
        return NGX_ERROR;
    }

    ch->worker = in->body.welcome.worker;
    ch->offers = 0;

    if (ch->kind == SHUNT_CHANNEL_CONTROL && in->fds[2] != -1) {
        ch->ring = ngx_http_shunt_ring_open(in->fds[2], in->body.welcome.ring, log);
        in->fds[2] = -1;
        ngx_http_shunt_keep_newest(ch);
        ngx_http_shunt_watch_again((ngx_cycle_t *) ngx_cycle);
    }

    ch->welcomed = 1;
    ch->said = 0;
    ch->backoff = NGX_HTTP_SHUNT_BACKOFF_MIN;

    ngx_log_error(NGX_LOG_NOTICE, log, 0, "shunt: connected to the agent for %s, as worker %uD",
                  ngx_http_shunt_channel_name(ch), ch->worker);

    return NGX_OK;
}

/* Logs that there is no agent, or that the agent does not serve this worker's user. The level is
 * raised only for the control connection, and only if the reason is new or has no errno: a machine
 * without an agent must not fill the log. */
static void ngx_http_shunt_say_absent(ngx_http_shunt_channel_t *ch, ngx_err_t err, ngx_log_t *log)
{
    ngx_uint_t level = NGX_LOG_INFO;

    if (ch->kind == SHUNT_CHANNEL_CONTROL && (err == 0 || err != ch->said)) {
        level = ngx_http_shunt_level(NGX_LOG_WARN);
    }

    ch->said = err;

    if (ch->refused) {
        ngx_log_error(level, log, 0,
                      "shunt: the agent at \"%V\" does not serve the user of nginx's workers: "
                      "responses are relayed; add the user to \"users\" in the agent's "
                      "configuration",
                      &ch->path);
        return;
    }

    ngx_log_error(level, log, err,
                  "shunt: no agent at \"%V\": responses are relayed; check that shuntd runs, that "
                  "this is its \"socket\", and that the user of nginx's workers may connect to it",
                  &ch->path);
}

/* Notes whether the agent's answer to the hello is that it does not serve this worker's user. */
static void ngx_http_shunt_note_refusal(ngx_http_shunt_channel_t *ch, ngx_http_shunt_received_t *in)
{
    ch->refused = !ch->welcomed && in->body.header.kind == SHUNT_MSG_ENDED &&
                  in->body.ended.reason == SHUNT_REASON_NOT_ALLOWED;
}

static void ngx_http_shunt_channel_handler(ngx_event_t *rev)
{
    ngx_int_t rc;
    ngx_connection_t *c = rev->data;
    ngx_http_shunt_channel_t *ch = c->data;
    ngx_http_shunt_received_t in;

    for (;;) {
        rc = ngx_http_shunt_receive_message(c->fd, &in);

        if (rc == NGX_AGAIN) {
            break;
        }

        if (rc == NGX_OK) {
            rc = in.body.header.kind == SHUNT_MSG_WELCOME
                     ? ngx_http_shunt_welcomed(ch, &in, rev->log)
                     : ch->received(&in);
            ngx_http_shunt_note_refusal(ch, &in);
            ngx_http_shunt_close_fds(&in);

            if (ch->refused) {
                ngx_http_shunt_say_absent(ch, NGX_EACCES, rev->log);
            }
        }

        if (rc != NGX_OK) {
            ngx_http_shunt_channel_lost(ch);
            return;
        }
    }

    rev->ready = 0;

    if (ngx_handle_read_event(rev, 0) != NGX_OK) {
        ngx_http_shunt_channel_lost(ch);
    }
}

/* ---- connecting ---- */

static int ngx_http_shunt_connect_socket(ngx_http_shunt_channel_t *ch)
{
    int fd;
    struct sockaddr_un address;
    struct timeval wait = {NGX_HTTP_SHUNT_START_WAIT, 0};
    struct shunt_hello hello = {.header = {SHUNT_MSG_HELLO, sizeof(struct shunt_hello)},
                                .oldest = SHUNT_VERSION_OLDEST,
                                .newest = SHUNT_VERSION,
                                .channel = ch->kind};

    fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd == -1) {
        return -1;
    }

    ngx_memzero(&address, sizeof(address));
    address.sun_family = AF_UNIX;
    ngx_memcpy(address.sun_path, ch->path.data, ch->path.len);

    /* these limit the wait for the welcome, and connect()'s wait if the agent's backlog is full */
    (void) setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof(wait));
    (void) setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait));

    /* only the first attempt, at a worker's start, may wait: later there are clients to serve */
    if (ch->backoff && ngx_nonblocking(fd) == -1) {
        close(fd);
        return -1;
    }

    if (connect(fd, (struct sockaddr *) &address, sizeof(address)) == -1) {
        close(fd);
        return -1;
    }

    /* the result is ignored: an agent that does not serve this user has answered and closed
     * already, and its answer is read next */
    (void) send(fd, &hello, sizeof(hello), MSG_NOSIGNAL);

    return fd;
}

/* Waits for the welcome, so that a worker's first requests do not miss their shortcuts. */
static ngx_int_t ngx_http_shunt_first_welcome(ngx_http_shunt_channel_t *ch, int fd, ngx_log_t *log)
{
    ngx_int_t rc;
    ngx_http_shunt_received_t in;

    rc = ngx_http_shunt_receive_message(fd, &in);

    if (rc == NGX_OK) {
        rc = in.body.header.kind == SHUNT_MSG_WELCOME ? ngx_http_shunt_welcomed(ch, &in, log)
                                                      : NGX_ERROR;
        ngx_http_shunt_note_refusal(ch, &in);
        ngx_http_shunt_close_fds(&in);
    }

    return rc == NGX_OK ? NGX_OK : NGX_ERROR;
}

static ngx_int_t ngx_http_shunt_connect(ngx_http_shunt_channel_t *ch, ngx_log_t *log)
{
    int fd;
    ngx_connection_t *c;

    ngx_set_errno(0);
    ch->refused = 0;

    fd = ngx_http_shunt_connect_socket(ch);
    if (fd == -1) {
        return NGX_ERROR;
    }

    if (!ch->backoff &&
        (ngx_http_shunt_first_welcome(ch, fd, log) != NGX_OK || ngx_nonblocking(fd) == -1)) {
        close(fd);
        return NGX_ERROR;
    }

    c = ngx_get_connection(fd, log);
    if (c == NULL) {
        close(fd);
        return NGX_ERROR;
    }

    c->data = ch;
    c->log = log;
    c->read->log = log;
    c->read->handler = ngx_http_shunt_channel_handler;
    c->read->channel = 1; /* not a client's connection, which worker exit would report as leaked */
    c->write->log = log;
    c->write->channel = 1;
    c->write->handler = ch->writable;
    ch->connection = c;

    return ngx_handle_read_event(c->read, 0);
}

static void ngx_http_shunt_try(ngx_http_shunt_channel_t *ch, ngx_log_t *log)
{
    if (ngx_http_shunt_connect(ch, log) == NGX_OK) {
        if (ch->backoff == 0) {
            ch->backoff = NGX_HTTP_SHUNT_BACKOFF_MIN;
        }

        return;
    }

    ngx_http_shunt_say_absent(ch, ch->refused ? NGX_EACCES : ngx_errno, log);
    ngx_http_shunt_channel_lost(ch);
}

static void ngx_http_shunt_retry_handler(ngx_event_t *ev)
{
    ngx_http_shunt_try(ev->data, ev->log);
}

/* ---- opening and closing ---- */

/* Opens a connection at a worker's start, and waits for the welcome if there is an agent. */
void ngx_http_shunt_channel_open(ngx_http_shunt_channel_t *ch, ngx_str_t *path, ngx_log_t *log)
{
    ch->path = *path;

    ngx_http_shunt_try(ch, log);
}

void ngx_http_shunt_channel_close(ngx_http_shunt_channel_t *ch)
{
    if (ch->connection) {
        ngx_close_connection(ch->connection);
        ch->connection = NULL;
    }

    if (ch->ring) {
        ngx_http_shunt_ring_release(ch->ring); /* `newest` and handoffs in progress keep it */
        ch->ring = NULL;
    }
}

/* Closes the connection, tells its owner, and tries again later. */
void ngx_http_shunt_channel_lost(ngx_http_shunt_channel_t *ch)
{
    if (ch->welcomed) {
        ngx_log_error(NGX_LOG_WARN, ngx_cycle->log, 0, "shunt: lost the agent for %s",
                      ngx_http_shunt_channel_name(ch));
    }

    ngx_http_shunt_channel_close(ch);
    ch->welcomed = 0;

    if (ch->lost) {
        ch->lost();
    }

    ch->backoff =
        ngx_min(ngx_max(2 * ch->backoff, NGX_HTTP_SHUNT_BACKOFF_MIN), NGX_HTTP_SHUNT_BACKOFF_MAX);

    ch->retry.data = ch;
    ch->retry.handler = ngx_http_shunt_retry_handler;
    ch->retry.log = ngx_cycle->log;
    ch->retry.cancelable = 1; /* the timer must not keep an exiting worker alive */

    ngx_add_timer(&ch->retry, ch->backoff);
}
