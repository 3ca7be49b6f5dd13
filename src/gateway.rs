//! The path of a request, top to bottom.

use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::Arc;

use http::header::{ACCESS_CONTROL_EXPOSE_HEADERS, CONTENT_TYPE, EXPECT, HOST, HeaderValue, TRANSFER_ENCODING};
use http::{HeaderMap, Method, Request, Response, Uri, Version, uri};
use hyper::body::Incoming;
use tracing::{debug, warn};
use uuid::Uuid;

use crate::account::Record;
use crate::http::body::Body;
use crate::http::headers::{self, Origin, X_REQUEST_ID};
use crate::http::path::canonical;
use crate::http::{fields, host};
use crate::identity::Asker;
use crate::limit::key::Encoder;
use crate::limit::{Check, Decision, Limiter};
use crate::observe::access::AccessLog;
use crate::reply::{Rejection, binding, standing};
use crate::route::NoMatch;
use crate::runtime::{Route, Runtime, Target};
use crate::upstream::Upstream;

/// One worker's gateway.
#[derive(Debug)]
pub struct Gateway {
    runtime: Arc<Runtime>,
    limiter: Limiter,
    upstreams: Vec<Upstream>,
    access: Option<AccessLog>,
}

/// The other end of a downstream connection.
#[derive(Debug)]
pub struct Peer {
    /// Its address; IPv4-mapped ones as IPv4.
    pub address: IpAddr,
    /// What upstreams are told of it.
    pub origin: Origin,
}

impl Peer {
    /// The peer of a connection.
    pub fn new(address: IpAddr, scheme: &'static str, runtime: &Runtime) -> Self {
        let address = address.to_canonical();
        Peer { address, origin: Origin::new(address, scheme, runtime.client_ip.trusts(address)) }
    }
}

impl Gateway {
    /// A gateway with connections of its own.
    pub fn new(runtime: Arc<Runtime>, limiter: Limiter, access: Option<AccessLog>) -> Self {
        let upstreams = runtime.upstreams.iter().cloned().map(Upstream::new).collect();
        Gateway { runtime, limiter, upstreams, access }
    }

    /// The configuration that it serves.
    pub fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    /// Answers a request. Dropping the future ends whatever it waits for.
    pub async fn handle(&self, request: Request<Incoming>, peer: &Peer) -> Response<Body> {
        let mut record = self
            .access
            .as_ref()
            .map(|log| Record::open(log.clone(), peer.address, request.method().clone(), request.uri().path()));
        let (response, outcome) = match self.serve(request, peer, record.as_mut()).await {
            Ok(response) => (response, "ok"),
            Err(rejection) => {
                match &rejection {
                    Rejection::Upstream(error) if error.is_clients_fault() => debug!(%error, "no whole request"),
                    Rejection::Upstream(error) => warn!(%error, "no answer from upstream"),
                    _ => {}
                }
                rejection.into_response()
            }
        };
        match record {
            Some(record) => record.attach(response, outcome),
            None => response,
        }
    }

    async fn serve(
        &self,
        request: Request<Incoming>,
        peer: &Peer,
        mut record: Option<&mut Record>,
    ) -> Result<Response<Body>, Rejection<'_>> {
        let target = Addressed::read(&request, self.runtime.server.max_uri)?;
        let route = match self.runtime.table.find(&target.host, &target.path, request.method(), request.headers()) {
            Ok(route) => route,
            Err(NoMatch::Nothing) => return Err(Rejection::NoRoute),
            Err(NoMatch::Method(allowed)) => return Err(Rejection::MethodNotAllowed(allowed)),
        };
        let asked = Question { request: &request, host: &target.host, path: &target.path, peer };
        let decision = self.decide(route, &asked, record.as_deref_mut()).await?;
        if !decision.admitted {
            return Err(Rejection::OverLimit {
                decision,
                dialects: &route.metering.dialects,
                expose: route.metering.expose.as_ref(),
            });
        }
        let path = (*target.path != *request.uri().path()).then(|| target.path.into_owned());
        let mut response = match &route.target {
            Target::Respond(respond) => {
                let mut response = Response::new(Body::full(respond.body.clone()));
                *response.status_mut() = respond.status;
                response.headers_mut().insert(CONTENT_TYPE, respond.content_type.clone());
                response
            }
            // On the heap: inside this future it would be moved with it, for every request.
            Target::Upstream(index) => {
                Box::pin(self.forward(&self.upstreams[*index], request, path, peer, record)).await?
            }
        };
        advertise(response.headers_mut(), route, &decision);
        Ok(response)
    }

    /// Asks all limits of a route at once.
    async fn decide<'a>(
        &'a self,
        route: &'a Route,
        asked: &Question<'_>,
        mut record: Option<&mut Record>,
    ) -> Result<Decision<'a>, Rejection<'a>> {
        let (runtime, peer, headers) = (&self.runtime, asked.peer, asked.request.headers());
        let mut checks = Vec::with_capacity(route.metering.limits.len());
        if !route.metering.limits.is_empty() || record.is_some() {
            let client = runtime.client_ip.client(peer.address, headers);
            let network = runtime.client_ip.network(client);
            let asker = Asker {
                method: asked.request.method(),
                host: asked.host,
                path: asked.path,
                query: asked.request.uri().query(),
                headers,
                client,
                network,
                trusted: peer.origin.trusted,
                route: &route.name,
                pattern: &route.pattern,
            };
            let mut encoder = Encoder::default();
            let mut identify =
                |by: &crate::identity::By| by.identify(&asker, &runtime.api_keys, &runtime.hasher, &mut encoder);
            let identities: Result<Vec<_>, _> = route.metering.identities.iter().map(&mut identify).collect();
            if let Some(record) = &mut record {
                record.client = client;
                record.route = Some(route.name.clone());
            }
            let identities = identities.map_err(Rejection::Identity)?;
            for (limit, index) in &route.metering.limits {
                checks.extend(identities[*index].map(|identity| Check { limit, identity, cost: route.metering.cost }));
            }
        }
        let decision = self.limiter.check(&checks).await.map_err(Rejection::Unavailable)?;
        if let Some(record) = record.filter(|_| !checks.is_empty()) {
            record.decided_by = Some(decision.source.word());
            record.shadow_denied = decision.shadow_denied.iter().map(|limit| limit.name.clone()).collect();
        }
        Ok(decision)
    }

    async fn forward(
        &self,
        upstream: &Upstream,
        request: Request<Incoming>,
        path: Option<String>,
        peer: &Peer,
        record: Option<&mut Record>,
    ) -> Result<Response<Body>, Rejection<'_>> {
        let (mut parts, body) = request.into_parts();
        let headers = &mut parts.headers;
        headers::strip_hop_by_hop(headers);
        // Our own side answers 100-continue, when the body is first asked for.
        headers.remove(EXPECT);
        headers::strip_untrusted(headers, &self.runtime.trusted_headers, peer.origin.trusted);
        if parts.version == Version::HTTP_2 {
            headers::join_cookies(headers);
        }
        // The host that was routed on is the only one.
        if let Some(authority) = parts.uri.authority() {
            // An authority is a valid value.
            if let Ok(host) = HeaderValue::from_str(authority.as_str()) {
                headers.insert(HOST, host);
            }
        }
        let host = headers.get(HOST).cloned();
        if let (None, Ok(host)) = (&host, HeaderValue::from_str(upstream.authority())) {
            headers.insert(HOST, host);
        }
        headers::set_forwarded(headers, &peer.origin, host.as_ref(), parts.version);
        let id = headers.entry(X_REQUEST_ID).or_insert_with(request_id);
        if let (Some(record), Ok(id)) = (record, id.to_str()) {
            record.request_id = id.into();
        }
        if path.is_some() || parts.uri.authority().is_some() {
            parts.uri = origin_form(&parts.uri, path.as_deref());
        }
        parts.version = Version::HTTP_11;
        let response = upstream.send(Request::from_parts(parts, body)).await.map_err(Rejection::Upstream)?;
        let (mut parts, body) = response.into_parts();
        headers::strip_hop_by_hop(&mut parts.headers);
        parts.version = Version::HTTP_11;
        Ok(Response::from_parts(parts, body))
    }
}

/// What a decision is about.
struct Question<'a> {
    request: &'a Request<Incoming>,
    host: &'a str,
    path: &'a str,
    peer: &'a Peer,
}

/// Where a request wants to go, in the form that routes are matched by.
struct Addressed<'a> {
    host: Cow<'a, str>,
    path: Cow<'a, str>,
}

impl<'a> Addressed<'a> {
    fn read(request: &'a Request<Incoming>, max_uri: usize) -> Result<Self, Rejection<'static>> {
        let uri = request.uri();
        if matches!(*request.method(), Method::CONNECT | Method::TRACE) {
            return Err(Rejection::Method);
        }
        if uri.path_and_query().map_or(0, |target| target.as_str().len()) > max_uri {
            return Err(Rejection::UriTooLong);
        }
        let mut codings = request.headers().get_all(TRANSFER_ENCODING).iter();
        let chunked = codings.next().is_none_or(|coding| coding.as_bytes().eq_ignore_ascii_case(b"chunked"));
        if !chunked || codings.next().is_some() {
            return Err(Rejection::TransferCoding);
        }
        let host = host::routed(uri, request.headers(), request.version()).map_err(Rejection::Host)?;
        let path = canonical(uri.path()).map_err(Rejection::Path)?;
        Ok(Addressed { host, path })
    }
}

/// The RateLimit fields of an admitted request.
fn advertise(headers: &mut HeaderMap, route: &Route, decision: &Decision<'_>) {
    let standings = || decision.limits.iter().map(|(limit, outcome)| standing(limit, outcome));
    let all = decision.limits.len() == route.metering.limits.iter().filter(|(limit, _)| !limit.shadow).count();
    let policy = if all { route.metering.policy.clone() } else { fields::policy(standings()) };
    fields::advertise(headers, &route.metering.dialects, policy, standings(), binding(decision), decision.now_us);
    if let Some(expose) = route.metering.expose.as_ref().filter(|_| !decision.limits.is_empty()) {
        headers.append(ACCESS_CONTROL_EXPOSE_HEADERS, expose.clone());
    }
}

fn request_id() -> HeaderValue {
    let mut text = [0; uuid::fmt::Hyphenated::LENGTH];
    let id = Uuid::now_v7().hyphenated().encode_lower(&mut text);
    // Hex digits and hyphens are a valid value.
    HeaderValue::from_str(id).unwrap_or(HeaderValue::from_static("-"))
}

/// Path and query only, the path in canonical form.
fn origin_form(uri: &Uri, path: Option<&str>) -> Uri {
    let path = path.unwrap_or(uri.path());
    let target = match uri.query() {
        Some(query) => format!("{path}?{query}"),
        None => path.to_owned(),
    };
    // A canonical path and a query that was parsed before are valid.
    uri::PathAndQuery::try_from(target).map_or_else(|_| Uri::from_static("/"), Uri::from)
}
