//! Yesterday's access log against tomorrow's limits: requests of logs are decided in virtual time, by the route table, the
//! identities, the store and the algorithms of the gateway.

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

/// Why there is nothing to replay.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ReplayError {
    #[error(transparent)]
    Format(#[from] FormatError),
    #[error("{0}: the format of its lines is not known; --format says which it is")]
    UnknownFormat(String),
    #[error(transparent)]
    Config(#[from] ReplayConfigError),
    #[error("the log has no field `{field}`; it has {}", all.join(", "))]
    UnknownField { field: String, all: Vec<String> },
}

/// How logs are to be read and judged.
#[derive(Debug, Default)]
pub struct ReplayOptions {
    /// The format; none = what their first lines look like.
    pub format: Option<String>,
    /// Other sizes.
    pub proposals: Vec<QuotaProposal>,
    /// Fields that stand for identities.
    pub identity_fields: Vec<IdentityField>,
}

/// Logs, and the configuration that they are held against.
#[derive(Debug)]
pub struct Replay {
    /// The configuration.
    pub config: ReplayConfig,
    /// What the format is called.
    pub format_name: &'static str,
    line_format: Format,
    capabilities: FormatCapabilities,
}

/// What came of it.
#[derive(Debug)]
pub struct ReplayResult {
    /// What was in the logs.
    pub statistics: LogStatistics,
    /// Lines whose peer is a trusted proxy that does not say for whom it speaks.
    pub missing_client_count: u64,
    /// By subject.
    pub limit_stats: Vec<LimitStats>,
    /// By subject: who was denied most, with their requests and denials.
    pub top_denied: Vec<Vec<(String, u32, u32)>>,
    /// By subject.
    pub suggestions: Vec<Option<Suggestion>>,
}

/// Looks on while logs are replayed.
pub trait ReplayObserver {
    /// Some requests later.
    fn on_progress(&mut self) {}

    /// A request was decided, in the order of their instants.
    fn on_decision(&mut self, _event: &ReplayRequest, _said: &[ReplayDecision]) {}

    /// Other sizes of this limit are tried.
    fn on_quota_search(&mut self, _limit: &str) {}
}

/// Nobody looks on.
impl ReplayObserver for () {}

/// So many requests are "some".
const PROGRESS_INTERVAL_REQUESTS: u64 = 4096;

impl Replay {
    /// Prepares a configuration for the format of these logs.
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
            // There is nothing in them: any format will do.
            None if sample.is_empty() => ("combined", Format::from_name("combined")?),
            None => Format::detect(&sample).ok_or_else(|| {
                let unknown = inputs.iter().find(|source| !source.sample_lines().is_empty());
                ReplayError::UnknownFormat(unknown.map_or(String::new(), |source| source.name().to_owned()))
            })?,
        };
        let capabilities = format.capabilities(&sample);
        let mappings: Vec<FieldMapping> = field_mappings(&compiled, &options.identity_fields, &capabilities)?;
        format.map_fields(&mappings, &sample).map_err(|(field, all)| ReplayError::UnknownField { field, all })?;
        let config = ReplayConfig::new(compiled, &options.proposals, &mappings, &capabilities)?;
        Ok(Replay { config, format_name: name, line_format: format, capabilities })
    }

    /// Replays logs, which are those that it was prepared for, and suggests quotas that deny fewer than the share `target`.
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

    /// Which parts of requests the logs have.
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
