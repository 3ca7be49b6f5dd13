//! Examines the Redis of a configuration: whether it can decide, and what will bite later.

mod keys;
mod line;
mod memory;
mod persistence;
mod rights;
mod server;
mod trial;

use redis::{Client, ConnectionAddr, RedisError};
use serde::Serialize;
use tokio::time::Duration;

use crate::limit::algorithm::Rule;
use crate::limit::key::{Identity, IdentityHasher, Key, StateName};
use crate::limit::redis::RedisDeployment;
use crate::limit::redis::advice::{diagnose_call, missing_permission};
use crate::limit::redis::hello::ServerMode;
use crate::limit::redis::script::AlgorithmSet;
use crate::limit::redis::server::{ConnectError, RedisEndpoint as Target};
use line::{CALL_TIMEOUT, CallError, DiagnosticConnection};

/// One of the servers that hold the counters.
#[derive(Debug)]
pub struct RedisServer {
    /// How it is called in the report.
    pub name: String,
    /// How it is reached, and as whom.
    pub client: Client,
    /// The same, as the gateway reaches it.
    pub endpoint: Target,
    /// One that it keeps, and nobody has.
    pub probe_identity: Identity,
}

impl RedisServer {
    /// A key that it would keep, and that does not exist.
    fn probe_key(&self, prefix: &str) -> Vec<u8> {
        let state_name = StateName::new(&IdentityHasher::new(""), "doctor", "none");
        let mut key = Vec::new();
        Key { identity: self.probe_identity, state_name: &state_name }.write(prefix, &mut key);
        key
    }
}

/// All servers that a configuration makes decide.
///
/// # Errors
/// In words, why that cannot be found out.
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
    /// Of servers that cannot be found.
    pub fn unreachable(name: &str, error: &ConnectError) -> Self {
        let check = Check { name: "reachable", status: Status::Failed, message: error.to_string(), advice: None };
        ServerReport { address: name.to_owned(), checks: vec![check] }
    }
}

/// What the gateway wants of its servers.
#[derive(Debug)]
pub struct Requirements {
    /// First part of every key.
    pub prefix: String,
    /// Bound of a decision.
    pub timeout: Duration,
    /// What the scripts of routes must know.
    pub algorithms: AlgorithmSet,
    /// The algorithms of the limits.
    pub rules: Vec<Rule>,
    /// Whether operators can set overrides: the admin listener has a token.
    pub can_set_overrides: bool,
}

/// What was found on a server.
#[derive(Debug, Serialize)]
pub struct ServerReport {
    /// How the server is called.
    pub address: String,
    /// What was looked at, in the order of looking. A server that stops answering is asked no more.
    pub checks: Vec<Check>,
}

/// One thing that was looked at.
#[derive(Debug, Serialize)]
pub struct Check {
    /// What.
    pub name: &'static str,
    /// How it is.
    pub status: Status,
    /// What was found, figures with their units.
    pub message: String,
    /// What to do, if anything.
    pub advice: Option<String>,
}

/// How something is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Status {
    /// As it should be.
    #[serde(rename = "ok")]
    Ok,
    /// It works, and may not always.
    #[serde(rename = "warning")]
    Warning,
    /// Limits cannot be decided, or not rightly.
    #[serde(rename = "failed")]
    Failed,
    /// The user may not look.
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

    /// The server refused to be looked at, or to work.
    fn from_redis_error(name: &'static str, error: &RedisError) -> Self {
        if let Some(permission) = missing_permission(error) {
            return Check::skipped(name, format!("the user lacks the right {permission}"))
                .with_advice("examine with a user for that: docs/redis.md has one");
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
    /// Adds what came of a look; a server that was lost ends the examination.
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

/// There is no point in going on.
struct Abort;

/// Looks at everything on one server. It takes some seconds at most, also if the server hangs.
pub async fn examine(server: &RedisServer, requirements: &Requirements) -> ServerReport {
    let mut report = ServerReport { address: server.name.clone(), checks: Vec::new() };
    // What was lost stands in the report.
    let _ = run_checks(server, requirements, &mut report).await;
    report
}

/// Check a server for `sluicegate check`: its round trip, and what it does with overrides. Return the checks that warn or
/// fail; a command that Redis refuses is left out.
///
/// # Errors
/// The server cannot be reached.
pub async fn check_basics(server: &Target, requirements: &Requirements) -> Result<Vec<Check>, ConnectError> {
    let client = server.client(CALL_TIMEOUT).await?;
    let mut connection = DiagnosticConnection::open(&client).await.map_err(|error| ConnectError::new(&error))?;
    let mut checks = vec![server::check_round_trip(&mut connection, requirements.timeout).await];
    checks.push(
        persistence::check_persistence(&mut connection, &requirements.prefix, requirements.can_set_overrides).await,
    );
    if server.mode() == ServerMode::Cluster {
        checks.push(persistence::check_full_coverage(&mut connection).await);
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
        // What else is wrong with the wrong server is nobody's concern.
        report.checks.push(Check { name: "role", status: Status::Failed, message: found, advice: None });
        return Err(Abort);
    }
    report.record("role", server::check_role(connection, hello.as_ref()).await)?;
    report.record("memory", memory::check_memory(connection).await)?;
    report.record("policy", memory::check_policy(connection).await)?;
    report.record("evictions", memory::check_evictions(connection).await)?;
    report.record("keys", keys::check_keys(connection, server, &requirements.prefix).await)?;
    report.record(
        "persistence",
        persistence::check_persistence(connection, &requirements.prefix, requirements.can_set_overrides).await,
    )?;
    if server.endpoint.mode() == ServerMode::Cluster {
        report.record("full coverage", persistence::check_full_coverage(connection).await)?;
    }
    report.record("round trip", server::check_round_trip(connection, requirements.timeout).await)?;
    report.record("clock", server::check_clock(connection).await)?;
    report.record("permissions", rights::check_permissions(connection, server, requirements).await)?;
    report.record("scripts", trial::check_scripts(connection, requirements.algorithms).await)?;
    report.record("decisions", trial::check_decisions(server, requirements).await)
}
