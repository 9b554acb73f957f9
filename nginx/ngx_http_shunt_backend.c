/* SPDX-License-Identifier: MIT */
/*
 * The backend's side. A response to a request with a consent from a trusted address is offered to
 * the agent if it is one range of a file. Then only its header leaves. Whether the body is a file
 * is known only when it arrives. So the header of a response that might be offered, a candidate, is
 * held back until then. A response that is not offered is not changed. A consent is a header field
 * of a request, by which each tier says that it may be bypassed. An offer is a body that a backend
 * holds ready, and that its response's header names.
 */
#include "ngx_http_shunt.h"

static ngx_uint_t ngx_http_shunt_not_offered(ngx_http_request_t *r, ngx_http_shunt_loc_conf_t *lcf)
{
    const struct shunt_board *board;
    ngx_http_shunt_ctx_t *ctx = ngx_http_shunt_ctx(r);
    ngx_http_core_loc_conf_t *clcf = ngx_http_get_module_loc_conf(r, ngx_http_core_module);

    if (ctx == NULL || !ctx->received) {
        if (ctx && ctx->distrusted) {
            ngx_http_shunt_say_distrusted(r);
        }

        return SHUNT_COUNT_relayed_no_consent;
    }

    /* these limits are for bytes that this tier sends to the tier before it; an offer sends none */
    if (clcf->limit_rate || r->limit_rate_set || r->main->limit_conn_status) {
        return SHUNT_COUNT_relayed_limit_rate;
    }

    if (!ngx_http_shunt_agent_takes_offers()) {
        return SHUNT_COUNT_relayed_no_agent;
    }

    if (r->headers_out.content_length_n < 0) {
        return SHUNT_COUNT_relayed_not_file; /* the body is compressed here, or generated */
    }

    /* an empty body cannot be offered, even with a minimum of 0 */
    if (r->headers_out.content_length_n == 0 ||
        (r->headers_out.content_length_n < (off_t) lcf->offer_min_length && !ctx->consent.rest)) {
        return SHUNT_COUNT_relayed_too_small;
    }

    if (r->headers_out.content_length_n < (off_t) ctx->consent.from) {
        return SHUNT_COUNT_relayed_short_lived;
    }

    if (ngx_http_test_content_type(r, &lcf->offer_types) == NULL) {
        return SHUNT_COUNT_relayed_type;
    }

    if (!ngx_http_shunt_offer_fits(r, ctx)) {
        return SHUNT_COUNT_relayed_header;
    }

    /* several ranges of a file come as multipart/byteranges, without a Content-Range in the
     * header */
    if (r->headers_out.status == NGX_HTTP_PARTIAL_CONTENT && r->headers_out.content_range == NULL) {
        return SHUNT_COUNT_relayed_not_file;
    }

    if (ngx_http_shunt_board_find(&ctx->consent.frontend, &ctx->peer) != NGX_OK || ctx->peer.lost) {
        return SHUNT_COUNT_relayed_no_peer;
    }

    board = ngx_http_shunt_board(); /* NULL if the agent has ended in the meantime */

    if (board == NULL) {
        return SHUNT_COUNT_relayed_no_agent;
    }

    /* The rest of a payload is offered in spite of a limit: the client has the first part already,
     * and the frontend reads no body in the answer to this request. */
    if (((board->closed | ctx->peer.closed) & SHUNT_CLOSED_OFFERS) && !ctx->consent.rest) {
        return SHUNT_COUNT_relayed_offers_limit;
    }

    return 0;
}

/* Called with the final header. Returns 1 if the header has to be held back. */
ngx_int_t ngx_http_shunt_backend_candidate(ngx_http_request_t *r)
{
    ngx_uint_t reason;
    ngx_http_shunt_loc_conf_t *lcf = ngx_http_get_module_loc_conf(r, ngx_http_shunt_module);

    if (!lcf->offer || r != r->main || r->header_only || r->method != NGX_HTTP_GET ||
        (r->headers_out.status != NGX_HTTP_OK &&
         r->headers_out.status != NGX_HTTP_PARTIAL_CONTENT)) {
        return 0;
    }

    reason = ngx_http_shunt_not_offered(r, lcf);

    if (reason) {
        ngx_http_shunt_outcome(r, reason);
        return 0;
    }

    return 1;
}

/* Returns the buf that is the whole body, as one range of a file. NULL: the chain has no such
 * buf. */
static ngx_buf_t *ngx_http_shunt_whole_file(ngx_http_request_t *r, ngx_chain_t *in)
{
    ngx_uint_t last = 0;
    ngx_buf_t *b, *file = NULL;

    for (/* void */; in; in = in->next) {
        b = in->buf;
        last |= b->last_buf;

        if (ngx_buf_special(b)) {
            continue;
        }

        if (file || !b->in_file || ngx_buf_in_memory(b)) {
            return NULL;
        }

        file = b;
    }

    if (file == NULL || !last ||
        file->file_last - file->file_pos != r->headers_out.content_length_n) {
        return NULL;
    }

    return file;
}

/*
 * Whether a buf is a body in a file of nginx's cache. When nginx revalidates a cached response, it
 * rewrites the header before body_start in place (ngx_http_file_cache_update_header()). It writes
 * nothing else to the file: new content comes in a new file (ngx_http_file_cache_update(), rename).
 * This buf's descriptor stays with the old file, whose body does not change.
 */
static ngx_uint_t ngx_http_shunt_is_cached_body(ngx_http_request_t *r, ngx_buf_t *b)
{
#if (NGX_HTTP_CACHE)
    return r->cache && b->file->fd == r->cache->file.fd &&
           b->file_pos >= (off_t) r->cache->body_start;
#else
    return 0;
#endif
}

static ngx_int_t ngx_http_shunt_send_offer(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx,
                                           ngx_buf_t *b)
{
    ngx_file_info_t fi;
    struct shunt_offer offer;

    /* reads the file's size and time, by which the agent later finds out whether the file has
     * changed */
    if (ngx_fd_info(b->file->fd, &fi) == NGX_FILE_ERROR || !ngx_is_file(&fi) ||
        ngx_file_size(&fi) < b->file_last) {
        ngx_http_shunt_outcome(r, SHUNT_COUNT_relayed_not_file);
        return NGX_DECLINED;
    }

    ctx->payload.backend = ngx_http_shunt_board_name();
    ctx->payload.number = ngx_http_shunt_agent_offer_number();
    ctx->payload.length = b->file_last - b->file_pos;
    ngx_http_shunt_tag(ctx->peer.our_key, ctx->consent.nonce, ctx->payload.number,
                       ctx->payload.length, ctx->payload.tag);

    ngx_memzero(&offer, sizeof(offer));
    offer.header.kind = SHUNT_MSG_OFFER;
    offer.header.size = sizeof(offer);
    offer.peer = ctx->peer.index;
    offer.flags = ngx_http_shunt_is_cached_body(r, b) ? SHUNT_OFFER_BODY : 0;
    offer.number = ctx->payload.number;
    offer.offset = b->file_pos;
    offer.length = ctx->payload.length;
    ngx_memcpy(offer.tag, ctx->payload.tag, 16);
    ngx_http_shunt_trace(r, offer.trace);
    offer.mtime_ns = (shunt_s64) fi.st_mtim.tv_sec * 1000000000 + fi.st_mtim.tv_nsec;
    offer.size = ngx_file_size(&fi);

    if (!ngx_http_shunt_agent_takes_offers() ||
        ngx_http_shunt_agent_offer(&offer, b->file->fd) != NGX_OK) {
        ngx_http_shunt_outcome(r, SHUNT_COUNT_relayed_agent_busy);
        return NGX_DECLINED;
    }

    return NGX_OK;
}

static ngx_int_t ngx_http_shunt_add_field(ngx_http_request_t *r, const char *key, ngx_str_t *value)
{
    ngx_table_elt_t *h;

    h = ngx_list_push(&r->headers_out.headers);
    if (h == NULL) {
        return NGX_ERROR;
    }

    ngx_memzero(h, sizeof(ngx_table_elt_t));
    h->hash = 1;
    h->key.data = (u_char *) key;
    h->key.len = ngx_strlen(key);
    h->value = *value;

    return NGX_OK;
}

/* Forbids caching: an nginx on the path must not store an offer's header without its body. */
ngx_int_t ngx_http_shunt_forbid_cache(ngx_http_request_t *r)
{
    ngx_str_t zero = ngx_string("0");

    return ngx_http_shunt_add_field(r, "X-Accel-Expires", &zero);
}

/*
 * Handles the first part of the body. NGX_OK: the body was offered, and the header says so.
 * NGX_DECLINED: it has to be relayed. NGX_ERROR: the response fails.
 */
ngx_int_t ngx_http_shunt_backend_offer(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx,
                                       ngx_chain_t *in)
{
    ngx_buf_t *b;
    ngx_str_t value;

    b = ngx_http_shunt_whole_file(r, in);

    if (b == NULL) {
        ngx_http_shunt_outcome(r, SHUNT_COUNT_relayed_not_file);
        return NGX_DECLINED;
    }

    if (ctx->plain.len) {
        ngx_http_shunt_hop_refuse(r, ctx);
        return NGX_DECLINED;
    }

    if (ngx_http_shunt_send_offer(r, ctx, b) != NGX_OK) {
        return NGX_DECLINED;
    }

    if (ngx_http_shunt_format_payload(r->pool, &ctx->payload, &value) != NGX_OK ||
        ngx_http_shunt_add_field(r, "Shunt-Payload", &value) != NGX_OK ||
        ngx_http_shunt_forbid_cache(r) != NGX_OK) {
        return NGX_ERROR;
    }

    ngx_http_clear_content_length(r);
    r->headers_out.content_length_n = 0;

    b->file_pos = b->file_last; /* tells the filters before this one that the buf was sent */

    ngx_http_shunt_outcome(r, SHUNT_COUNT_offers);
    ngx_http_shunt_count(SHUNT_COUNT_offered_bytes, ctx->payload.length);
    ctx->bytes = ctx->payload.length;

    return NGX_OK;
}
