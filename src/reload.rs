//! Follows the files of the configuration that may change while the gateway runs: the good new one takes effect at
//! once, from a bad one the old stays in force.

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use tracing::{info, warn};

use crate::identity::jwks::KeySet;
use crate::limit::clock;
use crate::runtime::Runtime;
use crate::watch::{OnChange, Snapshot, Watcher, watch};

/// Follows the files of a runtime as long as the result lives; none if it has no such files.
///
/// # Errors
/// The system refuses to watch a folder.
pub fn follow(runtime: &Arc<Runtime>) -> Result<Option<Watcher>, notify::Error> {
    let mut files: Vec<(Vec<Snapshot>, OnChange)> = Vec::new();
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
    if files.is_empty() { Ok(None) } else { watch(files).map(Some) }
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
