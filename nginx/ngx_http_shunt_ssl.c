/* SPDX-License-Identifier: MIT */
/*
 * TLS connections of nginx: wraps openssl/shunt_tls.h in terms of requests and counters. While a
 * payload is in progress, this file reads what the client sends, but leaves requests and KeyUpdates
 * for later. So a fatal alert that comes before any of these ends the handoff (RFC 8446, 6.2). In a
 * handoff, a backend sends a payload, the body of a response, on the client's connection. A region
 * is the range of the client connection's sequence numbers that a payload takes.
 */
#include "ngx_http_shunt.h"
#include "shunt_tls.h"

#if (NGX_HTTP_SSL)

static void ngx_http_shunt_ssl_reading(ngx_http_request_t *r);

/* Watches the SSL_CTX of every server{}, because a client's server name may choose any of them. */
ngx_int_t ngx_http_shunt_ssl_init(ngx_conf_t *cf)
{
    ngx_uint_t i;
    ngx_http_ssl_srv_conf_t *sscf;
    ngx_http_core_srv_conf_t **cscfp;
    ngx_http_shunt_main_conf_t *mcf;
    ngx_http_core_main_conf_t *cmcf;

    mcf = ngx_http_conf_get_module_main_conf(cf, ngx_http_shunt_module);
    cmcf = ngx_http_conf_get_module_main_conf(cf, ngx_http_core_module);

    if (!mcf->frontend) {
        return NGX_OK;
    }

    cscfp = cmcf->servers.elts;

    for (i = 0; i < cmcf->servers.nelts; i++) {
        sscf = cscfp[i]->ctx->srv_conf[ngx_http_ssl_module.ctx_index];

        if (sscf->ssl.ctx && shunt_tls_watch(sscf->ssl.ctx) != 0) {
            ngx_log_error(NGX_LOG_EMERG, cf->log, 0, "shunt: no memory to watch TLS connections");
            return NGX_ERROR;
        }
    }

    return NGX_OK;
}

/* Returns 0, or the counter of the reason why this connection cannot be handed off. */
ngx_uint_t ngx_http_shunt_ssl_not_eligible(ngx_connection_t *c)
{
    if (c->ssl == NULL) {
        return 0;
    }

    if (c->ssl->in_early) {
        return SHUNT_COUNT_relayed_tls_early;
    }

    switch (shunt_tls_refused(c->ssl->connection, ngx_current_msec)) {

    case SHUNT_TLS_READY:
        return 0;
    case SHUNT_TLS_VERSION:
        return SHUNT_COUNT_relayed_tls_version;
    case SHUNT_TLS_EARLY:
        return SHUNT_COUNT_relayed_tls_early;
    case SHUNT_TLS_KERNEL:
        return SHUNT_COUNT_relayed_tls_kernel;
    case SHUNT_TLS_BUDGET:
        return SHUNT_COUNT_relayed_tls_budget;
    default:
        return SHUNT_COUNT_relayed_tls_suite;
    }
}

ngx_uint_t ngx_http_shunt_ssl_is_fresh(ngx_connection_t *c)
{
    return c->ssl && shunt_tls_is_fresh(c->ssl->connection);
}

/*
 * Hands the keys for a payload over. Called when the header has left. `keys` gets the keys, and
 * `ctx->region` the length of the payload's records in bytes. Returns 0, or the counter of the
 * reason why the keys cannot be handed over.
 */
ngx_uint_t ngx_http_shunt_ssl_hand_over(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx,
                                        struct shunt_tls *keys)
{
    int rc;
    ngx_connection_t *c = r->connection;

    if (c->ssl == NULL) {
        return 0;
    }

    rc = shunt_tls_hand_over(c->ssl->connection, ctx->tls_fresh, ngx_current_msec, keys);

    if (rc != 1) {
        return rc == 0 ? SHUNT_COUNT_fetched_unsent : SHUNT_COUNT_fetched_tls;
    }

    ctx->region = shunt_tls_wire_bytes(keys, ctx->payload.length);
    ctx->content_bytes = keys->content_bytes;

    return ctx->region ? 0 : SHUNT_COUNT_fetched_tls;
}

/* Called when the region has begun: from now on, nothing that OpenSSL writes may leave. */
ngx_int_t ngx_http_shunt_ssl_freeze(ngx_http_shunt_ctx_t *ctx, const struct shunt_tls *keys)
{
    ngx_connection_t *c = ctx->request->connection;

    if (c->ssl && shunt_tls_freeze(c->ssl->connection, keys, ctx->payload.length) != 0) {
        return NGX_ERROR;
    }

    return NGX_OK;
}

/* Begins to read from the client. Must not be called before the filters have returned, because
 * nginx sets its read handler after that. */
void ngx_http_shunt_ssl_watch(ngx_http_request_t *r)
{
    if (r->connection->ssl && r->read_event_handler == ngx_http_test_reading) {
        r->read_event_handler = ngx_http_shunt_ssl_reading;
        ngx_http_shunt_ssl_reading(r);
    }
}

static void ngx_http_shunt_ssl_reading(ngx_http_request_t *r)
{
    ngx_connection_t *c = r->connection;
    ngx_http_shunt_ctx_t *ctx = ngx_http_shunt_ctx(r);

    if (ctx && ctx->mode == SHUNT_MODE_ACTIVE && shunt_tls_is_broken(c->ssl->connection)) {
        ngx_log_error(NGX_LOG_INFO, c->log, 0, "shunt: the client ended the TLS connection%V",
                      ngx_http_shunt_trace_text(r));
        ngx_http_shunt_fail(ctx);
        return;
    }

    ngx_http_test_reading(r);
    /* Marks the connection as readable: OpenSSL may hold bytes of the client, for which no event
     * comes any more. */
    c->read->ready = 1;
}

/* Has OpenSSL write records again. Called when the client has acknowledged the whole region. */
ngx_int_t ngx_http_shunt_ssl_take_back(ngx_http_request_t *r)
{
    ngx_connection_t *c = r->connection;

    if (c->ssl == NULL) {
        return NGX_OK;
    }

    if (r->read_event_handler == ngx_http_shunt_ssl_reading) {
        r->read_event_handler = ngx_http_test_reading;
    }

    if (shunt_tls_take_back(c->ssl->connection, ngx_current_msec) != 0) {
        ngx_log_error(NGX_LOG_ERR, c->log, 0, "shunt: the TLS connection cannot continue%V",
                      ngx_http_shunt_trace_text(r));
        return NGX_ERROR;
    }

    return NGX_OK;
}

/* Has OpenSSL write records again. Called when no record of the payload was sealed (encrypted), and
 * none will be. */
ngx_int_t ngx_http_shunt_ssl_reclaim(ngx_http_request_t *r)
{
    ngx_connection_t *c = r->connection;

    if (c->ssl == NULL) {
        return NGX_OK;
    }

    if (r->read_event_handler == ngx_http_shunt_ssl_reading) {
        r->read_event_handler = ngx_http_test_reading;
    }

    return shunt_tls_reclaim(c->ssl->connection, ngx_current_msec) == 0 ? NGX_OK : NGX_ERROR;
}

/*
 * Finds out where another backend has to continue when the client has `acked` bytes of the region.
 * Returns in `from` the payload byte at which that backend begins. On TLS, this byte is the first
 * of a record, and `keys` gets the keys for the remaining records.
 */
ngx_int_t ngx_http_shunt_ssl_rest(ngx_http_shunt_ctx_t *ctx, uint64_t acked, uint64_t *from,
                                  struct shunt_tls *keys)
{
    ngx_connection_t *c = ctx->request->connection;

    *from = acked;

    if (c->ssl == NULL) {
        return NGX_OK;
    }

    return shunt_tls_rest(c->ssl->connection, acked, keys, from) == 0 ? NGX_OK : NGX_ERROR;
}

/* Called before a reset: nginx then sends no close_notify, and waits for none. */
void ngx_http_shunt_ssl_give_up(ngx_connection_t *c)
{
    if (c->ssl) {
        c->ssl->no_wait_shutdown = 1;
        c->ssl->no_send_shutdown = 1;
    }
}

/* Number of payload bytes in the first `acked` bytes of the region. On TLS, only whole records
 * count. */
uint64_t ngx_http_shunt_ssl_payload_bytes(ngx_http_shunt_ctx_t *ctx, uint64_t acked)
{
    return ctx->content_bytes
               ? shunt_tls_payload_bytes(ctx->content_bytes, ctx->payload.length, acked)
               : acked;
}

void ngx_http_shunt_ssl_forget(struct shunt_tls *keys)
{
    OPENSSL_cleanse(keys, sizeof(*keys));
}

#else

ngx_int_t ngx_http_shunt_ssl_init(ngx_conf_t *cf)
{
    return NGX_OK;
}

ngx_uint_t ngx_http_shunt_ssl_not_eligible(ngx_connection_t *c)
{
    return 0;
}

ngx_uint_t ngx_http_shunt_ssl_is_fresh(ngx_connection_t *c)
{
    return 0;
}

ngx_uint_t ngx_http_shunt_ssl_hand_over(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx,
                                        struct shunt_tls *keys)
{
    return 0;
}

ngx_int_t ngx_http_shunt_ssl_freeze(ngx_http_shunt_ctx_t *ctx, const struct shunt_tls *keys)
{
    return NGX_OK;
}

void ngx_http_shunt_ssl_watch(ngx_http_request_t *r)
{
}

ngx_int_t ngx_http_shunt_ssl_take_back(ngx_http_request_t *r)
{
    return NGX_OK;
}

ngx_int_t ngx_http_shunt_ssl_reclaim(ngx_http_request_t *r)
{
    return NGX_OK;
}

ngx_int_t ngx_http_shunt_ssl_rest(ngx_http_shunt_ctx_t *ctx, uint64_t acked, uint64_t *from,
                                  struct shunt_tls *keys)
{
    *from = acked;

    return NGX_OK;
}

void ngx_http_shunt_ssl_give_up(ngx_connection_t *c)
{
}

uint64_t ngx_http_shunt_ssl_payload_bytes(ngx_http_shunt_ctx_t *ctx, uint64_t acked)
{
    return acked;
}

void ngx_http_shunt_ssl_forget(struct shunt_tls *keys)
{
}

#endif
