//! Scripts and decisions: what the gateway does for a request, tried out on keys that go away.

use std::sync::Arc;

use redis::Value;
use tokio::time::timeout;

use super::line::{Failure, Line, PATIENCE};
use super::server::ms;
use super::{Check, Needs, Server, Status};
use crate::limit::algorithm::Rule;
use crate::limit::clock::{Clock, monotonic};
use crate::limit::key::{IdentityHasher, Key, StateName};
use crate::limit::redis::advice::diagnose_call;
use crate::limit::redis::script::{AlgorithmSet, ScriptVariant, script};
use crate::limit::redis::{RedisSettings, ServerStore};
use crate::limit::store::{Charge, ChargeMode, CounterStore, Operation, StoreError};
use crate::words::pluralize;

/// The SHA-1 of no script.
const NO_SCRIPT: &str = "0000000000000000000000000000000000000000";

/// Whether the scripts of the configuration are taken and run, and a forgotten one is told.
pub(super) async fn scripts(line: &mut Line, algorithms: AlgorithmSet) -> Result<Check, Failure> {
    for frame in ScriptVariant::ALL {
        let script = script(frame, algorithms);
        let mut load = redis::cmd("SCRIPT");
        let sha: String = line.ask(load.arg("LOAD").arg(&script.source)).await?;
        if sha != script.sha {
            let found = format!("a script is called {sha}, not {}", script.sha);
            return Ok(Check::ok("scripts", found).or(Status::Failed).advise("this is not Redis, or not its SHA-1"));
        }
        // Without keys a script does nothing but say so.
        match line.ask::<Value>(redis::cmd("EVALSHA").arg(&sha).arg(0)).await {
            Err(Failure::Refused(error)) if error.code() == Some("RLARG") => {}
            Err(failure) => return Err(failure),
            Ok(_) => return Ok(Check::ok("scripts", "a script answers what it should not").or(Status::Failed)),
        }
    }
    // A restarted Redis has forgotten all of them, and this is how the gateway learns it.
    match line.ask::<Value>(redis::cmd("EVALSHA").arg(NO_SCRIPT).arg(0)).await {
        Err(Failure::Refused(error)) if error.code() == Some("NOSCRIPT") => {}
        Err(failure) => return Err(failure),
        Ok(_) => return Ok(Check::ok("scripts", "a script that was never loaded answers").or(Status::Failed)),
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
pub(super) async fn decisions(server: &Server, needs: &Needs) -> Result<Check, Failure> {
    let settings = RedisSettings {
        prefix: needs.prefix.clone(),
        connections: 1,
        timeout: PATIENCE,
        connect_timeout: PATIENCE,
        algorithms: AlgorithmSet::default(),
        clock: Clock::Store,
    };
    // It was seen to be of the right kind before.
    let store = ServerStore::new(&settings, server.target.clone(), Arc::default());
    let hasher = IdentityHasher::new("doctor");
    let identity = server.identity;
    let (mut kinds, mut slowest) = (Vec::new(), tokio::time::Duration::ZERO);
    for rule in &needs.rules {
        if kinds.contains(&rule.kind()) {
            continue;
        }
        kinds.push(rule.kind());
        let rule = brief(rule);
        let bucket = StateName::new(&hasher, "doctor", &rule.shape());
        let key = Key { identity, state_name: &bucket };
        let charge = Charge { key, rule: &rule, cost: 1, mode: ChargeMode::Enforced, permit_id: 1, debt_before_us: 0 };
        let asked = monotonic();
        let verdict = match timeout(PATIENCE, store.call(Operation::Check, &[charge])).await {
            Ok(Ok(verdict)) => verdict,
            Ok(Err(error)) => return Ok(undecided(&error)),
            Err(_) => return Ok(undecided(&StoreError::Timeout)),
        };
        slowest = slowest.max(asked.elapsed());
        if verdict.granted != 1 {
            let found = format!("the first request of a fresh limit is denied ({})", rule.shape());
            return Ok(Check::ok("decisions", found).or(Status::Failed));
        }
        let refund = Operation::Refund { charged_at: verdict.now_us };
        if let Ok(Err(error)) = timeout(PATIENCE, store.call(refund, &[charge])).await {
            return Ok(undecided(&error));
        }
    }
    let found = format!(
        "{} tried: charged and given back, the slowest in {}",
        pluralize(kinds.len() as u64, "algorithm"),
        ms(slowest)
    );
    Ok(Check::ok("decisions", found))
}

fn undecided(error: &StoreError) -> Check {
    let found = error.error_reply().map_or_else(|| error.to_string(), diagnose_call);
    Check::ok("decisions", found).or(Status::Failed)
}

/// The same algorithm for a second, so that a key that is not given back is soon gone; calendars and leases have their own time.
fn brief(rule: &Rule) -> Rule {
    let quota = rule.parse_quota(if let Rule::Concurrency(_) = rule { "1" } else { "1/s" });
    quota.and_then(|quota| rule.with_quota(quota, None)).unwrap_or_else(|_| rule.clone())
}
