//! `sluicegate import`: prints a gateway.toml for the configuration of another program.

use std::io::{Write, stderr, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use annotate_snippets::Renderer;
use anyhow::{Context, bail};
use clap::{Args, ValueEnum};

use crate::cli::shared::env_var;
use crate::snapshot::CompiledConfig;
use crate::tools::import;
use crate::tools::import::model::{Model, Relation};
use crate::tools::import::{import, input_budget, read_input};

/// Exit code if `--strict` is given and a part of the original has no equal or differs.
const EXIT_DIFFERENCES: u8 = 1;

/// Names of the consumers file and the users file in an imported configuration.
const CONSUMERS: &str = "consumers.toml";
const USERS: &str = "htpasswd";

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
    /// Number of pods of ingress-nginx, each of which counts alone: quotas are multiplied by this number
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    replicas: Option<u32>,
    /// Write the consumers and the hashes of their API keys to this file, which must not exist
    #[arg(long, value_name = "FILE")]
    consumers: Option<PathBuf>,
    /// Write the users and the hashes of their passwords to this file, which must not exist
    #[arg(long, value_name = "FILE")]
    users: Option<PathBuf>,
}

/// The program whose configuration is imported.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Format {
    /// nginx.conf and the files that it includes
    Nginx,
    /// The output of `kubectl get ingress,svc,configmap -o yaml`, with the annotations of ingress-nginx
    IngressNginx,
    /// The output of `kubectl get ingress,svc -o yaml`, without annotations
    Kubernetes,
    /// A declarative configuration of Kong
    Kong,
    /// Dynamic configurations of Traefik, in YAML or TOML
    Traefik,
    /// Files of envoyproxy/ratelimit
    Ratelimit,
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
        Format::IngressNginx => import::Format::IngressNginx { replicas: arguments.replicas },
        Format::Kubernetes => import::Format::Kubernetes,
        Format::Kong => import::Format::Kong,
        Format::Traefik => import::Format::Traefik,
        Format::Ratelimit => import::Format::RateLimit,
    };
    if arguments.replicas.is_some() && !matches!(arguments.format, Format::IngressNginx) {
        bail!("--replicas is valid only with ingress-nginx");
    }
    let mut model = import(format, &inputs, budget)?;
    name_side_files(&mut model, arguments);
    write_side_files(&model, arguments)?;
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

/// Let the authentication providers name the files that the command writes.
fn name_side_files(model: &mut Model, arguments: &Arguments) {
    let files = [("consumers", CONSUMERS, &arguments.consumers), ("users", USERS, &arguments.users)];
    for auth in model.auth.values_mut() {
        for (key, default, path) in files {
            if let Some(path) = path.as_ref().filter(|_| auth.text(key) == Some(default)) {
                auth.set(key, path.display().to_string());
            }
        }
    }
}

/// Write the consumers file and the users file.
fn write_side_files(model: &Model, arguments: &Arguments) -> anyhow::Result<()> {
    let is_named = |key: &str| model.auth.values().any(|auth| auth.keys.contains_key(key));
    let files = [
        ("--consumers", &arguments.consumers, is_named("consumers"), model.to_consumers()),
        ("--users", &arguments.users, is_named("users"), model.to_users()),
    ];
    for (option, path, is_needed, text) in files {
        match path {
            Some(path) if is_needed => {
                write_new(path, &text).with_context(|| format!("{} cannot be written", path.display()))?;
            }
            Some(path) => bail!("{option} {}: the configuration has none", path.display()),
            None => {}
        }
    }
    Ok(())
}

fn write_new(path: &Path, text: &str) -> std::io::Result<()> {
    std::fs::File::create_new(path)?.write_all(text.as_bytes())
}
