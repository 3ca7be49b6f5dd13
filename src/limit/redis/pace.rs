//! Holds back connections to a server that turned one away: no storm of them, from any number of requests.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::time::Duration;

use super::server::NoConnection;
use crate::limit::clock::monotonic;

/// Two attempts a second.
const GAP: Duration = Duration::from_millis(500);

/// When one worker may connect to one server.
#[derive(Debug, Default)]
pub struct Pace {
    /// Why the last attempt failed, and when another one was made.
    failure: Mutex<Option<(NoConnection, Instant)>>,
    /// When a connection was given up though it works.
    retired: Mutex<Option<Instant>>,
}

impl Pace {
    /// Connects, unless an attempt failed a moment ago.
    ///
    /// # Errors
    /// Those of the attempt; in place of one that is not made, those of the one before.
    pub async fn connect<T>(&self, attempt: impl Future<Output = Result<T, NoConnection>>) -> Result<T, NoConnection> {
        let began = monotonic();
        self.begin(began)?;
        let result = attempt.await;
        *lock(&self.failure) = result.as_ref().err().map(|error| (error.clone(), began));
        result
    }

    /// Whether a connection that works may be given up for a new one now.
    pub fn may_retire(&self, now: Instant) -> bool {
        let mut retired = lock(&self.retired);
        let may = retired.is_none_or(|last| now.saturating_duration_since(last) >= GAP);
        if may {
            *retired = Some(now);
        }
        may
    }

    fn begin(&self, now: Instant) -> Result<(), NoConnection> {
        match &mut *lock(&self.failure) {
            Some((error, last)) if now.saturating_duration_since(*last) < GAP => Err(error.clone()),
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

    fn refused() -> NoConnection {
        NoConnection::new("nothing listens there")
    }

    #[tokio::test]
    async fn after_a_failure_there_are_two_attempts_a_second() {
        let pace = Pace::default();
        let now = monotonic();
        assert!(pace.begin(now).is_ok() && pace.begin(now).is_ok(), "none has failed yet");
        assert!(pace.connect(async { Err::<(), _>(refused()) }).await.is_err());
        let failed = monotonic();
        let mut made = Vec::new();
        for ms in 0..5000 {
            match pace.begin(failed + Duration::from_millis(ms)) {
                Ok(()) => made.push(ms),
                Err(error) => assert_eq!(error.to_string(), "nothing listens there", "the reason is told"),
            }
        }
        assert!((9..=10).contains(&made.len()), "{made:?}");
        assert!(made.windows(2).all(|pair| pair[1] - pair[0] >= 500), "{made:?}");
    }

    #[tokio::test]
    async fn one_that_succeeds_frees_the_way() {
        let pace = Pace::default();
        *lock(&pace.failure) = Some((refused(), monotonic().checked_sub(GAP).unwrap()));
        assert!(pace.connect(async { Ok(()) }).await.is_ok());
        assert!(pace.begin(monotonic()).is_ok() && pace.begin(monotonic()).is_ok());
    }

    #[test]
    fn connections_are_retired_as_seldom() {
        let (pace, now) = (Pace::default(), monotonic());
        let retired: Vec<_> = (0..1000).filter(|ms| pace.may_retire(now + Duration::from_millis(*ms))).collect();
        assert_eq!(retired, [0, 500]);
    }
}
