//! Replay of access logs against limits. Each logged request is decided in virtual time, with the route table, the
//! identities, the memory store and the algorithms of the gateway.

pub mod format;
pub mod log_input;
pub mod quota_search;
pub mod report;
pub mod resolve;
pub mod simulator;

use crate::snapshot::CompiledConfig;
use crate::tools::replay::format::nginx::FormatError;
use crate::tools::replay::format::{FieldMapping, Format, FormatCapabilities};
use crate::tools::replay::log_input::{KWayMerge, LogInput, LogStatistics};
use crate::tools::replay::quota_search::{QuotaProposal, Recording, Suggestion};
use crate::tools::replay::resolve::{
    IdentityField, LineResolver, ReplayCheck, ReplayConfig, ReplayConfigError, ReplayRequest, field_mappings,
};
use crate::tools::replay::simulator::{LimitStats, ReplayDecision, RequestMeta, Simulation};

/// The reason why logs cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The value of `--format` is neither a name nor a valid `log_format`.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// No format matches the first lines of this log.
    #[error("{0}: the format of the log is unknown; select it with --format")]
    UnknownFormat(String),
    /// This log is an access log of the gateway in text format, which programs cannot read.
    #[error(
        "{0}: this is the text format of Sluicegate, which lacks fields that replay needs; set log.format = \"json\""
    )]
    TextFormat(String),
    /// The options contradict the configuration.
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
    /// The format of the logs. `None` means that the first lines show the format.
    pub format: Option<String>,
    /// Quotas that replace the configured quotas.
    pub proposals: Vec<QuotaProposal>,
    /// Log fields that are used as the identity of a limit.
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
    /// Number of lines from trusted proxies without the client address header.
    pub missing_client_count: u64,
    /// Decisions of each limit.
    pub limit_stats: Vec<LimitStats>,
    /// The identities with the most denials, for each limit: label, requests, denials.
    pub top_denied: Vec<Vec<(String, u32, u32)>>,
    /// The suggested quota of each limit. `None` if no quota was requested, or if the limit has no requests.
    pub suggestions: Vec<Option<Suggestion>>,
}

/// Callbacks during a replay.
pub trait ReplayObserver {
    /// Called after every 4096 requests.
    fn on_progress(&mut self) {}

    /// Called for each decided request, in the order of the decisions.
    fn on_decision(&mut self, _event: &ReplayRequest, _said: &[ReplayDecision]) {}

    /// Called before the search for a quota of this limit starts.
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
    /// The errors are described at [`ReplayError`].
    pub fn new(compiled: CompiledConfig, inputs: &[LogInput], options: &ReplayOptions) -> Result<Replay, ReplayError> {
        let samples: Vec<_> = inputs.iter().map(LogInput::sample_lines).collect();
        let sample = samples.iter().find(|sample| !sample.is_empty()).cloned().unwrap_or_default();
        let (name, mut format) = match &options.format {
            Some(text) => {
                let builtin_name = format::FORMAT_NAMES.into_iter().find(|name| name == text);
                (builtin_name.unwrap_or("log_format"), Format::from_name(text)?)
            }
            // If all logs are empty, the format does not matter.
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

    /// Return the parts of requests that the logs contain.
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
