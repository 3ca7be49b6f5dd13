//! Holds back connections to a server that turned one away: no storm of them, from any number of requests.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::time::Duration;

use super::server::ConnectError;
use crate::limit::clock::monotonic;

/// Two attempts a second.
const RECONNECT_INTERVAL: Duration = Duration::from_millis(500);

/// When one worker may connect to one server.
#[derive(Debug, Default)]
pub struct ReconnectThrottle {
    /// Why the last attempt failed, and when another one was made.
    last_failure: Mutex<Option<(ConnectError, Instant)>>,
    /// When a connection was given up though it works.
    last_retired_at: Mutex<Option<Instant>>,
}

impl ReconnectThrottle {
    /// Connects, unless an attempt failed a moment ago.
    ///
    /// # Errors
    /// Those of the attempt; in place of one that is not made, those of the one before.
    pub async fn throttle<T>(&self, attempt: impl Future<Output = Result<T, ConnectError>>) -> Result<T, ConnectError> {
        let started_at = monotonic();
        self.try_begin(started_at)?;
        let result = attempt.await;
        *lock(&self.last_failure) = result.as_ref().err().map(|error| (error.clone(), started_at));
        result
    }

    /// Whether a connection that works may be given up for a new one now.
    pub fn may_retire(&self, now: Instant) -> bool {
        let mut last_retired_at = lock(&self.last_retired_at);
        let is_due = last_retired_at.is_none_or(|last| now.saturating_duration_since(last) >= RECONNECT_INTERVAL);
        if is_due {
            *last_retired_at = Some(now);
        }
        is_due
    }

    fn try_begin(&self, now: Instant) -> Result<(), ConnectError> {
        match &mut *lock(&self.last_failure) {
            Some((error, last)) if now.saturating_duration_since(*last) < RECONNECT_INTERVAL => Err(error.clone()),
            Some((_, last)) => {
                *last = now;
                Ok(())
            }
            None => Ok(()),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connect_error() -> ConnectError {
        ConnectError::new("nothing listens there")
    }

    #[tokio::test]
    async fn two_reconnects_per_second_after_a_failure() {
        let pace = ReconnectThrottle::default();
        let now = monotonic();
        assert!(pace.try_begin(now).is_ok() && pace.try_begin(now).is_ok(), "none has failed yet");
        assert!(pace.throttle(async { Err::<(), _>(connect_error()) }).await.is_err());
        let failed = monotonic();
        let mut made = Vec::new();
        for ms in 0..5000 {
            match pace.try_begin(failed + Duration::from_millis(ms)) {
                Ok(()) => made.push(ms),
                Err(error) => assert_eq!(error.to_string(), "nothing listens there", "the reason is told"),
            }
        }
        assert!((9..=10).contains(&made.len()), "{made:?}");
        assert!(made.windows(2).all(|pair| pair[1] - pair[0] >= 500), "{made:?}");
    }

    #[tokio::test]
    async fn success_ends_the_throttling() {
        let pace = ReconnectThrottle::default();
        *lock(&pace.last_failure) = Some((connect_error(), monotonic().checked_sub(RECONNECT_INTERVAL).unwrap()));
        assert!(pace.throttle(async { Ok(()) }).await.is_ok());
        assert!(pace.try_begin(monotonic()).is_ok() && pace.try_begin(monotonic()).is_ok());
    }

    #[test]
    fn two_retired_connections_per_second() {
        let (pace, now) = (ReconnectThrottle::default(), monotonic());
        let retired: Vec<_> = (0..1000).filter(|ms| pace.may_retire(now + Duration::from_millis(*ms))).collect();
        assert_eq!(retired, [0, 500]);
    }
}
