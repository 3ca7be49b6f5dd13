//! Requests of several logs in the order of their time.
//!
//! Servers write a line when its request is over, and each worker for itself, so that lines are out of order. Of each log the
//! earliest of so many lines comes first; the earliest of all logs is next.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::format::{Format, LineError};
use super::resolve::{Event, Refused, Resolved, Resolver};
use super::source::{Next, Source};

/// Lines of a log that are put in order at a time: what comes more than so many lines late is out of order.
pub const WINDOW: usize = 32_768;

/// What was found in the logs.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Found {
    /// Lines that say something of a request.
    pub requests: u64,
    /// Those that no limit has a say in.
    pub unlimited: u64,
    /// Those that the gateway would turn down before it asks a limit, by [`Refused`].
    pub refused: [u64; 4],
    /// Lines that cannot be read.
    pub unreadable: u64,
    /// The first of them: its log, its number, and what is wrong with it.
    pub first: Option<(String, u64, LineError)>,
    /// Logs that ended before their end, and why.
    pub broken: Vec<(String, String)>,
    /// Requests that came later in the log than their time by more than [`WINDOW`] lines.
    pub late: u64,
    /// The first and the last instant, µs since the Unix epoch.
    pub span: Option<(u64, u64)>,
    /// Whether some instant is finer than a second.
    pub fine: bool,
}

/// A log, with the requests of it that wait for their turn.
struct Feed {
    source: Source,
    format: Format,
    waiting: BinaryHeap<Reverse<Waiting>>,
    lines: u64,
    over: bool,
}

struct Waiting {
    event: Event,
    line: u64,
}

impl PartialEq for Waiting {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for Waiting {}

impl PartialOrd for Waiting {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Waiting {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key().cmp(&other.key())
    }
}

impl Waiting {
    fn key(&self) -> (u64, u64) {
        (self.event.at_us, self.line)
    }
}

/// All requests that meet limits, in order.
pub struct Merge {
    feeds: Vec<Feed>,
    /// What was found so far.
    pub found: Found,
    now_us: u64,
}

impl Merge {
    /// Of logs in this format.
    pub fn new(sources: Vec<Source>, format: &Format) -> Self {
        let feed = |source| Feed { source, format: format.clone(), waiting: BinaryHeap::new(), lines: 0, over: false };
        Merge { feeds: sources.into_iter().map(feed).collect(), found: Found::default(), now_us: 0 }
    }

    /// The next request.
    pub fn next_event(&mut self, resolver: &mut Resolver<'_>) -> Option<Event> {
        for feed in &mut self.feeds {
            while !feed.over && feed.waiting.len() < WINDOW {
                feed.read(resolver, &mut self.found);
            }
        }
        let earliest = |feed: &Feed| feed.waiting.peek().map(|Reverse(waiting)| waiting.event.at_us);
        let index = (0..self.feeds.len()).filter(|index| earliest(&self.feeds[*index]).is_some());
        let index = index.min_by_key(|index| earliest(&self.feeds[*index]))?;
        let Reverse(Waiting { event, .. }) = self.feeds[index].waiting.pop()?;
        self.found.late += u64::from(event.at_us < self.now_us);
        self.now_us = self.now_us.max(event.at_us);
        Some(event)
    }
}

impl Feed {
    fn read(&mut self, resolver: &mut Resolver<'_>, found: &mut Found) {
        let parsed = match self.source.next_line() {
            Next::Line(line) => self.format.parse(line),
            Next::TooLong => Err(LineError::TooLong),
            Next::End => {
                self.over = true;
                if let Some(failure) = self.source.failure() {
                    found.broken.push((self.source.name().to_owned(), failure.to_string()));
                }
                return;
            }
        };
        let entry = match parsed {
            Ok(Some(entry)) => entry,
            Ok(None) => return,
            Err(error) => {
                found.unreadable += 1;
                let place = || (self.source.name().to_owned(), self.source.number(), error);
                found.first.get_or_insert_with(place);
                return;
            }
        };
        found.requests += 1;
        let at = entry.at_us;
        let (first, last) = found.span.unwrap_or((at, at));
        found.span = Some((first.min(at), last.max(at)));
        found.fine |= !at.is_multiple_of(1_000_000);
        self.lines += 1;
        match resolver.resolve(&entry) {
            Resolved::Limited(event) => self.waiting.push(Reverse(Waiting { event, line: self.lines })),
            Resolved::Unlimited => found.unlimited += 1,
            Resolved::Refused(refused) => found.refused[refused as usize] += 1,
        }
    }
}

impl Found {
    /// Requests that were turned down for a reason.
    pub fn refused(&self, why: Refused) -> u64 {
        self.refused[why as usize]
    }

    /// Requests that limits had a say in.
    pub fn limited(&self) -> u64 {
        self.requests - self.unlimited - self.refused.iter().sum::<u64>()
    }
}
