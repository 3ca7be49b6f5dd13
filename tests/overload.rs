//! Exact under load, far away and after outages: what a client is admitted while the store is healthy but late, and what runs
//! after a store was gone for longer than a concurrency permit lives.

mod support;

use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;

use support::client::Client;
use support::gateway::Gateway;
use support::redis::Redis;
use support::relay::Relay;
use support::upstream::endless;
use support::{eventually, signal};

/// Counts responses by status. wrk has a script state for each of its threads.
const SCRIPT: &str = r#"
local threads = {}
function setup(thread) table.insert(threads, thread) end
function init() admitted, denied, rejected, other = 0, 0, 0, 0 end
function response(status)
  if status == 200 then admitted = admitted + 1
  elseif status == 429 then denied = denied + 1
  elseif status == 503 then rejected = rejected + 1
  else other = other + 1 end
end
function done()
  local sums = {}
  for i, name in ipairs({ "admitted", "denied", "rejected", "other" }) do
    sums[i] = 0
    for _, thread in ipairs(threads) do sums[i] = sums[i] + thread:get(name) end
  end
  print("sums " .. table.concat(sums, " "))
end
"#;

/// Responses with 200, 429, 503 and others.
fn hammer(address: SocketAddr, connections: usize) -> [u64; 4] {
    let directory = tempfile::tempdir().unwrap();
    let script = directory.path().join("count.lua");
    std::fs::write(&script, SCRIPT).unwrap();
    let output = Command::new("wrk")
        .args(["-t", "2", "-d", "2s", "--timeout", "10s", "-c", &connections.to_string(), "-s"])
        .arg(&script)
        .arg(format!("http://{address}/r"))
        .output()
        .expect("wrk is installed by `make tools`");
    let text = String::from_utf8(output.stdout).unwrap();
    let sums = text.lines().find_map(|line| line.strip_prefix("sums ")).unwrap_or_else(|| panic!("{text}"));
    sums.split(' ').map(|sum| sum.parse().unwrap()).collect::<Vec<_>>().try_into().unwrap()
}

fn gateway(url: &str, store: &str, limits: &[&str], route: &str) -> Gateway {
    let named: String = limits.iter().enumerate().map(|(n, limit)| format!("[limit.l{n}]\n{limit}\n")).collect();
    let names: Vec<_> = (0..limits.len()).map(|n| format!("l{n}")).collect();
    Gateway::start(&format!(
        "[store]\nurl = \"{url}\"\n{store}\n{named}\
         [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = {names:?}\nrespond = {{ status = 200 }}\n{route}\n"
    ))
}

#[test]
fn clients_with_thousands_of_connections_are_admitted_no_more_than_the_limit() {
    const LIMIT: u64 = 1000;
    let redis = Redis::start();
    let by_two =
        "by = \"header:user-agent\"\non_missing = \"skip\"\nquota = \"1000000000/24h\"\non_store_error = \"allow\"";
    let cases = [
        ("token-bucket", "allow", "", "", 2000),
        ("fixed-window", "allow", "denial_cache = 0", "cost = 2", 2000),
        ("sliding-window", "local", "denial_cache = 0", "", 4000),
        ("sliding-buckets", "allow", "timeout = \"5s\"\ndenial_cache = 0", "", 2000),
        ("sliding-log", "allow", "timeout = \"20ms\"", "cost = 2", 2000),
        ("fixed-window", "deny", "", "", 4000),
    ];
    for (algorithm, on_error, store, route, connections) in cases {
        redis::cmd("FLUSHALL").exec(&mut redis.connection()).unwrap();
        let limit = format!(
            "by = \"ip\"\nalgorithm = \"{algorithm}\"\nquota = \"{LIMIT}/24h\"\non_store_error = \"{on_error}\""
        );
        let limits: &[&str] = if route.is_empty() { &[&limit, by_two] } else { &[&limit] };
        let gateway = gateway(&redis.url(), store, limits, route);
        let [admitted, denied, rejected, other] = hammer(gateway.address, connections);
        let most = if route.is_empty() { LIMIT } else { LIMIT / 2 };
        let what = format!(
            "{algorithm}, {on_error}, {connections} connections: {admitted} admitted, {denied} denied, {rejected} rejected"
        );
        println!("{what}");
        assert!(admitted <= most, "{what}");
        assert_eq!(other, 0, "{what}");
        assert!(!gateway.log().contains("the store fails"), "{what}: overload is no outage: {}", gateway.log());
    }
}

#[test]
fn a_distant_store_decides_with_the_default_timeout() {
    for ms in [1, 5, 17, 40] {
        let redis = Redis::start();
        let relay = Relay::delayed(redis.port, Duration::from_millis(ms));
        let limit = "by = \"global\"\nquota = \"5/24h\"\nalgorithm = \"fixed-window\"\non_store_error = \"allow\"";
        let gateway = gateway(&relay.url(), "denial_cache = 0", &[limit], "");
        eventually("the store decides", || gateway.get("/r").header("ratelimit").is_some());
        let statuses: Vec<_> = (0..40).map(|_| gateway.get("/r").status).collect();
        let admitted = statuses.iter().filter(|status| **status == 200).count();
        assert!(admitted <= 5, "{ms} ms: {statuses:?}");
        assert!(statuses.iter().filter(|status| **status == 429).count() > 20, "{ms} ms: {statuses:?}");
        assert!(!gateway.log().contains("the store fails"), "{ms} ms: {}", gateway.log());
    }
}

#[test]
fn a_connection_that_was_closed_while_idle_costs_no_decision() {
    let redis = Redis::start();
    let limit = "by = \"global\"\nquota = \"1000/24h\"\non_store_error = \"deny\"";
    let gateway = gateway(&redis.url(), "connections = 2", &[limit], "");
    for round in 0..10 {
        for _ in 0..4 {
            // New connections reach all workers.
            assert_eq!(gateway.get("/r").status, 200, "round {round}: {}", gateway.log());
        }
        let killed: u64 = redis::cmd("CLIENT")
            .arg(&["KILL", "TYPE", "normal", "SKIPME", "yes"])
            .query(&mut redis.connection())
            .unwrap();
        assert!(killed > 0, "round {round}");
    }
    assert!(!gateway.log().contains("the store fails"), "{}", gateway.log());
}

#[test]
fn running_requests_are_counted_again_after_an_outage_longer_than_a_permit_lives() {
    const LIMIT: usize = 12;
    const GATEWAYS: usize = 3;
    // The upstream's response timeout and five seconds.
    const PERMIT: Duration = Duration::from_secs(6);
    let redis = Redis::start();
    let upstream = endless();
    let config = format!(
        "[store]\nurl = \"{}\"\ninstances = {GATEWAYS}\n\
         [limit.l]\nby = \"global\"\nalgorithm = \"concurrency\"\nquota = \"{LIMIT}\"\n\
         [upstream.u]\nservers = [\"http://{upstream}\"]\nresponse_timeout = \"1s\"\n\
         [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"l\"]\nupstream = \"u\"\n",
        redis.url()
    );
    let gateways: Vec<_> = (0..GATEWAYS).map(|_| Gateway::start(&config)).collect();
    let mut running: Vec<Client> = Vec::new();
    let try_each = |running: &mut Vec<Client>| {
        for gateway in &gateways {
            let mut client = gateway.client();
            client.send(b"GET /r HTTP/1.1\r\nHost: a\r\n\r\n");
            if client.head().unwrap().status == 200 {
                running.push(client);
            }
        }
    };
    for _ in 0..LIMIT {
        try_each(&mut running);
    }
    assert_eq!(running.len(), LIMIT, "by the store");
    signal(&redis.child, "STOP");
    let stopped = sluicegate::limit::clock::monotonic();
    eventually("the breakers are open", || {
        try_each(&mut running);
        gateways.iter().all(|gateway| gateway.log().contains("the store fails"))
    });
    eventually("all permits in the store have expired", || {
        try_each(&mut running);
        stopped.elapsed() > PERMIT + Duration::from_secs(2)
    });
    let most = 2 * LIMIT + GATEWAYS;
    assert!(running.len() <= most, "{} run in the outage, at most {most}", running.len());
    signal(&redis.child, "CONT");
    let zset = || {
        let keys = redis.keys();
        let key = keys.iter().find(|key| !key.contains("~probe")).cloned();
        key.map_or(0, |key| redis::cmd("ZCARD").arg(key).query::<usize>(&mut redis.connection()).unwrap_or(0))
    };
    eventually("the store counts all that run", || {
        try_each(&mut running);
        zset() >= running.len()
    });
    for _ in 0..LIMIT {
        try_each(&mut running);
    }
    assert!(running.len() <= most, "{} run after the outage, at most {most}", running.len());
    // All end: the permits are there for others, also those of checks that were given up.
    running.clear();
    eventually("permits are free again", || {
        try_each(&mut running);
        running.len() == LIMIT
    });
}

#[test]
fn permit_whose_grant_was_lost_is_released_when_the_store_answers_again() {
    // The upstream's response timeout and five seconds.
    const PERMIT: Duration = Duration::from_secs(15);
    let redis = Redis::start();
    let gateway = Gateway::start(&format!(
        "[store]\nurl = \"{}\"\n\
         [limit.l]\nby = \"global\"\nalgorithm = \"concurrency\"\nquota = \"12\"\non_store_error = \"deny\"\n\
         [upstream.u]\nservers = [\"http://{}\"]\nresponse_timeout = \"10s\"\n\
         [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"l\"]\nupstream = \"u\"\n",
        redis.url(),
        endless()
    ));
    signal(&redis.child, "STOP");
    for _ in 0..3 {
        assert_eq!(gateway.get("/r").status, 503, "the check is written, and not answered");
    }
    signal(&redis.child, "CONT");
    let answers = sluicegate::limit::clock::monotonic();
    eventually("Redis runs what was written", || redis.calls("zadd") > 0);
    eventually("all permits are released", || redis.keys().iter().all(|key| key.contains("~probe")));
    assert!(answers.elapsed() < PERMIT / 2, "released after {:?}, not expired", answers.elapsed());
}
