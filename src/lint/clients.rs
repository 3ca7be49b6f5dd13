//! Warnings about who is believed to be whom.

use std::net::IpAddr;

use ipnet::IpNet;

use super::LintInput;
use crate::config::error::Issue;
use crate::identity::Descriptor;

/// Wider than every network that somebody runs proxies in: 10.0.0.0/8 and fc00::/7 are the widest.
const MIN_PREFIX_LENGTHS: (u8, u8) = (8, 7);

pub(super) fn client_warnings(input: &LintInput<'_>) -> Vec<Issue> {
    let mut issues: Vec<_> = overly_broad_proxies(input).collect();
    issues.extend(shared_client_address(input));
    issues.extend(missing_store_secret(input));
    issues
}

/// Proxies that could be anybody.
fn overly_broad_proxies<'a>(input: &'a LintInput<'_>) -> impl Iterator<Item = Issue> + 'a {
    let proxies = input.parsed.client_ip.trusted_proxies.iter().flatten();
    proxies.zip(&input.config.client_ip.trusted_proxies).filter_map(|(proxy, network)| {
        let prefix_length = match network {
            IpNet::V4(network) if network.prefix_len() < MIN_PREFIX_LENGTHS.0 => network.prefix_len(),
            IpNet::V6(network) if network.prefix_len() < MIN_PREFIX_LENGTHS.1 => network.prefix_len(),
            IpNet::V4(_) | IpNet::V6(_) => return None,
        };
        let extent = if prefix_length == 0 { "the whole internet" } else { "much of the internet" };
        let proxy_text = proxy.get_ref();
        let message = format!(
            "`{proxy_text}` is {extent}: whoever connects from there says who he is, and gets around every limit by address"
        );
        Some(
            Issue::new(proxy.span(), message).with_hint("the networks of your own proxies only, such as \"10.0.0.0/8\""),
        )
    })
}

/// Limits by address where all requests seem to come from one: nobody but a proxy reaches a private address.
fn shared_client_address(input: &LintInput<'_>) -> Option<Issue> {
    let all_private = input.config.listeners.iter().all(|listener| is_private(listener.address.ip()));
    if !all_private || input.parsed.client_ip.trusted_proxies.is_some() {
        return None;
    }
    let used = input.config.routes.iter().flat_map(|route| &route.rate_limits.limits);
    let used: Vec<_> = used.map(|metered| &*metered.limit.name).collect();
    // In the order of the file.
    let by_address =
        input.config.limits.values().filter(|compiled| compiled.identity_spec.descriptors.contains(&Descriptor::Ip));
    let by_address = by_address.filter(|compiled| used.contains(&&*compiled.limit.name));
    let spans = by_address
        .map(|compiled| (input.span_of(&compiled.limit.name, |limit| limit.by.as_ref()), &compiled.limit.name));
    let (span, name) = spans.min_by_key(|(span, _)| span.start)?;
    let message = format!(
        "`{name}` is by address, and only a proxy reaches a private address: without `trusted_proxies` all its clients share one bucket"
    );
    let hint =
        "[client_ip] with trusted_proxies = [\"10.0.0.0/8\"]: the proxy's address; [] if clients connect directly";
    Some(Issue::new(span, message).with_hint(hint))
}

fn is_private(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_loopback() || address.is_private() || address.is_link_local(),
        IpAddr::V6(address) => address.is_loopback() || address.is_unique_local() || address.is_unicast_link_local(),
    }
}

/// Keys in Redis that tell addresses to who can guess.
fn missing_store_secret(input: &LintInput<'_>) -> Option<Issue> {
    let store = &input.parsed.store;
    let is_empty = store.secret.as_ref().is_none_or(|secret| secret.get_ref().is_empty());
    let is_redis_without_secret = input.config.store.redis.is_some() && is_empty;
    let span = store.secret.as_ref().or(store.url.as_ref()).filter(|_| is_redis_without_secret)?.span();
    let message = "the store has no `secret`: who reads the keys in Redis can guess the addresses in them";
    Some(
        Issue::new(span, message)
            .with_hint("secret = \"${SLUICEGATE_STORE_SECRET}\", the same on all gateways: openssl rand -hex 32"),
    )
}
