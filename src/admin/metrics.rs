//! `/metrics`: everything that is counted, with names and units by the conventions of Prometheus. No label is an identity.

use std::fmt;

use super::vitals::Vitals;
use crate::gateway::meters::{LimitDecision, ResponseStats, STATUS_CLASSES};
use crate::limit::tallies::AnsweredBy;
use crate::observe::metrics::{Exposition, Labels, MetricSource, MetricWriter};
use crate::tally::{BUCKET_BOUNDS_US, Histogram, MetricFamily};
use crate::upstream::RetryReason;

/// The label of an answer that never came.
const NONE: &str = "none";

impl MetricSource for Vitals {
    fn write(&self, page: &mut Exposition<'_>) -> fmt::Result {
        let version = [("version", env!("CARGO_PKG_VERSION"))];
        page.gauge("build_info", "The version that runs")?.write_gauge(&version, 1)?;
        page.gauge("start_time_seconds", "When the process started, since the Unix epoch")?
            .write_gauge(&[], self.started)?;
        let (open, most) = self.connections.open_and_max();
        page.gauge("connections", "Open connections of clients")?.write_gauge(&[], open as u64)?;
        page.gauge("connections_max", "Connections that there may be")?.write_gauge(&[], most as u64)?;
        let [accepted, refused] = self.connections.totals();
        page.counter("connections_accepted", "Connections that came")?.write_counter(&[], accepted)?;
        page.counter("connections_rejected", "Those of them whose network had max_connections_per_ip")?
            .write_counter(&[], refused)?;
        self.reloads(page)?;
        self.requests(page)?;
        self.decisions(page)?;
        self.store(page)?;
        self.upstreams(page)?;
        self.written(page)
    }
}

impl Vitals {
    fn reloads(&self, page: &mut Exposition<'_>) -> fmt::Result {
        let mut lines = page.counter("config_reloads", "Reloads of the configuration, and those that were refused")?;
        for (result, count) in ["ok", "error"].iter().zip(self.configuration.reload_counts()) {
            lines.write_counter(&[("result", result)], count)?;
        }
        let successful = u64::from(self.configuration.last_failure().is_none());
        page.gauge(
            "config_last_reload_successful",
            "0 while the file was refused and the configuration before is in force",
        )?
        .write_gauge(&[], successful)?;
        let since = self.configuration.active().active_since_us / 1_000_000;
        page.gauge("config_last_reload_success_timestamp_seconds", "Since when the configuration is in force")?
            .write_gauge(&[], since)
    }

    fn requests(&self, page: &mut Exposition<'_>) -> fmt::Result {
        let lines =
            page.counter("http_requests", "Requests by route and class of status; without a route none matched")?;
        classes(lines, "route", &self.tallies.routes)?;
        let lines = page.histogram("http_request_duration", "From a request to the head of its response")?;
        answers(lines, "route", &self.tallies.routes)
    }

    fn decisions(&self, page: &mut Exposition<'_>) -> fmt::Result {
        let mut lines = page.counter(
            "limit_decisions",
            "Decisions by limit: allowed, denied, shadow_denied, by the local share, or not asked for a store error",
        )?;
        for (limit, tallies) in self.tallies.limits.all() {
            let counts = sum(tallies.iter().map(|tally| tally.values()));
            for (judgement, count) in LimitDecision::ALL.iter().zip(counts) {
                lines.write_counter(&[("limit", &limit), ("decision", judgement.label())], count)?;
            }
        }
        let decisions = self.tallies.check_durations.all();
        let mut lines =
            page.histogram("decision_duration", "What deciding added to a request, all its limits together")?;
        times(&mut lines, &[], decisions.iter().flat_map(|(_, tallies)| tallies).map(AsRef::as_ref))
    }

    fn store(&self, page: &mut Exposition<'_>) -> fmt::Result {
        let all: Vec<_> = self.limits.all().into_iter().flat_map(|(_, tallies)| tallies).collect();
        let mut lines = page.counter(
            "checks",
            "Checks of a shared store by who answered: a call of their own, a call for several, units taken ahead, the denial cache",
        )?;
        let counts = sum(all.iter().map(|tallies| tallies.checks.values()));
        for (answered, count) in AnsweredBy::ALL.iter().zip(counts) {
            lines.write_counter(&[("answered_by", answered.label())], count)?;
        }
        let mut lines = page.histogram("store_round_trip_duration", "Calls that the store answered")?;
        times(&mut lines, &[], all.iter().map(|tallies| &tallies.round_trips))?;
        let mut lines = page.counter("store_calls", "Script calls, each for the checks of one round of a worker")?;
        lines.write_counter(&[], all.iter().map(|tallies| tallies.calls.values()[0]).sum())?;
        let mut lines = page.counter(
            "store_failures",
            "Calls that the store did not answer, and those that were not made since it fails",
        )?;
        let counts = sum(all.iter().map(|tallies| tallies.failures.values()));
        for (kind, count) in ["failed", "not_permitted"].iter().zip(counts) {
            lines.write_counter(&[("kind", kind)], count)?;
        }
        let [evicted, refused] = self.memory.evictions_and_rejections();
        page.gauge("memory_states", "States of identities in this process")?
            .write_gauge(&[], self.memory.len() as u64)?;
        page.counter("memory_states_evicted", "Those of them that were evicted before they expired, for want of room")?
            .write_counter(&[], evicted)?;
        page.counter("memory_states_rejected", "New identities that a limit could not count, for want of room")?
            .write_counter(&[], refused)?;
        let failing = self.failing();
        page.gauge("store_up", "1 while the store answers; 0 while it, or a node of it, is given up")?
            .write_gauge(&[], u64::from(failing.is_empty()))?;
        page.gauge("store_circuit_breakers_open", "Breakers that are open: of the store, or of nodes of a cluster")?
            .write_gauge(&[], failing.len() as u64)?;
        page.counter("store_circuit_breaker_openings", "How often a breaker opened")?
            .write_counter(&[], self.openings())
    }

    fn upstreams(&self, page: &mut Exposition<'_>) -> fmt::Result {
        let lines =
            page.counter("upstream_requests", "Requests by upstream and class of status; none = no answer came")?;
        classes(lines, "upstream", &self.tallies.upstreams)?;
        let lines =
            page.histogram("upstream_response_duration", "From a request to an upstream to the head of its response")?;
        answers(lines, "upstream", &self.tallies.upstreams)?;
        let mut lines = page
            .counter("upstream_retries", "Requests sent again: on a fresh connection, unwritten, or by the budget")?;
        for (upstream, tallies) in self.tallies.retries.all() {
            let counts = sum(tallies.iter().map(|tally| tally.values()));
            for (why, count) in RetryReason::ALL.iter().zip(counts) {
                lines.write_counter(&[("upstream", &upstream), ("reason", why.label())], count)?;
            }
        }
        let fleets = self.configuration.active().clusters.clone();
        let standing: Vec<_> = fleets.iter().map(|fleet| (&*fleet.settings.name, fleet.status())).collect();
        let servers = || standing.iter().flat_map(|(name, all)| all.iter().map(move |one| (*name, one)));
        let mut lines =
            page.gauge("upstream_server_up", "1 while requests go to a server; 0 while it is passed over")?;
        for (upstream, one) in servers() {
            lines.write_gauge(&[("upstream", upstream), ("server", &one.server)], u64::from(one.state == "healthy"))?;
        }
        let mut lines =
            page.gauge("upstream_server_requests_in_flight", "Requests that a server has, from all workers")?;
        for (upstream, one) in servers() {
            lines.write_gauge(&[("upstream", upstream), ("server", &one.server)], one.in_flight as u64)?;
        }
        Ok(())
    }

    fn written(&self, page: &mut Exposition<'_>) -> fmt::Result {
        let lost = self.sinks.access_log.as_ref().map_or(0, |access| access.dropped());
        page.counter("access_log_dropped", "Lines of the access log that were not written")?
            .write_counter(&[], lost)?;
        let lost = self.sinks.trace_exporter.as_ref().map_or(0, |spans| spans.dropped());
        page.counter("trace_spans_dropped", "Spans that the collector did not take")?.write_counter(&[], lost)
    }
}

fn classes(mut lines: MetricWriter<'_>, label: &'static str, family: &MetricFamily<ResponseStats>) -> fmt::Result {
    for (name, tallies) in family.all() {
        let counts = sum(tallies.iter().map(|tally| tally.status_classes.values()));
        // What cannot happen is no line: a route always answers.
        let classes =
            STATUS_CLASSES.iter().chain([&NONE]).zip(counts).filter(|(class, _)| **class != NONE || label != "route");
        for (class, count) in classes {
            lines.write_counter(&[(label, &name), ("status", class)], count)?;
        }
    }
    Ok(())
}

fn answers(mut lines: MetricWriter<'_>, label: &'static str, family: &MetricFamily<ResponseStats>) -> fmt::Result {
    for (name, tallies) in family.all() {
        times(&mut lines, &[(label, &name)], tallies.iter().map(|tally| &tally.latency))?;
    }
    Ok(())
}

fn times<'a>(
    lines: &mut MetricWriter<'_>,
    labels: Labels<'_>,
    all: impl Iterator<Item = &'a Histogram>,
) -> fmt::Result {
    let mut total_us = 0;
    let buckets = sum(all.map(|durations| {
        let (buckets, sum_us) = durations.snapshot();
        total_us += sum_us;
        buckets
    }));
    lines.write_histogram(labels, &BUCKET_BOUNDS_US, &buckets, total_us)
}

/// Of all workers.
pub(super) fn sum<const N: usize>(counts: impl Iterator<Item = [u64; N]>) -> [u64; N] {
    counts.fold([0; N], |sum, counts| std::array::from_fn(|kind| sum[kind] + counts[kind]))
}
