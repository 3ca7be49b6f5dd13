//! Which requests share a call of Redis.

mod support;

use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use sluicegate::limit::clock::Clock;
use sluicegate::limit::redis::script::Parts;
use sluicegate::limit::redis::server::Server;
use sluicegate::limit::redis::{RedisSettings, RedisStore};
use sluicegate::limit::store::{Operation, Store};
use support::PATIENCE;
use support::resp::{Answer, FakeRedis};
use support::stores::{Limit, SECOND, bucket};
use tokio::task::{JoinHandle, yield_now};
use tokio::time::timeout;

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

async fn connected(fake: &FakeRedis, timeout: Duration) -> Arc<RedisStore> {
    let settings = RedisSettings { prefix: "rl".to_owned(), connections: 1, timeout, algorithms: Parts::default() };
    let server = Server::Fixed(redis::Client::open(fake.url()).unwrap());
    let store = RedisStore::new(&settings, server, Clock::Store, Arc::default());
    store.connect().await.unwrap();
    Arc::new(store)
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

/// How many requests each call was for.
fn sizes(fake: &FakeRedis) -> Vec<usize> {
    fake.calls().iter().map(|call| call.requests().len()).collect()
}

#[tokio::test]
async fn while_eight_are_under_way_those_who_come_wait_and_share_a_call() {
    let (fake, words) = held();
    let store = connected(&fake, PATIENCE).await;
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
    let store = connected(&fake, Duration::from_secs(8)).await;
    let come = async |requests| {
        let all = async {
            while fake.requests() < requests {
                yield_now().await;
            }
        };
        timeout(PATIENCE, all).await.expect("they come");
    };
    let mut asked = one_by_one(&store, 30).await;
    come(30).await;
    asked.extend(one_by_one(&store, 4).await);
    come(34).await;
    assert_eq!(sizes(&fake), [1, 1, 1, 1, 1, 1, 1, 1, 22, 1, 1, 1, 1]);
    assert!(!asked.iter().any(JoinHandle::is_finished), "their own time is not over");
}

#[tokio::test]
async fn the_time_of_those_who_wait_begins_when_they_ask() {
    let (fake, words) = held();
    let timeout = Duration::from_secs(1);
    let (store, other) = (connected(&fake, timeout).await, connected(&fake, timeout + timeout / 32).await);
    let asked = one_by_one(&store, 9).await;
    let later = one_by_one(&other, 1).await;
    tokio::select! {
        biased;
        decided = all(asked) => assert!(!decided),
        _ = all(later) => panic!("the ninth waits longer than its timeout"),
    }
    drop(words);
}
