//! The times of ACME renewals: the window that the CA suggests (RFC 9773), and retries while the CA is down.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::support::acme::{
    config, is_ready, kill, listed, request_renewal, served, start_as, storage, time_s, trusting,
};
use crate::support::ca_proxy::{CaProxy, Fault, certificate_id, now_s, ok, suggestion};
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::pebble::Pebble;
use crate::support::reload::metric;

const DAY_S: u64 = 86_400;

/// If the CA suggests no renewal window, the gateway renews a certificate after this fraction of its lifetime
/// (numerator, denominator).
const RENEWAL_POINT: (u64, u64) = (2, 3);

/// Return the configuration of a gateway that connects to the CA through `proxy`.
fn behind(proxy: &CaProxy, pebble: &Pebble, names: &[&str]) -> String {
    config(pebble, names, "").replace(&pebble.directory, &proxy.directory)
}

/// Return the renewal information that a gateway has stored for the certificate of `name`.
fn renewal_record(gateway: &Gateway, name: &str) -> Value {
    let text = std::fs::read_to_string(storage(gateway).join(format!("{name}.renewal.json"))).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn is_recorded(gateway: &Gateway, name: &str) -> bool {
    storage(gateway).join(format!("{name}.renewal.json")).exists()
}

/// Wait until the planned renewal time of the certificate for `name` is within `window`. Return this time. All times
/// are in seconds since the Unix epoch.
fn planned_s(gateway: &Gateway, name: &str, window: [u64; 2]) -> u64 {
    let planned_s = || time_s(&listed(gateway, name), "next_renewal");
    eventually("the renewal is planned in the window", || (window[0]..=window[1]).contains(&planned_s()));
    planned_s()
}

#[test]
fn certificate_is_renewed_in_the_window_that_the_ca_suggests() {
    let pebble = Pebble::start();
    let proxy = CaProxy::start(&pebble, |number| {
        let (from_s, to_s) = if number == 0 { (4, 6) } else { (10 * DAY_S, 11 * DAY_S) };
        Some(suggestion(now_s() + from_s, now_s() + to_s, "21600"))
    });
    let gateway = start_as(&pebble, &behind(&proxy, &pebble, &["one.test"]));
    let client = trusting(&pebble);
    eventually("a certificate", || is_ready(&gateway));
    let first = served(&gateway, &client, "one.test").unwrap();
    eventually("the gateway reads the window", || is_recorded(&gateway, "one.test"));
    assert!(gateway.log().contains("https://ca.test/why"), "{}", gateway.log());
    let window = || {
        let window = renewal_record(&gateway, "one.test")["window"].clone();
        [window[0].as_u64().unwrap(), window[1].as_u64().unwrap()]
    };
    let renewal_s = planned_s(&gateway, "one.test", window());
    eventually("a renewal", || served(&gateway, &client, "one.test").is_some_and(|leaf| leaf != first));
    let second = served(&gateway, &client, "one.test").unwrap();
    eventually("the window of the new certificate", || proxy.asked().len() == 2);
    assert_eq!(proxy.asked(), [certificate_id(&first), certificate_id(&second)]);
    let orders = proxy.orders();
    let replaced: Vec<_> = orders.iter().map(|order| order.replaces.clone()).collect();
    assert_eq!(replaced, [None, Some(certificate_id(&first))]);
    assert!(orders[1].time_s >= renewal_s, "{orders:?}, planned at {renewal_s}");
    eventually("the new window is stored", || window()[0] > now_s() + 9 * DAY_S);
    planned_s(&gateway, "one.test", window());
    assert_eq!(pebble.orders(), 2, "{}", pebble.log());
}

#[test]
fn window_is_read_again_when_the_ca_says() {
    // Values of `Retry-After` in the CA's response, each with the number of seconds after which the gateway must read
    // the window again.
    let waits = [("5", 60), ("7200", 7200), ("864000", DAY_S), ("Fri, 31 Dec 1999 23:59:59 GMT", 60)];
    let names = ["a.test", "b.test", "c.test", "d.test"];
    let pebble = Pebble::start();
    let started_s = now_s();
    let proxy = CaProxy::start(&pebble, move |number| match number {
        0..4 => Some(suggestion(started_s + 10 * DAY_S, started_s + 30 * DAY_S, waits[number].0)),
        // This window is in the past, so the gateway must renew the certificate at once.
        4 => Some(suggestion(started_s - 20, started_s - 10, "7200")),
        // This window begins after the certificate expires.
        _ => Some(suggestion(started_s + 20_000 * DAY_S, started_s + 20_001 * DAY_S, "7200")),
    });
    let mut gateway = start_as(&pebble, &behind(&proxy, &pebble, &names));
    let client = trusting(&pebble);
    eventually("all windows", || names.iter().all(|name| is_recorded(&gateway, name)));
    let leaves = names.map(|name| served(&gateway, &client, name).unwrap());
    let ids = leaves.each_ref().map(certificate_id);
    assert_eq!(BTreeSet::from_iter(proxy.asked()), BTreeSet::from_iter(ids.clone()), "each window is read once");
    let mut planned = BTreeSet::new();
    for (name, id) in names.iter().zip(&ids) {
        let (header, wait_s) = waits[proxy.asked().iter().position(|asked| asked == id).unwrap()];
        let next_s = renewal_record(&gateway, name)["next_read_s"].as_u64().unwrap();
        assert!((started_s + wait_s - 1..=now_s() + wait_s).contains(&next_s), "{header}: {next_s}, from {started_s}");
        planned.insert(planned_s(&gateway, name, [10, 30].map(|days| started_s + days * DAY_S)));
    }
    assert_eq!(planned.len(), 4, "renewals are spread over the window: {planned:?}");

    // Store a past time for the next read of the window of `c.test`, so that the gateway reads it at once.
    kill(&mut gateway);
    let mut record = renewal_record(&gateway, "c.test");
    record["next_read_s"] = 1.into();
    std::fs::write(storage(&gateway).join("c.test.renewal.json"), record.to_string()).unwrap();
    let gateway = Gateway::start_file(&gateway.directory().join("gateway.toml"));
    eventually("it is renewed at once", || served(&gateway, &client, "c.test").is_some_and(|leaf| leaf != leaves[2]));
    eventually("the window of the new certificate", || proxy.asked().len() >= 6);
    let renewed = certificate_id(&served(&gateway, &client, "c.test").unwrap());
    assert_eq!(proxy.asked()[4..], [ids[2].clone(), renewed], "no other window is read early");
    assert_eq!(proxy.orders().len(), 5);
    assert_eq!(proxy.orders()[4].replaces.as_ref(), Some(&ids[2]));
    eventually("it is renewed before it expires, whatever the CA suggests", || {
        let entry = listed(&gateway, "c.test");
        let [from_s, to_s] = ["not_before", "not_after"].map(|key| time_s(&entry, key));
        time_s(&entry, "next_renewal") == to_s - (to_s - from_s) / 20
    });
}

#[test]
fn without_usable_renewal_information_two_thirds_of_the_lifetime_count() {
    let names = ["a.test", "b.test", "c.test", "d.test", "e.test", "f.test"];
    let pebble = Pebble::start();
    let proxy = CaProxy::start(&pebble, |number| match number {
        0 => Some(ok("{}", "Retry-After: 60\r\n").replace("200 OK", "404 Not Found")),
        1 => Some(ok("", "").replace("200 OK", "500 -")),
        2 => Some(ok("not JSON", "Retry-After: 60\r\n")),
        // A response with a window, but without `Retry-After` (RFC 9773 §4.3.3).
        3 => Some(suggestion(1, 2, "").replace("Retry-After: \r\n", "")),
        // A window whose end is not after its start (RFC 9773 §4.2).
        4 => Some(suggestion(1, 1, "60")),
        _ => None,
    });
    let gateway = start_as(&pebble, &behind(&proxy, &pebble, &names));
    let failures = || gateway.log().matches("cannot read the renewal window that the CA suggests").count();
    eventually("six failures", || names.iter().all(|name| is_recorded(&gateway, name)));
    for name in names {
        let entry = listed(&gateway, name);
        let [from_s, to_s, planned_s] = ["not_before", "not_after", "next_renewal"].map(|key| time_s(&entry, key));
        let (lifetime_s, due_s) = (to_s - from_s, from_s + (to_s - from_s) * RENEWAL_POINT.0 / RENEWAL_POINT.1);
        assert!((due_s..=due_s + lifetime_s / 20).contains(&planned_s), "{entry}");
        let record = renewal_record(&gateway, name);
        let next_s = record["next_read_s"].as_u64().unwrap();
        assert!(now_s() < next_s && next_s <= now_s() + 60, "the window is read again after a minute: {record}");
        assert_eq!((&record["failures"], &record["window"]), (&1.into(), &Value::Null), "{record}");
    }
    assert!(is_ready(&gateway));
    assert_eq!((pebble.orders(), failures()), (6, 6), "{}", pebble.log());
}

#[test]
fn known_window_stays_when_it_cannot_be_read_again() {
    let pebble = Pebble::start();
    let started_s = now_s();
    let window = [started_s + 10 * DAY_S, started_s + 11 * DAY_S];
    let proxy = CaProxy::start(&pebble, move |number| match number {
        0 => Some(suggestion(window[0], window[1], "7200")),
        _ => None,
    });
    let mut gateway = start_as(&pebble, &behind(&proxy, &pebble, &["one.test"]));
    eventually("a window", || is_recorded(&gateway, "one.test"));
    kill(&mut gateway);
    // In the stored record, set the number of earlier failures to `failures`, and the time of the next read to a past
    // time.
    for (failures, wait_s) in [(0, 60), (3, 8 * 60), (30, 6 * 3600)] {
        let mut record = renewal_record(&gateway, "one.test");
        (record["next_read_s"], record["failures"]) = (1.into(), failures.into());
        std::fs::write(storage(&gateway).join("one.test.renewal.json"), record.to_string()).unwrap();
        let next = Gateway::start_file(&gateway.directory().join("gateway.toml"));
        eventually("a failure is stored", || renewal_record(&gateway, "one.test")["failures"] == failures + 1);
        let record = renewal_record(&gateway, "one.test");
        let next_s = record["next_read_s"].as_u64().unwrap();
        assert!(now_s() + wait_s - 5 < next_s && next_s <= now_s() + wait_s, "{record}");
        assert_eq!(record["window"], serde_json::json!(window));
        planned_s(&next, "one.test", window);
    }
    assert_eq!(pebble.orders(), 1, "{}", pebble.log());
}

#[test]
fn order_is_placed_again_if_the_certificate_counts_as_replaced() {
    let pebble = Pebble::start();
    let proxy = CaProxy::start(&pebble, |_| Some(suggestion(now_s() + DAY_S, now_s() + 2 * DAY_S, "7200")));
    let gateway = start_as(&pebble, &behind(&proxy, &pebble, &["one.test"]));
    let client = trusting(&pebble);
    eventually("a certificate", || is_ready(&gateway));
    let first = served(&gateway, &client, "one.test").unwrap();
    proxy.set_fault(Fault::AlreadyReplaced);
    request_renewal(&gateway, "one.test");
    eventually("a renewal", || served(&gateway, &client, "one.test").is_some_and(|leaf| leaf != first));
    let replaced: Vec<_> = proxy.orders().into_iter().map(|order| order.replaces).collect();
    assert_eq!(replaced, [None, Some(certificate_id(&first)), None]);
    assert!(!gateway.log().contains("cannot obtain"), "{}", gateway.log());
}

#[test]
fn certificate_stays_in_use_while_the_ca_is_down_and_is_renewed_later() {
    let pebble = Pebble::start();
    let proxy = CaProxy::start(&pebble, |_| Some(suggestion(now_s() + DAY_S, now_s() + 2 * DAY_S, "7200")));
    let gateway = start_as(&pebble, &behind(&proxy, &pebble, &["one.test"]));
    let client = trusting(&pebble);
    eventually("a certificate", || is_ready(&gateway));
    let first = served(&gateway, &client, "one.test").unwrap();
    proxy.set_fault(Fault::Unreachable);
    request_renewal(&gateway, "one.test");
    eventually("the error is logged", || gateway.log().contains("cannot obtain a certificate"));
    let failed_attempts = || metric(&gateway, "acme_failed_attempts{name=\"one.test\"}");
    eventually("the failure is counted", || failed_attempts() == 1.0);
    let entry = listed(&gateway, "one.test");
    assert!(entry["error"].as_str().unwrap().contains("request to the CA at 127.0.0.1"), "{entry}");
    let retry_s = time_s(&entry, "next_renewal");
    assert!(now_s() < retry_s && retry_s <= now_s() + 11, "the retry is due after 10 to 11 s: {entry}");
    assert_eq!(served(&gateway, &client, "one.test").as_ref(), Some(&first));
    assert!(is_ready(&gateway));
    proxy.set_fault(Fault::None);
    eventually("a renewal", || served(&gateway, &client, "one.test").is_some_and(|leaf| leaf != first));
    eventually("the failure is over", || failed_attempts() == 0.0);
    assert_eq!(listed(&gateway, "one.test")["error"], Value::Null);
    assert_eq!(pebble.orders(), 2, "{}", pebble.log());
}

#[test]
fn order_is_resumed_after_an_internal_error_of_the_ca() {
    let pebble = Pebble::start();
    let proxy = CaProxy::start(&pebble, |_| None);
    proxy.set_fault(Fault::FailedFinalization);
    let gateway = start_as(&pebble, &behind(&proxy, &pebble, &["one.test"]));
    eventually("the error is logged", || gateway.log().contains("cannot finalize the ACME order"));
    eventually("the failure is listed", || listed(&gateway, "one.test")["error"] != Value::Null);
    let entry = listed(&gateway, "one.test");
    let retry_s = time_s(&entry, "next_renewal");
    assert!(now_s() < retry_s && retry_s <= now_s() + 11, "the retry is due after 10 to 11 s: {entry}");
    proxy.set_fault(Fault::None);
    eventually("a certificate", || is_ready(&gateway));
    assert_eq!((pebble.orders(), pebble.issued()), (1, 1), "the first order is completed: {}", pebble.log());
}
