//! Requests of several logs in the order of their time.
//!
//! Servers write a line when its request is over, and each worker for itself, so that lines are out of order. Of each log the
//! earliest of so many lines comes first; the earliest of all logs is next.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::format::{Format, LineError};
use super::resolve::{LineResolver, RejectReason, ReplayRequest, ResolvedLine};
use super::source::{LogInput, NextLine};

/// Lines of a log that are put in order at a time: what comes more than so many lines late is out of order.
pub const REORDER_WINDOW_LINES: usize = 32_768;

/// What was found in the logs.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct LogStatistics {
    /// Lines that say something of a request.
    pub requests: u64,
    /// Those that no limit has a say in.
    pub unlimited: u64,
    /// Those that the gateway would turn down before it asks a limit, by [`Refused`].
    pub rejected: [u64; 4],
    /// Lines that cannot be read.
    pub unreadable: u64,
    /// The first of them: its log, its number, and what is wrong with it.
    pub first_error: Option<(String, u64, LineError)>,
    /// Logs that ended before their end, and why.
    pub read_errors: Vec<(String, String)>,
    /// Requests that came later in the log than their time by more than [`WINDOW`] lines.
    pub out_of_order: u64,
    /// The first and the last instant, µs since the Unix epoch.
    pub time_range: Option<(u64, u64)>,
    /// Whether some instant is finer than a second.
    pub has_subsecond: bool,
}

/// A log, with the requests of it that wait for their turn.
struct LogStream {
    input: LogInput,
    format: Format,
    heap: BinaryHeap<Reverse<HeapEntry>>,
    line_count: u64,
    is_at_end: bool,
}

struct HeapEntry {
    request: ReplayRequest,
    line: u64,
}

impl PartialEq for HeapEntry {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for HeapEntry {}

impl PartialOrd for HeapEntry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for HeapEntry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key().cmp(&other.key())
    }
}

impl HeapEntry {
    fn key(&self) -> (u64, u64) {
        (self.request.time_us, self.line)
    }
}

/// All requests that meet limits, in order.
pub struct KWayMerge {
    streams: Vec<LogStream>,
    /// What was found so far.
    pub statistics: LogStatistics,
    now_us: u64,
}

impl KWayMerge {
    /// Of logs in this format.
    pub fn new(inputs: Vec<LogInput>, format: &Format) -> Self {
        let to_stream = |input| LogStream {
            input,
            format: format.clone(),
            heap: BinaryHeap::new(),
            line_count: 0,
            is_at_end: false,
        };
        KWayMerge {
            streams: inputs.into_iter().map(to_stream).collect(),
            statistics: LogStatistics::default(),
            now_us: 0,
        }
    }

    /// The next request.
    pub fn next_request(&mut self, resolver: &mut LineResolver<'_>) -> Option<ReplayRequest> {
        for stream in &mut self.streams {
            while !stream.is_at_end && stream.heap.len() < REORDER_WINDOW_LINES {
                stream.read_line(resolver, &mut self.statistics);
            }
        }
        let earliest_us = |stream: &LogStream| stream.heap.peek().map(|Reverse(entry)| entry.request.time_us);
        let index = (0..self.streams.len()).filter(|index| earliest_us(&self.streams[*index]).is_some());
        let index = index.min_by_key(|index| earliest_us(&self.streams[*index]))?;
        let Reverse(HeapEntry { request, .. }) = self.streams[index].heap.pop()?;
        self.statistics.out_of_order += u64::from(request.time_us < self.now_us);
        self.now_us = self.now_us.max(request.time_us);
        Some(request)
    }
}

impl LogStream {
    fn read_line(&mut self, resolver: &mut LineResolver<'_>, statistics: &mut LogStatistics) {
        let parsed = match self.input.next_line() {
            NextLine::Line(line) => self.format.parse(line),
            NextLine::TooLong => Err(LineError::TooLong),
            NextLine::End => {
                self.is_at_end = true;
                if let Some(failure) = self.input.error() {
                    statistics.read_errors.push((self.input.name().to_owned(), failure.to_string()));
                }
                return;
            }
        };
        let entry = match parsed {
            Ok(Some(entry)) => entry,
            Ok(None) => return,
            Err(error) => {
                statistics.unreadable += 1;
                let location = || (self.input.name().to_owned(), self.input.line_number(), error);
                statistics.first_error.get_or_insert_with(location);
                return;
            }
        };
        statistics.requests += 1;
        let time_us = entry.time_us;
        let (first, last) = statistics.time_range.unwrap_or((time_us, time_us));
        statistics.time_range = Some((first.min(time_us), last.max(time_us)));
        statistics.has_subsecond |= !time_us.is_multiple_of(1_000_000);
        self.line_count += 1;
        match resolver.resolve(&entry) {
            ResolvedLine::Limited(request) => self.heap.push(Reverse(HeapEntry { request, line: self.line_count })),
            ResolvedLine::Unlimited => statistics.unlimited += 1,
            ResolvedLine::Rejected(reason) => statistics.rejected[reason as usize] += 1,
        }
    }
}

impl LogStatistics {
    /// Requests that were turned down for a reason.
    pub fn rejected_for(&self, reason: RejectReason) -> u64 {
        self.rejected[reason as usize]
    }

    /// Requests that limits had a say in.
    pub fn limited_requests(&self) -> u64 {
        self.requests - self.unlimited - self.rejected.iter().sum::<u64>()
    }
}
