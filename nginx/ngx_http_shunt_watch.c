/* SPDX-License-Identifier: MIT */
/*
 * Names to the kernel the ports whose TCP handshakes it should note (SHUNT_WATCH). The kernel hands
 * a connection off only with proof that its client's packets pass the steering programs, the
 * agent's BPF programs (include/shunt.h, SHUNT_BEGIN). For a connection's first response, the proof
 * is the handshake. The kernel notes handshakes only for ports that a server has named, or on which
 * a handoff was refused because proof was missing. This file names all ports that HTTP clients
 * connect to. A handoff lets a backend send a response's body on the client's connection. A consent
 * is the request's header field that asks for a handoff. It is in vain if no handoff follows, or if
 * the handoff fails.
 */
#include "ngx_http_shunt.h"
#include "ngx_http_shunt_kernel.h"

/* The lack of proof is logged when ngx_http_shunt_unproven reaches this value. A higher value would
 * be reached much later, because a location gives few consents after 4 in a row were in vain
 * (ngx_http_shunt_vain.c). */
#define NGX_HTTP_SHUNT_UNPROVEN_LOGGED 4
/* Added, in place of 1, if a consent of the connection was in vain before. */
#define NGX_HTTP_SHUNT_UNPROVEN_AGAIN  2

/* Longest expected wait of a connection for accept(), in ms. */
#define NGX_HTTP_SHUNT_ACCEPT_MS    1000
/* Age of a connection, in ms, from which on the kernel may have forgotten its handshake. Less than
 * HANDSHAKE_SECONDS (crates/handoff/bpf/steering.h), for which the kernel keeps a handshake. */
#define NGX_HTTP_SHUNT_HANDSHAKE_MS 50000

/* Number of times that proof was missing since the kernel last accepted a SHUNT_BEGIN. Some count
 * twice or not at all (ngx_http_shunt_note_unproven()). */
static ngx_uint_t ngx_http_shunt_unproven;

/* The kernel should have noted the handshakes of connections accepted at this time or later
 * (ngx_current_msec). */
static ngx_msec_t ngx_http_shunt_watched;
/* 1: all ports were named before the workers started, and no agent has welcomed this worker yet */
static ngx_uint_t ngx_http_shunt_watched_early;

/* Logs why the kernel does not know this process's SHUNT_* socket options (ENOPROTOOPT): the
 * agent's BPF programs do not run for this process. */
static void ngx_http_shunt_say_unsteered(ngx_cycle_t *cycle, ngx_socket_t fd)
{
    uint64_t ours = ngx_http_shunt_kernel_netns(fd);
    const struct shunt_board *board = ngx_http_shunt_board();

    if (board && ours && board->netns && board->netns != ours) {
        ngx_log_error(ngx_http_shunt_level(NGX_LOG_WARN), cycle->log, 0,
                      "shunt: nginx and its shuntd are in different network namespaces: responses "
                      "are relayed; run both in the same one");
        return;
    }

    ngx_log_error(
        ngx_http_shunt_level(NGX_LOG_WARN), cycle->log, 0,
        "shunt: nginx is not below the control group that its shuntd is attached to: responses are "
        "relayed; name a control group above nginx's in \"cgroup\" of shuntd.toml");
}

static ngx_uint_t ngx_http_shunt_is_watched(ngx_listening_t *ls)
{
    return ls->handler == ngx_http_init_connection && ls->type == SOCK_STREAM &&
           ls->sockaddr->sa_family != AF_UNIX && ls->fd != (ngx_socket_t) -1;
}

/* Names the ports before the first worker starts. So the first clients' handshakes are noted as
 * well, if an agent's programs are in the kernel by then. */
void ngx_http_shunt_watch_listeners(ngx_cycle_t *cycle)
{
    ngx_uint_t i;
    ngx_listening_t *ls = cycle->listening.elts;

    ngx_http_shunt_watched = ngx_current_msec;
    ngx_http_shunt_watched_early = 1;

    for (i = 0; i < cycle->listening.nelts; i++) {
        if (ngx_http_shunt_is_watched(&ls[i]) && ngx_http_shunt_kernel_watch(ls[i].fd) == -1) {
            ngx_http_shunt_watched_early = 0;
        }
    }
}

/* Names the ports to the kernel once more. Called when this worker has connected to an agent. The
 * agent's programs are in the kernel by then. */
void ngx_http_shunt_watch_again(ngx_cycle_t *cycle)
{
    ngx_uint_t i;
    ngx_listening_t *ls = cycle->listening.elts;

    /* The programs may be new, and lack earlier handshakes. But the first agent that welcomes this
     * worker counts as the one whose programs were there before. */
    if (!ngx_http_shunt_watched_early) {
        ngx_http_shunt_watched = ngx_current_msec + NGX_HTTP_SHUNT_ACCEPT_MS;
    }

    ngx_http_shunt_watched_early = 0;

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
            "shunt: clients of %V are not watched: the first response to each client is relayed",
            &ls[i].addr_text);
    }
}

void ngx_http_shunt_watch_begun(void)
{
    ngx_http_shunt_unproven = 0;
}

/* Whether the kernel should have noted the handshake of this connection, and kept it. */
static ngx_uint_t ngx_http_shunt_handshake_is_noted(ngx_connection_t *c)
{
    return (ngx_msec_int_t) (c->start_time - ngx_http_shunt_watched) >= 0 &&
           ngx_current_msec - c->start_time < NGX_HTTP_SHUNT_HANDSHAKE_MS;
}

/* Counts a lack of proof on a connection. If a consent of this connection was in vain before, adds
 * NGX_HTTP_SHUNT_UNPROVEN_AGAIN. Else adds 1, or 0 if the kernel cannot know the handshake: the
 * handshake came before the steering programs, or too long ago. */
static void ngx_http_shunt_note_unproven(ngx_connection_t *c)
{
    ngx_uint_t before = ngx_http_shunt_unproven;
    ngx_http_shunt_vain_t *vain = ngx_http_shunt_lifetime_vain(c, 0);

    if (vain && vain->row) {
        ngx_http_shunt_unproven += NGX_HTTP_SHUNT_UNPROVEN_AGAIN;

    } else if (ngx_http_shunt_handshake_is_noted(c)) {
        ngx_http_shunt_unproven++;
    }

    if (before < NGX_HTTP_SHUNT_UNPROVEN_LOGGED &&
        ngx_http_shunt_unproven >= NGX_HTTP_SHUNT_UNPROVEN_LOGGED) {
        ngx_log_error(NGX_LOG_ERR, c->log, 0,
                      "shunt: responses to several clients were relayed, because their packets do "
                      "not pass shuntd's interfaces with the server's address, port and sequence "
                      "numbers: add the interface to shuntd.toml, or remove DNAT, REDIRECT, "
                      "SYNPROXY or the tunnel in between");
    }
}

/* Returns the counter of the reason why SHUNT_BEGIN was refused, or could not be called. */
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
