/* SPDX-License-Identifier: MIT */
/*
 * Consents that come to nothing: offers that are refused, or whose bodies have to come here after
 * all, because a filter wants them or the connection cannot be handed off. Each costs more than a
 * relayed response. So after a few in a row a location gives none for a while, twice as long each
 * time, and then tries again; one shortcut ends that. A connection that the kernel does not hand
 * off (the client is on this machine, the flow table is full) is told from its location by the
 * first.
 *
 * Each worker sees for itself.
 */
#include "ngx_http_shunt.h"

#define NGX_HTTP_SHUNT_VAIN_ROW  4  /* of a location, before it gives none */
#define NGX_HTTP_SHUNT_VAIN_MOST 10 /* 2^10 responses without, at most */

/* 1: no consent now. Asked once for each request that would have one. */
ngx_uint_t ngx_http_shunt_vain_now(ngx_http_request_t *r, ngx_http_shunt_loc_conf_t *lcf)
{
    ngx_http_shunt_vain_t *vain = &lcf->vain;

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

/* A consent of this request's came to nothing; on_connection: because of its connection. */
void ngx_http_shunt_vain_note(ngx_http_request_t *r, ngx_uint_t on_connection)
{
    ngx_http_shunt_vain_t *vain;
    ngx_http_shunt_loc_conf_t *lcf = ngx_http_get_module_loc_conf(r, ngx_http_shunt_module);

    ngx_http_shunt_vain_again(&lcf->vain, NGX_HTTP_SHUNT_VAIN_ROW);

    if (on_connection) {
        vain = ngx_http_shunt_lifetime_vain(r->connection, 1);

        if (vain) {
            ngx_http_shunt_vain_again(vain, 1);
        }
    }
}

/* One was used. */
void ngx_http_shunt_vain_end(ngx_http_request_t *r)
{
    ngx_http_shunt_loc_conf_t *lcf = ngx_http_get_module_loc_conf(r, ngx_http_shunt_module);

    lcf->vain.row = 0;
    lcf->vain.skip = 0;
}
