//! Operation of the rate limit service: access log, commands, admin API and health.

use std::fs;

use bytes::Bytes;
use serde_json::{Value, json};
use sluicegate::payload::envoy::{
    Code, Entry, HealthCheckRequest, HealthCheckResponse, RateLimitDescriptor, RateLimitRequest, RateLimitResponse,
    ServingStatus,
};

use crate::support::admin_listener::HERE;
use crate::support::client::{Client, Reply};
use crate::support::eventually;
use crate::support::gateway::{Gateway, binary};
use crate::support::grpc::Grpc;
use crate::support::redis::Redis;
use crate::support::reload::with_admin;

const METHOD: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

const LISTENER: &str = "[[listener]]\naddress = \"127.0.0.1:0\"\nprotocol = \"ratelimit\"\n";

const DESCRIPTORS: &str = r#"
[limit.login]
by = "entry:address"
quota = "2/day"
algorithm = "fixed-window"

[[descriptor]]
domain = "own"
entries = ["path=/login", "address"]
limits = ["login"]
quota_mode = true
"#;

const YAML: &str = "
domain: edge
descriptors:
  - key: user
    rate_limit: {name: of-user, unit: day, requests_per_unit: 2}
  - key: plan
    value: gold*
    rate_limit: {name: of-gold, unit: day, requests_per_unit: 1, replaces: [{name: of-user}]}
  - {key: free, rate_limit: {unlimited: true}}
  - {key: banned, rate_limit: {unit: day, requests_per_unit: 0}}
---
domain: other
descriptors:
  - key: user
    rate_limit: {name: of-user, unit: day, requests_per_unit: 2}
  - {key: one, rate_limit: {name: twice, unit: day, requests_per_unit: 2}}
  - {key: two, rate_limit: {name: twice, unit: hour, requests_per_unit: 2}}
";

fn start(log: &str) -> (Redis, Gateway, Grpc) {
    let redis = Redis::start();
    let files = "[ratelimit]\nconfiguration = \"edge.yaml\"\n";
    let config = with_admin(&format!("{log}{}{LISTENER}{files}{DESCRIPTORS}", redis.store()));
    let gateway = Gateway::start_with(&config, &[("edge.yaml", YAML)]);
    let client = Grpc::connect(gateway.address);
    (redis, gateway, client)
}

fn descriptor(entries: &[(&str, &str)]) -> RateLimitDescriptor {
    let bytes = |text: &str| Bytes::copy_from_slice(text.as_bytes());
    let entries = entries.iter().map(|(key, value)| Entry { key: bytes(key), value: bytes(value) }).collect();
    RateLimitDescriptor { entries, ..RateLimitDescriptor::default() }
}

/// Ask once, and return whether the call is admitted.
fn ask(client: &Grpc, domain: &'static str, descriptors: &[RateLimitDescriptor]) -> bool {
    let request = RateLimitRequest { domain: domain.into(), descriptors: descriptors.to_vec(), hits_addend: 0 };
    let response = client.call(METHOD, &request, &[("grpc-timeout", "10S")]).message::<RateLimitResponse>();
    response.overall_code() == Code::Ok
}

fn user(name: &str) -> RateLimitDescriptor {
    descriptor(&[("user", name)])
}

fn api(gateway: &Gateway, method: &str, path: &str, body: &Value) -> Reply {
    let headers = [HERE, ("authorization", "Bearer sesame"), ("content-type", "application/json")];
    let body = if body.is_null() { String::new() } else { body.to_string() };
    Client::connect(gateway.admin()).request(method, path, &headers, body.as_bytes())
}

/// Return the limits that `/api/identities` lists.
fn inspect(gateway: &Gateway, query: &str) -> Vec<Value> {
    let reply = api(gateway, "GET", &format!("/api/identities?{query}"), &Value::Null);
    assert_eq!(reply.status, 200, "{query}: {}", reply.text());
    reply.json()["limits"].as_array().unwrap().clone()
}

fn explain(gateway: &Gateway, arguments: &[&str]) -> Value {
    let path = gateway.directory().join("gateway.toml");
    let output = binary().arg("explain").args(arguments).arg("--json").arg("--config").arg(path).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn each_decision_has_an_access_log_record_and_denials_are_not_sampled() {
    let log = |sample: &str| format!("[log]\naccess = {{ to = \"access.log\", fields = [\"all\"]{sample} }}\n");
    let (_redis, gateway, client) = start(&log(""));
    let written = |gateway: &Gateway| fs::read_to_string(gateway.directory().join("access.log")).unwrap();
    let admitted = [0; 3].map(|_| ask(&client, "edge", &[user("a"), descriptor(&[("free", "")])]));
    assert_eq!(admitted, [true, true, false]);
    eventually("the records are written", || written(&gateway).lines().count() == 3);
    let records: Vec<Value> = written(&gateway).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let first = &records[0];
    assert_eq!(
        (&first["method"], &first["path"], &first["host"], &first["protocol"]),
        (&json!("POST"), &json!(METHOD), &json!("edge"), &json!("HTTP/2.0"))
    );
    assert_eq!((&first["status"], &first["outcome"]), (&json!(200), &json!("ok")));
    assert_eq!((&first["decision"], &first["decided_by"]), (&json!("allowed"), &json!("store")));
    assert_eq!((&first["limit"], &first["remaining"]), (&json!("of-user"), &json!(1)));
    assert_eq!(first["limits"].as_array().unwrap().len(), 1);
    let denied = &records[2];
    assert_eq!(
        (&denied["status"], &denied["outcome"], &denied["decision"]),
        (&json!(429), &json!("rate-limited"), &json!("denied"))
    );
    assert_eq!(denied["identity"], inspect(&gateway, "limit=of-user&domain=edge&entry:user=a")[0]["identity"]);
    // With a sample, successful calls have few records, and denied calls all of them.
    let (_redis, gateway, client) = start(&log(", sample = 0.1"));
    for _ in 0..20 {
        assert!(ask(&client, "edge", &[descriptor(&[("free", "")])]));
    }
    let admitted = (0..5).filter(|_| ask(&client, "edge", &[user("a")])).count();
    assert_eq!(admitted, 2);
    eventually("the records are written", || written(&gateway).matches("rate-limited").count() == 3);
    let sampled = written(&gateway).matches("\"sample_rate\":0.1").count();
    assert!((1..=5).contains(&sampled), "{sampled} of 22 successful calls");
}

#[test]
fn limits_of_descriptors_are_inspected_reset_and_overridden() {
    let (_redis, gateway, client) = start("");
    let login = || descriptor(&[("path", "/login"), ("address", "192.0.2.1")]);
    assert!(ask(&client, "own", &[login()]));
    assert!(ask(&client, "edge", &[user("a")]) && ask(&client, "edge", &[user("a")]));
    assert!(ask(&client, "edge", &[descriptor(&[("plan", "gold7")])]));
    let seen = |query: &str| {
        let limits = inspect(&gateway, query);
        limits
            .iter()
            .map(|one| (one["limit"].clone(), one["decision"].clone(), one["remaining"].clone()))
            .collect::<Vec<_>>()
    };
    assert_eq!(seen("entry:address=192.0.2.1"), [(json!("login"), json!("allowed"), json!(1))]);
    let both = [(json!("of-user"), json!("denied"), json!(0)), (json!("of-user"), json!("allowed"), json!(2))];
    assert_eq!(seen("entry:user=a"), both, "two domains have the limit");
    assert_eq!(seen("entry:user=a&domain=edge"), both[..1]);
    assert_eq!(seen("limit=of-gold&entry:plan=gold7"), [(json!("of-gold"), json!("denied"), json!(0))]);
    for (query, status, text) in [
        ("limit=of-user&entry:user=a", 400, "several domains"),
        ("limit=of-gold&entry:plan=silver", 400, "no descriptor"),
        ("limit=of-gold&entry:user=a", 400, "no descriptor"),
        ("entry:plan=silver", 400, "no limit counts"),
        ("entry:unknown=a", 400, "no limit counts by `entry:unknown`"),
        ("limit=nothing&entry:user=a", 404, "unknown limit"),
        ("limit=twice&entry:one=a", 409, "different units"),
    ] {
        let reply = api(&gateway, "GET", &format!("/api/identities?{query}"), &Value::Null);
        assert_eq!(reply.status, status, "{query}: {}", reply.text());
        assert!(reply.text().contains(text), "{query}: {}", reply.text());
    }
    let identity = json!({ "entry:user": "a", "domain": "edge" });
    let reply = api(&gateway, "POST", "/api/reset", &json!({ "limit": "of-user", "identity": identity }));
    assert_eq!((reply.status, &reply.json()["removed"]), (200, &json!(true)), "{}", reply.text());
    eventually("the reset applies", || ask(&client, "edge", &[user("a")]));
    let set = json!({ "limit": "of-user", "identity": identity, "quota": "1000/1d", "ttl": "1h" });
    let reply = api(&gateway, "POST", "/api/overrides", &set);
    assert_eq!(reply.status, 200, "{}", reply.text());
    for _ in 0..20 {
        assert!(ask(&client, "edge", &[user("a")]), "the override applies");
    }
    assert_eq!(inspect(&gateway, "entry:user=a&domain=edge")[0]["quota"], "1000/1d");
    assert_eq!(api(&gateway, "GET", "/api/overrides", &Value::Null).json()["overrides"][0]["limit"], "of-user");
    let reply = api(&gateway, "DELETE", "/api/overrides?limit=of-user&entry:user=a&domain=edge", &Value::Null);
    assert_eq!(reply.json()["removed"], true, "{}", reply.text());
    assert!(!ask(&client, "edge", &[user("a")]), "the override is removed");
    let top = api(&gateway, "GET", "/api/top?limit=of-user", &Value::Null);
    assert!(top.json()["limits"][0]["denied"].as_u64() >= Some(1), "{}", top.text());
}

#[test]
fn explain_says_what_the_service_would_decide_without_a_charge() {
    let (_redis, gateway, client) = start("");
    assert!(ask(&client, "edge", &[user("a")]));
    for _ in 0..2 {
        let call = explain(&gateway, &["--domain", "edge", "--descriptor", "user=a", "--descriptor", "free=x"]);
        assert_eq!((&call["decision"], &call["domain"]), (&json!("allowed"), &json!("edge")));
        let limit = &call["descriptors"][0]["limits"][0];
        assert_eq!(
            (&limit["limit"], &limit["remaining"], &limit["quota"]),
            (&json!("of-user"), &json!(1), &json!("2/1d"))
        );
        assert_eq!(limit["identity"], inspect(&gateway, "limit=of-user&domain=edge&entry:user=a")[0]["identity"]);
        assert_eq!(call["descriptors"][1]["notes"], json!(["it is unlimited"]));
    }
    let denied = explain(&gateway, &["--domain", "edge", "--descriptor", "user=a", "--hits", "3"]);
    assert_eq!(
        (&denied["decision"], &denied["descriptors"][0]["limits"][0]["decision"]),
        (&json!("denied"), &json!("denied"))
    );
    let replaced = explain(&gateway, &["--domain", "edge", "--descriptor", "user=a", "--descriptor", "plan=gold1"]);
    assert_eq!(replaced["descriptors"][0]["notes"], json!(["another descriptor replaces its limit"]));
    let banned = explain(&gateway, &["--domain", "edge", "--descriptor", "banned=x", "--offline"]);
    assert_eq!(banned["descriptors"][0]["notes"], json!(["its quota of 0 denies every call"]));
    assert_eq!((&banned["decision"], &banned["counters_unavailable"]), (&json!("denied"), &Value::Null));
    let own = explain(&gateway, &["--domain", "own", "--descriptor", "path=/login,address=a\\,b", "--offline"]);
    assert_eq!(own["descriptors"][0]["entries"], json!(["path=/login", "address=a,b"]));
    assert_eq!(own["descriptors"][0]["matched"], "path=/login/address");
    assert_eq!((&own["decision"], &own["counters_unavailable"]), (&Value::Null, &json!("--offline")));
    let unmatched = explain(&gateway, &["--domain", "nowhere", "--descriptor", "x"]);
    let note = "no descriptor of the configuration matches: it has no limit";
    assert_eq!(unmatched["descriptors"][0]["notes"], json!([note]));
    let path = gateway.directory().join("gateway.toml");
    let text = binary().args(["explain", "--domain", "edge", "--descriptor", "user=a", "--config"]).arg(&path).output();
    let text = String::from_utf8(text.unwrap().stdout).unwrap();
    assert!(text.contains("Call of edge: allowed") && text.contains("1 remaining"), "{text}");
    let neither = binary().args(["explain", "--config"]).arg(path).output().unwrap();
    assert!(String::from_utf8_lossy(&neither.stderr).contains("METHOD"), "{neither:?}");
}

#[test]
fn check_counts_descriptors_and_doctor_checks_the_scripts_of_yaml_limits() {
    let redis = Redis::start();
    let files = "[ratelimit]\nconfiguration = \"edge.yaml\"\n";
    let config = format!("{}{LISTENER}{files}", redis.store());
    let gateway = Gateway::start_with(&config, &[("edge.yaml", YAML)]);
    let path = gateway.directory().join("gateway.toml");
    let run = |command: &str| {
        let output = binary().arg(command).arg("--config").arg(&path).output().unwrap();
        (output.status.success(), String::from_utf8(output.stdout).unwrap())
    };
    let (is_valid, text) = run("check");
    assert!(is_valid && text.contains("0 limits, 0 upstreams, 7 descriptors;"), "{text}");
    let (is_healthy, text) = run("doctor");
    assert!(is_healthy, "{text}");
    // The user may not run a command of fixed windows, which only the YAML uses.
    redis::cmd("ACL").arg(&["SETUSER", "default", "-setrange"]).exec(&mut redis.connection()).unwrap();
    let (is_healthy, text) = run("doctor");
    assert!(!is_healthy && text.contains("+setrange"), "{text}");
}

#[test]
fn health_of_the_service_is_not_serving_while_the_gateway_drains() {
    let redis = Redis::start();
    let config = format!("[server]\naccept_grace = \"600s\"\n{}{LISTENER}{DESCRIPTORS}", redis.store());
    let mut gateway = Gateway::start(&config);
    let client = Grpc::connect(gateway.address);
    let health = || {
        let reply = client.call("/grpc.health.v1.Health/Check", &HealthCheckRequest::default(), &[]);
        reply.message::<HealthCheckResponse>().status()
    };
    assert_eq!(health(), ServingStatus::Serving);
    gateway.terminate();
    eventually("the service is not serving", || health() == ServingStatus::NotServing);
    let login = descriptor(&[("path", "/login"), ("address", "a")]);
    assert!(ask(&client, "own", &[login]), "calls are answered during accept_grace");
    gateway.terminate();
    drop(client);
    assert!(gateway.wait().success());
}
