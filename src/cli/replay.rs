//! `sluicegate replay`: holds access logs against the limits of the configuration, or against proposed ones.

mod arguments;

use std::io::{IsTerminal, Write, stderr, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use indicatif::{ProgressBar, ProgressStyle};

pub(super) use arguments::Arguments;

use super::{BAD_CONFIG, is_broken_pipe};
use crate::config::error::ConfigError;
use crate::replay::report::{Report, html, json, table};
use crate::replay::size::Proposal;
use crate::replay::source::{Progress, Source, size};
use crate::replay::{Options, Replay, Watcher};
use crate::runtime::CompiledConfig;

/// Exit code of logs in which nothing can be read, and of arguments that do not fit.
const UNREADABLE: u8 = BAD_CONFIG;

/// So often a spinner turns.
const SPIN: Duration = Duration::from_millis(100);

pub(super) fn replay(arguments: &Arguments, config: &Path) -> anyhow::Result<ExitCode> {
    let proposals: Vec<_> = arguments.limits.iter().map(|given| given.0.clone()).collect();
    let runtime = runtime(arguments, config, &proposals).inspect_err(|_| {
        if arguments.by.is_empty() && !config.exists() {
            anstream::eprintln!("without a configuration: replay LOG --by ip --limit per-ip=600/min");
        }
    })?;
    match replay_with(arguments, runtime, proposals) {
        Ok(code) => Ok(code),
        Err(error) if is_broken_pipe(&error) => Err(error),
        Err(error) => {
            anstream::eprintln!("sluicegate replay: {error:#}");
            Ok(ExitCode::from(UNREADABLE))
        }
    }
}

fn replay_with(arguments: &Arguments, runtime: CompiledConfig, proposals: Vec<Proposal>) -> anyhow::Result<ExitCode> {
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
fn runtime(arguments: &Arguments, config: &Path, proposals: &[Proposal]) -> Result<CompiledConfig, ConfigError> {
    let environment = |name: &str| std::env::var(name).ok();
    if arguments.by.is_empty() {
        return CompiledConfig::load(config, &environment);
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
    CompiledConfig::from_text(Path::new("(the command line)"), text, &environment)
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
        self.bar.enable_steady_tick(SPIN);
    }
}
