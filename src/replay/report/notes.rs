//! What a reader of a report has to know to believe the right things.

use super::format_count;
use crate::replay::merge::REORDER_WINDOW_LINES;
use crate::replay::resolve::RejectReason;
use crate::replay::{Replay, ReplayResult};

/// A limit with a window below this is sensitive to instants of whole seconds.
const COARSE_WINDOW_US: u64 = 60_000_000;

/// What there is to say.
pub(super) fn report_notes(replay: &Replay, result: &ReplayResult) -> Vec<String> {
    let (statistics, config) = (&result.statistics, &replay.config);
    let mut notes = Vec::new();
    if let Some((log, line, error)) = &statistics.first_error {
        let lines = format_count(statistics.unreadable, "line", "lines");
        notes.push(format!("{lines} cannot be read; the first is {log}:{line}: {error}"));
    }
    for (log, error) in &statistics.read_errors {
        notes.push(format!("{log} ends before its end: {error}"));
    }
    if statistics.out_of_order > 0 {
        let out_of_order = format_count(statistics.out_of_order, "request", "requests");
        notes.push(format!(
            "{out_of_order} came more than {REORDER_WINDOW_LINES} lines late, to be decided after those before"
        ));
    }
    let no_route = statistics.rejected_for(RejectReason::NoRoute);
    let capabilities = replay.capabilities();
    if no_route > 0 && !capabilities.host && !capabilities.route {
        notes.push("hosts are not in this log: routes for a host match no request".to_owned());
    }
    if result.missing_client_count > 0 {
        let (requests, header) =
            (format_count(result.missing_client_count, "request", "requests"), &config.compiled.client_ip.header);
        notes.push(format!("{requests} from trusted proxies without `{header}`: the proxies count as the clients"));
    }
    let has_short_window = config.limits.iter().any(|limit| {
        limit.skip_reason.is_none() && limit.variant.quota.window_us.is_some_and(|window| window < COARSE_WINDOW_US)
    });
    if has_short_window && !statistics.has_subsecond && statistics.requests > 0 {
        notes.push("instants in this log are whole seconds: short windows seem fuller than they were".to_owned());
    }
    notes
}
