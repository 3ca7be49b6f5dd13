//! Where a request wants to go: the host and the path that are routed on, and what does not come so far.

use std::borrow::Cow;

use http::header::TRANSFER_ENCODING;
use http::uri::{PathAndQuery, Uri};
use http::{Method, Request, Version};

use crate::http::headers::count;
use crate::http::host;
use crate::http::path::{canonical, forwarded};
use crate::reply::Rejection;
use crate::route::NoMatch;
use crate::runtime::{Route, Runtime, ServerSettings};

/// Bytes of the longest target that `http::Uri` can say.
const LONGEST_URI: usize = 65_534;

/// Where a request wants to go, in the form that routes are matched by.
#[derive(Debug)]
pub struct Addressed<'a> {
    /// In lower case and without port; empty where there is none.
    pub host: Cow<'a, str>,
    /// In canonical form.
    pub path: Cow<'a, str>,
    /// As it is forwarded, where that differs: with delimiters encoded as they came.
    pub forwarded: Option<Box<str>>,
}

impl<'a> Addressed<'a> {
    /// Reads it off the head of a request.
    ///
    /// # Errors
    /// The request goes nowhere.
    pub fn read<B>(request: &'a Request<B>, settings: &ServerSettings) -> Result<Self, Rejection<'static>> {
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
        // Servers that fold the case of methods take `post` for POST, which routes and limits name.
        if request.method().as_str().bytes().any(|byte| byte.is_ascii_lowercase()) {
            return Err(Rejection::MethodCase);
        }
        // hyper counts those of HTTP/1.1 itself.
        let (headers, most) = (request.headers(), settings.max_headers);
        if request.version() == Version::HTTP_2 && headers.len() > most && count(headers) > most {
            return Err(Rejection::TooManyHeaders);
        }
        let length = uri.path_and_query().map_or(0, |target| target.as_str().len());
        if length > settings.max_uri {
            return Err(Rejection::UriTooLong);
        }
        let host = host::routed(uri, request.headers(), request.version()).map_err(Rejection::Host)?;
        let path = canonical(uri.path()).map_err(Rejection::Path)?;
        let forwarded = if uri.path().contains('%') {
            let forwarded = forwarded(uri.path()).map_err(Rejection::Path)?;
            (forwarded != path).then(|| forwarded.into())
        } else {
            None
        };
        let target = Addressed { host, path, forwarded };
        // Encoding makes some longer than they came, and longer than a target can be.
        if length - uri.path().len().min(length) + target.forwarded().len() > settings.max_uri.min(LONGEST_URI) {
            return Err(Rejection::UriTooLong);
        }
        Ok(target)
    }

    /// The path that is forwarded: its segments are those of the canonical one.
    pub fn forwarded(&self) -> &str {
        self.forwarded.as_deref().unwrap_or(&self.path)
    }

    /// The route that the request takes.
    ///
    /// # Errors
    /// None.
    pub fn route<'r, B>(&self, runtime: &'r Runtime, request: &Request<B>) -> Result<&'r Route, Rejection<'static>> {
        match runtime.table.find(&self.host, &self.path, request.method(), request.headers()) {
            Ok(route) => Ok(route),
            Err(NoMatch::Nothing) => Err(Rejection::NoRoute),
            Err(NoMatch::Method(allowed)) => Err(Rejection::MethodNotAllowed(allowed)),
        }
    }

    /// What the route makes of path and query; none if they stay.
    ///
    /// # Errors
    /// It is longer than a target can be.
    pub fn rewritten(&self, route: &Route, query: Option<&str>) -> Result<Option<PathAndQuery>, Rejection<'static>> {
        let Some(rewrite) = &route.rewrite else { return Ok(None) };
        // Canonical again, and so a target unless it is longer than one can be.
        let target = PathAndQuery::try_from(rewrite.target(&route.pattern, self.forwarded(), query));
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
