/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * Interface between a server and Shunt on one machine. It has three parts: socket options of the
 * server's own connections (SHUNT_SOL), messages to the agent (over SOCK_SEQPACKET), and the memory
 * that the two share (board, counters, completion ring). The Rust twins are in crates/wire
 * (options.rs, local.rs, flow.rs, reason.rs); crates/wire/tests/header.rs fails if a number, a
 * size, a field or an offset differs, or if only one of the two has it.
 *
 * Words: a *peer* is another machine's agent. A *handoff* lets a peer send a payload, the body of
 * one response, on a client's connection. A *region* is the range of the connection's sequence
 * numbers that the payload takes. A *frontend* has the client's connection, a *backend* has the
 * body. A *consent* is a request's header field by which the frontend says that it can hand off. An
 * *offer* is a payload that a backend holds ready. Its *tag* proves for which request it was made.
 * A *claim* is the frontend's message that asks the backend for it. A *fetch* brings a payload
 * through both agents to the frontend's server, as a stream. To *relay* a body is to send it
 * through all tiers, as without Shunt. A *session* is the use of a connection between two agents. A
 * *store* has the payloads of a machine's programs under `shunt run`, and a *reference* names bytes
 * of one of them.
 *
 * Addresses are 16 bytes, IPv4 as ::ffff:a.b.c.d. Ports and addresses are in network order, struct
 * shunt_part is little-endian, and all else is in the order of the machine, because it stays there.
 */
#ifndef SHUNT_H
#define SHUNT_H

#ifndef __BPF__
#include <stdint.h>
typedef uint8_t shunt_u8;
typedef uint16_t shunt_u16;
typedef uint32_t shunt_u32;
typedef uint64_t shunt_u64;
typedef int64_t shunt_s64;
#else
#include <linux/types.h>
typedef __u8 shunt_u8;
typedef __u16 shunt_u16;
typedef __u32 shunt_u32;
typedef __u64 shunt_u64;
typedef __s64 shunt_s64;
#endif

/* Within a version, messages and structs in shared memory may grow at their end. A reader skips
 * fields that it does not know. A field that an older writer leaves out counts as zero. */
#define SHUNT_VERSION        7
#define SHUNT_VERSION_OLDEST 7 /* oldest version that is still spoken */

/*
 * ---- the kernel: setsockopt on a client's connection ----
 *
 * The steering programs (BPF, crates/handoff) answer these calls; no kernel protocol does. Only the
 * owner of a socket can make them, so only the owner of a connection can hand it off. The calls
 * fail with ENOPROTOOPT if the programs are not loaded.
 *
 * Answers longer than an errno are records in the caller's ring (below). They are there when the
 * call returns, and wake nobody. A getsockopt would be more natural. But a BPF program on it slows
 * every getsockopt of every process in the cgroup, and a proxy makes one for each request.
 */
#define SHUNT_SOL 0x53485554 /* "SHUT" */

/*
 * setsockopt(SHUNT_BEGIN, struct shunt_begin): the next `length` bytes of the connection come from
 * `peer`. The server writes nothing until the region is complete. A struct shunt_state is in the
 * ring afterwards.
 *
 * EPERM: no such peer or ring, a region still active, length 0, bytes of the server's own that have
 * not been sent yet, or another reason. The ring then has a struct shunt_state if a later
 * SHUNT_BEGIN may succeed. Only the `handoff`, `kind` and `status` of this record are not zero. The
 * status says where a later SHUNT_BEGIN may succeed:
 *
 *   SHUNT_REGION_UNPROVEN   on this connection: there is no proof that the client's packets pass
 *                           the steering programs as this socket numbers them
 *   SHUNT_REGION_UNSENT     on this connection
 *   SHUNT_REGION_NO_PEER,   to another peer
 *   SHUNT_REGION_FAMILY
 *
 * Without this record, a later SHUNT_BEGIN on this connection would usually be refused, too.
 */
#define SHUNT_BEGIN  1
/* setsockopt(SHUNT_CANCEL, any u32): ends the active region, if any. The steering programs no
 * longer pass the client's ACKs of the region on to its peer, except reports of duplicates and
 * resets. The connection cannot continue after that: the server may only reset it. */
#define SHUNT_CANCEL 2
/* setsockopt(SHUNT_STATE, u32 ring): puts a struct shunt_state of this connection's newest region
 * into the ring, as SHUNT_BEGIN does. EPERM: no such ring. */
#define SHUNT_STATE  3
/* setsockopt(SHUNT_MOVE, struct shunt_move): another peer continues the active region from its byte
 * `from` on. A struct shunt_state is in the ring afterwards; its `start` is the sequence number of
 * that byte. The region keeps its bounds: it is complete when the client has all of its bytes.
 * EPERM: no region is active, the region has no byte `from`, or no such peer or ring. */
#define SHUNT_MOVE   4
/* setsockopt(SHUNT_APPEND, struct shunt_begin): as SHUNT_BEGIN, but the server may write more. Its
 * bytes, and a FIN, wait in the connection's own queue until the client has acknowledged the
 * region. If `handoff` has an active region already, and nothing was written behind it, that region
 * grows by `length` instead (and the ring gets no shunt_state). */
#define SHUNT_APPEND 5
/* setsockopt(SHUNT_UNDO, u64 handoff): removes a handoff's region that SHUNT_APPEND made. EPERM:
 * the client has some of the region, or something was written behind it. */
#define SHUNT_UNDO   6

/* setsockopt(SHUNT_WATCH, any u32): connections to this socket's port may be handed off, so the
 * steering programs note their handshakes from now on. Best called on a listening socket before its
 * first client. Otherwise, noting begins with the first SHUNT_BEGIN on the port that is refused
 * because there is no proof (SHUNT_REGION_UNPROVEN). EPERM: not TCP. */
#define SHUNT_WATCH 7
/* setsockopt(SHUNT_TAKE, struct shunt_take): ends a handoff's active region, made by SHUNT_BEGIN,
 * at what the client has acknowledged; the server writes the rest itself. A struct shunt_state is
 * in the ring afterwards, whose `acked` says where the region ends. The region's peer may still
 * send, so the server must write the same bytes as the peer would. EPERM: no such ring, the region
 * is not active, or what the client has is not what `when` requires. */
#define SHUNT_TAKE  8

/* On-demand buffers: the BPF programs of crates/negotiation answer this option and the next four.
 * setsockopt(SHUNT_SPEAK, u32), with a value other than 0, before connect or listen: this socket's
 * handshakes tell other machines of the service that its program runs under Shunt. With 0 before
 * connect or listen, they do not tell it. With 0 on a listening socket, its later handshakes do not
 * tell it any more. Neither do those of other listeners at the same address and port. A listener at
 * all addresses stands for its port at each address, in every network namespace of the cgroup. This
 * last call needs no permission: any process that has the listening socket may make it.
 * ENOPROTOOPT: these programs are not loaded, or have not marked the listener. EPERM: not TCP, the
 * user is not allowed to, or the listener could not be counted: then try again. */
#define SHUNT_SPEAK     16
/* setsockopt(SHUNT_SPEAKS, any u32) on a connection: returns 0 if both ends have said in the
 * handshake that they run under Shunt, else EPERM or ENOPROTOOPT. */
#define SHUNT_SPEAKS    17
/* setsockopt(SHUNT_ENDED, cookie: u64) on any TCP socket. The cookie (SO_COOKIE) is that of a
 * connection on which SHUNT_SPEAKS returned 0. A frame is a run of bytes, or a reference that
 * stands for bytes. An account of a connection is what a program knows of its frames. Returns 0 if
 * every descriptor of that connection is closed and the caller's user has an account of it. It
 * returns 0 to that user's programs once for each SHUNT_ADOPT of theirs that returned 0. It also
 * returns 0 once for each account that they took by getsockopt(SHUNT_CARRY). */
#define SHUNT_ENDED     18
/* setsockopt(SHUNT_ADOPT, u32) on a connection on which SHUNT_SPEAKS returns 0: returns 0, once, to
 * the program that begins to keep account of the connection's frames. EPERM: a program keeps
 * account of them already, or SHUNT_SPEAKS would fail, too. With the value SHUNT_ADOPT_TOO it
 * returns 0 even if another program keeps account already. SHUNT_ENDED then tells the caller, too,
 * when the connection has ended. */
#define SHUNT_ADOPT     19
#define SHUNT_ADOPT_TOO 2
/* setsockopt(SHUNT_CARRY, SHUNT_CARRIED_BYTES of the account) leaves the account with its
 * connection; getsockopt takes it away again, once. So the account passes with the socket from one
 * user's programs to another's. EPERM, ENOPROTOOPT: SHUNT_SPEAKS would fail, too, or no account was
 * left. */
#define SHUNT_CARRY     20

#define SHUNT_CARRIED_BYTES 304

struct shunt_begin {
    shunt_u32 peer;    /* the sender: index into the board */
    shunt_u32 ring;    /* number of the ring (shunt_welcome) for the completion and other records */
    shunt_u64 handoff; /* the caller's name for the handoff, returned in the ring's records */
    shunt_u64 length;  /* bytes, at least 1 and less than 2^48 */
};

struct shunt_move {
    shunt_u32 peer;
    shunt_u32 ring;
    shunt_u64 handoff; /* the handoff's new name; messages under its old name come too late */
    shunt_u64 from;    /* offset in the region: the new peer sends from this byte on */
};

/* Conditions of SHUNT_TAKE: how much of the region the client's newest packet acknowledges. */
#define SHUNT_TAKE_ALWAYS 0
#define SHUNT_TAKE_WHOLE  1 /* only if the client has all of the region */
#define SHUNT_TAKE_NONE   2 /* only if the client has nothing of it */

struct shunt_take {
    shunt_u32 ring;
    shunt_u32 when; /* SHUNT_TAKE_* */
    shunt_u64 handoff;
};

#define SHUNT_REGION_NONE      0
#define SHUNT_REGION_ACTIVE    1
#define SHUNT_REGION_COMPLETE  2
#define SHUNT_REGION_CANCELLED 3
/* Answers to a SHUNT_BEGIN that was refused. */
#define SHUNT_REGION_UNPROVEN  4 /* no proof that packets pass the steering programs */
#define SHUNT_REGION_UNSENT    5 /* not all of the server's own bytes have been sent */
#define SHUNT_REGION_NO_PEER   6 /* the peer is not connected now */
#define SHUNT_REGION_FAMILY    7 /* the peer does not send in the client's IP version */

/* State of a client's connection when the region began, or moved to another peer. The peer needs it
 * to send on the connection. */
struct shunt_flow {
    shunt_u8 client_address[16];
    shunt_u8 server_address[16];
    shunt_u16 client_port; /* network order */
    shunt_u16 server_port; /* network order */
    shunt_u32 start;     /* client-visible sequence number of the first byte that the peer sends */
    shunt_u32 rcv_nxt;   /* acknowledgment number that the payload's segments carry */
    shunt_u32 tsval;     /* the frontend's timestamp clock, not behind what the client has echoed */
    shunt_u32 ts_recent; /* the client's newest timestamp */
    shunt_u32 snd_wnd;   /* the client's window, bytes from `start` on */
    shunt_u32 snd_cwnd;  /* congestion window, segments */
    shunt_u32 snd_ssthresh; /* slow-start threshold, segments */
    shunt_u32 srtt_us;      /* smoothed RTT in microseconds, not shifted; 0: no sample */
    shunt_u32 ack_spacing;  /* payload bytes between two ACKs that go to the backend; 0: all go */
    shunt_u32 ahead; /* bytes from `start` on that the client may have from another peer (MOVE) */
    shunt_u32 token; /* random, of this connection: proves where steered packets come from */
    shunt_u16 mss;   /* largest segment in bytes, without options */
    shunt_u8 snd_wscale; /* shift of the client's window field (RFC 7323, 2) */
    shunt_u8 rcv_wscale; /* shift of the frontend's window field */
    shunt_u8 options;    /* SHUNT_OPTION_* */
    /* 1: the first region of this connection. A socket that the peer already has for these
     * addresses and ports is of an older connection. */
    shunt_u8 first;
    shunt_u8 pad[2];
};

/* Record of the ring: a connection's newest region. It begins like a struct shunt_event. */
struct shunt_state {
    shunt_u64 handoff;
    shunt_u64 acked;   /* bytes of the region that the client's newest packet acknowledges */
    shunt_u32 kind;    /* SHUNT_EVENT_STATE */
    shunt_u32 status;  /* SHUNT_REGION_* */
    shunt_u32 regions; /* number of regions that this connection has begun, this one included */
    struct shunt_flow flow;
    shunt_u8 answered; /* number of keepalive probes that the client has answered, modulo 256 */
    shunt_u8 shut;     /* 1: the client lacks bytes, and its window has no room for a segment */
    shunt_u8 pad[2];
};

/* Bits of shunt_flow.options. The first three: the connection has negotiated this TCP option (RFC
 * 7323, RFC 2018). */
#define SHUNT_OPTION_TIMESTAMPS 1
#define SHUNT_OPTION_SACK       2
#define SHUNT_OPTION_WSCALE     4
#define SHUNT_OPTION_DIGEST     8 /* a server asks for the digest (SHA-256) of the file */
/* The region is longer than the window that the client had for it, or than 1 MiB, and SHUNT_BEGIN
 * made it. Then the client's ACK of the region's end alone does not complete it: the peer must also
 * confirm that all of it was sent and acknowledged. */
#define SHUNT_OPTION_WORD       16

/* ---- the completion ring: a BPF ring buffer (kernel/bpf/ringbuf.c), mapped by the worker ---- */
/* Kinds of records. The first two are a struct shunt_event. */
#define SHUNT_EVENT_COMPLETE 1 /* the client has the whole region */
#define SHUNT_EVENT_RESET    2 /* the client has reset the connection while the region was active */
#define SHUNT_EVENT_STATE    3 /* answer to BEGIN, APPEND, MOVE, TAKE, STATE: struct shunt_state */

struct shunt_event {
    shunt_u64 handoff; /* the server's name for the handoff */
    shunt_u64 acked;   /* bytes of its region that the client has acknowledged */
    shunt_u32 kind;    /* SHUNT_EVENT_* */
    shunt_u32 pad;
};

/*
 * ---- the board: which peers are there, read without a system call ----
 *
 * A memfd that the agent writes and workers map read-only. A peer's `epoch` is a sequence lock: it
 * is odd while the peer's entry changes, which takes microseconds, and readers then try again. A
 * copy of an entry is valid if its `state` is UP or LOST, and if `epoch` had the same even value
 * before and after the copy was made.
 */
#define SHUNT_BOARD_MAGIC 0x53424f41u
#define SHUNT_BOARD_PEERS 256
#define SHUNT_NAME_BYTES  64

#define SHUNT_FAMILY_IPV4 1
#define SHUNT_FAMILY_IPV6 2

#define SHUNT_PEER_DOWN 0 /* never connected, or no longer trusted: no keys */
#define SHUNT_PEER_UP   1
#define SHUNT_PEER_LOST 2 /* no session now; payloads offered before can still be fetched */

/* Bits of `closed`: a limit is reached, the agent is draining, or the peer takes no offers now. So
 * new responses are relayed. `epoch` stays the same when `closed` changes, so handoffs that have
 * begun are not affected. */
#define SHUNT_CLOSED_OFFERS   1 /* make no offers */
#define SHUNT_CLOSED_HANDOFFS 2 /* give no consents */

/* Largest number of prefixes in a peer's entry. */
#define SHUNT_PREFIXES_MAX 64

/* Addresses of servers: a prefix, with one port or all ports. */
struct shunt_prefix {
    shunt_u8 address[16];
    shunt_u8 bits; /* prefix length in bits; 96 is added to that of an IPv4 prefix */
    shunt_u8 pad;
    shunt_u16 port; /* network order; 0: all */
};

struct shunt_board_peer {
    shunt_u32 epoch;    /* grows by 2 when a session begins or ends, and with new prefixes; odd
                         * while the entry changes */
    shunt_u32 state;    /* SHUNT_PEER_* */
    shunt_u32 closed;   /* SHUNT_CLOSED_OFFERS: make no offers to this peer */
    shunt_u32 families; /* SHUNT_FAMILY_* of clients that the peer can send to; changes without
                         * `epoch` */
    shunt_u8 name[SHUNT_NAME_BYTES]; /* NUL-padded */
    shunt_u8 our_key[16];            /* for tags of offers that this machine makes to the peer */
    shunt_u8 their_key[16];          /* for tags of offers that the peer makes to this machine */
    shunt_u32 prefixes;              /* number of entries of `prefix` that are valid */
    /* Addresses of this machine's servers that the peer may use as its source address. */
    struct shunt_prefix prefix[SHUNT_PREFIXES_MAX];
};

struct shunt_board {
    shunt_u32 magic;
    shunt_u16 oldest; /* oldest and newest version that the agent speaks */
    shunt_u16 newest;
    shunt_u32 peers_at;   /* byte offset of `peer`; fields beyond it are not on this board */
    shunt_u32 peer_bytes; /* bytes from one entry of `peer` to the next */
    shunt_u32 alive;      /* 1; the agent sets 0 when it ends, unless it is killed */
    shunt_u32 frontend;   /* 1: the steering programs are loaded, and SHUNT_BEGIN works */
    shunt_u32 backend;    /* 1: the agent accepts offers */
    shunt_u32 offer_lifetime_ms;
    shunt_u32 closed;   /* SHUNT_CLOSED_*, for all peers */
    shunt_u32 families; /* SHUNT_FAMILY_* of clients that some connected backend can send to */
    shunt_u32 beat;  /* the agent counts this up ten times a second, unless it is stopped or gone */
    shunt_u32 peers; /* number of entries of `peer` in use */
    shunt_u64 netns; /* cookie of the agent's network namespace (SO_NETNS_COOKIE); 0: not known */
    shunt_u8 name[SHUNT_NAME_BYTES]; /* name of this machine's agent, NUL-padded */
    struct shunt_board_peer peer[SHUNT_BOARD_PEERS];
};

/* ---- counters: a memfd per worker, summed by the agent ----  */
#define SHUNT_COUNTERS    64
#define SHUNT_TRACE_BYTES 16 /* length of a W3C trace-id; an id of zeros: none */
/* clang-format off */
/* index, name in `shunt stats`, meaning */
#define SHUNT_COUNTER_LIST(X)                                                                       \
    X(0, shortcuts, "responses whose body bypassed this frontend")                                  \
    X(1, shortcut_bytes, "payload bytes of shortcuts that the client acknowledged")                 \
    X(2, offers, "bodies that this backend offered")                                                \
    X(3, offered_bytes, "bytes of the bodies that this backend offered")                            \
    X(4, fetched, "responses relayed by fetching an offer")                                         \
    X(5, aborted, "shortcuts that ended before the client had everything")                          \
    X(6, forged_request_field, "Shunt-* fields from a client, stripped")                            \
    X(7, relayed_no_agent, "relayed: no agent on this machine")                                     \
    X(8, relayed_no_consent, "relayed by the backend: no tier before it consented")                 \
    X(9, relayed_no_peer, "relayed by the backend: the frontend's agent is not connected")          \
    X(10, relayed_too_small, "relayed by the backend: shorter than shunt_offer_min_length")         \
    X(11, relayed_type, "relayed by the backend: not one of shunt_offer_types")                     \
    X(12, relayed_not_file, "relayed by the backend: the body is not one range of a file")          \
    X(13, relayed_agent_busy, "relayed by the backend: the agent does not take offers fast enough") \
    X(14, relayed_cache, "not consented: the response may be stored here")                          \
    X(15, relayed_protocol, "not consented: HTTP/2 or not a TCP client")                            \
    X(16, relayed_limit_rate_after, "not consented: limit_rate_after is set")                       \
    X(17, fetched_filter, "fetched: a filter needs the body")                                       \
    X(18, fetched_unsent, "fetched: the connection had unsent bytes")                               \
    X(19, fetched_begin, "fetched: the kernel refused SHUNT_BEGIN, or did not answer")              \
    X(20, fetched_expired, "fetched: the offer may have expired")                                   \
    X(21, refused_untrusted, "refused: the upstream is not in shunt_trust")                             \
    X(22, refused_malformed, "refused: the Shunt-Payload field cannot be read")                         \
    X(23, refused_unknown_peer, "refused: it names an agent that is not configured or was never connected") \
    X(24, refused_tag, "refused: its tag is wrong (forged, foreign, used before, or another length)")   \
    X(25, refused_body, "refused: an offer with a body")                                                \
    X(26, fetch_failed, "fetches that failed")                                                      \
    X(27, relayed_untrusted_request, "not consented: method or request not eligible")               \
    X(28, relayed_limit_rate, "relayed: limit_rate or limit_conn of the backend, the frontend's proxy_limit_rate, an intermediate's limits") \
    X(29, relayed_not_worth, "not consented: bodies in that location are short")                    \
    X(30, failovers, "payloads that another backend continued")                                     \
    X(31, failover_failed, "payloads that were lost with their backend, and that no other backend continued") \
    X(32, failover_unproven, "aborted because no digest proved that another backend has the same bytes") \
    X(36, relayed_speaks_for, "not consented: no backend may speak for this server address (speaks_for)") \
    X(33, fetched_speaks_for, "fetched: the backend may not speak for this server address (speaks_for)") \
    X(59, fetched_family, "fetched: the backend does not send to clients of that IP version")   \
    X(34, fetched_refused, "fetched: the backend's agent refused the handoff before its first byte")        \
    X(35, relayed_stopped, "shortcuts and fetches whose rest was relayed, because their agents could not continue") \
    X(37, relayed_vain, "not consented: the last consents in that location led to no shortcut")     \
    X(38, relayed_no_trust, "not consented: shunt on without shunt_trust")                       \
    X(39, relayed_filter, "not consented, or requested again by an intermediate: a filter here needs the body") \
    X(47, asked_again, "responses requested once more without consent, because their offer could not be used") \
    X(40, relayed_handoffs_limit, "not consented: this machine's limit of handoffs or fetches is reached")     \
    X(41, relayed_offers_limit, "relayed by the backend: its own or the frontend's limit of offers is reached") \
    X(42, relayed_tiers, "not consented by this intermediate: too many tiers are on the path")      \
    X(43, aborted_reset, "aborted: the client reset the connection")                                \
    X(44, aborted_timeout, "aborted: the client acknowledged nothing for send_timeout")             \
    X(45, aborted_agent, "aborted: an agent ended the shortcut; agent.ended has the reason")        \
    X(46, aborted_closed, "aborted: the client or nginx closed the connection")                     \
    X(48, relayed_family, "not consented: no backend sends to clients of that IP version")            \
    X(49, relayed_short_lived, "relayed by the backend: too short for the only shortcut of its connection") \
    X(50, relayed_tls_version, "not consented: TLS before 1.3")                                     \
    X(51, relayed_tls_early, "not consented: the TLS handshake is not complete (0-RTT)")            \
    X(52, relayed_tls_suite, "not consented: a cipher suite that cannot be handed over")            \
    X(53, relayed_tls_kernel, "not consented: the kernel encrypts this connection (kTLS)")          \
    X(54, relayed_tls_budget, "not consented: the client would reject more KeyUpdates")             \
    X(55, fetched_tls, "fetched: the TLS connection's keys could not be handed over")               \
    X(56, fetched_no_session, "fetched: the backend's agent is not connected now")                   \
    X(57, fetched_unproven, "fetched: no proof that the client's packets pass the steering programs") \
    X(58, relayed_plain, "relayed: the consent passed a tier without Shunt (shunt_trust plain)")    \
    X(60, relayed_header, "relayed: an earlier tier has no room for a header with an offer (proxy_buffer_size)") \
    X(61, relayed_long_request, "relayed: the upstream answered 400 or 431, perhaps because a consent made the request too long") \
    X(62, relayed_stalled, "shortcuts whose rest was relayed, because nothing more reached a client that was there and had room")
/* clang-format on */

struct shunt_counters {
    shunt_u64 value[SHUNT_COUNTERS];
    /* Number of this worker's handoffs that are not over, by the peer's index on the board. Each
     * worker writes its own counters; the agent compares the workers' sum with its limits. */
    shunt_u32 handoffs[SHUNT_BOARD_PEERS];
};

/*
 * ---- messages between a server and its agent: SOCK_SEQPACKET ----
 *
 * A packet holds one message or several, one after the other. It has at most SHUNT_PACKET_BYTES;
 * only the text of STATS_TEXT may be longer. A packet with a descriptor holds one message.
 */
#define SHUNT_PACKET_BYTES 4096
#define SHUNT_MSG_HELLO    1 /* server to agent; only SHUNT_MSG_STATS may come before it */
#define SHUNT_MSG_WELCOME \
    2 /* answer to HELLO; descriptors: board, counters, ring (ring on control connections only) */
#define SHUNT_MSG_OFFER   3 /* on an offers connection; one descriptor: the file */
#define SHUNT_MSG_HANDOFF 4 /* control connection, after SHUNT_BEGIN or SHUNT_MOVE */
#define SHUNT_MSG_ABORT   5 /* control connection: the server has given up a handoff */
#define SHUNT_MSG_ENDED   6 /* agent to server: a handoff or fetch ended without success */
#define SHUNT_MSG_FETCH   7 /* control connection: asks for the payload of an offer as a stream */
#define SHUNT_MSG_FETCHED \
    8 /* answer to FETCH; one descriptor: a socket that yields `length` bytes, then EOF */
#define SHUNT_MSG_STATS         9 /* asks for counters; any connection, even as its first message */
#define SHUNT_MSG_STATS_TEXT    10 /* answer to STATS: struct shunt_header, then JSON */
/* Control connection, after SHUNT_APPEND: struct shunt_handoff (with `offer` 0), then 1 to
 * SHUNT_PARTS_MAX struct shunt_part, which are the payload's parts in the peer's store. */
#define SHUNT_MSG_HANDOFF_PARTS 11
/* Control connection: no peer sends the payload of a handoff (SHUNT_APPEND), and the server no
 * longer has its connection. So the agent is to reset the client. */
#define SHUNT_MSG_CANCEL        12
/* Control connection: asks whether a peer would send bytes of its store on a connection. */
#define SHUNT_MSG_ASK           13
/* Answer to ASK; or, without a question: a handoff waits until the peer can send more. */
#define SHUNT_MSG_ANSWER        14
/* Control connection: asks for the digest (SHA-256) of the file behind an offer, before the offer
 * is claimed. */
#define SHUNT_MSG_PROVE         15
/* Answer to PROVE. Or, without a question: the digest of the file that is sent for a handoff with
 * SHUNT_OPTION_DIGEST, or the news that this digest is no longer true. */
#define SHUNT_MSG_DIGEST        16
/* Control connection: the server has forgotten a handoff's digest, as DIGEST told it to. */
#define SHUNT_MSG_WITHDRAWN     17

/* Purposes of a server's connection with its agent: handoffs and fetches (control), or offers. */
#define SHUNT_CHANNEL_CONTROL 1
#define SHUNT_CHANNEL_OFFERS  2

/* Reasons why a handoff or a fetch ended, or a session was closed. */
#define SHUNT_REASON_UNKNOWN_OFFER 1
#define SHUNT_REASON_EXPIRED       2
#define SHUNT_REASON_TAG           3
#define SHUNT_REASON_LENGTH        4
#define SHUNT_REASON_FILE_CHANGED  5
#define SHUNT_REASON_SOCKET        6 /* a system call of the sender failed */
#define SHUNT_REASON_PEER_LOST     7
#define SHUNT_REASON_NO_PROGRESS   8
#define SHUNT_REASON_LIMIT         9
#define SHUNT_REASON_MALFORMED     10
#define SHUNT_REASON_VERSION       11
#define SHUNT_REASON_ABORTED       12
#define SHUNT_REASON_BUSY          13 /* the backend already sends on that flow */
#define SHUNT_REASON_CLIENT_GONE   14
#define SHUNT_REASON_NOT_ALLOWED   15 /* an agent's configuration forbids it */
/* The client receives nothing of this backend's payload, or the client's ACKs do not come back. The
 * offer is still there, and can be fetched. */
#define SHUNT_REASON_UNREACHABLE   16

struct shunt_header {
    shunt_u32 kind; /* SHUNT_MSG_* */
    shunt_u32 size; /* bytes of the whole message, this header included */
};

struct shunt_hello {
    struct shunt_header header;
    /* Oldest and newest version that the server speaks; both sides use the newest common one. */
    shunt_u16 oldest;
    shunt_u16 newest;
    shunt_u32 channel;  /* SHUNT_CHANNEL_* */
    shunt_u64 features; /* one bit for each feature that needs the agent's help; none yet */
};

struct shunt_welcome {
    struct shunt_header header;
    shunt_u32 worker; /* worker number of this connection: the upper half of its offers' numbers */
    shunt_u32 ring;   /* number of the ring, for shunt_begin; 0xffffffff: the connection has none */
    shunt_u32 version; /* version that both sides speak */
    shunt_u32 pad;
    shunt_u64 features; /* features that the agent knows, a bit each; none yet */
};

/* Flag of an offer: somebody may rewrite bytes of the file before `offset`, which also changes the
 * file's time. So the agent only compares the file's size. */
#define SHUNT_OFFER_BODY 1

struct shunt_offer {
    struct shunt_header header;
    shunt_u32 peer;   /* the frontend that may claim it: index into the board */
    shunt_u32 flags;  /* SHUNT_OFFER_* */
    shunt_u64 number; /* worker << 32 | count: unique in the agent's lifetime */
    shunt_u64 offset; /* offset of the payload in the file, bytes */
    shunt_u64 length;
    shunt_u8 tag[16];
    shunt_u8 trace[SHUNT_TRACE_BYTES];
    shunt_s64 mtime_ns; /* st_mtim of the file when the response's header was made */
    shunt_u64 size;     /* size of the file at that time, bytes */
};

/*
 * One generation of a TLS 1.3 connection's write keys (RFC 8446, 7.3), for the records of a
 * payload. A generation lasts from one KeyUpdate to the next. The frontend sends the KeyUpdate that
 * ends it. A process that gets the keys uses them or passes them on, and then overwrites its copy.
 */
struct shunt_tls {
    shunt_u16 suite;         /* cipher suite's IANA number; 0: the connection is not encrypted */
    shunt_u16 content_bytes; /* largest content of a record in bytes, without the inner type */
    shunt_u16 skip; /* bytes of the first record that the client has from another backend */
    shunt_u16 pad;
    shunt_u64 record; /* number of the payload's first record */
    shunt_u8 iv[12];
    shunt_u8 key[32]; /* the suite says how many bytes are used; the rest is 0 */
    shunt_u8 pad2[4];
};

struct shunt_handoff {
    struct shunt_header header;
    shunt_u32 peer;  /* the backend: index into the board */
    shunt_u32 epoch; /* epoch of the peer's entry when the offer was checked */
    shunt_u32 bytes; /* size of this struct, which is the parts' offset in HANDOFF_PARTS */
    shunt_u32 pad;
    shunt_u64 handoff;
    shunt_u64 offer;
    shunt_u64 length;
    shunt_u64 rate; /* bytes a second; 0: no limit */
    shunt_u8 tag[16];
    shunt_u8 trace[SHUNT_TRACE_BYTES];
    struct shunt_flow flow; /* from the kernel's answer to the setsockopt: struct shunt_state */
    struct shunt_tls tls;   /* on TLS, `length` is the payload's, shunt_begin.length the records' */
};

#define SHUNT_PARTS_MAX 32

/* Some bytes of a payload in the peer's store: `length` bytes from `offset` on. Segment and slot
 * say which payload, and the secret is that of the reference (crates/odb). Little-endian. */
struct shunt_part {
    shunt_u32 segment;
    shunt_u32 slot;
    shunt_u64 secret;
    shunt_u64 offset;
    shunt_u64 length;
};

struct shunt_cancel {
    struct shunt_header header;
    shunt_u64 handoff;
};

struct shunt_ask {
    struct shunt_header header;
    shunt_u64 handoff; /* the asker's name for the handoff, returned in the answer */
    shunt_u32 peer;    /* index into the board */
    shunt_u32 epoch;   /* epoch of the peer's entry */
    shunt_u8 client_address[16];
    shunt_u8 server_address[16];
    shunt_u16 client_port; /* network order */
    shunt_u16 server_port; /* network order */
    shunt_u32 pad;
};

struct shunt_answer {
    struct shunt_header header;
    shunt_u64 handoff; /* as in ASK, or the handoff that waits */
    shunt_u32 reason;  /* SHUNT_REASON_*; 0: the peer would send */
    shunt_u32 peer;
};

struct shunt_prove {
    struct shunt_header header;
    shunt_u32 peer;    /* index into the board */
    shunt_u32 epoch;   /* epoch of the peer's entry */
    shunt_u64 handoff; /* the asker's name for the handoff, returned in the answer */
    shunt_u64 offer;
    shunt_u64 length;
    shunt_u8 tag[16];
};

struct shunt_digest {
    struct shunt_header header;
    shunt_u64 handoff;   /* as in PROVE, or a handoff in progress */
    shunt_u64 offset;    /* offset of the payload in the file */
    shunt_u32 peer;      /* the backend whose agent tells the digest */
    shunt_u32 known;     /* 0: the digest is not known, or the file has changed since */
    shunt_u8 sha256[32]; /* SHA-256 of the whole file */
};

struct shunt_withdrawn {
    struct shunt_header header;
    shunt_u32 peer;  /* the backend that sends the payload: index into the board */
    shunt_u32 epoch; /* epoch of the peer's entry */
    shunt_u64 handoff;
};

struct shunt_abort {
    struct shunt_header header;
    shunt_u64 handoff;
};

/* Value of shunt_ended.peer: this machine's own agent. A server accepts ENDED only from its own
 * agent or from the agent of the handoff's backend. */
#define SHUNT_NO_PEER 0xffffffffu

struct shunt_ended {
    struct shunt_header header;
    shunt_u64 handoff; /* name of the handoff, or of the fetch */
    shunt_u32 reason;  /* SHUNT_REASON_* */
    shunt_u32 peer;    /* the backend whose agent ended it; SHUNT_NO_PEER: this machine's did */
};

struct shunt_fetch {
    struct shunt_header header;
    shunt_u32 peer; /* the backend: index into the board */
    shunt_u32 pad;
    shunt_u64 fetch; /* the caller's name for the fetch, unique among its fetches and handoffs */
    shunt_u64 offer;
    shunt_u64 length;
    shunt_u8 tag[16];
    shunt_u8 trace[SHUNT_TRACE_BYTES];
};

struct shunt_fetched {
    struct shunt_header header;
    shunt_u64 fetch;
    shunt_u64 length;
};

/*
 * The tag of an offer: SipHash-2-4 with 128-bit output (Aumasson, Bernstein 2012), keyed with the
 * backend's key for the frontend. Its input is the nonce (16 bytes, from the consent), the offer's
 * number and the length (8 bytes each, little-endian).
 *
 * docs/protocols.md has the header fields of HTTP that carry consents and offers.
 */
#define SHUNT_TAG_INPUT_BYTES 32

#endif
