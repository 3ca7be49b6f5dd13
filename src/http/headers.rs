//! Header rules: hop-by-hop headers, forwarding headers, cookies, and the header changes of routes with
//! their variables.

use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::OnceLock;
use std::time::Duration;

use http::header::{
    CONNECTION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, DATE, EXPECT, Entry, FORWARDED, HOST, HeaderName,
    HeaderValue, REFERRER_POLICY, STRICT_TRANSPORT_SECURITY, TE, TRAILER, TRANSFER_ENCODING, UPGRADE, VARY, VIA,
    X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
};
use http::{HeaderMap, Method, Version};
use jiff::Timestamp;
use jiff::fmt::rfc2822::DateTimePrinter;

/// Headers that concern only one connection (RFC 9110 §7.6.1), including `Keep-Alive` and `Proxy-Connection`, which old
/// clients send.
pub(super) static HOP_BY_HOP: [HeaderName; 7] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// Name of the header with the addresses of the client and the proxies.
pub const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
/// Name of the header with the scheme that the client used.
pub const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
/// Name of the header with the host that the client requested.
pub const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
/// Name of the request id header.
pub const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Values of the forwarding headers, which are the same for all requests of a connection.
#[derive(Debug, Clone)]
pub struct ForwardedInfo {
    /// IP address of the peer.
    address: IpAddr,
    /// The address as a header value, from the first request that is forwarded.
    address_value: OnceLock<HeaderValue>,
    /// `http` or `https`.
    pub scheme: HeaderValue,
    /// Whether forwarding headers from the peer are trusted.
    pub trusted: bool,
    /// Whether trusted proxies report the client in `Forwarded` (RFC 7239), as `client_ip.header` says.
    pub reads_forwarded: bool,
}

impl ForwardedInfo {
    /// Create the values for a peer.
    pub fn new(address: IpAddr, scheme: &'static str, trusted: bool) -> Self {
        let scheme = HeaderValue::from_static(scheme);
        ForwardedInfo { address, address_value: OnceLock::new(), scheme, trusted, reads_forwarded: false }
    }

    /// Return the address of the peer as a header value.
    fn address_value(&self) -> &HeaderValue {
        self.address_value.get_or_init(|| {
            let mut text = bytes::BytesMut::with_capacity(45);
            // Neither step can fail: writing to memory always succeeds, and an IP address is a valid header value.
            let _ = std::fmt::Write::write_fmt(&mut text, format_args!("{}", self.address));
            HeaderValue::from_maybe_shared(text.freeze()).unwrap_or(HeaderValue::from_static("unknown"))
        })
    }
}

/// Headers that the gateway reads or sets. A client must not remove these headers through `Connection`, and must not
/// send them under an alias.
#[derive(Debug, Default)]
pub struct ProtectedHeaders {
    /// Headers that only trusted proxies may set, followed by all other protected headers.
    names: Vec<HeaderName>,
    /// Number of headers that only trusted proxies may set.
    proxy_only_count: usize,
    aliases: HeaderAliases,
}

impl ProtectedHeaders {
    /// Create the set. `proxy_only` are headers that only trusted proxies may set. `from_anyone` are headers that the
    /// gateway reads from any client.
    pub fn new(mut proxy_only: Vec<HeaderName>, from_anyone: impl IntoIterator<Item = HeaderName>) -> Self {
        let proxy_only_count = proxy_only.len();
        for name in from_anyone {
            if !proxy_only.contains(&name) {
                proxy_only.push(name);
            }
        }
        ProtectedHeaders { aliases: HeaderAliases::from_names(&proxy_only), names: proxy_only, proxy_only_count }
    }

    fn is_proxy_only(&self, name: &HeaderName) -> bool {
        self.names[..self.proxy_only_count].contains(name)
    }

    /// Return whether `folded` is the folded name (see [`fold_name`]) of a header that only trusted proxies may set.
    fn has_proxy_only_alias(&self, folded: &str) -> bool {
        self.aliases.folded[..self.proxy_only_count].iter().any(|name| **name == *folded)
    }
}

/// Aliases of certain headers: names that some servers do not distinguish from these headers. Such servers convert
/// header names to CGI variables (RFC 3875 §4.1.18): `X-User-Id`, `X_User_Id`, `X.User.Id` and `X!User!Id` all become
/// `HTTP_X_USER_ID`.
#[derive(Debug, Default)]
pub struct HeaderAliases {
    folded: Vec<Box<str>>,
    /// Whether one of the given names has characters other than letters, digits and hyphens. Only then can a name
    /// without such characters be an alias.
    has_special: bool,
}

impl HeaderAliases {
    /// Create the set of all aliases of these names.
    pub fn from_names<'a>(names: impl IntoIterator<Item = &'a HeaderName>) -> Self {
        let mut aliases = HeaderAliases::default();
        for name in names {
            aliases.has_special |= has_special_characters(name.as_str());
            aliases.folded.push(fold_name(name.as_str()).into());
        }
        aliases
    }

    /// Return whether the set contains no header names.
    pub fn is_empty(&self) -> bool {
        self.folded.is_empty()
    }

    /// Return whether a header is an alias of one of these names.
    pub fn contains(&self, name: &HeaderName) -> bool {
        let name = name.as_str();
        match has_special_characters(name) {
            true => self.has_folded(&fold_name(name)),
            // A name with only letters, digits and hyphens can be an alias only of a name with other characters. Most
            // configurations have no name with other characters.
            false => self.has_special && self.has_folded(name),
        }
    }

    /// Return whether a name equals the folded name (see [`fold_name`]) of one of the given names.
    fn has_folded(&self, name: &str) -> bool {
        self.folded.iter().any(|folded| **folded == *name)
    }
}

/// Return whether a name has characters other than letters, digits and hyphens. Some servers replace these characters.
fn has_special_characters(name: &str) -> bool {
    name.bytes().any(|byte| !byte.is_ascii_alphanumeric() && byte != b'-')
}

/// Replace all characters of a name other than letters and digits with hyphens. lighttpd replaces the same characters.
pub(super) fn fold_name(name: &str) -> String {
    name.chars().map(|byte| if byte.is_ascii_alphanumeric() { byte } else { '-' }).collect()
}

/// Return whether a list in these headers has a member, without regard to its case.
pub fn has_list_member(headers: &HeaderMap, name: &HeaderName, member: &str) -> bool {
    let mut members = headers.get_all(name).iter().flat_map(|line| line.as_bytes().split(|byte| *byte == b','));
    members.any(|found| found.trim_ascii().eq_ignore_ascii_case(member.as_bytes()))
}

/// Append a header name to `Vary`, unless `Vary` already contains it or `*`.
pub fn add_vary(headers: &mut HeaderMap, name: &'static str) {
    if !has_list_member(headers, &VARY, "*") && !has_list_member(headers, &VARY, name) {
        headers.append(VARY, HeaderValue::from_static(name));
    }
}

/// Return whether the content has a coding, so that its bytes cannot be read as they are.
pub fn has_content_coding(headers: &HeaderMap) -> bool {
    let is_coded = |coding: &HeaderValue| !coding.as_bytes().eq_ignore_ascii_case(b"identity");
    headers.get_all(CONTENT_ENCODING).iter().any(is_coded)
}

/// Return whether the sender closes the connection after this message (RFC 9112 §9.6).
pub fn closes_connection(headers: &HeaderMap) -> bool {
    has_list_member(headers, &CONNECTION, "close")
}

/// Remove hop-by-hop headers and the headers that `Connection` names. `TE: trailers` is kept (RFC 9110 §10.1.4).
///
/// `Connection` cannot remove the headers in `protected` or the gateway's own headers. Some proxies forward the
/// `Connection` header of a client, although they must not. If this header could remove `X-Forwarded-For`, for example,
/// the upstream would mistake the address of the gateway for that of the client.
pub fn strip_hop_by_hop(headers: &mut HeaderMap, protected: &ProtectedHeaders) {
    // Iterate once over the headers of the request: this costs less than a lookup of each hop-by-hop header, because
    // requests have few headers.
    let mut found = [false; HOP_BY_HOP.len()];
    for name in headers.keys() {
        if let Some(index) = hop_by_hop_index(name) {
            found[index] = true;
        }
    }
    if !found.contains(&true) {
        return;
    }
    let [connection, .., te, _, transfer_encoding, _] = found;
    if connection {
        let nominated: Vec<HeaderName> = headers
            .get_all(CONNECTION)
            .iter()
            .filter_map(|value| value.to_str().ok())
            .flat_map(|value| value.split(',').map(str::trim))
            // Skip the usual name `keep-alive`, because the header `Keep-Alive` is removed anyway.
            .filter(|name| !name.eq_ignore_ascii_case("keep-alive"))
            .filter_map(|name| name.parse().ok())
            .filter(|name: &HeaderName| {
                *name != TE && !is_gateway_header(name.as_str()) && !protected.names.contains(name)
            })
            .collect();
        for name in nominated {
            headers.remove(name);
        }
    }
    // Remove `Content-Length` if `Transfer-Encoding` is present, which takes precedence (RFC 9112 §6.3).
    if transfer_encoding {
        headers.remove(CONTENT_LENGTH);
    }
    let wants_trailers = te
        && headers.get(TE).is_some_and(|te| {
            te.to_str().is_ok_and(|te| te.split(',').any(|coding| coding.trim().eq_ignore_ascii_case("trailers")))
        });
    for (name, _) in HOP_BY_HOP.iter().zip(found).filter(|(_, found)| *found) {
        headers.remove(name);
    }
    if wants_trailers {
        headers.insert(TE, HeaderValue::from_static("trailers"));
    }
}

/// Fields that a recipient must not take from trailers (RFC 9110 §6.5.1): they concern the connection, framing, routing,
/// authentication, the content, or the processing of a request. `x-forwarded-…` and similar headers, which
/// [`is_gateway_header`] recognizes, belong to this list as well.
const NOT_IN_TRAILERS: [&str; 31] = [
    "accept-encoding",
    "age",
    "authorization",
    "cache-control",
    "connection",
    "content-encoding",
    "content-length",
    "content-range",
    "content-type",
    "cookie",
    "expect",
    "host",
    "if-match",
    "if-modified-since",
    "if-none-match",
    "if-range",
    "if-unmodified-since",
    "keep-alive",
    "max-forwards",
    "pragma",
    "proxy-authorization",
    "proxy-connection",
    "range",
    "te",
    "traceparent",
    "tracestate",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "via",
    "x-sluicegate-mirror",
];

/// The trailers of requests that are not forwarded, because upstreams may treat them like headers.
#[derive(Debug, Default)]
pub struct TrailerFilter(HeaderAliases);

impl TrailerFilter {
    /// Create a filter for the headers that the gateway reads (`protected`) and the headers that routes set or remove.
    pub fn new<'a>(protected: &'a ProtectedHeaders, of_routes: impl IntoIterator<Item = &'a HeaderName>) -> Self {
        TrailerFilter(HeaderAliases::from_names(protected.names.iter().chain(of_routes)))
    }

    /// Remove the trailers that are not forwarded, and all their aliases.
    pub(super) fn apply(&self, trailers: &mut HeaderMap) {
        let is_unwanted = |name: &&HeaderName| {
            let folded = fold_name(name.as_str());
            is_gateway_header(&folded) || NOT_IN_TRAILERS.contains(&&*folded) || self.0.has_folded(&folded)
        };
        let names: Vec<_> = trailers.keys().filter(is_unwanted).cloned().collect();
        for name in names {
            trailers.remove(name);
        }
    }
}

/// Return the index of a header in [`HOP_BY_HOP`]. The match compares lengths first, so most names need only one
/// comparison.
fn hop_by_hop_index(name: &HeaderName) -> Option<usize> {
    match name.as_str() {
        "connection" => Some(0),
        "keep-alive" => Some(1),
        "proxy-connection" => Some(2),
        "te" => Some(3),
        "trailer" => Some(4),
        "transfer-encoding" => Some(5),
        "upgrade" => Some(6),
        _ => None,
    }
}

/// Set at most one framing header: `Content-Length` if the length of the body is known, else `Transfer-Encoding:
/// chunked` (RFC 9112 §6.3). Received framing headers are not forwarded, because an HTTP/2 request may have several
/// equal `Content-Length` headers, or none. Without a framing header, hyper would not send the body of a GET.
pub fn set_framing(headers: &mut HeaderMap, length: Option<u64>) {
    let had_length = headers.remove(CONTENT_LENGTH).is_some();
    match length {
        Some(0) if !had_length => {}
        Some(length) => drop(headers.insert(CONTENT_LENGTH, HeaderValue::from(length))),
        None => drop(headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"))),
    }
}

/// Normalize the headers of a received request before routing and limits read them, so that routing, limits and the
/// upstream use the same headers. See [`strip_untrusted`] and [`join_cookies`].
pub fn normalize_received(headers: &mut HeaderMap, protected: &ProtectedHeaders, trusted: bool) {
    strip_untrusted(headers, protected, trusted);
    join_cookies(headers);
}

/// Remove headers that a client must not send. From untrusted peers, remove headers that only trusted proxies may set:
/// those in `protected` and the forwarding headers. From all peers, remove aliases of protected headers and of the
/// gateway's own headers; see [`HeaderAliases`].
pub fn strip_untrusted(headers: &mut HeaderMap, protected: &ProtectedHeaders, trusted: bool) {
    let is_unwanted = |name: &&HeaderName| {
        if protected.is_proxy_only(name) || is_forwarding_header(name.as_str()) {
            return !trusted;
        }
        let folded = match has_special_characters(name.as_str()) {
            true => Cow::Owned(fold_name(name.as_str())),
            false if protected.aliases.has_special => Cow::Borrowed(name.as_str()),
            false => return false,
        };
        // Remove an alias of a header that identifies the client, even if the alias itself is a header that the gateway
        // reads.
        let is_identity =
            protected.has_proxy_only_alias(&folded) || (*folded != *name.as_str() && is_gateway_header(&folded));
        is_identity || protected.aliases.has_folded(&folded) && !protected.names.contains(name)
    };
    let names: Vec<_> = headers.keys().filter(is_unwanted).cloned().collect();
    for name in names {
        headers.remove(name);
    }
}

/// Remove the aliases of `name` (see [`HeaderAliases`]), which must have only letters, digits and hyphens. Also remove
/// `name` itself, unless the peer is `trusted`.
pub fn strip_with_aliases(headers: &mut HeaderMap, name: &HeaderName, trusted: bool) {
    let is_alias =
        |other: &&HeaderName| has_special_characters(other.as_str()) && fold_name(other.as_str()) == name.as_str();
    let aliases: Vec<_> = headers.keys().filter(is_alias).cloned().collect();
    for alias in aliases {
        headers.remove(alias);
    }
    if !trusted {
        headers.remove(name);
    }
}

/// Return whether a header describes the client, the proxies or the id of a request.
fn is_forwarding_header(name: &str) -> bool {
    // Compare the first letter first, which rules out most names.
    match name.as_bytes()[0] {
        b'x' => name.starts_with("x-forwarded-") || matches!(name, "x-real-ip" | "x-request-id"),
        b'f' => name == "forwarded",
        // Headers in which a proxy forwards the certificate of a client (RFC 9440 §2).
        b'c' => matches!(name, "client-cert" | "client-cert-chain"),
        _ => false,
    }
}

fn is_gateway_header(name: &str) -> bool {
    is_forwarding_header(name) || matches!(name, "host" | "content-length" | "transfer-encoding")
}

/// Set the forwarding headers and `Via`. Values from trusted proxies are kept or extended. The values from other peers
/// were removed by [`strip_untrusted`].
pub fn set_forwarded(headers: &mut HeaderMap, forwarded: &ForwardedInfo, host: Option<&HeaderValue>, version: Version) {
    if headers.contains_key(FORWARDED) {
        let mut element = b"for=".to_vec();
        // RFC 7239 §6: an IPv6 address is enclosed in brackets and quotes.
        let address = forwarded.address_value().as_bytes();
        let ipv6 = address.contains(&b':');
        element.extend_from_slice(if ipv6 { b"\"[" } else { b"" });
        element.extend_from_slice(address);
        element.extend_from_slice(if ipv6 { b"]\"" } else { b"" });
        // The conversion cannot fail, because brackets, quotes and an IP address are a valid header value.
        if let Ok(element) = HeaderValue::from_bytes(&element) {
            append_element(headers, FORWARDED, element);
        }
    }
    append_element(headers, X_FORWARDED_FOR, forwarded.address_value().clone());
    let reported = forwarded.reads_forwarded.then(|| HeaderValue::from_static(client_scheme(headers, forwarded)));
    headers.entry(X_FORWARDED_PROTO).or_insert_with(|| reported.unwrap_or_else(|| forwarded.scheme.clone()));
    if let Some(host) = host {
        headers.entry(X_FORWARDED_HOST).or_insert_with(|| host.clone());
    }
    let via = match version {
        Version::HTTP_2 => HeaderValue::from_static("2.0 sluicegate"),
        Version::HTTP_10 => HeaderValue::from_static("1.0 sluicegate"),
        _ => HeaderValue::from_static("1.1 sluicegate"),
    };
    append_element(headers, VIA, via);
}

/// Return the scheme of the client: the scheme of its connection, or the scheme that a trusted proxy reports in
/// `X-Forwarded-Proto`, or in the parameter `proto` of `Forwarded` (RFC 7239 §5.4). In a list, the last element counts:
/// the trusted proxy has appended it, while a client may have sent the others.
pub fn client_scheme(headers: &HeaderMap, forwarded: &ForwardedInfo) -> &'static str {
    let last = |name: HeaderName| {
        let line = headers.get_all(name).iter().next_back().filter(|_| forwarded.trusted)?;
        line.as_bytes().rsplit(|byte| *byte == b',').next().map(<[u8]>::trim_ascii)
    };
    let reported = match forwarded.reads_forwarded {
        true => last(FORWARDED).and_then(forwarded_proto),
        false => None,
    };
    let reported = reported.or_else(|| last(X_FORWARDED_PROTO)).unwrap_or(forwarded.scheme.as_bytes());
    if reported.eq_ignore_ascii_case(b"https") {
        "https"
    } else if reported.eq_ignore_ascii_case(b"http") {
        "http"
    } else if forwarded.scheme == "https" {
        // If the reported value is neither `http` nor `https`, use the scheme of the connection.
        "https"
    } else {
        "http"
    }
}

/// Return the parameter `proto` of an element of `Forwarded`.
fn forwarded_proto(element: &[u8]) -> Option<&[u8]> {
    element.split(|byte| *byte == b';').find_map(|pair| {
        let (name, value) = pair.split_at_checked(pair.iter().position(|byte| *byte == b'=')?)?;
        let value = value[1..].trim_ascii();
        let value = value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\"")).unwrap_or(value);
        name.trim_ascii().eq_ignore_ascii_case(b"proto").then_some(value)
    })
}

/// Append an element to a list header. If the header occurs more than once, its values are joined into one.
fn append_element(headers: &mut HeaderMap, name: HeaderName, element: HeaderValue) {
    match headers.entry(name) {
        Entry::Vacant(entry) => drop(entry.insert(element)),
        Entry::Occupied(mut entry) => {
            let lines = entry.iter().chain([&element]).map(HeaderValue::as_bytes);
            let joined = HeaderValue::from_bytes(&lines.collect::<Vec<_>>().join(&b", "[..]));
            // The fallback to `element` alone never occurs: the conversion cannot fail, because the joined parts are
            // valid header values.
            entry.insert(joined.unwrap_or(element));
        }
    }
}

/// Return the value of the first cookie with this name.
pub fn cookie<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h [u8]> {
    let lines = headers.get_all(http::header::COOKIE).into_iter();
    let mut pairs = lines.flat_map(|line| line.as_bytes().split(|byte| *byte == b';'));
    pairs.find_map(|pair| pair.trim_ascii().strip_prefix(name.as_bytes())?.strip_prefix(b"="))
}

/// Join several `Cookie` headers into one. HTTP/2 permits several `Cookie` headers, but HTTP/1.1 does not (RFC 9113
/// §8.2.3). Servers treat several `Cookie` headers in HTTP/1.1 differently: they join them with semicolons or commas,
/// or use only one of them. The gateway therefore also joins the `Cookie` headers of HTTP/1.1 clients.
pub fn join_cookies(headers: &mut HeaderMap) {
    let name = http::header::COOKIE;
    if headers.len() == headers.keys_len() {
        // No header occurs more than once, so there is at most one `Cookie` header.
        return;
    }
    if headers.get_all(&name).iter().nth(1).is_some() {
        let joined = headers.get_all(&name).iter().map(HeaderValue::as_bytes).filter(|line| !line.is_empty());
        let joined = joined.collect::<Vec<_>>().join(&b"; "[..]);
        if let Ok(value) = HeaderValue::from_bytes(&joined) {
            headers.insert(name, value);
        }
    }
}

/// Return the number of headers that a request would have in HTTP/1.1. The `Cookie` headers of HTTP/2 count as one (RFC
/// 9113 §8.2.3).
pub fn http1_header_count(headers: &HeaderMap) -> usize {
    let cookies = headers.get_all(http::header::COOKIE).iter().count();
    headers.len() - cookies.saturating_sub(1)
}

/// Return whether a value begins or ends with a space or a tab. HTTP/2 forbids such whitespace (RFC 9113 §8.2.1), and
/// HTTP/1.1 parsers remove it. If the gateway forwarded the value, routing and limits could use another value than the
/// upstream.
pub fn has_padding(headers: &HeaderMap) -> bool {
    let is_padding = |byte: Option<&u8>| matches!(byte, Some(b' ' | b'\t'));
    headers.values().map(HeaderValue::as_bytes).any(|value| is_padding(value.first()) || is_padding(value.last()))
}

/// Return whether a request is a gRPC call: POST over HTTP/2 with a gRPC content type. Only gRPC calls get gRPC errors,
/// which have the HTTP status 200. All other requests get HTTP errors, because caches decide by the status whether they
/// may store a response.
pub fn is_grpc_call(method: &Method, version: Version, headers: &HeaderMap) -> bool {
    *method == Method::POST && version == Version::HTTP_2 && is_grpc(headers)
}

/// Return whether the content type of a message is gRPC.
pub fn is_grpc(headers: &HeaderMap) -> bool {
    let subtype = headers.get(CONTENT_TYPE).and_then(|kind| kind.as_bytes().strip_prefix(b"application/grpc"));
    // Exclude `application/grpc-web`, which is a different protocol.
    subtype.is_some_and(|rest| matches!(rest.first(), None | Some(b'+' | b';')))
}

/// Return the time that a gRPC client waits for the response, from the header `grpc-timeout`: up to 8 digits and a unit.
pub fn grpc_timeout(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let is_count = (1..=8).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_digit());
    let count: u64 = digits.parse().ok().filter(|_| is_count)?;
    Some(match unit {
        "H" => Duration::from_secs(count * 3600),
        "M" => Duration::from_secs(count * 60),
        "S" => Duration::from_secs(count),
        "m" => Duration::from_millis(count),
        "u" => Duration::from_micros(count),
        "n" => Duration::from_nanos(count),
        _ => return None,
    })
}

/// Return whether a request with this method and no body may be sent again, because the method is safe (RFC 9110
/// §9.2.1).
pub fn is_safe(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS)
}

// === Header changes of routes ===

/// The kind of messages to which header changes apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Requests that are sent to the upstream.
    Request,
    /// Responses that are sent to the client.
    Response,
}

/// Header changes of a route: headers to remove, and headers to set. A set value replaces all existing values of the
/// header.
#[derive(Debug, Default)]
pub struct HeaderMutations {
    /// Headers to set, with their values.
    pub set: Vec<(HeaderName, HeaderValue)>,
    /// Headers to set, with values that depend on the request.
    pub templates: Vec<(HeaderName, ValueTemplate)>,
    /// Names of the headers to remove.
    pub remove: Vec<HeaderName>,
    /// Aliases of the headers to set and to remove. The aliases themselves are also removed. Empty for changes to
    /// responses.
    pub aliases: HeaderAliases,
    /// Headers to set if a message does not have them.
    pub defaults: Vec<(HeaderName, HeaderValue)>,
    /// Whether the changes apply to responses with which the gateway rejects a request.
    pub on_errors: bool,
}

/// The values of [`HeaderMutations::templates`] for one request, in the order of the templates. A value is `None` if
/// its header must be removed.
#[derive(Debug, Default)]
pub struct RenderedValues(Vec<Option<HeaderValue>>);

impl RenderedValues {
    fn get(&self, index: usize) -> Option<&HeaderValue> {
        self.0.get(index)?.as_ref()
    }
}

/// The headers of `security_headers`, apart from `Strict-Transport-Security`, which depends on the scheme.
const SECURITY_HEADERS: [(HeaderName, HeaderValue); 3] = [
    (X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
    (X_FRAME_OPTIONS, HeaderValue::from_static("SAMEORIGIN")),
    (REFERRER_POLICY, HeaderValue::from_static("strict-origin-when-cross-origin")),
];

/// Set `Strict-Transport-Security` if the response does not have it.
pub fn set_hsts(headers: &mut HeaderMap) {
    headers.entry(STRICT_TRANSPORT_SECURITY).or_insert(HeaderValue::from_static("max-age=31536000"));
}

/// Set `Date` if the response does not have it.
pub fn set_date(headers: &mut HeaderMap, now_us: u64) {
    let date = format_date(now_us).and_then(|date| HeaderValue::try_from(date).ok());
    if let Some(date) = date {
        headers.entry(DATE).or_insert(date);
    }
}

/// Return a time in the format of `Date` (RFC 9110 §5.6.7). `None` if the year has more than four digits.
pub fn format_date(unix_us: u64) -> Option<String> {
    let time = Timestamp::from_microsecond(unix_us as i64).ok()?;
    DateTimePrinter::new().timestamp_to_rfc9110_string(&time).ok()
}

impl HeaderMutations {
    /// Return the names of all headers that the changes set or remove.
    pub fn names(&self) -> impl Iterator<Item = &HeaderName> {
        let set = self.set.iter().map(|(name, _)| name).chain(self.templates.iter().map(|(name, _)| name));
        set.chain(&self.remove)
    }

    /// Return whether at least one value depends on the request.
    pub fn has_variables(&self) -> bool {
        !self.templates.is_empty()
    }

    /// Return the values that depend on the request. `content` returns the content of a variable. If no value has
    /// variables, the function allocates no memory.
    pub fn render<'c>(&self, content: impl Fn(Variable) -> Option<Cow<'c, [u8]>>) -> RenderedValues {
        RenderedValues(self.templates.iter().map(|(_, template)| template.render(&content)).collect())
    }

    /// Render values as [`HeaderMutations::render`] does, but replace each literal part with `…`, because literal parts
    /// may be secret.
    pub fn render_without_literals<'c>(&self, content: impl Fn(Variable) -> Option<Cow<'c, [u8]>>) -> RenderedValues {
        let render = |template: &ValueTemplate| template.with_literals_replaced("…").render(&content);
        RenderedValues(self.templates.iter().map(|(_, template)| render(template)).collect())
    }

    /// Apply the changes to the headers of a message: remove headers, then set headers.
    pub fn apply(&self, headers: &mut HeaderMap, values: &RenderedValues) {
        for name in &self.remove {
            headers.remove(name);
        }
        if !self.aliases.is_empty() {
            let aliases: Vec<_> = headers.keys().filter(|name| self.aliases.contains(name)).cloned().collect();
            for name in aliases {
                headers.remove(name);
            }
        }
        for (name, value) in &self.set {
            headers.insert(name.clone(), value.clone());
        }
        for (index, (name, _)) in self.templates.iter().enumerate() {
            match values.get(index) {
                Some(value) => drop(headers.insert(name.clone(), value.clone())),
                // A variable has no content for this request. Remove the header, so that the value from the client does
                // not reach the upstream.
                None => drop(headers.remove(name)),
            }
        }
        self.apply_defaults(headers);
    }

    /// Add the headers that protect browsers as defaults, except those that the changes set or remove.
    pub fn with_security_headers(mut self) -> Self {
        let added = SECURITY_HEADERS.into_iter().filter(|(name, _)| self.names().all(|other| other != name)).collect();
        self.defaults = added;
        self
    }

    fn apply_defaults(&self, headers: &mut HeaderMap) {
        for (name, value) in &self.defaults {
            headers.entry(name).or_insert_with(|| value.clone());
        }
    }

    /// Set the headers on a response with which the gateway rejects a request. Headers that the response already has,
    /// such as `Cache-Control` and `Retry-After`, do not change: a rule must not make the rejection cacheable or change
    /// the time of the next retry.
    pub fn apply_to_rejection(&self, headers: &mut HeaderMap, values: &RenderedValues) {
        self.apply_defaults(headers);
        if !self.on_errors {
            return;
        }
        let rendered = self.templates.iter().enumerate().map(|(index, (name, _))| (name, values.get(index)));
        let set = self.set.iter().map(|(name, value)| (name, Some(value))).chain(rendered);
        for (name, value) in set {
            if let Some(value) = value.filter(|_| !headers.contains_key(name)) {
                headers.insert(name.clone(), value.clone());
            }
        }
    }
}

/// Return the reason why header rules must not change a header, or `None` if they may change it.
pub fn reserved_reason(name: &HeaderName, direction: Direction) -> Option<&'static str> {
    // Treat an alias like the header itself, because servers that convert header names to variables do not distinguish
    // them.
    let folded = fold_name(name.as_str());
    let is_one_of = |names: &[HeaderName]| names.iter().any(|other| other.as_str() == folded);
    if is_one_of(&HOP_BY_HOP) {
        return Some(
            "the header applies to a single connection, and the gateway has its own connections to upstreams (RFC \
             9110 §7.6.1)",
        );
    }
    if is_one_of(&[CONTENT_LENGTH]) {
        return Some("the gateway sets the framing of messages itself");
    }
    if direction == Direction::Response {
        return None;
    }
    if is_one_of(&[HOST]) {
        return Some("the gateway sends the host that it used to find the route");
    }
    if is_one_of(&[EXPECT]) {
        return Some("the gateway itself responds to `Expect: 100-continue`");
    }
    let forwarding_headers = [FORWARDED, VIA, X_FORWARDED_FOR, X_FORWARDED_HOST, X_FORWARDED_PROTO, X_REQUEST_ID];
    is_one_of(&forwarding_headers).then_some("the gateway sets the headers that describe the client and the request")
}

// === Values of header rules with variables, such as `user={consumer}`, which are rendered for each request ===

/// A variable in the value of a header rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variable {
    /// `{client_ip}`: IP address of the client.
    ClientIp,
    /// Request id.
    RequestId,
    /// Name of the consumer that sent the request.
    Consumer,
    /// Name of the route.
    Route,
    /// Host that was used for routing.
    Host,
    /// Method of the request.
    Method,
    /// Path in canonical form, without the query. A rewrite of the path does not change this value.
    Path,
    /// `http` or `https`.
    Scheme,
}

impl Variable {
    /// All variables with their names.
    pub const ALL: [(&'static str, Variable); 8] = [
        ("client_ip", Variable::ClientIp),
        ("request_id", Variable::RequestId),
        ("consumer", Variable::Consumer),
        ("route", Variable::Route),
        ("host", Variable::Host),
        ("method", Variable::Method),
        ("path", Variable::Path),
        ("scheme", Variable::Scheme),
    ];

    /// Return whether `%` in the content of the variable must be percent-encoded. In a path, `%` already starts an
    /// encoded byte (RFC 3986 §2.1).
    fn escapes_percent(self) -> bool {
        self != Variable::Path
    }
}

/// The reason why the value of a header rule is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// The text has a `{` without `}`.
    #[error("`{{` without `}}`")]
    Unclosed,
    /// The text has a `}` without `{`.
    #[error("`}}` without `{{`")]
    Unopened,
    /// No variable has this name.
    #[error("unknown variable `{0}`")]
    UnknownVariable(String),
}

/// The value of a header rule with at least one variable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ValueTemplate(Vec<Part>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Literal(String),
    Variable(Variable),
}

/// The parsed value of a header rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ParsedValue {
    /// The value is the same for each request.
    Literal(String),
    /// The value contains variables.
    Template(ValueTemplate),
}

impl ParsedValue {
    /// Parse the value of a header rule. `{NAME}` is a variable; `{{` and `}}` are literal braces. `route` is the name
    /// of the route, which is the value of `{route}`.
    ///
    /// # Errors
    /// A brace has no counterpart, or a variable is unknown.
    pub fn parse(text: &str, route: &str) -> Result<Self, TemplateError> {
        let mut parts = Vec::new();
        let mut literal = String::new();
        let mut rest = text;
        while let Some(at) = rest.find(['{', '}']) {
            let (before, from) = rest.split_at(at);
            literal.push_str(before);
            let is_doubled = from.starts_with("{{") || from.starts_with("}}");
            if is_doubled {
                literal.push_str(&from[..1]);
                rest = &from[2..];
                continue;
            }
            let name = from.strip_prefix('{').ok_or(TemplateError::Unopened)?;
            let (name, behind) = name.split_once('}').ok_or(TemplateError::Unclosed)?;
            let known = Variable::ALL.iter().find(|(known, _)| *known == name);
            match known.ok_or_else(|| TemplateError::UnknownVariable(name.to_owned()))?.1 {
                Variable::Route => literal.push_str(route),
                variable => {
                    if !literal.is_empty() {
                        parts.push(Part::Literal(std::mem::take(&mut literal)));
                    }
                    parts.push(Part::Variable(variable));
                }
            }
            rest = behind;
        }
        literal.push_str(rest);
        if parts.is_empty() {
            return Ok(ParsedValue::Literal(literal));
        }
        if !literal.is_empty() {
            parts.push(Part::Literal(literal));
        }
        Ok(ParsedValue::Template(ValueTemplate(parts)))
    }
}

impl ValueTemplate {
    /// Return whether the value contains this variable.
    pub fn contains(&self, variable: Variable) -> bool {
        self.0.contains(&Part::Variable(variable))
    }

    /// Return the literal parts of the value.
    pub fn literals(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter_map(|part| match part {
            Part::Literal(text) => Some(text.as_str()),
            Part::Variable(_) => None,
        })
    }

    /// Return a copy of the template with `placeholder` instead of each literal part. Literal parts may be secret, so
    /// only the copy may be shown to users.
    pub fn with_literals_replaced(&self, placeholder: &str) -> Self {
        let replaced = |part: &Part| match part {
            Part::Literal(_) => Part::Literal(placeholder.to_owned()),
            Part::Variable(variable) => Part::Variable(*variable),
        };
        ValueTemplate(self.0.iter().map(replaced).collect())
    }

    /// Return the value for a request, or `None` if a variable has no content. `content` returns the content of a
    /// variable.
    ///
    /// Percent-encode the bytes of the content that are invalid in header values or that servers interpret in different
    /// ways: control characters, spaces at the start or end, and bytes that are not ASCII. Also percent-encode `%`,
    /// except in paths, which are already percent-encoded.
    pub fn render<'c>(&self, content: impl Fn(Variable) -> Option<Cow<'c, [u8]>>) -> Option<HeaderValue> {
        let mut value = Vec::new();
        for part in &self.0 {
            match part {
                Part::Literal(text) => value.extend_from_slice(text.as_bytes()),
                Part::Variable(variable) => {
                    let bytes = content(*variable).filter(|bytes| !bytes.is_empty())?;
                    push_escaped(&mut value, &bytes, variable.escapes_percent());
                }
            }
        }
        // The conversion cannot fail: the literal parts were checked when the configuration was loaded, and the content
        // is percent-encoded.
        HeaderValue::from_bytes(&value).ok()
    }
}

fn push_escaped(value: &mut Vec<u8>, bytes: &[u8], escapes_percent: bool) {
    const HEX: &[u8; 16] = b"0123456789ABCDEF";
    let last = bytes.len() - 1;
    for (index, &byte) in bytes.iter().enumerate() {
        let is_inner_space = byte == b' ' && index > 0 && index < last;
        if (byte.is_ascii_graphic() || is_inner_space) && !(byte == b'%' && escapes_percent) {
            value.push(byte);
        } else {
            value.extend_from_slice(&[b'%', HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 15)]]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(lines: &[(&str, &str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in lines {
            map.append(name.parse::<HeaderName>().unwrap(), value.parse().unwrap());
        }
        map
    }

    #[test]
    fn strip_hop_by_hop_removes_connection_headers() {
        let mut headers = map(&[
            ("connection", "keep-alive, X-Secret"),
            ("x-secret", "1"),
            ("te", "gzip, Trailers"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("accept", "*/*"),
        ]);
        strip_hop_by_hop(&mut headers, &ProtectedHeaders::default());
        assert_eq!(headers, map(&[("te", "trailers"), ("accept", "*/*")]));
    }

    #[test]
    fn hop_by_hop_index_matches_the_table() {
        for (index, name) in HOP_BY_HOP.iter().enumerate() {
            assert_eq!(hop_by_hop_index(name), Some(index), "{name}");
        }
        assert_eq!(hop_by_hop_index(&CONTENT_LENGTH), None);
    }

    #[test]
    fn connection_header_cannot_nominate_protected_headers() {
        let kept = [("host", "a"), ("content-length", "3"), ("x-user-id", "bob"), ("x-forwarded-for", "192.0.2.1")];
        let mut headers = map(&kept);
        headers.insert(CONNECTION, "host, content-length, X-User-Id, x-forwarded-for, x-other".parse().unwrap());
        headers.insert("x-other", HeaderValue::from_static("1"));
        strip_hop_by_hop(&mut headers, &ProtectedHeaders::new(vec![HeaderName::from_static("x-user-id")], []));
        assert_eq!(headers, map(&kept));
    }

    #[test]
    fn set_framing_writes_exactly_one_framing_header() {
        let chunked = &[("transfer-encoding", "chunked")][..];
        for (sent, length, expected) in [
            (&[][..], Some(0), &[][..]),
            (&["0"], Some(0), &[("content-length", "0")]),
            (&["5"], Some(5), &[("content-length", "5")]),
            (&["005", "5"], Some(5), &[("content-length", "5")]),
            (&[""], Some(0), &[("content-length", "0")]),
            (&[], Some(5), &[("content-length", "5")]),
            (&[], None, chunked),
            (&["5", "6"], None, chunked),
        ] {
            let lines: Vec<_> = sent.iter().map(|length| ("content-length", *length)).collect();
            let mut headers = map(&lines);
            set_framing(&mut headers, length);
            assert_eq!(headers, map(expected), "received Content-Length {sent:?}, body of length {length:?}");
        }
    }

    #[test]
    fn strip_untrusted_removes_aliases_of_protected_headers() {
        let mut headers =
            map(&[("x_user_id", "eve"), ("x.forwarded.for", "1"), ("x-user-id", "bob"), ("x_other", "1")]);
        headers.extend(map(&[
            ("x-api-key", "k"),
            ("x!api*key", "v"),
            ("x_tenant", "t"),
            ("x-tenant", "v"),
            ("x-api-keys", "1"),
        ]));
        let read = ["x-api-key", "x_tenant"].map(HeaderName::from_static);
        let guarded = ProtectedHeaders::new(vec![HeaderName::from_static("x-user-id")], read);
        strip_untrusted(&mut headers, &guarded, true);
        let kept = [("x-user-id", "bob"), ("x_other", "1"), ("x-api-key", "k"), ("x_tenant", "t"), ("x-api-keys", "1")];
        assert_eq!(headers, map(&kept));
    }

    #[test]
    fn forwarded_headers_are_replaced_for_untrusted_and_extended_for_trusted_peers() {
        let sent = [
            ("x-forwarded-for", "9.9.9.9"),
            ("forwarded", "for=9.9.9.9"),
            ("x-forwarded-proto", "https"),
            ("via", "1.1 p"),
        ];
        for (trusted, expected) in [
            (
                false,
                vec![("x-forwarded-for", "127.0.0.1"), ("x-forwarded-proto", "http"), ("via", "1.1 p, 1.1 sluicegate")],
            ),
            (
                true,
                vec![
                    ("x-forwarded-for", "9.9.9.9, 127.0.0.1"),
                    ("forwarded", "for=9.9.9.9, for=127.0.0.1"),
                    ("x-forwarded-proto", "https"),
                    ("via", "1.1 p, 1.1 sluicegate"),
                ],
            ),
        ] {
            let mut headers = map(&sent);
            let origin = ForwardedInfo::new("127.0.0.1".parse().unwrap(), "http", trusted);
            strip_untrusted(&mut headers, &ProtectedHeaders::default(), trusted);
            set_forwarded(&mut headers, &origin, None, Version::HTTP_11);
            assert_eq!(headers, map(&expected), "trusted: {trusted}");
        }
    }

    #[test]
    fn join_cookies_merges_http2_cookie_headers() {
        let mut headers = map(&[("cookie", "a=1"), ("cookie", "b=2")]);
        join_cookies(&mut headers);
        assert_eq!(headers, map(&[("cookie", "a=1; b=2")]));
    }

    fn render(text: &str, content: &[u8]) -> Option<String> {
        match ParsedValue::parse(text, "r").unwrap() {
            ParsedValue::Literal(text) => Some(text),
            ParsedValue::Template(template) => {
                let value = template.render(|_| Some(Cow::Borrowed(content)));
                value.map(|value| value.to_str().unwrap().to_owned())
            }
        }
    }

    #[test]
    fn values_are_rendered_with_literal_braces_and_variables() {
        for (text, expected) in [
            ("plain", "plain"),
            ("", ""),
            ("{client_ip}", "x"),
            ("a{client_ip}b{host}c", "axbxc"),
            ("{route}", "r"),
            ("{route}/{method}", "r/x"),
            ("{{client_ip}}", "{client_ip}"),
            ("{{{client_ip}}}", "{x}"),
            ("{{\"a\":[1]}}", "{\"a\":[1]}"),
            ("${{A}}", "${A}"),
        ] {
            assert_eq!(render(text, b"x").as_deref(), Some(expected), "{text}");
        }
    }

    #[test]
    fn malformed_values_are_errors() {
        let unknown = |name: &str| TemplateError::UnknownVariable(name.to_owned());
        for (text, expected) in [
            ("{client-ip}", unknown("client-ip")),
            ("{}", unknown("")),
            ("{ host }", unknown(" host ")),
            ("{host", TemplateError::Unclosed),
            ("a}", TemplateError::Unopened),
            ("{{host}", TemplateError::Unopened),
            ("{host}}", TemplateError::Unopened),
        ] {
            assert_eq!(ParsedValue::parse(text, "r"), Err(expected), "{text}");
        }
    }

    #[test]
    fn content_is_escaped_and_missing_content_gives_no_value() {
        for (text, content, expected) in [
            ("{consumer}", &b"acme"[..], Some("acme")),
            ("{consumer}", b"CN=James Smith", Some("CN=James Smith")),
            ("{consumer}", b" a b ", Some("%20a b%20")),
            ("{consumer}", b" ", Some("%20")),
            ("{consumer}", b"a\r\nx-evil: 1\0\x7f\t", Some("a%0D%0Ax-evil: 1%00%7F%09")),
            ("{consumer}", "Lučić".as_bytes(), Some("Lu%C4%8Di%C4%87")),
            ("{consumer}", b"100%", Some("100%25")),
            ("{path}", b"/a%20b", Some("/a%20b")),
            ("{path}", b"/a\nb", Some("/a%0Ab")),
            ("user={consumer}", b"", None),
        ] {
            assert_eq!(render(text, content).as_deref(), expected, "{text} {content:?}");
        }
        let ParsedValue::Template(template) = ParsedValue::parse("{host}{consumer}", "r").unwrap() else { panic!() };
        assert_eq!(template.render(|variable| (variable == Variable::Host).then_some(Cow::Borrowed(b"h"))), None);
    }
}

#[cfg(test)]
mod change_tests {
    use super::*;

    #[test]
    fn framing_and_routing_headers_are_reserved() {
        for (name, in_requests, in_responses) in [
            ("connection", true, true),
            ("transfer-encoding", true, true),
            ("Content_Length", true, true),
            ("te", true, true),
            ("upgrade", true, true),
            ("host", true, false),
            ("expect", true, false),
            ("x-forwarded-for", true, false),
            ("X_Forwarded.For", true, false),
            ("via", true, false),
            ("x-request-id", true, false),
            ("x-forwarded-prefix", false, false),
            ("server", false, false),
            ("authorization", false, false),
        ] {
            let name: HeaderName = name.parse().unwrap();
            assert_eq!(reserved_reason(&name, Direction::Request).is_some(), in_requests, "{name} in requests");
            assert_eq!(reserved_reason(&name, Direction::Response).is_some(), in_responses, "{name} in responses");
        }
    }

    #[test]
    fn mutations_remove_aliases_of_set_and_removed_headers() {
        let name = HeaderName::from_static;
        let (set, remove) = (vec![(name("x-set"), HeaderValue::from_static("ours"))], vec![name("x_gone")]);
        let aliases = HeaderAliases::from_names(set.iter().map(|(name, _)| name).chain(&remove));
        let mut headers = HeaderMap::new();
        for field in ["x-set", "x_set", "x.set", "x!set", "x~set", "x-gone", "x_gone", "x.gone", "xset", "x-set-"] {
            headers.append(name(field), HeaderValue::from_static("theirs"));
        }
        let mutations = HeaderMutations { set, remove, aliases, ..HeaderMutations::default() };
        mutations.apply(&mut headers, &RenderedValues::default());
        let left: Vec<_> = headers.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
        let mut expected = [("x-set", "ours"), ("xset", "theirs"), ("x-set-", "theirs")];
        expected.sort_unstable();
        let mut left = left;
        left.sort_unstable();
        assert_eq!(left, expected);
    }

    #[test]
    fn mutations_replace_or_remove_every_value_of_a_header() {
        let name = HeaderName::from_static;
        let mut headers = HeaderMap::new();
        for (field, value) in [("a", "1"), ("a", "2"), ("b", "1"), ("b", "2"), ("c", "1")] {
            headers.append(name(field), HeaderValue::from_static(value));
        }
        let set = vec![(name("a"), HeaderValue::from_static("3")), (name("d"), HeaderValue::from_static("4"))];
        let mutations = HeaderMutations { set, remove: vec![name("b"), name("x")], ..HeaderMutations::default() };
        mutations.apply(&mut headers, &RenderedValues::default());
        let expected = [("a", "3"), ("c", "1"), ("d", "4")].map(|(field, value)| (name(field), value.parse().unwrap()));
        assert_eq!(headers, HeaderMap::from_iter(expected));
    }
}
