//! CORS (the Fetch standard, "CORS protocol"): allowed origins, preflight requests, and the CORS headers of responses.

use std::collections::HashSet;
use std::net::Ipv6Addr;

use http::header::{
    ACCESS_CONTROL_ALLOW_CREDENTIALS, ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS,
    ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS,
    ACCESS_CONTROL_REQUEST_METHOD, HeaderName, HeaderValue, ORIGIN, VARY,
};
use http::{HeaderMap, Method};

use crate::http::headers::add_vary;

use crate::limiter::address::parse_port;

/// Prefix of the response headers that the CORS protocol defines.
const CORS_PREFIX: &str = "access-control-";

/// Value of `Vary` in a preflight response. The response depends on the requested method and headers: the method
/// selects the route, and the gateway may copy both into the response.
const PREFLIGHT_VARY: HeaderValue =
    HeaderValue::from_static("Access-Control-Request-Method, Access-Control-Request-Headers");

/// Value of `Vary` in a preflight response if the policy lists origins. The response then also depends on the origin.
const PREFLIGHT_VARY_ORIGIN: HeaderValue =
    HeaderValue::from_static("Origin, Access-Control-Request-Method, Access-Control-Request-Headers");

/// Headers with which browsers ask whether a website may send requests to a private network, and the answer
/// (<https://wicg.github.io/private-network-access/>).
const REQUEST_PRIVATE_NETWORK: HeaderName = HeaderName::from_static("access-control-request-private-network");
const ALLOW_PRIVATE_NETWORK: HeaderName = HeaderName::from_static("access-control-allow-private-network");

/// The CORS policy of a route.
#[derive(Debug)]
pub struct CorsPolicy {
    /// Origins whose scripts may read responses.
    pub origins: AllowedOrigins,
    /// Value of `Access-Control-Allow-Methods`.
    pub methods: AllowedNames,
    /// Value of `Access-Control-Allow-Headers`.
    pub headers: AllowedNames,
    /// Whether browsers may send credentials: cookies, client certificates, and the `Authorization` header of HTTP
    /// authentication.
    pub credentials: bool,
    /// Value of `Access-Control-Max-Age` in seconds.
    pub max_age: Option<HeaderValue>,
    /// Value of `Access-Control-Expose-Headers`.
    pub expose: Option<HeaderValue>,
    /// Whether websites in public networks may send requests to this gateway in a private network.
    pub private_network: bool,
}

/// Origins whose scripts may read responses.
#[derive(Debug)]
pub enum AllowedOrigins {
    /// All origins, without credentials.
    Any,
    /// Only the origins in this set.
    Listed {
        /// Origins in the form in which browsers serialize them.
        exact: HashSet<Box<[u8]>>,
        /// Hosts whose subdomains are all allowed.
        wildcards: Vec<WildcardOrigin>,
    },
}

/// Methods or headers that a preflight allows.
#[derive(Debug)]
pub enum AllowedNames {
    /// The methods or headers that the preflight names.
    Requested,
    /// The methods or headers in this list. With `None`, the gateway omits the CORS header with this list, so browsers
    /// accept only the methods or headers that need no preflight.
    Listed(Option<HeaderValue>),
}

impl AllowedOrigins {
    /// Create the allowed origins from the patterns in the configuration.
    pub fn new(patterns: impl IntoIterator<Item = OriginPattern>) -> Self {
        let (mut exact, mut wildcards) = (HashSet::new(), Vec::new());
        for pattern in patterns {
            match pattern {
                OriginPattern::Any => return AllowedOrigins::Any,
                OriginPattern::Exact(origin) => drop(exact.insert(origin.into_boxed_bytes())),
                OriginPattern::Wildcard(wildcard) => wildcards.push(wildcard),
            }
        }
        AllowedOrigins::Listed { exact, wildcards }
    }

    /// Return whether an origin is allowed.
    pub fn contains(&self, origin: &[u8]) -> bool {
        match self {
            AllowedOrigins::Any => true,
            AllowedOrigins::Listed { exact, wildcards } => {
                exact.contains(origin) || wildcards.iter().any(|wildcard| wildcard.matches(origin))
            }
        }
    }
}

/// The result of applying a CORS policy to one request.
#[derive(Debug)]
pub struct CorsDecision<'p> {
    policy: &'p CorsPolicy,
    /// Value of `Access-Control-Allow-Origin`. `None` if the policy lists origins, and the request has no origin or an
    /// origin that is not allowed.
    allow_origin: Option<HeaderValue>,
    is_preflight: bool,
}

impl CorsPolicy {
    /// Apply the policy to a request with these headers. `is_preflight` is true if the gateway answers the request as a
    /// preflight.
    pub fn decide(&self, request: &HeaderMap, is_preflight: bool) -> CorsDecision<'_> {
        let allow_origin = match &self.origins {
            // Set the header even if the request has no origin, because a cache may use the response for a request with
            // an origin.
            AllowedOrigins::Any => Some(HeaderValue::from_static("*")),
            origins => single(request, &ORIGIN).filter(|origin| origins.contains(origin.as_bytes())).cloned(),
        };
        CorsDecision { policy: self, allow_origin, is_preflight }
    }
}

impl CorsDecision<'_> {
    /// Return whether scripts of the origin may read the response.
    pub fn is_allowed(&self) -> bool {
        self.allow_origin.is_some()
    }

    /// Set the CORS headers of a response. The caller must have removed the CORS headers of the upstream
    /// ([`remove_headers`]).
    pub fn apply(&self, response: &mut HeaderMap) {
        if let Some(origin) = &self.allow_origin {
            response.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
            if self.policy.credentials {
                response.insert(ACCESS_CONTROL_ALLOW_CREDENTIALS, HeaderValue::from_static("true"));
            }
            if let Some(names) = self.policy.expose.as_ref().filter(|_| !self.is_preflight) {
                response.insert(ACCESS_CONTROL_EXPOSE_HEADERS, names.clone());
            }
        }
        match (&self.policy.origins, self.is_preflight) {
            (AllowedOrigins::Any, true) => drop(response.insert(VARY, PREFLIGHT_VARY)),
            (AllowedOrigins::Any, false) => {}
            (AllowedOrigins::Listed { .. }, true) => drop(response.insert(VARY, PREFLIGHT_VARY_ORIGIN)),
            (AllowedOrigins::Listed { .. }, false) => add_vary(response, "Origin"),
        }
        if self.is_preflight && self.policy.private_network {
            response.append(VARY, HeaderValue::from_static("Access-Control-Request-Private-Network"));
        }
    }

    /// Return the CORS headers that only preflight responses have. `request` contains the headers of the preflight.
    /// [`Self::apply`] sets the other CORS headers.
    pub fn preflight_headers(&self, request: &HeaderMap) -> HeaderMap {
        let mut headers = HeaderMap::new();
        if !self.is_allowed() {
            return headers;
        }
        let CorsPolicy { methods, headers: names, max_age, .. } = self.policy;
        let values = [
            (ACCESS_CONTROL_ALLOW_METHODS, methods.value(request, &ACCESS_CONTROL_REQUEST_METHOD)),
            (ACCESS_CONTROL_ALLOW_HEADERS, names.value(request, &ACCESS_CONTROL_REQUEST_HEADERS)),
            (ACCESS_CONTROL_MAX_AGE, max_age.as_ref()),
        ];
        headers.extend(values.into_iter().filter_map(|(name, value)| Some((name, value?.clone()))));
        if self.policy.private_network && request.get(REQUEST_PRIVATE_NETWORK).is_some_and(|asked| asked == "true") {
            headers.insert(ALLOW_PRIVATE_NETWORK, HeaderValue::from_static("true"));
        }
        headers
    }
}

impl AllowedNames {
    fn value<'a>(&'a self, request: &'a HeaderMap, requested: &HeaderName) -> Option<&'a HeaderValue> {
        match self {
            // Copy the requested names instead of sending `*`. For requests with credentials, browsers treat `*` as a
            // literal name. For other requests, `*` does not include `Authorization`.
            AllowedNames::Requested => single(request, requested),
            AllowedNames::Listed(value) => value.as_ref(),
        }
    }
}

/// Return the value of `Access-Control-Request-Method` in a preflight. Return `None` if the request is not a preflight,
/// because its method is not OPTIONS, or because it lacks `Origin` or `Access-Control-Request-Method`.
pub fn requested_method(method: &Method, headers: &HeaderMap) -> Option<Method> {
    if *method != Method::OPTIONS || !headers.contains_key(ORIGIN) {
        return None;
    }
    Method::from_bytes(single(headers, &ACCESS_CONTROL_REQUEST_METHOD)?.as_bytes()).ok()
}

/// Remove the CORS headers of an upstream response. The policy of the route replaces these headers.
pub fn remove_headers(response: &mut HeaderMap) {
    let is_cors = |name: &&HeaderName| name.as_str().starts_with(CORS_PREFIX);
    let names: Vec<_> = response.keys().filter(is_cors).cloned().collect();
    for name in names {
        response.remove(name);
    }
}

/// Return whether the policy of a route sets this response header.
pub fn is_cors_header(name: &HeaderName) -> bool {
    name.as_str().starts_with(CORS_PREFIX)
}

/// Return the value of a header that occurs exactly once, otherwise `None`.
fn single<'h>(headers: &'h HeaderMap, name: &HeaderName) -> Option<&'h HeaderValue> {
    let mut lines = headers.get_all(name).iter();
    lines.next().filter(|_| lines.next().is_none())
}

// === Origins in the configuration ===

/// An origin, or a pattern for origins, in the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OriginPattern {
    /// `*`, which stands for all origins.
    Any,
    /// An origin in the form in which browsers serialize it: in lower case, without the default port.
    Exact(Box<str>),
    /// A pattern such as `https://*.example.com`, which stands for all subdomains of a host.
    Wildcard(WildcardOrigin),
}

/// All subdomains of a host, with one scheme and port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WildcardOrigin {
    /// The scheme of the origin, including `://`.
    prefix: Box<str>,
    /// The dot, the host, and the port if it is not the default port.
    suffix: Box<str>,
}

impl WildcardOrigin {
    /// Return whether an origin has the scheme and port of this pattern, and its host is a subdomain of the pattern's
    /// host at any depth.
    fn matches(&self, origin: &[u8]) -> bool {
        let rest = origin.strip_prefix(self.prefix.as_bytes());
        let labels = rest.and_then(|rest| rest.strip_suffix(self.suffix.as_bytes()));
        labels.is_some_and(|labels| labels.split(|byte| *byte == b'.').all(is_label))
    }
}

/// The reason why a text is not an origin.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OriginError {
    /// The text is `null`, which browsers send for several unrelated origins.
    #[error("`null` is the origin of sandboxed documents and local files of any site: every site could use it")]
    Null,
    /// The text does not start with a scheme such as `https://`.
    #[error("begin the origin with its scheme, such as `https://`")]
    MissingScheme,
    /// The text has a path, query or fragment. The variant contains the origin without this part.
    #[error("an origin has no path: browsers send the scheme, the host and the port")]
    HasPath(String),
    /// The host or the port is invalid, or there is a user name.
    #[error("this is not an origin")]
    Malformed,
    /// `*` occurs at another position than the first label.
    #[error("`*` may only replace the first labels of a host")]
    MisplacedWildcard,
    /// The host has characters other than ASCII.
    #[error("browsers send the host in ASCII (RFC 5890)")]
    NotAscii,
}

impl std::str::FromStr for OriginPattern {
    type Err = OriginError;

    fn from_str(text: &str) -> Result<Self, OriginError> {
        if text == "*" {
            return Ok(OriginPattern::Any);
        }
        if text.eq_ignore_ascii_case("null") {
            return Err(OriginError::Null);
        }
        let (scheme, rest) = text.split_once("://").ok_or(OriginError::MissingScheme)?;
        let scheme = scheme.to_ascii_lowercase();
        let is_scheme = scheme.starts_with(|c: char| c.is_ascii_lowercase())
            && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+.-".contains(&byte));
        if !is_scheme {
            return Err(if scheme.contains('*') { OriginError::MisplacedWildcard } else { OriginError::Malformed });
        }
        if let Some(end) = rest.find(['/', '?', '#']) {
            return Err(OriginError::HasPath(format!("{scheme}://{}", &rest[..end])));
        }
        if !rest.is_ascii() {
            return Err(OriginError::NotAscii);
        }
        let rest = rest.to_ascii_lowercase();
        let (host, port) = match rest.rsplit_once(':').filter(|(_, port)| !port.ends_with(']')) {
            Some((host, port)) => (host, Some(parse_port(port).map_err(|_| OriginError::Malformed)?)),
            None => (&*rest, None),
        };
        let is_default = matches!((&*scheme, port), ("http", Some(80)) | ("https", Some(443)));
        let port = port.filter(|_| !is_default).map_or_else(String::new, |port| format!(":{port}"));
        if let Some(address) = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
            let address: Ipv6Addr = address.parse().map_err(|_| OriginError::Malformed)?;
            return Ok(OriginPattern::Exact(format!("{scheme}://[{address}]{port}").into()));
        }
        let (is_wildcard, name) = host.strip_prefix("*.").map_or((false, host), |name| (true, name));
        if name.contains('*') {
            return Err(OriginError::MisplacedWildcard);
        }
        // Allow a final dot, because `example.com.` is a valid host. Browsers treat this host as a different origin
        // than `example.com`.
        if !name.strip_suffix('.').unwrap_or(name).split('.').all(|label| is_label(label.as_bytes())) {
            return Err(OriginError::Malformed);
        }
        Ok(match is_wildcard {
            false => OriginPattern::Exact(format!("{scheme}://{name}{port}").into()),
            true => OriginPattern::Wildcard(WildcardOrigin {
                prefix: format!("{scheme}://").into(),
                suffix: format!(".{name}{port}").into(),
            }),
        })
    }
}

/// Return whether the text is a label of a host name in lower case.
fn is_label(label: &[u8]) -> bool {
    !label.is_empty()
        && label.iter().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_".contains(byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(origins: &[&str], credentials: bool) -> CorsPolicy {
        CorsPolicy {
            origins: AllowedOrigins::new(origins.iter().map(|text| text.parse().unwrap())),
            methods: AllowedNames::Listed(Some(HeaderValue::from_static("GET, PUT"))),
            headers: AllowedNames::Requested,
            credentials,
            max_age: Some(HeaderValue::from_static("600")),
            expose: Some(HeaderValue::from_static("RateLimit")),
            private_network: false,
        }
    }

    fn map(lines: &[(&str, &str)]) -> HeaderMap {
        let lines = lines.iter().map(|(name, value)| (name.parse::<HeaderName>().unwrap(), value.parse().unwrap()));
        let mut map = HeaderMap::new();
        for (name, value) in lines {
            map.append(name, value);
        }
        map
    }

    #[test]
    fn origins_are_compared_as_browsers_serialize_them() {
        let allowed = [
            "https://app.example.com",
            "HTTPS://Upper.Example.com:443",
            "http://localhost:3000",
            "http://plain.test:80",
            "http://[2001:DB8:0::1]:8080",
            "https://*.example.org",
            "https://*.port.test:8443",
            "chrome-extension://abcdef",
        ];
        let origins = AllowedOrigins::new(allowed.iter().map(|text| text.parse().unwrap()));
        for (origin, expected) in [
            ("https://app.example.com", true),
            ("http://app.example.com", false),
            ("https://app.example.com:8443", false),
            ("https://APP.example.com", false),
            ("https://app.example.com/", false),
            ("https://app.example.com.evil.test", false),
            ("https://upper.example.com", true),
            ("http://localhost:3000", true),
            ("http://localhost", false),
            ("http://plain.test", true),
            ("http://plain.test:80", false),
            ("http://[2001:db8::1]:8080", true),
            ("https://a.example.org", true),
            ("https://a.b.example.org", true),
            ("https://example.org", false),
            ("https://.example.org", false),
            ("https://a..example.org", false),
            ("http://a.example.org", false),
            ("https://a.example.org:8443", false),
            ("https://evilexample.org", false),
            ("https://evil.test/.example.org", false),
            ("https://evil.test:443.example.org", false),
            ("https://evil.test?.example.org", false),
            ("https://user@a.example.org", false),
            ("https://a.port.test:8443", true),
            ("https://a.port.test", false),
            ("chrome-extension://abcdef", true),
            ("null", false),
            ("", false),
            ("*", false),
        ] {
            assert_eq!(origins.contains(origin.as_bytes()), expected, "{origin}");
        }
    }

    #[test]
    fn invalid_origins_are_rejected() {
        for (text, expected) in [
            ("null", OriginError::Null),
            ("app.example.com", OriginError::MissingScheme),
            ("https://app.example.com/", OriginError::HasPath("https://app.example.com".into())),
            ("https://app.example.com/a?b", OriginError::HasPath("https://app.example.com".into())),
            ("https://me@app.example.com", OriginError::Malformed),
            ("https://app.example.com:https", OriginError::Malformed),
            ("https://app..example.com", OriginError::Malformed),
            ("https://", OriginError::Malformed),
            ("https://[::1", OriginError::Malformed),
            ("https://*", OriginError::MisplacedWildcard),
            ("https://*app.example.com", OriginError::MisplacedWildcard),
            ("https://app.*.com", OriginError::MisplacedWildcard),
            ("*://app.example.com", OriginError::MisplacedWildcard),
            ("https://b\u{fc}cher.example", OriginError::NotAscii),
        ] {
            assert_eq!(text.parse::<OriginPattern>(), Err(expected), "{text}");
        }
    }

    #[test]
    fn response_headers_depend_on_the_origin() {
        let listed = policy(&["https://a.test"], true);
        let any = policy(&["*"], false);
        let allowed = [
            ("access-control-allow-origin", "https://a.test"),
            ("access-control-allow-credentials", "true"),
            ("access-control-expose-headers", "RateLimit"),
            ("vary", "Origin"),
        ];
        let of_any = [("access-control-allow-origin", "*"), ("access-control-expose-headers", "RateLimit")];
        for (policy, request, expected) in [
            (&listed, &[("origin", "https://a.test")][..], &allowed[..]),
            (&listed, &[("origin", "https://b.test")], &allowed[3..]),
            (&listed, &[("origin", "https://a.test"), ("origin", "https://a.test")], &allowed[3..]),
            (&listed, &[], &allowed[3..]),
            (&any, &[("origin", "null")], &of_any),
            (&any, &[], &of_any),
        ] {
            let mut response = HeaderMap::new();
            policy.decide(&map(request), false).apply(&mut response);
            assert_eq!(response, map(expected), "{request:?}");
        }
    }

    #[test]
    fn upstream_headers_are_replaced_and_vary_is_extended_once() {
        let listed = policy(&["https://a.test"], false);
        for (vary, expected) in [
            (&[][..], &["Origin"][..]),
            (&["Accept-Encoding"], &["Accept-Encoding", "Origin"]),
            (&["Accept-Encoding, origin"], &["Accept-Encoding, origin"]),
            (&["Accept", " Origin"], &["Accept", "Origin"]),
            (&["*"], &["*"]),
        ] {
            let mut response = map(&[
                ("access-control-allow-origin", "*"),
                ("access-control-allow-origin", "https://x.test"),
                ("access-control-expose-headers", "X-Own"),
                ("access-control-allow-private-network", "true"),
                ("x-own", "1"),
            ]);
            for line in vary {
                response.append(VARY, line.trim().parse().unwrap());
            }
            remove_headers(&mut response);
            listed.decide(&map(&[("origin", "https://a.test")]), false).apply(&mut response);
            let mut lines = vec![
                ("access-control-allow-origin", "https://a.test"),
                ("access-control-expose-headers", "RateLimit"),
                ("x-own", "1"),
            ];
            lines.extend(expected.iter().map(|line| ("vary", *line)));
            assert_eq!(response, map(&lines), "{vary:?}");
        }
    }

    #[test]
    fn preflight_names_what_is_allowed() {
        let listed = policy(&["https://a.test"], false);
        let request = [
            ("origin", "https://a.test"),
            ("access-control-request-method", "PUT"),
            ("access-control-request-headers", "x-one,x-two"),
        ];
        let expected = [
            ("access-control-allow-methods", "GET, PUT"),
            ("access-control-allow-headers", "x-one,x-two"),
            ("access-control-max-age", "600"),
        ];
        let request = map(&request);
        assert_eq!(listed.decide(&request, true).preflight_headers(&request), map(&expected));
        let other = map(&[("origin", "https://b.test"), ("access-control-request-method", "PUT")]);
        assert_eq!(listed.decide(&other, true).preflight_headers(&other), HeaderMap::new());
        // A preflight response has no `Access-Control-Expose-Headers`, because scripts cannot read preflight responses.
        let mut response = HeaderMap::new();
        listed.decide(&request, true).apply(&mut response);
        let vary = "Origin, Access-Control-Request-Method, Access-Control-Request-Headers";
        assert_eq!(response, map(&[("access-control-allow-origin", "https://a.test"), ("vary", vary)]));
    }

    #[test]
    fn preflights_have_an_origin_and_a_requested_method() {
        let (origin, method) = (("origin", "https://a.test"), ("access-control-request-method", "PUT"));
        for (sent, headers, expected) in [
            (Method::OPTIONS, &[origin, method][..], Some(Method::PUT)),
            (Method::OPTIONS, &[origin], None),
            (Method::OPTIONS, &[method], None),
            (Method::OPTIONS, &[origin, method, method], None),
            (Method::OPTIONS, &[origin, ("access-control-request-method", "P T")], None),
            (Method::GET, &[origin, method], None),
        ] {
            assert_eq!(requested_method(&sent, &map(headers)), expected, "{sent} {headers:?}");
        }
    }
}
