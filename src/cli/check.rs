//! `sluicegate check`: says whether the configuration can be used.

use std::io::{Write, stdout};
use std::path::Path;

use crate::runtime::Runtime;

pub(super) fn check(path: &Path, runtime: &Runtime) -> anyhow::Result<()> {
    let mut out = stdout().lock();
    let limits = runtime.limits.len();
    writeln!(
        out,
        "{}: fine: {} listeners, {} routes, {limits} limits, {} upstreams; store: {}",
        path.display(),
        runtime.listeners.len(),
        runtime.routes.len(),
        runtime.upstreams.len(),
        runtime.store.name,
    )?;
    if limits > runtime.used_limits() {
        writeln!(out, "warning: {} of the limits are used by no route", limits - runtime.used_limits())?;
    }
    Ok(())
}
