//! `sluicegate completions` and `sluicegate man`: what a package installs beside the binary.

use std::io::{Write, stdout};
use std::path::Path;

use anyhow::Context;
use clap::{CommandFactory, ValueEnum};
use clap_complete::Shell;

use crate::cli::Arguments;
use crate::config::schema;

/// Completions of a shell, to standard output.
pub(super) fn print_completions(shell: Shell) -> std::io::Result<()> {
    // To memory first: what writes them gives up where nobody reads on.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Arguments::command(), "sluicegate", &mut script);
    stdout().write_all(&script)
}

/// The page of the program to standard output, or a page for each command into a folder.
pub(super) fn write_man_pages(folder: Option<&Path>) -> anyhow::Result<()> {
    let command = Arguments::command();
    match folder {
        None => clap_mangen::Man::new(command).render(&mut stdout())?,
        Some(folder) => clap_mangen::generate_to(command, folder)
            .with_context(|| format!("the pages cannot be written to {}", folder.display()))?,
    }
    Ok(())
}

// `sluicegate schema`: the JSON Schema of the configuration, for editors.

/// Whose schema.
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
