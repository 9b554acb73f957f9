/* SPDX-License-Identifier: MIT */
/*
 * Consents that are in vain: the offers that answer them are refused, or the bodies have to come
 * through this nginx after all. Each costs more than a relayed response. The cause says whether the
 * next consent will be in vain, too:
 *
 *   the location     a filter here needs its bodies, its upstreams are not trusted, a backend does
 *                    not send to its clients: the location gives no consents for a while
 *   the connection   the kernel does not hand it off (the client is on this machine, or the table
 *                    of connections is full), or something on the path to the client drops packets:
 *                    the connection gets no consents for a while, after the first one in vain
 *   lack of proof    the connection may have proof next time; if it does not, it gets no consents
 *                    for a while, after the second one in vain
 *   the moment       a window was full, an offer old, a session lost: nothing follows from that
 *
 * A location gives no consents after a few in a row were in vain. It gives one again after a pause
 * of one response. Each further consent in vain makes the pause about twice as long: 3 responses,
 * then 7. A complete shortcut ends the pauses; at an intermediate, an offer that it passes on does.
 * Consents that one connection makes vain count only once for its location. So one connection stops
 * no location, but a location whose connections cannot be handed off stops. A consent is a header
 * field of a request, by which each tier says that it may be bypassed. An offer is a body that a
 * backend holds ready, and that its response's header names. Proof is the kernel's knowledge that a
 * client's packets pass the steering programs (the agent's BPF programs).
 *
 * Each worker counts for itself. With shunt_mean_length 0, no consent is held back because earlier
 * ones were in vain.
 */
#include "ngx_http_shunt.h"

#define NGX_HTTP_SHUNT_VAIN_ROW  4 /* consents in vain, in a row, after which a location pauses */
/* Number of further consents in vain that prolong the pause. The pause grows to 2^11 - 1
 * responses. */
#define NGX_HTTP_SHUNT_VAIN_MOST 10

typedef enum {
    SHUNT_VAIN_LOCATION = 0,
    SHUNT_VAIN_CONNECTION,
    SHUNT_VAIN_PROOF,
    SHUNT_VAIN_MOMENT
} ngx_http_shunt_cause_t;

/* Returns the kind of cause for which a consent was in vain. `counter`: the counter of the
 * reason. */
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

    default: /* the cause is a filter or a limit here, or a backend's offer or configuration */
        return SHUNT_VAIN_LOCATION;
    }
}

/* Returns 1 if this tier must not give a consent now. Counts the response, so it must be called
 * once for each request that would get a consent. */
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
    /* this consent was given before the pause began, so its cause is known already */
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

/* Notes that a consent of this request was in vain. `counter`: the reason. */
void ngx_http_shunt_vain_note(ngx_http_request_t *r, ngx_uint_t counter)
{
    ngx_http_shunt_vain_of(r, ngx_http_shunt_cause(counter));
}

/* Notes that a backend's agent has refused the handoff, after the header had left. */
void ngx_http_shunt_vain_refused(ngx_http_request_t *r, ngx_uint_t reason)
{
    ngx_http_shunt_vain_of(r, reason == SHUNT_REASON_NOT_ALLOWED   ? SHUNT_VAIN_LOCATION
                              : reason == SHUNT_REASON_UNREACHABLE ? SHUNT_VAIN_CONNECTION
                                                                   : SHUNT_VAIN_MOMENT);
}

/* Notes that a handoff has stalled. The client's own link may be the cause, so the handoff does not
 * count for the location. */
void ngx_http_shunt_vain_stalled(ngx_http_request_t *r)
{
    ngx_http_shunt_vain_t *vain = ngx_http_shunt_lifetime_vain(r->connection, 1);

    if (vain) {
        ngx_http_shunt_vain_again(vain, 1);
    }
}

/* Ends the pauses. Called when a handoff is complete and, at an intermediate, when an offer is
 * passed on. */
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
