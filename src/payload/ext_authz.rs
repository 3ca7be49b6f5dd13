//! Messages of `envoy.service.auth.v3`: the calls of Envoy's external authorization, and their responses.
//!
//! Values of headers are `bytes`, although the published schema says `string`: both have the same encoding. Envoy does not
//! check that headers are UTF-8.

use std::collections::BTreeMap;

use bytes::Bytes;
use prost::{Message, Oneof};

/// `CheckRequest`
#[derive(Clone, PartialEq, Message)]
pub struct CheckRequest {
    /// What Envoy says about the request of the client.
    #[prost(message, optional, tag = "1")]
    pub attributes: Option<Attributes>,
}

/// `AttributeContext`
#[derive(Clone, PartialEq, Message)]
pub struct Attributes {
    /// The client.
    #[prost(message, optional, tag = "1")]
    pub source: Option<Peer>,
    /// The request of the client.
    #[prost(message, optional, tag = "4")]
    pub request: Option<Request>,
}

/// `AttributeContext.Peer`
#[derive(Clone, PartialEq, Message)]
pub struct Peer {
    /// The address of the peer.
    #[prost(message, optional, tag = "1")]
    pub address: Option<Address>,
}

/// `envoy.config.core.v3.Address`
#[derive(Clone, PartialEq, Message)]
pub struct Address {
    /// `None` for other kinds of addresses.
    #[prost(message, optional, tag = "1")]
    pub socket_address: Option<SocketAddress>,
}

/// `envoy.config.core.v3.SocketAddress`
#[derive(Clone, PartialEq, Message)]
pub struct SocketAddress {
    /// IP address.
    #[prost(string, tag = "2")]
    pub address: String,
}

/// `AttributeContext.Request`
#[derive(Clone, PartialEq, Message)]
pub struct Request {
    /// The HTTP request.
    #[prost(message, optional, tag = "2")]
    pub http: Option<HttpRequest>,
}

/// `AttributeContext.HttpRequest`
#[derive(Clone, PartialEq, Message)]
pub struct HttpRequest {
    /// Method.
    #[prost(bytes = "bytes", tag = "2")]
    pub method: Bytes,
    /// Headers by name in lower case. The values of a repeated header are joined.
    #[prost(btree_map = "string, bytes", tag = "3")]
    pub headers: BTreeMap<String, Vec<u8>>,
    /// Path and query.
    #[prost(bytes = "bytes", tag = "4")]
    pub path: Bytes,
    /// `Host` or `:authority`.
    #[prost(bytes = "bytes", tag = "5")]
    pub host: Bytes,
    /// `http` or `https`.
    #[prost(bytes = "bytes", tag = "6")]
    pub scheme: Bytes,
    /// The headers with `encode_raw_headers`, instead of `headers`.
    #[prost(message, optional, tag = "13")]
    pub header_map: Option<HeaderList>,
}

/// `envoy.config.core.v3.HeaderMap`
#[derive(Clone, PartialEq, Message)]
pub struct HeaderList {
    /// The headers.
    #[prost(message, repeated, tag = "1")]
    pub headers: Vec<Header>,
}

/// `envoy.config.core.v3.HeaderValue`
#[derive(Clone, PartialEq, Message)]
pub struct Header {
    /// Name.
    #[prost(string, tag = "1")]
    pub key: String,
    /// Value.
    #[prost(bytes = "bytes", tag = "2")]
    pub value: Bytes,
    /// Value with `encode_raw_headers`, instead of `value`.
    #[prost(bytes = "bytes", tag = "3")]
    pub raw_value: Bytes,
}

/// `CheckResponse`
#[derive(Clone, PartialEq, Message)]
pub struct CheckResponse {
    /// The decision: code 0 admits the request.
    #[prost(message, optional, tag = "1")]
    pub status: Option<Status>,
    /// What Envoy does with the request.
    #[prost(oneof = "HttpResponse", tags = "2, 3")]
    pub response: Option<HttpResponse>,
}

/// `google.rpc.Status`
#[derive(Clone, PartialEq, Message)]
pub struct Status {
    /// Code of gRPC.
    #[prost(int32, tag = "1")]
    pub code: i32,
}

/// What Envoy does with a request.
#[derive(Clone, PartialEq, Oneof)]
pub enum HttpResponse {
    /// Send this response to the client.
    #[prost(message, tag = "2")]
    Denied(DeniedResponse),
    /// Forward the request with these changes.
    #[prost(message, tag = "3")]
    Admitted(Admission),
}

/// `DeniedHttpResponse`
#[derive(Clone, PartialEq, Message)]
pub struct DeniedResponse {
    /// Status of the response.
    #[prost(message, optional, tag = "1")]
    pub status: Option<HttpStatus>,
    /// Headers of the response.
    #[prost(message, repeated, tag = "2")]
    pub headers: Vec<HeaderOption>,
    /// Body of the response.
    #[prost(string, tag = "3")]
    pub body: String,
}

/// `envoy.type.v3.HttpStatus`
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct HttpStatus {
    /// Status code.
    #[prost(int32, tag = "1")]
    pub code: i32,
}

/// `OkHttpResponse`
#[derive(Clone, PartialEq, Message)]
pub struct Admission {
    /// Headers to set in the request.
    #[prost(message, repeated, tag = "2")]
    pub headers: Vec<HeaderOption>,
    /// Headers to remove from the request.
    #[prost(string, repeated, tag = "5")]
    pub headers_to_remove: Vec<String>,
    /// Headers to add to the response.
    #[prost(message, repeated, tag = "6")]
    pub response_headers_to_add: Vec<HeaderOption>,
}

/// `envoy.config.core.v3.HeaderValueOption`
#[derive(Clone, PartialEq, Message)]
pub struct HeaderOption {
    /// Name and value.
    #[prost(message, optional, tag = "1")]
    pub header: Option<Header>,
    /// Whether the value is added to the values that the message has. Otherwise, it replaces them.
    #[prost(message, optional, tag = "2")]
    pub append: Option<bool>,
}
