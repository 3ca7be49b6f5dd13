//! `[upstream.NAME]`: the servers, and how to speak with them.

use std::collections::BTreeMap;

use crate::config::Spanned;
use http::Uri;
use http::uri::Scheme;
use tokio::time::Duration;

use super::client_tls::{self, UpstreamTls};
use super::fleets;
use super::reader::Validator;
use crate::config;
use crate::config::error::Issue;
use crate::upstream::Protocol;
use crate::upstream::settings::{UpstreamServerSettings, UpstreamSettings};

pub(super) fn upstreams(
    upstreams: &BTreeMap<String, Spanned<config::Upstream>>,
    reader: &mut Validator<'_>,
) -> (Vec<UpstreamSettings>, Vec<UpstreamTls>) {
    let protocols = [("http1", Protocol::Http1), ("http2", Protocol::Http2)];
    let (mut compiled, mut tls_configs) = (Vec::new(), Vec::new());
    for (name, upstream) in upstreams {
        reader.check_name(upstream.span(), name);
        let span = upstream.span();
        let upstream = upstream.get_ref();
        if upstream.servers.is_empty() {
            let issue = Issue::new(span, format!("upstream `{name}` has no servers"));
            reader.push_issue(issue.with_hint("servers = [\"http://127.0.0.1:9000\"]"));
        }
        let protocol = reader.one_of(upstream.protocol.as_ref(), Protocol::Http1, &protocols);
        let tls = client_tls::upstream_tls(name, upstream, protocol, reader);
        let servers = servers(&upstream.servers, tls.as_ref(), reader);
        compiled.push(UpstreamSettings {
            name: name.as_str().into(),
            servers,
            protocol,
            connect_timeout: reader.duration(upstream.connect_timeout.as_ref(), Duration::from_secs(2)),
            response_timeout: reader.duration(upstream.response_timeout.as_ref(), Duration::from_secs(30)),
            pool_idle_timeout: reader.duration(upstream.pool_idle_timeout.as_ref(), Duration::from_secs(4)),
            balance: fleets::balance(upstream.balance.as_ref(), reader),
            max_requests: reader.number(upstream.max_requests.as_ref(), 0..1_000_001, 0) as usize,
            max_queue: fleets::max_queue(upstream, reader),
            health: upstream.health_check.as_ref().map(|health| fleets::health(health, reader)),
            ejection: upstream.outlier_detection.as_ref().map(|eject| fleets::ejection(eject, reader)),
            slow_start: fleets::slow_start(upstream.slow_start.as_ref(), reader),
            retries: reader.number(upstream.retries.as_ref(), 0..11, 0) as u32,
        });
        tls_configs.extend(tls);
    }
    (compiled, tls_configs)
}

fn servers(
    written: &[Spanned<config::UpstreamServer>],
    tls: Option<&UpstreamTls>,
    reader: &mut Validator<'_>,
) -> Vec<UpstreamServerSettings> {
    let mut servers = Vec::<UpstreamServerSettings>::new();
    for one in written {
        let Some(server) = server(one, tls, reader) else { continue };
        if servers.iter().any(|other| (&other.host, other.port) == (&server.host, server.port)) {
            let issue = Issue::new(one.span(), format!("`{}` is listed twice", one.get_ref().url));
            reader.push_issue(issue.with_hint("`weight` gives a server more requests than others"));
        }
        servers.push(server);
    }
    if let (Some(first), true) =
        (written.first(), servers.iter().all(|server| server.weight == 0) && !servers.is_empty())
    {
        let issue = Issue::new(first.span(), "no server takes requests: each has weight 0");
        reader.push_issue(issue.with_hint("leave `weight` out, or give one more than 0"));
    }
    servers
}

fn server(
    server: &Spanned<config::UpstreamServer>,
    tls: Option<&UpstreamTls>,
    reader: &mut Validator<'_>,
) -> Option<UpstreamServerSettings> {
    let url = &server.get_ref().url;
    let uri = url.parse::<Uri>().ok().filter(|uri| matches!(uri.scheme_str(), Some("http" | "https")));
    let Some((uri, host)) = uri.as_ref().and_then(|uri| Some((uri, uri.host()?))) else {
        let issue = Issue::new(server.span(), format!("`{url}` is not the URL of a server"));
        reader.push_issue(issue.with_hint("such as \"http://127.0.0.1:9000\""));
        return None;
    };
    if !matches!(uri.path(), "" | "/") || uri.query().is_some() {
        let issue = Issue::new(server.span(), "a server is a host and a port: its URL has no path");
        reader.push_issue(issue.with_hint("the path of the request is sent as it is"));
    }
    let authority = uri.authority().map_or("", |authority| authority.as_str());
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let secure = uri.scheme() == Some(&Scheme::HTTPS);
    let port = uri.port_u16().unwrap_or(if secure { 443 } else { 80 });
    let tls = tls.filter(|_| secure).and_then(|tls| tls.for_server(host, server.span(), reader));
    let weight = reader.number(server.get_ref().weight.as_ref(), 0..1001, 1) as u32;
    Some(UpstreamServerSettings { authority: authority.into(), host: host.into(), port, tls, weight })
}
