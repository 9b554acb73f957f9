/* SPDX-License-Identifier: MIT */
/*
 * A payload that comes no further, though all agents are at work and its client is there: on the
 * way between backend and client something has begun to drop what they send. A firewall closes the
 * ports that ACKs go to, a router does not take this server's address from there any more, or says
 * of no segment that it is too long. To the backend the client looks as if it were gone. Here it is
 * heard: once it has had room for a while and has got nothing, it is asked (probe.c), and where it
 * answers, the rest is relayed (rest.c).
 *
 * That needs what any relayed rest needs, so that on TLS, and without a strong ETag, such a
 * response waits for send_timeout. So does one whose client claims to have all, for that may be a
 * lie (SHUNT_OPTION_WORD).
 */
#include "ngx_http_shunt.h"

#define NGX_HTTP_SHUNT_STALL_LOOK 1000 /* ms between two looks */
/* More than a sender waits before it repeats a segment of a new connection */
#define NGX_HTTP_SHUNT_STALL_LONG 3500 /* ms */
#define NGX_HTTP_SHUNT_STALL_WAIT 1000 /* ms for the client's answer */

static ngx_uint_t ngx_http_shunt_is_stalled(ngx_http_shunt_ctx_t *ctx)
{
    return ctx->mode == SHUNT_MODE_ACTIVE && !ctx->failure.posted && !ctx->claimed && !ctx->shut &&
           !ngx_http_shunt_recovery_is_on(ctx) &&
           ngx_current_msec - ctx->room_at >= NGX_HTTP_SHUNT_STALL_LONG;
}

/* Once in a while, while all agents are at work. */
void ngx_http_shunt_stall_look(ngx_http_shunt_ctx_t *ctx)
{
    if (ctx->mode != SHUNT_MODE_ACTIVE || ctx->failure.posted || ctx->probe.event.timer_set ||
        ngx_current_msec - ctx->looked_at < NGX_HTTP_SHUNT_STALL_LOOK || ctx->etag.len == 0 ||
        ngx_http_shunt_proof_needed(ctx)) {
        return;
    }

    ctx->looked_at = ngx_current_msec;
    (void) ngx_http_shunt_follow(ctx); /* which may complete it */

    if (ngx_http_shunt_is_stalled(ctx)) {
        ngx_http_shunt_probe_stalled(ctx, NGX_HTTP_SHUNT_STALL_WAIT);
    }
}

/* It has answered, or has had its time for that. One that is not there is asked again. */
void ngx_http_shunt_stall_asked(ngx_http_shunt_ctx_t *ctx, ngx_uint_t has_answered)
{
    ctx->looked_at = ngx_current_msec;

    if (has_answered && ngx_http_shunt_is_stalled(ctx)) {
        ngx_http_shunt_rest_stalled(ctx);
    }
}
