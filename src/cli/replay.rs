//! `sluicegate replay`: replays access logs against the configured or proposed limits.

use std::io::{IsTerminal, Write, stderr, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};

use crate::cli::shared::{EXIT_INVALID_CONFIG, is_broken_pipe};
use crate::config::error::ConfigError;
use crate::snapshot::CompiledConfig;
use crate::tools::replay::report::{ReplayReport, html, to_json};
use crate::tools::replay::resolve::IdentityField;
use crate::tools::replay::simulator::QuotaProposal;
use crate::tools::replay::{LogInput, ReadProgress, Replay, ReplayObserver, ReplayOptions, file_size, report};

/// Exit code for logs that cannot be read, and for arguments that contradict the configuration.
const EXIT_INVALID_INPUT: u8 = EXIT_INVALID_CONFIG;

/// Interval between frames of the spinner.
const SPINNER_INTERVAL: Duration = Duration::from_millis(100);

pub(super) fn run(arguments: &Arguments, config_path: &Path) -> anyhow::Result<ExitCode> {
    let proposals: Vec<_> = arguments.limits.iter().map(|argument| argument.0.clone()).collect();
    let config = load_config(arguments, config_path, &proposals).inspect_err(|_| {
        if arguments.by.is_empty() && !config_path.exists() {
            anstream::eprintln!("to replay without a configuration, use: replay LOG --by ip --limit per-ip=600/min");
        }
    })?;
    match run_replay(arguments, config, proposals) {
        Ok(code) => Ok(code),
        Err(error) if is_broken_pipe(&error) => Err(error),
        Err(error) => {
            anstream::eprintln!("sluicegate replay: {error:#}");
            Ok(ExitCode::from(EXIT_INVALID_INPUT))
        }
    }
}

fn run_replay(
    arguments: &Arguments,
    config: CompiledConfig,
    proposals: Vec<QuotaProposal>,
) -> anyhow::Result<ExitCode> {
    let progress = ReadProgress::default();
    let open = |path: &PathBuf| LogInput::open(path, &progress).with_context(|| format!("{}", path.display()));
    let sources = arguments.logs.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    let names = sources.iter().map(|source| source.name().to_owned()).collect();
    let target = (!arguments.no_suggest).then_some(arguments.target.0);
    let options = ReplayOptions {
        format: arguments.format.clone(),
        proposals,
        identity_fields: arguments.identities.iter().map(|argument| argument.0.clone()).collect(),
    };
    let replay = Replay::new(config, &sources, &options)?;
    let mut display = ProgressDisplay::new(&arguments.logs, progress);
    let outcome = replay.run(sources, target, &mut display);
    display.bar.finish_and_clear();
    let report = ReplayReport::new(&replay, &outcome, names, target);
    if let Some(path) = &arguments.html {
        std::fs::write(path, html::render_page(&report)).with_context(|| format!("{}", path.display()))?;
    }
    if arguments.json {
        writeln!(stdout(), "{}", to_json(&report)?)?;
    } else {
        report::write_table(&report, &mut stdout().lock())?;
    }
    if report.lines.requests == 0 && (report.lines.unreadable > 0 || !outcome.statistics.read_errors.is_empty()) {
        bail!("no line of the logs could be parsed");
    }
    Ok(ExitCode::SUCCESS)
}

/// Load the configuration. With `--by`, build a configuration that has only the proposed limits.
fn load_config(
    arguments: &Arguments,
    config_path: &Path,
    proposals: &[QuotaProposal],
) -> Result<CompiledConfig, ConfigError> {
    let env_var = |name: &str| std::env::var_os(name);
    if arguments.by.is_empty() {
        return CompiledConfig::load(config_path, &env_var);
    }
    let names: Vec<_> = proposals.iter().map(|proposal| proposal.limit.as_str()).collect();
    let mut text = String::from("[[listener]]\naddress = \"127.0.0.1:0\"\n");
    for QuotaProposal { limit, quota, .. } in proposals {
        let Arguments { by, algorithm, .. } = arguments;
        text += &format!(
            "[limit.{limit:?}]\nby = {by:?}\nquota = {quota:?}\nalgorithm = {algorithm:?}\non_missing = \"skip\"\n"
        );
    }
    text += &format!(
        "[[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nlimits = {names:?}\nrespond = {{ status = 200 }}\n"
    );
    CompiledConfig::from_text(Path::new("(the command line)"), text, &env_var)
}

/// The progress bar on standard error. The progress bar is hidden if standard error is not a terminal.
struct ProgressDisplay {
    bar: ProgressBar,
    progress: ReadProgress,
}

impl ProgressDisplay {
    fn new(logs: &[PathBuf], progress: ReadProgress) -> Self {
        let total_bytes: Option<u64> = logs.iter().map(|log| file_size(log)).sum();
        let bar = match total_bytes {
            _ if !stderr().is_terminal() => ProgressBar::hidden(),
            Some(total_bytes) => ProgressBar::new(total_bytes),
            None => ProgressBar::no_length(),
        };
        let template =
            if total_bytes.is_some() { "{wide_bar} {percent:>3} %  {eta:>4}" } else { "{spinner} {bytes} read" };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        ProgressDisplay { bar, progress }
    }
}

impl ReplayObserver for ProgressDisplay {
    fn on_progress(&mut self) {
        self.bar.set_position(self.progress.bytes());
    }

    fn on_quota_search(&mut self, limit: &str) {
        self.bar.set_style(ProgressStyle::default_spinner());
        self.bar.set_message(format!("searching for a quota for {limit}"));
        self.bar.enable_steady_tick(SPINNER_INTERVAL);
    }
}

// The arguments.

/// Replay access logs against the configured or proposed limits
#[derive(Debug, Args)]
#[command(after_help = examples![
    "sluicegate replay access.log",
    "sluicegate replay access.log --limit per-ip=600/min,burst=50",
    "sluicegate replay access.log --by ip --limit per-ip=600/min --html report.html",
    "cat access.log | sluicegate replay - --json > report.json",
])]
pub(super) struct Arguments {
    /// Read these access logs, plain or compressed with gzip; `-` is standard input
    #[arg(required = true, value_name = "LOG")]
    pub(crate) logs: Vec<PathBuf>,

    /// Replay with this proposed quota for a limit: per-ip=600/min, or per-ip=600/min,burst=50
    #[arg(long = "limit", value_name = "NAME=QUOTA")]
    pub(crate) limits: Vec<NamedValue<QuotaProposal>>,

    /// Replay without a configuration, and identify clients by this descriptor, such as ip, header:NAME or global
    #[arg(long, value_name = "IDENTITY", requires = "limits")]
    pub(crate) by: Vec<String>,

    /// With --by, use this algorithm for the proposed limits, such as fixed-window
    #[arg(long, value_name = "NAME", requires = "by", default_value = "token-bucket")]
    pub(crate) algorithm: String,

    /// Parse the logs in this format: common, combined, caddy, alb, cloudfront, sluicegate, or an nginx log_format in
    /// quotes [default: the detected format]
    #[arg(long, value_name = "FORMAT")]
    pub(crate) format: Option<String>,

    /// For this limit, identify clients by this field of the log, such as per-key=remote_user
    #[arg(long = "identity", value_name = "LIMIT=FIELD")]
    pub(crate) identities: Vec<NamedValue<IdentityField>>,

    /// For each limit, suggest the smallest quota that denies less than this share of the requests
    #[arg(long, value_name = "SHARE", default_value = "0.1%")]
    pub(crate) target: Share,

    /// Suggest no quotas; the command then keeps no requests in memory
    #[arg(long, conflicts_with = "target")]
    pub(crate) no_suggest: bool,

    /// Print a JSON object
    #[arg(long)]
    pub(crate) json: bool,

    /// Write the report to this file as an HTML page with charts
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
}

/// An argument of the form NAME=VALUE.
#[derive(Debug, Clone)]
pub(crate) struct NamedValue<T>(pub(crate) T);

/// A share of requests, written as `0.1%` or `0.001`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Share(pub(crate) f64);

#[derive(Debug, thiserror::Error)]
pub(crate) enum ArgumentError {
    #[error("expected {0}")]
    InvalidForm(&'static str),
    #[error("a share is a number from 0 % to 100 %, such as 0.1%")]
    InvalidShare,
}

impl FromStr for NamedValue<QuotaProposal> {
    type Err = ArgumentError;

    fn from_str(text: &str) -> Result<Self, ArgumentError> {
        let form_error =
            || ArgumentError::InvalidForm("NAME=QUOTA, such as per-ip=600/min, or per-ip=600/min,burst=50");
        let (name, quota_and_burst) =
            text.split_once('=').filter(|(name, _)| !name.is_empty()).ok_or_else(form_error)?;
        let (quota, burst) = match quota_and_burst.split_once(',') {
            None => (quota_and_burst, None),
            Some((quota, burst)) => {
                let burst = burst.trim().strip_prefix("burst=").and_then(|burst| burst.parse().ok());
                (quota, Some(burst.ok_or_else(form_error)?))
            }
        };
        Ok(NamedValue(QuotaProposal { limit: name.to_owned(), quota: quota.trim().to_owned(), burst }))
    }
}

impl FromStr for NamedValue<IdentityField> {
    type Err = ArgumentError;

    fn from_str(text: &str) -> Result<Self, ArgumentError> {
        match text.split_once('=') {
            Some((limit, field)) if !limit.is_empty() && !field.is_empty() => {
                Ok(NamedValue(IdentityField { limit: limit.to_owned(), field: field.to_owned() }))
            }
            _ => Err(ArgumentError::InvalidForm("LIMIT=FIELD, such as per-key=remote_user")),
        }
    }
}

impl FromStr for Share {
    type Err = ArgumentError;

    fn from_str(text: &str) -> Result<Self, ArgumentError> {
        let (number, unit) = match text.trim().strip_suffix('%') {
            Some(percent) => (percent.trim(), 100.0),
            None => (text.trim(), 1.0),
        };
        let share = number.parse::<f64>().map(|number| number / unit).ok();
        share.filter(|share| (0.0..=1.0).contains(share)).map(Share).ok_or(ArgumentError::InvalidShare)
    }
}
