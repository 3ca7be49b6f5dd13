//! The host that a request is routed on, and the one that the upstream is told.

use std::borrow::Cow;
use std::net::Ipv6Addr;

use http::header::{HOST, HeaderMap, HeaderValue};
use http::uri::Scheme;
use http::{Uri, Version};

/// The host of a request, in lower case, without port and without a dot at its end; IPv6 addresses in their shortest form: of the target if it names one (RFC 9112 §3.2.2), else the
/// one Host field; empty where HTTP/1.0 sends none.
///
/// # Errors
/// Why it cannot be told.
pub fn request_host<'a>(uri: &'a Uri, headers: &'a HeaderMap, version: Version) -> Result<Cow<'a, str>, &'static str> {
    if uri.scheme().is_some_and(|scheme| *scheme != Scheme::HTTP && *scheme != Scheme::HTTPS) {
        return Err("the target is not one of http or https");
    }
    let mut fields = headers.get_all(HOST).iter();
    let field = fields.next();
    if fields.next().is_some() {
        return Err("the request has more than one Host");
    }
    let malformed = "the Host is malformed";
    let field = match field.map(|host| host.to_str().ok().and_then(strip_port)) {
        Some(None) => return Err(malformed),
        Some(host) => host,
        None => None,
    };
    let host = match (uri.authority(), field) {
        // Sent even where the target names the host (RFC 9112 §3.2).
        (_, None) if version == Version::HTTP_11 => return Err("the request has no Host"),
        (Some(authority), _) => strip_port(authority.as_str()).ok_or(malformed)?,
        (None, Some(host)) => host,
        (None, None) if version == Version::HTTP_10 => return Ok(Cow::Borrowed("")),
        (None, None) => return Err("the request has no Host"),
    };
    Ok(canonical_host(host))
}

/// The one form of a host without port.
pub fn canonical_host(host: &str) -> Cow<'_, str> {
    let inner = host.strip_prefix('[').and_then(|inner| inner.strip_suffix(']'));
    if let Some(address) = inner.and_then(|inner| inner.parse::<Ipv6Addr>().ok()) {
        return Cow::Owned(format!("[{address}]"));
    }
    // The root of all names (RFC 1034 §3.1): with and without it is the same host.
    let host = host.strip_suffix('.').unwrap_or(host);
    if host.bytes().any(|byte| byte.is_ascii_uppercase()) {
        return Cow::Owned(host.to_ascii_lowercase());
    }
    Cow::Borrowed(host)
}

/// A Host without the dot at the end of its name; none where there is no dot.
pub fn strip_trailing_dot(host: &HeaderValue) -> Option<HeaderValue> {
    let bytes = host.as_bytes();
    let end = bytes.iter().position(|byte| *byte == b':').unwrap_or(bytes.len());
    let (name, port) = bytes.split_at(end);
    HeaderValue::from_bytes(&[name.strip_suffix(b".")?, port].concat()).ok()
}

/// The host of `host`, `host:port`, `[v6]`, `[v6]:port`; none if it is something else, such as `user@host`.
fn strip_port(authority: &str) -> Option<&str> {
    let (host, port) = match authority.strip_prefix('[').and_then(|inner| inner.split_once(']')) {
        Some((v6, rest)) => {
            let is_valid = v6.parse::<Ipv6Addr>().is_ok();
            (is_valid.then(|| &authority[..v6.len() + 2])?, rest.strip_prefix(':').or(rest.is_empty().then_some(""))?)
        }
        None => {
            let (host, port) = authority.split_once(':').unwrap_or((authority, ""));
            let is_valid =
                host.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~'));
            let is_valid = is_valid && !host.starts_with('.') && !host.contains("..");
            (is_valid.then_some(host)?, port)
        }
    };
    let is_valid = !host.is_empty() && port.len() <= 5 && port.bytes().all(|byte| byte.is_ascii_digit());
    is_valid.then_some(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_host_ignores_port_and_case() {
        for (authority, expected) in [
            ("example.com", Some("example.com")),
            ("example.com:8080", Some("example.com")),
            ("[::1]:80", Some("[::1]")),
            ("[::1]", Some("[::1]")),
            ("", None),
            (":80", None),
            ("a b", None),
            ("user@host", None),
            ("host/path", None),
            ("host:port", None),
            ("[::1", None),
            ("[::1]x", None),
            ("[1.2.3.4]", None),
            ("a.test.", Some("a.test.")),
            ("a.test..", None),
            ("a..test", None),
            (".a.test", None),
            (".", None),
        ] {
            assert_eq!(strip_port(authority), expected, "{authority}");
        }
        let headers = HeaderMap::from_iter([(HOST, "EXAMPLE.com:80".parse().unwrap())]);
        let uri = Uri::from_static("/");
        assert_eq!(request_host(&uri, &headers, Version::HTTP_11), Ok("example.com".into()));
        let absolute = Uri::from_static("http://other.com/");
        assert_eq!(request_host(&absolute, &headers, Version::HTTP_11), Ok("other.com".into()));
    }

    #[test]
    fn request_host_requires_exactly_one_host_header() {
        let uri = Uri::from_static("/");
        assert!(request_host(&uri, &HeaderMap::new(), Version::HTTP_11).is_err());
        assert_eq!(request_host(&uri, &HeaderMap::new(), Version::HTTP_10), Ok("".into()));
        let mut headers = HeaderMap::from_iter([(HOST, "a".parse().unwrap())]);
        headers.append(HOST, "a".parse().unwrap());
        assert!(request_host(&uri, &headers, Version::HTTP_11).is_err());
    }
}
