/* SPDX-License-Identifier: MIT */
/*
 * A handoff of a client's connection for one payload, after its beginning (begin.c). This nginx
 * writes nothing to the connection until the handoff ends. The request stays open, as if its body
 * waited in a full socket buffer, until the kernel reports that the client has acknowledged
 * everything. If a handoff ends otherwise, another backend may continue it (recovery.c), or this
 * nginx fetches or relays the rest (taking.c, rest.c). If neither is possible, the handoff ends in
 * a reset: a client must never take a part of a body for the whole. In a handoff, a backend sends a
 * payload, the body of a response, on the client's own connection. A region is the range of the
 * client connection's sequence numbers that a payload takes. A ring is a BPF ring buffer by which
 * the kernel tells this worker what becomes of its handoffs.
 */
#include "ngx_http_shunt.h"
#include "ngx_http_shunt_kernel.h"

static void ngx_http_shunt_progress_handler(ngx_event_t *ev);
static void ngx_http_shunt_failure_handler(ngx_event_t *ev);

/* ---- reading from the client meanwhile ---- */

/*
 * Replaces nginx's read handler while a payload is in progress. A client that has everything may
 * close at once, and its FIN then carries its last acknowledgement. The kernel has noted the
 * acknowledgement by now. This handler asks the kernel for it before nginx sees the FIN, whether
 * the kernel's event of completion comes before or after the FIN. After completion, a FIN is no
 * reason to give up the request. A connection that nginx wants to close (worker_shutdown_timeout)
 * goes to nginx's handler.
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

        if (ctx->deaf || ctx->claimed) {
            ngx_http_block_reading(r);
            return;
        }
    }

    reader(rev);
}

/*
 * Installs the handler above. While nginx reads from an upstream, proxy_ignore_client_abort and its
 * equivalents make nginx continue to send to a client that has closed its half of the connection.
 * An upstream that answers with an offer is done at once. Then nginx would react to a FIN as soon
 * as the filters have returned, even to a FIN that is reported together with the answer. So with
 * these directives, ctx->deaf makes the handler ignore a FIN.
 */
void ngx_http_shunt_watch_reading(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx)
{
    ngx_event_t *rev = r->connection->read;

    ctx->reader = rev->handler;
    rev->handler = ngx_http_shunt_reading_handler;

    /* not on TLS, where ngx_http_shunt_ssl_watch() reads from the client */
    ctx->deaf = ctx->content_bytes == 0 && !r->discard_body && r->upstream &&
                r->upstream->conf->ignore_client_abort;
}

/* Restores nginx's read handler. An event that came meanwhile has left the flag `ready` set, so
 * nginx's next read tries the socket at once. */
void ngx_http_shunt_leave_reading(ngx_http_shunt_ctx_t *ctx)
{
    if (ctx->reader) {
        ctx->request->connection->read->handler = ctx->reader;
        ctx->reader = NULL;
    }
}

/* ---- in progress ---- */

/* Returns the kernel's state of a handoff, or NULL. May handle the handoff's completion, if its
 * event is in the ring. */
const struct shunt_state *ngx_http_shunt_state(ngx_http_shunt_ctx_t *ctx)
{
    ngx_http_shunt_ring_t *ring = ngx_http_shunt_newest_ring();

    if (ngx_http_shunt_ring_ask(ring) != NGX_OK ||
        ngx_http_shunt_kernel_state(ctx->request->connection->fd,
                                    ngx_http_shunt_ring_index(ring)) == -1) {
        return NULL;
    }

    return ngx_http_shunt_ring_answer(ring, ctx->id);
}

/* Starts to watch a handoff's progress. */
void ngx_http_shunt_watch_progress(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx)
{
    ngx_http_core_loc_conf_t *clcf = ngx_http_get_module_loc_conf(r, ngx_http_core_module);

    ctx->progress_at = ngx_current_msec;
    ctx->progress.data = ctx;
    ctx->progress.handler = ngx_http_shunt_progress_handler;
    ctx->progress.log = r->connection->log;

    /* A quarter of send_timeout: the handler then extends the connection's own timer before that
     * timer fires. */
    ngx_add_timer(&ctx->progress, clcf->send_timeout / 4 + 1);
}

/* ---- ending ---- */

/* Counts `acked` payload bytes as sent. */
void ngx_http_shunt_count_acked(ngx_http_shunt_ctx_t *ctx, uint64_t acked)
{
    ctx->bytes = acked;
    ctx->request->connection->sent += acked; /* for $bytes_sent and $body_bytes_sent */
    ngx_http_shunt_count(SHUNT_COUNT_shortcut_bytes, acked);
}

void ngx_http_shunt_complete(ngx_http_shunt_ctx_t *ctx)
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

    ngx_http_shunt_vain_end(r);
    ngx_http_shunt_count_acked(ctx, ctx->payload.length);
    ngx_http_shunt_count_handoff(ctx->peer.index, -1);
    ngx_http_shunt_pending_remove(ctx->id);
    ctx->id = 0;
    ctx->mode = SHUNT_MODE_COMPLETE;
    ngx_http_shunt_probe_end(ctx);
    ngx_http_shunt_recovery_drop(ctx);
    ngx_http_shunt_rest_drop(ctx);

    if (ctx->progress.timer_set) {
        ngx_del_timer(&ctx->progress);
    }

    /* Lets ngx_http_writer() find nothing buffered any more, and finish the request. The late
     * filter has not passed on the response's last buf. That does no harm: it has no bytes, and no
     * buf follows it. */
    r->buffered &= ~NGX_HTTP_SHUNT_BUFFERED;
    ngx_post_event(r->connection->write, &ngx_posted_events);
}

/* Asks the kernel for a handoff's progress. Returns 1 if what the client acknowledges has changed
 * since the last call. Completes the handoff if its region is complete, even if the event of the
 * completion found no room in the ring. */
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

    ctx->claimed = state->acked == ctx->region;
    ctx->answered = state->answered;
    ctx->shut = state->shut;

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

/* Text of a reason, as in the agents' logs (crates/wire/src/reason.rs). */
const char *ngx_http_shunt_reason_text(ngx_uint_t reason)
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
        [SHUNT_REASON_UNREACHABLE] = "the backend's payload does not reach that client",
    };
    const char *text = reason < sizeof(texts) / sizeof(texts[0]) ? texts[reason] : NULL;

    return text ? text : "for a reason of another version";
}

/* Called when an agent has ended a handoff or a fetch, or is lost. If the client is then asked what
 * it has (probe.c), called once more after that, unless the payload is complete by then or that
 * question had been asked before. */
void ngx_http_shunt_ended(ngx_http_shunt_ctx_t *ctx, ngx_uint_t reason)
{
    ngx_uint_t level;
    ngx_connection_t *c = ctx->request->connection;

    if (ctx->mode == SHUNT_MODE_ACTIVE) {
        (void) ngx_http_shunt_follow(ctx); /* the payload may be complete by now */
    }

    /* the agent repeats its message of a loss; the rest has been asked for already */
    if (ctx->mode == SHUNT_MODE_ACTIVE && ngx_http_shunt_is_loss(reason) &&
        ngx_http_shunt_rest_is_on(ctx)) {
        return;
    }

    ctx->why = SHUNT_COUNT_aborted_agent;

    if (ctx->mode == SHUNT_MODE_ACTIVE && !ctx->failure.posted && ngx_http_shunt_is_loss(reason) &&
        ngx_http_shunt_probe(ctx, reason) == NGX_AGAIN) {
        return;
    }

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
        ngx_http_shunt_fetch_failed(ctx, ngx_http_shunt_reason_text(reason));
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

    ctx->mode = SHUNT_MODE_DONE; /* a completion that comes from now on comes too late */
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

/* Gives up a request's handoff or fetch, and releases timers, events and other things that refer to
 * the request, whatever the request's state is. May be called more than once. */
void ngx_http_shunt_release(ngx_http_shunt_ctx_t *ctx)
{
    ngx_connection_t *c = ctx->request->connection;

    ngx_http_shunt_leave_reading(ctx);
    ngx_http_shunt_probe_end(ctx);
    ngx_http_shunt_recovery_end(ctx);
    ngx_http_shunt_rest_forget(ctx);

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
        ngx_http_shunt_pending_remove(ctx->id);
        ctx->id = 0;

    } else if (ctx->mode == SHUNT_MODE_FETCH_LATE || ctx->mode == SHUNT_MODE_REST) {
        /* the header promises more bytes than will come */
        (void) ngx_http_shunt_kernel_reset_on_close(c->fd);
        ngx_http_shunt_ssl_give_up(c);
    }

    ngx_http_shunt_fetch_close(ctx);

    if (ctx->ring) {
        ngx_http_shunt_ring_release(ctx->ring);
        ctx->ring = NULL;
    }

    ctx->request->buffered &= ~NGX_HTTP_SHUNT_BUFFERED;
}

/* Has the request fail. Callable from anywhere, filters included, because a posted event handles
 * the failure. */
void ngx_http_shunt_fail(ngx_http_shunt_ctx_t *ctx)
{
    ctx->failure.data = ctx;
    ctx->failure.handler = ngx_http_shunt_failure_handler;
    ctx->failure.log = ctx->request->connection->log;

    if (!ctx->failure.posted) {
        ngx_post_event(&ctx->failure, &ngx_posted_events);
    }
}

/* Whether a client can tell that the rest of the body is missing: the body has a length, or is
 * chunked. */
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

    /* The payload has completed since the failure was posted. ngx_http_writer() finishes the
     * request. */
    if (ctx->mode == SHUNT_MODE_COMPLETE) {
        return;
    }

    if (ctx->relayable && !c->error) {
        ctx->relayable = 0;

        if (ngx_http_shunt_rest_instead(ctx) == NGX_OK) {
            ngx_http_run_posted_requests(c);
            return;
        }
    }

    ngx_http_shunt_release(ctx);

    if (!r->header_sent && !c->error) {
        ngx_http_shunt_start_over(r, ctx);

    } else {
        /* TCP repeats a FIN until it is acknowledged, but sends a reset only once. So a reset is
         * used only if a FIN would look like the body's end. */
        if (!active && !ngx_http_shunt_end_is_told(r)) {
            (void) ngx_http_shunt_kernel_reset_on_close(c->fd);
        }

        ngx_http_finalize_request(r, c->timedout ? NGX_HTTP_REQUEST_TIME_OUT : NGX_ERROR);
    }

    ngx_http_run_posted_requests(c);
}
