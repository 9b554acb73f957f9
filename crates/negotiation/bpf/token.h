/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * Token that proves that a SYN or a SYN-ACK comes from a machine of the service. It is computed by
 * SipHash-2-4 (Aumasson and Bernstein 2012) with the key of the session between the two machines'
 * agents. The input is both ends' addresses and ports and the initial sequence numbers (RFC 9293,
 * 3.4). The token stands in a TCP option:
 *
 *   kind 254   length 14   ExID "ShOB" (RFC 6994)   token, 8 bytes
 *
 *   input for a SYN       addresses, ports, the client's initial sequence number
 *   input for a SYN-ACK   the same, and the server's initial sequence number
 *
 * A stranger has to guess one of 2^64 values, and a token that is sent once more is valid only for
 * the connection that it was made for. Something on the path may change an address, a port or a
 * sequence number: NAT, a balancer that ends connections, a firewall that chooses other sequence
 * numbers. Then the token is wrong, and both ends send bodies as bytes, not as references.
 */
#ifndef TOKEN_H
#define TOKEN_H

#include <stdbool.h>

#include <linux/bpf.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

/* As in <sys/socket.h>, which BPF code cannot include. */
#define AF_INET 2

#define OPTION_KIND  254
#define OPTION_BYTES 14
#define OPTION_EXID  0x53684f42u /* RFC 6994: "ShOB", 32 bits */

/* The option as it stands in the TCP header. */
struct option {
    __u8 kind;
    __u8 length;
    __be32 exid;
    __u64 token; /* little-endian */
} __attribute__((packed));

_Static_assert(sizeof(struct option) == OPTION_BYTES, "what the wire has");

/* An address. IPv4 is mapped (RFC 4291, 2.5.5.2). */
struct end_address {
    __be32 words[4];
};

/* A SipHash key. */
struct end_key {
    __u64 words[2];
};

/* Keys of the service's machines, by address. An address that a peer's agent has named has the key
 * of the session with that agent. This machine's own addresses, and ::1, have a key that never
 * leaves this machine. */
struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __uint(max_entries, 16384);
    __type(key, struct end_address);
    __type(value, struct end_key);
} ends SEC(".maps");

/* Input of a token: 48 bytes, in the machine's byte order except for the addresses. */
struct connection {
    __u16 what; /* TOKEN_SYN or TOKEN_SYN_ACK */
    __u16 client_port;
    __u16 server_port;
    __u16 zero;
    struct end_address client;
    struct end_address server;
    __u32 client_isn;
    __u32 server_isn; /* 0 for a SYN */
};

#define TOKEN_SYN     1
#define TOKEN_SYN_ACK 2
#define TOKEN_WORDS   6

_Static_assert(sizeof(struct connection) == TOKEN_WORDS * sizeof(__u64), "no gaps");

static __always_inline __u64 rotate(__u64 word, int bits)
{
    return word << bits | word >> (64 - bits);
}

static __always_inline void siphash_round(__u64 v[4])
{
    v[0] += v[1];
    v[1] = rotate(v[1], 13) ^ v[0];
    v[0] = rotate(v[0], 32);
    v[2] += v[3];
    v[3] = rotate(v[3], 16) ^ v[2];
    v[0] += v[3];
    v[3] = rotate(v[3], 21) ^ v[0];
    v[2] += v[1];
    v[1] = rotate(v[1], 17) ^ v[2];
    v[2] = rotate(v[2], 32);
}

static __always_inline void siphash_word(__u64 v[4], __u64 word)
{
    v[3] ^= word;
    siphash_round(v);
    siphash_round(v);
    v[0] ^= word;
}

static __noinline __u64 token_of(const struct connection *connection, const struct end_key *key)
{
    const __u64 *words = (const void *) connection;
    __u64 v[4] = {
        0x736f6d6570736575ULL ^ key->words[0],
        0x646f72616e646f6dULL ^ key->words[1],
        0x6c7967656e657261ULL ^ key->words[0],
        0x7465646279746573ULL ^ key->words[1],
    };

    for (int i = 0; i < TOKEN_WORDS; i++)
        siphash_word(v, words[i]);
    siphash_word(v, sizeof(*connection) << 56);
    v[2] ^= 0xff;
    for (int i = 0; i < 4; i++)
        siphash_round(v);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}

static __always_inline bool is_loopback(const struct end_address *address)
{
    bool is_ipv4 =
        !address->words[0] && !address->words[1] && address->words[2] == bpf_htonl(0xffff);

    return is_ipv4 && (bpf_ntohl(address->words[3]) >> 24) == 127;
}

/* Returns the key that is shared with the machine at an address, or NULL if no machine of the
 * service has that address. */
static __always_inline struct end_key *key_of(const struct end_address *address)
{
    struct end_address own = {{0, 0, 0, bpf_htonl(1)}};

    return bpf_map_lookup_elem(&ends, is_loopback(address) ? &own : address);
}

static __always_inline void put_ipv4(struct end_address *address, __be32 ipv4)
{
    /* Without this, the compiler may read the context field at a computed offset, which the
     * verifier refuses. */
    barrier_var(ipv4);
    *address = (struct end_address){{0, 0, bpf_htonl(0xffff), ipv4}};
}

static __always_inline void load_remote(struct bpf_sock_ops *ctx, struct end_address *address)
{
    if (ctx->family == AF_INET) {
        put_ipv4(address, ctx->remote_ip4);
        return;
    }
    for (int i = 0; i < 4; i++)
        address->words[i] = ctx->remote_ip6[i];
}

static __always_inline void load_local(struct bpf_sock_ops *ctx, struct end_address *address)
{
    if (ctx->family == AF_INET) {
        put_ipv4(address, ctx->local_ip4);
        return;
    }
    for (int i = 0; i < 4; i++)
        address->words[i] = ctx->local_ip6[i];
}

/* Returns the key that is shared with the connection's other end, or NULL if that end is no machine
 * of the service. */
static __always_inline struct end_key *key_towards(struct bpf_sock_ops *ctx)
{
    struct end_address remote;

    load_remote(ctx, &remote);
    return key_of(&remote);
}

/* Makes the token of a handshake segment. `is_client`: this machine is the client's end. Returns
 * false where the other end is not a machine of the service. */
static __always_inline bool make_token(struct bpf_sock_ops *ctx, bool is_client, __u32 client_isn,
                                       __u32 server_isn, __u16 what, __u64 *token)
{
    struct connection c = {.what = what, .client_isn = client_isn, .server_isn = server_isn};
    struct end_key *key;

    if (is_client) {
        load_local(ctx, &c.client);
        load_remote(ctx, &c.server);
        c.client_port = ctx->local_port;
        c.server_port = bpf_ntohl(ctx->remote_port);
        key = key_of(&c.server);
    } else {
        load_remote(ctx, &c.client);
        load_local(ctx, &c.server);
        c.client_port = bpf_ntohl(ctx->remote_port);
        c.server_port = ctx->local_port;
        key = key_of(&c.client);
    }
    if (!key)
        return false;
    *token = token_of(&c, key);
    return true;
}

#endif
