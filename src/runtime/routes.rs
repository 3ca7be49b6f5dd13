//! `[[route]]`: what requests look like, where they go, and which limits they meet.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use http::{HeaderName, HeaderValue};
use tokio::time::Duration;

use super::limits::too_dear;
use super::reader::Reader;
use super::rules::rules;
use super::targets::{rewrite, target, websocket};
use super::{Metered, Metering, Route, Terms};
use crate::config::error::Issue;
use crate::config::{self, Config};
use crate::cost::Cost;
use crate::http::fields::{self, HeaderStyle};
use crate::http::host;
use crate::http::path::canonical_path;
use crate::http::rules::Direction;
use crate::identity::{By, Source};
use crate::limit::algorithm::{Outcome, Rule, Status};
use crate::limit::decision::Judged;
use crate::limit::plan::Limit;
use crate::reply::limit_status;
use crate::route::path::PathPattern;
use crate::route::{Pattern, RouteTable};
use crate::upstream::settings::UpstreamSettings;

/// Limits of one route: the script's arguments and the fields of a response stay small.
const MAX_LIMITS: usize = 16;

pub(super) fn routes(
    config: &Config,
    limits: &BTreeMap<String, Terms>,
    upstreams: &[UpstreamSettings],
    reader: &mut Reader<'_>,
) -> (Vec<Arc<Route>>, RouteTable<Arc<Route>>) {
    if config.route.is_empty() {
        reader.missing("there is no [[route]]", "add one: [[route]] with name, path and upstream");
    }
    let mut names = HashSet::new();
    let mut routes = Vec::new();
    let mut table = RouteTable::default();
    for written in &config.route {
        let place = written.span();
        let written = written.get_ref();
        let name = match reader.required(written.name.as_ref(), &place, "name", "\"search\"") {
            Some(name) => {
                reader.name(name.span(), name.get_ref());
                if !names.insert(name.get_ref().clone()) {
                    reader.issue(Issue::at(name.span(), format!("a second route `{}`", name.get_ref())));
                }
                name.get_ref().as_str()
            }
            None => "",
        };
        let pattern = pattern(written, &place, reader);
        let path = pattern.as_ref().map(|pattern| &pattern.path);
        let target = target(written, &place, path, upstreams, reader);
        let rewrite = rewrite(written, path, reader);
        let timeout = timeout(written, reader);
        let metering = metering(written, path, limits, config, reader);
        let max_body = written.max_body.as_ref().map(|text| reader.size(Some(text), 1) as u64);
        let websocket = websocket(written, upstreams, reader);
        let request_headers = rules(written.request_headers.as_ref(), Direction::Request, reader);
        let response_headers = rules(written.response_headers.as_ref(), Direction::Response, reader);
        let (Some(target), Some(pattern)) = (target, pattern) else { continue };
        let route = Arc::new(Route {
            index: routes.len(),
            name: name.into(),
            path: written.path.as_ref().map_or("/", |path| path.get_ref()).into(),
            pattern: pattern.path.clone(),
            target,
            rewrite,
            timeout,
            metering,
            max_body,
            websocket,
            request_headers,
            response_headers,
        });
        routes.push(route.clone());
        if let Err(tie) = table.insert(pattern, route) {
            let path = written.path.as_ref().map_or(place, |path| path.span());
            let issue = Issue::at(path, format!("nothing tells this route from `{}`", tie.0.name));
            reader.issue(issue.hint("give one of them another host, path, method or header"));
        }
    }
    (routes, table)
}

fn timeout(route: &config::Route, reader: &mut Reader<'_>) -> Option<Duration> {
    let written = route.timeout.as_ref()?;
    if route.upstream.is_none() {
        reader.issue(Issue::at(written.span(), "the gateway itself answers at once: `timeout` is for upstreams"));
    }
    Some(reader.duration(Some(written), Duration::ZERO))
}

fn pattern(route: &config::Route, place: &Range<usize>, reader: &mut Reader<'_>) -> Option<Pattern> {
    let host = route.host.as_ref().and_then(|host| match host::canonical_host(host.get_ref()).into_owned() {
        any if any == "*" => None,
        name if is_host(name.strip_prefix("*.").unwrap_or(&name)) => Some(name),
        _ => {
            let issue = Issue::at(host.span(), format!("`{}` is not a host", host.get_ref()));
            reader.issue(issue.hint("a name without port, \"api.example.com\" or \"*.example.com\""));
            None
        }
    });
    let path = reader.required(route.path.as_ref(), place, "path", "\"/v1/{*rest}\"");
    let path = path.and_then(|text| match text.get_ref().parse::<PathPattern>() {
        Ok(pattern) => {
            // Braces are the pattern's own; everything else must be what a canonical request has.
            let plain = text.get_ref().replace(['{', '}'], "");
            match canonical_path(&plain) {
                Ok(same) if same == plain => {}
                Ok(other) => {
                    let issue =
                        Issue::at(text.span(), "requests are matched in canonical form: this path never matches");
                    reader.issue(issue.hint(format!("its canonical form is \"{other}\"")));
                }
                Err(error) => reader.issue(Issue::at(text.span(), error.to_string())),
            }
            Some(pattern)
        }
        Err(error) => {
            let hint = "\"/v1/search\", \"/v1/users/{id}\" or \"/v1/{*rest}\"";
            reader.issue(Issue::at(text.span(), error.to_string()).hint(hint));
            None
        }
    });
    let methods = reader.methods(route.methods.as_deref(), place);
    let mut headers: Vec<(HeaderName, HeaderValue)> = Vec::new();
    for (name, value) in &route.headers {
        if let (Some(name), Some(value)) = (reader.header_name(value.span(), name), reader.header_value(value)) {
            headers.push((name, value));
        }
    }
    Some(Pattern { host, path: path?, methods, headers })
}

fn is_host(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._:[]".contains(&byte))
}

/// What a route's requests are limited by; faults are found even where the route itself is faulty.
fn metering(
    route: &config::Route,
    path: Option<&PathPattern>,
    limits: &BTreeMap<String, Terms>,
    config: &Config,
    reader: &mut Reader<'_>,
) -> Metering {
    let cost = reader.number(route.cost.as_ref(), 1..1 << 53, 1) as u64;
    let mut identities = Vec::new();
    let mut used: Vec<Metered> = Vec::new();
    for text in &route.limits {
        let limit_name = text.get_ref();
        let Some(Terms { limit, by, cost: own, refund_on }) = limits.get(limit_name) else {
            // A limit that is there but faulty has been spoken of.
            if !config.limit.contains_key(limit_name) {
                reader.unknown_name(text.span(), "limit", limit_name, config.limit.keys().map(String::as_str));
            }
            continue;
        };
        if used.iter().any(|other| Arc::ptr_eq(&other.limit, limit)) {
            reader.issue(Issue::at(text.span(), format!("the route has the limit `{limit_name}` twice")));
            continue;
        }
        for source in &by.sources {
            if let Source::Path(parameter) = source
                && path.is_some_and(|path| !path.has(parameter))
            {
                let message = format!(
                    "`{limit_name}` is by path:{parameter}, but the path of this route has no `{{{parameter}}}`"
                );
                reader.issue(
                    Issue::at(text.span(), message).hint("name the parameter in `path`, or leave the limit out"),
                );
            }
        }
        let in_flight = matches!(limit.standard.rule, Rule::Concurrency(_));
        let own = match own.clone() {
            None if in_flight => Cost::Fixed(1),
            None => {
                let span = route.cost.as_ref().map_or(text.span(), |cost| cost.span());
                too_dear(cost, limit, span.clone(), reader);
                if limit.advance > 0 && cost != 1 {
                    let message = format!(
                        "single units are taken ahead: the `prefetch` of `{limit_name}` goes with a `cost` of 1 only"
                    );
                    reader.issue(Issue::at(span, message).hint("another limit for this route, or no `prefetch`"));
                }
                Cost::Fixed(cost)
            }
            Some(own) => own.or_else(cost),
        };
        let identity = identities.iter().position(|other| other == by).unwrap_or_else(|| {
            identities.push(by.clone());
            identities.len() - 1
        });
        used.push(Metered { limit: limit.clone(), identity, cost: own, refund_on: refund_on.clone() });
    }
    if let Some(text) = route.limits.get(MAX_LIMITS) {
        reader.issue(Issue::at(text.span(), format!("a route has at most {MAX_LIMITS} limits")));
    }
    let told: Vec<_> =
        used.iter().filter(|metered| !metered.limit.shadow).map(|metered| untouched(&metered.limit)).collect();
    let policy = fields::ratelimit_policy(told.iter().map(limit_status));
    let by_key = identities.iter().any(|by: &By| by.sources.contains(&Source::ApiKey));
    let dialects = dialects(route, reader);
    let expose = route.expose_headers.then(|| {
        let names: Vec<_> = dialects.iter().map(|dialect| dialect.header_names()).chain(["Retry-After"]).collect();
        // Field names and commas are a valid value.
        HeaderValue::from_str(&names.join(", ")).ok()
    });
    let expose = expose.flatten();
    Metering { identities, by_key, told: told.len(), limits: used, dialects, expose, policy }
}

/// A limit as it stands before anybody asked.
fn untouched(limit: &Limit) -> Judged<'_> {
    let outcome = Outcome { status: Status::Ok, remaining: 0, reset_us: 0, retry_us: 0 };
    Judged { place: 0, limit, quota: limit.standard.quota, outcome }
}

fn dialects(route: &config::Route, reader: &mut Reader<'_>) -> Vec<HeaderStyle> {
    const ALL: [(&str, HeaderStyle); 5] = [
        ("ietf", HeaderStyle::Draft11),
        ("draft-11", HeaderStyle::Draft11),
        ("draft-07", HeaderStyle::Draft07),
        ("draft-03", HeaderStyle::Draft03),
        ("github", HeaderStyle::Github),
    ];
    let Some(list) = &route.ratelimit_headers else { return vec![HeaderStyle::Draft11] };
    let mut dialects = Vec::new();
    for text in list {
        let dialect = reader.choice(Some(text), HeaderStyle::Draft11, &ALL);
        if !dialects.contains(&dialect) {
            dialects.push(dialect);
        }
    }
    if let Some(text) =
        list.first().filter(|_| dialects.contains(&HeaderStyle::Draft11) && dialects.contains(&HeaderStyle::Draft07))
    {
        let issue =
            Issue::at(text.span(), "`draft-11` (`ietf`) and `draft-07` write the same fields in different ways");
        reader.issue(issue.hint("choose one of them"));
    }
    dialects
}
