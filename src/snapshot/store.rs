//! Compiles `[store]`: the store URL, TLS, timeouts and capacities.

use std::sync::Arc;

use redis::{ClientTlsConfig, TlsCertificates};

use crate::config;
use crate::config::error::{Issue, Spanned};
use crate::limiter::redis::RedisSettings;
use crate::limiter::redis::script::AlgorithmSet;
use crate::limiter::redis::url::{UrlError, parse};
use crate::snapshot::StoreSettings;
use crate::snapshot::client_tls::{TlsFiles, certificate};
use crate::snapshot::routes::Route;
use crate::snapshot::validator::Validator;

/// Compile `gateway_count`.
pub(super) fn gateway_count(store: &config::Store, reader: &mut Validator<'_>) -> u64 {
    reader.number(store.gateway_count.as_ref(), 1..10_001, 1) as u64
}

/// Compile `[store]`. The routes determine which algorithms the scripts need.
pub(super) fn store(store: &config::Store, routes: &[Arc<Route>], reader: &mut Validator<'_>) -> StoreSettings {
    let defaults = RedisSettings::default();
    let timeout = reader.duration(store.timeout.as_ref(), defaults.timeout);
    let connect_timeout = reader.duration(store.connect_timeout.as_ref(), defaults.connect_timeout).max(timeout);
    let connections = reader.number(store.connections.as_ref(), 1..9, defaults.connections.into()) as u32;
    let max_memory_states = reader.number(store.max_memory_states.as_ref(), 1..1 << 40, 1_000_000) as usize;
    let prefix = store.prefix.as_ref().map_or(&*defaults.prefix, |prefix| prefix.get_ref()).to_owned();
    if let Some(text) = store.prefix.as_ref().filter(|_| prefix.is_empty() || prefix.contains(['{', '}'])) {
        // Reject braces in the prefix, because they would change the hash tag, which must be the identity.
        reader.push_issue(Issue::new(text.span(), "`prefix` must not be empty and must not contain braces"));
    }
    let denial_cache = reader.number(store.denial_cache.as_ref(), 0..1 << 32, 100_000) as usize;
    let name = "memory".to_owned();
    let mut settings = StoreSettings { redis: None, name, timeout, denial_cache, max_memory_states };
    let url = store.url.as_ref().map_or("memory:", |url| url.get_ref());
    let scheme = url.split_once(':').map_or("", |(scheme, _)| scheme);
    let tls = store.tls.as_ref().filter(|tls| {
        let is_unknown = scheme.is_empty() && store.url.as_ref().is_some_and(|url| reader.is_unresolved(url));
        let used = scheme.starts_with("rediss") || is_unknown;
        if !used {
            let issue = Issue::new(tls.span(), "`tls` is valid only for a store at `rediss://`");
            reader
                .push_missing(issue.with_hint("`tls` is also valid with `rediss+sentinel://` and `rediss+cluster://`"));
        }
        used
    });
    let Some(text) = store.url.as_ref().filter(|_| url != "memory:") else { return settings };
    let certificates = tls.map(|tls| tls_certificates(tls, reader));
    if reader.is_unresolved(text) && !url.contains("://") {
        // Without an error, only `check --offline` reaches this code, and it needs no store.
        settings.name = "unknown, because the URL is not set".to_owned();
        return settings;
    }
    match parse(url, certificates.as_ref()) {
        Ok((name, servers)) => {
            settings.name = name;
            let limits = routes.iter().flat_map(|route| &route.rate_limits.limits);
            let counts_usage = limits.clone().any(|route_limit| route_limit.limit.usage.is_some());
            let algorithms = AlgorithmSet::for_rules(limits.map(|route_limit| &route_limit.limit.default_variant.rule));
            let algorithms = algorithms.with_usage(counts_usage);
            let redis = RedisSettings { prefix, connections, timeout, connect_timeout, algorithms, ..defaults };
            settings.redis = Some((servers, redis));
        }
        Err(UrlError { message: what, hint }) => reader.push_issue(Issue::new(text.span(), what).with_hint(hint)),
    }
    settings
}

/// Compile the trust roots and the client certificate for the store.
fn tls_certificates(tls: &Spanned<config::StoreTls>, reader: &mut Validator<'_>) -> TlsCertificates {
    let config::StoreTls { ca, cert, key } = tls.get_ref();
    let TlsFiles { ca, gateway_certificate: own } =
        TlsFiles::read(ca.as_ref(), [cert.as_ref(), key.as_ref()], tls.span(), reader);
    if let (Some([cert, key]), Some(text)) = (&own, &tls.get_ref().cert)
        && let Err(issue) = certificate(cert, key, text.span())
    {
        reader.push_issue(issue);
    }
    let client_tls = own.map(|[cert, key]| ClientTlsConfig { client_cert: cert.content, client_key: key.content });
    TlsCertificates { client_tls, root_cert: ca.map(|ca| ca.content) }
}
