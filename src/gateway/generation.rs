//! What one worker serves requests with: a configuration and what belongs to it by index, swapped as a whole.

use std::sync::Arc;

use super::meters::{Meters, Tallies};
use crate::runtime::Runtime;
use crate::upstream::Upstream;
use crate::upstream::fleet::Fleet;

/// A configuration, with the worker's own connections and counts.
#[derive(Debug)]
pub(super) struct Generation {
    pub(super) runtime: Arc<Runtime>,
    pub(super) upstreams: Vec<Arc<Upstream>>,
    pub(super) meters: Meters,
}

impl Generation {
    /// The first one.
    pub(super) fn new(runtime: Arc<Runtime>, fleets: &[Arc<Fleet>], tallies: &Tallies, worker: usize) -> Self {
        let meters = Meters::new(tallies, &runtime, worker);
        let upstreams = fleets.iter().cloned().map(Upstream::new).map(Arc::new).collect();
        Generation { runtime, upstreams, meters }
    }

    /// The one that takes the place of another, with its connections to upstreams that are still there.
    pub(super) fn succeeding(
        before: &Generation,
        runtime: Arc<Runtime>,
        fleets: &[Arc<Fleet>],
        tallies: &Tallies,
        worker: usize,
    ) -> Self {
        let upstream = |fleet: &Arc<Fleet>| {
            let known = before.upstreams.iter().find(|upstream| upstream.name() == &*fleet.settings.name);
            match known {
                Some(known) if known.leads_to(fleet) => known.clone(),
                Some(known) => Arc::new(Upstream::succeeding(fleet.clone(), known)),
                None => Arc::new(Upstream::new(fleet.clone())),
            }
        };
        let meters = Meters::new(tallies, &runtime, worker);
        Generation { upstreams: fleets.iter().map(upstream).collect(), runtime, meters }
    }
}
