/*
 * Test program that makes the calls that programs make on connections, and on memory with bytes
 * from connections. A seed decides the order. At the ends (ask, serve) it sends and receives
 * streams that both ends know, and compares every byte. In the middle (relay) it passes bytes on,
 * through memory of every kind.
 *
 *     actor ask PORT SEED | actor serve PORT SEED | actor relay PORT NEXT SEED
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#define CONNECTIONS 4
#define MOST        (1 << 20)

extern char **environ;

static uint64_t seed, state;
static const char *role;

static void fail(const char *what, ...)
{
    va_list list;
    va_start(list, what);
    fprintf(stderr, "%s, seed %lu: ", role, (unsigned long)seed);
    vfprintf(stderr, what, list);
    fprintf(stderr, " (errno: %s)\n", strerror(errno));
    va_end(list);
    _exit(1);
}

static uint64_t mix(uint64_t z)
{
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static uint64_t below(uint64_t bound)
{
    state += 0x9e3779b97f4a7c15u;
    return mix(state) % bound;
}

static size_t some(void)
{
    static const size_t sizes[] = {1, 100, 4095, 4096, 4097, 8192, 20000, 65536, 65537, 200000, 600000};
    size_t size = sizes[below(sizeof(sizes) / sizeof(*sizes))];
    return below(3) ? size : 1 + below(size);
}

/* Returns the byte at a place of a stream. */
static uint8_t byte(unsigned stream, uint64_t place)
{
    return mix(seed * 1000 + stream + (place / 8) * 0x9e3779b97f4a7c15u) >> place % 8 * 8;
}

static void make(uint8_t *to, unsigned stream, uint64_t place, size_t bytes)
{
    for (size_t at = 0; at < bytes; at++)
        to[at] = byte(stream, place + at);
}

static void check(const uint8_t *got, unsigned stream, uint64_t place, size_t bytes, const char *how)
{
    for (size_t at = 0; at < bytes; at++)
        if (got[at] != byte(stream, place + at))
            fail("%s: byte %lu of stream %u differs (%zu of %zu)", how, (unsigned long)(place + at), stream, at, bytes);
}

/* ---- writing ---- */

static ssize_t by_pipe(int fd, const uint8_t *from, size_t bytes)
{
    int ends[2];
    if (pipe(ends))
        fail("pipe");
    ssize_t in = write(ends[1], from, bytes < 65536 ? bytes : 65536);
    close(ends[1]);
    ssize_t done = 0, now;
    while (done < in && (now = splice(ends[0], NULL, fd, NULL, in - done, 0)) > 0)
        done += now;
    int before = errno;
    close(ends[0]);
    errno = before;
    return done ? done : -1;
}

static ssize_t by_file(int fd, const uint8_t *from, size_t bytes)
{
    FILE *file = tmpfile();
    if (!file || write(fileno(file), "xyz", 3) != 3 || write(fileno(file), from, bytes) != (ssize_t)bytes)
        fail("a temporary file");
    off_t at = 3;
    ssize_t sent = below(2) || lseek(fileno(file), 3, SEEK_SET) != 3 ? sendfile(fd, fileno(file), &at, bytes)
                                                                    : sendfile(fd, fileno(file), NULL, bytes);
    int before = errno;
    fclose(file);
    errno = before;
    return sent;
}

/* Writes some of the bytes, by a call that chance picks. */
static ssize_t put(int fd, uint8_t *from, size_t bytes)
{
    struct iovec parts[3] = {{from, bytes / 3}, {from + bytes / 3, bytes / 2}, {NULL, 0}};
    parts[2].iov_base = from + bytes / 3 + bytes / 2;
    parts[2].iov_len = bytes - bytes / 3 - bytes / 2;
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 3};
    struct mmsghdr messages[2] = {{.msg_hdr = {.msg_iov = parts, .msg_iovlen = 2}},
                                  {.msg_hdr = {.msg_iov = parts + 2, .msg_iovlen = 1}}};
    int sent;
    switch (below(11)) {
    case 0: return write(fd, from, bytes);
    case 1: return send(fd, from, bytes, MSG_NOSIGNAL | (below(4) ? 0 : MSG_MORE));
    case 2: return sendto(fd, from, bytes, MSG_DONTWAIT, NULL, 0);
    case 3: return writev(fd, parts, 3);
    case 4: return sendmsg(fd, &message, 0);
    case 5:
        if ((sent = sendmmsg(fd, messages, 2, 0)) <= 0)
            return -1;
        return messages[0].msg_len + (sent == 2 ? messages[1].msg_len : 0);
    case 6: return pwritev2(fd, parts, 3, -1, 0);
    case 7: return syscall(SYS_write, fd, from, bytes);
    case 8: return by_file(fd, from, bytes);
    case 9: return by_pipe(fd, from, bytes);
    default: return below(2) ? write(fd, from, bytes < 64 ? bytes : 64) : send(fd, from, bytes, 0);
    }
}

/* ---- reading ---- */

static ssize_t to_pipe(int fd, uint8_t *to, size_t bytes)
{
    int ends[2];
    if (pipe(ends))
        fail("pipe");
    ssize_t moved = splice(fd, NULL, ends[1], NULL, bytes, below(2) ? SPLICE_F_NONBLOCK : 0), got = 0, now;
    int before = errno;
    close(ends[1]);
    while (got < moved && (now = read(ends[0], to + got, moved - got)) > 0)
        got += now;
    close(ends[0]);
    errno = before;
    if (moved >= 0 && got != moved)
        fail("a pipe gave %zd of %zd", got, moved);
    return moved;
}

static ssize_t counted(int fd, uint8_t *to, size_t bytes)
{
    int there = 0;
    if (ioctl(fd, FIONREAD, &there))
        fail("FIONREAD");
    if (there == 0)
        return recv(fd, to, bytes, MSG_DONTWAIT);
    size_t now = (size_t)there < bytes ? (size_t)there : bytes;
    ssize_t got = recv(fd, to, now, MSG_DONTWAIT | MSG_WAITALL);
    if (got != (ssize_t)now)
        fail("FIONREAD said %d, and of %zu came %zd", there, now, got);
    return got;
}

static ssize_t peeked(int fd, uint8_t *to, size_t bytes)
{
    uint8_t *first = malloc(bytes);
    ssize_t seen = recv(fd, first, bytes, MSG_PEEK | MSG_DONTWAIT);
    ssize_t got = recv(fd, to, bytes, MSG_DONTWAIT);
    if (seen > 0 && (got < seen || memcmp(first, to, seen)))
        fail("MSG_PEEK showed %zd bytes, others than the %zd that came", seen, got);
    int before = errno;
    free(first);
    errno = before;
    return got;
}

/* Reads some bytes, by a call that chance picks. */
static ssize_t take(int fd, uint8_t *to, size_t bytes)
{
    struct iovec parts[2] = {{to, bytes / 3}, {to + bytes / 3, bytes - bytes / 3}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    struct mmsghdr one = {.msg_hdr = {.msg_iov = parts, .msg_iovlen = 2}};
    struct sockaddr_storage from;
    socklen_t length = sizeof(from);
    switch (below(11)) {
    case 0: return read(fd, to, bytes);
    case 1: return recv(fd, to, bytes, 0);
    case 2: return recvfrom(fd, to, bytes, MSG_DONTWAIT, (struct sockaddr *)&from, &length);
    case 3: return readv(fd, parts, 2);
    case 4: return recvmsg(fd, &message, 0);
    case 5: return recvmmsg(fd, &one, 1, MSG_DONTWAIT, NULL) == 1 ? (ssize_t)one.msg_len : -1;
    case 6: return preadv2(fd, parts, 2, -1, 0);
    case 7: return syscall(SYS_read, fd, to, bytes);
    case 8: return to_pipe(fd, to, bytes);
    case 9: return counted(fd, to, bytes);
    default: return peeked(fd, to, bytes);
    }
}

/* ---- descriptors and processes ---- */

static int passed(int fd)
{
    int pair[2];
    char control[CMSG_SPACE(sizeof(int))] = {0}, one = 'x';
    struct iovec part = {&one, 1};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair))
        fail("socketpair");
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    *head = (struct cmsghdr){CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
    memcpy(CMSG_DATA(head), &fd, sizeof(fd));
    if (sendmsg(pair[0], &message, 0) != 1)
        fail("passing a descriptor");
    close(fd); /* now no process has the connection open: its only descriptor is in the message */
    if (recvmsg(pair[1], &message, 0) != 1)
        fail("getting a descriptor");
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(fd));
    close(pair[0]);
    close(pair[1]);
    return fd;
}

/* Makes another descriptor of the same connection, and closes `fd`. Returns the new one. */
static int another(int fd)
{
    int to = -1, unused = fcntl(fd, F_DUPFD, 20);
    close(unused);
    switch (below(6)) {
    case 0: return passed(fd);
    case 1: to = dup(fd); break;
    case 2: to = fcntl(fd, F_DUPFD_CLOEXEC, 40); break;
    case 3: to = dup2(fd, unused); break;
    case 4: to = dup3(fd, unused, O_CLOEXEC); break;
    default: to = fcntl(fd, F_DUPFD, 3); break;
    }
    if (to < 0)
        fail("a copy of a descriptor");
    if (below(4))
        close(fd);
    else
        close_range(fd, fd, 0);
    return to;
}

/* Starts another program, by a call that chance picks. */
static void start(void)
{
    char *arguments[] = {"true", NULL};
    pid_t child = -1;
    switch (below(4)) {
    case 0:
        if ((child = vfork()) == 0) {
            execv("/bin/true", arguments);
            _exit(1);
        }
        break;
    case 1:
        if (posix_spawn(&child, "/bin/true", NULL, NULL, arguments, environ))
            fail("posix_spawn");
        break;
    case 2:
        if ((child = fork()) == 0) {
            execlp("true", "true", (char *)NULL);
            _exit(1);
        }
        break;
    default:
        if (system("true"))
            fail("system");
        return;
    }
    int status;
    if (child < 0 || waitpid(child, &status, 0) != child || status)
        fail("another program");
}

/* Continues the program in a child process, while this process waits for the child's end. */
static void go_on_in_child(void)
{
    pid_t child = fork();
    if (child < 0)
        fail("fork");
    if (child == 0) {
        alarm(100);
        return;
    }
    int status;
    for (int fd = 3; fd < 200; fd++)
        close(fd);
    if (waitpid(child, &status, 0) != child || status)
        _exit(1);
    _exit(0);
}

/* ---- memory ---- */

struct memory {
    enum { HEAP, MAPPED, SHARED, FILED, STATIC, KINDS } kind;
    uint8_t *at;
    size_t room;
};

static uint8_t fixed[2][MOST] __attribute__((aligned(4096)));
static int fixed_used[2];

static struct memory some_memory(size_t room)
{
    struct memory memory = {below(KINDS), NULL, room};
    size_t slot = below(2);
    if (memory.kind == STATIC && fixed_used[slot])
        memory.kind = HEAP;
    if (memory.kind == STATIC) {
        fixed_used[slot] = 1;
        memory.at = fixed[slot];
    } else if (memory.kind == HEAP) {
        memory.at = below(2) ? malloc(room) : realloc(calloc(1, 10), room);
    } else {
        int file = memory.kind == FILED ? fileno(tmpfile()) : -1;
        if (file >= 0 && ftruncate(file, room))
            fail("ftruncate");
        memory.at = mmap(NULL, room, PROT_READ | PROT_WRITE,
                         memory.kind == MAPPED ? MAP_PRIVATE | MAP_ANONYMOUS
                         : memory.kind == FILED ? MAP_PRIVATE
                                                : MAP_SHARED | MAP_ANONYMOUS,
                         file, 0);
    }
    if (!memory.at || memory.at == MAP_FAILED)
        fail("memory");
    return memory;
}

static void no_memory(struct memory *memory)
{
    if (memory->kind == HEAP)
        free(memory->at);
    else if (memory->kind == STATIC)
        fixed_used[memory->at == fixed[1]] = 0;
    else
        munmap(memory->at, memory->room);
    memory->at = NULL;
}

/* Moves memory to another place, or changes it in another way that keeps its contents. */
static void move_memory(struct memory *memory, size_t used)
{
    size_t more = memory->room + 8192 * below(20);
    if (memory->kind == HEAP && below(2)) {
        memory->at = realloc(memory->at, more);
        memory->room = more;
    } else if (memory->kind == MAPPED && below(2)) {
        memory->at = mremap(memory->at, memory->room, more, MREMAP_MAYMOVE);
        memory->room = more;
    } else if (memory->kind == MAPPED) {
        mprotect(memory->at, memory->room, PROT_READ);
        mprotect(memory->at, memory->room, PROT_READ | PROT_WRITE);
    } else {
        struct memory to = some_memory(memory->room);
        memcpy(to.at, memory->at, used);
        no_memory(memory);
        *memory = to;
    }
    if (!memory->at || memory->at == MAP_FAILED)
        fail("moving memory");
}

/* Checks that a child or a file gets the same bytes as this process. */
static void compare_elsewhere(const uint8_t *at, size_t bytes, unsigned stream, uint64_t place)
{
    if (below(2)) {
        pid_t child = fork();
        if (child == 0) {
            role = "a child";
            check(at, stream, place, bytes, "after fork");
            _exit(0);
        }
        int status;
        if (waitpid(child, &status, 0) != child || status)
            fail("a child sees other bytes");
        return;
    }
    FILE *file = tmpfile();
    if (!file || pwrite(fileno(file), at, bytes, 0) != (ssize_t)bytes)
        fail("pwrite");
    uint8_t *back = mmap(NULL, bytes, PROT_READ, MAP_PRIVATE, fileno(file), 0);
    check(back, stream, place, bytes, "through a file");
    munmap(back, bytes);
    fclose(file);
}

/* ---- connections ---- */

static int listening(int port)
{
    int fd = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (bind(fd, (struct sockaddr *)&address, sizeof(address)) || listen(fd, 16))
        fail("listen");
    return fd;
}

static int connected(int port)
{
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    for (int turn = 0; turn < 2000; turn++) {
        int fd = socket(AF_INET, SOCK_STREAM | (turn % 2 ? SOCK_NONBLOCK : 0), 0);
        int failed = connect(fd, (struct sockaddr *)&address, sizeof(address));
        struct pollfd ready = {fd, POLLOUT, 0};
        socklen_t length = sizeof(failed);
        if (failed && errno == EINPROGRESS && poll(&ready, 1, 10000) == 1)
            getsockopt(fd, SOL_SOCKET, SO_ERROR, &failed, &length);
        if (!failed)
            return fd;
        close(fd);
        usleep(5000);
    }
    fail("nobody listens at %d", port);
    return -1;
}

static void nonblocking(int fd)
{
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
}

static int nothing_now(ssize_t outcome)
{
    return outcome < 0 && (errno == EAGAIN || errno == EINTR);
}

/* ---- the ends ---- */

struct end {
    int fd;
    unsigned out, in; /* numbers of the two streams */
    uint64_t sent, to_send, received, to_receive;
    int ended_out, ended_in;
};

static uint64_t length_of(unsigned stream)
{
    return mix(seed + 77 * stream) % (3 << 20);
}

static void write_some(struct end *end)
{
    uint64_t left = end->to_send - end->sent;
    size_t bytes = some();
    bytes = bytes < left ? bytes : left;
    if (bytes == 0) {
        if (shutdown(end->fd, SHUT_WR))
            fail("shutdown");
        end->ended_out = 1;
        return;
    }
    uint8_t *memory = malloc(bytes + 5000), *from = memory + (below(2) ? 0 : below(5000));
    make(from, end->out, end->sent, bytes);
    ssize_t sent = put(end->fd, from, bytes);
    if (sent < 0 && !nothing_now(sent))
        fail("a write of %zu bytes", bytes);
    /* The call has returned, so changes to the memory must not change what it has sent. */
    memset(memory, 0xee, bytes + 5000);
    free(memory);
    end->sent += sent > 0 ? sent : 0;
}

static void read_some(struct end *end)
{
    size_t bytes = some();
    uint8_t local[70000];
    int on_stack = bytes <= sizeof(local) && below(3) == 0;
    struct memory memory = on_stack ? (struct memory){STATIC, local, sizeof(local)} : some_memory(MOST);
    if (below(20) == 0) {
        ssize_t thrown = recv(end->fd, NULL, bytes, MSG_TRUNC | MSG_DONTWAIT);
        if (thrown < 0 && !nothing_now(thrown))
            fail("a read that throws away");
        end->received += thrown > 0 ? thrown : 0;
        bytes = thrown == 0 ? 1 : bytes;
    }
    ssize_t got = take(end->fd, memory.at, bytes);
    if (got < 0 && !nothing_now(got))
        fail("a read of %zu bytes", bytes);
    if (got > 0) {
        if (!on_stack && below(8) == 0)
            move_memory(&memory, got);
        if (below(30) == 0)
            compare_elsewhere(memory.at, got, end->in, end->received);
        check(memory.at, end->in, end->received, got, "read");
        end->received += got;
    }
    if (!on_stack)
        no_memory(&memory);
    if (got == 0) {
        if (end->received != end->to_receive)
            fail("stream %u ended after %lu of %lu", end->in, (unsigned long)end->received,
                 (unsigned long)end->to_receive);
        end->ended_in = 1;
    }
}

static void talk(struct end *ends)
{
    for (;;) {
        struct pollfd ready[CONNECTIONS];
        int open = 0;
        for (int at = 0; at < CONNECTIONS; at++) {
            struct end *end = &ends[at];
            int wanted = (end->ended_in ? 0 : POLLIN) | (end->ended_out ? 0 : POLLOUT);
            ready[at] = (struct pollfd){wanted ? end->fd : -1, wanted, 0};
            open += wanted != 0;
        }
        if (!open)
            return;
        if (poll(ready, CONNECTIONS, 30000) <= 0)
            fail("30 s without an event: %lu of %lu received", (unsigned long)ends[0].received,
                 (unsigned long)ends[0].to_receive);
        for (int at = 0; at < CONNECTIONS; at++) {
            if (ready[at].revents & POLLOUT && !ends[at].ended_out)
                write_some(&ends[at]);
            if (ready[at].revents & (POLLIN | POLLHUP) && !ends[at].ended_in)
                read_some(&ends[at]);
            if (below(60) == 0)
                ends[at].fd = another(ends[at].fd);
        }
        if (below(400) == 0)
            start();
        if (below(1500) == 0)
            go_on_in_child();
    }
}

static void be_end(int port, int serves)
{
    struct end ends[CONNECTIONS];
    int listener = serves ? listening(port) : -1;
    for (int at = 0; at < CONNECTIONS; at++) {
        uint8_t number = at;
        int fd = serves ? accept4(listener, NULL, NULL, 0) : connected(port);
        if (fd < 0)
            fail("accept");
        if (!serves && (fcntl(fd, F_SETFL, 0) || write(fd, &number, 1) != 1))
            fail("a first write");
        if (serves && recv(fd, &number, 1, MSG_WAITALL) != 1)
            fail("a first read");
        unsigned asks = 2 * number, answers = 2 * number + 1;
        nonblocking(fd);
        struct end end = {.fd = fd, .out = serves ? answers : asks, .in = serves ? asks : answers};
        end.to_send = length_of(end.out);
        end.to_receive = length_of(end.in);
        ends[number] = end;
    }
    talk(ends);
}

/* ---- the middle ---- */

struct way {
    int *from, *to;
    struct memory memory;
    size_t start, end;
    int ended;
};

static void pass_on(struct way *way, int readable, int writable)
{
    if (readable && !way->ended && way->start == way->end) {
        if (way->memory.at && below(3) == 0)
            no_memory(&way->memory);
        if (!way->memory.at)
            way->memory = some_memory(MOST);
        way->start = way->end = below(2) ? 0 : below(5000);
        ssize_t got = take(*way->from, way->memory.at + way->start, some());
        if (got < 0 && !nothing_now(got))
            fail("a relay's read");
        if (got == 0) {
            shutdown(*way->to, SHUT_WR);
            way->ended = 1;
        }
        way->end += got > 0 ? got : 0;
        if (got > 0 && below(6) == 0)
            move_memory(&way->memory, way->end);
    }
    if (writable && way->start < way->end) {
        size_t bytes = 1 + (below(4) ? way->end - way->start - 1 : below(way->end - way->start));
        if (below(10) == 0) {
            /* Reads one byte and writes it back, to touch memory whose bytes may not be here yet. */
            volatile uint8_t *looked = way->memory.at + way->start + below(bytes);
            *looked = *looked;
        }
        ssize_t sent = put(*way->to, way->memory.at + way->start, bytes);
        if (sent < 0 && !nothing_now(sent))
            fail("a relay's write");
        way->start += sent > 0 ? sent : 0;
    }
}

static void relay(int port, int next)
{
    int listener = listening(port), fds[CONNECTIONS][2];
    struct way ways[CONNECTIONS][2] = {0};
    for (int at = 0; at < CONNECTIONS; at++) {
        fds[at][0] = accept(listener, NULL, NULL);
        fds[at][1] = connected(next);
        for (int side = 0; side < 2; side++) {
            nonblocking(fds[at][side]);
            ways[at][side] = (struct way){.from = &fds[at][side], .to = &fds[at][!side]};
        }
    }
    for (;;) {
        struct pollfd ready[CONNECTIONS][2];
        int open = 0;
        for (int at = 0; at < CONNECTIONS; at++)
            for (int side = 0; side < 2; side++) {
                struct way *in = &ways[at][side], *out = &ways[at][!side];
                int reads = !in->ended && in->start == in->end, writes = out->start < out->end;
                int wanted = (reads ? POLLIN : 0) | (writes ? POLLOUT : 0);
                ready[at][side] = (struct pollfd){wanted ? fds[at][side] : -1, wanted, 0};
                open += wanted != 0;
            }
        if (!open)
            return;
        if (poll((struct pollfd *)ready, 2 * CONNECTIONS, 30000) <= 0)
            fail("30 s without an event in the relay");
        for (int at = 0; at < CONNECTIONS; at++)
            for (int side = 0; side < 2; side++)
                pass_on(&ways[at][side], ready[at][side].revents & (POLLIN | POLLHUP),
                        ready[at][!side].revents & POLLOUT);
        if (below(50) == 0) {
            int at = below(CONNECTIONS), side = below(2);
            fds[at][side] = another(fds[at][side]);
        }
        if (below(800) == 0)
            go_on_in_child();
    }
}

int main(int count, char **arguments)
{
    if (count < 4)
        return 2;
    role = arguments[1];
    seed = strtoull(arguments[count - 1], NULL, 10);
    state = seed * 31 + role[0];
    alarm(100);
    if (!strcmp(role, "relay"))
        relay(atoi(arguments[2]), atoi(arguments[3]));
    else
        be_end(atoi(arguments[2]), !strcmp(role, "serve"));
    return 0;
}
