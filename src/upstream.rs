//! Upstreams: sends a request on and hands its answer back.

mod advice;
mod connect;
pub mod fleet;
mod http2;
mod link;
mod pool;
pub mod resolve;
pub mod tls;

use std::error::Error;
use std::fmt::{self, Display};
use std::sync::Arc;

use arc_swap::ArcSwap;
use http::{Request, Response};
use hyper::body::Incoming;

use crate::http::body::Body;
use crate::http::bounds::Bounds;
use fleet::{Fleet, Member};
use link::Link;

/// What is spoken with an upstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.1, a connection for each request at a time.
    Http1,
    /// HTTP/2 by prior knowledge, with TLS by ALPN; one connection for all.
    Http2,
}

/// Why an upstream gave no answer.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum UpstreamError {
    #[error("upstream `{upstream}` has no server that could be asked")]
    NoServer { upstream: Box<str> },
    #[error("connecting to upstream `{upstream}` failed: {source}")]
    Connect { upstream: Box<str>, source: std::io::Error },
    #[error("connecting to upstream `{upstream}` took too long")]
    ConnectTimeout { upstream: Box<str> },
    #[error("upstream `{upstream}` broke off: {}", Reason(source))]
    Broken { upstream: Box<str>, source: hyper::Error },
    #[error("upstream `{upstream}` switched to a protocol that it was not asked for")]
    Switched { upstream: Box<str> },
    #[error("upstream `{upstream}` did not answer in time")]
    ResponseTimeout { upstream: Box<str> },
    #[error("upstream `{upstream}` did not answer before the timeout of the route was over")]
    Overdue { upstream: Box<str> },
    #[error("the client stopped sending the request body")]
    ClientStalled,
    #[error("the request body is longer than the route allows")]
    BodyTooLarge,
    #[error("the client broke off the request body: {0}")]
    ClientBroken(hyper::Error),
}

impl UpstreamError {
    /// Whether the upstream has nothing to do with it.
    pub fn is_clients_fault(&self) -> bool {
        matches!(self, UpstreamError::ClientStalled | UpstreamError::BodyTooLarge | UpstreamError::ClientBroken(_))
    }
}

/// What hyper says of a failure, and what was behind it.
struct Reason<'a>(&'a hyper::Error);

impl Display for Reason<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Reason(error) = self;
        write!(f, "{error}")?;
        let mut root = error.source();
        while let Some(deeper) = root.and_then(Error::source) {
            root = Some(deeper);
        }
        if let Some(root) = root {
            write!(f, ": {root}")?;
        }
        if error.is_parse() {
            // What answers to plain text, then, is an alert.
            write!(f, "; a server that speaks TLS is written https://")?;
        }
        Ok(())
    }
}

/// One worker's way to an upstream.
#[derive(Debug)]
pub struct Upstream {
    fleet: Arc<Fleet>,
    links: ArcSwap<Links>,
}

/// The ways to the members of a fleet.
#[derive(Debug)]
struct Links {
    of: Arc<Vec<Arc<Member>>>,
    /// To each of them, in their order.
    all: Vec<Arc<Link>>,
}

impl Upstream {
    /// Without connections yet.
    pub fn new(fleet: Arc<Fleet>) -> Self {
        let links = ArcSwap::from_pointee(Links { of: Arc::default(), all: Vec::new() });
        Upstream { fleet, links }
    }

    /// To the members that there are now; connections to those that were there before stay.
    fn links(&self) -> Arc<Links> {
        let (members, links) = (self.fleet.members(), self.links.load_full());
        if Arc::ptr_eq(&members, &links.of) {
            return links;
        }
        let link = |member: &Arc<Member>| {
            let known = links.all.iter().find(|link| link.leads_to(member)).cloned();
            known.unwrap_or_else(|| Arc::new(Link::new(self.fleet.settings.clone(), member.clone())))
        };
        let links = Arc::new(Links { all: members.iter().map(link).collect(), of: members });
        self.links.store(links.clone());
        links
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.fleet.settings.name
    }

    /// What it speaks.
    pub fn protocol(&self) -> Protocol {
        self.fleet.settings.protocol
    }

    /// Host and port, for requests that name no host.
    pub fn authority(&self) -> &str {
        &self.fleet.settings.servers[0].authority
    }

    /// Sends a request and waits for the head of the response. Dropping the future cancels the request.
    ///
    /// # Errors
    /// See [`UpstreamError`].
    pub async fn send(&self, request: Request<Incoming>, bounds: Bounds) -> Result<Response<Body>, UpstreamError> {
        let link = self.links().all.first().cloned();
        let link = link.ok_or_else(|| UpstreamError::NoServer { upstream: self.name().into() })?;
        link.send(request, bounds).await
    }
}
