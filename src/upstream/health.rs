//! Health checks: each member is asked now and then, once for the whole process.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use http::header::{HOST, USER_AGENT};
use http::{HeaderValue, Request, StatusCode, Uri, uri};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Duration, sleep, timeout};

use super::Protocol;
use super::balance::Rng;
use super::fleet::UpstreamCluster;
use super::link::EndpointPool;
use super::member::Endpoint;
use crate::http::upload::RequestBody;

/// What servers see who asks.
const USER_AGENT_VALUE: HeaderValue = HeaderValue::from_static("sluicegate-health");

/// `health_check`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthSettings {
    /// What is asked for: path and query.
    pub path: uri::PathAndQuery,
    /// The answers of a healthy server.
    pub expected_statuses: Vec<StatusCode>,
    /// Between two checks of a server; each time a tenth more or less.
    pub interval: Duration,
    /// Bound of a check, connecting included.
    pub timeout: Duration,
    /// So many failed checks in a row put a server out.
    pub unhealthy_after: u32,
    /// So many passed checks in a row bring it back.
    pub healthy_after: u32,
}

/// Checks the members of a fleet for as long as this future is polled.
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
    // In thousandths.
    let part = |from: u32, to: u32| health.interval * (from + (rng.next_u64() % u64::from(to - from)) as u32) / 1000;
    // Those that start together do not ask together.
    sleep(part(0, 1000)).await;
    loop {
        let result = timeout(health.timeout, check_once(&cluster, &health, &endpoint)).await;
        let result = result.unwrap_or_else(|_| Err(format!("no answer within {:?}", health.timeout)));
        cluster.report_check(&endpoint, &health, result);
        sleep(part(900, 1100)).await;
    }
}

/// One check, on a connection of its own: whether new ones are taken is a part of the question.
async fn check_once(
    cluster: &UpstreamCluster,
    health: &HealthSettings,
    endpoint: &Arc<Endpoint>,
) -> Result<(), String> {
    let pool = EndpointPool::new(&cluster.settings, endpoint.clone());
    let (mut connection, _) = pool.connect().await.map_err(|error| format!("no connection: {error}"))?;
    let request = check_request(&cluster.settings.protocol, health, endpoint).map_err(|error| error.to_string())?;
    let response = connection.send(request).await.map_err(|failure| format!("no answer: {}", failure.error()))?;
    match response.status() {
        status if health.expected_statuses.contains(&status) => Ok(()),
        status => Err(format!("it answers {status}")),
    }
}

fn check_request(
    protocol: &Protocol,
    health: &HealthSettings,
    endpoint: &Endpoint,
) -> http::Result<Request<RequestBody>> {
    let request = Request::get(Uri::from(health.path.clone())).header(USER_AGENT, USER_AGENT_VALUE);
    let request = match protocol {
        Protocol::Http1 => request.header(HOST, &*endpoint.server.authority),
        Protocol::Http2 => request.uri(
            Uri::builder()
                .scheme("http")
                .authority(&*endpoint.server.authority)
                .path_and_query(health.path.clone())
                .build()?,
        ),
    };
    request.body(RequestBody::empty())
}
