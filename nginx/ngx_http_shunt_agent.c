/* SPDX-License-Identifier: MIT */
/*
 * A worker's connections to shuntd: CONTROL for handoffs and fetches, OFFERS for descriptors of
 * files, so that a burst of offers never delays a handoff. Control messages of one turn of the
 * event loop leave together.
 *
 * A lost connection stops new work, which is then relayed, and is made again after 0.1 to 5
 * seconds; handoffs under way go on, for the kernel reports those.
 */
#include "ngx_http_shunt.h"

#define NGX_HTTP_SHUNT_BACKOFF_MIN  100  /* ms */
#define NGX_HTTP_SHUNT_BACKOFF_MAX  5000 /* ms */
#define NGX_HTTP_SHUNT_START_WAIT   1    /* s, for the welcome when a worker starts */
#define NGX_HTTP_SHUNT_MESSAGES_MAX 1024 /* waiting: beyond, no more handoffs */
#define NGX_HTTP_SHUNT_BATCH        64
#define NGX_HTTP_SHUNT_FDS_MAX      4

/* Keeps its own copy of a message until the socket takes it. */
typedef union {
    struct shunt_header header;
    struct shunt_handoff handoff;
    struct shunt_abort abort;
    struct shunt_fetch fetch;
} ngx_http_shunt_message_t;

typedef struct {
    uint32_t kind;                /* SHUNT_CHANNEL_* */
    ngx_connection_t *connection; /* NULL: waiting to try again */
    ngx_uint_t welcomed;
    ngx_event_t retry;
    ngx_msec_t backoff;
    uint32_t worker;
    ngx_http_shunt_ring_t *ring;
} ngx_http_shunt_channel_t;

typedef struct {
    size_t size;
    int fds[NGX_HTTP_SHUNT_FDS_MAX]; /* -1: none, or taken */
    union {
        struct shunt_header header;
        struct shunt_welcome welcome;
        struct shunt_ended ended;
        struct shunt_fetched fetched;
        u_char bytes[512];
    } body;
} ngx_http_shunt_received_t;

static void ngx_http_shunt_channel_lost(ngx_http_shunt_channel_t *ch);
static void ngx_http_shunt_channel_handler(ngx_event_t *rev);
static void ngx_http_shunt_flush_handler(ngx_event_t *ev);

static ngx_str_t ngx_http_shunt_agent_path;
static ngx_http_shunt_channel_t ngx_http_shunt_control = {.kind = SHUNT_CHANNEL_CONTROL};
static ngx_http_shunt_channel_t ngx_http_shunt_offers = {.kind = SHUNT_CHANNEL_OFFERS};

static ngx_http_shunt_message_t *ngx_http_shunt_messages;
static ngx_uint_t ngx_http_shunt_nmessages;
static ngx_uint_t ngx_http_shunt_messages_room;
static ngx_event_t ngx_http_shunt_flush;
static uint32_t ngx_http_shunt_offer_count;

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

/* NGX_OK: a whole message. NGX_AGAIN: none yet. NGX_ERROR: the connection is of no more use. */
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

    if ((size_t) n < sizeof(struct shunt_header) || (msg.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) ||
        in->body.header.size != (size_t) n) {
        ngx_http_shunt_close_fds(in);
        return NGX_ERROR;
    }

    return NGX_OK;
}

static ngx_int_t ngx_http_shunt_welcomed(ngx_http_shunt_channel_t *ch,
                                         ngx_http_shunt_received_t *in, ngx_log_t *log)
{
    if (in->size < sizeof(struct shunt_welcome) || ch->welcomed) {
        return NGX_ERROR;
    }

    /* board and counters; an OFFERS connection may come without, for CONTROL brings them as well */
    if (in->fds[0] != -1 && in->fds[1] != -1) {
        if (ngx_http_shunt_board_map(in->fds[0], in->fds[1], log) != NGX_OK) {
            return NGX_ERROR;
        }

    } else if (ch->kind == SHUNT_CHANNEL_CONTROL) {
        return NGX_ERROR;
    }

    ch->worker = in->body.welcome.worker;

    if (ch->kind == SHUNT_CHANNEL_CONTROL && in->fds[2] != -1) {
        ch->ring = ngx_http_shunt_ring_open(in->fds[2], in->body.welcome.ring, log);
        in->fds[2] = -1;
    }

    if (ch->kind == SHUNT_CHANNEL_OFFERS) {
        ngx_http_shunt_offer_count = 0; /* a new upper half: the lower half may begin again */
    }

    ch->welcomed = 1;
    ch->backoff = NGX_HTTP_SHUNT_BACKOFF_MIN;

    ngx_log_error(NGX_LOG_NOTICE, log, 0, "shunt: agent connected, channel %uD, worker %uD",
                  ch->kind, ch->worker);

    return NGX_OK;
}

static ngx_int_t ngx_http_shunt_message(ngx_http_shunt_channel_t *ch, ngx_http_shunt_received_t *in,
                                        ngx_log_t *log)
{
    ngx_http_shunt_ctx_t *ctx;

    switch (in->body.header.kind) {

    case SHUNT_MSG_WELCOME:
        return ngx_http_shunt_welcomed(ch, in, log);

    case SHUNT_MSG_ENDED:
        if (in->size < sizeof(struct shunt_ended)) {
            return NGX_ERROR;
        }

        ctx = ngx_http_shunt_pending_find(in->body.ended.handoff);
        if (ctx) {
            ngx_http_shunt_ended(ctx, in->body.ended.reason);
        }

        return NGX_OK;

    case SHUNT_MSG_FETCHED:
        if (in->size < sizeof(struct shunt_fetched) || in->fds[0] == -1) {
            return NGX_ERROR;
        }

        ctx = ngx_http_shunt_pending_find(in->body.fetched.fetch);
        if (ctx) {
            ngx_http_shunt_fetch_connected(ctx, in->fds[0], in->body.fetched.length);
            in->fds[0] = -1;
        }

        return NGX_OK;

    default: /* of a later version */
        return NGX_OK;
    }
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
            rc = ngx_http_shunt_message(ch, &in, rev->log);
            ngx_http_shunt_close_fds(&in);
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
    struct shunt_hello hello = {{SHUNT_MSG_HELLO, sizeof(struct shunt_hello)},
                                SHUNT_VERSION,
                                ch->kind};

    fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd == -1) {
        return -1;
    }

    ngx_memzero(&address, sizeof(address));
    address.sun_family = AF_UNIX;
    ngx_memcpy(address.sun_path, ngx_http_shunt_agent_path.data, ngx_http_shunt_agent_path.len);

    /* connect() waits where the agent's backlog is full */
    (void) setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof(wait));
    (void) setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait));

    /* only the start of a worker may wait: later there are clients to serve */
    if (ch->backoff && ngx_nonblocking(fd) == -1) {
        close(fd);
        return -1;
    }

    if (connect(fd, (struct sockaddr *) &address, sizeof(address)) == -1 ||
        send(fd, &hello, sizeof(hello), MSG_NOSIGNAL) != (ssize_t) sizeof(hello)) {
        close(fd);
        return -1;
    }

    return fd;
}

/* The welcome, waited for: the first requests of a worker shall not miss their shortcut. */
static ngx_int_t ngx_http_shunt_first_welcome(ngx_http_shunt_channel_t *ch, int fd, ngx_log_t *log)
{
    ngx_int_t rc;
    ngx_http_shunt_received_t in;

    rc = ngx_http_shunt_receive_message(fd, &in);

    if (rc == NGX_OK) {
        rc = in.body.header.kind == SHUNT_MSG_WELCOME ? ngx_http_shunt_welcomed(ch, &in, log)
                                                      : NGX_ERROR;
        ngx_http_shunt_close_fds(&in);
    }

    return rc == NGX_OK ? NGX_OK : NGX_ERROR;
}

static void ngx_http_shunt_dummy_handler(ngx_event_t *ev)
{
}

static void ngx_http_shunt_writable_handler(ngx_event_t *wev)
{
    if (ngx_http_shunt_nmessages) {
        ngx_http_shunt_flush_handler(&ngx_http_shunt_flush);
    }
}

static ngx_int_t ngx_http_shunt_connect(ngx_http_shunt_channel_t *ch, ngx_log_t *log)
{
    int fd;
    ngx_connection_t *c;

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
    c->read->channel = 1; /* see ring.c */
    c->write->log = log;
    c->write->channel = 1;
    c->write->handler = ch->kind == SHUNT_CHANNEL_CONTROL ? ngx_http_shunt_writable_handler
                                                          : ngx_http_shunt_dummy_handler;
    ch->connection = c;

    return ngx_handle_read_event(c->read, 0);
}

static void ngx_http_shunt_try(ngx_http_shunt_channel_t *ch, ngx_log_t *log)
{
    ngx_err_t err;
    ngx_uint_t level;

    if (ngx_http_shunt_connect(ch, log) == NGX_OK) {
        if (ch->backoff == 0) {
            ch->backoff = NGX_HTTP_SHUNT_BACKOFF_MIN;
        }

        return;
    }

    err = ngx_errno;

    /* said once: an agent that is not installed shall not fill the log */
    level = ch->backoff < NGX_HTTP_SHUNT_BACKOFF_MIN * 2 ? NGX_LOG_WARN : NGX_LOG_INFO;
    ngx_log_error(level, log, err, "shunt: no agent at \"%V\": responses are relayed",
                  &ngx_http_shunt_agent_path);

    ngx_http_shunt_channel_lost(ch);
}

static void ngx_http_shunt_retry_handler(ngx_event_t *ev)
{
    ngx_http_shunt_try(ev->data, ev->log);
}

/* Fetches without their socket cannot be answered any more, nor handoffs that were never told to
 * the agent. */
static void ngx_http_shunt_orphan(ngx_http_shunt_ctx_t *ctx)
{
    if (ctx->mode != SHUNT_MODE_ACTIVE && ctx->mode != SHUNT_MODE_COMPLETE &&
        ctx->fetch.stream == NULL) {
        ngx_http_shunt_ended(ctx, SHUNT_REASON_PEER_LOST);
    }
}

static void ngx_http_shunt_drop_messages(void)
{
    ngx_uint_t i;
    ngx_http_shunt_ctx_t *ctx;

    for (i = 0; i < ngx_http_shunt_nmessages; i++) {
        if (ngx_http_shunt_messages[i].header.kind != SHUNT_MSG_HANDOFF) {
            continue;
        }

        ctx = ngx_http_shunt_pending_find(ngx_http_shunt_messages[i].handoff.handoff);
        if (ctx) {
            ngx_http_shunt_ended(ctx, SHUNT_REASON_PEER_LOST);
        }
    }

    ngx_http_shunt_nmessages = 0;
    ngx_http_shunt_pending_each(ngx_http_shunt_orphan);
}

static void ngx_http_shunt_channel_lost(ngx_http_shunt_channel_t *ch)
{
    if (ch->welcomed) {
        ngx_log_error(NGX_LOG_WARN, ngx_cycle->log, 0, "shunt: agent lost, channel %uD", ch->kind);
    }

    if (ch->connection) {
        ngx_close_connection(ch->connection);
        ch->connection = NULL;
    }

    if (ch->ring) {
        ngx_http_shunt_ring_release(ch->ring); /* handoffs under way hold it */
        ch->ring = NULL;
    }

    ch->welcomed = 0;

    if (ch->kind == SHUNT_CHANNEL_CONTROL) {
        ngx_http_shunt_drop_messages();
    }

    ch->backoff =
        ngx_min(ngx_max(2 * ch->backoff, NGX_HTTP_SHUNT_BACKOFF_MIN), NGX_HTTP_SHUNT_BACKOFF_MAX);

    ch->retry.data = ch;
    ch->retry.handler = ngx_http_shunt_retry_handler;
    ch->retry.log = ngx_cycle->log;
    ch->retry.cancelable = 1; /* keeps no exiting worker alive */

    ngx_add_timer(&ch->retry, ch->backoff);
}

ngx_int_t ngx_http_shunt_agent_init(ngx_cycle_t *cycle, ngx_http_shunt_main_conf_t *mcf)
{
    ngx_http_shunt_agent_path = mcf->agent;

    ngx_http_shunt_flush.handler = ngx_http_shunt_flush_handler;
    ngx_http_shunt_flush.log = cycle->log;

    ngx_http_shunt_try(&ngx_http_shunt_control, cycle->log);

    if (mcf->backend) {
        ngx_http_shunt_try(&ngx_http_shunt_offers, cycle->log);
    }

    return NGX_OK;
}

static void ngx_http_shunt_channel_exit(ngx_http_shunt_channel_t *ch)
{
    if (ch->connection) {
        ngx_close_connection(ch->connection);
        ch->connection = NULL;
    }

    if (ch->ring) {
        ngx_http_shunt_ring_release(ch->ring);
        ch->ring = NULL;
    }
}

void ngx_http_shunt_agent_exit(void)
{
    ngx_http_shunt_channel_exit(&ngx_http_shunt_control);
    ngx_http_shunt_channel_exit(&ngx_http_shunt_offers);
}

/* ---- what the other files ask ---- */

/* Can something be handed off or fetched? */
ngx_int_t ngx_http_shunt_agent_ready(void)
{
    return ngx_http_shunt_control.welcomed &&
           ngx_http_shunt_nmessages < NGX_HTTP_SHUNT_MESSAGES_MAX;
}

ngx_int_t ngx_http_shunt_agent_takes_offers(void)
{
    const struct shunt_board *board = ngx_http_shunt_board();

    return ngx_http_shunt_offers.welcomed && board && board->backend;
}

ngx_http_shunt_ring_t *ngx_http_shunt_agent_ring(void)
{
    return ngx_http_shunt_control.ring;
}

/* A number that is never used twice: at the end of the count, a new connection brings a new upper
 * half. */
uint64_t ngx_http_shunt_agent_offer_number(void)
{
    return (uint64_t) ngx_http_shunt_offers.worker << 32 | ++ngx_http_shunt_offer_count;
}

/* NGX_DECLINED: the agent does not read fast enough */
ngx_int_t ngx_http_shunt_agent_offer(struct shunt_offer *offer, int fd)
{
    struct iovec iov = {offer, sizeof(*offer)};
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct msghdr msg = {.msg_iov = &iov,
                         .msg_iovlen = 1,
                         .msg_control = &control,
                         .msg_controllen = sizeof(control)};
    struct cmsghdr *cmsg;

    ngx_memzero(&control, sizeof(control));

    cmsg = CMSG_FIRSTHDR(&msg);
    cmsg->cmsg_level = SOL_SOCKET;
    cmsg->cmsg_type = SCM_RIGHTS;
    cmsg->cmsg_len = CMSG_LEN(sizeof(int));
    ngx_memcpy(CMSG_DATA(cmsg), &fd, sizeof(int));

    if (sendmsg(ngx_http_shunt_offers.connection->fd, &msg, MSG_NOSIGNAL) ==
        (ssize_t) sizeof(*offer)) {

        if (ngx_http_shunt_offer_count == 0xffffffffu) {
            ngx_http_shunt_channel_lost(&ngx_http_shunt_offers);
        }

        return NGX_OK;
    }

    /* ETOOMANYREFS: so many descriptors are under way that the kernel wants them read first */
    if (ngx_errno == NGX_EAGAIN || ngx_errno == ENOBUFS || ngx_errno == ETOOMANYREFS) {
        return NGX_DECLINED;
    }

    ngx_http_shunt_channel_lost(&ngx_http_shunt_offers);

    return NGX_DECLINED;
}

/* ---- control messages out ---- */

ngx_int_t ngx_http_shunt_agent_post(const void *message, size_t size)
{
    ngx_uint_t room;
    ngx_http_shunt_message_t *messages;

    if (!ngx_http_shunt_control.welcomed) {
        return NGX_ERROR;
    }

    if (ngx_http_shunt_nmessages == ngx_http_shunt_messages_room) {
        room = ngx_http_shunt_messages_room ? 2 * ngx_http_shunt_messages_room : 64;

        messages = realloc(ngx_http_shunt_messages, room * sizeof(ngx_http_shunt_message_t));
        if (messages == NULL) {
            return NGX_ERROR;
        }

        ngx_http_shunt_messages = messages;
        ngx_http_shunt_messages_room = room;
    }

    ngx_memcpy(&ngx_http_shunt_messages[ngx_http_shunt_nmessages++], message, size);

    if (!ngx_http_shunt_flush.posted) {
        ngx_post_event(&ngx_http_shunt_flush, &ngx_posted_events);
    }

    return NGX_OK;
}

/* How many of the first messages the socket took, in one packet, or -1. */
static ngx_int_t ngx_http_shunt_send_packet(int fd)
{
    ssize_t sent;
    ngx_uint_t n;
    size_t size = 0;
    struct iovec iov[NGX_HTTP_SHUNT_BATCH];
    struct msghdr msg = {.msg_iov = iov};

    for (n = 0; n < ngx_min(ngx_http_shunt_nmessages, NGX_HTTP_SHUNT_BATCH); n++) {
        iov[n].iov_base = &ngx_http_shunt_messages[n];
        iov[n].iov_len = ngx_http_shunt_messages[n].header.size;
        size += iov[n].iov_len;

        if (size > SHUNT_PACKET_BYTES) {
            break;
        }
    }

    msg.msg_iovlen = n;
    sent = sendmsg(fd, &msg, MSG_NOSIGNAL);

    if (sent == -1) {
        return ngx_errno == NGX_EAGAIN || ngx_errno == NGX_EINTR ? 0 : -1;
    }

    return n;
}

static void ngx_http_shunt_flush_handler(ngx_event_t *ev)
{
    ngx_int_t sent;
    ngx_connection_t *c = ngx_http_shunt_control.connection;

    while (c && ngx_http_shunt_nmessages) {
        sent = ngx_http_shunt_send_packet(c->fd);

        if (sent < 0) {
            ngx_http_shunt_channel_lost(&ngx_http_shunt_control);
            return;
        }

        ngx_http_shunt_nmessages -= sent;
        ngx_memmove(ngx_http_shunt_messages, ngx_http_shunt_messages + sent,
                    ngx_http_shunt_nmessages * sizeof(ngx_http_shunt_message_t));

        if (sent == 0) {
            c->write->ready = 0;
            (void) ngx_handle_write_event(c->write, 0);
            return;
        }
    }
}
