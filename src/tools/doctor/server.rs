//! Checks of a Redis server: reachability, version, role, latency, clock, memory, persistence, cluster coverage
//! and permissions.

use std::sync::Arc;
use std::time::Duration;

use redis::{Client, Value};
use tokio::time::timeout;

use crate::clock::{Clock, monotonic, unix_us};
use crate::limiter::algorithm::{AlgorithmKind, Rule};
use crate::limiter::key::{IdentityHasher, Key, StateName};
use crate::limiter::redis::RedisSettings;
use crate::limiter::redis::batcher::ServerStore;
use crate::limiter::redis::connection::{HelloReply, ServerRole};
use crate::limiter::redis::error::{diagnose_connect, diagnose_reply};
use crate::limiter::redis::overrides;
use crate::limiter::redis::script::{AlgorithmSet, all_scripts};
use crate::limiter::verdict::{Charge, ChargeMode, Operation, StoreError};
use crate::telemetry::pluralize;
use crate::tools::doctor::{
    CALL_TIMEOUT, CallError, Check, DiagnosticConnection, InfoSection, RedisServer, Requirements, Status,
};

/// The oldest Redis version that has all commands and options that the scripts use.
const MIN_VERSION: (u32, u32) = (6, 2);
/// The Redis releases with which `make test-stores` runs the tests.
const TESTED_RELEASES: [(&str, (u32, u32)); 4] =
    [("redis", (6, 2)), ("redis", (7, 0)), ("redis", (8, 2)), ("valkey", (9, 1))];
/// The check warns if `lua-time-limit` is below this value. If a script runs longer than `lua-time-limit`, the server
/// replies BUSY to all clients. The gateway's scripts take less than 1 ms, but may take longer on a busy machine.
const SHORT_SCRIPT_LIMIT_MS: u64 = 100;
const PING_COUNT: usize = 50;
const CLOCK_READINGS: usize = 5;
/// `store.timeout` should be at least this multiple of the median round trip, because Redis may run other calls before
/// a call of the gateway.
const TIMEOUT_HEADROOM: u32 = 4;
/// The default of `store.timeout`.
const MIN_TIMEOUT: Duration = Duration::from_millis(50);
/// The check warns if connecting takes longer than this time: half of the default of `store.connect_timeout`.
const SLOW_CONNECT: Duration = Duration::from_millis(500);

/// Connect to the server and send HELLO.
///
/// # Errors
/// The connection or the authentication fails. The error is an explanation for administrators.
pub(super) async fn connect(client: &Client) -> Result<(DiagnosticConnection, Option<HelloReply>, Check), String> {
    let started_at = monotonic();
    let mut connection = DiagnosticConnection::open(client).await?;
    let elapsed = started_at.elapsed();
    // Send HELLO, because a successful TCP connection does not prove that the server is Redis. If the configuration has
    // no password, this is the first command that the client sends.
    let hello: Result<Value, _> = connection.call(&redis::cmd("HELLO")).await;
    let hello = match hello {
        Ok(reply) => HelloReply::read(&reply),
        Err(CallError::ConnectionLost(error)) => return Err(error),
        Err(CallError::ErrorReply(error)) if error.code() == Some("NOAUTH") => {
            return Err(diagnose_connect(&error, &connection.address));
        }
        Err(CallError::ErrorReply(_)) => None,
    };
    let check = Check::ok("reachable", format!("connected in {}", format_elapsed(elapsed)));
    let check = if elapsed > SLOW_CONNECT {
        let advice = format!("set store.connect_timeout to at least {}", config_duration(elapsed * 2));
        check.with_status(Status::Warning).with_advice(advice)
    } else {
        check
    };
    Ok((connection, hello, check))
}

pub(super) async fn check_version(
    connection: &mut DiagnosticConnection,
    hello: Option<&HelloReply>,
) -> Result<Check, CallError> {
    let (server, version) = match hello {
        Some(hello) => (hello.server.clone(), hello.version.clone()),
        None => ("redis".to_owned(), connection.info("server").await?.text("redis_version").unwrap_or("?").to_owned()),
    };
    let mut parts = version.split('.').map(|part| part.parse().unwrap_or(0));
    let number: (u32, u32) = (parts.next().unwrap_or(0), parts.next().unwrap_or(0));
    let check = Check::ok("version", format!("{server} {version}"));
    Ok(if number < MIN_VERSION {
        check.with_status(Status::Failed).with_advice("the gateway requires version 6.2 or later")
    } else if !TESTED_RELEASES.contains(&(server.as_str(), number)) {
        check.with_advice("the gateway is tested with Redis 6.2, 7.0 and 8.2 and Valkey 9.1; this version should work")
    } else {
        check
    })
}

pub(super) async fn check_role(
    connection: &mut DiagnosticConnection,
    hello: Option<&HelloReply>,
) -> Result<Check, CallError> {
    let reply: Result<Value, _> = connection.call(&redis::cmd("ROLE")).await;
    let reply_fields = match (reply, hello) {
        (Ok(Value::Array(fields)), _) => fields,
        (Err(CallError::ConnectionLost(error)), _) => return Err(CallError::ConnectionLost(error)),
        // If the user may not call ROLE, use the role in the reply to HELLO. That reply does not contain the number of
        // replicas.
        (_, Some(hello)) => {
            let role = if hello.role == Some(ServerRole::Master) { "master" } else { "not a master" };
            return Ok(Check::ok("role", role));
        }
        (Err(error), None) => return Err(error),
        (Ok(_), None) => Vec::new(),
    };
    let role =
        reply_fields.first().and_then(|role| redis::from_redis_value_ref::<String>(role).ok()).unwrap_or_default();
    Ok(match (role.as_str(), reply_fields.get(2)) {
        ("master", Some(Value::Array(replicas))) => {
            Check::ok("role", format!("master with {}", pluralize(replicas.len() as u64, "replica")))
        }
        (role, _) => Check::ok("role", if role.is_empty() { "unknown" } else { role })
            .with_status(Status::Failed)
            .with_advice("set store.url to the address of a master"),
    })
}

pub(super) async fn check_round_trip(
    connection: &mut DiagnosticConnection,
    store_timeout: Duration,
) -> Result<Check, CallError> {
    let started_at = monotonic();
    let mut times = Vec::with_capacity(PING_COUNT);
    while times.len() < PING_COUNT && started_at.elapsed() < CALL_TIMEOUT {
        let sent_at = monotonic();
        connection.call::<Value>(&redis::cmd("PING")).await?;
        times.push(sent_at.elapsed());
    }
    times.sort_unstable();
    let median = times[times.len() / 2];
    let max = times[times.len() - 1];
    let found = format!(
        "median {}, worst {} of {} calls; store.timeout is {}",
        format_elapsed(median),
        format_elapsed(max),
        times.len(),
        format_elapsed(store_timeout)
    );
    let check = Check::ok("round trip", found);
    let advised_timeout = format!(
        "set store.timeout to at least {}, or run Redis closer to the gateway",
        config_duration(required_timeout(median))
    );
    Ok(if median >= store_timeout {
        check.with_status(Status::Failed).with_advice(format!(
            "Redis replies later than store.timeout, so on_store_error applies to most checks; {advised_timeout}"
        ))
    } else if store_timeout < median * TIMEOUT_HEADROOM {
        check
            .with_status(Status::Warning)
            .with_advice(format!("store.timeout is too short for these round trips: {advised_timeout}"))
    } else if max * 2 > store_timeout {
        let advice = "some checks will time out: raise store.timeout, or find out what slows down Redis or the network";
        check.with_status(Status::Warning).with_advice(advice)
    } else {
        check
    })
}

/// Return the recommended `store.timeout` for a median round trip: [`TIMEOUT_HEADROOM`] times the round trip, but at
/// least [`MIN_TIMEOUT`].
fn required_timeout(round_trip: Duration) -> Duration {
    (round_trip * TIMEOUT_HEADROOM).max(MIN_TIMEOUT)
}

/// Format a duration in the syntax of the configuration, in milliseconds, rounded up.
fn config_duration(duration: Duration) -> String {
    format!("{}ms", duration.as_micros().div_ceil(1000))
}

/// Compare the clock of Redis with the local clock. A difference is never a warning, because limits use only the clock
/// of Redis.
pub(super) async fn check_clock(connection: &mut DiagnosticConnection) -> Result<Check, CallError> {
    let mut best: Option<(Duration, i64)> = None;
    for _ in 0..CLOCK_READINGS {
        let sent_at = monotonic();
        let before_us = unix_us();
        let (seconds, micros): (u64, u64) = connection.call(&redis::cmd("TIME")).await?;
        let round_trip = sent_at.elapsed();
        let middle_us = before_us + round_trip.as_micros() as u64 / 2;
        let offset = (seconds * 1_000_000 + micros) as i64 - middle_us as i64;
        if best.is_none_or(|(shortest, _)| round_trip < shortest) {
            best = Some((round_trip, offset));
        }
    }
    let (round_trip, offset) = best.unwrap_or_default();
    let direction = if offset < 0 { "behind" } else { "ahead of" };
    let offset = Duration::from_micros(offset.unsigned_abs());
    let check = Check::ok(
        "clock",
        format!(
            "{} {direction} the local clock, ± {}; no rate limit decision depends on the difference",
            format_elapsed(offset),
            format_elapsed(round_trip / 2)
        ),
    );
    Ok(if offset > Duration::from_secs(1) {
        check.with_advice(
            "calendar windows and the header style `github` use the time of Redis: synchronize both clocks by NTP",
        )
    } else {
        check
    })
}

/// Format a duration with a suitable unit.
pub(super) fn format_elapsed(duration: Duration) -> String {
    match duration.as_micros() {
        us if us < 10_000 => format!("{:.2} ms", us as f64 / 1000.0),
        us if us < 10_000_000 => format!("{} ms", us / 1000),
        us => format!("{} s", us / 1_000_000),
    }
}

// Check the memory: usage, eviction policy and past evictions.

pub(super) async fn check_memory(connection: &mut DiagnosticConnection) -> Result<Check, CallError> {
    let info = connection.info("memory").await?;
    let used = info.number("used_memory").unwrap_or(0);
    Ok(match info.number("maxmemory").unwrap_or(0) {
        0 => Check::ok("memory", format!("{} used; no maxmemory", format_mib(used)))
            .with_advice("set maxmemory, so that Redis rejects writes before the machine runs out of memory"),
        max_bytes => {
            let percent = used.saturating_mul(100) / max_bytes;
            let check =
                Check::ok("memory", format!("{} of {} used ({percent} %)", format_mib(used), format_mib(max_bytes)));
            if percent >= 80 {
                check.with_status(Status::Warning).with_advice(
                    "raise maxmemory, because a full Redis rejects writes, and requests that would be \
                                  charged follow on_store_error",
                )
            } else {
                check
            }
        }
    })
}

/// Check the eviction policy. The counters of limits have a TTL, so every policy except `noeviction` may evict them.
pub(super) async fn check_policy(connection: &mut DiagnosticConnection) -> Result<Check, CallError> {
    let info = match connection.info("memory").await {
        Err(CallError::ErrorReply(_)) => return policy_from_config(connection).await,
        info => info?,
    };
    match (info.text("maxmemory_policy"), info.number("maxmemory")) {
        (Some(policy), Some(max_bytes)) => Ok(assess_policy(policy, max_bytes)),
        _ => policy_from_config(connection).await,
    }
}

async fn policy_from_config(connection: &mut DiagnosticConnection) -> Result<Check, CallError> {
    let mut get = redis::cmd("CONFIG");
    let pairs: Vec<(String, String)> = connection.call(get.arg("GET").arg("maxmemory*")).await?;
    let value = |name: &str| pairs.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str());
    let max_bytes = value("maxmemory").and_then(|max_bytes| max_bytes.parse().ok()).unwrap_or(0);
    Ok(assess_policy(value("maxmemory-policy").unwrap_or("unknown"), max_bytes))
}

fn assess_policy(policy: &str, max_bytes: u64) -> Check {
    let check = Check::ok("policy", policy);
    if policy == "noeviction" {
        return check;
    }
    let advice = "use noeviction, on an instance for limits only: CONFIG SET maxmemory-policy noeviction";
    if max_bytes == 0 {
        let found = format!("the policy {policy} evicts no keys while maxmemory is not set");
        return Check { message: found, ..check }.with_status(Status::Warning).with_advice(advice);
    }
    let effect = match policy {
        "volatile-ttl" => "evicts the keys that expire soonest, which are those of limits with short windows",
        "volatile-lru" | "volatile-lfu" | "volatile-random" => "evicts keys with a TTL, such as the counters of limits",
        _ => "evicts any key",
    };
    let found = format!(
        "{policy} with maxmemory {}: Redis {effect}, and a client whose counter is evicted has its full quota again",
        format_mib(max_bytes)
    );
    Check { message: found, ..check }.with_status(Status::Failed).with_advice(advice)
}

pub(super) async fn check_evictions(connection: &mut DiagnosticConnection) -> Result<Check, CallError> {
    let info = connection.info("stats").await?;
    let evicted = info.number("evicted_keys").unwrap_or(0);
    let check = Check::ok(
        "evictions",
        format!("{} evicted since the start of the server or CONFIG RESETSTAT", pluralize(evicted, "key")),
    );
    Ok(if evicted > 0 {
        let advice =
            "the evicted keys may be counters of limits: raise maxmemory or set noeviction, then CONFIG RESETSTAT";
        check.with_status(Status::Warning).with_advice(advice)
    } else {
        check
    })
}

/// Return the number of keys of a database, from the `keyspace` section of `INFO`.
pub(super) fn database_key_count(info: &InfoSection, database: i64) -> u64 {
    let counted = info.text(&format!("db{database}")).and_then(|figures| figures.strip_prefix("keys="));
    counted.and_then(|figures| figures.split(',').next()?.parse().ok()).unwrap_or(0)
}

fn format_mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

// Checks for restarts and outages of Redis: whether overrides are persistent, and whether a cluster works without one
// of its masters.

const PERSISTENCE_ADVICE: &str = "after a restart of Redis, running gateways write back the overrides that they know; \
                                  overrides are lost if no gateway is running at that time, or if all gateways \
                                  restart as well: CONFIG SET appendonly yes";

/// Check whether overrides survive a restart of Redis. The result is a warning only if overrides exist or can be set.
pub(super) async fn check_persistence(
    connection: &mut DiagnosticConnection,
    prefix: &str,
    can_set_overrides: bool,
) -> Result<Check, CallError> {
    let append_only = match connection.info("persistence").await {
        Ok(info) => info.text("aof_enabled") == Some("1"),
        Err(CallError::ErrorReply(_)) => config_value(connection, "appendonly").await? == "yes",
        Err(error) => return Err(error),
    };
    if append_only {
        return Ok(Check::ok("persistence", "append-only file"));
    }
    let snapshots = config_value(connection, "save").await?;
    if !snapshots.is_empty() {
        return Ok(Check::ok(
            "persistence",
            format!("Redis writes snapshots (save {snapshots}), but no append-only file"),
        ));
    }
    let Some(overrides) = override_count(connection, prefix).await? else {
        return Ok(Check::ok("persistence", "not needed on this node, because another node stores the overrides"));
    };
    let check = Check::ok("persistence", format!("none; {} stored", pluralize(overrides, "override")));
    Ok(if can_set_overrides || overrides > 0 {
        check.with_status(Status::Warning).with_advice(PERSISTENCE_ADVICE)
    } else {
        check
    })
}

/// Return the number of active overrides. Return `None` if another node of the cluster stores the overrides.
async fn override_count(connection: &mut DiagnosticConnection, prefix: &str) -> Result<Option<u64>, CallError> {
    let time: Value = connection.call(&overrides::time_command()).await?;
    let entries: Value = match connection.call(&overrides::read_command(&overrides::hash_key(prefix))).await {
        Err(CallError::ErrorReply(error)) if error.code() == Some("MOVED") => return Ok(None),
        all => all?,
    };
    let Ok(snapshot) = overrides::parse_snapshot(time, entries) else { return Ok(Some(0)) };
    let in_force =
        |record: &&overrides::OverrideEntry| record.expires_at_us > snapshot.now_us && !record.value.is_empty();
    Ok(Some(snapshot.entries.iter().filter(in_force).count() as u64))
}

/// Check the time after which the server replies BUSY while a script runs.
pub(super) async fn check_script_time_limit(connection: &mut DiagnosticConnection) -> Result<Check, CallError> {
    // Use the older name of the setting, which all Redis versions accept. Since Redis 7.0, `busy-reply-threshold` is
    // another name of this setting.
    let limit = config_value(connection, "lua-time-limit").await?;
    Ok(match limit.parse() {
        Ok(limit_ms @ 1..SHORT_SCRIPT_LIMIT_MS) => {
            let found = format!(
                "lua-time-limit is {limit_ms} ms: while a script runs for longer, Redis rejects the calls of all clients"
            );
            Check::ok("script time", found)
                .with_status(Status::Warning)
                .with_advice("use the default of 5 s: CONFIG SET lua-time-limit 5000")
        }
        Ok(0) | Err(_) => Check::ok("script time", "no limit"),
        Ok(limit_ms) => Check::ok("script time", format!("limit of {limit_ms} ms")),
    })
}

/// Check whether a cluster still serves the slots of the other masters while one master is down.
pub(super) async fn check_full_coverage(connection: &mut DiagnosticConnection) -> Result<Check, CallError> {
    let required = config_value(connection, "cluster-require-full-coverage").await?;
    let check = Check::ok("full coverage", format!("cluster-require-full-coverage {required}"));
    Ok(if required == "yes" {
        let found = "cluster-require-full-coverage yes: while a master is down, the cluster rejects all identities, \
                     not only those of this master";
        let advice = "on every node: CONFIG SET cluster-require-full-coverage no, and CONFIG REWRITE";
        Check { message: found.to_owned(), ..check }.with_status(Status::Warning).with_advice(advice)
    } else {
        check
    })
}

async fn config_value(connection: &mut DiagnosticConnection, name: &str) -> Result<String, CallError> {
    let pairs: Vec<(String, String)> = connection.call(redis::cmd("CONFIG").arg("GET").arg(name)).await?;
    Ok(pairs.into_iter().find(|(key, _)| key == name).map(|(_, value)| value).unwrap_or_default())
}

// === Permissions: whether the Redis user may run the commands that the limits need ===

/// A script that returns the indices of the commands in ARGV that the user may not call. In a command, KEY is a
/// placeholder for KEYS[1]. The script returns false if the server lacks `redis.acl_check_cmd`, as all versions before
/// Redis 7.0 do.
const ACL_CHECK_SCRIPT: &str = "if not redis.acl_check_cmd then return false end
local refused = {}
for i = 1, #ARGV do
  local words = {}
  for word in string.gmatch(ARGV[i], '%S+') do words[#words + 1] = word == 'KEY' and KEYS[1] or word end
  if not redis.acl_check_cmd(unpack(words)) then refused[#refused + 1] = i end
end
return refused";

/// The commands that the gateway sends for every limit. The lists below contain the commands that the gateway's Lua
/// scripts call, and the commands for overrides and usage totals.
const BASE_COMMANDS: &[&str] = &["ping", "time", "eval x 0", "evalsha x 0", "script load x"];
/// The commands for overrides.
const OVERRIDE_COMMANDS: &[&str] = &["hgetall KEY", "hset KEY x x", "hdel KEY x", "pexpire KEY 1", "del KEY"];
/// The commands for usage totals.
const USAGE_COMMANDS: &[&str] = &["hincrby KEY x 1", "hget KEY x", "hset KEY x x", "pexpire KEY 1"];
const STRING_COMMANDS: &[&str] = &["get KEY", "set KEY x px 1", "setrange KEY 0 x", "del KEY"];
const LOG_COMMANDS: &[&str] = &[
    "llen KEY",
    "lindex KEY 0",
    "lrange KEY 0 0",
    "rpush KEY x",
    "ltrim KEY 0 0",
    "lrem KEY 0 x",
    "pexpire KEY 1",
    "del KEY",
];
const CONCURRENCY_COMMANDS: &[&str] = &[
    "zcount KEY 0 0",
    "zrangebyscore KEY 0 0",
    "zadd KEY 0 x",
    "zrem KEY x",
    "zremrangebyscore KEY 0 0",
    "pexpire KEY 1",
];

pub(super) async fn check_permissions(
    connection: &mut DiagnosticConnection,
    server: &RedisServer,
    requirements: &Requirements,
) -> Result<Check, CallError> {
    let mut commands: Vec<_> = required_commands(&requirements.rules, requirements.algorithms.counts_usage())
        .into_iter()
        .map(str::to_owned)
        .collect();
    if requirements.sends_events {
        commands.push("set KEY x nx px 1".to_owned());
        commands.push("get KEY".to_owned());
        commands.push("del KEY".to_owned());
    }
    commands.extend(requirements.streams.iter().map(|stream| format!("xadd {stream} maxlen ~ 1 * x x")));
    commands.sort_unstable();
    commands.dedup();
    let mut eval = redis::cmd("EVAL");
    eval.arg(ACL_CHECK_SCRIPT).arg(1).arg(server.probe_key(&requirements.prefix)).arg(&commands);
    let refused = match connection.call::<Value>(&eval).await {
        Err(CallError::ErrorReply(error)) => {
            // If the user may not call EVAL, report a failure instead of a skipped check, because the gateway cannot
            // work without EVAL.
            return Ok(Check::from_redis_error("permissions", &error)
                .with_status(Status::Failed)
                .with_advice(ACL_ADVICE));
        }
        reply => reply?,
    };
    let Ok(refused) = redis::from_redis_value::<Option<Vec<usize>>>(refused) else {
        return Ok(Check::skipped("permissions", "the server sent an unexpected reply"));
    };
    let Some(refused) = refused else {
        return Ok(Check::skipped(
            "permissions",
            "this server cannot check permissions, because it is older than Redis 7.0",
        ));
    };
    let missing: Vec<_> =
        refused.iter().filter_map(|position| commands.get(position - 1)).map(|words| acl_rule(words)).collect();
    Ok(if missing.is_empty() {
        Check::ok(
            "permissions",
            format!("the user may run all {} that these limits need", pluralize(commands.len() as u64, "command")),
        )
    } else {
        let found = format!(
            "missing: {} (of {} that these limits need)",
            missing.join(" "),
            pluralize(commands.len() as u64, "command")
        );
        Check::ok("permissions", found).with_status(Status::Failed).with_advice(ACL_ADVICE)
    })
}

const ACL_ADVICE: &str =
    "grant the user these permissions with ACL SETUSER: docs/how-to/redis.md has the line for the gateway";

fn required_commands(rules: &[Rule], counts_usage: bool) -> Vec<&'static str> {
    let mut commands = [BASE_COMMANDS, OVERRIDE_COMMANDS].concat();
    if counts_usage {
        commands.extend(USAGE_COMMANDS);
    }
    for rule in rules {
        commands.extend(match rule.kind() {
            AlgorithmKind::SlidingLog => LOG_COMMANDS,
            AlgorithmKind::Concurrency => CONCURRENCY_COMMANDS,
            AlgorithmKind::TokenBucket
            | AlgorithmKind::FixedWindow
            | AlgorithmKind::FirstRequest
            | AlgorithmKind::Calendar
            | AlgorithmKind::SlidingWindow
            | AlgorithmKind::SlidingBuckets => STRING_COMMANDS,
        });
    }
    commands.sort_unstable();
    commands.dedup();
    commands
}

/// Return a command in the syntax of `ACL SETUSER`, such as `+config|get`.
fn acl_rule(command_words: &str) -> String {
    let mut command_words = command_words.split(' ');
    match (command_words.next().unwrap_or_default(), command_words.next()) {
        ("script", Some(subcommand)) => format!("+script|{subcommand}"),
        // Name the command and the key pattern, because the user may lack the permission for the command or for the
        // key.
        ("xadd", Some(stream)) => format!("+xadd ~{stream}"),
        (command, _) => format!("+{command}"),
    }
}

// Check scripts and decisions: run the commands that the gateway runs for a request. All keys that these checks write
// have a TTL.

/// A SHA-1 digest that no script has.
const UNKNOWN_SCRIPT_SHA: &str = "0000000000000000000000000000000000000000";

/// Check that the scripts load and run, and that EVALSHA with an unknown digest returns NOSCRIPT.
pub(super) async fn check_scripts(
    connection: &mut DiagnosticConnection,
    algorithms: AlgorithmSet,
) -> Result<Check, CallError> {
    for script in all_scripts(algorithms) {
        let mut load = redis::cmd("SCRIPT");
        let sha: String = connection.call(load.arg("LOAD").arg(&script.source)).await?;
        if sha != script.sha {
            let found = format!("the digest of a script is {sha}, not {}", script.sha);
            return Ok(Check::ok("scripts", found)
                .with_status(Status::Failed)
                .with_advice("the server is not Redis, or does not use SHA-1"));
        }
        // Call each script without keys. The gateway's scripts then reply with the error RLARG and change nothing.
        match connection.call::<Value>(redis::cmd("EVALSHA").arg(&sha).arg(0)).await {
            Err(CallError::ErrorReply(error)) if error.code() == Some("RLARG") => {}
            Err(failure) => return Err(failure),
            Ok(_) => {
                return Ok(Check::ok("scripts", "a script without keys did not reply with the error RLARG")
                    .with_status(Status::Failed));
            }
        }
    }
    // Check that an unknown script gets NOSCRIPT. Redis loses all scripts when it restarts, and the gateway loads them
    // again only after the reply NOSCRIPT.
    match connection.call::<Value>(redis::cmd("EVALSHA").arg(UNKNOWN_SCRIPT_SHA).arg(0)).await {
        Err(CallError::ErrorReply(error)) if error.code() == Some("NOSCRIPT") => {}
        Err(failure) => return Err(failure),
        Ok(_) => {
            return Ok(Check::ok("scripts", "a script that was never loaded did not reply with NOSCRIPT")
                .with_status(Status::Failed));
        }
    }
    Ok(Check::ok(
        "scripts",
        format!(
            "{} loaded and replying; an unknown script gets NOSCRIPT",
            pluralize(all_scripts(algorithms).count() as u64, "script")
        ),
    ))
}

/// Charge one limit with each algorithm of the configuration, and refund the charge. If the refund fails, the TTL
/// removes the keys.
pub(super) async fn check_decisions(server: &RedisServer, requirements: &Requirements) -> Result<Check, CallError> {
    let settings = RedisSettings {
        prefix: requirements.prefix.clone(),
        connections: 1,
        timeout: CALL_TIMEOUT,
        connect_timeout: CALL_TIMEOUT,
        algorithms: AlgorithmSet::default(),
        clock: Clock::Store,
        layout: Arc::default(),
    };
    // `run_checks` has verified that the server has the configured mode (such as cluster), so the store accepts the
    // server.
    let store = ServerStore::new(&settings, server.endpoint.clone(), Arc::default(), Arc::default());
    let hasher = IdentityHasher::new("doctor");
    let identity = server.probe_identity;
    let mut kinds = Vec::new();
    let mut slowest = tokio::time::Duration::ZERO;
    for rule in &requirements.rules {
        if kinds.contains(&rule.kind()) {
            continue;
        }
        kinds.push(rule.kind());
        let rule = with_short_window(rule);
        let state_name = StateName::new(&hasher, "doctor", &rule.shape());
        let key = Key { identity, state_name: &state_name };
        let mode = ChargeMode::Enforced;
        let usage = None;
        let charge = Charge { key, rule: &rule, cost: 1, mode, permit_id: 1, debt_before_us: 0, usage };
        let sent_at = monotonic();
        let verdict =
            match timeout(CALL_TIMEOUT, store.call(sent_at + CALL_TIMEOUT, false, Operation::Check, &[charge])).await {
                Ok(Ok(verdict)) => verdict,
                Ok(Err(error)) => return Ok(decision_failed(&error)),
                Err(_) => return Ok(decision_failed(&StoreError::Timeout)),
            };
        slowest = slowest.max(sent_at.elapsed());
        if verdict.granted != 1 {
            let found = format!("the first request to an unused limit was denied ({})", rule.shape());
            return Ok(Check::ok("decisions", found).with_status(Status::Failed));
        }
        let refund = Operation::Refund { charged_at: verdict.now_us };
        let deadline = monotonic() + CALL_TIMEOUT;
        if let Ok(Err(error)) = timeout(CALL_TIMEOUT, store.call(deadline, false, refund, &[charge])).await {
            return Ok(decision_failed(&error));
        }
    }
    let found = format!(
        "{} tried: charged and refunded, the slowest in {}",
        pluralize(kinds.len() as u64, "algorithm"),
        format_elapsed(slowest)
    );
    Ok(Check::ok("decisions", found))
}

fn decision_failed(error: &StoreError) -> Check {
    let found = error.error_reply().map_or_else(|| error.to_string(), diagnose_reply);
    Check::ok("decisions", found).with_status(Status::Failed)
}

/// Return the rule with a window of one second, so that its key expires soon if the refund fails. A calendar window
/// still expires at its end, and a concurrency permit after its TTL.
fn with_short_window(rule: &Rule) -> Rule {
    let quota = rule.parse_quota(if rule.is_concurrency() { "1" } else { "1/s" });
    quota.and_then(|quota| rule.with_quota(quota, None)).unwrap_or_else(|_| rule.clone())
}
