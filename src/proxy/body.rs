//! Reads the body of a request once. One pass collects all values on which the choice of the route, an identity or a
//! cost depends.

use std::net::IpAddr;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, Method};
use serde_json::Value;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, timeout_at};

use crate::http::body_limits::{BodyError, BodyLimits, INSPECTED_SHARE, NetworkShare, RestBounds, UploadLimits};
use crate::http::headers::has_content_coding;
use crate::http::request_body::{ReadBody, RequestBody};
use crate::payload::form::{FormFields, FormType};
use crate::payload::json::body::{Collector, JsonBody};
use crate::payload::json::rpc::RpcError;
use crate::payload::json::{body, rpc};
use crate::payload::llm::request;
use crate::payload::llm::request::{RequestError, RequestInfo};
use crate::proxy::config_snapshot::ConfigSnapshot;
use crate::proxy::rejection::{InspectError, LlmError, Rejection, UnreadBody};
use crate::proxy::request::Peer;
use crate::snapshot::routes::{BodyUse, LlmInspection, Route, RouteLimits};
use crate::snapshot::{BodyInspection, CompiledConfig};

/// The result of reading a body.
#[derive(Debug)]
pub enum BodyContent {
    /// The request has no body.
    Empty,
    /// The body cannot be read.
    Unread(UnreadBody),
    /// The body is a JSON document or a form.
    Read(Box<InspectedBody>),
}

/// A body that has been read.
#[derive(Debug)]
pub struct InspectedBody {
    /// Length of the body in bytes.
    pub length: usize,
    /// Values, JSON-RPC messages or form fields that were read from the body.
    pub json: JsonBody,
    /// The maximum token usage of a request to an LLM API. `None` if no limit counts tokens.
    pub llm: Option<Result<RequestInfo, RequestError>>,
}

/// How the gateway reads a body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BodyFormat {
    /// As JSON.
    Json,
    /// As a form.
    Form(FormType),
}

impl BodyContent {
    /// Parse the bytes of a complete body. `reads_tokens` is true if a limit counts the tokens of an LLM API.
    pub fn from_bytes(bytes: &[u8], format: &BodyFormat, inspection: &BodyInspection, reads_tokens: bool) -> Self {
        if bytes.is_empty() {
            return BodyContent::Empty;
        }
        let BodyInspection { pointers, reads_messages, fields, .. } = inspection;
        let read = match format {
            BodyFormat::Form(form) => FormFields::read(bytes, form, fields)
                .map(|form| (None, JsonBody::from_form(form)))
                .map_err(UnreadBody::from),
            BodyFormat::Json if reads_tokens => request::inspect_with(bytes, Collector::new(pointers, *reads_messages))
                .map(|(llm, json)| (Some(llm), json))
                .map_err(UnreadBody::from),
            BodyFormat::Json => {
                body::read(bytes, pointers, *reads_messages).map(|json| (None, json)).map_err(UnreadBody::from)
            }
        };
        match read {
            Ok((llm, json)) => BodyContent::Read(Box::new(InspectedBody { length: bytes.len(), json, llm })),
            Err(error) => BodyContent::Unread(error),
        }
    }

    /// Return the values of the body. Return `None` if the request has no body, or if the body could not be read.
    pub fn json(&self) -> Option<&JsonBody> {
        match self {
            BodyContent::Read(read) => Some(&read.json),
            BodyContent::Empty | BodyContent::Unread(_) => None,
        }
    }

    /// Return an error if the body is not a JSON document of at most `max_body` bytes.
    ///
    /// # Errors
    /// The reason why the body cannot be read.
    pub fn require_json(&self, max_body: usize) -> Result<(), InspectError> {
        self.require(max_body)?;
        match self.json().is_some_and(|json| json.form.is_some()) {
            true => Err(UnreadBody::MediaType.into()),
            false => Ok(()),
        }
    }

    /// Return an error if the body cannot be read or is longer than `max_body` bytes.
    fn require(&self, max_body: usize) -> Result<(), InspectError> {
        match self {
            BodyContent::Unread(error) => Err(error.clone().into()),
            BodyContent::Read(read) if read.length > max_body => Err(UnreadBody::TooLong(max_body).into()),
            BodyContent::Empty | BodyContent::Read(_) => Ok(()),
        }
    }

    /// Check that the limits of a route can use the body: it must be a JSON document or a form, whichever the limits
    /// read. Its JSON-RPC messages must be valid, and MCP headers that repeat values of the body must have the same
    /// values.
    ///
    /// # Errors
    /// The body cannot be read, is not a valid JSON-RPC message, or contradicts the MCP headers.
    pub fn check(&self, body_use: BodyUse, headers: &HeaderMap, max_body: usize) -> Result<(), InspectError> {
        match (body_use.values, body_use.fields) {
            (false, false) => return Ok(()),
            (true, false) => self.require_json(max_body)?,
            // A server may read a JSON-RPC message from a body that declares to be a form.
            (_, true) if body_use.messages => self.require_json(max_body)?,
            (_, true) => self.require(max_body)?,
        }
        if !body_use.values && self.json().is_some_and(|json| json.form.is_none()) {
            return Err(UnreadBody::NoForm.into());
        }
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

/// What the limits of a route read from the body of a request.
#[derive(Debug, Clone, Copy)]
pub struct LimitInspection {
    /// What the limits read, apart from LLM tokens.
    pub body_use: BodyUse,
    /// How to count the LLM tokens. `None` if no limit counts them.
    pub llm: Option<LlmInspection>,
    /// Maximum length in bytes that the limits read.
    pub max_read: usize,
}

impl LimitInspection {
    /// Return what the limits read from a request with this method, or `None` if they do not depend on the body.
    /// `max_values` is the maximum length of a body from which values are read.
    pub fn new(limits: &RouteLimits, method: &Method, max_values: usize) -> Option<Self> {
        let body_use = limits.body_use(method);
        let llm = limits.llm_inspection(method);
        let bounds = [body_use.is_any().then_some(max_values), llm.map(|llm| llm.max_body)];
        let max_read = bounds.into_iter().flatten().max()?;
        Some(LimitInspection { body_use, llm, max_read })
    }
}

/// How to read a body.
#[derive(Debug, Clone, Copy)]
pub struct BodyRead {
    /// Maximum length in bytes that the route allows. `None` if the route has no maximum, or is not known yet.
    pub max_body: Option<u64>,
    /// Maximum length in bytes that the gateway reads.
    pub max_read: usize,
    /// Whether a limit counts the tokens of an LLM API.
    pub reads_tokens: bool,
    /// Time at which the route timeout expires.
    pub deadline: Option<Instant>,
}

/// Return how to read a body with these headers.
///
/// # Errors
/// The body has a content coding, or its media type can be neither JSON in UTF-8 nor a form that a limit reads. The
/// values that an application reads from such a body may differ from those that the gateway reads.
pub fn format(headers: &HeaderMap, inspection: &BodyInspection) -> Result<BodyFormat, UnreadBody> {
    if has_content_coding(headers) {
        return Err(UnreadBody::ContentCoding);
    }
    let mut types = headers.get_all(CONTENT_TYPE).iter();
    let Some(media_type) = types.next() else { return Ok(BodyFormat::Json) };
    if types.next().is_some() {
        return Err(UnreadBody::MediaType);
    }
    match media_type.to_str() {
        Ok(media_type) if is_form(media_type) && !inspection.fields.is_empty() => {
            Ok(BodyFormat::Form(FormType::parse(media_type)?))
        }
        Ok(media_type) if may_be_json(media_type) => Ok(BodyFormat::Json),
        Ok(_) | Err(_) => Err(UnreadBody::MediaType),
    }
}

fn is_form(media_type: &str) -> bool {
    let essence = media_type.split(';').next().unwrap_or_default().trim();
    FormType::is_form(&essence.to_ascii_lowercase())
}

/// Return whether an application may read a body of this media type as JSON in UTF-8.
fn may_be_json(media_type: &str) -> bool {
    let mut parameters = media_type.split(';').skip(1).map(|part| part.trim().to_ascii_lowercase());
    let is_utf8 = |parameter: String| match parameter.split_once('=') {
        Some((name, charset)) if name.trim_end() == "charset" => {
            matches!(charset.trim_matches([' ', '"']), "utf-8" | "utf8" | "us-ascii")
        }
        _ => true,
    };
    !is_form(media_type) && parameters.all(is_utf8)
}

/// Return the part of the memory for inspected bodies that the client network may use: `max_buffered / INSPECTED_SHARE`
/// bytes, but at least `max_read` bytes, which is the maximum length of one body. Return `None` if the client is exempt.
fn network_share(snapshot: &ConfigSnapshot, peer: &Peer, max_read: usize, headers: &HeaderMap) -> Option<NetworkShare> {
    let ConfigSnapshot { config, metrics, .. } = snapshot;
    let max = (config.server.max_buffered / INSPECTED_SHARE).max(max_read);
    Some(metrics.inspected_by_network.share(counted_network(config, peer, headers)?, max))
}

/// Divisor of `server.max_connections`. The quotient limits the number of responses that the gateway reads after their
/// clients have left.
const REST_SHARE: usize = 8;

/// Return the bounds of reading the response to a request after its client has left.
pub(super) fn rest_bounds(snapshot: &ConfigSnapshot, peer: &Peer, headers: &HeaderMap) -> RestBounds {
    let ConfigSnapshot { config, metrics, .. } = snapshot;
    let max = (config.server.max_connections / REST_SHARE).max(1);
    RestBounds { counter: metrics.rests.clone(), max, network: counted_network(config, peer, headers) }
}

/// Return the client network whose use of shared resources is limited. Return `None` if the client is exempt:
/// `max_connections_per_ip` is 0 or does not apply to the client, or the client is a trusted proxy that forwards the
/// requests of many clients without their addresses.
pub(super) fn counted_network(config: &CompiledConfig, peer: &Peer, headers: &HeaderMap) -> Option<IpAddr> {
    let settings = &config.server;
    let client = peer.client_address(headers);
    let is_proxy = peer.forwarded.trusted && config.client_ip.is_trusted(client);
    let is_exempt = settings.max_connections_per_ip == 0 || is_proxy || settings.is_exempt_from_per_ip(client);
    (!is_exempt).then(|| config.client_ip.network(client))
}

/// Read and parse the body of a request with these headers.
///
/// # Errors
/// The client did not send the body in time, or aborted it, or the body is longer than the route allows.
pub(super) async fn read(
    body: &mut RequestBody,
    snapshot: &ConfigSnapshot,
    peer: &Peer,
    headers: &HeaderMap,
    BodyRead { max_body, max_read, reads_tokens, deadline }: BodyRead,
) -> Result<BodyContent, Rejection<'static>> {
    if http_body::Body::is_end_stream(body) {
        return Ok(BodyContent::Empty);
    }
    let config = &snapshot.config;
    let format = match format(headers, &config.body_inspection) {
        Ok(format) => format,
        Err(reason) => return Ok(BodyContent::Unread(reason)),
    };
    let limits = BodyLimits { deadline, max_body, ..client_limits(config) };
    let reading = body.read(limits, max_read, network_share(snapshot, peer, max_read, headers));
    let read = match deadline {
        None => reading.await,
        Some(deadline) => timeout_at(deadline, reading).await.unwrap_or(Err(BodyError::ClientTimeout)),
    };
    Ok(match read.map_err(|error| Rejection::Upstream(error.into()))? {
        ReadBody::Whole(bytes) => parse(snapshot, bytes, format, reads_tokens).await,
        ReadBody::TooLong => BodyContent::Unread(UnreadBody::TooLong(max_read)),
        ReadBody::NoCapacity => BodyContent::Unread(UnreadBody::NoCapacity),
    })
}

/// Return the timeouts of a client while it sends a body that the gateway reads.
fn client_limits(config: &CompiledConfig) -> BodyLimits {
    let settings = &config.server;
    let idle_timeout = settings.body_idle_timeout;
    let upload = UploadLimits { idle_timeout, min_rate: settings.min_body_rate, total_timeout: settings.body_timeout };
    BodyLimits { deadline: None, is_client_deadline: false, upload, idle_timeout, max_body: None }
}

/// Read a body of at most `max_read` bytes for the gateway itself.
pub(super) async fn read_whole(
    body: &mut RequestBody,
    snapshot: &ConfigSnapshot,
    peer: &Peer,
    headers: &HeaderMap,
    max_read: usize,
) -> Result<ReadBody, BodyError> {
    let share = network_share(snapshot, peer, max_read, headers);
    body.read(client_limits(&snapshot.config), max_read, share).await
}

/// Maximum length in bytes of a body that the worker itself parses. The worker handles no other request meanwhile, for
/// at most 0.5 ms.
const MAX_PARSED_BY_WORKER: usize = 64 << 10;

/// Change a body that was read as a whole. A blocking thread changes a long body, as in [`parse`].
///
/// # Errors
/// `change` failed.
pub(super) async fn change(
    body: &mut RequestBody,
    snapshot: &ConfigSnapshot,
    change: impl FnOnce(&[u8]) -> Result<Vec<u8>, LlmError> + Send + 'static,
) -> Result<(), LlmError> {
    let Some(bytes) = body.buffered_mut() else { return Ok(()) };
    if bytes.len() <= MAX_PARSED_BY_WORKER {
        *bytes = change(bytes)?.into();
        return Ok(());
    }
    let permit = snapshot.metrics.parser_permits.clone().acquire_owned().await;
    let old = bytes.clone();
    let changing = spawn_blocking(move || {
        let _permit = permit;
        change(&old)
    });
    // The task fails only if the runtime shuts down.
    *bytes = changing.await.unwrap_or(Err(LlmError::NoCapacity))?.into();
    Ok(())
}

/// Replace the names of models in a body by `model_aliases` of the route, or of the fallback with this index.
///
/// # Errors
/// The body would become too long.
pub(super) async fn replace_models(
    body: &mut RequestBody,
    snapshot: &ConfigSnapshot,
    route: &Route,
    fallback: Option<usize>,
) -> Result<(), LlmError> {
    let route = snapshot.config.routes[route.index].clone();
    let replace = move |body: &[u8]| {
        let aliases = fallback.map_or(&route.model_aliases, |index| &route.fallback[index].model_aliases);
        let model = |name: &str| aliases.get(name).map(|model| &**model);
        request::with_models(body, model).map_err(LlmError::from)
    };
    change(body, snapshot, replace).await
}

/// Parse the bytes of a complete body. A blocking thread parses a long body, so that the other requests of the worker do
/// not wait. The number of bodies that are parsed at the same time is bounded.
async fn parse(snapshot: &ConfigSnapshot, bytes: Bytes, format: BodyFormat, reads_tokens: bool) -> BodyContent {
    let config = &snapshot.config;
    if bytes.len() <= MAX_PARSED_BY_WORKER {
        return BodyContent::from_bytes(&bytes, &format, &config.body_inspection, reads_tokens);
    }
    let permit = snapshot.metrics.parser_permits.clone().acquire_owned().await;
    let config = config.clone();
    let parsing = spawn_blocking(move || {
        let _permit = permit;
        BodyContent::from_bytes(&bytes, &format, &config.body_inspection, reads_tokens)
    });
    // The task fails only if the runtime shuts down.
    parsing.await.unwrap_or(BodyContent::Unread(UnreadBody::NoCapacity))
}
