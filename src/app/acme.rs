//! Certificates by ACME (RFC 8555). One thread obtains and renews the certificates for all names.
mod order;
mod storage;

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use aws_lc_rs::digest::{SHA256, digest};
use data_encoding::HEXLOWER;
use instant_acme::{Account, Error};
use tokio::runtime::Builder;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::admin::state::ProcessState;
use crate::app::AppError;
use crate::app::acme::order::{CaClient, OrderContext, OrderError, SuggestedRenewal, publish_challenges};
use crate::app::acme::storage::{
    ACCOUNT, Attempts, Directory, RenewalRecord, SharedRecords, Storage, StorageError, attempts_record,
    certificate_record, renewal_record,
};
use crate::clock::{LogThrottle, unix_us};
use crate::snapshot::listeners::{Acme, AcmeSettings};
use crate::tls::{Certificate, ChallengeKind, TlsError};

/// Interval at which the thread checks for due renewals and reads the records that other processes wrote.
const TICK: Duration = Duration::from_secs(1);

/// Minimum interval between two log messages about a lock that cannot be acquired.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// If the CA suggests no renewal window, a certificate is renewed after two thirds of its lifetime. A random delay of
/// up to a twentieth of the lifetime is added.
const RENEWAL_POINT: (u64, u64) = (2, 3);
const RENEWAL_JITTER_DIVISOR: u64 = 20;

/// Even if the CA suggests a later time, a certificate is renewed when a twentieth of its lifetime is left.
const LATEST_RENEWAL_DIVISOR: u64 = 20;

/// Delay in seconds after the first attempt that the CA rejected. The delay doubles with each failure. Let's Encrypt
/// allows five failed validations per name and hour.
const REJECTION_BACKOFF_S: u64 = 300;

/// Delay in seconds after the first attempt that failed for another reason, such as a connection error.
const FAILURE_BACKOFF_S: u64 = 10;

/// Maximum delays in seconds: one day if the CA rejected the attempt, and one hour after other failures.
const MAX_REJECTION_BACKOFF_S: u64 = 86_400;
const MAX_FAILURE_BACKOFF_S: u64 = 3600;

/// Minimum and maximum interval between two reads of the renewal information. The CA suggests the interval (RFC 9773
/// §4.3.2).
const RENEWAL_INFO_BOUNDS: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(86_400));

/// Initial and maximum delay after a failed read of the renewal information. The delay doubles with each failure (RFC
/// 9773 §4.3.3).
const RENEWAL_INFO_BACKOFF: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(6 * 3600));

/// The reason why the ACME client cannot start.
#[derive(Debug, thiserror::Error)]
pub enum AcmeError {
    /// The storage directory cannot be used.
    #[error("cannot use acme.storage {}: {source}", path.display())]
    Storage {
        /// Path of the storage directory.
        path: PathBuf,
        /// The I/O error of the operating system.
        source: io::Error,
    },
    /// rustls rejects the TLS settings for the CA.
    #[error("cannot set up TLS to the CA: {0}")]
    Tls(#[from] TlsError),
}

/// The ACME client of the process.
#[derive(Debug)]
pub(super) struct AcmeClient {
    client: CaClient,
    storage: Storage,
    /// The account at the CA. `None` until it is used for the first time.
    account: Option<DebuggableAccount>,
    /// Failed attempts of this process, by DNS name. This process uses them if they could not be stored.
    attempts: BTreeMap<Box<str>, Attempts>,
}

/// The account of instant-acme with a `Debug` implementation, which the original type lacks.
struct DebuggableAccount(Account);

impl std::fmt::Debug for DebuggableAccount {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Account").field(&self.0.id()).finish()
    }
}

/// The next action for a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Read the renewal information of the certificate (RFC 9773).
    ReadRenewalInfo,
    /// Place an order, or resume an interrupted one.
    Order,
}

impl AcmeClient {
    /// Open the storage, and serve the stored certificates.
    ///
    /// # Errors
    /// The storage cannot be used, or rustls rejects the TLS settings.
    pub(super) fn open(acme: &Acme) -> Result<Self, AcmeError> {
        let settings = &acme.settings;
        let storage = Directory::open(&settings.storage, &settings.directory).and_then(Storage::open);
        let storage = storage.map_err(|source| AcmeError::Storage { path: settings.storage.clone(), source })?;
        let client = CaClient::new(settings.trust_roots.clone())?;
        let mut client = AcmeClient { client, storage, account: None, attempts: BTreeMap::new() };
        client.serve_stored(acme);
        Ok(client)
    }

    /// Start the thread. It runs until `stop` is cancelled.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(super) fn start(
        self,
        state: Arc<ProcessState>,
        stop: CancellationToken,
    ) -> Result<JoinHandle<Result<(), AppError>>, AppError> {
        let run = move || {
            let runtime = Builder::new_current_thread().enable_all().build().map_err(AppError::Worker)?;
            runtime.block_on(stop.run_until_cancelled(self.run(&state)));
            Ok(())
        };
        std::thread::Builder::new().name("acme".to_owned()).spawn(run).map_err(AppError::Worker)
    }

    async fn run(mut self, state: &ProcessState) {
        if let Err(error) = self.share(state) {
            // `share` fails only if the cryptographic library fails.
            return warn!(%error, "cannot start ACME: no certificate is obtained or renewed");
        }
        // Names for which an administrator requested a renewal, with the fingerprint of the certificate at that time.
        let mut requested = BTreeMap::new();
        loop {
            let active = state.config_handle.active();
            // Removing `[acme]` requires a restart, so this loop never returns here.
            let Some(acme) = &active.config.acme else { return };
            self.storage.sync().await;
            self.serve_stored(acme);
            for (name, replaced) in acme.certificates.take_renewal_requests() {
                requested.insert(name, replaced.as_deref().map(fingerprint));
            }
            for name in &acme.names {
                let request = requested.get(name);
                let is_due = request.is_some() || self.plan(acme, name).is_some();
                if is_due && !self.proceed_with_lock(acme, name, request).await {
                    break;
                }
                requested.remove(name);
            }
            tokio::select! {
                () = sleep(TICK) => {}
                () = acme.certificates.renewal_requested() => {}
            }
        }
    }

    /// If the store is Redis, share the records with all gateways through a separate connection.
    fn share(&mut self, state: &ProcessState) -> Result<(), StorageError> {
        let active = state.config_handle.active();
        let (Some((_, redis)), Some(acme)) = (&active.config.store.redis, &active.config.acme) else {
            return Ok(());
        };
        let Some(store) = state.separate_store() else { return Ok(()) };
        let key = format!("{}:acme:{}", redis.prefix, storage::directory_name(&acme.settings.directory));
        self.storage.share(SharedRecords::new(store, key, acme.settings.secret.as_bytes())?);
        Ok(())
    }

    /// Serve the stored certificates, and respond to the stored challenges.
    fn serve_stored(&mut self, acme: &Acme) {
        for name in &acme.names {
            let Some(pem) = self.storage.get(&certificate_record(name)) else { continue };
            let served = acme.certificates.get(name).certificate;
            match Certificate::from_pem(pem, pem) {
                Ok(stored) if served.as_ref().is_some_and(|served| is_same(served, &stored)) => {}
                Ok(stored) => {
                    let stored = Arc::new(stored);
                    acme.certificates.update(name, |entry| entry.certificate = Some(stored.clone()));
                    // Another gateway may have obtained this certificate. Forget the failed attempts of this gateway.
                    self.attempts.remove(name);
                }
                Err(error) => debug!(%name, %error, "the stored certificate cannot be used"),
            }
        }
        publish_challenges(&self.storage, &acme.certificates);
    }

    /// Return the action that is due now, if any. Update the time of the next order and the failures that are shown to
    /// administrators.
    fn plan(&self, acme: &Acme, name: &str) -> Option<Step> {
        let now_s = unix_us() / 1_000_000;
        let attempts = self.attempts(name);
        let known = acme.certificates.get(name);
        let renewal_s = known.certificate.as_ref().map_or(0, |certificate| self.renewal_time_s(name, certificate));
        // After a failed attempt, the next attempt is due at its retry time, even if the planned renewal is later.
        let next_order_s = if attempts.failures > 0 { attempts.retry_at_s } else { renewal_s };
        if known.next_order_s != Some(next_order_s) || known.failures != attempts.failures {
            acme.certificates.update(name, |entry| {
                entry.next_order_s = Some(next_order_s);
                entry.failures = attempts.failures;
                entry.last_error = (attempts.failures > 0).then(|| attempts.error.as_str().into());
            });
        }
        let needs_info = known.certificate.is_some_and(|certificate| {
            let info = self.renewal_info(name, &certificate);
            let has_expired = now_s > certificate.not_after_s();
            !has_expired && self.storage.get(ACCOUNT).is_some() && info.is_none_or(|info| now_s >= info.next_read_s)
        });
        match (needs_info, now_s >= next_order_s) {
            (true, _) => Some(Step::ReadRenewalInfo),
            (false, true) => Some(Step::Order),
            (false, false) => None,
        }
    }

    /// Return the time at which to renew a certificate, in seconds since the Unix epoch. All gateways compute the same
    /// time, because its random part is derived from the certificate.
    fn renewal_time_s(&self, name: &str, certificate: &Certificate) -> u64 {
        let (start, end) = certificate.validity_s();
        let start = start.max(0) as u64;
        let end = end.max(0) as u64;
        let lifetime = end.saturating_sub(start);
        let (from, width) = match self.renewal_info(name, certificate).and_then(|info| info.window) {
            Some((from, to)) => (from, to.saturating_sub(from)),
            None => (start + lifetime * RENEWAL_POINT.0 / RENEWAL_POINT.1, lifetime / RENEWAL_JITTER_DIVISOR),
        };
        let time_s = from + random_part(fingerprint(certificate).as_bytes(), width);
        time_s.min(end - lifetime / LATEST_RENEWAL_DIVISOR)
    }

    /// Return the stored renewal information of a certificate. Return `None` if it has not been read.
    fn renewal_info(&self, name: &str, certificate: &Certificate) -> Option<RenewalRecord> {
        let info: RenewalRecord = self.storage.get_json(&renewal_record(name))?;
        (info.fingerprint == fingerprint(certificate)).then_some(info)
    }

    /// Read the renewal information of a certificate from the CA, and store it for all gateways.
    async fn read_renewal_info(&mut self, acme: &Acme, name: &str) {
        let Some(certificate) = acme.certificates.get(name).certificate else { return };
        let known = self.renewal_info(name, &certificate);
        let read = match self.account(&acme.settings).await {
            Ok(account) => order::suggested_renewal(&account, &certificate).await,
            Err(error) => Err(error),
        };
        let fingerprint = fingerprint(&certificate);
        let known_window = known.as_ref().and_then(|known| known.window);
        let mut record = RenewalRecord { fingerprint, window: known_window, next_read_s: 0, failures: 0 };
        let wait = match read {
            Ok(SuggestedRenewal { window, explanation_url, retry_after }) => {
                if known_window != Some(window) {
                    let explanation = explanation_url.unwrap_or_default();
                    info!(
                        name,
                        from_s = window.0,
                        to_s = window.1,
                        explanation,
                        "read the renewal window that the CA suggests"
                    );
                }
                record.window = Some(window);
                retry_after.clamp(RENEWAL_INFO_BOUNDS.0, RENEWAL_INFO_BOUNDS.1)
            }
            Err(OrderError::Ca { error: Error::Unsupported(_), .. }) => RENEWAL_INFO_BOUNDS.1,
            Err(error) => {
                // Keep the window that was read earlier.
                let failures = known.map_or(0, |known| known.failures);
                let wait = RENEWAL_INFO_BACKOFF.0.saturating_mul(1 << failures.min(20)).min(RENEWAL_INFO_BACKOFF.1);
                record.failures = failures.saturating_add(1);
                warn!(name, %error, retry_in_s = wait.as_secs(), "cannot read the renewal window that the CA suggests");
                wait
            }
        };
        record.next_read_s = unix_us() / 1_000_000 + wait.as_secs();
        if let Err(error) = self.storage.put_json(&renewal_record(name), &record).await {
            debug!(name, %error, "cannot store renewal information");
        }
    }

    async fn account(&mut self, settings: &AcmeSettings) -> Result<Account, OrderError> {
        if let Some(DebuggableAccount(account)) = self.account.as_ref().filter(|_| self.storage.get(ACCOUNT).is_some())
        {
            return Ok(account.clone());
        }
        let account = order::account(settings, &self.client, &mut self.storage).await?;
        self.account = Some(DebuggableAccount(account.clone()));
        Ok(account)
    }

    /// Return the stored record of failed attempts, which counts the attempts of all gateways. If the attempts of this
    /// gateway have a later retry time, for example because they could not be stored, return those instead.
    fn attempts(&self, name: &str) -> Attempts {
        let stored: Attempts = self.storage.get_json(&attempts_record(name)).unwrap_or_default();
        match self.attempts.get(name) {
            Some(own) if own.retry_at_s > stored.retry_at_s => own.clone(),
            _ => stored,
        }
    }

    /// Perform the planned or requested action for a name, if this process acquires the lock. Return whether it
    /// acquired the lock. `request` is the fingerprint of the certificate that an administrator wants to replace.
    async fn proceed_with_lock(&mut self, acme: &Acme, name: &str, request: Option<&Option<String>>) -> bool {
        static LOG_THROTTLE: LogThrottle = LogThrottle::new();
        match self.storage.lock().await {
            Ok(true) => {}
            Ok(false) => {
                debug!(name, "another process holds the lock and requests the certificates");
                return false;
            }
            Err(error) => {
                if LOG_THROTTLE.should_log(LOG_INTERVAL) {
                    warn!(name, %error, "cannot lock the ACME records: this process renews no certificates until it \
                        gets the lock");
                }
                return false;
            }
        }
        let keep_lock = self.storage.keep_lock();
        tokio::select! {
            biased;
            () = self.proceed(acme, name, request) => {}
            () = keep_lock => {}
        }
        self.storage.unlock().await;
        true
    }

    async fn proceed(&mut self, acme: &Acme, name: &str, request: Option<&Option<String>>) {
        // Another process may have renewed the certificate before this process acquired the lock.
        self.serve_stored(acme);
        let current = acme.certificates.get(name).certificate.as_deref().map(fingerprint);
        let is_requested = request.is_some_and(|replaced| *replaced == current);
        if self.plan(acme, name) == Some(Step::ReadRenewalInfo) {
            self.read_renewal_info(acme, name).await;
        }
        if is_requested || self.plan(acme, name) == Some(Step::Order) {
            self.attempt(acme, name).await;
            self.plan(acme, name);
        }
    }

    /// Try to obtain a certificate, and store the result of the attempt.
    async fn attempt(&mut self, acme: &Acme, name: &str) {
        let mut attempts = self.attempts(name);
        let previous = acme.certificates.get(name).certificate;
        let _ = self.client.take_retry_after();
        let result = self.order(acme, name, attempts.failures, previous.as_deref()).await;
        self.serve_stored(acme);
        if let Err(OrderError::Storage(StorageError::LockLost)) = result {
            // Losing the lock is no failure of the order. The new owner of the lock resumes the order or places another
            // one.
            info!(name, "lost the lock for ACME orders: another gateway has taken over");
            return;
        }
        acme.certificates.count_result(result.is_ok());
        let stored = match result {
            Ok(()) => {
                let not_after_s = acme.certificates.get(name).certificate.map_or(0, |found| found.validity_s().1);
                info!(name, not_after_s, "certificate obtained");
                self.attempts.remove(name);
                self.storage.remove(&attempts_record(name)).await
            }
            Err(error) => {
                attempts.failures += 1;
                let wait_s = self.backoff_s(&error, attempts.failures, name);
                attempts.retry_at_s = unix_us() / 1_000_000 + wait_s;
                attempts.error = error.to_string();
                // The URLs of the CA may have changed, so read its directory again at the next attempt.
                self.account = None;
                warn!(name, %error, failures = attempts.failures, retry_in_s = wait_s, "cannot obtain a certificate");
                self.attempts.insert(name.into(), attempts.clone());
                self.storage.put_json(&attempts_record(name), &attempts).await
            }
        };
        if let Err(error) = stored {
            warn!(name, %error, "cannot store the result of an ACME order");
        }
    }

    async fn order(
        &mut self,
        acme: &Acme,
        name: &str,
        failures: u32,
        previous: Option<&Certificate>,
    ) -> Result<(), OrderError> {
        let account = self.account(&acme.settings).await?;
        let challenges = rotated(&acme.settings.challenges, failures);
        // Use the field `replaces` only in the first attempt. If the CA rejects an order because of this field, the
        // next attempt can succeed without it.
        let previous = previous.filter(|_| failures == 0);
        let storage = &mut self.storage;
        let context =
            OrderContext { account: &account, storage, certificates: &acme.certificates, challenges: &challenges };
        context.obtain(name, previous).await
    }

    /// Return the delay after a failed attempt in seconds. It doubles with each failure.
    fn backoff_s(&self, error: &OrderError, failures: u32, name: &str) -> u64 {
        let (first_s, max_s) = match error.is_rejection() {
            true => (REJECTION_BACKOFF_S, MAX_REJECTION_BACKOFF_S),
            false => (FAILURE_BACKOFF_S, MAX_FAILURE_BACKOFF_S),
        };
        let wait_s = first_s.saturating_mul(1 << failures.saturating_sub(1).min(20)).min(max_s);
        let asked_s = self.client.take_retry_after().map_or(0, |wait| wait.as_secs().min(MAX_REJECTION_BACKOFF_S));
        wait_s.max(asked_s) + random_part(format!("{name}{failures}").as_bytes(), wait_s / 10)
    }
}

/// Return the SHA-256 hash of a certificate in hexadecimal.
fn fingerprint(certificate: &Certificate) -> String {
    let leaf = certificate.certified_key.cert.first().map_or(&[][..], |leaf| leaf);
    HEXLOWER.encode(digest(&SHA256, leaf).as_ref())
}

/// Return the challenge types in a different order after each failure, so that another type comes first.
fn rotated(challenges: &[ChallengeKind], failures: u32) -> Vec<ChallengeKind> {
    let mut challenges = challenges.to_vec();
    if !challenges.is_empty() {
        let first = failures as usize % challenges.len();
        challenges.rotate_left(first);
    }
    challenges
}

/// Return a number from 0 to `width` that is determined by `seed`.
fn random_part(seed: &[u8], width: u64) -> u64 {
    let hash = digest(&SHA256, seed);
    let number = hash.as_ref().iter().take(8).fold(0, |number: u64, byte| number << 8 | u64::from(*byte));
    ((u128::from(number) * u128::from(width)) >> 64) as u64
}

fn is_same(one: &Certificate, other: &Certificate) -> bool {
    one.certified_key.cert == other.certified_key.cert
}
