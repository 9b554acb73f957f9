/* SPDX-License-Identifier: MIT */
/*
 * Takes back a payload that was handed off. The kernel ends the payload's region at what the client
 * has acknowledged (SHUNT_TAKE), and this nginx writes what follows as if nothing had been handed
 * off. A backend that still sends puts the same bytes at the same sequence numbers, and the client
 * takes whichever come first. A handoff lets a backend send a payload, the body of a response, on
 * the client's own connection. A region is the range of the connection's sequence numbers that the
 * payload takes. A ring is a BPF ring buffer by which the kernel tells this worker what becomes of
 * its handoffs.
 */
#include "ngx_http_shunt.h"
#include "ngx_http_shunt_kernel.h"

static void ngx_http_shunt_say_refused(ngx_http_shunt_ctx_t *ctx, ngx_uint_t reason)
{
    static time_t said;

    if (!ngx_http_shunt_may_say(&said)) {
        return;
    }

    ngx_log_error(NGX_LOG_ERR, ctx->request->connection->log, 0,
                  "shunt: the agent of \"%V\" refused a handoff, %s; the body is fetched; see that "
                  "agent's log%V",
                  &ctx->payload.backend, ngx_http_shunt_reason_text(reason),
                  ngx_http_shunt_trace_text(ctx->request));
}

/* Tells the agent that the handoff is given up, and stops waiting for anything about it: events of
 * the kernel, timers, requests to other backends. */
static void ngx_http_shunt_forget(ngx_http_shunt_ctx_t *ctx)
{
    struct shunt_abort msg = {{SHUNT_MSG_ABORT, sizeof(struct shunt_abort)}, ctx->id};

    (void) ngx_http_shunt_agent_post(&msg, sizeof(msg));
    ngx_http_shunt_count_handoff(ctx->peer.index, -1);
    ngx_http_shunt_pending_remove(ctx->id);
    ctx->id = 0;
    ngx_http_shunt_leave_reading(ctx);
    ngx_http_shunt_probe_end(ctx);
    ngx_http_shunt_recovery_end(ctx);

    if (ctx->progress.timer_set) {
        ngx_del_timer(&ctx->progress);
    }

    ngx_http_shunt_ring_release(ctx->ring);
    ctx->ring = NULL;
}

/* Ends the region. `when`: one of SHUNT_TAKE_*. NGX_OK: the region has ended; `state`, if not NULL,
 * gets the kernel's answer, or NULL if there is none to read in the ring. NGX_DECLINED: the region
 * had ended already, or what the client has is not what `when` requires. NGX_AGAIN: the kernel's
 * answer could not be read now, so the region stays. */
ngx_int_t ngx_http_shunt_end_region(ngx_http_shunt_ctx_t *ctx, ngx_uint_t when,
                                    const struct shunt_state **state)
{
    struct shunt_take take;
    ngx_http_shunt_ring_t *ring = ngx_http_shunt_newest_ring();

    take.ring = ngx_http_shunt_ring_index(ring);
    take.when = when;
    take.handoff = ctx->id;

    /* Without an answer, nobody knows what the client has of a region that has ended. The ring may
     * be another process's by now, if its agent is gone. So a harmless question comes first. */
    if (state) {
        (void) ngx_http_shunt_state(ctx);

        if (!ngx_http_shunt_ring_answered() || ngx_http_shunt_ring_ask(ring) != NGX_OK) {
            return NGX_AGAIN;
        }
    }

    if (ngx_http_shunt_kernel_take(ctx->request->connection->fd, &take) == -1) {
        return NGX_DECLINED;
    }

    if (state) {
        *state = ngx_http_shunt_ring_answer(ring, ctx->id);

    } else {
        /* reads the kernel's answer from the ring, because the kernel wakes nobody for records
         * behind it */
        (void) ngx_http_shunt_ring_drain(ring);
    }

    return NGX_OK;
}

/* Takes back an active region, whatever the client has of it. NGX_OK: the region has ended, the
 * client has `acked` bytes of the region, and the connection is an ordinary one. NGX_DECLINED: the
 * handoff has ended meanwhile. NGX_AGAIN: the kernel could not be asked, and nothing has changed.
 * NGX_ERROR: it is not known what the client has, and the response fails. */
ngx_int_t ngx_http_shunt_take(ngx_http_shunt_ctx_t *ctx, uint64_t *acked)
{
    ngx_int_t rc;
    const struct shunt_state *state = NULL;

    rc = ngx_http_shunt_end_region(ctx, SHUNT_TAKE_ALWAYS, &state);

    if (rc == NGX_DECLINED || ctx->mode != SHUNT_MODE_ACTIVE) {
        return NGX_DECLINED;
    }

    if (rc == NGX_AGAIN) {
        return NGX_AGAIN;
    }

    if (state == NULL) {
        ngx_http_shunt_forget(ctx);
        ctx->mode = SHUNT_MODE_DONE;
        ngx_http_shunt_fail(ctx);
        return NGX_ERROR;
    }

    *acked = state->acked;
    ngx_http_shunt_count_acked(ctx, *acked);
    ngx_http_shunt_forget(ctx);

    return NGX_OK;
}

/* Takes back a region that has just begun, and of which no agent was told. NGX_OK: the connection
 * is as it was before the region. NGX_ERROR: the response has to fail, for example because the
 * client has acknowledged bytes that nobody has sent. */
ngx_int_t ngx_http_shunt_take_untold(ngx_http_shunt_ctx_t *ctx)
{
    if (ngx_http_shunt_end_region(ctx, SHUNT_TAKE_NONE, NULL) != NGX_OK) {
        return NGX_ERROR;
    }

    ngx_log_error(NGX_LOG_INFO, ctx->request->connection->log, 0,
                  "shunt: cannot tell the agent of a handoff; the body is fetched%V",
                  ngx_http_shunt_trace_text(ctx->request));
    ngx_http_shunt_forget(ctx);

    if (ngx_http_shunt_ssl_reclaim(ctx->request) != NGX_OK) {
        ctx->mode = SHUNT_MODE_DONE;
        return NGX_ERROR;
    }

    ctx->mode = SHUNT_MODE_SHORTCUT;

    return NGX_OK;
}

/*
 * Whether the offer can still be fetched after its backend's agent has ended the handoff for this
 * reason. An agent gives the first three reasons below only before it sends a byte. It gives
 * UNREACHABLE also if it has sent, but has heard no ACK of the client. Then the client may have
 * some of the payload. On TLS an agent gives UNREACHABLE only before it seals a record.
 */
static ngx_uint_t ngx_http_shunt_is_fetchable(ngx_http_shunt_ctx_t *ctx, ngx_uint_t reason)
{
    switch (reason) {

    case SHUNT_REASON_NOT_ALLOWED:
    case SHUNT_REASON_LIMIT:
    case SHUNT_REASON_BUSY:
        return ctx->acked == 0;

    case SHUNT_REASON_UNREACHABLE:
        return ctx->acked == 0 || ctx->content_bytes == 0;

    default:
        return 0;
    }
}

/* Ends a response whose client had all of the payload when the region was taken back. */
static void ngx_http_shunt_end_whole(ngx_http_shunt_ctx_t *ctx)
{
    ngx_http_request_t *r = ctx->request;

    ctx->mode = SHUNT_MODE_DONE;
    r->buffered &= ~NGX_HTTP_SHUNT_BUFFERED;

    if (ngx_http_shunt_output_last(r, ctx->output) == NGX_ERROR) {
        ngx_http_shunt_fail(ctx);
        return;
    }

    ngx_post_event(r->connection->write, &ngx_posted_events);
}

/* Fetches the payload of a handoff that has failed, if its backend still has the offer. NGX_OK: it
 * is fetched, the client has all of it, or the response fails. NGX_DECLINED: it cannot be fetched,
 * or the handoff has ended meanwhile. */
ngx_int_t ngx_http_shunt_refetch(ngx_http_shunt_ctx_t *ctx, ngx_uint_t reason)
{
    uint64_t acked;
    ngx_int_t rc;
    ngx_http_request_t *r = ctx->request;

    if (!ngx_http_shunt_is_fetchable(ctx, reason) || ctx->recovery) {
        return NGX_DECLINED;
    }

    rc = ngx_http_shunt_take(ctx, &acked);

    if (rc == NGX_AGAIN) {
        ngx_http_shunt_fail(ctx);
    }

    if (rc != NGX_OK) {
        return rc == NGX_DECLINED ? rc : NGX_OK;
    }

    /* the response fails if the client acknowledges bytes that nobody has sent, or if OpenSSL
     * cannot write records again */
    if ((acked && (reason != SHUNT_REASON_UNREACHABLE || ctx->content_bytes)) ||
        ngx_http_shunt_ssl_reclaim(r) != NGX_OK) {
        ctx->mode = SHUNT_MODE_DONE;
        ngx_http_shunt_fail(ctx);
        return NGX_OK;
    }

    if (acked == ctx->payload.length) {
        ngx_http_shunt_end_whole(ctx);
        return NGX_OK;
    }

    ngx_http_shunt_rest_drop_stalled(ctx);
    ngx_http_shunt_say_refused(ctx, reason);
    ngx_http_shunt_count(SHUNT_COUNT_shortcuts, (uint64_t) -1);
    ngx_http_shunt_outcome(r, SHUNT_COUNT_fetched_refused);
    ngx_http_shunt_vain_refused(r, reason);

    ctx->mode = SHUNT_MODE_FETCH_LATE;
    ctx->fetch.skip = acked;
    (void) ngx_http_shunt_fetch_begin(ctx, ctx->output);

    return NGX_OK;
}
