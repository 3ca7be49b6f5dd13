//! `sluicegate init`: a commented configuration from a template.

use std::fs::File;
use std::io::{ErrorKind, Write, stderr};
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};

use crate::config::file::config_option;

/// Create a commented configuration file from a template
#[derive(Debug, Args)]
#[command(after_help = examples![
    "sluicegate init",
    "sluicegate init --template plans --force",
    "sluicegate init --template cdn --config cdn.toml",
])]
pub(super) struct Arguments {
    /// Create the file from this template
    #[arg(long = "template", visible_alias = "for", value_name = "TEMPLATE", default_value = "single-api")]
    template: Template,
    /// Overwrite existing files
    #[arg(long)]
    force: bool,
}

/// The template.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(super) enum Template {
    /// One API, limited by client address
    SingleApi,
    /// An API for consumers with API keys, whose limits depend on the plan of the consumer
    Plans,
    /// A site behind a CDN
    Cdn,
    /// An LLM API with streaming, and with limits on LLM tokens and on requests in flight
    Llm,
}

pub(super) fn run(arguments: &Arguments, config_path: &Path) -> anyhow::Result<ExitCode> {
    let Arguments { template, force } = *arguments;
    let (text, has_keys) = match template {
        Template::SingleApi => (include_str!("init/single-api.toml"), false),
        Template::Plans => (include_str!("init/plans.toml"), true),
        Template::Cdn => (include_str!("init/cdn.toml"), false),
        Template::Llm => (include_str!("init/llm.toml"), true),
    };
    let mut files = vec![(config_path.to_owned(), text)];
    if has_keys {
        files.push((config_path.with_file_name("consumers.toml"), include_str!("init/consumers.toml")));
    }
    // Check all target files before the first one is written, so that no partial configuration remains.
    let existing: Vec<_> = files.iter().map(|(path, _)| path).filter(|path| path.symlink_metadata().is_ok()).collect();
    if let (Some(path), false) = (existing.first(), force) {
        bail!(
            "the file {} exists already: overwrite it with --force, or name another file with --config",
            path.display()
        );
    }
    for (path, text) in &files {
        write_file(path, text, force).with_context(|| format!("{} cannot be written", path.display()))?;
    }
    let names: Vec<_> = files.iter().map(|(path, _)| path.display().to_string()).collect();
    let config_argument = config_option(config_path);
    let mut next_commands = vec![format!("sluicegate check{config_argument}"), format!("sluicegate{config_argument}")];
    if has_keys {
        next_commands.insert(0, format!("sluicegate key new --consumer acme --create --tier free{config_argument}"));
    }
    writeln!(stderr(), "{} written. Next:\n  {}", names.join(" and "), next_commands.join("\n  "))?;
    Ok(ExitCode::SUCCESS)
}

fn write_file(path: &Path, text: &str, force: bool) -> std::io::Result<()> {
    let mut file = match File::create_new(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists && force => File::create(path)?,
        file => file?,
    };
    file.write_all(text.as_bytes())
}
