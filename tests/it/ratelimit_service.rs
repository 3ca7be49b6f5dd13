//! Envoy's rate limit service: calls over the wire to a listener with `protocol = "ratelimit"`.

use std::time::Duration;

use bytes::Bytes;
use prost::Message;
use rcgen::DnType;
use sluicegate::clock::{elapsed_since, monotonic};
use sluicegate::payload::envoy;
use sluicegate::payload::envoy::{
    Code, DescriptorStatus, Entry, HeaderValue, HealthCheckRequest, HealthCheckResponse, Kind, List, RateLimit,
    RateLimitDescriptor, RateLimitOverride, RateLimitRequest, RateLimitResponse, ServingStatus, Struct, Unit,
};

use crate::support::certificates::{Authority, NOW, Pair, tls};
use crate::support::frames::{DATA, END_HEADERS, END_STREAM, HEADERS, Http2, block, frame};
use crate::support::gateway::Gateway;
use crate::support::grpc::{Grpc, framed};
use crate::support::redis::Redis;
use crate::support::reload::{ask, metric, reloads, with_admin};
use crate::support::{eventually, signal};

const METHOD: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

const LISTENER: &str = "[[listener]]\naddress = \"127.0.0.1:0\"\nprotocol = \"ratelimit\"\n";

/// Limits of one request per day and address, and descriptors that use them.
const CONFIG: &str = r#"
[limit.login]
by = "entry:remote_address"
quota = "3/day"
algorithm = "fixed-window"

[limit.all]
by = "global"
quota = "5/day"
algorithm = "fixed-window"

[[descriptor]]
domain = "edge"
entries = ["generic_key=login", "remote_address"]
limits = ["login"]

[[descriptor]]
domain = "edge"
entries = ["generic_key=all"]
limits = ["all"]

[[descriptor]]
domain = "edge"
entries = ["generic_key=login", "remote_address=127.0.0.*"]
unlimited = true
"#;

fn descriptor(entries: &[(&str, &str)]) -> RateLimitDescriptor {
    let entry = |(key, value): &(&str, &str)| Entry {
        key: Bytes::copy_from_slice(key.as_bytes()),
        value: Bytes::copy_from_slice(value.as_bytes()),
    };
    RateLimitDescriptor { entries: entries.iter().map(entry).collect(), ..RateLimitDescriptor::default() }
}

fn login(address: &str) -> RateLimitDescriptor {
    descriptor(&[("generic_key", "login"), ("remote_address", address)])
}

fn all() -> RateLimitDescriptor {
    descriptor(&[("generic_key", "all")])
}

fn request(descriptors: &[RateLimitDescriptor]) -> RateLimitRequest {
    RateLimitRequest { domain: "edge".into(), descriptors: descriptors.to_vec(), hits_addend: 0 }
}

/// The code of a response, and the code and remaining count of each status.
#[derive(Debug, PartialEq)]
struct Answer(Code, Vec<(Code, u32)>);

fn summary(response: &RateLimitResponse) -> Answer {
    let statuses = response.statuses.iter().map(|status| (status.code(), status.limit_remaining)).collect();
    Answer(response.overall_code(), statuses)
}

trait Ask {
    fn ask(&self, request: &RateLimitRequest) -> RateLimitResponse;
    fn answer(&self, descriptors: &[RateLimitDescriptor]) -> Answer;
}

impl Ask for Grpc {
    #[track_caller]
    fn ask(&self, request: &RateLimitRequest) -> RateLimitResponse {
        self.call(METHOD, request, &[("grpc-timeout", "10S")]).message()
    }

    #[track_caller]
    fn answer(&self, descriptors: &[RateLimitDescriptor]) -> Answer {
        summary(&self.ask(&request(descriptors)))
    }
}

fn start(config: &str) -> (Redis, Gateway, Grpc) {
    let redis = Redis::start();
    let gateway = Gateway::start(&format!("{}{LISTENER}{config}", redis.store()));
    let client = Grpc::connect(gateway.address);
    (redis, gateway, client)
}

use Code::{Ok as Admitted, OverLimit};

fn headers(response: &RateLimitResponse) -> Vec<(&str, &str)> {
    response.response_headers_to_add.iter().map(|header| (&*header.key, &*header.value)).collect()
}

#[test]
fn descriptor_is_admitted_up_to_its_quota_with_the_headers_of_the_limit() {
    let (_redis, gateway, client) = start(CONFIG);
    assert!(!gateway.log().contains("no route uses"), "{}", gateway.log());
    for remaining in [2, 1, 0] {
        let response = client.ask(&request(&[login("192.0.2.1")]));
        assert_eq!(summary(&response), Answer(Admitted, vec![(Admitted, remaining)]));
        let status = &response.statuses[0];
        let limit = status.current_limit.as_ref().unwrap();
        assert_eq!((limit.requests_per_unit, limit.unit(), &*limit.name), (3, Unit::Day, "login"));
        assert!((1..=86_400).contains(&status.duration_until_reset.unwrap().seconds), "{status:?}");
        let headers = headers(&response);
        assert_eq!(headers[0], ("ratelimit-policy", "\"login\";q=3;w=86400"));
        assert!(headers[1].1.starts_with(&format!("\"login\";r={remaining};t=")), "{headers:?}");
        assert_eq!(headers.len(), 2);
        assert_eq!(response.dynamic_metadata, None);
    }
    let response = client.ask(&request(&[login("192.0.2.1")]));
    assert_eq!(summary(&response), Answer(OverLimit, vec![(OverLimit, 0)]));
    assert_eq!(
        headers(&response).iter().map(|(name, _)| *name).collect::<Vec<_>>(),
        ["ratelimit-policy", "ratelimit", "retry-after"]
    );
    let metadata = response.dynamic_metadata.unwrap();
    assert_eq!(metadata.fields["domain"].kind, Some(Kind::Text("edge".to_owned())));
    let Some(Kind::List(denied_by)) = &metadata.fields["denied_by"].kind else { panic!("{metadata:?}") };
    assert_eq!(denied_by.values, ["login".into()]);
    assert_eq!(client.answer(&[login("192.0.2.2")]).0, Admitted, "another address has another state");
}

#[test]
fn every_descriptor_gets_a_status_in_the_order_of_the_call() {
    let (_redis, _gateway, client) = start(CONFIG);
    let unlimited = (Admitted, 0);
    let calls = [
        (
            vec![descriptor(&[("generic_key", "other")]), all(), login("a")],
            vec![unlimited, (Admitted, 4), (Admitted, 2)],
        ),
        (vec![login("a"), login("127.0.0.9"), all()], vec![(Admitted, 1), unlimited, (Admitted, 3)]),
        // The number and the order of entries must match.
        (vec![descriptor(&[("remote_address", "a"), ("generic_key", "login")])], vec![unlimited]),
        (vec![descriptor(&[("generic_key", "login")])], vec![unlimited]),
    ];
    for (descriptors, statuses) in calls {
        assert_eq!(client.answer(&descriptors), Answer(Admitted, statuses));
    }
    let other = RateLimitRequest { domain: "other".into(), ..request(&[all()]) };
    let response = client.ask(&other);
    assert_eq!(
        response,
        RateLimitResponse {
            overall_code: Admitted.into(),
            statuses: vec![DescriptorStatus { code: Admitted.into(), ..DescriptorStatus::default() }],
            ..RateLimitResponse::default()
        }
    );
}

#[test]
fn denied_call_charges_none_of_its_descriptors() {
    let (_redis, _gateway, client) = start(CONFIG);
    for _ in 0..3 {
        assert_eq!(client.answer(&[login("a")]).0, Admitted);
    }
    for _ in 0..20 {
        assert_eq!(client.answer(&[all(), login("a")]).0, OverLimit);
    }
    assert_eq!(client.answer(&[all()]), Answer(Admitted, vec![(Admitted, 4)]), "the quota of all is untouched");
    let denied = client.answer(&[all(), login("a")]);
    assert_eq!((denied.1[0].0, denied.1[1].0), (Admitted, OverLimit));
}

#[test]
fn hits_are_the_cost_zero_is_a_peek_and_negative_hits_are_refunded() {
    let (_redis, _gateway, client) = start(CONFIG);
    let hits = |hits: u64| RateLimitDescriptor { hits_addend: Some(hits), ..all() };
    let back = |hits| RateLimitDescriptor { hits_addend: Some(hits), is_negative_hits: true, ..all() };
    for (what, descriptor, expected) in [
        ("a peek charges nothing", hits(0), (Admitted, 5)),
        ("a cost of 4", hits(4), (Admitted, 1)),
        ("a cost that does not fit charges nothing", hits(2), (OverLimit, 0)),
        ("a peek shows what remains", hits(0), (Admitted, 1)),
        ("a refund of 3", back(3), (Admitted, 4)),
        ("the refund is available", hits(4), (Admitted, 0)),
        ("a refund is at most what was charged", back(100), (Admitted, 5)),
    ] {
        let code = expected.0;
        assert_eq!(client.answer(&[descriptor]), Answer(code, vec![expected]), "{what}");
    }
    // The cost of the call applies to descriptors without their own.
    let both = RateLimitRequest {
        hits_addend: 2,
        ..request(&[all(), RateLimitDescriptor { hits_addend: Some(1), ..login("b") }])
    };
    assert_eq!(summary(&client.ask(&both)), Answer(Admitted, vec![(Admitted, 3), (Admitted, 2)]));
    // The charge and the refund of one call, as Envoy sends them at the end of a stream.
    assert_eq!(client.answer(&[hits(3), back(1)]).1, [(Admitted, 0), (Admitted, 1)]);
}

#[test]
fn descriptors_with_the_same_state_are_charged_together() {
    let (_redis, _gateway, client) = start(CONFIG);
    assert_eq!(client.answer(&[all(), all()]).1, [(Admitted, 3), (Admitted, 3)]);
    assert_eq!(client.answer(&[all(), all(), all(), all()]).0, OverLimit);
    assert_eq!(client.answer(&[all()]).1, [(Admitted, 2)]);
}

#[test]
fn quota_of_the_call_replaces_the_quota_of_the_limit() {
    let (_redis, _gateway, client) = start(CONFIG);
    let limit = Some(RateLimitOverride { requests_per_unit: 2, unit: Unit::Week.into() });
    let requested = RateLimitDescriptor { limit, ..login("a") };
    for remaining in [1, 0] {
        let response = client.ask(&request(std::slice::from_ref(&requested)));
        assert_eq!(summary(&response), Answer(Admitted, vec![(Admitted, remaining)]));
        let limit = response.statuses[0].current_limit.as_ref().unwrap();
        assert_eq!((limit.requests_per_unit, limit.unit()), (2, Unit::Week));
    }
    assert_eq!(client.answer(&[requested]).0, OverLimit);
}

#[test]
fn shadow_limit_never_denies_and_unlimited_descriptors_have_no_limit() {
    let shadow = CONFIG.replace("[limit.login]\n", "[limit.login]\nshadow = true\n");
    let (_redis, _gateway, client) = start(&shadow);
    for _ in 0..5 {
        assert_eq!(client.answer(&[login("a")]).0, Admitted);
    }
    let response = client.ask(&request(&[login("a"), login("127.0.0.1")]));
    assert_eq!(summary(&response), Answer(Admitted, vec![(Admitted, 0), (Admitted, 0)]));
    assert!(response.statuses[0].current_limit.is_some() && response.statuses[1].current_limit.is_none());
}

#[test]
fn value_that_is_not_utf_8_is_limited() {
    let (_redis, _gateway, client) = start(CONFIG);
    let mut descriptor = login("");
    descriptor.entries[1].value = Bytes::from_static(b"\xff\x00\xfe");
    for expected in [Admitted, Admitted, Admitted, OverLimit] {
        assert_eq!(client.answer(std::slice::from_ref(&descriptor)).0, expected);
    }
}

#[test]
fn malformed_call_gets_an_error_and_the_connection_stays_usable() {
    let (_redis, gateway, client) = start(CONFIG);
    let good = framed(&request(&[all()]).encode_to_vec());
    let [first, second] = [framed(b"\x0a\x01d"), framed(b"")];
    let empty_domain = RateLimitRequest { domain: Bytes::new(), ..request(&[all()]) };
    type Case<'a> = (&'a str, &'a str, &'a str, &'a [(&'a str, &'a str)], Bytes, u32);
    let cases: [Case<'_>; 12] = [
        ("no domain", "POST", METHOD, &[], framed(&empty_domain.encode_to_vec()), 3),
        ("no descriptor", "POST", METHOD, &[], framed(&request(&[]).encode_to_vec()), 3),
        ("no message", "POST", METHOD, &[], Bytes::new(), 3),
        ("a part of the prefix", "POST", METHOD, &[], good.slice(..4), 3),
        ("a part of the message", "POST", METHOD, &[], good.slice(..good.len() - 1), 3),
        ("two messages", "POST", METHOD, &[], [first, second].concat().into(), 3),
        ("garbage", "POST", METHOD, &[], framed(b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"), 3),
        ("a field of another type", "POST", METHOD, &[], framed(b"\x08\x01"), 3),
        ("a compressed message", "POST", METHOD, &[], Bytes::from_static(b"\x01\0\0\0\x01a"), 12),
        ("another method", "POST", "/envoy.service.ratelimit.v3.RateLimitService/Other", &[], good.clone(), 12),
        ("another content type", "POST", METHOD, &[("content-type", "application/json")], good.clone(), 12),
        ("GET", "GET", METHOD, &[], good.clone(), 12),
    ];
    for (what, method, path, headers, body, code) in cases {
        let reply = client.send(method, path, headers, body);
        assert_eq!((reply.status, reply.code()), (200, code), "{what}: {reply:?}");
        assert!(!reply.fields["grpc-message"].is_empty(), "{what}");
    }
    let expired = client.send("POST", METHOD, &[("grpc-timeout", "0m")], good);
    assert!(expired.code() == 4 || expired.message::<RateLimitResponse>().overall_code() == OverLimit, "{expired:?}");
    assert_eq!(client.answer(&[all()]).1, [(Admitted, 4)], "none of these calls has charged anything");
    // HTTP/1.1 gets a response that says what is wrong.
    let mut http1 = gateway.client();
    let reply = http1.get("/");
    assert_eq!(reply.status, 505);
    assert!(reply.text().contains("HTTP/2"), "{}", reply.text());
}

#[test]
fn call_beyond_the_bounds_is_denied() {
    let (_redis, gateway, client) = start(CONFIG);
    let many = vec![all(); 10_000];
    let long = "x".repeat(1 << 20);
    for (what, descriptors) in [("10,000 descriptors", many), ("a value of 1 MiB", vec![login(&long)])] {
        let before = gateway.memory();
        for _ in 0..20 {
            let response = client.ask(&request(&descriptors));
            assert_eq!(response.overall_code(), OverLimit, "{what}");
            let retry = response.response_headers_to_add.iter().find(|header| header.key == "retry-after");
            assert_eq!(retry.map(|header| &*header.value), Some("1"), "{what}");
        }
        let grown = gateway.memory().saturating_sub(before);
        assert!(grown < 64 << 20, "{what}: {grown} bytes");
    }
    assert_eq!(client.answer(&vec![all(); 5]).0, Admitted, "nothing was charged");
    let longest = "x".repeat(200 << 10);
    assert_eq!(client.answer(&[login(&longest)]).0, Admitted, "a long value is limited as any other");
}

/// Messages that do not end occupy at most a quarter of `max_buffered` for one network, and further calls of the network
/// are denied.
#[test]
fn unfinished_messages_of_a_network_are_bounded() {
    let (_redis, gateway, client) = start(&format!("[server]\nmax_buffered = \"8MiB\"\n{CONFIG}"));
    assert_eq!(client.answer(&[all()]).0, Admitted);
    let held: Vec<_> = (0..4).map(|_| Grpc::connect(gateway.address)).collect();
    // The share of the network has 2 MiB: ten of these messages fit, and then neither an eleventh nor the call.
    let part = Bytes::from(vec![0; 200 << 10]);
    let call = [descriptor(&[("generic_key", &"x".repeat(100 << 10))])];
    // The gateway closes a connection with many calls that it has not read to their ends.
    let answer = || Grpc::connect(gateway.address).answer(&call).0;
    let mut connections = held.iter().cycle();
    eventually("a call is denied, because the messages occupy too much memory", || {
        connections.next().unwrap().begin(METHOD, part.clone());
        answer() == OverLimit
    });
    assert!(gateway.log().contains("too many messages are being read"), "{}", gateway.log());
    drop(held);
    eventually("calls are checked again", || answer() == Admitted);
}

#[test]
fn store_failure_follows_on_store_error() {
    for (on_store_error, expected) in [("deny", OverLimit), ("allow", Admitted), ("local", Admitted)] {
        let config = CONFIG.replace("[limit.all]\n", &format!("[limit.all]\non_store_error = \"{on_store_error}\"\n"));
        let (redis, _gateway, client) = start(&config);
        assert_eq!(client.answer(&[all()]).0, Admitted);
        drop(redis);
        let call = request(&[all(), descriptor(&[("generic_key", "other")])]);
        eventually("the limit follows on_store_error", || client.ask(&call).overall_code() == expected);
        let response = client.ask(&call);
        assert_eq!(response.overall_code(), expected, "{on_store_error}");
        assert_eq!(response.statuses.len(), 2, "{on_store_error}");
        assert_eq!(response.statuses[1].code(), Admitted, "{on_store_error}: a descriptor without a limit");
        if expected == OverLimit {
            assert_eq!(headers(&response), [("retry-after", "1")]);
        }
    }
}

#[test]
fn answer_arrives_before_the_deadline_of_the_client() {
    let redis = Redis::start();
    let gateway = Gateway::start(&format!("[store]\nurl = \"{}\"\ntimeout = \"15s\"\n{LISTENER}{CONFIG}", redis.url()));
    let client = Grpc::connect(gateway.address);
    assert_eq!(client.answer(&[all()]).0, Admitted);
    signal(&redis.child, "STOP");
    let started = monotonic();
    let response = client.call(METHOD, &request(&[all()]), &[("grpc-timeout", "400m")]).message::<RateLimitResponse>();
    let elapsed = elapsed_since(started);
    signal(&redis.child, "CONT");
    assert_eq!(response.overall_code(), OverLimit, "a limit that cannot be checked is enforced");
    assert!(elapsed < Duration::from_secs(10), "the timeout of the store does not apply: {elapsed:?}");
}

#[test]
fn two_services_on_one_redis_admit_exactly_the_quota() {
    let redis = Redis::start();
    let config = CONFIG.replace("5/day", "200/day");
    let start = || Gateway::start(&format!("{}{LISTENER}{config}", redis.store()));
    let gateways = [start(), start()];
    let admitted: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|index| {
                let address = gateways[index % 2].address;
                scope.spawn(move || {
                    let client = Grpc::connect(address);
                    (0..50).filter(|_| client.answer(&[all()]).0 == Admitted).count()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!(admitted, 200);
}

#[test]
fn health_of_the_service_is_serving() {
    let (_redis, _gateway, client) = start(CONFIG);
    let check = |service: &'static str| {
        client.call("/grpc.health.v1.Health/Check", &HealthCheckRequest { service: service.into() }, &[])
    };
    for service in ["", "envoy.service.ratelimit.v3.RateLimitService"] {
        assert_eq!(check(service).message::<HealthCheckResponse>().status(), ServingStatus::Serving);
    }
    assert_eq!(check("other").code(), 5);
}

#[test]
fn decisions_are_counted_by_domain_and_descriptor() {
    let redis = Redis::start();
    // The descriptor has two limits, and one decision for each call.
    let config = CONFIG.replace("limits = [\"login\"]", "limits = [\"login\", \"wide\"]")
        + "[limit.wide]\nby = \"global\"\nquota = \"1000000/day\"\n";
    let gateway = Gateway::start(&with_admin(&format!("{}{LISTENER}{config}", redis.store())));
    assert!(!gateway.log().contains("curl"), "curl cannot call the service: {}", gateway.log());
    let client = Grpc::connect(gateway.address);
    for _ in 0..5 {
        client.answer(&[login("192.0.2.1")]);
    }
    let labels = "domain=\"edge\",descriptor=\"generic_key=login/remote_address\"";
    let counted =
        |decision: &str| metric(&gateway, &format!("descriptor_decisions_total{{{labels},decision=\"{decision}\"}}"));
    assert_eq!((counted("allowed"), counted("denied")), (3.0, 2.0));
    assert_eq!(metric(&gateway, "limit_decisions_total{limit=\"login\",decision=\"denied\"}"), 2.0);
    assert_eq!(metric(&gateway, "limit_decisions_total{limit=\"wide\",decision=\"allowed\"}"), 3.0);
}

#[test]
fn reload_changes_descriptors_on_open_connections() {
    let redis = Redis::start();
    let config = |quota: &str| {
        let config = CONFIG.replace("5/day", quota);
        format!("{}{LISTENER}{config}", redis.store())
    };
    let gateway = Gateway::start(&with_admin(&config("5/day")));
    let client = Grpc::connect(gateway.address);
    assert_eq!(client.answer(&[all()]).1, [(Admitted, 4)]);
    reloads(&gateway, &config("9/day"));
    assert_eq!(client.answer(&[all()]).1, [(Admitted, 7)]);
}

#[test]
fn service_over_tls_requires_the_client_certificate() {
    const NAME: &str = "gateway.test";
    let folder = tempfile::tempdir().unwrap();
    let (authority, server) = (Authority::new("ca"), Pair::server(NAME, NOW));
    let path = |name: &str, pem: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, pem).unwrap();
        path.display().to_string()
    };
    let (cert, key) = (path("server.pem", &server.cert), path("server.key", &server.key));
    let ca = path("ca.pem", &authority.pem());
    let redis = Redis::start();
    let gateway = Gateway::start(&format!(
        "{}{LISTENER}tls = {{ certificates = [{{ cert = \"{cert}\", key = \"{key}\" }}], client_ca = \
         \"{ca}\", client_auth = \"required\" }}\n{CONFIG}",
        redis.store()
    ));
    let pair = authority.client(&[(DnType::CommonName, "envoy")], NOW);
    let mut config = (*tls(&[&server.der], Some(&pair), rustls::ALL_VERSIONS)).clone();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let address = gateway.address;
    let client = Grpc::over(async move {
        let stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let connector = tokio_rustls::TlsConnector::from(std::sync::Arc::new(config));
        connector.connect(NAME.try_into().unwrap(), stream).await.unwrap()
    });
    assert_eq!(client.answer(&[all()]).1, [(Admitted, 4)]);
}

/// Return a message that `tests/clients/ratelimit_bytes.py` has recorded with the published schema.
fn recorded(name: &str) -> Vec<u8> {
    let lines = include_str!("../fixtures/ratelimit_messages.txt").lines();
    let hex = lines.filter_map(|line| line.split_once(' ')).find(|(of, _)| *of == name).unwrap().1;
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

#[test]
fn messages_have_the_bytes_of_the_published_schema() {
    let limit = Some(RateLimitOverride { requests_per_unit: 300, unit: Unit::Hour.into() });
    let sent = RateLimitRequest {
        hits_addend: 7,
        ..request(&[
            descriptor(&[("generic_key", "login"), ("path", "/é")]),
            RateLimitDescriptor { limit, hits_addend: Some(0), ..descriptor(&[("empty", "")]) },
            RateLimitDescriptor { hits_addend: Some(1 << 40), ..descriptor(&[("k", "v")]) },
        ])
    };
    assert_eq!(sent.encode_to_vec(), recorded("request"));
    assert_eq!(RateLimitRequest::decode(&*recorded("request")).unwrap(), sent);
    let items = vec!["login".into(), Kind::Number(1.5).into(), Kind::Bool(true).into(), Kind::Null(0).into()];
    let answer = RateLimitResponse {
        overall_code: OverLimit.into(),
        statuses: vec![
            DescriptorStatus { code: Admitted.into(), ..DescriptorStatus::default() },
            DescriptorStatus {
                code: OverLimit.into(),
                current_limit: Some(RateLimit {
                    name: "login".to_owned(),
                    requests_per_unit: 5,
                    unit: Unit::Minute.into(),
                }),
                limit_remaining: u32::MAX,
                duration_until_reset: Some(envoy::Duration { seconds: 59, nanos: 999_999_000 }),
            },
        ],
        response_headers_to_add: vec![HeaderValue { key: "retry-after".to_owned(), value: "59".to_owned() }],
        dynamic_metadata: Some(Struct {
            fields: [
                ("domain".to_owned(), "edge".into()),
                ("denied_by".to_owned(), Kind::List(List { values: items }).into()),
            ]
            .into(),
        }),
    };
    assert_eq!(answer.encode_to_vec(), recorded("response"));
}

/// A limit by tokens, which Envoy charges when a stream ends.
const TOKENS: &str = r#"
[limit.tokens]
by = "entry:user"
quota = "100/day"
algorithm = "fixed-window"
charge = "always"

[limit.requests]
by = "global"
quota = "1000/day"
algorithm = "fixed-window"
charge = "always"

[[descriptor]]
domain = "edge"
entries = ["user"]
limits = ["tokens"]

[[descriptor]]
domain = "edge"
entries = ["requests"]
limits = ["requests"]
"#;

fn tokens(user: &str, hits: u64) -> RateLimitDescriptor {
    RateLimitDescriptor { hits_addend: Some(hits), ..descriptor(&[("user", user)]) }
}

#[test]
fn charge_beyond_the_quota_goes_into_debt() {
    let (_redis, _gateway, client) = start(TOKENS);
    for (what, hits, code) in [
        ("a peek of a full limit", 0, Admitted),
        ("a charge that fits", 90, Admitted),
        ("a peek while 10 remain", 0, Admitted),
        ("a charge of more than what remains", 387, OverLimit),
        ("a peek in debt", 0, OverLimit),
        ("another charge in debt", 5, OverLimit),
    ] {
        assert_eq!(client.answer(&[tokens("a", hits)]).0, code, "{what}");
    }
    let back = |hits| RateLimitDescriptor { is_negative_hits: true, ..tokens("a", hits) };
    // 482 tokens were charged. A refund repays the debt first.
    assert_eq!(client.answer(&[back(382)]).1, [(Admitted, 0)]);
    assert_eq!(client.answer(&[tokens("a", 1)]).0, OverLimit);
    assert_eq!(client.answer(&[back(11)]).1, [(Admitted, 10)]);
    assert_eq!(client.answer(&[tokens("a", 10)]).1, [(Admitted, 0)]);
    assert_eq!(client.answer(&[tokens("b", 0)]).0, Admitted, "another identity has no debt");
}

/// A proxy reports what a stream has used when the stream ends. The report counts although Redis answers too late.
#[test]
fn reported_cost_counts_when_the_store_answers_again() {
    let redis = Redis::start();
    let gateway = Gateway::start(&with_admin(&format!("{}{LISTENER}{TOKENS}", redis.store())));
    let client = Grpc::connect(gateway.address);
    assert_eq!(client.answer(&[tokens("a", 60)]).0, Admitted);
    signal(&redis.child, "STOP");
    assert_eq!(client.answer(&[tokens("a", 90)]).0, OverLimit, "the store did not answer");
    signal(&redis.child, "CONT");
    eventually("the limit is in debt, or the cost is counted as lost", || {
        let lost = metric(&gateway, "store_cost_lost_total{kind=\"charge\"}");
        client.answer(&[tokens("a", 0)]).0 == OverLimit && lost == 0.0 || lost == 90.0
    });
}

#[test]
fn denied_request_charges_no_limit_that_would_admit_it() {
    let (_redis, _gateway, client) = start(TOKENS);
    let requests = || descriptor(&[("requests", "")]);
    assert_eq!(client.answer(&[tokens("a", 101)]).0, OverLimit, "the cost exceeds the quota, and is charged");
    for _ in 0..20 {
        assert_eq!(client.answer(&[requests(), descriptor(&[("user", "a")])]).0, OverLimit);
    }
    assert_eq!(client.answer(&[requests()]).1, [(Admitted, 999)]);
}

#[test]
fn streams_charge_at_most_the_quota_and_the_cost_of_those_in_flight() {
    let (redis, gateway, _) = start(TOKENS);
    const STREAMS: usize = 50;
    const COST: u64 = 7;
    let admitted: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..STREAMS)
            .map(|_| {
                scope.spawn(|| {
                    let client = Grpc::connect(gateway.address);
                    let mut streams = 0;
                    while client.answer(&[tokens("a", 0)]).0 == Admitted {
                        client.answer(&[tokens("a", COST)]);
                        streams += 1;
                    }
                    streams
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    let charged = admitted as u64 * COST;
    assert!((101..=100 + STREAMS as u64 * COST).contains(&charged), "{charged}");
    let keys = redis.keys().into_iter().filter(|key| key.contains(":states")).collect::<Vec<_>>();
    assert_eq!(redis.state(&keys[0])[1], charged, "every stream is charged, also in debt: {keys:?}");
}

// === The YAML of envoyproxy/ratelimit ===

const YAML: &str = "
domain: edge
descriptors:
  - key: user
    rate_limit: {name: of-user, unit: day, requests_per_unit: 2}
  - key: plan
    value: gold*
    rate_limit: {replaces: [{name: of-user}], unit: DAY, requests_per_unit: 4}
    share_threshold: true
  - key: plan
    value: free
    rate_limit: {unlimited: true}
  - key: banned
    rate_limit: {name: never, unit: month, requests_per_unit: 0}
  - key: tried
    shadow_mode: true
    rate_limit: {unit: day, requests_per_unit: 1}
";

fn start_yaml(yaml: &str) -> (Redis, Gateway, Grpc) {
    let redis = Redis::start();
    let config = format!("{}{LISTENER}[ratelimit]\nconfiguration = \"edge.yaml\"\n", redis.store());
    let gateway = Gateway::start_with(&config, &[("edge.yaml", yaml)]);
    let client = Grpc::connect(gateway.address);
    (redis, gateway, client)
}

#[test]
fn yaml_limits_replace_each_other_share_thresholds_and_deny_all() {
    let (_redis, gateway, client) = start_yaml(YAML);
    assert!(!gateway.log().contains("admits every call"), "{}", gateway.log());
    let user = || descriptor(&[("user", "a")]);
    let gold = |suffix: &str| descriptor(&[("plan", &format!("gold{suffix}"))]);
    for expected in [(Admitted, 1), (Admitted, 0), (OverLimit, 0)] {
        assert_eq!(client.answer(&[user()]), Answer(expected.0, vec![expected]));
    }
    assert_eq!(client.answer(&[descriptor(&[("user", "b")])]).1, [(Admitted, 1)], "each value has its own state");
    // The user is denied, but the limit of the plan replaces the limit of the user. All gold plans share one state.
    for remaining in [3, 2] {
        assert_eq!(client.answer(&[user(), gold("1")]), Answer(Admitted, vec![(Admitted, 0), (Admitted, remaining)]));
    }
    assert_eq!(client.answer(&[gold("2")]).1, [(Admitted, 1)]);
    let unlimited = client.ask(&request(&[descriptor(&[("plan", "free")])]));
    assert_eq!(summary(&unlimited), Answer(Admitted, vec![(Admitted, u32::MAX)]));
    assert_eq!(unlimited.statuses[0].current_limit, None);
    for _ in 0..3 {
        assert_eq!(client.answer(&[descriptor(&[("tried", "x")])]).0, Admitted, "a shadow limit denies nothing");
    }
    let banned = client.ask(&request(&[gold("3"), descriptor(&[("banned", "x")])]));
    assert_eq!(banned.overall_code(), OverLimit);
    let limit = banned.statuses[1].current_limit.as_ref().unwrap();
    assert_eq!((limit.requests_per_unit, limit.unit(), &*limit.name), (0, Unit::Month, "never"));
    assert_eq!(client.answer(&[gold("4")]).1, [(Admitted, 0)], "the denied call has charged nothing");
}

#[test]
fn yaml_limit_replaces_several_limits() {
    let limit = |key: &str, more: &str| {
        format!("  - key: {key}\n    rate_limit: {{name: of-{key}, unit: day, requests_per_unit: 1{more}}}\n")
    };
    let replaces = ", replaces: [{name: of-one}, {name: of-two}]";
    let [one, two] = ["one", "two"].map(|key| limit(key, ""));
    let yaml = format!("domain: edge\ndescriptors:\n{one}{two}{}", limit("both", replaces).replace(": 1,", ": 3,"));
    let (_redis, _gateway, client) = start_yaml(&yaml);
    let call = ["one", "two", "both"].map(|key| descriptor(&[(key, "a")]));
    for remaining in [2, 1, 0] {
        assert_eq!(client.answer(&call), Answer(Admitted, vec![(Admitted, 0), (Admitted, 0), (Admitted, remaining)]));
    }
    assert_eq!(client.answer(&call).0, OverLimit);
    assert_eq!(client.answer(&call[..2]), Answer(Admitted, vec![(Admitted, 0), (Admitted, 0)]), "not charged");
}

#[test]
fn denied_call_retries_when_the_first_of_its_quotas_is_free() {
    let quota = |key: &str, unit: &str| {
        format!(
            "  - key: {key}\n    quota_mode: true\n    rate_limit: {{name: of-{key}, unit: {unit}, requests_per_unit: 1}}\n"
        )
    };
    let yaml = format!("domain: edge\ndescriptors:\n{}{}", quota("slow", "day"), quota("fast", "minute"));
    let (_redis, _gateway, client) = start_yaml(&yaml);
    let call = request(&["slow", "fast"].map(|key| descriptor(&[(key, "")])));
    assert_eq!(client.ask(&call).overall_code(), Admitted);
    let denied = client.ask(&call);
    let retry: u64 = headers(&denied).iter().find(|(name, _)| *name == "retry-after").unwrap().1.parse().unwrap();
    assert!(denied.overall_code() == OverLimit && retry <= 60, "{denied:?}");
}

/// Limits of one descriptor with a token bucket: the status is that of the limit that denies the call, and tells when
/// the call can be repeated.
#[test]
fn status_is_that_of_the_limit_that_denies() {
    let config = r#"
[limit.small]
by = "entry:user"
quota = "60/min"
[limit.large]
by = "entry:user"
quota = "600/day"
algorithm = "fixed-window"
[[descriptor]]
domain = "edge"
entries = ["user"]
limits = ["small", "large"]
[[descriptor]]
domain = "edge"
entries = ["large=1", "user"]
limits = ["large"]
"#;
    let (_redis, _gateway, client) = start(config);
    let hits = |count, descriptor| request(&[RateLimitDescriptor { hits_addend: Some(count), ..descriptor }]);
    let user = || descriptor(&[("user", "a")]);
    let used = client.ask(&hits(500, descriptor(&[("large", "1"), ("user", "a")])));
    assert_eq!(summary(&used), Answer(Admitted, vec![(Admitted, 100)]));
    assert_eq!(client.ask(&hits(40, user())).overall_code(), Admitted);
    // 20 tokens are left in the small limit, which has used two thirds of its quota, and 60 in the large one.
    let denied = client.ask(&hits(30, user()));
    assert_eq!(summary(&denied), Answer(OverLimit, vec![(OverLimit, 0)]));
    assert_eq!(denied.statuses[0].current_limit.as_ref().unwrap().name, "small");
    let wait = denied.statuses[0].duration_until_reset.unwrap();
    assert!((5..=11).contains(&wait.seconds), "10 tokens are missing: {wait:?}");
}

/// A denial from the cache does not charge the default cost again: it repeats a denial that was charged.
#[test]
fn repeated_denial_charges_the_default_cost_once() {
    let config = CONFIG.replace("3/day\"\nalgorithm = \"fixed-window\"", "60/min\"\nburst = 1\ncharge = \"always\"");
    let (_redis, _gateway, client) = start(&config);
    assert_eq!(client.answer(&[login("a")]).0, Admitted);
    for _ in 0..50 {
        assert_eq!(client.answer(&[login("a")]).0, OverLimit);
    }
    // A peek is not answered from the cache.
    let peek = RateLimitDescriptor { hits_addend: Some(0), ..login("a") };
    let denied = client.ask(&request(&[peek]));
    let wait = denied.statuses[0].duration_until_reset.unwrap();
    assert!(wait.seconds < 10, "50 denials have charged their cost: {wait:?}");
}

#[test]
fn yaml_domain_applies_the_limit_of_a_call_without_a_descriptor() {
    let (_redis, _gateway, client) = start_yaml(YAML);
    let with_limit = |requests_per_unit: u32| RateLimitDescriptor {
        limit: Some(RateLimitOverride { requests_per_unit, unit: Unit::Hour.into() }),
        ..descriptor(&[("other", "x")])
    };
    assert_eq!(client.answer(&[descriptor(&[("other", "x")])]).1, [(Admitted, 0)], "no limit");
    for expected in [(Admitted, 1), (Admitted, 0), (OverLimit, 0)] {
        let response = client.ask(&request(&[with_limit(2)]));
        assert_eq!(summary(&response).1, [expected]);
        let limit = response.statuses[0].current_limit.as_ref().unwrap();
        assert_eq!((limit.requests_per_unit, limit.unit()), (2, Unit::Hour));
    }
    assert_eq!(client.answer(&[with_limit(0)]).0, OverLimit);
    let unknown = RateLimitRequest { domain: "unknown".into(), ..request(&[with_limit(0)]) };
    assert_eq!(client.ask(&unknown).overall_code(), Admitted, "the domain does not exist");
}

/// Envoy charges tokens when a stream ends, perhaps more than what remains.
#[test]
fn yaml_limits_go_into_debt() {
    let (_redis, _gateway, client) = start_yaml(YAML);
    let hits = |hits: u64| RateLimitDescriptor { hits_addend: Some(hits), ..descriptor(&[("user", "a")]) };
    assert_eq!(client.answer(&[hits(0)]).0, Admitted);
    assert_eq!(client.answer(&[hits(387)]).0, OverLimit);
    assert_eq!(client.answer(&[hits(0)]).0, OverLimit, "the charge counts");
}

#[test]
fn changed_yaml_is_reloaded_and_faulty_yaml_is_not() {
    let redis = Redis::start();
    let config = format!("{}{LISTENER}[ratelimit]\nconfiguration = \".\"\n", redis.store());
    let gateway = Gateway::start_with(&with_admin(&config), &[("a.yaml", YAML)]);
    let client = Grpc::connect(gateway.address);
    let remaining = |key: &str| client.answer(&[descriptor(&[(key, "a")])]).1[0];
    assert_eq!(remaining("user"), (Admitted, 1));
    gateway.put_file("a.yaml", &YAML.replace("requests_per_unit: 2", "requests_per_unit: 200000"));
    eventually("the new quota applies", || remaining("user").1 > 100_000);
    gateway.put_file("b.yaml", "domain: more\ndescriptors:\n- key: k\n  rate_limt: {}\n");
    eventually("the error is in the log", || gateway.log().contains("did you mean `rate_limit`?"));
    assert_eq!(metric(&gateway, "config_last_reload_successful"), 0.0);
    assert!(remaining("user").1 > 100_000, "the active configuration stays in use");
    let more = "domain: more\ndescriptors:\n- key: k\n  rate_limit: {unit: day, requests_per_unit: 5}\n";
    gateway.put_file("b.yaml", more);
    let other = RateLimitRequest { domain: "more".into(), ..request(&[descriptor(&[("k", "v")])]) };
    eventually("the added file applies", || client.ask(&other).statuses[0].current_limit.is_some());
}

#[test]
fn quota_of_zero_in_a_call_denies_it() {
    let (_redis, _gateway, client) = start(CONFIG);
    let limit = Some(RateLimitOverride { requests_per_unit: 0, unit: Unit::Hour.into() });
    let response = client.ask(&request(&[RateLimitDescriptor { limit, ..all() }]));
    assert_eq!(summary(&response), Answer(OverLimit, vec![(OverLimit, 0)]));
    let unlimited = RateLimitDescriptor { limit, ..login("127.0.0.1") };
    assert_eq!(client.answer(&[unlimited]).0, Admitted);
    assert_eq!(client.answer(&[all()]).1, [(Admitted, 4)]);
}

// === Descriptors that are decided on their own ===

const QUOTAS: &str = "
domain: edge
descriptors:
  - key: service
    value: one
    quota_mode: true
    rate_limit: {name: of-one, unit: day, requests_per_unit: 1}
    metadata: {use: {name: one}, only: 1}
  - key: service
    value: two
    quota_mode: true
    rate_limit: {name: of-two, unit: day, requests_per_unit: 2}
    metadata: {use: {name: two, more: yes}}
  - key: user
    rate_limit: {name: of-user, unit: day, requests_per_unit: 3}
  - key: all
    rate_limit: {name: of-all, unit: day, requests_per_unit: 9}
    metadata: {all: 1}
";

fn service(name: &str) -> RateLimitDescriptor {
    descriptor(&[("service", name)])
}

fn text(value: &str) -> envoy::Value {
    value.into()
}

/// Return the value at nested keys of the metadata of a response.
fn metadata(response: &RateLimitResponse, keys: &[&str]) -> Option<envoy::Value> {
    let mut value = envoy::Value { kind: Some(Kind::Object(response.dynamic_metadata.clone()?)) };
    for key in keys {
        let Some(Kind::Object(Struct { mut fields })) = value.kind else { return None };
        value = fields.remove(*key)?;
    }
    Some(value)
}

#[test]
fn call_is_denied_when_all_its_quotas_are_over() {
    let (_redis, _gateway, client) = start_yaml(QUOTAS);
    let call = request(&[service("one"), service("two")]);
    let first = client.ask(&call);
    assert_eq!(summary(&first), Answer(Admitted, vec![(Admitted, 0), (Admitted, 1)]));
    let name = metadata(&first, &["metadata", "use", "name"]);
    assert_eq!(name, Some(text("one")), "the first descriptor wins");
    assert_eq!(metadata(&first, &["metadata", "use", "more"]), Some(Kind::Bool(true).into()), "objects are merged");
    assert_eq!(metadata(&first, &["metadata", "only"]), Some(Kind::Number(1.0).into()));
    let second = client.ask(&call);
    assert_eq!(summary(&second), Answer(Admitted, vec![(OverLimit, 0), (Admitted, 0)]));
    assert_eq!(metadata(&second, &["metadata", "use", "name"]), Some(text("two")), "one is over");
    assert_eq!(metadata(&second, &["metadata", "only"]), None);
    let fields = headers(&second);
    assert!(fields.iter().all(|(name, value)| *name != "retry-after" && !value.contains("of-one")), "{fields:?}");
    let third = client.ask(&call);
    assert_eq!(summary(&third), Answer(OverLimit, vec![(OverLimit, 0), (OverLimit, 0)]));
    assert_eq!(metadata(&third, &["metadata"]), None);
    assert!(headers(&third).iter().any(|(name, _)| *name == "retry-after"), "{third:?}");
    let both = Kind::List(List { values: vec![text("of-one"), text("of-two")] });
    assert_eq!(metadata(&third, &["denied_by"]), Some(both.into()));
}

/// An enforced descriptor and quotas in one call: whichever denies the call, the other is not charged.
#[test]
fn quotas_and_enforced_descriptors_charge_only_what_is_admitted() {
    let (_redis, _gateway, client) = start_yaml(QUOTAS);
    let user = || descriptor(&[("user", "a")]);
    let peek = |descriptor| RateLimitDescriptor { hits_addend: Some(0), ..descriptor };
    assert_eq!(client.answer(&[user(), service("one")]), Answer(Admitted, vec![(Admitted, 2), (Admitted, 0)]));
    for _ in 0..5 {
        assert_eq!(client.answer(&[user(), service("one")]).0, OverLimit, "the quota denies");
    }
    assert_eq!(client.answer(&[peek(user())]).1, [(Admitted, 2)], "the calls that the quota denies are refunded");
    assert_eq!(client.answer(&[user(), user()]).1, [(Admitted, 0), (Admitted, 0)]);
    for _ in 0..5 {
        assert_eq!(client.answer(&[service("two"), user()]), Answer(OverLimit, vec![(Admitted, 0), (OverLimit, 0)]));
    }
    assert_eq!(client.answer(&[peek(service("two"))]).1, [(Admitted, 2)], "the quota is not charged");
}

/// A sliding log finds what it refunds by the time of the charge.
#[test]
fn quotas_refund_a_sliding_log() {
    let config = CONFIG.replace("3/day\"\nalgorithm = \"fixed-window\"", "3/day\"\nalgorithm = \"sliding-log\"");
    let config = config.replace("limits = [\"all\"]\n", "limits = [\"all\"]\nquota_mode = true\n");
    let (_redis, _gateway, client) = start(&config);
    let spent = RateLimitDescriptor { hits_addend: Some(5), ..all() };
    assert_eq!(client.answer(&[login("a"), spent]), Answer(Admitted, vec![(Admitted, 2), (Admitted, 0)]));
    for _ in 0..5 {
        assert_eq!(client.answer(&[login("a"), all()]), Answer(OverLimit, vec![(Admitted, 2), (OverLimit, 0)]));
    }
    assert_eq!(client.answer(&[login("a")]).1, [(Admitted, 1)], "the calls that the quota denies are refunded");
}

#[test]
fn descriptors_are_independent_without_atomic() {
    let redis = Redis::start();
    let config = format!(
        "{}{LISTENER}[ratelimit]\nconfiguration = \"edge.yaml\"\natomic = false\ndynamic_metadata = true\n",
        redis.store()
    );
    let gateway = Gateway::start_with(&with_admin(&config), &[("edge.yaml", QUOTAS)]);
    let client = Grpc::connect(gateway.address);
    let call = request(&[descriptor(&[("all", "")]), descriptor(&[("user", "a")])]);
    for remaining in [2, 1, 0] {
        let answer = summary(&client.ask(&call));
        assert_eq!(answer, Answer(Admitted, vec![(Admitted, remaining + 6), (Admitted, remaining)]));
    }
    for remaining in [5, 4] {
        let response = client.ask(&call);
        assert_eq!(summary(&response), Answer(OverLimit, vec![(Admitted, remaining), (OverLimit, 0)]));
        let policy = headers(&response)[0].1;
        assert!(policy.contains("of-all") && policy.contains("of-user"), "{policy}");
        assert_eq!(metadata(&response, &["metadata", "all"]), Some(Kind::Number(1.0).into()));
    }
    let limit = Some(RateLimitOverride { requests_per_unit: 5, unit: Unit::Week.into() });
    let described = RateLimitRequest {
        hits_addend: 2,
        ..request(&[RateLimitDescriptor { limit, hits_addend: Some(1), ..descriptor(&[("k", "v"), ("l", "")]) }])
    };
    let response = client.ask(&described);
    let entries = Kind::List(List { values: vec![text("k=v"), text("l=")] });
    let fields = [
        ("entries", entries),
        ("hitsAddend", Kind::Number(1.0)),
        ("limit", Kind::Text("requests_per_unit:5 unit:WEEK".to_owned())),
    ];
    let object = Kind::Object(Struct { fields: fields.map(|(name, kind)| (name.to_owned(), kind.into())).into() });
    let descriptors = Kind::List(List { values: vec![object.into()] });
    assert_eq!(metadata(&response, &["descriptors"]), Some(descriptors.into()));
    assert_eq!(metadata(&response, &["domain"]), Some(text("edge")));
    assert_eq!(metadata(&response, &["hitsAddend"]), Some(Kind::Number(2.0).into()));
    let long = client.ask(&request(&[descriptor(&[("all", &"x".repeat(20_000))])]));
    assert_eq!((long.overall_code(), metadata(&long, &["descriptors"])), (Admitted, None), "a long call");
}

#[test]
fn client_that_reads_no_responses_is_no_longer_read() {
    const CALLS: usize = 200_000;
    let redis = Redis::start();
    let gateway = Gateway::start(&format!("{}{LISTENER}{CONFIG}", redis.store()));
    let client = Grpc::connect(gateway.address);
    assert_eq!(client.answer(&[descriptor(&[("generic_key", "other")])]).0, Admitted);
    let before = gateway.memory();
    let body = framed(&request(&[descriptor(&[("generic_key", "other")])]).encode_to_vec());
    let headers = block("POST", METHOD, &[("content-type", "application/grpc")]);
    let mut deaf = Http2::connect(gateway.address, &[]);
    deaf.stream.set_write_timeout(Some(Duration::from_secs(2))).unwrap();
    // Each write fails when the buffers of both sides are full.
    let sent = (0..CALLS).take_while(|index| {
        let stream = 2 * *index as u32 + 1;
        let call = [frame(HEADERS, END_HEADERS, stream, &headers), frame(DATA, END_STREAM, stream, &body)].concat();
        deaf.send(&call).is_ok()
    });
    let sent = sent.count();
    assert!(sent < CALLS, "the gateway still reads after {sent} calls");
    for _ in 0..50 {
        assert_eq!(client.answer(&[descriptor(&[("generic_key", "other")])]).0, Admitted);
    }
    let grown = gateway.memory().saturating_sub(before);
    println!("{sent} calls without reading, {} KiB", grown >> 10);
    assert!(grown < 64 << 20, "{grown} bytes");
}

#[test]
fn floods_of_resets_leave_the_service_usable() {
    let redis = Redis::start();
    let config = format!("{}{LISTENER}{CONFIG}[ratelimit]\ndynamic_metadata = true\n", redis.store());
    let gateway = Gateway::start(&with_admin(&config));
    let client = Grpc::connect(gateway.address);
    assert_eq!(client.answer(&[descriptor(&[("generic_key", "other")])]).0, Admitted);
    let before = gateway.memory();
    let long = request(&[descriptor(&[("generic_key", &"x".repeat(15 << 10))])]);
    for _ in 0..20 {
        let flood = Grpc::connect(gateway.address);
        for _ in 0..200 {
            flood.abandon(METHOD, framed(&long.encode_to_vec()));
        }
        assert_eq!(client.answer(&[descriptor(&[("generic_key", "other")])]).0, Admitted);
    }
    let grown = gateway.memory().saturating_sub(before);
    assert!(grown < 128 << 20, "{grown} bytes");
}

#[test]
fn quota_mode_and_metadata_work_with_limits_of_the_configuration() {
    let config = CONFIG.replace(
        "limits = [\"login\"]\n",
        "limits = [\"login\"]\nquota_mode = true\nmetadata = { pool = { name = \"login\", weight = 2 } }\n",
    );
    let config = config.replace("limits = [\"all\"]\n", "limits = [\"all\"]\nquota_mode = true\n");
    let (_redis, _gateway, client) = start(&config);
    for expected in [Admitted, Admitted, Admitted, OverLimit] {
        let response = client.ask(&request(&[login("a"), all()]));
        assert_eq!((response.overall_code(), response.statuses[0].code()), (Admitted, expected));
        let weight = (expected == Admitted).then(|| Kind::Number(2.0).into());
        assert_eq!(metadata(&response, &["metadata", "pool", "weight"]), weight);
    }
    assert_eq!(client.answer(&[login("a"), all()]).0, Admitted);
    assert_eq!(client.answer(&[login("a"), all()]).0, OverLimit);
}

const DETAILED: &str = "
domain: edge
descriptors:
  - key: unspec
    detailed_metric: true
    rate_limit: {unit: day, requests_per_unit: 2}
  - key: plan
    value_to_metric: true
    descriptors:
      - key: user
        shadow_mode: true
        rate_limit: {unit: day, requests_per_unit: 1}
";

#[test]
fn hits_are_counted_with_the_names_of_envoyproxy_ratelimit() {
    let redis = Redis::start();
    let config = format!("{}{LISTENER}[ratelimit]\nconfiguration = \"edge.yaml\"\n", redis.store());
    let gateway = Gateway::start_with(&with_admin(&config), &[("edge.yaml", DETAILED)]);
    let client = Grpc::connect(gateway.address);
    let count = |name: &str, labels: &str| {
        let page = ask(&gateway, "GET", "/metrics");
        let sample = format!("ratelimit_service_{name}{{{labels}}} ");
        let found = page.text().lines().find_map(|line| line.strip_prefix(&*sample));
        found.unwrap_or_else(|| panic!("no {sample}in {}", page.text())).parse::<f64>().unwrap()
    };
    let hits = |kind: &str, labels: &str| count(&format!("rate_limit_{kind}"), &format!("domain=\"edge\",{labels}"));
    for _ in 0..3 {
        client.answer(&[descriptor(&[("unspec", "unspecified_value")])]);
        client.answer(&[descriptor(&[("plan", "10.0.0.1"), ("user", "a")])]);
    }
    let detailed = "key1=\"unspec_unspecified_value\"";
    for (kind, expected) in
        [("total_hits", 3.0), ("over_limit", 1.0), ("near_limit", 1.0), ("within_limit", 2.0), ("shadow_mode", 0.0)]
    {
        assert_eq!(hits(kind, detailed), expected, "{kind}");
    }
    let plan = "key1=\"plan_10_0_0_1\",key2=\"user\"";
    assert_eq!(["total_hits", "over_limit", "shadow_mode"].map(|kind| hits(kind, plan)), [3.0, 2.0, 2.0]);
    assert_eq!(count("total_requests", "grpc_method=\"ShouldRateLimit\""), 6.0);
    // Values that have no series of their own count for the descriptor.
    for value in 0..1_100 {
        client.answer(&[descriptor(&[("unspec", &value.to_string())])]);
    }
    let page = ask(&gateway, "GET", "/metrics");
    let series =
        page.text().lines().filter(|line| line.starts_with("ratelimit_service_rate_limit_total_hits{")).count();
    assert_eq!(series, 1_000);
    assert!(hits("total_hits", "key1=\"unspec\"") > 100.0);
    assert_eq!(metric(&gateway, "ratelimit_calls_total{result=\"allowed\"}"), 1105.0);
}

#[test]
fn descriptors_that_match_nothing_are_counted_by_domain() {
    let redis = Redis::start();
    let gateway = Gateway::start(&with_admin(&format!("{}{LISTENER}{CONFIG}", redis.store())));
    let client = Grpc::connect(gateway.address);
    client.answer(&[all(), descriptor(&[("x", "")]), descriptor(&[("y", "")])]);
    client.ask(&RateLimitRequest { domain: "other".into(), ..request(&[all()]) });
    let unmatched = |domain: &str| metric(&gateway, &format!("descriptors_unmatched_total{{domain=\"{domain}\"}}"));
    assert_eq!((unmatched("edge"), unmatched("")), (2.0, 1.0));
    client.send("POST", METHOD, &[], framed(b"\xff"));
    client.ask(&request(&vec![all(); 65]));
    let calls = |result: &str| metric(&gateway, &format!("ratelimit_calls_total{{result=\"{result}\"}}"));
    assert_eq!(["allowed", "denied", "unchecked", "invalid"].map(calls), [2.0, 0.0, 1.0, 1.0]);
}
