//! Where identities stand in the memory of a running gateway: its admin listener says.

use std::path::Path;
use std::sync::Arc;

use http::Method;
use serde_json::Value;
use tokio::time::Duration;

use crate::cli::operate::Listener;
use crate::explain::counters::{Counters, Unseen, overrides_of};
use crate::limit::algorithm::{Outcome, Status};
use crate::limit::clock::unix_us;
use crate::limit::decision::LimitCheck;
use crate::limit::key::Identity;
use crate::limit::overrides::{OverrideQuota, OverrideTable, Overrides};
use crate::limit::store::Verdict;
use crate::runtime::CompiledConfig;

/// The gateway of a configuration, if it can be asked.
pub(super) struct Neighbour {
    listener: Result<Listener, Unseen>,
    overrides: Overrides,
}

impl Neighbour {
    /// That of this configuration; what operators decided is asked at once.
    pub(super) fn of(config: &Path, runtime: &CompiledConfig) -> Self {
        let overrides = overrides_of(runtime);
        let listener = match &runtime.admin {
            None => Err(Unseen(
                "the counters are in the memory of the running gateway; with [admin] it can be asked".to_owned(),
            )),
            Some(_) => Listener::of(config, runtime)
                .and_then(|listener| {
                    let all = listener.ask(Method::GET, "/api/overrides", None)?;
                    all["overrides"].as_array().into_iter().flatten().for_each(|one| adopt(&overrides, runtime, one));
                    Ok(listener)
                })
                .map_err(|error| unseen(&error)),
        };
        Neighbour { listener, overrides }
    }
}

fn unseen(error: &anyhow::Error) -> Unseen {
    // What stands behind is the system's.
    Unseen(format!("the counters are in the memory of the running gateway: {error}"))
}

fn adopt(overrides: &Overrides, runtime: &CompiledConfig, one: &Value) {
    let read = || {
        let terms = runtime.limits.get(one["limit"].as_str()?)?;
        let identity = Identity::from_hex(one["identity"].as_str()?)?;
        let size: OverrideQuota = serde_json::from_value(one.clone()).ok()?;
        let lasts = Duration::from_secs(one["expires_in_seconds"].as_u64()?);
        overrides.compile(&terms.limit, identity, size, lasts).ok()
    };
    // One of another configuration is none here.
    if let Some(read) = read() {
        overrides.put(read);
    }
}

impl Counters for Neighbour {
    fn overrides(&self) -> Option<Arc<OverrideTable>> {
        self.overrides.current()
    }

    fn look(&self, checks: &[LimitCheck<'_, '_>]) -> Result<Verdict, Unseen> {
        let listener = self.listener.as_ref().map_err(Unseen::clone)?;
        let (mut outcomes, mut granted) = (Vec::new(), 1);
        for check in checks {
            // Names of limits and hashes need no encoding.
            let cost = check.required().max(1);
            let target = format!("/api/identities?limit={}&identity={}&cost={cost}", check.limit.name, check.identity);
            let answer = listener.ask(Method::GET, &target, None).map_err(|error| unseen(&error))?;
            let outcome = outcome(&answer["limits"][0])
                .ok_or_else(|| Unseen("the running gateway is of another version".to_owned()))?;
            if outcome.status != Status::Ok && !check.limit.shadow {
                granted = 0;
            }
            outcomes.push(outcome);
        }
        Ok(Verdict::new(granted, unix_us(), outcomes))
    }
}

/// A standing as `/api/identities` has it.
fn outcome(standing: &Value) -> Option<Outcome> {
    let us = |value: &Value| value.as_f64().map(|seconds| (seconds * 1e6) as u64);
    let status = match standing["decision"].as_str()? {
        "allowed" | "exempt" => Status::Ok,
        "denied" => Status::Exceeded,
        "cost_too_large" => Status::CostTooLarge,
        _ => return None,
    };
    Some(Outcome {
        status,
        remaining: standing["remaining"].as_u64()?,
        reset_us: us(&standing["reset_seconds"])?,
        retry_us: us(&standing["retry_seconds"]).unwrap_or(0),
    })
}
