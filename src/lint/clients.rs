//! Warnings about who is believed to be whom.

use std::net::IpAddr;

use ipnet::IpNet;

use super::Whole;
use crate::config::error::Issue;
use crate::identity::Descriptor;

/// Wider than every network that somebody runs proxies in: 10.0.0.0/8 and fc00::/7 are the widest.
const WIDEST: (u8, u8) = (8, 7);

pub(super) fn client_warnings(whole: &Whole<'_>) -> Vec<Issue> {
    let mut found: Vec<_> = wide_open(whole).collect();
    found.extend(one_address(whole));
    found.extend(no_secret(whole));
    found
}

/// Proxies that could be anybody.
fn wide_open<'a>(whole: &'a Whole<'_>) -> impl Iterator<Item = Issue> + 'a {
    let written = whole.written.client_ip.trusted_proxies.iter().flatten();
    written.zip(&whole.runtime.client_ip.trusted_proxies).filter_map(|(text, network)| {
        let share = match network {
            IpNet::V4(network) if network.prefix_len() < WIDEST.0 => network.prefix_len(),
            IpNet::V6(network) if network.prefix_len() < WIDEST.1 => network.prefix_len(),
            IpNet::V4(_) | IpNet::V6(_) => return None,
        };
        let size = if share == 0 { "the whole internet" } else { "much of the internet" };
        let text_of = text.get_ref();
        let message = format!(
            "`{text_of}` is {size}: whoever connects from there says who he is, and gets around every limit by address"
        );
        Some(
            Issue::new(text.span(), message).with_hint("the networks of your own proxies only, such as \"10.0.0.0/8\""),
        )
    })
}

/// Limits by address where all requests seem to come from one: nobody but a proxy reaches a private address.
fn one_address(whole: &Whole<'_>) -> Option<Issue> {
    let hidden = whole.runtime.listeners.iter().all(|listener| is_private(listener.address.ip()));
    if !hidden || whole.written.client_ip.trusted_proxies.is_some() {
        return None;
    }
    let used = whole.runtime.routes.iter().flat_map(|route| &route.rate_limits.limits);
    let used: Vec<_> = used.map(|metered| &*metered.limit.name).collect();
    // In the order of the file.
    let by_address =
        whole.runtime.limits.values().filter(|terms| terms.identity_spec.descriptors.contains(&Descriptor::Ip));
    let by_address = by_address.filter(|terms| used.contains(&&*terms.limit.name));
    let places = by_address.map(|terms| (whole.place(&terms.limit.name, |limit| limit.by.as_ref()), &terms.limit.name));
    let (place, name) = places.min_by_key(|(place, _)| place.start)?;
    let message = format!(
        "`{name}` is by address, and only a proxy reaches a private address: without `trusted_proxies` all its clients share one bucket"
    );
    let hint =
        "[client_ip] with trusted_proxies = [\"10.0.0.0/8\"]: the proxy's address; [] if clients connect directly";
    Some(Issue::new(place, message).with_hint(hint))
}

fn is_private(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_loopback() || address.is_private() || address.is_link_local(),
        IpAddr::V6(address) => address.is_loopback() || address.is_unique_local() || address.is_unicast_link_local(),
    }
}

/// Keys in Redis that tell addresses to who can guess.
fn no_secret(whole: &Whole<'_>) -> Option<Issue> {
    let store = &whole.written.store;
    let empty = store.secret.as_ref().is_none_or(|secret| secret.get_ref().is_empty());
    let redis = whole.runtime.store.redis.is_some() && empty;
    let place = store.secret.as_ref().or(store.url.as_ref()).filter(|_| redis)?.span();
    let message = "the store has no `secret`: who reads the keys in Redis can guess the addresses in them";
    Some(
        Issue::new(place, message)
            .with_hint("secret = \"${SLUICEGATE_STORE_SECRET}\", the same on all gateways: openssl rand -hex 32"),
    )
}
