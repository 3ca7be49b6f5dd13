//! What an upstream would be sent.

use http::header::HeaderMap;
use http::uri::PathAndQuery;
use http::{HeaderValue, Request};

use super::answer::header_reports;
use super::facts::UpstreamReport;
use crate::gateway::Peer;
use crate::gateway::request_id::RequestId;
use crate::gateway::tell::{UpstreamRequestInfo, prepare_upstream_headers};
use crate::http::headers::X_REQUEST_ID;
use crate::runtime::{CompiledConfig, Route, WeightedUpstreams};

/// What stands for an id that the gateway would make.
const GENERATED_ID_PLACEHOLDER: HeaderValue = HeaderValue::from_static("(a new one for each request)");

/// The request as the upstreams of a route would be sent it, for this target and with so many bytes of body.
pub(super) fn upstream_report(
    config: &CompiledConfig,
    route: &Route,
    weighted_upstreams: &WeightedUpstreams,
    request: &Request<()>,
    peer: &Peer,
    (target, length): (Option<&PathAndQuery>, Option<u64>),
) -> UpstreamReport {
    let request_id = match RequestId::from_headers(request.headers(), peer.forwarded.trusted) {
        RequestId::Received(request_id) => request_id,
        RequestId::Generated(_) => GENERATED_ID_PLACEHOLDER,
    };
    let upstreams = || weighted_upstreams.upstreams().map(|index| &config.upstreams[index]);
    // Where requests name no host all servers are told the one of the first upstream, for the sake of the example.
    let authority = upstreams().next().map_or("", |upstream| &*upstream.servers[0].authority);
    let mut forwarded_request = request.clone();
    let request_info = UpstreamRequestInfo { forwarded: &peer.forwarded, request_id, trace: None, authority, length };
    if let Some(upgrade_request) = prepare_upstream_headers(config, route, &mut forwarded_request, request_info) {
        upgrade_request.insert_into(forwarded_request.headers_mut());
    }
    let (received_headers, forwarded_headers) = (request.headers(), forwarded_request.headers());
    let is_unchanged =
        |headers: &HeaderMap, name| received_headers.get_all(name).iter().eq(headers.get_all(name).iter());
    let changed: HeaderMap = forwarded_headers.iter().filter(|(name, _)| !is_unchanged(forwarded_headers, *name)).fold(
        HeaderMap::new(),
        |mut changed_headers, (name, value)| {
            changed_headers.append(name, value.clone());
            changed_headers
        },
    );
    let is_configured =
        |name: &str| route.request_headers.set.iter().any(|(set, _)| *set == *name && *set != X_REQUEST_ID);
    UpstreamReport {
        upstreams: upstreams().map(|upstream| upstream.name.to_string()).collect(),
        target: target.map_or("/", |target| target.as_str()).to_owned(),
        set_headers: header_reports(&changed, is_configured),
        removed_headers: received_headers
            .keys()
            .filter(|name| !forwarded_headers.contains_key(*name))
            .map(ToString::to_string)
            .collect(),
    }
}
