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
use line::{Failure, Line, PATIENCE};

/// One of the servers that hold the counters.
#[derive(Debug)]
pub struct Server {
    /// How it is called in the report.
    pub name: String,
    /// How it is reached, and as whom.
    pub client: Client,
    /// The same, as the gateway reaches it.
    pub target: Target,
    /// One that it keeps, and nobody has.
    pub identity: Identity,
}

impl Server {
    /// A key that it would keep, and that does not exist.
    fn key(&self, prefix: &str) -> Vec<u8> {
        let bucket = StateName::new(&IdentityHasher::new(""), "doctor", "none");
        let mut key = Vec::new();
        Key { identity: self.identity, state_name: &bucket }.write(prefix, &mut key);
        key
    }
}

/// All servers that a configuration makes decide.
///
/// # Errors
/// In words, why that cannot be found out.
pub async fn servers(servers: &RedisDeployment) -> Result<Vec<Server>, ConnectError> {
    let mut found = Vec::new();
    for (server, identity) in servers.masters(PATIENCE).await? {
        let client = server.client(PATIENCE).await?;
        let name = client.get_connection_info().addr().to_string();
        found.push(Server { name, client, target: server, identity });
    }
    Ok(found)
}

impl Report {
    /// Of servers that cannot be found.
    pub fn lost(name: &str, why: &ConnectError) -> Self {
        let check = Check { name: "reachable", status: Status::Failed, message: why.to_string(), advice: None };
        Report { address: name.to_owned(), checks: vec![check] }
    }
}

/// What the gateway wants of its servers.
#[derive(Debug)]
pub struct Needs {
    /// First part of every key.
    pub prefix: String,
    /// Bound of a decision.
    pub timeout: Duration,
    /// What the scripts of routes must know.
    pub algorithms: AlgorithmSet,
    /// The algorithms of the limits.
    pub rules: Vec<Rule>,
    /// Whether operators can set overrides: the admin listener has a token.
    pub overrides: bool,
}

/// What was found on a server.
#[derive(Debug, Serialize)]
pub struct Report {
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
    LeftOut,
}

impl Check {
    fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Check { name, status: Status::Ok, message: found.into(), advice: None }
    }

    fn left_out(name: &'static str, found: impl Into<String>) -> Self {
        Check { name, status: Status::LeftOut, message: found.into(), advice: None }
    }

    /// The server refused to be looked at, or to work.
    fn refused(name: &'static str, error: &RedisError) -> Self {
        if let Some(right) = missing_permission(error) {
            return Check::left_out(name, format!("the user lacks the right {right}"))
                .advise("examine with a user for that: docs/redis.md has one");
        }
        match error.detail() {
            Some(said) if said.contains("unknown command") => Check::left_out(name, format!("the server says: {said}")),
            _ => Check { name, status: Status::Failed, message: diagnose_call(error), advice: None },
        }
    }

    fn advise(self, advice: impl Into<String>) -> Self {
        Check { advice: Some(advice.into()), ..self }
    }

    fn or(self, status: Status) -> Self {
        Check { status, ..self }
    }
}

impl Report {
    /// Adds what came of a look; a server that was lost ends the examination.
    fn note(&mut self, name: &'static str, looked: Result<Check, Failure>) -> Result<(), Lost> {
        let (check, lost) = match looked {
            Ok(check) => (check, Ok(())),
            Err(Failure::Refused(error)) => (Check::refused(name, &error), Ok(())),
            Err(Failure::Lost(found)) => {
                (Check { name, status: Status::Failed, message: found, advice: None }, Err(Lost))
            }
        };
        self.checks.push(check);
        lost
    }
}

/// There is no point in going on.
struct Lost;

/// Looks at everything on one server. It takes some seconds at most, also if the server hangs.
pub async fn examine(server: &Server, needs: &Needs) -> Report {
    let mut report = Report { address: server.name.clone(), checks: Vec::new() };
    // What was lost stands in the report.
    let _ = look(server, needs, &mut report).await;
    report
}

/// Check a server for `sluicegate check`: its round trip, and what it does with overrides. Return the checks that warn or
/// fail; a command that Redis refuses is left out.
///
/// # Errors
/// The server cannot be reached.
pub async fn survey(server: &Target, needs: &Needs) -> Result<Vec<Check>, ConnectError> {
    let client = server.client(PATIENCE).await?;
    let mut line = Line::open(&client).await.map_err(|why| ConnectError::new(&why))?;
    let mut checks = vec![server::round_trip(&mut line, needs.timeout).await];
    checks.push(persistence::persistence(&mut line, &needs.prefix, needs.overrides).await);
    if server.mode() == ServerMode::Cluster {
        checks.push(persistence::full_coverage(&mut line).await);
    }
    let mut found = Vec::new();
    for check in checks {
        match check {
            Ok(check) if matches!(check.status, Status::Warning | Status::Failed) => found.push(check),
            Ok(_) | Err(Failure::Refused(_)) => {}
            Err(Failure::Lost(why)) => return Err(ConnectError::new(&why)),
        }
    }
    Ok(found)
}

async fn look(server: &Server, needs: &Needs, report: &mut Report) -> Result<(), Lost> {
    let address: &ConnectionAddr = server.client.get_connection_info().addr();
    let (mut line, hello) = match server::reach(&server.client).await {
        Ok((line, hello, check)) => {
            report.checks.push(check);
            (line, hello)
        }
        Err(found) => {
            report.checks.push(Check { name: "reachable", status: Status::Failed, message: found, advice: None });
            return Err(Lost);
        }
    };
    let line: &mut Line = &mut line;
    report.note("version", server::version(line, hello.as_ref()).await)?;
    if let Some(found) = hello.as_ref().and_then(|hello| hello.mismatch(server.target.mode(), address)) {
        // What else is wrong with the wrong server is nobody's concern.
        report.checks.push(Check { name: "role", status: Status::Failed, message: found, advice: None });
        return Err(Lost);
    }
    report.note("role", server::role(line, hello.as_ref()).await)?;
    report.note("memory", memory::memory(line).await)?;
    report.note("policy", memory::policy(line).await)?;
    report.note("evictions", memory::evictions(line).await)?;
    report.note("keys", keys::keys(line, server, &needs.prefix).await)?;
    report.note("persistence", persistence::persistence(line, &needs.prefix, needs.overrides).await)?;
    if server.target.mode() == ServerMode::Cluster {
        report.note("full coverage", persistence::full_coverage(line).await)?;
    }
    report.note("round trip", server::round_trip(line, needs.timeout).await)?;
    report.note("clock", server::clock(line).await)?;
    report.note("permissions", rights::rights(line, server, needs).await)?;
    report.note("scripts", trial::scripts(line, needs.algorithms).await)?;
    report.note("decisions", trial::decisions(server, needs).await)
}
