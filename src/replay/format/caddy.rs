//! Caddy's access log in JSON (<https://caddyserver.com/docs/caddyfile/directives/log>).

use std::borrow::Cow;
use std::collections::BTreeMap;

use http::HeaderName;
use serde::Deserialize;
use serde_json::Value;

use super::instant::{iso, seconds};
use super::{Entry, Headers, LineError, Mapped, Provides, address};

/// What replaces secrets.
const REDACTED: &str = "REDACTED";

/// Lines of Caddy.
#[derive(Debug, Clone, Default)]
pub struct Caddy {
    pub(super) mapped: Vec<Mapped>,
}

#[derive(Deserialize)]
struct Line<'l> {
    #[serde(borrow)]
    ts: Instant<'l>,
    #[serde(borrow)]
    request: Request<'l>,
    #[serde(borrow, default)]
    duration: Option<Instant<'l>>,
    status: Option<u16>,
}

/// A number of seconds, or a text, as `time_format` and `duration_format` say.
#[derive(Deserialize)]
#[serde(untagged)]
enum Instant<'l> {
    Seconds(f64),
    Text(#[serde(borrow)] Cow<'l, str>),
}

#[derive(Deserialize)]
struct Request<'l> {
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
    tls: Option<Tls<'l>>,
}

#[derive(Deserialize)]
struct Tls<'l> {
    #[serde(borrow)]
    client_common_name: Option<Cow<'l, str>>,
}

impl Caddy {
    pub(super) fn parse<'l>(&mut self, line: &'l [u8]) -> Result<Option<Entry<'l>>, LineError> {
        let Line { ts, request, duration, status } = serde_json::from_slice(line).map_err(|_| LineError::Shape)?;
        let at = match &ts {
            Instant::Seconds(number) => seconds(*number),
            Instant::Text(text) => iso(text.as_bytes()),
        };
        let took_us = duration.and_then(|took| match took {
            Instant::Seconds(number) => seconds(number),
            Instant::Text(text) => text.strip_suffix('s')?.parse().ok().and_then(seconds),
        });
        let bytes = |text: Cow<'l, str>| match text {
            Cow::Borrowed(text) => Cow::Borrowed(text.as_bytes()),
            Cow::Owned(text) => Cow::Owned(text.into_bytes()),
        };
        let mut fields = Vec::new();
        for (name, values) in request.headers {
            let Ok(name) = HeaderName::from_bytes(name.as_bytes()) else { continue };
            let values = values.into_iter().filter(|value| value != REDACTED);
            fields.extend(values.map(|value| (name.clone(), bytes(value))));
        }
        if !self.mapped.is_empty() {
            mapped_of(&self.mapped, line, &mut fields);
        }
        // A line is written when the request is over.
        let at_us = at.ok_or(LineError::Time)?.saturating_sub(took_us.unwrap_or(0));
        Ok(Some(Entry {
            at_us,
            took_us,
            client: request.remote_ip.and_then(|text| address(text.as_bytes())),
            method: request.method.as_bytes(),
            target: bytes(request.uri),
            host: request.host.filter(|host| !host.is_empty()).map(bytes),
            status: status.filter(|status| *status > 0),
            subject: request.tls.and_then(|tls| tls.client_common_name).map(bytes),
            fields,
            ..Entry::default()
        }))
    }
}

pub(super) fn provides() -> Provides {
    Provides {
        client: true,
        host: true,
        query: true,
        subject: false,
        took: true,
        status: true,
        headers: Headers::Harmless,
        route: false,
        hashed: false,
    }
}

/// What the paths of JSON fields, such as `request.headers.X-Api-Key`, lead to in a line.
pub(super) fn mapped_of(mapped: &[Mapped], line: &[u8], fields: &mut Vec<(HeaderName, Cow<'_, [u8]>)>) {
    let Ok(value) = serde_json::from_slice::<Value>(line) else { return };
    for Mapped { field, header } in mapped {
        let found = field.split('.').try_fold(&value, |value, name| value.get(name));
        let text = match found {
            Some(Value::Array(values)) => values.first().and_then(Value::as_str).map(str::to_owned),
            Some(Value::String(text)) => Some(text.clone()),
            Some(Value::Number(number)) => Some(number.to_string()),
            _ => None,
        };
        let text = text.filter(|text| !matches!(text.as_str(), "" | "-" | REDACTED));
        fields.extend(text.map(|text| (header.clone(), Cow::Owned(text.into_bytes()))));
    }
}
