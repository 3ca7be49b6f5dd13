//! Usage totals equal the charged cost per identity and day, whatever happens to the requests.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::support::admin_listener::{HERE, ask, metric, with_admin};
use crate::support::client::{Client, load};
use crate::support::cluster::Cluster;
use crate::support::gateway::{Gateway, binary};
use crate::support::redis::{Redis, free_port};
use crate::support::stores::{ALIGNED, Limit, SECOND, bucket, call, log, redis_store, usage_in_redis, window};
use crate::support::upstream::{Seen, Upstream};
use crate::support::{eventually, signal};
use aws_lc_rs::digest::{SHA256, digest};
use jiff::Timestamp;
use redis::Commands;
use serde_json::Value;
use sluicegate::clock::Clock;
use sluicegate::limiter::redis::server::RedisEndpoint;
use sluicegate::limiter::redis::{RedisDeployment, RedisSettings};
use sluicegate::limiter::shared_data::SharedData;
use sluicegate::limiter::store::RedisStore;
use sluicegate::limiter::usage::{UsageAmount, UsageDays, UsageFields, UsageKey, UsagePost};
use sluicegate::limiter::verdict::{Charge, ChargeMode, Operation, StoreError};

/// The TTL of usage totals: 400 days, in seconds.
const TTL_S: i64 = 400 * 86_400;

/// An API key provider with the consumers `acme` and `beta`, whose keys equal their names.
const KEYS: &str = "[auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\non_unknown = \"accept\"\non_missing = \"anonymous\"\n";

fn consumers() -> String {
    let consumer = |name: &str| {
        let hash = digest(&SHA256, name.as_bytes());
        let digits: String = hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        format!("[[consumer]]\nname = \"{name}\"\nkeys = [\"sha256:{digits}\"]\n")
    };
    consumer("acme") + &consumer("beta")
}

/// Start a gateway with the consumers file.
fn start(config: &str) -> Gateway {
    Gateway::start_with(config, &[("consumers.toml", &consumers())])
}

/// A configuration with a limit by API key on `/r` that counts usage.
fn by_key(store: &str, limit: &str) -> String {
    format!(
        "[server]\nworkers = 2\n{store}\n{KEYS}[limit.l]\nby = \"api-key\"\nusage = true\n{limit}\n\
         [[route]]\nname = \"r\"\npath = \"/r\"\nidentify = [\"keys\"]\nlimits = [\"l\"]\nrespond = {{ status = 200 }}\n"
    )
}

/// A route that has the same limit and costs 3.
const DEAR: &str = "[[route]]\nname = \"dear\"\npath = \"/dear\"\nidentify = [\"keys\"]\nlimits = [\"l\"]\ncost = 3\n\
                    respond = { status = 200 }\n";

/// Run `sluicegate usage` with the configuration in `directory`. Return standard output or, if the command failed, its
/// exit code and standard error.
fn usage(directory: &Path, arguments: &[&str]) -> Result<String, (Option<i32>, String)> {
    let mut command = binary();
    let output = command.arg("usage").arg("--config").arg(directory.join("gateway.toml")).args(arguments).output();
    let output = output.unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    match output.status.success() {
        true => Ok(text(output.stdout)),
        false => Err((output.status.code(), text(output.stderr))),
    }
}

fn usage_json(gateway: &Gateway, arguments: &[&str]) -> Value {
    let text = usage(gateway.directory(), &[arguments, &["--json"]].concat()).unwrap();
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// Return the cost per consumer. Other identities are named by their hash.
fn costs(gateway: &Gateway) -> BTreeMap<String, i64> {
    let report = usage_json(gateway, &["--by", "identity", "--from", "2026-01-01"]);
    let entries = report["usage"].as_array().unwrap().iter();
    let cost = |entry: &Value| {
        let name = entry["consumer"].as_str().unwrap_or_else(|| entry["identity"].as_str().unwrap());
        (name.to_owned(), entry["cost"].as_i64().unwrap())
    };
    entries.map(cost).collect()
}

/// Return the cost of a consumer.
fn cost_of(gateway: &Gateway, consumer: &str) -> i64 {
    costs(gateway).get(consumer).copied().unwrap_or(0)
}

fn addresses(gateways: &[Gateway]) -> Vec<SocketAddr> {
    gateways.iter().map(|gateway| gateway.address).collect()
}

fn admitted(statuses: &[u16]) -> i64 {
    assert!(statuses.iter().all(|status| [200, 429].contains(status)), "{statuses:?}");
    statuses.iter().filter(|status| **status == 200).count() as i64
}

/// Assert that the TTL of each key with usage totals is 400 days, less at most 600 s. The first charge of each day
/// renews this TTL.
fn assert_totals_expire(redis: &Redis) {
    redis.assert_every_key_expires();
    let mut connection = redis.connection();
    for key in redis.keys().into_iter().filter(|key| key.contains(":usage:")) {
        let ttl: i64 = connection.ttl(&key).unwrap();
        assert!((TTL_S - 600..=TTL_S).contains(&ttl), "{key} expires in {ttl} s");
    }
}

#[test]
fn totals_of_two_gateways_equal_the_admitted_cost() {
    for limit in [
        "algorithm = \"fixed-window\"\nquota = \"700/24h\"",
        "quota = \"700/24h\"",
        "algorithm = \"sliding-log\"\nquota = \"700/24h\"",
        "algorithm = \"sliding-buckets\"\nquota = \"700/24h\"",
    ] {
        let redis = Redis::start();
        let config = by_key(&redis.store(), limit) + DEAR;
        let gateways = [start(&config), start(&config)];
        let addresses = addresses(&gateways);
        let load = |key: &'static str, path: &'static str, requests| {
            let headers: Vec<_> = [("x-api-key", key)].into_iter().filter(|(_, key)| !key.is_empty()).collect();
            admitted(&load(&addresses, 8, requests, path, &headers))
        };
        let [acme, dear, beta, anonymous] = std::thread::scope(|scope| {
            let spawn = |key, path, requests| scope.spawn(move || load(key, path, requests));
            [spawn("acme", "/r", 600), spawn("acme", "/dear", 200), spawn("beta", "/r", 300), spawn("", "/r", 100)]
                .map(|thread| thread.join().unwrap())
        });
        assert!(acme + dear < 800, "{limit}: some requests of acme must be denied");
        assert_eq!((beta, anonymous), (300, 100), "{limit}");
        let totals = costs(&gateways[0]);
        assert_eq!(totals["acme"], acme + 3 * dear, "{limit}: {totals:?}");
        assert_eq!(totals["beta"], beta, "{limit}: {totals:?}");
        let unnamed: Vec<_> = totals.iter().filter(|(name, _)| name.len() == 32).map(|(_, cost)| *cost).collect();
        assert_eq!(
            (unnamed, totals.len()),
            (vec![anonymous], 3),
            "{limit}: other identities are named by their hash: {totals:?}"
        );
        assert_totals_expire(&redis);
        assert!(!redis.keys().iter().any(|key| key.contains("acme")), "{limit}: keys do not name identities");
    }
}

#[test]
fn several_limits_of_a_request_have_their_own_totals() {
    let redis = Redis::start();
    // Three of the four limits count usage. A calendar window is supported only by the generic script.
    for fourth in ["quota = \"50/min\"", "algorithm = \"fixed-window\"\nquota = \"50/day\""] {
        redis::cmd("FLUSHALL").exec(&mut redis.connection()).unwrap();
        let gateway = start(&format!(
            "{}{KEYS}[limit.one]\nby = \"api-key\"\nusage = true\nquota = \"3/24h\"\nalgorithm = \"fixed-window\"\n\
             [limit.two]\nby = \"api-key\"\nquota = \"50/min\"\n\
             [limit.three]\nby = \"api-key\"\nusage = true\nquota = \"50/min\"\ncost = 5\nunit = \"tokens\"\n\
             [limit.four]\nby = \"ip\"\nusage = true\n{fourth}\n\
             [[route]]\nname = \"r\"\npath = \"/r\"\nidentify = [\"keys\"]\nlimits = [\"one\", \"two\", \"three\", \"four\"]\n\
             respond = {{ status = 200 }}\n",
            redis.store()
        ));
        let statuses = load(&[gateway.address], 1, 5, "/r", &[("x-api-key", "acme")]);
        assert_eq!(statuses, [200, 200, 200, 429, 429]);
        let report = usage_json(&gateway, &[]);
        let totals: Vec<_> = report["totals"].as_array().unwrap().iter().map(|total| total["cost"].clone()).collect();
        // The totals are sorted by the names of the limits: `four`, `one`, `three`.
        assert_eq!(totals, [3, 3, 15], "denied requests are not counted: {report}");
        assert_eq!(report["usage"].as_array().unwrap().len(), 3, "{report}");
        assert_eq!(report["totals"][2]["unit"], "tokens");
        assert_eq!(redis.keys().iter().filter(|key| key.contains(":usage:")).count(), 3, "{:?}", redis.keys());
        assert_totals_expire(&redis);
    }
}

/// Respond with the status and the headers that the request names.
fn respond_as_asked(request: &Seen) -> Vec<u8> {
    let status = request.headers("x-status").first().map_or("200 OK", |status| *status).to_owned();
    let lines: String = request.headers("x-line").iter().map(|line| format!("{line}\r\n")).collect();
    format!("HTTP/1.1 {status}\r\n{lines}Content-Length: 0\r\n\r\n").into_bytes()
}

/// A configuration with a limit by API key on `/r`, which forwards to `upstream`.
fn proxied(store: &str, limit: &str, upstream: &Upstream) -> String {
    format!(
        "{store}\n{KEYS}[limit.l]\nby = \"api-key\"\nusage = true\n{limit}\n[upstream.u]\nservers = [\"{}\"]\n\
         [[route]]\nname = \"r\"\npath = \"/r\"\nidentify = [\"keys\"]\nlimits = [\"l\"]\nupstream = \"u\"\n",
        upstream.url()
    )
}

#[test]
fn refunds_and_costs_of_responses_change_the_total() {
    let redis = Redis::start();
    let upstream = Upstream::responding(respond_as_asked);
    for algorithm in ["token-bucket", "fixed-window", "sliding-window", "sliding-buckets", "sliding-log"] {
        redis::cmd("FLUSHALL").exec(&mut redis.connection()).unwrap();
        let limit = format!("algorithm = \"{algorithm}\"\nquota = \"100/10h\"\nrefund_on = [\"5xx\"]\ncost = 4");
        let gateway = start(&proxied(&redis.store(), &limit, &upstream));
        let mut client = gateway.client();
        for (status, total) in [("200 OK", 4), ("503 Down", 4), ("404 No", 8), ("500 No", 8)] {
            client.get_with("/r", &[("x-api-key", "acme"), ("x-status", status)]);
            assert_eq!(cost_of(&gateway, "acme"), total, "{algorithm}: {status}");
        }
    }
    redis::cmd("FLUSHALL").exec(&mut redis.connection()).unwrap();
    let limit = "quota = \"100/10h\"\ncost.response_header = \"x-used\"\nunit = \"tokens\"\nrefund_on = [\"5xx\"]";
    let gateway = start(&proxied(&redis.store(), limit, &upstream));
    let mut client = gateway.client();
    let mut ask = |status: &str, line: &str| {
        client.get_with("/r", &[("x-api-key", "acme"), ("x-status", status), ("x-line", line)]).status
    };
    assert_eq!(ask("200 OK", "x-used: 30"), 200);
    assert_eq!(cost_of(&gateway, "acme"), 30);
    assert_eq!(ask("503 Down", "x-used: 50"), 503);
    assert_eq!(cost_of(&gateway, "acme"), 30, "a refunded response costs nothing");
    assert_eq!(ask("200 OK", "x-used: 1000"), 200);
    assert_eq!(cost_of(&gateway, "acme"), 1030, "the cost is counted beyond the quota as well");
    assert_eq!(ask("200 OK", "x-used: 7"), 429);
    assert_eq!(cost_of(&gateway, "acme"), 1030);
    assert_totals_expire(&redis);
}

/// Respond as an LLM API does: 10 tokens per request, and 404 for models whose name begins with `unknown`.
fn respond_as_provider(request: &Seen) -> Vec<u8> {
    let body: Value = serde_json::from_slice(&request.body).unwrap();
    let is_known = !body["model"].as_str().is_some_and(|model| model.starts_with("unknown"));
    let (status, text) = match is_known {
        true => (
            "200 OK",
            "{\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":3,\
             \"prompt_tokens_details\":{\"cached_tokens\":2},\"completion_tokens_details\":{\"reasoning_tokens\":1}}}",
        ),
        false => ("404 Not Found", "{}"),
    };
    let length = text.len();
    format!("HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{text}")
        .into_bytes()
}

#[test]
fn tokens_are_totalled_by_model_and_attackers_cannot_add_totals_without_bound() {
    let upstream = Upstream::responding(respond_as_provider);
    let redis = Redis::start();
    for store in [redis.store(), "[store]\nurl = \"memory:\"\n".to_owned()] {
        let limit = "quota = \"1000000/24h\"\nunit = \"tokens\"\ncost = { llm = \"auto\" }";
        let config = with_admin(&proxied(&store, limit, &upstream));
        let is_shared = store.contains("redis:");
        let gateways = if is_shared { vec![start(&config), start(&config)] } else { vec![start(&config)] };
        let ask = |index: usize, key: &str, model: &str| {
            let body = serde_json::json!({"model": model, "max_tokens": 5}).to_string();
            let gateway = &gateways[index % gateways.len()];
            gateway.client().request("POST", "/r", &[("x-api-key", key)], body.as_bytes()).status
        };
        for index in 0..3 {
            assert_eq!(ask(index, "acme", "large"), 200);
            assert_eq!(ask(index, "acme", "=a \"b\",c"), 200);
            assert_eq!(ask(index, "acme", &format!("unknown-{index}")), 404);
        }
        for index in 0..70 {
            assert_eq!(ask(index, "beta", &format!("m{index:02}")), 200);
        }
        assert_eq!(ask(0, "beta", "m05"), 200);
        // With `memory:` as store, the totals are in the gateway: read them from its admin listener.
        let admin = format!("http://{}", gateways[0].admin());
        let by_model = if is_shared { vec!["--by", "model"] } else { vec!["--by", "model", "--admin", &admin] };
        let report = || usage_json(&gateways[0], &by_model);
        let models = |report: &Value, consumer: &str| -> Vec<(String, i64)> {
            let entries = report["usage"].as_array().unwrap().iter().filter(|entry| entry["consumer"] == consumer);
            let model = |entry: &Value| entry["model"].as_str().unwrap_or("other").to_owned();
            entries.map(|entry| (model(entry), entry["cost"].as_i64().unwrap())).collect()
        };
        eventually("the costs of all requests are counted", || {
            let report = report();
            let sum = |consumer| models(&report, consumer).iter().map(|(_, cost)| cost).sum::<i64>();
            let named =
                models(&report, "beta").iter().filter(|(model, _)| model != "other").map(|(_, cost)| cost).sum::<i64>();
            (sum("acme"), sum("beta"), named) == (60, 710, 650)
        });
        let report = report();
        assert_eq!(models(&report, "acme"), [("=a \"b\",c".into(), 30), ("large".into(), 30)], "{report}");
        let beta = models(&report, "beta");
        assert_eq!(
            (beta.len(), beta.last().unwrap()),
            (65, &("other".to_owned(), 60)),
            "64 models, and one entry for all others: {beta:?}"
        );
        assert!(beta.contains(&("m05".into(), 20)), "{beta:?}");
        let csv = usage(gateways[0].directory(), &[&by_model[..], &["--csv"]].concat()).unwrap();
        let mut lines = csv.lines();
        assert_eq!(lines.next(), Some("limit,unit,consumer,identity,period,model,cost"));
        let line = lines.next().unwrap();
        assert!(line.starts_with("l,tokens,acme,") && line.ends_with(",\"'=a \"\"b\"\",c\",30"), "{line}");
        let text = usage(gateways[0].directory(), &by_model).unwrap();
        assert!(text.contains("other") && text.contains("total of l"), "{text}");
        let by_kind = if is_shared { vec!["--by", "kind"] } else { vec!["--by", "kind", "--admin", &admin] };
        let kinds = || {
            let report = usage_json(&gateways[0], &by_kind);
            let entry = |entry: &Value| (entry["consumer"].clone(), entry["kind"].clone(), entry["cost"].clone());
            report["usage"].as_array().unwrap().iter().map(entry).collect::<Vec<_>>()
        };
        let of = |consumer: &str, responses: u64| {
            [("cached_input", 2), ("input", 5), ("output", 2), ("reasoning", 1)]
                .map(|(kind, tokens)| (consumer.into(), kind.into(), (tokens * responses).into()))
        };
        let expected = [of("acme", 6), of("beta", 71)].concat();
        eventually("the tokens of all responses with 2xx are counted", || kinds() == expected);
        let csv = usage(gateways[0].directory(), &[&by_kind[..], &["--csv"]].concat()).unwrap();
        assert!(csv.starts_with("limit,unit,consumer,identity,period,kind,cost\nl,tokens,acme,"), "{csv}");
        let text = usage(gateways[0].directory(), &by_kind).unwrap();
        assert!(text.contains("reasoning") && text.contains("total of l") && text.contains(": 770 tokens"), "{text}");
        if is_shared {
            assert_eq!(cost_of(&gateways[0], "beta"), 710, "the totals are the same");
            assert_totals_expire(&redis);
            let key = redis.keys().into_iter().find(|key| key.ends_with(":models")).unwrap();
            let length: usize = redis.connection().hlen(key).unwrap();
            assert!(length <= 2 * 64 + 3, "{length} fields");
        }
    }
}

#[test]
fn disconnected_client_is_in_the_total_with_the_cost_of_the_route() {
    let redis = Redis::start();
    // The upstream never responds.
    let upstream = Upstream::responding(|_| {
        std::thread::park();
        Vec::new()
    });
    let limit = "quota = \"100/hour\"\ncost.response_header = \"x-used\"";
    let gateway = start(&proxied(&redis.store(), limit, &upstream));
    let mut client = gateway.client();
    client.send(b"GET /r HTTP/1.1\r\nHost: a\r\nx-api-key: acme\r\n\r\n");
    eventually("the upstream has the request", || upstream.count() == 1);
    assert_eq!(cost_of(&gateway, "acme"), 0);
    drop(client);
    eventually("one token is charged", || cost_of(&gateway, "acme") == 1);
}

#[test]
fn shadow_limit_counts_what_it_charges() {
    let redis = Redis::start();
    let gateway = start(&by_key(&redis.store(), "shadow = true\nquota = \"3/24h\"\nalgorithm = \"fixed-window\""));
    let statuses = load(&[gateway.address], 1, 5, "/r", &[("x-api-key", "acme")]);
    assert_eq!(statuses, [200; 5]);
    assert_eq!(cost_of(&gateway, "acme"), 3, "two requests would have been denied");
}

#[test]
fn prefetched_tokens_that_are_returned_are_in_no_total() {
    for algorithm in ["token-bucket", "fixed-window", "sliding-log"] {
        let redis = Redis::start();
        let limit = format!("algorithm = \"{algorithm}\"\nquota = \"1000000/24h\"\nprefetch = 50");
        let limit = limit.replace("sliding-log\"\nquota = \"1000000", "sliding-log\"\nquota = \"10000");
        let config = by_key(&redis.store(), &limit);
        let mut gateways = [start(&config), start(&config)];
        let mut total = 0;
        eventually("tokens of a hot identity are prefetched", || {
            total += admitted(&load(&addresses(&gateways), 16, 32, "/r", &[("x-api-key", "acme")]));
            cost_of(&gateways[0], "acme") > total
        });
        // Unused tokens are returned when the process ends, before they expire.
        for gateway in &mut gateways {
            gateway.terminate();
        }
        for gateway in &mut gateways {
            assert!(gateway.wait().success());
        }
        assert_eq!(cost_of(&gateways[0], "acme"), total, "{algorithm}");
    }
}

#[test]
fn local_admissions_of_an_outage_are_posted_after_it() {
    let upstream = Upstream::responding(respond_as_asked);
    for (on_store_error, cost) in
        [("local", "cost = 2"), ("allow", "cost = 2"), ("allow", "cost.response_header = \"x-used\"")]
    {
        let port = free_port();
        let redis = Redis::start_on(port).expect("the port is still free");
        let store = format!("[store]\nurl = \"{}\"\ntimeout = \"100ms\"\n", redis.url());
        let limit =
            format!("quota = \"1000/24h\"\non_store_error = \"{on_store_error}\"\nrefund_on = [\"5xx\"]\n{cost}");
        let gateway = start(&with_admin(&proxied(&store, &limit, &upstream)));
        let mut client = gateway.client();
        let mut ask = |status: &str| {
            client.get_with("/r", &[("x-api-key", "acme"), ("x-status", status), ("x-line", "x-used: 2")]).status
        };
        assert_eq!(ask("200 OK"), 200);
        assert_eq!(cost_of(&gateway, "acme"), 2);
        drop(redis);
        for _ in 0..20 {
            assert_eq!(ask("200 OK"), 200, "{on_store_error}");
            assert_eq!(ask("503 Down"), 503, "{on_store_error}");
        }
        assert!(metric(&gateway, "sluicegate_memory_usage_totals") >= 1.0, "the totals are not posted yet");
        // The new Redis has no data: the totals that the old one had are lost, like all states.
        let _redis = Redis::start_on(port).expect("the port is still free");
        eventually("the usage is posted", || metric(&gateway, "sluicegate_memory_usage_totals") == 0.0);
        assert_eq!(cost_of(&gateway, "acme"), 40, "{on_store_error}, {cost}: 20 requests, 20 were refunded");
        assert_eq!(ask("200 OK"), 200);
        eventually("the store decides", || {
            ask("200 OK");
            cost_of(&gateway, "acme") > 40
        });
        assert_eq!(metric(&gateway, "sluicegate_usage_cost_lost_total"), 0.0);
    }
}

#[test]
fn usage_of_an_outage_is_lost_if_the_gateway_is_killed_before_it_is_posted() {
    let redis = Redis::start();
    let port = redis.port;
    let limit = "algorithm = \"fixed-window\"\nquota = \"1000/24h\"";
    let mut gateway = start(&with_admin(&by_key(&redis.store(), limit)));
    let ask = |gateway: &Gateway| gateway.client().get_with("/r", &[("x-api-key", "acme")]).status;
    drop(redis);
    assert_eq!([(); 5].map(|()| ask(&gateway)), [200; 5]);
    assert!(metric(&gateway, "sluicegate_memory_usage_totals") >= 1.0, "the total is not posted yet");
    signal(&gateway.child, "KILL");
    gateway.wait();
    let _redis = Redis::start_on(port).expect("the port is still free");
    let next = Gateway::start_file(&gateway.directory().join("gateway.toml"));
    assert_eq!([(); 3].map(|()| ask(&next)), [200; 3]);
    assert_eq!(cost_of(&gateway, "acme"), 3, "only the three requests after the restart are counted");
}

#[tokio::test(flavor = "multi_thread")]
async fn post_that_is_sent_again_is_added_once() {
    let redis = Redis::start();
    let settings = RedisSettings { timeout: crate::support::MAX_WAIT, ..RedisSettings::default() };
    let deployment = RedisDeployment::Single(RedisEndpoint::Single(redis.client()));
    let store = RedisStore::new(&deployment, &settings, Arc::default(), Arc::default(), Arc::default());
    let data = SharedData(&store);
    let post = |poster, sequence, days: &[(i8, i64)]| UsagePost {
        key: UsageKey { limit: "l".into(), identity: 7, month: "2026-11".parse().unwrap(), fields: UsageFields::Days },
        amounts: days.iter().map(|(day, cost)| UsageAmount { day: *day, name: None, cost: *cost }).collect(),
        poster,
        sequence,
    };
    let first = post(1, 5, &[(22, 10), (23, -3)]);
    assert!(data.post_usage(&first).await.unwrap());
    assert!(!data.post_usage(&first).await.unwrap(), "a post whose reply was lost is not added twice");
    assert!(data.post_usage(&post(2, 1, &[(23, 4)])).await.unwrap(), "a post of another gateway is added");
    assert!(data.post_usage(&post(1, 6, &[(23, 100)])).await.unwrap(), "the next post is added");
    assert!(!data.post_usage(&first).await.unwrap());
    let totals = usage_in_redis(&redis, "rl");
    let day = |day: &str| totals[&("l".to_owned(), 7, day.to_owned())];
    assert_eq!((totals.len(), day("2026-11-22"), day("2026-11-23")), (2, 10, 101), "{totals:?}");
    assert_totals_expire(&redis);
}

fn us(text: &str) -> u64 {
    text.parse::<Timestamp>().unwrap().as_microsecond() as u64
}

fn counted(name: &str, rule: sluicegate::limiter::algorithm::Rule, zone: &str) -> Limit {
    Limit { usage: Some(Arc::new(UsageDays::new(zone).unwrap())), ..Limit::new(name, rule) }
}

/// Return the total of an identity and a day.
fn total(redis: &Redis, prefix: &str, limit: &str, day: &str) -> i64 {
    usage_in_redis(redis, prefix).get(&(limit.to_owned(), 1, day.to_owned())).copied().unwrap_or(0)
}

#[tokio::test]
async fn charges_around_midnight_are_in_the_total_of_their_day() {
    let redis = Redis::start();
    for (prefix, zone, midnight, days) in [
        ("utc", "UTC", "2026-12-01T00:00:00Z", ["2026-11-30", "2026-12-01"]),
        ("berlin", "Europe/Berlin", "2026-03-28T23:00:00Z", ["2026-03-28", "2026-03-29"]),
        // The day on which daylight saving time ends has 25 hours.
        ("summer", "Europe/Berlin", "2026-10-25T23:00:00Z", ["2026-10-25", "2026-10-26"]),
        ("angeles", "America/Los_Angeles", "2027-01-01T08:00:00Z", ["2026-12-31", "2027-01-01"]),
    ] {
        let midnight = us(midnight);
        let clock = Clock::manual(midnight - 1);
        let store = redis_store(&redis, prefix, clock.clone());
        let limits = [
            counted("one", window(1000, 3600 * SECOND, ALIGNED), zone),
            counted("two", bucket(1000, SECOND, 1000), zone),
            counted("three", log(1000, SECOND), zone),
        ];
        // One limit alone, two limits, and limits of which one is supported only by the generic script.
        for limits in [&limits[..1], &limits[1..2], &limits[..2], &limits[..]] {
            redis::cmd("FLUSHALL").exec(&mut redis.connection()).unwrap();
            let charges = |cost| limits.iter().map(|limit| limit.charge(1, cost)).collect::<Vec<_>>();
            let check = async |operation, cost| call(&store, operation, &charges(cost)).await.unwrap();
            let totals = |day: &str| {
                limits.iter().map(|limit| total(&redis, prefix, limit.bucket.limit_name(), day)).collect::<Vec<_>>()
            };
            clock.set(midnight - 1);
            let before = check(Operation::Check, 5).await;
            clock.set(midnight);
            check(Operation::Check, 2).await;
            assert_eq!(totals(days[0]), vec![5; limits.len()], "{prefix}");
            assert_eq!(totals(days[1]), vec![2; limits.len()], "{prefix}");
            // A refund changes the total of the day of its charge. A late charge changes the total of its own day.
            check(Operation::Refund { charged_at: before.now_us }, 4).await;
            check(Operation::Charge, 9).await;
            check(Operation::Peek, 9).await;
            assert_eq!(totals(days[0]), vec![1; limits.len()], "{prefix}");
            assert_eq!(totals(days[1]), vec![11; limits.len()], "{prefix}");
            assert_totals_expire(&redis);
        }
    }
}

#[tokio::test]
async fn day_is_that_of_redis_also_if_the_clock_of_the_gateway_is_off() {
    let redis = Redis::start();
    const DAYS: i64 = 86_400_000_000;
    for (prefix, skew_us) in [("ahead", 40 * DAYS), ("behind", -3 * DAYS), ("equal", 0)] {
        let store = redis_store(&redis, prefix, Clock::Skewed(skew_us));
        let limit = counted("l", bucket(1000, SECOND, 1000), "UTC");
        let now_us = call(&store, Operation::Check, &[limit.charge(1, 3)]).await.unwrap().now_us;
        call(&store, Operation::TakeUpTo, &[limit.charge(1, 3)]).await.unwrap();
        let day = limit.usage.as_ref().unwrap().day_at(now_us).date.to_string();
        assert_eq!(total(&redis, prefix, "l", &day), 6, "{prefix}: {:?}", usage_in_redis(&redis, prefix));
        let remaining = call(&store, Operation::Peek, &[limit.charge(1, 1)]).await.unwrap().outcomes[0].remaining;
        assert!(remaining >= 994, "{prefix}: a call that Redis corrects charges once");
    }
}

#[tokio::test]
async fn operations_add_to_the_total_what_they_charge() {
    let redis = Redis::start();
    let clock = Clock::manual(us("2026-11-23T12:00:00Z"));
    let store = redis_store(&redis, "rl", clock.clone());
    let limit = counted("l", window(10, 86_400 * SECOND, ALIGNED), "UTC");
    let with = |mode, cost| Charge { mode, ..limit.charge(1, cost) };
    let total = || total(&redis, "rl", "l", "2026-11-23");
    let run = async |operation, mode, cost, expected: i64| {
        call(&store, operation, &[with(mode, cost)]).await.unwrap();
        assert_eq!(total(), expected, "{operation:?} {mode:?} {cost}");
    };
    run(Operation::Check, ChargeMode::Enforced, 4, 4).await;
    run(Operation::Check, ChargeMode::Enforced, 7, 4).await;
    run(Operation::Peek, ChargeMode::Enforced, 1, 4).await;
    run(Operation::Check, ChargeMode::Deferred, 5, 4).await;
    run(Operation::Check, ChargeMode::Shadow, 2, 6).await;
    run(Operation::Check, ChargeMode::Shadow, 7, 6).await;
    run(Operation::TakeUpTo, ChargeMode::Enforced, 3, 9).await;
    run(Operation::TakeUpTo, ChargeMode::Enforced, 3, 10).await;
    run(Operation::TakeUpTo, ChargeMode::Enforced, 3, 10).await;
    run(Operation::Charge, ChargeMode::Enforced, 20, 30).await;
    let refund = Operation::Refund { charged_at: clock.now_us() };
    run(refund, ChargeMode::Enforced, 25, 5).await;
    // A request is counted for all of its limits or for none.
    let other = counted("other", bucket(100, SECOND, 100), "UTC");
    let both = [limit.charge(1, 6), other.charge(1, 6)];
    assert_eq!(call(&store, Operation::Check, &both).await.unwrap().granted, 0);
    assert_eq!(usage_in_redis(&redis, "rl").len(), 1, "a request that one limit denies is not counted");
}

#[tokio::test]
async fn total_that_cannot_be_written_leaves_nothing_behind() {
    let redis = Redis::start();
    let clock = Clock::manual(us("2026-11-23T12:00:00Z"));
    let store = redis_store(&redis, "rl", clock);
    for limits in [
        vec![counted("l", bucket(10, SECOND, 10), "UTC")],
        vec![Limit::new("other", bucket(10, SECOND, 10)), counted("l", bucket(10, SECOND, 10), "UTC")],
        vec![counted("l", log(10, SECOND), "UTC")],
    ] {
        let charges: Vec<_> = limits.iter().map(|limit| limit.charge(1, 1)).collect();
        let (month, fields) = ("2026-11".parse().unwrap(), UsageFields::Days);
        let key = UsageKey { limit: "l".into(), identity: 1, month, fields }.to_redis_key("rl");
        let () = redis.connection().set_ex(&key, "of another program", 100).unwrap();
        let error = call(&store, Operation::Check, &charges).await.unwrap_err();
        assert!(matches!(error, StoreError::CorruptState(_)), "{error}");
        assert_eq!(redis.keys().len(), 1, "the state is not charged: {:?}", redis.keys());
        let () = redis.connection().del(&key).unwrap();
        // Beyond `maxmemory`, Redis rejects both a charge and the addition to its usage total.
        redis::cmd("CONFIG").arg("SET").arg("maxmemory").arg(1).exec(&mut redis.connection()).unwrap();
        let error = call(&store, Operation::Check, &charges).await.unwrap_err();
        assert!(matches!(error, StoreError::WritesRejected(_)), "{error}");
        redis::cmd("CONFIG").arg("SET").arg("maxmemory").arg(0).exec(&mut redis.connection()).unwrap();
        assert_eq!(redis.keys().len(), 0);
        assert_eq!(call(&store, Operation::Check, &charges).await.unwrap().granted, 1);
        assert_eq!(usage_in_redis(&redis, "rl").len(), 1);
        redis::cmd("FLUSHALL").exec(&mut redis.connection()).unwrap();
    }
}

#[test]
fn cluster_totals_are_exact_while_slots_migrate() {
    let cluster = Cluster::start(3, 0);
    let store = format!("[store]\nurl = \"{}\"\ntimeout = \"5s\"\n", cluster.url());
    let gateway = Gateway::start(&format!(
        "{store}[limit.l]\nby = \"header:x-id\"\nusage = true\nquota = \"100000/24h\"\non_store_error = \"deny\"\n\
         [limit.two]\nby = [\"header:x-id\", \"route\"]\nusage = true\nquota = \"100000/24h\"\non_store_error = \"deny\"\n\
         [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"l\"]\ncost = 2\nrespond = {{ status = 200 }}\n\
         [[route]]\nname = \"both\"\npath = \"/both\"\nlimits = [\"l\", \"two\"]\nrespond = {{ status = 200 }}\n"
    ));
    let mut client = gateway.client();
    for id in 0..60 {
        let path = if id % 2 == 0 { "/r" } else { "/both" };
        assert_eq!(client.get_with(path, &[("x-id", &id.to_string())]).status, 200);
    }
    for master in cluster.masters() {
        assert!(master.keys().iter().any(|key| key.contains(":usage:")), "each master has some of the totals");
        assert_totals_expire(master);
    }
    let limit_totals = |gateway: &Gateway| {
        let report = usage_json(gateway, &[]);
        let cost = |index: usize| report["totals"][index]["cost"].as_i64().unwrap_or(0);
        (cost(0), cost(1))
    };
    assert_eq!(limit_totals(&gateway), (30 * 2 + 30, 30));
    // The state and the total of an identity are on two nodes, in both orders, and then on neither node.
    let ask = |requests: i64, id: &str| {
        let statuses = load(&[gateway.address], 4, requests as usize, "/r", &[("x-id", id)]);
        assert_eq!(statuses, vec![200; requests as usize]);
        2 * requests
    };
    let key_of = |id: &str| {
        let before = cluster.keys();
        ask(1, id);
        cluster.keys().into_iter().find(|key| key.contains(":l:usage:") && !before.contains(key)).unwrap()
    };
    let mut expected = limit_totals(&gateway).0 + 2;
    let slot = cluster.slot(&key_of("migrating"));
    let from = cluster.owner(slot);
    let to = cluster.masters().into_iter().find(|node| node.port != from.port).unwrap();
    let migration = cluster.begin_migration(slot, from, to);
    expected += ask(10, "migrating");
    assert_eq!(migration.move_keys(1), 1);
    expected += ask(10, "migrating");
    migration.finish();
    expected += ask(10, "migrating");
    assert_eq!(limit_totals(&gateway).0, expected);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut way = [to, from];
            while !stop.load(Ordering::Relaxed) {
                cluster.migrate(slot, way[0], way[1]);
                way.reverse();
            }
        });
        expected += ask(100, "migrating");
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(limit_totals(&gateway).0, expected);
    cluster.masters().iter().for_each(|master| assert_totals_expire(master));
    assert_eq!(gateway.warnings(), "");
}

/// Write totals of two months for the consumers and for another identity.
fn write_totals(redis: &Redis, gateway: &Gateway) -> String {
    // Send one request per identity, to read its hash from its key in Redis.
    let mut other = String::new();
    for key in ["acme", "beta", "stranger"] {
        redis::cmd("FLUSHALL").exec(&mut redis.connection()).unwrap();
        assert_eq!(gateway.client().get_with("/r", &[("x-api-key", key)]).status, 200);
        let keys = redis.keys();
        let hash = keys[0].split(['{', '}']).nth(1).unwrap().to_owned();
        other += &format!("{hash} ");
    }
    redis::cmd("FLUSHALL").exec(&mut redis.connection()).unwrap();
    let hashes: Vec<_> = other.split_whitespace().collect();
    let mut connection = redis.connection();
    for (hash, month, day, cost) in [
        (hashes[0], "2026-10", 30, 100),
        (hashes[0], "2026-10", 31, 20),
        (hashes[0], "2026-11", 1, 3),
        (hashes[1], "2026-11", 2, 500),
        (hashes[2], "2026-11", 1, 7),
    ] {
        let () = connection.hset(format!("rl:{{{hash}}}:l:usage:{month}"), day, cost).unwrap();
        let () = connection.hset(format!("rl:{{{hash}}}:l:usage:{month}"), ".0123456789abcdef", 7).unwrap();
        // Write a total of a limit that the configuration does not have, and a state.
        let () = connection.hset(format!("rl:{{{hash}}}:gone:usage:{month}"), day, 1).unwrap();
        let () = connection.set(format!("rl:{{{hash}}}:l:b"), "state").unwrap();
    }
    hashes[2].to_owned()
}

#[test]
fn command_prints_totals_by_day_month_and_identity() {
    let redis = Redis::start();
    let gateway = start(&by_key(&redis.store(), "quota = \"1000/min\"\nunit = \"tokens\""));
    let stranger = write_totals(&redis, &gateway);
    let run = |arguments: &[&str]| usage(gateway.directory(), arguments).unwrap();
    let csv = |arguments: &[&str]| {
        let all = run(&[&["--from", "2026-10-01", "--to", "2026-11-30", "--csv"], arguments].concat());
        let lines = all.lines().map(|line| line.replace(|digit: char| line.contains("acme,") && digit == '\r', ""));
        let short = |line: String| {
            let fields: Vec<_> = line.split(',').collect();
            assert_eq!(fields.len(), 6, "{line}");
            format!(
                "{} {} {} {}",
                fields[0],
                if fields[2].is_empty() { fields[3] } else { fields[2] },
                fields[4],
                fields[5]
            )
        };
        let mut lines: Vec<_> = lines.collect();
        assert_eq!(lines.remove(0), "limit,unit,consumer,identity,period,cost");
        lines.into_iter().map(short).collect::<Vec<_>>()
    };
    let unnamed = |rest: &str| format!("l {stranger} {rest}");
    assert_eq!(
        csv(&[]),
        [
            "l acme 2026-10-30 100",
            "l acme 2026-10-31 20",
            "l acme 2026-11-01 3",
            "l beta 2026-11-02 500",
            &unnamed("2026-11-01 7"),
        ]
    );
    assert_eq!(
        csv(&["--by", "month"]),
        ["l acme 2026-10 120", "l acme 2026-11 3", "l beta 2026-11 500", &unnamed("2026-11 7")]
    );
    assert_eq!(csv(&["--by", "identity"]), ["l acme  123", "l beta  500", &unnamed(" 7")]);
    assert_eq!(csv(&["--identity", "acme", "--by", "identity"]), ["l acme  123"]);
    assert_eq!(csv(&["--identity", "api-key=beta"]), ["l beta 2026-11-02 500"]);
    assert_eq!(csv(&["--identity", &stranger]), [unnamed("2026-11-01 7")]);
    assert_eq!(csv(&["--limit", "l", "--identity", "acme", "--by", "month"]).len(), 2);
    let only = run(&["--from", "2026-10-31", "--to", "2026-11-01", "--csv"]);
    assert_eq!(only.lines().count(), 4, "both days are included: {only}");

    let text = run(&["--from", "2026-10-01", "--to", "2026-11-30", "--by", "month"]);
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let lines: Vec<_> = text.lines().map(words).collect();
    assert_eq!(lines[0], ["LIMIT", "CLIENT", "MONTH", "COST"]);
    assert_eq!(lines[1], ["l", "acme", "2026-10", "120", "tokens"]);
    assert!(text.ends_with("total of l from 2026-10-01 to 2026-11-30: 630 tokens\n"), "{text}");
    let report = usage_json(&gateway, &["--from", "2026-10-01", "--to", "2026-10-31", "--by", "month"]);
    assert_eq!(report["totals"], serde_json::json!([{"limit": "l", "unit": "tokens", "cost": 120}]));
    assert_eq!(
        (&report["by"], &report["from"], &report["to"]),
        (&"month".into(), &"2026-10-01".into(), &"2026-10-31".into())
    );
    let entry = &report["usage"][0];
    assert_eq!(
        (&entry["consumer"], &entry["period"], &entry["cost"]),
        (&"acme".into(), &"2026-10".into(), &120.into())
    );
    let empty = run(&["--from", "2026-09-01", "--to", "2026-09-30"]);
    assert_eq!(empty, "no usage from 2026-09-01 to 2026-09-30\n");

    for (arguments, code, problem) in [
        (&["--limit", "m"][..], 1, "unknown limit `m`"),
        (&["--identity", "stranger"], 1, "no consumer has this name"),
        (&["--identity", "ip=192.0.2.7"], 1, "no limit with `usage = true` has `ip` in `by`"),
        (&["--identity", "a", "--identity", "b"], 1, "PART=VALUE"),
        (&["--from", "2026-11-02", "--to", "2026-11-01"], 1, "`from` (2026-11-02) is after `to` (2026-11-01)"),
        (&["--from", "yesterday"], 2, "--from"),
        (&["--by", "year"], 2, "day, month, identity"),
        (&["--csv", "--json"], 2, "cannot be used with"),
    ] {
        let (exit, text) = usage(gateway.directory(), arguments).unwrap_err();
        assert!(exit == Some(code) && text.contains(problem), "{arguments:?}: {exit:?} {text}");
    }
    drop(redis);
    let (exit, text) = usage(gateway.directory(), &[]).unwrap_err();
    assert!(exit == Some(1) && text.contains("cannot read the usage totals from the store"), "{exit:?} {text}");
}

#[test]
fn redis_user_of_the_manual_may_read_totals_and_nothing_else() {
    let redis = Redis::start();
    let config = by_key(&redis.store(), "quota = \"1000/min\"");
    let gateway = start(&config);
    load(&[gateway.address], 1, 3, "/r", &[("x-api-key", "acme")]);
    let manual = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/how-to/usage.md")).unwrap();
    let line =
        manual.lines().find_map(|line| line.strip_prefix("ACL SETUSER billing ")).expect("the manual has the user");
    let words: Vec<_> = line.split(' ').map(|word| word.replace(">…", ">secret")).collect();
    let set_user = |words: &[String]| {
        redis::cmd("ACL").arg("SETUSER").arg("billing").arg(words).exec(&mut redis.connection()).unwrap()
    };
    set_user(&words);
    let directory = tempfile::tempdir().unwrap();
    let as_billing = config.replace("redis://", "redis://billing:secret@");
    let listener = "[[listener]]\naddress = \"127.0.0.1:0\"\n";
    std::fs::write(directory.path().join("gateway.toml"), as_billing + listener).unwrap();
    std::fs::write(directory.path().join("consumers.toml"), consumers()).unwrap();
    for identity in [&[][..], &["--identity", "acme"]] {
        let text = usage(directory.path(), &[&["--by", "identity"], identity].concat()).unwrap();
        assert!(text.contains("acme"), "{text}");
    }
    set_user(&["-scan".to_owned()]);
    let (exit, text) = usage(directory.path(), &[]).unwrap_err();
    assert!(exit == Some(1) && text.contains("scan"), "{exit:?} {text}");
    assert!(usage(directory.path(), &["--identity", "acme"]).is_ok(), "one identity needs no scan");
}

#[test]
fn missing_permission_for_totals_is_a_failure_of_the_store_until_it_is_granted() {
    let redis = Redis::start();
    let acl =
        |word: &str| redis::cmd("ACL").arg("SETUSER").arg("default").arg(word).exec(&mut redis.connection()).unwrap();
    acl("-hincrby");
    let limit = "quota = \"1000/min\"\non_store_error = \"deny\"";
    let gateway = start(&by_key(&redis.store(), limit));
    let mut client = gateway.client();
    let mut ask = || client.get_with("/r", &[("x-api-key", "acme")]).status;
    eventually("the breaker opens", || {
        assert_eq!(ask(), 503);
        gateway.log().contains("the store is down")
    });
    // Redis rejects HINCRBY in the probes as well, so the circuit breaker stays open.
    let rejected = redis.rejections("hincrby");
    eventually("three probes", || redis.rejections("hincrby") >= rejected + 3);
    assert_eq!((ask(), gateway.log().matches("the store is down").count()), (503, 1));
    assert_eq!(redis.keys().len(), 0, "a charge without a total is not written: {:?}", redis.keys());
    acl("+hincrby");
    eventually("the store decides", || ask() == 200);
    let admitted = 1 + (0..4).filter(|_| ask() == 200).count() as i64;
    assert_eq!(cost_of(&gateway, "acme"), admitted);
}

#[test]
fn command_without_a_limit_with_usage_says_so() {
    let redis = Redis::start();
    let gateway = start(&by_key(&redis.store(), "quota = \"5/min\"").replace("usage = true\n", ""));
    let (exit, text) = usage(gateway.directory(), &[]).unwrap_err();
    assert!(exit == Some(1) && text.contains("no limit has `usage = true`"), "{exit:?} {text}");
    // The totals of a limit that counted usage in the past can be read by the limit's name.
    assert!(usage(gateway.directory(), &["--limit", "l"]).unwrap().starts_with("no usage"));
}

#[test]
fn api_returns_the_totals_of_both_stores() {
    let redis = Redis::start();
    for store in [String::new(), redis.store()] {
        let gateway = start(&with_admin(&by_key(&store, "quota = \"1000/min\"\nalgorithm = \"fixed-window\"")));
        let requests = [("acme", 3), ("beta", 2), ("stranger", 1)];
        for (key, count) in requests {
            load(&[gateway.address], 1, count, "/r", &[("x-api-key", key)]);
        }
        let totals = |query: &str| {
            let reply = ask(&gateway, &format!("/api/usage{query}"));
            assert_eq!(reply.status, 200, "{}", reply.text());
            reply.json()
        };
        let all = totals("?by=identity");
        let costs: Vec<_> = all["usage"].as_array().unwrap().iter().map(|entry| entry["cost"].clone()).collect();
        assert_eq!(costs, [3, 2, 1], "{all}");
        assert_eq!((&all["usage"][0]["consumer"], &all["usage"][2]["consumer"]), (&"acme".into(), &Value::Null));
        assert_eq!(all["totals"], serde_json::json!([{"limit": "l", "unit": "requests", "cost": 6}]));
        let highest = totals("?by=identity&count=2");
        assert_eq!(highest["usage"].as_array().unwrap()[..], all["usage"].as_array().unwrap()[..2]);
        assert_eq!(highest["totals"], all["totals"], "the totals contain all entries");
        let hash = all["usage"][2]["identity"].as_str().unwrap();
        assert_eq!(totals(&format!("?identity={hash}"))["totals"][0]["cost"], 1);
        assert_eq!(totals("?limit=l&api-key=beta&by=month")["totals"][0]["cost"], 2);
        assert_eq!(totals("?from=2020-01-01&to=2020-02-01")["usage"], serde_json::json!([]));
        for (query, status, problem) in [
            ("?limit=m", 404, "unknown limit `m`"),
            ("?by=year", 400, "day, month, identity"),
            ("?from=now", 400, "`from` must be a date"),
            ("?count=0", 400, "`count` must be an integer from 1"),
            ("?identity=acme", 400, "32 hexadecimal digits"),
            ("?api-key=stranger", 400, "no consumer"),
            ("?from=2026-02-01&to=2026-01-01", 400, "is after"),
        ] {
            let reply = ask(&gateway, &format!("/api/usage{query}"));
            reply.assert_problem(status, query);
            assert!(reply.text().contains(problem), "{query}: {}", reply.text());
        }
        assert_eq!(Client::connect(gateway.admin()).request("POST", "/api/usage", &[HERE], b"").status, 405);
    }
}

#[test]
fn command_reads_the_memory_of_a_running_gateway() {
    let port = free_port();
    let admin = format!("[admin]\naddress = \"127.0.0.1:{port}\"\n");
    let config = admin + &by_key("", "quota = \"2/24h\"\nalgorithm = \"fixed-window\"");
    let gateway = start(&config);
    assert_eq!(load(&[gateway.address], 1, 4, "/r", &[("x-api-key", "acme")]), [200, 200, 429, 429]);
    assert_eq!(costs(&gateway), BTreeMap::from([("acme".to_owned(), 2)]));
    let url = format!("http://127.0.0.1:{port}");
    let csv =
        usage(gateway.directory(), &["--admin", &url, "--csv", "--by", "identity", "--identity", "acme"]).unwrap();
    assert!(
        csv.starts_with("limit,unit,consumer,identity,period,cost\nl,requests,acme,") && csv.ends_with(",,2\n"),
        "{csv}"
    );
    drop(gateway);
    let gateway = start(&config);
    assert!(costs(&gateway).is_empty(), "totals in memory are lost at a restart");
    let without = start(&by_key("", "quota = \"2/24h\""));
    let (exit, text) = usage(without.directory(), &[]).unwrap_err();
    assert!(exit == Some(1) && text.contains("in the memory of the running gateway"), "{exit:?} {text}");
}

#[test]
fn totals_in_memory_are_bounded() {
    let store = "[store]\nmax_memory_states = 64\n";
    let gateway = Gateway::start(&with_admin(&format!(
        "{store}[limit.l]\nby = \"header:x-id\"\nusage = true\non_store_error = \"allow\"\nquota = \"1000/s\"\n\
         [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"l\"]\nrespond = {{ status = 200 }}\n"
    )));
    let mut client = gateway.client();
    for id in 0..400 {
        assert_eq!(client.get_with("/r", &[("x-id", &id.to_string())]).status, 200);
    }
    let (totals, lost) =
        (metric(&gateway, "sluicegate_memory_usage_totals"), metric(&gateway, "sluicegate_usage_cost_lost_total"));
    assert!(totals <= 64.0 && totals + lost == 400.0, "{totals} totals, {lost} lost");
    assert!(gateway.log().contains("too small for the usage totals"), "{}", gateway.log());
}

#[test]
fn reset_keeps_the_total_and_override_counts() {
    let redis = Redis::start();
    let gateway = start(
        &with_admin(&by_key(&redis.store(), "quota = \"2/24h\"\nalgorithm = \"fixed-window\""))
            .replace("[admin]\n", "[admin]\ntoken = \"t\"\n"),
    );
    let statuses = || load(&[gateway.address], 1, 3, "/r", &[("x-api-key", "acme")]);
    assert_eq!(statuses(), [200, 200, 429]);
    let change = |path: &str, body: &str| {
        let headers = [HERE, ("authorization", "Bearer t"), ("content-type", "application/json")];
        let reply = Client::connect(gateway.admin()).request("POST", path, &headers, body.as_bytes());
        assert_eq!(reply.status, 200, "{}", reply.text());
    };
    change("/api/reset", r#"{"limit": "l", "identity": {"api-key": "acme"}}"#);
    assert_eq!(statuses(), [200, 200, 429]);
    assert_eq!(cost_of(&gateway, "acme"), 4, "a reset clears the state, not the total");
    change("/api/overrides", r#"{"limit": "l", "identity": {"api-key": "acme"}, "quota": "10/24h", "ttl": "1h"}"#);
    eventually("the override applies", || statuses() == [200; 3]);
    assert!(cost_of(&gateway, "acme") >= 7);
}

#[test]
fn each_of_several_limits_of_a_refund_has_its_own_total() {
    let upstream = Upstream::responding(respond_as_asked);
    let redis = Redis::start();
    // Different identities, and different time zones, so that the same instant may belong to different days. `two` counts
    // no usage.
    let limits = [
        ("one", "by = \"api-key\"\nusage = true\nrefund_on = [\"5xx\"]\ncost = 2\ntime_zone = \"Pacific/Kiritimati\""),
        ("two", "by = \"ip\"\nrefund_on = [\"5xx\", \"404\"]\ncost = 3"),
        (
            "three",
            "by = \"ip\"\nusage = true\nrefund_on = [\"5xx\", \"404\"]\ncost = 5\ntime_zone = \"Pacific/Pago_Pago\"",
        ),
        ("four", "by = \"global\"\nusage = true\ncost = 7"),
    ];
    let definitions: String =
        limits.iter().map(|(name, lines)| format!("[limit.{name}]\nquota = \"1000/10h\"\n{lines}\n")).collect();
    for order in [["one", "two", "three", "four"], ["four", "three", "two", "one"], ["two", "one", "four", "three"]] {
        redis::cmd("FLUSHALL").exec(&mut redis.connection()).unwrap();
        let gateway = start(&format!(
            "{}\n{KEYS}{definitions}[upstream.u]\nservers = [\"{}\"]\n\
             [[route]]\nname = \"r\"\npath = \"/r\"\nidentify = [\"keys\"]\nlimits = {order:?}\nupstream = \"u\"\n",
            redis.store(),
            upstream.url()
        ));
        let mut client = gateway.client();
        let mut expected = BTreeMap::from([("one", 0), ("two", 0), ("three", 0), ("four", 0)]);
        for (status, charged) in
            [("200 OK", [2, 3, 5, 7]), ("503 Down", [0, 0, 0, 7]), ("404 No", [2, 0, 0, 7]), ("200 OK", [2, 3, 5, 7])]
        {
            let reply = client.get_with("/r", &[("x-api-key", "acme"), ("x-status", status)]);
            for ((name, _), cost) in limits.iter().zip(charged) {
                let total = expected.get_mut(name).unwrap();
                *total += cost;
                assert_eq!(reply.remaining(name), 1000 - *total, "{order:?}, {status}: {name}");
            }
            let report = usage_json(&gateway, &[]);
            let totals = report["totals"].as_array().unwrap();
            let totals: BTreeMap<_, _> = totals
                .iter()
                .map(|total| (total["limit"].as_str().unwrap(), total["cost"].as_u64().unwrap()))
                .collect();
            let counted: BTreeMap<_, _> =
                expected.iter().filter(|(name, _)| **name != "two").map(|(name, cost)| (*name, *cost)).collect();
            assert_eq!(totals, counted, "{order:?}, {status}: {report}");
        }
    }
}
