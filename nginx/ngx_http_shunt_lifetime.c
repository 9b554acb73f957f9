/* SPDX-License-Identifier: MIT */
/*
 * Will more follow on this connection? Its first shortcut costs more than those after it: the
 * backend makes a socket, which begins with a small window, and is told of every ACK. Measured
 * alone on its connection (the cases "alone" of shunt bench disc), a body is worth that from some
 * 64 KiB on where packets are small, and at 256 KiB not yet where segments of 64 KiB pass whole:
 * shunt_alone_length. So the consent to the first shortcut of a connection says how
 * long a body has to be: that length where the connection ends with this response, a part of it
 * where connections often bring no second long body, and nothing where this one has.
 *
 * Each worker sees for itself, and begins with the hope of eight long bodies on a connection.
 */
#include "ngx_http_shunt.h"

#define NGX_HTTP_SHUNT_WHOLE  65536 /* all of them are alone */
#define NGX_HTTP_SHUNT_HOPED  8
#define NGX_HTTP_SHUNT_RECENT 8 /* 2^8 long bodies: log2 of the weight of the past */

/* what a client's connection has had: in the data of a cleanup of its pool, which is not run */
typedef struct {
    unsigned long_body : 1;
    unsigned shortcut : 1;
    ngx_http_shunt_vain_t vain;
} ngx_http_shunt_past_t;

static void ngx_http_shunt_past_cleanup(void *data)
{
}

static ngx_http_shunt_past_t *ngx_http_shunt_past(ngx_connection_t *c)
{
    ngx_pool_cleanup_t *cln;

    for (cln = c->pool->cleanup; cln; cln = cln->next) {
        if (cln->handler == ngx_http_shunt_past_cleanup) {
            return cln->data;
        }
    }

    return NULL;
}

static ngx_http_shunt_past_t *ngx_http_shunt_past_create(ngx_connection_t *c)
{
    ngx_pool_cleanup_t *cln;
    ngx_http_shunt_past_t *past = ngx_http_shunt_past(c);

    if (past) {
        return past;
    }

    cln = ngx_pool_cleanup_add(c->pool, sizeof(ngx_http_shunt_past_t));
    if (cln == NULL) {
        return NULL;
    }

    cln->handler = ngx_http_shunt_past_cleanup;
    ngx_memzero(cln->data, sizeof(ngx_http_shunt_past_t));

    return cln->data;
}

void ngx_http_shunt_lifetime_init(ngx_http_shunt_loc_conf_t *lcf)
{
    lcf->alone_share = NGX_HTTP_SHUNT_WHOLE / NGX_HTTP_SHUNT_HOPED;
}

/* Of a body that is to take a shortcut; 0: as the backend likes it. */
uint64_t ngx_http_shunt_least_length(ngx_http_request_t *r, const ngx_http_shunt_loc_conf_t *lcf)
{
    uint64_t length = lcf->alone_length;
    const ngx_http_shunt_past_t *past = ngx_http_shunt_past(r->connection);

    if (past && past->shortcut) {
        return 0;
    }

    if (r->keepalive) {
        length = past && past->long_body ? 0 : length * lcf->alone_share / NGX_HTTP_SHUNT_WHOLE;
    }

    return length > NGX_HTTP_SHUNT_LONG ? length : 0;
}

/* A long body has come for this connection, whichever way. */
void ngx_http_shunt_lifetime_note(ngx_http_request_t *r, ngx_http_shunt_loc_conf_t *lcf)
{
    ngx_http_shunt_past_t *past = ngx_http_shunt_past_create(r->connection);

    if (past == NULL) {
        return;
    }

    lcf->alone_share -= lcf->alone_share >> NGX_HTTP_SHUNT_RECENT;

    if (!past->long_body) {
        lcf->alone_share += NGX_HTTP_SHUNT_WHOLE >> NGX_HTTP_SHUNT_RECENT;
    }

    past->long_body = 1;
}

void ngx_http_shunt_lifetime_shortcut(ngx_connection_t *c)
{
    ngx_http_shunt_past_t *past = ngx_http_shunt_past_create(c);

    if (past) {
        past->shortcut = 1;
    }
}

/* What has come of this connection's consents, or NULL. */
ngx_http_shunt_vain_t *ngx_http_shunt_lifetime_vain(ngx_connection_t *c, ngx_uint_t create)
{
    ngx_http_shunt_past_t *past;

    past = create ? ngx_http_shunt_past_create(c) : ngx_http_shunt_past(c);

    return past ? &past->vain : NULL;
}
