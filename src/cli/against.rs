//! `sluicegate check --against`: compares a configuration with that of the running gateway.

use std::net::SocketAddr;
use std::path::Path;

use http::Method;
use serde::Serialize;
use serde_json::Value;

use crate::app::listen;
use crate::cli::admin::client::AdminClient;
use crate::cli::admin::{format_parts, request_target};
use crate::config::diff;
use crate::config::diff::Difference;
use crate::identity::api_key::Caller;
use crate::identity::display::IdentityInput;
use crate::snapshot::{CompiledConfig, CompiledLimit};

/// Maximum number of identities that are reported.
const MAX_IDENTITIES: usize = 20;

/// Maximum number of identities of a limit whose usage is read. Each takes a request.
const MAX_REQUESTS: usize = 500;

/// The changes that a reload of the running gateway with this configuration would make.
#[derive(Debug, Serialize)]
pub(super) struct Comparison {
    /// Differences in words.
    changes: Vec<String>,
    /// Changed keys that a reload rejects.
    restart: Vec<String>,
    /// New addresses that cannot be bound while the gateway runs, each with the reason.
    pub(super) unavailable: Vec<String>,
    /// Known identities that have used more than a changed limit admits.
    over_quota: Vec<OverQuota>,
}

/// An identity that has used more than a changed limit admits.
#[derive(Debug, Serialize)]
struct OverQuota {
    limit: String,
    /// The consumer, or the parts of the identity and its hash.
    identity: String,
    used: u64,
    /// Capacity of the new quota.
    capacity: u64,
    /// The new quota.
    quota: String,
}

/// Compare `config` with the gateway at `admin`: a socket or a URL. If it is empty, find the gateway.
///
/// # Errors
/// No gateway is found, or it does not respond as expected.
pub(super) fn compare(path: &Path, config: &CompiledConfig, admin: &str) -> anyhow::Result<Comparison> {
    let client = AdminClient::find(path, Some(admin).filter(|admin| !admin.is_empty()))?;
    let running = client.request(Method::GET, "/api/config", None)?;
    let differences = diff::differences(&running["configuration"], &config.redacted());
    let restart = super::check::restart_only_keys(&client, config)?;
    let used: Vec<SocketAddr> = strings(&running["addresses"]).filter_map(|text| text.parse().ok()).collect();
    let own = config.listeners.iter().map(|listener| listener.address);
    let own = own.chain(config.admin.iter().map(|admin| admin.address));
    let unavailable = own.filter(|address| !used.contains(address)).filter_map(|address| {
        let error = listen::probe(address).err()?;
        Some(format!("cannot listen on {address} while the gateway runs: {error}"))
    });
    let unavailable = unavailable.collect();
    let over_quota = over_quota(&client, config, &differences);
    Ok(Comparison { changes: differences.iter().map(ToString::to_string).collect(), restart, unavailable, over_quota })
}

/// Find the identities that have used more than a changed limit admits: consumers, and the most frequently denied ones.
fn over_quota(client: &AdminClient, config: &CompiledConfig, differences: &[Difference]) -> Vec<OverQuota> {
    let mut found = Vec::new();
    let changed = differences.iter().filter(|difference| difference.table == "limit" && difference.is_change);
    for compiled in changed.filter_map(|difference| config.limits.get(difference.name.as_deref()?)) {
        for (identity, query) in known_identities(client, config, compiled) {
            let query: Vec<_> = query.iter().map(|(name, value)| (&**name, &**value)).collect();
            let target = request_target("/api/identities", &query);
            // An identity that the running gateway does not know, such as a new consumer, has used nothing.
            let Ok(response) = client.request(Method::GET, &target, None) else { continue };
            for status in response["limits"].as_array().into_iter().flatten() {
                found.extend(exceeds(config, compiled, &identity, status));
            }
        }
    }
    found.sort_by_key(|over| std::cmp::Reverse(over.used));
    let mut seen = std::collections::BTreeSet::new();
    found.retain(|over| seen.insert((over.limit.clone(), over.identity.clone())));
    found.truncate(MAX_IDENTITIES);
    found
}

/// Return the known identities of a limit, each with its query parameters.
fn known_identities(
    client: &AdminClient,
    config: &CompiledConfig,
    compiled: &CompiledLimit,
) -> Vec<(String, Vec<(String, String)>)> {
    let limit = &*compiled.limit.name;
    let mut known = Vec::new();
    let consumers = config.auth.consumers();
    for consumer in consumers.iter().take(MAX_REQUESTS) {
        let input = IdentityInput::from([("api-key".to_owned(), consumer.name.to_string())]);
        let resolved = compiled.identity_spec.resolve(&input, &config.client_ip, &consumers, &config.hasher);
        if resolved.is_ok_and(|resolved| !resolved.is_exempt) {
            let query = vec![("limit".to_owned(), limit.to_owned()), ("api-key".to_owned(), consumer.name.to_string())];
            known.push((format!("api-key={}", consumer.name), query));
        }
    }
    let target = request_target("/api/top", &[("limit", limit), ("count", "96")]);
    let top = client.request(Method::GET, &target, None).unwrap_or_default();
    for entry in
        top["limits"].as_array().into_iter().flatten().flat_map(|limit| limit["identities"].as_array()).flatten()
    {
        let hash = entry["identity"].as_str().unwrap_or_default();
        let query = vec![("limit".to_owned(), limit.to_owned()), ("identity".to_owned(), hash.to_owned())];
        known.push((format!("{} ({hash})", format_parts(&entry["parts"])), query));
    }
    known
}

/// Return the identity if its usage exceeds the new quota. A limit with another algorithm or window starts anew.
fn exceeds(config: &CompiledConfig, compiled: &CompiledLimit, identity: &str, status: &Value) -> Option<OverQuota> {
    let consumers = config.auth.consumers();
    let consumer = status["consumer"].as_str();
    let caller = consumers.iter().find(|known| Some(&*known.name) == consumer);
    let caller = caller.cloned().map_or(Caller::Missing, Caller::Consumer);
    let variant = caller.variant(&compiled.limit);
    let quota = variant.quota.to_string();
    let window = |quota: &str| quota.split_once('/').map(|(_, window)| window.to_owned());
    let is_same_state = window(status["quota"].as_str()?) == window(&quota)
        && status["algorithm"].as_str()? == variant.rule.algorithm_name();
    let used = status["capacity"].as_u64()?.saturating_sub(status["remaining"].as_u64()?);
    let capacity = variant.rule.capacity();
    (is_same_state && used > capacity).then(|| OverQuota {
        limit: compiled.limit.name.to_string(),
        identity: consumer.map_or_else(|| identity.to_owned(), |name| format!("api-key={name}")),
        used,
        capacity,
        quota,
    })
}

impl Comparison {
    /// Return the comparison as text.
    pub(super) fn text(&self) -> String {
        let Comparison { changes, restart, unavailable, over_quota } = self;
        let mut text = String::new();
        if changes.is_empty() && restart.is_empty() {
            text += "all keys are the same as in the running gateway; secrets and other files are not compared\n";
        }
        section(&mut text, "differences from the running gateway:", changes.iter().cloned());
        section(&mut text, "a reload rejects a change of these keys, which need a restart:", restart.iter().cloned());
        section(&mut text, "a restart would fail:", unavailable.iter().cloned());
        let identities = over_quota.iter().map(|over| {
            let OverQuota { limit, identity, used, capacity, quota } = over;
            format!("limit `{limit}`: {identity} has used {used}, the new quota {quota} has room for {capacity}")
        });
        section(
            &mut text,
            "identities whose usage exceeds a new quota; they are denied until it has decreased:",
            identities,
        );
        text
    }
}

fn section(text: &mut String, title: &str, lines: impl Iterator<Item = String>) {
    let lines: Vec<_> = lines.collect();
    if !lines.is_empty() {
        *text += &format!("{title}\n");
        lines.iter().for_each(|line| *text += &format!("  {line}\n"));
    }
}

fn strings(list: &Value) -> impl Iterator<Item = &str> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str)
}
