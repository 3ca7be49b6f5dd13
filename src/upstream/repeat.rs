//! What it takes to send a request again: its head as bytes, since hardly any request is.

use bytes::{Buf, Bytes};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri, Version};

use crate::http::upload::RequestBody;

/// A request without a body, kept for the case that its connection dies.
///
/// A copy of its header section would count one reference more to each field's bytes, and allocate a table for them: that
/// costs each request what few of them need.
pub(super) struct ReplayableRequest {
    method: Method,
    uri: Uri,
    version: Version,
    /// Of each field in order: the length of its name; twice that of its value, and one more if it is secret; name; value.
    encoded_headers: Vec<u8>,
}

/// Room for a field: of most requests all fit without it growing.
const HEADER_CAPACITY: usize = 48;

impl ReplayableRequest {
    /// What is needed of this request.
    pub(super) fn from_request(request: &Request<RequestBody>) -> Self {
        let headers = request.headers();
        let mut encoded = Vec::with_capacity(headers.len() * HEADER_CAPACITY);
        for (name, value) in headers {
            let (name, value, secret) = (name.as_str().as_bytes(), value.as_bytes(), value.is_sensitive());
            let lengths = [name.len() as u32, (value.len() as u32) << 1 | u32::from(secret)];
            encoded.extend_from_slice(lengths.map(u32::to_be_bytes).as_flattened());
            encoded.extend_from_slice(name);
            encoded.extend_from_slice(value);
        }
        let (method, uri, version) = (request.method().clone(), request.uri().clone(), request.version());
        ReplayableRequest { method, uri, version, encoded_headers: encoded }
    }

    /// The request once more.
    pub(super) fn into_request(self) -> Request<RequestBody> {
        let mut request = Request::new(RequestBody::empty());
        *request.method_mut() = self.method;
        *request.uri_mut() = self.uri;
        *request.version_mut() = self.version;
        *request.headers_mut() = decode_headers(self.encoded_headers.into());
        request
    }
}

fn decode_headers(mut encoded: Bytes) -> HeaderMap {
    let mut headers = HeaderMap::new();
    while encoded.has_remaining() {
        let (name, value) = (encoded.get_u32() as usize, encoded.get_u32() as usize);
        let secret = value % 2 == 1;
        let (name, value) = (encoded.split_to(name), encoded.split_to(value / 2));
        // Both were those of a field.
        if let (Ok(name), Ok(mut value)) = (HeaderName::from_bytes(&name), HeaderValue::from_maybe_shared(value)) {
            value.set_sensitive(secret);
            headers.append(name, value);
        }
    }
    headers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_repeated_is_the_same_request() {
        let mut secret = HeaderValue::from_static("s3cret");
        secret.set_sensitive(true);
        let mut request = Request::new(RequestBody::empty());
        (*request.method_mut(), *request.version_mut()) = (Method::OPTIONS, Version::HTTP_2);
        *request.uri_mut() = Uri::from_static("/a%20b?c=d");
        let headers = request.headers_mut();
        headers.append("accept", HeaderValue::from_static("text/html"));
        headers.append("x-empty", HeaderValue::from_static(""));
        headers.append("authorization", secret);
        headers.append("accept", HeaderValue::from_bytes(b"caf\xe9; q=0.5").unwrap());
        headers.append("x-long", HeaderValue::from_str(&"y".repeat(70_000)).unwrap());
        let retry = ReplayableRequest::from_request(&request).into_request();
        assert_eq!((retry.method(), retry.uri()), (request.method(), request.uri()));
        assert_eq!((retry.version(), retry.headers()), (request.version(), request.headers()));
        assert_eq!(
            retry.headers().iter().collect::<Vec<_>>(),
            request.headers().iter().collect::<Vec<_>>(),
            "their order"
        );
        let secrets = retry.headers().iter().filter(|(_, value)| value.is_sensitive());
        assert_eq!(secrets.map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["authorization"]);
    }
}
