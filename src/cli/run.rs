//! `sluicegate run`: serves until SIGTERM, SIGINT or a hot restart.

use anyhow::Context;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::{error, info};

use crate::app::hot_restart::HotRestart;
use crate::app::{App, sd_notify};
use crate::snapshot::CompiledConfig;
use crate::snapshot::current::{ConfigHandle, ReloadCause};
use crate::telemetry::log;

pub(super) fn run(config: CompiledConfig) -> anyhow::Result<()> {
    log::init(config.log.format, config.log.level).context("cannot start the log")?;
    let app = App::open(config)?;
    let (config_handle, hot_restart) = (app.config_handle(), app.hot_restart()?);
    let stop = CancellationToken::new();
    let signal_runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot watch signals")?;
    let mut signals = {
        let _context = signal_runtime.enter();
        Signals::register()?
    };
    let stop_token = stop.clone();
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        signal_runtime.block_on(async {
            signals.handle(&config_handle, hot_restart).await;
            let drain = config_handle.active().config.server.drain_timeout;
            info!(drain_timeout = ?drain, "stopping: draining requests; a second signal stops at once");
            stop_token.cancel();
            signals.stop.recv().await;
            std::process::exit(1);
        });
    })?;
    app.run(&stop)?;
    info!("stopped");
    Ok(())
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
}

impl Signals {
    fn register() -> std::io::Result<Self> {
        let (term, interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let (hangup, user2) = (signal(SignalKind::hangup())?, signal(SignalKind::user_defined2())?);
        Ok(Signals { stop: StopSignal { term, interrupt }, hangup, user2 })
    }

    /// Handle signals until a stop signal arrives or a hot restart has succeeded.
    async fn handle(&mut self, config_handle: &ConfigHandle, hot_restart: HotRestart) {
        loop {
            tokio::select! {
                () = self.stop.recv() => return sd_notify::notify_stopping(),
                // The reload logs its own result.
                _ = self.hangup.recv() => drop(config_handle.reload(ReloadCause::Requested)),
                _ = self.user2.recv() => {
                    info!("hot restart: starting a new process with the listening sockets");
                    let started = tokio::select! {
                        started = hot_restart.start() => started,
                        () = self.stop.recv() => return sd_notify::notify_stopping(),
                    };
                    match started {
                        Ok(id) => {
                            info!(pid = id, "hot restart: the new process is serving");
                            return hot_restart.finish(id);
                        }
                        Err(error) => error!(%error, "hot restart failed; keeping the current process"),
                    }
                }
            }
        }
    }
}
