//! The annotations of ingress-nginx.

use crate::config::yaml::Pair;
use crate::identity::access::parse_network;
use crate::tools::import::document::Document;
use crate::tools::import::kubernetes::canary::Canary;
use crate::tools::import::kubernetes::{Importer, name_of};
use crate::tools::import::model::{Relation, Table, quoted};
use crate::tools::import::paths::with_groups;
use crate::tools::import::units::size;

/// Factor of the burst without `limit-burst-multiplier`.
const DEFAULT_BURST_MULTIPLIER: i64 = 5;

/// Beginning of the names of the annotations.
const PREFIX: &str = "nginx.ingress.kubernetes.io/";

/// What the annotations of an Ingress mean for its routes and upstreams.
#[derive(Debug, Default)]
pub(super) struct Settings {
    /// Whether paths are regular expressions.
    pub(super) is_regex: bool,
    /// `rewrite-target`, which makes paths regular expressions as well.
    pub(super) rewrite: Option<String>,
    /// Target of a redirect of all requests.
    pub(super) redirect: Option<String>,
    /// Status of this redirect.
    pub(super) redirect_status: i64,
    /// Whether the routes must not be reachable, because their authentication has no equal.
    pub(super) is_closed: bool,
    /// Whether the Service speaks TLS.
    pub(super) is_https: bool,
    /// Names of the limits.
    pub(super) limits: Vec<String>,
    /// Keys of the routes.
    pub(super) route: Table,
    /// Keys of the upstreams.
    pub(super) upstream: Table,
    /// Whether requests without TLS are redirected, if the host has a certificate.
    pub(super) redirects_to_tls: bool,
    /// The Ingress is a canary of another one.
    pub(super) canary: Option<Canary>,
}

/// The annotations of an Ingress by their short names.
pub(super) struct Annotations<'a> {
    document: &'a Document,
    pairs: Vec<&'a Pair>,
    used: Vec<&'static str>,
}

impl<'a> Annotations<'a> {
    /// Return the value of an annotation, which then counts as imported.
    pub(super) fn take(&mut self, name: &'static str) -> Option<&'a str> {
        self.used.push(name);
        self.pairs.iter().find(|pair| short(&pair.key) == name).and_then(|pair| pair.value.text()).map(str::trim)
    }

    fn is_true(&mut self, name: &'static str) -> bool {
        self.take(name) == Some("true")
    }

    fn list(&mut self, name: &'static str) -> Vec<String> {
        let items = self.take(name).unwrap_or_default().split([',', ' ']);
        items.map(str::trim).filter(|item| !item.is_empty()).map(str::to_owned).collect()
    }

    pub(super) fn number(&mut self, name: &'static str) -> Option<i64> {
        self.take(name)?.parse().ok().filter(|number| *number > 0)
    }
}

fn short(key: &str) -> &str {
    key.strip_prefix(PREFIX).unwrap_or_default()
}

impl Importer {
    /// Read the annotations of an Ingress, and report those that are not imported.
    pub(super) fn annotations(&mut self, document: &Document, pairs: &[Pair]) -> Settings {
        let mut settings = Settings { redirect_status: 302, ..Settings::default() };
        let own: Vec<&Pair> = pairs.iter().filter(|pair| pair.key.starts_with(PREFIX)).collect();
        for pair in pairs.iter().filter(|pair| !pair.key.starts_with(PREFIX)) {
            let text = format!("the annotation `{}`", quoted(&pair.key));
            self.model.not_needed(&document.origin(pair.line), text);
        }
        let mut annotations = Annotations { document, pairs: own, used: Vec::new() };
        if self.annotated && annotations.is_true("canary") {
            let canary = Canary::read(&mut annotations);
            settings.is_https = matches!(annotations.take("backend-protocol"), Some("HTTPS" | "GRPCS"));
            settings.canary = Some(canary);
            let others = annotations.pairs.iter().filter(|pair| !annotations.used.contains(&short(&pair.key)));
            for pair in others {
                let text = format!("`{}`: ingress-nginx uses the annotations of the main Ingress", short(&pair.key));
                self.model.not_needed(&document.origin(pair.line), text);
            }
            return settings;
        }
        if self.annotated {
            self.limits(&mut annotations, &mut settings);
            self.routing(&mut annotations, &mut settings);
            self.proxying(&mut annotations, &mut settings);
            self.access(&mut annotations, &mut settings);
            cors(&mut annotations, &mut settings);
        }
        let Annotations { pairs, used, .. } = annotations;
        for pair in pairs {
            let name = short(&pair.key);
            if !used.contains(&name) || !self.annotated {
                let value = pair.value.text().unwrap_or_default();
                let advice = advice(name).map_or_else(String::new, |advice| format!(": {advice}"));
                let text = format!("`{name}: {}`{advice}", quoted(value));
                self.model.no_equal(&document.origin(pair.line), text);
            }
        }
        settings
    }

    /// Import `limit-rps`, `limit-rpm` and `limit-connections`. Each pod counts alone, by client address.
    fn limits(&mut self, annotations: &mut Annotations<'_>, settings: &mut Settings) {
        let multiplier = annotations.number("limit-burst-multiplier").unwrap_or(DEFAULT_BURST_MULTIPLIER);
        let mut networks = annotations.list("limit-whitelist");
        networks.extend(annotations.list("limit-allowlist"));
        networks.retain(|network| parse_network(network).is_some());
        let replicas = i64::from(self.replicas.unwrap_or(1));
        let status = |key: &str, settings: &std::collections::BTreeMap<String, String>| {
            settings.get(key).and_then(|status| status.parse::<i64>().ok()).unwrap_or(503)
        };
        let rates = [("limit-rps", "s"), ("limit-rpm", "min"), ("limit-connections", "")];
        for (name, unit) in rates {
            let Some(count) = annotations.number(name) else { continue };
            let line = annotations.pairs.iter().find(|pair| short(&pair.key) == name).map_or(1, |pair| pair.line);
            let origin = annotations.document.origin(line);
            let mut limit = Table::from_origin(&origin, &format!("{name}: {count}"));
            limit.set("by", "ip");
            limit.set_list("exempt", networks.iter().cloned());
            let count = count.saturating_mul(replicas);
            if unit.is_empty() {
                limit.set("algorithm", "concurrency");
                limit.set("quota", count.to_string());
                limit.set("status", status("limit-conn-status-code", &self.settings));
            } else {
                limit.set("quota", format!("{count}/{unit}"));
                // Each pod admits one request, and a burst of `multiplier` times the rate.
                limit.set("burst", count.saturating_mul(multiplier).saturating_add(replicas));
                limit.set("status", status("limit-req-status-code", &self.settings));
            }
            let base = format!("{} {name}", name_of(&annotations.document.root));
            settings.limits.push(self.model.add_new_limit(&base, limit));
            match self.replicas {
                Some(replicas) => {
                    let text = format!(
                        "each of the {replicas} pods of ingress-nginx counts alone: a limit here is the sum of all pods. A \
                         client whose requests all reach one pod gets less from ingress-nginx"
                    );
                    self.model.note(Relation::Differs, None, text);
                }
                None => {
                    let text = "each pod of ingress-nginx counts alone, so that N pods admit N times the rate: give the \
                                number of pods with `--replicas N`";
                    self.model.note(Relation::Differs, None, text);
                }
            }
        }
    }

    fn routing(&mut self, annotations: &mut Annotations<'_>, settings: &mut Settings) {
        settings.is_regex = annotations.is_true("use-regex");
        settings.rewrite = annotations.take("rewrite-target").map(str::to_owned);
        if let Some(rewrite) = &settings.rewrite
            && with_groups(rewrite, true).contains('$')
        {
            settings.is_closed = true;
            let text = format!("`rewrite-target: {}`: the routes respond with 501", quoted(rewrite));
            self.model.no_equal(&annotations.document.at(&annotations.document.root), text);
        }
        for (name, status) in [("permanent-redirect", 301), ("temporal-redirect", 302)] {
            if let Some(to) = annotations.take(name) {
                settings.redirect = Some(to.to_owned());
                settings.redirect_status = status;
            }
        }
        if let Some(status) = annotations.number("permanent-redirect-code") {
            settings.redirect_status = if matches!(status, 301 | 302 | 303 | 307 | 308) { status } else { 301 };
        }
        if let Some(host) = annotations.take("upstream-vhost") {
            settings.route.set("upstream_host", host);
        }
        let redirects = annotations.take("ssl-redirect").or(self.settings.get("ssl-redirect").map(String::as_str));
        settings.redirects_to_tls = redirects != Some("false");
    }

    fn proxying(&mut self, annotations: &mut Annotations<'_>, settings: &mut Settings) {
        settings.route.set("websocket", true);
        let body = annotations.take("proxy-body-size").map(str::to_owned);
        let body = body.or_else(|| self.settings.get("proxy-body-size").cloned()).unwrap_or("1m".to_owned());
        if let Some(bound) = size(&body).filter(|bound| !bound.starts_with('0')) {
            settings.route.set("max_body", bound);
        }
        for (key, name, default) in
            [("connect_timeout", "proxy-connect-timeout", 5), ("response_timeout", "proxy-read-timeout", 60)]
        {
            let global = self.settings.get(name).and_then(|text| text.trim_end_matches('s').parse().ok());
            let seconds = annotations.take(name).and_then(|text| text.trim_end_matches('s').parse().ok());
            settings.upstream.set(key, format!("{}s", seconds.or(global).filter(|time| *time > 0).unwrap_or(default)));
        }
        match annotations.take("backend-protocol") {
            None | Some("HTTP" | "AUTO_HTTP") => {}
            Some("HTTPS") => settings.is_https = true,
            Some("GRPC") => settings.upstream.set("protocol", "http2"),
            Some("GRPCS") => {
                settings.is_https = true;
                settings.upstream.set("protocol", "http2");
            }
            Some(other) => {
                let text = format!("`backend-protocol: {}`: the routes respond with 501", quoted(other));
                settings.is_closed = true;
                self.model.no_equal(&annotations.document.at(&annotations.document.root), text);
            }
        }
        if settings.is_https {
            let text = "ingress-nginx does not verify the certificates of Services; Sluicegate does: set `tls.ca` or \
                        `tls.verify = false` of the upstream";
            self.model.note(Relation::Differs, None, text);
        }
    }

    fn access(&mut self, annotations: &mut Annotations<'_>, settings: &mut Settings) {
        for name in ["whitelist-source-range", "allowlist-source-range"] {
            for network in annotations.list(name) {
                settings.route.push("allow", network);
            }
        }
        for network in annotations.list("denylist-source-range") {
            settings.route.push("deny", network);
        }
        let headers = annotations.list("auth-response-headers");
        if let Some(url) = annotations.take("auth-url") {
            let origin = annotations.document.at(&annotations.document.root);
            if url.contains('$') {
                settings.is_closed = true;
                let text =
                    format!("`auth-url: {}`: the URL has no variables; the routes respond with 501", quoted(url));
                self.model.no_equal(&origin, text);
            } else {
                let mut auth = Table::from_origin(&origin, &format!("auth-url {url}"));
                auth.set("kind", "forward");
                auth.set("url", url);
                auth.set_list("response_headers", headers.iter().map(|name| name.to_ascii_lowercase()));
                let text = "ingress-nginx sends all request headers to the authentication server, Sluicegate those in \
                            `request_headers`: `authorization` and `cookie`";
                self.model.note(Relation::Differs, None, text);
                let name = self.model.add_auth(&name_of(&annotations.document.root), auth);
                settings.route.set_list("require", [name]);
            }
        }
        if let Some(kind) = annotations.take("auth-type") {
            settings.is_closed = true;
            let secret = annotations.take("auth-secret").unwrap_or_default();
            let origin = annotations.document.at(&annotations.document.root);
            let text = format!(
                "`auth-type: {}`: write the users of the Secret `{}` to a file, add [auth.NAME] with kind = \"basic\" and \
                 `require`, and replace the response 501 of the routes with `upstream`",
                quoted(kind),
                quoted(secret)
            );
            self.model.no_equal(&origin, text);
            annotations.take("auth-realm");
        }
    }
}

/// Import the annotations for CORS.
fn cors(annotations: &mut Annotations<'_>, settings: &mut Settings) {
    let is_enabled = annotations.is_true("enable-cors");
    let origins = annotations.list("cors-allow-origin");
    let methods = annotations.list("cors-allow-methods");
    let headers = annotations.list("cors-allow-headers");
    let expose = annotations.list("cors-expose-headers");
    let credentials = annotations.take("cors-allow-credentials") != Some("false");
    let max_age = annotations.number("cors-max-age").unwrap_or(1_728_000);
    if !is_enabled {
        return;
    }
    let list = |items: Vec<String>, default: &[&str]| -> Vec<toml::Value> {
        let items = if items.is_empty() { default.iter().map(|item| (*item).to_owned()).collect() } else { items };
        items.into_iter().map(toml::Value::String).collect()
    };
    let is_any = origins.is_empty() || origins.iter().any(|origin| origin == "*");
    let origins = if is_any { vec!["*".to_owned()] } else { origins };
    settings.route.set_entry("cors", "origins", list(origins, &[]));
    settings.route.set_entry("cors", "methods", list(methods, &["GET", "PUT", "POST", "DELETE", "PATCH", "OPTIONS"]));
    settings.route.set_entry("cors", "headers", list(headers, &["*"]));
    if !expose.is_empty() {
        settings.route.set_entry("cors", "expose", list(expose, &[]));
    }
    if credentials && !is_any {
        settings.route.set_entry("cors", "credentials", true);
    }
    settings.route.set_entry("cors", "max_age", format!("{max_age}s"));
}

/// Return what to do instead of an annotation.
fn advice(name: &str) -> Option<&'static str> {
    let advice = match name {
        "server-snippet" | "configuration-snippet" | "location-snippet" | "auth-snippet" => {
            "snippets of nginx are not imported; import them alone with `sluicegate import nginx`"
        }
        "affinity" | "affinity-mode" | "session-cookie-name" | "session-cookie-path" | "session-cookie-max-age" => {
            "`balance = \"sticky\"` needs the addresses of the pods as `servers`"
        }
        "limit-rate" | "limit-rate-after" => "the gateway does not limit the bandwidth of a response",
        "force-ssl-redirect" => "add a route with `redirect = { scheme = \"https\" }` on the plaintext listener",
        "proxy-buffer-size" | "proxy-buffering" | "proxy-buffers-number" | "proxy-request-buffering" => {
            "buffers are not configured by route"
        }
        "proxy-send-timeout" => "`server.body_idle_timeout` is 30s by default",
        "auth-signin" => "the authentication server may respond with a redirect",
        "custom-http-errors" | "default-backend" => "see `error_pages`",
        "enable-modsecurity" | "modsecurity-snippet" | "enable-owasp-core-rules" => {
            "there is no web application firewall"
        }
        _ => return None,
    };
    Some(advice)
}
