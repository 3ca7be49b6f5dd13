//! Messages of Envoy's rate limit service: a decoded message is encoded to a message with the same meaning, and has no
//! more entries than bytes. The descriptors of a management server are valid YAML with the same domain.

use prost::Message;
use sluicegate::config::yaml;
use sluicegate::payload::envoy::{HealthCheckRequest, RateLimitRequest};
use sluicegate::payload::xds::{DiscoveryResponse, RateLimitConfig};

pub(crate) fn run(data: &[u8]) {
    let _ = HealthCheckRequest::decode(data);
    descriptors(data);
    let Ok(request) = RateLimitRequest::decode(data) else { return };
    let entries: usize = request.descriptors.iter().map(|descriptor| descriptor.entries.len()).sum();
    assert!(entries + request.descriptors.len() <= data.len(), "each part has at least one byte");
    let again = RateLimitRequest::decode(&*request.encode_to_vec()).expect("an encoded message can be decoded");
    assert_eq!(request, again);
}

fn descriptors(data: &[u8]) {
    let _ = DiscoveryResponse::decode(data);
    let Ok(config) = RateLimitConfig::decode(data) else { return };
    let documents = yaml::parse(&config.to_yaml()).expect("the descriptors are YAML");
    assert_eq!(documents[0].get("domain").and_then(|domain| domain.text()), Some(&*config.domain));
}
