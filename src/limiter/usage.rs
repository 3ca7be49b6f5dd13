//! Usage totals: the charged cost by limit, identity and calendar day.
//!
//! In Redis, the Lua script that charges a state also writes the total. Each limit, identity and month has a hash of
//! totals, with a field for each day. For limits that count the tokens of LLM APIs, a second hash has a field for each
//! day and model, and a third one for each day and kind of token. [`UsageTable`] contains the totals of the memory
//! store. With Redis, it contains the charges of local shares in an outage and the totals by model and kind, until they
//! are sent to Redis.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::Write;
use std::mem;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::civil::Date;
use jiff::tz::TimeZone;
use jiff::{Timestamp, ToSpan};
use tracing::warn;
use uuid::Uuid;

use crate::clock::LogThrottle;
use crate::limiter::key::Identity;
use crate::limiter::quota::{EXACT_INTEGER_LIMIT, QuotaError, start_of_day_us};

/// Minimum number of days for which the total of a day is kept. The Lua scripts contain this time in milliseconds. All
/// days of a month expire together, so a day is kept for up to 30 additional days.
pub const RETENTION_DAYS: i32 = 400;

/// Maximum number of models that have their own totals, for each limit, identity and month. The number is limited
/// because clients choose the model names.
pub const MAX_MODELS: usize = 64;

/// Number of shards of a table, a power of two.
const SHARDS: usize = 64;

/// Minimum interval between log records about cost that is missing from the usage totals.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// The calendar days in a time zone. Usage totals sum up the cost of a limit for each of these days.
#[derive(Debug)]
pub struct UsageDays {
    zone: TimeZone,
    /// The day that was used last.
    cached: Mutex<UsageDay>,
}

/// A calendar day and its bounds. Days on which daylight saving time begins or ends have 23 or 25 hours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UsageDay {
    /// The calendar date.
    pub date: Date,
    /// The first instant of the day, µs since the Unix epoch.
    pub start_us: u64,
    /// The first instant of the next day, µs since the Unix epoch.
    pub end_us: u64,
}

impl UsageDays {
    /// Create the days of a zone of the IANA time zone database.
    ///
    /// # Errors
    /// The database has no such zone.
    pub fn new(zone: &str) -> Result<Self, QuotaError> {
        let zone = TimeZone::get(zone).map_err(|_| QuotaError::TimeZone(zone.to_owned()))?;
        let none = UsageDay { date: Date::ZERO, start_us: 0, end_us: 0 };
        Ok(UsageDays { zone, cached: Mutex::new(none) })
    }

    /// Return the name of the time zone.
    pub fn zone_name(&self) -> &str {
        self.zone.iana_name().unwrap_or("UTC")
    }

    /// Return the day of an instant, µs since the Unix epoch.
    pub fn day_at(&self, now_us: u64) -> UsageDay {
        let mut cached = self.cached.lock().unwrap_or_else(PoisonError::into_inner);
        if !(cached.start_us <= now_us && now_us < cached.end_us) {
            *cached = self.compute(now_us);
        }
        *cached
    }

    fn compute(&self, now_us: u64) -> UsageDay {
        let now = Timestamp::from_microsecond(now_us as i64).unwrap_or(Timestamp::UNIX_EPOCH);
        let mut date = self.zone.to_datetime(now).date();
        let mut end_us = start_of_day_us(next_day(date), &self.zone);
        // If the local time is set back over midnight, do not return to the previous day: the day that has begun
        // continues.
        if now_us >= end_us {
            date = next_day(date);
            end_us = start_of_day_us(next_day(date), &self.zone);
        }
        UsageDay { date, start_us: start_of_day_us(date, &self.zone), end_us }
    }
}

fn next_day(date: Date) -> Date {
    date.saturating_add(1.day())
}

impl UsageDay {
    /// Return the same day without bounds, for changes of its total that may be made on a later day, such as refunds.
    #[must_use]
    pub fn at_any_time(self) -> Self {
        UsageDay { start_us: 0, end_us: EXACT_INTEGER_LIMIT, ..self }
    }

    /// Return the month of the day.
    pub fn month(&self) -> UsageMonth {
        UsageMonth::from(self.date)
    }
}

/// A calendar month: `2026-11`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct UsageMonth {
    year: i16,
    month: i8,
}

impl UsageMonth {
    /// Return a day of this month. Return `None` if the month does not have this day.
    pub fn day(self, day: i8) -> Option<Date> {
        Date::new(self.year, self.month, day).ok()
    }

    /// Return the first day of the month.
    pub fn first_day(self) -> Date {
        self.day(1).unwrap_or(Date::ZERO)
    }

    /// Return the next month.
    #[must_use]
    pub fn next(self) -> Self {
        UsageMonth::from(self.first_day().saturating_add(1.month()))
    }
}

impl From<Date> for UsageMonth {
    fn from(date: Date) -> Self {
        UsageMonth { year: date.year(), month: date.month() }
    }
}

impl fmt::Display for UsageMonth {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:04}-{:02}", self.year, self.month)
    }
}

impl FromStr for UsageMonth {
    type Err = jiff::Error;

    /// Parse `2026-11`.
    fn from_str(text: &str) -> Result<Self, jiff::Error> {
        format!("{text}-01").parse::<Date>().map(UsageMonth::from)
    }
}

// === Keys in Redis ===

/// What the fields of a hash with totals stand for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum UsageFields {
    /// Each field of the hash stands for one day.
    Days,
    /// Each field of the hash stands for one day and one model.
    Models,
    /// Each field of the hash stands for one day and one kind of token. The totals are numbers of tokens.
    Kinds,
}

/// A hash with the totals of a limit and an identity in a month.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct UsageKey {
    /// Name of the limit.
    pub limit: Box<str>,
    /// Hash of the identity.
    pub identity: u128,
    /// The month of the totals.
    pub month: UsageMonth,
    /// What the fields of the hash stand for.
    pub fields: UsageFields,
}

/// The part of a key between the name of the limit and the month. No shape of a state begins with `usage:`, so these
/// keys differ from the keys of states.
const KEY_PART: &str = ":usage:";

impl UsageFields {
    /// All values of this type.
    pub const ALL: [UsageFields; 3] = [UsageFields::Days, UsageFields::Models, UsageFields::Kinds];

    /// Return the part of a key after the month.
    fn suffix(self) -> &'static str {
        match self {
            UsageFields::Days => "",
            UsageFields::Models => ":models",
            UsageFields::Kinds => ":kinds",
        }
    }
}

/// Append `<prefix>:{<identity hash>}:<limit>:usage:<month>`. The braces put the key into the cluster slot of the
/// states.
pub fn write_key(prefix: &str, limit: &str, identity: Identity, month: UsageMonth, out: &mut Vec<u8>) {
    out.extend_from_slice(prefix.as_bytes());
    out.extend_from_slice(b":{");
    out.extend_from_slice(&identity.to_hex());
    out.extend_from_slice(b"}:");
    out.extend_from_slice(limit.as_bytes());
    out.extend_from_slice(KEY_PART.as_bytes());
    // Ignore the result, because writing to a vector cannot fail.
    let _ = write!(out, "{month}");
}

impl UsageKey {
    /// Return the Redis key.
    pub fn to_redis_key(&self, prefix: &str) -> Vec<u8> {
        let mut key = Vec::new();
        write_key(prefix, &self.limit, Identity(self.identity), self.month, &mut key);
        key.extend_from_slice(self.fields.suffix().as_bytes());
        key
    }

    /// Parse a Redis key with this prefix. Return `None` if the key does not belong to a hash of totals.
    pub fn parse(prefix: &str, key: &[u8]) -> Option<Self> {
        let key = std::str::from_utf8(key).ok()?;
        let (identity, rest) = key.strip_prefix(prefix)?.strip_prefix(":{")?.split_once("}:")?;
        let (limit, month) = rest.split_once(KEY_PART)?;
        let (month, suffix) = month.split_at(month.find(':').unwrap_or(month.len()));
        let fields = UsageFields::ALL.into_iter().find(|fields| fields.suffix() == suffix)?;
        let identity = Identity::from_hex(identity)?.0;
        Some(UsageKey { limit: limit.into(), identity, month: month.parse().ok()?, fields })
    }
}

// === Reading ===

/// What a total of a day counts.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum UsagePart {
    /// The cost, including the costs of all models.
    Day,
    /// The number of tokens of this kind. The kinds do not overlap.
    Kind(Box<str>),
    /// The cost of this model.
    Model(Box<str>),
}

impl UsagePart {
    /// Return the part that a field of a hash stands for. `name` is the text after the day.
    pub fn new(fields: UsageFields, name: Option<Box<str>>) -> Option<Self> {
        match (fields, name) {
            (UsageFields::Days, None) => Some(UsagePart::Day),
            (UsageFields::Models, Some(name)) => Some(UsagePart::Model(name)),
            (UsageFields::Kinds, Some(name)) => Some(UsagePart::Kind(name)),
            (UsageFields::Days, Some(_)) | (UsageFields::Models | UsageFields::Kinds, None) => None,
        }
    }

    fn fields(&self) -> UsageFields {
        match self {
            UsagePart::Day => UsageFields::Days,
            UsagePart::Model(_) => UsageFields::Models,
            UsagePart::Kind(_) => UsageFields::Kinds,
        }
    }

    fn name(&self) -> Option<&str> {
        match self {
            UsagePart::Day => None,
            UsagePart::Model(name) | UsagePart::Kind(name) => Some(name),
        }
    }

    fn model(&self) -> Option<&str> {
        match self {
            UsagePart::Model(name) => Some(name),
            UsagePart::Day | UsagePart::Kind(_) => None,
        }
    }
}

/// The total of a limit, an identity and a day, or a part of this total.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct UsageRow {
    /// Name of the limit.
    pub limit: Box<str>,
    /// Hash of the identity.
    pub identity: u128,
    /// The day of the total.
    pub date: Date,
    /// What the total counts.
    pub part: UsagePart,
    /// Charged cost minus refunds, or the number of tokens.
    pub cost: i64,
}

/// The totals to read.
#[derive(Debug, Clone)]
pub struct UsageQuery {
    /// Names of the limits.
    pub limits: Vec<Box<str>>,
    /// One identity for each limit, in the order of `limits`. `None` selects all identities.
    pub identities: Option<Vec<Identity>>,
    /// First day of the period to read.
    pub from: Date,
    /// Last day of the period to read.
    pub to: Date,
    /// The totals that are read beside those of days.
    pub parts: UsageFields,
    /// Maximum number of totals to return.
    pub max_rows: usize,
}

impl UsageQuery {
    /// Return whether the query reads these totals.
    pub fn reads(&self, fields: UsageFields) -> bool {
        fields == UsageFields::Days || fields == self.parts
    }

    /// Return whether the query selects this total.
    pub fn matches(&self, limit: &str, identity: u128, date: Date) -> bool {
        let Some(index) = self.limits.iter().position(|name| **name == *limit) else { return false };
        let is_identity = |all: &Vec<Identity>| all.get(index).is_some_and(|one| one.0 == identity);
        (self.from..=self.to).contains(&date) && self.identities.as_ref().is_none_or(is_identity)
    }
}

// === Totals in this process ===

/// Day and part of a total. The order is that of the days.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct TotalKey {
    date: Date,
    part: UsagePart,
}

/// The totals of one identity.
type IdentityTotals = BTreeMap<TotalKey, i64>;

/// The totals of one limit, by the hash of the identity.
type LimitTotals = BTreeMap<u128, IdentityTotals>;

/// The usage totals that this process keeps in memory. The number of totals is bounded.
#[derive(Debug)]
pub struct UsageTable {
    shards: Vec<Mutex<UsageShard>>,
    /// Maximum number of totals of a shard.
    capacity: usize,
    /// Number of totals.
    rows: AtomicUsize,
    /// Cost that is in no total, because the table was full or the cost could not be sent to Redis.
    lost: AtomicU64,
    /// A random id that identifies this process in each [`UsagePost`].
    poster: u64,
    posts: Mutex<Posts>,
    /// Whether a task sends the totals to Redis.
    is_posting: AtomicBool,
}

/// Totals of the identities of a shard. With ordered maps, clients cannot cause hash collisions, and the order of posts
/// is reproducible.
#[derive(Debug, Default)]
struct UsageShard {
    limits: BTreeMap<Box<str>, LimitTotals>,
    rows: usize,
    /// The newest day for which this process has totals.
    newest: Option<Date>,
}

#[derive(Debug, Default)]
struct Posts {
    /// Posts that Redis has not confirmed. Redis may have executed them.
    unconfirmed: Vec<UsagePost>,
    last_sequence: u64,
}

/// Amounts to add to the totals of a limit, an identity and a month. Redis adds a post only once, however often it is
/// sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsagePost {
    /// The key of the totals to which the amounts are added.
    pub key: UsageKey,
    /// The amounts to add, none of which is 0.
    pub amounts: Vec<UsageAmount>,
    /// Identifies the process.
    pub poster: u64,
    /// Sequence number, which is greater than those of all earlier posts of this process. The number can be 0 if the
    /// post is never sent again after Redis may have executed it. Redis adds a post with the number 0 each time.
    pub sequence: u64,
}

/// The amount to add for a day of the month, or for a day and a model or kind of token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsageAmount {
    /// Day of the month.
    pub day: i8,
    /// The model or the kind of token, for totals by model or kind.
    pub name: Option<Box<str>>,
    /// The cost, negative for refunds.
    pub cost: i64,
}

impl UsageTable {
    /// Create an empty table for about `max_rows` totals.
    pub fn new(max_rows: usize) -> Self {
        UsageTable {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            capacity: max_rows.div_ceil(SHARDS).max(1),
            rows: AtomicUsize::new(0),
            lost: AtomicU64::new(0),
            poster: Uuid::new_v4().as_u64_pair().0,
            posts: Mutex::default(),
            is_posting: AtomicBool::new(false),
        }
    }

    /// Add an amount to the total of a day. The amount is negative for a refund.
    pub fn add(&self, limit: &str, identity: Identity, date: Date, amount: i64) {
        self.add_total(limit, identity, TotalKey { date, part: UsagePart::Day }, amount);
    }

    /// Add a cost to the total of a model, which is a part of the total of the day. Only the first [`MAX_MODELS`]
    /// models of a month have totals.
    pub fn add_model(&self, limit: &str, identity: Identity, date: Date, model: &str, cost: i64) {
        self.add_total(limit, identity, TotalKey { date, part: UsagePart::Model(model.into()) }, cost);
    }

    /// Add a number of tokens to the total of their kind.
    pub fn add_kind(&self, limit: &str, identity: Identity, date: Date, kind: &str, tokens: i64) {
        self.add_total(limit, identity, TotalKey { date, part: UsagePart::Kind(kind.into()) }, tokens);
    }

    fn add_total(&self, limit: &str, identity: Identity, at: TotalKey, amount: i64) {
        let date = at.date;
        let mut shard = self.lock(identity.0 as usize % SHARDS);
        let is_new_day = shard.newest.is_none_or(|newest| newest < date);
        if is_new_day {
            shard.newest = Some(date);
            let removed = shard.remove_before(date.saturating_sub(RETENTION_DAYS.days()));
            self.rows.fetch_sub(removed, Ordering::Relaxed);
        }
        if let Some(total) = shard.total_mut(limit, identity.0, &at) {
            *total = total.saturating_add(amount);
        } else if at.part != UsagePart::Day
            && (shard.rows >= self.capacity || shard.has_max_models(limit, identity.0, &at))
        {
            // Do not count the cost of the part as lost, because the total of the day contains it.
        } else if shard.rows < self.capacity {
            shard.insert(limit, identity.0, at, amount);
            self.rows.fetch_add(1, Ordering::Relaxed);
        } else {
            drop(shard);
            self.lost.fetch_add(amount.unsigned_abs(), Ordering::Relaxed);
            static LOG_THROTTLE: LogThrottle = LogThrottle::new();
            if LOG_THROTTLE.should_log(LOG_INTERVAL) {
                warn!(
                    limit,
                    "store.max_memory_states is too small for the usage totals in memory: some cost is missing from \
                     the totals"
                );
            }
        }
    }

    /// Return the totals of a query, in no particular order. Return `None` if there are more than `max_rows` totals.
    pub fn read(&self, query: &UsageQuery) -> Option<Vec<UsageRow>> {
        let mut rows = Vec::new();
        for index in 0..SHARDS {
            let shard = self.lock(index);
            for (limit, identity, totals) in shard.totals() {
                let is_read = |at: &TotalKey| query.reads(at.part.fields()) && query.matches(limit, identity, at.date);
                let totals = totals.iter().filter(|(at, _)| is_read(at));
                rows.extend(totals.map(|(at, cost)| UsageRow {
                    limit: limit.into(),
                    identity,
                    date: at.date,
                    part: at.part.clone(),
                    cost: *cost,
                }));
                if rows.len() > query.max_rows {
                    return None;
                }
            }
        }
        Some(rows)
    }

    /// Return the number of totals, including those of unconfirmed posts.
    pub fn len(&self) -> usize {
        self.rows.load(Ordering::Relaxed)
    }

    /// Return whether there are no totals.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Return the cost that was lost, because no total could count it.
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    fn lock(&self, index: usize) -> MutexGuard<'_, UsageShard> {
        self.shards[index].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl UsageShard {
    fn total_mut(&mut self, limit: &str, identity: u128, at: &TotalKey) -> Option<&mut i64> {
        self.limits.get_mut(limit)?.get_mut(&identity)?.get_mut(at)
    }

    /// Return whether the total is that of a model, and [`MAX_MODELS`] other models have totals in the month.
    fn has_max_models(&self, limit: &str, identity: u128, at: &TotalKey) -> bool {
        let Some(model) = at.part.model() else { return false };
        let Some(totals) = self.limits.get(limit).and_then(|identities| identities.get(&identity)) else {
            return false;
        };
        let is_in_month = |other: &&TotalKey| UsageMonth::from(other.date) == UsageMonth::from(at.date);
        let models: BTreeSet<_> = totals.keys().filter(is_in_month).filter_map(|other| other.part.model()).collect();
        models.len() >= MAX_MODELS && !models.contains(model)
    }

    fn insert(&mut self, limit: &str, identity: u128, at: TotalKey, amount: i64) {
        if !self.limits.contains_key(limit) {
            self.limits.insert(limit.into(), LimitTotals::new());
        }
        if let Some(identities) = self.limits.get_mut(limit) {
            identities.entry(identity).or_default().insert(at, amount);
            self.rows += 1;
        }
    }

    /// Remove the totals of the days before `first`. Return the number of removed totals.
    fn remove_before(&mut self, first: Date) -> usize {
        let before = self.rows;
        for identities in self.limits.values_mut() {
            identities.retain(|_, totals| {
                let kept = totals.split_off(&TotalKey { date: first, part: UsagePart::Day });
                self.rows -= totals.len();
                *totals = kept;
                !totals.is_empty()
            });
        }
        self.limits.retain(|_, identities| !identities.is_empty());
        before - self.rows
    }

    fn totals(&self) -> impl Iterator<Item = (&str, u128, &IdentityTotals)> {
        self.limits.iter().flat_map(|(limit, identities)| {
            identities.iter().map(move |(identity, totals)| (&**limit, *identity, totals))
        })
    }
}

// === Posts: what the local shares charged in an outage, and totals by model and kind ===

impl UsageTable {
    /// Claim the task of sending totals. Return whether the caller must start the task, because there are totals and no
    /// task sends them.
    pub fn claim_posting(&self) -> bool {
        !self.is_empty() && !self.is_posting.swap(true, Ordering::AcqRel)
    }

    /// End the task of sending totals.
    pub fn end_posting(&self) {
        self.is_posting.store(false, Ordering::Release);
    }

    /// Take the unconfirmed posts. If there are none, create new posts from one shard after another until there are at
    /// least `max` posts or no totals are left. The caller must pass each post to [`confirm`](UsageTable::confirm),
    /// [`put_back`](UsageTable::put_back) or [`lose`](UsageTable::lose). Only one task may do this at a time, because
    /// posts to the same totals must be sent in their order.
    pub fn take_posts(&self, max: usize) -> Vec<UsagePost> {
        let mut posts = self.posts.lock().unwrap_or_else(PoisonError::into_inner);
        if !posts.unconfirmed.is_empty() {
            return mem::take(&mut posts.unconfirmed);
        }
        let mut taken: Vec<UsagePost> = Vec::new();
        for index in 0..SHARDS {
            let mut shard = self.lock(index);
            for (limit, identity, totals) in shard.totals() {
                for (TotalKey { date, part }, cost) in totals {
                    if *cost == 0 {
                        self.rows.fetch_sub(1, Ordering::Relaxed);
                        continue;
                    }
                    let fields = part.fields();
                    let key = UsageKey { limit: limit.into(), identity, month: UsageMonth::from(*date), fields };
                    let amount = UsageAmount { day: date.day(), name: part.name().map(Box::from), cost: *cost };
                    // In the map, the totals of a day follow each other. So if a post for this key exists, it is one of
                    // the last three, for there are three kinds of hashes.
                    match taken.iter_mut().rev().take(UsageFields::ALL.len()).find(|post| post.key == key) {
                        Some(post) => post.amounts.push(amount),
                        None => {
                            posts.last_sequence += 1;
                            let poster = self.poster;
                            let sequence = posts.last_sequence;
                            taken.push(UsagePost { key, amounts: vec![amount], poster, sequence });
                        }
                    }
                }
            }
            *shard = UsageShard { newest: shard.newest, ..UsageShard::default() };
            if taken.len() >= max {
                break;
            }
        }
        taken
    }

    /// Remove the sent amounts after Redis has confirmed them.
    pub fn confirm(&self, post: &UsagePost) {
        self.rows.fetch_sub(post.amounts.len(), Ordering::Relaxed);
    }

    /// Remove amounts that cannot be sent to Redis, and count them as lost.
    pub fn lose(&self, post: &UsagePost) {
        self.confirm(post);
        // Count only the totals of days as lost, because they already contain the costs of the models.
        let days = post.amounts.iter().filter(|_| post.key.fields == UsageFields::Days);
        self.lost.fetch_add(days.map(|amount| amount.cost.unsigned_abs()).sum(), Ordering::Relaxed);
    }

    /// Keep the sent amounts for the next attempt, because Redis may not have added them.
    pub fn put_back(&self, post: UsagePost) {
        self.posts.lock().unwrap_or_else(PoisonError::into_inner).unconfirmed.push(post);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: u64 = 3600 * 1_000_000;

    fn date(text: &str) -> Date {
        text.parse().unwrap()
    }

    fn us(text: &str) -> u64 {
        text.parse::<Timestamp>().unwrap().as_microsecond() as u64
    }

    #[test]
    fn day_ends_at_midnight_of_its_time_zone() {
        for (zone, now, expected, hours) in [
            ("UTC", "2026-11-23T23:59:59.999999Z", "2026-11-23", 24),
            ("UTC", "2026-11-24T00:00:00Z", "2026-11-24", 24),
            ("Europe/Berlin", "2026-11-23T22:59:59.999999Z", "2026-11-23", 24),
            ("Europe/Berlin", "2026-11-23T23:00:00Z", "2026-11-24", 24),
            // In Berlin, daylight saving time begins on 29 March 2026 and ends on 25 October 2026.
            ("Europe/Berlin", "2026-03-29T21:59:59.999999Z", "2026-03-29", 23),
            ("Europe/Berlin", "2026-03-29T22:00:00Z", "2026-03-30", 24),
            ("Europe/Berlin", "2026-10-24T22:00:00Z", "2026-10-25", 25),
            ("Europe/Berlin", "2026-10-25T22:59:59.999999Z", "2026-10-25", 25),
            // In Cairo, the clock skips midnight at the start of 24 April 2026.
            ("Africa/Cairo", "2026-04-23T21:59:59Z", "2026-04-23", 24),
            ("Africa/Cairo", "2026-04-23T22:00:00Z", "2026-04-24", 23),
            ("Asia/Kathmandu", "2026-11-23T18:15:00Z", "2026-11-24", 24),
            ("America/Los_Angeles", "2027-01-01T07:59:59Z", "2026-12-31", 24),
        ] {
            let days = UsageDays::new(zone).unwrap();
            let day = days.day_at(us(now));
            assert_eq!(day.date, date(expected), "{zone}: {now}");
            assert_eq!(day.end_us - day.start_us, hours * HOUR, "{zone}: {now}");
            assert!((day.start_us..day.end_us).contains(&us(now)), "{zone}: {now}");
            assert_eq!(days.day_at(day.end_us).date, next_day(day.date), "{zone}: {now}");
        }
    }

    #[test]
    fn day_goes_on_while_the_clock_is_set_back_over_midnight() {
        // At 00:01 on 1 November 2009, the clocks of Newfoundland were set back to 23:01.
        let days = UsageDays::new("America/St_Johns").unwrap();
        for (now, expected) in [
            ("2009-11-01T02:29:59Z", "2009-10-31"),
            ("2009-11-01T02:30:00Z", "2009-11-01"),
            ("2009-11-01T02:31:00Z", "2009-11-01"),
            ("2009-11-01T03:30:00Z", "2009-11-01"),
        ] {
            let day = days.day_at(us(now));
            assert_eq!(day.date, date(expected), "{now}");
            assert!((day.start_us..day.end_us).contains(&us(now)), "{now}");
        }
    }

    #[test]
    fn key_round_trips_and_states_are_no_totals() {
        for (fields, expected) in [
            (UsageFields::Days, "rl:{00000000000000000000000000000007}:per-key:usage:2026-03"),
            (UsageFields::Models, "rl:{00000000000000000000000000000007}:per-key:usage:2026-03:models"),
            (UsageFields::Kinds, "rl:{00000000000000000000000000000007}:per-key:usage:2026-03:kinds"),
        ] {
            let month = UsageMonth::from(date("2026-03-05"));
            let key = UsageKey { limit: "per-key".into(), identity: 7, month, fields };
            let text = key.to_redis_key("rl");
            assert_eq!(text, expected.as_bytes());
            assert_eq!(UsageKey::parse("rl", &text), Some(key));
        }
        for other in [
            "rl:{00000000000000000000000000000007}:per-key:b",
            "rl:{00000000000000000000000000000007}:usage:l60000000",
            "rl:{00000000000000000000000000000007}:per-key:usage:2026-13",
            "rl:{00000000000000000000000000000007}:per-key:usage:2026-03:",
            "rl:{00000000000000000000000000000007}:per-key:usage:2026-03:days",
            "rl:{7}:per-key:usage:2026-03",
            "xl:{00000000000000000000000000000007}:per-key:usage:2026-03",
            "rl:overrides",
        ] {
            assert_eq!(UsageKey::parse("rl", other.as_bytes()), None, "{other}");
        }
    }

    fn read(table: &UsageTable) -> Vec<(u128, String, i64)> {
        let query = UsageQuery {
            limits: vec!["l".into()],
            identities: None,
            from: date("2000-01-01"),
            to: date("2100-01-01"),
            parts: UsageFields::Days,
            max_rows: 1000,
        };
        let mut rows = table.read(&query).unwrap();
        rows.sort();
        rows.into_iter().map(|row| (row.identity, row.date.to_string(), row.cost)).collect()
    }

    #[test]
    fn table_is_bounded_and_drops_old_days() {
        let table = UsageTable::new(2 * SHARDS);
        let add = |identity, day: &str, amount| table.add("l", Identity(identity), date(day), amount);
        add(1, "2025-10-19", 5);
        add(1, "2026-11-22", 7);
        assert_eq!(read(&table).len(), 2, "on 22 November 2026, the total of 19 October 2025 is 399 days old");
        add(1, "2026-11-22", -2);
        // Identities 1, 65, 129 share a shard.
        add(65, "2026-11-22", 3);
        assert_eq!((read(&table).len(), table.lost(), table.len()), (2, 3, 2), "the shard is full");
        add(129, "2026-11-24", 4);
        assert_eq!(read(&table), [(1, "2026-11-22".into(), 5), (129, "2026-11-24".into(), 4)]);
        assert_eq!((table.lost(), table.len()), (3, 2));
    }

    #[test]
    fn totals_of_models_are_bounded_parts_of_the_total() {
        let table = UsageTable::new(1000 * SHARDS);
        let add = |day: &str, model: usize| table.add_model("l", Identity(1), date(day), &format!("m{model}"), 2);
        table.add("l", Identity(1), date("2026-11-22"), 500);
        (0..MAX_MODELS + 9).for_each(|model| add("2026-11-22", model));
        table.add_kind("l", Identity(1), date("2026-11-22"), "input", 7);
        add("2026-11-23", 0);
        add("2026-11-23", MAX_MODELS);
        add("2026-12-01", MAX_MODELS);
        assert_eq!(read(&table), [(1, "2026-11-22".into(), 500)], "the totals of parts were not requested");
        assert_eq!((table.len(), table.lost()), (1 + MAX_MODELS + 3, 0), "kinds are no models");
        let mut posts = table.take_posts(100);
        posts.sort_by(|one, other| one.key.cmp(&other.key));
        let told: Vec<_> = posts.iter().map(|post| (post.key.fields, post.amounts.len())).collect();
        let models = UsageFields::Models;
        assert_eq!(told, [(UsageFields::Days, 1), (models, MAX_MODELS + 1), (UsageFields::Kinds, 1), (models, 1)]);
        posts.iter().for_each(|post| table.lose(post));
        assert_eq!((table.len(), table.lost()), (0, 500), "only the total of the day counts as lost");
    }

    #[test]
    fn posts_have_each_total_once() {
        let table = UsageTable::new(1000);
        let add = |identity, day: &str, amount| table.add("l", Identity(identity), date(day), amount);
        assert!(!table.claim_posting(), "there is nothing to post");
        add(1, "2026-11-30", 5);
        add(1, "2026-11-29", 2);
        add(1, "2026-12-01", -1);
        add(2, "2026-12-01", 3);
        add(2, "2026-12-01", -3);
        assert!(table.claim_posting() && !table.claim_posting(), "only one task may post");
        let posts = table.take_posts(100);
        let days = |post: &UsagePost| post.amounts.iter().map(|amount| (amount.day, amount.cost)).collect::<Vec<_>>();
        let told: Vec<_> = posts.iter().map(|post| (post.key.month.to_string(), days(post))).collect();
        assert_eq!(told, [("2026-11".into(), vec![(29, 2), (30, 5)]), ("2026-12".into(), vec![(1, -1)])]);
        assert!(posts[0].sequence < posts[1].sequence);
        add(1, "2026-11-30", 9);
        table.confirm(&posts[0]);
        table.put_back(posts[1].clone());
        assert_eq!(table.take_posts(100), posts[1..], "unconfirmed posts come first, with the same sequence");
        table.lose(&posts[1]);
        assert_eq!((table.lost(), table.len()), (1, 1));
        let later = table.take_posts(100);
        assert_eq!((days(&later[0]), later.len()), (vec![(30, 9)], 1));
        assert!(later[0].sequence > posts[1].sequence);
        table.confirm(&later[0]);
        table.end_posting();
        assert!(table.is_empty() && !table.claim_posting());
    }
}
