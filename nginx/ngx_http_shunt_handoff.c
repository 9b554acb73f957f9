/* SPDX-License-Identifier: MIT */
/*
 * The handoff of a client's connection for one payload. The header leaves, and has left entirely;
 * the kernel is told that the next bytes are the peer's (SHUNT_BEGIN); the agent is told what its
 * peer has to know. From then on nothing may be written, and the request stays open as if its body
 * waited in a full socket buffer, until the kernel reports that the client has acknowledged
 * everything. A handoff that ends otherwise, and that no other backend goes on with (recovery.c),
 * ends in a reset: the client must never take a part for the whole.
 */
#include "ngx_http_shunt.h"
#include "ngx_http_shunt_kernel.h"

static void ngx_http_shunt_progress_handler(ngx_event_t *ev);
static void ngx_http_shunt_failure_handler(ngx_event_t *ev);

/* ---- what the client says meanwhile ---- */

/*
 * Stands before nginx's reader while a payload is under way. A client that has everything may close
 * at once, and the last acknowledgement is in its FIN: the kernel has noted it by then, and it
 * comes first, whichever event nginx looks at first. Until the request has ended, too, a FIN is no
 * reason to give it up. A connection that is to be closed (worker_shutdown_timeout) is nginx's.
 */
static void ngx_http_shunt_reading_handler(ngx_event_t *rev)
{
    ngx_connection_t *c = rev->data;
    ngx_http_request_t *r = c->data;
    ngx_http_shunt_ctx_t *ctx = ngx_http_shunt_ctx(r->main);
    ngx_event_handler_pt reader = ctx->reader;

    if (!c->close) {
        if (ctx->mode == SHUNT_MODE_ACTIVE) {
            ngx_http_set_log_request(c->log, r);
            (void) ngx_http_shunt_follow(ctx);
        }

        if (ctx->mode == SHUNT_MODE_COMPLETE) {
            return;
        }

        if (ctx->deaf) {
            ngx_http_block_reading(r);
            return;
        }
    }

    reader(rev);
}

/*
 * While nginx reads from an upstream, proxy_ignore_client_abort and its kin have it send on to a
 * client that has closed its half. With an offer the upstream is done at once, and nginx would look
 * for a FIN from when the filters have returned: by an event of this very turn, if one is there.
 */
static void ngx_http_shunt_watch_reading(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx)
{
    ngx_event_t *rev = r->connection->read;

    ctx->reader = rev->handler;
    rev->handler = ngx_http_shunt_reading_handler;

    /* on TLS, events have more to tell: ngx_http_shunt_ssl_watch() */
    ctx->deaf = ctx->content_bytes == 0 && !r->discard_body && r->upstream &&
                r->upstream->conf->ignore_client_abort;
}

/* What came meanwhile has left `ready` set, and whoever wants to read begins with that. */
void ngx_http_shunt_leave_reading(ngx_http_shunt_ctx_t *ctx)
{
    if (ctx->reader) {
        ctx->request->connection->read->handler = ctx->reader;
        ctx->reader = NULL;
    }
}

/* ---- beginning ---- */

/* NGX_OK: nothing of this connection waits in nginx any more. */
static ngx_int_t ngx_http_shunt_flush_header(ngx_http_request_t *r,
                                             ngx_http_output_body_filter_pt output)
{
    ngx_int_t rc;
    ngx_buf_t *b;
    ngx_chain_t out;
    ngx_connection_t *c = r->connection;

    /* neither Nagle nor a cork of an earlier response may keep the header's last segment */
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

/*
 * What the kernel knows of a handoff, or NULL. Its completion may be handled on the way. An agent
 * that came back has given this worker another ring, and the old one's number to somebody.
 */
static const struct shunt_state *ngx_http_shunt_state(ngx_http_shunt_ctx_t *ctx)
{
    ngx_http_shunt_ring_t *ring = ngx_http_shunt_agent_ring();

    if (ring == NULL) {
        ring = ctx->ring;
    }

    if (ngx_http_shunt_kernel_state(ctx->request->connection->fd,
                                    ngx_http_shunt_ring_index(ring)) == -1) {
        return NULL;
    }

    return ngx_http_shunt_ring_answer(ring, ctx->id);
}

/* What the peer that is to send so many bytes has to know, as the kernel noted it when the region
 * began or moved. */
ngx_int_t ngx_http_shunt_describe(ngx_http_shunt_ctx_t *ctx, uint64_t length,
                                  struct shunt_handoff *msg)
{
    const struct shunt_state *state;

    state = ngx_http_shunt_ring_answer(ctx->ring, ctx->id);
    if (state == NULL) {
        state = ngx_http_shunt_state(ctx);
    }

    if (state == NULL) {
        return NGX_ERROR;
    }

    ngx_memzero(msg, sizeof(*msg));
    msg->header.kind = SHUNT_MSG_HANDOFF;
    msg->header.size = sizeof(*msg);
    msg->peer = ctx->peer.index;
    msg->epoch = ctx->peer.epoch;
    msg->handoff = ctx->id;
    msg->offer = ctx->payload.number;
    msg->length = length;
    msg->rate = ctx->request->limit_rate; /* the write filter has evaluated it, for the header */
    ngx_memcpy(msg->tag, ctx->payload.tag, 16);
    ngx_http_shunt_trace(ctx->request, msg->trace);
    ngx_memcpy(msg->client_address, state->client_address, 16);
    ngx_memcpy(msg->server_address, state->server_address, 16);
    msg->client_port = state->client_port;
    msg->server_port = state->server_port;
    msg->start = state->start;
    msg->rcv_nxt = state->rcv_nxt;
    msg->tsval = state->tsval;
    msg->ts_recent = state->ts_recent;
    msg->snd_wnd = state->snd_wnd;
    msg->snd_cwnd = state->snd_cwnd;
    msg->snd_ssthresh = state->snd_ssthresh;
    msg->srtt_us = state->srtt_us;
    msg->ack_spacing = state->ack_spacing;
    msg->ahead = state->ahead;
    msg->mss = state->mss;
    msg->snd_wscale = state->snd_wscale;
    msg->rcv_wscale = state->rcv_wscale;
    msg->options = state->options;
    if (ctx->etag.len && ngx_http_shunt_proof_needed(ctx)) {
        msg->options |= SHUNT_OPTION_DIGEST;
    }
    msg->first = state->regions == 1;

    return NGX_OK;
}

/* 0: the region has begun, else the counter of why not. `keys` are those of its records. */
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

    if (ctx->id == 0 || ngx_http_shunt_kernel_begin(c->fd, &begin) == -1) {
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

static void ngx_http_shunt_watch_progress(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx)
{
    ngx_http_core_loc_conf_t *clcf = ngx_http_get_module_loc_conf(r, ngx_http_core_module);

    ctx->progress_at = ngx_current_msec;
    ctx->progress.data = ctx;
    ctx->progress.handler = ngx_http_shunt_progress_handler;
    ctx->progress.log = r->connection->log;

    /* a quarter, so that the connection's own send_timeout, extended here, never comes first */
    ngx_add_timer(&ctx->progress, clcf->send_timeout / 4 + 1);
}

static void ngx_http_shunt_watch_handler(ngx_event_t *ev)
{
    ngx_http_shunt_ctx_t *ctx = ev->data;

    if (ctx->mode == SHUNT_MODE_ACTIVE) {
        ngx_http_shunt_ssl_watch(ctx->request);
    }
}

/* Tells the agent. NGX_ERROR: the region has begun, and nobody will send it. */
static ngx_int_t ngx_http_shunt_claim(ngx_http_shunt_ctx_t *ctx, const struct shunt_tls *keys)
{
    ngx_int_t rc;
    struct shunt_handoff msg;

    if (ngx_http_shunt_ssl_freeze(ctx, keys) != NGX_OK ||
        ngx_http_shunt_describe(ctx, ctx->payload.length, &msg) != NGX_OK) {
        return NGX_ERROR;
    }

    msg.tls = *keys;
    rc = ngx_http_shunt_agent_post(&msg, sizeof(msg));
    ngx_http_shunt_ssl_forget(&msg.tls);

    return rc;
}

/*
 * Whether the next response on this connection will not be handed off either. The client's window,
 * and proof of its packets, may be there for it, and another backend may serve its IP version.
 */
static ngx_uint_t ngx_http_shunt_is_of_connection(ngx_http_shunt_ctx_t *ctx, ngx_uint_t reason)
{
    const struct shunt_board *board = ngx_http_shunt_board();

    if (reason == SHUNT_COUNT_fetched_unsent || reason == SHUNT_COUNT_fetched_unproven) {
        return 0;
    }

    return board &&
           ngx_http_shunt_family_served(ctx->request->connection,
                                        __atomic_load_n(&board->peer[ctx->peer.index].families,
                                                        __ATOMIC_RELAXED));
}

/* The late body filter has the end of the response, and the payload before it is the backend's. */
ngx_int_t ngx_http_shunt_handoff_begin(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx,
                                       ngx_http_output_body_filter_pt output)
{
    ngx_int_t rc;
    ngx_uint_t reason;
    struct shunt_tls keys;

    ngx_memzero(&keys, sizeof(keys));
    ctx->output = output;
    rc = ngx_http_shunt_flush_header(r, output);

    if (rc == NGX_ERROR) {
        return NGX_ERROR;
    }

    reason = rc == NGX_OK ? ngx_http_shunt_begin_region(r, ctx, &keys) : SHUNT_COUNT_fetched_unsent;

    /* a client that has gone since: there is nobody to fetch the payload for */
    if (reason && ngx_http_shunt_kernel_error(r->connection->fd)) {
        r->connection->error = 1;
        return NGX_ERROR;
    }

    if (reason) {
        ngx_http_shunt_ssl_forget(&keys);
        ngx_http_shunt_outcome(r, reason);

        if (!ngx_http_shunt_agent_ready()) {
            rc = ngx_http_shunt_rest_instead(ctx);

            if (rc != NGX_DECLINED) {
                return rc == NGX_OK ? NGX_AGAIN : rc;
            }
        }

        if (ngx_http_shunt_is_of_connection(ctx, reason)) {
            ngx_http_shunt_vain_note(r, 1);
        }

        ctx->mode = SHUNT_MODE_FETCH_LATE;
        return ngx_http_shunt_fetch_begin(ctx, output);
    }

    ngx_http_shunt_outcome(r, SHUNT_COUNT_shortcuts);
    ngx_http_shunt_vain_end(r);
    ngx_http_shunt_watch_progress(r, ctx);
    ngx_http_shunt_pulse_watch();
    ngx_http_shunt_watch_reading(r, ctx);
    r->buffered |= NGX_HTTP_SHUNT_BUFFERED;

    rc = ngx_http_shunt_claim(ctx, &keys);
    ngx_http_shunt_ssl_forget(&keys);

    if (rc != NGX_OK) {
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

/* ---- ending ---- */

/* `acked` bytes of the payload */
void ngx_http_shunt_count_acked(ngx_http_shunt_ctx_t *ctx, uint64_t acked)
{
    ctx->bytes = acked;
    ctx->request->connection->sent += acked; /* $bytes_sent and $body_bytes_sent */
    ngx_http_shunt_count(SHUNT_COUNT_shortcut_bytes, acked);
}

static void ngx_http_shunt_complete(ngx_http_shunt_ctx_t *ctx)
{
    ngx_http_request_t *r = ctx->request;

    if (ngx_http_shunt_ssl_take_back(r) != NGX_OK) {
        ngx_http_shunt_fail(ctx);
        return;
    }

    ngx_log_error(NGX_LOG_INFO, r->connection->log, 0,
                  "shunt: handoff complete, %uL payload bytes, offer %016xL of \"%V\"%V",
                  ctx->payload.length, ctx->payload.number, &ctx->payload.backend,
                  ngx_http_shunt_trace_text(r));

    ngx_http_shunt_count_acked(ctx, ctx->payload.length);
    ngx_http_shunt_count_handoff(ctx->peer.index, -1);
    ngx_http_shunt_pending_remove(ctx->id);
    ctx->id = 0;
    ctx->mode = SHUNT_MODE_COMPLETE;
    ngx_http_shunt_recovery_end(ctx);

    if (ctx->progress.timer_set) {
        ngx_del_timer(&ctx->progress);
    }

    /* ngx_http_writer() finds nothing buffered any more and finishes the request. The last buf,
       which the late filter took, has no bytes and nobody after it. */
    r->buffered &= ~NGX_HTTP_SHUNT_BUFFERED;
    ngx_post_event(r->connection->write, &ngx_posted_events);
}

/* 1: the client has acknowledged more since the last call. Completes what is complete, also where
 * the event of that had no room in the ring. */
ngx_uint_t ngx_http_shunt_follow(ngx_http_shunt_ctx_t *ctx)
{
    const struct shunt_state *state;

    state = ngx_http_shunt_state(ctx);

    if (state == NULL || ctx->mode != SHUNT_MODE_ACTIVE) {
        return 0;
    }

    if (state->status == SHUNT_REGION_COMPLETE) {
        ngx_http_shunt_complete(ctx);
        return 0;
    }

    if (state->acked == ctx->acked) {
        return 0;
    }

    ctx->acked = state->acked;
    ctx->progress_at = ngx_current_msec;

    return 1;
}

void ngx_http_shunt_handoff_event(ngx_http_shunt_ctx_t *ctx, const struct shunt_event *event)
{
    if (ctx->mode != SHUNT_MODE_ACTIVE) {
        return;
    }

    if (event->kind == SHUNT_EVENT_COMPLETE) {
        ngx_http_shunt_complete(ctx);
        return;
    }

    ngx_log_error(NGX_LOG_INFO, ctx->request->connection->log, 0,
                  "shunt: client reset the connection after %uL of %uL payload bytes%V",
                  ngx_http_shunt_ssl_payload_bytes(ctx, event->acked), ctx->payload.length,
                  ngx_http_shunt_trace_text(ctx->request));

    ctx->why = SHUNT_COUNT_aborted_reset;
    ngx_http_shunt_fail(ctx);
}

/* As agents' logs say it (crates/wire/src/local.rs). */
static const char *ngx_http_shunt_reason_text(ngx_uint_t reason)
{
    static const char *const texts[] = {
        [SHUNT_REASON_UNKNOWN_OFFER] = "no such offer (never made, or already used)",
        [SHUNT_REASON_EXPIRED] = "the offer expired",
        [SHUNT_REASON_TAG] = "wrong tag",
        [SHUNT_REASON_LENGTH] = "another length than the offer's",
        [SHUNT_REASON_FILE_CHANGED] = "the file changed after its header was made",
        [SHUNT_REASON_SOCKET] = "a system call of the sender failed",
        [SHUNT_REASON_PEER_LOST] = "the peer's agent is not connected",
        [SHUNT_REASON_NO_PROGRESS] = "the client acknowledged nothing for too long",
        [SHUNT_REASON_LIMIT] = "a limit of the agent is reached",
        [SHUNT_REASON_MALFORMED] = "malformed message",
        [SHUNT_REASON_VERSION] = "another protocol version",
        [SHUNT_REASON_ABORTED] = "given up by the frontend",
        [SHUNT_REASON_BUSY] = "the backend already sends on that flow",
        [SHUNT_REASON_CLIENT_GONE] = "the client reset the connection",
        [SHUNT_REASON_NOT_ALLOWED] = "not allowed by the agent's configuration",
    };
    const char *text = reason < sizeof(texts) / sizeof(texts[0]) ? texts[reason] : NULL;

    return text ? text : "for a reason of another version";
}

/* The agent, or the loss of it, has ended a handoff or a fetch. */
void ngx_http_shunt_ended(ngx_http_shunt_ctx_t *ctx, ngx_uint_t reason)
{
    ngx_uint_t level;
    ngx_connection_t *c = ctx->request->connection;

    if (ctx->mode == SHUNT_MODE_ACTIVE) {
        (void) ngx_http_shunt_follow(ctx); /* the kernel's event may cross the agent's message */
    }

    ctx->why = SHUNT_COUNT_aborted_agent;

    if (ctx->mode == SHUNT_MODE_ACTIVE && !ctx->failure.posted &&
        ngx_http_shunt_refetch(ctx, reason) == NGX_OK) {
        return;
    }

    if (ctx->mode == SHUNT_MODE_ACTIVE && !ctx->failure.posted &&
        ngx_http_shunt_recover(ctx, reason) == NGX_OK) {
        ngx_log_error(NGX_LOG_WARN, c->log, 0,
                      "shunt: handoff ended, %s, after byte %uL of %uL of \"%V\"%V",
                      ngx_http_shunt_reason_text(reason),
                      ngx_http_shunt_ssl_payload_bytes(ctx, ctx->acked), ctx->payload.length,
                      &ctx->payload.backend, ngx_http_shunt_trace_text(ctx->request));
        return;
    }

    if (ctx->mode == SHUNT_MODE_ACTIVE) {
        level = reason == SHUNT_REASON_CLIENT_GONE ? NGX_LOG_INFO : NGX_LOG_ERR;
        ngx_log_error(level, c->log, 0, "shunt: handoff ended, %s, offer %016xL of \"%V\"%V",
                      ngx_http_shunt_reason_text(reason), ctx->payload.number,
                      &ctx->payload.backend, ngx_http_shunt_trace_text(ctx->request));
        ngx_http_shunt_fail(ctx);
        return;
    }

    if (ctx->mode == SHUNT_MODE_FETCH_EARLY || ctx->mode == SHUNT_MODE_FETCH_LATE) {
        ngx_log_error(NGX_LOG_ERR, c->log, 0, "shunt: fetch failed, %s, offer %016xL of \"%V\"%V",
                      ngx_http_shunt_reason_text(reason), ctx->payload.number,
                      &ctx->payload.backend, ngx_http_shunt_trace_text(ctx->request));
        ngx_http_shunt_count(SHUNT_COUNT_fetch_failed, 1);
        ngx_http_shunt_fail(ctx);
    }
}

static void ngx_http_shunt_progress_handler(ngx_event_t *ev)
{
    ngx_http_shunt_ctx_t *ctx = ev->data;
    ngx_http_request_t *r = ctx->request;
    ngx_connection_t *c = r->connection;
    ngx_http_core_loc_conf_t *clcf = ngx_http_get_module_loc_conf(r, ngx_http_core_module);

    (void) ngx_http_shunt_follow(ctx);

    if (ctx->mode != SHUNT_MODE_ACTIVE) {
        return;
    }

    if (ngx_current_msec - ctx->progress_at >= clcf->send_timeout) {
        ngx_log_error(NGX_LOG_INFO, c->log, NGX_ETIMEDOUT, "client timed out%V",
                      ngx_http_shunt_trace_text(r));
        c->timedout = 1;
        ctx->why = SHUNT_COUNT_aborted_timeout;
        ngx_http_shunt_fail(ctx);
        return;
    }

    if (!c->write->delayed) {
        ngx_add_timer(c->write, clcf->send_timeout);
    }

    ngx_add_timer(&ctx->progress, clcf->send_timeout / 4 + 1);
}

static void ngx_http_shunt_give_up_active(ngx_http_shunt_ctx_t *ctx)
{
    ngx_connection_t *c = ctx->request->connection;
    const struct shunt_state *state;
    struct shunt_abort msg = {{SHUNT_MSG_ABORT, sizeof(struct shunt_abort)}, ctx->id};

    ctx->mode = SHUNT_MODE_DONE; /* its completion, if it comes now, comes too late */
    ngx_http_shunt_count_handoff(ctx->peer.index, -1);

    state = ngx_http_shunt_state(ctx);
    if (state) {
        ngx_http_shunt_count_acked(ctx, ngx_http_shunt_ssl_payload_bytes(ctx, state->acked));
    }

    ngx_http_shunt_count(SHUNT_COUNT_aborted, 1);
    ngx_http_shunt_count(ctx->why ? ctx->why : SHUNT_COUNT_aborted_closed, 1);

    (void) ngx_http_shunt_kernel_cancel(c->fd);
    (void) ngx_http_shunt_kernel_give_up_soon(c->fd);
    ngx_http_shunt_ssl_give_up(c);
    (void) ngx_http_shunt_agent_post(&msg, sizeof(msg));
}

/* Whatever state the request is in, nothing refers to it afterwards. May be called again. */
void ngx_http_shunt_release(ngx_http_shunt_ctx_t *ctx)
{
    struct shunt_abort msg = {{SHUNT_MSG_ABORT, sizeof(struct shunt_abort)}, ctx->id};

    ngx_http_shunt_leave_reading(ctx);
    ngx_http_shunt_recovery_end(ctx);
    ctx->rest = NULL; /* its subrequest finds that nobody wants it */

    if (ctx->failure.posted) {
        ngx_delete_posted_event(&ctx->failure);
    }

    if (ctx->watch.posted) {
        ngx_delete_posted_event(&ctx->watch);
    }

    if (ctx->progress.timer_set) {
        ngx_del_timer(&ctx->progress);
    }

    if (ctx->mode == SHUNT_MODE_ACTIVE) {
        ngx_http_shunt_give_up_active(ctx);

    } else if (ctx->id) {
        (void) ngx_http_shunt_agent_post(&msg, sizeof(msg)); /* a fetch */
    }

    ngx_http_shunt_fetch_close(ctx);
    ngx_http_shunt_pending_remove(ctx->id);
    ctx->id = 0;

    if (ctx->ring) {
        ngx_http_shunt_ring_release(ctx->ring);
        ctx->ring = NULL;
    }

    ctx->request->buffered &= ~NGX_HTTP_SHUNT_BUFFERED;
}

/* Callable from anywhere, filters included: the end itself comes when the event loop is back. */
void ngx_http_shunt_fail(ngx_http_shunt_ctx_t *ctx)
{
    ctx->failure.data = ctx;
    ctx->failure.handler = ngx_http_shunt_failure_handler;
    ctx->failure.log = ctx->request->connection->log;

    if (!ctx->failure.posted) {
        ngx_post_event(&ctx->failure, &ngx_posted_events);
    }
}

/* Whether a client can tell from what it has that the rest of the body is missing. */
static ngx_uint_t ngx_http_shunt_end_is_told(ngx_http_request_t *r)
{
    return r->chunked || r->headers_out.content_length_n >= 0;
}

static void ngx_http_shunt_failure_handler(ngx_event_t *ev)
{
    ngx_http_shunt_ctx_t *ctx = ev->data;
    ngx_http_request_t *r = ctx->request;
    ngx_connection_t *c = r->connection;

    ngx_uint_t active = ctx->mode == SHUNT_MODE_ACTIVE;

    ngx_http_set_log_request(c->log, r);
    ngx_http_shunt_release(ctx);

    if (!r->header_sent && !c->error) {
        ngx_http_shunt_start_over(r, ctx);

    } else {
        /* A FIN is repeated until it is acknowledged, a reset that is lost is not. */
        if (!active && !ngx_http_shunt_end_is_told(r)) {
            (void) ngx_http_shunt_kernel_reset_on_close(c->fd);
        }

        ngx_http_finalize_request(r, c->timedout ? NGX_HTTP_REQUEST_TIME_OUT : NGX_ERROR);
    }

    ngx_http_run_posted_requests(c);
}
