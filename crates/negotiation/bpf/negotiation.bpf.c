/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * Negotiates which TCP connections lie between two programs under Shunt, on machines of one
 * service. This is settled in the handshake, by an option of the SYN and of the SYN-ACK whose token
 * proves where it comes from (token.h). Only sockets that were marked before connect or listen
 * (SHUNT_SPEAK) send the option, and only to addresses that a peer's agent has named. Such a socket
 * "speaks". Segments of all other connections stay unchanged. Attached to a cgroup: processes
 * outside it are not affected.
 *
 * The accepting end learns from the SYN, which its listener keeps (TCP_SAVE_SYN), that the
 * connecting end sent the option. Under a SYN flood, a listener that answers with SYN cookies keeps
 * no SYN, so those answers have no option.
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

#define REFUSED       0 /* EPERM */
#define ALLOWED       1
#define VISIBLE_BYTES 4096 /* bytes of an option's value that the kernel shows to programs */

#define TCP_FLAG_SYN_ 0x02
#define TCP_FLAG_ACK_ 0x10

#define SILENT  0
#define MARKED  1 /* sends the option at connect or listen */
#define AGREED  2 /* the other end has sent the option, too */
#define ADOPTED 3 /* as AGREED, and a program keeps account of the connection's frames */

/* Marks of sockets. A listener's children inherit its mark. */
struct {
    __uint(type, BPF_MAP_TYPE_SK_STORAGE);
    __uint(map_flags, BPF_F_NO_PREALLOC | BPF_F_CLONE);
    __type(key, int);
    __type(value, __u32);
} marks SEC(".maps");

/* Account of a connection's frames, left by a program for a program of another user
 * (SHUNT_CARRY). */
struct carried {
    __u8 bytes[SHUNT_CARRIED_BYTES];
};

struct {
    __uint(type, BPF_MAP_TYPE_SK_STORAGE);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __type(key, int);
    __type(value, struct carried);
} carried SEC(".maps");

/* Users whose programs keep account of a connection's frames, and the number of accounts of each. A
 * fifth user's programs never hear that the connection has ended, and keep its state. */
#define KEEPERS_MAX 4
#define ANYBODY     0xffffffffu /* no user has this number */

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

/* Connections whose last descriptor is closed, for each user whose programs have accounts of them.
 * The value is the number of those accounts that have not asked yet. The user is part of the key
 * because cookies can be guessed: a stranger's question would use up an answer, and the account's
 * program would keep its state for good. */
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
 * Answers that SYN-ACKs have given to clients: whether this end speaks. An answer stays valid, even
 * if the key that proved the client is gone or replaced when the connection is made. That may be
 * late: a client may send nothing for long (TCP_DEFER_ACCEPT), or a server may not accept. Only a
 * client with a key gets an entry.
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
 * Places of listeners that speak no more (SHUNT_SPEAK 0), with the number of listeners at each. A
 * SYN-ACK is sent with the flags that its listener has had since listen, and the program cannot see
 * which listener that is.
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

/* For a listener that speaks no more: its place, while it is counted there. */
struct {
    __uint(type, BPF_MAP_TYPE_SK_STORAGE);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __type(key, int);
    __type(value, struct place);
} silenced SEC(".maps");

#define SPEAKER_USER  1
#define SPEAKER_GROUP 2

/* Users and groups whose programs may speak. Any other user could make the service's machines
 * believe its own inventions. */
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

/* Counts one more account that a program of the caller's user keeps of a connection. */
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

/* Whether an account of that user has not heard of the connection's end yet. Counts it as told. */
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

/* Counts one more listener at a place. Returns false where the map is full. */
static __always_inline bool count_at(struct place *place)
{
    __u32 none = 0;

#pragma unroll
    for (int i = 0; i < 3; i++) { /* the last listener counted before may just be leaving */
        bpf_map_update_elem(&silent, place, &none, BPF_NOEXIST);
        __u32 *listeners = bpf_map_lookup_elem(&silent, place);
        if (!listeners)
            return false;
        __sync_fetch_and_add(listeners, 1);
        if (is_silent(place))
            return true;
    }
    return false;
}

/* Counts a listener among those that speak no more. Returns false where a map is full. `mark` is
 * NULL where only another cgroup's program has marked the listener: that program's flags also have
 * this one's option sent. */
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

/* Uncounts a listener that is closed, or listens anew. Returns false where it was not counted. */
static __always_inline bool leaves_place(struct bpf_sock *sk)
{
    struct place *own = bpf_sk_storage_get(&silenced, sk, 0, 0);

    if (!own)
        return false;
    struct place place = *own;
    leaves(&place);
    return true;
}

/* Whether a listener that speaks no more may have sent this SYN-ACK. */
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
    if (!mark || *mark < ADOPTED) /* no program has a state to forget */
        return ALLOWED;
    __u64 cookie = bpf_get_socket_cookie(ctx);
    struct keepers *all = bpf_sk_storage_get(&keepers, ctx, 0, 0);
    if (!all) { /* the socket was adopted before there were keepers */
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

/* SHUNT_CARRY: leaves an account with its connection. */
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

/* Handles SHUNT_ADOPT, SHUNT_CARRY and SHUNT_SPEAKS, on a connection on which both ends have the
 * option. */
static __always_inline bool on_agreed(struct bpf_sockopt *ctx, struct bpf_sock *sk, __u32 *mark)
{
    if (*mark < AGREED)
        return false;
    if (ctx->optname == SHUNT_ADOPT)
        return adopt(ctx, sk, mark);
    return ctx->optname != SHUNT_CARRY || carry(ctx, sk);
}

/* SHUNT_SPEAK on a listener. Any process that has it may stop its option, also where several
 * programs have marked it. */
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
    /* A program of a cgroup below has answered already. Its answer counts: this program knows less
     * of the socket. */
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
     * The socket was not marked here, perhaps because it was marked before this program was
     * attached. A program of a cgroup above or below may know it. If none does, the kernel says
     * that it has no such option.
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

    /* 0: the kernel's answer stays unchanged. On an error, optlen may be the room that the value
     * needs (SO_PEERGROUPS). */
    if (ctx->level != SHUNT_SOL || ctx->optname != SHUNT_CARRY) {
        if (ctx->retval || ctx->optlen > VISIBLE_BYTES)
            ctx->optlen = 0;
        return ALLOWED;
    }
    /* Either a program of a cgroup below has answered already, or one of a cgroup above may know
     * the socket (see odb_setsockopt). */
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
    barrier(); /* the verifier refuses one store to both fields */
    ctx->retval = 0;
    return ALLOWED;
}

/* Reads the token of a segment's option. Returns false where there is none, or one of another
 * form. */
static __always_inline bool load_token(struct bpf_sock_ops *ctx, __u64 where, __u64 *token)
{
    /* The option to look for. Its length counts the ExID alone (bpf-helpers(7),
     * bpf_load_hdr_opt). */
    struct option found = {OPTION_KIND, 6, bpf_htonl(OPTION_EXID), 0};

    if (bpf_load_hdr_opt(ctx, &found, sizeof(found), where) != OPTION_BYTES)
        return false;
    *token = found.token;
    return true;
}

/* Reads the numbers of the received segment, or of the one being made. */
static __always_inline bool load_numbers(struct bpf_sock_ops *ctx, __u32 *seq, __u32 *ack)
{
    struct tcphdr *tcp = ctx->skb_data;

    if ((void *) (tcp + 1) > ctx->skb_data_end)
        return false;
    *seq = bpf_ntohl(tcp->seq);
    *ack = bpf_ntohl(tcp->ack_seq);
    return true;
}

/* Reads the client's initial sequence number, at the server. The rest of the SYN's header does not
 * fit and is not needed, so ENOSPC is no error. */
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

/* Notes an answer to a client. The first one stays: the client goes by the first answer that it
 * gets, and later SYN-ACKs repeat it. */
static __always_inline void note_answer(const struct told *told, __u8 speaks)
{
    bpf_map_update_elem(&answered, told, &speaks, BPF_NOEXIST);
}

/* Whether the client of this connection was told that this end speaks. Where the map has lost that,
 * because of very many clients, answers as a SYN-ACK would now. */
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

/* Whether the segment being made gets the option: only segments of the handshake do. */
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

/* Resets a socket's mark and account. The socket may have had a connection before (connect(2) with
 * AF_UNSPEC). */
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
        /* The socket listens anew, but was told to speak no more, and still has its flags of
         * before. */
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
         * A listener's child inherits the listener's flags and mark. The flags are right also where
         * this program was attached after the listener got them; the mark is right also where
         * another program has cleared the flags.
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
