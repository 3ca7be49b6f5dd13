//! The keys of nginx's limits: which requests share a state, as variables, `map` and `geo` define it.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};

use crate::identity::access::parse_network;
use crate::tools::import::model::quoted;
use crate::tools::import::nginx::syntax::Directive;

/// Maximum number of `map` blocks that refer to each other.
const MAX_MAPS: usize = 8;

/// Maximum number of expressions that are evaluated in all keys together, because each value of a `map` may refer to
/// further `map` blocks.
const MAX_STEPS: usize = 100_000;

/// The key of a limit, in the words of `[limit.NAME]`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Key {
    /// Sources for `by`. Empty: all requests share one state.
    pub(super) by: Vec<String>,
    /// Whether requests without the value are counted by their address, instead of not at all.
    pub(super) or_address: bool,
    /// Items for `exempt`.
    pub(super) exempt: Vec<String>,
    /// Methods to which the limit applies. Empty: all.
    pub(super) methods: Vec<String>,
    /// What differs from the original.
    pub(super) differences: Vec<String>,
}

/// The meaning of an expression such as `$binary_remote_addr`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Meaning {
    /// Requests with the same value share a state.
    Key(Key),
    /// The value is empty or unique for each request, so nothing is limited.
    Unlimited,
    /// Sluicegate has no source for the value.
    Unknown(String),
}

/// A `map` or `geo` block.
#[derive(Debug, Default)]
struct Block {
    /// The expression whose value is looked up.
    source: String,
    /// Value for all other cases.
    default: String,
    /// Pairs of a pattern and a value, in the order of the file.
    entries: Vec<Entry>,
    /// Whether the block is a `geo`, whose patterns are networks.
    is_geo: bool,
}

#[derive(Debug)]
struct Entry {
    pattern: String,
    value: String,
}

/// The variables that the files define.
#[derive(Debug, Default)]
pub(super) struct Variables {
    blocks: BTreeMap<String, Block>,
    /// Number of expressions that have been evaluated.
    steps: Cell<usize>,
}

impl Variables {
    /// Add a `map` or `geo` block.
    pub(super) fn add(&mut self, directive: &Directive) {
        let is_geo = directive.name == "geo";
        let (source, variable) = match &*directive.args {
            [variable] => ("$remote_addr", variable),
            [source, variable] => (source.as_str(), variable),
            _ => return,
        };
        let mut block = Block { source: source.to_owned(), is_geo, ..Block::default() };
        for entry in directive.children() {
            match (&*entry.name, entry.arg(0)) {
                ("default", value) => block.default = value.to_owned(),
                ("hostnames" | "volatile" | "ranges" | "delete" | "proxy" | "proxy_recursive", _) => {}
                (pattern, value) => {
                    block.entries.push(Entry { pattern: pattern.to_owned(), value: value.to_owned() });
                }
            }
        }
        self.blocks.insert(variable.trim_start_matches('$').to_owned(), block);
    }

    /// Return the meaning of an expression.
    pub(super) fn meaning(&self, expression: &str) -> Meaning {
        self.meaning_at(expression, 0)
    }

    fn meaning_at(&self, expression: &str, depth: usize) -> Meaning {
        let names = variable_names(expression);
        if expression.is_empty() {
            return Meaning::Unlimited;
        }
        self.steps.set(self.steps.get() + 1);
        if depth > MAX_MAPS || self.steps.get() > MAX_STEPS {
            return Meaning::Unknown("`map` blocks refer to each other too deeply".to_owned());
        }
        let mut all = Key::default();
        for name in names {
            let meaning = match self.blocks.get(&name) {
                Some(block) => self.block_meaning(&name, block, depth),
                None => variable_meaning(&name),
            };
            match meaning {
                Meaning::Key(key) => {
                    all.by.extend(key.by.into_iter().filter(|source| source != "global"));
                    all.or_address |= key.or_address;
                    all.exempt.extend(key.exempt);
                    all.methods.extend(key.methods);
                    all.differences.extend(key.differences);
                }
                other => return other,
            }
        }
        let mut seen = BTreeSet::new();
        all.by.retain(|source| seen.insert(source.clone()));
        Meaning::Key(all)
    }

    /// Return the meaning of a variable that a block defines.
    fn block_meaning(&self, name: &str, block: &Block, depth: usize) -> Meaning {
        let source = block.source.trim_start_matches('$').trim_matches(['{', '}']);
        if let Some(networks) = self.blocks.get(source).filter(|source| source.is_geo && !block.is_geo) {
            return self.networks_meaning(name, networks, Some(block), depth);
        }
        if block.is_geo || matches!(source, "remote_addr" | "binary_remote_addr") {
            return self.networks_meaning(name, block, None, depth);
        }
        if source == "request_method" {
            return self.methods_meaning(name, block, depth);
        }
        self.value_meaning(name, block, depth)
    }

    /// Return the meaning of a variable that depends on the client address: directly, or by a `map` of a `geo`.
    fn networks_meaning(&self, name: &str, networks: &Block, map: Option<&Block>, depth: usize) -> Meaning {
        let result = |value: &str| match map {
            None => value.to_owned(),
            Some(map) => {
                let entry = map.entries.iter().find(|entry| entry.pattern == value);
                entry.map_or(&map.default, |entry| &entry.value).clone()
            }
        };
        let default = result(&networks.default);
        let mut key = match self.meaning_at(&default, depth + 1) {
            Meaning::Key(key) => key,
            Meaning::Unlimited if networks.entries.iter().all(|entry| result(&entry.value).is_empty()) => {
                return Meaning::Unlimited;
            }
            Meaning::Unlimited => {
                return Meaning::Unknown(format!("`${name}` limits only some networks"));
            }
            unknown => return unknown,
        };
        let mut others = Vec::new();
        for entry in &networks.entries {
            let value = result(&entry.value);
            if value == default {
                continue;
            }
            let is_unlimited = self.meaning_at(&value, depth + 1) == Meaning::Unlimited;
            match parse_network(&entry.pattern) {
                Some(_) if is_unlimited && key.by.iter().any(|source| source == "ip") => {
                    key.exempt.push(format!("ip={}", entry.pattern));
                }
                _ => others.push(&*entry.pattern),
            }
        }
        key.differences.extend(others_text(name, "the client", &others));
        Meaning::Key(key)
    }

    /// Return the meaning of a variable that depends on the method.
    fn methods_meaning(&self, name: &str, block: &Block, depth: usize) -> Meaning {
        let default = self.meaning_at(&block.default, depth + 1);
        let mut listed: Option<Key> = None;
        for entry in &block.entries {
            let meaning = self.meaning_at(&entry.value, depth + 1);
            match (meaning, &default) {
                (Meaning::Unlimited, Meaning::Unlimited) => {}
                (Meaning::Key(key), Meaning::Unlimited)
                    if listed.as_ref().is_none_or(|first| first.by == key.by) && is_method(&entry.pattern) =>
                {
                    listed.get_or_insert(key).methods.push(entry.pattern.clone());
                }
                _ => {
                    let other = format!("`${name}` has another value for `{}`", entry.pattern);
                    return match default {
                        Meaning::Key(mut key) => {
                            key.differences.push(format!("{other}; all methods are limited alike"));
                            Meaning::Key(key)
                        }
                        _ => Meaning::Unknown(other),
                    };
                }
            }
        }
        listed.map_or(default, Meaning::Key)
    }

    /// Return the meaning of a variable that depends on another value of the request.
    fn value_meaning(&self, name: &str, block: &Block, depth: usize) -> Meaning {
        let source = match self.meaning_at(&block.source, depth + 1) {
            Meaning::Key(key) if key.by.len() == 1 => key.by.into_iter().next(),
            _ => None,
        };
        let is_any = |pattern: &str| matches!(pattern, "~." | "~.+" | "~^.+" | "~^.+$" | "~^(.+)$");
        let any = block.entries.iter().find(|entry| is_any(&entry.pattern));
        let general = any.map_or(&block.default, |entry| {
            // `~^(.+)$ $1` is the value itself.
            if entry.value == "$1" { &block.source } else { &entry.value }
        });
        let empty = match block.entries.iter().find(|entry| entry.pattern.is_empty()) {
            Some(entry) => Some(&entry.value),
            None if any.is_some() => Some(&block.default),
            None => None,
        };
        let mut key = match self.meaning_at(general, depth + 1) {
            Meaning::Key(key) => key,
            Meaning::Unlimited if block.entries.iter().all(|entry| entry.value.is_empty()) => {
                return Meaning::Unlimited;
            }
            Meaning::Unlimited => {
                return Meaning::Unknown(format!("`${name}` limits only some values of `{}`", block.source));
            }
            unknown => return unknown,
        };
        let own = source.filter(|source| key.by.contains(source));
        if let (Some(_), Some(empty)) = (&own, empty) {
            match self.meaning_at(empty, depth + 1) {
                Meaning::Unlimited => {}
                Meaning::Key(fallback) if fallback.by == ["ip"] => key.or_address = true,
                _ => key.differences.push(format!("`${name}` has another key for requests without the value")),
            }
        }
        let mut others = Vec::new();
        for entry in block.entries.iter().filter(|entry| !entry.pattern.is_empty() && !is_any(&entry.pattern)) {
            let is_unlimited = self.meaning_at(&entry.value, depth + 1) == Meaning::Unlimited;
            match &own {
                Some(own) if is_unlimited && !entry.pattern.starts_with('~') => {
                    key.exempt.push(format!("{own}={}", entry.pattern));
                }
                _ => others.push(&*entry.pattern),
            }
        }
        key.differences.extend(others_text(name, &format!("`{}`", block.source), &others));
        Meaning::Key(key)
    }
}

/// Return a message about values of a `map` or `geo` that are limited like all others.
fn others_text(name: &str, subject: &str, others: &[&str]) -> Option<String> {
    let [first, rest @ ..] = others else { return None };
    let more = if rest.is_empty() { String::new() } else { format!(" or one of {} other values", rest.len()) };
    Some(format!(
        "`${name}` has another value if {subject} is `{}`{more}; such requests are limited like all others",
        quoted(first)
    ))
}

fn is_method(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_uppercase())
}

/// Return the names of the variables in an expression: `$name` and `${name}`.
pub(super) fn variable_names(expression: &str) -> Vec<String> {
    let mut names = Vec::new();
    for part in expression.split('$').skip(1) {
        let part = part.strip_prefix('{').unwrap_or(part);
        let name: String = part.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
        if !name.is_empty() {
            names.push(name);
        }
    }
    names
}

/// Return the meaning of a variable of nginx.
fn variable_meaning(name: &str) -> Meaning {
    let by = |source: &str| Meaning::Key(Key { by: vec![source.to_owned()], ..Key::default() });
    let about = |source: &str, difference: &str| {
        let differences = vec![format!("`${name}`: {difference}")];
        Meaning::Key(Key { by: vec![source.to_owned()], differences, ..Key::default() })
    };
    match name {
        "binary_remote_addr" | "remote_addr" | "proxy_protocol_addr" => by("ip"),
        "realip_remote_addr" => about("ip", "the gateway uses the client address, not that of the proxy"),
        "host" | "http_host" => by("host"),
        "server_name" => about("host", "requests are counted by the host of the request, not by the server block"),
        "request_method" => by("method"),
        "uri" | "document_uri" | "request_uri" => {
            about("route", "requests are counted by route, so all paths of a route share the limit")
        }
        "scheme" | "server_port" | "server_addr" => by("global"),
        "remote_user" => about("basic:user", "the user name is counted before the password is verified, as in nginx"),
        "ssl_client_s_dn" | "ssl_client_s_dn_legacy" | "ssl_client_fingerprint" => {
            about("client-cert", "the identity is the subject of the certificate; the listener needs `client_ca`")
        }
        "http_x_forwarded_for" | "http_x_real_ip" | "http_cf_connecting_ip" => about(
            "ip",
            "clients can choose this header, so the limit counts by client address: set `client_ip.trusted_proxies`",
        ),
        "request_id" | "msec" | "time_iso8601" | "time_local" | "connection_requests" => Meaning::Unlimited,
        "connection" => about("ip", "Sluicegate counts by client address, not by connection"),
        _ => match name.split_once('_') {
            Some(("http", header)) => by(&format!("header:{}", header.replace('_', "-"))),
            Some(("cookie", cookie)) => by(&format!("cookie:{cookie}")),
            Some(("arg", parameter)) => by(&format!("query:{parameter}")),
            _ => Meaning::Unknown(format!("`${name}` is no identity")),
        },
    }
}
