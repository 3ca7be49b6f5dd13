//! Classification of Redis error replies by their effect on the call, the identity and the store, and their
//! diagnosis.

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::{ConnectionAddr, ErrorKind, RedisError};

use crate::clock::monotonic;
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
    /// All calls fail, because a permission is missing or the server does not support scripts.
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
            // A call with one of these errors has written nothing: Redis does not stop a script that has written, and
            // changes its role only between scripts.
            "LOADING" | "BUSY" | "CLUSTERDOWN" | "MASTERDOWN" | "READONLY" => RedisErrorKind::Retryable,
            "MOVED" | "ASK" | "TRYAGAIN" => RedisErrorKind::Redirect,
            "OOM" | "MISCONF" | "NOREPLICAS" => RedisErrorKind::WritesRejected,
            "WRONGTYPE" | "RLARG" | "RLSTALE" => RedisErrorKind::Script,
            "ERR" if is_unknown_command(detail) => RedisErrorKind::Fatal,
            REDIS_6_CALL_ERROR if is_unknown_command(detail) => RedisErrorKind::Fatal,
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
            return StoreError::Unreachable(diagnose_call(error));
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

/// Return whether a script called a command that Redis does not know, because it is renamed or disabled
/// (`rename-command`). Clients cannot cause this. The second text is that of Valkey.
fn is_unknown_command(detail: &str) -> bool {
    ["Unknown Redis command called from", "Unknown command called from"].iter().any(|text| detail.contains(text))
}

/// Return whether the call may succeed on a new connection. A new connection logs in again, and may lead to a new
/// master at the same address.
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
    if (is_redis_6 || code == "ERR") && segments.clone().any(is_script_permission_error) {
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

// === Diagnosis: a sentence for each error, which says what to do ===

/// Diagnose a failed attempt to connect to `address`.
pub fn diagnose_connect(error: &RedisError, address: &ConnectionAddr) -> String {
    match error.kind() {
        // The server at the address is not of the expected kind: see [`super::connection::HelloReply::mismatch`].
        ErrorKind::InvalidClientConfig => error.detail().map_or_else(|| error.to_string(), str::to_owned),
        ErrorKind::Parse => diagnose_protocol(error, address),
        _ => match io_error(error) {
            Some(io) => diagnose_socket(io, address),
            None => diagnose_call(error),
        },
    }
}

/// Diagnose an error of a call on a connection.
pub fn diagnose_call(error: &RedisError) -> String {
    let code = error.code().unwrap_or_default();
    let detail = error.detail().unwrap_or_default();
    diagnose_code(code, detail).unwrap_or_else(|| match error.kind() {
        ErrorKind::AuthenticationFailed => WRONG_PASSWORD.to_owned(),
        ErrorKind::Parse => "the server is not Redis; correct the address in store.url".to_owned(),
        ErrorKind::Io => format!("the connection was lost ({error}); check whether Redis was restarted"),
        _ => error.to_string(),
    })
}

/// Diagnose an error reply to a call.
pub fn diagnose_reply(reply: &ErrorReply) -> String {
    diagnose_code(reply.code(), reply.detail()).unwrap_or_else(|| reply.to_string())
}

const WRONG_PASSWORD: &str =
    "Redis rejects this user or password; correct store.username and store.password, or the credentials in store.url";

/// Diagnose an error reply. Return `None` if the error is unknown.
fn diagnose_code(code: &str, detail: &str) -> Option<String> {
    if let Some(permission) = permission_in_reply(code, detail) {
        return Some(format!(
            "the Redis user lacks a permission that the gateway needs, {permission}; grant the permissions that docs/how-to/redis.md lists"
        ));
    }
    let diagnosis = match code {
        "WRONGPASS" => WRONG_PASSWORD,
        "NOAUTH" => "Redis requires a password; set store.password",
        "DENIED" => "Redis is in protected mode and serves only its own machine; set a password in Redis",
        "READONLY" => "this Redis is a replica; give the address of its master, or redis+sentinel://HOST:PORT/MASTER",
        "MOVED" | "ASK" | "CROSSSLOT" => "this Redis is a node of a cluster; use redis+cluster://",
        "CLUSTERDOWN" => {
            return Some(format!(
                "the cluster rejects commands ({detail}); find the reason with redis-cli --cluster check"
            ));
        }
        "MASTERDOWN" => "this Redis is a replica that has lost its master; give the address of a master",
        "LOADING" => "Redis is still loading its data; wait until it is ready",
        "BUSY" => "Redis is busy running a script; wait until the script ends, or send SCRIPT KILL",
        "OOM" => "Redis is out of memory; raise its maxmemory, or use a separate Redis for the limits",
        "MISCONF" => "Redis rejects writes because it cannot save to its disk; see the log of Redis",
        "ERR" | REDIS_6_CALL_ERROR if is_unknown_command(detail) => {
            "Redis does not know a command that the gateway's Lua scripts call; remove its rename-command from the \
             configuration of Redis"
        }
        "ERR" if detail.contains("max number of clients reached") => {
            "Redis has reached its maximum number of clients; raise maxclients of Redis, or lower store.connections"
        }
        "ERR" if detail.contains("DB index is out of range") => {
            "this Redis has no database with this number; correct the number at the end of store.url"
        }
        "ERR" if detail.contains("SELECT is not allowed in cluster mode") => {
            "this Redis is a node of a cluster; use redis+cluster://, without a database"
        }
        "ERR" if detail.contains("unknown command 'SELECT'") => {
            "this server has no databases, so it may be a Sentinel; for a Sentinel, use \
             redis+sentinel://HOST:PORT/MASTER"
        }
        _ => return None,
    };
    Some(diagnosis.to_owned())
}

/// Diagnose a server that accepts no connection or does not reply in time.
pub fn diagnose_timeout(address: &ConnectionAddr) -> String {
    match address {
        ConnectionAddr::TcpTls { .. } => {
            format!("{address} does not answer the TLS handshake in time; if Redis does not use TLS, write redis://")
        }
        _ => format!(
            "{address} does not answer in time; it is stopped, overloaded, behind a firewall or too far away for the timeout: \
             `redis-cli --latency` measures the round trip"
        ),
    }
}

/// The beginnings of the error message of a script that lacks a permission for a command or key. Redis up to 7.0 uses
/// the first beginning. Redis since 7.2 and Valkey use the second.
const SCRIPT_PERMISSION_ERRORS: [&str; 2] = ["The user executing the script can't", "ACL failure in script"];

/// Return whether a part of an error reply is the error of a script that lacks a permission.
pub(super) fn is_script_permission_error(detail: &str) -> bool {
    SCRIPT_PERMISSION_ERRORS.iter().any(|start| detail.starts_with(start))
}

/// Return the permission that the user lacks, in the syntax of `ACL SETUSER`. Return `None` for other errors.
pub fn missing_permission(error: &RedisError) -> Option<String> {
    permission_in_reply(error.code().unwrap_or_default(), error.detail()?)
}

fn permission_in_reply(code: &str, detail: &str) -> Option<String> {
    // The error of Redis 7.0 does not contain the command that the script called. Without a command name, return the
    // kind of permission.
    let script = is_script_permission_error(detail);
    if code != "NOPERM" && !script {
        return None;
    }
    // Parse errors such as "… has no permissions to run the 'config|get' command" and "… to access one of the keys used
    // as arguments".
    match detail.split_once(" run the '").and_then(|(_, rest)| rest.split_once('\'')) {
        Some((command, _)) => Some(format!("+{command}")),
        None if detail.contains("key") => Some("~PREFIX:* for the keys of store.prefix".to_owned()),
        None if script => Some("a command that the gateway's Lua scripts call".to_owned()),
        None => Some(detail.to_owned()),
    }
}

fn diagnose_socket(error: &io::Error, address: &ConnectionAddr) -> String {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    if let Some(error) = inner {
        return diagnose_tls(error, address);
    }
    let message = error.to_string();
    match (error.kind(), address) {
        (io::ErrorKind::ConnectionRefused, _) => {
            format!("nothing listens at {address}; start Redis there, or correct the address in store.url")
        }
        (io::ErrorKind::NotFound, ConnectionAddr::Unix(_)) => {
            format!("there is no socket {address}; start Redis with this socket, or correct the path in store.url")
        }
        (io::ErrorKind::PermissionDenied, ConnectionAddr::Unix(_)) => {
            format!("the gateway may not open the socket {address}; see unixsocketperm of Redis")
        }
        (io::ErrorKind::TimedOut, _) => diagnose_timeout(address),
        (
            io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::UnexpectedEof
            | io::ErrorKind::NotConnected,
            _,
        ) => {
            let (other, scheme) = match address {
                ConnectionAddr::TcpTls { .. } => ("speaks no TLS", "redis://"),
                _ => ("speaks TLS", "rediss://"),
            };
            format!(
                "{address} closes the connection before it answers; raise maxclients of Redis if it is reached, or use \
                 {scheme} if the server {other}"
            )
        }
        _ if message.starts_with("failed to lookup") => {
            format!("the host name of {address} does not resolve; correct the host in store.url, or check the DNS")
        }
        _ => {
            format!("{address} cannot be reached ({message}); correct the address in store.url, or check the network")
        }
    }
}

fn diagnose_tls(error: &rustls::Error, address: &ConnectionAddr) -> String {
    match error {
        rustls::Error::InvalidMessage(_) => {
            format!("{address} does not use TLS; use redis://, or correct the port in store.url")
        }
        rustls::Error::InvalidCertificate(why) => {
            format!(
                "the certificate of {address} is not accepted ({why}); name its CA in store.tls.ca, and use a host \
                 name of the certificate in store.url"
            )
        }
        rustls::Error::AlertReceived(why) => format!(
            "{address} ends the TLS handshake ({why:?}); if it requires a client certificate, set store.tls.cert and store.tls.key"
        ),
        _ => format!("the TLS handshake with {address} failed ({error}); check store.tls"),
    }
}

/// Diagnose a reply that is not in the Redis protocol. The parser's error contains the first unexpected byte of the
/// reply.
fn diagnose_protocol(error: &RedisError, address: &ConnectionAddr) -> String {
    let detail = error.detail().unwrap_or_default();
    let unexpected_byte = |byte: u8| detail.contains(&format!("Unexpected `{byte}`"));
    let protocol = if unexpected_byte(b'H') || unexpected_byte(b'<') { "a web server" } else { "not Redis" };
    format!("the server at {address} is {protocol}; correct the address in store.url")
}

fn io_error(error: &RedisError) -> Option<&io::Error> {
    // The redis crate keeps the I/O error in an `Arc`, which is the type of the error source.
    let inner = error.source()?.downcast_ref::<Arc<dyn Error + Send + Sync>>()?;
    inner.downcast_ref()
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
            (&format!("ERR Unknown Redis command called from script {script}"), RedisErrorKind::Fatal),
            (&format!("ERR Unknown command called from script {script}"), RedisErrorKind::Fatal),
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
            ("Unknown Redis command called from Lua script", RedisErrorKind::Fatal),
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
