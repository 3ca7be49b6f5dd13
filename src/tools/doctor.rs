//! Diagnostics of a configuration's Redis servers: whether limits work with these servers, and which server settings
//! are risky.
mod server;

use std::time::Duration;

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{AsyncConnectionConfig, Client, Cmd, ConnectionAddr, FromRedisValue, RedisError, Value};
use serde::Serialize;

use crate::clock::monotonic;
use crate::limiter::algorithm::Rule;
use crate::limiter::key::{Identity, IdentityHasher, Key, StateName};
use crate::limiter::redis::connection::ServerMode;
use crate::limiter::redis::error::{diagnose_call, diagnose_connect, diagnose_timeout, missing_permission};
use crate::limiter::redis::script::AlgorithmSet;
use crate::limiter::redis::server::{ConnectError, RedisEndpoint as Target};
use crate::limiter::redis::{RedisDeployment, RedisSettings};
use crate::snapshot::CompiledConfig;
use crate::snapshot::notify::EventDestination;
use crate::telemetry::pluralize;
use crate::tools::doctor::server::database_key_count;

/// A Redis server that stores counters.
#[derive(Debug)]
pub struct RedisServer {
    /// Name of the server in the report: its address.
    pub name: String,
    /// A Redis client with the address and credentials of the server.
    pub client: Client,
    /// The address to which the gateway's store connects.
    pub endpoint: Target,
    /// An identity that no client has. In a cluster, the keys of this identity belong to this server.
    pub probe_identity: Identity,
}

impl RedisServer {
    /// Return a key that does not exist. In a cluster, the slot of the key belongs to this server.
    fn probe_key(&self, prefix: &str) -> Vec<u8> {
        let state_name = StateName::new(&IdentityHasher::new(""), "doctor", "none");
        let mut key = Vec::new();
        Key { identity: self.probe_identity, state_name: &state_name }.write(prefix, &mut key);
        key
    }
}

/// Return all masters of this deployment, because only masters store counters.
///
/// # Errors
/// No seed node of the cluster returns its slots, or a server has no usable address.
pub async fn resolve_servers(deployment: &RedisDeployment) -> Result<Vec<RedisServer>, ConnectError> {
    let mut redis_servers = Vec::new();
    for (server, identity) in deployment.masters(CALL_TIMEOUT).await? {
        let client = server.client(CALL_TIMEOUT).await?;
        let name = client.get_connection_info().addr().to_string();
        redis_servers.push(RedisServer { name, client, endpoint: server, probe_identity: identity });
    }
    Ok(redis_servers)
}

impl ServerReport {
    /// Build the report of servers whose addresses cannot be found.
    pub fn unreachable(name: &str, error: &ConnectError) -> Self {
        let check = Check { name: "reachable", status: Status::Failed, message: error.to_string(), advice: None };
        ServerReport { address: name.to_owned(), checks: vec![check] }
    }
}

/// What a configuration requires of its Redis servers.
#[derive(Debug)]
pub struct Requirements {
    /// The first part of every key (`store.prefix`).
    pub prefix: String,
    /// Maximum time of a check (`store.timeout`).
    pub timeout: Duration,
    /// The algorithms of the configured limits, which the scripts must contain.
    pub algorithms: AlgorithmSet,
    /// The rules of all limits.
    pub rules: Vec<Rule>,
    /// Whether administrators can set overrides. Setting an override requires `admin.token`.
    pub can_set_overrides: bool,
    /// Whether limits send quota events.
    pub sends_events: bool,
    /// The Redis streams that receive quota events.
    pub streams: Vec<String>,
}

impl Requirements {
    /// Return what a configuration requires of its Redis servers.
    pub fn new(config: &CompiledConfig, settings: &RedisSettings) -> Requirements {
        Requirements {
            prefix: settings.prefix.clone(),
            timeout: config.store.timeout,
            algorithms: settings.algorithms,
            // All limits of YAML files have the same algorithm.
            rules: config
                .limits
                .values()
                .map(|compiled| &compiled.limit)
                .chain(config.descriptors.file_limits().map(|limit| &limit.limit).take(1))
                .map(|limit| limit.default_variant.rule.clone())
                .collect(),
            can_set_overrides: config.admin.as_ref().is_some_and(|admin| admin.token.is_some()),
            sends_events: config.limits.values().any(|compiled| compiled.limit.notify.is_some()),
            streams: config
                .event_destinations
                .values()
                .filter_map(|destination| match destination {
                    EventDestination::Stream(stream) => Some(stream.key.to_string()),
                    EventDestination::Webhook(_) => None,
                })
                .collect(),
        }
    }
}

/// The results of the checks for one server.
#[derive(Debug, Serialize)]
pub struct ServerReport {
    /// Name of the server.
    pub address: String,
    /// Results in the order of the checks. After a connection failure, the remaining checks are not run.
    pub checks: Vec<Check>,
}

/// The result of one check.
#[derive(Debug, Serialize)]
pub struct Check {
    /// Name of the check.
    pub name: &'static str,
    /// The status of the check.
    pub status: Status,
    /// The result of the check in words, with units.
    pub message: String,
    /// The recommended action, or `None` if there is nothing to do.
    pub advice: Option<String>,
}

/// Status of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Status {
    /// The check passed. Advice is optional.
    #[serde(rename = "ok")]
    Ok,
    /// The gateway works with this server, but a setting or state of the server is risky.
    #[serde(rename = "warning")]
    Warning,
    /// The gateway cannot check limits with this server, or checks them incorrectly.
    #[serde(rename = "failed")]
    Failed,
    /// The check was not run, because the Redis user lacks a permission or the server lacks the command.
    #[serde(rename = "skipped")]
    Skipped,
}

impl Check {
    fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Check { name, status: Status::Ok, message: found.into(), advice: None }
    }

    fn skipped(name: &'static str, found: impl Into<String>) -> Self {
        Check { name, status: Status::Skipped, message: found.into(), advice: None }
    }

    /// Convert an error reply to the result of a check: skipped if the permission or the command is missing, otherwise
    /// failed.
    fn from_redis_error(name: &'static str, error: &RedisError) -> Self {
        if let Some(permission) = missing_permission(error) {
            return Check::skipped(name, format!("the user lacks the permission {permission}")).with_advice(
                "run doctor with a user that has this permission: docs/how-to/redis.md shows such a user",
            );
        }
        match error.detail() {
            Some(detail) if detail.contains("unknown command") => {
                Check::skipped(name, format!("the server says: {detail}"))
            }
            _ => Check { name, status: Status::Failed, message: diagnose_call(error), advice: None },
        }
    }

    fn with_advice(self, advice: impl Into<String>) -> Self {
        Check { advice: Some(advice.into()), ..self }
    }

    fn with_status(self, status: Status) -> Self {
        Check { status, ..self }
    }
}

impl ServerReport {
    /// Add the result of a check. Return the error `Abort` if the connection is lost.
    fn record(&mut self, name: &'static str, result: Result<Check, CallError>) -> Result<(), Abort> {
        let (check, outcome) = match result {
            Ok(check) => (check, Ok(())),
            Err(CallError::ErrorReply(error)) => (Check::from_redis_error(name, &error), Ok(())),
            Err(CallError::ConnectionLost(found)) => {
                (Check { name, status: Status::Failed, message: found, advice: None }, Err(Abort))
            }
        };
        self.checks.push(check);
        outcome
    }
}

/// An error that stops the remaining checks, because the connection is lost or the server has the wrong role.
struct Abort;

/// Run all checks on one server. Each call has the timeout [`CALL_TIMEOUT`]. After the first timeout, the remaining
/// checks are not run.
pub async fn examine(server: &RedisServer, requirements: &Requirements) -> ServerReport {
    let mut report = ServerReport { address: server.name.clone(), checks: Vec::new() };
    // Ignore the abort, because the report already contains its cause.
    let _ = run_checks(server, requirements, &mut report).await;
    report
}

/// Check whether the user of the gateway has the permissions that the limits need. Return the check if some are missing.
/// Return `None` as well if the gateway does not log in with the name of a user, who would have all permissions, or if
/// the server cannot be asked.
pub async fn missing_permissions(server: &RedisServer, requirements: &Requirements) -> Option<Check> {
    server.client.get_connection_info().redis_settings().username()?;
    let mut connection = DiagnosticConnection::open(&server.client).await.ok()?;
    let check = server::check_permissions(&mut connection, server, requirements).await.ok()?;
    (check.status == Status::Failed).then_some(check)
}

/// Run the checks that `sluicegate check` needs: round trip, persistence of overrides and cluster coverage. Return the
/// checks that have a warning or fail. If Redis rejects the command of a check, omit this check.
///
/// # Errors
/// The server cannot be reached.
pub async fn check_basics(server: &Target, requirements: &Requirements) -> Result<Vec<Check>, ConnectError> {
    let client = server.client(CALL_TIMEOUT).await?;
    let mut connection = DiagnosticConnection::open(&client).await.map_err(|error| ConnectError::new(&error))?;
    let mut checks = vec![server::check_round_trip(&mut connection, requirements.timeout).await];
    checks.push(server::check_persistence(&mut connection, &requirements.prefix, requirements.can_set_overrides).await);
    if server.mode() == ServerMode::Cluster {
        checks.push(server::check_full_coverage(&mut connection).await);
    }
    let mut warnings = Vec::new();
    for check in checks {
        match check {
            Ok(check) if matches!(check.status, Status::Warning | Status::Failed) => warnings.push(check),
            Ok(_) | Err(CallError::ErrorReply(_)) => {}
            Err(CallError::ConnectionLost(error)) => return Err(ConnectError::new(&error)),
        }
    }
    Ok(warnings)
}

async fn run_checks(server: &RedisServer, requirements: &Requirements, report: &mut ServerReport) -> Result<(), Abort> {
    let address: &ConnectionAddr = server.client.get_connection_info().addr();
    let (mut connection, hello) = match server::connect(&server.client).await {
        Ok((connection, hello, check)) => {
            report.checks.push(check);
            (connection, hello)
        }
        Err(found) => {
            report.checks.push(Check { name: "reachable", status: Status::Failed, message: found, advice: None });
            return Err(Abort);
        }
    };
    let connection: &mut DiagnosticConnection = &mut connection;
    report.record("version", server::check_version(connection, hello.as_ref()).await)?;
    if let Some(found) = hello.as_ref().and_then(|hello| hello.mismatch(server.endpoint.mode(), address)) {
        // The server has the wrong role. Do not run the other checks, because the gateway cannot use this server.
        report.checks.push(Check { name: "role", status: Status::Failed, message: found, advice: None });
        return Err(Abort);
    }
    report.record("role", server::check_role(connection, hello.as_ref()).await)?;
    report.record("memory", server::check_memory(connection).await)?;
    report.record("policy", server::check_policy(connection).await)?;
    report.record("evictions", server::check_evictions(connection).await)?;
    report.record("keys", check_keys(connection, server, &requirements.prefix).await)?;
    report.record(
        "persistence",
        server::check_persistence(connection, &requirements.prefix, requirements.can_set_overrides).await,
    )?;
    if server.endpoint.mode() == ServerMode::Cluster {
        report.record("full coverage", server::check_full_coverage(connection).await)?;
    }
    report.record("script time", server::check_script_time_limit(connection).await)?;
    report.record("round trip", server::check_round_trip(connection, requirements.timeout).await)?;
    report.record("clock", server::check_clock(connection).await)?;
    report.record("permissions", server::check_permissions(connection, server, requirements).await)?;
    report.record("scripts", server::check_scripts(connection, requirements.algorithms).await)?;
    report.record("decisions", server::check_decisions(server, requirements).await)
}

// A Redis connection for diagnosis. Each call has a timeout. An error of a call tells whether the connection is lost.

/// Maximum time to connect, and maximum time to wait for each reply. This time is much longer than `store.timeout`, to
/// distinguish a slow server from an unreachable server.
pub(crate) const CALL_TIMEOUT: Duration = Duration::from_secs(2);

/// A connection that runs one command at a time.
pub(crate) struct DiagnosticConnection {
    pub(crate) multiplexed: MultiplexedConnection,
    pub(crate) address: ConnectionAddr,
}

/// The reason why a call failed.
pub(crate) enum CallError {
    /// The server replied with an error. Other calls may succeed.
    ErrorReply(RedisError),
    /// The connection is lost, or a reply took longer than [`CALL_TIMEOUT`]. The field contains an explanation for
    /// administrators.
    ConnectionLost(String),
}

impl DiagnosticConnection {
    pub(crate) async fn open(client: &Client) -> Result<DiagnosticConnection, String> {
        let address = client.get_connection_info().addr().clone();
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(CALL_TIMEOUT))
            .set_response_timeout(Some(CALL_TIMEOUT));
        match client.get_multiplexed_async_connection_with_config(&config).await {
            Ok(multiplexed) => Ok(DiagnosticConnection { multiplexed, address }),
            Err(error) => Err(diagnose_connect(&error, &address)),
        }
    }

    /// Run one command.
    pub(crate) async fn call<T: FromRedisValue>(&mut self, command: &Cmd) -> Result<T, CallError> {
        let reply = self.multiplexed.send_packed_command(command).await;
        let reply = reply.and_then(Value::extract_error).map_err(|error| self.classify_error(error))?;
        redis::from_redis_value(reply).map_err(|error| CallError::ErrorReply(error.into()))
    }

    /// Distinguish lost connections from error replies.
    pub(crate) fn classify_error(&self, error: RedisError) -> CallError {
        if error.is_timeout() {
            CallError::ConnectionLost(diagnose_timeout(&self.address))
        } else if error.is_io_error() || error.is_unrecoverable_error() {
            CallError::ConnectionLost(diagnose_call(&error))
        } else {
            CallError::ErrorReply(error)
        }
    }

    /// Read a section of `INFO`.
    pub(crate) async fn info(&mut self, section: &str) -> Result<InfoSection, CallError> {
        self.call(redis::cmd("INFO").arg(section)).await.map(InfoSection)
    }
}

/// A parsed section of the reply to `INFO`.
pub(crate) struct InfoSection(String);

impl InfoSection {
    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        self.0.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
    }

    pub(crate) fn number(&self, name: &str) -> Option<u64> {
        self.text(name)?.parse().ok()
    }
}

// Check that each key of the limits has a TTL. The scan stops after `MAX_SCAN_CALLS` or `SCAN_TIMEOUT`. The message
// says how much of the database the scan covered.

/// `COUNT` of each SCAN call: the approximate number of keys that Redis examines per call.
const SCAN_COUNT: u64 = 1000;
/// Maximum number of SCAN calls. Together, they examine about 100,000 keys.
const MAX_SCAN_CALLS: u64 = 100;
/// Maximum duration of the scan.
const SCAN_TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum number of keys whose size the check reads.
const SIZE_SAMPLE_KEYS: usize = 50;
/// Maximum number of keys without TTL that the report names.
const MAX_NAMED_KEYS: usize = 3;

#[derive(Default)]
struct KeyStatistics {
    key_count: u64,
    without_ttl: u64,
    examples: Vec<String>,
    sizes_bytes: Vec<u64>,
}

pub(crate) async fn check_keys(
    connection: &mut DiagnosticConnection,
    server: &RedisServer,
    prefix: &str,
) -> Result<Check, CallError> {
    let pattern = format!("{}:*", escape_glob(prefix));
    // Call PTTL for one key first. If the user lacks the permission for PTTL, the error of this call names the
    // permission. The error of the pipeline below would not.
    connection.call::<Value>(redis::cmd("PTTL").arg(server.probe_key(prefix))).await?;
    let started_at = monotonic();
    let mut cursor = 0;
    let mut steps = 0;
    let mut statistics = KeyStatistics::default();
    let is_complete = loop {
        let mut scan = redis::cmd("SCAN");
        let (next, keys): (u64, Vec<Vec<u8>>) =
            connection.call(scan.arg(cursor).arg("MATCH").arg(&pattern).arg("COUNT").arg(SCAN_COUNT)).await?;
        (cursor, steps) = (next, steps + 1);
        inspect_keys(connection, &keys, &mut statistics).await?;
        if cursor == 0 || steps == MAX_SCAN_CALLS || started_at.elapsed() > SCAN_TIMEOUT {
            break cursor == 0;
        }
    };
    let total = match connection.info("keyspace").await {
        Ok(info) => format!(" ({})", pluralize(database_key_count(&info, connection.multiplexed.get_db()), "key")),
        Err(CallError::ErrorReply(_)) => String::new(),
        Err(error) => return Err(error),
    };
    let coverage = if is_complete {
        format!("the whole database{total} was scanned")
    } else {
        format!("about {} keys of the database{total} were scanned", steps * SCAN_COUNT)
    };
    statistics.sizes_bytes.sort_unstable();
    let size = statistics
        .sizes_bytes
        .get(statistics.sizes_bytes.len() / 2)
        .map_or(String::new(), |bytes| format!(" of about {bytes} bytes"));
    let KeyStatistics { key_count, without_ttl, examples, .. } = statistics;
    let summary =
        format!("{} under {prefix}:{size}, {without_ttl} without a TTL; {coverage}", pluralize(key_count, "key"));
    let check = Check::ok("keys", summary.clone());
    Ok(if without_ttl > 0 {
        let found = format!("{summary}; such as {}", examples.join(", "));
        let advice = "the gateway never writes keys without a TTL: find the client that writes them, delete the \
                      keys, or set another store.prefix";
        Check { message: found, ..check }.with_status(Status::Failed).with_advice(advice)
    } else {
        check
    })
}

async fn inspect_keys(
    connection: &mut DiagnosticConnection,
    keys: &[Vec<u8>],
    statistics: &mut KeyStatistics,
) -> Result<(), CallError> {
    if keys.is_empty() {
        return Ok(());
    }
    let mut pipeline = redis::pipe();
    for key in keys {
        pipeline.cmd("PTTL").arg(key);
    }
    let ttls: Vec<i64> =
        pipeline.query_async(&mut connection.multiplexed).await.map_err(|error| connection.classify_error(error))?;
    statistics.key_count += keys.len() as u64;
    // PTTL returns -1 for a key without a TTL and -2 for a missing key.
    for (key, _) in keys.iter().zip(ttls).filter(|(_, ttl)| *ttl == -1) {
        statistics.without_ttl += 1;
        if statistics.examples.len() < MAX_NAMED_KEYS {
            statistics.examples.push(String::from_utf8_lossy(key).into_owned());
        }
    }
    for key in keys.iter().take(SIZE_SAMPLE_KEYS.saturating_sub(statistics.sizes_bytes.len())) {
        match connection.call::<Option<u64>>(redis::cmd("MEMORY").arg("USAGE").arg(key)).await {
            Ok(bytes) => statistics.sizes_bytes.extend(bytes),
            // Report no sizes if the user may not call MEMORY USAGE.
            Err(CallError::ErrorReply(_)) => break,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Escape the metacharacters of a glob pattern.
fn escape_glob(text: &str) -> String {
    let is_special = |character| matches!(character, '*' | '?' | '[' | ']' | '\\');
    text.chars().flat_map(|character| is_special(character).then_some('\\').into_iter().chain([character])).collect()
}

#[cfg(test)]
mod keys_tests {
    #[test]
    fn escape_glob_escapes_metacharacters() {
        for (text, expected) in [("rl", "rl"), ("a*b?", "a\\*b\\?"), ("[x]\\", "\\[x\\]\\\\")] {
            assert_eq!(super::escape_glob(text), expected);
        }
    }
}
