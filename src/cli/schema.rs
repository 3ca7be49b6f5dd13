//! `sluicegate schema`: the JSON Schema of a configuration file, for editors.

use std::io::{Write, stdout};
use std::process::ExitCode;

use clap::{Args, ValueEnum};

use crate::config::file_schema;

/// Print the JSON Schema of the configuration, for editors
#[derive(Debug, Args)]
#[command(after_help = examples![
    "sluicegate schema > gateway.schema.json",
    "sluicegate schema consumers > consumers.schema.json",
])]
pub(super) struct Arguments {
    /// The kind of configuration file whose schema to print
    #[arg(default_value = "gateway")]
    file: SchemaFile,
}

/// The file that a schema describes.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(super) enum SchemaFile {
    /// gateway.toml
    Gateway,
    /// consumers.toml
    Consumers,
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let schema = match arguments.file {
        SchemaFile::Gateway => file_schema::gateway(),
        SchemaFile::Consumers => file_schema::consumers(),
    };
    writeln!(stdout(), "{}", serde_json::to_string_pretty(&schema)?)?;
    Ok(ExitCode::SUCCESS)
}
