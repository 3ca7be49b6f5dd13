//! Overrides in a schedule: administrators set and remove overrides on single gateways, and all gateways must apply
//! them.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sluicegate::limiter::key::{Identity, IdentityHasher};
use sluicegate::limiter::overrides::{MAX_PROPAGATION, OverrideQuota, override_field};
use sluicegate::limiter::spec::LimitSpec;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until};

use crate::gateway::LoadGenerator;
use crate::invariants::Violation;
use crate::network::START_US;
use crate::schedule::Schedule;

/// The number of clients that may have an override.
pub const CLIENTS: u64 = 3;

/// The interval at which the test observes the overrides of the gateways.
const LOOK: Duration = Duration::from_millis(100);

/// Return the time in µs before and after the expiry of an override in which the test accepts both results. On a
/// gateway that sets, restores or reads the override, the override may expire earlier, by the delay of the call.
fn close_us(schedule: &Schedule) -> u64 {
    50_000 + 2 * (schedule.round_trip + schedule.jitter).as_micros() as u64
}

/// A change that an administrator makes on a gateway.
#[derive(Debug, Clone, Copy)]
pub struct Change {
    pub at: Duration,
    pub gateway: usize,
    pub client: u64,
    /// The TTL of the new override, or `None` to remove the override.
    pub lasts: Option<Duration>,
}

/// A write of an override in the store, requested by an administrator.
#[derive(Debug, Clone)]
pub struct Written {
    pub at_us: u64,
    pub gateway: usize,
    pub field: String,
    /// The new override, or `None` for a removal.
    pub new: Option<New>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct New {
    /// Each change sets a different quota.
    pub quota: u64,
    pub expiry_us: u64,
}

impl Written {
    /// Return the write that a call of `lua/overrides.lua` made for an administrator, if it wrote a record. The first
    /// of the `statuses` in the reply belongs to this write.
    pub fn of(
        at_us: u64,
        gateway: usize,
        arguments: &[Vec<u8>],
        mut statuses: impl Iterator<Item = bool>,
    ) -> Option<Written> {
        let text = |index: usize| std::str::from_utf8(&arguments[index]).expect("text");
        let is_written = text(0) != "restore" && statuses.next() == Some(true);
        is_written.then(|| {
            let expiry_us = at_us + text(3).parse::<u64>().expect("a number");
            let new = (text(0) == "set").then(|| {
                let size: OverrideQuota = serde_json::from_str(text(6)).expect("an override");
                New { quota: count(&size), expiry_us }
            });
            Written { at_us, gateway, field: text(2).to_owned(), new }
        })
    }
}

fn count(size: &OverrideQuota) -> u64 {
    size.quota.split_once('/').and_then(|(count, _)| count.parse().ok()).expect("a quota")
}

/// A successful call of an administrator.
#[derive(Debug)]
struct Acknowledged {
    gateway: usize,
    field: String,
    /// The quota of the new override, or `None` for a removal.
    quota: Option<u64>,
    /// The start and the end of the call, µs.
    ran: RangeInclusive<u64>,
    /// The number of observations before the end of the call.
    looks: usize,
}

impl Acknowledged {
    fn is_of(&self, written: &Written) -> bool {
        self.gateway == written.gateway
            && self.field == written.field
            && self.quota == written.new.map(|new| new.quota)
            && self.ran.contains(&written.at_us)
    }
}

/// An observation: the override of a client on a gateway at one time.
#[derive(Debug)]
struct Look {
    at_us: u64,
    gateway: usize,
    client: u64,
    quota: Option<u64>,
}

/// Makes the changes of a schedule and observes the overrides.
pub struct Watch {
    seen: Arc<Seen>,
    began: Instant,
    changes: Vec<JoinHandle<()>>,
    looks: JoinHandle<()>,
}

#[derive(Debug, Default)]
struct Seen {
    acknowledged: Mutex<Vec<Acknowledged>>,
    looks: Mutex<Vec<Look>>,
}

/// Return the limit that has overrides. No other check depends on its quota.
fn limit(client: &LoadGenerator) -> &Arc<LimitSpec> {
    &client.schedule.limits.last().expect("the heartbeat").limit
}

fn identity(client: u64) -> Identity {
    IdentityHasher::new("simulation").hash(format!("override {client}").as_bytes())
}

impl Watch {
    pub fn start(client: &Arc<LoadGenerator>) -> Watch {
        let (seen, began) = (Arc::<Seen>::default(), Instant::now());
        let changes = client.schedule.overrides.iter().enumerate().map(|(number, change)| {
            let (client, seen, change) = (client.clone(), seen.clone(), *change);
            tokio::spawn(async move {
                sleep_until(began + change.at).await;
                seen.make(&client, number as u64 + 1, change).await;
            })
        });
        let changes = changes.collect();
        let (client, watching) = (client.clone(), seen.clone());
        let looks = tokio::spawn(async move {
            while !client.schedule.overrides.is_empty() {
                watching.look(&client);
                sleep(LOOK).await;
            }
        });
        Watch { seen, began, changes, looks }
    }

    /// Wait until the store has recovered and all gateways have polled. Return the violations.
    pub async fn finish(self, client: &LoadGenerator) -> Vec<Violation> {
        for change in self.changes {
            // If this task panicked, the panic hook has recorded the panic.
            let _ = change.await;
        }
        let last = client.schedule.overrides.last().map_or(Duration::ZERO, |change| change.at);
        sleep_until(self.began + last + MAX_PROPAGATION + Duration::from_secs(1)).await;
        self.looks.abort();
        self.seen.check(client)
    }
}

impl Seen {
    async fn make(&self, client: &LoadGenerator, number: u64, change: Change) {
        let Change { gateway, client: of, lasts, .. } = change;
        let (limit, operator) = (limit(client), &client.gateways[gateway].operator);
        let began_us = client.network.now_us();
        let done = match lasts {
            Some(lasts) => {
                let size = OverrideQuota { quota: format!("{number}/s"), burst: None, note: None };
                operator.put(limit, identity(of), size, lasts).await.map(|_| true).map_err(|error| error.to_string())
            }
            None => operator.remove(limit, identity(of)).await.map_err(|error| error.to_string()),
        };
        client.network.note(|| format!("gateway {gateway}: override {number} of client {of} for {lasts:?}: {done:?}"));
        if done == Ok(true) {
            let ran = began_us..=client.network.now_us();
            let field = override_field(limit, identity(of));
            let (quota, looks) = (lasts.map(|_| number), self.looks.lock().unwrap().len());
            self.acknowledged.lock().unwrap().push(Acknowledged { gateway, field, quota, ran, looks });
            // From this time on, the gateway knows the change.
            self.look(client);
        }
    }

    fn look(&self, client: &LoadGenerator) {
        let (limit, at_us) = (limit(client), client.network.now_us());
        for (gateway, of) in client.gateways.iter().enumerate() {
            let table = of.operator.overrides.current();
            for client in 0..CLIENTS {
                let found = table.as_ref().and_then(|table| table.find(limit, identity(client)));
                let quota = found.map(|found| count(&found.quota));
                self.looks.lock().unwrap().push(Look { at_us, gateway, client, quota });
            }
        }
    }

    fn check(&self, client: &LoadGenerator) -> Vec<Violation> {
        if client.schedule.overrides.is_empty() {
            return Vec::new();
        }
        self.look(client);
        let mut violations = Vec::new();
        let written = client.network.state().store.overrides.clone();
        for of in 0..CLIENTS {
            let field = override_field(limit(client), identity(of));
            let written: Vec<_> = written.iter().filter(|written| written.field == field).collect();
            self.check_client(client, of, &written, &mut violations);
        }
        violations
    }

    /// Check the overrides of one client. `written` contains the store's writes for it, oldest first.
    fn check_client(&self, client: &LoadGenerator, of: u64, written: &[&Written], violations: &mut Vec<Violation>) {
        let mut violated = |invariant, message| violations.push(Violation::new(invariant, message));
        let close_us = close_us(&client.schedule);
        let (acknowledged, looks) = (self.acknowledged.lock().unwrap(), self.looks.lock().unwrap());
        // For each gateway, the index of the newest write that the gateway has certainly read.
        let mut newest: BTreeMap<usize, usize> = BTreeMap::new();
        for (number, look) in looks.iter().enumerate().filter(|(_, look)| look.client == of) {
            let at = || Duration::from_micros(look.at_us - START_US);
            let newest = newest.entry(look.gateway).or_default();
            for own in acknowledged.iter().filter(|own| own.gateway == look.gateway && own.looks <= number) {
                let number = written.iter().rposition(|written| own.is_of(written));
                *newest = (*newest).max(number.unwrap_or_default());
            }
            let Some(quota) = look.quota else { continue };
            let is_it = |written: &&&Written| written.new.is_some_and(|new| new.quota == quota);
            let Some(number) = written.iter().rposition(|written| is_it(&written)) else {
                violated("an override in force was written", format!("{look:?}"));
                continue;
            };
            let expiry_us = written[number].new.map_or(0, |new| new.expiry_us);
            if look.at_us > expiry_us + close_us {
                let message = format!("gateway {} at {:?}: {:?}", look.gateway, at(), written[number]);
                violated("an expired override is not in force", message);
            }
            if number < *newest {
                let message = format!(
                    "gateway {} at {:?}: {:?}, after {:?}",
                    look.gateway,
                    at(),
                    written[number],
                    written[*newest]
                );
                violated("a replaced or removed override does not come back", message);
            }
            *newest = (*newest).max(number);
        }
        // After the last poll, the last acknowledged write applies, or a later write whose reply was lost.
        let is_told = |written: &Written| acknowledged.iter().any(|own| own.is_of(written));
        let last_told = written.iter().rposition(|written| is_told(written));
        let now_us = client.network.now_us();
        let mut possible: Vec<Option<u64>> = Vec::new();
        if last_told.is_none() {
            possible.push(None);
        }
        for written in &written[last_told.unwrap_or_default()..] {
            match written.new {
                Some(New { quota, expiry_us }) => {
                    if now_us < expiry_us + close_us {
                        possible.push(Some(quota));
                    }
                    if expiry_us < now_us + close_us {
                        possible.push(None);
                    }
                }
                None => possible.push(None),
            }
        }
        let last = |gateway: usize| looks.iter().rfind(|look| look.client == of && look.gateway == gateway);
        let in_force: Vec<_> =
            (0..client.gateways.len()).map(|gateway| last(gateway).and_then(|look| look.quota)).collect();
        let close = possible.contains(&None) && possible.len() > 1;
        let differ = !close && in_force.iter().any(|quota| *quota != in_force[0]);
        if differ || in_force.iter().any(|quota| !possible.contains(quota)) {
            let message =
                format!("client {of}: {in_force:?} on the gateways, expected one of {possible:?} of {written:?}");
            violated("overrides are in force on all gateways after the store is back", message);
        }
    }
}
