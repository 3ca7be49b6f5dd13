//! What a response of an upstream must not say of its length: other servers would read it in another way than hyper.

use http::header::{CONTENT_LENGTH, HeaderMap, TRANSFER_ENCODING};
use http::{Response, StatusCode, Version};

use super::headers::has_padding;

/// What is wrong with the framing of a response, whether or not it has a body (RFC 9112 §6, RFC 9113 §8.2.1); none if it is valid.
pub fn framing_error<B>(response: &Response<B>) -> Option<&'static str> {
    let headers = response.headers();
    if response.version() == Version::HTTP_2 && has_padding(headers) {
        return Some("a header value begins or ends with a space");
    }
    let mut lengths = headers.get_all(CONTENT_LENGTH).iter();
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    let (length, coding) = (lengths.next(), codings.next());
    if lengths.next().is_some() {
        return Some("more than one Content-Length");
    }
    if length.is_some_and(|length| length.is_empty() || !length.as_bytes().iter().all(u8::is_ascii_digit)) {
        return Some("Content-Length is not a number");
    }
    let coding = coding?;
    if !coding.as_bytes().eq_ignore_ascii_case(b"chunked") || codings.next().is_some() {
        return Some("a Transfer-Encoding other than chunked");
    }
    if length.is_some() {
        return Some("both Content-Length and Transfer-Encoding");
    }
    (response.version() == Version::HTTP_10).then_some("a Transfer-Encoding in HTTP/1.0")
}

/// Whether a response that has no body says that it has one: the server may send it later, and it would be taken for the
/// response to the next request.
pub fn declares_forbidden_body(status: StatusCode, headers: &HeaderMap) -> bool {
    matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED)
        && (headers.contains_key(TRANSFER_ENCODING)
            || headers.get(CONTENT_LENGTH).is_some_and(|length| length.as_bytes().iter().any(|digit| *digit != b'0')))
}
