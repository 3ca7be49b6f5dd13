//! Imports dynamic configurations of Traefik 3, in YAML or TOML.

mod middlewares;
mod rule;

use std::collections::{BTreeMap, BTreeSet};

use crate::config::yaml::{Node, Pair};
use crate::routing::pattern::PathPattern;
use crate::tools::import::document::{Document, read};
use crate::tools::import::model::{Model, Relation, Table, quoted};
use crate::tools::import::paths::{literal, whole_expression};
use crate::tools::import::traefik::rule::{Alternative, Matcher};
use crate::tools::import::{ImportError, Input};

/// Maximum depth of services that refer to each other.
const MAX_SERVICES: usize = 8;

/// Import dynamic configurations, which form one configuration. Entry points of a static configuration become
/// listeners.
pub(super) fn import(inputs: &[Input]) -> Result<Model, ImportError> {
    let documents = read(inputs)?;
    let mut importer = Importer {
        model: Model::default(),
        documents: &documents,
        used: BTreeSet::new(),
        router: String::new(),
        limits: BTreeMap::new(),
        entry_points: BTreeMap::new(),
    };
    importer.entry_points();
    for document in &documents {
        importer.document(document);
    }
    importer.unused_middlewares();
    if importer.model.listeners.is_empty() {
        let mut listener = Table::default();
        listener.comments.push("A placeholder: the files have no `entryPoints`".to_owned());
        listener.set("address", "127.0.0.1:8080");
        importer.model.listeners.push(listener);
        let text =
            "the files have no `entryPoints`, which are in the static configuration: the listener is a placeholder";
        importer.model.note(Relation::NoEqual, None, text);
    }
    importer.model.setting("client_ip").set("ipv6_prefix", 128);
    Ok(importer.model)
}

/// Collects what the documents share.
struct Importer<'a> {
    model: Model,
    documents: &'a [Document],
    /// Middlewares that a router uses.
    used: BTreeSet<String>,
    /// Name of the router that is being imported.
    router: String,
    /// Names of the limits by router and middleware.
    limits: BTreeMap<String, String>,
    /// Listeners by entry point.
    entry_points: BTreeMap<String, String>,
}

/// A value with the document that contains it.
#[derive(Debug, Clone, Copy)]
struct Found<'a> {
    document: &'a Document,
    node: &'a Node,
}

impl<'a> Importer<'a> {
    /// Add a listener for each entry point of a static configuration.
    fn entry_points(&mut self) {
        for document in self.documents {
            for pair in document.root.get("entryPoints").map(Node::pairs).unwrap_or_default() {
                let address = pair.value.text_of("address").trim_end_matches("/tcp");
                let address = address.strip_prefix(':').map_or(address.to_owned(), |port| format!("0.0.0.0:{port}"));
                if address.parse::<std::net::SocketAddr>().is_err() {
                    let text = format!("the entry point `{}` with `{}`", quoted(&pair.key), quoted(&address));
                    self.model.no_equal(&document.origin(pair.line), text);
                    continue;
                }
                let mut listener =
                    Table::from_origin(&document.origin(pair.line), &format!("entry point {}", pair.key));
                let name = crate::tools::import::model::valid_name(&pair.key);
                listener.set("name", name.as_str());
                listener.set("address", address);
                self.model.listeners.push(listener);
                self.entry_points.insert(pair.key.clone(), name);
                document.report_others(&pair.value, &["address"], "the entry point", &mut self.model);
            }
        }
    }

    fn document(&mut self, document: &'a Document) {
        let dynamic = ["http", "tcp", "udp", "tls"];
        for Pair { line, key, .. } in document.root.pairs() {
            let text = match &**key {
                "http" | "entryPoints" => continue,
                "tls" => "`tls`: add `tls.certificates` to the listener".to_owned(),
                key if dynamic.contains(&key) => format!("`{key}`: the gateway proxies only HTTP"),
                key => format!("`{}` of the static configuration", quoted(key)),
            };
            self.model.no_equal(&document.origin(*line), text);
        }
        let Some(http) = document.root.get("http") else { return };
        document.report_others(http, &["routers", "services", "middlewares"], "`http`", &mut self.model);
        for router in http.get("routers").map(Node::pairs).unwrap_or_default() {
            self.router(document, router);
        }
    }

    /// Find an entry of `http` in any document. A name may end with the provider: `auth@file`.
    fn find(&self, kind: &str, name: &str) -> Option<Found<'a>> {
        let name = name.split('@').next().unwrap_or_default();
        self.documents
            .iter()
            .find_map(|document| document.root.at(&["http", kind, name]).map(|node| Found { document, node }))
    }

    /// Add the routes of a router: one for each alternative of its rule.
    fn router(&mut self, document: &'a Document, router: &'a Pair) {
        let origin = document.origin(router.line);
        let node = &router.value;
        self.router.clone_from(&router.key);
        let known = ["rule", "service", "middlewares", "entryPoints", "tls", "priority", "ruleSyntax"];
        document.report_others(node, &known, "the router", &mut self.model);
        let text = "of several routers that match, Traefik uses the one with the longest rule or the highest `priority`, \
                    Sluicegate the most specific route";
        self.model.note(Relation::Differs, None, text);
        if let Some(priority) = node.get("priority") {
            self.model.differs(&document.at(priority), "`priority`: the most specific route is used");
        }
        if let Some(tls) = node.get("tls") {
            self.model.no_equal(&document.at(tls), "`tls`: add `tls.certificates` to the listener of the router");
        }
        let rule = node.text_of("rule");
        let alternatives = match rule::parse(rule) {
            Ok(alternatives) => alternatives,
            Err(reason) => {
                let text = format!("the rule `{}`: {reason}; the router is left out", quoted(rule));
                return self.model.no_equal(&origin, text);
            }
        };
        for alternative in merged(alternatives) {
            let mut route = Table::from_origin(&origin, &format!("router {}", router.key));
            let listeners = node.texts_of("entryPoints");
            let listeners = listeners.iter().filter_map(|name| self.entry_points.get(name)).cloned();
            route.set_list("listeners", listeners.collect::<Vec<_>>());
            if let Some(reason) = matchers(&alternative, &mut route) {
                let text = format!("the rule `{}`: {reason}; this alternative is left out", quoted(rule));
                self.model.no_equal(&origin, text);
                continue;
            }
            if route.keys.get("path").and_then(toml::Value::as_str).is_some_and(|path| path.ends_with("*rest}"))
                && alternative
                    .iter()
                    .any(|matcher| matcher.name == "PathPrefix" && !matcher.arguments[0].ends_with('/'))
            {
                self.model.differs(
                    &origin,
                    "`PathPrefix` also matches paths that continue without a slash; the route matches whole segments",
                );
            }
            self.middlewares(Found { document, node }, &mut route);
            self.target(Found { document, node }, &mut route);
            if route.keys.contains_key("redirect") || route.keys.contains_key("respond") {
                for key in [
                    "upstream",
                    "upstream_host",
                    "websocket",
                    "strip_prefix",
                    "rewrite",
                    "max_body",
                    "retries",
                    "retry_on",
                    "mirror",
                ] {
                    route.keys.shift_remove(key);
                }
                route.keys.retain(|key, _| !key.starts_with("request_headers"));
            }
            self.model.add_route(&router.key, route);
        }
    }

    /// Write the upstream of a router.
    fn target(&mut self, router: Found<'a>, route: &mut Table) {
        if route.keys.contains_key("redirect") || route.keys.contains_key("respond") {
            return;
        }
        let name = router.node.text_of("service");
        match self.service(name, route, 0) {
            Some(value) => {
                route.keys.insert("upstream".to_owned(), value);
                route.set("websocket", true);
            }
            None if matches!(name, "noop@internal" | "api@internal" | "dashboard@internal") => {
                let text = format!("the service `{name}` of Traefik itself: the route responds with 501");
                self.model.no_equal(&router.document.at(router.node), text);
                route.set_entry("respond", "status", 501);
            }
            None => {
                let text = format!("the service `{}` is not in the files: the route responds with 501", quoted(name));
                self.model.no_equal(&router.document.at(router.node), text);
                route.set_entry("respond", "status", 501);
            }
        }
    }

    /// Return the value of `upstream` for a service: a name, or names with weights.
    fn service(&mut self, name: &str, route: &mut Table, depth: usize) -> Option<toml::Value> {
        let found = self.find("services", name).filter(|_| depth < MAX_SERVICES)?;
        let origin = found.document.at(found.node);
        if let Some(balancer) = found.node.get("loadBalancer") {
            return self.load_balancer(name, Found { node: balancer, ..found }, route).map(toml::Value::String);
        }
        if let Some(weighted) = found.node.get("weighted") {
            let mut weights = toml::Table::new();
            for entry in weighted.items_of("services") {
                let weight = entry.integer_of("weight").unwrap_or(1).clamp(0, 1_000_000);
                match self.service(entry.text_of("name"), route, depth + 1) {
                    Some(toml::Value::String(name)) => drop(weights.insert(name, weight.into())),
                    _ => {
                        let text = format!("the service `{}` in `weighted`", quoted(entry.text_of("name")));
                        self.model.no_equal(&found.document.at(entry), text);
                    }
                }
            }
            return (!weights.is_empty()).then_some(toml::Value::Table(weights));
        }
        if let Some(mirroring) = found.node.get("mirroring") {
            let main = self.service(mirroring.text_of("service"), route, depth + 1)?;
            for mirror in mirroring.items_of("mirrors") {
                if let Some(toml::Value::String(copy)) = self.service(mirror.text_of("name"), route, depth + 1) {
                    route.set_entry("mirror", "upstream", copy);
                    route.set_entry("mirror", "percent", mirror.integer_of("percent").unwrap_or(100).clamp(0, 100));
                }
            }
            return Some(main);
        }
        if let Some(failover) = found.node.get("failover") {
            let main = self.service(failover.text_of("service"), route, depth + 1)?;
            if let Some(toml::Value::String(other)) = self.service(failover.text_of("fallback"), route, depth + 1) {
                route.set_list("fallback", [other]);
            }
            let text = "`failover`: a request is sent to the fallback after the first service has failed it";
            self.model.differs(&origin, text);
            return Some(main);
        }
        None
    }

    /// Return the name of the upstream of a load balancer.
    fn load_balancer(&mut self, name: &str, found: Found<'a>, route: &mut Table) -> Option<String> {
        let Found { document, node } = found;
        let known = [
            "servers",
            "healthCheck",
            "sticky",
            "passHostHeader",
            "serversTransport",
            "responseForwarding",
            "strategy",
        ];
        document.report_others(node, &known, "`loadBalancer`", &mut self.model);
        let mut table = Table::from_origin(&document.at(node), &format!("service {name}"));
        let mut count = 0;
        for server in node.items_of("servers") {
            let url = server.text_of("url").replace("h2c://", "http://");
            let is_http2 = server.text_of("url").starts_with("h2c://");
            let authority = url.split_once("://").map_or("", |(_, rest)| rest);
            let (host, path) = authority.split_at(authority.find('/').unwrap_or(authority.len()));
            if host.is_empty() || !url.starts_with("http") {
                let text = format!("the server `{}`", quoted(server.text_of("url")));
                self.model.no_equal(&document.at(server), text);
                continue;
            }
            if !matches!(path, "" | "/") {
                let text = format!("the path of `{}` is not added to requests; write `rewrite`", quoted(&url));
                self.model.no_equal(&document.at(server), text);
            }
            let url = url.trim_end_matches(path).to_owned();
            let mut entry = toml::Table::new();
            entry.insert("url".to_owned(), url.into());
            let weight = server.integer_of("weight").unwrap_or(1).clamp(0, 1000);
            entry.insert("weight".to_owned(), weight.into());
            table.push("servers", if weight == 1 { entry["url"].clone() } else { toml::Value::Table(entry) });
            if is_http2 {
                table.set("protocol", "http2");
            }
            count += 1;
        }
        if count == 0 {
            return None;
        }
        if count > 1 {
            table.set("balance", "round-robin");
        }
        if let Some(check) = node.get("healthCheck").filter(|check| check.text_of("path").starts_with('/')) {
            table.set_entry("health_check", "path", check.text_of("path"));
            for key in ["interval", "timeout"] {
                if let Some(time) = middlewares::duration_of(check.text_of(key)) {
                    table.set_entry("health_check", key, time);
                }
            }
            document.report_others(check, &["path", "interval", "timeout"], "`healthCheck`", &mut self.model);
        }
        if let Some(sticky) = node.get("sticky") {
            table.set("balance", "sticky");
            self.model
                .setting("store")
                .keys
                .insert("secret".to_owned(), "${STORE_SECRET:-change-me-in-production}".into());
            self.model
                .differs(&document.at(sticky), "`sticky`: the cookie has another name; set the variable STORE_SECRET");
        }
        if node.text_of("passHostHeader") == "false" {
            route.set("upstream_host", "server");
        }
        for key in ["serversTransport", "responseForwarding", "strategy"] {
            if let Some(value) = node.get(key) {
                self.model.no_equal(&document.at(value), format!("`{key}` of `loadBalancer`"));
            }
        }
        // Traefik has no timeout for the response, and 30s to connect.
        table.set("connect_timeout", "30s");
        table.set("response_timeout", "1h");
        Some(self.model.add_upstream(name.split('@').next().unwrap_or(name), table))
    }

    /// Show middlewares that no router of the files uses in placeholder routes, so that they can be copied.
    fn unused_middlewares(&mut self) {
        self.router.clear();
        for document in self.documents {
            for middleware in document.root.at(&["http", "middlewares"]).map(Node::pairs).unwrap_or_default() {
                if self.used.contains(&middleware.key) {
                    continue;
                }
                let origin = document.origin(middleware.line);
                let mut route = Table::from_origin(&origin, &format!("middleware {}", middleware.key));
                route.comments.push("A placeholder: no router in the files uses the middleware".to_owned());
                route.set("path", format!("/{}/{{*rest}}", literal(&middleware.key).trim_matches('/')));
                self.middleware(&middleware.key, &mut route, 0);
                if !route.keys.contains_key("redirect") {
                    route.set_entry("respond", "status", 501);
                }
                for key in ["strip_prefix", "rewrite", "max_body", "retries", "retry_on", "compress"] {
                    if route.keys.shift_remove(key).is_some() {
                        let text = format!("`{key}` needs an upstream: write it in the routes");
                        self.model.differs(&origin, text);
                    }
                }
                let request = route.keys.keys().filter(|key| key.starts_with("request_headers")).cloned();
                for key in request.collect::<Vec<_>>() {
                    route.keys.shift_remove(&key);
                    self.model.differs(&origin, "`request_headers` needs an upstream: write it in the routes");
                }
                self.model.no_equal(
                    &origin,
                    format!("the middleware `{}` is used by no router in the files", quoted(&middleware.key)),
                );
                self.model.add_route(&middleware.key, route);
            }
        }
    }
}

/// Merge alternatives that differ only in a single `Host` matcher.
fn merged(alternatives: Vec<Alternative>) -> Vec<Alternative> {
    let mut merged: Vec<Alternative> = Vec::new();
    for alternative in alternatives {
        let is_host = |matcher: &&Matcher| matcher.name == "Host" && !matcher.is_negated;
        let others = |list: &Alternative| list.iter().filter(|matcher| !is_host(matcher)).cloned().collect::<Vec<_>>();
        let hosts = |list: &Alternative| list.iter().filter(is_host).count();
        let same = merged
            .iter_mut()
            .find(|other| hosts(other) == 1 && hosts(&alternative) == 1 && others(other) == others(&alternative));
        match same {
            Some(other) => {
                let more: Vec<String> =
                    alternative.iter().filter(is_host).flat_map(|host| host.arguments.clone()).collect();
                if let Some(host) = other.iter_mut().find(|matcher| matcher.name == "Host") {
                    host.arguments.extend(more);
                }
            }
            None => merged.push(alternative),
        }
    }
    merged
}

/// Write the matchers of an alternative. Return why it cannot be imported.
fn matchers(alternative: &[Matcher], route: &mut Table) -> Option<String> {
    let mut headers = toml::Table::new();
    let mut query = toml::Table::new();
    for matcher in alternative {
        let [first, rest @ ..] = &*matcher.arguments else {
            return Some(format!("`{}` has no argument", quoted(&matcher.name)));
        };
        if matcher.is_negated {
            return Some(format!("`!{}`", quoted(&matcher.name)));
        }
        let has_path = route.keys.contains_key("path") || route.keys.contains_key("path_regex");
        match (&*matcher.name, rest) {
            ("Host", _) if !route.keys.contains_key("hosts") => {
                route.set_list("hosts", matcher.arguments.iter().map(|host| host.to_ascii_lowercase()));
            }
            ("Path", []) if !has_path && first.starts_with('/') => route.set("path", literal(first)),
            ("PathPrefix", []) if !has_path && first.starts_with('/') => {
                let prefix = literal(first.trim_end_matches('/'));
                route.set("path", format!("{prefix}/{{*rest}}"));
                if !first.ends_with('/') {
                    route.set("trailing_slash", "same");
                }
            }
            ("PathRegexp", []) if !has_path => {
                let expression = whole_expression(first);
                if PathPattern::from_regex(&expression).is_err() {
                    return Some(format!("`{}` is no valid regular expression here", quoted(first)));
                }
                route.set("path_regex", expression);
            }
            ("Method", _) if !route.keys.contains_key("methods") => {
                route.set_list("methods", matcher.arguments.iter().map(|method| method.to_ascii_uppercase()));
            }
            ("Header" | "HeaderRegexp" | "Query" | "QueryRegexp", [value]) => {
                let is_header = matcher.name.starts_with("Header");
                let mut condition = toml::Table::new();
                if matcher.name.ends_with("Regexp") {
                    condition.insert("regex".to_owned(), whole_expression(value).into());
                } else {
                    condition.insert("exact".to_owned(), value.as_str().into());
                }
                let name = if is_header { first.to_ascii_lowercase() } else { first.clone() };
                let conditions = if is_header { &mut headers } else { &mut query };
                conditions.insert(name, toml::Value::Table(condition));
            }
            ("Query", []) => {
                let mut condition = toml::Table::new();
                condition.insert("present".to_owned(), true.into());
                query.insert(first.clone(), toml::Value::Table(condition));
            }
            ("ClientIP", _) => return Some("`ClientIP`: write `allow`, which responds with 403".to_owned()),
            (name, _) => return Some(format!("`{}` with these arguments", quoted(name))),
        }
    }
    if !route.keys.contains_key("path") && !route.keys.contains_key("path_regex") {
        route.set("path", "/{*rest}");
    }
    for (key, conditions) in [("headers", headers), ("query", query)] {
        if !conditions.is_empty() {
            route.set_entry("match", key, conditions);
        }
    }
    None
}
