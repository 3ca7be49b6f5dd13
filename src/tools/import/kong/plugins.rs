//! Kong's plugins and consumers.

use std::collections::BTreeSet;

use aws_lc_rs::digest::{SHA256, digest};
use data_encoding::HEXLOWER;

use crate::config::yaml::Node;
use crate::limiter::quota::Quota;
use crate::tools::import::document::Document;
use crate::tools::import::kong::Importer;
use crate::tools::import::model::{Origin, Relation, Table, quoted, valid_name};

/// Plugins without an effect on what requests get.
const NOT_NEEDED: &[&str] = &[
    "prometheus",
    "file-log",
    "http-log",
    "tcp-log",
    "udp-log",
    "syslog",
    "statsd",
    "datadog",
    "zipkin",
    "opentelemetry",
    "loggly",
];

/// A plugin with its configuration.
#[derive(Debug, Clone)]
pub(super) struct Plugin<'a> {
    document: &'a Document,
    node: &'a Node,
    /// Name of the route or service that has the plugin. Empty: it applies to all routes.
    owner: &'a str,
}

/// The groups of an acl plugin.
#[derive(Debug, Clone, Default)]
pub(super) struct Acl {
    allow: Vec<String>,
    deny: Vec<String>,
}

/// The plugins that apply to a route. The same plugin of a more specific level replaces that of another level.
pub(super) struct Scope<'a, 's> {
    pub(super) global: &'s [Plugin<'a>],
    pub(super) service: &'s [Plugin<'a>],
    pub(super) route: &'s [Plugin<'a>],
}

impl<'a> Scope<'a, '_> {
    /// Return the plugins in effect.
    fn effective(&self) -> Vec<Plugin<'a>> {
        let mut effective: Vec<Plugin<'a>> = Vec::new();
        for plugin in self.route.iter().chain(self.service).chain(self.global) {
            if effective.iter().all(|other| other.name() != plugin.name()) {
                effective.push(plugin.clone());
            }
        }
        effective
    }
}

impl Plugin<'_> {
    fn name(&self) -> &str {
        self.node.text_of("name")
    }

    fn origin(&self) -> Origin {
        self.document.at(self.node)
    }

    /// Return a value of `config`.
    fn config(&self, key: &str) -> Option<&Node> {
        self.node.at(&["config", key])
    }

    fn text(&self, key: &str) -> &str {
        self.config(key).and_then(Node::text).unwrap_or_default()
    }

    fn texts(&self, key: &str) -> Vec<String> {
        self.config(key).map(Node::items).unwrap_or_default().iter().filter_map(Node::text).map(str::to_owned).collect()
    }

    /// Return the unit and the count of each window of a plugin that limits requests.
    fn windows(&self) -> Vec<(String, i64)> {
        let mut windows: Vec<(String, i64)> = Vec::new();
        for unit in ["second", "minute", "hour", "day", "month", "year"] {
            if let Ok(count) = self.text(unit).parse::<i64>() {
                let short = match unit {
                    "second" => "s",
                    "minute" => "min",
                    other => other,
                };
                windows.push((short.to_owned(), count));
            }
        }
        let sizes = self.texts("window_size");
        for (count, size) in self.texts("limit").iter().zip(sizes) {
            if let Ok(count) = count.parse() {
                windows.push((format!("{size}s"), count));
            }
        }
        windows
    }

    fn is(&self, key: &str, default: bool) -> bool {
        match self.text(key) {
            "" => default,
            text => text == "true",
        }
    }
}

/// What the plugins at the top of a configuration may belong to.
const OWNERS: [&str; 4] = ["consumer", "consumer_group", "route", "service"];

/// Return the enabled plugins of a service, a route or a consumer. `kind` is the key with which plugins at the top of
/// the configuration refer to it.
pub(super) fn of<'a>(document: &'a Document, node: &'a Node, kind: &str) -> Vec<Plugin<'a>> {
    let owner = node.text_of(if kind == "consumer" { "username" } else { "name" });
    let refers = |plugin: &&Node| {
        let is_owner = |reference: &Node| {
            let name = reference
                .text()
                .unwrap_or_else(|| reference.text_of(if kind == "consumer" { "username" } else { "name" }));
            !name.is_empty() && (name == owner || name == node.text_of("id"))
        };
        owners(plugin) == [kind] && plugin.get(kind).is_some_and(is_owner)
    };
    enabled(
        document,
        node.items_of("plugins").iter().chain(document.root.items_of("plugins").iter().filter(refers)),
        owner,
    )
}

/// Return the enabled plugins of the whole configuration.
pub(super) fn global(document: &Document) -> Vec<Plugin<'_>> {
    enabled(document, document.root.items_of("plugins").iter().filter(|plugin| owners(plugin).is_empty()), "")
}

fn enabled<'a>(document: &'a Document, nodes: impl Iterator<Item = &'a Node>, owner: &'a str) -> Vec<Plugin<'a>> {
    nodes.filter(|node| node.text_of("enabled") != "false").map(|node| Plugin { document, node, owner }).collect()
}

/// Return the kinds of what a plugin belongs to.
fn owners(plugin: &Node) -> Vec<&'static str> {
    OWNERS.into_iter().filter(|kind| plugin.get(kind).is_some_and(|node| node.text() != Some(""))).collect()
}

/// What identifies the consumer on a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Credential {
    None,
    ApiKey,
    Jwt,
    Basic,
}

impl Importer<'_> {
    /// Write the plugins of a route. Return the groups of its acl plugin.
    pub(super) fn plugins(&mut self, scope: &Scope<'_, '_>, table: &mut Table) -> Option<Acl> {
        let plugins = scope.effective();
        let has = |name: &str| plugins.iter().any(|plugin| plugin.name() == name);
        let credential = match () {
            () if has("key-auth") => Credential::ApiKey,
            () if has("jwt") => Credential::Jwt,
            () if has("basic-auth") => Credential::Basic,
            () => Credential::None,
        };
        let mut acl = None;
        for plugin in &plugins {
            match plugin.name() {
                "rate-limiting" | "rate-limiting-advanced" => self.rate_limiting(plugin, credential, table),
                "key-auth" => self.key_auth(plugin, table),
                "jwt" => self.jwt(plugin, table),
                "basic-auth" => self.basic_auth(plugin, table),
                "acl" => acl = Some(Acl { allow: plugin.texts("allow"), deny: plugin.texts("deny") }),
                "cors" => self.cors(plugin, table),
                "ip-restriction" => {
                    table.set_list("allow", plugin.texts("allow"));
                    table.set_list("deny", plugin.texts("deny"));
                }
                "request-size-limiting" => size_limit(plugin, table),
                "request-termination" => terminate(plugin, table),
                "request-transformer" => self.transform(plugin, "request_headers", table),
                "response-transformer" => self.transform(plugin, "response_headers", table),
                "correlation-id" => self.correlation(plugin, table),
                name if NOT_NEEDED.contains(&name) => {
                    let text =
                        format!("the plugin `{}`: the gateway has metrics, traces and an access log", quoted(name));
                    self.model.not_needed(&plugin.origin(), text);
                }
                name => self.model.no_equal(&plugin.origin(), format!("the plugin `{}`", quoted(name))),
            }
        }
        if acl.is_some() && credential != Credential::ApiKey {
            let text = "the plugin `acl` without `key-auth`: the route does not check the groups of consumers";
            self.model.note(Relation::NoEqual, None, text);
        }
        acl
    }

    /// Add one limit for each window.
    fn rate_limiting(&mut self, plugin: &Plugin<'_>, credential: Credential, table: &mut Table) {
        let by = match (plugin.text("limit_by"), plugin.text("identifier")) {
            ("", "") => "consumer",
            ("", identifier) => identifier,
            (by, _) => by,
        };
        for (unit, count) in plugin.windows() {
            let mut limit = Table::from_origin(&plugin.origin(), &format!("{} {count}/{unit}", plugin.name()));
            self.identity(by, credential, plugin, &mut limit);
            let is_sliding = plugin.name() == "rate-limiting-advanced" && plugin.text("window_type") != "fixed";
            limit.set("algorithm", if is_sliding { "sliding-window" } else { "fixed-window" });
            limit.set("quota", format!("{}/{unit}", count.max(1)));
            if plugin.is("fault_tolerant", true) {
                limit.set("on_store_error", "allow");
            }
            if plugin.is("hide_client_headers", false) {
                limit.set("announce", false);
            }
            if let Ok(status @ 400..=599) = plugin.text("error_code").parse::<i64>()
                && status != 429
            {
                limit.set("status", status);
            }
            // All routes to which the plugin applies share its counters, if the same credential identifies the consumer.
            let key = format!("{} {unit} {:?}", plugin.origin(), limit.keys.get("by"));
            let name = match self.limits.get(&key) {
                Some(name) => name.clone(),
                None => {
                    let owner = if plugin.owner.is_empty() { "all" } else { plugin.owner };
                    let name = self.model.add_new_limit(&format!("{owner} {unit}"), limit);
                    self.limits.insert(key, name.clone());
                    self.limit_plugins.insert(name.clone(), plugin.name().to_owned());
                    name
                }
            };
            table.push("limits", name);
        }
        self.store(plugin);
        let text = "Kong counts denied requests in some policies, and concurrent requests may all read the old count. \
                    Sluicegate charges all limits of a request in one step, or none. Windows follow the clock of the store";
        self.model.note(Relation::Differs, None, text);
    }

    /// Write the identity of a limit.
    fn identity(&mut self, by: &str, credential: Credential, plugin: &Plugin<'_>, limit: &mut Table) {
        let (source, is_optional) = match (by, credential) {
            ("ip", _) => ("ip".to_owned(), false),
            ("service", _) => ("global".to_owned(), false),
            ("path", _) => {
                self.model.differs(&plugin.origin(), "`limit_by: path`: the limit counts by route");
                ("route".to_owned(), false)
            }
            ("header", _) => (format!("header:{}", plugin.text("header_name").to_ascii_lowercase()), true),
            ("consumer" | "credential", Credential::ApiKey) => {
                if by == "credential" {
                    self.model
                        .differs(&plugin.origin(), "`limit_by: credential`: all keys of a consumer share the limit");
                }
                ("api-key".to_owned(), false)
            }
            ("consumer" | "credential", Credential::Jwt) => ("jwt:iss".to_owned(), true),
            ("consumer" | "credential", Credential::Basic) => ("basic".to_owned(), true),
            ("consumer" | "credential", Credential::None) => ("ip".to_owned(), false),
            (other, _) => {
                let text = format!("`limit_by: {}`: the limit counts by client address", quoted(other));
                self.model.no_equal(&plugin.origin(), text);
                ("ip".to_owned(), false)
            }
        };
        limit.set("by", source);
        if is_optional {
            limit.set("on_missing", "ip");
        }
    }

    /// Write the store of `policy: redis`.
    fn store(&mut self, plugin: &Plugin<'_>) {
        let is_redis = plugin.text("policy") == "redis" || plugin.text("strategy") == "redis";
        if !is_redis || self.model.settings.contains_key("store") {
            return;
        }
        let nested = |key: &str| plugin.config("redis").map_or("", |redis| redis.text_of(key)).to_owned();
        let value = |key: &str| match nested(key) {
            text if text.is_empty() => plugin.text(&format!("redis_{key}")).to_owned(),
            text => text,
        };
        let or = |key: &str, default: &str| match value(key) {
            text if text.is_empty() => default.to_owned(),
            text => text,
        };
        let host = or("host", "127.0.0.1");
        let port = or("port", "6379");
        let database = or("database", "0");
        let store = self.model.setting("store");
        store.set("url", format!("redis://{host}:{port}/{database}"));
        store.set_variable("password", "REDIS_PASSWORD");
        store.keys.insert("secret".to_owned(), "${STORE_SECRET:-change-me-in-production}".into());
        let text = "the password of Redis comes from the variable REDIS_PASSWORD; set the variable STORE_SECRET on all \
                    gateways";
        self.model.differs(&plugin.origin(), text);
    }

    fn key_auth(&mut self, plugin: &Plugin<'_>, table: &mut Table) {
        let mut auth = Table::from_origin(&plugin.origin(), "key-auth");
        let mut names = plugin.texts("key_names");
        if names.is_empty() {
            names.push("apikey".to_owned());
        }
        auth.set("kind", "api-key");
        auth.set_list("header", names.iter().map(|name| name.to_ascii_lowercase()));
        auth.set("consumers", "consumers.toml");
        if !plugin.is("hide_credentials", false) {
            auth.set("forward_credential", true);
        }
        if plugin.is("key_in_query", true) {
            let text = "`key_in_query`, which is the default: keys are read from headers only";
            self.model.differs(&plugin.origin(), text);
        }
        let is_anonymous = !plugin.text("anonymous").is_empty();
        if is_anonymous {
            auth.set("on_missing", "anonymous");
        }
        let name = self.model.add_auth("keys", auth);
        table.push(if is_anonymous { "identify" } else { "require" }, name);
    }

    fn jwt(&mut self, plugin: &Plugin<'_>, table: &mut Table) {
        let mut auth = Table::from_origin(&plugin.origin(), "jwt");
        auth.set("kind", "jwt");
        auth.set("jwks_url", "https://issuer.invalid/.well-known/jwks.json");
        let text = "the plugin `jwt`: Sluicegate verifies RS256, ES256 and EdDSA with a JWK Set, and never HS256. Replace \
                    the placeholder in `jwks_url`, or write `jwks_file`; until then, the routes respond with 503. A token \
                    needs `exp`";
        self.model.no_equal(&plugin.origin(), text);
        let name = self.model.add_auth("tokens", auth);
        table.push("require", name);
    }

    fn basic_auth(&mut self, plugin: &Plugin<'_>, table: &mut Table) {
        let mut auth = Table::from_origin(&plugin.origin(), "basic-auth");
        auth.set("kind", "basic");
        auth.set("users", "htpasswd");
        if !plugin.is("hide_credentials", false) {
            auth.set("forward_credential", true);
        }
        let name = self.model.add_auth("users", auth);
        table.push("require", name);
    }

    fn cors(&mut self, plugin: &Plugin<'_>, table: &mut Table) {
        let list = |items: Vec<String>| -> Vec<toml::Value> { items.into_iter().map(toml::Value::String).collect() };
        let origins = plugin.texts("origins");
        let is_any = origins.is_empty() || origins.iter().any(|origin| origin == "*");
        table.set_entry("cors", "origins", list(if is_any { vec!["*".to_owned()] } else { origins }));
        let methods = plugin.texts("methods");
        let all = ["GET", "PUT", "POST", "DELETE", "PATCH", "OPTIONS"].map(str::to_owned).to_vec();
        table.set_entry("cors", "methods", list(if methods.is_empty() { all } else { methods }));
        let headers = plugin.texts("headers");
        table.set_entry("cors", "headers", list(if headers.is_empty() { vec!["*".to_owned()] } else { headers }));
        let exposed = plugin.texts("exposed_headers");
        if !exposed.is_empty() {
            table.set_entry("cors", "expose", list(exposed));
        }
        if plugin.is("credentials", false) {
            if is_any {
                let text =
                    "`credentials` with all origins: any website could send requests with cookies; list the origins";
                self.model.differs(&plugin.origin(), text);
            } else {
                table.set_entry("cors", "credentials", true);
            }
        }
        if let Ok(age @ 1..) = plugin.text("max_age").parse::<u32>() {
            table.set_entry("cors", "max_age", format!("{age}s"));
        }
    }

    /// Write header changes of a transformer.
    fn transform(&mut self, plugin: &Plugin<'_>, key: &str, table: &mut Table) {
        for action in plugin.node.get("config").map(Node::pairs).unwrap_or_default() {
            let position = plugin.document.origin(action.line);
            if action.key == "replace" && !action.value.text_of("uri").is_empty() {
                let uri = action.value.text_of("uri");
                if uri.contains('$') {
                    self.model.no_equal(&position, format!("`replace.uri: {}`", quoted(uri)));
                } else {
                    table.keys.shift_remove("strip_prefix");
                    table.set("rewrite", uri);
                }
            }
            for part in action.value.pairs().iter().filter(|part| part.key != "uri") {
                let values: Vec<&str> = part.value.items().iter().filter_map(Node::text).collect();
                for value in values {
                    let (name, text) = value.split_once(':').unwrap_or((value, ""));
                    let name = name.trim().to_ascii_lowercase();
                    let is_header = part.key == "headers" && http::HeaderName::from_bytes(name.as_bytes()).is_ok();
                    match (&*action.key, is_header && !text.contains('$')) {
                        ("add" | "replace" | "append", true) => {
                            if action.key != "replace" {
                                let text = format!("`{}` of `{name}`: the header is replaced", action.key);
                                self.model.differs(&position, text);
                            }
                            let text = text.trim().replace('{', "{{").replace('}', "}}");
                            table.set_entry(&format!("{key}.set"), &name, text);
                        }
                        ("remove", true) => table.push(&format!("{key}.remove"), name),
                        _ => {
                            let text = format!("`{}.{}: {}`", quoted(&action.key), quoted(&part.key), quoted(value));
                            self.model.no_equal(&position, text);
                        }
                    }
                }
            }
        }
        remove_set_headers(key, table);
    }

    fn correlation(&mut self, plugin: &Plugin<'_>, table: &mut Table) {
        let header = plugin.text("header_name").to_ascii_lowercase();
        if !matches!(&*header, "" | "x-request-id" | "kong-request-id") {
            table.set_entry("request_headers.set", &header, "{request_id}");
        }
        let header = if header.is_empty() { "kong-request-id".to_owned() } else { header };
        if plugin.is("echo_downstream", false) {
            table.set_entry("response_headers.set", &header, "{request_id}");
        }
        let text =
            "`correlation-id`: the ID is in `X-Request-Id`; the ID of a client is kept only if it is a trusted proxy";
        self.model.differs(&plugin.origin(), text);
    }

    // === Consumers ===

    /// Read the groups of consumers.
    pub(super) fn consumers(&mut self, document: &Document) {
        for consumer in document.root.items_of("consumers") {
            let entry = self.consumers.entry(consumer.text_of("username").to_owned()).or_default();
            entry.groups.extend(consumer.items_of("acls").iter().map(|acl| acl.text_of("group").to_owned()));
            entry.groups.extend(consumer.items_of("groups").iter().map(|group| group.text_of("name").to_owned()));
        }
        for acl in document.root.items_of("acls") {
            let entry = self.consumers.entry(acl.text_of("consumer").to_owned()).or_default();
            entry.groups.insert(acl.text_of("group").to_owned());
        }
    }

    /// Write the consumers with the hashes of their keys, and the users with the hashes of their passwords.
    pub(super) fn write_consumers(&mut self) {
        for document in self.documents {
            for consumer in document.root.items_of("consumers") {
                let name = consumer.text_of("username");
                self.consumer(document, consumer, name);
                for credential in consumer.items_of("keyauth_credentials") {
                    self.key(document, credential, name);
                }
                for credential in consumer.items_of("basicauth_credentials") {
                    self.user(document, credential);
                }
            }
            for credential in document.root.items_of("keyauth_credentials") {
                self.key(document, credential, credential.text_of("consumer"));
            }
            for credential in document.root.items_of("basicauth_credentials") {
                self.user(document, credential);
            }
            for credential in document.root.items_of("jwt_secrets") {
                self.model.no_equal(&document.at(credential), "`jwt_secrets`: add the public key to a JWK Set");
            }
        }
        if !self.model.consumers.is_empty() {
            let text = "the keys of consumers are stored as hashes: write them with `--consumers consumers.toml`";
            self.model.note(Relation::Differs, None, text);
        }
    }

    fn consumer(&mut self, document: &Document, consumer: &Node, name: &str) {
        let known = [
            "username",
            "id",
            "custom_id",
            "tags",
            "keyauth_credentials",
            "basicauth_credentials",
            "acls",
            "groups",
            "plugins",
            "_comment",
        ];
        document.report_others(consumer, &known, "the consumer", &mut self.model);
        let mut table = Table::from_origin(&document.at(consumer), "consumer");
        table.set("keys", Vec::<toml::Value>::new());
        for plugin in of(document, consumer, "consumer") {
            match plugin.name() {
                "rate-limiting" | "rate-limiting-advanced" => self.consumer_quotas(&plugin, &mut table),
                name => {
                    let text = format!("the plugin `{}` of a consumer", quoted(name));
                    self.model.no_equal(&plugin.origin(), text);
                }
            }
        }
        if !name.is_empty() {
            self.model.consumers.insert(valid_name(name), table);
        }
    }

    /// Write the quotas of a consumer that replace those of the limits by consumer.
    fn consumer_quotas(&mut self, plugin: &Plugin<'_>, table: &mut Table) {
        // The plugin of a consumer replaces only a plugin of the same name.
        let quota_of = |limit: &Table| limit.text("quota").and_then(|text| text.parse::<Quota>().ok());
        let replaced: Vec<(String, Quota)> = self
            .model
            .limits
            .iter()
            .filter(|(name, limit)| {
                limit.text("by") == Some("api-key")
                    && self.limit_plugins.get(*name).is_some_and(|name| name == plugin.name())
            })
            .filter_map(|(name, limit)| Some((name.clone(), quota_of(limit)?)))
            .collect();
        let has_window =
            |one: &Quota, other: &Quota| (one.window_us, one.calendar) == (other.window_us, other.calendar);
        let mut quotas = Vec::new();
        for (unit, count) in plugin.windows() {
            let text = format!("{}/{unit}", count.max(1));
            let Ok(quota) = text.parse::<Quota>() else { continue };
            let limits: Vec<&str> =
                replaced.iter().filter(|(_, other)| has_window(other, &quota)).map(|(name, _)| &**name).collect();
            match &limits[..] {
                [] => {
                    let text = format!(
                        "`{text}` of the consumer `{}`: no limit by consumer has this window, so nothing limits it",
                        quoted(plugin.owner)
                    );
                    self.model.no_equal(&plugin.origin(), text);
                }
                [_] => {}
                limits => {
                    let text = format!(
                        "`{text}` of the consumer `{}`: the consumer has this quota at each of the limits {}, in \
                         Kong at all of them together",
                        quoted(plugin.owner),
                        limits.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
                    );
                    self.model.differs(&plugin.origin(), text);
                }
            }
            for name in limits {
                table.set_entry(&format!("limit.{name}"), "quota", text.as_str());
            }
            quotas.push(quota);
        }
        for (name, _) in replaced.iter().filter(|(_, quota)| !quotas.iter().any(|other| has_window(other, quota))) {
            let text = format!(
                "in Kong, the plugin of the consumer `{}` replaces all windows; here, `{name}` also limits the consumer",
                quoted(plugin.owner)
            );
            self.model.differs(&plugin.origin(), text);
        }
        if !matches!(plugin.text("limit_by"), "" | "consumer" | "credential") {
            let text =
                format!("`limit_by: {}` of a consumer: the consumer is counted", quoted(plugin.text("limit_by")));
            self.model.differs(&plugin.origin(), text);
        }
    }

    /// Report the plugins that belong to a combination, or to a group of consumers.
    pub(super) fn report_combinations(&mut self, document: &Document) {
        for plugin in document.root.items_of("plugins") {
            let owners = owners(plugin);
            if owners.len() > 1 || owners == ["consumer_group"] {
                let text = format!("the plugin `{}` of {}", quoted(plugin.text_of("name")), owners.join(" and "));
                self.model.no_equal(&document.at(plugin), text);
            }
        }
    }

    /// Add the hash of a key to a consumer.
    fn key(&mut self, document: &Document, credential: &Node, consumer: &str) {
        let key = credential.text_of("key");
        let Some(routes) = self.permitted_routes(consumer) else {
            let text = format!("the consumer `{}` is permitted on no route: the key is left out", quoted(consumer));
            return self.model.not_needed(&document.at(credential), text);
        };
        if key.is_empty() || key.starts_with(['$', '{']) {
            let text = format!("the key `{}` is a reference: add the key itself with `sluicegate key`", quoted(key));
            return self.model.no_equal(&document.at(credential), text);
        }
        let Some(table) = self.model.consumers.get_mut(&valid_name(consumer)) else {
            return self.model.no_equal(&document.at(credential), "a key of an unknown consumer");
        };
        let hash = HEXLOWER.encode(digest(&SHA256, key.as_bytes()).as_ref());
        let mut entry = toml::Table::new();
        entry.insert("hash".to_owned(), format!("sha256:{hash}").into());
        if !routes.is_empty() {
            let routes: Vec<toml::Value> = routes.into_iter().map(toml::Value::String).collect();
            entry.insert("routes".to_owned(), routes.into());
        }
        table.push("keys", toml::Value::Table(entry));
    }

    /// Return the routes that acl plugins permit to a consumer. An empty list stands for all routes, `None` for no
    /// route.
    fn permitted_routes(&self, consumer: &str) -> Option<Vec<String>> {
        if self.acls.values().all(Option::is_none) {
            return Some(Vec::new());
        }
        let none = BTreeSet::new();
        let groups = self.consumers.get(consumer).map_or(&none, |consumer| &consumer.groups);
        let is_permitted = |acl: &Option<Acl>| match acl {
            None => true,
            Some(acl) if !acl.allow.is_empty() => acl.allow.iter().any(|group| groups.contains(group)),
            Some(acl) => !acl.deny.iter().any(|group| groups.contains(group)),
        };
        let routes: Vec<String> =
            self.acls.iter().filter(|(_, acl)| is_permitted(acl)).map(|(route, _)| route.clone()).collect();
        match routes.len() {
            0 => None,
            all if all == self.acls.len() => Some(Vec::new()),
            _ => Some(routes),
        }
    }

    /// Add the hash of a password to the users.
    fn user(&mut self, document: &Document, credential: &Node) {
        let name = credential.text_of("username");
        let password = credential.text_of("password");
        if password.is_empty() || name.is_empty() || name.contains(':') || password.starts_with('$') {
            let text = format!("the password of `{}`: write it with `htpasswd -B`", quoted(name));
            return self.model.no_equal(&document.at(credential), text);
        }
        match bcrypt::hash(password, 10) {
            Ok(hash) => drop(self.model.users.insert(name.to_owned(), hash)),
            Err(error) => {
                self.model.no_equal(&document.at(credential), format!("the password of `{}`: {error}", quoted(name)))
            }
        }
        let text = "passwords are stored as hashes: write them with `--users htpasswd`";
        self.model.note(Relation::Differs, None, text);
    }
}

/// Remove headers from `remove` that `set` replaces anyway.
fn remove_set_headers(key: &str, table: &mut Table) {
    let set = match table.keys.get(&format!("{key}.set")) {
        Some(toml::Value::Table(set)) => set.clone(),
        _ => return,
    };
    if let Some(toml::Value::Array(list)) = table.keys.get_mut(&format!("{key}.remove")) {
        list.retain(|name| name.as_str().is_none_or(|name| !set.contains_key(name)));
    }
}

/// Write `request-size-limiting`: 128 megabytes by default.
fn size_limit(plugin: &Plugin<'_>, table: &mut Table) {
    let size = plugin.text("allowed_payload_size").parse::<u32>().unwrap_or(128);
    let unit = match plugin.text("size_unit") {
        "kilobytes" => "KiB",
        "bytes" => "B",
        _ => "MiB",
    };
    table.set("max_body", format!("{}{unit}", size.max(1)));
}

/// Write `request-termination`.
fn terminate(plugin: &Plugin<'_>, table: &mut Table) {
    for key in [
        "upstream",
        "upstream_host",
        "strip_prefix",
        "rewrite",
        "websocket",
        "max_body",
        "request_headers.set",
        "request_headers.remove",
    ] {
        table.keys.shift_remove(key);
    }
    let status = plugin.text("status_code").parse::<i64>().ok().filter(|status| (200..=599).contains(status));
    table.set_entry("respond", "status", status.unwrap_or(503));
    let body = plugin.text("body");
    let message = plugin.text("message");
    if !body.is_empty() {
        table.set_entry("respond", "body", body);
        if !plugin.text("content_type").is_empty() {
            table.set_entry("respond", "content_type", plugin.text("content_type"));
        }
    } else if !message.is_empty() {
        let body = serde_json::json!({ "message": message }).to_string();
        table.set_entry("respond", "body", body);
        table.set_entry("respond", "content_type", "application/json; charset=utf-8");
    }
}
