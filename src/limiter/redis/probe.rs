//! Handling of server failures: opens the circuit breaker of a server, and probes the server until it replies.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{sleep, timeout};

use crate::limiter::clock::monotonic;
use crate::limiter::key::{IdentityHasher, Key, StateName};
use crate::limiter::redis::batch::{ProbeCall, Purpose};
use crate::limiter::redis::batcher::Batcher;
use crate::limiter::redis::circuit_breaker::{Assessment, OutageLog};
use crate::limiter::redis::connection::checkout;
use crate::limiter::redis::error::RedisErrorKind;
use crate::limiter::verdict::{Charge, ChargeMode, Operation, StoreError};

/// Delay of the first probe after the circuit breaker opened. Each further delay is twice as long, up to
/// [`MAX_PROBE_DELAY`].
const INITIAL_PROBE_DELAY: Duration = Duration::from_millis(100);
const MAX_PROBE_DELAY: Duration = Duration::from_secs(1);

/// Interval for probing a server that did not reply to a call, until the server replies or the circuit breaker opens.
const SUSPECT_PROBE_INTERVAL: Duration = Duration::from_millis(10);

/// Name of the limit whose state a probe charges. No configured limit can have this name.
const PROBE_LIMIT: &str = "~probe";

impl Batcher {
    /// Return whether the error shows that the server cannot be used. Return false for errors that concern only one
    /// call.
    pub(super) fn is_failure(&self, error: &StoreError) -> bool {
        self.is_failure_reply(error)
            || matches!(error, StoreError::NotConnected(_) | StoreError::Unreachable(_) | StoreError::Timeout)
    }

    /// Return whether the server replied, but its reply means that it cannot be used.
    pub(super) fn is_failure_reply(&self, error: &StoreError) -> bool {
        match error {
            StoreError::Rejected(_) | StoreError::MalformedReply => true,
            StoreError::Redirected(_) => self.node.is_none(),
            StoreError::NotConnected(_)
            | StoreError::Unreachable(_)
            | StoreError::Timeout
            | StoreError::LateReply
            | StoreError::BreakerOpen
            | StoreError::Overloaded
            | StoreError::CapacityExceeded
            | StoreError::WritesRejected(_)
            | StoreError::CorruptState(_) => false,
        }
    }

    /// Record a failed call that was sent in this epoch of the circuit breaker. If there is a `sample`, later probes
    /// send a call with the properties of this sample.
    pub(super) fn call_failed(self: &Arc<Self>, epoch: u32, error: &StoreError, sample: Option<ProbeCall>) {
        match self.breaker.record_failure(epoch) {
            Assessment::Failing => self.open_breaker(epoch, error, sample),
            Assessment::Suspect if matches!(error, StoreError::Timeout) => self.probe_suspect(epoch, sample),
            Assessment::Suspect | Assessment::Outdated => {}
        }
    }

    /// Record a call of this epoch that got no reply in time, although other calls got a reply.
    pub(super) fn reply_late(self: &Arc<Self>, epoch: u32) {
        if self.breaker.record_late_reply(epoch) {
            self.open_breaker(epoch, &StoreError::Timeout, None);
        }
    }

    /// Open the circuit breaker if it is closed and `epoch` is still its current epoch. Then probe until the server
    /// replies to a call with the properties of the failed call (`sample`).
    pub(super) fn open_breaker(self: &Arc<Self>, epoch: u32, error: &StoreError, sample: Option<ProbeCall>) {
        if !self.breaker.try_open(epoch) {
            return;
        }
        let mut outage_log = OutageLog::new(self.node.clone());
        outage_log.log_failure(error);
        // Keep only a weak reference: when a node has left its cluster, its batcher is dropped and the probes end.
        let batcher = Arc::downgrade(self);
        let breaker = self.breaker.clone();
        tokio::spawn(async move {
            let mut delay = INITIAL_PROBE_DELAY;
            loop {
                sleep(delay + breaker.probe_jitter(delay)).await;
                let Some(batcher) = batcher.upgrade() else { return };
                match batcher.probe(sample.as_ref()).await {
                    Ok(()) => break,
                    Err(error) => outage_log.log_failure(&error),
                }
                delay = (delay * 2).min(MAX_PROBE_DELAY);
            }
            breaker.close();
            outage_log.log_recovery();
        });
    }

    /// Probe a server that did not reply, until it replies or the circuit breaker opens. Without probes, the circuit
    /// breaker would open only after several requests, each of which would wait for the timeout.
    fn probe_suspect(self: &Arc<Self>, epoch: u32, sample: Option<ProbeCall>) {
        if !self.breaker.begin_probing() {
            return;
        }
        let batcher = Arc::downgrade(self);
        let breaker = self.breaker.clone();
        tokio::spawn(async move {
            while breaker.closed_epoch() == Some(epoch)
                && let Some(batcher) = batcher.upgrade()
            {
                let Err(error) = batcher.probe(sample.as_ref()).await else {
                    breaker.record_reply(epoch);
                    break;
                };
                match breaker.record_failure(epoch) {
                    Assessment::Failing => batcher.open_breaker(epoch, &error, sample.clone()),
                    Assessment::Suspect | Assessment::Outdated => sleep(SUSPECT_PROBE_INTERVAL).await,
                }
            }
            breaker.end_probing();
        });
    }

    /// Send a call with the properties of the failed call (`sample`). Without a sample, send the smallest script. Any
    /// reply that is not a failure of the server counts as a success.
    async fn probe(self: &Arc<Self>, sample: Option<&ProbeCall>) -> Result<(), StoreError> {
        // Connect first, with the connect timeout, because connecting takes several round trips.
        checkout(&self.connections).await?;
        let result = timeout(self.timeout, self.send_probe(sample)).await.unwrap_or(Err(StoreError::Timeout));
        result.or_else(|error| if self.is_failure(&error) { Err(error) } else { Ok(()) })
    }

    /// Send a probe that needs the same Redis permissions as the failed call. The probe uses the slot of the failed
    /// call, and writes with the same commands to a state that no request uses.
    async fn send_probe(self: &Arc<Self>, sample: Option<&ProbeCall>) -> Result<(), StoreError> {
        let Some(ProbeCall { identity, rule, usage }) = sample else {
            let mut connection = checkout(&self.connections).await?;
            let reply = connection.send(redis::cmd("EVAL").arg("return 1").arg(0)).await;
            return reply.map(drop).map_err(|error| RedisErrorKind::to_store_error(&error));
        };
        let state_name = StateName::new(&IdentityHasher::new(""), PROBE_LIMIT, &rule.shape());
        let key = Key { identity: *identity, state_name: &state_name };
        let (mode, usage) = (ChargeMode::Enforced, usage.as_ref());
        let charge = Charge { key, rule, cost: 1, mode, permit_id: 0, debt_before_us: 0, usage };
        let deadline = monotonic() + self.timeout;
        self.enqueue(deadline, Purpose::Probe, Operation::Check, &[charge]).await.map(drop)
    }
}
