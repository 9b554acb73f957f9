/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * How resets are made to reach their receiver.
 *
 * A receiver accepts a reset at its next sequence number only (RFC 5961, 3.2). The frontend knows
 * that number from the client's ACKs. If the last ACK was lost, the client's next number is higher.
 * The client then drops the reset as an old segment, without an answer, and the frontend's kernel
 * repeats the reset forever. But the client answers a reset elsewhere in its window, with an ACK of
 * its next number (challenge ACK). So a reset is sent three times, with these sequence numbers:
 *
 *   client_ack    the client's next number, if no ACK was lost
 *   edge - 1      the last byte that the client has room for: it lies in the window whatever the
 *                 next number is, so the client answers
 *   edge          the client's next number, if all of the window has arrived
 *
 * The client's answer is answered with a reset at exactly its ACK number: by the frontend's kernel
 * if the server's socket is gone, by fe_in if the server has ended but its socket is still there.
 */
#ifndef RESET_H
#define RESET_H

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "decisions/numbers.h"
#include "decisions/packet.h"
#include "edit.h"
#include "marks.h"
#include "plain.h"

/* Mark of a clone that fe_out lets pass unchanged. */
#define RESET_MARK MARK_OF(2)

/* Turns a packet into the reset that answers it. The caller brings the checksums up to date. */
static __always_inline bool turn_around(struct __sk_buff *skb, const struct packet *p,
                                        struct edit *e)
{
    struct ethhdr *eth = (void *) (long) skb->data;
    __u8 from[ETH_ALEN];

    if ((void *) (eth + 1) > (void *) (long) skb->data_end)
        return false;
    __builtin_memcpy(from, eth->h_source, sizeof(from));
    __builtin_memcpy(eth->h_source, eth->h_dest, sizeof(from));
    __builtin_memcpy(eth->h_dest, from, sizeof(from));
    if (!put_address(skb, p, e, SOURCE, p->destination) ||
        !put_address(skb, p, e, DESTINATION, p->source))
        return false;
    struct tcphdr *tcp = tcp_header(skb, p);
    if (!tcp)
        return false;
    put16(&e->plain, &tcp->source, p->destination_port);
    put16(&e->plain, &tcp->dest, p->source_port);
    put32(&e->plain, &tcp->seq, bpf_htonl(p->ack));
    put32(&e->plain, &tcp->ack_seq, bpf_htonl(p->seq));
    put_flags(e, tcp, TH_FIN | TH_PSH | TH_URG, TH_RST | TH_ACK);
    return true;
}

/* Returns a packet to the client, as a reset. */
static __noinline int answer_with_reset(struct __sk_buff *skb, struct packet *p)
{
    struct edit e = {};

    if (p->is_odd && make_plain(skb, p))
        return TC_ACT_SHOT;
    if (!turn_around(skb, p, &e) || !put_fresh_ttl(skb, p))
        return TC_ACT_SHOT;
    if (p->payload_bytes ? cut_payload(skb, p, &e) : !sums_follow(skb, p, &e))
        return TC_ACT_SHOT;
    return bpf_redirect(skb->ifindex, 0);
}

static __noinline bool move_seq(struct __sk_buff *skb, const struct packet *p, __u32 seq)
{
    struct edit e = {};
    struct tcphdr *tcp = tcp_header(skb, p);
    if (!tcp)
        return false;
    put32(&e.plain, &tcp->seq, bpf_htonl(seq));
    return sums_follow(skb, p, &e);
}

/* Sends a clone of a leaving reset with its present sequence number, and one with edge - 1. The
 * reset itself then leaves with `edge`. If a full queue drops them, a later FIN or reset of the
 * kernel ends the connection instead. */
static __noinline bool spread_reset(struct __sk_buff *skb, const struct packet *p, __u32 edge)
{
    struct marks before = put_mark(skb, RESET_MARK);

    bpf_clone_redirect(skb, skb->ifindex, 0);
    bool moved = move_seq(skb, p, edge - 1);
    if (moved) {
        bpf_clone_redirect(skb, skb->ifindex, 0);
        moved = move_seq(skb, p, edge);
    }
    restore_marks(skb, &before);
    return moved;
}

#endif
