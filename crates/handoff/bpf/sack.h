/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * The blocks of a selective acknowledgement (RFC 2018, D-SACK RFC 2883). load_sack reads them, the
 * caller translates them to another sequence space, and store_sack writes them back in place.
 * Blocks that are empty in that space are removed. The others move up and keep their order, because
 * a D-SACK block has to be the first. NOPs fill the end.
 */
#ifndef SACK_H
#define SACK_H

#include <linux/bpf.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "decisions/numbers.h"
#include "decisions/packet.h"
#include "edit.h"
#include "parse.h"

static __always_inline __u32 sack_block_at(const struct packet *p, __u32 block)
{
    return p->sack + 2 + 8 * block;
}

/* Reads the blocks. Returns their number. */
static __noinline __u32 load_sack(struct __sk_buff *skb, const struct packet *p, struct sack *sack)
{
    __u32 blocks = 0;

    for (int i = 0; i < SACK_BLOCKS_MAX; i++) {
        if (i >= p->sack_blocks)
            break;
        __be32 *edges = tcp_field(skb, p, sack_block_at(p, i), 2 * sizeof(*edges));
        if (!edges)
            break;
        sack->left[i] = bpf_ntohl(edges[0]);
        sack->right[i] = bpf_ntohl(edges[1]);
        blocks = i + 1;
    }
    return blocks;
}

static __always_inline bool put_block(struct __sk_buff *skb, const struct packet *p, struct edit *e,
                                      __u32 block, __be32 left, __be32 right)
{
    __u32 at = sack_block_at(p, block & 3);
    __be32 *edges = tcp_field(skb, p, at, 2 * sizeof(*edges));
    if (!edges)
        return false;
    put_option32(&e->plain, at, &edges[0], left);
    put_option32(&e->plain, at, &edges[1], right);
    return true;
}

static __noinline int store_sack(struct __sk_buff *skb, const struct packet *p, struct edit *e,
                                 const struct sack *sack)
{
    const __be32 nops = bpf_htonl(0x01010101);
    __u32 kept = 0;

    for (int i = 0; i < SACK_BLOCKS_MAX; i++) {
        if (i >= sack->blocks || !is_before(sack->left[i], sack->right[i]))
            continue;
        if (!put_block(skb, p, e, kept, bpf_htonl(sack->left[i]), bpf_htonl(sack->right[i])))
            return -1;
        kept++;
    }
    for (__u32 i = 0; i < SACK_BLOCKS_MAX; i++)
        if (i >= kept && i < sack->blocks && !put_block(skb, p, e, i, nops, nops))
            return -1;

    __be16 *option = tcp_field(skb, p, p->sack, sizeof(*option));
    if (!option)
        return -1;
    __be16 head =
        bpf_htons(kept ? TCPOPT_SACK << 8 | (2 + 8 * kept) : TCPOPT_NOP << 8 | TCPOPT_NOP);
    e->plain += at_offset((__u16) ~*option, p->sack);
    e->plain += at_offset(head, p->sack);
    *option = head;
    return 0;
}

#endif
