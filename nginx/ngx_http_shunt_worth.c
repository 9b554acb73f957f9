/* SPDX-License-Identifier: MIT */
/*
 * Whether consents are worth their cost. A consent costs both ends about 2 us of CPU for each
 * request, to write, read and judge it. A shortcut saves about 0.5 us for each KiB of a long body.
 * So a location with short responses gives no consents. The criterion is the mean, over its latest
 * responses, of the bytes that came in long bodies, relayed or not. By default, this mean has to be
 * at least 4 KiB: one download of 5 MiB among a thousand answers of an API is enough, one picture
 * of 64 KiB is not. A consent is a header field of a request, by which each tier says that it may
 * be bypassed. A shortcut is a response whose body bypasses this nginx.
 *
 * Each worker measures for itself, and begins as if bodies were long.
 */
#include "ngx_http_shunt.h"

#define NGX_HTTP_SHUNT_LONGEST (16 * 1024 * 1024) /* bytes; longer bodies count as this */
#define NGX_HTTP_SHUNT_HOPE    (64 * 1024)        /* bytes, the mean that a worker begins with */
#define NGX_HTTP_SHUNT_LATEST  12                 /* log2 of the number of responses in the mean */

void ngx_http_shunt_worth_init(ngx_http_shunt_loc_conf_t *lcf)
{
    lcf->long_bytes = (uint64_t) NGX_HTTP_SHUNT_HOPE << NGX_HTTP_SHUNT_LATEST;
}

ngx_int_t ngx_http_shunt_is_worth(const ngx_http_shunt_loc_conf_t *lcf)
{
    return lcf->long_bytes >> NGX_HTTP_SHUNT_LATEST >= lcf->mean_length;
}

/* Notes a response. `length`: number of bytes in its body, or -1 if this is unknown. */
void ngx_http_shunt_worth_note(ngx_http_request_t *r, off_t length)
{
    ngx_http_shunt_loc_conf_t *lcf = ngx_http_get_module_loc_conf(r, ngx_http_shunt_module);

    lcf->long_bytes -= lcf->long_bytes >> NGX_HTTP_SHUNT_LATEST;

    if (length >= NGX_HTTP_SHUNT_LONG) {
        lcf->long_bytes += ngx_min(length, NGX_HTTP_SHUNT_LONGEST);
        ngx_http_shunt_lifetime_note(r, lcf);
    }
}
