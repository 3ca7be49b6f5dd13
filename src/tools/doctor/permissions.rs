//! Checks of permissions, scripts and decisions: whether the Redis user may run the commands that the limits need, and
//! whether the commands work.

use std::sync::Arc;

use redis::Value;
use tokio::time::timeout;

use crate::limiter::algorithm::{AlgorithmKind, Rule};
use crate::limiter::clock::{Clock, monotonic};
use crate::limiter::key::{IdentityHasher, Key, StateName};
use crate::limiter::redis::RedisSettings;
use crate::limiter::redis::diagnosis::diagnose_reply;
use crate::limiter::redis::script::{AlgorithmSet, all_scripts};
use crate::limiter::redis::server_store::ServerStore;
use crate::limiter::verdict::{Charge, ChargeMode, Operation, StoreError};
use crate::telemetry::pluralize;
use crate::tools::doctor::server::format_elapsed;
use crate::tools::doctor::{CALL_TIMEOUT, CallError, Check, DiagnosticConnection, RedisServer, Requirements, Status};

/// A script that returns the indices of those commands in ARGV that the user may not call. KEY is a placeholder for
/// KEYS[1]. The result is false if the server lacks `redis.acl_check_cmd`, which needs Redis 7.0.
const ACL_CHECK_SCRIPT: &str = "if not redis.acl_check_cmd then return false end
local refused = {}
for i = 1, #ARGV do
  local words = {}
  for word in string.gmatch(ARGV[i], '%S+') do words[#words + 1] = word == 'KEY' and KEYS[1] or word end
  if not redis.acl_check_cmd(unpack(words)) then refused[#refused + 1] = i end
end
return refused";

/// The commands that the gateway itself calls for every limit. The commands that the scripts call are in the lists
/// below.
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
            // Report a failure instead of a skipped check if EVAL is not permitted, because the gateway needs EVAL as
            // well.
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
        return Ok(Check::skipped("permissions", "this server cannot check permissions, which requires Redis 7.0"));
    };
    let missing: Vec<_> =
        refused.iter().filter_map(|position| commands.get(position - 1)).map(|words| acl_rule(words)).collect();
    Ok(if missing.is_empty() {
        Check::ok(
            "permissions",
            format!("{} that these limits need are allowed", pluralize(commands.len() as u64, "command")),
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
        // Name both permissions, because the user may lack the permission for the command or for the key.
        ("xadd", Some(stream)) => format!("+xadd ~{stream}"),
        (command, _) => format!("+{command}"),
    }
}

// Check scripts and decisions: run the commands that the gateway runs for a request, on keys that expire.

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
        // Call each script without keys: it then replies with the error RLARG and changes nothing.
        match connection.call::<Value>(redis::cmd("EVALSHA").arg(&sha).arg(0)).await {
            Err(CallError::ErrorReply(error)) if error.code() == Some("RLARG") => {}
            Err(failure) => return Err(failure),
            Ok(_) => {
                return Ok(Check::ok("scripts", "a script without keys did not reply with the error RLARG")
                    .with_status(Status::Failed));
            }
        }
    }
    // NOSCRIPT is essential: Redis loses all scripts at a restart, and the gateway loads them again when it receives
    // NOSCRIPT.
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

/// Make one decision with each algorithm of the configuration, and refund it. The keys expire, whether the refund
/// succeeds or not.
pub(super) async fn check_decisions(server: &RedisServer, requirements: &Requirements) -> Result<Check, CallError> {
    let settings = RedisSettings {
        prefix: requirements.prefix.clone(),
        connections: 1,
        timeout: CALL_TIMEOUT,
        connect_timeout: CALL_TIMEOUT,
        algorithms: AlgorithmSet::default(),
        clock: Clock::Store,
    };
    // This code is not reached, because `run_checks` has verified that the server is of the configured kind.
    let store = ServerStore::new(&settings, server.endpoint.clone(), Arc::default(), Arc::default());
    let hasher = IdentityHasher::new("doctor");
    let identity = server.probe_identity;
    let (mut kinds, mut slowest) = (Vec::new(), tokio::time::Duration::ZERO);
    for rule in &requirements.rules {
        if kinds.contains(&rule.kind()) {
            continue;
        }
        kinds.push(rule.kind());
        let rule = with_short_window(rule);
        let state_name = StateName::new(&hasher, "doctor", &rule.shape());
        let key = Key { identity, state_name: &state_name };
        let (mode, usage) = (ChargeMode::Enforced, None);
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

/// The rule has a window of one second, so that its key expires soon if the refund fails. Calendar windows and permits
/// expire at their usual times.
fn with_short_window(rule: &Rule) -> Rule {
    let quota = rule.parse_quota(if let Rule::Concurrency(_) = rule { "1" } else { "1/s" });
    quota.and_then(|quota| rule.with_quota(quota, None)).unwrap_or_else(|_| rule.clone())
}
