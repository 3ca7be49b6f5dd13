//! What a reader of a report has to know to believe the right things.

use super::counted;
use crate::replay::merge::WINDOW;
use crate::replay::resolve::Refused;
use crate::replay::{Outcome, Replay};

/// A limit with a window below this is sensitive to instants of whole seconds.
const COARSE_US: u64 = 60_000_000;

/// What there is to say.
pub(super) fn notes(replay: &Replay, outcome: &Outcome) -> Vec<String> {
    let (found, view) = (&outcome.found, &replay.view);
    let mut notes = Vec::new();
    if let Some((log, line, error)) = &found.first {
        let lines = counted(found.unreadable, "line", "lines");
        notes.push(format!("{lines} cannot be read; the first is {log}:{line}: {error}"));
    }
    for (log, why) in &found.broken {
        notes.push(format!("{log} ends before its end: {why}"));
    }
    if found.late > 0 {
        let late = counted(found.late, "request", "requests");
        notes.push(format!("{late} came more than {WINDOW} lines late, to be decided after those before"));
    }
    let no_route = found.refused(Refused::NoRoute);
    let provides = replay.provides();
    if no_route > 0 && !provides.host && !provides.route {
        notes.push("hosts are not in this log: routes for a host match no request".to_owned());
    }
    if outcome.unnamed > 0 {
        let (requests, header) = (counted(outcome.unnamed, "request", "requests"), &view.runtime.client_ip.header);
        notes.push(format!("{requests} from trusted proxies without `{header}`: the proxies count as the clients"));
    }
    let hasty = view.subjects.iter().any(|subject| {
        subject.unknown.is_none() && subject.plan.quota.window_us.is_some_and(|window| window < COARSE_US)
    });
    if hasty && !found.fine && found.requests > 0 {
        notes.push("instants in this log are whole seconds: short windows seem fuller than they were".to_owned());
    }
    notes
}
