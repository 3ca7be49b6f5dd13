//! Messages of Envoy's external authorization: a decoded message is encoded to a message with the same meaning, and has no
//! more headers than bytes.

use prost::Message;
use sluicegate::payload::ext_authz::CheckRequest;

pub(crate) fn run(data: &[u8]) {
    let Ok(request) = CheckRequest::decode(data) else { return };
    let http = request.attributes.as_ref().and_then(|attributes| attributes.request.as_ref()?.http.as_ref());
    let listed = http.and_then(|http| http.header_map.as_ref()).map_or(0, |list| list.headers.len());
    let headers = http.map_or(0, |http| http.headers.len());
    assert!(listed + headers <= data.len(), "each header has at least one byte");
    let again = CheckRequest::decode(&*request.encode_to_vec()).expect("an encoded message can be decoded");
    assert_eq!(request, again);
}
