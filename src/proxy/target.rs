//! The request target: host and path in the form used for routing, and the checks that precede routing.

use std::borrow::Cow;

use http::header::TRANSFER_ENCODING;
use http::uri::{PathAndQuery, Uri};
use http::{Method, Request, Version};

use crate::http::cors;
use crate::http::headers::http1_header_count;
use crate::http::target;
use crate::http::target::{canonical_path, forwarded_path};
use crate::proxy::body::InspectError;
use crate::proxy::local_reply::Rejection;
use crate::routing::condition::RouteBody;
use crate::routing::{NoMatch, RouteRequest};
use crate::snapshot::CompiledConfig;
use crate::snapshot::routes::Route;
use crate::snapshot::settings::ServerSettings;

/// Maximum length in bytes of a target that `http::Uri` supports.
const MAX_URI_BYTES: usize = 65_534;

/// Return the rejection of a request that no route matches, or that is not routed because of its body.
pub fn rejection(error: NoMatch) -> Rejection<'static> {
    match error {
        // This code is not reached, because the caller has read the body before.
        NoMatch::NotFound | NoMatch::NeedsBody => Rejection::NoRoute,
        NoMatch::MethodNotAllowed(allowed) => Rejection::MethodNotAllowed(allowed),
        NoMatch::Ambiguous(pointer) => Rejection::Inspect(InspectError::Ambiguous(pointer)),
    }
}

/// Host and path of a request in the form that routes match.
#[derive(Debug)]
pub struct RequestTarget<'a> {
    /// Host in lower case without port; empty if the request has none.
    pub host: Cow<'a, str>,
    /// Path of the request in canonical form.
    pub path: Cow<'a, str>,
    /// Path to forward, if it differs from the canonical path: delimiters keep their received encoding.
    pub forwarded_path: Option<Box<str>>,
}

impl<'a> RequestTarget<'a> {
    /// Parse and check the target of a request.
    ///
    /// # Errors
    /// The target, the method, the headers or the transfer coding is not acceptable.
    pub fn from_request<B>(request: &'a Request<B>, settings: &ServerSettings) -> Result<Self, Rejection<'static>> {
        let uri = request.uri();
        // Check the transfer coding first: its rejection closes the connection, because the following bytes may not be
        // a request.
        let mut codings = request.headers().get_all(TRANSFER_ENCODING).iter();
        let is_chunked = codings.next().is_none_or(|coding| coding.as_bytes().eq_ignore_ascii_case(b"chunked"));
        if !is_chunked || codings.next().is_some() {
            return Err(Rejection::UnsupportedTransferCoding);
        }
        if matches!(*request.method(), Method::CONNECT | Method::TRACE) {
            return Err(Rejection::MethodNotImplemented);
        }
        // Servers that ignore the case of methods treat `post` as POST, but routes and limits name POST.
        if request.method().as_str().bytes().any(|byte| byte.is_ascii_lowercase()) {
            return Err(Rejection::LowercaseMethod);
        }
        // Check only HTTP/2, because hyper enforces the maximum for HTTP/1.1.
        let (headers, max_headers) = (request.headers(), settings.max_headers);
        if request.version() == Version::HTTP_2
            && headers.len() > max_headers
            && http1_header_count(headers) > max_headers
        {
            return Err(Rejection::TooManyHeaders);
        }
        let length = uri.path_and_query().map_or(0, |target| target.as_str().len());
        if length > settings.max_uri {
            return Err(Rejection::UriTooLong);
        }
        let host = target::request_host(uri, request.headers(), request.version()).map_err(Rejection::InvalidHost)?;
        let path = canonical_path(uri.path()).map_err(Rejection::InvalidPath)?;
        let forwarded_path = if uri.path().contains('%') {
            let forwarded_path = forwarded_path(uri.path()).map_err(Rejection::InvalidPath)?;
            (forwarded_path != path).then(|| forwarded_path.into())
        } else {
            None
        };
        let target = RequestTarget { host, path, forwarded_path };
        // Check the length again, because percent-encoding may make the target longer than the received one.
        if length - uri.path().len().min(length) + target.forwarded_path().len() > settings.max_uri.min(MAX_URI_BYTES) {
            return Err(Rejection::UriTooLong);
        }
        Ok(target)
    }

    /// Return the path to forward. The forwarded path has the same segments as the canonical path.
    pub fn forwarded_path(&self) -> &str {
        self.forwarded_path.as_deref().unwrap_or(&self.path)
    }

    /// Return the canonical form of the path that the upstream gets: after the rewrite of the route.
    ///
    /// # Errors
    /// See [`RequestTarget::rewrite`].
    pub fn upstream_path(&self, route: &Route) -> Result<Cow<'_, str>, Rejection<'static>> {
        let Some(rewritten) = self.rewrite(route, None)? else { return Ok(Cow::Borrowed(&self.path)) };
        let path = canonical_path(rewritten.path()).map_err(Rejection::InvalidPath)?;
        Ok(Cow::Owned(path.into_owned()))
    }

    /// Return the parts of the request that routes match. `listener` is the index of the listener that accepted the
    /// connection.
    pub fn route_request<'r, B>(&'r self, request: &'r Request<B>, listener: usize) -> RouteRequest<'r> {
        RouteRequest {
            host: &self.host,
            path: &self.path,
            uri: request.uri(),
            method: request.method(),
            headers: request.headers(),
            listener,
            body: RouteBody::Unread,
        }
    }

    /// Return the route of the request. `listener` is the index of the listener.
    ///
    /// # Errors
    /// No route matches the request, or only routes with other methods match. The error also occurs if the route
    /// depends on the body.
    pub fn find_route<'r, B>(
        &self,
        config: &'r CompiledConfig,
        request: &Request<B>,
        listener: usize,
        body: RouteBody<'_>,
    ) -> Result<&'r Route, NoMatch> {
        let route_request = RouteRequest { body, ..self.route_request(request, listener) };
        config.table.find(&route_request).map(|route| &**route)
    }

    /// Return the route of a CORS preflight: the route for the requested method, if this route has a CORS policy.
    /// Return `None` if the request is not a preflight, or if the upstream answers it.
    pub fn find_preflight_route<'r, B>(
        &self,
        config: &'r CompiledConfig,
        request: &Request<B>,
        listener: usize,
    ) -> Option<&'r Route> {
        let method = cors::requested_method(request.method(), request.headers())?;
        // Treat conditions on the body as met, because a preflight has no body.
        let body = RouteBody::Unknown;
        let route_request = RouteRequest { method: &method, body, ..self.route_request(request, listener) };
        let route = config.table.find(&route_request).ok()?;
        route.cors.is_some().then_some(&**route)
    }

    /// Return path and query after the route's rewrite, or `None` if the route has no rewrite.
    ///
    /// # Errors
    /// The result is longer than the maximum, or its path is not canonical.
    pub fn rewrite(&self, route: &Route, query: Option<&str>) -> Result<Option<PathAndQuery>, Rejection<'static>> {
        let Some(rewrite) = &route.rewrite else { return Ok(None) };
        let target = rewrite.apply(&route.path_pattern, self.forwarded_path(), query);
        // Building the target fails only if it is too long, because the result is in canonical form.
        let target = PathAndQuery::try_from(target.map_err(Rejection::InvalidPath)?);
        target.map(Some).map_err(|_| Rejection::UriTooLong)
    }
}

/// Return the origin form of the target with the path to forward, or `None` if the received target already has this
/// form.
pub fn origin_form(uri: &Uri, path: Option<&str>) -> Option<PathAndQuery> {
    if path.is_none() && uri.authority().is_none() {
        return None;
    }
    let path = path.unwrap_or(uri.path());
    let target = match uri.query() {
        Some(query) => format!("{path}?{query}"),
        None => path.to_owned(),
    };
    // The conversion cannot fail, because a canonical path and a parsed query form a valid target.
    Some(PathAndQuery::try_from(target).unwrap_or(PathAndQuery::from_static("/")))
}
