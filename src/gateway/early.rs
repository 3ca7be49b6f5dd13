//! Answers that do not wait for the end of the request: they must reach a client that is still sending.

use std::sync::Arc;

use http::header::{CONNECTION, EXPECT, HeaderValue};
use http::{Request, Response, Version};
use http_body::Body as _;
use http_body_util::BodyExt;
use tokio::time::{Duration, timeout};

use crate::http::body::Body;
use crate::http::flow::Flow;
use crate::http::upload::RequestBody;

/// A body of at most so many bytes is read to its end, so that the connection can go on.
const SMALL: u64 = 64 << 10;

/// How long to wait for such a body.
const PATIENCE: Duration = Duration::from_secs(5);

/// Whether the answer can come before the request is read, and end the connection. HTTP/2 resets the stream instead
/// (RFC 9113 §8.1), which it does by itself.
pub(super) fn is_possible(request: &Request<RequestBody>) -> bool {
    request.version() != Version::HTTP_2 && !request.body().is_end_stream()
}

/// Sees to the body of a request that nobody wants.
pub(super) fn leave(request: Box<Request<RequestBody>>) {
    if !is_possible(&request) {
        return;
    }
    let Some(flow) = Flow::current() else { return };
    let small = request.body().size_hint().exact().is_some_and(|length| length <= SMALL);
    // Whoever waits for 100 sends no body now: what comes next would be taken for it.
    if small && !request.headers().contains_key(EXPECT) {
        tokio::spawn(discard(request.into_body(), flow));
    } else {
        flow.cut();
    }
}

/// Tells the client of a request that will not be read to its end that the connection ends, too (RFC 9112 §9.6).
pub(super) fn say_close(response: &mut Response<Body>) {
    if Flow::current().is_some_and(|flow| flow.is_cut()) {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
}

async fn discard(mut body: RequestBody, flow: Arc<Flow>) {
    body.watch(&flow);
    let read = timeout(PATIENCE, async { while let Some(Ok(_)) = body.frame().await {} }).await;
    if read.is_err() {
        flow.cut();
    }
}
