//! Requests that leave in one call: what the script is asked for all of them, and what its reply says to each.

use redis::{Cmd, RedisError, Value};
use tokio::sync::oneshot::{self, Receiver, Sender};

use super::fault::is_of_the_connection;
use super::script::{Frame, Parts, Script, script};
use super::wire::{self, Reply, Terms};
use crate::limit::store::{Charge, Operation, StoreError, Verdict};

/// Keys of a call: a script runs undivided, and nobody should wait for it longer than for some hundred single commands.
pub(super) const MOST_KEYS: usize = 128;

/// Why a request got no verdict.
#[derive(Debug, Clone)]
pub(super) enum Refusal {
    /// An error reply, to the whole call or to this request; or the connection broke.
    Reply(RedisError),
    /// There was no call, or no reply to it.
    Store(StoreError),
}

pub(super) type Answer = Result<Verdict, Refusal>;

/// The requests of one call.
#[derive(Debug, Default)]
pub(super) struct Batch {
    /// In the order of their first request.
    groups: Vec<Group>,
    keys: usize,
    algorithms: Parts,
    /// Whether Redis may not know the script by its name.
    text: bool,
}

/// Requests that differ in their keys only.
#[derive(Debug)]
struct Group {
    operation: Operation,
    terms: Vec<Terms>,
    /// The keys of all, and where each ends.
    keys: Vec<u8>,
    ends: Vec<usize>,
    waiting: Vec<Sender<Answer>>,
}

impl Batch {
    /// Whether nobody is in it.
    pub(super) fn is_empty(&self) -> bool {
        self.keys == 0
    }

    /// Whether so many more keys would be too many.
    pub(super) fn is_full_for(&self, keys: usize) -> bool {
        !self.is_empty() && self.keys + keys > MOST_KEYS
    }

    /// How many are in it.
    pub(super) fn requests(&self) -> usize {
        self.groups.iter().map(|group| group.waiting.len()).sum()
    }

    /// Lets the call carry its script, not only the script's name.
    pub(super) fn carry_text(&mut self) {
        self.text = true;
    }

    /// Takes one more request in, and says where its answer comes.
    pub(super) fn add(
        &mut self,
        prefix: &str,
        operation: Operation,
        charges: &[Charge<'_>],
        near_us: u64,
    ) -> Receiver<Answer> {
        let (answer, waiting) = oneshot::channel();
        self.algorithms = self.algorithms.and(Parts::of(charges.iter().map(|charge| charge.rule)));
        self.keys += charges.len();
        let terms = || charges.iter().map(|charge| Terms::of(charge, near_us));
        let alike = |group: &Group| group.operation == operation && terms().eq(group.terms.iter().copied());
        let place = self.groups.iter().position(alike).unwrap_or_else(|| {
            let (terms, keys, ends, waiting) = (terms().collect(), Vec::new(), Vec::new(), Vec::new());
            self.groups.push(Group { operation, terms, keys, ends, waiting });
            self.groups.len() - 1
        });
        let group = &mut self.groups[place];
        for charge in charges {
            charge.key.write(prefix, &mut group.keys);
            group.ends.push(group.keys.len());
        }
        group.waiting.push(answer);
        waiting
    }

    /// Forgets those who wait no longer; whether anybody is left.
    pub(super) fn retain_waiting(&mut self) -> bool {
        for group in &mut self.groups {
            if group.waiting.iter().any(Sender::is_closed) {
                group.retain_waiting();
            }
        }
        self.groups.retain(|group| !group.waiting.is_empty());
        self.keys = self.groups.iter().map(|group| group.ends.len()).sum();
        !self.is_empty()
    }

    /// The script for a call that at least needs these.
    fn script(&self, algorithms: Parts) -> &'static Script {
        let frames = self.groups.iter().map(|group| wire::frame(group.operation, &group.terms));
        script(frames.reduce(Frame::and).unwrap_or(Frame::Any), self.algorithms.and(algorithms))
    }

    /// The call; see `lua/check.lua`.
    pub(super) fn command(&self, algorithms: Parts, now_us: u64) -> Cmd {
        let script = self.script(algorithms);
        let limits: usize = self.groups.iter().map(|group| group.terms.len()).sum();
        let mut argument = wire::argument(now_us, self.groups.len(), limits);
        let mut command = Cmd::with_capacity(4 + self.keys, 64 + 80 * self.keys + argument.capacity());
        if self.text {
            command.arg("EVAL").arg(&script.text);
        } else {
            command.arg("EVALSHA").arg(&script.sha);
        }
        command.arg(self.keys);
        for group in &self.groups {
            let mut begin = 0;
            for end in &group.ends {
                command.arg(&group.keys[begin..*end]);
                begin = *end;
            }
            wire::add(&mut argument, group.waiting.len(), group.operation, &group.terms);
        }
        command.arg(argument);
        command
    }

    /// Tells everybody why there is no reply.
    pub(super) fn refuse(self, refusal: &Refusal) {
        for waiting in self.groups.into_iter().flat_map(|group| group.waiting) {
            let _ = waiting.send(Err(refusal.clone()));
        }
    }

    /// Tells everybody what the reply says to him; whether it fits the call, and comes from where it should.
    pub(super) fn answer(self, reply: Value) -> bool {
        let limits = self.groups.iter().map(|group| group.ends.len()).sum();
        let Some(mut reply) = Reply::new(reply, limits) else {
            self.refuse(&Refusal::Store(StoreError::Malformed));
            return false;
        };
        let mut good = true;
        for group in self.groups {
            for waiting in group.waiting {
                let answer = match reply.next(group.terms.len()) {
                    Some(Ok(verdict)) => Ok(verdict),
                    Some(Err(error)) => Err(Refusal::Reply(error.into())),
                    None => Err(Refusal::Store(StoreError::Malformed)),
                };
                good &= match &answer {
                    Ok(_) => true,
                    Err(Refusal::Reply(error)) => !is_of_the_connection(error),
                    Err(Refusal::Store(_)) => false,
                };
                let _ = waiting.send(answer);
            }
        }
        good
    }
}

impl Group {
    fn retain_waiting(&mut self) {
        let limits = self.terms.len();
        let (keys, ends) = (std::mem::take(&mut self.keys), std::mem::take(&mut self.ends));
        let waiting = std::mem::take(&mut self.waiting);
        for (request, answer) in waiting.into_iter().enumerate().filter(|(_, answer)| !answer.is_closed()) {
            let first = request * limits;
            for end in first..first + limits {
                let begin = if end == 0 { 0 } else { ends[end - 1] };
                self.keys.extend_from_slice(&keys[begin..ends[end]]);
                self.ends.push(self.keys.len());
            }
            self.waiting.push(answer);
        }
    }
}
