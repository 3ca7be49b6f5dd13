//! The rate limit service over plain HTTP, as envoyproxy/ratelimit offers it: `/json` and `/healthcheck` on a listener
//! with `protocol = "ratelimit-http"`. Messages have the JSON form of Protocol Buffers.

use std::sync::Arc;

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value as Json, json};

use crate::http::body::Body;
use crate::http::flow::StreamFlow;
use crate::http::grpc::CallError;
use crate::http::problem::NO_STORE;
use crate::http::request_body;
use crate::http::request_body::{ReadBody, RequestBody};
use crate::payload::envoy::{
    Code, DescriptorStatus, Duration, Entry, RateLimitDescriptor, RateLimitOverride, RateLimitRequest,
    RateLimitResponse, Unit,
};
use crate::proxy::body;
use crate::proxy::metrics::CallResult;
use crate::proxy::ratelimit_service::{MAX_MESSAGE, RateLimitService};
use crate::proxy::request::Peer;
use crate::telemetry::trace::TraceParent;

/// Answer a request of a client.
pub(super) async fn answer(
    service: &RateLimitService<'_>,
    mut request: Box<Request<RequestBody>>,
    peer: &Peer,
    flow: &Arc<StreamFlow>,
) -> Response<Body> {
    let mut response = match (peer.check_listener(&service.snapshot.config), request.uri().path()) {
        (Err(error), _) => plain(error.status(), &error.to_string()),
        (Ok(()), "/json") => {
            let response = decide(service, &mut request, peer).await;
            response.unwrap_or_else(|error| plain(StatusCode::BAD_REQUEST, &error))
        }
        (Ok(()), "/healthcheck") if service.snapshot.is_ready() => plain(StatusCode::OK, "OK"),
        (Ok(()), "/healthcheck") => plain(StatusCode::INTERNAL_SERVER_ERROR, "the gateway is not ready"),
        (Ok(()), _) => plain(StatusCode::NOT_FOUND, "this listener serves only /json and /healthcheck"),
    };
    if request.method() == Method::HEAD {
        *response.body_mut() = Body::full("");
    }
    request_body::discard_body(request, flow);
    response
}

/// Decide about the request that the body describes. An error is about the body.
async fn decide(
    service: &RateLimitService<'_>,
    request: &mut Request<RequestBody>,
    peer: &Peer,
) -> Result<Response<Body>, String> {
    let headers = request.headers().clone();
    let read = body::read_whole(request.body_mut(), service.snapshot, peer, &headers, MAX_MESSAGE).await;
    let answer = match read.map_err(|error| format!("the body cannot be read: {error}"))? {
        ReadBody::Whole(bytes) => {
            let decided = match parse(&bytes) {
                Ok(request) => {
                    let parent = TraceParent::from_headers(&headers);
                    let decided = service.decide(&request, peer, parent).await;
                    decided.map_err(|CallError { message, .. }| message.to_owned())
                }
                Err(error) => Err(error),
            };
            decided.inspect_err(|_| service.snapshot.metrics.record_call(CallResult::Invalid))?
        }
        ReadBody::TooLong => service.deny_too_long(),
        ReadBody::NoCapacity => service.deny_unread(),
    };
    let status = match answer.overall_code() {
        Code::Ok => StatusCode::OK,
        Code::OverLimit => StatusCode::TOO_MANY_REQUESTS,
        Code::Unknown => StatusCode::INTERNAL_SERVER_ERROR,
    };
    let mut response = plain(status, &to_json(&answer).to_string());
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(response)
}

fn plain(status: StatusCode, text: &str) -> Response<Body> {
    let mut response = Response::new(Body::full(Bytes::copy_from_slice(text.as_bytes())));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    response.headers_mut().insert(CACHE_CONTROL, NO_STORE);
    response
}

// === Requests: names in camel case or as in the schema, and null for a default ===

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct RequestJson {
    domain: Option<String>,
    descriptors: Option<Vec<DescriptorJson>>,
    #[serde(default, alias = "hits_addend", deserialize_with = "count")]
    hits_addend: Option<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct DescriptorJson {
    entries: Option<Vec<EntryJson>>,
    limit: Option<LimitJson>,
    #[serde(default, alias = "hits_addend", deserialize_with = "count")]
    hits_addend: Option<u64>,
    #[serde(alias = "is_negative_hits")]
    is_negative_hits: Option<bool>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EntryJson {
    key: Option<String>,
    value: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct LimitJson {
    #[serde(default, alias = "requests_per_unit", deserialize_with = "count")]
    requests_per_unit: Option<u64>,
    #[serde(default, deserialize_with = "unit")]
    unit: i32,
}

/// A number, or a string with a number.
fn count<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    let value = Option::<Json>::deserialize(deserializer)?;
    let parsed = |value: &Json| match value {
        Json::String(text) => text.parse().ok(),
        number => number.as_u64(),
    };
    match value {
        None => Ok(None),
        Some(value) => {
            parsed(&value).map(Some).ok_or_else(|| D::Error::custom("expected a number that is not negative"))
        }
    }
}

/// The name or the number of a unit.
fn unit<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i32, D::Error> {
    match Option::<Json>::deserialize(deserializer)? {
        None => Ok(Unit::Unknown.into()),
        Some(Json::String(name)) => {
            let unit = Unit::NAMES.iter().find(|(known, _)| *known == name).map(|(_, unit)| (*unit).into());
            unit.or((name == "UNKNOWN").then_some(0)).ok_or_else(|| D::Error::custom("expected a unit such as SECOND"))
        }
        Some(value) => {
            let number = value.as_i64().and_then(|number| i32::try_from(number).ok());
            number.ok_or_else(|| D::Error::custom("expected a unit such as SECOND"))
        }
    }
}

fn parse(bytes: &[u8]) -> Result<RateLimitRequest, String> {
    let request: RequestJson =
        serde_json::from_slice(bytes).map_err(|error| format!("the body is not a RateLimitRequest: {error}"))?;
    let narrow = |count: Option<u64>| u32::try_from(count.unwrap_or_default()).map_err(|_| "a number is too large");
    let descriptor = |descriptor: DescriptorJson| {
        let entry = |EntryJson { key, value }: EntryJson| Entry {
            key: key.unwrap_or_default().into(),
            value: value.unwrap_or_default().into(),
        };
        let limit = descriptor.limit.map(|LimitJson { requests_per_unit, unit }| {
            Ok::<_, &str>(RateLimitOverride { requests_per_unit: narrow(requests_per_unit)?, unit })
        });
        Ok::<_, &str>(RateLimitDescriptor {
            entries: descriptor.entries.into_iter().flatten().map(entry).collect(),
            limit: limit.transpose()?,
            hits_addend: descriptor.hits_addend,
            is_negative_hits: descriptor.is_negative_hits.unwrap_or_default(),
        })
    };
    Ok(RateLimitRequest {
        domain: request.domain.unwrap_or_default().into(),
        descriptors: request.descriptors.into_iter().flatten().map(descriptor).collect::<Result<_, _>>()?,
        hits_addend: narrow(request.hits_addend)?,
    })
}

// === Responses: fields with their default are absent ===

fn to_json(response: &RateLimitResponse) -> Json {
    let mut json = Map::new();
    json.insert("overallCode".to_owned(), code(response.overall_code()).into());
    let mut add = |key: &str, items: Vec<Json>| {
        if !items.is_empty() {
            json.insert(key.to_owned(), items.into());
        }
    };
    add("statuses", response.statuses.iter().map(status).collect());
    let headers = response.response_headers_to_add.iter();
    add("responseHeadersToAdd", headers.map(|header| json!({ "key": header.key, "value": header.value })).collect());
    if let Some(metadata) = &response.dynamic_metadata {
        json.insert("dynamicMetadata".to_owned(), metadata.to_json());
    }
    json.into()
}

fn code(code: Code) -> &'static str {
    match code {
        Code::Unknown => "UNKNOWN",
        Code::Ok => "OK",
        Code::OverLimit => "OVER_LIMIT",
    }
}

fn status(status: &DescriptorStatus) -> Json {
    let mut json = Map::new();
    json.insert("code".to_owned(), code(status.code()).into());
    if let Some(limit) = &status.current_limit {
        let mut current = Map::new();
        if !limit.name.is_empty() {
            current.insert("name".to_owned(), (&*limit.name).into());
        }
        if limit.requests_per_unit != 0 {
            current.insert("requestsPerUnit".to_owned(), limit.requests_per_unit.into());
        }
        if let Some((name, _)) = Unit::NAMES.iter().find(|(_, unit)| *unit == limit.unit()) {
            current.insert("unit".to_owned(), (*name).into());
        }
        json.insert("currentLimit".to_owned(), current.into());
    }
    if status.limit_remaining != 0 {
        json.insert("limitRemaining".to_owned(), status.limit_remaining.into());
    }
    if let Some(Duration { seconds, nanos }) = status.duration_until_reset {
        let text = if nanos == 0 { format!("{seconds}s") } else { format!("{seconds}.{nanos:09}s") };
        json.insert("durationUntilReset".to_owned(), text.into());
    }
    json.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_have_the_json_form_of_protocol_buffers() {
        let body = br#"{"domain": "d", "hitsAddend": "2", "descriptors": [
            {"entries": [{"key": "k", "value": null}, {"key": "l", "value": "v"}], "hits_addend": 0},
            {"limit": {"requestsPerUnit": 3, "unit": "MINUTE"}, "isNegativeHits": true},
            {"limit": {"requests_per_unit": "4", "unit": 7}, "hitsAddend": null}]}"#;
        let request = parse(body).unwrap();
        assert_eq!((&*request.domain, request.hits_addend), (&b"d"[..], 2));
        let [one, two, three] = &*request.descriptors else { panic!("{request:?}") };
        assert_eq!((one.entries.len(), &*one.entries[1].value, one.hits_addend), (2, &b"v"[..], Some(0)));
        let limit = two.limit.unwrap();
        assert_eq!((limit.requests_per_unit, limit.unit(), two.is_negative_hits), (3, Unit::Minute, true));
        let limit = three.limit.unwrap();
        assert_eq!((limit.requests_per_unit, limit.unit(), three.hits_addend), (4, Unit::Week, None));
    }

    #[test]
    fn faulty_bodies_are_errors() {
        for body in [
            "",
            "[]",
            "null",
            "{\"domain\": 1}",
            "{\"domian\": \"d\"}",
            "{\"hitsAddend\": -1}",
            "{\"hitsAddend\": 4294967296}",
            "{\"descriptors\": [{\"limit\": {\"unit\": \"FORTNIGHT\"}}]}",
            "{\"domain\": \"d\"} {}",
        ] {
            assert!(parse(body.as_bytes()).is_err(), "{body}");
        }
    }
}
