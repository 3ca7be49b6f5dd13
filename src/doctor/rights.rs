//! What the user may do: every command that the gateway would call for these limits, without calling one.

use redis::Value;

use super::line::{Failure, Line};
use super::{Check, Needs, Server, Status};
use crate::limit::algorithm::{AlgorithmKind, Rule};
use crate::words::pluralize;

/// Replies with the places of the commands in ARGV that the user may not call; KEY in them stands for KEYS[1].
/// False = the server cannot tell: `acl_check_cmd` came with Redis 7.0.
const ASK: &str = "if not redis.acl_check_cmd then return false end
local refused = {}
for i = 1, #ARGV do
  local words = {}
  for word in string.gmatch(ARGV[i], '%S+') do words[#words + 1] = word == 'KEY' and KEYS[1] or word end
  if not redis.acl_check_cmd(unpack(words)) then refused[#refused + 1] = i end
end
return refused";

/// The commands that the gateway calls itself, as one would write them; what scripts call comes on top.
const ALWAYS: &[&str] = &["ping", "time", "eval x 0", "evalsha x 0", "script load x"];
/// What operators decide about single identities.
const OVERRIDES: &[&str] = &["hgetall KEY", "hset KEY x x", "hdel KEY x", "pexpire KEY 1", "del KEY"];
const STRINGS: &[&str] = &["get KEY", "set KEY x px 1", "setrange KEY 0 x", "del KEY"];
const LOG: &[&str] = &[
    "llen KEY",
    "lindex KEY 0",
    "lrange KEY 0 0",
    "rpush KEY x",
    "ltrim KEY 0 0",
    "lrem KEY 0 x",
    "pexpire KEY 1",
    "del KEY",
];
const LEASES: &[&str] = &[
    "zcount KEY 0 0",
    "zrangebyscore KEY 0 0",
    "zadd KEY 0 x",
    "zrem KEY x",
    "zremrangebyscore KEY 0 0",
    "pexpire KEY 1",
];

pub(super) async fn rights(line: &mut Line, server: &Server, needs: &Needs) -> Result<Check, Failure> {
    let commands = commands(&needs.rules);
    let mut ask = redis::cmd("EVAL");
    ask.arg(ASK).arg(1).arg(server.key(&needs.prefix)).arg(&commands);
    let refused = match line.ask::<Value>(&ask).await {
        Err(Failure::Refused(error)) => {
            // Not left out: the gateway would be refused as well.
            return Ok(Check::refused("permissions", &error).or(Status::Failed).advise(ADVICE));
        }
        reply => reply?,
    };
    let Ok(refused) = redis::from_redis_value::<Option<Vec<usize>>>(refused) else {
        return Ok(Check::left_out("permissions", "the server's answer is not understood"));
    };
    let Some(refused) = refused else {
        return Ok(Check::left_out("permissions", "this server cannot tell; Redis can from 7.0 on"));
    };
    let lacking: Vec<_> =
        refused.iter().filter_map(|place| commands.get(place - 1)).map(|words| right(words)).collect();
    Ok(if lacking.is_empty() {
        Check::ok(
            "permissions",
            format!("{} that these limits need are allowed", pluralize(commands.len() as u64, "command")),
        )
    } else {
        let found = format!(
            "refused: {} (of {} that these limits need)",
            lacking.join(" "),
            pluralize(commands.len() as u64, "command")
        );
        Check::ok("permissions", found).or(Status::Failed).advise(ADVICE)
    })
}

const ADVICE: &str = "give the user these rights with ACL SETUSER: docs/redis.md has the line for the gateway";

fn commands(rules: &[Rule]) -> Vec<&'static str> {
    let mut commands = [ALWAYS, OVERRIDES].concat();
    for rule in rules {
        commands.extend(match rule.kind() {
            AlgorithmKind::SlidingLog => LOG,
            AlgorithmKind::Concurrency => LEASES,
            AlgorithmKind::TokenBucket
            | AlgorithmKind::FixedWindow
            | AlgorithmKind::FirstRequest
            | AlgorithmKind::Calendar
            | AlgorithmKind::SlidingWindow
            | AlgorithmKind::SlidingBuckets => STRINGS,
        });
    }
    commands.sort_unstable();
    commands.dedup();
    commands
}

/// A command as `ACL SETUSER` takes it.
fn right(words: &str) -> String {
    let mut words = words.split(' ');
    match (words.next().unwrap_or_default(), words.next()) {
        ("script", Some(subcommand)) => format!("+script|{subcommand}"),
        (command, _) => format!("+{command}"),
    }
}
