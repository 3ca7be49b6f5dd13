//! `sluicegate completions`, `man` and `schema`: generated files for packages and editors.

mod man;

use std::io::{Write, stdout};
use std::path::Path;

use anyhow::Context;
use clap::{CommandFactory, ValueEnum};
use clap_complete::Shell;

use crate::cli::Arguments;
use crate::config::schema;

/// Print the completions of a shell.
pub(super) fn print_completions(shell: Shell) -> std::io::Result<()> {
    // Generate the text in memory first: clap_complete panics if the output pipe is closed.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Arguments::command(), "sluicegate", &mut script);
    stdout().write_all(&script)
}

/// Print the manual page, or write one page per command into a folder.
pub(super) fn write_man_pages(folder: Option<&Path>) -> anyhow::Result<()> {
    let program = Arguments::command();
    match folder {
        None => stdout().write_all(&man::page(&program)?)?,
        Some(folder) => man::write_pages(&program, folder)
            .with_context(|| format!("cannot write the manual pages to {}", folder.display()))?,
    }
    Ok(())
}

// `sluicegate schema`

/// The file that a schema describes.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(super) enum SchemaFile {
    /// gateway.toml
    Gateway,
    /// consumers.toml
    Consumers,
}

pub(super) fn print_schema(file: SchemaFile) -> anyhow::Result<()> {
    let schema = match file {
        SchemaFile::Gateway => schema::gateway(),
        SchemaFile::Consumers => schema::consumers(),
    };
    writeln!(stdout(), "{}", serde_json::to_string_pretty(&schema)?)?;
    Ok(())
}
