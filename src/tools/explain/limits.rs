//! Reports the identities, quotas and usage of a route's limits for a request. The usage is read from the counters
//! without charging them.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use http::Response;
use tokio::runtime::{Builder, Runtime as Reactor};

use crate::http::body::Body;
use crate::identity::Descriptor;
use crate::identity::api_key::Caller;
use crate::identity::display::DisplayPart;
use crate::identity::{IdentityLookup, IdentitySpec, RequestAttributes};
use crate::limiter::algorithm::fixed_window::{FixedWindow, WindowStart};
use crate::limiter::algorithm::{Outcome, Rule, Status, StepKind};
use crate::limiter::clock::monotonic;
use crate::limiter::decision::{Decision, LimitCheck};
use crate::limiter::key::IdentityEncoder;
use crate::limiter::overrides::{OverrideTable, Overrides};
use crate::limiter::redis::{RedisSettings, overrides};
use crate::limiter::settlement::{Deferred, SettleAction};
use crate::limiter::store;
use crate::limiter::store::{DecidedBy, RedisStore};
use crate::limiter::verdict::{Charge, Operation, Verdict};
use crate::proxy::metrics::LimitDecision;
use crate::proxy::rate_limit::settle_action;
use crate::snapshot::CompiledConfig;
use crate::snapshot::routes::{Route, RouteLimit};
use crate::tools::explain::report::{EffectiveQuota, IdentityPartReport, LimitReport, LimitUsage};
use crate::upstream::UpstreamError;

/// Convert the verdict of a peek into the decision of a check. A peek reads the counters without charging them. If the
/// request is admitted, this function therefore adds the request's own charge to each outcome.
///
/// `response` is the response to an admitted request if the gateway itself generates it. With a response, the outcomes
/// include the settlement (the charge or refund that depends on the response), like the `RateLimit` headers of the
/// response. With `None`, the outcomes include only the tokens that the request takes before its response.
pub(super) fn simulated_decision<'a>(
    verdict: &Verdict,
    checks: &[LimitCheck<'a, '_>],
    route: &Route,
    response: Option<&Result<Response<Body>, UpstreamError>>,
) -> Decision<'a> {
    let admitted = verdict.granted > 0;
    let tokens = |check: &LimitCheck<'_, '_>| {
        let route_limit = &route.rate_limits.limits[check.limit_index];
        match response.map(|response| settle_action(route_limit, check.deferred, response)) {
            None | Some(SettleAction::Nothing) => charged_tokens(check),
            Some(SettleAction::Charge(cost) | SettleAction::Settle(cost)) => cost,
            Some(SettleAction::Refund) => 0,
        }
    };
    let after_charge =
        |(check, outcome): (&LimitCheck<'_, '_>, &Outcome)| match admitted && outcome.status == Status::Ok {
            true => outcome_after(check, outcome, tokens(check), verdict.now_us),
            false => *outcome,
        };
    let outcomes = checks.iter().zip(&verdict.outcomes).map(after_charge).collect();
    Decision::new(Verdict { outcomes, ..verdict.clone() }, store::DecidedBy::Store, checks.iter())
}

/// Add a charge of `tokens` to the outcome of a peek.
fn outcome_after(check: &LimitCheck<'_, '_>, outcome: &Outcome, tokens: u64, now_us: u64) -> Outcome {
    if tokens == 0 {
        return *outcome;
    }
    let rule = &check.variant.rule;
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
fn charged_tokens(check: &LimitCheck<'_, '_>) -> u64 {
    match check.deferred {
        // The gateway charges the cost after the response.
        Deferred::Charge => 0,
        // A request takes one concurrency permit, regardless of its cost.
        Deferred::Nothing | Deferred::Refund | Deferred::Settle if check.is_concurrency() => check.cost.min(1),
        Deferred::Nothing | Deferred::Refund | Deferred::Settle => check.cost,
    }
}

/// Report each limit of a route. `checks` contains one check for each limit that applies. `checks` is empty if the
/// request is rejected before the checks are built.
pub(super) fn limit_reports(
    config: &CompiledConfig,
    route: &Route,
    attributes: &RequestAttributes<'_>,
    checks: &[LimitCheck<'_, '_>],
    verdict: Option<&Verdict>,
) -> Vec<LimitReport> {
    let decision = verdict.map(|verdict| simulated_decision(verdict, checks, route, None));
    let metering = &route.rate_limits;
    let reports = metering.limits.iter().enumerate().map(|(limit_index, route_limit)| {
        let identity_spec = &metering.identities[route_limit.identity_index];
        let lookup = identity_spec.lookup(attributes, &config.hasher, &mut IdentityEncoder::default());
        let (identity, skipped, error) = match lookup {
            Ok(IdentityLookup::Identity(identity)) => (Some(identity.to_string()), None, None),
            Ok(IdentityLookup::OtherMethod) => {
                let methods: Vec<_> = identity_spec.methods.iter().map(http::Method::as_str).collect();
                (None, Some(format!("it is for {} only", methods.join(", "))), None)
            }
            Ok(IdentityLookup::Missing(missing)) => (None, Some(format!("{missing}, but the request has none")), None),
            Ok(IdentityLookup::Exempt) => (None, Some("the client is exempt".to_owned()), None),
            Err(error) => (None, None, Some(error.to_string())),
        };
        let index = checks.iter().position(|check| check.limit_index == limit_index);
        let check = index.map(|index| &checks[index]);
        let outcome = index.and_then(|index| verdict?.outcomes.get(index));
        LimitReport {
            limit: route_limit.limit.name.to_string(),
            shadow: route_limit.limit.shadow,
            announce: route_limit.limit.announce,
            skipped,
            error,
            parts: if identity.is_some() {
                identity_part_reports(config, identity_spec, attributes)
            } else {
                Vec::new()
            },
            identity,
            effective_quota: check.map(|check| effective_quota(check, attributes)),
            cost: check.map(LimitCheck::required),
            post_paid: route_limit.cost.is_deferred(),
            usage: check
                .zip(outcome)
                .zip(decision.as_ref())
                .map(|((check, outcome), decision)| limit_usage(route_limit, check, outcome, decision)),
        }
    });
    reports.collect()
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
            | Descriptor::Json(_)
            | Descriptor::Rpc(_)
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
    let (quota, unit) = (variant.quota.to_string(), limit.unit.to_string());
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
            .then(|| outcome.remaining.saturating_sub(charged_tokens(check))),
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
pub trait Counters {
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
    let limits = config.limits.iter().map(|(name, compiled)| (name.clone(), compiled.limit.clone()));
    let limits: BTreeMap<_, _> = limits.collect();
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
        let Some((servers, settings)) = &config.store.redis else { return Ok(None) };
        let key = overrides::hash_key(&settings.prefix);
        let redis = (servers.clone(), RedisSettings { timeout: LOOKUP_TIMEOUT, ..settings.clone() });
        let tokio_runtime = Builder::new_current_thread().enable_all().build()?;
        let (store, overrides) = tokio_runtime.block_on(async {
            let store = RedisStore::new(&redis, Arc::default(), Arc::default(), Arc::default());
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
