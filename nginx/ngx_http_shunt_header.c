/* SPDX-License-Identifier: MIT */
/*
 * Upper bound of a response header's length, as ngx_http_header_filter() will write the header. A
 * tier (server on a request's path) reads a whole header into one buffer (proxy_buffer_size), and
 * answers 502 if the header does not fit. A header that fits may not fit any more with an offer's
 * fields, so a consent says how much room there is. An offer is a body that a backend holds ready,
 * and that its response's header names. A consent is a header field of a request, by which each
 * tier says that it may be bypassed.
 */
#include "ngx_http_shunt.h"

/* Parts that ngx_http_header_filter() makes itself, at their longest. */
#define NGX_HTTP_SHUNT_STATUS_LINE "HTTP/1.1 416 Requested Range Not Satisfiable" CRLF
#define NGX_HTTP_SHUNT_OWN_FIELDS                                                          \
    "Content-Length: 0" CRLF "Last-Modified: Mon, 28 Sep 1970 06:00:00 GMT" CRLF           \
    "Date: Mon, 28 Sep 1970 06:00:00 GMT" CRLF "Connection: keep-alive" CRLF               \
    "Keep-Alive: timeout=18446744073709551615" CRLF "Vary: Accept-Encoding" CRLF "Server:" \
    " " NGINX_VER_BUILD CRLF "Content-Type: ; charset=" CRLF CRLF

/* Room in bytes for fields that tiers on the path may add. */
#define NGX_HTTP_SHUNT_SPARE 256

#define NGX_HTTP_SHUNT_OFFER_FIELDS \
    (sizeof("Shunt-Payload: " CRLF "X-Accel-Expires: 0" CRLF) + SHUNT_PAYLOAD_BYTES)

static size_t ngx_http_shunt_header_bytes(ngx_http_request_t *r)
{
    size_t len;
    ngx_uint_t i;
    ngx_list_part_t *part;
    ngx_table_elt_t *h;

    len = sizeof(NGX_HTTP_SHUNT_STATUS_LINE NGX_HTTP_SHUNT_OWN_FIELDS) +
          r->headers_out.status_line.len + r->headers_out.content_type.len +
          r->headers_out.charset.len;

    /* nginx may make the URL in the Location field absolute */
    if (r->headers_out.location) {
        len += sizeof("https://:65535") + NGX_MAXHOSTNAMELEN;
    }

    for (part = &r->headers_out.headers.part; part; part = part->next) {
        h = part->elts;

        for (i = 0; i < part->nelts; i++) {
            if (h[i].hash) {
                len += h[i].key.len + h[i].value.len + sizeof(": " CRLF) - 1;
            }
        }
    }

    return len;
}

/* At an intermediate: whether the header, which contains an offer already, fits. */
ngx_uint_t ngx_http_shunt_header_fits(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx)
{
    return ngx_http_shunt_header_bytes(r) <= ctx->consent.header;
}

/* At the backend: whether the header would fit with an offer, which it does not contain yet. */
ngx_uint_t ngx_http_shunt_offer_fits(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx)
{
    return ngx_http_shunt_header_bytes(r) + NGX_HTTP_SHUNT_OFFER_FIELDS + NGX_HTTP_SHUNT_SPARE <=
           ctx->consent.header;
}
