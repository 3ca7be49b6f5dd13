//! A route, ready to use: where its requests go, and which limits they meet.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Write;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, LOCATION};
use http::{HeaderName, HeaderValue, Response, StatusCode};

use crate::config;
use crate::config::Config;
use crate::config::error::{Issue, Spanned};
use crate::config::tables::HeaderRules;
use crate::http::body::Body;
use crate::http::header_mutation::{Direction, HeaderMutations, reserved_reason};
use crate::http::headers::HeaderAliases;
use crate::http::ratelimit_headers::HeaderStyle;
use crate::http::ratelimit_headers::limit_status;
use crate::http::target::canonical_path;
use crate::http::{ratelimit_headers, target};
use crate::identity::IdentitySpec;
use crate::identity::descriptor::Descriptor;
use crate::limiter::algorithm::{Outcome, Rule, Status};
use crate::limiter::decision::LimitResult;
use crate::limiter::spec::LimitSpec;
use crate::routing::pattern::{PathPattern, RewriteTemplate};
use crate::routing::{RouteMatch, RouteTable};
use crate::snapshot::CompiledLimit;
use crate::snapshot::cost::{Cost, RefundOn};
use crate::snapshot::limits::check_cost_fits;
use crate::snapshot::route_action::{WeightedUpstreams, rewrite, route_action, websocket};
use crate::snapshot::validator::Validator;
use crate::upstream::UpstreamSettings;

/// A route, ready to use.
#[derive(Debug)]
pub struct Route {
    /// Its place among all of them.
    pub index: usize,
    /// Its name.
    pub name: Arc<str>,
    /// The path as written.
    pub path: Box<str>,
    /// The same, ready to look parameters up.
    pub path_pattern: PathPattern,
    /// Where its requests go.
    pub action: RouteAction,
    /// What becomes of their path on the way to an upstream; none = it stays as it is.
    pub rewrite: Option<Rewrite>,
    /// Time for all of it, from the head of a request to the end of its answer.
    pub timeout: Option<Duration>,
    /// What they are limited by.
    pub rate_limits: RouteLimits,
    /// Bytes that their bodies may have.
    pub max_body: Option<u64>,
    /// Whether they may switch protocols.
    pub websocket: bool,
    /// What is changed in them for the upstream.
    pub request_headers: HeaderMutations,
    /// What is changed in the answers.
    pub response_headers: HeaderMutations,
}

/// A limit of a route.
#[derive(Debug, Clone)]
pub struct RouteLimit {
    /// The limit.
    pub limit: Arc<LimitSpec>,
    /// Which of the route's identities it asks about.
    pub identity_index: usize,
    /// What a request costs it.
    pub cost: Cost,
    /// The statuses that give a charge back.
    pub refund_on: RefundOn,
}

/// What a route's requests are limited by, and how callers are told.
#[derive(Debug)]
pub struct RouteLimits {
    /// The identities that its limits ask for, each once.
    pub identities: Vec<IdentitySpec>,
    /// Whether one of them is by API key.
    pub uses_api_key: bool,
    /// Its limits.
    pub limits: Vec<RouteLimit>,
    /// How many of them callers are told of.
    pub advertised: usize,
    /// How callers are told where they stand.
    pub header_styles: Vec<HeaderStyle>,
    /// The Access-Control-Expose-Headers that lets scripts of other origins read it.
    pub expose_header: Option<HeaderValue>,
    /// The RateLimit-Policy of a response that all its limits had a say in, in their standard sizes.
    pub policy_header: Option<HeaderValue>,
}

/// Where requests go.
#[derive(Debug)]
pub enum RouteAction {
    /// To upstreams, by index.
    Forward(WeightedUpstreams),
    /// The gateway answers itself.
    DirectResponse(DirectResponse),
    /// The client is sent elsewhere.
    Redirect(Redirect),
}

/// What becomes of a path on the way to an upstream.
#[derive(Debug)]
pub enum Rewrite {
    /// It loses segments that it begins with.
    StripPrefix(Box<str>),
    /// It becomes another.
    Template(RewriteTemplate),
}

/// An answer that says where else to ask.
#[derive(Debug)]
pub struct Redirect {
    /// Scheme and host; empty = where the request came.
    pub origin: Box<str>,
    /// Path and query there.
    pub template: RewriteTemplate,
    /// Its status.
    pub status: StatusCode,
}

/// An answer of the gateway's own.
#[derive(Debug)]
pub struct DirectResponse {
    /// Its status.
    pub status: StatusCode,
    /// Its body.
    pub body: Bytes,
    /// The type of the body.
    pub content_type: HeaderValue,
}

impl DirectResponse {
    /// The answer.
    pub fn response(&self) -> Response<Body> {
        let mut response = Response::new(Body::full(self.body.clone()));
        *response.status_mut() = self.status;
        // RFC 9110 §15.3.5, §15.3.6, §15.4.5: these have no content, and so no type of it.
        if !matches!(self.status, StatusCode::NO_CONTENT | StatusCode::RESET_CONTENT | StatusCode::NOT_MODIFIED) {
            response.headers_mut().insert(CONTENT_TYPE, self.content_type.clone());
        }
        response
    }
}

impl Redirect {
    /// The answer to a request for this path, as it is forwarded, and this query. It has no two slashes and no backslash, so
    /// none makes a browser read the name of a host.
    pub fn response(&self, pattern: &PathPattern, path: &str, query: Option<&str>) -> Response<Body> {
        let mut location = self.origin.to_string();
        for byte in self.template.expand(pattern, path, query).bytes() {
            // Queries may have what URIs do not (RFC 3986 §2).
            if byte.is_ascii_graphic() && !b"\"<>\\^`{|}".contains(&byte) {
                location.push(char::from(byte));
            } else {
                // Writing to memory does not fail.
                let _ = write!(location, "%{byte:02X}");
            }
        }
        let mut response = Response::new(Body::full(""));
        *response.status_mut() = self.status;
        // Graphic ASCII is a valid value.
        response.headers_mut().extend(HeaderValue::try_from(location).ok().map(|location| (LOCATION, location)));
        response
    }
}

impl Rewrite {
    /// The target for a request for this path, as it is forwarded, which the pattern matches, and this query.
    pub fn apply(&self, pattern: &PathPattern, path: &str, query: Option<&str>) -> String {
        match self {
            Rewrite::Template(template) => template.expand(pattern, path, query),
            Rewrite::StripPrefix(prefix) => {
                // By segments: what is forwarded may encode delimiters that the prefix has as they are.
                let end = path.match_indices('/').nth(prefix.matches('/').count()).map_or(path.len(), |(at, _)| at);
                let rest = if end == path.len() { "/" } else { &path[end..] };
                query.map_or_else(|| rest.to_owned(), |query| format!("{rest}?{query}"))
            }
        }
    }
}

impl Route {
    /// Whether it has this limit.
    pub fn has_limit(&self, limit: &Arc<LimitSpec>) -> bool {
        self.rate_limits.limits.iter().any(|route_limit| Arc::ptr_eq(&route_limit.limit, limit))
    }
}

// `[[route]]`: what requests look like, where they go, and which limits they meet.

/// Limits of one route: the script's arguments and the fields of a response stay small.
const MAX_LIMITS: usize = 16;

pub(super) fn routes(
    config: &Config,
    limits: &BTreeMap<String, CompiledLimit>,
    upstreams: &[UpstreamSettings],
    reader: &mut Validator<'_>,
) -> (Vec<Arc<Route>>, RouteTable<Arc<Route>>) {
    if config.route.is_empty() {
        reader.file_issue("there is no [[route]]", "add one: [[route]] with name, path and upstream");
    }
    let mut names = HashSet::new();
    let mut routes = Vec::new();
    let mut table = RouteTable::default();
    for written in &config.route {
        let span = written.span();
        let written = written.get_ref();
        let name = match reader.required(written.name.as_ref(), &span, "name", "\"search\"") {
            Some(name) => {
                reader.check_name(name.span(), name.get_ref());
                if !names.insert(name.get_ref().clone()) {
                    reader.push_issue(Issue::new(name.span(), format!("a second route `{}`", name.get_ref())));
                }
                name.get_ref().as_str()
            }
            None => "",
        };
        let pattern = route_match(written, &span, reader);
        let path = pattern.as_ref().map(|pattern| &pattern.path);
        let action = route_action(written, &span, path, upstreams, reader);
        let rewrite = rewrite(written, path, reader);
        let timeout = timeout(written, reader);
        let rate_limits = route_limits(written, path, limits, config, reader);
        let max_body = written.max_body.as_ref().map(|text| reader.size(Some(text), 1) as u64);
        let websocket = websocket(written, upstreams, reader);
        let request_headers = header_mutations(written.request_headers.as_ref(), Direction::Request, reader);
        let response_headers = header_mutations(written.response_headers.as_ref(), Direction::Response, reader);
        let (Some(target), Some(pattern)) = (action, pattern) else { continue };
        let route = Arc::new(Route {
            index: routes.len(),
            name: name.into(),
            path: written.path.as_ref().map_or("/", |path| path.get_ref()).into(),
            path_pattern: pattern.path.clone(),
            action: target,
            rewrite,
            timeout,
            rate_limits,
            max_body,
            websocket,
            request_headers,
            response_headers,
        });
        routes.push(route.clone());
        if let Err(ambiguous) = table.insert(pattern, route) {
            let path = written.path.as_ref().map_or(span, |path| path.span());
            let issue = Issue::new(path, format!("nothing tells this route from `{}`", ambiguous.0.name));
            reader.push_issue(issue.with_hint("give one of them another host, path, method or header"));
        }
    }
    (routes, table)
}

fn timeout(route: &config::tables::Route, reader: &mut Validator<'_>) -> Option<Duration> {
    let written = route.timeout.as_ref()?;
    if route.upstream.is_none() {
        reader.push_issue(Issue::new(written.span(), "the gateway itself answers at once: `timeout` is for upstreams"));
    }
    Some(reader.duration(Some(written), Duration::ZERO))
}

fn route_match(route: &config::tables::Route, span: &Range<usize>, reader: &mut Validator<'_>) -> Option<RouteMatch> {
    let host = route.host.as_ref().and_then(|host| match target::canonical_host(host.get_ref()).into_owned() {
        any if any == "*" => None,
        name if is_host(name.strip_prefix("*.").unwrap_or(&name)) => Some(name),
        _ => {
            let issue = Issue::new(host.span(), format!("`{}` is not a host", host.get_ref()));
            reader.push_issue(issue.with_hint("a name without port, \"api.example.com\" or \"*.example.com\""));
            None
        }
    });
    let path = reader.required(route.path.as_ref(), span, "path", "\"/v1/{*rest}\"");
    let path = path.and_then(|text| match text.get_ref().parse::<PathPattern>() {
        Ok(pattern) => {
            // Braces are the pattern's own; everything else must be what a canonical request has.
            let plain = text.get_ref().replace(['{', '}'], "");
            match canonical_path(&plain) {
                Ok(same) if same == plain => {}
                Ok(other) => {
                    let issue =
                        Issue::new(text.span(), "requests are matched in canonical form: this path never matches");
                    reader.push_issue(issue.with_hint(format!("its canonical form is \"{other}\"")));
                }
                Err(error) => reader.push_issue(Issue::new(text.span(), error.to_string())),
            }
            Some(pattern)
        }
        Err(error) => {
            let hint = "\"/v1/search\", \"/v1/users/{id}\" or \"/v1/{*rest}\"";
            reader.push_issue(Issue::new(text.span(), error.to_string()).with_hint(hint));
            None
        }
    });
    let methods = reader.methods(route.methods.as_deref(), span);
    let mut headers: Vec<(HeaderName, HeaderValue)> = Vec::new();
    for (name, value) in &route.headers {
        if let (Some(name), Some(value)) = (reader.header_name(value.span(), name), reader.header_value(value)) {
            headers.push((name, value));
        }
    }
    Some(RouteMatch { host, path: path?, methods, headers })
}

fn is_host(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._:[]".contains(&byte))
}

/// What a route's requests are limited by; faults are found even where the route itself is faulty.
fn route_limits(
    route: &config::tables::Route,
    path: Option<&PathPattern>,
    limits: &BTreeMap<String, CompiledLimit>,
    config: &Config,
    reader: &mut Validator<'_>,
) -> RouteLimits {
    let cost = reader.number(route.cost.as_ref(), 1..1 << 53, 1) as u64;
    let mut identities = Vec::new();
    let mut used: Vec<RouteLimit> = Vec::new();
    for text in &route.limits {
        let limit_name = text.get_ref();
        let Some(CompiledLimit { limit, identity_spec, cost: limit_cost, refund_on }) = limits.get(limit_name) else {
            // A limit that is there but faulty has been spoken of.
            if !config.limit.contains_key(limit_name) {
                reader.unknown_name(text.span(), "limit", limit_name, config.limit.keys().map(String::as_str));
            }
            continue;
        };
        if used.iter().any(|other| Arc::ptr_eq(&other.limit, limit)) {
            reader.push_issue(Issue::new(text.span(), format!("the route has the limit `{limit_name}` twice")));
            continue;
        }
        for descriptor in &identity_spec.descriptors {
            if let Descriptor::Path(parameter) = descriptor
                && path.is_some_and(|path| !path.has_parameter(parameter))
            {
                let message = format!(
                    "`{limit_name}` is by path:{parameter}, but the path of this route has no `{{{parameter}}}`"
                );
                reader.push_issue(
                    Issue::new(text.span(), message).with_hint("name the parameter in `path`, or leave the limit out"),
                );
            }
        }
        let is_concurrency = matches!(limit.default_variant.rule, Rule::Concurrency(_));
        let limit_cost = match limit_cost.clone() {
            None if is_concurrency => Cost::Fixed(1),
            None => {
                let span = route.cost.as_ref().map_or(text.span(), |cost| cost.span());
                check_cost_fits(cost, limit, span.clone(), reader);
                if limit.prefetch > 0 && cost != 1 {
                    let message = format!(
                        "single units are taken ahead: the `prefetch` of `{limit_name}` goes with a `cost` of 1 only"
                    );
                    reader.push_issue(
                        Issue::new(span, message).with_hint("another limit for this route, or no `prefetch`"),
                    );
                }
                Cost::Fixed(cost)
            }
            Some(own) => own.with_default(cost),
        };
        let identity = identities.iter().position(|other| other == identity_spec).unwrap_or_else(|| {
            identities.push(identity_spec.clone());
            identities.len() - 1
        });
        used.push(RouteLimit {
            limit: limit.clone(),
            identity_index: identity,
            cost: limit_cost,
            refund_on: refund_on.clone(),
        });
    }
    if let Some(text) = route.limits.get(MAX_LIMITS) {
        reader.push_issue(Issue::new(text.span(), format!("a route has at most {MAX_LIMITS} limits")));
    }
    let advertised: Vec<_> = used
        .iter()
        .filter(|route_limit| !route_limit.limit.shadow)
        .map(|route_limit| initial_result(&route_limit.limit))
        .collect();
    let policy = ratelimit_headers::ratelimit_policy(advertised.iter().map(limit_status));
    let by_key =
        identities.iter().any(|identity_spec: &IdentitySpec| identity_spec.descriptors.contains(&Descriptor::ApiKey));
    let header_styles = header_styles(route, reader);
    let expose = route.expose_headers.then(|| {
        let names: Vec<_> = header_styles.iter().map(|dialect| dialect.header_names()).chain(["Retry-After"]).collect();
        // Field names and commas are a valid value.
        HeaderValue::from_str(&names.join(", ")).ok()
    });
    let expose = expose.flatten();
    RouteLimits {
        identities,
        uses_api_key: by_key,
        advertised: advertised.len(),
        limits: used,
        header_styles,
        expose_header: expose,
        policy_header: policy,
    }
}

/// A limit as it stands before anybody asked.
fn initial_result(limit: &LimitSpec) -> LimitResult<'_> {
    let outcome = Outcome { status: Status::Ok, remaining: 0, reset_us: 0, retry_us: 0 };
    LimitResult { limit_index: 0, limit, quota: limit.default_variant.quota, outcome }
}

fn header_styles(route: &config::tables::Route, reader: &mut Validator<'_>) -> Vec<HeaderStyle> {
    const ALL: [(&str, HeaderStyle); 5] = [
        ("ietf", HeaderStyle::Draft11),
        ("draft-11", HeaderStyle::Draft11),
        ("draft-07", HeaderStyle::Draft07),
        ("draft-03", HeaderStyle::Draft03),
        ("github", HeaderStyle::Github),
    ];
    let Some(list) = &route.ratelimit_headers else { return vec![HeaderStyle::Draft11] };
    let mut styles = Vec::new();
    for text in list {
        let style = reader.one_of(Some(text), HeaderStyle::Draft11, &ALL);
        if !styles.contains(&style) {
            styles.push(style);
        }
    }
    if let Some(text) =
        list.first().filter(|_| styles.contains(&HeaderStyle::Draft11) && styles.contains(&HeaderStyle::Draft07))
    {
        let issue =
            Issue::new(text.span(), "`draft-11` (`ietf`) and `draft-07` write the same fields in different ways");
        reader.push_issue(issue.with_hint("choose one of them"));
    }
    styles
}

// `request_headers` and `response_headers` of a route.

pub(super) fn header_mutations(
    written: Option<&Spanned<HeaderRules>>,
    section: Direction,
    reader: &mut Validator<'_>,
) -> HeaderMutations {
    let mut mutations = HeaderMutations::default();
    let Some(written) = written.map(|written| written.get_ref()) else { return mutations };
    let mut seen = Vec::new();
    for text in &written.remove {
        mutations.remove.extend(mutated_header(text.span(), text.get_ref(), section, &mut seen, reader));
    }
    for (name, value) in &written.set {
        let name = mutated_header(value.span(), name, section, &mut seen, reader);
        mutations.set.extend(name.zip(reader.header_value(value)));
    }
    if section == Direction::Request {
        mutations.aliases =
            HeaderAliases::from_names(mutations.set.iter().map(|(name, _)| name).chain(&mutations.remove));
    }
    mutations
}

/// A field that rules may have, once.
fn mutated_header(
    span: Range<usize>,
    name: &str,
    section: Direction,
    seen: &mut Vec<HeaderName>,
    reader: &mut Validator<'_>,
) -> Option<HeaderName> {
    let name = reader.header_name(span.clone(), name)?;
    if let Some(reason) = reserved_reason(&name, section) {
        reader.push_issue(
            Issue::new(span, format!("`{name}` cannot be set or removed: {reason}")).with_hint("leave it out"),
        );
        return None;
    }
    if seen.contains(&name) {
        let issue = Issue::new(span, format!("a second rule for `{name}`"));
        reader.push_issue(issue.with_hint("to set a field is to replace all that it had"));
    }
    seen.push(name.clone());
    Some(name)
}
