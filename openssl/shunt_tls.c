/* SPDX-License-Identifier: MIT */
/*
 * Hands a generation of write keys to a backend, and ends the generation with a KeyUpdate (RFC
 * 8446, 4.6.3). OpenSSL has no call for that, and needs none. The gate is a BIO that OpenSSL writes
 * through. While the gate is closed, SSL_key_update brings OpenSSL into the next generation, and
 * sends nothing. A payload is a body that the backend seals with these keys. A region is the range
 * of the connection's sequence numbers that the payload's records take.
 */
#include "shunt_tls_state.h"

#include <openssl/err.h>

/* ---- KeyUpdates ---- */

/* Corrects the noted time of the last KeyUpdate. A KeyUpdate of take_back leaves only with the next
 * record, which may be much later. `now_ms` is the latest time at which it can have left. */
static void tls_settle_update(shunt_tls_state_t *state, uint64_t now_ms)
{
    if (state->closing) {
        state->updates_ms[(state->updates - 1) % SHUNT_TLS_STRICT_UPDATES] = now_ms;
        state->closing = state->waiting != 0;
    }
}

/* Whether two more KeyUpdates may leave now: the one that begins a generation for a payload, and
 * the one that ends it. Only some clients limit KeyUpdates (`strict`, shunt_tls_state.h). */
static int tls_in_budget(const shunt_tls_state_t *state, uint64_t now_ms)
{
    uint64_t oldest;

    if (!state->strict || state->updates + 2 <= SHUNT_TLS_STRICT_UPDATES) {
        return 1;
    }

    oldest = state->updates_ms[(state->updates + 1) % SHUNT_TLS_STRICT_UPDATES];

    return now_ms - oldest >= SHUNT_TLS_STRICT_WINDOW_MS;
}

static void tls_note_update(shunt_tls_state_t *state, uint64_t now_ms)
{
    state->updates_ms[state->updates++ % SHUNT_TLS_STRICT_UPDATES] = now_ms;
}

/* Makes OpenSSL send a KeyUpdate. Returns 1 if OpenSSL now writes in the next generation, 0 if the
 * socket is full, -1 if the connection is broken. */
static int tls_update(SSL *ssl)
{
    int n;

    ERR_clear_error();

    if (SSL_key_update(ssl, SSL_KEY_UPDATE_NOT_REQUESTED) != 1) {
        ERR_clear_error();
        return -1;
    }

    n = SSL_do_handshake(ssl);

    if (n == 1) {
        return 1;
    }

    n = SSL_get_error(ssl, n);
    ERR_clear_error();

    return n == SSL_ERROR_WANT_WRITE ? 0 : -1;
}

/* ---- steps of a handoff ---- */

shunt_tls_refusal_t shunt_tls_refused(SSL *ssl, uint64_t now_ms)
{
    shunt_tls_state_t *state = shunt_tls_state(ssl);

    if (SSL_version(ssl) != TLS1_3_VERSION) {
        return SHUNT_TLS_VERSION;
    }

    if (!SSL_is_init_finished(ssl)) {
        return SHUNT_TLS_EARLY;
    }

    if (state == NULL || state->secret_bytes == 0 ||
        shunt_tls_key_bytes(shunt_tls_suite(ssl)) == 0) {
        return SHUNT_TLS_SUITE;
    }

    /* if the second condition holds, the program has set another BIO in place of the gate */
    if (BIO_get_ktls_send(SSL_get_wbio(ssl)) || (state->gate && SSL_get_wbio(ssl) != state->gate)) {
        return SHUNT_TLS_KERNEL;
    }

    tls_settle_update(state, now_ms);

    return tls_in_budget(state, now_ms) ? SHUNT_TLS_READY : SHUNT_TLS_BUDGET;
}

int shunt_tls_is_fresh(SSL *ssl)
{
    shunt_tls_state_t *state = shunt_tls_state(ssl);

    return state && state->records == 0;
}

int shunt_tls_hand_over(SSL *ssl, int fresh, uint64_t now_ms, struct shunt_tls *keys)
{
    shunt_tls_state_t *state = shunt_tls_state(ssl);
    int rc;

    if (state == NULL || state->frozen || !SSL_is_init_finished(ssl)) {
        return -1;
    }

    tls_settle_update(state, now_ms);

    if (!fresh) {
        rc = tls_update(ssl);

        if (rc != 1) {
            return rc;
        }

        tls_note_update(state, now_ms);
    }

    state->told = state->generation;

    return state->waiting || shunt_tls_write_keys(ssl, state, keys) != 0 ? -1 : 1;
}

int shunt_tls_freeze(SSL *ssl, const struct shunt_tls *keys, uint64_t payload)
{
    shunt_tls_state_t *state = shunt_tls_state(ssl);

    if (state == NULL || state->frozen || shunt_tls_set_gate(ssl, state) != 0 || state->waiting) {
        return -1;
    }

    /* Encrypts the KeyUpdate for take_back while the keys are at hand. It must not be encrypted
     * before the region has begun: if the handoff came to nothing, OpenSSL would encrypt another
     * record with the same record number. */
    if (shunt_tls_seal_key_update(keys, payload, state->key_update) != 0) {
        return -1;
    }

    state->frozen = 1;
    state->handed = state->generation;
    state->handed_records = state->records;

    /* is_broken reads while the connection is frozen, and must read only one record at a time */
    state->read_ahead = SSL_get_read_ahead(ssl);
    SSL_set_read_ahead(ssl, 0);
    SSL_clear_mode(ssl, SSL_MODE_AUTO_RETRY);

    return 0;
}

int shunt_tls_go_on(SSL *ssl, const struct shunt_tls *keys, uint64_t payload, uint64_t now_ms)
{
    shunt_tls_state_t *state = shunt_tls_state(ssl);

    if (state == NULL) {
        return -1;
    }

    if (state->waiting == SHUNT_TLS_KEY_UPDATE_BYTES && state->records == 0 &&
        state->generation == state->told + 1 && state->handed == state->told) {
        return shunt_tls_seal_key_update(keys, payload, state->key_update);
    }

    if (state->generation != state->told || state->records != keys->record ||
        shunt_tls_freeze(ssl, keys, payload) != 0) {
        return -1;
    }

    return shunt_tls_take_back(ssl, now_ms);
}

int shunt_tls_rest(SSL *ssl, uint64_t wire, struct shunt_tls *keys, uint64_t *from)
{
    shunt_tls_state_t *state = shunt_tls_state(ssl);

    if (state == NULL || !state->frozen || state->generation != state->handed ||
        shunt_tls_write_keys(ssl, state, keys) != 0) {
        return -1;
    }

    keys->record = state->handed_records;
    shunt_tls_skip(keys, wire, from);

    return 0;
}

int shunt_tls_is_broken(SSL *ssl)
{
    char byte;
    int n;

    /* OpenSSL answers a KeyUpdate of the client before it reads the next message. The answer would
     * begin a new generation, while the backend still has the present one. So after a first
     * KeyUpdate, nothing is read until the payload is complete. */
    if (SSL_get_key_update_type(ssl) != SSL_KEY_UPDATE_NONE) {
        return 0;
    }

    ERR_clear_error();
    n = SSL_peek(ssl, &byte, 1);

    if (n > 0) {
        return 0;
    }

    n = SSL_get_error(ssl, n);
    ERR_clear_error();

    /* not broken by a close_notify: the client may continue to read, as after a FIN */
    return n != SSL_ERROR_WANT_READ && n != SSL_ERROR_WANT_WRITE && n != SSL_ERROR_ZERO_RETURN;
}

int shunt_tls_reclaim(SSL *ssl, uint64_t now_ms)
{
    shunt_tls_state_t *state = shunt_tls_state(ssl);

    if (state == NULL || !state->frozen || state->generation != state->handed ||
        state->records != state->handed_records) {
        return -1;
    }

    /* Erases the encrypted KeyUpdate. It was never sent, and has the record number after those of
     * the payload. */
    OPENSSL_cleanse(state->key_update, sizeof(state->key_update));
    state->frozen = 0;
    SSL_set_read_ahead(ssl, state->read_ahead);
    SSL_set_mode(ssl, SSL_MODE_AUTO_RETRY);

    /* begins the next generation, because a backend knows the key of this one */
    if (tls_update(ssl) < 0) {
        return -1;
    }

    tls_note_update(state, now_ms);

    return 0;
}

int shunt_tls_take_back(SSL *ssl, uint64_t now_ms)
{
    shunt_tls_state_t *state = shunt_tls_state(ssl);

    /* Fails if OpenSSL has written records since freeze: the gate has dropped them, so the client
     * will never get them. */
    if (state == NULL || !state->frozen || state->generation != state->handed ||
        state->records != state->handed_records) {
        return -1;
    }

    /* The gate drops the KeyUpdate that OpenSSL writes here. The one in state->key_update is sent
     * in its place. The sent one also answers a KeyUpdate of the client, if there was one. */
    if (tls_update(ssl) != 1 || state->generation != state->handed + 1) {
        return -1;
    }

    state->waiting = SHUNT_TLS_KEY_UPDATE_BYTES;
    state->frozen = 0;
    state->closing = 1;
    tls_note_update(state, now_ms);
    SSL_set_read_ahead(ssl, state->read_ahead);
    SSL_set_mode(ssl, SSL_MODE_AUTO_RETRY);

    return 0;
}
