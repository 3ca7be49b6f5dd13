//! Requests that leave in one call: what the script is asked for all of them, and what its reply says to each.

use redis::{Cmd, RedisError, Value};
use tokio::sync::oneshot::{self, Receiver, Sender};

use super::Sample;
use super::fault::is_of_the_connection;
use super::script::{Frame, Parts, Script, script};
use super::wire::{self, Reply, Terms};
use crate::limit::algorithm::Status;
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
    /// Groups that may take memory first, see [`Group::may_delete`]; then in the order of their first request.
    groups: Vec<Group>,
    keys: usize,
    algorithms: Parts,
    /// Whether Redis may not know the script by its name.
    text: bool,
    purpose: Purpose,
    /// Bytes of keys.
    bytes: usize,
    /// The first charge: a probe after a failure makes a call like this one.
    sample: Option<Sample>,
}

/// Why a call is made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Requests wait for it.
    #[default]
    Requests,
    /// The same, but another node of the cluster referred them to this one, which is importing their slot: `ASKING` goes before it.
    Asking,
    /// To find out whether the server works again. It is made while the breaker is open, and judges nothing.
    Probe,
}

/// What became of a batch whose reply arrived.
pub(super) struct Answered {
    /// Whether the reply fits the call, and comes from a server that decides.
    pub(super) good: bool,
    /// Whether at least one request got a verdict.
    pub(super) decided: bool,
    /// What was charged for requests that no longer wait: it is given back.
    pub(super) unclaimed: Option<(Batch, Vec<Receiver<Answer>>)>,
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

    /// How many keys are in it.
    pub(super) fn keys(&self) -> usize {
        self.keys
    }

    /// How many bytes their names take.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The first charge.
    pub(super) fn sample(&self) -> Option<Sample> {
        self.sample.clone()
    }

    /// A batch of no requests as yet, for calls made for this.
    pub(super) fn of(purpose: Purpose) -> Self {
        Batch { purpose, ..Batch::default() }
    }

    /// Why the call is made.
    pub(super) fn purpose(&self) -> Purpose {
        self.purpose
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
        self.algorithms = self.algorithms.and(Parts::of(charges.iter().map(|charge| charge.rule)));
        if self.sample.is_none() {
            self.sample = charges.first().map(Sample::of);
        }
        let terms = || charges.iter().map(|charge| Terms::of(charge, near_us));
        let (group, waiting) = self.join(operation, terms);
        let before = group.keys.len();
        for charge in charges {
            charge.key.write(prefix, &mut group.keys);
            group.ends.push(group.keys.len());
        }
        let written = group.keys.len() - before;
        self.bytes += written;
        waiting
    }

    /// Adds a request with these terms, whose keys are still to be written, to the group of its kind.
    fn join<T: Iterator<Item = Terms>>(
        &mut self,
        operation: Operation,
        terms: impl Fn() -> T,
    ) -> (&mut Group, Receiver<Answer>) {
        let (answer, waiting) = oneshot::channel();
        let alike = |group: &Group| group.operation == operation && terms().eq(group.terms.iter().copied());
        let place = self.groups.iter().position(alike).unwrap_or_else(|| {
            let (terms, keys, ends, waiting) = (terms().collect(), Vec::new(), Vec::new(), Vec::new());
            let group = Group { operation, terms, keys, ends, waiting };
            let place = match group.may_delete() {
                true => self.groups.len(),
                false => self.groups.partition_point(|group| !group.may_delete()),
            };
            self.groups.insert(place, group);
            place
        });
        let group = &mut self.groups[place];
        self.keys += group.terms.len();
        group.waiting.push(answer);
        (group, waiting)
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

    /// Tells all that wait that there was no reply in time. What a late reply grants them is unclaimed.
    pub(super) fn give_up(&mut self, refusal: &Refusal) {
        for waiting in self.groups.iter_mut().flat_map(|group| &mut group.waiting) {
            let (closed, _) = oneshot::channel();
            let _ = std::mem::replace(waiting, closed).send(Err(refusal.clone()));
        }
    }

    /// Tells each request what the reply says to it.
    pub(super) fn answer(self, reply: Value) -> Answered {
        let limits = self.groups.iter().map(|group| group.ends.len()).sum();
        let Some(mut reply) = Reply::new(reply, limits) else {
            self.refuse(&Refusal::Store(StoreError::Malformed));
            return Answered { good: false, decided: false, unclaimed: None };
        };
        let (mut good, mut decided) = (true, false);
        let mut refunds = Batch { algorithms: self.algorithms, ..Batch::default() };
        let mut receivers = Vec::new();
        for mut group in self.groups {
            for (index, waiting) in std::mem::take(&mut group.waiting).into_iter().enumerate() {
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
                decided |= answer.is_ok();
                if let Err(Ok(verdict)) = waiting.send(answer) {
                    receivers.extend(refunds.give_back(&group, index, &verdict));
                }
            }
        }
        let unclaimed = (!receivers.is_empty()).then_some((refunds, receivers));
        Answered { good, decided, unclaimed }
    }

    /// Adds the refund of what a request of `group` was charged.
    fn give_back(&mut self, group: &Group, request: usize, verdict: &Verdict) -> Option<Receiver<Answer>> {
        if !matches!(group.operation, Operation::Check | Operation::Take) || verdict.granted == 0 {
            return None;
        }
        let first = request * group.terms.len();
        let charged: Vec<_> = (group.terms.iter().zip(&verdict.outcomes).enumerate())
            // A shadow limit may have had no room; a post-paid cost is charged after the response.
            .filter(|(_, (terms, outcome))| outcome.status == Status::Ok && !terms.is_post_paid())
            .map(|(limit, (terms, outcome))| {
                let cost = if group.operation == Operation::Take { verdict.granted } else { terms.cost() };
                (terms.refunding(cost, outcome), group.key(first + limit))
            })
            .collect();
        if charged.is_empty() {
            return None;
        }
        let refund = Operation::Refund { charged_at: verdict.now_us };
        let (group, receiver) = self.join(refund, || charged.iter().map(|(terms, _)| *terms));
        for (_, key) in charged {
            group.keys.extend_from_slice(key);
            group.ends.push(group.keys.len());
        }
        Some(receiver)
    }
}

impl Group {
    fn key(&self, index: usize) -> &[u8] {
        key(&self.keys, &self.ends, index)
    }

    /// Whether it may begin with a command that deletes. Beyond `maxmemory`, Redis rejects commands that may take memory only
    /// until a script has written: after a release it would accept the charges of the same call.
    fn may_delete(&self) -> bool {
        match self.operation {
            Operation::Refund { .. } | Operation::Renew => true,
            Operation::Check | Operation::Peek | Operation::Charge | Operation::Take => false,
        }
    }

    fn retain_waiting(&mut self) {
        let limits = self.terms.len();
        let (keys, ends) = (std::mem::take(&mut self.keys), std::mem::take(&mut self.ends));
        let waiting = std::mem::take(&mut self.waiting);
        for (request, answer) in waiting.into_iter().enumerate().filter(|(_, answer)| !answer.is_closed()) {
            let first = request * limits;
            for end in first..first + limits {
                self.keys.extend_from_slice(key(&keys, &ends, end));
                self.ends.push(self.keys.len());
            }
            self.waiting.push(answer);
        }
    }
}

/// The key at this index of all that are written one after the other.
fn key<'a>(keys: &'a [u8], ends: &[usize], index: usize) -> &'a [u8] {
    let begin = if index == 0 { 0 } else { ends[index - 1] };
    &keys[begin..ends[index]]
}
