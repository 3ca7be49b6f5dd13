//! The records that all gateways with the same Redis store share: encrypted fields of one hash, protected by a lock.

use std::time::Duration;

use tokio::time::sleep;
use tracing::debug;
use uuid::Uuid;

use crate::app::acme::cipher::Cipher;
use crate::app::acme::directory::Records;
use crate::app::acme::storage::StorageError;
use crate::limiter::store::RedisStore;

/// Time after which another gateway may acquire the lock of a gateway that has ended.
const LOCK_TTL: Duration = Duration::from_secs(10);

/// Interval in which the holder of the lock renews the lock.
const RENEW_INTERVAL: Duration = Duration::from_secs(3);

/// The shared records of one CA.
#[derive(Debug)]
pub(super) struct SharedRecords {
    keeper: LockKeeper,
    cipher: Cipher,
    /// Version of the records that were read last. 0: no records were read.
    version: u64,
    /// Fencing token of the lock. `None` if this gateway does not hold the lock.
    token: Option<u64>,
}

/// Acquires and renews the lock of the records of one CA.
#[derive(Debug, Clone)]
pub(super) struct LockKeeper {
    store: RedisStore,
    /// Redis key of the hash that contains the records and the lock.
    key: String,
    /// Name of this process as the owner of the lock.
    owner: String,
}

impl LockKeeper {
    async fn lock(&self) -> Result<Option<u64>, StorageError> {
        Ok(self.store.lock_fenced(&self.key, &self.owner, LOCK_TTL).await?)
    }

    /// Renew the lock until the future is dropped. If another gateway has acquired the lock, writes fail.
    pub(super) async fn run(&self) {
        loop {
            sleep(RENEW_INTERVAL).await;
            if let Err(error) = self.lock().await {
                debug!(%error, "cannot renew the lock for ACME orders");
            }
        }
    }
}

impl SharedRecords {
    /// Use the records in the hash at `key`.
    ///
    /// # Errors
    /// The key for encryption cannot be derived.
    pub(super) fn new(store: RedisStore, key: String, secret: &[u8]) -> Result<Self, StorageError> {
        let cipher = Cipher::new(secret).map_err(|_| StorageError::Cipher)?;
        let keeper = LockKeeper { store, key, owner: Uuid::new_v4().to_string() };
        Ok(SharedRecords { keeper, cipher, version: 0, token: None })
    }

    /// Return the future that renews the lock.
    pub(super) fn keeper(&self) -> LockKeeper {
        self.keeper.clone()
    }

    /// Return all records, if they have changed since the last call.
    ///
    /// # Errors
    /// The store cannot be read, or a record is encrypted with another secret.
    pub(super) async fn read(&mut self) -> Result<Option<Records>, StorageError> {
        let (version, fields) = self.keeper.store.read_fenced(&self.keeper.key, self.version).await?;
        let Some(fields) = fields else { return Ok(None) };
        let decrypt = |(name, value): (String, Vec<u8>)| {
            let content = self.cipher.decrypt(&name, &value);
            content.map_err(|_| StorageError::Decrypt(name.clone())).map(|content| (name, content))
        };
        let records = fields.into_iter().map(decrypt).collect::<Result<_, _>>()?;
        self.version = version;
        Ok(Some(records))
    }

    /// Acquire the lock. Return whether this gateway holds it.
    ///
    /// # Errors
    /// The store cannot be reached.
    pub(super) async fn lock(&mut self) -> Result<bool, StorageError> {
        self.token = self.keeper.lock().await?;
        Ok(self.token.is_some())
    }

    /// Release the lock. If the store cannot be reached, the lock expires.
    pub(super) async fn unlock(&mut self) {
        if let Some(token) = self.token.take()
            && let Err(error) = self.keeper.store.unlock_fenced(&self.keeper.key, token).await
        {
            debug!(%error, "cannot release the lock for ACME orders");
        }
    }

    /// Write a record, or remove it.
    ///
    /// # Errors
    /// The store cannot be reached, or another gateway has acquired the lock.
    pub(super) async fn write(&mut self, name: &str, content: Option<&[u8]>) -> Result<(), StorageError> {
        let token = self.token.ok_or(StorageError::LockLost)?;
        let encrypted = content.map(|content| self.cipher.encrypt(name, content).map_err(|_| StorageError::Cipher));
        let encrypted = encrypted.transpose()?.unwrap_or_default();
        match self.keeper.store.write_fenced(&self.keeper.key, token, name, &encrypted).await? {
            true => Ok(()),
            false => Err(StorageError::LockLost),
        }
    }
}
