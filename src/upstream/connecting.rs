//! Connecting: to the member that was chosen, and to others where it does not take connections or takes long over it.

use std::sync::Arc;
use std::time::Instant;

use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::time::{Duration, sleep, timeout};

use super::link::{Connection, EndpointPool};
use super::member::Endpoint;
use super::queue::RequestPermit;
use super::{PickState, Upstream, UpstreamError};
use crate::limit::clock::monotonic;

/// For this long a connect is alone, then another one runs beside it (the Connection Attempt Delay of RFC 8305 §5).
const CONNECTION_ATTEMPT_DELAY: Duration = Duration::from_millis(250);

/// Members that one request tries at most.
const MAX_CONNECT_ATTEMPTS: usize = 9;

/// A connection, to whichever member it is.
pub(super) struct EndpointConnection {
    pub(super) pool: Arc<EndpointPool>,
    pub(super) permit: RequestPermit,
    pub(super) connection: Connection,
    pub(super) is_reused: bool,
}

impl Upstream {
    /// Connects to a member, or to another one; nothing has been written, so any request may do this. Connections that
    /// are there will do for others if `idle_will_do`.
    ///
    /// # Errors
    /// None could be reached, or not in time.
    pub(super) async fn connect(
        &self,
        first: (Arc<EndpointPool>, RequestPermit),
        pick_state: &mut PickState,
        allow_idle: bool,
    ) -> Result<EndpointConnection, UpstreamError> {
        let mut attempts = Vec::new();
        let racing = self.happy_eyeballs(first, pick_state, allow_idle, &mut attempts);
        match timeout(self.cluster.settings.connect_timeout, racing).await {
            Ok(result) => result,
            Err(_) => {
                let error = UpstreamError::ConnectTimeout { upstream: self.name().into() };
                attempts.iter().for_each(|(endpoint, _)| self.cluster.report_connect_failure(endpoint, &error));
                Err(error)
            }
        }
    }

    async fn happy_eyeballs(
        &self,
        first: (Arc<EndpointPool>, RequestPermit),
        pick_state: &mut PickState,
        allow_idle: bool,
        attempts: &mut Vec<(Arc<Endpoint>, Instant)>,
    ) -> Result<EndpointConnection, UpstreamError> {
        let mut connecting = FuturesUnordered::new();
        let mut next = Some(first);
        loop {
            if let Some((pool, permit)) = next.take() {
                pick_state.tried.push(permit.endpoint().clone());
                attempts.push((permit.endpoint().clone(), monotonic()));
                connecting.push(async move {
                    let result = pool.connect().await;
                    (pool, permit, result)
                });
            }
            tokio::select! {
                biased;
                Some((pool, permit, result)) = connecting.next() => {
                    attempts.retain(|(endpoint, _)| !Arc::ptr_eq(endpoint, permit.endpoint()));
                    let error = match result {
                        Ok((connection, is_reused)) => {
                            self.report_slow_connects(attempts);
                            return Ok(EndpointConnection { pool, permit, connection, is_reused });
                        }
                        Err(error) => error,
                    };
                    self.cluster.report_connect_failure(permit.endpoint(), &error);
                    drop(permit);
                    next = self.pick_other(pick_state);
                    if next.is_none() && connecting.is_empty() {
                        return Err(UpstreamError::Connect { upstream: self.name().into(), source: error });
                    }
                }
                () = sleep(CONNECTION_ATTEMPT_DELAY) => next = self.pick_other(pick_state),
            }
            if let Some((pool, _)) = next.as_ref().filter(|_| allow_idle)
                && let Some(connection) = pool.take_idle()
                && let Some((pool, permit)) = next.take()
            {
                self.report_slow_connects(attempts);
                return Ok(EndpointConnection { pool, permit, connection, is_reused: true });
            }
        }
    }

    /// Another member, of another family of addresses if there is one.
    pub(super) fn pick_other(&self, pick_state: &PickState) -> Option<(Arc<EndpointPool>, RequestPermit)> {
        if pick_state.tried.len() >= MAX_CONNECT_ATTEMPTS {
            return None;
        }
        let family = |endpoint: &Endpoint| endpoint.address.map(|address| address.is_ipv6());
        let last = pick_state.tried.last().and_then(|endpoint| family(endpoint));
        let table = self.cluster.load_balancer();
        let same = table.endpoints.iter().filter(|endpoint| family(endpoint) == last).cloned();
        let same_and_tried: Vec<_> = same.chain(pick_state.tried.iter().cloned()).collect();
        self.pick(pick_state.hash_key, &same_and_tried).or_else(|| self.pick(pick_state.hash_key, &pick_state.tried))
    }

    /// Those that had their head start and have lost all the same.
    fn report_slow_connects(&self, attempts: &[(Arc<Endpoint>, Instant)]) {
        for (endpoint, _) in attempts.iter().filter(|(_, since)| since.elapsed() >= CONNECTION_ATTEMPT_DELAY) {
            self.cluster.report_connect_failure(endpoint, &"connecting takes long");
        }
    }
}
