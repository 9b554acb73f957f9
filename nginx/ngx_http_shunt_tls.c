/* SPDX-License-Identifier: MIT */
/*
 * A generation of write keys goes to a backend, which ends it with a KeyUpdate (RFC 8446, 4.6.3).
 * OpenSSL has no call for that, but tells enough while it works:
 *
 *   keylog callback    the server's application traffic secret, from which key and IV of each
 * generation come (7.2, 7.3). It stays here: a backend gets key and IV, from which nothing later
 * can be had. message callback   every record header and every KeyUpdate that it writes: how many
 * generations and records. SSL_key_update     the next generation; into a null BIO, without a byte.
 *
 * OpenSSL writes through a BIO of ours, the gate. From freeze to take_back it is closed: whatever
 * OpenSSL may want to say meanwhile (an alert, a close_notify) would be a second plaintext under a
 * nonce that the backend uses. Afterwards it puts the KeyUpdate that ends the backend's generation
 * before OpenSSL's next record: not sooner, for a client that finds something to read on an idle
 * connection takes it for closed (wget, urllib3).
 */
#include "ngx_http_shunt_tls.h"

#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#define TLS_SECRET_BYTES_MAX            48
#define TLS_CONTENT_BYTES               16384
#define TLS_HEADER_BYTES                5
#define TLS_TAG_BYTES                   16
#define TLS_OVERHEAD_BYTES              22 /* header, content type, tag */
#define TLS_KEY_UPDATE_BYTES            27 /* its record */
#define TLS_RECORD_SIZE_LIMIT_EXTENSION 28 /* RFC 8449 */

/* GnuTLS ends a connection at the 9th KeyUpdate within a second of its clock
 * (lib/tls13/key_update.c). They leave here no faster than 8 in 1.5 seconds: a network may bring
 * them closer together. Others count only KeyUpdates without data between them, and between two of
 * ours is a payload. */
#define TLS_STRICT_UPDATES   8
#define TLS_STRICT_WINDOW_MS 1500

typedef struct {
    unsigned char secret[TLS_SECRET_BYTES_MAX]; /* of generation `secret_generation` */
    size_t secret_bytes;
    uint64_t secret_generation;
    uint64_t generation; /* of OpenSSL's write key */
    uint64_t records;    /* written in it */

    BIO *gate;
    BIO *socket;             /* what the gate leads to; NULL: there is no gate yet */
    unsigned frozen : 1;     /* a backend has the generation, and nothing passes the gate */
    unsigned strict : 1;     /* the client counts KeyUpdates by the clock */
    uint64_t handed;         /* the generation that a backend has or had last */
    uint64_t handed_records; /* and how much of it was written here */
    int read_ahead;          /* as it was before */

    unsigned char key_update[TLS_KEY_UPDATE_BYTES]; /* to leave before the next record */
    size_t waiting;                                 /* how many bytes of it, from its end */
    uint64_t updates_ms[TLS_STRICT_UPDATES];        /* when the last ones were sent, a ring */
    uint64_t updates;
} tls_state_t;

static int tls_state_index = -1;
static int tls_strict_index = -1;

static tls_state_t *tls_state(const SSL *ssl)
{
    return tls_state_index < 0 ? NULL : SSL_get_ex_data(ssl, tls_state_index);
}

static void tls_state_free(void *parent, void *ptr, CRYPTO_EX_DATA *ad, int index, long argl,
                           void *argp)
{
    tls_state_t *state = ptr;

    if (state) {
        if (state->gate) {
            BIO_set_data(state->gate, NULL); /* OpenSSL frees it later */
            BIO_free(state->gate);
        }

        BIO_free(state->socket);
        OPENSSL_clear_free(state, sizeof(*state));
    }
}

/* ---- what OpenSSL tells ---- */

static int tls_hex(unsigned char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* "SERVER_TRAFFIC_SECRET_0 <client random> <secret>", both in hex: 0 where it is not that. */
static size_t tls_parse_secret(const char *line, unsigned char secret[TLS_SECRET_BYTES_MAX])
{
    static const char label[] = "SERVER_TRAFFIC_SECRET_0 ";
    const char *hex;
    size_t i, n;

    if (strncmp(line, label, sizeof(label) - 1) != 0) {
        return 0;
    }

    hex = strchr(line + sizeof(label) - 1, ' ');
    n = hex ? strlen(++hex) : 0;

    if (n % 2 || n / 2 > TLS_SECRET_BYTES_MAX) {
        return 0;
    }

    for (i = 0; i < n / 2; i++) {
        if (tls_hex(hex[2 * i]) < 0 || tls_hex(hex[2 * i + 1]) < 0) {
            return 0;
        }

        secret[i] = tls_hex(hex[2 * i]) << 4 | tls_hex(hex[2 * i + 1]);
    }

    return n / 2;
}

/* OpenSSL calls this when it begins to write under the key of that secret: nothing has been written
 * yet. */
static void tls_keylog(const SSL *ssl, const char *line)
{
    tls_state_t *state;
    unsigned char secret[TLS_SECRET_BYTES_MAX];
    size_t n = tls_parse_secret(line, secret);

    if (n == 0) {
        return;
    }

    state = tls_state(ssl);

    if (state == NULL) {
        state = OPENSSL_zalloc(sizeof(*state));

        if (state == NULL || !SSL_set_ex_data((SSL *) ssl, tls_state_index, state)) {
            OPENSSL_free(state);
            OPENSSL_cleanse(secret, sizeof(secret));
            return; /* a connection whose secret is not known is relayed */
        }
    }

    memcpy(state->secret, secret, n);
    OPENSSL_cleanse(secret, sizeof(secret));
    state->secret_bytes = n;
    state->secret_generation = 0;
    state->generation = 0;
    state->records = 0;
    state->strict = SSL_get_ex_data(ssl, tls_strict_index) != NULL;
}

static void tls_message(int written, int version, int content_type, const void *bytes, size_t n,
                        SSL *ssl, void *arg)
{
    tls_state_t *state;

    if (!written) {
        return;
    }

    state = tls_state(ssl);

    if (state == NULL) {
        return;
    }

    if (content_type == SSL3_RT_HEADER) {
        state->records++;

    } else if (content_type == SSL3_RT_HANDSHAKE && n > 0 &&
               *(const unsigned char *) bytes == SSL3_MT_KEY_UPDATE) {
        /* its record has been counted, under the key that ends with it */
        state->generation++;
        state->records = 0;
    }
}

/* GnuTLS says how long its records may be, and so do few others: taken for GnuTLS, they lose no
 * more than shortcuts. */
static int tls_record_size_limit(SSL *ssl, unsigned int type, unsigned int context,
                                 const unsigned char *in, size_t n, X509 *x, size_t chain,
                                 int *alert, void *arg)
{
    static int strict;

    (void) SSL_set_ex_data(ssl, tls_strict_index, &strict);

    return 1; /* and no answer: so far, OpenSSL does not know the extension (RFC 8449) */
}

int ngx_http_shunt_tls_watch(SSL_CTX *ctx)
{
    if (tls_state_index < 0) {
        tls_strict_index = SSL_get_ex_new_index(0, NULL, NULL, NULL, NULL);
        tls_state_index = SSL_get_ex_new_index(0, NULL, NULL, NULL, tls_state_free);
    }

    if (tls_state_index < 0 || tls_strict_index < 0) {
        return -1;
    }

    SSL_CTX_set_keylog_callback(ctx, tls_keylog);
    SSL_CTX_set_msg_callback(ctx, tls_message);

    /* refused by an OpenSSL that knows it itself, or where this was called before */
    if (!SSL_CTX_has_client_custom_ext(ctx, TLS_RECORD_SIZE_LIMIT_EXTENSION)) {
        (void) SSL_CTX_add_custom_ext(ctx, TLS_RECORD_SIZE_LIMIT_EXTENSION, SSL_EXT_CLIENT_HELLO,
                                      NULL, NULL, NULL, tls_record_size_limit, NULL);
        ERR_clear_error();
    }

    return 0;
}

/* ---- keys ---- */

static size_t tls_key_bytes(unsigned suite)
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

static unsigned tls_suite(const SSL *ssl)
{
    const SSL_CIPHER *cipher = SSL_get_current_cipher(ssl);

    return cipher ? SSL_CIPHER_get_protocol_id(cipher) : 0;
}

/* HKDF-Expand-Label without a context, of at most one hash (RFC 8446, 7.1; RFC 5869, 2.3): 0, or
 * -1. */
static int tls_expand_label(const tls_state_t *state, const char *label, unsigned char *out,
                            size_t n)
{
    const EVP_MD *md = state->secret_bytes == 48 ? EVP_sha384() : EVP_sha256();
    unsigned char info[32], hash[EVP_MAX_MD_SIZE];
    unsigned int hash_bytes = 0;
    size_t label_bytes = strlen(label), at = 0;
    int rc = -1;

    info[at++] = 0;
    info[at++] = (unsigned char) n;
    info[at++] = (unsigned char) (6 + label_bytes);
    memcpy(info + at, "tls13 ", 6);
    at += 6;
    memcpy(info + at, label, label_bytes);
    at += label_bytes;
    info[at++] = 0; /* context */
    info[at++] = 1; /* first and only block */

    if (HMAC(md, state->secret, (int) state->secret_bytes, info, at, hash, &hash_bytes) &&
        n <= hash_bytes) {
        memcpy(out, hash, n);
        rc = 0;
    }

    OPENSSL_cleanse(hash, sizeof(hash));

    return rc;
}

/* The secret of the present generation: earlier ones are of no more use. */
static int tls_catch_up(tls_state_t *state)
{
    unsigned char next[TLS_SECRET_BYTES_MAX];

    while (state->secret_generation < state->generation) {
        if (tls_expand_label(state, "traffic upd", next, state->secret_bytes) != 0) {
            return -1;
        }

        memcpy(state->secret, next, state->secret_bytes);
        state->secret_generation++;
    }

    OPENSSL_cleanse(next, sizeof(next));

    return 0;
}

/* What the client has asked for (RFC 6066, 4): TLS 1.3 counts the content alone. */
static uint16_t tls_content_bytes(SSL *ssl)
{
    SSL_SESSION *session = SSL_get0_session(ssl);
    uint8_t mode = session ? SSL_SESSION_get_max_fragment_length(session) : 0;

    return mode >= TLSEXT_max_fragment_length_512 && mode <= TLSEXT_max_fragment_length_4096
               ? 512 << (mode - 1)
               : TLS_CONTENT_BYTES;
}

static int tls_write_keys(SSL *ssl, tls_state_t *state, struct shunt_tls *keys)
{
    memset(keys, 0, sizeof(*keys));
    keys->suite = tls_suite(ssl);
    keys->content_bytes = tls_content_bytes(ssl);
    keys->record = state->records;

    if (tls_catch_up(state) != 0 ||
        tls_expand_label(state, "key", keys->key, tls_key_bytes(keys->suite)) != 0 ||
        tls_expand_label(state, "iv", keys->iv, sizeof(keys->iv)) != 0) {
        OPENSSL_cleanse(keys, sizeof(*keys));
        return -1;
    }

    return 0;
}

static uint64_t tls_data_records(uint64_t content_bytes, uint64_t payload)
{
    return payload / content_bytes + (payload % content_bytes != 0);
}

/* ---- the gate ---- */

/* The KeyUpdate that waits and the bytes behind it, together: how many of these, or -1 with errno.
 */
static ssize_t tls_gate_send(tls_state_t *state, int fd, const char *bytes, int n)
{
    ssize_t sent;
    struct iovec iov[2] = {{state->key_update + TLS_KEY_UPDATE_BYTES - state->waiting,
                            state->waiting},
                           {(char *) bytes, n}};
    struct msghdr msg = {.msg_iov = iov, .msg_iovlen = 2};

    sent = sendmsg(fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);

    if (sent >= 0 && (size_t) sent <= state->waiting) {
        state->waiting -= sent;
        errno = EAGAIN;
        return -1;
    }

    if (sent > 0) {
        sent -= state->waiting;
        state->waiting = 0;
    }

    return sent;
}

static int tls_gate_write(BIO *gate, const char *bytes, int n)
{
    tls_state_t *state = BIO_get_data(gate);
    int fd = -1;
    ssize_t sent;

    BIO_clear_retry_flags(gate);

    if (state == NULL || n <= 0) {
        return -1;
    }

    if (state->frozen) {
        return n;
    }

    if (state->waiting == 0) {
        sent = BIO_write(state->socket, bytes, n);
        BIO_set_flags(gate, BIO_get_retry_flags(state->socket));
        return (int) sent;
    }

    BIO_get_fd(state->socket, &fd);
    sent = tls_gate_send(state, fd, bytes, n);

    if (sent == -1 && (errno == EAGAIN || errno == EINTR)) {
        BIO_set_retry_write(gate);
    }

    return (int) sent;
}

static long tls_gate_ctrl(BIO *gate, int command, long number, void *pointer)
{
    tls_state_t *state = BIO_get_data(gate);

    switch (command) {
    case BIO_CTRL_FLUSH:
        return 1;
    case BIO_CTRL_PUSH:
    case BIO_CTRL_POP:
    case BIO_CTRL_DUP:
        return 0;
    default:
        return state ? BIO_ctrl(state->socket, command, number, pointer) : 0;
    }
}

/* Between OpenSSL and the connection's write BIO, from the first handoff on. */
static int tls_set_gate(SSL *ssl, tls_state_t *state)
{
    static BIO_METHOD *method;
    BIO *gate;

    if (state->socket) {
        return 0;
    }

    if (method == NULL) {
        method = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "shunt");

        if (method == NULL || !BIO_meth_set_write(method, tls_gate_write) ||
            !BIO_meth_set_ctrl(method, tls_gate_ctrl)) {
            return -1;
        }
    }

    gate = BIO_new(method);
    if (gate == NULL) {
        return -1;
    }

    state->socket = SSL_get_wbio(ssl);
    state->gate = gate;
    BIO_up_ref(state->socket);
    BIO_up_ref(gate);
    BIO_set_data(gate, state);
    BIO_set_init(gate, 1);
    SSL_set0_wbio(ssl, gate);

    return 0;
}

/* ---- KeyUpdates ---- */

static const EVP_CIPHER *tls_cipher(unsigned suite)
{
    return suite == 0x1301   ? EVP_aes_128_gcm()
           : suite == 0x1302 ? EVP_aes_256_gcm()
                             : EVP_chacha20_poly1305();
}

/* The KeyUpdate as the record after a payload's, under the backend's keys (RFC 8446, 5.2 and 5.3).
 */
static int tls_seal_key_update(const struct shunt_tls *keys, uint64_t number,
                               unsigned char out[TLS_KEY_UPDATE_BYTES])
{
    static const unsigned char inner[] = {SSL3_MT_KEY_UPDATE, 0, 0, 1, SSL_KEY_UPDATE_NOT_REQUESTED,
                                          SSL3_RT_HANDSHAKE};
    static const unsigned char header[TLS_HEADER_BYTES] = {SSL3_RT_APPLICATION_DATA, 3, 3, 0,
                                                           sizeof(inner) + TLS_TAG_BYTES};
    unsigned char nonce[12];
    EVP_CIPHER_CTX *c = EVP_CIPHER_CTX_new();
    int i, n, rc;

    memcpy(nonce, keys->iv, sizeof(nonce));

    for (i = 0; i < 8; i++) {
        nonce[11 - i] ^= number >> (8 * i);
    }

    memcpy(out, header, sizeof(header));
    rc = c && EVP_EncryptInit_ex(c, tls_cipher(keys->suite), NULL, keys->key, nonce) == 1 &&
         EVP_EncryptUpdate(c, NULL, &n, header, sizeof(header)) == 1 &&
         EVP_EncryptUpdate(c, out + sizeof(header), &n, inner, sizeof(inner)) == 1 &&
         EVP_EncryptFinal_ex(c, out + sizeof(header) + sizeof(inner), &n) == 1 &&
         EVP_CIPHER_CTX_ctrl(c, EVP_CTRL_AEAD_GET_TAG, TLS_TAG_BYTES,
                             out + sizeof(header) + sizeof(inner)) == 1;
    EVP_CIPHER_CTX_free(c);

    return rc ? 0 : -1;
}

/* Whether two more may leave now: one that opens a generation, and the one that closes it. */
static int tls_in_budget(const tls_state_t *state, uint64_t now_ms)
{
    uint64_t oldest;

    if (!state->strict || state->updates + 2 <= TLS_STRICT_UPDATES) {
        return 1;
    }

    oldest = state->updates_ms[(state->updates + 1) % TLS_STRICT_UPDATES];

    return now_ms - oldest >= TLS_STRICT_WINDOW_MS;
}

static void tls_note_update(tls_state_t *state, uint64_t now_ms)
{
    state->updates_ms[state->updates++ % TLS_STRICT_UPDATES] = now_ms;
}

/* 1: OpenSSL writes in the next generation. 0: the socket takes no more now. -1: broken. */
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

/* ---- the life of a handoff ---- */

ngx_http_shunt_tls_refusal_t ngx_http_shunt_tls_refused(SSL *ssl, uint64_t now_ms)
{
    tls_state_t *state = tls_state(ssl);

    if (SSL_version(ssl) != TLS1_3_VERSION) {
        return SHUNT_TLS_VERSION;
    }

    if (!SSL_is_init_finished(ssl)) {
        return SHUNT_TLS_EARLY;
    }

    if (state == NULL || tls_key_bytes(tls_suite(ssl)) == 0) {
        return SHUNT_TLS_SUITE;
    }

    if (BIO_get_ktls_send(SSL_get_wbio(ssl))) {
        return SHUNT_TLS_KERNEL;
    }

    return tls_in_budget(state, now_ms) ? SHUNT_TLS_READY : SHUNT_TLS_BUDGET;
}

int ngx_http_shunt_tls_is_fresh(SSL *ssl)
{
    tls_state_t *state = tls_state(ssl);

    return state && state->records == 0;
}

int ngx_http_shunt_tls_hand_over(SSL *ssl, int fresh, uint64_t payload, uint64_t now_ms,
                                 struct shunt_tls *keys)
{
    tls_state_t *state = tls_state(ssl);
    int rc;

    if (state == NULL || state->frozen || !SSL_is_init_finished(ssl)) {
        return -1;
    }

    if (!fresh) {
        rc = tls_update(ssl);

        if (rc != 1) {
            return rc;
        }

        tls_note_update(state, now_ms);
    }

    if (state->waiting || tls_write_keys(ssl, state, keys) != 0) {
        return -1;
    }

    /* for take_back, while the keys are at hand */
    rc = tls_seal_key_update(keys, keys->record + tls_data_records(keys->content_bytes, payload),
                             state->key_update);

    return rc == 0 ? 1 : -1;
}

int ngx_http_shunt_tls_freeze(SSL *ssl)
{
    tls_state_t *state = tls_state(ssl);

    if (state == NULL || state->frozen || tls_set_gate(ssl, state) != 0 || state->waiting) {
        return -1;
    }

    state->frozen = 1;
    state->handed = state->generation;
    state->handed_records = state->records;

    /* is_broken: one record at a time */
    state->read_ahead = SSL_get_read_ahead(ssl);
    SSL_set_read_ahead(ssl, 0);
    SSL_clear_mode(ssl, SSL_MODE_AUTO_RETRY);

    return 0;
}

int ngx_http_shunt_tls_rest(SSL *ssl, uint64_t wire, struct shunt_tls *keys, uint64_t *from)
{
    tls_state_t *state = tls_state(ssl);
    uint64_t whole;

    if (state == NULL || !state->frozen || state->generation != state->handed ||
        tls_write_keys(ssl, state, keys) != 0) {
        return -1;
    }

    whole = wire / (keys->content_bytes + TLS_OVERHEAD_BYTES);
    keys->record = state->handed_records + whole;
    keys->skip = wire % (keys->content_bytes + TLS_OVERHEAD_BYTES);
    *from = whole * keys->content_bytes;

    return 0;
}

int ngx_http_shunt_tls_is_broken(SSL *ssl)
{
    char byte;
    int n;

    /* OpenSSL answers a KeyUpdate before it reads the next: then its generation would be one that
     * the backend does not end. What comes after the first is read when the payload is through. */
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

    /* after a close_notify the client may go on reading, as after a FIN */
    return n != SSL_ERROR_WANT_READ && n != SSL_ERROR_WANT_WRITE && n != SSL_ERROR_ZERO_RETURN;
}

int ngx_http_shunt_tls_take_back(SSL *ssl, uint64_t now_ms)
{
    tls_state_t *state = tls_state(ssl);

    /* Whatever was written meanwhile went nowhere, and the client will miss it. */
    if (state == NULL || !state->frozen || state->generation != state->handed ||
        state->records != state->handed_records) {
        return -1;
    }

    /* OpenSSL's own KeyUpdate goes nowhere, and is the answer to whatever the client has asked for.
     */
    if (tls_update(ssl) != 1 || state->generation != state->handed + 1) {
        return -1;
    }

    state->waiting = TLS_KEY_UPDATE_BYTES;
    state->frozen = 0;
    tls_note_update(state, now_ms);
    SSL_set_read_ahead(ssl, state->read_ahead);
    SSL_set_mode(ssl, SSL_MODE_AUTO_RETRY);

    return 0;
}

/* ---- sizes ---- */

uint64_t ngx_http_shunt_tls_wire_bytes(const struct shunt_tls *keys, uint64_t payload)
{
    uint64_t records, most;

    if (keys->content_bytes == 0 || payload == 0 || payload > INT64_MAX / 2) {
        return 0;
    }

    records = tls_data_records(keys->content_bytes, payload);
    most = keys->suite == 0x1303 ? (uint64_t) 1 << 48 : 1 << 24; /* RFC 8446, 5.5 */

    /* and one for the KeyUpdate */
    if (keys->record >= most || records >= most - keys->record) {
        return 0;
    }

    return payload + records * TLS_OVERHEAD_BYTES;
}

uint64_t ngx_http_shunt_tls_payload_bytes(uint64_t content_bytes, uint64_t payload, uint64_t wire)
{
    uint64_t whole = wire / (content_bytes + TLS_OVERHEAD_BYTES) * content_bytes;

    /* the last record of a payload is shorter: all of it is there when its record is */
    if (wire >= payload + tls_data_records(content_bytes, payload) * TLS_OVERHEAD_BYTES) {
        return payload;
    }

    return whole < payload ? whole : payload;
}
