/* SPDX-License-Identifier: MIT */
/*
 * For tls_test.c: a server and a client of OpenSSL, connected by a socket pair, and a backend that
 * seals records with the keys that the server hands over.
 */
#ifndef SHUNT_TLS_PAIR_H
#define SHUNT_TLS_PAIR_H

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <stdio.h>
#include <stdlib.h>

#include "../../openssl/shunt_tls_state.h"

/* Ends the program at the first check that fails. */
#define CHECK(what)                                                    \
    do {                                                               \
        if (!(what)) {                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what); \
            ERR_print_errors_fp(stderr);                               \
            exit(1);                                                   \
        }                                                              \
    } while (0)

#define PAYLOAD_MAX 200000

typedef struct {
    SSL *server;
    SSL *client;
    int wire; /* the server's end of the socket pair, which a backend writes to */
    uint64_t now_ms;
} pair_t;

extern unsigned char payload[PAYLOAD_MAX];
extern unsigned char records[PAYLOAD_MAX * 2]; /* output of `sealed` */

SSL_CTX *server_ctx(void);
SSL_CTX *client_ctx(const char *suite); /* NULL: all suites */
pair_t connected(SSL_CTX *server, SSL_CTX *client, SSL_SESSION *session);
void closed(pair_t p);
void on_a_connection(void (*test)(pair_t *));

/* What a backend does. `seal` encrypts `content` as one record with this number, into `out`.
 * `sealed` encrypts it into `records`, as one record or several. Both return the number of bytes
 * that they have written. */
size_t seal(unsigned char *out, const struct shunt_tls *keys, uint64_t number, int type,
            const unsigned char *content, size_t n);
size_t sealed(const struct shunt_tls *keys, const unsigned char *content, size_t n);

/* Check that the client receives exactly these bytes next, or that nothing has come for it. */
void client_reads(SSL *client, const void *expected, size_t n);
void client_sees_nothing(SSL *client);

/* Hands over the keys for `n` bytes of payload, and freezes the server's TLS connection: nothing
 * that it writes leaves from then on. */
struct shunt_tls frozen(pair_t *p, int fresh, size_t n);

/* Makes one response whose payload, `n` bytes, comes from the backend. `meanwhile` runs before the
 * connection is taken back. Returns the keys that were handed over. */
struct shunt_tls handed_off(pair_t *p, size_t n, void (*meanwhile)(pair_t *));
void relayed(pair_t *p);

#endif
