//! The scripts in Lua 5.4, whose integers are not doubles: stores that speak Redis' protocol may run them in it (Dragonfly).

mod support;

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;

use mlua::{Function, Lua, Value, Variadic};
use sluicegate::limit::algorithm::Rule;
use sluicegate::limit::clock::Clock;
use sluicegate::limit::memory::MemoryStore;
use sluicegate::limit::quota::EXACT;
use sluicegate::limit::redis::script::{Parts, script};
use sluicegate::limit::redis::wire::{self, Reply, Terms};
use sluicegate::limit::store::{Charge, Operation, Verdict};
use support::random::{Case, Play, Resizing, STEPS, Time, case, operations, property, resizing};
use support::stores::{Limit, SECOND, START, extremes, longest_reset};

/// The commands that the scripts use, on strings, lists and sorted sets in this process. Nothing expires.
#[derive(Default)]
struct Database {
    strings: HashMap<String, String>,
    lists: HashMap<String, Vec<String>>,
    /// Scores and members, in the order of a sorted set.
    sets: HashMap<String, BTreeSet<(u64, String)>>,
    now: u64,
}

enum Replied {
    Nil,
    Integer(i64),
    Bulk(String),
    Array(Vec<String>),
}

impl Database {
    fn run(&mut self, arguments: &[&str]) -> Replied {
        match *arguments {
            ["TIME"] => Replied::Array(vec![(self.now / SECOND).to_string(), (self.now % SECOND).to_string()]),
            ["GET", key] => self.strings.get(key).cloned().map_or(Replied::Nil, Replied::Bulk),
            ["SET", key, value, "PX", ttl_ms] => {
                assert!(ttl_ms.parse::<u64>().unwrap() > 1000, "a TTL of {ttl_ms} ms");
                self.strings.insert(key.to_owned(), value.to_owned());
                Replied::Bulk("OK".to_owned())
            }
            ["SETRANGE", key, "8", value] => {
                let state = self.strings.get_mut(key).expect("a key that has a TTL");
                let end: String = state.chars().take(8).collect();
                assert_eq!(state.chars().count(), 8 + value.chars().count(), "all but the end of the key is new");
                *state = end + value;
                Replied::Integer(state.chars().count() as i64)
            }
            ["DEL", key] => {
                let removed = self.strings.remove(key).is_some() | self.lists.remove(key).is_some();
                Replied::Integer(removed.into())
            }
            ["PEXPIRE", key, ttl_ms] => {
                assert!(ttl_ms.parse::<u64>().unwrap() > 1000, "a TTL of {ttl_ms} ms");
                Replied::Integer((self.lists.contains_key(key) || self.sets.contains_key(key)).into())
            }
            ["ZADD", key, score, member] => self.add(key, score, member, true),
            ["ZADD", key, "XX", score, member] => self.add(key, score, member, false),
            ["ZREM", key, member] => self.keep(key, |(_, other)| other != member),
            ["ZREMRANGEBYSCORE", key, "-inf", last] => {
                let last: u64 = last.parse().unwrap();
                self.keep(key, |(score, _)| *score > last)
            }
            ["ZCOUNT", key, first, "+inf"] => Replied::Integer(self.after(key, first).count() as i64),
            ["ZRANGEBYSCORE", key, first, "+inf"] => {
                Replied::Array(self.after(key, first).map(|(_, member)| member.clone()).collect())
            }
            ["ZRANGEBYSCORE", key, first, "+inf", "WITHSCORES", "LIMIT", skip, "1"] => {
                let found = self.after(key, first).nth(skip.parse().unwrap());
                Replied::Array(found.map_or(Vec::new(), |(score, member)| vec![member.clone(), score.to_string()]))
            }
            ["RPUSH", key, value] => {
                let list = self.lists.entry(key.to_owned()).or_default();
                list.push(value.to_owned());
                Replied::Integer(list.len() as i64)
            }
            ["LLEN", key] => Replied::Integer(self.list(key).len() as i64),
            ["LINDEX", key, index] => {
                let list = self.list(key);
                let index = place(index, list.len());
                list.get(index).cloned().map_or(Replied::Nil, Replied::Bulk)
            }
            ["LRANGE", key, "0", "-1"] => Replied::Array(self.list(key).to_vec()),
            ["LTRIM", key, first, "-1"] => {
                let first = place(first, self.list(key).len());
                self.edit(key, |list| drop(list.drain(..first)));
                Replied::Bulk("OK".to_owned())
            }
            ["LREM", key, count, value] => {
                let count: i64 = count.parse().unwrap();
                assert!(count < 0, "from the newest on: {count}");
                let mut left = count.unsigned_abs();
                self.edit(key, |list| {
                    for index in (0..list.len()).rev() {
                        if left > 0 && list[index] == value {
                            list.remove(index);
                            left -= 1;
                        }
                    }
                });
                Replied::Integer((count.unsigned_abs() - left) as i64)
            }
            _ => panic!("an unexpected command: {arguments:?}"),
        }
    }

    /// What lies behind an exclusive bound.
    fn after(&self, key: &str, bound: &str) -> impl Iterator<Item = &(u64, String)> {
        let bound: u64 = bound.strip_prefix('(').unwrap().parse().unwrap();
        self.sets.get(key).into_iter().flatten().filter(move |(score, _)| *score > bound)
    }

    fn add(&mut self, key: &str, score: &str, member: &str, new: bool) -> Replied {
        let known = self.sets.get(key).is_some_and(|set| set.iter().any(|(_, other)| other == member));
        if known || new {
            self.keep(key, |(_, other)| other != member);
            self.sets.entry(key.to_owned()).or_default().insert((score.parse().unwrap(), member.to_owned()));
        }
        Replied::Integer((!known && new).into())
    }

    fn keep(&mut self, key: &str, keep: impl Fn(&(u64, String)) -> bool) -> Replied {
        let Some(set) = self.sets.get_mut(key) else { return Replied::Integer(0) };
        let before = set.len();
        set.retain(keep);
        let removed = before - set.len();
        self.sets.retain(|_, set| !set.is_empty());
        Replied::Integer(removed as i64)
    }

    fn list(&self, key: &str) -> &[String] {
        self.lists.get(key).map_or(&[], Vec::as_slice)
    }

    /// An empty list is none.
    fn edit(&mut self, key: &str, edit: impl FnOnce(&mut Vec<String>)) {
        if let Some(list) = self.lists.get_mut(key) {
            edit(list);
        }
        self.lists.retain(|_, list| !list.is_empty());
    }
}

/// An index from the start, or from behind the end.
fn place(index: &str, length: usize) -> usize {
    let index: i64 = index.parse().unwrap();
    let index = if index < 0 { index + length as i64 } else { index };
    (index.max(0) as usize).min(length)
}

/// States are bytes, not text: here each is a character.
fn bytes(text: &str) -> Vec<u8> {
    text.chars().map(|byte| byte as u8).collect()
}

/// A store in Lua 5.4.
struct Lua54 {
    lua: Lua,
    database: Rc<RefCell<Database>>,
    scripts: RefCell<HashMap<&'static str, Function>>,
}

impl Lua54 {
    fn new() -> Lua54 {
        let lua = Lua::new();
        let database = Rc::new(RefCell::new(Database::default()));
        let served = database.clone();
        let call = move |lua: &Lua, arguments: Variadic<mlua::String>| {
            let text = |argument: &mlua::String| argument.as_bytes().iter().map(|byte| char::from(*byte)).collect();
            let arguments: Vec<String> = arguments.iter().map(text).collect();
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            match served.borrow_mut().run(&arguments) {
                Replied::Nil => Ok(Value::Boolean(false)),
                Replied::Integer(number) => Ok(Value::Integer(number)),
                Replied::Bulk(text) => lua.create_string(bytes(&text)).map(Value::String),
                Replied::Array(texts) => {
                    let texts = texts.iter().map(|text| lua.create_string(bytes(text)));
                    lua.create_sequence_from(texts.collect::<Result<Vec<_>, _>>()?).map(Value::Table)
                }
            }
        };
        let error_reply = |lua: &Lua, text: String| lua.create_table_from([("err", text)]);
        let redis = lua.create_table().unwrap();
        let call = lua.create_function(call).unwrap();
        redis.set("pcall", &call).unwrap();
        redis.set("call", call).unwrap();
        redis.set("error_reply", lua.create_function(error_reply).unwrap()).unwrap();
        lua.globals().set("redis", redis).unwrap();
        // As the library of that name that such stores have.
        lua.load("struct = { pack = string.pack, unpack = string.unpack }").exec().unwrap();
        Lua54 { lua, database, scripts: RefCell::default() }
    }

    fn call(&self, now: u64, operation: Operation, charges: &[Charge<'_>]) -> Verdict {
        // 0: the script asks for the time.
        self.database.borrow_mut().now = now;
        let key = |charge: &Charge<'_>| {
            let mut key = Vec::new();
            charge.key.write("rl", &mut key);
            String::from_utf8(key).unwrap()
        };
        let terms: Vec<_> = charges.iter().map(|charge| Terms::of(charge, now)).collect();
        let mut argument = wire::argument(0, 1, terms.len());
        wire::add(&mut argument, 1, operation, &terms);
        self.lua.globals().set("KEYS", charges.iter().map(key).collect::<Vec<_>>()).unwrap();
        self.lua.globals().set("ARGV", [self.lua.create_string(argument).unwrap()]).unwrap();
        let parts = Parts::of(charges.iter().map(|charge| charge.rule));
        let text = &script(wire::frame(operation, &terms), parts).text;
        let mut scripts = self.scripts.borrow_mut();
        let script = scripts.entry(text).or_insert_with(|| self.lua.load(text).into_function().unwrap());
        let reply: Value = script.call(()).unwrap_or_else(|error| panic!("{error}: {operation:?} of {charges:#?}"));
        let Value::String(bytes) = reply else { panic!("{reply:?}: {operation:?} of {charges:#?}") };
        let reply = Reply::new(redis::Value::BulkString(bytes.as_bytes().to_vec()), charges.len());
        reply.unwrap().next(charges.len()).unwrap().unwrap()
    }
}

#[test]
fn lua_5_4_gives_the_same_replies() {
    property(operations() / 5, STEPS, case(), |case| {
        let case = Case { time: Time::Jumps, ..case };
        let (lua, clock) = (Lua54::new(), Clock::manual(case.start));
        let model = MemoryStore::new(1_000_000, clock.clone());
        let mut play = Play::new(&case);
        for step in &case.steps {
            play.turn(step);
            clock.set(play.now);
            let (operation, charges) = play.ask(step);
            let verdict = model.decide(operation, &charges);
            let script = lua.call(play.now, operation, &charges);
            assert_eq!(script, verdict, "Lua 5.4 and model differ: {operation:?} of {charges:#?}");
            play.saw(operation, &verdict);
        }
        case.steps.len()
    });
}

#[test]
fn lua_5_4_converts_debt_to_another_rate() {
    property(operations() / 5, 5, resizing(), |Resizing { old, new, cost, idle }| {
        let (lua, clock) = (Lua54::new(), Clock::manual(START));
        let model = MemoryStore::new(1000, clock.clone());
        let [before, after] = [old, new].map(|rule| Limit::new("limit", Rule::TokenBucket(rule)));
        let call = |now: u64, operation, charge: Charge<'_>| {
            clock.set(now);
            let verdict = model.decide(operation, &[charge]);
            let script = lua.call(now, operation, &[charge]);
            assert_eq!(script, verdict, "Lua 5.4 and model differ: {operation:?} of {charge:#?}");
            verdict.outcomes[0].reset_us
        };
        let lasts = call(START, Operation::Charge, before.charge(1, cost));
        let now = START + (u128::from(lasts) * u128::from(idle) / 1000) as u64;
        call(now, Operation::Check, after.charge(1, new.burst));
        call(now, Operation::Charge, after.charge(1, 0));
        call(now, Operation::Refund { charged_at: now }, before.charge(1, 1));
        call(now, Operation::Check, after.charge(1, 1));
        5
    });
}

#[test]
fn lua_5_4_counts_the_largest_limits() {
    let (lua, clock) = (Lua54::new(), Clock::manual(START));
    let model = MemoryStore::new(1_000_000, clock.clone());
    for (number, rule) in extremes().into_iter().enumerate() {
        let limit = Limit::new(&format!("limit{number}"), rule);
        let capacity = limit.rule.capacity();
        let call = |now: u64, operation, cost| {
            clock.set(now);
            let charges = [limit.charge(1, cost)];
            let verdict = model.decide(operation, &charges);
            let script = lua.call(now, operation, &charges);
            assert_eq!(script, verdict, "Lua 5.4 and model differ: {operation:?} of {charges:#?}");
            verdict.outcomes[0].retry_us
        };
        call(START, Operation::Check, capacity);
        let retry = call(START, Operation::Check, 1);
        for wait in [1, retry / 2, retry - 1, retry, longest_reset(&limit.rule) / 2] {
            call(START + wait, Operation::Peek, 1);
            call(START + wait, Operation::Peek, capacity);
        }
        call(START + retry, Operation::Take, capacity);
        call(START + retry, Operation::Refund { charged_at: START + retry }, capacity / 2);
        if !matches!(limit.rule, Rule::SlidingLog(_)) {
            // Paid for later: any number that a response may tell.
            call(START + retry, Operation::Charge, EXACT - 1);
            call(START + retry + 1, Operation::Charge, EXACT - 1);
            call(START + retry + 2, Operation::Refund { charged_at: START + retry }, EXACT - 1);
        }
        // A key may stay for long when its expiry is late; products with the time since may then leave 64 bits.
        call(START + 3650 * 86_400 * SECOND, Operation::Check, capacity);
        call(START + 7300 * 86_400 * SECOND, Operation::Refund { charged_at: 0 }, capacity);
    }
}
