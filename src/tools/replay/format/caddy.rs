//! The JSON access log of Caddy (<https://caddyserver.com/docs/caddyfile/directives/log>).

use std::borrow::Cow;
use std::collections::BTreeMap;

use http::HeaderName;
use serde::Deserialize;
use serde_json::Value;

use crate::tools::replay::format::timestamp::{parse_iso8601, seconds_to_us};
use crate::tools::replay::format::{
    FieldMapping, FormatCapabilities, LineError, LogEntry, LoggedHeaders, parse_address,
};

/// The value that Caddy logs instead of credentials.
const REDACTED: &str = "REDACTED";

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

/// Seconds or text, which depends on `time_format` and `duration_format` of Caddy.
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
        let bytes = |text: Cow<'l, str>| match text {
            Cow::Borrowed(text) => Cow::Borrowed(text.as_bytes()),
            Cow::Owned(text) => Cow::Owned(text.into_bytes()),
        };
        let mut headers = Vec::new();
        for (name, values) in request.headers {
            let Ok(name) = HeaderName::from_bytes(name.as_bytes()) else { continue };
            let values = values.into_iter().filter(|value| value != REDACTED);
            headers.extend(values.map(|value| (name.clone(), bytes(value))));
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
            target: bytes(request.uri),
            host: request.host.filter(|host| !host.is_empty()).map(bytes),
            status: status.filter(|status| *status > 0),
            certificate_subject: request.tls.and_then(|tls| tls.client_common_name).map(bytes),
            headers,
            ..LogEntry::default()
        }))
    }
}

pub(super) fn capabilities() -> FormatCapabilities {
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
