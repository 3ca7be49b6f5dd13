//! Compiles `[upstream.NAME]`: servers, TLS, load balancing, health checks and timeouts.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::{HeaderName, HeaderValue, StatusCode};
use rustls::pki_types::ServerName;
use x509_parser::parse_x509_certificate;

use crate::config;
use crate::config::error::Issue;
use crate::config::shorthand::{HealthCheck, UpstreamServer};
use crate::config::sources::FileSnapshot;
use crate::config::spanned::{Spanned, Text};
use crate::http::aws_signature::AwsSigner;
use crate::http::google_account::{CLOUD_PLATFORM, ServiceAccount};
use crate::http::target::strip_port;
use crate::http::url::{HttpUrl, UrlError};
use crate::snapshot::validator::Validator;
use crate::tls::{Certificate, TlsError, TrustRoots};
use crate::upstream::connector::{EndpointTls, Protocol, ServerTrust, UpstreamTlsConfig};
use crate::upstream::endpoint::hash;
use crate::upstream::settings::{
    AddressFamilies, EjectionSettings, GoogleAccess, HashSource, HealthSettings, HostPolicy, LoadBalancingPolicy,
    StickyCookie, UpstreamServerSettings, UpstreamSettings,
};

/// Compile all upstreams. Also return the TLS settings of upstreams that have servers with `https://` URLs.
pub(super) fn upstreams(
    upstreams: &BTreeMap<String, Spanned<config::tables::Upstream>>,
    secret: Option<&Text>,
    reader: &mut Validator<'_>,
) -> (Vec<UpstreamSettings>, Vec<UpstreamTls>) {
    let mut compiled = Vec::new();
    let mut tls_configs = Vec::new();
    for (name, written) in upstreams {
        reader.check_name(written.span(), name);
        let (settings, tls) = upstream(name, written.get_ref(), &written.span(), secret, reader);
        compiled.push(settings);
        tls_configs.extend(tls);
    }
    (compiled, tls_configs)
}

/// Compile one upstream. Also return its TLS settings if it has servers with `https://` URLs.
pub(super) fn upstream(
    name: &str,
    upstream: &config::tables::Upstream,
    span: &Range<usize>,
    secret: Option<&Text>,
    reader: &mut Validator<'_>,
) -> (UpstreamSettings, Option<UpstreamTls>) {
    let protocols = [("http1", Protocol::Http1), ("http2", Protocol::Http2)];
    if upstream.servers.is_empty() {
        let issue = Issue::new(span.clone(), format!("upstream `{name}` has no servers"));
        reader.push_missing(issue.with_hint("servers = [\"http://127.0.0.1:9000\"]"));
    }
    let protocol = reader.one_of(upstream.protocol.as_ref(), Protocol::Http1, &protocols);
    let tls = upstream_tls(name, upstream, protocol, reader);
    let servers = servers(&upstream.servers, tls.as_ref(), reader);
    let settings = UpstreamSettings {
        name: name.into(),
        servers,
        protocol,
        resolve: reader.one_of(
            upstream.resolve.as_ref(),
            AddressFamilies::Both,
            &[("ipv4", AddressFamilies::Ipv4), ("ipv6", AddressFamilies::Ipv6), ("both", AddressFamilies::Both)],
        ),
        host: upstream.host.as_ref().map_or(HostPolicy::Client, |text| host_policy(text, reader)),
        connect_timeout: reader.duration(upstream.connect_timeout.as_ref(), Duration::from_secs(2)),
        response_timeout: reader.duration(upstream.response_timeout.as_ref(), Duration::from_secs(30)),
        pool_idle_timeout: reader.duration(upstream.pool_idle_timeout.as_ref(), Duration::from_secs(4)),
        balance: balance(name, upstream, secret, reader),
        max_requests: reader.number(upstream.max_requests.as_ref(), 0..1_000_001, 0) as usize,
        max_queue: max_queue(upstream, reader),
        health: upstream.health_check.as_ref().map(|check| health(check, reader)),
        ejection: upstream.outlier_detection.as_ref().map(|eject| ejection(eject, reader)),
        slow_start: reader.duration_or_zero(upstream.slow_start.as_ref()),
        retries: reader.number(upstream.retries.as_ref(), 0..11, 0) as u32,
        proxy_protocol: proxy_protocol(upstream, protocol, reader),
        client_cert_header: upstream.client_cert_header.as_ref().is_some_and(|sends| *sends.get_ref()),
        includes_usage: upstream.include_usage.as_ref().is_none_or(|includes| *includes.get_ref()),
        aws: upstream.aws.as_ref().and_then(|aws| aws_signer(aws, reader)),
        google: upstream.google.as_ref().and_then(|google| google_access(name, google, upstream, reader)),
        socket_buffers: None,
    };
    if let Some(aws) = &upstream.aws {
        let is_fixed = match &settings.host {
            HostPolicy::Client => false,
            HostPolicy::Server => match &settings.servers[..] {
                [] => true,
                // The targets of an SRV record have other names.
                [server] => !server.is_srv,
                [_, _, ..] => false,
            },
            HostPolicy::Name(_) => true,
        };
        if !is_fixed {
            let issue = Issue::new(aws.span(), "`aws` signs the `Host` of requests, so it must be known in advance");
            reader.push_missing(issue.with_hint("set host = \"server\" and a single server, or a name in `host`"));
        }
    }
    (settings, tls)
}

/// Compile `google`.
fn google_access(
    name: &str,
    written: &Spanned<config::tables::UpstreamGoogle>,
    upstream: &config::tables::Upstream,
    reader: &mut Validator<'_>,
) -> Option<GoogleAccess> {
    let (span, google) = (written.span(), written.get_ref());
    if let Some(aws) = &upstream.aws {
        reader.push_issue(Issue::new(aws.span(), "`aws` and `google` cannot be combined"));
    }
    for server in &upstream.servers {
        let url = &server.get_ref().url;
        let is_safe = match srv_name(url) {
            Some(_) => url.starts_with(SRV_HTTPS),
            None => url.parse::<HttpUrl>().map_or(true, |url| url.is_https() || url.is_loopback()),
        };
        if !is_safe {
            let issue = Issue::new(server.span(), "an access token would be sent to this server without TLS");
            reader.push_issue(issue.with_hint("write https://"));
        }
    }
    let text = reader.required(google.service_account.as_ref(), &span, "service_account", "\"account.json\"")?;
    let scope = google.scope.as_ref().map_or(CLOUD_PLATFORM, |scope| scope.get_ref());
    let path = reader.resolve_path(text);
    let parsed = match FileSnapshot::read(&path) {
        Ok(file) => ServiceAccount::parse(&file.content, scope).map_err(|error| error.to_string()),
        Err(error) => Err(format!("cannot be read: {error}")),
    };
    let account = match parsed {
        Ok(account) => account,
        Err(error) => {
            let issue = Issue::new(text.span(), format!("{}: {error}", path.display()));
            reader.push_issue(issue.with_hint(
                "create a JSON key of the service account: gcloud iam service-accounts keys create FILE \
                 --iam-account=ACCOUNT",
            ));
            return None;
        }
    };
    let server = UpstreamServer { url: account.token_url.origin(), weight: None };
    let table = config::tables::Upstream {
        servers: vec![Spanned::new(text.span(), server)],
        ..config::tables::Upstream::default()
    };
    let tls = match upstream_tls(name, &table, Protocol::Http1, reader) {
        Some(tls) => Some(tls.for_server(account.token_url.host(), text.span(), reader)?),
        None => None,
    };
    Some(GoogleAccess { account, tls })
}

/// Compile `aws`.
fn aws_signer(written: &Spanned<config::tables::UpstreamAws>, reader: &mut Validator<'_>) -> Option<AwsSigner> {
    let (span, aws) = (written.span(), written.get_ref());
    let region = reader.required(aws.region.as_ref(), &span, "region", "\"us-east-1\"");
    let access_key = reader.required(aws.access_key.as_ref(), &span, "access_key", "\"${AWS_ACCESS_KEY_ID}\"");
    let secret_key = reader.required(aws.secret_key.as_ref(), &span, "secret_key", "\"${AWS_SECRET_ACCESS_KEY}\"");
    let mut is_valid = true;
    for text in [region, access_key, aws.service.as_ref(), aws.session_token.as_ref()].into_iter().flatten() {
        let value = text.get_ref();
        if value.is_empty() || !value.bytes().all(|byte| byte.is_ascii_graphic()) {
            let issue = Issue::new(text.span(), "this value must be ASCII characters without spaces");
            reader.push_issue(issue.with_hint("copy it as AWS shows it"));
            is_valid = false;
        }
    }
    let session_token = aws.session_token.as_ref().and_then(|token| {
        let mut value = HeaderValue::from_str(token.get_ref()).ok()?;
        value.set_sensitive(true);
        Some(value)
    });
    let (region, access_key, secret_key) = (region?, access_key?, secret_key?);
    is_valid.then(|| AwsSigner {
        access_key: access_key.get_ref().as_str().into(),
        secret_key: secret_key.get_ref().as_str().into(),
        session_token,
        region: region.get_ref().as_str().into(),
        service: aws.service.as_ref().map_or("bedrock", |service| service.get_ref()).into(),
    })
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
    let written = Some(&server.get_ref().url).filter(|url| !url.is_empty());
    if let Some(name) = written.and_then(|url| srv_name(url)) {
        return srv_server(name, server, tls, reader);
    }
    let url =
        match HttpUrl::parse_origin(reader.required(written, &server.span(), "url", "\"http://127.0.0.1:9000\"")?) {
            Ok(url) => url,
            Err(error) => {
                let credentials =
                    "send them with `request_headers` of the route: set = { authorization = \"Basic …\" }";
                let hint = error.hint("\"http://127.0.0.1:9000\"", credentials);
                let hint = match &error {
                    UrlError::NotAnOrigin { .. } => {
                        format!("{hint}; `rewrite` of a route changes the path of a request")
                    }
                    _ => hint,
                };
                reader.push_issue(Issue::new(server.span(), error.to_string()).with_hint(hint));
                return None;
            }
        };
    let tls = tls.filter(|_| url.is_https()).and_then(|tls| tls.for_server(url.host(), server.span(), reader));
    let weight = reader.number(server.get_ref().weight.as_ref(), 0..1001, 1) as u32;
    let (authority, host) = (url.authority().into(), url.host().into());
    Some(UpstreamServerSettings { authority, host, port: url.port(), tls, weight, is_srv: false })
}

/// The scheme of names of SRV records whose targets use TLS.
const SRV_HTTPS: &str = "srv+https:";

/// Return the name in `srv:NAME` or `srv+https:NAME`.
fn srv_name(url: &str) -> Option<&str> {
    url.strip_prefix("srv:").or_else(|| url.strip_prefix(SRV_HTTPS))
}

/// Compile a server whose hosts and ports come from an SRV record.
fn srv_server(
    name: &str,
    server: &Spanned<config::shorthand::UpstreamServer>,
    tls: Option<&UpstreamTls>,
    reader: &mut Validator<'_>,
) -> Option<UpstreamServerSettings> {
    let is_label = |label: &str| {
        let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        (1..64).contains(&label.len()) && label.bytes().all(is_valid)
    };
    let labels: Vec<_> = name.strip_suffix('.').unwrap_or(name).split('.').collect();
    if name.len() > 253 || !labels.iter().all(|label| is_label(label)) || labels.iter().all(|one| one.starts_with('_'))
    {
        let issue = Issue::new(server.span(), format!("`{name}` is not the name of an SRV record"));
        reader.push_issue(issue.with_hint("such as \"srv:_http._tcp.api.example.com\", without a port or a path"));
        return None;
    }
    let is_https = server.get_ref().url.starts_with(SRV_HTTPS);
    if let Some(tls) = tls.filter(|tls| is_https && tls.server_name.is_none()) {
        // DNS without DNSSEC may name any target, so the certificate must contain a name from the configuration.
        let message = format!("`{}`: servers from SRV records with TLS require `tls.server_name`", tls.name);
        let issue = Issue::new(server.span(), message);
        reader.push_missing(issue.with_hint("tls.server_name = \"api.example.com\", the name in the certificates"));
        return None;
    }
    let tls = tls.filter(|_| is_https).and_then(|tls| tls.for_server(name, server.span(), reader));
    let weight = reader.number(server.get_ref().weight.as_ref(), 0..1001, 1) as u32;
    // The authority is `Host` of requests without a host. Service and protocol are not a part of it.
    let host: Vec<_> = labels.into_iter().skip_while(|label| label.starts_with('_')).collect();
    Some(UpstreamServerSettings {
        authority: host.join(".").into(),
        host: name.into(),
        port: 0,
        tls,
        weight,
        is_srv: true,
    })
}

// Settings that apply to all servers of an upstream.

/// Compile `balance`, the load balancing policy.
fn balance(
    name: &str,
    upstream: &config::tables::Upstream,
    secret: Option<&Text>,
    reader: &mut Validator<'_>,
) -> LoadBalancingPolicy {
    let words = ["least-requests", "round-robin", "random", "hash:HEADER", "hash:cookie:NAME", "sticky"];
    let is_sticky = upstream.balance.as_ref().is_some_and(|text| text.get_ref() == "sticky");
    if let Some(cookie) = upstream.sticky_cookie.as_ref().filter(|_| !is_sticky) {
        reader.push_missing(Issue::new(cookie.span(), "`sticky_cookie` requires `balance = \"sticky\"`"));
    }
    let Some(text) = &upstream.balance else { return LoadBalancingPolicy::LeastRequests };
    match &**text.get_ref() {
        "sticky" => LoadBalancingPolicy::Sticky(sticky_cookie(name, upstream, text, secret, reader)),
        "least-requests" => LoadBalancingPolicy::LeastRequests,
        "round-robin" => LoadBalancingPolicy::RoundRobin,
        "random" => LoadBalancingPolicy::Random,
        other => match other.strip_prefix("hash:") {
            Some(source) if source.starts_with("cookie:") => {
                LoadBalancingPolicy::Hash(HashSource::Cookie(cookie_name(&source["cookie:".len()..], text, reader)))
            }
            Some(name) => reader
                .header_name(text.span(), name)
                .map_or(LoadBalancingPolicy::LeastRequests, |name| LoadBalancingPolicy::Hash(HashSource::Header(name))),
            None => {
                reader.unknown_name(text.span(), "value", other, words.into_iter());
                LoadBalancingPolicy::LeastRequests
            }
        },
    }
}

/// Check the name of a cookie.
fn cookie_name(name: &str, text: &Text, reader: &mut Validator<'_>) -> Box<str> {
    // The name of a cookie is a token (RFC 6265 §4.1.1), as the name of a header.
    if HeaderName::from_bytes(name.as_bytes()).is_err() {
        let issue = Issue::new(text.span(), format!("`{name}` is not the name of a cookie"));
        reader.push_issue(issue.with_hint("such as \"session\""));
    }
    name.into()
}

/// Compile `sticky_cookie`. `balance` is the text that requires it.
fn sticky_cookie(
    name: &str,
    upstream: &config::tables::Upstream,
    balance: &Text,
    secret: Option<&Text>,
    reader: &mut Validator<'_>,
) -> StickyCookie {
    if secret.is_none_or(|secret| secret.get_ref().is_empty()) {
        let issue =
            Issue::new(balance.span(), "`balance = \"sticky\"` requires `store.secret`, which signs the cookies");
        reader.push_missing(issue.with_hint("[store] secret = \"…\", the same on all gateways: openssl rand -hex 32"));
    }
    let defaults = config::tables::StickyCookie::default();
    let written = upstream.sticky_cookie.as_ref().map_or(&defaults, |cookie| cookie.get_ref());
    let default_name = format!("sticky-{:08x}", hash(name.as_bytes()) as u32);
    let cookie = written.name.as_ref().map_or(default_name.into(), |text| cookie_name(text.get_ref(), text, reader));
    let mut attributes = String::new();
    for (attribute, text) in [("Path", &written.path), ("Domain", &written.domain)] {
        let value = match text {
            Some(text) => {
                if text.get_ref().is_empty()
                    || text.get_ref().bytes().any(|byte| byte == b';' || !byte.is_ascii_graphic())
                {
                    let issue =
                        Issue::new(text.span(), format!("`{}` is not an attribute of a cookie", text.get_ref()));
                    reader.push_issue(issue.with_hint("path = \"/app\", domain = \"example.com\""));
                }
                text.get_ref()
            }
            None if attribute == "Path" => "/",
            None => continue,
        };
        attributes += &format!("; {attribute}={value}");
    }
    let max_age = reader.duration_or_zero(written.max_age.as_ref()).as_secs();
    if max_age > 0 {
        attributes += &format!("; Max-Age={max_age}");
    }
    let is_secure = written.secure.as_ref().is_some_and(|secure| *secure.get_ref());
    attributes += if is_secure { "; Secure; HttpOnly" } else { "; HttpOnly" };
    let same_sites = [("strict", "; SameSite=Strict"), ("lax", "; SameSite=Lax"), ("none", "; SameSite=None")];
    let same_site = reader.one_of(written.same_site.as_ref(), "; SameSite=Lax", &same_sites);
    if let Some(text) = written.same_site.as_ref().filter(|_| same_site.ends_with("None") && !is_secure) {
        let issue = Issue::new(text.span(), "browsers reject a cookie with `same_site = \"none\"` that is not secure");
        reader.push_issue(issue.with_hint("add secure = true"));
    }
    attributes += same_site;
    StickyCookie::new(&cookie, &attributes, secret.map_or("", |secret| secret.get_ref()), name)
}

/// Compile `tls.verify` and `tls.fingerprint`. Return `None` if a CA verifies the servers.
fn unusual_trust(tls: &config::tables::UpstreamTls, reader: &mut Validator<'_>) -> Option<ServerTrust> {
    let unverified = tls.verify.as_ref().filter(|verify| !*verify.get_ref());
    let pins = tls.fingerprint.as_deref().filter(|pins| !pins.is_empty());
    let span = unverified.map(|verify| verify.span()).or_else(|| Some(pins?.first()?.span()))?;
    if unverified.is_some() && pins.is_some() || tls.ca.is_some() {
        let issue = Issue::new(span, "`ca`, `fingerprint` and `verify = false` cannot be combined");
        reader.push_issue(issue.with_hint("keep one of them"));
    }
    let Some(pins) = pins else { return Some(ServerTrust::Anything) };
    let mut fingerprints = Vec::new();
    for text in pins {
        match fingerprint(text.get_ref()) {
            Some(fingerprint) => fingerprints.push(fingerprint),
            None => {
                let issue = Issue::new(text.span(), format!("`{}` is not a SHA-256 fingerprint", text.get_ref()));
                reader.push_issue(issue.with_hint("openssl x509 -noout -fingerprint -sha256 -in server.pem"));
            }
        }
    }
    Some(ServerTrust::Fingerprints(fingerprints.into()))
}

/// Parse a fingerprint of 64 hexadecimal digits, with or without colons.
fn fingerprint(text: &str) -> Option<[u8; 32]> {
    let digits: Vec<_> = text.bytes().filter(|byte| *byte != b':').map(|byte| char::from(byte).to_digit(16)).collect();
    let digits = digits.into_iter().collect::<Option<Vec<_>>>()?;
    let bytes: Vec<u8> = digits.chunks_exact(2).map(|pair| (pair[0] * 16 + pair[1]) as u8).collect();
    (digits.len() == 64).then(|| bytes.try_into().ok())?
}

/// Compile `host` of an upstream or `upstream_host` of a route.
pub(super) fn host_policy(text: &Text, reader: &mut Validator<'_>) -> HostPolicy {
    match &**text.get_ref() {
        "client" => HostPolicy::Client,
        "server" => HostPolicy::Server,
        name => match strip_port(name).and_then(|_| HeaderValue::from_str(name).ok()) {
            Some(value) => HostPolicy::Name(value),
            None => {
                let issue = Issue::new(text.span(), format!("`{name}` is not a host"));
                reader
                    .push_issue(issue.with_hint("write \"client\", \"server\" or a name such as \"api.example.com\""));
                HostPolicy::Client
            }
        },
    }
}

/// Compile `proxy_protocol`. It cannot be combined with HTTP/2, because one HTTP/2 connection carries the requests of
/// several clients.
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
        reader.push_missing(issue.with_hint("set `max_requests`, which limits the requests in flight per server"));
    }
    max
}

/// Compile `health_check`.
pub(super) fn health(check: &Spanned<HealthCheck>, reader: &mut Validator<'_>) -> HealthSettings {
    let span = check.span();
    let defaults = config::shorthand::Health::default();
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
                reader.push_issue(issue.with_hint("write a status from 200 to 599"));
            }
        }
    }
    if health.status.as_ref().is_some_and(Vec::is_empty) {
        let issue = Issue::new(span.clone(), "`status` is empty: no server would be healthy");
        reader.push_issue(issue.with_hint("remove `status` to accept only 200"));
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

// === Client TLS for connections to the store and to upstreams ===

/// The files that a client TLS table refers to.
#[derive(Debug, Default)]
pub(super) struct TlsFiles {
    /// File of the CA certificates that verify servers.
    pub(super) ca: Option<FileSnapshot>,
    /// The files of the client certificate and its private key.
    pub(super) gateway_certificate: Option<[FileSnapshot; 2]>,
}

/// TLS settings of one upstream.
#[derive(Debug)]
pub struct UpstreamTls {
    /// Name of the upstream.
    pub name: Box<str>,
    /// TLS configuration for new connections.
    tls: Arc<UpstreamTlsConfig>,
    /// How certificates are verified, if not by a CA.
    unusual_trust: Option<ServerTrust>,
    /// Name that the server certificates must contain. If `None`, they must contain the host in the server's URL.
    server_name: Option<ServerName<'static>>,
    /// The files as they were read when the configuration was loaded.
    files: TlsFiles,
    /// The client certificate as it was when the configuration was loaded.
    gateway_certificate: Option<Certificate>,
    /// Whether [`UpstreamTls::reload`] has replaced the TLS configuration that was loaded.
    is_reloaded: AtomicBool,
}

impl TlsFiles {
    /// Read the files that a client TLS table refers to. `cert` and `key` require each other.
    pub(super) fn read(
        ca: Option<&Text>,
        gateway_certificate: [Option<&Text>; 2],
        span: Range<usize>,
        reader: &mut Validator<'_>,
    ) -> Self {
        let ca = ca.and_then(|text| reader.read_pem(text));
        let own = match gateway_certificate {
            [Some(cert), Some(key)] => Some([reader.read_pem(cert), reader.read_pem(key)]),
            [None, None] => None,
            [Some(_), None] | [None, Some(_)] => {
                reader.push_missing(Issue::new(span, "a client certificate requires both `cert` and `key`"));
                None
            }
        };
        let own = own.and_then(|[cert, key]| Some([cert?, key?]));
        TlsFiles { ca, gateway_certificate: own }
    }
}

/// Parse a certificate chain and its private key. An issue contains the paths of both files.
pub(super) fn certificate(cert: &FileSnapshot, key: &FileSnapshot, span: Range<usize>) -> Result<Certificate, Issue> {
    Certificate::from_pem(&cert.content, &key.content).map_err(|error| {
        let cert_path = cert.path.display();
        let key_path = key.path.display();
        let is_swapped = pem_kinds(&cert.content).any(is_private_key) && pem_kinds(&key.content).any(is_certificate);
        let (message, hint) = match error {
            _ if is_swapped && !pem_kinds(&cert.content).any(is_certificate) => (
                format!("`cert` and `key` are swapped: {cert_path} is the key and {key_path} the certificate"),
                "exchange the two files".to_owned(),
            ),
            TlsError::KeyMismatch(_) => (
                format!("certificate and key do not match: {cert_path}, {key_path}"),
                format!(
                    "these commands print the same public key for a matching pair: openssl x509 -noout -pubkey -in {cert_path}; \
                     openssl pkey -pubout -in {key_path}"
                ),
            ),
            TlsError::UnreadableKey(_) | TlsError::UnusableKey(_) => (format!("{key_path}: {error}"), key_hint(key)),
            TlsError::WrongOrder(_) => (
                format!("{cert_path}: {error}"),
                "order the file: the certificate of the server first, then its intermediate certificates".to_owned(),
            ),
            TlsError::OutdatedVersion { .. } => (
                format!("{cert_path}: {error}"),
                format!(
                    "for development, create a certificate with a subjectAltName: openssl req -x509 -key {key_path} \
                     -days 365 -subj /CN=localhost -addext subjectAltName=DNS:localhost -out cert.pem"
                ),
            ),
            error => (
                format!("{cert_path}: {error}"),
                certificate_hint(
                    cert,
                    "give the path of a PEM file with the certificate, followed by its intermediate certificates; \
                     `make certs` creates one for development",
                ),
            ),
        };
        Issue::new(span, message).with_hint(hint)
    })
}

/// Return the labels of the sections in a PEM file, such as `RSA PRIVATE KEY`.
fn pem_kinds(content: &[u8]) -> impl Iterator<Item = &str> {
    let lines = content.split(|byte| *byte == b'\n').filter_map(|line| std::str::from_utf8(line).ok());
    lines.filter_map(|line| line.trim().strip_prefix("-----BEGIN ")?.strip_suffix("-----"))
}

fn is_private_key(kind: &str) -> bool {
    kind.ends_with("PRIVATE KEY")
}

fn is_certificate(kind: &str) -> bool {
    kind == "CERTIFICATE"
}

/// Return a hint on how to convert a file with certificates that is not in PEM. For a PEM file, return `otherwise`.
pub(super) fn certificate_hint(file: &FileSnapshot, otherwise: &str) -> String {
    let path = file.path.display();
    if pem_kinds(&file.content).any(|kind| kind == "PKCS7") {
        return format!("convert PKCS #7 to PEM: openssl pkcs7 -print_certs -in {path} -out cert.pem");
    }
    if pem_kinds(&file.content).any(|kind| kind.ends_with("CERTIFICATE REQUEST")) {
        return "this file is a request to a CA: give the path of the certificate that the CA has issued".to_owned();
    }
    // A DER file starts with the byte 0x30 (SEQUENCE). A PEM file starts with a different byte.
    match file.content.first() {
        Some(0x30) if parse_x509_certificate(&file.content).is_ok() => {
            format!("convert DER to PEM: openssl x509 -inform der -in {path} -out cert.pem")
        }
        Some(0x30) => format!("convert PKCS #12 to PEM: openssl pkcs12 -nodes -in {path} -out cert.pem"),
        _ => otherwise.to_owned(),
    }
}

/// Return a hint on how to convert a private key that the gateway cannot use.
fn key_hint(key: &FileSnapshot) -> String {
    let path = key.path.display();
    let has_kind = |wanted: &str| pem_kinds(&key.content).any(|kind| kind == wanted);
    let is_encrypted = has_kind("ENCRYPTED PRIVATE KEY")
        || key.content.windows(b"Proc-Type: 4,ENCRYPTED".len()).any(|line| line == b"Proc-Type: 4,ENCRYPTED");
    if is_encrypted {
        return format!("the key has a password; remove it: openssl pkey -in {path} -out key.pem");
    }
    if has_kind("OPENSSH PRIVATE KEY") {
        return format!("convert a copy of the OpenSSH key: ssh-keygen -p -m PEM -f {path}");
    }
    // A DER file starts with the byte 0x30 (SEQUENCE). A PEM file starts with a different byte.
    if key.content.starts_with(&[0x30]) {
        return format!("convert DER to PEM: openssl pkey -inform DER -in {path} -out key.pem");
    }
    format!(
        "use an RSA, ECDSA (P-256, P-384, P-521) or Ed25519 key as PEM: BEGIN PRIVATE KEY (PKCS #8), BEGIN RSA PRIVATE \
         KEY (PKCS #1) or BEGIN EC PRIVATE KEY (SEC 1); convert with openssl pkey -in {path} -out key.pem"
    )
}

/// Compile the TLS settings of an upstream. Return `None` if all its servers use plaintext.
pub(super) fn upstream_tls(
    name: &str,
    upstream: &config::tables::Upstream,
    protocol: Protocol,
    reader: &mut Validator<'_>,
) -> Option<UpstreamTls> {
    let is_https = |url: &str| {
        url.starts_with(SRV_HTTPS) || url.get(..6).is_some_and(|scheme| scheme.eq_ignore_ascii_case("https:"))
    };
    let span = upstream.servers.iter().find(|server| is_https(&server.get_ref().url));
    let Some(span) = span.map(|server| server.span()) else {
        if let Some(tls) =
            upstream.tls.as_ref().filter(|_| !upstream.servers.iter().any(|one| reader.is_unresolved(one)))
        {
            let issue = Issue::new(tls.span(), "`tls` is valid only with servers at `https://`");
            reader.push_missing(issue.with_hint("servers = [\"https://…\"]"));
        }
        return None;
    };
    let files = match &upstream.tls {
        Some(tls) => {
            let config::tables::UpstreamTls { ca, cert, key, .. } = tls.get_ref();
            TlsFiles::read(ca.as_ref(), [cert.as_ref(), key.as_ref()], tls.span(), reader)
        }
        None => TlsFiles::default(),
    };
    let written = upstream.tls.as_ref().map(|tls| tls.get_ref());
    let ca = written.and_then(|tls| tls.ca.as_ref());
    let cert = written.and_then(|tls| tls.cert.as_ref());
    let unusual_trust = written.and_then(|tls| unusual_trust(tls, reader));
    let mut fail = |text: Option<&Text>, error: TlsError, hint: &str| {
        reader.push_issue(Issue::new(text.map_or(span.clone(), |text| text.span()), error.to_string()).with_hint(hint));
    };
    let trust = match (&files.ca, ca) {
        _ if unusual_trust.is_some() => unusual_trust.clone().ok_or(()),
        (Some(file), _) => TrustRoots::from_pem(&file.content).map(ServerTrust::Roots).map_err(|error| {
            let hint = "give the path of a PEM file with the CA certificates that verify the servers";
            fail(ca, error, &certificate_hint(file, hint));
        }),
        (None, None) => TrustRoots::from_system().map(ServerTrust::Roots).map_err(|error| {
            fail(
                None,
                error,
                "install the package ca-certificates, or name the CA certificates: tls.ca = \"upstream-ca.pem\"",
            );
        }),
        // `read_pem` has already reported the error.
        (None, Some(_)) => Err(()),
    };
    let server_name = written.and_then(|tls| tls.server_name.as_ref());
    let span_of_tls = cert.map_or(span.clone(), |text| text.span());
    let gateway_certificate = files.gateway_certificate.as_ref().map(|[cert, key]| certificate(cert, key, span_of_tls));
    let own = gateway_certificate.transpose().map_err(|issue| reader.push_issue(issue));
    let server_name = server_name.and_then(|text| self::parse_server_name(text.get_ref(), text.span(), reader));
    let trust = trust.ok()?;
    let own = own.ok()?;
    match UpstreamTlsConfig::new(trust, own.as_ref(), protocol) {
        Ok(tls) => Some(UpstreamTls {
            name: name.into(),
            tls: Arc::new(tls),
            unusual_trust,
            server_name,
            files,
            gateway_certificate: own,
            is_reloaded: AtomicBool::new(false),
        }),
        Err(error) => {
            reader.push_issue(Issue::new(span, error.to_string()));
            None
        }
    }
}

pub(super) fn parse_server_name(
    text: &str,
    span: Range<usize>,
    reader: &mut Validator<'_>,
) -> Option<ServerName<'static>> {
    let name = ServerName::try_from(text.to_owned()).ok();
    if name.is_none() {
        let issue = Issue::new(span, format!("`{text}` is not a valid server name"));
        reader
            .push_issue(issue.with_hint("write a host name or an address, such as tls.server_name = \"api.internal\""));
    }
    name
}

impl UpstreamTls {
    /// Return the TLS settings for one server.
    pub(super) fn for_server(&self, host: &str, span: Range<usize>, reader: &mut Validator<'_>) -> Option<EndpointTls> {
        let name = self.server_name.clone().or_else(|| parse_server_name(host, span, reader))?;
        Some(EndpointTls { tls: self.tls.clone(), server_name: name })
    }

    /// Return the files to watch for changes.
    pub fn files(&self) -> Vec<FileSnapshot> {
        self.files.ca.iter().chain(self.files.gateway_certificate.iter().flatten()).cloned().collect()
    }

    /// Use the contents of `files` for new connections. Existing connections do not change.
    ///
    /// # Errors
    /// A file is invalid, or the client certificate has expired or is not valid yet. After an error, the active TLS
    /// configuration does not change.
    pub fn reload<'f>(&self, files: &'f [FileSnapshot], now: Duration) -> Result<(), (&'f FileSnapshot, TlsError)> {
        let (ca, gateway_certificate) = files.split_at(usize::from(self.files.ca.is_some()));
        let trust = match (&self.unusual_trust, ca) {
            (Some(trust), _) => trust.clone(),
            (None, [file, ..]) => TrustRoots::from_pem(&file.content).map_err(|error| (file, error))?.into(),
            (None, []) => TrustRoots::from_system().map_err(|error| (&files[0], error))?.into(),
        };
        let own = match gateway_certificate {
            [cert, key] => {
                let own = Certificate::from_pem(&cert.content, &key.content).map_err(|error| (cert, error))?;
                own.check_validity(now.as_secs() as i64).map_err(|error| (cert, error))?;
                Some(own)
            }
            _ => None,
        };
        self.tls.replace(trust, own.as_ref()).map_err(|error| (&files[0], error))?;
        self.is_reloaded.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Return whether `self` and `other` have the same name, settings and file contents. Return `false` if
    /// [`UpstreamTls::reload`] was called on `other`.
    pub(crate) fn is_same_as(&self, other: &UpstreamTls) -> bool {
        let file_contents =
            |tls: &UpstreamTls| tls.files().into_iter().map(|file| (file.path, file.content)).collect::<Vec<_>>();
        let trust = |tls: &UpstreamTls| match &tls.unusual_trust {
            None | Some(ServerTrust::Roots(_)) => None,
            Some(ServerTrust::Fingerprints(all)) => Some(all.to_vec()),
            Some(ServerTrust::Anything) => Some(Vec::new()),
        };
        let identity =
            |tls: &UpstreamTls| (tls.name.clone(), tls.server_name.clone(), tls.files.ca.is_some(), trust(tls));
        identity(self) == identity(other)
            && self.tls.protocol() == other.tls.protocol()
            && file_contents(self) == file_contents(other)
            && !other.is_reloaded.load(Ordering::Relaxed)
    }

    /// Use this TLS configuration for connections to the servers in `settings`.
    pub(crate) fn attach_tls(&self, settings: &mut UpstreamSettings) {
        for tls in settings.servers.iter_mut().filter_map(|server| server.tls.as_mut()) {
            tls.tls = self.tls.clone();
        }
    }

    /// Use this TLS configuration for connections to an endpoint.
    pub(crate) fn attach_to(&self, endpoint: &mut EndpointTls) {
        endpoint.tls = self.tls.clone();
    }

    /// Return a warning if the certificates of the servers are not verified by a CA.
    pub(super) fn trust_warning(&self) -> Option<String> {
        match self.unusual_trust.as_ref()? {
            ServerTrust::Roots(_) => None,
            ServerTrust::Fingerprints(_) => Some(format!(
                "`{}` accepts only the certificates in `tls.fingerprint`, even after they have expired: change it before \
                 the servers renew their certificates",
                self.name
            )),
            ServerTrust::Anything => Some(format!(
                "`{}` accepts every certificate (`tls.verify = false`): anyone between the gateway and the servers can \
                 read and change requests, with their credentials; set tls.ca or tls.fingerprint",
                self.name
            )),
        }
    }

    /// Return a warning if the client certificate has expired or is not valid yet.
    pub(super) fn certificate_warning(&self, now: Duration) -> Option<String> {
        let error = self.gateway_certificate.as_ref()?.check_validity(now.as_secs() as i64).err()?;
        let [file, _] = self.files.gateway_certificate.as_ref()?;
        Some(format!("{}: {error}; servers of `{}` will reject the certificate", file.path.display(), self.name))
    }
}
