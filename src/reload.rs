//! Follows the files of the configuration that may change while the gateway runs: the good new one takes effect at
//! once, from a bad one the old stays in force.

use std::sync::Arc;

use tracing::{info, warn};

use crate::identity::jwks::KeySet;
use crate::runtime::Runtime;
use crate::watch::{OnChange, Snapshot, Watcher, watch};

/// Follows the files of a runtime as long as the result lives; none if it has no such files.
///
/// # Errors
/// The system refuses to watch a folder.
pub fn follow(runtime: &Arc<Runtime>) -> Result<Option<Watcher>, notify::Error> {
    let mut files: Vec<(Snapshot, OnChange)> = Vec::new();
    if let Some(file) = &runtime.jwks_file {
        let (runtime, path) = (runtime.clone(), file.path.clone());
        let reload = move |content: &[u8]| match KeySet::parse(content) {
            Ok(keys) => {
                runtime.verifier.keys.store(Arc::new(keys));
                info!("reloaded {}", path.display());
            }
            Err(error) => warn!("{} is not used, the keys before stay in force: {error}", path.display()),
        };
        files.push((file.clone(), Box::new(reload)));
    }
    if let Some(file) = &runtime.consumers_file {
        let (runtime, path) = (runtime.clone(), file.path.clone());
        let reload =
            move |content: &[u8]| match runtime.reload_consumers(&path, content, &|name| std::env::var(name).ok()) {
                Ok(()) => info!("reloaded {}", path.display()),
                Err(error) => warn!("{} is not used, the consumers before stay: {error}", path.display()),
            };
        files.push((file.clone(), Box::new(reload)));
    }
    if files.is_empty() { Ok(None) } else { watch(files).map(Some) }
}
