//! The path of a request, top to bottom.

mod decide;
mod early;
mod forward;
pub mod meters;
mod request_id;

use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::Arc;

use http::header::TRANSFER_ENCODING;
use http::uri::{PathAndQuery, Uri};
use http::{Method, Request, Response};
use http_body::Body as _;
use hyper::body::Incoming;
use tokio::time::Instant;
use tracing::{debug, warn};

use crate::account::Record;
use crate::http::body::Body;
use crate::http::headers::{Origin, is_grpc};
use crate::http::host;
use crate::http::path::canonical;
use crate::limit::Limiter;
use crate::limit::clock::monotonic;
use crate::limit::decision::Decision;
use crate::observe::access::AccessLog;
use crate::reply::Rejection;
use crate::route::NoMatch;
use crate::runtime::{Route, Runtime, Target};
use crate::upstream::fleet::Fleet;
use crate::upstream::{Upstream, UpstreamError};
use decide::Question;
use forward::Onward;
use meters::{Meters, Tallies};
use request_id::RequestId;

/// Bytes of the longest target that `http::Uri` can say.
const LONGEST_URI: usize = 65_534;

/// One worker's gateway.
#[derive(Debug)]
pub struct Gateway {
    runtime: Arc<Runtime>,
    limiter: Limiter,
    upstreams: Vec<Upstream>,
    meters: Meters,
    access: Option<AccessLog>,
}

/// The other end of a downstream connection.
#[derive(Debug)]
pub struct Peer {
    /// Its address; IPv4-mapped ones as IPv4.
    pub address: IpAddr,
    /// What upstreams are told of it.
    pub origin: Origin,
    /// The subject of its certificate, which was verified.
    pub subject: Option<Box<str>>,
}

impl Peer {
    /// The peer of a connection.
    pub fn new(address: IpAddr, scheme: &'static str, runtime: &Runtime) -> Self {
        let address = address.to_canonical();
        Peer { address, origin: Origin::new(address, scheme, runtime.client_ip.trusts(address)), subject: None }
    }
}

impl Gateway {
    /// A gateway with connections of its own to these upstreams, which are those of the runtime. It counts as this `worker`.
    pub fn new(
        runtime: Arc<Runtime>,
        limiter: Limiter,
        fleets: &[Arc<Fleet>],
        access: Option<AccessLog>,
        (tallies, worker): (&Tallies, usize),
    ) -> Self {
        let meters = Meters::new(tallies, &runtime, worker);
        let upstreams = fleets.iter().cloned().map(Upstream::new).collect();
        Gateway { runtime, limiter, upstreams, meters, access }
    }

    /// The configuration that it serves.
    pub fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    /// Waits until what requests leave behind (leases to release, late charges) is done.
    pub async fn settle(&self) {
        self.limiter.settle().await;
    }

    /// Answers a request. Dropping the future ends whatever it waits for.
    pub async fn handle(&self, request: Request<Incoming>, peer: &Peer) -> Response<Body> {
        let (arrived, mut met) = (monotonic(), Met::default());
        let open = |log: &AccessLog| {
            Record::open(log.clone(), arrived, peer.address, request.method().clone(), request.uri().path())
        };
        let mut record = self.access.as_ref().map(open);
        let early = early::is_possible(&request);
        let (mut response, outcome) = match self.serve(request, peer, record.as_mut(), &mut met).await {
            Ok(response) => (response, "ok"),
            Err(rejection) => {
                let id = met.id.as_ref().map(RequestId::value);
                match &rejection {
                    Rejection::Upstream(error) if error.is_clients_fault() => debug!(%error, "no whole request"),
                    Rejection::Upstream(error) => warn!(%error, request_id = ?id, "no answer from upstream"),
                    _ => {}
                }
                rejection.into_response(id)
            }
        };
        self.meters.answered(met.route, response.status(), arrived.elapsed());
        if early {
            early::say_close(&mut response);
        }
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
        met: &mut Met,
    ) -> Result<Response<Body>, Rejection<'_>> {
        let trusted = peer.origin.trusted;
        let Admitted { route, mut decision, path, rewritten, deadline } =
            match self.admit(&request, peer, record.as_deref_mut(), met).await {
                Ok(admitted) => admitted,
                Err(rejection) => {
                    if let Rejection::Unavailable(_) = rejection {
                        note(met.id.insert(RequestId::of(request.headers(), trusted)), record);
                    }
                    early::leave(request);
                    return Err(rejection);
                }
            };
        let answer = match &route.target {
            Target::Respond(respond) => {
                early::leave(request);
                Ok(respond.response())
            }
            Target::Redirect(redirect) => {
                let path = path.as_deref().unwrap_or(request.uri().path());
                let response = redirect.response(&route.pattern, path, request.uri().query());
                early::leave(request);
                Ok(response)
            }
            Target::Upstream(split) => {
                let index = split.draw();
                let (upstream, asked) = (&self.upstreams[index], monotonic());
                let id = met.id.insert(RequestId::of(request.headers(), trusted));
                note(id, record);
                let target = rewritten.or_else(|| origin_form(request.uri(), path.as_deref()));
                let onward = Onward { peer, id, target, deadline };
                let answer = if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                    // Limits that let it wait took all of its time.
                    early::leave(request);
                    Err(UpstreamError::Overdue { upstream: upstream.name().into() })
                } else {
                    // On the heap: inside this future it would be moved with it, for every request.
                    Box::pin(forward::forward(&self.runtime, route, upstream, request, onward)).await
                };
                if !answer.as_ref().is_err_and(UpstreamError::is_clients_fault) {
                    self.meters.upstreams[index].note(answer.as_ref().ok().map(Response::status), asked.elapsed());
                }
                answer
            }
        };
        if let Some(settling) = decision.debts.take().and_then(|debts| decide::settle(*debts, route, &answer)) {
            decide::correct(&mut decision, settling.await);
        }
        let mut response = answer.map_err(Rejection::Upstream)?;
        // What a cost is taken from may be removed, what limits say is added to the rest.
        route.response_headers.apply(response.headers_mut());
        decide::advertise(response.headers_mut(), route, &decision);
        Ok(match decision.leases {
            Some(leases) => response.map(|body| body.keeping(leases)),
            None => response,
        })
    }

    /// Whether a request may go on. Nothing of its body is asked for yet, so nobody who waits for 100 sends one in vain.
    async fn admit<'a>(
        &'a self,
        request: &Request<Incoming>,
        peer: &Peer,
        record: Option<&mut Record>,
        met: &mut Met,
    ) -> Result<Admitted<'a>, Rejection<'a>> {
        let target = Addressed::read(request, self.runtime.server.max_uri)?;
        let route = match self.runtime.table.find(&target.host, &target.path, request.method(), request.headers()) {
            Ok(route) => route,
            Err(NoMatch::Nothing) => return Err(Rejection::NoRoute),
            Err(NoMatch::Method(allowed)) => return Err(Rejection::MethodNotAllowed(allowed)),
        };
        met.route = Some(route.index);
        if route.max_body.is_some_and(|most| request.body().size_hint().lower() > most) {
            return Err(Rejection::BodyTooLarge);
        }
        let deadline = route.timeout.map(|timeout| Instant::now() + timeout);
        let rewritten = match &route.rewrite {
            Some(rewrite) => {
                let target = rewrite.target(&route.pattern, &target.path, request.uri().query());
                // Canonical again, and so a target unless it is longer than one can be.
                Some(PathAndQuery::try_from(target).map_err(|_| Rejection::UriTooLong)?)
            }
            None => None,
        };
        let asked = Question { request, host: &target.host, path: &target.path, peer };
        let decision = decide::decide(&self.runtime, &self.limiter, &self.meters, route, &asked, record).await?;
        if !decision.admitted {
            return Err(Rejection::OverLimit {
                decision,
                dialects: &route.metering.dialects,
                expose: route.metering.expose.as_ref(),
                grpc: is_grpc(request.headers()),
            });
        }
        let path = (*target.path != *request.uri().path()).then(|| target.path.into_owned());
        Ok(Admitted { route, decision, path, rewritten, deadline })
    }
}

/// What is found out of a request on its way, and needed whatever becomes of it.
#[derive(Default)]
struct Met {
    /// The place of its route.
    route: Option<usize>,
    /// What it is called in logs and problems.
    id: Option<RequestId>,
}

/// A request that its limits let pass.
struct Admitted<'a> {
    route: &'a Route,
    decision: Decision<'a>,
    /// Its path in canonical form, where it came in another.
    path: Option<String>,
    /// What its route makes of path and query.
    rewritten: Option<PathAndQuery>,
    /// When its route's timeout is over.
    deadline: Option<Instant>,
}

/// The id goes into the access log.
fn note(id: &RequestId, record: Option<&mut Record>) {
    if let Some(record) = record
        && let Ok(text) = id.value().to_str()
    {
        record.request_id = text.into();
    }
}

/// Path and query only, the path in canonical form; none where they came like that.
fn origin_form(uri: &Uri, path: Option<&str>) -> Option<PathAndQuery> {
    if path.is_none() && uri.authority().is_none() {
        return None;
    }
    let path = path.unwrap_or(uri.path());
    let target = match uri.query() {
        Some(query) => format!("{path}?{query}"),
        None => path.to_owned(),
    };
    // A canonical path and a query that was parsed before are valid.
    Some(PathAndQuery::try_from(target).unwrap_or(PathAndQuery::from_static("/")))
}

/// Where a request wants to go, in the form that routes are matched by.
struct Addressed<'a> {
    host: Cow<'a, str>,
    path: Cow<'a, str>,
}

impl<'a> Addressed<'a> {
    fn read(request: &'a Request<Incoming>, max_uri: usize) -> Result<Self, Rejection<'static>> {
        let uri = request.uri();
        // First, since it ends the connection: whatever else is wrong, what follows may not be a request.
        let mut codings = request.headers().get_all(TRANSFER_ENCODING).iter();
        let chunked = codings.next().is_none_or(|coding| coding.as_bytes().eq_ignore_ascii_case(b"chunked"));
        if !chunked || codings.next().is_some() {
            return Err(Rejection::TransferCoding);
        }
        if matches!(*request.method(), Method::CONNECT | Method::TRACE) {
            return Err(Rejection::Method);
        }
        let length = uri.path_and_query().map_or(0, |target| target.as_str().len());
        if length > max_uri {
            return Err(Rejection::UriTooLong);
        }
        let host = host::routed(uri, request.headers(), request.version()).map_err(Rejection::Host)?;
        let path = canonical(uri.path()).map_err(Rejection::Path)?;
        // Encoding makes some longer than they came, and longer than a target can be.
        if length - uri.path().len().min(length) + path.len() > max_uri.min(LONGEST_URI) {
            return Err(Rejection::UriTooLong);
        }
        Ok(Addressed { host, path })
    }
}
