//! The binary in place of envoyproxy/ratelimit: started under its name, with nothing but its environment variables.

use std::collections::BTreeMap;
use std::fs::{create_dir, create_dir_all, rename, write};
use std::io::{BufRead, BufReader, Read};
use std::net::{TcpListener, UdpSocket};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use bytes::Bytes;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use rcgen::{DnType, ExtendedKeyUsagePurpose};
use sluicegate::payload::envoy::{
    Code, Entry, HealthCheckRequest, HealthCheckResponse, RateLimitDescriptor, RateLimitRequest, RateLimitResponse,
    ServingStatus,
};

use super::hot_restart::hot_restart;
use super::traces::{Collector, PARENT, TRACE, assert_attributes, hex, spans, traceparent};
use crate::support::certificates::{Authority, NOW, Pair, ask, tls};
use crate::support::client::{Client, Reply};
use crate::support::gateway::{Gateway, binary};
use crate::support::grpc::Grpc;
use crate::support::redis::{Redis, free_port};
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

/// The name of the certificate of a client is verified, and without it no call is answered.
#[test]
fn clients_need_the_name_of_grpc_client_tls_san() {
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
        ("GRPC_CLIENT_TLS_SAN", "envoy.edge.test"),
    ];
    let gateway = start(&redis, &yaml(9), &variables);
    let of = |names: &[&str]| authority.sign_for(&[], names, NOW, ExtendedKeyUsagePurpose::ClientAuth);
    for (names, is_served) in [
        (&["envoy.edge.test"][..], true),
        (&["a.test", "envoy.edge.test"], true),
        (&["*.edge.test"], true),
        (&["a.test"], false),
        (&[], false),
    ] {
        let mut config = (*tls(&[&server.der], Some(&of(names)), rustls::ALL_VERSIONS)).clone();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        // Over HTTP/1.1, an accepted client is told that it must use HTTP/2.
        let reply = ask(&config.into(), gateway.address, NAME, METHOD);
        assert_eq!(reply.is_some(), is_served, "{names:?}: {reply:?}");
    }
}

#[test]
fn grpc_is_served_on_a_unix_socket_across_a_hot_restart() {
    let redis = Redis::start();
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("ratelimit.sock");
    let connect = || {
        let socket = socket.clone();
        Grpc::over(async move { tokio::net::UnixStream::connect(socket).await.unwrap() })
    };
    // A socket that a killed process has left is replaced.
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    let variables = [("GRPC_UDS", &*socket.display().to_string()), ("LOG_FORMAT", "json")];
    let mut gateway = start(&redis, &yaml(3), &variables);
    eventually("the socket has its name", || std::os::unix::net::UnixStream::connect(&socket).is_ok());
    assert_eq!(gateway.addresses().len(), 1, "no port serves gRPC");
    let old = connect();
    assert_eq!(health(&old), ServingStatus::Serving);
    assert_eq!(call(&old, "a").statuses[0].limit_remaining, 2);
    let successor = hot_restart(&mut gateway);
    assert_eq!(call(&connect(), "a").statuses[0].limit_remaining, 1);
    successor.signal("TERM");
    eventually("the socket is removed", || !socket.exists());
}

#[test]
fn name_of_the_certificate_of_redis_is_verified_unless_it_is_skipped() {
    let directory = tempfile::tempdir().unwrap();
    let [ours, other] = ["ours", "other"].map(Authority::new);
    let path = |name: &str, pem: &str| {
        let path = directory.path().join(name);
        write(&path, pem).unwrap();
        path.display().to_string()
    };
    let server = ours.server(&["redis.test"], NOW);
    let (cert, key) = (path("redis.pem", &server.cert), path("redis.key", &server.key));
    let [ours, other] = [path("ours.pem", &ours.pem()), path("other.pem", &other.pem())];
    let port = free_port().to_string();
    let redis = Redis::start_as(&[
        "--tls-port",
        &port,
        "--tls-cert-file",
        &cert,
        "--tls-key-file",
        &key,
        "--tls-auth-clients",
        "no",
        "--tls-ca-cert-file",
        &ours,
    ]);
    let address = format!("127.0.0.1:{port}");
    let health_of = |ca: &str, skips: &str| {
        let variables = [
            ("REDIS_TLS", "true"),
            ("REDIS_URL", &*address),
            ("REDIS_TLS_CACERT", ca),
            ("REDIS_TLS_SKIP_HOSTNAME_VERIFICATION", skips),
        ];
        let gateway = start(&redis, &yaml(9), &variables);
        let before = redis.calls("evalsha");
        assert_eq!(call(&Grpc::connect(gateway.address), "a").overall_code(), Code::Ok);
        redis.calls("evalsha") > before
    };
    assert!(!health_of(&ours, "false"), "the certificate is not valid for the address");
    assert!(health_of(&ours, "true"));
    assert!(!health_of(&other, "true"), "another CA is not trusted");
}

/// Return the numbers of lines of StatsD by name and type.
fn statsd_counts(text: &str) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    for line in text.lines() {
        let (name, rest) = line.split_once(':').unwrap();
        let (value, kind) = rest.split_once('|').unwrap();
        *counts.entry(format!("{name}|{kind}")).or_default() += value.parse::<u64>().unwrap();
    }
    counts
}

#[test]
fn increases_are_sent_to_statsd_under_the_names_of_the_reference() {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().unwrap().port().to_string();
    let redis = Redis::start();
    let nested = "domain: edge\ndescriptors:\n  - key: user\n    rate_limit: {unit: DAY, requests_per_unit: 5}\n  \
                  - key: a\n    value: x.y\n    descriptors:\n      - key: b\n        descriptors:\n          \
                  - {key: c, rate_limit: {unit: DAY, requests_per_unit: 9}}\n";
    let variables = [
        ("STATSD_HOST", "127.0.0.1"),
        ("STATSD_PORT", &*port),
        ("STATS_FLUSH_INTERVAL", "0.02s"),
        ("EXTRA_TAGS", "zone:a,env:test"),
        ("NEAR_LIMIT_RATIO", "0.5"),
    ];
    let mut gateway = start(&redis, nested, &variables);
    let client = Grpc::connect(gateway.address);
    for code in [Code::Ok, Code::Ok, Code::Ok, Code::Ok, Code::Ok, Code::OverLimit] {
        assert_eq!(call(&client, "u").overall_code(), code);
    }
    let entry = |key: &'static str, value: &'static str| Entry { key: key.into(), value: value.into() };
    let entries = vec![entry("a", "x.y"), entry("b", "1"), entry("c", "2")];
    let descriptors = vec![RateLimitDescriptor { entries, ..RateLimitDescriptor::default() }];
    let deep = RateLimitRequest { domain: "edge".into(), descriptors, hits_addend: 4 };
    assert_eq!(client.call(METHOD, &deep, &[]).message::<RateLimitResponse>().overall_code(), Code::Ok);
    drop(client);
    gateway.terminate();
    // The process delivers the rest before it ends, and then closes the connection.
    let mut text = String::new();
    server.accept().unwrap().0.read_to_string(&mut text).unwrap();
    assert!(gateway.wait().success());
    let counts = statsd_counts(&text);
    let of = |name: &str| counts.get(&format!("{name}.__env=test.__zone=a|c")).copied();
    for (name, count) in [
        ("ratelimit.service.rate_limit.edge.user.total_hits", Some(6)),
        ("ratelimit.service.rate_limit.edge.user.over_limit", Some(1)),
        // 5 * 0.5, rounded down: the hits 3, 4 and 5.
        ("ratelimit.service.rate_limit.edge.user.near_limit", Some(3)),
        ("ratelimit.service.rate_limit.edge.user.within_limit", Some(5)),
        ("ratelimit.service.rate_limit.edge.user.shadow_mode", None),
        ("ratelimit.service.rate_limit.edge.a_x_y.b.c.total_hits", Some(4)),
        ("ratelimit_server.ShouldRateLimit.total_requests", Some(7)),
    ] {
        assert_eq!(of(name), count, "{name}: {counts:#?}");
    }
}

#[test]
fn increases_are_sent_again_after_statsd_was_unreachable() {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = server.local_addr().unwrap();
    let redis = Redis::start();
    let port = address.port().to_string();
    let variables = [
        ("STATSD_HOST", "127.0.0.1"),
        ("STATSD_PORT", &*port),
        ("STATS_FLUSH_INTERVAL", "10ms"),
        ("STATSD_PROTOCOL", "tcp"),
    ];
    drop(server);
    let gateway = start(&redis, &yaml(9), &variables);
    let client = Grpc::connect(gateway.address);
    call(&client, "a");
    eventually("the failure is logged", || gateway.log().contains("cannot send metrics to StatsD"));
    let server = TcpListener::bind(address).unwrap();
    for hits in 1..3 {
        // The server closes each connection after the first line about hits. The next increase comes on another one.
        let connection = BufReader::new(server.accept().unwrap().0);
        let mut lines = connection.lines().map(Result::unwrap);
        let name = "ratelimit.service.rate_limit.edge.user.total_hits:";
        let line = lines.find(|line| line.starts_with(name)).unwrap();
        assert_eq!(line, format!("{name}1|c"), "connection {hits}");
        drop(lines);
        call(&client, "a");
    }
}

#[test]
fn dogstatsd_gets_datagrams_with_tags() {
    let server = UdpSocket::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().unwrap().port().to_string();
    let redis = Redis::start();
    let variables = [
        ("USE_DOG_STATSD", "true"),
        ("STATSD_HOST", "127.0.0.1"),
        ("STATSD_PORT", &*port),
        ("STATS_FLUSH_INTERVAL", "10ms"),
        ("EXTRA_TAGS", "zone:a,env:test"),
    ];
    let gateway = start(&redis, &yaml(1), &variables);
    call(&Grpc::connect(gateway.address), "a");
    let mut text = String::new();
    let mut bytes = [0; 2000];
    while !text.contains("total_hits") {
        let length = server.recv(&mut bytes).unwrap();
        text.push_str(std::str::from_utf8(&bytes[..length]).unwrap());
    }
    assert!(text.contains("ratelimit.service.rate_limit.edge.user.total_hits:1|c|#env:test,zone:a\n"), "{text}");
}

#[test]
fn calls_are_traced_with_the_variables_of_the_reference() {
    let collector = Collector::start();
    let redis = Redis::start();
    let url = collector.server.url();
    let variables = [
        ("TRACING_ENABLED", "true"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", &*url),
        ("TRACING_SERVICE_NAME", "limits"),
        ("TRACING_SERVICE_NAMESPACE", "edge"),
        ("TRACING_SERVICE_INSTANCE_ID", "one"),
        ("TRACING_SAMPLING_RATE", "0"),
    ];
    let mut gateway = start(&redis, &yaml(1), &variables);
    let client = Grpc::connect(gateway.address);
    // The sample has no trace that starts here, and the flag of the caller decides about others.
    call(&client, "a");
    for (flags, user) in [("00", "b"), ("01", "c"), ("01", "c")] {
        let parent = traceparent(flags);
        client.call(METHOD, &request(user), &[("traceparent", &parent)]).message::<RateLimitResponse>();
    }
    let spans = collector.trace(TRACE, 4);
    let servers: Vec<_> = spans.iter().filter(|span| span.kind() == SpanKind::Server).collect();
    assert_eq!(servers.len(), 2, "{spans:#?}");
    for (span, outcome) in servers.iter().zip(["ok", "rate-limited"]) {
        assert_eq!(span.name, METHOD.trim_start_matches('/'));
        assert_eq!(hex(&span.parent_span_id), PARENT);
        assert_attributes(
            span,
            &[
                ("rpc.system", "grpc"),
                ("rpc.service", "envoy.service.ratelimit.v3.RateLimitService"),
                ("rpc.method", "ShouldRateLimit"),
                ("sluicegate.domain", "edge"),
                ("sluicegate.outcome", outcome),
                ("client.address", "127.0.0.1"),
            ],
        );
        let check = spans.iter().find(|child| child.parent_span_id == span.span_id).unwrap();
        assert_eq!((check.kind(), &*check.name), (SpanKind::Internal, "rate_limit_check"));
        assert!(span.start_time_unix_nano <= check.start_time_unix_nano, "{spans:#?}");
        assert!(check.end_time_unix_nano <= span.end_time_unix_nano, "{spans:#?}");
    }
    let parent = traceparent("01");
    let body = json_of("d");
    Client::connect(gateway.addresses()[1]).request("POST", "/json", &[("traceparent", &parent)], &body);
    assert_eq!(collector.trace(TRACE, 6).len(), 6, "/json");
    let (resource, _) = self::spans(&collector.server.last());
    let names = ["service.name", "service.namespace", "service.instance.id"].map(|name| &*resource[name]);
    assert_eq!(names, ["limits", "edge", "one"]);
    gateway.terminate();
    gateway.wait();
    assert_eq!(collector.spans().len(), 6, "unsampled calls have no spans: {:#?}", collector.spans());
}

#[test]
fn faulty_variables_are_reported_and_the_printed_configuration_is_valid() {
    let output = binary().arg("ratelimit").env("BACKEND_TYPE", "memcache").env("STATSD_PORT", "x").output().unwrap();
    let report = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{report}");
    for text in ["BACKEND_TYPE is `memcache`", "use Redis: set BACKEND_TYPE=redis", "STATSD_PORT is `x`"] {
        assert!(report.contains(text), "{report}");
    }

    let directory = tempfile::tempdir().unwrap();
    create_dir_all(directory.path().join("config")).unwrap();
    write(directory.path().join("config/edge.yaml"), yaml(1)).unwrap();
    let mut print = binary();
    print.args(["ratelimit", "--print"]).env("RUNTIME_ROOT", directory.path()).env("STATSD_HOST", "h");
    let printed = print.env("USE_PROMETHEUS", "t").env("USE_STATSD", "t").output().unwrap();
    let file = directory.path().join("gateway.toml");
    write(&file, &printed.stdout).unwrap();
    let check = binary().args(["check", "--config"]).arg(&file).output().unwrap();
    assert!(check.status.success(), "{}", String::from_utf8_lossy(&check.stderr));

    let redis = Redis::start();
    let gateway = start(&redis, &yaml(1), &[("STATSD_HOST", "h"), ("USE_STATSD", "false")]);
    assert!(gateway.log().contains("STATSD_HOST has no effect"), "{}", gateway.log());
    assert!(!gateway.log().contains("USE_STATSD has no effect"), "{}", gateway.log());
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
