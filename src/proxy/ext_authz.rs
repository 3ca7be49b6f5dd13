//! Envoy's external authorization over gRPC: the description of a request in a call, and the response to the call.

use std::net::IpAddr;
use std::time::Duration;

use bytes::Bytes;
use http::header::CACHE_CONTROL;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode};
use prost::Message;
use tokio::time::timeout;

use crate::http::body::Body;
use crate::http::body_limits::NetworkShare;
use crate::http::flow::StreamFlow;
use crate::http::grpc::{CallError, Code, ReadMessage, message_response, read_message};
use crate::http::request_body::RequestBody;
use crate::payload::ext_authz::{
    Admission, Attributes, CheckRequest, CheckResponse, DeniedResponse, Header, HeaderOption, HttpRequest,
    HttpResponse, HttpStatus, Status,
};
use crate::proxy::decisions;
use crate::proxy::decisions::{ClientRequest, Endpoint, X_ENVOY_AUTH_HEADERS_TO_REMOVE};
use crate::proxy::rejection::DescriptionError;
use crate::proxy::request::Peer;
use crate::snapshot::CompiledConfig;
use crate::snapshot::decisions::DecisionSettings;

/// The only method of the service.
const METHOD: &str = "/envoy.service.auth.v3.Authorization/Check";

/// Maximum length of a message in bytes. Envoy bounds the headers of a request.
const MAX_MESSAGE: usize = 256 << 10;

/// Maximum time to read a message.
const READ_TIMEOUT: Duration = Duration::from_secs(10);

/// Read the message of a call.
pub(super) async fn read(
    method: &str,
    body: RequestBody,
    flow: &StreamFlow,
    share: NetworkShare,
) -> Result<CheckRequest, CallError> {
    if method != METHOD {
        return Err(CallError::new(Code::Unimplemented, "this listener serves only envoy.service.auth.v3"));
    }
    let late = CallError::new(Code::DeadlineExceeded, "the message did not arrive in time");
    match timeout(READ_TIMEOUT, read_message(body, MAX_MESSAGE, flow, share)).await.map_err(|_| late)?? {
        ReadMessage::Whole(bytes) => CheckRequest::decode(bytes)
            .map_err(|_| CallError::new(Code::InvalidArgument, "the message is not a CheckRequest")),
        ReadMessage::TooLong => Err(CallError::new(Code::ResourceExhausted, "the message is too long")),
        ReadMessage::NoCapacity => Err(CallError::new(Code::Unavailable, "too many messages are being read")),
    }
}

/// Return the request that a call describes.
pub(super) fn client_request(
    check: CheckRequest,
    peer: &Peer,
    config: &CompiledConfig,
) -> Result<ClientRequest, DescriptionError> {
    let Attributes { source, request } = check.attributes.ok_or(DescriptionError::Attribute("attributes"))?;
    let http = request.and_then(|request| request.http).ok_or(DescriptionError::Attribute("request.http"))?;
    let headers = client_headers(&http).ok_or(DescriptionError::Attribute("request.http.headers"))?;
    decisions::check_proxy(peer, &headers, config)?;
    let address = source.and_then(|source| source.address?.socket_address);
    let address = address.and_then(|address| address.address.parse::<IpAddr>().ok());
    let method = Method::from_bytes(&http.method).map_err(|_| DescriptionError::Attribute("request.http.method"));
    let host = HeaderValue::from_bytes(&http.host).ok().filter(|host| !host.is_empty());
    Ok(ClientRequest {
        method: method?,
        target: decisions::target(&http.path).ok_or(DescriptionError::Attribute("request.http.path"))?,
        headers,
        host: host.ok_or(DescriptionError::Attribute("request.http.host"))?,
        scheme: decisions::scheme(&http.scheme).ok_or(DescriptionError::Attribute("request.http.scheme"))?,
        address: address.ok_or(DescriptionError::Attribute("source.address.socket_address"))?,
        endpoint: Endpoint::Request,
    })
}

/// Return the headers of the client, without the pseudo-headers of HTTP/2. `None` if one of them is invalid.
fn client_headers(http: &HttpRequest) -> Option<HeaderMap> {
    let listed = http.header_map.iter().flat_map(|list| &list.headers).map(|header| {
        let value = if header.value.is_empty() { &header.raw_value } else { &header.value };
        (&header.key, &value[..])
    });
    let joined = http.headers.iter().map(|(name, value)| (name, &value[..]));
    let mut headers = HeaderMap::new();
    for (name, value) in joined.chain(listed).filter(|(name, _)| !name.starts_with(':')) {
        let name = HeaderName::from_bytes(name.as_bytes()).ok()?;
        headers.try_append(name, HeaderValue::from_bytes(value).ok()?).ok()?;
    }
    Some(headers)
}

/// Return the response to a call, for the response to a request for a decision.
pub(super) fn response(mut decided: Response<Body>, settings: Option<&DecisionSettings>) -> Response<Body> {
    let body = decided.body_mut().take_content().unwrap_or_default();
    let headers = decided.headers();
    let status = decided.status();
    let code = match status {
        StatusCode::OK => Code::Ok,
        StatusCode::UNAUTHORIZED => Code::Unauthenticated,
        StatusCode::TOO_MANY_REQUESTS => Code::ResourceExhausted,
        _ => Code::PermissionDenied,
    };
    let response = match code {
        Code::Ok => HttpResponse::Admitted(admission(headers, settings)),
        _ => HttpResponse::Denied(DeniedResponse {
            status: Some(HttpStatus { code: status.as_u16().into() }),
            headers: options(headers, |_| true),
            body: String::from_utf8_lossy(&body).into_owned(),
        }),
    };
    let answer = CheckResponse { status: Some(Status { code: code as i32 }), response: Some(response) };
    message_response(answer.encoded_len(), |bytes| {
        // `BytesMut` grows, so the encoding cannot fail.
        let _ = answer.encode(bytes);
    })
}

fn admission(headers: &HeaderMap, settings: Option<&DecisionSettings>) -> Admission {
    let identity = settings.map_or(&[][..], DecisionSettings::identity_headers);
    let removed = headers.get(X_ENVOY_AUTH_HEADERS_TO_REMOVE).and_then(|names| names.to_str().ok());
    let is_set =
        |name: &HeaderName| identity.contains(name) && headers.get(name).is_some_and(|value| !value.is_empty());
    let is_for_client = |name: &HeaderName| {
        !identity.contains(name) && *name != X_ENVOY_AUTH_HEADERS_TO_REMOVE && *name != CACHE_CONTROL
    };
    Admission {
        headers: options(headers, is_set),
        headers_to_remove: removed.iter().flat_map(|names| names.split(',')).map(str::to_owned).collect(),
        response_headers_to_add: options(headers, is_for_client),
    }
}

/// Return the headers with the selected names. The first value of a header replaces the values that the message has.
fn options(headers: &HeaderMap, is_selected: impl Fn(&HeaderName) -> bool) -> Vec<HeaderOption> {
    let names = headers.keys().filter(|name| is_selected(name));
    let of_name = |name| headers.get_all(name).iter().enumerate().map(move |(index, value)| (name, index, value));
    let option = |(name, index, value): (&HeaderName, usize, &HeaderValue)| HeaderOption {
        header: Some(Header {
            key: name.as_str().to_owned(),
            value: Bytes::copy_from_slice(value.as_bytes()),
            raw_value: Bytes::new(),
        }),
        append: Some(index > 0),
    };
    names.flat_map(of_name).map(option).collect()
}
