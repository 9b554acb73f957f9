/* Functions of one part of the test program. Each part uses its own OpenSSL. */
#include <stddef.h>

struct part {
    const char *name;
    void *(*context)(int accepts);
    void *(*context_more)(int accepts);
    int (*certify)(void *context, const char *certificate, const char *key);
    void *(*connection)(void *context, int fd, int accepts);
    int (*handshake)(void *ssl);
    int (*put)(void *ssl, const void *from, int bytes);
    int (*put_more)(void *ssl, const void *from, size_t bytes, size_t *wrote);
    int (*get)(void *ssl, void *to, int bytes);
    int (*why)(void *ssl, int returned);
    int (*clear)(void *ssl);
    void (*watch)(void *ssl, void (*callback)(int, int, int, const void *, size_t, void *, void *));
    long (*control)(void *ssl, int command, void (*callback)(void));
    void (*release)(void *ssl);
    void (*release_context)(void *context);
};
