/* SPDX-License-Identifier: MIT */
/*
 * The request side. A trusted tier's consent is kept. Every Shunt-* field, whoever sent it, is
 * removed before the request can be passed on. Just before the content phase, when the location is
 * known, a consent may be added: a new one of this tier, or the received one with its number of
 * tiers increased by one. A consent is a header field of a request, by which each tier (server on
 * the request's path) says that it may be bypassed. A backend may answer a consent with an offer, a
 * body that it holds ready for the frontend's agent.
 */
#include <sys/random.h>

#include "ngx_http_shunt.h"

#define NGX_HTTP_SHUNT_NONCE_BATCH 256 /* nonces per getrandom(), 4 KiB */

/* Modules whose location configuration begins with an ngx_http_upstream_conf_t. Weak, because nginx
 * may be built without some of them. */
extern ngx_module_t ngx_http_proxy_module __attribute__((weak));
extern ngx_module_t ngx_http_fastcgi_module __attribute__((weak));
extern ngx_module_t ngx_http_uwsgi_module __attribute__((weak));
extern ngx_module_t ngx_http_scgi_module __attribute__((weak));

/* The location configuration of this module begins with the size of a slice. */
extern ngx_module_t ngx_http_slice_filter_module __attribute__((weak));

static u_char ngx_http_shunt_nonces[NGX_HTTP_SHUNT_NONCE_BATCH][16];
static ngx_uint_t ngx_http_shunt_nonces_left;

/* Discards random bytes that were drawn before the fork, because all workers have inherited them.
 */
void ngx_http_shunt_consent_init(void)
{
    ngx_http_shunt_nonces_left = 0;
}

ngx_int_t ngx_http_shunt_nonce(u_char nonce[16])
{
    ssize_t n;

    if (ngx_http_shunt_nonces_left == 0) {
        /* A signal may make getrandom() return fewer bytes, if more than 256 were asked for. Only
         * whole nonces count. */
        n = getrandom(ngx_http_shunt_nonces, sizeof(ngx_http_shunt_nonces), 0);

        if (n < 16) {
            return NGX_ERROR;
        }

        ngx_http_shunt_nonces_left = n / 16;
    }

    ngx_http_shunt_nonces_left--;
    ngx_memcpy(nonce, ngx_http_shunt_nonces[ngx_http_shunt_nonces_left], 16);

    return NGX_OK;
}

ngx_table_elt_t *ngx_http_shunt_find_field(ngx_list_t *list)
{
    ngx_uint_t i;
    ngx_list_part_t *part;
    ngx_table_elt_t *h;

    for (part = &list->part; part; part = part->next) {
        h = part->elts;

        for (i = 0; i < part->nelts; i++) {
            if (ngx_http_shunt_is_field(&h[i])) {
                return &h[i];
            }
        }
    }

    return NULL;
}

/*
 * Removes from a request the fields for which strips() returns true. nginx's lists cannot drop an
 * element, and pointers such as headers_in.host lead into the old list. So this function makes a
 * new list, and leaves the old one unchanged. A subrequest shares the old list with its parent. So
 * a subrequest's fields can be removed without changing its parent's.
 */
ngx_int_t ngx_http_shunt_strip(ngx_http_request_t *r, ngx_int_t (*strips)(ngx_table_elt_t *h))
{
    ngx_uint_t i;
    ngx_list_part_t old, *part;
    ngx_table_elt_t *h, *copy;

    old = r->headers_in.headers.part;

    if (ngx_list_init(&r->headers_in.headers, r->pool, 20, sizeof(ngx_table_elt_t)) != NGX_OK) {
        return NGX_ERROR;
    }

    for (part = &old; part; part = part->next) {
        h = part->elts;

        for (i = 0; i < part->nelts; i++) {
            if (strips(&h[i])) {
                continue;
            }

            copy = ngx_list_push(&r->headers_in.headers);
            if (copy == NULL) {
                return NGX_ERROR;
            }

            *copy = h[i];
        }
    }

    return NGX_OK;
}

/* Checks whether the consent was meant for this server. If not, a tier without Shunt is in between,
 * which may accept only short headers. Then limits the room for a header, and notes the address
 * that the consent came from, unless this address is trusted as "plain". */
static ngx_int_t ngx_http_shunt_note_hop(ngx_http_request_t *r, ngx_http_shunt_loc_conf_t *lcf,
                                         ngx_http_shunt_ctx_t *ctx)
{
    ngx_connection_t *c = r->connection;

    if (ngx_http_shunt_hop_is_ours(c, &ctx->consent)) {
        return NGX_OK;
    }

    ctx->consent.header = ngx_min(ctx->consent.header, SHUNT_HEADER_BYTES);

    if (ngx_http_shunt_is_plain(lcf, c->sockaddr)) {
        return NGX_OK;
    }

    return ngx_http_shunt_address_text(r->pool, c->sockaddr, c->socklen, &ctx->plain);
}

static ngx_uint_t ngx_http_shunt_is_consent(ngx_table_elt_t *h, ngx_http_shunt_consent_t *consent)
{
    return h->key.len == sizeof("Shunt-Consent") - 1 &&
           ngx_strcasecmp(h->key.data, (u_char *) "Shunt-Consent") == 0 &&
           ngx_http_shunt_parse_consent(&h->value, consent) == NGX_OK;
}

/* Keeps the first well-formed consent, if a trusted tier has sent the request. Counts every other
 * Shunt-* field. NGX_DECLINED: there were other fields. */
static ngx_int_t ngx_http_shunt_receive(ngx_http_request_t *r, ngx_http_shunt_loc_conf_t *lcf)
{
    ngx_int_t rc = NGX_OK;
    ngx_uint_t i, trusted;
    ngx_list_part_t *part;
    ngx_table_elt_t *h;
    ngx_http_shunt_ctx_t *ctx;
    ngx_http_shunt_consent_t consent;

    trusted = ngx_http_shunt_is_trusted(lcf, r->connection->sockaddr);

    ctx = ngx_http_shunt_ctx_create(r);
    if (ctx == NULL) {
        return NGX_ERROR;
    }

    for (part = &r->headers_in.headers.part; part; part = part->next) {
        h = part->elts;

        for (i = 0; i < part->nelts; i++) {
            if (!ngx_http_shunt_is_field(&h[i])) {
                continue;
            }

            if (trusted && !ctx->received && ngx_http_shunt_is_consent(&h[i], &ctx->consent)) {
                ctx->received = 1;

                if (ngx_http_shunt_note_hop(r, lcf, ctx) != NGX_OK) {
                    return NGX_ERROR;
                }

                continue;
            }

            ctx->distrusted |= !trusted && ngx_http_shunt_is_consent(&h[i], &consent);
            ngx_http_shunt_count(SHUNT_COUNT_forged_request_field, 1);
            rc = NGX_DECLINED;
        }
    }

    return rc;
}

/* Removes Shunt-* fields, unless a trusted consent is the only one. A trusted consent may stay
 * until the precontent phase, because most requests with one are for a file, and are not passed
 * on. */
ngx_int_t ngx_http_shunt_post_read_handler(ngx_http_request_t *r)
{
    ngx_int_t rc;
    ngx_http_shunt_loc_conf_t *lcf;

    if (r != r->main || ngx_http_shunt_find_field(&r->headers_in.headers) == NULL) {
        return NGX_DECLINED;
    }

    lcf = ngx_http_get_module_loc_conf(r, ngx_http_shunt_module);

    rc = ngx_http_shunt_receive(r, lcf);

    if (rc == NGX_DECLINED) {
        rc = ngx_http_shunt_strip(r, ngx_http_shunt_is_field);
    }

    return rc == NGX_OK ? NGX_DECLINED : NGX_HTTP_INTERNAL_SERVER_ERROR;
}

ngx_int_t ngx_http_shunt_add_request_field(ngx_http_request_t *r, char *key, char *lowcase_key,
                                           ngx_str_t *value)
{
    ngx_table_elt_t *h;

    h = ngx_list_push(&r->headers_in.headers);
    if (h == NULL) {
        return NGX_ERROR;
    }

    ngx_memzero(h, sizeof(ngx_table_elt_t));
    h->key.data = (u_char *) key;
    h->key.len = ngx_strlen(key);
    h->lowcase_key = (u_char *) lowcase_key;
    h->hash = ngx_hash_key(h->lowcase_key, h->key.len);
    h->value = *value;

    return NGX_OK;
}

ngx_int_t ngx_http_shunt_add_consent(ngx_http_request_t *r, ngx_http_shunt_consent_t *consent)
{
    ngx_str_t value;

    if (ngx_http_shunt_format_consent(r->pool, consent, &value) != NGX_OK) {
        return NGX_ERROR;
    }

    return ngx_http_shunt_add_request_field(r, "Shunt-Consent", "shunt-consent", &value);
}

/* Returns this location's configuration of the next module of proxy, fastcgi, uwsgi and scgi. Skips
 * modules that are not built in. NULL: there is no further one. `i`: place in the list of modules,
 * 0 at the first call. */
static ngx_http_upstream_conf_t *ngx_http_shunt_next_upstream(ngx_http_request_t *r, ngx_uint_t *i)
{
    ngx_module_t *module, *modules[] = {&ngx_http_proxy_module, &ngx_http_fastcgi_module,
                                        &ngx_http_uwsgi_module, &ngx_http_scgi_module};

    while (*i < sizeof(modules) / sizeof(modules[0])) {
        module = modules[(*i)++];

        if (module) {
            return r->loc_conf[module->ctx_index];
        }
    }

    return NULL;
}

/* Longest header of an answer that this tier can read, in bytes: proxy_buffer_size, or its
 * equivalent in another module. If only variables name the upstream, it is not known yet which
 * module will ask, and the smallest buffer of all of them counts. */
uint64_t ngx_http_shunt_header_room(ngx_http_request_t *r)
{
    ngx_uint_t i = 0, named = 0;
    uint64_t room = 0;
    ngx_http_upstream_conf_t *ucf;

    while ((ucf = ngx_http_shunt_next_upstream(r, &i)) != NULL) {
        if (ucf->upstream && !named) {
            named = 1;
            room = 0;
        }

        if ((ucf->upstream || !named) && (room == 0 || ucf->buffer_size < room)) {
            room = ucf->buffer_size;
        }
    }

    return room ? room : SHUNT_HEADER_BYTES;
}

/* Returns 0, or the counter of the reason why the body must come here: it is assembled from slices,
 * may be stored, or is limited in rate. */
static ngx_uint_t ngx_http_shunt_body_needed(ngx_http_request_t *r)
{
    ngx_uint_t i = 0;
    ngx_http_upstream_conf_t *ucf;

    /* the slice filter assembles bodies from subrequests, which carry no consent */
    if (&ngx_http_slice_filter_module &&
        *(size_t *) ngx_http_get_module_loc_conf(r, ngx_http_slice_filter_module)) {
        return SHUNT_COUNT_relayed_filter;
    }

    while ((ucf = ngx_http_shunt_next_upstream(r, &i)) != NULL) {
        if (ucf->store > 0) {
            return SHUNT_COUNT_relayed_cache;
        }

#if (NGX_HTTP_CACHE)
        if (ucf->cache > 0 || ucf->cache_zone || ucf->cache_value) {
            return SHUNT_COUNT_relayed_cache;
        }
#endif

        if (ucf->limit_rate) {
            return SHUNT_COUNT_relayed_limit_rate;
        }
    }

    return 0;
}

/* Whether `families` (SHUNT_FAMILY_*) include this client's IP version. A client that speaks IPv4
 * to an IPv6 socket counts as IPv4. The local address tells the version, because realip may have
 * changed the client's address. */
static ngx_uint_t ngx_http_shunt_family_served(ngx_connection_t *c, uint32_t families)
{
    struct sockaddr_in6 *sin6;
    uint32_t family = SHUNT_FAMILY_IPV4;

    /* 0: no backend is connected, or no routes are known; this tells nothing about IP versions */
    if (families == 0 || families == (SHUNT_FAMILY_IPV4 | SHUNT_FAMILY_IPV6)) {
        return 1;
    }

    /* if the socket listens at a wildcard address, this asks the kernel for the local one, once for
     * each connection */
    if (ngx_connection_local_sockaddr(c, NULL, 0) != NGX_OK) {
        return 0;
    }

    if (c->local_sockaddr->sa_family == AF_INET6) {
        sin6 = (struct sockaddr_in6 *) c->local_sockaddr;

        if (!IN6_IS_ADDR_V4MAPPED(&sin6->sin6_addr)) {
            family = SHUNT_FAMILY_IPV6;
        }
    }

    return families & family;
}

/* Returns 0, or the counter of the reason why this request's response cannot be handed off. */
static ngx_uint_t ngx_http_shunt_not_eligible(ngx_http_request_t *r)
{
    ngx_uint_t reason;
    ngx_connection_t *c = r->connection;
    const struct shunt_board *board = ngx_http_shunt_board();
    ngx_http_core_loc_conf_t *clcf = ngx_http_get_module_loc_conf(r, ngx_http_core_module);

    if (!ngx_http_shunt_agent_ready() || board == NULL || !board->frontend) {
        return SHUNT_COUNT_relayed_no_agent;
    }

    if (board->closed & SHUNT_CLOSED_HANDOFFS) {
        return SHUNT_COUNT_relayed_handoffs_limit;
    }

    if (r->method != NGX_HTTP_GET || r->headers_in.content_length_n > 0 || r->headers_in.chunked) {
        return SHUNT_COUNT_relayed_untrusted_request;
    }

    /* local_sockaddr, because realip may have changed sockaddr */
    if (r->http_version < NGX_HTTP_VERSION_10 || r->http_version > NGX_HTTP_VERSION_11 ||
        c->type != SOCK_STREAM ||
        (c->local_sockaddr->sa_family != AF_INET && c->local_sockaddr->sa_family != AF_INET6)) {
        return SHUNT_COUNT_relayed_protocol;
    }

    reason = ngx_http_shunt_ssl_not_eligible(c);

    if (reason) {
        return reason;
    }

    if (!ngx_http_shunt_family_served(c, __atomic_load_n(&board->families, __ATOMIC_RELAXED))) {
        return SHUNT_COUNT_relayed_family;
    }

    if (!ngx_http_shunt_any_speaks(c, board)) {
        return SHUNT_COUNT_relayed_speaks_for;
    }

    if (clcf->limit_rate_after || r->limit_rate_after_set) {
        return SHUNT_COUNT_relayed_limit_rate_after;
    }

    return ngx_http_shunt_body_needed(r);
}

static ngx_int_t ngx_http_shunt_give(ngx_http_request_t *r, ngx_http_shunt_loc_conf_t *lcf)
{
    ngx_uint_t reason = SHUNT_COUNT_relayed_not_worth;
    ngx_http_shunt_ctx_t *ctx;

    if (lcf->trust == NULL) {
        reason = SHUNT_COUNT_relayed_no_trust;

    } else if (ngx_http_shunt_is_worth(lcf)) {
        reason = ngx_http_shunt_not_eligible(r);

        if (reason == 0 && ngx_http_shunt_vain_now(r, lcf)) {
            reason = SHUNT_COUNT_relayed_vain;
        }
    }

    if (reason) {
        ngx_http_shunt_outcome(r, reason);
        return NGX_OK;
    }

    ctx = ngx_http_shunt_ctx_create(r);
    if (ctx == NULL) {
        return NGX_ERROR;
    }

    if (ngx_http_shunt_nonce(ctx->consent.nonce) != NGX_OK) {
        ngx_log_error(NGX_LOG_ALERT, r->connection->log, ngx_errno, "getrandom() failed");
        return NGX_OK; /* the response is relayed */
    }

    ctx->consent.frontend = ngx_http_shunt_board_name();
    ctx->consent.tiers = 1;
    ctx->consent.rest = 0;
    ctx->consent.from = ngx_http_shunt_least_length(r, lcf);
    ctx->consent.header = ngx_http_shunt_header_room(r);
    ctx->given = 1;
    ctx->consented = 1;
    ctx->given_at = ngx_current_msec;
    ctx->tls_fresh = ngx_http_shunt_ssl_is_fresh(r->connection);
    ctx->outcome = -1;
    ngx_http_shunt_hop_begin(r, ctx);

    return ngx_http_shunt_add_consent(r, &ctx->consent);
}

/* At an intermediate: passes a trusted tier's consent on, if this tier consents as well. */
static ngx_int_t ngx_http_shunt_pass(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx,
                                     ngx_http_shunt_loc_conf_t *lcf)
{
    ngx_uint_t reason;
    ngx_http_shunt_consent_t consent = ctx->consent;
    ngx_http_core_loc_conf_t *clcf = ngx_http_get_module_loc_conf(r, ngx_http_core_module);

    reason = ngx_http_shunt_body_needed(r);

    /* these limits are for bytes that this tier sends to the tier before it; a shortcut would evade
     * them */
    if (reason == 0 && (clcf->limit_rate || r->limit_rate_set || r->main->limit_conn_status)) {
        reason = SHUNT_COUNT_relayed_limit_rate;
    }

    if (reason == 0 && ngx_http_shunt_vain_now(r, lcf)) {
        reason = SHUNT_COUNT_relayed_vain;
    }

    if (reason) {
        ngx_http_shunt_outcome(r, reason);
        return NGX_OK;
    }

    if (ctx->plain.len) {
        ngx_http_shunt_hop_refuse(r, ctx);
        return NGX_OK;
    }

    if (consent.tiers >= SHUNT_TIERS_MAX) {
        ngx_http_shunt_outcome(r, SHUNT_COUNT_relayed_tiers);
        return NGX_OK;
    }

    consent.tiers++;
    consent.header = ngx_min(consent.header, ngx_http_shunt_header_room(r));
    ctx->passed = 1;
    ngx_http_shunt_hop_begin(r, ctx);

    return ngx_http_shunt_add_consent(r, &consent);
}

ngx_int_t ngx_http_shunt_precontent_handler(ngx_http_request_t *r)
{
    ngx_int_t rc = NGX_OK;
    ngx_http_shunt_ctx_t *ctx;
    ngx_http_shunt_loc_conf_t *lcf;

    lcf = ngx_http_get_module_loc_conf(r, ngx_http_shunt_module);
    ctx = ngx_http_shunt_ctx(r);

    if (ctx && r == r->main) {
        ctx->given = 0;
        ctx->passed = 0;
    }

    /* without a content handler, nginx serves a file: there is no upstream */
    if (r->content_handler == NULL) {
        return NGX_DECLINED;
    }

    /* Removes Shunt-* fields; `ctx` has the trusted consent already. A subrequest has inherited the
     * main request's fields. After an internal redirect, the fields have the consent of another
     * location, with other rules. */
    if ((r != r->main || ctx) && ngx_http_shunt_find_field(&r->headers_in.headers) &&
        ngx_http_shunt_strip(r, ngx_http_shunt_is_field) != NGX_OK) {
        return NGX_HTTP_INTERNAL_SERVER_ERROR;
    }

    if (r != r->main || (ctx && ctx->again)) {
        return NGX_DECLINED;
    }

    if (ctx && ctx->received && lcf->consent) {
        rc = ngx_http_shunt_pass(r, ctx, lcf);

    } else if (lcf->shunt && !(ctx && ctx->received && lcf->offer)) {
        rc = ngx_http_shunt_give(r, lcf);

        if (ctx && ctx->given) {
            ctx->received = 0; /* this tier's consent has overwritten the received one */
        }
    }

    return rc == NGX_OK ? NGX_DECLINED : NGX_HTTP_INTERNAL_SERVER_ERROR;
}
