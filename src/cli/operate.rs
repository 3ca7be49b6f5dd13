//! `sluicegate top`, `inspect`, `reset` and `override`: ask a running gateway, and tell it what to do.

mod listener;
mod tables;

use std::io::Write;

use anyhow::bail;
use clap::{Args, Subcommand};
use http::Method;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Map, Value, json};

pub(super) use listener::Listener;
pub(super) use tables::spelled;

/// What can be asked of a running gateway.
#[derive(Debug, Subcommand)]
pub(super) enum Operate {
    /// Show who is being limited now, asking the running gateway
    Top {
        #[command(flatten)]
        reach: Reach,
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
        reach: Reach,
        /// With this limit; otherwise with all that these parts are enough for
        #[arg(long, value_name = "NAME")]
        limit: Option<String>,
        /// What a request costs
        #[arg(long, value_name = "N", default_value_t = 1)]
        cost: u64,
        #[command(flatten)]
        identity: Identity,
    },
    /// Forget what an identity has used, on all gateways
    Reset {
        #[command(flatten)]
        reach: Reach,
        #[command(flatten)]
        whose: Whose,
    },
    /// Give an identity another quota for a time, on all gateways
    Override {
        #[command(subcommand)]
        what: Override,
    },
}

/// What can be done with overrides.
#[derive(Debug, Subcommand)]
pub(super) enum Override {
    /// Give an identity another quota for a time
    Set {
        #[command(flatten)]
        reach: Reach,
        #[command(flatten)]
        whose: Whose,
        /// As in the configuration: "600/min"
        #[arg(long, value_name = "QUOTA")]
        quota: String,
        /// Of a token bucket; as much as the quota if it is left out
        #[arg(long, value_name = "N")]
        burst: Option<u64>,
        /// How long: "15m", "12h", "7d"
        #[arg(long = "ttl", value_name = "DURATION")]
        lasts: String,
        /// A word about why
        #[arg(long, value_name = "TEXT")]
        note: Option<String>,
    },
    /// Show all that are in force
    List {
        #[command(flatten)]
        reach: Reach,
    },
    /// End one before its time
    Remove {
        #[command(flatten)]
        reach: Reach,
        #[command(flatten)]
        whose: Whose,
    },
}

/// Which gateway, and how its answer is shown.
#[derive(Debug, Args)]
pub(super) struct Reach {
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
pub(super) struct Whose {
    /// Of this limit
    #[arg(long, value_name = "NAME")]
    limit: String,
    #[command(flatten)]
    identity: Identity,
}

/// An identity.
#[derive(Debug, Args)]
pub(super) struct Identity {
    /// A value for each part that the limit is by, such as ip=192.0.2.7 or api-key=CONSUMER; or the hash that `top` shows
    #[arg(required = true, value_name = "PART=VALUE")]
    identity: Vec<String>,
}

impl Operate {
    /// The listener that is named.
    pub(super) fn admin(&self) -> Option<&str> {
        self.reach().admin.as_deref()
    }

    fn reach(&self) -> &Reach {
        match self {
            Operate::Top { reach, .. } | Operate::Inspect { reach, .. } | Operate::Reset { reach, .. } => reach,
            Operate::Override {
                what: Override::Set { reach, .. } | Override::List { reach } | Override::Remove { reach, .. },
            } => reach,
        }
    }
}

impl Operate {
    /// Asks, and shows the answer.
    pub(super) fn carry_out(&self, listener: &Listener) -> anyhow::Result<()> {
        let answer = ask(self, listener)?;
        if self.reach().json {
            writeln!(std::io::stdout(), "{}", serde_json::to_string_pretty(&answer)?)?;
            return Ok(());
        }
        // Colours on a terminal only, and none where NO_COLOR asks for it.
        let out = &mut anstream::stdout().lock();
        match self {
            Operate::Top { .. } => tables::top(&answer, out),
            Operate::Inspect { .. } => tables::standings(&answer, out),
            Operate::Reset { .. } => tables::reset(&answer, out),
            Operate::Override { what: Override::Set { .. } } => tables::overrides(&answer["override"], out),
            Operate::Override { what: Override::List { .. } } => tables::all_overrides(&answer, out),
            Operate::Override { what: Override::Remove { .. } } => tables::removed(&answer, out),
        }?;
        Ok(())
    }
}

fn ask(operate: &Operate, listener: &Listener) -> anyhow::Result<Value> {
    let get = |path: &str, query: &[(&str, &str)]| listener.ask(Method::GET, &target(path, query), None);
    match operate {
        Operate::Top { limit, count, .. } => {
            let count = count.to_string();
            let mut query = vec![("count", &*count)];
            query.extend(limit.iter().map(|limit| ("limit", &**limit)));
            get("/api/top", &query)
        }
        Operate::Inspect { limit, cost, identity, .. } => {
            let cost = cost.to_string();
            let mut query = identity.query()?;
            query.push(("cost", &cost));
            query.extend(limit.iter().map(|limit| ("limit", &**limit)));
            get("/api/identities", &query)
        }
        Operate::Reset { whose, .. } => {
            let body = json!({ "limit": whose.limit, "identity": whose.identity.json()? });
            listener.ask(Method::POST, "/api/reset", Some(&body))
        }
        Operate::Override { what: Override::Set { whose, quota, burst, lasts, note, .. } } => {
            let identity = whose.identity.json()?;
            let body = json!({
                "limit": whose.limit, "identity": identity, "quota": quota, "burst": burst, "ttl": lasts, "note": note
            });
            listener.ask(Method::POST, "/api/overrides", Some(&body))
        }
        Operate::Override { what: Override::List { .. } } => get("/api/overrides", &[]),
        Operate::Override { what: Override::Remove { whose, .. } } => {
            let mut query = whose.identity.query()?;
            query.push(("limit", &whose.limit));
            listener.ask(Method::DELETE, &target("/api/overrides", &query), None)
        }
    }
}

/// A path with these parameters.
pub(super) fn target(path: &str, query: &[(&str, &str)]) -> String {
    let encoded = |text| utf8_percent_encode(text, NON_ALPHANUMERIC);
    let pairs: Vec<_> = query.iter().map(|(name, value)| format!("{}={}", encoded(name), encoded(value))).collect();
    if pairs.is_empty() { path.to_owned() } else { format!("{path}?{}", pairs.join("&")) }
}

impl Identity {
    fn query(&self) -> anyhow::Result<Vec<(&str, &str)>> {
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

    fn json(&self) -> anyhow::Result<Value> {
        let query = self.query()?;
        Ok(match &query[..] {
            [("identity", hash)] => Value::from(*hash),
            parts => Map::from_iter(parts.iter().map(|(word, value)| ((*word).to_owned(), Value::from(*value)))).into(),
        })
    }
}
