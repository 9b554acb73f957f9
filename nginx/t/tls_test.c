/* SPDX-License-Identifier: MIT */
/*
 * ngx_http_shunt_tls.c without nginx: a server and a client of OpenSSL, joined by a socket pair,
 * and a backend that seals records with what the server hands over. Ends with the first thing that
 * is not as it should be.
 */
#include <fcntl.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../ngx_http_shunt_tls_state.h"

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

static SSL_CTX *server_ctx(void)
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
    /* as nginx has it */
    SSL_CTX_set_mode(ctx, SSL_MODE_RELEASE_BUFFERS | SSL_MODE_NO_AUTO_CHAIN);
    SSL_CTX_set_read_ahead(ctx, 1);
    CHECK(ngx_http_shunt_tls_watch(ctx) == 0);
    X509_free(cert);
    EVP_PKEY_free(key);

    return ctx;
}

static SSL_CTX *client_ctx(const char *suite)
{
    SSL_CTX *ctx = SSL_CTX_new(TLS_client_method());

    if (suite) {
        CHECK(SSL_CTX_set_ciphersuites(ctx, suite) == 1);
    }

    return ctx;
}

static pair_t connected(SSL_CTX *server, SSL_CTX *client, SSL_SESSION *session)
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

static void closed(pair_t p)
{
    int fd = SSL_get_fd(p.client);

    SSL_free(p.server);
    SSL_free(p.client);
    close(p.wire);
    close(fd);
}

/* ---- a backend ---- */

static const EVP_CIPHER *cipher_of(unsigned suite)
{
    return suite == 0x1301   ? EVP_aes_128_gcm()
           : suite == 0x1302 ? EVP_aes_256_gcm()
                             : EVP_chacha20_poly1305();
}

static size_t seal(unsigned char *out, const struct shunt_tls *keys, uint64_t number, int type,
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

static unsigned char records[PAYLOAD_MAX * 2];

static size_t sealed(const struct shunt_tls *keys, const unsigned char *payload, size_t n)
{
    size_t at = 0, done = 0, some;
    uint64_t number = keys->record;

    for (; done < n; done += some) {
        some = n - done < keys->content_bytes ? n - done : keys->content_bytes;
        at += seal(records + at, keys, number++, 23, payload + done, some);
    }

    CHECK(at == ngx_http_shunt_tls_wire_bytes(keys, n));

    return at;
}

static void backend_sends(int wire, const struct shunt_tls *keys, const unsigned char *payload,
                          size_t n)
{
    size_t at = sealed(keys, payload, n);

    CHECK(write(wire, records, at) == (ssize_t) at);
}

/* ---- what a client sees ---- */

static unsigned char payload[PAYLOAD_MAX];

static void client_reads(SSL *client, const void *expected, size_t n)
{
    static unsigned char got[PAYLOAD_MAX + 100];
    size_t at = 0;
    int some;

    while (at < n && (some = SSL_read(client, got + at, n - at)) > 0) {
        at += some;
    }

    CHECK(at == n && memcmp(got, expected, n) == 0);
}

static void client_sees_nothing(SSL *client)
{
    char byte;
    int n = SSL_read(client, &byte, 1);

    CHECK(n <= 0 && SSL_get_error(client, n) == SSL_ERROR_WANT_READ);
    ERR_clear_error();
}

/* One response whose payload is the backend's; `meanwhile` happens before it is taken back. */
static struct shunt_tls handed_off(pair_t *p, size_t n, void (*meanwhile)(pair_t *))
{
    struct shunt_tls keys;
    int fresh = ngx_http_shunt_tls_is_fresh(p->server);

    CHECK(ngx_http_shunt_tls_refused(p->server, p->now_ms) == SHUNT_TLS_READY);
    CHECK(SSL_write(p->server, "HEADER", 6) == 6);
    CHECK(ngx_http_shunt_tls_hand_over(p->server, fresh, p->now_ms, &keys) == 1);
    CHECK(keys.record == (fresh ? 1 : 0));
    CHECK(ngx_http_shunt_tls_freeze(p->server, &keys, n) == 0);
    backend_sends(p->wire, &keys, payload, n);
    if (meanwhile) {
        meanwhile(p);
    }

    CHECK(ngx_http_shunt_tls_take_back(p->server, p->now_ms) == 0);
    client_reads(p->client, "HEADER", 6);
    client_reads(p->client, payload, n);

    /* nothing to read on a connection that is idle now */
    CHECK(recv(SSL_get_fd(p->client), &n, 1, MSG_PEEK) == -1);

    return keys;
}

static void relayed(pair_t *p)
{
    CHECK(SSL_write(p->server, "RELAYED", 7) == 7);
    client_reads(p->client, "RELAYED", 7);
}

/* ---- tests ---- */

static void every_suite_and_many_responses(void)
{
    static const char *suites[] = {"TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384",
                                   "TLS_CHACHA20_POLY1305_SHA256"};
    static const size_t sizes[] = {1, 16383, 16384, 16385, 100000, PAYLOAD_MAX};
    SSL_CTX *server = server_ctx(), *client;
    size_t i, j;
    pair_t p;

    for (i = 0; i < 3; i++) {
        client = client_ctx(suites[i]);
        p = connected(server, client, NULL);
        CHECK(!ngx_http_shunt_tls_is_fresh(p.server)); /* two tickets have gone out */
        for (j = 0; j < sizeof(sizes) / sizeof(sizes[0]); j++) {
            handed_off(&p, sizes[j], NULL);
            CHECK(ngx_http_shunt_tls_is_fresh(p.server));
        }
        closed(p);
        SSL_CTX_free(client);
    }

    SSL_CTX_free(server);
}

/* A key that a backend has covers the header before its payload, and nothing else. */
static void no_key_covers_anything_else(void)
{
    SSL_CTX *server = server_ctx(), *client = client_ctx(NULL);
    pair_t p = connected(server, client, NULL);
    struct shunt_tls before, after;
    unsigned char record[100];
    int n;

    before = handed_off(&p, 1000, NULL);
    relayed(&p);
    relayed(&p);
    CHECK(!ngx_http_shunt_tls_is_fresh(p.server));
    after = handed_off(&p, 1000, NULL); /* opens a generation of its own */
    CHECK(memcmp(before.key, after.key, 32) != 0 && memcmp(before.iv, after.iv, 12) != 0);
    relayed(&p);

    /* and says nothing to the client any more */
    n = seal(record, &after, 0, 23, (const unsigned char *) "forged", 6);
    CHECK(write(p.wire, record, n) == n);
    n = SSL_read(p.client, record, sizeof(record));
    CHECK(n <= 0 && SSL_get_error(p.client, n) == SSL_ERROR_SSL);
    ERR_clear_error();
    closed(p);
    SSL_CTX_free(server);
    SSL_CTX_free(client);
}

static void asks_for_an_update(pair_t *p)
{
    CHECK(SSL_key_update(p->client, SSL_KEY_UPDATE_REQUESTED) == 1 &&
          SSL_do_handshake(p->client) == 1);
    CHECK(SSL_write(p->client, "GET", 3) == 3);
    CHECK(!ngx_http_shunt_tls_is_broken(p->server));
    CHECK(!ngx_http_shunt_tls_is_broken(p->server));
}

static void a_client_may_ask_for_an_update_meanwhile(void)
{
    SSL_CTX *server = server_ctx(), *client = client_ctx(NULL);
    pair_t p = connected(server, client, NULL);
    char got[10];

    handed_off(&p, 50000, asks_for_an_update);
    CHECK(SSL_read(p.server, got, 10) == 3);
    relayed(&p);
    handed_off(&p, 50000, NULL);
    closed(p);
    SSL_CTX_free(server);
    SSL_CTX_free(client);
}

static void asks_often(pair_t *p)
{
    int i;

    for (i = 0; i < 3; i++) {
        CHECK(SSL_key_update(p->client, SSL_KEY_UPDATE_REQUESTED) == 1 &&
              SSL_do_handshake(p->client) == 1);
    }

    for (i = 0; i < 3; i++) {
        asks_for_an_update(p);
    }
}

static void however_often_it_asks_one_update_is_the_answer(void)
{
    int at = 0, n;
    char got[10];
    SSL_CTX *server = server_ctx(), *client = client_ctx(NULL);
    pair_t p = connected(server, client, NULL);

    handed_off(&p, 50000, asks_often);
    while (at < 9) {
        n = SSL_read(p.server, got + at, sizeof(got) - at);
        CHECK(n > 0);
        at += n;
    }

    CHECK(memcmp(got, "GETGETGET", 9) == 0);
    relayed(&p);
    handed_off(&p, 50000, NULL);
    closed(p);
    SSL_CTX_free(server);
    SSL_CTX_free(client);
}

/* It went nowhere, and the client would miss it. */
static void what_is_written_meanwhile_is_noticed(void)
{
    SSL_CTX *server = server_ctx(), *client = client_ctx(NULL);
    struct shunt_tls keys;
    pair_t p;
    int asked;

    for (asked = 0; asked < 2; asked++) {
        p = connected(server, client, NULL);
        CHECK(ngx_http_shunt_tls_hand_over(p.server, 0, p.now_ms, &keys) == 1);
        CHECK(ngx_http_shunt_tls_freeze(p.server, &keys, 100) == 0);
        if (asked) {
            asks_for_an_update(&p); /* then OpenSSL writes a KeyUpdate first */
        }

        CHECK(SSL_write(p.server, "lost", 4) == 4);
        CHECK(ngx_http_shunt_tls_take_back(p.server, p.now_ms) == -1);
        client_sees_nothing(p.client);
        closed(p);
    }

    SSL_CTX_free(server);
    SSL_CTX_free(client);
}

static void a_fatal_alert_is_told_from_all_else(void)
{
    SSL_CTX *server = server_ctx(), *client = client_ctx(NULL);
    pair_t p = connected(server, client, NULL);
    struct shunt_tls keys;
    unsigned char garbage[30] = {23, 3, 3, 0, 25}, byte;

    CHECK(ngx_http_shunt_tls_hand_over(p.server, 0, p.now_ms, &keys) == 1);
    CHECK(ngx_http_shunt_tls_freeze(p.server, &keys, 100) == 0);
    CHECK(!ngx_http_shunt_tls_is_broken(p.server));
    CHECK(SSL_write(p.client, "GET", 3) == 3);
    CHECK(!ngx_http_shunt_tls_is_broken(p.server)); /* the next request */
    CHECK(!ngx_http_shunt_tls_is_broken(p.server));
    client_sees_nothing(p.client);

    /* the client cannot open a record, and says so */
    CHECK(write(p.wire, garbage, sizeof(garbage)) == sizeof(garbage));
    CHECK(SSL_read(p.client, &byte, 1) <= 0);
    CHECK(SSL_read(p.server, garbage, 3) == 3);
    CHECK(ngx_http_shunt_tls_is_broken(p.server));
    CHECK(recv(SSL_get_fd(p.client), &byte, 1, MSG_PEEK) == -1);
    closed(p);

    p = connected(server, client, NULL);
    CHECK(ngx_http_shunt_tls_hand_over(p.server, 0, p.now_ms, &keys) == 1);
    CHECK(ngx_http_shunt_tls_freeze(p.server, &keys, 100) == 0);
    CHECK(SSL_shutdown(p.client) == 0);
    CHECK(!ngx_http_shunt_tls_is_broken(p.server)); /* a close_notify: it may go on reading */
    closed(p);
    SSL_CTX_free(server);
    SSL_CTX_free(client);
}

static void nothing_leaves_while_it_is_frozen(void)
{
    SSL_CTX *server = server_ctx(), *client = client_ctx(NULL);
    pair_t p = connected(server, client, NULL);
    struct shunt_tls keys;
    char byte;

    client_sees_nothing(p.client); /* reads the tickets */
    CHECK(ngx_http_shunt_tls_hand_over(p.server, 0, p.now_ms, &keys) == 1);
    client_sees_nothing(p.client);
    CHECK(ngx_http_shunt_tls_freeze(p.server, &keys, 100) == 0);
    (void) SSL_shutdown(p.server);
    CHECK(recv(SSL_get_fd(p.client), &byte, 1, MSG_PEEK) == -1); /* no close_notify */
    SSL_free(p.server);
    CHECK(recv(SSL_get_fd(p.client), &byte, 1, MSG_PEEK) == -1);
    p.server = NULL;
    closed(p);
    SSL_CTX_free(server);
    SSL_CTX_free(client);
}

/* The kernel has refused the region: OpenSSL goes on with the header's generation. */
static void a_connection_of_whose_handoff_nothing_comes_goes_on(void)
{
    SSL_CTX *server = server_ctx(), *client = client_ctx(NULL);
    pair_t p = connected(server, client, NULL);
    struct shunt_tls keys, next;
    unsigned char nothing[SHUNT_TLS_KEY_UPDATE_BYTES] = {0};

    CHECK(ngx_http_shunt_tls_hand_over(p.server, 0, p.now_ms, &keys) == 1);
    CHECK(memcmp(ngx_http_shunt_tls_state(p.server)->key_update, nothing, sizeof(nothing)) == 0);
    relayed(&p);
    relayed(&p);
    CHECK(!ngx_http_shunt_tls_is_fresh(p.server));
    next = handed_off(&p, 50000, NULL);
    CHECK(memcmp(keys.key, next.key, 32) != 0);
    closed(p);
    SSL_CTX_free(server);
    SSL_CTX_free(client);
}

static void what_cannot_be_handed_off_is_named(void)
{
    SSL_CTX *server = server_ctx(), *client = client_ctx(NULL);
    pair_t p;
    SSL *early = SSL_new(server);

    SSL_CTX_set_max_proto_version(client, TLS1_2_VERSION);
    p = connected(server, client, NULL);
    CHECK(ngx_http_shunt_tls_refused(p.server, 0) == SHUNT_TLS_VERSION);
    closed(p);
    CHECK(ngx_http_shunt_tls_refused(early, 0) != SHUNT_TLS_READY);
    SSL_free(early);
    SSL_CTX_free(client);

    client = client_ctx("TLS_AES_128_CCM_SHA256");
    SSL_CTX_set_ciphersuites(server, "TLS_AES_128_CCM_SHA256");
    p = connected(server, client, NULL);
    CHECK(ngx_http_shunt_tls_refused(p.server, 0) == SHUNT_TLS_SUITE);
    closed(p);
    SSL_CTX_free(client);
    SSL_CTX_free(server);
}

static void a_smaller_fragment_is_honoured(void)
{
    SSL_CTX *server = server_ctx(), *client = client_ctx(NULL);
    pair_t p;

    CHECK(SSL_CTX_set_tlsext_max_fragment_length(client, TLSEXT_max_fragment_length_1024) == 1);
    p = connected(server, client, NULL);
    CHECK(handed_off(&p, 100000, NULL).content_bytes == 1024);
    closed(p);
    SSL_CTX_free(server);
    SSL_CTX_free(client);
}

static void a_resumed_connection_hands_off_too(void)
{
    SSL_CTX *server = server_ctx(), *client = client_ctx(NULL);
    pair_t p = connected(server, client, NULL);
    SSL_SESSION *session;

    handed_off(&p, 1000, NULL);
    session = SSL_get1_session(p.client);
    (void) SSL_shutdown(p.client); /* else OpenSSL takes the session for a bad one */
    closed(p);
    p = connected(server, client, session);
    CHECK(SSL_session_reused(p.server));
    handed_off(&p, 100000, NULL);
    SSL_SESSION_free(session);
    closed(p);
    SSL_CTX_free(server);
    SSL_CTX_free(client);
}

/* record_size_limit, as GnuTLS has it in its ClientHello */
static int adds_limit(SSL *s, unsigned t, unsigned context, const unsigned char **out, size_t *n,
                      X509 *x, size_t chain, int *alert, void *arg)
{
    *out = (const unsigned char *) "\x40\x01";
    *n = 2;

    return 1;
}

static void a_client_that_counts_updates_by_the_clock_is_spared(void)
{
    SSL_CTX *server = server_ctx(), *client = client_ctx(NULL);
    uint64_t sent[100];
    int updates = 0, i;
    pair_t p;

    CHECK(SSL_CTX_add_custom_ext(client, 28, SSL_EXT_CLIENT_HELLO, adds_limit, NULL, NULL, NULL,
                                 NULL) == 1);
    p = connected(server, client, NULL);
    /* it pauses now and then, while the KeyUpdate of the response before has yet to leave */
    for (i = 0; i < 2000 && updates < 90; i++, p.now_ms += i % 9 ? 7 : 700) {
        if (ngx_http_shunt_tls_state(p.server)->waiting) {
            sent[updates++] = p.now_ms;
        }

        if (ngx_http_shunt_tls_refused(p.server, p.now_ms) == SHUNT_TLS_BUDGET) {
            relayed(&p);
            continue;
        }

        if (!ngx_http_shunt_tls_is_fresh(p.server)) {
            sent[updates++] = p.now_ms;
        }

        handed_off(&p, 100, NULL);
    }

    CHECK(updates >= 40); /* it is not starved */
    for (i = 8; i < updates; i++) {
        CHECK(sent[i] - sent[i - 8] > 1000);
    }

    closed(p);
    SSL_CTX_free(client);

    /* one that does not is not */
    client = client_ctx(NULL);
    p = connected(server, client, NULL);
    for (i = 0; i < 100; i++) {
        handed_off(&p, 100, NULL);
    }

    closed(p);
    SSL_CTX_free(client);
    SSL_CTX_free(server);
}

static void another_backend_goes_on_in_mid_record(void)
{
    SSL_CTX *server = server_ctx(), *client = client_ctx(NULL);
    pair_t p = connected(server, client, NULL);
    static unsigned char first[PAYLOAD_MAX * 2];
    const size_t n = 100000;
    struct shunt_tls keys, rest;
    uint64_t from;
    size_t all, cut;

    for (cut = 1; cut < n; cut += 7001) {
        CHECK(SSL_write(p.server, "HEADER", 6) == 6);
        CHECK(ngx_http_shunt_tls_hand_over(p.server, cut % 2, p.now_ms, &keys) == 1);
        CHECK(ngx_http_shunt_tls_freeze(p.server, &keys, n) == 0);
        all = sealed(&keys, payload, n);
        memcpy(first, records, all);
        CHECK(write(p.wire, first, cut) == (ssize_t) cut);

        CHECK(ngx_http_shunt_tls_rest(p.server, cut, &rest, &from) == 0);
        CHECK(sealed(&rest, payload + from, n - from) - rest.skip == all - cut);
        CHECK(memcmp(records + rest.skip, first + cut, all - cut) ==
              0); /* no byte is another one */
        CHECK(write(p.wire, records + rest.skip, all - cut) == (ssize_t) (all - cut));

        CHECK(ngx_http_shunt_tls_take_back(p.server, p.now_ms) == 0);
        client_reads(p.client, "HEADER", 6);
        client_reads(p.client, payload, n);
    }

    relayed(&p);
    CHECK(ngx_http_shunt_tls_rest(p.server, 0, &rest, &from) == -1); /* nobody has keys now */
    closed(p);
    SSL_CTX_free(server);
    SSL_CTX_free(client);
}

/* A socket that takes a byte at a time, and a KeyUpdate before what it takes. */
static void a_key_update_that_leaves_in_pieces_is_whole(void)
{
    SSL_CTX *server = server_ctx(), *client = client_ctx(NULL);
    pair_t p = connected(server, client, NULL);
    int least = 1, n, times;
    unsigned char filler[1 << 16];
    size_t filled;

    for (times = 0; times < 3; times++) {
        handed_off(&p, 1000, NULL);
        CHECK(setsockopt(p.wire, SOL_SOCKET, SO_SNDBUF, &least, sizeof(least)) == 0);
        /* an AF_UNIX stream: full once it holds one more record of the same kind as those before */
        for (filled = 0; (n = SSL_write(p.server, filler, 4096)) > 0; filled += n) {
        }

        CHECK(SSL_get_error(p.server, n) == SSL_ERROR_WANT_WRITE);
        while (filled) {
            n = SSL_read(p.client, filler, sizeof(filler) < filled ? sizeof(filler) : filled);
            CHECK(n > 0);
            filled -= n;
        }

        CHECK(SSL_write(p.server, filler, 4096) == 4096);
        for (filled = 4096; filled; filled -= n) {
            n = SSL_read(p.client, filler, filled);
            CHECK(n > 0);
        }
    }

    relayed(&p);
    closed(p);
    SSL_CTX_free(server);
    SSL_CTX_free(client);
}

static void sizes_are_those_of_the_backend(void)
{
    struct shunt_tls keys = {.suite = 0x1301, .content_bytes = 16384};

    CHECK(ngx_http_shunt_tls_wire_bytes(&keys, 1) == 23);
    CHECK(ngx_http_shunt_tls_wire_bytes(&keys, 16385) == 16385 + 44);
    CHECK(ngx_http_shunt_tls_wire_bytes(&keys, 0) == 0);
    CHECK(ngx_http_shunt_tls_wire_bytes(&keys, UINT64_MAX) == 0);
    keys.record = (1 << 24) - 2;
    CHECK(ngx_http_shunt_tls_wire_bytes(&keys, 16384) != 0);
    CHECK(ngx_http_shunt_tls_wire_bytes(&keys, 16385) == 0); /* one record past the suite's limit */

    CHECK(ngx_http_shunt_tls_payload_bytes(16384, 20000, 0) == 0);
    CHECK(ngx_http_shunt_tls_payload_bytes(16384, 20000, 16405) == 0);
    CHECK(ngx_http_shunt_tls_payload_bytes(16384, 20000, 16406) == 16384);
    CHECK(ngx_http_shunt_tls_payload_bytes(16384, 20000, 20043) == 16384);
    CHECK(ngx_http_shunt_tls_payload_bytes(16384, 20000, 20044) == 20000);
}

int main(void)
{
    size_t i;

    for (i = 0; i < PAYLOAD_MAX; i++) {
        payload[i] = (i * 0x9e3779b97f4a7c15u) >> 56;
    }

    sizes_are_those_of_the_backend();
    every_suite_and_many_responses();
    no_key_covers_anything_else();
    a_client_may_ask_for_an_update_meanwhile();
    however_often_it_asks_one_update_is_the_answer();
    what_is_written_meanwhile_is_noticed();
    a_fatal_alert_is_told_from_all_else();
    nothing_leaves_while_it_is_frozen();
    a_connection_of_whose_handoff_nothing_comes_goes_on();
    what_cannot_be_handed_off_is_named();
    a_smaller_fragment_is_honoured();
    a_resumed_connection_hands_off_too();
    a_client_that_counts_updates_by_the_clock_is_spared();
    another_backend_goes_on_in_mid_record();
    a_key_update_that_leaves_in_pieces_is_whole();
    puts("tls_test: all passed");

    return 0;
}
