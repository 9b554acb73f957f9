/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * Steering at a backend. Segments of the agent's sockets leave with the frontend's address. The
 * client's ACKs come from fe_in, the frontend's program on ingress, and reach the sockets as if the
 * client had sent them here. The programs are attached to the interfaces that lead to clients and
 * frontends (tc, be_in and be_out) and to a cgroup (be_connected). A sender is one socket of the
 * agent, for one client. Its state is in its slot (struct sender_slot).
 *
 * A range of ports is reserved for the agent's sockets. A packet with such a port and no live
 * sender is dropped in both directions: a kernel that has closed the socket would answer with a
 * reset, and the client would get it in the frontend's name.
 *
 * The sockets of an agent that has ended are closed by the kernel. The kernel would wait for
 * minutes for an ACK of their FIN, and let no other socket have their addresses meanwhile. So
 * be_out turns a segment of such a socket into a reset that the socket itself gets: the FIN, once
 * all bytes are acknowledged; or any segment with data or a FIN, once the slot is not live.
 */
#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "counters.h"
#include "decisions/numbers.h"
#include "decisions/packet.h"
#include "decisions/sender.h"
#include "edit.h"
#include "icmp.h"
#include "marks.h"
#include "parse.h"
#include "reset.h"
#include "sack.h"
#include "steering.h"

/* <sys/socket.h>, which a BPF target cannot include. */
#define AF_INET 2

/* Set by the loader: the cookie of the agent's network namespace (0: any), and the reserved ports.
 */
const volatile __u64 netns_cookie = 0;
const volatile __u16 sender_port_low = 0; /* host order; the range includes low and high */
const volatile __u16 sender_port_high = 0;

struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(max_entries, MAX_SENDERS);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __type(key, struct sender_key);
    __type(value, __u32);
    __uint(pinning, LIBBPF_PIN_BY_NAME);
} senders SEC(".maps");

struct {
    __uint(type, BPF_MAP_TYPE_ARRAY);
    __uint(max_entries, MAX_SENDERS);
    __uint(map_flags, BPF_F_MMAPABLE);
    __type(key, __u32);
    __type(value, struct sender_slot);
    __uint(pinning, LIBBPF_PIN_BY_NAME);
} sender_slots SEC(".maps");

/* Keys of senders whose payload's end has been acknowledged. The agent tells their frontends. Not
 * pinned: each agent has its own ring. */
struct {
    __uint(type, BPF_MAP_TYPE_RINGBUF);
    __uint(max_entries, WORDS_BYTES);
} words SEC(".maps");

/* Mark of a segment that returns to its own socket as a reset. */
#define ORPHAN_MARK MARK_OF(1)

static __always_inline bool is_reserved(__u16 port)
{
    return port >= sender_port_low && port <= sender_port_high;
}

/* Returns the slot of the sender that uses `port` for a client, or NULL. */
static __always_inline struct sender_slot *find_sender(const __u32 *client, __be16 client_port,
                                                       __be16 port)
{
    struct sender_key key = {.client_port = client_port, .port = port};
    __builtin_memcpy(key.client_address, client, sizeof(key.client_address));
    __u32 *index = bpf_map_lookup_elem(&senders, &key);
    if (!index)
        return NULL;
    return bpf_map_lookup_elem(&sender_slots, index);
}

/* Returns the slot of the sender that uses `port` for a client, if the sender is live; else NULL.
 */
static __always_inline struct sender_slot *live_sender(const __u32 *client, __be16 client_port,
                                                       __be16 port)
{
    struct sender_slot *slot = find_sender(client, client_port, port);
    return slot && slot->live ? slot : NULL;
}

static __always_inline bool put_timestamps(struct __sk_buff *skb, const struct packet *p,
                                           struct edit *e, __u32 tsval, __u32 tsecr)
{
    __u32 at = p->timestamps;
    __be32 *option = tcp_field(skb, p, at, 2 * sizeof(*option));
    if (!option)
        return false;
    put_option32(&e->plain, at, &option[0], bpf_htonl(tsval));
    put_option32(&e->plain, at, &option[1], bpf_htonl(tsecr));
    return true;
}

/* ---- out ---- */

static __noinline bool send_as_server(struct __sk_buff *skb, const struct packet *p,
                                      const struct sender_slot *slot)
{
    struct edit e = {};
    __u32 server[4];

    __builtin_memcpy(server, slot->server_address, sizeof(server));
    if (!put_address(skb, p, &e, SOURCE, server))
        return false;
    struct tcphdr *tcp = tcp_header(skb, p);
    if (!tcp)
        return false;
    put16(&e.plain, &tcp->source, slot->server_port);
    put32(&e.plain, &tcp->seq, bpf_htonl(p->seq + slot->seq_delta));
    put32(&e.plain, &tcp->ack_seq, bpf_htonl(slot->ack));
    if (p->flags & TH_FIN)
        put_flags(&e, tcp, TH_FIN, TH_ACK);
    if (p->timestamps && !put_timestamps(skb, p, &e, p->tsval + slot->ts_delta, tsecr_of(p, slot)))
        return false;
    return sums_follow(skb, p, &e);
}

/* Turns a segment back to its own socket, as a reset that the socket accepts. */
static __noinline int reset_orphan(struct __sk_buff *skb, const struct packet *p)
{
    struct edit e = {};

    if (!turn_around(skb, p, &e) || !sums_follow(skb, p, &e)) {
        count(BE_DROP_REWRITE);
        return TC_ACT_SHOT;
    }
    put_mark(skb, ORPHAN_MARK);
    count(BE_ORPHAN_RESET);
    return bpf_redirect(skb->ifindex, BPF_F_INGRESS);
}

SEC("tc")
int be_out(struct __sk_buff *skb)
{
    struct packet p;

    if (skb->ingress_ifindex || !parse(skb, &p) || !is_reserved(bpf_ntohs(p.source_port)))
        return PASS;
    struct sender_slot *slot = live_sender(p.destination, p.destination_port, p.source_port);
    if (!slot) {
        count(BE_DROP_STRAY_OUT);
        return p.payload_bytes || p.flags & TH_FIN ? reset_orphan(skb, &p) : TC_ACT_SHOT;
    }
    /* A socket that is closed while it has bytes to send puts its FIN on the last segment of those
     * bytes. That segment leaves without the FIN. */
    if (p.flags & (TH_RST | TH_SYN) || (p.flags & TH_FIN && p.payload_bytes == 0)) {
        count(BE_DROP_FIN);
        bool all_acked = !is_before(slot->acked, p.seq);
        return p.flags & TH_FIN && all_acked ? reset_orphan(skb, &p) : TC_ACT_SHOT;
    }
    note_sent(slot, &p);
    if (!send_as_server(skb, &p, slot)) {
        count(BE_DROP_REWRITE);
        return TC_ACT_SHOT;
    }
    count(BE_OUT_SENT);
    return PASS;
}

/* ---- in ---- */

static __noinline int sack_to_sender(struct __sk_buff *skb, const struct packet *p, __u32 seq_delta,
                                     struct edit *e)
{
    struct sack sack = {};
    sack.blocks = load_sack(skb, p, &sack);
    for (int i = 0; i < SACK_BLOCKS_MAX; i++) {
        sack.left[i] -= seq_delta;
        sack.right[i] -= seq_delta;
    }
    return store_sack(skb, p, e, &sack);
}

/*
 * Flag that makes a kernel process every ACK in full. A kernel predicts the header of the next
 * packet, with its window (net/ipv4/tcp_input.c, tcp_rcv_established). From an ACK that is as
 * predicted it takes no window, since it supposes that it knows this window. TCP_REPAIR_WINDOW
 * changes the window that the kernel knows, but not the prediction, so the socket would continue to
 * send beyond its client's window. No prediction has this flag. CWR means nothing to a socket
 * without ECN, and no sender's socket (made with TCP_REPAIR) has ECN.
 */
#define UNPREDICTED TH_CWR

static __noinline bool receive_as_sender(struct __sk_buff *skb, const struct packet *p,
                                         struct sender_slot *slot)
{
    struct edit e = {};
    struct tcphdr *tcp = tcp_header(skb, p);
    if (!tcp)
        return false;
    /* The newest ACK number of the frontend, not the highest: a client drops segments that
     * acknowledge more than it has sent, so a forged number must not stay. */
    slot->ack = p->seq;
    slot->window = p->window;
    bool ahead = false;
    __u32 ack = ack_for_sender(slot, p->ack, &ahead);
    if (ahead)
        count(BE_IN_AHEAD);
    note_acked(slot, ack);
    put32(&e.plain, &tcp->seq, bpf_htonl(slot->rcv_nxt));
    put32(&e.plain, &tcp->ack_seq, bpf_htonl(ack));
    put_flags(&e, tcp, TH_FIN | TH_PSH | TH_URG, TH_ACK | UNPREDICTED);
    put16(&e.plain, &tcp->urg_ptr, 0);
    if (p->timestamps && !put_timestamps(skb, p, &e, p->tsval, p->tsecr - slot->ts_delta))
        return false;
    if (p->sack && slot->seq_delta && sack_to_sender(skb, p, slot->seq_delta, &e))
        return false;
    if (p->payload_bytes == 0)
        return sums_follow(skb, p, &e);
    count(BE_STRIPPED);
    return cut_payload(skb, p, &e) == 0;
}

/* Tells the agent that a payload's end is acknowledged. A repeated ACK is reported again, and the
 * agent ignores the second report. */
static __noinline int tell_delivered(const struct packet *p)
{
    struct sender_key key = {.client_port = p->source_port, .port = p->destination_port};

    __builtin_memcpy(key.client_address, p->source, sizeof(key.client_address));
    count(BE_DELIVERED);
    if (bpf_ringbuf_output(&words, &key, sizeof(key), 0))
        count(BE_DELIVERED_LOST);
    return 0;
}

static __always_inline bool is_strange(struct __sk_buff *skb, const struct sender_slot *slot,
                                       const struct packet *p)
{
    struct tcphdr *tcp = tcp_header(skb, p);

    return !tcp || is_made_up(slot, p, bpf_ntohs(tcp->urg_ptr));
}

/* Handles a packet that parse() refuses. A report of a smaller path MTU that cites a reserved port
 * was passed on by fe_in: the cited sequence number becomes the socket's own. Without a live sender
 * the report is dropped. Other packets pass unchanged. */
static __noinline int receive_report(struct __sk_buff *skb)
{
    struct too_big t = {};
    struct edit e = {};

    if (!load_too_big(skb, &t) || !is_reserved(bpf_ntohs(t.source_port)))
        return PASS;
    struct sender_slot *slot = live_sender(t.destination, t.destination_port, t.source_port);
    if (!slot) {
        count(BE_DROP_STRAY_IN);
        return TC_ACT_SHOT;
    }
    if (!put_cited_seq(skb, &t, &e, t.seq - slot->seq_delta) || !icmp_sum_follows(skb, &t, &e)) {
        count(BE_DROP_REWRITE);
        return TC_ACT_SHOT;
    }
    count(BE_IN_TOO_BIG);
    return PASS;
}

SEC("tc")
int be_in(struct __sk_buff *skb)
{
    struct packet p;

    if (take_mark(skb, ORPHAN_MARK) != NOT_MARKED)
        return PASS;
    bool parsed = parse(skb, &p);
    if (!is_reserved(bpf_ntohs(p.destination_port)))
        return parsed ? PASS : receive_report(skb);
    /* fe_in sends plain packets without fragments, and senders' sockets get packets from nowhere
     * else. */
    if (!parsed || p.is_odd) {
        count(BE_DROP_STRANGE);
        return TC_ACT_SHOT;
    }
    struct sender_slot *slot = live_sender(p.source, p.source_port, p.destination_port);
    if (!slot || p.flags & TH_SYN) {
        count(BE_DROP_STRAY_IN);
        return TC_ACT_SHOT;
    }
    if (is_strange(skb, slot, &p)) {
        count(BE_DROP_STRANGE);
        return TC_ACT_SHOT;
    }
    if (acknowledges_unsent(slot, &p)) {
        count(BE_DROP_UNSENT);
        return TC_ACT_SHOT;
    }
    if (!receive_as_sender(skb, &p, slot)) {
        count(BE_DROP_REWRITE);
        return TC_ACT_SHOT;
    }
    count(BE_IN_STEERED);
    if (slot->live & SENDER_WORD && !is_before(slot->acked, slot->end))
        tell_delivered(&p);
    return PASS;
}

/* ---- a sender's socket as it is connected in repair mode, before its slot is live ---- */

SEC("sockops")
int be_connected(struct bpf_sock_ops *ops)
{
    if (ops->op != BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB || !is_reserved(ops->local_port) ||
        (netns_cookie && bpf_get_netns_cookie(ops) != netns_cookie))
        return 1;

    __u32 client[4] = {};
    if (ops->family == AF_INET) {
        __be32 ipv4 = ops->remote_ip4;
        /* Without this, the compiler may share one load between the two branches of this `if`. The
         * verifier refuses such a load. */
        barrier_var(ipv4);
        map_ipv4(client, ipv4);
    } else {
        client[0] = ops->remote_ip6[0];
        client[1] = ops->remote_ip6[1];
        client[2] = ops->remote_ip6[2];
        client[3] = ops->remote_ip6[3];
    }
    __be16 client_port = bpf_htons(bpf_ntohl(ops->remote_port));
    struct sender_slot *slot = find_sender(client, client_port, bpf_htons(ops->local_port));
    if (slot && slot->snd_cwnd) {
        int cwnd = slot->snd_cwnd;
        bpf_setsockopt(ops, IPPROTO_TCP, TCP_BPF_IW, &cwnd, sizeof(cwnd));
    }
    return 1;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
