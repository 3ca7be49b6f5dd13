//! Yesterday's access log against tomorrow's limits: requests of logs are decided in virtual time, by the route table, the
//! identities, the store and the algorithms of the gateway.

pub mod format;
mod known;
pub mod merge;
pub mod report;
pub mod resolve;
pub mod simulate;
pub mod size;
pub mod source;
pub mod suggest;
pub mod tally;
pub mod view;

use format::{Format, Mapped, Provides, TemplateError};
use merge::{Found, Merge};
use resolve::{Asked, Event, Resolver};
use simulate::{Moment, Said, Simulation};
use size::Proposal;
use source::Source;
use suggest::{Kept, Suggestion};
use tally::Tally;
use view::{Stand, View, ViewError, stands};

use crate::runtime::CompiledConfig;

/// Why there is nothing to replay.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ReplayError {
    #[error(transparent)]
    Format(#[from] TemplateError),
    #[error("{0}: the format of its lines is not known; --format says which it is")]
    Undetected(String),
    #[error(transparent)]
    View(#[from] ViewError),
    #[error("the log has no field `{field}`; it has {}", all.join(", "))]
    NoField { field: String, all: Vec<String> },
}

/// How logs are to be read and judged.
#[derive(Debug, Default)]
pub struct Options {
    /// The format; none = what their first lines look like.
    pub format: Option<String>,
    /// Other sizes.
    pub proposals: Vec<Proposal>,
    /// Fields that stand for identities.
    pub stands: Vec<Stand>,
}

/// Logs, and the configuration that they are held against.
#[derive(Debug)]
pub struct Replay {
    /// The configuration.
    pub view: View,
    /// What the format is called.
    pub format: &'static str,
    lines: Format,
    provides: Provides,
}

/// What came of it.
#[derive(Debug)]
pub struct Outcome {
    /// What was in the logs.
    pub found: Found,
    /// Lines whose peer is a trusted proxy that does not say for whom it speaks.
    pub unnamed: u64,
    /// By subject.
    pub tallies: Vec<Tally>,
    /// By subject: who was denied most, with their requests and denials.
    pub worst: Vec<Vec<(String, u32, u32)>>,
    /// By subject.
    pub suggestions: Vec<Option<Suggestion>>,
}

/// Looks on while logs are replayed.
pub trait Watcher {
    /// Some requests later.
    fn read(&mut self) {}

    /// A request was decided, in the order of their instants.
    fn decided(&mut self, _event: &Event, _said: &[Said]) {}

    /// Other sizes of this limit are tried.
    fn trying(&mut self, _limit: &str) {}
}

/// Nobody looks on.
impl Watcher for () {}

/// So many requests are "some".
const SOME: u64 = 4096;

impl Replay {
    /// Prepares a configuration for the format of these logs.
    ///
    /// # Errors
    /// See [`ReplayError`].
    pub fn new(runtime: CompiledConfig, sources: &[Source], options: &Options) -> Result<Replay, ReplayError> {
        let samples: Vec<_> = sources.iter().map(Source::sample).collect();
        let sample = samples.iter().find(|sample| !sample.is_empty()).cloned().unwrap_or_default();
        let (name, mut format) = match &options.format {
            Some(text) => {
                let known = format::NAMES.into_iter().find(|name| name == text);
                (known.unwrap_or("log_format"), Format::named(text)?)
            }
            // There is nothing in them: any format will do.
            None if sample.is_empty() => ("combined", Format::named("combined")?),
            None => Format::detect(&sample).ok_or_else(|| {
                let unknown = sources.iter().find(|source| !source.sample().is_empty());
                ReplayError::Undetected(unknown.map_or(String::new(), |source| source.name().to_owned()))
            })?,
        };
        let provides = format.provides(&sample);
        let mapped: Vec<Mapped> = stands(&runtime, &options.stands, &provides)?;
        format.map(&mapped, &sample).map_err(|(field, all)| ReplayError::NoField { field, all })?;
        let view = View::new(runtime, &options.proposals, &mapped, &provides)?;
        Ok(Replay { view, format: name, lines: format, provides })
    }

    /// Replays logs, which are those that it was prepared for, and suggests quotas that deny fewer than the share `target`.
    pub fn run(&self, sources: Vec<Source>, target: Option<f64>, watcher: &mut impl Watcher) -> Outcome {
        let mut resolver = Resolver::new(&self.view);
        let mut merge = Merge::new(sources, &self.lines);
        let mut simulation = Simulation::new(&self.view);
        let mut tallies = vec![Tally::default(); self.view.subjects.len()];
        let mut kept = Kept::default();
        let mut decided = 0_u64;
        while let Some(event) = merge.next_event(&mut resolver) {
            simulation.learn(&resolver.sizes);
            let moment = Moment { at_us: event.at_us, took_us: event.took_us, status: event.status };
            let said = simulation.decide(moment, &event.asked, &resolver.seen);
            for (asked, said) in event.asked.iter().zip(said) {
                tallies[usize::from(asked.subject)].count(event.at_us, *asked, *said);
            }
            watcher.decided(&event, said);
            decided += 1;
            if decided.is_multiple_of(SOME) {
                watcher.read();
            }
            if target.is_some() {
                kept.push(moment, &event.asked);
            }
        }
        let suggestions = (0..tallies.len()).map(|subject| {
            let target = target.filter(|_| tallies[subject].requests > 0)?;
            watcher.trying(&self.view.subjects[subject].limit.name);
            Some(kept.suggest(&self.view, &resolver, subject, &tallies[subject], target))
        });
        let suggestions = suggestions.collect();
        let worst = tallies.iter().zip(&resolver.seen).map(|(tally, seen)| tally.worst(seen)).collect();
        Outcome { found: merge.found, unnamed: resolver.unnamed, tallies, worst, suggestions }
    }

    /// Which parts of requests the logs have.
    pub fn provides(&self) -> &Provides {
        &self.provides
    }
}

impl Kept {
    fn push(&mut self, moment: Moment, asked: &[Asked]) {
        self.asked.extend_from_slice(asked);
        self.moments.push((moment, self.asked.len()));
    }
}
