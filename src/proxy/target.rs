//! Where a request wants to go: the host and the path that are routed on, and what does not come so far.

use std::borrow::Cow;

use http::header::TRANSFER_ENCODING;
use http::uri::{PathAndQuery, Uri};
use http::{Method, Request, Version};

use crate::http::headers::http1_header_count;
use crate::http::target;
use crate::http::target::{canonical_path, forwarded_path};
use crate::proxy::local_reply::Rejection;
use crate::routing::NoMatch;
use crate::snapshot::CompiledConfig;
use crate::snapshot::routes::Route;
use crate::snapshot::settings::ServerSettings;

/// Bytes of the longest target that `http::Uri` can say.
const MAX_URI_BYTES: usize = 65_534;

/// Where a request wants to go, in the form that routes are matched by.
#[derive(Debug)]
pub struct RequestTarget<'a> {
    /// In lower case and without port; empty where there is none.
    pub host: Cow<'a, str>,
    /// In canonical form.
    pub path: Cow<'a, str>,
    /// As it is forwarded, where that differs: with delimiters encoded as they came.
    pub forwarded_path: Option<Box<str>>,
}

impl<'a> RequestTarget<'a> {
    /// Reads it off the head of a request.
    ///
    /// # Errors
    /// The request goes nowhere.
    pub fn from_request<B>(request: &'a Request<B>, settings: &ServerSettings) -> Result<Self, Rejection<'static>> {
        let uri = request.uri();
        // First, since it ends the connection: whatever else is wrong, what follows may not be a request.
        let mut codings = request.headers().get_all(TRANSFER_ENCODING).iter();
        let is_chunked = codings.next().is_none_or(|coding| coding.as_bytes().eq_ignore_ascii_case(b"chunked"));
        if !is_chunked || codings.next().is_some() {
            return Err(Rejection::UnsupportedTransferCoding);
        }
        if matches!(*request.method(), Method::CONNECT | Method::TRACE) {
            return Err(Rejection::MethodNotImplemented);
        }
        // Servers that fold the case of methods take `post` for POST, which routes and limits name.
        if request.method().as_str().bytes().any(|byte| byte.is_ascii_lowercase()) {
            return Err(Rejection::LowercaseMethod);
        }
        // hyper counts those of HTTP/1.1 itself.
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
        // Encoding makes some longer than they came, and longer than a target can be.
        if length - uri.path().len().min(length) + target.forwarded_path().len() > settings.max_uri.min(MAX_URI_BYTES) {
            return Err(Rejection::UriTooLong);
        }
        Ok(target)
    }

    /// The path that is forwarded: its segments are those of the canonical one.
    pub fn forwarded_path(&self) -> &str {
        self.forwarded_path.as_deref().unwrap_or(&self.path)
    }

    /// The route that the request takes.
    ///
    /// # Errors
    /// None.
    pub fn find_route<'r, B>(
        &self,
        runtime: &'r CompiledConfig,
        request: &Request<B>,
    ) -> Result<&'r Route, Rejection<'static>> {
        match runtime.table.find(&self.host, &self.path, request.method(), request.headers()) {
            Ok(route) => Ok(route),
            Err(NoMatch::NotFound) => Err(Rejection::NoRoute),
            Err(NoMatch::MethodNotAllowed(allowed)) => Err(Rejection::MethodNotAllowed(allowed)),
        }
    }

    /// What the route makes of path and query; none if they stay.
    ///
    /// # Errors
    /// It is longer than a target can be.
    pub fn rewrite(&self, route: &Route, query: Option<&str>) -> Result<Option<PathAndQuery>, Rejection<'static>> {
        let Some(rewrite) = &route.rewrite else { return Ok(None) };
        // Canonical again, and so a target unless it is longer than one can be.
        let target = PathAndQuery::try_from(rewrite.apply(&route.path_pattern, self.forwarded_path(), query));
        target.map(Some).map_err(|_| Rejection::UriTooLong)
    }
}

/// Path and query only, with the path that is forwarded; none where they came like that.
pub fn origin_form(uri: &Uri, path: Option<&str>) -> Option<PathAndQuery> {
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
