//! One Redis server and its circuit breaker, in the form in which one worker calls them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::{Cmd, Value};
use tokio::time::{sleep, timeout};

use crate::limiter::metrics::LimiterMetrics;
use crate::limiter::redis::RedisSettings;
use crate::limiter::redis::batch::{ProbeCall, Purpose};
use crate::limiter::redis::batcher::Batcher;
use crate::limiter::redis::circuit_breaker::{CircuitBreaker, RecoverySignal};
use crate::limiter::redis::cluster::topology::SlotMap;
use crate::limiter::redis::connection::checkout;
use crate::limiter::redis::error::RedisErrorKind;
use crate::limiter::redis::server::{Address, RedisEndpoint};
use crate::limiter::verdict::{Charge, Operation, StoreError, Verdict};

/// Interval for checking whether the server has closed idle connections.
const IDLE_CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// A Redis server in the form in which one worker calls it: its connections, its batcher and its circuit breaker.
/// Clones share all three. Connections belong to the runtime that opened them, so create one value for each runtime.
#[derive(Debug, Clone)]
pub struct ServerStore {
    batcher: Arc<Batcher>,
}

impl ServerStore {
    /// Create the client of a server. The client connects when it is first used. All workers share `breaker`.
    pub fn new(
        settings: &RedisSettings,
        server: RedisEndpoint,
        breaker: Arc<CircuitBreaker>,
        metrics: Arc<LimiterMetrics>,
    ) -> Self {
        ServerStore { batcher: Arc::new(Batcher::new(settings, server, breaker, None, metrics)) }
    }

    /// Create the client of the cluster node at `address`. A redirection to another node is not a failure of this node.
    pub fn for_node(
        settings: &RedisSettings,
        server: RedisEndpoint,
        breaker: Arc<CircuitBreaker>,
        address: Address,
        metrics: Arc<LimiterMetrics>,
    ) -> Self {
        ServerStore { batcher: Arc::new(Batcher::new(settings, server, breaker, Some(address), metrics)) }
    }

    /// Return the maximum time from the start of a check to its verdict.
    pub fn timeout(&self) -> Duration {
        self.batcher.timeout
    }

    /// Return the first part of every key.
    pub fn prefix(&self) -> &str {
        &self.batcher.prefix
    }

    /// Return the signal that fires each time the server is available again after an outage.
    pub fn recovery(&self) -> &Arc<RecoverySignal> {
        self.batcher.breaker.recovery()
    }

    /// Return whether the circuit breaker is open, in which case calls fail without being sent.
    pub fn is_open(&self) -> bool {
        self.batcher.breaker.is_open()
    }

    /// Return whether `breaker` is the circuit breaker of this server.
    pub fn uses_breaker(&self, breaker: &Arc<CircuitBreaker>) -> bool {
        Arc::ptr_eq(&self.batcher.breaker, breaker)
    }

    /// Open a connection, so that the first request finds one, and maintain the connections from now on. If the server
    /// cannot be reached, open the circuit breaker at once.
    pub async fn connect(&self) {
        let epoch = self.batcher.breaker.epoch();
        if let Err(error) = checkout(&self.batcher.connections).await {
            self.batcher.open_breaker(epoch, &error, None);
        }
        let batcher = Arc::downgrade(&self.batcher);
        tokio::spawn(async move {
            loop {
                sleep(IDLE_CHECK_INTERVAL).await;
                let Some(batcher) = batcher.upgrade() else { return };
                if !batcher.breaker.is_open() {
                    batcher.connections.maintain().await;
                }
            }
        });
    }

    /// Open missing connections, and replace connections that the server closed while they were idle.
    pub async fn maintain_connections(&self) {
        self.batcher.connections.maintain().await;
    }

    /// Decide all of `charges` at one instant, before `deadline`. `asking` is true if another node of the cluster
    /// redirected the call to this node, which is importing the slot.
    ///
    /// # Errors
    /// See [`StoreError`]. A call is sent again only if an error reply proves that it was not executed.
    pub async fn call(
        &self,
        deadline: Instant,
        asking: bool,
        operation: Operation,
        charges: &[Charge<'_>],
    ) -> Result<Verdict, StoreError> {
        let breaker = &self.batcher.breaker;
        let Some(epoch) = breaker.closed_epoch() else { return Err(StoreError::BreakerOpen) };
        let purpose = if asking { Purpose::Asking } else { Purpose::Checks };
        let result = self.batcher.enqueue(deadline, purpose, operation, charges).await;
        breaker.record_write(operation, charges, &result);
        result.map_err(|error| {
            // Record only replies here, because the batcher records calls without a reply.
            if self.batcher.is_failure_reply(&error) {
                self.batcher.call_failed(epoch, &error, ProbeCall::from_charges(charges));
            }
            match error {
                StoreError::LateReply if breaker.is_open() => StoreError::Timeout,
                StoreError::Overloaded if breaker.is_open() => StoreError::BreakerOpen,
                error => error,
            }
        })
    }

    /// Send an administrator's command. While the circuit breaker is open, nothing is sent, and a failure does not
    /// count for it.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn admin_command(&self, time_limit: Duration, asking: bool, command: &Cmd) -> Result<Value, StoreError> {
        if self.is_open() {
            return Err(StoreError::BreakerOpen);
        }
        let reply = async {
            let mut connection = checkout(&self.batcher.connections).await?;
            let reply = if asking { connection.send_asking(command).await } else { connection.send(command).await };
            reply.map_err(|error| RedisErrorKind::to_store_error(&error))
        };
        timeout(time_limit, reply).await.unwrap_or(Err(StoreError::Timeout))
    }

    /// Return the owner of each slot of the cluster, as this node at `address` knows it.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn slots(&self, address: &Address) -> Result<SlotMap, StoreError> {
        let Some(epoch) = self.batcher.breaker.closed_epoch() else { return Err(StoreError::BreakerOpen) };
        let slots = self.query_slots(address).await;
        match &slots {
            Err(error) if self.batcher.is_failure(error) => self.batcher.call_failed(epoch, error, None),
            Ok(_) | Err(_) => self.batcher.breaker.record_reply(epoch),
        }
        slots
    }

    async fn query_slots(&self, address: &Address) -> Result<SlotMap, StoreError> {
        // Connect first, with the connect timeout, because connecting takes several round trips.
        let mut connection = checkout(&self.batcher.connections).await?;
        let mut command = redis::cmd("CLUSTER");
        command.arg("SLOTS");
        let reply = timeout(self.timeout(), connection.send(&command)).await.map_err(|_| StoreError::Timeout)?;
        let reply = reply.map_err(|error| RedisErrorKind::to_store_error(&error))?;
        SlotMap::from_reply(&reply, address).ok_or(StoreError::MalformedReply)
    }
}
