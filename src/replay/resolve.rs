//! From a line of a log to what its limits are asked: by the gateway's own route table, identities and costs.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use http::header::{HOST, HeaderMap, HeaderValue};
use http::{Method, Request, Uri, Version};

use super::format::LogEntry;
use super::view::{self, ReplayConfig};
use crate::cost::Cost;
use crate::gateway::addressed::RequestTarget;
use crate::gateway::ask::{LimitContext, build_checks};
use crate::identity::Descriptor;
use crate::limit::key::Identity;
use crate::limit::plan::LimitVariant;
use crate::reply::Rejection;
use crate::route::NoMatch;
use crate::runtime::Route;

/// What one limit is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplayCheck {
    /// Which subject of the view.
    pub limit_index: u16,
    /// Which of its sizes; the first one is the standard.
    pub variant_index: u16,
    /// Who, by the order in which they came.
    pub identity_index: u32,
    /// Units.
    pub cost: u64,
}

/// A request that meets limits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplayRequest {
    /// When, µs since the Unix epoch.
    pub time_us: u64,
    /// How long it took, µs.
    pub duration_us: u64,
    /// The status that it got then; 0 where nobody knows.
    pub status: u16,
    /// What its limits are asked.
    pub checks: Box<[ReplayCheck]>,
}

/// What a line comes to.
#[derive(Debug, PartialEq, Eq)]
pub enum ResolvedLine {
    /// Limits have a say.
    Limited(ReplayRequest),
    /// None has.
    Unlimited,
    /// The gateway would turn it down before it asks a limit.
    Rejected(RejectReason),
}

/// Why it would.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RejectReason {
    /// It is no request of HTTP/1.0 or later.
    NotHttp,
    /// No route takes it.
    NoRoute,
    /// It lacks the identity of a limit.
    NoIdentity,
    /// Its path, its host, its method or its cost is not one.
    Malformed,
}

/// Those who were seen by one limit.
#[derive(Debug, Default)]
pub struct SeenIdentities {
    indices: HashMap<Identity, u32>,
    /// By number.
    pub identities: Vec<Identity>,
    /// What to call them.
    pub labels: Vec<IdentityLabel>,
}

/// What to call an identity.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum IdentityLabel {
    /// Its network.
    Network(IpAddr),
    /// In words.
    Text(Box<str>),
}

/// Resolves lines, and remembers whom they named.
#[derive(Debug)]
pub struct LineResolver<'v> {
    config: &'v ReplayConfig,
    /// The head of the line at hand; its parts are used again.
    request: Request<()>,
    /// By subject.
    pub seen: Vec<SeenIdentities>,
    /// By subject, its sizes.
    pub variants: Vec<Vec<Arc<LimitVariant>>>,
    host_cache: (Vec<u8>, Option<HeaderValue>),
    /// Lines whose peer is a trusted proxy that does not say for whom it speaks.
    pub missing_client_count: u64,
}

impl<'v> LineResolver<'v> {
    /// A resolver that has seen nobody.
    pub fn new(config: &'v ReplayConfig) -> Self {
        LineResolver {
            config,
            request: Request::new(()),
            seen: config.limits.iter().map(|_| SeenIdentities::default()).collect(),
            variants: config.limits.iter().map(|limit| vec![limit.variant.clone()]).collect(),
            host_cache: Default::default(),
            missing_client_count: 0,
        }
    }

    /// Finds out what the gateway would ask its limits about a request.
    pub fn resolve(&mut self, entry: &LogEntry<'_>) -> ResolvedLine {
        if !self.build_request(entry) {
            return ResolvedLine::Rejected(RejectReason::NotHttp);
        }
        let compiled = &self.config.compiled;
        let target = match RequestTarget::from_request(&self.request, &compiled.server) {
            Ok(target) => target,
            Err(_) => return ResolvedLine::Rejected(RejectReason::Malformed),
        };
        let (method, headers) = (self.request.method(), self.request.headers());
        let named = entry.route.as_deref().and_then(|name| compiled.routes.iter().find(|route| *route.name == *name));
        let route: &Route = match named {
            Some(route) => route,
            None => match compiled.table.find(&target.host, &target.path, method, headers) {
                Ok(route) => route,
                Err(NoMatch::NotFound | NoMatch::MethodNotAllowed(_)) => {
                    return ResolvedLine::Rejected(RejectReason::NoRoute);
                }
            },
        };
        let replay_route = &self.config.routes[route.index];
        if replay_route.limits.is_empty() {
            return ResolvedLine::Unlimited;
        }
        let peer = entry.client.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        let trusted = !entry.is_client_resolved && compiled.client_ip.is_trusted(peer);
        let client = if trusted { compiled.client_ip.client_address(peer, headers) } else { peer };
        if trusted && !headers.contains_key(&compiled.client_ip.header) {
            self.missing_client_count += 1;
        }
        let subject = entry.certificate_subject.as_deref().and_then(|subject| std::str::from_utf8(subject).ok());
        let limit_context = LimitContext {
            request: &self.request,
            host: &target.host,
            path: &target.path,
            trusted,
            certificate_subject: subject,
        };
        let consumers = replay_route.uses_api_key.then(|| compiled.consumers.load());
        let attributes = limit_context.request_attributes(
            compiled,
            route,
            client,
            consumers.as_deref().map(|consumers| &**consumers),
        );
        let checks = match build_checks(compiled, &replay_route.identity_specs, &replay_route.limits, &attributes) {
            Ok(checks) => checks,
            Err(Rejection::Identity(_)) => return ResolvedLine::Rejected(RejectReason::NoIdentity),
            Err(_) => return ResolvedLine::Rejected(RejectReason::Malformed),
        };
        if checks.is_empty() {
            return ResolvedLine::Unlimited;
        }
        let replay_checks = checks.iter().map(|check| {
            let subject = replay_route.limit_indices[check.limit_index];
            let identity_spec = &replay_route.identity_specs[replay_route.limits[check.limit_index].identity_index];
            let label = || match &identity_spec.descriptors[..] {
                [Descriptor::Ip] => IdentityLabel::Network(attributes.client_network),
                _ if self.config.limits[subject].is_secret => IdentityLabel::Text(check.identity.short_hex().into()),
                _ => IdentityLabel::Text(match headers.get(view::mapped_header(subject)) {
                    Some(mapped_value) => String::from_utf8_lossy(mapped_value.as_bytes()).into(),
                    None => {
                        let name = identity_spec.display(&attributes, &compiled.api_key_settings, &compiled.client_ip);
                        name.summary(&check.identity.short_hex()).into()
                    }
                }),
            };
            let identity_index = self.seen[subject].index_of(check.identity, label);
            let variants = &mut self.variants[subject];
            let replay_limit = &self.config.limits[subject];
            let mapped_variant =
                || replay_limit.consumer_variants.get(headers.get(view::mapped_header(subject))?.as_bytes());
            let own_variant = match Arc::ptr_eq(check.variant, &check.limit.default_variant) {
                true if replay_limit.consumer_variants.is_empty() => None,
                true => mapped_variant(),
                false => Some(check.variant),
            };
            let variant_index = own_variant.map_or(0, |variant| {
                variants.iter().position(|other| other.id == variant.id).unwrap_or_else(|| {
                    variants.push(variant.clone());
                    variants.len() - 1
                })
            });
            // What only the response or a proxy said may be in the log.
            let logged_cost = entry.costs.iter().find(|(name, _)| **name == *check.limit.name).map(|(_, cost)| *cost);
            let is_from_request = !matches!(replay_route.limits[check.limit_index].cost, Cost::Fixed(_));
            let cost = logged_cost.filter(|_| is_from_request).unwrap_or(check.cost);
            ReplayCheck { limit_index: subject as u16, variant_index: variant_index as u16, identity_index, cost }
        });
        ResolvedLine::Limited(ReplayRequest {
            time_us: entry.time_us,
            duration_us: entry.duration_us.unwrap_or(0),
            status: entry.status.unwrap_or(0),
            checks: replay_checks.collect(),
        })
    }

    /// Makes the head of a request of what a line says; whether it is one.
    fn build_request(&mut self, entry: &LogEntry<'_>) -> bool {
        let Ok(method) = Method::from_bytes(entry.method) else { return false };
        let Ok(uri) = Uri::try_from(&*entry.target) else { return false };
        let host = entry.host.as_deref().or_else(|| uri.authority().map(|authority| authority.as_str().as_bytes()));
        // Without a host it is routed as HTTP/1.0 without one is.
        *self.request.version_mut() = if host.is_some() { Version::HTTP_11 } else { Version::HTTP_10 };
        let value = host.map(|host| {
            if self.host_cache.1.is_none() || self.host_cache.0 != host {
                self.host_cache = (host.to_vec(), HeaderValue::from_bytes(host).ok());
            }
            self.host_cache.1.clone()
        });
        let headers: &mut HeaderMap = self.request.headers_mut();
        headers.clear();
        match value {
            Some(Some(value)) => drop(headers.insert(HOST, value)),
            Some(None) => return false,
            None => {}
        }
        for (name, value) in &entry.headers {
            if let Ok(value) = HeaderValue::from_bytes(value) {
                headers.append(name, value);
            }
        }
        *self.request.method_mut() = method;
        *self.request.uri_mut() = uri;
        true
    }
}

impl fmt::Display for IdentityLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            IdentityLabel::Network(address) => address.fmt(f),
            IdentityLabel::Text(text) => f.write_str(text),
        }
    }
}

impl SeenIdentities {
    fn index_of(&mut self, identity: Identity, label: impl FnOnce() -> IdentityLabel) -> u32 {
        *self.indices.entry(identity).or_insert_with(|| {
            self.identities.push(identity);
            self.labels.push(label());
            (self.identities.len() - 1) as u32
        })
    }
}
