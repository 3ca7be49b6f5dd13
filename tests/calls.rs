//! Which requests share a call of Redis.

mod support;

use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use sluicegate::limit::admission::{Ledger, Pending};
use sluicegate::limit::backend::{Backend, Shared};
use sluicegate::limit::clock::{Clock, monotonic};
use sluicegate::limit::coalesce::{Coalescer, Set};
use sluicegate::limit::guard::Guard;
use sluicegate::limit::key::{Identity, Key};
use sluicegate::limit::memory::MemoryStore;
use sluicegate::limit::plan::Plan;
use sluicegate::limit::redis::script::Parts;
use sluicegate::limit::redis::server::Server;
use sluicegate::limit::redis::{RedisSettings, RedisStore};
use sluicegate::limit::store::{Charge, Mode, Operation, Store};
use support::PATIENCE;
use support::resp::{Answer, FakeRedis};
use support::stores::{Limit, SECOND, bucket, quota};
use tokio::task::{JoinHandle, yield_now};
use tokio::time::timeout;
use tokio_util::task::TaskTracker;

/// A server whose answers to checks each need a word of the sender, as long as there is one.
fn held() -> (FakeRedis, mpsc::Sender<()>) {
    let (sender, words) = mpsc::channel();
    let words = Mutex::new(words);
    let fake = FakeRedis::start(move |command| {
        if command.is_script() {
            let _ = words.lock().unwrap().recv();
        }
        Answer::Usual
    });
    (fake, sender)
}

async fn connected(fake: &FakeRedis, timeout: Duration) -> RedisStore {
    let settings = RedisSettings {
        prefix: "rl".to_owned(),
        connections: 1,
        timeout,
        connect_timeout: PATIENCE,
        algorithms: Parts::default(),
    };
    let server = Server::Fixed(redis::Client::open(fake.url()).unwrap());
    let store = RedisStore::new(&settings, server, Clock::Store, Arc::default());
    store.connect().await.unwrap();
    store
}

/// So many requests of different identities, each in a round of its own; whether they get a verdict.
async fn one_by_one(store: &Arc<RedisStore>, requests: u128) -> Vec<JoinHandle<bool>> {
    let mut asked = Vec::new();
    for identity in 0..requests {
        let store = store.clone();
        asked.push(tokio::spawn(async move {
            let limit = Limit::new("l", bucket(10, SECOND, 10));
            store.call(Operation::Check, &[limit.charge(identity, 1)]).await.is_ok()
        }));
        // It asks, its call is made up, and the connection writes it.
        for _ in 0..10 {
            yield_now().await;
        }
    }
    asked
}

async fn all(asked: Vec<JoinHandle<bool>>) -> bool {
    let mut decided = true;
    for one in asked {
        decided &= timeout(PATIENCE, one).await.expect("nobody waits for ever").unwrap();
    }
    decided
}

/// Returns when the server has got so many calls.
async fn come(fake: &FakeRedis, requests: usize) {
    let all = async {
        while fake.requests() < requests {
            yield_now().await;
        }
    };
    timeout(PATIENCE, all).await.expect("they come");
}

/// How many requests each call was for.
fn sizes(fake: &FakeRedis) -> Vec<usize> {
    fake.calls().iter().map(|call| call.requests().len()).collect()
}

#[tokio::test]
async fn while_eight_are_under_way_those_who_come_wait_and_share_a_call() {
    let (fake, words) = held();
    let store = Arc::new(connected(&fake, PATIENCE).await);
    let asked = one_by_one(&store, 30).await;
    drop(words);
    assert!(all(asked).await);
    assert_eq!(sizes(&fake), [1, 1, 1, 1, 1, 1, 1, 1, 22]);
    // None of them is under way any more.
    for _ in 0..4 {
        assert!(all(one_by_one(&store, 1).await).await);
    }
}

#[tokio::test]
async fn an_answer_that_does_not_come_is_waited_for_a_part_of_the_time_and_the_next_ones_not_at_all() {
    let fake = FakeRedis::start(|command| if command.is_script() { Answer::Silence } else { Answer::Usual });
    let store = Arc::new(connected(&fake, Duration::from_secs(8)).await);
    let mut asked = one_by_one(&store, 30).await;
    come(&fake, 30).await;
    asked.extend(one_by_one(&store, 4).await);
    come(&fake, 34).await;
    assert_eq!(sizes(&fake), [1, 1, 1, 1, 1, 1, 1, 1, 22, 1, 1, 1, 1]);
    assert!(!asked.iter().any(JoinHandle::is_finished), "their own time is not over");
}

#[tokio::test]
async fn the_time_of_those_who_wait_begins_when_they_ask() {
    let (fake, words) = held();
    let timeout = Duration::from_secs(1);
    let store = Arc::new(connected(&fake, timeout).await);
    let other = Arc::new(connected(&fake, timeout + timeout / 32).await);
    let asked = one_by_one(&store, 9).await;
    let later = one_by_one(&other, 1).await;
    tokio::select! {
        biased;
        decided = all(asked) => assert!(!decided),
        _ = all(later) => panic!("the ninth waits longer than its timeout"),
    }
    drop(words);
}

#[tokio::test]
async fn a_call_for_a_hot_key_takes_those_along_who_come_while_the_worker_is_busy() {
    let (fake, words) = held();
    let store = Shared::One(Guard::new(connected(&fake, PATIENCE).await, Arc::default()));
    let fallback = Arc::new(MemoryStore::new(1, Clock::Store));
    let backend = Backend::Redis { store, fallback, tallies: Arc::default() };
    let ledger = Arc::new(Ledger { backend, denials: None, tasks: TaskTracker::new() });
    let coalescer = Arc::new(Coalescer::new(PATIENCE, Arc::default()));
    let plan = Arc::new(plan());
    let check = move || {
        let (coalescer, ledger, plan) = (coalescer.clone(), ledger.clone(), plan.clone());
        async move {
            let pending = Pending { place: 0, plan: plan.clone(), identity: Identity(1), units: 1, advance: 0 };
            let key = Key { identity: Identity(1), bucket: &plan.bucket };
            let charge = Charge { key, rule: &plan.rule, cost: 1, mode: Mode::Binding, lease: 0 };
            let set = Set { id: 1, advance: 0 };
            coalescer.check(&ledger, set, &[charge], monotonic(), || vec![pending.clone()]).await.is_ok()
        }
    };
    let another = check.clone();
    let first = tokio::spawn(async move {
        assert!(check().await);
        let mut asked = Vec::new();
        // One in each round, as a busy worker reads them.
        for _ in 0..8 {
            asked.push(tokio::spawn(check()));
            yield_now().await;
        }
        asked
    });
    come(&fake, 1).await;
    let second = tokio::spawn(another());
    yield_now().await;
    drop(words);
    let later = timeout(PATIENCE, first).await.expect("it is answered").unwrap();
    assert!(all([second].into_iter().chain(later).collect()).await);
    assert_eq!(fake.calls()[1].cost(), 5, "the one that waited, and those of four rounds");
}

fn plan() -> Plan {
    let Limit { rule, bucket } = Limit::new("l", bucket(10, SECOND, 10));
    Plan { id: 1, quota: quota(10, SECOND), share: rule.clone(), rule, bucket }
}
