/* SPDX-License-Identifier: MIT */
/*
 * For tls_test.c: a server and a client of OpenSSL, joined by a socket pair, and a backend that
 * seals records with what the server hands over.
 */
#ifndef SHUNT_TLS_PAIR_H
#define SHUNT_TLS_PAIR_H

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <stdio.h>
#include <stdlib.h>

#include "../../openssl/shunt_tls_state.h"

/* Ends the program with the first thing that is not as it should be. */
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
extern unsigned char records[PAYLOAD_MAX * 2]; /* what `sealed` has made */

SSL_CTX *server_ctx(void);
SSL_CTX *client_ctx(const char *suite); /* NULL: every suite */
pair_t connected(SSL_CTX *server, SSL_CTX *client, SSL_SESSION *session);
void closed(pair_t p);
void on_a_connection(void (*test)(pair_t *));

/* a backend */
size_t seal(unsigned char *out, const struct shunt_tls *keys, uint64_t number, int type,
            const unsigned char *content, size_t n);
size_t sealed(const struct shunt_tls *keys, const unsigned char *content, size_t n);

/* what a client sees */
void client_reads(SSL *client, const void *expected, size_t n);
void client_sees_nothing(SSL *client);

/* A backend has the keys for `n` bytes of payload, and nothing of the server's leaves any more. */
struct shunt_tls frozen(pair_t *p, int fresh, size_t n);

/* One response whose payload is the backend's; `meanwhile` happens before it is taken back. */
struct shunt_tls handed_off(pair_t *p, size_t n, void (*meanwhile)(pair_t *));
void relayed(pair_t *p);

#endif
