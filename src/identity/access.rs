//! Access rules: the networks whose clients are allowed or denied. The networks are listed in the configuration file or
//! in network files.

use std::net::{IpAddr, Ipv6Addr};
use std::ops::Range;
use std::sync::Arc;

use arc_swap::ArcSwap;
use ipnet::IpNet;

use crate::config::sources::FileSnapshot;

/// Length of the prefix `::ffff:0:0/96` of IPv4-mapped IPv6 addresses (RFC 4291 §2.5.5.2).
const MAPPED_PREFIX_LENGTH: u8 = 96;

/// A set of networks, stored as sorted, disjoint address ranges for each address family. A lookup is a binary search,
/// so its cost is logarithmic in the number of networks. IPv4-mapped IPv6 addresses and networks count as IPv4.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NetworkSet {
    ipv4: Vec<AddressRange<u32>>,
    ipv6: Vec<AddressRange<u128>>,
}

/// A range of addresses, including both ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct AddressRange<A> {
    first: A,
    last: A,
}

impl NetworkSet {
    /// Create the set of all addresses in these networks.
    pub fn new(networks: impl IntoIterator<Item = IpNet>) -> Self {
        let (mut ipv4, mut ipv6) = (Vec::new(), Vec::new());
        for network in networks {
            match canonical_network(network) {
                IpNet::V4(network) => {
                    ipv4.push(AddressRange { first: network.network().to_bits(), last: network.broadcast().to_bits() });
                }
                IpNet::V6(network) => {
                    ipv6.push(AddressRange { first: network.network().to_bits(), last: network.broadcast().to_bits() });
                }
            }
        }
        NetworkSet { ipv4: merge(ipv4, u32::checked_add), ipv6: merge(ipv6, u128::checked_add) }
    }

    /// Return whether the set contains this address.
    pub fn contains(&self, address: IpAddr) -> bool {
        match address.to_canonical() {
            IpAddr::V4(address) => contains(&self.ipv4, address.to_bits()),
            IpAddr::V6(address) => contains(&self.ipv6, address.to_bits()),
        }
    }

    /// Return whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.ipv4.is_empty() && self.ipv6.is_empty()
    }

    /// Return whether the set contains all addresses of a network.
    pub fn covers(&self, network: IpNet) -> bool {
        // Adjacent ranges are merged, so all addresses of a contained network are in one range.
        match canonical_network(network) {
            IpNet::V4(network) => covers(&self.ipv4, network.network().to_bits(), network.broadcast().to_bits()),
            IpNet::V6(network) => covers(&self.ipv6, network.network().to_bits(), network.broadcast().to_bits()),
        }
    }

    /// Return whether the set contains at least one address of a network.
    pub fn intersects(&self, network: IpNet) -> bool {
        match canonical_network(network) {
            IpNet::V4(network) => intersects(&self.ipv4, network.network().to_bits(), network.broadcast().to_bits()),
            IpNet::V6(network) => intersects(&self.ipv6, network.network().to_bits(), network.broadcast().to_bits()),
        }
    }
}

/// Convert a network of IPv4-mapped IPv6 addresses to an IPv4 network.
fn canonical_network(network: IpNet) -> IpNet {
    let IpNet::V6(mapped) = network else { return network };
    let Some(prefix_length) = mapped.prefix_len().checked_sub(MAPPED_PREFIX_LENGTH) else { return network };
    let address: Option<IpAddr> = Ipv6Addr::to_ipv4_mapped(&mapped.network()).map(IpAddr::V4);
    address.and_then(|address| IpNet::new(address, prefix_length).ok()).unwrap_or(network)
}

/// Sort ranges, and merge ranges that overlap or are adjacent.
fn merge<A: Copy + Ord + From<u8>>(
    mut ranges: Vec<AddressRange<A>>,
    checked_add: impl Fn(A, A) -> Option<A>,
) -> Vec<AddressRange<A>> {
    ranges.sort_unstable_by_key(|range| range.first);
    let mut merged: Vec<AddressRange<A>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match merged.last_mut() {
            // A range that ends at the last address of its family absorbs all later ranges.
            Some(last) if checked_add(last.last, A::from(1)).is_none_or(|next| range.first <= next) => {
                last.last = last.last.max(range.last);
            }
            _ => merged.push(range),
        }
    }
    merged.shrink_to_fit();
    merged
}

/// Return the only range that can contain an address: the last range that starts at or before it.
fn candidate<A: Copy + Ord>(ranges: &[AddressRange<A>], address: A) -> Option<&AddressRange<A>> {
    ranges[..ranges.partition_point(|range| range.first <= address)].last()
}

fn contains<A: Copy + Ord>(ranges: &[AddressRange<A>], address: A) -> bool {
    candidate(ranges, address).is_some_and(|range| address <= range.last)
}

fn covers<A: Copy + Ord>(ranges: &[AddressRange<A>], first: A, last: A) -> bool {
    candidate(ranges, first).is_some_and(|range| last <= range.last)
}

fn intersects<A: Copy + Ord>(ranges: &[AddressRange<A>], first: A, last: A) -> bool {
    candidate(ranges, last).is_some_and(|range| first <= range.last)
}

/// Parse an address, or a network in CIDR notation.
pub fn parse_network(text: &str) -> Option<IpNet> {
    text.parse().ok().or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from))
}

// === Network files ===

/// A line in a network file that is neither a network nor an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InvalidLine {
    /// Byte range of the line's text in the file, without surrounding spaces and the comment.
    pub span: Range<usize>,
}

/// Maximum number of invalid lines to report. If the file has another format, almost all of its lines are invalid.
const MAX_INVALID_LINES: usize = 5;

/// Parse a network file. It has one network per line. Comments extend from `#` to the end of the line.
///
/// # Errors
/// The file has invalid lines. The error contains the first invalid lines, and the number of other invalid lines.
pub fn parse_networks(text: &str) -> Result<NetworkSet, (Vec<InvalidLine>, usize)> {
    let (mut networks, mut invalid, mut further) = (Vec::new(), Vec::new(), 0);
    let mut line_start = 0;
    for line in text.split('\n') {
        let item = line.split('#').next().unwrap_or_default();
        let start = line_start + (item.len() - item.trim_start().len());
        let item = item.trim();
        line_start += line.len() + 1;
        match parse_network(item) {
            _ if item.is_empty() => {}
            Some(network) => networks.push(network),
            None if invalid.len() < MAX_INVALID_LINES => {
                invalid.push(InvalidLine { span: start..start + item.len() });
            }
            None => further += 1,
        }
    }
    if invalid.is_empty() { Ok(NetworkSet::new(networks)) } else { Err((invalid, further)) }
}

/// A network file. All rules that refer to the file share this value.
#[derive(Debug)]
pub struct NetworkFile {
    /// Path of the file as written in the first rule that refers to it.
    pub name: Box<str>,
    /// The file as it was when the configuration was loaded.
    pub file: FileSnapshot,
    /// The current networks. They are replaced when the file changes.
    pub networks: ArcSwap<NetworkSet>,
}

// === Rules ===

/// `allow` and `deny` of a listener or a route. If a client is in both, it is denied.
#[derive(Debug)]
pub struct AccessRules {
    /// Clients that are allowed. `None` allows all clients.
    pub allow: Option<NetworkList>,
    /// Clients that are denied.
    pub deny: NetworkList,
}

/// The networks of `allow` or `deny`.
#[derive(Debug, Default)]
pub struct NetworkList {
    /// Networks that are written in the configuration file.
    pub inline: NetworkSet,
    /// Network files that the list refers to.
    pub files: Vec<Arc<NetworkFile>>,
}

/// Why access rules allow or deny a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessDecision<'r> {
    /// The rules have no `allow`, and no network of `deny` contains the client address.
    NotDenied,
    /// A network of `allow` contains the client address.
    Allowed(ListSource<'r>),
    /// A network of `deny` contains the client address.
    Denied(ListSource<'r>),
    /// `allow` is set, but no network of `allow` contains the client address.
    NotAllowed,
}

/// The place where a network is listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ListSource<'r> {
    /// The network is written in the configuration file.
    Inline,
    /// The network is in this network file.
    File(&'r str),
}

impl AccessDecision<'_> {
    /// Return whether the client may send the request.
    pub fn is_allowed(self) -> bool {
        matches!(self, AccessDecision::NotDenied | AccessDecision::Allowed(_))
    }
}

impl AccessRules {
    /// Return whether the rules allow a client address, and why.
    pub fn decide(&self, client: IpAddr) -> AccessDecision<'_> {
        if let Some(source) = self.deny.find(client) {
            return AccessDecision::Denied(source);
        }
        match &self.allow {
            None => AccessDecision::NotDenied,
            Some(allow) => allow.find(client).map_or(AccessDecision::NotAllowed, AccessDecision::Allowed),
        }
    }
}

impl NetworkList {
    fn find(&self, client: IpAddr) -> Option<ListSource<'_>> {
        if self.inline.contains(client) {
            return Some(ListSource::Inline);
        }
        let file = self.files.iter().find(|file| file.networks.load().contains(client))?;
        Some(ListSource::File(&file.name))
    }

    /// Return whether the list contains no network, neither in the configuration nor in its files.
    pub fn is_empty(&self) -> bool {
        self.inline.is_empty() && self.files.iter().all(|file| file.networks.load().is_empty())
    }

    /// Return whether the list contains at least one address of a network.
    pub fn intersects(&self, network: IpNet) -> bool {
        self.inline.intersects(network) || self.files.iter().any(|file| file.networks.load().intersects(network))
    }

    /// Return whether the inline networks or one of the files contain all addresses of a network.
    pub fn covers(&self, network: IpNet) -> bool {
        self.inline.covers(network) || self.files.iter().any(|file| file.networks.load().covers(network))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(networks: &[&str]) -> NetworkSet {
        NetworkSet::new(networks.iter().map(|text| parse_network(text).unwrap()))
    }

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn ranges_are_merged_per_family() {
        let networks =
            set(&["10.0.0.0/9", "10.128.0.0/9", "10.1.0.0/16", "192.0.2.1", "2001:db8::/33", "2001:db8:8000::/33"]);
        assert_eq!(networks, set(&["10.0.0.0/8", "192.0.2.1/32", "2001:db8::/32"]));
        assert_eq!((networks.ipv4.len(), networks.ipv6.len()), (2, 1));
        assert_eq!(set(&["0.0.0.0/0", "255.255.255.255"]), set(&["0.0.0.0/0"]));
        assert_eq!(set(&["::/0", "ffff::/16"]), set(&["::/0"]));
        // The address bits after the prefix are ignored.
        assert_eq!(set(&["10.1.2.3/8"]), set(&["10.0.0.0/8"]));
    }

    #[test]
    fn mapped_addresses_and_networks_are_ipv4() {
        let networks = set(&["::ffff:10.0.0.0/104", "::ffff:192.0.2.1"]);
        assert_eq!(networks, set(&["10.0.0.0/8", "192.0.2.1"]));
        for inside in ["10.9.9.9", "::ffff:10.9.9.9", "192.0.2.1", "::ffff:c000:201"] {
            assert!(networks.contains(address(inside)), "{inside}");
        }
        // An IPv6 network contains no IPv4 addresses, even if it includes the range of IPv4-mapped addresses.
        assert!(!set(&["::/0"]).contains(address("::ffff:10.0.0.1")));
        assert!(set(&["::ffff:0:0/96"]).contains(address("10.0.0.1")));
    }

    #[test]
    fn deny_takes_precedence_over_allow() {
        let list = |networks: &[&str]| NetworkList { inline: set(networks), files: Vec::new() };
        let rules = AccessRules { allow: Some(list(&["10.0.0.0/8"])), deny: list(&["10.9.0.0/16"]) };
        for (client, expected) in [
            ("10.1.1.1", AccessDecision::Allowed(ListSource::Inline)),
            ("10.9.1.1", AccessDecision::Denied(ListSource::Inline)),
            ("192.0.2.1", AccessDecision::NotAllowed),
            ("::ffff:10.1.1.1", AccessDecision::Allowed(ListSource::Inline)),
            ("2001:db8::1", AccessDecision::NotAllowed),
        ] {
            assert_eq!(rules.decide(address(client)), expected, "{client}");
        }
        let rules = AccessRules { allow: None, deny: list(&["2001:db8::/32"]) };
        assert_eq!(rules.decide(address("10.1.1.1")), AccessDecision::NotDenied);
        assert!(!rules.decide(address("2001:db8::1")).is_allowed());
        // An `allow` list without networks, for example from an empty file, allows no client.
        let rules = AccessRules { allow: Some(list(&[])), deny: list(&[]) };
        assert_eq!(rules.decide(address("10.1.1.1")), AccessDecision::NotAllowed);
    }

    #[test]
    fn files_have_one_network_per_line() {
        let text = "# office\n10.0.0.0/8\r\n\n  192.0.2.1 # printer\n2001:db8::/32#lab\n";
        assert_eq!(parse_networks(text).unwrap(), set(&["10.0.0.0/8", "192.0.2.1", "2001:db8::/32"]));
        assert_eq!(parse_networks("").unwrap(), NetworkSet::default());
        let text = "10.0.0.0/8\n deny 10.0.0.1; # nginx\n10.0.0.0/33\n10.0.0.1, 10.0.0.2\n";
        let (invalid, further) = parse_networks(text).unwrap_err();
        let spans: Vec<_> = invalid.into_iter().map(|line| &text[line.span]).collect();
        assert_eq!((spans, further), (vec!["deny 10.0.0.1;", "10.0.0.0/33", "10.0.0.1, 10.0.0.2"], 0));
        let (invalid, further) = parse_networks(&"x\n".repeat(100)).unwrap_err();
        assert_eq!((invalid.len(), further), (MAX_INVALID_LINES, 95));
    }
}
