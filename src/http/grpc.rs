//! gRPC over HTTP/2 as a server: unary calls with messages that are not compressed.

use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName};
use http::{HeaderMap, HeaderValue, Response};
use http_body::Body as HttpBody;
use http_body_util::BodyExt;
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

use crate::http::body::Body;
use crate::http::body_limits::NetworkShare;
use crate::http::flow::StreamFlow;
use crate::http::problem::NO_STORE;

/// Length of the prefix of a message: whether the message is compressed, and its length.
const PREFIX: usize = 5;

/// A status of gRPC (<https://grpc.io/docs/guides/status-codes/>).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    /// The call succeeded.
    Ok = 0,
    /// The reason is unknown.
    Unknown = 2,
    /// The message is invalid.
    InvalidArgument = 3,
    /// The deadline of the client expired.
    DeadlineExceeded = 4,
    /// There is no such service.
    NotFound = 5,
    /// The client may not make this call.
    PermissionDenied = 7,
    /// A limit or a maximum size is exceeded.
    ResourceExhausted = 8,
    /// The server does not have this method, or not this encoding.
    Unimplemented = 12,
    /// The server cannot answer now.
    Unavailable = 14,
    /// The credentials are missing or invalid.
    Unauthenticated = 16,
}

/// An error that ends a call, with a message for the developers of the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallError {
    /// The status of the call.
    pub code: Code,
    /// The message.
    pub message: &'static str,
}

impl CallError {
    /// Create an error.
    pub const fn new(code: Code, message: &'static str) -> Self {
        CallError { code, message }
    }

    /// Return the response: a status without a message (trailers-only).
    pub fn into_response(self) -> Response<Body> {
        let mut response = Response::new(Body::full(""));
        set_status_headers(response.headers_mut(), self.code, self.message);
        response
    }
}

/// Result of reading the message of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReadMessage {
    /// The message.
    Whole(Bytes),
    /// The message is longer than the maximum length.
    TooLong,
    /// The messages that are being read occupy too much memory.
    NoCapacity,
}

/// Read the message of a unary call, which has at most `max` bytes. `share` is the share of the client network in the
/// memory for messages.
///
/// # Errors
/// The call has no complete message or several messages, the message is compressed, or the client has gone away.
pub async fn read_message(
    mut body: impl HttpBody<Data = Bytes> + Unpin,
    max: usize,
    flow: &StreamFlow,
    share: NetworkShare,
) -> Result<ReadMessage, CallError> {
    const INCOMPLETE: CallError = CallError::new(Code::InvalidArgument, "the call has no complete message");
    // The message of a small call is in one frame, and is not copied.
    let (mut bytes, mut rest) = (Bytes::new(), BytesMut::new());
    let Some(reservation) = flow.reserve_inspected() else { return Ok(ReadMessage::NoCapacity) };
    let mut reservation = reservation.within(Some(share));
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|_| INCOMPLETE)?.into_data() else { break };
        if !reservation.try_grow(data.len()) {
            return Ok(ReadMessage::NoCapacity);
        }
        if bytes.is_empty() {
            bytes = data;
        } else {
            rest.extend_from_slice(&data);
        }
        if bytes.len() + rest.len() > PREFIX + max {
            return Ok(ReadMessage::TooLong);
        }
    }
    if !rest.is_empty() {
        bytes = [bytes, rest.freeze()].concat().into();
    }
    if bytes.len() < PREFIX {
        return Err(INCOMPLETE);
    }
    let is_compressed = bytes.get_u8() != 0;
    let length = bytes.get_u32() as usize;
    if is_compressed {
        return Err(CallError::new(Code::Unimplemented, "compressed messages are not supported"));
    }
    match bytes.len() {
        received if received == length => Ok(ReadMessage::Whole(bytes)),
        received if received < length => Err(INCOMPLETE),
        _ => Err(CallError::new(Code::InvalidArgument, "the call has more than one message")),
    }
}

/// Return the response with this message and the status OK. `encode` appends the message, which has `length` bytes.
pub fn message_response(length: usize, encode: impl FnOnce(&mut BytesMut)) -> Response<Body> {
    let mut bytes = BytesMut::with_capacity(PREFIX + length);
    bytes.put_u8(0);
    bytes.put_u32(length as u32);
    encode(&mut bytes);
    let trailers = HeaderMap::from_iter([(GRPC_STATUS, HeaderValue::from(Code::Ok as u64))]);
    let mut response = Response::new(Body::with_trailers(bytes.freeze(), trailers));
    response.headers_mut().insert(CONTENT_TYPE, GRPC);
    response
}

/// Return the time that remains for the answer to a client that waits for `timeout`. The client must have the answer
/// before its deadline, because Envoy admits a request whose answer is late. A tenth of the time, at most 5 ms, is for
/// the way to the client.
pub fn time_to_answer(timeout: Duration) -> Duration {
    timeout - (timeout / 10).min(Duration::from_millis(5))
}

const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");

const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");

/// The characters that gRPC escapes: all except space to `~`, and `%`. Bytes that are not ASCII are always escaped.
const MESSAGE_ESCAPES: AsciiSet = CONTROLS.add(b'%');

/// Set the headers of a response without a message (trailers-only).
pub fn set_status_headers(headers: &mut HeaderMap, code: Code, message: &str) {
    headers.insert(CONTENT_TYPE, GRPC);
    headers.insert(CACHE_CONTROL, NO_STORE);
    headers.insert(GRPC_STATUS, HeaderValue::from(code as u64));
    // Percent-encode the message, as gRPC over HTTP/2 defines for `grpc-message`.
    let message = utf8_percent_encode(message, &MESSAGE_ESCAPES).to_string();
    headers.extend(HeaderValue::from_str(&message).ok().map(|text| (HeaderName::from_static("grpc-message"), text)));
}
