//! What the limits of a route have to do with a request.

use std::sync::Arc;

use super::facts::{Limited, Part, Size, Standing};
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
pub(super) fn decision<'a>(verdict: Verdict, checks: &[LimitCheck<'a, '_>]) -> Decision<'a> {
    let admitted = verdict.granted > 0;
    let charged = |(check, outcome): (&LimitCheck<'_, '_>, &Outcome)| match admitted && outcome.status == Status::Ok {
        true => Outcome { remaining: left_after(check, outcome), ..*outcome },
        false => *outcome,
    };
    let outcomes = checks.iter().zip(&verdict.outcomes).map(charged).collect();
    Decision::new(Verdict { outcomes, ..verdict }, backend::DecidedBy::Store, checks.iter())
}

fn left_after(check: &LimitCheck<'_, '_>, now: &Outcome) -> u64 {
    let units = match check.deferred {
        // Charged when the response is there.
        Deferred::Charge => 0,
        // Whatever its cost, a charge is one lease.
        Deferred::Nothing | Deferred::Refund if check.is_concurrency() => check.cost.min(1),
        Deferred::Nothing | Deferred::Refund => check.cost,
    };
    now.remaining.saturating_sub(units)
}

/// What each limit of a route asks of a request and what it would say; `checks` are those that have a say, none where the
/// request is refused.
pub(super) fn limited(
    runtime: &CompiledConfig,
    route: &Route,
    asker: &RequestAttributes<'_>,
    checks: &[LimitCheck<'_, '_>],
    verdict: Option<&Verdict>,
) -> Vec<Limited> {
    let decision = verdict.map(|verdict| decision(verdict.clone(), checks));
    let metering = &route.rate_limits;
    let limited = metering.limits.iter().enumerate().map(|(place, metered)| {
        let by = &metering.identities[metered.identity_index];
        let found = by.lookup(asker, &runtime.api_key_settings, &runtime.hasher, &mut IdentityEncoder::default());
        let (identity, left_out, refuses) = match found {
            Ok(IdentityLookup::Identity(identity)) => (Some(identity.to_string()), None, None),
            Ok(IdentityLookup::OtherMethod) => {
                let methods: Vec<_> = by.methods.iter().map(http::Method::as_str).collect();
                (None, Some(format!("it is for {} only", methods.join(", "))), None)
            }
            Ok(IdentityLookup::Missing(missing)) => {
                (None, Some(format!("{missing}, and who lacks it is left out")), None)
            }
            Ok(IdentityLookup::Exempt) => (None, Some("who asks is exempt".to_owned()), None),
            Err(error) => (None, None, Some(error.to_string())),
        };
        let index = checks.iter().position(|check| check.limit_index == place);
        let check = index.map(|index| &checks[index]);
        let outcome = index.and_then(|index| verdict?.outcomes.get(index));
        Limited {
            limit: metered.limit.name.to_string(),
            shadow: metered.limit.shadow,
            skipped: left_out,
            error: refuses,
            parts: if identity.is_some() { parts(runtime, by, asker) } else { Vec::new() },
            identity,
            effective_quota: check.map(|check| size(check, asker)),
            cost: check.map(LimitCheck::required),
            post_paid: metered.cost.is_deferred(),
            usage: check
                .zip(outcome)
                .zip(decision.as_ref())
                .map(|((check, now), decision)| standing(metered, check, now, decision)),
        }
    });
    limited.collect()
}

fn parts(runtime: &CompiledConfig, by: &IdentitySpec, asker: &RequestAttributes<'_>) -> Vec<Part> {
    let name = by.display(asker, &runtime.api_key_settings, &runtime.client_ip);
    let part = |(source, shown): (&Descriptor, &DisplayPart)| {
        let from = match source {
            _ if *shown.label != *source.label() => format!("the client's address, for want of the {source}"),
            Descriptor::ApiKey => format!("the field `{}`", runtime.api_key_settings.header),
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
            | Descriptor::Route => format!("the {source}"),
        };
        Part { part: shown.label.to_string(), value: shown.value.as_ref().map(ToString::to_string), source: from }
    };
    by.descriptors.iter().zip(&*name.0).map(part).collect()
}

/// Whose size it is, and how much.
fn size(check: &LimitCheck<'_, '_>, asker: &RequestAttributes<'_>) -> Size {
    let LimitCheck { limit, variant: plan, .. } = check;
    let caller = asker.caller.as_ref().map_or(Caller::Missing, |caller| *caller);
    let own = |name: &str| match caller {
        Caller::Consumer(consumer) => consumer.variants.get(name).is_some_and(|own| Arc::ptr_eq(own, plan)),
        Caller::Accepted(_) | Caller::Anonymous | Caller::Missing => false,
    };
    let tier = limit.tiers.iter().find(|(_, of)| Arc::ptr_eq(of, plan));
    let of = match (caller, tier) {
        _ if Arc::ptr_eq(plan, &limit.default_variant) => "standard".to_owned(),
        (Caller::Consumer(consumer), _) if own(&limit.name) => format!("consumer {}", consumer.name),
        (_, Some((tier, _))) => format!("tier {tier}"),
        (_, None) => "override".to_owned(),
    };
    Size { source: of, quota: plan.quota.to_string(), capacity: plan.rule.capacity() }
}

fn standing(metered: &RouteLimit, check: &LimitCheck<'_, '_>, now: &Outcome, decision: &Decision<'_>) -> Standing {
    let seconds = |us: u64| us as f64 / 1e6;
    let denies = now.status != Status::Ok;
    let waits = metered.limit.queue_policy.filter(|_| denies);
    Standing {
        decision: LimitDecision::from_decision(check, decision).map(LimitDecision::label),
        remaining: now.remaining,
        remaining_after: (decision.admitted && !denies).then(|| left_after(check, now)),
        reset_seconds: seconds(now.reset_us),
        retry_seconds: (denies && now.status != Status::CostTooLarge).then(|| seconds(now.retry_us)),
        max_wait_seconds: waits.map(|wait| wait.max_wait.as_secs_f64()),
    }
}
