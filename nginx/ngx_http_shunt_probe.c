/* SPDX-License-Identifier: MIT */
/*
 * Asks a client what it has of a payload. The client's newest packet tells this already, but a
 * stranger may have forged that packet, or the client may have lied. So when a payload's backend is
 * lost, the client's own TCP is asked first. Its answer decides which bytes are asked for again, at
 * which sequence number a reset is sent, and what a log says. A keepalive probe (RFC 9293, 3.8.4)
 * has a sequence number that the client has had already. Any TCP answers such a segment with the
 * number that it expects next. Without an answer, the newest packet counts. A payload is a body
 * that a backend sends on the client's own connection. A region is the range of the client
 * connection's sequence numbers that a payload takes.
 *
 * If a payload has SHUNT_OPTION_WORD and the client claims to have all of it, the payload is
 * complete only when its backend confirms that. If the backend or the agent of this machine is
 * lost, no confirmation can come, and the client's answer counts. The kernel of a lost backend's
 * machine may still send, so a client that answered that it lacks bytes may claim later to have
 * all. Such a client is asked again, before other servers are asked for bytes that nobody needs,
 * and before the connection is reset.
 */
#include "ngx_http_shunt.h"
#include "ngx_http_shunt_kernel.h"

#define NGX_HTTP_SHUNT_PROBE_LOOK         20  /* ms between two checks for the answer */
#define NGX_HTTP_SHUNT_PROBE_AGAIN        16  /* repeated questions for one response, at most */
#define NGX_HTTP_SHUNT_PROBE_LOOK_STALLED 100 /* ms, the same if a payload has stalled */

/* Longest waits for an answer, in ms. The kernel sends probes to a client that has been silent for
 * a second; the answer then takes a round trip. If a payload needs another backend, its client is
 * not kept waiting for that second: without an answer, the client's newest packet counts. A client
 * that claims to have all loses nothing by a longer wait. */
#define NGX_HTTP_SHUNT_PROBE_WAIT         300  /* another backend may have to continue */
#define NGX_HTTP_SHUNT_PROBE_WAIT_ALL     1500 /* the client claims to have all */
#define NGX_HTTP_SHUNT_PROBE_WAIT_STALLED 1000 /* the payload has stalled */

/* Completes the payload if the client claims to have all of it. NGX_DECLINED: it does not, or the
 * region has ended. */
static ngx_int_t ngx_http_shunt_believe(ngx_http_shunt_ctx_t *ctx)
{
    ngx_connection_t *c = ctx->request->connection;

    if (!ctx->claimed || ngx_http_shunt_end_region(ctx, SHUNT_TAKE_WHOLE, NULL) != NGX_OK) {
        return NGX_DECLINED;
    }

    ngx_log_error(
        NGX_LOG_NOTICE, c->log, 0,
        "shunt: the client has acknowledged the payload, but the word of \"%V\" does not come%V",
        &ctx->payload.backend, ngx_http_shunt_trace_text(ctx->request));
    ngx_http_shunt_complete(ctx);

    return NGX_OK;
}

void ngx_http_shunt_probe_end(ngx_http_shunt_ctx_t *ctx)
{
    if (ctx->probe.event.timer_set) {
        ngx_del_timer(&ctx->probe.event);
        ngx_http_shunt_kernel_probe_end(ctx->request->connection->fd, &ctx->probe.before);
    }
}

static void ngx_http_shunt_probe_answered(ngx_http_shunt_ctx_t *ctx)
{
    ctx->probed = 1;

    if (ngx_http_shunt_believe(ctx) == NGX_OK) {
        /* void */

    } else if (ctx->probe.reason == NGX_HTTP_SHUNT_ASKED_GONE) {
        ngx_http_shunt_rest_gone(ctx);

    } else {
        ngx_http_shunt_ended(ctx, ctx->probe.reason);
    }
}

static void ngx_http_shunt_probe_handler(ngx_event_t *ev)
{
    ngx_http_shunt_ctx_t *ctx = ev->data;
    ngx_connection_t *c = ctx->request->connection;
    ngx_uint_t has_answered, stalled = ctx->probe.reason == NGX_HTTP_SHUNT_ASKED_STALLED;

    ngx_http_set_log_request(c->log, ctx->request);
    (void) ngx_http_shunt_follow(ctx); /* may complete the payload */
    has_answered = ctx->answered != ctx->probe.answered;

    if (ctx->mode != SHUNT_MODE_ACTIVE || ctx->failure.posted) {
        ngx_http_shunt_kernel_probe_end(c->fd, &ctx->probe.before);
        return;
    }

    if (!has_answered && (ngx_msec_int_t) (ctx->probe.until - ngx_current_msec) > 0) {
        ngx_add_timer(ev, stalled ? NGX_HTTP_SHUNT_PROBE_LOOK_STALLED : NGX_HTTP_SHUNT_PROBE_LOOK);
        return;
    }

    ngx_http_shunt_kernel_probe_end(c->fd, &ctx->probe.before);

    if (!stalled) {
        ngx_http_shunt_probe_answered(ctx);

    } else if (has_answered) {
        ngx_http_shunt_stall_answered(ctx);
    }

    ngx_http_run_posted_requests(c);
}

/* Begins to probe a client, or changes the reason for a probe in progress. */
static ngx_int_t ngx_http_shunt_probe_begin(ngx_http_shunt_ctx_t *ctx, ngx_uint_t reason,
                                            ngx_msec_t look, ngx_msec_t wait)
{
    ngx_event_t *ev = &ctx->probe.event;
    ngx_connection_t *c = ctx->request->connection;

    if (!ev->timer_set && ngx_http_shunt_kernel_probe(c->fd, &ctx->probe.before) == -1) {
        return NGX_DECLINED;
    }

    ctx->probe.reason = reason;
    ctx->probe.answered = ctx->answered;
    ctx->probe.until = ngx_current_msec + wait;
    ev->data = ctx;
    ev->handler = ngx_http_shunt_probe_handler;
    ev->log = c->log;
    ngx_add_timer(ev, look);

    return NGX_AGAIN;
}

/*
 * Called when a backend or an agent is lost. NGX_AGAIN: the client is asked, and the loss is
 * handled again, with its reason, when the client has answered or the wait is over. NGX_DECLINED:
 * the client needs no question, or no further one, or cannot be asked. If the client is being
 * asked because of a stall, the loss replaces that reason, because the loss may have caused the
 * stall.
 */
ngx_int_t ngx_http_shunt_probe(ngx_http_shunt_ctx_t *ctx, ngx_uint_t reason)
{
    if (ctx->probe.event.timer_set && ctx->probe.reason != NGX_HTTP_SHUNT_ASKED_STALLED) {
        return NGX_AGAIN;
    }

    /* A client that has acknowledged nothing has not claimed to have any byte. One that has been
     * asked is asked again only if it has claimed since then to have all. */
    if (ctx->acked == 0 ||
        (ctx->probed && (!ctx->claimed || ctx->probe.again == NGX_HTTP_SHUNT_PROBE_AGAIN))) {
        ngx_http_shunt_probe_end(ctx);
        return NGX_DECLINED;
    }

    ctx->probe.again += ctx->probed;

    return ngx_http_shunt_probe_begin(ctx, reason, NGX_HTTP_SHUNT_PROBE_LOOK,
                                      ctx->claimed ? NGX_HTTP_SHUNT_PROBE_WAIT_ALL
                                                   : NGX_HTTP_SHUNT_PROBE_WAIT);
}

/* Whether the client may have all of a payload whose backend or agent is lost. Called before each
 * further step that supposes that the client lacks bytes. 1: the payload is complete, the response
 * fails, or the client claims to have all and is asked; if it lacks bytes, the loss is handled
 * again, with `reason`. */
ngx_uint_t ngx_http_shunt_may_have_all(ngx_http_shunt_ctx_t *ctx, ngx_uint_t reason)
{
    (void) ngx_http_shunt_follow(ctx); /* may complete the payload */

    return ctx->mode != SHUNT_MODE_ACTIVE || ctx->failure.posted ||
           (ctx->claimed && ngx_http_shunt_probe(ctx, reason) == NGX_AGAIN);
}

/* Asks the client, which may be gone, what it has of a payload that has stalled.
 * ngx_http_shunt_stall_answered() is called if it answers. */
void ngx_http_shunt_probe_stalled(ngx_http_shunt_ctx_t *ctx)
{
    (void) ngx_http_shunt_probe_begin(ctx, NGX_HTTP_SHUNT_ASKED_STALLED,
                                      NGX_HTTP_SHUNT_PROBE_LOOK_STALLED,
                                      NGX_HTTP_SHUNT_PROBE_WAIT_STALLED);
}
