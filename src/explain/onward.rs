//! What an upstream would be sent.

use http::header::HeaderMap;
use http::uri::PathAndQuery;
use http::{HeaderValue, Request};

use super::answer::fields;
use super::facts::Onward;
use crate::gateway::Peer;
use crate::gateway::request_id::RequestId;
use crate::gateway::tell::{UpstreamRequestInfo, prepare_upstream_headers};
use crate::http::headers::X_REQUEST_ID;
use crate::runtime::{CompiledConfig, Route, WeightedUpstreams};

/// What stands for an id that the gateway would make.
const MADE: HeaderValue = HeaderValue::from_static("(a new one for each request)");

/// The request as the upstreams of a route would be sent it, for this target and with so many bytes of body.
pub(super) fn onward(
    runtime: &CompiledConfig,
    route: &Route,
    split: &WeightedUpstreams,
    request: &Request<()>,
    peer: &Peer,
    (target, length): (Option<&PathAndQuery>, Option<u64>),
) -> Onward {
    let id = match RequestId::from_headers(request.headers(), peer.forwarded.trusted) {
        RequestId::Received(id) => id,
        RequestId::Generated(_) => MADE,
    };
    let upstreams = || split.upstreams().map(|index| &runtime.upstreams[index]);
    // Where requests name no host all servers are told the one of the first upstream, for the sake of the example.
    let authority = upstreams().next().map_or("", |upstream| &*upstream.servers[0].authority);
    let mut onward = request.clone();
    let told = UpstreamRequestInfo { forwarded: &peer.forwarded, request_id: id, trace: None, authority, length };
    if let Some(offer) = prepare_upstream_headers(runtime, route, &mut onward, told) {
        offer.insert_into(onward.headers_mut());
    }
    let (came, goes) = (request.headers(), onward.headers());
    let same = |headers: &HeaderMap, name| came.get_all(name).iter().eq(headers.get_all(name).iter());
    let changed: HeaderMap =
        goes.iter().filter(|(name, _)| !same(goes, *name)).fold(HeaderMap::new(), |mut all, (name, value)| {
            all.append(name, value.clone());
            all
        });
    let configured =
        |name: &str| route.request_headers.set.iter().any(|(set, _)| *set == *name && *set != X_REQUEST_ID);
    Onward {
        upstreams: upstreams().map(|upstream| upstream.name.to_string()).collect(),
        target: target.map_or("/", |target| target.as_str()).to_owned(),
        set_headers: fields(&changed, configured),
        removed_headers: came.keys().filter(|name| !goes.contains_key(*name)).map(ToString::to_string).collect(),
    }
}
