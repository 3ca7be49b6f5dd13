//! `sluicegate run`: serves until SIGTERM or ctrl-c.

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::app::App;
use crate::observe::log;
use crate::reload::configuration::Cause;
use crate::runtime::Runtime;

pub(super) fn run(runtime: Runtime) -> anyhow::Result<()> {
    log::start(runtime.log.format, runtime.log.level);
    let drain = runtime.server.drain_timeout;
    let app = App::open(runtime)?;
    let configuration = app.configuration();
    let stop = CancellationToken::new();
    let signals = tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot watch signals")?;
    let (mut term, mut interrupt, mut hangup) = {
        let _context = signals.enter();
        (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?, signal(SignalKind::hangup())?)
    };
    let stopper = stop.clone();
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        signals.block_on(async {
            loop {
                tokio::select! {
                    _ = term.recv() => break,
                    _ = interrupt.recv() => break,
                    // How it goes is told by whoever does it.
                    _ = hangup.recv() => drop(configuration.reload(Cause::Demand)),
                }
            }
            info!("stopping: running requests have {drain:?}; a second signal ends them at once");
            stopper.cancel();
            tokio::select! { _ = term.recv() => {}, _ = interrupt.recv() => {} }
            std::process::exit(1);
        });
    })?;
    app.run(&stop)?;
    info!("stopped");
    Ok(())
}
