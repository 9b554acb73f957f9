/* SPDX-License-Identifier: MIT */
/*
 * Shunt's nginx module: its directives, its configuration, and functions that the other files
 * share. docs/nginx.md describes the directives. A consent is a header field of a request, by which
 * each tier (server on the request's path) says that it may be bypassed. To hand a body off is to
 * let a backend send it on the client's own connection. To relay a body is to send it through all
 * tiers.
 */
#include <malloc.h>

#include "ngx_http_shunt.h"

/* Largest amount of free heap that a worker keeps, in bytes. */
#define NGX_HTTP_SHUNT_HEAP_KEPT (4 * 1024 * 1024)

static ngx_int_t ngx_http_shunt_postconfiguration(ngx_conf_t *cf);
static ngx_int_t ngx_http_shunt_init_module(ngx_cycle_t *cycle);
static ngx_int_t ngx_http_shunt_init_process(ngx_cycle_t *cycle);
static void ngx_http_shunt_exit_process(ngx_cycle_t *cycle);
static void *ngx_http_shunt_create_main_conf(ngx_conf_t *cf);
static char *ngx_http_shunt_init_main_conf(ngx_conf_t *cf, void *conf);
static void *ngx_http_shunt_create_loc_conf(ngx_conf_t *cf);
static char *ngx_http_shunt_merge_loc_conf(ngx_conf_t *cf, void *parent, void *child);
static char *ngx_http_shunt_role(ngx_conf_t *cf, ngx_command_t *cmd, void *conf);
static char *ngx_http_shunt_agent(ngx_conf_t *cf, ngx_command_t *cmd, void *conf);
static void ngx_http_shunt_cleanup(void *data);

#define NGX_HTTP_SHUNT_ANYWHERE NGX_HTTP_MAIN_CONF | NGX_HTTP_SRV_CONF | NGX_HTTP_LOC_CONF

static ngx_uint_t ngx_http_shunt_heap_is_set; /* 1: the environment may set malloc's thresholds */

static ngx_conf_enum_t ngx_http_shunt_recover_values[] = {{ngx_string("off"),
                                                           NGX_HTTP_SHUNT_NOBODY},
                                                          {ngx_string("etag"), NGX_HTTP_SHUNT_ETAG},
                                                          {ngx_string("digest"),
                                                           NGX_HTTP_SHUNT_DIGEST},
                                                          {ngx_null_string, 0}};

static ngx_command_t ngx_http_shunt_commands[] = {

    {ngx_string("shunt_agent"), NGX_HTTP_MAIN_CONF | NGX_CONF_TAKE1, ngx_http_shunt_agent,
     NGX_HTTP_MAIN_CONF_OFFSET, 0, NULL},

    {ngx_string("shunt"), NGX_HTTP_SHUNT_ANYWHERE | NGX_CONF_FLAG, ngx_http_shunt_role,
     NGX_HTTP_LOC_CONF_OFFSET, offsetof(ngx_http_shunt_loc_conf_t, shunt), NULL},

    {ngx_string("shunt_mean_length"), NGX_HTTP_SHUNT_ANYWHERE | NGX_CONF_TAKE1,
     ngx_conf_set_size_slot, NGX_HTTP_LOC_CONF_OFFSET,
     offsetof(ngx_http_shunt_loc_conf_t, mean_length), NULL},

    {ngx_string("shunt_alone_length"), NGX_HTTP_SHUNT_ANYWHERE | NGX_CONF_TAKE1,
     ngx_conf_set_size_slot, NGX_HTTP_LOC_CONF_OFFSET,
     offsetof(ngx_http_shunt_loc_conf_t, alone_length), NULL},

    {ngx_string("shunt_trust"), NGX_HTTP_MAIN_CONF | NGX_HTTP_SRV_CONF | NGX_CONF_1MORE,
     ngx_http_shunt_trust, NGX_HTTP_LOC_CONF_OFFSET, 0, NULL},

    {ngx_string("shunt_consent"), NGX_HTTP_SHUNT_ANYWHERE | NGX_CONF_FLAG, ngx_conf_set_flag_slot,
     NGX_HTTP_LOC_CONF_OFFSET, offsetof(ngx_http_shunt_loc_conf_t, consent), NULL},

    {ngx_string("shunt_offer"), NGX_HTTP_SHUNT_ANYWHERE | NGX_CONF_FLAG, ngx_http_shunt_role,
     NGX_HTTP_LOC_CONF_OFFSET, offsetof(ngx_http_shunt_loc_conf_t, offer), NULL},

    {ngx_string("shunt_offer_min_length"), NGX_HTTP_SHUNT_ANYWHERE | NGX_CONF_TAKE1,
     ngx_conf_set_size_slot, NGX_HTTP_LOC_CONF_OFFSET,
     offsetof(ngx_http_shunt_loc_conf_t, offer_min_length), NULL},

    {ngx_string("shunt_offer_types"), NGX_HTTP_SHUNT_ANYWHERE | NGX_CONF_1MORE, ngx_http_types_slot,
     NGX_HTTP_LOC_CONF_OFFSET, offsetof(ngx_http_shunt_loc_conf_t, offer_types_keys), NULL},

    {ngx_string("shunt_recover"), NGX_HTTP_SHUNT_ANYWHERE | NGX_CONF_TAKE1, ngx_conf_set_enum_slot,
     NGX_HTTP_LOC_CONF_OFFSET, offsetof(ngx_http_shunt_loc_conf_t, recover),
     ngx_http_shunt_recover_values},

    ngx_null_command};

static ngx_http_module_t ngx_http_shunt_module_ctx = {
    ngx_http_shunt_add_variables,     /* preconfiguration */
    ngx_http_shunt_postconfiguration, /* postconfiguration */
    ngx_http_shunt_create_main_conf,  /* create main configuration */
    ngx_http_shunt_init_main_conf,    /* init main configuration */
    NULL,                             /* create server configuration */
    NULL,                             /* merge server configuration */
    ngx_http_shunt_create_loc_conf,   /* create location configuration */
    ngx_http_shunt_merge_loc_conf     /* merge location configuration */
};

ngx_module_t ngx_http_shunt_module = {NGX_MODULE_V1,
                                      &ngx_http_shunt_module_ctx,  /* module context */
                                      ngx_http_shunt_commands,     /* module directives */
                                      NGX_HTTP_MODULE,             /* module type */
                                      NULL,                        /* init master */
                                      ngx_http_shunt_init_module,  /* init module */
                                      ngx_http_shunt_init_process, /* init process */
                                      NULL,                        /* init thread */
                                      NULL,                        /* exit thread */
                                      ngx_http_shunt_exit_process, /* exit process */
                                      NULL,                        /* exit master */
                                      NGX_MODULE_V1_PADDING};

static ngx_http_module_t ngx_http_shunt_late_module_ctx = {
    NULL,                     /* preconfiguration */
    ngx_http_shunt_late_init, /* postconfiguration */
    NULL,                     /* create main configuration */
    NULL,                     /* init main configuration */
    NULL,                     /* create server configuration */
    NULL,                     /* merge server configuration */
    NULL,                     /* create location configuration */
    NULL                      /* merge location configuration */
};

ngx_module_t ngx_http_shunt_late_module = {NGX_MODULE_V1,
                                           &ngx_http_shunt_late_module_ctx, /* module context */
                                           NULL,                            /* module directives */
                                           NGX_HTTP_MODULE,                 /* module type */
                                           NULL,                            /* init master */
                                           NULL,                            /* init module */
                                           NULL,                            /* init process */
                                           NULL,                            /* init thread */
                                           NULL,                            /* exit thread */
                                           NULL,                            /* exit process */
                                           NULL,                            /* exit master */
                                           NGX_MODULE_V1_PADDING};

/* ---- the context of a request ---- */

static ngx_http_shunt_ctx_t *ngx_http_shunt_ctx_lost(ngx_http_request_t *r)
{
    ngx_http_cleanup_t *cln;

    /* An internal redirect and an error page clear r->ctx; the request's cleanup list keeps the
     * context. */
    for (cln = r->cleanup; cln; cln = cln->next) {
        if (cln->handler == ngx_http_shunt_cleanup) {
            ngx_http_set_ctx(r, cln->data, ngx_http_shunt_module);
            return cln->data;
        }
    }

    return NULL;
}

/* Returns the request's context, or NULL if it has none. Subrequests have none: their bodies are
 * only parts of a response, and a body is handed off as a whole. */
ngx_http_shunt_ctx_t *ngx_http_shunt_ctx(ngx_http_request_t *r)
{
    ngx_http_shunt_ctx_t *ctx;

    if (r != r->main) {
        return NULL;
    }

    ctx = ngx_http_get_module_ctx(r, ngx_http_shunt_module);

    if (ctx == NULL && (r->internal || r->filter_finalize)) {
        return ngx_http_shunt_ctx_lost(r);
    }

    return ctx;
}

ngx_http_shunt_ctx_t *ngx_http_shunt_ctx_create(ngx_http_request_t *r)
{
    ngx_http_cleanup_t *cln;
    ngx_http_shunt_ctx_t *ctx;

    ctx = ngx_http_shunt_ctx(r);
    if (ctx) {
        return ctx;
    }

    ctx = ngx_pcalloc(r->pool, sizeof(ngx_http_shunt_ctx_t));
    if (ctx == NULL) {
        return NULL;
    }

    /* not a pool cleanup, which would run after the request has been logged: the cleanup may still
     * count bytes that the log shows */
    cln = ngx_http_cleanup_add(r, 0);
    if (cln == NULL) {
        return NULL;
    }

    ctx->request = r;
    ctx->outcome = -1;

    cln->handler = ngx_http_shunt_cleanup;
    cln->data = ctx;

    ngx_http_set_ctx(r, ctx, ngx_http_shunt_module);

    return ctx;
}

static void ngx_http_shunt_cleanup(void *data)
{
    ngx_http_shunt_release(data);
}

/* Counts what became of a response, and keeps it for the variable $shunt. */
void ngx_http_shunt_outcome(ngx_http_request_t *r, ngx_uint_t counter)
{
    ngx_http_shunt_ctx_t *ctx;

    ngx_http_shunt_count(counter, 1);

    if (r != r->main) {
        return;
    }

    ctx = ngx_http_shunt_ctx_create(r);
    if (ctx) {
        ctx->outcome = counter;
    }
}

/* Log level for something that is the same for all workers. Worker 0 logs it as an error, which
 * nginx's log shows by Debian's default; the others log it at `level`. */
ngx_uint_t ngx_http_shunt_level(ngx_uint_t level)
{
    return ngx_worker == 0 ? NGX_LOG_ERR : level;
}

/* Limits log lines that clients or other machines could cause without end: returns 1 at the first
 * call in each second, else 0. `said`: time of the caller's last call. */
ngx_uint_t ngx_http_shunt_may_say(time_t *said)
{
    ngx_uint_t may = *said != ngx_time();

    *said = ngx_time();

    return may;
}

/* Ends the request's upstream, as ngx_http_upstream_create() ends an earlier one. NGX_AGAIN: a
 * thread still writes the upstream's bytes to a file. */
ngx_int_t ngx_http_shunt_end_upstream(ngx_http_request_t *r)
{
    ngx_http_upstream_t *u = r->upstream;

    if (u == NULL || u->cleanup == NULL) {
        return NGX_OK;
    }

    if (u->pipe && u->pipe->writing) {
        return NGX_AGAIN;
    }

    r->main->count++; /* the cleanup decrements the count */
    (*u->cleanup)(r);

    return NGX_OK;
}

ngx_int_t ngx_http_shunt_is_field(ngx_table_elt_t *h)
{
    return h->key.len >= 6 && (h->key.data[0] | 0x20) == 's' &&
           ngx_strncasecmp(h->key.data, (u_char *) "shunt-", 6) == 0;
}

/* ---- start and exit ---- */

static ngx_int_t ngx_http_shunt_postconfiguration(ngx_conf_t *cf)
{
    ngx_http_handler_pt *h;
    ngx_http_core_main_conf_t *cmcf;
    ngx_http_shunt_main_conf_t *mcf;

    cmcf = ngx_http_conf_get_module_main_conf(cf, ngx_http_core_module);

    /* This module is the last one, and nginx runs a phase's handlers in reverse order. So the first
     * handler below judges Shunt-* fields by the client's address before realip changes that
     * address, and the second one adds a consent before mirror and try_files run. */
    h = ngx_array_push(&cmcf->phases[NGX_HTTP_POST_READ_PHASE].handlers);
    if (h == NULL) {
        return NGX_ERROR;
    }

    *h = ngx_http_shunt_post_read_handler;

    h = ngx_array_push(&cmcf->phases[NGX_HTTP_PRECONTENT_PHASE].handlers);
    if (h == NULL) {
        return NGX_ERROR;
    }

    *h = ngx_http_shunt_precontent_handler;

    mcf = ngx_http_conf_get_module_main_conf(cf, ngx_http_shunt_module);

    if (ngx_http_shunt_ssl_init(cf) != NGX_OK ||
        ((mcf->frontend || mcf->trusting) && ngx_http_shunt_hop_init(cf) != NGX_OK)) {
        return NGX_ERROR;
    }

    return ngx_http_shunt_early_init(cf);
}

/* Logs that responses are relayed because "shunt_trust" is missing. Called when the workers' error
 * log is open. */
static void ngx_http_shunt_say_mistrust(ngx_cycle_t *cycle, ngx_http_shunt_main_conf_t *mcf)
{
    if (mcf->untrusting) {
        ngx_log_error(
            NGX_LOG_ERR, cycle->log, 0,
            "shunt: \"shunt on\" without \"shunt_trust\": responses are relayed; name the "
            "addresses of the next tier");
    }

    if (mcf->unasked) {
        ngx_log_error(NGX_LOG_ERR, cycle->log, 0,
                      "shunt: \"shunt_offer on\" without \"shunt_trust\": responses are relayed; "
                      "name the addresses of the tier before");
    }
}

/* Runs in the master process. Only the master can read the environment, because nginx clears a
 * worker's environment before it calls modules in the worker. */
static ngx_int_t ngx_http_shunt_init_module(ngx_cycle_t *cycle)
{
    ngx_http_shunt_main_conf_t *mcf =
        ngx_http_cycle_get_module_main_conf(cycle, ngx_http_shunt_module);

    ngx_http_shunt_heap_is_set = getenv("MALLOC_TRIM_THRESHOLD_") || getenv("GLIBC_TUNABLES");

    if (mcf) {
        ngx_http_shunt_say_mistrust(cycle, mcf);
    }

    if (mcf && mcf->frontend && !ngx_test_config) {
        ngx_http_shunt_watch_listeners(cycle);
    }

    return NGX_OK;
}

static ngx_int_t ngx_http_shunt_init_process(ngx_cycle_t *cycle)
{
    ngx_http_shunt_main_conf_t *mcf;

    /* not for the cache manager and loader, which are NGX_PROCESS_HELPER */
    if (ngx_process != NGX_PROCESS_WORKER && ngx_process != NGX_PROCESS_SINGLE) {
        return NGX_OK;
    }

    /* glibc returns free memory above 128 KiB at the top of the heap to the kernel. With shortcuts,
     * a worker's responses are headers alone. Then glibc may return memory at the end of each
     * response, and the next response begins with page faults. */
#if defined(M_TRIM_THRESHOLD)
    if (!ngx_http_shunt_heap_is_set) {
        (void) mallopt(M_TRIM_THRESHOLD, NGX_HTTP_SHUNT_HEAP_KEPT);
        /* Once one of the two thresholds is set, glibc adapts neither any more (mallopt(3)), so
         * both are set. */
        (void) mallopt(M_MMAP_THRESHOLD, NGX_HTTP_SHUNT_HEAP_KEPT / 4);
    }
#endif

    mcf = ngx_http_cycle_get_module_main_conf(cycle, ngx_http_shunt_module);

    if (mcf == NULL || (!mcf->frontend && !mcf->backend)) {
        return NGX_OK;
    }

    ngx_http_shunt_consent_init();

    return ngx_http_shunt_agent_init(cycle, mcf);
}

static void ngx_http_shunt_exit_process(ngx_cycle_t *cycle)
{
    ngx_http_shunt_agent_exit();
}

/* ---- configuration ---- */

static void *ngx_http_shunt_create_main_conf(ngx_conf_t *cf)
{
    return ngx_pcalloc(cf->pool, sizeof(ngx_http_shunt_main_conf_t));
}

static char *ngx_http_shunt_init_main_conf(ngx_conf_t *cf, void *conf)
{
    ngx_http_shunt_main_conf_t *mcf = conf;

    if (mcf->agent.data == NULL) {
        ngx_str_set(&mcf->agent, "/run/shunt/shuntd.sock");
    }

    return NGX_CONF_OK;
}

static void *ngx_http_shunt_create_loc_conf(ngx_conf_t *cf)
{
    ngx_http_shunt_loc_conf_t *conf;

    conf = ngx_pcalloc(cf->pool, sizeof(ngx_http_shunt_loc_conf_t));
    if (conf == NULL) {
        return NULL;
    }

    conf->shunt = NGX_CONF_UNSET;
    conf->mean_length = NGX_CONF_UNSET_SIZE;
    conf->alone_length = NGX_CONF_UNSET_SIZE;
    ngx_http_shunt_worth_init(conf);
    ngx_http_shunt_lifetime_init(conf);
    conf->consent = NGX_CONF_UNSET;
    conf->offer = NGX_CONF_UNSET;
    conf->offer_min_length = NGX_CONF_UNSET_SIZE;
    conf->trust = NGX_CONF_UNSET_PTR;
    conf->recover = NGX_CONF_UNSET_UINT;

    return conf;
}

static char *ngx_http_shunt_merge_loc_conf(ngx_conf_t *cf, void *parent, void *child)
{
    ngx_http_shunt_loc_conf_t *prev = parent;
    ngx_http_shunt_loc_conf_t *conf = child;
    ngx_http_shunt_main_conf_t *mcf = ngx_http_conf_get_module_main_conf(cf, ngx_http_shunt_module);

    ngx_conf_merge_value(conf->shunt, prev->shunt, 0);
    ngx_conf_merge_size_value(conf->mean_length, prev->mean_length, 4 * 1024);
    ngx_conf_merge_size_value(conf->alone_length, prev->alone_length, 256 * 1024);
    ngx_conf_merge_value(conf->consent, prev->consent, 1);
    ngx_conf_merge_value(conf->offer, prev->offer, 0);
    ngx_conf_merge_size_value(conf->offer_min_length, prev->offer_min_length, 32 * 1024);

    if (conf->trust == NGX_CONF_UNSET_PTR) {
        conf->plain = prev->plain;
    }

    ngx_conf_merge_ptr_value(conf->trust, prev->trust, NULL);
    ngx_conf_merge_uint_value(conf->recover, prev->recover, NGX_HTTP_SHUNT_ETAG);

    if (conf->trust == NULL) {
        mcf->untrusting |= conf->shunt;
        mcf->unasked |= conf->offer;
    }

    if (conf->offer_types_keys == NULL && prev->offer_types_keys == NULL) {
        prev->offer_types_keys = (void *) -1; /* "*", as ngx_http_types_slot() writes it */
    }

    return ngx_http_merge_types(cf, &conf->offer_types_keys, &conf->offer_types,
                                &prev->offer_types_keys, &prev->offer_types,
                                ngx_http_html_default_types);
}

/* Sets "shunt" or "shunt_offer". Also notes for the workers that they need the agent, as frontend
 * or as backend. */
static char *ngx_http_shunt_role(ngx_conf_t *cf, ngx_command_t *cmd, void *conf)
{
    char *rv;
    ngx_http_shunt_main_conf_t *mcf;

    rv = ngx_conf_set_flag_slot(cf, cmd, conf);

    if (rv != NGX_CONF_OK || *(ngx_flag_t *) ((char *) conf + cmd->offset) != 1) {
        return rv;
    }

    mcf = ngx_http_conf_get_module_main_conf(cf, ngx_http_shunt_module);

    if (cmd->offset == offsetof(ngx_http_shunt_loc_conf_t, shunt)) {
        mcf->frontend = 1;

    } else {
        mcf->backend = 1;
    }

    return NGX_CONF_OK;
}

static char *ngx_http_shunt_agent(ngx_conf_t *cf, ngx_command_t *cmd, void *conf)
{
    ngx_str_t *value = cf->args->elts;
    ngx_http_shunt_main_conf_t *mcf = conf;

    if (mcf->agent.data) {
        return "is duplicate";
    }

    mcf->agent = value[1];

    if (mcf->agent.len > 5 && ngx_strncmp(mcf->agent.data, "unix:", 5) == 0) {
        mcf->agent.data += 5;
        mcf->agent.len -= 5;
    }

    if (mcf->agent.data[0] != '/' ||
        mcf->agent.len >= sizeof(((struct sockaddr_un *) NULL)->sun_path)) {
        return "needs an absolute path of less than 108 bytes";
    }

    return NGX_CONF_OK;
}
