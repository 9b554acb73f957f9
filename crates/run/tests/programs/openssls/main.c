/*
 * A process with several OpenSSLs. Each is used by one part of the process: a library (part.c) that
 * is linked to this OpenSSL, and speaks TLS with itself over a pair of sockets. A part whose calls
 * reached another OpenSSL would fail or crash.
 *
 *     main CERTIFICATE KEY HOW:LIBRARY...
 *     HOW: local, deep, global: how dlopen loads the library
 *          again: the library is loaded, used and unloaded
 *
 * This program calls the parts' functions. A compiled function may end in a jump to OpenSSL (a tail
 * call). Then the return address that OpenSSL finds is in this program, and not in the part.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "part.h"

#define BYTES 200000

static const char *certificate, *key;
static int seen;

static void fail(const struct part *part, const char *what)
{
    fprintf(stderr, "%s: %s\n", part->name, what);
    exit(1);
}

static void see(int written, int version, int type, const void *bytes, size_t n, void *ssl,
                void *arg)
{
    seen++;
}

/* Returns whether both ends have finished the handshake. */
static int shake_hands(const struct part *part, void *ssl[2])
{
    int done = 1;
    for (int end = 0; end < 2; end++) {
        int result = part->handshake(ssl[end]);
        int why = part->why(ssl[end], result);
        if (result != 1 && why != 2 && why != 3)
            fail(part, "no handshake");
        done &= result == 1;
    }
    return done;
}

static void pass(const struct part *part, void *from, void *to)
{
    static unsigned char sent[BYTES], got[BYTES];
    size_t put = 0, have = 0, now = 0;
    for (size_t at = 0; at < BYTES; at++)
        sent[at] = at * 131 + at / 7919;
    while (have < BYTES) {
        if (put < BYTES) {
            size_t n = BYTES - put < 16384 ? BYTES - put : 16384;
            int result = put / 16384 % 2 && part->put_more
                             ? part->put_more(from, sent + put, n, &now)
                             : part->put(from, sent + put, n);
            if (result > 0)
                put += put / 16384 % 2 && part->put_more ? now : (size_t) result;
            else if (part->why(from, result) != 3)
                fail(part, "cannot write");
        }
        int result = part->get(to, got + have, BYTES - have);
        if (result > 0)
            have += result;
        else if (part->why(to, result) != 2)
            fail(part, "cannot read");
    }
    if (memcmp(sent, got, BYTES))
        fail(part, "other bytes");
}

static void converse(const struct part *part)
{
    void *context[2] = {part->context(0),
                        part->context_more ? part->context_more(1) : part->context(1)};
    if (!context[0] || !context[1])
        fail(part, "no context");
    if (!part->certify(context[1], certificate, key))
        fail(part, "no certificate");
    for (int turn = 0; turn < 3; turn++) {
        int pair[2];
        void *ssl[2];
        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair))
            fail(part, "no sockets");
        for (int end = 0; end < 2; end++)
            if (!(ssl[end] = part->connection(context[end], pair[end], end)))
                fail(part, "no connection");
        seen = 0;
        if (turn)
            part->control(ssl[1], 15, (void (*)(void)) see); /* SSL_CTRL_SET_MSG_CALLBACK */
        else
            part->watch(ssl[1], see);
        for (int tries = 0; !shake_hands(part, ssl); tries++)
            if (tries > 100)
                fail(part, "no end of the handshake");
        if (!seen)
            fail(part, "no message was seen");
        pass(part, ssl[0], ssl[1]);
        pass(part, ssl[1], ssl[0]);
        for (int end = 0; end < 2; end++) {
            if (part->clear(ssl[end]) != 1)
                fail(part, "cannot be cleared");
            part->release(ssl[end]);
            close(pair[end]);
        }
    }
    part->release_context(context[0]);
    part->release_context(context[1]);
}

static void *load(const char *library, int flags)
{
    void *handle = dlopen(library, RTLD_NOW | flags);
    if (!handle) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    return handle;
}

static const struct part *part_of(void *handle)
{
    return dlsym(handle, "part");
}

int main(int count, char **arguments)
{
    const struct part *parts[8];
    int loaded = 0;
    alarm(60);
    certificate = arguments[1];
    key = arguments[2];
    for (int at = 3; at < count; at++) {
        char *how = arguments[at], *library = strchr(how, ':');
        *library++ = 0;
        if (strcmp(how, "again") == 0) {
            void *handle = load(library, RTLD_LOCAL);
            converse(part_of(handle));
            dlclose(handle);
            if (dlopen(library, RTLD_NOW | RTLD_NOLOAD)) {
                fprintf(stderr, "%s is still loaded\n", library);
                return 1;
            }
        } else {
            int flags = strcmp(how, "global") == 0 ? RTLD_GLOBAL : RTLD_LOCAL;
            parts[loaded] =
                part_of(load(library, flags | (strcmp(how, "deep") == 0 ? RTLD_DEEPBIND : 0)));
            if (parts[loaded])
                loaded++;
        }
        for (int part = 0; part < loaded; part++)
            converse(parts[part]);
    }
    return 0;
}
