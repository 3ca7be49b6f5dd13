//! Messages of xDS (`envoy.service.discovery.v3`), and of the descriptors that a management server sends
//! (`ratelimit.config.ratelimit.v3`).

use bytes::Bytes;
use prost::Message;
use serde_json::{Map, Value as Json, json};

use crate::payload::envoy::{Struct, Unit};

/// `google.protobuf.Any`
#[derive(Clone, PartialEq, Message)]
pub struct Any {
    /// Name of the type of `value`.
    #[prost(string, tag = "1")]
    pub type_url: String,
    /// An encoded message.
    #[prost(bytes = "bytes", tag = "2")]
    pub value: Bytes,
}

/// `google.rpc.Status`
#[derive(Clone, PartialEq, Message)]
pub struct Status {
    /// Status of gRPC.
    #[prost(int32, tag = "1")]
    pub code: i32,
    /// Text for developers.
    #[prost(string, tag = "2")]
    pub message: String,
}

/// `envoy.config.core.v3.Node`
#[derive(Clone, PartialEq, Message)]
pub struct Node {
    /// Name by which the management server chooses the resources.
    #[prost(string, tag = "1")]
    pub id: String,
    /// More about the node.
    #[prost(message, optional, tag = "3")]
    pub metadata: Option<Struct>,
    /// Name of the program.
    #[prost(string, tag = "6")]
    pub user_agent_name: String,
    /// Version of the program.
    #[prost(string, tag = "7")]
    pub user_agent_version: String,
}

/// `DiscoveryRequest`
#[derive(Clone, PartialEq, Message)]
pub struct DiscoveryRequest {
    /// Version of the resources that the client uses.
    #[prost(string, tag = "1")]
    pub version_info: String,
    /// The client.
    #[prost(message, optional, tag = "2")]
    pub node: Option<Node>,
    /// Names of the resources. Empty for all.
    #[prost(string, repeated, tag = "3")]
    pub resource_names: Vec<String>,
    /// Type of the resources.
    #[prost(string, tag = "4")]
    pub type_url: String,
    /// Nonce of the response that the request accepts or rejects.
    #[prost(string, tag = "5")]
    pub response_nonce: String,
    /// Why the client rejects the response.
    #[prost(message, optional, tag = "6")]
    pub error_detail: Option<Status>,
}

/// `DiscoveryResponse`
#[derive(Clone, PartialEq, Message)]
pub struct DiscoveryResponse {
    /// Version of the resources.
    #[prost(string, tag = "1")]
    pub version_info: String,
    /// All resources (state of the world).
    #[prost(message, repeated, tag = "2")]
    pub resources: Vec<Any>,
    /// Type of the resources.
    #[prost(string, tag = "4")]
    pub type_url: String,
    /// Identifies the response.
    #[prost(string, tag = "5")]
    pub nonce: String,
}

/// Type of [`RateLimitConfig`].
pub const RATE_LIMIT_CONFIG: &str = "type.googleapis.com/ratelimit.config.ratelimit.v3.RateLimitConfig";

/// `RateLimitConfig`: the descriptors of a domain.
#[derive(Clone, PartialEq, Message)]
pub struct RateLimitConfig {
    /// Name of the resource.
    #[prost(string, tag = "1")]
    pub name: String,
    /// The domain.
    #[prost(string, tag = "2")]
    pub domain: String,
    /// The descriptors.
    #[prost(message, repeated, tag = "3")]
    pub descriptors: Vec<Descriptor>,
}

/// `RateLimitDescriptor`
#[derive(Clone, PartialEq, Message)]
pub struct Descriptor {
    /// Key of the entry.
    #[prost(string, tag = "1")]
    pub key: String,
    /// Value of the entry. Empty for every value.
    #[prost(string, tag = "2")]
    pub value: String,
    /// The limit.
    #[prost(message, optional, tag = "3")]
    pub rate_limit: Option<Policy>,
    /// Descriptors with one more entry.
    #[prost(message, repeated, tag = "4")]
    pub descriptors: Vec<Descriptor>,
    /// Whether the limit denies no request.
    #[prost(bool, tag = "5")]
    pub shadow_mode: bool,
    /// Whether metrics have the values of the entries.
    #[prost(bool, tag = "6")]
    pub detailed_metric: bool,
    /// Whether the limit is a quota.
    #[prost(bool, tag = "7")]
    pub quota_mode: bool,
    /// Metadata of responses.
    #[prost(message, optional, tag = "8")]
    pub metadata: Option<Struct>,
}

/// `RateLimitPolicy`
#[derive(Clone, PartialEq, Message)]
pub struct Policy {
    /// Window of the quota: a [`Unit`].
    #[prost(int32, tag = "1")]
    pub unit: i32,
    /// Count of the quota.
    #[prost(uint32, tag = "2")]
    pub requests_per_unit: u32,
    /// Whether there is no limit.
    #[prost(bool, tag = "3")]
    pub unlimited: bool,
    /// Name of the limit.
    #[prost(string, tag = "4")]
    pub name: String,
    /// Limits that this limit replaces.
    #[prost(message, repeated, tag = "5")]
    pub replaces: Vec<Replace>,
}

/// `RateLimitReplace`
#[derive(Clone, PartialEq, Message)]
pub struct Replace {
    /// Name of the limit.
    #[prost(string, tag = "1")]
    pub name: String,
}

impl RateLimitConfig {
    /// Return the YAML of envoyproxy/ratelimit with these descriptors. It is JSON, which is a subset of YAML.
    pub fn to_yaml(&self) -> String {
        let descriptors: Vec<_> = self.descriptors.iter().map(Descriptor::to_json).collect();
        format!("{:#}\n", json!({ "domain": self.domain, "descriptors": descriptors }))
    }
}

impl Descriptor {
    fn to_json(&self) -> Json {
        let mut json = Map::new();
        let mut add = |key: &str, value: Json| drop(json.insert(key.to_owned(), value));
        add("key", (&*self.key).into());
        if !self.value.is_empty() {
            add("value", (&*self.value).into());
        }
        if let Some(policy) = &self.rate_limit {
            add("rate_limit", policy.to_json());
        }
        let flags = [
            ("shadow_mode", self.shadow_mode),
            ("detailed_metric", self.detailed_metric),
            ("quota_mode", self.quota_mode),
        ];
        for (key, _) in flags.iter().filter(|(_, is_set)| *is_set) {
            add(key, true.into());
        }
        if let Some(metadata) = self.metadata.as_ref().filter(|metadata| !metadata.fields.is_empty()) {
            add("metadata", metadata.to_json());
        }
        if !self.descriptors.is_empty() {
            add("descriptors", self.descriptors.iter().map(Descriptor::to_json).collect());
        }
        json.into()
    }
}

impl Policy {
    fn to_json(&self) -> Json {
        let mut json = Map::new();
        let mut add = |key: &str, value: Json| drop(json.insert(key.to_owned(), value));
        let unit = Unit::NAMES.iter().find(|(_, unit)| i32::from(*unit) == self.unit).map(|(name, _)| *name);
        match unit {
            Some(name) => add("unit", name.into()),
            // The reader of the YAML reports an unknown unit.
            None if self.unit != 0 => add("unit", self.unit.to_string().into()),
            None => {}
        }
        if self.unlimited {
            add("unlimited", true.into());
        }
        if !self.unlimited || self.requests_per_unit != 0 {
            add("requests_per_unit", self.requests_per_unit.into());
        }
        if !self.name.is_empty() {
            add("name", (&*self.name).into());
        }
        if !self.replaces.is_empty() {
            add("replaces", self.replaces.iter().map(|replace| json!({ "name": replace.name })).collect());
        }
        json.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::payload::envoy::Value;

    #[test]
    fn descriptors_become_the_yaml_of_envoyproxy_ratelimit() {
        let policy = Policy { unit: 7, requests_per_unit: 3, name: "l".to_owned(), ..Policy::default() };
        let inner = Descriptor { key: "k\"\n".to_owned(), rate_limit: Some(policy), ..Descriptor::default() };
        let unlimited =
            Policy { unlimited: true, replaces: vec![Replace { name: "l".to_owned() }], ..Policy::default() };
        let metadata = Struct { fields: [("a".to_owned(), Value::from("b"))].into() };
        let config = RateLimitConfig {
            name: "n".to_owned(),
            domain: "d".to_owned(),
            descriptors: vec![
                Descriptor {
                    key: "a".to_owned(),
                    value: "b".to_owned(),
                    descriptors: vec![inner],
                    ..Descriptor::default()
                },
                Descriptor {
                    key: "u".to_owned(),
                    rate_limit: Some(unlimited),
                    shadow_mode: true,
                    quota_mode: true,
                    detailed_metric: true,
                    metadata: Some(metadata),
                    ..Descriptor::default()
                },
                Descriptor {
                    key: "z".to_owned(),
                    rate_limit: Some(Policy { unit: 9, ..Policy::default() }),
                    ..Descriptor::default()
                },
            ],
        };
        let expected = json!({"domain": "d", "descriptors": [
            {"key": "a", "value": "b", "descriptors": [
                {"key": "k\"\n", "rate_limit": {"unit": "WEEK", "requests_per_unit": 3, "name": "l"}},
            ]},
            {"key": "u", "rate_limit": {"unlimited": true, "replaces": [{"name": "l"}]}, "shadow_mode": true,
                "detailed_metric": true, "quota_mode": true, "metadata": {"a": "b"}},
            {"key": "z", "rate_limit": {"unit": "9", "requests_per_unit": 0}},
        ]});
        assert_eq!(serde_json::from_str::<Json>(&config.to_yaml()).unwrap(), expected);
    }
}
