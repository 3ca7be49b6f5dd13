//! `import`: converts the configuration of another program to a gateway.toml, and lists everything that has no equal or
//! differs in effect.

mod document;
mod kong;
mod kubernetes;
pub mod model;
pub mod nginx;
mod paths;
mod ratelimit;
mod traefik;
mod units;
mod writer;

use std::fs::File;
use std::io;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use toml::Value;

use crate::tools::import::model::{Model, Origin, Relation, Table};

/// Maximum size in bytes of all files of an import together. Larger files are an error, because the parsed form of a
/// file needs several times its size in memory.
const MAX_INPUT: u64 = 4 << 20;

/// The program whose configuration is imported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Configuration files of nginx.
    Nginx,
    /// Ingress resources with the annotations of ingress-nginx. Each of `replicas` pods counts alone.
    IngressNginx {
        /// Number of pods. `None`: it is not known.
        replicas: Option<u32>,
    },
    /// Ingress resources without annotations.
    Kubernetes,
    /// Declarative configurations of Kong.
    Kong,
    /// Dynamic configurations of Traefik.
    Traefik,
    /// Files of `envoyproxy/ratelimit`.
    RateLimit,
}

/// A file to import.
#[derive(Debug)]
pub struct Input {
    /// Path of the file, as messages show it.
    pub name: Arc<str>,
    /// Directory of relative paths in the file. `None`: the input includes no other files.
    pub directory: Option<PathBuf>,
    /// Content of the file.
    pub text: String,
}

/// The reason why nothing was imported.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// A file cannot be read.
    #[error("{0} cannot be read: {1}")]
    Unreadable(PathBuf, io::Error),
    /// The files are larger than [`MAX_INPUT`].
    #[error("{0}: the files are larger than {limit} MiB", limit = MAX_INPUT >> 20)]
    TooLarge(PathBuf),
    /// A file is not UTF-8.
    #[error("{0} is not UTF-8")]
    NotText(PathBuf),
    /// A file contains expressions of a template engine.
    #[error("{0}: this is a template (`{1}`): render it first, and import the result")]
    Template(Origin, &'static str),
    /// A file has a syntax error, or exceeds a bound of the parser.
    #[error("{0}: {1}")]
    Syntax(Origin, String),
}

/// Read a file to import. `-` reads standard input. `budget` is the number of bytes that may still be read.
///
/// # Errors
/// The file cannot be read, is not text or is too large.
pub fn read_input(path: &Path, budget: &mut u64) -> Result<Input, ImportError> {
    let is_stdin = path.as_os_str() == "-";
    let reader: Box<dyn Read> = if is_stdin {
        Box::new(io::stdin().lock())
    } else {
        Box::new(File::open(path).map_err(|error| ImportError::Unreadable(path.to_owned(), error))?)
    };
    let mut bytes = Vec::new();
    let read = reader.take(*budget + 1).read_to_end(&mut bytes);
    let length = read.map_err(|error| ImportError::Unreadable(path.to_owned(), error))? as u64;
    *budget = budget.checked_sub(length).ok_or_else(|| ImportError::TooLarge(path.to_owned()))?;
    let text = String::from_utf8(bytes).map_err(|_| ImportError::NotText(path.to_owned()))?;
    let name = if is_stdin { "stdin".into() } else { path.display().to_string().into() };
    let directory = if is_stdin { PathBuf::from(".") } else { path.parent().map(Path::to_owned).unwrap_or_default() };
    Ok(Input { name, directory: Some(directory), text })
}

/// The number of bytes that an import may read.
#[must_use]
pub fn input_budget() -> u64 {
    MAX_INPUT
}

/// Import files.
///
/// # Errors
/// A file has a syntax error, is a template, or exceeds a bound.
pub fn import(format: Format, inputs: &[Input], budget: u64) -> Result<Model, ImportError> {
    for input in inputs {
        reject_template(input)?;
    }
    match format {
        Format::Nginx => nginx::import(inputs, budget),
        Format::IngressNginx { replicas } => kubernetes::import(inputs, true, replicas),
        Format::Kubernetes => kubernetes::import(inputs, false, None),
        Format::Kong => kong::import(inputs),
        Format::Traefik => traefik::import(inputs),
        Format::RateLimit => ratelimit::import(inputs),
    }
    .map(completed)
}

/// Sort the messages by position, first those about the whole import. Add a route if there is none, because a
/// configuration needs one. Upgrades need upstreams with HTTP/1.1. Several
/// authentication providers are all required.
fn completed(mut model: Model) -> Model {
    if model.routes.is_empty() && model.descriptors.is_empty() {
        let mut route =
            Table { comments: vec!["A placeholder: the files have no route".to_owned()], ..Table::default() };
        route.set("path", "/{*rest}");
        route.set_entry("respond", "status", 404);
        model.add_route("none", route);
        model.note(Relation::NoEqual, None, "the files contain no route: a placeholder responds with 404");
    }
    let is_http2 = |name: &str| model.upstreams.get(name).is_some_and(|table| table.text("protocol") == Some("http2"));
    for route in model.routes.values_mut() {
        // The items of `require` are alternatives; a nested list requires all of them, as other programs do.
        if let Some(Value::Array(providers)) = route.keys.get_mut("require")
            && providers.len() > 1
        {
            *providers = vec![Value::Array(std::mem::take(providers))];
        }
        let only_http1 = match route.keys.get("upstream") {
            Some(Value::Table(weights)) => !weights.keys().any(|name| is_http2(name)),
            Some(Value::String(name)) => !is_http2(name),
            _ => true,
        };
        if !only_http1 {
            route.keys.shift_remove("websocket");
        }
    }
    model.notes.sort_by(|one, other| one.origin.cmp(&other.origin));
    model
}

/// Reject expressions of template engines: ERB, Jinja, Helm and Go templates.
fn reject_template(input: &Input) -> Result<(), ImportError> {
    for (index, line) in input.text.lines().enumerate() {
        let code = line.split_once('#').map_or(line, |(code, _)| code);
        let pairs = [("<%", "%>"), ("{%", "%}"), ("{{", "}}")];
        if let Some((open, _)) = pairs.iter().find(|(open, close)| {
            code.split_once(open).is_some_and(|(_, rest)| rest.contains(close) || *open == "<%" && rest.is_empty())
        }) {
            return Err(ImportError::Template(Origin::new(&input.name, index + 1), open));
        }
    }
    Ok(())
}
