/* SPDX-License-Identifier: MIT */
/*
 * Nothing of a response has left, and its offer cannot be used: refused, its fetch failed, or a
 * filter of an intermediate needs the body; or a consent made the request too long. A mistake costs
 * the shortcut, never the response: so the request is run once more from its content handler on,
 * which is its ordinary way, without a consent. The answer is then one with a body. Consents go
 * with GET alone, which may be repeated (RFC 9110, 9.2.2).
 *
 *   AGAIN --posted event--> the upstream is ended --> content handler
 *
 * The body behind that header is not waited for: it may be long, or never come.
 */
#include "ngx_http_shunt.h"

#define NGX_HTTP_SHUNT_LONG_REQUEST     1024
#define NGX_HTTP_SHUNT_FIELDS_TOO_LARGE 431 /* RFC 6585, 5 */

static void ngx_http_shunt_again_handler(ngx_event_t *ev);

/* Once for a request, and where a consent of this tier's, or one that it passed on, is why the
 * answer has no body. */
ngx_uint_t ngx_http_shunt_may_ask_again(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx)
{
    return ctx && !ctx->again && (ctx->consented || ctx->passed) && r->content_handler &&
           !r->header_sent;
}

/*
 * Upstreams bound the length and the number of a request's fields (nginx and Apache answer 400,
 * Node.js 431), and a consent is some 150 bytes more. A request that is far from any such bound was
 * refused for something else.
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

/* From a filter: this header and the body behind it go nowhere. */
void ngx_http_shunt_ask_again(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx)
{
    ctx->mode = SHUNT_MODE_AGAIN;
    ngx_http_shunt_again_soon(ctx);
}

/* The body filter, in mode AGAIN: the request stays open though its upstream may have ended. */
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

/* As if no header had come yet. What filters have begun is theirs no more. */
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

    /* what filters had set for the body that does not come */
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

/* An error page, as ngx_http_filter_finalize_request() makes one, but with the request fully in our
   hands, so that the connection survives. */
static void ngx_http_shunt_bad_gateway(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx)
{
    ctx->filtered = 1;
    ngx_http_shunt_forget_response(r, ctx);
    ngx_http_finalize_request(r, NGX_HTTP_BAD_GATEWAY);
}

/* From an event: nothing of the response has left, and what was begun is released. */
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
        return; /* the body filter sees its end */
    }

    ngx_http_shunt_release(ctx);
    ngx_http_shunt_start_over(r, ctx);
    ngx_http_run_posted_requests(c);
}
