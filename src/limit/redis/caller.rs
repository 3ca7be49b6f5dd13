//! Calls Redis: what comes while the worker is busy with other events leaves in one call, at the end of its round.

use std::mem;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::time::{Duration, timeout};

use super::batch::{Answer, Batch, Refusal};
use super::connection::{Connections, checkout};
use super::fault::is_of_the_connection;
use super::script::Parts;
use crate::limit::clock::Clock;
use crate::limit::store::{Charge, Operation, StoreError};
use crate::limit::tallies::Tallies;

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
    /// Those that leave with the next call.
    pub(super) next: Mutex<Batch>,
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
    /// Asks together with whoever else asks in this round of the worker.
    pub(super) async fn ask_together(self: &Arc<Self>, question: Question<'_>) -> Answer {
        let answer = {
            let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
            if next.is_full_for(question.charges.len()) {
                // It goes with a task that has been started for it.
                let full = mem::take(&mut *next);
                let caller = self.clone();
                tokio::spawn(async move { caller.send(full).await });
            }
            if next.is_empty() {
                let caller = self.clone();
                // The worker comes to it when it has been through what is ready now.
                tokio::spawn(async move {
                    let batch = mem::take(&mut *caller.next.lock().unwrap_or_else(PoisonError::into_inner));
                    caller.send(batch).await;
                });
            }
            self.add(&mut next, question)
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

    async fn send(&self, mut batch: Batch) {
        if batch.retain_waiting() {
            // Dropped without a reply, it tells the connection so.
            let _ = timeout(self.deadline, self.exchange(false, batch)).await;
        }
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
