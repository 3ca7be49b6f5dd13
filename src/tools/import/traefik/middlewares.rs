//! Traefik's middlewares.

use crate::config::yaml::Node;
use crate::tools::import::document::Document;
use crate::tools::import::model::{Origin, Relation, Table, quoted};
use crate::tools::import::paths::{literal, whole_expression, with_groups};
use crate::tools::import::traefik::{Found, Importer};
use crate::tools::import::units::{duration, milliseconds};

/// Maximum depth of chains.
const MAX_CHAINS: usize = 8;

/// The table of one kind in a middleware.
struct Middleware<'a> {
    document: &'a Document,
    /// Name of the middleware.
    name: String,
    config: &'a Node,
    origin: Origin,
}

impl<'a> Importer<'a> {
    /// Write the middlewares of a router.
    pub(super) fn middlewares(&mut self, router: Found<'a>, route: &mut Table) {
        for name in router.node.texts_of("middlewares") {
            let bare = name.split('@').next().unwrap_or_default().to_owned();
            if self.find("middlewares", &bare).is_none() {
                let text =
                    format!("the middleware `{}` is not in the files: the route responds with 501", quoted(&name));
                self.model.no_equal(&router.document.at(router.node), text);
                close(route);
                continue;
            }
            self.middleware(&bare, route, 0);
        }
    }

    /// Write a middleware to a route.
    pub(super) fn middleware(&mut self, name: &str, route: &mut Table, depth: usize) {
        let Some(found) = self.find("middlewares", name).filter(|_| depth < MAX_CHAINS) else { return };
        self.used.insert(name.to_owned());
        for pair in found.node.pairs() {
            let origin = found.document.origin(pair.line);
            let middleware = Middleware {
                document: found.document,
                name: name.to_owned(),
                config: &pair.value,
                origin: origin.clone(),
            };
            match &*pair.key {
                "chain" => {
                    for inner in pair.value.texts_of("middlewares") {
                        self.middleware(inner.split('@').next().unwrap_or_default(), route, depth + 1);
                    }
                }
                "rateLimit" => self.rate_limit(&middleware, route),
                "inFlightReq" => self.in_flight(&middleware, route),
                "ipAllowList" | "ipWhiteList" => self.allow(&middleware, route),
                "basicAuth" => self.basic_auth(&middleware, route),
                "forwardAuth" => self.forward_auth(&middleware, route),
                "headers" => self.headers(&middleware, route),
                "stripPrefix" => self.strip_prefix(&middleware, route),
                "addPrefix" | "replacePath" | "replacePathRegex" => self.replace_path(&pair.key, &middleware, route),
                "redirectScheme" | "redirectRegex" => self.redirect(&pair.key, &middleware, route),
                "compress" => route.set("compress", true),
                "retry" => {
                    let attempts = pair.value.integer_of("attempts").unwrap_or(1);
                    route.set("retries", (attempts - 1).clamp(0, 10));
                    let text = "`retry`: Sluicegate sends a request to another server, only if it has no body and its \
                                method is GET, HEAD or OPTIONS";
                    self.model.differs(&origin, text);
                }
                "buffering" => {
                    if let Some(size) = pair.value.integer_of("maxRequestBodyBytes").filter(|size| *size > 0) {
                        route.set("max_body", format!("{size}B"));
                    }
                    found.document.report_others(&pair.value, &["maxRequestBodyBytes"], "`buffering`", &mut self.model);
                }
                "contentType" => {
                    self.model.not_needed(&origin, "`contentType`: the gateway does not set content types")
                }
                "circuitBreaker" => {
                    let text = "`circuitBreaker`: write `outlier_detection = {}` of the upstream";
                    self.model.no_equal(&origin, text);
                }
                "errors" => self.model.no_equal(&origin, "`errors`: `error_pages` replaces errors of the gateway only"),
                // A middleware that restricts access must not be dropped.
                "digestAuth" | "passTLSClientCert" => {
                    close(route);
                    let text = format!("`{}`: the route responds with 501", pair.key);
                    self.model.no_equal(&origin, text);
                }
                kind => self.model.no_equal(&origin, format!("the middleware `{}`", quoted(kind))),
            }
        }
    }

    /// Return what identifies the counters of a middleware: each router has its own.
    fn limit_key(&self, middleware: &str) -> String {
        format!("{} {middleware}", self.router)
    }

    /// Write the identity of `sourceCriterion`.
    fn source(&mut self, middleware: &Middleware<'_>, default: &str, limit: &mut Table) {
        let criterion = middleware.config.get("sourceCriterion");
        let header = criterion.map_or("", |criterion| criterion.text_of("requestHeaderName"));
        let is_host = criterion.is_some_and(|criterion| criterion.is_true("requestHost"));
        if !header.is_empty() {
            limit.set("by", format!("header:{}", header.to_ascii_lowercase()));
            limit.set("on_missing", "skip");
            let text = "`requestHeaderName`: Traefik counts requests without the header together; here, the limit does not \
                        apply to them";
            self.model.differs(&middleware.origin, text);
        } else if is_host {
            limit.set("by", "host");
        } else if let Some(strategy) = criterion.and_then(|criterion| criterion.get("ipStrategy")) {
            limit.set("by", "ip");
            let text =
                "`ipStrategy`: set `client_ip.trusted_proxies` to the proxies that `depth` and `excludedIPs` skip";
            self.model.differs(&middleware.document.at(strategy), text);
        } else {
            limit.set("by", default);
        }
    }

    fn rate_limit(&mut self, middleware: &Middleware<'_>, route: &mut Table) {
        let config = middleware.config;
        let known = ["average", "period", "burst", "sourceCriterion"];
        middleware.document.report_others(config, &known, "`rateLimit`", &mut self.model);
        let Some(average) = config.integer_of("average").filter(|average| *average > 0) else {
            return self.model.not_needed(&middleware.origin, "`rateLimit` without `average` limits nothing");
        };
        let name = self.limits.get(&self.limit_key(&middleware.name)).cloned().unwrap_or_else(|| {
            let mut limit = Table::from_origin(&middleware.origin, &format!("middleware {}", middleware.name));
            self.source(middleware, "ip", &mut limit);
            let period = duration_of(config.text_of("period")).unwrap_or("1s".to_owned());
            limit.set("quota", format!("{average}/{period}"));
            limit.set("burst", config.integer_of("burst").unwrap_or(1).max(1));
            let key = self.limit_key(&middleware.name);
            let name = self.model.add_new_limit(&key, limit);
            self.limits.insert(key, name.clone());
            name
        });
        route.push("limits", name);
        let text = "Traefik counts in each instance, unless `redis` is set: with N instances, multiply the quotas by N. It \
                    delays a request if the next token is due soon, and forgets a client after a few seconds without \
                    requests";
        self.model.note(Relation::Differs, None, text);
    }

    fn in_flight(&mut self, middleware: &Middleware<'_>, route: &mut Table) {
        let known = ["amount", "sourceCriterion"];
        middleware.document.report_others(middleware.config, &known, "`inFlightReq`", &mut self.model);
        let name = self.limits.get(&self.limit_key(&middleware.name)).cloned().unwrap_or_else(|| {
            let mut limit = Table::from_origin(&middleware.origin, &format!("middleware {}", middleware.name));
            self.source(middleware, "host", &mut limit);
            limit.set("algorithm", "concurrency");
            limit.set("quota", middleware.config.integer_of("amount").unwrap_or(1).max(1).to_string());
            let key = self.limit_key(&middleware.name);
            let name = self.model.add_new_limit(&key, limit);
            self.limits.insert(key, name.clone());
            name
        });
        route.push("limits", name);
    }

    fn allow(&mut self, middleware: &Middleware<'_>, route: &mut Table) {
        let known = ["sourceRange", "ipStrategy"];
        middleware.document.report_others(middleware.config, &known, "the list of addresses", &mut self.model);
        route.set_list("allow", middleware.config.texts_of("sourceRange"));
        if let Some(strategy) = middleware.config.get("ipStrategy") {
            let text =
                "`ipStrategy`: set `client_ip.trusted_proxies` to the proxies that `depth` and `excludedIPs` skip";
            self.model.differs(&middleware.document.at(strategy), text);
        }
    }

    fn basic_auth(&mut self, middleware: &Middleware<'_>, route: &mut Table) {
        let config = middleware.config;
        let known = ["users", "usersFile", "realm", "removeHeader", "headerField"];
        middleware.document.report_others(config, &known, "`basicAuth`", &mut self.model);
        let mut auth = Table::from_origin(&middleware.origin, &format!("middleware {}", middleware.name));
        auth.set("kind", "basic");
        let file = config.text_of("usersFile");
        auth.set("users", if file.is_empty() { "htpasswd" } else { file });
        if !config.text_of("realm").is_empty() {
            auth.set("realm", config.text_of("realm"));
        }
        if !config.is_true("removeHeader") {
            auth.set("forward_credential", true);
        }
        for user in config.texts_of("users") {
            // In labels of Docker, `$$` stands for `$`.
            match user.replace("$$", "$").split_once(':') {
                Some((name, hash)) if hash.starts_with("$2") || hash.starts_with("$apr1$") => {
                    self.model.users.insert(name.to_owned(), hash.to_owned());
                }
                _ => {
                    let name = user.split(':').next().unwrap_or_default();
                    let text = format!(
                        "the hash of the user `{}` is neither bcrypt nor apr1: use `htpasswd -B`",
                        quoted(name)
                    );
                    self.model.no_equal(&middleware.origin, text);
                }
            }
        }
        if file.is_empty() {
            self.model.note(Relation::Differs, None, "users are stored in a file: write it with `--users htpasswd`");
        }
        let name = self.model.add_auth(&middleware.name, auth);
        route.push("require", name);
    }

    fn forward_auth(&mut self, middleware: &Middleware<'_>, route: &mut Table) {
        let config = middleware.config;
        let known = ["address", "authResponseHeaders", "authRequestHeaders", "trustForwardHeader", "tls"];
        middleware.document.report_others(config, &known, "`forwardAuth`", &mut self.model);
        let mut auth = Table::from_origin(&middleware.origin, &format!("middleware {}", middleware.name));
        auth.set("kind", "forward");
        auth.set("url", config.text_of("address"));
        let lower =
            |key: &str| config.texts_of(key).into_iter().map(|name| name.to_ascii_lowercase()).collect::<Vec<_>>();
        auth.set_list("request_headers", lower("authRequestHeaders"));
        auth.set_list("response_headers", lower("authResponseHeaders"));
        if config.items_of("authRequestHeaders").is_empty() {
            let text = "Traefik sends all request headers to the authentication server, Sluicegate those in \
                        `request_headers`: `authorization` and `cookie`";
            self.model.differs(&middleware.origin, text);
        }
        if config.is_true("trustForwardHeader") {
            let text = "`trustForwardHeader`: X-Forwarded-… is trusted only from `client_ip.trusted_proxies`";
            self.model.differs(&middleware.origin, text);
        }
        if let Some(tls) = config.get("tls") {
            self.model.no_equal(&middleware.document.at(tls), "`tls` of `forwardAuth`: write `ca`");
        }
        let name = self.model.add_auth(&middleware.name, auth);
        route.push("require", name);
    }

    fn headers(&mut self, middleware: &Middleware<'_>, route: &mut Table) {
        let config = middleware.config;
        for (key, target) in
            [("customRequestHeaders", "request_headers"), ("customResponseHeaders", "response_headers")]
        {
            for pair in config.get(key).map(Node::pairs).unwrap_or_default() {
                let name = pair.key.to_ascii_lowercase();
                let value = pair.value.text().unwrap_or_default().replace('{', "{{").replace('}', "}}");
                if !self.is_free(&name, target) {
                    let text = format!("`{key}.{}`: the gateway sets this header", quoted(&pair.key));
                    self.model.no_equal(&middleware.document.origin(pair.line), text);
                } else if value.is_empty() {
                    route.push(&format!("{target}.remove"), name);
                } else {
                    route.set_entry(&format!("{target}.set"), &name, value);
                }
            }
        }
        let mut known =
            vec!["customRequestHeaders", "customResponseHeaders", "stsSeconds", "stsIncludeSubdomains", "stsPreload"];
        let mut set = |name: &str, value: &str| route.set_entry("response_headers.set", name, value);
        for (key, name, value) in [
            ("contentTypeNosniff", "x-content-type-options", "nosniff"),
            ("frameDeny", "x-frame-options", "DENY"),
            ("browserXssFilter", "x-xss-protection", "1; mode=block"),
        ] {
            known.push(key);
            if config.is_true(key) {
                set(name, value);
            }
        }
        for (key, name) in [
            ("customFrameOptionsValue", "x-frame-options"),
            ("referrerPolicy", "referrer-policy"),
            ("permissionsPolicy", "permissions-policy"),
            ("contentSecurityPolicy", "content-security-policy"),
        ] {
            known.push(key);
            let value = config.text_of(key);
            if !value.is_empty() {
                set(name, &value.replace('{', "{{").replace('}', "}}"));
            }
        }
        if let Some(seconds) = config.integer_of("stsSeconds").filter(|seconds| *seconds > 0) {
            let subdomains = if config.is_true("stsIncludeSubdomains") { "; includeSubDomains" } else { "" };
            let preload = if config.is_true("stsPreload") { "; preload" } else { "" };
            set("strict-transport-security", &format!("max-age={seconds}{subdomains}{preload}"));
        }
        self.cors(middleware, route, &mut known);
        middleware.document.report_others(config, &known, "`headers`", &mut self.model);
    }

    fn cors(&mut self, middleware: &Middleware<'_>, route: &mut Table, known: &mut Vec<&'static str>) {
        let config = middleware.config;
        known.extend([
            "accessControlAllowOriginList",
            "accessControlAllowMethods",
            "accessControlAllowHeaders",
            "accessControlExposeHeaders",
            "accessControlAllowCredentials",
            "accessControlMaxAge",
            "addVaryHeader",
        ]);
        let origins = config.texts_of("accessControlAllowOriginList");
        if origins.is_empty() {
            return;
        }
        let list = |items: Vec<String>| -> Vec<toml::Value> { items.into_iter().map(toml::Value::String).collect() };
        let is_any = origins.iter().any(|origin| origin == "*");
        route.set_entry("cors", "origins", list(if is_any { vec!["*".to_owned()] } else { origins }));
        for (key, name) in [
            ("methods", "accessControlAllowMethods"),
            ("headers", "accessControlAllowHeaders"),
            ("expose", "accessControlExposeHeaders"),
        ] {
            let items = config.texts_of(name);
            if !items.is_empty() {
                let is_all = items.iter().any(|item| item == "*");
                route.set_entry("cors", key, list(if is_all { vec!["*".to_owned()] } else { items }));
            }
        }
        if config.is_true("accessControlAllowCredentials") && !is_any {
            route.set_entry("cors", "credentials", true);
        }
        if let Some(age) = config.integer_of("accessControlMaxAge").filter(|age| *age > 0) {
            route.set_entry("cors", "max_age", format!("{age}s"));
        }
    }

    /// Return whether header rules may change a header.
    fn is_free(&self, name: &str, target: &str) -> bool {
        use crate::http::headers::{Direction, reserved_reason};
        let direction = if target == "request_headers" { Direction::Request } else { Direction::Response };
        http::HeaderName::from_bytes(name.as_bytes()).is_ok_and(|name| reserved_reason(&name, direction).is_none())
    }

    fn strip_prefix(&mut self, middleware: &Middleware<'_>, route: &mut Table) {
        let prefixes = middleware.config.texts_of("prefixes");
        let path = route.text("path").unwrap_or_default().to_owned();
        let matching = prefixes
            .iter()
            .map(|prefix| literal(prefix.trim_end_matches('/')))
            .find(|prefix| path == *prefix || path.starts_with(&format!("{prefix}/")));
        match matching {
            Some(prefix) if !prefix.is_empty() => route.set("strip_prefix", prefix),
            _ => {
                let text = "`stripPrefix`: the path of the route does not begin with the prefix; write a route with the \
                            prefix and `strip_prefix`";
                self.model.no_equal(&middleware.origin, text);
            }
        }
    }

    fn replace_path(&mut self, kind: &str, middleware: &Middleware<'_>, route: &mut Table) {
        let path = route.text("path").unwrap_or_default().to_owned();
        let prefix = path.strip_suffix("{*rest}").map(str::to_owned);
        match (kind, prefix) {
            ("addPrefix", Some(prefix)) if !route.keys.contains_key("strip_prefix") => {
                let added = literal(middleware.config.text_of("prefix").trim_end_matches('/'));
                route.set("rewrite", format!("{added}{prefix}{{rest}}"));
            }
            ("addPrefix", Some(_)) => {
                let added = literal(middleware.config.text_of("prefix").trim_end_matches('/'));
                route.keys.shift_remove("strip_prefix");
                route.set("rewrite", format!("{added}/{{rest}}"));
            }
            ("replacePath", _) => route.set("rewrite", literal(middleware.config.text_of("path"))),
            ("replacePathRegex", Some(prefix)) => {
                let expression = whole_expression(middleware.config.text_of("regex"));
                let target = with_groups(middleware.config.text_of("replacement"), true);
                let is_inside = expression.starts_with(&regex::escape(prefix.trim_end_matches('/')));
                if is_inside
                    && !target.contains('$')
                    && crate::routing::pattern::PathPattern::from_regex(&expression).is_ok()
                {
                    route.keys.shift_remove("path");
                    route.keys.shift_remove("trailing_slash");
                    route.set("path_regex", expression);
                    route.set("rewrite", target);
                    let text = "`replacePathRegex`: the route matches only paths that the expression matches";
                    self.model.differs(&middleware.origin, text);
                } else {
                    self.model.no_equal(&middleware.origin, "`replacePathRegex`: write `path_regex` and `rewrite`");
                }
            }
            _ => self.model.no_equal(&middleware.origin, format!("`{kind}`: write `rewrite`")),
        }
    }

    fn redirect(&mut self, kind: &str, middleware: &Middleware<'_>, route: &mut Table) {
        let config = middleware.config;
        if route.keys.contains_key("respond") {
            return;
        }
        // Traefik has 301 and 302 for GET, 308 and 307 for other methods.
        let status = if config.is_true("permanent") { 308 } else { 307 };
        if kind == "redirectScheme" {
            let scheme = if config.text_of("scheme") == "http" { "http" } else { "https" };
            route.set_entry("redirect", "scheme", scheme);
            if let Ok(port @ 1..) = config.text_of("port").parse::<u16>() {
                route.set_entry("redirect", "port", i64::from(port));
            }
            route.set_entry("redirect", "status", status);
            let text = "`redirectScheme` does not redirect requests that have the scheme already: give the route the \
                        listener of the other scheme in `listeners`. The status is 308 or 307 for all methods, where \
                        Traefik sends 301 or 302 for GET";
            self.model.differs(&middleware.origin, text);
            return;
        }
        let text = format!(
            "`redirectRegex` from `{}` to `{}`: write a route with `redirect`",
            quoted(config.text_of("regex")),
            quoted(config.text_of("replacement"))
        );
        self.model.no_equal(&middleware.origin, text);
    }
}

/// Let a route respond with 501, because a middleware that may restrict access has no equal.
fn close(route: &mut Table) {
    route.keys.shift_remove("redirect");
    route.set_entry("respond", "status", 501);
}

/// Return a duration of Traefik in the notation of the configuration: `1m30s`, or a number of seconds.
pub(super) fn duration_of(text: &str) -> Option<String> {
    milliseconds(text).filter(|time| *time > 0).map(duration)
}
