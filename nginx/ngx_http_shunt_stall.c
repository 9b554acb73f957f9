/* SPDX-License-Identifier: MIT */
/*
 * A payload that comes no further, though all agents are at work and its client is there: on the
 * way between backend and client something has begun to drop what they send. A firewall closes the
 * ports that ACKs go to, or a router does not take this server's address from there any more. To
 * the backend the client looks as if it were gone. Here it is heard: where it has had room for a
 * while and has got nothing, it is asked (probe.c), and where it answers, the rest is asked for
 * (rest.c). Until that comes the handoff may go on, so that a stall that is none, a server that
 * knows no ranges, say, costs a request and nothing else.
 *
 * A client that does not answer is away, and its backend waits for it as a server does. It is asked
 * less and less often, and not often in all: each of its kernel's probes that is not answered
 * brings the connection nearer to its end (tcp_keepalive_timer).
 *
 * A relayed rest needs a strong ETag and a connection without TLS: else such a response waits for
 * send_timeout. So does one whose client claims to have all, for that may be a lie
 * (SHUNT_OPTION_WORD).
 */
#include "ngx_http_shunt.h"

/* ms without progress, and twice as long before each further question. A sender repeats the first
 * segment of a new connection after 3 s. */
#define NGX_HTTP_SHUNT_STALL_LONG  5000
#define NGX_HTTP_SHUNT_STALL_TIMES 4 /* for one response */

ngx_uint_t ngx_http_shunt_is_stalled(const ngx_http_shunt_ctx_t *ctx)
{
    return ctx->mode == SHUNT_MODE_ACTIVE && !ctx->failure.posted && !ctx->claimed && !ctx->shut &&
           !ngx_http_shunt_recovery_is_on(ctx) &&
           ngx_current_msec - ctx->progress_at >= NGX_HTTP_SHUNT_STALL_LONG;
}

/* Called once in a while, with all agents at work. */
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
    (void) ngx_http_shunt_follow(ctx); /* which may complete it */

    if (ngx_http_shunt_is_stalled(ctx)) {
        ctx->stall.times++;
        ngx_http_shunt_probe_stalled(ctx);
    }
}

/* It has answered. */
void ngx_http_shunt_stall_answered(ngx_http_shunt_ctx_t *ctx)
{
    if (ngx_http_shunt_is_stalled(ctx)) {
        ngx_http_shunt_rest_stalled(ctx);
    }
}

/* What answered cannot be had, now or later. */
void ngx_http_shunt_stall_end(ngx_http_shunt_ctx_t *ctx)
{
    ctx->stall.times = NGX_HTTP_SHUNT_STALL_TIMES;
}
