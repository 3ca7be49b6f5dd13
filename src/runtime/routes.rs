//! `[[route]]`: what requests look like, where they go, and which limits they meet.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use http::{HeaderName, HeaderValue};
use tokio::time::Duration;

use super::limits::check_cost_fits;
use super::reader::Validator;
use super::rules::header_mutations;
use super::targets::{rewrite, route_action, websocket};
use super::{CompiledLimit, Route, RouteLimit, RouteLimits};
use crate::config::error::Issue;
use crate::config::{self, Config};
use crate::cost::Cost;
use crate::http::fields::{self, HeaderStyle};
use crate::http::host;
use crate::http::path::canonical_path;
use crate::http::rules::Direction;
use crate::identity::{Descriptor, IdentitySpec};
use crate::limit::algorithm::{Outcome, Rule, Status};
use crate::limit::decision::LimitResult;
use crate::limit::plan::LimitSpec;
use crate::reply::limit_status;
use crate::route::path::PathPattern;
use crate::route::{RouteMatch, RouteTable};
use crate::upstream::settings::UpstreamSettings;

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

fn timeout(route: &config::Route, reader: &mut Validator<'_>) -> Option<Duration> {
    let written = route.timeout.as_ref()?;
    if route.upstream.is_none() {
        reader.push_issue(Issue::new(written.span(), "the gateway itself answers at once: `timeout` is for upstreams"));
    }
    Some(reader.duration(Some(written), Duration::ZERO))
}

fn route_match(route: &config::Route, span: &Range<usize>, reader: &mut Validator<'_>) -> Option<RouteMatch> {
    let host = route.host.as_ref().and_then(|host| match host::canonical_host(host.get_ref()).into_owned() {
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
    route: &config::Route,
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
    let policy = fields::ratelimit_policy(advertised.iter().map(limit_status));
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

fn header_styles(route: &config::Route, reader: &mut Validator<'_>) -> Vec<HeaderStyle> {
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
