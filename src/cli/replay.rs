//! `sluicegate replay`: holds access logs against the limits of the configuration, or against proposed ones.

mod arguments;

use std::io::{IsTerminal, Write, stderr, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use indicatif::{ProgressBar, ProgressStyle};

pub(super) use arguments::Arguments;

use super::{EXIT_INVALID_CONFIG, is_broken_pipe};
use crate::config::error::ConfigError;
use crate::replay::report::{ReplayReport, html, table, to_json};
use crate::replay::size::QuotaProposal;
use crate::replay::source::{LogInput, ReadProgress, file_size};
use crate::replay::{Replay, ReplayObserver, ReplayOptions};
use crate::runtime::CompiledConfig;

/// Exit code of logs in which nothing can be read, and of arguments that do not fit.
const EXIT_INVALID_INPUT: u8 = EXIT_INVALID_CONFIG;

/// So often a spinner turns.
const SPINNER_INTERVAL: Duration = Duration::from_millis(100);

pub(super) fn run(arguments: &Arguments, config_path: &Path) -> anyhow::Result<ExitCode> {
    let proposals: Vec<_> = arguments.limits.iter().map(|argument| argument.0.clone()).collect();
    let config = load_config(arguments, config_path, &proposals).inspect_err(|_| {
        if arguments.by.is_empty() && !config_path.exists() {
            anstream::eprintln!("without a configuration: replay LOG --by ip --limit per-ip=600/min");
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
        table::write_table(&report, &mut stdout().lock())?;
    }
    if report.lines.requests == 0 && (report.lines.unreadable > 0 || !outcome.statistics.read_errors.is_empty()) {
        bail!("no line could be read");
    }
    Ok(ExitCode::SUCCESS)
}

/// The configuration, or one that has nothing but the proposed limits.
fn load_config(
    arguments: &Arguments,
    config_path: &Path,
    proposals: &[QuotaProposal],
) -> Result<CompiledConfig, ConfigError> {
    let env_var = |name: &str| std::env::var(name).ok();
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

/// What is shown while logs are read, where somebody looks on.
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
        self.bar.set_message(format!("which quota {limit} would need"));
        self.bar.enable_steady_tick(SPINNER_INTERVAL);
    }
}
