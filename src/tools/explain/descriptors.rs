//! Explains how the rate limit service would decide about a call, without charging a limit.

use serde::Serialize;

use crate::identity::spec::Descriptor;
use crate::limiter::algorithm::{Outcome, Status};
use crate::limiter::decision::Decision;
use crate::limiter::overrides::OverrideTable;
use crate::limiter::store::DecidedBy;
use crate::payload::envoy::{RateLimitDescriptor, RateLimitRequest};
use crate::proxy::descriptor_checks::{
    CallChecks, CheckIndex, DescriptorChecks, GroupDecision, MatchedRule, Resolved, entries, resolve,
};
use crate::snapshot::CompiledConfig;
use crate::tools::explain::limits::Counters;

/// How the service would decide about a call.
#[derive(Debug, Serialize)]
pub struct CallExplanation {
    /// Domain of the call.
    pub domain: String,
    /// `allowed` or `denied`. `None` if the counters were not read.
    pub decision: Option<&'static str>,
    /// Name of the store.
    pub store: String,
    /// The reason why the counters were not read.
    pub counters_unavailable: Option<String>,
    /// The descriptors, in the order of the call.
    pub descriptors: Vec<DescriptorReport>,
}

/// What applies to a descriptor of a call.
#[derive(Debug, Serialize)]
pub struct DescriptorReport {
    /// The entries, as `KEY=VALUE`.
    pub entries: Vec<String>,
    /// The descriptor of the configuration that matches.
    pub matched: Option<String>,
    /// Why the descriptor has no limits, or what is special about it.
    pub notes: Vec<&'static str>,
    /// The limits.
    pub limits: Vec<DescriptorLimitReport>,
}

/// A limit of a descriptor.
#[derive(Debug, Serialize)]
pub struct DescriptorLimitReport {
    /// Name of the limit.
    pub limit: String,
    /// The quota that applies.
    pub quota: String,
    /// The parts of the identity.
    pub by: Vec<String>,
    /// Hash of the identity.
    pub identity: String,
    /// Cost of the call.
    pub cost: u64,
    /// `allowed` or `denied`. `None` if the counters were not read.
    pub decision: Option<&'static str>,
    /// Remaining quota before the call.
    pub remaining: Option<u64>,
    /// Time until the call would be admitted, in seconds.
    pub retry_seconds: Option<f64>,
}

/// Explain a call. Return `None` if the call exceeds a bound, so that the service denies it.
pub fn explain_call(
    config: &CompiledConfig,
    counters: &dyn Counters,
    request: &RateLimitRequest,
) -> Option<CallExplanation> {
    let resolved = resolve(config, request);
    let overrides = counters.overrides();
    let overrides: Option<&OverrideTable> = overrides.as_deref();
    let call = CallChecks::new(config, request, &resolved, overrides)?;
    let mut unavailable = None;
    let mut outcomes: Vec<Vec<Outcome>> = Vec::new();
    let mut decisions = Vec::new();
    for group in &call.groups {
        let mut peeked = Vec::new();
        let decision = if group.charges.is_empty() || group.denies_all() {
            Decision { admitted: !group.denies_all(), ..Decision::unlimited() }
        } else {
            match counters.peek(&group.charges) {
                Ok(verdict) => {
                    peeked.clone_from(&verdict.outcomes);
                    Decision::new(verdict, DecidedBy::Store, group.charges.iter())
                }
                Err(reason) => {
                    unavailable = Some(reason.to_string());
                    Decision::unlimited()
                }
            }
        };
        outcomes.push(peeked);
        decisions.push(GroupDecision::Decided(decision));
    }
    let denied = if call.is_denied(&decisions) { "denied" } else { "allowed" };
    let domain = String::from_utf8_lossy(&request.domain).into_owned();
    let described = request.descriptors.iter().zip(&resolved).zip(&call.descriptors);
    let describe =
        |((descriptor, resolved), checks): ((&RateLimitDescriptor, &Resolved<'_>), &DescriptorChecks<'_>)| {
            let outcomes = checks.group.map_or(&[][..], |group| &outcomes[group]);
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            DescriptorReport {
                entries: entries(descriptor).map(|(key, value)| format!("{}={}", text(key), text(value))).collect(),
                matched: checks.rule.map(|matched| matched.rule.name.to_string()),
                notes: notes(resolved, checks),
                limits: limit_reports(&call, checks, outcomes),
            }
        };
    Some(CallExplanation {
        domain,
        decision: Some(denied).filter(|_| unavailable.is_none()),
        store: config.store.name.clone(),
        counters_unavailable: unavailable,
        descriptors: described.map(describe).collect(),
    })
}

fn notes(resolved: &Resolved<'_>, checks: &DescriptorChecks<'_>) -> Vec<&'static str> {
    let mut notes = Vec::new();
    match checks.rule {
        None if resolved.is_known => notes.push("another descriptor replaces its limit"),
        None => notes.push("no descriptor of the configuration matches: it has no limit"),
        Some(_) if checks.denies_all.is_some() => notes.push("its quota of 0 denies every call"),
        Some(MatchedRule { rule, .. }) if rule.limits.is_empty() => notes.push("it is unlimited"),
        Some(MatchedRule { rule, .. }) if rule.is_quota => {
            notes.push("quota_mode: it denies a call only together with all other quotas");
        }
        Some(_) => {}
    }
    notes
}

fn limit_reports(
    call: &CallChecks<'_, '_>,
    checks: &DescriptorChecks<'_>,
    outcomes: &[Outcome],
) -> Vec<DescriptorLimitReport> {
    let Some(group) = checks.group else { return Vec::new() };
    let Some(MatchedRule { rule, .. }) = checks.rule else { return Vec::new() };
    let report = |index: &CheckIndex| {
        let check = &call.groups[group].charges[index.check];
        let outcome = outcomes.get(index.check);
        let is_denied = outcome.map(|outcome| outcome.status != Status::Ok);
        let decision = is_denied.map(|is_denied| match (is_denied, check.limit.shadow) {
            (true, true) => "shadow_denied",
            (true, false) => "denied",
            (false, _) => "allowed",
        });
        let spec = &rule.limits[index.limit].identity_spec;
        DescriptorLimitReport {
            limit: check.limit.name.to_string(),
            quota: check.variant.quota.to_string(),
            by: spec.descriptors.iter().map(Descriptor::label).map(Into::into).collect(),
            identity: check.identity.to_string(),
            cost: check.cost,
            decision,
            remaining: outcome.map(|outcome| outcome.remaining),
            retry_seconds: outcome.filter(|_| is_denied == Some(true)).map(|outcome| outcome.retry_us as f64 / 1e6),
        }
    };
    checks.checks.iter().map(report).collect()
}
