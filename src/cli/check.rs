//! `sluicegate check`: says whether the configuration can be used, what is odd about it, what a reload would refuse, and what its
//! limits guarantee.

mod guarantee;
mod running;

use std::io::{Write, stdout};
use std::path::Path;
use std::process::ExitCode;

use annotate_snippets::{Level, Renderer};
use clap::Args;
use guarantee::guarantees;
use serde::Serialize;
use tokio::time::Duration;

use super::{BAD_CONFIG, doctor, environment};
use crate::config::Config;
use crate::config::error::{ConfigError, FileIssues, Issue};
use crate::config::file::ParsedFile;
use crate::doctor::{Check, Needs, survey};
use crate::limit::clock;
use crate::limit::redis::connection::try_connect;
use crate::limit::redis::server::ConnectError;
use crate::limit::redis::{RedisDeployment, RedisSettings};
use crate::lint;
use crate::runtime::CompiledConfig;
use crate::words::pluralize;

/// Maximum time for each step of reaching the store. A file can be valid while its store is down.
const PATIENCE: Duration = Duration::from_secs(2);

/// Exit code of `--strict`.
const WARNED: u8 = 1;

/// Checks that warn, each with the address of its server.
type Warnings = Vec<(String, Check)>;

#[derive(Debug, Args)]
pub(super) struct Options {
    /// As a JSON object, for programs
    #[arg(long)]
    json: bool,
    /// Exit code 1 if there are warnings
    #[arg(long)]
    strict: bool,
    /// Connect neither to the store nor to a running gateway
    #[arg(long)]
    offline: bool,
}

/// The object of `--json`.
#[derive(Debug, Serialize)]
struct Report<'a> {
    /// Whether the exit code is 0.
    ok: bool,
    errors: Vec<Finding>,
    warnings: Vec<Finding>,
    notes: Vec<Finding>,
    limits: Vec<guarantee::Guarantee<'a>>,
}

#[derive(Debug, Serialize)]
struct Finding {
    file: String,
    /// From 1; none = the file as a whole.
    line: Option<usize>,
    column: Option<usize>,
    message: String,
    hint: Option<String>,
}

pub(super) fn check(path: &Path, options: &Options) -> anyhow::Result<ExitCode> {
    let loaded = CompiledConfig::load_with_source(path, &environment).and_then(|(runtime, file)| {
        let issues = lint::errors(&file, &runtime);
        if issues.is_empty() {
            return Ok((runtime, file));
        }
        Err(ConfigError { files: vec![FileIssues { path: path.to_owned(), text: file.text, issues }] })
    });
    match loaded {
        Ok((runtime, file)) => examine(path, &runtime, file, options),
        Err(error) if options.json => {
            let errors = error.files.iter().flat_map(findings).collect();
            print(&Report { ok: false, errors, warnings: Vec::new(), notes: Vec::new(), limits: Vec::new() })?;
            Ok(ExitCode::from(BAD_CONFIG))
        }
        Err(error) => Err(error.into()),
    }
}

fn examine(
    path: &Path,
    runtime: &CompiledConfig,
    file: ParsedFile<Config>,
    options: &Options,
) -> anyhow::Result<ExitCode> {
    let ParsedFile { value: written, text, .. } = file;
    let about = |issues| FileIssues { path: path.to_owned(), text: text.clone(), issues };
    let mut warnings = lint::warnings(&written, runtime, Duration::from_micros(clock::unix_us()));
    if let (Some((servers, redis)), false) = (&runtime.store.redis, options.offline) {
        let (url, timeout) = (written.store.url.as_ref(), written.store.timeout.as_ref());
        let url = url.map(|url| url.span());
        match reach(servers, redis, &doctor::needs(runtime, redis))? {
            Err(why) => warnings.push(Issue { span: url, message: format!("store: {why}"), hint: None }),
            Ok(found) => {
                warnings.extend(found.into_iter().map(|(server, Check { name, message: found, advice, .. })| {
                    let span = if name == "round trip" { timeout.map(|timeout| timeout.span()) } else { None };
                    Issue {
                        span: span.or(url.clone()),
                        message: format!("store: {server}: {name}: {found}"),
                        hint: advice,
                    }
                }))
            }
        }
    }
    let mut notes = lint::notes(&written, runtime);
    if !options.offline {
        match running::differences(path, runtime) {
            Ok(keys) => warnings.extend(keys.iter().map(|key| running::refused(key, &written, &text))),
            Err(error) => notes.push(Issue {
                span: written.admin.as_ref().map(|admin| admin.span()),
                message: format!("not compared with the running gateway: {error}"),
                hint: None,
            }),
        }
    }
    let (warnings, notes) = (about(warnings), about(notes));
    let denied = options.strict && !warnings.issues.is_empty();
    if options.json {
        let limits = runtime.limits.values().flat_map(guarantees).collect();
        print(&Report {
            ok: !denied,
            errors: Vec::new(),
            warnings: findings(&warnings),
            notes: findings(&notes),
            limits,
        })?;
    } else {
        describe(path, runtime, &[(Level::NOTE, &notes), (Level::WARNING, &warnings)])?;
    }
    Ok(if denied { ExitCode::from(WARNED) } else { ExitCode::SUCCESS })
}

fn print(report: &Report<'_>) -> anyhow::Result<()> {
    writeln!(stdout(), "{}", serde_json::to_string_pretty(report)?)?;
    Ok(())
}

fn findings(file: &FileIssues) -> Vec<Finding> {
    let issues = file.redacted_issues().into_iter().map(|issue| {
        let (line, column) = issue.position(&file.text).unzip();
        let name = file.display_path();
        Finding { file: name, line, column, message: issue.message, hint: issue.hint }
    });
    issues.collect()
}

fn describe(path: &Path, runtime: &CompiledConfig, said: &[(Level<'_>, &FileIssues)]) -> std::io::Result<()> {
    // Colours on a terminal only, and none where NO_COLOR asks for it.
    let mut out = anstream::stdout().lock();
    writeln!(
        out,
        "{}: fine: {}, {}, {}, {}; store: {}",
        path.display(),
        pluralize(runtime.listeners.len() as u64, "listener"),
        pluralize(runtime.routes.len() as u64, "route"),
        pluralize(runtime.limits.len() as u64, "limit"),
        pluralize(runtime.upstreams.len() as u64, "upstream"),
        runtime.store.name,
    )?;
    for guarantee in runtime.limits.values().flat_map(guarantees) {
        writeln!(out, "  {}", guarantee.text())?;
    }
    for (level, file) in said.iter().filter(|(_, file)| !file.issues.is_empty()) {
        writeln!(out, "\n{}", file.report(level, &Renderer::styled()))?;
    }
    let warnings: usize =
        said.iter().filter(|(level, _)| *level == Level::WARNING).map(|(_, file)| file.issues.len()).sum();
    if warnings > 0 {
        writeln!(out, "\n{}", pluralize(warnings as u64, "warning"))?;
    }
    Ok(())
}

/// Connect to the store as a gateway does. Return what `sluicegate doctor` would warn of, with the address of each server; or
/// why a gateway cannot use the store.
fn reach(servers: &RedisDeployment, redis: &RedisSettings, needs: &Needs) -> std::io::Result<Result<Warnings, String>> {
    let reactor = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let answer = reactor.block_on(async {
        let mut found = Vec::new();
        for (server, _) in servers.masters(PATIENCE).await? {
            let surveyed = survey(&server, needs).await;
            // Connecting takes several round trips: a store that answers late is not silent.
            let within = if surveyed.is_ok() { 5 * PATIENCE } else { PATIENCE };
            try_connect(server.clone(), redis.algorithms, within).await?;
            let address = server.client(PATIENCE).await?.get_connection_info().addr().to_string();
            found.extend(surveyed?.into_iter().map(|check| (address.clone(), check)));
        }
        Ok(found)
    });
    // A name that is being looked up on a thread of its own is not waited for.
    reactor.shutdown_background();
    Ok(answer.map_err(|why: ConnectError| why.to_string()))
}
