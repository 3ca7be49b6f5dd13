//! `/api/identities` and `/api/reset`: where an identity stands, and that it starts afresh.

use futures_util::future::try_join_all;
use http::StatusCode;
use serde::{Deserialize, Serialize};

use super::Desk;
use super::overrides::Shown;
use super::{Answer, Query, Result, json, of_store, seconds};
use crate::admin::problem::ApiError;
use crate::identity::Descriptor;
use crate::identity::api_key::{Caller, Consumers};
use crate::identity::name::{IdentityInput, IdentityInputError, ResolvedIdentity};
use crate::limit::algorithm::{Outcome, Rule, Status};
use crate::limit::key::{Identity, StateName};
use crate::limit::plan::LimitVariant;
use crate::limit::quota::EXACT_INTEGER_LIMIT;
use crate::runtime::CompiledLimit;

/// An identity in a request: its hash, or values by the words of `by`.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Given {
    /// As keys, `/api/top` and the rest of the API have it.
    Hash(String),
    /// As the operator knows it.
    Parts(IdentityInput),
}

impl Given {
    /// What is left of a query: `identity=HASH`, or parts.
    pub(super) fn of(mut query: Query) -> Result<Self> {
        if let Some(hash) = query.take("identity") {
            return match query.0.first() {
                Some((name, _)) => Err(ApiError::bad(format!("`{name}` does not go with `identity`"))),
                None => Ok(Given::Hash(hash)),
            };
        }
        Ok(Given::Parts(query.0.into_iter().collect()))
    }

    /// Which identity of a limit it is.
    pub(super) fn meant<'a>(
        &self,
        terms: &CompiledLimit,
        desk: &Desk<'_>,
        consumers: &'a Consumers,
    ) -> Result<ResolvedIdentity<'a>> {
        let runtime = &desk.runtime;
        let said = match self {
            Given::Hash(hash) => {
                let identity = Identity::from_hex(hash).ok_or_else(|| {
                    ApiError::bad("`identity` is 32 hexadecimal digits as `/api/top` shows them, or an object with a value for each part")
                })?;
                let caller = owner(identity, terms, desk, consumers);
                return Ok(ResolvedIdentity { identity, caller, is_exempt: false });
            }
            Given::Parts(said) => said,
        };
        let by = || terms.identity_spec.descriptors.iter().map(Descriptor::label).collect::<Vec<_>>().join(" ");
        if let Some(word) = said.keys().find(|word| !terms.identity_spec.has_label(word)) {
            return Err(ApiError::bad(format!("`{}` is by {}, not by `{word}`", terms.limit.name, by())));
        }
        let meant = terms.identity_spec.resolve(said, &runtime.client_ip, consumers, &runtime.hasher);
        meant.map_err(|unclear| match unclear {
            IdentityInputError::Missing(_) => {
                ApiError::bad(format!("{unclear}: `{}` is by {}", terms.limit.name, by()))
            }
            IdentityInputError::UnknownConsumer => ApiError::new(StatusCode::NOT_FOUND, unclear.to_string()),
            IdentityInputError::InvalidAddress(_) => ApiError::bad(unclear.to_string()),
        })
    }
}

/// Whose hash it is, as far as it can be told: that of a consumer, where it is by nothing else.
fn owner<'a>(identity: Identity, terms: &CompiledLimit, desk: &Desk<'_>, consumers: &'a Consumers) -> Caller<'a> {
    if terms.identity_spec.descriptors != [Descriptor::ApiKey] {
        return Caller::Missing;
    }
    let runtime = &desk.runtime;
    let is_his = |name: &str| {
        let said = IdentityInput::from([(Descriptor::ApiKey.label().into_owned(), name.to_owned())]);
        let meant = terms.identity_spec.resolve(&said, &runtime.client_ip, consumers, &runtime.hasher);
        meant.is_ok_and(|meant| meant.identity == identity)
    };
    consumers.iter().find(|consumer| is_his(&consumer.name)).map_or(Caller::Missing, Caller::Consumer)
}

/// The limit of this name.
pub(super) fn limit<'a>(desk: &'a Desk<'_>, name: &str) -> Result<&'a CompiledLimit> {
    desk.runtime.limits.get(name).ok_or_else(|| ApiError::new(StatusCode::NOT_FOUND, "there is no such limit"))
}

#[derive(Serialize)]
struct Standings<'a> {
    limits: Vec<Standing<'a>>,
}

#[derive(Serialize)]
struct Standing<'a> {
    limit: &'a str,
    shadow: bool,
    identity: String,
    consumer: Option<String>,
    algorithm: &'static str,
    quota: String,
    capacity: u64,
    cost: u64,
    decision: &'static str,
    remaining: u64,
    reset_seconds: f64,
    retry_seconds: Option<f64>,
    #[serde(rename = "override")]
    size: Option<Shown>,
}

pub(super) async fn standings(desk: &Desk<'_>, mut query: Query) -> Result<Answer> {
    let cost = query.number("cost", 1..=EXACT_INTEGER_LIMIT - 1, 1)?;
    let (only, limits) = (query.take("limit"), &desk.runtime.limits);
    let given = Given::of(query)?;
    let consumers = desk.runtime.consumers.load();
    // Of one limit all has to be right; of all limits those are meant that the parts are enough for.
    let asked: Vec<_> = match (&only, &given) {
        (Some(name), _) => {
            let terms = limit(desk, name)?;
            vec![(terms, given.meant(terms, desk, &consumers)?)]
        }
        (None, Given::Hash(_)) => return Err(ApiError::bad("a hash is that of one limit: `limit` is missing")),
        (None, Given::Parts(said)) => {
            let strange = said.keys().find(|word| !limits.values().any(|terms| terms.identity_spec.has_label(word)));
            if let Some(word) = strange {
                return Err(ApiError::bad(format!("no limit is by `{word}`")));
            }
            let mut asked = Vec::new();
            for terms in limits.values() {
                match terms.identity_spec.resolve(said, &desk.runtime.client_ip, &consumers, &desk.runtime.hasher) {
                    Ok(meant) => asked.push((terms, meant)),
                    Err(IdentityInputError::Missing(_)) => {}
                    Err(unclear) => return Err(ApiError::bad(unclear.to_string())),
                }
            }
            asked
        }
    };
    if asked.is_empty() {
        return Err(ApiError::bad("these parts are the identity of no limit"));
    }
    let standings = asked.iter().map(|(terms, meant)| standing(desk, terms, meant, cost));
    Ok(json(&Standings { limits: try_join_all(standings).await? }))
}

async fn standing<'a>(
    desk: &'a Desk<'_>,
    terms: &'a CompiledLimit,
    meant: &ResolvedIdentity<'_>,
    cost: u64,
) -> Result<Standing<'a>> {
    let (limit, table) = (&*terms.limit, desk.operator.overrides.current());
    let other = table.as_ref().and_then(|table| table.find(limit, meant.identity));
    let plan = other.map_or_else(|| meant.caller.variant(limit), |other| &other.variant);
    let verdict = desk.operator.peek(plan, meant.identity, cost).await.map_err(|error| of_store(&error))?;
    let none = Outcome { status: Status::CostTooLarge, remaining: 0, reset_us: 0, retry_us: 0 };
    let Outcome { status, remaining, reset_us, retry_us } = verdict.outcomes.first().copied().unwrap_or(none);
    let (decision, retry_seconds) = match status {
        _ if meant.is_exempt => ("exempt", None),
        Status::Ok => ("allowed", None),
        Status::Exceeded | Status::Saturated => ("denied", Some(seconds(retry_us))),
        Status::CostTooLarge => ("cost_too_large", None),
    };
    Ok(Standing {
        limit: &limit.name,
        shadow: limit.shadow,
        identity: meant.identity.to_string(),
        consumer: match meant.caller {
            Caller::Consumer(consumer) => Some(consumer.name.to_string()),
            Caller::Accepted(_) | Caller::Anonymous | Caller::Missing => None,
        },
        algorithm: algorithm(&plan.rule),
        quota: plan.quota.to_string(),
        capacity: plan.rule.capacity(),
        cost,
        decision,
        remaining,
        reset_seconds: seconds(reset_us),
        retry_seconds,
        size: other.map(Shown::of),
    })
}

fn algorithm(rule: &Rule) -> &'static str {
    match rule {
        Rule::TokenBucket(_) => "token-bucket",
        Rule::FixedWindow(_) => "fixed-window",
        Rule::SlidingWindow(_) => "sliding-window",
        Rule::SlidingBuckets(_) => "sliding-buckets",
        Rule::SlidingLog(_) => "sliding-log",
        Rule::Concurrency(_) => "concurrency",
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ToReset {
    limit: String,
    identity: Given,
}

#[derive(Serialize)]
struct WasReset<'a> {
    limit: &'a str,
    identity: String,
    removed: bool,
    effective_within_seconds: u64,
}

pub(super) async fn reset(desk: &Desk<'_>, asked: ToReset) -> Result<Answer> {
    let terms = limit(desk, &asked.limit)?;
    let consumers = desk.runtime.consumers.load();
    let identity = asked.identity.meant(terms, desk, &consumers)?.identity;
    // In whichever size it was counted: those of another shape have states of their own.
    let table = desk.operator.overrides.current();
    let other = table.as_ref().and_then(|table| table.find(&terms.limit, identity)).map(|other| &*other.variant);
    let own = consumers.iter().filter_map(|consumer| consumer.variants.get(&terms.limit.name));
    let plans = terms.limit.variants().map(|(_, plan)| plan).chain(own.map(|plan| &**plan)).chain(other);
    let mut buckets: Vec<&StateName> = Vec::new();
    for LimitVariant { state_name: bucket, .. } in plans {
        if !buckets.contains(&bucket) {
            buckets.push(bucket);
        }
    }
    let reset = desk.operator.reset(&terms.limit, identity, &buckets).await.map_err(|error| of_store(&error))?;
    Ok(json(&WasReset {
        limit: &terms.limit.name,
        identity: identity.to_string(),
        removed: reset.was_counted,
        effective_within_seconds: reset.effective_within.as_secs(),
    }))
}
