//! What a location of nginx does: `return`, `rewrite`, `proxy_pass` or nothing that Sluicegate can do.

use std::collections::BTreeMap;

use crate::routing::pattern::PathPattern;
use crate::tools::import::model::{Origin, Table, quoted};
use crate::tools::import::nginx::Importer;
use crate::tools::import::nginx::locations::{Kind, Path, Site, conditions, not_implemented, pass};
use crate::tools::import::nginx::scope::{Scope, Setting};
use crate::tools::import::nginx::syntax::Directive;
use crate::tools::import::paths::{whole_expression, with_groups};

/// The action of a location.
#[derive(Debug)]
pub(super) enum Action {
    /// Forward the request, with the settings of the location that has the `proxy_pass`.
    Proxy { scope: Box<Scope>, pass: Setting },
    /// `return STATUS TEXT`
    Respond { status: i64, body: String },
    /// `return STATUS URL`. `to` is a target of `redirect`.
    Redirect { to: RedirectTarget, status: i64 },
    /// nginx's handler has no equal, which is reported.
    Unsupported,
}

/// Where a redirect leads.
#[derive(Debug)]
pub(super) enum RedirectTarget {
    /// The same URL with another scheme.
    Scheme(&'static str),
    /// Another URL.
    Url(String),
    /// Another origin, followed by the path of the request.
    Origin(String),
}

impl Importer<'_> {
    /// Return the action of a location.
    pub(super) fn action(
        &mut self,
        site: &Site,
        directive: &Directive,
        scope: &Scope,
        named: &BTreeMap<&str, &Directive>,
    ) -> Action {
        let level = directive.children();
        if let Some(found) = level.iter().find(|child| child.name == "return") {
            return self.return_action(site, found);
        }
        if level.iter().any(|child| child.name == "internal") {
            return Action::Respond { status: 404, body: String::new() };
        }
        if let Some(pass) = pass(level) {
            return Action::Proxy { scope: Box::new(scope.clone()), pass };
        }
        if let Some(files) = level.iter().find(|child| child.name == "try_files") {
            let last = files.args.last().map_or("", String::as_str);
            if let Some(fallback) = named.get(last)
                && let Some(pass) = pass(fallback.children())
            {
                let text = format!("`{}`: the gateway serves no files; all requests go to `{last}`", files.text());
                self.model.no_equal(&files.origin, text);
                let scope = scope.enter(fallback.children(), &mut self.model);
                return Action::Proxy { scope: Box::new(scope), pass };
            }
            if last == "=404" && files.args.len() == 1 {
                return Action::Respond { status: 404, body: String::new() };
            }
        }
        let handler = level.iter().find(|child| {
            child.name.ends_with("_pass") || matches!(&*child.name, "root" | "alias" | "try_files" | "stub_status")
        });
        let text = match handler {
            Some(handler) if handler.name.ends_with("_pass") => {
                format!("`{}`: the route responds with 501", quoted(&handler.text()))
            }
            Some(handler) => {
                format!("`{}`: the gateway serves no files; the route responds with 501", quoted(&handler.text()))
            }
            None => format!("`{}` has no `proxy_pass`: the route responds with 501", quoted(&directive.text())),
        };
        self.model.no_equal(handler.map_or(&directive.origin, |handler| &handler.origin), text);
        Action::Unsupported
    }

    /// Return the action of `return`.
    pub(super) fn return_action(&mut self, site: &Site, directive: &Directive) -> Action {
        let (status, text) = match directive.arg(0).parse::<i64>() {
            Ok(status) => (status, directive.arg(1)),
            Err(_) => (302, directive.arg(0)),
        };
        if matches!(status, 301 | 302 | 303 | 307 | 308) {
            return match redirect_target(text, site) {
                Some(to) => {
                    if let RedirectTarget::Url(url) = &to
                        && !url.contains('?')
                    {
                        let text = format!("`{}`: the redirect keeps the query of the request", directive.text());
                        self.model.differs(&directive.origin, text);
                    }
                    Action::Redirect { to, status }
                }
                None => {
                    let text = format!("`{}`: the target is not known; the route responds with 501", directive.text());
                    self.model.no_equal(&directive.origin, text);
                    Action::Unsupported
                }
            };
        }
        if !(200..=599).contains(&status) || status == 444 {
            let text = format!("`{}`: the route responds with 403", directive.text());
            self.model.differs(&directive.origin, text);
            return Action::Respond { status: 403, body: String::new() };
        }
        if text.contains('$') {
            let text = format!("`{}`: the body contains no variables", quoted(&directive.text()));
            self.model.no_equal(&directive.origin, text);
        }
        if text.is_empty() && status >= 400 {
            let text = format!("`{}`: nginx sends a page of its own, Sluicegate an empty body", directive.text());
            self.model.not_needed(&directive.origin, text);
        }
        Action::Respond { status, body: text.to_owned() }
    }

    /// Write a route that the gateway answers itself.
    pub(super) fn reply(&mut self, route: &mut Table, path: &Path, action: Action, scope: &Scope, origin: &Origin) {
        match action {
            Action::Respond { status, body } => {
                route.set_entry("respond", "status", status);
                if !body.is_empty() {
                    route.set_entry("respond", "body", body);
                }
                self.response_headers(route, scope);
            }
            Action::Redirect { to, status } => {
                match to {
                    RedirectTarget::Scheme(scheme) => route.set_entry("redirect", "scheme", scheme),
                    RedirectTarget::Url(url) => {
                        route.set_entry("redirect", "to", with_groups(&url, path.key == "path_regex"));
                    }
                    RedirectTarget::Origin(other) => match &path.prefix {
                        Some(prefix) => route.set_entry("redirect", "to", format!("{other}{prefix}{{rest}}")),
                        None if path.key == "path" => {
                            route.set_entry("redirect", "to", format!("{other}{}", path.value));
                        }
                        None => {
                            let text = "a redirect of a regular expression cannot keep the path; the route responds \
                                        with 501";
                            self.model.no_equal(origin, text);
                            return not_implemented(route);
                        }
                    },
                }
                route.set_entry("redirect", "status", status);
                self.response_headers(route, scope);
            }
            Action::Proxy { .. } | Action::Unsupported => {
                not_implemented(route);
                self.common(route, scope);
            }
        }
    }

    /// Add the routes of `if ($host = …)` and `rewrite` of a server, which come before its locations. Return the
    /// `return` of the server, which handles all its requests.
    pub(super) fn server_actions(&mut self, site: &mut Site, level: &[Directive], scope: &Scope) -> Option<Directive> {
        for directive in level {
            match &*directive.name {
                "if" => self.host_condition(site, directive, scope),
                "rewrite" => self.rewrite_route(site, directive, scope),
                _ => {}
            }
        }
        level.iter().find(|directive| directive.name == "return").cloned()
    }

    /// Add the route of `if ($host = NAME) { return … }`. The other routes of the server do not have this host.
    fn host_condition(&mut self, site: &mut Site, directive: &Directive, scope: &Scope) {
        let Some(host) = conditions::host(directive) else { return };
        let Some(found) = directive.children().iter().find(|child| child.name == "return") else {
            let text = format!("`{}`: only `return` is imported", quoted(&directive.text()));
            return self.model.no_equal(&directive.origin, text);
        };
        let mut route = Table::from_origin(&directive.origin, &directive.text());
        let only = Site {
            name: host.to_owned(),
            hosts: vec![host.to_ascii_lowercase()],
            listeners: site.listeners.clone(),
            redirect_scheme: site.redirect_scheme,
        };
        only.write(&mut route);
        let path =
            Path { key: "path", value: "/{*rest}".to_owned(), trailing_slash: None, prefix: Some("/".to_owned()) };
        path.write(&mut route);
        let action = self.return_action(&only, found);
        self.reply(&mut route, &path, action, scope, &directive.origin);
        self.model.add_route(&format!("{host} redirect"), route);
        site.hosts.retain(|other| !only.hosts.contains(other));
    }

    /// Add the route of a `rewrite` of a server that redirects. Report all others.
    fn rewrite_route(&mut self, site: &Site, directive: &Directive, scope: &Scope) {
        let (expression, replacement, flag) = (directive.arg(0), directive.arg(1), directive.arg(2));
        let is_url = ["http://", "https://", "$scheme"].iter().any(|scheme| replacement.starts_with(scheme));
        let status = match flag {
            "permanent" => 301,
            "redirect" => 302,
            _ if is_url => 302,
            _ => {
                let text = format!("`{}`: only redirects are imported", quoted(&directive.text()));
                return self.model.no_equal(&directive.origin, text);
            }
        };
        let value = whole_expression(expression);
        let target = redirect_target(replacement.trim_end_matches('?'), site);
        let (Some(to), Ok(_)) = (target, PathPattern::from_regex(&value)) else {
            return self.model.no_equal(&directive.origin, format!("`{}`", quoted(&directive.text())));
        };
        let is_all = matches!(expression, "^" | "^.*$" | "^/.*$" | "^(.*)$" | "^/(.*)$" | ".*");
        let path = if is_all && !replacement.contains("$1") {
            Path { key: "path", value: "/{*rest}".to_owned(), trailing_slash: None, prefix: Some("/".to_owned()) }
        } else {
            Path { key: "path_regex", value, trailing_slash: None, prefix: None }
        };
        let mut route = Table::from_origin(&directive.origin, &directive.text());
        site.write(&mut route);
        route.set(path.key, path.value.as_str());
        self.reply(&mut route, &path, Action::Redirect { to, status }, scope, &directive.origin);
        self.model.add_route(&format!("{} rewrite", site.name), route);
    }

    /// Return the rewrite of `rewrite … break` in a location whose path is a prefix, or the same expression. Report all
    /// other `rewrite` directives.
    pub(super) fn location_rewrite(&mut self, place: &Directive, kind: Kind, path: &str) -> Option<BreakRewrite> {
        let mut rewrites = place.children().iter().filter(|child| child.name == "rewrite");
        let first = rewrites.next()?;
        let found = break_rewrite(first, kind, path).filter(|_| rewrites.next().is_none());
        if found.is_none() {
            self.report_rewrites(place);
        }
        found
    }

    /// Report the `rewrite` directives of a location.
    pub(super) fn report_rewrites(&mut self, place: &Directive) {
        let rewrites = place.children().iter().filter(|child| child.name == "rewrite" && place.name != "server");
        for directive in rewrites {
            let text = format!("`{}`: see `rewrite` of routes", quoted(&directive.text()));
            self.model.no_equal(&directive.origin, text);
        }
    }
}

/// What `rewrite … break` of a location does.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum BreakRewrite {
    /// Replace the part of the path before the rest: `BASE/{rest}`. `of_bare` is the target of the path without a rest
    /// and without a slash, if the expression matches it.
    Prefix { base: String, of_bare: Option<String> },
    /// Replace the whole path. The text contains groups of the expression of the location.
    Whole(String),
}

impl BreakRewrite {
    /// Write the rewrite of a route with this path.
    pub(super) fn write(&self, route: &mut Table, path: &Path) {
        match (self, &path.prefix) {
            (BreakRewrite::Whole(target), _) => route.set("rewrite", with_groups(target, true)),
            (BreakRewrite::Prefix { base, .. }, Some(prefix)) => {
                let bare = prefix.trim_end_matches('/');
                match base.is_empty() && path.key == "path" {
                    true if bare.is_empty() => {}
                    true => route.set("strip_prefix", bare),
                    false => route.set("rewrite", format!("{base}/{{rest}}")),
                }
            }
            (BreakRewrite::Prefix { of_bare, .. }, None) => {
                of_bare.iter().for_each(|target| route.set("rewrite", target.as_str()));
            }
        }
    }
}

/// Return the rewrite of a location.
fn break_rewrite(directive: &Directive, kind: Kind, path: &str) -> Option<BreakRewrite> {
    let (expression, replacement) = (directive.arg(0), directive.arg(1));
    if directive.arg(2) != "break" || replacement.contains(['?', '{', '}']) || !replacement.starts_with(['/', '$']) {
        return None;
    }
    if matches!(kind, Kind::Regex) {
        let is_same = expression == path && !with_groups(replacement, true).contains('$');
        return (is_same && replacement.starts_with('/')).then(|| BreakRewrite::Whole(replacement.to_owned()));
    }
    if !matches!(kind, Kind::Prefix | Kind::Stop) {
        return None;
    }
    let prefix = path.trim_end_matches('/');
    let expression = expression.strip_prefix('^')?;
    let escaped = regex::escape(prefix);
    let rest = expression.strip_prefix(&*escaped).or_else(|| expression.strip_prefix(prefix))?;
    // The group that contains the rest of the path, whether it begins with the slash, and whether the rest may be absent.
    let (group, has_slash, is_optional) = match rest.strip_suffix('$').unwrap_or(rest) {
        "/(.*)" => ("$1", false, false),
        "/?(.*)" => ("$1", false, true),
        "(/.*)" => ("$1", true, false),
        "(.*)" => ("$1", true, true),
        "(/|$)(.*)" => ("$2", false, true),
        _ => return None,
    };
    let base = replacement.strip_suffix(group)?;
    let base = if has_slash { base } else { base.strip_suffix('/')? };
    let is_literal = !base.contains('$') && !base.ends_with('/') && (base.is_empty() || base.starts_with('/'));
    let slash = if has_slash { "" } else { "/" };
    let of_bare = is_optional.then(|| format!("{base}{slash}")).filter(|target| !target.is_empty());
    is_literal.then(|| BreakRewrite::Prefix { base: base.to_owned(), of_bare })
}

/// Return the target of a redirect. `None`: it contains variables whose value is not known.
fn redirect_target(text: &str, site: &Site) -> Option<RedirectTarget> {
    let text = text.replace("${", "$").replace("$scheme://", &format!("{}://", site.redirect_scheme));
    for scheme in ["https", "http"] {
        let Some(rest) = text.strip_prefix(&format!("{scheme}://")) else { continue };
        let same_hosts = ["$host", "$http_host", "$server_name"];
        let paths = ["$request_uri", "$uri", "$uri$is_args$args", "/$request_uri"];
        if let Some(path) = same_hosts.iter().find_map(|host| rest.strip_prefix(host)) {
            if !paths.contains(&path) {
                return None;
            }
            let is_loop = scheme == site.redirect_scheme;
            return (!is_loop).then_some(RedirectTarget::Scheme(scheme));
        }
        for path in paths {
            if let Some(host) = rest.strip_suffix(path).filter(|host| !host.contains('$')) {
                return Some(RedirectTarget::Origin(format!("{scheme}://{}", host.trim_end_matches('/'))));
            }
        }
    }
    let has_only_groups = text.split('$').skip(1).all(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    let is_target = text.starts_with('/') || text.starts_with("http://") || text.starts_with("https://");
    (has_only_groups && is_target && !text.contains(['{', '}'])).then_some(RedirectTarget::Url(text))
}
