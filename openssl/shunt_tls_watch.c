/* SPDX-License-Identifier: MIT */
/*
 * Records what OpenSSL tells by its public callbacks:
 *
 *     keylog callback    the server's application traffic secret, from which key and IV of each
 *                        generation are derived (RFC 8446, 7.2 and 7.3). It is not logged: it stays
 *                        in this process.
 *     message callback   every record header and every KeyUpdate that OpenSSL writes, to count
 *                        generations and records.
 *
 * For the keylog callback, OpenSSL writes each secret in hex, byte by byte with sprintf. For the
 * five secrets of a handshake, this is a tenth of a new connection's cost. So the callback is set
 * only for the secret that is needed, which OpenSSL derives after it has written the server's
 * Finished. The message callback sets the keylog callback at the Finished, and the keylog callback
 * removes itself.
 */
#include "shunt_tls_state.h"

#include <openssl/crypto.h>
#include <openssl/err.h>
#include <string.h>

#define TLS_RECORD_SIZE_LIMIT_EXTENSION 28 /* RFC 8449 */

/* Number of connections for whose secret the keylog callback waits now. There may be several,
 * because several threads may make handshakes. */
static int tls_awaited;

static int tls_state_index = -1;
static int tls_strict_index = -1;

shunt_tls_state_t *shunt_tls_state(const SSL *ssl)
{
    return tls_state_index < 0 ? NULL : SSL_get_ex_data(ssl, tls_state_index);
}

static void tls_state_free(void *parent, void *ptr, CRYPTO_EX_DATA *ad, int index, long argl,
                           void *argp)
{
    shunt_tls_state_t *state = ptr;

    if (state) {
        shunt_tls_free_gate(state);
        OPENSSL_clear_free(state, sizeof(*state));
    }
}

static int tls_hex(unsigned char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Parses "SERVER_TRAFFIC_SECRET_0 <client random> <secret>", both in hex. Returns the secret's
 * length, or 0 for any other line. */
static size_t tls_parse_secret(const char *line, unsigned char secret[SHUNT_TLS_SECRET_BYTES_MAX])
{
    static const char label[] = "SERVER_TRAFFIC_SECRET_0 ";
    const char *hex;
    size_t i, n;

    if (strncmp(line, label, sizeof(label) - 1) != 0) {
        return 0;
    }

    hex = strchr(line + sizeof(label) - 1, ' ');
    n = hex ? strlen(++hex) : 0;

    if (n % 2 || n / 2 > SHUNT_TLS_SECRET_BYTES_MAX) {
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

/* Keylog callback. OpenSSL passes a secret when it sets the key of that secret for writing. Nothing
 * has been written under the key by then. */
static void tls_keylog(const SSL *ssl, const char *line)
{
    shunt_tls_state_t *state;
    unsigned char secret[SHUNT_TLS_SECRET_BYTES_MAX];
    size_t n;

    /* Another thread may use the same SSL_CTX for a connection as a client. For that connection,
     * this line has the secret of the other end. */
    if (!SSL_is_server(ssl)) {
        return;
    }

    n = tls_parse_secret(line, secret);

    if (n == 0) {
        return;
    }

    if (__atomic_sub_fetch(&tls_awaited, 1, __ATOMIC_RELAXED) <= 0) {
        __atomic_store_n(&tls_awaited, 0, __ATOMIC_RELAXED);
        SSL_CTX_set_keylog_callback(SSL_get_SSL_CTX(ssl), NULL);
    }

    state = shunt_tls_state(ssl);

    if (state == NULL) {
        state = OPENSSL_zalloc(sizeof(*state));

        if (state == NULL || !SSL_set_ex_data((SSL *) ssl, tls_state_index, state)) {
            OPENSSL_free(state);
            OPENSSL_cleanse(secret, sizeof(secret));
            return; /* the secret stays unknown, so the connection's responses are relayed */
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

/* Whether the program has set no keylog callback of its own, which would log secrets. */
static int tls_may_ask(SSL_CTX *ctx)
{
    void (*callback)(const SSL *, const char *) = SSL_CTX_get_keylog_callback(ctx);

    return callback == NULL || callback == tls_keylog;
}

static int tls_is_message(int content_type, const void *bytes, size_t n, unsigned char type)
{
    return content_type == SSL3_RT_HANDSHAKE && n > 0 && *(const unsigned char *) bytes == type;
}

static void tls_message(int written, int version, int content_type, const void *bytes, size_t n,
                        SSL *ssl, void *arg)
{
    shunt_tls_state_t *state;

    if (!written) {
        return;
    }

    state = shunt_tls_state(ssl);

    /* A Finished although there is a secret already: the program uses the SSL object for another
     * connection (SSL_clear), so the old secret is forgotten. */
    if (state && tls_is_message(content_type, bytes, n, SSL3_MT_FINISHED)) {
        state->secret_bytes = 0;
        state->waiting = 0;
    }

    if (state == NULL) {
        /* Before OpenSSL reports the secret, another connection's secret may have come, at which
         * the callback removes itself. Then this connection has no secret, and its responses are
         * relayed, not handed off. */
        if (tls_is_message(content_type, bytes, n, SSL3_MT_FINISHED) && SSL_is_server(ssl) &&
            SSL_version(ssl) == TLS1_3_VERSION && tls_may_ask(SSL_get_SSL_CTX(ssl))) {
            __atomic_add_fetch(&tls_awaited, 1, __ATOMIC_RELAXED);
            SSL_CTX_set_keylog_callback(SSL_get_SSL_CTX(ssl), tls_keylog);
        }

        return;
    }

    if (content_type == SSL3_RT_HEADER) {
        state->records++;

    } else if (tls_is_message(content_type, bytes, n, SSL3_MT_KEY_UPDATE)) {
        /* the KeyUpdate's record was counted before, under the key that the KeyUpdate ends */
        state->generation++;
        state->records = 0;
    }
}

/* Adds no extension to a ClientHello, if the SSL_CTX is used for a client. */
static int tls_no_record_size_limit(SSL *ssl, unsigned int type, unsigned int context,
                                    const unsigned char **out, size_t *n, X509 *x, size_t chain,
                                    int *alert, void *arg)
{
    return 0;
}

/* Takes the client for GnuTLS, because it sends the extension record_size_limit. Few other clients
 * send it. If one of them is taken for GnuTLS, it only gets fewer bodies straight from backends. */
static int tls_record_size_limit(SSL *ssl, unsigned int type, unsigned int context,
                                 const unsigned char *in, size_t n, X509 *x, size_t chain,
                                 int *alert, void *arg)
{
    static int strict;

    (void) SSL_set_ex_data(ssl, tls_strict_index, &strict);

    return 1; /* send no answer: OpenSSL does not know the extension so far (RFC 8449) */
}

int shunt_tls_watch(SSL_CTX *ctx)
{
    if (tls_state_index < 0) {
        tls_strict_index = SSL_get_ex_new_index(0, NULL, NULL, NULL, NULL);
        tls_state_index = SSL_get_ex_new_index(0, NULL, NULL, NULL, tls_state_free);
    }

    if (tls_state_index < 0 || tls_strict_index < 0) {
        return -1;
    }

    SSL_CTX_set_msg_callback(ctx, tls_message);

    /* SSL_CTX_add_custom_ext fails if OpenSSL handles the extension itself */
    if (!SSL_CTX_has_client_custom_ext(ctx, TLS_RECORD_SIZE_LIMIT_EXTENSION)) {
        (void) SSL_CTX_add_custom_ext(ctx, TLS_RECORD_SIZE_LIMIT_EXTENSION, SSL_EXT_CLIENT_HELLO,
                                      tls_no_record_size_limit, NULL, NULL, tls_record_size_limit,
                                      NULL);
        ERR_clear_error();
    }

    return 0;
}
