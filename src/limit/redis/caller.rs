//! The batcher: a bounded queue of checks in front of one server, and the calls that take them there.
//!
//! The checks of one event-loop tick leave in one EVALSHA. With [`MANY`] or more requests in flight and a server that replies soon,
//! new checks wait for the next reply and share a call. At most a window of calls is in flight: it shrinks when replies
//! slow down, so that a busy server meets larger batches and not more of them. What does not fit waits in the queue, within its
//! deadline; overload is not an outage, and nothing here is counted against the server but its own silence.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::Poll;
use std::time::Instant;

use futures_util::poll;
use redis::{RedisResult, Value};
use tokio::sync::oneshot::Receiver;
use tokio::task::yield_now;
use tokio::time::{Duration, sleep_until, timeout_at};
use tracing::debug;

use super::Sample;
use super::batch::{Answer, Batch, Purpose, Refusal};
use super::connection::{Connection, Connections, checkout};
use super::fault::{Fault, is_of_the_connection};
use super::script::Parts;
use super::window::Window;
use crate::limit::clock::{Clock, monotonic, since};
use crate::limit::store::{Charge, Operation, StoreError};
use crate::limit::tallies::Tallies;

/// With so many requests in flight the next call waits for a reply. A call costs Redis as much as another request in it, and
/// the gateway as well; with fewer in flight there would be few to share that.
const MANY: usize = 8;

/// Replies within this part of the timeout are worth waiting for, later ones would be felt: 3 ms of 50.
pub const SOON: u32 = 16;

/// Requests and bytes of keys that one worker queues for one server: what it can decide within the default timeout, and more.
/// Further ones are rejected at once.
const MOST_QUEUED: usize = 16_384;
const MOST_QUEUED_BYTES: usize = 4 << 20;

/// Connections that may all have been closed while they were idle.
const MOST_CONNECTIONS: u32 = 8;

/// A timer that fires later than this was held up by other tasks of the worker: tokio's timers have a resolution of 1 ms.
const LATE: Duration = Duration::from_millis(2);

/// A worker that is held up by other tasks gives a check and a call so much more time at most: a server that hangs is found out in
/// the end.
pub const LATEST: Duration = Duration::from_secs(1);

/// What one worker calls a server with.
#[derive(Debug)]
pub(super) struct Caller {
    /// To the server.
    pub(super) connections: Connections,
    /// First part of every key.
    pub(super) prefix: String,
    /// Whose time decides.
    pub(super) clock: Clock,
    /// What connections have loaded.
    pub(super) algorithms: Parts,
    /// Maximum time from when a request asks to its verdict, and from when a call is written to its reply.
    pub(super) timeout: Duration,
    /// Whether requests of all identities may share a call. In a cluster each identity has a slot of its own.
    pub(super) together: bool,
    /// Where calls are counted.
    pub(super) tallies: Arc<Tallies>,
    /// Who is told how calls end.
    pub(super) judge: OnceLock<Arc<dyn Judge>>,
    /// What waits, and what it waits for.
    pub(super) queue: Mutex<Queue>,
    /// Replies so far.
    pub(super) replies: AtomicU64,
}

/// Judges the server by its calls: the circuit breaker.
pub trait Judge: Debug + Send + Sync {
    /// Names the time since the breaker was opened or closed last; none while it is open.
    fn era(&self) -> Option<u32>;
    /// A call of this era got a reply.
    fn answered(&self, era: u32);
    /// A call of this era got none in time, while others were answered.
    fn late(&self, era: u32);
    /// A call of this era got none: the connection broke, or the server was silent for the timeout. A probe is to be made `like` it.
    fn failed(&self, era: u32, error: &StoreError, like: Option<Sample>);
}

/// Batches that wait for their call, and what they wait for.
#[derive(Debug, Default)]
pub(super) struct Queue {
    /// Oldest first; the last one takes further requests in.
    waiting: VecDeque<Departure>,
    /// Requests and bytes of keys in `waiting`.
    requests: usize,
    bytes: usize,
    /// Whether a task sends the first of them at the end of the tick.
    leaves: bool,
    /// Whether a task rejects those whose time is over.
    swept: bool,
    in_flight: Flights,
    window: Window,
    /// Whether the last call was not answered soon.
    far: bool,
}

/// What is in flight.
#[derive(Debug, Default)]
struct Flights {
    calls: usize,
    requests: usize,
    weight: usize,
}

/// Requests that leave in one call.
#[derive(Debug, Default)]
struct Departure {
    batch: Batch,
    /// When the first of them is to have its verdict.
    due: Option<Instant>,
}

/// A call in flight, until it is dropped.
struct InFlight<'a> {
    caller: &'a Caller,
    requests: usize,
    weight: usize,
    began: Instant,
}

/// What is asked.
#[derive(Debug, Clone, Copy)]
pub(super) struct Question<'a> {
    pub(super) operation: Operation,
    pub(super) charges: &'a [Charge<'a>],
    /// When calendar windows are reckoned for, µs.
    pub(super) near_us: u64,
    /// Whether Redis may not know the script by its name.
    pub(super) text: bool,
    /// Why the call is made.
    pub(super) purpose: Purpose,
    /// When there must be a verdict.
    pub(super) due: Instant,
}

impl Caller {
    /// Queues a question; its answer comes with that of the call it shares.
    pub(super) async fn ask(self: &Arc<Self>, question: Question<'_>) -> Answer {
        let answer = {
            let mut queue = self.queue();
            let Some(answer) = queue.add(self, question) else {
                return Err(Refusal::Store(StoreError::Overloaded));
            };
            if queue.claim(self.together) {
                // The worker comes to it when it has been through what is ready now.
                self.spawn_work();
            }
            self.sweep_if_limited(&mut queue);
            answer
        };
        answer.await.unwrap_or(Err(Refusal::Store(StoreError::Overloaded)))
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the call that was `claimed`, and then those that waited for its reply.
    async fn work(self: Arc<Self>, mut claimed: Instant) {
        loop {
            let Some(mut departure) = self.queue().depart() else { return };
            // What the worker did meanwhile is no delay of the store.
            departure.due = departure.due.map(|due| due + since(claimed).min(LATEST));
            self.work_beside();
            self.send(departure).await;
            if !self.queue().claim(self.together) {
                return;
            }
            claimed = monotonic();
            // What the worker has yet to read goes along.
            yield_now().await;
        }
    }

    fn spawn_work(self: &Arc<Self>) {
        tokio::spawn(self.clone().work(monotonic()));
    }

    /// Has another task make the next call, if there is one that need not wait.
    fn work_beside(self: &Arc<Self>) {
        let mut queue = self.queue();
        if queue.claim(self.together) {
            self.spawn_work();
        }
        self.sweep_if_limited(&mut queue);
    }

    /// Has a task reject those whose time is over while they wait for room in the window, if none does yet.
    fn sweep_if_limited(self: &Arc<Self>, queue: &mut Queue) {
        if !queue.swept && queue.is_limited() {
            queue.swept = true;
            let caller = self.clone();
            tokio::spawn(async move { caller.sweep().await });
        }
    }

    /// Makes one call within the time of the requests in it; those that wait for its reply may go before.
    async fn send(self: &Arc<Self>, Departure { mut batch, due }: Departure) {
        let began = monotonic();
        let due = due.unwrap_or(began);
        let mut in_flight =
            InFlight { caller: self, requests: batch.requests(), weight: Window::weight(batch.keys()), began };
        let judge = self.judge.get().filter(|_| batch.purpose() != Purpose::Probe);
        let judging = judge.map(|judge| (judge, judge.era()));
        if let Some((_, None)) = judging {
            return batch.refuse(&Refusal::Store(StoreError::Open));
        }
        if began >= due {
            // Nothing was sent for them.
            return batch.refuse(&Refusal::Store(StoreError::Overloaded));
        }
        if !batch.retain_waiting() {
            return;
        }
        let judging = judging.and_then(|(judge, era)| Some((judge, era?)));
        let failed = |error: &StoreError, batch: &Batch| {
            if let Some((judge, era)) = judging {
                judge.failed(era, error, batch.sample());
            }
        };
        let replies = self.replies.load(Ordering::Relaxed);
        let reply = match self.exchange(&mut batch, due, &mut in_flight.began).await {
            Ok(reply) => reply,
            Err(error) => {
                if !error.is_overload() {
                    failed(&error, &batch);
                }
                return batch.refuse(&Refusal::Store(error));
            }
        };
        if reply.is_some() {
            self.replies.fetch_add(1, Ordering::Relaxed);
        }
        let (answered, weight) = (since(in_flight.began), in_flight.weight);
        let limited = self.queue().is_limited();
        drop(in_flight);
        match reply {
            None if self.replies.load(Ordering::Relaxed) == replies => failed(&StoreError::Timeout, &batch),
            None => {
                if let Some((judge, era)) = judging {
                    judge.late(era);
                }
            }
            Some((Ok(reply), connection)) => {
                self.queue().window.answered(weight, answered, self.timeout, limited);
                let answered = batch.answer(reply);
                if let (true, Some((judge, era))) = (answered.decided, judging) {
                    judge.answered(era);
                }
                if !answered.good {
                    // It may be the answer to something else, or of somebody else.
                    connection.retire();
                }
                if let Some((refunds, receivers)) = answered.unclaimed {
                    self.give_back(refunds, receivers);
                }
            }
            Some((Err(error), connection)) => {
                if is_of_the_connection(&error) {
                    connection.retire();
                }
                if error.is_unrecoverable_error() {
                    let error = Fault::store_error(error);
                    failed(&error, &batch);
                    return batch.refuse(&Refusal::Store(error));
                }
                batch.refuse(&Refusal::Reply(error));
            }
        }
    }
}

impl Caller {
    /// Hands a batch to a connection and waits for the reply; none if it does not come within the time of the requests in it nor within
    /// the timeout of the call. The call counts as begun when it was `written`.
    async fn exchange(
        self: &Arc<Self>,
        batch: &mut Batch,
        due: Instant,
        written: &mut Instant,
    ) -> Result<Option<(RedisResult<Value>, Connection)>, StoreError> {
        let command = Arc::new(batch.command(self.algorithms, self.clock.argument_us()));
        let asking = batch.purpose() == Purpose::Asking;
        self.tallies.calls.increment(0);
        let mut refused = 0;
        let (mut call, connection) = loop {
            let connection = self.connection(due).await?;
            let mut call = Box::pin(connection.clone().call(asking, command.clone()));
            match poll!(call.as_mut()) {
                Poll::Pending => break (call, connection),
                // The connection was closed while it was idle: it takes no command, so no byte of this one was written.
                Poll::Ready(Err(error)) if error.is_unrecoverable_error() && refused < MOST_CONNECTIONS => refused += 1,
                Poll::Ready(reply) => return Ok(Some((reply, connection))),
            }
        };
        // The task of the connection writes before the worker comes back to this one.
        yield_now().await;
        *written = monotonic();
        Ok(self.reply(call.as_mut(), batch, due, *written).await.map(|reply| (reply, connection)))
    }

    /// A connection, made if there is none.
    async fn connection(&self, due: Instant) -> Result<Connection, StoreError> {
        let checkout = timeout_at(due.into(), checkout(&self.connections)).await;
        checkout.unwrap_or_else(|_| Err(self.connections.silence()))
    }

    /// Waits for the reply to a call that was written. Requests that are not answered by `due` are told so.
    async fn reply<T>(
        self: &Arc<Self>,
        mut call: Pin<&mut impl Future<Output = T>>,
        batch: &mut Batch,
        due: Instant,
        written: Instant,
    ) -> Option<T> {
        let soon = written + self.timeout / SOON;
        if let Ok(reply) = timeout_at(due.min(soon).into(), call.as_mut()).await {
            return Some(reply);
        }
        self.wait_no_longer();
        if let Some(reply) = self.by(due, call.as_mut()).await {
            return Some(reply);
        }
        batch.give_up(&Refusal::Store(StoreError::Late));
        self.by(written + self.timeout, call).await
    }

    /// Waits until `end`, and as much longer as the worker was late to look: what arrived meanwhile is still unread.
    async fn by<T>(&self, end: Instant, mut call: Pin<&mut impl Future<Output = T>>) -> Option<T> {
        let mut until = end;
        loop {
            if let Ok(reply) = timeout_at(until.into(), call.as_mut()).await {
                return Some(reply);
            }
            let now = monotonic();
            let late = now.saturating_duration_since(until);
            if late < LATE || until >= end + LATEST {
                return None;
            }
            until = (now + late).min(end + LATEST);
        }
    }

    /// Lets the checks go that wait for a reply.
    fn wait_no_longer(self: &Arc<Self>) {
        self.queue().far = true;
        self.work_beside();
    }

    /// Gives back what a late reply charged for requests that had been rejected by then.
    fn give_back(self: &Arc<Self>, refunds: Batch, receivers: Vec<Receiver<Answer>>) {
        self.queue().push(Departure { batch: refunds, due: Some(monotonic() + self.timeout) });
        self.work_beside();
        tokio::spawn(async move {
            for refunded in receivers {
                if let Ok(Err(refusal)) = refunded.await {
                    debug!(error = ?refusal, "a rejected request may remain charged");
                }
            }
        });
    }

    /// Rejects requests whose time is over while they wait for room in the window.
    async fn sweep(self: Arc<Self>) {
        loop {
            let due = {
                let mut queue = self.queue();
                let now = monotonic();
                while let Some(first) = queue.waiting.pop_front_if(|first| first.is_over(now)) {
                    queue.forget(&first.batch);
                    first.batch.refuse(&Refusal::Store(StoreError::Overloaded));
                }
                match queue.waiting.front().and_then(|first| first.due) {
                    Some(due) => due,
                    None => {
                        queue.swept = false;
                        return;
                    }
                }
            };
            sleep_until(due.into()).await;
        }
    }
}

impl Queue {
    /// Adds a question to the last batch, and says where its answer comes; none if the queue is full.
    fn add(&mut self, caller: &Arc<Caller>, question: Question<'_>) -> Option<Receiver<Answer>> {
        let Question { operation, charges, near_us, text, purpose, due } = question;
        if self.requests >= MOST_QUEUED || self.bytes >= MOST_QUEUED_BYTES {
            return None;
        }
        let fits = |last: &Departure| {
            let alike = purpose == Purpose::Requests && last.batch.purpose() == purpose;
            caller.together && alike && !last.batch.is_full_for(charges.len())
        };
        if !self.waiting.back().is_some_and(fits) {
            self.waiting.push_back(Departure { batch: Batch::of(purpose), due: None });
        }
        let last = self.waiting.back_mut()?;
        let before = last.batch.bytes();
        let answer = last.batch.add(&caller.prefix, operation, charges, near_us);
        if text {
            last.batch.carry_text();
        }
        last.due = Some(last.due.map_or(due, |other| other.min(due)));
        self.requests += 1;
        self.bytes += last.batch.bytes() - before;
        Some(answer)
    }

    fn push(&mut self, departure: Departure) {
        self.requests += departure.batch.requests();
        self.bytes += departure.batch.bytes();
        self.waiting.push_back(departure);
    }

    fn forget(&mut self, batch: &Batch) {
        self.requests -= batch.requests();
        self.bytes -= batch.bytes();
    }

    /// Whether the first batch fits into the window.
    fn has_room(&self) -> bool {
        self.waiting.front().is_none_or(|first| {
            self.in_flight.calls == 0 || self.window.has_room(self.in_flight.weight, first.batch.keys())
        })
    }

    /// Whether checks wait because the window has no room.
    fn is_limited(&self) -> bool {
        !self.waiting.is_empty() && !self.has_room()
    }

    /// Claim the next call, if one is due and no task has claimed it. The caller of this makes it.
    fn claim(&mut self, together: bool) -> bool {
        // A full batch, or one that cannot grow, has nothing to wait for.
        let ready = self.far || !together || self.waiting.len() > 1 || self.in_flight.requests < MANY;
        let claimed = !self.leaves && !self.waiting.is_empty() && ready && self.has_room();
        self.leaves |= claimed;
        claimed
    }

    /// Lets the first batch go.
    fn depart(&mut self) -> Option<Departure> {
        self.leaves = false;
        let departure = self.waiting.pop_front()?;
        self.forget(&departure.batch);
        self.in_flight.calls += 1;
        self.in_flight.requests += departure.batch.requests();
        self.in_flight.weight += Window::weight(departure.batch.keys());
        Some(departure)
    }
}

impl Departure {
    fn is_over(&self, now: Instant) -> bool {
        self.due.is_some_and(|due| due <= now)
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        let mut queue = self.caller.queue();
        queue.in_flight.calls -= 1;
        queue.in_flight.requests -= self.requests;
        queue.in_flight.weight -= self.weight;
        queue.far = since(self.began) > self.caller.timeout / SOON;
    }
}
