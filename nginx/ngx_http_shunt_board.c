/* SPDX-License-Identifier: MIT */
/*
 * Memory shared with this machine's agent (shuntd): the board, which the agent writes, and the
 * counters, which this worker writes. The board lists the peers, which are other machines' agents,
 * with their keys and limits. A handoff lets a peer send the body of a response on a client's
 * connection.
 */
#include <sys/mman.h>

#include "ngx_http_shunt.h"

#define NGX_HTTP_SHUNT_BOARD_YIELDS 64
#define NGX_HTTP_SHUNT_BOARD_SLEEPS 40
#define NGX_HTTP_SHUNT_BOARD_SLEEP  100 /* microseconds */

static struct shunt_board *ngx_http_shunt_board_memory;
static size_t ngx_http_shunt_board_bytes;

/* Counters that are used until the first agent is connected. Then they are added to the counters in
 * shared memory. */
static struct shunt_counters ngx_http_shunt_counters_early;
static struct shunt_counters *ngx_http_shunt_counters = &ngx_http_shunt_counters_early;
static size_t ngx_http_shunt_counters_bytes;

/* Maps a whole file of at least `least` bytes. *size: number of bytes mapped. */
static void *ngx_http_shunt_map(int fd, size_t least, size_t *size, int protection, ngx_log_t *log)
{
    void *p;
    struct stat st;

    /* a shorter file would cause a SIGBUS later */
    if (fstat(fd, &st) == -1 || (size_t) st.st_size < least) {
        ngx_log_error(NGX_LOG_ERR, log, 0,
                      "shunt: the agent's shared memory is too small; restart shuntd");
        return NULL;
    }

    *size = st.st_size;
    p = mmap(NULL, *size, protection, MAP_SHARED, fd, 0);

    if (p == MAP_FAILED) {
        ngx_log_error(NGX_LOG_ERR, log, ngx_errno, "shunt: mmap() failed");
        return NULL;
    }

    return p;
}

/* Moves the numbers of handoffs (by peer) to new counters, which come with each new connection to
 * an agent. So each handoff is counted only once. */
static void ngx_http_shunt_move_handoffs(struct shunt_counters *from, struct shunt_counters *to)
{
    ngx_uint_t i;

    for (i = 0; i < SHUNT_BOARD_PEERS; i++) {
        to->handoffs[i] = from->handoffs[i];
        from->handoffs[i] = 0;
    }
}

/* Number of entries that this module reads on a board. */
static ngx_uint_t ngx_http_shunt_board_peers(const struct shunt_board *board)
{
    return ngx_min(board->peers, SHUNT_BOARD_PEERS);
}

/* Checks a board, perhaps of an agent of another version. Head and entries may be longer than those
 * that this module knows. They must have the fields of version 7. */
static ngx_int_t ngx_http_shunt_board_check(const struct shunt_board *board, size_t size,
                                            ngx_log_t *log)
{
    uint64_t at = board->peers_at, each = board->peer_bytes;

    if (board->magic != SHUNT_BOARD_MAGIC || board->oldest > SHUNT_VERSION ||
        board->newest < SHUNT_VERSION_OLDEST) {
        ngx_log_error(NGX_LOG_ERR, log, 0,
                      "shunt: the agent speaks versions %ui to %ui, this module %d to %d: install "
                      "both from one release, or from two that follow each other",
                      (ngx_uint_t) board->oldest, (ngx_uint_t) board->newest, SHUNT_VERSION_OLDEST,
                      SHUNT_VERSION);
        return NGX_ERROR;
    }

    if (at < SHUNT_THROUGH(struct shunt_board, name) ||
        each < SHUNT_THROUGH(struct shunt_board_peer, prefix) || at % 8 || each % 4 ||
        at + ngx_http_shunt_board_peers(board) * each > size) {
        ngx_log_error(NGX_LOG_ERR, log, 0,
                      "shunt: the agent's board cannot be read; restart shuntd and nginx");
        return NGX_ERROR;
    }

    return NGX_OK;
}

ngx_int_t ngx_http_shunt_board_map(int board_fd, int counters_fd, ngx_log_t *log)
{
    size_t size, counters_size;
    ngx_uint_t i;
    struct shunt_board *board;
    struct shunt_counters *counters;

    board = ngx_http_shunt_map(board_fd, SHUNT_THROUGH(struct shunt_board, name), &size, PROT_READ,
                               log);
    if (board == NULL) {
        return NGX_ERROR;
    }

    if (ngx_http_shunt_board_check(board, size, log) != NGX_OK) {
        munmap(board, size);
        return NGX_ERROR;
    }

    counters = ngx_http_shunt_map(counters_fd, SHUNT_THROUGH(struct shunt_counters, handoffs),
                                  &counters_size, PROT_READ | PROT_WRITE, log);
    if (counters == NULL) {
        munmap(board, size);
        return NGX_ERROR;
    }

    ngx_http_shunt_move_handoffs(ngx_http_shunt_counters, counters);

    if (ngx_http_shunt_board_memory) {
        munmap(ngx_http_shunt_board_memory, ngx_http_shunt_board_bytes);
    }

    if (ngx_http_shunt_counters != &ngx_http_shunt_counters_early) {
        munmap(ngx_http_shunt_counters, ngx_http_shunt_counters_bytes);
    }

    ngx_http_shunt_board_memory = board;
    ngx_http_shunt_board_bytes = size;
    ngx_http_shunt_counters = counters;
    ngx_http_shunt_counters_bytes = counters_size;

    for (i = 0; i < SHUNT_COUNTERS; i++) {
        ngx_http_shunt_count(i, ngx_http_shunt_counters_early.value[i]);
        ngx_http_shunt_counters_early.value[i] = 0;
    }

    return NGX_OK;
}

/* Returns the board. NULL: no agent was connected yet, or the last one has ended. */
const struct shunt_board *ngx_http_shunt_board(void)
{
    struct shunt_board *board = ngx_http_shunt_board_memory;

    if (board == NULL || !__atomic_load_n(&board->alive, __ATOMIC_ACQUIRE)) {
        return NULL;
    }

    return board;
}

/* Returns a peer's entry. The board says where the first entry begins, and how long each is. */
const struct shunt_board_peer *ngx_http_shunt_board_entry(const struct shunt_board *board,
                                                          ngx_uint_t index)
{
    const u_char *first = (const u_char *) board + board->peers_at;

    return (const struct shunt_board_peer *) (first + index * board->peer_bytes);
}

ngx_str_t ngx_http_shunt_board_name(void)
{
    ngx_str_t name;

    name.data = ngx_http_shunt_board_memory->name;
    name.len = strnlen((char *) name.data, SHUNT_NAME_BYTES - 1);

    return name;
}

/* Returns a peer's name, for logs. */
ngx_str_t ngx_http_shunt_board_peer(ngx_uint_t index)
{
    ngx_str_t name = ngx_string("nobody");

    if (ngx_http_shunt_board_memory &&
        index < ngx_http_shunt_board_peers(ngx_http_shunt_board_memory)) {
        name.data = (u_char *) ngx_http_shunt_board_entry(ngx_http_shunt_board_memory, index)->name;
        name.len = strnlen((char *) name.data, SHUNT_NAME_BYTES - 1);
    }

    return name;
}

/* Copies an entry. NGX_AGAIN: the agent is changing it. NGX_DECLINED: the peer has no keys now. */
static ngx_int_t ngx_http_shunt_board_copy(const struct shunt_board_peer *entry,
                                           ngx_http_shunt_peer_t *peer)
{
    uint32_t epoch, state;

    epoch = __atomic_load_n(&entry->epoch, __ATOMIC_ACQUIRE);
    state = __atomic_load_n(&entry->state, __ATOMIC_ACQUIRE);

    if (epoch & 1) {
        return NGX_AGAIN;
    }

    peer->lost = state == SHUNT_PEER_LOST;
    peer->closed = __atomic_load_n(&entry->closed, __ATOMIC_RELAXED);
    ngx_memcpy(peer->our_key, entry->our_key, 16);
    ngx_memcpy(peer->their_key, entry->their_key, 16);
    peer->epoch = epoch;

    /* makes sure that the copies were read before the epoch is read again */
    __atomic_thread_fence(__ATOMIC_ACQUIRE);

    if (__atomic_load_n(&entry->epoch, __ATOMIC_RELAXED) != epoch) {
        return NGX_AGAIN;
    }

    return state == SHUNT_PEER_UP || state == SHUNT_PEER_LOST ? NGX_OK : NGX_DECLINED;
}

/*
 * Copies an entry, and waits while the agent changes it. A change, made when a session begins or
 * ends, takes microseconds. But the agent may need this core to continue, or may have been killed,
 * so the wait ends after a few milliseconds.
 */
static ngx_int_t ngx_http_shunt_board_read(const struct shunt_board_peer *entry,
                                           ngx_http_shunt_peer_t *peer)
{
    ngx_int_t rc;
    ngx_uint_t i;

    for (i = 0; i < NGX_HTTP_SHUNT_BOARD_YIELDS + NGX_HTTP_SHUNT_BOARD_SLEEPS; i++) {
        rc = ngx_http_shunt_board_copy(entry, peer);

        if (rc != NGX_AGAIN) {
            return rc;
        }

        if (i < NGX_HTTP_SHUNT_BOARD_YIELDS) {
            ngx_sched_yield();

        } else {
            usleep(NGX_HTTP_SHUNT_BOARD_SLEEP);
        }
    }

    return NGX_DECLINED;
}

/* Finds the peer with this name, connected or lost. */
ngx_int_t ngx_http_shunt_board_find(ngx_str_t *name, ngx_http_shunt_peer_t *peer)
{
    ngx_uint_t i, n;
    const struct shunt_board_peer *entry;
    const struct shunt_board *board = ngx_http_shunt_board();

    if (board == NULL || name->len == 0 || name->len >= SHUNT_NAME_BYTES) {
        return NGX_DECLINED;
    }

    n = ngx_http_shunt_board_peers(board);

    for (i = 0; i < n; i++) {
        entry = ngx_http_shunt_board_entry(board, i); /* an entry's name never changes */

        if (ngx_memcmp(entry->name, name->data, name->len) == 0 && entry->name[name->len] == '\0') {
            peer->index = i;
            return ngx_http_shunt_board_read(entry, peer);
        }
    }

    return NGX_DECLINED;
}

/* Adds to a counter. No lock is needed: this worker is the only writer, and each write is one whole
 * word. */
void ngx_http_shunt_count(ngx_uint_t counter, uint64_t n)
{
    uint64_t *value = &ngx_http_shunt_counters->value[counter];

    __atomic_store_n(value, *value + n, __ATOMIC_RELAXED);
}

/* Counts a handoff to a peer: `change` is 1 when it begins, and -1 when it is over. */
void ngx_http_shunt_count_handoff(ngx_uint_t peer, ngx_int_t change)
{
    uint32_t *value = &ngx_http_shunt_counters->handoffs[peer];

    __atomic_store_n(value, *value + change, __ATOMIC_RELAXED);
}
