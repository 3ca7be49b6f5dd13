//! What the limits of a route have to do with a request.

use std::sync::Arc;

use super::facts::{Limited, Part, Size, Standing};
use crate::gateway::meters::LimitDecision;
use crate::identity::api_key::Caller;
use crate::identity::name::Shown;
use crate::identity::{Asker, By, Found, Source};
use crate::limit::admission::Later;
use crate::limit::algorithm::{Outcome, Status};
use crate::limit::backend;
use crate::limit::decision::{Check, Decision};
use crate::limit::key::Encoder;
use crate::limit::store::Verdict;
use crate::runtime::{Metered, Route, Runtime};

/// The decision that a look comes to. What limits would charge is gone from what they say is left.
pub(super) fn decision<'a>(verdict: Verdict, checks: &[Check<'a, '_>]) -> Decision<'a> {
    let admitted = verdict.granted > 0;
    let charged = |(check, outcome): (&Check<'_, '_>, &Outcome)| match admitted && outcome.status == Status::Ok {
        true => Outcome { remaining: left_after(check, outcome), ..*outcome },
        false => *outcome,
    };
    let outcomes = checks.iter().zip(&verdict.outcomes).map(charged).collect();
    Decision::new(Verdict { outcomes, ..verdict }, backend::DecidedBy::Store, checks.iter())
}

fn left_after(check: &Check<'_, '_>, now: &Outcome) -> u64 {
    let units = match check.later {
        // Charged when the response is there.
        Later::Pay => 0,
        // Whatever its cost, a charge is one lease.
        Later::Nothing | Later::Refund if check.takes_lease() => check.cost.min(1),
        Later::Nothing | Later::Refund => check.cost,
    };
    now.remaining.saturating_sub(units)
}

/// What each limit of a route asks of a request and what it would say; `checks` are those that have a say, none where the
/// request is refused.
pub(super) fn limited(
    runtime: &Runtime,
    route: &Route,
    asker: &Asker<'_>,
    checks: &[Check<'_, '_>],
    verdict: Option<&Verdict>,
) -> Vec<Limited> {
    let decision = verdict.map(|verdict| decision(verdict.clone(), checks));
    let metering = &route.metering;
    let limited = metering.limits.iter().enumerate().map(|(place, metered)| {
        let by = &metering.identities[metered.identity];
        let found = by.find(asker, &runtime.api_keys, &runtime.hasher, &mut Encoder::default());
        let (identity, left_out, refuses) = match found {
            Ok(Found::Identity(identity)) => (Some(identity.to_string()), None, None),
            Ok(Found::OtherMethod) => {
                let methods: Vec<_> = by.methods.iter().map(http::Method::as_str).collect();
                (None, Some(format!("it is for {} only", methods.join(", "))), None)
            }
            Ok(Found::Lacking(missing)) => (None, Some(format!("{missing}, and who lacks it is left out")), None),
            Ok(Found::Exempt) => (None, Some("who asks is exempt".to_owned()), None),
            Err(error) => (None, None, Some(error.to_string())),
        };
        let index = checks.iter().position(|check| check.place == place);
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
            cost: check.map(Check::needs),
            post_paid: metered.cost.is_post_paid(),
            usage: check
                .zip(outcome)
                .zip(decision.as_ref())
                .map(|((check, now), decision)| standing(metered, check, now, decision)),
        }
    });
    limited.collect()
}

fn parts(runtime: &Runtime, by: &By, asker: &Asker<'_>) -> Vec<Part> {
    let name = by.name(asker, &runtime.api_keys, &runtime.client_ip);
    let part = |(source, shown): (&Source, &Shown)| {
        let from = match source {
            _ if *shown.word != *source.word() => format!("the client's address, for want of the {source}"),
            Source::ApiKey => format!("the field `{}`", runtime.api_keys.header),
            Source::Ip => "the client's address".to_owned(),
            Source::Global => "all requests".to_owned(),
            Source::User(_)
            | Source::Header(_)
            | Source::Cookie(_)
            | Source::Query(_)
            | Source::Path(_)
            | Source::Jwt(_)
            | Source::ClientCert
            | Source::Host
            | Source::Method
            | Source::Route => format!("the {source}"),
        };
        Part { part: shown.word.to_string(), value: shown.value.as_ref().map(ToString::to_string), source: from }
    };
    by.sources.iter().zip(&*name.0).map(part).collect()
}

/// Whose size it is, and how much.
fn size(check: &Check<'_, '_>, asker: &Asker<'_>) -> Size {
    let Check { limit, plan, .. } = check;
    let caller = asker.caller.as_ref().map_or(Caller::Missing, |caller| *caller);
    let own = |name: &str| match caller {
        Caller::Consumer(consumer) => consumer.plans.get(name).is_some_and(|own| Arc::ptr_eq(own, plan)),
        Caller::Accepted(_) | Caller::Anonymous | Caller::Missing => false,
    };
    let tier = limit.tiers.iter().find(|(_, of)| Arc::ptr_eq(of, plan));
    let of = match (caller, tier) {
        _ if Arc::ptr_eq(plan, &limit.standard) => "standard".to_owned(),
        (Caller::Consumer(consumer), _) if own(&limit.name) => format!("consumer {}", consumer.name),
        (_, Some((tier, _))) => format!("tier {tier}"),
        (_, None) => "override".to_owned(),
    };
    Size { source: of, quota: plan.quota.to_string(), capacity: plan.rule.capacity() }
}

fn standing(metered: &Metered, check: &Check<'_, '_>, now: &Outcome, decision: &Decision<'_>) -> Standing {
    let seconds = |us: u64| us as f64 / 1e6;
    let denies = now.status != Status::Ok;
    let waits = metered.limit.wait.filter(|_| denies);
    Standing {
        decision: LimitDecision::from_decision(check, decision).map(LimitDecision::label),
        remaining: now.remaining,
        remaining_after: (decision.admitted && !denies).then(|| left_after(check, now)),
        reset_seconds: seconds(now.reset_us),
        retry_seconds: (denies && now.status != Status::Never).then(|| seconds(now.retry_us)),
        max_wait_seconds: waits.map(|wait| wait.most.as_secs_f64()),
    }
}
