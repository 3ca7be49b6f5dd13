//! Health checks: each member is asked now and then, once for the whole process.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use http::header::{HOST, USER_AGENT};
use http::{HeaderValue, Request, StatusCode, Uri, uri};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Duration, sleep, timeout};

use super::Protocol;
use super::balance::Dice;
use super::fleet::Fleet;
use super::link::Link;
use super::member::Member;
use crate::http::upload::RequestBody;

/// What servers see who asks.
const NAME: HeaderValue = HeaderValue::from_static("sluicegate-health");

/// `health_check`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthSettings {
    /// What is asked for: path and query.
    pub path: uri::PathAndQuery,
    /// The answers of a healthy server.
    pub status: Vec<StatusCode>,
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
pub async fn watch(fleet: Arc<Fleet>) {
    let Some(health) = &fleet.settings.health else { return };
    let dice = Arc::new(Dice::random());
    let mut tasks = JoinSet::new();
    let mut checked: HashMap<(usize, Option<SocketAddr>), (Arc<Member>, AbortHandle)> = HashMap::new();
    loop {
        let members = fleet.members();
        checked.retain(|_, (member, task)| {
            let stays = members.iter().any(|other| Arc::ptr_eq(member, other));
            if !stays {
                task.abort();
            }
            stays
        });
        for member in members.iter() {
            checked.entry((member.index, member.address)).or_insert_with(|| {
                let checks = check_on(fleet.clone(), health.clone(), member.clone(), dice.clone());
                (member.clone(), tasks.spawn(checks))
            });
        }
        fleet.renewed.notified().await;
        while tasks.try_join_next().is_some() {}
    }
}

async fn check_on(fleet: Arc<Fleet>, health: HealthSettings, member: Arc<Member>, dice: Arc<Dice>) {
    // In thousandths.
    let part = |from: u32, to: u32| health.interval * (from + (dice.throw() % u64::from(to - from)) as u32) / 1000;
    // Those that start together do not ask together.
    sleep(part(0, 1000)).await;
    loop {
        let result = timeout(health.timeout, check(&fleet, &health, &member)).await;
        let result = result.unwrap_or_else(|_| Err(format!("no answer within {:?}", health.timeout)));
        fleet.checked(&member, &health, result);
        sleep(part(900, 1100)).await;
    }
}

/// One check, on a connection of its own: whether new ones are taken is a part of the question.
async fn check(fleet: &Fleet, health: &HealthSettings, member: &Arc<Member>) -> Result<(), String> {
    let link = Link::new(&fleet.settings, member.clone());
    let (mut connection, _) = link.connect().await.map_err(|error| format!("no connection: {error}"))?;
    let request = request(&fleet.settings.protocol, health, member).map_err(|error| error.to_string())?;
    let response = connection.send(request).await.map_err(|failure| format!("no answer: {}", failure.error()))?;
    match response.status() {
        status if health.status.contains(&status) => Ok(()),
        status => Err(format!("it answers {status}")),
    }
}

fn request(protocol: &Protocol, health: &HealthSettings, member: &Member) -> http::Result<Request<RequestBody>> {
    let request = Request::get(Uri::from(health.path.clone())).header(USER_AGENT, NAME);
    let request = match protocol {
        Protocol::Http1 => request.header(HOST, &*member.server.authority),
        Protocol::Http2 => request.uri(
            Uri::builder()
                .scheme("http")
                .authority(&*member.server.authority)
                .path_and_query(health.path.clone())
                .build()?,
        ),
    };
    request.body(RequestBody::empty())
}
