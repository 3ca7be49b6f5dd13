//! The account, the certificates, and the state of orders: in the storage directory.

use std::fs::File;
use std::io;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tracing::warn;

use crate::app::acme::directory::{Directory, Records};

/// Why a record cannot be stored.
#[derive(Debug, thiserror::Error)]
pub(super) enum StorageError {
    /// The storage directory cannot be written.
    #[error("cannot write to `acme.storage`: {0}")]
    Directory(#[from] io::Error),
    /// A record cannot be encoded.
    #[error("cannot encode a record: {0}")]
    Encode(#[from] serde_json::Error),
}

/// The records of one CA.
#[derive(Debug)]
pub(super) struct Storage {
    directory: Directory,
    /// The lock of the directory, which this process keeps once it has it.
    lock: Option<File>,
    records: Records,
}

/// Failed attempts to obtain the certificate of one name.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Attempts {
    /// Number of attempts that failed since the last success.
    pub(super) failures: u32,
    /// Time of the next attempt, seconds since the Unix epoch.
    pub(super) retry_at_s: u64,
    /// Why the last attempt failed.
    pub(super) error: String,
}

/// An order that has been placed and has not led to a certificate yet.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct PendingOrder {
    /// URL of the order.
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
    /// The response to the token.
    pub(super) key_authorization: String,
}

/// File name of the account.
pub(super) const ACCOUNT: &str = "account.json";

/// Suffixes of the file names of the records of a name.
const CERTIFICATE: &str = ".pem";
const ORDER: &str = ".order.json";
const ATTEMPTS: &str = ".attempts.json";
const CHALLENGE: &str = ".challenge.json";

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

impl Storage {
    /// Read all records.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub(super) fn open(directory: Directory) -> io::Result<Self> {
        let records = directory.read_all()?;
        Ok(Storage { directory, lock: None, records })
    }

    /// Read what another process may have written. Return whether there are changes.
    pub(super) fn sync(&mut self) -> bool {
        // With the lock, this process is the only one that writes.
        if self.lock.is_some() {
            return false;
        }
        match self.directory.read_all() {
            Ok(records) if records == self.records => false,
            Ok(records) => {
                self.records = records;
                true
            }
            Err(error) => {
                warn!(directory = %self.directory.path().display(), %error, "cannot read acme.storage");
                false
            }
        }
    }

    /// Take the lock, which permits to place orders. Return whether this process has it.
    ///
    /// # Errors
    /// The directory cannot be locked or read.
    pub(super) fn lock(&mut self) -> Result<bool, StorageError> {
        if self.lock.is_none() {
            self.lock = self.directory.try_lock()?;
            // Another process may have written since the last look.
            self.records = self.directory.read_all()?;
        }
        Ok(self.lock.is_some())
    }

    /// Return a record.
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

    /// Write a record.
    ///
    /// # Errors
    /// It cannot be written.
    pub(super) fn put(&mut self, record: &str, content: Vec<u8>) -> Result<(), StorageError> {
        self.directory.write(record, &content)?;
        self.records.insert(record.to_owned(), content);
        Ok(())
    }

    /// Write a record in JSON.
    ///
    /// # Errors
    /// It cannot be written.
    pub(super) fn put_json(&mut self, record: &str, content: &impl Serialize) -> Result<(), StorageError> {
        self.put(record, serde_json::to_vec(content)?)
    }

    /// Remove a record.
    ///
    /// # Errors
    /// It cannot be removed.
    pub(super) fn remove(&mut self, record: &str) -> Result<(), StorageError> {
        self.directory.remove(record)?;
        self.records.remove(record);
        Ok(())
    }
}
