//! Access rules (`allow` and `deny`) of listeners and routes, files that list networks, and requests for hosts that no
//! route names.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use http::Request;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use proptest::prelude::*;
use serde_json::Value;
use sluicegate::identity::access::NetworkSet;

use crate::support::client::{Client, Reply};
use crate::support::gateway::Gateway;
use crate::support::http2::{self, Answer};
use crate::support::random::property;
use crate::support::reload::{metric, reloads, with_admin};
use crate::support::upstream::Upstream;
use crate::support::{SetOnDrop, eventually};

fn local(last: u8) -> IpAddr {
    [127, 0, 0, last].into()
}

/// Send a GET request from the loopback address `client`.
fn get_from(client: IpAddr, address: SocketAddr, path: &str, headers: &[(&str, &str)]) -> Reply {
    Client::connect_from(client, address).get_with(path, headers)
}

/// Send a GET request over HTTP/2 and return the status of the response.
fn status_over_http2(address: SocketAddr, url: &str, headers: &[(&str, &str)]) -> u16 {
    let request = headers.iter().fold(Request::get(url), |request, (name, value)| request.header(*name, *value));
    let answers = http2::ask(address, [request.body(&b""[..]).unwrap()]);
    let Some(Answer::Response(status, ..)) = answers.into_iter().next() else { panic!("no response") };
    status.as_u16()
}

/// Wait until the access log contains at least `count` records, and return all records.
fn records(gateway: &Gateway, count: usize) -> Vec<Value> {
    let path = gateway.directory().join("access.log");
    let read = || std::fs::read_to_string(&path).unwrap_or_default();
    eventually("the requests are logged", || read().lines().count() >= count);
    read().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

const LOG: &str = "[log]\nformat = \"json\"\naccess = \"access.log\"\n";

// ---- the set of networks -------------------------------------------------------------------------

/// Generate a random network. Networks from this generator often overlap, adjoin or contain each other.
fn network() -> impl Strategy<Value = IpNet> {
    let ipv4 = (any::<[u8; 2]>(), 0..=32_u8).prop_map(|([high, low], prefix)| {
        IpNet::V4(Ipv4Net::new(Ipv4Addr::new(10 + high % 2, high % 4, low % 4, low), prefix).unwrap())
    });
    let ipv6 = (any::<[u8; 2]>(), 0..=128_u8).prop_map(|([high, low], prefix)| {
        let address = Ipv6Addr::new(0x2001, 0xdb8 + u16::from(high % 2), 0, 0, 0, 0, u16::from(high), u16::from(low));
        IpNet::V6(Ipv6Net::new(address, prefix).unwrap())
    });
    prop_oneof![3 => ipv4, 2 => ipv6]
}

/// Return the first and the last address of a network, and the addresses next to them.
fn edges(network: &IpNet) -> Vec<IpAddr> {
    match network.trunc() {
        IpNet::V4(network) => {
            let (first, last) = (network.network().to_bits(), network.broadcast().to_bits());
            let all =
                [first.wrapping_sub(1), first, first.wrapping_add(1), last.wrapping_sub(1), last, last.wrapping_add(1)];
            all.map(|bits| Ipv4Addr::from_bits(bits).into()).into()
        }
        IpNet::V6(network) => {
            let (first, last) = (network.network().to_bits(), network.broadcast().to_bits());
            let all =
                [first.wrapping_sub(1), first, first.wrapping_add(1), last.wrapping_sub(1), last, last.wrapping_add(1)];
            all.map(|bits| Ipv6Addr::from_bits(bits).into()).into()
        }
    }
}

#[test]
fn set_of_networks_agrees_with_each_network() {
    let input = (prop::collection::vec(network(), 0..40), network());
    property(20_000, 200, input, |(networks, other)| {
        let set = NetworkSet::new(networks.iter().copied());
        let mut compared = 0;
        for address in networks.iter().chain([&other]).flat_map(edges) {
            let expected = networks.iter().any(|network| network.contains(&address));
            assert_eq!(set.contains(address), expected, "{address} in {networks:?}");
            if let IpAddr::V4(address) = address {
                assert_eq!(set.contains(address.to_ipv6_mapped().into()), expected, "mapped {address} in {networks:?}");
            }
            compared += 1;
        }
        // A network is a contiguous range of addresses. It is therefore sufficient to test the first and last addresses
        // of all networks, and the addresses next to them.
        let points: Vec<_> = networks.iter().flat_map(edges).chain(edges(&other)).collect();
        let inside = points.iter().filter(|point| other.contains(*point));
        assert_eq!(set.covers(other), inside.clone().all(|point| set.contains(*point)), "{other} of {networks:?}");
        assert_eq!(set.intersects(other), inside.clone().any(|point| set.contains(*point)), "{other} and {networks:?}");
        compared
    });
}

// ---- clients -------------------------------------------------------------------------------------

#[test]
fn rules_of_listener_and_route_decide_by_the_client() {
    let upstream = Upstream::start();
    let gateway = Gateway::start(&format!(
        "{LOG}[[listener]]\naddress = \"127.0.0.1:0\"\ndeny = [\"127.0.0.4\"]\n[[listener]]\naddress = \"127.0.0.1:0\"\n\
         [limit.all]\nby = \"global\"\nquota = \"100/day\"\nalgorithm = \"fixed-window\"\n[upstream.u]\nservers = [\"{}\"]\n\
         [[route]]\nname = \"closed\"\npath = \"/closed\"\nupstream = \"u\"\nlimits = [\"all\"]\n\
         allow = [\"127.0.0.2\", \"127.0.0.4/30\", \"::ffff:127.0.0.8\"]\ndeny = [\"127.0.0.5/32\"]\n\
         [[route]]\nname = \"open\"\npath = \"/open\"\nupstream = \"u\"\nlimits = [\"all\"]\n",
        upstream.url()
    ));
    let addresses = gateway.addresses();
    for (listener, client, path, status) in [
        (0, 2, "/closed", 200),
        (0, 3, "/closed", 403),
        (0, 3, "/open", 200),
        // The first listener denies 127.0.0.4 on all paths, including paths that match no route.
        (0, 4, "/closed", 403),
        (0, 4, "/open", 403),
        (0, 4, "/nowhere", 403),
        (0, 3, "/nowhere", 404),
        (1, 4, "/closed", 200),
        (1, 5, "/closed", 403),
        (1, 8, "/closed", 200),
        (1, 4, "/nowhere", 404),
    ] {
        let (what, before) = (format!("{listener} {client} {path}"), upstream.count());
        // The client is not a trusted proxy, so the gateway ignores its `X-Forwarded-For`.
        let reply = get_from(local(client), addresses[listener], path, &[("x-forwarded-for", "127.0.0.2")]);
        match status {
            200 => assert_eq!(reply.status, 200, "{what}"),
            status => reply.assert_problem(status, &what),
        }
        assert_eq!(upstream.count() - before, usize::from(status == 200), "{what}");
        assert_eq!(reply.header("ratelimit").is_some(), status == 200, "{what}: a rejected request is not charged");
        if status == 403 {
            assert_eq!(reply.json()["detail"], "the client address is not allowed", "{what}");
            assert_eq!(reply.header("proxy-status"), Some("sluicegate;error=http_request_denied"), "{what}");
        }
    }
    // The rejected requests were not charged.
    assert_eq!(get_from(local(2), addresses[0], "/open", &[]).remaining("all"), 100 - 5);
    let log = records(&gateway, 12);
    let forbidden = |path: &str, route: Value| {
        let found = log.iter().find(|line| line["outcome"] == "forbidden" && line["path"] == path).unwrap();
        assert_eq!((&found["route"], &found["decision"]), (&route, &Value::Null), "{found}");
        found["client"].as_str().unwrap().to_owned()
    };
    assert_eq!(forbidden("/closed", "closed".into()), "127.0.0.3");
    assert_eq!(forbidden("/nowhere", Value::Null), "127.0.0.4");
}

#[test]
fn rejection_needs_no_store() {
    let gateway = Gateway::start(
        "[store]\nurl = \"redis://127.0.0.1:1\"\n[limit.all]\nby = \"global\"\nquota = \"1/day\"\non_store_error = \"deny\"\n\
         [[route]]\nname = \"r\"\npath = \"/\"\nrespond = { status = 200 }\nlimits = [\"all\"]\ndeny = [\"127.0.0.3\"]\n",
    );
    assert_eq!(get_from(local(2), gateway.address, "/", &[]).status, 503);
    for _ in 0..5 {
        assert_eq!(get_from(local(3), gateway.address, "/", &[]).status, 403);
    }
    // The gateway rejects this request without `100 Continue`, so the client need not send the body.
    let mut client = Client::connect_from(local(3), gateway.address);
    client.send(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n");
    assert_eq!(client.head().unwrap().status, 403);
}

/// A configuration with two listeners behind the trusted proxy 127.0.0.1. The second listener expects the PROXY
/// protocol.
const BEHIND_A_PROXY: &str = "[client_ip]\ntrusted_proxies = [\"127.0.0.1\"]\n\
     [[listener]]\naddress = \"127.0.0.1:0\"\nallow = [\"192.0.2.0/24\", \"2001:db8::/32\"]\n\
     [[listener]]\naddress = \"127.0.0.1:0\"\nproxy_protocol = true\nallow = [\"192.0.2.0/24\", \"2001:db8::/32\", \"127.0.0.1\"]\n\
     [[route]]\nname = \"r\"\npath = \"/\"\nrespond = { status = 200 }\ndeny = [\"192.0.2.66\"]\n";

#[test]
fn client_behind_a_trusted_proxy_is_decided_on() {
    let gateway = Gateway::start(BEHIND_A_PROXY);
    for (forwarded, status) in [
        (Some("192.0.2.1"), 200),
        (Some("2001:db8::7"), 200),
        (Some("::ffff:192.0.2.1"), 200),
        // Only the last address counts, because the trusted proxy appended it. The client may have forged the others.
        (Some("192.0.2.1, 198.51.100.1"), 403),
        (Some("198.51.100.1, 192.0.2.1"), 200),
        (Some("198.51.100.1"), 403),
        (Some("2001:db9::7"), 403),
        (Some("192.0.2.66"), 403),
        (Some("junk"), 403),
        // Without `X-Forwarded-For`, the address of the proxy counts. The listener does not allow it.
        (None, 403),
    ] {
        let headers: Vec<_> = forwarded.iter().map(|hops| ("x-forwarded-for", *hops)).collect();
        assert_eq!(gateway.client().get_with("/", &headers).status, status, "{forwarded:?}");
        assert_eq!(status_over_http2(gateway.address, "http://gateway.test/", &headers), status, "{forwarded:?}");
    }
    // 127.0.0.2 is not a trusted proxy, so its own address counts.
    let claimed = ("x-forwarded-for", "192.0.2.1");
    assert_eq!(get_from(local(2), gateway.address, "/", &[claimed]).status, 403);
}

#[test]
fn client_of_the_proxy_protocol_is_decided_on() {
    let gateway = Gateway::start(BEHIND_A_PROXY);
    let address = gateway.addresses()[1];
    for (header, status) in [
        ("PROXY TCP4 192.0.2.1 192.0.2.9 1 2\r\n", 200),
        ("PROXY TCP4 198.51.100.1 192.0.2.9 1 2\r\n", 403),
        ("PROXY TCP4 192.0.2.66 192.0.2.9 1 2\r\n", 403),
        ("PROXY TCP6 2001:db8::1 2001:db8::2 1 2\r\n", 200),
        ("PROXY TCP6 ::ffff:192.0.2.1 ::ffff:192.0.2.9 1 2\r\n", 200),
        // This PROXY header contains no client address, so the address of the proxy counts.
        ("PROXY UNKNOWN\r\n", 200),
    ] {
        let mut client = Client::connect(address);
        client.send(format!("{header}GET / HTTP/1.1\r\nHost: h\r\nX-Forwarded-For: 192.0.2.1\r\n\r\n").as_bytes());
        assert_eq!(client.reply().unwrap().status, status, "{header}");
        // The client address in the PROXY header also applies to later requests on the connection.
        assert_eq!(client.get("/").status, status, "{header}");
    }
}

// ---- files ---------------------------------------------------------------------------------------

const FILES: &str = "[[route]]\nname = \"r\"\npath = \"/\"\nrespond = { status = 200 }\ndeny = [\"127.0.0.9\", \"file:blocked.txt\"]\n\
                     [[route]]\nname = \"s\"\npath = \"/s\"\nrespond = { status = 200 }\nallow = [\"file:blocked.txt\"]\n";

#[test]
fn file_is_reloaded_and_a_bad_one_is_not() {
    let gateway = Gateway::start_with(FILES, &[("blocked.txt", "# abuse\n127.0.0.3\n")]);
    let status = |last: u8, path: &str| get_from(local(last), gateway.address, path, &[]).status;
    assert_eq!((status(3, "/"), status(4, "/"), status(9, "/")), (403, 200, 403));
    assert_eq!((status(3, "/s"), status(4, "/s")), (200, 403));
    // The new content of the file also applies to the next request on an open connection.
    let mut open = Client::connect_from(local(4), gateway.address);
    assert_eq!(open.get("/").status, 200);
    gateway.put_file("blocked.txt", "127.0.0.4/32 # abuse\r\n");
    eventually("the file is reloaded", || status(4, "/") == 403);
    assert_eq!((status(3, "/"), status(9, "/"), status(3, "/s"), status(4, "/s")), (200, 403, 403, 200));
    assert_eq!(open.get("/").status, 403);
    // An invalid file does not change the active rules. The gateway logs the error and its position in the file.
    let bad = [
        ("127.0.0.3\n127.0.0.300\n", "`127.0.0.300` is not an address or a network"),
        ("deny 127.0.0.3;\n", "write only the network in the line: 127.0.0.3"),
        ("", "the file is empty: if it lists no networks intentionally, write a comment into it"),
        (&"x\n".repeat(10_000), "9995 further lines are not networks"),
    ];
    for (index, (content, reason)) in bad.into_iter().enumerate() {
        gateway.put_file("blocked.txt", content);
        let message = "cannot reload the file: its previous content stays in force";
        eventually("the file is rejected", || gateway.log().matches(message).count() == index + 1);
        assert!(gateway.log().contains(reason), "{reason}: {}", gateway.log());
        assert_eq!((status(4, "/"), status(3, "/")), (403, 200), "{reason}");
    }
    assert!(gateway.log().contains("blocked.txt:2:1"), "{}", gateway.log());
    // A file with only a comment is accepted as an empty list.
    gateway.put_file("blocked.txt", "# none\n");
    eventually("the file is reloaded", || status(4, "/") == 200);
    assert_eq!((status(9, "/"), status(4, "/s")), (403, 403));
}

#[test]
fn configuration_reload_reads_rules_and_files_again() {
    let rules = |listener: &str, route: &str| {
        format!(
            "[[listener]]\naddress = \"127.0.0.1:0\"\n{listener}\n\
             [[route]]\nname = \"r\"\npath = \"/\"\nrespond = {{ status = 200 }}\n{route}\n"
        )
    };
    let gateway = Gateway::start(&with_admin(&rules("", "")));
    let mut client = Client::connect_from(local(3), gateway.address);
    let mut status = || client.get("/").status;
    assert_eq!(status(), 200);
    reloads(&gateway, &rules("deny = [\"127.0.0.3\"]", ""));
    assert_eq!(status(), 403, "the new rules also apply to an open connection");
    std::fs::write(gateway.directory().join("ours.txt"), "127.0.0.2\n").unwrap();
    reloads(&gateway, &rules("", "allow = [\"file:ours.txt\"]"));
    assert_eq!(status(), 403);
    gateway.put_file("ours.txt", "127.0.0.3\n");
    eventually("the new file is watched", || status() == 200);
    reloads(&gateway, &rules("", ""));
    assert_eq!(status(), 200);
}

#[test]
fn reloads_of_a_file_under_load_give_no_wrong_answer() {
    const RELOADS: usize = 20;
    const MANY: usize = 10_000;
    // All versions of the file contain 127.0.0.3, and no version contains 127.0.0.4. Versions with an odd number
    // contain 127.0.0.5. Every fourth version is invalid.
    let version = |round: usize| {
        let mut text: String =
            (0..MANY).map(|index| format!("10.{}.{}.{}/32\n", round, index / 256, index % 256)).collect();
        text.push_str("127.0.0.3\n");
        if round % 2 == 1 {
            text.push_str("127.0.0.5\n");
        }
        if round % 4 == 2 {
            text.push_str("no network\n");
        }
        text
    };
    let config = "[[route]]\nname = \"r\"\npath = \"/\"\nrespond = { status = 200 }\ndeny = [\"file:blocked.txt\"]\n";
    let gateway = Gateway::start_with(&with_admin(config), &[("blocked.txt", &version(0))]);
    let address = gateway.address;
    let (over, answered) = (AtomicBool::new(false), AtomicUsize::new(0));
    let counts = std::thread::scope(|scope| {
        let clients = [(3, 403), (4, 200), (3, 403), (4, 200)].map(|(last, expected)| {
            let (over, answered) = (&over, &answered);
            scope.spawn(move || {
                let mut client = Client::connect_from(local(last), address);
                let (mut right, mut wrong) = (0, 0);
                while !over.load(Ordering::SeqCst) {
                    let is_right = client.get("/").status == expected;
                    *(if is_right { &mut right } else { &mut wrong }) += 1;
                    answered.fetch_add(1, Ordering::SeqCst);
                }
                (right, wrong)
            })
        });
        let end = SetOnDrop(&over);
        let mut rejected = 0;
        for round in 1..=RELOADS {
            let before = answered.load(Ordering::SeqCst);
            gateway.put_file("blocked.txt", &version(round));
            match round % 4 {
                2 => {
                    rejected += 1;
                    let message = "cannot reload the file";
                    eventually("the file is rejected", || gateway.log().matches(message).count() == rejected);
                }
                odd_or_even => {
                    let expected = if odd_or_even % 2 == 1 { 403 } else { 200 };
                    eventually("the file is reloaded", || get_from(local(5), address, "/", &[]).status == expected);
                }
            }
            eventually("requests continue", || answered.load(Ordering::SeqCst) >= before + 100);
        }
        drop(end);
        clients.map(|client| client.join().unwrap())
    });
    let right: usize = counts.iter().map(|(right, _)| right).sum();
    let wrong: usize = counts.iter().map(|(_, wrong)| wrong).sum();
    println!("{RELOADS} reloads of {MANY} networks: {right} right, {wrong} wrong answers");
    assert_eq!(wrong, 0, "{counts:?}");
    assert!(metric(&gateway, "config_reloads_total{result=\"error\"}") < 1.0, "the configuration is not reloaded");
}

// ---- hosts ---------------------------------------------------------------------------------------

#[test]
fn unknown_hosts_are_misdirected() {
    let routes = |block: bool| {
        format!(
            "{LOG}[server]\nblock_unknown_hosts = {block}\n\
             [[route]]\nname = \"api\"\nhosts = [\"api.test\"]\npath = \"/api\"\nrespond = {{ status = 200 }}\n\
             [[route]]\nname = \"sub\"\nhosts = [\"*.wild.test\"]\npath = \"/api\"\nrespond = {{ status = 200 }}\n\
             [[route]]\nname = \"any\"\npath = \"/any\"\nrespond = {{ status = 200 }}\n"
        )
    };
    let (blocking, open) = (Gateway::start(&routes(true)), Gateway::start(&routes(false)));
    for (host, path, status, otherwise) in [
        ("api.test", "/api", 200, 200),
        ("API.test.:80", "/any", 200, 200),
        ("api.test", "/nowhere", 404, 404),
        ("a.b.wild.test", "/any", 200, 200),
        ("wild.test", "/any", 421, 200),
        ("evil.test", "/any", 421, 200),
        ("evil.test", "/api", 421, 404),
        ("127.0.0.1", "/any", 421, 200),
        ("xapi.test", "/any", 421, 200),
    ] {
        for (gateway, status) in [(&blocking, status), (&open, otherwise)] {
            let reply = gateway.client().get_with(path, &[("host", host)]);
            assert_eq!(reply.status, status, "{host}{path}");
            if status == 421 {
                reply.assert_problem(421, host);
                assert_eq!(reply.header("proxy-status"), Some("sluicegate;error=destination_not_found"));
            }
            assert_eq!(
                status_over_http2(gateway.address, &format!("http://{host}{path}"), &[]),
                status,
                "{host}{path}"
            );
        }
    }
    // The host of an absolute request target takes precedence over `Host`.
    let mut client = blocking.client();
    client.send(b"GET http://evil.test/any HTTP/1.1\r\nHost: api.test\r\n\r\n");
    assert_eq!(client.reply().unwrap().status, 421);
    client.send(b"GET http://api.test/any HTTP/1.1\r\nHost: evil.test\r\n\r\n");
    assert_eq!(client.reply().unwrap().status, 200);
    // An HTTP/1.0 request without `Host` counts as a request for an unknown host.
    client.send(b"GET /any HTTP/1.0\r\n\r\n");
    assert_eq!(client.reply().unwrap().status, 421);
    let log = records(&blocking, 1);
    let unknown = log.iter().find(|line| line["status"] == 421).unwrap();
    assert_eq!((&unknown["outcome"], &unknown["route"]), (&"unknown-host".into(), &Value::Null), "{unknown}");
}
