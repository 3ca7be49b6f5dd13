//! The client of one worker for one Redis server. The batcher queues checks and sends them in script calls.
//!
//! All checks of one event-loop tick share one EVALSHA. With [`MIN_IN_FLIGHT_TO_WAIT`] or more requests in flight and a
//! server that replies fast, new checks wait for the next reply and share a call. A window limits the calls in flight,
//! and shrinks when replies slow down, so that a busy server receives larger batches instead of more batches. If there
//! is no room in the window, checks wait in the queue until their deadline. Overload is not an outage and does not open
//! the circuit breaker.
//!
//! Settlements of admitted requests (refunds, releases of permits, renewals, deferred charges) have a queue of their own
//! and are sent before the checks that wait. The call of a reply that is late stays registered: when its reply arrives,
//! the batcher refunds the charges of the requests that it has rejected in the meantime.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::{Duration, Instant};

use futures_util::poll;
use redis::{Cmd, ErrorKind, RedisError, RedisResult, ServerErrorKind, Value};
use tokio::sync::oneshot::Receiver;
use tokio::task::yield_now;
use tokio::time::{sleep, sleep_until, timeout, timeout_at};
use tracing::debug;

use crate::boxed::boxed;
use crate::clock::{Clock, elapsed_since, monotonic};
use crate::limiter::algorithm::AlgorithmKind;
use crate::limiter::metrics::{LimiterMetrics, LostCost};
use crate::limiter::pacing::{
    MAX_WAITING_CHECKS, OUTAGE_RETRY_INTERVAL, SETTLEMENT_TIMEOUT, latency_target, wait_until, worker_delay,
};
use crate::limiter::redis::batch::{
    Batch, BatchError, BatchResult, InFlightWindow, PendingRefund, ProbeCall, Purpose, Refunds, request_weight,
};
use crate::limiter::redis::circuit_breaker::{CircuitBreaker, RecoverySignal};
use crate::limiter::redis::cluster::topology::SlotMap;
use crate::limiter::redis::connection::{Connection, Connections, ServerMode, checkout};
use crate::limiter::redis::error::{Backoff, RedisErrorKind, is_connection_error};
use crate::limiter::redis::script::AlgorithmSet;
use crate::limiter::redis::server::{Address, RedisEndpoint};
use crate::limiter::redis::{RedisSettings, StateLayout, connection};
use crate::limiter::verdict::{Charge, Operation, StoreError, Verdict};

/// With at least this number of requests in flight, the next call waits for a reply. The fixed cost of a call in Redis
/// and in the gateway is as high as the cost of one more request in a batch. With fewer requests in flight, too few
/// requests would share a call to justify the wait.
const MIN_IN_FLIGHT_TO_WAIT: usize = 8;

/// Maximum size of the keys that one worker queues for one server, in bytes. Further checks are rejected at once.
const MAX_QUEUED_BYTES: usize = 4 << 20;

/// Maximum number of closed idle connections that the batcher tries for one call.
const MAX_CLOSED_CONNECTIONS: u32 = 8;

/// Maximum number of times that a call is repeated with the time of Redis, after Redis has rejected the boundaries of a
/// calendar window or day. A second repetition may be necessary, because a day may end between the first reply and the
/// second call.
const MAX_TIME_CORRECTIONS: u32 = 2;

/// The reply to a call, and the connection on which it arrived. `Err` contains the call if the reply is late.
type Exchange = Result<(RedisResult<Value>, Connection), LateCall>;

/// A call whose reply is late. The reply may still arrive.
type LateCall = Pin<Box<dyn Future<Output = RedisResult<Value>> + Send>>;

/// Fraction of the timeout for which a call that Redis rejects is retried.
const RETRY_PART_OF_TIMEOUT: f64 = 0.8;

/// The calls of one worker to one server.
#[derive(Debug)]
pub(super) struct Batcher {
    /// The connections to the server.
    pub(super) connections: Connections,
    /// First part of every key.
    pub(super) prefix: String,
    /// The clock of decisions: the clock of Redis, or another clock in tests.
    pub(super) clock: Clock,
    /// The algorithms whose scripts are loaded on every connection.
    pub(super) algorithms: AlgorithmSet,
    /// Where new states are written.
    layout: Arc<StateLayout>,
    /// Maximum time from the start of a check to its verdict, and from writing a call to its reply.
    pub(super) timeout: Duration,
    /// Maximum time for retrying a call that Redis rejects. This time is shorter than `timeout`, so that the check
    /// fails with the reason.
    retry_timeout: Duration,
    /// Whether requests of different identities may share a call.
    pub(super) shares_calls: bool,
    /// Metrics of the worker, in which the batcher counts its calls.
    pub(super) metrics: Arc<LimiterMetrics>,
    /// The circuit breaker of the server.
    pub(super) breaker: Arc<CircuitBreaker>,
    /// The address of the server if it is a node of a cluster.
    pub(super) node: Option<Address>,
    queue: Mutex<BatchQueue>,
}

/// The batches that wait to be sent.
#[derive(Debug, Default)]
pub(super) struct BatchQueue {
    /// Batches of settlements (see [`Operation::is_settlement`]), which are sent before `checks`. A permit or charge that
    /// waits behind the checks of other clients would deny requests of the same client. The number of settlements has no
    /// bound, because each of them belongs to a request that the store has already charged.
    settlements: VecDeque<PendingBatch>,
    /// Batches of checks. The oldest batch is first. New checks join the last batch.
    checks: VecDeque<PendingBatch>,
    /// Number of requests and bytes of keys in `checks`.
    requests: usize,
    bytes: usize,
    /// Whether a task will send the first batch at the end of the event-loop tick.
    is_send_claimed: bool,
    /// Whether a task rejects expired batches.
    is_sweeping: bool,
    in_flight: InFlightCounts,
    window: InFlightWindow,
    /// Whether the reply to the last call took longer than the latency target.
    is_slow: bool,
}

/// Totals of the calls in flight.
#[derive(Debug, Default)]
struct InFlightCounts {
    calls: usize,
    /// Number of checks. Checks do not wait for the reply to a call with settlements.
    requests: usize,
    weight: usize,
}

/// The requests of the next call.
#[derive(Debug, Default)]
struct PendingBatch {
    batch: Batch,
    /// The earliest deadline of the checks. `None` for settlements, which do not expire in the queue.
    deadline: Option<Instant>,
    /// The time within which no reply is to be expected ([`BatchQueue::take_next`]).
    least_round_trip: Duration,
    /// Until this time, the batcher queues the batch again if Redis certainly did not execute it. `None` if the senders
    /// of the requests retry.
    retry_until: Option<Instant>,
}

/// Counts a call as in flight until the guard is dropped.
struct InFlightGuard<'a> {
    batcher: &'a Batcher,
    requests: usize,
    weight: usize,
    sent_at: Instant,
}

/// A check to queue.
#[derive(Debug, Clone, Copy)]
pub(super) struct BatchItem<'a> {
    pub(super) operation: Operation,
    pub(super) charges: &'a [Charge<'a>],
    /// Time for which the boundaries of calendar windows and days are computed, in µs since the Unix epoch.
    pub(super) assumed_now_us: u64,
    /// The reason for the call.
    pub(super) purpose: Purpose,
    /// Time by which the check needs its verdict.
    pub(super) deadline: Instant,
}

impl Batcher {
    /// Create a batcher with an empty queue, for the cluster node at `node` or for a single server.
    pub(super) fn new(
        settings: &RedisSettings,
        server: RedisEndpoint,
        breaker: Arc<CircuitBreaker>,
        node: Option<Address>,
        metrics: Arc<LimiterMetrics>,
    ) -> Self {
        let RedisSettings { prefix, connections, timeout, connect_timeout, algorithms, clock, layout } =
            settings.clone();
        // In a cluster, each identity has its own hash slot, and a script call must not use several slots.
        let shares_calls = server.mode() != ServerMode::Cluster;
        Batcher {
            connections: connection::new_pool(server, algorithms, connections, connect_timeout),
            prefix,
            clock,
            algorithms,
            layout,
            timeout,
            retry_timeout: timeout.mul_f64(RETRY_PART_OF_TIMEOUT),
            shares_calls,
            metrics,
            breaker,
            node,
            queue: Mutex::default(),
        }
    }

    /// Queue a check and wait for its verdict. If an error reply proves that Redis executed nothing, queue the check
    /// again, until `deadline`. A check without a reply is never sent again.
    pub(super) async fn enqueue(
        self: &Arc<Self>,
        deadline: Instant,
        purpose: Purpose,
        operation: Operation,
        charges: &[Charge<'_>],
    ) -> Result<Verdict, StoreError> {
        // Only calendar windows and the days of usage totals need the time. If Redis' clock is outside of the window or
        // day that is computed for this time, Redis rejects the check and replies with its own time.
        let needs_time = |charge: &Charge<'_>| charge.rule.kind() == AlgorithmKind::Calendar || charge.usage.is_some();
        let assumed_now_us = if charges.iter().any(needs_time) { self.clock.now_us() } else { 0 };
        let item = BatchItem { operation, charges, assumed_now_us, purpose, deadline };
        match self.enqueue_once(item).await {
            Ok(verdict) => Ok(verdict),
            Err(BatchError::Store(error)) => Err(error),
            Err(BatchError::ErrorReply(error)) => {
                // Box the future, because only few checks need space for a retry.
                let retried = Box::pin(self.retry(item, error));
                if operation.is_settlement() {
                    return retried.await;
                }
                timeout_at(deadline.into(), retried).await.unwrap_or(Err(StoreError::LateReply))
            }
        }
    }

    async fn retry(self: &Arc<Self>, mut item: BatchItem<'_>, mut error: RedisError) -> Result<Verdict, StoreError> {
        let mut corrections = 0;
        let mut backoff = None;
        loop {
            if let Some(redis_us) = server_time(&error).filter(|_| corrections < MAX_TIME_CORRECTIONS) {
                corrections += 1;
                item.assumed_now_us = redis_us;
            } else if RedisErrorKind::from_error(&error) == Some(RedisErrorKind::Retryable) {
                match backoff.get_or_insert_with(|| Backoff::new(self.retry_timeout)).next() {
                    Some(pause) => sleep(pause).await,
                    None => return Err(RedisErrorKind::to_store_error(&error)),
                }
            } else {
                return Err(RedisErrorKind::to_store_error(&error));
            }
            error = match self.enqueue_once(item).await {
                Ok(verdict) => return Ok(verdict),
                Err(BatchError::Store(error)) => return Err(error),
                Err(BatchError::ErrorReply(error)) => error,
            };
        }
    }

    async fn enqueue_once(self: &Arc<Self>, item: BatchItem<'_>) -> BatchResult {
        let receiver = {
            let mut queue = self.lock_queue();
            let Some(receiver) = queue.push_item(self, item) else {
                return Err(BatchError::Store(StoreError::Overloaded));
            };
            if queue.try_claim(self.shares_calls) {
                // Spawn a task to send the batch. The task runs after the tasks that are ready now, so the checks of
                // these tasks join the batch.
                self.spawn_run();
            }
            self.ensure_sweep(&mut queue);
            receiver
        };
        receiver.await.unwrap_or(Err(BatchError::Store(StoreError::Overloaded)))
    }

    fn lock_queue(&self) -> MutexGuard<'_, BatchQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Send the batch that was claimed at `claimed_at`, and then the batches that were waiting for its reply.
    async fn run(self: Arc<Self>, mut claimed_at: Instant) {
        loop {
            let Some(mut pending_batch) = self.lock_queue().take_next() else { return };
            pending_batch.deadline = pending_batch.deadline.map(|deadline| deadline + worker_delay(claimed_at));
            self.spawn_next();
            self.send(pending_batch).await;
            if !self.lock_queue().try_claim(self.shares_calls) {
                return;
            }
            claimed_at = monotonic();
            // Yield, so that checks of requests in the socket buffers of the worker can join the batch.
            yield_now().await;
        }
    }

    fn spawn_run(self: &Arc<Self>) {
        // Box the future, because tokio would move it several times.
        tokio::spawn(boxed(|| self.clone().run(monotonic())));
    }

    /// Start a task that sends the next batch, if the batch need not wait.
    fn spawn_next(self: &Arc<Self>) {
        let mut queue = self.lock_queue();
        if queue.try_claim(self.shares_calls) {
            self.spawn_run();
        }
        self.ensure_sweep(&mut queue);
    }

    /// Start a task that rejects expired batches while checks wait for room in the window, unless such a task is
    /// running.
    fn ensure_sweep(self: &Arc<Self>, queue: &mut BatchQueue) {
        if !queue.is_sweeping && queue.is_limited() {
            queue.is_sweeping = true;
            let batcher = self.clone();
            tokio::spawn(async move { batcher.reject_expired().await });
        }
    }

    /// Send one batch before its deadline.
    async fn send(self: &Arc<Self>, mut pending_batch: PendingBatch) {
        let began = monotonic();
        let due = pending_batch.deadline.unwrap_or(began + self.timeout);
        let mut in_flight = InFlightGuard {
            batcher: self,
            requests: pending_batch.check_count(),
            weight: InFlightWindow::weight(&pending_batch.batch),
            sent_at: began,
        };
        let is_late = pending_batch.is_late(began);
        let batch = &mut pending_batch.batch;
        // The epoch of a probe is `None`: a probe is sent even while the circuit breaker is open, and the task that
        // sends probes records their results in the circuit breaker.
        let epoch = match (batch.purpose(), self.breaker.closed_epoch()) {
            (Purpose::Probe, _) => None,
            (Purpose::Checks | Purpose::Asking, Some(epoch)) => Some(epoch),
            (Purpose::Checks | Purpose::Asking, None) => {
                return self.fail_unexecuted(pending_batch, &BatchError::Store(StoreError::BreakerOpen));
            }
        };
        if is_late {
            // The checks were queued for so long that the reply would be late. Fail them without sending the call: Redis
            // would charge them, and then refund the charges, instead of deciding checks that are still waited for.
            return self.fail_unexecuted(pending_batch, &BatchError::Store(StoreError::Overloaded));
        }
        if !batch.drop_cancelled() {
            return;
        }
        let failed = |error: &StoreError, batch: &Batch| {
            if let Some(epoch) = epoch {
                self.call_failed(epoch, error, batch.probe_call());
            }
        };
        let exchange = match self.exchange_script(batch, due, &mut in_flight.sent_at).await {
            Ok(exchange) => exchange,
            Err(error) => {
                if !error.is_overload() {
                    failed(&error, batch);
                }
                return self.fail_unexecuted(pending_batch, &BatchError::Store(error));
            }
        };
        let answered = elapsed_since(in_flight.sent_at);
        let weight = in_flight.weight;
        let limited = self.lock_queue().is_limited();
        drop(in_flight);
        match exchange {
            // The checks have been rejected. A late reply is not a failure of the server, which may be busy: whether the
            // server hangs is decided by the task that watches it.
            Err(late_call) => {
                self.lock_queue().window.record_reply(weight, answered, self.timeout, limited);
                self.await_late_reply(late_call, pending_batch.batch);
            }
            Ok((Ok(reply), connection)) => {
                let mut queue = self.lock_queue();
                queue.window.record_reply(weight, answered, self.timeout, limited);
                queue.window.record_round_trip(answered);
                drop(queue);
                let has_verdict = self.complete(pending_batch.batch, reply, &connection);
                if let (true, Some(epoch)) = (has_verdict, epoch) {
                    self.breaker.record_reply(epoch);
                }
            }
            Ok((Err(error), connection)) => {
                if is_connection_error(&error) {
                    connection.request_replacement();
                }
                if error.is_unrecoverable_error() {
                    let error = RedisErrorKind::to_store_error(&error);
                    failed(&error, batch);
                    batch.count_unanswered(&self.metrics);
                    return pending_batch.batch.fail(&BatchError::Store(error));
                }
                self.fail_unexecuted(pending_batch, &BatchError::ErrorReply(error));
            }
        }
    }

    /// Send each request its part of the reply, and refund the charges of requests that no longer wait for it. Return
    /// whether at least one request has a verdict.
    fn complete(self: &Arc<Self>, batch: Batch, reply: Value, connection: &Connection) -> bool {
        let outcome = batch.complete(reply);
        if !outcome.is_valid {
            // Replace the connection if the reply is not valid: the reply may belong to another call, or the server may
            // have become a replica.
            connection.request_replacement();
        }
        outcome.refunds.into_iter().for_each(|refunds| self.send_refunds(refunds));
        outcome.has_verdict
    }
}

impl Batcher {
    /// Send a batch and wait for its reply. If Redis has not loaded the script, send the batch again with the source of
    /// the script.
    async fn exchange_script(
        self: &Arc<Self>,
        batch: &mut Batch,
        deadline: Instant,
        written_at: &mut Instant,
    ) -> Result<Exchange, StoreError> {
        let exchange = self.exchange(batch, deadline, written_at).await?;
        let is_missing = |error: &RedisError| error.kind() == ErrorKind::Server(ServerErrorKind::NoScript);
        match exchange {
            Ok((Err(error), _)) if is_missing(&error) && batch.send_source() => {
                if !batch.drop_cancelled() || monotonic() >= deadline {
                    return Err(StoreError::Overloaded);
                }
                self.exchange(batch, deadline, written_at).await
            }
            exchange => Ok(exchange),
        }
    }

    /// Send a batch on a connection and wait for its reply. Return the call if the reply arrives neither before the
    /// deadline nor within the timeout of the call, which starts at `written_at`.
    async fn exchange(
        self: &Arc<Self>,
        batch: &mut Batch,
        deadline: Instant,
        written_at: &mut Instant,
    ) -> Result<Exchange, StoreError> {
        let command = Arc::new(batch.command(self.algorithms, &self.layout, self.clock.script_argument_us()));
        let asking = batch.purpose() == Purpose::Asking;
        self.metrics.calls.increment(0);
        let mut closed_connections = 0;
        let (mut call, connection) = loop {
            let connection = self.checkout_connection(deadline).await?;
            let mut call = Box::pin(connection.clone().call(asking, command.clone()));
            match poll!(call.as_mut()) {
                Poll::Pending => break (call, connection),
                // The server has closed the connection while it was idle. Try another connection, because nothing was
                // written.
                Poll::Ready(Err(error))
                    if error.is_unrecoverable_error() && closed_connections < MAX_CLOSED_CONNECTIONS =>
                {
                    closed_connections += 1
                }
                Poll::Ready(reply) => return Ok(Ok((reply, connection))),
            }
        };
        // Yield, so that the task of the connection writes the call before the time of writing is recorded.
        yield_now().await;
        *written_at = monotonic();
        Ok(match self.wait_for_reply(call.as_mut(), batch, deadline, *written_at).await {
            Some(reply) => Ok((reply, connection)),
            None => {
                // The call of a probe is dropped, which counts it as unanswered.
                if batch.purpose() != Purpose::Probe {
                    connection.count_late_reply();
                }
                Err(call)
            }
        })
    }

    /// Return a connection. Open a connection if there is none.
    async fn checkout_connection(&self, deadline: Instant) -> Result<Connection, StoreError> {
        let checkout = timeout_at(deadline.into(), checkout(&self.connections)).await;
        checkout.unwrap_or_else(|_| Err(self.connections.checkout_timeout()))
    }

    /// Wait for the reply to a call that was written. At the deadline, fail the checks, but continue to wait for the
    /// reply, because its charges must be refunded.
    async fn wait_for_reply<T>(
        self: &Arc<Self>,
        mut call: Pin<&mut impl Future<Output = T>>,
        batch: &mut Batch,
        deadline: Instant,
        written_at: Instant,
    ) -> Option<T> {
        let release_at = written_at + latency_target(self.timeout);
        if let Ok(reply) = timeout_at(deadline.min(release_at).into(), call.as_mut()).await {
            return Some(reply);
        }
        self.release_batch();
        self.suspect();
        if let Some(reply) = wait_until(deadline, call.as_mut()).await {
            return Some(reply);
        }
        batch.fail_waiters(&BatchError::Store(StoreError::LateReply));
        wait_until(written_at + self.timeout, call).await
    }

    /// Send the queued checks now, because the reply that they wait for is slow.
    fn release_batch(self: &Arc<Self>) {
        self.lock_queue().is_slow = true;
        self.spawn_next();
    }

    /// Wait for the reply to a call whose requests have been rejected because the reply is late, and refund their
    /// charges. If the reply never arrives, count their cost as lost.
    fn await_late_reply(self: &Arc<Self>, call: LateCall, batch: Batch) {
        if batch.purpose() == Purpose::Probe {
            return;
        }
        let batcher = self.clone();
        tokio::spawn(async move {
            match timeout(SETTLEMENT_TIMEOUT, call).await {
                Ok(Ok(reply)) => {
                    batch.complete(reply).refunds.into_iter().for_each(|refunds| batcher.send_refunds(refunds));
                }
                Ok(Err(_)) | Err(_) => batch.count_unanswered(&batcher.metrics),
            }
        });
    }

    /// Refund the charges of checks that were rejected before their reply arrived.
    fn send_refunds(self: &Arc<Self>, Refunds { batch, pending }: Refunds) {
        let retry_until = Some(monotonic() + SETTLEMENT_TIMEOUT);
        let pending_batch = PendingBatch { batch, retry_until, ..PendingBatch::default() };
        self.lock_queue().settlements.push_back(pending_batch);
        self.spawn_next();
        let metrics = self.metrics.clone();
        tokio::spawn(async move {
            for PendingRefund { cost, result } in pending {
                let Ok(Err(error)) = result.await else { continue };
                debug!(?error, "a refund failed: a rejected request may remain charged");
                // The task that waits for the reply counts the cost of refunds without a reply.
                if !matches!(&error, BatchError::Store(error) if error.is_unanswered()) {
                    metrics.lost_cost.add(LostCost::Refund as usize, cost);
                }
            }
        });
    }

    /// Fail a batch that Redis certainly did not execute. If the batcher itself retries the batch, queue the batch again
    /// instead: after an interval, or at the end of the outage.
    fn fail_unexecuted(self: &Arc<Self>, pending_batch: PendingBatch, error: &BatchError) {
        let is_executable = match error {
            BatchError::Store(_) => true,
            BatchError::ErrorReply(error) => RedisErrorKind::from_error(error) == Some(RedisErrorKind::Retryable),
        };
        let retry_until = pending_batch.retry_until.filter(|until| is_executable && monotonic() < *until);
        if retry_until.is_none() {
            return pending_batch.batch.fail(error);
        }
        let batcher = self.clone();
        tokio::spawn(async move {
            let _ = timeout(OUTAGE_RETRY_INTERVAL, batcher.breaker.recovery().recovered()).await;
            batcher.lock_queue().settlements.push_back(pending_batch);
            batcher.spawn_next();
        });
    }

    /// Reject batches that expire while they wait for room in the window.
    async fn reject_expired(self: Arc<Self>) {
        loop {
            let deadline = {
                let mut queue = self.lock_queue();
                let now = monotonic();
                let horizon = now + latency_target(self.timeout);
                for expired in queue.take_expired(now, horizon) {
                    expired.batch.fail(&BatchError::Store(StoreError::Overloaded));
                }
                match queue.next_expiry(horizon) {
                    Some(due) => due,
                    None => {
                        queue.is_sweeping = false;
                        return;
                    }
                }
            };
            sleep_until(deadline.into()).await;
        }
    }
}

impl BatchQueue {
    /// Add a request to the last batch of its kind, or to a new one. Return the receiver of its result, or `None` if the
    /// queue of checks is full.
    fn push_item(&mut self, batcher: &Arc<Batcher>, item: BatchItem<'_>) -> Option<Receiver<BatchResult>> {
        let BatchItem { operation, charges, assumed_now_us, purpose, deadline } = item;
        let is_settlement = operation.is_settlement();
        if !is_settlement && (self.requests >= MAX_WAITING_CHECKS || self.bytes >= MAX_QUEUED_BYTES) {
            return None;
        }
        let weight = request_weight(operation, charges);
        let batches = if is_settlement { &mut self.settlements } else { &mut self.checks };
        let fits = |last: &PendingBatch| {
            let is_same_purpose = purpose == Purpose::Checks && last.batch.purpose() == purpose;
            batcher.shares_calls && is_same_purpose && !last.batch.would_overflow(weight)
        };
        if !batches.back().is_some_and(fits) {
            batches.push_back(PendingBatch { batch: Batch::for_purpose(purpose), ..PendingBatch::default() });
        }
        let last = batches.back_mut()?;
        let bytes_before = last.batch.key_bytes();
        let receiver = last.batch.push(&batcher.prefix, operation, charges, weight, assumed_now_us);
        if is_settlement {
            return Some(receiver);
        }
        last.deadline = Some(last.deadline.map_or(deadline, |other| other.min(deadline)));
        self.requests += 1;
        self.bytes += last.batch.key_bytes() - bytes_before;
        Some(receiver)
    }

    /// Remove the checks that have expired at `now`. A coalesced check is queued up to one latency target after it was
    /// made, so the deadlines are not in order. All batches after the first one whose deadline is after `horizon` have
    /// not expired.
    fn take_expired(&mut self, now: Instant, horizon: Instant) -> Vec<PendingBatch> {
        let searched = self.checks.iter().take_while(|pending| pending.is_expired(horizon)).count();
        let mut expired = Vec::new();
        let mut index = 0;
        for _ in 0..searched {
            match self.checks.get(index) {
                Some(pending) if pending.is_expired(now) => expired.extend(self.checks.remove(index)),
                Some(_) | None => index += 1,
            }
        }
        expired.iter().for_each(|pending| self.subtract(&pending.batch));
        expired
    }

    /// Return the earliest deadline of a check. See [`BatchQueue::take_expired`].
    fn next_expiry(&self, horizon: Instant) -> Option<Instant> {
        let early = self.checks.iter().take_while(|pending| pending.is_expired(horizon));
        early.chain(self.checks.front()).filter_map(|pending| pending.deadline).min()
    }

    fn subtract(&mut self, batch: &Batch) {
        self.requests -= batch.request_count();
        self.bytes -= batch.key_bytes();
    }

    /// Return the batch that is sent next.
    fn front(&self) -> Option<&PendingBatch> {
        self.settlements.front().or(self.checks.front())
    }

    /// Return whether the next batch fits into the window.
    fn has_room(&self) -> bool {
        self.front().is_none_or(|first| {
            self.in_flight.calls == 0
                || self.window.has_room(self.in_flight.weight, InFlightWindow::weight(&first.batch))
        })
    }

    /// Return whether batches wait because the window has no room.
    fn is_limited(&self) -> bool {
        self.front().is_some() && !self.has_room()
    }

    /// Claim the next batch if it can be sent now and no task has claimed it. Return whether the caller must send the
    /// batch.
    fn try_claim(&mut self, shares_calls: bool) -> bool {
        // A batch waits for a reply only if replies are fast, calls are shared, the batch is not full, and enough
        // requests are in flight.
        let ready = self.is_slow
            || !shares_calls
            || self.settlements.len().max(self.checks.len()) > 1
            || self.in_flight.requests < MIN_IN_FLIGHT_TO_WAIT;
        let is_claimed = !self.is_send_claimed && self.front().is_some() && ready && self.has_room();
        self.is_send_claimed |= is_claimed;
        is_claimed
    }

    /// Remove the claimed batch from the queue.
    fn take_next(&mut self) -> Option<PendingBatch> {
        self.is_send_claimed = false;
        let mut pending_batch = match self.settlements.pop_front() {
            Some(settlements) => settlements,
            None => {
                let checks = self.checks.pop_front()?;
                self.subtract(&checks.batch);
                checks
            }
        };
        self.in_flight.calls += 1;
        self.in_flight.requests += pending_batch.check_count();
        self.in_flight.weight += InFlightWindow::weight(&pending_batch.batch);
        // With no other call in flight, send the batch in any case, because its reply may show that Redis is fast again.
        if self.in_flight.calls > 1 && pending_batch.batch.purpose() != Purpose::Probe {
            pending_batch.least_round_trip = self.window.least_round_trip();
        }
        Some(pending_batch)
    }
}

impl PendingBatch {
    /// Return the number of checks. Settlements are not checks.
    fn check_count(&self) -> usize {
        if self.deadline.is_some() { self.batch.request_count() } else { 0 }
    }

    fn is_expired(&self, now: Instant) -> bool {
        self.deadline.is_some_and(|due| due <= now)
    }

    /// Return whether the reply to a call that is sent now would arrive after the deadline.
    fn is_late(&self, now: Instant) -> bool {
        self.is_expired(now + self.least_round_trip)
    }
}

impl Drop for InFlightGuard<'_> {
    fn drop(&mut self) {
        let mut queue = self.batcher.lock_queue();
        queue.in_flight.calls -= 1;
        queue.in_flight.requests -= self.requests;
        queue.in_flight.weight -= self.weight;
        queue.is_slow = elapsed_since(self.sent_at) > latency_target(self.batcher.timeout);
    }
}

/// Return the time of Redis, in µs since the Unix epoch, that an `RLSTALE` error contains. Redis replies with this
/// error if its time is outside of the calendar windows or the day in the arguments of a check. Return `None` for other
/// errors.
fn server_time(error: &RedisError) -> Option<u64> {
    let detail = error.detail().filter(|_| error.code() == Some("RLSTALE"))?;
    detail.rsplit(' ').next()?.parse().ok()
}

// === The client of one server ===

/// Interval for checking whether the server has closed idle connections.
const IDLE_CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// The client of one worker for one Redis server: its connections, its batcher and its circuit breaker. Clones share
/// all three. Connections belong to the runtime that opened them, so create one value for each runtime.
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

    /// Return where new states are written.
    pub fn layout(&self) -> &StateLayout {
        &self.batcher.layout
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
        match checkout(&self.batcher.connections).await {
            Ok(_) => self.batcher.start_watch().await,
            Err(error) => self.batcher.open_breaker(epoch, &error, None),
        }
        let batcher = Arc::downgrade(&self.batcher);
        tokio::spawn(async move {
            loop {
                sleep(IDLE_CHECK_INTERVAL).await;
                let Some(batcher) = batcher.upgrade() else { return };
                if !batcher.breaker.is_open() {
                    batcher.connections.maintain().await;
                    batcher.start_watch().await;
                }
            }
        });
    }

    /// Open missing connections, and replace connections that the server closed while they were idle.
    pub async fn maintain_connections(&self) {
        self.batcher.connections.maintain().await;
    }

    /// Decide all of `charges` together, before `deadline`. `asking` is true if another node of the cluster redirected
    /// the call to this node, which is importing the slot.
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
            // Record only error replies here, because the batcher records calls without a reply.
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

    /// Send an administrative command, which is not batched with checks. While the circuit breaker is open, nothing is
    /// sent. The circuit breaker does not count failures of these commands.
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
            Err(StoreError::Timeout) => self.batcher.suspect(),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::algorithm::Rule;
    use crate::limiter::algorithm::sliding_buckets::SlidingBuckets;
    use crate::limiter::algorithm::sliding_log::SlidingLog;
    use crate::limiter::key::{IdentityHasher, Key};
    use crate::limiter::quota::Quota;
    use crate::limiter::spec::LimitSpec;
    use crate::limiter::verdict::ChargeMode;

    /// Return a batcher whose server does not exist, and a limit with which tests can queue checks.
    fn batcher(settings: &RedisSettings) -> (Arc<Batcher>, LimitSpec) {
        let server = RedisEndpoint::Single(redis::Client::open("redis://127.0.0.1:1").unwrap());
        let limit = LimitSpec::token_bucket(&IdentityHasher::new(""), "limit", "10/s".parse().unwrap()).unwrap();
        (Arc::new(Batcher::new(settings, server, Arc::default(), None, Arc::default())), limit)
    }

    fn charge(limit: &LimitSpec) -> Charge<'_> {
        let variant = &limit.default_variant;
        let key = Key { identity: IdentityHasher::new("").hash(b"client"), state_name: &variant.state_name };
        let mode = ChargeMode::Enforced;
        Charge { key, rule: &variant.rule, cost: 1, mode, permit_id: 0, debt_before_us: 0, usage: None }
    }

    fn item<'a>(charges: &'a [Charge<'a>]) -> BatchItem<'a> {
        BatchItem {
            operation: Operation::Check,
            charges,
            assumed_now_us: 0,
            purpose: Purpose::Checks,
            deadline: monotonic(),
        }
    }

    #[tokio::test]
    async fn check_that_is_late_in_the_queue_is_not_sent() {
        let (batcher, limit) = batcher(&RedisSettings::default());
        let result = batcher.enqueue(monotonic(), Purpose::Checks, Operation::Check, &[charge(&limit)]).await;
        assert!(matches!(result, Err(StoreError::Overloaded)), "{result:?}");
    }

    #[tokio::test]
    async fn queue_counts_what_waits_and_the_window_what_is_in_flight() {
        let (batcher, limit) = batcher(&RedisSettings::default());
        let charges = [charge(&limit)];
        let mut queue = BatchQueue::default();
        let mut receivers: Vec<_> = (0..300).map(|_| queue.push_item(&batcher, item(&charges)).unwrap()).collect();
        let sizes: Vec<_> = queue.checks.iter().map(|pending| pending.batch.weight()).collect();
        assert_eq!((sizes, queue.requests), (vec![128, 128, 44], 300));
        let key_bytes = queue.bytes / 300;
        for waiting in [172, 44, 0] {
            assert!(queue.try_claim(true) && !queue.try_claim(true), "one task sends the batch");
            assert!(queue.take_next().is_some());
            assert_eq!((queue.requests, queue.bytes), (waiting, waiting * key_bytes));
            assert!(waiting == 0 || queue.is_limited() && !queue.try_claim(true), "a full batch fills the window");
            queue.in_flight = InFlightCounts::default();
        }
        receivers.extend(std::iter::from_fn(|| queue.push_item(&batcher, item(&charges))));
        assert_eq!(queue.requests, MAX_WAITING_CHECKS, "the queue is full");
    }

    #[tokio::test]
    async fn settlements_are_sent_before_checks_that_fill_the_queue() {
        let (batcher, limit) = batcher(&RedisSettings::default());
        let charges = [charge(&limit)];
        let mut queue = BatchQueue::default();
        let mut receivers: Vec<_> = std::iter::from_fn(|| queue.push_item(&batcher, item(&charges))).collect();
        let refund = Operation::Refund { charged_at: 1 };
        for operation in [refund, Operation::Charge, Operation::Renew] {
            receivers.extend(queue.push_item(&batcher, BatchItem { operation, ..item(&charges) }));
        }
        assert_eq!((receivers.len(), queue.requests), (MAX_WAITING_CHECKS + 3, MAX_WAITING_CHECKS));
        assert!(queue.try_claim(true));
        let first = queue.take_next().unwrap();
        assert_eq!(
            (first.batch.request_count(), first.deadline),
            (3, None),
            "settlements share a call and do not expire"
        );
        assert_eq!((queue.in_flight.calls, queue.in_flight.requests), (1, 0), "checks do not wait for its reply");
        queue.in_flight = InFlightCounts { requests: MIN_IN_FLIGHT_TO_WAIT, ..InFlightCounts::default() };
        assert!(queue.try_claim(true), "a full batch of checks is sent");
        assert_eq!(queue.take_next().unwrap().batch.request_count(), 128);
        assert_eq!(queue.requests, MAX_WAITING_CHECKS - 128);
    }

    #[tokio::test]
    async fn batch_is_bounded_by_the_work_of_its_checks() {
        let (batcher, limit) = batcher(&RedisSettings::default());
        let window = |quota: &str| -> Quota { quota.parse().unwrap() };
        let log = Rule::SlidingLog(SlidingLog::new(window("10000/min")).unwrap());
        let buckets = Rule::SlidingBuckets(SlidingBuckets::new(window("10000/min"), 1000).unwrap());
        let refund = Operation::Refund { charged_at: 1 };
        for (rule, cost, operation, most_requests) in [
            (&limit.default_variant.rule, 1000, Operation::Check, 128),
            (&log, 1, Operation::Check, 128 / 6),
            (&log, 200, Operation::Check, 128 / 12),
            (&log, 10_000, Operation::Check, 1),
            (&log, 1, refund, 1),
            (&buckets, 1, Operation::Check, 1),
        ] {
            let charges = [Charge { rule, cost, ..charge(&limit) }];
            let mut queue = BatchQueue::default();
            let _receivers: Vec<_> = (0..300)
                .map(|_| queue.push_item(&batcher, BatchItem { operation, ..item(&charges) }).unwrap())
                .collect();
            let batches = queue.checks.iter().chain(&queue.settlements);
            let most = batches.map(|pending| pending.batch.request_count()).max();
            assert_eq!(most, Some(most_requests), "{operation:?} of {cost} tokens, {rule:?}");
        }
    }

    #[tokio::test]
    async fn batch_whose_reply_would_be_late_is_not_sent_while_other_calls_are_in_flight() {
        let (batcher, limit) = batcher(&RedisSettings::default());
        let charges = [charge(&limit)];
        let round_trip = Duration::from_millis(20);
        for (replies, calls_in_flight, expected) in
            [(0, 1, Duration::ZERO), (1, 1, Duration::ZERO), (2, 1, round_trip), (2, 0, Duration::ZERO)]
        {
            let mut queue = BatchQueue::default();
            let _receiver = queue.push_item(&batcher, item(&charges)).unwrap();
            (0..replies).for_each(|_| queue.window.record_round_trip(round_trip));
            queue.in_flight.calls = calls_in_flight;
            let least = queue.take_next().unwrap().least_round_trip;
            assert_eq!(least, expected, "{replies} replies, {calls_in_flight} calls in flight");
            let sent = PendingBatch {
                deadline: Some(monotonic() + round_trip / 2),
                least_round_trip: least,
                ..PendingBatch::default()
            };
            assert_eq!(sent.is_late(monotonic()), !least.is_zero());
        }
    }

    #[tokio::test]
    async fn expired_batch_behind_a_batch_with_a_later_deadline_is_removed() {
        let (batcher, limit) = batcher(&RedisSettings::default());
        let charges = [charge(&limit)];
        let now = monotonic();
        let mut queue = BatchQueue::default();
        let later = |ms| now + Duration::from_millis(ms);
        // Checks with this purpose do not share a batch.
        let push = |queue: &mut BatchQueue, deadline| {
            queue.push_item(&batcher, BatchItem { deadline, purpose: Purpose::Asking, ..item(&charges) })
        };
        let _receivers = [2, 0, 1, 100].map(|ms| push(&mut queue, later(ms)));
        let expired = queue.take_expired(later(1), later(3));
        assert_eq!(expired.iter().map(|pending| pending.deadline).collect::<Vec<_>>(), [Some(now), Some(later(1))]);
        assert_eq!((queue.requests, queue.next_expiry(later(4))), (2, Some(later(2))));
    }

    #[tokio::test]
    async fn queue_is_bounded_by_the_bytes_of_its_keys() {
        let (batcher, limit) = batcher(&RedisSettings { prefix: "p".repeat(5000), ..RedisSettings::default() });
        let charges = [charge(&limit)];
        let mut queue = BatchQueue::default();
        let receivers: Vec<_> = std::iter::from_fn(|| queue.push_item(&batcher, item(&charges))).collect();
        assert!(receivers.len() > 800 && queue.bytes < MAX_QUEUED_BYTES + 6000, "{} bytes", queue.bytes);
    }
}
