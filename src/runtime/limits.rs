//! `[limit.*]`: who, how much, at what cost; checked and put into the form that decides.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use http::HeaderName;
use tokio::time::Duration;

use super::quotas::{hint, rule, size};
use super::reader::Reader;
use super::targets::named;
use super::{Terms, identities};
use crate::config::error::Issue;
use crate::config::{self, Config, LimitCost};
use crate::cost::{Cost, RefundOn};
use crate::identity::{By, OnMissing, Source};
use crate::limit::algorithm::Rule;
use crate::limit::key::IdentityHasher;
use crate::limit::plan::{Division, Limit, OnStoreError, Plan, Wait};
use crate::limit::quota::EXACT;
use crate::upstream::settings::UpstreamSettings;

/// A request in flight holds its slot for the time that its upstream may take and so much more, unless it is renewed.
const LEASE_SLACK: Duration = Duration::from_secs(5);

pub(super) fn limits(
    config: &Config,
    hasher: &IdentityHasher,
    instances: u64,
    trusted_proxies: usize,
    upstreams: &[UpstreamSettings],
    reader: &mut Reader<'_>,
) -> BTreeMap<String, Terms> {
    let mut limits = BTreeMap::new();
    for (name, limit) in &config.limit {
        let place = limit.span();
        reader.name(place.clone(), name);
        let limit = limit.get_ref();
        let by = identities::by(limit, &place, reader);
        if config.jwt.jwks_file.is_none() && by.sources.iter().any(|source| matches!(source, Source::Jwt(_))) {
            let message = "this limit is by a claim of tokens, but no key is known: every token would be refused";
            reader.issue(Issue::at(place.clone(), message).hint("[jwt] with jwks_file = \"certs/jwks.json\""));
        }
        let listens =
            |listener: &config::Listener| listener.tls.as_ref().is_some_and(|tls| tls.get_ref().client_ca.is_some());
        if by.sources.contains(&Source::ClientCert) && !config.listener.iter().any(|one| listens(one.get_ref())) {
            let message = "this limit is by the certificates of clients, but no listener asks for them: no request would have one";
            reader.issue(
                Issue::at(place.clone(), message).hint("tls.client_ca = \"certs/clients-ca.pem\" on a [[listener]]"),
            );
        }
        let user = by.sources.iter().any(|source| matches!(source, Source::User(_)));
        if by.on_missing == OnMissing::Reject && trusted_proxies == 0 && user {
            let message = "this limit is by a header that only trusted proxies may set, but none is trusted: every request would be refused";
            let hint =
                "[client_ip] with trusted_proxies = [\"10.0.0.0/8\"], or by = \"header:NAME\" if clients may choose it";
            reader.issue(Issue::at(place.clone(), message).hint(hint));
        }
        let cost = cost(limit, trusted_proxies, reader);
        let refund_on = refund_on(limit, reader);
        let wait = wait(limit, reader);
        let advance = reader.number(limit.prefetch.as_ref(), 0..1 << 32, 0) as u64;
        let errors = [("local", OnStoreError::Local), ("allow", OnStoreError::Allow), ("deny", OnStoreError::Deny)];
        let on_store_error = reader.choice(limit.on_store_error.as_ref(), OnStoreError::Local, &errors);
        let Some((quota, rule)) = rule(limit, &place, lease(config, name, upstreams), reader) else { continue };
        at_odds(limit, cost.as_ref(), &rule, reader);
        let division = Division { gateways: instances, dearest: dearest(config, name, cost.as_ref()) };
        let standard = match Plan::new(hasher, name, quota, rule, division) {
            Ok(plan) => Arc::new(plan),
            Err(error) => {
                reader.issue(Issue::at(place, error.to_string()).hint(hint(&error)));
                continue;
            }
        };
        let mut compiled = Limit {
            name: name.as_str().into(),
            standard,
            tiers: BTreeMap::new(),
            on_store_error,
            shadow: limit.shadow,
            wait,
            advance,
            division,
        };
        if let (Err(error), Some(written)) = (compiled.has_room(&compiled.standard), &limit.prefetch) {
            reader.issue(Issue::at(written.span(), error.to_string()).hint(hint(&error)));
            compiled.advance = 0;
        }
        compiled.tiers = tiers(limit, &compiled, &by, hasher, reader);
        if let (Some(Cost::Fixed(cost)), Some(written)) = (&cost, &limit.cost) {
            too_dear(*cost, &compiled, written.span(), reader);
        }
        limits.insert(name.clone(), Terms { limit: Arc::new(compiled), by, cost, refund_on });
    }
    limits
}

/// Sees that a fixed cost fits into every size of a limit.
pub(super) fn too_dear(cost: u64, limit: &Limit, span: Range<usize>, reader: &mut Reader<'_>) {
    for (tier, plan) in limit.plans() {
        let capacity = plan.rule.capacity();
        if cost > capacity {
            let tier = tier.map_or(String::new(), |tier| format!(" in the tier `{tier}`"));
            let name = &limit.name;
            let message = format!(
                "a request costs {cost}, but `{name}` never has more than {capacity}{tier}: all would be denied"
            );
            reader.issue(Issue::at(span.clone(), message).hint("a smaller cost, or a larger burst or quota"));
        }
    }
}

/// The headers that only trusted proxies may set, because some limit believes them.
pub(super) fn trusted_headers(limits: &BTreeMap<String, Terms>) -> Vec<HeaderName> {
    let mut names = Vec::new();
    for terms in limits.values() {
        for source in &terms.by.sources {
            if let Source::User(name) = source {
                names.push(name.clone());
            }
        }
        if let Some(Cost::Request { field, .. }) = &terms.cost {
            names.push(field.clone());
        }
    }
    names.sort_by(|one, other| one.as_str().cmp(other.as_str()));
    names.dedup();
    names
}

fn cost(limit: &config::Limit, trusted_proxies: usize, reader: &mut Reader<'_>) -> Option<Cost> {
    let written = limit.cost.as_ref()?;
    let table = match written.get_ref() {
        LimitCost::Fixed(cost) => {
            if !(1..EXACT as i64).contains(cost) {
                let issue = Issue::at(written.span(), format!("a cost of {cost} is out of range"));
                reader.issue(issue.hint("1 or more; a request that costs nothing needs no limit"));
            }
            return Some(Cost::Fixed(*cost as u64));
        }
        LimitCost::Said(table) => table,
    };
    // The route's cost stands in where the field is missing; the route fills it in.
    let otherwise = 1;
    match (&table.request_header, &table.response_header, &table.max) {
        (Some(text), None, Some(max)) => {
            let most = reader.number(Some(max), 1..EXACT as i64, 1) as u64;
            if trusted_proxies == 0 {
                let message = "a cost in the request counts from trusted proxies only, but none is trusted";
                let hint =
                    "[client_ip] with trusted_proxies = [\"10.0.0.0/8\"]: clients would say that they cost nothing";
                reader.issue(Issue::at(text.span(), message).hint(hint));
            }
            let field = reader.header_name(text.span(), text.get_ref())?;
            Some(Cost::Request { field, most, otherwise })
        }
        (None, Some(text), None) => {
            let field = reader.header_name(text.span(), text.get_ref())?;
            Some(Cost::Response { field, otherwise })
        }
        _ => {
            let issue = Issue::at(written.span(), "this is no cost");
            let hint = "cost = 5, cost.request_header = \"x-cost\" with cost.max = 100, or cost.response_header = \"x-tokens-used\"";
            reader.issue(issue.hint(hint));
            None
        }
    }
}

fn refund_on(limit: &config::Limit, reader: &mut Reader<'_>) -> RefundOn {
    let mut statuses = Vec::new();
    for text in &limit.refund_on {
        match RefundOn::read(text.get_ref()) {
            Some(range) => statuses.push(range),
            None => {
                let issue = Issue::at(text.span(), format!("`{}` is not a status", text.get_ref()));
                reader.issue(issue.hint("a status such as \"503\", or a class such as \"5xx\""));
            }
        }
    }
    RefundOn(statuses)
}

fn wait(limit: &config::Limit, reader: &mut Reader<'_>) -> Option<Wait> {
    let places = reader.number(limit.max_queue.as_ref(), 1..1 << 31, 1000) as usize;
    if limit.max_wait.is_none()
        && let Some(text) = &limit.max_queue
    {
        reader.issue(Issue::at(text.span(), "`max_queue` goes with `max_wait` only"));
    }
    let most = reader.duration(Some(limit.max_wait.as_ref()?), Duration::ZERO);
    Some(Wait { most, places })
}

/// Keys that do not go together.
fn at_odds(limit: &config::Limit, cost: Option<&Cost>, rule: &Rule, reader: &mut Reader<'_>) {
    let concurrency = matches!(rule, Rule::Concurrency(_));
    let post_paid = cost.is_some_and(Cost::is_post_paid);
    let single = cost.is_none_or(|cost| *cost == Cost::Fixed(1));
    let cost = limit.cost.as_ref().map(|cost| cost.span());
    let wait = limit.max_wait.as_ref().map(|wait| wait.span());
    let refund = limit.refund_on.first().map(|status| status.span());
    let lease = limit.prefetch.as_ref().filter(|lease| *lease.get_ref() > 0).map(|lease| lease.span());
    let pairs = [
        (cost.clone(), concurrency, "a request in flight is one: `cost` does not go with concurrency"),
        (refund, concurrency, "a slot is free again when its request ends: `refund_on` does not go with concurrency"),
        (wait.clone(), concurrency, "nobody knows when a slot comes free: `max_wait` does not go with concurrency"),
        (wait, limit.shadow, "a shadow limit holds nobody: `max_wait` does not go with it"),
        (
            lease.clone(),
            concurrency,
            "a slot belongs to one request in flight: `prefetch` does not go with concurrency",
        ),
        (lease.clone(), limit.shadow, "a shadow limit is asked about each request: `prefetch` does not go with it"),
        (lease, !single, "single units are taken ahead: `prefetch` goes with a `cost` of 1 only"),
        (
            cost.filter(|_| post_paid),
            matches!(rule, Rule::SlidingLog(_)),
            "a sliding log remembers single units: a cost in the response does not go with it",
        ),
    ];
    for (span, at_odds, message) in pairs {
        if let Some(span) = span.filter(|_| at_odds) {
            reader.issue(Issue::at(span, message));
        }
    }
}

fn tiers(
    limit: &config::Limit,
    compiled: &Limit,
    by: &By,
    hasher: &IdentityHasher,
    reader: &mut Reader<'_>,
) -> BTreeMap<Box<str>, Arc<Plan>> {
    let mut tiers = BTreeMap::new();
    for (tier, written) in &limit.tiers {
        reader.name(written.span(), tier);
        if !by.sources.contains(&Source::ApiKey) {
            let issue = Issue::at(written.span(), "`tiers` go with limits by api-key: consumers have a tier");
            reader.issue(issue.hint("add \"api-key\" to `by`"));
        }
        let plan =
            size(written.get_ref(), &compiled.standard.rule, compiled.standard.quota).and_then(|(quota, burst)| {
                let plan = compiled.resized(hasher, quota, burst);
                plan.map_err(|error| Issue::at(written.span(), error.to_string()).hint(hint(&error)))
            });
        match plan {
            Ok(plan) => {
                tiers.insert(tier.as_str().into(), Arc::new(plan));
            }
            Err(issue) => reader.issue(issue),
        }
    }
    tiers
}

fn routes_with<'c>(config: &'c Config, name: &str) -> impl Iterator<Item = &'c config::Route> {
    let routes = config.route.iter().map(|route| route.get_ref());
    routes.filter(move |route| route.limits.iter().any(|limit| limit.get_ref() == name))
}

/// The largest cost at which a limit is used.
fn dearest(config: &Config, name: &str, cost: Option<&Cost>) -> u64 {
    match cost {
        Some(Cost::Fixed(cost) | Cost::Request { most: cost, .. }) => *cost,
        Some(Cost::Response { .. }) => 1,
        None => {
            let costs = routes_with(config, name).filter_map(|route| route.cost.as_ref());
            costs.map(|cost| (*cost.get_ref()).max(1) as u64).max().unwrap_or(1)
        }
    }
}

/// For how long a request in flight holds its slot: what the slowest upstream of its routes may take, and some more.
fn lease(config: &Config, name: &str, upstreams: &[UpstreamSettings]) -> u64 {
    let used = routes_with(config, name).filter_map(|route| route.upstream.as_ref());
    let used = used.flat_map(|shares| named(shares.get_ref(), upstreams));
    let slowest = used.map(|index| upstreams[index].response_timeout).max().unwrap_or_default();
    (slowest + LEASE_SLACK).as_micros() as u64
}
