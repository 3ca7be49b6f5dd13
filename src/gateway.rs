//! The path of a request, top to bottom.

pub mod addressed;
pub mod ask;
pub mod decide;
pub mod denied;
mod early;
mod forward;
mod generation;
pub mod meters;
mod noted;
mod peer;
pub mod request_id;
pub mod tell;

use std::sync::Arc;

use arc_swap::ArcSwap;
use http::header::CONTENT_LENGTH;
use http::uri::PathAndQuery;
use http::{HeaderValue, Method, Request, Response, Version};
use http_body::Body as _;
use tokio::time::Instant;
use tracing::{debug, warn};

use crate::account::{Arrival, Record, Sinks};
use crate::http::body::Body;
use crate::http::headers::is_grpc_call;
use crate::http::upload::RequestBody;
use crate::limit::Limiter;
use crate::limit::clock::monotonic;
use crate::limit::decision::Decision;
use crate::reply::Rejection;
use crate::runtime::{Route, Runtime, Target};
use crate::upstream::fleet::Fleet;
use crate::upstream::{Trail, UpstreamError};
use addressed::{Addressed, origin_form};
use ask::Question;
use forward::Onward;
use generation::Generation;
use meters::Tallies;
pub use peer::Peer;
use request_id::RequestId;

/// One worker's gateway.
#[derive(Debug)]
pub struct Gateway {
    /// Each request has one of them from its beginning to its end.
    current: ArcSwap<Generation>,
    limiter: Limiter,
    /// Of this worker alone: each request counts whoever refers to them.
    sinks: Arc<Sinks>,
    tallies: Arc<Tallies>,
    /// Which one it is.
    worker: usize,
}

impl Gateway {
    /// A gateway with connections of its own to these upstreams, which are those of the runtime. It counts as this `worker`.
    pub fn new(
        runtime: Arc<Runtime>,
        limiter: Limiter,
        fleets: &[Arc<Fleet>],
        sinks: Sinks,
        (tallies, worker): (Arc<Tallies>, usize),
    ) -> Self {
        let current = ArcSwap::from_pointee(Generation::new(runtime, fleets, &tallies, worker));
        Gateway { current, limiter, sinks: Arc::new(sinks), tallies, worker }
    }

    /// Serves another configuration from the next request on. What is the same in both goes on: counts, and connections
    /// to upstreams.
    pub fn adopt(&self, runtime: Arc<Runtime>, fleets: &[Arc<Fleet>]) {
        let next = Generation::succeeding(&self.current.load(), runtime, fleets, &self.tallies, self.worker);
        self.current.store(Arc::new(next));
    }

    /// The configuration that it serves.
    pub fn runtime(&self) -> Arc<Runtime> {
        self.current.load().runtime.clone()
    }

    /// Waits until what requests leave behind (leases to release, late charges) is done.
    pub async fn settle(&self) {
        self.limiter.settle().await;
    }

    /// Answers a request. Dropping the future ends whatever it waits for.
    pub async fn handle(&self, request: Box<Request<RequestBody>>, peer: &Peer) -> Response<Body> {
        let arrived = monotonic();
        let generation = self.current.load_full();
        let renewed = peer.under(&generation.runtime);
        let peer = renewed.as_deref().unwrap_or(peer);
        let arrival = Arrival {
            at: arrived,
            peer: peer.address,
            scheme: if peer.origin.scheme == "https" { "https" } else { "http" },
            method: request.method(),
            path: request.uri().path(),
            headers: request.headers(),
        };
        let mut met = Met { record: Record::open(&self.sinks, &arrival), route: None, id: None };
        if met.record.is_some() {
            met.identify(&request, peer);
        }
        let early = early::is_possible(&request);
        let is_head = request.method() == Method::HEAD && request.version() == Version::HTTP_2;
        let (mut response, outcome) = match self.serve(&generation, request, peer, &mut met).await {
            Ok(response) => (response, "ok"),
            Err(rejection) => {
                let id = met.id.as_ref().map(RequestId::value);
                let request_id = id.as_ref().and_then(|id| id.to_str().ok());
                match &rejection {
                    Rejection::Upstream(error) if error.is_clients_fault() => {
                        debug!(%error, request_id, "no whole request");
                    }
                    Rejection::Upstream(error) => warn!(%error, request_id, "no answer from upstream"),
                    _ => {}
                }
                rejection.into_response(id)
            }
        };
        generation.meters.answered(met.route, response.status(), arrived.elapsed());
        if early {
            early::say_close(&mut response);
        }
        if is_head && let Some(length) = response.body_mut().withhold() {
            response.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from(length));
        }
        match met.record {
            Some(record) => record.attach(response, outcome),
            None => response,
        }
    }

    async fn serve<'g>(
        &self,
        generation: &'g Generation,
        request: Box<Request<RequestBody>>,
        peer: &Peer,
        met: &mut Met,
    ) -> Result<Response<Body>, Rejection<'g>> {
        let Generation { runtime, upstreams, meters } = generation;
        let admitted = self.admit(generation, &request, peer, met).await;
        let Admitted { route, mut decision, path, rewritten, deadline } = match admitted {
            Ok(admitted) => admitted,
            Err(rejection) => {
                if let Rejection::Unavailable(_) = rejection {
                    met.identify(&request, peer);
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
                let (index, asked) = (split.draw(), monotonic());
                let upstream = &*upstreams[index];
                let mut trail = Trail::new(met.record.is_some());
                let trace = met.record.as_ref().and_then(|record| record.trace);
                let target = rewritten.or_else(|| origin_form(request.uri(), path.as_deref()));
                let id = met.identify(&request, peer);
                let onward = Onward { peer, id, target, deadline, trace, trail: &mut trail };
                let answer = if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                    // Limits that let it wait took all of its time.
                    early::leave(request);
                    Err(UpstreamError::Overdue { upstream: upstream.name().into() })
                } else {
                    // On the heap: inside this future it would be moved with it, for every request.
                    Box::pin(forward::forward(runtime, route, upstream, request, onward)).await
                };
                meters.sent(index, &answer, asked.elapsed(), &trail);
                if let Some(record) = &mut met.record {
                    noted::sent(record, upstream, &trail, &answer, asked);
                    noted::paid(record, route, &answer);
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
        if let Some(leases) = decision.leases {
            response.body_mut().keep(leases);
        }
        Ok(response)
    }

    /// Whether a request may go on. Nothing of its body is asked for yet, so nobody who waits for 100 sends one in vain.
    async fn admit<'g>(
        &self,
        generation: &'g Generation,
        request: &Request<RequestBody>,
        peer: &Peer,
        met: &mut Met,
    ) -> Result<Admitted<'g>, Rejection<'g>> {
        let Generation { runtime, meters, .. } = generation;
        let target = Addressed::read(request, &runtime.server)?;
        let route = target.route(runtime, request)?;
        met.route = Some(route.index);
        if route.max_body.is_some_and(|most| request.body().size_hint().lower() > most) {
            return Err(Rejection::BodyTooLarge);
        }
        let deadline = route.timeout.map(|timeout| Instant::now() + timeout);
        let rewritten = target.rewritten(route, request.uri().query())?;
        let (host, path, subject) = (&*target.host, &*target.path, peer.subject.as_deref());
        let asked = Question { request, host, path, trusted: peer.origin.trusted, subject };
        let decision = if route.metering.limits.is_empty() && met.record.is_none() {
            Decision::unlimited()
        } else {
            // On the heap: requests without limits need no room for it.
            let record = met.record.as_deref_mut();
            Box::pin(decide::decide(runtime, &self.limiter, meters, route, &asked, peer, record)).await?
        };
        if !decision.admitted {
            return Err(Rejection::OverLimit {
                decision,
                dialects: &route.metering.dialects,
                expose: route.metering.expose.as_ref(),
                grpc: is_grpc_call(request),
            });
        }
        let path = (target.forwarded() != request.uri().path()).then(|| target.forwarded().to_owned());
        Ok(Admitted { route, decision, path, rewritten, deadline })
    }
}

/// What is found out of a request on its way, and needed whatever becomes of it.
struct Met {
    record: Option<Box<Record>>,
    /// The place of its route.
    route: Option<usize>,
    /// What it is called in logs and problems.
    id: Option<RequestId>,
}

impl Met {
    /// Gives a request its name.
    fn identify(&mut self, request: &Request<RequestBody>, peer: &Peer) -> &RequestId {
        let Met { record, id, .. } = self;
        id.get_or_insert_with(|| {
            let id = RequestId::of(request.headers(), peer.origin.trusted);
            if let Some(record) = record
                && let Ok(text) = id.value().to_str()
            {
                record.request_id = text.into();
            }
            id
        })
    }
}

/// A request that its limits let pass.
struct Admitted<'a> {
    route: &'a Route,
    decision: Decision<'a>,
    /// The path that is forwarded, where it came in another form.
    path: Option<String>,
    /// What its route makes of path and query.
    rewritten: Option<PathAndQuery>,
    /// When its route's timeout is over.
    deadline: Option<Instant>,
}
