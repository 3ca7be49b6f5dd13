//! Runs the scripts in `lua/` with Lua 5.4 and an in-process implementation of the Redis commands that they call.
#![allow(dead_code, unreachable_pub)] // each test crate uses a part

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;

use mlua::{Function, Lua, Table, Value, Variadic};

const SECOND: u64 = 1_000_000;

/// Redis's reply to a write while it is out of memory.
const OUT_OF_MEMORY: &str = "OOM command not allowed when used memory > 'maxmemory'.";

/// Commands that Redis rejects while it is out of memory (`denyoom`), unless the script has already written.
const NEED_MEMORY: [&str; 6] = ["SET", "SETRANGE", "ZADD", "RPUSH", "HSET", "HINCRBY"];

/// Write commands that Redis accepts while it is out of memory.
const FREE_MEMORY: [&str; 6] = ["DEL", "PEXPIRE", "ZREM", "LTRIM", "LREM", "HDEL"];

/// An in-process database with the Redis commands that the scripts use, for strings, lists, sorted sets and hashes.
/// Each character of a string stands for a byte. Keys never expire, because the scripts compare times themselves.
#[derive(Debug, Default)]
pub struct Database {
    strings: HashMap<String, String>,
    lists: HashMap<String, Vec<String>>,
    /// Scores and members, in the order of the sorted set.
    sets: HashMap<String, BTreeSet<(u64, String)>>,
    hashes: HashMap<String, BTreeMap<String, String>>,
    /// The reply to `TIME`, in µs since the Unix epoch.
    pub now: u64,
    /// Whether the used memory has reached `maxmemory`.
    pub out_of_memory: bool,
    /// Whether the running script has already written.
    wrote: bool,
    /// The write commands with their times, as Redis sends them to replicas. `None` if there is no journal.
    journal: Option<Vec<(u64, Vec<String>)>>,
}

/// The reply to a command or to a script.
#[derive(Debug)]
pub enum Replied {
    Nil,
    Integer(i64),
    Status(&'static str),
    Bulk(String),
    Array(Vec<Replied>),
    Error(String),
}

impl Database {
    /// Create a database that can [`fall back`](Database::fall_back) to an earlier state.
    pub fn with_journal() -> Database {
        Database { journal: Some(Vec::new()), ..Database::default() }
    }

    /// Undo all writes since this time.
    pub fn fall_back(&mut self, from_us: u64) {
        let journal = self.journal.take().expect("a journal");
        *self = Database { now: self.now, ..Database::with_journal() };
        for (at_us, arguments) in journal.into_iter().filter(|(at_us, _)| *at_us < from_us) {
            self.now = at_us;
            self.command(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
        }
    }

    /// Return all hashes.
    pub fn hashes(&self) -> &HashMap<String, BTreeMap<String, String>> {
        &self.hashes
    }

    /// Run a command outside a script.
    pub fn command(&mut self, arguments: &[&str]) -> Replied {
        self.wrote = false;
        self.call(arguments)
    }

    fn call(&mut self, arguments: &[&str]) -> Replied {
        let needs_memory = NEED_MEMORY.contains(&arguments[0]);
        if needs_memory && self.out_of_memory && !self.wrote {
            return Replied::Error(OUT_OF_MEMORY.to_owned());
        }
        if needs_memory || FREE_MEMORY.contains(&arguments[0]) {
            // Commands in `FREE_MEMORY` also count as writes, after which the script may use more memory.
            self.wrote = true;
            if let Some(journal) = &mut self.journal {
                journal.push((self.now, arguments.iter().map(|argument| (*argument).to_owned()).collect()));
            }
        }
        self.run(arguments)
    }

    fn run(&mut self, arguments: &[&str]) -> Replied {
        match *arguments {
            ["TIME"] => array([self.now / SECOND, self.now % SECOND].map(|part| part.to_string())),
            ["GET", key] => self.strings.get(key).cloned().map_or(Replied::Nil, Replied::Bulk),
            ["SET", key, value, "PX", ttl_ms] => {
                assert!(ttl_ms.parse::<u64>().unwrap() > 1000, "a TTL of {ttl_ms} ms");
                self.strings.insert(key.to_owned(), value.to_owned());
                Replied::Status("OK")
            }
            ["SETRANGE", key, offset, value] => {
                let state = self.strings.get_mut(key).expect("a key that has a TTL");
                let mut bytes: Vec<char> = state.chars().collect();
                let offset: usize = offset.parse().unwrap();
                let end = offset + value.chars().count();
                assert!(end <= bytes.len(), "SETRANGE must not change the length of a value");
                bytes.splice(offset..end, value.chars());
                *state = bytes.into_iter().collect();
                Replied::Integer(state.chars().count() as i64)
            }
            ["DEL", key] => {
                let removed = self.strings.remove(key).is_some()
                    | self.lists.remove(key).is_some()
                    | self.sets.remove(key).is_some()
                    | self.hashes.remove(key).is_some();
                Replied::Integer(removed.into())
            }
            ["PEXPIRE", key, ttl_ms] => {
                assert!(ttl_ms.parse::<u64>().unwrap() > 1000, "a TTL of {ttl_ms} ms");
                let is_there =
                    self.lists.contains_key(key) || self.sets.contains_key(key) || self.hashes.contains_key(key);
                Replied::Integer(is_there.into())
            }
            ["HSET", key, field, value] => {
                let hash = self.hashes.entry(key.to_owned()).or_default();
                Replied::Integer(hash.insert(field.to_owned(), value.to_owned()).is_none().into())
            }
            ["HGET", key, field] => {
                let value = self.hashes.get(key).and_then(|hash| hash.get(field));
                value.cloned().map_or(Replied::Nil, Replied::Bulk)
            }
            ["HINCRBY", key, field, amount] => {
                let value = self.hashes.entry(key.to_owned()).or_default().entry(field.to_owned()).or_default();
                let total = value.parse::<i64>().unwrap_or(0) + amount.parse::<i64>().unwrap();
                *value = total.to_string();
                Replied::Integer(total)
            }
            ["HDEL", key, field] => {
                let removed = self.hashes.get_mut(key).is_some_and(|hash| hash.remove(field).is_some());
                self.hashes.retain(|_, hash| !hash.is_empty());
                Replied::Integer(removed.into())
            }
            ["HGETALL", key] => {
                let fields = self.hashes.get(key).into_iter().flatten();
                array(fields.flat_map(|(field, value)| [field.clone(), value.clone()]))
            }
            ["ZADD", key, score, member] => self.add(key, score, member, true),
            ["ZADD", key, "XX", score, member] => self.add(key, score, member, false),
            ["ZREM", key, ref members @ ..] => self.keep(key, |(_, other)| !members.contains(&other.as_str())),
            ["ZCOUNT", key, first, "+inf"] => Replied::Integer(self.after(key, first).count() as i64),
            ["ZRANGEBYSCORE", key, first, "+inf", "LIMIT", "0", count] => {
                let found = self.after(key, first).take(count.parse().unwrap());
                array(found.map(|(_, member)| member.clone()))
            }
            ["ZRANGEBYSCORE", key, "-inf", last, "LIMIT", "0", count] => {
                let last: u64 = last.parse().unwrap();
                let found = self.sets.get(key).into_iter().flatten().take_while(|(score, _)| *score <= last);
                array(found.take(count.parse().unwrap()).map(|(_, member)| member.clone()))
            }
            ["ZRANGEBYSCORE", key, first, "+inf", "WITHSCORES", "LIMIT", skip, "1"] => {
                let found = self.after(key, first).nth(skip.parse().unwrap());
                array(found.into_iter().flat_map(|(score, member)| [member.clone(), score.to_string()]))
            }
            ["RPUSH", key, ref values @ ..] => {
                let list = self.lists.entry(key.to_owned()).or_default();
                list.extend(values.iter().map(|value| (*value).to_owned()));
                Replied::Integer(list.len() as i64)
            }
            ["LLEN", key] => Replied::Integer(self.list(key).len() as i64),
            ["LINDEX", key, index] => {
                let list = self.list(key);
                let index = place(index, list.len());
                list.get(index).cloned().map_or(Replied::Nil, Replied::Bulk)
            }
            ["LTRIM", key, first, last] => {
                let [first, last] = [first, last].map(|index| place(index, self.list(key).len()));
                self.edit(key, |list| *list = list[first..(last + 1).min(list.len())].to_vec());
                Replied::Status("OK")
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

    /// Return the members whose score is greater than an exclusive bound.
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
        if set.is_empty() {
            self.sets.remove(key);
        }
        Replied::Integer(removed as i64)
    }

    fn list(&self, key: &str) -> &[String] {
        self.lists.get(key).map_or(&[], Vec::as_slice)
    }

    /// Edit a list. Delete the list if it is empty afterwards.
    fn edit(&mut self, key: &str, edit: impl FnOnce(&mut Vec<String>)) {
        if let Some(list) = self.lists.get_mut(key) {
            edit(list);
            if list.is_empty() {
                self.lists.remove(key);
            }
        }
    }
}

fn array(texts: impl IntoIterator<Item = String>) -> Replied {
    Replied::Array(texts.into_iter().map(Replied::Bulk).collect())
}

/// Convert an index of a list. A negative index counts from the end.
fn place(index: &str, length: usize) -> usize {
    let index: i64 = index.parse().unwrap();
    let index = if index < 0 { index + length as i64 } else { index };
    (index.max(0) as usize).min(length)
}

/// Convert a string to bytes. States are bytes, and each byte is a character here.
fn bytes(text: &str) -> Vec<u8> {
    text.chars().map(|byte| byte as u8).collect()
}

/// Convert the bytes of a command or an argument to a string in which each character is a byte.
fn text(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| char::from(*byte)).collect()
}

impl Replied {
    /// Return the reply with these bytes.
    pub fn of_bytes(bytes: &[u8]) -> Replied {
        Replied::Bulk(text(bytes))
    }

    fn of(value: Value) -> Replied {
        match value {
            Value::Nil | Value::Boolean(false) => Replied::Nil,
            Value::Boolean(true) => Replied::Integer(1),
            Value::Integer(number) => Replied::Integer(number),
            Value::Number(number) => Replied::Integer(number as i64),
            Value::String(string) => Replied::Bulk(text(&string.as_bytes())),
            Value::Table(table) => match table.get::<Option<mlua::String>>("err").unwrap() {
                Some(error) => Replied::Error(text(&error.as_bytes())),
                None => Replied::Array(table.sequence_values().map(|value| Replied::of(value.unwrap())).collect()),
            },
            other => panic!("a script returns {other:?}"),
        }
    }

    fn into_lua(self, lua: &Lua) -> mlua::Result<Value> {
        Ok(match self {
            Replied::Nil => Value::Boolean(false),
            Replied::Integer(number) => Value::Integer(number),
            Replied::Status(status) => Value::Table(lua.create_table_from([("ok", status)])?),
            Replied::Error(error) => Value::Table(lua.create_table_from([("err", error)])?),
            Replied::Bulk(text) => Value::String(lua.create_string(bytes(&text))?),
            Replied::Array(parts) => {
                let parts = parts.into_iter().map(|part| part.into_lua(lua));
                Value::Table(lua.create_sequence_from(parts.collect::<mlua::Result<Vec<_>>>()?)?)
            }
        })
    }

    /// Encode the reply in the Redis protocol.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Replied::Nil => b"$-1\r\n".to_vec(),
            Replied::Integer(number) => format!(":{number}\r\n").into_bytes(),
            Replied::Status(status) => format!("+{status}\r\n").into_bytes(),
            Replied::Error(error) => format!("-{error}\r\n").into_bytes(),
            Replied::Bulk(text) => {
                let text = bytes(text);
                [format!("${}\r\n", text.len()).as_bytes(), &text, b"\r\n"].concat()
            }
            Replied::Array(parts) => {
                let mut all = format!("*{}\r\n", parts.len()).into_bytes();
                parts.iter().for_each(|part| all.extend(part.encode()));
                all
            }
        }
    }
}

/// Lua 5.4 with the functions that Redis offers to scripts.
pub struct Interpreter {
    lua: Lua,
    database: Rc<RefCell<Database>>,
    /// The compiled scripts by name.
    scripts: RefCell<HashMap<String, Function>>,
}

impl Interpreter {
    pub fn new() -> Interpreter {
        let lua = Lua::new();
        let database = Rc::new(RefCell::new(Database::default()));
        let served = database.clone();
        let call = move |lua: &Lua, arguments: Variadic<mlua::String>| {
            let arguments: Vec<String> = arguments.iter().map(|argument| text(&argument.as_bytes())).collect();
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            served.borrow_mut().call(&arguments).into_lua(lua)
        };
        let error_reply = |lua: &Lua, text: mlua::String| lua.create_table_from([("err", text)]);
        let redis: Table = lua.create_table().unwrap();
        redis.set("pcall", lua.create_function(call).unwrap()).unwrap();
        redis.set("error_reply", lua.create_function(error_reply).unwrap()).unwrap();
        lua.globals().set("redis", redis).unwrap();
        let functions = "
            -- As the library of that name that such stores have.
            struct = { pack = string.pack, unpack = string.unpack }
            -- An error is a table, as since Redis 7.
            function redis.call(...)
                local reply = redis.pcall(...)
                if type(reply) == 'table' and reply.err then error(reply) end
                return reply
            end
            function run(script)
                local ran, reply = pcall(script)
                if not ran and type(reply) ~= 'table' then error(reply) end
                return reply
            end";
        lua.load(functions).exec().unwrap();
        Interpreter { lua, database, scripts: RefCell::default() }
    }

    /// Run a script on a database. `name` identifies the compiled script.
    pub fn run(
        &self,
        database: &mut Database,
        (name, script): (&str, &str),
        keys: &[Vec<u8>],
        arguments: &[Vec<u8>],
    ) -> Replied {
        let lua = &self.lua;
        let strings = |of: &[Vec<u8>]| of.iter().map(|bytes| lua.create_string(bytes).unwrap()).collect::<Vec<_>>();
        lua.globals().set("KEYS", strings(keys)).unwrap();
        lua.globals().set("ARGV", strings(arguments)).unwrap();
        let mut scripts = self.scripts.borrow_mut();
        if !scripts.contains_key(name) {
            scripts.insert(name.to_owned(), lua.load(script).into_function().unwrap());
        }
        let run: Function = lua.globals().get("run").unwrap();
        database.wrote = false;
        std::mem::swap(&mut *self.database.borrow_mut(), database);
        let reply = run.call(&scripts[name]);
        std::mem::swap(&mut *self.database.borrow_mut(), database);
        Replied::of(reply.unwrap_or_else(|error| panic!("{error}")))
    }
}
