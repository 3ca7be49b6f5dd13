//! The JSON API of decisions on a listener with `protocol = "decisions"`: `POST /v1/check`, `/v1/settle` and
//! `/v1/release`.

use std::fs;

use serde_json::{Value, json};

use crate::support::admin_listener::HERE;
use crate::support::client::{Client, Reply};
use crate::support::gateway::{CONSUMERS, Gateway};
use crate::support::redis::Redis;
use crate::support::reload::with_admin;
use crate::support::{eventually, signal};

/// No proxy is trusted: the token alone authenticates programs.
const CONFIG: &str = r#"
[[listener]]
address = "127.0.0.1:0"
protocol = "decisions"
denied_status = 403
api_token = "sesame"

[auth.keys]
kind = "api-key"
consumers = "consumers.toml"

[limit.orders]
by = "ip"
quota = "50/day"
algorithm = "fixed-window"

[[route]]
name = "orders"
path = "/orders"
hosts = ["shop.example"]
identify = ["keys"]
limits = ["orders"]
request_headers = { set = { x-user = "{consumer}", x-client = "{client_ip} {scheme}" } }
respond = { status = 200 }

[[route]]
name = "members"
path = "/members"
require = ["keys"]
respond = { status = 200 }
"#;

fn start() -> Gateway {
    Gateway::start_with(CONFIG, &[("consumers.toml", CONSUMERS)])
}

fn call(gateway: &Gateway, authorization: &[(&str, &str)], body: &[u8]) -> Reply {
    gateway.client().request("POST", "/v1/check", authorization, body)
}

const TOKEN: [(&str, &str); 1] = [("Authorization", "Bearer sesame")];

fn check(gateway: &Gateway, body: &Value) -> Value {
    let reply = call(gateway, &TOKEN, body.to_string().as_bytes());
    assert_eq!((reply.status, reply.header("content-type")), (200, Some("application/json")), "{reply:?}");
    reply.json()
}

fn order(client: &str) -> Value {
    json!({ "method": "GET", "url": "https://shop.example/orders?page=2", "client_ip": client })
}

#[test]
fn described_requests_are_decided_as_if_the_client_had_sent_them() {
    let gateway = start();
    let mut known = order("192.0.2.1");
    known["headers"] = json!({ "X-Api-Key": "demo-key", "X-User": "root" });
    let decision = check(&gateway, &known);
    assert_eq!((&decision["admitted"], &decision["status"]), (&json!(true), &json!(200)), "{decision}");
    let headers = &decision["headers"];
    assert_eq!((&headers["x-user"], &headers["x-client"]), (&json!("demo"), &json!("192.0.2.1 https")));
    assert!(headers["ratelimit"].as_str().unwrap().starts_with("\"orders\";r=49;"), "{decision}");
    assert_eq!(check(&gateway, &order("192.0.2.1"))["headers"]["x-user"], json!(""));
    let members = json!({ "method": "GET", "url": "http://shop.example/members", "client_ip": "192.0.2.1" });
    let decision = check(&gateway, &members);
    assert_eq!((&decision["admitted"], &decision["status"]), (&json!(false), &json!(401)), "{decision}");
    assert!(decision["headers"]["www-authenticate"].is_string() && decision["body"].is_string(), "{decision}");
}

#[test]
fn list_of_requests_is_charged_exactly() {
    let gateway = start();
    let mut requests = vec![order("192.0.2.1"); 98];
    requests.push(order("192.0.2.2"));
    requests.push(json!({ "method": "GET", "url": "https://shop.example/%2F", "client_ip": "192.0.2.1" }));
    let decisions = check(&gateway, &json!({ "requests": requests }));
    let decisions = decisions["decisions"].as_array().unwrap();
    let statuses: Vec<_> = decisions.iter().map(|decision| decision["status"].as_u64().unwrap()).collect();
    let count = |status| statuses[..98].iter().filter(|found| **found == status).count();
    assert_eq!((count(200), count(429)), (50, 48), "`denied_status` does not concern the API: {statuses:?}");
    assert_eq!(statuses[98..], [200, 400]);
    let denied = decisions.iter().find(|decision| decision["status"] == json!(429)).unwrap();
    assert!(denied["headers"]["retry-after"].is_string(), "{denied}");
    let one = json!({ "requests": [order("192.0.2.3")] });
    assert_eq!(check(&gateway, &one)["decisions"].as_array().unwrap().len(), 1);
}

#[test]
fn invalid_description_is_denied() {
    let gateway = start();
    for (key, value) in [
        ("method", "get"),
        ("method", "G ET"),
        ("method", ""),
        ("url", "/orders"),
        ("url", "ftp://shop.example/orders"),
        ("url", "https://shop.example"),
        ("url", "https://shop.example?/orders"),
        ("url", "https://shop.example#/orders"),
        ("url", "https://a@shop.example/orders"),
        ("url", "https:///orders"),
        ("url", "https://shop.example/orders#/x"),
    ] {
        let mut described = order("192.0.2.1");
        described[key] = json!(value);
        assert_eq!(check(&gateway, &described)["status"], json!(400), "{key}: {value}");
    }
    for name in ["X_User", "x.client", "a b", ""] {
        let mut described = order("192.0.2.1");
        described["headers"] = json!({ name: "root" });
        assert_eq!(check(&gateway, &described)["status"], json!(400), "{name}");
    }
}

#[test]
fn calls_need_the_token_and_a_valid_body() {
    let gateway = start();
    let body = order("192.0.2.1").to_string();
    let wrong: [&[(&str, &str)]; 5] = [
        &[],
        &[("Authorization", "Bearer wrong")],
        &[("Authorization", "Bearer ")],
        &[("Authorization", "Basic sesame")],
        &[("Authorization", "Bearer sesame"), ("Authorization", "Bearer sesame")],
    ];
    for authorization in wrong {
        let reply = call(&gateway, authorization, body.as_bytes());
        reply.assert_problem(401, "the token is wrong");
        assert_eq!(reply.header("www-authenticate"), Some("Bearer"), "{authorization:?}");
    }
    assert_eq!(gateway.client().get_with("/v1/check", &TOKEN).status, 405);
    let several = |count| json!({ "requests": vec![order("192.0.2.1"); count] }).to_string();
    let bodies = [
        String::new(),
        "[]".to_owned(),
        "{".to_owned(),
        body.replace("method", "verb"),
        body.replace("192.0.2.1", "client"),
        body.replace("}", ",\"more\":1}"),
        several(0),
        several(101),
    ];
    for body in bodies {
        call(&gateway, &TOKEN, body.as_bytes()).assert_problem(400, &body[..body.len().min(99)]);
    }
    // Only the head, because the gateway closes the connection without reading the body.
    let mut client = gateway.client();
    let length = (1 << 20) + 1;
    let (name, token) = TOKEN[0];
    client.send(
        format!("POST /v1/check HTTP/1.1\r\nHost: a.test\r\n{name}: {token}\r\nContent-Length: {length}\r\n\r\n")
            .as_bytes(),
    );
    client.reply().unwrap().assert_problem(413, "the body is too long");
    let described = [("X-Forwarded-Method", "GET"), ("X-Forwarded-Uri", "/"), ("X-Forwarded-For", "192.0.2.1")];
    let proxied = gateway.client().get_with("/decide/forwarded", &[&described[..], &TOKEN].concat());
    assert_eq!(proxied.status, 403, "the token makes no trusted proxy");
    let off = Gateway::start_with(
        &CONFIG.replace("api_token = \"sesame\"", "[client_ip]\ntrusted_proxies = [\"127.0.0.1\"]"),
        &[("consumers.toml", CONSUMERS)],
    );
    call(&off, &TOKEN, body.as_bytes()).assert_problem(403, "the API is off");
    assert_eq!(call(&gateway, &TOKEN, several(100).as_bytes()).status, 200);
    assert_eq!(check(&gateway, &order("192.0.2.1"))["status"], json!(429), "only the last call was charged: 100 of 50");
}

// === Limits without a request, and decisions that are settled later ===

const SETTLED: &str = r#"
[[listener]]
address = "127.0.0.1:0"
protocol = "decisions"
api_token = "sesame"
settle_timeout = "1h"

[client_ip]
trusted_proxies = ["127.0.0.1"]

[limit.tokens]
by = "header:x-user"
quota = "1000/day"
unit = "tokens"
algorithm = "fixed-window"

[limit.jobs]
by = "header:x-user"
quota = "2"
algorithm = "concurrency"

[limit.answers]
by = "header:x-user"
quota = "100/day"
algorithm = "fixed-window"
cost = { response_header = "x-cost" }

[limit.logins]
by = "header:x-user"
quota = "5/day"
algorithm = "fixed-window"
refund_on = ["2xx"]

[[route]]
name = "work"
path = "/work"
limits = ["jobs", "answers", "logins"]
respond = { status = 200 }

[[route]]
name = "gone"
path = "/gone"
limits = ["jobs", "logins"]
respond = { status = 410 }
"#;

fn post(gateway: &Gateway, path: &str, body: &Value) -> Reply {
    gateway.client().request("POST", path, &TOKEN, body.to_string().as_bytes())
}

fn work(gateway: &Gateway, path: &str) -> Value {
    let url = format!("https://shop.example{path}");
    check(gateway, &json!({ "method": "GET", "url": url, "client_ip": "192.0.2.1", "headers": { "X-User": "alice" } }))
}

fn named(limit: &str, cost: u64) -> Value {
    json!({ "limit": limit, "identity": { "header:x-user": "alice" }, "cost": cost })
}

/// Return the remaining tokens of a limit, without a charge.
fn remaining(gateway: &Gateway, limit: &str) -> u64 {
    let peeked = check(gateway, &json!({ "limits": [named(limit, 0)] }));
    let ratelimit = peeked["headers"]["ratelimit"].as_str().unwrap();
    let (_, rest) = ratelimit.split_once(";r=").unwrap();
    rest.split(';').next().unwrap().parse().unwrap()
}

#[test]
fn named_limits_are_one_decision_and_the_limits_of_routes() {
    let gateway = Gateway::start(SETTLED);
    let both = |cost| json!({ "limits": [named("tokens", cost), named("logins", 1)] });
    let decision = check(&gateway, &both(600));
    assert_eq!((&decision["admitted"], &decision["id"]), (&json!(true), &Value::Null), "{decision}");
    let denied = check(&gateway, &both(600));
    assert_eq!((&denied["admitted"], &denied["status"]), (&json!(false), &json!(429)), "{denied}");
    assert!(denied["headers"]["retry-after"].is_string(), "{denied}");
    assert_eq!((remaining(&gateway, "tokens"), remaining(&gateway, "logins")), (400, 4), "the denial charged nothing");
    work(&gateway, "/work");
    assert_eq!(remaining(&gateway, "logins"), 3, "a route counts by the same identity");
    for (limits, part) in [
        (json!([]), "1 to 64 elements"),
        (json!([named("other", 1)]), "there is no limit `other`"),
        (json!([{ "limit": "tokens", "identity": {} }]), "`header:x-user` is missing"),
        (json!([{ "limit": "tokens", "identity": { "header:x-user": "a", "ip": "192.0.2.1" } }]), "count by `ip`"),
        (json!([named("tokens", 1), named("tokens", 2)]), "occurs twice"),
        (json!([named("tokens", 1 << 53)]), "not below 2^53"),
        (json!([named("jobs", 2)]), "cost of `jobs` is 1"),
        (json!([{ "limit": "tokens", "identity": { "header:x-user": "a" }, "costs": 1 }]), "unknown field `costs`"),
    ] {
        let reply = post(&gateway, "/v1/check", &json!({ "limits": limits }));
        reply.assert_problem(400, part);
        assert!(reply.text().contains(part), "{part}: {}", reply.text());
    }
    assert_eq!(remaining(&gateway, "tokens"), 400);
}

#[test]
fn decision_about_named_limits_has_an_access_log_record() {
    let redis = Redis::start();
    let log = "[log]\naccess = { to = \"access.log\", fields = [\"all\"] }\n";
    let closed = "[limit.closed]\nby = \"header:x-user\"\nquota = \"5/day\"\non_store_error = \"deny\"\n";
    let gateway = Gateway::start(&format!("{SETTLED}{closed}{log}{}", redis.store()));
    let limits = json!({ "limits": [named("tokens", 600), named("closed", 1)], "reserve": true });
    assert_eq!(check(&gateway, &limits)["status"], 200);
    assert_eq!(check(&gateway, &limits)["status"], 429);
    drop(redis);
    let failed = post(&gateway, "/v1/check", &json!({ "limits": [named("closed", 1)] }));
    failed.assert_problem(503, "the store is down");
    let written = || fs::read_to_string(gateway.directory().join("access.log")).unwrap();
    eventually("the records are written", || written().lines().count() == 3);
    let records: Vec<Value> = written().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for (record, expected) in records.iter().zip([
        json!([200, "ok", "allowed", "store"]),
        json!([429, "rate-limited", "denied", "store"]),
        json!([503, "store-unavailable", "store_error", null]),
    ]) {
        let found = json!([record["status"], record["outcome"], record["decision"], record["decided_by"]]);
        assert_eq!(found, expected, "{record}");
        assert_eq!(json!([record["method"], record["path"], record["route"]]), json!(["POST", "/v1/check", null]));
    }
    let limits = records[0]["limits"].as_array().unwrap();
    assert_eq!(
        json!([limits[0]["limit"], limits[0]["reserved"], limits[1]["limit"]]),
        json!(["tokens", 600, "closed"])
    );
    assert_eq!((&records[1]["limit"], &records[1]["remaining"]), (&json!("tokens"), &json!(400)), "{}", records[1]);
}

#[test]
fn reservation_is_settled_once_with_its_actual_cost() {
    let gateway = Gateway::start(SETTLED);
    let reserve = json!({ "limits": [named("tokens", 400)], "reserve": true });
    for (cost, left) in [(100, 900), (1000, 0)] {
        let id = check(&gateway, &reserve)["id"].clone();
        let settle = json!({ "id": id, "costs": { "tokens": cost } });
        for (costs, part) in [(json!({ "token": 1 }), "no single limit"), (json!({ "tokens": 1u64 << 53 }), "2^53")] {
            let reply = post(&gateway, "/v1/settle", &json!({ "id": id, "costs": costs }));
            reply.assert_problem(400, "the decision remains");
            assert!(reply.text().contains(part), "{}", reply.text());
        }
        assert_eq!(post(&gateway, "/v1/settle", &settle).status, 204);
        assert_eq!(remaining(&gateway, "tokens"), left, "the actual cost counts, also beyond what remains");
        post(&gateway, "/v1/settle", &settle).assert_problem(404, "a decision is settled once");
        post(&gateway, "/v1/release", &json!({ "id": id })).assert_problem(404, "a settled decision is not released");
    }
    let denied = check(&gateway, &reserve);
    assert_eq!((&denied["admitted"], &denied["id"]), (&json!(false), &Value::Null), "a denial holds nothing");
    for (body, part) in [
        (json!({}), "missing field `id`"),
        (json!({ "id": "x" }), "the body is invalid"),
        (json!({ "id": "00000000-0000-4000-8000-000000000000", "status": 1000 }), "no HTTP status"),
        (json!({ "id": "00000000-0000-4000-8000-000000000000", "headers": { "a b": "" } }), "invalid header"),
    ] {
        let reply = post(&gateway, "/v1/settle", &body);
        reply.assert_problem(400, part);
        assert!(reply.text().contains(part), "{part}: {}", reply.text());
    }
    let anonymous = gateway.client().request("POST", "/v1/settle", &[], b"{}");
    assert_eq!(anonymous.status, 401);
}

#[test]
fn costs_of_a_settlement_belong_to_the_limits_of_their_names() {
    let words = "[limit.words]\nby = \"header:x-user\"\nquota = \"1000/day\"\nalgorithm = \"fixed-window\"\n";
    let gateway = Gateway::start(&format!("{SETTLED}{words}"));
    let both = json!({ "limits": [named("words", 100), named("tokens", 100)], "reserve": true });
    let id = check(&gateway, &both)["id"].clone();
    let settle = json!({ "id": id, "costs": { "tokens": 30, "words": 7 } });
    assert_eq!(post(&gateway, "/v1/settle", &settle).status, 204);
    assert_eq!((remaining(&gateway, "tokens"), remaining(&gateway, "words")), (970, 993));
    // Two limits of a decision with the same name.
    let bob = json!({ "limit": "tokens", "identity": { "header:x-user": "bob" }, "cost": 5 });
    let id = check(&gateway, &json!({ "limits": [named("tokens", 5), bob], "reserve": true }))["id"].clone();
    let reply = post(&gateway, "/v1/settle", &json!({ "id": id, "costs": { "tokens": 1 } }));
    reply.assert_problem(400, "the name is ambiguous");
    assert_eq!(post(&gateway, "/v1/settle", &json!({ "id": id })).status, 204, "the decision remains");
}

#[test]
fn named_limits_follow_overrides_tiers_exemptions_and_statuses() {
    let more = r#"
[limit.calls]
by = "api-key"
quota = "1/day"
algorithm = "fixed-window"
tiers = { gold = { quota = "3/day" } }
[limit.networks]
by = "ip"
quota = "1/day"
exempt = ["ip=10.0.0.0/8"]
status = 503
[limit.logs]
by = "header:x-user"
quota = "10000/min"
algorithm = "sliding-log"
[auth.keys]
kind = "api-key"
consumers = "consumers.toml"
[[route]]
name = "keys"
path = "/keys"
require = ["keys"]
limits = ["calls"]
respond = { status = 200 }
"#;
    let consumers = format!(
        "{CONSUMERS}[[consumer]]\nname = \"rich\"\ntier = \"gold\"\nkeys = [\"sha256:7a3d7f522f6b335f4e99d1233e9ead0f289f14e48b9832859bf79451b4f72be5\"]\n"
    );
    let config = with_admin(&format!("{SETTLED}{more}"));
    let gateway = Gateway::start_with(&config, &[("consumers.toml", &consumers)]);
    let ask = |limit: &str, label: &str, value: &str| {
        check(&gateway, &json!({ "limits": [{ "limit": limit, "identity": { label: value } }] }))["status"].clone()
    };
    let statuses = |limit: &str, label: &str, value: &str| [(); 4].map(|()| ask(limit, label, value));
    let [ok, denied, unavailable] = [200, 429, 503].map(|status| json!(status));
    assert_eq!(statuses("calls", "api-key", "demo"), [&ok, &denied, &denied, &denied].map(Clone::clone));
    assert_eq!(statuses("calls", "api-key", "rich"), [&ok, &ok, &ok, &denied].map(Clone::clone), "the tier");
    assert_eq!(statuses("networks", "ip", "10.1.2.3"), [(); 4].map(|()| ok.clone()), "exempt");
    let of_limit = [&ok, &unavailable, &unavailable, &unavailable].map(Clone::clone);
    assert_eq!(statuses("networks", "ip", "192.0.2.1"), of_limit, "the status of the limit");
    let set = json!({ "limit": "calls", "identity": { "api-key": "demo" }, "quota": "3/day", "ttl": "1h" });
    let headers = [HERE, ("authorization", "Bearer sesame"), ("content-type", "application/json")];
    let body = set.to_string();
    let reply = Client::connect(gateway.admin()).request("POST", "/api/overrides", &headers, body.as_bytes());
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(statuses("calls", "api-key", "demo"), [&ok, &ok, &denied, &denied].map(Clone::clone), "the override");
    let many = |count: usize| {
        let log = |number: usize| json!({ "limit": "logs", "identity": { "header:x-user": number.to_string() } });
        post(&gateway, "/v1/check", &json!({ "limits": (0..count).map(log).collect::<Vec<_>>() }))
    };
    assert_eq!(many(1).status, 200);
    many(64).assert_problem(400, "the checks would take Redis too long");
}

#[test]
fn released_reservation_is_refunded() {
    let gateway = Gateway::start(SETTLED);
    let id = check(&gateway, &json!({ "limits": [named("tokens", 400)], "reserve": true }))["id"].clone();
    assert_eq!(remaining(&gateway, "tokens"), 600);
    assert_eq!(post(&gateway, "/v1/release", &json!({ "id": id })).status, 204);
    assert_eq!(remaining(&gateway, "tokens"), 1000);
}

#[test]
fn permits_costs_and_refunds_of_routes_are_settled_by_the_response() {
    let gateway = Gateway::start(SETTLED);
    let decisions = [(); 3].map(|()| work(&gateway, "/work"));
    let statuses = decisions.each_ref().map(|decision| decision["status"].clone());
    assert_eq!(statuses, [json!(200), json!(200), json!(429)], "two jobs may run");
    assert_eq!((remaining(&gateway, "logins"), remaining(&gateway, "answers")), (3, 100));
    let first = json!({ "id": decisions[0]["id"], "status": 500, "headers": { "x-cost": "30" } });
    assert_eq!(post(&gateway, "/v1/settle", &first).status, 204);
    assert_eq!((remaining(&gateway, "logins"), remaining(&gateway, "answers")), (3, 70));
    let second = json!({ "id": decisions[1]["id"], "costs": { "answers": 7 } });
    assert_eq!(post(&gateway, "/v1/settle", &second).status, 204);
    assert_eq!(
        (remaining(&gateway, "logins"), remaining(&gateway, "answers")),
        (4, 63),
        "the status is 200 by default"
    );
    let third = work(&gateway, "/work");
    assert_eq!(third["status"], json!(200), "both permits are released: {third}");
    assert_eq!(post(&gateway, "/v1/release", &json!({ "id": third["id"] })).status, 204);
    assert_eq!((remaining(&gateway, "logins"), remaining(&gateway, "answers")), (4, 63), "a release charges nothing");
    for _ in 0..3 {
        let gone = work(&gateway, "/gone");
        assert_eq!((&gone["status"], &gone["id"]), (&json!(410), &Value::Null), "the route responds itself: {gone}");
    }
    assert_eq!(remaining(&gateway, "logins"), 1, "410 is not refunded");
}

#[test]
fn decision_that_is_not_settled_in_time_is_dropped() {
    let gateway = Gateway::start(&SETTLED.replace("\"1h\"", "\"50ms\""));
    let jobs = json!({ "limits": [named("jobs", 1), named("tokens", 400)], "reserve": true });
    let ids: Vec<_> = (0..2).map(|_| check(&gateway, &jobs)["id"].clone()).collect();
    assert!(ids.iter().all(Value::is_string), "{ids:?}");
    let job = json!({ "limits": [named("jobs", 1)] });
    eventually("a permit is released", || check(&gateway, &job)["admitted"] == json!(true));
    assert_eq!(remaining(&gateway, "tokens"), 200, "reservations stay charged");
    post(&gateway, "/v1/settle", &json!({ "id": ids[0] })).assert_problem(404, "the time is over");
}

#[test]
fn listener_with_settle_timeout_serves_only_programs() {
    let gateway = Gateway::start(SETTLED);
    let described = [
        ("X-Forwarded-Method", "GET"),
        ("X-Forwarded-Uri", "/work"),
        ("X-Forwarded-Host", "shop.example"),
        ("X-Forwarded-Proto", "http"),
        ("X-Forwarded-For", "192.0.2.1"),
    ];
    let reply = gateway.client().get_with("/decide/forwarded", &described);
    reply.assert_problem(404, "a proxy could not settle the decision");
    let off = start();
    let jobs = json!({ "limits": [{ "limit": "orders", "identity": { "ip": "192.0.2.1" } }], "reserve": true });
    let reply = post(&off, "/v1/check", &jobs);
    reply.assert_problem(400, "nothing can be reserved");
    assert!(reply.text().contains("settle_timeout"), "{}", reply.text());
}

#[test]
fn stopping_gateway_releases_the_permits_of_held_decisions() {
    let redis = Redis::start();
    let mut gateway = Gateway::start(&format!("[server]\nworkers = 3\n{}{SETTLED}", redis.store()));
    // Each connection belongs to one of the workers.
    for user in 0..20 {
        let job = json!({ "limit": "jobs", "identity": { "header:x-user": user.to_string() } });
        assert!(check(&gateway, &json!({ "limits": [job] }))["id"].is_string());
    }
    let has_permit = || redis.keys().iter().any(|key| key.contains(":jobs:"));
    assert!(has_permit());
    signal(&gateway.child, "TERM");
    assert!(gateway.wait().success());
    assert!(!has_permit());
}

/// The headers of a client select neither its address nor its scheme, although its address is that of a trusted proxy.
#[test]
fn described_client_is_no_trusted_proxy() {
    let trust = "[client_ip]\ntrusted_proxies = [\"10.0.0.0/8\"]\n";
    let gateway = Gateway::start_with(&format!("{CONFIG}{trust}"), &[("consumers.toml", CONSUMERS)]);
    let mut forged = order("10.0.0.7");
    forged["headers"] = json!({ "X-Forwarded-For": "192.0.2.9", "X-Forwarded-Proto": "http" });
    let headers = check(&gateway, &forged)["headers"].clone();
    assert_eq!(headers["x-client"], json!("10.0.0.7 https"), "{headers}");
    let left = |decision: Value| decision["headers"]["ratelimit"].as_str().unwrap()[..14].to_owned();
    assert_eq!(left(check(&gateway, &order("10.0.0.7"))), "\"orders\";r=48;", "both requests share a quota");
    assert_eq!(left(check(&gateway, &order("192.0.2.9"))), "\"orders\";r=49;");
}
