//! Descriptors of a management server: streams over the wire, with the variables of envoyproxy/ratelimit and with
//! `[ratelimit] xds`.

use std::net::TcpListener;
use std::process::Command;

use bytes::Bytes;
use prost::Message;
use sluicegate::payload::envoy::{
    Entry, HealthCheckRequest, HealthCheckResponse, Kind, RateLimitDescriptor, RateLimitRequest, RateLimitResponse,
    ServingStatus,
};
use sluicegate::payload::xds::{Any, Descriptor, Policy, RATE_LIMIT_CONFIG, RateLimitConfig};

use super::hot_restart::hot_restart;
use crate::support::client::Client;
use crate::support::gateway::{Gateway, binary};
use crate::support::grpc::{Grpc, Reply, framed};
use crate::support::management::Management;
use crate::support::redis::free_port;
use crate::support::reload::{ask, metric, with_admin};
use crate::support::{eventually, signal};

const METHOD: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

/// A domain with a key `user` and this number of requests per day.
fn domain(name: &str, quota: u32) -> RateLimitConfig {
    let policy = Policy { unit: 4, requests_per_unit: quota, ..Policy::default() };
    let descriptor = Descriptor { key: "user".to_owned(), rate_limit: Some(policy), ..Descriptor::default() };
    RateLimitConfig { name: format!("of-{name}"), domain: name.to_owned(), descriptors: vec![descriptor] }
}

fn call(client: &Grpc, domain: &str, user: &str) -> Reply {
    let entry = Entry { key: "user".into(), value: Bytes::copy_from_slice(user.as_bytes()) };
    let descriptors = vec![RateLimitDescriptor { entries: vec![entry], ..RateLimitDescriptor::default() }];
    let request = RateLimitRequest { domain: domain.to_owned().into(), descriptors, hits_addend: 0 };
    client.call(METHOD, &request, &[("grpc-timeout", "10S")])
}

/// Return the quota that applies to a call.
fn quota(client: &Grpc, domain: &str, user: &str) -> u32 {
    let response: RateLimitResponse = call(client, domain, user).message();
    response.statuses[0].current_limit.as_ref().map_or(0, |limit| limit.requests_per_unit)
}

fn health(client: &Grpc) -> ServingStatus {
    let request = HealthCheckRequest::default();
    client.call("/grpc.health.v1.Health/Check", &request, &[]).message::<HealthCheckResponse>().status()
}

fn config(port: u16, more: &str) -> String {
    with_admin(&format!(
        "[[listener]]\naddress = \"127.0.0.1:0\"\nprotocol = \"ratelimit\"\n[[listener]]\naddress = \
         \"127.0.0.1:0\"\nprotocol = \"ratelimit-http\"\n[ratelimit]\nxds = {{ url = \"http://127.0.0.1:{port}\", node_id = \
         \"here\"{more} }}\n"
    ))
}

#[test]
fn valid_resources_are_accepted_and_invalid_ones_rejected_while_the_previous_stay() {
    let server = Management::start(0);
    let gateway = Gateway::start(&config(server.address.port(), ", node_metadata = { zone = \"a\" }"));
    let client = Grpc::connect(gateway.address);
    let first = server.request();
    assert_eq!((&*first.version_info, &*first.response_nonce, &*first.type_url), ("", "", RATE_LIMIT_CONFIG));
    let node = first.node.unwrap();
    assert_eq!((&*node.id, &*node.user_agent_name), ("here", "sluicegate"));
    let zone = &node.metadata.unwrap().fields["zone"];
    assert_eq!(zone.kind, Some(Kind::Text("a".to_owned())));
    // Before the first response, calls fail, so that `failure_mode_deny` of Envoy decides.
    assert_eq!(call(&client, "edge", "a").code(), 14);
    assert_eq!(health(&client), ServingStatus::NotServing);
    let healthcheck = || Client::connect(gateway.addresses()[1]).get("/healthcheck").status;
    assert_eq!(healthcheck(), 500);

    let accepted = server.exchange("1", &[domain("edge", 3), domain("other", 5)]);
    assert_eq!((&*accepted.version_info, accepted.error_detail), ("1", None));
    assert_eq!((quota(&client, "edge", "a"), quota(&client, "other", "a")), (3, 5));
    assert_eq!((health(&client), healthcheck()), (ServingStatus::Serving, 200));

    let mut faulty = domain("edge", 9);
    faulty.descriptors[0].rate_limit.as_mut().unwrap().unit = 99;
    let rejected = server.exchange("2", &[faulty, domain("new", 1)]);
    let reason = rejected.error_detail.unwrap();
    assert_eq!((&*rejected.version_info, reason.code), ("1", 3));
    assert!(reason.message.contains("unknown unit `99`") && reason.message.contains("xds:of-edge"), "{reason:?}");
    assert_eq!((quota(&client, "edge", "a"), quota(&client, "new", "a")), (3, 0));
    assert_eq!(metric(&gateway, "xds_responses_total{result=\"rejected\"}"), 1.0);
    assert_eq!(metric(&gateway, "config_last_reload_successful"), 0.0);
    // A reload of the file uses the previous resources as well.
    let reloads = |result: &str| metric(&gateway, &format!("config_reloads_total{{result=\"{result}\"}}"));
    let before = ["ok", "error"].map(reloads);
    let reply = ask(&gateway, "POST", "/api/reload");
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(["ok", "error"].map(reloads), [before[0] + 1.0, before[1]]);

    let garbage = Any { type_url: RATE_LIMIT_CONFIG.to_owned(), value: Bytes::from_static(b"\xff\xff") };
    let other_type = Any { type_url: "type.googleapis.com/google.protobuf.Empty".to_owned(), value: Bytes::new() };
    for (version, resource) in [("3", garbage), ("4", other_type)] {
        server.send_raw(version, vec![resource]);
        let rejected = server.request();
        assert_eq!((&*rejected.version_info, rejected.error_detail.unwrap().code), ("1", 3), "{version}");
    }
    // The next valid response is accepted: the counters of limits with the same window go on.
    let accepted = server.exchange("5", &[domain("edge", 4)]);
    assert_eq!((&*accepted.version_info, accepted.error_detail), ("5", None));
    assert_eq!((quota(&client, "edge", "a"), quota(&client, "other", "a")), (4, 0));
    let empty = server.exchange("6", &[]);
    assert_eq!(empty.error_detail, None);
    assert_eq!(quota(&client, "edge", "a"), 0, "no domain is left");
    assert_eq!(metric(&gateway, "xds_responses_total{result=\"accepted\"}"), 3.0);
    assert_eq!(metric(&gateway, "xds_responses_total{result=\"rejected\"}"), 3.0);
    assert_eq!(metric(&gateway, "xds_connected"), 1.0);
    assert_eq!(metric(&gateway, "config_last_reload_successful"), 1.0);
}

/// Servers send the resources in any order.
#[test]
fn resources_in_another_order_are_the_same() {
    let server = Management::start(0);
    let gateway = Gateway::start(&config(server.address.port(), ""));
    server.request();
    let reloads = || metric(&gateway, "config_reloads_total{result=\"ok\"}");
    assert_eq!(server.exchange("1", &[domain("edge", 3), domain("other", 5)]).error_detail, None);
    let before = reloads();
    for (version, names) in [("2", ["other", "edge"]), ("3", ["edge", "other"])] {
        let resources = names.map(|name| domain(name, if name == "edge" { 3 } else { 5 }));
        let accepted = server.exchange(version, &resources);
        assert_eq!((&*accepted.version_info, accepted.error_detail), (version, None));
    }
    assert_eq!(reloads(), before, "nothing has changed");
}

#[test]
fn reload_keeps_the_descriptors_of_the_server() {
    let server = Management::start(0);
    let text = config(server.address.port(), "");
    let gateway = Gateway::start(&text);
    server.request();
    assert_eq!(server.exchange("1", &[domain("edge", 3)]).error_detail, None);
    let client = Grpc::connect(gateway.address);
    gateway.put(&text.replace("[ratelimit]\n", "[client_ip]\nipv4_prefix = 31\n[ratelimit]\n"));
    eventually("the file is reloaded", || metric(&gateway, "config_reloads_total{result=\"ok\"}") == 2.0);
    assert_eq!(quota(&client, "edge", "a"), 3);
    gateway.put(&text.replace("here", "there"));
    eventually("a reload cannot change the node", || gateway.log().contains("ratelimit.xds"));
    assert_eq!(quota(&client, "edge", "a"), 3);
}

#[test]
fn gateway_starts_without_the_server_and_survives_its_restart() {
    let port = free_port();
    let gateway = Gateway::start(&config(port, ", ready_after = \"start\""));
    let client = Grpc::connect(gateway.address);
    assert_eq!((call(&client, "edge", "a").code(), health(&client)), (14, ServingStatus::Serving));
    eventually("an attempt fails", || gateway.log().contains("no stream from the xDS server"));
    let server = Management::start(port);
    server.request();
    assert_eq!(server.exchange("1", &[domain("edge", 3)]).error_detail, None);
    assert_eq!(quota(&client, "edge", "a"), 3);
    drop(server);
    eventually("the stream ends", || metric(&gateway, "xds_connected") == 0.0);
    assert_eq!(quota(&client, "edge", "a"), 3, "the descriptors stay in use");
    let server = Management::start(port);
    let again = server.request();
    // A server that has restarted may use the same version for other descriptors.
    assert_eq!((&*again.version_info, &*again.response_nonce), ("", ""));
    assert_eq!(server.exchange("1", &[domain("edge", 8)]).error_detail, None);
    assert_eq!(quota(&client, "edge", "a"), 8);
    // The same descriptors again need no reload.
    let reloads = metric(&gateway, "config_reloads_total{result=\"ok\"}");
    assert_eq!(server.exchange("2", &[domain("edge", 8)]).version_info, "2");
    assert_eq!(metric(&gateway, "config_reloads_total{result=\"ok\"}"), reloads);
}

/// A server that accepts connections, but never answers.
#[test]
fn silent_server_is_left_for_another_attempt() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let gateway = Gateway::start(&config(listener.local_addr().unwrap().port(), ""));
    let silent = listener.accept().unwrap();
    eventually("the client gives up", || gateway.log().contains("no connection within 10 s"));
    listener.accept().expect("another attempt");
    drop(silent);
}

/// The new process of a hot restart has no descriptors, but the old one has.
#[test]
fn hot_restart_without_the_server_leaves_the_old_process() {
    let server = Management::start(0);
    let mut gateway = Gateway::start(&config(server.address.port(), ""));
    server.request();
    assert_eq!(server.exchange("1", &[domain("edge", 3)]).error_detail, None);
    drop(server);
    eventually("the stream ends", || metric(&gateway, "xds_connected") == 0.0);
    signal(&gateway.child, "USR2");
    eventually("both processes try to connect", || gateway.log().matches("no stream from the xDS server").count() >= 9);
    eventually("the hot restart fails", || gateway.log().contains("hot restart failed"));
    assert!(gateway.log().contains("has sent no valid descriptors within 20 s"), "{}", gateway.log());
    assert!(gateway.child.try_wait().unwrap().is_none(), "the old process continues");
    assert_eq!(quota(&Grpc::connect(gateway.address), "edge", "a"), 3);
}

#[test]
fn malformed_streams_end_and_are_opened_again() {
    let server = Management::start(0);
    let gateway = Gateway::start(&config(server.address.port(), ""));
    server.request();
    assert_eq!(server.exchange("1", &[domain("edge", 3)]).error_detail, None);
    for (bytes, reason) in [
        (Bytes::from_static(b"\x01\0\0\0\x01a"), "it is compressed"),
        (Bytes::from_static(b"\0\xff\xff\xff\xff"), "the maximum is"),
        (framed(b"\xff\xff\xff"), "invalid message"),
    ] {
        server.send_bytes(bytes);
        let again = server.request();
        assert_eq!(again.node.unwrap().id, "here", "{reason}");
        assert!(gateway.log().contains(reason), "{}", gateway.log());
    }
    assert_eq!(quota(&Grpc::connect(gateway.address), "edge", "a"), 3);
    // A response of another type is ignored.
    let other = sluicegate::payload::xds::DiscoveryResponse { type_url: "other".to_owned(), ..Default::default() };
    server.send_bytes(framed(&other.encode_to_vec()));
    assert_eq!(server.exchange("2", &[domain("edge", 4)]).version_info, "2");
}

#[test]
fn variables_of_envoy_gateway_and_a_hot_restart() {
    let server = Management::start(0);
    let url = server.address.to_string();
    let drop_in = |_: &std::path::Path| -> Command {
        let mut command = binary();
        command.arg("ratelimit").envs([
            ("CONFIG_TYPE", "GRPC_XDS_SOTW"),
            ("CONFIG_GRPC_XDS_SERVER_URL", &*url),
            ("CONFIG_GRPC_XDS_NODE_ID", "envoy-ratelimit"),
            ("CONFIG_GRPC_XDS_NODE_METADATA", "a=b,c=d"),
            ("FORCE_START_WITHOUT_INITIAL_CONFIG", "true"),
            ("REDIS_SOCKET_TYPE", "tcp"),
            ("REDIS_URL", "127.0.0.1:1"),
            ("USE_STATSD", "false"),
            ("GRPC_HOST", "127.0.0.1"),
            ("GRPC_PORT", "0"),
            ("HOST", "127.0.0.1"),
            ("PORT", "0"),
            ("LOG_LEVEL", "info"),
            ("LOG_FORMAT", "json"),
        ]);
        command
    };
    let mut gateway = Gateway::start_by("", drop_in);
    assert_eq!(Client::connect(gateway.addresses()[1]).get("/healthcheck").status, 200);
    let node = server.request().node.unwrap();
    assert_eq!((&*node.id, node.metadata.unwrap().fields.len()), ("envoy-ratelimit", 2));
    assert_eq!(server.exchange("1", &[domain("edge", 3)]).error_detail, None);
    // Without Redis, the limits are enforced in memory.
    assert_eq!(quota(&Grpc::connect(gateway.address), "edge", "a"), 3);

    // The new process of a hot restart serves no call before it has descriptors.
    let address = gateway.address;
    let served = std::thread::spawn(move || {
        assert_eq!(server.request().node.unwrap().id, "envoy-ratelimit");
        assert_eq!(quota(&Grpc::connect(address), "edge", "a"), 3, "the old process serves");
        assert_eq!(server.exchange("1", &[domain("edge", 5)]).error_detail, None);
        server
    });
    let _successor = hot_restart(&mut gateway);
    assert_eq!(quota(&Grpc::connect(address), "edge", "a"), 5);
    drop(served.join().unwrap());
}
