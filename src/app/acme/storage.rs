//! Storage of the account, the certificates and the state of orders. The records are in the storage directory, or in
//! Redis. If they are in Redis, the directory has a copy of the certificates.

use std::collections::BTreeMap;
use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::future;
use std::io;
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use aws_lc_rs::aead::{AES_256_GCM, Aad, NONCE_LEN, Nonce, RandomizedNonceKey};
use aws_lc_rs::error::Unspecified;
use aws_lc_rs::hkdf::{HKDF_SHA256, KeyType, Salt};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::time::sleep;
use tracing::{debug, warn};
use uuid::Uuid;

use crate::app::acme::TICK;
use crate::clock::LogThrottle;
use crate::http::url::HttpUrl;
use crate::limiter::shared_data::SharedData;
use crate::limiter::store::RedisStore;
use crate::limiter::verdict::StoreError;
use crate::tls::Certificate;

/// Minimum interval between two log messages about shared records that cannot be read.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Time after which all gateways have read a challenge that one of them stored, and can respond to it.
const SETTLE_TIME: Duration = TICK.saturating_mul(2).saturating_add(Duration::from_millis(500));

/// The reason why a record cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub(super) enum StorageError {
    /// The storage directory cannot be read or written.
    #[error("cannot write to `acme.storage`: {0}")]
    Directory(#[from] io::Error),
    /// A record cannot be encoded.
    #[error("cannot encode a record: {0}")]
    Encode(#[from] serde_json::Error),
    /// The call to the shared store failed.
    #[error("{0}")]
    Store(#[from] StoreError),
    /// Another gateway has acquired the lock and continues the order.
    #[error("another gateway took over this order")]
    LockLost,
    /// A shared record was encrypted with another secret.
    #[error("cannot decrypt `{0}` in Redis: is `store.secret` the same on all gateways?")]
    Decrypt(String),
    /// The cryptographic library failed.
    #[error("cannot encrypt a record")]
    Cipher,
}

/// The records of one CA.
#[derive(Debug)]
pub(super) struct Storage {
    directory: Directory,
    /// The lock of the storage directory. A process that has acquired this lock keeps it until the process ends. `None`
    /// if this process does not hold the lock, or if the store is shared.
    lock: Option<File>,
    /// The records in Redis, which all gateways share. `None` without a shared store.
    shared: Option<SharedRecords>,
    /// The contents of all records at the time when they were last read or written.
    records: Records,
    /// Names of records to write back to the shared store: records that it has lost, and certificates that are newer
    /// than the shared ones.
    unshared: Vec<String>,
}

/// Failed attempts to obtain the certificate for one name.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Attempts {
    /// Number of failed attempts since the last success.
    pub(super) failures: u32,
    /// Time of the next attempt in seconds since the Unix epoch.
    pub(super) retry_at_s: u64,
    /// The reason why the last attempt failed.
    pub(super) error: String,
}

/// An order that has been placed, but for which no certificate has been issued yet.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct PendingOrder {
    /// URL of the order at the CA.
    pub(super) url: String,
    /// Private key of the certificate, in PEM.
    pub(super) key: String,
}

/// A challenge that the CA may be validating.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct StoredChallenge {
    /// `http-01` or `tls-alpn-01`.
    pub(super) kind: String,
    /// Token that the CA chose for this challenge.
    pub(super) token: String,
    /// Key authorization, which proves that the gateway controls the name (RFC 8555 §8.1).
    pub(super) key_authorization: String,
}

/// The renewal information of a certificate (RFC 9773).
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct RenewalRecord {
    /// SHA-256 hash of the certificate in hexadecimal.
    pub(super) fingerprint: String,
    /// Start and end of the renewal window in seconds since the Unix epoch. `None` if the CA suggests no window.
    pub(super) window: Option<(u64, u64)>,
    /// Time at which the information must be read again, in seconds since the Unix epoch.
    pub(super) next_read_s: u64,
    /// Number of failed reads since the last success.
    #[serde(default)]
    pub(super) failures: u32,
}

/// Name of the account's record.
pub(super) const ACCOUNT: &str = "account.json";

/// Suffixes of the records for a DNS name.
const CERTIFICATE: &str = ".pem";
const ORDER: &str = ".order.json";
const ATTEMPTS: &str = ".attempts.json";
const CHALLENGE: &str = ".challenge.json";
const RENEWAL: &str = ".renewal.json";

/// Return the name of the record with the certificate for a DNS name: its private key and its chain, in PEM.
pub(super) fn certificate_record(name: &str) -> String {
    format!("{name}{CERTIFICATE}")
}

/// Return the name of the record with the [`PendingOrder`] for a DNS name.
pub(super) fn order_record(name: &str) -> String {
    format!("{name}{ORDER}")
}

/// Return the name of the record with the [`Attempts`] for a DNS name.
pub(super) fn attempts_record(name: &str) -> String {
    format!("{name}{ATTEMPTS}")
}

/// Return the name of the record with the [`StoredChallenge`] for a DNS name.
pub(super) fn challenge_record(name: &str) -> String {
    format!("{name}{CHALLENGE}")
}

/// Return the name of the record with the [`RenewalRecord`] for a DNS name.
pub(super) fn renewal_record(name: &str) -> String {
    format!("{name}{RENEWAL}")
}

impl Storage {
    /// Open the storage, and read all records in the directory.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub(super) fn open(directory: Directory) -> io::Result<Self> {
        let records = directory.read_all()?;
        Ok(Storage { directory, lock: None, shared: None, records, unshared: Vec::new() })
    }

    /// Share the records with other gateways through Redis. After this call, certificates are the only records from the
    /// directory that are used.
    pub(super) fn share(&mut self, shared: SharedRecords) {
        self.shared = Some(shared);
        self.records.retain(|record, _| record.ends_with(CERTIFICATE));
    }

    /// Read the records that other processes wrote. Write back the records that the shared store has lost.
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
            // While this process holds the lock, no other process writes, so there is nothing to read.
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
            // If Redis returns no records, it has lost all of them. In this case, also write back the account.
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

    /// Acquire the lock, which is required to place orders. Return whether this process holds the lock.
    ///
    /// # Errors
    /// The lock cannot be acquired, or the records cannot be read.
    pub(super) async fn lock(&mut self) -> Result<bool, StorageError> {
        let is_locked = match &mut self.shared {
            Some(shared) => shared.lock().await?,
            None if self.lock.is_some() => return Ok(true),
            None => {
                let lock = self.directory.try_lock()?;
                // Another process may have written records since the last read, so read them again.
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

    /// Return a future that renews the lock until it is dropped.
    pub(super) fn keep_lock(&self) -> impl Future<Output = ()> + use<> {
        let keeper: Option<LockKeeper> = self.shared.as_ref().map(SharedRecords::keeper);
        async move {
            match keeper {
                Some(keeper) => keeper.run().await,
                None => future::pending().await,
            }
        }
    }

    /// With a shared store, wait for [`SETTLE_TIME`], so that all gateways read the last change. Otherwise, return
    /// immediately.
    pub(super) async fn settle(&self) {
        if self.shared.is_some() {
            sleep(SETTLE_TIME).await;
        }
    }

    /// Return the content of a record, or `None` if it does not exist.
    pub(super) fn get(&self, record: &str) -> Option<&[u8]> {
        self.records.get(record).map(Vec::as_slice)
    }

    /// Return the content of a JSON record. A malformed record counts as missing.
    pub(super) fn get_json<T: DeserializeOwned>(&self, record: &str) -> Option<T> {
        serde_json::from_slice(self.get(record)?).ok()
    }

    /// Return the names that have a pending challenge, with their challenges.
    pub(super) fn challenges(&self) -> impl Iterator<Item = (&str, StoredChallenge)> {
        self.records.iter().filter_map(|(record, content)| {
            Some((record.strip_suffix(CHALLENGE)?, serde_json::from_slice(content).ok()?))
        })
    }

    /// Write a record. With a shared store, a certificate is also copied to the directory. The copy is written even if
    /// the store cannot be reached, so that this gateway can use the certificate. It is not written if another gateway
    /// has acquired the lock.
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

    /// Write a JSON record.
    ///
    /// # Errors
    /// See [`Storage::put`].
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

// === The storage directory. Each record is a file with mode 0600, which is replaced atomically ===

/// The contents of all records, by record name.
pub(super) type Records = BTreeMap<String, Vec<u8>>;

/// Name of the lock file. The process that places orders holds a lock on it.
const LOCK_FILE: &str = "lock";

/// Suffix of a file that is being written.
const TEMPORARY_SUFFIX: &str = ".tmp";

/// The subdirectory of the storage directory for one CA.
#[derive(Debug)]
pub(super) struct Directory {
    path: PathBuf,
}

impl Directory {
    /// Open the directory for a CA. Create it if it does not exist.
    ///
    /// # Errors
    /// The directory cannot be created or written.
    pub(super) fn open(storage: &Path, ca: &HttpUrl) -> io::Result<Self> {
        let path = storage.join(directory_name(ca));
        DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
        // Open the lock file once. The start then fails if the directory is not writable.
        open_lock(&path)?;
        Ok(Directory { path })
    }

    /// Return the path of the directory.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Read all records.
    ///
    /// # Errors
    /// A file cannot be read.
    pub(super) fn read_all(&self) -> io::Result<Records> {
        let mut records = Records::new();
        for entry in self.path.read_dir()? {
            let Ok(name) = entry?.file_name().into_string() else { continue };
            if name == LOCK_FILE || name.ends_with(TEMPORARY_SUFFIX) {
                continue;
            }
            match std::fs::read(self.path.join(&name)) {
                Ok(content) => drop(records.insert(name, content)),
                // The file was removed after the directory was listed.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(records)
    }

    /// Write a record atomically. After a crash, the record has either the old or the new content.
    ///
    /// # Errors
    /// The file cannot be written. The record keeps its old content.
    pub(super) fn write(&self, name: &str, content: &[u8]) -> io::Result<()> {
        let temporary = self.path.join(format!("{name}{TEMPORARY_SUFFIX}"));
        // A process that was killed may have left the temporary file, possibly with another mode. Remove it.
        let _ = std::fs::remove_file(&temporary);
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
        file.write_all(content)?;
        file.sync_all()?;
        std::fs::rename(&temporary, self.path.join(name))?;
        File::open(&self.path)?.sync_all()
    }

    /// Write a local copy of a shared record. An error is only logged.
    pub(super) fn keep_copy(&self, name: &str, content: &[u8]) {
        if let Err(error) = self.write(name, content) {
            let directory = self.path.display();
            warn!(%directory, record = name, %error, "cannot write a certificate to acme.storage: it is stored only in \
                                                      Redis");
        }
    }

    /// Remove a record.
    ///
    /// # Errors
    /// The file cannot be removed. It is no error if the file does not exist.
    pub(super) fn remove(&self, name: &str) -> io::Result<()> {
        match std::fs::remove_file(self.path.join(name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            result => result,
        }
    }

    /// Lock the directory against other processes, until the returned file is dropped. Return `None` if another process
    /// holds the lock.
    ///
    /// # Errors
    /// The file system does not support locks, or the file cannot be opened.
    pub(super) fn try_lock(&self) -> io::Result<Option<File>> {
        let file = open_lock(&self.path)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(file)),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }
}

fn open_lock(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path.join(LOCK_FILE))
}

/// Convert the CA's URL to a directory name that contains its host, port and path, such as
/// `acme-v02.api.letsencrypt.org-directory`.
pub(super) fn directory_name(ca: &HttpUrl) -> String {
    let authority = ca.authority();
    let target = ca.target();
    let path = target.path().trim_matches('/');
    let is_kept = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-');
    format!("{authority}-{path}").chars().map(|c| if is_kept(c) { c.to_ascii_lowercase() } else { '-' }).collect()
}

// === Shared records: encrypted fields of a Redis hash, which all gateways with the same store use. A lock protects
// them ===

/// Lifetime of the lock. If its owner ends, another gateway can acquire the lock after this time.
const LOCK_TTL: Duration = Duration::from_secs(10);

/// Interval at which the owner renews the lock.
const RENEW_INTERVAL: Duration = Duration::from_secs(3);

/// The shared records of one CA.
#[derive(Debug)]
pub(super) struct SharedRecords {
    keeper: LockKeeper,
    cipher: Cipher,
    /// Version of the records that were read last. 0 if none were read.
    version: u64,
    /// Fencing token of the lock. `None` if this gateway does not hold the lock.
    token: Option<u64>,
}

/// Acquires and renews the lock of the records of one CA.
#[derive(Debug, Clone)]
pub(super) struct LockKeeper {
    store: RedisStore,
    /// Key of the Redis hash that contains the records and the lock.
    key: String,
    /// Identifier of this process as an owner of the lock.
    owner: String,
}

impl LockKeeper {
    async fn lock(&self) -> Result<Option<u64>, StorageError> {
        Ok(SharedData(&self.store).lock_hash(&self.key, &self.owner, LOCK_TTL).await?)
    }

    /// Renew the lock until the future is dropped. If another gateway has acquired the lock, writes of this gateway
    /// fail.
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
    /// Create a handle for the records in the Redis hash at `key`.
    ///
    /// # Errors
    /// The encryption key cannot be derived.
    pub(super) fn new(store: RedisStore, key: String, secret: &[u8]) -> Result<Self, StorageError> {
        let cipher = Cipher::new(secret).map_err(|_| StorageError::Cipher)?;
        let keeper = LockKeeper { store, key, owner: Uuid::new_v4().to_string() };
        Ok(SharedRecords { keeper, cipher, version: 0, token: None })
    }

    /// Return a handle that can renew the lock.
    pub(super) fn keeper(&self) -> LockKeeper {
        self.keeper.clone()
    }

    /// Return all records, or `None` if they have not changed since the last call.
    ///
    /// # Errors
    /// The store cannot be read, or a record was encrypted with another secret.
    pub(super) async fn read(&mut self) -> Result<Option<Records>, StorageError> {
        let (version, fields) = SharedData(&self.keeper.store).read_hash(&self.keeper.key, self.version).await?;
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

    /// Release the lock. If the store cannot be reached, the lock expires instead.
    pub(super) async fn unlock(&mut self) {
        if let Some(token) = self.token.take()
            && let Err(error) = SharedData(&self.keeper.store).unlock_hash(&self.keeper.key, token).await
        {
            debug!(%error, "cannot release the lock for ACME orders");
        }
    }

    /// Write or remove a record.
    ///
    /// # Errors
    /// The store cannot be reached, or another gateway has acquired the lock.
    pub(super) async fn write(&mut self, name: &str, content: Option<&[u8]>) -> Result<(), StorageError> {
        let token = self.token.ok_or(StorageError::LockLost)?;
        let encrypted = content.map(|content| self.cipher.encrypt(name, content).map_err(|_| StorageError::Cipher));
        let encrypted = encrypted.transpose()?.unwrap_or_default();
        match SharedData(&self.keeper.store).write_hash(&self.keeper.key, token, name, &encrypted).await? {
            true => Ok(()),
            false => Err(StorageError::LockLost),
        }
    }
}

// === Encryption of shared records: AES-256-GCM with a key derived from `store.secret` ===

/// Salt of the key derivation (HKDF, RFC 5869). It separates this key from other uses of the secret.
const SALT: &[u8] = b"sluicegate acme";

/// Context label of the key derivation.
const LABEL: &[u8] = b"shared records, AES-256-GCM";

/// First byte of an encrypted record: the format version.
const VERSION: u8 = 1;

/// Length of the key in bytes.
struct KeyLength;

impl KeyType for KeyLength {
    fn len(&self) -> usize {
        AES_256_GCM.key_len()
    }
}

/// Encrypts and decrypts records.
#[derive(Debug)]
pub(super) struct Cipher(RandomizedNonceKey);

impl Cipher {
    /// Derive the encryption key from `store.secret`.
    ///
    /// # Errors
    /// The cryptographic library fails.
    pub(super) fn new(secret: &[u8]) -> Result<Self, Unspecified> {
        let mut key = [0; 32];
        Salt::new(HKDF_SHA256, SALT).extract(secret).expand(&[LABEL], KeyLength)?.fill(&mut key)?;
        RandomizedNonceKey::new(&AES_256_GCM, &key).map(Cipher)
    }

    /// Encrypt a record. It can be decrypted only with the same record name.
    ///
    /// # Errors
    /// The cryptographic library fails.
    pub(super) fn encrypt(&self, name: &str, content: &[u8]) -> Result<Vec<u8>, Unspecified> {
        let mut sealed = content.to_vec();
        let nonce = self.0.seal_in_place_append_tag(Aad::from(name.as_bytes()), &mut sealed)?;
        Ok([&[VERSION][..], nonce.as_ref(), &sealed].concat())
    }

    /// Decrypt a record.
    ///
    /// # Errors
    /// The record was encrypted with another secret or another record name, or it was modified.
    pub(super) fn decrypt(&self, name: &str, encrypted: &[u8]) -> Result<Vec<u8>, Unspecified> {
        let [VERSION, rest @ ..] = encrypted else { return Err(Unspecified) };
        let (nonce, sealed) = rest.split_at_checked(NONCE_LEN).ok_or(Unspecified)?;
        let mut sealed = sealed.to_vec();
        let nonce = Nonce::try_assume_unique_for_key(nonce)?;
        Ok(self.0.open_in_place(nonce, Aad::from(name.as_bytes()), &mut sealed)?.to_vec())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn records_are_private_and_replaced_atomically() {
        let storage = tempfile::tempdir().unwrap();
        let ca = "https://ca.test:14000/Dir/x".parse().unwrap();
        let directory = Directory::open(&storage.path().join("new/acme"), &ca).unwrap();
        assert!(directory.path().ends_with("new/acme/ca.test-14000-dir-x"), "{directory:?}");
        // A process that is killed while it writes leaves such a temporary file.
        std::fs::write(directory.path().join("a.pem.tmp"), "half").unwrap();
        directory.write("a.pem", b"one").unwrap();
        directory.write("a.pem", b"two").unwrap();
        assert_eq!(directory.read_all().unwrap(), Records::from([("a.pem".to_owned(), b"two".to_vec())]));
        let mode = |path: &Path| path.metadata().unwrap().mode() & 0o777;
        assert_eq!(mode(&directory.path().join("a.pem")), 0o600);
        assert_eq!(mode(directory.path()), 0o700);
        let lock = directory.try_lock().unwrap();
        assert!(lock.is_some() && directory.try_lock().unwrap().is_none());
        drop(lock);
        assert!(directory.try_lock().unwrap().is_some());
        directory.remove("a.pem").unwrap();
        directory.remove("a.pem").unwrap();
        assert!(directory.read_all().unwrap().is_empty());
    }

    #[test]
    fn records_decrypt_only_with_their_name_and_secret() {
        let cipher = Cipher::new(b"secret").unwrap();
        let encrypted = cipher.encrypt("a.pem", b"key").unwrap();
        assert_eq!(cipher.decrypt("a.pem", &encrypted).unwrap(), b"key");
        assert_ne!(cipher.encrypt("a.pem", b"key").unwrap(), encrypted, "each encryption uses a new nonce");
        assert!(cipher.decrypt("b.pem", &encrypted).is_err());
        assert!(Cipher::new(b"other").unwrap().decrypt("a.pem", &encrypted).is_err());
        for wrong in [&[][..], &[1], &[2; 40], &encrypted[..encrypted.len() - 1]] {
            assert!(cipher.decrypt("a.pem", wrong).is_err(), "{wrong:?}");
        }
        let mut changed = encrypted;
        *changed.last_mut().unwrap() ^= 1;
        assert!(cipher.decrypt("a.pem", &changed).is_err());
    }
}
