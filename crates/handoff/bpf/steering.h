/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * Contents of the maps that the steering programs share with user space, and arguments of programs
 * that the agent runs. crates/handoff/build.rs generates the Rust types of the maps' contents from
 * the type information (BTF) of the compiled programs. The arguments are declared again in
 * crates/handoff/src/frontend.rs.
 *
 * A flow is the record of a client connection at its frontend. A region is a range of its sequence
 * numbers that a backend sends, for one handoff of a server. A payload is the bytes of a region. A
 * sender is a backend's socket that sends payloads to one client. A copy is a packet of the client
 * that fe_in, the frontend's program on ingress, rewrites for a backend. A word is a backend's
 * confirmation that the client has acknowledged a whole payload. A ring is a BPF ring buffer by
 * which the kernel tells one server what becomes of its regions. The board is memory in which the
 * agent shows its servers the state of the backends.
 *
 * Addresses are 16 bytes, IPv4 as ::ffff:a.b.c.d. Ports and addresses are in network order,
 * sequence numbers and counts in the machine's order.
 */
#ifndef STEERING_H
#define STEERING_H

#include <linux/bpf.h>
#include <linux/types.h>

#include "../../../include/shunt.h"

/*
 * Version of the pinned maps' contents, at most 32. Any change to the meaning of a field below
 * raises this number. An agent takes over only maps of its own layout. Maps of another layout stay,
 * with their programs, until their connections have ended (crates/handoff/src/older.rs). The agent
 * still uses a part of those maps. So this part must never change: struct flow_key, struct
 * delivery, the keys of the map `flows`, and the maps `layout`, `rings` and `ring_owners`.
 */
#ifndef STEERING_LAYOUT
#define STEERING_LAYOUT 13
#endif

#define MAX_FLOWS         65536
#define MAX_SENDERS       65536
#define MAX_PEERS         256 /* as many as the board has: SHUNT_BOARD_PEERS */
#define MAX_RINGS         512
#define MAX_HANDSHAKES    65536
#define BEGUN_OF_A_RING   64 /* number of newest regions kept for each ring; a power of two */
#define BEGUN             (MAX_RINGS * BEGUN_OF_A_RING)
#define PORTS             65536
#define HANDSHAKE_SECONDS 60     /* time for which a handshake counts as proof */
#define RING_BYTES        262144 /* room for 8,192 completions between two reads by a worker */
#define WORDS_BYTES       262144 /* room for 8,192 words between two reads by a backend's agent */
/* Number of a flow's newest payloads whose sequence numbers are kept, to translate late segments
 * and ACKs. A power of two. */
#define BREAKS            4

/* A client connection, as the frontend sees it. */
struct flow_key {
    __u8 client_address[16];
    __u8 server_address[16];
    __be16 client_port;
    __be16 server_port;
};

/*
 * A break: one payload in the two sequence spaces of a flow. LOCAL is what the frontend's kernel
 * counts. CLIENT is what the client sees. The numbers of a byte in the two spaces differ by the
 * payload bytes that backends have sent before it:
 *
 *   LOCAL   header 1 |header 2 |
 *   CLIENT  header 1 |payload 1|header 2 |payload 2|
 *                    ^start    ^start+length
 *
 * Just before the payload, CLIENT minus LOCAL is `start - local`. After it, the difference is
 * `length` more. A break of length 0 is an anchor (decisions/spaces.h).
 */
struct flow_break {
    __u32 local;  /* LOCAL sequence number at which the payload is inserted */
    __u32 start;  /* CLIENT sequence number of the payload's first byte */
    __u64 length; /* payload bytes; may exceed 2^32 */
    __u32 peer;   /* backend that sends it: index into `peers` */
    __u32 end;    /* END_* */
};
/* Bits of `end`: what is known of the ACK of the payload's last byte (decisions/claims.h). */
#define END_WORD      1 /* the payload is complete only if its backend's agent confirms that ACK */
#define END_CLAIMED   2 /* a packet of the client acknowledges the last byte */
#define END_DELIVERED 4 /* the backend's agent has confirmed that the last byte is acknowledged */

/* How a flow's two sequence spaces map onto each other. */
struct spaces {
    __u32 made;   /* breaks made so far; breaks[(made - 1) & (BREAKS - 1)] is the newest */
    __u32 status; /* SHUNT_REGION_* of the newest break */
    __u64 acked;  /* number of the newest region's bytes that the client's newest ACK covers */
    struct flow_break breaks[BREAKS];
};

struct flow {
    struct bpf_spin_lock lock;
    __u32 regions; /* number of regions that have begun so far */
#if STEERING_LAYOUT == 32
    __u64 unused; /* makes this layout differ from the usual one: tests upgrade between the two */
#endif
    struct spaces spaces;
    __u64 handoff;      /* number of the newest region's handoff, chosen by its server */
    __u64 hold_until;   /* number of bytes of the newest region; ACKs of fewer may be dropped */
    __u64 passed_ns;    /* CLOCK_MONOTONIC (coarse) of the last ACK sent on to the backend */
    __u64 last_seen_ns; /* CLOCK_MONOTONIC of the last packet of either side, or of SHUNT_BEGIN */
    __u32 ring;         /* number of the ring that gets the newest region's completion */
    /* The next fields are noted from packets of the client and of the frontend's kernel. */
    __u32 client_ack;    /* newest ACK number of the client, CLIENT space (decisions/claims.h) */
    __u32 client_tsval;  /* newest timestamp of the client */
    __u32 client_tsecr;  /* newest timestamp echoed by the client; our segments get no older one */
    __u32 edge;          /* highest right edge of the client's window so far, CLIENT space */
    __u32 server_ack;    /* highest ACK number of the frontend's kernel */
    __u32 server_edge;   /* highest right edge of the window that the frontend's kernel offered */
    __u32 server_end;    /* highest end of a segment of the frontend's kernel, LOCAL space */
    __u16 client_window; /* window field that came with client_ack, unscaled */
    __u8 flags;          /* FLOW_* */
    /* The next fields describe the connection when the newest region began or moved. Their meanings
     * are those of the fields of struct shunt_flow in include/shunt.h. */
    __u8 options; /* SHUNT_OPTION_* */
    __u32 start;
    __u32 rcv_nxt;
    __u32 tsval;
    __u32 ts_recent;
    __u32 snd_wnd;
    __u32 snd_cwnd;
    __u32 snd_ssthresh;
    __u32 srtt_us;
    __u16 mss;
    __u8 snd_wscale;
    __u8 rcv_wscale;
    __u32 ack_spacing; /* payload bytes between ACKs that the backend needs; 0: it needs each */
    /* payload bytes from `start` on that an earlier backend may have sent (SHUNT_MOVE, SHUNT_TAKE)
     */
    __u32 ahead;
    __u16 asked;        /* number of probes that the frontend's kernel sent in active regions */
    __u16 answered;     /* value of `asked` when the client's newest packet was noted */
    __u32 furthest_ack; /* highest ACK number of the client since FLOW_SEEN_IN was set, CLIENT */
    __u32 token;        /* random number; half of it is in each copy, for the backend to check */
    __u32 copied[2];    /* server_ack in the two newest copies, or when the region began */
    __u64 idle_acked;   /* value of spaces.acked at idle_ns (decisions/behind.h) */
    __u64 idle_ns;      /* time since which a client with room has acknowledged nothing; 0: unset */
};
#define FLOW_CLIENT_FIN  1
#define FLOW_SERVER_FIN  2
#define FLOW_RESET       4
#define FLOW_START_ACKED 8  /* the frontend's kernel got the ACK of its bytes before the region */
#define FLOW_TIMESTAMPS  16 /* client_tsval and client_tsecr are valid */
#define FLOW_QUEUES      32 /* the server may write behind the newest region (decisions/behind.h) */
#define FLOW_SEEN_IN     64 /* client_ack and furthest_ack are from packets at fe_in (proof.h) */
#define FLOW_SEEN_OUT    128 /* server_end is from a segment at fe_out, the program on egress */

/* The handshake of a connection, as the programs have seen it (proof.h). Key: struct flow_key. */
struct handshake {
    __u32 client_isn;  /* initial sequence number of the answered SYN */
    __u32 server_isn;  /* initial sequence number of the SYN-ACK at fe_out */
    __u32 answered;    /* 1: there was a SYN-ACK */
    __u32 offered_isn; /* initial sequence number of the last SYN at fe_in, which may be forged */
    __u64 answered_ns; /* CLOCK_MONOTONIC of the SYN-ACK */
};

/* A backend that servers of this frontend may name in SHUNT_BEGIN. It has the same index here, in
 * the map `peers`, as on the board. The agent writes it. */
struct steer_peer {
    /* Addresses from which the backend sends to clients of each IP version. The session between the
     * agents may use other addresses. */
    __u8 ipv4[16];
    __u8 ipv6[16];
    __u32 ipv4_ifindex; /* interface towards `ipv4`; 0: no handoffs of IPv4 clients to it */
    __u32 ipv6_ifindex;
    __be16 port; /* port from which the backend sends for this frontend */
    __u16 up;    /* 0: SHUNT_BEGIN is refused */
};

/* Argument of fe_spacing: how far apart the ACKs of a flow may be that its backend gets. */
struct spacing {
    struct flow_key flow;
    __u32 peer;  /* the backend that asks for it; refused if it does not send the newest region */
    __u32 bytes; /* payload bytes from one ACK to the next */
};

/* Argument of fe_delivered: a backend's confirmation that a client has acknowledged all of a
 * payload. */
struct delivery {
    struct flow_key flow;
    __u32 peer; /* the backend that confirms it */
    __u64 handoff;
};

/* Argument of fe_cancel: a handoff whose payload no backend sends, and whose server is gone. */
struct cancelling {
    __u64 handoff;
    struct flow_key flow;
} __attribute__((packed));

/* Argument of fe_forget: a flow to forget, if no packet has come since the agent read it. */
struct forgetting {
    __u64 last_seen_ns; /* the flow's last_seen_ns when the agent read the flow */
    struct flow_key flow;
} __attribute__((packed));

/* Key of a sender, a backend's socket for a client of some frontend: the client, and the socket's
 * own port in the backend's kernel. */
struct sender_key {
    __u8 client_address[16];
    __be16 client_port;
    __be16 port;
};

/*
 * A region that a server has begun or moved: an element of the array `begun`. Each ring has
 * BEGUN_OF_A_RING elements, and the low bits of a handoff's number tell which of them its region
 * has. The agent maps the array. So it needs no system call to find the region of a handoff that a
 * server reports, unless a newer region has overwritten the element.
 */
struct begun {
    __u64 handoff;  /* 0: no region, or one that the agent has found */
    __u64 begun_ns; /* CLOCK_MONOTONIC when the region began or moved */
    struct flow_key flow;
    __u32 peer;
};

/*
 * State of one sender: an element of the array `sender_slots`. The map `senders` has the element's
 * index. The agent maps the array, and so writes it without a system call. The programs write
 * `ack`, `window`, `sent`, `edge`, `acked` and `start`. OWN are the socket's own sequence numbers.
 */
struct sender_slot {
    __u8 server_address[16]; /* the frontend's address, as the client knows it */
    __be16 server_port;
    __u16 live;      /* SENDER_*; 0: packets of this sender are dropped */
    __u32 start;     /* lower ACK numbers are raised to it; at first the payload's start, CLIENT */
    __u32 seq_delta; /* CLIENT minus OWN */
    __u32 ts_delta;  /* number that is added to the socket's TSval */
    __u32 rcv_nxt;   /* the socket's rcv_nxt: always the flow's token */
    __u32 ack;       /* frontend's ACK number in the newest copy; the sender's segments have it */
    __u32 end;       /* the payload's end, OWN, if SENDER_WORD is set */
    __u32 ts_recent; /* newest timestamp of the client, as the frontend knew it */
    __u32 sent;      /* end of what this socket has sent, OWN */
    __u32 edge;      /* later of `sent` and the end of what an earlier sender may have sent; OWN */
    __u32 acked;     /* end of what the client has acknowledged to this socket, OWN */
    __u16 window;    /* window field of the newest ACK for this sender */
    /* Initial congestion window in segments, which be_connected sets; 0: unchanged. With this field
     * a slot has 64 bytes, a cache line: an array map pads elements to 8 bytes only. */
    __u16 snd_cwnd;
};
#define SENDER_LIVE 1
#define SENDER_WORD 2 /* the agent is told when the payload's end is acknowledged */

/* Counters: elements of a per-CPU array, with the index enum steer_counter. build.rs takes their
 * names and meanings for `shunt stats` from this list. */
#define STEER_COUNTER_LIST(X)                                                                      \
    X(FE_IN_SERVER, "client packets to the frontend, translated")                                  \
    X(FE_IN_BACKEND, "client ACKs to a backend only")                                              \
    X(FE_IN_HELD, "client ACKs that the backend does not need, held at the frontend")              \
    X(FE_IN_BOTH, "client packets to both frontend and backend")                                   \
    X(FE_IN_CLAMPED, "packets to the frontend: ACK number clamped to a region's start")            \
    X(FE_IN_SACK, "client packets whose SACK blocks were split or translated")                     \
    X(FE_IN_DSACK, "late duplicate reports (DSACK), also sent to the backend of an older region")  \
    X(FE_IN_STRANGE, "packets outside the frontend's window: only to its stack")                   \
    X(FE_IN_STRIPPED, "copies for a backend whose data was cut off")                               \
    X(FE_IN_ENDED, "client packets after an unfinished response was left: answered by a reset")    \
    X(FE_IN_TOO_BIG, "reports of a smaller path MTU, passed on to a backend")                      \
    X(FE_OUT_TRANSLATED, "frontend segments translated")                                           \
    X(FE_OUT_ACK_MOVED, "frontend pure ACKs given an acceptable sequence number")                  \
    X(FE_OUT_ACK_HELD, "frontend pure ACKs held back until the client has some of the payload")    \
    X(FE_OUT_RST_MOVED, "frontend resets given the client's next sequence number")                 \
    X(FE_OUT_TS_RAISED, "frontend segments whose timestamp was raised to the client's newest")     \
    X(FE_OUT_WAITS, "held back: segments behind a payload that is not complete")                   \
    X(FE_OUT_FIN_TO_RST, "frontend FINs in an unfinished response, turned into resets")            \
    X(FE_DROP_EARLY_WRITE, "dropped: the frontend's server wrote during a handoff")                \
    X(FE_DROP_BAD_ACK, "dropped: acknowledges bytes that nobody can have sent")                    \
    X(FE_DROP_TOO_BIG, "dropped: a report of a smaller MTU about bytes not outstanding")           \
    X(FE_DROP_REWRITE, "dropped: a packet could not be rewritten")                                 \
    X(FE_DROP_COPY, "dropped: a copy whose flow, backend or route to it is gone")                  \
    X(FE_HANDSHAKE, "handshakes of clients seen in both directions")                               \
    X(FE_BEGUN, "regions begun")                                                                   \
    X(FE_APPENDED, "regions made longer")                                                          \
    X(FE_UNDONE, "regions taken back, because no byte of them had been sent")                      \
    X(FE_MOVED, "regions that another backend continues")                                          \
    X(FE_TAKEN, "regions ended early, because their server sends the rest itself")                 \
    X(FE_DELIVERED, "words of backends that a region's end was acknowledged")                      \
    X(FE_COMPLETED, "regions complete")                                                            \
    X(FE_CANCELLED, "regions cancelled")                                                           \
    X(FE_CLIENT_RESET, "regions ended by the client's reset")                                      \
    X(FE_REFUSED_PEER, "SHUNT_BEGIN refused: no such peer, or it is down")                         \
    X(FE_REFUSED_FAMILY, "SHUNT_BEGIN refused: the peer has no sender of that IP version")         \
    X(FE_REFUSED_CLIENT, "SHUNT_BEGIN refused: the client is this machine itself, or link-local")  \
    X(FE_REFUSED_ACTIVE, "SHUNT_BEGIN refused: a region is active")                                \
    X(FE_REFUSED_ENDED, "SHUNT_BEGIN refused: the connection was cancelled or reset")              \
    X(FE_REFUSED_UNSENT, "SHUNT_BEGIN refused: the server's own bytes have not all left")          \
    X(FE_REFUSED_UNPROVEN, "SHUNT_BEGIN refused: no proof that its packets pass here")             \
    X(FE_REFUSED_ARGUMENT, "SHUNT_BEGIN refused: bad argument or socket")                          \
    X(FE_REFUSED_FULL, "SHUNT_BEGIN refused: the flow table is full")                              \
    X(FE_REFUSED_OLDER, "SHUNT_BEGIN refused: another layout steers the connection, or may")       \
    X(FE_EVENT_LOST, "completions and answers that found their ring full or gone")                 \
    X(BE_OUT_SENT, "sender segments given the frontend's address")                                 \
    X(BE_IN_STEERED, "steered ACKs delivered to a sender")                                         \
    X(BE_IN_AHEAD, "steered ACKs of bytes that an earlier sender had sent")                        \
    X(BE_IN_TOO_BIG, "steered reports of a smaller path MTU delivered to a sender")                \
    X(BE_DELIVERED, "ACKs of a payload's end that the backend's agent was told of")                \
    X(BE_DELIVERED_LOST, "ACKs of a payload's end that the agent did not read in time")            \
    X(BE_DROP_STRAY_IN, "dropped: a steered packet for no live sender")                            \
    X(BE_DROP_UNSENT, "dropped: a steered packet that acknowledges bytes that have not been sent") \
    X(BE_DROP_STRANGE, "dropped: a steered packet with a sequence number far from the last")       \
    X(BE_DROP_STRAY_OUT, "dropped: a segment of a closed sender")                                  \
    X(BE_DROP_FIN, "dropped: FIN or RST of a sender's socket")                                     \
    X(BE_DROP_REWRITE, "dropped: a packet could not be rewritten")                                 \
    X(BE_ORPHAN_RESET, "resets sent for sockets that no process has open any more")                \
    X(BE_STRIPPED, "steered packets with data, stripped")

enum steer_counter {
#define STEER_COUNTER_ENUM(name, meaning) name,
    STEER_COUNTER_LIST(STEER_COUNTER_ENUM)
#undef STEER_COUNTER_ENUM
        STEER_COUNTERS
};

#endif
