//! CORS origins: only configured origins are allowed. Files of networks: an error names the position of the invalid
//! text.

use http::header::{ACCESS_CONTROL_ALLOW_ORIGIN, HeaderMap, HeaderValue, ORIGIN};
use http::uri::Uri;
use sluicegate::http::cors::{AllowedNames, AllowedOrigins, CorsPolicy, OriginPattern};
use sluicegate::identity::access::parse_networks;

/// The first line of the input is the configured origin. Up to three further lines are values of `Origin`.
pub(crate) fn run(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match parse_networks(text) {
        Ok(_) => {}
        Err((lines, _)) => {
            assert!(lines.iter().all(|line| text.get(line.span.clone()).is_some_and(|text| text.trim() == text)));
        }
    }
    let mut lines = text.split('\n');
    let Ok(pattern) = lines.next().unwrap_or_default().parse::<OriginPattern>() else { return };
    if let OriginPattern::Exact(origin) = &pattern {
        assert_eq!(origin.parse(), Ok(pattern.clone()), "the canonical form is stable");
    }
    let policy = CorsPolicy {
        origins: AllowedOrigins::new([pattern.clone()]),
        methods: AllowedNames::Requested,
        headers: AllowedNames::Requested,
        credentials: true,
        max_age: None,
        expose: None,
        private_network: false,
    };
    let mut request = HeaderMap::new();
    for value in lines.take(3).filter_map(|line| HeaderValue::from_str(line).ok()) {
        request.append(ORIGIN, value);
    }
    let mut response = HeaderMap::new();
    policy.decide(&request, false).apply(&mut response);
    let Some(allowed) = response.get(ACCESS_CONTROL_ALLOW_ORIGIN) else { return };
    match &pattern {
        OriginPattern::Any => assert_eq!(allowed, "*"),
        OriginPattern::Exact(origin) => assert_eq!(allowed.as_bytes(), origin.as_bytes()),
        // Check with another parser (`http::Uri`) that the allowed origin is a subdomain of the configured origin and
        // has no other parts, such as a path.
        OriginPattern::Wildcard(_) => {
            let configured = text.lines().next().unwrap_or_default().to_ascii_lowercase().replace("*.", "x.");
            let [configured, origin]: [Uri; 2] =
                [configured.as_bytes(), allowed.as_bytes()].map(|text| Uri::try_from(text).expect("a URL"));
            let host = |uri: &Uri| uri.host().unwrap_or_default().to_owned();
            let port = |uri: &Uri| match (uri.scheme_str(), uri.port_u16()) {
                (Some("http"), Some(80)) | (Some("https"), Some(443)) => None,
                (_, port) => port,
            };
            assert!(host(&origin).ends_with(&host(&configured)[1..]), "{origin} of {configured}");
            assert!(host(&origin).len() >= host(&configured).len(), "{origin} of {configured}");
            assert_eq!((origin.scheme(), port(&origin)), (configured.scheme(), port(&configured)));
            assert_eq!((origin.path(), origin.query()), ("/", None), "{origin}");
            assert!(!allowed.as_bytes().contains(&b'@') && !allowed.as_bytes().ends_with(b"/"), "{allowed:?}");
        }
    }
}
