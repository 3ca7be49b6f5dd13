//! Our own access log in JSON (docs/operating.md). Fields are found by their names; those that are missing say nothing.

use std::borrow::Cow;

use http::HeaderName;
use serde::Deserialize;

use super::caddy::mapped_of;
use super::instant::seconds;
use super::{Entry, Headers, LineError, Mapped, Provides, address};

/// Lines of our own.
#[derive(Debug, Clone, Default)]
pub struct Own {
    pub(super) mapped: Vec<Mapped>,
}

#[derive(Deserialize)]
struct Line<'l> {
    /// When it came, seconds.
    time: f64,
    /// When its limits were asked.
    decided_at: Option<f64>,
    duration_ms: Option<f64>,
    #[serde(borrow)]
    client: Cow<'l, str>,
    #[serde(borrow)]
    method: &'l str,
    #[serde(borrow)]
    path: Cow<'l, str>,
    status: u16,
    #[serde(borrow)]
    route: Option<Cow<'l, str>>,
    #[serde(borrow, default)]
    limits: Vec<Judged<'l>>,
}

#[derive(Deserialize)]
struct Judged<'l> {
    #[serde(borrow)]
    limit: Cow<'l, str>,
    #[serde(borrow)]
    identity: &'l str,
    cost: Option<u64>,
}

/// What a mapped field begins with that is the hash of whoever asked a limit.
pub(super) const HASH: &str = "limits.";

impl Own {
    pub(super) fn parse<'l>(&mut self, line: &'l [u8]) -> Result<Entry<'l>, LineError> {
        let line_of: Line<'l> = serde_json::from_slice(line).map_err(|_| LineError::Shape)?;
        let Line { time, decided_at, duration_ms, client, method, path, status, route, limits } = line_of;
        let came = seconds(time).ok_or(LineError::Time)?;
        let mut fields = Vec::new();
        if !self.mapped.is_empty() {
            mapped_of(&self.mapped, line, &mut fields);
        }
        let mut costs = Vec::new();
        for Judged { limit, identity, cost } in limits {
            let is_it = |mapped: &&Mapped| mapped.field.strip_prefix(HASH) == Some(&*limit);
            for mapped in self.mapped.iter().filter(is_it) {
                fields.push((mapped.header.clone(), Cow::Borrowed(identity.as_bytes())));
            }
            costs.extend(cost.map(|cost| (limit, cost)));
        }
        Ok(Entry {
            at_us: decided_at.and_then(seconds).unwrap_or(came),
            took_us: duration_ms.and_then(|ms| seconds(ms / 1000.0)),
            client: address(client.as_bytes()),
            method: method.as_bytes(),
            target: match path {
                Cow::Borrowed(path) => Cow::Borrowed(path.as_bytes()),
                Cow::Owned(path) => Cow::Owned(path.into_bytes()),
            },
            host: None,
            status: Some(status),
            subject: None,
            fields,
            resolved: true,
            route,
            costs,
        })
    }
}

pub(super) fn provides(sample: &[&[u8]]) -> Provides {
    let has_hashes = |line: &&[u8]| serde_json::from_slice(line).is_ok_and(|line: Line<'_>| !line.limits.is_empty());
    Provides {
        client: true,
        host: false,
        query: false,
        subject: false,
        took: true,
        status: true,
        headers: Headers::Listed(Vec::<HeaderName>::new()),
        route: true,
        hashed: sample.iter().any(has_hashes),
    }
}

/// The field with the hash of whoever asked a limit.
pub(in super::super) fn hash_of(limit: &str) -> String {
    format!("{HASH}{limit}")
}
