//! Overload, a slow store, and outages longer than the permit TTL. Limits stay exact while the store is healthy but
//! slow. After an outage, permits of running requests are counted again.

use std::collections::BTreeSet;
use std::io::Write;
use std::net::SocketAddr;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::support::admin_listener::{metric, with_admin};
use crate::support::client::{Client, load};
use crate::support::cluster::Cluster;
use crate::support::gateway::Gateway;
use crate::support::redis::{Redis, free_port};
use crate::support::relay::Relay;
use crate::support::upstream::{endless, read_head, read_request, serve};
use crate::support::{SetOnDrop, eventually, signal};
use sluicegate::clock::monotonic;

/// A wrk script that counts responses by status. The header `x-new`, if there is one, gets a new value with each
/// request. wrk has one script state per thread.
const SCRIPT: &str = r#"
local threads = {}
function setup(thread)
  table.insert(threads, thread)
  thread:set("number", #threads)
end
function init() admitted, denied, rejected, other, sent = 0, 0, 0, 0, 0 end
function request()
  sent = sent + 1
  if wrk.headers["x-new"] then wrk.headers["x-new"] = number .. "-" .. sent end
  return wrk.format()
end
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
    Gateway::start(&config(url, store, limits, response))
}

fn config(url: &str, store: &str, limits: &[&str], response: &str) -> String {
    let named: String = limits.iter().enumerate().map(|(n, limit)| format!("[limit.l{n}]\n{limit}\n")).collect();
    let names: Vec<_> = (0..limits.len()).map(|n| format!("l{n}")).collect();
    format!(
        "[store]\nurl = \"{url}\"\n{store}\n{named}\
         [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = {names:?}\n{response}\n"
    )
}

/// Number of values of each factor of [`overload_admits_no_more_than_the_limit`]. A run is one combination of these
/// values.
const FACTORS: [usize; 7] = [ALGORITHMS.len(), ON_STORE_ERROR.len(), 2, 2, 2, TIMEOUTS.len(), 2];
const ALGORITHMS: [&str; 6] =
    ["token-bucket", "fixed-window", "sliding-window", "sliding-buckets", "sliding-log", "concurrency"];
const ON_STORE_ERROR: [&str; 3] = ["local", "allow", "deny"];
const TIMEOUTS: [&str; 3] = ["", "timeout = \"20ms\"", "timeout = \"5s\""];

/// Return all runs: the index of the value of each factor. If `all` is false, return a few runs that together contain
/// each pair of values of any two factors.
fn runs<const N: usize>(factors: [usize; N], all: bool) -> Vec<[usize; N]> {
    let product: Vec<[usize; N]> = (0..factors.iter().product())
        .map(|number: usize| {
            let mut rest = number;
            factors.map(|values| {
                let value = rest % values;
                rest /= values;
                value
            })
        })
        .collect();
    if all {
        return product;
    }
    let pairs = |run: &[usize; N]| -> Vec<_> {
        let values: Vec<_> = run.iter().copied().enumerate().collect();
        (1..values.len()).flat_map(|at| values[..at].iter().map(|one| (*one, values[at])).collect::<Vec<_>>()).collect()
    };
    let mut missing: BTreeSet<_> = product.iter().flat_map(pairs).collect();
    let mut chosen = Vec::new();
    while !missing.is_empty() {
        let news = |run: &&[usize; N]| pairs(run).iter().filter(|pair| missing.contains(pair)).count();
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
    for run in runs(FACTORS, std::env::var_os("LONG").is_some()) {
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
fn costly_checks_admit_no_more_than_the_limit_and_open_no_breaker() {
    const LIMIT: u64 = 1000;
    const COSTS: [u64; 3] = [200, 10_000, 1];
    const CONNECTIONS: [usize; 5] = [300, 20, 1500, 700, 100];
    let connection_values = if std::env::var_os("LONG").is_some() { CONNECTIONS.len() } else { 2 };
    let redis = Redis::start();
    let factors = [ALGORITHMS.len(), ON_STORE_ERROR.len(), COSTS.len(), connection_values, 2, 2];
    for [algorithm, on_error, cost, connections, gateways, limits] in runs(factors, false) {
        redis::cmd("FLUSHALL").exec(&mut redis.connection()).unwrap();
        let (algorithm, on_error) = (ALGORITHMS[algorithm], ON_STORE_ERROR[on_error]);
        let (cost, connections, gateways) = (COSTS[cost], CONNECTIONS[connections], 1 + gateways);
        let account = format!("by = \"header:x-id\"\nquota = \"{LIMIT}/30d\"\non_store_error = \"{on_error}\"");
        // Each request has a new identity for the other limits, so that all of its checks charge their cost.
        let costly = |number: usize| {
            let detail = match algorithm {
                "sliding-buckets" => format!("quota = \"{}/min\"\nbuckets = 1000\ncost = {cost}", 20_000 + number),
                "concurrency" => "quota = \"1000\"".to_owned(),
                _ => format!("quota = \"{}/min\"\ncost = {cost}", cost.max(500)),
            };
            format!("by = \"header:x-new\"\nalgorithm = \"{algorithm}\"\non_store_error = \"{on_error}\"\n{detail}")
        };
        // A route may have eight limits with 1,000 buckets, or three sliding logs with a quota of 10,000.
        let count = match (limits, algorithm) {
            (0, _) => 1,
            (_, "sliding-log") => 3,
            (..) => 8,
        };
        let limits: Vec<_> = std::iter::once(account).chain((0..count).map(costly)).collect();
        let limits: Vec<_> = limits.iter().map(String::as_str).collect();
        let gateways: Vec<_> = (0..gateways).map(|_| gateway(&redis.url(), "", &limits, RESPOND)).collect();
        let over = AtomicBool::new(false);
        let ([mut admitted, denied, rejected, other], light) = std::thread::scope(|scope| {
            // The second gateway gets one request at a time.
            let light = gateways.get(1).map(|gateway| {
                scope.spawn(|| {
                    let mut client = gateway.client();
                    let mut statuses = Vec::new();
                    while !over.load(Ordering::SeqCst) {
                        let identity = format!("light {}", statuses.len());
                        statuses.push(client.get_with("/r", &[("x-id", "a"), ("x-new", &identity)]).status);
                    }
                    statuses.iter().filter(|status| **status == 200).count() as u64
                })
            });
            let _raise = SetOnDrop(&over);
            let sums = load_with_wrk(gateways[0].address, connections, &["x-id: a", "x-new: a"]);
            over.store(true, Ordering::SeqCst);
            (sums, light.map_or(0, |light| light.join().unwrap()))
        });
        admitted += light;
        let what = format!(
            "{algorithm}, {on_error}, {count} limits of cost {cost}, {connections} connections, {} gateways: {admitted} \
             admitted, {denied} denied, {rejected} rejected",
            gateways.len()
        );
        println!("{what}");
        assert_eq!(other, 0, "{what}");
        for gateway in &gateways {
            assert!(!gateway.log().contains("the store is down"), "{what}: Redis replies to PING: {}", gateway.log());
        }
        eventually("Redis decides again", || {
            let status = gateways[0].client().get_with("/r", &[("x-id", "a"), ("x-new", "last")]).status;
            admitted += u64::from(status == 200);
            [200, 429].contains(&status)
        });
        assert!(admitted <= LIMIT, "{what}");
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
    // With this timeout, a busy machine causes no store errors. A call on a closed connection fails at once.
    let gateway = gateway(&redis.url(), "connections = 2\ntimeout = \"5s\"", &[limit], RESPOND);
    for round in 0..10 {
        for _ in 0..4 {
            // Use a new connection each time, so that all workers get requests.
            let reply = gateway.get("/r");
            assert_eq!(reply.status, 200, "round {round}: {} {}", reply.text(), gateway.log());
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
    let stopped = sluicegate::clock::monotonic();
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
        "[server]\nworkers = 1\n[store]\nurl = \"{}\"\n\
         [limit.l]\nby = \"global\"\nalgorithm = \"concurrency\"\nquota = \"12\"\non_store_error = \"deny\"\n\
         [upstream.u]\nservers = [\"http://{}\"]\nresponse_timeout = \"10s\"\n\
         [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"l\"]\nupstream = \"u\"\n",
        redis.url(),
        endless()
    ));
    let mut client = gateway.client();
    client.send(b"GET /r HTTP/1.1\r\nHost: a\r\n\r\n");
    assert_eq!(client.head().unwrap().status, 200, "the worker is connected to Redis");
    // The script that counts the gateways calls ZADD once and ZREMRANGEBYSCORE twice.
    let registered = || {
        let info = redis.info("commandstats");
        let calls = |command: &str| {
            let line = info.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:calls=")));
            line.map_or(0, |line| line.split(',').next().unwrap().parse::<u64>().unwrap())
        };
        calls("zadd") - calls("zremrangebyscore") / 2
    };
    let admitted = registered();
    signal(&redis.child, "STOP");
    for _ in 0..3 {
        assert_eq!(gateway.get("/r").status, 503, "the check is sent and gets no reply");
    }
    signal(&redis.child, "CONT");
    drop(client);
    let answers = sluicegate::clock::monotonic();
    eventually("Redis runs what was written", || registered() > admitted);
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
            let mut statuses = Vec::new();
            eventually("the flood exceeds its limit", || {
                statuses.extend(load(&[gateway.address], 500, 5000, "/r", &[("x-own", "flood"), ("x-shared", "all")]));
                statuses.contains(&429)
            });
            [200, 429, 503].map(|status| statuses.iter().filter(|each| **each == status).count() as u64)
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
        let [admitted, denied, rejected] = flood.join().unwrap();
        println!("cluster: {admitted} admitted, {denied} denied, {rejected} rejected");
        assert!(admitted <= OWN, "{admitted} admitted");
        for other in others {
            assert_eq!(other.join().unwrap(), OWN);
        }
    });
}

/// A limit that is never exceeded, and whose remaining quota shows the charged cost.
const COUNTED: &str =
    "by = \"global\"\nquota = \"1000000/24h\"\nalgorithm = \"fixed-window\"\non_store_error = \"deny\"";

/// Wait until the cost that [`COUNTED`] has charged is the cost of the served requests plus the lost cost. Return the
/// lost cost.
fn await_charges_of(gateway: &Gateway, cost: u64, mut served: u64) -> u64 {
    let mut lost = 0;
    let mut seen = String::new();
    eventually("charged cost = served cost + lost cost", || {
        let reply = gateway.get("/r");
        if reply.status != 200 {
            return false;
        }
        served += 1;
        lost = metric(gateway, "sluicegate_store_cost_lost_total{kind=\"refund\"}") as u64;
        let charged = 1_000_000 - reply.remaining("l0");
        let state = format!("{charged} charged, {} served, {lost} lost", served * cost);
        if state != seen {
            println!("{state}");
            seen = state;
        }
        charged == served * cost + lost
    });
    lost
}

#[test]
fn requests_that_overload_rejects_do_not_stay_charged() {
    // Checks with a cost of 1 are coalesced.
    for cost in [1, 2] {
        let redis = Redis::start();
        let relay = Relay::delayed(redis.port, Duration::from_millis(5));
        let response = format!("{RESPOND}\ncost = {cost}");
        let gateway = Gateway::start(&with_admin(&config(&relay.url(), "", &[COUNTED], &response)));
        let over = AtomicBool::new(false);
        let (mut served, mut rejected) = (0, 0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // Replies arrive alternately before and after the timeout of 50 ms.
                for ms in [20, 90].into_iter().cycle().take_while(|_| !over.load(Ordering::SeqCst)) {
                    relay.set_delay(Duration::from_millis(ms));
                    std::thread::sleep(Duration::from_millis(100));
                }
            });
            let _raise = SetOnDrop(&over);
            eventually("checks are in time and too late", || {
                for status in load(&[gateway.address], 500, 5000, "/r", &[]) {
                    match status {
                        200 => served += 1,
                        503 => rejected += 1,
                        status => panic!("{status}"),
                    }
                }
                served > 0 && rejected > 100
            });
        });
        relay.set_delay(Duration::ZERO);
        println!("cost {cost}: {served} served, {rejected} rejected");
        assert_eq!(await_charges_of(&gateway, cost, served), 0, "Redis has replied to every call");
    }
}

#[test]
fn charge_whose_reply_is_lost_is_counted_as_lost() {
    let redis = Redis::start();
    let relay = Relay::start(redis.port);
    let gateway = Gateway::start(&with_admin(&config(&relay.url(), "", &[COUNTED], &format!("{RESPOND}\ncost = 7"))));
    assert_eq!(gateway.get("/r").status, 200);
    relay.drop_replies(true);
    assert_eq!(gateway.get("/r").status, 503);
    relay.drop_replies(false);
    relay.redirect_to(redis.port);
    let lost = await_charges_of(&gateway, 7, 1);
    assert!(lost >= 7 && lost.is_multiple_of(7), "{lost} lost");
}

#[test]
fn settlement_whose_reply_is_lost_is_made_once_and_counted_as_lost() {
    // Each case has the kind of the settlement, its configuration, its cost, and the cost that the failing request
    // leaves charged.
    for (kind, terms, cost, left) in
        [("refund", "refund_on = [\"5xx\"]", 1, 0), ("charge", "cost.response_header = \"x-used\"", 5, 5)]
    {
        let redis = Redis::start();
        let relay = Arc::new(Relay::start(redis.port));
        let lossy = relay.clone();
        let upstream = serve(move |mut stream| {
            while let Some(head) = read_head(&mut stream) {
                let fails = head.starts_with("GET /r?fail");
                if fails {
                    lossy.drop_replies(true);
                }
                let (status, used) = if fails { ("500 Internal Server Error", 5) } else { ("200 OK", 1) };
                let response = format!("HTTP/1.1 {status}\r\nX-Used: {used}\r\nContent-Length: 0\r\n\r\n");
                if stream.write_all(response.as_bytes()).is_err() {
                    return;
                }
            }
        });
        let response = format!("upstream = \"u\"\n[upstream.u]\nservers = [\"http://{upstream}\"]");
        let limit = format!("{COUNTED}\n{terms}");
        let gateway = Gateway::start(&with_admin(&config(&relay.url(), "", &[&limit], &response)));
        assert_eq!([(); 3].map(|()| gateway.get("/r").status), [200; 3]);
        let calls = redis.calls("evalsha");
        assert_eq!(gateway.get("/r?fail").status, 500);
        eventually("Redis has executed the check and the settlement", || redis.calls("evalsha") >= calls + 2);
        // The gateway learns that the reply will never arrive.
        relay.redirect_to(redis.port);
        relay.drop_replies(false);
        let lost = format!("sluicegate_store_cost_lost_total{{kind=\"{kind}\"}}");
        eventually("the cost counts as lost", || metric(&gateway, &lost) == f64::from(cost));
        let mut served = 3;
        eventually("the settlement was made once", || {
            let reply = gateway.get("/r");
            served += u64::from(reply.status == 200);
            reply.status == 200 && reply.remaining("l0") == 1_000_000 - served - left
        });
        assert_eq!(metric(&gateway, &lost), f64::from(cost), "{kind}");
    }
}

#[test]
fn reservation_whose_settlement_is_lost_is_settled_once() {
    const TOKENS: u64 = 10;
    let redis = Redis::start();
    let relay = Arc::new(Relay::start(redis.port));
    let lossy = relay.clone();
    let upstream = serve(move |mut stream| {
        while let Some(request) = read_request(&mut stream) {
            // The check is over. The reply to the settlement, which no request waits for, is lost.
            if request.head.contains("?fail") {
                lossy.drop_replies(true);
            }
            let body = r#"{"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}}"#;
            let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length:";
            if write!(stream, "{head} {}\r\n\r\n{body}", body.len()).is_err() {
                return;
            }
        }
    });
    let limit = format!("{COUNTED}\nunit = \"tokens\"\ncost = {{ llm = \"auto\" }}");
    let response = format!("upstream = \"u\"\n[upstream.u]\nservers = [\"http://{upstream}\"]");
    let config = config(&relay.url(), "", &[&limit], &response).replace("\"/r\"", "\"/v1/chat/completions\"");
    let gateway = Gateway::start(&with_admin(&config));
    let chat = |query: &str| {
        let path = format!("/v1/chat/completions{query}");
        let headers = [("content-type", "application/json")];
        let reply =
            gateway.client().request("POST", &path, &headers, br#"{"model":"m","max_tokens":100,"messages":[]}"#);
        (reply.status == 200).then(|| reply.remaining("l0"))
    };
    let reserved = 1_000_000 - chat("").unwrap();
    let charged = || redis.state(redis.keys().iter().find(|key| key.contains(":states")).unwrap())[1];
    eventually("the first reservation is settled", || charged() == TOKENS);
    let calls = redis.calls("evalsha");
    chat("?fail").unwrap();
    eventually("Redis has executed the check and the settlement", || redis.calls("evalsha") >= calls + 2);
    // The gateway learns that the reply will never arrive.
    relay.redirect_to(redis.port);
    relay.drop_replies(false);
    let lost = "sluicegate_store_cost_lost_total{kind=\"refund\"}";
    eventually("the refund counts as lost", || metric(&gateway, lost) == (reserved - TOKENS) as f64);
    assert_eq!(charged(), 2 * TOKENS, "the reservation was settled once");
    // The store may still be reconnecting.
    eventually("the store decides again", || chat("").is_some());
}

#[test]
fn permits_are_released_before_the_checks_of_other_clients() {
    let redis = Redis::start();
    let limit = "by = \"header:x-id\"\nalgorithm = \"concurrency\"\nquota = \"2\"";
    let gateway = gateway(&redis.url(), "", &[limit], RESPOND);
    let over = AtomicBool::new(false);
    let statuses = std::thread::scope(|scope| {
        let flood = scope.spawn(|| {
            while !over.load(Ordering::SeqCst) {
                println!("flood: {:?}", load_with_wrk(gateway.address, 1000, &["x-id: flood"]));
            }
        });
        let statuses = {
            let _raise = SetOnDrop(&over);
            load(&[gateway.address], 2, 100, "/r", &[("x-id", "calm")])
        };
        flood.join().unwrap();
        statuses
    });
    let [served, denied, rejected] =
        [200, 429, 503].map(|status| statuses.iter().filter(|each| **each == status).count());
    println!("{served} served, {denied} denied, {rejected} rejected");
    assert_eq!(served + denied + rejected, 100);
    // The two connections never have more than two requests in flight. A permit may be released late only if the gateway
    // has replaced its connection to Redis.
    assert!(denied <= 2, "{denied} requests were denied, {served} were served");
}

#[test]
fn requests_up_to_a_concurrency_limit_are_never_denied() {
    let redis = Redis::start();
    let limit = "by = \"global\"\nalgorithm = \"concurrency\"\nquota = \"10\"";
    let gateway = gateway(&redis.url(), "", &[limit], RESPOND);
    // A client sends its next request as soon as it has the response, which is before Redis releases the permit.
    let counts @ [admitted, denied, ..] = load_with_wrk(gateway.address, 10, &[]);
    println!("10 connections: {counts:?}");
    assert!(admitted > 100 && denied == 0, "{counts:?}");
}

/// Within 2 s after an outage, Redis may not know the permits of other gateways. A permit then needs both the local
/// share and Redis.
#[test]
fn permits_need_the_local_share_and_the_store_for_2_s_after_an_outage() {
    const LIMIT: usize = 10;
    const SHARE: usize = LIMIT / 2;
    let (redis, port) = (Redis::start(), free_port());
    let relays = [Relay::start(redis.port), Relay::start(redis.port)];
    let upstream = endless();
    let gateways = relays.each_ref().map(|relay| {
        Gateway::start(&format!(
            "[store]\nurl = \"{}\"\ntimeout = \"5s\"\ngateway_count = 2\n\
             [limit.l]\nby = \"global\"\nalgorithm = \"concurrency\"\nquota = \"{LIMIT}\"\n\
             [upstream.u]\nservers = [\"http://{upstream}\"]\nresponse_timeout = \"1m\"\n\
             [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"l\"]\nupstream = \"u\"\n",
            relay.url()
        ))
    });
    let ask = |gateway: &Gateway| {
        let mut client = gateway.client();
        client.send(b"GET /r HTTP/1.1\r\nHost: a\r\n\r\n");
        (client.head().unwrap().status == 200).then_some(client)
    };
    let isolate = |index: usize| {
        let before = gateways[index].log().matches("the store is down").count();
        relays[index].redirect_to(port);
        eventually("the breaker opens", || {
            ask(&gateways[index]);
            gateways[index].log().matches("the store is down").count() > before
        });
    };
    let reconnect = |index: usize| {
        let before = gateways[index].log().matches("the store answers").count();
        relays[index].redirect_to(redis.port);
        eventually("the store answers", || gateways[index].log().matches("the store answers").count() > before);
    };
    let hold = |gateway: &Gateway, held: &mut Vec<Client>, most: usize| {
        // The permit of an earlier request may not be released yet.
        eventually("all permits are granted", || {
            held.extend(ask(gateway));
            held.len() == most
        });
        assert!(ask(gateway).is_none(), "at most {most} permits");
    };
    let [one, other] = &gateways;
    // The local share is used up: it denies although Redis has free permits.
    let mut held = Vec::new();
    isolate(0);
    hold(one, &mut held, SHARE);
    let recovering = monotonic();
    reconnect(0);
    eventually("a permit is granted", || {
        held.extend(ask(one));
        held.len() > SHARE
    });
    let waited = recovering.elapsed();
    assert!(waited >= Duration::from_secs(2), "the local share must grant as well for 2 s, not only {waited:?}");
    hold(one, &mut held, LIMIT);

    // Redis denies although the local share has free permits.
    isolate(1);
    reconnect(1);
    for _ in 0..2 * SHARE {
        assert!(ask(other).is_none(), "all permits are held by the other gateway");
    }
    // The denials by Redis left nothing in the local share.
    isolate(1);
    let mut local = Vec::new();
    hold(other, &mut local, SHARE);
    drop(local);
    reconnect(1);
    drop(held.pop());
    eventually("the released permit is granted", || {
        held.extend(ask(other));
        held.len() == LIMIT
    });
    drop(held);
    eventually("all permits are free", || redis.keys().iter().all(|key| key.contains("~probe")));
}
