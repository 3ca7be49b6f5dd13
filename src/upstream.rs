//! Upstreams: sends a request on and hands its answer back.

pub mod fleet;
mod http2;
mod link;
mod pool;

use std::sync::Arc;

use http::{Request, Response};
use hyper::body::Incoming;

use crate::http::body::Body;
use crate::http::bounds::Bounds;
use fleet::Fleet;
use link::Link;

/// What is spoken with an upstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.1, a connection for each request at a time.
    Http1,
    /// HTTP/2 by prior knowledge, one connection for all.
    Http2,
}

/// Why an upstream gave no answer.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum UpstreamError {
    #[error("connecting to upstream `{upstream}` failed: {source}")]
    Connect { upstream: Box<str>, source: std::io::Error },
    #[error("connecting to upstream `{upstream}` took too long")]
    ConnectTimeout { upstream: Box<str> },
    #[error("upstream `{upstream}` broke off: {source}")]
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

/// One worker's way to an upstream.
#[derive(Debug)]
pub struct Upstream {
    fleet: Arc<Fleet>,
    /// To each member.
    links: Vec<Link>,
}

impl Upstream {
    /// Without connections yet.
    pub fn new(fleet: Arc<Fleet>) -> Self {
        let links = fleet.members().iter().map(|member| Link::new(fleet.settings.clone(), member.clone())).collect();
        Upstream { fleet, links }
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
        self.links[0].send(request, bounds).await
    }
}
