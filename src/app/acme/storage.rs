//! Storage of the account, the certificates, and the state of orders: in the storage directory, or in Redis with a copy
//! of the certificates in the directory.

use std::fs::File;
use std::future;
use std::io;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::time::sleep;
use tracing::warn;

use crate::app::acme::TICK;
use crate::app::acme::directory::{Directory, Records};
use crate::app::acme::shared::{LockKeeper, SharedRecords};
use crate::limiter::clock::LogThrottle;
use crate::limiter::verdict::StoreError;
use crate::tls::Certificate;

/// Minimum interval between two messages about shared records that cannot be read.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Time after which all gateways can answer a challenge that one of them has stored.
const SETTLE_TIME: Duration = TICK.saturating_mul(2).saturating_add(Duration::from_millis(500));

/// The reason why a record cannot be stored.
#[derive(Debug, thiserror::Error)]
pub(super) enum StorageError {
    /// The storage directory cannot be written.
    #[error("cannot write to `acme.storage`: {0}")]
    Directory(#[from] io::Error),
    /// A record cannot be encoded.
    #[error("cannot encode a record: {0}")]
    Encode(#[from] serde_json::Error),
    /// The shared store fails.
    #[error("{0}")]
    Store(#[from] StoreError),
    /// Another gateway has acquired the lock. The other gateway continues the order.
    #[error("another gateway took over this order")]
    LockLost,
    /// A shared record is encrypted with another secret.
    #[error("cannot decrypt `{0}` in Redis: is `store.secret` the same on all gateways?")]
    Decrypt(String),
    /// The cryptographic library fails.
    #[error("cannot encrypt a record")]
    Cipher,
}

/// The records of one CA.
#[derive(Debug)]
pub(super) struct Storage {
    directory: Directory,
    /// The lock of the storage directory. A process that has acquired this lock keeps it until it ends. With a shared
    /// store, the lock is not used.
    lock: Option<File>,
    /// The records of all gateways, if there is a shared store.
    shared: Option<SharedRecords>,
    /// All records as they were last read or written.
    records: Records,
    /// Records to write back: records that the shared store has lost, and certificates that are newer than the stored
    /// ones.
    unshared: Vec<String>,
}

/// Failed attempts to obtain the certificate of one name.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Attempts {
    /// Number of attempts that failed since the last success.
    pub(super) failures: u32,
    /// Time of the next attempt, seconds since the Unix epoch.
    pub(super) retry_at_s: u64,
    /// The reason why the last attempt failed.
    pub(super) error: String,
}

/// An order that has been placed and has not led to a certificate yet.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct PendingOrder {
    /// URL of the ACME order at the CA.
    pub(super) url: String,
    /// Private key for the certificate, PEM.
    pub(super) key: String,
}

/// A challenge that the CA may be validating.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct StoredChallenge {
    /// `http-01` or `tls-alpn-01`.
    pub(super) kind: String,
    /// The token of the CA.
    pub(super) token: String,
    /// The value with which the gateway proves that it controls the name (RFC 8555 §8.1).
    pub(super) key_authorization: String,
}

/// The renewal information of a certificate (RFC 9773).
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct RenewalRecord {
    /// SHA-256 of the certificate in hexadecimal digits.
    pub(super) fingerprint: String,
    /// Start and end of the renewal window, in seconds since the Unix epoch. `None` if the CA suggests no window.
    pub(super) window: Option<(u64, u64)>,
    /// Time at which the information must be read again, in seconds since the Unix epoch.
    pub(super) next_read_s: u64,
    /// Number of failed reads since the last success.
    #[serde(default)]
    pub(super) failures: u32,
}

/// File name of the account.
pub(super) const ACCOUNT: &str = "account.json";

/// Suffixes of the file names of the records of a name.
const CERTIFICATE: &str = ".pem";
const ORDER: &str = ".order.json";
const ATTEMPTS: &str = ".attempts.json";
const CHALLENGE: &str = ".challenge.json";
const RENEWAL: &str = ".renewal.json";

/// Return the record with the certificate of a name: its private key and its chain, PEM.
pub(super) fn certificate_record(name: &str) -> String {
    format!("{name}{CERTIFICATE}")
}

/// Return the record with the [`PendingOrder`] of a name.
pub(super) fn order_record(name: &str) -> String {
    format!("{name}{ORDER}")
}

/// Return the record with the [`Attempts`] of a name.
pub(super) fn attempts_record(name: &str) -> String {
    format!("{name}{ATTEMPTS}")
}

/// Return the record with the [`StoredChallenge`] of a name.
pub(super) fn challenge_record(name: &str) -> String {
    format!("{name}{CHALLENGE}")
}

/// Return the record with the [`RenewalRecord`] of a name.
pub(super) fn renewal_record(name: &str) -> String {
    format!("{name}{RENEWAL}")
}

impl Storage {
    /// Read all records of the directory.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub(super) fn open(directory: Directory) -> io::Result<Self> {
        let records = directory.read_all()?;
        Ok(Storage { directory, lock: None, shared: None, records, unshared: Vec::new() })
    }

    /// Share the records with other gateways through the store. From now on, only the certificates are used from the
    /// records in the directory.
    pub(super) fn share(&mut self, shared: SharedRecords) {
        self.shared = Some(shared);
        self.records.retain(|record, _| record.ends_with(CERTIFICATE));
    }

    /// Read the records that other processes have written, and write back the certificates that a shared store has
    /// lost.
    pub(super) async fn sync(&mut self) {
        static LOG_THROTTLE: LogThrottle = LogThrottle::new();
        if let Err(error) = self.try_sync().await
            && LOG_THROTTLE.should_log(LOG_INTERVAL)
        {
            let directory = self.directory.path().display();
            warn!(%directory, %error, "cannot read the shared ACME records: active certificates stay in use, and no \
                                       certificate is renewed");
        }
    }

    async fn try_sync(&mut self) -> Result<(), StorageError> {
        self.read().await?;
        if !self.unshared.is_empty() && self.lock().await? {
            for record in self.unshared.clone() {
                if let Some(content) = self.records.get(&record).cloned() {
                    self.put(&record, content).await?;
                }
                self.unshared.retain(|other| *other != record);
            }
            self.unlock().await;
        }
        Ok(())
    }

    async fn read(&mut self) -> Result<(), StorageError> {
        let Some(shared) = &mut self.shared else {
            // Read nothing while this process holds the lock, because no other process writes then.
            if self.lock.is_none() {
                self.records = self.directory.read_all()?;
            }
            return Ok(());
        };
        let Some(mut read) = shared.read().await? else { return Ok(()) };
        self.unshared.clear();
        let has_lost_all = read.is_empty();
        let mut copied = Records::new();
        for (record, content) in std::mem::take(&mut self.records) {
            let is_certificate = record.ends_with(CERTIFICATE);
            // An empty result means that Redis has lost all records, including the account.
            let is_lost = has_lost_all && record == ACCOUNT;
            if is_lost || is_certificate && read.get(&record).is_none_or(|other| is_older(other, &content)) {
                self.unshared.push(record.clone());
                read.insert(record, content);
            } else if is_certificate {
                copied.insert(record, content);
            }
        }
        for (record, content) in read.iter().filter(|(record, _)| record.ends_with(CERTIFICATE)) {
            if copied.get(record) != Some(content) && !self.unshared.contains(record) {
                self.directory.keep_copy(record, content);
            }
        }
        self.records = read;
        Ok(())
    }

    /// Acquire the lock, which is required to place orders. Return whether this process holds it.
    ///
    /// # Errors
    /// The lock cannot be acquired, or the records cannot be read.
    pub(super) async fn lock(&mut self) -> Result<bool, StorageError> {
        let is_locked = match &mut self.shared {
            Some(shared) => shared.lock().await?,
            None if self.lock.is_some() => return Ok(true),
            None => {
                let lock = self.directory.try_lock()?;
                // Read the records again, because another process may have written them since the last read.
                self.records = self.directory.read_all()?;
                self.lock = lock;
                return Ok(self.lock.is_some());
            }
        };
        if is_locked && let Err(error) = self.read().await {
            self.unlock().await;
            return Err(error);
        }
        Ok(is_locked)
    }

    /// Release the lock of the shared store. The lock of the directory is kept.
    pub(super) async fn unlock(&mut self) {
        if let Some(shared) = &mut self.shared {
            shared.unlock().await;
        }
    }

    /// Renew the lock until the future is dropped.
    pub(super) fn keep_lock(&self) -> impl Future<Output = ()> + use<> {
        let keeper: Option<LockKeeper> = self.shared.as_ref().map(SharedRecords::keeper);
        async move {
            match keeper {
                Some(keeper) => keeper.run().await,
                None => future::pending().await,
            }
        }
    }

    /// If gateways share the records, wait until all gateways have read the last change.
    pub(super) async fn settle(&self) {
        if self.shared.is_some() {
            sleep(SETTLE_TIME).await;
        }
    }

    /// Return the content of a record, if the record exists.
    pub(super) fn get(&self, record: &str) -> Option<&[u8]> {
        self.records.get(record).map(Vec::as_slice)
    }

    /// Return a record in JSON. Malformed records count as missing.
    pub(super) fn get_json<T: DeserializeOwned>(&self, record: &str) -> Option<T> {
        serde_json::from_slice(self.get(record)?).ok()
    }

    /// Return the names with a pending challenge, and the challenges.
    pub(super) fn challenges(&self) -> impl Iterator<Item = (&str, StoredChallenge)> {
        self.records.iter().filter_map(|(record, content)| {
            Some((record.strip_suffix(CHALLENGE)?, serde_json::from_slice(content).ok()?))
        })
    }

    /// Write a record. With a shared store, also copy a certificate to the directory, even if the store cannot be
    /// reached: the gateway then uses the local copy. Do not copy the certificate if another gateway has acquired the
    /// lock.
    ///
    /// # Errors
    /// The record cannot be written, or another gateway has acquired the lock.
    pub(super) async fn put(&mut self, record: &str, content: Vec<u8>) -> Result<(), StorageError> {
        let Some(shared) = &mut self.shared else {
            self.directory.write(record, &content)?;
            self.records.insert(record.to_owned(), content);
            return Ok(());
        };
        let result = shared.write(record, Some(&content)).await;
        let is_certificate = record.ends_with(CERTIFICATE);
        let is_unshared = is_certificate && matches!(result, Err(StorageError::Store(_)));
        if is_unshared && !self.unshared.iter().any(|other| other == record) {
            self.unshared.push(record.to_owned());
        }
        if is_certificate && (result.is_ok() || is_unshared) {
            self.directory.keep_copy(record, &content);
        }
        if result.is_ok() || is_unshared {
            self.records.insert(record.to_owned(), content);
        }
        result
    }

    /// Write a record in JSON.
    ///
    /// # Errors
    /// The errors of [`Storage::put`].
    pub(super) async fn put_json(&mut self, record: &str, content: &impl Serialize) -> Result<(), StorageError> {
        self.put(record, serde_json::to_vec(content)?).await
    }

    /// Remove a record.
    ///
    /// # Errors
    /// The record cannot be removed, or another gateway has acquired the lock.
    pub(super) async fn remove(&mut self, record: &str) -> Result<(), StorageError> {
        if !self.records.contains_key(record) {
            return Ok(());
        }
        match &mut self.shared {
            Some(shared) => shared.write(record, None).await?,
            None => self.directory.remove(record)?,
        }
        self.records.remove(record);
        Ok(())
    }
}

/// Return whether the certificate in `one` was issued before the certificate in `other`. Unusable certificates count as
/// the oldest.
fn is_older(one: &[u8], other: &[u8]) -> bool {
    let issued_s = |pem: &[u8]| Certificate::from_pem(pem, pem).map_or(i64::MIN, |found| found.validity_s().0);
    issued_s(one) < issued_s(other)
}
