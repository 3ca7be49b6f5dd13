//! Compiles `[limit.NAME]`: identity, rule, cost and options.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderName, StatusCode};

use crate::config;
use crate::config::error::Issue;
use crate::config::gateway;
use crate::config::gateway::Config;
use crate::config::shorthand::{CostTable, LimitCost};
use crate::config::spanned::Spanned;
use crate::identity::auth::TierSource;
use crate::identity::spec::Descriptor;
use crate::identity::spec::{IdentitySpec, OnMissing};
use crate::limiter::algorithm::Rule;
use crate::limiter::algorithm::concurrency::Concurrency;
use crate::limiter::algorithm::fixed_window::{FixedWindow, WindowStart};
use crate::limiter::algorithm::sliding_buckets::SlidingBuckets;
use crate::limiter::algorithm::sliding_log::SlidingLog;
use crate::limiter::algorithm::sliding_window::SlidingWindow;
use crate::limiter::algorithm::token_bucket::TokenBucket;
use crate::limiter::gateway_count::GatewayCount;
use crate::limiter::key::IdentityHasher;
use crate::limiter::quota::{EXACT_INTEGER_LIMIT, Quota, QuotaError};
use crate::limiter::spec::{CONCURRENT_REQUESTS, LimitSpec, LimitVariant, LocalShare, OnStoreError, QueuePolicy};
use crate::limiter::usage::UsageDays;
use crate::payload::json::rpc::CountedMessages;
use crate::payload::wildcard::Wildcard;
use crate::snapshot::cost;
use crate::snapshot::cost::{Cost, CostContext, RefundOn, ToolCosts};
use crate::snapshot::identities;
use crate::snapshot::notify;
use crate::snapshot::remote_auth;
use crate::snapshot::route_action::upstream_indices;
use crate::snapshot::validator::Validator;
use crate::upstream::settings::UpstreamSettings;

/// A limit, with the identity and the cost of requests.
#[derive(Debug, Clone)]
pub struct CompiledLimit {
    /// The limit with its compiled rules.
    pub limit: Arc<LimitSpec>,
    /// Identity that the limit uses.
    pub identity_spec: IdentitySpec,
    /// Cost of a request. If `None`, the cost of the route applies.
    pub cost: Option<Cost>,
    /// What the limit charges.
    pub charge: ChargePolicy,
    /// Statuses for which the charge is refunded.
    pub refund_on: RefundOn,
    /// Status of the responses to requests that the limit denies.
    pub status: StatusCode,
}

/// `charge` of a limit
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChargePolicy {
    /// The cost of admitted requests.
    Admitted,
    /// Also the cost of requests that the limit itself denies.
    Always,
}

/// Compiled limits by name.
pub(super) type LimitsByName = BTreeMap<String, CompiledLimit>;

/// Time added to the response timeout of the slowest upstream. The sum is the TTL of a concurrency permit. Permits are
/// renewed while their request is in flight.
const PERMIT_TTL_SLACK: Duration = Duration::from_secs(5);

/// Maximum length of a quota unit.
const MAX_UNIT_LENGTH: usize = 32;

/// Common misspellings of units, each with the correct unit. Client SDKs expect the correct unit in header names, such
/// as `x-ratelimit-limit-tokens`.
const SINGULAR_UNITS: [(&str, &str); 2] = [("request", "requests"), ("token", "tokens")];

/// What all limits have in common.
#[derive(Clone, Copy)]
pub(super) struct LimitContext<'a> {
    pub(super) hasher: &'a IdentityHasher,
    /// The number of gateways among which local shares divide the limits.
    pub(super) gateways: &'a Arc<GatewayCount>,
}

/// Compile all limits.
pub(super) fn limits(
    config: &Config,
    context: LimitContext<'_>,
    costs: CostContext<'_>,
    trusted_proxies: usize,
    upstreams: &[UpstreamSettings],
    tier_source: &TierSource,
    reader: &mut Validator<'_>,
) -> BTreeMap<String, CompiledLimit> {
    let LimitContext { hasher, gateways } = context;
    let mut limits = BTreeMap::new();
    for (name, limit) in &config.limit {
        let span = limit.span();
        reader.check_name(span.clone(), name);
        let limit = limit.get_ref();
        let identity_spec = identities::identity_spec(limit, &span, reader);
        let asks_for_client_cert = |listener: &gateway::Listener| {
            listener.tls.as_ref().is_some_and(|tls| tls.get_ref().requests_client_certificates())
        };
        if identity_spec.descriptors.contains(&Descriptor::ClientCert)
            && !config.listener.iter().any(|one| asks_for_client_cert(one.get_ref()))
        {
            let message = "this limit counts by client certificate, but no listener requests client certificates: no \
                           request would have the identity";
            reader.push_missing_elsewhere(
                Issue::new(span.clone(), message)
                    .with_hint("set tls.client_ca = \"certs/clients-ca.pem\" on a [[listener]]"),
            );
        }
        let has_user_header =
            identity_spec.descriptors.iter().any(|descriptor| matches!(descriptor, Descriptor::User(_)));
        if identity_spec.on_missing == OnMissing::Reject && trusted_proxies == 0 && has_user_header {
            let message = "this limit counts by a header that only trusted proxies may set, but there are no trusted \
                           proxies: every request would be rejected";
            let hint = "set trusted_proxies = [\"10.0.0.0/8\"] in [client_ip], or by = \"header:NAME\" if clients \
                        may choose the value";
            reader.push_missing_elsewhere(Issue::new(span.clone(), message).with_hint(hint));
        }
        let cost = cost(limit, trusted_proxies, costs, reader);
        let refund_on = refund_on(limit, cost.as_ref(), reader);
        let status = reader.number(limit.status.as_ref(), 400..600, 429) as u16;
        // The conversion cannot fail, because the range of the number is checked.
        let status = StatusCode::from_u16(status).unwrap_or(StatusCode::TOO_MANY_REQUESTS);
        let wait = queue_policy(limit, reader);
        let announce = limit.announce.as_ref().is_none_or(|announce| *announce.get_ref());
        let unit = quota_unit(limit, reader);
        let prefetch = reader.number(limit.prefetch.as_ref(), 0..1 << 32, 0) as u64;
        let errors = [("local", OnStoreError::Local), ("allow", OnStoreError::Allow), ("deny", OnStoreError::Deny)];
        let policies = [("admitted", ChargePolicy::Admitted), ("always", ChargePolicy::Always)];
        let charge = reader.one_of(limit.charge.as_ref(), ChargePolicy::Admitted, &policies);
        let on_store_error = reader.one_of(limit.on_store_error.as_ref(), OnStoreError::Local, &errors);
        let Some((quota, rule)) = rule(limit, &span, permit_ttl(config, name, upstreams), reader) else { continue };
        check_conflicts(limit, cost.as_ref(), identity_spec.counted_messages(), &rule, reader);
        let usage = usage_days(limit, &rule, reader);
        let notify = notify::limit_notify(name, limit, &rule, config, reader);
        let share = LocalShare { gateways: gateways.clone(), max_cost: max_cost(config, name, cost.as_ref()) };
        let spec = LimitSpec::new(hasher, name, quota, rule, share);
        let unit = unit.unwrap_or(spec.unit);
        let shadow = limit.shadow;
        let mut compiled =
            LimitSpec { on_store_error, shadow, announce, unit, queue_policy: wait, prefetch, usage, notify, ..spec };
        if let (Err(error), Some(written)) = (compiled.validate_prefetch(&compiled.default_variant), &limit.prefetch) {
            reader.push_issue(Issue::new(written.span(), error.to_string()).with_hint(quota_hint(&error)));
            compiled.prefetch = 0;
        }
        compiled.tiers = tiers(limit, &compiled, &identity_spec, tier_source, hasher, reader);
        match (&cost, &limit.cost) {
            (Some(Cost::Fixed(cost)), Some(written)) => check_cost_fits(*cost, &compiled, written.span(), reader),
            (Some(Cost::Tools(tools)), Some(written)) => {
                check_cost_fits(tools.max(), &compiled, written.span(), reader)
            }
            _ => {}
        }
        limits.insert(
            name.clone(),
            CompiledLimit { limit: Arc::new(compiled), identity_spec, cost, charge, refund_on, status },
        );
    }
    limits
}

/// Report a constant cost that exceeds the capacity of the limit or of one of its variants.
pub(super) fn check_cost_fits(cost: u64, limit: &LimitSpec, span: Range<usize>, reader: &mut Validator<'_>) {
    for (tier, variant) in limit.variants() {
        let capacity = variant.rule.capacity();
        if cost > capacity {
            let tier = tier.map_or(String::new(), |tier| format!(" in the tier `{tier}`"));
            let name = &limit.name;
            let message = format!(
                "a request costs {cost}, but `{name}` never has more than {capacity}{tier}: all requests would be \
                 denied"
            );
            reader.push_issue(
                Issue::new(span.clone(), message).with_hint("set a smaller cost, or a larger burst or quota"),
            );
        }
    }
}

/// Return the headers that only trusted proxies may set, because limits use them as identity or cost.
pub(super) fn trusted_headers(limits: &BTreeMap<String, CompiledLimit>) -> Vec<HeaderName> {
    let mut names = Vec::new();
    for compiled in limits.values() {
        for descriptor in &compiled.identity_spec.descriptors {
            if let Descriptor::User(name) = descriptor {
                names.push(name.clone());
            }
        }
        if let Some(Cost::Request { header: field, .. }) = &compiled.cost {
            names.push(field.clone());
        }
    }
    names.sort_by(|one, other| one.as_str().cmp(other.as_str()));
    names.dedup();
    names
}

fn cost(
    limit: &config::tables::Limit,
    trusted_proxies: usize,
    costs: CostContext<'_>,
    reader: &mut Validator<'_>,
) -> Option<Cost> {
    let written = limit.cost.as_ref()?;
    let table = match written.get_ref() {
        LimitCost::Fixed(cost) => {
            if !(1..EXACT_INTEGER_LIMIT as i64).contains(cost) {
                let issue = Issue::new(written.span(), format!("a cost of {cost} is out of range"));
                reader.push_issue(
                    issue.with_hint("set a cost of 1 or more; a request that costs nothing needs no limit"),
                );
            }
            return Some(Cost::Fixed(*cost as u64));
        }
        LimitCost::Table(table) => table,
    };
    if table.llm.is_some() {
        let cost = cost::llm_cost(table, costs, reader);
        let others = [&table.request_header, &table.response_header].into_iter().flatten().map(|key| key.span());
        let others = others.chain(table.max.as_ref().map(|key| key.span()));
        if let Some(span) = others.chain(table.tools.values().next().map(|tool| tool.span())).next() {
            reader.push_issue(Issue::new(span, "this key cannot be combined with `llm`"));
        }
        if limit.unit.is_none() {
            let issue = Issue::new(written.span(), "`llm` requires `unit`, which names what the quota counts");
            reader.push_missing(
                issue.with_hint("set unit = \"tokens\", or unit = \"usd-micros\" with prices as `weights`"),
            );
        }
        if let Some(prices) = &table.prices
            && limit.unit.as_ref().is_some_and(|unit| unit.get_ref() != "usd-micros")
        {
            let issue = Issue::new(prices.span(), "`prices` requires unit = \"usd-micros\"");
            reader.push_issue(issue.with_hint("the prices of a list are in dollars per million tokens"));
        }
        return Some(Cost::Llm(Arc::new(cost)));
    }
    cost::check_without_llm(table, reader);
    if !table.tools.is_empty() {
        return Some(Cost::Tools(Arc::new(tool_costs(table, reader))));
    }
    if let Some(default) = &table.default {
        let issue = Issue::new(default.span(), "`default` requires `tools`");
        reader.push_missing(issue.with_hint("cost = { tools = { search = 5 }, default = 1 }"));
    }
    // Temporary value, which `Cost::with_default` replaces with the cost of the route.
    let default = 1;
    match (&table.request_header, &table.response_header, &table.max) {
        (Some(text), None, Some(max)) => {
            let max = reader.number(Some(max), 1..EXACT_INTEGER_LIMIT as i64, 1) as u64;
            if trusted_proxies == 0 {
                let message = "`request_header` requires trusted proxies, but there are none";
                let hint =
                    "set trusted_proxies = [\"10.0.0.0/8\"] in [client_ip]: other clients could choose their own cost";
                reader.push_missing_elsewhere(Issue::new(text.span(), message).with_hint(hint));
            }
            let header = reader.header_name(text.span(), text.get_ref())?;
            Some(Cost::Request { header, max, default })
        }
        (None, Some(text), None) => {
            let header = reader.header_name(text.span(), text.get_ref())?;
            Some(Cost::Response { header, default })
        }
        _ => {
            let issue = Issue::new(written.span(), "invalid cost");
            let hint = "write cost = 5, cost.request_header = \"x-cost\" with cost.max = 100, cost.response_header = \
                        \"x-tokens-used\", cost.llm = \"auto\", or cost.tools = { search = 5 }";
            reader.push_missing(issue.with_hint(hint));
            None
        }
    }
}

/// Compile `cost.tools` and `cost.default`.
fn tool_costs(table: &CostTable, reader: &mut Validator<'_>) -> ToolCosts {
    let others = [&table.request_header, &table.response_header].into_iter().flatten().map(|key| key.span());
    if let Some(span) = others.chain(table.max.as_ref().map(|key| key.span())).next() {
        reader.push_issue(Issue::new(span, "this key cannot be combined with `tools`"));
    }
    let mut cost = |written: Option<&Spanned<i64>>| reader.number(written, 0..EXACT_INTEGER_LIMIT as i64, 1) as u64;
    ToolCosts {
        tools: table.tools.iter().map(|(name, written)| (Wildcard::new(name), cost(Some(written)))).collect(),
        default: cost(table.default.as_ref()),
    }
}

fn refund_on(limit: &config::tables::Limit, cost: Option<&Cost>, reader: &mut Validator<'_>) -> RefundOn {
    let Some(written) = &limit.refund_on else {
        // By default, refund redirected and failed requests to LLM APIs. Providers do not bill them.
        let is_llm = cost.is_some_and(|cost| cost.llm().is_some());
        return if is_llm { RefundOn(vec![300..=599]) } else { RefundOn::default() };
    };
    let mut statuses = Vec::new();
    for text in written {
        match RefundOn::parse(text.get_ref()) {
            Some(range) => statuses.push(range),
            None => {
                let issue = Issue::new(text.span(), format!("`{}` is not a status", text.get_ref()));
                reader.push_issue(issue.with_hint("a status such as \"503\", or a class such as \"5xx\""));
            }
        }
    }
    RefundOn(statuses)
}

/// Return the quota unit. It is restricted to lowercase letters, digits and `-`, because it becomes part of header
/// names and of strings in structured fields (RFC 9651).
fn quota_unit(limit: &config::tables::Limit, reader: &mut Validator<'_>) -> Option<Box<str>> {
    let text = limit.unit.as_ref()?;
    let unit = text.get_ref().as_str();
    let is_valid = (1..=MAX_UNIT_LENGTH).contains(&unit.len())
        && unit.starts_with(|c: char| c.is_ascii_lowercase())
        && unit.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
    let is_time = matches!(
        unit.to_ascii_lowercase().trim_end_matches('s'),
        "s" | "sec" | "second" | "min" | "minute" | "hour" | "day" | "week" | "month" | "year"
    );
    let (message, hint) = if is_time {
        let hint = "write the unit of time in `quota`, such as quota = \"100/min\"; `unit` names what the quota counts";
        (format!("`{unit}` is a unit of time"), hint.to_owned())
    } else if !is_valid {
        let hint = "use 1 to 32 lowercase letters, digits or `-`, such as \"requests\" or \"tokens\", because units \
                    appear in headers";
        (format!("`{unit}` is not a valid unit"), hint.to_owned())
    } else if unit == CONCURRENT_REQUESTS {
        (format!("`{unit}` is the unit of concurrency limits"), "algorithm = \"concurrency\" without `unit`".to_owned())
    } else if let Some((singular, plural)) = SINGULAR_UNITS.into_iter().find(|(singular, _)| unit == *singular) {
        (format!("`{singular}` is not a valid unit"), format!("did you mean `{plural}`?"))
    } else {
        return Some(unit.into());
    };
    reader.push_issue(Issue::new(text.span(), message).with_hint(hint));
    None
}

fn queue_policy(limit: &config::tables::Limit, reader: &mut Validator<'_>) -> Option<QueuePolicy> {
    let max_queue = reader.number(limit.max_queue.as_ref(), 1..1 << 31, 1000) as usize;
    if limit.max_wait.is_none()
        && let Some(text) = &limit.max_queue
    {
        reader.push_missing(Issue::new(text.span(), "`max_queue` requires `max_wait`"));
    }
    let max = reader.duration(Some(limit.max_wait.as_ref()?), Duration::ZERO);
    Some(QueuePolicy { max_wait: max, max_queue })
}

fn counts_usage(limit: &config::tables::Limit) -> bool {
    limit.usage.as_ref().is_some_and(|usage| *usage.get_ref())
}

/// Compile `usage`: the calendar days for which the total cost is stored.
fn usage_days(limit: &config::tables::Limit, rule: &Rule, reader: &mut Validator<'_>) -> Option<Arc<UsageDays>> {
    let usage = limit.usage.as_ref().filter(|_| counts_usage(limit))?;
    if rule.is_concurrency() {
        let message = "concurrency permits have no cost: `usage` cannot be combined with concurrency";
        reader.push_issue(Issue::new(usage.span(), message));
        return None;
    }
    match UsageDays::new(limit.time_zone.as_ref().map_or("UTC", |zone| zone.get_ref())) {
        Ok(days) => Some(Arc::new(days)),
        Err(error) => {
            let span = limit.time_zone.as_ref().map_or(usage.span(), |zone| zone.span());
            reader.push_issue(Issue::new(span, error.to_string()).with_hint(quota_hint(&error)));
            None
        }
    }
}

/// Report keys that cannot be combined.
fn check_conflicts(
    limit: &config::tables::Limit,
    cost: Option<&Cost>,
    counted: Option<CountedMessages>,
    rule: &Rule,
    reader: &mut Validator<'_>,
) {
    let concurrency = rule.is_concurrency();
    let is_deferred = cost.is_some_and(Cost::is_deferred);
    let is_llm = cost.is_some_and(|cost| cost.llm().is_some());
    let is_single = cost.is_none_or(|cost| *cost == Cost::Fixed(1));
    let cost = limit.cost.as_ref().map(|cost| cost.span());
    let wait = limit.max_wait.as_ref().map(|wait| wait.span());
    let refund = limit.refund_on.iter().flatten().next().map(|status| status.span());
    let unit = limit.unit.as_ref().map(|unit| unit.span());
    let always = limit.charge.as_ref().filter(|charge| charge.get_ref() == "always").map(|charge| charge.span());
    let prefetch = limit.prefetch.as_ref().filter(|prefetch| *prefetch.get_ref() > 0).map(|prefetch| prefetch.span());
    let pairs = [
        (
            unit,
            concurrency,
            "the unit of a concurrency limit is always `concurrent-requests`: `unit` cannot be combined with concurrency",
        ),
        (
            cost.clone(),
            concurrency,
            "a request in flight always counts as 1: `cost` cannot be combined with concurrency",
        ),
        (
            refund,
            concurrency,
            "a permit is released when its request ends: `refund_on` cannot be combined with concurrency",
        ),
        (
            wait.clone(),
            concurrency,
            "the time of the next free permit is unknown: `max_wait` cannot be combined with concurrency",
        ),
        (wait, limit.shadow, "a shadow limit queues no requests: `max_wait` cannot be combined with `shadow`"),
        (
            prefetch.clone(),
            concurrency,
            "a permit belongs to one request in flight: `prefetch` cannot be combined with concurrency",
        ),
        (
            prefetch.clone(),
            limit.shadow,
            "a shadow limit checks each request in the store: `prefetch` cannot be combined with `shadow`",
        ),
        (prefetch.clone(), !is_single, "`prefetch` requires a `cost` of 1"),
        (
            prefetch,
            counted.is_some(),
            "a JSON-RPC batch costs the number of its messages: `prefetch` cannot be combined with `mcp:` and `jsonrpc:`",
        ),
        (
            always,
            rule.stores_each_token() || concurrency,
            "the debt of this algorithm would have no bound: `charge` cannot be combined with sliding-log and concurrency",
        ),
        (
            cost.clone().filter(|_| is_llm),
            rule.stores_each_token(),
            "a sliding log stores each token: `llm` cannot be combined with sliding-log",
        ),
        (
            cost.filter(|_| is_deferred),
            rule.stores_each_token(),
            "a sliding log stores each unit of cost: `response_header` cannot be combined with sliding-log",
        ),
    ];
    for (span, conflicts, message) in pairs {
        if let Some(span) = span.filter(|_| conflicts) {
            reader.push_issue(Issue::new(span, message));
        }
    }
}

fn tiers(
    limit: &config::tables::Limit,
    compiled: &LimitSpec,
    identity_spec: &IdentitySpec,
    tier_source: &TierSource,
    hasher: &IdentityHasher,
    reader: &mut Validator<'_>,
) -> BTreeMap<Box<str>, Arc<LimitVariant>> {
    let mut tiers = BTreeMap::new();
    for (tier, written) in &limit.tiers {
        reader.check_name(written.span(), tier);
        if let Err(descriptor) = remote_auth::check_tier_identity(tier_source, &identity_spec.descriptors)
            && !identities::has_faulty_source(limit, &identity_spec.descriptors)
        {
            let issue = Issue::new(written.span(), format!("`tiers` require `{descriptor}` in `by`"));
            let hint = match tier_source {
                TierSource::ApiKey => format!("add \"{descriptor}\" to `by`, or choose another source: [tiers] from"),
                _ => format!("add \"{descriptor}\" to `by`: the tier comes from the same source ([tiers] from)"),
            };
            reader.push_missing(issue.with_hint(hint));
        }
        let variant = limit_variant(written.get_ref(), &compiled.default_variant.rule, compiled.default_variant.quota)
            .and_then(|(quota, burst)| {
                let variant = compiled.variant(hasher, quota, burst);
                variant.map_err(|error| Issue::new(written.span(), error.to_string()).with_hint(quota_hint(&error)))
            });
        match variant {
            Ok(plan) => {
                tiers.insert(tier.as_str().into(), Arc::new(plan));
            }
            Err(issue) => reader.push_issue(issue),
        }
    }
    tiers
}

fn routes_using<'c>(config: &'c Config, name: &str) -> impl Iterator<Item = &'c config::tables::Route> {
    let routes = config.route.iter().map(|route| route.get_ref());
    routes.filter(move |route| route.limits.iter().any(|limit| limit.get_ref() == name))
}

/// Return the maximum cost of a request for the limit. Return 1 for costs from response headers or LLM tokens, because
/// the configuration does not determine their maximum.
fn max_cost(config: &Config, name: &str, cost: Option<&Cost>) -> u64 {
    match cost {
        Some(Cost::Fixed(cost) | Cost::Request { max: cost, .. }) => *cost,
        Some(Cost::Tools(tools)) => tools.max().max(1),
        Some(Cost::Response { .. } | Cost::Llm(_)) => 1,
        None => {
            let costs = routes_using(config, name).filter_map(|route| route.cost.as_ref());
            costs.map(|cost| (*cost.get_ref()).max(1) as u64).max().unwrap_or(1)
        }
    }
}

/// Return the TTL of a concurrency permit in µs: the response timeout of the slowest upstream, plus a margin. Consider
/// the upstreams of all routes that use the limit.
fn permit_ttl(config: &Config, name: &str, upstreams: &[UpstreamSettings]) -> u64 {
    let used = routes_using(config, name).filter_map(|route| route.upstream.as_ref());
    let used = used.flat_map(|shares| upstream_indices(shares.get_ref(), upstreams));
    let slowest = used.map(|index| upstreams[index].response_timeout).max().unwrap_or_default();
    (slowest + PERMIT_TTL_SLACK).as_micros() as u64
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Algorithm {
    TokenBucket,
    FixedWindow,
    SlidingWindow,
    SlidingBuckets,
    SlidingLog,
    Concurrency,
}

const ALGORITHMS: [(&str, Algorithm); 8] = [
    ("token-bucket", Algorithm::TokenBucket),
    ("gcra", Algorithm::TokenBucket),
    ("leaky-bucket", Algorithm::TokenBucket),
    ("fixed-window", Algorithm::FixedWindow),
    ("sliding-log", Algorithm::SlidingLog),
    ("sliding-window", Algorithm::SlidingWindow),
    ("sliding-buckets", Algorithm::SlidingBuckets),
    ("concurrency", Algorithm::Concurrency),
];

/// Compile the default quota and the rule of a limit. `permit_ttl` is the TTL of a concurrency permit in µs.
pub(super) fn rule(
    limit: &config::tables::Limit,
    span: &Range<usize>,
    permit_ttl: u64,
    reader: &mut Validator<'_>,
) -> Option<(Quota, Rule)> {
    let algorithm = reader.one_of(limit.algorithm.as_ref(), Algorithm::TokenBucket, &ALGORITHMS);
    // If `usage` is set, accept `time_zone` for any algorithm, because it defines the days of the usage totals.
    let time_zone = limit.time_zone.as_ref().filter(|_| !counts_usage(limit));
    for (key, span, owner) in [
        ("burst", limit.burst.as_ref().map(|burst| burst.span()), Algorithm::TokenBucket),
        ("start", limit.start.as_ref().map(|start| start.span()), Algorithm::FixedWindow),
        ("time_zone", time_zone.map(|zone| zone.span()), Algorithm::FixedWindow),
        ("buckets", limit.buckets.as_ref().map(|buckets| buckets.span()), Algorithm::SlidingBuckets),
    ] {
        if let Some(span) = span.filter(|_| algorithm != owner) {
            let owner = ALGORITHMS.iter().find(|(_, algorithm)| *algorithm == owner).map_or("", |(name, _)| name);
            reader.push_missing(Issue::new(span, format!("`{key}` is valid only for {owner}")));
        }
    }
    let example = if algorithm == Algorithm::Concurrency { "\"20\"" } else { "\"600/min\"" };
    let text = reader.required(limit.quota.as_ref(), span, "quota", example)?;
    if algorithm == Algorithm::Concurrency {
        let quota = Quota::parse_concurrency(text.get_ref());
        return match quota {
            Ok(quota) => Some((quota, Rule::Concurrency(Concurrency { limit: quota.count, ttl: permit_ttl }))),
            Err(error) => {
                reader.push_issue(Issue::new(text.span(), error.to_string()).with_hint(PERMITS_HINT));
                None
            }
        };
    }
    let rule =
        text.get_ref().parse::<Quota>().and_then(|quota| Ok((quota, timed_rule(algorithm, quota, limit, reader)?)));
    let issue = |error: QuotaError| {
        Issue::new(text.span(), error.to_string()).with_hint(timed_quota_hint(text.get_ref(), &error))
    };
    rule.map_err(|error| reader.push_missing(issue(error))).ok()
}

fn timed_rule(
    algorithm: Algorithm,
    quota: Quota,
    limit: &config::tables::Limit,
    reader: &mut Validator<'_>,
) -> Result<Rule, QuotaError> {
    Ok(match algorithm {
        Algorithm::TokenBucket => {
            let burst = reader.number(limit.burst.as_ref(), 1..EXACT_INTEGER_LIMIT as i64, quota.count as i64) as u64;
            Rule::TokenBucket(TokenBucket::new(quota, burst)?)
        }
        Algorithm::FixedWindow => {
            let first_request =
                reader.one_of(limit.start.as_ref(), false, &[("aligned", false), ("first-request", true)]);
            let start = match quota.calendar {
                _ if first_request => WindowStart::FirstRequest,
                Some(unit) => {
                    WindowStart::calendar(unit, limit.time_zone.as_ref().map_or("UTC", |zone| zone.get_ref()))?
                }
                None => WindowStart::Aligned { phase: 0 },
            };
            let time_zone = limit.time_zone.as_ref().filter(|_| !counts_usage(limit));
            if let (Some(zone), WindowStart::Aligned { .. } | WindowStart::FirstRequest) = (time_zone, &start) {
                let issue = Issue::new(zone.span(), "`time_zone` is valid only for calendar windows and for `usage`");
                reader.push_missing(
                    issue.with_hint("set an aligned quota per day, week, month or year, or set usage = true"),
                );
            }
            Rule::FixedWindow(FixedWindow::new(quota, start)?)
        }
        Algorithm::SlidingWindow => Rule::SlidingWindow(SlidingWindow::new(quota)?),
        Algorithm::SlidingBuckets => {
            let buckets = reader.number(limit.buckets.as_ref(), 1..1001, 10) as u64;
            Rule::SlidingBuckets(SlidingBuckets::new(quota, buckets)?)
        }
        Algorithm::SlidingLog | Algorithm::Concurrency => Rule::SlidingLog(SlidingLog::new(quota)?),
    })
}

/// Return the quota and burst of a variant. If neither is set, the values of the limit apply. If only the quota is set,
/// its count is the burst.
pub(super) fn limit_variant(
    written: &config::tables::LimitVariant,
    rule: &Rule,
    standard: Quota,
) -> Result<(Quota, Option<u64>), Issue> {
    let quota = match &written.quota {
        Some(text) => rule.parse_quota(text.get_ref()).map_err(|error| {
            let hint = invalid_quota_hint(rule, text.get_ref(), &error);
            Issue::new(text.span(), error.to_string()).with_hint(hint)
        })?,
        None => standard,
    };
    let Some(burst) = &written.burst else {
        return Ok((quota, rule.burst().filter(|_| written.quota.is_none())));
    };
    if rule.burst().is_none() {
        return Err(Issue::new(burst.span(), "`burst` is valid only for token-bucket"));
    }
    match u64::try_from(*burst.get_ref()).ok().filter(|burst| (1..EXACT_INTEGER_LIMIT).contains(burst)) {
        Some(burst) => Ok((quota, Some(burst))),
        None => Err(Issue::new(burst.span(), format!("{} is out of range", burst.get_ref())).with_hint("1 or more")),
    }
}

/// Hint for an invalid quota of a concurrency limit.
const PERMITS_HINT: &str = "write the number of concurrent requests, such as \"20\"";

/// Return a hint for an invalid quota of a limit with this algorithm. It shows the quota that the operator probably
/// meant.
pub(crate) fn invalid_quota_hint(rule: &Rule, text: &str, error: &QuotaError) -> String {
    match error {
        QuotaError::Syntax(_) | QuotaError::Count(_) | QuotaError::Unit(_) | QuotaError::Zero(_)
            if rule.is_concurrency() =>
        {
            PERMITS_HINT.to_owned()
        }
        error => timed_quota_hint(text, error),
    }
}

/// Return a hint for an invalid quota of a limit that is not a concurrency limit.
fn timed_quota_hint(text: &str, error: &QuotaError) -> String {
    let is_syntax = matches!(error, QuotaError::Syntax(_) | QuotaError::Count(_) | QuotaError::Unit(_));
    match Quota::suggestion(text).filter(|_| is_syntax) {
        Some(quota) => format!("did you mean \"{quota}\"?"),
        None if text.parse::<u64>().is_ok() && is_syntax => format!("a unit of time is missing: \"{text}/min\""),
        None => quota_hint(error).to_owned(),
    }
}

/// Return a hint for an invalid quota.
pub(super) fn quota_hint(error: &QuotaError) -> &'static str {
    match error {
        QuotaError::Inexact { .. } => "use a smaller quota, a shorter window, or a round count (1000000, not 1000003)",
        QuotaError::LongLog { .. } => "use algorithm = \"token-bucket\", which needs only a few bytes for any quota",
        QuotaError::TimeZone(_) => "use the name of a time zone in the IANA database, such as \"Europe/Berlin\"",
        QuotaError::Buckets { .. } => "use another number of `buckets`: 10 divides most windows",
        QuotaError::NoFixedWindow => "use algorithm = \"fixed-window\", or a quota per \"30d\"",
        QuotaError::Prefetch { .. } => "set a smaller `prefetch`: a tenth of the quota or of the burst is enough",
        QuotaError::Weight { .. } => {
            "use a smaller quota: all sliding logs of a route together have at most about 30000 entries"
        }
        QuotaError::Zero("burst") => "use a burst of 1 or more",
        _ => {
            "write COUNT/UNIT, where UNIT is s, min, hour, day, week, month, year or a duration: \"600/min\", \"5/15m\""
        }
    }
}
