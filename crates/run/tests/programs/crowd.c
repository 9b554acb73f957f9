/*
 * Test program with a crowd of threads, each with its own connection, that free each other's
 * blocks. Meanwhile the main thread forks one child after the other. Each child looks at some of
 * the blocks, and ends. Every byte is known.
 *
 *     crowd serve PORT BLOCKS | crowd ask PORT BLOCKS
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define THREADS 4
#define BLOCK   65536
#define WORDS   (BLOCK / sizeof(uint64_t))
#define KEPT    32

/* Blocks that threads have read. A thread that puts a block into a place frees the block that
 * was there. */
static struct {
    uint64_t *words;
    unsigned thread, number;
} kept[KEPT];
static pthread_mutex_t keeps = PTHREAD_MUTEX_INITIALIZER;

static unsigned blocks;
static atomic_uint at_work = THREADS;

static void fail(const char *what)
{
    perror(what);
    _exit(1);
}

static uint64_t word(unsigned thread, unsigned number, size_t at)
{
    return ((uint64_t)thread << 56 | (uint64_t)number << 24 | at) * 0x9e3779b97f4a7c15u;
}

static void check(const uint64_t *words, unsigned thread, unsigned number, size_t step)
{
    for (size_t at = number % step; at < WORDS; at += step)
        if (words[at] != word(thread, number, at)) {
            fprintf(stderr, "thread %u, block %u: word %zu differs\n", thread, number, at);
            _exit(1);
        }
}

/* ---- the threads ---- */

struct end {
    int fd;
    unsigned thread;
};

static void *send_blocks(void *argument)
{
    struct end *end = argument;
    for (unsigned number = 0; number < blocks; number++) {
        uint64_t *words = malloc(BLOCK);
        for (size_t at = 0; at < WORDS; at++)
            words[at] = word(end->thread, number, at);
        for (size_t at = 0; at < BLOCK;) {
            ssize_t sent = write(end->fd, (char *)words + at, BLOCK - at);
            if (sent < 0)
                fail("write");
            at += sent;
        }
        free(words);
    }
    at_work--;
    return NULL;
}

/* Reads blocks. Checks every word of some, and some words of others when they are freed. */
static void *take_blocks(void *argument)
{
    struct end *end = argument;
    unsigned place = end->thread;
    for (unsigned number = 0; number < blocks; number++) {
        uint64_t *words = malloc(BLOCK);
        for (size_t at = 0; at < BLOCK;) {
            ssize_t got = read(end->fd, (char *)words + at, BLOCK - at);
            if (got <= 0)
                fail("read");
            at += got;
        }
        if (number % 50 == 0)
            check(words, end->thread, number, 1);
        place = (place * 5 + 7) % KEPT;
        pthread_mutex_lock(&keeps);
        uint64_t *old = kept[place].words;
        unsigned old_thread = kept[place].thread, old_number = kept[place].number;
        kept[place].words = words;
        kept[place].thread = end->thread;
        kept[place].number = number;
        pthread_mutex_unlock(&keeps);
        if (old && old_number % 10 == 0)
            check(old, old_thread, old_number, 1000);
        free(old);
    }
    at_work--;
    return NULL;
}

/* ---- the children ---- */

/* Checks some words of every eighth block, which must be the same as in the parent. */
static void be_child(unsigned turn)
{
    for (int place = 0; place < KEPT; place++)
        if (kept[place].words && place % 8 == (int)turn % 8)
            check(kept[place].words, kept[place].thread, kept[place].number, 2000);
    _exit(0);
}

static unsigned fork_children(void)
{
    unsigned children = 0;
    for (; at_work; children++) {
        int status;
        pthread_mutex_lock(&keeps);
        pid_t child = fork();
        if (child == 0)
            be_child(children);
        pthread_mutex_unlock(&keeps);
        if (child < 0)
            fail("fork");
        while (waitpid(child, &status, 0) < 0)
            if (errno != EINTR)
                fail("waitpid");
        if (status) {
            fprintf(stderr, "child %u ended with %x\n", children, status);
            _exit(1);
        }
    }
    return children;
}

/* ---- connections ---- */

static int connected(struct sockaddr_in *at)
{
    for (;;) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(fd, (void *)at, sizeof(*at)) == 0)
            return fd;
        close(fd);
        usleep(1000);
    }
}

/* Opens a thread's connection. The asking end sends its thread's number first: only an end that
 * has sent something may get references in place of bytes. */
static struct end opened(int listener, struct sockaddr_in *at, unsigned thread)
{
    uint8_t name = thread;
    struct end end = {.fd = listener < 0 ? connected(at) : accept(listener, NULL, NULL)};
    if (listener < 0 ? write(end.fd, &name, 1) != 1 : read(end.fd, &name, 1) != 1)
        fail("a first byte");
    end.thread = name;
    return end;
}

int main(int count, char **arguments)
{
    if (count != 4)
        return 2;
    int serves = !strcmp(arguments[1], "serve"), listener = -1, on = 1;
    struct sockaddr_in at = {
        .sin_family = AF_INET, .sin_port = htons(atoi(arguments[2])), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    blocks = atoi(arguments[3]);
    if (serves) {
        listener = socket(AF_INET, SOCK_STREAM, 0);
        setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
        if (bind(listener, (void *)&at, sizeof(at)) || listen(listener, THREADS))
            fail("listen");
    }
    pthread_t threads[THREADS];
    struct end ends[THREADS];
    for (unsigned thread = 0; thread < THREADS; thread++) {
        ends[thread] = opened(listener, &at, thread);
        if (pthread_create(&threads[thread], NULL, serves ? send_blocks : take_blocks, &ends[thread]))
            fail("a thread");
    }
    unsigned children = fork_children();
    for (unsigned thread = 0; thread < THREADS; thread++)
        pthread_join(threads[thread], NULL);
    printf("%u children\n", children);
    return children == 0;
}
