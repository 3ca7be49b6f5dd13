//! Calls Redis: what comes while the worker is busy with other events leaves in one call, at the end of its round; while many
//! are under way to a server that answers soon, what comes leaves together when it has.

use std::mem;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::task::yield_now;
use tokio::time::{Duration, timeout_at};

use super::batch::{Answer, Batch, Refusal};
use super::connection::{Connections, checkout};
use super::fault::is_of_the_connection;
use super::script::Parts;
use crate::limit::clock::{Clock, monotonic};
use crate::limit::store::{Charge, Operation, StoreError};
use crate::limit::tallies::Tallies;

/// With so many requests under way the next call waits for an answer. A call costs Redis as much as another request in it, and
/// the gateway as well; with fewer under way there would be few to share that.
const MANY: usize = 8;

/// Answers within this part of the deadline are worth waiting for, later ones would be felt: 3 ms of 50.
const SOON: u32 = 16;

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
    /// Bound of a call; connecting included.
    pub(super) deadline: Duration,
    /// Where calls are counted.
    pub(super) tallies: Arc<Tallies>,
    /// What leaves with the next call.
    pub(super) next: Mutex<Next>,
}

/// Requests that wait for their call, and what it waits for.
#[derive(Debug, Default)]
pub(super) struct Next {
    batch: Batch,
    /// When the first of them came.
    since: Option<Instant>,
    /// Whether a task takes them along at the end of the round.
    leaves: bool,
    /// Requests whose call is under way.
    under_way: usize,
    /// Whether the last call was not answered soon.
    far: bool,
}

/// Requests that leave in one call.
#[derive(Debug)]
struct Departure {
    batch: Batch,
    /// When the first of them came.
    since: Instant,
}

/// A call under way, until it is dropped.
struct UnderWay<'a> {
    caller: &'a Caller,
    requests: usize,
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
}

impl Caller {
    /// Asks together with whoever else asks in this round of the worker, or until an answer comes.
    pub(super) async fn ask_together(self: &Arc<Self>, question: Question<'_>) -> Answer {
        let answer = {
            let mut next = self.next();
            if next.batch.is_full_for(question.charges.len()) {
                self.serve(next.depart());
            }
            next.since.get_or_insert_with(monotonic);
            let answer = self.add(&mut next.batch, question);
            if next.may_leave() {
                next.leaves = true;
                let caller = self.clone();
                // The worker comes to it when it has been through what is ready now.
                tokio::spawn(async move {
                    let departure = caller.next().depart();
                    caller.make(departure).await;
                });
            }
            answer
        };
        answer.await.unwrap_or(Err(Refusal::Store(StoreError::Timeout)))
    }

    /// Asks at once; `asking` where another node said to ask this one, which is just taking the slot over.
    pub(super) async fn ask_alone(&self, asking: bool, question: Question<'_>) -> Answer {
        let mut batch = Batch::default();
        let answer = self.add(&mut batch, question);
        self.exchange(asking, batch).await;
        answer.await.unwrap_or(Err(Refusal::Store(StoreError::Timeout)))
    }

    fn add(&self, batch: &mut Batch, question: Question<'_>) -> tokio::sync::oneshot::Receiver<Answer> {
        let Question { operation, charges, near_us, text } = question;
        if text {
            batch.carry_text();
        }
        batch.add(&self.prefix, operation, charges, near_us)
    }

    fn next(&self) -> MutexGuard<'_, Next> {
        self.next.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a task make a call.
    fn serve(self: &Arc<Self>, departure: Departure) {
        let caller = self.clone();
        tokio::spawn(async move { caller.make(departure).await });
    }

    /// Makes a call, and then those that waited for it.
    async fn make(self: &Arc<Self>, mut departure: Departure) {
        loop {
            self.send(departure).await;
            {
                let mut next = self.next();
                if !next.may_leave() {
                    return;
                }
                next.leaves = true;
            }
            // What the worker has yet to read goes along.
            yield_now().await;
            departure = self.next().depart();
        }
    }

    /// Makes one call within the time of those in it; those who wait for its answer may go before.
    async fn send(self: &Arc<Self>, Departure { mut batch, since }: Departure) {
        let began = monotonic();
        let _under_way = UnderWay { caller: self, requests: batch.requests(), began };
        let due = since + self.deadline;
        if began >= due || !batch.retain_waiting() {
            return;
        }
        let mut exchange = pin!(self.exchange(false, batch));
        if timeout_at(due.min(began + self.soon()).into(), exchange.as_mut()).await.is_err() {
            self.wait_no_longer();
            // Dropped without a reply, it tells the connection so.
            let _ = timeout_at(due.into(), exchange).await;
        }
    }

    /// Lets those go who wait for an answer.
    fn wait_no_longer(self: &Arc<Self>) {
        let mut next = self.next();
        next.far = true;
        if next.may_leave() {
            self.serve(next.depart());
        }
    }

    fn soon(&self) -> Duration {
        self.deadline / SOON
    }

    async fn exchange(&self, asking: bool, batch: Batch) {
        let mut connection = match checkout(&self.connections).await {
            Ok(connection) => connection,
            Err(error) => return batch.refuse(&Refusal::Store(error)),
        };
        self.tallies.calls.count(0);
        let command = batch.command(self.algorithms, self.clock.argument_us());
        let reply = if asking { connection.send_asking(&command).await } else { connection.send(&command).await };
        match reply {
            Ok(reply) => {
                if !batch.answer(reply) {
                    // It may be the answer to something else, or of somebody else.
                    connection.retire();
                }
            }
            Err(error) => {
                if is_of_the_connection(&error) {
                    connection.retire();
                }
                batch.refuse(&Refusal::Reply(error));
            }
        }
    }
}

impl Next {
    /// Whether somebody waits whom nobody takes along, and nothing holds back.
    fn may_leave(&self) -> bool {
        !self.batch.is_empty() && !self.leaves && (self.far || self.under_way < MANY)
    }

    /// Lets go what there is.
    fn depart(&mut self) -> Departure {
        self.leaves = false;
        let batch = mem::take(&mut self.batch);
        self.under_way += batch.requests();
        Departure { batch, since: self.since.take().unwrap_or_else(monotonic) }
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        let mut next = self.caller.next();
        next.under_way -= self.requests;
        next.far = self.began.elapsed() > self.caller.soon();
    }
}
