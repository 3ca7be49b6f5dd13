//! Imports declarative configurations of Kong 3.

mod plugins;

use std::collections::{BTreeMap, BTreeSet};

use crate::config::yaml::Node;
use crate::routing::pattern::PathPattern;
use crate::tools::import::document::{Document, read};
use crate::tools::import::model::{Model, Table, quoted};
use crate::tools::import::paths::{literal, prefix_expression};
use crate::tools::import::units::duration;
use crate::tools::import::{ImportError, Input};

use self::plugins::{Plugin, Scope};

/// Import declarative configurations, which form one configuration.
pub(super) fn import(inputs: &[Input]) -> Result<Model, ImportError> {
    let documents = read(inputs)?;
    let mut importer = Importer::new(&documents);
    let mut listener = Table::default();
    listener.comments.push("The address of `proxy_listen` in kong.conf".to_owned());
    listener.set("address", "0.0.0.0:8000");
    importer.model.listeners.push(listener);
    for document in &documents {
        importer.document(document);
    }
    importer.write_consumers();
    Ok(importer.model)
}

/// A consumer with what its credentials and rules need.
#[derive(Debug, Default)]
struct Consumer {
    groups: BTreeSet<String>,
}

/// Collects what the documents share.
struct Importer<'a> {
    model: Model,
    documents: &'a [Document],
    consumers: BTreeMap<String, Consumer>,
    /// Plugins of the whole configuration.
    global: Vec<Plugin<'a>>,
    /// Routes with a key-auth plugin, each with the groups that its acl plugin allows. `None`: all.
    acls: BTreeMap<String, Option<plugins::Acl>>,
    /// Names of the limits by plugin and window.
    limits: BTreeMap<String, String>,
    /// The names of the plugins that limits come from, by the names of the limits.
    limit_plugins: BTreeMap<String, String>,
}

/// A path of a route.
struct RoutePath {
    key: &'static str,
    value: String,
    prefix: String,
    trailing_slash: bool,
}

impl<'a> Importer<'a> {
    fn new(documents: &'a [Document]) -> Self {
        let mut importer = Importer {
            model: Model::default(),
            documents,
            consumers: BTreeMap::new(),
            global: Vec::new(),
            acls: BTreeMap::new(),
            limits: BTreeMap::new(),
            limit_plugins: BTreeMap::new(),
        };
        for document in documents {
            importer.consumers(document);
            importer.global.extend(plugins::global(document));
        }
        importer
    }

    fn document(&mut self, document: &'a Document) {
        let known = [
            "_format_version",
            "_transform",
            "_info",
            "_comment",
            "services",
            "routes",
            "upstreams",
            "consumers",
            "plugins",
            "acls",
            "keyauth_credentials",
            "basicauth_credentials",
            "jwt_secrets",
            "consumer_groups",
        ];
        document.report_others(&document.root, &known, "the configuration", &mut self.model);
        let version = document.root.text_of("_format_version");
        if !version.starts_with('3') {
            let text = format!("`_format_version: {}`: the file is read as version 3", quoted(version));
            self.model.differs(&document.at(&document.root), text);
        }
        self.report_combinations(document);
        for group in document.root.items_of("consumer_groups") {
            let text = format!(
                "the consumer group `{}`: write `tier` of consumers, and `tiers` of limits",
                quoted(group.text_of("name"))
            );
            self.model.no_equal(&document.at(group), text);
        }
        for service in document.root.items_of("services") {
            let upstream = self.service(document, service);
            let own = plugins::of(document, service, "service");
            for route in service.items_of("routes") {
                self.route(document, route, Some(service), upstream.as_deref(), &own);
            }
        }
        for route in document.root.items_of("routes") {
            let name = route.get("service").map(|service| service.text().unwrap_or_else(|| service.text_of("name")));
            let services = document.root.items_of("services");
            let service = services.iter().find(|service| Some(service.text_of("name")) == name);
            let upstream = service.and_then(|service| self.service(document, service));
            let own = service.map(|service| plugins::of(document, service, "service")).unwrap_or_default();
            self.route(document, route, service, upstream.as_deref(), &own);
        }
    }

    /// Return the name of the upstream of a service.
    fn service(&mut self, document: &Document, service: &Node) -> Option<String> {
        let origin = document.at(service);
        let known = [
            "name",
            "url",
            "protocol",
            "host",
            "port",
            "path",
            "retries",
            "connect_timeout",
            "read_timeout",
            "write_timeout",
            "routes",
            "plugins",
            "tags",
            "id",
            "enabled",
            "_comment",
            "tls_verify",
        ];
        document.report_others(service, &known, "the service", &mut self.model);
        let address = ServiceAddress::of(service);
        if !matches!(&*address.scheme, "http" | "https" | "grpc" | "grpcs") || address.host.is_empty() {
            let text = format!(
                "the service `{}` with `{}://`: its routes respond with 501",
                quoted(service.text_of("name")),
                quoted(&address.scheme)
            );
            self.model.no_equal(&origin, text);
            return None;
        }
        let is_tls = matches!(&*address.scheme, "https" | "grpcs");
        let scheme = if is_tls { "https" } else { "http" };
        let mut table = Table::from_origin(&origin, &format!("service {}", service.text_of("name")));
        let targets = self.targets(scheme, &address.host);
        if targets.is_empty() {
            table.set_list("servers", [format!("{scheme}://{}{}", address.host, address.port)]);
        } else {
            table.set("servers", targets);
            table.set("balance", "round-robin");
        }
        table.set("host", "server");
        if address.scheme.starts_with("grpc") {
            table.set("protocol", "http2");
        }
        for (key, name) in [("connect_timeout", "connect_timeout"), ("response_timeout", "read_timeout")] {
            let time = service.integer_of(name).filter(|time| *time > 0).unwrap_or(60_000);
            table.set(key, duration(time.unsigned_abs()));
        }
        if let Some(retries) = service.integer_of("retries") {
            table.set("retries", retries.clamp(0, 10));
        }
        if is_tls && !service.is_true("tls_verify") {
            let text = "Kong does not verify the certificate of a service unless `tls_verify` is `true`; Sluicegate does: \
                        set `tls.ca`, or `tls.verify = false`";
            self.model.differs(&origin, text);
        }
        let name = service.text_of("name");
        Some(self.model.add_upstream(if name.is_empty() { &address.host } else { name }, table))
    }

    /// Return the servers of the upstream that has the name of a host.
    fn targets(&mut self, scheme: &str, host: &str) -> Vec<toml::Value> {
        let mut servers = Vec::new();
        for document in self.documents {
            for upstream in document.root.items_of("upstreams").iter().filter(|node| node.text_of("name") == host) {
                let known = ["name", "targets", "algorithm", "tags", "id", "slots"];
                document.report_others(upstream, &known, "the upstream", &mut self.model);
                for target in upstream.items_of("targets") {
                    let address = target.text_of("target");
                    let port = if address.contains(':') { "" } else { ":8000" };
                    let mut server = toml::Table::new();
                    server.insert("url".to_owned(), format!("{scheme}://{address}{port}").into());
                    let weight = target.integer_of("weight").unwrap_or(100).clamp(0, 1000);
                    server.insert("weight".to_owned(), weight.into());
                    servers.push(toml::Value::Table(server));
                }
            }
        }
        servers
    }

    /// Add the routes of a route: one for each path.
    fn route(
        &mut self,
        document: &'a Document,
        route: &'a Node,
        service: Option<&Node>,
        upstream: Option<&str>,
        service_plugins: &[Plugin<'a>],
    ) {
        let origin = document.at(route);
        let known = [
            "name",
            "hosts",
            "paths",
            "methods",
            "headers",
            "protocols",
            "strip_path",
            "preserve_host",
            "regex_priority",
            "plugins",
            "tags",
            "id",
            "service",
            "https_redirect_status_code",
            "path_handling",
            "_comment",
            "request_buffering",
            "response_buffering",
        ];
        document.report_others(route, &known, "the route", &mut self.model);
        let name = match route.text_of("name") {
            "" => service.map_or("route", |service| service.text_of("name")),
            name => name,
        };
        if let Some(protocols) = route.get("protocols") {
            let text =
                "`protocols`: the route applies to all listeners; see `listeners`, and `redirect` for `https` only";
            let is_plain = protocols.items().iter().any(|protocol| protocol.text() == Some("http"));
            if !is_plain {
                self.model.differs(&document.at(protocols), text);
            }
        }
        if let Some(priority) = route.get("regex_priority") {
            let text = "`regex_priority`: regular expressions are tried in the order of the file";
            self.model.differs(&document.at(priority), text);
        }
        let paths = match route.items_of("paths") {
            [] => vec![self.path(document, "/", route.line)],
            paths => paths.iter().map(|path| self.path(document, path.text().unwrap_or("/"), path.line)).collect(),
        };
        for path in paths.into_iter().flatten() {
            let mut table = Table::from_origin(&origin, &format!("route {name}"));
            table.set_list("hosts", route.texts_of("hosts").iter().map(|host| host.to_ascii_lowercase()));
            table.set(path.key, path.value.as_str());
            if path.trailing_slash {
                table.set("trailing_slash", "same");
            }
            table.set_list("methods", route.texts_of("methods"));
            self.header_conditions(document, route, &mut table);
            let scope = Scope {
                global: &self.global.clone(),
                service: service_plugins,
                route: &plugins::of(document, route, "route"),
            };
            match upstream {
                Some(upstream) => {
                    table.set("upstream", upstream);
                    if route.is_true("preserve_host") {
                        table.set("upstream_host", "client");
                    }
                    self.rewrite(document, route, service, &path, &mut table);
                    table.set("websocket", true);
                }
                None => table.set_entry("respond", "status", 501),
            }
            let acl = self.plugins(&scope, &mut table);
            let name = self.model.add_route(name, table);
            self.acls.insert(name, acl);
        }
    }

    /// Return the form of a path: `~` begins a regular expression that matches from the start of the path.
    fn path(&mut self, document: &Document, path: &str, line: usize) -> Option<RoutePath> {
        if let Some(expression) = path.strip_prefix('~') {
            let value = prefix_expression(expression);
            if let Err(error) = PathPattern::from_regex(&value) {
                let text = format!("`{}`: {error}; the path is left out", quoted(path));
                self.model.no_equal(&document.origin(line), text);
                return None;
            }
            return Some(RoutePath { key: "path_regex", value, prefix: String::new(), trailing_slash: false });
        }
        let prefix = literal(path.trim_end_matches('/'));
        let is_directory = path.ends_with('/');
        if !is_directory {
            let text = format!(
                "`{}` also matches `{}x` in Kong; the route matches whole segments",
                quoted(path),
                quoted(path)
            );
            self.model.differs(&document.origin(line), text);
        }
        Some(RoutePath { key: "path", value: format!("{prefix}/{{*rest}}"), prefix, trailing_slash: !is_directory })
    }

    /// Write `strip_path`, which is the default, and the path of the service.
    fn rewrite(
        &mut self,
        document: &Document,
        route: &Node,
        service: Option<&Node>,
        path: &RoutePath,
        table: &mut Table,
    ) {
        let base = service.map(|service| ServiceAddress::of(service).path).unwrap_or_default();
        let base = base.trim_end_matches('/');
        let strips = route.get("strip_path").is_none_or(|node| node.text() != Some("false"));
        match (path.key, strips) {
            ("path", true) if base.is_empty() && path.prefix.is_empty() => {}
            ("path", true) if base.is_empty() => table.set("strip_prefix", path.prefix.as_str()),
            ("path", true) => table.set("rewrite", format!("{}/{{rest}}", literal(base))),
            ("path", false) if !base.is_empty() => {
                table.set("rewrite", format!("{}{}/{{rest}}", literal(base), path.prefix));
            }
            ("path_regex", true) => {
                let text = "`strip_path` with a regular expression: the path is not changed; write `rewrite` with named \
                            groups";
                self.model.no_equal(&document.at(route), text);
            }
            _ if !base.is_empty() => {
                let text = format!("the path `{}` of the service is not added to a regular expression", quoted(base));
                self.model.no_equal(&document.at(route), text);
            }
            _ => {}
        }
    }

    fn header_conditions(&mut self, document: &Document, route: &Node, table: &mut Table) {
        let mut headers = toml::Table::new();
        for pair in route.get("headers").map(Node::pairs).unwrap_or_default() {
            let values: Vec<&str> = pair.value.items().iter().filter_map(Node::text).collect();
            let mut condition = toml::Table::new();
            match &*values {
                [single] if !single.starts_with("~*") => {
                    condition.insert("exact".to_owned(), (*single).into());
                }
                _ => {
                    let alternatives: Vec<String> = values.iter().map(|value| regex::escape(value)).collect();
                    condition.insert("regex".to_owned(), alternatives.join("|").into());
                    if values.iter().any(|value| value.starts_with("~*")) {
                        self.model.no_equal(&document.origin(pair.line), "a regular expression for a header");
                    }
                }
            }
            headers.insert(pair.key.to_ascii_lowercase(), toml::Value::Table(condition));
        }
        if !headers.is_empty() {
            table.set_entry("match", "headers", headers);
        }
    }
}

/// The parts of the address of a service.
struct ServiceAddress {
    scheme: String,
    host: String,
    /// `:` and the port, or nothing.
    port: String,
    path: String,
}

impl ServiceAddress {
    fn of(service: &Node) -> ServiceAddress {
        let url = service.text_of("url");
        if let Some((scheme, rest)) = url.split_once("://") {
            let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
            let (host, port) = authority.split_at(authority.rfind(':').unwrap_or(authority.len()));
            return ServiceAddress {
                scheme: scheme.to_owned(),
                host: host.to_owned(),
                port: port.to_owned(),
                path: path.to_owned(),
            };
        }
        let scheme = match service.text_of("protocol") {
            "" => "http",
            scheme => scheme,
        };
        let port = service.text_of("port");
        ServiceAddress {
            scheme: scheme.to_owned(),
            host: service.text_of("host").to_owned(),
            port: if port.is_empty() { String::new() } else { format!(":{port}") },
            path: service.text_of("path").to_owned(),
        }
    }
}
