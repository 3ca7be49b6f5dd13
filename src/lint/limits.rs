//! Warnings about limits: without effect, without room, or open when they matter most.

use std::sync::Arc;

use super::Whole;
use crate::config::Text;
use crate::config::error::Issue;
use crate::cost::Cost;
use crate::identity::Descriptor;
use crate::limit::algorithm::Rule;
use crate::limit::plan::{LimitSpec, OnStoreError};
use crate::runtime::{CompiledLimit, Route};

/// Words of names and paths where somebody who guesses is held off by a limit alone.
const GUARDED: &[&str] = &[
    "login",
    "logon",
    "signin",
    "auth",
    "oauth",
    "oauth2",
    "authenticate",
    "authentication",
    "password",
    "passwd",
    "passcode",
    "token",
    "otp",
    "totp",
    "mfa",
    "2fa",
];

pub(super) fn limit_warnings(whole: &Whole<'_>) -> Vec<Issue> {
    let mut found = Vec::new();
    for terms in whole.runtime.limits.values() {
        let routes: Vec<_> = whole.runtime.routes.iter().filter(|route| route.has_limit(&terms.limit)).collect();
        if routes.is_empty() {
            let name = &terms.limit.name;
            let place = whole.place(name, |_| None::<&Text>);
            found.push(
                Issue::new(place, format!("no route uses `{name}`"))
                    .with_hint("name it in `limits` of a route, or remove it"),
            );
        }
        found.extend(idle_lease(whole, terms));
        found.extend(too_small(whole, terms));
        found.extend(burst(whole, terms, &routes));
        found.extend(open_door(whole, terms, &routes));
        found.extend(long_wait(whole, terms, &routes));
    }
    found
}

/// Units that are never taken ahead.
fn idle_lease(whole: &Whole<'_>, terms: &CompiledLimit) -> Vec<Issue> {
    let limit = &terms.limit;
    if limit.prefetch == 0 {
        return Vec::new();
    }
    let place = whole.place(&limit.name, |written| written.prefetch.as_ref());
    if whole.runtime.store.redis.is_none() {
        let text = format!("the `prefetch` of `{}` does nothing: no call is saved with the memory store", limit.name);
        return vec![Issue::new(place, text)];
    }
    let routes = whole.runtime.routes.iter().filter(|route| route.has_limit(limit));
    let beside = routes.filter_map(|route| {
        let other = route.rate_limits.limits.iter().find(|metered| metered.limit.prefetch == 0)?;
        let text = format!(
            "the `prefetch` of `{}` does nothing for requests of `{}` that meet `{}`, which has none",
            limit.name, route.name, other.limit.name
        );
        Some(Issue::new(place.clone(), text))
    });
    beside.collect()
}

/// The sizes of a limit that the costs of its requests may never fit into. Costs that always are too much are errors.
fn too_small(whole: &Whole<'_>, terms: &CompiledLimit) -> Vec<Issue> {
    let limit = &terms.limit;
    let uses = whole.runtime.routes.iter().flat_map(|route| &route.rate_limits.limits);
    let costs = uses.filter(|metered| Arc::ptr_eq(&metered.limit, limit)).map(|metered| match &metered.cost {
        Cost::Fixed(cost) | Cost::Request { max: cost, .. } => *cost,
        Cost::Response { .. } => 1,
    });
    let dearest = costs.max().unwrap_or(0);
    let tiers = limit
        .variants()
        .map(|(tier, plan)| (tier.map_or(String::new(), |tier| format!(" in the tier `{tier}`")), plan));
    let consumers = whole.runtime.consumers.load();
    let mut own: Vec<_> = consumers
        .iter()
        .filter_map(|consumer| {
            Some((format!(" for the consumer `{}`", consumer.name), &**consumer.variants.get(&limit.name)?))
        })
        .collect();
    own.sort_by(|(one, _), (other, _)| one.cmp(other));
    own.dedup_by(|(one, _), (other, _)| one == other);
    let sizes = tiers.chain(own).map(|(whose, plan)| (whose, plan.rule.capacity()));
    let place = whole.place(&limit.name, |written| written.cost.as_ref());
    let small = sizes.filter(|(_, capacity)| *capacity < dearest).map(|(whose, capacity)| {
        let text = format!(
            "a cost may be more than `{}` ever has{whose} ({capacity}): such a request is denied for good, with 429 and \
             no Retry-After",
            limit.name
        );
        Issue::new(place.clone(), text).with_hint("a larger burst or quota, or a smaller cost")
    });
    small.collect()
}

/// A burst that was asked for, where every route has another limit that stops it before.
fn burst(whole: &Whole<'_>, terms: &CompiledLimit, routes: &[&Arc<Route>]) -> Option<Issue> {
    let limit = &terms.limit;
    let written = whole.limit(&limit.name)?.get_ref().burst.as_ref()?;
    let capacity = limit.default_variant.rule.capacity();
    let stricter = |route: &Route| {
        let own = route.rate_limits.limits.iter().find(|metered| Arc::ptr_eq(&metered.limit, limit))?;
        let others = route.rate_limits.limits.iter().filter(|other| {
            let by = &whole.runtime.limits.get(&*other.limit.name).map(|terms| &terms.identity_spec);
            let counts_as_much = by.is_some_and(|by| {
                *by == terms.identity_spec || (by.descriptors == [Descriptor::Global] && by.methods.is_empty())
            });
            let stops = !other.limit.shadow && other.limit.queue_policy.is_none() && other.limit.tiers.is_empty();
            let in_flight = matches!(other.limit.default_variant.rule, Rule::Concurrency(_));
            counts_as_much && stops && !in_flight && other.cost == own.cost
        });
        let strictest = others.min_by_key(|other| other.limit.default_variant.rule.capacity())?;
        (strictest.limit.default_variant.rule.capacity() < capacity).then(|| strictest.limit.clone())
    };
    let found: Option<Vec<Arc<LimitSpec>>> = routes.iter().map(|route| stricter(route)).collect();
    let other = found?.into_iter().max_by_key(|other| other.default_variant.rule.capacity())?;
    let text = format!(
        "the burst of `{}` cannot be reached: `{}` stops the same requests after {} at once",
        limit.name,
        other.name,
        other.default_variant.rule.capacity()
    );
    Some(
        Issue::new(written.span(), text)
            .with_hint(format!("a burst below {}, or a larger one there", other.default_variant.rule.capacity())),
    )
}

/// A limit that holds off who guesses passwords, and lets everybody try while the store is down.
fn open_door(whole: &Whole<'_>, terms: &CompiledLimit, routes: &[&Arc<Route>]) -> Option<Issue> {
    let limit = &terms.limit;
    if limit.on_store_error != OnStoreError::Allow || limit.shadow {
        return None;
    }
    let guards = |text: &str| {
        let words: Vec<_> = text.split(|c: char| !c.is_ascii_alphanumeric()).map(str::to_ascii_lowercase).collect();
        let pair = |two: &[String]| matches!((&*two[0], &*two[1]), ("sign" | "log", "in"));
        words.iter().any(|word| GUARDED.contains(&word.as_str())) || words.windows(2).any(pair)
    };
    let guarded = routes.iter().find(|route| guards(&route.path) || guards(&route.name));
    let what = match guarded {
        _ if guards(&limit.name) => format!("`{}`", limit.name),
        Some(route) => format!("`{}`, which guards {},", limit.name, route.path),
        None => return None,
    };
    let place = whole.place(&limit.name, |written| written.on_store_error.as_ref());
    let text = format!("{what} does not hold off who guesses while the store is down");
    Some(Issue::new(place, text).with_hint("\"local\" goes on with this gateway's share, \"deny\" refuses with 503"))
}

/// A turn that comes when the time of the route is over.
fn long_wait(whole: &Whole<'_>, terms: &CompiledLimit, routes: &[&Arc<Route>]) -> Option<Issue> {
    let wait = terms.limit.queue_policy?;
    let route = routes.iter().find(|route| route.timeout.is_some_and(|timeout| timeout <= wait.max_wait))?;
    let place = whole.place(&terms.limit.name, |written| written.max_wait.as_ref());
    let text = format!(
        "a request may wait for `{}` longer than the `timeout` of the route `{}`: it is charged, and answered with 504",
        terms.limit.name, route.name
    );
    Some(Issue::new(place, text).with_hint("a shorter `max_wait`, or a longer `timeout`"))
}
