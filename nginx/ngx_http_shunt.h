/* SPDX-License-Identifier: MIT */
/*
 * Types and functions that the files of the module share. Bars separate the levels of most of these
 * files, and most calls go to a later level: module, consent | backend | frontend, begin, handoff |
 * watch | again | probe, stall, recovery | proof | taking, rest | part | fetch, trust | hop |
 * header, agent, pulse, speaks, board | pending | ring, trace, address | field | siphash | kernel.
 *
 * A tier is a server on a request's path: a frontend, which the client is connected to,
 * intermediates, and a backend, which has the body. A consent is a header field of a request, by
 * which each tier says that it may be bypassed. An offer is a body that a backend holds ready, and
 * that its response's header names. The body is then a payload. A handoff lets the backend send the
 * payload on the client's own connection, as a shortcut. A region is the range of the client
 * connection's sequence numbers that a payload takes. A peer is another machine's agent (shuntd),
 * and the board is memory by which this machine's agent tells what it knows of peers. To fetch a
 * payload is to get it through both agents instead. To relay a body is to send it through all
 * tiers, as without Shunt.
 */
#ifndef NGX_HTTP_SHUNT_H
#define NGX_HTTP_SHUNT_H

#include <ngx_config.h>
#include <ngx_core.h>
#include <ngx_http.h>

#include "shunt.h"

#include "ngx_http_shunt_kernel.h"

/* Bit of r->buffered, which has four: nginx's filters SSI, sub and copy use 0x01, 0x02 and 0x04
 * (ngx_http_request.h). */
#define NGX_HTTP_SHUNT_BUFFERED 0x08

#define SHUNT_TIERS_MAX 255
#define SHUNT_TO_BYTES  8

/* Room for a response's header, in bytes, where a consent names no other number: nginx's default
 * buffer. */
#define SHUNT_HEADER_BYTES 4096

#define SHUNT_CONSENT_BYTES                                                                   \
    (sizeof("1; frontend=; nonce=; to=; tiers=255; from=; header=") + SHUNT_NAME_BYTES + 32 + \
     2 * SHUNT_TO_BYTES + 2 * NGX_INT64_LEN)
#define SHUNT_PAYLOAD_BYTES \
    (sizeof("1; backend=; offer=; length=; tag=") + SHUNT_NAME_BYTES + 16 + NGX_INT64_LEN + 32)

/* Number of bytes of a struct of shunt.h, from its beginning to the end of `field`, the last field
 * that this module needs. An earlier release's writer sends at least these bytes, but leaves out
 * fields that were added later. So sizeof, which grows with new fields, is not the lower limit. */
#define SHUNT_THROUGH(type, field) (offsetof(type, field) + sizeof(((type *) 0)->field))

#define SHUNT_COUNT_X(index, name, meaning) SHUNT_COUNT_##name = index,
enum { SHUNT_COUNTER_LIST(SHUNT_COUNT_X) };
#undef SHUNT_COUNT_X

typedef struct {
    ngx_str_t agent;       /* path of shuntd's socket */
    ngx_flag_t frontend;   /* some location has "shunt on" */
    ngx_flag_t backend;    /* some location has "shunt_offer on" */
    ngx_flag_t untrusting; /* some location has "shunt on" without "shunt_trust" */
    ngx_flag_t unasked;    /* some location has "shunt_offer on" without "shunt_trust" */
    ngx_flag_t trusting;   /* some "shunt_trust" names addresses */
    ngx_array_t balancers; /* upstreams with their balancers' init handlers: hop.c */
} ngx_http_shunt_main_conf_t;

/* Counts of one location or one connection, about its consents that led to no shortcut: vain.c. */
typedef struct {
    uint16_t row;  /* number of such consents in a row; does not grow beyond a limit */
    uint16_t skip; /* number of responses, from the next one on, that get no consent */
} ngx_http_shunt_vain_t;

typedef struct {
    ngx_flag_t shunt;
    size_t mean_length;   /* consents need at least this mean: bytes in long bodies per response */
    uint64_t long_bytes;  /* this worker's decaying sum of bytes in long bodies: worth.c */
    size_t alone_length;  /* shortest body, bytes, worth a shortcut if alone on its connection */
    uint32_t alone_share; /* share of long bodies that were their connection's first, in 1/65536:
                           * lifetime.c */
    ngx_http_shunt_vain_t vain;
    ngx_flag_t consent;
    ngx_flag_t offer;
    size_t offer_min_length;
    ngx_hash_t offer_types;
    ngx_array_t *offer_types_keys;
    ngx_array_t *trust; /* array of ngx_cidr_t; NULL: no tier is trusted */
    ngx_array_t *plain; /* array of ngx_cidr_t: tiers whose consents may be meant for other servers;
                         * NULL: none */
    ngx_uint_t recover; /* one of NGX_HTTP_SHUNT_NOBODY, _ETAG, _DIGEST */
} ngx_http_shunt_loc_conf_t;

/* Values of shunt_recover: which other backend may send the rest of a payload when the payload's
 * own backend is lost. */
#define NGX_HTTP_SHUNT_NOBODY 0
#define NGX_HTTP_SHUNT_ETAG   1 /* one with the same strong ETag; over TLS as _DIGEST */
#define NGX_HTTP_SHUNT_DIGEST 2 /* one with the same strong ETag and the same file digest */

typedef struct {
    ngx_str_t frontend;
    u_char nonce[16];
    u_char to[SHUNT_TO_BYTES]; /* `to` of the received consent: hash of the address that the consent
                                * is meant for; hop.c writes the `to` of a consent that is sent */
    ngx_uint_t tiers;          /* number of tiers with Shunt so far */
    ngx_uint_t rest; /* 1: asks for the rest of a payload, which is offered even if it is short */
    uint64_t from;   /* length of the shortest payload to offer, bytes; 0: the backend decides */
    uint64_t header; /* room for the answer's header, bytes */
} ngx_http_shunt_consent_t;

typedef struct {
    ngx_str_t backend;
    uint64_t number; /* number of the offer */
    uint64_t length; /* bytes */
    u_char tag[16];
} ngx_http_shunt_payload_t;

/* A consistent copy of one entry of the board. */
typedef struct {
    ngx_uint_t index;
    uint32_t epoch;
    uint32_t closed; /* SHUNT_CLOSED_* */
    ngx_uint_t lost; /* 1: this machine's agent has no session with the peer now */
    u_char our_key[16];
    u_char their_key[16];
} ngx_http_shunt_peer_t;

/*
 * State of a request. NONE: its response has nothing to do with Shunt, or no longer. DONE: this
 * module has finished with the payload.
 *
 *   backend
 *     NONE --> HELD --> NONE                    the header is held back until the body comes
 *   intermediate
 *     NONE --> PASSING --> NONE or AGAIN        the answer is an offer; AGAIN: the body is needed
 *   intermediate or frontend
 *     NONE --> AGAIN --> NONE                   the answer cannot be used; the response is asked
 *                                               for once more, without consent
 *   frontend
 *     NONE --> ACCEPTED                         offer accepted, in the early header filter
 *     ACCEPTED --> SHORTCUT --> ACTIVE          the body bypasses this nginx
 *     ACTIVE --> COMPLETE or DONE               DONE: given up
 *     ACCEPTED --> FETCH_EARLY --> DONE         no shortcut is possible: a filter needs the body,
 *                                               for example, or the offer is old
 *     FETCH_EARLY --> NONE                      the fetch failed before the header had left
 *     SHORTCUT --> FETCH_LATE --> DONE          the connection could not be handed off
 *     ACTIVE --> FETCH_LATE                     the backend has refused the handoff, or its bytes
 *                                               do not reach the client
 *     SHORTCUT, ACTIVE, FETCH_LATE --> REST     no agent brings more: the rest is relayed
 *     REST --> DONE                             all bytes were relayed
 */
typedef enum {
    SHUNT_MODE_NONE = 0,
    SHUNT_MODE_HELD,
    SHUNT_MODE_PASSING,
    SHUNT_MODE_AGAIN,
    SHUNT_MODE_ACCEPTED,
    SHUNT_MODE_SHORTCUT,
    SHUNT_MODE_ACTIVE,
    SHUNT_MODE_COMPLETE,
    SHUNT_MODE_FETCH_EARLY,
    SHUNT_MODE_FETCH_LATE,
    SHUNT_MODE_REST,
    SHUNT_MODE_DONE
} ngx_http_shunt_mode_t;

typedef struct ngx_http_shunt_ring_s ngx_http_shunt_ring_t;
typedef struct ngx_http_shunt_recovery_s ngx_http_shunt_recovery_t;
typedef struct ngx_http_shunt_rest_s ngx_http_shunt_rest_t;

typedef struct {
    ngx_http_output_body_filter_pt
        output;               /* next filter for the bytes: below the early or the late filter */
    ngx_connection_t *stream; /* socket from the agent; NULL until it comes, and after the end */
    uint64_t left;            /* bytes still to come from the stream */
    uint64_t skip;            /* bytes at the stream's beginning that the client has already */
    ngx_chain_t *free;
    ngx_chain_t *busy;
    ngx_uint_t bufs;    /* number of buffers that were made */
    ngx_msec_t timeout; /* longest wait for bytes of the stream, ms */
} ngx_http_shunt_fetch_t;

typedef struct {
    ngx_http_request_t *request;
    ngx_http_shunt_mode_t mode;
    ngx_int_t outcome; /* index of the counter that says what happened; -1: none yet */
    uint64_t bytes;    /* the variable $shunt_bytes */

    ngx_http_shunt_consent_t consent;
    /* Address of the tier that sent the consent, if the consent was meant for another server and
     * that tier is not configured as "plain"; else empty. */
    ngx_str_t plain;
    ngx_http_handler_pt content_handler; /* the location's handler, while hop.c's replaces it */
    ngx_msec_t given_at;                 /* when this tier gave a consent */
    unsigned received : 1;               /* a consent came with the request, from a trusted tier */
    unsigned distrusted : 1;             /* a consent came, from an address that is not trusted */
    unsigned passed : 1;                 /* the received consent was sent on to the upstream */
    unsigned given : 1;       /* this tier has given a consent that no offer has used yet */
    unsigned consented : 1;   /* this tier has given a consent, used or not */
    unsigned again : 1;       /* the response was asked for once more, without consent */
    unsigned filtered : 1;    /* other filters have seen the header */
    unsigned header_held : 1; /* the late header filter holds the header */
    unsigned tls_fresh : 1;   /* no record was sent under the present key before this response */
    unsigned deaf : 1;        /* a FIN of the client is ignored while a payload is in progress */
    unsigned relayable : 1;   /* if the payload fails, rest.c first tries to relay the rest of it */
    unsigned relayed : 1;     /* the relaying of the rest has begun, and was counted */
    unsigned claimed : 1; /* the client has acknowledged all; the backend has not confirmed it */
    unsigned probed : 1;  /* the client was asked what it has, after backend or agent was lost */

    ngx_http_shunt_payload_t payload;
    ngx_http_shunt_peer_t peer;

    /* The representation (RFC 9110, 3.2) that the payload is part of. A request to another backend
     * for the rest of the payload needs these fields. */
    ngx_str_t etag; /* strong ETag; empty: no other backend can continue */
    off_t first;    /* offset of the payload's first byte in the representation */
    off_t complete; /* length of the representation, bytes */
    struct {
        ngx_uint_t known; /* 1: the agent has told the two fields below */
        uint64_t offset;  /* offset of the payload in the file */
        u_char sha256[32];
    } file; /* file that the backend sends, as its agent says */
    ngx_http_shunt_recovery_t *recovery;

    uint64_t region;        /* length of the region: bytes of the payload, or of its TLS records */
    uint16_t content_bytes; /* payload bytes of each TLS record; 0: not encrypted */

    uint64_t id; /* number of this request's handoff or fetch, for pending.c; 0: none */
    ngx_http_shunt_ring_t *ring;
    uint64_t acked;  /* bytes of the region that the client has acknowledged */
    u_char answered; /* probes that the client has answered, modulo 256 (the kernel's count) */
    u_char shut;     /* 1: the client lacks bytes, and its window has no room for a segment */
    struct {
        ngx_event_t event; /* timer while the answer to a probe is awaited */
        ngx_msec_t until;  /* end of the wait */
        ngx_uint_t reason; /* SHUNT_REASON_* of the loss, or NGX_HTTP_SHUNT_ASKED_* */
        ngx_uint_t again;  /* times that a client was asked that had been asked before */
        u_char answered;   /* ctx->answered when the probe was sent */
        ngx_http_shunt_keepalive_t before; /* keepalive settings before the probe */
    } probe;
    struct {
        ngx_msec_t looked_at; /* time of the last check */
        ngx_uint_t times; /* questions to the client so far; stall_end() sets the largest number */
    } stall;
    ngx_uint_t why;         /* counter of the reason for an abort; 0: the client or nginx ends it */
    ngx_msec_t progress_at; /* when the client, or a fetch, made progress last */
    ngx_event_t progress;   /* timer: looks for progress, or limits the first wait of a fetch */
    ngx_event_t watch;      /* posted: begins to read from a client on TLS */
    ngx_event_handler_pt reader; /* nginx's read handler, while ours is in its place */
    ngx_event_t failure; /* posted: gives the request up or asks once more, outside of any filter */
    ngx_http_shunt_fetch_t fetch;
    ngx_http_output_body_filter_pt output; /* filter below the late one; set by a handoff */
    ngx_http_shunt_rest_t *rest;           /* relaying of the rest; NULL: not begun, or given up */
} ngx_http_shunt_ctx_t;

extern ngx_module_t ngx_http_shunt_module;
extern ngx_module_t ngx_http_shunt_late_module;

/* module.c */
ngx_http_shunt_ctx_t *ngx_http_shunt_ctx(ngx_http_request_t *r);
ngx_http_shunt_ctx_t *ngx_http_shunt_ctx_create(ngx_http_request_t *r);
void ngx_http_shunt_outcome(ngx_http_request_t *r, ngx_uint_t counter);
ngx_uint_t ngx_http_shunt_level(ngx_uint_t level);
ngx_uint_t ngx_http_shunt_may_say(time_t *said);
ngx_int_t ngx_http_shunt_end_upstream(ngx_http_request_t *r);
ngx_int_t ngx_http_shunt_is_field(ngx_table_elt_t *h);

/* variables.c */
ngx_int_t ngx_http_shunt_add_variables(ngx_conf_t *cf);
ngx_str_t *ngx_http_shunt_counter_name(ngx_uint_t counter);

/* consent.c: the request side */
ngx_int_t ngx_http_shunt_post_read_handler(ngx_http_request_t *r);
ngx_int_t ngx_http_shunt_precontent_handler(ngx_http_request_t *r);
void ngx_http_shunt_consent_init(void);
ngx_int_t ngx_http_shunt_nonce(u_char nonce[16]);
uint64_t ngx_http_shunt_header_room(ngx_http_request_t *r);
ngx_int_t ngx_http_shunt_add_consent(ngx_http_request_t *r, ngx_http_shunt_consent_t *consent);
ngx_int_t ngx_http_shunt_add_request_field(ngx_http_request_t *r, char *key, char *lowcase_key,
                                           ngx_str_t *value);
ngx_int_t ngx_http_shunt_strip(ngx_http_request_t *r, ngx_int_t (*strips)(ngx_table_elt_t *h));
ngx_table_elt_t *ngx_http_shunt_find_field(ngx_list_t *list);

#define NGX_HTTP_SHUNT_ADDRESSES_SAID 8 /* number of addresses that are logged, at most */

/* Addresses of tiers that were logged, once each. */
typedef struct {
    ngx_uint_t n;
    struct {
        size_t len;
        u_char text[NGX_SOCKADDR_STRLEN];
    } address[NGX_HTTP_SHUNT_ADDRESSES_SAID];
} ngx_http_shunt_said_t;

/* trust.c: the tiers next to this one */
char *ngx_http_shunt_trust(ngx_conf_t *cf, ngx_command_t *cmd, void *conf);
ngx_uint_t ngx_http_shunt_is_trusted(const ngx_http_shunt_loc_conf_t *lcf, struct sockaddr *sa);
ngx_uint_t ngx_http_shunt_may_say_address(ngx_http_shunt_said_t *said, const ngx_str_t *address);
void ngx_http_shunt_say_distrusted(ngx_http_request_t *r);
ngx_uint_t ngx_http_shunt_is_plain(const ngx_http_shunt_loc_conf_t *lcf, struct sockaddr *sa);

/* hop.c: the server that a consent is meant for */
ngx_int_t ngx_http_shunt_hop_init(ngx_conf_t *cf);
void ngx_http_shunt_hop_begin(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx);
ngx_uint_t ngx_http_shunt_hop_is_ours(ngx_connection_t *c, const ngx_http_shunt_consent_t *consent);
void ngx_http_shunt_hop_refuse(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx);

/* Length of the shortest long body, in bytes: the default of shunt_offer_min_length. */
#define NGX_HTTP_SHUNT_LONG (32 * 1024)

/* worth.c: whether bodies are long enough for consents */
void ngx_http_shunt_worth_init(ngx_http_shunt_loc_conf_t *lcf);
ngx_int_t ngx_http_shunt_is_worth(const ngx_http_shunt_loc_conf_t *lcf);
void ngx_http_shunt_worth_note(ngx_http_request_t *r, off_t length);

/* vain.c: whether consents have led to shortcuts lately */
ngx_uint_t ngx_http_shunt_vain_now(ngx_http_request_t *r, ngx_http_shunt_loc_conf_t *lcf);
void ngx_http_shunt_vain_note(ngx_http_request_t *r, ngx_uint_t counter);
void ngx_http_shunt_vain_refused(ngx_http_request_t *r, ngx_uint_t reason);
void ngx_http_shunt_vain_stalled(ngx_http_request_t *r);
void ngx_http_shunt_vain_end(ngx_http_request_t *r);

/* lifetime.c: how long a body has to be for a shortcut */
void ngx_http_shunt_lifetime_init(ngx_http_shunt_loc_conf_t *lcf);
uint64_t ngx_http_shunt_least_length(ngx_http_request_t *r, const ngx_http_shunt_loc_conf_t *lcf);
void ngx_http_shunt_lifetime_note(ngx_http_request_t *r, ngx_http_shunt_loc_conf_t *lcf);
void ngx_http_shunt_lifetime_shortcut(ngx_connection_t *c);
ngx_http_shunt_vain_t *ngx_http_shunt_lifetime_vain(ngx_connection_t *c, ngx_uint_t create);

/* backend.c */
ngx_int_t ngx_http_shunt_backend_candidate(ngx_http_request_t *r);
ngx_int_t ngx_http_shunt_backend_offer(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx,
                                       ngx_chain_t *in);
ngx_int_t ngx_http_shunt_forbid_cache(ngx_http_request_t *r);

/* header.c: whether the tier before has room for a header with an offer */
ngx_uint_t ngx_http_shunt_header_fits(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx);
ngx_uint_t ngx_http_shunt_offer_fits(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx);

/* frontend.c: the filters */
ngx_int_t ngx_http_shunt_early_init(ngx_conf_t *cf);
ngx_int_t ngx_http_shunt_late_init(ngx_conf_t *cf);
ngx_int_t ngx_http_shunt_output_last(ngx_http_request_t *r, ngx_http_output_body_filter_pt output);
ngx_table_elt_t *ngx_http_shunt_take_offer(ngx_http_request_t *r, ngx_uint_t keep);
ngx_uint_t ngx_http_shunt_refused(ngx_http_request_t *r, ngx_table_elt_t *field,
                                  ngx_http_shunt_consent_t *consent,
                                  ngx_http_shunt_payload_t *payload, ngx_http_shunt_peer_t *peer);

/* begin.c: from SHORTCUT to ACTIVE */
ngx_int_t ngx_http_shunt_handoff_begin(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx,
                                       ngx_http_output_body_filter_pt output);
ngx_int_t ngx_http_shunt_describe(ngx_http_shunt_ctx_t *ctx, uint64_t length,
                                  struct shunt_handoff *msg);

/* handoff.c: from ACTIVE to DONE */
void ngx_http_shunt_handoff_event(ngx_http_shunt_ctx_t *ctx, const struct shunt_event *event);
void ngx_http_shunt_release(ngx_http_shunt_ctx_t *ctx);
void ngx_http_shunt_fail(ngx_http_shunt_ctx_t *ctx);
void ngx_http_shunt_ended(ngx_http_shunt_ctx_t *ctx, ngx_uint_t reason);
const char *ngx_http_shunt_reason_text(ngx_uint_t reason);

const struct shunt_state *ngx_http_shunt_state(ngx_http_shunt_ctx_t *ctx);
void ngx_http_shunt_watch_reading(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx);
void ngx_http_shunt_watch_progress(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx);
ngx_uint_t ngx_http_shunt_follow(ngx_http_shunt_ctx_t *ctx);
void ngx_http_shunt_leave_reading(ngx_http_shunt_ctx_t *ctx);
void ngx_http_shunt_count_acked(ngx_http_shunt_ctx_t *ctx, uint64_t acked);

void ngx_http_shunt_complete(ngx_http_shunt_ctx_t *ctx);

/* probe.c: asks a client what it has of a payload. The reason to ask is a SHUNT_REASON_* for which
 * the payload's backend was lost, or one of these: */
#define NGX_HTTP_SHUNT_ASKED_GONE    0                 /* this machine's agent is stopped or gone */
#define NGX_HTTP_SHUNT_ASKED_STALLED ((ngx_uint_t) -1) /* the payload makes no progress */

ngx_int_t ngx_http_shunt_probe(ngx_http_shunt_ctx_t *ctx, ngx_uint_t reason);
ngx_uint_t ngx_http_shunt_may_have_all(ngx_http_shunt_ctx_t *ctx, ngx_uint_t reason);
void ngx_http_shunt_probe_stalled(ngx_http_shunt_ctx_t *ctx);
void ngx_http_shunt_probe_end(ngx_http_shunt_ctx_t *ctx);

/* stall.c: clients that answer, but get nothing */
ngx_uint_t ngx_http_shunt_is_stalled(const ngx_http_shunt_ctx_t *ctx);
void ngx_http_shunt_stall_look(ngx_http_shunt_ctx_t *ctx);
void ngx_http_shunt_stall_answered(ngx_http_shunt_ctx_t *ctx);
void ngx_http_shunt_stall_end(ngx_http_shunt_ctx_t *ctx);

/* taking.c: takes the rest of a payload back from its backend */
ngx_int_t ngx_http_shunt_take(ngx_http_shunt_ctx_t *ctx, uint64_t *acked);
ngx_int_t ngx_http_shunt_take_untold(ngx_http_shunt_ctx_t *ctx);
ngx_int_t ngx_http_shunt_end_region(ngx_http_shunt_ctx_t *ctx, ngx_uint_t when,
                                    const struct shunt_state **state);
ngx_int_t ngx_http_shunt_refetch(ngx_http_shunt_ctx_t *ctx, ngx_uint_t reason);

/* rest.c: relays the rest of a payload */
void ngx_http_shunt_rest_gone(ngx_http_shunt_ctx_t *ctx);
void ngx_http_shunt_rest_stalled(ngx_http_shunt_ctx_t *ctx);
ngx_int_t ngx_http_shunt_rest_instead(ngx_http_shunt_ctx_t *ctx);
void ngx_http_shunt_rest_forget(ngx_http_shunt_ctx_t *ctx);
void ngx_http_shunt_rest_drop(ngx_http_shunt_ctx_t *ctx);
ngx_uint_t ngx_http_shunt_rest_is_on(ngx_http_shunt_ctx_t *ctx);
void ngx_http_shunt_rest_drop_stalled(ngx_http_shunt_ctx_t *ctx);
ngx_uint_t ngx_http_shunt_rest_is_of(ngx_http_shunt_ctx_t *ctx, ngx_http_request_t *sr);
ngx_int_t ngx_http_shunt_rest_header(ngx_http_request_t *sr, ngx_http_shunt_ctx_t *ctx);
ngx_int_t ngx_http_shunt_rest_body(ngx_http_request_t *sr, ngx_http_shunt_ctx_t *ctx,
                                   ngx_chain_t *in);

/* pulse.c: whether the agent is running */
void ngx_http_shunt_pulse_begin(ngx_log_t *log);
ngx_uint_t ngx_http_shunt_pulse_is_gone(void);
void ngx_http_shunt_pulse_watch(void);
void ngx_http_shunt_pulse_end(void);

/* again.c: asks for a response once more, without consent */
ngx_uint_t ngx_http_shunt_may_ask_again(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx);
ngx_uint_t ngx_http_shunt_was_too_long(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx,
                                       ngx_uint_t status);
void ngx_http_shunt_ask_again(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx);
ngx_int_t ngx_http_shunt_again_body(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx,
                                    ngx_chain_t *in);
void ngx_http_shunt_start_over(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx);

/* recovery.c: has another backend continue */
ngx_uint_t ngx_http_shunt_is_loss(ngx_uint_t reason);
ngx_int_t ngx_http_shunt_recover(ngx_http_shunt_ctx_t *ctx, ngx_uint_t reason);
ngx_uint_t ngx_http_shunt_recovery_is_on(const ngx_http_shunt_ctx_t *ctx);
void ngx_http_shunt_recovery_drop(ngx_http_shunt_ctx_t *ctx);
void ngx_http_shunt_recovery_end(ngx_http_shunt_ctx_t *ctx);
ngx_http_shunt_ctx_t *ngx_http_shunt_recovery_ctx(ngx_http_request_t *r);
ngx_int_t ngx_http_shunt_recovery_header(ngx_http_request_t *sr, ngx_http_shunt_ctx_t *ctx);
void ngx_http_shunt_recovery_proof(ngx_http_shunt_ctx_t *ctx, const struct shunt_digest *msg);

/* part.c: asks for the rest of a response as a range of it */
void ngx_http_shunt_part_note(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx);
ngx_int_t ngx_http_shunt_part_fields(ngx_http_request_t *sr, ngx_http_shunt_ctx_t *ctx,
                                     uint64_t from);
void ngx_http_shunt_part_end(ngx_http_request_t *sr);
ngx_http_upstream_conf_t *ngx_http_shunt_part_impatiently(ngx_http_request_t *sr,
                                                          ngx_msec_t connect, ngx_msec_t answer,
                                                          int unacknowledged);
ngx_uint_t ngx_http_shunt_part_is_error(ngx_http_request_t *sr);
const char *ngx_http_shunt_part_is_not(ngx_http_request_t *sr, ngx_http_shunt_ctx_t *ctx,
                                       uint64_t from);

/* proof.c: whether another backend has the same bytes */
ngx_uint_t ngx_http_shunt_proof_needed(ngx_http_shunt_ctx_t *ctx);
ngx_int_t ngx_http_shunt_prove(ngx_http_shunt_ctx_t *ctx, uint64_t id,
                               const ngx_http_shunt_peer_t *peer,
                               const ngx_http_shunt_payload_t *rest);
ngx_uint_t ngx_http_shunt_is_same_file(ngx_http_shunt_ctx_t *ctx, const struct shunt_digest *msg,
                                       uint64_t from);
void ngx_http_shunt_digest_told(ngx_http_shunt_ctx_t *ctx, const struct shunt_digest *msg);

/* ssl.c: TLS connections; other connections may be passed to these functions, too */
ngx_int_t ngx_http_shunt_ssl_init(ngx_conf_t *cf);
ngx_uint_t ngx_http_shunt_ssl_not_eligible(ngx_connection_t *c);
ngx_uint_t ngx_http_shunt_ssl_is_fresh(ngx_connection_t *c);
ngx_uint_t ngx_http_shunt_ssl_hand_over(ngx_http_request_t *r, ngx_http_shunt_ctx_t *ctx,
                                        struct shunt_tls *keys);
ngx_int_t ngx_http_shunt_ssl_freeze(ngx_http_shunt_ctx_t *ctx, const struct shunt_tls *keys);
void ngx_http_shunt_ssl_watch(ngx_http_request_t *r);
ngx_int_t ngx_http_shunt_ssl_rest(ngx_http_shunt_ctx_t *ctx, uint64_t acked, uint64_t *from,
                                  struct shunt_tls *keys);
ngx_int_t ngx_http_shunt_ssl_take_back(ngx_http_request_t *r);
ngx_int_t ngx_http_shunt_ssl_reclaim(ngx_http_request_t *r);
void ngx_http_shunt_ssl_give_up(ngx_connection_t *c);
uint64_t ngx_http_shunt_ssl_payload_bytes(ngx_http_shunt_ctx_t *ctx, uint64_t acked);
void ngx_http_shunt_ssl_forget(struct shunt_tls *keys);

/* watch.c: has the kernel note clients' handshakes */
void ngx_http_shunt_watch_listeners(ngx_cycle_t *cycle);
void ngx_http_shunt_watch_again(ngx_cycle_t *cycle);
void ngx_http_shunt_watch_begun(void);
ngx_uint_t ngx_http_shunt_watch_refused(ngx_http_shunt_ctx_t *ctx);

/* fetch.c */
ngx_int_t ngx_http_shunt_fetch_begin(ngx_http_shunt_ctx_t *ctx,
                                     ngx_http_output_body_filter_pt output);
void ngx_http_shunt_fetch_connected(ngx_http_shunt_ctx_t *ctx, int fd, uint64_t length);
ngx_int_t ngx_http_shunt_fetch_pump(ngx_http_shunt_ctx_t *ctx);
void ngx_http_shunt_fetch_failed(ngx_http_shunt_ctx_t *ctx, const char *why);
void ngx_http_shunt_fetch_close(ngx_http_shunt_ctx_t *ctx);

/* agent.c: messages to the agent, on one or two connections */
ngx_int_t ngx_http_shunt_agent_init(ngx_cycle_t *cycle, ngx_http_shunt_main_conf_t *mcf);
void ngx_http_shunt_agent_exit(void);
ngx_int_t ngx_http_shunt_agent_ready(void);
ngx_int_t ngx_http_shunt_agent_connected(void);
ngx_int_t ngx_http_shunt_agent_takes_offers(void);
ngx_http_shunt_ring_t *ngx_http_shunt_agent_ring(void);
ngx_http_shunt_ring_t *ngx_http_shunt_newest_ring(void);
uint64_t ngx_http_shunt_agent_offer_number(void);
ngx_int_t ngx_http_shunt_agent_offer(struct shunt_offer *offer, int fd);
ngx_int_t ngx_http_shunt_agent_post(const void *message, size_t size);

/* board.c */
ngx_int_t ngx_http_shunt_board_map(int board_fd, int counters_fd, ngx_log_t *log);
const struct shunt_board *ngx_http_shunt_board(void);
ngx_str_t ngx_http_shunt_board_name(void);
const struct shunt_board_peer *ngx_http_shunt_board_entry(const struct shunt_board *board,
                                                          ngx_uint_t index);
ngx_str_t ngx_http_shunt_board_peer(ngx_uint_t index);
ngx_int_t ngx_http_shunt_board_find(ngx_str_t *name, ngx_http_shunt_peer_t *peer);
void ngx_http_shunt_count(ngx_uint_t counter, uint64_t n);
void ngx_http_shunt_count_handoff(ngx_uint_t peer, ngx_int_t change);

/* speaks.c: server addresses that backends may use in place of their own */
ngx_uint_t ngx_http_shunt_any_speaks(ngx_connection_t *c, const struct shunt_board *board);
ngx_uint_t ngx_http_shunt_backend_speaks(ngx_connection_t *c, ngx_uint_t peer);

/* address.c: addresses of sockets */
typedef struct {
    u_char bytes[16]; /* IPv4 as ::ffff:a.b.c.d */
    in_port_t port;   /* network order */
    ngx_uint_t is_ipv4;
} ngx_http_shunt_address_t;

ngx_int_t ngx_http_shunt_address_of(const struct sockaddr *sa, ngx_http_shunt_address_t *address);
ngx_int_t ngx_http_shunt_local_address(ngx_connection_t *c, ngx_http_shunt_address_t *address);
ngx_int_t ngx_http_shunt_address_text(ngx_pool_t *pool, struct sockaddr *sa, socklen_t socklen,
                                      ngx_str_t *text);

/* pending.c: handoffs and fetches, by number */
uint64_t ngx_http_shunt_pending_add(ngx_http_shunt_ctx_t *ctx);
ngx_http_shunt_ctx_t *ngx_http_shunt_pending_find(uint64_t id);
void ngx_http_shunt_pending_remove(uint64_t id);
ngx_uint_t ngx_http_shunt_pending_any(void);
void ngx_http_shunt_pending_each(void (*visit)(ngx_http_shunt_ctx_t *ctx));

/* ring.c */
ngx_http_shunt_ring_t *ngx_http_shunt_ring_open(int fd, uint32_t index, ngx_log_t *log);
void ngx_http_shunt_ring_hold(ngx_http_shunt_ring_t *ring);
void ngx_http_shunt_ring_release(ngx_http_shunt_ring_t *ring);
ngx_uint_t ngx_http_shunt_ring_drain(ngx_http_shunt_ring_t *ring);
ngx_int_t ngx_http_shunt_ring_ask(ngx_http_shunt_ring_t *ring);
ngx_uint_t ngx_http_shunt_ring_answered(void);
const struct shunt_state *ngx_http_shunt_ring_answer(ngx_http_shunt_ring_t *ring, uint64_t handoff);
uint32_t ngx_http_shunt_ring_index(const ngx_http_shunt_ring_t *ring);

/* field.c */
ngx_int_t ngx_http_shunt_parse_start(ngx_str_t *field, ngx_http_shunt_consent_t *consent,
                                     size_t *to_at);
ngx_int_t ngx_http_shunt_parse_consent(ngx_str_t *field, ngx_http_shunt_consent_t *consent);
ngx_int_t ngx_http_shunt_parse_payload(ngx_str_t *field, ngx_http_shunt_payload_t *payload);
ngx_int_t ngx_http_shunt_format_consent(ngx_pool_t *pool, ngx_http_shunt_consent_t *consent,
                                        ngx_str_t *field);
ngx_int_t ngx_http_shunt_format_payload(ngx_pool_t *pool, ngx_http_shunt_payload_t *payload,
                                        ngx_str_t *field);

ngx_int_t ngx_http_shunt_parse_traceparent(ngx_str_t *field, u_char trace[SHUNT_TRACE_BYTES]);

/* trace.c: the trace that a request belongs to, for log lines */
void ngx_http_shunt_trace(ngx_http_request_t *r, u_char trace[SHUNT_TRACE_BYTES]);
ngx_str_t *ngx_http_shunt_trace_text(ngx_http_request_t *r);

/* siphash.c */
void ngx_http_shunt_siphash128(const u_char key[16], const u_char *data, size_t len,
                               u_char out[16]);
void ngx_http_shunt_tag(const u_char key[16], const u_char nonce[16], uint64_t number,
                        uint64_t length, u_char tag[16]);
ngx_int_t ngx_http_shunt_tag_equal(const u_char a[16], const u_char b[16]);

#endif
