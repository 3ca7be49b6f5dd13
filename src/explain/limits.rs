//! What the limits of a route have to do with a request.

use std::sync::Arc;

use super::facts::{EffectiveQuota, IdentityPartReport, LimitReport, LimitUsage};
use crate::gateway::meters::LimitDecision;
use crate::identity::api_key::Caller;
use crate::identity::name::DisplayPart;
use crate::identity::{Descriptor, IdentityLookup, IdentitySpec, RequestAttributes};
use crate::limit::admission::Deferred;
use crate::limit::algorithm::{Outcome, Status};
use crate::limit::backend;
use crate::limit::decision::{Decision, LimitCheck};
use crate::limit::key::IdentityEncoder;
use crate::limit::store::Verdict;
use crate::runtime::{CompiledConfig, Route, RouteLimit};

/// The decision that a look comes to. What limits would charge is gone from what they say is left.
pub(super) fn simulated_decision<'a>(verdict: Verdict, checks: &[LimitCheck<'a, '_>]) -> Decision<'a> {
    let admitted = verdict.granted > 0;
    let after_charge =
        |(check, outcome): (&LimitCheck<'_, '_>, &Outcome)| match admitted && outcome.status == Status::Ok {
            true => Outcome { remaining: remaining_after(check, outcome), ..*outcome },
            false => *outcome,
        };
    let outcomes = checks.iter().zip(&verdict.outcomes).map(after_charge).collect();
    Decision::new(Verdict { outcomes, ..verdict }, backend::DecidedBy::Store, checks.iter())
}

fn remaining_after(check: &LimitCheck<'_, '_>, outcome: &Outcome) -> u64 {
    let tokens = match check.deferred {
        // Charged when the response is there.
        Deferred::Charge => 0,
        // Whatever its cost, a charge is one lease.
        Deferred::Nothing | Deferred::Refund if check.is_concurrency() => check.cost.min(1),
        Deferred::Nothing | Deferred::Refund => check.cost,
    };
    outcome.remaining.saturating_sub(tokens)
}

/// What each limit of a route asks of a request and what it would say; `checks` are those that have a say, none where the
/// request is refused.
pub(super) fn limit_reports(
    config: &CompiledConfig,
    route: &Route,
    attributes: &RequestAttributes<'_>,
    checks: &[LimitCheck<'_, '_>],
    verdict: Option<&Verdict>,
) -> Vec<LimitReport> {
    let decision = verdict.map(|verdict| simulated_decision(verdict.clone(), checks));
    let metering = &route.rate_limits;
    let reports = metering.limits.iter().enumerate().map(|(limit_index, route_limit)| {
        let identity_spec = &metering.identities[route_limit.identity_index];
        let lookup =
            identity_spec.lookup(attributes, &config.api_key_settings, &config.hasher, &mut IdentityEncoder::default());
        let (identity, skipped, error) = match lookup {
            Ok(IdentityLookup::Identity(identity)) => (Some(identity.to_string()), None, None),
            Ok(IdentityLookup::OtherMethod) => {
                let methods: Vec<_> = identity_spec.methods.iter().map(http::Method::as_str).collect();
                (None, Some(format!("it is for {} only", methods.join(", "))), None)
            }
            Ok(IdentityLookup::Missing(missing)) => {
                (None, Some(format!("{missing}, and who lacks it is left out")), None)
            }
            Ok(IdentityLookup::Exempt) => (None, Some("who asks is exempt".to_owned()), None),
            Err(error) => (None, None, Some(error.to_string())),
        };
        let index = checks.iter().position(|check| check.limit_index == limit_index);
        let check = index.map(|index| &checks[index]);
        let outcome = index.and_then(|index| verdict?.outcomes.get(index));
        LimitReport {
            limit: route_limit.limit.name.to_string(),
            shadow: route_limit.limit.shadow,
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

fn identity_part_reports(
    config: &CompiledConfig,
    identity_spec: &IdentitySpec,
    attributes: &RequestAttributes<'_>,
) -> Vec<IdentityPartReport> {
    let name = identity_spec.display(attributes, &config.api_key_settings, &config.client_ip);
    let to_report = |(descriptor, display): (&Descriptor, &DisplayPart)| {
        let source = match descriptor {
            _ if *display.label != *descriptor.label() => format!("the client's address, for want of the {descriptor}"),
            Descriptor::ApiKey => format!("the field `{}`", config.api_key_settings.header),
            Descriptor::Ip => "the client's address".to_owned(),
            Descriptor::Global => "all requests".to_owned(),
            Descriptor::User(_)
            | Descriptor::Header(_)
            | Descriptor::Cookie(_)
            | Descriptor::Query(_)
            | Descriptor::Path(_)
            | Descriptor::Jwt(_)
            | Descriptor::ClientCert
            | Descriptor::Host
            | Descriptor::Method
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

/// Whose size it is, and how much.
fn effective_quota(check: &LimitCheck<'_, '_>, attributes: &RequestAttributes<'_>) -> EffectiveQuota {
    let LimitCheck { limit, variant, .. } = check;
    let caller = attributes.caller.as_ref().map_or(Caller::Missing, |caller| *caller);
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
    EffectiveQuota { source, quota: variant.quota.to_string(), capacity: variant.rule.capacity() }
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
        remaining_after: (decision.admitted && !is_denied).then(|| remaining_after(check, outcome)),
        reset_seconds: seconds(outcome.reset_us),
        retry_seconds: (is_denied && outcome.status != Status::CostTooLarge).then(|| seconds(outcome.retry_us)),
        max_wait_seconds: queue_policy.map(|wait| wait.max_wait.as_secs_f64()),
    }
}
