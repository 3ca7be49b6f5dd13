//! JSON access logs of Caddy and of the gateway.

use std::borrow::Cow;
use std::collections::BTreeMap;

use http::HeaderName;
use http::header::{REFERER, USER_AGENT};
use serde::Deserialize;
use serde_json::Value;

use crate::tools::replay::format::{
    FieldMapping, FormatCapabilities, LineError, LogEntry, LoggedHeaders, parse_address, parse_iso8601, seconds_to_us,
};

/// The value that Caddy logs instead of credentials.
const REDACTED: &str = "REDACTED";

fn into_bytes(text: Cow<'_, str>) -> Cow<'_, [u8]> {
    match text {
        Cow::Borrowed(text) => Cow::Borrowed(text.as_bytes()),
        Cow::Owned(text) => Cow::Owned(text.into_bytes()),
    }
}

/// Parser of Caddy logs.
#[derive(Debug, Clone, Default)]
pub struct CaddyFormat {
    pub(super) mappings: Vec<FieldMapping>,
}

#[derive(Deserialize)]
struct CaddyLine<'l> {
    #[serde(borrow)]
    ts: CaddyTime<'l>,
    #[serde(borrow)]
    request: CaddyRequest<'l>,
    #[serde(borrow, default)]
    duration: Option<CaddyTime<'l>>,
    status: Option<u16>,
}

/// A time or duration: a number of seconds or a text, as determined by Caddy's options `time_format` and
/// `duration_format`.
#[derive(Deserialize)]
#[serde(untagged)]
enum CaddyTime<'l> {
    Seconds(f64),
    Text(#[serde(borrow)] Cow<'l, str>),
}

#[derive(Deserialize)]
struct CaddyRequest<'l> {
    #[serde(borrow)]
    remote_ip: Option<Cow<'l, str>>,
    #[serde(borrow)]
    method: &'l str,
    #[serde(borrow)]
    host: Option<Cow<'l, str>>,
    #[serde(borrow)]
    uri: Cow<'l, str>,
    #[serde(borrow, default)]
    headers: BTreeMap<Cow<'l, str>, Vec<Cow<'l, str>>>,
    #[serde(borrow)]
    tls: Option<CaddyTls<'l>>,
}

#[derive(Deserialize)]
struct CaddyTls<'l> {
    #[serde(borrow)]
    client_common_name: Option<Cow<'l, str>>,
}

impl CaddyFormat {
    pub(super) fn parse<'l>(&mut self, line: &'l [u8]) -> Result<Option<LogEntry<'l>>, LineError> {
        let CaddyLine { ts, request, duration, status } =
            serde_json::from_slice(line).map_err(|_| LineError::Malformed)?;
        let end_us = match &ts {
            CaddyTime::Seconds(number) => seconds_to_us(*number),
            CaddyTime::Text(text) => parse_iso8601(text.as_bytes()),
        };
        let duration_us = duration.and_then(|logged_duration| match logged_duration {
            CaddyTime::Seconds(number) => seconds_to_us(number),
            CaddyTime::Text(text) => text.strip_suffix('s')?.parse().ok().and_then(seconds_to_us),
        });
        let mut headers = Vec::new();
        for (name, values) in request.headers {
            let Ok(name) = HeaderName::from_bytes(name.as_bytes()) else { continue };
            let values = values.into_iter().filter(|value| value != REDACTED);
            headers.extend(values.map(|value| (name.clone(), into_bytes(value))));
        }
        if !self.mappings.is_empty() {
            extract_mapped_fields(&self.mappings, line, &mut headers);
        }
        // Subtract the duration, because Caddy writes a line at the end of the request.
        let at_us = end_us.ok_or(LineError::InvalidTime)?.saturating_sub(duration_us.unwrap_or(0));
        Ok(Some(LogEntry {
            time_us: at_us,
            duration_us,
            client: request.remote_ip.and_then(|text| parse_address(text.as_bytes())),
            method: request.method.as_bytes(),
            target: into_bytes(request.uri),
            host: request.host.filter(|host| !host.is_empty()).map(into_bytes),
            status: status.filter(|status| *status > 0),
            certificate_subject: request.tls.and_then(|tls| tls.client_common_name).map(into_bytes),
            headers,
            ..LogEntry::default()
        }))
    }
}

pub(super) fn caddy_capabilities() -> FormatCapabilities {
    FormatCapabilities {
        client: true,
        host: true,
        query: true,
        certificate_subject: false,
        duration: true,
        status: true,
        headers: LoggedHeaders::NonSecret,
        route: false,
        identity_hashes: false,
    }
}

/// Read mapped fields by their JSON paths, such as `request.headers.X-Api-Key`, and append them as headers.
pub(super) fn extract_mapped_fields(
    mappings: &[FieldMapping],
    line: &[u8],
    headers: &mut Vec<(HeaderName, Cow<'_, [u8]>)>,
) {
    let Ok(value) = serde_json::from_slice::<Value>(line) else { return };
    for FieldMapping { field, header } in mappings {
        let logged_value = field.split('.').try_fold(&value, |value, name| value.get(name));
        let text = match logged_value {
            Some(Value::Array(values)) => values.first().and_then(Value::as_str).map(str::to_owned),
            Some(Value::String(text)) => Some(text.clone()),
            Some(Value::Number(number)) => Some(number.to_string()),
            _ => None,
        };
        let text = text.filter(|text| !matches!(text.as_str(), "" | "-" | REDACTED));
        headers.extend(text.map(|text| (header.clone(), Cow::Owned(text.into_bytes()))));
    }
}

// === The gateway (docs/reference/access-log.md) ===

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
    host: Option<Cow<'l, str>>,
    #[serde(borrow)]
    path: Cow<'l, str>,
    status: u16,
    #[serde(borrow)]
    referer: Option<Cow<'l, str>>,
    #[serde(borrow)]
    user_agent: Option<Cow<'l, str>>,
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

/// The name of a mapped field with an identity hash is this prefix and the name of the limit.
pub(super) const HASH_FIELD_PREFIX: &str = "limits.";

/// Outcomes of requests that match a route, but to which the gateway responds before it checks the route's limits.
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
            host,
            path,
            status,
            referer,
            user_agent,
            route,
            outcome,
            limits,
            sample_rate,
        } = native_line;
        let received_us = seconds_to_us(time).ok_or(LineError::InvalidTime)?;
        let logged = [(REFERER, referer), (USER_AGENT, user_agent)];
        let mut headers: Vec<_> =
            logged.into_iter().filter_map(|(name, text)| Some((name, into_bytes(text?)))).collect();
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
            target: into_bytes(path),
            host: host.map(into_bytes),
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

pub(super) fn native_capabilities(sample: &[&[u8]]) -> FormatCapabilities {
    let lines: Vec<NativeLine<'_>> = sample.iter().filter_map(|line| serde_json::from_slice(line).ok()).collect();
    let mut headers = Vec::new();
    if lines.iter().any(|line| line.referer.is_some()) {
        headers.push(REFERER);
    }
    if lines.iter().any(|line| line.user_agent.is_some()) {
        headers.push(USER_AGENT);
    }
    FormatCapabilities {
        client: true,
        host: lines.iter().any(|line| line.host.is_some()),
        query: false,
        certificate_subject: false,
        duration: true,
        status: true,
        headers: LoggedHeaders::Listed(headers),
        route: true,
        identity_hashes: lines.iter().any(|line| !line.limits.is_empty()),
    }
}

/// Return the name of the mapped field that contains the identity hash of a limit.
pub(in crate::tools::replay) fn identity_hash_field(limit: &str) -> String {
    format!("{HASH_FIELD_PREFIX}{limit}")
}
