//! The admin listener without a token, for health and metrics.

use super::client::{Client, Reply};
use super::gateway::Gateway;

/// Add an admin listener to a configuration.
pub fn with_admin(rest: &str) -> String {
    format!("[admin]\naddress = \"127.0.0.1:0\"\n{rest}")
}

/// A Host header with a local name.
pub const HERE: (&str, &str) = ("host", "localhost");

pub fn ask(gateway: &Gateway, path: &str) -> Reply {
    Client::connect(gateway.admin()).get_with(path, &[HERE])
}

/// Return the value of one line of the metrics. `line` is the metric's name with its labels.
pub fn metric(gateway: &Gateway, line: &str) -> f64 {
    let page = ask(gateway, "/metrics");
    let found = page.text().lines().find_map(|each| each.strip_prefix(line)?.strip_prefix(' '));
    found.unwrap_or_else(|| panic!("no metric {line} in\n{}", page.text())).parse().unwrap()
}
