/* SPDX-License-Identifier: MIT */
/*
 * TLS 1.3 connections whose send side is handed to a backend for a while, and comes back. Uses only
 * OpenSSL's public calls, and nothing of nginx: nginx/t/tls_test.c runs without nginx. A payload is
 * the body that the backend sends. A region is the range of the connection's sequence numbers that
 * the payload's records take.
 *
 *     watch            for each SSL_CTX, once: begins to record what OpenSSL's callbacks tell
 *     refused          says whether this connection can be handed off now
 *     is_fresh         before a response: says whether nothing was sent under the present key
 *     hand_over        after the response's header: returns the keys of a generation in which
 *                      nothing else was sent
 *     freeze           from here on OpenSSL's writes are dropped
 *     is_broken        before take_back: says whether the client sent a fatal alert, or bytes that
 *                      are not TLS
 *     rest             before take_back, if another backend continues: returns the same keys, for
 *                      the part of the payload that the client does not have yet
 *     take_back        the payload is complete: OpenSSL writes in the next generation
 *     go_on            replaces the last four steps if bytes written behind a payload wait in the
 *                      kernel (SHUNT_APPEND): OpenSSL writes in the next generation at once
 *
 * A generation of write keys lasts from one KeyUpdate to the next.
 */
#ifndef SHUNT_TLS_H
#define SHUNT_TLS_H

#include <openssl/ssl.h>

#include "shunt.h"

typedef enum {
    SHUNT_TLS_READY = 0,
    SHUNT_TLS_VERSION, /* not TLS 1.3, so there are no KeyUpdates */
    SHUNT_TLS_EARLY,   /* the handshake is not complete: the request came as 0-RTT data */
    SHUNT_TLS_SUITE,   /* the suite cannot be handed over, or the secret is not known */
    /* the kernel encrypts (kTLS), and counts records itself, or the program has replaced our BIO */
    SHUNT_TLS_KERNEL,
    SHUNT_TLS_BUDGET /* this client would not accept two more KeyUpdates now */
} shunt_tls_refusal_t;

int shunt_tls_watch(SSL_CTX *ctx);

shunt_tls_refusal_t shunt_tls_refused(SSL *ssl, uint64_t now_ms);
int shunt_tls_is_fresh(SSL *ssl);

/* `fresh`: what is_fresh said before the response. Returns 1 with `keys` filled in, which the
 * caller has to cleanse after use. 0: the socket is full, nothing is handed over, and OpenSSL
 * continues by itself. -1: the connection is broken. */
int shunt_tls_hand_over(SSL *ssl, int fresh, uint64_t now_ms, struct shunt_tls *keys);
/* Closes the gate (shunt_tls_gate.c): from here on OpenSSL's writes are dropped, and only the
 * backend encrypts records in this generation. `keys` are those that were handed over, `payload`
 * the number of bytes that the backend sends under them. Returns 0 or -1. */
int shunt_tls_freeze(SSL *ssl, const struct shunt_tls *keys, uint64_t payload);
int shunt_tls_is_broken(SSL *ssl);

/* Fills in `keys` for another backend that continues after the first `wire` bytes of the region,
 * which the client has. The new backend encrypts records from the payload's byte `from` on. If the
 * client has a part of the first of these records, this part is not sent again. Returns 0 or -1. */
int shunt_tls_rest(SSL *ssl, uint64_t wire, struct shunt_tls *keys, uint64_t *from);

/* Replaces take_back if the backend has encrypted nothing, and will not do so. OpenSSL sends a
 * KeyUpdate with the record number that the payload's first record would have had, and writes in
 * the next generation. Returns 0 or -1. */
int shunt_tls_reclaim(SSL *ssl, uint64_t now_ms);
/* Ends the backend's generation. The KeyUpdate for that leaves with the next record that OpenSSL
 * writes. Returns 0, or -1: OpenSSL has written something meanwhile that the client will not get,
 * so only a reset may follow. */
int shunt_tls_take_back(SSL *ssl, uint64_t now_ms);

/* Does freeze and take_back in one step. To be called again, with the same keys, if the payload has
 * become longer and nothing was written behind it. Returns 0, or -1: only a reset may follow. */
int shunt_tls_go_on(SSL *ssl, const struct shunt_tls *keys, uint64_t payload, uint64_t now_ms);

/* Length in bytes of a payload's records under these keys; 0 if the keys must not protect so many
 * records. crates/wire/src/tls.rs computes the same length (`Records::wire_bytes`). */
uint64_t shunt_tls_wire_bytes(const struct shunt_tls *keys, uint64_t payload);
/* Number of payload bytes in the records that are whole in the first `wire` bytes on the wire. */
uint64_t shunt_tls_payload_bytes(uint64_t content_bytes, uint64_t payload, uint64_t wire);

#endif
