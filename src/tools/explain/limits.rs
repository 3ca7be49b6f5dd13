//! Reports the identities, quotas and usage of a route's limits for a request. The usage is read from the counters
//! without charging them.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use http::Response;
use tokio::runtime::{Builder, Runtime as Reactor};

use crate::clock::monotonic;
use crate::http::body::Body;
use crate::identity::consumer::Caller;
use crate::identity::display::DisplayPart;
use crate::identity::spec::Descriptor;
use crate::identity::spec::{IdentityLookup, IdentitySpec, RequestAttributes};
use crate::limiter::algorithm::fixed_window::{FixedWindow, WindowStart};
use crate::limiter::algorithm::{Outcome, Rule, Status, StepKind};
use crate::limiter::decision::{Decision, LimitCheck};
use crate::limiter::key::IdentityEncoder;
use crate::limiter::overrides::{OverrideTable, Overrides};
use crate::limiter::redis::{RedisSettings, overrides};
use crate::limiter::settlement::{Deferred, SettleAction};
use crate::limiter::spec::LimitVariant;
use crate::limiter::store::{DecidedBy, RedisStore};
use crate::limiter::verdict::{Charge, Operation, Verdict};
use crate::proxy::holdings::settle_action;
use crate::proxy::metrics::LimitDecision;
use crate::snapshot::CompiledConfig;
use crate::snapshot::routes::{Route, RouteLimit};
use crate::tools::explain::report::{EffectiveQuota, IdentityPartReport, LimitReport, LimitUsage};
use crate::upstream::error::UpstreamError;

/// The limits of a request, as they were read from the counters. A peek charges nothing.
#[derive(Debug, Default)]
pub(super) struct PeekedLimits {
    /// The reason why the counters were not read.
    pub(super) unavailable: Option<String>,
    /// `allowed` or `denied`. `None` if no limit was checked, or if the counters were not read.
    pub(super) decision: Option<&'static str>,
    /// Whether the request is rejected after its charges, so that the gateway refunds them.
    pub(super) is_refunded: bool,
    /// The outcome of each limit before the request, with the index of the limit on the route.
    outcomes: Vec<(usize, Outcome)>,
    /// The limits that took part in the decision.
    limits: Vec<PeekedLimit>,
}

/// A limit that took part in the decision.
#[derive(Debug)]
struct PeekedLimit {
    /// Index of the limit on the route.
    limit_index: usize,
    variant: Arc<LimitVariant>,
    cost: u64,
    deferred: Deferred,
    /// `None` after the report was taken.
    report: Option<LimitReport>,
}

impl PeekedLimits {
    /// Decide about checks without charging them. If the counters are not available, the request is admitted.
    pub(super) fn peek<'a, C: Counters + ?Sized>(
        &mut self,
        counters: &C,
        checks: &[LimitCheck<'a, '_>],
    ) -> Decision<'a> {
        match counters.peek(checks) {
            Ok(verdict) => {
                let indices = checks.iter().map(|check| check.limit_index);
                self.outcomes.extend(indices.zip(verdict.outcomes.iter().copied()));
                Decision::new(verdict, DecidedBy::Store, checks.iter())
            }
            Err(CountersUnavailable(reason)) => {
                self.unavailable = Some(reason);
                Decision::unlimited()
            }
        }
    }

    /// Report the decision on all checks of the request.
    pub(super) fn decided(
        &mut self,
        config: &CompiledConfig,
        route: &Route,
        checks: &[LimitCheck<'_, '_>],
        decision: &Decision<'_>,
        attributes: &RequestAttributes<'_>,
    ) {
        if self.unavailable.is_none() {
            self.decision = Some(if decision.admitted { "allowed" } else { "denied" });
        }
        let is_refunded = self.is_refunded;
        let peeked = checks.iter().map(|check| {
            let outcome = self.outcomes.iter().find(|(index, _)| *index == check.limit_index);
            let route_limit = &route.rate_limits.limits[check.limit_index];
            // Report the identity from the attributes of this check. The body of a request that is not authenticated was
            // not read.
            let report = LimitReport {
                effective_quota: Some(effective_quota(check, attributes)),
                cost: Some(check.required()),
                usage: outcome.map(|(_, outcome)| {
                    let usage = limit_usage(route_limit, check, outcome, decision);
                    let unchanged = usage.remaining_after.map(|_| usage.remaining);
                    LimitUsage { remaining_after: if is_refunded { unchanged } else { usage.remaining_after }, ..usage }
                }),
                ..limit_report(config, route, check.limit_index, attributes)
            };
            let variant = check.variant.clone();
            let cost = check.cost;
            let deferred = check.deferred;
            PeekedLimit { limit_index: check.limit_index, variant, cost, deferred, report: Some(report) }
        });
        self.limits = peeked.collect();
    }

    /// Add the request's own charges to the outcomes of a decision, if the request is admitted.
    ///
    /// `response` is the response to an admitted request if the gateway itself generates it. With a response, the
    /// outcomes include the settlement (the charge or refund that depends on the response), like the `RateLimit` headers
    /// of the response. With `None`, the outcomes include only the tokens that the request takes before its response.
    pub(super) fn charge(
        &self,
        decision: &mut Decision<'_>,
        route: &Route,
        response: Option<&Result<Box<Response<Body>>, UpstreamError>>,
    ) {
        let is_admitted = decision.admitted;
        let now_us = decision.now_us;
        for result in decision.results.iter_mut().filter(|result| is_admitted && !result.denies()) {
            let Some(limit) = self.limits.iter().find(|limit| limit.limit_index == result.limit_index) else {
                continue;
            };
            let route_limit = &route.rate_limits.limits[limit.limit_index];
            let tokens = match response.map(|response| settle_action(route_limit, limit.deferred, response)) {
                None | Some(SettleAction::Nothing) => charged_tokens(&limit.variant.rule, limit.cost, limit.deferred),
                Some(SettleAction::Charge(cost) | SettleAction::Settle(cost)) => cost,
                Some(SettleAction::Refund) => 0,
            };
            result.outcome = outcome_after(&limit.variant.rule, &result.outcome, tokens, now_us);
        }
    }
}

/// Add a charge of `tokens` to the outcome of a peek.
fn outcome_after(rule: &Rule, outcome: &Outcome, tokens: u64, now_us: u64) -> Outcome {
    if tokens == 0 {
        return *outcome;
    }
    // Time in µs until the quota is fully available again if this is the only charge of the identity. Use `Charge`
    // instead of `Check`, because a deferred cost may exceed the quota.
    let alone_us = rule.step(None, now_us, StepKind::Charge, tokens).outcome.reset_us;
    let reset_us = match rule {
        // A token bucket refills at a constant rate, so the refill times of its charges add up.
        Rule::TokenBucket(_) => outcome.reset_us.saturating_add(alone_us),
        // The request is charged in the window that an earlier request has opened.
        Rule::FixedWindow(FixedWindow { start: WindowStart::FirstRequest, .. }) if outcome.reset_us > 0 => {
            outcome.reset_us
        }
        // The charges expire independently of each other.
        Rule::FixedWindow(_)
        | Rule::SlidingWindow(_)
        | Rule::SlidingBuckets(_)
        | Rule::SlidingLog(_)
        | Rule::Concurrency(_) => outcome.reset_us.max(alone_us),
    };
    Outcome { remaining: outcome.remaining.saturating_sub(tokens), reset_us, ..*outcome }
}

/// Return the number of tokens that an admitted request takes before its response.
fn charged_tokens(rule: &Rule, cost: u64, deferred: Deferred) -> u64 {
    match deferred {
        // The gateway charges the cost after the response.
        Deferred::Charge => 0,
        // A request takes one concurrency permit, regardless of its cost.
        Deferred::Nothing | Deferred::Refund | Deferred::Settle if rule.is_concurrency() => cost.min(1),
        Deferred::Nothing | Deferred::Refund | Deferred::Settle => cost,
    }
}

/// Report each limit of a route. `peeked` contains the limits that took part in the decision.
pub(super) fn limit_reports(
    config: &CompiledConfig,
    route: &Route,
    attributes: &RequestAttributes<'_>,
    peeked: &mut PeekedLimits,
) -> Vec<LimitReport> {
    let reports = (0..route.rate_limits.limits.len()).map(|limit_index| {
        let peeked = peeked.limits.iter_mut().find(|limit| limit.limit_index == limit_index);
        let report = peeked.and_then(|limit| limit.report.take());
        report.unwrap_or_else(|| limit_report(config, route, limit_index, attributes))
    });
    reports.collect()
}

/// Report the identity of a limit, without its quota, cost and usage.
fn limit_report(
    config: &CompiledConfig,
    route: &Route,
    limit_index: usize,
    attributes: &RequestAttributes<'_>,
) -> LimitReport {
    let route_limit = &route.rate_limits.limits[limit_index];
    let identity_spec = route.rate_limits.spec(limit_index);
    let (identity, skipped, error) =
        match identity_spec.lookup(attributes, &config.hasher, &mut IdentityEncoder::default()) {
            Ok(IdentityLookup::Identity(identity)) => (Some(identity.to_string()), None, None),
            Ok(IdentityLookup::OtherMethod) => {
                let methods: Vec<_> = identity_spec.methods.iter().map(http::Method::as_str).collect();
                (None, Some(format!("it is for {} only", methods.join(", "))), None)
            }
            Ok(IdentityLookup::Missing(missing)) => (None, Some(format!("{missing}, but the request has none")), None),
            Ok(IdentityLookup::Exempt) => (None, Some("the client is exempt".to_owned()), None),
            Err(error) => (None, None, Some(error.to_string())),
        };
    let parts = identity.as_ref().map(|_| identity_part_reports(config, identity_spec, attributes));
    LimitReport {
        limit: route_limit.limit.name.to_string(),
        shadow: route_limit.limit.shadow,
        announce: route_limit.limit.announce,
        skipped,
        error,
        parts: parts.unwrap_or_default(),
        identity,
        effective_quota: None,
        cost: None,
        post_paid: route_limit.cost.is_deferred(),
        usage: None,
    }
}

/// Report the limits without an identity as skipped. The request was rejected because of its credential, so the missing
/// identity is not a separate error.
pub(super) fn skip_without_credential(reports: &mut [LimitReport]) {
    for report in reports.iter_mut().filter(|report| report.error.is_some()) {
        report.error = None;
        report.skipped = Some("the request is not authenticated".to_owned());
    }
}

fn identity_part_reports(
    config: &CompiledConfig,
    identity_spec: &IdentitySpec,
    attributes: &RequestAttributes<'_>,
) -> Vec<IdentityPartReport> {
    let name = identity_spec.display(attributes, &config.client_ip);
    let to_report = |(descriptor, display): (&Descriptor, &DisplayPart)| {
        let source = match descriptor {
            _ if *display.label != *descriptor.label() => {
                format!("the client's address, because the {descriptor} is missing")
            }
            Descriptor::ApiKey => api_key_source(attributes),
            Descriptor::Group(_) => format!("the {descriptor}, from the consumers file"),
            Descriptor::Ip => "the client's address".to_owned(),
            Descriptor::Global => "all requests".to_owned(),
            Descriptor::User(_)
            | Descriptor::Header(_)
            | Descriptor::Cookie(_)
            | Descriptor::Query(_)
            | Descriptor::Path(_)
            | Descriptor::Jwt(_)
            | Descriptor::ClientCert
            | Descriptor::Basic
            | Descriptor::Forward(_)
            | Descriptor::Host
            | Descriptor::Method
            | Descriptor::ClaimedUser
            | Descriptor::Json(_)
            | Descriptor::Form(_)
            | Descriptor::Rpc(_)
            | Descriptor::Entry(_)
            | Descriptor::Route => format!("the {descriptor}"),
        };
        IdentityPartReport {
            part: display.label.to_string(),
            value: display.value.as_ref().map(ToString::to_string),
            source,
        }
    };
    identity_spec.descriptors.iter().zip(&*name.0).map(to_report).collect()
}

/// Return a text that names the header with the API key.
fn api_key_source(attributes: &RequestAttributes<'_>) -> String {
    match attributes.credentials.api_key_header() {
        Some(header) => format!("the header `{header}`"),
        None => "the API key".to_owned(),
    }
}

/// Return the quota that applies to a check, and the source of the quota.
fn effective_quota(check: &LimitCheck<'_, '_>, attributes: &RequestAttributes<'_>) -> EffectiveQuota {
    let LimitCheck { limit, variant, .. } = check;
    let caller = attributes.credentials.caller();
    let is_own_variant = |name: &str| match caller {
        Caller::Consumer(consumer) => {
            consumer.variants.get(name).is_some_and(|own_variant| Arc::ptr_eq(own_variant, variant))
        }
        Caller::Accepted(_) | Caller::Anonymous | Caller::Missing => false,
    };
    let tier = limit.tiers.iter().find(|(_, other)| Arc::ptr_eq(other, variant));
    let source = match (caller, tier) {
        _ if Arc::ptr_eq(variant, &limit.default_variant) => "standard".to_owned(),
        (Caller::Consumer(consumer), _) if is_own_variant(&limit.name) => format!("consumer {}", consumer.name),
        (_, Some((tier, _))) => format!("tier {tier}"),
        (_, None) => "override".to_owned(),
    };
    let quota = variant.quota.to_string();
    let unit = limit.unit.to_string();
    EffectiveQuota { source, quota, unit, capacity: variant.rule.capacity() }
}

fn limit_usage(
    route_limit: &RouteLimit,
    check: &LimitCheck<'_, '_>,
    outcome: &Outcome,
    decision: &Decision<'_>,
) -> LimitUsage {
    let seconds = |us: u64| us as f64 / 1e6;
    let is_denied = outcome.status != Status::Ok;
    let queue_policy = route_limit.limit.queue_policy.filter(|_| is_denied);
    LimitUsage {
        decision: LimitDecision::from_decision(check, decision).map(LimitDecision::label),
        remaining: outcome.remaining,
        remaining_after: (decision.admitted && !is_denied)
            .then(|| outcome.remaining.saturating_sub(charged_tokens(&check.variant.rule, check.cost, check.deferred))),
        reset_seconds: seconds(outcome.reset_us),
        retry_seconds: (is_denied && outcome.status != Status::CostTooLarge).then(|| seconds(outcome.retry_us)),
        max_wait_seconds: queue_policy.map(|wait| wait.max_wait.as_secs_f64()),
    }
}

// Read access to the counters of limits.

/// Maximum time to read the counters. An interactive command can wait longer than `store.timeout`, whose default is 50
/// ms.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(2);

/// Read access to the limits' counters.
pub trait Counters: Sync {
    /// The active overrides. `None` if the overrides are unknown, or if there are no overrides.
    fn overrides(&self) -> Option<Arc<OverrideTable>>;

    /// Check limits without charging them.
    ///
    /// # Errors
    /// The counters cannot be read.
    fn peek(&self, checks: &[LimitCheck<'_, '_>]) -> Result<Verdict, CountersUnavailable>;
}

/// The reason why the counters cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct CountersUnavailable(pub String);

/// Counters that cannot be read. Each peek returns the reason.
impl Counters for CountersUnavailable {
    fn overrides(&self) -> Option<Arc<OverrideTable>> {
        None
    }

    fn peek(&self, _: &[LimitCheck<'_, '_>]) -> Result<Verdict, CountersUnavailable> {
        Err(self.clone())
    }
}

/// Create an empty set of overrides for the limits of a configuration.
pub fn empty_overrides(config: &CompiledConfig) -> Overrides {
    let of_files = config.descriptors.file_limits().filter_map(|limit| config.find_limit(&limit.limit.name));
    let limits = config.limits.values().map(|compiled| &compiled.limit).chain(of_files);
    let limits: BTreeMap<_, _> = limits.map(|limit| (limit.name.to_string(), limit.clone())).collect();
    Overrides::new(config.hasher.clone(), move |name| limits.get(name).cloned(), None)
}

/// The counters in the Redis store of a configuration.
#[derive(Debug)]
pub struct RedisCounters {
    tokio_runtime: Reactor,
    store: RedisStore,
    overrides: Overrides,
}

impl RedisCounters {
    /// Connect to the Redis store of the configuration and read its overrides. Return `None` if the configuration has
    /// no Redis store.
    ///
    /// # Errors
    /// The tokio runtime cannot be created.
    pub fn open(config: &CompiledConfig) -> io::Result<Option<Self>> {
        let Some((deployment, settings)) = &config.store.redis else { return Ok(None) };
        let key = overrides::hash_key(&settings.prefix);
        let settings = RedisSettings { timeout: LOOKUP_TIMEOUT, ..settings.clone() };
        let tokio_runtime = Builder::new_current_thread().enable_all().build()?;
        let (store, overrides) = tokio_runtime.block_on(async {
            let store = RedisStore::new(deployment, &settings, Arc::default(), Arc::default(), Arc::default());
            let overrides = empty_overrides(config);
            // Ignore a connection error here, because `peek` reports an unreachable store.
            let _ = overrides.refresh(&store, &key).await;
            (store, overrides)
        });
        Ok(Some(RedisCounters { tokio_runtime, store, overrides }))
    }
}

impl Counters for RedisCounters {
    fn overrides(&self) -> Option<Arc<OverrideTable>> {
        self.overrides.current()
    }

    fn peek(&self, checks: &[LimitCheck<'_, '_>]) -> Result<Verdict, CountersUnavailable> {
        // A limit that is charged after the response requires one available token before the response.
        let charge = |check| Charge { cost: LimitCheck::required(check), ..check.charge(DecidedBy::Store, 0) };
        let charges: Vec<_> = checks.iter().map(charge).collect();
        let deadline = monotonic() + self.store.timeout();
        let result = self.tokio_runtime.block_on(self.store.call(deadline, Operation::Peek, &charges));
        result.map_err(|error| CountersUnavailable(error.to_string()))
    }
}
