/* SPDX-License-Identifier: MIT */
/*
 * The gate: a BIO through which OpenSSL writes. It is closed from freeze to take_back
 * (shunt_tls.h), while a backend writes under OpenSSL's key. Then it drops what OpenSSL writes:
 * anything that left (an alert, a close_notify) would be a second plaintext under a nonce that the
 * backend uses. After take_back the gate sends the KeyUpdate that ends the backend's generation
 * (its use of the key), together with OpenSSL's next record. It does not send the KeyUpdate sooner,
 * because some clients (wget, urllib3) drop an idle connection on which there is something to read.
 */
#include "shunt_tls_state.h"

#include <openssl/bio.h>
#include <errno.h>
#include <sys/socket.h>
#include <sys/uio.h>

/* Sends the waiting KeyUpdate and the `n` bytes at `bytes` after it in one call. Returns how many
 * of these `n` bytes were sent, or -1 with errno. Errno is EAGAIN if only bytes of the KeyUpdate
 * were sent. */
static ssize_t tls_gate_send(shunt_tls_state_t *state, int fd, const char *bytes, int n)
{
    ssize_t sent;
    struct iovec iov[2] = {{state->key_update + SHUNT_TLS_KEY_UPDATE_BYTES - state->waiting,
                            state->waiting},
                           {(char *) bytes, n}};
    struct msghdr msg = {.msg_iov = iov, .msg_iovlen = 2};

    /* on a blocking socket this waits, as OpenSSL's own write would */
    sent = sendmsg(fd, &msg, MSG_NOSIGNAL);

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

void shunt_tls_flush(shunt_tls_state_t *state)
{
    int fd = -1;

    if (state->waiting) {
        BIO_get_fd(state->socket, &fd);
        (void) tls_gate_send(state, fd, NULL, 0);
    }
}

static int tls_gate_write(BIO *gate, const char *bytes, int n)
{
    shunt_tls_state_t *state = BIO_get_data(gate);
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
    shunt_tls_state_t *state = BIO_get_data(gate);

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

int shunt_tls_set_gate(SSL *ssl, shunt_tls_state_t *state)
{
    static BIO_METHOD *method;
    BIO *gate;

    if (state->socket) {
        return 0;
    }

    if (method == NULL) {
        method =
            BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK | BIO_TYPE_DESCRIPTOR, "shunt");

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

void shunt_tls_free_gate(shunt_tls_state_t *state)
{
    if (state->gate) {
        BIO_set_data(state->gate, NULL); /* OpenSSL still has a reference to the gate */
        BIO_free(state->gate);
    }

    BIO_free(state->socket);
}
