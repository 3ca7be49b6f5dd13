//! Client addresses: the address of the peer, or an address (hop) that trusted proxies report.

use std::net::{IpAddr, SocketAddr};

use http::{HeaderMap, HeaderName};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// Trusted proxies, the header with the hops, and the prefix lengths of client networks.
#[derive(Debug, PartialEq, Eq)]
pub struct ClientIpResolver {
    /// Networks of trusted proxies.
    pub trusted_proxies: Vec<IpNet>,
    /// Header in which proxies list the addresses of the client and of earlier proxies.
    pub header: HeaderName,
    /// Prefix length of an IPv4 client network.
    pub ipv4_prefix: u8,
    /// Prefix length of an IPv6 client network. An IPv6 subscriber usually has a /64 network.
    pub ipv6_prefix: u8,
}

impl ClientIpResolver {
    /// Return whether a peer or hop is a trusted proxy.
    pub fn is_trusted(&self, address: IpAddr) -> bool {
        self.trusted_proxies.iter().any(|net| net.contains(&address))
    }

    /// Return the address of the client: from the right, the first hop that is not trusted. If an element is invalid,
    /// the client is the hop to its right, which reported this element.
    pub fn client_address(&self, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
        let mut client = peer;
        if !self.is_trusted(peer) {
            return client;
        }
        let lines = headers.get_all(&self.header);
        for line in lines.iter().rev() {
            // Split bytes instead of text: non-ASCII bytes of a client must not hide the elements that proxies appended
            // to the same line.
            for element in line.as_bytes().rsplit(|byte| *byte == b',') {
                let element = std::str::from_utf8(element).ok().filter(|element| element.is_ascii());
                let hop =
                    if self.header == http::header::FORWARDED { element.and_then(forwarded_for) } else { element };
                match hop.and_then(parse_address) {
                    Some(hop) if self.is_trusted(hop) => client = hop,
                    Some(hop) => return hop,
                    None => return client,
                }
            }
        }
        client
    }

    /// Return the client network of an address.
    pub fn network(&self, address: IpAddr) -> IpAddr {
        // The prefix lengths are valid, because the configuration was validated.
        match address {
            IpAddr::V4(address) => Ipv4Net::new(address, self.ipv4_prefix).map_or(address, |net| net.network()).into(),
            IpAddr::V6(address) => Ipv6Net::new(address, self.ipv6_prefix).map_or(address, |net| net.network()).into(),
        }
    }

    /// Format the client network of an address: as an address, or in CIDR notation if the prefix is shorter.
    pub fn format_network(&self, address: IpAddr) -> String {
        let (prefix, whole) = match address {
            IpAddr::V4(_) => (self.ipv4_prefix, 32),
            IpAddr::V6(_) => (self.ipv6_prefix, 128),
        };
        let network = self.network(address);
        if prefix == whole { network.to_string() } else { format!("{network}/{prefix}") }
    }
}

/// Return the `for` parameter of a Forwarded element (RFC 7239 §4).
fn forwarded_for(element: &str) -> Option<&str> {
    // Reject an unbalanced quote: splitting at commas has cut a quoted value, such as a host that the client chose.
    if element.contains('\\') || !element.matches('"').count().is_multiple_of(2) {
        return None;
    }
    element.split(';').find_map(|pair| {
        let (name, value) = pair.split_once('=')?;
        name.trim().eq_ignore_ascii_case("for").then(|| value.trim().trim_matches('"'))
    })
}

/// Parse `192.0.2.1`, `192.0.2.1:80`, `2001:db8::1`, `[2001:db8::1]` or `[2001:db8::1]:80`. IPv4-mapped addresses
/// become IPv4.
fn parse_address(text: &str) -> Option<IpAddr> {
    let text = text.trim();
    let plain = || text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text).parse().ok();
    let address = plain().or_else(|| text.parse::<SocketAddr>().ok().map(|socket| socket.ip()))?;
    Some(address.to_canonical())
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    fn resolver(header: &'static str) -> ClientIpResolver {
        ClientIpResolver {
            trusted_proxies: vec!["10.0.0.0/8".parse().unwrap(), "::1/128".parse().unwrap()],
            header: HeaderName::from_static(header),
            ipv4_prefix: 32,
            ipv6_prefix: 64,
        }
    }

    #[test]
    fn client_is_the_rightmost_untrusted_hop() {
        for (peer, lines, expected) in [
            ("192.0.2.1", vec!["1.1.1.1"], "192.0.2.1"),
            ("10.0.0.1", vec![], "10.0.0.1"),
            ("10.0.0.1", vec!["1.1.1.1, 2.2.2.2"], "2.2.2.2"),
            ("10.0.0.1", vec!["1.1.1.1, 2.2.2.2, 10.0.0.2"], "2.2.2.2"),
            ("10.0.0.1", vec!["1.1.1.1", "2.2.2.2, 10.0.0.2"], "2.2.2.2"),
            ("10.0.0.1", vec!["10.0.0.3, 10.0.0.2"], "10.0.0.3"),
            ("10.0.0.1", vec!["1.1.1.1, junk, 10.0.0.2"], "10.0.0.2"),
            ("10.0.0.1", vec!["1.1.1.1,"], "10.0.0.1"),
            ("10.0.0.1", vec!["::ffff:1.2.3.4"], "1.2.3.4"),
            ("10.0.0.1", vec!["1.2.3.4:5678"], "1.2.3.4"),
            ("10.0.0.1", vec!["[2001:db8::1]:443"], "2001:db8::1"),
            ("10.0.0.1", vec!["2001:db8::1"], "2001:db8::1"),
            ("10.0.0.1", vec!["\u{e9}, 2.2.2.2, 10.0.0.2"], "2.2.2.2"),
            ("10.0.0.1", vec!["2.2.2.2, \u{a0}3.3.3.3"], "10.0.0.1"),
        ] {
            let mut headers = HeaderMap::new();
            for line in &lines {
                headers.append("x-forwarded-for", HeaderValue::from_bytes(line.as_bytes()).unwrap());
            }
            let client = resolver("x-forwarded-for").client_address(peer.parse().unwrap(), &headers);
            assert_eq!(client, expected.parse::<IpAddr>().unwrap(), "{peer} {lines:?}");
        }
    }

    #[test]
    fn forwarded_elements_are_parsed() {
        for (line, expected) in [
            ("for=1.1.1.1;proto=https, for=2.2.2.2", "2.2.2.2"),
            ("For=\"[2001:db8::1]:80\"", "2001:db8::1"),
            ("for=_hidden", "10.0.0.1"),
            ("proto=https", "10.0.0.1"),
            ("for=2.2.2.2;host=\"a, for=3.3.3.3;x\"", "10.0.0.1"),
            ("for=2.2.2.2;host=\"a, for=3.3.3.3;x=\\\"\"", "10.0.0.1"),
            ("for=\"1.1.1.1, for=2.2.2.2", "2.2.2.2"),
        ] {
            let headers = HeaderMap::from_iter([(http::header::FORWARDED, line.parse().unwrap())]);
            let client = resolver("forwarded").client_address("10.0.0.1".parse().unwrap(), &headers);
            assert_eq!(client, expected.parse::<IpAddr>().unwrap(), "{line}");
        }
    }

    #[test]
    fn addresses_are_reduced_to_networks() {
        let rules = resolver("x-forwarded-for");
        for (address, network) in [("192.0.2.77", "192.0.2.77"), ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::")] {
            assert_eq!(rules.network(address.parse().unwrap()), network.parse::<IpAddr>().unwrap());
            let text = if network.contains(':') { format!("{network}/64") } else { network.to_owned() };
            assert_eq!(rules.format_network(address.parse().unwrap()), text);
        }
    }
}
