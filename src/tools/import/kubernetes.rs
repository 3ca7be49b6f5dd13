//! Imports Ingress resources of Kubernetes, with the annotations of ingress-nginx.

mod annotations;
mod canary;
mod tls;

use std::collections::{BTreeMap, BTreeSet};

use crate::config::yaml::Node;
use crate::tools::import::document::{Document, read};
use crate::tools::import::model::{Model, Relation, Table, quoted};
use crate::tools::import::paths::{literal, prefix_expression, with_groups};
use crate::tools::import::{ImportError, Input};

/// Import the output of `kubectl get ingress,svc,configmap -o yaml`. `replicas` is the number of pods of
/// ingress-nginx, each of which counts alone.
pub(super) fn import(inputs: &[Input], annotated: bool, replicas: Option<u32>) -> Result<Model, ImportError> {
    let mut resources = Vec::new();
    for document in read(inputs)? {
        if document.root.text_of("kind") == "List" || document.root.text_of("kind").ends_with("List") {
            let Document { file, offset, root } = document;
            resources.extend(root.items_of("items").iter().map(|item| Document {
                file: file.clone(),
                offset,
                root: item.clone(),
            }));
        } else {
            resources.push(document);
        }
    }
    let mut importer = Importer {
        model: Model::default(),
        annotated,
        replicas,
        services: BTreeMap::new(),
        settings: BTreeMap::new(),
        taken: BTreeSet::new(),
        mains: BTreeMap::new(),
        redirected: BTreeSet::new(),
    };
    importer.collect(&resources);
    importer.listeners(&resources);
    // A canary changes the routes of another Ingress.
    for wants_canary in [false, true] {
        for document in resources.iter().filter(|document| document.root.text_of("kind") == "Ingress") {
            if (annotated && is_canary(document)) == wants_canary {
                importer.ingress(document);
            }
        }
    }
    if annotated {
        importer.model.setting("client_ip").set("ipv6_prefix", 128);
        let text = "ingress-nginx sets X-Forwarded-For to the address of the peer, unless `use-forwarded-headers` is set: \
                    list the load balancer in front of the gateway in `client_ip.trusted_proxies`";
        importer.model.note(Relation::Differs, None, text);
    }
    Ok(importer.model)
}

/// Collects what the resources share.
struct Importer {
    model: Model,
    /// Whether the annotations of ingress-nginx are imported.
    annotated: bool,
    replicas: Option<u32>,
    /// Services by namespace and name.
    services: BTreeMap<String, Node>,
    /// The ConfigMap of ingress-nginx.
    settings: BTreeMap<String, String>,
    /// Hosts and paths that a route has.
    taken: BTreeSet<String>,
    /// The routes that a canary may change.
    mains: BTreeMap<String, Main>,
    /// Hosts whose requests without TLS are redirected.
    redirected: BTreeSet<String>,
}

/// The route of a path.
struct Main {
    /// Name of the route.
    route: String,
    /// Keys of the upstream.
    upstream: Table,
    has_canary: bool,
}

/// A path of an Ingress.
struct IngressPath<'a> {
    host: &'a str,
    path: &'a str,
    path_type: &'a str,
    backend: &'a Node,
}

impl Importer {
    /// Collect Services and the ConfigMap of ingress-nginx. Report resources of other kinds.
    fn collect(&mut self, resources: &[Document]) {
        for document in resources {
            let root = &document.root;
            match root.text_of("kind") {
                "Service" => {
                    self.services.insert(name_of(root), root.clone());
                }
                "ConfigMap" if self.annotated => self.config_map(document),
                "Ingress" | "IngressClass" => {}
                kind => {
                    let text = format!("a resource of the kind `{}`", quoted(kind));
                    self.model.no_equal(&document.at(root), text);
                }
            }
        }
    }

    /// Read the settings of the controller. A ConfigMap without any known setting belongs to another program.
    fn config_map(&mut self, document: &Document) {
        let pairs = document.root.get("data").map(Node::pairs).unwrap_or_default();
        let known = [
            "limit-req-status-code",
            "limit-conn-status-code",
            "proxy-body-size",
            "proxy-read-timeout",
            "proxy-connect-timeout",
            "ssl-redirect",
        ];
        let is_controller = document.root.at(&["metadata", "name"]).and_then(Node::text).unwrap_or_default();
        if !is_controller.contains("nginx") {
            let text = format!("the ConfigMap `{}` is not that of ingress-nginx", quoted(is_controller));
            return self.model.not_needed(&document.at(&document.root), text);
        }
        for pair in pairs {
            let value = pair.value.text().unwrap_or_default();
            match &*pair.key {
                key if known.contains(&key) => drop(self.settings.insert(key.to_owned(), value.to_owned())),
                "use-forwarded-headers" if value == "true" => {
                    let text = "`use-forwarded-headers`: set `client_ip.trusted_proxies` to the load balancers";
                    self.model.differs(&document.origin(pair.line), text);
                }
                key => {
                    let text = format!("`{}: {}`", quoted(key), quoted(value));
                    self.model.no_equal(&document.origin(pair.line), text);
                }
            }
        }
    }

    fn ingress(&mut self, document: &Document) {
        let root = &document.root;
        let annotations = root.at(&["metadata", "annotations"]);
        let pairs = annotations.map(Node::pairs).unwrap_or_default();
        let mut paths = Vec::new();
        for rule in root.at(&["spec", "rules"]).map(Node::items).unwrap_or_default() {
            let host = rule.text_of("host");
            for path in rule.at(&["http", "paths"]).map(Node::items).unwrap_or_default() {
                if let Some(backend) = path.get("backend") {
                    let text = path.text_of("path");
                    paths.push(IngressPath {
                        host,
                        path: if text.is_empty() { "/" } else { text },
                        path_type: path.text_of("pathType"),
                        backend,
                    });
                }
            }
        }
        if let Some(backend) = root.at(&["spec", "defaultBackend"]) {
            paths.push(IngressPath { host: "", path: "/", path_type: "Prefix", backend });
        }
        let settings = self.annotations(document, pairs);
        for path in &paths {
            match &settings.canary {
                Some(canary) => self.canary_routes(document, path, &settings, canary),
                None => self.route(document, path, &settings),
            }
        }
    }

    /// Add the routes of a path.
    fn route(&mut self, document: &Document, path: &IngressPath<'_>, settings: &annotations::Settings) {
        let origin = document.at(path.backend);
        let text = path.path.trim_end_matches('/');
        let mut route = Table::from_origin(&origin, &format!("{} {}{}", name_of(&document.root), path.host, path.path));
        if !path.host.is_empty() {
            route.set_list("hosts", [path.host.to_ascii_lowercase()]);
            if path.host.starts_with("*.") {
                let text =
                    format!("`{}`: matches one label in Kubernetes, and any number of labels here", quoted(path.host));
                self.model.differs(&origin, text);
            }
        }
        if !self.path(document, path, settings, &mut route) {
            return;
        }
        let identity = format!("{} {:?} {:?}", path.host, route.keys.get("path"), route.keys.get("path_regex"));
        if !self.taken.insert(identity) {
            let text =
                format!("`{}{}`: another Ingress has the same host and path", quoted(path.host), quoted(path.path));
            return self.model.no_equal(&origin, text);
        }
        self.action(document, path, settings, &mut route);
        self.restrict_to_tls(document, path.host, settings, &mut route);
        let route = self.model.add_route(&format!("{} {text}", name_of(&document.root)), route);
        self.mains.insert(path_key(path), Main { route, upstream: settings.upstream.clone(), has_canary: false });
    }

    /// Write the path of a route. Return whether it has an equal.
    fn path(
        &mut self,
        document: &Document,
        path: &IngressPath<'_>,
        settings: &annotations::Settings,
        route: &mut Table,
    ) -> bool {
        let origin = document.at(path.backend);
        let is_regex = self.annotated && (settings.is_regex || settings.rewrite.is_some());
        let text = path.path.trim_end_matches('/');
        if is_regex {
            let expression = format!("(?i){}", prefix_expression(path.path));
            if crate::routing::pattern::PathPattern::from_regex(&expression).is_err() {
                let text = format!("`{}`: the regular expression is not valid here", quoted(path.path));
                self.model.no_equal(&origin, text);
                return false;
            }
            route.set("path_regex", expression);
        } else if path.path_type == "Exact" {
            route.set("path", literal(path.path));
        } else {
            route.set("path", format!("{}/{{*rest}}", literal(text)));
            if !text.is_empty() {
                route.set("trailing_slash", "same");
            }
            if path.path_type != "Prefix" && !text.is_empty() {
                let text = format!("`{}`: the route matches whole segments", quoted(path.path));
                self.model.differs(&origin, text);
            }
        }
        true
    }

    /// Write what a route does: redirect, or forward to the Service.
    fn action(
        &mut self,
        document: &Document,
        path: &IngressPath<'_>,
        settings: &annotations::Settings,
        route: &mut Table,
    ) {
        if let Some(to) = &settings.redirect {
            route.set_entry("redirect", "to", to.as_str());
            route.set_entry("redirect", "status", settings.redirect_status);
            return;
        }
        let upstream = self.upstream(document, path.backend, settings);
        match upstream {
            Some(name) if !settings.is_closed => route.set("upstream", name),
            _ => {
                route.set_entry("respond", "status", 501);
                route.set_list("limits", settings.limits.iter().cloned());
                return;
            }
        }
        for (key, value) in &settings.route.keys {
            route.keys.insert(key.clone(), value.clone());
        }
        if let Some(rewrite) = &settings.rewrite {
            let target = with_groups(rewrite, true);
            if target != "/" || path.path != "/" {
                route.set("rewrite", target);
            }
        }
        route.set_list("limits", settings.limits.iter().cloned());
    }

    /// Return the name of the upstream of a Service. `None`: the backend is no Service, which is reported.
    fn upstream(&mut self, document: &Document, backend: &Node, settings: &annotations::Settings) -> Option<String> {
        let origin = document.at(backend);
        // Before `networking.k8s.io/v1`, a backend had `serviceName` and `servicePort`, which is a number or a name.
        let service = backend.get("service");
        let name = service.map_or_else(|| backend.text_of("serviceName"), |service| service.text_of("name"));
        if name.is_empty() {
            self.model.no_equal(&origin, "the backend is no Service: the route responds with 501");
            return None;
        }
        let old_port = backend.get("servicePort").and_then(Node::text);
        let port_of = |key| service.and_then(|service| service.at(&["port", key])).and_then(Node::text).or(old_port);
        let namespace = namespace_of(&document.root);
        let known = self.services.get(&format!("{namespace}/{name}"));
        let number = port_of("number").filter(|port| port.bytes().all(|byte| byte.is_ascii_digit())).map(str::to_owned);
        let named = port_of("name").unwrap_or_default();
        let port = number.or_else(|| {
            let ports = known?.at(&["spec", "ports"])?.items();
            let port = ports.iter().find(|port| port.text_of("name") == named)?;
            Some(port.text_of("port").to_owned())
        });
        let Some(port) = port else {
            let text = format!(
                "the port `{}` of the Service `{}` is not in the files: the route responds with 501",
                quoted(named),
                quoted(name)
            );
            self.model.no_equal(&origin, text);
            return None;
        };
        let external =
            known.map(|service| service.at(&["spec", "externalName"]).and_then(Node::text).unwrap_or_default());
        let host = match external.filter(|name| !name.is_empty()) {
            Some(name) => name.to_owned(),
            None => format!("{name}.{namespace}.svc"),
        };
        let mut upstream = Table::from_origin(&origin, &format!("Service {namespace}/{name}"));
        let scheme = if settings.is_https { "https" } else { "http" };
        upstream.set_list("servers", [format!("{scheme}://{host}:{port}")]);
        for (key, value) in &settings.upstream.keys {
            upstream.keys.insert(key.clone(), value.clone());
        }
        Some(self.model.add_upstream(&format!("{name} {port}"), upstream))
    }
}

/// Return the text that is equal for the same path of a canary and of its main Ingress.
fn path_key(path: &IngressPath<'_>) -> String {
    format!("{} {} {}", path.host.to_ascii_lowercase(), path.path, path.path_type == "Exact")
}

/// Return whether an Ingress is a canary of another one.
fn is_canary(document: &Document) -> bool {
    let annotations = document.root.at(&["metadata", "annotations"]).map(Node::pairs).unwrap_or_default();
    annotations.iter().any(|pair| pair.key.ends_with("/canary") && pair.value.text() == Some("true"))
}

/// Return the namespace of a resource.
fn namespace_of(root: &Node) -> &str {
    root.at(&["metadata", "namespace"]).and_then(Node::text).unwrap_or("default")
}

/// Return the namespace and the name of a resource.
fn name_of(root: &Node) -> String {
    let name = root.at(&["metadata", "name"]).and_then(Node::text).unwrap_or_default();
    format!("{}/{name}", namespace_of(root))
}
