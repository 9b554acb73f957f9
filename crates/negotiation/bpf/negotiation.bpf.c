/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * Which TCP connections lie between two programs under Shunt: settled in the handshake, by an
 * option of the SYN and of the SYN-ACK (RFC 6994, shared experimental kind). Only sockets that were
 * marked before connect or listen (SHUNT_SPEAK) have it; every other connection's segments stay as
 * they are. Attached to a cgroup: no program outside it is ever looked at.
 *
 * The accepting end learns that the connecting one has it from the SYN, which its listener keeps
 * (TCP_SAVE_SYN). An answer to a SYN flood (cookies) keeps nothing, so it has no option.
 */
#include <stdbool.h>

#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/tcp.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "../../../include/shunt.h"

#define REFUSED       0 /* EPERM */
#define ALLOWED       1
#define VISIBLE_BYTES 4096 /* of an option's value; a longer one must be passed on by optlen 0 */

#define OPTION_KIND   254
#define OPTION_BYTES  6
#define OPTION_EXID   0x53684f42u /* RFC 6994: "ShOB", 32 bits */
#define TCP_FLAG_SYN_ 0x02
#define TCP_FLAG_ACK_ 0x10

struct option {
    __u8 kind;
    __u8 length;
    __be32 exid;
} __attribute__((packed));

_Static_assert(sizeof(struct option) == OPTION_BYTES, "what the wire has");

#define MARKED 1 /* connect or listen with the option */
#define AGREED 2 /* the other end has it too */

/* A listener's children have its mark. */
struct {
    __uint(type, BPF_MAP_TYPE_SK_STORAGE);
    __uint(map_flags, BPF_F_NO_PREALLOC | BPF_F_CLONE);
    __type(key, int);
    __type(value, __u32);
} marks SEC(".maps");

/* Cookies of agreed connections whose last descriptor is closed, until somebody asks. */
struct {
    __uint(type, BPF_MAP_TYPE_LRU_HASH);
    __uint(max_entries, 65536);
    __type(key, __u64);
    __type(value, __u8);
} ended SEC(".maps");

static __always_inline __u32 *mark_of(struct bpf_sock *sk, bool create)
{
    return bpf_sk_storage_get(&marks, sk, 0, create ? BPF_SK_STORAGE_GET_F_CREATE : 0);
}

/* The program that has a state for the connection may forget it. */
static __always_inline int has_ended(struct bpf_sockopt *ctx)
{
    __u64 *value = ctx->optval;
    if ((void *) (value + 1) > ctx->optval_end)
        return REFUSED;
    __u64 cookie = *value;
    if (bpf_map_delete_elem(&ended, &cookie))
        return REFUSED;
    ctx->optlen = -1;
    return ALLOWED;
}

SEC("cgroup/sock_release")
int odb_release(struct bpf_sock *ctx)
{
    __u8 one = 1;
    __u32 *mark = bpf_sk_storage_get(&marks, ctx, 0, 0);
    if (mark && *mark == AGREED) {
        __u64 cookie = bpf_get_socket_cookie(ctx);
        bpf_map_update_elem(&ended, &cookie, &one, BPF_ANY);
    }
    return ALLOWED;
}

SEC("cgroup/setsockopt")
int odb_setsockopt(struct bpf_sockopt *ctx)
{
    if (ctx->level == SHUNT_SOL && ctx->optname == SHUNT_ENDED)
        return has_ended(ctx);
    if (ctx->level != SHUNT_SOL || (ctx->optname != SHUNT_SPEAK && ctx->optname != SHUNT_SPEAKS)) {
        if (ctx->optlen > VISIBLE_BYTES)
            ctx->optlen = 0;
        return ALLOWED;
    }
    /* The program of a group below, whose word counts: one of this group knows less of the socket.
     */
    if (ctx->optlen == -1)
        return ALLOWED;
    struct bpf_sock *sk = ctx->sk;
    if (!sk)
        return REFUSED;
    if (sk->protocol != IPPROTO_TCP)
        return REFUSED;
    __u32 *mark = mark_of(sk, ctx->optname == SHUNT_SPEAK);
    /*
     * Of a socket that was marked before this program was attached another one may know, of a
     * control group above or below. If none does, the kernel has no such option.
     */
    if (!mark)
        return ctx->optname == SHUNT_SPEAK ? REFUSED : ALLOWED;
    if (ctx->optname == SHUNT_SPEAK) {
        if (sk->state == BPF_TCP_CLOSE)
            *mark = MARKED;
    } else if (*mark != AGREED) {
        return REFUSED;
    }
    ctx->optlen = -1; /* all done: the kernel need not look */
    return ALLOWED;
}

static __always_inline bool has_option(struct bpf_sock_ops *ctx, __u64 where)
{
    struct option found = {OPTION_KIND, OPTION_BYTES, bpf_htonl(OPTION_EXID)};
    return bpf_load_hdr_opt(ctx, &found, sizeof(found), where) == OPTION_BYTES;
}

/* Whether the segment that is being made is one of the handshake that has the option. */
static __always_inline bool takes_option(struct bpf_sock_ops *ctx)
{
    __u32 flags = ctx->skb_tcp_flags;
    if (!(flags & TCP_FLAG_SYN_))
        return false;
    if (!(flags & TCP_FLAG_ACK_))
        return true;
    return ctx->args[0] != BPF_WRITE_HDR_TCP_SYNACK_COOKIE &&
           has_option(ctx, BPF_LOAD_HDR_OPT_TCP_SYN);
}

static __always_inline void write_options(struct bpf_sock_ops *ctx, bool wanted)
{
    __u32 flags = ctx->bpf_sock_ops_cb_flags & ~BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG;
    bpf_sock_ops_cb_flags_set(ctx, wanted ? flags | BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG : flags);
}

static __always_inline bool is_marked(struct bpf_sock_ops *ctx)
{
    struct bpf_sock *sk = ctx->sk;
    if (!sk)
        return false;
    __u32 *mark = mark_of(sk, false);
    return mark && *mark == MARKED;
}

static __always_inline void agree(struct bpf_sock_ops *ctx)
{
    struct bpf_sock *sk = ctx->sk;
    if (!sk)
        return;
    __u32 *mark = mark_of(sk, true);
    if (mark)
        *mark = AGREED;
}

SEC("sockops")
int odb_handshake(struct bpf_sock_ops *ctx)
{
    struct option option = {OPTION_KIND, OPTION_BYTES, bpf_htonl(OPTION_EXID)};
    int one = 1;

    switch (ctx->op) {
    case BPF_SOCK_OPS_TCP_CONNECT_CB:
        if (is_marked(ctx))
            write_options(ctx, true);
        break;
    case BPF_SOCK_OPS_TCP_LISTEN_CB:
        if (is_marked(ctx) && !bpf_setsockopt(ctx, IPPROTO_TCP, TCP_SAVE_SYN, &one, sizeof(one)))
            write_options(ctx, true);
        break;
    case BPF_SOCK_OPS_HDR_OPT_LEN_CB:
        if (takes_option(ctx))
            bpf_reserve_hdr_opt(ctx, OPTION_BYTES, 0);
        break;
    case BPF_SOCK_OPS_WRITE_HDR_OPT_CB:
        if (takes_option(ctx))
            bpf_store_hdr_opt(ctx, &option, sizeof(option), 0);
        break;
    case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
        if (is_marked(ctx)) {
            write_options(ctx, false);
            if (has_option(ctx, 0))
                agree(ctx);
        }
        break;
    case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
        /*
         * A listener's child has its flags, which tell also where this program was attached later
         * than that, and its mark, which tells also where another one has cleared the flags.
         */
        if ((ctx->bpf_sock_ops_cb_flags & BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG) || is_marked(ctx)) {
            write_options(ctx, false);
            if (has_option(ctx, BPF_LOAD_HDR_OPT_TCP_SYN))
                agree(ctx);
        }
        break;
    }
    return 1;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
