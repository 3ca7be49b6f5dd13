//! The reasons why the gateway rejects a request, or cannot get a response for it.

use std::time::Duration;

use http::{HeaderName, Method, StatusCode};

use crate::http::grpc::{CallError, Code};
use crate::http::target::PathError;
use crate::identity::auth::Challenge;
use crate::identity::client_cert::CertificateFault;
use crate::identity::spec::IdentityError;
use crate::identity::verification::AuthError;
use crate::limiter::decision::Decision;
use crate::limiter::fallback::StoreUnavailable;
use crate::payload::form::FormError;
use crate::payload::json::body::{JsonError, JsonPointer};
use crate::payload::json::rpc::RpcError;
use crate::payload::llm::request::RequestError;
use crate::snapshot::cost::CostError;
use crate::snapshot::route_action::RedirectError;
use crate::snapshot::routes::RouteLimits;
use crate::upstream::error::UpstreamError;

/// Reasons why the gateway sends a local reply instead of a response from an upstream or a route.
#[derive(Debug)]
pub enum Rejection<'a> {
    /// The path has no canonical form.
    InvalidPath(PathError),
    /// The host is missing, repeated or malformed.
    InvalidHost(&'static str),
    /// An HTTP/2 request has more headers than `server.max_headers`.
    TooManyHeaders,
    /// The request target is longer than `server.max_uri`.
    UriTooLong,
    /// The body is longer than the route allows.
    BodyTooLarge,
    /// The method is CONNECT or TRACE, which the gateway does not implement.
    MethodNotImplemented,
    /// The client opens a WebSocket over HTTP/2, but the route does not allow WebSockets.
    NoWebSocket,
    /// The method contains lowercase letters.
    LowercaseMethod,
    /// The request has a transfer coding other than `chunked`. The gateway cannot forward other codings.
    UnsupportedTransferCoding,
    /// No route matches.
    NoRoute,
    /// No route names the host, and `server.block_unknown_hosts` is set.
    UnknownHost,
    /// The handshake of the TLS connection does not suit the host: other rules apply to the client certificates of the
    /// server name, or a reload has made client certificates mandatory.
    Misdirected,
    /// An access rule of the listener or the route denies the client.
    Forbidden,
    /// Routes match the host and path, but not the method. The variant contains the allowed methods.
    MethodNotAllowed(Vec<Method>),
    /// The request is not authenticated.
    Auth(AuthRejection<'a>),
    /// A limit of the route requires an identity that the request does not have.
    Identity(IdentityError),
    /// The header that determines the cost of the request for a limit has no valid value.
    InvalidCost(CostError),
    /// A limit is exceeded.
    RateLimited {
        /// The decision, with the exceeded limits and the waiting time of each exceeded limit.
        decision: Decision<'a>,
        /// The limits of the route.
        rate_limits: &'a RouteLimits,
        /// Whether the request is a gRPC call.
        is_grpc: bool,
        /// Longest time that the client of an LLM API may wait before a retry. `None` for other requests.
        max_retry_wait: Option<Duration>,
    },
    /// The body cannot be read, and the route or a limit depends on it.
    Inspect(InspectError),
    /// A request to an LLM API reserves more tokens than a limit can ever admit, or its maximum token usage cannot be
    /// determined.
    Llm(LlmError),
    /// The limits cannot be checked because the store failed.
    StoreUnavailable(StoreUnavailable),
    /// The exchange with the upstream failed.
    Upstream(UpstreamError),
    /// A request for a decision does not describe the request about which the gateway has to decide.
    Undescribed(DescriptionError),
}

impl From<RedirectError> for Rejection<'_> {
    fn from(error: RedirectError) -> Self {
        match error {
            RedirectError::Host(detail) => Rejection::InvalidHost(detail),
            RedirectError::Path(error) => Rejection::InvalidPath(error),
        }
    }
}

impl Rejection<'_> {
    /// Return whether the request is charged to the limits that need no credential, because it may be an attempt to
    /// guess a credential.
    pub fn is_charged(&self) -> bool {
        match self {
            Rejection::Auth(rejection) => rejection.error.status() != StatusCode::BAD_REQUEST,
            Rejection::Identity(error) => error.is_credential_error(),
            _ => false,
        }
    }

    /// Return whether the response contains the request id, which is the case if the client did not cause the failure.
    pub fn has_request_id(&self) -> bool {
        match self {
            Rejection::StoreUnavailable(_) => true,
            Rejection::Auth(rejection) => rejection.error.is_unavailable(),
            _ => false,
        }
    }
}

/// The reason why a peer may not use a listener that answers other proxies and programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.detail())]
pub enum PeerError {
    /// The access rules do not permit its network.
    Network,
    /// It has not the client certificate that the listener demands now. The listener closes the connection.
    Certificate(CertificateFault),
}

impl PeerError {
    fn detail(self) -> &'static str {
        match self {
            PeerError::Network => "the client network may not use this listener",
            PeerError::Certificate(CertificateFault::Missing) => {
                "this listener demands a client certificate since a reload: connect again"
            }
            PeerError::Certificate(CertificateFault::Untrusted) => {
                "the client certificate is not trusted any more: connect again"
            }
        }
    }

    /// Return the status of the response to a program.
    pub fn status(self) -> StatusCode {
        match self {
            PeerError::Certificate(CertificateFault::Missing) => StatusCode::MISDIRECTED_REQUEST,
            PeerError::Network | PeerError::Certificate(CertificateFault::Untrusted) => StatusCode::FORBIDDEN,
        }
    }
}

impl From<PeerError> for CallError {
    fn from(error: PeerError) -> Self {
        let code = match error {
            PeerError::Network => Code::PermissionDenied,
            PeerError::Certificate(_) => Code::Unauthenticated,
        };
        CallError::new(code, error.detail())
    }
}

/// The reason why a request for a decision describes no request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DescriptionError {
    /// The listener serves only programs.
    #[error("the listener has `settle_timeout`, so it answers only calls of the JSON API")]
    OnlyPrograms,
    /// The peer may not use the listener.
    #[error(transparent)]
    Peer(#[from] PeerError),
    /// The peer may not describe requests.
    #[error("only trusted proxies may ask for decisions: add the proxy to `trusted_proxies` in [client_ip]")]
    NotTrusted,
    /// The listener has no such endpoint.
    #[error("no endpoint for decisions has this path: see the guide to decisions")]
    UnknownEndpoint,
    /// A header is missing, repeated or invalid.
    #[error("the proxy must send exactly one `{0}` with {1}")]
    Header(HeaderName, &'static str),
    /// A part of the description is missing or invalid.
    #[error("`{0}` of the described request is missing or invalid")]
    Attribute(&'static str),
    /// A server may mistake a header of the client for a header that the gateway sets.
    #[error("servers may mistake the header `{0}` for a header that the gateway sets")]
    Forged(HeaderName),
}

/// The error for a request that is not authenticated: the reason, and the challenges of the route.
#[derive(Debug)]
pub struct AuthRejection<'a> {
    /// The reason why authentication failed.
    pub error: AuthError,
    /// Values of `WWW-Authenticate` if the status of the response is 401.
    pub challenges: &'a [Challenge],
}

/// The reason why a request is rejected because of its body.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InspectError {
    /// The body cannot be read.
    #[error(transparent)]
    Unread(#[from] UnreadBody),
    /// The route depends on a value that servers may interpret differently, or on a value that is too long.
    #[error(
        "the route depends on the JSON value `{0}`, which occurs twice, is in a different spelling (such as another \
         case), or is too long"
    )]
    Ambiguous(JsonPointer),
    /// The body is not a valid JSON-RPC message, or contradicts the MCP headers.
    #[error(transparent)]
    Rpc(#[from] RpcError),
    /// The request calls an MCP tool that the client may not use.
    #[error("the tool `{0}` is not permitted")]
    Tool(Box<str>),
}

/// The reason why a body cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnreadBody {
    /// The body is compressed.
    #[error("the request body has a content coding, but the gateway has to read the body: send it uncompressed")]
    ContentCoding,
    /// The media type of the body is a form, or has a charset other than UTF-8.
    #[error(
        "the request body is a form or has a charset other than UTF-8, but the gateway has to read the body as JSON"
    )]
    MediaType,
    /// The body is no form, but the limits of the route read only forms.
    #[error("the request body is not a form, but the gateway has to read it as a form")]
    NoForm,
    /// The body cannot be read as a form.
    #[error(transparent)]
    Form(#[from] FormError),
    /// The body is longer than the maximum that the gateway reads.
    #[error("the request body is longer than {0} bytes, which is the maximum that the gateway reads")]
    TooLong(usize),
    /// The buffer budget is exhausted.
    #[error("the gateway has no memory for the request body at the moment")]
    NoCapacity,
    /// The body cannot be read as JSON.
    #[error(transparent)]
    Json(#[from] JsonError),
}

impl InspectError {
    /// Return the code of the JSON-RPC error response. Return `None` if the HTTP status is to be used as the code.
    pub fn rpc_code(&self) -> Option<i32> {
        match self {
            InspectError::Unread(UnreadBody::Json(JsonError::Syntax(_))) => Some(-32700),
            InspectError::Rpc(error) => Some(error.code()),
            // Invalid params, as for an unknown tool.
            InspectError::Tool(_) => Some(-32602),
            InspectError::Unread(_) | InspectError::Ambiguous(_) => None,
        }
    }
}

/// The reason why a request to an LLM API is rejected before it reserves tokens.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LlmError {
    /// The path is no known operation, and a limit rejects unknown operations.
    #[error("this path is no operation of an LLM API whose tokens the gateway can count")]
    UnknownOperation,
    /// The requests are in an uploaded file or in a job.
    #[error(
        "the gateway cannot count the tokens of a batch file or job, and a limit counts tokens: send the requests one by one"
    )]
    BatchFile,
    /// The client asks for a response without its token usage.
    #[error("`{0}` could hide the token usage of the response, which a limit counts: remove it from the request")]
    HiddenUsage(&'static str),
    /// The maximum token usage of the request cannot be determined from the body.
    #[error(transparent)]
    Body(#[from] RequestError),
    /// The body is compressed.
    #[error("the request body has a content coding: the tokens of the request cannot be estimated")]
    ContentCoding,
    /// The media type of the body is a form, or has a charset other than UTF-8.
    #[error(
        "the request body is a form or has a charset other than UTF-8: the tokens of the request cannot be estimated"
    )]
    MediaType,
    /// The body is longer than `inspect_body`.
    #[error("the request body is longer than {0} bytes: the tokens of the request cannot be estimated")]
    TooLong(usize),
    /// The buffer budget is exhausted.
    #[error("the gateway has no memory for the request body at the moment")]
    NoCapacity,
    /// The request reserves more than a limit can ever admit.
    #[error(
        "the request reserves {cost} {unit}, but the limit `{limit}` never has more than {capacity}: ask for a smaller maximum of output tokens, or send less input"
    )]
    TooLarge {
        /// Name of the limit.
        limit: Box<str>,
        /// Quota unit of the limit.
        unit: Box<str>,
        /// The cost that the request reserves.
        cost: u64,
        /// The largest cost that the limit can admit.
        capacity: u64,
    },
}
