//! Replay of access logs against limits. The replay checks the limits of each logged request in virtual time (the times
//! in the log), with the gateway's route table, identities, memory store and algorithms.

pub mod format;
pub mod report;
pub mod resolve;
pub mod simulator;

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io;
use std::io::{BufRead, BufReader, Cursor, Read};
use std::path::Path;
use std::rc::Rc;

use flate2::bufread::MultiGzDecoder;

use crate::snapshot::CompiledConfig;
use crate::tools::replay::format::text::FormatError;
use crate::tools::replay::format::{FieldMapping, Format, FormatCapabilities, LineError};
use crate::tools::replay::resolve::{
    IdentityField, LineResolver, RejectReason, ReplayCheck, ReplayConfig, ReplayConfigError, ReplayRequest,
    ResolvedLine, field_mappings,
};
use crate::tools::replay::simulator::{
    LimitStats, QuotaProposal, Recording, ReplayDecision, RequestMeta, Simulation, Suggestion,
};

/// The reason why logs cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The value of `--format` is neither the name of a format nor a valid nginx `log_format`.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// No format matches the first lines of this log.
    #[error("{0}: the format of the log is unknown; select it with --format")]
    UnknownFormat(String),
    /// This log is an access log of the gateway in text format, which lacks fields that the replay needs.
    #[error(
        "{0}: this is the text format of Sluicegate, which lacks fields that replay needs; set log.format = \"json\""
    )]
    TextFormat(String),
    /// An option contradicts the configuration, such as a limit that does not exist.
    #[error(transparent)]
    Config(#[from] ReplayConfigError),
    /// The log lacks a field that `--identity` names.
    #[error("the log has no field `{field}`; it has {}", all.join(", "))]
    UnknownField {
        /// The name of the missing field.
        field: String,
        /// The fields that the log has.
        all: Vec<String>,
    },
}

/// Options of a replay.
#[derive(Debug, Default)]
pub struct ReplayOptions {
    /// The format of the logs. If `None`, the format is detected from the first lines.
    pub format: Option<String>,
    /// Quotas that replace the configured quotas.
    pub proposals: Vec<QuotaProposal>,
    /// Log fields that the replay uses as the identities of limits.
    pub identity_fields: Vec<IdentityField>,
}

/// A prepared replay: the configuration and the format of the logs.
#[derive(Debug)]
pub struct Replay {
    /// The configuration for the replay.
    pub config: ReplayConfig,
    /// Name of the format of the logs.
    pub format_name: &'static str,
    line_format: Format,
    capabilities: FormatCapabilities,
}

/// The result of a replay. Each vector has one element per limit, in the order of [`ReplayConfig::limits`].
#[derive(Debug)]
pub struct ReplayResult {
    /// Statistics about the lines of the logs.
    pub statistics: LogStatistics,
    /// Number of requests that came from a trusted proxy, but whose log line lacks the header with the client address.
    pub missing_client_count: u64,
    /// Decisions of each limit.
    pub limit_stats: Vec<LimitStats>,
    /// The identities with the most denials, for each limit. Each element has the identity's label, number of requests
    /// and number of denials.
    pub top_denied: Vec<Vec<(String, u32, u32)>>,
    /// The suggested quota of each limit. `None` if no suggestion was requested, or if the limit has no requests.
    pub suggestions: Vec<Option<Suggestion>>,
}

/// Receives callbacks during a replay.
pub trait ReplayObserver {
    /// Called after every 4096 requests.
    fn on_progress(&mut self) {}

    /// Called after the limits of a request have been checked. The decisions are in the order of the checks.
    fn on_decision(&mut self, _event: &ReplayRequest, _said: &[ReplayDecision]) {}

    /// Called before the search for a suggested quota of this limit starts.
    fn on_quota_search(&mut self, _limit: &str) {}
}

/// An observer that ignores all callbacks.
impl ReplayObserver for () {}

/// Return whether a line is a record of the gateway's access log in the text format.
fn is_text_record(line: &[u8]) -> bool {
    let mut words = line.split(|byte| *byte == b' ').map(|word| str::from_utf8(word).unwrap_or_default());
    words.next().is_some_and(|time| time.parse::<jiff::Timestamp>().is_ok())
        && words.any(|word| word.starts_with("route="))
}

/// Number of requests between calls of [`ReplayObserver::on_progress`].
const PROGRESS_INTERVAL_REQUESTS: u64 = 4096;

impl Replay {
    /// Prepare the replay of these logs.
    ///
    /// # Errors
    /// See [`ReplayError`].
    pub fn new(compiled: CompiledConfig, inputs: &[LogInput], options: &ReplayOptions) -> Result<Replay, ReplayError> {
        let samples: Vec<_> = inputs.iter().map(LogInput::sample_lines).collect();
        let sample = samples.iter().find(|sample| !sample.is_empty()).cloned().unwrap_or_default();
        let (name, mut format) = match &options.format {
            Some(text) => {
                let builtin_name = format::FORMAT_NAMES.into_iter().find(|name| name == text);
                (builtin_name.unwrap_or("log_format"), Format::from_name(text)?)
            }
            // If all logs are empty, use any format.
            None if sample.is_empty() => ("combined", Format::from_name("combined")?),
            None => Format::detect(&sample).ok_or_else(|| {
                let unknown = inputs.iter().find(|source| !source.sample_lines().is_empty());
                let name = unknown.map_or(String::new(), |source| source.name().to_owned());
                if sample.iter().any(|line| is_text_record(line)) {
                    return ReplayError::TextFormat(name);
                }
                ReplayError::UnknownFormat(name)
            })?,
        };
        let capabilities = format.capabilities(&sample);
        let mappings: Vec<FieldMapping> = field_mappings(&compiled, &options.identity_fields, &capabilities)?;
        format.map_fields(&mappings, &sample).map_err(|(field, all)| ReplayError::UnknownField { field, all })?;
        let config = ReplayConfig::new(compiled, &options.proposals, &mappings, &capabilities)?;
        Ok(Replay { config, format_name: name, line_format: format, capabilities })
    }

    /// Replay the logs that this replay was prepared for. If `target` is set, suggest for each limit the smallest quota
    /// that denies less than this share of the requests.
    pub fn run(&self, inputs: Vec<LogInput>, target: Option<f64>, observer: &mut impl ReplayObserver) -> ReplayResult {
        let mut resolver = LineResolver::new(&self.config);
        let mut merge = KWayMerge::new(inputs, &self.line_format);
        let mut simulation = Simulation::new(&self.config);
        let mut limit_stats = vec![LimitStats::default(); self.config.limits.len()];
        let mut recording = Recording::default();
        let mut request_count = 0_u64;
        while let Some(request) = merge.next_request(&mut resolver) {
            simulation.add_variants(&resolver.variants);
            let meta =
                RequestMeta { time_us: request.time_us, duration_us: request.duration_us, status: request.status };
            let decisions = simulation.decide(meta, &request.checks, &resolver.seen);
            for (check, decision) in request.checks.iter().zip(decisions) {
                limit_stats[usize::from(check.limit_index)].record(request.time_us, *check, *decision);
            }
            observer.on_decision(&request, decisions);
            request_count += 1;
            if request_count.is_multiple_of(PROGRESS_INTERVAL_REQUESTS) {
                observer.on_progress();
            }
            if target.is_some() {
                recording.push(meta, &request.checks);
            }
        }
        let suggestions = (0..limit_stats.len()).map(|limit_index| {
            let target = target.filter(|_| limit_stats[limit_index].requests > 0)?;
            observer.on_quota_search(&self.config.limits[limit_index].limit.name);
            Some(recording.suggest(&self.config, &resolver, limit_index, &limit_stats[limit_index], target))
        });
        let suggestions = suggestions.collect();
        let top_denied = limit_stats.iter().zip(&resolver.seen).map(|(stats, seen)| stats.top_denied(seen)).collect();
        ReplayResult {
            statistics: merge.statistics,
            missing_client_count: resolver.missing_client_count,
            limit_stats,
            top_denied,
            suggestions,
        }
    }

    /// Return which parts of a request the logs contain.
    pub fn capabilities(&self) -> &FormatCapabilities {
        &self.capabilities
    }
}

impl Recording {
    fn push(&mut self, meta: RequestMeta, checks: &[ReplayCheck]) {
        self.checks.extend_from_slice(checks);
        self.requests.push((meta, self.checks.len()));
    }
}

// === Input: the lines of files and standard input, plain or compressed with gzip, merged in the order of time ===

/// Maximum length of a line in bytes. A longer line is reported as unreadable.
const MAX_LINE_BYTES: u64 = 1 << 20;

/// Size of a read buffer, and of the sample for format detection, in bytes.
const READ_BUFFER_BYTES: usize = 64 << 10;

/// The first bytes of each gzip stream (RFC 1952 §2.3.1).
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// Number of bytes read so far from all logs, before decompression.
#[derive(Debug, Clone, Default)]
pub struct ReadProgress(Rc<Cell<u64>>);

impl ReadProgress {
    /// Return the number of bytes read so far.
    pub fn bytes(&self) -> u64 {
        self.0.get()
    }
}

struct CountingReader<R>(R, ReadProgress);

impl<R: Read> Read for CountingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.0.read(buffer)?;
        self.1.0.set(self.1.0.get() + read as u64);
        Ok(read)
    }
}

/// A log that is open for reading.
pub struct LogInput {
    name: String,
    reader: Box<dyn BufRead>,
    /// The beginning of the log, from which the format is detected.
    sample: Vec<u8>,
    line_number: u64,
    line: Vec<u8>,
    error: Option<io::Error>,
}

/// The result of reading the next line of a log.
#[derive(Debug, PartialEq, Eq)]
pub enum NextLine<'a> {
    /// A line without its line ending.
    Line(&'a [u8]),
    /// A line longer than 1 MiB, which was skipped.
    TooLong,
    /// The end of the log, or a read error: see [`LogInput::error`].
    End,
}

impl std::fmt::Debug for LogInput {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Source").field("name", &self.name).field("number", &self.line_number).finish_non_exhaustive()
    }
}

impl LogInput {
    /// Open a log file. The path `-` is standard input.
    ///
    /// # Errors
    /// The file cannot be opened or read.
    pub fn open(path: &Path, progress: &ReadProgress) -> io::Result<LogInput> {
        if path.as_os_str() == "-" {
            return LogInput::from_reader("stdin", Box::new(io::stdin().lock()), progress);
        }
        LogInput::from_reader(&path.display().to_string(), Box::new(File::open(path)?), progress)
    }

    /// Read a log from an open reader. A gzip stream is detected by its first bytes.
    ///
    /// # Errors
    /// The first read fails.
    pub fn from_reader(name: &str, input: Box<dyn Read>, progress: &ReadProgress) -> io::Result<LogInput> {
        let mut raw = BufReader::with_capacity(READ_BUFFER_BYTES, CountingReader(input, progress.clone()));
        let compressed = raw.fill_buf()?.starts_with(&GZIP_MAGIC);
        let input: Box<dyn Read> = if compressed { Box::new(MultiGzDecoder::new(raw)) } else { Box::new(raw) };
        let mut rest = BufReader::with_capacity(READ_BUFFER_BYTES, input);
        let mut sample = Vec::new();
        // Keep the error and continue, so that the lines before the error are still read.
        let failure = (&mut rest).take(READ_BUFFER_BYTES as u64).read_to_end(&mut sample).err();
        let reader = Box::new(Cursor::new(sample.clone()).chain(rest));
        Ok(LogInput { name: name.to_owned(), reader, sample, line_number: 0, line: Vec::new(), error: failure })
    }

    /// Return the name of the log: its path, or `stdin`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Return the number of the last line that was read. The first line is number 1.
    pub fn line_number(&self) -> u64 {
        self.line_number
    }

    /// Return the read error that ended the log early.
    pub fn error(&self) -> Option<&io::Error> {
        self.error.as_ref()
    }

    /// Return the first non-empty lines of the log, without line endings.
    pub fn sample_lines(&self) -> Vec<&[u8]> {
        let mut lines: Vec<_> = self.sample.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii_end).collect();
        // Drop the last line, because the sample may end in the middle of it.
        if lines.len() > 1 {
            lines.pop();
        }
        lines.retain(|line| !line.is_empty());
        lines
    }

    /// Read the next non-empty line.
    pub fn next_line(&mut self) -> NextLine<'_> {
        loop {
            self.line.clear();
            let read = (&mut self.reader).take(MAX_LINE_BYTES).read_until(b'\n', &mut self.line);
            match read {
                Ok(0) => return NextLine::End,
                Ok(_) => self.line_number += 1,
                Err(error) => {
                    self.error = Some(error);
                    return NextLine::End;
                }
            }
            if self.line.len() as u64 == MAX_LINE_BYTES && self.line.last() != Some(&b'\n') {
                // Skip the rest of a line that is too long.
                let _ = self.reader.skip_until(b'\n');
                return NextLine::TooLong;
            }
            let end = self.line.trim_ascii_end().len();
            if end > 0 {
                return NextLine::Line(&self.line[..end]);
            }
        }
    }
}

/// Return the size of a regular file in bytes. Return `None` if the path is not a regular file.
pub fn file_size(path: &Path) -> Option<u64> {
    std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file).map(|file| file.len())
}

// Merge the requests of several logs in the order of time.
//
// Servers write a line at the end of a request, and each worker of a server writes independently. Therefore, lines are
// not sorted by the start of the request. Each log is read ahead into a heap of `REORDER_WINDOW_LINES` requests. The
// merge always returns the earliest request of all heaps.

/// Number of requests of each log that are read ahead and sorted. If the line of a request comes so late that the merge
/// has already returned a request with a later time, the request counts as out of order.
pub const REORDER_WINDOW_LINES: usize = 32_768;

/// Statistics about the lines of the logs.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct LogStatistics {
    /// Number of lines with a request.
    pub requests: u64,
    /// Number of requests that no limit applies to.
    pub unlimited: u64,
    /// Number of requests that the gateway rejects before it checks limits, indexed by [`RejectReason`].
    pub rejected: [u64; 6],
    /// Number of lines that cannot be parsed.
    pub unreadable: u64,
    /// The first unreadable line: log, line number and error.
    pub first_error: Option<(String, u64, LineError)>,
    /// Logs that ended with a read error, each with its error.
    pub read_errors: Vec<(String, String)>,
    /// Number of requests that were checked after a request with a later time, because their line came too late for the
    /// sorting of [`REORDER_WINDOW_LINES`] requests.
    pub out_of_order: u64,
    /// Time of the first and the last request, µs since the Unix epoch.
    pub time_range: Option<(u64, u64)>,
    /// Whether any time in the logs has a fraction of a second.
    pub has_subsecond: bool,
    /// Number of lines with a sample rate: the gateway logged only a share of such requests (`log.sample`).
    pub sampled: u64,
    /// Estimated number of requests that the `sampled` lines represent: the sum of 1 / sample rate.
    pub sampled_total: f64,
}

/// A log, and a heap of the requests that were read ahead from it.
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

/// Merges the requests of all logs in the order of time. Requests to which no limit applies are only counted.
pub struct KWayMerge {
    streams: Vec<LogStream>,
    /// Statistics about the lines that were read so far.
    pub statistics: LogStatistics,
    now_us: u64,
}

impl KWayMerge {
    /// Create the merge of logs in this format.
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

    /// Return the next request that limits apply to. Return `None` at the end of all logs.
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
        if let Some(rate) = entry.sample_rate.filter(|rate| *rate > 0.0 && *rate < 1.0) {
            statistics.sampled += 1;
            statistics.sampled_total += 1.0 / rate;
        }
        self.line_count += 1;
        match resolver.resolve(&entry) {
            ResolvedLine::Limited(request) => self.heap.push(Reverse(HeapEntry { request, line: self.line_count })),
            ResolvedLine::Unlimited => statistics.unlimited += 1,
            ResolvedLine::Rejected(reason) => statistics.rejected[reason as usize] += 1,
        }
    }
}

impl LogStatistics {
    /// Return the number of requests that were rejected for this reason.
    pub fn rejected_for(&self, reason: RejectReason) -> u64 {
        self.rejected[reason as usize]
    }

    /// Return the number of requests that limits apply to.
    pub fn limited_requests(&self) -> u64 {
        self.requests - self.unlimited - self.rejected.iter().sum::<u64>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    fn gzip(text: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    }

    fn lines(bytes: Vec<u8>) -> (Vec<String>, bool) {
        let mut input = LogInput::from_reader("log", Box::new(Cursor::new(bytes)), &ReadProgress::default()).unwrap();
        let mut lines = Vec::new();
        loop {
            match input.next_line() {
                NextLine::Line(line) => lines.push(String::from_utf8(line.to_vec()).unwrap()),
                NextLine::TooLong => lines.push("(too long)".to_owned()),
                NextLine::End => return (lines, input.error().is_some()),
            }
        }
    }

    #[test]
    fn next_line_accepts_all_line_endings() {
        for (bytes, expected) in [
            (b"".to_vec(), vec![]),
            (b"a\nb\n".to_vec(), vec!["a", "b"]),
            (b"a\r\n\r\n\nb".to_vec(), vec!["a", "b"]),
            (gzip(b"a\nb\n"), vec!["a", "b"]),
            ([gzip(b"a\n"), gzip(b"b\n")].concat(), vec!["a", "b"]),
            ([b"x".repeat(3 << 20), b"\nb\n".to_vec()].concat(), vec!["(too long)", "b"]),
        ] {
            assert_eq!(lines(bytes), (expected.into_iter().map(str::to_owned).collect(), false));
        }
    }

    #[test]
    fn truncated_gzip_is_read_up_to_the_error() {
        let text: String = (0..20_000).map(|number| format!("line {number}\n")).collect();
        let compressed = gzip(text.as_bytes());
        let (read, failed) = lines(compressed[..compressed.len() / 2].to_vec());
        assert!(failed, "the read error is reported");
        assert!(read.len() > 1000 && read.len() < 20_000, "{} lines", read.len());
        assert!(text.starts_with(&read.join("\n")), "the lines before the error are unchanged");
    }
}
