//! From a line of a log to what its limits are asked: by the gateway's own route table, identities and costs.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use http::header::{HOST, HeaderValue};
use http::{HeaderMap, HeaderName, Method, Request, StatusCode, Uri, Version};

use crate::identity::api_key::Caller;
use crate::identity::descriptor::Descriptor;
use crate::identity::{IdentitySpec, OnMissing};
use crate::limiter::algorithm::Rule;
use crate::limiter::key::Identity;
use crate::limiter::quota::Quota;
use crate::limiter::settlement::Deferred;
use crate::limiter::spec::{LimitSpec, LimitVariant};
use crate::proxy::local_reply::Rejection;
use crate::proxy::rate_limit::{LimitContext, build_checks, deferred_action};
use crate::proxy::target::RequestTarget;
use crate::routing::NoMatch;
use crate::snapshot::cost::{Cost, RefundOn};
use crate::snapshot::routes::{Route, RouteLimit};
use crate::snapshot::{CompiledConfig, CompiledLimit};
use crate::tools::replay::format::native::identity_hash_field;
use crate::tools::replay::format::{FieldMapping, FormatCapabilities, LogEntry};
use crate::tools::replay::quota_search::{ProposalError, QuotaProposal, proposed_variant, with_unbounded_permit_ttl};

/// What one limit is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplayCheck {
    /// Which subject of the view.
    pub limit_index: u16,
    /// Which of its sizes; the first one is the standard.
    pub variant_index: u16,
    /// Who, by the order in which they came.
    pub identity_index: u32,
    /// Units.
    pub cost: u64,
}

/// A request that meets limits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplayRequest {
    /// When, µs since the Unix epoch.
    pub time_us: u64,
    /// How long it took, µs.
    pub duration_us: u64,
    /// The status that it got then; 0 where nobody knows.
    pub status: u16,
    /// What its limits are asked.
    pub checks: Box<[ReplayCheck]>,
}

/// What a line comes to.
#[derive(Debug, PartialEq, Eq)]
pub enum ResolvedLine {
    /// Limits have a say.
    Limited(ReplayRequest),
    /// None has.
    Unlimited,
    /// The gateway would turn it down before it asks a limit.
    Rejected(RejectReason),
}

/// Why it would.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RejectReason {
    /// It is no request of HTTP/1.0 or later.
    NotHttp,
    /// No route takes it.
    NoRoute,
    /// It lacks the identity of a limit.
    NoIdentity,
    /// Its path, its host, its method or its cost is not one.
    Malformed,
}

/// Those who were seen by one limit.
#[derive(Debug, Default)]
pub struct SeenIdentities {
    indices: HashMap<Identity, u32>,
    /// By number.
    pub identities: Vec<Identity>,
    /// What to call them.
    pub labels: Vec<IdentityLabel>,
}

/// What to call an identity.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum IdentityLabel {
    /// Its network.
    Network(IpAddr),
    /// In words.
    Text(Box<str>),
}

/// Resolves lines, and remembers whom they named.
#[derive(Debug)]
pub struct LineResolver<'v> {
    config: &'v ReplayConfig,
    /// The head of the line at hand; its parts are used again.
    request: Request<()>,
    /// By subject.
    pub seen: Vec<SeenIdentities>,
    /// By subject, its sizes.
    pub variants: Vec<Vec<Arc<LimitVariant>>>,
    host_cache: (Vec<u8>, Option<HeaderValue>),
    /// Lines whose peer is a trusted proxy that does not say for whom it speaks.
    pub missing_client_count: u64,
}

impl<'v> LineResolver<'v> {
    /// A resolver that has seen nobody.
    pub fn new(config: &'v ReplayConfig) -> Self {
        LineResolver {
            config,
            request: Request::new(()),
            seen: config.limits.iter().map(|_| SeenIdentities::default()).collect(),
            variants: config.limits.iter().map(|limit| vec![limit.variant.clone()]).collect(),
            host_cache: Default::default(),
            missing_client_count: 0,
        }
    }

    /// Finds out what the gateway would ask its limits about a request.
    pub fn resolve(&mut self, entry: &LogEntry<'_>) -> ResolvedLine {
        if !self.build_request(entry) {
            return ResolvedLine::Rejected(RejectReason::NotHttp);
        }
        let compiled = &self.config.compiled;
        let target = match RequestTarget::from_request(&self.request, &compiled.server) {
            Ok(target) => target,
            Err(_) => return ResolvedLine::Rejected(RejectReason::Malformed),
        };
        let (method, headers) = (self.request.method(), self.request.headers());
        let named = entry.route.as_deref().and_then(|name| compiled.routes.iter().find(|route| *route.name == *name));
        let route: &Route = match named {
            Some(route) => route,
            None => match compiled.table.find(&target.host, &target.path, method, headers) {
                Ok(route) => route,
                Err(NoMatch::NotFound | NoMatch::MethodNotAllowed(_)) => {
                    return ResolvedLine::Rejected(RejectReason::NoRoute);
                }
            },
        };
        let replay_route = &self.config.routes[route.index];
        if replay_route.limits.is_empty() {
            return ResolvedLine::Unlimited;
        }
        let peer = entry.client.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        let trusted = !entry.is_client_resolved && compiled.client_ip.is_trusted(peer);
        let client = if trusted { compiled.client_ip.client_address(peer, headers) } else { peer };
        if trusted && !headers.contains_key(&compiled.client_ip.header) {
            self.missing_client_count += 1;
        }
        let subject = entry.certificate_subject.as_deref().and_then(|subject| std::str::from_utf8(subject).ok());
        let limit_context = LimitContext {
            request: &self.request,
            host: &target.host,
            path: &target.path,
            trusted,
            certificate_subject: subject,
        };
        let consumers = replay_route.uses_api_key.then(|| compiled.consumers.load());
        let attributes = limit_context.request_attributes(
            compiled,
            route,
            client,
            consumers.as_deref().map(|consumers| &**consumers),
        );
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
                        let name = identity_spec.display(&attributes, &compiled.api_key_settings, &compiled.client_ip);
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
            // What only the response or a proxy said may be in the log.
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

    /// Makes the head of a request of what a line says; whether it is one.
    fn build_request(&mut self, entry: &LogEntry<'_>) -> bool {
        let Ok(method) = Method::from_bytes(entry.method) else { return false };
        let Ok(uri) = Uri::try_from(&*entry.target) else { return false };
        let host = entry.host.as_deref().or_else(|| uri.authority().map(|authority| authority.as_str().as_bytes()));
        // Without a host it is routed as HTTP/1.0 without one is.
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

// Which limits a log can be held against, and in which sizes.

/// What a field of the log is to be: the identity of a limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdentityField {
    /// The limit.
    pub limit: String,
    /// The field, as the log calls it.
    pub field: String,
}

/// Why the arguments do not fit the configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum ReplayConfigError {
    #[error("there is no limit `{name}`; there are {}", all.join(", "))]
    UnknownLimit { name: String, all: Vec<String> },
    #[error(transparent)]
    Proposal(#[from] ProposalError),
}

/// A limit as it is replayed.
#[derive(Debug)]
pub struct ReplayLimit {
    /// The limit.
    pub limit: Arc<LimitSpec>,
    /// Its standard size, proposed or as configured.
    pub variant: Arc<LimitVariant>,
    /// The quota that the configuration has, where another one is proposed.
    pub configured_quota: Option<Quota>,
    /// Why the log does not say whose requests they are.
    pub skip_reason: Option<String>,
    /// What has to be said about it.
    pub notes: Vec<String>,
    /// What remains to be done when a response is known.
    pub deferred: Deferred,
    /// The sizes of consumers who have others, by what stands for them in the log: their name, or the hash of their identity.
    pub consumer_variants: HashMap<Box<[u8]>, Arc<LimitVariant>>,
    /// Whether what stands for its identities may be a key.
    pub is_secret: bool,
    refund_on: RefundOn,
}

impl ReplayLimit {
    /// Whether a response of this status gives the charge back.
    pub fn is_refunded(&self, status: u16) -> bool {
        StatusCode::from_u16(status).is_ok_and(|status| self.refund_on.contains(status))
    }
}

/// A limit of a route that the log says enough about.
#[derive(Debug)]
pub struct ReplayRoute {
    /// The identities of its limits.
    pub identity_specs: Vec<IdentitySpec>,
    /// Its limits.
    pub limits: Vec<RouteLimit>,
    /// Which subject each of them is.
    pub limit_indices: Vec<usize>,
    /// Whether one is by API key.
    pub uses_api_key: bool,
}

/// A configuration as a log can be held against it.
#[derive(Debug)]
pub struct ReplayConfig {
    /// The configuration.
    pub compiled: CompiledConfig,
    /// The limits that routes use, in the order of their names.
    pub limits: Vec<ReplayLimit>,
    /// For each route, by index, the limits that are replayed.
    pub routes: Vec<ReplayRoute>,
}

/// Fields of the log that stand for identities, as headers that no client can send a request with: they are not in the log.
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

/// What stands for the identities of a subject.
pub(super) fn mapped_header(index: usize) -> HeaderName {
    // Letters and digits are a name.
    HeaderName::try_from(format!("x-sluicegate-replay-{index}")).unwrap_or(http::header::FROM)
}

fn unknown_limit(compiled: &CompiledConfig, name: &str) -> ReplayConfigError {
    ReplayConfigError::UnknownLimit { name: name.to_owned(), all: compiled.limits.keys().cloned().collect() }
}

impl ReplayConfig {
    /// Changes the configuration to what is proposed, and to what the log says.
    ///
    /// # Errors
    /// The proposals do not fit.
    pub fn new(
        compiled: CompiledConfig,
        proposals: &[QuotaProposal],
        mappings: &[FieldMapping],
        capabilities: &FormatCapabilities,
    ) -> Result<ReplayConfig, ReplayConfigError> {
        if let Some(skip_reason) = proposals.iter().find(|proposal| !compiled.limits.contains_key(&proposal.limit)) {
            return Err(unknown_limit(&compiled, &skip_reason.limit));
        }
        let (mut limits, mut identity_specs) = (Vec::new(), Vec::new());
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
            let in_flight = matches!(variant.rule, Rule::Concurrency(_)) && !capabilities.duration;
            let unknown = missing_input.or_else(|| in_flight.then(|| "how long requests took".to_owned()));
            let configured_quota =
                proposal.map(|_| compiled_limit.limit.default_variant.quota).filter(|quota| *quota != variant.quota);
            let notes = limit_notes(compiled_limit, is_mapped, capabilities);
            // A log may hold the key or the token itself.
            let has_secret = |descriptor: &Descriptor| {
                matches!(descriptor, Descriptor::ApiKey | Descriptor::Jwt(_)) || !descriptor.is_public()
            };
            let is_secret = is_mapped
                && !capabilities.identity_hashes
                && compiled_limit.identity_spec.descriptors.iter().any(has_secret);
            let (limit, refund_on) = (compiled_limit.limit.clone(), compiled_limit.refund_on.clone());
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
            let mut replay_route = ReplayRoute {
                identity_specs: Vec::new(),
                limits: Vec::new(),
                limit_indices: Vec::new(),
                uses_api_key: false,
            };
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
                replay_route.uses_api_key |= by.descriptors.contains(&Descriptor::ApiKey);
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

// What a log says of the limits of a configuration, and what it does not.

/// What the log would have to say to tell the identities of a limit, and does not.
pub(super) fn missing_identity_input(
    compiled: &CompiledLimit,
    config: &CompiledConfig,
    capabilities: &FormatCapabilities,
) -> Option<String> {
    let header = |name: &HeaderName| (!capabilities.headers.contains(name)).then(|| format!("the header `{name}`"));
    let missing_input = |descriptor: &Descriptor| match descriptor {
        Descriptor::ApiKey => header(&config.api_key_settings.header),
        Descriptor::User(name) | Descriptor::Header(name) => header(name),
        Descriptor::Cookie(name) => header(&http::header::COOKIE).map(|_| format!("the cookie `{name}`")),
        Descriptor::Ip => (!capabilities.client).then(|| "the client's address".to_owned()),
        Descriptor::Query(name) => (!capabilities.query).then(|| format!("the query parameter `{name}`")),
        Descriptor::Host => (!capabilities.host).then(|| "the host".to_owned()),
        Descriptor::ClientCert => {
            (!capabilities.certificate_subject).then(|| "the subject of the client's certificate".to_owned())
        }
        // A token that was good then is expired now, and logs that have them should not.
        Descriptor::Jwt(name) => Some(format!("the claim `{name}` of the token")),
        Descriptor::Path(_) | Descriptor::Method | Descriptor::Global | Descriptor::Route => None,
    };
    compiled.identity_spec.descriptors.iter().find_map(missing_input)
}

/// What has to be said about a limit; `stands` if a field of the log stands for its identities.
pub(super) fn limit_notes(compiled: &CompiledLimit, is_mapped: bool, capabilities: &FormatCapabilities) -> Vec<String> {
    let mut notes = Vec::new();
    let is_logged = |name: &HeaderName| capabilities.headers.contains(name) || capabilities.identity_hashes;
    match &compiled.cost {
        Some(Cost::Response { default, .. }) if !capabilities.identity_hashes => {
            notes.push(format!("what responses cost is not in this log: each counts as {default}"));
        }
        Some(Cost::Request { header, default, .. }) if !is_logged(header) => {
            notes.push(format!("`{header}` is not in this log: each request counts as {default}"));
        }
        _ => {}
    }
    if is_mapped && !compiled.limit.tiers.is_empty() {
        notes.push("who is not known as a consumer has the standard size, whatever the tier".to_owned());
    }
    if compiled.limit.queue_policy.is_some() {
        notes.push("whoever would wait for a turn (`max_wait`) counts as denied".to_owned());
    }
    if !compiled.refund_on.is_empty() && !capabilities.status {
        notes.push("statuses are not in this log: nothing is refunded".to_owned());
    }
    notes
}

/// Consumers with sizes of their own.
pub(super) fn consumer_variants(
    config: &CompiledConfig,
    compiled: &CompiledLimit,
) -> HashMap<Box<[u8]>, Arc<LimitVariant>> {
    let mut variants = HashMap::new();
    for consumer in config.consumers.load().iter() {
        let variant = Caller::Consumer(consumer).variant(&compiled.limit);
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
