/*
 * Test program that sends or reads blocks while a timer's signal interrupts it at any place. The
 * signal handler writes to a pipe, as handlers of event loops do, and looks at what has come on the
 * connection. Otherwise the reading program looks at few of the bytes.
 *
 *     storm serve PORT BLOCKS HERTZ | storm ask PORT BLOCKS HERTZ
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#define BLOCK 65536
#define KEPT  32

static int ends[2], speaks = -1;
static volatile unsigned long ticks;

static void tick(int signal)
{
    int before = errno, there;
    char seen;
    (void)signal;
    ticks++;
    (void)!write(ends[1], "x", 1);
    (void)!ioctl(speaks, FIONREAD, &there);
    (void)!recv(speaks, &seen, 1, MSG_PEEK | MSG_DONTWAIT);
    errno = before;
}

static void begin_storm(int hertz)
{
    struct sigaction action = {.sa_handler = tick, .sa_flags = SA_RESTART};
    struct itimerval every = {{0, 1000000 / hertz}, {0, 1000000 / hertz}};
    if (pipe2(ends, O_NONBLOCK) || sigaction(SIGALRM, &action, NULL) || setitimer(ITIMER_REAL, &every, NULL)) {
        perror("a timer");
        _exit(1);
    }
}

static void drain(void)
{
    char seen[4096];
    while (read(ends[0], seen, sizeof(seen)) > 0)
        ;
}

static int connection(int serves, int port)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    /* The buffer is small, so that the handler's look at all bytes in it (FIONREAD) ends before
     * the next tick. */
    int one = 1, room = 128 << 10, fd = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &room, sizeof(room));
    if (!serves) {
        while (connect(fd, (void *)&at, sizeof(at))) {
            close(fd);
            usleep(1000);
            fd = socket(AF_INET, SOCK_STREAM, 0);
            setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &room, sizeof(room));
        }
        (void)!write(fd, "?", 1);
        return fd;
    }
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    if (bind(fd, (void *)&at, sizeof(at)) || listen(fd, 1)) {
        perror("listen");
        _exit(1);
    }
    fd = accept(fd, NULL, NULL);
    char asked;
    (void)!read(fd, &asked, 1); /* only an end that has sent something is sent references */
    return fd;
}

static void send_blocks(int fd, long blocks)
{
    for (long block = 0; block < blocks; block++) {
        char *bytes = malloc(BLOCK);
        memset(bytes, 'a' + block % 26, BLOCK);
        for (size_t at = 0; at < BLOCK; drain()) {
            ssize_t sent = write(fd, bytes + at, BLOCK - at);
            if (sent < 0 && errno != EINTR && errno != EAGAIN) {
                perror("write");
                _exit(1);
            }
            at += sent > 0 ? sent : 0;
        }
        free(bytes);
    }
}

/* Reads blocks. Checks one byte of every thousandth block. */
static void take_blocks(int fd, long blocks)
{
    char *kept[KEPT] = {NULL};
    for (long block = 0; block < blocks; block++) {
        free(kept[block % KEPT]);
        char *bytes = kept[block % KEPT] = malloc(BLOCK);
        for (size_t at = 0; at < BLOCK; drain()) {
            ssize_t got = read(fd, bytes + at, BLOCK - at);
            if (got == 0 || (got < 0 && errno != EINTR && errno != EAGAIN)) {
                perror("read");
                _exit(1);
            }
            at += got > 0 ? got : 0;
        }
        if (block % 1000 == 0 && bytes[block % BLOCK] != 'a' + block % 26) {
            fprintf(stderr, "block %ld has other bytes\n", block);
            _exit(1);
        }
    }
}

int main(int count, char **arguments)
{
    if (count != 5)
        return 2;
    int serves = !strcmp(arguments[1], "serve"), fd = connection(serves, atoi(arguments[2]));
    long blocks = atol(arguments[3]);
    speaks = fd;
    begin_storm(atoi(arguments[4]));
    (serves ? send_blocks : take_blocks)(fd, blocks);
    return ticks == 0;
}
