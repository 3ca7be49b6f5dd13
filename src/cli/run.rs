//! `sluicegate run`: serves until SIGTERM, ctrl-c, or until another process has taken its place.

use anyhow::Context;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::{error, info};

use crate::app::handover::HotRestart;
use crate::app::{App, service};
use crate::observe::log;
use crate::reload::configuration::{ConfigHandle, ReloadCause};
use crate::runtime::CompiledConfig;

pub(super) fn run(runtime: CompiledConfig) -> anyhow::Result<()> {
    log::init(runtime.log.format, runtime.log.level).context("cannot start the log")?;
    let app = App::open(runtime)?;
    let (configuration, handover) = (app.config_handle(), app.hot_restart()?);
    let stop = CancellationToken::new();
    let executor =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot watch signals")?;
    let mut signals = {
        let _context = executor.enter();
        Signals::watch()?
    };
    let stopper = stop.clone();
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        executor.block_on(async {
            signals.attend(&configuration, handover).await;
            let drain = configuration.active().config.server.drain_timeout;
            info!("stopping: running requests have {drain:?}; a second signal ends them at once");
            stopper.cancel();
            signals.stop.recv().await;
            std::process::exit(1);
        });
    })?;
    app.run(&stop)?;
    info!("stopped");
    Ok(())
}

/// What the process may be told.
struct Signals {
    stop: Stop,
    hangup: Signal,
    user2: Signal,
}

/// No new requests are wanted.
struct Stop {
    term: Signal,
    interrupt: Signal,
}

impl Stop {
    async fn recv(&mut self) {
        tokio::select! { _ = self.term.recv() => {}, _ = self.interrupt.recv() => {} }
    }
}

impl Signals {
    fn watch() -> std::io::Result<Self> {
        let (term, interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let (hangup, user2) = (signal(SignalKind::hangup())?, signal(SignalKind::user_defined2())?);
        Ok(Signals { stop: Stop { term, interrupt }, hangup, user2 })
    }

    /// Does what it is told, until no new requests are wanted.
    async fn attend(&mut self, configuration: &ConfigHandle, handover: HotRestart) {
        loop {
            tokio::select! {
                () = self.stop.recv() => return service::notify_stopping(),
                // How it goes is told by whoever does it.
                _ = self.hangup.recv() => drop(configuration.reload(ReloadCause::Requested)),
                _ = self.user2.recv() => {
                    info!("another process is started with the sockets of this one");
                    let started = tokio::select! {
                        started = handover.start() => started,
                        () = self.stop.recv() => return service::notify_stopping(),
                    };
                    match started {
                        Ok(id) => {
                            info!("process {id} serves in the place of this one");
                            return handover.finish(id);
                        }
                        Err(error) => error!("this process stays: {error}"),
                    }
                }
            }
        }
    }
}
