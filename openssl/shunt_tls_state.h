/* SPDX-License-Identifier: MIT */
/*
 * What is known of a TLS connection, and what the files of shunt_tls.h know of each other.
 *
 *     shunt_tls.c         the life of a handoff
 *     shunt_tls_watch.c   what OpenSSL tells while it works
 *     shunt_tls_keys.c    from a secret to the keys and records of a generation
 *     shunt_tls_gate.c    what OpenSSL writes through
 */
#ifndef SHUNT_TLS_STATE_H
#define SHUNT_TLS_STATE_H

#include "shunt_tls.h"

#define SHUNT_TLS_SECRET_BYTES_MAX 48
#define SHUNT_TLS_KEY_UPDATE_BYTES 27 /* its record */

/* GnuTLS ends a connection at the 9th KeyUpdate within a second of its clock
 * (lib/tls13/key_update.c). They leave here no faster than 8 in 1.5 seconds: a network may bring
 * them closer together. Others count only KeyUpdates without data between them, and between two of
 * ours is a payload. */
#define SHUNT_TLS_STRICT_UPDATES   8
#define SHUNT_TLS_STRICT_WINDOW_MS 1500

typedef struct {
    unsigned char secret[SHUNT_TLS_SECRET_BYTES_MAX]; /* of generation `secret_generation` */
    size_t secret_bytes;
    uint64_t secret_generation;
    uint64_t generation; /* of OpenSSL's write key */
    uint64_t records;    /* written in it */

    BIO *gate;
    BIO *socket;             /* what the gate leads to; NULL: there is no gate yet */
    unsigned frozen : 1;     /* a backend has the generation, and nothing passes the gate */
    unsigned strict : 1;     /* the client counts KeyUpdates by the clock */
    uint64_t told;           /* the generation whose keys were told last */
    uint64_t handed;         /* the generation that a backend has or had last */
    uint64_t handed_records; /* and how much of it was written here */
    int read_ahead;          /* as it was before */

    unsigned char key_update[SHUNT_TLS_KEY_UPDATE_BYTES]; /* to leave before the next record */
    size_t waiting;                                       /* how many bytes of it, from its end */
    uint64_t updates_ms[SHUNT_TLS_STRICT_UPDATES];        /* when the last ones were sent, a ring */
    uint64_t updates;
    unsigned closing : 1; /* when the last one of those leaves is not known yet */
} shunt_tls_state_t;

/* NULL: nothing is known, and the connection is not handed off. */
shunt_tls_state_t *shunt_tls_state(const SSL *ssl);

/* Length of a suite's key; 0 for one that is not handed over. */
size_t shunt_tls_key_bytes(unsigned suite);
unsigned shunt_tls_suite(const SSL *ssl);

/* Those of the present generation, from its next record on. 0, or -1. */
int shunt_tls_write_keys(SSL *ssl, shunt_tls_state_t *state, struct shunt_tls *keys);
/* The KeyUpdate that follows a payload, for `state->key_update`. 0, or -1. */
int shunt_tls_seal_key_update(const struct shunt_tls *keys, uint64_t payload,
                              unsigned char out[SHUNT_TLS_KEY_UPDATE_BYTES]);
/* From the first record's keys to those for the rest after so many bytes on the wire, and where in
 * the payload that begins. */
void shunt_tls_skip(struct shunt_tls *keys, uint64_t wire, uint64_t *from);

/* Between OpenSSL and the connection's write BIO, from the first handoff on. 0, or -1. */
int shunt_tls_set_gate(SSL *ssl, shunt_tls_state_t *state);
/* Sends the KeyUpdate that waits before anything else is written, as far as the socket takes it. */
void shunt_tls_flush(shunt_tls_state_t *state);
void shunt_tls_free_gate(shunt_tls_state_t *state);

#endif
