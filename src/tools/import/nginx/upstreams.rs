//! nginx's upstreams: `upstream` blocks, and the servers that `proxy_pass` names.

use std::collections::BTreeMap;

use toml::Value;

use crate::tools::import::model::{Model, Table, quoted};
use crate::tools::import::nginx::scope::{Scope, Setting};
use crate::tools::import::nginx::syntax::Directive;
use crate::tools::import::units::{duration, milliseconds};

/// Default of `proxy_connect_timeout` and `proxy_read_timeout` in milliseconds.
const DEFAULT_TIMEOUT: u64 = 60_000;

/// Where `proxy_pass` sends requests.
#[derive(Debug, Clone)]
pub(super) struct Target {
    /// Name of the upstream.
    pub(super) upstream: String,
    /// `Host` that nginx sends unless `proxy_set_header` sets it, in the words of `upstream_host`.
    pub(super) host: String,
    /// The path that replaces the matched part of the path.
    pub(super) uri: Option<String>,
}

/// The upstreams of the files.
#[derive(Debug, Default)]
pub(super) struct Upstreams<'a> {
    blocks: BTreeMap<String, &'a Directive>,
    /// Names of the upstreams by protocol and host.
    names: BTreeMap<String, String>,
    /// The longest timeouts of the locations that use an upstream, in milliseconds.
    timeouts: BTreeMap<String, Timeouts>,
}

#[derive(Debug, Default)]
struct Timeouts {
    connect: u64,
    read: u64,
}

impl<'a> Upstreams<'a> {
    /// Add an `upstream` block.
    pub(super) fn add(&mut self, directive: &'a Directive) {
        self.blocks.insert(directive.arg(0).to_owned(), directive);
    }

    /// Return the target of a `proxy_pass` or `grpc_pass`. `None`: it has no equal, which is reported.
    pub(super) fn target(&mut self, pass: &Setting, scope: &Scope, model: &mut Model) -> Option<Target> {
        let url = scope.expanded(pass.arg(0));
        let is_grpc = pass.name == "grpc_pass";
        let (scheme, rest) = url.split_once("://").unwrap_or((if is_grpc { "grpc" } else { "" }, &url));
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let (authority, uri) = rest.split_at(end);
        let scheme = match scheme {
            "http" | "grpc" => "http",
            "https" | "grpcs" => "https",
            _ => "",
        };
        if scheme.is_empty() || authority.contains('$') || authority.is_empty() || authority.starts_with("unix:") {
            let reason = if authority.starts_with("unix:") {
                "upstreams have a host and a port"
            } else {
                "the server must be known when the configuration is read"
            };
            model.no_equal(&pass.origin, format!("`{}`: {reason}", pass.text()));
            return None;
        }
        let key = format!("{scheme} {authority} {is_grpc}");
        let name = match self.names.get(&key) {
            Some(name) => name.clone(),
            None => {
                let table = self.table(scheme, authority, is_grpc, pass, scope, model)?;
                let name = model.add_upstream(authority, table);
                self.names.insert(key, name.clone());
                name
            }
        };
        let time =
            |name: &str| scope.single(name).and_then(|setting| milliseconds(setting.arg(0))).unwrap_or(DEFAULT_TIMEOUT);
        let timeouts = self.timeouts.entry(name.clone()).or_default();
        timeouts.connect = timeouts.connect.max(time("proxy_connect_timeout"));
        timeouts.read = timeouts.read.max(time("proxy_read_timeout"));
        let host = match self.blocks.contains_key(authority) {
            true => authority.to_owned(),
            false => "server".to_owned(),
        };
        Some(Target { upstream: name, host, uri: (!uri.is_empty()).then(|| uri.to_owned()) })
    }

    /// Write the timeouts of all upstreams.
    pub(super) fn write_timeouts(&self, model: &mut Model) {
        for (name, timeouts) in &self.timeouts {
            if let Some(table) = model.upstreams.get_mut(name) {
                table.set("connect_timeout", duration(timeouts.connect.max(1)));
                table.set("response_timeout", duration(timeouts.read.max(1)));
            }
        }
    }

    fn table(
        &self,
        scheme: &str,
        authority: &str,
        is_grpc: bool,
        pass: &Setting,
        scope: &Scope,
        model: &mut Model,
    ) -> Option<Table> {
        let mut table = match self.blocks.get(authority) {
            Some(block) => group(scheme, block, model)?,
            None => {
                let mut table = Table::from_origin(&pass.origin, &pass.text());
                table.set_list("servers", [format!("{scheme}://{authority}")]);
                table
            }
        };
        if is_grpc {
            table.set("protocol", "http2");
        }
        if scheme == "https" {
            tls(&mut table, pass, scope, model);
        }
        Some(table)
    }
}

/// Write the TLS settings of an upstream.
fn tls(table: &mut Table, pass: &Setting, scope: &Scope, model: &mut Model) {
    let keys = [
        ("ca", "proxy_ssl_trusted_certificate"),
        ("cert", "proxy_ssl_certificate"),
        ("key", "proxy_ssl_certificate_key"),
        ("server_name", "proxy_ssl_name"),
    ];
    for (key, name) in keys {
        if let Some(setting) = scope.single(name)
            && !setting.arg(0).contains('$')
        {
            table.set_entry("tls", key, setting.arg(0));
        }
    }
    if scope.single("proxy_ssl_verify").is_none_or(|setting| setting.arg(0) != "on") {
        let text = "nginx does not verify the certificate of the server unless `proxy_ssl_verify` is `on`; Sluicegate \
                    does: set `tls.ca`, or `tls.verify = false`";
        model.differs(&pass.origin, text);
    }
}

/// The parameters of the `server` lines of an `upstream`.
#[derive(Debug, Default)]
struct Group {
    /// Weights by URL.
    servers: indexmap::IndexMap<String, i64>,
    max_fails: i64,
    fail_timeout: u64,
    max_conns: i64,
}

/// Return the table of an `upstream` block. `None`: no server can be imported, which is reported.
fn group(scheme: &str, block: &Directive, model: &mut Model) -> Option<Table> {
    let mut table = Table::from_origin(&block.origin, &block.text());
    let mut group = Group { max_fails: 1, fail_timeout: 10_000, ..Group::default() };
    let mut balance = "round-robin".to_owned();
    for directive in block.children() {
        match &*directive.name {
            "server" => server(scheme, directive, &mut group, model),
            "least_conn" => balance = "least-requests".to_owned(),
            "random" => balance = "random".to_owned(),
            "hash" => match hash(directive.arg(0)) {
                Some(by) => balance = by,
                None => model
                    .no_equal(&directive.origin, format!("`{}`: the servers get requests in turn", directive.text())),
            },
            "ip_hash" => {
                let text = "`ip_hash`: the servers get requests in turn; `balance = \"sticky\"` keeps a client on its \
                            server with a cookie";
                model.no_equal(&directive.origin, text);
            }
            "keepalive" | "keepalive_timeout" | "keepalive_requests" | "zone" | "keepalive_time" => {
                model.not_needed(&directive.origin, format!("`{}`", directive.text()));
            }
            _ => model.no_equal(&directive.origin, format!("`{}`", quoted(&directive.text()))),
        }
    }
    let count = group.servers.len();
    if count == 0 {
        model.no_equal(&block.origin, format!("`{}` has no server that can be imported", block.text()));
        return None;
    }
    let servers = group.servers.into_iter().map(|(url, weight)| match weight {
        1 => url.into(),
        weight => {
            let mut entry = toml::Table::new();
            entry.insert("url".to_owned(), url.into());
            entry.insert("weight".to_owned(), weight.min(1000).into());
            Value::Table(entry)
        }
    });
    table.set("servers", servers.collect::<Vec<_>>());
    if count > 1 {
        table.set("balance", balance);
        table.set("retries", i64::try_from(count - 1).unwrap_or(10).min(10));
        if group.max_fails > 0 {
            table.set_entry("outlier_detection", "consecutive_errors", group.max_fails.min(1000));
            table.set_entry("outlier_detection", "base_ejection_time", duration(group.fail_timeout.max(1)));
            let text = "`max_fails`: nginx counts failed connections and timeouts, Sluicegate also the statuses 502, \
                        503 and 504";
            model.differs(&block.origin, text);
        }
    }
    if group.max_conns > 0 {
        table.set("max_requests", group.max_conns.min(1_000_000));
    }
    Some(table)
}

/// Add a `server` line.
fn server(scheme: &str, directive: &Directive, group: &mut Group, model: &mut Model) {
    let address = directive.arg(0);
    if address.starts_with("unix:") || address.contains('$') {
        return model.no_equal(&directive.origin, format!("`{}`: servers have a host and a port", directive.text()));
    }
    let mut weight = 1;
    for parameter in directive.args.iter().skip(1) {
        let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
        let number = value.parse::<i64>().unwrap_or_default();
        match name {
            "weight" => weight = number.clamp(1, 1000),
            "max_fails" => group.max_fails = number,
            "fail_timeout" => group.fail_timeout = milliseconds(value).unwrap_or(group.fail_timeout),
            "max_conns" => group.max_conns = number,
            "down" => weight = 0,
            "backup" => {
                let text = format!("`{}`: the server is left out; see `fallback` of routes", directive.text());
                return model.no_equal(&directive.origin, text);
            }
            "resolve" => {}
            _ => model.no_equal(&directive.origin, format!("`{parameter}` of `{}`", directive.text())),
        }
    }
    *group.servers.entry(format!("{scheme}://{address}")).or_default() += weight;
}

/// Return the load balancing policy of `hash KEY`.
fn hash(key: &str) -> Option<String> {
    let (kind, name) = key.strip_prefix('$')?.split_once('_')?;
    match kind {
        "http" => Some(format!("hash:{}", name.replace('_', "-"))),
        "cookie" => Some(format!("hash:cookie:{name}")),
        _ => None,
    }
}

/// Return a setting for a directive, so that it can be read like an inherited one.
pub(super) fn setting(directive: &Directive) -> Setting {
    Setting { origin: directive.origin.clone(), name: directive.name.clone(), args: directive.args.clone() }
}
