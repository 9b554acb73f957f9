/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * Client packets as they arrive at the frontend: who gets which. With an active region:
 *
 *   packet                                   frontend's stack           its backend
 *   ACK at or below the region's start       yes, old delta             only if its SACK blocks
 *                                                                       lie in the region, or it
 *                                                                       opens the window
 *   first ACK past the start                 yes, clamped to it         yes
 *   later pure ACKs inside                   no                         yes, each that it needs
 *   of these, probes                         yes, clamped: it answers   yes
 *   ACK at the end                           yes: complete, where its   yes
 *                                            backend's word is not
 *                                            needed, or there (claims.h)
 *   ACK past the end, or past what the       nobody: nobody sent that   no
 *   client had room for (claims.h)
 *   data, FIN, URG                           yes, ACK clamped           its ACK part
 *   RST at the next sequence number, or      yes, at the next           yes
 *   at the one that its backend knows
 *
 * Without one, all goes to the frontend, translated; a report of duplicates in an older region
 * (RFC 2883) also to that region's backend, which has missed the client's last ACK. Where the
 * server has left its client with half a response, each packet is answered by a reset (reset.h).
 *
 * A backend whose window holds much needs few ACKs, and says so (ack_may_wait): the others end
 * here.
 *
 * Packets with IP options, extension headers and first fragments are routed alike (plain.h); of a
 * fragment, all behind the first belongs to the stack alone, which gets it as it is.
 *
 * What goes to both is cloned into this interface's ingress with a mark, and on its second way
 * through here it becomes the backend's copy. The original, whose data the frontend waits for, is
 * neither delayed nor reordered by that.
 */
#ifndef INGRESS_H
#define INGRESS_H

/* skb->mark of a clone; the low bits say which of the flow's breaks it belongs to. */
#define COPY_MARK      0x53480000
#define COPY_MARK_MASK 0xffff0000

/* A round trip and as long a silence between two ACKs, and a sender may have timed out: that takes
 * a round trip and 200 ms at least (RTO_MIN). Over a long way a round trip's silence is the rule:
 * the window is sent at once, and its ACKs come together. */
#define SILENCE_NS 100000000

struct route {
    bool server;    /* the frontend's stack gets it */
    bool nobody;    /* drop: acknowledges what nobody has sent */
    bool clamped;   /* the frontend's ACK number is the region's start */
    bool late;      /* the copy is a report of late duplicates */
    bool held;      /* nobody gets it: no news */
    bool strange;   /* outside the client's window: the frontend's stack drops it */
    bool ended;     /* nobody: its server has ended half a response, and a reset says so */
    bool untouched; /* the frontend's stack gets it as it is: a socket that is gone answers so */
    bool behind;    /* a reset at an older number: the frontend's stack takes it at its own */
    int copy;       /* index of the break whose backend gets a copy, or NO_BREAK */
    __u32 ack;      /* for the frontend: LOCAL */
    __u16 window;   /* for the frontend */
    __u32 ring;
    struct shunt_event event; /* kind 0: none */
};

static __always_inline int break_index(const struct spaces *s, __u32 n)
{
    return (s->made - 1 - n) & (BREAKS - 1);
}

/* ---- the decision, under the flow's lock ---- */

static __always_inline void end_region(struct flow *flow, struct route *r, __u32 status, __u32 kind)
{
    flow->spaces.status = status;
    flow->ahead = 0;
    r->event.kind = kind;
    r->event.handoff = flow->handoff;
    r->event.acked = flow->spaces.acked;
    r->ring = flow->ring;
}

/* Only the next sequence number that we expect makes a reset one (RFC 5961, 3.2). A client whose
 * socket is gone answers a backend's segment with what that acknowledges, which is what the newest
 * copies said: where it has closed since, a FIN's number less. */
static __always_inline void route_reset(struct flow *flow, const struct packet *p, struct route *r)
{
    if (p->seq != flow->server_ack && p->seq != flow->copied[0] && p->seq != flow->copied[1])
        return;
    r->behind = p->seq != flow->server_ack;
    flow->flags |= FLOW_RESET;
    if (nth_break(&flow->spaces, 0)->length)
        r->copy = break_index(&flow->spaces, 0);
    if (flow->spaces.status == SHUNT_REGION_ACTIVE)
        end_region(flow, r, SHUNT_REGION_CANCELLED, SHUNT_EVENT_RESET);
}

/* A first block below the ACK number reports duplicates. */
static __always_inline void route_late(const struct spaces *s, const struct packet *p,
                                       const struct sack *sack, struct route *r)
{
    if (sack->blocks == 0 || !is_before(sack->left[0], sack->right[0]) ||
        is_before(p->ack, sack->right[0]))
        return;
    int n = region_of(s, sack->left[0], sack->right[0]);
    if (n == NO_BREAK)
        return;
    r->copy = break_index(s, n);
    r->late = true;
}

static __always_inline bool reaches_region(const struct spaces *s, const struct sack *sack)
{
    for (int i = 0; i < SACK_BLOCKS_MAX; i++)
        if (i < sack->blocks && nth_position(s, 0, sack->right[i]) > 0)
            return true;
    return false;
}

/*
 * ACKs that only say that more has arrived are for a sender to go on with; one that may have many
 * times more outstanding than lies between two of them does not wait for each. ack_spacing is a
 * quarter of its congestion window at most, and a quarter of the client's window bounds it here.
 * What could be loss or congestion shrinks a congestion window, so from its first sign every ACK
 * goes. At least one goes in each tick of the coarse clock, which is a jiffy: the timers of a
 * sender that is paced are longer. One that pauses, for its disk, may miss the last ACK before the
 * pause and probe with a segment too many (RFC 8985, 7); the duplicate report of that is a sign
 * too.
 */
static __always_inline bool ack_may_wait(struct flow *flow, const struct packet *p,
                                         const struct sack *sack, __u64 at, __u64 now)
{
    bool duplicate = at == flow->spaces.acked && p->window == flow->client_window;
    bool silence = now - flow->passed_ns > SILENCE_NS + flow->srtt_us * 1000ull;

    if (sack->blocks || p->flags & TH_ECE || duplicate || silence)
        flow->ack_spacing = 0;
    return flow->ack_spacing && at > flow->spaces.acked && at < flow->hold_until &&
           now == flow->passed_ns;
}

/* Of an ACK that its backend gets. */
static __always_inline void note_passed(struct flow *flow, const struct packet *p, __u64 at,
                                        __u64 now)
{
    __u64 quarter = ((__u64) p->window << flow->snd_wscale) / 4;

    flow->passed_ns = now;
    flow->hold_until = at + (quarter < flow->ack_spacing ? quarter : flow->ack_spacing);
}

/*
 * With the number before the next, a client asks whether the frontend is still there (RFC 9293,
 * 3.8.4) or has room again (3.8.6.1): only the frontend's stack has the answer.
 */
static __always_inline bool is_probe(const struct flow *flow, const struct packet *p)
{
    return is_before(p->seq, flow->server_ack);
}

/*
 * Of an ACK at the region's start: whether it gives a backend room that it waits for. A backend
 * knows of the window what the claim says; where that holds its first flight, or all, the ACKs of
 * those bytes tell the rest. Also each later ACK that says so, for the first may come before its
 * socket is there.
 */
static __always_inline bool opens_window(const struct flow *flow, const struct packet *p)
{
    __u64 length = nth_break(&flow->spaces, 0)->length;
    __u64 flight = (__u64) flow->snd_cwnd * flow->mss;
    __u32 window = (__u32) p->window << flow->snd_wscale;

    return window > flow->snd_wnd && flow->snd_wnd < length && flow->snd_wnd < flight;
}

/* `at`: the ACK's place in the region. */
static __always_inline void route_active(struct flow *flow, const struct packet *p,
                                         const struct sack *sack, __s64 at, __u64 now,
                                         struct route *r)
{
    struct spaces *s = &flow->spaces;
    __s64 length = nth_break(s, 0)->length;
    bool pure = p->payload_bytes == 0 && !(p->flags & (TH_FIN | TH_URG));

    if (at > length) {
        r->nobody = true;
        return;
    }
    r->server = true;
    if (at <= 0) {
        if (reaches_region(s, sack) || (at == 0 && opens_window(flow, p)))
            r->copy = break_index(s, 0);
        else
            route_late(s, p, sack, r);
        return;
    }
    bool only_backend = pure && flow->flags & FLOW_START_ACKED && at < length;
    r->held = ack_may_wait(flow, p, sack, at, now) && only_backend && !is_probe(flow, p);
    if (r->held)
        return;
    r->copy = break_index(s, 0);
    note_passed(flow, p, at, now);
    if (at == length && claims_end(flow)) {
        end_region(flow, r, SHUNT_REGION_COMPLETE, SHUNT_EVENT_COMPLETE);
        return;
    }
    r->server = !only_backend || is_probe(flow, p);
    r->clamped = r->server;
    flow->flags |= FLOW_START_ACKED;
}

/* A connection without a region is its kernel's, which knows what has been sent. */
static __always_inline void route_too_much(const struct flow *flow, struct route *r)
{
    r->nobody = is_open(&flow->spaces);
    r->server = !r->nobody;
    r->strange = !r->nobody;
}

static __always_inline void route_ack(struct flow *flow, const struct packet *p,
                                      const struct sack *sack, __u64 now, struct route *r)
{
    __s64 at = nth_position(&flow->spaces, 0, p->ack);

    if (flow->spaces.status == SHUNT_REGION_ACTIVE) {
        route_active(flow, p, sack, at, now, r);
        if (r->nobody)
            return;
    } else if (flow->spaces.status == SHUNT_REGION_CANCELLED && flow->flags & FLOW_SERVER_FIN) {
        r->ended = true;
    } else {
        r->server = true;
        route_late(&flow->spaces, p, sack, r);
    }
    note_client(flow, p, at);
}

/* ---- to the frontend's stack ---- */

/*
 * Of a region that its server has taken (SHUNT_TAKE), the client may have bytes behind a hole, and
 * once that is filled, its ACK is ahead of what the frontend's kernel has sent, which would drop it
 * (RFC 9293, 3.10.7.4): it is one of all that has been sent. As be_in does it for a backend that
 * goes on for another.
 */
static __always_inline __u32 known_to_server(const struct flow *flow, __u32 ack)
{
    __u32 local = to_local(&flow->spaces, ack);
    __u32 sent = flow->server_end + !!(flow->flags & FLOW_SERVER_FIN);
    bool is_ahead = flow->ahead && !is_open(&flow->spaces) &&
                    !is_before(flow->start + flow->ahead, ack) && is_before(sent, local);

    return is_ahead ? sent : local;
}

static __noinline int sack_to_local(struct __sk_buff *skb, const struct packet *p,
                                    struct flow *flow, struct edit *e)
{
    struct sack sack = {};
    sack.blocks = load_sack(skb, p, &sack);
    bpf_spin_lock(&flow->lock);
    for (int i = 0; i < SACK_BLOCKS_MAX; i++) {
        sack.left[i] = to_local(&flow->spaces, sack.left[i]);
        sack.right[i] = to_local(&flow->spaces, sack.right[i]);
    }
    bpf_spin_unlock(&flow->lock);
    return store_sack(skb, p, e, &sack);
}

static __noinline int to_server(struct __sk_buff *skb, const struct packet *p, struct flow *flow,
                                __u32 ack, __u16 window)
{
    struct edit e = {};
    struct tcphdr *tcp = tcp_header(skb, p);
    if (!tcp)
        return TC_ACT_SHOT;
    if (ack != p->ack)
        put32(&e.plain, &tcp->ack_seq, bpf_htonl(ack));
    if (window != p->window)
        put16(&e.plain, &tcp->window, bpf_htons(window));
    if (p->sack) {
        count(FE_IN_SACK);
        if (sack_to_local(skb, p, flow, &e)) {
            count(FE_DROP_REWRITE);
            return TC_ACT_SHOT;
        }
    }
    if (!sums_follow(skb, p, &e)) {
        count(FE_DROP_REWRITE);
        return TC_ACT_SHOT;
    }
    return PASS;
}

/* ---- to a backend ---- */

static __noinline int sack_to_region(struct __sk_buff *skb, const struct packet *p,
                                     const struct region *region, __u32 ack, struct edit *e)
{
    struct sack sack = {};
    sack.blocks = load_sack(skb, p, &sack);
    for (int i = 0; i < SACK_BLOCKS_MAX; i++) {
        sack.left[i] = clamp_to(region, sack.left[i]);
        sack.right[i] = clamp_to(region, sack.right[i]);
        /* A lost header leaves a block from the region's first byte on, where the ACK number is
         * too. RFC 2018 has no such block and the kernel ignores one: give up its first byte. */
        if (sack.left[i] == ack && is_before(ack, sack.right[i]))
            sack.left[i]++;
    }
    return store_sack(skb, p, e, &sack);
}

/* The window field of an ACK whose number is raised to a region's start: what the client has room
 * for ends where it did. Else a backend sends more than that, and fe_in drops the client's word of
 * it (claims_too_much), again and again. */
static __always_inline __u16 window_from(const struct packet *p, __u32 ack, __u8 scale)
{
    __u32 room = (__u32) p->window << scale;
    __u32 raised = is_before(p->ack, ack) ? ack - p->ack : 0;

    return room > raised ? (room - raised) >> scale : 0;
}

/*
 * Turns the packet into the ACK that a backend gets: of its region alone, without data, with the
 * frontend's newest ACK number in the sequence field, from where be_in takes it, and with the
 * flow's token in the urgent pointer, which nobody looks at without URG. Not a function
 * of its own: with one more on the way to store_sack, their stacks would exceed the verifier's 512
 * bytes.
 */
static __always_inline bool rewrite_copy(struct __sk_buff *skb, const struct packet *p,
                                         const struct steer_peer *peer, const struct region *region,
                                         __u32 server_ack, __u16 token)
{
    struct edit e = {};
    __u32 ack = clamp_to(region, p->ack);

    if (!put_address(skb, p, &e, DESTINATION,
                     (const __u32 *) (is_ipv6(p) ? peer->ipv6 : peer->ipv4)) ||
        !put_fresh_ttl(skb, p))
        return false;
    struct tcphdr *tcp = tcp_header(skb, p);
    if (!tcp)
        return false;
    put16(&e.plain, &tcp->dest, peer->port);
    put32(&e.plain, &tcp->seq, bpf_htonl(server_ack));
    put32(&e.plain, &tcp->ack_seq, bpf_htonl(ack));
    put16(&e.plain, &tcp->window, bpf_htons(p->window));
    put_flags(&e, tcp, TH_FIN | TH_PSH | TH_URG, TH_ACK);
    put16(&e.plain, &tcp->urg_ptr, bpf_htons(token));
    if (p->sack && sack_to_region(skb, p, region, ack, &e))
        return false;
    if (p->payload_bytes == 0)
        return sums_follow(skb, p, &e);
    count(FE_IN_STRIPPED);
    return cut_payload(skb, p, &e) == 0;
}

static __noinline int to_backend(struct __sk_buff *skb, struct packet *p, struct flow *flow,
                                 __u32 index)
{
    if (p->is_odd && make_plain(skb, p)) {
        count(FE_DROP_REWRITE);
        return TC_ACT_SHOT;
    }
    bpf_spin_lock(&flow->lock);
    __u32 n = (flow->spaces.made - 1 - index) & (BREAKS - 1);
    struct region region = nth_region(&flow->spaces, n);
    __u32 server_ack = flow->server_ack;
    __u16 token = flow->token;
    flow->copied[1] = flow->copied[0];
    flow->copied[0] = server_ack;
    p->window = window_from(p, clamp_to(&region, p->ack), flow->snd_wscale);
    bpf_spin_unlock(&flow->lock);

    struct steer_peer *peer = bpf_map_lookup_elem(&peers, &region.payload.peer);
    if (!peer || !(is_ipv6(p) ? peer->ipv6_ifindex : peer->ipv4_ifindex)) {
        count(FE_DROP_COPY);
        return TC_ACT_SHOT;
    }
    if (!leaves_its_vlan(skb) || !rewrite_copy(skb, p, peer, &region, server_ack, token)) {
        count(FE_DROP_REWRITE);
        return TC_ACT_SHOT;
    }
    /* Routes and asks for the neighbour as for a packet of our own. bpf_fib_lookup would need the
     * interface to be a router's (sysctl forwarding). */
    return bpf_redirect_neigh(is_ipv6(p) ? peer->ipv6_ifindex : peer->ipv4_ifindex, NULL, 0, 0);
}

/* ---- the program ---- */

/* Whether the kernel has a connection for it already: then a SYN means nothing (RFC 5961, 4). */
static __noinline bool has_connection(struct __sk_buff *skb, const struct packet *p)
{
    struct bpf_sock_tuple t = {};
    __u32 bytes = sizeof(t.ipv4);

    if (is_ipv6(p)) {
        bytes = sizeof(t.ipv6);
        __builtin_memcpy(t.ipv6.saddr, p->source, sizeof(t.ipv6.saddr));
        __builtin_memcpy(t.ipv6.daddr, p->destination, sizeof(t.ipv6.daddr));
        t.ipv6.sport = p->source_port;
        t.ipv6.dport = p->destination_port;
    } else {
        t.ipv4.saddr = p->source[3];
        t.ipv4.daddr = p->destination[3];
        t.ipv4.sport = p->source_port;
        t.ipv4.dport = p->destination_port;
    }
    struct bpf_sock *sk = bpf_skc_lookup_tcp(skb, &t, bytes, BPF_F_CURRENT_NETNS, 0);
    if (!sk)
        return false;
    __u32 state = sk->state;
    bpf_sk_release(sk);
    return state != BPF_TCP_LISTEN && state != BPF_TCP_TIME_WAIT && state != BPF_TCP_NEW_SYN_RECV;
}

static __always_inline void report(const struct route *r)
{
    if (r->event.kind == SHUNT_EVENT_COMPLETE) {
        count(FE_COMPLETED);
    } else {
        count(FE_CLIENT_RESET);
        forget_begun(r->event.handoff, r->ring);
    }
    emit(r->ring, &r->event);
}

/* A clone of this packet comes back to fe_in, marked. */
static __always_inline void send_copy(struct __sk_buff *skb, __u32 index)
{
    __u32 mark = skb->mark;
    skb->mark = COPY_MARK | index;
    if (bpf_clone_redirect(skb, skb->ifindex, BPF_F_INGRESS))
        count(FE_DROP_REWRITE);
    skb->mark = mark;
}

/*
 * Decides who gets a client's packet, and notes in the flow what the packet says. A function of its
 * own, as the next one is:
 * the stacks of all functions that are under way at a time may have 512 bytes, and older kernels
 * round each up to 32 (kernel/bpf/verifier.c, check_max_stack_depth). What decides is over when
 * packets are rewritten.
 */
static __noinline void choose_route(struct __sk_buff *skb, const struct packet *p,
                                    struct flow *flow, struct route *r)
{
    __u64 now = bpf_ktime_get_coarse_ns();
    struct sack sack = {};
    if (p->sack)
        sack.blocks = load_sack(skb, p, &sack);

    bpf_spin_lock(&flow->lock);
    flow->last_seen_ns = now;
    r->untouched = flow->flags & FLOW_RESET || !(p->flags & (TH_ACK | TH_RST));
    r->ack = p->ack;
    r->window = p->window;
    if (!r->untouched && p->flags & TH_RST) {
        r->server = true;
        route_reset(flow, p, r);
    } else if (!r->untouched && !is_acceptable(flow, p)) {
        r->server = true; /* its kernel drops it, and says what it expects */
        r->strange = true;
    } else if (!r->untouched && claims_too_much(flow, p, &sack)) {
        route_too_much(flow, r);
    } else if (!r->untouched) {
        route_ack(flow, p, &sack, now, r);
    }
    if (p->flags & TH_ACK)
        r->ack = known_to_server(flow, p->ack);
    if (p->flags & TH_ACK && !(p->flags & TH_RST) && is_queueing(flow))
        r->window = window_before(flow, r->ack, p->window);
    bpf_spin_unlock(&flow->lock);
}

static __noinline int steer(struct __sk_buff *skb, struct packet *p, struct flow *flow)
{
    struct route r = {.copy = NO_BREAK};

    choose_route(skb, p, flow, &r);
    if (r.untouched)
        return PASS;
    if (r.event.kind)
        report(&r);
    if (r.nobody) {
        count(FE_DROP_BAD_ACK);
        return TC_ACT_SHOT;
    }
    if (r.ended) {
        count(FE_IN_ENDED);
        return answer_with_reset(skb, p);
    }
    if (r.clamped)
        count(FE_IN_CLAMPED);
    if (r.held) {
        count(FE_IN_HELD);
        return TC_ACT_SHOT;
    }
    if (r.late)
        count(FE_IN_DSACK);
    if (r.strange)
        count(FE_IN_STRANGE);
    if (!r.server) {
        count(FE_IN_BACKEND);
        return to_backend(skb, p, flow, r.copy);
    }
    count(r.copy == NO_BREAK ? FE_IN_SERVER : FE_IN_BOTH);
    if (r.copy != NO_BREAK)
        send_copy(skb, r.copy);
    if (r.behind && !move_seq(skb, p, flow->server_ack)) {
        count(FE_DROP_REWRITE);
        return TC_ACT_SHOT;
    }
    return to_server(skb, p, flow, r.ack, r.window);
}

static __always_inline void key_of_client(const struct packet *p, struct flow_key *key)
{
    __builtin_memcpy(key->client_address, p->source, sizeof(key->client_address));
    __builtin_memcpy(key->server_address, p->destination, sizeof(key->server_address));
    key->client_port = p->source_port;
    key->server_port = p->destination_port;
}

/* Functions of their own, so that the key is on their stack and not on fe_in's. */
static __noinline struct flow *flow_of_clients(const struct packet *p)
{
    struct flow_key key = {};

    key_of_client(p, &key);
    return bpf_map_lookup_elem(&flows, &key);
}

/* The client begins anew, and its kernel has nothing of the old connection: nobody says any more
 * what became of its region. */
static __noinline void forget_flow(const struct packet *p, struct flow *flow)
{
    struct route r = {};
    struct flow_key key = {};

    bpf_spin_lock(&flow->lock);
    if (flow->spaces.status == SHUNT_REGION_ACTIVE)
        end_region(flow, &r, SHUNT_REGION_CANCELLED, SHUNT_EVENT_RESET);
    bpf_spin_unlock(&flow->lock);
    if (r.event.kind)
        report(&r);
    key_of_client(p, &key);
    bpf_map_delete_elem(&flows, &key);
}

static __noinline int note_syn_of(const struct packet *p)
{
    struct flow_key key = {};

    key_of_client(p, &key);
    return note_syn(&key, p);
}

SEC("tc")
int fe_in(struct __sk_buff *skb)
{
    bool is_copy = (skb->mark & COPY_MARK_MASK) == COPY_MARK;
    __u32 index = skb->mark & (BREAKS - 1);
    struct packet p;

    if (is_copy)
        skb->mark = 0;
    if (!parse(skb, &p))
        return steer_report(skb);
    struct flow *flow = flow_of_clients(&p);
    if (is_copy) {
        if (flow)
            return to_backend(skb, &p, flow, index);
        count(FE_DROP_COPY);
        return TC_ACT_SHOT;
    }
    if (p.flags & TH_SYN) {
        if (flow && has_connection(skb, &p))
            return PASS;
        if (flow)
            forget_flow(&p, flow);
        note_syn_of(&p);
        return PASS;
    }
    if (!flow)
        return PASS;
    return steer(skb, &p, flow);
}

#endif
