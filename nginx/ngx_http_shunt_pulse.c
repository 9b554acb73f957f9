/* SPDX-License-Identifier: MIT */
/*
 * Whether the agent of this machine is at work. It moves a word of the board several times a
 * second; where that stands still, or the connection to the agent is gone, for a while, nothing new
 * is handed off, and the handoffs that make no progress go on without it (rest.c): an agent that is
 * stopped may never have read of them, and one that is gone cannot tell that their backend is lost.
 */
#include "ngx_http_shunt.h"

#define NGX_HTTP_SHUNT_PULSE_LOOK 250  /* ms between two looks, while something is under way */
#define NGX_HTTP_SHUNT_PULSE_GONE 2000 /* ms without a sign of the agent; more than its FRESH */

static uint32_t ngx_http_shunt_beat;      /* as it was seen last */
static ngx_msec_t ngx_http_shunt_beat_at; /* when it was another */
static ngx_event_t ngx_http_shunt_pulse;

/* 1: for so long that it is stopped, or not there. A beat that nobody has looked at for a while is
 * news whenever it came: then the next look tells. */
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

    (void) ngx_http_shunt_follow(ctx); /* which may complete it */

    /* where the agent is another one by now, only the word of a backend is lost: what the older one
     * had been told */
    if (!gone && !ctx->claimed) {
        ngx_http_shunt_stall_look(ctx);
        return;
    }

    /* who reads slowly, or nothing, waits for nobody: the backend's kernel may well have the rest
     */
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

/* While something is under way. */
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
