//! Lints of a valid configuration: settings that probably do not do what was intended, each with its span in the file.

use std::collections::BTreeMap;
use std::net::{IpAddr, ToSocketAddrs, UdpSocket};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use http::Method;
use ipnet::IpNet;

use crate::config;
use crate::config::error::{Issue, Spanned};
use crate::config::file::ParsedFile;
use crate::config::{Config, Text};
use crate::identity::Descriptor;
use crate::limiter::algorithm::Rule;
use crate::limiter::redis::RedisDeployment;
use crate::limiter::spec::{LimitSpec, OnStoreError};
use crate::routing::pattern;
use crate::snapshot::cost::Cost;
use crate::snapshot::listeners::WarningSubject;
use crate::snapshot::routes::{Route, RouteAction, foreign_path_hint};
use crate::snapshot::{CompiledConfig, CompiledLimit};
use crate::upstream::UpstreamSettings;

/// A configuration as parsed and as compiled.
struct LintInput<'a> {
    parsed: &'a Config,
    config: &'a CompiledConfig,
}

/// Return all warnings, unsorted. `now` is the time since the Unix epoch, for the expiry of certificates.
pub fn warnings(parsed: &Config, config: &CompiledConfig, now: Duration) -> Vec<Issue> {
    let input = LintInput { parsed, config };
    let mut issues: Vec<_> =
        config.warnings(now).into_iter().map(|(subject, text)| input.warning_issue(&subject, text)).collect();
    issues.extend(limit_warnings(&input));
    issues.extend(route_warnings(&input));
    issues.extend(client_warnings(&input));
    issues
}

/// Return errors that only binding the listeners would show: listeners whose addresses conflict.
pub fn errors(file: &ParsedFile<Config>, config: &CompiledConfig) -> Vec<Issue> {
    let address = |index: usize| file.value.listener.get(index).and_then(|each| each.get_ref().address.as_ref());
    let issue = |(earlier, later): (usize, usize)| {
        let [earlier_address, later_address] = [earlier, later].map(|index| config.listeners[index].address);
        let (earlier, later) = (address(earlier)?.span(), address(later)?.span());
        let (line, _) = Issue::new(earlier, "").position(&file.text)?;
        let message = format!("{later_address} is taken by the [[listener]] on {earlier_address} in line {line}");
        Some(Issue::new(later, message).with_hint(
            "remove one of them or set another port: an unspecified address covers every address, [::] possibly IPv4 as well",
        ))
    };
    config.address_conflicts().filter_map(issue).collect()
}

/// Return notes: properties of a correct configuration that operators should know.
pub fn notes(parsed: &Config, config: &CompiledConfig) -> Vec<Issue> {
    let mut notes = route_notes(&LintInput { parsed, config });
    if let (Some(acme), Some(table)) = (config.acme.as_ref().filter(|acme| !acme.names.is_empty()), &parsed.acme) {
        let message =
            format!("certificates are requested from {} for {}", acme.settings.directory, acme.names.join(", "));
        notes.push(Issue { span: Some(table.span()), message, hint: None });
    }
    notes
}

/// Resolve the names that certificates are requested for. Return warnings for those without an address, and notes for
/// those with other addresses than this machine has, which is right behind a load balancer. This may take seconds.
pub fn resolve_names(parsed: &Config, config: &CompiledConfig) -> (Vec<Issue>, Vec<Issue>) {
    let (mut warnings, mut notes) = (Vec::new(), Vec::new());
    let (Some(acme), Some(table)) = (&config.acme, &parsed.acme) else { return (warnings, notes) };
    let lookup = |name: &str| (name, 443).to_socket_addrs().map(|all| all.map(|one| one.ip()).collect::<Vec<_>>());
    let results: Vec<_> = std::thread::scope(|scope| {
        let lookups: Vec<_> = acme.names.iter().map(|name| (name, scope.spawn(|| lookup(name)))).collect();
        lookups.into_iter().map(|(name, lookup)| (name, lookup.join())).collect()
    });
    for (name, result) in results {
        let addresses = match result {
            Ok(Ok(addresses)) => addresses,
            Ok(Err(error)) => {
                let message = format!("`{name}` does not resolve, and the CA cannot validate it: {error}");
                let hint = "add A or AAAA records with the addresses of the gateways or of their load balancer";
                warnings.push(Issue::new(table.span(), message).with_hint(hint));
                continue;
            }
            Err(_) => continue,
        };
        // Only addresses of this machine can be bound.
        let other = addresses.iter().find(|address| UdpSocket::bind((**address, 0)).is_err());
        let message = match other {
            Some(other) => format!(
                "`{name}` resolves to {other}, which is no address of this machine: right behind NAT or a load balancer"
            ),
            None => format!("`{name}` resolves to this machine"),
        };
        notes.push(Issue { span: Some(table.span()), message, hint: None });
    }
    (warnings, notes)
}

impl<'a> LintInput<'a> {
    fn limit(&self, name: &str) -> Option<&'a Spanned<config::tables::Limit>> {
        let limits: &'a BTreeMap<_, _> = &self.parsed.limit;
        limits.get(name)
    }

    /// The parsed route at `index`. Compiling drops no route, so parsed and compiled routes have the same indices.
    fn route(&self, index: usize) -> Option<&'a Spanned<config::tables::Route>> {
        self.parsed.route.get(index)
    }

    /// The span of a value of a limit; the span of the limit if the value is not set.
    fn span_of<T>(&self, name: &str, value: impl Fn(&config::tables::Limit) -> Option<&Spanned<T>>) -> Range<usize> {
        let Some(limit) = self.limit(name) else { return 0..0 };
        value(limit.get_ref()).map_or(limit.span(), |value| value.span())
    }

    fn warning_issue(&self, subject: &WarningSubject, text: String) -> Issue {
        let listener = |index: usize| self.parsed.listener.get(index);
        let span = match subject {
            WarningSubject::Upstream(name) => self.parsed.upstream.get(&**name).map(|upstream| upstream.span()),
            WarningSubject::Listener(index) => listener(*index).map(|listener| listener.span()),
            WarningSubject::Certificate(index, number) => listener(*index).and_then(|listener| {
                let tls = listener.get_ref().tls.as_ref()?;
                tls.get_ref().certificates.get(*number).map(|certificate| certificate.span())
            }),
            WarningSubject::Acme => self.parsed.acme.as_ref().map(|acme| acme.span()),
        };
        Issue { span, message: text, hint: None }
    }
}

// Client identification: trusted proxies, client addresses and the secret of the store.

/// Shortest prefix (IPv4, IPv6) that a network of proxies plausibly has: 10.0.0.0/8 and fc00::/7 are the widest
/// private networks.
const MIN_PREFIX_LENGTHS: (u8, u8) = (8, 7);

fn client_warnings(input: &LintInput<'_>) -> Vec<Issue> {
    let mut issues: Vec<_> = overly_broad_proxies(input).collect();
    issues.extend(shared_client_address(input));
    issues.extend(missing_store_secret(input));
    issues
}

/// Trusted proxies whose networks include public clients.
fn overly_broad_proxies<'a>(input: &'a LintInput<'_>) -> impl Iterator<Item = Issue> + 'a {
    let proxies = input.parsed.client_ip.trusted_proxies.iter().flatten();
    proxies.zip(&input.config.client_ip.trusted_proxies).filter_map(|(proxy, network)| {
        let prefix_length = match network {
            IpNet::V4(network) if network.prefix_len() < MIN_PREFIX_LENGTHS.0 => network.prefix_len(),
            IpNet::V6(network) if network.prefix_len() < MIN_PREFIX_LENGTHS.1 => network.prefix_len(),
            IpNet::V4(_) | IpNet::V6(_) => return None,
        };
        let extent = if prefix_length == 0 { "the whole internet" } else { "much of the internet" };
        let proxy_text = proxy.get_ref();
        let message = format!(
            "`{proxy_text}` covers {extent}: clients there can claim any address and evade every limit by address"
        );
        Some(
            Issue::new(proxy.span(), message)
                .with_hint("list only the networks of your own proxies, such as \"10.0.0.0/8\""),
        )
    })
}

/// A limit by `ip` behind an unconfigured proxy. If every listener has a private address, clients reach it through a
/// proxy only, and without `trusted_proxies` all requests have the address of that proxy.
fn shared_client_address(input: &LintInput<'_>) -> Option<Issue> {
    let all_private = input.config.listeners.iter().all(|listener| is_private(listener.address.ip()));
    if !all_private || input.parsed.client_ip.trusted_proxies.is_some() {
        return None;
    }
    let used = input.config.routes.iter().flat_map(|route| &route.rate_limits.limits);
    let used: Vec<_> = used.map(|metered| &*metered.limit.name).collect();
    // Report the first such limit of the file.
    let by_address =
        input.config.limits.values().filter(|compiled| compiled.identity_spec.descriptors.contains(&Descriptor::Ip));
    let by_address = by_address.filter(|compiled| used.contains(&&*compiled.limit.name));
    let spans = by_address
        .map(|compiled| (input.span_of(&compiled.limit.name, |limit| limit.by.as_ref()), &compiled.limit.name));
    let (span, name) = spans.min_by_key(|(span, _)| span.start)?;
    let message = format!(
        "`{name}` is by address, and only a proxy reaches a private address: without `trusted_proxies` all clients share one bucket"
    );
    let hint = "set trusted_proxies in [client_ip] to the proxy's address, such as [\"10.0.0.0/8\"]; [] if clients connect directly";
    Some(Issue::new(span, message).with_hint(hint))
}

fn is_private(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_loopback() || address.is_private() || address.is_link_local(),
        IpAddr::V6(address) => address.is_loopback() || address.is_unique_local() || address.is_unicast_link_local(),
    }
}

/// A Redis store without `secret`: an attacker who reads the keys can recover client addresses by hashing guesses.
fn missing_store_secret(input: &LintInput<'_>) -> Option<Issue> {
    let store = &input.parsed.store;
    let is_empty = store.secret.as_ref().is_none_or(|secret| secret.get_ref().is_empty());
    let is_redis_without_secret = input.config.store.redis.is_some() && is_empty;
    let span = store.secret.as_ref().or(store.url.as_ref()).filter(|_| is_redis_without_secret)?.span();
    let message = "the store has no `secret`: a reader of the keys in Redis can guess the client addresses in them";
    Some(Issue::new(span, message).with_hint(
        "set secret = \"${SLUICEGATE_STORE_SECRET}\", the same on all gateways; generate it with openssl rand -hex 32",
    ))
}

// Routes: conditions that no request meets, and retries without time for them.

fn route_warnings(input: &LintInput<'_>) -> Vec<Issue> {
    let mut issues: Vec<_> = unreachable_methods(input).collect();
    for route in &input.config.routes {
        issues.extend(unmatchable_conditions(input, route));
        issues.extend(literal_wildcards(input, route));
        issues.extend(foreign_path(input, route));
        issues.extend(retries_without_time(input, route));
    }
    issues
}

/// Routes that never get some methods because another route takes precedence.
fn unreachable_methods<'a>(input: &'a LintInput<'_>) -> impl Iterator<Item = Issue> + 'a {
    input.config.table.unreachable_routes().filter_map(|(route, other, methods)| {
        let parsed = input.route(route.index)?;
        let methods: Vec<_> = methods.iter().map(Method::as_str).collect();
        let message = format!(
            "`{}` never gets {}: they match `{}` first, because routes with `methods` precede routes without, whatever their headers",
            route.name,
            methods.join(", "),
            other.name
        );
        let span = parsed.get_ref().name.as_ref().map_or(parsed.span(), |name| name.span());
        Some(Issue::new(span, message).with_hint(format!("set methods = {methods:?} here as well: then the route with more headers comes first")))
    })
}

/// Routes with conditions that no request meets: CONNECT and TRACE, which the gateway rejects, and header values with
/// leading or trailing whitespace, which the HTTP parser strips.
fn unmatchable_conditions(input: &LintInput<'_>, route: &Route) -> Vec<Issue> {
    let Some(parsed) = input.route(route.index).map(|parsed| parsed.get_ref()) else { return Vec::new() };
    let mut issues = Vec::new();
    let is_refused = |text: &str| matches!(text, "CONNECT" | "TRACE");
    let methods = parsed.methods.iter().flatten().filter(|text| is_refused(text.get_ref()));
    for text in methods {
        let message = format!("`{}` never gets {}: the gateway rejects it on all routes", route.name, text.get_ref());
        issues.push(Issue::new(text.span(), message).with_hint("remove it"));
    }
    for (name, value) in &parsed.headers {
        if value.get_ref().trim() != value.get_ref() {
            let message = format!("`{}` never matches: a header value has no leading or trailing spaces", route.name);
            issues
                .push(Issue::new(value.span(), message).with_hint(format!("{name} = \"{}\"", value.get_ref().trim())));
        }
    }
    issues
}

/// Header values with `*`, which matches only itself. Some headers have values with it (RFC 9110 §12.5, §13.1).
fn literal_wildcards(input: &LintInput<'_>, route: &Route) -> Vec<Issue> {
    let Some(parsed) = input.route(route.index).map(|parsed| parsed.get_ref()) else { return Vec::new() };
    let has_wildcards = |name: &str| {
        let name = name.to_ascii_lowercase();
        name.starts_with("accept") || matches!(&*name, "if-match" | "if-none-match")
    };
    let values = parsed.headers.iter().filter(|(name, value)| value.get_ref().contains('*') && !has_wildcards(name));
    let issue = |(name, value): (&String, &Text)| {
        let message = format!("`{}` requires this value of `{name}` literally: `*` is no wildcard", route.name);
        Issue::new(value.span(), message)
            .with_hint("write the exact value, with one route for each; a header of any value cannot be required")
    };
    values.map(issue).collect()
}

/// Paths in the syntax of other programs that are valid here, and match their characters literally.
fn foreign_path(input: &LintInput<'_>, route: &Route) -> Option<Issue> {
    let path = input.route(route.index)?.get_ref().path.as_ref()?;
    let suggestion = pattern::suggestion(path.get_ref())?;
    let message = format!("`{}` matches the characters of this path literally, not as a pattern", route.name);
    Some(Issue::new(path.span(), message).with_hint(foreign_path_hint(&suggestion)))
}

/// Retries that a slow first attempt leaves no time for: `response_timeout` is at least the `timeout` of the route.
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

/// Routes with several identities on a Redis Cluster: a check is one call per master, not one atomic call.
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
            "route `{}` makes up to {} calls at the same time, because several masters hold its identities: a request \
             that one master denies holds tokens of the others for about a round trip",
            route.name,
            route.rate_limits.identities.len()
        );
        Issue { span: input.route(route.index).map(|parsed| parsed.span()), message, hint: None }
    });
    notes.collect()
}

// Limits: without effect, too small for the cost of a request, or failing open on credential routes.

/// Words in names and paths of routes on which a limit protects credentials against guessing.
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
    for compiled in input.config.limits.values() {
        let routes: Vec<_> = input.config.routes.iter().filter(|route| route.has_limit(&compiled.limit)).collect();
        if routes.is_empty() {
            let name = &compiled.limit.name;
            let span = input.span_of(name, |_| None::<&Text>);
            issues.push(
                Issue::new(span, format!("no route uses `{name}`"))
                    .with_hint("name it in `limits` of a route, or remove it"),
            );
        }
        issues.extend(unused_prefetch(input, compiled));
        issues.extend(cost_exceeds_capacity(input, compiled));
        issues.extend(unreachable_burst(input, compiled, &routes));
        issues.extend(login_fails_open(input, compiled, &routes));
        issues.extend(wait_exceeds_timeout(input, compiled, &routes));
    }
    issues
}

/// Limits whose `prefetch` has no effect: with the memory store, or next to a limit without `prefetch`.
fn unused_prefetch(input: &LintInput<'_>, compiled: &CompiledLimit) -> Vec<Issue> {
    let limit = &compiled.limit;
    if limit.prefetch == 0 {
        return Vec::new();
    }
    let span = input.span_of(&limit.name, |parsed| parsed.prefetch.as_ref());
    if input.config.store.redis.is_none() {
        let message = format!("the `prefetch` of `{}` has no effect: the memory store needs no calls", limit.name);
        return vec![Issue::new(span, message)];
    }
    let routes = input.config.routes.iter().filter(|route| route.has_limit(limit));
    let issues = routes.filter_map(|route| {
        let other = route.rate_limits.limits.iter().find(|metered| metered.limit.prefetch == 0)?;
        let message = format!(
            "the `prefetch` of `{}` has no effect on requests of `{}` that meet `{}`, which has no `prefetch`",
            limit.name, route.name, other.limit.name
        );
        Some(Issue::new(span.clone(), message))
    });
    issues.collect()
}

/// Quotas whose capacity is below the maximum cost of a request. A cost that always exceeds the capacity is an error
/// at compile time.
fn cost_exceeds_capacity(input: &LintInput<'_>, compiled: &CompiledLimit) -> Vec<Issue> {
    let limit = &compiled.limit;
    let uses = input.config.routes.iter().flat_map(|route| &route.rate_limits.limits);
    let costs = uses.filter(|metered| Arc::ptr_eq(&metered.limit, limit)).map(|metered| match &metered.cost {
        Cost::Fixed(cost) | Cost::Request { max: cost, .. } => *cost,
        Cost::Response { .. } => 1,
    });
    let max_cost = costs.max().unwrap_or(0);
    let tiers = limit
        .variants()
        .map(|(tier, variant)| (tier.map_or(String::new(), |tier| format!(" in the tier `{tier}`")), variant));
    let consumers = input.config.consumers.load();
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
            "a cost can exceed the capacity of `{}`{owner} ({capacity}): such a request is always denied, with 429 and \
             no Retry-After",
            limit.name
        );
        Issue::new(span.clone(), message).with_hint("set a larger burst or quota, or a smaller cost")
    });
    issues.collect()
}

/// A configured `burst` that is unreachable because every route has a stricter limit for the same requests.
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
            let in_flight = matches!(other.limit.default_variant.rule, Rule::Concurrency(_));
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
    Some(
        Issue::new(parsed_burst.span(), message)
            .with_hint(format!("set a burst below {}, or a larger one there", other.default_variant.rule.capacity())),
    )
}

/// A limit that protects credentials against guessing, and fails open while the store is unavailable.
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
    let text = format!("{subject} does not protect against guessing while the store is unavailable");
    Some(
        Issue::new(span, text)
            .with_hint("\"local\" falls back to this gateway's share, \"deny\" fails closed with 503"),
    )
}

/// A `max_wait` that is at least the `timeout` of a route: the request times out in the wait queue.
fn wait_exceeds_timeout(input: &LintInput<'_>, compiled: &CompiledLimit, routes: &[&Arc<Route>]) -> Option<Issue> {
    let queue_policy = compiled.limit.queue_policy?;
    let route = routes.iter().find(|route| route.timeout.is_some_and(|timeout| timeout <= queue_policy.max_wait))?;
    let span = input.span_of(&compiled.limit.name, |parsed| parsed.max_wait.as_ref());
    let message = format!(
        "a request may be queued for `{}` longer than the `timeout` of the route `{}`: it is charged, and gets 504",
        compiled.limit.name, route.name
    );
    Some(Issue::new(span, message).with_hint("set a shorter `max_wait`, or a longer `timeout`"))
}
