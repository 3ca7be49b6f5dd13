//! The table `[store]`.

mod place;

use std::ops::Range;
use std::sync::Arc;

use redis::{ClientTlsConfig, TlsCertificates};
use tokio::time::Duration;

use super::reader::Reader;
use super::{Route, StoreSettings};
use crate::config;
use crate::config::error::Issue;
use crate::limit::redis::RedisSettings;
use crate::limit::redis::script::Parts;

pub(super) fn instances(store: &config::Store, reader: &mut Reader<'_>) -> u64 {
    reader.number(store.instances.as_ref(), 1..10_001, 1) as u64
}

pub(super) fn store(store: &config::Store, routes: &[Arc<Route>], reader: &mut Reader<'_>) -> StoreSettings {
    let timeout = reader.duration(store.timeout.as_ref(), Duration::from_millis(50));
    let connections = reader.number(store.connections.as_ref(), 1..9, 1) as u32;
    let memory_identities = reader.number(store.memory_identities.as_ref(), 1..1 << 40, 1_000_000) as usize;
    let prefix = store.prefix.as_ref().map_or("rl", |prefix| prefix.get_ref()).to_owned();
    if let Some(text) = store.prefix.as_ref().filter(|_| prefix.is_empty() || prefix.contains(['{', '}'])) {
        // Braces would move the cluster slot away from the identity.
        reader.issue(Issue::at(text.span(), "`prefix` must not be empty and must not have braces"));
    }
    let denial_cache = reader.number(store.denial_cache.as_ref(), 0..1 << 32, 100_000) as usize;
    let name = "memory".to_owned();
    let mut settings = StoreSettings { redis: None, name, timeout, denial_cache, memory_identities };
    let url = store.url.as_ref().map_or("memory:", |url| url.get_ref());
    let scheme = url.split_once(':').map_or("", |(scheme, _)| scheme);
    let tls = store.tls.as_ref().filter(|tls| {
        let used = scheme.starts_with("rediss");
        if !used {
            let issue = Issue::at(tls.span(), "`tls` goes with a store at `rediss://` only");
            reader.issue(issue.hint("that is, also at `rediss+sentinel://` and `rediss+cluster://`"));
        }
        used
    });
    let Some(text) = store.url.as_ref().filter(|_| url != "memory:") else { return settings };
    let certificates = tls.and_then(|tls| certificates(tls.get_ref(), &tls.span(), reader));
    match place::read(url, certificates.as_ref()) {
        Ok((name, servers)) => {
            settings.name = name;
            let limits = routes.iter().flat_map(|route| &route.metering.limits);
            let algorithms = Parts::of(limits.map(|metered| &metered.limit.standard.rule));
            let redis = RedisSettings { prefix, connections, connect_timeout: timeout, algorithms };
            settings.redis = Some((servers, redis));
        }
        Err(place::Wrong { what, hint }) => reader.issue(Issue::at(text.span(), what).hint(hint)),
    }
    settings
}

/// Whom to believe at the other end, and who we are.
fn certificates(tls: &config::ClientTls, place: &Range<usize>, reader: &mut Reader<'_>) -> Option<TlsCertificates> {
    let mut read = |text: &config::Text| {
        let path = reader.path(text.get_ref());
        let failed = |error| Issue::at(text.span(), format!("{} cannot be read: {error}", path.display()));
        std::fs::read(&path).map_err(|error| reader.issue(failed(error))).ok()
    };
    let root_cert = tls.ca.as_ref().and_then(&mut read);
    let pair = (tls.cert.as_ref().map(&mut read), tls.key.as_ref().map(&mut read));
    let client_tls = match pair {
        (Some(cert), Some(key)) => {
            cert.zip(key).map(|(client_cert, client_key)| ClientTlsConfig { client_cert, client_key })
        }
        (None, None) => None,
        (Some(_), None) | (None, Some(_)) => {
            reader.issue(Issue::at(place.clone(), "a client certificate needs `cert` and `key`"));
            None
        }
    };
    Some(TlsCertificates { client_tls, root_cert })
}
