/* SPDX-License-Identifier: MIT */
/* Tests shunt_tls.c without nginx, with a server, a client, and a backend that seals records with
 * the server's keys. A generation is the time between two KeyUpdates of the server. */
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tls_pair.h"

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
        CHECK(!shunt_tls_is_fresh(p.server)); /* it has sent two tickets under this key */
        for (j = 0; j < sizeof(sizes) / sizeof(sizes[0]); j++) {
            handed_off(&p, sizes[j], NULL);
            CHECK(shunt_tls_is_fresh(p.server));
        }
        closed(p);
        SSL_CTX_free(client);
    }

    SSL_CTX_free(server);
}

/* A key that a backend gets covers one response alone: its header, payload and KeyUpdate. */
static void no_key_covers_anything_else(pair_t *p)
{
    struct shunt_tls before, after;
    unsigned char record[100];
    int n;

    before = handed_off(p, 1000, NULL);
    relayed(p);
    relayed(p);
    CHECK(!shunt_tls_is_fresh(p->server));
    after = handed_off(p, 1000, NULL); /* begins another generation */
    CHECK(memcmp(before.key, after.key, 32) != 0 && memcmp(before.iv, after.iv, 12) != 0);
    relayed(p);

    /* The client does not accept a record under the backend's key any more. */
    n = seal(record, &after, 0, 23, (const unsigned char *) "forged", 6);
    CHECK(write(p->wire, record, n) == n);
    n = SSL_read(p->client, record, sizeof(record));
    CHECK(n <= 0 && SSL_get_error(p->client, n) == SSL_ERROR_SSL);
    ERR_clear_error();
}

static void asks_for_an_update(pair_t *p)
{
    CHECK(SSL_key_update(p->client, SSL_KEY_UPDATE_REQUESTED) == 1 &&
          SSL_do_handshake(p->client) == 1);
    CHECK(SSL_write(p->client, "GET", 3) == 3);
    CHECK(!shunt_tls_is_broken(p->server));
    CHECK(!shunt_tls_is_broken(p->server));
}

static void a_client_may_ask_for_an_update_meanwhile(pair_t *p)
{
    char got[10];

    handed_off(p, 50000, asks_for_an_update);
    CHECK(SSL_read(p->server, got, 10) == 3);
    relayed(p);
    handed_off(p, 50000, NULL);
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

static void however_often_it_asks_one_update_is_the_answer(pair_t *p)
{
    int at = 0, n;
    char got[10];

    handed_off(p, 50000, asks_often);
    while (at < 9) {
        n = SSL_read(p->server, got + at, sizeof(got) - at);
        CHECK(n > 0);
        at += n;
    }

    CHECK(memcmp(got, "GETGETGET", 9) == 0);
    relayed(p);
    handed_off(p, 50000, NULL);
}

/* While a backend has the keys, all bytes that OpenSSL writes are dropped. The client would miss
 * these bytes, so take_back fails. */
static void what_is_written_meanwhile_is_noticed(void)
{
    SSL_CTX *server = server_ctx(), *client = client_ctx(NULL);
    pair_t p;
    int asked;

    for (asked = 0; asked < 2; asked++) {
        p = connected(server, client, NULL);
        frozen(&p, 0, 100);
        if (asked) {
            asks_for_an_update(&p); /* OpenSSL then writes a KeyUpdate before "lost" */
        }

        CHECK(SSL_write(p.server, "lost", 4) == 4);
        CHECK(shunt_tls_take_back(p.server, p.now_ms) == -1);
        client_sees_nothing(p.client);
        closed(p);
    }

    SSL_CTX_free(server);
    SSL_CTX_free(client);
}

static void a_fatal_alert_is_told_from_all_else(pair_t *p)
{
    unsigned char garbage[30] = {23, 3, 3, 0, 25}, byte;

    frozen(p, 0, 100);
    CHECK(!shunt_tls_is_broken(p->server));
    CHECK(SSL_write(p->client, "GET", 3) == 3);
    CHECK(!shunt_tls_is_broken(p->server)); /* the server sees the client's next request */
    CHECK(!shunt_tls_is_broken(p->server));
    client_sees_nothing(p->client);

    /* the client cannot open the record, and sends an alert */
    CHECK(write(p->wire, garbage, sizeof(garbage)) == sizeof(garbage));
    CHECK(SSL_read(p->client, &byte, 1) <= 0);
    CHECK(SSL_read(p->server, garbage, 3) == 3);
    CHECK(shunt_tls_is_broken(p->server));
    CHECK(recv(SSL_get_fd(p->client), &byte, 1, MSG_PEEK) == -1);
}

static void a_close_notify_is_no_fatal_alert(pair_t *p)
{
    frozen(p, 0, 100);
    CHECK(SSL_shutdown(p->client) == 0);
    CHECK(!shunt_tls_is_broken(p->server)); /* a client that has sent it may continue to read */
}

static void nothing_leaves_while_it_is_frozen(pair_t *p)
{
    struct shunt_tls keys;
    char byte;

    client_sees_nothing(p->client); /* reads the tickets */
    CHECK(shunt_tls_hand_over(p->server, 0, p->now_ms, &keys) == 1);
    client_sees_nothing(p->client);
    CHECK(shunt_tls_freeze(p->server, &keys, 100) == 0);
    (void) SSL_shutdown(p->server);
    CHECK(recv(SSL_get_fd(p->client), &byte, 1, MSG_PEEK) == -1); /* no close_notify */
    SSL_free(p->server);
    CHECK(recv(SSL_get_fd(p->client), &byte, 1, MSG_PEEK) == -1);
    p->server = NULL;
}

/* The keys are handed over and not used, as when the kernel refuses the handoff: OpenSSL continues
 * under the header's keys. */
static void a_connection_of_whose_handoff_nothing_comes_goes_on(pair_t *p)
{
    struct shunt_tls keys, next;
    unsigned char nothing[SHUNT_TLS_KEY_UPDATE_BYTES] = {0};

    CHECK(shunt_tls_hand_over(p->server, 0, p->now_ms, &keys) == 1);
    CHECK(memcmp(shunt_tls_state(p->server)->key_update, nothing, sizeof(nothing)) == 0);
    relayed(p);
    relayed(p);
    CHECK(!shunt_tls_is_fresh(p->server));
    next = handed_off(p, 50000, NULL);
    CHECK(memcmp(keys.key, next.key, 32) != 0);
}

static void what_cannot_be_handed_off_is_named(void)
{
    SSL_CTX *server = server_ctx(), *client = client_ctx(NULL);
    pair_t p;
    SSL *early = SSL_new(server);

    SSL_CTX_set_max_proto_version(client, TLS1_2_VERSION);
    p = connected(server, client, NULL);
    CHECK(shunt_tls_refused(p.server, 0) == SHUNT_TLS_VERSION);
    closed(p);
    CHECK(shunt_tls_refused(early, 0) != SHUNT_TLS_READY);
    SSL_free(early);
    SSL_CTX_free(client);

    client = client_ctx("TLS_AES_128_CCM_SHA256");
    SSL_CTX_set_ciphersuites(server, "TLS_AES_128_CCM_SHA256");
    p = connected(server, client, NULL);
    CHECK(shunt_tls_refused(p.server, 0) == SHUNT_TLS_SUITE);
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
    (void) SSL_shutdown(p.client); /* otherwise OpenSSL takes the session for a bad one */
    closed(p);
    p = connected(server, client, session);
    CHECK(SSL_session_reused(p.server));
    handed_off(&p, 100000, NULL);
    SSL_SESSION_free(session);
    closed(p);
    SSL_CTX_free(server);
    SSL_CTX_free(client);
}

/* Adds record_size_limit, as in GnuTLS's ClientHello. */
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
    /* Some responses come after a pause, while the KeyUpdate of the response before has not
     * left. */
    for (i = 0; i < 2000 && updates < 90; i++, p.now_ms += i % 9 ? 7 : 700) {
        if (shunt_tls_state(p.server)->waiting) {
            sent[updates++] = p.now_ms;
        }

        if (shunt_tls_refused(p.server, p.now_ms) == SHUNT_TLS_BUDGET) {
            relayed(&p);
            continue;
        }

        if (!shunt_tls_is_fresh(p.server)) {
            sent[updates++] = p.now_ms;
        }

        handed_off(&p, 100, NULL);
    }

    CHECK(updates >= 40); /* the client still gets shortcuts */
    for (i = 8; i < updates; i++) {
        CHECK(sent[i] - sent[i - 8] > 1000);
    }

    closed(p);
    SSL_CTX_free(client);

    /* a client that does not limit KeyUpdates per time gets as many as responses need */
    client = client_ctx(NULL);
    p = connected(server, client, NULL);
    for (i = 0; i < 100; i++) {
        handed_off(&p, 100, NULL);
    }

    closed(p);
    SSL_CTX_free(client);
    SSL_CTX_free(server);
}

static void another_backend_goes_on_in_mid_record(pair_t *p)
{
    static unsigned char first[PAYLOAD_MAX * 2];
    const size_t n = 100000;
    struct shunt_tls keys, rest;
    uint64_t from;
    size_t all, cut;

    for (cut = 1; cut < n; cut += 7001) {
        CHECK(SSL_write(p->server, "HEADER", 6) == 6);
        keys = frozen(p, cut % 2, n);
        all = sealed(&keys, payload, n);
        memcpy(first, records, all);
        CHECK(write(p->wire, first, cut) == (ssize_t) cut);

        CHECK(shunt_tls_rest(p->server, cut, &rest, &from) == 0);
        CHECK(sealed(&rest, payload + from, n - from) - rest.skip == all - cut);
        CHECK(memcmp(records + rest.skip, first + cut, all - cut) == 0); /* no byte differs */
        CHECK(write(p->wire, records + rest.skip, all - cut) == (ssize_t) (all - cut));

        CHECK(shunt_tls_take_back(p->server, p->now_ms) == 0);
        client_reads(p->client, "HEADER", 6);
        client_reads(p->client, payload, n);
    }

    relayed(p);
    CHECK(shunt_tls_rest(p->server, 0, &rest, &from) == -1); /* no payload is in progress */
}

/* The socket accepts few bytes at a time, and the KeyUpdate is the first record that is written to
 * it. */
static void a_key_update_that_leaves_in_pieces_is_whole(pair_t *p)
{
    int least = 1, n, times;
    unsigned char filler[1 << 16];
    size_t filled;

    for (times = 0; times < 3; times++) {
        handed_off(p, 1000, NULL);
        CHECK(setsockopt(p->wire, SOL_SOCKET, SO_SNDBUF, &least, sizeof(least)) == 0);
        /* fills the socket, an AF_UNIX stream, until it takes no further record */
        for (filled = 0; (n = SSL_write(p->server, filler, 4096)) > 0; filled += n) {
        }

        CHECK(SSL_get_error(p->server, n) == SSL_ERROR_WANT_WRITE);
        while (filled) {
            n = SSL_read(p->client, filler, sizeof(filler) < filled ? sizeof(filler) : filled);
            CHECK(n > 0);
            filled -= n;
        }

        CHECK(SSL_write(p->server, filler, 4096) == 4096);
        for (filled = 4096; filled; filled -= n) {
            n = SSL_read(p->client, filler, filled);
            CHECK(n > 0);
        }
    }

    relayed(p);
}

/* With SHUNT_APPEND, the kernel would send the bytes behind the payload later. Here the test writes
 * them after the payload. */
static void a_connection_goes_on_behind_a_payload_that_grows(pair_t *p)
{
    static const size_t sizes[] = {1, 16384, 16385, 70000, 70000};
    struct shunt_tls keys;
    size_t i, at;

    for (i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        CHECK(shunt_tls_refused(p->server, p->now_ms) == SHUNT_TLS_READY);
        CHECK(SSL_write(p->server, "HEADER", 6) == 6);
        CHECK(shunt_tls_hand_over(p->server, 0, p->now_ms, &keys) == 1);
        CHECK(keys.record == 0);
        for (at = 0; at <= i; at++) {
            CHECK(shunt_tls_go_on(p->server, &keys, sizes[at], p->now_ms) == 0);
        }
        at = sealed(&keys, payload, sizes[i]);
        CHECK(write(p->wire, records, at) == (ssize_t) at);
        client_reads(p->client, "HEADER", 6);
        client_reads(p->client, payload, sizes[i]);
        client_sees_nothing(p->client);
        relayed(p);
        if (i % 2) {
            asks_for_an_update(p);
        }
    }
    /* a payload cannot grow when something was written behind it */
    CHECK(shunt_tls_go_on(p->server, &keys, 100000, p->now_ms) == -1);
    relayed(p);
}

static void sizes_are_those_of_the_backend(void)
{
    struct shunt_tls keys = {.suite = 0x1301, .content_bytes = 16384};

    CHECK(shunt_tls_wire_bytes(&keys, 1) == 23);
    CHECK(shunt_tls_wire_bytes(&keys, 16385) == 16385 + 44);
    CHECK(shunt_tls_wire_bytes(&keys, 0) == 0);
    CHECK(shunt_tls_wire_bytes(&keys, UINT64_MAX) == 0);
    keys.record = (1 << 24) - 2;
    CHECK(shunt_tls_wire_bytes(&keys, 16384) != 0);
    CHECK(shunt_tls_wire_bytes(&keys, 16385) == 0); /* one record past the suite's limit */

    CHECK(shunt_tls_payload_bytes(16384, 20000, 0) == 0);
    CHECK(shunt_tls_payload_bytes(16384, 20000, 16405) == 0);
    CHECK(shunt_tls_payload_bytes(16384, 20000, 16406) == 16384);
    CHECK(shunt_tls_payload_bytes(16384, 20000, 20043) == 16384);
    CHECK(shunt_tls_payload_bytes(16384, 20000, 20044) == 20000);
}

int main(void)
{
    size_t i;

    for (i = 0; i < PAYLOAD_MAX; i++) {
        payload[i] = (i * 0x9e3779b97f4a7c15u) >> 56;
    }

    sizes_are_those_of_the_backend();
    every_suite_and_many_responses();
    on_a_connection(no_key_covers_anything_else);
    on_a_connection(a_client_may_ask_for_an_update_meanwhile);
    on_a_connection(however_often_it_asks_one_update_is_the_answer);
    what_is_written_meanwhile_is_noticed();
    on_a_connection(a_fatal_alert_is_told_from_all_else);
    on_a_connection(a_close_notify_is_no_fatal_alert);
    on_a_connection(nothing_leaves_while_it_is_frozen);
    on_a_connection(a_connection_of_whose_handoff_nothing_comes_goes_on);
    what_cannot_be_handed_off_is_named();
    a_smaller_fragment_is_honoured();
    a_resumed_connection_hands_off_too();
    a_client_that_counts_updates_by_the_clock_is_spared();
    on_a_connection(another_backend_goes_on_in_mid_record);
    on_a_connection(a_connection_goes_on_behind_a_payload_that_grows);
    on_a_connection(a_key_update_that_leaves_in_pieces_is_whole);
    puts("tls_test: all passed");

    return 0;
}
