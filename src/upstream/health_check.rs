//! Active health checks of endpoints, performed once for all workers.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use http::header::{HOST, USER_AGENT};
use http::{HeaderValue, Method, Request, Uri};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};

use crate::clock::{monotonic, unix_us};
use crate::http::aws_signature::content_hash;
use crate::http::body_limits::ReadLimit;
use crate::http::google_account;
use crate::http::request_body::RequestBody;
use crate::http::target::set_http2_target;
use crate::upstream::cluster::UpstreamCluster;
use crate::upstream::connection_pool::EndpointPool;
use crate::upstream::connector::Protocol;
use crate::upstream::endpoint::{Endpoint, Rng};
use crate::upstream::settings::{HealthSettings, HostPolicy, UpstreamSettings};

/// User-Agent of health checks.
const USER_AGENT_VALUE: HeaderValue = HeaderValue::from_static("sluicegate-health");

/// Check all endpoints of a cluster until the future is dropped.
pub async fn run_checks(cluster: Arc<UpstreamCluster>) {
    let Some(health) = &cluster.settings.health else { return };
    let rng = Arc::new(Rng::from_random_seed());
    let mut tasks = JoinSet::new();
    let mut checked: HashMap<(usize, Option<SocketAddr>), (Arc<Endpoint>, AbortHandle)> = HashMap::new();
    loop {
        let endpoints = cluster.endpoints();
        checked.retain(|_, (endpoint, task)| {
            let stays = endpoints.iter().any(|other| Arc::ptr_eq(endpoint, other));
            if !stays {
                task.abort();
            }
            stays
        });
        for endpoint in endpoints.iter() {
            checked.entry((endpoint.server_index, endpoint.address)).or_insert_with(|| {
                let checks = check_endpoint(cluster.clone(), health.clone(), endpoint.clone(), rng.clone());
                (endpoint.clone(), tasks.spawn(checks))
            });
        }
        cluster.endpoints_changed.notified().await;
        while tasks.try_join_next().is_some() {}
    }
}

async fn check_endpoint(cluster: Arc<UpstreamCluster>, health: HealthSettings, endpoint: Arc<Endpoint>, rng: Arc<Rng>) {
    // Return a random duration of at least `from` and less than `to` thousandths of the check interval.
    let part = |from: u32, to: u32| health.interval * (from + (rng.next_u64() % u64::from(to - from)) as u32) / 1000;
    // Distribute the first checks of all endpoints over one interval.
    sleep(part(0, 1000)).await;
    loop {
        // Without an access token, requests get 503, and a check would say nothing about the server.
        if let Some(request) = check_request(&cluster.settings, &health, &endpoint) {
            let result = timeout(health.timeout, check_once(&cluster, &health, &endpoint, request)).await;
            let result = result.unwrap_or_else(|_| Err(format!("no response within {:?}", health.timeout)));
            cluster.report_check(&endpoint, &health, result);
        }
        sleep(part(900, 1100)).await;
    }
}

/// Perform one check on a new connection, because accepting connections is part of the check.
async fn check_once(
    cluster: &UpstreamCluster,
    health: &HealthSettings,
    endpoint: &Arc<Endpoint>,
    request: http::Result<Request<RequestBody>>,
) -> Result<(), String> {
    let request = request.map_err(|error| error.to_string())?;
    let pool = EndpointPool::new(&cluster.settings, endpoint.clone());
    let (mut connection, _) = pool.connect(None).await.map_err(|error| format!("cannot connect: {error}"))?;
    let response = connection
        .send(request, ReadLimit::Any)
        .await
        .map_err(|failure| format!("no response: {}", failure.error()))?;
    match response.status() {
        status if health.expected_statuses.contains(&status) => Ok(()),
        status => Err(format!("unexpected status {status}")),
    }
}

/// Return the request of a check, with the credentials of the upstream (`aws`, `google`). Return `None` if there is no
/// access token.
fn check_request(
    settings: &UpstreamSettings,
    health: &HealthSettings,
    endpoint: &Endpoint,
) -> Option<http::Result<Request<RequestBody>>> {
    let authorization = match &settings.google {
        Some(access) => Some(access.account.authorization(monotonic())?),
        None => None,
    };
    let request = Request::get(Uri::from(health.path.clone())).header(USER_AGENT, USER_AGENT_VALUE);
    let request = match &settings.host {
        HostPolicy::Name(name) => request.header(HOST, name),
        HostPolicy::Client | HostPolicy::Server => request.header(HOST, &*endpoint.server.authority),
    };
    let mut request = match request.body(RequestBody::empty()) {
        Ok(request) => request,
        Err(error) => return Some(Err(error)),
    };
    if let Some(authorization) = authorization {
        google_account::authorize(request.headers_mut(), authorization);
    }
    if let Some(signer) = &settings.aws {
        let uri = request.uri().clone();
        signer.sign(&Method::GET, &uri, request.headers_mut(), &content_hash(Some(b"")), unix_us());
    }
    if settings.protocol == Protocol::Http2 {
        set_http2_target(&mut request);
    }
    Some(Ok(request))
}
