/* SPDX-License-Identifier: MIT */
/*
 * Detects a payload that makes no progress, though all agents run and the client is there.
 * Something between backend and client drops their packets: a firewall closes the ports that ACKs
 * go to, or a router no longer accepts this server's address from the backend's network. To the
 * backend the client seems to be gone, but here it is heard. A client that has had room for a while
 * and has got nothing is asked (probe.c). Where it answers, the rest is asked for (rest.c). The
 * handoff may continue until that comes. So a false alarm, or a server without range requests,
 * costs one request and nothing else.
 *
 * A client that does not answer is away, and its backend waits for it as a server does. It is asked
 * less and less often, and only a few times. Each unanswered probe brings the kernel nearer to
 * ending the connection (tcp_keepalive_timer).
 *
 * A relayed rest needs a strong ETag and a connection without TLS: other responses wait for
 * send_timeout. So does one whose client claims to have all, for that may be a lie
 * (SHUNT_OPTION_WORD).
 */
#include "ngx_http_shunt.h"

/* ms without progress before the client is asked; doubled for each further question. A sender
 * repeats the first segment of a new connection after 3 s. */
#define NGX_HTTP_SHUNT_STALL_LONG  5000
#define NGX_HTTP_SHUNT_STALL_TIMES 4 /* questions for one response */

ngx_uint_t ngx_http_shunt_is_stalled(const ngx_http_shunt_ctx_t *ctx)
{
    return ctx->mode == SHUNT_MODE_ACTIVE && !ctx->failure.posted && !ctx->claimed && !ctx->shut &&
           !ngx_http_shunt_recovery_is_on(ctx) &&
           ngx_current_msec - ctx->progress_at >= NGX_HTTP_SHUNT_STALL_LONG;
}

/* Called once in a while, when all agents are running. Asks the client if the payload is
 * stalled. */
void ngx_http_shunt_stall_look(ngx_http_shunt_ctx_t *ctx)
{
    ngx_msec_t since = ngx_current_msec - ngx_max(ctx->progress_at, ctx->stall.looked_at);

    if (ctx->mode != SHUNT_MODE_ACTIVE || ctx->failure.posted ||
        since < (ngx_msec_t) NGX_HTTP_SHUNT_STALL_LONG << ctx->stall.times ||
        ctx->stall.times == NGX_HTTP_SHUNT_STALL_TIMES || ctx->probe.event.timer_set ||
        ctx->etag.len == 0 || ngx_http_shunt_proof_needed(ctx)) {
        return;
    }

    ctx->stall.looked_at = ngx_current_msec;
    (void) ngx_http_shunt_follow(ctx); /* may complete it */

    if (ngx_http_shunt_is_stalled(ctx)) {
        ctx->stall.times++;
        ngx_http_shunt_probe_stalled(ctx);
    }
}

/* Called when the client has answered: asks for the rest if the payload is still stalled. */
void ngx_http_shunt_stall_answered(ngx_http_shunt_ctx_t *ctx)
{
    if (ngx_http_shunt_is_stalled(ctx)) {
        ngx_http_shunt_rest_stalled(ctx);
    }
}

/* Called where the rest cannot be had: asks no more. */
void ngx_http_shunt_stall_end(ngx_http_shunt_ctx_t *ctx)
{
    ctx->stall.times = NGX_HTTP_SHUNT_STALL_TIMES;
}
