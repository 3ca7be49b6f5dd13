//! How an upstream that has other settings takes the place of the one before: its servers stay what they are.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Upstream;
use super::condition::HealthState;
use super::fleet::{UpstreamCluster, literal_address};
use super::member::Endpoint;
use super::settings::UpstreamSettings;
use crate::limit::clock::monotonic;

impl UpstreamCluster {
    /// The same with other settings: servers that both have are as they were, with the requests that they have.
    pub fn from_previous(settings: Arc<UpstreamSettings>, previous: &UpstreamCluster) -> Self {
        let queue = previous.queue.clone();
        queue.resize(settings.max_queue);
        let known = previous.endpoints();
        let mut endpoints = Vec::new();
        for (index, server) in settings.servers.iter().enumerate() {
            let same = known.iter().filter(|endpoint| endpoint.server.is_same_server(server));
            let first = endpoints.len();
            endpoints.extend(same.map(|endpoint| Arc::new(endpoint.with_settings(&settings, index))));
            if endpoints.len() == first {
                let health_state = HealthState::joined_at(monotonic());
                endpoints.push(Arc::new(Endpoint::new(
                    &settings,
                    index,
                    literal_address(&settings, index),
                    health_state,
                    queue.clone(),
                )));
            }
        }
        for removed in known.iter().filter(|known| !endpoints.iter().any(|endpoint| endpoint.is_same_as(known))) {
            removed.state.is_usable.store(false, Ordering::Relaxed);
        }
        let cluster = UpstreamCluster::with_endpoints(settings, endpoints, queue);
        // Some may be out, and come back.
        cluster.rebuild(&cluster.lock_rebuild());
        cluster
    }
}

impl Upstream {
    /// The way to a fleet that has taken the place of another. Connections to servers that both have stay.
    pub fn from_previous(cluster: Arc<UpstreamCluster>, previous: &Upstream) -> Self {
        let speaks = |cluster: &UpstreamCluster| (cluster.settings.protocol, cluster.settings.pool_idle_timeout);
        let (pools, endpoints) = (previous.pools.load(), cluster.endpoints());
        let known = pools.pools.iter().filter(|_| speaks(&cluster) == speaks(&previous.cluster));
        let known =
            known.filter_map(|pool| endpoints.iter().find_map(|endpoint| pool.reuse_for(endpoint))).map(Arc::new);
        let known: Vec<_> = known.collect();
        Upstream::with_pools(cluster, &known)
    }
}
