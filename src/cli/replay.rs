//! `sluicegate replay`: holds access logs against the limits of the configuration, or against proposed ones.

use std::io::{IsTerminal, Write, stderr, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;

use anyhow::{Context, bail};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};

use super::{BAD_CONFIG, complain};
use crate::config::error::ConfigError;
use crate::replay::report::{Report, html, json, table};
use crate::replay::source::{Progress, Source, size};
use crate::replay::view::{Proposal, Stand};
use crate::replay::{Options, Replay, Watcher};
use crate::runtime::Runtime;

/// Exit code of logs in which nothing can be read, and of arguments that do not fit.
const UNREADABLE: u8 = BAD_CONFIG;

/// The arguments.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Access logs, compressed with gzip or not; `-` is standard input
    #[arg(required = true, value_name = "LOG")]
    logs: Vec<PathBuf>,

    /// Another quota for a limit: per-ip=600/min, or per-ip=600/min,burst=50
    #[arg(long = "limit", value_name = "NAME=QUOTA")]
    limits: Vec<Given<Proposal>>,

    /// Without a configuration: what the proposed limits are by, on all requests (ip, header:NAME, global, …)
    #[arg(long, value_name = "IDENTITY", requires = "limits")]
    by: Vec<String>,

    /// Without a configuration: how the proposed limits count (token-bucket, fixed-window, …)
    #[arg(long, value_name = "NAME", requires = "by", default_value = "token-bucket")]
    algorithm: String,

    /// The format: common, combined, caddy, alb, cloudfront, sluicegate, or a log_format of nginx in quotes
    #[arg(long, value_name = "FORMAT")]
    format: Option<String>,

    /// The field of the log that tells the identities of a limit apart
    #[arg(long = "identity", value_name = "LIMIT=FIELD")]
    identities: Vec<Given<Stand>>,

    /// Suggest the smallest quota that denies fewer than this share of requests
    #[arg(long, value_name = "SHARE", default_value = "0.1%")]
    target: Share,

    /// Suggest nothing, and keep no request in memory
    #[arg(long, conflicts_with = "target")]
    no_suggest: bool,

    /// As a JSON object, for programs
    #[arg(long)]
    json: bool,

    /// Write a page with charts
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// An argument of the form NAME=VALUE.
#[derive(Debug, Clone)]
struct Given<T>(T);

/// A share: `0.1%` or `0.001`.
#[derive(Debug, Clone, Copy)]
struct Share(f64);

#[derive(Debug, thiserror::Error)]
enum ArgumentError {
    #[error("it has the form {0}")]
    Form(&'static str),
    #[error("a share is a number from 0 % to 100 %, such as 0.1%")]
    Share,
}

impl FromStr for Given<Proposal> {
    type Err = ArgumentError;

    fn from_str(text: &str) -> Result<Self, ArgumentError> {
        let form = || ArgumentError::Form("NAME=QUOTA, such as per-ip=600/min, or per-ip=600/min,burst=50");
        let (name, size) = text.split_once('=').filter(|(name, _)| !name.is_empty()).ok_or_else(form)?;
        let (quota, burst) = match size.split_once(',') {
            None => (size, None),
            Some((quota, burst)) => {
                let burst = burst.trim().strip_prefix("burst=").and_then(|burst| burst.parse().ok());
                (quota, Some(burst.ok_or_else(form)?))
            }
        };
        Ok(Given(Proposal { limit: name.to_owned(), quota: quota.trim().to_owned(), burst }))
    }
}

impl FromStr for Given<Stand> {
    type Err = ArgumentError;

    fn from_str(text: &str) -> Result<Self, ArgumentError> {
        match text.split_once('=') {
            Some((limit, field)) if !limit.is_empty() && !field.is_empty() => {
                Ok(Given(Stand { limit: limit.to_owned(), field: field.to_owned() }))
            }
            _ => Err(ArgumentError::Form("LIMIT=FIELD, such as per-key=remote_user")),
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
        share.filter(|share| (0.0..=1.0).contains(share)).map(Share).ok_or(ArgumentError::Share)
    }
}

pub(super) fn replay(arguments: &Arguments, config: &Path) -> anyhow::Result<ExitCode> {
    let proposals: Vec<_> = arguments.limits.iter().map(|given| given.0.clone()).collect();
    let runtime = match runtime(arguments, config, &proposals) {
        Ok(runtime) => runtime,
        Err(error) => {
            complain(&error);
            if !config.exists() && arguments.by.is_empty() {
                anstream::eprintln!("without a configuration: replay LOG --by ip --limit per-ip=600/min");
            }
            return Ok(ExitCode::from(BAD_CONFIG));
        }
    };
    match replay_with(arguments, runtime, proposals) {
        Ok(code) => Ok(code),
        Err(error) => {
            anstream::eprintln!("sluicegate replay: {error:#}");
            Ok(ExitCode::from(UNREADABLE))
        }
    }
}

fn replay_with(arguments: &Arguments, runtime: Runtime, proposals: Vec<Proposal>) -> anyhow::Result<ExitCode> {
    let progress = Progress::default();
    let open = |path: &PathBuf| Source::open(path, &progress).with_context(|| format!("{}", path.display()));
    let sources = arguments.logs.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    let names = sources.iter().map(|source| source.name().to_owned()).collect();
    let target = (!arguments.no_suggest).then_some(arguments.target.0);
    let options = Options {
        format: arguments.format.clone(),
        proposals,
        stands: arguments.identities.iter().map(|given| given.0.clone()).collect(),
    };
    let replay = Replay::new(runtime, &sources, &options)?;
    let mut shown = Shown::new(&arguments.logs, progress);
    let outcome = replay.run(sources, target, &mut shown);
    shown.bar.finish_and_clear();
    let report = Report::new(&replay, &outcome, names, target);
    if let Some(path) = &arguments.html {
        std::fs::write(path, html::page(&report)).with_context(|| format!("{}", path.display()))?;
    }
    if arguments.json {
        writeln!(stdout(), "{}", json(&report)?)?;
    } else {
        table::write(&report, &mut stdout().lock())?;
    }
    if report.lines.requests == 0 && (report.lines.unreadable > 0 || !outcome.found.broken.is_empty()) {
        bail!("no line could be read");
    }
    Ok(ExitCode::SUCCESS)
}

/// The configuration, or one that has nothing but the proposed limits.
fn runtime(arguments: &Arguments, config: &Path, proposals: &[Proposal]) -> Result<Runtime, ConfigError> {
    let environment = |name: &str| std::env::var(name).ok();
    if arguments.by.is_empty() {
        return Runtime::load(config, &environment);
    }
    let names: Vec<_> = proposals.iter().map(|proposal| proposal.limit.as_str()).collect();
    let mut text = String::from("[[listener]]\naddress = \"127.0.0.1:0\"\n");
    for Proposal { limit, quota, .. } in proposals {
        let Arguments { by, algorithm, .. } = arguments;
        text += &format!(
            "[limit.{limit:?}]\nby = {by:?}\nquota = {quota:?}\nalgorithm = {algorithm:?}\non_missing = \"skip\"\n"
        );
    }
    text += &format!(
        "[[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nlimits = {names:?}\nrespond = {{ status = 200 }}\n"
    );
    Runtime::of(Path::new("(the command line)"), text, &environment)
}

/// What is shown while logs are read, where somebody looks on.
struct Shown {
    bar: ProgressBar,
    progress: Progress,
}

impl Shown {
    fn new(logs: &[PathBuf], progress: Progress) -> Self {
        let all: Option<u64> = logs.iter().map(|log| size(log)).sum();
        let bar = match all {
            _ if !stderr().is_terminal() => ProgressBar::hidden(),
            Some(all) => ProgressBar::new(all),
            None => ProgressBar::no_length(),
        };
        let template = if all.is_some() { "{wide_bar} {percent:>3} %  {eta:>4}" } else { "{spinner} {bytes} read" };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        Shown { bar, progress }
    }
}

impl Watcher for Shown {
    fn read(&mut self) {
        self.bar.set_position(self.progress.bytes());
    }

    fn trying(&mut self, limit: &str) {
        self.bar.set_style(ProgressStyle::default_spinner());
        self.bar.set_message(format!("which quota {limit} would need"));
        self.bar.tick();
    }
}
