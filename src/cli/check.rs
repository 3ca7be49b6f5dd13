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

use super::{EXIT_INVALID_CONFIG, doctor, env_var};
use crate::config::Config;
use crate::config::error::{ConfigError, FileIssues, Issue};
use crate::config::file::ParsedFile;
use crate::doctor::{Check, Requirements, check_basics};
use crate::limit::clock;
use crate::limit::redis::connection::try_connect;
use crate::limit::redis::server::ConnectError;
use crate::limit::redis::{RedisDeployment, RedisSettings};
use crate::lint;
use crate::runtime::CompiledConfig;
use crate::words::pluralize;

/// Maximum time for each step of reaching the store. A file can be valid while its store is down.
const STORE_CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Exit code of `--strict`.
const EXIT_WARNINGS: u8 = 1;

/// Checks that warn, each with the address of its server.
type ServerWarnings = Vec<(String, Check)>;

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
struct CheckReport<'a> {
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

pub(super) fn run(path: &Path, options: &Options) -> anyhow::Result<ExitCode> {
    let loaded = CompiledConfig::load_with_source(path, &env_var).and_then(|(config, file)| {
        let issues = lint::errors(&file, &config);
        if issues.is_empty() {
            return Ok((config, file));
        }
        Err(ConfigError { files: vec![FileIssues { path: path.to_owned(), text: file.text, issues }] })
    });
    match loaded {
        Ok((config, file)) => check_loaded(path, &config, file, options),
        Err(error) if options.json => {
            let errors = error.files.iter().flat_map(findings).collect();
            print_json(&CheckReport {
                ok: false,
                errors,
                warnings: Vec::new(),
                notes: Vec::new(),
                limits: Vec::new(),
            })?;
            Ok(ExitCode::from(EXIT_INVALID_CONFIG))
        }
        Err(error) => Err(error.into()),
    }
}

fn check_loaded(
    path: &Path,
    config: &CompiledConfig,
    file: ParsedFile<Config>,
    options: &Options,
) -> anyhow::Result<ExitCode> {
    let ParsedFile { value: parsed, text, .. } = file;
    let file_issues = |issues| FileIssues { path: path.to_owned(), text: text.clone(), issues };
    let mut warnings = lint::warnings(&parsed, config, Duration::from_micros(clock::unix_us()));
    if let (Some((servers, redis)), false) = (&config.store.redis, options.offline) {
        let (url, timeout) = (parsed.store.url.as_ref(), parsed.store.timeout.as_ref());
        let url = url.map(|url| url.span());
        match check_store(servers, redis, &doctor::requirements(config, redis))? {
            Err(error) => warnings.push(Issue { span: url, message: format!("store: {error}"), hint: None }),
            Ok(server_warnings) => {
                warnings.extend(server_warnings.into_iter().map(|(server, Check { name, message, advice, .. })| {
                    let span = if name == "round trip" { timeout.map(|timeout| timeout.span()) } else { None };
                    Issue {
                        span: span.or(url.clone()),
                        message: format!("store: {server}: {name}: {message}"),
                        hint: advice,
                    }
                }))
            }
        }
    }
    let mut notes = lint::notes(&parsed, config);
    if !options.offline {
        match running::restart_only_differences(path, config) {
            Ok(keys) => warnings.extend(keys.iter().map(|key| running::restart_required_warning(key, &parsed, &text))),
            Err(error) => notes.push(Issue {
                span: parsed.admin.as_ref().map(|admin| admin.span()),
                message: format!("not compared with the running gateway: {error}"),
                hint: None,
            }),
        }
    }
    let (warnings, notes) = (file_issues(warnings), file_issues(notes));
    let is_strict_failure = options.strict && !warnings.issues.is_empty();
    if options.json {
        let limits = config.limits.values().flat_map(guarantees).collect();
        print_json(&CheckReport {
            ok: !is_strict_failure,
            errors: Vec::new(),
            warnings: findings(&warnings),
            notes: findings(&notes),
            limits,
        })?;
    } else {
        print_text(path, config, &[(Level::NOTE, &notes), (Level::WARNING, &warnings)])?;
    }
    Ok(if is_strict_failure { ExitCode::from(EXIT_WARNINGS) } else { ExitCode::SUCCESS })
}

fn print_json(report: &CheckReport<'_>) -> anyhow::Result<()> {
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

fn print_text(
    path: &Path,
    config: &CompiledConfig,
    issues_by_level: &[(Level<'_>, &FileIssues)],
) -> std::io::Result<()> {
    // Colours on a terminal only, and none where NO_COLOR asks for it.
    let mut out = anstream::stdout().lock();
    writeln!(
        out,
        "{}: fine: {}, {}, {}, {}; store: {}",
        path.display(),
        pluralize(config.listeners.len() as u64, "listener"),
        pluralize(config.routes.len() as u64, "route"),
        pluralize(config.limits.len() as u64, "limit"),
        pluralize(config.upstreams.len() as u64, "upstream"),
        config.store.name,
    )?;
    for guarantee in config.limits.values().flat_map(guarantees) {
        writeln!(out, "  {}", guarantee.text())?;
    }
    for (level, file) in issues_by_level.iter().filter(|(_, file)| !file.issues.is_empty()) {
        writeln!(out, "\n{}", file.report(level, &Renderer::styled()))?;
    }
    let warnings: usize =
        issues_by_level.iter().filter(|(level, _)| *level == Level::WARNING).map(|(_, file)| file.issues.len()).sum();
    if warnings > 0 {
        writeln!(out, "\n{}", pluralize(warnings as u64, "warning"))?;
    }
    Ok(())
}

/// Connect to the store as a gateway does. Return what `sluicegate doctor` would warn of, with the address of each server; or
/// why a gateway cannot use the store.
fn check_store(
    servers: &RedisDeployment,
    redis: &RedisSettings,
    requirements: &Requirements,
) -> std::io::Result<Result<ServerWarnings, String>> {
    let tokio_runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let result = tokio_runtime.block_on(async {
        let mut warnings = Vec::new();
        for (server, _) in servers.masters(STORE_CONNECT_TIMEOUT).await? {
            let survey_result = check_basics(&server, requirements).await;
            // Connecting takes several round trips: a store that answers late is not silent.
            let timeout = if survey_result.is_ok() { 5 * STORE_CONNECT_TIMEOUT } else { STORE_CONNECT_TIMEOUT };
            try_connect(server.clone(), redis.algorithms, timeout).await?;
            let address = server.client(STORE_CONNECT_TIMEOUT).await?.get_connection_info().addr().to_string();
            warnings.extend(survey_result?.into_iter().map(|check| (address.clone(), check)));
        }
        Ok(warnings)
    });
    // A name that is being looked up on a thread of its own is not waited for.
    tokio_runtime.shutdown_background();
    Ok(result.map_err(|error: ConnectError| error.to_string()))
}
