//! Certificates by ACME (RFC 8555): a thread that obtains and renews the certificates of all names.

mod ca_client;
mod directory;
mod order;
mod storage;

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use aws_lc_rs::digest::{SHA256, digest};
use instant_acme::{Account, Error};
use tokio::runtime::Builder;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::app::AppError;
use crate::app::acme::ca_client::CaClient;
use crate::app::acme::directory::Directory;
use crate::app::acme::order::{OrderContext, OrderError, publish_challenges};
use crate::app::acme::storage::{ACCOUNT, Attempts, Storage, attempts_record, certificate_record};
use crate::limiter::clock::{monotonic, unix_us};
use crate::snapshot::acme::{Acme, AcmeSettings};
use crate::snapshot::current::ConfigHandle;
use crate::tls::managed::ChallengeKind;
use crate::tls::{Certificate, TlsError};

/// Interval in which the thread looks for names to renew and for records of other processes.
const TICK: Duration = Duration::from_secs(1);

/// Renew after this part of the lifetime, unless the CA suggests a window: two thirds, and up to a twentieth more.
const RENEWAL_POINT: (u64, u64) = (2, 3);
const RENEWAL_JITTER_DIVISOR: u64 = 20;

/// Wait after the first failed attempt that the CA has judged, in seconds. It doubles with each one. Let's Encrypt
/// permits five failed validations per name and hour.
const VERDICT_BACKOFF_S: u64 = 300;

/// Wait after the first attempt that failed for another reason, such as a connection to the CA, in seconds.
const FAILURE_BACKOFF_S: u64 = 10;

/// Longest wait after a failed attempt, in seconds: a day.
const MAX_BACKOFF_S: u64 = 86_400;

/// Interval in which the renewal information of a certificate is read if the CA does not say, and bounds of what it
/// says (RFC 9773 §4.3).
const RENEWAL_INFO_INTERVAL: Duration = Duration::from_secs(6 * 3600);
const RENEWAL_INFO_BOUNDS: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(86_400));

/// Why the ACME client cannot start.
#[derive(Debug, thiserror::Error)]
pub enum AcmeError {
    /// The storage directory cannot be used.
    #[error("cannot use acme.storage {}: {source}", path.display())]
    Storage {
        /// The directory.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// rustls rejects the TLS configuration for the CA.
    #[error("cannot set up TLS to the CA: {0}")]
    Tls(#[from] TlsError),
}

/// The ACME client of the process.
#[derive(Debug)]
pub(super) struct AcmeClient {
    client: CaClient,
    storage: Storage,
    /// The account, once it was needed.
    account: Option<DebuggableAccount>,
    /// What the CA suggests for each certificate.
    suggestions: BTreeMap<Box<str>, Suggestion>,
}

/// instant-acme's account has no `Debug`.
struct DebuggableAccount(Account);

impl std::fmt::Debug for DebuggableAccount {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Account").field(&self.0.id()).finish()
    }
}

/// The renewal information of a certificate (RFC 9773).
#[derive(Debug)]
struct Suggestion {
    /// The leaf that it is for.
    leaf: Vec<u8>,
    /// Start and end of the window in which to renew, seconds since the Unix epoch.
    window: Option<(u64, u64)>,
    /// When to read it again.
    next_read: Instant,
}

impl AcmeClient {
    /// Open the storage and serve the certificates in it.
    ///
    /// # Errors
    /// The storage cannot be used, or rustls rejects the TLS configuration.
    pub(super) fn open(acme: &Acme) -> Result<Self, AcmeError> {
        let settings = &acme.settings;
        let storage = Directory::open(&settings.storage, &settings.directory).and_then(Storage::open);
        let storage = storage.map_err(|source| AcmeError::Storage { path: settings.storage.clone(), source })?;
        let client = CaClient::new(settings.trust_roots.clone())?;
        let client = AcmeClient { client, storage, account: None, suggestions: BTreeMap::new() };
        client.serve_stored(acme);
        Ok(client)
    }

    /// Start the thread. It runs until `stop` is cancelled.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(super) fn start(
        self,
        config_handle: Arc<ConfigHandle>,
        stop: CancellationToken,
    ) -> Result<JoinHandle<Result<(), AppError>>, AppError> {
        let run = move || {
            let runtime = Builder::new_current_thread().enable_all().build().map_err(AppError::Worker)?;
            runtime.block_on(stop.run_until_cancelled(self.run(&config_handle)));
            Ok(())
        };
        std::thread::Builder::new().name("acme".to_owned()).spawn(run).map_err(AppError::Worker)
    }

    async fn run(mut self, config_handle: &ConfigHandle) {
        loop {
            let active = config_handle.active();
            // `[acme]` needs a restart to be removed.
            let Some(acme) = &active.config.acme else { return };
            self.storage.sync();
            self.serve_stored(acme);
            let requested = acme.certificates.take_renewal_requests();
            for name in &acme.names {
                let is_requested = requested.contains(name);
                if is_requested || self.is_due(acme, name).await {
                    self.attempt(acme, name).await;
                }
            }
            tokio::select! {
                () = sleep(TICK) => {}
                () = acme.certificates.renewal_requested() => {}
            }
        }
    }

    /// Serve the certificates and answer the challenges that are stored.
    fn serve_stored(&self, acme: &Acme) {
        for name in &acme.names {
            let Some(pem) = self.storage.get(&certificate_record(name)) else { continue };
            let served = acme.certificates.get(name).certificate;
            match Certificate::from_pem(pem, pem) {
                Ok(stored) if served.as_ref().is_some_and(|served| is_same(served, &stored)) => {}
                Ok(stored) => {
                    let stored = Arc::new(stored);
                    acme.certificates.update(name, |entry| entry.certificate = Some(stored.clone()));
                }
                Err(error) => debug!(%name, %error, "the stored certificate cannot be used"),
            }
        }
        publish_challenges(&self.storage, &acme.certificates);
    }

    /// Return whether it is time for an order, and record the plan.
    async fn is_due(&mut self, acme: &Acme, name: &str) -> bool {
        let now_s = unix_us() / 1_000_000;
        let attempts: Attempts = self.storage.get_json(&attempts_record(name)).unwrap_or_default();
        let certificate = acme.certificates.get(name).certificate;
        let renewal_s = match &certificate {
            None => 0,
            Some(certificate) => {
                self.refresh_suggestion(&acme.settings, name, certificate).await;
                self.renewal_time_s(name, certificate)
            }
        };
        let next_order_s = renewal_s.max(attempts.retry_at_s);
        let known = acme.certificates.get(name);
        if known.next_order_s != Some(next_order_s) || known.failures != attempts.failures {
            acme.certificates.update(name, |entry| {
                entry.next_order_s = Some(next_order_s);
                entry.failures = attempts.failures;
                entry.last_error = (attempts.failures > 0).then(|| attempts.error.as_str().into());
            });
        }
        now_s >= next_order_s
    }

    /// Return when to renew a certificate, seconds since the Unix epoch. All gateways find the same time: its random
    /// part is taken from the certificate.
    fn renewal_time_s(&self, name: &str, certificate: &Certificate) -> u64 {
        let (start, end) = certificate.validity_s();
        let (start, end) = (start.max(0) as u64, end.max(0) as u64);
        let lifetime = end.saturating_sub(start);
        let leaf = certificate.certified_key.cert.first().map_or(&[][..], |leaf| leaf);
        let suggestion = self.suggestions.get(name).filter(|suggestion| suggestion.leaf == leaf);
        let (from, width) = match suggestion.and_then(|suggestion| suggestion.window) {
            Some((from, to)) => (from, to - from),
            None => (start + lifetime * RENEWAL_POINT.0 / RENEWAL_POINT.1, lifetime / RENEWAL_JITTER_DIVISOR),
        };
        from + random_part(leaf, width)
    }

    /// Read the renewal information of a certificate if it is time.
    async fn refresh_suggestion(&mut self, settings: &AcmeSettings, name: &str, certificate: &Certificate) {
        let leaf = certificate.certified_key.cert.first().map_or(&[][..], |leaf| leaf);
        let known = self.suggestions.get(name).filter(|known| known.leaf == leaf);
        if known.is_some_and(|known| monotonic() < known.next_read) || self.storage.get(ACCOUNT).is_none() {
            return;
        }
        let read = match self.account(settings).await {
            Ok(account) => order::renewal_window(&account, certificate).await,
            Err(error) => Err(error),
        };
        let (window, wait) = match read {
            Ok((window, retry_after)) => {
                (Some(window), retry_after.clamp(RENEWAL_INFO_BOUNDS.0, RENEWAL_INFO_BOUNDS.1))
            }
            Err(OrderError::Ca { error: Error::Unsupported(_), .. }) => (None, RENEWAL_INFO_BOUNDS.1),
            Err(error) => {
                debug!(name, %error, "no renewal information");
                // The window stays as it was.
                (known_window(&self.suggestions, name, leaf), RENEWAL_INFO_INTERVAL)
            }
        };
        let suggestion = Suggestion { leaf: leaf.to_vec(), window, next_read: monotonic() + wait };
        self.suggestions.insert(name.into(), suggestion);
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

    /// Try to obtain a certificate, if this process has the lock, and store the result.
    async fn attempt(&mut self, acme: &Acme, name: &str) {
        match self.storage.lock() {
            Ok(true) => {}
            Ok(false) => return debug!(name, "another process places the orders"),
            Err(error) => return warn!(name, %error, "cannot renew certificates"),
        }
        self.serve_stored(acme);
        let mut attempts: Attempts = self.storage.get_json(&attempts_record(name)).unwrap_or_default();
        let previous = acme.certificates.get(name).certificate;
        let _ = self.client.take_retry_after();
        let result = self.order(acme, name, attempts.failures, previous.as_deref()).await;
        acme.certificates.count_result(result.is_ok());
        self.serve_stored(acme);
        let stored = match result {
            Ok(()) => {
                let not_after_s = acme.certificates.get(name).certificate.map_or(0, |found| found.validity_s().1);
                info!(name, not_after_s, "certificate obtained");
                self.storage.remove(&attempts_record(name))
            }
            Err(error) => {
                attempts.failures += 1;
                let wait_s = self.backoff_s(&error, attempts.failures, name);
                attempts.retry_at_s = unix_us() / 1_000_000 + wait_s;
                attempts.error = error.to_string();
                warn!(name, %error, failures = attempts.failures, retry_in_s = wait_s, "cannot obtain a certificate");
                self.storage.put_json(&attempts_record(name), &attempts)
            }
        };
        if let Err(error) = stored {
            warn!(name, %error, "cannot store the result of an ACME order");
        }
        self.is_due(acme, name).await;
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
        let storage = &mut self.storage;
        let context =
            OrderContext { account: &account, storage, certificates: &acme.certificates, challenges: &challenges };
        context.obtain(name, previous).await
    }

    /// Return the wait after a failed attempt in seconds. It doubles with each failure.
    fn backoff_s(&self, error: &OrderError, failures: u32, name: &str) -> u64 {
        let first_s = if error.is_verdict() { VERDICT_BACKOFF_S } else { FAILURE_BACKOFF_S };
        let wait_s = first_s.saturating_mul(1 << failures.saturating_sub(1).min(20)).min(MAX_BACKOFF_S);
        let asked_s = self.client.take_retry_after().map_or(0, |wait| wait.as_secs().min(MAX_BACKOFF_S));
        wait_s.max(asked_s) + random_part(format!("{name}{failures}").as_bytes(), wait_s / 10)
    }
}

fn known_window(suggestions: &BTreeMap<Box<str>, Suggestion>, name: &str, leaf: &[u8]) -> Option<(u64, u64)> {
    suggestions.get(name).filter(|known| known.leaf == leaf)?.window
}

/// Return the challenges with another one first after each failure.
fn rotated(challenges: &[ChallengeKind], failures: u32) -> Vec<ChallengeKind> {
    let mut challenges = challenges.to_vec();
    if !challenges.is_empty() {
        let first = failures as usize % challenges.len();
        challenges.rotate_left(first);
    }
    challenges
}

/// Return a number from 0 to `width` that is the same for equal `seed`.
fn random_part(seed: &[u8], width: u64) -> u64 {
    let hash = digest(&SHA256, seed);
    let number = hash.as_ref().iter().take(8).fold(0, |number: u64, byte| number << 8 | u64::from(*byte));
    (u128::from(number) * u128::from(width) >> 64) as u64
}

fn is_same(one: &Certificate, other: &Certificate) -> bool {
    one.certified_key.cert == other.certified_key.cert
}
