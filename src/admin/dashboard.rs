//! The dashboard at `/`: static files without data, and browser security headers.

use http::header::{CONTENT_SECURITY_POLICY, HeaderName, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS};
use http::{HeaderValue, StatusCode};

use crate::admin::{AdminResponse, typed_response};

const INDEX_HTML: &str = include_str!("dashboard/index.html");

/// HTML attribute of `<body>` that tells the scripts of the dashboard whether `admin.token` is configured.
const WITHOUT_TOKEN: &str = "data-token=\"none\"";
const WITH_TOKEN: &str = "data-token=\"required\"";

const JAVASCRIPT_TYPE: &str = "text/javascript; charset=utf-8";

const FILES: [(&str, &str, &str); 10] = [
    ("/page.css", "text/css; charset=utf-8", include_str!("dashboard/page.css")),
    ("/page.js", JAVASCRIPT_TYPE, include_str!("dashboard/page.js")),
    ("/api.js", JAVASCRIPT_TYPE, include_str!("dashboard/api.js")),
    ("/chart.js", JAVASCRIPT_TYPE, include_str!("dashboard/chart.js")),
    ("/dialogs.js", JAVASCRIPT_TYPE, include_str!("dashboard/dialogs.js")),
    ("/dom.js", JAVASCRIPT_TYPE, include_str!("dashboard/dom.js")),
    ("/flow.js", JAVASCRIPT_TYPE, include_str!("dashboard/flow.js")),
    ("/inspect.js", JAVASCRIPT_TYPE, include_str!("dashboard/inspect.js")),
    ("/limits.js", JAVASCRIPT_TYPE, include_str!("dashboard/limits.js")),
    ("/tokens.js", JAVASCRIPT_TYPE, include_str!("dashboard/tokens.js")),
];

/// Content Security Policy. Scripts and styles come only from the files above: no inline code, no other origins, no
/// framing. Trusted Types prevent scripts from converting text into markup.
const CSP: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; \
                      trusted-types 'none'";

const SECURITY_HEADERS: [(HeaderName, &str); 4] = [
    (CONTENT_SECURITY_POLICY, CSP),
    (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (X_FRAME_OPTIONS, "DENY"),
    (REFERRER_POLICY, "no-referrer"),
];

/// Return the file of the dashboard at `path`, or `None` if it does not exist. The files need no authentication,
/// because they contain no data. Their scripts request the data with the token.
pub(super) fn find_file(path: &str, has_token: bool) -> Option<AdminResponse> {
    if path == "/" {
        let index = if has_token { INDEX_HTML.replace(WITHOUT_TOKEN, WITH_TOKEN) } else { INDEX_HTML.to_owned() };
        return Some(typed_response(StatusCode::OK, "text/html; charset=utf-8", index));
    }
    let (_, content_type, text) = FILES.iter().find(|(name, ..)| *name == path)?;
    Some(typed_response(StatusCode::OK, content_type, (*text).to_owned()))
}

/// Add the browser security headers. Every response of the admin listener has these headers.
pub(super) fn add_security_headers(response: &mut AdminResponse) {
    for (name, value) in SECURITY_HEADERS {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
}
