//! `sluicegate ratelimit`: runs in place of envoyproxy/ratelimit, with its environment variables.

use std::io::{Write, stdout};
use std::path::Path;
use std::process::ExitCode;

use clap::Args;

use crate::cli::run;
use crate::cli::shared::env_var;
use crate::config::error::ConfigError;
use crate::config::ratelimit_env;
use crate::config::ratelimit_env::ENVIRONMENT;

/// File name of the program under which the binary runs this command.
pub(super) const PROGRAM: &str = "ratelimit";

/// Run in place of envoyproxy/ratelimit, with its environment variables
///
/// The gateway reads no configuration file. A binary with the file name `ratelimit`, such as a symbolic link, always
/// runs this command.
#[derive(Debug, Args)]
#[command(after_help = examples![
    "RUNTIME_ROOT=/etc/ratelimit REDIS_SOCKET_TYPE=tcp REDIS_URL=127.0.0.1:6379 sluicegate ratelimit",
    "sluicegate ratelimit --print > ratelimit.toml",
])]
pub(super) struct Arguments {
    /// Print the configuration that the variables describe, and exit
    #[arg(long)]
    print: bool,
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    if !arguments.print {
        return run::run(Path::new(ENVIRONMENT));
    }
    let generated = ratelimit_env::generate(&env_var).map_err(|file| ConfigError { files: vec![file] })?;
    stdout().write_all(generated.text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}
