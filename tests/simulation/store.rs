//! The simulated store: decodes the commands of the gateways, decides by the Rust twin of the scripts, and keeps a history.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{LazyLock, Mutex, PoisonError};

use aws_lc_rs::digest;
use sluicegate::limit::algorithm::concurrency::Concurrency;
use sluicegate::limit::algorithm::fixed_window::{FixedWindow, Start};
use sluicegate::limit::algorithm::sliding_buckets::SlidingBuckets;
use sluicegate::limit::algorithm::sliding_log::SlidingLog;
use sluicegate::limit::algorithm::sliding_window::SlidingWindow;
use sluicegate::limit::algorithm::token_bucket::TokenBucket;
use sluicegate::limit::algorithm::{Outcome, Rule, Status};
use sluicegate::limit::clock::Clock;
use sluicegate::limit::key::{Bucket, Identity, IdentityHasher, Key};
use sluicegate::limit::memory::MemoryStore;
use sluicegate::limit::redis::slots::slot;
use sluicegate::limit::store::{Charge, Mode, Operation, Verdict};

/// Hash slots of a cluster.
const SLOTS: usize = 16_384;

/// The host of every server. A gateway that does not connect by the simulated network is refused there.
pub const HOST: &str = "127.0.0.1";

/// A state: the name of its limit and its identity.
pub type StateName = (String, u128);

/// One limit of a call, as it came over the wire.
#[derive(Debug, Clone)]
pub struct Asked {
    pub name: StateName,
    bucket: Bucket,
    pub rule: Rule,
    pub cost: u64,
    pub mode: Mode,
    pub lease: u64,
    pub debt_before_us: u64,
}

impl Asked {
    fn charge(&self) -> Charge<'_> {
        let Asked { mode, lease, debt_before_us, .. } = *self;
        Charge { mode, lease, debt_before_us, ..charge(&self.name, &self.bucket, &self.rule, self.cost) }
    }
}

/// A charge of so many units.
pub fn charge<'a>(name: &StateName, bucket: &'a Bucket, rule: &'a Rule, cost: u64) -> Charge<'a> {
    Charge {
        key: Key { identity: Identity(name.1), bucket },
        rule,
        cost,
        mode: Mode::Binding,
        lease: 0,
        debt_before_us: 0,
    }
}

/// A request that the store has decided.
#[derive(Debug, Clone)]
pub struct Done {
    pub at_us: u64,
    pub gateway: usize,
    pub operation: Operation,
    pub asked: Vec<Asked>,
    pub verdict: Verdict,
}

impl Done {
    /// The units that the request added to a state; less than none for what was given back.
    pub fn charged(&self, index: usize) -> i64 {
        let asked = &self.asked[index];
        let fits = self.verdict.outcomes[index].status == Status::Ok;
        let cost = asked.cost as i64;
        match self.operation {
            _ if matches!(asked.rule, Rule::Concurrency(_)) => 0,
            Operation::Check if self.verdict.granted > 0 && fits && !asked.mode.is_post_paid() => cost,
            Operation::Take => self.verdict.granted as i64,
            Operation::Charge => cost,
            Operation::Refund { .. } => -cost,
            Operation::Check | Operation::Peek | Operation::Renew => 0,
        }
    }
}

/// A reply in the bytes of the protocol.
pub type Reply = Vec<u8>;

/// One server, or the masters of a cluster.
#[derive(Debug)]
pub struct Store {
    nodes: Vec<Node>,
    clock: Clock,
    pub out_of_memory: bool,
    /// All that was decided, also what a failover lost.
    pub history: Vec<Done>,
}

/// One server.
#[derive(Debug)]
struct Node {
    memory: MemoryStore,
    scripts: BTreeSet<String>,
    /// What the state consists of: indices of the history.
    kept: Vec<usize>,
}

fn memory(clock: &Clock) -> MemoryStore {
    MemoryStore::new(1 << 20, clock.clone())
}

impl Store {
    /// A store of so many servers.
    pub fn new(nodes: usize, now_us: u64) -> Store {
        let clock = Clock::manual(now_us);
        let node = |_| Node { memory: memory(&clock), scripts: BTreeSet::new(), kept: Vec::new() };
        Store { nodes: (0..nodes).map(node).collect(), clock, out_of_memory: false, history: Vec::new() }
    }

    /// The number of the server that keeps the states of an identity.
    pub fn number_of(&self, identity: Identity) -> usize {
        usize::from(slot(identity)) * self.nodes.len() / SLOTS
    }

    fn node_of(&self, identity: Identity) -> &Node {
        &self.nodes[self.number_of(identity)]
    }

    /// The store ends: scripts are lost, and the state of the last `lost_us`; all of it with `None`.
    pub fn restart(&mut self, now_us: u64, lost_us: Option<u64>) {
        let from_us = now_us.saturating_sub(lost_us.unwrap_or(u64::MAX));
        for node in &mut self.nodes {
            node.scripts.clear();
            node.memory = memory(&self.clock);
            node.kept.retain(|index| self.history[*index].at_us < from_us);
            for index in &node.kept {
                let Done { at_us, operation, asked, .. } = &self.history[*index];
                self.clock.set(*at_us);
                let charges: Vec<_> = asked.iter().map(Asked::charge).collect();
                node.memory.decide(*operation, &charges);
            }
        }
    }

    /// What a check of this limit would get now; nothing is written.
    pub fn peek(&self, now_us: u64, charge: Charge<'_>) -> Outcome {
        self.clock.set(now_us);
        self.node_of(charge.key.identity).memory.decide(Operation::Peek, &[charge]).outcomes[0]
    }

    /// Run a command on a server, and return the reply and how many limits it decided.
    pub fn run(&mut self, now_us: u64, gateway: usize, node: usize, command: &[Vec<u8>]) -> (Reply, u64) {
        let mode = if self.nodes.len() > 1 { "cluster" } else { "standalone" };
        let scripts = &mut self.nodes[node].scripts;
        let word = |index: usize| command.get(index).map_or("", |word| std::str::from_utf8(word).unwrap_or(""));
        let reply = match (word(0), word(1)) {
            ("HELLO", _) => array(&["server", "redis", "version", "7.4.0", "mode", mode, "role", "master"]),
            ("SCRIPT", "LOAD") => {
                let sha = sha_of(word(2));
                scripts.insert(sha.clone());
                format!("${}\r\n{sha}\r\n", sha.len()).into_bytes()
            }
            ("EVAL", "return 1") => b":1\r\n".to_vec(),
            ("EVAL", script) => {
                scripts.insert(sha_of(script));
                return self.evaluate(now_us, gateway, node, command);
            }
            ("EVALSHA", sha) if !scripts.contains(sha) => {
                b"-NOSCRIPT No matching script. Please use EVAL.\r\n".to_vec()
            }
            ("EVALSHA", _) => return self.evaluate(now_us, gateway, node, command),
            ("CLUSTER", "SLOTS") => self.slots(),
            ("PING", _) => b"+PONG\r\n".to_vec(),
            _ => b"+OK\r\n".to_vec(),
        };
        (reply, 0)
    }

    fn evaluate(&mut self, now_us: u64, gateway: usize, node: usize, command: &[Vec<u8>]) -> (Reply, u64) {
        let (requests, limits) = decode(command);
        let mut numbers = vec![now_us as f64];
        let mut failures = Vec::new();
        let mut before = 0;
        self.clock.set(now_us);
        for (operation, asked) in requests {
            let charges: Vec<_> = asked.iter().map(Asked::charge).collect();
            if self.out_of_memory && would_write(&self.nodes[node].memory, operation, &charges) {
                failures.push(before);
                numbers.extend(asked.iter().flat_map(|_| [-1.0, 0.0, 0.0, 0.0, 0.0]));
            } else {
                let verdict = self.nodes[node].memory.decide(operation, &charges);
                for Outcome { status, remaining, reset_us, retry_us } in &verdict.outcomes {
                    let (status, retry) = match status {
                        Status::Ok => (0.0, 0.0),
                        Status::Over => (1.0, *retry_us as f64),
                        Status::Never => (2.0, -1.0),
                        Status::Busy => (3.0, *retry_us as f64),
                    };
                    numbers.extend([verdict.granted as f64, status, *remaining as f64, *reset_us as f64, retry]);
                }
                before += asked.len();
                self.nodes[node].kept.push(self.history.len());
                self.history.push(Done { at_us: now_us, gateway, operation, asked, verdict });
                continue;
            }
            before += asked.len();
        }
        let mut reply = Vec::new();
        if !failures.is_empty() {
            reply.extend(format!("*{}\r\n", 1 + 2 * failures.len()).bytes());
        }
        reply.extend(format!("${}\r\n", 8 * numbers.len()).bytes());
        reply.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        reply.extend(b"\r\n");
        for before in failures {
            reply.extend(format!(":{before}\r\n-OOM command not allowed when used memory > 'maxmemory'.\r\n").bytes());
        }
        (reply, limits)
    }

    /// The reply to `CLUSTER SLOTS`.
    fn slots(&self) -> Reply {
        let count = self.nodes.len();
        let range = |node: usize| {
            // The first slots whose number times `count` reaches that of the node.
            let [first, next] = [node, node + 1].map(|node| (node * SLOTS).div_ceil(count));
            let port = port_of(node);
            format!("*3\r\n:{first}\r\n:{}\r\n*2\r\n${}\r\n{HOST}\r\n:{port}\r\n", next - 1, HOST.len())
        };
        format!("*{count}\r\n{}", (0..count).map(range).collect::<String>()).into_bytes()
    }
}

/// The port of a server.
pub fn port_of(node: usize) -> u16 {
    1 + node as u16
}

/// Whether Redis would reject a command of the script while it is out of memory. Releases of permits only free some.
fn would_write(memory: &MemoryStore, operation: Operation, charges: &[Charge<'_>]) -> bool {
    let all_permits = charges.iter().all(|charge| matches!(charge.rule, Rule::Concurrency(_)));
    match operation {
        Operation::Peek => false,
        Operation::Check => memory.decide(Operation::Peek, charges).granted > 0,
        Operation::Take => {
            let one: Vec<_> = charges.iter().map(|charge| Charge { cost: 1, ..*charge }).collect();
            memory.decide(Operation::Peek, &one).granted > 0
        }
        Operation::Charge | Operation::Renew => true,
        Operation::Refund { .. } => !all_permits,
    }
}

fn array(words: &[&str]) -> Reply {
    let bulk = words.iter().map(|word| format!("${}\r\n{word}\r\n", word.len()));
    format!("*{}\r\n{}", words.len(), bulk.collect::<String>()).into_bytes()
}

fn sha_of(script: &str) -> String {
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

/// Reads the keys and the argument of a script call, see `lua/check.lua`: its requests, and how many limits they have.
fn decode(command: &[Vec<u8>]) -> (Vec<(Operation, Vec<Asked>)>, u64) {
    let text = |word: &[u8]| String::from_utf8(word.to_vec()).expect("text");
    let count: usize = text(&command[2]).parse().expect("the number of keys");
    let mut keys = command[3..3 + count].iter();
    let argument = &command[3 + count];
    let mut at = 0;
    let mut bytes = |count: usize| {
        at += count;
        &argument[at - count..at]
    };
    let number = |bytes: &[u8]| f64::from_le_bytes(bytes.try_into().expect("eight bytes")) as u64;
    assert_eq!(number(bytes(8)), 0, "the server's time decides");
    let (mut requests, mut left) = (Vec::new(), count);
    while left > 0 {
        let size = number(bytes(8));
        let letter = bytes(1)[0];
        let charged_at = number(bytes(8));
        let operation = match letter {
            b'C' => Operation::Check,
            b'P' => Operation::Peek,
            b'A' => Operation::Charge,
            b'R' => Operation::Refund { charged_at },
            b'T' => Operation::Take,
            b'N' => Operation::Renew,
            _ => panic!("unknown operation"),
        };
        let limits = number(bytes(8));
        let mut terms = Vec::new();
        for _ in 0..limits {
            let (kind, flag) = (bytes(1)[0], bytes(1)[0]);
            let mode = match flag {
                b'-' => Mode::Binding,
                b's' => Mode::Shadow,
                b'p' => Mode::PostPaid,
                _ => Mode::ShadowPostPaid,
            };
            let cost = number(bytes(8));
            let [a, b, c] = [(); 3].map(|()| number(bytes(8)));
            let last = u64::from_le_bytes(bytes(8).try_into().expect("eight bytes"));
            let (limit, window) = (a, b);
            let rule = match kind {
                b'B' => Rule::TokenBucket(TokenBucket { burst: a, refill: b, parts: c }),
                b'F' => Rule::FixedWindow(FixedWindow { limit, window, start: Start::Aligned { phase: c } }),
                b'X' => Rule::FixedWindow(FixedWindow { limit, window, start: Start::FirstRequest }),
                b'W' => Rule::SlidingWindow(SlidingWindow { limit, window, unit: c }),
                b'S' => Rule::SlidingBuckets(SlidingBuckets { limit, window, buckets: c }),
                b'L' => Rule::SlidingLog(SlidingLog { limit, window }),
                b'C' => Rule::Concurrency(Concurrency { limit, lease: b }),
                _ => panic!("unknown kind"),
            };
            let lease = if kind == b'C' { last } else { 0 };
            let debt_before_us = if kind == b'B' { f64::from_bits(last) as u64 } else { 0 };
            terms.push((rule, cost, mode, lease, debt_before_us));
        }
        for _ in 0..size {
            let asked = terms.iter().map(|(rule, cost, mode, lease, debt_before_us)| {
                let (name, bucket) = state_of(&text(keys.next().expect("a key for each limit")));
                Asked {
                    name,
                    bucket,
                    rule: rule.clone(),
                    cost: *cost,
                    mode: *mode,
                    lease: *lease,
                    debt_before_us: *debt_before_us,
                }
            });
            requests.push((operation, asked.collect()));
        }
        left -= (size * limits) as usize;
    }
    (requests, count as u64)
}

/// The state that a key `<prefix>:{<identity>}:<limit>:<shape>` names.
fn state_of(key: &str) -> (StateName, Bucket) {
    let (identity, bucket) = key.split_once('{').and_then(|(_, rest)| rest.split_once("}:")).expect("a key");
    let (limit, shape) = bucket.split_once(':').expect("a limit and its shape");
    let identity = Identity::from_hex(identity).expect("an identity");
    ((limit.to_owned(), identity.0), Bucket::new(&IdentityHasher::new("simulation"), limit, shape))
}

/// The history of each state: indices of the decided requests and of the limit in them.
pub fn by_state(history: &[Done]) -> BTreeMap<&StateName, Vec<(usize, usize)>> {
    let mut states: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for (done, each) in history.iter().enumerate() {
        // Not those of the probes of breakers.
        for (index, asked) in each.asked.iter().enumerate().filter(|(_, asked)| !asked.name.0.starts_with('~')) {
            states.entry(&asked.name).or_default().push((done, index));
        }
    }
    states
}
