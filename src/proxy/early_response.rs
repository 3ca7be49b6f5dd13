//! Responses sent before the request is read to its end: they must reach a client that is still sending.

use std::sync::Arc;
use std::time::Duration;

use http::header::{CONNECTION, EXPECT, HeaderValue};
use http::{Request, Response, Version};
use http_body::Body as _;
use http_body_util::BodyExt;
use tokio::time::timeout;

use crate::http::body::Body;
use crate::http::request_body::RequestBody;
use crate::http::write_watchdog::StreamFlow;

/// Maximum length, in bytes, of a request body that is read to its end so that the connection can be reused.
const MAX_DRAINED_BODY: u64 = 64 << 10;

/// Maximum time to read such a body.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// Return whether the response may be sent before the request is read, and then closes the connection. For HTTP/2,
/// hyper resets the stream instead (RFC 9113 §8.1).
pub(super) fn has_unread_body(request: &Request<RequestBody>) -> bool {
    request.version() != Version::HTTP_2 && !request.body().is_end_stream()
}

/// Drain or abandon the body of a request that will not be forwarded.
pub(super) fn discard_body(request: Box<Request<RequestBody>>, flow: &Arc<StreamFlow>) {
    if !has_unread_body(&request) {
        return;
    }
    let is_small = request.body().size_hint().exact().is_some_and(|length| length <= MAX_DRAINED_BODY);
    // A client that sent `Expect: 100-continue` sends no body after a final response: the next request would be read as
    // the body.
    if is_small && !request.headers().contains_key(EXPECT) {
        tokio::spawn(drain_body(request.into_body(), flow.clone()));
    } else {
        flow.abandon_request();
    }
}

/// Set `Connection: close` if the request will not be read to its end (RFC 9112 §9.6).
pub(super) fn set_connection_close(response: &mut Response<Body>, flow: &StreamFlow) {
    if flow.is_request_abandoned() {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
}

async fn drain_body(mut body: RequestBody, flow: Arc<StreamFlow>) {
    body.require_end();
    let drained = timeout(DRAIN_TIMEOUT, async { while let Some(Ok(_)) = body.frame().await {} }).await;
    if drained.is_err() {
        flow.abandon_request();
    }
}
