//! The values of variables in header rules for one request.

use std::borrow::Cow;

use http::{HeaderValue, Request};

use crate::http::header_template::Variable;
use crate::http::headers::client_scheme;
use crate::http::target::{canonical_path, request_host};
use crate::identity::api_key::Caller;
use crate::identity::auth::Credentials;
use crate::proxy::context::Peer;
use crate::snapshot::routes::Route;

/// The received request and its route, from which variables take their content.
#[derive(Debug)]
pub struct RequestVariables<'a, B> {
    /// The route of the request.
    pub route: &'a Route,
    /// The peer that sent the request.
    pub peer: &'a Peer,
    /// The verified credentials of the request.
    pub credentials: &'a Credentials<'a>,
    /// The request, before its headers are changed for the upstream.
    pub request: &'a Request<B>,
    /// The id of the request.
    pub request_id: HeaderValue,
}

impl<B> RequestVariables<'_, B> {
    /// Return the content of a variable, or `None` if the variable has no content for this request.
    pub fn content(&self, variable: Variable) -> Option<Cow<'_, [u8]>> {
        let (request, headers) = (self.request, self.request.headers());
        Some(match variable {
            Variable::ClientIp => self.peer.client_address(headers).to_string().into_bytes().into(),
            Variable::RequestId => self.request_id.as_bytes().into(),
            Variable::Consumer => self.consumer()?.as_bytes().into(),
            Variable::Route => self.route.name.as_bytes().into(),
            Variable::Host => match request_host(request.uri(), headers, request.version()).ok()? {
                Cow::Borrowed(host) => host.as_bytes().into(),
                Cow::Owned(host) => host.into_bytes().into(),
            },
            Variable::Method => request.method().as_str().as_bytes().into(),
            Variable::Path => match canonical_path(request.uri().path()).ok()? {
                Cow::Borrowed(path) => path.as_bytes().into(),
                Cow::Owned(path) => path.into_bytes().into(),
            },
            Variable::Scheme => client_scheme(headers, &self.peer.forwarded).as_bytes().into(),
        })
    }

    /// Return the name of the consumer that the request's API key belongs to.
    fn consumer(&self) -> Option<&str> {
        match self.credentials.caller() {
            Caller::Consumer(consumer) => Some(&consumer.name),
            Caller::Accepted(_) | Caller::Anonymous | Caller::Missing => None,
        }
    }
}
