//! Reads the body of a request once. One pass collects all values on which the choice of the route, an identity or a
//! cost depends.

use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Request};
use serde_json::Value;
use tokio::task::spawn_blocking;
use tokio::time::timeout_at;

use crate::http::body_limits::{BodyError, BodyLimits, INSPECTED_SHARE, NetworkShare, UploadLimits};
use crate::http::request_body::{ReadBody, RequestBody};
use crate::payload::json::body::{Collector, JsonBody, JsonError, JsonPointer};
use crate::payload::json::rpc::RpcError;
use crate::payload::json::{body, rpc};
use crate::payload::llm::request;
use crate::payload::llm::request::{RequestError, RequestInfo};
use crate::proxy::RequestTarget;
use crate::proxy::context::RequestContext;
use crate::proxy::llm;
use crate::proxy::local_reply::Rejection;
use crate::snapshot::BodyInspection;
use crate::snapshot::routes::{BodyUse, Route};

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
            InspectError::Unread(_) | InspectError::Ambiguous(_) => None,
        }
    }
}

/// The result of reading a body.
#[derive(Debug)]
pub enum BodyContent {
    /// The request has no body.
    Empty,
    /// The body cannot be read.
    Unread(UnreadBody),
    /// The body is a JSON document.
    Read(Box<InspectedBody>),
}

/// A body that has been read.
#[derive(Debug)]
pub struct InspectedBody {
    /// Length of the body in bytes.
    pub length: usize,
    /// Values and JSON-RPC messages that were read from the body.
    pub json: JsonBody,
    /// The maximum token usage of a request to an LLM API. `None` if no limit counts tokens.
    pub llm: Option<Result<RequestInfo, RequestError>>,
}

impl BodyContent {
    /// Parse the bytes of a complete body. `reads_tokens` is true if a limit counts the tokens of an LLM API.
    pub fn from_bytes(bytes: &[u8], inspection: &BodyInspection, reads_tokens: bool) -> Self {
        if bytes.is_empty() {
            return BodyContent::Empty;
        }
        let BodyInspection { pointers, reads_messages, .. } = inspection;
        let read = match reads_tokens {
            true => request::inspect_with(bytes, Collector::new(pointers, *reads_messages))
                .map(|(llm, json)| (Some(llm), json)),
            false => body::read(bytes, pointers, *reads_messages).map(|json| (None, json)),
        };
        match read {
            Ok((llm, json)) => BodyContent::Read(Box::new(InspectedBody { length: bytes.len(), json, llm })),
            Err(error) => BodyContent::Unread(error.into()),
        }
    }

    /// Return the values of the body. Return `None` if the request has no body, or if the body could not be read.
    pub fn json(&self) -> Option<&JsonBody> {
        match self {
            BodyContent::Read(read) => Some(&read.json),
            BodyContent::Empty | BodyContent::Unread(_) => None,
        }
    }

    /// Return an error if the body cannot be read or is longer than `max_body` bytes.
    ///
    /// # Errors
    /// The reason why the body cannot be read.
    pub fn require(&self, max_body: usize) -> Result<(), InspectError> {
        match self {
            BodyContent::Unread(error) => Err(error.clone().into()),
            BodyContent::Read(read) if read.length > max_body => Err(UnreadBody::TooLong(max_body).into()),
            BodyContent::Empty | BodyContent::Read(_) => Ok(()),
        }
    }

    /// Check that the limits of a route can use the body: its JSON-RPC messages must be valid, and MCP headers that
    /// repeat values of the body must have the same values.
    ///
    /// # Errors
    /// The body cannot be read, is not a valid JSON-RPC message, or contradicts the MCP headers.
    pub fn check(&self, body_use: BodyUse, headers: &HeaderMap, max_body: usize) -> Result<(), InspectError> {
        if !body_use.values {
            return Ok(());
        }
        self.require(max_body)?;
        let messages = self.json().and_then(|json| json.messages.as_ref()).filter(|_| body_use.messages);
        let Some(messages) = messages else { return Ok(()) };
        let messages = messages.as_ref().map_err(RpcError::clone)?;
        if body_use.is_mcp {
            rpc::check_mcp_headers(headers, messages)?;
        }
        Ok(())
    }

    /// Return the id of a JSON-RPC error response to this request. The id is null if the body contains no valid
    /// message. Return `None` if the route's limits do not read JSON-RPC messages, or if the request has no body.
    pub fn rpc_id(&self, body_use: BodyUse) -> Option<Value> {
        if !body_use.messages || matches!(self, BodyContent::Empty) {
            return None;
        }
        let messages = self.json().and_then(|json| json.messages.as_ref()?.as_ref().ok());
        Some(messages.map_or(Value::Null, |messages| messages.id.clone()))
    }
}

/// Read the body of a request whose route depends on it. The body must not have been read before.
///
/// # Errors
/// The body cannot be read.
pub(super) async fn read_for_route<'a>(
    context: &mut RequestContext<'a>,
    request: &Request<RequestBody>,
    body: &mut RequestBody,
) -> Result<(), Rejection<'a>> {
    let config = &context.snapshot.config;
    let max_body = config.server.inspect_body;
    let content = read(context, None, max_body, config.body_inspection.reads_tokens, request.headers(), body).await?;
    let content = context.body.insert(Box::new(content));
    content.require(max_body).map_err(Rejection::Inspect)
}

/// Read the body of a request for the limits of its route, unless [`read_for_route`] has already read it.
///
/// # Errors
/// The body cannot be read, or does not meet a requirement of a limit of the route.
pub(super) async fn inspect<'a>(
    context: &mut RequestContext<'a>,
    route: &Route,
    target: &RequestTarget<'_>,
    request: &Request<RequestBody>,
    body: &mut RequestBody,
) -> Result<(), Rejection<'a>> {
    let config = &context.snapshot.config;
    let body_use = route.rate_limits.body_use(request.method());
    let inspection = route.rate_limits.llm_inspection(request.method());
    let max_values = config.server.inspect_body;
    let bounds = [body_use.values.then_some(max_values), inspection.map(|inspection| inspection.max_body)];
    let Some(max_body) = bounds.into_iter().flatten().max() else { return Ok(()) };
    if context.body.is_none() {
        let content = read(context, route.max_body, max_body, inspection.is_some(), request.headers(), body).await?;
        context.body = Some(Box::new(content));
    }
    let Some(content) = &mut context.body else { return Ok(()) };
    context.rpc_id = content.rpc_id(body_use);
    content.check(body_use, request.headers(), max_values).map_err(Rejection::Inspect)?;
    if let Some(inspection) = inspection {
        llm::inspect(context, inspection, (&target.upstream_path(route)?, request.headers()), body)?;
    }
    Ok(())
}

/// Return why a body with these headers cannot be read: it has a content coding, or its media type cannot be JSON in
/// UTF-8. The values that an application reads from such a body may differ from those that the gateway reads.
pub fn unreadable(headers: &HeaderMap) -> Option<UnreadBody> {
    let is_coded = |coding: &HeaderValue| !coding.as_bytes().eq_ignore_ascii_case(b"identity");
    if headers.get_all(CONTENT_ENCODING).iter().any(is_coded) {
        return Some(UnreadBody::ContentCoding);
    }
    let mut types = headers.get_all(CONTENT_TYPE).iter();
    let is_json = types.next().is_none_or(|media_type| media_type.to_str().is_ok_and(may_be_json));
    (!is_json || types.next().is_some()).then_some(UnreadBody::MediaType)
}

/// Return whether an application may read a body of this media type as JSON in UTF-8.
fn may_be_json(media_type: &str) -> bool {
    let mut parts = media_type.split(';').map(|part| part.trim().to_ascii_lowercase());
    let essence = parts.next().unwrap_or_default();
    let is_form = essence == "application/x-www-form-urlencoded" || essence.starts_with("multipart/");
    let is_utf8 = |parameter: String| match parameter.split_once('=') {
        Some((name, charset)) if name.trim_end() == "charset" => {
            matches!(charset.trim_matches([' ', '"']), "utf-8" | "utf8" | "us-ascii")
        }
        _ => true,
    };
    !is_form && parts.all(is_utf8)
}

/// Return the part of the memory for inspected bodies that the client network may use: `max_buffered / INSPECTED_SHARE`
/// bytes, but at least `max_read` bytes, which is the maximum length of one body. Return `None` if the client is
/// exempt: `max_connections_per_ip` is 0 or does not apply to the client, or the client is a trusted proxy that
/// forwards the requests of many clients without their addresses.
fn network_share(context: &RequestContext<'_>, max_read: usize, headers: &HeaderMap) -> Option<NetworkShare> {
    let config = &context.snapshot.config;
    let (settings, peer) = (&config.server, context.peer);
    let client = peer.client_address(headers);
    let is_proxy = peer.forwarded.trusted && config.client_ip.is_trusted(client);
    if settings.max_connections_per_ip == 0 || is_proxy || settings.is_exempt_from_per_ip(client) {
        return None;
    }
    let max = (settings.max_buffered / INSPECTED_SHARE).max(max_read);
    Some(context.snapshot.metrics.inspected_by_network.share(config.client_ip.network(client), max))
}

/// Read and parse a body of at most `max_read` bytes. `max_body` is the maximum length that the route allows.
async fn read(
    context: &RequestContext<'_>,
    max_body: Option<u64>,
    max_read: usize,
    reads_tokens: bool,
    headers: &HeaderMap,
    body: &mut RequestBody,
) -> Result<BodyContent, Rejection<'static>> {
    if http_body::Body::is_end_stream(body) {
        return Ok(BodyContent::Empty);
    }
    if let Some(reason) = unreadable(headers) {
        return Ok(BodyContent::Unread(reason));
    }
    let config = &context.snapshot.config;
    let settings = &config.server;
    let idle_timeout = settings.body_idle_timeout;
    let upload = UploadLimits { idle_timeout, min_rate: settings.min_body_rate, total_timeout: settings.body_timeout };
    let limits = BodyLimits { deadline: context.deadline, upload, idle_timeout, max_body };
    let reading = body.read(limits, max_read, network_share(context, max_read, headers));
    let read = match limits.deadline {
        None => reading.await,
        Some(deadline) => timeout_at(deadline, reading).await.unwrap_or(Err(BodyError::ClientTimeout)),
    };
    Ok(match read.map_err(|error| Rejection::Upstream(error.into()))? {
        ReadBody::Whole(bytes) => parse(context, bytes, reads_tokens).await,
        ReadBody::TooLong => BodyContent::Unread(UnreadBody::TooLong(max_read)),
        ReadBody::NoCapacity => BodyContent::Unread(UnreadBody::NoCapacity),
    })
}

/// Maximum length in bytes of a body that the worker itself parses. The worker handles no other request meanwhile, for
/// at most 0.5 ms.
const MAX_PARSED_BY_WORKER: usize = 64 << 10;

/// Parse the bytes of a complete body. A blocking thread parses a long body, so that the other requests of the worker do
/// not wait. The number of bodies that are parsed at the same time is bounded.
async fn parse(context: &RequestContext<'_>, bytes: Bytes, reads_tokens: bool) -> BodyContent {
    let config = &context.snapshot.config;
    if bytes.len() <= MAX_PARSED_BY_WORKER {
        return BodyContent::from_bytes(&bytes, &config.body_inspection, reads_tokens);
    }
    let permit = context.snapshot.metrics.parser_permits.clone().acquire_owned().await;
    let config = config.clone();
    let parsing = spawn_blocking(move || {
        let _permit = permit;
        BodyContent::from_bytes(&bytes, &config.body_inspection, reads_tokens)
    });
    // The task fails only if the runtime shuts down.
    parsing.await.unwrap_or(BodyContent::Unread(UnreadBody::NoCapacity))
}
