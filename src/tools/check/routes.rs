//! Warnings that depend on the routes of sample requests: redirect loops, alternative spellings of a path that evade
//! the limits of its route, and requests that evade a route's `require`.

use http::header::{HOST, LOCATION};
use http::{HeaderMap, HeaderValue, Method, Request, Uri};

use crate::config;
use crate::config::error::Issue;
use crate::config::spanned::Text;
use crate::http::target::canonical_host;
use crate::payload::json::body::{JsonBody, text_value};
use crate::routing::RouteRequest;
use crate::routing::condition::{Condition, ConditionSource, RouteBody, ValueTest};
use crate::routing::explain::Candidate;
use crate::snapshot::CompiledConfig;
use crate::snapshot::route_action::{RedirectTarget, RouteAction};
use crate::snapshot::routes::Route;
use crate::tools::check::LintInput;

/// The host of sample requests for routes without `hosts`. The top-level domain `invalid` is reserved, so no host has
/// this name (RFC 6761 §6.4).
const ANY_HOST: &str = "host.invalid";

pub(super) type RouteCandidate<'r> = Candidate<'r, std::sync::Arc<Route>>;

/// Warn of redirects to a location that matches the route of the redirect itself.
pub(super) fn redirect_loops(input: &LintInput<'_>) -> Vec<Issue> {
    let mut issues = Vec::new();
    for candidates in candidates_by_route(input.config) {
        let Some(candidate) = candidates.first() else { continue };
        let route = &**candidate.target;
        let RouteAction::Redirect(redirect) = &route.action else { continue };
        let Some(written) = input.route(route.index).and_then(|parsed| parsed.get_ref().redirect.as_ref()) else {
            continue;
        };
        let lint = match &redirect.to {
            RedirectTarget::OtherSlash => None,
            _ if candidates.iter().any(|candidate| leads_to_itself(input.config, candidate)) => Some(loop_issue(route)),
            RedirectTarget::Scheme { scheme: "https", .. } if is_behind_tls_proxy(input, candidate) => {
                let message = format!(
                    "`{}` redirects every request: a proxy in front that terminates TLS forwards them over http again",
                    route.name
                );
                let hint = "set match = { headers = { x-forwarded-proto = { exact = \"http\" } } } to redirect only \
                            requests that the proxy received over http";
                Some((message, hint.to_owned()))
            }
            RedirectTarget::Scheme { .. } | RedirectTarget::Template { .. } => None,
        };
        issues.extend(lint.map(|(message, hint)| Issue::new(written.span(), message).with_hint(hint)));
    }
    issues
}

fn loop_issue(route: &Route) -> (String, String) {
    let message = format!(
        "`{}` redirects to a request that matches it again: clients follow the redirects until they reach their \
         maximum",
        route.name
    );
    let is_scheme_redirect = matches!(
        &route.action,
        RouteAction::Redirect(redirect) if matches!(redirect.to, RedirectTarget::Scheme { .. })
    );
    let hint = match is_scheme_redirect {
        true => "list only the other listeners in listeners = [\"…\"], by the `name` of each [[listener]]",
        false => "redirect to a path or host that another route matches",
    };
    (message, hint.to_owned())
}

/// Return whether all requests of a route probably come through a proxy that terminates TLS. The answer is yes if there
/// are trusted proxies, no listener has TLS, and the route has no conditions and no `listeners`.
fn is_behind_tls_proxy(input: &LintInput<'_>, candidate: &RouteCandidate<'_>) -> bool {
    let has_proxies = !input.config.client_ip.trusted_proxies.is_empty();
    let no_tls = input.config.listeners.iter().all(|listener| listener.tls.is_none());
    has_proxies && no_tls && candidate.conditions.is_empty() && candidate.listeners.is_empty()
}

/// Return whether a client that follows the redirect reaches the same route.
fn leads_to_itself(config: &CompiledConfig, candidate: &RouteCandidate<'_>) -> bool {
    let route = candidate.target;
    let (Some(sample), Some(path)) = (Sample::new(candidate), route.path_pattern.sample("x")) else { return false };
    let RouteAction::Redirect(redirect) = &route.action else { return false };
    let listeners = || (0..config.listeners.len()).filter(|index| includes(candidate.listeners, *index));
    listeners().any(|listener| {
        let Some(request) = sample.with_path(&path) else { return false };
        let is_found = |host: &str, request: &Request<JsonBody>, listener: usize| {
            find(config, host, request, listener).is_some_and(|found| found.index == route.index)
        };
        if !is_found(&sample.host, &request, listener) {
            // Another route takes precedence for this request, so the request does not get the redirect.
            return false;
        }
        let Ok(response) = redirect.response(&request, &route.path_pattern, &path) else { return false };
        let location = response.headers().get(LOCATION).and_then(|location| location.to_str().ok());
        let Some(location) = location.and_then(|location| location.parse::<Uri>().ok()) else { return false };
        let host = location.host().map_or(sample.host.clone(), |host| canonical_host(host).into_owned());
        let Some(target) = location.path_and_query().cloned() else { return false };
        let mut next = request;
        *next.uri_mut() = Uri::from(target);
        next_listeners(config, &location, listener).iter().any(|listener| is_found(&host, &next, *listener))
    })
}

/// Return the listeners to which a client may connect when it follows a redirect to `location`.
fn next_listeners(config: &CompiledConfig, location: &Uri, current: usize) -> Vec<usize> {
    let Some(scheme) = location.scheme_str() else { return vec![current] };
    let default_port = if scheme == "https" { 443 } else { 80 };
    let port = location.port_u16().unwrap_or(default_port);
    let of_scheme = |index: &usize| config.listeners[*index].tls.is_some() == (scheme == "https");
    let mut listeners: Vec<_> = (0..config.listeners.len()).filter(of_scheme).collect();
    let has_port = |index: &usize| config.listeners[*index].address.tcp().is_some_and(|address| address.port() == port);
    // If the location has no port and no listener has the default port, return all listeners with the scheme. A packet
    // filter or container runtime probably maps the default port to one of them.
    if location.port().is_some() || listeners.iter().any(has_port) {
        listeners.retain(has_port);
    }
    listeners
}

/// Warn of a route with a literal path that has limits or `require`, if another spelling of the path matches a route to
/// the same upstream that lacks this protection.
pub(super) fn unlimited_spellings(input: &LintInput<'_>) -> Vec<Issue> {
    candidates_by_route(input.config).filter_map(|candidates| unlimited_spelling(input, &candidates)).collect()
}

fn unlimited_spelling(input: &LintInput<'_>, candidates: &[RouteCandidate<'_>]) -> Option<Issue> {
    let route = &**candidates.first()?.target;
    if !route.path_pattern.is_literal() || protections(route).next().is_none() {
        return None;
    }
    let path = route.path_pattern.sample("")?;
    let plain = path.trim_end_matches('/');
    let other_slash = if plain == path { format!("{path}/") } else { plain.to_owned() };
    let mut spellings = vec![other_slash, format!("{plain};x")];
    spellings.retain(|spelling| *spelling != path && !plain.is_empty());
    let evades = |spelling: String| {
        let mut found = candidates.iter().flat_map(|candidate| found_routes(input.config, candidate, &spelling));
        let (other, missing) = found.find_map(|other| Some((other, unprotected_by(route, other)?)))?;
        Some((spelling, other, missing))
    };
    let mut evading: Vec<_> = spellings.into_iter().filter_map(evades).collect();
    // One spelling in upper case is enough.
    evading.extend(upper_case_spellings(&path).find_map(evades));
    let (_, other, missing) = evading.first()?;
    let same = evading.iter().filter(|(_, found, _)| found.index == other.index);
    let spellings: Vec<_> = same.map(|(spelling, ..)| format!("`{spelling}`")).collect();
    let (missing, elsewhere) = match *missing {
        Protection::Limit(name) => {
            (format!("has no limit `{name}`"), format!("add `{name}` to the `limits` of `{}` as well", other.name))
        }
        Protection::Credential => {
            ("needs no credential".to_owned(), format!("set `require` of `{}` as well", other.name))
        }
    };
    let message = format!(
        "{} match the route `{}` on the same upstream, and this route {missing}: many applications treat these paths as `{path}`",
        spellings.join(", "),
        other.name
    );
    let hint = format!("{elsewhere}, or match all spellings: path_regex = '(?i){}([/;].*)?'", regex::escape(plain));
    let written = input.route(route.index)?.get_ref().path.as_ref()?;
    Some(Issue::new(written.span(), message).with_hint(hint))
}

/// Return the path in upper case, and the path with one segment in upper case.
fn upper_case_spellings(path: &str) -> impl Iterator<Item = String> {
    let segments: Vec<_> = path.split('/').map(str::to_owned).collect();
    let with_one = (0..segments.len()).rev().map(move |index| {
        let mut segments = segments.clone();
        segments[index].make_ascii_uppercase();
        segments.join("/")
    });
    let own = path.to_owned();
    std::iter::once(path.to_ascii_uppercase()).chain(with_one).filter(move |spelling| *spelling != own)
}

/// Warn of a route with `require` if `methods`, `match`, `hosts` or `listeners` of the route excludes requests for its
/// path that reach the same upstream without a credential. This is the case if the excluded requests match a route that
/// has no authentication and does not set the same key (a catch-all route).
pub(super) fn open_alternatives(input: &LintInput<'_>) -> Vec<Issue> {
    candidates_by_route(input.config).flat_map(|candidates| open_alternatives_of(input, &candidates)).collect()
}

/// The methods of sample requests. OPTIONS is not included, because a CORS preflight never has a credential.
const SAMPLE_METHODS: [Method; 6] =
    [Method::GET, Method::HEAD, Method::POST, Method::PUT, Method::PATCH, Method::DELETE];

fn open_alternatives_of(input: &LintInput<'_>, candidates: &[RouteCandidate<'_>]) -> Vec<Issue> {
    let mut issues = Vec::new();
    let Some(route) = candidates.first().map(|candidate| &**candidate.target) else { return issues };
    let requires_credential = protections(route).any(|own| own == Protection::Credential);
    let Some(path) = route.path_pattern.sample("x").filter(|_| requires_credential) else { return issues };
    let Some(parsed) = input.route(route.index).map(|parsed| parsed.get_ref()) else { return issues };
    // Find a catch-all route without authentication that matches the requests that the restriction excludes. A route
    // with `identify` is not reported, because `identify` says that requests without a credential are intended.
    let open_route = |sample: Sample, listeners: &[usize], is_catch_all: fn(&config::tables::Route) -> bool| {
        let is_open = |found: &&Route| {
            found.auth.is_none()
                && unprotected_by(route, found) == Some(Protection::Credential)
                && input.route(found.index).is_some_and(|parsed| is_catch_all(parsed.get_ref()))
        };
        sample.found_routes(input.config, listeners, &path).into_iter().find(is_open)
    };
    let mut by_method: Option<(&Route, Vec<&str>)> = None;
    for method in SAMPLE_METHODS.iter().filter(|method| parsed.methods.is_some() && !has_method(candidates, method)) {
        let found = candidates.iter().find_map(|candidate| {
            let sample = Sample { method: method.clone(), ..Sample::new(candidate)? };
            open_route(sample, candidate.listeners, |other| other.methods.is_none())
        });
        match (found, &mut by_method) {
            (Some(found), None) => by_method = Some((found, vec![method.as_str()])),
            (Some(found), Some((first, methods))) if first.index == found.index => methods.push(method.as_str()),
            _ => {}
        }
    }
    let by_conditions = candidates.iter().filter(|candidate| !candidate.conditions.is_empty()).find_map(|candidate| {
        open_route(Sample::without_conditions(candidate)?, candidate.listeners, |other| other.conditions.is_none())
    });
    let by_host = candidates.iter().filter(|candidate| candidate.host.is_some()).find_map(|candidate| {
        open_route(Sample::new(candidate)?.with_host(ANY_HOST), candidate.listeners, |other| other.hosts.is_none())
    });
    let by_listener = candidates.iter().find_map(|candidate| {
        let is_other = |index: &usize| !includes(candidate.listeners, *index);
        let others: Vec<_> = (0..input.config.listeners.len()).filter(is_other).collect();
        // An empty list would mean all listeners.
        (!others.is_empty()).then(|| open_route(Sample::new(candidate)?, &others, |other| other.listeners.is_none()))?
    });
    let first_span = |texts: &Option<Vec<Text>>| texts.iter().flatten().next().map(|text| text.span());
    let by_method = by_method.map(|(found, methods)| {
        (found, format!("requests with {}", methods.join(", ")), "`methods`", first_span(&parsed.methods))
    });
    let span = parsed.conditions.as_ref().map(|conditions| conditions.span());
    let by_conditions =
        by_conditions.map(|found| (found, "requests without its conditions".to_owned(), "`match`", span));
    let by_host =
        by_host.map(|found| (found, "requests for other hosts".to_owned(), "`hosts`", first_span(&parsed.hosts)));
    let span = first_span(&parsed.listeners);
    let by_listener = by_listener.map(|found| (found, "requests to other listeners".to_owned(), "`listeners`", span));
    let alternatives = [by_method, by_conditions, by_host, by_listener];
    for (found, others, restriction, span) in alternatives.into_iter().flatten() {
        let message = format!(
            "`{}` needs a credential, but its {restriction} excludes {others} on {}: they match `{}` with the same \
             upstream, which needs no credential",
            route.name, route.path, found.name
        );
        let provider = parsed.require.iter().flat_map(|required| required.get_ref()).flat_map(|item| &item.get_ref().0);
        let provider = provider.map(String::as_str).next().unwrap_or("NAME");
        let hint = format!(
            "remove {restriction}, or set require = [\"{provider}\"] in `{0}` as well; if these requests are public, \
             identify = [\"{provider}\"] in `{0}` says that this is intended",
            found.name
        );
        issues.push(Issue { span, message, hint: Some(hint) });
    }
    issues
}

fn has_method(candidates: &[RouteCandidate<'_>], method: &Method) -> bool {
    candidates.iter().any(|candidate| candidate.methods.contains(method))
}

/// Return the routes that match sample requests for `path`, one route for each listener. Apart from the path, the
/// sample requests meet all conditions of the route `candidate`.
fn found_routes<'r>(config: &'r CompiledConfig, candidate: &RouteCandidate<'_>, path: &str) -> Vec<&'r Route> {
    Sample::new(candidate).map_or(Vec::new(), |sample| sample.found_routes(config, candidate.listeners, path))
}

/// How a route protects its upstream.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Protection<'r> {
    /// The route has a limit that denies requests.
    Limit(&'r str),
    /// The route requires credentials with `require`.
    Credential,
}

fn protections(route: &Route) -> impl Iterator<Item = Protection<'_>> {
    let requires_credential = route.auth.as_ref().is_some_and(|auth| !auth.required.is_empty());
    let limits = route.rate_limits.limits.iter().filter(|limit| !limit.limit.shadow);
    let limits = limits.map(|limit| Protection::Limit(&limit.limit.name));
    requires_credential.then_some(Protection::Credential).into_iter().chain(limits)
}

/// Return a protection (a limit or `require`) that `route` has and `other` lacks, if both routes forward to the same
/// upstream.
fn unprotected_by<'r>(route: &'r Route, other: &Route) -> Option<Protection<'r>> {
    let (RouteAction::Forward(upstreams), RouteAction::Forward(others)) = (&route.action, &other.action) else {
        return None;
    };
    if !upstreams.upstreams().any(|index| others.upstreams().any(|other| index == other)) {
        return None;
    }
    protections(route).find(|own| !protections(other).any(|other| other == *own))
}

// Sample requests.

/// Return the candidates of each route, indexed by route. A candidate is an entry of the route table. A route has one
/// candidate for each combination of host and trailing slash.
pub(super) fn candidates_by_route(config: &CompiledConfig) -> impl Iterator<Item = Vec<RouteCandidate<'_>>> {
    let uri = Uri::default();
    let headers = HeaderMap::new();
    let request = RouteRequest {
        host: "",
        path: "/",
        uri: &uri,
        method: &Method::GET,
        headers: &headers,
        listener: 0,
        body: RouteBody::Unknown,
    };
    let mut by_route: Vec<Vec<RouteCandidate<'_>>> = config.routes.iter().map(|_| Vec::new()).collect();
    for candidate in config.table.candidates(&request) {
        // Omit the candidates that only redirect to the path with or without the trailing slash.
        if std::sync::Arc::ptr_eq(candidate.target, &config.routes[candidate.target.index]) {
            by_route[candidate.target.index].push(candidate);
        }
    }
    for candidates in &mut by_route {
        candidates.sort_by(|one, other| one.host.cmp(&other.host));
    }
    by_route.into_iter()
}

fn includes(listeners: &[usize], index: usize) -> bool {
    listeners.is_empty() || listeners.contains(&index)
}

fn find<'r>(config: &'r CompiledConfig, host: &str, request: &Request<JsonBody>, listener: usize) -> Option<&'r Route> {
    let parts = RouteRequest {
        host,
        body: RouteBody::Read(request.body()),
        path: request.uri().path(),
        uri: request.uri(),
        method: request.method(),
        headers: request.headers(),
        listener,
    };
    config.table.find(&parts).ok().map(|route| &**route)
}

/// A builder for requests that meet all conditions of a route except the condition on the path.
struct Sample {
    host: String,
    method: Method,
    headers: HeaderMap,
    query: String,
    body: JsonBody,
}

impl Sample {
    /// Return `None` if a condition is a regular expression, because this function cannot construct a matching value.
    fn new(candidate: &RouteCandidate<'_>) -> Option<Self> {
        Sample::with_conditions(candidate, candidate.conditions)
    }

    fn with_conditions(candidate: &RouteCandidate<'_>, conditions: &[Condition]) -> Option<Self> {
        let host = match candidate.host.as_deref() {
            None => ANY_HOST.to_owned(),
            Some(host) => host.strip_prefix('*').map_or(host.to_owned(), |suffix| format!("sample{suffix}")),
        };
        let mut headers = HeaderMap::from_iter([(HOST, HeaderValue::try_from(&host).ok()?)]);
        let mut query = String::new();
        let mut values = Vec::new();
        for Condition { source, test } in conditions {
            let value = match test {
                ValueTest::Exact(value) | ValueTest::Prefix(value) => &**value,
                ValueTest::Present => b"x",
                ValueTest::Absent => continue,
                ValueTest::Regex(_) => return None,
            };
            match source {
                ConditionSource::Header(name) => drop(headers.insert(name, HeaderValue::from_bytes(value).ok()?)),
                ConditionSource::Json(pointer) => {
                    values.push((pointer.clone(), text_value(&String::from_utf8_lossy(value))));
                }
                ConditionSource::Query(name) => {
                    let encoded = |bytes: &[u8]| {
                        percent_encoding::percent_encode(bytes, percent_encoding::NON_ALPHANUMERIC).to_string()
                    };
                    query += if query.is_empty() { "?" } else { "&" };
                    query += &format!("{}={}", encoded(name.as_bytes()), encoded(value));
                }
            }
        }
        let method = candidate.methods.first().cloned().unwrap_or(Method::GET);
        Some(Sample { host, method, headers, query, body: JsonBody::from_values(values) })
    }

    /// Create a sample request that has the host and the method of the route, but meets none of the route's conditions.
    fn without_conditions(candidate: &RouteCandidate<'_>) -> Option<Self> {
        let absent = candidate.conditions.iter().filter(|condition| condition.test == ValueTest::Absent);
        let present =
            |Condition { source, .. }: &Condition| Condition { source: source.clone(), test: ValueTest::Present };
        Sample::with_conditions(candidate, &absent.map(present).collect::<Vec<_>>())
    }

    fn with_host(mut self, host: &'static str) -> Self {
        self.headers.insert(HOST, HeaderValue::from_static(host));
        host.clone_into(&mut self.host);
        self
    }

    /// Return the routes that match the sample request with this path, one route for each of `listeners`. An empty list
    /// means all listeners.
    fn found_routes<'r>(&self, config: &'r CompiledConfig, listeners: &[usize], path: &str) -> Vec<&'r Route> {
        let Some(request) = self.with_path(path) else { return Vec::new() };
        let listeners = (0..config.listeners.len()).filter(|index| includes(listeners, *index));
        listeners.filter_map(|listener| find(config, &self.host, &request, listener)).collect()
    }

    fn with_path(&self, path: &str) -> Option<Request<JsonBody>> {
        let mut request = Request::new(self.body.clone());
        *request.method_mut() = self.method.clone();
        *request.headers_mut() = self.headers.clone();
        *request.uri_mut() = format!("{path}{}", self.query).parse().ok()?;
        Some(request)
    }
}
