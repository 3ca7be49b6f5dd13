//! The state of a key set that is fetched from a URL: whether its keys are known, and when requests may cause a
//! refresh. `app/jwks_refresh.rs` contains the task that fetches it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use tokio::sync::{Notify, watch};
use tokio::time::timeout;

use crate::identity::jwt::KeySet;
use crate::limiter::clock::{elapsed_since, monotonic};

/// Minimum time between two refreshes that tokens with an unknown `kid` cause.
const UNKNOWN_KEY_INTERVAL: Duration = Duration::from_secs(10);

/// Maximum time that a request waits for a refresh. A fetch takes at most the same time.
pub const REFRESH_TIMEOUT: Duration = Duration::from_secs(5);

/// The keys of one URL, and the state of their refreshes. A reload keeps this state while the URL is the same.
#[derive(Debug)]
pub struct RemoteKeys {
    keys: Arc<ArcSwapOption<KeySet>>,
    state: Mutex<RefreshState>,
    /// Number of finished attempts to fetch the keys.
    finished: watch::Sender<u64>,
    /// Wakes the task that fetches the keys.
    wanted: Notify,
    /// Number of successful and of failed attempts to fetch the keys.
    counts: [AtomicU64; 2],
    /// Time of the last success in µs since the Unix epoch; 0 before the first.
    last_success_us: AtomicU64,
}

#[derive(Debug, Default)]
struct RefreshState {
    /// Whether an attempt to fetch the keys is running or about to begin.
    is_pending: bool,
    /// Time at which a token with an unknown key last caused a refresh.
    asked_at: Option<Instant>,
}

/// An attempt to fetch the keys, or the task that makes such attempts. When the attempt is dropped, requests stop
/// waiting for it.
#[derive(Debug)]
pub struct RefreshAttempt<'a>(&'a RemoteKeys);

impl Default for RemoteKeys {
    fn default() -> Self {
        let (state, wanted, counts, last_success_us) = Default::default();
        RemoteKeys { keys: Arc::default(), state, finished: watch::Sender::new(0), wanted, counts, last_success_us }
    }
}

impl RemoteKeys {
    /// Return the keys, for verifiers. The keys are `None` until the first attempt has succeeded.
    pub fn keys(&self) -> &Arc<ArcSwapOption<KeySet>> {
        &self.keys
    }

    /// Return whether a token with an unknown key may wait for a refresh.
    pub fn may_refresh(&self) -> bool {
        self.lock().may_ask()
    }

    /// Request a refresh because of a token with an unknown key, and wait until it has ended, at most 5 s. If another
    /// token has caused a refresh within the last 10 s, return at once.
    pub async fn refresh(&self) {
        let mut finished = self.finished.subscribe();
        {
            let mut state = self.lock();
            if !state.may_ask() {
                return;
            }
            if !state.is_pending {
                *state = RefreshState { is_pending: true, asked_at: Some(monotonic()) };
                self.wanted.notify_one();
            }
        }
        // Ignore errors: waiting fails only if the sender is dropped, but `self` owns the sender.
        let _ = timeout(REFRESH_TIMEOUT, finished.changed()).await;
    }

    /// Return when a request causes a refresh.
    pub async fn wanted(&self) {
        self.wanted.notified().await;
    }

    /// Begin an attempt to fetch the keys, or a task that makes several attempts.
    pub fn begin(&self) -> RefreshAttempt<'_> {
        self.lock().is_pending = true;
        RefreshAttempt(self)
    }

    /// Return a guard for the task that makes attempts. If the task ends, requests stop waiting for it.
    pub fn guard(&self) -> RefreshAttempt<'_> {
        RefreshAttempt(self)
    }

    /// Record a successful attempt in which the server returned the known keys.
    pub fn record_unchanged(&self, now_us: u64) {
        self.last_success_us.store(now_us, Ordering::Relaxed);
        self.counts[0].fetch_add(1, Ordering::Relaxed);
    }

    /// Take over the counts of the same provider, and its keys if the URL is the same.
    pub fn carry_over(&self, previous: &RemoteKeys, is_same_url: bool) {
        if is_same_url {
            self.keys.store(previous.keys.load_full());
            self.last_success_us.store(previous.last_success_us(), Ordering::Relaxed);
        }
        for (count, known) in self.counts.iter().zip(previous.counts()) {
            count.store(known, Ordering::Relaxed);
        }
    }

    /// Use new keys from now on.
    pub fn store(&self, keys: KeySet, now_us: u64) {
        self.keys.store(Some(Arc::new(keys)));
        self.record_unchanged(now_us);
    }

    /// Count a failed attempt. The previous keys stay in use.
    pub fn record_failure(&self) {
        self.counts[1].fetch_add(1, Ordering::Relaxed);
    }

    /// Return the number of successful and of failed attempts to fetch the keys.
    pub fn counts(&self) -> [u64; 2] {
        self.counts.each_ref().map(|count| count.load(Ordering::Relaxed))
    }

    /// Return the time of the last success in µs since the Unix epoch; 0 before the first.
    pub fn last_success_us(&self) -> u64 {
        self.last_success_us.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, RefreshState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RefreshState {
    fn may_ask(&self) -> bool {
        self.is_pending || self.asked_at.is_none_or(|asked_at| elapsed_since(asked_at) >= UNKNOWN_KEY_INTERVAL)
    }
}

impl Drop for RefreshAttempt<'_> {
    fn drop(&mut self) {
        self.0.lock().is_pending = false;
        self.0.finished.send_modify(|finished| *finished += 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn unknown_keys_cause_one_refresh_in_ten_seconds() {
        let remote = RemoteKeys::default();
        let started_at = monotonic();
        let fetch = async {
            remote.wanted().await;
            let attempt = remote.begin();
            tokio::time::sleep(Duration::from_secs(2)).await;
            drop(attempt);
        };
        tokio::join!(fetch, remote.refresh(), remote.refresh());
        assert_eq!(elapsed_since(started_at), Duration::from_secs(2), "both waited for the same attempt");
        assert!(!remote.may_refresh());
        remote.refresh().await;
        assert_eq!(elapsed_since(started_at), Duration::from_secs(2), "the third does not wait");
        tokio::time::advance(Duration::from_secs(8)).await;
        assert!(remote.may_refresh(), "10 s after the first asked");
        remote.refresh().await;
        assert_eq!(elapsed_since(started_at), Duration::from_secs(15), "no task fetches: 5 s");
    }

    #[tokio::test(start_paused = true)]
    async fn dropped_attempt_ends_the_wait() {
        let remote = RemoteKeys::default();
        let started_at = monotonic();
        let attempt = remote.begin();
        let end = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            drop(attempt);
        };
        tokio::join!(end, remote.refresh());
        assert_eq!(elapsed_since(started_at), Duration::from_secs(1));
        assert!(remote.may_refresh(), "no token has asked");
    }
}
