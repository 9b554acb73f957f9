/* SPDX-License-Identifier: MIT */
/*
 * Parses and formats the header fields Shunt-Consent and Shunt-Payload (docs/protocols.md). Parsing
 * is strict: it accepts only what this file and hop.c would write, so that two tiers (servers on a
 * request's path) can never read one field differently. Also parses the field "traceparent", which
 * is not Shunt's. Shunt-Consent is a consent: by it each tier says that it may be bypassed.
 * Shunt-Payload names an offer: a body that a backend holds ready.
 */
#include "ngx_http_shunt.h"

#define NGX_HTTP_SHUNT_CONSENT_START "1; frontend="

/* A `to` that names no server: SHUNT_TO_BYTES bytes of 0, in hex. */
#define NGX_HTTP_SHUNT_TO_NOBODY "0000000000000000"

typedef struct {
    u_char *pos;
    u_char *last;
} ngx_http_shunt_cursor_t;

static ngx_int_t ngx_http_shunt_take_literal(ngx_http_shunt_cursor_t *c, const char *literal)
{
    size_t len = ngx_strlen(literal);

    if ((size_t) (c->last - c->pos) < len || ngx_memcmp(c->pos, literal, len) != 0) {
        return NGX_ERROR;
    }

    c->pos += len;
    return NGX_OK;
}

static ngx_int_t ngx_http_shunt_take_name(ngx_http_shunt_cursor_t *c, ngx_str_t *name)
{
    u_char ch;

    name->data = c->pos;

    for (/* void */; c->pos < c->last; c->pos++) {
        ch = *c->pos;

        if ((ch < 'a' || ch > 'z') && (ch < '0' || ch > '9') && ch != '-' && ch != '_' &&
            ch != '.') {
            break;
        }
    }

    name->len = c->pos - name->data;

    /* a name of SHUNT_NAME_BYTES would leave no room for the NUL that ends it in the agent's list
     * of peers */
    return (name->len > 0 && name->len < SHUNT_NAME_BYTES) ? NGX_OK : NGX_ERROR;
}

static u_char *ngx_http_shunt_put(u_char *p, const char *literal)
{
    return ngx_cpymem(p, literal, ngx_strlen(literal));
}

/* Values of the hex digits, for the characters '0' to 'f'. 16 marks other characters, capital
 * letters included. */
static const u_char ngx_http_shunt_hex_values[] = {
    0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  16, 16, 16, 16, 16, 16, 16, 16, 16,
    16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16,
    16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 10, 11, 12, 13, 14, 15,
};

static u_char ngx_http_shunt_hex_digit(u_char ch)
{
    size_t i = (u_char) (ch - '0');

    return i < sizeof(ngx_http_shunt_hex_values) ? ngx_http_shunt_hex_values[i] : 16;
}

static ngx_int_t ngx_http_shunt_take_hex(ngx_http_shunt_cursor_t *c, u_char *out, size_t bytes)
{
    size_t i;
    u_char high, low, seen = 0;

    if ((size_t) (c->last - c->pos) < 2 * bytes) {
        return NGX_ERROR;
    }

    for (i = 0; i < bytes; i++) {
        high = ngx_http_shunt_hex_digit(*c->pos++);
        low = ngx_http_shunt_hex_digit(*c->pos++);

        seen |= high | low;
        out[i] = (u_char) (high << 4 | low);
    }

    return seen < 16 ? NGX_OK : NGX_ERROR;
}

/* Parses a number from 1 to max, without a leading zero. Compares with max before it multiplies,
 * because the product might overflow. */
static ngx_int_t ngx_http_shunt_take_decimal(ngx_http_shunt_cursor_t *c, uint64_t max,
                                             uint64_t *out)
{
    u_char ch;
    uint64_t value = 0;

    if (c->pos == c->last || *c->pos == '0') {
        return NGX_ERROR;
    }

    for (/* void */; c->pos < c->last; c->pos++) {
        ch = *c->pos;

        if (ch < '0' || ch > '9') {
            break;
        }

        if (value > (max - (ch - '0')) / 10) {
            return NGX_ERROR;
        }

        value = value * 10 + (ch - '0');
    }

    *out = value;
    return value ? NGX_OK : NGX_ERROR;
}

static ngx_int_t ngx_http_shunt_take_start(ngx_http_shunt_cursor_t *c,
                                           ngx_http_shunt_consent_t *consent)
{
    if (ngx_http_shunt_take_literal(c, NGX_HTTP_SHUNT_CONSENT_START) != NGX_OK ||
        ngx_http_shunt_take_name(c, &consent->frontend) != NGX_OK ||
        ngx_http_shunt_take_literal(c, "; nonce=") != NGX_OK ||
        ngx_http_shunt_take_hex(c, consent->nonce, 16) != NGX_OK) {
        return NGX_ERROR;
    }

    return ngx_http_shunt_take_literal(c, "; to=");
}

/* Parses the beginning of a consent that this tier has written: frontend, nonce and `to`. *to_at
 * gets the offset of `to` in the field. */
ngx_int_t ngx_http_shunt_parse_start(ngx_str_t *field, ngx_http_shunt_consent_t *consent,
                                     size_t *to_at)
{
    ngx_http_shunt_cursor_t c = {field->data, field->data + field->len};

    if (ngx_http_shunt_take_start(&c, consent) != NGX_OK) {
        return NGX_ERROR;
    }

    *to_at = c.pos - field->data;

    return ngx_http_shunt_take_hex(&c, consent->to, SHUNT_TO_BYTES);
}

ngx_int_t ngx_http_shunt_parse_consent(ngx_str_t *field, ngx_http_shunt_consent_t *consent)
{
    uint64_t tiers;
    ngx_http_shunt_cursor_t c = {field->data, field->data + field->len};

    if (ngx_http_shunt_take_start(&c, consent) != NGX_OK ||
        ngx_http_shunt_take_hex(&c, consent->to, SHUNT_TO_BYTES) != NGX_OK ||
        ngx_http_shunt_take_literal(&c, "; tiers=") != NGX_OK ||
        ngx_http_shunt_take_decimal(&c, SHUNT_TIERS_MAX, &tiers) != NGX_OK) {
        return NGX_ERROR;
    }

    consent->tiers = (ngx_uint_t) tiers;
    consent->rest = ngx_http_shunt_take_literal(&c, "; rest=1") == NGX_OK;
    consent->from = 0;
    consent->header = SHUNT_HEADER_BYTES;

    if (ngx_http_shunt_take_literal(&c, "; from=") == NGX_OK &&
        (consent->rest ||
         ngx_http_shunt_take_decimal(&c, NGX_MAX_OFF_T_VALUE, &consent->from) != NGX_OK)) {
        return NGX_ERROR;
    }

    if (ngx_http_shunt_take_literal(&c, "; header=") == NGX_OK &&
        (ngx_http_shunt_take_decimal(&c, NGX_MAX_OFF_T_VALUE, &consent->header) != NGX_OK ||
         consent->header == SHUNT_HEADER_BYTES)) {
        return NGX_ERROR;
    }

    return c.pos == c.last ? NGX_OK : NGX_ERROR;
}

ngx_int_t ngx_http_shunt_parse_payload(ngx_str_t *field, ngx_http_shunt_payload_t *payload)
{
    u_char number[8];
    ngx_uint_t i;
    ngx_http_shunt_cursor_t c = {field->data, field->data + field->len};

    if (ngx_http_shunt_take_literal(&c, "1; backend=") != NGX_OK ||
        ngx_http_shunt_take_name(&c, &payload->backend) != NGX_OK ||
        ngx_http_shunt_take_literal(&c, "; offer=") != NGX_OK ||
        ngx_http_shunt_take_hex(&c, number, 8) != NGX_OK ||
        ngx_http_shunt_take_literal(&c, "; length=") != NGX_OK ||
        ngx_http_shunt_take_decimal(&c, NGX_MAX_OFF_T_VALUE, &payload->length) != NGX_OK ||
        ngx_http_shunt_take_literal(&c, "; tag=") != NGX_OK ||
        ngx_http_shunt_take_hex(&c, payload->tag, 16) != NGX_OK || c.pos != c.last) {
        return NGX_ERROR;
    }

    payload->number = 0;

    for (i = 0; i < 8; i++) {
        payload->number = payload->number << 8 | number[i];
    }

    return NGX_OK;
}

/*
 * Parses "traceparent" (W3C Trace Context, 3.2): VERSION-TRACE_ID-PARENT_ID-FLAGS, each in lower
 * case hex. Version 00 ends there; a later version may continue after a dash. Ids of zeros and
 * version ff are invalid.
 */
ngx_int_t ngx_http_shunt_parse_traceparent(ngx_str_t *field, u_char trace[SHUNT_TRACE_BYTES])
{
    u_char version, parent[8], flags;
    static const u_char zeros[SHUNT_TRACE_BYTES];
    ngx_http_shunt_cursor_t c = {field->data, field->data + field->len};

    if (ngx_http_shunt_take_hex(&c, &version, 1) != NGX_OK || version == 0xff ||
        ngx_http_shunt_take_literal(&c, "-") != NGX_OK ||
        ngx_http_shunt_take_hex(&c, trace, SHUNT_TRACE_BYTES) != NGX_OK ||
        ngx_http_shunt_take_literal(&c, "-") != NGX_OK ||
        ngx_http_shunt_take_hex(&c, parent, sizeof(parent)) != NGX_OK ||
        ngx_http_shunt_take_literal(&c, "-") != NGX_OK ||
        ngx_http_shunt_take_hex(&c, &flags, 1) != NGX_OK) {
        return NGX_ERROR;
    }

    if (c.pos != c.last && (version == 0 || *c.pos != '-')) {
        return NGX_ERROR;
    }

    return ngx_memcmp(trace, zeros, SHUNT_TRACE_BYTES) != 0 &&
                   ngx_memcmp(parent, zeros, sizeof(parent)) != 0
               ? NGX_OK
               : NGX_ERROR;
}

/* Formats a consent. Its `to` is zeros: hop.c writes the final one when the upstream is chosen. */
ngx_int_t ngx_http_shunt_format_consent(ngx_pool_t *pool, ngx_http_shunt_consent_t *consent,
                                        ngx_str_t *field)
{
    u_char *p;

    p = ngx_pnalloc(pool, SHUNT_CONSENT_BYTES);
    if (p == NULL) {
        return NGX_ERROR;
    }

    field->data = p;
    p = ngx_http_shunt_put(p, NGX_HTTP_SHUNT_CONSENT_START);
    p = ngx_cpymem(p, consent->frontend.data, consent->frontend.len);
    p = ngx_http_shunt_put(p, "; nonce=");
    p = ngx_hex_dump(p, consent->nonce, 16);
    p = ngx_http_shunt_put(p, "; to=" NGX_HTTP_SHUNT_TO_NOBODY "; tiers=");
    p = ngx_sprintf(p, "%ui", consent->tiers);

    if (consent->rest) {
        p = ngx_http_shunt_put(p, "; rest=1");
    }

    if (consent->from) {
        p = ngx_sprintf(p, "; from=%uL", consent->from);
    }

    if (consent->header != SHUNT_HEADER_BYTES) {
        p = ngx_sprintf(p, "; header=%uL", consent->header);
    }

    field->len = p - field->data;

    return NGX_OK;
}

ngx_int_t ngx_http_shunt_format_payload(ngx_pool_t *pool, ngx_http_shunt_payload_t *payload,
                                        ngx_str_t *field)
{
    u_char *p;

    p = ngx_pnalloc(pool, SHUNT_PAYLOAD_BYTES);
    if (p == NULL) {
        return NGX_ERROR;
    }

    field->data = p;
    p = ngx_sprintf(p, "1; backend=%V; offer=%016xL; length=%uL; tag=", &payload->backend,
                    payload->number, payload->length);
    p = ngx_hex_dump(p, payload->tag, 16);
    field->len = p - field->data;

    return NGX_OK;
}
