/* SPDX-License-Identifier: MIT */
/*
 * Has another backend continue a handoff that its backend cannot finish, so that the client is not
 * reset. If the response had a strong ETag and its server supports ranges, any backend that has the
 * same bytes can send the rest of them. So the rest is asked for (part.c) with a consent: the load
 * balancer chooses a backend, and every tier may refuse. The answer must be the rest, and an offer.
 * Then the region moves to the new backend's agent, the new peer (SHUNT_MOVE). The new peer is told
 * what a handoff's first peer is told. Nothing of the answer reaches the client. If no backend
 * continues, the rest is relayed through all tiers (rest.c), or the client is reset. A handoff lets
 * a backend send a payload, a response's body, on the client's own connection. A consent is a
 * header field of a request, by which each tier says that it may be bypassed. An offer is a body
 * that a backend holds ready, and that its response's header names. A region is the range of the
 * client connection's sequence numbers that a payload takes.
 *
 *   ended --> asking ------------> moved  ACTIVE all the while: the client may still acknowledge,
 *               ^  | |               ^    complete or reset what the lost backend has sent
 *               +--+ +--> proving ---+
 *         no answer: again     |          over TLS, and where shunt_recover requires it: proof.c
 *                              +--> reset
 */
#include "ngx_http_shunt.h"
#include "ngx_http_shunt_kernel.h"

/*
 * Limits of the requests for the rest of a payload. If their answers are errors or without an
 * offer, they are repeated: at least ASK_TIMES in all, and for a time in which two agents that have
 * lost each other may connect again.
 */
#define NGX_HTTP_SHUNT_ASK_TIMES   3
#define NGX_HTTP_SHUNT_ASK_LONG    2500  /* ms from the first request to the end of asking */
#define NGX_HTTP_SHUNT_ASK_AGAIN   200   /* ms of pause after the first request; then doubled */
#define NGX_HTTP_SHUNT_ASK_SLOWEST 1000  /* ms, longest pause */
#define NGX_HTTP_SHUNT_ASK_IN_ALL  16    /* requests for one response, at most */
#define NGX_HTTP_SHUNT_ASK_CONNECT 500   /* ms for a server to accept connection and request */
#define NGX_HTTP_SHUNT_ASK_ANSWER  10000 /* ms for the server's answer */
/* ms without progress after which a handoff is given up, if its backend's agent is lost and no
 * other backend can continue. Not at once, because the backend's kernel may still send. */
#define NGX_HTTP_SHUNT_STALLED     3000
#define NGX_HTTP_SHUNT_PROOF       5000 /* ms for a backend to read its file */

struct ngx_http_shunt_recovery_s {
    ngx_event_t event;           /* posted, or a timer: asks, or ends the wait for a proof */
    ngx_http_request_t *request; /* the request for the rest; NULL: there is none now */
    ngx_uint_t reason;           /* SHUNT_REASON_* of the loss */
    ngx_uint_t times;            /* number of requests since the client got something */
    ngx_uint_t in_all;           /* number of requests for this response */
    ngx_msec_t since;            /* time of the first of these requests (`times`) */
    uint64_t got;                /* bytes of the region that the client had at the last request */

    uint64_t acked; /* where the new peer continues, in bytes of the region */
    uint64_t from;  /* first payload byte that was asked for; on TLS, the first one of a record */
    ngx_msec_t asked_at;
    ngx_http_shunt_consent_t consent;
    ngx_http_shunt_payload_t payload;
    ngx_http_shunt_peer_t peer;
    uint64_t proof;    /* number of the question about the new backend's file; 0: none */
    ngx_int_t verdict; /* NGX_OK: the answer is good; NGX_AGAIN: ask again; NGX_DECLINED: give up */
};

/* ---- asking ---- */

/* Makes the header fields of the request for the rest: the client's, with the range of the rest and
 * a consent. */
static ngx_int_t ngx_http_shunt_ask_fields(ngx_http_request_t *sr, ngx_http_shunt_ctx_t *ctx)
{
    ngx_http_shunt_recovery_t *rec = ctx->recovery;

    if (ngx_http_shunt_nonce(rec->consent.nonce) != NGX_OK ||
        ngx_http_shunt_part_fields(sr, ctx, rec->from) != NGX_OK) {
        return NGX_ERROR;
    }

    rec->consent.frontend = ngx_http_shunt_board_name();
    rec->consent.tiers = 1;
    rec->consent.rest = 1;
    rec->consent.from = 0;
    rec->consent.header = ngx_http_shunt_header_room(sr);

    return ngx_http_shunt_add_consent(sr, &rec->consent);
}

static void ngx_http_shunt_ask_run(ngx_http_request_t *sr)
{
    ngx_http_shunt_ctx_t *ctx = ngx_http_get_module_ctx(sr, ngx_http_shunt_module);

    ngx_http_core_run_phases(sr);

    if (ctx->recovery && ctx->recovery->request == sr) {
        (void) ngx_http_shunt_part_impatiently(sr,
                                               ctx->recovery->times *
                                                   (ngx_msec_t) NGX_HTTP_SHUNT_ASK_CONNECT,
                                               NGX_HTTP_SHUNT_ASK_ANSWER,
                                               NGX_HTTP_SHUNT_ASK_CONNECT);
    }
}

static ngx_int_t ngx_http_shunt_answered(ngx_http_request_t *sr, void *data, ngx_int_t rc);
static void ngx_http_shunt_unproven(ngx_http_shunt_ctx_t *ctx, const char *why);

static ngx_int_t ngx_http_shunt_ask(ngx_http_shunt_ctx_t *ctx)
{
    ngx_int_t rc;
    struct shunt_tls keys;
    ngx_http_request_t *sr, *r = ctx->request;
    ngx_http_post_subrequest_t *ps;
    ngx_http_shunt_recovery_t *rec = ctx->recovery;

    if (rec->times++ == 0) {
        rec->since = ngx_current_msec;
    }

    rec->in_all++;
    rec->got = ctx->acked;
    rec->acked = ctx->acked;
    rec->verdict = NGX_AGAIN;
    rec->asked_at = ngx_current_msec;

    rc = ngx_http_shunt_ssl_rest(ctx, rec->acked, &rec->from, &keys);
    ngx_http_shunt_ssl_forget(&keys);

    if (rc != NGX_OK) {
        return NGX_ERROR;
    }

    ps = ngx_palloc(r->pool, sizeof(ngx_http_post_subrequest_t));
    if (ps == NULL) {
        return NGX_ERROR;
    }

    ps->handler = ngx_http_shunt_answered;
    ps->data = ctx;

    if (ngx_http_subrequest(r, &r->uri, &r->args, &sr, ps,
                            NGX_HTTP_SUBREQUEST_CLONE | NGX_HTTP_SUBREQUEST_BACKGROUND) != NGX_OK) {
        return NGX_ERROR;
    }

    ngx_http_set_ctx(sr, ctx, ngx_http_shunt_module);
    sr->header_only = 1; /* the answer's body is not needed */
    sr->write_event_handler = ngx_http_shunt_ask_run;
    rec->request = sr;

    return ngx_http_shunt_ask_fields(sr, ctx);
}

/* Stops waiting for a digest of the new backend's file. */
static void ngx_http_shunt_end_proof(ngx_http_shunt_recovery_t *rec)
{
    ngx_http_shunt_pending_remove(rec->proof);
    rec->proof = 0;
}

static void ngx_http_shunt_ask_handler(ngx_event_t *ev)
{
    ngx_http_shunt_ctx_t *ctx = ev->data;
    ngx_connection_t *c = ctx->request->connection;

    ngx_http_set_log_request(c->log, ctx->request);

    if (ctx->mode != SHUNT_MODE_ACTIVE || ctx->failure.posted) {
        /* void */

    } else if (ngx_http_shunt_may_have_all(ctx, ctx->recovery->reason)) {
        ngx_http_shunt_end_proof(ctx->recovery);

    } else if (ctx->recovery->proof) {
        ngx_http_shunt_unproven(ctx, "its agent has not read its file in time");

    } else if (ngx_http_shunt_ask(ctx) != NGX_OK) {
        ngx_http_shunt_fail(ctx);
    }

    ngx_http_run_posted_requests(c);
}

/* ---- the answer ---- */

/* Returns the context of the response whose rest this subrequest asks for, or NULL. */
ngx_http_shunt_ctx_t *ngx_http_shunt_recovery_ctx(ngx_http_request_t *r)
{
    return r == r->main ? NULL : ngx_http_get_module_ctx(r, ngx_http_shunt_module);
}

static ngx_int_t ngx_http_shunt_judge(ngx_http_request_t *sr, ngx_http_shunt_ctx_t *ctx,
                                      const char **why)
{
    ngx_uint_t reason;
    ngx_table_elt_t *offer;
    ngx_http_shunt_recovery_t *rec = ctx->recovery;

    *why = ngx_http_shunt_part_is_not(sr, ctx, rec->from);
    if (*why) {
        return ngx_http_shunt_part_is_error(sr) ? NGX_AGAIN : NGX_DECLINED;
    }

    *why = "the response has no offer";
    offer = ngx_http_shunt_take_offer(sr, 0);
    if (offer == NULL) {
        return NGX_AGAIN;
    }

    *why = "its offer is refused";
    reason = ngx_http_shunt_refused(sr, offer, &rec->consent, &rec->payload, &rec->peer);
    if (reason) {
        ngx_http_shunt_count(reason, 1);
        return reason == SHUNT_COUNT_refused_unknown_peer ? NGX_AGAIN : NGX_DECLINED;
    }

    *why = "its agent is lost";
    if (rec->peer.lost) {
        return NGX_AGAIN;
    }

    *why = "the length of its offer differs";
    if (rec->payload.length != ctx->payload.length - rec->from) {
        return NGX_DECLINED;
    }

    *why = "the backend may not speak for this server (speaks_for)";
    return ngx_http_shunt_backend_speaks(sr->connection, rec->peer.index) ? NGX_OK : NGX_AGAIN;
}

/* Runs in place of all other header filters, because the header of this answer is not for the
 * client. */
ngx_int_t ngx_http_shunt_recovery_header(ngx_http_request_t *sr, ngx_http_shunt_ctx_t *ctx)
{
    const char *why;
    ngx_http_shunt_recovery_t *rec = ctx->recovery;

    /* Without header_only, this is a request of rest.c that is not needed any more. An error ends
     * it before the answer's body is read. */
    if (!sr->header_only) {
        return NGX_ERROR;
    }

    if (rec == NULL || rec->request != sr || ctx->mode != SHUNT_MODE_ACTIVE) {
        return NGX_OK;
    }

    rec->verdict = ngx_http_shunt_judge(sr, ctx, &why);

    if (rec->verdict != NGX_OK) {
        ngx_log_error(NGX_LOG_ERR, sr->connection->log, 0,
                      "shunt: the response for the rest, from byte %uL on, cannot be used: %s%V",
                      rec->from, why, ngx_http_shunt_trace_text(ctx->request));
    }

    return NGX_OK;
}

/* ---- moving ---- */

static ngx_int_t ngx_http_shunt_post_rest(ngx_http_shunt_ctx_t *ctx)
{
    ngx_int_t rc;
    uint64_t from;
    struct shunt_handoff msg;
    ngx_http_shunt_recovery_t *rec = ctx->recovery;
    uint64_t whole = ctx->payload.length;

    ctx->payload = rec->payload;
    ctx->payload.length = whole;
    ngx_http_shunt_count_handoff(ctx->peer.index, -1);
    ctx->peer = rec->peer;
    ngx_http_shunt_count_handoff(ctx->peer.index, 1);

    rc = ngx_http_shunt_describe(ctx, rec->payload.length, &msg);

    if (rc != NGX_OK) {
        return rc == NGX_DONE ? NGX_OK : rc;
    }

    rc = ngx_http_shunt_ssl_rest(ctx, rec->acked, &from, &msg.tls);

    if (rc == NGX_OK) {
        rc = ngx_http_shunt_agent_post(&msg, sizeof(msg));
    }

    ngx_http_shunt_ssl_forget(&msg.tls);

    return rc;
}

/* Moves the region to the new peer. NGX_OK: the peer continues, or the payload is complete.
 * NGX_AGAIN: not possible now. NGX_ERROR: the region has moved, but the peer was not told. */
static ngx_int_t ngx_http_shunt_move(ngx_http_shunt_ctx_t *ctx)
{
    uint64_t id;
    struct shunt_move move;
    ngx_http_shunt_ring_t *ring = ngx_http_shunt_agent_ring();
    ngx_http_shunt_recovery_t *rec = ctx->recovery;
    const struct shunt_board *board = ngx_http_shunt_board();

    if (ring == NULL || board == NULL || !ngx_http_shunt_agent_ready() ||
        ngx_current_msec - rec->asked_at >= board->offer_lifetime_ms / 2) {
        return NGX_AGAIN;
    }

    id = ngx_http_shunt_pending_add(ctx);

    move.peer = rec->peer.index;
    move.ring = ngx_http_shunt_ring_index(ring);
    move.handoff = id;
    move.from = rec->acked;

    if (id == 0 || ngx_http_shunt_ring_ask(ring) != NGX_OK ||
        ngx_http_shunt_kernel_move(ctx->request->connection->fd, &move) == -1) {
        ngx_http_shunt_pending_remove(id);
        (void) ngx_http_shunt_follow(ctx);
        return ctx->mode == SHUNT_MODE_ACTIVE ? NGX_AGAIN : NGX_OK;
    }

    /* Frees the handoff's old number: from now on, the kernel's and the agents' messages about this
     * handoff have the new one. */
    ngx_http_shunt_pending_remove(ctx->id);
    ctx->id = id;
    ngx_http_shunt_probe_end(ctx); /* a question that was asked because of the old backend's loss */
    ctx->probed = 0;
    ctx->stall.looked_at = ngx_current_msec;
    ngx_http_shunt_ring_hold(ring);
    ngx_http_shunt_ring_release(ctx->ring);
    ctx->ring = ring;

    return ngx_http_shunt_post_rest(ctx);
}

/* Whether to stop asking. One response has at most ASK_IN_ALL requests, and fewer if its client is
 * asked repeatedly whether it has all (probe.c). After ASK_TIMES requests, asking also ends when
 * agents that have lost each other have had time to connect again, or when the client has
 * acknowledged nothing for half of send_timeout: after send_timeout, its connection ends. `delay`:
 * ms until the next request. */
static ngx_uint_t ngx_http_shunt_ask_is_over(ngx_http_shunt_ctx_t *ctx, ngx_msec_t delay)
{
    ngx_http_shunt_recovery_t *rec = ctx->recovery;
    ngx_http_core_loc_conf_t *clcf;

    clcf = ngx_http_get_module_loc_conf(ctx->request, ngx_http_core_module);

    return rec->in_all + ctx->probe.again >= NGX_HTTP_SHUNT_ASK_IN_ALL ||
           (rec->times >= NGX_HTTP_SHUNT_ASK_TIMES &&
            (ngx_current_msec - rec->since + delay > NGX_HTTP_SHUNT_ASK_LONG ||
             ngx_current_msec - ctx->progress_at + delay > clcf->send_timeout / 2));
}

/* Has the rest asked for soon, or after a pause. NGX_DECLINED: a limit is reached. */
static ngx_int_t ngx_http_shunt_ask_later(ngx_http_shunt_ctx_t *ctx)
{
    ngx_msec_t delay;
    ngx_http_shunt_recovery_t *rec = ctx->recovery;

    if (rec->times == 0) {
        ngx_post_event(&rec->event, &ngx_posted_events);
        return NGX_OK;
    }

    delay = ngx_min((ngx_msec_t) NGX_HTTP_SHUNT_ASK_AGAIN << (rec->times - 1),
                    (ngx_msec_t) NGX_HTTP_SHUNT_ASK_SLOWEST);

    if (ngx_http_shunt_ask_is_over(ctx, delay)) {
        ngx_http_shunt_count(SHUNT_COUNT_failover_failed, 1);
        ctx->relayable = 1; /* a request without a consent may still get the rest */
        return NGX_DECLINED;
    }

    ngx_add_timer(&rec->event, delay);

    return NGX_OK;
}

/* Acts on the verdict about an answer, or about the digest of the file behind its offer. */
static void ngx_http_shunt_settle(ngx_http_shunt_ctx_t *ctx, ngx_int_t verdict)
{
    ngx_http_shunt_recovery_t *rec = ctx->recovery;

    if (verdict == NGX_AGAIN) {
        if (ngx_http_shunt_ask_later(ctx) != NGX_OK) {
            ngx_http_shunt_fail(ctx);
        }

    } else if (verdict != NGX_OK) {
        ngx_http_shunt_count(SHUNT_COUNT_failover_failed, 1);
        ngx_http_shunt_fail(ctx);

    } else if (ctx->mode == SHUNT_MODE_ACTIVE) {
        ngx_http_shunt_count(SHUNT_COUNT_failovers, 1);
        ctx->why = 0;
        ngx_log_error(NGX_LOG_NOTICE, ctx->request->connection->log, 0,
                      "shunt: \"%V\" continues the payload from byte %uL of %uL%V",
                      &ctx->payload.backend, rec->from, ctx->payload.length,
                      ngx_http_shunt_trace_text(ctx->request));
    }
}

/* ---- proving ---- */

/* Gives up, because nothing proves that the new backend has the same bytes. No further backend is
 * asked: it would have to read its file first, which takes as long as for this one. */
static void ngx_http_shunt_unproven(ngx_http_shunt_ctx_t *ctx, const char *why)
{
    ngx_http_shunt_recovery_t *rec = ctx->recovery;

    ngx_http_shunt_end_proof(rec);
    ngx_log_error(NGX_LOG_ERR, ctx->request->connection->log, 0,
                  "shunt: \"%V\" cannot continue the payload of \"%V\": %s%V",
                  &rec->payload.backend, &ctx->payload.backend, why,
                  ngx_http_shunt_trace_text(ctx->request));
    ngx_http_shunt_count(SHUNT_COUNT_failover_unproven, 1);
    ngx_http_shunt_fail(ctx);
}

static ngx_int_t ngx_http_shunt_ask_for_proof(ngx_http_shunt_ctx_t *ctx)
{
    ngx_http_shunt_recovery_t *rec = ctx->recovery;

    rec->proof = ngx_http_shunt_pending_add(ctx);

    if (rec->proof == 0 ||
        ngx_http_shunt_prove(ctx, rec->proof, &rec->peer, &rec->payload) != NGX_OK) {
        ngx_http_shunt_end_proof(rec);
        return NGX_AGAIN;
    }

    ngx_add_timer(&rec->event, NGX_HTTP_SHUNT_PROOF);

    return NGX_DONE;
}

/* Handles the digest (SHA-256) of the file behind the new offer, from the new backend's agent. */
void ngx_http_shunt_recovery_proof(ngx_http_shunt_ctx_t *ctx, const struct shunt_digest *msg)
{
    ngx_http_shunt_recovery_t *rec = ctx->recovery;

    if (rec == NULL || rec->proof == 0 || rec->proof != msg->handoff ||
        rec->peer.index != msg->peer || ctx->failure.posted) {
        return;
    }

    ngx_del_timer(&rec->event);

    if (ngx_http_shunt_may_have_all(ctx, rec->reason)) {
        ngx_http_shunt_end_proof(rec);
        return;
    }

    if (!ngx_http_shunt_is_same_file(ctx, msg, rec->from)) {
        ngx_http_shunt_unproven(ctx, msg->known ? "its file differs"
                                                : "its agent has no digest of its file");
        return;
    }

    ngx_http_shunt_end_proof(rec);
    ngx_http_shunt_settle(ctx, ngx_http_shunt_move(ctx));
}

/* Called when the request for the rest has ended, with or without an error. Returns NGX_OK, because
 * an error must not end the client's request, too. */
static ngx_int_t ngx_http_shunt_answered(ngx_http_request_t *sr, void *data, ngx_int_t rc)
{
    ngx_int_t verdict;
    ngx_http_shunt_ctx_t *ctx = data;
    ngx_http_shunt_recovery_t *rec = ctx->recovery;

    if (rec->request != sr) {
        return NGX_OK;
    }

    rec->request = NULL;

    if (ctx->mode != SHUNT_MODE_ACTIVE || ctx->failure.posted ||
        ngx_http_shunt_may_have_all(ctx, rec->reason)) {
        return NGX_OK;
    }

    verdict = rec->verdict;

    if (verdict == NGX_OK) {
        verdict = ngx_http_shunt_proof_needed(ctx) ? ngx_http_shunt_ask_for_proof(ctx)
                                                   : ngx_http_shunt_move(ctx);
    }

    if (verdict != NGX_DONE) {
        ngx_http_shunt_settle(ctx, verdict);
    }

    return NGX_OK;
}

/* ---- beginning and end ---- */

/* Whether another backend may continue a handoff that ended for this reason. After FILE_CHANGED
 * none may: the changed file may have the same ETag, because nginx's ETag has a resolution of one
 * second. */
ngx_uint_t ngx_http_shunt_is_loss(ngx_uint_t reason)
{
    return reason != SHUNT_REASON_CLIENT_GONE && reason != SHUNT_REASON_NO_PROGRESS &&
           reason != SHUNT_REASON_ABORTED && reason != SHUNT_REASON_FILE_CHANGED;
}

/*
 * Called when an active handoff has ended without success. NGX_OK: the response may still succeed.
 * If the backend's agent is lost and no other backend can continue, the response gets some time,
 * because the kernel of the backend's machine may still send.
 */
ngx_int_t ngx_http_shunt_recover(ngx_http_shunt_ctx_t *ctx, ngx_uint_t reason)
{
    ngx_uint_t unproven;
    ngx_http_shunt_recovery_t *rec = ctx->recovery;

    if (!ngx_http_shunt_is_loss(reason)) {
        return NGX_DECLINED;
    }

    unproven = ctx->etag.len && ngx_http_shunt_proof_needed(ctx) && !ctx->file.known;

    if (ctx->etag.len == 0 || unproven) {
        if (unproven && (reason != SHUNT_REASON_PEER_LOST ||
                         ngx_current_msec - ctx->progress_at >= NGX_HTTP_SHUNT_STALLED)) {
            ngx_log_error(NGX_LOG_ERR, ctx->request->connection->log, 0,
                          "shunt: no backend continues the payload of \"%V\": its agent gave no "
                          "digest of the file, as it does for files up to 1 GiB after a second%V",
                          &ctx->payload.backend, ngx_http_shunt_trace_text(ctx->request));
            ngx_http_shunt_count(SHUNT_COUNT_failover_unproven, 1);
        }

        return reason == SHUNT_REASON_PEER_LOST &&
                       ngx_current_msec - ctx->progress_at < NGX_HTTP_SHUNT_STALLED
                   ? NGX_OK
                   : NGX_DECLINED;
    }

    if (rec == NULL) {
        rec = ngx_pcalloc(ctx->request->pool, sizeof(ngx_http_shunt_recovery_t));
        if (rec == NULL) {
            return NGX_DECLINED;
        }

        rec->event.data = ctx;
        rec->event.handler = ngx_http_shunt_ask_handler;
        rec->event.log = ctx->request->connection->log;
        ctx->recovery = rec;
    }

    if (ngx_http_shunt_recovery_is_on(ctx)) {
        return NGX_OK; /* the end was reported before */
    }

    ngx_http_shunt_rest_drop_stalled(ctx);

    if (ctx->acked > rec->got) {
        rec->times = 0;
    }

    rec->reason = reason;

    return ngx_http_shunt_ask_later(ctx);
}

/* Returns 1 while a backend that continues is being looked for. */
ngx_uint_t ngx_http_shunt_recovery_is_on(const ngx_http_shunt_ctx_t *ctx)
{
    const ngx_http_shunt_recovery_t *rec = ctx->recovery;

    return rec && (rec->request || rec->proof || rec->event.posted || rec->event.timer_set);
}

/* Stops looking for a backend. A request for the rest that is still open ends by itself, or with
 * the client's request; its answer is ignored. */
void ngx_http_shunt_recovery_end(ngx_http_shunt_ctx_t *ctx)
{
    ngx_http_shunt_recovery_t *rec = ctx->recovery;

    if (rec == NULL) {
        return;
    }

    rec->request = NULL;
    ngx_http_shunt_end_proof(rec);

    if (rec->event.posted) {
        ngx_delete_posted_event(&rec->event);
    }

    if (rec->event.timer_set) {
        ngx_del_timer(&rec->event);
    }
}

/* Stops looking for a backend, and ends an open request for the rest. Called when the handoff is
 * complete: otherwise the connection's next request would have to wait for the open one. */
void ngx_http_shunt_recovery_drop(ngx_http_shunt_ctx_t *ctx)
{
    ngx_http_request_t *sr = ctx->recovery ? ctx->recovery->request : NULL;

    ngx_http_shunt_recovery_end(ctx);

    if (sr) {
        ngx_http_shunt_part_end(sr);
    }
}
