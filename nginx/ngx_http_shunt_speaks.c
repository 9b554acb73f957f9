/* SPDX-License-Identifier: MIT */
/*
 * Server addresses that backends may use in place of their own. A payload leaves its backend with
 * the address and port that the client knows as the server's. Each backend's agent is configured
 * with the addresses that it may use for this machine (speaks_for), and the board has them. A
 * connection to any other address gets no shortcut. If no backend may use the connection's address,
 * no consent is given. If only some may, and the payload's backend may not, the payload is fetched.
 * The board is memory that the agent of this machine writes. A consent is the request's header
 * field that asks for a shortcut, a response whose body bypasses this nginx.
 */
#include "ngx_http_shunt.h"

#define NGX_HTTP_SHUNT_MAPPED_BITS 96 /* length of the prefix ::ffff:0:0/96 */
#define NGX_HTTP_SHUNT_SAID        32 /* number of addresses with ports that are logged */
#define NGX_HTTP_SHUNT_SAID_AGAIN  60 /* s between two log lines about further ones */

static ngx_uint_t ngx_http_shunt_covers(const struct shunt_prefix *prefix,
                                        const ngx_http_shunt_address_t *server)
{
    ngx_uint_t bytes = prefix->bits / 8, rest = prefix->bits % 8;

    if (bytes > 16 || (bytes == 16 && rest) || (prefix->port && prefix->port != server->port) ||
        (server->is_ipv4 && prefix->bits < NGX_HTTP_SHUNT_MAPPED_BITS) ||
        ngx_memcmp(prefix->address, server->bytes, bytes) != 0) {
        return 0;
    }

    return rest == 0 || ((prefix->address[bytes] ^ server->bytes[bytes]) >> (8 - rest)) == 0;
}

/* Whether a backend may use a server's address. Reads the board's entry without its sequence lock
 * (`epoch`). An entry that is being changed does no harm: the response is relayed, or the backend
 * refuses the handoff and the body is fetched. */
static ngx_uint_t ngx_http_shunt_peer_speaks(const struct shunt_board_peer *peer,
                                             const ngx_http_shunt_address_t *server)
{
    ngx_uint_t i, n = ngx_min(peer->prefixes, SHUNT_PREFIXES_MAX);

    for (i = 0; i < n; i++) {
        if (ngx_http_shunt_covers(&peer->prefix[i], server)) {
            return 1;
        }
    }

    return 0;
}

/* Whether to log an address and port: the first NGX_HTTP_SHUNT_SAID of them once each, and at most
 * one of the others in each minute. */
static ngx_uint_t ngx_http_shunt_may_say_mute(const ngx_http_shunt_address_t *server)
{
    static ngx_http_shunt_address_t said[NGX_HTTP_SHUNT_SAID];
    static ngx_uint_t n;
    static time_t last;
    ngx_uint_t i;

    for (i = 0; i < n; i++) {
        if (ngx_memcmp(said[i].bytes, server->bytes, 16) == 0 && said[i].port == server->port) {
            return 0;
        }
    }

    if (n < NGX_HTTP_SHUNT_SAID) {
        said[n++] = *server;

    } else if (ngx_time() - last < NGX_HTTP_SHUNT_SAID_AGAIN) {
        return 0;
    }

    last = ngx_time();

    return 1;
}

static void ngx_http_shunt_say_mute(ngx_connection_t *c, const ngx_http_shunt_address_t *server,
                                    ngx_str_t *who)
{
    ngx_str_t address, name;
    u_char text[NGX_SOCKADDR_STRLEN];

    if (!ngx_http_shunt_may_say_mute(server)) {
        return;
    }

    name = ngx_http_shunt_board_name();
    address.data = text;
    address.len = ngx_sock_ntop(c->local_sockaddr, c->local_socklen, text, NGX_SOCKADDR_STRLEN, 1);

    ngx_log_error(NGX_LOG_ERR, c->log, 0,
                  "shunt: responses of %V are relayed: %V for that address; add it to "
                  "\"speaks_for\" of [[peer]] \"%V\" in the backend's shuntd.toml",
                  &address, who, &name);
}

/* Whether a backend may use the server address that this client knows. Logs if it may not. */
ngx_uint_t ngx_http_shunt_backend_speaks(ngx_connection_t *c, ngx_uint_t peer)
{
    ngx_str_t who = ngx_string("the backend that has the bodies may not speak");
    ngx_http_shunt_address_t server;
    const struct shunt_board *board = ngx_http_shunt_board();

    if (board == NULL || ngx_http_shunt_local_address(c, &server) != NGX_OK) {
        return 0;
    }

    if (ngx_http_shunt_peer_speaks(ngx_http_shunt_board_entry(board, peer), &server)) {
        return 1;
    }

    ngx_http_shunt_say_mute(c, &server, &who);

    return 0;
}

/* Whether any backend may use the server address that this client knows. Logs if none may. Also
 * returns 1 if no backend is connected: then it is not known what backends may use. */
ngx_uint_t ngx_http_shunt_any_speaks(ngx_connection_t *c, const struct shunt_board *board)
{
    ngx_str_t who = ngx_string("no connected backend may speak");
    ngx_uint_t i, n = ngx_min(board->peers, SHUNT_BOARD_PEERS), backends = 0;
    ngx_http_shunt_address_t server;
    const struct shunt_board_peer *entry;

    if (ngx_http_shunt_local_address(c, &server) != NGX_OK) {
        return 0;
    }

    for (i = 0; i < n; i++) {
        entry = ngx_http_shunt_board_entry(board, i);

        if (__atomic_load_n(&entry->families, __ATOMIC_RELAXED) == 0) {
            continue; /* this peer is no backend, or is not connected */
        }

        backends++;

        if (ngx_http_shunt_peer_speaks(entry, &server)) {
            return 1;
        }
    }

    if (backends == 0) {
        return 1;
    }

    ngx_http_shunt_say_mute(c, &server, &who);

    return 0;
}
