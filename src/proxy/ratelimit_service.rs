//! Envoy's rate limit service: the methods of a listener with `protocol = "ratelimit"`.

use std::mem;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Request, Response};
use hyper::body::Incoming;
use prost::Message;
use tokio::time::timeout;
use tracing::warn;

use crate::clock::{LogThrottle, monotonic, unix_us};
use crate::http::body::Body;
use crate::http::body_limits::INSPECTED_SHARE;
use crate::http::flow::StreamFlow;
use crate::http::grpc::{CallError, Code as Status, ReadMessage, message_response, read_message, time_to_answer};
use crate::http::headers;
use crate::http::ratelimit_headers::{HeaderStyle, append_decision_headers, set_retry_after};
use crate::limiter::Limiter;
use crate::limiter::algorithm::{MAX_REQUEST_WEIGHT, Outcome};
use crate::limiter::decision::{Decision, LimitCheck};
use crate::limiter::fallback::StoreUnavailable;
use crate::limiter::key::IdentityEncoder;
use crate::limiter::overrides::OverrideTable;
use crate::limiter::quota::Quota;
use crate::limiter::settlement::Deferred;
use crate::limiter::spec::LimitVariant;
use crate::limiter::verdict::StoreError;
use crate::payload::envoy::{
    Code, DescriptorStatus, HealthCheckRequest, HealthCheckResponse, Kind, List, RateLimit, RateLimitDescriptor,
    RateLimitOverride, RateLimitRequest, RateLimitResponse, ServingStatus, Struct, Unit,
};
use crate::payload::{envoy, envoy::HeaderValue};
use crate::proxy::config_snapshot::ConfigSnapshot;
use crate::proxy::metrics::LimitDecision;
use crate::proxy::request::Peer;
use crate::snapshot::descriptor_files::FileRule;
use crate::snapshot::descriptors::{DescriptorHeaders, DescriptorLimit, DescriptorRule, LimitInCall};
use crate::snapshot::limits::ChargePolicy;

/// Name of the service, also for health checks.
const SERVICE: &str = "envoy.service.ratelimit.v3.RateLimitService";

/// Maximum length of a message in bytes. Envoy bounds the headers of a request, whose values may occur in several
/// descriptors.
pub(super) const MAX_MESSAGE: usize = 256 << 10;

/// Maximum number of descriptors of a call, and of checks for its descriptors.
const MAX_DESCRIPTORS: usize = 64;

/// Maximum time to answer a call without `grpc-timeout`.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);

/// Minimum interval between log records about calls that are denied without a check.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Time after which a client may retry a request that was not checked. `Retry-After` has whole seconds.
const STORE_RETRY_AFTER_US: u64 = 1_000_000;

/// Maximum value of `limit_remaining` and `requests_per_unit`.
const MAX_COUNT: u64 = u32::MAX as u64;

/// The service, with the configuration that applies to a call.
pub(super) struct RateLimitService<'g> {
    pub(super) limiter: &'g Limiter,
    pub(super) snapshot: &'g ConfigSnapshot,
}

impl RateLimitService<'_> {
    /// Answer a gRPC call of a client. `is_draining` is true while the gateway shuts down.
    pub(super) async fn answer(
        &self,
        request: Request<Incoming>,
        peer: &Peer,
        flow: &StreamFlow,
        is_draining: bool,
    ) -> Response<Body> {
        match self.call(request, peer, flow, is_draining, monotonic()).await {
            Ok(response) => response,
            Err(error) => error.into_response(),
        }
    }

    async fn call(
        &self,
        request: Request<Incoming>,
        peer: &Peer,
        flow: &StreamFlow,
        is_draining: bool,
        received_at: Instant,
    ) -> Result<Response<Body>, CallError> {
        check_peer(self.snapshot, peer)?;
        if !headers::is_grpc_call(request.method(), request.version(), request.headers()) {
            return Err(CallError::new(Status::Unimplemented, "this listener serves only gRPC calls"));
        }
        let client_timeout = headers::grpc_timeout(request.headers()).unwrap_or(DEFAULT_TIMEOUT).min(DEFAULT_TIMEOUT);
        let time = time_to_answer(client_timeout);
        let method = request.uri().path().to_owned();
        let ConfigSnapshot { config, metrics, .. } = self.snapshot;
        let max_read = config.server.max_buffered / INSPECTED_SHARE;
        let share = metrics.inspected_by_network.share(config.client_ip.network(peer.address), max_read);
        let read = read_message(request.into_body(), MAX_MESSAGE, flow, share);
        let late = CallError::new(Status::DeadlineExceeded, "the message did not arrive before the deadline");
        let message = timeout(time, read).await.map_err(|_| late)??;
        match &*method {
            "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit" => {
                let deadline = Deadline { answer_by: received_at + time, client_timeout };
                let answer = self.should_rate_limit(message, deadline).await?;
                Ok(message_response(answer.encoded_len(), |bytes| encode(&answer, bytes)))
            }
            "/grpc.health.v1.Health/Check" => {
                let answer = health(message, is_draining || !self.snapshot.is_ready())?;
                Ok(message_response(answer.encoded_len(), |bytes| encode(&answer, bytes)))
            }
            _ => Err(CallError::new(
                Status::Unimplemented,
                "this listener serves only ShouldRateLimit and health checks",
            )),
        }
    }

    /// Decide about a request to the proxy, before `deadline`.
    async fn should_rate_limit(
        &self,
        message: ReadMessage,
        deadline: Deadline,
    ) -> Result<RateLimitResponse, CallError> {
        let bytes = match message {
            ReadMessage::Whole(bytes) => bytes,
            ReadMessage::TooLong => return Ok(deny_too_long()),
            ReadMessage::NoCapacity => return Ok(deny_unread()),
        };
        let invalid = |_| CallError::new(Status::InvalidArgument, "the message is not a RateLimitRequest");
        let request = RateLimitRequest::decode(bytes).map_err(invalid)?;
        self.decide_before(&request, deadline).await
    }

    /// Decide about a request to the proxy that has no deadline.
    pub(super) async fn decide(&self, request: &RateLimitRequest) -> Result<RateLimitResponse, CallError> {
        let answer_by = monotonic() + time_to_answer(DEFAULT_TIMEOUT);
        self.decide_before(request, Deadline { answer_by, client_timeout: DEFAULT_TIMEOUT }).await
    }

    async fn decide_before(
        &self,
        request: &RateLimitRequest,
        deadline: Deadline,
    ) -> Result<RateLimitResponse, CallError> {
        if request.domain.is_empty() || request.descriptors.is_empty() {
            return Err(CallError::new(Status::InvalidArgument, "the message needs a domain and a descriptor"));
        }
        if request.descriptors.len() > MAX_DESCRIPTORS {
            return Ok(deny_unchecked("a call has too many descriptors"));
        }
        let Deadline { answer_by: deadline, client_timeout } = deadline;
        let snapshot = self.snapshot;
        let overrides = self.limiter.overrides.current();
        let resolved = resolve(snapshot, request);
        let Some(call) = Checks::new(snapshot, request, &resolved, overrides.as_deref()) else {
            return Ok(deny_unchecked("the limits of a call would occupy Redis for too long"));
        };
        let started_at = monotonic();
        // The limiter decides before the deadline. The timeout is for a gateway that is late itself.
        let grace = (client_timeout / 20).min(Duration::from_millis(2));
        let time = (deadline + grace).saturating_duration_since(started_at);
        let decision = match call.charges.is_empty() {
            _ if call.denies_all() => Ok(Decision { admitted: false, ..Decision::unlimited() }),
            true => Ok(Decision::unlimited()),
            false => match timeout(time, self.limiter.check_before(&call.charges, deadline)).await {
                Ok(decision) => decision,
                Err(_) => Err(StoreUnavailable(StoreError::Overloaded)),
            },
        };
        match &decision {
            Ok(decision) if decision.admitted => {}
            Ok(decision) => {
                let debts = call.debts(decision);
                if !debts.is_empty() {
                    self.limiter.charge_before(&debts, decision.decided_by, deadline).await;
                }
            }
            Err(StoreUnavailable(error)) => {
                let debts = call.reported();
                if !debts.is_empty() {
                    self.limiter.charge_later(&debts, error);
                }
            }
        }
        let refunds = refund(self.limiter, &call.refunds, deadline).await;
        call.record(snapshot, &decision, monotonic().saturating_duration_since(started_at));
        let mut response = call.response(request, &decision, &refunds);
        if let Some(names) = &snapshot.config.descriptor_headers {
            response.response_headers_to_add.extend(named_headers(names, &response.statuses));
        }
        Ok(response)
    }
}

/// When a call must be answered.
#[derive(Clone, Copy)]
struct Deadline {
    answer_by: Instant,
    /// The deadline of the client.
    client_timeout: Duration,
}

fn encode(message: &impl Message, bytes: &mut BytesMut) {
    // `BytesMut` grows, so the encoding cannot fail.
    let _ = message.encode(bytes);
}

/// Check that the client may use the listener, and that its certificate is still valid and trusted.
pub(super) fn check_peer(snapshot: &ConfigSnapshot, peer: &Peer) -> Result<(), CallError> {
    let Some(listener) = snapshot.config.listeners.get(peer.listener) else { return Ok(()) };
    if let Some(access) = &listener.access
        && !access.decide(peer.address).is_allowed()
    {
        return Err(CallError::new(Status::PermissionDenied, "the client network may not use this listener"));
    }
    let verifier = listener.tls.as_ref().and_then(|tls| tls.tls.client_verifier());
    match &peer.certificate {
        Some(certificate) if !certificate.is_trusted(verifier.as_ref(), unix_us() / 1_000_000) => {
            Err(CallError::new(Status::Unauthenticated, "the client certificate is not trusted any more"))
        }
        Some(_) | None => Ok(()),
    }
}

fn health(message: ReadMessage, is_unhealthy: bool) -> Result<HealthCheckResponse, CallError> {
    let unknown = CallError::new(Status::NotFound, "there is no such service");
    let ReadMessage::Whole(bytes) = message else { return Err(unknown) };
    let invalid = |_| CallError::new(Status::InvalidArgument, "the message is not a HealthCheckRequest");
    let request = HealthCheckRequest::decode(bytes).map_err(invalid)?;
    if !request.service.is_empty() && request.service != SERVICE.as_bytes() {
        return Err(unknown);
    }
    let status = if is_unhealthy { ServingStatus::NotServing } else { ServingStatus::Serving };
    Ok(HealthCheckResponse { status: status.into() })
}

/// Deny a request whose message is too long.
pub(super) fn deny_too_long() -> RateLimitResponse {
    deny_unchecked("a message is too long")
}

/// Deny a request whose message could not be read.
pub(super) fn deny_unread() -> RateLimitResponse {
    deny_unchecked("too many messages are being read")
}

/// Deny a request whose limits cannot be checked. An error would make Envoy admit the request, unless it has
/// `failure_mode_deny`.
fn deny_unchecked(reason: &'static str) -> RateLimitResponse {
    static LOG_THROTTLE: LogThrottle = LogThrottle::new();
    if LOG_THROTTLE.should_log(LOG_INTERVAL) {
        warn!(reason, max_bytes = MAX_MESSAGE, max_descriptors = MAX_DESCRIPTORS, "denying rate limit calls unchecked");
    }
    let mut headers = HeaderMap::new();
    set_retry_after(&mut headers, STORE_RETRY_AFTER_US);
    RateLimitResponse {
        overall_code: Code::OverLimit.into(),
        response_headers_to_add: headers_to_add(&headers),
        ..RateLimitResponse::default()
    }
}

fn headers_to_add(headers: &HeaderMap) -> Vec<HeaderValue> {
    let to_header = |(name, value): (&http::HeaderName, &http::HeaderValue)| HeaderValue {
        key: name.as_str().to_owned(),
        value: value.to_str().unwrap_or_default().to_owned(),
    };
    headers.iter().map(to_header).collect()
}

/// Return the headers with these names for the status that denies the request, or for the one with the smallest
/// remaining count.
fn named_headers(names: &DescriptorHeaders, statuses: &[DescriptorStatus]) -> Vec<HeaderValue> {
    let limited = statuses.iter().filter_map(|status| Some((status, status.current_limit.as_ref()?)));
    let effective = limited.min_by_key(|(status, _)| (status.code() != Code::OverLimit, status.limit_remaining));
    let Some((status, limit)) = effective else { return Vec::new() };
    let reset = status.duration_until_reset.map_or(0, |reset| reset.seconds + i64::from(reset.nanos > 0));
    let values = [i64::from(limit.requests_per_unit), i64::from(status.limit_remaining), reset];
    let DescriptorHeaders(names) = names;
    let header = |(name, value): (&str, i64)| HeaderValue { key: name.to_owned(), value: value.to_string() };
    names.iter().map(|name| &**name).zip(values).map(header).collect()
}

async fn refund(limiter: &Limiter, checks: &[LimitCheck<'_, '_>], deadline: Instant) -> Vec<Outcome> {
    if checks.is_empty() { Vec::new() } else { limiter.refund_before(checks, deadline).await }
}

// === The checks of a call ===

/// A descriptor of a call, and the descriptor of the configuration that matches it.
struct Resolved<'a> {
    rule: Option<MatchedRule<'a>>,
    /// The variants of the limits of the rule, with the quota that the call requests.
    overridden: Vec<Option<Arc<LimitVariant>>>,
    /// Unit of the quota of zero that denies the descriptor.
    denies_all: Option<Unit>,
}

/// A descriptor of the configuration, with its index.
#[derive(Clone, Copy)]
struct MatchedRule<'a> {
    index: usize,
    rule: &'a DescriptorRule,
}

impl<'a> Resolved<'a> {
    fn of_file(&self) -> Option<&'a FileRule> {
        self.rule.and_then(|matched| matched.rule.of_file.as_ref())
    }
}

/// Return the keys and values of a descriptor.
fn entries(descriptor: &RateLimitDescriptor) -> impl Iterator<Item = (&[u8], &[u8])> + Clone {
    descriptor.entries.iter().map(|entry| (&*entry.key, &*entry.value))
}

fn resolve<'a>(snapshot: &'a ConfigSnapshot, request: &RateLimitRequest) -> Vec<Resolved<'a>> {
    let table = &snapshot.config.descriptors;
    let resolve = |descriptor: &RateLimitDescriptor| {
        let requested = descriptor.limit.filter(|limit| limit.unit().seconds().is_some());
        let limit_in_call = if requested.is_some() { LimitInCall::Given } else { LimitInCall::Absent };
        let index = table.find(&request.domain, entries(descriptor), limit_in_call);
        let rule = index.map(|index| MatchedRule { index, rule: &table.rules[index] });
        let limits = || rule.into_iter().flat_map(|matched| &matched.rule.limits);
        let overridden = match requested {
            None => Vec::new(),
            Some(quota) => limits().map(|limit| requested_variant(snapshot, limit, quota)).collect(),
        };
        let is_enforced = limits().any(|limit| !limit.limit.shadow);
        let denies_all = match requested {
            Some(quota) => Some(quota.unit()).filter(|_| quota.requests_per_unit == 0 && is_enforced),
            None => rule.and_then(|matched| matched.rule.of_file.as_ref()?.denies_all),
        };
        Resolved { rule, overridden, denies_all: denies_all.filter(|_| !descriptor.is_negative_hits) }
    };
    let mut resolved: Vec<_> = request.descriptors.iter().map(resolve).collect();
    drop_replaced(&mut resolved);
    resolved
}

/// Drop the rules whose limits another descriptor of the call replaces.
fn drop_replaced(resolved: &mut [Resolved<'_>]) {
    let replaced: Vec<_> = resolved.iter().filter_map(Resolved::of_file).flat_map(|rule| &rule.replaces).collect();
    if replaced.is_empty() {
        return;
    }
    for resolved in resolved {
        if resolved.of_file().is_some_and(|rule| replaced.contains(&&rule.limit_name)) {
            *resolved = Resolved { rule: None, overridden: Vec::new(), denies_all: None };
        }
    }
}

/// Return the variant of a limit with the quota that a call requests. Return `None` if the algorithm does not support
/// the quota: the configured quota then applies.
fn requested_variant(
    snapshot: &ConfigSnapshot,
    limit: &DescriptorLimit,
    requested: RateLimitOverride,
) -> Option<Arc<LimitVariant>> {
    let window_us = requested.unit().seconds()? * 1_000_000;
    let quota = Quota { count: requested.requests_per_unit.into(), window_us: Some(window_us), calendar: None };
    if quota.count == 0 {
        return None;
    }
    limit.limit.override_variant(&snapshot.config.hasher, quota, None).ok().map(Arc::new)
}

/// The checks of all descriptors of a call.
#[derive(Default)]
struct Checks<'a, 'p> {
    /// The checks that charge the request. All of them are one decision.
    charges: Vec<LimitCheck<'a, 'p>>,
    /// The checks whose cost is refunded.
    refunds: Vec<LimitCheck<'a, 'p>>,
    /// For each of the checks that charge the request: where its cost comes from, if the limit charges it always.
    always_charged: Vec<Option<CostSource>>,
    descriptors: Vec<DescriptorChecks<'a>>,
}

/// Where the cost of a check comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CostSource {
    /// `hits_addend` of the descriptor or the call.
    Proxy,
    /// The default of 1.
    Default,
}

/// The checks of one descriptor of a call.
struct DescriptorChecks<'a> {
    rule: Option<MatchedRule<'a>>,
    denies_all: Option<Unit>,
    is_refund: bool,
    /// Index of each check of the descriptor in [`Checks::charges`] or [`Checks::refunds`], with the index of its limit
    /// in the rule.
    checks: Vec<(usize, usize)>,
}

impl<'a, 'p> Checks<'a, 'p>
where
    'a: 'p,
{
    /// Build the checks of a call. Return `None` if they would occupy the store for too long.
    fn new(
        snapshot: &ConfigSnapshot,
        request: &RateLimitRequest,
        resolved: &'p [Resolved<'a>],
        overrides: Option<&'p OverrideTable>,
    ) -> Option<Self> {
        let mut encoder = IdentityEncoder::default();
        let mut call = Checks::default();
        let mut weight = 0;
        for (descriptor, Resolved { rule, overridden, denies_all }) in request.descriptors.iter().zip(resolved) {
            let is_given = descriptor.hits_addend.is_some() || request.hits_addend > 0;
            let source = if is_given { CostSource::Proxy } else { CostSource::Default };
            let cost = descriptor.hits_addend.unwrap_or(u64::from(request.hits_addend.max(1)));
            let mut checks = Vec::new();
            let of_file = rule.and_then(|matched| matched.rule.of_file.as_ref());
            // A quota of zero has no state.
            let matched = rule.filter(|_| denies_all.is_none());
            let limits = matched.iter().flat_map(|matched| &matched.rule.limits).enumerate();
            for (rule_index, DescriptorLimit { limit, identity_spec, charge }) in limits {
                let value = |key: &str| {
                    let mut entries = descriptor.entries.iter();
                    entries.find(|entry| entry.key == key.as_bytes()).map_or(&b""[..], |entry| &entry.value)
                };
                let hasher = &snapshot.config.hasher;
                let identity = match of_file {
                    Some(rule) => Some(rule.identify(&request.domain, entries(descriptor), hasher, &mut encoder)),
                    None => identity_spec.identify_entries(value, hasher, &mut encoder),
                };
                let Some(identity) = identity else { continue };
                let requested = overridden.get(rule_index).and_then(Option::as_ref);
                let set = overrides.and_then(|table| table.find(limit, identity)).map(|found| &found.variant);
                let variant = set.or(requested).unwrap_or(&limit.default_variant);
                let checks_of_kind = if descriptor.is_negative_hits { &mut call.refunds } else { &mut call.charges };
                let limit_index = checks_of_kind.len();
                let check = LimitCheck { limit_index, limit, variant, identity, cost, deferred: Deferred::Nothing };
                // The store needs different keys. Two descriptors with the same state have one check.
                let key = check.key().local_hash();
                match checks_of_kind.iter_mut().find(|other| other.key().local_hash() == key) {
                    Some(other) => {
                        other.cost = other.cost.saturating_add(cost);
                        checks.push((other.limit_index, rule_index));
                    }
                    None => {
                        weight += variant.rule.weight(variant.rule.capacity());
                        checks_of_kind.push(check);
                        if !descriptor.is_negative_hits {
                            call.always_charged.push((*charge == ChargePolicy::Always).then_some(source));
                        }
                        checks.push((limit_index, rule_index));
                    }
                }
            }
            let is_refund = descriptor.is_negative_hits;
            call.descriptors.push(DescriptorChecks { rule: *rule, denies_all: *denies_all, is_refund, checks });
        }
        let is_bounded = weight <= MAX_REQUEST_WEIGHT && call.charges.len().max(call.refunds.len()) <= MAX_DESCRIPTORS;
        is_bounded.then_some(call)
    }

    /// Return whether a descriptor has a quota of zero, so that the call is denied without a check.
    fn denies_all(&self) -> bool {
        self.descriptors.iter().any(|descriptor| descriptor.denies_all.is_some())
    }

    /// Return the checks that a denied request nevertheless charges: those of limits with `charge = "always"` that deny
    /// it. Without this charge, a limit would never deny a request if the proxy first asks with a cost of 0, and charges
    /// more than what remains when the response ends.
    ///
    /// A denial from the cache charges only costs that the proxy has set. The cache repeats a denial whose request was
    /// charged.
    fn debts(&self, decision: &Decision<'_>) -> Vec<&LimitCheck<'a, 'p>> {
        let is_charged = |index: usize| match self.always_charged[index] {
            None => false,
            Some(CostSource::Proxy) => true,
            Some(CostSource::Default) => !decision.is_from_cache,
        };
        let denied = decision.violated().map(|result| result.limit_index);
        denied
            .filter(|index| is_charged(*index))
            .map(|index| &self.charges[index])
            .filter(|check| check.cost > 0)
            .collect()
    }

    /// Return the checks of limits with `charge = "always"` whose cost the proxy has set. It may report what a stream has
    /// used, so the cost counts even if the store did not answer.
    fn reported(&self) -> Vec<&LimitCheck<'a, 'p>> {
        let charges = self.charges.iter().zip(&self.always_charged);
        charges
            .filter(|(check, source)| **source == Some(CostSource::Proxy) && check.cost > 0)
            .map(|(check, _)| check)
            .collect()
    }

    fn record(&self, snapshot: &ConfigSnapshot, decision: &Result<Decision<'_>, StoreUnavailable>, elapsed: Duration) {
        let effect = |index: &usize| LimitDecision::from_result(&self.charges[*index], decision);
        // Descriptors with the same state have one check, which counts once.
        let mut recorded = vec![false; self.charges.len()];
        for descriptor in self.descriptors.iter().filter(|descriptor| !descriptor.is_refund) {
            let Some(MatchedRule { index: rule_index, rule }) = descriptor.rule else { continue };
            let mut decided = descriptor.denies_all.map(|_| LimitDecision::Denied);
            for (check_index, limit_index) in &descriptor.checks {
                let Some(effect) = effect(check_index) else { continue };
                if decided.is_none_or(|decided| effect.is_denial() && !decided.is_denial()) {
                    decided = Some(effect);
                }
                if !mem::replace(&mut recorded[*check_index], true) {
                    let identity = self.charges[*check_index].identity;
                    let name = || rule.limits[*limit_index].identity_spec.display_hidden();
                    snapshot.metrics.record_descriptor_limit(rule_index, *limit_index, effect, identity, name);
                }
            }
            if let Some(effect) = decided {
                snapshot.metrics.record_descriptor(rule_index, effect);
            }
        }
        if !self.charges.is_empty() {
            snapshot.metrics.record_check_duration(elapsed);
        }
    }

    fn response(
        &self,
        request: &RateLimitRequest,
        decision: &Result<Decision<'_>, StoreUnavailable>,
        refunds: &[Outcome],
    ) -> RateLimitResponse {
        let statuses: Vec<_> =
            self.descriptors.iter().map(|descriptor| self.status(descriptor, decision, refunds)).collect();
        let is_admitted = decision.as_ref().is_ok_and(|decision| decision.admitted);
        let mut headers = HeaderMap::new();
        match decision {
            Ok(decision) => append_decision_headers(&mut headers, &[HeaderStyle::Draft11], None, decision),
            Err(_) => set_retry_after(&mut headers, STORE_RETRY_AFTER_US),
        }
        RateLimitResponse {
            overall_code: if is_admitted { Code::Ok } else { Code::OverLimit }.into(),
            statuses,
            response_headers_to_add: headers_to_add(&headers),
            dynamic_metadata: (!is_admitted).then(|| denial_metadata(&request.domain, decision)),
        }
    }

    /// Return the status of a descriptor. It describes the limit that denies the request, or the limit with the smallest
    /// remaining share of its quota.
    fn status(
        &self,
        descriptor: &DescriptorChecks<'_>,
        decision: &Result<Decision<'_>, StoreUnavailable>,
        refunds: &[Outcome],
    ) -> DescriptorStatus {
        let unlimited = DescriptorStatus { code: Code::Ok.into(), ..DescriptorStatus::default() };
        if let Some(unit) = descriptor.denies_all {
            let limit = RateLimit { requests_per_unit: 0, unit: unit.into(), name: descriptor.limit_name() };
            return DescriptorStatus { code: Code::OverLimit.into(), current_limit: Some(limit), ..unlimited };
        }
        let is_unlimited = |matched: &MatchedRule<'_>| matched.rule.of_file.is_some() && matched.rule.limits.is_empty();
        if descriptor.rule.as_ref().is_some_and(is_unlimited) {
            return DescriptorStatus { limit_remaining: u32::MAX, ..unlimited };
        }
        if descriptor.is_refund {
            let outcomes = descriptor.checks.iter().map(|(index, _)| (&self.refunds[*index], refunds.get(*index)));
            let status = outcomes.map(|(check, outcome)| limit_status(check, outcome, false)).next();
            return status.unwrap_or(unlimited);
        }
        let decision = match decision {
            Ok(decision) => decision,
            Err(_) => {
                let is_enforced = |(index, _): &(usize, usize)| !self.charges[*index].limit.shadow;
                let code = if descriptor.checks.iter().any(is_enforced) { Code::OverLimit } else { Code::Ok };
                return DescriptorStatus { code: code.into(), ..unlimited };
            }
        };
        let results = descriptor.checks.iter().map(|(index, _)| {
            let result = decision.results.iter().find(|result| result.limit_index == *index);
            (&self.charges[*index], result.map(|result| (&result.outcome, result.denies())))
        });
        // The outcomes of limits that do not deny are unknown if the denial comes from the cache.
        let is_known = |denies: bool| denies || decision.admitted || !decision.is_from_cache;
        let effective = results.max_by_key(|(check, result)| {
            let (remaining, denies) = result.map_or((u64::MAX, false), |(outcome, denies)| (outcome.remaining, denies));
            let used = check.variant.quota.count.saturating_sub(remaining);
            (denies, u128::from(used) * (1 << 32) / u128::from(check.variant.quota.count.max(1)))
        });
        match effective {
            None => unlimited,
            Some((check, Some((outcome, denies)))) if is_known(denies) => limit_status(check, Some(outcome), denies),
            Some((check, None)) if decision.is_shadow_denied(check.limit) => limit_status(check, None, false),
            Some(_) => unlimited,
        }
    }
}

impl DescriptorChecks<'_> {
    /// Return the name of the limit of the descriptor. It may be empty.
    fn limit_name(&self) -> String {
        let of_rule = |MatchedRule { rule, .. }: MatchedRule<'_>| match &rule.of_file {
            Some(of_file) => of_file.limit_name.to_string(),
            None => rule.limits.first().map(|limit| limit.limit.name.to_string()).unwrap_or_default(),
        };
        self.rule.map(of_rule).unwrap_or_default()
    }
}

/// Return the status of a descriptor with this limit. `outcome` is `None` if it is unknown how much remains.
fn limit_status(check: &LimitCheck<'_, '_>, outcome: Option<&Outcome>, denies: bool) -> DescriptorStatus {
    let quota = check.variant.quota;
    let unit = quota
        .window_us
        .filter(|us| us.is_multiple_of(1_000_000))
        .map_or(Unit::Unknown, |us| Unit::of_seconds(us / 1_000_000));
    let reset_us = outcome.map(|outcome| if denies { outcome.retry_us } else { outcome.reset_us });
    DescriptorStatus {
        code: if denies { Code::OverLimit } else { Code::Ok }.into(),
        current_limit: Some(RateLimit {
            requests_per_unit: quota.count.min(MAX_COUNT) as u32,
            unit: unit.into(),
            name: check.limit.name.to_string(),
        }),
        limit_remaining: outcome.map_or(0, |outcome| if denies { 0 } else { outcome.remaining.min(MAX_COUNT) as u32 }),
        duration_until_reset: reset_us
            .map(|us| envoy::Duration { seconds: (us / 1_000_000) as i64, nanos: (us % 1_000_000 * 1000) as i32 }),
    }
}

/// Return the metadata of a denied request: the domain, and the limits that deny the request.
fn denial_metadata(domain: &Bytes, decision: &Result<Decision<'_>, StoreUnavailable>) -> Struct {
    let violated = decision.iter().flat_map(Decision::violated);
    let names = violated.map(|result| Kind::Text(result.limit.name.to_string()).into()).collect();
    Struct {
        fields: [
            ("domain".to_owned(), (&*String::from_utf8_lossy(domain)).into()),
            ("denied_by".to_owned(), Kind::List(List { values: names }).into()),
        ]
        .into(),
    }
}
