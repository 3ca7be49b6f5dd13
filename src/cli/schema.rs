//! `sluicegate schema`: the JSON Schema of the configuration, for editors.

use std::io::{Write, stdout};

use clap::ValueEnum;

use crate::config::schema;

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
