//! Envoy's rate limit service: the methods of a listener with `protocol = "ratelimit"`.

use std::collections::BTreeMap;
use std::mem;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use http::{HeaderMap, Request, Response, StatusCode, Version};
use hyper::body::Incoming;
use prost::Message;
use tokio::time::timeout;
use tracing::warn;

use crate::clock::{LogThrottle, monotonic};
use crate::http::body::Body;
use crate::http::body_limits::INSPECTED_SHARE;
use crate::http::flow::StreamFlow;
use crate::http::grpc::{CallError, Code as Status, ReadMessage, message_response, read_message, time_to_answer};
use crate::http::headers;
use crate::http::ratelimit_headers::{HeaderStyle, append_decision_headers, set_retry_after};
use crate::limiter::Limiter;
use crate::limiter::algorithm::Outcome;
use crate::limiter::decision::{Decision, LimitCheck};
use crate::payload::envoy::{
    Code, DescriptorStatus, HealthCheckRequest, HealthCheckResponse, Kind, List, RateLimit, RateLimitDescriptor,
    RateLimitRequest, RateLimitResponse, ServingStatus, Struct, Unit,
};
use crate::payload::{envoy, envoy::HeaderValue};
use crate::proxy::config_snapshot::ConfigSnapshot;
use crate::proxy::descriptor_checks::{
    CallChecks, CallDecision, CheckGroup, CheckIndex, Deadline, DescriptorChecks, GroupDecision, GroupKind,
    MAX_DESCRIPTORS, MatchedRule, entries, resolve,
};
use crate::proxy::metrics::{CallResult, Hits, LimitDecision};
use crate::proxy::record::{DecisionRecord, decision_info, merge_decision_infos};
use crate::proxy::request::Peer;
use crate::snapshot::descriptors::DescriptorHeaders;
use crate::telemetry::access_log::{DecisionInfo, TelemetrySinks};
use crate::telemetry::outcome::RequestOutcome;
use crate::telemetry::trace::{TraceContext, TraceParent};

/// Name of the service, also for health checks.
const SERVICE: &str = "envoy.service.ratelimit.v3.RateLimitService";

/// Path of the method that decides about requests.
const METHOD: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

/// Maximum length of a message in bytes. Envoy bounds the headers of a request, whose values may occur in several
/// descriptors.
pub(super) const MAX_MESSAGE: usize = 256 << 10;

/// Maximum length of a message whose descriptors the metadata of the response repeats, in bytes.
const MAX_REPEATED: usize = 16 << 10;

/// Maximum time to answer a call without `grpc-timeout`.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum time after the deadline for a gateway that is late itself.
const MAX_GRACE: Duration = Duration::from_millis(2);

/// Minimum interval between log records about calls that are denied without a check.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Time after which a client may retry a request that was not checked. `Retry-After` has whole seconds.
const STORE_RETRY_AFTER_US: u64 = 1_000_000;

/// Maximum value of `limit_remaining` and `requests_per_unit`.
const MAX_COUNT: u64 = u32::MAX as u64;

/// The service, with the configuration that applies to a call.
pub(super) struct RateLimitService<'g> {
    pub(super) limiter: &'g Limiter,
    pub(super) sinks: &'g TelemetrySinks,
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
        peer.check_listener(&self.snapshot.config)?;
        if !headers::is_grpc_call(request.method(), request.version(), request.headers()) {
            return Err(CallError::new(Status::Unimplemented, "this listener serves only gRPC calls"));
        }
        let client_timeout = headers::grpc_timeout(request.headers()).unwrap_or(DEFAULT_TIMEOUT).min(DEFAULT_TIMEOUT);
        let time = time_to_answer(client_timeout);
        let method = request.uri().path().to_owned();
        let parent = TraceParent::from_headers(request.headers());
        let ConfigSnapshot { config, metrics, .. } = self.snapshot;
        let max_read = config.server.max_buffered / INSPECTED_SHARE;
        let share = metrics.inspected_by_network.share(config.client_ip.network(peer.address), max_read);
        let read = read_message(request.into_body(), MAX_MESSAGE, flow, share);
        let late = CallError::new(Status::DeadlineExceeded, "the message did not arrive before the deadline");
        let message = timeout(time, read).await.map_err(|_| late)??;
        match &*method {
            METHOD => {
                let grace = (client_timeout / 20).min(MAX_GRACE);
                let deadline = Deadline { decide_by: received_at + time, grace };
                let received = ReceivedCall { peer, parent, received_at, deadline };
                let answer = self.should_rate_limit(message, &received).await.inspect_err(|_| {
                    self.snapshot.metrics.record_call(CallResult::Invalid);
                })?;
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
        received: &ReceivedCall<'_>,
    ) -> Result<RateLimitResponse, CallError> {
        let bytes = match message {
            ReadMessage::Whole(bytes) => bytes,
            ReadMessage::TooLong => return Ok(self.deny_too_long()),
            ReadMessage::NoCapacity => return Ok(self.deny_unread()),
        };
        let invalid = |_| CallError::new(Status::InvalidArgument, "the message is not a RateLimitRequest");
        let request = RateLimitRequest::decode(bytes).map_err(invalid)?;
        self.decide_before(&request, received).await
    }

    /// Decide about a request to the proxy that has no deadline.
    pub(super) async fn decide(
        &self,
        request: &RateLimitRequest,
        peer: &Peer,
        parent: Option<TraceParent>,
    ) -> Result<RateLimitResponse, CallError> {
        let received_at = monotonic();
        let deadline = Deadline { decide_by: received_at + time_to_answer(DEFAULT_TIMEOUT), grace: MAX_GRACE };
        self.decide_before(request, &ReceivedCall { peer, parent, received_at, deadline }).await
    }

    async fn decide_before(
        &self,
        request: &RateLimitRequest,
        received: &ReceivedCall<'_>,
    ) -> Result<RateLimitResponse, CallError> {
        if self.snapshot.config.awaits_descriptors() {
            return Err(CallError::new(Status::Unavailable, "the management server has not sent descriptors yet"));
        }
        if request.domain.is_empty() || request.descriptors.is_empty() {
            return Err(CallError::new(Status::InvalidArgument, "the message needs a domain and a descriptor"));
        }
        if request.descriptors.len() > MAX_DESCRIPTORS {
            return Ok(self.deny_unchecked("a call has too many descriptors"));
        }
        let snapshot = self.snapshot;
        let overrides = self.limiter.overrides.current();
        let resolved = resolve(&snapshot.config, request);
        let unmatched = resolved.iter().filter(|resolved| !resolved.is_known).count();
        snapshot.metrics.record_unmatched(&request.domain, unmatched as u64);
        let Some(call) = CallChecks::new(&snapshot.config, request, &resolved, overrides.as_deref()) else {
            return Ok(self.deny_unchecked("the limits of a call would occupy Redis for too long"));
        };
        let started_at = monotonic();
        let decision = call.decide(self.limiter, received.deadline).await;
        let elapsed = monotonic().saturating_duration_since(started_at);
        record(&call, snapshot, request, &decision, elapsed);
        let trace = self.sinks.trace_context(received.parent);
        if self.sinks.access_log.is_some() || trace.is_some() {
            let started_after = started_at.saturating_duration_since(received.received_at);
            let check = CheckTime { started_after, elapsed };
            write_record(self.sinks, &call, request, &decision, &DecidedCall { received, trace, check });
        }
        let mut response = response(&call, snapshot, request, decision);
        if let Some(names) = &snapshot.config.descriptor_headers {
            response.response_headers_to_add.extend(named_headers(names, &response.statuses));
        }
        Ok(response)
    }

    /// Deny a request whose message is too long.
    pub(super) fn deny_too_long(&self) -> RateLimitResponse {
        self.deny_unchecked("a message is too long")
    }

    /// Deny a request whose message could not be read.
    pub(super) fn deny_unread(&self) -> RateLimitResponse {
        self.deny_unchecked("too many messages are being read")
    }

    /// Deny a request whose limits cannot be checked. An error would make Envoy admit the request, unless it has
    /// `failure_mode_deny`.
    fn deny_unchecked(&self, reason: &'static str) -> RateLimitResponse {
        static LOG_THROTTLE: LogThrottle = LogThrottle::new();
        if LOG_THROTTLE.should_log(LOG_INTERVAL) {
            warn!(
                reason,
                max_bytes = MAX_MESSAGE,
                max_descriptors = MAX_DESCRIPTORS,
                "denying rate limit calls unchecked"
            );
        }
        self.snapshot.metrics.record_call(CallResult::Unchecked);
        let mut headers = HeaderMap::new();
        set_retry_after(&mut headers, STORE_RETRY_AFTER_US);
        RateLimitResponse {
            overall_code: Code::OverLimit.into(),
            response_headers_to_add: headers_to_add(&headers),
            ..RateLimitResponse::default()
        }
    }
}

fn encode(message: &impl Message, bytes: &mut BytesMut) {
    // `BytesMut` grows, so the encoding cannot fail.
    let _ = message.encode(bytes);
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

// === What a decision means ===

/// What is known about a call besides its message.
struct ReceivedCall<'a> {
    peer: &'a Peer,
    /// The span of the caller.
    parent: Option<TraceParent>,
    received_at: Instant,
    deadline: Deadline,
}

/// A call after its decision.
struct DecidedCall<'a> {
    received: &'a ReceivedCall<'a>,
    trace: Option<TraceContext>,
    check: CheckTime,
}

/// When the limits of a call were checked.
struct CheckTime {
    /// Time from the arrival of the call to the start of the check.
    started_after: Duration,
    elapsed: Duration,
}

/// Write the access log record and the spans of a call. Its status is that of the response to the client of the proxy.
fn write_record(
    sinks: &TelemetrySinks,
    call: &CallChecks<'_, '_>,
    request: &RateLimitRequest,
    decision: &CallDecision<'_>,
    decided: &DecidedCall<'_>,
) {
    let infos = call.groups.iter().zip(&decision.groups).filter_map(|(group, one)| match one {
        GroupDecision::Decided(one) => Some(decision_info(&group.charges, Some(one))),
        GroupDecision::Failed => Some(decision_info(&group.charges, None)),
        GroupDecision::Unchecked => None,
    });
    let info = infos.reduce(merge_decision_infos).map(|info| DecisionInfo {
        duration: decided.check.elapsed,
        start_offset: decided.check.started_after,
        ..info
    });
    let is_failed = decision.groups.iter().any(|group| matches!(group, GroupDecision::Failed));
    let ReceivedCall { peer, parent, received_at, .. } = *decided.received;
    DecisionRecord {
        peer,
        parent,
        trace: decided.trace,
        host: Some(&String::from_utf8_lossy(&request.domain)),
        path: METHOD,
        rpc_method: METHOD.strip_prefix('/'),
        version: Version::HTTP_2,
        received_at,
        status: if decision.is_admitted { StatusCode::OK } else { StatusCode::TOO_MANY_REQUESTS },
        outcome: match decision.is_admitted {
            true => RequestOutcome::Ok.label(),
            false if is_failed => RequestOutcome::StoreUnavailable.label(),
            false => RequestOutcome::RateLimited.label(),
        },
        decision: info.as_ref(),
    }
    .write(sinks);
}

/// Count a call, and the effects of its descriptors and limits.
fn record(
    call: &CallChecks<'_, '_>,
    snapshot: &ConfigSnapshot,
    request: &RateLimitRequest,
    decision: &CallDecision<'_>,
    elapsed: Duration,
) {
    let metrics = &snapshot.metrics;
    let is_failed = decision.groups.iter().any(|group| matches!(group, GroupDecision::Failed));
    metrics.record_call(match decision.is_admitted {
        true => CallResult::Allowed,
        false if is_failed => CallResult::StoreError,
        false => CallResult::Denied,
    });
    // Descriptors with the same state have one check, which counts once.
    let mut recorded: Vec<_> = call.groups.iter().map(|group| vec![false; group.charges.len()]).collect();
    for (descriptor, sent) in call.descriptors.iter().zip(&request.descriptors) {
        let Some(MatchedRule { index: rule_index, rule }) = descriptor.rule else { continue };
        let Some(group_index) = descriptor.group else {
            // Without a group, the descriptor is unlimited, or a refund.
            if decision.is_admitted && !descriptor.is_refund {
                metrics.record_descriptor(rule_index, LimitDecision::Allowed);
            }
            continue;
        };
        let group = &call.groups[group_index];
        let group_decision = &decision.groups[group_index];
        let mut decided = descriptor.denies_all.map(|_| LimitDecision::Denied);
        for CheckIndex { check: check_index, limit: limit_index } in &descriptor.checks {
            let check = &group.charges[*check_index];
            let effect = match group_decision {
                GroupDecision::Decided(decision) => LimitDecision::from_decision(check, decision),
                GroupDecision::Failed => Some(LimitDecision::StoreError),
                GroupDecision::Unchecked => None,
            };
            let Some(effect) = effect else { continue };
            if decided.is_none_or(|decided| effect.is_denial() && !decided.is_denial()) {
                decided = Some(effect);
            }
            if !mem::replace(&mut recorded[group_index][*check_index], true) {
                let name = || rule.limits[*limit_index].identity_spec.display_hidden();
                metrics.record_descriptor_limit(rule_index, *limit_index, effect, check.identity, name);
            }
        }
        if let Some(effect) = decided {
            metrics.record_descriptor(rule_index, effect);
        }
        if let Some(of_file) = &rule.of_file {
            let outcome = descriptor.checks.first().and_then(|index| {
                let check = &group.charges[index.check];
                group_decision.result(check).map(|result| (check.variant.quota, result.outcome))
            });
            let near_limit = snapshot.config.descriptors.options.near_limit;
            let hits = Hits::new(descriptor.cost, decided, outcome, near_limit);
            metrics.record_hits(rule_index, of_file.metric.of_call(&rule.domain, entries(sent)), hits);
        }
    }
    if call.groups.iter().any(|group| !group.charges.is_empty()) {
        metrics.record_call_duration(elapsed);
    }
}

/// Build the response to a call.
fn response(
    call: &CallChecks<'_, '_>,
    snapshot: &ConfigSnapshot,
    request: &RateLimitRequest,
    decision: CallDecision<'_>,
) -> RateLimitResponse {
    let statuses: Vec<_> = call.descriptors.iter().map(|descriptor| status(call, descriptor, &decision)).collect();
    let has_dynamic_metadata = snapshot.config.descriptors.options.has_dynamic_metadata;
    let repeats_call = has_dynamic_metadata && request.encoded_len() <= MAX_REPEATED;
    let mut metadata = if repeats_call { call_metadata(request) } else { Struct::default() };
    let passed = passed_metadata(call, &statuses);
    if !passed.fields.is_empty() {
        metadata.fields.insert("metadata".to_owned(), Kind::Object(passed).into());
    }
    if !decision.is_admitted {
        metadata.fields.insert("domain".to_owned(), (&*String::from_utf8_lossy(&request.domain)).into());
        metadata.fields.insert("denied_by".to_owned(), denied_by(&decision).into());
    }
    RateLimitResponse {
        overall_code: if decision.is_admitted { Code::Ok } else { Code::OverLimit }.into(),
        statuses,
        response_headers_to_add: headers_to_add(&decision_headers(call, decision)),
        dynamic_metadata: Some(metadata).filter(|metadata| !metadata.fields.is_empty()),
    }
}

/// Return the RateLimit headers of a call. Quotas that are over do not concern a call that other quotas admit.
fn decision_headers(call: &CallChecks<'_, '_>, decision: CallDecision<'_>) -> HeaderMap {
    let CallDecision { is_admitted, groups, .. } = decision;
    let mut headers = HeaderMap::new();
    let is_of = |kind| move |(group, _): &(&CheckGroup<'_, '_>, GroupDecision<'_>)| group.kind == kind;
    let mut decided = Vec::new();
    let mut is_failed = false;
    let denies = |kind| call.groups.iter().zip(&groups).any(|(group, one)| group.kind == kind && one.is_denial());
    let kind = if denies(GroupKind::Enforced) { GroupKind::Enforced } else { GroupKind::Quota };
    for (_, one) in call.groups.iter().zip(groups).filter(|one| is_admitted || is_of(kind)(one)) {
        match one {
            GroupDecision::Decided(one) if one.admitted || !is_admitted => decided.push(one),
            GroupDecision::Decided(_) | GroupDecision::Unchecked => {}
            GroupDecision::Failed => is_failed = true,
        }
    }
    if is_failed && !is_admitted {
        set_retry_after(&mut headers, STORE_RETRY_AFTER_US);
        return headers;
    }
    let merged = match kind {
        // The call is admitted as soon as one quota admits it.
        GroupKind::Quota if !is_admitted => decided.into_iter().min_by_key(|one| one.retry_us().unwrap_or(u64::MAX)),
        GroupKind::Enforced | GroupKind::Quota => decided.into_iter().reduce(Decision::merge),
    };
    if let Some(decision) = merged {
        append_decision_headers(&mut headers, &[HeaderStyle::Draft11], None, &decision);
    }
    headers
}

/// Return the status of a descriptor. It describes the limit that denies the request, or the limit with the smallest
/// remaining share of its quota.
fn status(
    call: &CallChecks<'_, '_>,
    descriptor: &DescriptorChecks<'_>,
    decision: &CallDecision<'_>,
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
        let first = descriptor.checks.first().map(|index| index.check);
        let status = first.map(|index| limit_status(&call.refunds[index], decision.refunds.get(index), false));
        return status.unwrap_or(unlimited);
    }
    let Some(group_index) = descriptor.group else { return unlimited };
    let charges = &call.groups[group_index].charges;
    let decision = match &decision.groups[group_index] {
        GroupDecision::Decided(decision) => decision,
        GroupDecision::Failed => {
            let is_enforced = |index: &CheckIndex| !charges[index.check].limit.shadow;
            let code = if descriptor.checks.iter().any(is_enforced) { Code::OverLimit } else { Code::Ok };
            return DescriptorStatus { code: code.into(), ..unlimited };
        }
        GroupDecision::Unchecked => return unlimited,
    };
    let results = descriptor.checks.iter().map(|index| {
        let check = &charges[index.check];
        let result = decision.results.iter().find(|result| result.limit_index == check.limit_index);
        (check, result.map(|result| (&result.outcome, result.denies())))
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

/// Return the names of the limits that deny a call.
fn denied_by(decision: &CallDecision<'_>) -> Kind {
    let decided = decision.groups.iter().filter_map(|group| match group {
        GroupDecision::Decided(decision) => Some(decision),
        GroupDecision::Failed | GroupDecision::Unchecked => None,
    });
    let names = decided.flat_map(Decision::violated).map(|result| Kind::Text(result.limit.name.to_string()).into());
    Kind::List(List { values: names.collect() })
}

/// Return the metadata of the descriptors that are not over their limits.
fn passed_metadata(call: &CallChecks<'_, '_>, statuses: &[DescriptorStatus]) -> Struct {
    let mut passed = Struct::default();
    let is_limited = |descriptor: &DescriptorChecks<'_>| descriptor.group.is_some();
    for (descriptor, status) in call.descriptors.iter().zip(statuses).filter(|(descriptor, _)| is_limited(descriptor)) {
        let metadata = descriptor.rule.and_then(|matched| matched.rule.metadata.as_ref());
        if let Some(metadata) = metadata.filter(|_| status.code() == Code::Ok) {
            passed.merge(metadata);
        }
    }
    passed
}

/// Return the domain, the descriptors and the cost of a call, as envoyproxy/ratelimit does.
fn call_metadata(request: &RateLimitRequest) -> Struct {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let describe = |descriptor: &RateLimitDescriptor| {
        let entries =
            entries(descriptor).map(|(key, value)| Kind::Text(format!("{}={}", text(key), text(value))).into());
        let mut fields =
            BTreeMap::from([("entries".to_owned(), Kind::List(List { values: entries.collect() }).into())]);
        if let Some(limit) = descriptor.limit {
            let unit = limit.unit().name();
            let limit = format!("requests_per_unit:{} unit:{unit}", limit.requests_per_unit);
            fields.insert("limit".to_owned(), Kind::Text(limit).into());
        }
        if let Some(hits) = descriptor.hits_addend {
            fields.insert("hitsAddend".to_owned(), Kind::Number(hits as f64).into());
        }
        Kind::Object(Struct { fields }).into()
    };
    let descriptors = Kind::List(List { values: request.descriptors.iter().map(describe).collect() });
    let mut fields = BTreeMap::from([
        ("domain".to_owned(), Kind::Text(text(&request.domain)).into()),
        ("descriptors".to_owned(), descriptors.into()),
    ]);
    if request.hits_addend > 0 {
        fields.insert("hitsAddend".to_owned(), Kind::Number(request.hits_addend.into()).into());
    }
    Struct { fields }
}
