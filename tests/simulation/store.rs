//! The simulated store: it decodes the commands of the gateways, lets the Lua scripts or their Rust implementation
//! decide, and keeps a history.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use aws_lc_rs::digest;
use jiff::civil::Date;
use sluicegate::clock::Clock;
use sluicegate::limiter::algorithm::concurrency::Concurrency;
use sluicegate::limiter::algorithm::fixed_window::{FixedWindow, WindowStart};
use sluicegate::limiter::algorithm::sliding_buckets::SlidingBuckets;
use sluicegate::limiter::algorithm::sliding_log::SlidingLog;
use sluicegate::limiter::algorithm::sliding_window::SlidingWindow;
use sluicegate::limiter::algorithm::token_bucket::TokenBucket;
use sluicegate::limiter::algorithm::{Outcome, Rule, Status};
use sluicegate::limiter::key::{Identity, IdentityHasher, Key, StateName};
use sluicegate::limiter::memory::MemoryStore;
use sluicegate::limiter::quota::CalendarUnit;
use sluicegate::limiter::redis::StateLayout;
use sluicegate::limiter::redis::cluster::topology::identity_slot;
use sluicegate::limiter::redis::script;
use sluicegate::limiter::redis::script::LimitArgs;
use sluicegate::limiter::redis::script::{AlgorithmSet, script};
use sluicegate::limiter::usage::{UsageDays, UsageFields, UsageKey, UsageQuery};
use sluicegate::limiter::verdict::{Charge, ChargeMode, Operation, Verdict};

use crate::lua::{Database, Interpreter, Replied};
use crate::overrides::Written;
use crate::schedule::TIME_ZONE;

/// The number of hash slots of a cluster.
const SLOTS: usize = 16_384;

/// The script that posts usage.
const USAGE: &str = include_str!("../../lua/usage.lua");

/// The script that writes overrides.
const OVERRIDES: &str = include_str!("../../lua/overrides.lua");

/// The host of every simulated server. Outside the simulated network, a connection to it would be refused.
pub const HOST: &str = "127.0.0.1";

/// Identifies a state: the name of its limit and the identity.
pub type StateId = (String, u128);

/// A charge to one limit, as received in a call.
#[derive(Debug, Clone)]
pub struct ReceivedCharge {
    pub state: StateId,
    state_name: StateName,
    pub rule: Rule,
    pub cost: u64,
    pub mode: ChargeMode,
    pub permit_id: u64,
    pub debt_before_us: u64,
    pub usage: Option<Arc<UsageDays>>,
}

impl ReceivedCharge {
    fn charge(&self) -> Charge<'_> {
        let ReceivedCharge { mode, permit_id, debt_before_us, .. } = *self;
        let usage = self.usage.as_ref();
        Charge {
            mode,
            permit_id,
            debt_before_us,
            usage,
            ..charge(&self.state, &self.state_name, &self.rule, self.cost)
        }
    }
}

/// Return a charge of this cost to the state `name`.
pub fn charge<'a>(name: &StateId, bucket: &'a StateName, rule: &'a Rule, cost: u64) -> Charge<'a> {
    Charge {
        key: Key { identity: Identity(name.1), state_name: bucket },
        rule,
        cost,
        mode: ChargeMode::Enforced,
        permit_id: 0,
        debt_before_us: 0,
        usage: None,
    }
}

/// A request that the store has decided.
#[derive(Debug, Clone)]
pub struct DecidedRequest {
    pub at_us: u64,
    pub gateway: usize,
    pub operation: Operation,
    pub charges: Vec<ReceivedCharge>,
    pub verdict: Verdict,
    /// Whether the store was out of memory at that time.
    pub out_of_memory: bool,
}

impl DecidedRequest {
    /// Return how many tokens the request added to a state. The number is negative for a refund.
    pub fn charged(&self, index: usize) -> i64 {
        let charge = &self.charges[index];
        let fits = self.verdict.outcomes[index].status == Status::Ok;
        let cost = charge.cost as i64;
        match self.operation {
            _ if matches!(charge.rule, Rule::Concurrency(_)) => 0,
            Operation::Check if self.verdict.granted > 0 && fits && !charge.mode.is_deferred() => cost,
            Operation::TakeUpTo => self.verdict.granted as i64,
            Operation::Charge => cost,
            Operation::Refund { .. } => -cost,
            Operation::Check | Operation::Peek | Operation::Renew => 0,
        }
    }

    /// Return what the request added to usage totals.
    fn usage(&self) -> impl Iterator<Item = (UsageId, i64)> {
        self.charges.iter().zip(&self.verdict.outcomes).filter_map(|(received, outcome)| {
            let charge = received.charge();
            let day = charge.usage_day(self.operation, self.at_us)?;
            let amount = charge.usage_amount(self.operation, self.verdict.granted, outcome.status);
            (amount != 0).then(|| ((received.state.clone(), day.date), amount))
        })
    }

    /// Return whether the request needs memory for a state, because it makes a new charge or acquires a permit.
    pub fn needs_memory(&self) -> bool {
        let is_charge = match self.operation {
            Operation::Check | Operation::TakeUpTo | Operation::Charge => self.verdict.granted > 0,
            Operation::Peek | Operation::Refund { .. } | Operation::Renew => false,
        };
        let mut outcomes = self.charges.iter().zip(&self.verdict.outcomes);
        is_charge
            && outcomes
                .any(|(asked, outcome)| asked.cost > 0 && outcome.status == Status::Ok && !asked.mode.is_deferred())
    }
}

/// Identifies a usage total: a state and a day.
pub type UsageId = (StateId, Date);

/// An amount of usage that a gateway has posted for one day.
#[derive(Debug, Clone)]
pub struct PostedUsage {
    at_us: u64,
    pub total: UsageId,
    pub amount: i64,
    /// Whether the store has lost this amount in a restart or a failover.
    is_lost: bool,
}

/// A reply, encoded in the Redis protocol.
pub type Reply = Vec<u8>;

/// The simulated store: one server, or the masters of a cluster.
#[derive(Debug)]
pub struct SimulatedRedis {
    nodes: Vec<Node>,
    clock: Clock,
    /// Whether the Lua scripts decide. Otherwise, their Rust implementation decides.
    lua: bool,
    pub out_of_memory: bool,
    /// All decisions, including those that were lost in a failover.
    pub history: Vec<DecidedRequest>,
    /// All writes of overrides, including those that were lost in a failover.
    pub overrides: Vec<Written>,
    /// All posts of usage, including those that were lost in a failover.
    pub posts: Vec<PostedUsage>,
}

/// One simulated server.
#[derive(Debug)]
struct Node {
    memory: MemoryStore,
    /// The data that the Lua scripts have written.
    database: RefCell<Database>,
    scripts: BTreeMap<String, Arc<str>>,
    /// The requests that form the current state, as indices of the history.
    committed: Vec<usize>,
    /// For each restart, the time from which on writes were lost, and the lost requests as indices of the history.
    lost: Vec<(u64, Vec<usize>)>,
}

thread_local! {
    static LUA: Interpreter = Interpreter::new();
}

fn new_memory(clock: &Clock) -> MemoryStore {
    MemoryStore::new(1 << 20, clock.clone())
}

impl SimulatedRedis {
    /// Create a store. With `lua`, the Lua scripts decide.
    pub fn new(nodes: usize, lua: bool, now_us: u64) -> SimulatedRedis {
        let clock = Clock::manual(now_us);
        let node = |_| Node {
            memory: new_memory(&clock),
            database: RefCell::new(Database::with_journal()),
            scripts: BTreeMap::new(),
            committed: Vec::new(),
            lost: Vec::new(),
        };
        let nodes = (0..nodes).map(node).collect();
        let (history, overrides, posts) = (Vec::new(), Vec::new(), Vec::new());
        SimulatedRedis { nodes, clock, lua, out_of_memory: false, history, overrides, posts }
    }

    /// Return the index of the server that has the states of an identity.
    pub fn node_index_of(&self, identity: Identity) -> usize {
        usize::from(identity_slot(identity)) * self.nodes.len() / SLOTS
    }

    fn node_of(&self, identity: Identity) -> &Node {
        &self.nodes[self.node_index_of(identity)]
    }

    /// Restart the store. It loses its scripts and the writes of the last `loss_us` microseconds. If `loss_us` is
    /// `None`, it loses all writes.
    pub fn restart(&mut self, now_us: u64, loss_us: Option<u64>) {
        let from_us = now_us.saturating_sub(loss_us.unwrap_or(u64::MAX));
        self.posts.iter_mut().filter(|post| post.at_us >= from_us).for_each(|post| post.is_lost = true);
        for node in &mut self.nodes {
            node.scripts.clear();
            node.database.get_mut().fall_back(from_us);
            node.memory = new_memory(&self.clock);
            let (kept, lost) = node.committed.drain(..).partition(|index| self.history[*index].at_us < from_us);
            node.committed = kept;
            node.lost.push((from_us, lost));
            if self.lua {
                continue;
            }
            for index in &node.committed {
                let DecidedRequest { at_us, operation, charges: asked, .. } = &self.history[*index];
                self.clock.set(*at_us);
                let charges: Vec<_> = asked.iter().map(ReceivedCharge::charge).collect();
                node.memory.decide(*operation, &charges);
            }
        }
    }

    /// Return the usage totals in the store, and the totals that follow from the decided requests and the posts.
    pub fn usage(&self) -> [BTreeMap<UsageId, i64>; 2] {
        let (mut totals, mut expected) = (BTreeMap::new(), BTreeMap::new());
        let add = |sums: &mut BTreeMap<UsageId, i64>, total: UsageId, amount: i64| {
            // Skip the probes of circuit breakers.
            if !total.0.0.starts_with('~') {
                *sums.entry(total).or_default() += amount;
            }
        };
        for node in &self.nodes {
            for (key, fields) in node.database.borrow().hashes() {
                let Some(UsageKey { limit, identity, month, .. }) = UsageKey::parse("rl", key.as_bytes()) else {
                    continue;
                };
                for (day, total) in fields.iter().filter(|(day, _)| !day.starts_with('.')) {
                    let date = month.day(day.parse().expect("a day")).expect("a day of the month");
                    add(&mut totals, ((limit.to_string(), identity), date), total.parse().expect("a total"));
                }
            }
            let limits = self.history.iter().flat_map(|done| &done.charges).map(|asked| asked.state.0.as_str().into());
            let query = UsageQuery {
                limits: limits.collect::<BTreeSet<_>>().into_iter().collect(),
                identities: None,
                from: Date::MIN,
                to: Date::MAX,
                parts: UsageFields::Days,
                max_rows: usize::MAX,
            };
            for row in node.memory.usage.read(&query).expect("all totals") {
                add(&mut totals, ((row.limit.into(), row.identity), row.date), row.cost);
            }
            for index in &node.committed {
                self.history[*index].usage().for_each(|(total, amount)| add(&mut expected, total, amount));
            }
        }
        for post in self.posts.iter().filter(|post| !post.is_lost) {
            add(&mut expected, post.total.clone(), post.amount);
        }
        [totals, expected].map(|sums| sums.into_iter().filter(|(_, cost)| *cost != 0).collect())
    }

    /// Return the result of a check without charging it.
    pub fn peek(&self, now_us: u64, charge: Charge<'_>) -> Outcome {
        let node = self.node_of(charge.key.identity);
        if !self.lua {
            self.clock.set(now_us);
            return node.memory.decide(Operation::Peek, &[charge]).outcomes[0];
        }
        let layout = StateLayout::default();
        let terms = [LimitArgs::new(&[charge], 0, now_us)];
        let mut argument = script::start_argument(0, &layout, 1, 1);
        script::append_group(&mut argument, 1, Operation::Peek, &terms);
        let names = script::state_names_argument(std::iter::once(&**charge.key.state_name.name()));
        let mut key = Vec::new();
        terms[0].write_key(&charge.key, "rl", &mut key);
        let variant = script::script_variant(&layout, Operation::Peek, &terms);
        let script = script(variant, AlgorithmSet::for_rules([charge.rule]));
        let reply = node.evaluate(now_us, false, (&script.sha, &script.source), &[key], &[argument, names]);
        verdicts(&reply.encode(), &[(Operation::Peek, terms.to_vec())])[0].as_ref().expect("a verdict").outcomes[0]
    }

    /// Return the number of permits that a failover restored, because it lost their releases. They expire after their
    /// TTL.
    pub fn brought_back(&self, state: &StateId, ttl_us: u64, now_us: u64) -> u64 {
        let node = self.node_of(Identity(state.1));
        let permits = |index: &usize| {
            let done = &self.history[*index];
            let asked = done.charges.iter().filter(|asked| asked.state == *state);
            asked.map(|asked| (done, asked.permit_id)).collect::<Vec<_>>()
        };
        let is_release = |done: &DecidedRequest| matches!(done.operation, Operation::Refund { .. });
        let mut live = BTreeSet::new();
        for (done, permit) in node.committed.iter().flat_map(permits) {
            if is_release(done) {
                live.remove(&permit)
            } else {
                done.verdict.granted > 0 && live.insert(permit)
            };
        }
        let lost = node.lost.iter().filter(|(from_us, _)| now_us < from_us + ttl_us).flat_map(|(_, lost)| lost);
        let released = lost.flat_map(permits).filter(|(done, _)| is_release(done)).map(|(_, permit)| permit);
        live.intersection(&released.collect()).count() as u64
    }

    /// Run a command on a server. Return the reply, and the time that a script needs as a multiple of the time for a
    /// token bucket.
    pub fn run(&mut self, now_us: u64, gateway: usize, node: usize, command: &[Vec<u8>]) -> (Reply, u64) {
        let mode = if self.nodes.len() > 1 { "cluster" } else { "standalone" };
        let out_of_memory = self.out_of_memory;
        let Node { scripts, database, .. } = &mut self.nodes[node];
        let mut command_of = |words: &[&str]| {
            let database = database.get_mut();
            (database.now, database.out_of_memory) = (now_us, out_of_memory);
            database.command(words).encode()
        };
        let argument = |index: usize| command.get(index).map_or("", |word| std::str::from_utf8(word).unwrap_or(""));
        let reply = match (argument(0), argument(1)) {
            ("HELLO", _) => array(&["server", "redis", "version", "7.4.0", "mode", mode, "role", "master"]),
            ("SCRIPT", "LOAD") => {
                let sha = script_sha(argument(2));
                scripts.insert(sha.clone(), argument(2).into());
                format!("${}\r\n{sha}\r\n", sha.len()).into_bytes()
            }
            ("EVAL", "return 1") => b":1\r\n".to_vec(),
            ("EVAL", script) if script == OVERRIDES => self.write_overrides(now_us, gateway, node, command),
            ("EVAL", script) if script == USAGE => self.post_usage(now_us, node, command),
            ("EVAL", script) => {
                let sha = script_sha(script);
                scripts.insert(sha.clone(), script.into());
                return self.evaluate(now_us, gateway, node, &sha, command);
            }
            ("EVALSHA", sha) if !scripts.contains_key(sha) => {
                b"-NOSCRIPT No matching script. Please use EVAL.\r\n".to_vec()
            }
            ("EVALSHA", sha) => return self.evaluate(now_us, gateway, node, sha, command),
            ("TIME", _) => command_of(&["TIME"]),
            ("HGETALL", key) => command_of(&["HGETALL", key]),
            ("CLUSTER", "SLOTS") => self.slots(),
            ("PING", _) => b"+PONG\r\n".to_vec(),
            _ => b"+OK\r\n".to_vec(),
        };
        (reply, 0)
    }

    fn evaluate(&mut self, now_us: u64, gateway: usize, node: usize, sha: &str, command: &[Vec<u8>]) -> (Reply, u64) {
        if self.lua {
            return self.evaluate_in_lua(now_us, gateway, node, sha, command);
        }
        let (requests, work) = decode(command);
        let start = [&(now_us as f64).to_le_bytes()[..], b"o"].concat();
        let mut elements = vec![Replied::of_bytes(&start)];
        self.clock.set(now_us);
        for (operation, received) in requests {
            let charges: Vec<_> = received.iter().map(ReceivedCharge::charge).collect();
            let verdict = self.nodes[node].memory.decide(operation, &charges);
            let mut numbers: Vec<f64> = Vec::new();
            for Outcome { status, remaining, reset_us, retry_us } in &verdict.outcomes {
                let (status, retry) = match status {
                    Status::Ok => (0.0, 0.0),
                    Status::Exceeded => (1.0, *retry_us as f64),
                    Status::CostTooLarge => (2.0, -1.0),
                    Status::Saturated => (3.0, *retry_us as f64),
                };
                numbers.extend([verdict.granted as f64, status, *remaining as f64, *reset_us as f64, retry]);
            }
            let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            elements.push(Replied::of_bytes(&bytes));
            self.record(
                node,
                DecidedRequest { at_us: now_us, gateway, operation, charges: received, verdict, out_of_memory: false },
            );
        }
        (Replied::Array(elements).encode(), work)
    }

    fn record(&mut self, node: usize, done: DecidedRequest) {
        self.nodes[node].committed.push(self.history.len());
        self.history.push(done);
    }

    fn evaluate_in_lua(
        &mut self,
        now_us: u64,
        gateway: usize,
        node: usize,
        sha: &str,
        command: &[Vec<u8>],
    ) -> (Reply, u64) {
        let (requests, work) = decode(command);
        let (keys, arguments) = keys_and_arguments(command);
        let script = &self.nodes[node].scripts[sha];
        let reply = self.nodes[node].evaluate(now_us, self.out_of_memory, (sha, script), keys, arguments).encode();
        let terms = |asked: &Vec<ReceivedCharge>| {
            let charges: Vec<_> = asked.iter().map(ReceivedCharge::charge).collect();
            (0..charges.len()).map(|index| LimitArgs::new(&charges, index, now_us)).collect()
        };
        let limits: Vec<_> = requests.iter().map(|(operation, asked)| (*operation, terms(asked))).collect();
        for ((operation, asked), verdict) in requests.into_iter().zip(verdicts(&reply, &limits)) {
            if let Some(verdict) = verdict {
                let out_of_memory = self.out_of_memory;
                self.record(
                    node,
                    DecidedRequest { at_us: now_us, gateway, operation, charges: asked, verdict, out_of_memory },
                );
            }
        }
        (reply, work)
    }

    /// Run the script that writes overrides.
    fn write_overrides(&mut self, now_us: u64, gateway: usize, node: usize, command: &[Vec<u8>]) -> Reply {
        let (keys, arguments) = keys_and_arguments(command);
        let reply = self.nodes[node].evaluate(now_us, self.out_of_memory, ("overrides", OVERRIDES), keys, arguments);
        if let Replied::Array(parts) = &reply {
            let statuses = parts.iter().map(|part| matches!(part, Replied::Integer(1)));
            self.overrides.extend(Written::of(now_us, gateway, arguments, statuses));
        }
        reply.encode()
    }

    /// Run the script that posts usage.
    fn post_usage(&mut self, now_us: u64, node: usize, command: &[Vec<u8>]) -> Reply {
        let (keys, arguments) = keys_and_arguments(command);
        let reply = self.nodes[node].evaluate(now_us, self.out_of_memory, ("usage", USAGE), keys, arguments);
        if let Replied::Integer(1) = reply {
            let UsageKey { limit, identity, month, .. } = UsageKey::parse("rl", &keys[0]).expect("a key of a total");
            let number = |text: &[u8]| std::str::from_utf8(text).expect("text").parse::<i64>().expect("a number");
            for pair in arguments[4..].chunks(2) {
                let date = month.day(number(&pair[0]) as i8).expect("a day of the month");
                let total = ((limit.to_string(), identity), date);
                self.posts.push(PostedUsage { at_us: now_us, total, amount: number(&pair[1]), is_lost: false });
            }
        }
        reply.encode()
    }

    /// Return the reply to `CLUSTER SLOTS`.
    fn slots(&self) -> Reply {
        let count = self.nodes.len();
        let range = |node: usize| {
            // A node has all slots that `node_index_of` assigns to it.
            let [first, next] = [node, node + 1].map(|node| (node * SLOTS).div_ceil(count));
            let port = port_of(node);
            format!("*3\r\n:{first}\r\n:{}\r\n*2\r\n${}\r\n{HOST}\r\n:{port}\r\n", next - 1, HOST.len())
        };
        format!("*{count}\r\n{}", (0..count).map(range).collect::<String>()).into_bytes()
    }
}

impl Node {
    fn evaluate(
        &self,
        now_us: u64,
        out_of_memory: bool,
        script: (&str, &str),
        keys: &[Vec<u8>],
        arguments: &[Vec<u8>],
    ) -> Replied {
        let database = &mut *self.database.borrow_mut();
        (database.now, database.out_of_memory) = (now_us, out_of_memory);
        LUA.with(|lua| lua.run(database, script, keys, arguments))
    }
}

/// Split a script call into its keys and its other arguments.
fn keys_and_arguments(command: &[Vec<u8>]) -> (&[Vec<u8>], &[Vec<u8>]) {
    let count: usize = std::str::from_utf8(&command[2]).expect("text").parse().expect("the number of keys");
    command[3..].split_at(count)
}

/// Decode the reply of a script to these requests. The result contains `None` for each failed request.
fn verdicts(reply: &[u8], requests: &[(Operation, Vec<LimitArgs>)]) -> Vec<Option<Verdict>> {
    let value = redis::parse_redis_value(reply).expect("a reply");
    let mut reply = script::ScriptReply::new(value).expect("a reply of the scripts");
    requests.iter().map(|(operation, limits)| reply.next_verdict(*operation, limits).expect("a verdict").ok()).collect()
}

/// Return the port of a server.
pub fn port_of(node: usize) -> u16 {
    1 + node as u16
}

fn array(words: &[&str]) -> Reply {
    let bulk = words.iter().map(|word| format!("${}\r\n{word}\r\n", word.len()));
    format!("*{}\r\n{}", words.len(), bulk.collect::<String>()).into_bytes()
}

fn script_sha(script: &str) -> String {
    static KNOWN: LazyLock<Mutex<HashMap<String, String>>> = LazyLock::new(Mutex::default);
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(sha) = known.get(script) {
        return sha.clone();
    }
    let digest = digest::digest(&digest::SHA1_FOR_LEGACY_USE_ONLY, script.as_bytes());
    let sha: String = digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    known.insert(script.to_owned(), sha.clone());
    sha
}

/// Return the time that Redis needs for a charge, as a multiple of the time for a token bucket. These are measured
/// times. The gateway estimates them without knowing the state.
fn work(operation: Operation, charge: &ReceivedCharge) -> u64 {
    match (&charge.rule, operation) {
        (Rule::SlidingLog(rule), Operation::Refund { .. }) => 5 + rule.limit / 20,
        // A charge beyond the limit adds no entry.
        (Rule::SlidingLog(rule), _) if charge.cost > rule.limit => 5,
        (Rule::SlidingLog(_), _) => 5 + charge.cost / 30,
        (Rule::SlidingBuckets(rule), _) => 2 + rule.buckets / 7,
        (Rule::Concurrency(_), _) => 3,
        (Rule::TokenBucket(_) | Rule::FixedWindow(_) | Rule::SlidingWindow(_), _) => 1,
    }
}

/// Decode the keys and the argument of a script call, as `lua/generic.lua` defines them. Return the requests and their
/// [`work`].
fn decode(command: &[Vec<u8>]) -> (Vec<(Operation, Vec<ReceivedCharge>)>, u64) {
    let text = |word: &[u8]| String::from_utf8(word.to_vec()).expect("text");
    let (keys, arguments) = keys_and_arguments(command);
    let argument = &arguments[0];
    let mut names = arguments[1].split(|byte| *byte == b'\n');
    let mut days = arguments.get(2).map(|usage| usage.chunks(24));
    let mut at = 0;
    let mut bytes = |count: usize| {
        at += count;
        &argument[at - count..at]
    };
    let number = |bytes: &[u8]| f64::from_le_bytes(bytes.try_into().expect("eight bytes")) as u64;
    assert_eq!(number(bytes(8)), 0, "the call must leave the time to the server");
    assert!(matches!(bytes(1), b"i" | b"o"), "a known layout");
    let zone = Arc::new(UsageDays::new(TIME_ZONE).expect("a zone"));
    let (mut groups, mut state_count) = (Vec::new(), 0);
    let mut remaining_bytes = argument.len() - 9;
    while remaining_bytes > 0 {
        let size = number(bytes(8));
        let letter = bytes(1)[0];
        let charged_at = number(bytes(8));
        let operation = match letter {
            b'C' => Operation::Check,
            b'P' => Operation::Peek,
            b'A' => Operation::Charge,
            b'R' => Operation::Refund { charged_at },
            b'T' => Operation::TakeUpTo,
            b'N' => Operation::Renew,
            _ => panic!("unknown operation"),
        };
        let limits = number(bytes(8));
        let (mut limit_args, mut keys_per_request) = (Vec::new(), 0);
        for _ in 0..limits {
            let (kind, flag, place) = (bytes(1)[0], bytes(1)[0], bytes(1)[0]);
            let _id = bytes(8);
            let name = text(names.next().expect("a name for each limit"));
            let mode = match flag {
                b'-' => ChargeMode::Enforced,
                b's' => ChargeMode::Shadow,
                b'p' => ChargeMode::Deferred,
                _ => ChargeMode::ShadowDeferred,
            };
            let cost = number(bytes(8));
            let [a, b, c] = [(); 3].map(|()| number(bytes(8)));
            let last_parameter = u64::from_le_bytes(bytes(8).try_into().expect("eight bytes"));
            let (limit, window) = (a, b);
            let rule = match kind {
                b'B' => Rule::TokenBucket(TokenBucket { burst: a, refill: b, parts: c }),
                b'F' => Rule::FixedWindow(FixedWindow { limit, window, start: WindowStart::Aligned { phase: c } }),
                b'X' => Rule::FixedWindow(FixedWindow { limit, window, start: WindowStart::FirstRequest }),
                b'K' => {
                    // Schedules with calendar windows always run the Lua scripts, which read the window boundaries
                    // from the arguments.
                    let start = WindowStart::calendar(CalendarUnit::Day, TIME_ZONE).expect("a zone");
                    Rule::FixedWindow(FixedWindow { limit, window: 0, start })
                }
                b'W' => Rule::SlidingWindow(SlidingWindow { limit, window, unit: c }),
                b'S' => Rule::SlidingBuckets(SlidingBuckets { limit, window, buckets: c }),
                b'L' => Rule::SlidingLog(SlidingLog { limit, window }),
                b'C' => Rule::Concurrency(Concurrency { limit, ttl: b }),
                _ => panic!("unknown kind"),
            };
            let lease = if kind == b'C' { last_parameter } else { 0 };
            let debt_before_us = if kind == b'B' { f64::from_bits(last_parameter) as u64 } else { 0 };
            let day = days.as_mut().map(|days| number(&days.next().expect("the usage of each limit")[..8]));
            let usage = day.filter(|day| *day > 0).map(|_| zone.clone());
            let has_key = place != b's';
            keys_per_request += u64::from(has_key);
            limit_args.push((name, has_key, rule, cost, mode, lease, debt_before_us, usage));
        }
        remaining_bytes -= 25 + 51 * limits as usize;
        state_count += (size * keys_per_request) as usize;
        groups.push((size, operation, limit_args));
    }
    let (states, totals) = keys.split_at(state_count);
    let (mut states, mut totals) = (states.iter(), totals.iter());
    let mut requests = Vec::new();
    for (size, operation, limit_args) in groups {
        for _ in 0..size {
            let mut key = String::new();
            let asked = limit_args.iter().map(|(state, has_key, rule, cost, mode, lease, debt_before_us, usage)| {
                if *has_key {
                    key = text(states.next().expect("a key for each limit that has one"));
                }
                let (name, bucket) = parse_key(&key, state);
                if usage.is_some() {
                    let total = totals.next().expect("a key for each total");
                    // The keys of a probe have a prefix of their own.
                    let key = ["rl", "rl:~probe"].iter().find_map(|prefix| UsageKey::parse(prefix, total));
                    let key = key.expect("a total");
                    assert_eq!((&*key.limit, key.identity), (&*name.0, name.1), "the total of the limit");
                }
                ReceivedCharge {
                    state: name,
                    state_name: bucket,
                    rule: rule.clone(),
                    cost: *cost,
                    mode: *mode,
                    permit_id: *lease,
                    debt_before_us: *debt_before_us,
                    usage: usage.clone(),
                }
            });
            requests.push((operation, asked.collect()));
        }
    }
    assert!(totals.next().is_none(), "a key for each total");
    let of = |(operation, asked): &(Operation, Vec<ReceivedCharge>)| {
        asked.iter().map(|charge| work(*operation, charge)).sum::<u64>()
    };
    let work = requests.iter().map(of).sum();
    (requests, work)
}

/// Parse a key of the form `<prefix>:{<identity>}:<name>` and the name of a state, `<limit>:<shape>`. The name in the key
/// is that of the state, or `states`.
fn parse_key(key: &str, bucket: &str) -> (StateId, StateName) {
    let (identity, name) = key.split_once('{').and_then(|(_, rest)| rest.split_once("}:")).expect("a key");
    assert!(name == bucket || name == "states", "{key} of {bucket}");
    let (limit, shape) = bucket.split_once(':').expect("a limit and its shape");
    let identity = Identity::from_hex(identity).expect("an identity");
    ((limit.to_owned(), identity.0), StateName::new(&IdentityHasher::new("simulation"), limit, shape))
}

/// Return the history of each state: for each decided request, its index and the index of the limit in it.
pub fn charges_by_state(history: &[DecidedRequest]) -> BTreeMap<&StateId, Vec<(usize, usize)>> {
    let mut states: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for (request_index, request) in history.iter().enumerate() {
        // Skip the probes of circuit breakers.
        for (index, asked) in request.charges.iter().enumerate().filter(|(_, asked)| !asked.state.0.starts_with('~')) {
            states.entry(&asked.state).or_default().push((request_index, index));
        }
    }
    states
}
