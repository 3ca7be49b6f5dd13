//! `sluicegate check`: says whether the configuration can be used.

use std::io::{Write, stdout};
use std::path::Path;

use crate::limit::quota::Calendar;
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
    for limit in &runtime.limits {
        let window = match (limit.quota.window_us, limit.quota.calendar) {
            (Some(us), _) if us.is_multiple_of(1_000_000) => format!("{} s", us / 1_000_000),
            (Some(us), _) => format!("{} ms", us / 1000),
            (None, Some(Calendar::Year)) => "365 days".to_owned(),
            (None, _) => "28 days".to_owned(),
        };
        let (most, at_once) = (limit.most_in_any_window(), limit.rule.capacity());
        let trial = if limit.shadow { " (shadow: never denies)" } else { "" };
        writeln!(out, "  {}: at most {most} in any {window}, {at_once} at once{trial}", limit.name)?;
        if !runtime.routes.iter().any(|route| route.uses(limit)) {
            writeln!(out, "  warning: no route uses `{}`", limit.name)?;
        }
    }
    Ok(())
}
