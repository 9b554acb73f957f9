/* SPDX-License-Identifier: MIT */
/*
 * The frontend's side, as filters at both ends of the chain:
 *
 *   upstream -> early -> slice, range, copy, ... gzip, chunked -> late -> write
 *
 * Only the early filter sees an offer. It checks the offer and gives the response its real length,
 * so that every other filter works as if the body were about to come. The late filter sees what all
 * filters between the two have made of the header. If no filter needs the body, the body bypasses
 * this nginx (handoff.c). Else it is fetched, and enters the chain where the upstream's body would
 * have entered it (fetch.c). The late filter also does a backend's work: it holds a header back
 * until the body comes and is offered. An offer is a body that a backend holds ready, and that its
 * response's header names. The body is then a payload. A consent is a header field of a request, by
 * which each tier says that it may be bypassed.
 */
#include "ngx_http_shunt.h"

static ngx_http_output_header_filter_pt ngx_http_shunt_next_early_header;
static ngx_http_output_body_filter_pt ngx_http_shunt_next_early_body;
static ngx_http_output_header_filter_pt ngx_http_shunt_next_late_header;
static ngx_http_output_body_filter_pt ngx_http_shunt_next_late_body;

/* ---- early: the header ---- */

/* Removes all Shunt-* fields from the response; with `keep`, all but the offer. Returns the offer's
 * field, or NULL if the upstream has sent no offer. */
ngx_table_elt_t *ngx_http_shunt_take_offer(ngx_http_request_t *r, ngx_uint_t keep)
{
    ngx_uint_t i;
    ngx_list_part_t *part;
    ngx_table_elt_t *h, *offer = NULL;

    for (part = &r->headers_out.headers.part; part; part = part->next) {
        h = part->elts;

        for (i = 0; i < part->nelts; i++) {
            if (h[i].hash == 0 || !ngx_http_shunt_is_field(&h[i])) {
                continue;
            }

            if (h[i].key.len == sizeof("Shunt-Payload") - 1 &&
                ngx_strcasecmp(h[i].key.data, (u_char *) "Shunt-Payload") == 0) {

                if (offer) { /* two offers: neither is valid */
                    offer->value.len = 0;
                    h[i].hash = 0;
                    continue;
                }

                offer = &h[i];

                if (keep) {
                    continue;
                }
            }

            h[i].hash = 0;
        }
    }

    return offer;
}

static ngx_int_t ngx_http_shunt_upstream_trusted(ngx_http_request_t *r)
{
    ngx_http_upstream_t *u = r->upstream;
    ngx_http_shunt_loc_conf_t *lcf = ngx_http_get_module_loc_conf(r, ngx_http_shunt_module);

    return lcf->trust && u->peer.sockaddr && ngx_cidr_match(u->peer.sockaddr, lcf->trust) == NGX_OK;
}

/* Returns 0 if the offer can be used, else the counter of the reason why not. */
ngx_uint_t ngx_http_shunt_refused(ngx_http_request_t *r, ngx_table_elt_t *field,
                                  ngx_http_shunt_consent_t *consent,
                                  ngx_http_shunt_payload_t *payload, ngx_http_shunt_peer_t *peer)
{
    u_char tag[16];

    if (!ngx_http_shunt_upstream_trusted(r)) {
        return SHUNT_COUNT_refused_untrusted;
    }

    if (ngx_http_shunt_parse_payload(&field->value, payload) != NGX_OK) {
        return SHUNT_COUNT_refused_malformed;
    }

    if (ngx_http_shunt_board_find(&payload->backend, peer) != NGX_OK) {
        return SHUNT_COUNT_refused_unknown_peer;
    }

    ngx_http_shunt_tag(peer->their_key, consent->nonce, payload->number, payload->length, tag);

    if (!ngx_http_shunt_tag_equal(tag, payload->tag)) {
        return SHUNT_COUNT_refused_tag;
    }

    if (r->headers_out.content_length_n != 0) {
        return SHUNT_COUNT_refused_body;
    }

    return 0;
}

/*
 * Handles an offer that is refused. The offer's field is not logged, because anybody who read the
 * tag in the log could claim the payload. If the offer answers a consent, the body is asked for
 * once more, without a consent.
 */
static ngx_int_t ngx_http_shunt_refuse(ngx_http_request_t *r, ngx_table_elt_t *field,
                                       ngx_uint_t counter)
{
    ngx_http_shunt_payload_t payload;
    ngx_http_shunt_ctx_t *ctx = ngx_http_shunt_ctx(r);

    if (ngx_http_shunt_parse_payload(&field->value, &payload) == NGX_OK) {
        ngx_log_error(NGX_LOG_ERR, r->connection->log, 0,
                      "shunt: upstream's offer %016xL of \"%V\", %uL bytes, %V%V", payload.number,
                      &payload.backend, payload.length, ngx_http_shunt_counter_name(counter),
                      ngx_http_shunt_trace_text(r));
    } else {
        ngx_log_error(NGX_LOG_ERR, r->connection->log, 0,
                      "shunt: upstream's \"Shunt-Payload\" of %uz bytes is no offer, %V%V",
                      field->value.len, ngx_http_shunt_counter_name(counter),
                      ngx_http_shunt_trace_text(r));
    }

    ngx_http_shunt_outcome(r, counter);

    if (ngx_http_shunt_may_ask_again(r, ctx)) {
        ngx_http_shunt_vain_note(r, counter);
        ngx_http_shunt_ask_again(r, ctx);
        return NGX_OK;
    }

    /* No field of the upstream's header may get into the error page. The upstream module finalizes
     * the request with this status, so error_page works as for any other bad gateway. */
    ngx_http_clean_header(r);

    return NGX_HTTP_BAD_GATEWAY;
}

/* Decides that the body is fetched (through the agents), and then passes through this nginx's
 * filters. `counter`: the reason. */
static void ngx_http_shunt_fetch_early(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx,
                                       ngx_uint_t counter)
{
    ngx_http_shunt_outcome(r, counter);
    ngx_http_shunt_vain_note(r, counter);
    ctx->mode = SHUNT_MODE_FETCH_EARLY;
}

/* Runs the other header filters as if the payload were about to come. */
static ngx_int_t ngx_http_shunt_try_filters(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx)
{
    ngx_int_t rc;
    ngx_uint_t in_memory;

    ngx_http_clear_content_length(r);
    r->headers_out.content_length_n = ctx->payload.length;
    ctx->filtered = 1;

    /* For a TLS connection, nginx requires all bodies in memory. This is switched off while the
     * filters run, so that the late filter sees whether a filter requires it. */
    in_memory = r->connection->ssl && r->main_filter_need_in_memory;

    if (in_memory) {
        r->main_filter_need_in_memory = 0;
    }

    rc = ngx_http_shunt_next_early_header(r);

    if (in_memory) {
        r->main_filter_need_in_memory = 1;
    }

    return rc;
}

/* At an intermediate: passes an offer on, if no filter here needs the body. */
static ngx_int_t ngx_http_shunt_pass_on(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx,
                                        ngx_table_elt_t *field, ngx_uint_t status)
{
    /* adds X-Accel-Expires again, because nginx's upstream module does not forward this field */
    if (ngx_http_shunt_forbid_cache(r) != NGX_OK) {
        return NGX_ERROR;
    }

    if (status != NGX_HTTP_OK && status != NGX_HTTP_PARTIAL_CONTENT) {
        return ngx_http_shunt_next_early_header(r); /* such a response is complete without a body */
    }

    if (r->headers_out.content_length_n != 0 ||
        ngx_http_shunt_parse_payload(&field->value, &ctx->payload) != NGX_OK) {
        return ngx_http_shunt_refuse(r, field, SHUNT_COUNT_refused_malformed);
    }

    ctx->mode = SHUNT_MODE_PASSING;

    return ngx_http_shunt_try_filters(r, ctx);
}

static ngx_int_t ngx_http_shunt_accept(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx)
{
    const struct shunt_board *board = ngx_http_shunt_board();

    ngx_http_shunt_worth_note(r, ctx->payload.length);

    ngx_http_shunt_part_note(r, ctx);

    ctx->given = 0; /* a consent may be used for one payload only */
    ctx->mode = SHUNT_MODE_ACCEPTED;

    if (ctx->peer.lost) {
        /* the backend made the offer before it noticed the loss of the connection between the
         * agents; perhaps the backend can still be reached */
        ngx_http_shunt_fetch_early(r, ctx, SHUNT_COUNT_fetched_no_session);

    } else if (board == NULL || ngx_current_msec - ctx->given_at >= board->offer_lifetime_ms / 2) {
        /* More than half of the offer's lifetime may be over, and the agents need time to claim the
         * offer. */
        ngx_http_shunt_fetch_early(r, ctx, SHUNT_COUNT_fetched_expired);

    } else if (!ngx_http_shunt_backend_speaks(r->connection, ctx->peer.index)) {
        ngx_http_shunt_fetch_early(r, ctx, SHUNT_COUNT_fetched_speaks_for);
    }

    return ngx_http_shunt_try_filters(r, ctx);
}

/* At an intermediate: asks for the response once more, because its body is needed here. */
static void ngx_http_shunt_want_body(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx,
                                     ngx_uint_t counter)
{
    ngx_http_shunt_outcome(r, counter);
    ngx_http_shunt_vain_note(r, counter);
    ngx_http_shunt_ask_again(r, ctx);
}

static ngx_int_t ngx_http_shunt_early_header_filter(ngx_http_request_t *r)
{
    ngx_uint_t reason, pass, status;
    ngx_table_elt_t *field;
    ngx_http_shunt_ctx_t *ctx;
    ngx_http_shunt_loc_conf_t *lcf;

    ctx = ngx_http_shunt_recovery_ctx(r);
    if (ctx && ngx_http_shunt_rest_is_of(ctx, r)) {
        return ngx_http_shunt_rest_header(r, ctx);
    }

    if (ctx) {
        return ngx_http_shunt_recovery_header(r, ctx);
    }

    ctx = ngx_http_shunt_ctx(r);

    /* A second header before the first has left: this module was handling a response, but then a
     * filter or nginx has put an error page in the response's place. The payload, if any, is not
     * needed. */
    if (ctx && ctx->mode != SHUNT_MODE_NONE && !r->header_sent) {
        ngx_http_shunt_release(ctx);
        ngx_memzero(&ctx->fetch, sizeof(ctx->fetch));
        ctx->mode = SHUNT_MODE_NONE;
        ctx->header_held = 0;
    }

    if (r->upstream == NULL || r->header_sent) {
        return ngx_http_shunt_next_early_header(r);
    }

    /* not r->headers_out.status: for a proxied error page, that is the status of the error */
    status = r->upstream->headers_in.status_n;

    /* After a 206, the slice filter may clone the request. A clone skips the phases in which a
     * consent is removed, so the consent is removed here. */
    if (ctx && status == NGX_HTTP_PARTIAL_CONTENT &&
        ngx_http_shunt_strip(r, ngx_http_shunt_is_field) != NGX_OK) {
        return NGX_ERROR;
    }

    if (ctx && ctx->given && ngx_http_shunt_was_too_long(r, ctx, status)) {
        ngx_http_shunt_outcome(r, SHUNT_COUNT_relayed_long_request);
        ngx_http_shunt_ask_again(r, ctx);
        return NGX_OK;
    }

    pass = ctx && ctx->passed && ngx_http_shunt_upstream_trusted(r);
    field = ngx_http_shunt_take_offer(r, pass);

    if (field && pass) {
        return ngx_http_shunt_pass_on(r, ctx, field, status);
    }

    lcf = ngx_http_get_module_loc_conf(r, ngx_http_shunt_module);

    if (field == NULL && lcf->shunt) {
        ngx_http_shunt_worth_note(r, r->header_only ? 0 : r->headers_out.content_length_n);
    }

    if (field == NULL) {
        return ngx_http_shunt_next_early_header(r);
    }

    if (status != NGX_HTTP_OK && status != NGX_HTTP_PARTIAL_CONTENT) {
        /* An error or a redirect is complete without a body. A successful answer needs its body,
         * and an offer can only stand for the body of a 200 or a 206. */
        return status >= NGX_HTTP_OK && status < NGX_HTTP_SPECIAL_RESPONSE
                   ? ngx_http_shunt_refuse(r, field, SHUNT_COUNT_refused_malformed)
                   : ngx_http_shunt_next_early_header(r);
    }

    reason = ctx && ctx->given
                 ? ngx_http_shunt_refused(r, field, &ctx->consent, &ctx->payload, &ctx->peer)
                 : SHUNT_COUNT_refused_untrusted;

    if (reason) {
        return ngx_http_shunt_refuse(r, field, reason);
    }

    return ngx_http_shunt_accept(r, ctx);
}

/* ---- early: the body ---- */

static ngx_int_t ngx_http_shunt_early_body_filter(ngx_http_request_t *r, ngx_chain_t *in)
{
    ngx_uint_t last = 0;
    ngx_chain_t *cl;
    ngx_http_shunt_ctx_t *ctx;

    ctx = ngx_http_shunt_recovery_ctx(r);
    if (ctx) {
        return ngx_http_shunt_rest_is_of(ctx, r) ? ngx_http_shunt_rest_body(r, ctx, in) : NGX_OK;
    }

    ctx = ngx_http_shunt_ctx(r);

    if (ctx == NULL || ctx->mode < SHUNT_MODE_PASSING || ctx->mode == SHUNT_MODE_DONE) {
        return ngx_http_shunt_next_early_body(r, in);
    }

    /* the header has not reached the late filter, because a filter holds it until the body comes */
    if (ctx->mode == SHUNT_MODE_PASSING) {
        ngx_http_shunt_want_body(r, ctx, SHUNT_COUNT_relayed_filter);
    }

    if (ctx->mode == SHUNT_MODE_AGAIN) {
        return ngx_http_shunt_again_body(r, ctx, in);
    }

    /* the whole payload has passed here, and a filter (addition, slice) appends bufs to the body */
    if (ctx->mode == SHUNT_MODE_FETCH_EARLY && ctx->fetch.output && ctx->fetch.left == 0) {
        return ngx_http_shunt_next_early_body(r, in);
    }

    for (cl = in; cl; cl = cl->next) {
        last |= cl->buf->last_buf;

        if (ngx_buf_size(cl->buf) && !ngx_buf_special(cl->buf)) {
            ngx_http_shunt_outcome(r, SHUNT_COUNT_refused_body);
            ctx->mode = SHUNT_MODE_DONE;
            return NGX_ERROR;
        }
    }

    if (ctx->mode == SHUNT_MODE_ACCEPTED) {
        if (!last) {
            return NGX_OK; /* a flush; no byte of the body has come yet */
        }

        /* The header has not reached the late filter, because a filter holds it until the body
         * comes. */
        ngx_http_shunt_fetch_early(r, ctx, SHUNT_COUNT_fetched_filter);
    }

    if (ctx->mode != SHUNT_MODE_FETCH_EARLY) {
        return ngx_http_shunt_next_early_body(r, in);
    }

    if (last && ctx->fetch.output == NULL) {
        return ngx_http_shunt_fetch_begin(ctx, ngx_http_shunt_next_early_body);
    }

    return in ? NGX_OK : ngx_http_shunt_fetch_pump(ctx);
}

/* ---- late ---- */

/* Whether all filters leave the body as the backend will send it. The slice filter does not: it
 * appends to the body, and may cut another range of the same length out of it. Only the slice
 * filter sets subrequest_ranges. */
static ngx_int_t ngx_http_shunt_untouched(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx)
{
    return r->headers_out.content_length_n == (off_t) ctx->payload.length &&
           (r->headers_out.status == NGX_HTTP_OK ||
            r->headers_out.status == NGX_HTTP_PARTIAL_CONTENT) &&
           !r->filter_need_in_memory && !r->main_filter_need_in_memory && !r->chunked &&
           !r->post_action && !r->subrequest_ranges;
}

/* At an intermediate: returns 0, or the counter of the reason why the body must come here. */
static ngx_uint_t ngx_http_shunt_body_wanted(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx)
{
    if (!ngx_http_shunt_untouched(r, ctx)) {
        return SHUNT_COUNT_relayed_filter;
    }

    /* X-Accel-Limit-Rate: nginx limits buffered responses at this tier, and the tier before does
     * not know the limit */
    if (r->limit_rate && r->upstream->buffering) {
        return SHUNT_COUNT_relayed_limit_rate;
    }

    if (!ngx_http_shunt_header_fits(r, ctx)) {
        return SHUNT_COUNT_relayed_header;
    }

    return 0;
}

static ngx_int_t ngx_http_shunt_late_header_filter(ngx_http_request_t *r)
{
    ngx_uint_t reason;
    ngx_http_shunt_ctx_t *ctx;

    if (r != r->main || r->header_sent) {
        return ngx_http_shunt_next_late_header(r);
    }

    ctx = ngx_http_shunt_ctx(r);

    if (ctx && ctx->mode == SHUNT_MODE_AGAIN) {
        return NGX_OK;
    }

    if (ctx && ctx->mode == SHUNT_MODE_PASSING) {
        reason = ngx_http_shunt_body_wanted(r, ctx);

        if (reason) {
            ngx_http_shunt_want_body(r, ctx, reason);
            return NGX_OK;
        }

        ngx_http_shunt_vain_end(r);
        ctx->mode = SHUNT_MODE_NONE;
        ngx_http_clear_content_length(r);
        r->headers_out.content_length_n = 0;

        return ngx_http_shunt_next_late_header(r);
    }

    if (ctx && ctx->mode == SHUNT_MODE_ACCEPTED) {
        if (ngx_http_shunt_untouched(r, ctx)) {
            ctx->mode = SHUNT_MODE_SHORTCUT;
            return ngx_http_shunt_next_late_header(r);
        }

        ngx_http_shunt_fetch_early(r, ctx, SHUNT_COUNT_fetched_filter);
    }

    if (ctx && ctx->mode == SHUNT_MODE_FETCH_EARLY) {
        /* before the first byte has come, a failure can still become a 502 */
        ctx->header_held = 1;
        return NGX_OK;
    }

    if (ngx_http_shunt_backend_candidate(r)) {
        ctx = ngx_http_shunt_ctx(r);
        ctx->mode = SHUNT_MODE_HELD;
        ctx->header_held = 1;
        return NGX_OK;
    }

    return ngx_http_shunt_next_late_header(r);
}

static ngx_int_t ngx_http_shunt_send_header(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx)
{
    ngx_int_t rc;

    ctx->header_held = 0;
    rc = ngx_http_shunt_next_late_header(r);

    return rc == NGX_ERROR || rc > NGX_OK ? NGX_ERROR : NGX_OK;
}

/* Ends a body of which nothing is left to be sent: passes an empty last buf to a filter. */
ngx_int_t ngx_http_shunt_output_last(ngx_http_request_t *r, ngx_http_output_body_filter_pt output)
{
    ngx_chain_t out;

    out.next = NULL;
    out.buf = ngx_calloc_buf(r->pool);

    if (out.buf == NULL) {
        return NGX_ERROR;
    }

    out.buf->last_buf = 1;
    out.buf->last_in_chain = 1;

    return output(r, &out);
}

/* Handles the body of a response whose header is held back: offers or relays it, and sends the
 * header. */
static ngx_int_t ngx_http_shunt_late_backend(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx,
                                             ngx_chain_t *in)
{
    ngx_int_t rc;

    rc = ngx_http_shunt_backend_offer(r, ctx, in);
    ctx->mode = SHUNT_MODE_NONE;

    if (rc == NGX_ERROR || ngx_http_shunt_send_header(r, ctx) != NGX_OK) {
        return NGX_ERROR;
    }

    if (rc == NGX_DECLINED) {
        return ngx_http_shunt_next_late_body(r, in);
    }

    return ngx_http_shunt_output_last(r, ngx_http_shunt_next_late_body);
}

static ngx_int_t ngx_http_shunt_late_shortcut(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx,
                                              ngx_chain_t *in)
{
    ngx_chain_t *cl;

    for (cl = in; cl; cl = cl->next) {
        if (cl->buf->last_buf) {
            return ngx_http_shunt_handoff_begin(r, ctx, ngx_http_shunt_next_late_body);
        }
    }

    return ngx_http_shunt_next_late_body(r, in);
}

static ngx_int_t ngx_http_shunt_late_body_filter(ngx_http_request_t *r, ngx_chain_t *in)
{
    ngx_http_shunt_ctx_t *ctx;

    ctx = ngx_http_shunt_ctx(r);

    if (ctx == NULL) {
        return ngx_http_shunt_next_late_body(r, in);
    }

    switch (ctx->mode) {

    case SHUNT_MODE_HELD:
        return ngx_http_shunt_late_backend(r, ctx, in);

    case SHUNT_MODE_SHORTCUT:
        return ngx_http_shunt_late_shortcut(r, ctx, in);

    case SHUNT_MODE_ACTIVE:
        return NGX_AGAIN; /* nothing may be written to the connection now */

    case SHUNT_MODE_REST: /* the subrequest for the rest brings more bytes */
        return r->out ? ngx_http_shunt_next_late_body(r, NULL) : NGX_AGAIN;

    case SHUNT_MODE_COMPLETE:
        return NGX_OK;

    case SHUNT_MODE_FETCH_LATE:
        return ngx_http_shunt_fetch_pump(ctx);

    default:
        break;
    }

    if (ctx->header_held && in && ngx_http_shunt_send_header(r, ctx) != NGX_OK) {
        return NGX_ERROR;
    }

    /* The write filter fails when it is called with nothing to write. nginx makes such a call for a
     * request that was kept open for a handoff or a fetch, when no bytes wait. */
    if (in == NULL && r->out == NULL && !r->connection->buffered &&
        (ctx->fetch.output || ctx->output)) {
        return NGX_OK;
    }

    return ngx_http_shunt_next_late_body(r, in);
}

/* ---- set-up ---- */

ngx_int_t ngx_http_shunt_early_init(ngx_conf_t *cf)
{
    ngx_http_shunt_next_early_header = ngx_http_top_header_filter;
    ngx_http_top_header_filter = ngx_http_shunt_early_header_filter;

    ngx_http_shunt_next_early_body = ngx_http_top_body_filter;
    ngx_http_top_body_filter = ngx_http_shunt_early_body_filter;

    return NGX_OK;
}

ngx_int_t ngx_http_shunt_late_init(ngx_conf_t *cf)
{
    ngx_http_shunt_next_late_header = ngx_http_top_header_filter;
    ngx_http_top_header_filter = ngx_http_shunt_late_header_filter;

    ngx_http_shunt_next_late_body = ngx_http_top_body_filter;
    ngx_http_top_body_filter = ngx_http_shunt_late_body_filter;

    return NGX_OK;
}
