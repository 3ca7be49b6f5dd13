//! `sluicegate check --against`: compares a configuration with the configuration of the running gateway.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;

use http::Method;
use serde::Serialize;
use serde_json::Value;
use uuid::Uuid;

use crate::app::listen;
use crate::cli::admin::client::AdminClient;
use crate::cli::admin::{format_parts, request_target};
use crate::config::diff;
use crate::config::diff::Difference;
use crate::identity::auth::TierSource;
use crate::identity::consumer::{Caller, ConsumerDirectory};
use crate::identity::display::IdentityInput;
use crate::snapshot::CompiledConfig;
use crate::snapshot::limits::CompiledLimit;

/// Maximum number of identities in the report.
const MAX_IDENTITIES: usize = 20;

/// Maximum number of consumers per limit whose usage is read. Reading the usage of one consumer takes one request to
/// the admin API.
const MAX_REQUESTS: usize = 500;

/// The changes that the running gateway would make if it reloaded this configuration.
#[derive(Debug, Serialize)]
pub(super) struct Comparison {
    /// The differences between the two configurations, as text.
    changes: Vec<String>,
    /// Changed keys that take effect only after a restart. A reload that changes them is rejected.
    restart: Vec<String>,
    /// One message for each new listener address that cannot be bound while the gateway runs. The message contains the
    /// reason.
    pub(super) unavailable: Vec<String>,
    /// Identities that the running gateway knows and that have used more than their new quota.
    over_quota: Vec<OverQuota>,
}

/// An identity that has used more than its new quota.
#[derive(Debug, Serialize)]
struct OverQuota {
    limit: String,
    /// The name of the consumer, or the parts of the identity with the hash of the identity.
    identity: String,
    used: u64,
    /// Maximum usage that the new quota allows at once.
    capacity: u64,
    /// The new quota.
    quota: String,
}

/// Compare `config` with the configuration of the gateway at `admin`, which is an admin socket or a URL. If `admin` is
/// empty, find the running gateway with [`AdminClient::find`].
///
/// # Errors
/// No gateway is found, or the gateway returns an unexpected response.
pub(super) fn compare(path: &Path, config: &CompiledConfig, admin: &str) -> anyhow::Result<Comparison> {
    let client = AdminClient::find(path, Some(admin).filter(|admin| !admin.is_empty()))?;
    let running = client.request(Method::GET, "/api/config", None)?;
    let own_config = config.redacted();
    let differences = diff::differences(&running["configuration"], &own_config);
    let restart = restart_only_keys(&client, config)?;
    let used: Vec<SocketAddr> = strings(&running["addresses"]).filter_map(|text| text.parse().ok()).collect();
    let own = config.listeners.iter().filter_map(|listener| listener.address.tcp());
    let own = own.chain(config.admin.iter().map(|admin| admin.address));
    let unavailable = own.filter(|address| !used.contains(address)).filter_map(|address| {
        let error = listen::probe(address).err()?;
        Some(format!("cannot listen on {address} while the gateway runs: {error}"))
    });
    let unavailable = unavailable.collect();
    let over_quota = Quotas { client: &client, config, consumers: config.auth.consumers() }.over_quota(
        &running["configuration"],
        &own_config,
        &differences,
    );
    Ok(Comparison { changes: differences.iter().map(ToString::to_string).collect(), restart, unavailable, over_quota })
}

/// The data to compare usage with the new quotas: the new configuration, and a client of the running gateway, which
/// still applies the old quotas.
struct Quotas<'a> {
    client: &'a AdminClient,
    config: &'a CompiledConfig,
    /// The consumers that the new configuration defines.
    consumers: ConsumerDirectory,
}

/// An identity that the running gateway knows.
struct KnownIdentity {
    /// The name of the consumer, or the parts of the identity with the hash of the identity.
    display: String,
    /// The parts of the identity. `None` if the gateway hides one of them.
    parts: Option<Vec<(String, String)>>,
    /// The hash of the identity. `None` if only its parts are known.
    hash: Option<String>,
    /// Name of the consumer, if an API key is a part of the identity.
    consumer: Option<String>,
    /// Whether the identity is the client network of requests without an API key.
    is_anonymous: bool,
}

/// The usage of an identity in the running gateway.
struct Usage {
    /// An element of `limits` in a response of `/api/identities`.
    status: Value,
    /// Whether the gateway computed the usage with the default quota of the limit. The gateway does so for a request by
    /// hash, because a hash does not show the consumer or tier of an identity.
    is_of_default_quota: bool,
}

impl Quotas<'_> {
    /// Find the identities that have used more than their new quota, among the consumers and the top denied identities.
    fn over_quota(&self, old: &Value, new: &Value, differences: &[Difference]) -> Vec<OverQuota> {
        let is_changed = |limit: &str| {
            differences
                .iter()
                .any(|difference| difference.table == "limit" && difference.name.as_deref() == Some(limit))
        };
        let mut found = Vec::new();
        for compiled in self.config.limits.values() {
            let name = &*compiled.limit.name;
            let old = &old["limit"][name];
            let new = &new["limit"][name];
            // Skip a new limit and a limit whose `by` has changed, because their counters start at zero.
            if old.is_null() || parts(&old["by"]) != parts(&new["by"]) || self.has_unknown_tiers(compiled) {
                continue;
            }
            let mut known = Vec::new();
            // Compare the usage of consumers even if the limit itself is unchanged, because the consumers file may set
            // other quotas for them.
            if is_changed(name) || self.has_own_quotas(compiled) {
                known.extend(self.known_consumers(compiled));
            }
            if is_changed(name) {
                known.extend(self.denied_identities(compiled));
            }
            found.extend(known.iter().filter_map(|identity| self.exceeds(compiled, identity)));
        }
        found.sort_by_key(|over| std::cmp::Reverse(over.used));
        let mut seen = BTreeSet::new();
        found.retain(|over| seen.insert((over.limit.clone(), over.identity.clone())));
        found.truncate(MAX_IDENTITIES);
        found
    }

    /// Return whether a consumer may have a quota other than the default quota of the limit.
    fn has_own_quotas(&self, compiled: &CompiledLimit) -> bool {
        let name = &compiled.limit.name;
        !compiled.limit.tiers.is_empty() || self.consumers.iter().any(|consumer| consumer.variants.contains_key(name))
    }

    /// Return whether the tier of an identity comes from a JWT or an authentication server. This command has no JWT and
    /// does not call the server, so it cannot determine the quota.
    fn has_unknown_tiers(&self, compiled: &CompiledLimit) -> bool {
        !compiled.limit.tiers.is_empty() && self.config.auth.tier_source != TierSource::ApiKey
    }

    /// Return the consumers that a limit counts, if the limit's `by` is only the API key.
    fn known_consumers(&self, compiled: &CompiledLimit) -> Vec<KnownIdentity> {
        // Remove duplicates: a consumer is repeated for each of its keys.
        let names: BTreeSet<_> = self.consumers.iter().map(|consumer| consumer.name.to_string()).collect();
        let is_limited = |name: &String| {
            let input = IdentityInput::from([("api-key".to_owned(), name.clone())]);
            let CompiledConfig { client_ip, hasher, .. } = self.config;
            let resolved = compiled.identity_spec.resolve(&input, client_ip, &self.consumers, hasher);
            resolved.is_ok_and(|resolved| !resolved.is_exempt)
        };
        let identity = |name: String| KnownIdentity {
            display: format!("api-key={name}"),
            parts: Some(vec![("api-key".to_owned(), name.clone())]),
            hash: None,
            consumer: Some(name),
            is_anonymous: false,
        };
        names.into_iter().filter(is_limited).take(MAX_REQUESTS).map(identity).collect()
    }

    /// Return the top denied identities of a limit.
    fn denied_identities(&self, compiled: &CompiledLimit) -> Vec<KnownIdentity> {
        let target = request_target("/api/top", &[("limit", &*compiled.limit.name), ("count", "96")]);
        let top = self.client.request(Method::GET, &target, None).unwrap_or_default();
        let entries = top["limits"].as_array().into_iter().flatten().flat_map(|limit| limit["identities"].as_array());
        let identity = |entry: &Value| {
            let hash = entry["identity"].as_str().unwrap_or_default();
            let named = &entry["parts"];
            let pair = |(label, value): (&String, &Value)| Some((label.clone(), value.as_str()?.to_owned()));
            let parts: Option<Vec<_>> = named.as_object().and_then(|named| named.iter().map(pair).collect());
            let is_consumer = matches!(parts.as_deref(), Some([(label, _)]) if label == "api-key");
            let suffix = if is_consumer { String::new() } else { format!(" ({hash})") };
            KnownIdentity {
                display: format_parts(named) + &suffix,
                parts,
                hash: Some(hash.to_owned()),
                consumer: named["api-key"].as_str().map(str::to_owned),
                is_anonymous: named["anonymous"].is_string(),
            }
        };
        entries.flatten().map(identity).collect()
    }

    /// Return the usage of an identity. Return `None` if the running gateway does not know the identity, such as a new
    /// consumer.
    fn usage(&self, compiled: &CompiledLimit, identity: &KnownIdentity) -> Option<Usage> {
        let by_parts = identity.parts.as_ref().and_then(|parts| self.status(compiled, parts));
        // Also compare the hashes, because the admin API may truncate the parts of an identity. Truncated parts would
        // select another identity.
        let is_same =
            |status: &Value| identity.hash.is_none() || status["identity"].as_str() == identity.hash.as_deref();
        if let Some(status) = by_parts.filter(is_same) {
            return Some(Usage { status, is_of_default_quota: false });
        }
        let status = self.status(compiled, &[("identity".to_owned(), identity.hash.clone()?)])?;
        Some(Usage { status, is_of_default_quota: true })
    }

    fn status(&self, compiled: &CompiledLimit, query: &[(String, String)]) -> Option<Value> {
        let limit = ("limit", &*compiled.limit.name);
        let pairs: Vec<_> = query.iter().map(|(name, value)| (&**name, &**value)).chain([limit]).collect();
        let mut response = self.client.request(Method::GET, &request_target("/api/identities", &pairs), None).ok()?;
        Some(response["limits"][0].take()).filter(Value::is_object)
    }

    /// Return the identity if its usage exceeds its new quota. Return `None` if the algorithm or window of the limit
    /// changes, because the counters then start at zero.
    fn exceeds(&self, compiled: &CompiledLimit, identity: &KnownIdentity) -> Option<OverQuota> {
        let Usage { status, is_of_default_quota } = self.usage(compiled, identity)?;
        // Skip an identity with an override, because the override stays active after a reload.
        if status["override"].is_object() {
            return None;
        }
        let caller = match (&identity.consumer, identity.is_anonymous) {
            // Skip a consumer that was removed from the configuration: its requests will be rejected, so no quota
            // applies.
            (Some(name), _) => Caller::Consumer(self.consumers.find_by_name(name)?.clone()),
            (None, true) => Caller::Anonymous,
            (None, false) => Caller::Missing,
        };
        if is_of_default_quota && caller != Caller::Missing && self.has_own_quotas(compiled) {
            return None;
        }
        let variant = caller.variant(&compiled.limit);
        let quota = variant.quota.to_string();
        let capacity = variant.rule.capacity();
        let old_quota = status["quota"].as_str()?;
        let old_capacity = status["capacity"].as_u64()?;
        let window = |quota: &str| quota.split_once('/').map(|(_, window)| window.to_owned());
        let is_same_state =
            window(old_quota) == window(&quota) && status["algorithm"].as_str()? == variant.rule.algorithm_name();
        let is_new = old_quota != quota || old_capacity != capacity;
        let used = old_capacity.saturating_sub(status["remaining"].as_u64()?);
        (is_same_state && is_new && used > capacity).then(|| OverQuota {
            limit: compiled.limit.name.to_string(),
            identity: identity.display.clone(),
            used,
            capacity,
            quota,
        })
    }
}

/// Return `by` of a limit as a list. In the JSON, a `by` with a single part may be a string instead of a list.
fn parts(by: &Value) -> Vec<&Value> {
    by.as_array().map_or_else(|| vec![by], |parts| parts.iter().collect())
}

impl Comparison {
    /// Return the comparison as text.
    pub(super) fn text(&self) -> String {
        let Comparison { changes, restart, unavailable, over_quota } = self;
        let mut text = String::new();
        if changes.is_empty() && restart.is_empty() {
            text += "all keys have the same values as in the running gateway; secrets and the content of other files \
                     are not compared\n";
        }
        section(&mut text, "differences from the running gateway:", changes.iter().cloned());
        section(&mut text, "changed keys that need a restart (a reload would be rejected):", restart.iter().cloned());
        section(&mut text, "a restart would fail:", unavailable.iter().cloned());
        let identities = over_quota.iter().map(|over| {
            let OverQuota { limit, identity, used, capacity, quota } = over;
            format!("limit `{limit}`: {identity} has used {used}, but the new quota {quota} admits at most {capacity}")
        });
        section(
            &mut text,
            "identities whose usage exceeds a new quota; their requests are denied until the usage has decreased:",
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

/// Return the keys that only a restart can change and whose values differ from those of the gateway behind `client`.
///
/// # Errors
/// The gateway does not respond, or its response is unexpected.
fn restart_only_keys(client: &AdminClient, config: &CompiledConfig) -> anyhow::Result<Vec<String>> {
    Ok(restart_keys(&client.request(Method::GET, &restart_query(config), None)?))
}

pub(super) fn restart_query(config: &CompiledConfig) -> String {
    let salt = Uuid::new_v4().to_string();
    let mut query: Vec<_> = config.restart_only_digests(&salt).into_iter().collect();
    query.push(("salt".to_owned(), salt));
    let query: Vec<_> = query.iter().map(|(name, value)| (&**name, &**value)).collect();
    request_target("/api/differences", &query)
}

pub(super) fn restart_keys(response: &Value) -> Vec<String> {
    let keys = response["restart"].as_array().into_iter().flatten();
    keys.filter_map(Value::as_str).map(str::to_owned).collect()
}
