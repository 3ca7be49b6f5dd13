//! Administration of limits: show the usage of an identity, reset it, and override its quota.

use std::sync::Arc;
use std::time::Duration;

use redis::Cmd;

use crate::limiter::clock::monotonic;
use crate::limiter::denial_cache::MAX_DENIAL_AGE;
use crate::limiter::key::{Identity, Key, StateName};
use crate::limiter::memory::MemoryStore;
use crate::limiter::overrides::{
    MAX_OVERRIDES, MAX_PROPAGATION, Override, OverrideQuota, Overrides, override_field, reset_field,
};
use crate::limiter::quota::QuotaError;
use crate::limiter::redis::cluster::topology::{identity_slot, key_slot};
use crate::limiter::redis::overrides;
use crate::limiter::redis::overrides::{KnownRevision, WriteStatus, parse_write_reply};
use crate::limiter::spec::{LimitSpec, LimitVariant};
use crate::limiter::store::RedisStore;
use crate::limiter::verdict::{Charge, ChargeMode, Operation, StoreError, Verdict};

/// A reset is told to the other gateways for so long: none of them polls less often.
const RESET_BROADCAST_TTL: Duration = Duration::from_secs(5);

/// Where an operator finds the states of identities.
#[derive(Debug)]
pub struct LimiterAdmin {
    /// The states of this process: all, or the local shares.
    pub memory: Arc<MemoryStore>,
    /// Those that all gateways share, and the first part of their keys.
    pub redis: Option<(RedisStore, String)>,
    /// What was decided about single identities.
    pub overrides: Arc<Overrides>,
}

/// What a reset did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResetResult {
    /// Whether anything was counted.
    pub was_counted: bool,
    /// Within this time no gateway denies by what it remembers.
    pub effective_within: Duration,
}

/// Why something is not done.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    /// The store did not answer.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The quota is invalid, or the limit does not support it.
    #[error(transparent)]
    Quota(#[from] QuotaError),
    /// There are [`MAX_OVERRIDES`] other overrides.
    #[error(
        "there are {MAX_OVERRIDES} overrides, which is as many as there may be; remove one, or wait until one is over"
    )]
    TooManyOverrides,
}

impl LimiterAdmin {
    /// What a request of `cost` units would be told by a limit in this size; nothing is charged.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn peek(&self, variant: &LimitVariant, identity: Identity, cost: u64) -> Result<Verdict, StoreError> {
        let key = Key { identity, state_name: &variant.state_name };
        let charge =
            [Charge { key, rule: &variant.rule, cost, mode: ChargeMode::Enforced, permit_id: 0, debt_before_us: 0 }];
        match &self.redis {
            None => Ok(self.memory.decide(Operation::Peek, &charge)),
            Some((store, _)) => store.call(monotonic() + store.timeout(), Operation::Peek, &charge).await,
        }
    }

    /// Forgets what an identity has used of a limit, in whichever of its sizes.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn reset(
        &self,
        limit: &LimitSpec,
        identity: Identity,
        state_names: &[&StateName],
    ) -> Result<ResetResult, StoreError> {
        let keys = || state_names.iter().map(|bucket| Key { identity, state_name: bucket });
        let mut was_counted = false;
        let Some((store, prefix)) = &self.redis else {
            keys().for_each(|key| was_counted |= self.memory.remove(key.local_hash()));
            return Ok(ResetResult { was_counted, effective_within: Duration::ZERO });
        };
        for key in keys() {
            let mut name = Vec::new();
            key.write(prefix, &mut name);
            // Repeating it would be harmless; the caller may retry.
            let deleted = store.admin_command(identity_slot(identity), redis::cmd("DEL").arg(name)).await?;
            was_counted |= deleted == redis::Value::Int(1);
            // The share of an outage.
            self.memory.remove(key.local_hash());
        }
        let (hash, field) = (overrides::hash_key(prefix), reset_field(limit, identity));
        let broadcast = store
            .admin_command(
                key_slot(hash.as_bytes()),
                &overrides::set_command(
                    &hash,
                    &field,
                    "",
                    RESET_BROADCAST_TTL,
                    KnownRevision::default(),
                    MAX_OVERRIDES,
                ),
            )
            .await;
        let refreshed = self.overrides.refresh(store, &hash).await;
        let told = broadcast.and_then(|reply| parse_write_reply(reply, &field, ""));
        let effective_within = match (told, refreshed) {
            (Ok((WriteStatus::Written, _)), Ok(())) => MAX_PROPAGATION,
            // They find out when what they remember is over.
            _ => MAX_DENIAL_AGE,
        };
        Ok(ResetResult { was_counted, effective_within })
    }

    /// Gives an identity another size for this time.
    ///
    /// # Errors
    /// The limit cannot have the size, there are too many, or the store does not answer.
    pub async fn put(
        &self,
        limit: &Arc<LimitSpec>,
        identity: Identity,
        quota: OverrideQuota,
        ttl: Duration,
    ) -> Result<Arc<Override>, AdminError> {
        // Before anybody is told: the others will do the same.
        let new = self.overrides.compile(limit, identity, quota, ttl)?;
        let Some((store, prefix)) = &self.redis else {
            return self.overrides.put(new).ok_or(AdminError::TooManyOverrides);
        };
        let (hash, field) = (overrides::hash_key(prefix), override_field(limit, identity));
        let value = serde_json::to_string(&new.quota).map_err(|_| StoreError::MalformedReply)?;
        let command =
            overrides::set_command(&hash, &field, &value, ttl, self.overrides.known_revision(&field), MAX_OVERRIDES);
        match self.write(store, &hash, &command, &field, &value).await? {
            WriteStatus::Written => Ok(Arc::new(new)),
            WriteStatus::TooMany | WriteStatus::Unchanged => Err(AdminError::TooManyOverrides),
        }
    }

    /// Send a command that sets or removes a field, and put its result in force.
    async fn write(
        &self,
        store: &RedisStore,
        hash: &str,
        command: &Cmd,
        field: &str,
        text: &str,
    ) -> Result<WriteStatus, StoreError> {
        let asked_at = monotonic();
        let reply = store.admin_command(key_slot(hash.as_bytes()), command).await?;
        let (written, record) = parse_write_reply(reply, field, text)?;
        if let Some(record) = record {
            // At once: Redis may lose the record before it is read again.
            self.overrides.apply_snapshot(&record, asked_at, false);
        }
        // If this fails, the next poll reads the rest.
        let _ = self.overrides.refresh(store, hash).await;
        Ok(written)
    }

    /// Ends an override; whether there was one.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn remove(&self, limit: &LimitSpec, identity: Identity) -> Result<bool, StoreError> {
        let Some((store, prefix)) = &self.redis else { return Ok(self.overrides.remove(limit, identity)) };
        let (hash, field) = (overrides::hash_key(prefix), override_field(limit, identity));
        let command = overrides::remove_command(&hash, &field, self.overrides.known_revision(&field), MAX_OVERRIDES);
        Ok(self.write(store, &hash, &command, &field, "").await? == WriteStatus::Written)
    }

    /// Return all overrides in force on this gateway, and why the store could not be read, if so.
    pub async fn overrides(&self) -> (Vec<Arc<Override>>, Option<StoreError>) {
        let read = match &self.redis {
            Some((store, prefix)) => self.overrides.refresh(store, &overrides::hash_key(prefix)).await,
            None => Ok(()),
        };
        (self.overrides.current().map_or_else(Vec::new, |table| table.all()), read.err())
    }
}
