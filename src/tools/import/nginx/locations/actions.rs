//! What a location of nginx does: `return`, `rewrite`, `proxy_pass` or nothing that Sluicegate can do.

use std::collections::BTreeMap;

use crate::routing::pattern::PathPattern;
use crate::tools::import::model::{Origin, Table, quoted};
use crate::tools::import::nginx::Importer;
use crate::tools::import::nginx::locations::{Path, Site, not_implemented, pass};
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
        if directive.name != "server" {
            self.report_rewrites(level);
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
    pub(super) fn server_actions(&mut self, site: &Site, level: &[Directive], scope: &Scope) -> Option<Directive> {
        for directive in level {
            match &*directive.name {
                "if" => self.host_condition(site, directive, scope),
                "rewrite" => self.rewrite_route(site, directive, scope),
                _ => {}
            }
        }
        level.iter().find(|directive| directive.name == "return").cloned()
    }

    /// Add the route of `if ($host = NAME) { return … }`. Report all other conditions.
    fn host_condition(&mut self, site: &Site, directive: &Directive, scope: &Scope) {
        let condition = directive.args.join(" ");
        let condition = condition.trim_matches(['(', ')', ' ']);
        let host = condition.strip_prefix("$host = ").or_else(|| condition.strip_prefix("$host =")).map(str::trim);
        let found = directive.children().iter().find(|child| child.name == "return");
        let (Some(host), Some(found)) = (host.filter(|host| !host.is_empty() && !host.contains('$')), found) else {
            let text = format!("`{}`: conditions are not imported; see `match` of routes", quoted(&directive.text()));
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
        route.set(path.key, path.value.as_str());
        let action = self.return_action(&only, found);
        self.reply(&mut route, &path, action, scope, &directive.origin);
        self.model.add_route(&format!("{host} redirect"), route);
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

    /// Report `rewrite` and `if` in a location.
    fn report_rewrites(&mut self, level: &[Directive]) {
        for directive in level.iter().filter(|directive| matches!(&*directive.name, "rewrite" | "if")) {
            let advice = if directive.name == "if" { "see `match` of routes" } else { "see `rewrite` of routes" };
            let text = format!("`{}`: {advice}", quoted(&directive.text()));
            self.model.no_equal(&directive.origin, text);
        }
    }
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
