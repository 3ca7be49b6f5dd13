//! Messages of `envoy.service.ratelimit.v3` and of the gRPC health service.
//!
//! Keys and values of descriptors are `bytes`, although the published schema says `string`: both have the same encoding.
//! Envoy copies header values into descriptors without a check for UTF-8. A decoder that rejects such a value would
//! answer with an error, which makes Envoy admit the request.

use std::collections::BTreeMap;

use bytes::Bytes;
use prost::{Enumeration, Message, Oneof};
use serde_json::Value as Json;

/// `RateLimitRequest`: the descriptors of one request to the proxy.
#[derive(Clone, PartialEq, Message)]
pub struct RateLimitRequest {
    /// Domain that the proxy is configured with.
    #[prost(bytes = "bytes", tag = "1")]
    pub domain: Bytes,
    /// The descriptors. All of them apply to the request.
    #[prost(message, repeated, tag = "2")]
    pub descriptors: Vec<RateLimitDescriptor>,
    /// Cost of the request for descriptors without their own `hits_addend`. 0 stands for 1.
    #[prost(uint32, tag = "3")]
    pub hits_addend: u32,
}

/// `RateLimitDescriptor`
#[derive(Clone, PartialEq, Message)]
pub struct RateLimitDescriptor {
    /// The entries, in the order of the actions of the proxy.
    #[prost(message, repeated, tag = "1")]
    pub entries: Vec<Entry>,
    /// Quota that replaces the configured quota.
    #[prost(message, optional, tag = "2")]
    pub limit: Option<RateLimitOverride>,
    /// Cost of the request. 0 asks without a charge.
    #[prost(message, optional, tag = "3")]
    pub hits_addend: Option<u64>,
    /// Whether the cost is refunded instead of charged.
    #[prost(bool, tag = "4")]
    pub is_negative_hits: bool,
}

/// `RateLimitDescriptor.Entry`
#[derive(Clone, PartialEq, Message)]
pub struct Entry {
    /// Key, such as `remote_address`.
    #[prost(bytes = "bytes", tag = "1")]
    pub key: Bytes,
    /// Value, such as the address of the client.
    #[prost(bytes = "bytes", tag = "2")]
    pub value: Bytes,
}

/// `RateLimitDescriptor.RateLimitOverride`
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct RateLimitOverride {
    /// Count of the quota.
    #[prost(uint32, tag = "1")]
    pub requests_per_unit: u32,
    /// Window of the quota.
    #[prost(enumeration = "Unit", tag = "2")]
    pub unit: i32,
}

/// Window of a quota.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum Unit {
    /// No window that the protocol can express.
    Unknown = 0,
    /// One second.
    Second = 1,
    /// One minute.
    Minute = 2,
    /// One hour.
    Hour = 3,
    /// 24 hours.
    Day = 4,
    /// 30 days.
    Month = 5,
    /// 365 days.
    Year = 6,
    /// 7 days.
    Week = 7,
}

impl Unit {
    /// All units with a window, each with the length of the window in seconds.
    pub const WINDOWS: [(Unit, u64); 7] = [
        (Unit::Second, 1),
        (Unit::Minute, 60),
        (Unit::Hour, 3_600),
        (Unit::Day, 86_400),
        (Unit::Week, 604_800),
        (Unit::Month, 2_592_000),
        (Unit::Year, 31_536_000),
    ];

    /// All units with a window, each with its name in the schema.
    pub const NAMES: [(&str, Unit); 7] = [
        ("SECOND", Unit::Second),
        ("MINUTE", Unit::Minute),
        ("HOUR", Unit::Hour),
        ("DAY", Unit::Day),
        ("WEEK", Unit::Week),
        ("MONTH", Unit::Month),
        ("YEAR", Unit::Year),
    ];

    /// Return the unit with this window, or [`Unit::Unknown`].
    pub fn of_seconds(seconds: u64) -> Unit {
        Unit::WINDOWS.iter().find(|(_, window)| *window == seconds).map_or(Unit::Unknown, |(unit, _)| *unit)
    }

    /// Return the name of the unit in the schema.
    pub fn name(self) -> &'static str {
        Unit::NAMES.iter().find(|(_, unit)| *unit == self).map_or("UNKNOWN", |(name, _)| name)
    }

    /// Return the length of the window in seconds.
    pub fn seconds(self) -> Option<u64> {
        Unit::WINDOWS.iter().find(|(unit, _)| *unit == self).map(|(_, window)| *window)
    }
}

/// `RateLimitResponse`
#[derive(Clone, PartialEq, Message)]
pub struct RateLimitResponse {
    /// Decision about the request. Envoy admits the request if this field is [`Code::Unknown`].
    #[prost(enumeration = "Code", tag = "1")]
    pub overall_code: i32,
    /// Status of each descriptor, in the order of the request.
    #[prost(message, repeated, tag = "2")]
    pub statuses: Vec<DescriptorStatus>,
    /// Headers for the response to the client of the proxy.
    #[prost(message, repeated, tag = "3")]
    pub response_headers_to_add: Vec<HeaderValue>,
    /// Metadata for other filters of the proxy.
    #[prost(message, optional, tag = "6")]
    pub dynamic_metadata: Option<Struct>,
}

/// Decision about a request or a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum Code {
    /// No decision.
    Unknown = 0,
    /// Admitted.
    Ok = 1,
    /// Denied.
    OverLimit = 2,
}

/// `RateLimitResponse.DescriptorStatus`
#[derive(Clone, PartialEq, Message)]
pub struct DescriptorStatus {
    /// Decision about the descriptor.
    #[prost(enumeration = "Code", tag = "1")]
    pub code: i32,
    /// Quota that applied. Absent if no limit applies to the descriptor.
    #[prost(message, optional, tag = "2")]
    pub current_limit: Option<RateLimit>,
    /// Remaining cost that the limit admits.
    #[prost(uint32, tag = "3")]
    pub limit_remaining: u32,
    /// Time until the quota is available again.
    #[prost(message, optional, tag = "4")]
    pub duration_until_reset: Option<Duration>,
}

/// `RateLimitResponse.RateLimit`
#[derive(Clone, PartialEq, Message)]
pub struct RateLimit {
    /// Count of the quota.
    #[prost(uint32, tag = "1")]
    pub requests_per_unit: u32,
    /// Window of the quota.
    #[prost(enumeration = "Unit", tag = "2")]
    pub unit: i32,
    /// Name of the limit.
    #[prost(string, tag = "3")]
    pub name: String,
}

/// `envoy.config.core.v3.HeaderValue`
#[derive(Clone, PartialEq, Message)]
pub struct HeaderValue {
    /// Name of the header.
    #[prost(string, tag = "1")]
    pub key: String,
    /// Value of the header.
    #[prost(string, tag = "2")]
    pub value: String,
}

/// `google.protobuf.Duration`
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Duration {
    /// Whole seconds.
    #[prost(int64, tag = "1")]
    pub seconds: i64,
    /// Rest in ns.
    #[prost(int32, tag = "2")]
    pub nanos: i32,
}

/// `google.protobuf.Struct`
#[derive(Clone, PartialEq, Message)]
pub struct Struct {
    /// The members.
    #[prost(btree_map = "string, message", tag = "1")]
    pub fields: BTreeMap<String, Value>,
}

/// `google.protobuf.Value`
#[derive(Clone, PartialEq, Message)]
pub struct Value {
    /// The value.
    #[prost(oneof = "Kind", tags = "1, 2, 3, 4, 5, 6")]
    pub kind: Option<Kind>,
}

/// The kinds of [`Value`].
#[derive(Clone, PartialEq, Oneof)]
pub enum Kind {
    /// `null`
    #[prost(enumeration = "Null", tag = "1")]
    Null(i32),
    /// A number.
    #[prost(double, tag = "2")]
    Number(f64),
    /// A string.
    #[prost(string, tag = "3")]
    Text(String),
    /// `true` or `false`
    #[prost(bool, tag = "4")]
    Bool(bool),
    /// An object.
    #[prost(message, tag = "5")]
    Object(Struct),
    /// An array.
    #[prost(message, tag = "6")]
    List(List),
}

/// `google.protobuf.NullValue`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum Null {
    /// `null`
    Null = 0,
}

/// `google.protobuf.ListValue`
#[derive(Clone, PartialEq, Message)]
pub struct List {
    /// The items.
    #[prost(message, repeated, tag = "1")]
    pub values: Vec<Value>,
}

impl Struct {
    /// Add the members of another object. A member that both have keeps its value, except that two objects are merged.
    pub fn merge(&mut self, other: &Struct) {
        for (name, value) in &other.fields {
            match (self.fields.get_mut(name).map(|own| &mut own.kind), &value.kind) {
                (Some(Some(Kind::Object(own))), Some(Kind::Object(object))) => own.merge(object),
                (Some(_), _) => {}
                (None, _) => {
                    self.fields.insert(name.clone(), value.clone());
                }
            }
        }
    }

    /// Return the object as JSON.
    pub fn to_json(&self) -> Json {
        self.fields.iter().map(|(key, value)| (key.clone(), value.to_json())).collect()
    }
}

impl Value {
    fn to_json(&self) -> Json {
        match &self.kind {
            None | Some(Kind::Null(_)) => Json::Null,
            Some(Kind::Number(number)) => (*number).into(),
            Some(Kind::Text(text)) => (&**text).into(),
            Some(Kind::Bool(flag)) => (*flag).into(),
            Some(Kind::Object(inner)) => inner.to_json(),
            Some(Kind::List(list)) => list.values.iter().map(Value::to_json).collect(),
        }
    }
}

impl From<Kind> for Value {
    fn from(kind: Kind) -> Self {
        Value { kind: Some(kind) }
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Kind::Text(text.to_owned()).into()
    }
}

/// `grpc.health.v1.HealthCheckRequest`
#[derive(Clone, PartialEq, Message)]
pub struct HealthCheckRequest {
    /// Name of the service. Empty for the whole server.
    #[prost(bytes = "bytes", tag = "1")]
    pub service: Bytes,
}

/// `grpc.health.v1.HealthCheckResponse`
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct HealthCheckResponse {
    /// Health of the service.
    #[prost(enumeration = "ServingStatus", tag = "1")]
    pub status: i32,
}

/// Health of a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum ServingStatus {
    /// The health is not known.
    Unknown = 0,
    /// The service answers calls.
    Serving = 1,
    /// The service drains.
    NotServing = 2,
}
