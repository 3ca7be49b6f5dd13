//! Imports configuration files of nginx.

mod keys;
mod limits;
mod locations;
mod scope;
pub mod syntax;
mod upstreams;

use std::collections::{BTreeMap, BTreeSet};

use crate::identity::access::parse_network;
use crate::tools::import::model::{Model, Origin, Relation, Table, quoted};
use crate::tools::import::nginx::keys::Variables;
use crate::tools::import::nginx::limits::Zones;
use crate::tools::import::nginx::locations::Site;
use crate::tools::import::nginx::scope::Scope;
use crate::tools::import::nginx::syntax::{Directive, Reader};
use crate::tools::import::nginx::upstreams::Upstreams;
use crate::tools::import::{ImportError, Input};

/// Import configuration files, which form one configuration. Directives that are neither in `http` nor in a `server`
/// count as directives of `http`.
pub(super) fn import(inputs: &[Input], budget: u64) -> Result<Model, ImportError> {
    let mut model = Model::default();
    let mut reader = Reader::new(&mut model, budget);
    let mut directives = Vec::new();
    for input in inputs {
        directives.extend(reader.read(input)?);
    }
    let mut http: Vec<Directive> = Vec::new();
    for mut directive in directives {
        match &*directive.name {
            "http" => http.extend(directive.block.take().unwrap_or_default()),
            "events" => model.not_needed(&directive.origin, "`events`"),
            _ => http.push(directive),
        }
    }
    let mut importer = Importer::new(model, &http);
    importer.import(&http);
    Ok(importer.model)
}

/// An address on which nginx listens.
#[derive(Debug)]
struct Listener {
    name: String,
    table: Table,
    is_tls: bool,
    /// Index of the server that gets requests for hosts that no server names.
    default_server: usize,
    has_explicit_default: bool,
}

/// Collects what the parts of a configuration share.
struct Importer<'a> {
    model: Model,
    zones: Zones,
    variables: Variables,
    upstreams: Upstreams<'a>,
    listeners: BTreeMap<String, Listener>,
}

impl<'a> Importer<'a> {
    fn new(mut model: Model, http: &'a [Directive]) -> Self {
        let mut zones = Zones::default();
        let mut variables = Variables::default();
        let mut upstreams = Upstreams::default();
        for directive in http {
            match &*directive.name {
                "limit_req_zone" | "limit_conn_zone" => zones.add(directive, &mut model),
                "map" | "geo" => variables.add(directive),
                "upstream" => upstreams.add(directive),
                _ => {}
            }
        }
        Importer { model, zones, variables, upstreams, listeners: BTreeMap::new() }
    }

    fn import(&mut self, http: &[Directive]) {
        let scope = Scope::default().enter(http, &mut self.model);
        self.real_ip(http);
        let servers: Vec<&Directive> = http.iter().filter(|directive| directive.name == "server").collect();
        for (index, server) in servers.iter().enumerate() {
            self.listen(index, server);
        }
        for (index, server) in servers.iter().enumerate() {
            self.server(index, server, &scope);
        }
        self.client_certificates(&servers);
        if servers.is_empty() {
            self.fragment(http, &scope);
        }
        for server in &servers {
            self.real_ip(server.children());
        }
        self.zones.report_unused(servers.is_empty(), &self.variables, &mut self.model);
        self.upstreams.write_timeouts(&mut self.model);
        let mut listeners = std::mem::take(&mut self.listeners);
        self.model.listeners.extend(listeners.values_mut().map(|listener| std::mem::take(&mut listener.table)));
        let is_proxied = self.model.listeners.iter().any(|listener| listener.keys.contains_key("proxy_protocol"));
        if is_proxied && !self.model.setting("client_ip").keys.contains_key("trusted_proxies") {
            let private = ["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "127.0.0.1"];
            self.model.setting("client_ip").set_list("trusted_proxies", private.map(str::to_owned));
            let text = "nginx accepts a PROXY header from every peer, Sluicegate only from `trusted_proxies`: list your \
                        load balancers in place of the private networks";
            self.model.note(Relation::Differs, None, text);
        }
        // nginx counts by full address; the gateway counts by /64 network by default.
        self.model.setting("client_ip").set("ipv6_prefix", 128);
    }

    /// Import directives that belong into a `server` of another file.
    fn fragment(&mut self, http: &[Directive], scope: &Scope) {
        let mut listener =
            Table { comments: vec!["A placeholder: the files have no `listen`".to_owned()], ..Table::default() };
        listener.set("address", "127.0.0.1:8080");
        self.model.listeners.push(listener);
        self.model.note(
            Relation::NoEqual,
            None,
            "the files have no `server`: the listener, and routes without a `proxy_pass`, are placeholders",
        );
        let mut site = Site { name: String::new(), hosts: Vec::new(), listeners: Vec::new(), redirect_scheme: "http" };
        self.locations(&mut site, http, scope);
    }

    /// Import the addresses of `listen`.
    fn listen(&mut self, index: usize, server: &Directive) {
        let default = Directive {
            origin: server.origin.clone(),
            name: "listen".to_owned(),
            args: vec!["80".to_owned()],
            block: None,
        };
        let mut listens: Vec<&Directive> =
            server.children().iter().filter(|directive| directive.name == "listen").collect();
        if listens.is_empty() {
            listens.push(&default);
        }
        let has_ssl = server.children().iter().any(|directive| directive.name == "ssl" && directive.arg(0) == "on");
        for listen in listens {
            let Some(address) = listen_address(listen.arg(0)) else {
                self.model.no_equal(&listen.origin, format!("`{}`: listeners have an IP address", listen.text()));
                continue;
            };
            let flags = &listen.args[1.min(listen.args.len())..];
            let has = |flag: &str| flags.iter().any(|other| other == flag);
            let used = self.listeners.values().map(|listener| listener.name.clone()).collect::<BTreeSet<_>>();
            let listener = self.listeners.entry(address.clone()).or_insert_with(|| {
                let mut table = Table::from_origin(&listen.origin, &listen.text());
                let port = address.rsplit(':').next().unwrap_or_default();
                let names = std::iter::once(format!("port-{port}")).chain((2..).map(|n| format!("port-{port}-{n}")));
                let name = names.into_iter().find(|name| !used.contains(name)).unwrap_or_default();
                table.set("name", name.as_str());
                table.set("address", address.as_str());
                Listener { name, table, is_tls: false, default_server: index, has_explicit_default: false }
            });
            if (has("default_server") || has("default")) && !listener.has_explicit_default {
                listener.default_server = index;
                listener.has_explicit_default = true;
            }
            if listen.arg(0).starts_with("[::]") {
                // On Linux, this address includes IPv4.
                listener.table.set("address", address.replace("0.0.0.0", "[::]"));
            }
            if has("proxy_protocol") {
                listener.table.set("proxy_protocol", true);
            }
            if has("ssl") || has_ssl {
                listener.is_tls = true;
                certificates(server, listener, &mut self.model);
            }
        }
    }

    /// Import the client certificates of all servers. Those of the default server apply to all hosts of a listener that
    /// have no entry in `per_host`.
    fn client_certificates(&mut self, servers: &[&Directive]) {
        let imported: Vec<_> = servers
            .iter()
            .map(|server| (server_hosts(server, &mut Model::default()), client_certificates(server, &mut self.model)))
            .collect();
        for (address, listener) in &mut self.listeners {
            let Some(toml::Value::Table(tls)) = listener.table.keys.get_mut("tls") else { continue };
            let default = &imported[listener.default_server].1;
            let mut per_host = Vec::new();
            for (server, (hosts, keys)) in servers.iter().zip(&imported) {
                let mut listens = server.children().iter().filter(|directive| directive.name == "listen");
                let is_here = listens.any(|listen| listen_address(listen.arg(0)).as_ref() == Some(address));
                if is_here && !hosts.is_empty() && keys != default {
                    let mut entry = toml::Table::from_iter([("hosts".to_owned(), hosts.clone().into())]);
                    entry.extend(keys.clone());
                    per_host.push(toml::Value::Table(entry));
                }
            }
            tls.extend(default.clone());
            if !per_host.is_empty() {
                tls.insert("per_host".to_owned(), per_host.into());
            }
        }
    }

    /// Import a `server`: once for its names, and once for all hosts on the listeners whose default server it is.
    fn server(&mut self, index: usize, server: &Directive, http: &Scope) {
        let scope = http.enter(server.children(), &mut self.model);
        let hosts = server_hosts(server, &mut self.model);
        let listens = server.children().iter().filter(|directive| directive.name == "listen");
        let mut addresses: BTreeSet<String> = listens.filter_map(|listen| listen_address(listen.arg(0))).collect();
        if addresses.is_empty() {
            addresses.extend(listen_address("80"));
        }
        let all = self.listeners.len();
        let mut sites: Vec<Site> = Vec::new();
        for is_default in [true, false] {
            let used: Vec<&Listener> = addresses
                .iter()
                .filter_map(|address| self.listeners.get(address))
                .filter(|listener| (listener.default_server == index) == is_default)
                .collect();
            if used.is_empty() || !is_default && hosts.is_empty() {
                continue;
            }
            let names = used.iter().map(|listener| listener.name.clone()).collect();
            sites.push(Site {
                name: hosts.first().cloned().unwrap_or_default(),
                hosts: if is_default { Vec::new() } else { hosts.clone() },
                listeners: if used.len() == all { Vec::new() } else { names },
                redirect_scheme: if used.iter().all(|listener| listener.is_tls) { "https" } else { "http" },
            });
        }
        if sites.is_empty() {
            let text = "`server` without a usable name, which is not the default server: it is not imported";
            self.model.no_equal(&server.origin, text);
        }
        for site in &mut sites {
            self.locations(site, server.children(), &scope);
        }
    }

    /// Import `set_real_ip_from`, `real_ip_header` and `real_ip_recursive`.
    fn real_ip(&mut self, level: &[Directive]) {
        let find = |name: &str| level.iter().rev().find(|directive| directive.name == name);
        for directive in level.iter().filter(|directive| directive.name == "set_real_ip_from") {
            match parse_network(directive.arg(0)) {
                Some(network) => self.model.setting("client_ip").push("trusted_proxies", network.to_string()),
                None => self.model.no_equal(&directive.origin, format!("`{}`: not a network", directive.text())),
            }
        }
        let Some(first) = find("set_real_ip_from") else { return };
        let (header, origin) =
            find("real_ip_header").map_or(("X-Real-IP", &first.origin), |found| (found.arg(0), &found.origin));
        let header = header.to_ascii_lowercase();
        if header == "proxy_protocol" {
            return;
        }
        self.model.setting("client_ip").set("header", header.as_str());
        let is_recursive = find("real_ip_recursive").is_some_and(|directive| directive.arg(0) == "on");
        if header == "x-forwarded-for" && !is_recursive {
            let text = "without `real_ip_recursive on`, nginx uses the last address of X-Forwarded-For even if it is a \
                        trusted proxy; Sluicegate uses the last address that is not one";
            self.model.differs(origin, text);
        }
    }
}

/// Return the names of a server in the form of `hosts`.
fn server_hosts(server: &Directive, model: &mut Model) -> Vec<String> {
    let mut hosts: Vec<String> = Vec::new();
    for directive in server.children().iter().filter(|directive| directive.name == "server_name") {
        for name in &directive.args {
            let name = name.to_ascii_lowercase();
            let mut add = |host: String| {
                if !hosts.contains(&host) {
                    hosts.push(host);
                }
            };
            if let Some(domain) = name.strip_prefix('.') {
                add(domain.to_owned());
                add(format!("*.{domain}"));
            } else if name.starts_with('~') || name.ends_with(".*") {
                let text = format!("`server_name {name}`: a host is a name, or `*.` and a name");
                model.no_equal(&directive.origin, text);
            } else if !matches!(&*name, "_" | "" | "-" | "--" | "*") && !name.contains('$') {
                add(name);
            }
        }
    }
    hosts
}

/// Add the certificates of a server to a listener.
fn certificates(server: &Directive, listener: &mut Listener, model: &mut Model) {
    let values = |name: &'static str| server.children().iter().filter(move |directive| directive.name == name);
    let keys: Vec<&Directive> = values("ssl_certificate_key").collect();
    let mut list = match listener.table.keys.get("tls") {
        Some(toml::Value::Table(tls)) => tls.clone(),
        _ => toml::Table::new(),
    };
    let mut pairs = list.get("certificates").and_then(toml::Value::as_array).cloned().unwrap_or_default();
    for (certificate, key) in values("ssl_certificate").zip(keys) {
        let mut pair = toml::Table::new();
        pair.insert("cert".to_owned(), certificate.arg(0).into());
        pair.insert("key".to_owned(), key.arg(0).into());
        let pair = toml::Value::Table(pair);
        if !pairs.contains(&pair) {
            pairs.push(pair);
        }
    }
    if pairs.is_empty() {
        let text = "`ssl` without `ssl_certificate` in the `server`: add `tls.certificates` to the listener, which \
                    serves plaintext without it";
        model.no_equal(&server.origin, text);
        return;
    }
    list.insert("certificates".to_owned(), pairs.into());
    listener.table.set("tls", list);
}

/// Return the keys that verify the client certificates of a server.
fn client_certificates(server: &Directive, model: &mut Model) -> toml::Table {
    let last = |name: &str| server.children().iter().rfind(|directive| directive.name == name);
    let mut keys = toml::Table::new();
    let (Some(verify), Some(ca)) = (last("ssl_verify_client"), last("ssl_client_certificate")) else { return keys };
    let auth = match verify.arg(0) {
        "off" => return keys,
        "on" => "required",
        "optional" => "optional",
        _ => {
            model.no_equal(&verify.origin, quoted(&verify.text()));
            return keys;
        }
    };
    keys.insert("client_ca".to_owned(), ca.arg(0).into());
    keys.insert("client_auth".to_owned(), auth.into());
    keys
}

/// Return the address of a `listen` in the form of `address`. `None`: it is no IP address. All addresses of IPv6 count as
/// all addresses of IPv4, because one listener serves both.
fn listen_address(text: &str) -> Option<String> {
    if text.bytes().all(|byte| byte.is_ascii_digit()) && !text.is_empty() {
        return Some(format!("0.0.0.0:{text}"));
    }
    let text = text.replace("localhost", "127.0.0.1").replace("[::]", "0.0.0.0");
    let text = text.strip_prefix("*:").map_or(text.clone(), |port| format!("0.0.0.0:{port}"));
    if let Ok(address) = text.parse::<std::net::SocketAddr>() {
        return Some(address.to_string());
    }
    let address: std::net::IpAddr = text.trim_matches(['[', ']']).parse().ok()?;
    Some(std::net::SocketAddr::new(address, 80).to_string())
}

/// Return the position of the first directive, for routes that no single directive describes.
fn first_origin(level: &[Directive]) -> Origin {
    level.first().map_or_else(|| Origin::new(&"nginx".into(), 1), |directive| directive.origin.clone())
}
