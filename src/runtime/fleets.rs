//! What `[upstream.NAME]` says of its servers together: who is asked, who is out, how many requests at once.

use crate::config::Spanned;
use http::StatusCode;
use tokio::time::Duration;

use super::reader::Validator;
use crate::config::error::Issue;
use crate::config::{self, Text};
use crate::upstream::balance::LoadBalancingPolicy;
use crate::upstream::condition::EjectionSettings;
use crate::upstream::health::HealthSettings;

pub(super) fn balance(text: Option<&Text>, reader: &mut Validator<'_>) -> LoadBalancingPolicy {
    let words = ["least-requests", "round-robin", "random", "hash:HEADER"];
    let Some(text) = text else { return LoadBalancingPolicy::LeastRequests };
    match &**text.get_ref() {
        "least-requests" => LoadBalancingPolicy::LeastRequests,
        "round-robin" => LoadBalancingPolicy::RoundRobin,
        "random" => LoadBalancingPolicy::Random,
        other => match other.strip_prefix("hash:") {
            Some(name) => reader
                .header_name(text.span(), name)
                .map_or(LoadBalancingPolicy::LeastRequests, LoadBalancingPolicy::Hash),
            None => {
                reader.unknown_name(text.span(), "value", other, words.into_iter());
                LoadBalancingPolicy::LeastRequests
            }
        },
    }
}

pub(super) fn max_queue(upstream: &config::Upstream, reader: &mut Validator<'_>) -> usize {
    let max = reader.number(upstream.max_queue.as_ref(), 0..1_000_001, 0) as usize;
    let has_max_requests = upstream.max_requests.as_ref().is_some_and(|max| *max.get_ref() != 0);
    if let Some(queue) = upstream.max_queue.as_ref().filter(|_| max > 0 && !has_max_requests) {
        let issue = Issue::new(queue.span(), "nobody would wait: there may be any number of requests");
        reader.push_issue(issue.with_hint("`max_requests` says how many each server gets at the same time"));
    }
    max
}

pub(super) fn health(health: &Spanned<config::Health>, reader: &mut Validator<'_>) -> HealthSettings {
    let span = health.span();
    let health = health.get_ref();
    let path = reader.required(health.path.as_ref(), &span, "path", "\"/healthz\"");
    let parsed = path.and_then(|path| path.get_ref().starts_with('/').then(|| path.get_ref().parse().ok())?);
    if let (Some(path), None) = (path, &parsed) {
        let issue = Issue::new(path.span(), format!("`{}` is not a path to ask for", path.get_ref()));
        reader.push_issue(issue.with_hint("such as \"/healthz\""));
    }
    let mut status = Vec::new();
    for written in health.status.iter().flatten() {
        let found = u16::try_from(*written.get_ref()).ok().and_then(|status| StatusCode::from_u16(status).ok());
        match found.filter(|status| (200..600).contains(&status.as_u16())) {
            Some(found) => status.push(found),
            None => {
                let issue = Issue::new(written.span(), format!("{} is not the status of an answer", written.get_ref()));
                reader.push_issue(issue.with_hint("from 200 to 599"));
            }
        }
    }
    if health.status.as_ref().is_some_and(Vec::is_empty) {
        let issue = Issue::new(span.clone(), "`status` is empty: no server would be healthy");
        reader.push_issue(issue.with_hint("leave it out for 200"));
    }
    if health.status.is_none() {
        status.push(StatusCode::OK);
    }
    HealthSettings {
        path: parsed.unwrap_or(http::uri::PathAndQuery::from_static("/")),
        expected_statuses: status,
        interval: reader.duration(health.interval.as_ref(), Duration::from_secs(5)),
        timeout: reader.duration(health.timeout.as_ref(), Duration::from_secs(1)),
        unhealthy_after: reader.number(health.unhealthy_threshold.as_ref(), 1..101, 3) as u32,
        healthy_after: reader.number(health.healthy_threshold.as_ref(), 1..101, 2) as u32,
    }
}

pub(super) fn ejection(eject: &Spanned<config::Eject>, reader: &mut Validator<'_>) -> EjectionSettings {
    let eject = eject.get_ref();
    EjectionSettings {
        consecutive_errors: reader.number(eject.consecutive_errors.as_ref(), 1..1001, 5) as u32,
        base_ejection_time: reader.duration(eject.base_ejection_time.as_ref(), Duration::from_secs(10)),
    }
}

/// `"0s"` is none.
pub(super) fn slow_start(text: Option<&Text>, reader: &mut Validator<'_>) -> Duration {
    reader.duration(text.filter(|text| text.get_ref() != "0s"), Duration::ZERO)
}
