//! Administration of limits: show the usage of an identity, reset it, and override its quota.

use std::sync::Arc;
use std::time::Duration;

use crate::clock::monotonic;
use crate::limiter::denial_cache::MAX_DENIAL_AGE;
use crate::limiter::key::{Identity, Key, StateName};
use crate::limiter::memory::MemoryStore;
use crate::limiter::overrides::{
    MAX_OVERRIDES, MAX_PROPAGATION, Override, OverrideQuota, Overrides, override_field, reset_field,
};
use crate::limiter::quota::QuotaError;
use crate::limiter::redis::overrides;
use crate::limiter::redis::overrides::{KnownRevision, OverrideWrite, WriteStatus};
use crate::limiter::shared_data::{SharedData, UsageError};
use crate::limiter::spec::{LimitSpec, LimitVariant};
use crate::limiter::store::RedisStore;
use crate::limiter::usage::{UsageQuery, UsageRow};
use crate::limiter::verdict::{Charge, ChargeMode, Operation, StoreError, Verdict};

/// Time for which the other gateways can read the record of a reset. All gateways poll every second.
const RESET_BROADCAST_TTL: Duration = Duration::from_secs(5);

/// Operations of administrators on the limits of this process, such as resets and overrides.
#[derive(Debug)]
pub struct LimiterAdmin {
    /// States in this process: all states or, with Redis, the states of the local shares for outages.
    pub memory: Arc<MemoryStore>,
    /// The Redis store and the prefix of its keys. `None` if all states are in memory.
    pub redis: Option<(RedisStore, String)>,
    /// Overrides in force.
    pub overrides: Arc<Overrides>,
}

/// Result of a reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResetResult {
    /// Whether the identity had a state.
    pub was_counted: bool,
    /// Time within which all gateways drop cached denials of the identity.
    pub effective_within: Duration,
}

/// Error of an administrative operation.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The quota is invalid, or the limit does not support it.
    #[error(transparent)]
    Quota(#[from] QuotaError),
    /// The maximum of [`MAX_OVERRIDES`] overrides is reached.
    #[error("{MAX_OVERRIDES} overrides are in force, which is the maximum: remove one, or wait until one expires")]
    TooManyOverrides,
}

impl LimiterAdmin {
    /// Return the verdict on a request with this cost, without charging it.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn peek(&self, variant: &LimitVariant, identity: Identity, cost: u64) -> Result<Verdict, StoreError> {
        let key = Key { identity, state_name: &variant.state_name };
        let mode = ChargeMode::Enforced;
        let usage = None;
        let charge = [Charge { key, rule: &variant.rule, cost, mode, permit_id: 0, debt_before_us: 0, usage }];
        match &self.redis {
            None => Ok(self.memory.decide(Operation::Peek, &charge)),
            Some((store, _)) => store.call(monotonic() + store.timeout(), Operation::Peek, &charge).await,
        }
    }

    /// Read usage totals, in no particular order.
    ///
    /// # Errors
    /// The store failed, or there are too many totals.
    pub async fn usage(&self, query: &UsageQuery) -> Result<Vec<UsageRow>, UsageError> {
        match &self.redis {
            None => self.memory.usage.read(query).ok_or(UsageError::TooMany(query.max_rows)),
            Some((store, _)) => SharedData(store).read_usage(query).await,
        }
    }

    /// Delete the states of an identity for a limit. `state_names` are the key parts of the limit's variants.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn reset(
        &self,
        limit: &LimitSpec,
        identity: Identity,
        state_names: &[&StateName],
    ) -> Result<ResetResult, StoreError> {
        let keys = || state_names.iter().map(|state_name| Key { identity, state_name });
        let mut was_counted = false;
        let Some((store, prefix)) = &self.redis else {
            keys().for_each(|key| was_counted |= self.memory.remove(key.local_hash()));
            return Ok(ResetResult { was_counted, effective_within: Duration::ZERO });
        };
        was_counted |= store.delete_states(identity, state_names).await?;
        // Also delete the states of the local share, which decides in outages.
        for key in keys() {
            self.memory.remove(key.local_hash());
        }
        let hash = overrides::hash_key(prefix);
        let field = reset_field(limit, identity);
        let record = Some(("", RESET_BROADCAST_TTL));
        let broadcast = OverrideWrite { field: &field, known: KnownRevision::default(), record };
        let written = store.write_override(&hash, &broadcast, MAX_OVERRIDES).await;
        let refreshed = self.overrides.refresh(store, &hash).await;
        let effective_within = match (written, refreshed) {
            (Ok((WriteStatus::Written, _)), Ok(())) => MAX_PROPAGATION,
            // If the notification fails, other gateways use their cached denials until they expire.
            _ => MAX_DENIAL_AGE,
        };
        Ok(ResetResult { was_counted, effective_within })
    }

    /// Override the quota of an identity for the duration `ttl`.
    ///
    /// # Errors
    /// The limit does not support the quota, there are too many overrides, or the store failed.
    pub async fn put(
        &self,
        limit: &Arc<LimitSpec>,
        identity: Identity,
        quota: OverrideQuota,
        ttl: Duration,
    ) -> Result<Arc<Override>, AdminError> {
        // Compile the override before sharing it, so that an invalid override is not sent to other gateways.
        let new = self.overrides.compile(limit, identity, quota, ttl)?;
        let Some((store, prefix)) = &self.redis else {
            return self.overrides.put(new).ok_or(AdminError::TooManyOverrides);
        };
        let field = override_field(limit, identity);
        let value = serde_json::to_string(&new.quota).map_err(|_| StoreError::MalformedReply)?;
        match self.write(store, prefix, &field, Some((&value, ttl))).await? {
            WriteStatus::Written => Ok(Arc::new(new)),
            WriteStatus::TooMany | WriteStatus::Unchanged => Err(AdminError::TooManyOverrides),
        }
    }

    /// Remove an override. Return whether the override existed.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn remove(&self, limit: &LimitSpec, identity: Identity) -> Result<bool, StoreError> {
        let Some((store, prefix)) = &self.redis else { return Ok(self.overrides.remove(limit, identity)) };
        let field = override_field(limit, identity);
        Ok(self.write(store, prefix, &field, None).await? == WriteStatus::Written)
    }

    /// Set or remove a record in Redis, and apply the result in this process.
    async fn write(
        &self,
        store: &RedisStore,
        prefix: &str,
        field: &str,
        record: Option<(&str, Duration)>,
    ) -> Result<WriteStatus, StoreError> {
        let asked_at = monotonic();
        let hash = overrides::hash_key(prefix);
        let write = OverrideWrite { field, known: self.overrides.known_revision(field), record };
        let (status, written) = store.write_override(&hash, &write, MAX_OVERRIDES).await?;
        if let Some(written) = written {
            // Apply the record at once. If Redis loses the record before another gateway has read it, only this gateway
            // can write it back.
            self.overrides.apply_snapshot(&written, asked_at, false);
        }
        // Ignore an error of this read, because the next poll reads the records again.
        let _ = self.overrides.refresh(store, &hash).await;
        Ok(status)
    }

    /// Return all active overrides of this gateway, and an error if the store could not be read.
    pub async fn overrides(&self) -> (Vec<Arc<Override>>, Option<StoreError>) {
        let read = match &self.redis {
            Some((store, prefix)) => self.overrides.refresh(store, &overrides::hash_key(prefix)).await,
            None => Ok(()),
        };
        (self.overrides.current().map_or_else(Vec::new, |table| table.all()), read.err())
    }
}
