//! The client address of forwarded requests: hops are read from right to left, and only trusted proxies are skipped.

use std::net::IpAddr;

use http::Version;
use http::header::{FORWARDED, HeaderMap, HeaderName, HeaderValue};
use sluicegate::http::headers::{ForwardedInfo, ProtectedHeaders, set_forwarded, strip_hop_by_hop, strip_untrusted};
use sluicegate::identity::spec::ClientIpResolver;

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

fn address(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

/// The first byte of the input selects the header, `X-Forwarded-For` or `Forwarded`. Each line is a value of this
/// header.
pub(crate) fn run(data: &[u8]) {
    let [choice, rest @ ..] = data else { return };
    let header = if choice % 2 == 0 { X_FORWARDED_FOR } else { FORWARDED };
    let element = |hop: &str| match header == FORWARDED {
        true => format!("for=\"[{hop}]:80\""),
        false => hop.to_owned(),
    };
    let mut headers = HeaderMap::new();
    for value in rest.split(|byte| *byte == b'\n').take(20).filter_map(|line| HeaderValue::from_bytes(line).ok()) {
        headers.append(&header, value);
    }
    let rules = ClientIpResolver {
        trusted_proxies: vec!["10.0.0.0/8".parse().expect("a network"), "fd00::/8".parse().expect("a network")],
        header: header.clone(),
        ipv4_prefix: 32,
        ipv6_prefix: 64,
    };
    let (stranger, proxy, other) = (address("192.0.2.1"), address("10.0.0.1"), address("fd00::2"));
    assert_eq!(
        rules.client_address(stranger, &headers),
        stranger,
        "the headers of an untrusted peer must be ignored: {headers:?}"
    );
    let found = rules.client_address(proxy, &headers);
    assert_eq!(found, found.to_canonical(), "an IPv4-mapped address is IPv4");
    let network = rules.network(found);
    assert_eq!(rules.network(network), network);
    // Append a hop. An untrusted hop becomes the client, an invalid hop leaves the proxy as the client, and a trusted
    // hop is skipped.
    let with = |hop: &str, joined: bool| {
        let mut headers = headers.clone();
        let lines: Vec<_> = headers.get_all(&header).iter().map(|value| value.as_bytes().to_vec()).collect();
        let lines = if joined {
            vec![[&lines.join(&b", "[..])[..], b",", hop.as_bytes()].concat()]
        } else {
            [lines, vec![hop.into()]].concat()
        };
        headers.remove(&header);
        for line in lines {
            headers.append(&header, HeaderValue::from_bytes(&line).expect("joined values are a valid value"));
        }
        headers
    };
    for joined in [false, true] {
        for hop in ["2001:db8::7", "2001:db8:0:1::7"] {
            assert_eq!(
                rules.client_address(proxy, &with(&element(hop), joined)),
                address(hop),
                "{headers:?} and {hop}"
            );
        }
        for junk in ["junk", "", "for=", "for=_hidden", "\"", "256.1.1.1", "for=\"1.1.1.1"] {
            assert_eq!(rules.client_address(proxy, &with(junk, joined)), proxy, "{headers:?} and {junk:?}");
        }
        let walked = rules.client_address(proxy, &with(&element("fd00::2"), joined));
        assert_eq!(walked, rules.client_address(other, &headers), "{headers:?} behind a trusted hop");
    }
    // A second gateway behind this one determines the same client.
    let mut told = headers.clone();
    let origin = ForwardedInfo::new(proxy, "http", true);
    strip_hop_by_hop(&mut told, &ProtectedHeaders::default());
    strip_untrusted(&mut told, &ProtectedHeaders::default(), true);
    set_forwarded(&mut told, &origin, None, Version::HTTP_11);
    if header == X_FORWARDED_FOR || headers.contains_key(FORWARDED) {
        assert_eq!(rules.client_address(address("10.0.0.2"), &told), found, "{headers:?} became {told:?}");
    }
    // The gateway discards the headers of an untrusted peer.
    let mut told = headers.clone();
    strip_untrusted(&mut told, &ProtectedHeaders::default(), false);
    set_forwarded(&mut told, &ForwardedInfo::new(stranger, "http", false), None, Version::HTTP_11);
    assert_eq!(told.get_all(&X_FORWARDED_FOR).iter().collect::<Vec<_>>(), ["192.0.2.1"], "{headers:?}");
    assert!(!told.contains_key(FORWARDED), "{headers:?}");
}
