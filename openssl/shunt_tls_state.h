/* SPDX-License-Identifier: MIT */
/*
 * State of a TLS connection, and functions that the files behind shunt_tls.h share. A payload is a
 * body that a backend sends on the connection, under one generation of write keys.
 *
 *     shunt_tls.c         steps of a handoff
 *     shunt_tls_watch.c   OpenSSL's callbacks
 *     shunt_tls_keys.c    from a secret to the keys and records of a generation
 *     shunt_tls_gate.c    the BIO that OpenSSL writes through
 */
#ifndef SHUNT_TLS_STATE_H
#define SHUNT_TLS_STATE_H

#include "shunt_tls.h"

#define SHUNT_TLS_SECRET_BYTES_MAX 48
#define SHUNT_TLS_KEY_UPDATE_BYTES 27 /* length of a KeyUpdate's record */

/* GnuTLS ends a connection at the 9th KeyUpdate within a second of its clock
 * (lib/tls13/key_update.c). At most 8 are sent to it in 1.5 seconds, because a network may bring
 * them closer together. Other clients count only KeyUpdates without data between them, and between
 * two of Shunt's there is a payload. */
#define SHUNT_TLS_STRICT_UPDATES   8
#define SHUNT_TLS_STRICT_WINDOW_MS 1500

typedef struct {
    unsigned char secret[SHUNT_TLS_SECRET_BYTES_MAX]; /* secret of generation `secret_generation` */
    size_t secret_bytes;
    uint64_t secret_generation;
    uint64_t generation; /* generation of OpenSSL's write key */
    uint64_t records;    /* number of records that OpenSSL has written in that generation */

    BIO *gate;
    BIO *socket;             /* BIO behind the gate; NULL: there is no gate yet */
    unsigned frozen : 1;     /* a backend has the generation, and the gate is closed */
    unsigned strict : 1;     /* the client limits KeyUpdates by the clock */
    uint64_t told;           /* generation whose keys hand_over returned last */
    uint64_t handed;         /* generation that a backend has, or had last */
    uint64_t handed_records; /* number of records that OpenSSL wrote in `handed` until freeze */
    int read_ahead;          /* value of SSL_get_read_ahead before the handoff */

    unsigned char key_update[SHUNT_TLS_KEY_UPDATE_BYTES]; /* sent before OpenSSL's next record */
    size_t waiting; /* number of bytes at the end of key_update that are not sent yet */
    uint64_t updates_ms[SHUNT_TLS_STRICT_UPDATES]; /* times of the last KeyUpdates, in ms; a ring */
    uint64_t updates;                              /* number of KeyUpdates so far */
    unsigned closing : 1; /* the last KeyUpdate may still wait: its time in the ring is not final */
} shunt_tls_state_t;

/* Returns the connection's state. NULL: no secret was recorded, so the connection cannot be handed
 * off. */
shunt_tls_state_t *shunt_tls_state(const SSL *ssl);

/* Length in bytes of a suite's key; 0 if connections with the suite cannot be handed over. */
size_t shunt_tls_key_bytes(unsigned suite);
unsigned shunt_tls_suite(const SSL *ssl);

/* Fills in the keys of the present generation, from its next record on. Returns 0, or -1. */
int shunt_tls_write_keys(SSL *ssl, shunt_tls_state_t *state, struct shunt_tls *keys);
/* Encrypts the KeyUpdate that follows `payload` bytes of payload, which begin with record
 * `keys->record`. Writes the KeyUpdate's record to `out`. Returns 0, or -1. */
int shunt_tls_seal_key_update(const struct shunt_tls *keys, uint64_t payload,
                              unsigned char out[SHUNT_TLS_KEY_UPDATE_BYTES]);
/* Changes `keys` from those for a payload's first record to those for the record in which byte
 * `wire` of the payload's records lies. Sets `from` to the number of payload bytes before that
 * record. */
void shunt_tls_skip(struct shunt_tls *keys, uint64_t wire, uint64_t *from);

/* Puts the gate between OpenSSL and the connection's write BIO, at the first handoff. Returns 0, or
 * -1. */
int shunt_tls_set_gate(SSL *ssl, shunt_tls_state_t *state);
/* Sends as much of the waiting KeyUpdate as the socket takes. */
void shunt_tls_flush(shunt_tls_state_t *state);
void shunt_tls_free_gate(shunt_tls_state_t *state);

#endif
