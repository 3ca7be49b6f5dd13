//! An import ends with an error or with TOML whose keys the gateway knows. It contains no control characters of the
//! imported file outside of strings.

use std::path::Path;

use sluicegate::config::file::parse_gateway;
use sluicegate::tools::import::{Format, Input, import};

/// Import a file of a program.
pub(crate) fn run(format: Format, data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let input = Input { name: "fuzz".into(), directory: None, text: text.to_owned() };
    let Ok(model) = import(format, &[input], 0) else { return };
    let toml = model.to_toml("sluicegate import");
    let parsed = parse_gateway(Path::new("gateway.toml"), toml.clone(), &|_| None);
    let file = parsed.unwrap_or_else(|error| panic!("{toml}\n{error:?}"));
    assert!(file.issues.is_empty(), "{toml}\n{:?}", file.issues);
    let controls = model.notes.iter().find(|note| note.to_string().contains(char::is_control));
    assert!(controls.is_none(), "{controls:?}");
}

/// Import configuration files of nginx.
pub(crate) fn nginx(data: &[u8]) {
    run(Format::Nginx, data);
}

/// Import Ingress resources.
pub(crate) fn kubernetes(data: &[u8]) {
    run(Format::IngressNginx { replicas: Some(2) }, data);
    run(Format::Kubernetes, data);
}

/// Import declarative configurations of Kong.
pub(crate) fn kong(data: &[u8]) {
    run(Format::Kong, data);
}

/// Import files of envoyproxy/ratelimit.
pub(crate) fn ratelimit(data: &[u8]) {
    run(Format::RateLimit, data);
}

/// Import dynamic configurations of Traefik, in YAML or TOML.
pub(crate) fn traefik(data: &[u8]) {
    run(Format::Traefik, data);
}
