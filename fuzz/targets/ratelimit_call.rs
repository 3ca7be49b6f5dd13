//! Messages of Envoy's rate limit service: a decoded message is encoded to a message with the same meaning, and has no
//! more entries than bytes.

use prost::Message;
use sluicegate::payload::envoy::{HealthCheckRequest, RateLimitRequest};

pub(crate) fn run(data: &[u8]) {
    let _ = HealthCheckRequest::decode(data);
    let Ok(request) = RateLimitRequest::decode(data) else { return };
    let entries: usize = request.descriptors.iter().map(|descriptor| descriptor.entries.len()).sum();
    assert!(entries + request.descriptors.len() <= data.len(), "each part has at least one byte");
    let again = RateLimitRequest::decode(&*request.encode_to_vec()).expect("an encoded message can be decoded");
    assert_eq!(request, again);
}
