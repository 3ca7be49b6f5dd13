//! Overload, a slow store, and outages longer than the permit TTL. Limits stay exact while the store is healthy but
//! slow. After an outage, permits of running requests are counted again.

use std::collections::BTreeSet;
use std::io::Write;
use std::net::SocketAddr;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::support::client::Client;
use crate::support::cluster::Cluster;
use crate::support::gateway::Gateway;
use crate::support::redis::Redis;
use crate::support::relay::Relay;
use crate::support::upstream::{endless, read_head, serve};
use crate::support::{SetOnDrop, eventually, signal};

/// A wrk script that counts responses by status. wrk has one script state per thread.
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

/// Load a gateway with wrk for 1 s. Return the number of responses with 200, 429, 503 and other statuses.
fn load_with_wrk(address: SocketAddr, connections: usize, headers: &[&str]) -> [u64; 4] {
    let directory = tempfile::tempdir().unwrap();
    let script = directory.path().join("count.lua");
    std::fs::write(&script, SCRIPT).unwrap();
    let output = Command::new("wrk")
        .args(["-t", "2", "-d", "1s", "--timeout", "10s", "-c", &connections.to_string(), "-s"])
        .arg(&script)
        .args(headers.iter().flat_map(|header| ["-H", header]))
        .arg(format!("http://{address}/r"))
        .output()
        .expect("wrk is installed by `make tools`");
    let text = String::from_utf8(output.stdout).unwrap();
    let sums = text.lines().find_map(|line| line.strip_prefix("sums ")).unwrap_or_else(|| panic!("{text}"));
    sums.split(' ').map(|sum| sum.parse().unwrap()).collect::<Vec<_>>().try_into().unwrap()
}

const RESPOND: &str = "respond = { status = 200 }";

fn gateway(url: &str, store: &str, limits: &[&str], response: &str) -> Gateway {
    let named: String = limits.iter().enumerate().map(|(n, limit)| format!("[limit.l{n}]\n{limit}\n")).collect();
    let names: Vec<_> = (0..limits.len()).map(|n| format!("l{n}")).collect();
    Gateway::start(&format!(
        "[store]\nurl = \"{url}\"\n{store}\n{named}\
         [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = {names:?}\n{response}\n"
    ))
}

/// Number of values of each factor. A run is one combination of these values.
const FACTORS: [usize; 7] = [ALGORITHMS.len(), ON_STORE_ERROR.len(), 2, 2, 2, TIMEOUTS.len(), 2];
const ALGORITHMS: [&str; 6] =
    ["token-bucket", "fixed-window", "sliding-window", "sliding-buckets", "sliding-log", "concurrency"];
const ON_STORE_ERROR: [&str; 3] = ["local", "allow", "deny"];
const TIMEOUTS: [&str; 3] = ["", "timeout = \"20ms\"", "timeout = \"5s\""];

/// A run: the index of the value of each factor.
type Run = [usize; FACTORS.len()];

/// Return all runs. If `all` is false, return a few runs that together contain each pair of values of any two factors.
fn runs(all: bool) -> Vec<Run> {
    let product: Vec<Run> = (0..FACTORS.iter().product())
        .map(|number: usize| {
            let mut rest = number;
            FACTORS.map(|values| {
                let value = rest % values;
                rest /= values;
                value
            })
        })
        .collect();
    if all {
        return product;
    }
    let pairs = |run: &Run| -> Vec<_> {
        let values: Vec<_> = run.iter().copied().enumerate().collect();
        (1..values.len()).flat_map(|at| values[..at].iter().map(|one| (*one, values[at])).collect::<Vec<_>>()).collect()
    };
    let mut missing: BTreeSet<_> = product.iter().flat_map(pairs).collect();
    let mut chosen = Vec::new();
    while !missing.is_empty() {
        let news = |run: &&Run| pairs(run).iter().filter(|pair| missing.contains(pair)).count();
        let run = *product.iter().max_by_key(news).unwrap();
        missing.retain(|pair| !pairs(&run).contains(pair));
        chosen.push(run);
    }
    chosen
}

/// An upstream that counts the requests in flight, and the maximum of that number.
fn counting() -> (SocketAddr, Arc<[AtomicU64; 2]>) {
    let counts = Arc::<[AtomicU64; 2]>::default();
    let each = counts.clone();
    let address = serve(move |mut stream| {
        let [running, most] = &*each;
        while read_head(&mut stream).is_some() {
            most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            // Keep the request in flight, so that other requests arrive in the meantime.
            std::thread::sleep(Duration::from_millis(5));
            running.fetch_sub(1, Ordering::SeqCst);
            if stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").is_err() {
                return;
            }
        }
    });
    (address, counts)
}

#[test]
fn overload_admits_no_more_than_the_limit() {
    const LIMIT: u64 = 1000;
    const PERMITS: u64 = 20;
    let redis = Redis::start();
    for run in runs(std::env::var_os("LONG").is_some()) {
        redis::cmd("FLUSHALL").exec(&mut redis.connection()).unwrap();
        let [algorithm, on_error, connections, cached, cost, timeout, identities] = run;
        let (algorithm, on_error) = (ALGORITHMS[algorithm], ON_STORE_ERROR[on_error]);
        let permits = algorithm == "concurrency";
        let quota = if permits { PERMITS.to_string() } else { format!("{LIMIT}/3650d") };
        let limit =
            format!("by = \"ip\"\nalgorithm = \"{algorithm}\"\nquota = \"{quota}\"\non_store_error = \"{on_error}\"");
        let other = format!("by = \"header:x-id\"\nquota = \"1000000000/24h\"\non_store_error = \"{on_error}\"");
        let (connections, cost) = ([2000, 4000][connections], [1, 2][cost]);
        let store = format!("{}\n{}", TIMEOUTS[timeout], ["", "denial_cache = 0"][cached]);
        let (upstream, counts) = counting();
        let response = match permits {
            true => format!("upstream = \"u\"\ncost = {cost}\n[upstream.u]\nservers = [\"http://{upstream}\"]"),
            false => format!("respond = {{ status = 200 }}\ncost = {cost}"),
        };
        let limits: &[&str] = if identities == 1 { &[&limit, &other] } else { &[&limit] };
        let gateway = gateway(&redis.url(), &store, limits, &response);
        let [mut admitted, denied, rejected, other] = load_with_wrk(gateway.address, connections, &["x-id: a"]);
        let what = format!(
            "{algorithm}, {on_error}, {connections} connections, cost {cost}, {} identities, {store:?}: \
             {admitted} admitted, {denied} denied, {rejected} rejected",
            1 + identities
        );
        println!("{what}");
        assert_eq!(other, 0, "{what}");
        if permits {
            let ended = || {
                eventually("all permits are released", || !redis.keys().iter().any(|key| key.contains(":l0:")));
            };
            ended();
            eventually("a client without competitors is admitted", || {
                gateway.client().get_with("/r", &[("x-id", "a")]).status == 200
            });
            ended();
            let most = counts[1].load(Ordering::SeqCst);
            assert!((1..=PERMITS).contains(&most), "{what}: {most} requests ran concurrently");
        } else {
            // A single client uses the rest of the quota.
            let mut client = gateway.client();
            eventually("the limit is used up", || {
                let status = client.get_with("/r", &[("x-id", "a")]).status;
                admitted += u64::from(status == 200);
                status == 429
            });
            assert!(admitted <= LIMIT / cost, "{what}, {admitted} in all");
        }
        assert!(
            !gateway.log().contains("the store is down"),
            "{what}: overload must not count as an outage: {}",
            gateway.log()
        );
    }
}

#[test]
fn distant_store_decides_with_the_default_timeout() {
    for ms in [1, 5, 17, 40] {
        let redis = Redis::start();
        let relay = Relay::delayed(redis.port, Duration::from_millis(ms));
        let limit = "by = \"global\"\nquota = \"5/24h\"\nalgorithm = \"fixed-window\"\non_store_error = \"allow\"";
        let gateway = gateway(&relay.url(), "denial_cache = 0", &[limit], RESPOND);
        eventually("the store decides", || gateway.get("/r").header("ratelimit").is_some());
        let statuses: Vec<_> = (0..40).map(|_| gateway.get("/r").status).collect();
        let admitted = statuses.iter().filter(|status| **status == 200).count();
        assert!(admitted <= 5, "{ms} ms: {statuses:?}");
        assert!(statuses.iter().filter(|status| **status == 429).count() > 20, "{ms} ms: {statuses:?}");
        assert!(!gateway.log().contains("the store is down"), "{ms} ms: {}", gateway.log());
    }
}

#[test]
fn store_connection_closed_while_idle_costs_no_decision() {
    let redis = Redis::start();
    let limit = "by = \"global\"\nquota = \"1000/24h\"\non_store_error = \"deny\"";
    let gateway = gateway(&redis.url(), "connections = 2", &[limit], RESPOND);
    for round in 0..10 {
        for _ in 0..4 {
            // Use a new connection each time, so that all workers get requests.
            assert_eq!(gateway.get("/r").status, 200, "round {round}: {}", gateway.log());
        }
        let killed: u64 = redis::cmd("CLIENT")
            .arg(&["KILL", "TYPE", "normal", "SKIPME", "yes"])
            .query(&mut redis.connection())
            .unwrap();
        assert!(killed > 0, "round {round}");
    }
    assert!(!gateway.log().contains("the store is down"), "{}", gateway.log());
}

#[test]
fn running_requests_are_counted_again_after_an_outage_longer_than_a_permit_lives() {
    const LIMIT: usize = 12;
    const GATEWAYS: usize = 3;
    // The permit TTL is `response_timeout` plus 5 s.
    const PERMIT: Duration = Duration::from_secs(6);
    let redis = Redis::start();
    let upstream = endless();
    let config = format!(
        "[store]\nurl = \"{}\"\ngateway_count = {GATEWAYS}\n\
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
    assert_eq!(running.len(), LIMIT, "the store admits up to the limit");
    signal(&redis.child, "STOP");
    let stopped = sluicegate::limiter::clock::monotonic();
    eventually("the breakers are open", || {
        try_each(&mut running);
        gateways.iter().all(|gateway| gateway.log().contains("the store is down"))
    });
    eventually("all permits in the store have expired", || {
        try_each(&mut running);
        stopped.elapsed() > PERMIT + Duration::from_secs(2)
    });
    let most = 2 * LIMIT + GATEWAYS;
    assert!(running.len() <= most, "{} requests run during the outage, at most {most} expected", running.len());
    signal(&redis.child, "CONT");
    let zset = || {
        let keys = redis.keys();
        let key = keys.iter().find(|key| !key.contains("~probe")).cloned();
        key.map_or(0, |key| redis::cmd("ZCARD").arg(key).query::<usize>(&mut redis.connection()).unwrap_or(0))
    };
    eventually("the store counts all running requests", || {
        try_each(&mut running);
        zset() >= running.len()
    });
    for _ in 0..LIMIT {
        try_each(&mut running);
    }
    assert!(running.len() <= most, "{} requests run after the outage, at most {most} expected", running.len());
    // All requests end. Then all permits become free, including those of checks whose reply did not arrive in time.
    running.clear();
    eventually("permits are free again", || {
        try_each(&mut running);
        running.len() == LIMIT
    });
}

#[test]
fn permit_whose_grant_was_lost_is_released_when_the_store_answers_again() {
    // The permit TTL is `response_timeout` plus 5 s.
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
        assert_eq!(gateway.get("/r").status, 503, "the check is sent and gets no reply");
    }
    signal(&redis.child, "CONT");
    let answers = sluicegate::limiter::clock::monotonic();
    eventually("Redis runs what was written", || redis.calls("zadd") > 0);
    eventually("all permits are released", || redis.keys().iter().all(|key| key.contains("~probe")));
    assert!(answers.elapsed() < PERMIT / 2, "released after {:?}, not expired", answers.elapsed());
}

#[test]
fn denied_flood_across_masters_leaves_other_clients_their_quota() {
    const OWN: u64 = 20;
    const CLIENTS: u64 = 10;
    let cluster = Cluster::start(3, 0);
    let by = |header: &str, quota: u64, rest: &str| {
        format!("by = \"header:{header}\"\nquota = \"{quota}/3650d\"\non_store_error = \"deny\"\n{rest}")
    };
    let (own, shared) = (by("x-own", OWN, ""), by("x-shared", 1_000_000, "algorithm = \"fixed-window\""));
    let gateway = gateway(&cluster.url(), "timeout = \"5s\"", &[&own, &shared], RESPOND);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let flood = scope.spawn(|| {
            let _raise = SetOnDrop(&over);
            load_with_wrk(gateway.address, 1000, &["x-own: flood", "x-shared: all"])
        });
        let others: Vec<_> = (0..CLIENTS)
            .map(|id| {
                let (gateway, over, id) = (&gateway, &over, id.to_string());
                scope.spawn(move || {
                    let mut client = gateway.client();
                    let mut admitted = 0;
                    while admitted < OWN || !over.load(Ordering::SeqCst) {
                        let reply = client.get_with("/r", &[("x-own", &id), ("x-shared", "all")]);
                        let wait = reply.header("retry-after").map_or(0, |wait| wait.parse::<u64>().unwrap());
                        match reply.status {
                            200 => admitted += 1,
                            // The check timed out, or it was coalesced with other checks that took the tokens.
                            503 => assert_eq!(wait, 1, "{reply:?}"),
                            429 if admitted < OWN => assert_eq!(wait, 1, "a token is available: {reply:?}"),
                            429 => assert!(wait > 86400, "its own limit is used up: {reply:?}"),
                            status => panic!("{status}"),
                        }
                    }
                    admitted
                })
            })
            .collect();
        let [admitted, denied, rejected, other] = flood.join().unwrap();
        println!("cluster: {admitted} admitted, {denied} denied, {rejected} rejected");
        assert!(admitted <= OWN && denied > 0 && other == 0, "{admitted} admitted, {denied} denied, {other} other");
        for other in others {
            assert_eq!(other.join().unwrap(), OWN);
        }
    });
}
