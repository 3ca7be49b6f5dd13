//! What an error reply of Redis means: for the call, for the identity, for the store.

use std::time::Instant;

use redis::RedisError;
use tokio::time::Duration;

use super::advice;
use crate::limit::clock::monotonic;
use crate::limit::store::StoreError;

/// The first pause before a call that Redis turned away is made again; each later one is twice as long, up to [`LONGEST`].
const FIRST: Duration = Duration::from_millis(5);
const LONGEST: Duration = Duration::from_millis(100);

/// What an error reply says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Nothing ran, and the same call may pass in a moment.
    Passing,
    /// Nothing ran: another server keeps the state, or will.
    Elsewhere,
    /// No call is answered: a right is missing, or this is no Redis with scripts.
    Refused,
    /// What writes is refused, and was before its first write. What needs no write is answered.
    Unwritable,
    /// The script failed on what it found, or on what it was given.
    Script,
}

impl Fault {
    /// What an error says; none if it is no reply.
    pub fn of(error: &RedisError) -> Option<Self> {
        let detail = error.detail().unwrap_or_default();
        Some(match code(error)? {
            // Before the first write: a script that has written is no longer stopped, and Redis changes its role between scripts.
            "LOADING" | "BUSY" | "CLUSTERDOWN" | "MASTERDOWN" | "READONLY" => Fault::Passing,
            "MOVED" | "ASK" | "TRYAGAIN" => Fault::Elsewhere,
            "OOM" | "MISCONF" | "NOREPLICAS" => Fault::Unwritable,
            "WRONGTYPE" | "RLARG" | "RLSTALE" => Fault::Script,
            "ERR" if detail.contains("user_script") || detail.starts_with(BEFORE_7) => Fault::Script,
            // NOPERM, NOAUTH, WRONGPASS, and what is not known: no client can bring it about, so it is the store's.
            _ => Fault::Refused,
        })
    }

    /// The error of a call that ended with this reply.
    pub fn store_error(error: RedisError) -> StoreError {
        match Fault::of(&error) {
            None => StoreError::Unreachable(advice::of_call(&error)),
            Some(Fault::Passing | Fault::Refused) => StoreError::Refused(error),
            Some(Fault::Elsewhere) => StoreError::Elsewhere(error),
            Some(Fault::Unwritable) => StoreError::Unwritable(error),
            Some(Fault::Script) => StoreError::Broken(error),
        }
    }
}

/// Whether another connection may be answered: to a master that took over the address, or with the password sent again.
pub fn is_of_the_connection(error: &RedisError) -> bool {
    matches!(code(error), Some("READONLY" | "NOAUTH"))
}

/// How Redis before version 7 begins the error of a script: `Error running script (call to f_…): @user_script: 1: -OOM …`.
const BEFORE_7: &str = "Error running script";

/// How Redis says in a script that the user has no right to what the script does.
const NO_RIGHT: &str = "The user executing the script can't";

/// The code of an error reply, or of the one that a script met.
fn code(error: &RedisError) -> Option<&str> {
    let (code, detail) = (error.code()?, error.detail().unwrap_or_default());
    if code != "ERR" {
        return Some(code);
    }
    let parts = detail.split(": ");
    if parts.clone().any(|part| part.starts_with(NO_RIGHT)) {
        return Some("NOPERM");
    }
    if !detail.starts_with(BEFORE_7) {
        return Some(code);
    }
    let mut words = parts.filter_map(|part| part.trim_start_matches('-').split(' ').next());
    let is_code = |word: &&str| word.len() > 1 && word.bytes().all(|byte| byte.is_ascii_uppercase());
    words.find(is_code).or(Some(code))
}

/// The pauses of one call between its attempts.
#[derive(Debug)]
pub struct Pauses {
    end: Instant,
    next: Duration,
}

impl Pauses {
    /// For as long as this.
    pub fn within(time: Duration) -> Self {
        Pauses { end: monotonic() + time, next: FIRST }
    }
}

impl Iterator for Pauses {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let pause = self.next;
        self.next = (2 * pause).min(LONGEST);
        (monotonic() + pause < self.end).then_some(pause)
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
    fn every_reply_has_a_meaning() {
        let script = "script: ee5bed0f6963e93a14eebfb64f07c299c1b4313f, on @user_script:1.";
        for (text, fault) in [
            ("LOADING Redis is loading the dataset in memory", Fault::Passing),
            ("BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.", Fault::Passing),
            ("CLUSTERDOWN The cluster is down", Fault::Passing),
            ("MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.", Fault::Passing),
            (&format!("READONLY You can't write against a read only replica. {script}"), Fault::Passing),
            ("MOVED 866 127.0.0.1:7001", Fault::Elsewhere),
            ("ASK 866 127.0.0.1:7001", Fault::Elsewhere),
            ("TRYAGAIN Multiple keys request during rehashing of slot", Fault::Elsewhere),
            ("NOPERM this user has no permissions to run the 'evalsha' command", Fault::Refused),
            (
                &format!("ERR The user executing the script can't run this command or subcommand {script}"),
                Fault::Refused,
            ),
            ("NOAUTH Authentication required.", Fault::Refused),
            ("WRONGPASS invalid username-password pair or user is disabled.", Fault::Refused),
            ("CROSSSLOT Keys in request don't hash to the same slot", Fault::Refused),
            ("ERR unknown command `EVALSHA`, with args beginning with: ", Fault::Refused),
            (&format!("OOM command not allowed when used memory > 'maxmemory'. {script}"), Fault::Unwritable),
            ("MISCONF Redis is configured to save RDB snapshots, but it can't", Fault::Unwritable),
            (&format!("NOREPLICAS Not enough good replicas to write. {script}"), Fault::Unwritable),
            ("WRONGTYPE Operation against a key holding the wrong kind of value", Fault::Script),
            (&format!("ERR user_script:1: attempt to perform arithmetic on a nil value {script}"), Fault::Script),
            ("RLARG not a number", Fault::Script),
            ("RLSTALE 1800000000000000", Fault::Script),
        ] {
            assert_eq!(Fault::of(&reply(text)), Some(fault), "{text}");
        }
    }

    #[test]
    fn before_version_7_the_code_stands_inside() {
        let script = |rest: &str| {
            Fault::of(&reply(&format!("ERR Error running script (call to f_0a9a51ee): @user_script:41: {rest}")))
        };
        for (rest, fault) in [
            ("@user_script: 41: -OOM command not allowed when used memory > 'maxmemory'.", Fault::Unwritable),
            ("@user_script: 41: -MISCONF Errors writing to the AOF file: No space left on device", Fault::Unwritable),
            ("@user_script: 41: -READONLY You can't write against a read only replica.", Fault::Passing),
            ("WRONGTYPE Operation against a key holding the wrong kind of value", Fault::Script),
            ("The user executing the script can't run this command or subcommand", Fault::Refused),
            ("attempt to perform arithmetic on a nil value", Fault::Script),
        ] {
            assert_eq!(script(rest), Some(fault), "{rest}");
        }
    }

    #[test]
    fn what_is_no_reply_has_none() {
        let broken = RedisError::from(std::io::Error::from(std::io::ErrorKind::ConnectionReset));
        assert_eq!(Fault::of(&broken), None);
        assert!(redis::parse_redis_value(b"HTTP/1.1 400 Bad Request\r\n").is_err_and(|e| Fault::of(&e).is_none()));
    }

    #[test]
    fn the_pauses_end_before_the_time_does() {
        let pauses: Vec<_> = Pauses::within(Duration::from_secs(3600)).take(8).map(|pause| pause.as_millis()).collect();
        assert_eq!(pauses, [5, 10, 20, 40, 80, 100, 100, 100]);
        assert_eq!(Pauses::within(Duration::from_millis(5)).next(), None);
    }
}
