/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * Finds out which TCP connections lie between two programs under `shunt run`, on machines of one
 * service. Only these connections may carry references to payloads in place of bytes. Both ends
 * learn it in the handshake, by a TCP option of the SYN and of the SYN-ACK. The option's token
 * proves which machine sent it (token.h). Only sockets that were marked before connect or listen
 * (SHUNT_SPEAK) send the option, and only to this machine and to addresses that a peer's agent has
 * named. Such a socket "speaks". Segments of all other connections stay unchanged. The programs are
 * attached to a cgroup: processes outside it are not affected.
 *
 * The accepting end learns from the SYN, which its listener keeps (TCP_SAVE_SYN), that the
 * connecting end sent the option. Under a SYN flood, a listener that answers with SYN cookies keeps
 * no SYN, so those answers have no option.
 *
 * A connection that may carry references is a sequence of frames: each is a run of bytes, or one
 * reference. A program that uses it keeps an "account" of its frames, and has to hear when the
 * connection ends, to free that account (SHUNT_ENDED).
 */
#include <stdbool.h>

#include <asm-generic/errno-base.h>
#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/tcp.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "../../../include/shunt.h"

#include "token.h"

/* REFUSED and ALLOWED are return values of the programs for socket options. */
#define REFUSED       0 /* EPERM */
#define ALLOWED       1
#define VISIBLE_BYTES 4096 /* most bytes of an option's value that the kernel shows to programs */

#define TCP_FLAG_SYN_ 0x02
#define TCP_FLAG_ACK_ 0x10

/* Values of a socket's mark. */
#define SILENT  0 /* sends no option */
#define MARKED  1 /* sends the option in its handshakes */
#define AGREED  2 /* the other end has sent the option, too */
#define ADOPTED 3 /* as AGREED, and a program keeps an account of the connection */

/* Marks of sockets. Connections that a listener accepts inherit its mark. */
struct {
    __uint(type, BPF_MAP_TYPE_SK_STORAGE);
    __uint(map_flags, BPF_F_NO_PREALLOC | BPF_F_CLONE);
    __type(key, int);
    __type(value, __u32);
} marks SEC(".maps");

/* Account of a connection that a program has left for a program of another user (SHUNT_CARRY). */
struct carried {
    __u8 bytes[SHUNT_CARRIED_BYTES];
};

struct {
    __uint(type, BPF_MAP_TYPE_SK_STORAGE);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __type(key, int);
    __type(value, struct carried);
} carried SEC(".maps");

/* Users whose programs keep accounts of one connection, and the number of accounts of each user.
 * There is room for four users. Programs of a fifth user never hear that the connection has ended,
 * and keep their accounts. */
#define KEEPERS_MAX 4
#define ANYBODY     0xffffffffu /* in place of a user that is not known; no user has this uid */

struct keepers {
    __u32 users[KEEPERS_MAX];
    __u32 accounts[KEEPERS_MAX];
};

struct {
    __uint(type, BPF_MAP_TYPE_SK_STORAGE);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __type(key, int);
    __type(value, struct keepers);
} keepers SEC(".maps");

/* Connections whose last descriptor is closed: one entry for each user whose programs have accounts
 * of the connection. The value is the number of these accounts whose programs have not yet learned
 * of the end (SHUNT_ENDED). The user is part of the key because socket cookies can be guessed:
 * otherwise another user's question would use up an answer, and a program with an account would
 * never free it. */
struct over {
    __u64 cookie;
    __u32 user;
    __u32 zero;
};

struct {
    __uint(type, BPF_MAP_TYPE_LRU_HASH);
    __uint(max_entries, 65536);
    __type(key, struct over);
    __type(value, __u32);
} over SEC(".maps");

/*
 * Answers that SYN-ACKs have given to clients: whether this end speaks. An answer stays valid until
 * the connection is established, even if the key that proved the client's SYN has been removed or
 * replaced by then. This may take long: a client may send nothing (TCP_DEFER_ACCEPT), or a server
 * may not accept. Only a client whose SYN was proven by a key gets an entry.
 */
struct told {
    struct end_address client;
    __u32 client_port;
    __u32 server_port;
    __u32 client_isn;
};

struct {
    __uint(type, BPF_MAP_TYPE_LRU_HASH);
    __uint(max_entries, 65536);
    __type(key, struct told);
    __type(value, __u8);
} answered SEC(".maps");

/*
 * Places (address and port) of listeners that were told to speak no more (SHUNT_SPEAK 0), with the
 * number of such listeners at each place. Such a listener's SYN-ACKs still reach this program,
 * because the listener keeps the flags that it got at listen. The program cannot see which listener
 * a SYN-ACK belongs to. So it looks here for a listener at the SYN-ACK's source address and port.
 */
struct place {
    struct end_address address; /* zeros: all addresses */
    __u32 port;
};

struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __uint(max_entries, 65536);
    __type(key, struct place);
    __type(value, __u32);
} silent SEC(".maps");

/* For a listener that speaks no more: the place where `silent` counts it. */
struct {
    __uint(type, BPF_MAP_TYPE_SK_STORAGE);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __type(key, int);
    __type(value, struct place);
} silenced SEC(".maps");

#define SPEAKER_USER  1
#define SPEAKER_GROUP 2

/* Users and groups whose programs may speak. Programs on other machines believe a program that
 * speaks, so no other users' programs may. */
struct speaker {
    __u32 kind;
    __u32 id;
};

struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __uint(max_entries, 16384);
    __type(key, struct speaker);
    __type(value, __u8);
} speakers SEC(".maps");

static __always_inline bool may_speak(void)
{
    __u64 caller = bpf_get_current_uid_gid();
    struct speaker user = {SPEAKER_USER, (__u32) caller};
    struct speaker group = {SPEAKER_GROUP, caller >> 32};

    return bpf_map_lookup_elem(&speakers, &user) || bpf_map_lookup_elem(&speakers, &group);
}

static __always_inline __u32 *mark_of(struct bpf_sock *sk, bool create)
{
    return bpf_sk_storage_get(&marks, sk, 0, create ? BPF_SK_STORAGE_GET_F_CREATE : 0);
}

static __always_inline __u32 caller(void)
{
    return (__u32) bpf_get_current_uid_gid();
}

/* Counts one more account of a connection, which a program of the calling user keeps. */
static __always_inline void keeps(struct bpf_sock *sk)
{
    struct keepers *all = bpf_sk_storage_get(&keepers, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
    __u32 user = caller();

    if (!all)
        return;
#pragma unroll
    for (int i = 0; i < KEEPERS_MAX; i++) {
        if (all->accounts[i] && all->users[i] != user)
            continue;
        all->users[i] = user;
        all->accounts[i] += 1;
        return;
    }
}

/* Returns whether the connection has ended and some program of this user that has an account of it
 * has not yet been told. If so, counts one of these accounts as told. */
static __always_inline bool hears(__u64 cookie, __u32 user)
{
    struct over key = {cookie, user, 0};
    __u32 *accounts = bpf_map_lookup_elem(&over, &key);

    if (accounts && *accounts > 1) {
        *accounts -= 1;
        return true;
    }
    return !bpf_map_delete_elem(&over, &key);
}

/* SHUNT_ENDED: tells a program whether it may forget its state of a connection. */
static __always_inline int has_ended(struct bpf_sockopt *ctx)
{
    __u64 *value = ctx->optval;
    if ((void *) (value + 1) > ctx->optval_end)
        return REFUSED;
    __u64 cookie = *value;
    if (!hears(cookie, caller()) && !hears(cookie, ANYBODY))
        return REFUSED;
    ctx->optlen = -1;
    return ALLOWED;
}

static __always_inline void tell_of_end(__u64 cookie, __u32 user, __u32 accounts)
{
    struct over key = {cookie, user, 0};

    bpf_map_update_elem(&over, &key, &accounts, BPF_ANY);
}

/* Whether an address is 0.0.0.0, in its mapped form. */
static __always_inline bool is_any_ipv4(const struct end_address *address)
{
    return !address->words[0] && !address->words[1] && address->words[2] == bpf_htonl(0xffff) &&
           !address->words[3];
}

static __always_inline void load_place(struct bpf_sock *sk, struct place *place)
{
    place->port = sk->src_port;
    if (sk->family != AF_INET) {
        for (int i = 0; i < 4; i++)
            place->address.words[i] = sk->src_ip6[i];
        if (is_any_ipv4(&place->address))
            place->address = (struct end_address){};
    } else if (sk->src_ip4) {
        put_ipv4(&place->address, sk->src_ip4);
    }
}

static __always_inline bool is_silent(struct place *place)
{
    __u32 *listeners = bpf_map_lookup_elem(&silent, place);

    return listeners && *listeners;
}

static __always_inline void leaves(struct place *place)
{
    __u32 *listeners = bpf_map_lookup_elem(&silent, place);

    if (listeners && __sync_fetch_and_add(listeners, -1) == 1)
        bpf_map_delete_elem(&silent, place);
}

/* Counts one more listener at a place. Returns false where the map is full, or after eight tries.
 *
 * An entry that counts 0 is about to be deleted on another processor (leaves), so it must not count
 * a listener any more. This is tried again, because that entry is soon gone. */
static __always_inline bool count_at(struct place *place)
{
    __u32 one = 1;

#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (!bpf_map_update_elem(&silent, place, &one, BPF_NOEXIST))
            return true;
        __u32 *listeners = bpf_map_lookup_elem(&silent, place);
        if (!listeners)
            continue;
        __u32 before = *listeners;
        if (before && __sync_val_compare_and_swap(listeners, before, before + 1) == before)
            return true;
    }
    return false;
}

/* Counts a listener among those that speak no more. Returns false where it cannot be counted.
 * `mark` is NULL where this program has not marked the listener. The listener is counted in that
 * case, too: the same program of another cgroup may have marked it. A socket's flags are common to
 * all programs, so the flags that the other program has set make this program write its option,
 * too. */
static __always_inline bool silence(struct bpf_sock *sk, __u32 *mark)
{
    struct place place = {};

    load_place(sk, &place);
    if (mark ? __sync_val_compare_and_swap(mark, MARKED, SILENT) != MARKED
             : bpf_sk_storage_get(&silenced, sk, 0, 0) != 0)
        return true;
    if (count_at(&place)) {
        if (bpf_sk_storage_get(&silenced, sk, &place, BPF_SK_STORAGE_GET_F_CREATE))
            return true;
        leaves(&place);
    }
    if (mark)
        *mark = MARKED;
    return false;
}

/* Takes a listener that is closed, or listens once more, out of the count of its place. Returns
 * false where it was not counted. */
static __always_inline bool leaves_place(struct bpf_sock *sk)
{
    struct place *own = bpf_sk_storage_get(&silenced, sk, 0, 0);

    if (!own)
        return false;
    struct place place = *own;
    leaves(&place);
    return true;
}

/* Whether this SYN-ACK comes from the place of a listener that speaks no more. Then it may be that
 * listener's SYN-ACK. */
static __always_inline bool says_no_more(struct bpf_sock_ops *ctx)
{
    struct place place = {};

    place.port = ctx->local_port;
    if (is_silent(&place))
        return true;
    load_local(ctx, &place.address);
    return is_silent(&place);
}

SEC("cgroup/sock_release")
int odb_release(struct bpf_sock *ctx)
{
    leaves_place(ctx);
    __u32 *mark = bpf_sk_storage_get(&marks, ctx, 0, 0);
    if (!mark || *mark < ADOPTED) /* no program has an account of the connection */
        return ALLOWED;
    __u64 cookie = bpf_get_socket_cookie(ctx);
    struct keepers *all = bpf_sk_storage_get(&keepers, ctx, 0, 0);
    if (!all) { /* a program adopted the connection under an older version, which counted none */
        tell_of_end(cookie, ANYBODY, 1);
        return ALLOWED;
    }
#pragma unroll
    for (int i = 0; i < KEEPERS_MAX; i++) {
        if (all->accounts[i])
            tell_of_end(cookie, all->users[i], all->accounts[i]);
    }
    return ALLOWED;
}

/* SHUNT_CARRY: stores a program's account with its connection. */
static __always_inline bool carry(struct bpf_sockopt *ctx, struct bpf_sock *sk)
{
    struct carried *from = ctx->optval;
    if ((void *) (from + 1) > ctx->optval_end || ctx->optlen != sizeof(*from))
        return false;
    struct carried *to = bpf_sk_storage_get(&carried, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
    if (!to)
        return false;
    __builtin_memcpy(to, from, sizeof(*to));
    return true;
}

static __always_inline bool is_ours(struct bpf_sockopt *ctx)
{
    return ctx->level == SHUNT_SOL &&
           (ctx->optname == SHUNT_SPEAK || ctx->optname == SHUNT_SPEAKS ||
            ctx->optname == SHUNT_ADOPT || ctx->optname == SHUNT_CARRY);
}

static __always_inline bool adopt(struct bpf_sockopt *ctx, struct bpf_sock *sk, __u32 *mark)
{
    __u32 *how = ctx->optval;
    if ((void *) (how + 1) > ctx->optval_end)
        return false;
    bool is_kept =
        __sync_val_compare_and_swap(mark, AGREED, ADOPTED) == AGREED || *how == SHUNT_ADOPT_TOO;
    if (is_kept)
        keeps(sk);
    return is_kept;
}

/* Handles SHUNT_ADOPT, SHUNT_CARRY and SHUNT_SPEAKS. All three succeed only on a connection whose
 * two ends have sent the option. */
static __always_inline bool on_agreed(struct bpf_sockopt *ctx, struct bpf_sock *sk, __u32 *mark)
{
    if (*mark < AGREED)
        return false;
    if (ctx->optname == SHUNT_ADOPT)
        return adopt(ctx, sk, mark);
    return ctx->optname != SHUNT_CARRY || carry(ctx, sk);
}

/* SHUNT_SPEAK on a listener. Any process that has the listener may stop it from sending the option,
 * even if these programs have marked it for several cgroups. */
static __always_inline int on_listener(struct bpf_sockopt *ctx, struct bpf_sock *sk, __u32 *mark)
{
    __u32 *speaks = ctx->optval;

    if ((void *) (speaks + 1) > ctx->optval_end)
        return REFUSED;
    if (!*speaks && !silence(sk, mark))
        return REFUSED;
    if (mark)
        ctx->optlen = -1;
    return ALLOWED;
}

SEC("cgroup/setsockopt")
int odb_setsockopt(struct bpf_sockopt *ctx)
{
    if (ctx->level == SHUNT_SOL && ctx->optname == SHUNT_ENDED)
        return has_ended(ctx);
    if (!is_ours(ctx)) {
        if (ctx->optlen > VISIBLE_BYTES)
            ctx->optlen = 0;
        return ALLOWED;
    }
    /* -1: the same program, attached to a cgroup below, has already handled this call. That answer
     * counts, because the program there knows more of the socket. */
    bool is_answered = ctx->optlen == -1;
    struct bpf_sock *sk = ctx->sk;
    if (!sk)
        return is_answered ? ALLOWED : REFUSED;
    if (is_answered && (ctx->optname != SHUNT_SPEAK || sk->state != BPF_TCP_LISTEN))
        return ALLOWED;
    if (sk->protocol != IPPROTO_TCP)
        return REFUSED;
    __u32 *mark = mark_of(sk, false);
    if (ctx->optname == SHUNT_SPEAK && sk->state == BPF_TCP_LISTEN)
        return on_listener(ctx, sk, mark);
    if (ctx->optname == SHUNT_SPEAK) {
        if (!may_speak())
            return REFUSED;
        mark = mark_of(sk, true);
    }
    /*
     * This program has not marked the socket, perhaps because it was not attached yet when the mark
     * was set. The same program at a cgroup above or below may know the socket. If none does, the
     * kernel says that it has no such option.
     */
    if (!mark)
        return ctx->optname == SHUNT_SPEAK ? REFUSED : ALLOWED;
    if (ctx->optname == SHUNT_SPEAK) {
        __u32 *speaks = ctx->optval;
        if ((void *) (speaks + 1) > ctx->optval_end)
            return REFUSED;
        if (sk->state == BPF_TCP_CLOSE)
            *mark = *speaks ? MARKED : SILENT;
    } else if (!on_agreed(ctx, sk, mark)) {
        return REFUSED;
    }
    ctx->optlen = -1; /* handled: the kernel skips its own setsockopt */
    return ALLOWED;
}

/* SHUNT_CARRY: gives the account that was left with a connection to the first program that asks. */
SEC("cgroup/getsockopt")
int odb_getsockopt(struct bpf_sockopt *ctx)
{
    struct bpf_sock *sk = ctx->sk;

    /* With optlen 0, the kernel's answer stays unchanged. This program must set it to 0 where the
     * value is longer than the program can see. It must do so on an error, too, because optlen may
     * then be the length that the value would need (SO_PEERGROUPS). */
    if (ctx->level != SHUNT_SOL || ctx->optname != SHUNT_CARRY) {
        if (ctx->retval || ctx->optlen > VISIBLE_BYTES)
            ctx->optlen = 0;
        return ALLOWED;
    }
    /* retval 0: the same program at a cgroup below has already answered. In the other two cases,
     * the same program at a cgroup above may know the socket. */
    if (ctx->retval == 0 || !sk || !mark_of(sk, false))
        return ALLOWED;
    struct carried *to = ctx->optval;
    struct carried *from = bpf_sk_storage_get(&carried, sk, 0, 0);
    if ((void *) (to + 1) > ctx->optval_end || !from)
        return REFUSED;
    __builtin_memcpy(to, from, sizeof(*to));
    if (bpf_sk_storage_delete(&carried, sk))
        return REFUSED;
    keeps(sk);
    ctx->optlen = sizeof(*to);
    barrier(); /* so that the compiler makes two stores: the verifier refuses one for both fields */
    ctx->retval = 0;
    return ALLOWED;
}

/* Reads the token of a segment's option. Returns false where the segment has no such option, or one
 * of another length. `where` is 0 for the received segment, or BPF_LOAD_HDR_OPT_TCP_SYN for the
 * SYN that the listener has kept. */
static __always_inline bool load_token(struct bpf_sock_ops *ctx, __u64 where, __u64 *token)
{
    /* The option to look for. Its length, 6, is that of an option with the ExID alone
     * (bpf-helpers(7), bpf_load_hdr_opt). */
    struct option found = {OPTION_KIND, 6, bpf_htonl(OPTION_EXID), 0};

    if (bpf_load_hdr_opt(ctx, &found, sizeof(found), where) != OPTION_BYTES)
        return false;
    *token = found.token;
    return true;
}

/* Reads sequence and acknowledgment number of the segment for which this program was called: a
 * received segment, or one about to be sent. */
static __always_inline bool load_numbers(struct bpf_sock_ops *ctx, __u32 *seq, __u32 *ack)
{
    struct tcphdr *tcp = ctx->skb_data;

    if ((void *) (tcp + 1) > ctx->skb_data_end)
        return false;
    *seq = bpf_ntohl(tcp->seq);
    *ack = bpf_ntohl(tcp->ack_seq);
    return true;
}

/* At the server, reads the client's initial sequence number from the kept SYN. The SYN's options do
 * not fit into `syn` and are not needed, so ENOSPC is no error. */
static __always_inline bool load_client_isn(struct bpf_sock_ops *ctx, __u32 *isn)
{
    struct tcphdr syn = {};
    int got = bpf_getsockopt(ctx, IPPROTO_TCP, TCP_BPF_SYN, &syn, sizeof(syn));

    *isn = bpf_ntohl(syn.seq);
    return syn.syn && (got > 0 || got == -ENOSPC);
}

/* Whether this connection's SYN comes from a machine of the service. */
static __always_inline bool is_syn_proven(struct bpf_sock_ops *ctx, __u32 *client_isn)
{
    __u64 said, token;

    return load_token(ctx, BPF_LOAD_HDR_OPT_TCP_SYN, &said) && load_client_isn(ctx, client_isn) &&
           make_token(ctx, false, *client_isn, 0, TOKEN_SYN, &token) && said == token;
}

static __always_inline void load_told(struct bpf_sock_ops *ctx, __u32 client_isn, struct told *told)
{
    load_remote(ctx, &told->client);
    told->client_port = bpf_ntohl(ctx->remote_port);
    told->server_port = ctx->local_port;
    told->client_isn = client_isn;
}

/* Notes whether a SYN-ACK to this client says that this end speaks. The first answer stays: the
 * client acts on the first SYN-ACK that it gets, and retransmitted SYN-ACKs repeat the answer. */
static __always_inline void note_answer(const struct told *told, __u8 speaks)
{
    bpf_map_update_elem(&answered, told, &speaks, BPF_NOEXIST);
}

/* Whether a SYN-ACK has told the client of this connection that this end speaks. If very many
 * clients have displaced the entry, decides as for a SYN-ACK that would be sent now. */
static __always_inline bool was_told(struct bpf_sock_ops *ctx)
{
    struct told told = {};
    __u32 client_isn;

    if (!load_client_isn(ctx, &client_isn))
        return false;
    load_told(ctx, client_isn, &told);
    __u8 *speaks = bpf_map_lookup_elem(&answered, &told);
    if (!speaks)
        return !says_no_more(ctx) && is_syn_proven(ctx, &client_isn);
    bool was = *speaks;
    bpf_map_delete_elem(&answered, &told);
    return was;
}

/* Whether the received SYN-ACK comes from a machine of the service. */
static __always_inline bool is_syn_ack_proven(struct bpf_sock_ops *ctx)
{
    __u64 said, token;
    __u32 seq, ack;

    return load_token(ctx, 0, &said) && load_numbers(ctx, &seq, &ack) &&
           make_token(ctx, true, ack - 1, seq, TOKEN_SYN_ACK, &token) && said == token;
}

/* Whether the segment about to be sent gets the option. Only SYN and SYN-ACK do. */
static __always_inline bool takes_option(struct bpf_sock_ops *ctx)
{
    __u32 flags = ctx->skb_tcp_flags;
    struct told told = {};
    __u32 client_isn;

    if (!(flags & TCP_FLAG_SYN_))
        return false;
    if (!(flags & TCP_FLAG_ACK_))
        return key_towards(ctx);
    if (ctx->args[0] == BPF_WRITE_HDR_TCP_SYNACK_COOKIE || !is_syn_proven(ctx, &client_isn))
        return false;
    load_told(ctx, client_isn, &told);
    __u8 *said = bpf_map_lookup_elem(&answered, &told);
    if (said)
        return *said;
    if (!says_no_more(ctx))
        return true;
    note_answer(&told, 0);
    return false;
}

static __always_inline void put_option(struct bpf_sock_ops *ctx)
{
    struct option option = {OPTION_KIND, OPTION_BYTES, bpf_htonl(OPTION_EXID), 0};
    bool is_answer = ctx->skb_tcp_flags & TCP_FLAG_ACK_;
    struct told told = {};
    __u32 seq, ack;
    __u64 token;

    if (!load_numbers(ctx, &seq, &ack))
        return;
    bool made = is_answer ? make_token(ctx, false, ack - 1, seq, TOKEN_SYN_ACK, &token)
                          : make_token(ctx, true, seq, 0, TOKEN_SYN, &token);
    if (!made)
        return;
    option.token = token;
    if (is_answer) {
        load_told(ctx, ack - 1, &told);
        note_answer(&told, 1);
    }
    bpf_store_hdr_opt(ctx, &option, sizeof(option), 0);
}

static __always_inline void write_options(struct bpf_sock_ops *ctx, bool wanted)
{
    __u32 flags = ctx->bpf_sock_ops_cb_flags & ~BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG;
    bpf_sock_ops_cb_flags_set(ctx, wanted ? flags | BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG : flags);
}

static __always_inline bool has_mark(struct bpf_sock_ops *ctx, __u32 which)
{
    struct bpf_sock *sk = ctx->sk;
    if (!sk)
        return false;
    __u32 *mark = mark_of(sk, false);
    return mark && *mark == which;
}

static __always_inline bool is_marked(struct bpf_sock_ops *ctx)
{
    return has_mark(ctx, MARKED);
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

/* Before connect or listen, forgets what an earlier use of the socket has left: its account, its
 * place as a listener, and every mark except MARKED, which is for the connections to come. A socket
 * can be used again after connect(2) with AF_UNSPEC has ended its connection. */
static __always_inline void forget_connection(struct bpf_sock_ops *ctx)
{
    struct bpf_sock *sk = ctx->sk;
    if (!sk)
        return;
    if (leaves_place(sk))
        bpf_sk_storage_delete(&silenced, sk);
    __u32 *mark = mark_of(sk, false);
    if (!mark || *mark == MARKED)
        return;
    *mark = 0;
    bpf_sk_storage_delete(&carried, sk);
}

SEC("sockops")
int odb_handshake(struct bpf_sock_ops *ctx)
{
    int one = 1;

    switch (ctx->op) {
    case BPF_SOCK_OPS_TCP_CONNECT_CB:
        forget_connection(ctx);
        if (is_marked(ctx) && key_towards(ctx))
            write_options(ctx, true);
        break;
    case BPF_SOCK_OPS_TCP_LISTEN_CB:
        forget_connection(ctx);
        /* SILENT: the socket was told to speak no more. It still has the flags that it got at an
         * earlier listen. */
        if (has_mark(ctx, SILENT))
            write_options(ctx, false);
        if (is_marked(ctx) && !bpf_setsockopt(ctx, IPPROTO_TCP, TCP_SAVE_SYN, &one, sizeof(one)))
            write_options(ctx, true);
        break;
    case BPF_SOCK_OPS_HDR_OPT_LEN_CB:
        if (takes_option(ctx))
            bpf_reserve_hdr_opt(ctx, OPTION_BYTES, 0);
        break;
    case BPF_SOCK_OPS_WRITE_HDR_OPT_CB:
        if (ctx->skb_tcp_flags & TCP_FLAG_SYN_)
            put_option(ctx);
        break;
    case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
        if (is_marked(ctx)) {
            write_options(ctx, false);
            if (is_syn_ack_proven(ctx))
                agree(ctx);
        }
        break;
    case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
        /*
         * An accepted connection inherits the listener's flags and mark. Either is enough to look
         * further. If this program was attached after the listener began to listen, only the flags
         * are there. If the same program of another cgroup has cleared the flags, only the mark is.
         */
        if ((ctx->bpf_sock_ops_cb_flags & BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG) || is_marked(ctx)) {
            write_options(ctx, false);
            if (was_told(ctx))
                agree(ctx);
        }
        break;
    }
    return 1;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
