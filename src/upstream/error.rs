//! Errors of requests for which the gateway received no valid response from an upstream.

use std::error::Error;
use std::fmt;
use std::fmt::Display;
use std::time::Duration;

use crate::http::body_limits::BodyError;
use crate::upstream::connector::TlsFailure;

/// Error of a request for which the gateway received no valid response from an upstream.
#[derive(Debug, thiserror::Error)]
pub enum UpstreamError {
    /// No endpoint is healthy enough to receive requests.
    #[error("upstream `{upstream}` has no healthy server")]
    NoHealthyEndpoint {
        /// Name of the upstream.
        upstream: Box<str>,
        /// Time after which the client should retry.
        retry_after: Duration,
    },
    /// No endpoint has an address, because no name of a server resolves.
    #[error("upstream `{upstream}` has no address: the names of its servers do not resolve")]
    Unresolved {
        /// Name of the upstream.
        upstream: Box<str>,
        /// Time after which the client should retry.
        retry_after: Duration,
    },
    /// There is no valid access token for the upstream (`google`).
    #[error("upstream `{upstream}` has no valid access token")]
    NoAccessToken {
        /// Name of the upstream.
        upstream: Box<str>,
    },
    /// All endpoints have `max_requests` in flight, and the queue is full or the wait in the queue timed out.
    #[error("all servers of upstream `{upstream}` are at `max_requests`")]
    Overflow {
        /// Name of the upstream.
        upstream: Box<str>,
    },
    /// The client network has too many unfinished uploads to an upstream with `max_requests`.
    #[error("the client network has too many unfinished uploads to upstream `{upstream}`, which has `max_requests`")]
    TooManyUploads {
        /// Name of the upstream.
        upstream: Box<str>,
    },
    /// Connecting failed for all endpoints that were tried.
    #[error("connecting to upstream `{upstream}` failed: {source}")]
    Connect {
        /// Name of the upstream.
        upstream: Box<str>,
        /// Error of the last attempt.
        source: std::io::Error,
    },
    /// No connection was established within `connect_timeout`.
    #[error("connecting to upstream `{upstream}` timed out")]
    ConnectTimeout {
        /// Name of the upstream.
        upstream: Box<str>,
    },
    /// The connection or the stream ended before the response headers.
    #[error("request to upstream `{upstream}` failed: {}", RootCause(source))]
    Reset {
        /// Name of the upstream.
        upstream: Box<str>,
        /// The error that hyper reported.
        source: hyper::Error,
    },
    /// The response of the upstream is malformed.
    #[error("invalid response from upstream `{upstream}`: {fault}")]
    InvalidResponse {
        /// Name of the upstream.
        upstream: Box<str>,
        /// The fault in the response.
        fault: &'static str,
    },
    /// The upstream responded with 101, although the request did not offer this upgrade.
    #[error("upstream `{upstream}` switched to a protocol that was not requested")]
    UnexpectedUpgrade {
        /// Name of the upstream.
        upstream: Box<str>,
    },
    /// The response headers did not arrive within `response_timeout`.
    #[error("upstream `{upstream}` did not respond within `response_timeout`")]
    ResponseTimeout {
        /// Name of the upstream.
        upstream: Box<str>,
    },
    /// The response headers did not arrive within the `timeout` of the route.
    #[error("upstream `{upstream}` did not respond within the `timeout` of the route")]
    RouteTimeout {
        /// Name of the upstream.
        upstream: Box<str>,
    },
    /// The response headers did not arrive before the deadline that the client set (`grpc-timeout`).
    #[error("upstream `{upstream}` did not respond before the deadline of the client")]
    ClientDeadline {
        /// Name of the upstream.
        upstream: Box<str>,
    },
    /// The client sent the request body too slowly, or stopped sending it.
    #[error("the client stopped sending the request body")]
    ClientTimeout,
    /// The request body exceeds the maximum of the route.
    #[error("the request body is longer than the route allows")]
    BodyTooLarge,
    /// The client aborted the request body.
    #[error("the client aborted the request body: {0}")]
    ClientAborted(Box<dyn Error + Send + Sync>),
}

impl From<BodyError> for UpstreamError {
    /// Convert an error that occurred while the request body was read before the request was sent to an upstream.
    fn from(error: BodyError) -> Self {
        match error {
            BodyError::TooLarge => UpstreamError::BodyTooLarge,
            BodyError::Aborted(_) | BodyError::MalformedTrailers => UpstreamError::ClientAborted(error.into()),
            BodyError::ClientTimeout | BodyError::UpstreamIdleTimeout | BodyError::RouteTimeout => {
                UpstreamError::ClientTimeout
            }
        }
    }
}

impl UpstreamError {
    /// Return whether the upstream has sent a response that cannot be used.
    pub fn is_invalid_response(&self) -> bool {
        match self {
            UpstreamError::InvalidResponse { .. } | UpstreamError::UnexpectedUpgrade { .. } => true,
            UpstreamError::Reset { source, .. } => is_protocol_error(source),
            _ => false,
        }
    }

    /// Return whether the client caused the error.
    pub fn is_client_error(&self) -> bool {
        matches!(
            self,
            UpstreamError::ClientDeadline { .. }
                | UpstreamError::ClientTimeout
                | UpstreamError::BodyTooLarge
                | UpstreamError::ClientAborted(_)
        )
    }
}

/// Reason why a request got no usable response from an upstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureReason {
    /// No name of a server resolves.
    Dns,
    /// No connection could be made, or not in time.
    Connect,
    /// The TLS handshake failed.
    Tls,
    /// The connection or the stream ended before the response.
    Reset,
    /// The response did not arrive in time.
    Timeout,
    /// The response violates HTTP.
    Protocol,
    /// No server is healthy.
    Unhealthy,
    /// The servers are at `max_requests`.
    Overflow,
    /// There is no valid access token.
    AccessToken,
}

impl FailureReason {
    /// All reasons, in the order of their counters.
    pub const ALL: [FailureReason; 9] = [
        FailureReason::Dns,
        FailureReason::Connect,
        FailureReason::Tls,
        FailureReason::Reset,
        FailureReason::Timeout,
        FailureReason::Protocol,
        FailureReason::Unhealthy,
        FailureReason::Overflow,
        FailureReason::AccessToken,
    ];

    /// Return the value of the metric label `reason`.
    pub fn label(self) -> &'static str {
        match self {
            FailureReason::Dns => "dns",
            FailureReason::Connect => "connect",
            FailureReason::Tls => "tls",
            FailureReason::Reset => "reset",
            FailureReason::Timeout => "timeout",
            FailureReason::Protocol => "protocol",
            FailureReason::Unhealthy => "unhealthy",
            FailureReason::Overflow => "overflow",
            FailureReason::AccessToken => "access_token",
        }
    }

    /// Return the reason of an error, or `None` if the client caused it.
    pub fn from_error(error: &UpstreamError) -> Option<FailureReason> {
        let reason = match error {
            UpstreamError::NoHealthyEndpoint { .. } => FailureReason::Unhealthy,
            UpstreamError::Overflow { .. } | UpstreamError::TooManyUploads { .. } => FailureReason::Overflow,
            UpstreamError::Unresolved { .. } => FailureReason::Dns,
            UpstreamError::NoAccessToken { .. } => FailureReason::AccessToken,
            UpstreamError::Connect { source, .. } if TlsFailure::from_error(source).is_some() => FailureReason::Tls,
            UpstreamError::Connect { .. } | UpstreamError::ConnectTimeout { .. } => FailureReason::Connect,
            UpstreamError::Reset { .. } if error.is_invalid_response() => FailureReason::Protocol,
            UpstreamError::Reset { .. } => FailureReason::Reset,
            UpstreamError::InvalidResponse { .. } | UpstreamError::UnexpectedUpgrade { .. } => FailureReason::Protocol,
            UpstreamError::ResponseTimeout { .. } | UpstreamError::RouteTimeout { .. } => FailureReason::Timeout,
            UpstreamError::ClientDeadline { .. }
            | UpstreamError::ClientTimeout
            | UpstreamError::BodyTooLarge
            | UpstreamError::ClientAborted(_) => return None,
        };
        Some(reason)
    }
}

/// Return whether the upstream violated HTTP: hyper cannot parse its response, or h2 rejects its frames.
pub fn is_protocol_error(error: &hyper::Error) -> bool {
    let frames = error.source().and_then(|cause| cause.downcast_ref::<h2::Error>());
    error.is_parse() || frames.is_some_and(h2::Error::is_library)
}

/// Formats a `hyper::Error` with its innermost cause.
struct RootCause<'a>(&'a hyper::Error);

impl Display for RootCause<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RootCause(error) = self;
        write!(f, "{error}")?;
        let mut root = error.source();
        while let Some(deeper) = root.and_then(Error::source) {
            root = Some(deeper);
        }
        if let Some(root) = root {
            write!(f, ": {root}")?;
        }
        if error.is_parse() {
            // A TLS server responds to a plaintext request with a TLS alert, which hyper cannot parse.
            write!(f, "; if the server speaks TLS, use https://")?;
        }
        Ok(())
    }
}
