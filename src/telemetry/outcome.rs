//! How a request ended, in one word: the outcome in the access log, the spans and the metrics.

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestOutcome {
    /// The response is from the upstream, or from `respond` or `redirect` of the route.
    Ok,
    /// A limit denied the request.
    RateLimited,
    /// A limit could not be checked.
    StoreUnavailable,
    /// The request lacks a valid credential.
    Unauthenticated,
    /// The credential, or the address of the client, does not permit the request.
    Forbidden,
    /// A credential cannot be verified at the moment.
    AuthUnavailable,
    /// A limit needs an identity that the request lacks.
    NoIdentity,
    /// The body cannot be read, and the route or a limit depends on it.
    BadBody,
    /// The path is no known operation of an LLM API.
    UnknownOperation,
    /// The request would reserve more tokens than a limit can admit.
    ReservationTooLarge,
    /// There is no memory for the body.
    BufferOverflow,
    /// The header with the cost is no integer.
    BadCost,
    /// A request for a decision describes no request.
    BadDescription,
    /// A header of a described request could be mistaken for an identity header.
    ForgedHeader,
    /// The gateway responded to a CORS preflight.
    Preflight,
    /// No route has the host of the request.
    UnknownHost,
    /// The client certificates of the host are verified in another way than those of the connection.
    Misdirected,
    /// No route matches.
    NoRoute,
    /// Routes match, but not for the method.
    MethodNotAllowed,
    /// The method has lowercase letters.
    BadMethod,
    /// The path has no canonical form.
    BadPath,
    /// The host is missing, repeated or malformed.
    BadHost,
    /// The request target is too long.
    UriTooLong,
    /// The request has too many headers.
    TooManyHeaders,
    /// The body is too large.
    BodyTooLarge,
    /// The method is CONNECT or TRACE.
    UnsupportedMethod,
    /// The request has a transfer coding other than `chunked`.
    UnsupportedTransferCoding,
    /// The request opens a WebSocket over HTTP/2, and the route does not allow WebSockets.
    WebsocketNotAllowed,
    /// No connection to the upstream could be made.
    UpstreamConnectFailure,
    /// The upstream closed the connection, or sent an invalid response.
    UpstreamReset,
    /// The upstream has no healthy server.
    NoHealthyUpstream,
    /// The upstream is at `max_requests`.
    UpstreamOverflow,
    /// The response did not arrive within `response_timeout`.
    UpstreamTimeout,
    /// The response did not arrive within the `timeout` of the route.
    RouteTimeout,
    /// The response did not arrive before the deadline of the client.
    ClientDeadline,
    /// The body did not arrive in time.
    ClientTimeout,
    /// The client aborted the request.
    ClientAborted,
}

impl RequestOutcome {
    /// All values of this enum. The counters are stored in the order of this list.
    pub const ALL: [RequestOutcome; 37] = [
        RequestOutcome::Ok,
        RequestOutcome::RateLimited,
        RequestOutcome::StoreUnavailable,
        RequestOutcome::Unauthenticated,
        RequestOutcome::Forbidden,
        RequestOutcome::AuthUnavailable,
        RequestOutcome::NoIdentity,
        RequestOutcome::BadBody,
        RequestOutcome::UnknownOperation,
        RequestOutcome::ReservationTooLarge,
        RequestOutcome::BufferOverflow,
        RequestOutcome::BadCost,
        RequestOutcome::BadDescription,
        RequestOutcome::ForgedHeader,
        RequestOutcome::Preflight,
        RequestOutcome::UnknownHost,
        RequestOutcome::Misdirected,
        RequestOutcome::NoRoute,
        RequestOutcome::MethodNotAllowed,
        RequestOutcome::BadMethod,
        RequestOutcome::BadPath,
        RequestOutcome::BadHost,
        RequestOutcome::UriTooLong,
        RequestOutcome::TooManyHeaders,
        RequestOutcome::BodyTooLarge,
        RequestOutcome::UnsupportedMethod,
        RequestOutcome::UnsupportedTransferCoding,
        RequestOutcome::WebsocketNotAllowed,
        RequestOutcome::UpstreamConnectFailure,
        RequestOutcome::UpstreamReset,
        RequestOutcome::NoHealthyUpstream,
        RequestOutcome::UpstreamOverflow,
        RequestOutcome::UpstreamTimeout,
        RequestOutcome::RouteTimeout,
        RequestOutcome::ClientDeadline,
        RequestOutcome::ClientTimeout,
        RequestOutcome::ClientAborted,
    ];

    /// Return whether the response has a 5xx status because of the gateway or its store, not because of the upstream.
    pub fn is_gateway_error(self) -> bool {
        matches!(
            self,
            RequestOutcome::StoreUnavailable
                | RequestOutcome::AuthUnavailable
                | RequestOutcome::BufferOverflow
                | RequestOutcome::UnsupportedMethod
                | RequestOutcome::UnsupportedTransferCoding
                | RequestOutcome::WebsocketNotAllowed
        )
    }

    /// Return the word.
    pub fn label(self) -> &'static str {
        match self {
            RequestOutcome::Ok => "ok",
            RequestOutcome::RateLimited => "rate-limited",
            RequestOutcome::StoreUnavailable => "store-unavailable",
            RequestOutcome::Unauthenticated => "unauthenticated",
            RequestOutcome::Forbidden => "forbidden",
            RequestOutcome::AuthUnavailable => "auth-unavailable",
            RequestOutcome::NoIdentity => "no-identity",
            RequestOutcome::BadBody => "bad-body",
            RequestOutcome::UnknownOperation => "unknown-operation",
            RequestOutcome::ReservationTooLarge => "reservation-too-large",
            RequestOutcome::BufferOverflow => "buffer-overflow",
            RequestOutcome::BadCost => "bad-cost",
            RequestOutcome::BadDescription => "bad-description",
            RequestOutcome::ForgedHeader => "forged-header",
            RequestOutcome::Preflight => "preflight",
            RequestOutcome::UnknownHost => "unknown-host",
            RequestOutcome::Misdirected => "misdirected",
            RequestOutcome::NoRoute => "no-route",
            RequestOutcome::MethodNotAllowed => "method-not-allowed",
            RequestOutcome::BadMethod => "bad-method",
            RequestOutcome::BadPath => "bad-path",
            RequestOutcome::BadHost => "bad-host",
            RequestOutcome::UriTooLong => "uri-too-long",
            RequestOutcome::TooManyHeaders => "too-many-headers",
            RequestOutcome::BodyTooLarge => "body-too-large",
            RequestOutcome::UnsupportedMethod => "unsupported-method",
            RequestOutcome::UnsupportedTransferCoding => "unsupported-transfer-coding",
            RequestOutcome::WebsocketNotAllowed => "websocket-not-allowed",
            RequestOutcome::UpstreamConnectFailure => "upstream-connect-failure",
            RequestOutcome::UpstreamReset => "upstream-reset",
            RequestOutcome::NoHealthyUpstream => "no-healthy-upstream",
            RequestOutcome::UpstreamOverflow => "upstream-overflow",
            RequestOutcome::UpstreamTimeout => "upstream-timeout",
            RequestOutcome::RouteTimeout => "route-timeout",
            RequestOutcome::ClientDeadline => "client-deadline",
            RequestOutcome::ClientTimeout => "client-timeout",
            RequestOutcome::ClientAborted => "client-aborted",
        }
    }
}
