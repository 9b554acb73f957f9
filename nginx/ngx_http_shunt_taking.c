/* SPDX-License-Identifier: MIT */
/*
 * A payload that was handed off comes through here after all. The kernel ends its region at what
 * the client has acknowledged (SHUNT_TAKE), and what follows is written as if nothing had been
 * handed off. A backend that still sends puts the same bytes at the same sequence numbers, and the
 * client takes whichever come first.
 */
#include "ngx_http_shunt.h"
#include "ngx_http_shunt_kernel.h"

/* Once a second: each is counted. */
static void ngx_http_shunt_say_refused(ngx_http_shunt_ctx_t *ctx, ngx_uint_t reason)
{
    static time_t said;

    if (said == ngx_time()) {
        return;
    }

    said = ngx_time();
    ngx_log_error(NGX_LOG_ERR, ctx->request->connection->log, 0,
                  "shunt: the agent of \"%V\" refused a handoff, reason %ui; the body is fetched. "
                  "Its log says why%V",
                  &ctx->payload.backend, reason, ngx_http_shunt_trace_text(ctx->request));
}

/* Nobody waits for this handoff any more: neither the kernel, nor a timer, nor another backend. */
static void ngx_http_shunt_forget(ngx_http_shunt_ctx_t *ctx)
{
    struct shunt_abort msg = {{SHUNT_MSG_ABORT, sizeof(struct shunt_abort)}, ctx->id};

    (void) ngx_http_shunt_agent_post(&msg, sizeof(msg));
    ngx_http_shunt_count_handoff(ctx->peer.index, -1);
    ngx_http_shunt_pending_remove(ctx->id);
    ctx->id = 0;
    ngx_http_shunt_leave_reading(ctx);
    ngx_http_shunt_recovery_end(ctx);

    if (ctx->progress.timer_set) {
        ngx_del_timer(&ctx->progress);
    }

    ngx_http_shunt_ring_release(ctx->ring);
    ctx->ring = NULL;
}

/* NGX_OK: the region is over, the client has so many bytes of the payload, and this is a connection
 * like any other. Not where its end has come meanwhile. */
ngx_int_t ngx_http_shunt_take(ngx_http_shunt_ctx_t *ctx, uint64_t *acked)
{
    struct shunt_take take;
    const struct shunt_state *state;
    ngx_http_shunt_ring_t *ring = ngx_http_shunt_agent_ring();

    if (ring == NULL) {
        ring = ctx->ring;
    }

    take.ring = ngx_http_shunt_ring_index(ring);
    take.pad = 0;
    take.handoff = ctx->id;

    if (ngx_http_shunt_kernel_take(ctx->request->connection->fd, &take) == -1) {
        return NGX_ERROR;
    }

    state = ngx_http_shunt_ring_answer(ring, ctx->id);

    if (state == NULL || ctx->mode != SHUNT_MODE_ACTIVE) {
        return NGX_ERROR;
    }

    *acked = state->acked;
    ngx_http_shunt_count_acked(ctx, *acked);
    ngx_http_shunt_forget(ctx);

    return NGX_OK;
}

/* A handoff was refused before its first byte: NGX_OK, and the payload is fetched. */
ngx_int_t ngx_http_shunt_refetch(ngx_http_shunt_ctx_t *ctx, ngx_uint_t reason)
{
    uint64_t acked;
    ngx_http_request_t *r = ctx->request;

    /* the backend's agent looks at that first, and has the offer still */
    if (reason != SHUNT_REASON_NOT_ALLOWED || ctx->acked ||
        ngx_http_shunt_take(ctx, &acked) != NGX_OK) {
        return NGX_DECLINED;
    }

    /* a client that acknowledges what nobody has sent ends with it */
    if (acked || ngx_http_shunt_ssl_reclaim(r) != NGX_OK) {
        ctx->mode = SHUNT_MODE_DONE;
        ngx_http_shunt_fail(ctx);
        return NGX_OK;
    }

    ngx_http_shunt_say_refused(ctx, reason);
    ngx_http_shunt_count(SHUNT_COUNT_shortcuts, (uint64_t) -1);
    ngx_http_shunt_outcome(r, SHUNT_COUNT_fetched_refused);
    ctx->mode = SHUNT_MODE_FETCH_LATE;
    (void) ngx_http_shunt_fetch_begin(ctx, ctx->output);

    return NGX_OK;
}
