//! `sluicegate init`: a first configuration with comments, for one of a few situations.

use std::fs::File;
use std::io::{ErrorKind, Write, stderr};
use std::path::Path;

use anyhow::{Context, bail};
use clap::ValueEnum;

/// What the gateway is for.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(super) enum Situation {
    /// One API, limited by client address
    SingleApi,
    /// An API for consumers with keys, each with the limits of its plan
    Plans,
    /// A site behind a CDN
    Cdn,
    /// An LLM API: tokens, streams, requests in flight
    Llm,
}

pub(super) fn init(config: &Path, situation: Situation, force: bool) -> anyhow::Result<()> {
    let (text, has_keys) = match situation {
        Situation::SingleApi => (include_str!("init/single-api.toml"), false),
        Situation::Plans => (include_str!("init/plans.toml"), true),
        Situation::Cdn => (include_str!("init/cdn.toml"), false),
        Situation::Llm => (include_str!("init/llm.toml"), true),
    };
    let mut files = vec![(config.to_owned(), text)];
    if has_keys {
        files.push((config.with_file_name("consumers.toml"), include_str!("init/consumers.toml")));
    }
    // Before anything is written: half of a configuration helps nobody.
    let there: Vec<_> = files.iter().map(|(path, _)| path).filter(|path| path.symlink_metadata().is_ok()).collect();
    if let (Some(path), false) = (there.first(), force) {
        bail!("{} is there already: --force overwrites it, --config FILE names another", path.display());
    }
    for (path, text) in &files {
        write(path, text, force).with_context(|| format!("{} cannot be written", path.display()))?;
    }
    let names: Vec<_> = files.iter().map(|(path, _)| path.display().to_string()).collect();
    let other = if config == Path::new("gateway.toml") { String::new() } else { format!(" --config {}", names[0]) };
    let mut next = vec![format!("sluicegate check{other}"), format!("sluicegate{other}")];
    if has_keys {
        next.insert(0, format!("sluicegate key new --consumer acme --create --tier free{other}"));
    }
    writeln!(stderr(), "{} written. Next:\n  {}", names.join(" and "), next.join("\n  "))?;
    Ok(())
}

fn write(path: &Path, text: &str, force: bool) -> std::io::Result<()> {
    let mut file = match File::create_new(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists && force => File::create(path)?,
        file => file?,
    };
    file.write_all(text.as_bytes())
}
