//! `sluicegate run`: serves until SIGTERM or ctrl-c.

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::app::App;
use crate::observe::log;
use crate::runtime::Runtime;

pub(super) fn run(runtime: Runtime) -> anyhow::Result<()> {
    log::start(runtime.log.format, runtime.log.level);
    let drain = runtime.server.drain_timeout;
    let app = App::open(runtime)?;
    let watcher = app.watcher();
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
                    _ = hangup.recv() => match &watcher {
                        Some(watcher) => watcher.look_again(),
                        None => info!("SIGHUP: there is no certificate, key or consumer to read again"),
                    },
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
