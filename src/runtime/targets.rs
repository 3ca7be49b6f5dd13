//! Where the requests of a route go, and what becomes of their path on the way.

use std::ops::Range;

use bytes::Bytes;
use http::uri::{Authority, PathAndQuery};
use http::{HeaderValue, StatusCode};

use super::reader::Reader;
use super::split::Split;
use super::{Redirect, Respond, Rewrite, Target};
use crate::config::error::Issue;
use crate::config::{self, Shares, Text};
use crate::http::path::forwarded_path;
use crate::route::path::PathPattern;
use crate::route::template::Template;
use crate::upstream::Protocol;
use crate::upstream::settings::UpstreamSettings;

/// The largest weight of an upstream.
const MAX_WEIGHT: i64 = 1_000_000;

/// Those that say by themselves where to go (RFC 9110 §15.4).
const REDIRECTS: [i64; 5] = [301, 302, 303, 307, 308];

pub(super) fn target(
    route: &config::Route,
    place: &Range<usize>,
    path: Option<&PathPattern>,
    upstreams: &[UpstreamSettings],
    reader: &mut Reader<'_>,
) -> Option<Target> {
    let written = [
        route.upstream.as_ref().map(|upstream| upstream.span()),
        route.respond.as_ref().map(|respond| respond.span()),
        route.redirect.as_ref().map(|redirect| redirect.span()),
    ];
    if let Some(second) = written.into_iter().flatten().nth(1) {
        let issue = Issue::at(second, "this route has two targets");
        reader.issue(issue.hint("keep one of `upstream`, `respond` and `redirect`"));
        return None;
    }
    if let Some(shares) = &route.upstream {
        return split(shares.get_ref(), &shares.span(), upstreams, reader).map(Target::Upstream);
    }
    if let Some(respond) = &route.respond {
        return Some(Target::Respond(self::respond(respond.get_ref(), &respond.span(), reader)));
    }
    if let Some(redirect) = &route.redirect {
        return self::redirect(redirect.get_ref(), &redirect.span(), path, reader).map(Target::Redirect);
    }
    let issue = Issue::at(place.clone(), "this route goes nowhere");
    let hint = "upstream = \"NAME\", respond = { status = 200, body = \"…\" } or redirect = { to = \"/…\" }";
    reader.issue(issue.hint(hint));
    None
}

/// The upstreams that a route names, by index; those that nothing defines have been spoken of.
pub(super) fn named(shares: &Shares, upstreams: &[UpstreamSettings]) -> Vec<usize> {
    let index = |name: &str| upstreams.iter().position(|upstream| *upstream.name == *name);
    match shares {
        Shares::One(name) => index(name).into_iter().collect(),
        Shares::Weighted(weights) => weights.keys().filter_map(|name| index(name)).collect(),
    }
}

fn split(
    shares: &Shares,
    place: &Range<usize>,
    upstreams: &[UpstreamSettings],
    reader: &mut Reader<'_>,
) -> Option<Split> {
    let find = |name: &str, span: Range<usize>, reader: &mut Reader<'_>| {
        let found = upstreams.iter().position(|upstream| *upstream.name == *name);
        if found.is_none() {
            reader.unknown_name(span, "upstream", name, upstreams.iter().map(|upstream| &*upstream.name));
        }
        found
    };
    let weights = match shares {
        Shares::One(name) => return Split::new([(find(name, place.clone(), reader)?, 1)]),
        Shares::Weighted(weights) => weights,
    };
    let mut known = Vec::new();
    for (name, weight) in weights {
        let index = find(name, weight.span(), reader);
        let weight = reader.number(Some(weight), 0..MAX_WEIGHT + 1, 1) as u32;
        known.extend(index.map(|index| (index, weight)));
    }
    if weights.values().all(|weight| *weight.get_ref() == 0) {
        let issue = Issue::at(place.clone(), "no upstream has a weight: no request could go anywhere");
        reader.issue(issue.hint("{ api = 9, canary = 1 }: nine of ten requests to `api`"));
    }
    Split::new(known)
}

fn respond(respond: &config::Respond, place: &Range<usize>, reader: &mut Reader<'_>) -> Respond {
    let status = match reader.required(respond.status.as_ref(), place, "status", "200") {
        Some(status) => reader.number(Some(status), 200..600, 200),
        None => 200,
    };
    let text = HeaderValue::from_static("text/plain; charset=utf-8");
    Respond {
        status: StatusCode::from_u16(status as u16).unwrap_or(StatusCode::OK),
        body: respond.body.as_ref().map_or_else(Bytes::new, |body| Bytes::from(body.get_ref().clone())),
        content_type: respond.content_type.as_ref().and_then(|kind| reader.header_value(kind)).unwrap_or(text),
    }
}

fn redirect(
    redirect: &config::Redirect,
    place: &Range<usize>,
    path: Option<&PathPattern>,
    reader: &mut Reader<'_>,
) -> Option<Redirect> {
    let status = redirect.status.as_ref().map_or(308, |status| {
        if !REDIRECTS.contains(status.get_ref()) {
            let issue = Issue::at(status.span(), format!("{} is not the status of a redirect", status.get_ref()));
            reader.issue(issue.hint("308 or 301 for good, 307 or 302 for now, 303 to GET another resource"));
        }
        *status.get_ref()
    });
    let to = reader.required(redirect.to.as_ref(), place, "to", "\"/v1/{rest}\"")?;
    let Some((origin, target)) = origin(to.get_ref()) else {
        let issue = Issue::at(to.span(), format!("`{}` is neither a path nor the URL of a site", to.get_ref()));
        reader
            .issue(issue.hint("\"/v1/{rest}\" or \"https://www.example.com/{rest}\", without parameters in the host"));
        return None;
    };
    let target = match target {
        "" => "/".to_owned(),
        query if query.starts_with('?') => format!("/{query}"),
        target => target.to_owned(),
    };
    let to = template(&target, &to.span(), path, reader)?;
    // The status has been spoken of.
    let status = StatusCode::from_u16(status as u16).unwrap_or(StatusCode::PERMANENT_REDIRECT);
    Some(Redirect { origin: origin.into(), to, status })
}

/// Scheme and host, if any, and the rest.
fn origin(to: &str) -> Option<(&str, &str)> {
    let Some((scheme, rest)) = to.split_once("://").filter(|(scheme, _)| matches!(*scheme, "http" | "https")) else {
        // Two slashes begin the name of a host.
        return (to.starts_with('/') && !to.starts_with("//")).then_some(("", to));
    };
    let host = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let is_host = host.parse::<Authority>().is_ok() && !host.contains(['@', '{', '}']);
    is_host.then(|| to.split_at(scheme.len() + "://".len() + host.len()))
}

pub(super) fn rewrite(route: &config::Route, path: Option<&PathPattern>, reader: &mut Reader<'_>) -> Option<Rewrite> {
    let written = route.strip_prefix.as_ref().or(route.rewrite.as_ref())?;
    if route.upstream.is_none() {
        let issue = Issue::at(written.span(), "the path is changed for an upstream, and this route has none");
        reader.issue(issue.hint("leave it out; `redirect` has a path of its own"));
    }
    if let (Some(_), Some(rewrite)) = (&route.strip_prefix, &route.rewrite) {
        let issue = Issue::at(rewrite.span(), "`strip_prefix` and `rewrite` both say what becomes of the path");
        reader.issue(issue.hint("keep one of them"));
    }
    match &route.strip_prefix {
        Some(prefix) => strip(prefix, path, reader),
        None => template(written.get_ref(), &written.span(), path, reader).map(Rewrite::To),
    }
}

fn strip(prefix: &Text, path: Option<&PathPattern>, reader: &mut Reader<'_>) -> Option<Rewrite> {
    let text = prefix.get_ref().as_str();
    let fault = if !text.starts_with('/') {
        Some(("a prefix starts with `/`".to_owned(), format!("\"/{text}\"")))
    } else if text.ends_with('/') {
        let shorter = text.trim_end_matches('/');
        let hint = if shorter.is_empty() { "leave it out".to_owned() } else { format!("\"{shorter}\"") };
        Some(("a prefix ends before a `/`, which stays".to_owned(), hint))
    } else if path.is_some_and(|path| !path.begins_with(text)) {
        let hint = "whole segments that `path` begins with; `rewrite = \"/{rest}\"` says what is left";
        Some((format!("not all paths of this route begin with `{text}`"), hint.to_owned()))
    } else {
        None
    };
    match fault {
        None => Some(Rewrite::Strip(text.into())),
        Some((message, hint)) => {
            reader.issue(Issue::at(prefix.span(), message).hint(hint));
            None
        }
    }
}

/// Reads a template, and sees that what comes of it is canonical whatever its parameters are.
fn template(text: &str, span: &Range<usize>, path: Option<&PathPattern>, reader: &mut Reader<'_>) -> Option<Template> {
    let template: Template = match text.parse() {
        Ok(template) => template,
        Err(error) => {
            let hint = "a path such as \"/internal/{rest}\", with parameters of the route's `path`";
            reader.issue(Issue::at(span.clone(), format!("{error}")).hint(hint));
            return None;
        }
    };
    // No hex digit: what is encoded is encoded without the help of a parameter.
    let (plain, query) = template.filled_with("~");
    match forwarded_path(&plain) {
        Ok(same) if same == plain => {}
        Ok(_) => {
            // The place holders would not be understood.
            let issue = Issue::at(span.clone(), format!("`{text}` is not in canonical form"));
            reader.issue(issue.hint("no `.` and `..`, no `//`, no `%` where it is not needed, `%C3%A9` for `é`"));
        }
        Err(error) => reader.issue(Issue::at(span.clone(), error.to_string())),
    }
    if let Some(query) = query
        && PathAndQuery::try_from(format!("/?{query}")).is_err()
    {
        reader.issue(Issue::at(span.clone(), format!("`{query}` cannot be a query")));
    }
    let path = path?;
    for name in template.parameters().filter(|name| !path.has(name)) {
        reader.unknown_name(span.clone(), "parameter", name, path.names());
    }
    if let Some(rest) = path.rest().filter(|rest| !template.sets_apart(rest)) {
        let message =
            format!("`{{{rest}}}` may be nothing or several segments: it stands between slashes or at the end");
        reader.issue(Issue::at(span.clone(), message).hint(format!("\"/internal/{{{rest}}}\"")));
    }
    Some(template)
}

pub(super) fn websocket(route: &config::Route, upstreams: &[UpstreamSettings], reader: &mut Reader<'_>) -> bool {
    let Some(wanted) = route.websocket.as_ref().filter(|wanted| *wanted.get_ref()) else { return false };
    let targets = route.upstream.as_ref().map(|shares| named(shares.get_ref(), upstreams));
    let fault = match targets {
        None if route.respond.is_some() || route.redirect.is_some() => {
            Some("the gateway itself speaks no other protocol")
        }
        Some(targets) if targets.iter().any(|index| upstreams[*index].protocol == Protocol::Http2) => {
            Some("over HTTP/2 nothing can be switched")
        }
        _ => None,
    };
    if let Some(fault) = fault {
        let issue = Issue::at(wanted.span(), fault);
        reader.issue(issue.hint("`websocket` is for routes to upstreams with protocol \"http1\""));
    }
    true
}
