//! What a request is: its method, target and headers, and the peer that sent it.

use std::borrow::Cow;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use http::header::{FORWARDED, TRANSFER_ENCODING};
use http::uri::{PathAndQuery, Uri};
use http::{HeaderMap, Method, Request, Version};

use crate::clock;
use crate::http::cors;
use crate::http::headers::{ForwardedInfo, http1_header_count};
use crate::http::target::{canonical_path, fold_case, forwarded_path, request_host};
use crate::identity::auth::Credentials;
use crate::identity::client_cert::{CertificateFault, ClientCertificate, TlsClient};
use crate::identity::spec::{ClientIpResolver, RequestAttributes};
use crate::identity::verification::AuthRequest;
use crate::payload::json::body::JsonBody;
use crate::proxy::rejection::{PeerError, Rejection};
use crate::routing::condition::RouteBody;
use crate::routing::{NoMatch, RouteRequest};
use crate::snapshot::CompiledConfig;
use crate::snapshot::route_retry::Fallback;
use crate::snapshot::routes::Route;
use crate::snapshot::settings::ServerSettings;
use crate::upstream::connector::ProxiedConnection;

/// A request without its body: the parts of an HTTP message that the gateway received, or that a caller describes.
#[derive(Debug, Clone, Copy)]
pub struct RequestHead<'r> {
    /// Request method.
    pub method: &'r Method,
    /// Request target as received.
    pub uri: &'r Uri,
    /// HTTP version of the request.
    pub version: Version,
    /// Request headers.
    pub headers: &'r HeaderMap,
}

impl<'r, B> From<&'r Request<B>> for RequestHead<'r> {
    fn from(request: &'r Request<B>) -> Self {
        let method = request.method();
        let uri = request.uri();
        let version = request.version();
        RequestHead { method, uri, version, headers: request.headers() }
    }
}

/// Where a request comes from.
#[derive(Debug, Clone, Copy)]
pub struct Origin<'a> {
    /// Address of the client.
    pub client: IpAddr,
    /// Whether the peer is a trusted proxy.
    pub is_trusted_proxy: bool,
    /// Subject of the verified client certificate, if there is one.
    pub certificate_subject: Option<&'a str>,
    /// The client of the TLS connection. `None` without TLS, or if the caller has no connection.
    pub tls: Option<&'a TlsClient>,
    /// Index of the listener that accepted the connection.
    pub listener: usize,
}

/// A request with its target in the form that routes match.
#[derive(Debug, Clone, Copy)]
pub struct TargetedRequest<'r> {
    /// The method, target and headers of the request.
    pub head: RequestHead<'r>,
    /// Host and path of the request.
    pub target: &'r RequestTarget<'r>,
    /// Where the request comes from.
    pub origin: Origin<'r>,
}

impl<'r> TargetedRequest<'r> {
    /// Return the parts of the request that routes match.
    pub fn route_request<'b>(&self, body: RouteBody<'b>) -> RouteRequest<'b>
    where
        'r: 'b,
    {
        let RequestHead { method, uri, headers, .. } = self.head;
        let RequestTarget { host, path, .. } = self.target;
        RouteRequest { host, path, uri, method, headers, listener: self.origin.listener, body }
    }

    /// Return the route of the request.
    ///
    /// # Errors
    /// No route matches the request, or only routes with other methods match. The error also occurs if the choice of
    /// the route depends on a body that was not read.
    pub fn find_route<'c>(&self, config: &'c CompiledConfig, body: RouteBody<'_>) -> Result<&'c Route, NoMatch> {
        config.table.find(&self.route_request(body)).map(|route| &**route)
    }

    /// Return the route of a CORS preflight: the route for the requested method, if this route has a CORS policy.
    /// Return `None` if the request is not a preflight, or if the route has no CORS policy, so that the upstream
    /// answers the preflight.
    pub fn find_preflight_route<'c>(&self, config: &'c CompiledConfig) -> Option<&'c Route> {
        let method = cors::requested_method(self.head.method, self.head.headers)?;
        // Treat conditions on the body as met, because a preflight has no body.
        let route_request = RouteRequest { method: &method, ..self.route_request(RouteBody::Unknown) };
        let route = config.table.find(&route_request).ok()?;
        route.cors.is_some().then_some(&**route)
    }

    /// Return the parts of the request that the authentication providers of its route use.
    pub fn auth_request(&self, route: &'r Route) -> AuthRequest<'r> {
        let has_client_cert = self.origin.tls.is_some_and(|client| client.certificate.is_some());
        AuthRequest { headers: self.head.headers, has_client_cert, route: &route.name, now_us: clock::unix_us() }
    }

    /// Return the attributes from which identities are computed. `body` contains the values that were read from the
    /// body.
    pub fn attributes<'p>(
        &self,
        config: &'p CompiledConfig,
        route: &'p Route,
        credentials: &'p Credentials<'p>,
        body: Option<&'p JsonBody>,
    ) -> RequestAttributes<'p>
    where
        'r: 'p,
    {
        RequestAttributes {
            method: self.head.method,
            host: &self.target.host,
            path: &self.target.path,
            query: self.head.uri.query(),
            headers: self.head.headers,
            client_address: self.origin.client,
            client_network: config.client_ip.network(self.origin.client),
            is_from_trusted_proxy: self.origin.is_trusted_proxy,
            client_cert_subject: self.origin.certificate_subject,
            credentials,
            tier_source: &config.auth.tier_source,
            route_name: &route.name,
            path_pattern: &route.path_pattern,
            body,
        }
    }
}

// === The request target: host and path in the form used for routing ===

/// Maximum length in bytes of a target that `http::Uri` supports.
const MAX_URI_BYTES: usize = 65_534;

/// Host and path of a request in the form that routes match.
#[derive(Debug)]
pub struct RequestTarget<'a> {
    /// Host in lower case without port. Empty if the request has no host.
    pub host: Cow<'a, str>,
    /// Path of the request in canonical form.
    pub path: Cow<'a, str>,
    /// Path to forward, if it differs from the canonical path: encoded delimiters stay encoded.
    pub forwarded_path: Option<Box<str>>,
}

impl<'a> RequestTarget<'a> {
    /// Parse and check the target of a request.
    ///
    /// # Errors
    /// The gateway does not accept the target, the method, the number of headers or the transfer coding.
    pub fn from_head(head: RequestHead<'a>, settings: &ServerSettings) -> Result<Self, Rejection<'static>> {
        let RequestHead { method, uri, version, headers } = head;
        // Check the transfer coding first: its rejection closes the connection, because the following bytes may not be
        // a request.
        let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
        let is_chunked = codings.next().is_none_or(|coding| coding.as_bytes().eq_ignore_ascii_case(b"chunked"));
        if !is_chunked || codings.next().is_some() {
            return Err(Rejection::UnsupportedTransferCoding);
        }
        if matches!(*method, Method::CONNECT | Method::TRACE) {
            return Err(Rejection::MethodNotImplemented);
        }
        // Some servers treat `post` as POST, but the routes and limits for POST would not match `post`.
        if method.as_str().bytes().any(|byte| byte.is_ascii_lowercase()) {
            return Err(Rejection::LowercaseMethod);
        }
        // Check the number of headers only for HTTP/2, because hyper enforces the maximum for HTTP/1.1.
        let max_headers = settings.max_headers;
        if version == Version::HTTP_2 && headers.len() > max_headers && http1_header_count(headers) > max_headers {
            return Err(Rejection::TooManyHeaders);
        }
        let length = uri.path_and_query().map_or(0, |target| target.as_str().len());
        if length > settings.max_uri {
            return Err(Rejection::UriTooLong);
        }
        let host = request_host(uri, headers, version).map_err(Rejection::InvalidHost)?;
        let mut path = canonical_path(uri.path(), settings.paths.policy).map_err(Rejection::InvalidPath)?;
        let mut forwarded_path = if uri.path().contains('%') {
            let forwarded_path = forwarded_path(uri.path(), settings.paths.policy).map_err(Rejection::InvalidPath)?;
            (forwarded_path != path).then(|| forwarded_path.into())
        } else {
            None
        };
        if settings.paths.ignores_case && path.bytes().any(|byte| byte.is_ascii_uppercase()) {
            let folded = fold_case(&path);
            forwarded_path = forwarded_path.or_else(|| Some(path.into()));
            path = Cow::Owned(folded);
        }
        let target = RequestTarget { host, path, forwarded_path };
        // Check the length again, because percent-encoding may make the target longer than the received target.
        if length - uri.path().len().min(length) + target.forwarded_path().len() > settings.max_uri.min(MAX_URI_BYTES) {
            return Err(Rejection::UriTooLong);
        }
        Ok(target)
    }

    /// Return the path to forward. The forwarded path has the same segments as the canonical path.
    pub fn forwarded_path(&self) -> &str {
        self.forwarded_path.as_deref().unwrap_or(&self.path)
    }

    /// Return the canonical form of the path that the upstream gets, which is the path after the route's rewrite.
    ///
    /// # Errors
    /// See [`RequestTarget::rewrite`].
    pub fn upstream_path(&self, route: &Route) -> Result<Cow<'_, str>, Rejection<'static>> {
        let rewritten = self.rewrite(route, None)?;
        // With `case_insensitive_paths`, `path` is in lower case, unlike the path that the upstream gets.
        let path = match (&rewritten, &self.forwarded_path) {
            (Some(rewritten), _) => rewritten.path(),
            (None, Some(forwarded_path)) => forwarded_path,
            (None, None) => return Ok(Cow::Borrowed(&self.path)),
        };
        let path = canonical_path(path, route.path_policy).map_err(Rejection::InvalidPath)?;
        Ok(Cow::Owned(path.into_owned()))
    }

    /// Return the canonical form of the path that a fallback gets. Return `None` if it gets the path that the upstream
    /// of the route gets, or no request because its path would be invalid.
    pub fn fallback_path(&self, route: &Route, fallback: &Fallback) -> Option<String> {
        let path = fallback.rewrite.as_ref()?.apply(&route.path_pattern, self.forwarded_path(), None).ok()?;
        Some(canonical_path(&path, route.path_policy).ok()?.into_owned())
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

/// Return the target in origin form (RFC 9112 §3.2.1) with `path`, the path to forward. Return `None` if the received
/// target already has this form and path.
pub fn origin_form(uri: &Uri, path: Option<&str>) -> Option<PathAndQuery> {
    if path.is_none() && uri.authority().is_none() {
        return None;
    }
    let path = path.unwrap_or(uri.path());
    let target = match uri.query() {
        Some(query) => format!("{path}?{query}"),
        None => path.to_owned(),
    };
    // The conversion cannot fail, because a path to forward and a parsed query form a valid target.
    Some(PathAndQuery::try_from(target).unwrap_or(PathAndQuery::from_static("/")))
}

// === The peer of a downstream connection ===

/// The peer of a downstream connection.
#[derive(Debug)]
pub struct Peer {
    /// IP address of the peer. An IPv4-mapped IPv6 address is converted to IPv4.
    pub address: IpAddr,
    /// Values of the forwarding headers that are sent to upstreams.
    pub forwarded: ForwardedInfo,
    /// The client of the TLS connection. `None` without TLS.
    pub tls: Option<Arc<TlsClient>>,
    /// Port of the peer, or 0 if it is unknown or not needed.
    port: u16,
    /// Address and port that the peer connected to. `None` if they are unknown or not needed.
    destination: Option<SocketAddr>,
    /// Index of the listener that accepted the connection. A reload changes neither the listeners nor their order.
    pub listener: usize,
    /// The resolver that determined whether the peer is trusted.
    client_ip: Arc<ClientIpResolver>,
    /// Whether forwarding headers must not be trusted, although the peer is a trusted proxy. True if the peer forwards
    /// the connection of a client, but its PROXY header does not contain the address of this client.
    is_distrusted: bool,
}

impl Peer {
    /// Create the peer of a connection to the first listener.
    pub fn new(address: IpAddr, scheme: &'static str, config: &CompiledConfig) -> Self {
        let address = address.to_canonical();
        let client_ip = config.client_ip.clone();
        let reads_forwarded = client_ip.header == FORWARDED;
        let mut forwarded = ForwardedInfo::new(address, scheme, client_ip.is_trusted(address));
        forwarded.reads_forwarded = reads_forwarded;
        Peer { address, forwarded, tls: None, port: 0, destination: None, listener: 0, client_ip, is_distrusted: false }
    }

    /// Set the source port and the destination of the connection, for PROXY headers to upstreams.
    pub fn set_connection(&mut self, connection: &ProxiedConnection) {
        (self.port, self.destination) = (connection.source.port(), Some(connection.destination));
    }

    /// Return the addresses for the PROXY header to the upstream, for a request with these headers. The port of a
    /// client behind a trusted proxy is unknown, so it is set to 0.
    pub(super) fn proxied_connection(&self, headers: &HeaderMap) -> ProxiedConnection {
        let client = self.client_address(headers);
        let port = if client == self.address { self.port } else { 0 };
        ProxiedConnection::new(SocketAddr::new(client, port), self.destination)
    }

    /// Return the client address of a request with these headers: the address of the peer, unless the peer is a trusted
    /// proxy.
    pub fn client_address(&self, headers: &HeaderMap) -> IpAddr {
        // Use the address of the peer if a trusted proxy sends no client address.
        if self.forwarded.trusted { self.client_ip.client_address(self.address, headers) } else { self.address }
    }

    /// Return whether a request was rejected because the client certificate is missing or not trusted any more.
    pub fn has_rejected_certificate(&self) -> bool {
        self.tls.as_ref().is_some_and(|client| client.is_rejected())
    }

    /// Return the verified client certificate, if there is one.
    pub(super) fn certificate(&self) -> Option<&ClientCertificate> {
        self.tls.as_ref()?.certificate.as_deref()
    }

    /// Check that the peer may use its listener: the access rules permit its network, and it has the certificate that
    /// the listener demands now.
    pub(super) fn check_listener(&self, config: &CompiledConfig) -> Result<(), PeerError> {
        let Some(listener) = config.listeners.get(self.listener) else { return Err(PeerError::Network) };
        if listener.access.as_ref().is_some_and(|access| !access.decide(self.address).is_allowed()) {
            return Err(PeerError::Network);
        }
        let Some(client) = &self.tls else { return Ok(()) };
        check_certificate(client, config, self.listener).map_err(PeerError::Certificate)
    }

    /// Return where a request with these headers comes from.
    pub fn origin(&self, headers: &HeaderMap) -> Origin<'_> {
        Origin {
            client: self.client_address(headers),
            is_trusted_proxy: self.forwarded.trusted,
            certificate_subject: self.certificate().and_then(|certificate| certificate.subject.as_deref()),
            tls: self.tls.as_deref(),
            listener: self.listener,
        }
    }

    /// Stop trusting the forwarding headers of this peer, even after a configuration reload.
    pub fn distrust(&mut self) {
        (self.is_distrusted, self.forwarded.trusted) = (true, false);
    }

    /// Return a copy of the peer that uses the `[client_ip]` settings of `config`, or `None` if no reload has changed
    /// these settings.
    pub(super) fn revalidate(&self, config: &CompiledConfig) -> Option<Box<Peer>> {
        let client_ip = &config.client_ip;
        if Arc::ptr_eq(client_ip, &self.client_ip) {
            return None;
        }
        let trusted = !self.is_distrusted && client_ip.is_trusted(self.address);
        let reads_forwarded = client_ip.header == FORWARDED;
        let mut forwarded = self.forwarded.clone();
        (forwarded.trusted, forwarded.reads_forwarded) = (trusted, reads_forwarded);
        let client_ip = client_ip.clone();
        let tls = self.tls.clone();
        Some(Box::new(Peer { forwarded, client_ip, tls, ..*self }))
    }
}

/// Check that the client of a connection to a listener has the certificate that the configuration demands.
pub(super) fn check_certificate(
    client: &TlsClient,
    config: &CompiledConfig,
    listener: usize,
) -> Result<(), CertificateFault> {
    let tls = config.listeners.get(listener).and_then(|listener| listener.tls.as_ref());
    client.check(tls.map(|tls| tls.tls.policy(&client.server_name)), clock::unix_us() / 1_000_000)
}
