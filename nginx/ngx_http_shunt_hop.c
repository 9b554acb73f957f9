/* SPDX-License-Identifier: MIT */
/*
 * The server that a consent is meant for. A tier without Shunt passes the consent on like any other
 * header field. Then bodies would bypass this tier, too, and its filters and caches would see no
 * bodies. So a consent's `to` says which server the consent goes to: a hash of the upstream's
 * address and port, keyed with the nonce. A server that finds another hash there knows that the
 * consent came through a tier without Shunt. A consent is a header field of a request, by which
 * each tier (server on the request's path) says that it may be bypassed. The nonce is 16 random
 * bytes of the consent.
 *
 * nginx chooses the upstream when the request's bytes exist already, and again for each further
 * try:
 *
 *   create_request --> peer.init --> peer.get, connect --> output filter --> the connection
 *                      installs                            writes `to` into the bytes
 *
 * The hash is a sign, not a proof: a tier believes a consent because of the address that it comes
 * from, and every tier that may send one knows the nonce. If nothing writes `to`, it stays zeros,
 * which match no server.
 */
#include "ngx_http_shunt.h"

/* State of the output filter for one upstream. */
typedef struct {
    ngx_http_upstream_t *upstream;
    ngx_str_t before; /* the field's value up to `to` */
    u_char nonce[16];
} ngx_http_shunt_hop_t;

typedef struct {
    ngx_http_upstream_srv_conf_t *upstream;
    ngx_http_upstream_init_peer_pt init;
} ngx_http_shunt_balancer_t;

/* Computes `to` for an address. NGX_DECLINED: it is neither an IP nor a Unix address. */
static ngx_int_t ngx_http_shunt_hop_hash(const struct sockaddr *sa, const u_char nonce[16],
                                         u_char to[SHUNT_TO_BYTES])
{
    size_t len;
    u_char input[1 + sizeof(((struct sockaddr_un *) NULL)->sun_path)], hash[16];
    ngx_http_shunt_address_t address;
    const struct sockaddr_un *sun = (const struct sockaddr_un *) sa;

    if (sa->sa_family == AF_UNIX) {
        len = strnlen(sun->sun_path, sizeof(sun->sun_path));
        input[0] = 'u';
        ngx_memcpy(input + 1, sun->sun_path, len);

    } else if (ngx_http_shunt_address_of(sa, &address) == NGX_OK) {
        len = 16 + sizeof(address.port);
        input[0] = 'i';
        ngx_memcpy(input + 1, address.bytes, 16);
        ngx_memcpy(input + 17, &address.port, sizeof(address.port));

    } else {
        return NGX_DECLINED;
    }

    ngx_http_shunt_siphash128(nonce, input, 1 + len, hash);
    ngx_memcpy(to, hash, SHUNT_TO_BYTES);

    return NGX_OK;
}

/* ---- the sender ---- */

/* Finds `to` in the request's bytes, or returns NULL. `before`: the consent up to `to`. Looks for
 * the semicolon behind the consent's version, because few requests have many semicolons. memmem()
 * would spend more time on preparation than it saves. */
static u_char *ngx_http_shunt_hop_find(const ngx_buf_t *b, const ngx_str_t *before)
{
    u_char *p, *found;

    for (p = b->pos; (found = memchr(p, ';', b->last - p)) != NULL; p = found + 1) {
        if (found == b->pos) {
            continue;
        }

        if ((size_t) (b->last - found) + 1 < before->len + 2 * SHUNT_TO_BYTES) {
            return NULL;
        }

        if (ngx_memcmp(found - 1, before->data, before->len) == 0) {
            return found - 1 + before->len;
        }
    }

    return NULL;
}

/* Output filter: the request's bytes pass here on their way to the upstream's connection. */
static ngx_int_t ngx_http_shunt_hop_output(void *data, ngx_chain_t *in)
{
    u_char *p, to[SHUNT_TO_BYTES];
    ngx_buf_t *b;
    ngx_chain_t *cl;
    ngx_http_shunt_hop_t *hop = data;
    struct sockaddr *sa = hop->upstream->peer.sockaddr;

    for (cl = in; cl && sa; cl = cl->next) {
        b = cl->buf;

        if (!ngx_buf_in_memory(b)) {
            continue;
        }

        p = ngx_http_shunt_hop_find(b, &hop->before);

        if (p == NULL) {
            continue;
        }

        if (ngx_http_shunt_hop_hash(sa, hop->nonce, to) == NGX_OK) {
            ngx_hex_dump(p, to, SHUNT_TO_BYTES);
        }

        break;
    }

    return ngx_chain_writer(&hop->upstream->writer, in);
}

/* Installs the output filter in an upstream. Called when the request for the upstream exists, and
 * nothing of it was sent yet. An upstream that has an output filter already, like gRPC's, is left
 * alone; then `to` stays zeros. */
static void ngx_http_shunt_hop_install(ngx_http_request_t *r)
{
    size_t to_at;
    ngx_table_elt_t *field;
    ngx_http_shunt_hop_t *hop;
    ngx_http_shunt_consent_t consent;
    ngx_http_upstream_t *u = r->upstream;

    if (u == NULL || u->output.output_filter != (ngx_output_chain_filter_pt) ngx_chain_writer) {
        return;
    }

    field = ngx_http_shunt_find_field(&r->headers_in.headers);

    if (field == NULL || ngx_http_shunt_parse_start(&field->value, &consent, &to_at) != NGX_OK) {
        return;
    }

    hop = ngx_palloc(r->pool, sizeof(ngx_http_shunt_hop_t));
    if (hop == NULL) {
        return;
    }

    hop->upstream = u;
    ngx_memcpy(hop->nonce, consent.nonce, sizeof(hop->nonce));
    hop->before.data = field->value.data;
    hop->before.len = to_at;

    u->output.output_filter = ngx_http_shunt_hop_output;
    u->output.filter_ctx = hop;
}

static int ngx_libc_cdecl ngx_http_shunt_compare_balancers(const void *one, const void *two)
{
    uintptr_t a = (uintptr_t) ((const ngx_http_shunt_balancer_t *) one)->upstream,
              b = (uintptr_t) ((const ngx_http_shunt_balancer_t *) two)->upstream;

    return a < b ? -1 : a > b;
}

/* Runs before each balancer's own init, because the balancer may choose a connection that is kept
 * alive, and nginx then sends at once. */
static ngx_int_t ngx_http_shunt_hop_init_peer(ngx_http_request_t *r,
                                              ngx_http_upstream_srv_conf_t *us)
{
    ngx_http_shunt_balancer_t *balancer, key = {us, NULL};
    ngx_http_shunt_main_conf_t *mcf = ngx_http_get_module_main_conf(r, ngx_http_shunt_module);

    ngx_http_shunt_hop_install(r);

    balancer = bsearch(&key, mcf->balancers.elts, mcf->balancers.nelts, sizeof(key),
                       ngx_http_shunt_compare_balancers);

    return balancer ? balancer->init(r, us) : NGX_ERROR;
}

/* Content handler, around the location's own. Needed for upstreams that only variables name: they
 * have no balancer. Their connections are new, and send nothing before the content handler has
 * returned. */
static ngx_int_t ngx_http_shunt_hop_content(ngx_http_request_t *r)
{
    ngx_int_t rc;
    ngx_http_shunt_ctx_t *ctx = ngx_http_shunt_ctx(r->main); /* a clone has this handler, too */

    if (ctx == NULL) {
        return NGX_HTTP_INTERNAL_SERVER_ERROR;
    }

    rc = ctx->content_handler(r);

    if (rc == NGX_DONE) {
        ngx_http_shunt_hop_install(r);
    }

    return rc;
}

/* Puts the content handler above in the place of the location's. Called for a request that is sent
 * on with a consent. */
void ngx_http_shunt_hop_begin(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx)
{
    if (r->content_handler != ngx_http_shunt_hop_content) {
        ctx->content_handler = r->content_handler;
        r->content_handler = ngx_http_shunt_hop_content;
    }
}

/* Puts ngx_http_shunt_hop_init_peer() in front of the init handler of each upstream's balancer.
 * Called when all upstreams have been set up. */
ngx_int_t ngx_http_shunt_hop_init(ngx_conf_t *cf)
{
    ngx_uint_t i;
    ngx_http_shunt_balancer_t *balancer;
    ngx_http_shunt_main_conf_t *mcf = ngx_http_conf_get_module_main_conf(cf, ngx_http_shunt_module);
    ngx_http_upstream_srv_conf_t **uscfp;
    ngx_http_upstream_main_conf_t *umcf;

    umcf = ngx_http_conf_get_module_main_conf(cf, ngx_http_upstream_module);
    uscfp = umcf->upstreams.elts;

    if (ngx_array_init(&mcf->balancers, cf->pool, umcf->upstreams.nelts + 1,
                       sizeof(ngx_http_shunt_balancer_t)) != NGX_OK) {
        return NGX_ERROR;
    }

    for (i = 0; i < umcf->upstreams.nelts; i++) {
        balancer = ngx_array_push(&mcf->balancers);
        balancer->upstream = uscfp[i];
        balancer->init = uscfp[i]->peer.init;
        uscfp[i]->peer.init = ngx_http_shunt_hop_init_peer;
    }

    ngx_qsort(mcf->balancers.elts, mcf->balancers.nelts, sizeof(ngx_http_shunt_balancer_t),
              ngx_http_shunt_compare_balancers);

    return NGX_OK;
}

/* ---- the receiver ---- */

/* Whether the consent was meant for this server. */
ngx_uint_t ngx_http_shunt_hop_is_ours(ngx_connection_t *c, const ngx_http_shunt_consent_t *consent)
{
    u_char to[SHUNT_TO_BYTES];

    /* if the socket listens at a wildcard address, this asks the kernel for the local one, once for
     * each connection */
    return ngx_connection_local_sockaddr(c, NULL, 0) == NGX_OK &&
           ngx_http_shunt_hop_hash(c->local_sockaddr, consent->nonce, to) == NGX_OK &&
           ngx_memcmp(to, consent->to, SHUNT_TO_BYTES) == 0;
}

/* Logs that responses to this address are relayed: once for each of the first few addresses. */
static void ngx_http_shunt_say_plain(ngx_http_request_t *r, ngx_str_t *address)
{
    static ngx_http_shunt_said_t said;

    if (!ngx_http_shunt_may_say_address(&said, address)) {
        return;
    }

    ngx_log_error(
        NGX_LOG_ERR, r->connection->log, 0,
        "shunt: responses to %V are relayed, because its requests carry consents for another "
        "server's address: a tier without this module, or a translation of addresses, is in "
        "between; if bodies may bypass it, add \"shunt_trust %V plain;\" here",
        address, address);
}

/* Refuses a consent that could be used, but has come through a tier without Shunt, and from an
 * address that is not configured as "plain". */
void ngx_http_shunt_hop_refuse(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx)
{
    ngx_http_shunt_say_plain(r, &ctx->plain);
    ngx_http_shunt_outcome(r, SHUNT_COUNT_relayed_plain);
}
