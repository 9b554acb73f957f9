/* SPDX-License-Identifier: MIT */
/*
 * The kernel hands a connection off only with proof that its client's packets pass the steering
 * programs (include/shunt.h, SHUNT_BEGIN). For a first response that is its handshake, which is
 * noted for ports that a server names beforehand: all that clients of HTTP come to.
 */
#include "ngx_http_shunt.h"
#include "ngx_http_shunt_kernel.h"

#define NGX_HTTP_SHUNT_UNPROVEN_LOGGED 16 /* one after the other: that is no accident */

static ngx_uint_t ngx_http_shunt_unproven;

/*
 * Before the first worker, so that also the first clients' handshakes are noted where an agent's
 * programs are in the kernel by then; and again when an agent has come.
 */
void ngx_http_shunt_watch_listeners(ngx_cycle_t *cycle, ngx_uint_t level)
{
    ngx_uint_t i;
    ngx_listening_t *ls = cycle->listening.elts;

    for (i = 0; i < cycle->listening.nelts; i++) {
        if (ls[i].handler == ngx_http_init_connection && ls[i].type == SOCK_STREAM &&
            ls[i].sockaddr->sa_family != AF_UNIX && ls[i].fd != (ngx_socket_t) -1 &&
            ngx_http_shunt_kernel_watch(ls[i].fd) == -1) {
            ngx_log_error(level, cycle->log, ngx_errno,
                          "shunt: clients of %V are not watched: of each, the first response is "
                          "relayed",
                          &ls[i].addr_text);
        }
    }
}

void ngx_http_shunt_watch_begun(void)
{
    ngx_http_shunt_unproven = 0;
}

/* Why the kernel has refused SHUNT_BEGIN: a counter. */
ngx_uint_t ngx_http_shunt_watch_refused(ngx_http_shunt_ctx_t *ctx)
{
    const struct shunt_state *state = ngx_http_shunt_ring_answer(ctx->ring, ctx->id);

    if (state == NULL || state->status != SHUNT_REGION_UNPROVEN) {
        return SHUNT_COUNT_fetched_begin;
    }

    if (++ngx_http_shunt_unproven == NGX_HTTP_SHUNT_UNPROVEN_LOGGED) {
        ngx_log_error(NGX_LOG_ERR, ctx->request->connection->log, 0,
                      "shunt: %d clients in a row were relayed to, because their packets do not "
                      "pass shuntd's interfaces under their servers' addresses, ports and "
                      "sequence numbers: list the interface in shuntd.toml, or take away DNAT, "
                      "REDIRECT, SYNPROXY or the tunnel in between",
                      NGX_HTTP_SHUNT_UNPROVEN_LOGGED);
    }

    return SHUNT_COUNT_fetched_unproven;
}
