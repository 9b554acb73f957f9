/* SPDX-License-Identifier: MIT */
/* The variables $shunt and $shunt_bytes: what became of a response, for access logs and the
 * directive map. */
#include "ngx_http_shunt.h"

static ngx_int_t ngx_http_shunt_variable(ngx_http_request_t *r, ngx_http_variable_value_t *v,
                                         uintptr_t data);
static ngx_int_t ngx_http_shunt_bytes_variable(ngx_http_request_t *r, ngx_http_variable_value_t *v,
                                               uintptr_t data);

static ngx_http_variable_t ngx_http_shunt_variables[] = {

    {ngx_string("shunt"), NULL, ngx_http_shunt_variable, 0, NGX_HTTP_VAR_NOCACHEABLE, 0},

    {ngx_string("shunt_bytes"), NULL, ngx_http_shunt_bytes_variable, 0, NGX_HTTP_VAR_NOCACHEABLE,
     0},

    ngx_http_null_variable};

#define SHUNT_NAME_X(index, name, meaning) [index] = ngx_string(#name),
static ngx_str_t ngx_http_shunt_counter_names[] = {SHUNT_COUNTER_LIST(SHUNT_NAME_X)};
#undef SHUNT_NAME_X

ngx_str_t *ngx_http_shunt_counter_name(ngx_uint_t counter)
{
    return &ngx_http_shunt_counter_names[counter];
}

ngx_int_t ngx_http_shunt_add_variables(ngx_conf_t *cf)
{
    ngx_http_variable_t *var, *v;

    for (v = ngx_http_shunt_variables; v->name.len; v++) {
        var = ngx_http_add_variable(cf, &v->name, v->flags);
        if (var == NULL) {
            return NGX_ERROR;
        }

        var->get_handler = v->get_handler;
        var->data = v->data;
    }

    return NGX_OK;
}

/* Shows "relayed_no_agent" as "relayed:no_agent", and "fetched_begin" as "fetched:begin". */
static ngx_int_t ngx_http_shunt_counter_text(ngx_http_request_t *r, ngx_int_t counter,
                                             ngx_str_t *text)
{
    u_char *p;
    ngx_str_t *name;

    switch (counter) {

    case -1:
        ngx_str_set(text, "-");
        return NGX_OK;

    case SHUNT_COUNT_shortcuts:
        ngx_str_set(text, "shortcut");
        return NGX_OK;

    case SHUNT_COUNT_offers:
        ngx_str_set(text, "offered");
        return NGX_OK;
    }

    name = &ngx_http_shunt_counter_names[counter];

    text->len = name->len;
    text->data = ngx_pstrdup(r->pool, name);
    if (text->data == NULL) {
        return NGX_ERROR;
    }

    p = ngx_strlchr(text->data, text->data + text->len, '_');
    if (p) {
        *p = ':';
    }

    return NGX_OK;
}

static ngx_int_t ngx_http_shunt_variable(ngx_http_request_t *r, ngx_http_variable_value_t *v,
                                         uintptr_t data)
{
    ngx_str_t text;
    ngx_http_shunt_ctx_t *ctx;

    ctx = ngx_http_shunt_ctx(r->main);

    if (ngx_http_shunt_counter_text(r, ctx ? ctx->outcome : -1, &text) != NGX_OK) {
        return NGX_ERROR;
    }

    v->data = text.data;
    v->len = text.len;
    v->valid = 1;
    v->no_cacheable = 0;
    v->not_found = 0;

    return NGX_OK;
}

static ngx_int_t ngx_http_shunt_bytes_variable(ngx_http_request_t *r, ngx_http_variable_value_t *v,
                                               uintptr_t data)
{
    u_char *p;
    ngx_http_shunt_ctx_t *ctx;

    p = ngx_pnalloc(r->pool, NGX_INT64_LEN);
    if (p == NULL) {
        return NGX_ERROR;
    }

    ctx = ngx_http_shunt_ctx(r->main);

    v->data = p;
    v->len = ngx_sprintf(p, "%uL", ctx ? ctx->bytes : 0) - p;
    v->valid = 1;
    v->no_cacheable = 0;
    v->not_found = 0;

    return NGX_OK;
}
