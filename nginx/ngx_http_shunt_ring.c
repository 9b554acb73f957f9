/* SPDX-License-Identifier: MIT */
/*
 * The reading side of a BPF ring buffer (kernel/bpf/ringbuf.c), without libbpf:
 *
 *   page 0      consumer position, ours to write
 *   page 1      producer position, the kernel's
 *   from 2      the records, mapped twice in a row, so that none ever wraps
 *
 * A record is a 32-bit length (bit 31: still being written, bit 30: discarded), a 32-bit page
 * offset, then the data, padded to 8 bytes. The kernel wakes a reader only for a record at the
 * consumer's position, so the ring is read until it is empty. By this ring the kernel tells this
 * worker what becomes of its handoffs, and answers its calls. A handoff lets a backend send a
 * response's body on a client's connection.
 */
#include <sched.h>
#include <sys/mman.h>

#include "ngx_http_shunt.h"

#define NGX_HTTP_SHUNT_RING_BUSY    0x80000000u
#define NGX_HTTP_SHUNT_RING_DISCARD 0x40000000u
#define NGX_HTTP_SHUNT_RING_HEADER  8

/* Longest wait, in nanoseconds, for a record that another processor still writes: an answer may
 * come after it in the ring. A write takes about 100 ns, unless an interrupt stops the processor,
 * or a hypervisor stops the machine. */
#define NGX_HTTP_SHUNT_RING_WAIT 20000000

struct ngx_http_shunt_ring_s {
    ngx_connection_t *connection;
    unsigned long *consumer;
    unsigned long *producer;
    u_char *records;
    size_t size;
    uint32_t index;        /* number of the ring, for struct shunt_begin */
    ngx_uint_t stuck;      /* 1: the wait for a record took too long, and nothing was read since */
    ngx_uint_t references; /* number of users: connection to the agent, handoffs, and others */
};

static void ngx_http_shunt_ring_handler(ngx_event_t *rev);

/* The kernel's newest answer to a call. It is taken from the ring right after the call. */
static struct shunt_state ngx_http_shunt_answer;

/* Size of the ring in bytes (max_entries of the BPF map), or 0 if it is not known. It is read from
 * /proc, because this process may not be allowed to use bpf(2). */
static size_t ngx_http_shunt_ring_size(int fd)
{
    FILE *file;
    char path[64], line[128];
    unsigned long type = 0, size = 0;

    snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", fd);

    file = fopen(path, "re");
    if (file == NULL) {
        return 0;
    }

    while (fgets(line, sizeof(line), file)) {
        (void) sscanf(line, "map_type: %lu", &type);
        (void) sscanf(line, "max_entries: %lu", &size);
    }

    fclose(file);

    return type == 27 /* BPF_MAP_TYPE_RINGBUF */ ? size : 0;
}

static void ngx_http_shunt_ring_unmap(ngx_http_shunt_ring_t *ring)
{
    if (ring->consumer != MAP_FAILED) {
        munmap(ring->consumer, ngx_pagesize);
    }

    if (ring->producer != MAP_FAILED) {
        munmap(ring->producer, ngx_pagesize + 2 * ring->size);
    }

    free(ring);
}

static ngx_int_t ngx_http_shunt_ring_map(ngx_http_shunt_ring_t *ring, int fd)
{
    ring->consumer = MAP_FAILED;
    ring->producer = MAP_FAILED;
    ring->size = ngx_http_shunt_ring_size(fd);

    if (ring->size == 0) {
        ngx_set_errno(EINVAL);
        return NGX_ERROR;
    }

    ring->consumer = mmap(NULL, ngx_pagesize, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    ring->producer =
        mmap(NULL, ngx_pagesize + 2 * ring->size, PROT_READ, MAP_SHARED, fd, ngx_pagesize);

    if (ring->consumer == MAP_FAILED || ring->producer == MAP_FAILED) {
        return NGX_ERROR;
    }

    ring->records = (u_char *) ring->producer + ngx_pagesize;

    return NGX_OK;
}

/* Opens a ring. Becomes the owner of the descriptor, and closes it on failure. */
ngx_http_shunt_ring_t *ngx_http_shunt_ring_open(int fd, uint32_t index, ngx_log_t *log)
{
    ngx_connection_t *c = NULL;
    ngx_http_shunt_ring_t *ring;

    ring = calloc(1, sizeof(*ring));
    if (ring == NULL) {
        close(fd);
        return NULL;
    }

    if (ngx_http_shunt_ring_map(ring, fd) != NGX_OK) {
        ngx_log_error(NGX_LOG_ERR, log, ngx_errno, "shunt: cannot map the completion ring");
        goto failed;
    }

    c = ngx_get_connection(fd, log);
    if (c == NULL) {
        goto failed;
    }

    c->data = ring;
    c->read->handler = ngx_http_shunt_ring_handler;
    c->read->log = log;
    c->write->log = log;
    c->read->channel = 1; /* not a client's connection, which worker exit would report as leaked */
    c->write->channel = 1;

    ring->connection = c;
    ring->index = index;
    ring->references = 1;

    if (ngx_handle_read_event(c->read, 0) != NGX_OK) {
        goto failed;
    }

    return ring;

failed:

    if (c) {
        ngx_free_connection(c);
    }

    ngx_http_shunt_ring_unmap(ring);
    close(fd);

    return NULL;
}

void ngx_http_shunt_ring_hold(ngx_http_shunt_ring_t *ring)
{
    ring->references++;
}

void ngx_http_shunt_ring_release(ngx_http_shunt_ring_t *ring)
{
    if (--ring->references > 0) {
        return;
    }

    ngx_close_connection(ring->connection);
    ngx_http_shunt_ring_unmap(ring);
}

static void ngx_http_shunt_ring_record(const u_char *record, uint32_t length)
{
    struct shunt_event event;
    ngx_http_shunt_ctx_t *ctx;

    if ((length & NGX_HTTP_SHUNT_RING_DISCARD) || length < sizeof(event)) {
        return;
    }

    record += NGX_HTTP_SHUNT_RING_HEADER;
    ngx_memcpy(&event, record, sizeof(event));

    if (event.kind == SHUNT_EVENT_STATE) {
        if (length >= SHUNT_THROUGH(struct shunt_state, shut)) {
            ngx_memzero(&ngx_http_shunt_answer, sizeof(struct shunt_state));
            ngx_memcpy(&ngx_http_shunt_answer, record, ngx_min(length, sizeof(struct shunt_state)));
        }

        return;
    }

    ctx = ngx_http_shunt_pending_find(event.handoff);
    if (ctx) {
        ngx_http_shunt_handoff_event(ctx, &event);
    }
}

/* Handles the records in the ring, without waiting. Returns 1 if all were handled, 0 if a record is
 * still being written: the records after it have to wait. */
ngx_uint_t ngx_http_shunt_ring_drain(ngx_http_shunt_ring_t *ring)
{
    u_char *record;
    uint32_t length;
    unsigned long consumer, producer;

    consumer = __atomic_load_n(ring->consumer, __ATOMIC_RELAXED);

    for (;;) {
        producer = __atomic_load_n(ring->producer, __ATOMIC_ACQUIRE);

        if (consumer == producer) {
            return 1;
        }

        record = ring->records + (consumer & (ring->size - 1));
        length = __atomic_load_n((uint32_t *) record, __ATOMIC_ACQUIRE);

        if (length & NGX_HTTP_SHUNT_RING_BUSY) {
            return 0; /* the kernel wakes us when the record is complete */
        }

        /* handlers only change state and post events: they release no ring and no request */
        ngx_http_shunt_ring_record(record, length);

        length &= ~NGX_HTTP_SHUNT_RING_DISCARD;
        consumer += (length + NGX_HTTP_SHUNT_RING_HEADER + 7) & ~7UL;
        __atomic_store_n(ring->consumer, consumer, __ATOMIC_SEQ_CST);
        ring->stuck = 0;
    }
}

static uint64_t ngx_http_shunt_ring_clock(void)
{
    struct timespec now;

    (void) clock_gettime(CLOCK_MONOTONIC, &now);

    return (uint64_t) now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Handles all records in the ring, and waits for one that is still being written. NGX_AGAIN: the
 * wait took too long. Later calls then do not wait, until the record has been read. */
static ngx_int_t ngx_http_shunt_ring_read(ngx_http_shunt_ring_t *ring)
{
    uint64_t until = 0;

    while (!ngx_http_shunt_ring_drain(ring)) {
        if (ring->stuck) {
            return NGX_AGAIN;
        }

        if (until == 0) {
            until = ngx_http_shunt_ring_clock() + NGX_HTTP_SHUNT_RING_WAIT;
        }

        ring->stuck = ngx_http_shunt_ring_clock() > until;
        (void) sched_yield();
    }

    return NGX_OK;
}

/*
 * Prepares a call that the kernel answers in this ring. Removes older answers, so that an answer
 * found afterwards belongs to the call. NGX_AGAIN: the call must not be made now.
 */
ngx_int_t ngx_http_shunt_ring_ask(ngx_http_shunt_ring_t *ring)
{
    ngx_int_t rc = ngx_http_shunt_ring_read(ring);

    ngx_http_shunt_answer.handoff = 0;
    ngx_http_shunt_answer.kind = 0;

    return rc;
}

/* Returns 1 if the kernel has answered in the ring since ngx_http_shunt_ring_ask(), and the answer
 * was read, whichever handoff it is about. */
ngx_uint_t ngx_http_shunt_ring_answered(void)
{
    return ngx_http_shunt_answer.kind == SHUNT_EVENT_STATE;
}

/*
 * Returns the kernel's answer about a handoff since ngx_http_shunt_ring_ask(). Handles earlier
 * events in the ring first, perhaps this handoff's completion. NULL: there is no such answer, for
 * example because the ring had no room for it, or because a record before it takes too long to be
 * written.
 */
const struct shunt_state *ngx_http_shunt_ring_answer(ngx_http_shunt_ring_t *ring, uint64_t handoff)
{
    if (ngx_http_shunt_ring_read(ring) != NGX_OK || handoff == 0) {
        return NULL;
    }

    return ngx_http_shunt_answer.handoff == handoff ? &ngx_http_shunt_answer : NULL;
}

uint32_t ngx_http_shunt_ring_index(const ngx_http_shunt_ring_t *ring)
{
    return ring->index;
}

static void ngx_http_shunt_ring_handler(ngx_event_t *rev)
{
    ngx_connection_t *c = rev->data;

    (void) ngx_http_shunt_ring_drain(c->data);

    rev->ready = 0;
    (void) ngx_handle_read_event(rev, 0);
}
