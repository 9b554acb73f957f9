/* SPDX-License-Identifier: MIT */
/*
 * Whether another backend has the same bytes, for certain. Over TLS it has to: it seals records
 * under the key and the numbers of those that the lost backend may have sent already, and two
 * plaintexts under one nonce give both away. nginx's ETag is a time and a length, which different
 * files can share. So the agent of the backend that sends tells the digest of its file while it can
 * (SHUNT_OPTION_DIGEST), and the agent of the one that is to go on is asked for that of its file
 * before anything is claimed (SHUNT_MSG_PROVE).
 */
#include "ngx_http_shunt.h"

static ngx_http_shunt_loc_conf_t *ngx_http_shunt_proof_conf(ngx_http_shunt_ctx_t *ctx)
{
    return ngx_http_get_module_loc_conf(ctx->request, ngx_http_shunt_module);
}

/* 1: an ETag is not enough */
ngx_uint_t ngx_http_shunt_proof_needed(ngx_http_shunt_ctx_t *ctx)
{
    return ctx->content_bytes || ngx_http_shunt_proof_conf(ctx)->recover == NGX_HTTP_SHUNT_DIGEST;
}

/* Asks the agent of the backend that has offered the rest. NGX_ERROR: it cannot be asked. */
ngx_int_t ngx_http_shunt_prove(ngx_http_shunt_ctx_t *ctx, uint64_t id,
                               const ngx_http_shunt_peer_t *peer,
                               const ngx_http_shunt_payload_t *rest)
{
    struct shunt_prove msg;

    ngx_memzero(&msg, sizeof(msg));
    msg.header.kind = SHUNT_MSG_PROVE;
    msg.header.size = sizeof(msg);
    msg.peer = peer->index;
    msg.epoch = peer->epoch;
    msg.handoff = id;
    msg.offer = rest->number;
    msg.length = rest->length;
    ngx_memcpy(msg.tag, rest->tag, 16);

    return ngx_http_shunt_agent_post(&msg, sizeof(msg));
}

/* Whether a file, from that byte of it on, is the one that the payload is of, from its byte `from`
 * on. */
ngx_uint_t ngx_http_shunt_is_same_file(ngx_http_shunt_ctx_t *ctx, const struct shunt_digest *msg,
                                       uint64_t from)
{
    return ctx->file.known && msg->known && msg->offset == ctx->file.offset + from &&
           ngx_memcmp(msg->sha256, ctx->file.sha256, sizeof(msg->sha256)) == 0;
}

/* The backend that sends seals nothing more until it knows that its digest counts no longer: else
 * another might seal, too, what it has sealed of a file that has changed. */
static void ngx_http_shunt_forget_file(ngx_http_shunt_ctx_t *ctx)
{
    struct shunt_withdrawn msg;

    ctx->file.known = 0;

    ngx_memzero(&msg, sizeof(msg));
    msg.header.kind = SHUNT_MSG_WITHDRAWN;
    msg.header.size = sizeof(msg);
    msg.peer = ctx->peer.index;
    msg.epoch = ctx->peer.epoch;
    msg.handoff = ctx->id;

    (void) ngx_http_shunt_agent_post(&msg, sizeof(msg)); /* where it is lost, we are told again */
}

/* An agent says which file is behind a handoff that is under way, or behind an offer. */
void ngx_http_shunt_digest_told(ngx_http_shunt_ctx_t *ctx, const struct shunt_digest *msg)
{
    if (ctx->mode != SHUNT_MODE_ACTIVE) {
        return;
    }

    if (msg->handoff != ctx->id) {
        ngx_http_shunt_recovery_proof(ctx, msg);
        return;
    }

    if (msg->peer != ctx->peer.index) {
        return;
    }

    if (!msg->known) {
        ngx_http_shunt_forget_file(ctx);
        return;
    }

    /* A backend that goes on for another sends a file that is known to be the same. */
    if (!ctx->file.known) {
        ctx->file.known = msg->known;
        ctx->file.offset = msg->offset;
        ngx_memcpy(ctx->file.sha256, msg->sha256, sizeof(msg->sha256));
    }
}
