//! Counts the gateways that share the store, so that local shares divide limits by their number. The first worker of
//! each gateway adds an entry to a key in the store once per second.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;
use tracing::{debug, warn};

use crate::admin::state::ProcessState;
use crate::clock::{LogThrottle, monotonic};
use crate::limiter::gateway_count::{ENTRY_TTL, SteadyCount};
use crate::limiter::random_permit_id;
use crate::limiter::shared_data::SharedData;
use crate::limiter::store::RedisStore;
use crate::limiter::verdict::StoreError;

/// Time between two calls. Other gateways count a new gateway after this time.
const INTERVAL: Duration = Duration::from_secs(1);

/// Minimum interval between log records about a key that cannot be used.
const LOG_INTERVAL: Duration = Duration::from_secs(3600);

/// Count the gateways while `serve` runs. Afterwards, remove this gateway.
pub(super) async fn count_while(state: &Arc<ProcessState>, store: &RedisStore, serve: impl Future<Output = ()>) {
    let id = format!("{:016x}/2", random_permit_id());
    let mut counter =
        Counter { state: state.clone(), store: store.clone(), id: id.clone(), steady: SteadyCount::default() };
    // Count before the first request, so that its states are already written where they belong.
    counter.count().await;
    let counting = tokio::spawn(async move {
        loop {
            sleep(INTERVAL).await;
            counter.count().await;
        }
    });
    serve.await;
    counting.abort();
    // If the store does not answer, the entry expires.
    if let Err(error) = SharedData(store).count_gateways(&id, Duration::ZERO).await {
        debug!(%error, "cannot remove this gateway from the count of gateways");
    }
}

struct Counter {
    state: Arc<ProcessState>,
    store: RedisStore,
    id: String,
    steady: SteadyCount,
}

impl Counter {
    /// Count the gateways once. As long as one of them reads only separate keys, write states there.
    async fn count(&mut self) {
        match SharedData(&self.store).count_gateways(&self.id, ENTRY_TTL).await {
            Ok((count, older)) => {
                let count = self.steady.add(count, monotonic());
                let store = &self.state.config_handle.active().config.store;
                store.gateways.set_counted(count);
                self.store.layout().set_separate_keys(older > 0);
            }
            Err(error) => {
                self.steady.interrupt();
                log_failure(&error);
            }
        }
    }
}

/// Warn only about errors of the key, because rate limit checks already report all other errors.
fn log_failure(error: &StoreError) {
    static LOG_THROTTLE: LogThrottle = LogThrottle::new();
    let lacks_permission = error.error_reply().is_some_and(|reply| reply.code() == "NOPERM");
    let is_about_key = lacks_permission || matches!(error, StoreError::CorruptState(_));
    match is_about_key && LOG_THROTTLE.should_log(LOG_INTERVAL) {
        true => warn!(
            %error,
            "cannot count the gateways, so local shares divide limits by store.gateway_count; docs/how-to/redis.md \
             lists the permissions"
        ),
        false => debug!(%error, "cannot count the gateways at the moment; retrying"),
    }
}
