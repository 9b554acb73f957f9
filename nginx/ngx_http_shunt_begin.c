/* SPDX-License-Identifier: MIT */
/*
 * The beginning of a handoff, in three steps. First, the header is sent, and must have left nginx
 * entirely. Then the kernel is told that the peer sends the next bytes (SHUNT_BEGIN). Last, this
 * machine's agent is told what the peer has to know. If a step is not possible, the payload is
 * fetched, or relayed through all tiers (rest.c). handoff.c handles what follows. A handoff lets a
 * backend send a payload, the body of a response, on the client's own connection. A peer is another
 * machine's agent. A region is the range of the client connection's sequence numbers that a payload
 * takes.
 */
#include "ngx_http_shunt.h"
#include "ngx_http_shunt_kernel.h"

/* Sends the header. NGX_OK: nginx holds no more bytes for this connection. NGX_AGAIN: it does. */
static ngx_int_t ngx_http_shunt_flush_header(ngx_http_request_t *r,
                                             ngx_http_output_body_filter_pt output)
{
    ngx_int_t rc;
    ngx_buf_t *b;
    ngx_chain_t out;
    ngx_connection_t *c = r->connection;

    /* neither Nagle nor a cork of an earlier response may delay the header's last segment */
    if (c->tcp_nopush == NGX_TCP_NOPUSH_SET) {
        if (ngx_tcp_push(c->fd) == -1) {
            return NGX_ERROR;
        }

        c->tcp_nopush = NGX_TCP_NOPUSH_UNSET;
    }

    if (ngx_tcp_nodelay(c) != NGX_OK) {
        return NGX_ERROR;
    }

    b = ngx_calloc_buf(r->pool);
    if (b == NULL) {
        return NGX_ERROR;
    }

    b->flush = 1;
    out.buf = b;
    out.next = NULL;

    rc = output(r, &out);

    if (rc == NGX_OK && (r->out || c->buffered)) {
        return NGX_AGAIN;
    }

    return rc;
}

/* Fills in what the peer has to know to send `length` payload bytes. The kernel noted the
 * connection's state when the region began or moved. NGX_DONE: the region has ended by now, and
 * nothing has to be sent. */
ngx_int_t ngx_http_shunt_describe(ngx_http_shunt_ctx_t *ctx, uint64_t length,
                                  struct shunt_handoff *msg)
{
    const struct shunt_state *state;

    state = ngx_http_shunt_ring_answer(ctx->ring, ctx->id);
    if (state == NULL) {
        state = ngx_http_shunt_state(ctx);
    }

    if (ctx->mode != SHUNT_MODE_ACTIVE) {
        return NGX_DONE;
    }

    if (state == NULL) {
        return NGX_ERROR;
    }

    ngx_memzero(msg, sizeof(*msg));
    msg->header.kind = SHUNT_MSG_HANDOFF;
    msg->header.size = sizeof(*msg);
    msg->bytes = sizeof(*msg);
    msg->peer = ctx->peer.index;
    msg->epoch = ctx->peer.epoch;
    msg->handoff = ctx->id;
    msg->offer = ctx->payload.number;
    msg->length = length;
    msg->rate = ctx->request->limit_rate; /* set by the write filter when the header was sent */
    ngx_memcpy(msg->tag, ctx->payload.tag, 16);
    ngx_http_shunt_trace(ctx->request, msg->trace);
    msg->flow = state->flow;
    if (ctx->etag.len && ngx_http_shunt_proof_needed(ctx)) {
        msg->flow.options |= SHUNT_OPTION_DIGEST;
    }

    return NGX_OK;
}

/* Begins the region. Returns 0, or the counter of the reason why the region cannot begin. `keys`
 * gets the keys for the region's TLS records. */
static ngx_uint_t ngx_http_shunt_begin_region(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx,
                                              struct shunt_tls *keys)
{
    ngx_uint_t reason;
    ngx_connection_t *c = r->connection;
    struct shunt_begin begin;

    ctx->region = ctx->payload.length;
    reason = ngx_http_shunt_ssl_hand_over(r, ctx, keys);

    if (reason) {
        return reason;
    }

    ctx->ring = ngx_http_shunt_agent_ring();

    if (ctx->ring == NULL || !ngx_http_shunt_agent_ready()) {
        ctx->ring = NULL;
        return SHUNT_COUNT_fetched_begin;
    }

    ctx->id = ngx_http_shunt_pending_add(ctx);

    begin.peer = ctx->peer.index;
    begin.ring = ngx_http_shunt_ring_index(ctx->ring);
    begin.handoff = ctx->id;
    begin.length = ctx->region;

    if (ctx->id == 0 || ngx_http_shunt_ring_ask(ctx->ring) != NGX_OK ||
        ngx_http_shunt_kernel_begin(c->fd, &begin) == -1) {
        ngx_log_error(NGX_LOG_INFO, c->log, ngx_errno, "shunt: SHUNT_BEGIN refused%V",
                      ngx_http_shunt_trace_text(r));
        reason = ctx->id ? ngx_http_shunt_watch_refused(ctx) : SHUNT_COUNT_fetched_begin;
        ngx_http_shunt_pending_remove(ctx->id);
        ctx->id = 0;
        ctx->ring = NULL;
        return reason;
    }

    ngx_http_shunt_watch_begun();
    ngx_http_shunt_ring_hold(ctx->ring);
    ngx_http_shunt_count_handoff(ctx->peer.index, 1);
    ngx_http_shunt_lifetime_shortcut(c);
    ctx->mode = SHUNT_MODE_ACTIVE;

    return 0;
}

static void ngx_http_shunt_watch_handler(ngx_event_t *ev)
{
    ngx_http_shunt_ctx_t *ctx = ev->data;

    if (ctx->mode == SHUNT_MODE_ACTIVE) {
        ngx_http_shunt_ssl_watch(ctx->request);
    }
}

/* Tells the agent of the handoff, unless the client has the whole payload already. NGX_ERROR: the
 * agent was not told, so nobody will send the region. */
static ngx_int_t ngx_http_shunt_claim(ngx_http_shunt_ctx_t *ctx, const struct shunt_tls *keys)
{
    ngx_int_t rc;
    struct shunt_handoff msg;

    if (ngx_http_shunt_ssl_freeze(ctx, keys) != NGX_OK) {
        return NGX_ERROR;
    }

    rc = ngx_http_shunt_describe(ctx, ctx->payload.length, &msg);

    if (rc != NGX_OK) {
        return rc == NGX_DONE ? NGX_OK : rc;
    }

    msg.tls = *keys;
    rc = ngx_http_shunt_agent_post(&msg, sizeof(msg));
    explicit_bzero(&msg, sizeof(msg)); /* erases the keys, with all other fields */

    return rc;
}

/* Begins a handoff. If it cannot begin, fetches or relays the payload. Called when the late body
 * filter gets the last buf of the response. No bytes have come before that buf, because the backend
 * sends the payload. */
ngx_int_t ngx_http_shunt_handoff_begin(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx,
                                       ngx_http_output_body_filter_pt output)
{
    ngx_int_t rc, told = NGX_OK;
    ngx_uint_t reason;
    struct shunt_tls keys;

    ngx_memzero(&keys, sizeof(keys));
    ctx->output = output;
    rc = ngx_http_shunt_flush_header(r, output);

    if (rc == NGX_ERROR) {
        return NGX_ERROR;
    }

    reason = rc == NGX_OK ? ngx_http_shunt_begin_region(r, ctx, &keys) : SHUNT_COUNT_fetched_unsent;

    if (reason == 0) {
        told = ngx_http_shunt_claim(ctx, &keys);

        if (told != NGX_OK && ngx_http_shunt_take_untold(ctx) == NGX_OK) {
            reason = SHUNT_COUNT_fetched_begin;
        }
    }

    ngx_http_shunt_ssl_forget(&keys);

    /* the client has reset the connection by now, so nothing needs to be fetched */
    if (reason && ngx_http_shunt_kernel_error(r->connection->fd)) {
        r->connection->error = 1;
        return NGX_ERROR;
    }

    if (reason) {
        ngx_http_shunt_outcome(r, reason);

        if (ngx_http_shunt_agent_ready()) {
            ngx_http_shunt_vain_note(r, reason);

        } else {
            rc = ngx_http_shunt_rest_instead(ctx);

            if (rc != NGX_DECLINED) {
                return rc == NGX_OK ? NGX_AGAIN : rc;
            }
        }

        ctx->mode = SHUNT_MODE_FETCH_LATE;
        return ngx_http_shunt_fetch_begin(ctx, output);
    }

    ngx_http_shunt_outcome(r, SHUNT_COUNT_shortcuts);

    if (ctx->mode == SHUNT_MODE_COMPLETE) {
        return NGX_OK;
    }

    ngx_http_shunt_watch_progress(r, ctx);
    ngx_http_shunt_pulse_watch();
    ngx_http_shunt_watch_reading(r, ctx);
    r->buffered |= NGX_HTTP_SHUNT_BUFFERED;

    if (told != NGX_OK) {
        ngx_log_error(NGX_LOG_ERR, r->connection->log, 0, "shunt: handoff lost at its beginning%V",
                      ngx_http_shunt_trace_text(r));
        ngx_http_shunt_fail(ctx);
    }

    if (ctx->content_bytes) {
        ctx->watch.data = ctx;
        ctx->watch.handler = ngx_http_shunt_watch_handler;
        ctx->watch.log = r->connection->log;
        ngx_post_event(&ctx->watch, &ngx_posted_events);
    }

    return NGX_AGAIN;
}
