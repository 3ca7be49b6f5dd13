//! `sluicegate check`: says whether the configuration can be used, and what its limits guarantee.

use std::io::{Write, stdout};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::cost::Cost;
use crate::limit::algorithm::Rule;
use crate::limit::clock;
use crate::limit::plan::Plan;
use crate::limit::quota::Calendar;
use crate::limit::redis::Servers;
use crate::runtime::{Runtime, Terms};

pub(super) fn check(path: &Path, runtime: &Runtime) -> anyhow::Result<()> {
    let mut out = stdout().lock();
    writeln!(
        out,
        "{}: fine: {} listeners, {} routes, {} limits, {} upstreams; store: {}",
        path.display(),
        runtime.listeners.len(),
        runtime.routes.len(),
        runtime.limits.len(),
        runtime.upstreams.len(),
        runtime.store.name,
    )?;
    for warning in runtime.warnings(Duration::from_micros(clock::unix_us())) {
        writeln!(out, "  warning: {warning}")?;
    }
    for terms in runtime.limits.values() {
        let limit = &terms.limit;
        let trial = if limit.shadow { " (shadow: never denies)" } else { "" };
        let later = terms.cost.as_ref().is_some_and(Cost::is_post_paid);
        let overdraft = if later { ", and what the last responses overdraw" } else { "" };
        for (tier, plan) in limit.plans() {
            let tier = tier.map_or(String::new(), |tier| format!(", tier {tier}"));
            writeln!(out, "  {}{tier}: {}{overdraft}{trial}", limit.name, guarantee(plan))?;
        }
        if !runtime.routes.iter().any(|route| route.uses(limit)) {
            writeln!(out, "  warning: no route uses `{}`", limit.name)?;
        }
        for (whose, capacity) in too_small(terms, runtime) {
            writeln!(
                out,
                "  warning: a cost may be more than `{}` ever has{whose} ({capacity}): such a request is denied for good, \
                 with 429 and no Retry-After",
                limit.name
            )?;
        }
    }
    let is_cluster =
        runtime.store.redis.as_ref().is_some_and(|(servers, _)| matches!(servers, Servers::Cluster { .. }));
    for route in runtime.routes.iter().filter(|route| is_cluster && route.metering.identities.len() > 1) {
        writeln!(
            out,
            "  note: route `{}` is up to {} calls at the same time, as its identities are kept by several masters: a \
             request that one denies holds units of the others for about a round trip",
            route.name,
            route.metering.identities.len()
        )?;
    }
    Ok(())
}

/// What a size of a limit guarantees, whatever its callers do.
fn guarantee(plan: &Plan) -> String {
    let (most, at_once) = (plan.most_in_any_window(), plan.rule.capacity());
    let window = match (plan.quota.window_us, plan.quota.calendar) {
        _ if matches!(plan.rule, Rule::Concurrency(_)) => return format!("at most {most} at the same time"),
        (Some(us), _) if us.is_multiple_of(1_000_000) => format!("{} s", us / 1_000_000),
        (Some(us), _) => format!("{} ms", us / 1000),
        (None, Some(Calendar::Year)) => "365 days".to_owned(),
        (None, _) => "28 days".to_owned(),
    };
    format!("at most {most} in any {window}, {at_once} at once")
}

/// The sizes of a limit that the costs of its requests may never fit into. Costs that always are too much are errors.
fn too_small(terms: &Terms, runtime: &Runtime) -> Vec<(String, u64)> {
    let limit = &terms.limit;
    let uses = runtime.routes.iter().flat_map(|route| &route.metering.limits);
    let costs = uses.filter(|metered| Arc::ptr_eq(&metered.limit, limit)).map(|metered| match &metered.cost {
        Cost::Fixed(cost) | Cost::Request { most: cost, .. } => *cost,
        Cost::Response { .. } => 1,
    });
    let dearest = costs.max().unwrap_or(0);
    let tiers =
        limit.plans().map(|(tier, plan)| (tier.map_or(String::new(), |tier| format!(" in the tier `{tier}`")), plan));
    let consumers = runtime.consumers.load();
    let mut own: Vec<_> = consumers
        .iter()
        .filter_map(|consumer| {
            Some((format!(" for the consumer `{}`", consumer.name), &**consumer.plans.get(&limit.name)?))
        })
        .collect();
    own.sort_by(|(one, _), (other, _)| one.cmp(other));
    own.dedup_by(|(one, _), (other, _)| one == other);
    let sizes = tiers.chain(own).map(|(whose, plan)| (whose, plan.rule.capacity()));
    sizes.filter(|(_, capacity)| *capacity < dearest).collect()
}
