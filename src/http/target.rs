//! The host and path of a request target in canonical form.

use std::borrow::Cow;
use std::mem;
use std::net::Ipv6Addr;

use http::header::{HOST, HeaderValue, TRANSFER_ENCODING};
use http::uri::Scheme;
use http::{HeaderMap, Request, Uri, Version, uri};

/// Return the host of a request in lower case, without port and without trailing dot. IPv6 addresses are in their
/// shortest form. The host is taken from the target if the target has one (RFC 9112 §3.2.2), otherwise from the single
/// `Host` header. The result is empty if an HTTP/1.0 request has no host.
///
/// # Errors
/// The host is missing, repeated or malformed, or the scheme of the target is not http or https. The error text becomes
/// the `detail` of the problem document.
pub fn request_host<'a>(uri: &'a Uri, headers: &'a HeaderMap, version: Version) -> Result<Cow<'a, str>, &'static str> {
    if uri.scheme().is_some_and(|scheme| *scheme != Scheme::HTTP && *scheme != Scheme::HTTPS) {
        return Err("the scheme of the request target is neither http nor https");
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
        // `Host` is required even if the target contains the host (RFC 9112 §3.2).
        (_, None) if version == Version::HTTP_11 => return Err("the request has no Host"),
        (Some(authority), _) => strip_port(authority.as_str()).ok_or(malformed)?,
        (None, Some(host)) => host,
        (None, None) if version == Version::HTTP_10 => return Ok(Cow::Borrowed("")),
        (None, None) => return Err("the request has no Host"),
    };
    Ok(canonical_host(host))
}

/// Return the canonical form of a host without port.
pub fn canonical_host(host: &str) -> Cow<'_, str> {
    let inner = host.strip_prefix('[').and_then(|inner| inner.strip_suffix(']'));
    if let Some(address) = inner.and_then(|inner| inner.parse::<Ipv6Addr>().ok()) {
        return Cow::Owned(format!("[{address}]"));
    }
    // The trailing dot is the root label (RFC 1034 §3.1), so the name is the same host with and without it.
    let host = host.strip_suffix('.').unwrap_or(host);
    if host.bytes().any(|byte| byte.is_ascii_uppercase()) {
        return Cow::Owned(host.to_ascii_lowercase());
    }
    Cow::Borrowed(host)
}

/// Return a `Host` value without the trailing dot of its name, or `None` if there is no trailing dot.
pub fn strip_trailing_dot(host: &HeaderValue) -> Option<HeaderValue> {
    let bytes = host.as_bytes();
    let end = bytes.iter().position(|byte| *byte == b':').unwrap_or(bytes.len());
    let (name, port) = bytes.split_at(end);
    HeaderValue::from_bytes(&[name.strip_suffix(b".")?, port].concat()).ok()
}

/// Return the host of `host`, `host:port`, `[v6]` or `[v6]:port`. Return `None` for any other text, such as
/// `user@host`.
pub fn strip_port(authority: &str) -> Option<&str> {
    let (host, port) = match authority.strip_prefix('[').and_then(|inner| inner.split_once(']')) {
        Some((v6, rest)) => {
            let is_valid = v6.parse::<Ipv6Addr>().is_ok();
            (is_valid.then(|| &authority[..v6.len() + 2])?, rest.strip_prefix(':').or(rest.is_empty().then_some(""))?)
        }
        None => {
            let end = authority.bytes().position(|byte| byte == b':');
            let (host, port) = end.map_or((authority, ""), |end| (&authority[..end], &authority[end + 1..]));
            let mut follows_dot = true;
            let is_valid = host.bytes().all(|byte| match byte {
                b'.' => !std::mem::replace(&mut follows_dot, true),
                b'-' | b'_' | b'~' | b'0'..=b'9' | b'A'..=b'Z' | b'a'..=b'z' => {
                    follows_dot = false;
                    true
                }
                _ => false,
            });
            (is_valid.then_some(host)?, port)
        }
    };
    let is_valid = !host.is_empty() && port.len() <= 5 && port.bytes().all(|byte| byte.is_ascii_digit());
    is_valid.then_some(host)
}

// === Path: the canonical form for routing and limits, and the forwarded form, which keeps the encoding of delimiters
// ===

/// The reasons why a path has no canonical form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum PathError {
    #[error("the path must start with `/`")]
    NotAbsolute,
    #[error("the path has a `%` that is not followed by two hex digits")]
    InvalidPercentEncoding,
    #[error("the path has a backslash, a NUL or another control character, or an encoded slash (`%2F`)")]
    ForbiddenCharacter,
    #[error("the path has a dot segment beside an encoded slash (`%2F`)")]
    EncodedDotSegment,
    #[error("the rewritten path has dot segments or incomplete percent-encoding")]
    NotCanonical,
}

/// What happens to slashes that servers may interpret differently. Routing, limits and the upstream always see the same
/// result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PathPolicy {
    /// Reject encoded slashes, and merge consecutive slashes.
    #[default]
    Canonical,
    /// Keep encoded slashes (`%2F`) as a part of their segment.
    KeepEncodedSlashes,
    /// Keep consecutive slashes, except at the start of the path.
    KeepDoubleSlashes,
    /// Keep both.
    KeepSlashes,
}

/// How the paths of requests are converted into the form that routes and limits see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PathRules {
    /// What happens to slashes.
    pub policy: PathPolicy,
    /// Whether routes and limits ignore the case of ASCII letters.
    pub ignores_case: bool,
}

impl PathPolicy {
    /// Return the policy for a path that was derived from a path with this policy.
    pub fn of_derived(path: &str) -> Self {
        if path.contains("//") || path.contains("%2F") { PathPolicy::KeepSlashes } else { PathPolicy::Canonical }
    }

    fn keeps_encoded(self) -> bool {
        matches!(self, PathPolicy::KeepEncodedSlashes | PathPolicy::KeepSlashes)
    }

    fn keeps_double(self) -> bool {
        matches!(self, PathPolicy::KeepDoubleSlashes | PathPolicy::KeepSlashes)
    }
}

/// Return a canonical path in lower case, for servers that ignore the case of ASCII letters. The digits of
/// percent-encoded bytes stay in upper case.
pub fn fold_case(path: &str) -> String {
    let mut digits = 0;
    let fold = |c: char| match c {
        '%' => {
            digits = 2;
            c
        }
        c if digits > 0 => {
            digits -= 1;
            c
        }
        c => c.to_ascii_lowercase(),
    };
    path.chars().map(fold).collect()
}

/// Return the canonical form of a path. Characters that are permitted in a path are decoded, and all others are
/// percent-encoded with uppercase digits. Dot segments are resolved (RFC 3986 §6.2.2). Consecutive slashes are merged,
/// as many servers do, unless the policy keeps them.
///
/// # Errors
/// Servers could interpret the path differently; see [`PathError`].
pub fn canonical_path(path: &str, policy: PathPolicy) -> Result<Cow<'_, str>, PathError> {
    normalize(path, is_literal, policy)
}

/// Return the path to forward: the canonical form, except that encoded delimiters such as `%3A`, `%2B` and `%3B` stay
/// encoded. Some servers treat `;` and `+` as delimiters, but not `%3B` and `%2B`.
///
/// # Errors
/// The errors of [`canonical_path`].
pub fn forwarded_path(path: &str, policy: PathPolicy) -> Result<Cow<'_, str>, PathError> {
    normalize(path, is_unreserved, policy)
}

/// Normalize a path. `should_decode` selects the characters whose percent-encoding is removed.
fn normalize(path: &str, should_decode: fn(u8) -> bool, policy: PathPolicy) -> Result<Cow<'_, str>, PathError> {
    if !path.starts_with('/') {
        return Err(PathError::NotAbsolute);
    }
    if is_canonical(path.as_bytes()) {
        return Ok(Cow::Borrowed(path));
    }
    let encoded = encode(path.as_bytes(), should_decode, policy)?;
    let mut segments: Vec<&str> = Vec::new();
    // A path that ends with `/`, `/.` or `/..` names a directory.
    let mut is_directory = false;
    for segment in encoded.split('/').skip(1) {
        is_directory = matches!(segment, "" | "." | "..");
        match segment {
            // Merge slashes at the start of the path in any case: programs read `//host` as a host.
            "" if policy.keeps_double() && !segments.is_empty() => segments.push(""),
            "" | "." => {}
            ".." => {
                segments.pop();
            }
            name => {
                // A server that decodes `%2F` would resolve the dot segment.
                let is_dot = |part: &str| matches!(part, "." | "..");
                if policy.keeps_encoded() && name.contains("%2F") && name.split("%2F").any(is_dot) {
                    return Err(PathError::EncodedDotSegment);
                }
                segments.push(name);
            }
        }
    }
    // The slash at the end of the path is written below.
    if encoded.ends_with('/') && segments.last() == Some(&"") {
        segments.pop();
    }
    let mut out = String::with_capacity(encoded.len());
    for segment in &segments {
        out.push('/');
        out.push_str(segment);
    }
    if is_directory || segments.is_empty() {
        out.push('/');
    }
    Ok(Cow::Owned(out))
}

/// Return whether the path is already canonical. This fast check returns `false` for every `.` at the start of a
/// segment, even if the path is canonical. [`normalize`] then examines the segments.
fn is_canonical(path: &[u8]) -> bool {
    let mut previous = b'.';
    path.iter().all(|&byte| {
        let start_of_segment = previous == b'/';
        previous = byte;
        match byte {
            b'/' | b'.' => !start_of_segment,
            _ => is_literal(byte),
        }
    })
}

/// Return whether a character may be unencoded in a path (RFC 3986 `pchar` and `/`).
fn is_literal(byte: u8) -> bool {
    is_unreserved(byte) || b"!$&'()*+,;=:@/".contains(&byte)
}

fn is_unreserved(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._~".contains(&byte)
}

fn encode(path: &[u8], should_decode: fn(u8) -> bool, policy: PathPolicy) -> Result<String, PathError> {
    let mut out = String::with_capacity(path.len() + 8);
    let mut bytes = path.iter();
    while let Some(&byte) = bytes.next() {
        let (byte, is_encoded) = match byte {
            b'%' => {
                let digit = |byte: Option<&u8>| byte.and_then(|&byte| (byte as char).to_digit(16));
                let (Some(high), Some(low)) = (digit(bytes.next()), digit(bytes.next())) else {
                    return Err(PathError::InvalidPercentEncoding);
                };
                ((high * 16 + low) as u8, true)
            }
            byte => (byte, false),
        };
        let is_encoded_slash = is_encoded && byte == b'/';
        if byte.is_ascii_control() || byte == b'\\' || (is_encoded_slash && !policy.keeps_encoded()) {
            return Err(PathError::ForbiddenCharacter);
        }
        if is_encoded_slash {
            out.push_str("%2F");
            continue;
        }
        if if is_encoded { should_decode(byte) } else { is_literal(byte) } {
            out.push(byte as char);
        } else {
            const HEX: &[u8; 16] = b"0123456789ABCDEF";
            out.push('%');
            out.push(HEX[usize::from(byte >> 4)] as char);
            out.push(HEX[usize::from(byte & 15)] as char);
        }
    }
    Ok(out)
}

/// Move the host from `Host` to `:authority`, as HTTP/2 requires (RFC 9113 §8.3.1).
pub fn set_http2_target<B>(request: &mut Request<B>) {
    // Remove the framing headers, because HTTP/2 frames delimit the body (RFC 9113 §8.1).
    request.headers_mut().remove(TRANSFER_ENCODING);
    let host = request.headers_mut().remove(HOST);
    let mut uri = mem::take(request.uri_mut()).into_parts();
    uri.scheme = Some(uri::Scheme::HTTP);
    // The conversion cannot fail, because both the routed host and the configured authority of the upstream are valid
    // authorities.
    uri.authority = host.and_then(|host| uri::Authority::try_from(host.as_bytes()).ok());
    *request.uri_mut() = Uri::from_parts(uri).unwrap_or_default();
    *request.version_mut() = Version::HTTP_2;
}

/// Replace the host of a request: `:authority` with HTTP/2, otherwise `Host`. `authority` must be valid, as in the URL
/// of a server.
pub fn set_host<B>(request: &mut Request<B>, authority: &str) {
    if request.version() == Version::HTTP_2 {
        let mut uri = mem::take(request.uri_mut()).into_parts();
        uri.authority = uri::Authority::try_from(authority).ok();
        *request.uri_mut() = Uri::from_parts(uri).unwrap_or_default();
    } else if let Ok(host) = HeaderValue::from_str(authority) {
        request.headers_mut().insert(HOST, host);
    }
}

/// Return the host that the client requested, with its port, and without a trailing dot.
pub fn received_host(uri: &Uri, headers: &HeaderMap) -> Option<HeaderValue> {
    let authority = uri.authority().and_then(|host| HeaderValue::from_str(host.as_str()).ok());
    let host = authority.or_else(|| headers.get(HOST).cloned())?;
    Some(strip_trailing_dot(&host).unwrap_or(host))
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

#[cfg(test)]
mod path_tests {
    use super::*;

    #[test]
    fn canonical_path_normalizes() {
        for (path, expected) in [
            ("/", "/"),
            ("/a/b", "/a/b"),
            ("/a/b/", "/a/b/"),
            ("//a///b", "/a/b"),
            ("/a/./b/../c", "/a/c"),
            ("/a/..", "/"),
            ("/a/b/..", "/a/"),
            ("/a/.", "/a/"),
            ("/../../x", "/x"),
            ("/%61dmin", "/admin"),
            ("/%2e%2E/admin", "/admin"),
            ("/a%2e%2e/b", "/a../b"),
            ("/..a/.b", "/..a/.b"),
            ("/a%3fb%23c%25d", "/a%3Fb%23c%25d"),
            ("/a:b@c;d=e", "/a:b@c;d=e"),
            ("/a%3Ab", "/a:b"),
            ("/%21%24%26%27%28%29%2a%2B%2C%3b%3D%3A%40", "/!$&'()*+,;=:@"),
            ("/%3B/%2e%2e/%2525%20", "/%2525%20"),
            ("/caf\u{e9}", "/caf%C3%A9"),
            ("/{x}|\"", "/%7Bx%7D%7C%22"),
        ] {
            let once = canonical_path(path, PathPolicy::Canonical).unwrap();
            assert_eq!(once, expected, "{path}");
            assert_eq!(
                canonical_path(&once, PathPolicy::Canonical).unwrap(),
                once,
                "{path}: a second call must change nothing"
            );
        }
    }

    #[test]
    fn forwarded_path_keeps_encoded_delimiters() {
        for (path, expected) in [
            ("/a%3ab", "/a%3Ab"),
            ("/a:b", "/a:b"),
            ("//%61;%3b/x/%2E%2e/%2b+", "/a;%3B/%2B+"),
            ("/%21%24%26%27%28%29%2a%2B%2C%3b%3D%3A%40", "/%21%24%26%27%28%29%2A%2B%2C%3B%3D%3A%40"),
        ] {
            let once = forwarded_path(path, PathPolicy::Canonical).unwrap();
            assert_eq!(once, expected, "{path}");
            assert_eq!(
                forwarded_path(&once, PathPolicy::Canonical).unwrap(),
                once,
                "{path}: a second call must change nothing"
            );
            assert_eq!(
                canonical_path(&once, PathPolicy::Canonical).unwrap(),
                canonical_path(path, PathPolicy::Canonical).unwrap(),
                "{path}: canonical form changed"
            );
        }
    }

    #[test]
    fn policies_keep_only_their_slashes() {
        use PathPolicy::{Canonical, KeepDoubleSlashes, KeepEncodedSlashes, KeepSlashes};
        let rejected = None;
        for (path, canonical, encoded, double, both) in [
            ("/a%2fb", rejected, Some("/a%2Fb"), rejected, Some("/a%2Fb")),
            ("/a//b", Some("/a/b"), Some("/a/b"), Some("/a//b"), Some("/a//b")),
            ("//a//", Some("/a/"), Some("/a/"), Some("/a//"), Some("/a//")),
            ("///", Some("/"), Some("/"), Some("/"), Some("/")),
            ("/a//../b", Some("/b"), Some("/b"), Some("/a/b"), Some("/a/b")),
            ("/a//.", Some("/a/"), Some("/a/"), Some("/a//"), Some("/a//")),
            ("/a/..//b", Some("/b"), Some("/b"), Some("/b"), Some("/b")),
            ("/a%2F..%2Fb", rejected, rejected, rejected, rejected),
            ("/%2e%2e%2fb", rejected, rejected, rejected, rejected),
            ("/a%2f.", rejected, rejected, rejected, rejected),
            ("/a%2F../b", rejected, rejected, rejected, rejected),
            ("/a%252Fb", Some("/a%252Fb"), Some("/a%252Fb"), Some("/a%252Fb"), Some("/a%252Fb")),
            ("/a%5Cb", rejected, rejected, rejected, rejected),
            ("/a%00", rejected, rejected, rejected, rejected),
        ] {
            let policies = [Canonical, KeepEncodedSlashes, KeepDoubleSlashes, KeepSlashes];
            for (policy, expected) in policies.into_iter().zip([canonical, encoded, double, both]) {
                for normalize in [canonical_path, forwarded_path] {
                    let once = normalize(path, policy).ok();
                    assert_eq!(once.as_deref(), expected, "{path} {policy:?}");
                    if let Some(once) = once {
                        assert_eq!(normalize(&once, policy).unwrap(), once, "{path} {policy:?}: a second call");
                    }
                }
            }
        }
    }

    #[test]
    fn case_is_folded_outside_of_percent_encodings() {
        for (path, expected) in [("/Ab", "/ab"), ("/%C3%89A", "/%C3%89a"), ("/a%2FB", "/a%2Fb"), ("/%2525A", "/%2525a")]
        {
            assert_eq!(fold_case(path), expected);
        }
    }

    #[test]
    fn canonical_path_rejects_ambiguous_paths() {
        for path in ["", "a", "*", "/%00", "/a%2Fb", "/a%2fb", "/a%5Cb", "/a\\b", "/%0a", "/%7f", "/a%", "/a%2", "/%zz"]
        {
            assert!(canonical_path(path, PathPolicy::Canonical).is_err(), "{path:?} must be rejected");
        }
    }
}
