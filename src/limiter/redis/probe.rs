//! Handling of server failures: watches a server with PING, opens its circuit breaker, and probes the server until it
//! replies.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::{sleep, timeout};

use crate::clock::monotonic;
use crate::limiter::key::{IdentityHasher, Key, StateName};
use crate::limiter::pacing::wait_until;
use crate::limiter::redis::batch::{ProbeCall, Purpose};
use crate::limiter::redis::batcher::Batcher;
use crate::limiter::redis::circuit_breaker::{Assessment, OutageLog, Watch};
use crate::limiter::redis::connection::{Connection, checkout};
use crate::limiter::redis::error::RedisErrorKind;
use crate::limiter::verdict::{Charge, ChargeMode, Operation, StoreError};

/// Delay of the first probe after the circuit breaker opened. Each further delay is twice as long, up to
/// [`MAX_PROBE_DELAY`].
const INITIAL_PROBE_DELAY: Duration = Duration::from_millis(100);
const MAX_PROBE_DELAY: Duration = Duration::from_secs(1);

/// Interval for replacing the connection of a watch if the server has closed it.
const WATCH_INTERVAL: Duration = Duration::from_millis(250);

/// Number of consecutive PINGs without a reply in time that open the circuit breaker. With one PING, a delay between
/// two replies of a busy server would look like an outage.
const MAX_UNANSWERED_PINGS: u32 = 2;

/// Number of steps in which a watch waits for the reply to a PING. Time in which the worker is busy with other tasks
/// extends a step, but does not count towards the other steps.
const PING_WAIT_STEPS: u32 = 5;

/// Delay before a watch connects again after it has lost its connection.
const RECONNECT_DELAY: Duration = Duration::from_millis(10);

/// Name of the limit whose state a probe charges. No configured limit can have this name.
const PROBE_LIMIT: &str = "~probe";

impl Batcher {
    /// Return whether the error shows that the server cannot be used. Return false for errors that concern only one
    /// call.
    pub(super) fn is_failure(&self, error: &StoreError) -> bool {
        self.is_failure_reply(error) || matches!(error, StoreError::NotConnected(_) | StoreError::Unreachable(_))
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

    /// Record a failed call that was sent in this epoch of the circuit breaker. If there is a `call`, later probes
    /// send a call with its properties.
    pub(super) fn call_failed(self: &Arc<Self>, epoch: u32, error: &StoreError, call: Option<ProbeCall>) {
        match self.breaker.record_failure(epoch) {
            Assessment::Failing => self.open_breaker(epoch, error, call),
            Assessment::Suspect | Assessment::Outdated => {}
        }
    }

    /// Open the circuit breaker if it is closed and `epoch` is still its current epoch. Then probe until the server
    /// replies to a call with the properties of the failed `call`.
    pub(super) fn open_breaker(self: &Arc<Self>, epoch: u32, error: &StoreError, call: Option<ProbeCall>) {
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
                match batcher.probe(call.as_ref()).await {
                    Ok(()) => break,
                    Err(error) => outage_log.log_failure(&error),
                }
                delay = (delay * 2).min(MAX_PROBE_DELAY);
            }
            breaker.close();
            outage_log.log_recovery();
        });
    }

    /// Let the watch of the server send a PING, because a call has waited for its reply for longer than the latency
    /// target. The call may wait because Redis is busy with other calls, so its lateness alone is not an outage.
    pub(super) fn suspect(self: &Arc<Self>) {
        if let Some(watch) = self.breaker.try_watch() {
            tokio::spawn(watch_server(Arc::downgrade(self), watch, None));
        }
        self.breaker.suspect();
    }

    /// Open a connection for PING and start the task that watches the server, unless another worker watches it.
    pub(super) async fn start_watch(self: &Arc<Self>) {
        if let Some(watch) = self.breaker.try_watch() {
            let connection = self.connections.open_probe().await.ok();
            tokio::spawn(watch_server(Arc::downgrade(self), watch, connection));
        }
    }

    /// Send PINGs until the server replies or the circuit breaker is open. The circuit breaker opens if the server does
    /// not reply to [`MAX_UNANSWERED_PINGS`] PINGs in time, or if the connection is lost or refused repeatedly.
    async fn verify_alive(self: &Arc<Self>, epoch: u32, connection: &mut Option<Connection>) {
        while self.breaker.closed_epoch() == Some(epoch) {
            let Err(error) = self.ping(connection).await else { return };
            *connection = None;
            let is_silent = matches!(error, StoreError::Timeout);
            if is_silent || self.breaker.record_failure(epoch) == Assessment::Failing {
                return self.open_breaker(epoch, &error, None);
            }
            sleep(RECONNECT_DELAY).await;
        }
    }

    /// Wait for a reply to a PING. Redis replies to it between two calls, even if many calls are queued on other
    /// connections. An error reply is a reply, too.
    async fn ping(&self, connection: &mut Option<Connection>) -> Result<(), StoreError> {
        let connection = match connection {
            Some(open) => open,
            None => connection.insert(self.connections.open_probe().await?),
        };
        let ping = Arc::new(redis::cmd("PING"));
        for _ in 0..MAX_UNANSWERED_PINGS {
            let mut call = Box::pin(connection.clone().call(false, ping.clone()));
            for _ in 0..PING_WAIT_STEPS {
                match wait_until(monotonic() + self.timeout / PING_WAIT_STEPS, call.as_mut()).await {
                    Some(Err(error)) if error.is_unrecoverable_error() => {
                        return Err(RedisErrorKind::to_store_error(&error));
                    }
                    Some(Ok(_) | Err(_)) => return Ok(()),
                    None => {}
                }
            }
        }
        Err(StoreError::Timeout)
    }

    /// Send a call with the properties of the failed `call`. Without it, send the smallest script. Any
    /// reply that is not a failure of the server counts as a success, even if it rejects the call.
    async fn probe(self: &Arc<Self>, call: Option<&ProbeCall>) -> Result<(), StoreError> {
        // Connect first, with the connect timeout, because connecting takes several round trips.
        checkout(&self.connections).await?;
        let result = timeout(self.timeout, self.send_probe(call)).await.unwrap_or(Err(StoreError::Timeout));
        match result {
            Err(error) if error.error_reply().is_none() || self.is_failure_reply(&error) => Err(error),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Send a probe that needs the same Redis permissions as the failed call. The probe uses the slot of the failed
    /// call, and writes with the same commands to a state that no request uses.
    async fn send_probe(self: &Arc<Self>, call: Option<&ProbeCall>) -> Result<(), StoreError> {
        let Some(ProbeCall { identity, rule, usage }) = call else {
            let mut connection = checkout(&self.connections).await?;
            let reply = connection.send(redis::cmd("EVAL").arg("return 1").arg(0)).await;
            return reply.map(drop).map_err(|error| RedisErrorKind::to_store_error(&error));
        };
        let state_name = StateName::new(&IdentityHasher::new(""), PROBE_LIMIT, &rule.shape());
        let key = Key { identity: *identity, state_name: &state_name };
        let mode = ChargeMode::Enforced;
        let usage = usage.as_ref();
        let charge = Charge { key, rule, cost: 1, mode, permit_id: 0, debt_before_us: 0, usage };
        let deadline = monotonic() + self.timeout;
        self.enqueue(deadline, Purpose::Probe, Operation::Check, &[charge]).await.map(drop)
    }
}

/// Watch a server: keep a connection to it open, and send a PING on this connection whenever a call waits for its reply
/// for long. The calls of all workers use other connections. End when the batcher no longer exists.
async fn watch_server(batcher: Weak<Batcher>, watch: Watch, mut connection: Option<Connection>) {
    loop {
        let is_suspected = timeout(WATCH_INTERVAL, watch.breaker().suspected()).await.is_ok();
        let Some(batcher) = batcher.upgrade() else { return };
        // While the circuit breaker is open, the task that `open_breaker` spawned probes the server.
        let Some(epoch) = watch.breaker().closed_epoch() else {
            connection = None;
            continue;
        };
        if is_suspected {
            batcher.verify_alive(epoch, &mut connection).await;
            continue;
        }
        if let Some(open) = &connection
            && batcher.connections.is_usable(open).await
        {
            continue;
        }
        connection = batcher.connections.open_probe().await.ok();
    }
}
