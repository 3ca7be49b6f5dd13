//! The tables that stand for themselves: server, listeners, log, store, upstreams.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;

use http::Uri;
use redis::io::tcp::TcpSettings;
use redis::{ClientTlsConfig, IntoConnectionInfo, TlsCertificates};
use rustls::ServerConfig;
use tokio::time::Duration;
use toml::Spanned;
use tracing::Level;

use super::reader::Reader;
use super::{Access, Layout, Listener, LogSettings, Route, ServerSettings, StoreSettings};
use crate::config;
use crate::config::error::Issue;
use crate::limit::redis::script::Parts;
use crate::limit::redis::{RedisSettings, advice};
use crate::observe::log::Format;
use crate::tls::{Certificate, server_config};
use crate::upstream::UpstreamSettings;

/// hyper needs room for a head of this size at least.
const SMALLEST_HEAD: usize = 8 << 10;

pub(super) fn server(server: &config::Server, reader: &mut Reader<'_>) -> ServerSettings {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let workers = match reader.number(server.workers.as_ref(), 0..1025, 0) {
        0 => cores,
        workers => workers as usize,
    };
    let layouts = [("per-core", Layout::PerCore), ("shared", Layout::Shared)];
    let max_header_size = reader.size(server.max_header_size.as_ref(), 32 << 10);
    if let Some(text) = server.max_header_size.as_ref().filter(|_| max_header_size < SMALLEST_HEAD) {
        reader.issue(Issue::at(text.span(), "`max_header_size` is too small").hint("8KiB or more"));
    }
    ServerSettings {
        workers,
        layout: reader.choice(server.runtime.as_ref(), Layout::PerCore, &layouts),
        drain_timeout: reader.duration(server.drain_timeout.as_ref(), Duration::from_secs(30)),
        header_timeout: reader.duration(server.header_timeout.as_ref(), Duration::from_secs(10)),
        idle_timeout: reader.duration(server.idle_timeout.as_ref(), Duration::from_secs(75)),
        max_header_size,
        max_headers: reader.number(server.max_headers.as_ref(), 1..10_001, 100) as usize,
        max_uri: reader.size(server.max_uri.as_ref(), 8 << 10),
        http2_max_streams: reader.number(server.http2_max_streams.as_ref(), 1..100_001, 100) as u32,
    }
}

pub(super) fn listeners(listeners: &[Spanned<config::Listener>], reader: &mut Reader<'_>) -> Vec<Listener> {
    if listeners.is_empty() {
        reader.missing("there is no [[listener]]", "add one: [[listener]] with address = \"127.0.0.1:8080\"");
    }
    let mut compiled: Vec<Listener> = Vec::new();
    for listener in listeners {
        let tls = listener.get_ref().tls.as_ref().and_then(|tls| self::tls(tls, reader));
        let address = listener.get_ref().address.as_ref();
        let Some(text) = reader.required(address, &listener.span(), "address", "\"127.0.0.1:8080\"") else { continue };
        match text.get_ref().parse::<SocketAddr>() {
            Ok(address) if address.port() != 0 && compiled.iter().any(|other| other.address == address) => {
                reader.issue(Issue::at(text.span(), format!("a second listener on {address}")));
            }
            Ok(address) => compiled.push(Listener { address, tls }),
            Err(_) => {
                let message = format!("`{}` is not an address with a port", text.get_ref());
                reader.issue(
                    Issue::at(text.span(), message).hint("such as \"127.0.0.1:8080\", \"0.0.0.0:80\" or \"[::]:80\""),
                );
            }
        }
    }
    compiled
}

fn tls(tls: &Spanned<config::ListenerTls>, reader: &mut Reader<'_>) -> Option<Arc<ServerConfig>> {
    let example = "tls.certificates = [{ cert = \"certs/dev.pem\", key = \"certs/dev.key\" }]";
    let mut certificates = Vec::new();
    for written in &tls.get_ref().certificates {
        let config::Certificate { cert, key } = written.get_ref();
        let (Some(cert), Some(key)) = (cert, key) else {
            reader.issue(Issue::at(written.span(), "a certificate needs `cert` and `key`").hint(example));
            continue;
        };
        match Certificate::read(&reader.path(cert.get_ref()), &reader.path(key.get_ref())) {
            Ok(certificate) => certificates.push(certificate),
            Err(error) => {
                let issue = Issue::at(written.span(), error.to_string());
                reader.issue(issue.hint("PEM files; `make certs` makes some for development"));
            }
        }
    }
    if tls.get_ref().certificates.is_empty() {
        reader.issue(Issue::at(tls.span(), "TLS needs a certificate").hint(example));
    }
    match server_config(certificates) {
        Ok(config) => Some(config),
        Err(error) => {
            reader.issue(Issue::at(tls.span(), error.to_string()));
            None
        }
    }
}

pub(super) fn log(log: &config::Log, reader: &mut Reader<'_>) -> LogSettings {
    let by_terminal = if std::io::stderr().is_terminal() { Format::Text } else { Format::Json };
    let levels = [
        ("error", Level::ERROR),
        ("warn", Level::WARN),
        ("info", Level::INFO),
        ("debug", Level::DEBUG),
        ("trace", Level::TRACE),
    ];
    LogSettings {
        format: reader.choice(log.format.as_ref(), by_terminal, &[("text", Format::Text), ("json", Format::Json)]),
        level: reader.choice(log.level.as_ref(), Level::INFO, &levels),
        access: match log.access.as_ref().map(|access| access.get_ref().as_str()) {
            None | Some("stdout") => Access::Stdout,
            Some("off") => Access::Off,
            Some(path) => Access::File(reader.path(path)),
        },
    }
}

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
    if let Some(tls) = store.tls.as_ref().filter(|_| scheme != "rediss") {
        reader.issue(Issue::at(tls.span(), "`tls` goes with a store at `rediss://` only"));
    }
    let Some(text) = &store.url else { return settings };
    match scheme {
        "memory" if url == "memory:" => return settings,
        "redis" | "rediss" | "redis+unix" => {}
        "redis+sentinel" | "redis+cluster" => {
            reader.not_yet(text.span(), &format!("a store at `{scheme}:`"));
            return settings;
        }
        _ => {
            let hint =
                "\"memory:\", \"redis://127.0.0.1:6379/0\", \"rediss://…\" or \"redis+unix:///run/redis.sock?db=0\"";
            reader.issue(Issue::at(text.span(), "this is not a store").hint(hint));
            return settings;
        }
    }
    let certificates = store.tls.as_ref().and_then(|tls| certificates(tls.get_ref(), &tls.span(), reader));
    let client = url.into_connection_info().and_then(|info| {
        // Calls must not wait for the replies to those before.
        let info = info.set_tcp_settings(TcpSettings::default().set_nodelay(true));
        let address = info.addr().to_string();
        let client = match certificates {
            Some(certificates) => redis::Client::build_with_tls(info, certificates)?,
            None => redis::Client::open(info)?,
        };
        Ok((address, client))
    });
    match client {
        Ok((address, client)) => {
            settings.name = format!("redis at {address}");
            let mut scripts: Vec<_> = routes.iter().flat_map(scripts).collect();
            scripts.sort_unstable();
            scripts.dedup();
            settings.redis = Some(RedisSettings { client, prefix, connections, connect_timeout: timeout, scripts });
        }
        Err(error) => {
            let hint = "\"redis://user:password@host:6379/0\"; certificates and keys are PEM files";
            reader.issue(
                Issue::at(text.span(), format!("this Redis cannot be used: {}", advice::of_url(&error))).hint(hint),
            );
        }
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

/// The scripts that a route calls.
fn scripts(route: &Arc<Route>) -> Vec<Parts> {
    let rules = || route.metering.limits.iter().map(|metered| &metered.limit.standard.rule);
    let mut scripts: Vec<_> = rules().map(Parts::of_one).collect();
    if scripts.len() > 1 {
        scripts.push(Parts::of(rules()));
    }
    scripts
}

pub(super) fn upstreams(
    upstreams: &BTreeMap<String, Spanned<config::Upstream>>,
    reader: &mut Reader<'_>,
) -> Vec<UpstreamSettings> {
    let mut compiled = Vec::new();
    for (name, upstream) in upstreams {
        reader.name(upstream.span(), name);
        let place = upstream.span();
        let upstream = upstream.get_ref();
        let (authority, host, port) = match &upstream.servers[..] {
            [] => {
                let issue = Issue::at(place, format!("upstream `{name}` has no servers"));
                reader.issue(issue.hint("servers = [\"http://127.0.0.1:9000\"]"));
                Default::default()
            }
            [server] => address(server, reader).unwrap_or_default(),
            [_, second, ..] => {
                reader.not_yet(second.span(), "more than one server");
                Default::default()
            }
        };
        compiled.push(UpstreamSettings {
            name: name.as_str().into(),
            authority,
            host,
            port,
            connect_timeout: reader.duration(upstream.connect_timeout.as_ref(), Duration::from_secs(2)),
            response_timeout: reader.duration(upstream.response_timeout.as_ref(), Duration::from_secs(30)),
            pool_idle_timeout: reader.duration(upstream.pool_idle_timeout.as_ref(), Duration::from_secs(4)),
        });
    }
    compiled
}

fn address(server: &Spanned<config::UpstreamServer>, reader: &mut Reader<'_>) -> Option<(Box<str>, Box<str>, u16)> {
    let url = &server.get_ref().url;
    let uri = url.parse::<Uri>().ok().filter(|uri| matches!(uri.scheme_str(), Some("http" | "https")));
    let Some((uri, host)) = uri.as_ref().and_then(|uri| Some((uri, uri.host()?))) else {
        let issue = Issue::at(server.span(), format!("`{url}` is not the URL of a server"));
        reader.issue(issue.hint("such as \"http://127.0.0.1:9000\""));
        return None;
    };
    if uri.scheme_str() == Some("https") {
        reader.not_yet(server.span(), "a server at `https:`");
    }
    if !matches!(uri.path(), "" | "/") || uri.query().is_some() {
        let issue = Issue::at(server.span(), "a server is a host and a port: its URL has no path");
        reader.issue(issue.hint("the path of the request is sent as it is"));
    }
    let authority = uri.authority().map_or("", |authority| authority.as_str());
    let host = host.trim_start_matches('[').trim_end_matches(']');
    Some((authority.into(), host.into(), uri.port_u16().unwrap_or(80)))
}
