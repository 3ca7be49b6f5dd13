//! `sluicegate check`: says whether the configuration can be used, and what its limits guarantee.

use std::io::{Write, stdout};
use std::path::Path;
use std::sync::Arc;

use tokio::time::Duration;

use crate::cost::Cost;
use crate::limit::algorithm::Rule;
use crate::limit::clock;
use crate::limit::plan::{Limit, Plan};
use crate::limit::quota::Calendar;
use crate::limit::redis::connection::attempt;
use crate::limit::redis::server::NoConnection;
use crate::limit::redis::{RedisSettings, Servers};
use crate::runtime::{Runtime, Terms};

/// The store is tried for so long: a file can be right while its store is down.
const PATIENCE: Duration = Duration::from_secs(1);

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
            let ahead = taken_ahead(limit, plan);
            writeln!(out, "  {}{tier}: {}{overdraft}{ahead}{trial}", limit.name, guarantee(plan))?;
        }
        if limit.advance > 0 && runtime.store.redis.is_none() {
            writeln!(
                out,
                "  warning: the `lease` of `{}` does nothing: no call is saved with the memory store",
                limit.name
            )?;
        }
        for (route, other) in asked_with(terms, runtime) {
            writeln!(
                out,
                "  warning: the `lease` of `{}` does nothing for requests of `{route}` that meet `{other}`, which has none",
                limit.name
            )?;
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
    if let Some((servers, redis)) = &runtime.store.redis
        && let Err(why) = reach(servers, redis)?
    {
        writeln!(out, "  warning: store: {why}")?;
    }
    Ok(())
}

/// Whether a gateway that starts now would find its store; in words, why not.
fn reach(servers: &Servers, redis: &RedisSettings) -> std::io::Result<Result<(), String>> {
    let reactor = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let answer = reactor.block_on(async {
        for (server, _) in servers.all(PATIENCE).await? {
            attempt(server, redis.algorithms, PATIENCE).await?;
        }
        Ok(())
    });
    // A name that is being looked up on a thread of its own is not waited for.
    reactor.shutdown_background();
    Ok(answer.map_err(|why: NoConnection| why.to_string()))
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

/// What a limit gives up by what gateways take ahead; nothing where units end with their window.
fn taken_ahead(limit: &Limit, plan: &Plan) -> String {
    match (limit.advance, &plan.rule) {
        (0, _) | (_, Rule::FixedWindow(_)) => String::new(),
        (lease, _) => format!(", and up to {lease} more for each gateway"),
    }
}

/// The routes and limits without a lease beside which a limit takes nothing ahead.
fn asked_with<'a>(terms: &'a Terms, runtime: &'a Runtime) -> impl Iterator<Item = (&'a str, &'a str)> {
    let routes = runtime.routes.iter().filter(|route| terms.limit.advance > 0 && route.uses(&terms.limit));
    routes.filter_map(|route| {
        let other = route.metering.limits.iter().find(|metered| metered.limit.advance == 0)?;
        Some((&*route.name, &*other.limit.name))
    })
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
