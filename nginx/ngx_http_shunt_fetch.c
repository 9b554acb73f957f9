/* SPDX-License-Identifier: MIT */
/*
 * Fetches a payload: a body that the backend has offered, but that has to pass through this nginx
 * after all. The agent gets it from the backend's agent, and passes this worker (a process of
 * nginx) a socket that yields the payload's bytes. Two buffers, filled from this socket and emptied
 * by the filters, take the place of an upstream's pipe. So the socket is read as fast as the client
 * takes bytes.
 */
#include "ngx_http_shunt.h"

#define NGX_HTTP_SHUNT_FETCH_BUFS  2
#define NGX_HTTP_SHUNT_FETCH_BYTES (64 * 1024)
#define NGX_HTTP_SHUNT_FETCH_FIRST 2000 /* ms for the first byte, if again.c can ask once more */

static void ngx_http_shunt_fetch_timeout_handler(ngx_event_t *ev);
static void ngx_http_shunt_stream_handler(ngx_event_t *rev);

/* Ends a fetch that has failed. A posted event then handles the failure, so this may be called from
 * anywhere, filters included. If the header has left, rest.c may still relay the rest. If not, the
 * response may be asked for once more (again.c). Else the request fails. `why`: for the log. */
void ngx_http_shunt_fetch_failed(ngx_http_shunt_ctx_t *ctx, const char *why)
{
    ngx_log_error(NGX_LOG_ERR, ctx->request->connection->log, 0,
                  "shunt: fetch failed, %s, with %uL of %uL bytes missing, offer %016xL of "
                  "\"%V\"%V",
                  why, ctx->fetch.left, ctx->payload.length, ctx->payload.number,
                  &ctx->payload.backend, ngx_http_shunt_trace_text(ctx->request));

    ngx_http_shunt_count(SHUNT_COUNT_fetch_failed, 1);
    ngx_http_shunt_fetch_close(ctx);
    ctx->relayable = ctx->mode == SHUNT_MODE_FETCH_LATE;
    ngx_http_shunt_fail(ctx);
}

/* Returns how long to wait for the first byte from now on, in ms, if the fetch has waited `waited`
 * ms already. The wait is short if the response can be asked for once more. After the header has
 * left, only the rest of the same representation would help. Another backend may not have it, so a
 * slow fetch is better. */
static ngx_msec_t ngx_http_shunt_fetch_patience(ngx_http_shunt_ctx_t *ctx, ngx_msec_t waited)
{
    if (ctx->mode == SHUNT_MODE_FETCH_LATE || !ngx_http_shunt_may_ask_again(ctx->request, ctx) ||
        ctx->fetch.timeout <= NGX_HTTP_SHUNT_FETCH_FIRST) {
        return ctx->fetch.timeout;
    }

    return waited < NGX_HTTP_SHUNT_FETCH_FIRST ? NGX_HTTP_SHUNT_FETCH_FIRST - waited : 1;
}

/* Asks the agent for the payload. Returns NGX_AGAIN: the request stays open, as for any filter that
 * holds bytes back. */
ngx_int_t ngx_http_shunt_fetch_begin(ngx_http_shunt_ctx_t *ctx,
                                     ngx_http_output_body_filter_pt output)
{
    struct shunt_fetch msg;
    ngx_http_request_t *r = ctx->request;

    ngx_http_shunt_count(SHUNT_COUNT_fetched, 1);

    ctx->fetch.output = output;
    ctx->fetch.left = ctx->payload.length;
    ctx->fetch.timeout = r->upstream ? r->upstream->conf->read_timeout : 60000;
    ctx->id = ngx_http_shunt_pending_add(ctx);
    r->buffered |= NGX_HTTP_SHUNT_BUFFERED;

    ngx_memzero(&msg, sizeof(msg));
    msg.header.kind = SHUNT_MSG_FETCH;
    msg.header.size = sizeof(msg);
    msg.peer = ctx->peer.index;
    msg.fetch = ctx->id;
    msg.offer = ctx->payload.number;
    msg.length = ctx->payload.length;
    ngx_memcpy(msg.tag, ctx->payload.tag, 16);
    ngx_http_shunt_trace(r, msg.trace);

    if (ctx->id == 0 || !ngx_http_shunt_agent_ready() ||
        ngx_http_shunt_agent_post(&msg, sizeof(msg)) != NGX_OK) {
        ngx_http_shunt_fetch_failed(ctx, "this machine's agent accepts no fetches");
        return NGX_AGAIN;
    }

    ctx->progress_at = ngx_current_msec;
    ctx->progress.data = ctx;
    ctx->progress.handler = ngx_http_shunt_fetch_timeout_handler;
    ctx->progress.log = r->connection->log;
    ngx_add_timer(&ctx->progress, ngx_http_shunt_fetch_patience(ctx, 0));
    ngx_http_shunt_pulse_watch();

    return NGX_AGAIN;
}

static void ngx_http_shunt_fetch_timeout_handler(ngx_event_t *ev)
{
    ngx_http_shunt_fetch_failed(ev->data, "no data came in time");
}

/* Handles FETCHED, the agent's answer. Becomes the owner of the descriptor, which is -1 if the
 * kernel dropped it because this process has no room for another one. */
void ngx_http_shunt_fetch_connected(ngx_http_shunt_ctx_t *ctx, int fd, uint64_t length)
{
    ngx_connection_t *stream;
    ngx_http_request_t *r = ctx->request;

    if ((ctx->mode != SHUNT_MODE_FETCH_EARLY && ctx->mode != SHUNT_MODE_FETCH_LATE) ||
        ctx->fetch.stream || ctx->failure.posted) {
        if (fd != -1) {
            close(fd);
        }

        return;
    }

    if (fd == -1) {
        ngx_http_shunt_fetch_failed(ctx, "this worker has no descriptor left");
        return;
    }

    if (length != ctx->payload.length || ngx_nonblocking(fd) == -1) {
        close(fd);
        ngx_http_shunt_fetch_failed(ctx, "its length differs from the offer's");
        return;
    }

    stream = ngx_get_connection(fd, r->connection->log);
    if (stream == NULL) {
        close(fd);
        ngx_http_shunt_fetch_failed(ctx, "worker_connections are exhausted");
        return;
    }

    stream->data = ctx;
    stream->recv = ngx_recv;
    stream->log = r->connection->log;
    stream->read->log = stream->log;
    stream->write->log = stream->log;
    stream->read->handler = ngx_http_shunt_stream_handler;
    ctx->fetch.stream = stream;

    /* From now on the socket tells how the fetch ends, as long as this machine's agent runs. So the
     * socket's timer replaces ctx->progress. */
    ngx_del_timer(&ctx->progress);
    ngx_add_timer(stream->read,
                  ngx_http_shunt_fetch_patience(ctx, ngx_current_msec - ctx->progress_at));
    ctx->progress_at = ngx_current_msec;

    if (ngx_handle_read_event(stream->read, 0) != NGX_OK) {
        ngx_http_shunt_fetch_failed(ctx, "its socket cannot be watched");
    }
}

/* Ends a fetch, complete or not. Tells the agent, if the socket has not come yet. */
void ngx_http_shunt_fetch_close(ngx_http_shunt_ctx_t *ctx)
{
    struct shunt_abort msg = {{SHUNT_MSG_ABORT, sizeof(struct shunt_abort)}, ctx->id};

    if (ctx->fetch.stream) {
        ngx_close_connection(ctx->fetch.stream);
        ctx->fetch.stream = NULL;

    } else if (ctx->id) {
        (void) ngx_http_shunt_agent_post(&msg, sizeof(msg));
    }

    if (ctx->progress.timer_set) {
        ngx_del_timer(&ctx->progress);
    }

    ngx_http_shunt_pending_remove(ctx->id);
    ctx->id = 0;
}

static ngx_chain_t *ngx_http_shunt_fetch_buf(ngx_http_shunt_ctx_t *ctx)
{
    ngx_chain_t *cl;
    ngx_pool_t *pool = ctx->request->pool;
    ngx_http_shunt_fetch_t *f = &ctx->fetch;

    if (f->free) {
        cl = f->free;
        f->free = cl->next;
        cl->next = NULL;
        return cl;
    }

    if (f->bufs == NGX_HTTP_SHUNT_FETCH_BUFS) {
        return NULL;
    }

    cl = ngx_alloc_chain_link(pool);
    if (cl == NULL) {
        return NULL;
    }

    cl->buf = ngx_create_temp_buf(pool, ngx_min(f->left, NGX_HTTP_SHUNT_FETCH_BYTES));
    if (cl->buf == NULL) {
        return NULL;
    }

    cl->buf->tag = (ngx_buf_tag_t) &ngx_http_shunt_module;
    cl->next = NULL;
    f->bufs++;

    return cl;
}

/* Passes bufs to the filters. Without any bufs, has the filters send on what they hold. */
static ngx_int_t ngx_http_shunt_fetch_output(ngx_http_shunt_ctx_t *ctx, ngx_chain_t *out)
{
    ngx_int_t rc;
    ngx_http_request_t *r = ctx->request;

    rc = ctx->fetch.output(r, out);

    ngx_chain_update_chains(r->pool, &ctx->fetch.free, &ctx->fetch.busy, &out,
                            (ngx_buf_tag_t) &ngx_http_shunt_module);

    return rc;
}

/* Moves one buf from the socket into the filters. NGX_AGAIN: no buf is free, the socket has no
 * bytes now, or the fetch has failed. NGX_ERROR: the filters or the client failed. */
static ngx_int_t ngx_http_shunt_fetch_step(ngx_http_shunt_ctx_t *ctx)
{
    ssize_t n;
    size_t room, skip;
    ngx_buf_t *b;
    ngx_chain_t *cl;
    ngx_http_shunt_fetch_t *f = &ctx->fetch;

    cl = ngx_http_shunt_fetch_buf(ctx);
    if (cl == NULL) {
        return NGX_AGAIN;
    }

    b = cl->buf;
    room = ngx_min(f->left, (uint64_t) (b->end - b->start));
    n = f->stream->recv(f->stream, b->start, room);

    if (n <= 0) {
        cl->next = f->free;
        f->free = cl;

        if (n != NGX_AGAIN || ngx_handle_read_event(f->stream->read, 0) != NGX_OK) {
            ngx_http_shunt_fetch_failed(ctx, "its socket has ended");
        }

        return NGX_AGAIN;
    }

    skip = ngx_min(f->skip, (uint64_t) n);
    f->skip -= skip;
    f->left -= n;
    ctx->bytes += n - skip;
    ctx->progress_at = ngx_current_msec;

    b->pos = b->start + skip;
    b->last = b->start + n;
    if (b->pos == b->last && f->left) {
        cl->next = f->free;
        f->free = cl;
        return NGX_OK;
    }

    b->recycled = f->left > 0; /* the write filter then does not wait for more */
    b->last_buf = f->left == 0;
    b->last_in_chain = f->left == 0;

    return ngx_http_shunt_fetch_output(ctx, cl) == NGX_ERROR ? NGX_ERROR : NGX_OK;
}

static void ngx_http_shunt_fetch_done(ngx_http_shunt_ctx_t *ctx)
{
    ngx_http_shunt_fetch_close(ctx);
    ctx->mode = SHUNT_MODE_DONE;
    ctx->request->buffered &= ~NGX_HTTP_SHUNT_BUFFERED;
}

/*
 * Moves as many bytes as possible. Called when the stream has bytes, and by ngx_http_writer() when
 * the client accepts bytes again. NGX_OK: all bytes have left for the client.
 */
ngx_int_t ngx_http_shunt_fetch_pump(ngx_http_shunt_ctx_t *ctx)
{
    ngx_int_t rc;
    uint64_t left = ctx->fetch.left;
    ngx_http_request_t *r = ctx->request;
    ngx_http_core_loc_conf_t *clcf = ngx_http_get_module_loc_conf(r, ngx_http_core_module);

    /* only if something waits to be sent, because otherwise the write filter fails */
    if (r->out || r->connection->buffered || (r->buffered & ~NGX_HTTP_SHUNT_BUFFERED)) {
        if (ngx_http_shunt_fetch_output(ctx, NULL) == NGX_ERROR) {
            return NGX_ERROR;
        }
    }

    while (ctx->fetch.stream && ctx->fetch.left) {
        rc = ngx_http_shunt_fetch_step(ctx);

        if (rc == NGX_ERROR) {
            return NGX_ERROR;
        }

        if (rc == NGX_AGAIN) {
            break;
        }
    }

    if (ctx->fetch.left == 0) {
        ngx_http_shunt_fetch_done(ctx);
        return r->out || r->connection->buffered ? NGX_AGAIN : NGX_OK;
    }

    if (ctx->fetch.left < left && ctx->fetch.stream) {
        ngx_add_timer(ctx->fetch.stream->read, ctx->fetch.timeout);

        /* A fast client causes no write events, so its timer is extended here, after its bytes
         * were written. */
        if (r->connection->write->timer_set && !r->connection->write->delayed) {
            ngx_add_timer(r->connection->write, clcf->send_timeout);
        }
    }

    return NGX_AGAIN;
}

static void ngx_http_shunt_stream_handler(ngx_event_t *rev)
{
    ngx_int_t rc;
    ngx_connection_t *stream = rev->data, *c;
    ngx_http_shunt_ctx_t *ctx = stream->data;
    ngx_http_request_t *r = ctx->request;

    c = r->connection;
    ngx_http_set_log_request(c->log, r);

    if (rev->timedout) {
        ngx_http_shunt_fetch_failed(ctx, "no data came in time");
        return;
    }

    rc = ngx_http_shunt_fetch_pump(ctx);

    if (rc == NGX_ERROR) {
        ngx_http_finalize_request(r, NGX_ERROR);

    } else if (ctx->mode == SHUNT_MODE_DONE) {
        ngx_post_event(c->write, &ngx_posted_events); /* ngx_http_writer() finishes the request */
    }

    ngx_http_run_posted_requests(c);
}
