//! The command line: arguments and output, one module per command.

/// Build the examples at the end of a command's help: one example per line, under a heading that looks like clap's own
/// headings.
macro_rules! examples {
    ($($line:literal),+ $(,)?) => {
        concat!("\u{1b}[1m\u{1b}[4mExamples:\u{1b}[0m" $(, "\n  ", $line)+)
    };
}

mod admin;
mod against;
mod certificates;
mod check;
mod completions;
mod doctor;
mod explain;
mod import;
mod init;
mod inspect;
mod key;
mod man;
mod overrides;
mod prices;
mod probe;
mod ratelimit;
mod reload;
mod renew;
mod replay;
mod reset;
mod run;
mod schema;
mod shared;
mod status;
mod top;
mod usage;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use annotate_snippets::{Level, Renderer};
use clap::error::{ContextKind, ContextValue};
use clap::{CommandFactory, Parser, Subcommand};

use crate::cli::shared::{EXIT_INVALID_CONFIG, is_broken_pipe};
use crate::config::error::ConfigError;
use crate::config::file::config_argument;

/// The text that `--version` prints after the name of the program. `-V` prints only the version. `build.rs` sets the
/// environment variables in this text.
const LONG_VERSION: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    "\ncommit: ",
    env!("SLUICEGATE_COMMIT"),
    "\nrustc: ",
    env!("SLUICEGATE_RUSTC_VERSION"),
    "\ntarget: ",
    env!("SLUICEGATE_TARGET"),
    "\nPGO: ",
    env!("SLUICEGATE_PGO"),
);

/// An HTTP gateway with exact, distributed rate limits.
///
/// For each request, the gateway finds the matching route, identifies the client and checks all limits in one atomic
/// store call. It then proxies the request or returns 429.
#[derive(Debug, Parser)]
#[command(version, long_version = LONG_VERSION, max_term_width = 100, after_help = examples![
    "sluicegate init --template plans",
    "sluicegate check --strict",
    "sluicegate run --config gateway.toml",
])]
pub struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,

    /// Use this configuration file; `-` reads standard input
    #[arg(long, short, global = true, value_name = "FILE", default_value = "gateway.toml", env = "SLUICEGATE_CONFIG")]
    config: PathBuf,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(run::Arguments),
    Check(check::Arguments),
    Doctor(doctor::Arguments),
    Explain(explain::Arguments),
    Import(import::Arguments),
    Init(init::Arguments),
    Key(key::Arguments),
    Reload(reload::Arguments),
    Probe(probe::Arguments),
    Status(status::Arguments),
    Top(top::Arguments),
    Inspect(inspect::Arguments),
    Reset(reset::Arguments),
    Certificates(certificates::Arguments),
    Renew(renew::Arguments),
    Override(overrides::Arguments),
    Schema(schema::Arguments),
    Completions(completions::Arguments),
    Man(man::Arguments),
    Usage(usage::Arguments),
    Prices(prices::Arguments),
    Replay(replay::Arguments),
    Ratelimit(ratelimit::Arguments),
}

impl Arguments {
    /// Parse the command line. If an argument is invalid, print the error and exit, as [`Parser::parse`] does. If the
    /// argument is a configuration file or a word of another program, the error says what to write instead.
    pub fn from_command_line() -> Self {
        let mut arguments: Vec<_> = std::env::args_os().collect();
        let program = arguments.first().and_then(|program| Path::new(program).file_name());
        if program.is_some_and(|name| name == ratelimit::PROGRAM) {
            arguments.insert(1, ratelimit::PROGRAM.into());
        }
        Arguments::try_parse_from(arguments).unwrap_or_else(|error| with_hint(error).exit())
    }
}

/// Commands and options of other programs, each with what to write instead.
const FOREIGN_ARGUMENTS: &[(&[&str], &str)] = &[
    (&["serve", "start", "server", "up", "daemon", "listen", "proxy", "gateway", "launch"], "sluicegate run"),
    (
        &[
            "validate",
            "test",
            "verify",
            "lint",
            "configtest",
            "config-test",
            "check-config",
            "-t",
            "-T",
            "--test",
            "--validate",
            "--check",
            "--dry-run",
        ],
        "sluicegate check",
    ),
    (&["version", "ver", "-v", "-version"], "sluicegate --version"),
    (&["--reload", "-s", "hup", "refresh"], "sluicegate reload"),
    (
        &["stop", "quit", "shutdown", "--stop"],
        "to stop the gateway, send SIGTERM to its process, or use systemctl stop sluicegate",
    ),
    (&["restart", "upgrade"], "for a hot restart, send SIGUSR2 to the process, or use systemctl restart sluicegate"),
    (&["new", "create", "generate", "setup", "example"], "sluicegate init"),
    (&["stats", "info", "ps", "state"], "sluicegate status"),
    (&["health", "healthcheck", "ping", "--health"], "sluicegate probe"),
    (&["-f", "--file", "--conf", "--cfg", "-C", "--config-file", "--config.file"], "--config FILE"),
    (
        &["-p", "--port", "--listen", "--address", "--addr", "--bind"],
        "set `address` of a [[listener]] in the configuration",
    ),
    (&["-d", "--daemon", "--background"], "the gateway runs in the foreground; systemd runs it in the background"),
    (&["--debug", "--verbose", "-vv", "--log-level", "-q", "--quiet"], "set `level` of [log] in the configuration"),
];

/// Add a hint to the error about an unknown argument that is a configuration file or a word of another program.
fn with_hint(mut error: clap::Error) -> clap::Error {
    let argument =
        [ContextKind::InvalidSubcommand, ContextKind::InvalidArg].into_iter().find_map(|kind| error.get(kind));
    let Some(ContextValue::String(argument)) = argument else { return error };
    let path = Path::new(argument);
    let word = argument.split([' ', '=']).next().unwrap_or_default();
    let foreign = FOREIGN_ARGUMENTS.iter().find(|(words, _)| words.contains(&word));
    let hint = if path.extension().is_some_and(|extension| extension == "toml") || path.is_file() {
        format!("if this is the configuration file, write {}", config_argument(path))
    } else if let Some((_, instead)) = foreign {
        match instead.starts_with("sluicegate") || instead.starts_with("--") {
            true => format!("write `{instead}`"),
            false => (*instead).to_owned(),
        }
    } else {
        return error;
    };
    error.remove(ContextKind::SuggestedSubcommand);
    error.remove(ContextKind::SuggestedArg);
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![hint.into()]));
    error
}

/// Run a command and return its exit code.
///
/// # Errors
/// The command failed. An invalid configuration is not returned as an error: this function prints the report and
/// returns exit code 2.
pub fn execute(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    match dispatch(arguments) {
        Err(error) => match error.downcast_ref::<ConfigError>() {
            Some(error) => {
                // The anstream crate writes colors only to a terminal, and never if NO_COLOR is set.
                anstream::eprintln!("{}", error.report(&Renderer::styled()));
                Ok(ExitCode::from(EXIT_INVALID_CONFIG))
            }
            None if let Some(run::StartError(issues)) = error.downcast_ref() => {
                anstream::eprintln!("{}", issues.report(&Level::ERROR, &Renderer::styled()));
                Ok(ExitCode::FAILURE)
            }
            // Exit with code 0 if the reader of standard output closes the pipe, as `head` does.
            None if is_broken_pipe(&error) => Ok(ExitCode::SUCCESS),
            None => Err(error),
        },
        result => result,
    }
}

fn dispatch(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let config = &*arguments.config;
    match &arguments.command {
        None | Some(Command::Run(_)) => run::run(config),
        Some(Command::Check(arguments)) => check::run(arguments, config),
        Some(Command::Doctor(arguments)) => doctor::run(arguments, config),
        Some(Command::Explain(arguments)) => explain::run(arguments, config),
        Some(Command::Import(arguments)) => import::run(arguments),
        Some(Command::Init(arguments)) => init::run(arguments, config),
        Some(Command::Key(arguments)) => key::run(arguments, config),
        Some(Command::Reload(arguments)) => reload::run(arguments, config),
        Some(Command::Probe(arguments)) => probe::run(arguments, config),
        Some(Command::Status(arguments)) => status::run(arguments, config),
        Some(Command::Top(arguments)) => top::run(arguments, config),
        Some(Command::Inspect(arguments)) => inspect::run(arguments, config),
        Some(Command::Reset(arguments)) => reset::run(arguments, config),
        Some(Command::Certificates(arguments)) => certificates::run(arguments, config),
        Some(Command::Renew(arguments)) => renew::run(arguments, config),
        Some(Command::Override(arguments)) => overrides::run(arguments, config),
        Some(Command::Schema(arguments)) => schema::run(arguments),
        Some(Command::Completions(arguments)) => completions::run(arguments, &Arguments::command()),
        Some(Command::Man(arguments)) => man::run(arguments, &Arguments::command()),
        Some(Command::Usage(arguments)) => usage::run(arguments, config),
        Some(Command::Prices(arguments)) => prices::run(arguments),
        Some(Command::Replay(arguments)) => replay::run(arguments, config),
        Some(Command::Ratelimit(arguments)) => ratelimit::run(arguments),
    }
}
