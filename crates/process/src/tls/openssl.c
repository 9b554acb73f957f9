/* SPDX-License-Identifier: MIT */
/*
 * OpenSSL as the program has it. This library is not linked to OpenSSL: a program may have none,
 * or load it later. So each function of OpenSSL that openssl/shunt_tls*.c call is defined here as a
 * jump to the program's own function, at the address where that was found (libraries.rs).
 */
#include <openssl/bio.h>
#include <openssl/ssl.h>
#include <string.h>

#include "shunt_tls_state.h"

#define SHUNT_OPENSSL(X)                                                                           \
    X(BIO_clear_flags)                                                                             \
    X(BIO_ctrl)                                                                                    \
    X(BIO_free) X(BIO_get_data) X(BIO_get_new_index) X(BIO_meth_new) X(BIO_meth_set_ctrl) X(       \
        BIO_meth_set_write) X(BIO_method_type) X(BIO_new) X(BIO_set_data) X(BIO_set_flags)         \
        X(BIO_set_init) X(BIO_test_flags) X(BIO_up_ref) X(BIO_write) X(CRYPTO_clear_free) X(       \
            CRYPTO_free) X(CRYPTO_get_ex_new_index) X(CRYPTO_zalloc) X(ERR_clear_error)            \
            X(EVP_CIPHER_CTX_ctrl) X(EVP_CIPHER_CTX_free) X(EVP_CIPHER_CTX_new) X(                 \
                EVP_CIPHER_fetch) X(EVP_EncryptFinal_ex) X(EVP_EncryptInit_ex)                     \
                X(EVP_EncryptUpdate) X(EVP_MAC_CTX_free) X(EVP_MAC_CTX_new) X(                     \
                    EVP_MAC_CTX_set_params) X(EVP_MAC_fetch) X(EVP_MAC_final) X(EVP_MAC_free)      \
                    X(EVP_MAC_init) X(EVP_MAC_update) X(OPENSSL_cleanse) X(                        \
                        OSSL_PARAM_construct_end) X(OSSL_PARAM_construct_utf8_string)              \
                        X(SSL_CIPHER_get_protocol_id) X(SSL_CTX_add_custom_ext) X(                 \
                            SSL_CTX_get_keylog_callback) X(SSL_CTX_has_client_custom_ext)          \
                            X(SSL_CTX_set_keylog_callback) X(SSL_SESSION_get_max_fragment_length)  \
                                X(SSL_ctrl) X(SSL_do_handshake) X(SSL_get0_alpn_selected)          \
                                    X(SSL_get_SSL_CTX) X(SSL_get_current_cipher)                   \
                                        X(SSL_get_ex_data) X(SSL_get_key_update_type)              \
                                            X(SSL_get_read_ahead) X(SSL_get_session)               \
                                                X(SSL_get_wbio) X(SSL_is_init_finished)            \
                                                    X(SSL_is_server) X(SSL_key_update) X(SSL_peek) \
                                                        X(SSL_set0_wbio) X(SSL_set_ex_data)        \
                                                            X(SSL_set_read_ahead) X(SSL_version)   \
                                                                X(SSL_CTX_set_msg_callback)

#define FUNCTION(name)                                                                       \
    __attribute__((visibility("hidden"))) void *shunt_openssl_##name;                        \
    __asm__(".text\n.hidden " #name "\n.globl " #name "\n.type " #name ", @function\n" #name \
            ": jmp *shunt_openssl_" #name "(%rip)\n");

SHUNT_OPENSSL(FUNCTION)

static int progress_index = -1;

/* Writes the addresses of all functions to `found`. Returns 1 if all of them are there. Takes no
 * lock but the loader's. */
int shunt_openssl_find(void *(*find)(void *library, const char *name), void *library, void **found,
                       size_t room)
{
#define FIND(name)                                                   \
    if (room-- == 0 || (*found++ = find(library, #name)) == NULL) { \
        return 0;                                                    \
    }

    SHUNT_OPENSSL(FIND)

    return 1;
}

/* Makes the functions jump to the addresses in `found`, from now on. Returns 1 on success. */
int shunt_openssl_use(void *const *found)
{
#define USE(name) shunt_openssl_##name = *found++;

    SHUNT_OPENSSL(USE)

    progress_index = SSL_get_ex_new_index(0, NULL, NULL, NULL, NULL);

    return progress_index >= 0;
}

/* Returns the descriptor of the socket that OpenSSL writes a connection's records to. Returns -1 if
 * it writes elsewhere, or if nothing can be handed off on the connection. */
int shunt_openssl_socket(SSL *ssl)
{
    shunt_tls_state_t *state = shunt_tls_state(ssl);
    BIO *bio = SSL_get_wbio(ssl);
    const unsigned char *protocol;
    unsigned n;
    int fd = -1;

    if (state && state->gate && bio == state->gate) {
        bio = state->socket;
    }

    /* HTTP/2: several responses share the connection, so none has many bytes in a row */
    SSL_get0_alpn_selected(ssl, &protocol, &n);

    if (n == 2 && memcmp(protocol, "h2", 2) == 0) {
        return -1;
    }

    if (bio && BIO_method_type(bio) == BIO_TYPE_SOCKET && !(SSL_get_mode(ssl) & SSL_MODE_ASYNC)) {
        BIO_get_fd(bio, &fd);
    }

    return fd;
}

/* Returns the progress of a write that the program has to repeat, in the form of tls.rs; 0 if there
 * is none. */
uint64_t shunt_openssl_progress(SSL *ssl)
{
    return progress_index < 0 ? 0 : (uintptr_t) SSL_get_ex_data(ssl, progress_index);
}

int shunt_openssl_set_progress(SSL *ssl, uint64_t progress)
{
    return SSL_set_ex_data(ssl, progress_index, (void *) (uintptr_t) progress);
}

/* Allows the program to repeat a write from other memory than before. */
void shunt_openssl_let_memory_move(SSL *ssl)
{
    SSL_set_mode(ssl, SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
}

/* Writes the KeyUpdate that is left of the last handoff into the socket. It leaves at once, or
 * waits there behind the bytes that another machine sends. */
void shunt_openssl_flush(SSL *ssl)
{
    shunt_tls_state_t *state = shunt_tls_state(ssl);

    if (state) {
        shunt_tls_flush(state);
    }
}

/* Forgets a connection's traffic secret, so that nothing is handed off on it any more. The program
 * has set a message callback in place of the one that counts the connection's records. */
void shunt_openssl_unwatch(SSL *ssl)
{
    shunt_tls_state_t *state = shunt_tls_state(ssl);

    if (state) {
        state->secret_bytes = 0;
    }
}
