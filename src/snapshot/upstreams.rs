//! Compiles `[upstream.NAME]`: servers, load balancing, health checks and timeouts.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use http::uri::{Authority, Scheme};
use http::{StatusCode, Uri};

use crate::config;
use crate::config::Text;
use crate::config::error::{Issue, Spanned};
use crate::config::shorthand::HealthCheck;
use crate::snapshot::client_tls;
use crate::snapshot::client_tls::UpstreamTls;
use crate::snapshot::validator::Validator;
use crate::upstream::health::{EjectionSettings, HealthSettings};
use crate::upstream::load_balancer::LoadBalancingPolicy;
use crate::upstream::{Protocol, UpstreamServerSettings, UpstreamSettings};

/// Compile all upstreams. Return TLS settings for the upstreams with servers at `https://` URLs.
pub(super) fn upstreams(
    upstreams: &BTreeMap<String, Spanned<config::tables::Upstream>>,
    reader: &mut Validator<'_>,
) -> (Vec<UpstreamSettings>, Vec<UpstreamTls>) {
    let mut compiled = Vec::new();
    let mut tls_configs = Vec::new();
    for (name, written) in upstreams {
        reader.check_name(written.span(), name);
        let (settings, tls) = upstream(name, written.get_ref(), &written.span(), reader);
        compiled.push(settings);
        tls_configs.extend(tls);
    }
    (compiled, tls_configs)
}

/// Compile one upstream. Return TLS settings if the upstream has servers at `https://` URLs.
pub(super) fn upstream(
    name: &str,
    upstream: &config::tables::Upstream,
    span: &Range<usize>,
    reader: &mut Validator<'_>,
) -> (UpstreamSettings, Option<UpstreamTls>) {
    let protocols = [("http1", Protocol::Http1), ("http2", Protocol::Http2)];
    if upstream.servers.is_empty() {
        let issue = Issue::new(span.clone(), format!("upstream `{name}` has no servers"));
        reader.push_missing(issue.with_hint("servers = [\"http://127.0.0.1:9000\"]"));
    }
    let protocol = reader.one_of(upstream.protocol.as_ref(), Protocol::Http1, &protocols);
    let tls = client_tls::upstream_tls(name, upstream, protocol, reader);
    let servers = servers(&upstream.servers, tls.as_ref(), reader);
    let settings = UpstreamSettings {
        name: name.into(),
        servers,
        protocol,
        connect_timeout: reader.duration(upstream.connect_timeout.as_ref(), Duration::from_secs(2)),
        response_timeout: reader.duration(upstream.response_timeout.as_ref(), Duration::from_secs(30)),
        pool_idle_timeout: reader.duration(upstream.pool_idle_timeout.as_ref(), Duration::from_secs(4)),
        balance: balance(upstream.balance.as_ref(), reader),
        max_requests: reader.number(upstream.max_requests.as_ref(), 0..1_000_001, 0) as usize,
        max_queue: max_queue(upstream, reader),
        health: upstream.health_check.as_ref().map(|check| health(check, reader)),
        ejection: upstream.outlier_detection.as_ref().map(|eject| ejection(eject, reader)),
        slow_start: reader.duration_or_zero(upstream.slow_start.as_ref()),
        retries: reader.number(upstream.retries.as_ref(), 0..11, 0) as u32,
        proxy_protocol: proxy_protocol(upstream, protocol, reader),
        client_cert_header: upstream.client_cert_header.as_ref().is_some_and(|sends| *sends.get_ref()),
    };
    (settings, tls)
}

fn servers(
    written: &[Spanned<config::shorthand::UpstreamServer>],
    tls: Option<&UpstreamTls>,
    reader: &mut Validator<'_>,
) -> Vec<UpstreamServerSettings> {
    let mut servers = Vec::<UpstreamServerSettings>::new();
    let mut spans = Vec::new();
    for one in written {
        let Some(server) = server(one, tls, reader) else { continue };
        let first = servers.iter().position(|other| (&other.host, other.port) == (&server.host, server.port));
        if let Some(first) = first.and_then(|index| spans.get(index)) {
            let issue = Issue::new(one.span(), format!("`{}` is listed twice", one.get_ref().url));
            let line = reader.first_line_hint(first);
            reader.push_issue(
                issue.with_hint(format!("{line}; `weight` gives a server more requests than other servers")),
            );
        }
        servers.push(server);
        spans.push(one.span());
    }
    if let (Some(first), true) =
        (written.first(), servers.iter().all(|server| server.weight == 0) && !servers.is_empty())
    {
        let issue = Issue::new(first.span(), "all servers have weight 0");
        reader.push_issue(issue.with_hint("remove `weight`, or give one server a weight above 0"));
    }
    servers
}

fn server(
    server: &Spanned<config::shorthand::UpstreamServer>,
    tls: Option<&UpstreamTls>,
    reader: &mut Validator<'_>,
) -> Option<UpstreamServerSettings> {
    let url = &server.get_ref().url;
    let uri = url.parse::<Uri>().ok().filter(|uri| matches!(uri.scheme_str(), Some("http" | "https")));
    let Some((uri, host)) = uri.as_ref().and_then(|uri| Some((uri, uri.host()?))) else {
        let issue = Issue::new(server.span(), format!("`{url}` is not the URL of a server"));
        let hint = match url.split_once("://") {
            Some((_, rest)) => format!("use the scheme http or https, such as \"https://{rest}\""),
            None if url.parse::<Authority>().is_ok() => format!("add the scheme: \"http://{url}\", or https for TLS"),
            None => "such as \"http://127.0.0.1:9000\"".to_owned(),
        };
        reader.push_issue(issue.with_hint(hint));
        return None;
    };
    if !matches!(uri.path(), "" | "/") || uri.query().is_some() {
        let issue =
            Issue::new(server.span(), "the URL of a server must consist of scheme, host and port, without a path");
        let end = url.find("://").and_then(|scheme| url[scheme + 3..].find(['/', '?']).map(|end| scheme + 3 + end));
        let server = &url[..end.unwrap_or(url.len())];
        reader.push_issue(
            issue.with_hint(format!("write \"{server}\"; `rewrite` of a route changes the path of a request")),
        );
    }
    let authority = uri.authority().map_or("", |authority| authority.as_str());
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let secure = uri.scheme() == Some(&Scheme::HTTPS);
    let port = uri.port_u16().unwrap_or(if secure { 443 } else { 80 });
    let tls = tls.filter(|_| secure).and_then(|tls| tls.for_server(host, server.span(), reader));
    let weight = reader.number(server.get_ref().weight.as_ref(), 0..1001, 1) as u32;
    Some(UpstreamServerSettings { authority: authority.into(), host: host.into(), port, tls, weight })
}

// Settings of the whole upstream.

/// Compile `balance`.
pub(super) fn balance(text: Option<&Text>, reader: &mut Validator<'_>) -> LoadBalancingPolicy {
    let words = ["least-requests", "round-robin", "random", "hash:HEADER"];
    let Some(text) = text else { return LoadBalancingPolicy::LeastRequests };
    match &**text.get_ref() {
        "least-requests" => LoadBalancingPolicy::LeastRequests,
        "round-robin" => LoadBalancingPolicy::RoundRobin,
        "random" => LoadBalancingPolicy::Random,
        other => match other.strip_prefix("hash:") {
            Some(name) => reader
                .header_name(text.span(), name)
                .map_or(LoadBalancingPolicy::LeastRequests, LoadBalancingPolicy::Hash),
            None => {
                reader.unknown_name(text.span(), "value", other, words.into_iter());
                LoadBalancingPolicy::LeastRequests
            }
        },
    }
}

/// Compile `proxy_protocol`. `proxy_protocol` cannot be combined with HTTP/2, because all clients share one connection.
fn proxy_protocol(upstream: &config::tables::Upstream, protocol: Protocol, reader: &mut Validator<'_>) -> bool {
    let Some(text) = &upstream.proxy_protocol else { return false };
    let sends_header = reader.one_of(Some(text), false, &[("v2", true)]);
    if sends_header && protocol == Protocol::Http2 {
        let issue = Issue::new(
            text.span(),
            "`proxy_protocol` is not possible with HTTP/2: an HTTP/2 connection carries the requests of many clients",
        );
        reader.push_issue(issue.with_hint(
            "use protocol = \"http1\", or remove `proxy_protocol`: X-Forwarded-For contains the client address of \
             each request",
        ));
    }
    sends_header
}

/// Compile `max_queue`, which requires `max_requests`.
pub(super) fn max_queue(upstream: &config::tables::Upstream, reader: &mut Validator<'_>) -> usize {
    let max = reader.number(upstream.max_queue.as_ref(), 0..1_000_001, 0) as usize;
    let has_max_requests = upstream.max_requests.as_ref().is_some_and(|max| *max.get_ref() != 0);
    if let Some(queue) = upstream.max_queue.as_ref().filter(|_| max > 0 && !has_max_requests) {
        let issue = Issue::new(queue.span(), "`max_queue` requires `max_requests`");
        reader.push_missing(issue.with_hint("`max_requests` limits the requests in flight per server"));
    }
    max
}

/// Compile `health_check`.
pub(super) fn health(check: &Spanned<HealthCheck>, reader: &mut Validator<'_>) -> HealthSettings {
    let span = check.span();
    let defaults = config::tables::Health::default();
    let (path, health) = match check.get_ref() {
        HealthCheck::Path(path) => (Some((path, span.clone())), &defaults),
        HealthCheck::Table(health) => {
            let path = reader.required(health.path.as_ref(), &span, "path", "\"/healthz\"");
            (path.map(|path| (path.get_ref(), path.span())), health)
        }
    };
    let parsed = path.as_ref().and_then(|(path, _)| path.starts_with('/').then(|| path.parse().ok())?);
    if let (Some((path, span)), None) = (path, &parsed) {
        let issue = Issue::new(span, format!("`{path}` is not a valid path"));
        reader.push_issue(issue.with_hint("such as \"/healthz\""));
    }
    let mut status = Vec::new();
    for written in health.status.iter().flatten() {
        let found = u16::try_from(*written.get_ref()).ok().and_then(|status| StatusCode::from_u16(status).ok());
        match found.filter(|status| (200..600).contains(&status.as_u16())) {
            Some(found) => status.push(found),
            None => {
                let issue = Issue::new(written.span(), format!("{} is not a response status", written.get_ref()));
                reader.push_issue(issue.with_hint("from 200 to 599"));
            }
        }
    }
    if health.status.as_ref().is_some_and(Vec::is_empty) {
        let issue = Issue::new(span.clone(), "`status` is empty: no server would be healthy");
        reader.push_issue(issue.with_hint("leave it out for 200"));
    }
    if health.status.is_none() {
        status.push(StatusCode::OK);
    }
    HealthSettings {
        path: parsed.unwrap_or(http::uri::PathAndQuery::from_static("/")),
        expected_statuses: status,
        interval: reader.duration(health.interval.as_ref(), Duration::from_secs(5)),
        timeout: reader.duration(health.timeout.as_ref(), Duration::from_secs(1)),
        unhealthy_after: reader.number(health.unhealthy_threshold.as_ref(), 1..101, 3) as u32,
        healthy_after: reader.number(health.healthy_threshold.as_ref(), 1..101, 2) as u32,
    }
}

/// Compile `outlier_detection`.
pub(super) fn ejection(eject: &Spanned<config::tables::Eject>, reader: &mut Validator<'_>) -> EjectionSettings {
    let eject = eject.get_ref();
    EjectionSettings {
        consecutive_errors: reader.number(eject.consecutive_errors.as_ref(), 1..1001, 5) as u32,
        base_ejection_time: reader.duration(eject.base_ejection_time.as_ref(), Duration::from_secs(10)),
    }
}
