//! `sluicegate doctor`: checks the Redis servers, the token issuers, the service accounts and the webhooks of the
//! configuration, and recommends changes.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use anstyle::{AnsiColor, Style};
use clap::Args;
use futures_util::future::join_all;
use serde::Serialize;

use crate::app::access_tokens;
use crate::app::access_tokens::{AccessTokenError, FetchedToken};
use crate::app::maintenance;
use crate::app::maintenance::{FetchedKeys, JwksError};
use crate::app::quota_events;
use crate::app::quota_events::DeliveryError;
use crate::cli::shared::load;
use crate::snapshot::CompiledConfig;
use crate::snapshot::notify::{EventDestination, Webhook};
use crate::snapshot::remote_auth::KeyUrl;
use crate::tools::doctor;
use crate::tools::doctor::{Check, Requirements, ServerReport, Status, examine};
use crate::upstream::settings::UpstreamSettings;

#[derive(Debug, Serialize)]
struct Diagnosis {
    ok: bool,
    servers: Vec<ServerReport>,
    /// The token issuers whose key sets are fetched. In the report, the address of an issuer is the URL of its key set.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    issuers: Vec<ServerReport>,
    /// The token endpoints of service accounts. In the report, the address is the URL of the endpoint.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    token_endpoints: Vec<ServerReport>,
    /// The webhooks of quota events. In the report, the address of a webhook is the host and port of its URL.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    webhooks: Vec<ServerReport>,
}

impl Diagnosis {
    /// Return all reports, with the kinds of their servers.
    fn reports(&self) -> impl Iterator<Item = (&'static str, &ServerReport)> {
        let kinds = [
            ("redis", &self.servers),
            ("token issuer", &self.issuers),
            ("token endpoint", &self.token_endpoints),
            ("webhook", &self.webhooks),
        ];
        kinds.into_iter().flat_map(|(kind, reports)| reports.iter().map(move |report| (kind, report)))
    }
}

/// Check the Redis servers, token issuers, service accounts and webhooks of the configuration, and recommend changes
///
/// The exit code is 1 if a check failed.
#[derive(Debug, Args)]
#[command(after_help = examples![
    "sluicegate doctor",
    "sluicegate doctor --json > report.json",
])]
pub(super) struct Arguments {
    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(arguments: &Arguments, config_path: &Path) -> anyhow::Result<ExitCode> {
    let config = &load(config_path)?;
    let mut servers = Vec::new();
    if let Some((redis, settings)) = &config.store.redis {
        let requirements = Requirements::new(config, settings);
        let tokio_runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        match tokio_runtime.block_on(doctor::resolve_servers(redis)) {
            Ok(redis_servers) => servers
                .extend(redis_servers.iter().map(|server| tokio_runtime.block_on(examine(server, &requirements)))),
            Err(error) => servers.push(ServerReport::unreachable(store_addresses(&config.store.name), &error)),
        }
        // Shut down without waiting for threads of the tokio runtime, because a DNS lookup may still block one of them.
        tokio_runtime.shutdown_background();
    }
    let issuers: Vec<_> = fetch_key_sets(config)?.iter().map(|(source, fetched)| issuer(source, fetched)).collect();
    let token_endpoints: Vec<_> = fetch_access_tokens(config)?.iter().map(token_endpoint).collect();
    let webhooks: Vec<_> = connect_webhooks(config)?.iter().map(webhook_report).collect();
    let mut diagnosis = Diagnosis { ok: true, servers, issuers, token_endpoints, webhooks };
    let has_failed = |(_, report): (_, &ServerReport)| report.checks.iter().any(|check| check.status == Status::Failed);
    let is_ok = !diagnosis.reports().any(has_failed);
    diagnosis.ok = is_ok;
    if arguments.json {
        writeln!(std::io::stdout(), "{}", serde_json::to_string_pretty(&diagnosis)?)?;
    } else {
        if diagnosis.servers.is_empty() {
            writeln!(
                std::io::stdout(),
                "store: {}: the store is not Redis, so there is no server to check",
                config.store.name
            )?;
        }
        if diagnosis.reports().next().is_none() {
            return Ok(ExitCode::SUCCESS);
        }
        // The anstream crate writes colors only to a terminal, and never if NO_COLOR is set.
        write_table(&diagnosis, &mut anstream::stdout().lock())?;
    }
    Ok(if diagnosis.ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A key set, with the result of fetching it.
pub(super) type FetchedKeySet<'c> = (&'c KeyUrl, Result<FetchedKeys, JwksError>);

/// Fetch all key sets of a configuration, as a gateway does.
///
/// # Errors
/// The tokio runtime cannot be started.
pub(super) fn fetch_key_sets(config: &CompiledConfig) -> std::io::Result<Vec<FetchedKeySet<'_>>> {
    let sources = &config.auth.key_urls;
    if sources.is_empty() {
        return Ok(Vec::new());
    }
    let tokio_runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let fetched = tokio_runtime.block_on(join_all(sources.iter().map(maintenance::fetch_keys)));
    // Shut down without waiting for threads of the tokio runtime, because a DNS lookup may still block one of them.
    tokio_runtime.shutdown_background();
    Ok(sources.iter().zip(fetched).collect())
}

fn issuer(source: &KeyUrl, fetched: &Result<FetchedKeys, JwksError>) -> ServerReport {
    let (status, message, advice) = match fetched {
        Ok(fetched) if fetched.skipped.is_empty() => (Status::Ok, maintenance::describe_key_set(fetched), None),
        Ok(fetched) => (Status::Warning, maintenance::describe_key_set(fetched), None),
        Err(error) => (Status::Failed, error.to_string(), Some(error.hint().to_owned())),
    };
    let check = Check { name: "key set", status, message, advice };
    // Do not print the query of the URL, because it may contain a secret.
    let address = source.url.to_string();
    let address = address.split('?').next().unwrap_or_default().to_owned();
    ServerReport { address, checks: vec![check] }
}

/// An upstream with a service account of Google Cloud, with the result of requesting an access token.
pub(super) type RequestedToken<'c> = (&'c UpstreamSettings, Result<FetchedToken, AccessTokenError>);

/// Request an access token for each service account of a configuration, as a gateway does.
///
/// # Errors
/// The tokio runtime cannot be started.
pub(super) fn fetch_access_tokens(config: &CompiledConfig) -> std::io::Result<Vec<RequestedToken<'_>>> {
    let upstreams: Vec<_> = config.upstreams.iter().filter(|upstream| upstream.google.is_some()).collect();
    if upstreams.is_empty() {
        return Ok(Vec::new());
    }
    let tokio_runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let accounts = upstreams.iter().filter_map(|upstream| upstream.google.as_ref());
    let requested = tokio_runtime.block_on(join_all(accounts.map(access_tokens::fetch_token)));
    // Shut down without waiting for threads of the tokio runtime, because a DNS lookup may still block one of them.
    tokio_runtime.shutdown_background();
    Ok(upstreams.into_iter().map(|upstream| &**upstream).zip(requested).collect())
}

fn token_endpoint((upstream, requested): &RequestedToken<'_>) -> ServerReport {
    let account = upstream.google.as_ref().map(|access| &access.account);
    let (status, message, advice) = match requested {
        Ok(FetchedToken { lifetime, skew_s: 0 }) => {
            (Status::Ok, format!("received, valid for {} s", lifetime.as_secs()), None)
        }
        Ok(FetchedToken { skew_s, .. }) => {
            let side = if *skew_s > 0 { "ahead of" } else { "behind" };
            let message =
                format!("received, but the clock of the token endpoint is {} s {side} this clock", skew_s.abs());
            (Status::Warning, message, Some("synchronize the clock of this machine".to_owned()))
        }
        Err(error) => (Status::Failed, error.to_string(), Some(error.hint().to_owned())),
    };
    let check = Check { name: "access token", status, message, advice };
    let url = account.map(|account| account.token_url.to_string()).unwrap_or_default();
    let email = account.map(|account| account.email()).unwrap_or_default();
    ServerReport { address: format!("{url} ({email}, upstream.{})", upstream.name), checks: vec![check] }
}

/// The name of a webhook, with the result of connecting to it.
pub(super) type ConnectedWebhook<'c> = (&'c str, &'c Webhook, Result<(), DeliveryError>);

/// Connect to all webhooks of a configuration, as a gateway does. Send no events.
///
/// # Errors
/// The tokio runtime cannot be started.
pub(super) fn connect_webhooks(config: &CompiledConfig) -> std::io::Result<Vec<ConnectedWebhook<'_>>> {
    let webhooks = config.event_destinations.iter().filter_map(|(name, destination)| match destination {
        EventDestination::Webhook(webhook) => Some((&**name, &**webhook)),
        EventDestination::Stream(_) => None,
    });
    let webhooks: Vec<_> = webhooks.collect();
    if webhooks.is_empty() {
        return Ok(Vec::new());
    }
    let tokio_runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let connecting = join_all(webhooks.iter().map(|(_, webhook)| quota_events::connect(webhook)));
    let connected = tokio_runtime.block_on(connecting);
    // Shut down without waiting for threads of the tokio runtime, because a DNS lookup may still block one of them.
    tokio_runtime.shutdown_background();
    Ok(webhooks.into_iter().zip(connected).map(|((name, webhook), result)| (name, webhook, result)).collect())
}

fn webhook_report((name, webhook, connected): &ConnectedWebhook<'_>) -> ServerReport {
    let (status, message, advice) = match connected {
        Ok(()) => (Status::Ok, "connected; nothing was sent".to_owned(), None),
        Err(error) => (Status::Failed, error.to_string(), Some(error.hint().to_owned())),
    };
    let check = Check { name: "reachable", status, message, advice };
    // Do not print the path of the URL, because it may be a secret.
    let authority = webhook.url.authority();
    ServerReport { address: format!("{authority} (notify.{name})"), checks: vec![check] }
}

/// Return the addresses in the displayed name of a store: the text after ` at `.
fn store_addresses(name: &str) -> &str {
    name.split_once(" at ").map_or(name, |(_, addresses)| addresses)
}

fn write_table(diagnosis: &Diagnosis, out: &mut impl Write) -> std::io::Result<()> {
    for (kind, ServerReport { address, checks }) in diagnosis.reports() {
        writeln!(out, "{kind} at {address}")?;
        let width = checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
        for check in checks {
            let (label, style) = status_style(check.status);
            writeln!(out, "  {style}{label:8}{style:#}  {:width$}  {}", check.name, check.message)?;
            if let Some(advice) = &check.advice {
                writeln!(out, "  {:8}  {:width$}  -> {advice}", "", "")?;
            }
        }
    }
    let count = |status| {
        let checks = diagnosis.reports().flat_map(|(_, report)| &report.checks);
        checks.filter(|check| check.status == status).count()
    };
    let [failed, warnings, skipped] = [Status::Failed, Status::Warning, Status::Skipped].map(count);
    writeln!(out, "{failed} failed, {warnings} with a warning, {skipped} skipped")
}

fn status_style(status: Status) -> (&'static str, Style) {
    let (label, colour) = match status {
        Status::Ok => ("ok", AnsiColor::Green),
        Status::Warning => ("warning", AnsiColor::Yellow),
        Status::Failed => ("failed", AnsiColor::Red),
        Status::Skipped => ("skipped", AnsiColor::Cyan),
    };
    (label, colour.on_default())
}
