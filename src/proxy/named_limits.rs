//! Checks of limits that a program names in the JSON API, with the identity and the cost of each.

use std::sync::Arc;
use std::time::{Duration, Instant};

use http::{HeaderMap, Request, StatusCode};
use serde::Deserialize;

use crate::http::ratelimit_headers::{HeaderStyle, append_decision_headers};
use crate::identity::display::{IdentityInput, ResolvedIdentity};
use crate::limiter::algorithm::MAX_REQUEST_WEIGHT;
use crate::limiter::decision::{Decision, LimitCheck};
use crate::limiter::fallback::StoreUnavailable;
use crate::limiter::overrides::OverrideTable;
use crate::limiter::quota::EXACT_INTEGER_LIMIT;
use crate::limiter::settlement::Deferred;
use crate::limiter::spec::LimitSpec;
use crate::proxy::record::{DecisionRecord, decision_info};
use crate::proxy::request::Peer;
use crate::snapshot::CompiledConfig;
use crate::snapshot::limits::CompiledLimit;
use crate::telemetry::access_log::{DecisionInfo, TelemetrySinks};
use crate::telemetry::trace::TraceParent;

/// Maximum number of limits in a call.
const MAX_LIMITS: usize = 64;

/// A limit that a program names.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NamedLimit {
    limit: String,
    /// A value for each part of the limit's `by`.
    identity: IdentityInput,
    #[serde(default = "one")]
    cost: u64,
}

fn one() -> u64 {
    1
}

/// The call that names limits.
pub(super) struct NamedCall<'a> {
    pub(super) head: &'a Request<()>,
    pub(super) peer: &'a Peer,
    pub(super) received_at: Instant,
}

impl NamedCall<'_> {
    /// Write the access log record of the decision, and export its spans. Their status is the status in the decision.
    pub(super) fn write_record(
        &self,
        sinks: &TelemetrySinks,
        checks: &[LimitCheck<'_, '_>],
        decision: &Result<Decision<'_>, StoreUnavailable>,
        status: StatusCode,
        elapsed: Duration,
    ) {
        let parent = TraceParent::from_headers(self.head.headers());
        let trace = sinks.trace_context(parent);
        if sinks.access_log.is_none() && trace.is_none() {
            return;
        }
        let decided = decision.as_ref().ok();
        let outcome = match decided {
            Some(decision) if decision.admitted => "ok",
            Some(_) => "rate-limited",
            None => "store-unavailable",
        };
        let info = DecisionInfo { duration: elapsed, ..decision_info(checks, decided) };
        DecisionRecord {
            peer: self.peer,
            parent,
            trace,
            host: None,
            path: "/v1/check",
            rpc_method: None,
            version: self.head.version(),
            received_at: self.received_at,
            status,
            outcome,
            decision: Some(&info),
        }
        .write(sinks);
    }
}

/// The limits of a call, with their identities. All of them are one decision.
pub(super) struct NamedLimits<'a>(Vec<Resolved<'a>>);

struct Resolved<'a> {
    compiled: &'a CompiledLimit,
    identity: ResolvedIdentity,
    cost: u64,
}

impl<'a> NamedLimits<'a> {
    /// Find the limits and the identities. Identities that are exempt from their limit are left out.
    ///
    /// # Errors
    /// The reason why the call is invalid.
    pub(super) fn resolve(named: &[NamedLimit], config: &'a CompiledConfig) -> Result<Self, String> {
        if !(1..=MAX_LIMITS).contains(&named.len()) {
            return Err(format!("`limits` must have 1 to {MAX_LIMITS} elements, not {}", named.len()));
        }
        let consumers = config.auth.consumers();
        let mut resolved: Vec<Resolved<'_>> = Vec::with_capacity(named.len());
        for NamedLimit { limit, identity: input, cost } in named {
            let compiled = config.limits.get(limit).ok_or_else(|| format!("there is no limit `{limit}`"))?;
            let spec = &compiled.identity_spec;
            if let Some(label) = input.keys().find(|label| !spec.has_label(label)) {
                return Err(format!("`{limit}` does not count by `{label}`"));
            }
            if *cost >= EXACT_INTEGER_LIMIT {
                return Err(format!("the cost of `{limit}` is not below 2^53"));
            }
            if *cost != 1 && compiled.limit.default_variant.rule.is_concurrency() {
                return Err(format!("the cost of `{limit}` is 1, because the limit counts requests in flight"));
            }
            let identity = spec.resolve(input, &config.client_ip, &consumers, &config.hasher);
            let identity = identity.map_err(|error| format!("the identity of `{limit}` is invalid: {error}"))?;
            if !identity.is_exempt {
                resolved.push(Resolved { compiled, identity, cost: *cost });
            }
        }
        Ok(NamedLimits(resolved))
    }

    /// Return whether a limit counts requests in flight, whose permits the program must release.
    pub(super) fn has_permits(&self) -> bool {
        self.0.iter().any(|Resolved { compiled, .. }| compiled.limit.default_variant.rule.is_concurrency())
    }

    /// Return the limits in the order of the checks.
    pub(super) fn specs(&self) -> Vec<Arc<LimitSpec>> {
        self.0.iter().map(|resolved| resolved.compiled.limit.clone()).collect()
    }

    /// Build the checks. The costs are reservations if `reserve` is true.
    ///
    /// # Errors
    /// The reason why the checks cannot be one decision.
    pub(super) fn checks<'p>(
        &'p self,
        overrides: Option<&'p OverrideTable>,
        reserve: bool,
    ) -> Result<Vec<LimitCheck<'a, 'p>>, String>
    where
        'a: 'p,
    {
        let mut checks: Vec<LimitCheck<'a, 'p>> = Vec::with_capacity(self.0.len());
        let mut weight = 0;
        for (limit_index, Resolved { compiled, identity, cost }) in self.0.iter().enumerate() {
            let limit = &*compiled.limit;
            let found = overrides.and_then(|table| table.find(limit, identity.identity));
            let variant = found.map_or_else(|| identity.caller.variant(limit), |found| &found.variant);
            let is_reserved = reserve && !variant.rule.is_concurrency();
            let deferred = if is_reserved { Deferred::Settle } else { Deferred::Nothing };
            let check = LimitCheck { limit_index, limit, variant, identity: identity.identity, cost: *cost, deferred };
            let key = check.key().local_hash();
            if checks.iter().any(|other| other.key().local_hash() == key) {
                return Err(format!("`{}` occurs twice with the same identity", limit.name));
            }
            weight += variant.rule.weight(variant.rule.capacity());
            checks.push(check);
        }
        match weight <= MAX_REQUEST_WEIGHT {
            true => Ok(checks),
            false => Err("the limits together would occupy the store for too long: check fewer of them".to_owned()),
        }
    }

    /// Return the status of a decision, and add its headers.
    pub(super) fn answer(&self, decision: &Decision<'_>, headers: &mut HeaderMap) -> StatusCode {
        append_decision_headers(headers, &[HeaderStyle::Draft11], None, decision);
        if decision.admitted {
            return StatusCode::OK;
        }
        let denying = decision.violated().next();
        denying.map_or(StatusCode::TOO_MANY_REQUESTS, |result| self.0[result.limit_index].compiled.status)
    }
}
