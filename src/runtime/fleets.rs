//! What `[upstream.NAME]` says of its servers together: who is asked, who is out, how many requests at once.

use crate::config::Spanned;
use http::StatusCode;
use tokio::time::Duration;

use super::reader::Reader;
use crate::config::error::Issue;
use crate::config::{self, Text};
use crate::upstream::balance::Balance;
use crate::upstream::condition::EjectSettings;
use crate::upstream::health::HealthSettings;

pub(super) fn balance(text: Option<&Text>, reader: &mut Reader<'_>) -> Balance {
    let words = ["least-requests", "round-robin", "random", "hash:HEADER"];
    let Some(text) = text else { return Balance::LeastRequests };
    match &**text.get_ref() {
        "least-requests" => Balance::LeastRequests,
        "round-robin" => Balance::RoundRobin,
        "random" => Balance::Random,
        other => match other.strip_prefix("hash:") {
            Some(name) => reader.header_name(text.span(), name).map_or(Balance::LeastRequests, Balance::Hash),
            None => {
                reader.unknown_name(text.span(), "value", other, words.into_iter());
                Balance::LeastRequests
            }
        },
    }
}

pub(super) fn max_queue(upstream: &config::Upstream, reader: &mut Reader<'_>) -> usize {
    let most = reader.number(upstream.max_queue.as_ref(), 0..1_000_001, 0) as usize;
    let capped = upstream.max_requests.as_ref().is_some_and(|most| *most.get_ref() != 0);
    if let Some(queue) = upstream.max_queue.as_ref().filter(|_| most > 0 && !capped) {
        let issue = Issue::at(queue.span(), "nobody would wait: there may be any number of requests");
        reader.issue(issue.hint("`max_requests` says how many each server gets at the same time"));
    }
    most
}

pub(super) fn health(health: &Spanned<config::Health>, reader: &mut Reader<'_>) -> HealthSettings {
    let place = health.span();
    let health = health.get_ref();
    let path = reader.required(health.path.as_ref(), &place, "path", "\"/healthz\"");
    let parsed = path.and_then(|path| path.get_ref().starts_with('/').then(|| path.get_ref().parse().ok())?);
    if let (Some(path), None) = (path, &parsed) {
        let issue = Issue::at(path.span(), format!("`{}` is not a path to ask for", path.get_ref()));
        reader.issue(issue.hint("such as \"/healthz\""));
    }
    let mut status = Vec::new();
    for written in health.status.iter().flatten() {
        let found = u16::try_from(*written.get_ref()).ok().and_then(|status| StatusCode::from_u16(status).ok());
        match found.filter(|status| (200..600).contains(&status.as_u16())) {
            Some(found) => status.push(found),
            None => {
                let issue = Issue::at(written.span(), format!("{} is not the status of an answer", written.get_ref()));
                reader.issue(issue.hint("from 200 to 599"));
            }
        }
    }
    if health.status.as_ref().is_some_and(Vec::is_empty) {
        let issue = Issue::at(place.clone(), "`status` is empty: no server would be healthy");
        reader.issue(issue.hint("leave it out for 200"));
    }
    if health.status.is_none() {
        status.push(StatusCode::OK);
    }
    HealthSettings {
        path: parsed.unwrap_or(http::uri::PathAndQuery::from_static("/")),
        status,
        interval: reader.duration(health.interval.as_ref(), Duration::from_secs(5)),
        timeout: reader.duration(health.timeout.as_ref(), Duration::from_secs(1)),
        unhealthy_after: reader.number(health.unhealthy_threshold.as_ref(), 1..101, 3) as u32,
        healthy_after: reader.number(health.healthy_threshold.as_ref(), 1..101, 2) as u32,
    }
}

pub(super) fn eject(eject: &Spanned<config::Eject>, reader: &mut Reader<'_>) -> EjectSettings {
    let eject = eject.get_ref();
    EjectSettings {
        errors: reader.number(eject.consecutive_errors.as_ref(), 1..1001, 5) as u32,
        time: reader.duration(eject.base_ejection_time.as_ref(), Duration::from_secs(10)),
    }
}

/// `"0s"` is none.
pub(super) fn slow_start(text: Option<&Text>, reader: &mut Reader<'_>) -> Duration {
    reader.duration(text.filter(|text| text.get_ref() != "0s"), Duration::ZERO)
}
