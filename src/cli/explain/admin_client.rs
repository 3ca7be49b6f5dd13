//! Read counters from the memory of a running gateway over its admin API.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use http::Method;
use serde_json::Value;

use crate::cli::admin::client::AdminClient;
use crate::limiter::algorithm::{Outcome, Status};
use crate::limiter::clock::unix_us;
use crate::limiter::decision::LimitCheck;
use crate::limiter::key::Identity;
use crate::limiter::overrides::{OverrideQuota, OverrideTable, Overrides};
use crate::limiter::verdict::Verdict;
use crate::snapshot::CompiledConfig;
use crate::tools::explain::limits::{Counters, CountersUnavailable, empty_overrides};

/// The counters of a running gateway.
pub(super) struct AdminCounters {
    client: Result<AdminClient, CountersUnavailable>,
    overrides: Overrides,
}

impl AdminCounters {
    /// Connect to the gateway of the configuration and read its overrides. If the connection fails, `peek` reports the
    /// failure.
    pub(super) fn open(config_path: &Path, config: &CompiledConfig) -> Self {
        let overrides = empty_overrides(config);
        let client = match &config.admin {
            None => Err(CountersUnavailable(
                "the counters are in the memory of the running gateway; add the table [admin], so that explain can \
                 read them"
                    .to_owned(),
            )),
            Some(_) => AdminClient::from_config(config_path, config)
                .and_then(|client| {
                    let response = client.request(Method::GET, "/api/overrides", None)?;
                    response["overrides"]
                        .as_array()
                        .into_iter()
                        .flatten()
                        .for_each(|entry| add_override(&overrides, config, entry));
                    Ok(client)
                })
                .map_err(|error| counters_unavailable(&error)),
        };
        AdminCounters { client, overrides }
    }
}

fn counters_unavailable(error: &anyhow::Error) -> CountersUnavailable {
    // Print only the outermost message of the error, because its causes are errors of the operating system.
    CountersUnavailable(format!("cannot read the counters in the memory of the running gateway: {error}"))
}

fn add_override(overrides: &Overrides, config: &CompiledConfig, entry: &Value) {
    let parse = || {
        let compiled = config.limits.get(entry["limit"].as_str()?)?;
        let identity = Identity::from_hex(entry["identity"].as_str()?)?;
        let quota: OverrideQuota = serde_json::from_value(entry.clone()).ok()?;
        let ttl = Duration::from_secs(entry["expires_in_seconds"].as_u64()?);
        overrides.compile(&compiled.limit, identity, quota, ttl).ok()
    };
    // Ignore overrides of limits that this configuration does not have.
    if let Some(parsed) = parse() {
        overrides.put(parsed);
    }
}

impl Counters for AdminCounters {
    fn overrides(&self) -> Option<Arc<OverrideTable>> {
        self.overrides.current()
    }

    fn peek(&self, checks: &[LimitCheck<'_, '_>]) -> Result<Verdict, CountersUnavailable> {
        let client = self.client.as_ref().map_err(CountersUnavailable::clone)?;
        let (mut outcomes, mut granted) = (Vec::new(), 1);
        for check in checks {
            // Do not percent-encode limit names and identity hashes, whose characters are valid in queries.
            let cost = check.required().max(1);
            let target = format!("/api/identities?limit={}&identity={}&cost={cost}", check.limit.name, check.identity);
            let response = client.request(Method::GET, &target, None).map_err(|error| counters_unavailable(&error))?;
            let outcome = parse_outcome(&response["limits"][0]).ok_or_else(|| {
                CountersUnavailable("the running gateway has another version than this command".to_owned())
            })?;
            if outcome.status != Status::Ok && !check.limit.shadow {
                granted = 0;
            }
            outcomes.push(outcome);
        }
        Ok(Verdict::new(granted, unix_us(), outcomes))
    }
}

/// Parse the usage of an identity in a response of `/api/identities`.
fn parse_outcome(usage: &Value) -> Option<Outcome> {
    let us = |value: &Value| value.as_f64().map(|seconds| (seconds * 1e6) as u64);
    let status = match usage["decision"].as_str()? {
        "allowed" | "exempt" => Status::Ok,
        "denied" => Status::Exceeded,
        "cost_too_large" => Status::CostTooLarge,
        _ => return None,
    };
    Some(Outcome {
        status,
        remaining: usage["remaining"].as_u64()?,
        reset_us: us(&usage["reset_seconds"])?,
        retry_us: us(&usage["retry_seconds"]).unwrap_or(0),
    })
}
