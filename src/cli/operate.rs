//! `sluicegate top`, `inspect`, `reset` and `override`: ask a running gateway, and tell it what to do.

mod listener;
mod tables;

use std::io::Write;

use anyhow::bail;
use clap::{Args, Subcommand};
use http::Method;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Map, Value, json};

pub(super) use listener::AdminClient;
pub(super) use tables::format_duration;

/// What can be asked of a running gateway.
#[derive(Debug, Subcommand)]
pub(super) enum AdminCommand {
    /// Show who is being limited now, asking the running gateway
    Top {
        #[command(flatten)]
        target: AdminTarget,
        /// Only by this limit
        #[arg(long, value_name = "NAME")]
        limit: Option<String>,
        /// So many of each limit
        #[arg(long, value_name = "N", default_value_t = 10)]
        count: u64,
    },
    /// Show where an identity stands, without charging it
    Inspect {
        #[command(flatten)]
        target: AdminTarget,
        /// With this limit; otherwise with all that these parts are enough for
        #[arg(long, value_name = "NAME")]
        limit: Option<String>,
        /// What a request costs
        #[arg(long, value_name = "N", default_value_t = 1)]
        cost: u64,
        #[command(flatten)]
        identity: IdentityArgs,
    },
    /// Forget what an identity has used, on all gateways
    Reset {
        #[command(flatten)]
        target: AdminTarget,
        #[command(flatten)]
        limit_identity: LimitIdentity,
    },
    /// Give an identity another quota for a time, on all gateways
    Override {
        #[command(subcommand)]
        action: OverrideCommand,
    },
}

/// What can be done with overrides.
#[derive(Debug, Subcommand)]
pub(super) enum OverrideCommand {
    /// Give an identity another quota for a time
    Set {
        #[command(flatten)]
        target: AdminTarget,
        #[command(flatten)]
        limit_identity: LimitIdentity,
        /// As in the configuration: "600/min"
        #[arg(long, value_name = "QUOTA")]
        quota: String,
        /// Of a token bucket; as much as the quota if it is left out
        #[arg(long, value_name = "N")]
        burst: Option<u64>,
        /// How long: "15m", "12h", "7d"
        #[arg(long = "ttl", value_name = "DURATION")]
        ttl: String,
        /// A word about why
        #[arg(long, value_name = "TEXT")]
        note: Option<String>,
    },
    /// Show all that are in force
    List {
        #[command(flatten)]
        target: AdminTarget,
    },
    /// End one before its time
    Remove {
        #[command(flatten)]
        target: AdminTarget,
        #[command(flatten)]
        limit_identity: LimitIdentity,
    },
}

/// Which gateway, and how its answer is shown.
#[derive(Debug, Args)]
pub(super) struct AdminTarget {
    /// The admin listener, such as http://127.0.0.1:9180; otherwise that of the configuration. The token is in
    /// SLUICEGATE_ADMIN_TOKEN, otherwise in the configuration
    #[arg(long, value_name = "URL")]
    admin: Option<String>,
    /// As a JSON object, for programs
    #[arg(long)]
    json: bool,
}

/// An identity of one limit.
#[derive(Debug, Args)]
pub(super) struct LimitIdentity {
    /// Of this limit
    #[arg(long, value_name = "NAME")]
    limit: String,
    #[command(flatten)]
    identity: IdentityArgs,
}

/// An identity.
#[derive(Debug, Args)]
pub(super) struct IdentityArgs {
    /// A value for each part that the limit is by, such as ip=192.0.2.7 or api-key=CONSUMER; or the hash that `top` shows
    #[arg(required = true, value_name = "PART=VALUE")]
    identity: Vec<String>,
}

impl AdminCommand {
    /// The listener that is named.
    pub(super) fn admin_url(&self) -> Option<&str> {
        self.target().admin.as_deref()
    }

    fn target(&self) -> &AdminTarget {
        match self {
            AdminCommand::Top { target, .. }
            | AdminCommand::Inspect { target, .. }
            | AdminCommand::Reset { target, .. } => target,
            AdminCommand::Override {
                action:
                    OverrideCommand::Set { target: reach, .. }
                    | OverrideCommand::List { target: reach }
                    | OverrideCommand::Remove { target: reach, .. },
            } => reach,
        }
    }
}

impl AdminCommand {
    /// Asks, and shows the answer.
    pub(super) fn run(&self, client: &AdminClient) -> anyhow::Result<()> {
        let response = send_request(self, client)?;
        if self.target().json {
            writeln!(std::io::stdout(), "{}", serde_json::to_string_pretty(&response)?)?;
            return Ok(());
        }
        // Colours on a terminal only, and none where NO_COLOR asks for it.
        let out = &mut anstream::stdout().lock();
        match self {
            AdminCommand::Top { .. } => tables::write_top(&response, out),
            AdminCommand::Inspect { .. } => tables::write_identities(&response, out),
            AdminCommand::Reset { .. } => tables::write_reset(&response, out),
            AdminCommand::Override { action: OverrideCommand::Set { .. } } => {
                tables::write_overrides(&response["override"], out)
            }
            AdminCommand::Override { action: OverrideCommand::List { .. } } => {
                tables::write_override_list(&response, out)
            }
            AdminCommand::Override { action: OverrideCommand::Remove { .. } } => tables::write_removed(&response, out),
        }?;
        Ok(())
    }
}

fn send_request(command: &AdminCommand, client: &AdminClient) -> anyhow::Result<Value> {
    let get = |path: &str, query: &[(&str, &str)]| client.request(Method::GET, &request_target(path, query), None);
    match command {
        AdminCommand::Top { limit, count, .. } => {
            let count = count.to_string();
            let mut query = vec![("count", &*count)];
            query.extend(limit.iter().map(|limit| ("limit", &**limit)));
            get("/api/top", &query)
        }
        AdminCommand::Inspect { limit, cost, identity, .. } => {
            let cost = cost.to_string();
            let mut query = identity.query_pairs()?;
            query.push(("cost", &cost));
            query.extend(limit.iter().map(|limit| ("limit", &**limit)));
            get("/api/identities", &query)
        }
        AdminCommand::Reset { limit_identity, .. } => {
            let body = json!({ "limit": limit_identity.limit, "identity": limit_identity.identity.to_json()? });
            client.request(Method::POST, "/api/reset", Some(&body))
        }
        AdminCommand::Override { action: OverrideCommand::Set { limit_identity, quota, burst, ttl, note, .. } } => {
            let identity = limit_identity.identity.to_json()?;
            let body = json!({
                "limit": limit_identity.limit, "identity": identity, "quota": quota, "burst": burst, "ttl": ttl, "note": note
            });
            client.request(Method::POST, "/api/overrides", Some(&body))
        }
        AdminCommand::Override { action: OverrideCommand::List { .. } } => get("/api/overrides", &[]),
        AdminCommand::Override { action: OverrideCommand::Remove { limit_identity, .. } } => {
            let mut query = limit_identity.identity.query_pairs()?;
            query.push(("limit", &limit_identity.limit));
            client.request(Method::DELETE, &request_target("/api/overrides", &query), None)
        }
    }
}

/// A path with these parameters.
pub(super) fn request_target(path: &str, query: &[(&str, &str)]) -> String {
    let encoded = |text| utf8_percent_encode(text, NON_ALPHANUMERIC);
    let pairs: Vec<_> = query.iter().map(|(name, value)| format!("{}={}", encoded(name), encoded(value))).collect();
    if pairs.is_empty() { path.to_owned() } else { format!("{path}?{}", pairs.join("&")) }
}

impl IdentityArgs {
    fn query_pairs(&self) -> anyhow::Result<Vec<(&str, &str)>> {
        if let [hash] = &self.identity[..]
            && !hash.contains('=')
        {
            return Ok(vec![("identity", hash)]);
        }
        let pair = |part: &str| part.find('=');
        if self.identity.iter().any(|part| pair(part).is_none()) {
            bail!("an identity is a hash, or PART=VALUE for each part: ip=192.0.2.7 api-key=CONSUMER");
        }
        Ok(self.identity.iter().filter_map(|part| part.split_once('=')).collect())
    }

    fn to_json(&self) -> anyhow::Result<Value> {
        let query = self.query_pairs()?;
        Ok(match &query[..] {
            [("identity", hash)] => Value::from(*hash),
            parts => {
                Map::from_iter(parts.iter().map(|(label, value)| ((*label).to_owned(), Value::from(*value)))).into()
            }
        })
    }
}
