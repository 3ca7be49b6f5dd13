//! Warnings about limits: without effect, without room, or open when they matter most.

use std::sync::Arc;

use super::LintInput;
use crate::config::Text;
use crate::config::error::Issue;
use crate::cost::Cost;
use crate::identity::Descriptor;
use crate::limit::algorithm::Rule;
use crate::limit::plan::{LimitSpec, OnStoreError};
use crate::runtime::{CompiledLimit, Route};

/// Words of names and paths where somebody who guesses is held off by a limit alone.
const CREDENTIAL_WORDS: &[&str] = &[
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

pub(super) fn limit_warnings(input: &LintInput<'_>) -> Vec<Issue> {
    let mut issues = Vec::new();
    for compiled in input.config.limits.values() {
        let routes: Vec<_> = input.config.routes.iter().filter(|route| route.has_limit(&compiled.limit)).collect();
        if routes.is_empty() {
            let name = &compiled.limit.name;
            let span = input.span_of(name, |_| None::<&Text>);
            issues.push(
                Issue::new(span, format!("no route uses `{name}`"))
                    .with_hint("name it in `limits` of a route, or remove it"),
            );
        }
        issues.extend(unused_prefetch(input, compiled));
        issues.extend(cost_exceeds_capacity(input, compiled));
        issues.extend(unreachable_burst(input, compiled, &routes));
        issues.extend(login_fails_open(input, compiled, &routes));
        issues.extend(wait_exceeds_timeout(input, compiled, &routes));
    }
    issues
}

/// Units that are never taken ahead.
fn unused_prefetch(input: &LintInput<'_>, compiled: &CompiledLimit) -> Vec<Issue> {
    let limit = &compiled.limit;
    if limit.prefetch == 0 {
        return Vec::new();
    }
    let span = input.span_of(&limit.name, |parsed| parsed.prefetch.as_ref());
    if input.config.store.redis.is_none() {
        let message =
            format!("the `prefetch` of `{}` does nothing: no call is saved with the memory store", limit.name);
        return vec![Issue::new(span, message)];
    }
    let routes = input.config.routes.iter().filter(|route| route.has_limit(limit));
    let issues = routes.filter_map(|route| {
        let other = route.rate_limits.limits.iter().find(|metered| metered.limit.prefetch == 0)?;
        let message = format!(
            "the `prefetch` of `{}` does nothing for requests of `{}` that meet `{}`, which has none",
            limit.name, route.name, other.limit.name
        );
        Some(Issue::new(span.clone(), message))
    });
    issues.collect()
}

/// The sizes of a limit that the costs of its requests may never fit into. Costs that always are too much are errors.
fn cost_exceeds_capacity(input: &LintInput<'_>, compiled: &CompiledLimit) -> Vec<Issue> {
    let limit = &compiled.limit;
    let uses = input.config.routes.iter().flat_map(|route| &route.rate_limits.limits);
    let costs = uses.filter(|metered| Arc::ptr_eq(&metered.limit, limit)).map(|metered| match &metered.cost {
        Cost::Fixed(cost) | Cost::Request { max: cost, .. } => *cost,
        Cost::Response { .. } => 1,
    });
    let max_cost = costs.max().unwrap_or(0);
    let tiers = limit
        .variants()
        .map(|(tier, variant)| (tier.map_or(String::new(), |tier| format!(" in the tier `{tier}`")), variant));
    let consumers = input.config.consumers.load();
    let mut consumer_variants: Vec<_> = consumers
        .iter()
        .filter_map(|consumer| {
            Some((format!(" for the consumer `{}`", consumer.name), &**consumer.variants.get(&limit.name)?))
        })
        .collect();
    consumer_variants.sort_by(|(left, _), (right, _)| left.cmp(right));
    consumer_variants.dedup_by(|(left, _), (right, _)| left == right);
    let capacities = tiers.chain(consumer_variants).map(|(owner, variant)| (owner, variant.rule.capacity()));
    let span = input.span_of(&limit.name, |parsed| parsed.cost.as_ref());
    let issues = capacities.filter(|(_, capacity)| *capacity < max_cost).map(|(owner, capacity)| {
        let message = format!(
            "a cost may be more than `{}` ever has{owner} ({capacity}): such a request is denied for good, with 429 and \
             no Retry-After",
            limit.name
        );
        Issue::new(span.clone(), message).with_hint("a larger burst or quota, or a smaller cost")
    });
    issues.collect()
}

/// A burst that was asked for, where every route has another limit that stops it before.
fn unreachable_burst(input: &LintInput<'_>, compiled: &CompiledLimit, routes: &[&Arc<Route>]) -> Option<Issue> {
    let limit = &compiled.limit;
    let parsed_burst = input.limit(&limit.name)?.get_ref().burst.as_ref()?;
    let capacity = limit.default_variant.rule.capacity();
    let stricter = |route: &Route| {
        let own = route.rate_limits.limits.iter().find(|metered| Arc::ptr_eq(&metered.limit, limit))?;
        let others = route.rate_limits.limits.iter().filter(|other| {
            let identity_spec =
                &input.config.limits.get(&*other.limit.name).map(|other_compiled| &other_compiled.identity_spec);
            let has_same_scope = identity_spec.is_some_and(|by| {
                *by == compiled.identity_spec || (by.descriptors == [Descriptor::Global] && by.methods.is_empty())
            });
            let rejects = !other.limit.shadow && other.limit.queue_policy.is_none() && other.limit.tiers.is_empty();
            let in_flight = matches!(other.limit.default_variant.rule, Rule::Concurrency(_));
            has_same_scope && rejects && !in_flight && other.cost == own.cost
        });
        let strictest = others.min_by_key(|other| other.limit.default_variant.rule.capacity())?;
        (strictest.limit.default_variant.rule.capacity() < capacity).then(|| strictest.limit.clone())
    };
    let stricter_limits: Option<Vec<Arc<LimitSpec>>> = routes.iter().map(|route| stricter(route)).collect();
    let other = stricter_limits?.into_iter().max_by_key(|other| other.default_variant.rule.capacity())?;
    let message = format!(
        "the burst of `{}` cannot be reached: `{}` stops the same requests after {} at once",
        limit.name,
        other.name,
        other.default_variant.rule.capacity()
    );
    Some(
        Issue::new(parsed_burst.span(), message)
            .with_hint(format!("a burst below {}, or a larger one there", other.default_variant.rule.capacity())),
    )
}

/// A limit that holds off who guesses passwords, and lets everybody try while the store is down.
fn login_fails_open(input: &LintInput<'_>, compiled: &CompiledLimit, routes: &[&Arc<Route>]) -> Option<Issue> {
    let limit = &compiled.limit;
    if limit.on_store_error != OnStoreError::Allow || limit.shadow {
        return None;
    }
    let is_credential_name = |message: &str| {
        let words: Vec<_> = message.split(|c: char| !c.is_ascii_alphanumeric()).map(str::to_ascii_lowercase).collect();
        let pair = |words: &[String]| matches!((&*words[0], &*words[1]), ("sign" | "log", "in"));
        words.iter().any(|word| CREDENTIAL_WORDS.contains(&word.as_str())) || words.windows(2).any(pair)
    };
    let credential_route =
        routes.iter().find(|route| is_credential_name(&route.path) || is_credential_name(&route.name));
    let subject = match credential_route {
        _ if is_credential_name(&limit.name) => format!("`{}`", limit.name),
        Some(route) => format!("`{}`, which guards {},", limit.name, route.path),
        None => return None,
    };
    let span = input.span_of(&limit.name, |parsed| parsed.on_store_error.as_ref());
    let text = format!("{subject} does not hold off who guesses while the store is down");
    Some(Issue::new(span, text).with_hint("\"local\" goes on with this gateway's share, \"deny\" refuses with 503"))
}

/// A turn that comes when the time of the route is over.
fn wait_exceeds_timeout(input: &LintInput<'_>, compiled: &CompiledLimit, routes: &[&Arc<Route>]) -> Option<Issue> {
    let queue_policy = compiled.limit.queue_policy?;
    let route = routes.iter().find(|route| route.timeout.is_some_and(|timeout| timeout <= queue_policy.max_wait))?;
    let span = input.span_of(&compiled.limit.name, |parsed| parsed.max_wait.as_ref());
    let message = format!(
        "a request may wait for `{}` longer than the `timeout` of the route `{}`: it is charged, and answered with 504",
        compiled.limit.name, route.name
    );
    Some(Issue::new(span, message).with_hint("a shorter `max_wait`, or a longer `timeout`"))
}
