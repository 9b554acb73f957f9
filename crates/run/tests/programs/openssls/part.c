/* One part of the test program (main.c). It uses the OpenSSL that it is linked to. If compiled with
 * -DOLD, it is linked to the stand-in for an old OpenSSL (other.c). */
#include "part.h"

#define FUNCTION(result, name, ...) extern result name(__VA_ARGS__);
FUNCTION(const void *, TLS_server_method, void)
FUNCTION(const void *, TLS_client_method, void)
FUNCTION(void *, SSL_CTX_new, const void *)
FUNCTION(void *, SSL_CTX_new_ex, void *, const char *, const void *)
FUNCTION(int, SSL_CTX_use_certificate_chain_file, void *, const char *)
FUNCTION(int, SSL_CTX_use_PrivateKey_file, void *, const char *, int)
FUNCTION(void, SSL_CTX_free, void *)
FUNCTION(void *, SSL_new, void *)
FUNCTION(int, SSL_set_fd, void *, int)
FUNCTION(void, SSL_set_accept_state, void *)
FUNCTION(void, SSL_set_connect_state, void *)
FUNCTION(int, SSL_do_handshake, void *)
FUNCTION(int, SSL_write, void *, const void *, int)
FUNCTION(int, SSL_write_ex, void *, const void *, size_t, size_t *)
FUNCTION(int, SSL_read, void *, void *, int)
FUNCTION(int, SSL_get_error, const void *, int)
FUNCTION(int, SSL_clear, void *)
FUNCTION(long, SSL_callback_ctrl, void *, int, void (*)(void))
FUNCTION(void, SSL_set_msg_callback, void *,
         void (*)(int, int, int, const void *, size_t, void *, void *))
FUNCTION(void, SSL_free, void *)

static const void *method(int accepts)
{
    return accepts ? TLS_server_method() : TLS_client_method();
}

static void *context(int accepts)
{
    return SSL_CTX_new(method(accepts));
}

static int certify(void *made, const char *certificate, const char *key)
{
    return SSL_CTX_use_certificate_chain_file(made, certificate) == 1 &&
           SSL_CTX_use_PrivateKey_file(made, key, 1) == 1;
}

static void *connection(void *made, int fd, int accepts)
{
    void *ssl = SSL_new(made);
    if (!ssl || !SSL_set_fd(ssl, fd))
        return NULL;
    if (accepts)
        SSL_set_accept_state(ssl);
    else
        SSL_set_connect_state(ssl);
    return ssl;
}

static int put(void *ssl, const void *from, int bytes)
{
    return SSL_write(ssl, from, bytes);
}

static int why(void *ssl, int returned)
{
    return SSL_get_error(ssl, returned);
}

static int clear(void *ssl)
{
    return SSL_clear(ssl);
}

static void watch(void *ssl, void (*callback)(int, int, int, const void *, size_t, void *, void *))
{
    SSL_set_msg_callback(ssl, callback);
}

static long control(void *ssl, int command, void (*callback)(void))
{
    return SSL_callback_ctrl(ssl, command, callback);
}

#ifdef OLD
#define context_more NULL
#define put_more     NULL
#else
static void *context_more(int accepts)
{
    return SSL_CTX_new_ex(NULL, NULL, method(accepts));
}

static int put_more(void *ssl, const void *from, size_t bytes, size_t *wrote)
{
    return SSL_write_ex(ssl, from, bytes, wrote);
}
#endif

const struct part part = {NAME,    context,  context_more, certify, connection, SSL_do_handshake,
                          put,     put_more, SSL_read,     why,     clear,      watch,
                          control, SSL_free, SSL_CTX_free};
