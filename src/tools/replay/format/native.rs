//! The JSON access log of the gateway itself (docs/reference/access-log.md).

use std::borrow::Cow;

use http::HeaderName;
use serde::Deserialize;

use crate::tools::replay::format::caddy::extract_mapped_fields;
use crate::tools::replay::format::timestamp::seconds_to_us;
use crate::tools::replay::format::{
    FieldMapping, FormatCapabilities, LineError, LogEntry, LoggedHeaders, parse_address,
};

/// Parser of the gateway's access log.
#[derive(Debug, Clone, Default)]
pub struct NativeFormat {
    pub(super) mappings: Vec<FieldMapping>,
}

#[derive(Deserialize)]
struct NativeLine<'l> {
    /// Time when the request arrived, seconds since the Unix epoch.
    time: f64,
    /// Time of the rate limit check, seconds since the Unix epoch.
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
    #[serde(borrow)]
    outcome: Option<Cow<'l, str>>,
    #[serde(borrow, default)]
    limits: Vec<NativeLimit<'l>>,
    /// Share of the successful requests that the gateway logged. `None` means all requests.
    sample_rate: Option<f64>,
}

#[derive(Deserialize)]
struct NativeLimit<'l> {
    #[serde(borrow)]
    limit: Cow<'l, str>,
    #[serde(borrow)]
    identity: &'l str,
    cost: Option<u64>,
}

/// Prefix in the name of a mapped field, which selects the identity hash of a limit.
pub(super) const HASH_FIELD_PREFIX: &str = "limits.";

/// Outcomes of requests that have a route but may be answered without a check of its limits.
const UNCHECKED_OUTCOMES: [&str; 2] = ["forbidden", "preflight"];

impl NativeFormat {
    pub(super) fn parse<'l>(&mut self, line: &'l [u8]) -> Result<LogEntry<'l>, LineError> {
        let native_line: NativeLine<'l> = serde_json::from_slice(line).map_err(|_| LineError::Malformed)?;
        let NativeLine {
            time,
            decided_at,
            duration_ms,
            client,
            method,
            path,
            status,
            route,
            outcome,
            limits,
            sample_rate,
        } = native_line;
        let received_us = seconds_to_us(time).ok_or(LineError::InvalidTime)?;
        let mut headers = Vec::new();
        if !self.mappings.is_empty() {
            extract_mapped_fields(&self.mappings, line, &mut headers);
        }
        let has_unchecked_outcome = outcome.is_some_and(|outcome| UNCHECKED_OUTCOMES.contains(&&*outcome));
        let is_unchecked = has_unchecked_outcome && limits.is_empty();
        let mut costs = Vec::new();
        for NativeLimit { limit, identity, cost } in limits {
            let is_for_limit = |mapping: &&FieldMapping| mapping.field.strip_prefix(HASH_FIELD_PREFIX) == Some(&*limit);
            for mapping in self.mappings.iter().filter(is_for_limit) {
                headers.push((mapping.header.clone(), Cow::Borrowed(identity.as_bytes())));
            }
            costs.extend(cost.map(|cost| (limit, cost)));
        }
        Ok(LogEntry {
            time_us: decided_at.and_then(seconds_to_us).unwrap_or(received_us),
            duration_us: duration_ms.and_then(|ms| seconds_to_us(ms / 1000.0)),
            client: parse_address(client.as_bytes()),
            method: method.as_bytes(),
            target: match path {
                Cow::Borrowed(path) => Cow::Borrowed(path.as_bytes()),
                Cow::Owned(path) => Cow::Owned(path.into_bytes()),
            },
            host: None,
            status: Some(status),
            certificate_subject: None,
            headers,
            is_client_resolved: true,
            route,
            costs,
            is_unchecked,
            sample_rate,
        })
    }
}

pub(super) fn capabilities(sample: &[&[u8]]) -> FormatCapabilities {
    let has_hashes =
        |line: &&[u8]| serde_json::from_slice(line).is_ok_and(|line: NativeLine<'_>| !line.limits.is_empty());
    FormatCapabilities {
        client: true,
        host: false,
        query: false,
        certificate_subject: false,
        duration: true,
        status: true,
        headers: LoggedHeaders::Listed(Vec::<HeaderName>::new()),
        route: true,
        identity_hashes: sample.iter().any(has_hashes),
    }
}

/// Return the limit whose identity hash a mapped field selects.
pub(in crate::tools::replay) fn identity_hash_field(limit: &str) -> String {
    format!("{HASH_FIELD_PREFIX}{limit}")
}
