//! `/metrics`: all metrics of the process, named by the Prometheus conventions. Identities are never labels.

use std::fmt;

use crate::admin::state::AdminState;
use crate::limiter::metrics::AnsweredBy;
use crate::metrics::{BUCKET_BOUNDS_US, Histogram, MetricFamily};
use crate::proxy::telemetry::{LimitDecision, ResponseStats, STATUS_CLASSES};
use crate::telemetry::prometheus::{Exposition, Labels, MetricSource, MetricWriter};
use crate::upstream::retry::RetryReason;

/// Value of the `status` label for upstream requests without a response.
const NO_RESPONSE: &str = "none";

impl MetricSource for AdminState {
    fn write(&self, exposition: &mut Exposition<'_>) -> fmt::Result {
        let version = [("version", env!("CARGO_PKG_VERSION"))];
        exposition.gauge("build_info", "The version that runs")?.write_gauge(&version, 1)?;
        exposition
            .gauge("start_time_seconds", "When the process started, since the Unix epoch")?
            .write_gauge(&[], self.started_at_s)?;
        let (open, max) = self.connection_limits.open_and_max();
        exposition.gauge("connections", "Open connections of clients")?.write_gauge(&[], open as u64)?;
        exposition.gauge("connections_max", "Connections that there may be")?.write_gauge(&[], max as u64)?;
        let [accepted, refused] = self.connection_limits.totals();
        exposition.counter("connections_accepted", "Connections that came")?.write_counter(&[], accepted)?;
        exposition
            .counter("connections_rejected", "Those of them whose network had max_connections_per_ip")?
            .write_counter(&[], refused)?;
        self.write_reloads(exposition)?;
        self.write_requests(exposition)?;
        self.write_decisions(exposition)?;
        self.write_store(exposition)?;
        self.write_upstreams(exposition)?;
        self.write_dropped(exposition)
    }
}

impl AdminState {
    fn write_reloads(&self, exposition: &mut Exposition<'_>) -> fmt::Result {
        let mut writer =
            exposition.counter("config_reloads", "Reloads of the configuration, and those that were refused")?;
        for (result, count) in ["ok", "error"].iter().zip(self.config_handle.reload_counts()) {
            writer.write_counter(&[("result", result)], count)?;
        }
        let successful = u64::from(self.config_handle.last_failure().is_none());
        exposition
            .gauge(
                "config_last_reload_successful",
                "0 while the file was refused and the configuration before is in force",
            )?
            .write_gauge(&[], successful)?;
        let active_since_s = self.config_handle.active().active_since_us / 1_000_000;
        exposition
            .gauge("config_last_reload_success_timestamp_seconds", "Since when the configuration is in force")?
            .write_gauge(&[], active_since_s)
    }

    fn write_requests(&self, exposition: &mut Exposition<'_>) -> fmt::Result {
        let writer = exposition
            .counter("http_requests", "Requests by route and class of status; without a route none matched")?;
        write_status_classes(writer, "route", &self.request_metrics.routes)?;
        let writer = exposition.histogram("http_request_duration", "From a request to the head of its response")?;
        write_latency(writer, "route", &self.request_metrics.routes)
    }

    fn write_decisions(&self, exposition: &mut Exposition<'_>) -> fmt::Result {
        let mut writer = exposition.counter(
            "limit_decisions",
            "Decisions by limit: allowed, denied, shadow_denied, by the local share, or not asked for a store error",
        )?;
        for (limit, counters) in self.request_metrics.limits.all() {
            let counts = sum_counts(counters.iter().map(|counter| counter.values()));
            for (limit_decision, count) in LimitDecision::ALL.iter().zip(counts) {
                writer.write_counter(&[("limit", &limit), ("decision", limit_decision.label())], count)?;
            }
        }
        let check_durations = self.request_metrics.check_durations.all();
        let mut writer =
            exposition.histogram("decision_duration", "What deciding added to a request, all its limits together")?;
        write_histogram(
            &mut writer,
            &[],
            check_durations.iter().flat_map(|(_, histograms)| histograms).map(AsRef::as_ref),
        )
    }

    fn write_store(&self, exposition: &mut Exposition<'_>) -> fmt::Result {
        let limiter_metrics: Vec<_> = self.limiter_metrics.all().into_iter().flat_map(|(_, metrics)| metrics).collect();
        let mut writer = exposition.counter(
            "checks",
            "Checks of a shared store by who answered: a call of their own, a call for several, units taken ahead, the denial cache",
        )?;
        let counts = sum_counts(limiter_metrics.iter().map(|metrics| metrics.checks.values()));
        for (answered_by, count) in AnsweredBy::ALL.iter().zip(counts) {
            writer.write_counter(&[("answered_by", answered_by.label())], count)?;
        }
        let mut writer = exposition.histogram("store_round_trip_duration", "Calls that the store answered")?;
        write_histogram(&mut writer, &[], limiter_metrics.iter().map(|metrics| &metrics.round_trips))?;
        let mut writer =
            exposition.counter("store_calls", "Script calls, each for the checks of one round of a worker")?;
        writer.write_counter(&[], limiter_metrics.iter().map(|metrics| metrics.calls.values()[0]).sum())?;
        let mut writer = exposition.counter(
            "store_failures",
            "Calls that the store did not answer, and those that were not made since it fails",
        )?;
        let counts = sum_counts(limiter_metrics.iter().map(|metrics| metrics.failures.values()));
        for (kind, count) in ["failed", "not_permitted"].iter().zip(counts) {
            writer.write_counter(&[("kind", kind)], count)?;
        }
        let [evicted, refused] = self.memory.evictions_and_rejections();
        exposition
            .gauge("memory_states", "States of identities in this process")?
            .write_gauge(&[], self.memory.len() as u64)?;
        exposition
            .counter("memory_states_evicted", "Those of them that were evicted before they expired, for want of room")?
            .write_counter(&[], evicted)?;
        exposition
            .counter("memory_states_rejected", "New identities that a limit could not count, for want of room")?
            .write_counter(&[], refused)?;
        let failing_stores = self.failing_stores();
        exposition
            .gauge("store_up", "1 while the store answers; 0 while it, or a node of it, is given up")?
            .write_gauge(&[], u64::from(failing_stores.is_empty()))?;
        exposition
            .gauge("store_circuit_breakers_open", "Breakers that are open: of the store, or of nodes of a cluster")?
            .write_gauge(&[], failing_stores.len() as u64)?;
        exposition
            .counter("store_circuit_breaker_openings", "How often a breaker opened")?
            .write_counter(&[], self.breaker_open_count())
    }

    fn write_upstreams(&self, exposition: &mut Exposition<'_>) -> fmt::Result {
        let writer = exposition
            .counter("upstream_requests", "Requests by upstream and class of status; none = no answer came")?;
        write_status_classes(writer, "upstream", &self.request_metrics.upstreams)?;
        let writer = exposition
            .histogram("upstream_response_duration", "From a request to an upstream to the head of its response")?;
        write_latency(writer, "upstream", &self.request_metrics.upstreams)?;
        let mut writer = exposition
            .counter("upstream_retries", "Requests sent again: on a fresh connection, unwritten, or by the budget")?;
        for (upstream, counters) in self.request_metrics.retries.all() {
            let counts = sum_counts(counters.iter().map(|counter| counter.values()));
            for (reason, count) in RetryReason::ALL.iter().zip(counts) {
                writer.write_counter(&[("upstream", &upstream), ("reason", reason.label())], count)?;
            }
        }
        let clusters = self.config_handle.active().clusters.clone();
        let statuses: Vec<_> = clusters.iter().map(|cluster| (&*cluster.settings.name, cluster.status())).collect();
        let endpoints = || statuses.iter().flat_map(|(name, all)| all.iter().map(move |endpoint| (*name, endpoint)));
        let mut writer =
            exposition.gauge("upstream_server_up", "1 while requests go to a server; 0 while it is passed over")?;
        for (upstream, endpoint) in endpoints() {
            writer.write_gauge(
                &[("upstream", upstream), ("server", &endpoint.server)],
                u64::from(endpoint.state == "healthy"),
            )?;
        }
        let mut writer =
            exposition.gauge("upstream_server_requests_in_flight", "Requests that a server has, from all workers")?;
        for (upstream, endpoint) in endpoints() {
            writer.write_gauge(&[("upstream", upstream), ("server", &endpoint.server)], endpoint.in_flight as u64)?;
        }
        Ok(())
    }

    fn write_dropped(&self, exposition: &mut Exposition<'_>) -> fmt::Result {
        let dropped = self.telemetry_sinks.access_log.as_ref().map_or(0, |access| access.dropped());
        exposition
            .counter("access_log_dropped", "Lines of the access log that were not written")?
            .write_counter(&[], dropped)?;
        let lost = self.telemetry_sinks.trace_exporter.as_ref().map_or(0, |spans| spans.dropped());
        exposition.counter("trace_spans_dropped", "Spans that the collector did not take")?.write_counter(&[], lost)
    }
}

fn write_status_classes(
    mut writer: MetricWriter<'_>,
    label: &'static str,
    family: &MetricFamily<ResponseStats>,
) -> fmt::Result {
    for (name, response_stats) in family.all() {
        let counts = sum_counts(response_stats.iter().map(|stats| stats.status_classes.values()));
        // Omit the series that cannot occur: a route always sends a response.
        let classes = STATUS_CLASSES
            .iter()
            .chain([&NO_RESPONSE])
            .zip(counts)
            .filter(|(class, _)| **class != NO_RESPONSE || label != "route");
        for (class, count) in classes {
            writer.write_counter(&[(label, &name), ("status", class)], count)?;
        }
    }
    Ok(())
}

fn write_latency(
    mut writer: MetricWriter<'_>,
    label: &'static str,
    family: &MetricFamily<ResponseStats>,
) -> fmt::Result {
    for (name, response_stats) in family.all() {
        write_histogram(&mut writer, &[(label, &name)], response_stats.iter().map(|stats| &stats.latency))?;
    }
    Ok(())
}

fn write_histogram<'a>(
    writer: &mut MetricWriter<'_>,
    labels: Labels<'_>,
    histograms: impl Iterator<Item = &'a Histogram>,
) -> fmt::Result {
    let mut total_us = 0;
    let buckets = sum_counts(histograms.map(|histogram| {
        let (buckets, sum_us) = histogram.snapshot();
        total_us += sum_us;
        buckets
    }));
    writer.write_histogram(labels, &BUCKET_BOUNDS_US, &buckets, total_us)
}

/// Add up the counters of all workers.
pub(super) fn sum_counts<const N: usize>(counts: impl Iterator<Item = [u64; N]>) -> [u64; N] {
    counts.fold([0; N], |sum, counts| std::array::from_fn(|index| sum[index] + counts[index]))
}
