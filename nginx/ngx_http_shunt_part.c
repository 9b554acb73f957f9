/* SPDX-License-Identifier: MIT */
/*
 * The rest of a body whose backend has failed in the middle: a range request for the same
 * representation (RFC 9110, 8.8.3 and 14.2) gets it. Two files make such requests: recovery.c asks
 * a backend to hold the rest ready (an offer; its response then has a header only), and rest.c asks
 * for the bytes. Each clones the client's request, and the clone takes the request's ordinary path,
 * as in ngx_http_slice_filter_module. This file keeps those fields of the first response that both
 * need, makes the clone's fields and timeouts, and checks that an answer is the range that was
 * asked for. A payload is a body that was offered.
 */
#include <netinet/tcp.h>

#include "ngx_http_shunt.h"

/* ---- what is kept of a response's header ---- */

/* Parses a Content-Range like "bytes 0-99/100". NGX_DECLINED: it has another form, or an unknown
 * length. */
static ngx_int_t ngx_http_shunt_parse_range(ngx_table_elt_t *field, off_t *first, off_t *last,
                                            off_t *complete)
{
    off_t *numbers[] = {first, last, complete};
    u_char *p, *start, *end, ends[] = {'-', '/', '\0'};
    ngx_uint_t i;

    if (field == NULL || field->value.len < sizeof("bytes 0-0/1") - 1 ||
        ngx_strncmp(field->value.data, "bytes ", 6) != 0) {
        return NGX_DECLINED;
    }

    p = field->value.data + 6;
    end = field->value.data + field->value.len;

    for (i = 0; i < 3; i++) {
        for (start = p; p < end && *p >= '0' && *p <= '9'; p++) {
            /* void */
        }

        *numbers[i] = ngx_atoof(start, p - start);

        if (*numbers[i] == NGX_ERROR || (i < 2 ? p == end || *p++ != ends[i] : p != end)) {
            return NGX_DECLINED;
        }
    }

    return *first <= *last && *last < *complete ? NGX_OK : NGX_DECLINED;
}

static ngx_uint_t ngx_http_shunt_is_strong(ngx_table_elt_t *etag)
{
    return etag && etag->value.len >= 2 && etag->value.data[0] == '"';
}

/* Notes whether another backend could send the rest of this response's payload. Called when the
 * offer is accepted. */
void ngx_http_shunt_part_note(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx)
{
    off_t first = 0, last, complete = ctx->payload.length;
    ngx_table_elt_t *ranges = r->headers_out.accept_ranges;

    ngx_http_shunt_loc_conf_t *lcf = ngx_http_get_module_loc_conf(r, ngx_http_shunt_module);

    ctx->etag.len = 0;

    if (lcf->recover == NGX_HTTP_SHUNT_NOBODY || !ngx_http_shunt_is_strong(r->headers_out.etag)) {
        return;
    }

    if (r->upstream->headers_in.status_n == NGX_HTTP_PARTIAL_CONTENT) {
        if (ngx_http_shunt_parse_range(r->headers_out.content_range, &first, &last, &complete) !=
                NGX_OK ||
            (uint64_t) (last - first + 1) != ctx->payload.length) {
            return;
        }

    } else if (ranges == NULL || ranges->value.len != 5 ||
               ngx_strncasecmp(ranges->value.data, (u_char *) "bytes", 5) != 0) {
        return;
    }

    ctx->etag = r->headers_out.etag->value;
    ctx->first = first;
    ctx->complete = complete;
}

/* ---- asking ---- */

static ngx_int_t ngx_http_shunt_is_replaced(ngx_table_elt_t *h)
{
    return ngx_http_shunt_is_field(h) ||
           (h->key.len == 5 && ngx_strncasecmp(h->key.data, (u_char *) "Range", 5) == 0) ||
           (h->key.len > 3 && ngx_strncasecmp(h->key.data, (u_char *) "If-", 3) == 0);
}

/* Makes the header fields of the clone: the client's fields without Shunt-*, Range and If-*. Adds a
 * Range for the payload from byte `from` on, and an If-Match for the same representation. */
ngx_int_t ngx_http_shunt_part_fields(ngx_http_request_t *sr, ngx_http_shunt_ctx_t *ctx,
                                     uint64_t from)
{
    ngx_str_t range;

    range.data = ngx_pnalloc(sr->pool, sizeof("bytes=-") + 2 * NGX_OFF_T_LEN);

    if (range.data == NULL || ngx_http_shunt_strip(sr, ngx_http_shunt_is_replaced) != NGX_OK) {
        return NGX_ERROR;
    }

    range.len = ngx_sprintf(range.data, "bytes=%O-%O", ctx->first + (off_t) from,
                            ctx->first + (off_t) ctx->payload.length - 1) -
                range.data;

    if (ngx_http_shunt_add_request_field(sr, "Range", "range", &range) != NGX_OK) {
        return NGX_ERROR;
    }

    return ngx_http_shunt_add_request_field(sr, "If-Match", "if-match", &ctx->etag);
}

/*
 * Shortens the timeouts of a request to `connect` and `answer` milliseconds. Returns the location's
 * own configuration, or NULL if no upstream is asked or there is no memory. The location's own
 * timeouts suit clients that have got nothing yet, and would be too long. If a server has
 * acknowledged nothing for `unacknowledged` milliseconds, it counts as unreachable, and nginx tries
 * the next one.
 */
ngx_http_upstream_conf_t *ngx_http_shunt_part_impatiently(ngx_http_request_t *sr,
                                                          ngx_msec_t connect, ngx_msec_t answer,
                                                          int unacknowledged)
{
    ngx_connection_t *c;
    ngx_http_upstream_t *u = sr->upstream;
    ngx_http_upstream_conf_t *conf, *own;

    if (u == NULL || u->conf == NULL) {
        return NULL;
    }

    conf = ngx_palloc(sr->pool, sizeof(ngx_http_upstream_conf_t));
    if (conf == NULL) {
        return NULL;
    }

    own = u->conf;
    *conf = *own;
    conf->connect_timeout = ngx_min(conf->connect_timeout, connect);
    conf->read_timeout = ngx_min(conf->read_timeout, answer);
    u->conf = conf;

    c = u->peer.connection;
    if (c == NULL) {
        return own;
    }

    (void) setsockopt(c->fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unacknowledged, sizeof(int));

    if (c->write->timer_set) {
        ngx_add_timer(c->write, conf->connect_timeout);
    }

    if (c->read->timer_set) {
        ngx_add_timer(c->read, conf->read_timeout);
    }

    return own;
}

/* Ends a request for the rest. Called when its answer is not needed any more, and before the
 * answer's body is read. */
void ngx_http_shunt_part_end(ngx_http_request_t *sr)
{
    sr->write_event_handler = ngx_http_request_empty_handler; /* if `sr` has not begun to run */
    (void) ngx_http_shunt_end_upstream(sr);
    ngx_http_finalize_request(sr, NGX_OK);
}

/* ---- the answer ---- */

/* Whether the answer is an error that another server, or the same server a little later, may not
 * repeat. A server that lacks the file, or has another version of it (412), is no exception: while
 * files are rolled out, servers differ. */
ngx_uint_t ngx_http_shunt_part_is_error(ngx_http_request_t *sr)
{
    ngx_uint_t status = sr->upstream ? sr->upstream->headers_in.status_n : 0;

    return status == 0 || status >= NGX_HTTP_BAD_REQUEST;
}

/* Returns a text that says which error the answer is. */
static const char *ngx_http_shunt_part_error(ngx_http_request_t *sr)
{
    switch (sr->upstream ? sr->upstream->headers_in.status_n : 0) {

    case NGX_HTTP_PRECONDITION_FAILED:
        return "that server has another ETag (412); copy files with their times";

    case NGX_HTTP_NOT_FOUND:
        return "that server has no such file (404)";

    default:
        return "the response is an error";
    }
}

/* Returns NULL if the answer is the payload from byte `from` on, else a text that says why not. */
const char *ngx_http_shunt_part_is_not(ngx_http_request_t *sr, ngx_http_shunt_ctx_t *ctx,
                                       uint64_t from)
{
    off_t first, last, complete;
    ngx_http_upstream_t *u = sr->upstream;
    ngx_table_elt_t *etag = sr->headers_out.etag;

    if (ngx_http_shunt_part_is_error(sr)) {
        return ngx_http_shunt_part_error(sr);
    }

    if (u == NULL || u->headers_in.status_n != NGX_HTTP_PARTIAL_CONTENT) {
        return "it is no partial response";
    }

    if (!ngx_http_shunt_is_strong(etag) || etag->value.len != ctx->etag.len ||
        ngx_memcmp(etag->value.data, ctx->etag.data, ctx->etag.len) != 0) {
        return "it has another ETag";
    }

    if (ngx_http_shunt_parse_range(sr->headers_out.content_range, &first, &last, &complete) !=
            NGX_OK ||
        first != ctx->first + (off_t) from ||
        last != ctx->first + (off_t) ctx->payload.length - 1 || complete != ctx->complete) {
        return "it is another range";
    }

    return NULL;
}
