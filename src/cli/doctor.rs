//! `sluicegate doctor`: examines the Redis of the configuration and says what to do about what it finds.

use std::io::Write;
use std::process::ExitCode;

use anstyle::{AnsiColor, Style};
use serde::Serialize;

use crate::doctor::{self, Needs, Report, Status, examine};
use crate::limit::redis::RedisSettings;
use crate::runtime::CompiledConfig;

#[derive(Debug, Serialize)]
struct Diagnosis {
    ok: bool,
    servers: Vec<Report>,
}

pub(super) fn doctor(runtime: &CompiledConfig, json: bool) -> anyhow::Result<ExitCode> {
    let mut servers = Vec::new();
    if let Some((redis, settings)) = &runtime.store.redis {
        let needs = needs(runtime, settings);
        let reactor = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        match reactor.block_on(doctor::servers(redis)) {
            Ok(found) => servers.extend(found.iter().map(|server| reactor.block_on(examine(server, &needs)))),
            Err(why) => servers.push(Report::lost(addresses(&runtime.store.name), &why)),
        }
        // A name that is being looked up on a thread of its own is not waited for.
        reactor.shutdown_background();
    }
    let ok = servers.iter().flat_map(|report| &report.checks).all(|check| check.status != Status::Failed);
    let diagnosis = Diagnosis { ok, servers };
    if json {
        writeln!(std::io::stdout(), "{}", serde_json::to_string_pretty(&diagnosis)?)?;
    } else if diagnosis.servers.is_empty() {
        writeln!(std::io::stdout(), "store: {}: there is no Redis to examine", runtime.store.name)?;
    } else {
        // Colours on a terminal only, and none where NO_COLOR asks for it.
        table(&diagnosis, &mut anstream::stdout().lock())?;
    }
    Ok(if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What the gateway needs of the servers of a configuration.
pub(super) fn needs(runtime: &CompiledConfig, settings: &RedisSettings) -> Needs {
    Needs {
        prefix: settings.prefix.clone(),
        timeout: runtime.store.timeout,
        algorithms: settings.algorithms,
        rules: runtime.limits.values().map(|terms| terms.limit.default_variant.rule.clone()).collect(),
        overrides: runtime.admin.as_ref().is_some_and(|admin| admin.token.is_some()),
    }
}

/// What stands behind "at" in the name of a store.
fn addresses(name: &str) -> &str {
    name.split_once(" at ").map_or(name, |(_, addresses)| addresses)
}

fn table(diagnosis: &Diagnosis, out: &mut impl Write) -> std::io::Result<()> {
    for Report { address, checks } in &diagnosis.servers {
        writeln!(out, "redis at {address}")?;
        let width = checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
        for check in checks {
            let (word, style) = look(check.status);
            writeln!(out, "  {style}{word:8}{style:#}  {:width$}  {}", check.name, check.message)?;
            if let Some(advice) = &check.advice {
                writeln!(out, "  {:8}  {:width$}  -> {advice}", "", "")?;
            }
        }
    }
    let count = |status| {
        let checks = diagnosis.servers.iter().flat_map(|report| &report.checks);
        checks.filter(|check| check.status == status).count()
    };
    let [failed, warnings, left_out] = [Status::Failed, Status::Warning, Status::LeftOut].map(count);
    writeln!(out, "{failed} failed, {warnings} with a warning, {left_out} skipped")
}

fn look(status: Status) -> (&'static str, Style) {
    let (word, colour) = match status {
        Status::Ok => ("ok", AnsiColor::Green),
        Status::Warning => ("warning", AnsiColor::Yellow),
        Status::Failed => ("failed", AnsiColor::Red),
        Status::LeftOut => ("skipped", AnsiColor::Cyan),
    };
    (word, colour.on_default())
}
