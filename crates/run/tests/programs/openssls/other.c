/*
 * Stand-in for OpenSSL 1.1. Its objects differ from those of version 3, and it ends the process
 * when it is given an object of another library. It encrypts nothing. With -DLATER its functions
 * lie in another order.
 */
#include <stdlib.h>
#include <unistd.h>

struct method {
    int accepts;
};

struct ssl {
    int version;
    const struct method *method;
    int fd;
    void (*callback)(int, int, int, const void *, size_t, void *, void *);
    long padding[16];
};

static const struct method methods[2] = {{0}, {1}};
static int wrote;

static struct ssl *own(const void *given)
{
    struct ssl *ssl = (struct ssl *) given;
    if (ssl->version != 0x303 || (ssl->method != &methods[0] && ssl->method != &methods[1]))
        abort();
    return ssl;
}

#define WRITES                                                          \
    int SSL_write(void *ssl, const void *from, int bytes)               \
    {                                                                   \
        wrote = 1;                                                      \
        return write(own(ssl)->fd, from, bytes);                        \
    }                                                                   \
    int SSL_get_error(const void *ssl, int returned)                    \
    {                                                                   \
        return own(ssl)->fd < 0 ? 5 : returned > 0 ? 0 : wrote ? 3 : 2; \
    }


#ifndef LATER
WRITES
#endif

const void *TLS_method(void)
{
    return &methods[0];
}

const void *TLS_client_method(void)
{
    return &methods[0];
}

const void *TLS_server_method(void)
{
    return &methods[1];
}

void *SSL_CTX_new(const void *method)
{
    struct ssl *made = calloc(1, sizeof(*made));
    made->version = 0x303;
    made->method = method;
    return own(made);
}

void *SSL_new(void *context)
{
    return SSL_CTX_new(own(context)->method);
}

int SSL_CTX_use_certificate_chain_file(void *context, const char *name)
{
    return own(context) != NULL;
}

int SSL_CTX_use_PrivateKey_file(void *context, const char *name, int type)
{
    return own(context) != NULL;
}

int SSL_set_fd(void *ssl, int fd)
{
    own(ssl)->fd = fd;
    return 1;
}

void SSL_set_accept_state(void *ssl)
{
    own(ssl);
}

void SSL_set_connect_state(void *ssl)
{
    own(ssl);
}

int SSL_do_handshake(void *given)
{
    struct ssl *ssl = own(given);
    if (ssl->callback)
        ssl->callback(1, 0, 0, NULL, 0, given, NULL);
    return 1;
}

int SSL_read(void *ssl, void *to, int bytes)
{
    wrote = 0;
    return read(own(ssl)->fd, to, bytes);
}

int SSL_clear(void *ssl)
{
    return own(ssl) != NULL;
}

void SSL_set_msg_callback(void *ssl,
                          void (*callback)(int, int, int, const void *, size_t, void *, void *))
{
    own(ssl)->callback = callback;
}

long SSL_callback_ctrl(void *ssl, int command, void (*callback)(void))
{
    own(ssl)->callback = (void (*)(int, int, int, const void *, size_t, void *, void *)) callback;
    return 1;
}

#ifdef LATER
WRITES
#endif

void SSL_free(void *ssl)
{
    free(own(ssl));
}

void SSL_CTX_free(void *context)
{
    free(own(context));
}
