//! The live page at `/`: its files, without any figure in them, and what a browser may do with them.

use http::HeaderValue;
use http::StatusCode;
use http::header::{CONTENT_SECURITY_POLICY, HeaderName, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS};

use super::{Answer, of_type};

const INDEX: &str = include_str!("page/index.html");

/// What tells the scripts whether the gateway has a token.
const WITHOUT_TOKEN: &str = "data-token=\"none\"";
const WITH_TOKEN: &str = "data-token=\"wanted\"";

const SCRIPT: &str = "text/javascript; charset=utf-8";

const FILES: [(&str, &str, &str); 6] = [
    ("/page.css", "text/css; charset=utf-8", include_str!("page/page.css")),
    ("/page.js", SCRIPT, include_str!("page/page.js")),
    ("/ask.js", SCRIPT, include_str!("page/ask.js")),
    ("/chart.js", SCRIPT, include_str!("page/chart.js")),
    ("/dom.js", SCRIPT, include_str!("page/dom.js")),
    ("/inspect.js", SCRIPT, include_str!("page/inspect.js")),
];

/// Scripts and styles are those files and nothing that stands in a page, text never becomes markup, and nobody else is
/// asked for anything or may frame it.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; \
                      trusted-types 'none'";

const GUARDS: [(HeaderName, &str); 4] = [
    (CONTENT_SECURITY_POLICY, POLICY),
    (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (X_FRAME_OPTIONS, "DENY"),
    (REFERRER_POLICY, "no-referrer"),
];

/// A file of the page; none if it is not one. Everybody may have it: what it shows it has to ask for.
pub(super) fn file(path: &str, has_token: bool) -> Option<Answer> {
    if path == "/" {
        let index = if has_token { INDEX.replace(WITHOUT_TOKEN, WITH_TOKEN) } else { INDEX.to_owned() };
        return Some(of_type(StatusCode::OK, "text/html; charset=utf-8", index));
    }
    let (_, content_type, text) = FILES.iter().find(|(name, ..)| *name == path)?;
    Some(of_type(StatusCode::OK, content_type, (*text).to_owned()))
}

/// What each answer of this listener says to a browser.
pub(super) fn guard(answer: &mut Answer) {
    for (name, value) in GUARDS {
        answer.headers_mut().insert(name, HeaderValue::from_static(value));
    }
}
