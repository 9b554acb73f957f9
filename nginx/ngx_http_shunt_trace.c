/* SPDX-License-Identifier: MIT */
/*
 * The trace that a request belongs to (W3C Trace Context). The trace's id goes to the agents in
 * messages about offers, handoffs and fetches. It is in their logs and in nginx's, so that one
 * response can be followed through all tiers. A client may have chosen the id, so no decision
 * depends on it.
 */
#include "ngx_http_shunt.h"

/* Returns a request's trace id in `trace`; zeros if the request has no valid traceparent field, or
 * more than one. */
void ngx_http_shunt_trace(ngx_http_request_t *r, u_char trace[SHUNT_TRACE_BYTES])
{
    ngx_uint_t i, seen = 0;
    ngx_list_part_t *part;
    ngx_table_elt_t *h;

    for (part = &r->headers_in.headers.part; part; part = part->next) {
        h = part->elts;

        for (i = 0; i < part->nelts; i++) {
            if (h[i].key.len != sizeof("traceparent") - 1 ||
                ngx_strncasecmp(h[i].key.data, (u_char *) "traceparent", h[i].key.len) != 0) {
                continue;
            }

            if (seen++ || ngx_http_shunt_parse_traceparent(&h[i].value, trace) != NGX_OK) {
                ngx_memzero(trace, SHUNT_TRACE_BYTES);
                return;
            }
        }
    }

    if (!seen) {
        ngx_memzero(trace, SHUNT_TRACE_BYTES);
    }
}

/* Returns a text for the end of a log line: ", trace=..." or nothing. Valid until the next call. */
ngx_str_t *ngx_http_shunt_trace_text(ngx_http_request_t *r)
{
    u_char trace[SHUNT_TRACE_BYTES];
    static u_char line[sizeof(", trace=") - 1 + 2 * SHUNT_TRACE_BYTES];
    static const u_char none[SHUNT_TRACE_BYTES];
    static ngx_str_t text = {0, line};

    ngx_http_shunt_trace(r, trace);
    text.len = 0;

    if (ngx_memcmp(trace, none, sizeof(trace)) != 0) {
        text.len = ngx_hex_dump(ngx_cpymem(line, ", trace=", sizeof(", trace=") - 1), trace,
                                sizeof(trace)) -
                   line;
    }

    return &text;
}
