//! `sluicegate doctor`: checks the Redis servers of the configuration and advises what to change.

use std::io::Write;
use std::process::ExitCode;

use anstyle::{AnsiColor, Style};
use serde::Serialize;

use crate::limiter::redis::RedisSettings;
use crate::snapshot::CompiledConfig;
use crate::tools::doctor;
use crate::tools::doctor::{Requirements, ServerReport, Status, examine};

#[derive(Debug, Serialize)]
struct Diagnosis {
    ok: bool,
    servers: Vec<ServerReport>,
}

pub(super) fn run(config: &CompiledConfig, json: bool) -> anyhow::Result<ExitCode> {
    let mut servers = Vec::new();
    if let Some((redis, settings)) = &config.store.redis {
        let requirements = requirements(config, settings);
        let tokio_runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        match tokio_runtime.block_on(doctor::resolve_servers(redis)) {
            Ok(redis_servers) => servers
                .extend(redis_servers.iter().map(|server| tokio_runtime.block_on(examine(server, &requirements)))),
            Err(error) => servers.push(ServerReport::unreachable(store_addresses(&config.store.name), &error)),
        }
        // Do not wait for a blocking DNS lookup.
        tokio_runtime.shutdown_background();
    }
    let ok = servers.iter().flat_map(|report| &report.checks).all(|check| check.status != Status::Failed);
    let diagnosis = Diagnosis { ok, servers };
    if json {
        writeln!(std::io::stdout(), "{}", serde_json::to_string_pretty(&diagnosis)?)?;
    } else if diagnosis.servers.is_empty() {
        writeln!(std::io::stdout(), "store: {}: there is no Redis to examine", config.store.name)?;
    } else {
        // anstream writes colors only to a terminal, and not if NO_COLOR is set.
        write_table(&diagnosis, &mut anstream::stdout().lock())?;
    }
    Ok(if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What a configuration requires of its servers.
pub(super) fn requirements(config: &CompiledConfig, settings: &RedisSettings) -> Requirements {
    Requirements {
        prefix: settings.prefix.clone(),
        timeout: config.store.timeout,
        algorithms: settings.algorithms,
        rules: config.limits.values().map(|compiled| compiled.limit.default_variant.rule.clone()).collect(),
        can_set_overrides: config.admin.as_ref().is_some_and(|admin| admin.token.is_some()),
    }
}

/// The addresses in the name of a store: the part after ` at `.
fn store_addresses(name: &str) -> &str {
    name.split_once(" at ").map_or(name, |(_, addresses)| addresses)
}

fn write_table(diagnosis: &Diagnosis, out: &mut impl Write) -> std::io::Result<()> {
    for ServerReport { address, checks } in &diagnosis.servers {
        writeln!(out, "redis at {address}")?;
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
        let checks = diagnosis.servers.iter().flat_map(|report| &report.checks);
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
