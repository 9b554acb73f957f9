/* SPDX-License-Identifier: MIT */
/*
 * TLS 1.3 connections whose send side is handed to a backend for a while, and comes back. Uses only
 * OpenSSL's public calls, and nothing of nginx: nginx/t/tls_test.c runs without it.
 *
 *     watch            for each SSL_CTX, once: begins to record what OpenSSL's callbacks tell
 *     refused          says whether this connection can be handed off now
 *     is_fresh         before a response: says whether nothing was sent under the present key
 *     hand_over        after the response's header: returns the keys of a generation in which
 *                      nothing else was sent
 *     freeze           from here on OpenSSL's writes go nowhere
 *     is_broken        meanwhile: says whether the client sent a fatal alert, or no TLS at all
 *     rest             another backend continues: the same keys, from the client's position on
 *     take_back        the payload is complete: OpenSSL writes in the next generation
 *     go_on            replaces the last four, where bytes written behind a payload wait in the
 *                      kernel (SHUNT_APPEND): OpenSSL writes in the next generation at once
 */
#ifndef SHUNT_TLS_H
#define SHUNT_TLS_H

#include <openssl/ssl.h>

#include "shunt.h"

typedef enum {
    SHUNT_TLS_READY = 0,
    SHUNT_TLS_VERSION, /* not TLS 1.3: no KeyUpdate */
    SHUNT_TLS_EARLY,   /* the handshake is not complete: 0-RTT */
    SHUNT_TLS_SUITE,   /* the suite cannot be handed over, or the secret is not known */
    SHUNT_TLS_KERNEL,  /* the kernel encrypts (kTLS), and counts records itself */
    SHUNT_TLS_BUDGET   /* this client would not accept one more KeyUpdate now */
} shunt_tls_refusal_t;

int shunt_tls_watch(SSL_CTX *ctx);

shunt_tls_refusal_t shunt_tls_refused(SSL *ssl, uint64_t now_ms);
int shunt_tls_is_fresh(SSL *ssl);

/* Returns 1 with `keys` filled in, which the caller has to cleanse after use. 0: the socket is
 * full, nothing is handed over, and OpenSSL continues by itself. -1: the connection is broken. */
int shunt_tls_hand_over(SSL *ssl, int fresh, uint64_t now_ms, struct shunt_tls *keys);
/* Closes the write side, with the keys that were handed over. From here on only the backend seals
 * records in their generation. Returns 0 or -1. */
int shunt_tls_freeze(SSL *ssl, const struct shunt_tls *keys, uint64_t payload);
int shunt_tls_is_broken(SSL *ssl);

/* Returns in `keys` what another backend needs to continue after `wire` bytes on the wire. It seals
 * records from the payload's byte `from` on, and skips what the client has of the first one. */
int shunt_tls_rest(SSL *ssl, uint64_t wire, struct shunt_tls *keys, uint64_t *from);

/* Replaces take_back where the backend has sealed nothing and will not. OpenSSL's KeyUpdate takes
 * the number of the payload's first record, and OpenSSL writes in the next generation. Returns 0 or
 * -1. */
int shunt_tls_reclaim(SSL *ssl, uint64_t now_ms);
/* Ends the backend's generation. Its KeyUpdate leaves with the next record that is written. -1:
 * OpenSSL has written something meanwhile that nobody will see, so only a reset may follow. */
int shunt_tls_take_back(SSL *ssl, uint64_t now_ms);

/* Does freeze and take_back at once. Called again with the same keys for a payload that has grown,
 * while nothing is written behind it. Returns 0, or -1: only a reset may follow. */
int shunt_tls_go_on(SSL *ssl, const struct shunt_tls *keys, uint64_t payload, uint64_t now_ms);

/* Length on the wire of a payload under those keys; 0 where the keys must not protect that many
 * records. The second function returns how many payload bytes are whole in `wire` bytes on the
 * wire. crates/wire/src/tls.rs computes the same. */
uint64_t shunt_tls_wire_bytes(const struct shunt_tls *keys, uint64_t payload);
uint64_t shunt_tls_payload_bytes(uint64_t content_bytes, uint64_t payload, uint64_t wire);

#endif
