/* SPDX-License-Identifier: MIT */
/*
 * Requests that wait for the kernel or the agent, by the number of their handoff (a backend sends
 * the body on the client's connection) or fetch (the body comes through both agents). A number
 * consists of a slot's index and the slot's generation, which grows with each use. So a late
 * message for a request that has ended finds no request. Generations begin at random values, so a
 * message that went to the wrong worker finds none either.
 */
#include "ngx_http_shunt.h"

typedef struct {
    ngx_http_shunt_ctx_t *ctx; /* NULL: free */
    uint32_t generation;       /* never 0, so that no number is 0 */
    uint32_t next_free;
} ngx_http_shunt_slot_t;

#define NGX_HTTP_SHUNT_NO_SLOT 0xffffffffu

static ngx_http_shunt_slot_t *ngx_http_shunt_slots;
static uint32_t ngx_http_shunt_nslots;
static uint32_t ngx_http_shunt_pending_count;
static uint32_t ngx_http_shunt_free_slot = NGX_HTTP_SHUNT_NO_SLOT;

static ngx_int_t ngx_http_shunt_pending_grow(void)
{
    uint32_t i, n;
    ngx_http_shunt_slot_t *slots;

    n = ngx_http_shunt_nslots ? 2 * ngx_http_shunt_nslots : 256;

    slots = realloc(ngx_http_shunt_slots, n * sizeof(ngx_http_shunt_slot_t));
    if (slots == NULL) {
        return NGX_ERROR;
    }

    for (i = ngx_http_shunt_nslots; i < n; i++) {
        slots[i].ctx = NULL;
        slots[i].generation = (uint32_t) ngx_random() | 1;
        slots[i].next_free = i + 1 < n ? i + 1 : NGX_HTTP_SHUNT_NO_SLOT;
    }

    ngx_http_shunt_free_slot = ngx_http_shunt_nslots;
    ngx_http_shunt_slots = slots;
    ngx_http_shunt_nslots = n;

    return NGX_OK;
}

uint64_t ngx_http_shunt_pending_add(ngx_http_shunt_ctx_t *ctx)
{
    uint32_t i;
    ngx_http_shunt_slot_t *slot;

    if (ngx_http_shunt_free_slot == NGX_HTTP_SHUNT_NO_SLOT &&
        ngx_http_shunt_pending_grow() != NGX_OK) {
        return 0;
    }

    i = ngx_http_shunt_free_slot;
    slot = &ngx_http_shunt_slots[i];

    ngx_http_shunt_free_slot = slot->next_free;
    slot->ctx = ctx;
    ngx_http_shunt_pending_count++;

    return (uint64_t) slot->generation << 32 | i;
}

ngx_http_shunt_ctx_t *ngx_http_shunt_pending_find(uint64_t id)
{
    uint32_t i = (uint32_t) id;

    if (i >= ngx_http_shunt_nslots || ngx_http_shunt_slots[i].generation != id >> 32) {
        return NULL;
    }

    return ngx_http_shunt_slots[i].ctx;
}

void ngx_http_shunt_pending_remove(uint64_t id)
{
    uint32_t i = (uint32_t) id;
    ngx_http_shunt_slot_t *slot;

    if (ngx_http_shunt_pending_find(id) == NULL) {
        return;
    }

    slot = &ngx_http_shunt_slots[i];
    slot->ctx = NULL;
    ngx_http_shunt_pending_count--;
    slot->generation = slot->generation == 0xffffffffu ? 1 : slot->generation + 1;
    slot->next_free = ngx_http_shunt_free_slot;
    ngx_http_shunt_free_slot = i;
}

ngx_uint_t ngx_http_shunt_pending_any(void)
{
    return ngx_http_shunt_pending_count > 0;
}

/* Calls visit() for each request. visit() may remove the request that it is called for, and no
 * other. */
void ngx_http_shunt_pending_each(void (*visit)(ngx_http_shunt_ctx_t *ctx))
{
    uint32_t i;

    for (i = 0; i < ngx_http_shunt_nslots; i++) {
        if (ngx_http_shunt_slots[i].ctx) {
            visit(ngx_http_shunt_slots[i].ctx);
        }
    }
}
