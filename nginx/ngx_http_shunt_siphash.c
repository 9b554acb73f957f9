/* SPDX-License-Identifier: MIT */
/*
 * SipHash-2-4 with 128-bit output (Aumasson and Bernstein 2012; the reference code's outlen == 16).
 * It has two uses. The tag of an offer (a body that a backend holds ready) proves for which request
 * the offer was made; its input has SHUNT_TAG_INPUT_BYTES. The `to` of a consent (a request's
 * header field) says which server the consent is meant for (hop.c).
 */
#include "ngx_http_shunt.h"

#define ROTL(x, b) (((x) << (b)) | ((x) >> (64 - (b))))

typedef struct {
    uint64_t v0, v1, v2, v3;
} ngx_http_shunt_sip_t;

static uint64_t ngx_http_shunt_load64(const u_char *p)
{
    uint64_t value;

    ngx_memcpy(&value, p, sizeof(value));
    return le64toh(value);
}

static void ngx_http_shunt_store64(u_char *p, uint64_t value)
{
    value = htole64(value);
    ngx_memcpy(p, &value, sizeof(value));
}

static void ngx_http_shunt_sip_rounds(ngx_http_shunt_sip_t *s, ngx_uint_t rounds)
{
    while (rounds--) {
        s->v0 += s->v1;
        s->v1 = ROTL(s->v1, 13) ^ s->v0;
        s->v0 = ROTL(s->v0, 32);
        s->v2 += s->v3;
        s->v3 = ROTL(s->v3, 16) ^ s->v2;
        s->v0 += s->v3;
        s->v3 = ROTL(s->v3, 21) ^ s->v0;
        s->v2 += s->v1;
        s->v1 = ROTL(s->v1, 17) ^ s->v2;
        s->v2 = ROTL(s->v2, 32);
    }
}

void ngx_http_shunt_siphash128(const u_char key[16], const u_char *data, size_t len, u_char out[16])
{
    size_t i;
    uint64_t k0 = ngx_http_shunt_load64(key), k1 = ngx_http_shunt_load64(key + 8), m;
    ngx_http_shunt_sip_t s = {0x736f6d6570736575ULL ^ k0, 0x646f72616e646f6dULL ^ k1 ^ 0xee,
                              0x6c7967656e657261ULL ^ k0, 0x7465646279746573ULL ^ k1};

    for (i = 0; i + 8 <= len; i += 8) {
        m = ngx_http_shunt_load64(data + i);
        s.v3 ^= m;
        ngx_http_shunt_sip_rounds(&s, 2);
        s.v0 ^= m;
    }

    m = (uint64_t) len << 56;

    for (/* void */; i < len; i++) {
        m |= (uint64_t) data[i] << (8 * (i & 7));
    }

    s.v3 ^= m;
    ngx_http_shunt_sip_rounds(&s, 2);
    s.v0 ^= m;

    s.v2 ^= 0xee;
    ngx_http_shunt_sip_rounds(&s, 4);
    ngx_http_shunt_store64(out, s.v0 ^ s.v1 ^ s.v2 ^ s.v3);

    s.v1 ^= 0xdd;
    ngx_http_shunt_sip_rounds(&s, 4);
    ngx_http_shunt_store64(out + 8, s.v0 ^ s.v1 ^ s.v2 ^ s.v3);
}

void ngx_http_shunt_tag(const u_char key[16], const u_char nonce[16], uint64_t number,
                        uint64_t length, u_char tag[16])
{
    u_char input[SHUNT_TAG_INPUT_BYTES];

    ngx_memcpy(input, nonce, 16);
    ngx_http_shunt_store64(input + 16, number);
    ngx_http_shunt_store64(input + 24, length);

    ngx_http_shunt_siphash128(key, input, sizeof(input), tag);
}

/* Compares two tags without an early exit: the time must not tell how much of a forged tag is
 * right. */
ngx_int_t ngx_http_shunt_tag_equal(const u_char a[16], const u_char b[16])
{
    ngx_uint_t i;
    volatile u_char difference = 0;

    for (i = 0; i < 16; i++) {
        difference |= a[i] ^ b[i];
    }

    return difference == 0;
}
