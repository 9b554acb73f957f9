/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * The interface between a server and Shunt on one machine: what a server says to the kernel about
 * its own connections (SHUNT_SOL), what it says to the agent (over SOCK_SEQPACKET), and the memory
 * that they share (board, counters, completion ring). The Rust twin of the messages is
 * crates/wire/src/local.rs; crates/wire/tests/header.rs fails where the two differ in a size or an
 * offset.
 *
 * Addresses are 16 bytes, IPv4 as ::ffff:a.b.c.d. Ports and addresses are in network order, all
 * else in the machine's order: none of this leaves the machine.
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

/* Within a version a message may grow at its end, and so may what is in shared memory: a reader
 * skips what it does not know, and takes what an older writer leaves out for zero. */
#define SHUNT_VERSION        7
#define SHUNT_VERSION_OLDEST 7 /* that is spoken, too */

/* ---- the kernel: setsockopt on a client's connection ----
 *
 * Answered by the steering programs of crates/handoff, not by a kernel protocol. Only the owner of
 * a socket can make these calls, so only the owner of a connection can hand it off. Without Shunt:
 * ENOPROTOOPT.
 *
 * Answers longer than an errno come through the caller's ring (below), where they are when the call
 * returns. They wake nobody. A getsockopt would be the natural way, but a program there costs every
 * getsockopt of every process in the cgroup, and a proxy makes one for each request.
 */
#define SHUNT_SOL 0x53485554 /* "SHUT" */

/* setsockopt(SHUNT_BEGIN, struct shunt_begin): the next `length` bytes of the connection come from
 * `peer`. From here until the region is complete the server writes nothing. A struct shunt_state is
 * in the ring afterwards. EPERM where it is refused: no such peer or ring, a region still active,
 * length 0, or bytes of the server's own that have not left yet. Where another one may do better, a
 * struct shunt_state of otherwise zeros says so by its status: SHUNT_REGION_UNPROVEN, where there
 * is no proof that the client's packets pass the steering programs as this socket numbers them, or
 * SHUNT_REGION_UNSENT, a later one on this connection; SHUNT_REGION_NO_PEER or SHUNT_REGION_FAMILY,
 * one to another peer. Without such an answer it is this connection that cannot be handed off. */
#define SHUNT_BEGIN  1
/* setsockopt(SHUNT_CANCEL, any u32): ends the active region, if any, with no further translation of
 * what the client has not acknowledged; only a reset may follow. */
#define SHUNT_CANCEL 2
/* setsockopt(SHUNT_STATE, u32 ring): a struct shunt_state of this connection's newest region goes
 * into the ring, as it does after SHUNT_BEGIN. EPERM where there is no such ring. */
#define SHUNT_STATE  3
/* setsockopt(SHUNT_MOVE, struct shunt_move): another peer goes on with the active region, from its
 * byte `from` on. A struct shunt_state is in the ring afterwards, whose `start` is that byte's.
 * The region stays what it was: its completion is that of all its bytes. EPERM where no region is
 * active, it has no byte `from`, or as for SHUNT_BEGIN. */
#define SHUNT_MOVE   4
/* setsockopt(SHUNT_APPEND, struct shunt_begin): as SHUNT_BEGIN, but the server may write on: that
 * waits in the connection's own queue, a FIN too, until the client has acknowledged the region.
 * Where nothing was written behind this handoff's region yet, the region grows by `length` instead
 * (and no shunt_state follows). */
#define SHUNT_APPEND 5
/* setsockopt(SHUNT_UNDO, u64 handoff): the region of that handoff, made by SHUNT_APPEND, never was.
 * EPERM where the client has some of it, or something was written behind it. */
#define SHUNT_UNDO   6

/* setsockopt(SHUNT_WATCH, any u32): connections to this socket's port may be handed off, so that
 * their handshakes are noted from here on. Best said of a socket that listens, before its first
 * client; else the first SHUNT_BEGIN on that port says it. EPERM: not TCP. */
#define SHUNT_WATCH 7
/* setsockopt(SHUNT_TAKE, struct shunt_take): the active region of that handoff, made by
 * SHUNT_BEGIN, ends at what the client has acknowledged, and the server writes what follows itself.
 * A struct shunt_state is in the ring afterwards, whose `acked` says where that is. Its peer may
 * send still: what the server writes must be the same bytes. EPERM where that region is not active,
 * or the client has not as much as `when` says. */
#define SHUNT_TAKE  8

/* On-demand buffers, answered by crates/negotiation. setsockopt(SHUNT_SPEAK, u32) before
 * connect or listen: the handshakes of this socket say that its program is under Shunt, to machines
 * of the service. With 0, also of a socket that listens, by whoever has it: they do not from now
 * on, nor do those of other listeners at its address. ENOPROTOOPT: nobody negotiates here; EPERM:
 * not TCP, or of a user who may not. */
#define SHUNT_SPEAK     16
/* setsockopt(SHUNT_SPEAKS, any u32) on a connection: 0 where both ends have said so, else EPERM or
 * ENOPROTOOPT. */
#define SHUNT_SPEAKS    17
/* setsockopt(SHUNT_ENDED, cookie: u64) on any TCP socket: 0, once, where the connection with that
 * cookie (SO_COOKIE), on which both ends have said so, has been closed by all who had it, and the
 * caller's user has an account of it: once for each SHUNT_ADOPT, and for each that was taken. */
#define SHUNT_ENDED     18
/* setsockopt(SHUNT_ADOPT, u32) on such a connection: 0, once, to whoever begins to keep account
 * of its frames; EPERM where somebody has, or as for SHUNT_SPEAKS. With SHUNT_ADOPT_TOO also where
 * somebody has: the caller has something to forget when the connection ends. */
#define SHUNT_ADOPT     19
#define SHUNT_ADOPT_TOO 2
/* setsockopt(SHUNT_CARRY, SHUNT_CARRIED_BYTES of them) leaves that account with such a connection;
 * getsockopt takes it away again, once. EPERM, ENOPROTOOPT: not such a connection, or nothing. So
 * it goes from one user's programs to another's, by the socket that they pass. */
#define SHUNT_CARRY     20

#define SHUNT_CARRIED_BYTES 304

struct shunt_begin {
    shunt_u32 peer;    /* index into the board */
    shunt_u32 ring;    /* welcome.ring: where the completion is reported */
    shunt_u64 handoff; /* the caller's name for it, returned in the event */
    shunt_u64 length;  /* bytes, at least 1 */
};

struct shunt_move {
    shunt_u32 peer;
    shunt_u32 ring;
    shunt_u64 handoff; /* the region's new name: what is said about the old one is said too late */
    shunt_u64 from;    /* payload bytes that need not be sent again */
};

/* As the client's newest packet says. */
#define SHUNT_TAKE_ALWAYS 0
#define SHUNT_TAKE_WHOLE  1 /* only where it has all of the region */
#define SHUNT_TAKE_NONE   2 /* only where it has nothing */

struct shunt_take {
    shunt_u32 ring;
    shunt_u32 when; /* SHUNT_TAKE_* */
    shunt_u64 handoff;
};

#define SHUNT_REGION_NONE      0
#define SHUNT_REGION_ACTIVE    1
#define SHUNT_REGION_COMPLETE  2
#define SHUNT_REGION_CANCELLED 3
/* of a SHUNT_BEGIN that was refused */
#define SHUNT_REGION_UNPROVEN  4 /* for want of proof */
#define SHUNT_REGION_UNSENT    5 /* the server's own bytes have not all left */
#define SHUNT_REGION_NO_PEER   6 /* the peer is not there now */
#define SHUNT_REGION_FAMILY    7 /* the peer does not send in the client's IP version */

/* A client's connection, as whoever sends on it for another has to know it: as it was when the
 * region began, or moved. */
struct shunt_flow {
    shunt_u8 client_address[16];
    shunt_u8 server_address[16];
    shunt_u16 client_port; /* network order */
    shunt_u16 server_port; /* network order */
    shunt_u32 start; /* client-visible sequence number of the first byte that its peer sends */
    shunt_u32 rcv_nxt;
    shunt_u32 tsval;     /* our timestamp clock, not behind what the client has echoed */
    shunt_u32 ts_recent; /* the client's newest timestamp */
    shunt_u32 snd_wnd;   /* bytes that the client takes from `start` on */
    shunt_u32 snd_cwnd;  /* segments */
    shunt_u32 snd_ssthresh;
    shunt_u32 srtt_us;     /* microseconds, not shifted; 0: no sample */
    shunt_u32 ack_spacing; /* bytes between the ACKs that go to the backend; 0: each goes */
    shunt_u32 ahead; /* bytes from `start` on that the client may have from another peer (MOVE) */
    shunt_u32 token; /* of this connection: what steered packets prove by where they come from */
    shunt_u16 mss;   /* bytes, without options */
    shunt_u8 snd_wscale;
    shunt_u8 rcv_wscale;
    shunt_u8 options; /* SHUNT_OPTION_* */
    shunt_u8 first;   /* 1: the first region of this connection. Any older socket for it is stale */
    shunt_u8 pad[2];
};

/* A record of the ring. It begins as a struct shunt_event does. */
struct shunt_state {
    shunt_u64 handoff;
    shunt_u64 acked;   /* payload bytes that the client's newest packet acknowledges */
    shunt_u32 kind;    /* SHUNT_EVENT_STATE */
    shunt_u32 status;  /* SHUNT_REGION_* */
    shunt_u32 regions; /* how many this connection has begun, this one included */
    struct shunt_flow flow;
    shunt_u8 answered; /* keepalive probes of the server, of this connection: modulo 256 */
    shunt_u8 shut;     /* now: the client takes no whole segment of what is left */
    shunt_u8 pad[2];
};

/* Options that the connection negotiated (RFC 7323, 2018). */
#define SHUNT_OPTION_TIMESTAMPS 1
#define SHUNT_OPTION_SACK       2
#define SHUNT_OPTION_WSCALE     4
#define SHUNT_OPTION_DIGEST     8 /* of a handoff: to be told which file its payload is of */
/* Of a region that is longer than the client had room for, or than 1 MiB: what the client
 * acknowledges completes it only with the word of its peer's agent. */
#define SHUNT_OPTION_WORD       16

/* ---- the completion ring: a BPF ring buffer (kernel/bpf/ringbuf.c), mapped by the worker ---- */
#define SHUNT_EVENT_COMPLETE 1 /* the client has the whole region */
#define SHUNT_EVENT_RESET    2 /* the client has reset the connection while the region was active */
#define SHUNT_EVENT_STATE    3 /* the answer to BEGIN, MOVE or STATE: a struct shunt_state */

struct shunt_event {
    shunt_u64 handoff;
    shunt_u64 acked;
    shunt_u32 kind;
    shunt_u32 pad;
};

/* ---- the board: who is there, read without a system call ----
 *
 * A memfd that the agent writes and workers map read-only. A peer's fields are valid while `state`
 * is UP or LOST before and `epoch` is the same before and after reading them (a sequence lock: odd
 * while it changes, which takes microseconds: readers try again).
 */
#define SHUNT_BOARD_MAGIC 0x53424f41u
#define SHUNT_BOARD_PEERS 64
#define SHUNT_NAME_BYTES  64

#define SHUNT_FAMILY_IPV4 1
#define SHUNT_FAMILY_IPV6 2

#define SHUNT_PEER_DOWN 0 /* not seen yet, or not trusted any more: no keys */
#define SHUNT_PEER_UP   1
#define SHUNT_PEER_LOST 2 /* no session now; what it has offered is still to be had by FETCH */

/* Bits of `closed`: a limit is near, and what is new is relayed. A word of its own, which changes
 * without the epoch: what was begun before goes on. */
#define SHUNT_CLOSED_OFFERS   1 /* make no offers */
#define SHUNT_CLOSED_HANDOFFS 2 /* give no consents */

/* Addresses that a machine has as a server: a prefix, of one port or of all. */
#define SHUNT_PREFIXES_MAX 64

struct shunt_prefix {
    shunt_u8 address[16];
    shunt_u8 bits; /* of the address that count; an IPv4 prefix has 96 more than its own */
    shunt_u8 pad;
    shunt_u16 port; /* network order; 0: all */
};

struct shunt_board_peer {
    shunt_u32 epoch;    /* grows by 2 with every session; odd while the entry changes */
    shunt_u32 state;    /* SHUNT_PEER_* */
    shunt_u32 closed;   /* SHUNT_CLOSED_OFFERS: to this peer */
    shunt_u32 families; /* SHUNT_FAMILY_*: of clients that it can send to; a word of its own, too */
    shunt_u8 name[SHUNT_NAME_BYTES]; /* NUL-padded */
    shunt_u8 our_key[16];            /* tags of the offers that this machine makes to that peer */
    shunt_u8 their_key[16];          /* tags of the offers that the peer makes to this machine */
    shunt_u32 prefixes;              /* how many of the next count */
    struct shunt_prefix prefix[SHUNT_PREFIXES_MAX]; /* as which servers the peer sends for us */
};

struct shunt_board {
    shunt_u32 magic;
    shunt_u16 oldest; /* versions that the agent speaks */
    shunt_u16 newest;
    shunt_u32 peers_at; /* where the first entry of `peer` is, bytes: what is before it is there */
    shunt_u32 peer_bytes; /* from one to the next */
    shunt_u32 alive;      /* 1 while the agent runs; 0 after it stopped */
    shunt_u32 frontend;   /* 1: steering is loaded, SHUNT_BEGIN works */
    shunt_u32 backend;    /* 1: offers are taken */
    shunt_u32 offer_lifetime_ms;
    shunt_u32 closed;   /* SHUNT_CLOSED_*: to all */
    shunt_u32 families; /* SHUNT_FAMILY_*: of clients that some connected backend can send to */
    shunt_u32 beat;  /* grows several times a second: an agent whose word stands still is stopped */
    shunt_u32 peers; /* how many entries of `peer` are in use */
    shunt_u64 netns; /* cookie of the agent's network namespace (SO_NETNS_COOKIE); 0: not known */
    shunt_u8 name[SHUNT_NAME_BYTES]; /* of this machine's agent, NUL-padded */
    struct shunt_board_peer peer[SHUNT_BOARD_PEERS];
};

/* ---- counters: a memfd per worker, summed by the agent ----  */
#define SHUNT_COUNTERS    64
#define SHUNT_TRACE_BYTES 16 /* a W3C trace-id; zeros: none */
/* clang-format off */
/* index, name in `shunt stats`, meaning */
#define SHUNT_COUNTER_LIST(X)                                                                       \
    X(0, shortcuts, "responses whose body went past this frontend")                                 \
    X(1, shortcut_bytes, "payload bytes of those that the client acknowledged")                     \
    X(2, offers, "bodies offered by this backend")                                                  \
    X(3, offered_bytes, "their length")                                                             \
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
    X(30, failovers, "payloads that another backend went on with")                                  \
    X(31, failover_failed, "payloads that were lost with their backend: no other went on")          \
    X(32, failover_unproven, "of the aborted: nobody knew whether another backend has the same bytes") \
    X(36, relayed_speaks_for, "not consented: no backend sends as this server address (speaks_for)") \
    X(33, fetched_speaks_for, "fetched: the backend does not send as this server address (speaks_for)") \
    X(59, fetched_family, "fetched: the backend does not send to clients of that IP version")   \
    X(34, fetched_refused, "fetched: the backend's agent refused the handoff before its first byte")        \
    X(35, relayed_stopped, "shortcuts and fetches whose rest was relayed: their agents could not go on")           \
    X(37, relayed_vain, "not consented: the last consents in that location came to nothing")         \
    X(38, relayed_no_trust, "not consented: shunt on without shunt_trust")                       \
    X(39, relayed_filter, "not consented, or asked for again by an intermediate: a filter here needs the body") \
    X(47, asked_again, "responses asked for once more, without consent: their offer could not be used") \
    X(40, relayed_handoffs_limit, "not consented: this machine's limit of handoffs or fetches is reached")     \
    X(41, relayed_offers_limit, "relayed by the backend: a limit of offers, its own or the frontend's") \
    X(42, relayed_tiers, "not consented by this intermediate: too many tiers have")                 \
    X(43, aborted_reset, "of the aborted: the client reset the connection")                         \
    X(44, aborted_timeout, "of the aborted: the client acknowledged nothing for send_timeout")      \
    X(45, aborted_agent, "of the aborted: an agent ended it, agent.ended says why")                 \
    X(46, aborted_closed, "of the aborted: the request ended: the client closed, or nginx did") \
    X(48, relayed_family, "not consented: no backend sends to clients of that IP version")            \
    X(49, relayed_short_lived, "relayed by the backend: too short to be alone on its connection")    \
    X(50, relayed_tls_version, "not consented: TLS before 1.3")                                     \
    X(51, relayed_tls_early, "not consented: the TLS handshake is not complete (0-RTT)")            \
    X(52, relayed_tls_suite, "not consented: a cipher suite that cannot be handed over")            \
    X(53, relayed_tls_kernel, "not consented: the kernel encrypts this connection (kTLS)")          \
    X(54, relayed_tls_budget, "not consented: the client would take more KeyUpdates amiss")         \
    X(55, fetched_tls, "fetched: the TLS connection's keys could not be handed over")               \
    X(56, fetched_no_session, "fetched: the backend's agent is not connected now")                   \
    X(57, fetched_unproven, "fetched: no proof that the client's packets pass the steering programs") \
    X(58, relayed_plain, "relayed: the consent came past a tier that does not count itself (shunt_trust plain)") \
    X(60, relayed_header, "relayed: a tier before has no room for the header with an offer in it (proxy_buffer_size)") \
    X(61, relayed_long_request, "relayed: the upstream answered 400 or 431, perhaps because a consent made the request too long") \
    X(62, relayed_stalled, "shortcuts whose rest was relayed: their client had room and answered, and got nothing more")
/* clang-format on */

struct shunt_counters {
    shunt_u64 value[SHUNT_COUNTERS];
    /* Handoffs that this worker has begun and that are not over, by the peer's index on the board.
     * Each only its own: the agent holds the sum against its limits. */
    shunt_u32 handoffs[SHUNT_BOARD_PEERS];
};

/* ---- messages between a server and its agent: SOCK_SEQPACKET ----
 *
 * A packet holds one message, or several one after the other, at most SHUNT_PACKET_BYTES; one with
 * a descriptor holds one.
 */
#define SHUNT_PACKET_BYTES 4096
#define SHUNT_MSG_HELLO    1 /* server to agent, first on every connection */
#define SHUNT_MSG_WELCOME \
    2 /* its answer; descriptors: board, counters, ring (control connections only) */
#define SHUNT_MSG_OFFER   3 /* offers connection; one descriptor: the file */
#define SHUNT_MSG_HANDOFF 4 /* control connection, after SHUNT_BEGIN */
#define SHUNT_MSG_ABORT   5 /* control: the server gave a handoff up */
#define SHUNT_MSG_ENDED   6 /* agent to server: a handoff or fetch ended without success */
#define SHUNT_MSG_FETCH   7 /* control: the payload of an offer, please, as a stream */
#define SHUNT_MSG_FETCHED \
    8 /* its answer; one descriptor: a socket that yields `length` bytes, then EOF */
#define SHUNT_MSG_STATS         9  /* any connection, also the first message: counters */
#define SHUNT_MSG_STATS_TEXT    10 /* its answer: struct shunt_header, then JSON */
/* control connection, after SHUNT_APPEND: struct shunt_handoff (offer 0), then 1 to SHUNT_PARTS_MAX
 * struct shunt_part: what the payload is, in the peer's store */
#define SHUNT_MSG_HANDOFF_PARTS 11
/* control: nobody sends a handoff (SHUNT_APPEND), and its connection is not the server's any more
 */
#define SHUNT_MSG_CANCEL        12
/* control: would a peer send bytes of its store on such a connection? */
#define SHUNT_MSG_ASK           13
/* its answer; or, unasked: that handoff waits until the peer can send more */
#define SHUNT_MSG_ANSWER        14
/* control: which file is behind an offer, before it is claimed? */
#define SHUNT_MSG_PROVE         15
/* its answer; or, unasked: the file behind a handoff with SHUNT_OPTION_DIGEST */
#define SHUNT_MSG_DIGEST        16
/* control: the server has forgotten the digest of that handoff, as it was told */
#define SHUNT_MSG_WITHDRAWN     17

#define SHUNT_CHANNEL_CONTROL 1
#define SHUNT_CHANNEL_OFFERS  2

/* why a handoff or a fetch ended, or a session was closed */
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
#define SHUNT_REASON_NOT_ALLOWED   15 /* by the configuration of an agent */
/* of this backend's payload, the client has or will have nothing, or its ACKs are lost on their
 * way; the offer is there, and can be fetched */
#define SHUNT_REASON_UNREACHABLE   16

struct shunt_header {
    shunt_u32 kind; /* SHUNT_MSG_* */
    shunt_u32 size; /* of the whole message, this header included */
};

struct shunt_hello {
    struct shunt_header header;
    shunt_u16
        oldest; /* SHUNT_VERSION_OLDEST, SHUNT_VERSION: both speak the newest that both know */
    shunt_u16 newest;
    shunt_u32 channel;  /* SHUNT_CHANNEL_* */
    shunt_u64 features; /* a bit for each thing that takes an agent that can do it, too: none yet */
};

struct shunt_welcome {
    struct shunt_header header;
    shunt_u32
        worker;     /* upper half of this worker's offer numbers; an OFFERS channel gets its own */
    shunt_u32 ring; /* for shunt_begin; control only, else 0xffffffff */
    shunt_u32 version; /* that both speak */
    shunt_u32 pad;
    shunt_u64 features; /* of the agent */
};

/* shunt_offer.flags: what is in front of `offset` may be written to, and the file's time with it.
 * What is compared is the file's size alone. */
#define SHUNT_OFFER_BODY 1

struct shunt_offer {
    struct shunt_header header;
    shunt_u32 peer;   /* the frontend that may claim it: index into the board */
    shunt_u32 flags;  /* SHUNT_OFFER_* */
    shunt_u64 number; /* worker << 32 | count: never twice while the agent lives */
    shunt_u64 offset; /* bytes into the file */
    shunt_u64 length;
    shunt_u8 tag[16];
    shunt_u8 trace[SHUNT_TRACE_BYTES];
    shunt_s64 mtime_ns; /* of the file when its header was made: st_mtim */
    shunt_u64 size;     /* of the file then */
};

/*
 * One generation of a TLS 1.3 connection's write keys (RFC 8446, 7.3), for the records of a
 * payload. The KeyUpdate that ends the generation is the frontend's. Whoever has one keeps it no
 * longer than it takes to use it or to pass it on, and then overwrites it.
 */
struct shunt_tls {
    shunt_u16 suite;         /* number at IANA; 0: the connection is not encrypted */
    shunt_u16 content_bytes; /* most content of a record, its inner type not counted */
    shunt_u16 skip; /* bytes of the first record that the client has from another backend */
    shunt_u16 pad;
    shunt_u64 record; /* number of the payload's first record */
    shunt_u8 iv[12];
    shunt_u8 key[32]; /* the suite says how many bytes of it count; the rest is 0 */
    shunt_u8 pad2[4];
};

struct shunt_handoff {
    struct shunt_header header;
    shunt_u32 peer;  /* the backend's agent: index into the board */
    shunt_u32 epoch; /* of that entry when the offer was checked */
    shunt_u32 bytes; /* of this message: where the parts of HANDOFF_PARTS begin */
    shunt_u32 pad;
    shunt_u64 handoff;
    shunt_u64 offer;
    shunt_u64 length;
    shunt_u64 rate; /* bytes a second, 0: no limit */
    shunt_u8 tag[16];
    shunt_u8 trace[SHUNT_TRACE_BYTES];
    struct shunt_flow flow; /* of the answer to SHUNT_BEGIN or SHUNT_MOVE */
    struct shunt_tls tls;   /* `length` stays the payload's; SHUNT_BEGIN's is that of its records */
};

#define SHUNT_PARTS_MAX 32

/* A reference of crates/odb, of the peer's store; little-endian. */
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
    shunt_u64 handoff; /* the asker's name for it, returned in the answer */
    shunt_u32 peer;    /* index into the board */
    shunt_u32 epoch;   /* of that entry */
    shunt_u8 client_address[16];
    shunt_u8 server_address[16];
    shunt_u16 client_port; /* network order */
    shunt_u16 server_port; /* network order */
    shunt_u32 pad;
};

struct shunt_answer {
    struct shunt_header header;
    shunt_u64 handoff; /* of the question, or of a handoff that waits */
    shunt_u32 reason;  /* SHUNT_REASON_*; 0: it would */
    shunt_u32 peer;
};

struct shunt_prove {
    struct shunt_header header;
    shunt_u32 peer;    /* index into the board */
    shunt_u32 epoch;   /* of that entry */
    shunt_u64 handoff; /* the asker's name for it, returned in the answer */
    shunt_u64 offer;
    shunt_u64 length;
    shunt_u8 tag[16];
};

struct shunt_digest {
    struct shunt_header header;
    shunt_u64 handoff;   /* of the question, or of a handoff that is under way */
    shunt_u64 offset;    /* where in the file its payload begins */
    shunt_u32 peer;      /* the backend whose agent says so */
    shunt_u32 known;     /* 0: nobody knows, or the file has changed since */
    shunt_u8 sha256[32]; /* of the whole file */
};

struct shunt_withdrawn {
    struct shunt_header header;
    shunt_u32 peer;  /* index into the board: who sends it */
    shunt_u32 epoch; /* of that entry */
    shunt_u64 handoff;
};

struct shunt_abort {
    struct shunt_header header;
    shunt_u64 handoff;
};

/* Only the agent of a handoff's own backend may end it: the server compares. */
#define SHUNT_NO_PEER 0xffffffffu

struct shunt_ended {
    struct shunt_header header;
    shunt_u64 handoff; /* or the fetch's id */
    shunt_u32 reason;  /* SHUNT_REASON_* */
    shunt_u32 peer;    /* the backend whose agent says so, or SHUNT_NO_PEER: this machine's */
};

struct shunt_fetch {
    struct shunt_header header;
    shunt_u32 peer; /* the backend: index into the board */
    shunt_u32 pad;
    shunt_u64 fetch; /* the caller's name for it; shares its space with handoffs */
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
 * backend's key for that frontend, over nonce (16 bytes, from the consent), offer number and length
 * (8 bytes each, little-endian).
 *
 * docs/protocols.md has the header fields.
 */
#define SHUNT_TAG_INPUT_BYTES 32

#endif
