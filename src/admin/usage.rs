//! Usage report: the usage totals of limits, grouped by day, month, identity, LLM model or kind of token. For limits by the API key
//! alone, the report contains the names of consumers.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use jiff::civil::Date;
use jiff::{Timestamp, ToSpan};
use serde::{Deserialize, Serialize};

use crate::identity::consumer::ConsumerDirectory;
use crate::identity::display::{IdentityInput, IdentityInputError};
use crate::identity::spec::Descriptor;
use crate::limiter::key::Identity;
use crate::limiter::usage::{RETENTION_DAYS, UsageFields, UsageMonth, UsagePart, UsageQuery, UsageRow};
use crate::snapshot::CompiledConfig;
use crate::snapshot::limits::CompiledLimit;

/// The label, in text output, of cost whose LLM model is not recorded: the model is not known, or the month already has
/// totals of the maximum number of models.
pub const OTHER_MODELS: &str = "other";

/// How a usage report groups the cost of each limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GroupBy {
    /// One entry for each identity and day.
    Day,
    /// One entry for each identity and month.
    Month,
    /// One entry for each identity.
    Identity,
    /// One entry for each identity, day and LLM model.
    Model,
    /// One entry for each identity, day and kind of token.
    Kind,
}

impl GroupBy {
    /// The names of all values of this type.
    pub const NAMES: [&str; 5] = ["day", "month", "identity", "model", "kind"];

    /// Return the value with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        let index = GroupBy::NAMES.iter().position(|one| *one == name)?;
        [GroupBy::Day, GroupBy::Month, GroupBy::Identity, GroupBy::Model, GroupBy::Kind].get(index).copied()
    }

    /// Return the totals that the report needs beside those of days.
    fn parts(self) -> UsageFields {
        match self {
            GroupBy::Day | GroupBy::Month | GroupBy::Identity => UsageFields::Days,
            GroupBy::Model => UsageFields::Models,
            GroupBy::Kind => UsageFields::Kinds,
        }
    }
}

/// An identity as an administrator writes it.
#[derive(Debug, Clone)]
pub enum IdentityFilter {
    /// The hash of the identity.
    Hash(Identity),
    /// A value for each part of the limit's `by`.
    Parts(IdentityInput),
}

/// Selects the identities, limits and days of a report.
#[derive(Debug, Clone, Default)]
pub struct UsageFilter {
    /// Name of the limit to report. `None` selects all limits with `usage`.
    pub limit: Option<String>,
    /// The identity whose usage is reported. `None` reports all identities.
    pub identity: Option<IdentityFilter>,
    /// First day of the report. `None` starts the report on the first day of this month.
    pub from: Option<Date>,
    /// Last day of the report. `None` ends the report today.
    pub to: Option<Date>,
}

/// The reason why a usage filter is invalid or selects no totals.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FilterError {
    /// No limit has this name.
    #[error("unknown limit `{0}`")]
    UnknownLimit(String),
    /// No limit counts usage.
    #[error("no limit has `usage = true`")]
    NoUsage,
    /// The first day is after the last one.
    #[error("`from` ({from}) is after `to` ({to})")]
    EmptyRange {
        /// First day of the requested period.
        from: Date,
        /// Last day of the requested period.
        to: Date,
    },
    /// The identity does not match the `by` of the limits. The field is the reason.
    #[error("{0}")]
    Identity(String),
}

/// The cost of one limit, identity and period.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageEntry {
    /// Name of the limit.
    pub limit: String,
    /// Quota unit of the limit, such as `requests`, in which `cost` is measured.
    pub unit: String,
    /// Hash of the identity.
    pub identity: String,
    /// Name of the consumer. `None` if the limit is not by the API key alone, or if no consumer has this identity.
    pub consumer: Option<String>,
    /// The day (`2026-11-23`) or the month (`2026-11`). `None` if the cost is grouped by identity.
    pub period: Option<String>,
    /// The LLM model. `None` if the cost is not grouped by model, or for the part whose model is not recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// The kind of token. `None` if the report is not by kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Charged cost minus refunds. In a report by kind, the number of tokens.
    pub cost: i64,
}

/// The cost of one limit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageTotal {
    /// Name of the limit.
    pub limit: String,
    /// Quota unit of the limit.
    pub unit: String,
    /// Cost of all entries.
    pub cost: i64,
}

/// The usage totals that a filter selects.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageReport {
    /// First day of the report.
    pub from: String,
    /// Last day of the report. `None` if the report includes the current day.
    pub to: Option<String>,
    /// How the report groups the cost of each limit.
    pub by: GroupBy,
    /// The entries, sorted by limit, then by consumer (or by the hash of the identity, if it has no consumer), then by
    /// period.
    pub usage: Vec<UsageEntry>,
    /// The total cost of each limit.
    pub totals: Vec<UsageTotal>,
}

impl UsageFilter {
    /// Convert the filter to a store query for a report that is grouped by `by`, with at most `max_rows` totals.
    /// `now_us` is the time since the Unix epoch in µs.
    ///
    /// # Errors
    /// The filter selects nothing.
    pub fn query(
        &self,
        config: &CompiledConfig,
        by: GroupBy,
        now_us: u64,
        max_rows: usize,
    ) -> Result<UsageQuery, FilterError> {
        let limits: Vec<_> = match &self.limit {
            Some(name) => {
                vec![config.limits.get(name).ok_or_else(|| FilterError::UnknownLimit(name.clone()))?]
            }
            None => config.limits.values().filter(|compiled| compiled.limit.usage.is_some()).collect(),
        };
        let Some(first) = limits.first() else { return Err(FilterError::NoUsage) };
        let utc_date = || {
            let now = Timestamp::from_microsecond(now_us as i64).unwrap_or(Timestamp::UNIX_EPOCH);
            jiff::tz::TimeZone::UTC.to_datetime(now).date()
        };
        let today = first.limit.usage.as_ref().map_or_else(utc_date, |days| days.day_at(now_us).date);
        let from = self.from.unwrap_or_else(|| UsageMonth::from(today).first_day());
        // By default, include the next day (UTC), because it may have begun already in the time zone of a limit.
        let to = self.to.unwrap_or_else(|| today.saturating_add(1.day()));
        if from > to {
            return Err(FilterError::EmptyRange { from, to });
        }
        // Restrict the query to days whose totals may still exist. The query reads one key per month, so a range of
        // many years would be slow.
        let oldest = today.saturating_sub((RETENTION_DAYS + 31).days());
        let from = from.max(oldest);
        let to = to.min(today.saturating_add(1.day()));
        let (limits, identities) = match &self.identity {
            None => (limits, None),
            Some(identity) => {
                let (limits, identities) = resolve(identity, limits, config, self.limit.is_some())?;
                (limits, Some(identities))
            }
        };
        let limits = limits.iter().map(|compiled| compiled.limit.name.clone()).collect();
        Ok(UsageQuery { limits, identities, from, to, parts: by.parts(), max_rows })
    }
}

/// Return the limits that count an identity, and the hash of the identity for each of these limits. If `is_single` is
/// true, `limits` has one element, and the identity must match the `by` of this limit. Otherwise, select the limits for
/// which `identity` has a value for each part of `by`.
fn resolve<'c>(
    identity: &IdentityFilter,
    limits: Vec<&'c CompiledLimit>,
    config: &CompiledConfig,
    is_single: bool,
) -> Result<(Vec<&'c CompiledLimit>, Vec<Identity>), FilterError> {
    let parts = match identity {
        IdentityFilter::Hash(hash) => {
            let identities = vec![*hash; limits.len()];
            return Ok((limits, identities));
        }
        IdentityFilter::Parts(parts) => parts,
    };
    if let Some(label) =
        parts.keys().find(|label| !limits.iter().any(|compiled| compiled.identity_spec.has_label(label)))
    {
        return Err(FilterError::Identity(format!("no limit with `usage = true` has `{label}` in `by`")));
    }
    let consumers = config.auth.consumers();
    let mut selected = Vec::new();
    let mut identities = Vec::new();
    for compiled in limits {
        match compiled.identity_spec.resolve(parts, &config.client_ip, &consumers, &config.hasher) {
            Ok(resolved) => {
                selected.push(compiled);
                identities.push(resolved.identity);
            }
            Err(IdentityInputError::Missing(_)) if !is_single => {}
            Err(error) => return Err(FilterError::Identity(error.to_string())),
        }
    }
    match selected.is_empty() {
        true => Err(FilterError::Identity("no limit with `usage = true` has exactly these parts in `by`".to_owned())),
        false => Ok((selected, identities)),
    }
}

impl UsageReport {
    /// Create a report from the totals that a query has returned.
    pub fn new(
        config: &CompiledConfig,
        query: &UsageQuery,
        filter: &UsageFilter,
        rows: Vec<UsageRow>,
        by: GroupBy,
    ) -> Self {
        let unit = |limit: &str| match config.limits.get(limit) {
            _ if by == GroupBy::Kind => "tokens".to_owned(),
            Some(compiled) => compiled.limit.unit.to_string(),
            None => String::new(),
        };
        let names = consumer_names(config, &rows);
        let mut costs = BTreeMap::<_, i64>::new();
        for UsageRow { limit, identity, date, part, cost } in rows {
            if (by == GroupBy::Kind) != matches!(part, UsagePart::Kind(_)) {
                continue;
            }
            let period = match by {
                GroupBy::Day | GroupBy::Model | GroupBy::Kind => Some(date.to_string()),
                GroupBy::Month => Some(UsageMonth::from(date).to_string()),
                GroupBy::Identity => None,
            };
            let consumer = names.get(&*limit).and_then(|names| names.get(&identity)).cloned();
            // The keys of `costs` determine the order of the entries: first consumers by name, then other identities by
            // hash. Within each period, first models by name, then the cost whose model is not recorded.
            let group = (limit, consumer.is_none(), consumer, identity, period);
            let mut add = |part: UsagePart, cost: i64| {
                let total = costs.entry((group.clone(), part == UsagePart::Day, part)).or_default();
                *total = total.saturating_add(cost);
            };
            if let UsagePart::Model(_) = part {
                // The row of the day has the total cost, including all models. Subtract the cost of each model from
                // it, so that the cost whose model is not recorded remains.
                add(UsagePart::Day, -cost);
            }
            add(part, cost);
        }
        let mut totals = BTreeMap::<_, i64>::new();
        let usage = costs.into_iter().filter_map(|((group, is_rest, part), cost)| {
            let (limit, _, consumer, identity, period) = group;
            let total = totals.entry(limit.clone()).or_default();
            *total = total.saturating_add(cost);
            let unit = unit(&limit);
            let identity = Identity(identity).to_string();
            let (model, kind) = match part {
                UsagePart::Day => (None, None),
                UsagePart::Model(model) => (Some(model.into()), None),
                UsagePart::Kind(kind) => (None, Some(kind.into())),
            };
            let entry = UsageEntry { limit: limit.into(), unit, identity, consumer, period, model, kind, cost };
            (by != GroupBy::Model || !is_rest || cost != 0).then_some(entry)
        });
        let usage = usage.collect();
        let totals =
            totals.into_iter().map(|(limit, cost)| UsageTotal { unit: unit(&limit), limit: limit.into(), cost });
        let from = query.from.to_string();
        let to = filter.to.map(|to| to.to_string());
        UsageReport { from, to, by, usage, totals: totals.collect() }
    }

    /// Keep only the `count` entries of each limit with the highest cost, highest first. The totals do not change.
    pub fn keep_highest(&mut self, count: usize) {
        self.usage.sort_by(|a, b| a.limit.cmp(&b.limit).then(b.cost.cmp(&a.cost)));
        let (mut limit, mut kept) = (String::new(), 0);
        self.usage.retain(|entry| {
            if entry.limit != limit {
                (limit, kept) = (entry.limit.clone(), 0);
            }
            kept += 1;
            kept <= count
        });
    }
}

/// Return the names of consumers by identity hash, for each limit by API key alone. A hash cannot be inverted, so this
/// function computes the hash of each consumer.
fn consumer_names(config: &CompiledConfig, rows: &[UsageRow]) -> HashMap<Box<str>, HashMap<u128, String>> {
    let limits: BTreeSet<_> = rows.iter().map(|row| &row.limit).collect();
    let consumers = config.auth.consumers();
    let names = limits.into_iter().filter_map(|name| {
        let compiled = config.limits.get(&**name)?;
        let is_by_consumer = compiled.identity_spec.descriptors == [Descriptor::ApiKey];
        is_by_consumer.then(|| (name.clone(), names_by_hash(compiled, config, &consumers)))
    });
    names.collect()
}

/// Return the name of the consumer that has this identity for a limit. Return `None` if no consumer has this identity,
/// or if the limit is not by API key alone.
pub fn consumer_name(config: &CompiledConfig, limit: &str, identity: Identity) -> Option<String> {
    let compiled = config.limits.get(limit)?;
    if compiled.identity_spec.descriptors != [Descriptor::ApiKey] {
        return None;
    }
    names_by_hash(compiled, config, &config.auth.consumers()).remove(&identity.0)
}

fn names_by_hash(
    compiled: &CompiledLimit,
    config: &CompiledConfig,
    consumers: &ConsumerDirectory,
) -> HashMap<u128, String> {
    let hash = |name: &str| {
        let parts = IdentityInput::from([(Descriptor::ApiKey.label().into_owned(), name.to_owned())]);
        let resolved = compiled.identity_spec.resolve(&parts, &config.client_ip, consumers, &config.hasher);
        resolved.ok().map(|resolved| (resolved.identity.0, name.to_owned()))
    };
    consumers.iter().filter_map(|consumer| hash(&consumer.name)).collect()
}
