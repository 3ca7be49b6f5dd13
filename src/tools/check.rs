//! Warnings about a valid configuration: settings that probably do not have the intended effect, each with its position
//! in the file.

mod intent;
mod routes;
pub mod servers;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use http::Method;
use ipnet::IpNet;
use tokio::time::timeout;

use crate::config;
use crate::config::error::{FileIssues, Issue};
use crate::config::file::ParsedFile;
use crate::config::gateway::Config;
use crate::config::spanned::{Spanned, Text};
use crate::http::headers::Variable;
use crate::http::target::canonical_host;
use crate::http::url::HttpUrl;
use crate::identity::access::{AccessRules, parse_network};
use crate::identity::auth::ProviderKind;
use crate::identity::spec::{Descriptor, OnMissing};
use crate::limiter::redis::RedisDeployment;
use crate::limiter::spec::{LimitSpec, OnStoreError};
use crate::routing::condition::{Condition, ValueTest};
use crate::snapshot::CompiledConfig;
use crate::snapshot::cost::Cost;
use crate::snapshot::limits::CompiledLimit;
use crate::snapshot::listeners::WarningSubject;
use crate::snapshot::listeners::{Listener, ListenerProtocol, ListenerTls};
use crate::snapshot::route_action::BUFFER_DIVISOR;
use crate::snapshot::route_action::RouteAction;
use crate::snapshot::route_match::foreign_path_hint;
use crate::snapshot::routes::Route;
use crate::upstream::dns::DnsResolver;
use crate::upstream::settings::{AddressFamilies, UpstreamSettings};

/// A configuration in its parsed and in its compiled form.
struct LintInput<'a> {
    parsed: &'a Config,
    config: &'a CompiledConfig,
}

/// Return all warnings, unsorted. `now` is the time since the Unix epoch, which is compared with the expiry times of
/// certificates.
pub fn warnings(parsed: &Config, config: &CompiledConfig, now: Duration) -> Vec<Issue> {
    let input = LintInput { parsed, config };
    let mut issues: Vec<_> =
        config.warnings(now).into_iter().map(|(subject, text)| input.warning_issue(&subject, text)).collect();
    issues.extend(limit_warnings(&input));
    issues.extend(unused_destinations(&input));
    issues.extend(route_warnings(&input));
    issues.extend(access_warnings(&input));
    issues.extend(unserved_descriptors(&input));
    issues.extend(client_warnings(&input));
    issues.extend(auth_warnings(&input));
    issues.extend(certificate_of_no_client(&input));
    issues.extend(port_of_other_scheme(&input));
    issues.extend(intent::weak_token(&input));
    issues
}

/// Return the warnings about a configuration and those of its parser, by file.
pub fn warnings_by_file(file: &ParsedFile<Config>, config: &CompiledConfig, now: Duration) -> Vec<FileIssues> {
    let warnings = warnings(&file.value, config, now);
    file.sources.by_file(warnings.into_iter().chain(file.warnings.iter().cloned()).collect())
}

/// Return errors that a gateway would otherwise report only when it starts: listeners whose addresses conflict.
pub fn errors(file: &ParsedFile<Config>, config: &CompiledConfig) -> Vec<Issue> {
    let address = |index: usize| file.value.listener.get(index).and_then(|each| each.get_ref().address.as_ref());
    let issue = |(earlier, later): (usize, usize)| {
        let [earlier_address, later_address] = [earlier, later].map(|index| &config.listeners[index].address);
        let earlier = address(earlier)?.span();
        let later = address(later)?.span();
        let line = file.sources.line_name(&earlier);
        let message = format!("{later_address} is already used by the [[listener]] on {earlier_address} in {line}");
        Some(Issue::new(later, message).with_hint(
            "remove one of the listeners, or set another port: an unspecified address covers every address, and [::] \
             may also cover IPv4",
        ))
    };
    config.address_conflicts().filter_map(issue).collect()
}

/// Warn of servers whose URL has the default port of another scheme: an `https` URL with port 80, or an `http` URL with
/// port 443.
fn port_of_other_scheme<'a>(input: &'a LintInput<'_>) -> impl Iterator<Item = Issue> + 'a {
    let servers = input.parsed.upstream.values().flat_map(|upstream| upstream.get_ref().servers.iter());
    servers.filter_map(|server| {
        let url = server.get_ref().url.parse::<HttpUrl>().ok()?;
        let port = url.port();
        let (scheme, other) = match (url.is_https(), port) {
            (false, 443) => ("http", "https"),
            (true, 80) => ("https", "http"),
            _ => return None,
        };
        let message = format!("port {port} is the default port of {other}, but the URL says {scheme}");
        Some(Issue::new(server.span(), message).with_hint(format!("write {other}://, or correct the port")))
    })
}

/// Note the servers whose URL has the scheme `http` and no port.
fn default_ports<'a>(input: &'a LintInput<'_>) -> impl Iterator<Item = Issue> + 'a {
    let servers = input.parsed.upstream.values().flat_map(|upstream| upstream.get_ref().servers.iter());
    servers.filter_map(|server| {
        let url = server.get_ref().url.parse::<HttpUrl>().ok().filter(|url| !url.is_https() && !url.has_port())?;
        let message = format!("`{}` has no port: the gateway connects to port {}", url.origin(), url.port());
        Some(Issue::new(server.span(), message).with_hint(format!("write \"{}:{}\"", url.origin(), url.port())))
    })
}

/// Return notes. A note points out a property of a correct configuration that administrators should know.
pub fn notes(parsed: &Config, config: &CompiledConfig) -> Vec<Issue> {
    let input = LintInput { parsed, config };
    let mut notes = route_notes(&input);
    notes.extend(default_ports(&input));
    if let (Some(socket), Some(access)) = (config.log.access_log.socket(), &parsed.log.access)
        && !socket.exists()
    {
        let message = format!("there is no socket at {} on this machine", socket.display());
        let issue = Issue::new(access.span(), message);
        notes.push(issue.with_hint("access log records are lost while the log daemon does not run"));
    }
    if let Some(from) = parsed.tiers.from.as_ref().filter(|from| from.get_ref() != "api-key") {
        let issue =
            Issue::new(from.span(), "clients with a tier that a limit does not have get the limit's default quota");
        notes.push(issue.with_hint("set `quota` of each limit to the quota of its lowest tier"));
    }
    for limit in parsed.limit.values() {
        if let Some(text) = limit.get_ref().algorithm.as_ref().filter(|text| text.get_ref() == "leaky-bucket") {
            let message = "`leaky-bucket` is the same as `token-bucket`: both admit the same requests";
            let issue = Issue::new(text.span(), message);
            notes.push(issue.with_hint("to delay requests instead of denying them, set max_wait = \"1s\""));
        }
    }
    if let Some(acme) = config.acme.as_ref().filter(|acme| !acme.names.is_empty()) {
        let message =
            format!("certificates are requested from {} for {}", acme.settings.directory, acme.names.join(", "));
        notes.push(Issue { span: None, message, hint: None });
    }
    notes
}

/// Maximum time to resolve the DNS names of certificates.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(5);

/// Resolve the DNS names for which the gateway requests certificates by ACME. The first list of the result contains
/// warnings about names without an address. The second list contains notes that say whether the addresses of a name
/// belong to this machine. They are not warnings, because behind a load balancer or NAT a name should have another
/// address.
///
/// # Errors
/// The tokio runtime for the lookups cannot be created.
pub fn resolve_names(
    parsed: &Config,
    config: &CompiledConfig,
    resolver: &DnsResolver,
) -> io::Result<(Vec<Issue>, Vec<Issue>)> {
    let mut warnings = Vec::new();
    let mut notes = Vec::new();
    let (Some(acme), Some(table)) = (&config.acme, &parsed.acme) else { return Ok((warnings, notes)) };
    let lookup =
        async |name| match timeout(RESOLVE_TIMEOUT, resolver.lookup(name, None, AddressFamilies::Both, &[])).await {
            Ok(Ok(resolved)) => Ok(resolved.addresses.into_iter().map(|address| address.ip).collect::<Vec<_>>()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err(format!("no response within {RESOLVE_TIMEOUT:?}")),
        };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let results = runtime.block_on(join_all(acme.names.iter().map(|name| lookup(name))));
    for (name, result) in acme.names.iter().zip(results) {
        let addresses = match result {
            Ok(addresses) => addresses,
            Err(error) => {
                let message = format!("`{name}` does not resolve, and the CA cannot validate it: {error}");
                let hint = "add A or AAAA records with the addresses of the gateways or of their load balancer";
                let span = name_span(parsed, name).unwrap_or(table.span());
                warnings.push(Issue::new(span, message).with_hint(hint));
                continue;
            }
        };
        let message = match addresses.iter().find(|address| !is_local_address(**address)) {
            Some(other) => format!(
                "`{name}` resolves to {other}, which is no address of this machine: requests may still arrive through a \
                 load balancer or NAT"
            ),
            None => format!("`{name}` resolves to this machine"),
        };
        notes.push(Issue { span: None, message, hint: None });
    }
    Ok((warnings, notes))
}

/// Return whether an interface of this machine has this address. The kernel binds a socket only to an address of an
/// interface, unless `ip_nonlocal_bind` is set. If `ip_nonlocal_bind` is set, also test whether the kernel chooses this
/// address as the source address of packets whose destination is the same address.
fn is_local_address(address: IpAddr) -> bool {
    if address.is_loopback() {
        return true;
    }
    let family = if address.is_ipv4() { "ipv4" } else { "ipv6" };
    let setting = std::fs::read_to_string(format!("/proc/sys/net/{family}/ip_nonlocal_bind"));
    let can_bind_any = setting.is_ok_and(|setting| setting.trim() == "1");
    let Ok(_) = UdpSocket::bind((address, 0)) else { return false };
    let is_source = || {
        let unspecified: IpAddr =
            if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let socket = UdpSocket::bind((unspecified, 0)).ok()?;
        // `connect` on a UDP socket sends no packet.
        socket.connect((address, 9)).ok()?;
        socket.local_addr().ok()
    };
    !can_bind_any || is_source().is_some_and(|source| source.ip() == address)
}

/// Return the position of a DNS name in the file. The name is in `names` of a listener or in `hosts` of a route.
fn name_span(parsed: &Config, name: &str) -> Option<Range<usize>> {
    let tls = parsed.listener.iter().filter_map(|listener| listener.get_ref().tls.as_ref());
    let names = tls.flat_map(|tls| tls.get_ref().names.iter().flatten());
    let hosts = parsed.route.iter().flat_map(|route| route.get_ref().hosts.iter().flatten());
    names.chain(hosts).find(|text| canonical_host(text.get_ref()) == name).map(|text| text.span())
}

impl<'a> LintInput<'a> {
    fn limit(&self, name: &str) -> Option<&'a Spanned<config::tables::Limit>> {
        let limits: &'a BTreeMap<_, _> = &self.parsed.limit;
        limits.get(name)
    }

    /// Return the parsed route at `index`. Parsed and compiled routes have the same index, because compiling drops no
    /// route.
    fn route(&self, index: usize) -> Option<&'a Spanned<config::tables::Route>> {
        self.parsed.route.get(index)
    }

    /// Return the position of a value of the limit `name` in the file. If the value is not set, return the position of
    /// the limit.
    fn span_of<T>(&self, name: &str, value: impl Fn(&config::tables::Limit) -> Option<&Spanned<T>>) -> Range<usize> {
        let Some(limit) = self.limit(name) else { return 0..0 };
        value(limit.get_ref()).map_or(limit.span(), |value| value.span())
    }

    fn warning_issue(&self, subject: &WarningSubject, text: String) -> Issue {
        let listener = |index: usize| self.parsed.listener.get(index);
        let span = match subject {
            WarningSubject::Upstream(name) => self.parsed.upstream.get(&**name).map(|upstream| upstream.span()),
            WarningSubject::Listener(index) => listener(*index).map(|listener| listener.span()),
            WarningSubject::Consumers(name) => {
                self.parsed.auth.get(&**name).map(|auth| match &auth.get_ref().consumers {
                    Some(consumers) => consumers.span(),
                    None => auth.span(),
                })
            }
            WarningSubject::Certificate(index, number) => listener(*index).and_then(|listener| {
                let tls = listener.get_ref().tls.as_ref()?;
                tls.get_ref().certificates.get(*number).map(|certificate| certificate.span())
            }),
            WarningSubject::Acme => self.parsed.acme.as_ref().map(|acme| acme.span()),
        };
        Issue { span, message: text, hint: None }
    }
}

// Warnings about trusted proxies, client addresses and the store's `secret`, which is the key of the identity hashes.

/// The shortest plausible prefix lengths (IPv4, IPv6) of a network of proxies: those of the largest private networks,
/// 10.0.0.0/8 and fc00::/7.
const MIN_PREFIX_LENGTHS: (u8, u8) = (8, 7);

fn client_warnings(input: &LintInput<'_>) -> Vec<Issue> {
    let mut issues: Vec<_> = overly_broad_proxies(input).collect();
    issues.extend(shared_client_address(input));
    issues.extend(weak_store_secret(input));
    issues
}

/// Warn of networks in `trusted_proxies` that are so large that they probably include clients.
fn overly_broad_proxies<'a>(input: &'a LintInput<'_>) -> impl Iterator<Item = Issue> + 'a {
    let proxies = input.parsed.client_ip.trusted_proxies.iter().flatten();
    proxies.zip(&input.config.client_ip.trusted_proxies).filter_map(|(proxy, network)| {
        let prefix_length = match network {
            IpNet::V4(network) if network.prefix_len() < MIN_PREFIX_LENGTHS.0 => network.prefix_len(),
            IpNet::V6(network) if network.prefix_len() < MIN_PREFIX_LENGTHS.1 => network.prefix_len(),
            IpNet::V4(_) | IpNet::V6(_) => return None,
        };
        let extent = if prefix_length == 0 { "the whole internet" } else { "a large part of the internet" };
        let proxy_text = proxy.get_ref();
        let message = format!(
            "`{proxy_text}` covers {extent}: clients in this network can claim any client address, and so evade every \
             limit that counts by address"
        );
        Some(
            Issue::new(proxy.span(), message)
                .with_hint("list only the networks of your own proxies, such as \"10.0.0.0/8\""),
        )
    })
}

/// Warn of a limit by `ip` if a proxy is probably in front of the gateway but `trusted_proxies` is not set. If every
/// listener has a private address, public clients reach the gateway only through a proxy. Without `trusted_proxies`,
/// all requests then seem to come from the address of the proxy.
fn shared_client_address(input: &LintInput<'_>) -> Option<Issue> {
    let is_private = |listener: &Listener| listener.address.tcp().is_none_or(|address| is_private(address.ip()));
    let all_private = input.config.listeners.iter().all(is_private);
    if !all_private || input.parsed.client_ip.trusted_proxies.is_some() {
        return None;
    }
    let used = input.config.routes.iter().flat_map(|route| &route.rate_limits.limits);
    let used: Vec<_> = used.map(|metered| &*metered.limit.name).collect();
    // Report only the first limit by `ip` in the file.
    let by_address =
        input.config.limits.values().filter(|compiled| compiled.identity_spec.descriptors.contains(&Descriptor::Ip));
    let by_address = by_address.filter(|compiled| used.contains(&&*compiled.limit.name));
    let spans = by_address
        .map(|compiled| (input.span_of(&compiled.limit.name, |limit| limit.by.as_ref()), &compiled.limit.name));
    let (span, name) = spans.min_by_key(|(span, _)| span.start)?;
    let message = format!(
        "`{name}` counts by address, but clients reach private listener addresses only through a proxy: without \
         `trusted_proxies`, all clients share one bucket"
    );
    let hint = "set trusted_proxies in [client_ip] to the address of the proxy, such as [\"10.0.0.0/8\"], or to [] \
                if clients connect directly";
    Some(Issue::new(span, message).with_hint(hint))
}

fn is_private(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_loopback() || address.is_private() || address.is_link_local(),
        IpAddr::V6(address) => address.is_loopback() || address.is_unique_local() || address.is_unicast_link_local(),
    }
}

/// Warn of a Redis store without `secret`, or with one that everybody can guess. An attacker who reads the keys in Redis
/// could then hash all possible client addresses, and find out which of them have keys.
fn weak_store_secret(input: &LintInput<'_>) -> Option<Issue> {
    let store = &input.parsed.store;
    input.config.store.redis.as_ref()?;
    let weakness = match &store.secret {
        Some(secret) if intent::is_placeholder(secret) => "the `secret` of the store is a placeholder",
        Some(secret) if !secret.get_ref().is_empty() => return None,
        Some(_) | None => "the store has no `secret`",
    };
    let span = store.secret.as_ref().or(store.url.as_ref())?.span();
    let message = format!(
        "{weakness}: an attacker who reads the keys in Redis can find the client addresses by hashing all of them"
    );
    Some(Issue::new(span, message).with_hint(
        "set secret = \"${SLUICEGATE_STORE_SECRET}\", the same on all gateways; generate it with openssl rand -hex 32",
    ))
}

// Warnings about routes, such as conditions that no request meets, or a timeout that leaves no time for retries.

fn route_warnings(input: &LintInput<'_>) -> Vec<Issue> {
    let mut issues: Vec<_> = unreachable_methods(input).chain(intent::misspelled_methods(input)).collect();
    for route in &input.config.routes {
        issues.extend(unmatchable_conditions(input, route));
        issues.extend(literal_wildcards(input, route));
        issues.extend(foreign_path(input, route));
        issues.extend(intent::path_without_wildcard(input, route));
        issues.extend(retries_without_time(input, route));
        issues.extend(retry_rules_without_retries(input, route));
        issues.extend(mirror_to_same_upstream(input, route));
        issues.extend(mirror_beyond_buffers(input, route));
        issues.extend(consumer_without_identity(input, route));
        issues.extend(uncounted_websocket(input, route));
        issues.extend(fallback_with_credentials(input, route));
    }
    issues.extend(
        routes::candidates_by_route(input.config)
            .filter_map(|candidates| candidates.first().and_then(|candidate| json_without_body(input, candidate))),
    );
    issues.extend(unchosen_hosts(input));
    issues.extend(routes::redirect_loops(input));
    issues.extend(routes::unlimited_spellings(input));
    issues.extend(routes::open_alternatives(input));
    issues
}

/// Warn of upstreams with `https://` URLs whose servers may reject requests with the `Host` of the client: nothing in the
/// configuration chooses a `Host`, and the names in the URLs are not the hosts of the routes.
fn unchosen_hosts<'a>(input: &'a LintInput<'_>) -> impl Iterator<Item = Issue> + 'a {
    let upstreams = input.config.upstreams.iter().enumerate();
    upstreams.filter_map(|(index, settings)| {
        let parsed = input.parsed.upstream.get(&*settings.name)?.get_ref();
        let server = settings.servers.iter().position(|server| {
            let is_name = server.needs_dns() && server.host.rsplit('.').next() != Some("localhost");
            is_name && server.tls.is_some() && sends_another_host(input, index, &server.host)
        })?;
        let host = &settings.servers[server].host;
        let span = parsed.servers.get(server)?.span();
        let message = format!(
            "`{host}` gets the `Host` of the client, which a server with `https://` may reject with 421 or 404"
        );
        let hint = "set host = \"server\" to send the host of the URL, or host = \"client\" if this is intended";
        parsed.host.is_none().then(|| Issue::new(span, message).with_hint(hint))
    })
}

/// Return whether a route forwards requests for other hosts than `host` to this upstream, and does not choose a `Host`.
fn sends_another_host(input: &LintInput<'_>, upstream: usize, host: &str) -> bool {
    input.config.routes.iter().filter(|route| route.upstream_host.is_none()).any(|route| {
        let RouteAction::Forward(upstreams) = &route.action else { return false };
        let hosts = input.route(route.index).and_then(|route| route.get_ref().hosts.as_deref()).unwrap_or_default();
        let is_same = !hosts.is_empty() && hosts.iter().all(|name| name.get_ref().eq_ignore_ascii_case(host));
        upstreams.upstreams().any(|index| index == upstream) && !is_same
    })
}

/// Headers that usually contain credentials for one upstream.
const CREDENTIAL_HEADERS: [&str; 5] = ["authorization", "proxy-authorization", "cookie", "x-api-key", "api-key"];

/// Warn of a fallback that gets the credentials that the route sets for its upstream.
fn fallback_with_credentials(input: &LintInput<'_>, route: &Route) -> Option<Issue> {
    let parsed = input.route(route.index)?.get_ref();
    let rules = parsed.request_headers.as_ref()?.get_ref();
    let name =
        rules.set.keys().find(|name| CREDENTIAL_HEADERS.iter().any(|header| name.eq_ignore_ascii_case(header)))?;
    let fallback = route.fallback.iter().find(|fallback| fallback.request_headers.is_none())?;
    let upstream = &input.config.upstreams[fallback.upstream].name;
    let message = format!("`{upstream}` gets the `{name}` that the route sets for its upstream");
    let hint = format!("write {{ upstream = \"{upstream}\", request_headers = {{ set = {{ … }} }} }}");
    let span = parsed.fallback.as_ref()?.first()?.span();
    Some(Issue::new(span, message).with_hint(hint))
}

/// Methods whose requests usually have no body.
const METHODS_WITHOUT_BODY: [Method; 4] = [Method::GET, Method::HEAD, Method::OPTIONS, Method::DELETE];

/// Return whether requests with these methods usually have no body. An empty list means all methods.
fn have_no_body(methods: &[Method]) -> bool {
    !methods.is_empty() && methods.iter().all(|method| METHODS_WITHOUT_BODY.contains(method))
}

/// Warn of a condition on a JSON body in a route for methods without a body.
fn json_without_body(input: &LintInput<'_>, candidate: &routes::RouteCandidate<'_>) -> Option<Issue> {
    let route = candidate.target;
    let needs_value = |condition: &&Condition| condition.reads_body() && condition.test != ValueTest::Absent;
    let condition = candidate.conditions.iter().find(needs_value).filter(|_| have_no_body(candidate.methods))?;
    let span = input.route(route.index)?.get_ref().conditions.as_ref()?.span();
    let message = format!("`{}` never matches: its methods have no body, but it requires {condition}", route.name);
    Some(Issue::new(span, message).with_hint("methods = [\"POST\"]"))
}

/// Warn of a route with a token limit and `websocket`, because the tokens of a WebSocket are not counted.
fn uncounted_websocket(input: &LintInput<'_>, route: &Route) -> Option<Issue> {
    route.rate_limits.llm.filter(|_| route.websocket)?;
    let span = input.route(route.index)?.get_ref().websocket.as_ref()?.span();
    let message =
        format!("the tokens of WebSockets of `{}` are not counted: `cost.llm` reads only HTTP bodies", route.name);
    Some(
        Issue::new(span, message)
            .with_hint("use another route without a token limit for WebSockets, such as realtime APIs"),
    )
}

/// Warn of routes that never match requests with some of their methods, because another route takes precedence for
/// these requests.
fn unreachable_methods<'a>(input: &'a LintInput<'_>) -> impl Iterator<Item = Issue> + 'a {
    // Remove duplicates: `unreachable_routes` returns a route once for each of its hosts.
    let mut seen = HashSet::new();
    let unreachable = input.config.table.unreachable_routes();
    let unreachable = unreachable.filter(move |(route, other, _)| seen.insert((route.index, other.index)));
    unreachable.filter_map(|(route, other, methods)| {
        let parsed = input.route(route.index)?;
        let methods: Vec<_> = methods.iter().map(Method::as_str).collect();
        let message = format!(
            "`{}` never gets {}: these requests match `{}` first, because routes with `methods` precede routes \
             without `methods`, regardless of their conditions",
            route.name,
            methods.join(", "),
            other.name
        );
        let span = parsed.get_ref().name.as_ref().map_or(parsed.span(), |name| name.span());
        Some(Issue::new(span, message).with_hint(format!(
            "set methods = {methods:?} on this route as well, so that the route with more conditions takes precedence"
        )))
    })
}

/// Warn of routes with conditions that no request meets: the methods CONNECT and TRACE, which the gateway rejects, and
/// required header values with leading or trailing whitespace, which the HTTP parser strips.
fn unmatchable_conditions(input: &LintInput<'_>, route: &Route) -> Vec<Issue> {
    let Some(parsed) = input.route(route.index).map(|parsed| parsed.get_ref()) else { return Vec::new() };
    let mut issues = Vec::new();
    let is_refused = |text: &str| matches!(text, "CONNECT" | "TRACE");
    let methods = parsed.methods.iter().flatten().filter(|text| is_refused(text.get_ref()));
    for text in methods {
        let message =
            format!("`{}` never gets the method {}: the gateway rejects it on all routes", route.name, text.get_ref());
        issues.push(Issue::new(text.span(), message).with_hint("remove this entry"));
    }
    for (name, value) in exact_headers(parsed) {
        if value.get_ref().trim() != value.get_ref() {
            let message = format!("`{}` never matches: a header value has no leading or trailing spaces", route.name);
            let hint = format!("{name} = {{ exact = \"{}\" }}", value.get_ref().trim());
            issues.push(Issue::new(value.span(), message).with_hint(hint));
        }
    }
    issues
}

/// Warn of required header values that contain `*`, because `*` is not a wildcard in header values. `Accept*`,
/// `If-Match` and `If-None-Match` are exempt, because their values may contain a literal `*` (RFC 9110 §12.5, §13.1).
fn literal_wildcards(input: &LintInput<'_>, route: &Route) -> Vec<Issue> {
    let Some(parsed) = input.route(route.index).map(|parsed| parsed.get_ref()) else { return Vec::new() };
    let has_wildcards = |name: &str| {
        let name = name.to_ascii_lowercase();
        name.starts_with("accept") || matches!(&*name, "if-match" | "if-none-match")
    };
    let values = exact_headers(parsed).filter(|(name, value)| value.get_ref().contains('*') && !has_wildcards(name));
    let issue = |(name, value): (&String, &Text)| {
        let message = format!("`{}` requires this value of `{name}` literally: `*` is not a wildcard", route.name);
        Issue::new(value.span(), message)
            .with_hint("write prefix = \"…\", regex = '…', or present = true for any value")
    };
    values.map(issue).collect()
}

/// Return the headers that a route requires with an exact value.
fn exact_headers(route: &config::tables::Route) -> impl Iterator<Item = (&String, &Text)> {
    let headers = route.conditions.iter().flat_map(|rules| &rules.get_ref().headers);
    headers.filter_map(|(name, rule)| Some((name, rule.get_ref().exact.as_ref()?)))
}

/// Warn of paths in the pattern syntax of other programs, such as nginx. These paths are valid, but Sluicegate matches
/// their characters literally.
fn foreign_path(input: &LintInput<'_>, route: &Route) -> Option<Issue> {
    let path = input.route(route.index)?.get_ref().path.as_ref()?;
    let hint = foreign_path_hint(path.get_ref())?;
    let message = format!("`{}` matches the characters of this path literally, not as a pattern", route.name);
    Some(Issue::new(path.span(), message).with_hint(hint))
}

/// Warn if the upstream's `response_timeout` is at least the route's `timeout`, because a slow first attempt then
/// leaves no time for a retry.
fn retries_without_time(input: &LintInput<'_>, route: &Route) -> Option<Issue> {
    let (timeout, RouteAction::Forward(weighted_upstreams)) = (route.timeout?, &route.action) else { return None };
    let is_slow = |upstream: &&UpstreamSettings| upstream.retries > 0 && upstream.response_timeout >= timeout;
    let upstreams = weighted_upstreams.upstreams().filter_map(|index| input.config.upstreams.get(index));
    let upstream = upstreams.map(|upstream| &**upstream).find(is_slow)?;
    let span = input.route(route.index)?.get_ref().timeout.as_ref()?.span();
    let message = format!(
        "the first attempt may take all of the `timeout` of `{}`: no time is left for the `retries` of `{}`, whose `response_timeout` is {:?}",
        route.name, upstream.name, upstream.response_timeout
    );
    let attempts = upstream.retries + 1;
    Some(Issue::new(span, message).with_hint(format!(
        "response_timeout = \"{}ms\" leaves time for {attempts} attempts",
        (timeout / attempts).as_millis()
    )))
}

/// Warn of `retry_on` of a route that sends no request again.
fn retry_rules_without_retries(input: &LintInput<'_>, route: &Route) -> Option<Issue> {
    let (rules, RouteAction::Forward(weighted_upstreams)) = (route.retry.as_ref()?, &route.action) else { return None };
    let mut upstreams = weighted_upstreams.upstreams().filter_map(|index| input.config.upstreams.get(index));
    let has_retries = match rules.retries {
        Some(retries) => retries > 0,
        None => upstreams.any(|upstream| upstream.retries > 0),
    };
    let written = input.route(route.index)?.get_ref().retry_on.as_ref()?.first()?;
    let message = "`retry_on` has no effect, because `retries` is 0 and the route has no `fallback`";
    (!has_retries && route.fallback.is_empty())
        .then(|| Issue::new(written.span(), message).with_hint("set retries = 1"))
}

/// Warn of `client_cert_header` of an upstream if no listener requests client certificates.
fn certificate_of_no_client<'a>(input: &'a LintInput<'_>) -> impl Iterator<Item = Issue> + 'a {
    let has_client_ca =
        |listener: &Listener| listener.tls.as_ref().is_some_and(ListenerTls::requests_client_certificates);
    let is_unused = !input.config.listeners.iter().any(has_client_ca);
    let upstreams = input.parsed.upstream.iter().filter(move |_| is_unused);
    upstreams.filter_map(|(name, upstream)| {
        let written = upstream.get_ref().client_cert_header.as_ref().filter(|sends| *sends.get_ref())?;
        let message = format!("`{name}` never gets Client-Cert: no listener has a `client_ca`");
        let hint = "set tls.client_ca of a listener, or remove `client_cert_header`";
        Some(Issue::new(written.span(), message).with_hint(hint))
    })
}

/// Warn of a mirror to an upstream to which the route also forwards, because this upstream receives each mirrored
/// request twice.
fn mirror_to_same_upstream(input: &LintInput<'_>, route: &Route) -> Option<Issue> {
    let (mirror, RouteAction::Forward(weighted_upstreams)) = (route.mirror.as_ref()?, &route.action) else {
        return None;
    };
    weighted_upstreams.upstreams().find(|index| *index == mirror.upstream)?;
    let parsed = input.route(route.index)?.get_ref().mirror.as_ref()?.get_ref();
    let name = &input.config.upstreams.get(mirror.upstream)?.name;
    let message =
        format!("`{}` both forwards and mirrors to `{name}`: the upstream gets these requests twice", route.name);
    Some(Issue::new(parsed.upstream.as_ref()?.span(), message).with_hint("name another upstream"))
}

/// Warn of a mirror whose `max_body` exceeds the memory budget for copies. Requests with a body above the budget are
/// never copied.
fn mirror_beyond_buffers(input: &LintInput<'_>, route: &Route) -> Option<Issue> {
    let max_body = route.mirror.as_ref()?.max_body;
    let budget = input.config.server.max_buffered / BUFFER_DIVISOR;
    let parsed = input.route(route.index)?.get_ref().mirror.as_ref()?.get_ref();
    let span = parsed.max_body.as_ref().filter(|_| max_body > budget)?.span();
    let message = format!(
        "bodies of copies take at most {budget} bytes together, a quarter of `server.max_buffered`: larger bodies are \
         never copied"
    );
    Some(Issue::new(span, message).with_hint(format!("set max_body to \"{budget}B\" or less, or raise `max_buffered`")))
}

/// Warn of the variable `{consumer}` in a header rule of a route that identifies no consumers. The variable then never
/// has a value, so the gateway always removes the header.
fn consumer_without_identity(input: &LintInput<'_>, route: &Route) -> Vec<Issue> {
    let is_api_key = |index: &usize| matches!(input.config.auth.providers[*index].kind, ProviderKind::ApiKey(_));
    let identifies_consumers = route.auth.as_ref().is_some_and(|auth| auth.providers.iter().any(is_api_key));
    let Some(parsed) = input.route(route.index).filter(|_| !identifies_consumers) else { return Vec::new() };
    let parsed = parsed.get_ref();
    let request_rules = parsed.request_headers.as_ref().map(|rules| &rules.get_ref().set);
    let response_rules = parsed.response_headers.as_ref().map(|rules| &rules.get_ref().set);
    let rules = [(&route.request_headers, request_rules), (&route.response_headers, response_rules)];
    let issue = |name: &str, value: &Text| {
        let message = format!(
            "`{}` identifies no consumer, so the header `{name}` never has a value and is removed from every message",
            route.name
        );
        Issue::new(value.span(), message)
            .with_hint("set identify = [\"NAME\"] with a provider of kind \"api-key\" on the route, or remove the rule")
    };
    let mut issues = Vec::new();
    for (compiled, written) in rules {
        let templates = compiled.templates.iter().filter(|(_, template)| template.contains(Variable::Consumer));
        for (name, _) in templates {
            let find = |set: &'_ BTreeMap<String, Text>| {
                set.iter().find(|(key, _)| key.eq_ignore_ascii_case(name.as_str())).map(|(_, value)| value.clone())
            };
            issues.extend(written.and_then(find).map(|value| issue(name.as_str(), &value)));
        }
    }
    issues
}

/// Report routes whose limits use several identities on a Redis Cluster. The limits of such a route may be checked by
/// one call to each of several masters, instead of one atomic call.
fn route_notes(input: &LintInput<'_>) -> Vec<Issue> {
    let is_cluster = input
        .config
        .store
        .redis
        .as_ref()
        .is_some_and(|(servers, _)| matches!(servers, RedisDeployment::Cluster { .. }));
    let affected_routes =
        input.config.routes.iter().filter(|route| is_cluster && route.rate_limits.identities.len() > 1);
    let notes = affected_routes.map(|route| {
        let message = format!(
            "route `{}` makes up to {} store calls at the same time, because several masters hold its identities: if \
             one master denies a request, its tokens at the other masters are missing for about a round trip, until \
             they are refunded",
            route.name,
            route.rate_limits.identities.len()
        );
        Issue { span: input.route(route.index).map(|parsed| parsed.span()), message, hint: None }
    });
    notes.collect()
}

/// Warn if no listener serves the descriptors, or if a listener has no descriptors to serve.
fn unserved_descriptors(input: &LintInput<'_>) -> Option<Issue> {
    let serves = [ListenerProtocol::RateLimit, ListenerProtocol::RateLimitHttp];
    let serving = input.config.listeners.iter().position(|listener| serves.contains(&listener.protocol));
    let written = input.parsed.descriptor.first().map(|descriptor| descriptor.span());
    let written = written.or_else(|| input.parsed.ratelimit.configuration.as_ref().map(|text| text.span()));
    let written = written.or_else(|| input.parsed.ratelimit.xds.as_ref().map(|xds| xds.span()));
    match (serving, written) {
        (None, Some(span)) => {
            let issue = Issue::new(span, "descriptors have no effect: no listener serves them");
            Some(issue.with_hint("add a [[listener]] with protocol = \"ratelimit\""))
        }
        (Some(index), None) => {
            let listener = input.parsed.listener.get(index)?;
            let issue = Issue::new(listener.span(), "this listener admits every call: there is no [[descriptor]]");
            Some(issue.with_hint("add a [[descriptor]] with domain, entries and limits"))
        }
        (Some(_), Some(_)) | (None, None) => None,
    }
}

// Warnings about access rules and CORS, such as entries without effect, or an `allow` list that rejects every client.

fn access_warnings(input: &LintInput<'_>) -> Vec<Issue> {
    let mut issues = Vec::new();
    for (parsed, compiled) in input.parsed.listener.iter().zip(&input.config.listeners) {
        let parsed = parsed.get_ref();
        if let Some(rules) = &compiled.access {
            issues.extend(rule_warnings(parsed.allow.as_deref(), parsed.deny.as_deref(), rules));
        }
    }
    for route in &input.config.routes {
        let Some(parsed) = input.route(route.index).map(|parsed| parsed.get_ref()) else { continue };
        if let Some(rules) = &route.access {
            issues.extend(rule_warnings(parsed.allow.as_deref(), parsed.deny.as_deref(), rules));
        }
        issues.extend(unserved_cors_methods(parsed, route));
        issues.extend(unreachable_preflights(input, parsed, route));
        issues.extend(redundant_expose(parsed, route));
    }
    issues
}

/// Warn of four mistakes in access rules: networks with address bits after the prefix length, networks in `allow` that
/// `deny` covers completely, networks in `deny` that do not overlap `allow`, and an `allow` without networks.
fn rule_warnings(allow: Option<&[Text]>, deny: Option<&[Text]>, rules: &AccessRules) -> Vec<Issue> {
    let networks = |items: Option<&[Text]>| {
        let items = items.unwrap_or_default().iter();
        items.filter_map(|text| Some((text.clone(), parse_network(text.get_ref())?))).collect::<Vec<_>>()
    };
    let allowed = networks(allow);
    let denied = networks(deny);
    let mut issues = Vec::new();
    for (text, network) in allowed.iter().chain(&denied).filter(|(_, network)| *network != network.trunc()) {
        let message = format!("`{}` has address bits after its prefix length; these bits are ignored", text.get_ref());
        issues.push(Issue::new(text.span(), message).with_hint(format!("\"{}\"", network.trunc())));
    }
    for (text, _) in allowed.iter().filter(|(_, network)| rules.deny.covers(*network)) {
        let message =
            format!("`{}` has no effect: `deny` covers the whole network and takes precedence", text.get_ref());
        issues.push(
            Issue::new(text.span(), message).with_hint("remove the network from `allow`, or deny a smaller network"),
        );
    }
    let Some(rule) = &rules.allow else { return issues };
    for (text, _) in denied.iter().filter(|(_, network)| !rule.intersects(*network)) {
        let message = format!("`{}` has no effect: `allow` covers no part of this network", text.get_ref());
        issues.push(Issue::new(text.span(), message).with_hint("remove this entry"));
    }
    if let Some(text) = allow.and_then(<[Text]>::first).filter(|_| rule.is_empty()) {
        let message = "the files of `allow` have no network: every client is rejected with 403";
        issues.push(Issue::new(text.span(), message).with_hint("add a network to the file, such as 10.0.0.0/8"));
    }
    issues
}

/// Warn of methods in `cors` that are not in the route's `methods`, because no preflight for these methods reaches the
/// route.
fn unserved_cors_methods(parsed: &config::tables::Route, route: &Route) -> Vec<Issue> {
    let Some(served) = &parsed.methods else { return Vec::new() };
    let listed = parsed.cors.iter().flat_map(|cors| cors.get_ref().methods.iter().flatten());
    let is_unserved =
        |text: &&Text| text.get_ref() != "*" && !served.iter().any(|method| method.get_ref() == text.get_ref());
    let issue = |text: &Text| {
        let message =
            format!("`{}` does not serve {}: no preflight for it reaches the route", route.name, text.get_ref());
        Issue::new(text.span(), message)
            .with_hint("add the method to `methods` of the route, or remove the method from `cors`")
    };
    listed.filter(is_unserved).map(issue).collect()
}

/// Warn of `cors` in a route that requires request headers. A preflight does not have these headers, so it does not
/// match the route.
fn unreachable_preflights(input: &LintInput<'_>, parsed: &config::tables::Route, route: &Route) -> Option<Issue> {
    let cors = parsed.cors.as_ref().filter(|_| requires_headers(parsed))?;
    let is_for_preflights = |other: &&Arc<Route>| {
        let has_no_headers = || input.route(other.index).is_some_and(|parsed| !requires_headers(parsed.get_ref()));
        other.path == route.path && other.cors.is_some() && has_no_headers()
    };
    if input.config.routes.iter().any(|other| is_for_preflights(&other)) {
        return None;
    }
    let message =
        format!("no preflight reaches `{}`: preflights do not have the headers that this route requires", route.name);
    Some(
        Issue::new(cors.span(), message)
            .with_hint("add a route with the same path and `cors`, and without a `match` on headers"),
    )
}

fn requires_headers(parsed: &config::tables::Route) -> bool {
    parsed.conditions.as_ref().is_some_and(|conditions| !conditions.get_ref().headers.is_empty())
}

/// Warn of `expose_headers` in a route with `cors`, because `cors` exposes the same headers.
fn redundant_expose(parsed: &config::tables::Route, route: &Route) -> Option<Issue> {
    let cors = parsed.cors.as_ref().filter(|_| parsed.expose_headers)?;
    let message = format!("`expose_headers` of `{}` has no effect: `cors` exposes the same headers", route.name);
    Some(Issue::new(cors.span(), message).with_hint("remove `expose_headers`"))
}

// Warnings about authentication: credentials in plaintext, a route that lacks the authentication of another route with
// a similar path, and limits that reject a request although `require` admits it.

fn auth_warnings(input: &LintInput<'_>) -> Vec<Issue> {
    let mut issues: Vec<_> = unused_providers(input).chain(plaintext_credentials(input)).collect();
    let guards: Vec<_> = input.config.routes.iter().filter(|route| requires_credential(route)).collect();
    for route in &input.config.routes {
        issues.extend(unprotected_route(input, route, &guards));
        issues.extend(limits_of_another_kind(input, route));
    }
    issues
}

/// Warn of authentication providers that no route names.
fn unused_providers<'a>(input: &'a LintInput<'_>) -> impl Iterator<Item = Issue> + 'a {
    let routes = || input.config.routes.iter().filter_map(|route| route.auth.as_ref());
    input.config.auth.providers.iter().enumerate().filter_map(move |(index, provider)| {
        let is_used = routes().any(|auth| auth.providers.contains(&index));
        let span = input.parsed.auth.get(&*provider.name)?.span();
        (!is_used).then(|| {
            let issue = Issue::new(span, format!("no route uses the provider `{}`", provider.name));
            issue.with_hint(format!(
                "set require = [\"{0}\"] or identify = [\"{0}\"] on a route, or remove the provider",
                provider.name
            ))
        })
    })
}

/// Warn of listeners without TLS that other hosts can reach, if a route uses credentials such as API keys, tokens or
/// passwords. Do not warn if trusted proxies are configured, because they probably terminate TLS.
fn plaintext_credentials<'a>(input: &'a LintInput<'_>) -> impl Iterator<Item = Issue> + 'a {
    let sends_secret = |index: &usize| !matches!(input.config.auth.providers[*index].kind, ProviderKind::ClientCert);
    let routes = input.config.routes.iter().filter_map(|route| route.auth.as_ref());
    let is_used = routes.flat_map(|auth| &auth.providers).any(sends_secret);
    let is_direct = input.config.client_ip.trusted_proxies.is_empty();
    input.config.listeners.iter().enumerate().filter(move |_| is_used && is_direct).filter_map(|(index, listener)| {
        let is_local = listener.address.tcp().is_none_or(|address| address.ip().to_canonical().is_loopback());
        let parsed = input.parsed.listener.get(index)?;
        let span = parsed.get_ref().address.as_ref().map_or(parsed.span(), |address| address.span());
        (listener.tls.is_none() && !is_local).then(|| {
            let message = format!("clients send credentials to {} in plaintext", listener.address);
            Issue::new(span, message).with_hint(
                "set tls.certificates on this listener, or client_ip.trusted_proxies if a proxy in front \
                            terminates TLS",
            )
        })
    })
}

/// Warn of a route without authentication whose path is below the path of another route, if both forward to the same
/// upstream and the other route requires a credential.
fn unprotected_route(input: &LintInput<'_>, route: &Arc<Route>, guards: &[&Arc<Route>]) -> Option<Issue> {
    let RouteAction::Forward(upstreams) = &route.action else { return None };
    if route.auth.is_some() {
        return None;
    }
    let guard = guards.iter().filter(|guard| is_below(&route.path, &guard.path)).find(|guard| {
        let RouteAction::Forward(guarded) = &guard.action else { return false };
        let (Some(own), Some(other)) = (input.route(route.index), input.route(guard.index)) else { return false };
        let [own, other] = [own, other].map(|parsed| hosts(parsed.get_ref()));
        let shares_upstream = guarded.upstreams().any(|index| upstreams.upstreams().any(|other| index == other));
        shares_upstream && (other.is_empty() || own.iter().any(|host| other.contains(host)))
    })?;
    let parsed = input.route(route.index)?;
    let span = parsed.get_ref().path.as_ref().map_or(parsed.span(), |path| path.span());
    let required = input.route(guard.index)?.get_ref().require.as_ref()?.get_ref();
    let provider = required.iter().flat_map(|item| &item.get_ref().0).next()?;
    let message = format!(
        "`{}` needs no credential, but its path is below {}, and the route `{}` with that path and the same upstream \
         needs one",
        route.name, guard.path, guard.name
    );
    let hint = format!(
        "set require = [\"{provider}\"] here as well; if the route is public, identify = [\"{provider}\"] says that \
         this is intended"
    );
    Some(Issue::new(span, message).with_hint(hint))
}

fn requires_credential(route: &Route) -> bool {
    route.auth.as_ref().is_some_and(|auth| !auth.required.is_empty())
}

/// Return the hosts of a route. An empty list means all hosts.
fn hosts(parsed: &config::tables::Route) -> Vec<&str> {
    parsed.hosts.iter().flatten().map(|host| host.get_ref().as_str()).collect()
}

/// Return whether the pattern `path` is below the pattern `other`. A path is below `other` if `other` consists of fixed
/// segments and a final `{*rest}`, and `path` starts with these segments.
fn is_below(path: &str, other: &str) -> bool {
    let Some((prefix, _)) = other.split_once("{*") else { return false };
    path != other && !prefix.contains('{') && path.starts_with(prefix)
}

/// Warn of a limit whose `by` depends on one kind of credential, if `require` of the route also admits other kinds of
/// credentials. The limit rejects requests with the other kinds.
fn limits_of_another_kind(input: &LintInput<'_>, route: &Route) -> Vec<Issue> {
    let Some(auth) = route.auth.as_ref().filter(|auth| !auth.required.is_empty()) else { return Vec::new() };
    let Some(parsed) = input.route(route.index).map(|parsed| parsed.get_ref()) else { return Vec::new() };
    let mut issues = Vec::new();
    for route_limit in &route.rate_limits.limits {
        let spec = &route.rate_limits.identities[route_limit.identity_index];
        if spec.on_missing != OnMissing::Reject {
            continue;
        }
        for descriptor in &spec.descriptors {
            let has_kind = |index: &usize| {
                let kind = &input.config.auth.providers[*index].kind;
                match descriptor {
                    Descriptor::ApiKey | Descriptor::Group(_) => matches!(kind, ProviderKind::ApiKey(_)),
                    Descriptor::Jwt(_) => matches!(kind, ProviderKind::Jwt(_)),
                    Descriptor::ClientCert => matches!(kind, ProviderKind::ClientCert),
                    _ => true,
                }
            };
            let Some(without) = auth.required.iter().find(|alternative| !alternative.iter().any(has_kind)) else {
                continue;
            };
            let names: Vec<_> = without.iter().map(|index| &*input.config.auth.providers[*index].name).collect();
            let limit = &route_limit.limit.name;
            let span = parsed.limits.iter().find(|text| *text.get_ref() == **limit).map(|text| text.span());
            let message = format!(
                "`{limit}` counts by {}: it rejects requests of `{}` that {} admits",
                descriptor.label(),
                route.name,
                names.join(" with ")
            );
            let issue = Issue { span, message, hint: None };
            issues.push(issue.with_hint(
                "set on_missing = \"skip\" or \"ip\" on the limit, or add a limit for the other credential",
            ));
        }
    }
    issues
}

// Warnings about limits, such as limits that no route uses, limits below the cost of a single request, and limits on
// login routes that admit requests while the store is unavailable.

/// Words that suggest a login if they occur in the name of a limit, or in the name or path of a route. A limit on a
/// login route protects passwords against guessing.
const CREDENTIAL_WORDS: &[&str] = &[
    "login",
    "logon",
    "signin",
    "auth",
    "oauth",
    "oauth2",
    "authenticate",
    "authentication",
    "password",
    "passwd",
    "passcode",
    "token",
    "otp",
    "totp",
    "mfa",
    "2fa",
];

fn limit_warnings(input: &LintInput<'_>) -> Vec<Issue> {
    let mut issues = Vec::new();
    let mut routes_by_limit = BTreeMap::<&str, Vec<&Arc<Route>>>::new();
    for route in &input.config.routes {
        for route_limit in &route.rate_limits.limits {
            routes_by_limit.entry(&route_limit.limit.name).or_default().push(route);
        }
    }
    let mut listeners = input.config.listeners.iter().filter_map(|listener| listener.decisions.as_ref());
    let may_be_named = listeners.any(|settings| settings.api_token.is_some());
    for compiled in input.config.limits.values() {
        let routes = routes_by_limit.remove(&*compiled.limit.name).unwrap_or_default();
        let name = &compiled.limit.name;
        if routes.is_empty() && !input.config.descriptors.uses(name) && !may_be_named {
            let span = input.span_of(name, |_| None::<&Text>);
            issues.push(
                Issue::new(span, format!("no route uses `{name}`"))
                    .with_hint("add the limit to `limits` of a route, or remove the limit"),
            );
        }
        issues.extend(unused_prefetch(input, compiled));
        issues.extend(volatile_usage(input, compiled));
        issues.extend(frequent_events(input, compiled));
        issues.extend(body_of_no_method(input, compiled));
        issues.extend(claims_of_several_issuers(input, compiled, &routes));
        issues.extend(cost_exceeds_capacity(input, compiled));
        issues.extend(unreachable_burst(input, compiled, &routes));
        issues.extend(login_fails_open(input, compiled, &routes));
        issues.extend(intent::chosen_identity(input, compiled, &routes));
        issues.extend(wait_exceeds_timeout(input, compiled, &routes));
    }
    issues
}

/// Warn of a `prefetch` without effect. `prefetch` has no effect if the store is in memory, or if another limit of the
/// route has no `prefetch`.
fn unused_prefetch(input: &LintInput<'_>, compiled: &CompiledLimit) -> Vec<Issue> {
    let limit = &compiled.limit;
    if limit.prefetch == 0 {
        return Vec::new();
    }
    let span = input.span_of(&limit.name, |parsed| parsed.prefetch.as_ref());
    if input.config.store.redis.is_none() {
        let message = format!(
            "the `prefetch` of `{}` has no effect: prefetching saves calls to Redis, but the store is in memory",
            limit.name
        );
        return vec![Issue::new(span, message)];
    }
    let routes = input.config.routes.iter().filter(|route| route.has_limit(limit));
    let issues = routes.filter_map(|route| {
        let other = route.rate_limits.limits.iter().find(|metered| metered.limit.prefetch == 0)?;
        let message = format!(
            "the `prefetch` of `{}` has no effect on requests of `{}` that also count against `{}`, which has no \
             `prefetch`",
            limit.name, route.name, other.limit.name
        );
        Some(Issue::new(span.clone(), message))
    });
    issues.collect()
}

/// Warn that a restart loses the usage totals of a limit, because the store is in memory.
fn volatile_usage(input: &LintInput<'_>, compiled: &CompiledLimit) -> Option<Issue> {
    let limit = &compiled.limit;
    limit.usage.as_ref().filter(|_| input.config.store.redis.is_none())?;
    let span = input.span_of(&limit.name, |parsed| parsed.usage.as_ref());
    let message =
        format!("a restart loses the `usage` totals of `{}`: they are in the memory of the process", limit.name);
    Some(Issue::new(span, message).with_hint("set url = \"redis://…\" in [store]"))
}

/// Warn of limits with quota events and a short period, because each identity may cause an event in each period.
fn frequent_events(input: &LintInput<'_>, compiled: &CompiledLimit) -> Option<Issue> {
    let limit = &compiled.limit;
    limit.notify.as_ref()?;
    let rule = &limit.default_variant.rule;
    let period_us = match rule.burst() {
        Some(burst) => rule.refill_time_us(burst),
        None => limit.default_variant.quota.window_us?,
    };
    if period_us >= MIN_EVENT_PERIOD_US {
        return None;
    }
    let span = input.span_of(&limit.name, |parsed| parsed.notify.as_ref());
    let message =
        format!("`{}` may send an event for each identity and threshold every {} ms", limit.name, period_us / 1000);
    Some(Issue::new(span, message).with_hint("`notify` is meant for quotas by the hour, day or month"))
}

/// A limit with quota events causes a warning if its period is shorter than this time: one minute, in µs.
const MIN_EVENT_PERIOD_US: u64 = 60_000_000;

/// Warn of destinations of quota events that no limit names.
fn unused_destinations(input: &LintInput<'_>) -> impl Iterator<Item = Issue> {
    let is_used = |name: &str| {
        let mut notify = input.config.limits.values().filter_map(|compiled| compiled.limit.notify.as_ref());
        notify.any(|notify| &*notify.to == name)
    };
    let unused = input.parsed.notify.iter().filter(move |(name, _)| !is_used(name));
    unused.map(|(name, destination)| {
        Issue::new(destination.span(), format!("no limit sends events to `{name}`"))
            .with_hint(format!("set notify = \"{name}\" in a limit, or remove the destination"))
    })
}

/// Warn of a limit by a value of the request body if the limit applies only to methods without a body.
fn body_of_no_method(input: &LintInput<'_>, compiled: &CompiledLimit) -> Option<Issue> {
    let spec = &compiled.identity_spec;
    if !spec.reads_body() || !have_no_body(&spec.methods) {
        return None;
    }
    let name = &compiled.limit.name;
    let span = input.span_of(name, |parsed| parsed.by.as_ref());
    let verb =
        if spec.on_missing == OnMissing::Skip || spec.skips_other_messages { "applies" } else { "has an identity" };
    let message = format!("`{name}` never {verb}: requests with its `methods` have no body");
    Some(Issue::new(span, message).with_hint("methods = [\"POST\"]"))
}

/// Warn of limits by a JWT claim if their routes admit tokens of different issuers. Two issuers may use the same `sub`
/// for different subjects (RFC 7519 §4.1.2).
fn claims_of_several_issuers(input: &LintInput<'_>, compiled: &CompiledLimit, routes: &[&Arc<Route>]) -> Option<Issue> {
    let descriptors = &compiled.identity_spec.descriptors;
    let claim = descriptors.iter().find_map(|descriptor| match descriptor {
        Descriptor::Jwt(claim) => Some(&**claim),
        _ => None,
    })?;
    if descriptors.iter().any(|descriptor| matches!(descriptor, Descriptor::Jwt(claim) if **claim == *"iss")) {
        return None;
    }
    let issuers = |routes: &[&Arc<Route>]| -> BTreeSet<Option<&str>> {
        let providers = routes.iter().filter_map(|route| route.auth.as_ref()).flat_map(|auth| &auth.providers);
        let issuers = providers.filter_map(|index| match &input.config.auth.providers[*index].kind {
            ProviderKind::Jwt(verifier) => Some(verifier.issuer.as_deref()),
            ProviderKind::ApiKey(_) | ProviderKind::ClientCert | ProviderKind::Basic(_) | ProviderKind::Forward(_) => {
                None
            }
        });
        issuers.collect()
    };
    // If `by` does not contain `route`, all routes share the counters of the limit.
    let mut groups =
        if descriptors.contains(&Descriptor::Route) { routes.chunks(1) } else { routes.chunks(usize::MAX) };
    groups.find(|routes| issuers(routes).len() > 1)?;
    let name = &compiled.limit.name;
    let span = input.span_of(name, |parsed| parsed.by.as_ref());
    let message = format!(
        "`{name}` counts tokens of different issuers together if they have the same `{claim}`: a claim is unique only \
         for its issuer"
    );
    Some(Issue::new(span, message).with_hint(format!("by = [\"jwt:iss\", \"jwt:{claim}\"]")))
}

/// Warn of quotas whose capacity is below the maximum cost of a request. Quotas whose capacity is below the minimum
/// cost are not reported here, because the configuration is then invalid.
fn cost_exceeds_capacity(input: &LintInput<'_>, compiled: &CompiledLimit) -> Vec<Issue> {
    let limit = &compiled.limit;
    let uses = input.config.routes.iter().flat_map(|route| &route.rate_limits.limits);
    let costs = uses.filter(|metered| Arc::ptr_eq(&metered.limit, limit)).map(|metered| match &metered.cost {
        Cost::Fixed(cost) | Cost::Request { max: cost, .. } => *cost,
        Cost::Tools(tools) => tools.max(),
        Cost::Response { .. } | Cost::Llm(_) => 1,
    });
    let max_cost = costs.max().unwrap_or(0);
    let tiers = limit
        .variants()
        .map(|(tier, variant)| (tier.map_or(String::new(), |tier| format!(" in the tier `{tier}`")), variant));
    let consumers = input.config.auth.consumers();
    let mut consumer_variants: Vec<_> = consumers
        .iter()
        .filter_map(|consumer| {
            Some((format!(" for the consumer `{}`", consumer.name), &**consumer.variants.get(&limit.name)?))
        })
        .collect();
    consumer_variants.sort_by(|(left, _), (right, _)| left.cmp(right));
    consumer_variants.dedup_by(|(left, _), (right, _)| left == right);
    let capacities = tiers.chain(consumer_variants).map(|(owner, variant)| (owner, variant.rule.capacity()));
    let span = input.span_of(&limit.name, |parsed| parsed.cost.as_ref());
    let issues = capacities.filter(|(_, capacity)| *capacity < max_cost).map(|(owner, capacity)| {
        let message = format!(
            "the cost of a request can exceed the capacity of `{}`{owner} ({capacity}): such a request is always \
             denied, with 429 and no Retry-After",
            limit.name
        );
        Issue::new(span.clone(), message).with_hint("set a larger burst or quota, or a smaller cost")
    });
    issues.collect()
}

/// Warn of a configured `burst` that clients can never use, because every route of the limit has a stricter limit for
/// the same requests.
fn unreachable_burst(input: &LintInput<'_>, compiled: &CompiledLimit, routes: &[&Arc<Route>]) -> Option<Issue> {
    let limit = &compiled.limit;
    let parsed_burst = input.limit(&limit.name)?.get_ref().burst.as_ref()?;
    let capacity = limit.default_variant.rule.capacity();
    let stricter = |route: &Route| {
        let own = route.rate_limits.limits.iter().find(|metered| Arc::ptr_eq(&metered.limit, limit))?;
        let others = route.rate_limits.limits.iter().filter(|other| {
            let identity_spec =
                &input.config.limits.get(&*other.limit.name).map(|other_compiled| &other_compiled.identity_spec);
            let has_same_scope = identity_spec.is_some_and(|by| {
                *by == compiled.identity_spec || (by.descriptors == [Descriptor::Global] && by.methods.is_empty())
            });
            let rejects = !other.limit.shadow && other.limit.queue_policy.is_none() && other.limit.tiers.is_empty();
            let in_flight = other.limit.default_variant.rule.is_concurrency();
            has_same_scope && rejects && !in_flight && other.cost == own.cost
        });
        let strictest = others.min_by_key(|other| other.limit.default_variant.rule.capacity())?;
        (strictest.limit.default_variant.rule.capacity() < capacity).then(|| strictest.limit.clone())
    };
    let stricter_limits: Option<Vec<Arc<LimitSpec>>> = routes.iter().map(|route| stricter(route)).collect();
    let other = stricter_limits?.into_iter().max_by_key(|other| other.default_variant.rule.capacity())?;
    let message = format!(
        "the burst of `{}` cannot be reached: `{}` denies the same requests after {} at once",
        limit.name,
        other.name,
        other.default_variant.rule.capacity()
    );
    Some(Issue::new(parsed_burst.span(), message).with_hint(format!(
        "set a burst below {} for this limit, or a larger burst for the stricter limit",
        other.default_variant.rule.capacity()
    )))
}

/// Warn of a limit on a login route that admits requests while the store is unavailable. Attackers could then guess
/// passwords without a limit.
fn login_fails_open(input: &LintInput<'_>, compiled: &CompiledLimit, routes: &[&Arc<Route>]) -> Option<Issue> {
    let limit = &compiled.limit;
    if limit.on_store_error != OnStoreError::Allow || limit.shadow {
        return None;
    }
    let is_credential_name = |message: &str| {
        let words: Vec<_> = message.split(|c: char| !c.is_ascii_alphanumeric()).map(str::to_ascii_lowercase).collect();
        let pair = |words: &[String]| matches!((&*words[0], &*words[1]), ("sign" | "log", "in"));
        words.iter().any(|word| CREDENTIAL_WORDS.contains(&word.as_str())) || words.windows(2).any(pair)
    };
    let credential_route =
        routes.iter().find(|route| is_credential_name(&route.path) || is_credential_name(&route.name));
    let subject = match credential_route {
        _ if is_credential_name(&limit.name) => format!("`{}`", limit.name),
        Some(route) => format!("`{}`, which guards {},", limit.name, route.path),
        None => return None,
    };
    let span = input.span_of(&limit.name, |parsed| parsed.on_store_error.as_ref());
    let text = format!("{subject} does not limit attempts to guess credentials while the store is unavailable");
    Some(Issue::new(span, text).with_hint(
        "set on_store_error = \"local\" to fall back to this gateway's share, or \"deny\" to fail closed with 503",
    ))
}

/// Warn of a `max_wait` that is at least the `timeout` of a route, because requests may time out in the wait queue.
fn wait_exceeds_timeout(input: &LintInput<'_>, compiled: &CompiledLimit, routes: &[&Arc<Route>]) -> Option<Issue> {
    let queue_policy = compiled.limit.queue_policy?;
    let route = routes.iter().find(|route| route.timeout.is_some_and(|timeout| timeout <= queue_policy.max_wait))?;
    let span = input.span_of(&compiled.limit.name, |parsed| parsed.max_wait.as_ref());
    let message = format!(
        "requests may wait in the queue of `{}` longer than the `timeout` of the route `{}`: such a request is \
         charged, and gets 504",
        compiled.limit.name, route.name
    );
    Some(Issue::new(span, message).with_hint("set a shorter `max_wait`, or a longer `timeout`"))
}
