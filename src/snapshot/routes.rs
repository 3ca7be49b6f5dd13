//! Compiled routes: matching, actions, limits and header changes.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use http::header::{ACCESS_CONTROL_EXPOSE_HEADERS, STRICT_TRANSPORT_SECURITY};
use http::{HeaderMap, HeaderValue, Method, StatusCode};

use crate::config;
use crate::config::error::Issue;
use crate::config::gateway::Config;
use crate::config::spanned::Text;
use crate::http::compression::Compression;
use crate::http::cors::CorsPolicy;
use crate::http::error_pages::ErrorPages;
use crate::http::headers::{Direction, HeaderMutations};
use crate::http::ratelimit_headers;
use crate::http::ratelimit_headers::{HeaderStyle, append_decision_headers, limit_status};
use crate::http::target::{PathPolicy, PathRules, fold_case};
use crate::identity::access::AccessRules;
use crate::identity::auth::RouteAuth;
use crate::identity::spec::Descriptor;
use crate::identity::spec::IdentitySpec;
use crate::limiter::algorithm::{MAX_REQUEST_WEIGHT, Outcome, Status};
use crate::limiter::decision::{Decision, LimitResult};
use crate::limiter::spec::LimitSpec;
use crate::payload::json::rpc::CountedMessages;
use crate::payload::mcp_tools::ToolRules;
use crate::routing::pattern::PathPattern;
use crate::routing::{RouteMatch, RouteTable};
use crate::snapshot::auth::{Authentication, check_identify_keys, check_limit, route_auth};
use crate::snapshot::cost::{Cost, RefundOn, UnknownOperation, tool_rules};
use crate::snapshot::header_rules;
use crate::snapshot::identities;
use crate::snapshot::identities::NetworkFiles;
use crate::snapshot::limits::{ChargePolicy, CompiledLimit, check_cost_fits};
use crate::snapshot::route_action::{
    Mirror, ModelAliases, Redirect, RedirectTarget, Rewrite, RouteAction, mirror, model_aliases, rewrite, route_action,
    upstream_host, websocket,
};
use crate::snapshot::route_match::{TrailingSlash, route_match};
use crate::snapshot::route_retry::{Fallback, fallback, retry_rules};
use crate::snapshot::validator::Validator;
use crate::upstream::retry::RetryRules;
use crate::upstream::settings::{HostPolicy, UpstreamSettings};

/// A compiled route.
#[derive(Debug)]
pub struct Route {
    /// Index of the route in the order of the configuration.
    pub index: usize,
    /// Name of the route.
    pub name: Arc<str>,
    /// Path pattern or regular expression, as written in the configuration.
    pub path: Box<str>,
    /// Parsed path pattern.
    pub path_pattern: PathPattern,
    /// How the paths of requests are converted into their canonical form.
    pub path_policy: PathPolicy,
    /// The action for requests of the route.
    pub action: RouteAction,
    /// Models that replace the models with these names in requests to LLM APIs.
    pub model_aliases: ModelAliases,
    /// `Host` that servers receive. `None` for `host` of the upstream.
    pub upstream_host: Option<HostPolicy>,
    /// When requests are sent again. `None` if only the settings of the upstream apply, and there is no fallback.
    pub retry: Option<RetryRules>,
    /// Upstreams that get a request after the upstream of the route has failed.
    pub fallback: Vec<Fallback>,
    /// Change of the path before the request is forwarded. `None` if the path does not change.
    pub rewrite: Option<Rewrite>,
    /// Maximum time for a request, from its headers to the end of the response.
    pub timeout: Option<Duration>,
    /// Client networks that may use the route. `None` if all clients may use it.
    pub access: Option<Arc<AccessRules>>,
    /// CORS policy. `None` if the upstream sets the CORS headers.
    pub cors: Option<Arc<CorsPolicy>>,
    /// Authentication by `require` and `identify`. `None` if requests are not authenticated.
    pub auth: Option<RouteAuth>,
    /// Limits and RateLimit headers.
    pub rate_limits: RouteLimits,
    /// Maximum size of a request body in bytes.
    pub max_body: Option<u64>,
    /// Whether protocol upgrades are allowed.
    pub websocket: bool,
    /// Indices of the listeners of the route. An empty list means all listeners.
    pub listeners: Vec<usize>,
    /// Mirroring: which requests are copied to another upstream. `None` if none are.
    pub mirror: Option<Mirror>,
    /// Changes to the headers of the upstream request.
    pub request_headers: HeaderMutations,
    /// Changes to the headers of the response to the client.
    pub response_headers: HeaderMutations,
    /// Whether responses to clients that use https get `Strict-Transport-Security`, unless they have it.
    pub sets_hsts: bool,
    /// Content of the error responses that the gateway generates.
    pub error_pages: Option<Arc<ErrorPages>>,
    /// Which responses are compressed. `None` if none are.
    pub compression: Option<Arc<Compression>>,
}

/// A limit as a route uses it.
#[derive(Debug, Clone)]
pub struct RouteLimit {
    /// The limit.
    pub limit: Arc<LimitSpec>,
    /// Index into [`RouteLimits::identities`].
    pub identity_index: usize,
    /// Cost of a request.
    pub cost: Cost,
    /// Statuses for which the charge is refunded.
    pub refund_on: RefundOn,
    /// Status of the responses to requests that the limit denies.
    pub status: StatusCode,
    /// The JSON-RPC messages to count, each with this cost. If `None`, the whole request is counted once.
    pub counted: Option<CountedMessages>,
}

/// Limits of a route, and settings for the RateLimit headers.
#[derive(Debug, Default)]
pub struct RouteLimits {
    /// The distinct identity settings (`by`, `on_missing`, …) of the limits. Limits with equal settings share one
    /// entry.
    pub identities: Vec<IdentitySpec>,
    /// The limits of the route.
    pub limits: Vec<RouteLimit>,
    /// Number of enforced limits, which can deny requests. Shadow limits are not enforced.
    pub enforced: usize,
    /// Styles of the RateLimit headers.
    pub header_styles: Vec<HeaderStyle>,
    /// Value of `Access-Control-Expose-Headers`. It allows scripts of other origins to read the RateLimit headers.
    pub expose_header: Option<HeaderValue>,
    /// How to read request bodies before the rate limit check, to count LLM tokens. `None` if no limit counts LLM
    /// tokens.
    pub llm: Option<LlmInspection>,
    /// Whether an identity or a cost depends on values in the request body.
    pub reads_values: bool,
    /// The MCP tools that clients may call. `None`: the route does not check tools.
    pub tools: Option<Arc<ToolRules>>,
    /// Precomputed value of `RateLimit-Policy`. It is used if the decision contains all enforced limits with their
    /// default quotas.
    pub policy_header: Option<HeaderValue>,
}

/// What the limits of a route read from a request body, apart from the data for counting LLM tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BodyUse {
    /// Whether the limits read JSON values or JSON-RPC messages.
    pub values: bool,
    /// Whether the limits read form fields.
    pub fields: bool,
    /// Whether the limits read JSON-RPC messages.
    pub messages: bool,
    /// Whether the messages are MCP messages. The MCP headers of the request must then match its body.
    pub is_mcp: bool,
}

impl BodyUse {
    /// Return whether the limits read anything.
    pub fn is_any(self) -> bool {
        self.values || self.fields
    }
}

/// How to read request bodies to count the tokens of an LLM API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LlmInspection {
    /// Maximum size of a body in bytes.
    pub max_body: usize,
    /// Whether one of the token limits is enforced. Shadow limits are not.
    pub is_enforced: bool,
    /// Whether to reject requests whose body cannot be read.
    pub is_required: bool,
    /// Whether to request the usage of streams from OpenAI's API.
    pub includes_usage: bool,
    /// How to treat operations that the gateway does not know.
    pub unknown: UnknownOperation,
    /// Longest time that clients may wait before they retry a denied request.
    pub max_retry_wait: Duration,
    /// Whether clients get the rate limit headers of the provider.
    pub provider_headers: bool,
    /// Whether a limit learns the output of responses.
    pub learns_output: bool,
}

impl LlmInspection {
    /// Combine the settings of all limits that count LLM tokens: use the smallest body size and waiting time, and the
    /// strictest treatment of unknown operations, and enable an option if one limit enables it. Return `None` if no limit counts LLM tokens.
    fn for_limits(limits: &[RouteLimit]) -> Option<Self> {
        let inspections = limits.iter().filter_map(|route_limit| {
            let llm = route_limit.cost.llm()?;
            let is_enforced = !route_limit.limit.shadow;
            Some(LlmInspection {
                max_body: llm.max_body,
                is_enforced,
                is_required: is_enforced && llm.unread_cost.is_none(),
                includes_usage: llm.includes_usage,
                unknown: if is_enforced { llm.unknown } else { llm.unknown.min(UnknownOperation::Reserve) },
                max_retry_wait: llm.max_retry_wait,
                provider_headers: llm.provider_headers,
                learns_output: llm.learns_output,
            })
        });
        inspections.reduce(|one, other| LlmInspection {
            max_body: one.max_body.min(other.max_body),
            is_enforced: one.is_enforced || other.is_enforced,
            is_required: one.is_required || other.is_required,
            includes_usage: one.includes_usage || other.includes_usage,
            unknown: one.unknown.max(other.unknown),
            max_retry_wait: one.max_retry_wait.min(other.max_retry_wait),
            provider_headers: one.provider_headers || other.provider_headers,
            learns_output: one.learns_output || other.learns_output,
        })
    }
}

impl RouteLimits {
    /// Return whether a limit depends on the body of a request.
    pub fn reads_body(&self) -> bool {
        self.reads_values || self.llm.is_some() || self.tools.is_some()
    }

    /// Return the identity settings of a limit. `limit_index` is the index in [`limits`](Self::limits).
    pub fn spec(&self, limit_index: usize) -> &IdentitySpec {
        &self.identities[self.limits[limit_index].identity_index]
    }

    /// Return whether a limit that is checked before the authentication depends on the body of a request.
    pub fn reads_body_unauthenticated(&self) -> bool {
        self.limits.iter().any(|limit| {
            let spec = &self.identities[limit.identity_index];
            let reads_body = spec.reads_body() || limit.counted.is_some() || limit.cost.llm().is_some();
            spec.limits_unauthenticated() && reads_body
        })
    }

    /// Return the status of the response to a denied request.
    pub fn denial_status(&self, decision: &Decision<'_>) -> StatusCode {
        let denying = decision.violated().map(|result| result.limit_index).min();
        denying.and_then(|index| self.limits.get(index)).map_or(StatusCode::TOO_MANY_REQUESTS, |limit| limit.status)
    }

    /// Append the RateLimit headers of a decision. Also append `Access-Control-Expose-Headers`, so that scripts of
    /// other origins can read the RateLimit headers. `policy_header` is [`RouteLimits::policy_header`], or a copy of it.
    pub fn append_headers(
        &self,
        headers: &mut HeaderMap,
        decision: &Decision<'_>,
        policy_header: Option<&HeaderValue>,
    ) {
        if decision.results.is_empty() {
            return;
        }
        let is_standard = decision.results.len() == self.enforced
            && decision.results.iter().all(|result| result.quota == result.limit.default_variant.quota);
        append_decision_headers(headers, &self.header_styles, policy_header.filter(|_| is_standard), decision);
        if let Some(expose) = &self.expose_header {
            headers.append(ACCESS_CONTROL_EXPOSE_HEADERS, expose.clone());
        }
    }

    /// Return what the limits read from the body of a request with this method, apart from the data for counting LLM
    /// tokens.
    pub fn body_use(&self, method: &Method) -> BodyUse {
        let mut body_use = BodyUse::default();
        if self.tools.is_some() {
            (body_use.values, body_use.messages, body_use.is_mcp) = (true, true, true);
        }
        if !self.reads_values {
            return body_use;
        }
        for route_limit in &self.limits {
            let spec = &self.identities[route_limit.identity_index];
            if !spec.methods.is_empty() && !spec.methods.contains(method) {
                continue;
            }
            body_use.messages |= route_limit.counted.is_some();
            body_use.values |= spec.reads_json() || route_limit.counted.is_some();
            body_use.fields |= spec.reads_form();
            body_use.is_mcp |= spec.is_mcp() || matches!(route_limit.cost, Cost::Tools(_));
        }
        body_use
    }

    /// Return how to read the body of a request with this method, to count its LLM tokens. Return `None` if no limit
    /// counts LLM tokens for this method.
    pub fn llm_inspection(&self, method: &Method) -> Option<LlmInspection> {
        let inspection = self.llm?;
        let counts_tokens = |route_limit: &RouteLimit| {
            let methods = &self.identities[route_limit.identity_index].methods;
            route_limit.cost.llm().is_some() && (methods.is_empty() || methods.contains(method))
        };
        self.limits.iter().any(counts_tokens).then_some(inspection)
    }
}

impl Route {
    /// Return whether the route uses this limit.
    pub fn has_limit(&self, limit: &Arc<LimitSpec>) -> bool {
        self.rate_limits.limits.iter().any(|route_limit| Arc::ptr_eq(&route_limit.limit, limit))
    }

    /// Return the route for `trailing_slash = "redirect"`. It redirects requests whose path differs only in the
    /// trailing slash. The new route has the name, metrics, access rules and CORS policy of this route. It requires no
    /// credential and has no limits, because this route applies them when the client follows the redirect.
    fn slash_redirect(&self) -> Route {
        Route {
            index: self.index,
            name: self.name.clone(),
            path: self.path.clone(),
            path_pattern: self.path_pattern.clone(),
            path_policy: self.path_policy,
            action: RouteAction::Redirect(Redirect {
                to: RedirectTarget::OtherSlash,
                status: StatusCode::PERMANENT_REDIRECT,
            }),
            model_aliases: ModelAliases::new(),
            upstream_host: None,
            retry: None,
            fallback: Vec::new(),
            rewrite: None,
            timeout: None,
            access: self.access.clone(),
            cors: self.cors.clone(),
            auth: None,
            rate_limits: RouteLimits::default(),
            max_body: None,
            websocket: false,
            listeners: self.listeners.clone(),
            mirror: None,
            request_headers: HeaderMutations::default(),
            response_headers: HeaderMutations::default(),
            sets_hsts: false,
            error_pages: self.error_pages.clone(),
            compression: None,
        }
    }
}

/// Maximum number of limits of a route. It bounds the number of Lua script arguments and the size of the RateLimit
/// headers.
const MAX_LIMITS: usize = 16;

/// What the routes of a configuration refer to.
pub(super) struct RouteCompiler<'c> {
    pub(super) config: &'c Config,
    /// How the paths of requests are read.
    pub(super) paths: PathRules,
    pub(super) limits: &'c BTreeMap<String, CompiledLimit>,
    pub(super) authentication: &'c Authentication,
    pub(super) upstreams: &'c [UpstreamSettings],
}

/// A compiled route, and the requests that select it.
struct MatchedRoute {
    route: Route,
    pattern: RouteMatch,
    trailing_slash: TrailingSlash,
}

impl RouteCompiler<'_> {
    /// Compile all routes.
    pub(super) fn routes(
        &self,
        network_files: &mut NetworkFiles,
        reader: &mut Validator<'_>,
    ) -> (Vec<Arc<Route>>, RouteTable<Arc<Route>>) {
        let config = self.config;
        if config.route.is_empty() && config.descriptor.is_empty() && !config.ratelimit.has_descriptors() {
            reader.missing_table("there is no [[route]]", "add one: [[route]] with name, path and upstream");
        }
        let mut names: HashMap<&str, Range<usize>> = HashMap::new();
        let mut routes = Vec::new();
        let mut table = RouteTable::default();
        for written in &config.route {
            let span = written.span();
            let written = written.get_ref();
            let name = route_name(written, &span, &mut names, reader);
            let Some(compiled) = self.route(written, &span, name, network_files, reader) else { continue };
            let MatchedRoute { route, pattern, trailing_slash } = compiled;
            let route = Arc::new(Route { index: routes.len(), ..route });
            let mut inserted = table.insert(&pattern, &route);
            if let Some(path) = pattern.path.with_other_slash().filter(|_| trailing_slash != TrailingSlash::Strict) {
                let is_redirect = trailing_slash == TrailingSlash::Redirect;
                let target = if is_redirect { Arc::new(route.slash_redirect()) } else { route.clone() };
                inserted = inserted.and_then(|()| table.insert(&RouteMatch { path, ..pattern }, &target));
            }
            routes.push(route);
            if let Err(ambiguous) = inserted {
                let path = written.path_regex.as_ref().or(written.path.as_ref()).map_or(span, |path| path.span());
                let issue = Issue::new(path, format!("this route is ambiguous with `{}`", ambiguous.0.name));
                reader.push_missing_elsewhere(
                    issue.with_hint("give one of the routes another host, listener, path, method or condition"),
                );
            }
        }
        check_identify_keys(config, reader);
        (routes, table)
    }

    /// Compile a route. Return `None` if it has no valid action or matches no requests. Report all its errors.
    fn route(
        &self,
        written: &config::tables::Route,
        span: &Range<usize>,
        name: &str,
        network_files: &mut NetworkFiles,
        reader: &mut Validator<'_>,
    ) -> Option<MatchedRoute> {
        let RouteCompiler { config, upstreams, paths, .. } = *self;
        let matching = route_match(written, span, &config.listener, reader);
        let path = matching.as_ref().map(|(pattern, _)| &pattern.path);
        let action = route_action(written, span, path, upstreams, reader);
        let upstream_host = upstream_host(written, reader);
        let rewrite = rewrite(written, path, reader);
        let retry = retry_rules(written, span, reader);
        let timeout = timeout(written, reader);
        let auth = route_auth(written, self.authentication, config, reader);
        let mut rate_limits = self.route_limits(written, path, auth.as_ref(), reader);
        rate_limits.tools = written.mcp_tools.as_ref().map(|tools| tool_rules(tools.get_ref()));
        let counts_tokens = rate_limits.llm.is_some();
        let model_aliases = model_aliases(&written.model_aliases, counts_tokens, reader);
        let fallback = fallback(written, path, upstreams, counts_tokens, reader);
        let access =
            identities::access_rules(written.allow.as_deref(), written.deny.as_deref(), span, network_files, reader);
        let exposed = rate_limits.expose_header.as_ref().filter(|_| !rate_limits.limits.is_empty());
        let cors = header_rules::cors_policy(written, exposed, reader);
        if cors.is_some() {
            // The policy sends the header.
            rate_limits.expose_header = None;
        }
        let max_body = written.max_body.as_ref().map(|text| reader.size(Some(text), 1) as u64);
        let websocket = websocket(written, upstreams, reader);
        let mirror = mirror(written, upstreams, reader);
        let request_headers = request_headers(written, name, reader);
        let response_headers = response_headers(written, name, reader);
        let compression = header_rules::compression(written, reader).map(Arc::new);
        let action = action?;
        let (mut pattern, trailing_slash) = matching?;
        if paths.ignores_case {
            pattern.path = pattern.path.ignoring_case(fold_case);
        }
        let route = Route {
            index: 0,
            name: name.into(),
            path: written.path_regex.as_ref().or(written.path.as_ref()).map_or("/", |path| path.get_ref()).into(),
            path_pattern: pattern.path.clone(),
            path_policy: paths.policy,
            action,
            model_aliases,
            upstream_host,
            retry,
            fallback,
            rewrite,
            timeout,
            access: access.map(Arc::new),
            cors: cors.map(Arc::new),
            auth,
            rate_limits,
            max_body,
            websocket,
            listeners: pattern.listeners.clone(),
            mirror,
            request_headers,
            sets_hsts: is_secured(written) && response_headers.names().all(|name| *name != STRICT_TRANSPORT_SECURITY),
            response_headers,
            error_pages: header_rules::error_pages(&[&written.error_pages, &config.server.error_pages]),
            compression,
        };
        Some(MatchedRoute { route, pattern, trailing_slash })
    }

    /// Compile the limits of a route. Report their errors even if the route itself is invalid.
    fn route_limits(
        &self,
        route: &config::tables::Route,
        path: Option<&PathPattern>,
        auth: Option<&RouteAuth>,
        reader: &mut Validator<'_>,
    ) -> RouteLimits {
        let RouteCompiler { config, limits, authentication, .. } = *self;
        let cost = reader.number(route.cost.as_ref(), 1..1 << 53, 1) as u64;
        let mut identities: Vec<IdentitySpec> = Vec::new();
        let mut used: Vec<RouteLimit> = Vec::new();
        for text in &route.limits {
            let limit_name = text.get_ref();
            let Some(compiled) = limits.get(limit_name) else {
                // If the limit exists but has errors, skip it, because its errors are already reported.
                if !config.limit.contains_key(limit_name) {
                    reader.unknown_name(text.span(), "limit", limit_name, config.limit.keys().map(String::as_str));
                }
                continue;
            };
            let CompiledLimit { limit, identity_spec, refund_on, status, .. } = compiled;
            if used.iter().any(|other| Arc::ptr_eq(&other.limit, limit)) {
                reader.push_issue(Issue::new(text.span(), format!("the route has the limit `{limit_name}` twice")));
                continue;
            }
            check_belongs_to_routes(text, compiled, path, reader);
            check_limit(text, compiled, auth, authentication, config, reader);
            let limit_cost = route_cost(route, cost, text, compiled, reader);
            let identity_index = identities.iter().position(|other| other == identity_spec).unwrap_or_else(|| {
                identities.push(identity_spec.clone());
                identities.len() - 1
            });
            used.push(RouteLimit {
                limit: limit.clone(),
                identity_index,
                counted: match (identity_spec.counted_messages(), &limit_cost) {
                    _ if limit.default_variant.rule.is_concurrency() => None,
                    (None, Cost::Tools(_)) => Some(CountedMessages::All),
                    (counted, _) => counted,
                },
                cost: limit_cost,
                refund_on: refund_on.clone(),
                status: *status,
            });
        }
        if let Some(text) = route.limits.get(MAX_LIMITS) {
            reader.push_issue(Issue::new(text.span(), format!("a route has at most {MAX_LIMITS} limits")));
        }
        check_weight(route, &used, reader);
        let header_styles = header_styles(route, reader);
        let enforced = used.iter().map(|route_limit| &route_limit.limit).filter(|limit| !limit.shadow);
        let results: Vec<_> = enforced.map(|limit| initial_result(limit)).collect();
        let announced = || results.iter().filter(|result| result.limit.announce).map(limit_status);
        let exposes = route.expose_headers || route.cors.is_some();
        let units: BTreeSet<_> = announced().map(|status| status.unit).collect();
        RouteLimits {
            enforced: results.len(),
            llm: LlmInspection::for_limits(&used),
            reads_values: identities.iter().any(IdentitySpec::reads_body)
                || used.iter().any(|limit| limit.counted.is_some()),
            tools: None,
            expose_header: if exposes { expose_header(&header_styles, &Vec::from_iter(units)) } else { None },
            policy_header: ratelimit_headers::ratelimit_policy(announced()),
            identities,
            limits: used,
            header_styles,
        }
    }
}

/// Return the name of a route. Report an error if it is missing, invalid, or the name of another route.
fn route_name<'c>(
    route: &'c config::tables::Route,
    span: &Range<usize>,
    names: &mut HashMap<&'c str, Range<usize>>,
    reader: &mut Validator<'_>,
) -> &'c str {
    let Some(name) = reader.required(route.name.as_ref(), span, "name", "\"search\"") else { return "" };
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
    name.get_ref()
}

fn is_secured(route: &config::tables::Route) -> bool {
    route.security_headers.as_ref().is_some_and(|value| *value.get_ref())
}

fn request_headers(route: &config::tables::Route, name: &str, reader: &mut Validator<'_>) -> HeaderMutations {
    let Some(rules) = &route.request_headers else { return HeaderMutations::default() };
    let rules = rules.get_ref();
    header_rules::compile(&rules.set, &rules.remove, Direction::Request, name, reader)
}

fn response_headers(route: &config::tables::Route, name: &str, reader: &mut Validator<'_>) -> HeaderMutations {
    let rules = route.response_headers.as_ref().map(|rules| rules.get_ref());
    let mutations = rules.map_or_else(HeaderMutations::default, |rules| HeaderMutations {
        on_errors: rules.on_errors,
        ..header_rules::compile(&rules.set, &rules.remove, Direction::Response, name, reader)
    });
    if is_secured(route) { mutations.with_security_headers() } else { mutations }
}

fn timeout(route: &config::tables::Route, reader: &mut Validator<'_>) -> Option<Duration> {
    let written = route.timeout.as_ref()?;
    if route.upstream.is_none() {
        reader.push_missing(Issue::new(written.span(), "`timeout` requires an upstream"));
    }
    Some(reader.duration(Some(written), Duration::ZERO))
}

/// Report a limit that only descriptors can use, or whose path parameter the route lacks.
fn check_belongs_to_routes(
    text: &Text,
    compiled: &CompiledLimit,
    path: Option<&PathPattern>,
    reader: &mut Validator<'_>,
) {
    let limit_name = text.get_ref();
    if compiled.charge == ChargePolicy::Always {
        let message = format!("`{limit_name}` has `charge`, which only descriptors have");
        let hint = "a cost that the response determines (`cost.response_header`) is always charged";
        reader.push_missing_elsewhere(Issue::new(text.span(), message).with_hint(hint));
    }
    for descriptor in &compiled.identity_spec.descriptors {
        if let Descriptor::Entry(_) = descriptor {
            let message = format!("`{limit_name}` counts by {}, which only descriptors have", descriptor.label());
            let hint = "use the limit in `limits` of a [[descriptor]], or choose another `by`";
            reader.push_missing(Issue::new(text.span(), message).with_hint(hint));
        }
        if let Descriptor::Path(parameter) = descriptor
            && path.is_some_and(|path| !path.has_parameter(parameter))
        {
            let message = format!(
                "`{limit_name}` counts by path:{parameter}, but the path of this route has no `{{{parameter}}}`"
            );
            let hint = "add the parameter to `path`, or remove the limit from the route";
            reader.push_missing(Issue::new(text.span(), message).with_hint(hint));
        }
    }
}

/// Return what a request costs at a limit: what the limit says, or `cost` of the route.
fn route_cost(
    route: &config::tables::Route,
    cost: u64,
    text: &Text,
    compiled: &CompiledLimit,
    reader: &mut Validator<'_>,
) -> Cost {
    let limit = &compiled.limit;
    if let Some(own) = compiled.cost.clone() {
        return own.with_default(cost);
    }
    if limit.default_variant.rule.is_concurrency() {
        return Cost::Fixed(1);
    }
    let span = route.cost.as_ref().map_or(text.span(), |cost| cost.span());
    check_cost_fits(cost, limit, span.clone(), reader);
    if limit.prefetch > 0 && cost != 1 {
        let issue = Issue::new(span, format!("the `prefetch` of `{}` requires a `cost` of 1", text.get_ref()));
        reader.push_missing_elsewhere(issue.with_hint("use another limit for this route, or remove `prefetch`"));
    }
    Cost::Fixed(cost)
}

/// Return the names of the headers of these styles, for limits of these units, that scripts of other origins may read.
fn expose_header(styles: &[HeaderStyle], units: &[&str]) -> Option<HeaderValue> {
    let names = styles.iter().map(|style| style.header_names(units));
    let names: Vec<_> = names.filter(|names| !names.is_empty()).chain(["Retry-After".into()]).collect();
    // The value consists of header names and commas, so the conversion cannot fail.
    HeaderValue::from_str(&names.join(", ")).ok()
}

/// Report a route whose limits need too much time of Redis. Redis checks all limits of a request in one call, and
/// performs no other call in this time. Overrides of the limits share the weight that is left.
fn check_weight(route: &config::tables::Route, used: &[RouteLimit], reader: &mut Validator<'_>) {
    let weight: usize = used.iter().map(|route_limit| route_limit.limit.max_weight()).sum();
    let variable = || used.iter().map(|route_limit| &route_limit.limit).filter(|limit| limit.has_variable_weight());
    let share = MAX_REQUEST_WEIGHT.saturating_sub(weight) / variable().count().max(1);
    variable().for_each(|limit| limit.bound_overrides(share));
    if let Some(first) = route.limits.first().filter(|_| weight > MAX_REQUEST_WEIGHT) {
        let issue = Issue::new(first.span(), "a check of the limits of this route would occupy Redis for too long");
        reader.push_issue(issue.with_hint(
            "use fewer `buckets`, or smaller quotas of `sliding-log`: a route may have eight limits with 1000 buckets, \
             or three sliding logs with a quota of 10000",
        ));
    }
}

/// Return a result with the default quota of a limit and a placeholder outcome, to compute
/// [`RouteLimits::policy_header`].
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
