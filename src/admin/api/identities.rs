//! `/api/identities`, `/api/reset` and `/api/overrides`: usage and temporary quotas of single identities.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;
use http::StatusCode;
use serde::{Deserialize, Serialize};

use crate::admin::request::{ApiContext, MAX_LISTED_LIMITS, QueryParams, unknown_limit};
use crate::admin::response::{AdminResponse, ApiError, Result, json_response, seconds_rounded_up, store_error};
use crate::identity::consumer::{Caller, ConsumerDirectory};
use crate::identity::display::{IdentityInput, IdentityInputError, ResolvedIdentity};
use crate::identity::spec::Descriptor;
use crate::limiter::admin::AdminError;
use crate::limiter::algorithm::{Outcome, Status};
use crate::limiter::key::{Identity, StateName};
use crate::limiter::overrides::{MAX_OVERRIDES, Override, OverrideQuota};
use crate::limiter::quota::{EXACT_INTEGER_LIMIT, parse_duration_us};
use crate::limiter::spec::{LimitSpec, LimitVariant};
use crate::snapshot::CompiledConfig;
use crate::snapshot::descriptors::{DOMAIN_LABEL, FileState};
use crate::snapshot::limits::CompiledLimit;
use crate::snapshot::limits::invalid_quota_hint;

/// The identity in a request to the API: a hash, or the values of its parts.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum IdentityQuery {
    /// 32 hexadecimal digits, as in `/api/top`, in Redis keys and in the access log.
    Hash(String),
    /// A value for each part of the limit's `by`, such as `{"api-key": "acme"}`.
    Parts(IdentityInput),
}

impl IdentityQuery {
    /// Parse the remaining query parameters: `identity=HASH`, or one parameter for each part of the identity.
    ///
    /// # Errors
    /// The parameter `identity` is combined with parameters for the parts of an identity.
    pub(super) fn from_query(mut query: QueryParams) -> Result<Self> {
        if let Some(hash) = query.take("identity") {
            return match query.0.first() {
                Some((name, _)) => Err(ApiError::bad_request(format!("`{name}` cannot be combined with `identity`"))),
                None => Ok(IdentityQuery::Hash(hash)),
            };
        }
        Ok(IdentityQuery::Parts(query.0.into_iter().collect()))
    }

    /// Compute the identity hash for the limit `compiled`.
    ///
    /// # Errors
    /// The hash is malformed, a part is missing, unknown or invalid, or the consumer does not exist.
    pub(super) fn resolve(
        &self,
        compiled: &CompiledLimit,
        context: &ApiContext<'_>,
        consumers: &ConsumerDirectory,
    ) -> Result<ResolvedIdentity> {
        let config = &context.config;
        let input = match self {
            IdentityQuery::Hash(hash) => {
                let identity = Identity::from_hex(hash).ok_or_else(|| {
                    ApiError::bad_request(
                        "`identity` must be a hash of 32 hexadecimal digits, as in `/api/top`, or an object with a \
                         value for each source in `by`",
                    )
                })?;
                let caller = consumer_of_hash(identity, compiled, context, consumers);
                return Ok(ResolvedIdentity { identity, caller, is_exempt: false });
            }
            IdentityQuery::Parts(parts) => parts,
        };
        let labels = || labels(compiled);
        if let Some(label) = input.keys().find(|label| !compiled.identity_spec.has_label(label)) {
            return Err(ApiError::bad_request(format!(
                "limit `{}` counts by {}, not by `{label}`",
                compiled.limit.name,
                labels()
            )));
        }
        let resolved = compiled.identity_spec.resolve(input, &config.client_ip, consumers, &config.hasher);
        resolved.map_err(|error| match error {
            IdentityInputError::Missing(_) => {
                ApiError::bad_request(format!("{error}: limit `{}` counts by {}", compiled.limit.name, labels()))
            }
            IdentityInputError::UnknownConsumer => ApiError::new(StatusCode::NOT_FOUND, error.to_string()),
            IdentityInputError::InvalidAddress(_) => ApiError::bad_request(error.to_string()),
        })
    }
}

/// Return the labels of the parts that a limit counts by.
fn labels(compiled: &CompiledLimit) -> String {
    compiled.identity_spec.descriptors.iter().map(Descriptor::label).collect::<Vec<_>>().join(" ")
}

/// Return a list of the limits with the parts that they count by, for error messages.
fn counted_by(config: &CompiledConfig) -> String {
    let limits = config.limits.iter().take(MAX_LISTED_LIMITS);
    let limits: Vec<_> =
        limits.map(|(name, compiled)| format!("limit `{name}` counts by {}", labels(compiled))).collect();
    match config.limits.len().saturating_sub(MAX_LISTED_LIMITS) {
        0 if limits.is_empty() => "the configuration has no limits".to_owned(),
        0 => limits.join("; "),
        more => format!("{}; and {more} more", limits.join("; ")),
    }
}

/// Find the consumer with this identity hash. A hash cannot be inverted, so this function compares it with the hash of
/// each consumer. The comparison is possible only for limits whose `by` is the API key alone.
fn consumer_of_hash(
    identity: Identity,
    compiled: &CompiledLimit,
    context: &ApiContext<'_>,
    consumers: &ConsumerDirectory,
) -> Caller {
    if compiled.identity_spec.descriptors != [Descriptor::ApiKey] {
        return Caller::Missing;
    }
    let config = &context.config;
    let has_identity = |name: &str| {
        let input = IdentityInput::from([(Descriptor::ApiKey.label().into_owned(), name.to_owned())]);
        let resolved = compiled.identity_spec.resolve(&input, &config.client_ip, consumers, &config.hasher);
        resolved.is_ok_and(|resolved| resolved.identity == identity)
    };
    let consumer = consumers.iter().find(|consumer| has_identity(&consumer.name)).cloned();
    consumer.map_or(Caller::Missing, Caller::Consumer)
}

/// The state of a limit to which a request refers.
struct Target<'a> {
    limit: &'a Arc<LimitSpec>,
    resolved: ResolvedIdentity,
}

impl<'a> Target<'a> {
    fn of_file(state: FileState<'a>) -> Self {
        let resolved = ResolvedIdentity { identity: state.identity, caller: Caller::Missing, is_exempt: false };
        Target { limit: state.limit, resolved }
    }
}

/// Find the state of the limit with this name: one of `[limit.NAME]`, or of YAML files.
///
/// # Errors
/// No limit has this name (404), or the identity does not match the limit.
fn find_target<'a>(
    context: &'a ApiContext<'_>,
    name: &str,
    query: &IdentityQuery,
    consumers: &ConsumerDirectory,
) -> Result<Target<'a>> {
    let config = context.config;
    if let Some(compiled) = config.limits.get(name) {
        return Ok(Target { limit: &compiled.limit, resolved: query.resolve(compiled, context, consumers)? });
    }
    if !config.descriptors.has_file_limit(name) {
        return Err(ApiError::new(StatusCode::NOT_FOUND, unknown_limit(config, name)));
    }
    let limit = config.descriptors.file_limit(name).ok_or_else(|| {
        let text = format!("limits with different units have the name `{name}`: give them different names");
        ApiError::new(StatusCode::CONFLICT, text)
    })?;
    match query {
        IdentityQuery::Hash(hash) => {
            let identity = Identity::from_hex(hash)
                .ok_or_else(|| ApiError::bad_request("`identity` must be a hash of 32 hexadecimal digits"))?;
            Ok(Target::of_file(FileState { limit, identity }))
        }
        IdentityQuery::Parts(input) => {
            let mut states = config.descriptors.file_states(Some(name), input, &config.hasher);
            let state = states.pop().ok_or_else(|| {
                let text = "no descriptor with limit `{}` matches: give a value for each of its entries, as entry:KEY";
                ApiError::bad_request(text.replace("{}", name))
            })?;
            if !states.is_empty() {
                let text = format!("several domains have the limit `{name}`: add `{DOMAIN_LABEL}`");
                return Err(ApiError::bad_request(text));
            }
            Ok(Target::of_file(state))
        }
    }
}

#[derive(Serialize)]
struct IdentityStatuses<'a> {
    limits: Vec<IdentityStatus<'a>>,
}

#[derive(Serialize)]
struct IdentityStatus<'a> {
    limit: &'a str,
    shadow: bool,
    identity: String,
    consumer: Option<String>,
    algorithm: &'static str,
    quota: String,
    /// Quota unit, such as `requests`.
    unit: &'a str,
    capacity: u64,
    cost: u64,
    decision: &'static str,
    remaining: u64,
    reset_seconds: f64,
    retry_seconds: Option<f64>,
    #[serde(rename = "override")]
    override_view: Option<OverrideView>,
}

pub(super) async fn identity_statuses(context: &ApiContext<'_>, mut query: QueryParams) -> Result<AdminResponse> {
    let cost = query.number("cost", 1..=EXACT_INTEGER_LIMIT - 1, 1)?;
    let limit_name = query.take("limit");
    let limits = &context.config.limits;
    let identity_query = IdentityQuery::from_query(query)?;
    let consumers = context.config.auth.consumers();
    // If the query has `limit`, the identity must match the `by` of that limit. Otherwise, select the limits for which
    // the query has a value for each part of `by`.
    let targets: Vec<_> = match (&limit_name, &identity_query) {
        (Some(name), _) => vec![find_target(context, name, &identity_query, &consumers)?],
        (None, IdentityQuery::Hash(_)) => {
            return Err(ApiError::bad_request(
                "`limit` is missing: the hash of an identity is valid only for one limit",
            ));
        }
        (None, IdentityQuery::Parts(input)) => {
            let descriptors = &context.config.descriptors;
            let has_label = |label: &str| {
                let specs = limits.values().map(|compiled| &compiled.identity_spec);
                let mut specs = specs.chain(descriptors.file_limits().map(|limit| &limit.identity_spec));
                label == DOMAIN_LABEL || specs.any(|spec| spec.has_label(label))
            };
            let unknown_label = input.keys().find(|label| !has_label(label));
            if let Some(label) = unknown_label {
                let known = counted_by(context.config);
                return Err(ApiError::bad_request(format!("no limit counts by `{label}`: {known}")));
            }
            let states = descriptors.file_states(None, input, &context.config.hasher);
            let mut targets: Vec<_> = states.into_iter().map(Target::of_file).collect();
            for compiled in limits.values().filter(|_| !input.contains_key(DOMAIN_LABEL)) {
                match compiled.identity_spec.resolve(
                    input,
                    &context.config.client_ip,
                    &consumers,
                    &context.config.hasher,
                ) {
                    Ok(resolved) => targets.push(Target { limit: &compiled.limit, resolved }),
                    Err(IdentityInputError::Missing(_)) => {}
                    Err(error) => return Err(ApiError::bad_request(error.to_string())),
                }
            }
            targets
        }
    };
    if targets.is_empty() {
        let known = counted_by(context.config);
        return Err(ApiError::bad_request(format!("no limit counts by exactly these parts: {known}")));
    }
    let statuses = targets.iter().map(|target| identity_status(context, target, cost));
    Ok(json_response(StatusCode::OK, &IdentityStatuses { limits: try_join_all(statuses).await? }))
}

async fn identity_status<'a>(
    context: &'a ApiContext<'_>,
    target: &Target<'a>,
    cost: u64,
) -> Result<IdentityStatus<'a>> {
    let Target { limit, resolved } = target;
    let limit: &'a LimitSpec = limit;
    let table = context.limiter_admin.overrides.current();
    let override_entry = table.as_ref().and_then(|table| table.find(limit, resolved.identity));
    let variant =
        override_entry.map_or_else(|| resolved.caller.variant(limit), |override_entry| &override_entry.variant);
    let verdict =
        context.limiter_admin.peek(variant, resolved.identity, cost).await.map_err(|error| store_error(&error))?;
    let none = Outcome { status: Status::CostTooLarge, remaining: 0, reset_us: 0, retry_us: 0 };
    let Outcome { status, remaining, reset_us, retry_us } = verdict.outcomes.first().copied().unwrap_or(none);
    let (decision, retry_seconds) = match status {
        _ if resolved.is_exempt => ("exempt", None),
        Status::Ok => ("allowed", None),
        Status::Exceeded | Status::Saturated => ("denied", Some(seconds_rounded_up(retry_us))),
        Status::CostTooLarge => ("cost_too_large", None),
    };
    Ok(IdentityStatus {
        limit: &limit.name,
        shadow: limit.shadow,
        identity: resolved.identity.to_string(),
        consumer: match &resolved.caller {
            Caller::Consumer(consumer) => Some(consumer.name.to_string()),
            Caller::Accepted(_) | Caller::Anonymous | Caller::Missing => None,
        },
        algorithm: variant.rule.algorithm_name(),
        quota: variant.quota.to_string(),
        unit: &limit.unit,
        capacity: variant.rule.capacity(),
        cost,
        decision,
        remaining,
        reset_seconds: seconds_rounded_up(reset_us),
        retry_seconds,
        override_view: override_entry.map(OverrideView::from_override),
    })
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ResetRequest {
    limit: String,
    identity: IdentityQuery,
}

#[derive(Serialize)]
struct ResetResponse<'a> {
    limit: &'a str,
    identity: String,
    removed: bool,
    effective_within_seconds: u64,
}

pub(super) async fn reset(context: &ApiContext<'_>, request: ResetRequest) -> Result<AdminResponse> {
    let consumers = context.config.auth.consumers();
    let Target { limit, resolved } = find_target(context, &request.limit, &request.identity, &consumers)?;
    let identity = resolved.identity;
    // Clear the counters of all variants of the limit (default, tiers, consumers, override), because variants with
    // different windows have separate counters.
    let table = context.limiter_admin.overrides.current();
    let override_variant =
        table.as_ref().and_then(|table| table.find(limit, identity)).map(|override_variant| &*override_variant.variant);
    let consumer_variants = consumers.iter().filter_map(|consumer| consumer.variants.get(&limit.name));
    let variants = limit
        .variants()
        .map(|(_, variant)| variant)
        .chain(consumer_variants.map(|variant| &**variant))
        .chain(override_variant);
    let mut state_names: Vec<&StateName> = Vec::new();
    for LimitVariant { state_name, .. } in variants {
        if !state_names.contains(&state_name) {
            state_names.push(state_name);
        }
    }
    let reset =
        context.limiter_admin.reset(limit, identity, &state_names).await.map_err(|error| store_error(&error))?;
    Ok(json_response(
        StatusCode::OK,
        &ResetResponse {
            limit: &limit.name,
            identity: identity.to_string(),
            removed: reset.was_counted,
            effective_within_seconds: reset.effective_within.as_secs(),
        },
    ))
}

// === `/api/overrides`: list, set and remove temporary quota overrides of single identities ===

/// Maximum `ttl`: 31 days. For a longer time, administrators should change the quota in the configuration.
const MAX_TTL: Duration = Duration::from_secs(31 * 86_400);
/// Minimum `ttl`: 5 s. Other gateways notice an override only after some seconds.
const MIN_TTL: Duration = Duration::from_secs(5);

/// Maximum length of `note`, in bytes.
const MAX_NOTE_BYTES: usize = 200;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PutOverride {
    limit: String,
    identity: IdentityQuery,
    quota: String,
    burst: Option<u64>,
    #[serde(rename = "ttl")]
    ttl: String,
    note: Option<String>,
}

/// An override in responses.
#[derive(Debug, Serialize)]
pub(super) struct OverrideView {
    limit: String,
    identity: String,
    #[serde(flatten)]
    quota: OverrideQuota,
    expires_in_seconds: u64,
}

impl OverrideView {
    pub(super) fn from_override(entry: &Override) -> Self {
        OverrideView {
            limit: entry.limit.name.to_string(),
            identity: entry.identity.to_string(),
            quota: entry.quota.clone(),
            expires_in_seconds: entry.ttl().as_millis().div_ceil(1000) as u64,
        }
    }
}

pub(super) async fn put_override(context: &ApiContext<'_>, request: PutOverride) -> Result<AdminResponse> {
    let PutOverride { limit: name, identity, quota, burst, ttl, note } = request;
    let consumers = context.config.auth.consumers();
    let Target { limit, resolved } = find_target(context, &name, &identity, &consumers)?;
    let identity = resolved.identity;
    if let Some(burst) = burst {
        if limit.default_variant.rule.burst().is_none() {
            return Err(ApiError::bad_request("`burst` is allowed for token-bucket limits only"));
        }
        if !(1..EXACT_INTEGER_LIMIT).contains(&burst) {
            return Err(ApiError::bad_request(format!("`burst` must be from 1 to {}", EXACT_INTEGER_LIMIT - 1)));
        }
    }
    if note.as_ref().is_some_and(|note| note.len() > MAX_NOTE_BYTES) {
        return Err(ApiError::bad_request(format!("`note` must not exceed {MAX_NOTE_BYTES} bytes")));
    }
    let ttl = parse_duration_us(&ttl).map(Duration::from_micros).filter(|ttl| (MIN_TTL..=MAX_TTL).contains(ttl));
    let ttl = ttl.ok_or_else(|| {
        ApiError::bad_request("`ttl` must be a duration from 5s to 31d, such as \"90s\", \"15m\", \"12h\" or \"7d\"")
    })?;
    let override_quota = OverrideQuota { quota: quota.clone(), burst, note };
    let entry =
        context.limiter_admin.put(limit, identity, override_quota, ttl).await.map_err(|error| match &error {
            AdminError::Quota(error) => {
                let hint = invalid_quota_hint(&limit.default_variant.rule, &quota, error);
                ApiError::bad_request(format!("{error}: {hint}"))
            }
            AdminError::Store(error) => store_error(error),
            AdminError::TooManyOverrides => ApiError::new(StatusCode::CONFLICT, error.to_string()),
        })?;
    Ok(json_response(StatusCode::OK, &serde_json::json!({ "override": OverrideView::from_override(&entry) })))
}

pub(super) async fn list_overrides(context: &ApiContext<'_>) -> Result<AdminResponse> {
    let (mut entries, error) = context.limiter_admin.overrides().await;
    entries.sort_by(|left, right| (&left.limit.name, left.identity.0).cmp(&(&right.limit.name, right.identity.0)));
    let views: Vec<_> = entries.iter().map(|entry| OverrideView::from_override(entry)).collect();
    let mut response = serde_json::json!({ "max_overrides": MAX_OVERRIDES, "overrides": views });
    if let Some(error) = error {
        response["store_error"] = error.to_string().into();
    }
    Ok(json_response(StatusCode::OK, &response))
}

pub(super) async fn remove_override(context: &ApiContext<'_>, mut query: QueryParams) -> Result<AdminResponse> {
    let name = query.take("limit").ok_or_else(|| ApiError::bad_request("`limit` is missing"))?;
    let consumers = context.config.auth.consumers();
    let target = find_target(context, &name, &IdentityQuery::from_query(query)?, &consumers)?;
    let identity = target.resolved.identity;
    let removed = context.limiter_admin.remove(target.limit, identity).await.map_err(|error| store_error(&error))?;
    let response = serde_json::json!({ "limit": name, "identity": identity.to_string(), "removed": removed });
    Ok(json_response(StatusCode::OK, &response))
}
