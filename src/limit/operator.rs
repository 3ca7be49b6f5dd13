//! What an operator asks of limits: where an identity stands, that it starts afresh, that it has another size for a time.

use std::sync::Arc;

use tokio::time::Duration;

use super::backend::Shared;
use super::denials::LONGEST;
use super::key::{Bucket, Identity, Key};
use super::memory::MemoryStore;
use super::overrides::{EVERYWHERE, MOST, Override, Overrides, Size, reset_field, size_field};
use super::plan::{Limit, Plan};
use super::quota::QuotaError;
use super::redis::records::{self, Written, written};
use super::redis::slots::{slot, slot_of};
use super::store::{Charge, Mode, Operation, StoreError, Verdict};

/// A reset is told to the other gateways for so long: none of them polls less often.
const TOLD: Duration = Duration::from_secs(5);

/// Where an operator finds the states of identities.
#[derive(Debug)]
pub struct Operator {
    /// The states of this process: all, or the local shares.
    pub memory: Arc<MemoryStore>,
    /// Those that all gateways share, and the first part of their keys.
    pub shared: Option<(Shared, String)>,
    /// What was decided about single identities.
    pub overrides: Arc<Overrides>,
}

/// What a reset did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reset {
    /// Whether anything was counted.
    pub was_counted: bool,
    /// Within this time no gateway denies by what it remembers.
    pub everywhere_within: Duration,
}

/// Why something is not done.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum Refused {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Quota(#[from] QuotaError),
    #[error("there are {MOST} overrides, which is as many as there may be; remove one, or wait until one is over")]
    TooMany,
}

impl Operator {
    /// What a request of `cost` units would be told by a limit in this size; nothing is charged.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn peek(&self, plan: &Plan, identity: Identity, cost: u64) -> Result<Verdict, StoreError> {
        let key = Key { identity, bucket: &plan.bucket };
        let charge = [Charge { key, rule: &plan.rule, cost, mode: Mode::Binding, lease: 0 }];
        match &self.shared {
            None => Ok(self.memory.decide(Operation::Peek, &charge)),
            Some((store, _)) => store.call(Operation::Peek, &charge).await,
        }
    }

    /// Forgets what an identity has used of a limit, in whichever of its sizes.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn reset(&self, limit: &Limit, identity: Identity, buckets: &[&Bucket]) -> Result<Reset, StoreError> {
        let keys = || buckets.iter().map(|bucket| Key { identity, bucket });
        let mut was_counted = false;
        let Some((store, prefix)) = &self.shared else {
            keys().for_each(|key| was_counted |= self.memory.forget(key.local()));
            return Ok(Reset { was_counted, everywhere_within: Duration::ZERO });
        };
        for key in keys() {
            let mut name = Vec::new();
            key.write(prefix, &mut name);
            // Made again it would do no harm, but whoever asks sees to that.
            let deleted = store.aside(slot(identity), redis::cmd("DEL").arg(name)).await?;
            was_counted |= deleted == redis::Value::Int(1);
            // The share of an outage.
            self.memory.forget(key.local());
        }
        let (hash, field) = (records::key(prefix), reset_field(limit, identity));
        let told = store.aside(slot_of(hash.as_bytes()), &records::write(&hash, &field, "", TOLD, MOST)).await;
        let refreshed = self.overrides.refresh(store, &hash).await;
        let everywhere_within = match (told.and_then(|reply| written(&reply)), refreshed) {
            (Ok(Written::Done), Ok(())) => EVERYWHERE,
            // They find out when what they remember is over.
            _ => LONGEST,
        };
        Ok(Reset { was_counted, everywhere_within })
    }

    /// Gives an identity another size for this time.
    ///
    /// # Errors
    /// The limit cannot have the size, there are too many, or the store does not answer.
    pub async fn put(
        &self,
        limit: &Arc<Limit>,
        identity: Identity,
        size: Size,
        lasts: Duration,
    ) -> Result<Arc<Override>, Refused> {
        // Before anybody is told: the others will do the same.
        let new = self.overrides.compile(limit, identity, size, lasts)?;
        let Some((store, prefix)) = &self.shared else {
            return self.overrides.put(new).ok_or(Refused::TooMany);
        };
        let (hash, field) = (records::key(prefix), size_field(limit, identity));
        let says = serde_json::to_string(&new.size).map_err(|_| StoreError::Malformed)?;
        let reply = store.aside(slot_of(hash.as_bytes()), &records::write(&hash, &field, &says, lasts, MOST)).await?;
        match written(&reply)? {
            Written::Done => {}
            Written::TooMany | Written::Nothing => return Err(Refused::TooMany),
        }
        // If that fails, this gateway follows like all others.
        let _ = self.overrides.refresh(store, &hash).await;
        Ok(Arc::new(new))
    }

    /// Ends an override; whether there was one.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn remove(&self, limit: &Limit, identity: Identity) -> Result<bool, StoreError> {
        let Some((store, prefix)) = &self.shared else { return Ok(self.overrides.remove(limit, identity)) };
        let hash = records::key(prefix);
        let command = records::remove(&hash, &size_field(limit, identity));
        let reply = store.aside(slot_of(hash.as_bytes()), &command).await?;
        let removed = written(&reply)? == Written::Done;
        let _ = self.overrides.refresh(store, &hash).await;
        Ok(removed)
    }

    /// All that are in force, as the store has them now.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn overrides(&self) -> Result<Vec<Arc<Override>>, StoreError> {
        if let Some((store, prefix)) = &self.shared {
            self.overrides.refresh(store, &records::key(prefix)).await?;
        }
        Ok(self.overrides.current().map_or_else(Vec::new, |table| table.all()))
    }
}
