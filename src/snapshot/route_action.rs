//! Compiles the action of a route: weighted upstreams, direct response or redirect. Also compiles path rewriting and
//! mirroring.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use http::header::{CONTENT_TYPE, LOCATION};
use http::uri::PathAndQuery;
use http::{HeaderValue, Request, Response, StatusCode};

use crate::config;
use crate::config::error::Issue;
use crate::config::shorthand::{self, Respond, UpstreamWeights};
use crate::config::spanned::{Spanned, Text};
use crate::http::body::Body;
use crate::http::target::{PathError, PathPolicy, canonical_path, forwarded_path, request_host};
use crate::http::url::{HttpUrl, UrlError};
use crate::payload::llm::request::MAX_MODEL;
use crate::routing::pattern::{PathPattern, RewriteTemplate};

use crate::snapshot::upstreams::host_policy;
use crate::snapshot::validator::Validator;
use crate::upstream::connector::Protocol;
use crate::upstream::settings::{HostPolicy, UpstreamSettings};

/// Maximum weight of an upstream.
const MAX_WEIGHT: i64 = 1_000_000;

/// Status codes for which clients follow `Location` automatically (RFC 9110 §15.4).
const REDIRECT_STATUSES: [i64; 5] = [301, 302, 303, 307, 308];

/// The action of a route.
#[derive(Debug)]
pub enum RouteAction {
    /// Forward to one of the upstreams.
    Forward(WeightedUpstreams),
    /// Send a fixed response, without an upstream.
    DirectResponse(DirectResponse),
    /// Send whether load balancers should send requests to this gateway.
    Readiness,
    /// Redirect the client.
    Redirect(Redirect),
}

/// Change of the path before the request is forwarded.
#[derive(Debug)]
pub enum Rewrite {
    /// Remove this prefix from the path.
    StripPrefix(Box<str>),
    /// Replace the path with an expanded template.
    Template(RewriteTemplate),
}

/// Models that replace the models with these names in requests to LLM APIs.
pub type ModelAliases = BTreeMap<Box<str>, Box<str>>;

/// Compile `model_aliases`. `counts_tokens` is true if a limit of the route counts LLM tokens.
pub(super) fn model_aliases(
    written: &BTreeMap<String, Text>,
    counts_tokens: bool,
    reader: &mut Validator<'_>,
) -> ModelAliases {
    for name in written.values() {
        if !counts_tokens {
            reader.push_missing(Issue::new(name.span(), "`model_aliases` requires a limit with `cost.llm`"));
        }
        if name.get_ref().is_empty() || name.get_ref().len() > MAX_MODEL {
            let issue = Issue::new(name.span(), format!("the name of a model must have 1 to {MAX_MODEL} bytes"));
            reader.push_issue(issue.with_hint("model_aliases = { fast = \"gpt-5-mini\" }"));
        }
    }
    written.iter().map(|(alias, name)| (alias.as_str().into(), name.get_ref().as_str().into())).collect()
}

/// A redirect.
#[derive(Debug)]
pub struct Redirect {
    /// The target of the redirect.
    pub to: RedirectTarget,
    /// Status of the response.
    pub status: StatusCode,
}

/// The target of a redirect.
#[derive(Debug)]
pub enum RedirectTarget {
    /// Another path, or a URL, from a template.
    Template {
        /// Scheme and host. Empty if the redirect is relative to the request.
        origin: Box<str>,
        /// Path and query of the target.
        template: RewriteTemplate,
    },
    /// A URL with the host, path and query of the request, but another scheme or port.
    Scheme {
        /// `http` or `https`.
        scheme: &'static str,
        /// The port. `None` for the default port of the scheme.
        port: Option<u16>,
    },
    /// The path of the request with the trailing slash added or removed.
    OtherSlash,
}

/// A fixed response that the gateway sends without an upstream.
#[derive(Debug)]
pub struct DirectResponse {
    /// Status of the response.
    pub status: StatusCode,
    /// Body of the response.
    pub body: Bytes,
    /// Content type of the body.
    pub content_type: HeaderValue,
}

impl DirectResponse {
    /// Return the response that tells load balancers whether the gateway is ready.
    pub fn readiness(is_ready: bool) -> DirectResponse {
        let (status, body) = match is_ready {
            true => (StatusCode::OK, "ready\n"),
            false => (StatusCode::SERVICE_UNAVAILABLE, "not ready\n"),
        };
        let content_type = HeaderValue::from_static("text/plain; charset=utf-8");
        DirectResponse { status, body: Bytes::from_static(body.as_bytes()), content_type }
    }

    /// Return the response to a request of the route.
    pub fn response(&self) -> Response<Body> {
        let mut response = Response::new(Body::full(self.body.clone()));
        *response.status_mut() = self.status;
        // Responses with these statuses have no content, and therefore no content type (RFC 9110 §15.3.5, §15.3.6,
        // §15.4.5).
        if !matches!(self.status, StatusCode::NO_CONTENT | StatusCode::RESET_CONTENT | StatusCode::NOT_MODIFIED) {
            response.headers_mut().insert(CONTENT_TYPE, self.content_type.clone());
        }
        response
    }
}

impl Redirect {
    /// Return the redirect for a request. `path` is the path of the request in its forwarded form. Browsers cannot
    /// mistake a part of the location's path for a host name, because this path and expanded templates never contain
    /// `//` or a backslash.
    ///
    /// # Errors
    /// The location needs a host, but the request has none. Or the named groups of a regular expression result in a
    /// path that is not canonical.
    pub fn response<B>(
        &self,
        request: &Request<B>,
        pattern: &PathPattern,
        path: &str,
    ) -> Result<Response<Body>, RedirectError> {
        let query = request.uri().query();
        let (mut location, target) = match &self.to {
            RedirectTarget::Template { origin, template } => {
                (origin.to_string(), expanded(template, pattern, path, query).map_err(RedirectError::Path)?)
            }
            RedirectTarget::Scheme { scheme, port } => {
                // The host is valid, because it was checked before routing. It contains no port and no user name.
                let host = request_host(request.uri(), request.headers(), request.version());
                let host = host.map_err(RedirectError::Host)?;
                if host.is_empty() {
                    return Err(RedirectError::Host("the request has no Host"));
                }
                let port = port.map(|port| format!(":{port}")).unwrap_or_default();
                (format!("{scheme}://{host}{port}"), with_query(path, query))
            }
            RedirectTarget::OtherSlash => {
                let other = path.strip_suffix('/').map_or_else(|| format!("{path}/"), str::to_owned);
                (String::new(), with_query(&other, query))
            }
        };
        for byte in target.bytes() {
            // Percent-encode characters that are not valid in URIs (RFC 3986 §2). Clients may send them in queries.
            if byte.is_ascii_graphic() && !b"\"<>\\^`{|}".contains(&byte) {
                location.push(char::from(byte));
            } else {
                // Writing to a string cannot fail.
                let _ = write!(location, "%{byte:02X}");
            }
        }
        let mut response = Response::new(Body::full(""));
        *response.status_mut() = self.status;
        // All characters are graphic ASCII characters, so the conversion cannot fail.
        response.headers_mut().extend(HeaderValue::try_from(location).ok().map(|location| (LOCATION, location)));
        Ok(response)
    }
}

fn with_query(path: &str, query: Option<&str>) -> String {
    query.map_or_else(|| path.to_owned(), |query| format!("{path}?{query}"))
}

/// Return the path from which to extract the parameters. A regular expression matches the canonical path, whose
/// delimiters are encoded differently from those in the forwarded path. Both paths have the same segments.
fn captured_path<'p>(pattern: &PathPattern, path: &'p str) -> Cow<'p, str> {
    if pattern.is_regex() {
        canonical_path(path, PathPolicy::of_derived(path)).unwrap_or(Cow::Borrowed(path))
    } else {
        Cow::Borrowed(path)
    }
}

/// Why a request cannot be redirected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RedirectError {
    /// The host of the request is missing or malformed. Contains the problem detail.
    Host(&'static str),
    /// The path of the location would not be canonical.
    Path(PathError),
}

/// Expand a template for a path in its forwarded form. The pattern must match this path.
fn expanded(
    template: &RewriteTemplate,
    pattern: &PathPattern,
    path: &str,
    query: Option<&str>,
) -> Result<String, PathError> {
    let policy = PathPolicy::of_derived(path);
    if !pattern.is_regex() {
        return with_one_leading_slash(template.expand(pattern, path, query), path);
    }
    let target = with_one_leading_slash(template.expand(pattern, &captured_path(pattern, path), query), path)?;
    let path = target.split('?').next().unwrap_or_default();
    if forwarded_path(path, policy)? == path { Ok(target) } else { Err(PathError::NotCanonical) }
}

/// Merge slashes at the start of a target that was formed from `path`, because browsers and servers read `//host` as a
/// host.
///
/// # Errors
/// The slashes may come from `path`, whose double slashes are kept. If they were merged, the upstream would get another
/// path than the one that routes and limits have seen.
fn with_one_leading_slash(mut target: String, path: &str) -> Result<String, PathError> {
    let extra = target.bytes().take_while(|byte| *byte == b'/').count().saturating_sub(1);
    if extra > 0 && path.contains("//") {
        return Err(PathError::NotCanonical);
    }
    target.drain(..extra);
    Ok(target)
}

impl Rewrite {
    /// Return the request target for the upstream. `path` is the path of the request in its forwarded form, and must
    /// match the pattern.
    ///
    /// # Errors
    /// The named groups of a regular expression result in a path that is not canonical, for example with dot segments.
    /// Parameters of a path pattern are whole segments, so they always result in a canonical path.
    pub fn apply(&self, pattern: &PathPattern, path: &str, query: Option<&str>) -> Result<String, PathError> {
        match self {
            Rewrite::Template(template) => expanded(template, pattern, path, query),
            Rewrite::StripPrefix(prefix) => {
                // Count segments instead of bytes, because the forwarded path may percent-encode characters that are
                // literal in the prefix.
                let end = path.match_indices('/').nth(prefix.matches('/').count()).map_or(path.len(), |(at, _)| at);
                with_one_leading_slash(with_query(if end == path.len() { "/" } else { &path[end..] }, query), path)
            }
        }
    }
}

/// Compile the action of a route. A route must have exactly one action.
pub(super) fn route_action(
    route: &config::tables::Route,
    span: &Range<usize>,
    path: Option<&PathPattern>,
    upstreams: &[UpstreamSettings],
    reader: &mut Validator<'_>,
) -> Option<RouteAction> {
    let written = [
        route.upstream.as_ref().map(|upstream| upstream.span()),
        route.respond.as_ref().map(|direct_response| direct_response.span()),
        route.redirect.as_ref().map(|redirect| redirect.span()),
    ];
    if let Some(second) = written.into_iter().flatten().nth(1) {
        let issue = Issue::new(second, "this route has two actions");
        reader.push_issue(issue.with_hint("keep only one of `upstream`, `respond` and `redirect`"));
        return None;
    }
    if let Some(shares) = &route.upstream {
        return weighted_upstreams(shares.get_ref(), &shares.span(), upstreams, reader).map(RouteAction::Forward);
    }
    if let Some(respond) = &route.respond {
        return respond_action(respond, reader);
    }
    if let Some(redirect) = &route.redirect {
        return self::redirect(redirect.get_ref(), &redirect.span(), path, reader).map(RouteAction::Redirect);
    }
    let issue = Issue::new(span.clone(), "this route has no action");
    let hint = "set upstream = \"NAME\", respond = { status = 200, body = \"…\" } or redirect = { to = \"/…\" }";
    reader.push_missing(issue.with_hint(hint));
    None
}

/// Return the indices of the upstreams that a route refers to. Skip unknown names, which are reported elsewhere.
pub(super) fn upstream_indices(shares: &UpstreamWeights, upstreams: &[UpstreamSettings]) -> Vec<usize> {
    let index = |name: &str| upstreams.iter().position(|upstream| *upstream.name == *name);
    match shares {
        UpstreamWeights::Single(name) => index(name).into_iter().collect(),
        UpstreamWeights::Weighted(weights) => weights.keys().filter_map(|name| index(name)).collect(),
    }
}

fn weighted_upstreams(
    shares: &UpstreamWeights,
    span: &Range<usize>,
    upstreams: &[UpstreamSettings],
    reader: &mut Validator<'_>,
) -> Option<WeightedUpstreams> {
    let find = |name: &str, span: Range<usize>, reader: &mut Validator<'_>| {
        let found = upstreams.iter().position(|upstream| *upstream.name == *name);
        if found.is_none() && name.contains([':', '/']) {
            let issue = Issue::new(span, "`upstream` is the name of an upstream, not a URL");
            reader.push_issue(issue.with_hint(
                "define [upstream.NAME] with servers = [\"http://HOST:PORT\"], and write upstream = \"NAME\"",
            ));
        } else if found.is_none() {
            reader.unknown_name(span, "upstream", name, upstreams.iter().map(|upstream| &*upstream.name));
        }
        found
    };
    let weights = match shares {
        UpstreamWeights::Single(name) => return WeightedUpstreams::new([(find(name, span.clone(), reader)?, 1)]),
        UpstreamWeights::Weighted(weights) => weights,
    };
    let mut known = Vec::new();
    for (name, weight) in weights {
        let index = find(name, weight.span(), reader);
        let weight = reader.number(Some(weight), 0..MAX_WEIGHT + 1, 1) as u32;
        known.extend(index.map(|index| (index, weight)));
    }
    if weights.values().all(|weight| *weight.get_ref() == 0) {
        let issue = Issue::new(span.clone(), "all upstreams have weight 0");
        reader.push_missing(issue.with_hint("{ api = 9, canary = 1 } sends nine of ten requests to `api`"));
    }
    WeightedUpstreams::new(known)
}

fn respond_action(respond: &Spanned<Respond>, reader: &mut Validator<'_>) -> Option<RouteAction> {
    match respond.get_ref() {
        Respond::Named(name) if name == "readiness" => Some(RouteAction::Readiness),
        Respond::Named(name) => {
            let issue = Issue::new(respond.span(), format!("unknown response `{name}`"));
            reader.push_issue(issue.with_hint("write respond = { status = 200, body = \"…\" } or \"readiness\""));
            None
        }
        Respond::Fixed(fixed) => Some(RouteAction::DirectResponse(direct_response(fixed, &respond.span(), reader))),
    }
}

fn direct_response(
    direct_response: &shorthand::DirectResponse,
    span: &Range<usize>,
    reader: &mut Validator<'_>,
) -> DirectResponse {
    let status = match reader.required(direct_response.status.as_ref(), span, "status", "200") {
        Some(status) => reader.number(Some(status), 200..600, 200),
        None => 200,
    };
    let text = HeaderValue::from_static("text/plain; charset=utf-8");
    DirectResponse {
        status: StatusCode::from_u16(status as u16).unwrap_or(StatusCode::OK),
        body: direct_response.body.as_ref().map_or_else(Bytes::new, |body| Bytes::from(body.get_ref().clone())),
        content_type: direct_response.content_type.as_ref().and_then(|kind| reader.header_value(kind)).unwrap_or(text),
    }
}

fn redirect(
    redirect: &config::tables::Redirect,
    span: &Range<usize>,
    path: Option<&PathPattern>,
    reader: &mut Validator<'_>,
) -> Option<Redirect> {
    let status = redirect.status.as_ref().map_or(308, |status| {
        if !REDIRECT_STATUSES.contains(status.get_ref()) {
            let issue = Issue::new(status.span(), format!("{} is not a redirect status", status.get_ref()));
            reader.push_issue(issue.with_hint(
                "use 308 or 301 (permanent), 307 or 302 (temporary), or 303 (the client sends GET to another URL)",
            ));
        }
        *status.get_ref()
    });
    // The fallback replaces only statuses that were reported above, so it is never used in a valid configuration.
    let status = StatusCode::from_u16(status as u16).unwrap_or(StatusCode::PERMANENT_REDIRECT);
    let to = match (&redirect.to, &redirect.scheme) {
        (Some(to), None) => {
            if let Some(port) = &redirect.port {
                let issue = Issue::new(port.span(), "`port` requires `scheme`");
                reader.push_missing(issue.with_hint("write the port in `to`: \"https://www.example.com:8443/{rest}\""));
            }
            redirect_template(to, path, reader)?
        }
        (None, Some(scheme)) => redirect_scheme(scheme, redirect.port.as_ref(), reader),
        (to, scheme) => {
            let message = match (to, scheme) {
                (None, _) => "this redirect has no target",
                (Some(_), _) => "`to` and `scheme` cannot be combined",
            };
            let hint = "set either to = \"/v1/{rest}\", or scheme = \"https\" for the same host, path and query";
            let issue = Issue::new(scheme.as_ref().map_or(span.clone(), |text| text.span()), message);
            reader.push_missing(issue.with_hint(hint));
            return None;
        }
    };
    Some(Redirect { to, status })
}

/// Compile `scheme` and `port` of a redirect.
fn redirect_scheme(scheme: &Text, port: Option<&Spanned<i64>>, reader: &mut Validator<'_>) -> RedirectTarget {
    let variants = [("http", ("http", 80)), ("https", ("https", 443))];
    let (scheme, default_port) = reader.one_of(Some(scheme), ("https", 443), &variants);
    let port = reader.number(port, 1..65_536, default_port);
    RedirectTarget::Scheme { scheme, port: (port != default_port).then_some(port as u16) }
}

/// Compile `to` of a redirect.
fn redirect_template(to: &Text, path: Option<&PathPattern>, reader: &mut Validator<'_>) -> Option<RedirectTarget> {
    let Some((origin, target)) = split_origin(to.get_ref()) else {
        let issue = Issue::new(to.span(), format!("`{}` is neither a path nor a valid URL", to.get_ref()));
        reader.push_issue(
            issue.with_hint("\"/v1/{rest}\" or \"https://www.example.com/{rest}\", without parameters in the host"),
        );
        return None;
    };
    if !origin.is_empty()
        && let Err(error) = HttpUrl::parse_origin(origin)
    {
        // `/`, `?` or `#` in a password ends the host early.
        let error = if to.get_ref().contains('@') { UrlError::UserInfo } else { error };
        let example = "\"https://www.example.com/{rest}\"";
        reader.invalid_url(to.span(), &error, example, "clients authenticate themselves");
        return None;
    }
    let target = match target {
        "" => "/".to_owned(),
        query if query.starts_with('?') => format!("/{query}"),
        target => target.to_owned(),
    };
    let template = rewrite_template(&target, &to.span(), path, reader)?;
    Some(RedirectTarget::Template { origin: origin.into(), template })
}

/// Split a redirect target into its origin and the rest. The origin is the scheme and host, and may be empty.
fn split_origin(to: &str) -> Option<(&str, &str)> {
    let Some((scheme, rest)) = to.split_once("://").filter(|(scheme, _)| matches!(*scheme, "http" | "https")) else {
        // Reject a path that starts with two slashes, because browsers interpret the text after them as a host name.
        return (to.starts_with('/') && !to.starts_with("//")).then_some(("", to));
    };
    let host = rest.split(['/', '?', '#']).next().unwrap_or_default();
    (!host.contains(['{', '}'])).then(|| to.split_at(scheme.len() + "://".len() + host.len()))
}

/// Compile `strip_prefix` or `rewrite`.
pub(super) fn rewrite(
    route: &config::tables::Route,
    path: Option<&PathPattern>,
    reader: &mut Validator<'_>,
) -> Option<Rewrite> {
    let written = route.strip_prefix.as_ref().or(route.rewrite.as_ref())?;
    if route.upstream.is_none() {
        let issue = Issue::new(written.span(), "`strip_prefix` and `rewrite` require an upstream");
        reader.push_missing(issue.with_hint("remove this key, because `redirect` has its own path"));
    }
    if let (Some(_), Some(rewrite)) = (&route.strip_prefix, &route.rewrite) {
        let issue = Issue::new(rewrite.span(), "`strip_prefix` and `rewrite` cannot be combined");
        reader.push_issue(issue.with_hint("keep one of them"));
    }
    match &route.strip_prefix {
        Some(prefix) => strip_prefix(prefix, path, reader),
        None => rewrite_template(written.get_ref(), &written.span(), path, reader).map(Rewrite::Template),
    }
}

fn strip_prefix(prefix: &Text, path: Option<&PathPattern>, reader: &mut Validator<'_>) -> Option<Rewrite> {
    let text = prefix.get_ref().as_str();
    let fault = if !text.starts_with('/') {
        Some(("a prefix starts with `/`".to_owned(), format!("\"/{text}\"")))
    } else if text.ends_with('/') {
        let shorter = text.trim_end_matches('/');
        let hint = if shorter.is_empty() { "remove `strip_prefix`".to_owned() } else { format!("\"{shorter}\"") };
        Some(("a prefix must not end with `/`".to_owned(), hint))
    } else if path.is_some_and(PathPattern::is_regex) {
        let hint = "`rewrite` with a named group: path_regex = '/v1/(?<rest>.*)' and rewrite = \"/{rest}\"";
        Some(("`strip_prefix` requires `path`".to_owned(), hint.to_owned()))
    } else if path.is_some_and(|path| !path.has_prefix(text)) {
        let hint = "write whole segments with which `path` begins, or use `rewrite = \"/{rest}\"`";
        Some((format!("not all paths of this route begin with `{text}`"), hint.to_owned()))
    } else {
        None
    };
    match fault {
        None => Some(Rewrite::StripPrefix(text.into())),
        Some((message, hint)) => {
            reader.push_issue(Issue::new(prefix.span(), message).with_hint(hint));
            None
        }
    }
}

/// Parse a template, and check that it expands to a canonical path for all values of its parameters.
pub(super) fn rewrite_template(
    text: &str,
    span: &Range<usize>,
    path: Option<&PathPattern>,
    reader: &mut Validator<'_>,
) -> Option<RewriteTemplate> {
    let template: RewriteTemplate = match text.parse() {
        Ok(template) => template,
        Err(error) => {
            let hint = "write a path such as \"/internal/{rest}\", with parameters of the route's `path`";
            reader.push_issue(Issue::new(span.clone(), format!("{error}")).with_hint(hint));
            return None;
        }
    };
    // Replace each parameter with `~`. It is not a hexadecimal digit, so it cannot complete a percent-encoded byte of
    // the template.
    let (plain, query) = template.fill("~");
    match forwarded_path(&plain, PathPolicy::Canonical) {
        Ok(same) if same == plain => {}
        Ok(_) => {
            // The hint does not show the canonical form, because `~` replaces the parameters in it.
            let issue = Issue::new(span.clone(), format!("`{text}` is not in canonical form"));
            reader.push_issue(issue.with_hint(
                "no `.` or `..` segments and no `//`; only characters that a path may not contain are \
                 percent-encoded, in upper case: `%C3%A9` for `é`",
            ));
        }
        Err(error) => reader.push_issue(Issue::new(span.clone(), error.to_string())),
    }
    if let Some(query) = query
        && PathAndQuery::try_from(format!("/?{query}")).is_err()
    {
        reader.push_issue(Issue::new(span.clone(), format!("`{query}` is not a valid query")));
    }
    let path = path?;
    for name in template.parameters().filter(|name| !path.has_parameter(name)) {
        reader.unknown_name(span.clone(), "parameter", name, path.parameter_names());
    }
    if let Some(rest) = path.rest_parameter().filter(|rest| !template.has_whole_segments(rest)) {
        let message =
            format!("`{{{rest}}}` may be empty or contain several segments: it must be between slashes or at the end");
        reader.push_issue(Issue::new(span.clone(), message).with_hint(format!("\"/internal/{{{rest}}}\"")));
    }
    Some(template)
}

/// Compile `websocket`.
pub(super) fn websocket(
    route: &config::tables::Route,
    upstreams: &[UpstreamSettings],
    reader: &mut Validator<'_>,
) -> bool {
    let Some(value) = route.websocket.as_ref().filter(|wanted| *wanted.get_ref()) else { return false };
    let targets = route.upstream.as_ref().map(|shares| upstream_indices(shares.get_ref(), upstreams));
    let fault = match targets {
        None if route.respond.is_some() || route.redirect.is_some() => Some("`websocket` requires an upstream"),
        Some(targets) if targets.iter().any(|index| upstreams[*index].protocol == Protocol::Http2) => {
            Some("HTTP/2 upstreams do not support protocol upgrades")
        }
        _ => None,
    };
    if let Some(fault) = fault {
        let issue = Issue::new(value.span(), fault);
        reader.push_issue(issue.with_hint("use `websocket` only on routes to upstreams with protocol \"http1\""));
    }
    true
}

// Weighted selection of upstreams.

/// The fractional part of the golden ratio, times 2^64. Its multiples modulo 2^64 are evenly distributed (Weyl, 1916).
/// This is also true for each range of consecutive multiples, and for every n-th multiple. If a client sends every n-th
/// request, its requests are therefore not all sent to the same upstream.
pub(super) const GOLDEN_RATIO: u64 = 0x9e37_79b9_7f4a_7c15;

/// Distributes the requests of a route among upstreams by weight.
#[derive(Debug)]
pub struct WeightedUpstreams {
    /// For each upstream, the sum of the weights up to and including this upstream, and its index. Upstreams with
    /// weight 0 are omitted.
    cumulative_weights: Vec<(u64, usize)>,
    /// Sum of all weights.
    total_weight: u64,
    /// Number of requests so far, counted over all workers.
    counter: AtomicU64,
}

impl WeightedUpstreams {
    /// Create the weighted selection from upstream indices and weights. Return `None` if all weights are 0.
    pub fn new(weights: impl IntoIterator<Item = (usize, u32)>) -> Option<Self> {
        let mut sum = 0;
        let weights = weights.into_iter().filter(|(_, weight)| *weight > 0);
        let shares: Vec<_> = weights
            .map(|(upstream, weight)| {
                sum += u64::from(weight);
                (sum, upstream)
            })
            .collect();
        (!shares.is_empty()).then(|| WeightedUpstreams {
            cumulative_weights: shares,
            total_weight: sum,
            counter: AtomicU64::new(0),
        })
    }

    /// Return the indices of the upstreams with a weight above 0.
    pub fn upstreams(&self) -> impl Iterator<Item = usize> {
        self.cumulative_weights.iter().map(|(_, upstream)| *upstream)
    }

    /// Return the index of the upstream for the next request.
    pub fn pick(&self) -> usize {
        if let [(_, only)] = self.cumulative_weights[..] {
            return only;
        }
        let number = self.counter.fetch_add(1, Ordering::Relaxed).wrapping_mul(GOLDEN_RATIO);
        // Scale the number from 0..2^64 to 0..total_weight.
        let position = ((u128::from(number) * u128::from(self.total_weight)) >> 64) as u64;
        let index = self.cumulative_weights.partition_point(|(end, _)| *end <= position);
        self.cumulative_weights[index].1
    }
}

// === Mirroring: which requests are copied, and to which upstream ===

/// `server.max_buffered` divided by this number is the maximum memory for the bodies of all copies. This memory is in
/// addition to `server.max_buffered`.
pub const BUFFER_DIVISOR: usize = 4;

/// `mirror` of a route.
#[derive(Debug)]
pub struct Mirror {
    /// Index of the upstream that receives the copies.
    pub upstream: usize,
    /// Percentage of requests to copy.
    pub percent: f64,
    /// Maximum size in bytes of the body of a copied request.
    pub max_body: usize,
    /// Maximum number of copies in flight per worker.
    pub max_in_flight: usize,
    /// `percent` scaled from 0..100 to 0..2^64.
    share: u128,
    /// Number of requests so far, counted over all workers.
    counter: AtomicU64,
}

impl Mirror {
    fn new(upstream: usize, percent: f64, max_body: usize, max_in_flight: usize) -> Self {
        // 100 % gives exactly 2^64: multiplying by a power of two does not round.
        let share = (percent / 100.0 * 2.0_f64.powi(64)) as u128;
        Mirror { upstream, percent, max_body, max_in_flight, share, counter: AtomicU64::new(0) }
    }

    /// Return whether to copy the next request. Copied requests are evenly distributed over all requests, as in
    /// [`WeightedUpstreams`].
    pub fn picks_next(&self) -> bool {
        u128::from(self.counter.fetch_add(1, Ordering::Relaxed).wrapping_mul(GOLDEN_RATIO)) < self.share
    }
}

/// Compile `upstream_host` of a route.
pub(super) fn upstream_host(route: &config::tables::Route, reader: &mut Validator<'_>) -> Option<HostPolicy> {
    let text = route.upstream_host.as_ref()?;
    if route.upstream.is_none() {
        reader.push_missing(Issue::new(text.span(), "`upstream_host` requires an upstream"));
    }
    Some(host_policy(text, reader))
}

/// Compile `mirror` of a route.
pub(super) fn mirror(
    route: &config::tables::Route,
    upstreams: &[UpstreamSettings],
    reader: &mut Validator<'_>,
) -> Option<Mirror> {
    let written = route.mirror.as_ref()?;
    let span = written.span();
    let mirror = written.get_ref();
    if route.upstream.is_none() {
        let issue = Issue::new(span.clone(), "`mirror` requires an upstream");
        reader
            .push_missing(issue.with_hint(
                "only forwarded requests are mirrored: remove `mirror`, or set an `upstream` for the route",
            ));
    }
    let percent = reader.fraction(mirror.percent.as_ref(), 0..=100, 100.0);
    let max_body = reader.size_or_off(mirror.max_body.as_ref(), 64 << 10);
    let max_in_flight = reader.number(mirror.max_in_flight.as_ref(), 1..100_001, 100) as usize;
    let name = reader.required(mirror.upstream.as_ref(), &span, "upstream", "\"next\"")?;
    let index = upstreams.iter().position(|upstream| *upstream.name == **name.get_ref());
    if index.is_none() {
        let known = upstreams.iter().map(|upstream| &*upstream.name);
        reader.unknown_name(name.span(), "upstream", name.get_ref(), known);
    }
    Some(Mirror::new(index?, percent, max_body, max_in_flight))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_split_by_weight_at_any_time() {
        for weights in [&[9, 1][..], &[1, 1], &[1, 0, 3], &[99, 1], &[1, 2, 3, 4], &[0, 5], &[1_000_000, 1], &[7, 7, 7]]
        {
            let split = WeightedUpstreams::new(weights.iter().copied().enumerate()).unwrap();
            let sum: u32 = weights.iter().sum();
            let mut counts = vec![0_u32; weights.len()];
            for picked in 1..=10_000 {
                counts[split.pick()] += 1;
                for (index, weight) in weights.iter().enumerate() {
                    let due = f64::from(picked) * f64::from(*weight) / f64::from(sum);
                    let off = (f64::from(counts[index]) - due).abs();
                    // After any number of requests, the count must differ by at most 4 from the share of the upstream.
                    assert!(off <= 4.0, "{weights:?}: {} of {picked} to {index}, due {due:.1}", counts[index]);
                    assert!(*weight > 0 || counts[index] == 0, "{weights:?}: the upstream {index} has weight 0");
                }
            }
        }
        assert!(WeightedUpstreams::new([(0, 0)]).is_none() && WeightedUpstreams::new([]).is_none());
    }

    #[test]
    fn periodic_requests_are_split_by_weight() {
        let split = WeightedUpstreams::new([(0, 9), (1, 1)]).unwrap();
        for period in 2..=20 {
            let canary = (0..period * 1000).filter(|index| split.pick() == 1 && index % period == 0).count();
            assert!((80..=120).contains(&canary), "every {period}th request: {canary} of 1000");
        }
    }

    #[test]
    fn copies_are_the_percentage_at_any_time() {
        for percent in [0.0, 0.01, 0.1, 1.0, 10.0, 33.3, 50.0, 99.9, 100.0] {
            let mirror = Mirror::new(0, percent, 0, 1);
            let mut copies = 0_u32;
            for requests in 1..=10_000 {
                copies += u32::from(mirror.picks_next());
                let due = f64::from(requests) * percent / 100.0;
                assert!((f64::from(copies) - due).abs() <= 4.0, "{percent} %: {copies} of {requests}, due {due:.1}");
            }
            assert!(percent > 0.0 || copies == 0, "with 0 %, no request is copied");
            assert!(percent < 100.0 || copies == 10_000, "with 100 %, all requests are copied");
        }
    }
}
