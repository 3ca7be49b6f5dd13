//! Compiled routes: match, action, limits and header changes.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, LOCATION};
use http::{HeaderName, HeaderValue, Response, StatusCode};

use crate::config;
use crate::config::Config;
use crate::config::error::Issue;
use crate::http::body::Body;
use crate::http::cors::CorsPolicy;
use crate::http::headers::{Direction, HeaderMutations};
use crate::http::ratelimit_headers::HeaderStyle;
use crate::http::ratelimit_headers::limit_status;
use crate::http::target::canonical_path;
use crate::http::{ratelimit_headers, target};
use crate::identity::Descriptor;
use crate::identity::IdentitySpec;
use crate::identity::access::AccessRules;
use crate::identity::auth::RouteAuth;
use crate::limiter::algorithm::{Outcome, Rule, Status};
use crate::limiter::decision::LimitResult;
use crate::limiter::spec::LimitSpec;
use crate::routing::pattern;
use crate::routing::pattern::{PathPattern, RewriteTemplate};
use crate::routing::{RouteMatch, RouteTable};
use crate::snapshot::CompiledLimit;
use crate::snapshot::access;
use crate::snapshot::access::NetworkFiles;
use crate::snapshot::auth::{Authentication, check_identify_keys, check_limit, route_auth};
use crate::snapshot::cors;
use crate::snapshot::cost::{Cost, RefundOn};
use crate::snapshot::header_rules;
use crate::snapshot::limits::check_cost_fits;
use crate::snapshot::mirror::{Mirror, mirror};
use crate::snapshot::route_action::{WeightedUpstreams, rewrite, route_action, websocket};
use crate::snapshot::validator::Validator;
use crate::upstream::UpstreamSettings;

/// A compiled route.
#[derive(Debug)]
pub struct Route {
    /// Index among all routes.
    pub index: usize,
    /// Name of the route.
    pub name: Arc<str>,
    /// Path pattern as written.
    pub path: Box<str>,
    /// Parsed path pattern.
    pub path_pattern: PathPattern,
    /// What happens to requests of the route.
    pub action: RouteAction,
    /// Change of the path for the upstream. `None` = no change.
    pub rewrite: Option<Rewrite>,
    /// Maximum time for a request, from its headers to the end of the response.
    pub timeout: Option<Duration>,
    /// Clients that may use the route. `None` = all.
    pub access: Option<Box<AccessRules>>,
    /// CORS policy. `None` = CORS headers are those of the upstream.
    pub cors: Option<Box<CorsPolicy>>,
    /// Providers of `require` and `identify`. `None`: requests are not authenticated.
    pub auth: Option<RouteAuth>,
    /// Limits and RateLimit headers.
    pub rate_limits: RouteLimits,
    /// Maximum size of a request body in bytes.
    pub max_body: Option<u64>,
    /// Whether protocol upgrades are allowed.
    pub websocket: bool,
    /// Copies of requests for another upstream.
    pub mirror: Option<Mirror>,
    /// Changes to the request headers for the upstream.
    pub request_headers: HeaderMutations,
    /// Changes to the response headers.
    pub response_headers: HeaderMutations,
}

/// A limit as used by a route.
#[derive(Debug, Clone)]
pub struct RouteLimit {
    /// The limit.
    pub limit: Arc<LimitSpec>,
    /// Index into [`RouteLimits::identities`].
    pub identity_index: usize,
    /// Cost of a request.
    pub cost: Cost,
    /// Statuses that refund the charge.
    pub refund_on: RefundOn,
}

/// Limits of a route, and the response headers about them.
#[derive(Debug)]
pub struct RouteLimits {
    /// The identities of the limits, without duplicates.
    pub identities: Vec<IdentitySpec>,
    /// The limits.
    pub limits: Vec<RouteLimit>,
    /// Number of limits that can deny: all but shadow limits.
    pub enforced: usize,
    /// Styles of the RateLimit headers.
    pub header_styles: Vec<HeaderStyle>,
    /// Value of Access-Control-Expose-Headers, which lets scripts of other origins read the RateLimit headers.
    pub expose_header: Option<HeaderValue>,
    /// Precomputed RateLimit-Policy for responses in which every limit decided with its default variant.
    pub policy_header: Option<HeaderValue>,
}

/// What happens to requests of a route.
#[derive(Debug)]
pub enum RouteAction {
    /// Forward to one of the upstreams.
    Forward(WeightedUpstreams),
    /// Respond without an upstream.
    DirectResponse(DirectResponse),
    /// Redirect the client.
    Redirect(Redirect),
}

/// Change of the path for the upstream.
#[derive(Debug)]
pub enum Rewrite {
    /// Remove a prefix.
    StripPrefix(Box<str>),
    /// Replace the path.
    Template(RewriteTemplate),
}

/// A redirect.
#[derive(Debug)]
pub struct Redirect {
    /// Scheme and host. Empty = relative to the request.
    pub origin: Box<str>,
    /// Path and query of the target.
    pub template: RewriteTemplate,
    /// Status of the response.
    pub status: StatusCode,
}

/// A response of the gateway, without an upstream.
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
    /// Return the response.
    pub fn response(&self) -> Response<Body> {
        let mut response = Response::new(Body::full(self.body.clone()));
        *response.status_mut() = self.status;
        // Responses with these statuses have no content, and so no content type (RFC 9110 §15.3.5, §15.3.6, §15.4.5).
        if !matches!(self.status, StatusCode::NO_CONTENT | StatusCode::RESET_CONTENT | StatusCode::NOT_MODIFIED) {
            response.headers_mut().insert(CONTENT_TYPE, self.content_type.clone());
        }
        response
    }
}

impl Redirect {
    /// Return the redirect for a request with this path, as forwarded, and this query. The path of the location
    /// contains neither `//` nor a backslash, so browsers cannot read a host name in it.
    pub fn response(&self, pattern: &PathPattern, path: &str, query: Option<&str>) -> Response<Body> {
        let mut location = self.origin.to_string();
        for byte in self.template.expand(pattern, path, query).bytes() {
            // Clients may send characters in queries that are not valid in URIs (RFC 3986 §2).
            if byte.is_ascii_graphic() && !b"\"<>\\^`{|}".contains(&byte) {
                location.push(char::from(byte));
            } else {
                // Writing to memory does not fail.
                let _ = write!(location, "%{byte:02X}");
            }
        }
        let mut response = Response::new(Body::full(""));
        *response.status_mut() = self.status;
        // Graphic ASCII is a valid header value.
        response.headers_mut().extend(HeaderValue::try_from(location).ok().map(|location| (LOCATION, location)));
        response
    }
}

impl Rewrite {
    /// Return the target for a request with this path, as forwarded, and this query. The pattern must match the path.
    pub fn apply(&self, pattern: &PathPattern, path: &str, query: Option<&str>) -> String {
        match self {
            Rewrite::Template(template) => template.expand(pattern, path, query),
            Rewrite::StripPrefix(prefix) => {
                // Count segments instead of bytes: the forwarded path may percent-encode characters that the prefix has
                // literally.
                let end = path.match_indices('/').nth(prefix.matches('/').count()).map_or(path.len(), |(at, _)| at);
                let rest = if end == path.len() { "/" } else { &path[end..] };
                query.map_or_else(|| rest.to_owned(), |query| format!("{rest}?{query}"))
            }
        }
    }
}

impl Route {
    /// Return whether the route uses this limit.
    pub fn has_limit(&self, limit: &Arc<LimitSpec>) -> bool {
        self.rate_limits.limits.iter().any(|route_limit| Arc::ptr_eq(&route_limit.limit, limit))
    }
}

/// Maximum number of limits of a route. Bounds the script arguments and the size of the RateLimit headers.
const MAX_LIMITS: usize = 16;

/// Compile all routes.
pub(super) fn routes(
    config: &Config,
    limits: &BTreeMap<String, CompiledLimit>,
    authentication: &Authentication,
    upstreams: &[UpstreamSettings],
    network_files: &mut NetworkFiles,
    reader: &mut Validator<'_>,
) -> (Vec<Arc<Route>>, RouteTable<Arc<Route>>) {
    if config.route.is_empty() {
        reader.file_issue("there is no [[route]]", "add one: [[route]] with name, path and upstream");
    }
    let mut names: HashMap<&str, Range<usize>> = HashMap::new();
    let mut routes = Vec::new();
    let mut table = RouteTable::default();
    for written in &config.route {
        let span = written.span();
        let written = written.get_ref();
        let name = match reader.required(written.name.as_ref(), &span, "name", "\"search\"") {
            Some(name) => {
                reader.check_name(name.span(), name.get_ref());
                match names.entry(name.get_ref().as_str()) {
                    Entry::Vacant(entry) => {
                        entry.insert(name.span());
                    }
                    Entry::Occupied(first) => {
                        let issue = Issue::new(name.span(), format!("duplicate route `{}`", name.get_ref()));
                        reader.push_issue(issue.with_hint(reader.first_line_hint(first.get())));
                    }
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
        let auth = route_auth(written, authentication, config, reader);
        let mut rate_limits = route_limits(written, path, limits, (auth.as_ref(), authentication), config, reader);
        let access = access::rules(written.allow.as_deref(), written.deny.as_deref(), &span, network_files, reader);
        let cors = cors::policy(written, &mut rate_limits, reader);
        let max_body = written.max_body.as_ref().map(|text| reader.size(Some(text), 1) as u64);
        let websocket = websocket(written, upstreams, reader);
        let mirror = mirror(written, upstreams, reader);
        let request_headers = written.request_headers.as_ref().map(|rules| rules.get_ref());
        let request_headers = request_headers.map_or_else(HeaderMutations::default, |rules| {
            header_rules::compile(&rules.set, &rules.remove, Direction::Request, name, reader)
        });
        let response_headers = written.response_headers.as_ref().map(|rules| rules.get_ref());
        let response_headers = response_headers.map_or_else(HeaderMutations::default, |rules| HeaderMutations {
            on_errors: rules.on_errors,
            ..header_rules::compile(&rules.set, &rules.remove, Direction::Response, name, reader)
        });
        let (Some(target), Some(pattern)) = (action, pattern) else { continue };
        let route = Arc::new(Route {
            index: routes.len(),
            name: name.into(),
            path: written.path.as_ref().map_or("/", |path| path.get_ref()).into(),
            path_pattern: pattern.path.clone(),
            action: target,
            rewrite,
            timeout,
            access: access.map(Box::new),
            cors: cors.map(Box::new),
            auth,
            rate_limits,
            max_body,
            websocket,
            mirror,
            request_headers,
            response_headers,
        });
        routes.push(route.clone());
        if let Err(ambiguous) = table.insert(pattern, route) {
            let path = written.path.as_ref().map_or(span, |path| path.span());
            let issue = Issue::new(path, format!("this route is ambiguous with `{}`", ambiguous.0.name));
            reader.push_issue(issue.with_hint("give one of them another host, path, method or header"));
        }
    }
    check_identify_keys(config, reader);
    (routes, table)
}

fn timeout(route: &config::tables::Route, reader: &mut Validator<'_>) -> Option<Duration> {
    let written = route.timeout.as_ref()?;
    if route.upstream.is_none() {
        reader.push_issue(Issue::new(written.span(), "`timeout` requires an upstream"));
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
            // Braces belong to the pattern. The rest must be canonical, as request paths are.
            let plain = text.get_ref().replace(['{', '}'], "");
            match canonical_path(&plain) {
                Ok(same) if same == plain => {}
                Ok(other) => {
                    let issue =
                        Issue::new(text.span(), "requests are matched in canonical form: this path never matches");
                    let hint = pattern::suggestion(text.get_ref()).map(|path| foreign_path_hint(&path));
                    reader.push_issue(issue.with_hint(hint.unwrap_or(format!("its canonical form is \"{other}\""))));
                }
                Err(error) => {
                    let hint = pattern::suggestion(text.get_ref()).map(|path| foreign_path_hint(&path));
                    reader.push_issue(Issue { span: Some(text.span()), message: error.to_string(), hint });
                }
            }
            Some(pattern)
        }
        Err(error) => {
            let hint = match pattern::suggestion(text.get_ref()) {
                Some(path) => foreign_path_hint(&path),
                None => "\"/v1/search\", \"/v1/users/{id}\" or \"/v1/{*rest}\"".to_owned(),
            };
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

/// Return the hint for a path in the syntax of another program.
pub(crate) fn foreign_path_hint(path: &str) -> String {
    format!("write path = \"{path}\": {{id}} is one segment, {{*rest}} the rest of the path")
}

fn is_host(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._:[]".contains(&byte))
}

/// Compile the limits of a route. Errors are reported even if the route itself is invalid.
fn route_limits(
    route: &config::tables::Route,
    path: Option<&PathPattern>,
    limits: &BTreeMap<String, CompiledLimit>,
    (auth, authentication): (Option<&RouteAuth>, &Authentication),
    config: &Config,
    reader: &mut Validator<'_>,
) -> RouteLimits {
    let cost = reader.number(route.cost.as_ref(), 1..1 << 53, 1) as u64;
    let mut identities: Vec<IdentitySpec> = Vec::new();
    let mut used: Vec<RouteLimit> = Vec::new();
    for text in &route.limits {
        let limit_name = text.get_ref();
        let Some(compiled) = limits.get(limit_name) else {
            // Errors in an existing limit are reported elsewhere.
            if !config.limit.contains_key(limit_name) {
                reader.unknown_name(text.span(), "limit", limit_name, config.limit.keys().map(String::as_str));
            }
            continue;
        };
        let CompiledLimit { limit, identity_spec, cost: limit_cost, refund_on } = compiled;
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
        check_limit(text, compiled, auth, (authentication, config), reader);
        let is_concurrency = matches!(limit.default_variant.rule, Rule::Concurrency(_));
        let limit_cost = match limit_cost.clone() {
            None if is_concurrency => Cost::Fixed(1),
            None => {
                let span = route.cost.as_ref().map_or(text.span(), |cost| cost.span());
                check_cost_fits(cost, limit, span.clone(), reader);
                if limit.prefetch > 0 && cost != 1 {
                    let message = format!("the `prefetch` of `{limit_name}` requires a `cost` of 1");
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
    let enforced: Vec<_> = used
        .iter()
        .filter(|route_limit| !route_limit.limit.shadow)
        .map(|route_limit| initial_result(&route_limit.limit))
        .collect();
    let announced = || enforced.iter().filter(|result| result.limit.announce).map(limit_status);
    let policy = ratelimit_headers::ratelimit_policy(announced());
    let units: BTreeSet<_> = announced().map(|status| status.unit).collect();
    let header_styles = header_styles(route, reader);
    let expose = (route.expose_headers || route.cors.is_some()).then(|| {
        let units = Vec::from_iter(units);
        let names = header_styles.iter().map(|style| style.header_names(&units));
        let names: Vec<_> = names.filter(|names| !names.is_empty()).chain(["Retry-After".into()]).collect();
        // Header names and commas form a valid header value.
        HeaderValue::from_str(&names.join(", ")).ok()
    });
    let expose = expose.flatten();
    RouteLimits {
        identities,
        enforced: enforced.len(),
        limits: used,
        header_styles,
        expose_header: expose,
        policy_header: policy,
    }
}

/// Return the result of a limit before the first request, for [`RouteLimits::policy_header`].
fn initial_result(limit: &LimitSpec) -> LimitResult<'_> {
    let outcome = Outcome { status: Status::Ok, remaining: 0, reset_us: 0, retry_us: 0 };
    LimitResult { limit_index: 0, limit, quota: limit.default_variant.quota, outcome }
}

fn header_styles(route: &config::tables::Route, reader: &mut Validator<'_>) -> Vec<HeaderStyle> {
    const ALL: [(&str, HeaderStyle); 7] = [
        ("ietf", HeaderStyle::Draft11),
        ("draft-11", HeaderStyle::Draft11),
        ("draft-07", HeaderStyle::Draft07),
        ("draft-03", HeaderStyle::Draft03),
        ("github", HeaderStyle::Github),
        ("openai", HeaderStyle::OpenAi),
        ("anthropic", HeaderStyle::Anthropic),
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
        let issue = Issue::new(text.span(), "`draft-11` (`ietf`) and `draft-07` use the same headers");
        reader.push_issue(issue.with_hint("choose one of them"));
    }
    styles
}
