//! What the operator sees of a gateway.

use super::client::{Client, Reply};
use super::gateway::Gateway;

/// A configuration with a listener for the operator.
pub fn with_admin(rest: &str) -> String {
    format!("[admin]\naddress = \"127.0.0.1:0\"\n{rest}")
}

/// A name by which only this machine is meant.
pub const HERE: (&str, &str) = ("host", "localhost");

pub fn ask(gateway: &Gateway, path: &str) -> Reply {
    Client::connect(gateway.admin()).get_with(path, &[HERE])
}

/// The value of one line of the metrics.
pub fn metric(gateway: &Gateway, line: &str) -> f64 {
    let page = ask(gateway, "/metrics");
    let found = page.text().lines().find_map(|each| each.strip_prefix(line)?.strip_prefix(' '));
    found.unwrap_or_else(|| panic!("no {line} in\n{}", page.text())).parse().unwrap()
}
