//! Data in Redis other than the states and overrides of limits: usage totals, claims of quota events, and hashes that
//! one gateway at a time may write.

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::future::join_all;
use redis::Value;

use crate::limiter::key::Identity;
use crate::limiter::redis::cluster::topology::{identity_slot, key_slot};
use crate::limiter::redis::commands;
use crate::limiter::redis::commands::{EventClaim, Fields};
use crate::limiter::store::RedisStore;
use crate::limiter::usage::{
    UsageAmount, UsageFields, UsageKey, UsageMonth, UsagePart, UsagePost, UsageQuery, UsageRow,
};
use crate::limiter::verdict::StoreError;

/// Maximum number of hashes that are read at the same time.
const MAX_CONCURRENT_READS: usize = 64;

/// Data that the gateways share through the connections of a store.
#[derive(Debug, Clone, Copy)]
pub struct SharedData<'s>(pub &'s RedisStore);

/// The reason why usage totals cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum UsageError {
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// There are more totals than the query's maximum, which is this number.
    #[error("there are more than {0} totals")]
    TooMany(usize),
}

impl SharedData<'_> {
    /// Read a fenced hash (`lua/fenced_hash.lua`): its version, and its fields if the version is not `known_version`.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn read_hash(self, key: &str, known_version: u64) -> Result<(u64, Option<Fields>), StoreError> {
        let command = commands::read_hash_command(key, known_version);
        let reply = self.0.admin_command(key_slot(key.as_bytes()), &command).await?;
        commands::parse_hash_reply(reply, known_version)
    }

    /// Lock a fenced hash for `ttl`, or renew the lock. Return the fencing token. `None` means that another owner has
    /// the lock.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn lock_hash(self, key: &str, owner: &str, ttl: Duration) -> Result<Option<u64>, StoreError> {
        let command = commands::lock_hash_command(key, owner, ttl);
        let reply = self.0.admin_command(key_slot(key.as_bytes()), &command).await?;
        Ok(Some(commands::parse_number(reply)?).filter(|token| *token != 0))
    }

    /// Release the lock of a fenced hash.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn unlock_hash(self, key: &str, token: u64) -> Result<(), StoreError> {
        self.0.admin_command(key_slot(key.as_bytes()), &commands::unlock_hash_command(key, token)).await.map(drop)
    }

    /// Write a field of a fenced hash. An empty value removes the field. Return whether the token is still the token of
    /// the last lock. If another lock has a newer token, nothing is written.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn write_hash(self, key: &str, token: u64, field: &str, value: &[u8]) -> Result<bool, StoreError> {
        let command = commands::write_hash_command(key, token, field, value);
        let reply = self.0.admin_command(key_slot(key.as_bytes()), &command).await?;
        Ok(commands::parse_number(reply)? == 1)
    }

    /// Claim a quota event, and add it to a stream if the claim names one. Return `false` if another event already has
    /// the claim. The call may be repeated without harm.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn claim_event(self, claim: &EventClaim<'_>) -> Result<bool, StoreError> {
        let key = format!("{}:{}", self.0.prefix(), claim.key);
        let command = commands::claim_event_command(&key, claim);
        let reply = self.0.admin_command(key_slot(key.as_bytes()), &command).await?;
        Ok(commands::parse_number(reply)? == 1)
    }

    /// Count this gateway until `ttl` has passed, or no longer if `ttl` is zero. Return the number of gateways that share
    /// the store, and the number of those of a version that reads only separate keys.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn count_gateways(self, id: &str, ttl: Duration) -> Result<(u64, u64), StoreError> {
        let key = format!("{}:gateways", self.0.prefix());
        let reply =
            self.0.admin_command(key_slot(key.as_bytes()), &commands::count_gateways_command(&key, id, ttl)).await?;
        redis::from_redis_value(reply).map_err(|_| StoreError::MalformedReply)
    }

    /// Add a post to the usage totals. Return `false` if Redis had already added this post. The call may be repeated
    /// without harm.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn post_usage(self, post: &UsagePost) -> Result<bool, StoreError> {
        let command = commands::post_usage_command(self.0.prefix(), post);
        let reply = self.0.admin_command(identity_slot(Identity(post.key.identity)), &command).await?;
        Ok(reply == Value::Int(1))
    }

    /// Read usage totals, in no particular order. If the query has no identities, scan all keys of the store. While
    /// slots of a cluster migrate, totals may be missing.
    ///
    /// # Errors
    /// The store failed, or there are too many totals.
    pub async fn read_usage(self, query: &UsageQuery) -> Result<Vec<UsageRow>, UsageError> {
        let keys = match &query.identities {
            Some(identities) => usage_keys(query, identities),
            None => self.scan_usage(query).await?,
        };
        let mut rows = Vec::new();
        for keys in keys.chunks(MAX_CONCURRENT_READS) {
            let hashes = join_all(keys.iter().map(async |key| {
                let command = commands::read_usage_command(self.0.prefix(), key);
                let reply = self.0.admin_command(identity_slot(Identity(key.identity)), &command).await?;
                commands::parse_usage_reply(reply)
            }));
            for (key, amounts) in keys.iter().zip(hashes.await) {
                let row = |UsageAmount { day, name, cost }| {
                    let date = key.month.day(day)?;
                    let part = UsagePart::new(key.fields, name)?;
                    Some(UsageRow { limit: key.limit.clone(), identity: key.identity, date, part, cost })
                };
                let rows_of_key = amounts?.into_iter().filter_map(row);
                rows.extend(rows_of_key.filter(|row| query.matches(&row.limit, row.identity, row.date)));
            }
            if rows.len() > query.max_rows {
                return Err(UsageError::TooMany(query.max_rows));
            }
        }
        Ok(rows)
    }

    /// Search Redis for the keys of the totals that a query selects. Return each key once.
    async fn scan_usage(self, query: &UsageQuery) -> Result<Vec<UsageKey>, UsageError> {
        let (from, to) = (UsageMonth::from(query.from), UsageMonth::from(query.to));
        let mut keys = BTreeSet::new();
        for node in self.0.nodes().await? {
            let mut cursor = 0;
            loop {
                let command = commands::scan_usage_command(self.0.prefix(), cursor);
                let reply = node.admin_command(node.timeout(), false, &command).await?;
                let (next, found) = commands::parse_usage_scan_reply(self.0.prefix(), reply)?;
                let is_asked = |key: &UsageKey| {
                    (from..=to).contains(&key.month) && query.limits.contains(&key.limit) && query.reads(key.fields)
                };
                keys.extend(found.into_iter().filter(is_asked));
                if keys.len() > query.max_rows {
                    return Err(UsageError::TooMany(query.max_rows));
                }
                cursor = next;
                if cursor == 0 {
                    break;
                }
            }
        }
        Ok(keys.into_iter().collect())
    }
}

/// Return the keys of the totals of these identities.
fn usage_keys(query: &UsageQuery, identities: &[Identity]) -> Vec<UsageKey> {
    let last = UsageMonth::from(query.to);
    let mut keys = Vec::new();
    for (limit, identity) in query.limits.iter().zip(identities) {
        let mut month = UsageMonth::from(query.from);
        while month <= last {
            let read = UsageFields::ALL.into_iter().filter(|fields| query.reads(*fields));
            keys.extend(read.map(|fields| UsageKey { limit: limit.clone(), identity: identity.0, month, fields }));
            month = month.next();
        }
    }
    keys
}
