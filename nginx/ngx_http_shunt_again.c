/* SPDX-License-Identifier: MIT */
/*
 * Asks for a response once more, if the first answer cannot be used and nothing of it has left: the
 * offer was refused, its fetch failed, an intermediate needs the body, or a consent made the
 * request too long. This costs the shortcut, never the response: the request runs once more from
 * its content handler on, without a consent, and the new answer has a body. Consents are given for
 * GET alone, which may be repeated (RFC 9110, 9.2.2). A consent is the request's header field by
 * which tiers say that they may be bypassed. An offer is a backend's answer to it: a body that the
 * backend holds ready.
 *
 *   AGAIN --posted event--> the upstream is ended --> content handler
 *
 * The body that belongs to the first answer is not waited for, because it may be long, or never
 * come.
 */
#include "ngx_http_shunt.h"

#define NGX_HTTP_SHUNT_LONG_REQUEST     1024 /* bytes */
#define NGX_HTTP_SHUNT_FIELDS_TOO_LARGE 431  /* RFC 6585, 5 */

static void ngx_http_shunt_again_handler(ngx_event_t *ev);

/* Whether to ask once more: at most once for each request, only before the header has left, and
 * only if this tier gave a consent or passed one on. That consent may be the reason why the answer
 * has no body. */
ngx_uint_t ngx_http_shunt_may_ask_again(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx)
{
    return ctx && !ctx->again && (ctx->consented || ctx->passed) && r->content_handler &&
           !r->header_sent;
}

/*
 * Whether the request may have been too long with its consent. Upstreams limit the length and the
 * number of a request's fields (nginx and Apache answer 400, Node.js 431), and a consent adds about
 * 150 bytes. A request shorter than LONG_REQUEST is far below these limits, so it was refused for
 * another reason.
 */
ngx_uint_t ngx_http_shunt_was_too_long(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx,
                                       ngx_uint_t status)
{
    return (status == NGX_HTTP_BAD_REQUEST || status == NGX_HTTP_SHUNT_FIELDS_TOO_LARGE) &&
           r->request_length >= NGX_HTTP_SHUNT_LONG_REQUEST && ngx_http_shunt_may_ask_again(r, ctx);
}

static void ngx_http_shunt_again_soon(ngx_http_shunt_ctx_t *ctx)
{
    ctx->failure.data = ctx;
    ctx->failure.handler = ngx_http_shunt_again_handler;
    ctx->failure.log = ctx->request->connection->log;

    if (!ctx->failure.posted) {
        ngx_post_event(&ctx->failure, &ngx_posted_events);
    }
}

/* Drops the response whose header a filter handles now, and has it asked for once more. */
void ngx_http_shunt_ask_again(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx)
{
    ctx->mode = SHUNT_MODE_AGAIN;
    ngx_http_shunt_again_soon(ctx);
}

/* Body filter in mode AGAIN. Drops the body, and keeps the request open, even if its upstream has
 * ended. */
ngx_int_t ngx_http_shunt_again_body(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx,
                                    ngx_chain_t *in)
{
    ngx_uint_t last;
    ngx_chain_t *cl;

    last = r->upstream == NULL || r->upstream->cleanup == NULL;

    for (cl = in; cl; cl = cl->next) {
        last |= cl->buf->last_buf;
        cl->buf->pos = cl->buf->last;
        cl->buf->file_pos = cl->buf->file_last;
    }

    if (!last) {
        return NGX_OK;
    }

    r->buffered |= NGX_HTTP_SHUNT_BUFFERED;
    ngx_http_shunt_again_soon(ctx);

    return NGX_AGAIN;
}

/* Resets the request to the state before any header had come. Drops other filters' contexts, if
 * they have seen the header. */
static void ngx_http_shunt_forget_response(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx)
{
    ngx_connection_t *c = r->connection;

    ngx_http_clean_header(r);

    if (ctx->filtered) {
        ngx_memzero(r->ctx, sizeof(void *) * ngx_http_max_module);
        ngx_http_set_ctx(r, ctx, ngx_http_shunt_module);
    }

    ctx->mode = SHUNT_MODE_NONE;
    ctx->header_held = 0;
    ctx->filtered = 0;
    ngx_memzero(&ctx->fetch, sizeof(ctx->fetch));

    /* filters have set these for a body that does not come */
    r->chunked = 0;
    r->allow_ranges = 0;
    r->single_range = 0;
    r->buffered = 0;
    c->buffered = 0;
    r->filter_need_in_memory = 0;
    r->main_filter_need_in_memory = c->ssl != NULL;
    r->filter_need_temporary = 0;

    if (c->write->timer_set && !c->write->delayed) {
        ngx_del_timer(c->write);
    }
}

/* Sends an error page, as ngx_http_filter_finalize_request() does, but first resets the request's
 * state, so that the connection can still be used. */
static void ngx_http_shunt_bad_gateway(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx)
{
    ctx->filtered = 1;
    ngx_http_shunt_forget_response(r, ctx);
    ngx_http_finalize_request(r, NGX_HTTP_BAD_GATEWAY);
}

/* Runs the request once more, or answers 502. Called from an event, when nothing of the response
 * has left, and its upstream, fetch and timers have been released. */
void ngx_http_shunt_start_over(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx)
{
    if (!ngx_http_shunt_may_ask_again(r, ctx) ||
        ngx_http_shunt_strip(r, ngx_http_shunt_is_field) != NGX_OK) {
        ngx_http_shunt_bad_gateway(r, ctx);
        return;
    }

    ngx_http_shunt_forget_response(r, ctx);
    ngx_http_shunt_count(SHUNT_COUNT_asked_again, 1);

    ctx->again = 1;
    ctx->given = 0;
    ctx->passed = 0;
    ctx->etag.len = 0;
    ctx->bytes = 0;
    ctx->why = 0;

    r->read_event_handler = ngx_http_block_reading;
    r->write_event_handler = ngx_http_core_run_phases;
    ngx_http_core_run_phases(r);
}

static void ngx_http_shunt_again_handler(ngx_event_t *ev)
{
    ngx_http_shunt_ctx_t *ctx = ev->data;
    ngx_http_request_t *r = ctx->request;
    ngx_connection_t *c = r->connection;

    ngx_http_set_log_request(c->log, r);

    if (ngx_http_shunt_end_upstream(r) == NGX_AGAIN) {
        return; /* the body filter will see the upstream's end, and post this event again */
    }

    ngx_http_shunt_release(ctx);
    ngx_http_shunt_start_over(r, ctx);
    ngx_http_run_posted_requests(c);
}
