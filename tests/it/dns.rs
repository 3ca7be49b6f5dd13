//! DNS names of upstreams: the gateway uses all resolved addresses and follows changes. If the resolver fails, the
//! gateway keeps the known addresses.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use crate::support::dns::{DnsAnswer, NameServer};
use crate::support::gateway::Gateway;
use crate::support::upstream::Upstream;
use crate::support::{MAX_WAIT, eventually};
use hickory_resolver::proto::op::ResponseCode;
use hickory_resolver::proto::rr::RecordType;
use sluicegate::snapshot::CompiledConfig;
use sluicegate::upstream::cluster::UpstreamCluster;
use sluicegate::upstream::dns::{DnsCache, DnsResolver};
use sluicegate::upstream::endpoint::Endpoint;

/// Compile a configuration with one upstream per server. Return the upstream clusters.
fn fleets(servers: &[&str]) -> Vec<Arc<UpstreamCluster>> {
    fleets_with(servers, "")
}

/// As [`fleets`], with further settings of each upstream.
fn fleets_with(servers: &[&str], lines: &str) -> Vec<Arc<UpstreamCluster>> {
    let folder = tempfile::tempdir().unwrap();
    let mut config =
        "[[listener]]\naddress = \"127.0.0.1:0\"\n[[route]]\nname = \"r\"\npath = \"/\"\nrespond = { status = 200 }\n"
            .to_owned();
    for (index, server) in servers.iter().enumerate() {
        let scheme = if server.starts_with("srv") { "" } else { "http://" };
        config.push_str(&format!("[upstream.u{index}]\nservers = [\"{scheme}{server}\"]\n{lines}\n"));
    }
    let path = folder.path().join("gateway.toml");
    std::fs::write(&path, config).unwrap();
    let config = CompiledConfig::load(&path, &|_| None).unwrap_or_else(|error| panic!("{error}"));
    config.upstreams.into_iter().map(UpstreamCluster::new).map(Arc::new).collect()
}

/// Start a thread that resolves the DNS names of the clusters until the end of the test. Return when each name has been
/// looked up once.
fn follow(fleets: &[Arc<UpstreamCluster>], dns: &NameServer, search: &[&str]) {
    follow_with(fleets, dns.resolver(search));
}

fn follow_with(fleets: &[Arc<UpstreamCluster>], directory: DnsResolver) {
    let names = DnsCache::new(fleets);
    let (first, looked_up) = channel::<Infallible>();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(names.run(directory, first));
    });
    assert_eq!(looked_up.recv_timeout(MAX_WAIT), Err(RecvTimeoutError::Disconnected), "each name is looked up once");
}

fn member(fleet: &UpstreamCluster, address: &str) -> Option<Arc<Endpoint>> {
    let address: IpAddr = address.parse().unwrap();
    fleet.endpoints().iter().find(|member| member.address.is_some_and(|known| known.ip() == address)).cloned()
}

fn has(fleet: &UpstreamCluster, addresses: &[&str]) -> bool {
    fleet.endpoints().len() == addresses.len() && addresses.iter().all(|address| member(fleet, address).is_some())
}

#[test]
fn reload_keeps_resolved_addresses() {
    let dns = NameServer::start();
    dns.set_addresses("api.test", &["192.0.2.1", "192.0.2.2"], 60);
    let before = fleets(&["api.test:80"]);
    follow(&before, &dns, &[]);
    let settings = fleets(&["api.test:80"])[0].settings.clone();
    let after = Arc::new(UpstreamCluster::from_previous(settings, &before[0]));
    let other = fleets(&["other.test:80", "API.test:81"]);
    // This `DnsCache` does not run, so it sends no DNS queries. It only gives the known addresses to the new clusters.
    drop(DnsCache::new(&[after.clone(), other[1].clone()]));
    assert!(has(&after, &["192.0.2.1", "192.0.2.2"]), "{:?}", after.endpoints());
    assert!(has(&other[1], &["192.0.2.1", "192.0.2.2"]), "another upstream with the same DNS name");
}

#[test]
fn all_resolved_addresses_are_endpoints_and_changes_are_followed() {
    let dns = NameServer::start();
    dns.set_addresses("api.test", &["192.0.2.1", "192.0.2.2", "2001:db8::1"], 1);
    let fleets = fleets(&["api.test:8080"]);
    follow(&fleets, &dns, &[]);
    assert!(has(&fleets[0], &["192.0.2.1", "192.0.2.2", "2001:db8::1"]), "{:?}", fleets[0].endpoints());
    assert!(fleets[0].endpoints().iter().all(|member| member.address.unwrap().port() == 8080));
    let kept = member(&fleets[0], "192.0.2.2").unwrap();
    dns.set_addresses("api.test", &["192.0.2.3", "192.0.2.2"], 1);
    eventually("the new addresses", || has(&fleets[0], &["192.0.2.2", "192.0.2.3"]));
    assert!(Arc::ptr_eq(&kept, &member(&fleets[0], "192.0.2.2").unwrap()), "remaining endpoints are the same");
}

#[test]
fn dns_record_is_kept_for_its_ttl() {
    let dns = NameServer::start();
    for (name, ttl) in [("none.test", 0), ("one.test", 1), ("three.test", 3)] {
        dns.set_addresses(name, &["192.0.2.1"], ttl);
    }
    // The smaller TTL of the A and AAAA records determines the time of the next query.
    dns.set_answer("three.test", RecordType::AAAA, DnsAnswer::At(vec!["2001:db8::1".parse().unwrap()], 100));
    let fleets = fleets(&["none.test", "one.test", "three.test"]);
    follow(&fleets, &dns, &[]);
    for (name, wait) in [("none.test", 1), ("one.test", 1), ("three.test", 3)] {
        eventually(name, || dns.query_times(name).len() >= 3);
        let gaps = dns.query_times(name).windows(2).map(|pair| pair[1] - pair[0]).min().unwrap();
        assert!(gaps >= Duration::from_secs(wait), "{name}: {gaps:?}");
    }
}

#[test]
fn failing_resolver_keeps_the_last_addresses() {
    let dns = NameServer::start();
    let cases = [
        ("servfail.test", DnsAnswer::Code(ResponseCode::ServFail)),
        ("nxdomain.test", DnsAnswer::Code(ResponseCode::NXDomain)),
        ("refused.test", DnsAnswer::Code(ResponseCode::Refused)),
        ("empty.test", DnsAnswer::Code(ResponseCode::NoError)),
        ("silent.test", DnsAnswer::Nothing),
    ];
    let names = cases.each_ref().map(|(name, _)| *name);
    names.iter().for_each(|name| dns.set_addresses(name, &["192.0.2.1", "2001:db8::1"], 1));
    let fleets = fleets(&names);
    follow(&fleets, &dns, &[]);
    cases.iter().for_each(|(name, say)| dns.set_both(name, say));
    let before = names.map(|name| dns.query_times(name).len());
    for ((name, before), fleet) in names.iter().zip(before).zip(&fleets) {
        // Wait for three more queries: the query in flight, a failed query, and the query after the failure.
        eventually(name, || dns.query_times(name).len() >= before + 3);
        assert!(has(fleet, &["192.0.2.1", "2001:db8::1"]), "{name}: {:?}", fleet.endpoints());
    }
    names.iter().for_each(|name| dns.set_addresses(name, &["192.0.2.9"], 1));
    for (name, fleet) in names.iter().zip(&fleets) {
        eventually(name, || has(fleet, &["192.0.2.9"]));
    }
}

#[test]
fn failing_address_family_keeps_its_last_addresses() {
    let dns = NameServer::start();
    dns.set_addresses("dual.test", &["192.0.2.1", "2001:db8::1"], 1);
    let fleets = fleets(&["dual.test"]);
    follow(&fleets, &dns, &[]);
    dns.set_answer("dual.test", RecordType::A, DnsAnswer::At(vec!["192.0.2.2".parse().unwrap()], 1));
    dns.set_answer("dual.test", RecordType::AAAA, DnsAnswer::Code(ResponseCode::ServFail));
    eventually("the other family is followed", || has(&fleets[0], &["192.0.2.2", "2001:db8::1"]));
    dns.set_answer("dual.test", RecordType::AAAA, DnsAnswer::Code(ResponseCode::NoError));
    eventually("the removed address is gone", || has(&fleets[0], &["192.0.2.2"]));
}

#[test]
fn family_without_an_answer_does_not_delay_the_other_family_and_is_added_when_it_arrives() {
    for (silent, address, late) in
        [(RecordType::AAAA, "192.0.2.1", "2001:db8::1"), (RecordType::A, "2001:db8::1", "192.0.2.1")]
    {
        let dns = NameServer::start();
        dns.set_addresses("api.test", &[address], 60);
        dns.set_answer("api.test", silent, DnsAnswer::Nothing);
        let fleets = fleets(&["api.test"]);
        // The resolver itself would wait for longer than this test.
        follow_with(&fleets, dns.resolver_with_timeout(&[], Duration::from_secs(3600)));
        assert!(has(&fleets[0], &[address]), "{silent}: {:?}", fleets[0].endpoints());
        dns.release(late);
        eventually("the late address", || has(&fleets[0], &[address, late]));
    }
}

#[test]
fn only_the_chosen_family_is_resolved() {
    let dns = NameServer::start();
    dns.set_addresses("api.test", &["192.0.2.1", "2001:db8::1"], 60);
    for (resolve, addresses) in
        [("ipv4", &["192.0.2.1"][..]), ("ipv6", &["2001:db8::1"]), ("both", &["192.0.2.1", "2001:db8::1"])]
    {
        let fleets = fleets_with(&["api.test"], &format!("resolve = \"{resolve}\""));
        follow(&fleets, &dns, &[]);
        assert!(has(&fleets[0], addresses), "{resolve}: {:?}", fleets[0].endpoints());
    }
}

#[test]
fn reload_forgets_addresses_of_a_family_that_is_no_longer_resolved() {
    let dns = NameServer::start();
    dns.set_addresses("api.test", &["192.0.2.1", "2001:db8::1"], 60);
    for (resolve, addresses) in
        [("ipv4", &["192.0.2.1"][..]), ("ipv6", &["2001:db8::1"]), ("both", &["192.0.2.1", "2001:db8::1"])]
    {
        let before = fleets(&["api.test"]);
        follow(&before, &dns, &[]);
        let settings = fleets_with(&["api.test"], &format!("resolve = \"{resolve}\""))[0].settings.clone();
        let after = Arc::new(UpstreamCluster::from_previous(settings, &before[0]));
        // This `DnsCache` does not run, as if the next lookup failed.
        drop(DnsCache::new(std::slice::from_ref(&after)));
        assert!(has(&after, addresses), "{resolve}: {:?}", after.endpoints());
    }
}

#[test]
fn name_without_addresses_is_resolved_later() {
    let dns = NameServer::start();
    let fleets = fleets(&["late.test"]);
    follow(&fleets, &dns, &[]);
    assert!(fleets[0].endpoints().is_empty(), "{:?}", fleets[0].endpoints());
    eventually("the name is resolved again", || dns.query_times("late.test").len() >= 2);
    dns.set_addresses("late.test", &["192.0.2.1"], 60);
    eventually("the address is known", || has(&fleets[0], &["192.0.2.1"]));
}

#[test]
fn name_of_several_servers_is_resolved_once() {
    let dns = NameServer::start();
    dns.set_addresses("shared.test", &["192.0.2.1"], 60);
    let fleets = fleets(&["shared.test:81", "Shared.Test:82", "192.0.2.7:83", "[2001:db8::7]:84"]);
    follow(&fleets, &dns, &[]);
    let addresses: Vec<_> = fleets.iter().map(|fleet| fleet.endpoints()[0].address.unwrap().to_string()).collect();
    assert_eq!(addresses, ["192.0.2.1:81", "192.0.2.1:82", "192.0.2.7:83", "[2001:db8::7]:84"]);
    assert_eq!(dns.query_times("shared.test").len(), 1);
    assert!(DnsCache::new(&fleets[2..]).is_empty(), "addresses are not looked up");
}

#[test]
fn short_names_use_the_search_list() {
    let dns = NameServer::start();
    dns.set_addresses("api.corp.test", &["192.0.2.1"], 60);
    let fleets = fleets(&["api"]);
    follow(&fleets, &dns, &["lab.test", "corp.test"]);
    assert!(has(&fleets[0], &["192.0.2.1"]), "{:?}", fleets[0].endpoints());
}

fn gateway(server: &str) -> Gateway {
    Gateway::start(&format!(
        "[upstream.u]\nservers = [\"http://{server}\"]\n[[route]]\nname = \"r\"\npath = \"/\"\nupstream = \"u\"\n"
    ))
}

#[test]
fn localhost_is_resolved_from_the_hosts_file() {
    let upstream = Upstream::start();
    assert_eq!(gateway(&format!("localhost:{}", upstream.address.port())).get("/").status, 200);
}

#[test]
fn unknown_host_name_is_503() {
    // The resolver sends no query for names that end in `.invalid` (RFC 6761 §6.4).
    let gateway = gateway("no-such-server.invalid");
    let reply = gateway.get("/");
    reply.assert_problem(503, "no address");
    assert!(reply.header("retry-after").is_some() && !reply.text().contains("invalid"), "{}", reply.text());
    eventually("the failure is logged", || gateway.log().contains("cannot resolve host; the host has no address yet"));
    assert!(gateway.log().contains(r#""host":"no-such-server.invalid","upstreams":"u""#), "{}", gateway.log());
    assert_eq!(gateway.get("/").status, 503);
}

// ---- SRV records (RFC 2782) ------------------------------------------------------------------------

/// Return the address, the priority and the weight of each endpoint.
fn targets(fleet: &UpstreamCluster) -> Vec<(String, u16, u16)> {
    let target = |endpoint: &Arc<Endpoint>| {
        let target = endpoint.target.as_ref().unwrap();
        assert_eq!(*endpoint.server.authority, *format!("{}:{}", target.host, target.port));
        (endpoint.address.unwrap().to_string(), target.priority, target.weight)
    };
    let mut targets: Vec<_> = fleet.endpoints().iter().map(target).collect();
    targets.sort();
    targets
}

#[test]
fn targets_of_srv_records_are_endpoints_and_changes_are_followed() {
    const NAME: &str = "_http._tcp.api.test";
    let dns = NameServer::start();
    dns.set_addresses("a.test", &["192.0.2.1", "2001:db8::1"], 1);
    dns.set_addresses("b.test", &["192.0.2.2"], 1);
    dns.set_targets(NAME, &[(10, 30, 8001, "a.test"), (20, 0, 8002, "b.test")]);
    let fleets = fleets(&["srv:_http._tcp.api.test", "srv:_HTTP._tcp.api.test."]);
    follow(&fleets, &dns, &["search.test"]);
    let target = |address: &str, priority, weight| (address.to_owned(), priority, weight);
    let first =
        [target("192.0.2.1:8001", 10, 30), target("192.0.2.2:8002", 20, 0), target("[2001:db8::1]:8001", 10, 30)];
    for fleet in &fleets {
        eventually("all targets", || targets(fleet) == first);
    }
    // A target that does not resolve any more keeps its addresses if its name server fails, but not if its name is gone.
    dns.set_both("b.test", &DnsAnswer::Code(ResponseCode::ServFail));
    dns.set_targets(NAME, &[(10, 50, 8001, "a.test"), (20, 1, 8002, "b.test")]);
    let second =
        [target("192.0.2.1:8001", 10, 50), target("192.0.2.2:8002", 20, 1), target("[2001:db8::1]:8001", 10, 50)];
    eventually("the new weights", || targets(&fleets[0]) == second);
    dns.set_both("b.test", &DnsAnswer::Code(ResponseCode::NXDomain));
    eventually("only the other target", || targets(&fleets[0]).len() == 2);
    // `.` means that the service is not available. The gateway keeps the last targets, as after other errors.
    dns.set_targets(NAME, &[(0, 0, 0, "")]);
    let before = dns.query_count(NAME, RecordType::SRV);
    eventually("two more queries", || dns.query_count(NAME, RecordType::SRV) >= before + 4);
    assert_eq!(targets(&fleets[0]).len(), 2);
    dns.set_targets(NAME, &[(10, 50, 9001, "a.test")]);
    eventually("the new port", || {
        targets(&fleets[0]) == [target("192.0.2.1:9001", 10, 50), target("[2001:db8::1]:9001", 10, 50)]
    });
}

#[test]
fn family_of_a_target_without_an_answer_delays_no_target_and_is_added_when_it_arrives() {
    const NAME: &str = "_http._tcp.api.test";
    let dns = NameServer::start();
    dns.set_addresses("a.test", &["192.0.2.1"], 60);
    dns.set_answer("a.test", RecordType::AAAA, DnsAnswer::Nothing);
    dns.set_addresses("b.test", &["192.0.2.2", "2001:db8::2"], 60);
    dns.set_targets(NAME, &[(10, 30, 8001, "a.test"), (20, 0, 8002, "b.test")]);
    let fleets = fleets(&["srv:_http._tcp.api.test"]);
    // The resolver itself would wait for longer than this test.
    follow_with(&fleets, dns.resolver_with_timeout(&[], Duration::from_secs(3600)));
    let target = |address: &str, priority, weight| (address.to_owned(), priority, weight);
    let mut expected =
        vec![target("192.0.2.1:8001", 10, 30), target("192.0.2.2:8002", 20, 0), target("[2001:db8::2]:8002", 20, 0)];
    assert_eq!(targets(&fleets[0]), expected);
    dns.release("2001:db8::1");
    expected.insert(2, target("[2001:db8::1]:8001", 10, 30));
    eventually("the late address", || targets(&fleets[0]) == expected);
}

#[test]
fn reload_keeps_the_targets_of_srv_records() {
    let dns = NameServer::start();
    dns.set_addresses("a.test", &["192.0.2.1"], 60);
    dns.set_targets("_http._tcp.api.test", &[(10, 30, 8001, "a.test")]);
    let before = fleets(&["srv:_http._tcp.api.test"]);
    follow(&before, &dns, &[]);
    let settings = fleets(&["srv:_http._tcp.api.test"])[0].settings.clone();
    let after = Arc::new(UpstreamCluster::from_previous(settings, &before[0]));
    // This `DnsCache` does not run, so it sends no DNS queries.
    drop(DnsCache::new(std::slice::from_ref(&after)));
    assert_eq!(targets(&after), [("192.0.2.1:8001".to_owned(), 10, 30)]);
}
