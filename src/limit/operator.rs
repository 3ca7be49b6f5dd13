//! What an operator asks of limits: where an identity stands, that it starts afresh, that it has another size for a time.

use std::sync::Arc;

use redis::Cmd;
use tokio::time::Duration;

use super::backend::Shared;
use super::clock::monotonic;
use super::denials::LONGEST;
use super::key::{Bucket, Identity, Key};
use super::memory::MemoryStore;
use super::overrides::{EVERYWHERE, MOST, Override, Overrides, Size, reset_field, size_field};
use super::plan::{Limit, Plan};
use super::quota::QuotaError;
use super::redis::records::{self, Known, Written, written};
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
        let charge = [Charge { key, rule: &plan.rule, cost, mode: Mode::Binding, lease: 0, debt_before_us: 0 }];
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
        let told =
            store.aside(slot_of(hash.as_bytes()), &records::set(&hash, &field, "", TOLD, Known::default(), MOST)).await;
        let refreshed = self.overrides.refresh(store, &hash).await;
        let told = told.and_then(|reply| written(reply, &field, ""));
        let everywhere_within = match (told, refreshed) {
            (Ok((Written::Done, _)), Ok(())) => EVERYWHERE,
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
        let command = records::set(&hash, &field, &says, lasts, self.overrides.knows(&field), MOST);
        match self.write(store, &hash, &command, &field, &says).await? {
            Written::Done => Ok(Arc::new(new)),
            Written::TooMany | Written::Nothing => Err(Refused::TooMany),
        }
    }

    /// Send a command that sets or removes a field, and put its result in force.
    async fn write(
        &self,
        store: &Shared,
        hash: &str,
        command: &Cmd,
        field: &str,
        text: &str,
    ) -> Result<Written, StoreError> {
        let asked = monotonic();
        let reply = store.aside(slot_of(hash.as_bytes()), command).await?;
        let (written, record) = written(reply, field, text)?;
        if let Some(record) = record {
            // At once: Redis may lose the record before it is read again.
            self.overrides.take_over(&record, asked, false);
        }
        // If this fails, the next poll reads the rest.
        let _ = self.overrides.refresh(store, hash).await;
        Ok(written)
    }

    /// Ends an override; whether there was one.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn remove(&self, limit: &Limit, identity: Identity) -> Result<bool, StoreError> {
        let Some((store, prefix)) = &self.shared else { return Ok(self.overrides.remove(limit, identity)) };
        let (hash, field) = (records::key(prefix), size_field(limit, identity));
        let command = records::remove(&hash, &field, self.overrides.knows(&field), MOST);
        Ok(self.write(store, &hash, &command, &field, "").await? == Written::Done)
    }

    /// Return all overrides in force on this gateway, and why the store could not be read, if so.
    pub async fn overrides(&self) -> (Vec<Arc<Override>>, Option<StoreError>) {
        let read = match &self.shared {
            Some((store, prefix)) => self.overrides.refresh(store, &records::key(prefix)).await,
            None => Ok(()),
        };
        (self.overrides.current().map_or_else(Vec::new, |table| table.all()), read.err())
    }
}
