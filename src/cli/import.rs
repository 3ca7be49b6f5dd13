//! `sluicegate import`: prints a gateway.toml for the configuration of another program.

use std::io::{Write, stderr, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use annotate_snippets::Renderer;
use clap::{Args, ValueEnum};

use crate::cli::shared::env_var;
use crate::snapshot::CompiledConfig;
use crate::tools::import;
use crate::tools::import::model::Relation;
use crate::tools::import::{import, input_budget, read_input};

/// Exit code if `--strict` is given and a part of the original has no equal or differs.
const EXIT_DIFFERENCES: u8 = 1;

/// Exit code for files that cannot be read or parsed.
const EXIT_INVALID_INPUT: u8 = 2;

/// Print a gateway.toml for the configuration of another program
///
/// Standard error lists everything that has no equal in Sluicegate or differs in effect, with file and line.
#[derive(Debug, Args)]
#[command(after_help = examples![
    "sluicegate import nginx nginx.conf > imported.toml",
    "sluicegate import nginx --strict - < nginx.conf > imported.toml",
])]
pub(super) struct Arguments {
    /// The program
    #[arg(value_name = "PROGRAM")]
    format: Format,
    /// The files, which form one configuration; `-` reads standard input
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Exit with code 1 if a part of the configuration has no equal, or differs in effect
    #[arg(long)]
    strict: bool,
}

/// The program whose configuration is imported.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Format {
    /// nginx.conf and the files that it includes
    Nginx,
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    match run_import(arguments) {
        Ok(code) => Ok(code),
        Err(error) if error.is::<import::ImportError>() => {
            anstream::eprintln!("sluicegate import: {error:#}");
            Ok(ExitCode::from(EXIT_INVALID_INPUT))
        }
        Err(error) => Err(error),
    }
}

fn run_import(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let mut budget = input_budget();
    let inputs = arguments.files.iter().map(|path| read_input(path, &mut budget)).collect::<Result<Vec<_>, _>>()?;
    let format = match arguments.format {
        Format::Nginx => import::Format::Nginx,
    };
    let model = import(format, &inputs, budget)?;
    let files: Vec<_> = arguments.files.iter().map(|path| path.display().to_string()).collect();
    let program = arguments.format.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
    let command = format!("sluicegate import {program} {}", files.join(" "));
    let text = model.to_toml(&command);
    write!(stdout(), "{text}")?;
    let mut errors = stderr();
    for note in &model.notes {
        writeln!(errors, "{note}")?;
    }
    let mut differs = model.notes.iter().any(|note| note.relation != Relation::NotNeeded);
    if let Err(error) = CompiledConfig::from_text(Path::new("gateway.toml"), text, &env_var) {
        differs = true;
        writeln!(errors, "to be completed: `sluicegate check` reports:")?;
        anstream::eprintln!("{}", error.report(&Renderer::styled()));
    }
    Ok(if arguments.strict && differs { ExitCode::from(EXIT_DIFFERENCES) } else { ExitCode::SUCCESS })
}
