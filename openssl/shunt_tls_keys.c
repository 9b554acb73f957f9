/* SPDX-License-Identifier: MIT */
/*
 * Derives the keys of a generation (the time between two KeyUpdates) from the server's application
 * traffic secret (RFC 8446, 7.1 to 7.3). Encrypts, with these keys, the record that ends the
 * generation. Computes the length of a payload's records. A payload is the body that a backend
 * sends. The backend gets the key and the IV of one generation, from which no later key can be
 * derived.
 */
#include "shunt_tls_state.h"

#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <string.h>

#define TLS_CONTENT_BYTES  16384
#define TLS_HEADER_BYTES   5
#define TLS_TAG_BYTES      16
#define TLS_OVERHEAD_BYTES 22 /* header, content type, tag */

size_t shunt_tls_key_bytes(unsigned suite)
{
    switch (suite) {
    case 0x1301: /* TLS_AES_128_GCM_SHA256 */
        return 16;
    case 0x1302: /* TLS_AES_256_GCM_SHA384 */
    case 0x1303: /* TLS_CHACHA20_POLY1305_SHA256 */
        return 32;
    default:
        return 0;
    }
}

unsigned shunt_tls_suite(const SSL *ssl)
{
    const SSL_CIPHER *cipher = SSL_get_current_cipher(ssl);

    return cipher ? SSL_CIPHER_get_protocol_id(cipher) : 0;
}

/* Context for HMAC with the suite's hash: SHA-384 if `hash_bytes` is 48, and else SHA-256. It is
 * kept for the process's lifetime, because OpenSSL 3.0 takes longer to find an algorithm by its
 * name than to use it. */
static EVP_MAC_CTX *tls_hmac(size_t hash_bytes)
{
    static EVP_MAC_CTX *contexts[2];
    EVP_MAC_CTX **context = &contexts[hash_bytes == 48];
    OSSL_PARAM params[] = {OSSL_PARAM_construct_utf8_string(OSSL_MAC_PARAM_DIGEST,
                                                            hash_bytes == 48 ? "SHA384" : "SHA256",
                                                            0),
                           OSSL_PARAM_construct_end()};
    EVP_MAC *mac;

    if (*context == NULL) {
        mac = EVP_MAC_fetch(NULL, "HMAC", NULL);
        *context = EVP_MAC_CTX_new(mac);
        EVP_MAC_free(mac);

        if (*context && !EVP_MAC_CTX_set_params(*context, params)) {
            EVP_MAC_CTX_free(*context);
            *context = NULL;
        }
    }

    return *context;
}

/* HKDF-Expand-Label with an empty Context, for output of at most one hash's length (RFC 8446, 7.1;
 * RFC 5869, 2.3). The secret is the key of `hmac`. Returns 0 or -1. */
static int tls_expand_label(EVP_MAC_CTX *hmac, const char *label, unsigned char *out, size_t n)
{
    unsigned char info[32], hash[EVP_MAX_MD_SIZE];
    size_t label_bytes = strlen(label), at = 0, hash_bytes = 0;
    int rc = -1;

    info[at++] = 0;
    info[at++] = (unsigned char) n;
    info[at++] = (unsigned char) (6 + label_bytes);
    memcpy(info + at, "tls13 ", 6);
    at += 6;
    memcpy(info + at, label, label_bytes);
    at += label_bytes;
    info[at++] = 0; /* no context */
    info[at++] = 1; /* first and only block */

    if (EVP_MAC_init(hmac, NULL, 0, NULL) && EVP_MAC_update(hmac, info, at) &&
        EVP_MAC_final(hmac, hash, &hash_bytes, sizeof(hash)) && n <= hash_bytes) {
        memcpy(out, hash, n);
        rc = 0;
    }

    OPENSSL_cleanse(hash, sizeof(hash));

    return rc;
}

/* Derives the secret of the present generation, which replaces the one in `state`, and sets it as
 * the key of `hmac`. Returns 0 or -1. */
static int tls_catch_up(shunt_tls_state_t *state, EVP_MAC_CTX *hmac)
{
    unsigned char next[SHUNT_TLS_SECRET_BYTES_MAX];
    int rc = EVP_MAC_init(hmac, state->secret, state->secret_bytes, NULL) ? 0 : -1;

    while (rc == 0 && state->secret_generation < state->generation) {
        rc = tls_expand_label(hmac, "traffic upd", next, state->secret_bytes);

        if (rc == 0) {
            memcpy(state->secret, next, state->secret_bytes);
            state->secret_generation++;
            rc = EVP_MAC_init(hmac, state->secret, state->secret_bytes, NULL) ? 0 : -1;
        }
    }

    OPENSSL_cleanse(next, sizeof(next));

    return rc;
}

/* Largest content of a record in bytes, as negotiated with the client (RFC 6066, 4). In TLS 1.3 the
 * inner type does not count. */
static uint16_t tls_content_bytes(SSL *ssl)
{
    SSL_SESSION *session = SSL_get0_session(ssl);
    uint8_t mode = session ? SSL_SESSION_get_max_fragment_length(session) : 0;

    return mode >= TLSEXT_max_fragment_length_512 && mode <= TLSEXT_max_fragment_length_4096
               ? 512 << (mode - 1)
               : TLS_CONTENT_BYTES;
}

int shunt_tls_write_keys(SSL *ssl, shunt_tls_state_t *state, struct shunt_tls *keys)
{
    static const unsigned char nothing[SHUNT_TLS_SECRET_BYTES_MAX];
    EVP_MAC_CTX *hmac = tls_hmac(state->secret_bytes);
    int rc;

    memset(keys, 0, sizeof(*keys));
    keys->suite = shunt_tls_suite(ssl);
    keys->content_bytes = tls_content_bytes(ssl);
    keys->record = state->records;

    rc = hmac == NULL || tls_catch_up(state, hmac) != 0 ||
         tls_expand_label(hmac, "key", keys->key, shunt_tls_key_bytes(keys->suite)) != 0 ||
         tls_expand_label(hmac, "iv", keys->iv, sizeof(keys->iv)) != 0;

    /* Gives the context another key, so that no secret stays in it. */
    if (hmac && !EVP_MAC_init(hmac, nothing, sizeof(nothing), NULL)) {
        rc = 1;
    }

    if (rc) {
        OPENSSL_cleanse(keys, sizeof(*keys));
    }

    return rc ? -1 : 0;
}

static uint64_t tls_data_records(uint64_t content_bytes, uint64_t payload)
{
    return payload / content_bytes + (payload % content_bytes != 0);
}

/* Cipher of a suite, kept for the process's lifetime like the HMACs. */
static const EVP_CIPHER *tls_cipher(unsigned suite)
{
    static const char *names[] = {"AES-128-GCM", "AES-256-GCM", "ChaCha20-Poly1305"};
    static EVP_CIPHER *ciphers[3];
    EVP_CIPHER **cipher = &ciphers[suite - 0x1301];

    if (*cipher == NULL) {
        *cipher = EVP_CIPHER_fetch(NULL, names[suite - 0x1301], NULL);
    }

    return *cipher;
}

/* The KeyUpdate's record number is the one after the payload's records. Nonce and record are as in
 * RFC 8446, 5.2 and 5.3. */
int shunt_tls_seal_key_update(const struct shunt_tls *keys, uint64_t payload,
                              unsigned char out[SHUNT_TLS_KEY_UPDATE_BYTES])
{
    static const unsigned char inner[] = {SSL3_MT_KEY_UPDATE, 0, 0, 1, SSL_KEY_UPDATE_NOT_REQUESTED,
                                          SSL3_RT_HANDSHAKE};
    static const unsigned char header[TLS_HEADER_BYTES] = {SSL3_RT_APPLICATION_DATA, 3, 3, 0,
                                                           sizeof(inner) + TLS_TAG_BYTES};
    unsigned char nonce[12], *content = out + sizeof(header), *tag = content + sizeof(inner);
    uint64_t number = keys->record + tls_data_records(keys->content_bytes, payload);
    const EVP_CIPHER *cipher = tls_cipher(keys->suite);
    EVP_CIPHER_CTX *c = EVP_CIPHER_CTX_new();
    int i, n, rc;

    memcpy(nonce, keys->iv, sizeof(nonce));

    for (i = 0; i < 8; i++) {
        nonce[11 - i] ^= number >> (8 * i);
    }

    memcpy(out, header, sizeof(header));
    rc = c && cipher && EVP_EncryptInit_ex(c, cipher, NULL, keys->key, nonce) == 1 &&
         EVP_EncryptUpdate(c, NULL, &n, header, sizeof(header)) == 1 &&
         EVP_EncryptUpdate(c, content, &n, inner, sizeof(inner)) == 1 &&
         EVP_EncryptFinal_ex(c, tag, &n) == 1 &&
         EVP_CIPHER_CTX_ctrl(c, EVP_CTRL_AEAD_GET_TAG, TLS_TAG_BYTES, tag) == 1;
    EVP_CIPHER_CTX_free(c);

    return rc ? 0 : -1;
}

void shunt_tls_skip(struct shunt_tls *keys, uint64_t wire, uint64_t *from)
{
    uint64_t whole = wire / (keys->content_bytes + TLS_OVERHEAD_BYTES);

    keys->record += whole;
    keys->skip = wire % (keys->content_bytes + TLS_OVERHEAD_BYTES);
    *from = whole * keys->content_bytes;
}

/* ---- sizes ---- */

uint64_t shunt_tls_wire_bytes(const struct shunt_tls *keys, uint64_t payload)
{
    uint64_t records, most;

    if (keys->content_bytes == 0 || payload == 0 || payload > INT64_MAX / 2) {
        return 0;
    }

    records = tls_data_records(keys->content_bytes, payload);
    /* most records under one key, fewer than RFC 8446 (5.5) allows */
    most = keys->suite == 0x1303 ? (uint64_t) 1 << 48 : 1 << 24;

    /* the payload's records, and one for the KeyUpdate */
    if (keys->record >= most || records >= most - keys->record) {
        return 0;
    }

    return payload + records * TLS_OVERHEAD_BYTES;
}

uint64_t shunt_tls_payload_bytes(uint64_t content_bytes, uint64_t payload, uint64_t wire)
{
    uint64_t whole = wire / (content_bytes + TLS_OVERHEAD_BYTES) * content_bytes;

    /* If all bytes are on the wire, the last record, which may be shorter, is whole, too. */
    if (wire >= payload + tls_data_records(content_bytes, payload) * TLS_OVERHEAD_BYTES) {
        return payload;
    }

    return whole < payload ? whole : payload;
}
