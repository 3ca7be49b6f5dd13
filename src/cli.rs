//! The command line: one file for each command.

mod check;
mod doctor;
mod operate;
mod run;

use std::path::PathBuf;
use std::process::ExitCode;

use annotate_snippets::Renderer;
use clap::{Parser, Subcommand};

use crate::config::error::ConfigError;
use crate::runtime::Runtime;

/// Exit code of a configuration that cannot be used.
const BAD_CONFIG: u8 = 2;

/// An HTTP gateway with exact, distributed rate limits.
///
/// Matches routes, finds out who asks, makes one atomic store call, and forwards the request or answers 429.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100)]
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
    /// Check the configuration and say what is wrong with it; exit code 2 if something is
    Check,
    /// Examine the Redis of the configuration and say what to do; exit code 1 if something failed
    Doctor {
        /// As a JSON object, for programs
        #[arg(long)]
        json: bool,
    },
    #[command(flatten)]
    Operate(operate::Operate),
}

/// Carries out a command.
///
/// # Errors
/// The gateway could not start or had to stop.
pub fn execute(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let load = || Runtime::load(&arguments.config, &|name| std::env::var(name).ok());
    if let Some(Command::Operate(operate)) = &arguments.command
        && let Some(url) = operate.admin()
    {
        operate::operate(operate, &operate::Listener::at(url)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let runtime = match load() {
        Ok(runtime) => runtime,
        Err(error) => {
            complain(&error);
            return Ok(ExitCode::from(BAD_CONFIG));
        }
    };
    match &arguments.command {
        None | Some(Command::Run) => run::run(runtime)?,
        Some(Command::Check) => check::check(&arguments.config, &runtime)?,
        Some(Command::Doctor { json }) => return doctor::doctor(&runtime, *json),
        Some(Command::Operate(operate)) => {
            operate::operate(operate, &operate::Listener::of(&arguments.config, &runtime)?)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn complain(error: &ConfigError) {
    // Colours on a terminal only, and none where NO_COLOR asks for it.
    anstream::eprintln!("{}", error.report(&Renderer::styled()));
}
