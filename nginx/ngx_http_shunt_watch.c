/* SPDX-License-Identifier: MIT */
/*
 * The kernel hands a connection off only with proof that its client's packets pass the steering
 * programs (include/shunt.h, SHUNT_BEGIN). For a first response that is its handshake, which is
 * noted for ports that a server names beforehand: all that clients of HTTP come to.
 */
#include "ngx_http_shunt.h"
#include "ngx_http_shunt_kernel.h"

#define NGX_HTTP_SHUNT_UNPROVEN_LOGGED 16 /* one after the other: that is no accident */
#define NGX_HTTP_SHUNT_UNPROVEN_AGAIN  8  /* what a connection counts that had a flow already */

static ngx_uint_t ngx_http_shunt_unproven;

/* Why the kernel answers none of our calls: no program of the agent's is asked. */
static void ngx_http_shunt_say_unsteered(ngx_cycle_t *cycle, ngx_socket_t fd)
{
    uint64_t ours = ngx_http_shunt_kernel_netns(fd);
    const struct shunt_board *board = ngx_http_shunt_board();

    if (board && ours && board->netns && board->netns != ours) {
        ngx_log_error(ngx_http_shunt_level(NGX_LOG_WARN), cycle->log, 0,
                      "shunt: nginx listens in another network namespace than its shuntd works in: "
                      "responses are relayed; run both in the same one");
        return;
    }

    ngx_log_error(ngx_http_shunt_level(NGX_LOG_WARN), cycle->log, 0,
                  "shunt: nginx is not below the control group that its shuntd is attached to: "
                  "responses are relayed; name one above nginx's in \"cgroup\" of shuntd.toml");
}

static ngx_uint_t ngx_http_shunt_is_watched(ngx_listening_t *ls)
{
    return ls->handler == ngx_http_init_connection && ls->type == SOCK_STREAM &&
           ls->sockaddr->sa_family != AF_UNIX && ls->fd != (ngx_socket_t) -1;
}

/* Before the first worker, so that also the first clients' handshakes are noted where an agent's
 * programs are in the kernel by then. */
void ngx_http_shunt_watch_listeners(ngx_cycle_t *cycle)
{
    ngx_uint_t i;
    ngx_listening_t *ls = cycle->listening.elts;

    for (i = 0; i < cycle->listening.nelts; i++) {
        if (ngx_http_shunt_is_watched(&ls[i])) {
            (void) ngx_http_shunt_kernel_watch(ls[i].fd);
        }
    }
}

/* An agent has come, whose programs are in the kernel. */
void ngx_http_shunt_watch_again(ngx_cycle_t *cycle)
{
    ngx_uint_t i;
    ngx_listening_t *ls = cycle->listening.elts;

    for (i = 0; i < cycle->listening.nelts; i++) {
        if (!ngx_http_shunt_is_watched(&ls[i]) || ngx_http_shunt_kernel_watch(ls[i].fd) == 0) {
            continue;
        }

        if (ngx_errno == NGX_ENOPROTOOPT) {
            ngx_http_shunt_say_unsteered(cycle, ls[i].fd);
            return;
        }

        ngx_log_error(
            NGX_LOG_INFO, cycle->log, ngx_errno,
            "shunt: clients of %V are not watched: of each, the first response is relayed",
            &ls[i].addr_text);
    }
}

void ngx_http_shunt_watch_begun(void)
{
    ngx_http_shunt_unproven = 0;
}

/* A connection that is older than the steering programs lacks proof once. */
static void ngx_http_shunt_note_unproven(ngx_connection_t *c)
{
    ngx_uint_t before = ngx_http_shunt_unproven;
    ngx_http_shunt_vain_t *vain = ngx_http_shunt_lifetime_vain(c, 0);

    ngx_http_shunt_unproven += vain && vain->row ? NGX_HTTP_SHUNT_UNPROVEN_AGAIN : 1;

    if (before < NGX_HTTP_SHUNT_UNPROVEN_LOGGED &&
        ngx_http_shunt_unproven >= NGX_HTTP_SHUNT_UNPROVEN_LOGGED) {
        ngx_log_error(NGX_LOG_ERR, c->log, 0,
                      "shunt: clients are relayed to, one after the other, because their packets "
                      "do not pass shuntd's interfaces under their servers' addresses, ports and "
                      "sequence numbers: list the interface in shuntd.toml, or take away DNAT, "
                      "REDIRECT, SYNPROXY or the tunnel in between");
    }
}

/* Why the kernel has refused SHUNT_BEGIN: a counter. */
ngx_uint_t ngx_http_shunt_watch_refused(ngx_http_shunt_ctx_t *ctx)
{
    const struct shunt_state *state = ngx_http_shunt_ring_answer(ctx->ring, ctx->id);

    switch (state ? state->status : SHUNT_REGION_NONE) {

    case SHUNT_REGION_UNPROVEN:
        ngx_http_shunt_note_unproven(ctx->request->connection);
        return SHUNT_COUNT_fetched_unproven;

    case SHUNT_REGION_UNSENT:
        return SHUNT_COUNT_fetched_unsent;

    case SHUNT_REGION_NO_PEER:
        return SHUNT_COUNT_fetched_no_session;

    case SHUNT_REGION_FAMILY:
        return SHUNT_COUNT_fetched_family;

    default:
        return SHUNT_COUNT_fetched_begin;
    }
}
