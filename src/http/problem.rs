//! Problem documents (RFC 9457): the bodies of the error responses that the gateway generates, including those of the
//! admin listener.

use http::header::{CACHE_CONTROL, CONTENT_TYPE as CONTENT_TYPE_HEADER, HeaderValue};
use http::{HeaderMap, Response, StatusCode};

use crate::http::body::Body;

/// Media type of a problem document.
pub(crate) const CONTENT_TYPE: &str = "application/problem+json";

/// `Cache-Control` of every rejection. A shared cache could otherwise send the rejection of one request to other
/// clients.
pub(crate) const NO_STORE: HeaderValue = HeaderValue::from_static("no-store");

/// Return whether the content of a response is a problem document.
pub(crate) fn is_problem(headers: &HeaderMap) -> bool {
    headers.get(CONTENT_TYPE_HEADER).is_some_and(|kind| kind == CONTENT_TYPE)
}

/// Return a whole HTTP/1.1 response with a problem document, for requests that do not reach hyper or that hyper cannot
/// parse. `headers` contains additional header lines, each with CRLF at its end.
pub(crate) fn raw_response(status: StatusCode, detail: &str, headers: &str) -> Vec<u8> {
    let body = Problem::new(status, detail).to_json();
    let mut response = format!(
        "HTTP/1.1 {status}\r\ncontent-type: {CONTENT_TYPE}\r\ncache-control: no-store\r\n{headers}\
         content-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    )
    .into_bytes();
    response.extend_from_slice(&body);
    response
}

/// A problem document (RFC 9457).
pub(crate) struct Problem<'a> {
    pub(crate) kind: &'static str,
    pub(crate) title: &'static str,
    pub(crate) status: StatusCode,
    pub(crate) detail: &'a str,
    pub(crate) violated_policies: Vec<&'a str>,
    pub(crate) request_id: Option<&'a str>,
}

impl<'a> Problem<'a> {
    /// Create a problem document that is fully described by its status, so its type is `about:blank` (RFC 9457 §4.2.1).
    pub(crate) fn new(status: StatusCode, detail: &'a str) -> Self {
        let title = status.canonical_reason().unwrap_or("Error");
        Problem { kind: "about:blank", title, status, detail, violated_policies: Vec::new(), request_id: None }
    }

    /// Return the document, with a newline at its end for output on terminals.
    ///
    /// This function does not use serde_json, which looks up each byte of a string in an escape table. This lookup
    /// would take about a tenth of the CPU time of a denied request.
    pub(crate) fn to_json(&self) -> Vec<u8> {
        let mut json = Vec::with_capacity(384);
        json.extend_from_slice(b"{\"type\":");
        append_plain(&mut json, self.kind);
        json.extend_from_slice(b",\"title\":");
        append_plain(&mut json, self.title);
        json.extend_from_slice(b",\"status\":");
        json.extend_from_slice(self.status.as_str().as_bytes());
        json.extend_from_slice(b",\"detail\":");
        append_text(&mut json, self.detail);
        for (index, policy) in self.violated_policies.iter().enumerate() {
            json.extend_from_slice(if index == 0 { b",\"violated-policies\":[" } else { b"," });
            append_text(&mut json, policy);
        }
        if !self.violated_policies.is_empty() {
            json.push(b']');
        }
        if let Some(id) = self.request_id {
            json.extend_from_slice(b",\"request_id\":");
            append_text(&mut json, id);
        }
        json.extend_from_slice(b"}\n");
        json
    }

    pub(crate) fn into_response(self) -> Box<Response<Body>> {
        let mut response = Box::new(Response::new(Body::full(self.to_json())));
        *response.status_mut() = self.status;
        response.headers_mut().insert(CONTENT_TYPE_HEADER, HeaderValue::from_static(CONTENT_TYPE));
        response.headers_mut().insert(CACHE_CONTROL, NO_STORE);
        response
    }
}

/// Append a JSON string. Return whether the text is ASCII.
pub(crate) fn append_text(json: &mut Vec<u8>, text: &str) -> bool {
    if is_plain(text) {
        append_plain(json, text);
        return true;
    }
    // Ignore the result, because serializing a string into memory cannot fail.
    let _ = serde_json::to_writer(json, text);
    text.is_ascii()
}

/// Return whether a text is ASCII and needs no escaping in a JSON string, as most texts.
pub(crate) fn is_plain(text: &str) -> bool {
    let bytes = text.as_bytes();
    let (words, rest) = bytes.as_chunks();
    words.iter().all(|word| is_plain_word(*word))
        && match bytes.last_chunk() {
            Some(last) => is_plain_word(*last),
            None => rest.iter().all(|byte| matches!(byte, b' '..0x80) && !matches!(byte, b'"' | b'\\')),
        }
}

/// Return whether all of eight bytes are plain. A subtraction sets the highest bit of a byte that is less than the
/// subtrahend (Warren, "Hacker's Delight", 6-1). Higher bytes may be wrong because of the borrow, but only if such a
/// byte exists.
fn is_plain_word(word: [u8; 8]) -> bool {
    const ONES: u64 = u64::MAX / 0xff;
    let word = u64::from_ne_bytes(word);
    let less = |word: u64, than: u8| word.wrapping_sub(ONES * u64::from(than)) & !word;
    let equal = |byte: u8| less(word ^ (ONES * u64::from(byte)), 1);
    (word | less(word, b' ') | equal(b'"') | equal(b'\\')) & (ONES << 7) == 0
}

/// Append a JSON string that needs no escaping.
pub(crate) fn append_plain(json: &mut Vec<u8>, text: &str) {
    json.push(b'"');
    json.extend_from_slice(text.as_bytes());
    json.push(b'"');
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_byte_that_needs_escaping_is_found_at_each_place() {
        for length in 1..=20 {
            for place in 0..length {
                for byte in 0..0x80 {
                    for other in [b' ', b'!', b'#', b'[', b']', b'~', 0x7f] {
                        let mut text = vec![other; length];
                        text[place] = byte;
                        let text = String::from_utf8(text).unwrap();
                        let needs_no_escaping = serde_json::to_string(&text).unwrap().len() == length + 2;
                        assert_eq!(is_plain(&text), needs_no_escaping, "{text:?}");
                    }
                }
                assert!(!is_plain(&format!("{}\u{e9}{}", &"a".repeat(place), "a".repeat(length - place))));
            }
        }
    }

    #[test]
    fn documents_are_json_with_the_members_that_apply() {
        let parse = |problem: &Problem<'_>| {
            let json = problem.to_json();
            assert_eq!(json.last(), Some(&b'\n'));
            serde_json::from_slice::<serde_json::Value>(&json).unwrap()
        };
        let detail = "a \"quote\", a \\, a\nline, \u{1} and \u{e9}";
        let plain = Problem::new(StatusCode::NOT_FOUND, detail);
        let expected = json!({ "type": "about:blank", "title": "Not Found", "status": 404, "detail": detail });
        assert_eq!(parse(&plain), expected);
        let full = Problem { violated_policies: vec!["a", "b\""], request_id: Some("id\\"), ..plain };
        let mut expected = expected;
        expected["violated-policies"] = json!(["a", "b\""]);
        expected["request_id"] = json!("id\\");
        assert_eq!(parse(&full), expected);
    }
}
