//! Classification of Redis error replies by their effect on the call, the identity and the store.

use std::time::{Duration, Instant};

use redis::RedisError;

use crate::limiter::clock::monotonic;
use crate::limiter::redis::diagnosis;
use crate::limiter::verdict::{ErrorReply, StoreError};

/// First delay before a call that Redis rejected is sent again. Each further delay is twice as long, up to
/// [`MAX_BACKOFF`].
const INITIAL_BACKOFF: Duration = Duration::from_millis(5);
const MAX_BACKOFF: Duration = Duration::from_millis(100);

/// What an error reply says about the state of the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RedisErrorKind {
    /// The call was not executed, and may succeed soon.
    Retryable,
    /// The call was not executed: another server keeps the state, or will keep it after a migration.
    Redirect,
    /// All calls fail, because a permission is missing or the server has no scripts.
    Fatal,
    /// Writes are rejected, and this call was rejected before its first write. Calls that do not write succeed.
    WritesRejected,
    /// The script failed on the stored state or on its arguments.
    Script,
}

impl RedisErrorKind {
    /// Classify an error. Return `None` if the error is not an error reply.
    pub fn from_error(error: &RedisError) -> Option<Self> {
        let (code, detail) = code_and_detail(error)?;
        Some(match code {
            // After these errors, nothing was written: Redis does not stop a script that has written, and changes its
            // role only between scripts.
            "LOADING" | "BUSY" | "CLUSTERDOWN" | "MASTERDOWN" | "READONLY" => RedisErrorKind::Retryable,
            "MOVED" | "ASK" | "TRYAGAIN" => RedisErrorKind::Redirect,
            "OOM" | "MISCONF" | "NOREPLICAS" => RedisErrorKind::WritesRejected,
            "WRONGTYPE" | "RLARG" | "RLSTALE" => RedisErrorKind::Script,
            "ERR" if detail.contains("user_script") || detail.starts_with(REDIS_6_SCRIPT_ERROR) => {
                RedisErrorKind::Script
            }
            REDIS_6_CALL_ERROR => RedisErrorKind::Script,
            // NOPERM, NOAUTH, WRONGPASS and unknown codes are failures of the store, because clients cannot cause them.
            _ => RedisErrorKind::Fatal,
        })
    }

    /// Convert the error of a call.
    pub fn to_store_error(error: &RedisError) -> StoreError {
        let Some(kind) = RedisErrorKind::from_error(error) else {
            return StoreError::Unreachable(diagnosis::diagnose_call(error));
        };
        let (code, detail) = code_and_detail(error).unwrap_or_default();
        let reply = ErrorReply::new(code, detail);
        match kind {
            RedisErrorKind::Retryable | RedisErrorKind::Fatal => StoreError::Rejected(reply),
            RedisErrorKind::Redirect => StoreError::Redirected(reply),
            RedisErrorKind::WritesRejected => StoreError::WritesRejected(reply),
            RedisErrorKind::Script => StoreError::CorruptState(reply),
        }
    }
}

/// Return whether another connection may succeed, because it may lead to a new master at the same address or log in
/// again.
pub fn is_connection_error(error: &RedisError) -> bool {
    matches!(code_and_detail(error), Some(("READONLY" | "NOAUTH", _)))
}

/// Beginning of a script error before Redis 7: `Error running script (call to f_…): @user_script: 1: -OOM …`.
const REDIS_6_SCRIPT_ERROR: &str = "Error running script";

/// Beginning of the error of a command that a script called with `pcall`, before Redis 7: `@user_script: 1: -OOM …`.
const REDIS_6_CALL_ERROR: &str = "@user_script:";

/// Return the code and the detail of an error reply. If a script was stopped by an error, return the code and the
/// detail of this error.
fn code_and_detail(error: &RedisError) -> Option<(&str, &str)> {
    let code = error.code()?;
    let detail = error.detail().unwrap_or_default();
    let is_redis_6 = code == REDIS_6_CALL_ERROR || (code == "ERR" && detail.starts_with(REDIS_6_SCRIPT_ERROR));
    let segments = detail.split(": ");
    if (is_redis_6 || code == "ERR") && segments.clone().any(diagnosis::is_script_permission_error) {
        return Some(("NOPERM", detail));
    }
    let is_code = |word: &str| word.len() > 1 && word.bytes().all(|byte| byte.is_ascii_uppercase());
    let coded = segments.filter_map(|part| part.trim_start_matches('-').split_once(' '));
    match coded.into_iter().find(|(word, _)| is_redis_6 && is_code(word)) {
        Some(found) => Some(found),
        None => Some((code, detail)),
    }
}

/// The delays between the attempts of one call.
#[derive(Debug)]
pub struct Backoff {
    deadline: Instant,
    next_delay: Duration,
}

impl Backoff {
    /// Create delays that end after `budget`.
    pub fn new(budget: Duration) -> Self {
        Backoff { deadline: monotonic() + budget, next_delay: INITIAL_BACKOFF }
    }
}

impl Iterator for Backoff {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let delay = self.next_delay;
        self.next_delay = (2 * delay).min(MAX_BACKOFF);
        (monotonic() + delay < self.deadline).then_some(delay)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(text: &str) -> RedisError {
        let reply = redis::parse_redis_value(format!("-{text}\r\n").as_bytes()).unwrap();
        reply.extract_error().unwrap_err()
    }

    #[test]
    fn error_replies_are_classified() {
        let script = "script: ee5bed0f6963e93a14eebfb64f07c299c1b4313f, on @user_script:1.";
        for (text, fault) in [
            ("LOADING Redis is loading the dataset in memory", RedisErrorKind::Retryable),
            (
                "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
                RedisErrorKind::Retryable,
            ),
            ("CLUSTERDOWN The cluster is down", RedisErrorKind::Retryable),
            (
                "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
                RedisErrorKind::Retryable,
            ),
            (&format!("READONLY You can't write against a read only replica. {script}"), RedisErrorKind::Retryable),
            ("MOVED 866 127.0.0.1:7001", RedisErrorKind::Redirect),
            ("ASK 866 127.0.0.1:7001", RedisErrorKind::Redirect),
            ("TRYAGAIN Multiple keys request during rehashing of slot", RedisErrorKind::Redirect),
            ("NOPERM this user has no permissions to run the 'evalsha' command", RedisErrorKind::Fatal),
            (
                &format!("ERR The user executing the script can't run this command or subcommand {script}"),
                RedisErrorKind::Fatal,
            ),
            (
                &format!("ERR ACL failure in script: User u has no permissions to run the 'set' command {script}"),
                RedisErrorKind::Fatal,
            ),
            (&format!("ERR ACL failure in script: No permissions to access a key {script}"), RedisErrorKind::Fatal),
            ("NOAUTH Authentication required.", RedisErrorKind::Fatal),
            ("WRONGPASS invalid username-password pair or user is disabled.", RedisErrorKind::Fatal),
            ("CROSSSLOT Keys in request don't hash to the same slot", RedisErrorKind::Fatal),
            ("ERR unknown command `EVALSHA`, with args beginning with: ", RedisErrorKind::Fatal),
            (
                &format!("OOM command not allowed when used memory > 'maxmemory'. {script}"),
                RedisErrorKind::WritesRejected,
            ),
            ("MISCONF Redis is configured to save RDB snapshots, but it can't", RedisErrorKind::WritesRejected),
            (&format!("NOREPLICAS Not enough good replicas to write. {script}"), RedisErrorKind::WritesRejected),
            ("WRONGTYPE Operation against a key holding the wrong kind of value", RedisErrorKind::Script),
            (
                &format!("ERR user_script:1: attempt to perform arithmetic on a nil value {script}"),
                RedisErrorKind::Script,
            ),
            ("RLARG not a number", RedisErrorKind::Script),
            ("RLSTALE 1800000000000000", RedisErrorKind::Script),
        ] {
            assert_eq!(RedisErrorKind::from_error(&reply(text)), Some(fault), "{text}");
        }
    }

    #[test]
    fn redis_6_script_errors_are_classified() {
        let script = |rest: &str| {
            RedisErrorKind::from_error(&reply(&format!(
                "ERR Error running script (call to f_0a9a51ee): @user_script:41: {rest}"
            )))
        };
        for (rest, fault) in [
            (
                "@user_script: 41: -OOM command not allowed when used memory > 'maxmemory'.",
                RedisErrorKind::WritesRejected,
            ),
            (
                "@user_script: 41: -MISCONF Errors writing to the AOF file: No space left on device",
                RedisErrorKind::WritesRejected,
            ),
            ("@user_script: 41: -READONLY You can't write against a read only replica.", RedisErrorKind::Retryable),
            ("WRONGTYPE Operation against a key holding the wrong kind of value", RedisErrorKind::Script),
            ("The user executing the script can't run this command or subcommand", RedisErrorKind::Fatal),
            ("attempt to perform arithmetic on a nil value", RedisErrorKind::Script),
        ] {
            assert_eq!(script(rest), Some(fault), "{rest}");
        }
    }

    #[test]
    fn redis_6_errors_of_called_commands_have_their_code() {
        for (rest, fault, shown) in [
            (
                "137: -OOM command not allowed when used memory > 'maxmemory'.",
                RedisErrorKind::WritesRejected,
                "OOM command not allowed when used memory > 'maxmemory'.",
            ),
            (
                "41: -WRONGTYPE Operation against a key holding the wrong kind of value",
                RedisErrorKind::Script,
                "WRONGTYPE Operation against a key holding the wrong kind of value",
            ),
            (
                "41: The user executing the script can't run this command",
                RedisErrorKind::Fatal,
                "NOPERM 41: The user executing the script can't run this command",
            ),
            ("41: wrong", RedisErrorKind::Script, "@user_script: 41: wrong"),
        ] {
            let error = reply(&format!("@user_script: {rest}"));
            assert_eq!(RedisErrorKind::from_error(&error), Some(fault), "{rest}");
            assert_eq!(RedisErrorKind::to_store_error(&error).error_reply().unwrap().to_string(), shown);
        }
    }

    #[test]
    fn connection_error_is_no_error_reply() {
        let broken = RedisError::from(std::io::Error::from(std::io::ErrorKind::ConnectionReset));
        assert_eq!(RedisErrorKind::from_error(&broken), None);
        assert!(
            redis::parse_redis_value(b"HTTP/1.1 400 Bad Request\r\n")
                .is_err_and(|e| RedisErrorKind::from_error(&e).is_none())
        );
    }

    #[test]
    fn backoff_ends_before_its_deadline() {
        let pauses: Vec<_> = Backoff::new(Duration::from_secs(3600)).take(8).map(|pause| pause.as_millis()).collect();
        assert_eq!(pauses, [5, 10, 20, 40, 80, 100, 100, 100]);
        assert_eq!(Backoff::new(Duration::from_millis(5)).next(), None);
    }
}
