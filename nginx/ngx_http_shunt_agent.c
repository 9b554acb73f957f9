/* SPDX-License-Identifier: MIT */
/*
 * Sends the other files' messages to shuntd, the agent of this machine. A worker has up to two
 * connections to the agent (channel.c). CONTROL is for handoffs and fetches. A backend's workers
 * also have OFFERS, for offers with the descriptors of their files, so that many offers never delay
 * a handoff. Control messages of one pass of the event loop leave together, many in one packet. An
 * offer is a body that a backend holds ready, and that its response's header names. A handoff lets
 * a backend send such a body, the payload, on the client's own connection. A fetch brings a payload
 * through both agents to this nginx. A ring is a BPF ring buffer by which the kernel tells this
 * worker what becomes of its handoffs.
 *
 * While a connection is lost, new responses are relayed, which means sent through all tiers.
 * Handoffs that the agent was told of continue, because the kernel reports their completion.
 */
#include "ngx_http_shunt_channel.h"

#define NGX_HTTP_SHUNT_MESSAGES_MAX 1024 /* if so many wait, no handoff or fetch begins */
#define NGX_HTTP_SHUNT_BATCH        64   /* messages in one packet, at most */

/* Copy of a message that waits to be sent. */
typedef union {
    struct shunt_header header;
    struct shunt_handoff handoff;
    struct shunt_abort abort;
    struct shunt_fetch fetch;
    struct shunt_prove prove;
    struct shunt_withdrawn withdrawn;
} ngx_http_shunt_message_t;

static ngx_int_t ngx_http_shunt_received(ngx_http_shunt_received_t *in);
static void ngx_http_shunt_control_lost(void);
static void ngx_http_shunt_control_writable(ngx_event_t *wev);
static void ngx_http_shunt_offers_writable(ngx_event_t *wev);
static void ngx_http_shunt_flush_handler(ngx_event_t *ev);

static ngx_http_shunt_channel_t ngx_http_shunt_control = {
    .kind = SHUNT_CHANNEL_CONTROL,
    .received = ngx_http_shunt_received,
    .lost = ngx_http_shunt_control_lost,
    .writable = ngx_http_shunt_control_writable,
};

static ngx_http_shunt_channel_t ngx_http_shunt_offers = {
    .kind = SHUNT_CHANNEL_OFFERS,
    .received = ngx_http_shunt_received,
    .writable = ngx_http_shunt_offers_writable,
};

static ngx_http_shunt_message_t *ngx_http_shunt_messages;
static ngx_uint_t ngx_http_shunt_nmessages;
static ngx_uint_t ngx_http_shunt_messages_room;
static ngx_event_t ngx_http_shunt_flush;

/* Removes the first `n` messages, which were sent or never will be. Erases them, because they may
 * hold keys. */
static void ngx_http_shunt_forget_messages(ngx_uint_t n)
{
    if (n == 0) {
        return;
    }

    ngx_http_shunt_nmessages -= n;
    ngx_memmove(ngx_http_shunt_messages, ngx_http_shunt_messages + n,
                ngx_http_shunt_nmessages * sizeof(ngx_http_shunt_message_t));
    explicit_bzero(ngx_http_shunt_messages + ngx_http_shunt_nmessages,
                   n * sizeof(ngx_http_shunt_message_t));
}

/* ---- start and exit of a worker ---- */

ngx_int_t ngx_http_shunt_agent_init(ngx_cycle_t *cycle, ngx_http_shunt_main_conf_t *mcf)
{
    ngx_http_shunt_flush.handler = ngx_http_shunt_flush_handler;
    ngx_http_shunt_flush.log = cycle->log;
    ngx_http_shunt_pulse_begin(cycle->log);

    ngx_http_shunt_channel_open(&ngx_http_shunt_control, &mcf->agent, cycle->log);

    if (mcf->backend) {
        ngx_http_shunt_channel_open(&ngx_http_shunt_offers, &mcf->agent, cycle->log);
    }

    return NGX_OK;
}

void ngx_http_shunt_agent_exit(void)
{
    ngx_http_shunt_pulse_end();
    ngx_http_shunt_forget_messages(ngx_http_shunt_nmessages);
    ngx_http_shunt_channel_close(&ngx_http_shunt_control);
    ngx_http_shunt_channel_close(&ngx_http_shunt_offers);

    if (ngx_http_shunt_control.newest) {
        ngx_http_shunt_ring_release(ngx_http_shunt_control.newest);
        ngx_http_shunt_control.newest = NULL;
    }
}

/* ---- state of the connections ---- */

/* Whether something can be handed off or fetched. */
ngx_int_t ngx_http_shunt_agent_ready(void)
{
    return ngx_http_shunt_control.welcomed && !ngx_http_shunt_pulse_is_gone() &&
           ngx_http_shunt_nmessages < NGX_HTTP_SHUNT_MESSAGES_MAX;
}

ngx_int_t ngx_http_shunt_agent_connected(void)
{
    return ngx_http_shunt_control.welcomed;
}

ngx_int_t ngx_http_shunt_agent_takes_offers(void)
{
    const struct shunt_board *board = ngx_http_shunt_board();

    return ngx_http_shunt_offers.welcomed && board && board->backend &&
           !ngx_http_shunt_pulse_is_gone();
}

/* Ring for new handoffs. NULL: there is no agent, or it has given this worker no ring. */
ngx_http_shunt_ring_t *ngx_http_shunt_agent_ring(void)
{
    return ngx_http_shunt_control.ring;
}

/* Ring for questions about handoffs in progress, whether there is an agent or not. Rings of earlier
 * agents cannot be used: the newest agent may have given their numbers to other rings. */
ngx_http_shunt_ring_t *ngx_http_shunt_newest_ring(void)
{
    return ngx_http_shunt_control.newest;
}

/* ---- offers ---- */

/* Returns the number of the next offer. Each number is used only once: when the lower half is used
 * up, a new connection to the agent brings a new upper half. */
uint64_t ngx_http_shunt_agent_offer_number(void)
{
    return (uint64_t) ngx_http_shunt_offers.worker << 32 | ++ngx_http_shunt_offers.offers;
}

/* Sends an offer with its file. NGX_DECLINED: it was not sent, because the agent does not read fast
 * enough or is lost. */
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

        if (ngx_http_shunt_offers.offers == 0xffffffffu) {
            ngx_http_shunt_channel_lost(&ngx_http_shunt_offers);
        }

        return NGX_OK;
    }

    /* ETOOMANYREFS: too many descriptors are in transit; some have to be read first */
    if (ngx_errno == NGX_EAGAIN || ngx_errno == ENOBUFS || ngx_errno == ETOOMANYREFS) {
        return NGX_DECLINED;
    }

    ngx_http_shunt_channel_lost(&ngx_http_shunt_offers);

    return NGX_DECLINED;
}

/* Does nothing, because no offer waits for room in the socket: an offer that finds no room is not
 * made. */
static void ngx_http_shunt_offers_writable(ngx_event_t *wev)
{
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

        messages = malloc(room * sizeof(ngx_http_shunt_message_t));
        if (messages == NULL) {
            return NGX_ERROR;
        }

        /* not realloc(), which may leave keys in the memory that it frees */
        ngx_memcpy(messages, ngx_http_shunt_messages,
                   ngx_http_shunt_nmessages * sizeof(ngx_http_shunt_message_t));
        explicit_bzero(ngx_http_shunt_messages,
                       ngx_http_shunt_nmessages * sizeof(ngx_http_shunt_message_t));
        free(ngx_http_shunt_messages);
        ngx_http_shunt_messages = messages;
        ngx_http_shunt_messages_room = room;
    }

    ngx_memcpy(&ngx_http_shunt_messages[ngx_http_shunt_nmessages++], message, size);

    if (!ngx_http_shunt_flush.posted) {
        ngx_post_event(&ngx_http_shunt_flush, &ngx_posted_events);
    }

    return NGX_OK;
}

/* Sends the first messages in one packet. Returns their number, 0 if the socket is full, or -1. */
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

        ngx_http_shunt_forget_messages(sent);

        if (sent == 0) {
            c->write->ready = 0;
            (void) ngx_handle_write_event(c->write, 0);
            return;
        }
    }
}

static void ngx_http_shunt_control_writable(ngx_event_t *wev)
{
    if (ngx_http_shunt_nmessages) {
        ngx_http_shunt_flush_handler(&ngx_http_shunt_flush);
    }
}

/* ---- messages in ---- */

static ngx_int_t ngx_http_shunt_received(ngx_http_shunt_received_t *in)
{
    ngx_str_t who;
    ngx_http_shunt_ctx_t *ctx;

    switch (in->body.header.kind) {

    case SHUNT_MSG_ENDED:
        if (in->size < SHUNT_THROUGH(struct shunt_ended, peer)) {
            return NGX_ERROR;
        }

        ctx = ngx_http_shunt_pending_find(in->body.ended.handoff);
        if (ctx && in->body.ended.peer != SHUNT_NO_PEER && in->body.ended.peer != ctx->peer.index) {
            who = ngx_http_shunt_board_peer(in->body.ended.peer);
            ngx_log_error(
                NGX_LOG_WARN, ctx->request->connection->log, 0,
                "shunt: the agent of \"%V\" tried to end a handoff to \"%V\", and was ignored",
                &who, &ctx->payload.backend);
            return NGX_OK;
        }
        if (ctx) {
            ngx_http_shunt_ended(ctx, in->body.ended.reason);
        }

        return NGX_OK;

    case SHUNT_MSG_DIGEST:
        if (in->size < SHUNT_THROUGH(struct shunt_digest, sha256)) {
            return NGX_ERROR;
        }

        ctx = ngx_http_shunt_pending_find(in->body.digest.handoff);
        if (ctx) {
            ngx_http_shunt_digest_told(ctx, &in->body.digest);
        }

        return NGX_OK;

    case SHUNT_MSG_FETCHED:
        if (in->size < SHUNT_THROUGH(struct shunt_fetched, length)) {
            return NGX_ERROR;
        }

        ctx = ngx_http_shunt_pending_find(in->body.fetched.fetch);
        if (ctx) {
            ngx_http_shunt_fetch_connected(ctx, in->fds[0], in->body.fetched.length);
            in->fds[0] = -1;
        }

        return NGX_OK;

    default: /* a message of a later version */
        return NGX_OK;
    }
}

/* ---- CONTROL is lost ---- */

/* Ends a request's fetch if the agent has not answered it yet. Called when the connection to the
 * agent is lost. */
static void ngx_http_shunt_orphan(ngx_http_shunt_ctx_t *ctx)
{
    if (ctx->mode != SHUNT_MODE_ACTIVE && ctx->mode != SHUNT_MODE_COMPLETE &&
        ctx->fetch.stream == NULL) {
        ngx_http_shunt_ended(ctx, SHUNT_REASON_PEER_LOST);
    }
}

static void ngx_http_shunt_control_lost(void)
{
    ngx_uint_t i;
    ngx_http_shunt_ctx_t *ctx;

    for (i = 0; i < ngx_http_shunt_nmessages; i++) {
        if (ngx_http_shunt_messages[i].header.kind != SHUNT_MSG_HANDOFF) {
            continue;
        }

        ctx = ngx_http_shunt_pending_find(ngx_http_shunt_messages[i].handoff.handoff);
        if (ctx) {
            ngx_http_shunt_ended(ctx, SHUNT_REASON_UNKNOWN_OFFER);
        }
    }

    ngx_http_shunt_forget_messages(ngx_http_shunt_nmessages);
    ngx_http_shunt_pending_each(ngx_http_shunt_orphan);
}
