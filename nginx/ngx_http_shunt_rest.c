/* SPDX-License-Identifier: MIT */
/*
 * The rest of a payload, relayed. Where the agent of this machine is stopped or gone (pulse.c), and
 * a handoff makes no progress, nobody else is asked to go on with it as recovery.c does, for that
 * takes an agent. A clone of the request asks for the rest on its ordinary way, without a consent;
 * its answer must be the rest, by ETag and Content-Range. Then the region is taken back (taking.c),
 * and the answer's body is written behind what the client has.
 *
 * On TLS nobody knows whether the backend has used the record numbers that the rest would have:
 * that response ends in a reset, as does one without a strong ETag.
 */
#include "ngx_http_shunt.h"

#define NGX_HTTP_SHUNT_REST_CONNECT 500  /* ms */
#define NGX_HTTP_SHUNT_REST_ANSWER  1500 /* ms, for the header */

struct ngx_http_shunt_rest_s {
    ngx_http_request_t *request;
    ngx_http_upstream_conf_t *conf; /* the location's */
    uint64_t from;                  /* the payload's first byte that was asked for */
    uint64_t skip;                  /* bytes of the answer that the client has already */
    uint64_t left;                  /* bytes of the payload that the client is still to get */
    ngx_uint_t good;                /* the answer's header was what was asked for */
};

ngx_uint_t ngx_http_shunt_rest_is_of(ngx_http_shunt_ctx_t *ctx, ngx_http_request_t *sr)
{
    return ctx->rest && ctx->rest->request == sr;
}

/* ---- asking ---- */

/* The location's patience is for clients that have got nothing yet. */
static void ngx_http_shunt_rest_run(ngx_http_request_t *sr)
{
    ngx_http_upstream_t *u;
    ngx_http_upstream_conf_t *conf;
    ngx_http_shunt_ctx_t *ctx = ngx_http_get_module_ctx(sr, ngx_http_shunt_module);

    ngx_http_core_run_phases(sr);

    u = sr->upstream;

    if (!ngx_http_shunt_rest_is_of(ctx, sr) || u == NULL || u->conf == NULL) {
        return;
    }

    conf = ngx_palloc(sr->pool, sizeof(ngx_http_upstream_conf_t));
    if (conf == NULL) {
        return;
    }

    ctx->rest->conf = u->conf;
    *conf = *u->conf;
    conf->connect_timeout = ngx_min(conf->connect_timeout, NGX_HTTP_SHUNT_REST_CONNECT);
    conf->read_timeout = ngx_min(conf->read_timeout, NGX_HTTP_SHUNT_REST_ANSWER);
    u->conf = conf;

    if (u->peer.connection && u->peer.connection->write->timer_set) {
        ngx_add_timer(u->peer.connection->write, conf->connect_timeout);
    }

    if (u->peer.connection && u->peer.connection->read->timer_set) {
        ngx_add_timer(u->peer.connection->read, conf->read_timeout);
    }
}

/* The client's fields, but for the rest alone, on condition that it is the rest of the same, and
 * with no consent. */
static ngx_int_t ngx_http_shunt_rest_fields(ngx_http_request_t *sr, ngx_http_shunt_ctx_t *ctx)
{
    ngx_str_t range;

    range.data = ngx_pnalloc(sr->pool, sizeof("bytes=-") + 2 * NGX_OFF_T_LEN);

    if (range.data == NULL || ngx_http_shunt_strip(sr, ngx_http_shunt_is_replaced) != NGX_OK) {
        return NGX_ERROR;
    }

    range.len = ngx_sprintf(range.data, "bytes=%O-%O", ctx->first + (off_t) ctx->rest->from,
                            ctx->first + (off_t) ctx->payload.length - 1) -
                range.data;

    if (ngx_http_shunt_add_request_field(sr, "Range", "range", &range) != NGX_OK) {
        return NGX_ERROR;
    }

    return ngx_http_shunt_add_request_field(sr, "If-Match", "if-match", &ctx->etag);
}

static ngx_int_t ngx_http_shunt_rest_over(ngx_http_request_t *sr, void *data, ngx_int_t rc);

static ngx_int_t ngx_http_shunt_rest_ask(ngx_http_shunt_ctx_t *ctx)
{
    ngx_http_request_t *sr, *r = ctx->request;
    ngx_http_post_subrequest_t *ps;
    ngx_http_shunt_rest_t *rest;

    rest = ngx_pcalloc(r->pool, sizeof(ngx_http_shunt_rest_t));
    ps = ngx_palloc(r->pool, sizeof(ngx_http_post_subrequest_t));

    if (rest == NULL || ps == NULL) {
        return NGX_ERROR;
    }

    ps->handler = ngx_http_shunt_rest_over;
    ps->data = ctx;
    rest->from = ctx->acked;

    if (ngx_http_subrequest(r, &r->uri, &r->args, &sr, ps, NGX_HTTP_SUBREQUEST_CLONE) != NGX_OK) {
        return NGX_ERROR;
    }

    ngx_http_set_ctx(sr, ctx, ngx_http_shunt_module);
    sr->write_event_handler = ngx_http_shunt_rest_run;
    rest->request = sr;
    ctx->rest = rest;

    return ngx_http_shunt_rest_fields(sr, ctx);
}

/* The handoff makes no progress, and the agent of this machine shows no sign of life. */
void ngx_http_shunt_rest_begin(ngx_http_shunt_ctx_t *ctx)
{
    ngx_connection_t *c = ctx->request->connection;

    if (ctx->rest) {
        return;
    }

    ngx_http_set_log_request(c->log, ctx->request);
    ngx_http_shunt_recovery_end(ctx);
    ctx->why = SHUNT_COUNT_aborted_agent;

    ngx_log_error(
        NGX_LOG_ERR, c->log, 0,
        "shunt: the agent of this machine is stopped or gone, and the payload of \"%V\" comes "
        "no further than byte %uL of %uL%V",
        &ctx->payload.backend, ngx_http_shunt_ssl_payload_bytes(ctx, ctx->acked),
        ctx->payload.length, ngx_http_shunt_trace_text(ctx->request));

    if (ngx_http_shunt_proof_needed(ctx) || ctx->etag.len == 0 ||
        ngx_http_shunt_rest_ask(ctx) != NGX_OK) {
        ngx_http_shunt_fail(ctx);
    }

    ngx_http_run_posted_requests(c);
}

/* The header of a shortcut has left, and there is no agent that its payload could be fetched by. */
ngx_int_t ngx_http_shunt_rest_instead(ngx_http_shunt_ctx_t *ctx)
{
    if (ctx->etag.len == 0) {
        return NGX_DECLINED;
    }

    ctx->mode = SHUNT_MODE_REST;
    ctx->request->buffered |= NGX_HTTP_SHUNT_BUFFERED;

    return ngx_http_shunt_rest_ask(ctx);
}

/* ---- the answer ---- */

static const char *ngx_http_shunt_rest_judge(ngx_http_request_t *sr, ngx_http_shunt_ctx_t *ctx)
{
    off_t first, last, complete;
    ngx_http_upstream_t *u = sr->upstream;

    if (u == NULL || u->headers_in.status_n != NGX_HTTP_PARTIAL_CONTENT) {
        return "it is no part";
    }

    if (!ngx_http_shunt_is_same(ctx, sr->headers_out.etag)) {
        return "it is of something else";
    }

    if (ngx_http_shunt_parse_range(sr->headers_out.content_range, &first, &last, &complete) !=
            NGX_OK ||
        first != ctx->first + (off_t) ctx->rest->from ||
        last != ctx->first + (off_t) ctx->payload.length - 1 || complete != ctx->complete) {
        return "it is another part";
    }

    return ngx_http_shunt_take_offer(sr, 0) ? "it is an offer" : NULL;
}

/* In place of every other header filter. From here the connection is the server's again. */
ngx_int_t ngx_http_shunt_rest_header(ngx_http_request_t *sr, ngx_http_shunt_ctx_t *ctx)
{
    uint64_t acked = 0;
    const char *why;
    ngx_http_shunt_rest_t *rest = ctx->rest;
    ngx_connection_t *c = sr->connection;

    if ((ctx->mode != SHUNT_MODE_ACTIVE && ctx->mode != SHUNT_MODE_REST) || ctx->failure.posted) {
        return NGX_ERROR;
    }

    why = ngx_http_shunt_rest_judge(sr, ctx);

    if (why == NULL && ctx->mode == SHUNT_MODE_ACTIVE &&
        (ngx_http_shunt_take(ctx, &acked) != NGX_OK || acked < rest->from)) {
        why = "the region has ended";
    }

    if (why) {
        ngx_log_error(NGX_LOG_ERR, c->log, 0,
                      "shunt: the answer for the rest, from byte %uL on, cannot be used: %s%V",
                      rest->from, why, ngx_http_shunt_trace_text(ctx->request));
        return NGX_ERROR;
    }

    if (rest->conf) {
        sr->upstream->conf = rest->conf;
    }

    rest->good = 1;
    rest->skip = acked - rest->from;
    rest->left = ctx->payload.length - acked;
    ctx->mode = SHUNT_MODE_REST;
    ctx->why = 0;
    ngx_http_shunt_count(SHUNT_COUNT_relayed_stopped, 1);

    return NGX_OK;
}

/* ---- its body ---- */

/* Takes so many bytes from the front of a buf. */
static void ngx_http_shunt_rest_cut(ngx_buf_t *b, uint64_t bytes)
{
    if (ngx_buf_in_memory(b)) {
        b->pos += bytes;
    }

    if (b->in_file) {
        b->file_pos += bytes;
    }
}

/* Leaves of the chain what the client needs, without specials. NGX_ERROR: it is too long. */
static ngx_int_t ngx_http_shunt_rest_chain(ngx_http_request_t *r, ngx_http_shunt_rest_t *rest,
                                           ngx_chain_t *in, ngx_chain_t **out)
{
    uint64_t size, skip;
    ngx_chain_t *cl;

    for (/* void */; in; in = in->next) {
        if (ngx_buf_special(in->buf)) {
            continue;
        }

        size = ngx_buf_size(in->buf);
        skip = ngx_min(rest->skip, size);
        ngx_http_shunt_rest_cut(in->buf, skip);
        rest->skip -= skip;
        size -= skip;

        if (size > rest->left) {
            return NGX_ERROR;
        }

        if (size == 0) {
            continue;
        }

        cl = ngx_alloc_chain_link(r->pool);
        if (cl == NULL) {
            return NGX_ERROR;
        }

        rest->left -= size;
        cl->buf = in->buf;
        cl->next = NULL;
        *out = cl;
        out = &cl->next;
    }

    if (rest->left) {
        return NGX_OK;
    }

    cl = ngx_alloc_chain_link(r->pool);
    if (cl == NULL || (cl->buf = ngx_calloc_buf(r->pool)) == NULL) {
        return NGX_ERROR;
    }

    cl->buf->last_buf = 1;
    cl->next = NULL;
    *out = cl;

    return NGX_OK;
}

static void ngx_http_shunt_rest_free(ngx_pool_t *pool, ngx_chain_t *out)
{
    ngx_chain_t *next;

    for (/* void */; out; out = next) {
        next = out->next;
        ngx_free_chain(pool, out);
    }
}

/* Where a response's filters would have it, it goes behind what the client has. */
ngx_int_t ngx_http_shunt_rest_body(ngx_http_request_t *sr, ngx_http_shunt_ctx_t *ctx,
                                   ngx_chain_t *in)
{
    ngx_int_t rc;
    ngx_chain_t *out = NULL;
    ngx_http_request_t *r = ctx->request;
    ngx_http_shunt_rest_t *rest = ctx->rest;
    uint64_t left = rest->left;

    if (ctx->mode != SHUNT_MODE_REST || !rest->good) {
        return ctx->mode == SHUNT_MODE_DONE ? NGX_OK : NGX_ERROR;
    }

    if (ngx_http_shunt_rest_chain(r, rest, in, &out) != NGX_OK) {
        return NGX_ERROR;
    }

    if (out == NULL && r->out == NULL && !r->connection->buffered) {
        return NGX_OK;
    }

    ctx->bytes += left - rest->left;
    rc = ctx->output(r, out);
    ngx_http_shunt_rest_free(r->pool, out);

    if (rest->left == 0) {
        ctx->mode = SHUNT_MODE_DONE;
        r->buffered &= ~NGX_HTTP_SHUNT_BUFFERED;
    }

    return rc;
}

/* The subrequest is over. What it has not brought, nobody brings. */
static ngx_int_t ngx_http_shunt_rest_over(ngx_http_request_t *sr, void *data, ngx_int_t rc)
{
    ngx_http_shunt_ctx_t *ctx = data;

    if (ngx_http_shunt_rest_is_of(ctx, sr) &&
        (ctx->mode == SHUNT_MODE_ACTIVE || ctx->mode == SHUNT_MODE_REST)) {
        ngx_http_shunt_fail(ctx);
    }

    return rc;
}
