/* SPDX-License-Identifier: MIT */
/*
 * Proofs that another backend has the same bytes as the lost one, and may continue its payload.
 * Over TLS this must be certain. A new backend seals records under the key and the numbers that the
 * lost backend may have used already, and two plaintexts sealed under one nonce can both be read.
 * nginx's ETag is a time and a length, which different files can share. So the sending backend's
 * agent tells its file's digest (SHA-256) while it can (SHUNT_OPTION_DIGEST). The agent of the new
 * backend is asked for the digest of its own file before the offer is claimed (SHUNT_MSG_PROVE). An
 * offer is a body that a backend holds ready, and that its response's header names.
 */
#include "ngx_http_shunt.h"

static ngx_http_shunt_loc_conf_t *ngx_http_shunt_proof_conf(ngx_http_shunt_ctx_t *ctx)
{
    return ngx_http_get_module_loc_conf(ctx->request, ngx_http_shunt_module);
}

/* Returns 1 if a strong ETag is not enough: on TLS, or with "shunt_recover digest". */
ngx_uint_t ngx_http_shunt_proof_needed(ngx_http_shunt_ctx_t *ctx)
{
    return ctx->content_bytes || ngx_http_shunt_proof_conf(ctx)->recover == NGX_HTTP_SHUNT_DIGEST;
}

/* Asks for the digest of the file behind an offer of the rest. The agent of the backend that made
 * this offer answers. `id`: number of the question. NGX_ERROR: the question cannot be sent. */
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

/* Whether the offered rest is of the payload's file, and at the right place: `msg` describes the
 * offer's file, and the rest begins with the payload's byte `from`. */
ngx_uint_t ngx_http_shunt_is_same_file(ngx_http_shunt_ctx_t *ctx, const struct shunt_digest *msg,
                                       uint64_t from)
{
    return ctx->file.known && msg->known && msg->offset == ctx->file.offset + from &&
           ngx_memcmp(msg->sha256, ctx->file.sha256, sizeof(msg->sha256)) == 0;
}

/* Forgets the digest of a file that has changed, and tells this to the agents. The sending backend
 * seals nothing more until it hears that the digest is forgotten. Otherwise a new backend could
 * seal bytes of the unchanged file under record numbers that the sending one has used for the
 * changed file. */
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

    (void) ngx_http_shunt_agent_post(&msg, sizeof(msg)); /* if lost, the agent repeats DIGEST */
}

/* Handles the digest of the file behind a handoff in progress, or behind an offer. */
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

    /* Keeps a digest that is known already. A backend that continues another one's payload has
     * proved that its file has this digest. */
    if (!ctx->file.known) {
        ctx->file.known = msg->known;
        ctx->file.offset = msg->offset;
        ngx_memcpy(ctx->file.sha256, msg->sha256, sizeof(msg->sha256));
    }
}
