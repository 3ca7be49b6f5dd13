//! `sluicegate completions`: the completion script for a shell.

use std::io::{Write, stdout};
use std::process::ExitCode;

use clap::{Args, Command};

/// Print the completion script for a shell
#[derive(Debug, Args)]
#[command(after_help = examples![
    "sluicegate completions bash > sluicegate.bash",
    "sluicegate completions zsh > _sluicegate",
])]
pub(super) struct Arguments {
    /// Print the script for this shell
    shell: clap_complete::Shell,
}

/// Print the completions of a shell.
pub(super) fn run(arguments: &Arguments, program: &Command) -> anyhow::Result<ExitCode> {
    // Generate the text in memory first, because clap_complete panics if it writes to a closed pipe.
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut program.clone(), "sluicegate", &mut script);
    stdout().write_all(&script)?;
    Ok(ExitCode::SUCCESS)
}
