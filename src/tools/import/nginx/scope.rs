//! The settings that nginx's levels inherit: `http`, `server` and `location`.

use std::collections::BTreeMap;

use crate::tools::import::model::{Model, Origin, Table, quoted};
use crate::tools::import::nginx::syntax::Directive;

/// A directive that a level has set, with its arguments.
#[derive(Debug, Clone)]
pub(super) struct Setting {
    /// Position of the directive.
    pub(super) origin: Origin,
    /// Name of the directive.
    pub(super) name: String,
    /// Arguments.
    pub(super) args: Vec<String>,
}

impl Setting {
    /// Return an argument, or an empty text if there is none.
    pub(super) fn arg(&self, index: usize) -> &str {
        self.args.get(index).map_or("", String::as_str)
    }

    /// Return the directive, for messages.
    pub(super) fn text(&self) -> String {
        quoted(&[std::slice::from_ref(&self.name), &*self.args].concat().join(" "))
    }
}

/// The inherited settings of a level.
#[derive(Debug, Clone, Default)]
pub(super) struct Scope {
    /// Directives that a lower level replaces: the last one of each name.
    single: BTreeMap<&'static str, Setting>,
    /// Directives that occur several times. A lower level that has one of them inherits none of the same name.
    several: BTreeMap<&'static str, Vec<Setting>>,
    /// Variables that `set` assigns.
    pub(super) variables: BTreeMap<String, String>,
}

/// Directives that occur once, and whose value lower levels inherit.
const SINGLE: &[&str] = &[
    "limit_req_status",
    "limit_conn_status",
    "limit_req_dry_run",
    "limit_conn_dry_run",
    "client_max_body_size",
    "auth_basic",
    "auth_basic_user_file",
    "proxy_connect_timeout",
    "proxy_read_timeout",
    "gzip",
    "gzip_min_length",
    "satisfy",
    "ssl_verify_client",
    "proxy_ssl_verify",
    "proxy_ssl_trusted_certificate",
    "proxy_ssl_certificate",
    "proxy_ssl_certificate_key",
    "proxy_ssl_name",
    "proxy_next_upstream",
    "proxy_next_upstream_tries",
];

/// Directives that occur several times at a level.
const SEVERAL: &[&str] =
    &["limit_req", "limit_conn", "proxy_set_header", "add_header", "proxy_hide_header", "allow", "deny", "gzip_types"];

/// Directives that other parts of the importer read.
const ELSEWHERE: &[&str] = &[
    "http",
    "server",
    "location",
    "upstream",
    "map",
    "geo",
    "limit_req_zone",
    "limit_conn_zone",
    "set_real_ip_from",
    "real_ip_header",
    "real_ip_recursive",
    "listen",
    "server_name",
    "ssl_certificate",
    "ssl_certificate_key",
    "ssl_client_certificate",
    "proxy_pass",
    "grpc_pass",
    "return",
    "rewrite",
    "if",
    "try_files",
    "root",
    "alias",
    "index",
    "internal",
    "events",
    "set",
];

/// Directives without an effect on what requests get: settings of the process, of buffers and of the log, and what
/// Sluicegate does by default.
const NOT_NEEDED: &[&str] = &[
    "user",
    "pid",
    "daemon",
    "master_process",
    "worker_processes",
    "worker_rlimit_nofile",
    "worker_cpu_affinity",
    "worker_priority",
    "worker_shutdown_timeout",
    "worker_connections",
    "multi_accept",
    "use",
    "pcre_jit",
    "load_module",
    "error_log",
    "sendfile",
    "tcp_nopush",
    "tcp_nodelay",
    "reset_timedout_connection",
    "server_tokens",
    "types",
    "types_hash_max_size",
    "types_hash_bucket_size",
    "default_type",
    "charset",
    "server_names_hash_bucket_size",
    "server_names_hash_max_size",
    "map_hash_bucket_size",
    "map_hash_max_size",
    "variables_hash_max_size",
    "variables_hash_bucket_size",
    "proxy_headers_hash_max_size",
    "proxy_headers_hash_bucket_size",
    "client_body_buffer_size",
    "client_body_temp_path",
    "client_header_buffer_size",
    "large_client_header_buffers",
    "proxy_buffer_size",
    "proxy_buffers",
    "proxy_busy_buffers_size",
    "proxy_buffering",
    "proxy_max_temp_file_size",
    "proxy_temp_file_write_size",
    "proxy_temp_path",
    "proxy_http_version",
    "proxy_request_buffering",
    "proxy_socket_keepalive",
    "gzip_vary",
    "gzip_proxied",
    "gzip_comp_level",
    "gzip_buffers",
    "gzip_http_version",
    "gzip_disable",
    "http2",
    "http2_max_concurrent_streams",
    "limit_req_log_level",
    "limit_conn_log_level",
    "log_not_found",
    "log_subrequest",
    "open_file_cache",
    "open_file_cache_valid",
    "open_file_cache_min_uses",
    "open_file_cache_errors",
    "ssl_session_cache",
    "ssl_session_timeout",
    "ssl_session_tickets",
    "ssl_prefer_server_ciphers",
    "ssl_dhparam",
    "ssl_buffer_size",
    "ssl_early_data",
    "keepalive_requests",
    "keepalive_disable",
    "lua_package_path",
    "default",
    "uninitialized_variable_warn",
    "rewrite_log",
    "absolute_redirect",
    "port_in_redirect",
    "server_name_in_redirect",
    "proxy_ssl_server_name",
    "proxy_ssl_session_reuse",
    "proxy_ssl_protocols",
];

/// Directives that have an equal which the importer does not write, each with what to do.
const ADVICE: &[(&[&str], &str)] = &[
    (
        &["access_log", "log_format"],
        "the access log has a default format and goes to standard output: set `access` of [log]",
    ),
    (&["keepalive_timeout"], "`server.idle_timeout` is 75s by default"),
    (&["client_header_timeout"], "`server.header_timeout` is 10s by default"),
    (&["client_body_timeout", "send_timeout"], "`server.body_idle_timeout` is 30s by default"),
    (&["proxy_send_timeout"], "`server.body_idle_timeout` is 30s by default"),
    (&["ssl_protocols"], "listeners use TLS 1.2 and 1.3"),
    (&["ssl_ciphers", "ssl_ecdh_curve", "ssl_conf_command"], "the cipher suites are those of rustls"),
    (&["ssl_stapling", "ssl_stapling_verify", "ssl_trusted_certificate"], "OCSP responses are not stapled"),
    (&["ssl_verify_depth", "ssl_crl"], "client certificates are verified without this setting"),
    (&["resolver", "resolver_timeout"], "the gateway uses the name servers in /etc/resolv.conf"),
    (&["error_page", "proxy_intercept_errors"], "`error_pages` sets the content of the errors of the gateway"),
    (&["proxy_redirect"], "the gateway does not change `Location` of upstream responses"),
    (&["proxy_cookie_path", "proxy_cookie_domain", "proxy_cookie_flags"], "the gateway does not change cookies"),
    (&["underscores_in_headers"], "headers with underscores are forwarded unless they are aliases"),
    (&["merge_slashes"], "`server.path_policy` sets how slashes are handled"),
    (&["ignore_invalid_headers", "proxy_ignore_client_abort"], "the gateway has no such setting"),
    (
        &["proxy_cache", "proxy_cache_valid", "proxy_cache_key", "proxy_cache_path", "proxy_cache_use_stale"],
        "the gateway does not cache responses",
    ),
    (
        &["proxy_cache_bypass", "proxy_no_cache", "proxy_cache_lock", "proxy_ignore_headers"],
        "the gateway does not cache responses",
    ),
    (&["expires", "etag"], "write `cache-control` in `response_headers`"),
    (&["auth_request", "auth_request_set"], "use `[auth.NAME]` with kind = \"forward\""),
    (&["limit_rate", "limit_rate_after"], "the gateway does not limit the bandwidth of a response"),
    (
        &["autoindex", "gzip_static", "fastcgi_param", "fastcgi_index", "fastcgi_split_path_info"],
        "the gateway serves no files and speaks no FastCGI",
    ),
    (&["fastcgi_pass", "uwsgi_pass", "scgi_pass", "memcached_pass"], "upstreams speak HTTP"),
    (&["stub_status"], "use the admin listener: /metrics"),
    (&["split_clients"], "write weights of upstreams: upstream = { api = 9, canary = 1 }"),
    (&["mirror"], "use `mirror` of the route"),
    (&["limit_except"], "use `methods` of routes"),
    (&["stream", "mail"], "the gateway proxies only HTTP"),
];

impl Scope {
    /// Return the settings of a level inside this one. Report directives that have no equal.
    pub(super) fn enter(&self, block: &[Directive], model: &mut Model) -> Scope {
        let mut scope = self.clone();
        let mut replaced: Vec<&'static str> = Vec::new();
        for directive in block {
            let name = directive.name.as_str();
            if let Some(known) = SINGLE.iter().find(|known| **known == name) {
                scope.single.insert(known, setting(directive));
            } else if let Some(known) = SEVERAL.iter().find(|known| **known == name) {
                // `allow` and `deny` are one list.
                let known = if *known == "deny" { "allow" } else { *known };
                let list = scope.several.entry(known).or_default();
                if !replaced.contains(&known) {
                    list.clear();
                    replaced.push(known);
                }
                list.push(setting(directive));
            } else if name == "set" && super::keys::variable_names(directive.arg(1)).is_empty() {
                let variable = directive.arg(0).trim_start_matches('$');
                scope.variables.insert(variable.to_owned(), directive.arg(1).to_owned());
                if matches!(variable, "limit_rate" | "args") {
                    model.no_equal(&directive.origin, quoted(&directive.text()));
                }
            } else if name == "set" {
                model.no_equal(
                    &directive.origin,
                    format!("`{}`: variables are not computed", quoted(&directive.text())),
                );
            } else if !ELSEWHERE.contains(&name) {
                report(directive, model);
            }
        }
        scope
    }

    /// Return a setting that occurs once.
    pub(super) fn single(&self, name: &str) -> Option<&Setting> {
        self.single.get(name)
    }

    /// Return the settings of a name that may occur several times.
    pub(super) fn several(&self, name: &str) -> &[Setting] {
        self.several.get(name).map_or(&[], Vec::as_slice)
    }

    /// Return a text with the values of the variables that `set` assigns.
    pub(super) fn expanded(&self, text: &str) -> String {
        let mut expanded = text.to_owned();
        for name in super::keys::variable_names(text) {
            if let Some(value) = self.variables.get(&name) {
                expanded = expanded.replace(&format!("${{{name}}}"), value).replace(&format!("${name}"), value);
            }
        }
        expanded
    }
}

fn setting(directive: &Directive) -> Setting {
    Setting { origin: directive.origin.clone(), name: directive.name.clone(), args: directive.args.clone() }
}

/// Report a directive that is not imported.
pub(super) fn report(directive: &Directive, model: &mut Model) {
    let text = quoted(&directive.text());
    let name = directive.name.as_str();
    if NOT_NEEDED.contains(&name) {
        model.not_needed(&directive.origin, format!("`{text}`"));
    } else if let Some((_, advice)) = ADVICE.iter().find(|(names, _)| names.contains(&name)) {
        model.no_equal(&directive.origin, format!("`{text}`: {advice}"));
    } else {
        model.no_equal(&directive.origin, format!("`{text}`"));
    }
}

/// Set `allow` and `deny` of a route. nginx uses the first rule that matches.
pub(super) fn access_rules(rules: &[Setting], route: &mut Table, model: &mut Model) {
    let mut allowed: Vec<ipnet::IpNet> = Vec::new();
    for rule in rules {
        let (network, is_allow) = (rule.arg(0), rule.name == "allow");
        if network == "all" {
            if !is_allow && allowed.is_empty() {
                route.set_list("deny", ["0.0.0.0/0".to_owned(), "::/0".to_owned()]);
            }
            if !is_allow {
                route.set_list("allow", allowed.iter().map(ToString::to_string));
            } else if !allowed.is_empty() {
                model.differs(&rule.origin, "`allow all`: networks that are allowed explicitly need no rule");
            }
            return;
        }
        match (crate::identity::access::parse_network(network), is_allow) {
            (None, _) => model.no_equal(&rule.origin, format!("`{}`: not a network", rule.text())),
            (Some(net), true) => allowed.push(net),
            (Some(net), false) => {
                if allowed.iter().any(|allow| allow.contains(&net) || net.contains(allow)) {
                    let text = format!("`{}`: `deny` takes precedence over an earlier `allow`", rule.text());
                    model.differs(&rule.origin, text);
                }
                route.push("deny", net.to_string());
            }
        }
    }
}
