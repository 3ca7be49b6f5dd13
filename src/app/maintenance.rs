//! The maintenance thread. For all workers together, it resolves DNS names of upstreams, performs health checks, and
//! fetches JWK Sets and access tokens. Workers do not perform health checks: on a busy worker, health checks would run late and mark
//! healthy endpoints as unhealthy.

use std::convert::Infallible;
use std::sync::mpsc::Sender;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;
use std::{io, thread};

use aws_lc_rs::digest::{SHA256, digest};
use bytes::Bytes;
use http::header::{ACCEPT, LOCATION, USER_AGENT};
use http::{HeaderValue, Request};
use tokio::runtime::Builder;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};
use uuid::Uuid;

use crate::app::AppError;
use crate::app::access_tokens;
use crate::clock::unix_us;
use crate::identity::jwt::{KeySet, KeySetError, REFRESH_TIMEOUT};
use crate::snapshot::CompiledConfig;
use crate::snapshot::remote_auth::KeyUrl;
use crate::telemetry::pluralize;
use crate::upstream::cluster::UpstreamCluster;
use crate::upstream::dns::{DnsCache, DnsResolver};
use crate::upstream::fetch;
use crate::upstream::fetch::FetchError;
use crate::upstream::health_check;

/// Maximum time to wait for the first DNS lookup of new upstreams, and for new JWK Sets. After this time, requests to
/// an upstream without addresses get 503. Requests with tokens that cannot be verified yet also get 503.
const FIRST_LOOKUP_TIMEOUT: Duration = Duration::from_secs(1);

type Clusters = Arc<[Arc<UpstreamCluster>]>;

/// The configuration and clusters to maintain. All clones of the sender are dropped when all host names have been
/// looked up once and all unknown JWK Sets have been fetched once.
type Maintained = (Arc<CompiledConfig>, Clusters, mpsc::Sender<Infallible>);

/// Handle of the maintenance thread.
#[derive(Debug)]
pub(super) struct MaintenanceThread(UnboundedSender<Maintained>);

/// The running tasks: DNS lookups, health checks and refreshes of JWK Sets and access tokens.
#[derive(Default)]
struct MaintenanceTasks {
    /// Clusters with host names, and the task that resolves these names.
    lookups: (Vec<Arc<UpstreamCluster>>, Option<AbortHandle>),
    health_checks: Vec<(Arc<UpstreamCluster>, AbortHandle)>,
    token_refreshes: Vec<(Arc<UpstreamCluster>, AbortHandle)>,
    key_refreshes: Vec<AbortHandle>,
}

impl MaintenanceThread {
    /// Start the thread. It has no clusters yet, and runs until `stop` is cancelled.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(super) fn start(stop: CancellationToken) -> Result<(Self, JoinHandle<Result<(), AppError>>), AppError> {
        let (sender, clusters) = unbounded_channel();
        let run = move || {
            let runtime = Builder::new_current_thread().enable_all().build().map_err(AppError::Worker)?;
            runtime.block_on(stop.run_until_cancelled(run(clusters)));
            Ok(())
        };
        let thread = thread::Builder::new().name("upstreams".to_owned()).spawn(run).map_err(AppError::Worker)?;
        Ok((MaintenanceThread(sender), thread))
    }

    /// Replace the clusters and JWK Sets to maintain. Wait for the first lookup of each host name, and for the first
    /// attempt to fetch each JWK Set whose keys are not known yet, but at most for [`FIRST_LOOKUP_TIMEOUT`].
    ///
    /// # Errors
    /// The thread has ended.
    pub(super) fn set_config(&self, config: &Arc<CompiledConfig>, clusters: &Clusters) -> io::Result<()> {
        let (first, looked_up) = mpsc::channel();
        self.0.send((config.clone(), clusters.clone(), first)).map_err(|_| io::ErrorKind::BrokenPipe)?;
        // Each lookup drops its clone of the sender when it ends. No value is ever sent. Wait until all clones are
        // dropped.
        let _ = looked_up.recv_timeout(FIRST_LOOKUP_TIMEOUT);
        Ok(())
    }
}

async fn run(mut next: UnboundedReceiver<Maintained>) {
    let mut tasks = MaintenanceTasks::default();
    while let Some((config, clusters, first)) = next.recv().await {
        tasks.refresh_keys(&config, &first);
        tasks.update(&clusters, first);
    }
}

impl MaintenanceTasks {
    fn refresh_keys(&mut self, config: &Arc<CompiledConfig>, first: &mpsc::Sender<Infallible>) {
        self.key_refreshes.drain(..).for_each(|task| task.abort());
        for index in 0..config.auth.key_urls.len() {
            let refresh = refresh_key_set(config.clone(), index, first.clone());
            self.key_refreshes.push(tokio::spawn(refresh).abort_handle());
        }
    }

    fn update(&mut self, clusters: &Clusters, first: mpsc::Sender<Infallible>) {
        for tasks in [&mut self.health_checks, &mut self.token_refreshes] {
            tasks.retain(|(cluster, task)| {
                let stays = contains(cluster, clusters);
                if !stays {
                    task.abort();
                }
                stays
            });
        }
        for cluster in clusters.iter().filter(|cluster| cluster.settings.google.is_some()) {
            if !self.token_refreshes.iter().any(|(known, _)| Arc::ptr_eq(known, cluster)) {
                let refresh = access_tokens::refresh(cluster.clone(), first.clone());
                self.token_refreshes.push((cluster.clone(), tokio::spawn(refresh).abort_handle()));
            }
        }
        for cluster in clusters.iter().filter(|cluster| cluster.settings.health.is_some()) {
            if !self.health_checks.iter().any(|(known, _)| Arc::ptr_eq(known, cluster)) {
                self.health_checks
                    .push((cluster.clone(), tokio::spawn(health_check::run_checks(cluster.clone())).abort_handle()));
            }
        }
        let named: Vec<_> = clusters.iter().filter(|cluster| cluster.settings.needs_dns()).cloned().collect();
        let (known, task) = &mut self.lookups;
        if named.len() == known.len() && named.iter().all(|cluster| contains(cluster, known)) {
            return;
        }
        if let Some(before) = task.take() {
            before.abort();
        }
        let names = DnsCache::new(&named);
        *task = Some(tokio::spawn(names.run(DnsResolver::System, first)).abort_handle());
        *known = named;
    }
}

fn contains(cluster: &Arc<UpstreamCluster>, clusters: &[Arc<UpstreamCluster>]) -> bool {
    clusters.iter().any(|other| Arc::ptr_eq(cluster, other))
}

// === JWK Sets of token issuers. They are fetched at the start, periodically, and when a token has an unknown key. If a
// fetch fails, the previous keys stay in use ===

/// Maximum size of a JWK Set in bytes.
const MAX_KEY_SET: usize = 1 << 20;

/// Delay after the first failure. It doubles with each further failure.
const FIRST_RETRY_DELAY: Duration = Duration::from_secs(1);

/// Maximum delays after failures. `MAX_RETRY_DELAY_WITHOUT_KEYS` applies while no keys are known. It is shorter,
/// because tokens cannot be verified without keys.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(60);
const MAX_RETRY_DELAY_WITHOUT_KEYS: Duration = Duration::from_secs(5);

/// Maximum length of a redirect location in an error message, in characters.
const MAX_LOCATION: usize = 200;

/// The reason why the keys at a URL cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JwksError {
    /// The server sent no response.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// The request and its response took longer than the timeout.
    #[error("no complete response within {} s", REFRESH_TIMEOUT.as_secs())]
    Timeout,
    /// The status of the response is not 200.
    #[error("the server responded with status {0}")]
    Status(u16),
    /// The response is a redirect to this location.
    #[error("the server redirects to {0}, and redirects are not followed")]
    Redirect(String),
    /// The response is not a JWK Set, or contains no usable key.
    #[error("the response is {0}")]
    KeySet(#[source] KeySetError),
}

impl JwksError {
    /// Return a hint on how the operator can correct the error.
    pub fn hint(&self) -> &'static str {
        match self {
            JwksError::Fetch(FetchError::Tls(_)) => {
                "check the certificate of the server, or set `ca` to the certificate of its CA: ca = \"ca.pem\""
            }
            JwksError::Fetch(_) | JwksError::Timeout => {
                "check the URL, and whether a firewall lets the gateway connect to the server"
            }
            JwksError::Status(_) | JwksError::KeySet(_) => {
                "set `jwks_url` to the URL of the JSON Web Key Set, which is `jwks_uri` in the metadata of the issuer"
            }
            JwksError::Redirect(_) => "if the issuer owns the URL of the redirect, set `jwks_url` to this URL",
        }
    }
}

/// A JWK Set that was fetched from a URL.
#[derive(Debug)]
pub struct FetchedKeys {
    /// The usable keys.
    pub keys: KeySet,
    /// The reasons why other keys of the set were skipped.
    pub skipped: Vec<KeySetError>,
    /// SHA-256 hash of the response body.
    digest: [u8; 32],
}

/// Fetch and parse a JWK Set.
///
/// # Errors
/// See [`JwksError`].
pub async fn fetch_keys(source: &KeyUrl) -> Result<FetchedKeys, JwksError> {
    let mut request = Request::new(Bytes::new());
    let accepted = HeaderValue::from_static("application/jwk-set+json, application/json");
    request.headers_mut().insert(ACCEPT, accepted);
    request.headers_mut().insert(USER_AGENT, HeaderValue::from_static("sluicegate"));
    let exchange = fetch::send(&source.url, request, source.tls.as_ref(), MAX_KEY_SET);
    let response = timeout(REFRESH_TIMEOUT, exchange).await.map_err(|_| JwksError::Timeout)??;
    let status = response.status();
    if let Some(location) = response.headers().get(LOCATION).filter(|_| status.is_redirection()) {
        let location = String::from_utf8_lossy(location.as_bytes()).chars().take(MAX_LOCATION).collect();
        return Err(JwksError::Redirect(location));
    }
    if status != http::StatusCode::OK {
        return Err(JwksError::Status(status.as_u16()));
    }
    let (keys, skipped) = KeySet::parse_fetched(response.body()).map_err(JwksError::KeySet)?;
    let mut fetched = FetchedKeys { keys, skipped, digest: [0; 32] };
    // A SHA-256 hash has 32 bytes.
    fetched.digest.copy_from_slice(digest(&SHA256, response.body()).as_ref());
    Ok(fetched)
}

/// Keep the keys of `key_urls[index]` up to date, until the future is dropped. `first` is dropped when the first
/// attempt ends, or immediately if keys are already known.
pub(super) async fn refresh_key_set(config: Arc<CompiledConfig>, index: usize, first: Sender<Infallible>) {
    let source = &config.auth.key_urls[index];
    let remote = &source.keys;
    let provider = &*source.name;
    // When this task is aborted, the guard is dropped, so that requests stop waiting for a refresh of the keys.
    let _task = remote.guard();
    let mut first = Some(first);
    let mut last_digest = None;
    let mut failures = 0;
    let mut delay = match remote.last_success_us() {
        0 => Duration::ZERO,
        fetched_at_us => {
            drop(first.take());
            let age = Duration::from_micros(unix_us().saturating_sub(fetched_at_us));
            source.refresh_interval.saturating_sub(age)
        }
    };
    loop {
        tokio::select! {
            () = sleep(with_jitter(delay)) => {}
            () = remote.wanted() => {}
        }
        let _attempt = remote.begin();
        match fetch_keys(source).await {
            Ok(FetchedKeys { keys, skipped, digest }) => {
                (failures, delay) = (0, source.refresh_interval);
                if last_digest == Some(digest) {
                    // Do not replace equal keys, because the cache of verified tokens would be lost.
                    remote.record_unchanged(unix_us());
                } else {
                    info!(provider, keys = keys.len(), "key set fetched");
                    for reason in &skipped {
                        warn!(provider, %reason, "a key of the key set was skipped");
                    }
                    last_digest = Some(digest);
                    remote.store(keys, unix_us());
                }
            }
            Err(error) => {
                remote.record_failure();
                let is_known = remote.keys().load().is_some();
                let max_delay = if is_known { MAX_RETRY_DELAY } else { MAX_RETRY_DELAY_WITHOUT_KEYS };
                delay = (FIRST_RETRY_DELAY * 2_u32.pow(failures)).min(max_delay).min(source.refresh_interval);
                failures = (failures + 1).min(10);
                let hint = error.hint();
                match is_known {
                    true => warn!(provider, %error, hint, "cannot fetch the key set: its previous keys stay in use"),
                    false => warn!(provider, %error, hint, "cannot fetch the key set: tokens are rejected with 503"),
                }
            }
        }
        drop(first.take());
    }
}

/// Vary a duration randomly by up to 10 %. Gateways that started together then do not fetch at the same time.
pub(super) fn with_jitter(duration: Duration) -> Duration {
    let permille = 900 + (Uuid::new_v4().as_u64_pair().0 % 201) as u32;
    duration * permille / 1000
}

/// Describe a JWK Set for `check` and `doctor`.
pub fn describe_key_set(fetched: &FetchedKeys) -> String {
    let mut text = pluralize(fetched.keys.len() as u64, "usable key");
    for reason in &fetched.skipped {
        text += &format!("; skipped: {reason}");
    }
    text
}
