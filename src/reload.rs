//! Follows the configuration and the files that it names while the gateway runs: the good new one takes effect at
//! once, from a bad one the old stays in force.

pub mod configuration;

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use tracing::{info, warn};

use crate::identity::jwks::KeySet;
use crate::limit::clock;
use crate::runtime::Runtime;
use crate::watch::{OnChange, Snapshot, Watcher, watch};
use configuration::{Cause, Configuration};

/// Follows the files of what is in force as long as the result lives; none if the system refuses to watch a folder.
pub fn follow(configuration: &Arc<Configuration>) -> Option<Watcher> {
    let watcher = watch(files(configuration));
    let watcher = watcher.map_err(|error| warn!("changes of files are not seen, SIGHUP reads them again: {error}"));
    watcher.ok()
}

fn files(configuration: &Arc<Configuration>) -> Vec<(Vec<Snapshot>, OnChange)> {
    let runtime = &configuration.running().runtime;
    let mut files: Vec<(Vec<Snapshot>, OnChange)> = Vec::new();
    // First: when it takes effect, the others are read with it.
    let reload = {
        let configuration = configuration.clone();
        move |files: &[Snapshot]| {
            if !configuration.was_tried(&files[0].content) {
                // How it went is told by whoever does it.
                let _ = configuration.reload(Cause::Change).blocking_recv();
            }
        }
    };
    files.push((vec![runtime.file.clone()], Box::new(reload)));
    if let Some(file) = &runtime.jwks_file {
        let runtime = runtime.clone();
        let reload = move |files: &[Snapshot]| {
            let keys = KeySet::parse(&files[0].content).map(|keys| runtime.verifier.keys.store(Arc::new(keys)));
            tell(&files[0], "the keys before stay in force", keys);
        };
        files.push((vec![file.clone()], Box::new(reload)));
    }
    if let Some(file) = &runtime.consumers_file {
        let runtime = runtime.clone();
        let reload = move |files: &[Snapshot]| {
            let file = &files[0];
            let read = runtime.reload_consumers(&file.path, &file.content, &|name| std::env::var(name).ok());
            tell(file, "the consumers before stay", read);
        };
        files.push((vec![file.clone()], Box::new(reload)));
    }
    for (index, tls) in runtime.upstream_tls.iter().enumerate().filter(|(_, tls)| !tls.files().is_empty()) {
        let runtime = runtime.clone();
        let reload = move |files: &[Snapshot]| {
            let now = Duration::from_micros(clock::unix_us());
            let read = runtime.upstream_tls[index].reload(files, now);
            let file = read.as_ref().map_or_else(|(file, _)| *file, |()| &files[0]);
            tell(file, "what was there before stays in force", read.map_err(|(_, error)| error));
        };
        files.push((tls.files(), Box::new(reload)));
    }
    for index in 0..runtime.listeners.len() {
        follow_tls(runtime, index, &mut files);
    }
    files
}

/// The files of one listener.
fn follow_tls(runtime: &Arc<Runtime>, index: usize, files: &mut Vec<(Vec<Snapshot>, OnChange)>) {
    let Some(tls) = &runtime.listeners[index].tls else { return };
    for (place, pair) in tls.certificates.iter().enumerate() {
        let runtime = runtime.clone();
        let reload = move |files: &[Snapshot]| {
            let Some(tls) = &runtime.listeners[index].tls else { return };
            let now = Duration::from_micros(clock::unix_us());
            let read = tls.reload_certificate(place, &files[0].content, &files[1].content, now);
            tell(&files[0], "the certificate before stays in force", read);
        };
        files.push((pair.to_vec(), Box::new(reload)));
    }
    if let Some((file, auth)) = &tls.client_ca {
        let (runtime, auth) = (runtime.clone(), *auth);
        let reload = move |files: &[Snapshot]| {
            let Some(tls) = &runtime.listeners[index].tls else { return };
            let read = tls.reload_clients(&files[0].content, auth);
            tell(&files[0], "the authorities before stay in force", read);
        };
        files.push((vec![file.clone()], Box::new(reload)));
    }
}

fn tell(file: &Snapshot, instead: &str, read: Result<(), impl Display>) {
    match read {
        Ok(()) => info!("reloaded {}", file.path.display()),
        Err(error) => warn!("{} is not used, {instead}: {error}", file.path.display()),
    }
}
