//! What the user may do: every command that the gateway would call for these limits, without calling one.

use redis::Value;

use super::line::{CallError, DiagnosticConnection};
use super::{Check, RedisServer, Requirements, Status};
use crate::limit::algorithm::{AlgorithmKind, Rule};
use crate::words::pluralize;

/// Replies with the places of the commands in ARGV that the user may not call; KEY in them stands for KEYS[1].
/// False = the server cannot tell: `acl_check_cmd` came with Redis 7.0.
const ACL_CHECK_SCRIPT: &str = "if not redis.acl_check_cmd then return false end
local refused = {}
for i = 1, #ARGV do
  local words = {}
  for word in string.gmatch(ARGV[i], '%S+') do words[#words + 1] = word == 'KEY' and KEYS[1] or word end
  if not redis.acl_check_cmd(unpack(words)) then refused[#refused + 1] = i end
end
return refused";

/// The commands that the gateway calls itself, as one would write them; what scripts call comes on top.
const BASE_COMMANDS: &[&str] = &["ping", "time", "eval x 0", "evalsha x 0", "script load x"];
/// What operators decide about single identities.
const OVERRIDE_COMMANDS: &[&str] = &["hgetall KEY", "hset KEY x x", "hdel KEY x", "pexpire KEY 1", "del KEY"];
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
    let commands = required_commands(&requirements.rules);
    let mut eval = redis::cmd("EVAL");
    eval.arg(ACL_CHECK_SCRIPT).arg(1).arg(server.probe_key(&requirements.prefix)).arg(&commands);
    let refused = match connection.call::<Value>(&eval).await {
        Err(CallError::ErrorReply(error)) => {
            // Not left out: the gateway would be refused as well.
            return Ok(Check::from_redis_error("permissions", &error)
                .with_status(Status::Failed)
                .with_advice(ACL_ADVICE));
        }
        reply => reply?,
    };
    let Ok(refused) = redis::from_redis_value::<Option<Vec<usize>>>(refused) else {
        return Ok(Check::skipped("permissions", "the server's answer is not understood"));
    };
    let Some(refused) = refused else {
        return Ok(Check::skipped("permissions", "this server cannot tell; Redis can from 7.0 on"));
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
            "refused: {} (of {} that these limits need)",
            missing.join(" "),
            pluralize(commands.len() as u64, "command")
        );
        Check::ok("permissions", found).with_status(Status::Failed).with_advice(ACL_ADVICE)
    })
}

const ACL_ADVICE: &str = "give the user these rights with ACL SETUSER: docs/redis.md has the line for the gateway";

fn required_commands(rules: &[Rule]) -> Vec<&'static str> {
    let mut commands = [BASE_COMMANDS, OVERRIDE_COMMANDS].concat();
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

/// A command as `ACL SETUSER` takes it.
fn acl_rule(command_words: &str) -> String {
    let mut command_words = command_words.split(' ');
    match (command_words.next().unwrap_or_default(), command_words.next()) {
        ("script", Some(subcommand)) => format!("+script|{subcommand}"),
        (command, _) => format!("+{command}"),
    }
}
