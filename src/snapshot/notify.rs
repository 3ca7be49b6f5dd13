//! Compiles `[notify.NAME]` (the destinations of quota events) and `notify` of limits.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use aws_lc_rs::hmac::{HMAC_SHA256, Key};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use crate::config;
use crate::config::error::Issue;
use crate::config::gateway::Config;
use crate::config::shorthand::LimitNotify;
use crate::config::spanned::{Spanned, Text};
use crate::http::url::HttpUrl;
use crate::limiter::algorithm::Rule;
use crate::limiter::notify::Notify;
use crate::snapshot::remote_auth::{InternalUpstreams, internal_table};
use crate::snapshot::upstreams;
use crate::snapshot::validator::Validator;
use crate::upstream::connector::{EndpointTls, Protocol};

/// Prefix of a webhook secret in the Standard Webhooks specification.
const SECRET_PREFIX: &str = "whsec_";

/// Allowed length of a webhook secret in bytes, according to the Standard Webhooks specification.
const SECRET_LENGTHS: std::ops::RangeInclusive<usize> = 24..=64;

/// Maximum length in bytes of the key of a Redis stream.
const MAX_STREAM_KEY: usize = 256;

/// Default thresholds in percent, for limits without `at`.
const DEFAULT_THRESHOLDS: [u8; 2] = [80, 100];

/// A destination of quota events.
#[derive(Debug)]
pub enum EventDestination {
    /// A server to which the gateway posts each event.
    Webhook(Box<Webhook>),
    /// A Redis stream in the store.
    Stream(EventStream),
}

/// A webhook.
#[derive(Debug)]
pub struct Webhook {
    /// URL to which the gateway posts the events.
    pub url: HttpUrl,
    /// TLS settings. `None` for plaintext.
    pub tls: Option<EndpointTls>,
    /// Key with which the gateway signs the events.
    pub key: Key,
    /// Maximum time for a request, including its response.
    pub timeout: Duration,
}

/// A Redis stream.
#[derive(Debug)]
pub struct EventStream {
    /// Redis key of the stream.
    pub key: Box<str>,
    /// Approximate maximum number of entries in the stream.
    pub max_length: u64,
}

impl EventDestination {
    /// Return the TLS settings if the destination is a webhook with TLS.
    pub(crate) fn tls_mut(&mut self) -> Option<&mut EndpointTls> {
        match self {
            EventDestination::Webhook(webhook) => webhook.tls.as_mut(),
            EventDestination::Stream(_) => None,
        }
    }
}

/// Return the name of a destination's TLS settings. No upstream may have this name.
pub(crate) fn internal_name(destination: &str) -> String {
    format!("notify.{destination}")
}

/// Compile all destinations.
pub(super) fn destinations(
    config: &Config,
    internal: &mut InternalUpstreams,
    reader: &mut Validator<'_>,
) -> BTreeMap<String, EventDestination> {
    let has_redis = config.store.url.as_ref().is_some_and(|url| url.get_ref() != "memory:");
    let mut compiled = BTreeMap::new();
    for (name, destination) in &config.notify {
        reader.check_name(destination.span(), name);
        if let Some(upstream) = config.upstream.get(&internal_name(name)) {
            let message = format!("the gateway uses the upstream name `{}` for [notify.{name}]", internal_name(name));
            reader.push_issue(Issue::new(upstream.span(), message).with_hint("choose another name for this upstream"));
        }
        let span = destination.span();
        let table = destination.get_ref();
        let one = match (&table.webhook, &table.stream) {
            (Some(url), None) => {
                report_keys(&[("max_length", table.max_length.as_ref().map(|key| key.span()))], "stream", reader);
                webhook(name, table, url, &span, internal, reader).map(Box::new).map(EventDestination::Webhook)
            }
            (None, Some(key)) => {
                let keys = [("secret", &table.secret), ("ca", &table.ca), ("timeout", &table.timeout)];
                let spans = keys.map(|(name, key)| (name, key.as_ref().map(|key| key.span())));
                report_keys(&spans, "webhook", reader);
                stream(table, key, has_redis, reader).map(EventDestination::Stream)
            }
            _ => {
                let issue = Issue::new(span.clone(), "a destination has either `webhook` or `stream`");
                reader.push_missing(issue.with_hint("webhook = \"https://hooks.example.com/limits\""));
                None
            }
        };
        compiled.extend(one.map(|one| (name.clone(), one)));
    }
    compiled
}

/// Report keys that are not valid for this kind of destination.
fn report_keys(keys: &[(&str, Option<Range<usize>>)], owner: &str, reader: &mut Validator<'_>) {
    for (name, span) in keys {
        if let Some(span) = span {
            reader.push_missing(Issue::new(span.clone(), format!("`{name}` requires `{owner}`")));
        }
    }
}

fn webhook(
    name: &str,
    table: &config::tables::Notify,
    text: &Text,
    span: &Range<usize>,
    internal: &mut InternalUpstreams,
    reader: &mut Validator<'_>,
) -> Option<Webhook> {
    let timeout = reader.duration(table.timeout.as_ref(), Duration::from_secs(10));
    let key = secret(table.secret.as_ref(), span, reader);
    if reader.is_unresolved(text) {
        return None;
    }
    let url = reader.url(text, "\"https://hooks.example.com/limits\"", "the signature authenticates the gateway")?;
    let upstream = internal_table(&url, text.span(), table.ca.as_ref(), reader);
    let tls = upstreams::upstream_tls(&internal_name(name), &upstream, Protocol::Http1, reader);
    let endpoint_tls = match &tls {
        Some(tls) => Some(tls.for_server(url.host(), text.span(), reader)?),
        None => None,
    };
    internal.tls.extend(tls);
    Some(Webhook { url, tls: endpoint_tls, key: key?, timeout })
}

fn secret(text: Option<&Text>, span: &Range<usize>, reader: &mut Validator<'_>) -> Option<Key> {
    let text = reader.required(text, span, "secret", "\"${HOOK_SECRET}\"")?;
    let encoded = text.get_ref().strip_prefix(SECRET_PREFIX);
    let bytes = encoded.and_then(|encoded| STANDARD.decode(encoded).ok());
    let bytes = bytes.filter(|bytes| SECRET_LENGTHS.contains(&bytes.len()));
    if bytes.is_none() && !reader.is_unresolved(text) {
        let issue = Issue::new(text.span(), "`secret` must be `whsec_`, followed by 24 to 64 bytes in base64");
        reader.push_issue(issue.with_hint("generate a secret: echo whsec_$(openssl rand -base64 32)"));
    }
    Some(Key::new(HMAC_SHA256, &bytes?))
}

fn stream(
    table: &config::tables::Notify,
    text: &Text,
    has_redis: bool,
    reader: &mut Validator<'_>,
) -> Option<EventStream> {
    let max_length = reader.number(table.max_length.as_ref(), 1..1_000_000_001, 10_000) as u64;
    if !has_redis {
        let issue = Issue::new(text.span(), "`stream` requires a store in Redis");
        reader.push_issue(issue.with_hint("set url = \"redis://…\" in [store], or use `webhook`"));
    }
    let key = text.get_ref().as_str();
    // Reject braces in the key of a stream. The key of the stream is also the hash tag of the keys that claim events,
    // so that all of them are in the same Redis Cluster slot.
    let is_valid = (1..=MAX_STREAM_KEY).contains(&key.len())
        && key.bytes().all(|byte| byte.is_ascii_graphic() && !matches!(byte, b'{' | b'}'));
    if !is_valid && !reader.is_unresolved(text) {
        let issue = Issue::new(text.span(), format!("`{key}` is not a valid key of a stream"));
        reader.push_issue(
            issue.with_hint("use 1 to 256 ASCII characters without spaces and braces: \"sluicegate:events\""),
        );
    }
    is_valid.then(|| EventStream { key: key.into(), max_length })
}

/// Compile `notify` of a limit.
pub(super) fn limit_notify(
    name: &str,
    limit: &config::tables::Limit,
    rule: &Rule,
    config: &Config,
    reader: &mut Validator<'_>,
) -> Option<Arc<Notify>> {
    let written = limit.notify.as_ref()?;
    if rule.is_concurrency() {
        let message = "requests in flight have no window: `notify` cannot be combined with concurrency";
        reader.push_issue(Issue::new(written.span(), message));
    }
    let (to, at) = match written.get_ref() {
        LimitNotify::To(to) => (to, None),
        LimitNotify::Table(table) => {
            let to = reader.required(table.to.as_ref(), &written.span(), "to", "\"billing\"")?;
            (to.get_ref(), table.at.as_deref())
        }
    };
    if !config.notify.contains_key(to) {
        reader.unknown_name(written.span(), "destination", to, config.notify.keys().map(String::as_str));
    }
    let at = at.map_or(DEFAULT_THRESHOLDS.to_vec(), |at| thresholds(at, &written.span(), reader));
    Some(Arc::new(Notify { limit: name.into(), to: to.as_str().into(), at: at.into() }))
}

fn thresholds(at: &[Spanned<i64>], span: &Range<usize>, reader: &mut Validator<'_>) -> Vec<u8> {
    if at.is_empty() {
        let issue = Issue::new(span.clone(), "`at` is empty: there would be no events");
        reader.push_issue(issue.with_hint("remove `at` to use [80, 100]"));
    }
    let mut percentages: Vec<_> = at.iter().map(|at| reader.number(Some(at), 1..101, 100) as u8).collect();
    percentages.sort_unstable();
    percentages.dedup();
    percentages
}
