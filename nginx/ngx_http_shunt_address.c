/* SPDX-License-Identifier: MIT */
/* Addresses of sockets, in one form for both IP versions. */
#include "ngx_http_shunt.h"

/* Converts an address. NGX_DECLINED: it is not an IP address. */
ngx_int_t ngx_http_shunt_address_of(const struct sockaddr *sa, ngx_http_shunt_address_t *address)
{
    const struct sockaddr_in *sin;
    const struct sockaddr_in6 *sin6;

    switch (sa->sa_family) {

    case AF_INET6:
        sin6 = (const struct sockaddr_in6 *) sa;
        ngx_memcpy(address->bytes, &sin6->sin6_addr, 16);
        address->port = sin6->sin6_port;
        address->is_ipv4 = IN6_IS_ADDR_V4MAPPED(&sin6->sin6_addr);
        return NGX_OK;

    case AF_INET:
        sin = (const struct sockaddr_in *) sa;
        ngx_memzero(address->bytes, 10);
        ngx_memset(address->bytes + 10, 0xff, 2);
        ngx_memcpy(address->bytes + 12, &sin->sin_addr, 4);
        address->port = sin->sin_port;
        address->is_ipv4 = 1;
        return NGX_OK;

    default:
        return NGX_DECLINED;
    }
}

/* Gets the address and port of this end of a connection. If the socket listens at a wildcard
 * address, asks the kernel, once for each connection. */
ngx_int_t ngx_http_shunt_local_address(ngx_connection_t *c, ngx_http_shunt_address_t *address)
{
    if (ngx_connection_local_sockaddr(c, NULL, 0) != NGX_OK) {
        return NGX_ERROR;
    }

    return ngx_http_shunt_address_of(c->local_sockaddr, address);
}

/* Makes the text of an address as "shunt_trust" takes it: without a port, and an IPv4 address as
 * a.b.c.d, even if it is mapped into IPv6. Any address that is not an IP address becomes
 * "unix:". */
ngx_int_t ngx_http_shunt_address_text(ngx_pool_t *pool, struct sockaddr *sa, socklen_t socklen,
                                      ngx_str_t *text)
{
    u_char *b;
    ngx_http_shunt_address_t address;

    if (ngx_http_shunt_address_of(sa, &address) != NGX_OK) {
        ngx_str_set(text, "unix:");
        return NGX_OK;
    }

    text->data = ngx_pnalloc(pool, NGX_SOCKADDR_STRLEN);
    if (text->data == NULL) {
        return NGX_ERROR;
    }

    if (address.is_ipv4) {
        b = address.bytes + 12;
        text->len = ngx_sprintf(text->data, "%ud.%ud.%ud.%ud", b[0], b[1], b[2], b[3]) - text->data;

    } else {
        text->len = ngx_sock_ntop(sa, socklen, text->data, NGX_SOCKADDR_STRLEN, 0);
    }

    return NGX_OK;
}
