//! The command line: one file for each command.

mod check;
mod doctor;
mod explain;
mod init;
mod key;
mod manual;
mod operate;
mod replay;
mod run;
mod schema;

use std::path::PathBuf;
use std::process::ExitCode;

use annotate_snippets::Renderer;
use clap::{Parser, Subcommand};

use crate::config::error::ConfigError;
use crate::runtime::CompiledConfig;

/// What `--version` prints behind the name; `-V` prints the version alone. Set by `build.rs`.
const BUILD: &str = concat!(
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

/// Exit code of a configuration that cannot be used.
const BAD_CONFIG: u8 = 2;

/// An HTTP gateway with exact, distributed rate limits.
///
/// Matches routes, finds out who asks, makes one atomic store call, and forwards the request or answers 429.
#[derive(Debug, Parser)]
#[command(version, long_version = BUILD, max_term_width = 100)]
pub struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,

    /// The configuration
    #[arg(long, short, global = true, value_name = "FILE", default_value = "gateway.toml", env = "SLUICEGATE_CONFIG")]
    config: PathBuf,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve (the default)
    Run,
    /// Check the configuration: what is wrong or odd about it, and what its limits guarantee
    ///
    /// Exit code 0 if it can be used, 2 if not; with --strict 1 if there are warnings.
    Check(check::Options),
    /// Examine the Redis of the configuration and say what to do; exit code 1 if something failed
    Doctor {
        /// As a JSON object, for programs
        #[arg(long)]
        json: bool,
    },
    /// Say what the gateway would do with a request, and why: route, limits, answer; nothing is sent or charged
    ///
    /// The counters are looked at in Redis, or asked of the running gateway where they are in its memory.
    Explain(explain::Arguments),
    /// Write a first configuration, with comments
    Init {
        /// What the gateway is for
        #[arg(long = "template", value_name = "TEMPLATE", default_value = "single-api")]
        situation: init::Situation,
        /// Overwrite files that are there
        #[arg(long)]
        force: bool,
    },
    /// Make and revoke API keys
    Key {
        #[command(subcommand)]
        action: key::Action,
    },
    #[command(flatten)]
    Operate(operate::Operate),
    /// Print the JSON Schema of the configuration, for editors
    Schema {
        /// Of which file
        #[arg(default_value = "gateway")]
        file: schema::File,
    },
    /// Print completions for a shell
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
    /// Print the manual page, or write one for each command
    Man {
        /// Write sluicegate.1, sluicegate-check.1, … there
        folder: Option<PathBuf>,
    },
    /// Hold access logs against the limits, or against proposed ones: who would have been denied, and which quota would do
    Replay(replay::Arguments),
}

/// Carries out a command.
///
/// # Errors
/// The gateway could not start or had to stop.
pub fn execute(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    match carry_out(arguments) {
        Err(error) => match error.downcast_ref::<ConfigError>() {
            Some(error) => {
                // Colours on a terminal only, and none where NO_COLOR asks for it.
                anstream::eprintln!("{}", error.report(&Renderer::styled()));
                Ok(ExitCode::from(BAD_CONFIG))
            }
            // Whoever reads the output has seen enough of it.
            None if is_broken_pipe(&error) => Ok(ExitCode::SUCCESS),
            None => Err(error),
        },
        done => done,
    }
}

fn carry_out(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let load = || CompiledConfig::load(&arguments.config, &environment);
    match &arguments.command {
        None | Some(Command::Run) => run::run(load()?)?,
        Some(Command::Check(options)) => return check::check(&arguments.config, options),
        Some(Command::Doctor { json }) => return doctor::doctor(&load()?, *json),
        Some(Command::Explain(asked)) => return explain::explain(asked, &load()?, &arguments.config),
        Some(Command::Operate(operate)) => {
            let listener = match operate.admin() {
                Some(url) => operate::Listener::at(url)?,
                None => operate::Listener::of(&arguments.config, &load()?)?,
            };
            operate.carry_out(&listener)?;
        }
        Some(Command::Replay(logs)) => return replay::replay(logs, &arguments.config),
        Some(Command::Init { situation, force }) => init::init(&arguments.config, *situation, *force)?,
        Some(Command::Key { action }) => key::key(&arguments.config, action)?,
        Some(Command::Schema { file }) => schema::schema(*file)?,
        Some(Command::Completions { shell }) => manual::completions(*shell)?,
        Some(Command::Man { folder }) => manual::man(folder.as_deref())?,
    }
    Ok(ExitCode::SUCCESS)
}

fn environment(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let kind = error.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
    kind == Some(std::io::ErrorKind::BrokenPipe)
}
