/* SPDX-License-Identifier: MIT */
/*
 * Guesses whether more bodies will follow on a connection. A connection's first shortcut costs more
 * than later ones: the backend makes a socket for it, which begins with a small window and gets
 * every ACK. A shortcut for the only body of a connection (the cases "alone" of shunt-lab bench
 * disc) pays from about 64 KiB on if the network's packets are small. In a network that passes
 * segments of 64 KiB whole, it does not even pay at 256 KiB, the default of shunt_alone_length. So
 * the consent to a connection's first shortcut says how long a body has to be:
 *
 *   shunt_alone_length   if the connection ends with this response
 *   a part of that       else, if this connection has brought no long body yet: shunt_alone_length
 *                        times the share of long bodies that are their connection's first
 *   nothing              else
 *
 * Each worker measures for itself, and begins as if each connection had eight long bodies. A
 * shortcut is a response whose body bypasses this nginx. A consent is the request's header field
 * that asks for it.
 */
#include "ngx_http_shunt.h"

#define NGX_HTTP_SHUNT_WHOLE  65536 /* alone_share if each long body is its connection's first */
#define NGX_HTTP_SHUNT_HOPED  8     /* long bodies per connection, as assumed at first */
#define NGX_HTTP_SHUNT_RECENT 8     /* log2 of the number of long bodies in the mean alone_share */

/* History of a client's connection. It is kept as the data of a cleanup handler of the connection's
 * pool. The handler does nothing. */
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

/* Returns the length in bytes that a body needs for a shortcut. 0: the backend decides. A length of
 * at most NGX_HTTP_SHUNT_LONG is returned as 0. */
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

/* Notes that a long body has come for this connection, by a shortcut or not. */
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

/* Returns the counts of this connection's consents that led to no shortcut, or NULL. `create`:
 * makes the counts, if there are none yet. */
ngx_http_shunt_vain_t *ngx_http_shunt_lifetime_vain(ngx_connection_t *c, ngx_uint_t create)
{
    ngx_http_shunt_past_t *past;

    past = create ? ngx_http_shunt_past_create(c) : ngx_http_shunt_past(c);

    return past ? &past->vain : NULL;
}
