/* SPDX-License-Identifier: MIT */
#include "tls_pair.h"

#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

unsigned char payload[PAYLOAD_MAX];
unsigned char records[PAYLOAD_MAX * 2];

SSL_CTX *server_ctx(void)
{
    SSL_CTX *ctx = SSL_CTX_new(TLS_server_method());
    EVP_PKEY *key = EVP_EC_gen("P-256");
    X509 *cert = X509_new();

    ASN1_INTEGER_set(X509_get_serialNumber(cert), 1);
    X509_gmtime_adj(X509_getm_notBefore(cert), 0);
    X509_gmtime_adj(X509_getm_notAfter(cert), 3600);
    X509_set_pubkey(cert, key);
    CHECK(X509_sign(cert, key, EVP_sha256()) > 0);
    CHECK(SSL_CTX_use_certificate(ctx, cert) == 1 && SSL_CTX_use_PrivateKey(ctx, key) == 1);
    /* nginx sets the same modes */
    SSL_CTX_set_mode(ctx, SSL_MODE_RELEASE_BUFFERS | SSL_MODE_NO_AUTO_CHAIN);
    SSL_CTX_set_read_ahead(ctx, 1);
    CHECK(shunt_tls_watch(ctx) == 0);
    X509_free(cert);
    EVP_PKEY_free(key);

    return ctx;
}

SSL_CTX *client_ctx(const char *suite)
{
    SSL_CTX *ctx = SSL_CTX_new(TLS_client_method());

    if (suite) {
        CHECK(SSL_CTX_set_ciphersuites(ctx, suite) == 1);
    }

    return ctx;
}

pair_t connected(SSL_CTX *server, SSL_CTX *client, SSL_SESSION *session)
{
    int fd[2], i, room = 1 << 22;
    pair_t p = {SSL_new(server), SSL_new(client), 0, 1000000};

    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fd) == 0);
    for (i = 0; i < 2; i++) {
        CHECK(setsockopt(fd[i], SOL_SOCKET, SO_SNDBUF, &room, sizeof(room)) == 0);
    }

    p.wire = fd[0];
    SSL_set_fd(p.server, fd[0]);
    SSL_set_fd(p.client, fd[1]);
    SSL_set_accept_state(p.server);
    SSL_set_connect_state(p.client);
    if (session) {
        SSL_set_session(p.client, session);
    }

    for (i = 0; i < 10; i++) {
        SSL_do_handshake(p.client);
        SSL_do_handshake(p.server);
    }

    CHECK(SSL_is_init_finished(p.server) && SSL_is_init_finished(p.client));
    ERR_clear_error();

    return p;
}

void closed(pair_t p)
{
    int fd = SSL_get_fd(p.client);

    SSL_free(p.server);
    SSL_free(p.client);
    close(p.wire);
    close(fd);
}

void on_a_connection(void (*test)(pair_t *))
{
    SSL_CTX *server = server_ctx(), *client = client_ctx(NULL);
    pair_t p = connected(server, client, NULL);

    test(&p);
    closed(p);
    SSL_CTX_free(server);
    SSL_CTX_free(client);
}

/* ---- a backend ---- */

static const EVP_CIPHER *cipher_of(unsigned suite)
{
    return suite == 0x1301   ? EVP_aes_128_gcm()
           : suite == 0x1302 ? EVP_aes_256_gcm()
                             : EVP_chacha20_poly1305();
}

size_t seal(unsigned char *out, const struct shunt_tls *keys, uint64_t number, int type,
            const unsigned char *content, size_t n)
{
    unsigned char header[5] = {23, 3, 3, (n + 17) >> 8, n + 17}, nonce[12], t = type;
    EVP_CIPHER_CTX *c = EVP_CIPHER_CTX_new();
    int i, l;

    memcpy(nonce, keys->iv, 12);
    for (i = 0; i < 8; i++) {
        nonce[11 - i] ^= number >> (8 * i);
    }

    memcpy(out, header, 5);
    CHECK(EVP_EncryptInit_ex(c, cipher_of(keys->suite), NULL, keys->key, nonce) == 1);
    CHECK(EVP_EncryptUpdate(c, NULL, &l, header, 5) == 1);
    CHECK(EVP_EncryptUpdate(c, out + 5, &l, content, n) == 1);
    CHECK(EVP_EncryptUpdate(c, out + 5 + n, &l, &t, 1) == 1);
    CHECK(EVP_EncryptFinal_ex(c, out + 6 + n, &l) == 1);
    CHECK(EVP_CIPHER_CTX_ctrl(c, EVP_CTRL_AEAD_GET_TAG, 16, out + 6 + n) == 1);
    EVP_CIPHER_CTX_free(c);

    return n + 22;
}

size_t sealed(const struct shunt_tls *keys, const unsigned char *content, size_t n)
{
    size_t at = 0, done = 0, some;
    uint64_t number = keys->record;

    for (; done < n; done += some) {
        some = n - done < keys->content_bytes ? n - done : keys->content_bytes;
        at += seal(records + at, keys, number++, 23, content + done, some);
    }

    CHECK(at == shunt_tls_wire_bytes(keys, n));

    return at;
}

static void backend_sends(int wire, const struct shunt_tls *keys, const unsigned char *content,
                          size_t n)
{
    size_t at = sealed(keys, content, n);

    CHECK(write(wire, records, at) == (ssize_t) at);
}

/* ---- what a client receives ---- */

void client_reads(SSL *client, const void *expected, size_t n)
{
    static unsigned char got[PAYLOAD_MAX + 100];
    size_t at = 0;
    int some;

    while (at < n && (some = SSL_read(client, got + at, n - at)) > 0) {
        at += some;
    }

    CHECK(at == n && memcmp(got, expected, n) == 0);
}

void client_sees_nothing(SSL *client)
{
    char byte;
    int n = SSL_read(client, &byte, 1);

    CHECK(n <= 0 && SSL_get_error(client, n) == SSL_ERROR_WANT_READ);
    ERR_clear_error();
}

/* ---- responses ---- */

struct shunt_tls frozen(pair_t *p, int fresh, size_t n)
{
    struct shunt_tls keys;

    CHECK(shunt_tls_hand_over(p->server, fresh, p->now_ms, &keys) == 1);
    CHECK(shunt_tls_freeze(p->server, &keys, n) == 0);

    return keys;
}

struct shunt_tls handed_off(pair_t *p, size_t n, void (*meanwhile)(pair_t *))
{
    struct shunt_tls keys;
    int fresh = shunt_tls_is_fresh(p->server);

    CHECK(shunt_tls_refused(p->server, p->now_ms) == SHUNT_TLS_READY);
    CHECK(SSL_write(p->server, "HEADER", 6) == 6);
    keys = frozen(p, fresh, n);
    CHECK(keys.record == (fresh ? 1 : 0));
    backend_sends(p->wire, &keys, payload, n);
    if (meanwhile) {
        meanwhile(p);
    }

    CHECK(shunt_tls_take_back(p->server, p->now_ms) == 0);
    client_reads(p->client, "HEADER", 6);
    client_reads(p->client, payload, n);

    /* there is nothing to read on the connection, which is idle now */
    CHECK(recv(SSL_get_fd(p->client), &n, 1, MSG_PEEK) == -1);

    return keys;
}

void relayed(pair_t *p)
{
    CHECK(SSL_write(p->server, "RELAYED", 7) == 7);
    client_reads(p->client, "RELAYED", 7);
}
