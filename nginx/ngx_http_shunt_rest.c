/* SPDX-License-Identifier: MIT */
/*
 * Relays the rest of a payload. The response's header has left, but neither handoff nor fetch
 * brings more of the body, for one of these reasons:
 *
 *   handoff   the agent of this machine is stopped or gone (pulse.c), no backend offers the rest
 *             (recovery.c), or something drops the packets of backend and client (stall.c)
 *   fetch     the fetch fails, before its first byte or later
 *   neither   the agent of this machine takes no handoff when one should begin (begin.c)
 *
 * The rest is asked for (part.c) without a consent. When the answer's header has come, a region
 * that is still active is taken back (taking.c). The answer's body is written behind what the
 * client has. If the answer is an error, or ends early, the rest is asked for a few more times.
 * After a mere stall (stall.c), the rest is not asked for again at once, because the handoff may
 * still continue. A handoff lets a backend send a payload, a response's body, on the client's own
 * connection. A fetch brings it through both agents to this nginx. A region is the range of
 * sequence numbers that a payload takes.
 *
 * On TLS, nobody knows whether the backend of a handoff has used the record numbers that the rest
 * needs. So such a response ends in a reset, as does one without a strong ETag.
 */
#include "ngx_http_shunt.h"

#define NGX_HTTP_SHUNT_REST_CONNECT 500  /* ms, for a server to accept connection and request */
#define NGX_HTTP_SHUNT_REST_ANSWER  1500 /* ms, for the answer's header */
#define NGX_HTTP_SHUNT_REST_TIMES   5    /* requests at most, for one response */
#define NGX_HTTP_SHUNT_REST_AGAIN   100  /* ms of pause after the first request; then doubled */

struct ngx_http_shunt_rest_s {
    ngx_event_t again;              /* timer: asks once more */
    ngx_http_request_t *request;    /* the request for the rest; NULL: there is none now */
    ngx_http_upstream_conf_t *conf; /* upstream configuration of the location */
    ngx_uint_t times;               /* number of requests made */
    uint64_t from;                  /* first payload byte that was asked for */
    uint64_t skip;      /* bytes at the answer's beginning that the client has already */
    uint64_t left;      /* bytes of the payload that the client still needs */
    ngx_uint_t good;    /* 1: the answer's header fits what was asked for */
    ngx_uint_t refused; /* 1: the answer was no error, but does not fit */
    ngx_uint_t stalled; /* 1: asked for because of a stall, and no agent is lost */
};

ngx_uint_t ngx_http_shunt_rest_is_of(ngx_http_shunt_ctx_t *ctx, ngx_http_request_t *sr)
{
    return ctx->rest && ctx->rest->request == sr;
}

/* ---- asking ---- */

static void ngx_http_shunt_rest_run(ngx_http_request_t *sr)
{
    ngx_http_shunt_ctx_t *ctx = ngx_http_get_module_ctx(sr, ngx_http_shunt_module);

    ngx_http_core_run_phases(sr);

    if (ngx_http_shunt_rest_is_of(ctx, sr)) {
        ctx->rest->conf = ngx_http_shunt_part_impatiently(sr, NGX_HTTP_SHUNT_REST_CONNECT,
                                                          NGX_HTTP_SHUNT_REST_ANSWER,
                                                          NGX_HTTP_SHUNT_REST_CONNECT);
    }
}

static ngx_int_t ngx_http_shunt_rest_over(ngx_http_request_t *sr, void *data, ngx_int_t rc);

/* Forgets the rest. An open request for the rest is ended when its answer comes. */
void ngx_http_shunt_rest_forget(ngx_http_shunt_ctx_t *ctx)
{
    if (ctx->rest && ctx->rest->again.timer_set) {
        ngx_del_timer(&ctx->rest->again);
    }

    ctx->rest = NULL;
}

/* Drops the rest, which is not needed any more. Ends an open request for the rest: otherwise the
 * client's own request, and a further request for the rest, would have to wait for the open one.
 * Must not be called from the open request's filters. */
void ngx_http_shunt_rest_drop(ngx_http_shunt_ctx_t *ctx)
{
    ngx_http_request_t *sr = ctx->rest ? ctx->rest->request : NULL;

    ngx_http_shunt_rest_forget(ctx);

    if (sr) {
        ngx_http_shunt_part_end(sr);
    }
}

/* Drops a rest that was asked for because of a stall. Called before other steps: an agent or a
 * backend is found to be lost, or a refused handoff's payload is fetched. */
void ngx_http_shunt_rest_drop_stalled(ngx_http_shunt_ctx_t *ctx)
{
    if (ctx->rest && ctx->rest->stalled && ctx->mode != SHUNT_MODE_REST) {
        ngx_http_shunt_rest_drop(ctx);
    }
}

/* Whether the rest was asked for because of a loss, and not only because of a stall. */
ngx_uint_t ngx_http_shunt_rest_is_on(ngx_http_shunt_ctx_t *ctx)
{
    return ctx->rest && !ctx->rest->stalled;
}

static ngx_uint_t ngx_http_shunt_rest_may_begin(ngx_http_shunt_ctx_t *ctx)
{
    ngx_http_shunt_rest_drop_stalled(ctx);

    return ctx->rest == NULL;
}

/* Asks for the payload from byte `from` on. */
static ngx_int_t ngx_http_shunt_rest_ask(ngx_http_shunt_ctx_t *ctx, uint64_t from)
{
    ngx_http_request_t *sr, *r = ctx->request;
    ngx_http_post_subrequest_t *ps;
    ngx_http_shunt_rest_t *rest = ctx->rest;

    if (rest == NULL) {
        rest = ngx_pcalloc(r->pool, sizeof(ngx_http_shunt_rest_t));
    }

    ps = ngx_palloc(r->pool, sizeof(ngx_http_post_subrequest_t));

    if (rest == NULL || ps == NULL) {
        return NGX_ERROR;
    }

    ps->handler = ngx_http_shunt_rest_over;
    ps->data = ctx;
    rest->from = from;
    rest->good = 0;
    rest->refused = 0;
    rest->times++;

    if (ngx_http_subrequest(r, &r->uri, &r->args, &sr, ps, NGX_HTTP_SUBREQUEST_CLONE) != NGX_OK) {
        return NGX_ERROR;
    }

    ngx_http_set_ctx(sr, ctx, ngx_http_shunt_module);
    sr->write_event_handler = ngx_http_shunt_rest_run;
    rest->request = sr;
    ctx->rest = rest;

    return ngx_http_shunt_part_fields(sr, ctx, rest->from);
}

static void ngx_http_shunt_rest_say(ngx_http_shunt_ctx_t *ctx, const char *why)
{
    ngx_log_error(NGX_LOG_ERR, ctx->request->connection->log, 0,
                  "shunt: the payload of \"%V\" has stopped at byte %uL of %uL: %s%V",
                  &ctx->payload.backend, ngx_http_shunt_ssl_payload_bytes(ctx, ctx->acked),
                  ctx->payload.length, why, ngx_http_shunt_trace_text(ctx->request));
}

/* Called when the handoff makes no progress, and the agent that was told of it on this machine is
 * stopped or gone. */
void ngx_http_shunt_rest_gone(ngx_http_shunt_ctx_t *ctx)
{
    ngx_connection_t *c = ctx->request->connection;

    if (!ngx_http_shunt_rest_may_begin(ctx)) {
        return;
    }

    ngx_http_set_log_request(c->log, ctx->request);
    ngx_http_shunt_recovery_drop(ctx);
    ctx->why = SHUNT_COUNT_aborted_agent;
    ngx_http_shunt_rest_say(ctx, "the agent of this machine is stopped or gone");

    if (ngx_http_shunt_proof_needed(ctx) || ctx->etag.len == 0 ||
        ngx_http_shunt_rest_ask(ctx, ctx->acked) != NGX_OK) {
        ngx_http_shunt_fail(ctx);
    }

    ngx_http_run_posted_requests(c);
}

/* Called when the handoff makes no progress, although its client answers and has room in its
 * window, and no agent is lost. The handoff may still continue. */
void ngx_http_shunt_rest_stalled(ngx_http_shunt_ctx_t *ctx)
{
    static time_t said;

    if (ctx->rest && (!ctx->rest->stalled || ctx->rest->request)) {
        return;
    }

    ctx->rest = NULL;

    if (ngx_http_shunt_may_say(&said)) {
        ngx_http_shunt_rest_say(
            ctx, "the client answers and has room; check that no firewall drops its ACKs to the "
                 "backend's \"ports\", and that no router drops what the backend sends with this "
                 "server's address");
    }

    if (ngx_http_shunt_rest_ask(ctx, ctx->acked) == NGX_OK) {
        ctx->rest->stalled = 1;

    } else if (ctx->rest) {
        ngx_http_shunt_fail(ctx); /* the subrequest was made, but its fields could not be */
    }
}

/*
 * Asks for the rest of a payload whose header has left. The payload's handoff is still active, or a
 * fetch of it has failed, or neither could begin. NGX_OK: the rest is asked for, or not needed.
 * NGX_DECLINED: nothing would prove that the rest is of the same representation, or the rest was
 * asked for already.
 */
ngx_int_t ngx_http_shunt_rest_instead(ngx_http_shunt_ctx_t *ctx)
{
    /* First byte that the client lacks. After a fetch: `left` bytes have not come, and of those,
     * the client has the first `skip` already. */
    uint64_t from = ctx->fetch.output ? ctx->payload.length - ctx->fetch.left + ctx->fetch.skip : 0;
    ngx_http_shunt_loc_conf_t *lcf;

    lcf = ngx_http_get_module_loc_conf(ctx->request, ngx_http_shunt_module);

    if (ctx->etag.len == 0 || !ngx_http_shunt_rest_may_begin(ctx)) {
        return NGX_DECLINED;
    }

    if (ctx->mode == SHUNT_MODE_ACTIVE) {
        return ngx_http_shunt_may_have_all(ctx, SHUNT_REASON_PEER_LOST) ? NGX_OK
               : ngx_http_shunt_proof_needed(ctx)                       ? NGX_DECLINED
                                                  : ngx_http_shunt_rest_ask(ctx, ctx->acked);
    }

    /* If nothing was sent, all bytes come from one backend, and fit each other. If the first bytes
     * came from another backend, shunt_recover may require a digest. */
    if (from && lcf->recover == NGX_HTTP_SHUNT_DIGEST) {
        return NGX_DECLINED;
    }

    ctx->mode = SHUNT_MODE_REST;
    ctx->request->buffered |= NGX_HTTP_SHUNT_BUFFERED;

    return ngx_http_shunt_rest_ask(ctx, from);
}

/* ---- the answer ---- */

static ngx_int_t ngx_http_shunt_rest_begins(ngx_http_request_t *sr, ngx_http_shunt_ctx_t *ctx)
{
    const char *why;
    static time_t said;
    ngx_http_shunt_rest_t *rest = ctx->rest;
    uint64_t acked = rest->from;
    ngx_int_t taken = NGX_OK;
    ngx_connection_t *c = sr->connection;

    if ((ctx->mode != SHUNT_MODE_ACTIVE && ctx->mode != SHUNT_MODE_REST) || ctx->failure.posted) {
        return NGX_ERROR;
    }

    if (rest->stalled && ctx->mode == SHUNT_MODE_ACTIVE) {
        (void) ngx_http_shunt_follow(ctx); /* may complete the handoff */

        if (!ngx_http_shunt_is_stalled(ctx)) {
            return NGX_ERROR;
        }

    } else if (ctx->mode == SHUNT_MODE_ACTIVE &&
               ngx_http_shunt_may_have_all(ctx, SHUNT_REASON_PEER_LOST)) {
        return NGX_ERROR;
    }

    why = ngx_http_shunt_part_is_not(sr, ctx, rest->from);

    if (why == NULL && ngx_http_shunt_take_offer(sr, 0)) {
        why = "it is an offer";
    }

    if (why == NULL && ctx->mode == SHUNT_MODE_ACTIVE) {
        taken = ngx_http_shunt_take(ctx, &acked);
        why = taken == NGX_OK      ? NULL
              : taken == NGX_AGAIN ? "the kernel cannot tell now what the client has"
                                   : "the region has ended";
    }

    if (why) {
        /* after an error, or if the kernel could not tell, another answer may fit later */
        rest->refused = taken != NGX_AGAIN && !ngx_http_shunt_part_is_error(sr);

        if (!rest->stalled || ngx_http_shunt_may_say(&said)) {
            ngx_log_error(
                NGX_LOG_ERR, c->log, 0,
                "shunt: the response for the rest, from byte %uL on, cannot be used: %s%V",
                rest->from, why, ngx_http_shunt_trace_text(ctx->request));
        }

        return NGX_ERROR;
    }

    ctx->mode = SHUNT_MODE_REST;

    /* `acked` is what the client's newest packet acknowledges. rest->from is from an earlier
     * packet, which may have acknowledged more. Then the client also lacks bytes before rest->from,
     * and the rest is asked for again. */
    if (acked < rest->from) {
        rest->from = acked;
        return NGX_ERROR;
    }

    if (rest->conf) {
        sr->upstream->conf = rest->conf;
    }

    rest->good = 1;
    rest->skip = acked - rest->from;
    rest->left = ctx->payload.length - acked;
    ctx->why = 0;

    if (!ctx->relayed) {
        ctx->relayed = 1;
        ngx_http_shunt_count(rest->stalled ? SHUNT_COUNT_relayed_stalled
                                           : SHUNT_COUNT_relayed_stopped,
                             1);

        if (rest->stalled) {
            ngx_http_shunt_vain_stalled(ctx->request);
        }
    }

    return NGX_OK;
}

/* Runs in place of all other header filters. If the answer fits, this nginx writes to the
 * connection again from here on. A handoff that completes drops an open request for the rest. This
 * request must not be dropped while its filters run, so rest->request is NULL meanwhile. */
ngx_int_t ngx_http_shunt_rest_header(ngx_http_request_t *sr, ngx_http_shunt_ctx_t *ctx)
{
    ngx_int_t rc;
    ngx_http_shunt_rest_t *rest = ctx->rest;

    rest->request = NULL;
    rc = ngx_http_shunt_rest_begins(sr, ctx);
    rest->request = sr;

    return rc;
}

/* ---- the answer's body ---- */

/* Removes bytes from the front of a buf. */
static void ngx_http_shunt_rest_cut(ngx_buf_t *b, uint64_t bytes)
{
    if (ngx_buf_in_memory(b)) {
        b->pos += bytes;
    }

    if (b->in_file) {
        b->file_pos += bytes;
    }
}

/* Puts the bytes that the client needs into a new chain, without the answer's special bufs. If no
 * byte is missing any more, adds a last buf. NGX_ERROR: there are too many bytes, or there is no
 * memory. */
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

/* Runs in place of all other body filters: writes the answer's body behind what the client has. */
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

/* ---- the answer's end ---- */

static void ngx_http_shunt_rest_again_handler(ngx_event_t *ev);

/* Whether no further request for the rest may be made. */
static ngx_uint_t ngx_http_shunt_rest_is_over(const ngx_http_shunt_rest_t *rest)
{
    return rest->refused || rest->times == NGX_HTTP_SHUNT_REST_TIMES;
}

/* Has the rest asked for after a pause. */
static void ngx_http_shunt_rest_later(ngx_http_shunt_ctx_t *ctx, ngx_msec_t pause)
{
    ngx_http_shunt_rest_t *rest = ctx->rest;

    rest->again.data = ctx;
    rest->again.handler = ngx_http_shunt_rest_again_handler;
    rest->again.log = ctx->request->connection->log;
    ngx_add_timer(&rest->again, pause);
}

/* Asks for the rest once more, or gives the response up if the rest does not come. If the client
 * claims meanwhile to have all, it is asked first (probe.c). */
static void ngx_http_shunt_rest_go_on(ngx_http_shunt_ctx_t *ctx)
{
    ngx_http_shunt_rest_t *rest = ctx->rest;
    uint64_t from = rest->good ? ctx->payload.length - rest->left : rest->from;

    if (ctx->mode == SHUNT_MODE_ACTIVE) {
        if (ngx_http_shunt_may_have_all(ctx, SHUNT_REASON_PEER_LOST)) {
            if (ctx->mode == SHUNT_MODE_ACTIVE) {
                ngx_http_shunt_rest_later(ctx, NGX_HTTP_SHUNT_REST_AGAIN);
            }

            return;
        }

        from = ctx->acked;
    }

    if (ngx_http_shunt_rest_is_over(rest) || ngx_http_shunt_rest_ask(ctx, from) != NGX_OK) {
        ngx_http_shunt_fail(ctx);
    }
}

static void ngx_http_shunt_rest_again_handler(ngx_event_t *ev)
{
    ngx_http_shunt_ctx_t *ctx = ev->data;
    ngx_connection_t *c = ctx->request->connection;

    ngx_http_set_log_request(c->log, ctx->request);

    if (!ctx->failure.posted) {
        ngx_http_shunt_rest_go_on(ctx);
    }

    ngx_http_run_posted_requests(c);
}

/*
 * Called when the subrequest has ended, with or without an error. An error must not end the
 * client's request, too: a further subrequest brings what is missing, or a reset tells the client
 * that something is missing.
 */
static ngx_int_t ngx_http_shunt_rest_over(ngx_http_request_t *sr, void *data, ngx_int_t rc)
{
    ngx_http_shunt_ctx_t *ctx = data;
    ngx_http_shunt_rest_t *rest = ctx->rest;

    if (!ngx_http_shunt_rest_is_of(ctx, sr)) {
        return NGX_OK;
    }

    if (ctx->mode == SHUNT_MODE_DONE) {
        return rest->good ? rc : NGX_OK;
    }

    rest->request = NULL;

    /* the handoff has completed meanwhile, because the lost backend's kernel had all bytes */
    if (ctx->mode != SHUNT_MODE_ACTIVE && ctx->mode != SHUNT_MODE_REST) {
        return NGX_OK;
    }

    if (ctx->mode == SHUNT_MODE_ACTIVE && rest->stalled) {
        if (rest->refused) {
            ngx_http_shunt_stall_end(ctx);
        }

        return NGX_OK;
    }

    if (ngx_http_shunt_rest_is_over(rest)) {
        ngx_http_shunt_rest_go_on(ctx);

    } else {
        ngx_http_shunt_rest_later(ctx, NGX_HTTP_SHUNT_REST_AGAIN << (rest->times - 1));
    }

    return NGX_OK;
}
