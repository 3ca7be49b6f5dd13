//! Scripts and decisions: what the gateway does for a request, tried out on keys that go away.

use std::sync::Arc;

use redis::Value;
use tokio::time::timeout;

use super::line::{CALL_TIMEOUT, CallError, DiagnosticConnection};
use super::server::format_elapsed;
use super::{Check, RedisServer, Requirements, Status};
use crate::limit::algorithm::Rule;
use crate::limit::clock::{Clock, monotonic};
use crate::limit::key::{IdentityHasher, Key, StateName};
use crate::limit::redis::advice::diagnose_call;
use crate::limit::redis::script::{AlgorithmSet, ScriptVariant, script};
use crate::limit::redis::{RedisSettings, ServerStore};
use crate::limit::store::{Charge, ChargeMode, CounterStore, Operation, StoreError};
use crate::words::pluralize;

/// The SHA-1 of no script.
const UNKNOWN_SCRIPT_SHA: &str = "0000000000000000000000000000000000000000";

/// Whether the scripts of the configuration are taken and run, and a forgotten one is told.
pub(super) async fn check_scripts(
    connection: &mut DiagnosticConnection,
    algorithms: AlgorithmSet,
) -> Result<Check, CallError> {
    for variant in ScriptVariant::ALL {
        let script = script(variant, algorithms);
        let mut load = redis::cmd("SCRIPT");
        let sha: String = connection.call(load.arg("LOAD").arg(&script.source)).await?;
        if sha != script.sha {
            let found = format!("a script is called {sha}, not {}", script.sha);
            return Ok(Check::ok("scripts", found)
                .with_status(Status::Failed)
                .with_advice("this is not Redis, or not its SHA-1"));
        }
        // Without keys a script does nothing but say so.
        match connection.call::<Value>(redis::cmd("EVALSHA").arg(&sha).arg(0)).await {
            Err(CallError::ErrorReply(error)) if error.code() == Some("RLARG") => {}
            Err(failure) => return Err(failure),
            Ok(_) => return Ok(Check::ok("scripts", "a script answers what it should not").with_status(Status::Failed)),
        }
    }
    // A restarted Redis has forgotten all of them, and this is how the gateway learns it.
    match connection.call::<Value>(redis::cmd("EVALSHA").arg(UNKNOWN_SCRIPT_SHA).arg(0)).await {
        Err(CallError::ErrorReply(error)) if error.code() == Some("NOSCRIPT") => {}
        Err(failure) => return Err(failure),
        Ok(_) => return Ok(Check::ok("scripts", "a script that was never loaded answers").with_status(Status::Failed)),
    }
    Ok(Check::ok(
        "scripts",
        format!(
            "loaded and answering: {}; one that was forgotten is told",
            pluralize(ScriptVariant::ALL.len() as u64, "script")
        ),
    ))
}

/// One decision of each algorithm of the configuration, charged and given back. The keys expire, whatever happens.
pub(super) async fn check_decisions(server: &RedisServer, requirements: &Requirements) -> Result<Check, CallError> {
    let settings = RedisSettings {
        prefix: requirements.prefix.clone(),
        connections: 1,
        timeout: CALL_TIMEOUT,
        connect_timeout: CALL_TIMEOUT,
        algorithms: AlgorithmSet::default(),
        clock: Clock::Store,
    };
    // It was seen to be of the right kind before.
    let store = ServerStore::new(&settings, server.endpoint.clone(), Arc::default());
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
        let charge = Charge { key, rule: &rule, cost: 1, mode: ChargeMode::Enforced, permit_id: 1, debt_before_us: 0 };
        let sent_at = monotonic();
        let verdict = match timeout(CALL_TIMEOUT, store.call(Operation::Check, &[charge])).await {
            Ok(Ok(verdict)) => verdict,
            Ok(Err(error)) => return Ok(decision_failed(&error)),
            Err(_) => return Ok(decision_failed(&StoreError::Timeout)),
        };
        slowest = slowest.max(sent_at.elapsed());
        if verdict.granted != 1 {
            let found = format!("the first request of a fresh limit is denied ({})", rule.shape());
            return Ok(Check::ok("decisions", found).with_status(Status::Failed));
        }
        let refund = Operation::Refund { charged_at: verdict.now_us };
        if let Ok(Err(error)) = timeout(CALL_TIMEOUT, store.call(refund, &[charge])).await {
            return Ok(decision_failed(&error));
        }
    }
    let found = format!(
        "{} tried: charged and given back, the slowest in {}",
        pluralize(kinds.len() as u64, "algorithm"),
        format_elapsed(slowest)
    );
    Ok(Check::ok("decisions", found))
}

fn decision_failed(error: &StoreError) -> Check {
    let found = error.error_reply().map_or_else(|| error.to_string(), diagnose_call);
    Check::ok("decisions", found).with_status(Status::Failed)
}

/// The same algorithm for a second, so that a key that is not given back is soon gone; calendars and leases have their own time.
fn with_short_window(rule: &Rule) -> Rule {
    let quota = rule.parse_quota(if let Rule::Concurrency(_) = rule { "1" } else { "1/s" });
    quota.and_then(|quota| rule.with_quota(quota, None)).unwrap_or_else(|_| rule.clone())
}
