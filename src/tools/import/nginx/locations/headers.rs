//! nginx's changes to headers: `proxy_set_header`, `add_header` and `proxy_hide_header`.

use http::HeaderName;

use crate::http::headers::{Direction, reserved_reason};
use crate::tools::import::model::{Relation, Table, quoted};
use crate::tools::import::nginx::Importer;
use crate::tools::import::nginx::scope::Scope;
use crate::tools::import::nginx::upstreams::Target;

impl Importer<'_> {
    /// Write `proxy_set_header`.
    pub(super) fn request_headers(&mut self, route: &mut Table, scope: &Scope, target: &Target) {
        let mut host = target.host.clone();
        for setting in scope.several("proxy_set_header") {
            let name = setting.arg(0).to_ascii_lowercase();
            let value = scope.expanded(setting.arg(1));
            match (&*name, &*value) {
                ("host", "$host" | "$http_host" | "$host:$server_port" | "$host:$proxy_port") => {
                    host = "client".to_owned();
                    if value != "$http_host" {
                        self.model.note(
                            Relation::Differs,
                            None,
                            "`$host` is in lower case and has no port. Sluicegate forwards `Host` as the client wrote \
                             it, and uses the name in lower case only to select the route",
                        );
                    }
                }
                ("host", "$proxy_host") => host.clone_from(&target.host),
                ("host", value) if !value.contains('$') && !value.is_empty() => host = value.to_owned(),
                ("upgrade", "$http_upgrade") => route.set("websocket", true),
                ("connection", value) if value.is_empty() || value.eq_ignore_ascii_case("keep-alive") => {}
                ("connection", value) if value.eq_ignore_ascii_case("upgrade") || value.starts_with('$') => {}
                ("x-forwarded-for", "$proxy_add_x_forwarded_for" | "$remote_addr") => self.model.note(
                    Relation::Differs,
                    None,
                    "Sluicegate sets X-Forwarded-For, -Proto and -Host itself. It keeps values of clients only if \
                     their address is in `client_ip.trusted_proxies`",
                ),
                ("x-forwarded-proto", "$scheme")
                | ("x-forwarded-host", "$host" | "$http_host")
                | ("x-request-id", "$request_id") => {}
                (_, value) => match HeaderName::from_bytes(name.as_bytes()) {
                    Ok(header) if reserved_reason(&header, Direction::Request).is_none() => {
                        match (value.is_empty(), template(value)) {
                            (true, _) => {
                                let list = route.keys.entry("request_headers.remove".to_owned());
                                let list = list.or_insert_with(|| toml::Value::Array(Vec::new()));
                                if let toml::Value::Array(list) = list {
                                    list.push(name.into());
                                }
                            }
                            (false, Some(value)) => route.set_entry("request_headers.set", &name, value),
                            (false, None) => self.model.no_equal(&setting.origin, format!("`{}`", setting.text())),
                        }
                    }
                    _ => self.model.no_equal(&setting.origin, format!("`{}`", setting.text())),
                },
            }
        }
        if host != "client" {
            route.set("upstream_host", host);
        }
        drop_duplicates(route, "request_headers");
    }

    /// Write `add_header` and `proxy_hide_header`.
    pub(super) fn response_headers(&mut self, route: &mut Table, scope: &Scope) {
        let is_proxied = route.keys.contains_key("upstream");
        for setting in scope.several("proxy_hide_header").iter().filter(|_| is_proxied) {
            route.push("response_headers.remove", setting.arg(0).to_ascii_lowercase());
        }
        for setting in scope.several("add_header") {
            let name = setting.arg(0).to_ascii_lowercase();
            let header = HeaderName::from_bytes(name.as_bytes());
            let is_free = header.is_ok_and(|header| reserved_reason(&header, Direction::Response).is_none());
            match template(&scope.expanded(setting.arg(1))) {
                Some(value) if is_free && !value.is_empty() => {
                    route.set_entry("response_headers.set", &name, value);
                    if setting.arg(2) == "always" {
                        route.set("response_headers.on_errors", true);
                    } else {
                        self.model.note(
                            Relation::Differs,
                            None,
                            "`add_header` without `always` adds the header only to successful responses and redirects; \
                             `response_headers.set` replaces the header in all responses of the upstream",
                        );
                    }
                }
                Some(value) if value.is_empty() => {}
                _ => self.model.no_equal(&setting.origin, format!("`{}`", quoted(&setting.text()))),
            }
        }
        drop_duplicates(route, "response_headers");
    }
}

/// Remove headers from `remove` that `set` replaces anyway.
fn drop_duplicates(route: &mut Table, key: &str) {
    let set = match route.keys.get(&format!("{key}.set")) {
        Some(toml::Value::Table(set)) => set.clone(),
        _ => return,
    };
    if let Some(toml::Value::Array(list)) = route.keys.get_mut(&format!("{key}.remove")) {
        list.retain(|name| name.as_str().is_none_or(|name| !set.contains_key(name)));
    }
}

/// Return a value with the variables of Sluicegate. `None`: it has a variable without an equal.
fn template(value: &str) -> Option<String> {
    let known = [
        ("remote_addr", "{client_ip}"),
        ("request_id", "{request_id}"),
        ("host", "{host}"),
        ("http_host", "{host}"),
        ("scheme", "{scheme}"),
        ("request_method", "{method}"),
        ("uri", "{path}"),
    ];
    let mut result = String::new();
    let mut rest = value;
    while let Some((before, after)) = rest.split_once('$') {
        result.push_str(&before.replace('{', "{{").replace('}', "}}"));
        let after = after.strip_prefix('{').unwrap_or(after);
        let length = after.bytes().take_while(|byte| byte.is_ascii_alphanumeric() || *byte == b'_').count();
        let (name, tail) = after.split_at(length);
        let (_, variable) = known.iter().find(|(other, _)| *other == name)?;
        result.push_str(variable);
        rest = tail.strip_prefix('}').unwrap_or(tail);
    }
    result.push_str(&rest.replace('{', "{{").replace('}', "}}"));
    Some(result)
}
