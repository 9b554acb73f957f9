/* SPDX-License-Identifier: MIT */
/*
 * TLS 1.3 connections whose send side goes to somebody else for a while and comes back. OpenSSL's
 * public calls only, and no nginx: nginx/t/tls_test.c uses it without.
 *
 *     watch            each SSL_CTX, once: remembers what OpenSSL tells while it works
 *     refused          may this connection be handed off now?
 *     is_fresh         before a response begins: nothing has gone out under the present key
 *     hand_over        after its header: the keys of a generation in which nothing else was sent
 *     freeze           from here OpenSSL writes nowhere
 *     is_broken        meanwhile: has the client sent a fatal alert, or no TLS at all?
 *     rest             another backend goes on: the same keys, from where the client is
 *     take_back        the payload is through: OpenSSL is in the next generation
 *     go_on            in place of the last four, where what is written behind a payload waits in
 *                      the kernel (SHUNT_APPEND): OpenSSL is in the next generation at once
 */
#ifndef SHUNT_TLS_H
#define SHUNT_TLS_H

#include <openssl/ssl.h>

#include "shunt.h"

typedef enum {
    SHUNT_TLS_READY = 0,
    SHUNT_TLS_VERSION, /* not TLS 1.3: no KeyUpdate */
    SHUNT_TLS_EARLY,   /* the handshake is not complete: 0-RTT */
    SHUNT_TLS_SUITE,   /* one that is not handed over, or the secret is not known */
    SHUNT_TLS_KERNEL,  /* the kernel encrypts (kTLS), and counts for itself */
    SHUNT_TLS_BUDGET   /* this client would take one more KeyUpdate amiss */
} shunt_tls_refusal_t;

int shunt_tls_watch(SSL_CTX *ctx);

shunt_tls_refusal_t shunt_tls_refused(SSL *ssl, uint64_t now_ms);
int shunt_tls_is_fresh(SSL *ssl);

/* 1: `keys` is filled, and to be cleansed after use. 0: the socket takes no more now, and nothing
 * is handed over; OpenSSL goes on by itself. -1: the connection is broken. */
int shunt_tls_hand_over(SSL *ssl, int fresh, uint64_t now_ms, struct shunt_tls *keys);
/* `keys` are those that were handed over. After this nobody but the backend seals a record in their
 * generation. */
int shunt_tls_freeze(SSL *ssl, const struct shunt_tls *keys, uint64_t payload);
int shunt_tls_is_broken(SSL *ssl);

/* For whoever goes on after so many bytes on the wire: with the payload's byte `from`, and with the
 * rest of its record. */
int shunt_tls_rest(SSL *ssl, uint64_t wire, struct shunt_tls *keys, uint64_t *from);

/* In place of take_back, where the backend has sealed nothing and will not: OpenSSL goes on with
 * the record numbers of the payload, in the next generation. 0, or -1. */
int shunt_tls_reclaim(SSL *ssl, uint64_t now_ms);
/* The KeyUpdate leaves with whatever is written next. -1: something was written meanwhile that
 * nobody will see: only a reset may follow. */
int shunt_tls_take_back(SSL *ssl, uint64_t now_ms);

/* Again, with the same keys and a longer payload: it has grown, and nothing was written behind it.
 * 0, or -1: only a reset may follow. */
int shunt_tls_go_on(SSL *ssl, const struct shunt_tls *keys, uint64_t payload, uint64_t now_ms);

/* Bytes on the wire of a payload under those keys; 0 where the keys may not protect so many. And
 * how much of the payload is whole in so many bytes on the wire. crates/wire/src/tls.rs is the
 * same. */
uint64_t shunt_tls_wire_bytes(const struct shunt_tls *keys, uint64_t payload);
uint64_t shunt_tls_payload_bytes(uint64_t content_bytes, uint64_t payload, uint64_t wire);

#endif
