//! The command line: arguments and output, one module per command.

/// Build the examples at the end of a command's help: one example per line, under a heading that looks like clap's own
/// headings.
macro_rules! examples {
    ($($line:literal),+ $(,)?) => {
        concat!("\u{1b}[1m\u{1b}[4mExamples:\u{1b}[0m" $(, "\n  ", $line)+)
    };
}

pub mod admin;
mod against;
pub(crate) mod check;
mod doctor;
pub mod explain;
mod generate;
pub(crate) mod key;
pub mod replay;
mod run;
mod shared;
mod status;
mod usage;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use annotate_snippets::{Level, Renderer};
use clap::error::{ContextKind, ContextValue};
use clap::{CommandFactory, Parser, Subcommand};

use crate::cli::shared::{EXIT_INVALID_CONFIG, env_var, is_broken_pipe, load_for};
use crate::config::error::ConfigError;
use crate::config::file::{UnsetVariables, config_argument};
use crate::snapshot::CompiledConfig;

/// The text that `--version` prints after the name of the program. `-V` prints only the version. `build.rs` sets the
/// environment variables in this text.
const LONG_VERSION: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    "\ncommit: ",
    env!("SLUICEGATE_COMMIT"),
    "\nrustc: ",
    env!("SLUICEGATE_RUSTC_VERSION"),
    "\ntarget: ",
    env!("SLUICEGATE_TARGET"),
    "\nPGO: ",
    env!("SLUICEGATE_PGO"),
);

/// An HTTP gateway with exact, distributed rate limits.
///
/// For each request, the gateway finds the matching route, identifies the client and checks all limits in one atomic
/// store call. It then proxies the request or returns 429.
#[derive(Debug, Parser)]
#[command(version, long_version = LONG_VERSION, max_term_width = 100, after_help = examples![
    "sluicegate init --template plans",
    "sluicegate check --strict",
    "sluicegate run --config gateway.toml",
])]
pub struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,

    /// Use this configuration file; `-` reads standard input
    #[arg(long, short, global = true, value_name = "FILE", default_value = "gateway.toml", env = "SLUICEGATE_CONFIG")]
    config: PathBuf,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve requests (the default command)
    ///
    /// SIGHUP reloads the configuration, SIGTERM drains connections and stops the gateway, SIGUSR2 starts a hot
    /// restart.
    #[command(after_help = examples![
        "sluicegate run",
        "sluicegate run --config gateway.toml",
        "SLUICEGATE_CONFIG=gateway.toml sluicegate run",
    ])]
    Run,
    /// Validate the configuration: print errors, warnings and the maximum cost that each limit admits
    ///
    /// The exit code is 0 if the configuration is valid and 2 if it is not. With --strict, the exit code is 1 if there
    /// are warnings.
    #[command(after_help = examples![
        "sluicegate check --strict",
        "sluicegate check --offline --config gateway.toml",
        "sluicegate check --against /run/sluicegate/admin.sock",
        "sluicegate check --json > report.json",
    ])]
    Check(check::Options),
    /// Check the Redis servers, token issuers and webhooks of the configuration, and recommend changes
    ///
    /// The exit code is 1 if a check failed.
    #[command(after_help = examples![
        "sluicegate doctor",
        "sluicegate doctor --json > report.json",
    ])]
    Doctor {
        /// Print a JSON object
        #[arg(long)]
        json: bool,
    },
    /// Explain how the gateway would handle a request: route, limits, response
    ///
    /// The command sends no request to an upstream and charges no limit. It reads the limits' counters from Redis. With
    /// a memory store, it reads them from the running gateway.
    #[command(after_help = examples![
        "sluicegate explain GET https://api.example.com/v1/users/7",
        "sluicegate explain POST http://localhost:8080/v1/users -H 'x-api-key: KEY' --ip 192.0.2.7",
        "sluicegate explain GET http://localhost:8080/ping --offline --json",
    ])]
    Explain(explain::Arguments),
    /// Create a commented configuration file from a template
    #[command(after_help = examples![
        "sluicegate init",
        "sluicegate init --template plans --force",
        "sluicegate init --template cdn --config cdn.toml",
    ])]
    Init {
        /// Create the file from this template
        #[arg(long = "template", visible_alias = "for", value_name = "TEMPLATE", default_value = "single-api")]
        template: generate::Template,
        /// Overwrite existing files
        #[arg(long)]
        force: bool,
    },
    /// Create, list, disable and revoke API keys
    #[command(after_help = examples![
        "sluicegate key new --consumer acme > key.txt",
        "sluicegate key list",
        "sluicegate key revoke < key.txt",
    ])]
    Key {
        /// Use the consumers file of the provider `[auth.NAME]`; required if the configuration names several consumers
        /// files
        #[arg(long, value_name = "NAME", global = true)]
        auth: Option<String>,
        #[command(subcommand)]
        action: key::Action,
    },
    /// Reload the configuration of the running gateway, and print what changed
    ///
    /// The command waits for the result. If the gateway rejects the new configuration, it keeps the active one, and the
    /// exit code is 1.
    #[command(after_help = examples![
        "sluicegate reload",
        "sluicegate reload --admin /run/sluicegate/admin.sock",
    ])]
    Reload {
        /// Call the gateway at this admin socket (a path) or admin listener (a URL) [default: the admin socket, or the
        /// `[admin]` address if no gateway listens on the socket]
        #[arg(long, value_name = "SOCKET|URL")]
        admin: Option<String>,
        /// Print a JSON object
        #[arg(long)]
        json: bool,
    },
    /// Ask the running gateway whether it is ready, for health checks
    ///
    /// The command prints the status on one line. The exit code is 0 if the gateway is ready, and 1 if it is not ready
    /// or does not respond. The command reads only the table `[admin]` of the configuration. Other tables may be
    /// invalid, and environment variables in them may be unset.
    #[command(after_help = examples![
        "sluicegate probe",
        "sluicegate probe --live --timeout 1s",
        "sluicegate probe --url http://127.0.0.1:9180",
    ])]
    Probe(status::ProbeOptions),
    /// Show the state of the running gateway on one page
    ///
    /// The page shows the version, configuration, requests of the last minute, listeners, store, upstreams,
    /// certificates and the limits with the most denials. Tables are as wide as the terminal. The environment variable
    /// COLUMNS sets another width.
    #[command(after_help = examples![
        "sluicegate status",
        "sluicegate status --admin http://127.0.0.1:9180",
        "sluicegate status --json > status.json",
    ])]
    Status(status::Options),
    #[command(flatten)]
    Admin(admin::AdminCommand),
    /// Print the JSON Schema of the configuration, for editors
    #[command(after_help = examples![
        "sluicegate schema > gateway.schema.json",
        "sluicegate schema consumers > consumers.schema.json",
    ])]
    Schema {
        /// The kind of configuration file whose schema to print
        #[arg(default_value = "gateway")]
        file: generate::SchemaFile,
    },
    /// Print the completion script for a shell
    #[command(after_help = examples![
        "sluicegate completions bash > sluicegate.bash",
        "sluicegate completions zsh > _sluicegate",
    ])]
    Completions {
        /// Print the script for this shell
        shell: clap_complete::Shell,
    },
    /// Print the manual page of sluicegate, or write one page per command into a folder
    #[command(after_help = examples![
        "sluicegate man > sluicegate.1",
        "mkdir -p man1 && sluicegate man man1",
    ])]
    Man {
        /// Write one page per command into this existing folder: sluicegate.1, sluicegate-check.1 and so on
        folder: Option<PathBuf>,
    },
    /// Print usage totals: the cost that each limit charged to each identity per day
    ///
    /// The command reads the totals from Redis. With a memory store, it reads them from the running gateway.
    #[command(after_help = examples![
        "sluicegate usage --by month",
        "sluicegate usage --limit rate --identity acme --from 2026-11-01 --to 2026-11-30",
        "sluicegate usage --by month --from 2026-10-01 --to 2026-10-31 --csv > october.csv",
    ])]
    Usage(usage::Arguments),
    /// Replay access logs against the configured or proposed limits
    #[command(after_help = examples![
        "sluicegate replay access.log",
        "sluicegate replay access.log --limit per-ip=600/min,burst=50",
        "sluicegate replay access.log --by ip --limit per-ip=600/min --html report.html",
        "cat access.log | sluicegate replay - --json > report.json",
    ])]
    Replay(replay::Arguments),
}

impl Arguments {
    /// Parse the command line. If an argument is invalid, print the error and exit, as [`Parser::parse`] does. If the
    /// argument is a configuration file or a word of another program, the error says what to write instead.
    pub fn from_command_line() -> Self {
        Arguments::try_parse().unwrap_or_else(|error| with_hint(error).exit())
    }
}

/// Commands and options of other programs, each with what to write instead.
const FOREIGN_ARGUMENTS: &[(&[&str], &str)] = &[
    (&["serve", "start", "server", "up", "daemon", "listen", "proxy", "gateway", "launch"], "sluicegate run"),
    (
        &[
            "validate",
            "test",
            "verify",
            "lint",
            "configtest",
            "config-test",
            "check-config",
            "-t",
            "-T",
            "--test",
            "--validate",
            "--check",
            "--dry-run",
        ],
        "sluicegate check",
    ),
    (&["version", "ver", "-v", "-version"], "sluicegate --version"),
    (&["--reload", "-s", "hup", "refresh"], "sluicegate reload"),
    (
        &["stop", "quit", "shutdown", "--stop"],
        "to stop the gateway, send SIGTERM to its process, or use systemctl stop sluicegate",
    ),
    (&["restart", "upgrade"], "for a hot restart, send SIGUSR2 to the process, or use systemctl restart sluicegate"),
    (&["new", "create", "generate", "setup", "example"], "sluicegate init"),
    (&["stats", "info", "ps", "state"], "sluicegate status"),
    (&["health", "healthcheck", "ping", "--health"], "sluicegate probe"),
    (&["-f", "--file", "--conf", "--cfg", "-C", "--config-file", "--config.file"], "--config FILE"),
    (
        &["-p", "--port", "--listen", "--address", "--addr", "--bind"],
        "set `address` of a [[listener]] in the configuration",
    ),
    (&["-d", "--daemon", "--background"], "the gateway runs in the foreground; systemd runs it in the background"),
    (&["--debug", "--verbose", "-vv", "--log-level", "-q", "--quiet"], "set `level` of [log] in the configuration"),
];

/// Add a hint to the error about an unknown argument that is a configuration file or a word of another program.
fn with_hint(mut error: clap::Error) -> clap::Error {
    let argument =
        [ContextKind::InvalidSubcommand, ContextKind::InvalidArg].into_iter().find_map(|kind| error.get(kind));
    let Some(ContextValue::String(argument)) = argument else { return error };
    let path = Path::new(argument);
    let word = argument.split([' ', '=']).next().unwrap_or_default();
    let foreign = FOREIGN_ARGUMENTS.iter().find(|(words, _)| words.contains(&word));
    let hint = if path.extension().is_some_and(|extension| extension == "toml") || path.is_file() {
        format!("if this is the configuration file, write {}", config_argument(path))
    } else if let Some((_, instead)) = foreign {
        match instead.starts_with("sluicegate") || instead.starts_with("--") {
            true => format!("write `{instead}`"),
            false => (*instead).to_owned(),
        }
    } else {
        return error;
    };
    error.remove(ContextKind::SuggestedSubcommand);
    error.remove(ContextKind::SuggestedArg);
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![hint.into()]));
    error
}

/// Run a command and return its exit code.
///
/// # Errors
/// The command failed. An invalid configuration is not returned as an error: this function prints the report and
/// returns exit code 2.
pub fn execute(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    match dispatch(arguments) {
        Err(error) => match error.downcast_ref::<ConfigError>() {
            Some(error) => {
                // The anstream crate writes colors only to a terminal, and never if NO_COLOR is set.
                anstream::eprintln!("{}", error.report(&Renderer::styled()));
                Ok(ExitCode::from(EXIT_INVALID_CONFIG))
            }
            None if let Some(run::StartError(issues)) = error.downcast_ref() => {
                anstream::eprintln!("{}", issues.report(&Level::ERROR, &Renderer::styled()));
                Ok(ExitCode::FAILURE)
            }
            // Exit with code 0 if the reader of standard output closes the pipe, as `head` does.
            None if is_broken_pipe(&error) => Ok(ExitCode::SUCCESS),
            None => Err(error),
        },
        result => result,
    }
}

fn dispatch(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let load = || CompiledConfig::load(&arguments.config, &env_var);
    match &arguments.command {
        None | Some(Command::Run) => {
            let (config, file) = CompiledConfig::load_with_source(&arguments.config, &env_var, UnsetVariables::Error)?;
            run::run(config, &file)?;
        }
        Some(Command::Check(options)) => return check::run(&arguments.config, options),
        Some(Command::Doctor { json }) => return doctor::run(&load()?, *json),
        Some(Command::Explain(explain_arguments)) => {
            return explain::run(explain_arguments, &load()?, &arguments.config);
        }
        Some(Command::Reload { admin, json }) => status::reload(&arguments.config, admin.as_deref(), *json)?,
        Some(Command::Status(options)) => status::run(&arguments.config, options)?,
        Some(Command::Probe(options)) => status::probe(&arguments.config, options)?,
        Some(Command::Admin(command)) => {
            let client = match command.admin_url() {
                Some(url) => admin::client::AdminClient::from_url(url)?,
                None => {
                    // If SLUICEGATE_ADMIN_TOKEN is set, the command does not use `admin.token`. An unset variable in
                    // `admin.token` is then only a warning.
                    let needed = match admin::client::token_from_env() {
                        Some(_) => &["admin.address"][..],
                        None => &["admin"],
                    };
                    let config = load_for(&arguments.config, needed)?;
                    admin::client::AdminClient::from_config(&arguments.config, &config)?
                }
            };
            command.run(&client)?;
        }
        Some(Command::Usage(arguments_of_usage)) => usage::run(arguments_of_usage, &load()?, &arguments.config)?,
        Some(Command::Replay(replay_arguments)) => return replay::run(replay_arguments, &arguments.config),
        Some(Command::Init { template, force }) => generate::write_config(&arguments.config, *template, *force)?,
        Some(Command::Key { auth, action }) => key::run(&arguments.config, auth.as_deref(), action)?,
        Some(Command::Schema { file }) => generate::print_schema(*file)?,
        Some(Command::Completions { shell }) => generate::print_completions(&Arguments::command(), *shell)?,
        Some(Command::Man { folder }) => generate::write_man_pages(&Arguments::command(), folder.as_deref())?,
    }
    Ok(ExitCode::SUCCESS)
}
