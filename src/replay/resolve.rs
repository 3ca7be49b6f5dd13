//! From a line of a log to what its limits are asked: by the gateway's own route table, identities and costs.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use http::header::{HOST, HeaderMap, HeaderValue};
use http::{Method, Request, Uri, Version};

use super::format::Entry;
use super::view::{self, View};
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
pub struct Asked {
    /// Which subject of the view.
    pub subject: u16,
    /// Which of its sizes; the first one is the standard.
    pub size: u16,
    /// Who, by the order in which they came.
    pub who: u32,
    /// Units.
    pub cost: u64,
}

/// A request that meets limits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// When, µs since the Unix epoch.
    pub at_us: u64,
    /// How long it took, µs.
    pub took_us: u64,
    /// The status that it got then; 0 where nobody knows.
    pub status: u16,
    /// What its limits are asked.
    pub asked: Box<[Asked]>,
}

/// What a line comes to.
#[derive(Debug, PartialEq, Eq)]
pub enum Resolved {
    /// Limits have a say.
    Limited(Event),
    /// None has.
    Unlimited,
    /// The gateway would turn it down before it asks a limit.
    Refused(Refused),
}

/// Why it would.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
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
pub struct Seen {
    numbers: HashMap<Identity, u32>,
    /// By number.
    pub identities: Vec<Identity>,
    /// What to call them.
    pub labels: Vec<Label>,
}

/// What to call an identity.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Label {
    /// Its network.
    Network(IpAddr),
    /// In words.
    Text(Box<str>),
}

/// Resolves lines, and remembers whom they named.
#[derive(Debug)]
pub struct Resolver<'v> {
    view: &'v View,
    /// The head of the line at hand; its parts are used again.
    request: Request<()>,
    /// By subject.
    pub seen: Vec<Seen>,
    /// By subject, its sizes.
    pub sizes: Vec<Vec<Arc<LimitVariant>>>,
    host: (Vec<u8>, Option<HeaderValue>),
    /// Lines whose peer is a trusted proxy that does not say for whom it speaks.
    pub unnamed: u64,
}

impl<'v> Resolver<'v> {
    /// A resolver that has seen nobody.
    pub fn new(view: &'v View) -> Self {
        Resolver {
            view,
            request: Request::new(()),
            seen: view.subjects.iter().map(|_| Seen::default()).collect(),
            sizes: view.subjects.iter().map(|subject| vec![subject.plan.clone()]).collect(),
            host: Default::default(),
            unnamed: 0,
        }
    }

    /// Finds out what the gateway would ask its limits about a request.
    pub fn resolve(&mut self, entry: &Entry<'_>) -> Resolved {
        if !self.head(entry) {
            return Resolved::Refused(Refused::NotHttp);
        }
        let runtime = &self.view.runtime;
        let target = match RequestTarget::from_request(&self.request, &runtime.server) {
            Ok(target) => target,
            Err(_) => return Resolved::Refused(Refused::Malformed),
        };
        let (method, headers) = (self.request.method(), self.request.headers());
        let named = entry.route.as_deref().and_then(|name| runtime.routes.iter().find(|route| *route.name == *name));
        let route: &Route = match named {
            Some(route) => route,
            None => match runtime.table.find(&target.host, &target.path, method, headers) {
                Ok(route) => route,
                Err(NoMatch::NotFound | NoMatch::MethodNotAllowed(_)) => return Resolved::Refused(Refused::NoRoute),
            },
        };
        let of_route = &self.view.routes[route.index];
        if of_route.limits.is_empty() {
            return Resolved::Unlimited;
        }
        let peer = entry.client.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        let trusted = !entry.resolved && runtime.client_ip.is_trusted(peer);
        let client = if trusted { runtime.client_ip.client_address(peer, headers) } else { peer };
        if trusted && !headers.contains_key(&runtime.client_ip.header) {
            self.unnamed += 1;
        }
        let subject = entry.subject.as_deref().and_then(|subject| std::str::from_utf8(subject).ok());
        let question = LimitContext {
            request: &self.request,
            host: &target.host,
            path: &target.path,
            trusted,
            certificate_subject: subject,
        };
        let consumers = of_route.by_key.then(|| runtime.consumers.load());
        let asker =
            question.request_attributes(runtime, route, client, consumers.as_deref().map(|consumers| &**consumers));
        let checks = match build_checks(runtime, &of_route.identities, &of_route.limits, &asker) {
            Ok(checks) => checks,
            Err(Rejection::Identity(_)) => return Resolved::Refused(Refused::NoIdentity),
            Err(_) => return Resolved::Refused(Refused::Malformed),
        };
        if checks.is_empty() {
            return Resolved::Unlimited;
        }
        let asked = checks.iter().map(|check| {
            let subject = of_route.subjects[check.limit_index];
            let by = &of_route.identities[of_route.limits[check.limit_index].identity_index];
            let label = || match &by.descriptors[..] {
                [Descriptor::Ip] => Label::Network(asker.client_network),
                _ if self.view.subjects[subject].secret => Label::Text(check.identity.short_hex().into()),
                _ => Label::Text(match headers.get(view::header(subject)) {
                    Some(stands) => String::from_utf8_lossy(stands.as_bytes()).into(),
                    None => {
                        let name = by.display(&asker, &runtime.api_key_settings, &runtime.client_ip);
                        name.summary(&check.identity.short_hex()).into()
                    }
                }),
            };
            let who = self.seen[subject].number(check.identity, label);
            let sizes = &mut self.sizes[subject];
            let of_subject = &self.view.subjects[subject];
            let stands = || of_subject.consumers.get(headers.get(view::header(subject))?.as_bytes());
            let own = match Arc::ptr_eq(check.variant, &check.limit.default_variant) {
                true if of_subject.consumers.is_empty() => None,
                true => stands(),
                false => Some(check.variant),
            };
            let size = own.map_or(0, |own| {
                sizes.iter().position(|size| size.id == own.id).unwrap_or_else(|| {
                    sizes.push(own.clone());
                    sizes.len() - 1
                })
            });
            // What only the response or a proxy said may be in the log.
            let known = entry.costs.iter().find(|(name, _)| **name == *check.limit.name).map(|(_, cost)| *cost);
            let said = !matches!(of_route.limits[check.limit_index].cost, Cost::Fixed(_));
            let cost = known.filter(|_| said).unwrap_or(check.cost);
            Asked { subject: subject as u16, size: size as u16, who, cost }
        });
        Resolved::Limited(Event {
            at_us: entry.at_us,
            took_us: entry.took_us.unwrap_or(0),
            status: entry.status.unwrap_or(0),
            asked: asked.collect(),
        })
    }

    /// Makes the head of a request of what a line says; whether it is one.
    fn head(&mut self, entry: &Entry<'_>) -> bool {
        let Ok(method) = Method::from_bytes(entry.method) else { return false };
        let Ok(uri) = Uri::try_from(&*entry.target) else { return false };
        let host = entry.host.as_deref().or_else(|| uri.authority().map(|authority| authority.as_str().as_bytes()));
        // Without a host it is routed as HTTP/1.0 without one is.
        *self.request.version_mut() = if host.is_some() { Version::HTTP_11 } else { Version::HTTP_10 };
        let value = host.map(|host| {
            if self.host.1.is_none() || self.host.0 != host {
                self.host = (host.to_vec(), HeaderValue::from_bytes(host).ok());
            }
            self.host.1.clone()
        });
        let headers: &mut HeaderMap = self.request.headers_mut();
        headers.clear();
        match value {
            Some(Some(value)) => drop(headers.insert(HOST, value)),
            Some(None) => return false,
            None => {}
        }
        for (name, value) in &entry.fields {
            if let Ok(value) = HeaderValue::from_bytes(value) {
                headers.append(name, value);
            }
        }
        *self.request.method_mut() = method;
        *self.request.uri_mut() = uri;
        true
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Label::Network(address) => address.fmt(f),
            Label::Text(text) => f.write_str(text),
        }
    }
}

impl Seen {
    fn number(&mut self, identity: Identity, label: impl FnOnce() -> Label) -> u32 {
        *self.numbers.entry(identity).or_insert_with(|| {
            self.identities.push(identity);
            self.labels.push(label());
            (self.identities.len() - 1) as u32
        })
    }
}
