//! The servers of an upstream, and what all workers know of them.

use std::fmt::Display;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use arc_swap::{ArcSwap, Guard};
use http::{HeaderMap, StatusCode};
use tokio::sync::Notify;
use tokio::time::Duration;
use tracing::{info, warn};

use super::balance::{Balance, Dice, Owners, hash};
use super::budget::Budget;
use super::condition::{Condition, EjectSettings, Standing};
use super::health::HealthSettings;
use super::member::Member;
use super::queue::{Place, Queue};
use super::settings::UpstreamSettings;
use super::table::{Draw, Table, shared_weights};
use crate::limit::clock::monotonic;

/// The servers of an upstream.
#[derive(Debug)]
pub struct Fleet {
    /// As configured.
    pub settings: Arc<UpstreamSettings>,
    table: ArcSwap<Table>,
    /// How many tables there were before this one: a look at it costs less than one at the table.
    changes: AtomicU64,
    /// Held by whoever makes another table.
    changing: Mutex<()>,
    opened: Instant,
    /// ms after `opened` at which the table is out of date.
    outdated_ms: AtomicU64,
    /// Turns taken in the order of the table.
    turns: AtomicU64,
    /// What may be tried again; none = nothing.
    pub(super) budget: Option<Budget>,
    pub(super) queue: Arc<Queue>,
    /// Told when members come and go.
    pub(super) renewed: Notify,
}

/// A server that takes no connections is mentioned this often.
const REMINDER: Duration = Duration::from_secs(60);

/// How a member does, for whoever looks after it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberStanding {
    /// What it is called.
    pub server: String,
    /// `healthy`; `unhealthy`: it fails its health checks; `ejected`: requests failed; `unreachable`: it took no connection just now.
    pub state: &'static str,
    /// Requests that it has.
    pub in_flight: usize,
}

/// What is never out of date.
const NEVER: u64 = u64::MAX;

impl Fleet {
    /// A member for each server as the configuration has it.
    pub fn new(settings: Arc<UpstreamSettings>) -> Self {
        let queue = Arc::new(Queue::new(settings.max_queue));
        let member = |index| {
            Arc::new(Member::new(&settings, index, literal(&settings, index), Condition::default(), queue.clone()))
        };
        let members = (0..settings.servers.len()).map(member).collect();
        Fleet::of(settings, members, queue)
    }

    /// Of these members.
    pub(super) fn of(settings: Arc<UpstreamSettings>, members: Vec<Arc<Member>>, queue: Arc<Queue>) -> Self {
        let (members, opened) = (Arc::new(members), monotonic());
        let owners = owners(&settings, &members);
        let (table, _) = Table::new(&settings, members, owners, opened);
        Fleet {
            table: ArcSwap::from_pointee(table),
            changes: AtomicU64::new(0),
            changing: Mutex::default(),
            opened,
            outdated_ms: AtomicU64::new(NEVER),
            turns: AtomicU64::new(0),
            budget: (settings.retries > 0).then(|| Budget::new(opened)),
            queue,
            renewed: Notify::new(),
            settings,
        }
    }

    /// Who there is. It is another list after each change.
    pub fn members(&self) -> Arc<Vec<Arc<Member>>> {
        self.table.load().members.clone()
    }

    /// Where one of its servers was found.
    pub(super) fn addresses(&self, index: usize) -> Vec<IpAddr> {
        let members = self.members();
        let own = members.iter().filter(|member| member.index == index);
        own.filter_map(|member| member.address).map(|address| address.ip()).collect()
    }

    /// How each of them does.
    pub fn standing(&self) -> Vec<MemberStanding> {
        let now = monotonic();
        let of = |member: &Arc<Member>| {
            let condition = member.condition();
            let state = match condition.standing(now) {
                Standing::Down => "unhealthy",
                Standing::Ejected => "ejected",
                Standing::In if condition.is_passed_over(now) => "unreachable",
                Standing::In => "healthy",
            };
            MemberStanding { server: member.name(), state, in_flight: member.in_flight() }
        };
        self.members().iter().map(of).collect()
    }

    /// These are the addresses of one of its servers from now on. Members that stay are the same as before.
    pub fn resolved(&self, index: usize, addresses: &[SocketAddr]) {
        let changing = self.changing();
        let before = self.members();
        let (own, others): (Vec<_>, Vec<_>) = before.iter().cloned().partition(|member| member.index == index);
        let mut now: Vec<_> = addresses.to_vec();
        now.sort_unstable();
        now.dedup();
        if own.len() == now.len() && own.iter().all(|member| member.address.is_some_and(|known| now.contains(&known))) {
            return;
        }
        let member = |address| {
            let known = own.iter().find(|member| member.address == Some(address)).cloned();
            known.unwrap_or_else(|| {
                // The first ones have nobody to start more slowly than.
                let condition = if own.is_empty() { Condition::default() } else { Condition::joining(monotonic()) };
                Arc::new(Member::new(&self.settings, index, Some(address), condition, self.queue.clone()))
            })
        };
        let members: Arc<Vec<_>> = Arc::new(others.into_iter().chain(now.into_iter().map(member)).collect());
        let owners = owners(&self.settings, &members);
        self.arrange(&changing, members, owners);
        self.renewed.notify_one();
    }

    /// Who can be asked now.
    pub(super) fn table(&self) -> Guard<Arc<Table>> {
        self.changes();
        self.table.load()
    }

    /// Another number with each table.
    pub(super) fn changes(&self) -> u64 {
        let outdated_ms = self.outdated_ms.load(Ordering::Relaxed);
        if outdated_ms != NEVER && self.opened.elapsed().as_millis() as u64 >= outdated_ms {
            self.review(&self.changing());
        }
        self.changes.load(Ordering::Acquire)
    }

    /// A place at the member whose turn it is.
    pub(super) fn place(
        &self,
        table: &Table,
        key: Option<u64>,
        dice: &Dice,
        tried: &[Arc<Member>],
    ) -> Option<(usize, Place)> {
        table.place(&Draw { balance: &self.settings.balance, key, dice, turns: &self.turns, tried })
    }

    /// What decides about a request, where its header does.
    pub(super) fn key(&self, headers: &HeaderMap) -> Option<u64> {
        let Balance::Hash(name) = &self.settings.balance else { return None };
        headers.get(name).map(|value| hash(value.as_bytes()))
    }

    /// Whether a request may be tried again; then that counts.
    pub(super) fn may_retry(&self) -> bool {
        self.budget.as_ref().is_some_and(|budget| budget.spend(monotonic()))
    }

    /// A member has answered.
    pub(super) fn answered(&self, member: &Member, status: StatusCode) {
        match status {
            // What a server says of itself, or of what is behind it.
            StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT => {
                self.failed(member, &status);
            }
            _ if member.state.errors.load(Ordering::Relaxed) != 0 => member.state.errors.store(0, Ordering::Relaxed),
            _ => {}
        }
    }

    /// A member took no connection, or not in time.
    pub(super) fn unreachable(&self, member: &Member, error: &dyn Display) {
        let news = {
            // Whoever finds it out at the same time waits for the table that says so.
            let changing = self.changing();
            let news = member.condition().pass_over(monotonic());
            if news {
                self.review(&changing);
            }
            news
        };
        if news && member.state.unreachable.unsaid_for(REMINDER) {
            let (upstream, server) = (&self.settings.name, member.name());
            warn!(%upstream, %server, %error, "a server takes no connection and is passed over");
        }
        self.failed(member, error);
    }

    /// A member has failed a request.
    pub(super) fn failed(&self, member: &Member, error: &dyn Display) {
        let Some(EjectSettings { errors, time }) = self.settings.eject else { return };
        if member.state.errors.fetch_add(1, Ordering::Relaxed) + 1 < errors {
            return;
        }
        member.state.errors.store(0, Ordering::Relaxed);
        let Some(time) = member.condition().eject(monotonic(), time) else { return };
        let (upstream, server) = (&self.settings.name, member.name());
        self.review(&self.changing());
        warn!(%upstream, %server, ejected_for = ?time, %error, "a server is ejected after {errors} errors in a row");
    }

    /// A member has passed a health check, or why it has not.
    pub(super) fn checked(&self, member: &Member, health: &HealthSettings, result: Result<(), String>) {
        let passed = result.is_ok();
        let changed = member.condition().checked(passed, monotonic(), health.unhealthy_after, health.healthy_after);
        if changed.is_none() {
            return;
        }
        self.review(&self.changing());
        let (upstream, server) = (&self.settings.name, member.name());
        match result {
            Ok(()) => info!(%upstream, %server, "a server is healthy again"),
            Err(reason) => warn!(%upstream, %server, %reason, "a server is not healthy"),
        }
    }

    /// Makes a table of what is known now.
    pub(super) fn review(&self, changing: &MutexGuard<'_, ()>) {
        let (members, owners) = {
            let table = self.table.load();
            (table.members.clone(), table.owners.clone())
        };
        let now = monotonic();
        for member in members.iter().filter(|member| member.condition().return_if_due(now)) {
            info!(upstream = %self.settings.name, server = %member.name(), "a server that was ejected is used again");
        }
        self.arrange(changing, members, owners);
    }

    fn arrange(&self, _changing: &MutexGuard<'_, ()>, members: Arc<Vec<Arc<Member>>>, owners: Option<Arc<Owners>>) {
        let (table, next) = Table::new(&self.settings, members, owners, monotonic());
        let panicked = self.table.load().panics;
        if table.panics != panicked {
            let upstream = &self.settings.name;
            match table.panics {
                true => warn!(%upstream, "more than half of the servers are out: ejected ones are used all the same"),
                false => info!(%upstream, "half of the servers are in again"),
            }
        }
        let table = Arc::new(table);
        // Those that are gone as well.
        let before = self.table.swap(table.clone());
        self.changes.fetch_add(1, Ordering::Release);
        before.members.iter().for_each(|member| member.state.usable.store(false, Ordering::Relaxed));
        table.usable.iter().for_each(|index| table.members[*index].state.usable.store(true, Ordering::Relaxed));
        let next = next.map_or(NEVER, |next| next.saturating_duration_since(self.opened).as_millis() as u64 + 1);
        self.outdated_ms.store(next, Ordering::Relaxed);
        table.usable.iter().for_each(|index| self.queue.offer(&table.members[*index]));
    }

    pub(super) fn changing(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The address of a server that has no name.
pub(super) fn literal(settings: &UpstreamSettings, index: usize) -> Option<SocketAddr> {
    let server = &settings.servers[index];
    server.host.parse::<IpAddr>().ok().map(|host| SocketAddr::new(host, server.port))
}

fn owners(settings: &UpstreamSettings, members: &[Arc<Member>]) -> Option<Arc<Owners>> {
    let weights = shared_weights(members);
    if !matches!(settings.balance, Balance::Hash(_)) || weights.iter().all(|weight| *weight == 0) {
        return None;
    }
    let names = members.iter().map(|member| hash(member.name().as_bytes()));
    Some(Arc::new(Owners::new(&names.zip(weights.iter().map(|weight| *weight as f64)).collect::<Vec<_>>())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::upstream::Protocol;
    use crate::upstream::settings::ServerSettings;

    fn fleet(servers: &[&str]) -> Fleet {
        let server = |host: &&str| ServerSettings {
            authority: (*host).into(),
            host: (*host).into(),
            port: 80,
            tls: None,
            weight: 1,
        };
        let second = Duration::from_secs(1);
        Fleet::new(Arc::new(UpstreamSettings {
            name: "api".into(),
            servers: servers.iter().map(server).collect(),
            protocol: Protocol::Http1,
            connect_timeout: second,
            response_timeout: second,
            pool_idle_timeout: second,
            balance: Balance::RoundRobin,
            max_requests: 0,
            max_queue: 0,
            health: None,
            eject: None,
            slow_start: Duration::ZERO,
            retries: 0,
        }))
    }

    #[test]
    fn members_that_stay_are_the_same() {
        let fleet = fleet(&["name", "10.0.0.9"]);
        let [one, two, three] = ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"].map(|text| text.parse().unwrap());
        let of = |address| fleet.members().iter().find(|member| member.address == Some(address)).cloned();
        let literal = of("10.0.0.9:80".parse().unwrap()).expect("an address has a member from the start");
        fleet.resolved(0, &[one, two, one]);
        let kept = of(two).unwrap();
        assert_eq!(fleet.members().len(), 3, "each address once, and the other server");
        fleet.resolved(0, &[three, two]);
        assert!(Arc::ptr_eq(&kept, &of(two).unwrap()) && of(one).is_none() && of(three).is_some());
        let before = fleet.members();
        fleet.resolved(0, &[two, three]);
        assert!(Arc::ptr_eq(&before, &fleet.members()), "nothing has changed");
        fleet.resolved(0, &[]);
        assert!(fleet.members().iter().all(|member| Arc::ptr_eq(member, &literal)), "{:?}", fleet.members());
    }
}
