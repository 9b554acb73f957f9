/* SPDX-License-Identifier: MIT */
/*
 * Consents that come to nothing: offers that are refused, or whose bodies have to come here after
 * all. Each costs more than a relayed response. Why one did says whether the next one will:
 *
 *   the location     a filter here wants its bodies, its upstreams are not trusted, a backend of
 *                    its does not send to such clients: the location gives none for a while
 *   the connection   the kernel does not hand it off: the client is on this machine, the flow table
 *                    is full; or the way between backend and client is closed. It gives none for a
 *                    while, after the first
 *   want of proof    the connection may have it next time; where it does not, as above
 *   the moment       a window was full, an offer old, a session lost: nothing follows from that
 *
 * A location gives none after a few in a row, and begins again: after one response, and after each
 * further one in vain after twice as many. One whole shortcut ends that. A connection counts there
 * once: by itself it stops no location, and where none can be handed off, nobody asks any more.
 *
 * Each worker sees for itself. shunt_mean_length 0 consents always.
 */
#include "ngx_http_shunt.h"

#define NGX_HTTP_SHUNT_VAIN_ROW  4  /* of a location, before it gives none */
#define NGX_HTTP_SHUNT_VAIN_MOST 10 /* 2^10 responses without, at most */

typedef enum {
    SHUNT_VAIN_LOCATION = 0,
    SHUNT_VAIN_CONNECTION,
    SHUNT_VAIN_PROOF,
    SHUNT_VAIN_MOMENT
} ngx_http_shunt_cause_t;

/* By the counter of what became of the response. */
static ngx_http_shunt_cause_t ngx_http_shunt_cause(ngx_uint_t counter)
{
    switch (counter) {

    case SHUNT_COUNT_fetched_begin:
    case SHUNT_COUNT_fetched_tls:
        return SHUNT_VAIN_CONNECTION;

    case SHUNT_COUNT_fetched_unproven:
        return SHUNT_VAIN_PROOF;

    case SHUNT_COUNT_fetched_unsent:
    case SHUNT_COUNT_fetched_expired:
    case SHUNT_COUNT_fetched_no_session:
        return SHUNT_VAIN_MOMENT;

    default: /* a filter, or a backend: its offer, its senders, its configuration */
        return SHUNT_VAIN_LOCATION;
    }
}

/* 1: no consent now. Asked once for each request that would have one. */
ngx_uint_t ngx_http_shunt_vain_now(ngx_http_request_t *r, ngx_http_shunt_loc_conf_t *lcf)
{
    ngx_http_shunt_vain_t *vain = &lcf->vain;

    if (lcf->mean_length == 0) {
        return 0;
    }

    if (vain->skip == 0) {
        vain = ngx_http_shunt_lifetime_vain(r->connection, 0);
    }

    if (vain == NULL || vain->skip == 0) {
        return 0;
    }

    vain->skip--;

    return 1;
}

static void ngx_http_shunt_vain_again(ngx_http_shunt_vain_t *vain, ngx_uint_t row)
{
    /* begun before: what they show is known */
    if (vain->skip) {
        return;
    }

    if (vain->row < row + NGX_HTTP_SHUNT_VAIN_MOST) {
        vain->row++;
    }

    if (vain->row >= row) {
        vain->skip = (uint16_t) (1u << (vain->row - row + 1)) - 1;
    }
}

static void ngx_http_shunt_vain_of(ngx_http_request_t *r, ngx_http_shunt_cause_t cause)
{
    ngx_uint_t known = 0;
    ngx_http_shunt_vain_t *vain;
    ngx_http_shunt_loc_conf_t *lcf = ngx_http_get_module_loc_conf(r, ngx_http_shunt_module);

    if (cause == SHUNT_VAIN_MOMENT) {
        return;
    }

    if (cause != SHUNT_VAIN_LOCATION) {
        vain = ngx_http_shunt_lifetime_vain(r->connection, 1);

        if (vain) {
            known = vain->row;
            ngx_http_shunt_vain_again(vain, cause == SHUNT_VAIN_PROOF ? 2 : 1);
        }
    }

    if (!known) {
        ngx_http_shunt_vain_again(&lcf->vain, NGX_HTTP_SHUNT_VAIN_ROW);
    }
}

/* A consent of this request's came to nothing, for the reason of that counter. */
void ngx_http_shunt_vain_note(ngx_http_request_t *r, ngx_uint_t counter)
{
    ngx_http_shunt_vain_of(r, ngx_http_shunt_cause(counter));
}

/* A backend's agent refused what it led to, when the header had left. */
void ngx_http_shunt_vain_refused(ngx_http_request_t *r, ngx_uint_t reason)
{
    ngx_http_shunt_vain_of(r, reason == SHUNT_REASON_NOT_ALLOWED   ? SHUNT_VAIN_LOCATION
                              : reason == SHUNT_REASON_UNREACHABLE ? SHUNT_VAIN_CONNECTION
                                                                   : SHUNT_VAIN_MOMENT);
}

/* It came to nothing further on: the client's own link may be to blame, and no location's. */
void ngx_http_shunt_vain_stalled(ngx_http_request_t *r)
{
    ngx_http_shunt_vain_t *vain = ngx_http_shunt_lifetime_vain(r->connection, 1);

    if (vain) {
        ngx_http_shunt_vain_again(vain, 1);
    }
}

/* One was used, and its client has everything. */
void ngx_http_shunt_vain_end(ngx_http_request_t *r)
{
    ngx_http_shunt_vain_t *vain = ngx_http_shunt_lifetime_vain(r->connection, 0);
    ngx_http_shunt_loc_conf_t *lcf = ngx_http_get_module_loc_conf(r, ngx_http_shunt_module);

    lcf->vain.row = 0;
    lcf->vain.skip = 0;

    if (vain) {
        vain->row = 0;
        vain->skip = 0;
    }
}
