//! nginx's locations: one route for each, in the order in which nginx would select them.

mod actions;
mod conditions;
mod headers;

use std::collections::{BTreeMap, BTreeSet};

use crate::routing::pattern::PathPattern;
use crate::tools::import::model::{Relation, Table, quoted};
use crate::tools::import::nginx::scope::{Scope, Setting, access_rules};
use crate::tools::import::nginx::syntax::Directive;
use crate::tools::import::nginx::upstreams::{Target, setting};
use crate::tools::import::nginx::{Importer, first_origin};
use crate::tools::import::paths::{literal, whole_expression, with_groups};
use crate::tools::import::units::size;

use self::actions::{Action, BreakRewrite};
use self::conditions::Conditional;

/// Maximum depth of nested locations.
const MAX_DEPTH: usize = 8;

/// Where the routes of a server apply.
#[derive(Debug)]
pub(super) struct Site {
    /// First name of the server.
    pub(super) name: String,
    /// `hosts` of the routes. Empty: all hosts.
    pub(super) hosts: Vec<String>,
    /// `listeners` of the routes. Empty: all listeners.
    pub(super) listeners: Vec<String>,
    /// Value of `$scheme`.
    pub(super) redirect_scheme: &'static str,
}

/// How a location matches paths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// `= /path`
    Exact,
    /// `/path`
    Prefix,
    /// `^~ /path`, which takes precedence over regular expressions.
    Stop,
    /// `~ expression`
    Regex,
    /// `~* expression`
    RegexNoCase,
}

/// A location with its settings.
struct Place<'a> {
    kind: Kind,
    path: String,
    directive: &'a Directive,
    scope: Scope,
}

/// A path of a route.
#[derive(Debug, Clone, PartialEq)]
struct Path {
    /// `path` or `path_regex`.
    key: &'static str,
    value: String,
    trailing_slash: Option<&'static str>,
    /// The literal prefix in front of `{rest}`. `None`: the path has no `{rest}`.
    prefix: Option<String>,
}

impl Importer<'_> {
    /// Add the routes of a server.
    pub(super) fn locations(&mut self, site: &mut Site, level: &[Directive], scope: &Scope) {
        let named: BTreeMap<&str, &Directive> = level
            .iter()
            .filter(|directive| directive.name == "location" && directive.arg(0).starts_with('@'))
            .map(|directive| (directive.arg(0), directive))
            .collect();
        let has_hosts = !site.hosts.is_empty();
        let whole = self.server_actions(site, level, scope);
        if has_hosts && site.hosts.is_empty() {
            // Each host of the server is redirected.
            return;
        }
        let conditionals = self.conditionals(&[], level, scope);
        let mut places = Vec::new();
        self.collect(level, scope, None, 0, &mut places);
        let server = Directive {
            origin: first_origin(level),
            name: "server".to_owned(),
            args: Vec::new(),
            block: Some(level.to_vec()),
        };
        if whole.is_some() || !places.iter().any(|place| place.kind != Kind::Exact && place.path == "/") {
            places.push(Place { kind: Kind::Prefix, path: "/".to_owned(), directive: &server, scope: scope.clone() });
        }
        if let Some(directive) = &whole {
            if places.len() > 1 {
                let text = format!("`{}` comes before all locations of the server", directive.text());
                self.model.not_needed(&directive.origin, text);
            }
            places.retain(|place| std::ptr::eq(place.directive, &raw const server));
        }
        order(&mut places);
        let mut taken = BTreeSet::new();
        for place in &places {
            for path in self.paths(place, &places) {
                if taken.insert(format!("{} {}", path.key, path.value)) {
                    self.route(site, place, &path, &named, &conditionals);
                } else {
                    let text = format!("`{}`: a location with the same path exists", quoted(&place.directive.text()));
                    self.model.no_equal(&place.directive.origin, text);
                }
            }
        }
    }

    /// Collect the locations of a level and of the levels inside it.
    fn collect<'d>(
        &mut self,
        level: &'d [Directive],
        scope: &Scope,
        outer: Option<&str>,
        depth: usize,
        places: &mut Vec<Place<'d>>,
    ) {
        for directive in level.iter().filter(|directive| directive.name == "location") {
            let (kind, path) = match (directive.arg(0), directive.arg(1)) {
                ("=", path) => (Kind::Exact, path.to_owned()),
                ("~", path) => (Kind::Regex, path.to_owned()),
                ("~*", path) => (Kind::RegexNoCase, path.to_owned()),
                ("^~", path) => (Kind::Stop, path.to_owned()),
                (path, "") => match path.strip_prefix('=') {
                    Some(exact) => (Kind::Exact, exact.to_owned()),
                    None if path.starts_with("~*") => (Kind::RegexNoCase, path[2..].to_owned()),
                    None if path.starts_with('~') => (Kind::Regex, path[1..].to_owned()),
                    None => (Kind::Prefix, path.to_owned()),
                },
                _ => {
                    self.model.no_equal(&directive.origin, quoted(&directive.text()));
                    continue;
                }
            };
            let is_regex = matches!(kind, Kind::Regex | Kind::RegexNoCase);
            if path.starts_with('@') || !is_regex && !path.starts_with('/') {
                if !path.starts_with('@') {
                    self.model.no_equal(&directive.origin, quoted(&directive.text()));
                }
                continue;
            }
            if depth == MAX_DEPTH {
                let text = format!("`{}`: locations are nested too deeply", quoted(&directive.text()));
                self.model.no_equal(&directive.origin, text);
                continue;
            }
            let path = match outer {
                Some(outer) if is_regex && !path.starts_with('^') => format!("^{}.*(?:{path})", regex::escape(outer)),
                _ => path,
            };
            let inner = scope.enter(directive.children(), &mut self.model);
            self.collect(directive.children(), &inner, (!is_regex).then_some(&*path), depth + 1, places);
            places.push(Place { kind, path, directive, scope: inner });
        }
    }

    /// Return the paths of the routes of a location.
    fn paths(&mut self, place: &Place<'_>, places: &[Place<'_>]) -> Vec<Path> {
        let exact = |value: &str| Path { key: "path", value: literal(value), trailing_slash: None, prefix: None };
        let path = &place.path;
        match place.kind {
            Kind::Exact => vec![exact(path)],
            Kind::Regex | Kind::RegexNoCase => self.regex_path(place).into_iter().collect(),
            Kind::Stop if places.iter().any(|other| matches!(other.kind, Kind::Regex | Kind::RegexNoCase)) => {
                let inner = |other: &Place<'_>| other.kind == Kind::Prefix && other.path.starts_with(&**path);
                if places.iter().any(inner) {
                    let text = format!(
                        "`{}` also takes precedence over longer locations inside it, if they are not `=` or `^~`",
                        place.directive.text()
                    );
                    self.model.differs(&place.directive.origin, text);
                }
                let value = format!("{}(?<rest>.*)", regex::escape(&literal(path)));
                vec![Path { key: "path_regex", value, trailing_slash: None, prefix: Some(literal(path)) }]
            }
            Kind::Prefix | Kind::Stop => self.prefix_paths(place, places),
        }
    }

    fn prefix_paths(&mut self, place: &Place<'_>, places: &[Place<'_>]) -> Vec<Path> {
        let path = literal(&place.path);
        let below = |prefix: &str| Path {
            key: "path",
            value: format!("{prefix}{{*rest}}"),
            trailing_slash: None,
            prefix: Some(prefix.to_owned()),
        };
        let is_prefix = |other: &Place<'_>| matches!(other.kind, Kind::Prefix | Kind::Stop);
        if let Some(name) = path.strip_suffix('/') {
            // nginx redirects the path without the slash, unless another location has it.
            let is_other =
                |other: &Place<'_>| literal(&other.path) == name && (is_prefix(other) || other.kind == Kind::Exact);
            let redirects = place.directive.children().iter().any(|child| child.name.ends_with("_pass"));
            let mut only = below(&path);
            if !name.is_empty() && redirects && !places.iter().any(is_other) {
                only.trailing_slash = Some("redirect");
                self.model.note(
                    Relation::Differs,
                    None,
                    "where nginx redirects `/path` to `/path/` with 301, `trailing_slash = \"redirect\"` responds with \
                     308, so that clients repeat the same method",
                );
            }
            return vec![only];
        }
        let has_exact = places.iter().any(|other| other.kind == Kind::Exact && literal(&other.path) == path);
        let has_below = places.iter().any(|other| is_prefix(other) && literal(&other.path) == format!("{path}/"));
        let text = format!(
            "`{}` also matches paths that continue without a slash, such as `{path}x`; the route matches whole segments",
            place.directive.text()
        );
        self.model.differs(&place.directive.origin, text);
        let exact = Path { key: "path", value: path.clone(), trailing_slash: None, prefix: None };
        let rewrites = place.directive.children().iter().any(|child| {
            child.name == "rewrite"
                || child.name == "proxy_pass"
                    && child.arg(0).split_once("://").is_some_and(|(_, rest)| rest.contains('/'))
        });
        let mut paths = Vec::new();
        match (has_exact, has_below, rewrites) {
            (true, true, _) => {}
            (true, false, _) => paths.push(below(&format!("{path}/"))),
            (false, true, _) => paths.push(exact),
            (false, false, true) => paths.extend([exact, below(&format!("{path}/"))]),
            (false, false, false) => {
                paths.push(Path { trailing_slash: Some("same"), ..below(&format!("{path}/")) });
            }
        }
        paths
    }

    /// Return the path of a regular expression, which must match the whole path in Sluicegate.
    fn regex_path(&mut self, place: &Place<'_>) -> Option<Path> {
        let flag = if place.kind == Kind::RegexNoCase { "(?i)" } else { "" };
        let value = format!("{flag}{}", whole_expression(&place.path));
        if let Err(error) = PathPattern::from_regex(&value) {
            let text = format!(
                "`{}`: {error}; the location is left out, so its requests reach other routes",
                quoted(&place.directive.text())
            );
            self.model.no_equal(&place.directive.origin, text);
            return None;
        }
        Some(Path { key: "path_regex", value, trailing_slash: None, prefix: None })
    }

    /// Add the route of a location with one of its paths.
    fn route(
        &mut self,
        site: &Site,
        place: &Place<'_>,
        path: &Path,
        named: &BTreeMap<&str, &Directive>,
        conditionals: &[Conditional],
    ) {
        let directive = place.directive;
        let base = match &*place.path {
            "/" => site.name.clone(),
            path => format!("{} {path}", site.name),
        };
        match directive.name.as_str() {
            "server" => self.conditional_routes(site, path, &base, conditionals),
            _ => {
                let conditionals = self.conditionals(conditionals, directive.children(), &place.scope);
                self.conditional_routes(site, path, &base, &conditionals);
            }
        }
        let text = if directive.name == "server" { "server".to_owned() } else { directive.text() };
        let mut route = Table::from_origin(&directive.origin, &text);
        site.write(&mut route);
        path.write(&mut route);
        let action = self.action(site, directive, &place.scope, named);
        if let Action::Proxy { scope, pass } = action {
            let rewrite = match directive.name.as_str() {
                "server" => None,
                _ => self.location_rewrite(directive, place.kind, &place.path),
            };
            self.proxy(&mut route, &scope, path, &pass, rewrite.as_ref());
        } else {
            self.report_rewrites(directive);
            self.reply(&mut route, path, action, &place.scope, &directive.origin);
        }
        self.model.add_route(&base, route);
    }

    /// Write a route to an upstream.
    fn proxy(&mut self, route: &mut Table, scope: &Scope, path: &Path, pass: &Setting, rewrite: Option<&BreakRewrite>) {
        let Some(target) = self.upstreams.target(pass, scope, &mut self.model) else {
            return not_implemented(route);
        };
        route.set("upstream", target.upstream.as_str());
        match rewrite {
            // After `rewrite`, nginx ignores the path of `proxy_pass`.
            Some(rewrite) => rewrite.write(route, path),
            None => self.rewrite_target(route, path, &target, pass),
        }
        self.request_headers(route, scope, &target);
        let max_body = scope.single("client_max_body_size").map_or("1m", |setting| setting.arg(0));
        match size(max_body) {
            Some(size) if !size.starts_with("0") => route.set("max_body", size),
            _ => {}
        }
        if scope.single("gzip").is_some_and(|setting| setting.arg(0) == "on") {
            compress(route, scope);
        }
        self.common(route, scope);
    }

    /// Write what all routes have that nginx handles after the rewrite phase: access rules, authentication and limits.
    fn common(&mut self, route: &mut Table, scope: &Scope) {
        let limits = self.zones.limits(scope, &self.variables, &mut self.model);
        access_rules(scope.several("allow"), route, &mut self.model);
        self.authentication(route, scope);
        if !limits.is_empty() && (route.keys.contains_key("require") || !scope.several("allow").is_empty()) {
            self.model.note(
                Relation::Differs,
                None,
                "nginx checks limits before access rules and passwords. Sluicegate charges no request that an access \
                 rule denies, and charges requests with a wrong password only to limits by client address",
            );
        }
        route.set_list("limits", limits);
        self.response_headers(route, scope);
    }

    fn authentication(&mut self, route: &mut Table, scope: &Scope) {
        let Some(realm) = scope.single("auth_basic").filter(|setting| setting.arg(0) != "off") else { return };
        let Some(file) = scope.single("auth_basic_user_file") else { return };
        let mut auth = Table::from_origin(&file.origin, &file.text());
        auth.set("kind", "basic");
        auth.set("users", file.arg(0));
        auth.set("realm", realm.arg(0));
        let name = self.model.add_auth(realm.arg(0), auth);
        route.set_list("require", [name]);
        if let Some(satisfy) = scope.single("satisfy").filter(|setting| setting.arg(0) == "any") {
            self.model.no_equal(&satisfy.origin, "`satisfy any`: the route requires an allowed address and a password");
        }
        let text = "the file may contain bcrypt and apr1 hashes; the password does not reach the upstream unless \
                    `forward_credential = true`";
        self.model.differs(&file.origin, text);
    }

    /// Write the rewrite of `proxy_pass` with a path, which replaces the part of the path that the location matched.
    fn rewrite_target(&mut self, route: &mut Table, path: &Path, target: &Target, pass: &Setting) {
        let Some(uri) = target.uri.as_deref() else {
            return self.model.note(
                Relation::Differs,
                None,
                "nginx forwards the path as the client wrote it if `proxy_pass` has no path. Sluicegate forwards the \
                 canonical path, and rejects paths that servers read differently, such as those with `%2F`",
            );
        };
        let mut rewrite = |value: String| {
            if value.contains('$') {
                self.model.no_equal(&pass.origin, format!("`{}`: the path is not rewritten", pass.text()));
            } else {
                route.set("rewrite", value);
            }
        };
        let Some(prefix) = &path.prefix else {
            return rewrite(with_groups(uri, path.key == "path_regex"));
        };
        if uri == prefix {
            return;
        }
        if let Some(bare) = prefix.strip_suffix('/').filter(|_| uri == "/" && path.key == "path") {
            return route.set("strip_prefix", bare);
        }
        rewrite(format!("{}/{{rest}}", uri.trim_end_matches('/')));
        if uri.ends_with('/') != prefix.ends_with('/') {
            let text = format!(
                "`{}`: nginx appends the rest of the path without changing the slashes; Sluicegate puts one slash \
                 between them",
                pass.text()
            );
            self.model.differs(&pass.origin, text);
        }
    }
}

impl Path {
    /// Write the path of a route.
    fn write(&self, route: &mut Table) {
        route.set(self.key, self.value.as_str());
        if let Some(trailing_slash) = self.trailing_slash {
            route.set("trailing_slash", trailing_slash);
        }
    }
}

impl Site {
    /// Write the hosts and listeners of a route.
    fn write(&self, route: &mut Table) {
        route.set_list("hosts", self.hosts.iter().cloned());
        route.set_list("listeners", self.listeners.iter().cloned());
    }
}

/// Let a route respond with 501, because nginx's handler has no equal. Without this route, requests would reach a less
/// specific route with other limits.
fn not_implemented(route: &mut Table) {
    route.set_entry("respond", "status", 501);
}

/// Sort locations by nginx's precedence as far as the order of routes matters: `^~` before regular expressions, and
/// longer `^~` first.
fn order(places: &mut [Place<'_>]) {
    places.sort_by_key(|place| match place.kind {
        Kind::Exact => (0, 0),
        Kind::Stop => (1, usize::MAX - place.path.len()),
        Kind::Regex | Kind::RegexNoCase => (2, 0),
        Kind::Prefix => (3, 0),
    });
}

/// Write `gzip on`: by default, nginx compresses only HTML, of at least 20 bytes.
fn compress(route: &mut Table, scope: &Scope) {
    let mut types = vec!["text/html".to_owned()];
    for setting in scope.several("gzip_types") {
        let listed = setting.args.iter().map(|name| if name == "*" { "*/*".to_owned() } else { name.clone() });
        types.extend(listed.filter(|name| name != "text/html"));
    }
    let min_size = scope.single("gzip_min_length").map_or("20", |setting| setting.arg(0));
    route.set_entry("compress", "types", types.into_iter().map(toml::Value::String).collect::<Vec<_>>());
    if let Some(size) = size(min_size) {
        route.set_entry("compress", "min_size", size);
    }
}

/// Return the setting of the last directive with one of these names.
fn last<'d>(level: &'d [Directive], names: &[&str]) -> Option<&'d Directive> {
    level.iter().rev().find(|directive| names.contains(&&*directive.name))
}

/// Return a setting for the directive that selects an upstream.
fn pass(level: &[Directive]) -> Option<Setting> {
    last(level, &["proxy_pass", "grpc_pass"]).map(setting)
}
