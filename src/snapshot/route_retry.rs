//! Compiles the retries of a route (`retries`, `retry_on`, `retry_methods`) and its `fallback` upstreams.

use std::ops::Range;

use http::Method;

use crate::config;
use crate::config::error::Issue;
use crate::config::shorthand;
use crate::config::shorthand::{FallbackTable, HeaderRules};
use crate::config::spanned::Text;
use crate::http::headers::{Direction, HeaderMutations};
use crate::routing::pattern::PathPattern;
use crate::snapshot::cost::RefundOn;
use crate::snapshot::header_rules;
use crate::snapshot::route_action::{ModelAliases, Rewrite, model_aliases, rewrite_template, upstream_indices};
use crate::snapshot::upstreams::host_policy;
use crate::snapshot::validator::Validator;
use crate::upstream::retry::RetryRules;
use crate::upstream::settings::{HostPolicy, UpstreamSettings};

/// Maximum number of upstreams in `fallback`.
const MAX_FALLBACKS: usize = 8;

/// An upstream that gets a request after others have failed.
#[derive(Debug)]
pub struct Fallback {
    /// Index of the upstream.
    pub upstream: usize,
    /// `Host` that its servers receive. `None` for `host` of the upstream.
    pub host: Option<HostPolicy>,
    /// Change of the path. `None` if the upstream gets the path that the upstream of the route gets.
    pub rewrite: Option<Rewrite>,
    /// Changes to the headers of the request, in place of those of the route.
    pub request_headers: Option<HeaderMutations>,
    /// Models that replace those that the upstream of the route gets.
    pub model_aliases: ModelAliases,
}

/// Compile when requests are sent again. Return `None` if only the settings of the upstream apply, and the route has no
/// `fallback`.
pub(super) fn retry_rules(
    route: &config::tables::Route,
    span: &Range<usize>,
    reader: &mut Validator<'_>,
) -> Option<RetryRules> {
    let retries = &route.retries;
    let retry_on = &route.retry_on;
    let methods = &route.retry_methods;
    if retries.is_none() && retry_on.is_none() && methods.is_none() && route.fallback.is_none() {
        return None;
    }
    if route.upstream.is_none() {
        let message = "`retries`, `retry_on`, `retry_methods` and `fallback` require an upstream";
        reader.push_missing(Issue::new(span.clone(), message));
    }
    let mut rules = RetryRules {
        retries: retries.as_ref().map(|retries| reader.number(Some(retries), 0..11, 0) as u32),
        statuses: Vec::new(),
        on_timeout: false,
        methods: vec![Method::GET, Method::HEAD, Method::OPTIONS],
    };
    for rule in retry_on.iter().flatten() {
        let shorthand::StatusRule(text) = rule.get_ref();
        match RefundOn::parse(text).filter(|statuses| *statuses.start() >= 400) {
            Some(statuses) => rules.statuses.push(statuses),
            None if text == "timeout" => rules.on_timeout = true,
            None => {
                let issue = Issue::new(rule.span(), format!("`{text}` is not an error status"));
                reader
                    .push_issue(issue.with_hint("write a status such as 503, a class such as \"5xx\", or \"timeout\""));
            }
        }
    }
    if methods.is_some() {
        rules.methods = reader.methods(methods.as_deref(), span);
    }
    Some(rules)
}

/// Return the headers that a fallback with these rules removes: its own, and those that the rules of the route set or
/// remove. A client could otherwise send them to the fallback.
fn removed_headers(rules: &HeaderRules, route: Option<&HeaderRules>) -> Vec<Text> {
    let is_new = |name: &str| {
        let is_same = |other: &str| name.eq_ignore_ascii_case(other);
        !rules.set.keys().any(|other| is_same(other)) && !rules.remove.iter().any(|other| is_same(other.get_ref()))
    };
    let set = route.into_iter().flat_map(|route| route.set.iter());
    let set = set.map(|(name, value)| Text::new(value.span(), name.clone()));
    let inherited = set.chain(route.into_iter().flat_map(|route| route.remove.iter().cloned()));
    rules.remove.iter().cloned().chain(inherited.filter(|name| is_new(name.get_ref()))).collect()
}

/// Compile `model_aliases` of a fallback, which replace the names that `route` has already replaced.
fn fallback_aliases(
    table: &FallbackTable,
    route: &config::tables::Route,
    counts_tokens: bool,
    reader: &mut Validator<'_>,
) -> ModelAliases {
    for (name, value) in &table.model_aliases {
        let Some(replaced) = route.model_aliases.get(name).map(|text| text.get_ref()) else { continue };
        if !route.model_aliases.values().any(|received| received.get_ref() == name) {
            let message =
                format!("`model_aliases` of the route replaces `{name}` with `{replaced}` for the fallback, too");
            let hint = format!("write model_aliases = {{ \"{replaced}\" = \"{}\" }}", value.get_ref());
            reader.push_issue(Issue::new(value.span(), message).with_hint(hint));
        }
    }
    model_aliases(&table.model_aliases, counts_tokens, reader)
}

/// Compile `fallback`. `counts_tokens` is true if a limit of the route counts LLM tokens.
pub(super) fn fallback(
    route: &config::tables::Route,
    path: Option<&PathPattern>,
    upstreams: &[UpstreamSettings],
    counts_tokens: bool,
    reader: &mut Validator<'_>,
) -> Vec<Fallback> {
    let written = route.fallback.as_deref().unwrap_or_default();
    let primary = route.upstream.as_ref().map(|shares| upstream_indices(shares.get_ref(), upstreams));
    let mut used = primary.unwrap_or_default();
    if let Some(excess) = written.get(MAX_FALLBACKS) {
        reader.push_issue(Issue::new(excess.span(), format!("a route has at most {MAX_FALLBACKS} fallbacks")));
    }
    let mut compiled = Vec::new();
    for entry in written {
        let span = entry.span();
        let table = entry.get_ref();
        let (name, table) = match table {
            shorthand::Fallback::Name(name) => (name.as_str(), None),
            shorthand::Fallback::Table(table) => {
                let Some(name) = reader.required(table.upstream.as_ref(), &span, "upstream", "\"other\"") else {
                    continue;
                };
                (name.get_ref().as_str(), Some(table))
            }
        };
        let Some(upstream) = upstreams.iter().position(|upstream| *upstream.name == *name) else {
            reader.unknown_name(span, "upstream", name, upstreams.iter().map(|upstream| &*upstream.name));
            continue;
        };
        if used.contains(&upstream) {
            let issue = Issue::new(span, format!("the route already sends requests to `{name}`"));
            reader.push_issue(issue.with_hint("name another upstream; `retries` sends requests to other servers"));
            continue;
        }
        used.push(upstream);
        let rewrite = table.and_then(|table| table.rewrite.as_ref());
        let rules = table.and_then(|table| table.request_headers.as_ref()).map(|rules| rules.get_ref());
        let route_name = route.name.as_ref().map_or("", |name| name.get_ref());
        compiled.push(Fallback {
            upstream,
            host: table.and_then(|table| table.upstream_host.as_ref()).map(|text| host_policy(text, reader)),
            rewrite: rewrite
                .and_then(|text| rewrite_template(text.get_ref(), &text.span(), path, reader))
                .map(Rewrite::Template),
            request_headers: rules.map(|rules| {
                let remove = removed_headers(rules, route.request_headers.as_ref().map(|rules| rules.get_ref()));
                header_rules::compile(&rules.set, &remove, Direction::Request, route_name, reader)
            }),
            model_aliases: table.map(|table| fallback_aliases(table, route, counts_tokens, reader)).unwrap_or_default(),
        });
    }
    compiled
}
