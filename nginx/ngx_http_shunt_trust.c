/* SPDX-License-Identifier: MIT */
/*
 * The directive shunt_trust: addresses of the tiers next to this one (the servers before and after
 * it on the path of requests). A consent from a "plain" address is accepted even if it was meant
 * for another server, because the tier at the address, or one before it, has no Shunt. A consent is
 * a header field of a request, by which each tier says that it may be bypassed.
 */
#include "ngx_http_shunt.h"

ngx_uint_t ngx_http_shunt_is_trusted(const ngx_http_shunt_loc_conf_t *lcf, struct sockaddr *sa)
{
    return lcf->trust && ngx_cidr_match(sa, lcf->trust) == NGX_OK;
}

ngx_uint_t ngx_http_shunt_is_plain(const ngx_http_shunt_loc_conf_t *lcf, struct sockaddr *sa)
{
    return lcf->plain && ngx_cidr_match(sa, lcf->plain) == NGX_OK;
}

/* Whether to log an address: the first NGX_HTTP_SHUNT_ADDRESSES_SAID of them once each. Strangers
 * can cause such lines, and must not fill the log. */
ngx_uint_t ngx_http_shunt_may_say_address(ngx_http_shunt_said_t *said, const ngx_str_t *address)
{
    ngx_uint_t i;

    for (i = 0; i < said->n; i++) {
        if (said->address[i].len == address->len &&
            ngx_memcmp(said->address[i].text, address->data, address->len) == 0) {
            return 0;
        }
    }

    if (said->n == NGX_HTTP_SHUNT_ADDRESSES_SAID || address->len > NGX_SOCKADDR_STRLEN) {
        return 0;
    }

    said->address[said->n].len = address->len;
    ngx_memcpy(said->address[said->n++].text, address->data, address->len);

    return 1;
}

/* Logs that a response is relayed because its consent came from an address that is not trusted. */
void ngx_http_shunt_say_distrusted(ngx_http_request_t *r)
{
    ngx_str_t address;
    ngx_connection_t *c = r->connection;
    static ngx_http_shunt_said_t said;

    if (ngx_http_shunt_address_text(r->pool, c->sockaddr, c->socklen, &address) != NGX_OK ||
        !ngx_http_shunt_may_say_address(&said, &address)) {
        return;
    }

    ngx_log_error(NGX_LOG_ERR, c->log, 0,
                  "shunt: responses to %V are relayed, because its requests carry consents and "
                  "\"shunt_trust\" does not name it; if it is a tier of this service, add "
                  "\"shunt_trust %V;\" here",
                  &address, &address);
}

static char *ngx_http_shunt_trust_parse(ngx_conf_t *cf, ngx_str_t *text, ngx_cidr_t *cidr)
{
    ngx_int_t rc;

    ngx_memzero(cidr, sizeof(ngx_cidr_t));

    if (ngx_strcmp(text->data, "unix:") == 0) {
        cidr->family = AF_UNIX;
        return NGX_CONF_OK;
    }

    rc = ngx_ptocidr(text, cidr);

    if (rc == NGX_ERROR) {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, 0, "invalid address or network \"%V\"", text);
        return NGX_CONF_ERROR;
    }

    if (rc == NGX_DONE) {
        ngx_conf_log_error(NGX_LOG_WARN, cf, 0, "low address bits of %V are meaningless", text);
    }

    return NGX_CONF_OK;
}

static char *ngx_http_shunt_trust_add(ngx_conf_t *cf, ngx_array_t **list, const ngx_cidr_t *cidr)
{
    ngx_cidr_t *added;

    if (*list == NULL) {
        *list = ngx_array_create(cf->pool, 4, sizeof(ngx_cidr_t));
    }

    added = *list ? ngx_array_push(*list) : NULL;
    if (added == NULL) {
        return NGX_CONF_ERROR;
    }

    *added = *cidr;

    return NGX_CONF_OK;
}

/* Reads a shunt_trust directive. The addresses of several directives on one level add up. */
char *ngx_http_shunt_trust(ngx_conf_t *cf, ngx_command_t *cmd, void *conf)
{
    ngx_uint_t i, n, plain;
    ngx_cidr_t cidr;
    ngx_str_t *value = cf->args->elts;
    ngx_http_shunt_loc_conf_t *lcf = conf;
    ngx_http_shunt_main_conf_t *mcf;
    static ngx_str_t all[] = {ngx_string("0.0.0.0/0"), ngx_string("::/0"), ngx_string("unix:")};

    n = cf->args->nelts - 1;
    value++;
    plain = n > 1 && ngx_strcmp(value[n - 1].data, "plain") == 0;
    n -= plain;

    if (lcf->trust == NULL) {
        return "conflicts with \"none\"";
    }

    if (n == 1 && ngx_strcmp(value[0].data, "none") == 0) {
        if (lcf->trust != NGX_CONF_UNSET_PTR || plain) {
            return "has \"none\" together with other values";
        }

        lcf->trust = NULL;
        return NGX_CONF_OK;
    }

    if (n == 1 && ngx_strcmp(value[0].data, "all") == 0) {
        n = sizeof(all) / sizeof(all[0]);
        value = all;
    }

    if (lcf->trust == NGX_CONF_UNSET_PTR) {
        lcf->trust = NULL;
    }

    for (i = 0; i < n; i++) {
        if (ngx_http_shunt_trust_parse(cf, &value[i], &cidr) != NGX_CONF_OK ||
            ngx_http_shunt_trust_add(cf, &lcf->trust, &cidr) != NGX_CONF_OK ||
            (plain && ngx_http_shunt_trust_add(cf, &lcf->plain, &cidr) != NGX_CONF_OK)) {
            return NGX_CONF_ERROR;
        }
    }

    mcf = ngx_http_conf_get_module_main_conf(cf, ngx_http_shunt_module);
    mcf->trusting = 1;

    return NGX_CONF_OK;
}
