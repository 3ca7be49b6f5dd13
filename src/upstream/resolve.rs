//! Names of servers: looked up, again when their addresses may have changed, and told to the fleets.

pub mod directory;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::mpsc::Sender;

use tokio::task::JoinSet;
use tokio::time::{Duration, sleep};
use tracing::{debug, info, warn};
use uuid::Uuid;

use super::fleet::Fleet;
use directory::{Answer, Directory, NoAddress};

/// Answers that may be kept for less time, even for none, are kept for so long.
const SHORTEST: Duration = Duration::from_secs(1);

/// However long an answer may be kept, a server that has moved is found within this time.
const LONGEST: Duration = Duration::from_secs(300);

/// Between two attempts that fail; the first comes after the shortest time, and each waits twice as long as the one before.
const MOST_PATIENT: Duration = Duration::from_secs(30);

/// The names of the servers of all fleets.
#[derive(Debug)]
pub struct Names(Vec<Name>);

/// A name, and what is known of it.
#[derive(Debug)]
struct Name {
    host: Box<str>,
    /// The servers that have it.
    servers: Vec<Server>,
    /// Sorted.
    addresses: Vec<IpAddr>,
    /// Attempts that failed, in a row.
    failures: u32,
    /// Why, as it was logged.
    told: Option<NoAddress>,
}

#[derive(Debug)]
struct Server {
    fleet: Arc<Fleet>,
    index: usize,
    port: u16,
}

impl Names {
    /// Each of them once, however many servers have it. Until they are looked up these servers are where they, or others
    /// of the name, were found before; those of new names have no address.
    pub fn of(fleets: &[Arc<Fleet>]) -> Self {
        let mut names = BTreeMap::<Box<str>, Vec<Server>>::new();
        for fleet in fleets {
            for (index, server) in fleet.settings.servers.iter().enumerate() {
                if server.has_name() {
                    let server = Server { fleet: fleet.clone(), index, port: server.port };
                    names
                        .entry(fleet.settings.servers[index].host.to_ascii_lowercase().into())
                        .or_default()
                        .push(server);
                }
            }
        }
        let name = |(host, servers): (_, Vec<_>)| {
            let name = Name { host, addresses: known(&servers), servers, failures: 0, told: None };
            name.tell();
            name
        };
        Names(names.into_iter().map(name).collect())
    }

    /// Whether there is nothing to look up.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Looks them up again and again, as long as the future lives. All copies of `first` are gone when each has been
    /// looked up once.
    pub async fn follow(self, directory: Directory, first: Sender<Infallible>) {
        let mut tasks = JoinSet::new();
        for name in self.0 {
            tasks.spawn(name.follow(directory.clone(), first.clone()));
        }
        drop(first);
        tasks.join_all().await;
    }
}

/// Where servers of one name were found before, sorted.
fn known(servers: &[Server]) -> Vec<IpAddr> {
    let found = servers.iter().map(|server| server.fleet.addresses(server.index));
    let mut addresses = found.max_by_key(Vec::len).unwrap_or_default();
    addresses.sort_unstable();
    addresses
}

impl Name {
    async fn follow(mut self, directory: Directory, first: Sender<Infallible>) {
        let mut first = Some(first);
        loop {
            let wait = match directory.look_up(&self.host, &self.addresses).await {
                Ok(answer) => self.found(answer),
                Err(reason) => self.missing(reason),
            };
            drop(first.take());
            // Many gateways that began together do not go on asking together.
            let tenth = wait.mul_f64(Uuid::new_v4().as_u128() as u8 as f64 / 2560.0);
            sleep(wait + tenth).await;
        }
    }

    /// How long to wait before the next look.
    fn found(&mut self, mut answer: Answer) -> Duration {
        answer.addresses.sort_unstable();
        answer.addresses.dedup();
        let (host, again) = (&self.host, self.told.take().is_some());
        if self.addresses != answer.addresses {
            if self.addresses.is_empty() && !again {
                debug!("`{host}` is at {:?}", answer.addresses);
            } else {
                info!("`{host}` is at {:?} now", answer.addresses);
            }
            self.addresses = answer.addresses;
            self.tell();
        } else if again {
            info!("`{host}` is found again, where it was");
        }
        self.failures = 0;
        answer.ttl.clamp(SHORTEST, LONGEST)
    }

    /// Tells the fleets.
    fn tell(&self) {
        for Server { fleet, index, port } in &self.servers {
            let addresses = self.addresses.iter().map(|address| SocketAddr::new(*address, *port));
            fleet.resolved(*index, &addresses.collect::<Vec<_>>());
        }
    }

    /// The same; the addresses of before stay.
    fn missing(&mut self, reason: NoAddress) -> Duration {
        if self.told.as_ref() != Some(&reason) {
            let instead =
                if self.addresses.is_empty() { "it has no address yet" } else { "its last addresses are used" };
            let upstreams: Vec<_> = self.servers.iter().map(|server| &*server.fleet.settings.name).collect();
            warn!("`{}` of upstream `{}` is not found: {reason}; {instead}", self.host, upstreams.join("`, `"));
            self.told = Some(reason);
        }
        let wait = SHORTEST * 2_u32.saturating_pow(self.failures.min(16));
        self.failures += 1;
        wait.min(MOST_PATIENT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name() -> Name {
        Name { host: "api.test".into(), servers: Vec::new(), addresses: Vec::new(), failures: 0, told: None }
    }

    #[test]
    fn an_answer_holds_for_its_ttl_within_bounds() {
        for (ttl, wait) in [(0, 1), (1, 1), (60, 60), (300, 300), (86_400, 300)] {
            let answer = Answer { addresses: vec![[192, 0, 2, 1].into()], ttl: Duration::from_secs(ttl) };
            assert_eq!(name().found(answer), Duration::from_secs(wait), "a TTL of {ttl} s");
        }
    }

    #[test]
    fn failures_are_repeated_less_and_less_often() {
        let mut name = name();
        let mut missing = || name.missing(NoAddress::Silence).as_secs();
        assert_eq!([(); 7].map(|()| missing()), [1, 2, 4, 8, 16, 30, 30]);
        name.found(Answer { addresses: vec![[192, 0, 2, 1].into()], ttl: SHORTEST });
        assert_eq!(name.missing(NoAddress::Silence), SHORTEST, "an answer in between begins anew");
    }
}
