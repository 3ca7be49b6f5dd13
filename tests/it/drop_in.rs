//! The binary in place of envoyproxy/ratelimit: started under its name, with nothing but its environment variables.

use std::fs::{create_dir, create_dir_all, rename, write};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use bytes::Bytes;
use rcgen::DnType;
use sluicegate::payload::envoy::{
    Code, Entry, HealthCheckRequest, HealthCheckResponse, RateLimitDescriptor, RateLimitRequest, RateLimitResponse,
    ServingStatus,
};

use super::hot_restart::hot_restart;
use crate::support::certificates::{Authority, NOW, Pair, tls};
use crate::support::client::{Client, Reply};
use crate::support::gateway::{Gateway, binary};
use crate::support::grpc::Grpc;
use crate::support::redis::Redis;
use crate::support::{eventually, signal};

const METHOD: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

/// A domain with one descriptor, which has this number of requests per day and key `user`.
fn yaml(quota: u32) -> String {
    format!("domain: edge\ndescriptors:\n  - key: user\n    rate_limit: {{unit: DAY, requests_per_unit: {quota}}}\n")
}

/// Return a command that runs the binary as `ratelimit`, with the variables that every test needs.
fn ratelimit(directory: &Path, redis: &Redis, variables: &[(&str, &str)]) -> Command {
    create_dir(directory.join("bin")).unwrap();
    let program = directory.join("bin/ratelimit");
    symlink(env!("CARGO_BIN_EXE_sluicegate"), &program).unwrap();
    let mut command = Command::new(program);
    let url = redis.url();
    let server = url.trim_start_matches("redis://").split('/').next().unwrap().to_owned();
    command.env_clear().env("REDIS_SOCKET_TYPE", "tcp").env("REDIS_URL", server).env("LOG_LEVEL", "info");
    for name in ["HOST", "GRPC_HOST"] {
        command.env(name, "127.0.0.1");
    }
    for name in ["PORT", "GRPC_PORT"] {
        command.env(name, "0");
    }
    command.env("RUNTIME_ROOT", directory).env("RUNTIME_SUBDIRECTORY", "ratelimit");
    command.envs(variables.iter().copied());
    command
}

/// Start the drop-in with this YAML.
fn start(redis: &Redis, text: &str, variables: &[(&str, &str)]) -> Gateway {
    Gateway::start_by("", |path| {
        let directory = path.parent().unwrap();
        create_dir_all(directory.join("ratelimit/config")).unwrap();
        write(directory.join("ratelimit/config/edge.yaml"), text).unwrap();
        ratelimit(directory, redis, variables)
    })
}

fn request(user: &str) -> RateLimitRequest {
    let value = Bytes::copy_from_slice(user.as_bytes());
    let entry = Entry { key: "user".into(), value };
    let descriptors = vec![RateLimitDescriptor { entries: vec![entry], ..RateLimitDescriptor::default() }];
    RateLimitRequest { domain: "edge".into(), descriptors, hits_addend: 0 }
}

fn call(client: &Grpc, user: &str) -> RateLimitResponse {
    client.call(METHOD, &request(user), &[("grpc-timeout", "10S")]).message()
}

/// Return the status of gRPC's health service for all services.
fn health(client: &Grpc) -> ServingStatus {
    let request = HealthCheckRequest::default();
    client.call("/grpc.health.v1.Health/Check", &request, &[]).message::<HealthCheckResponse>().status()
}

fn post(gateway: &Gateway, body: &[u8]) -> Reply {
    Client::connect(gateway.addresses()[1]).request("POST", "/json", &[], body)
}

fn json_of(user: &str) -> Vec<u8> {
    format!(
        "{{\"domain\": \"edge\", \"descriptors\": [{{\"entries\": [{{\"key\": \"user\", \"value\": \"{user}\"}}]}}]}}"
    )
    .into_bytes()
}

fn get(gateway: &Gateway, path: &str) -> Reply {
    Client::connect(gateway.addresses()[1]).get(path)
}

#[test]
fn variables_of_the_reference_serve_calls_json_health_and_metrics() {
    let redis = Redis::start();
    let metrics = [("USE_PROMETHEUS", "true"), ("PROMETHEUS_ADDR", "0.0.0.0:0"), ("USE_STATSD", "false")];
    let mut gateway = start(&redis, &yaml(3), &metrics);
    let client = Grpc::connect(gateway.address);
    assert_eq!(health(&client), ServingStatus::Serving);
    let healthy = get(&gateway, "/healthcheck");
    assert_eq!((healthy.status, healthy.text()), (200, "OK"));
    assert_eq!(call(&client, "a").statuses[0].limit_remaining, 2);
    let admitted = post(&gateway, &json_of("a"));
    assert_eq!(admitted.status, 200, "{}", admitted.text());
    assert_eq!(admitted.header("content-type"), Some("application/json"));
    let status = &admitted.json()["statuses"][0];
    assert_eq!((&admitted.json()["overallCode"], &status["code"]), (&"OK".into(), &"OK".into()));
    assert_eq!(status["currentLimit"]["requestsPerUnit"], 3);
    assert_eq!((&status["currentLimit"]["unit"], &status["limitRemaining"]), (&"DAY".into(), &1.into()));
    assert_eq!(call(&client, "a").overall_code(), Code::Ok);
    let denied = post(&gateway, &json_of("a"));
    assert_eq!((denied.status, &denied.json()["overallCode"]), (429, &"OVER_LIMIT".into()), "{}", denied.text());
    assert_eq!(call(&client, "a").overall_code(), Code::OverLimit);

    let admin = gateway.admin();
    let page = Client::connect(([127, 0, 0, 1], admin.port()).into()).get("/metrics");
    assert!(page.text().contains("descriptor_decisions_total{"), "{}", page.text());
    for path in ["/api/status", "/", "/api/config"] {
        assert_eq!(Client::connect(([127, 0, 0, 1], admin.port()).into()).get(path).status, 403, "{path}");
    }
    gateway.terminate();
    assert!(gateway.wait().success());
}

#[test]
fn body_that_is_no_request_gets_400_and_one_beyond_the_bounds_429() {
    let redis = Redis::start();
    let gateway = start(&redis, &yaml(1), &[("USE_PROMETHEUS", "true"), ("PROMETHEUS_ADDR", "0.0.0.0:0")]);
    let long = format!("{{\"domain\": \"{}\"}}", "x".repeat(300 << 10));
    let many = format!("{{\"domain\": \"edge\", \"descriptors\": [{}{{}}]}}", "{},".repeat(1000));
    let cases: [(&str, &[u8], u16); 10] = [
        ("no body", b"", 400),
        ("no JSON", b"domain=edge", 400),
        ("a list", b"[]", 400),
        ("an unknown field", b"{\"domian\": \"edge\"}", 400),
        ("invalid UTF-8", b"{\"domain\": \"\xff\"}", 400),
        ("a type error", b"{\"domain\": \"edge\", \"descriptors\": [{\"entries\": \"user\"}]}", 400),
        ("no descriptor", b"{\"domain\": \"edge\"}", 400),
        ("deep nesting", &[b'['; 10_000], 400),
        ("a long body", long.as_bytes(), 429),
        ("many descriptors", many.as_bytes(), 429),
    ];
    for (what, body, status) in cases {
        assert_eq!(post(&gateway, body).status, status, "{what}");
    }
    assert_eq!(get(&gateway, "/json").status, 400);
    let metrics = Client::connect(([127, 0, 0, 1], gateway.admin().port()).into()).get("/metrics");
    for count in ["invalid\"} 9\n", "unchecked\"} 2\n"] {
        assert!(metrics.text().contains(&format!("ratelimit_calls_total{{result=\"{count}")), "{}", metrics.text());
    }
    assert_eq!(get(&gateway, "/other").status, 404);
    let head = Client::connect(gateway.addresses()[1]).request("POST", "/healthcheck", &[], b"a body");
    assert_eq!(head.status, 200);
    assert_eq!(post(&gateway, &json_of("a")).status, 200, "nothing was charged");
}

#[test]
fn replaced_symlink_of_the_runtime_root_reloads_the_descriptors() {
    let redis = Redis::start();
    let gateway = Gateway::start_by("", |path| {
        let directory = path.parent().unwrap();
        for (version, quota) in [("one", 3), ("two", 7)] {
            create_dir_all(directory.join(version).join("ratelimit/config")).unwrap();
            write(directory.join(version).join("ratelimit/config/edge.yaml"), yaml(quota)).unwrap();
        }
        let links = directory.join("links");
        create_dir(&links).unwrap();
        symlink(directory.join("one"), links.join("current")).unwrap();
        let root = links.join("current").display().to_string();
        ratelimit(directory, &redis, &[("RUNTIME_ROOT", &root)])
    });
    let client = Grpc::connect(gateway.address);
    let quota = || call(&client, "a").statuses[0].current_limit.clone().unwrap().requests_per_unit;
    assert_eq!(quota(), 3);
    let links = gateway.directory().join("links");
    symlink(gateway.directory().join("two"), links.join("new")).unwrap();
    rename(links.join("new"), links.join("current")).unwrap();
    eventually("the descriptors of the new directory apply", || quota() == 7);
}

#[test]
fn shadow_mode_and_named_headers_are_honoured() {
    let redis = Redis::start();
    let zero = "domain: edge\ndescriptors:\n  - {key: user, rate_limit: {unit: DAY, requests_per_unit: 0}}\n";
    for text in [zero, &yaml(1)] {
        let gateway = start(&redis, text, &[("SHADOW_MODE", "true")]);
        let client = Grpc::connect(gateway.address);
        for _ in 0..3 {
            assert_eq!(call(&client, "a").overall_code(), Code::Ok);
        }
    }
    let variables = [
        ("LIMIT_RESPONSE_HEADERS_ENABLED", "true"),
        ("LIMIT_RESET_HEADER", "X-Reset"),
        ("RESPONSE_DYNAMIC_METADATA", "true"),
    ];
    let gateway = start(&redis, &yaml(1), &variables);
    let client = Grpc::connect(gateway.address);
    for code in [Code::Ok, Code::OverLimit] {
        let response = call(&client, "b");
        assert_eq!(response.overall_code(), code);
        assert!(response.dynamic_metadata.as_ref().unwrap().fields.contains_key("descriptors"), "{response:?}");
        let header = |name: &str| {
            let header = response.response_headers_to_add.iter().find(|header| header.key == name);
            header.unwrap_or_else(|| panic!("{response:?}")).value.clone()
        };
        assert_eq!((&*header("RateLimit-Limit"), &*header("RateLimit-Remaining")), ("1", "0"));
        let reset = response.statuses[0].duration_until_reset.unwrap();
        assert_eq!(header("X-Reset"), (reset.seconds + i64::from(reset.nanos > 0)).to_string(), "rounded up");
    }
}

#[test]
fn files_of_one_domain_are_merged() {
    let redis = Redis::start();
    let other = "domain: edge\ndescriptors:\n  - key: group\n    rate_limit: {unit: DAY, requests_per_unit: 5}\n";
    let both = format!("{}---\n{other}", yaml(3));
    let gateway = start(&redis, &both, &[("MERGE_DOMAIN_CONFIG", "true")]);
    let client = Grpc::connect(gateway.address);
    let mut request = request("a");
    let group = Entry { key: "group".into(), value: "a".into() };
    request.descriptors.push(RateLimitDescriptor { entries: vec![group], ..RateLimitDescriptor::default() });
    let response: RateLimitResponse = client.call(METHOD, &request, &[]).message();
    let quotas = response.statuses.iter().map(|status| status.current_limit.as_ref().unwrap().requests_per_unit);
    assert_eq!(quotas.collect::<Vec<_>>(), [3, 5]);

    let directory = tempfile::tempdir().unwrap();
    create_dir_all(directory.path().join("config")).unwrap();
    write(directory.path().join("config/edge.yaml"), both).unwrap();
    let output = binary().arg("ratelimit").env("RUNTIME_ROOT", directory.path()).output().unwrap();
    let report = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(2) && report.contains("the domain `edge` occurs twice"), "{report}");
}

#[test]
fn grpc_over_tls_requires_the_client_certificate() {
    const NAME: &str = "gateway.test";
    let directory = tempfile::tempdir().unwrap();
    let (authority, server) = (Authority::new("ca"), Pair::server(NAME, NOW));
    let path = |name: &str, pem: &str| {
        let path = directory.path().join(name);
        write(&path, pem).unwrap();
        path.display().to_string()
    };
    let (cert, key) = (path("tls.crt", &server.cert), path("tls.key", &server.key));
    let ca = path("ca.crt", &authority.pem());
    let redis = Redis::start();
    let variables = [
        ("GRPC_SERVER_USE_TLS", "true"),
        ("GRPC_SERVER_TLS_CERT", &*cert),
        ("GRPC_SERVER_TLS_KEY", &*key),
        ("GRPC_CLIENT_TLS_CACERT", &*ca),
    ];
    let gateway = start(&redis, &yaml(1), &variables);
    let connect = |pair: Option<&Pair>| {
        let mut config = (*tls(&[&server.der], pair, rustls::ALL_VERSIONS)).clone();
        config.alpn_protocols = vec![b"h2".to_vec()];
        let address = gateway.address;
        async move {
            let stream = tokio::net::TcpStream::connect(address).await.unwrap();
            let connector = tokio_rustls::TlsConnector::from(std::sync::Arc::new(config));
            connector.connect(NAME.try_into().unwrap(), stream).await
        }
    };
    let pair = authority.client(&[(DnType::CommonName, "envoy")], NOW);
    let with = connect(Some(&pair));
    assert_eq!(call(&Grpc::over(async { with.await.unwrap() }), "a").overall_code(), Code::Ok);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let without = connect(None);
    let refused = runtime.block_on(async {
        let mut stream = match without.await {
            Ok(stream) => stream,
            Err(_) => return true,
        };
        let mut byte = [0];
        // In TLS 1.3, the client sees the refusal only when it reads.
        let mut read = 0;
        while let Ok(count @ 1..) = tokio::io::AsyncReadExt::read(&mut stream, &mut byte).await {
            read += count;
        }
        read == 0
    });
    assert!(refused);
}

#[test]
fn faulty_variables_are_reported_and_the_printed_configuration_is_valid() {
    let output =
        binary().arg("ratelimit").env("BACKEND_TYPE", "memcache").env("GRPC_UDS", "/run/r.sock").output().unwrap();
    let report = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{report}");
    for text in ["BACKEND_TYPE is `memcache`", "use Redis: set BACKEND_TYPE=redis", "GRPC_UDS is not supported"] {
        assert!(report.contains(text), "{report}");
    }

    let directory = tempfile::tempdir().unwrap();
    create_dir_all(directory.path().join("config")).unwrap();
    write(directory.path().join("config/edge.yaml"), yaml(1)).unwrap();
    let mut print = binary();
    print.args(["ratelimit", "--print"]).env("RUNTIME_ROOT", directory.path()).env("STATSD_HOST", "h");
    let printed = print.env("USE_PROMETHEUS", "t").output().unwrap();
    let file = directory.path().join("gateway.toml");
    write(&file, &printed.stdout).unwrap();
    let check = binary().args(["check", "--config"]).arg(&file).output().unwrap();
    assert!(check.status.success(), "{}", String::from_utf8_lossy(&check.stderr));

    let redis = Redis::start();
    let gateway = start(&redis, &yaml(1), &[("STATSD_HOST", "h"), ("USE_STATSD", "false")]);
    assert!(gateway.log().contains("STATSD_HOST has no effect"), "{}", gateway.log());
    assert!(!gateway.log().contains("USE_STATSD"), "{}", gateway.log());
}

#[test]
fn hot_restart_of_the_drop_in_keeps_its_variables() {
    let redis = Redis::start();
    let mut gateway = start(&redis, &yaml(2), &[("LOG_FORMAT", "json")]);
    assert_eq!(call(&Grpc::connect(gateway.address), "a").overall_code(), Code::Ok);
    let _successor = hot_restart(&mut gateway);
    let response = call(&Grpc::connect(gateway.address), "a");
    assert_eq!((response.overall_code(), response.statuses[0].limit_remaining), (Code::Ok, 0));
    assert_eq!(post(&gateway, &json_of("a")).status, 429);
}

#[test]
fn health_checks_fail_while_the_process_stops() {
    let config = "[server]\naccept_grace = \"1h\"\n[[listener]]\naddress = \"127.0.0.1:0\"\nprotocol = \"ratelimit\"\n\
                  [[listener]]\naddress = \"127.0.0.1:0\"\nprotocol = \"ratelimit-http\"\n[ratelimit]\n\
                  configuration = \"edge.yaml\"\n";
    let gateway = Gateway::start_with(config, &[("edge.yaml", &yaml(9))]);
    let client = Grpc::connect(gateway.address);
    assert_eq!((health(&client), get(&gateway, "/healthcheck").status), (ServingStatus::Serving, 200));
    signal(&gateway.child, "TERM");
    eventually("health checks over HTTP fail", || get(&gateway, "/healthcheck").status == 500);
    eventually("health checks over gRPC fail", || health(&client) == ServingStatus::NotServing);
    assert_eq!(call(&client, "a").overall_code(), Code::Ok, "calls are still answered");
    assert_eq!(post(&gateway, &json_of("a")).status, 200);
}

#[test]
fn nested_directories_and_the_global_quota_mode_are_those_of_the_reference() {
    let redis = Redis::start();
    let nested = |root: &Path, name: &str| {
        let path = root.join("ratelimit/config").join(name);
        create_dir_all(path.parent().unwrap()).unwrap();
        path
    };
    let domain = |name: &str| yaml(1).replace("edge", name);
    let gateway = Gateway::start_by("", |path| {
        let root = path.parent().unwrap();
        write(nested(root, "edge.yaml"), yaml(1)).unwrap();
        write(nested(root, "teams/search/one.yml"), domain("deep")).unwrap();
        write(nested(root, "teams/.git/two.yaml"), domain("hidden")).unwrap();
        write(nested(root, "teams/notes.txt"), "no descriptors").unwrap();
        symlink(".", nested(root, "cycle")).unwrap();
        ratelimit(root, &redis, &[("QUOTA_MODE", "true"), ("USE_PROMETHEUS", "false")])
    });
    let client = Grpc::connect(gateway.address);
    let decide = |domain: &str, users: &[&str]| {
        let descriptors = users.iter().flat_map(|user| request(user).descriptors).collect();
        let request = RateLimitRequest { domain: domain.to_owned().into(), descriptors, hits_addend: 0 };
        client.call(METHOD, &request, &[("grpc-timeout", "10S")]).message::<RateLimitResponse>().overall_code()
    };
    assert_eq!((decide("deep", &["a"]), decide("deep", &["a"])), (Code::Ok, Code::OverLimit));
    assert_eq!((decide("hidden", &["a"]), decide("hidden", &["a"])), (Code::Ok, Code::Ok), "the file is not read");
    // With QUOTA_MODE, a call is denied only if all its descriptors are over their limits.
    assert_eq!(decide("edge", &["a"]), Code::Ok);
    assert_eq!(decide("edge", &["a", "b"]), Code::Ok, "`b` admits the call");
    assert_eq!(decide("edge", &["a", "b"]), Code::OverLimit);
    let added = gateway.directory().join("ratelimit/config/teams/later.yaml");
    write(added, domain("later")).unwrap();
    eventually("the new file is read", || {
        decide("later", &["a"]);
        decide("later", &["a"]) == Code::OverLimit
    });
}
