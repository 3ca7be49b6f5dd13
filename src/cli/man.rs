//! `sluicegate man`: the manual pages, from the help of each command and sections that clap does not generate.

use std::io;
use std::io::{Write, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Command};
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};

/// Print the manual page of sluicegate, or write one page per command into a folder
#[derive(Debug, Args)]
#[command(after_help = examples![
    "sluicegate man > sluicegate.1",
    "mkdir -p man1 && sluicegate man man1",
])]
pub(super) struct Arguments {
    /// Write one page per command into this existing folder: sluicegate.1, sluicegate-check.1 and so on
    folder: Option<PathBuf>,
}

/// Print the manual page, or write one page per command into a folder.
pub(super) fn run(arguments: &Arguments, program: &Command) -> anyhow::Result<ExitCode> {
    match &arguments.folder {
        None => stdout().write_all(&page(program)?)?,
        Some(folder) => write_pages(program, folder)
            .with_context(|| format!("cannot write the manual pages to {}", folder.display()))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The entries of a section of a manual page: for example exit codes, each with its meaning.
type Entries = &'static [(&'static str, &'static str)];

/// Write the pages of a program and of all its commands into a folder.
fn write_pages(program: &Command, folder: &Path) -> io::Result<()> {
    write_tree(&built(program), folder)
}

fn write_tree(command: &Command, folder: &Path) -> io::Result<()> {
    for subcommand in visible_subcommands(command) {
        write_tree(subcommand, folder)?;
    }
    std::fs::write(folder.join(format!("{}.1", name(command))), render(command)?)
}

/// Return the page of a program.
fn page(program: &Command) -> io::Result<Vec<u8>> {
    render(&built(program))
}

/// Build a clap command. This step gives the subcommands their full names and the global options.
fn built(program: &Command) -> Command {
    let mut program = program.clone().disable_help_subcommand(true);
    program.build();
    program
}

fn visible_subcommands(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set())
}

/// The name of a manual page, such as `sluicegate-key-new`.
fn name(command: &Command) -> &str {
    command.get_display_name().unwrap_or_else(|| command.get_name())
}

fn render(command: &Command) -> io::Result<Vec<u8>> {
    let has_subcommands = visible_subcommands(command).next().is_some();
    let titled = command.clone().subcommand_help_heading("COMMANDS").subcommand_value_name("command");
    let man = Man::new(titled).source(concat!("sluicegate ", env!("CARGO_PKG_VERSION"))).manual("Sluicegate Manual");
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if has_subcommands {
        man.render_subcommands_section(&mut page)?;
    }
    let name = name(command);
    let task = name.split('-').nth(1).unwrap_or("run");
    let mut sections = Roff::new();
    write_entries(&mut sections, "EXIT STATUS", exit_statuses(task));
    write_entries(&mut sections, "FILES", files(task));
    write_entries(&mut sections, "ENVIRONMENT", environment(task));
    sections.control("TP", []).text([bold("SLUICEGATE_CONFIG")]);
    sections.text([roman("Path of the configuration file, used if --config is not given.")]);
    write_examples(&mut sections, command);
    write_see_also(&mut sections, command);
    sections.to_writer(&mut page)?;
    Ok(page)
}

fn write_entries(page: &mut Roff, heading: &str, entries: Entries) {
    page.control("SH", [heading]);
    for (name, meaning) in entries {
        page.control("TP", []).text([bold(*name)]).text([roman(*meaning)]);
    }
}

/// Write the section EXAMPLES. Its lines are the examples of the command's help.
fn write_examples(page: &mut Roff, command: &Command) {
    let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    page.control("SH", ["EXAMPLES"]).control("nf", []);
    for example in help.lines().skip(1) {
        page.text([roman(example.trim())]);
    }
    page.control("fi", []);
}

/// Write the section SEE ALSO, which names the manual pages of the parent command and of the subcommands.
fn write_see_also(page: &mut Roff, command: &Command) {
    let parent = name(command).rsplit_once('-').map(|(parent, _)| parent);
    let pages: Vec<_> = parent.into_iter().chain(visible_subcommands(command).map(name)).collect();
    let references = pages.iter().enumerate().flat_map(|(index, name)| {
        let separator = if index + 1 < pages.len() { "(1), " } else { "(1)" };
        [bold(*name), roman(separator)]
    });
    page.control("SH", ["SEE ALSO"]).text(references.collect::<Vec<_>>());
}

/// The exit statuses of a command.
fn exit_statuses(command: &str) -> Entries {
    match command {
        "run" => &[
            ("0", "The gateway stopped after SIGTERM, SIGINT or a hot restart."),
            (
                "1",
                "The gateway could not start, for example because an address was in use, or a signal ended it while \
                 it drained.",
            ),
            ("2", "The configuration or the command line is invalid."),
        ],
        "check" => &[
            ("0", "The configuration is valid."),
            ("1", "With --strict: the configuration is valid, but there are warnings."),
            ("2", "The configuration or the command line is invalid."),
        ],
        "doctor" => &[
            ("0", "No check failed. There may be warnings."),
            ("1", "A check failed."),
            ("2", "The configuration or the command line is invalid."),
        ],
        "explain" => &[
            ("0", "The request was explained, regardless of the status of its response."),
            ("1", "The command failed."),
            ("2", "The configuration, the request or the command line is invalid."),
        ],
        "import" => &[
            ("0", "The configuration was printed."),
            ("1", "With --strict: a part of the configuration has no equal, or differs in effect."),
            ("2", "A file cannot be read or has a syntax error, or the command line is invalid."),
        ],
        "replay" => {
            &[("0", "The logs were read."), ("2", "The logs, the configuration or the command line are invalid.")]
        }
        "status" => &[
            ("0", "The gateway responded, whether it is ready or not."),
            ("1", "The gateway is unreachable or rejected the request."),
            ("2", "The configuration or the command line is invalid."),
        ],
        "top" | "inspect" | "reset" | "override" => &[
            ("0", "The gateway accepted the request."),
            ("1", "The gateway is unreachable or rejected the request."),
            ("2", "The configuration or the command line is invalid."),
        ],
        "probe" => &[
            ("0", "The gateway is ready; with --live: it runs."),
            ("1", "The gateway is not ready, or it does not respond."),
            ("2", "The command line is invalid."),
        ],
        "schema" | "completions" | "man" => &[
            ("0", "The output was written."),
            ("1", "The output could not be written."),
            ("2", "The command line is invalid."),
        ],
        _ => &[
            ("0", "Success."),
            ("1", "The command failed."),
            ("2", "The configuration or the command line is invalid."),
        ],
    }
}

/// The files of a command.
fn files(command: &str) -> Entries {
    const CONFIG: (&str, &str) =
        ("gateway.toml", "The configuration, see --config. Paths in this file are relative to its directory.");
    const CONSUMERS: (&str, &str) = (
        "consumers.toml",
        "Consumers and the hashes of their API keys, see `auth.NAME.consumers` of the configuration.",
    );
    match command {
        "init" => &[
            ("gateway.toml", "The configuration that the command writes, see --config."),
            ("consumers.toml", "The consumers file in the same directory, written with templates that have API keys."),
        ],
        "key" => &[
            ("gateway.toml", "The configuration, see --config. It names the consumers file in `auth.NAME.consumers`."),
            (
                "consumers.toml",
                "Consumers and the hashes of their API keys. The command replaces the file atomically, and keeps its \
                 permissions and comments.",
            ),
        ],
        "import" => &[
            ("nginx.conf", "A file of the other program, and the files that it includes."),
            ("consumers.toml", "The consumers file that --consumers names."),
            ("htpasswd", "The users file that --users names."),
        ],
        "replay" => &[("gateway.toml", "The configuration, see --config. Not read with --by."), CONSUMERS],
        "top" | "inspect" | "reset" | "override" => &[(
            "gateway.toml",
            "The configuration, see --config. Its table `[admin]` contains the address and the token. With --admin, \
             the command does not read this file.",
        )],
        "probe" => &[(
            "gateway.toml",
            "The configuration, see --config. Its table `[admin]` contains the socket, the address and the token. \
             With --url, the command does not read this file.",
        )],
        "status" => &[(
            "gateway.toml",
            "The configuration, see --config. Its table `[admin]` contains the socket, the address and the token. \
             With --admin, the command does not read this file.",
        )],
        "schema" => &[
            ("gateway.toml", "The configuration, which the first schema describes."),
            ("consumers.toml", "The consumers file, which the schema `consumers` describes."),
        ],
        "completions" => &[
            ("/usr/share/bash-completion/completions/sluicegate", "Completions for all users of bash."),
            ("/usr/share/zsh/site-functions/_sluicegate", "Completions for all users of zsh."),
            ("~/.config/fish/completions/sluicegate.fish", "Completions for one user of fish."),
        ],
        "man" => &[("/usr/local/share/man/man1", "Manual pages of local programs.")],
        _ => &[CONFIG, CONSUMERS],
    }
}

/// The environment variables that a command reads. `SLUICEGATE_CONFIG` is not listed, because all commands read it.
fn environment(command: &str) -> Entries {
    const IN_CONFIG: (&str, &str) = (
        "NAME in ${NAME}",
        "Environment variable that the configuration references as ${NAME}. ${NAME:-value} has a default.",
    );
    const NO_COLOR: (&str, &str) = ("NO_COLOR", "Print no colors on terminals.");
    const TRUST: (&str, &str) =
        ("SSL_CERT_FILE, SSL_CERT_DIR", "Trust these CA certificates instead of the CA certificates of the system.");
    const TOKEN: (&str, &str) =
        ("SLUICEGATE_ADMIN_TOKEN", "Token for the admin listener; takes precedence over `admin.token`.");
    match command {
        "run" => &[
            IN_CONFIG,
            TRUST,
            ("LISTEN_FDS, LISTEN_PID", "Listening sockets from the service manager, see sd_listen_fds(3)."),
            ("NOTIFY_SOCKET", "Socket of the service manager for notifications, see sd_notify(3)."),
            (
                "OTEL_EXPORTER_OTLP_HEADERS, OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES",
                "Request headers and resource attributes of the trace export.",
            ),
        ],
        "check" => &[IN_CONFIG, TRUST, TOKEN, NO_COLOR],
        "doctor" => &[IN_CONFIG, TRUST, NO_COLOR],
        "explain" => &[IN_CONFIG, TRUST, TOKEN, NO_COLOR],
        "reset" => &[IN_CONFIG, TOKEN, NO_COLOR],
        "probe" => &[IN_CONFIG, TOKEN],
        "status" | "top" | "inspect" | "override" | "certificates" => {
            &[IN_CONFIG, TOKEN, ("COLUMNS", "Maximum width of tables. Default: the width of the terminal."), NO_COLOR]
        }
        "key" | "replay" => &[IN_CONFIG, NO_COLOR],
        _ => &[],
    }
}
