//! Converts log lines into checks of limits, with the gateway's code for routes, identities and costs.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use http::header::{HOST, HeaderValue};
use http::{HeaderMap, HeaderName, Method, Request, StatusCode, Uri, Version};

use crate::identity::auth::{Credentials, ProviderKind, RouteAuth, Verified};
use crate::identity::consumer::Caller;
use crate::identity::spec::Descriptor;
use crate::identity::spec::{IdentitySpec, OnMissing};
use crate::identity::verification::AuthRequest;
use crate::limiter::key::Identity;
use crate::limiter::quota::Quota;
use crate::limiter::settlement::Deferred;
use crate::limiter::spec::{LimitSpec, LimitVariant};
use crate::proxy::admission::{Located, RequestFacts, locate};
use crate::proxy::rate_limit::{build_checks, deferred_action};
use crate::proxy::rejection::Rejection;
use crate::proxy::request::{Origin, RequestHead, RequestTarget, TargetedRequest};
use crate::snapshot::CompiledConfig;
use crate::snapshot::cost::{Cost, RefundOn};
use crate::snapshot::limits::CompiledLimit;
use crate::snapshot::routes::{Route, RouteLimit};
use crate::tools::replay::format::json::identity_hash_field;
use crate::tools::replay::format::{FieldMapping, FormatCapabilities, LogEntry};
use crate::tools::replay::simulator::{ProposalError, QuotaProposal, proposed_variant, with_unbounded_permit_ttl};

/// The check of one limit for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplayCheck {
    /// The index of the limit in [`ReplayConfig::limits`].
    pub limit_index: u16,
    /// The index of the variant of the limit. A variant is a quota of the limit, such as the quota of a tier. Variant 0
    /// is the default.
    pub variant_index: u16,
    /// The index of the identity, in the order in which identities first appear.
    pub identity_index: u32,
    /// The cost of the request.
    pub cost: u64,
}

/// A request that limits apply to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplayRequest {
    /// Start of the request, µs since the Unix epoch.
    pub time_us: u64,
    /// Duration of the request in µs, or 0 if it is unknown.
    pub duration_us: u64,
    /// The status in the log, or 0 if it is unknown.
    pub status: u16,
    /// The checks of the limits for this request.
    pub checks: Box<[ReplayCheck]>,
}

/// The effect of a log line on the limits.
#[derive(Debug, PartialEq, Eq)]
pub enum ResolvedLine {
    /// At least one limit applies to the request.
    Limited(ReplayRequest),
    /// No limit applies to the request.
    Unlimited,
    /// The gateway would reject the request before it checks limits.
    Rejected(RejectReason),
}

/// The reason why the gateway would reject a request before it checks limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RejectReason {
    /// The line does not contain a valid HTTP request of version 1.0 or later.
    NotHttp,
    /// No route matches the request.
    NoRoute,
    /// The route depends on the request body, which logs do not contain.
    RouteByBody,
    /// The identity of a limit is missing.
    NoIdentity,
    /// The path, host, method or cost is invalid.
    Malformed,
    /// An access rule of the listener or the route denies the client.
    Forbidden,
}

/// The identities of one limit that appear in the log.
#[derive(Debug, Default)]
pub struct SeenIdentities {
    indices: HashMap<Identity, u32>,
    /// The hashes of the identities, by index.
    pub identities: Vec<Identity>,
    /// The labels of the identities, by index.
    pub labels: Vec<IdentityLabel>,
}

/// The label of an identity in the report.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum IdentityLabel {
    /// The client network.
    Network(IpAddr),
    /// The parts of the identity, the value of the mapped log field, or a hash.
    Text(Box<str>),
}

/// Converts log entries into checks, and numbers the identities.
#[derive(Debug)]
pub struct LineResolver<'v> {
    config: &'v ReplayConfig,
    /// The request of the current line. All lines reuse this value to avoid allocations.
    request: Request<()>,
    /// Identities of each limit.
    pub seen: Vec<SeenIdentities>,
    /// Variants of each limit.
    pub variants: Vec<Vec<Arc<LimitVariant>>>,
    host_cache: (Vec<u8>, Option<HeaderValue>),
    /// The index of the listener for requests whose log does not name the route: the first listener with TLS, or the
    /// first listener if none has TLS.
    listener: usize,
    /// Number of requests that came from a trusted proxy, but whose log line lacks the header with the client address.
    pub missing_client_count: u64,
}

impl<'v> LineResolver<'v> {
    /// Create a resolver without identities.
    pub fn new(config: &'v ReplayConfig) -> Self {
        LineResolver {
            config,
            request: Request::new(()),
            seen: config.limits.iter().map(|_| SeenIdentities::default()).collect(),
            variants: config.limits.iter().map(|limit| vec![limit.variant.clone()]).collect(),
            host_cache: Default::default(),
            listener: config.compiled.listeners.iter().position(|listener| listener.tls.is_some()).unwrap_or(0),
            missing_client_count: 0,
        }
    }

    /// Build the checks that the gateway would make for a logged request.
    pub fn resolve(&mut self, entry: &LogEntry<'_>) -> ResolvedLine {
        if entry.is_unchecked {
            return ResolvedLine::Unlimited;
        }
        if !self.build_request(entry) {
            return ResolvedLine::Rejected(RejectReason::NotHttp);
        }
        let compiled = &self.config.compiled;
        let head = RequestHead::from(&self.request);
        let Ok(target) = RequestTarget::from_head(head, &compiled.server) else {
            return ResolvedLine::Rejected(RejectReason::Malformed);
        };
        let peer = entry.client.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        let trusted = !entry.is_client_resolved && compiled.client_ip.is_trusted(peer);
        let subject = entry.certificate_subject.as_deref();
        let origin = Origin {
            client: if trusted { compiled.client_ip.client_address(peer, head.headers) } else { peer },
            is_trusted_proxy: trusted,
            certificate_subject: subject.and_then(|subject| std::str::from_utf8(subject).ok()),
            tls: None,
            listener: self.listener,
        };
        let request = TargetedRequest { head, target: &target, origin };
        let mut facts = RequestFacts::new(compiled);
        let named = entry.route.as_deref().and_then(|name| compiled.routes.iter().find(|route| *route.name == *name));
        facts.route = named.map(|route| &**route);
        let route = match locate(&mut facts, &request, None) {
            Ok(Located::Route(route)) => route,
            Ok(Located::Preflight(_)) => return ResolvedLine::Unlimited,
            // The route depends on the body, which logs do not contain.
            Ok(Located::NeedsBody) | Err(Rejection::Inspect(_)) => {
                return ResolvedLine::Rejected(RejectReason::RouteByBody);
            }
            Err(Rejection::Forbidden) => return ResolvedLine::Rejected(RejectReason::Forbidden),
            Err(_) => return ResolvedLine::Rejected(RejectReason::NoRoute),
        };
        let replay_route = &self.config.routes[route.index];
        // Treat OPTIONS requests of a route with CORS as preflights, because logs of other programs do not contain
        // `Origin`.
        let is_preflight = entry.route.is_none() && *head.method == Method::OPTIONS && route.cors.is_some();
        if is_preflight || replay_route.limits.is_empty() {
            return ResolvedLine::Unlimited;
        }
        if trusted && !head.headers.contains_key(&compiled.client_ip.header) {
            self.missing_client_count += 1;
        }
        let credentials = match &replay_route.auth {
            None => Credentials::default(),
            Some(auth) => {
                let request = AuthRequest { now_us: entry.time_us, ..request.auth_request(route) };
                match auth.authenticate(&compiled.auth.providers, &request) {
                    (credentials, Verified::Yes) => credentials,
                    (_, Verified::No(_) | Verified::Waits(_)) => {
                        return ResolvedLine::Rejected(RejectReason::NoIdentity);
                    }
                }
            }
        };
        let headers = head.headers;
        let attributes = request.attributes(compiled, route, &credentials, None);
        let checks = match build_checks(compiled, &replay_route.identity_specs, &replay_route.limits, &attributes) {
            Ok(checks) => checks,
            Err(Rejection::Identity(_)) => return ResolvedLine::Rejected(RejectReason::NoIdentity),
            Err(_) => return ResolvedLine::Rejected(RejectReason::Malformed),
        };
        if checks.is_empty() {
            return ResolvedLine::Unlimited;
        }
        let replay_checks = checks.iter().map(|check| {
            let subject = replay_route.limit_indices[check.limit_index];
            let identity_spec = &replay_route.identity_specs[replay_route.limits[check.limit_index].identity_index];
            let label = || match &identity_spec.descriptors[..] {
                [Descriptor::Ip] => IdentityLabel::Network(attributes.client_network),
                _ if self.config.limits[subject].is_secret => IdentityLabel::Text(check.identity.short_hex().into()),
                _ => IdentityLabel::Text(match headers.get(mapped_header(subject)) {
                    Some(mapped_value) => String::from_utf8_lossy(mapped_value.as_bytes()).into(),
                    None => {
                        let name = identity_spec.display(&attributes, &compiled.client_ip);
                        name.summary(&check.identity.short_hex()).into()
                    }
                }),
            };
            let identity_index = self.seen[subject].index_of(check.identity, label);
            let variants = &mut self.variants[subject];
            let replay_limit = &self.config.limits[subject];
            let mapped_variant = || replay_limit.consumer_variants.get(headers.get(mapped_header(subject))?.as_bytes());
            let own_variant = match Arc::ptr_eq(check.variant, &check.limit.default_variant) {
                true if replay_limit.consumer_variants.is_empty() => None,
                true => mapped_variant(),
                false => Some(check.variant),
            };
            let variant_index = own_variant.map_or(0, |variant| {
                variants.iter().position(|other| other.id == variant.id).unwrap_or_else(|| {
                    variants.push(variant.clone());
                    variants.len() - 1
                })
            });
            // A cost that is not fixed depends on the request or its response. Use the cost in the log, if the log
            // contains it.
            let logged_cost = entry.costs.iter().find(|(name, _)| **name == *check.limit.name).map(|(_, cost)| *cost);
            let is_from_request = !matches!(replay_route.limits[check.limit_index].cost, Cost::Fixed(_));
            let cost = logged_cost.filter(|_| is_from_request).unwrap_or(check.cost);
            ReplayCheck { limit_index: subject as u16, variant_index: variant_index as u16, identity_index, cost }
        });
        ResolvedLine::Limited(ReplayRequest {
            time_us: entry.time_us,
            duration_us: entry.duration_us.unwrap_or(0),
            status: entry.status.unwrap_or(0),
            checks: replay_checks.collect(),
        })
    }

    /// Build `self.request` from a log entry. Return whether the request is valid.
    fn build_request(&mut self, entry: &LogEntry<'_>) -> bool {
        let Ok(method) = Method::from_bytes(entry.method) else { return false };
        let Ok(uri) = Uri::try_from(&*entry.target) else { return false };
        let host = entry.host.as_deref().or_else(|| uri.authority().map(|authority| authority.as_str().as_bytes()));
        // If the log has no host, treat the request as HTTP/1.0, because an HTTP/1.1 request without a host is invalid.
        *self.request.version_mut() = if host.is_some() { Version::HTTP_11 } else { Version::HTTP_10 };
        let value = host.map(|host| {
            if self.host_cache.1.is_none() || self.host_cache.0 != host {
                self.host_cache = (host.to_vec(), HeaderValue::from_bytes(host).ok());
            }
            self.host_cache.1.clone()
        });
        let headers: &mut HeaderMap = self.request.headers_mut();
        headers.clear();
        match value {
            Some(Some(value)) => drop(headers.insert(HOST, value)),
            Some(None) => return false,
            None => {}
        }
        for (name, value) in &entry.headers {
            if let Ok(value) = HeaderValue::from_bytes(value) {
                headers.append(name, value);
            }
        }
        *self.request.method_mut() = method;
        *self.request.uri_mut() = uri;
        true
    }
}

impl fmt::Display for IdentityLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            IdentityLabel::Network(address) => address.fmt(f),
            IdentityLabel::Text(text) => f.write_str(text),
        }
    }
}

impl SeenIdentities {
    fn index_of(&mut self, identity: Identity, label: impl FnOnce() -> IdentityLabel) -> u32 {
        *self.indices.entry(identity).or_insert_with(|| {
            self.identities.push(identity);
            self.labels.push(label());
            (self.identities.len() - 1) as u32
        })
    }
}

// The configuration of a replay: the limits that a log can be replayed against, and their quotas.

/// A log field that is used as the identity of a limit (`--identity`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdentityField {
    /// The name of the limit.
    pub limit: String,
    /// The name of the field in the log.
    pub field: String,
}

/// The reason why the options contradict the configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReplayConfigError {
    /// An option names a limit that does not exist in the configuration.
    #[error("there is no limit `{name}`; the limits are {}", all.join(", "))]
    UnknownLimit {
        /// The name of the limit in the option.
        name: String,
        /// The names of the configured limits.
        all: Vec<String>,
    },
    /// A proposed quota is invalid.
    #[error(transparent)]
    Proposal(#[from] ProposalError),
}

/// A limit in a replay.
#[derive(Debug)]
pub struct ReplayLimit {
    /// The limit in the configuration.
    pub limit: Arc<LimitSpec>,
    /// The default variant, which has the proposed or the configured quota.
    pub variant: Arc<LimitVariant>,
    /// The configured quota, if the replay uses a proposed quota.
    pub configured_quota: Option<Quota>,
    /// The information that the log lacks, so that the limit cannot be replayed. `None` if the limit is replayed.
    pub skip_reason: Option<String>,
    /// Notes on the limit for the report.
    pub notes: Vec<String>,
    /// The operation after the response: a charge of the cost, a possible refund, or nothing.
    pub deferred: Deferred,
    /// The variants of the consumers that do not use the default variant. The key of the map is the value of the mapped
    /// log field: the name of the consumer or its identity hash.
    pub consumer_variants: HashMap<Box<[u8]>, Arc<LimitVariant>>,
    /// Whether the mapped log field may contain secrets. If so, the report shows hashes.
    pub is_secret: bool,
    refund_on: RefundOn,
}

impl ReplayLimit {
    /// Return whether a response with this status refunds the charge.
    pub fn is_refunded(&self, status: u16) -> bool {
        StatusCode::from_u16(status).is_ok_and(|status| self.refund_on.contains(status))
    }
}

/// The limits of a route, without those that cannot be replayed.
#[derive(Debug)]
pub struct ReplayRoute {
    /// The identities of the limits of this route.
    pub identity_specs: Vec<IdentitySpec>,
    /// The limits of this route.
    pub limits: Vec<RouteLimit>,
    /// For each limit of this route, the index into [`ReplayConfig::limits`].
    pub limit_indices: Vec<usize>,
    /// The API key providers of the route, if a limit of the route is by API key. Other providers are ignored, because
    /// logs contain no other credentials.
    pub auth: Option<RouteAuth>,
}

/// The configuration of a replay.
#[derive(Debug)]
pub struct ReplayConfig {
    /// The configuration of the gateway.
    pub compiled: CompiledConfig,
    /// All limits, sorted by name.
    pub limits: Vec<ReplayLimit>,
    /// For each route, the limits that are replayed. The index of the vector is the index of the route.
    pub routes: Vec<ReplayRoute>,
}

/// Map at most one log field to the identity of each limit: the field in `identity_fields`, if there is one for the
/// limit. Otherwise, if the log lacks a part of the identity but contains identity hashes, map the identity hash of the
/// limit. Each field is mapped to a separate header (see `mapped_header`).
///
/// # Errors
/// An option names an unknown limit.
pub fn field_mappings(
    compiled: &CompiledConfig,
    identity_fields: &[IdentityField],
    capabilities: &FormatCapabilities,
) -> Result<Vec<FieldMapping>, ReplayConfigError> {
    for identity_field in identity_fields {
        if !compiled.limits.contains_key(&identity_field.limit) {
            return Err(unknown_limit(compiled, &identity_field.limit));
        }
    }
    let field = |name: &str, compiled_limit: &CompiledLimit| {
        let log_field = identity_fields
            .iter()
            .find(|identity_field| identity_field.limit == name)
            .map(|identity_field| identity_field.field.clone());
        log_field.or_else(|| {
            (capabilities.identity_hashes && missing_identity_input(compiled_limit, compiled, capabilities).is_some())
                .then(|| identity_hash_field(name))
        })
    };
    let mappings = compiled.limits.iter().enumerate().filter_map(|(index, (name, compiled_limit))| {
        Some(FieldMapping { field: field(name, compiled_limit)?, header: mapped_header(index) })
    });
    Ok(mappings.collect())
}

/// Return the artificial header that carries the mapped log field of a limit.
pub(super) fn mapped_header(index: usize) -> HeaderName {
    // The conversion cannot fail, because the name consists of lowercase letters, digits and hyphens.
    HeaderName::try_from(format!("x-sluicegate-replay-{index}")).unwrap_or(http::header::FROM)
}

fn unknown_limit(compiled: &CompiledConfig, name: &str) -> ReplayConfigError {
    ReplayConfigError::UnknownLimit { name: name.to_owned(), all: compiled.limits.keys().cloned().collect() }
}

impl ReplayConfig {
    /// Apply the proposed quotas and the mapped log fields to a configuration.
    ///
    /// # Errors
    /// A proposal names an unknown limit or has an invalid quota.
    pub fn new(
        mut compiled: CompiledConfig,
        proposals: &[QuotaProposal],
        mappings: &[FieldMapping],
        capabilities: &FormatCapabilities,
    ) -> Result<ReplayConfig, ReplayConfigError> {
        // A log without hosts does not show which requests had an unknown host.
        Arc::make_mut(&mut compiled.server).block_unknown_hosts &= capabilities.host;
        if let Some(skip_reason) = proposals.iter().find(|proposal| !compiled.limits.contains_key(&proposal.limit)) {
            return Err(unknown_limit(&compiled, &skip_reason.limit));
        }
        let mut limits = Vec::new();
        let mut identity_specs = Vec::new();
        for (index, (name, compiled_limit)) in compiled.limits.iter().enumerate() {
            let proposal = proposals.iter().rfind(|proposal| proposal.limit == *name);
            let variant = proposal.map_or(Ok(compiled_limit.limit.default_variant.clone()), |proposal| {
                proposed_variant(&compiled, compiled_limit, proposal)
            });
            let variant = with_unbounded_permit_ttl(&compiled, &compiled_limit.limit, variant?);
            let is_mapped = mappings.iter().any(|mapping| mapping.header == mapped_header(index));
            let identity_spec = match is_mapped {
                true => IdentitySpec {
                    descriptors: vec![Descriptor::Header(mapped_header(index))],
                    on_missing: OnMissing::Skip,
                    ..compiled_limit.identity_spec.clone()
                },
                false => compiled_limit.identity_spec.clone(),
            };
            let missing_input = missing_identity_input(compiled_limit, &compiled, capabilities).filter(|_| !is_mapped);
            let in_flight = variant.rule.is_concurrency() && !capabilities.duration;
            let unknown = missing_input.or_else(|| in_flight.then(|| "the duration of requests".to_owned()));
            let configured_quota =
                proposal.map(|_| compiled_limit.limit.default_variant.quota).filter(|quota| *quota != variant.quota);
            let notes = limit_notes(compiled_limit, is_mapped, capabilities);
            // Show hashes in the report if the mapped field may contain an API key or token in plain text.
            let has_secret = |descriptor: &Descriptor| {
                matches!(descriptor, Descriptor::ApiKey | Descriptor::Jwt(_)) || !descriptor.is_public()
            };
            let is_secret = is_mapped
                && !capabilities.identity_hashes
                && compiled_limit.identity_spec.descriptors.iter().any(has_secret);
            let limit = compiled_limit.limit.clone();
            let refund_on = compiled_limit.refund_on.clone();
            let deferred = deferred_action(compiled_limit.cost.as_ref().is_some_and(Cost::is_deferred), &refund_on);
            let consumer_variants =
                if is_mapped { consumer_variants(&compiled, compiled_limit) } else { HashMap::new() };
            limits.push(ReplayLimit {
                limit,
                variant,
                configured_quota,
                skip_reason: unknown,
                notes,
                deferred,
                consumer_variants,
                is_secret,
                refund_on,
            });
            identity_specs.push(identity_spec);
        }
        let routes = compiled.routes.iter().map(|route| {
            let mut replay_route =
                ReplayRoute { identity_specs: Vec::new(), limits: Vec::new(), limit_indices: Vec::new(), auth: None };
            for route_limit in &route.rate_limits.limits {
                let Some(limit_index) =
                    limits.iter().position(|limit_index| Arc::ptr_eq(&limit_index.limit, &route_limit.limit))
                else {
                    continue;
                };
                if limits[limit_index].skip_reason.is_some() {
                    continue;
                }
                let by = &identity_specs[limit_index];
                let is_by_key = |part: &Descriptor| matches!(part, Descriptor::ApiKey | Descriptor::Group(_));
                if by.descriptors.iter().any(is_by_key) {
                    replay_route.auth = Some(identify_by_api_key(&compiled, route));
                }
                let identity_index =
                    replay_route.identity_specs.iter().position(|other| other == by).unwrap_or_else(|| {
                        replay_route.identity_specs.push(by.clone());
                        replay_route.identity_specs.len() - 1
                    });
                replay_route.limits.push(RouteLimit { identity_index, ..route_limit.clone() });
                replay_route.limit_indices.push(limit_index);
            }
            replay_route
        });
        let routes = routes.collect();
        Ok(ReplayConfig { compiled, limits, routes })
    }
}

// Functions that determine whether a log has the information that limits depend on.

/// Return the first part of the identity of a limit that the log lacks. Return `None` if the log has all parts.
pub(super) fn missing_identity_input(
    compiled: &CompiledLimit,
    config: &CompiledConfig,
    capabilities: &FormatCapabilities,
) -> Option<String> {
    let header = |name: &HeaderName| (!capabilities.headers.contains(name)).then(|| format!("the header `{name}`"));
    let missing_input = |descriptor: &Descriptor| match descriptor {
        Descriptor::ApiKey | Descriptor::Group(_) => api_key_headers(config, compiled).find_map(header),
        Descriptor::User(name) | Descriptor::Header(name) => header(name),
        Descriptor::Cookie(name) => header(&http::header::COOKIE).map(|_| format!("the cookie `{name}`")),
        Descriptor::Ip => (!capabilities.client).then(|| "the client's address".to_owned()),
        Descriptor::Query(name) => (!capabilities.query).then(|| format!("the query parameter `{name}`")),
        Descriptor::Host => (!capabilities.host).then(|| "the host".to_owned()),
        Descriptor::ClientCert => {
            (!capabilities.certificate_subject).then(|| "the subject of the client certificate".to_owned())
        }
        // Treat JWTs as missing, because logs should not contain them, and logged JWTs have usually expired.
        Descriptor::Jwt(name) => Some(format!("the claim `{name}` of the token")),
        Descriptor::Basic => Some("the user name (Basic authentication)".to_owned()),
        Descriptor::Forward(name) => Some(format!("the header `{name}` of the authentication server")),
        Descriptor::ClaimedUser => header(&http::header::AUTHORIZATION),
        Descriptor::Json(_) | Descriptor::Form(_) | Descriptor::Rpc(_) => Some(format!("the {descriptor} of the body")),
        Descriptor::Entry(_) => Some(format!("the {descriptor}")),
        Descriptor::Path(_) | Descriptor::Method | Descriptor::Global | Descriptor::Route => None,
    };
    compiled.identity_spec.descriptors.iter().find_map(missing_input)
}

/// Return the headers that may contain the API keys that a limit counts: the headers that the API key providers of the
/// limit's routes read.
fn api_key_headers<'c>(
    config: &'c CompiledConfig,
    compiled: &'c CompiledLimit,
) -> impl Iterator<Item = &'c HeaderName> {
    let routes = config.routes.iter().filter(|route| route.has_limit(&compiled.limit));
    let indices = routes.flat_map(|route| api_key_providers(config, route));
    indices.flat_map(|index| config.auth.providers[index].headers())
}

fn api_key_providers<'c>(config: &'c CompiledConfig, route: &'c Route) -> impl Iterator<Item = usize> + 'c {
    let providers = route.auth.iter().flat_map(|auth| &auth.providers).copied();
    providers.filter(|index| matches!(config.auth.providers[*index].kind, ProviderKind::ApiKey(_)))
}

/// Return the API key providers of a route, changed so that they require no credential.
fn identify_by_api_key(config: &CompiledConfig, route: &Route) -> RouteAuth {
    let identify: Vec<_> = api_key_providers(config, route).collect();
    RouteAuth {
        required: Vec::new(),
        providers: identify.clone(),
        identify,
        challenges: Vec::new(),
        missing: Arc::from(""),
    }
}

/// Return notes on how the replay of a limit differs from the gateway's decisions. `is_mapped` is true if a log field
/// is mapped to the identity of the limit.
pub(super) fn limit_notes(compiled: &CompiledLimit, is_mapped: bool, capabilities: &FormatCapabilities) -> Vec<String> {
    let mut notes = Vec::new();
    let is_logged = |name: &HeaderName| capabilities.headers.contains(name) || capabilities.identity_hashes;
    match &compiled.cost {
        Some(Cost::Response { default, .. }) if !capabilities.identity_hashes => {
            notes.push(format!("costs in response headers are not in this log: each request counts as {default}"));
        }
        Some(Cost::Llm(_)) if !capabilities.identity_hashes => {
            notes.push("the numbers of LLM tokens are not in this log: each request counts as 1".to_owned());
        }
        Some(Cost::Tools(tools)) if !capabilities.identity_hashes => {
            notes.push(format!(
                "the tools that requests call are not in this log: each request counts as {}",
                tools.default
            ));
        }
        Some(Cost::Request { header, default, .. }) if !is_logged(header) => {
            notes.push(format!("`{header}` is not in this log: each request counts as {default}"));
        }
        _ => {}
    }
    if is_mapped && !compiled.limit.tiers.is_empty() {
        notes.push(
            "only consumers of the configuration have a tier: all other clients get the standard quota".to_owned(),
        );
    }
    if compiled.limit.queue_policy.is_some() {
        notes.push("requests that the gateway would queue (`max_wait`) count as denied".to_owned());
    }
    if !compiled.refund_on.is_empty() && !capabilities.status {
        notes.push("response statuses are not in this log: the replay refunds nothing".to_owned());
    }
    notes
}

/// Return the variants of the consumers that do not use the default variant. The keys of the map are the names of the
/// consumers and, for a limit by the API key alone, also their identity hashes.
pub(super) fn consumer_variants(
    config: &CompiledConfig,
    compiled: &CompiledLimit,
) -> HashMap<Box<[u8]>, Arc<LimitVariant>> {
    let mut variants = HashMap::new();
    for consumer in config.auth.consumers().iter() {
        let caller = Caller::Consumer(consumer.clone());
        let variant = caller.variant(&compiled.limit);
        if Arc::ptr_eq(variant, &compiled.limit.default_variant)
            || !compiled.identity_spec.descriptors.contains(&Descriptor::ApiKey)
        {
            continue;
        }
        variants.insert(consumer.name.as_bytes().into(), variant.clone());
        if compiled.identity_spec.descriptors == [Descriptor::ApiKey] {
            variants.insert(consumer.identity(&config.hasher).to_hex().as_slice().into(), variant.clone());
        }
    }
    variants
}
