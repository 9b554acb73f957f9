/* SPDX-License-Identifier: MIT */
/*
 * Fuzzes the parsers of the nginx module's header fields (libFuzzer). If a parser accepts one of
 * Shunt's fields, writing the parsed values must give the same field again. So no two tiers
 * (servers on a request's path) can read one field differently.
 */
#include <assert.h>
#include <inttypes.h>
#include <stdio.h>

#include "ngx_http_shunt.h"

/* Stand-ins for nginx's functions that the module calls when it writes fields. The fuzzer only has
 * the module parse fields, so these functions are never called. */
void *ngx_pnalloc(ngx_pool_t *pool, size_t size)
{
    abort();
}

u_char *ngx_sprintf(u_char *buf, const char *fmt, ...)
{
    abort();
}

u_char *ngx_hex_dump(u_char *dst, u_char *src, size_t len)
{
    abort();
}

static void ngx_http_shunt_fuzz_hex(char *out, const u_char *bytes, size_t n)
{
    size_t i;

    for (i = 0; i < n; i++) {
        snprintf(out + 2 * i, 3, "%02x", bytes[i]);
    }
}

static void ngx_http_shunt_fuzz_same(const char *written, const uint8_t *data, size_t size)
{
    assert(strlen(written) == size && memcmp(written, data, size) == 0);
}

/* If a traceparent is accepted, its trace id stands in the field at the place that version 00 has
 * for it, in lower case, and is not all zeros. */
static void ngx_http_shunt_fuzz_traceparent(ngx_str_t *field)
{
    char hex[2 * SHUNT_TRACE_BYTES + 1];
    u_char trace[SHUNT_TRACE_BYTES];

    if (ngx_http_shunt_parse_traceparent(field, trace) == NGX_OK) {
        ngx_http_shunt_fuzz_hex(hex, trace, sizeof(trace));
        assert(field->len >= 55 && memcmp(field->data + 3, hex, 2 * SHUNT_TRACE_BYTES) == 0);
        assert(strspn(hex, "0") < 2 * SHUNT_TRACE_BYTES);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    size_t to_at;
    char text[512], from[32] = "", header[32] = "", hex[33], to[17];
    ngx_str_t field = {size, (u_char *) data};
    ngx_http_shunt_consent_t consent, start;
    ngx_http_shunt_payload_t payload;

    if (ngx_http_shunt_parse_consent(&field, &consent) == NGX_OK) {
        ngx_http_shunt_fuzz_hex(hex, consent.nonce, 16);
        ngx_http_shunt_fuzz_hex(to, consent.to, SHUNT_TO_BYTES);
        assert(ngx_http_shunt_parse_start(&field, &start, &to_at) == NGX_OK);
        assert(memcmp(start.nonce, consent.nonce, 16) == 0);
        if (consent.from) {
            snprintf(from, sizeof(from), "; from=%" PRIu64, consent.from);
        }
        if (consent.header != SHUNT_HEADER_BYTES) {
            snprintf(header, sizeof(header), "; header=%" PRIu64, consent.header);
        }
        snprintf(text, sizeof(text), "1; frontend=%.*s; nonce=%s; to=%s; tiers=%lu%s%s%s",
                 (int) consent.frontend.len, consent.frontend.data, hex, to, consent.tiers,
                 consent.rest ? "; rest=1" : "", from, header);
        ngx_http_shunt_fuzz_same(text, data, size);
    }

    /* hop.c writes `to` at this offset, so all of `to` must lie in the field */
    if (ngx_http_shunt_parse_start(&field, &start, &to_at) == NGX_OK) {
        ngx_http_shunt_fuzz_hex(to, start.to, SHUNT_TO_BYTES);
        assert(to_at + 2 * SHUNT_TO_BYTES <= size);
        assert(memcmp(data + to_at, to, 2 * SHUNT_TO_BYTES) == 0);
    }

    if (ngx_http_shunt_parse_payload(&field, &payload) == NGX_OK) {
        ngx_http_shunt_fuzz_hex(hex, payload.tag, 16);
        snprintf(text, sizeof(text),
                 "1; backend=%.*s; offer=%016" PRIx64 "; length=%" PRIu64 "; tag=%s",
                 (int) payload.backend.len, payload.backend.data, payload.number, payload.length,
                 hex);
        ngx_http_shunt_fuzz_same(text, data, size);
    }

    ngx_http_shunt_fuzz_traceparent(&field);

    return 0;
}
