/* SPDX-License-Identifier: MIT */
/*
 * Names the ports whose handshakes the kernel should note. The kernel hands a connection off only
 * with proof that its client's packets pass the steering programs, the agent's BPF programs
 * (include/shunt.h, SHUNT_BEGIN). For a connection's first response, the proof is the handshake.
 * The kernel notes handshakes only for ports that a server has named before; this file names all
 * ports that HTTP clients connect to. A handoff lets a backend send a response's body on the
 * client's connection.
 */
#include "ngx_http_shunt.h"
#include "ngx_http_shunt_kernel.h"

/* The lack of proof is logged when this number of connections, one after the other, had none. A
 * higher number might never be reached: a location stops giving consents after this number
 * (ngx_http_shunt_vain.c). */
#define NGX_HTTP_SHUNT_UNPROVEN_LOGGED 4
#define NGX_HTTP_SHUNT_UNPROVEN_AGAIN  2 /* count of a connection that lacks proof once more */

/* Longest time in ms that a connection is expected to wait for accept(). */
#define NGX_HTTP_SHUNT_ACCEPT_MS    1000
/* ms; less than the time for which the kernel keeps a handshake (HANDSHAKE_SECONDS in
 * crates/handoff/bpf/steering.h). */
#define NGX_HTTP_SHUNT_HANDSHAKE_MS 50000

static ngx_uint_t ngx_http_shunt_unproven; /* connections in a row that had no proof */

/* The kernel has noted the handshakes of connections that were accepted after this time. */
static ngx_msec_t ngx_http_shunt_watched;
/* 1: the ports were named before the first worker started */
static ngx_uint_t ngx_http_shunt_watched_early;

/* Logs why the kernel answers no call of this process: no program of the agent runs for it. */
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

/* Names the ports to the kernel once more. Called when an agent has connected, whose programs are
 * in the kernel by then. */
void ngx_http_shunt_watch_again(ngx_cycle_t *cycle)
{
    ngx_uint_t i;
    ngx_listening_t *ls = cycle->listening.elts;

    /* The programs may be new, unless this is the agent that was there when the worker started. */
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

/* Counts a connection without proof. The connection's first time does not count if the kernel
 * cannot know the handshake, because it came before the steering programs were there, or too long
 * ago. */
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

/* Returns the counter of the reason why the kernel has refused SHUNT_BEGIN. */
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
