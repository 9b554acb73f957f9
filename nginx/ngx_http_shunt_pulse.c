/* SPDX-License-Identifier: MIT */
/*
 * Whether the agent of this machine is running. A running agent changes a word of the board several
 * times a second. If the word has not changed for a while, or the connection to the agent is gone,
 * nothing new is handed off. Payloads without progress are then continued without the agent
 * (rest.c): a stopped agent may never have read of a handoff, and one that is gone cannot report
 * that a backend is lost. The board is memory that the agent writes and workers read. A handoff
 * lets a backend send a payload, the body of a response, on the client's own connection. A region
 * is the range of the client connection's sequence numbers that a payload takes.
 */
#include "ngx_http_shunt.h"

#define NGX_HTTP_SHUNT_PULSE_LOOK 250 /* ms between two checks, while something is pending */
/* ms without a sign of the agent. Longer than FRESH in crates/handoff/src/frontend.rs: if an agent
 * reads of a handoff later than FRESH after the handoff's beginning, it checks whether the region
 * is still active. */
#define NGX_HTTP_SHUNT_PULSE_GONE 2000

static uint32_t ngx_http_shunt_beat;      /* value of the board's word that was seen last */
static ngx_msec_t ngx_http_shunt_beat_at; /* time when this value was seen first */
static ngx_event_t ngx_http_shunt_pulse;

/* Returns 1 if the agent has been stopped or gone for NGX_HTTP_SHUNT_PULSE_GONE ms. If there was no
 * check for some time, a changed value counts as a sign of life, even if the agent changed it long
 * ago. A later check then finds out whether the agent still runs. */
ngx_uint_t ngx_http_shunt_pulse_is_gone(void)
{
    uint32_t beat;
    const struct shunt_board *board = ngx_http_shunt_board();

    if (board && ngx_http_shunt_agent_connected()) {
        beat = __atomic_load_n(&board->beat, __ATOMIC_RELAXED);

        if (beat != ngx_http_shunt_beat) {
            ngx_http_shunt_beat = beat;
            ngx_http_shunt_beat_at = ngx_current_msec;
        }
    }

    return ngx_current_msec - ngx_http_shunt_beat_at >= NGX_HTTP_SHUNT_PULSE_GONE;
}

static void ngx_http_shunt_pulse_visit(ngx_http_shunt_ctx_t *ctx)
{
    ngx_uint_t gone = ngx_http_shunt_pulse_is_gone();

    if (!gone && (ctx->mode != SHUNT_MODE_ACTIVE || ctx->ring == ngx_http_shunt_agent_ring())) {
        ngx_http_shunt_stall_look(ctx);
        return;
    }

    if (ctx->failure.posted || ngx_current_msec - ctx->progress_at < NGX_HTTP_SHUNT_PULSE_GONE) {
        return;
    }

    if (ctx->mode == SHUNT_MODE_FETCH_EARLY || ctx->mode == SHUNT_MODE_FETCH_LATE) {
        ngx_http_shunt_fetch_failed(ctx, "the agent of this machine is stopped or gone");
        return;
    }

    if (ctx->mode != SHUNT_MODE_ACTIVE) {
        return;
    }

    (void) ngx_http_shunt_follow(ctx); /* may complete the handoff */

    /* A new agent has taken the old one's place. A handoff needs no agent to go on. The exception
     * is a payload that waits for the backend's confirmation, because the old agent may have got
     * the confirmation. */
    if (!gone && !ctx->claimed) {
        ngx_http_shunt_stall_look(ctx);
        return;
    }

    /* A client without room in its window (`shut`) delays the payload itself. Then the agent is not
     * the cause, and the backend's kernel may have the rest. */
    if (ctx->mode == SHUNT_MODE_ACTIVE && !ctx->shut &&
        ngx_current_msec - ctx->progress_at >= NGX_HTTP_SHUNT_PULSE_GONE &&
        ngx_http_shunt_probe(ctx, NGX_HTTP_SHUNT_ASKED_GONE) != NGX_AGAIN) {
        ngx_http_shunt_rest_gone(ctx);
    }
}

static void ngx_http_shunt_pulse_handler(ngx_event_t *ev)
{
    ngx_http_shunt_pending_each(ngx_http_shunt_pulse_visit);
    ngx_http_shunt_pulse_watch();
}

/* Starts the timer for the next check, if any handoff or fetch is pending. */
void ngx_http_shunt_pulse_watch(void)
{
    if (!ngx_http_shunt_pulse.timer_set && ngx_http_shunt_pending_any()) {
        ngx_add_timer(&ngx_http_shunt_pulse, NGX_HTTP_SHUNT_PULSE_LOOK);
    }
}

void ngx_http_shunt_pulse_begin(ngx_log_t *log)
{
    ngx_http_shunt_pulse.handler = ngx_http_shunt_pulse_handler;
    ngx_http_shunt_pulse.log = log;
    ngx_http_shunt_pulse.data = &ngx_http_shunt_pulse;
    ngx_http_shunt_pulse.cancelable = 1;
    ngx_http_shunt_beat_at = ngx_current_msec;
}

void ngx_http_shunt_pulse_end(void)
{
    if (ngx_http_shunt_pulse.timer_set) {
        ngx_del_timer(&ngx_http_shunt_pulse);
    }
}
