//! What a worker counts: requests by route, decisions by limit, answers by upstream.

use std::sync::Arc;
use std::time::Duration;

use http::{Response, StatusCode};

use super::denied::Denied;
use crate::http::body::Body;
use crate::identity::name::Name;
use crate::limit::backend::Source;
use crate::limit::clock::monotonic;
use crate::limit::decision::{Check, Decision};
use crate::limit::outage::Unavailable;
use crate::limit::plan::OnStoreError;
use crate::runtime::Runtime;
use crate::tally::{Durations, Family, Tally};
use crate::upstream::{Trail, UpstreamError};

/// The classes of statuses, as labels.
pub const CLASSES: [&str; 5] = ["1xx", "2xx", "3xx", "4xx", "5xx"];

/// What a limit had to do with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Judgement {
    /// It let the request pass.
    Allowed,
    /// It denied the request.
    Denied,
    /// It would have, were it no shadow.
    ShadowDenied,
    /// Its local share let the request pass.
    LocalAllowed,
    /// Its local share denied the request.
    LocalDenied,
    /// It was not asked, since the store failed: `on_store_error` decided.
    StoreError,
}

impl Judgement {
    /// All, in the order of their tally.
    pub const ALL: [Judgement; 6] = [
        Judgement::Allowed,
        Judgement::Denied,
        Judgement::ShadowDenied,
        Judgement::LocalAllowed,
        Judgement::LocalDenied,
        Judgement::StoreError,
    ];

    /// One word for labels.
    pub fn word(self) -> &'static str {
        match self {
            Judgement::Allowed => "allowed",
            Judgement::Denied => "denied",
            Judgement::ShadowDenied => "shadow_denied",
            Judgement::LocalAllowed => "local_allowed",
            Judgement::LocalDenied => "local_denied",
            Judgement::StoreError => "store_error",
        }
    }

    /// Whether it is about an identity that is over the limit.
    fn denies(self) -> bool {
        match self {
            Judgement::Denied | Judgement::ShadowDenied | Judgement::LocalDenied => true,
            Judgement::Allowed | Judgement::LocalAllowed | Judgement::StoreError => false,
        }
    }

    /// What the limit of a check had to do with the decision; none if others denied.
    pub fn of(check: &Check<'_, '_>, decision: &Decision<'_>) -> Option<Self> {
        let local = decision.source == Source::Local;
        let of_place = |place| decision.limits.iter().find(move |judged| judged.place == place);
        if decision.shadow_denied.iter().any(|limit| std::ptr::eq(*limit, check.limit)) {
            return Some(Judgement::ShadowDenied);
        }
        if decision.overloaded || local && check.limit.on_store_error != OnStoreError::Local {
            return Some(Judgement::StoreError);
        }
        match (decision.admitted, local) {
            (true, false) => Some(Judgement::Allowed),
            (true, true) => Some(Judgement::LocalAllowed),
            (false, local) => of_place(check.place)
                .filter(|judged| judged.denies())
                .map(|_| if local { Judgement::LocalDenied } else { Judgement::Denied }),
        }
    }
}

/// The counts of a process.
#[derive(Debug, Default)]
pub struct Tallies {
    /// Requests by route; those that match none have no name.
    pub routes: Family<Answers>,
    /// Decisions by limit, by [`Judgement`].
    pub limits: Family<Tally<6>>,
    /// Requests that were denied, whichever of their limits it was.
    pub denials: Family<Tally<1>>,
    /// Who was denied by each limit.
    pub denied: Family<Denied>,
    /// Answers by upstream.
    pub upstreams: Family<Answers>,
    /// Requests that were sent again by upstream, by [`Again`].
    pub again: Family<Tally<3>>,
    /// What deciding took, all limits of a request together.
    pub decisions: Family<Durations>,
}

/// Answers by class of status, and the time to their heads.
#[derive(Debug, Default)]
pub struct Answers {
    /// By [`CLASSES`]; in one more those that never came.
    pub classes: Tally<{ CLASSES.len() + 1 }>,
    /// From the request to the head of the response.
    pub durations: Durations,
}

impl Answers {
    /// One more; none if it never came.
    pub fn note(&self, status: Option<StatusCode>, took: Duration) {
        let class = |status: StatusCode| usize::from(status.as_u16() / 100).clamp(1, CLASSES.len()) - 1;
        self.classes.count(status.map_or(CLASSES.len(), class));
        self.durations.note(took);
    }
}

/// Those of one worker, by the indices of the configuration that it serves.
#[derive(Debug)]
pub(super) struct Meters {
    routes: Vec<OfRoute>,
    /// Requests that match no route.
    stray: Arc<Answers>,
    upstreams: Vec<OfUpstream>,
    denials: Arc<Tally<1>>,
    decisions: Arc<Durations>,
}

#[derive(Debug)]
struct OfUpstream {
    answers: Arc<Answers>,
    again: Arc<Tally<3>>,
}

#[derive(Debug)]
struct OfRoute {
    answers: Arc<Answers>,
    limits: Vec<(Arc<Tally<6>>, Arc<Denied>)>,
}

impl Meters {
    /// The counts that a worker adds to.
    pub(super) fn new(tallies: &Tallies, runtime: &Runtime, worker: usize) -> Self {
        let limits = |route: &crate::runtime::Route| {
            let names = route.metering.limits.iter().map(|metered| &*metered.limit.name);
            names.map(|name| (tallies.limits.of(name, worker), tallies.denied.of(name, worker))).collect()
        };
        let of_upstream = |name: &str| OfUpstream {
            answers: tallies.upstreams.of(name, worker),
            again: tallies.again.of(name, worker),
        };
        let routes = runtime.routes.iter();
        Meters {
            routes: routes
                .map(|route| OfRoute { answers: tallies.routes.of(&route.name, worker), limits: limits(route) })
                .collect(),
            stray: tallies.routes.of("", worker),
            upstreams: runtime.upstreams.iter().map(|upstream| of_upstream(&upstream.name)).collect(),
            denials: tallies.denials.of("", worker),
            decisions: tallies.decisions.of("", worker),
        }
    }

    /// A request was answered.
    pub(super) fn answered(&self, route: Option<usize>, status: StatusCode, took: Duration) {
        route.map_or(&self.stray, |route| &self.routes[route].answers).note(Some(status), took);
    }

    /// A request was sent on, and what came of it.
    pub(super) fn sent(
        &self,
        upstream: usize,
        answer: &Result<Response<Body>, UpstreamError>,
        took: Duration,
        trail: &Trail,
    ) {
        let OfUpstream { answers, again } = &self.upstreams[upstream];
        if !answer.as_ref().is_err_and(UpstreamError::is_clients_fault) {
            answers.note(answer.as_ref().ok().map(Response::status), took);
        }
        for (why, times) in trail.again().into_iter().enumerate().filter(|(_, times)| *times > 0) {
            again.add(why, times);
        }
    }

    /// The limits of a route decided. Names of identities are asked for where somebody is denied.
    pub(super) fn decided(
        &self,
        route: usize,
        checks: &[Check<'_, '_>],
        decision: &Result<Decision<'_>, Unavailable>,
        took: Duration,
        name: impl Fn(&Check<'_, '_>) -> Name,
    ) {
        self.decisions.note(took);
        if decision.as_ref().is_ok_and(|decision| !decision.admitted) {
            self.denials.count(0);
        }
        for check in checks {
            let judgement = match decision {
                Ok(decision) => Judgement::of(check, decision),
                Err(_) => Some(Judgement::StoreError),
            };
            let (tally, denied) = &self.routes[route].limits[check.place];
            if let Some(judgement) = judgement {
                tally.count(judgement as usize);
                if judgement.denies() {
                    denied.note(check.identity, monotonic(), || name(check));
                }
            }
        }
    }
}
