/* SPDX-License-Identifier: MIT */
/*
 * Detects a payload that makes no progress, though all agents run and the client is there. A
 * payload is a body that a backend sends on the client's own connection, by a handoff. Something
 * between backend and client drops their packets: a firewall closes the ports that ACKs go to, or a
 * router no longer accepts this server's address from the backend's network. To the backend the
 * client seems to be gone, but this server still gets the client's packets. A client that has had
 * room for a while and has got nothing is asked (probe.c). If it answers, the rest of the payload
 * is asked for (rest.c). The handoff may continue until the rest comes. So a false alarm, or a
 * server without range requests, costs one request and nothing else.
 *
 * A client that does not answer is away, and the backend waits for it as any server would. This
 * file asks such a client less and less often, and only a few times, because each unanswered probe
 * brings the kernel nearer to ending the connection (tcp_keepalive_timer).
 *
 * A relayed rest needs a strong ETag, a connection without TLS, and "shunt_recover etag". Other
 * responses wait for send_timeout, and so does a response whose client claims to
 * have all of it, because the client may lie (SHUNT_OPTION_WORD).
 */
#include "ngx_http_shunt.h"

/* ms without progress before the client is asked; doubled for each further question. Longer than
 * the 3 s after which a sender repeats the first segment of a new connection. */
#define NGX_HTTP_SHUNT_STALL_LONG  5000
#define NGX_HTTP_SHUNT_STALL_TIMES 4 /* most questions to the client for one response */

ngx_uint_t ngx_http_shunt_is_stalled(const ngx_http_shunt_ctx_t *ctx)
{
    return ctx->mode == SHUNT_MODE_ACTIVE && !ctx->failure.posted && !ctx->claimed && !ctx->shut &&
           !ngx_http_shunt_recovery_is_on(ctx) &&
           ngx_current_msec - ctx->progress_at >= NGX_HTTP_SHUNT_STALL_LONG;
}

/* Asks the client, if the payload is stalled. Called a few times a second while the handoff is
 * pending and this machine's agent is running. */
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
    (void) ngx_http_shunt_follow(ctx); /* may complete the handoff */

    if (ngx_http_shunt_is_stalled(ctx)) {
        ctx->stall.times++;
        ngx_http_shunt_probe_stalled(ctx);
    }
}

/* Asks for the rest, if the payload is still stalled. Called when the client has answered. */
void ngx_http_shunt_stall_answered(ngx_http_shunt_ctx_t *ctx)
{
    if (ngx_http_shunt_is_stalled(ctx)) {
        ngx_http_shunt_rest_stalled(ctx);
    }
}

/* Ends the questions to the client. Called when a server has given another answer than the rest. */
void ngx_http_shunt_stall_end(ngx_http_shunt_ctx_t *ctx)
{
    ctx->stall.times = NGX_HTTP_SHUNT_STALL_TIMES;
}
