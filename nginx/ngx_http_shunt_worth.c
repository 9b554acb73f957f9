/* SPDX-License-Identifier: MIT */
/*
 * Is it worth asking? A consent costs both ends about 2 us of CPU for each request, written, read
 * and judged; a shortcut saves about 0.5 us for each KiB of a long body. So a location whose
 * responses are short does not consent. What counts is the mean, over its latest responses, of the
 * bytes that came in long bodies, relayed or not: one download among a thousand answers of an API
 * keeps the consents coming, one picture of 64 KiB among a thousand does not.
 *
 * Each worker sees for itself, and begins with the hope of long bodies.
 */
#include "ngx_http_shunt.h"

#define NGX_HTTP_SHUNT_LONGEST (16 * 1024 * 1024) /* one body counts for no more */
#define NGX_HTTP_SHUNT_HOPE    (64 * 1024)
#define NGX_HTTP_SHUNT_LATEST  12 /* 2^12 responses: log2 of the weight of the past */

void ngx_http_shunt_worth_init(ngx_http_shunt_loc_conf_t *lcf)
{
    lcf->long_bytes = (uint64_t) NGX_HTTP_SHUNT_HOPE << NGX_HTTP_SHUNT_LATEST;
}

ngx_int_t ngx_http_shunt_is_worth(const ngx_http_shunt_loc_conf_t *lcf)
{
    return lcf->long_bytes >> NGX_HTTP_SHUNT_LATEST >= lcf->mean_length;
}

/* length: of the response's body, -1 where it is unknown */
void ngx_http_shunt_worth_note(ngx_http_request_t *r, off_t length)
{
    ngx_http_shunt_loc_conf_t *lcf = ngx_http_get_module_loc_conf(r, ngx_http_shunt_module);

    lcf->long_bytes -= lcf->long_bytes >> NGX_HTTP_SHUNT_LATEST;

    if (length >= NGX_HTTP_SHUNT_LONG) {
        lcf->long_bytes += ngx_min(length, NGX_HTTP_SHUNT_LONGEST);
        ngx_http_shunt_lifetime_note(r, lcf);
    }
}
