//! `sluicegate run`: serves requests until SIGTERM, SIGINT or a hot restart.

use std::path::Path;
use std::process::ExitCode;

use annotate_snippets::{Level, Renderer};
use anyhow::Context;
use clap::Args;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use crate::admin::current::{ConfigHandle, ReloadCause};
use crate::app::hot_restart::HotRestart;
use crate::app::{App, AppError, hot_restart};
use crate::cli::shared::env_var;
use crate::config::error::{FileIssues, Issue};
use crate::config::file::UnsetVariables;
use crate::config::include::ConfigFiles;
use crate::config::value_path::value_span;
use crate::snapshot::CompiledConfig;
use crate::telemetry::log;
use crate::tools::doctor::{Check, Requirements};
use crate::tools::{check, doctor};

/// Serve requests (the default command)
///
/// SIGHUP reloads the configuration, SIGTERM drains connections and stops the gateway, SIGUSR2 starts a hot
/// restart.
#[derive(Debug, Args)]
#[command(after_help = examples![
    "sluicegate run",
    "sluicegate run --config gateway.toml",
    "SLUICEGATE_CONFIG=gateway.toml sluicegate run",
])]
pub(super) struct Arguments {}

pub(super) fn run(config_path: &Path) -> anyhow::Result<ExitCode> {
    let (config, file) = CompiledConfig::load_with_source(config_path, &env_var, UnsetVariables::Error)?;
    log::init(config.log.format, config.log.level).context("cannot start the log")?;
    let files = config.files.clone();
    let app = App::open(config, &file, check::warnings_by_file).map_err(|error| with_config_line(error, &files))?;
    let config_handle = app.config_handle();
    let hot_restart = app.hot_restart()?;
    let active = config_handle.active();
    std::thread::Builder::new().name("permissions".to_owned()).spawn(move || warn_of_permissions(&active.config))?;
    let stop = CancellationToken::new();
    let signal_runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot watch signals")?;
    let mut signals = {
        let _context = signal_runtime.enter();
        Signals::register()?
    };
    let stop_token = stop.clone();
    let stopping = app.stopping();
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        signal_runtime.block_on(async {
            if signals.handle(&config_handle, hot_restart).await == StopCause::Signal {
                hot_restart::notify_stopping();
                stopping.cancel();
                signals.stop.wait_accept_grace(&config_handle).await;
            }
            let drain = config_handle.active().config.server.drain_timeout;
            info!(
                drain_timeout = ?drain,
                "stopping after the requests in flight; another signal stops the gateway at once"
            );
            stop_token.cancel();
            signals.stop.recv().await;
            std::process::exit(1);
        });
    })?;
    app.run(&stop)?;
    info!("stopped");
    Ok(ExitCode::SUCCESS)
}

/// Log the permissions that the user of the gateway lacks at the Redis servers. Otherwise, only a request that needs them
/// would show it.
fn warn_of_permissions(config: &CompiledConfig) {
    let Some((deployment, settings)) = &config.store.redis else { return };
    let requirements = Requirements::new(config, settings);
    // Ignore errors: the store reports a server that it cannot reach.
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return };
    runtime.block_on(async {
        for server in doctor::resolve_servers(deployment).await.unwrap_or_default() {
            if let Some(check) = doctor::missing_permissions(&server, &requirements).await {
                let Check { message, advice, .. } = check;
                warn!(server = %server.name, permissions = %message, advice, "the Redis user lacks permissions");
            }
        }
    });
}

/// The reason why the gateway cannot start, with the configuration key that the error is about.
#[derive(Debug, thiserror::Error)]
#[error("{}", .0.report(&Level::ERROR, &Renderer::plain()))]
pub(super) struct StartError(pub(super) FileIssues);

/// Return the error with the line of its configuration key. An error that is not about a key is returned unchanged.
fn with_config_line(error: AppError, files: &ConfigFiles) -> anyhow::Error {
    let Some(key) = error.config_key() else { return error.into() };
    let text = String::from_utf8_lossy(&files.main.content).into_owned();
    let hint = error.hint().map(str::to_owned);
    let issue = Issue { span: value_span(&text, &key), message: error.to_string(), hint };
    StartError(FileIssues { path: files.main.path.clone(), text, issues: vec![issue] }).into()
}

/// Why the process stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StopCause {
    /// SIGTERM or SIGINT.
    Signal,
    /// A hot restart has succeeded. The new process accepts all new connections, so `accept_grace` does not apply.
    HotRestart,
}

/// The signals that the process handles.
struct Signals {
    stop: StopSignal,
    hangup: Signal,
    user2: Signal,
}

/// The signals that stop the process: SIGTERM and SIGINT.
struct StopSignal {
    term: Signal,
    interrupt: Signal,
}

impl StopSignal {
    async fn recv(&mut self) {
        tokio::select! { _ = self.term.recv() => {}, _ = self.interrupt.recv() => {} }
    }

    /// Wait until `accept_grace` has elapsed, or until another SIGTERM or SIGINT arrives.
    async fn wait_accept_grace(&mut self, config_handle: &ConfigHandle) {
        let accept_grace = config_handle.active().config.server.accept_grace;
        if !accept_grace.is_zero() {
            info!(
                ?accept_grace,
                "stopping: /readyz returns 503, but requests are still accepted; a second signal starts to drain at \
                 once"
            );
            // Ignore the result, because the timeout and a second signal have the same effect: the function returns.
            let _ = timeout(accept_grace, self.recv()).await;
        }
    }
}

impl Signals {
    fn register() -> std::io::Result<Self> {
        let term = signal(SignalKind::terminate())?;
        let interrupt = signal(SignalKind::interrupt())?;
        let hangup = signal(SignalKind::hangup())?;
        let user2 = signal(SignalKind::user_defined2())?;
        Ok(Signals { stop: StopSignal { term, interrupt }, hangup, user2 })
    }

    /// Handle signals until a stop signal arrives or a hot restart has succeeded.
    async fn handle(&mut self, config_handle: &ConfigHandle, hot_restart: HotRestart) -> StopCause {
        loop {
            tokio::select! {
                () = self.stop.recv() => return StopCause::Signal,
                // Ignore the result, because `reload` logs it.
                _ = self.hangup.recv() => drop(config_handle.reload(ReloadCause::Requested)),
                _ = self.user2.recv() => {
                    info!("hot restart: starting a new process with the listening sockets");
                    let started = tokio::select! {
                        started = hot_restart.start() => started,
                        () = self.stop.recv() => return StopCause::Signal,
                    };
                    match started {
                        Ok(id) => {
                            info!(pid = id, "hot restart: the new process is serving");
                            hot_restart.finish(id);
                            return StopCause::HotRestart;
                        }
                        Err(error) => error!(%error, "hot restart failed; the current process continues to serve"),
                    }
                }
            }
        }
    }
}
