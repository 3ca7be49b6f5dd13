//! Reloads of a running gateway over the admin API.

use super::admin_listener::HERE;
use super::client::{Client, Reply};
use super::gateway::Gateway;

/// An admin listener with a token.
pub const ADMIN: &str = "[admin]\naddress = \"127.0.0.1:0\"\ntoken = \"sesame\"\n";

/// Return a route `/says` with a direct response.
pub fn says(body: &str) -> String {
    format!("[[route]]\nname = \"says\"\npath = \"/says\"\nrespond = {{ status = 200, body = \"{body}\" }}\n")
}

pub fn with_admin(config: &str) -> String {
    format!("{ADMIN}{config}")
}

pub fn ask(gateway: &Gateway, method: &str, path: &str) -> Reply {
    Client::connect(gateway.admin()).request(method, path, &[HERE, ("authorization", "Bearer sesame")], b"")
}

/// Write another configuration and reload it. Return the response of the admin API.
pub fn reload(gateway: &Gateway, config: &str) -> Reply {
    gateway.put(&with_admin(config));
    ask(gateway, "POST", "/api/reload")
}

#[track_caller]
pub fn reloads(gateway: &Gateway, config: &str) {
    let reply = reload(gateway, config);
    assert_eq!((reply.status, &reply.json()["result"]), (200, &"ok".into()), "{}", reply.text());
}

/// Return the value of one line of the metrics. `line` is the metric's name without `sluicegate_`, with its labels.
pub fn metric(gateway: &Gateway, line: &str) -> f64 {
    let page = ask(gateway, "GET", "/metrics");
    let found =
        page.text().lines().find_map(|each| each.strip_prefix(&format!("sluicegate_{line}"))?.strip_prefix(' '));
    found.unwrap_or_else(|| panic!("no metric {line} in\n{}", page.text())).parse().unwrap()
}
