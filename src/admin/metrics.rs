//! `/metrics`: all metrics of the process, with names that follow the Prometheus conventions. Identities are never used
//! as labels.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::param::{clock_ticks_per_second, page_size};
use rustix::process::{Resource, getrlimit};

use crate::admin::current::FileKind;
use crate::admin::state::ProcessState;
use crate::limiter::metrics::{AnsweredBy, BUCKET_BOUNDS_US, Histogram, LostCost, MetricFamily};
use crate::limiter::notify::DeliveryResult;
use crate::listener::metrics::{APPLICATION_PROTOCOLS, HandshakeFailure, TLS_VERSIONS};
use crate::payload::llm::usage::COUNTED_KINDS;
use crate::proxy::metrics::{
    AuthResult, COUNTED_STATUSES, CallResult, HIT_KINDS, LimitDecision, ResponseStats, SETTLED_BY, STATUS_CLASSES,
    split_descriptor_name, split_hits_name, split_token_counter_name,
};
use crate::proxy::mirror_state::{CopyResult, DropReason};
use crate::telemetry::outcome::RequestOutcome;
use crate::telemetry::prometheus::{Exposition, Labels, MetricSource, MetricWriter};
use crate::tls::Certificate;
use crate::upstream::cluster::ServerState;
use crate::upstream::error::FailureReason;
use crate::upstream::metrics::ConnectResult;
use crate::upstream::retry::RetryReason;

/// Value of labels that do not apply to a TLS handshake, such as the label `version` of a failed handshake.
const NO_REASON: &str = "none";

/// Value of the `status` label for upstream requests without a response.
const NO_RESPONSE: &str = "none";

impl MetricSource for ProcessState {
    fn write(&self, exposition: &mut Exposition<'_>) -> fmt::Result {
        let build = [
            ("version", env!("CARGO_PKG_VERSION")),
            ("commit", env!("SLUICEGATE_COMMIT")),
            ("rustc", env!("SLUICEGATE_RUSTC_VERSION")),
        ];
        exposition.gauge("build_info", "Version, commit and compiler of the gateway")?.write_gauge(&build, 1)?;
        exposition
            .gauge("start_time_seconds", "Start time of the process since the Unix epoch")?
            .write_gauge(&[], self.started_at_s)?;
        let mut writer = exposition.gauge("worker_heartbeat_age_seconds", "Time since a worker last ran its tasks")?;
        for (worker, age) in self.heartbeats.ages().enumerate() {
            writer.write_gauge(&[("worker", &worker.to_string())], age.as_secs())?;
        }
        let (open, max) = self.connection_limits.open_and_max();
        exposition.gauge("connections", "Open client connections")?.write_gauge(&[], open as u64)?;
        exposition.gauge("connections_max", "Maximum number of client connections")?.write_gauge(&[], max as u64)?;
        let [accepted, refused] = self.connection_limits.totals();
        exposition.counter("connections_accepted", "Accepted client connections")?.write_counter(&[], accepted)?;
        exposition
            .counter(
                "connections_rejected",
                "Accepted client connections that were closed because max_connections_per_ip was reached",
            )?
            .write_counter(&[], refused)?;
        self.write_clients(exposition)?;
        self.write_reloads(exposition)?;
        self.write_requests(exposition)?;
        self.write_decisions(exposition)?;
        self.write_store(exposition)?;
        self.write_upstreams(exposition)?;
        self.write_authentication(exposition)?;
        self.write_acme(exposition)?;
        self.write_quota_events(exposition)?;
        self.write_dropped(exposition)
    }

    /// Write the process metrics with the same names and meanings as the Prometheus client libraries, and the metrics of
    /// envoyproxy/ratelimit.
    fn write_process(&self, exposition: &mut Exposition<'_>) -> fmt::Result {
        exposition
            .gauge("process_start_time_seconds", "Start time of the process since the Unix epoch")?
            .write_gauge(&[], self.started_at_s)?;
        self.write_envoyproxy_ratelimit(exposition)?;
        let Some(usage) = ProcessUsage::read() else { return Ok(()) };
        exposition
            .counter("process_cpu_seconds", "User and system CPU time of the process")?
            .write_seconds(&[], usage.cpu_s)?;
        exposition
            .gauge("process_resident_memory_bytes", "Resident memory of the process")?
            .write_gauge(&[], usage.resident_bytes)?;
        exposition
            .gauge("process_virtual_memory_bytes", "Virtual memory of the process")?
            .write_gauge(&[], usage.virtual_bytes)?;
        exposition.gauge("process_open_fds", "Open file descriptors")?.write_gauge(&[], usage.open_files)?;
        match usage.max_files {
            Some(max) => {
                exposition.gauge("process_max_fds", "Maximum number of open file descriptors")?.write_gauge(&[], max)
            }
            None => Ok(()),
        }
    }
}

impl ProcessState {
    fn write_clients(&self, exposition: &mut Exposition<'_>) -> fmt::Result {
        let metrics: Vec<_> = self.listener_metrics.all().into_iter().flat_map(|(_, workers)| workers).collect();
        let [received, sent] = sum_counts(metrics.iter().map(|metrics| metrics.bytes()));
        exposition.counter("received_bytes", "Bytes received from clients")?.write_counter(&[], received)?;
        exposition.counter("sent_bytes", "Bytes sent to clients")?.write_counter(&[], sent)?;
        let [too_many_resets] = sum_counts(metrics.iter().map(|metrics| metrics.too_many_resets.values()));
        exposition
            .counter(
                "connections_closed_for_resets",
                "HTTP/2 client connections that were closed because the client reset too many requests",
            )?
            .write_counter(&[], too_many_resets)?;
        let [ignored] = sum_counts(
            self.request_metrics
                .ignored_websockets
                .all()
                .iter()
                .flat_map(|(_, workers)| workers)
                .map(|count| count.values()),
        );
        exposition
            .counter("websockets_ignored", "Requests for WebSockets on routes that do not allow WebSockets")?
            .write_counter(&[], ignored)?;
        let mut writer = exposition.counter("tls_handshakes", "TLS handshakes with clients")?;
        for (index, version) in TLS_VERSIONS.iter().enumerate() {
            let counts = sum_counts(metrics.iter().map(|metrics| metrics.handshakes[index].values()));
            for (alpn, count) in APPLICATION_PROTOCOLS.iter().zip(counts) {
                let labels = [("result", "ok"), ("reason", NO_REASON), ("version", version), ("alpn", alpn)];
                writer.write_counter(&labels, count)?;
            }
        }
        let counts = sum_counts(metrics.iter().map(|metrics| metrics.handshake_failures.values()));
        for (failure, count) in HandshakeFailure::ALL.iter().zip(counts) {
            let reason = failure.label();
            let labels = [("result", "failed"), ("reason", reason), ("version", NO_REASON), ("alpn", NO_REASON)];
            writer.write_counter(&labels, count)?;
        }
        let active = self.config_handle.active();
        // If several certificates have the same name, write the expiry of the certificate that expires first.
        let mut not_after = BTreeMap::<(String, &str), u64>::new();
        let mut add = |name: String, source, certificate: &Certificate| {
            let expiry = not_after.entry((name, source)).or_insert(u64::MAX);
            *expiry = certificate.not_after_s().min(*expiry);
        };
        let listeners = active.config.listeners.iter().filter_map(|listener| listener.tls.as_ref());
        for certificate in listeners.flat_map(|tls| tls.tls.certificates()) {
            add(certificate.name(), "file", &certificate);
        }
        if let Some(acme) = &active.config.acme {
            for name in &acme.names {
                if let Some(certificate) = acme.certificates.get(name).certificate {
                    add(name.to_string(), "acme", &certificate);
                }
            }
        }
        let mut writer = exposition.gauge(
            "tls_certificate_not_after_timestamp_seconds",
            "Time at which a certificate expires, in seconds since the Unix epoch",
        )?;
        for ((name, source), seconds) in &not_after {
            writer.write_gauge(&[("name", name), ("source", source)], *seconds)?;
        }
        Ok(())
    }

    fn write_reloads(&self, exposition: &mut Exposition<'_>) -> fmt::Result {
        let mut writer = exposition.counter("config_reloads", "Attempts to reload the configuration, by result")?;
        for (result, count) in ["ok", "error"].iter().zip(self.config_handle.reload_counts()) {
            writer.write_counter(&[("result", result)], count)?;
        }
        let mut writer = exposition.counter(
            "hot_restarts",
            "Hot restarts: ok is 1 if a hot restart has started this process; error counts those of this process that \
             failed",
        )?;
        for (result, count) in ["ok", "error"].iter().zip(self.hot_restarts.values()) {
            writer.write_counter(&[("result", result)], count)?;
        }
        let successful = u64::from(self.config_handle.last_failure().is_none());
        exposition
            .gauge(
                "config_last_reload_successful",
                "1 if the last configuration reload succeeded, 0 if it was rejected",
            )?
            .write_gauge(&[], successful)?;
        let mut writer = exposition.gauge(
            "file_last_reload_successful",
            "1 if the newest content of all files of a kind is in use, 0 if a file is invalid or cannot be read",
        )?;
        let rejected = self.config_handle.rejected_files();
        for kind in FileKind::ALL {
            let is_successful = rejected.keys().all(|(rejected, _)| *rejected != kind);
            writer.write_gauge(&[("kind", kind.label())], u64::from(is_successful))?;
        }
        let active = self.config_handle.active();
        if active.config.xds.is_some() {
            let received = &self.config_handle.received;
            exposition
                .gauge("xds_connected", "1 if there is a stream to the management server of `ratelimit.xds`")?
                .write_gauge(&[], received.is_connected.load(Ordering::Relaxed).into())?;
            let mut writer = exposition
                .counter("xds_responses", "Responses of the management server of `ratelimit.xds`, by result")?;
            for (result, count) in [("accepted", &received.accepted), ("rejected", &received.rejected)] {
                writer.write_counter(&[("result", result)], count.load(Ordering::Relaxed))?;
            }
        }
        exposition
            .gauge("config_info", "1, with the revision of the active configuration")?
            .write_gauge(&[("revision", &active.config.revision)], 1)?;
        let active_since_s = active.active_since_us / 1_000_000;
        exposition
            .gauge(
                "config_last_reload_success_timestamp_seconds",
                "Time at which the active configuration was loaded, in seconds since the Unix epoch",
            )?
            .write_gauge(&[], active_since_s)
    }

    fn write_requests(&self, exposition: &mut Exposition<'_>) -> fmt::Result {
        let writer = exposition
            .counter("http_requests", "Responses by route and status class; the route is empty if no route matched")?;
        let routes = self.by_route(&self.request_metrics.routes);
        write_status_classes(writer, "route", &routes)?;
        let mut writer = exposition.counter(
            "http_responses",
            "Responses by route and status, for selected error statuses; 499: the client aborted the request",
        )?;
        for (route, counters) in self.by_route(&self.request_metrics.statuses) {
            let counts = sum_counts(counters.iter().map(|counter| counter.values()));
            for (status, count) in COUNTED_STATUSES.iter().zip(counts) {
                writer.write_counter(&[("route", &route), ("status", status)], count)?;
            }
        }
        let mut writer = exposition.counter(
            "http_request_outcomes",
            "Requests by route and outcome, as in the access log, except for `ok`; the series of an outcome begins with \
             its first request",
        )?;
        for (route, counters) in self.by_route(&self.request_metrics.outcomes) {
            let counts = sum_counts(counters.iter().map(|counter| counter.values()));
            for (outcome, count) in RequestOutcome::ALL.iter().zip(counts).filter(|(_, count)| *count > 0) {
                writer.write_counter(&[("route", &route), ("outcome", outcome.label())], count)?;
            }
        }
        let writer = exposition.histogram("http_request_duration", "Time from the request to the response headers")?;
        write_latency(writer, "route", &routes)
    }

    /// Return metrics by the value of the label `route`.
    fn by_route<T: Default>(&self, family: &MetricFamily<T>) -> Grouped<String, T> {
        let active = self.config_handle.active();
        group(family.all(), |name| active.config.metric_routes.label(name).to_owned())
    }

    fn write_decisions(&self, exposition: &mut Exposition<'_>) -> fmt::Result {
        exposition
            .gauge("decisions_held", "Decisions that programs have not settled or released yet")?
            .write_gauge(&[], self.held_decisions.count() as u64)?;
        let mut writer = exposition.counter(
            "limit_decisions",
            "Rate limit decisions by limit; if a request is denied, only the limits that denied it are counted",
        )?;
        for (limit, counters) in self.request_metrics.limits.all() {
            let counts = sum_counts(counters.iter().map(|counter| counter.values()));
            for (limit_decision, count) in LimitDecision::ALL.iter().zip(counts) {
                writer.write_counter(&[("limit", &limit), ("decision", limit_decision.label())], count)?;
            }
        }
        let mut writer = exposition.counter(
            "descriptor_decisions",
            "Decisions of the rate limit service by domain and descriptor; if a request is denied, only the descriptors \
             that denied it are counted",
        )?;
        for (name, counters) in self.request_metrics.descriptors.all() {
            let (domain, entries) = split_descriptor_name(&name);
            let counts = sum_counts(counters.iter().map(|counter| counter.values()));
            for (limit_decision, count) in LimitDecision::ALL.iter().zip(counts) {
                let labels = [("domain", domain), ("descriptor", entries), ("decision", limit_decision.label())];
                writer.write_counter(&labels, count)?;
            }
        }
        self.write_calls(exposition)?;
        let active = self.config_handle.active();
        let tokens = group(self.request_metrics.tokens.all(), |name| {
            let (route, limit) = split_token_counter_name(name);
            (active.config.metric_routes.label(route).to_owned(), limit.to_owned())
        });
        let mut writer = exposition.counter(
            "limit_reserved",
            "Costs that requests to LLM APIs reserved, by route and limit; counted when the reservation is settled",
        )?;
        for ((route, limit), counters) in &tokens {
            let [reserved, ..] = sum_counts(counters.iter().map(|counter| counter.values()));
            writer.write_counter(&[("route", route), ("limit", limit)], reserved)?;
        }
        let mut writer =
            exposition.counter("limit_settled", "Settled costs of requests to LLM APIs, by route, limit and source")?;
        for ((route, limit), counters) in &tokens {
            let [_, settled @ ..] = sum_counts(counters.iter().map(|counter| counter.values()));
            for (source, cost) in SETTLED_BY.iter().zip(settled) {
                writer.write_counter(&[("route", route), ("limit", limit), ("source", source)], cost)?;
            }
        }
        let mut writer = exposition.counter(
            "llm_tokens",
            "Tokens of responses of LLM APIs that limits count, by route and kind, as reported or estimated",
        )?;
        for (route, counters) in self.by_route(&self.request_metrics.token_kinds) {
            let counts = sum_counts(counters.iter().map(|counter| counter.values()));
            for (kind, tokens) in COUNTED_KINDS.iter().zip(counts) {
                writer.write_counter(&[("route", &route), ("kind", kind)], tokens)?;
            }
        }
        let durations = [&self.request_metrics.check_durations, &self.request_metrics.call_durations];
        let durations: Vec<_> = durations.into_iter().flat_map(MetricFamily::all).collect();
        let mut writer = exposition.histogram(
            "decision_duration",
            "Duration of the rate limit check of a request, including all its limits",
        )?;
        write_histogram(&mut writer, &[], durations.iter().flat_map(|(_, histograms)| histograms).map(AsRef::as_ref))
    }

    /// Write the metrics of the calls of the rate limit service.
    fn write_calls(&self, exposition: &mut Exposition<'_>) -> fmt::Result {
        let mut writer = exposition.counter("ratelimit_calls", "Calls of the rate limit service by result")?;
        for (result, count) in CallResult::ALL.iter().zip(self.call_counts()) {
            writer.write_counter(&[("result", result.label())], count)?;
        }
        let mut writer = exposition.counter(
            "descriptors_unmatched",
            "Descriptors of calls that no descriptor of the configuration matches, by domain; the domain is empty if it \
             is not configured",
        )?;
        for (domain, counters) in self.request_metrics.unmatched_descriptors.all() {
            let [count] = sum_counts(counters.iter().map(|counter| counter.values()));
            writer.write_counter(&[("domain", &domain)], count)?;
        }
        Ok(())
    }

    pub(super) fn call_counts(&self) -> [u64; CallResult::ALL.len()] {
        let calls = self.request_metrics.calls.all();
        sum_counts(calls.iter().flat_map(|(_, workers)| workers).map(|counter| counter.values()))
    }

    /// Write the metrics of envoyproxy/ratelimit, with the names of its Prometheus exporter, if the configuration has its
    /// YAML files. They are gauges, because the names of counters would get a suffix.
    fn write_envoyproxy_ratelimit(&self, exposition: &mut Exposition<'_>) -> fmt::Result {
        const NAMES: [&str; HIT_KINDS.len()] = [
            "ratelimit_service_rate_limit_total_hits",
            "ratelimit_service_rate_limit_over_limit",
            "ratelimit_service_rate_limit_near_limit",
            "ratelimit_service_rate_limit_within_limit",
            "ratelimit_service_rate_limit_shadow_mode",
        ];
        let hits = self.request_metrics.hits.all();
        if hits.is_empty() {
            return Ok(());
        }
        // Descriptors whose first two entries are the same have one series.
        let mut counts: BTreeMap<_, [u64; HIT_KINDS.len()]> = BTreeMap::new();
        for (name, counters) in &hits {
            let (domain, labels) = split_hits_name(name);
            let [key1, key2] = [0, 1].map(|index| labels.get(index).copied().unwrap_or_default());
            let of_series = counts.entry([domain, key1, key2]).or_default();
            *of_series = sum_counts(counters.iter().map(|counter| counter.values()).chain([*of_series]));
        }
        for (kind, name) in NAMES.iter().enumerate() {
            let mut writer = exposition.gauge(name, "As in envoyproxy/ratelimit: costs by domain and entries")?;
            for ([domain, key1, key2], counts) in &counts {
                let labels = [("domain", *domain), ("key1", key1), ("key2", key2)];
                let present: Vec<_> = labels.into_iter().filter(|(_, value)| !value.is_empty()).collect();
                writer.write_gauge(&present, counts[kind])?;
            }
        }
        let calls = self.call_counts();
        exposition
            .gauge("ratelimit_service_total_requests", "As in envoyproxy/ratelimit: calls")?
            .write_gauge(&[("grpc_method", "ShouldRateLimit")], calls.iter().sum())?;
        let mut writer = exposition
            .gauge("ratelimit_service_should_rate_limit_error", "As in envoyproxy/ratelimit: failed calls")?;
        for (err_type, result) in [("redis_error", CallResult::StoreError), ("service_error", CallResult::Invalid)] {
            writer.write_gauge(&[("err_type", err_type)], calls[result as usize])?;
        }
        let names = ["ratelimit_service_config_load_success", "ratelimit_service_config_load_error"];
        for (name, count) in names.iter().zip(self.config_handle.reload_counts()) {
            exposition
                .gauge(name, "As in envoyproxy/ratelimit: loads of the configuration")?
                .write_gauge(&[], count)?;
        }
        Ok(())
    }

    fn write_store(&self, exposition: &mut Exposition<'_>) -> fmt::Result {
        let limiter_metrics: Vec<_> = self.limiter_metrics.all().into_iter().flat_map(|(_, metrics)| metrics).collect();
        let mut writer = exposition.counter(
            "checks",
            "Checks by the mechanism that decided them: a separate call (store), a call for several checks \
             (coalesced), prefetched tokens or the denial cache",
        )?;
        let counts = sum_counts(limiter_metrics.iter().map(|metrics| metrics.checks.values()));
        for (answered_by, count) in AnsweredBy::ALL.iter().zip(counts) {
            writer.write_counter(&[("answered_by", answered_by.label())], count)?;
        }
        let mut writer =
            exposition.histogram("store_round_trip_duration", "Time from sending a check to the reply of the store")?;
        write_histogram(&mut writer, &[], limiter_metrics.iter().map(|metrics| &metrics.round_trips))?;
        let mut writer = exposition.counter("store_calls", "Script calls to the store, each with a batch of checks")?;
        writer.write_counter(&[], limiter_metrics.iter().map(|metrics| metrics.calls.values()[0]).sum())?;
        let mut writer = exposition.counter(
            "store_failures",
            "Checks that failed at the store, that it rejected because it accepts no writes, or that were not sent \
             because the circuit breaker is open or the queue is full",
        )?;
        let counts = sum_counts(limiter_metrics.iter().map(|metrics| metrics.failures.values()));
        for (kind, count) in ["failed", "not_permitted", "writes_rejected"].iter().zip(counts) {
            writer.write_counter(&[("kind", kind)], count)?;
        }
        let mut writer = exposition.counter(
            "store_cost_lost",
            "Cost that may remain charged although it was to be refunded (refund), or that may not have been charged \
             (charge), because the store did not reply or could not be reached",
        )?;
        let costs = sum_counts(limiter_metrics.iter().map(|metrics| metrics.lost_cost.values()));
        for (kind, cost) in LostCost::ALL.iter().zip(costs) {
            writer.write_counter(&[("kind", kind.label())], cost)?;
        }
        let [evicted, refused] = self.memory.evictions_and_rejections();
        exposition
            .gauge("memory_states", "Limit states in the memory store")?
            .write_gauge(&[], self.memory.len() as u64)?;
        exposition
            .counter("memory_states_evicted", "States evicted before expiry because max_memory_states was reached")?
            .write_counter(&[], evicted)?;
        exposition
            .counter(
                "memory_states_rejected",
                "New identities that were not counted because max_memory_states was reached",
            )?
            .write_counter(&[], refused)?;
        exposition
            .gauge(
                "memory_usage_totals",
                "Usage totals in memory; with Redis, totals that have not been sent to Redis yet",
            )?
            .write_gauge(&[], self.memory.usage.len() as u64)?;
        exposition
            .counter(
                "usage_cost_lost",
                "Charged cost that is missing from the usage totals, because of max_memory_states or a store outage",
            )?
            .write_counter(&[], self.memory.usage.lost())?;
        exposition
            .gauge("store_gateways", "Gateways among which local shares divide each limit while the store is down")?
            .write_gauge(&[], self.config_handle.active().config.store.gateways.get())?;
        let limit = self.config_handle.active().config.server.memory.as_ref().map_or(0, |limit| limit.bytes);
        exposition
            .gauge("memory_limit_bytes", "Memory that the process may use; 0 without a limit")?
            .write_gauge(&[], limit)?;
        exposition
            .gauge("memory_used_bytes", "Memory that counts towards the limit; 0 without a limit")?
            .write_gauge(&[], self.memory_guard.used())?;
        exposition
            .counter(
                "memory_ended_responses",
                "Responses that were ended because their clients did not read while the memory was nearly used up",
            )?
            .write_counter(&[], self.memory_guard.ended())?;
        let failing_stores = self.failing_stores();
        exposition
            .gauge("store_up", "1 while all circuit breakers of the store are closed, otherwise 0")?
            .write_gauge(&[], u64::from(failing_stores.is_empty()))?;
        exposition
            .gauge("store_circuit_breakers_open", "Open circuit breakers of the store or its cluster nodes")?
            .write_gauge(&[], failing_stores.len() as u64)?;
        exposition
            .counter("store_circuit_breaker_openings", "Number of times that a circuit breaker of the store opened")?
            .write_counter(&[], self.breaker_open_count())
    }

    fn write_upstreams(&self, exposition: &mut Exposition<'_>) -> fmt::Result {
        let writer = exposition.counter(
            "upstream_requests",
            "Requests by upstream and status class of the response; `none` if there was no response",
        )?;
        let upstreams = group(self.request_metrics.upstreams.all(), str::to_owned);
        write_status_classes(writer, "upstream", &upstreams)?;
        let writer = exposition
            .histogram("upstream_response_duration", "Time from the upstream request to the response headers")?;
        write_latency(writer, "upstream", &upstreams)?;
        let mut writer = exposition.counter("upstream_retries", "Retries by upstream and reason")?;
        for (upstream, counters) in self.request_metrics.retries.all() {
            let counts = sum_counts(counters.iter().map(|counter| counter.values()));
            for (reason, count) in RetryReason::ALL.iter().zip(counts) {
                writer.write_counter(&[("upstream", &upstream), ("reason", reason.label())], count)?;
            }
        }
        let mut writer = exposition.counter(
            "upstream_failures",
            "Requests without a usable response of the upstream, by upstream and reason",
        )?;
        for (upstream, counters) in self.request_metrics.upstream_failures.all() {
            let counts = sum_counts(counters.iter().map(|counter| counter.values()));
            for (reason, count) in FailureReason::ALL.iter().zip(counts) {
                writer.write_counter(&[("upstream", &upstream), ("reason", reason.label())], count)?;
            }
        }
        self.write_mirrors(exposition)?;
        let clusters = self.config_handle.active().clusters.clone();
        let statuses: Vec<_> = clusters.iter().map(|cluster| (&*cluster.settings.name, cluster.status())).collect();
        let endpoints = || statuses.iter().flat_map(|(name, all)| all.iter().map(move |endpoint| (*name, endpoint)));
        let mut writer = exposition
            .gauge("upstream_server_up", "0 while an endpoint is unhealthy, ejected or unreachable, otherwise 1")?;
        for (upstream, endpoint) in endpoints() {
            writer.write_gauge(
                &[("upstream", upstream), ("server", &endpoint.server)],
                u64::from(!endpoint.state.is_fault()),
            )?;
        }
        let mut writer = exposition.gauge("upstream_servers", "Endpoints by upstream and state")?;
        for (upstream, endpoints) in &statuses {
            for state in ServerState::ALL {
                let count = endpoints.iter().filter(|endpoint| endpoint.state == state).count();
                writer.write_gauge(&[("upstream", upstream), ("state", state.label())], count as u64)?;
            }
        }
        let mut writer = exposition.counter("upstream_connects", "Attempts to connect by upstream and result")?;
        for cluster in clusters.iter() {
            for (result, count) in ConnectResult::ALL.iter().zip(cluster.metrics().connects.values()) {
                let labels = [("upstream", &*cluster.settings.name), ("result", result.label())];
                writer.write_counter(&labels, count)?;
            }
        }
        let mut writer = exposition.gauge("upstream_connections", "Open connections by upstream")?;
        for cluster in clusters.iter() {
            let open = cluster.metrics().open_connections() as u64;
            writer.write_gauge(&[("upstream", &cluster.settings.name)], open)?;
        }
        let mut writer = exposition.counter(
            "upstream_dns_lookups",
            "Lookups of the host names of an upstream in DNS, by upstream and result",
        )?;
        for cluster in clusters.iter() {
            for (result, count) in ["ok", "error"].iter().zip(cluster.metrics().lookups.values()) {
                writer.write_counter(&[("upstream", &cluster.settings.name), ("result", result)], count)?;
            }
        }
        let mut writer = exposition
            .gauge("upstream_server_requests_in_flight", "Requests in flight at an endpoint, from all workers")?;
        for (upstream, endpoint) in endpoints() {
            writer.write_gauge(&[("upstream", upstream), ("server", &endpoint.server)], endpoint.in_flight as u64)?;
        }
        Ok(())
    }

    fn write_mirrors(&self, exposition: &mut Exposition<'_>) -> fmt::Result {
        let mirrors = self.request_metrics.mirrors.all();
        let mut writer = exposition.counter("mirrored_requests", "Mirrored copies of requests, by route and result")?;
        for (route, stats) in &mirrors {
            let counts = sum_counts(stats.iter().map(|stats| stats.sent.values()));
            for (result, count) in CopyResult::ALL.iter().zip(counts) {
                writer.write_counter(&[("route", route), ("result", result.label())], count)?;
            }
        }
        let mut writer =
            exposition.counter("mirrored_requests_dropped", "Requests that were not mirrored, by route and reason")?;
        for (route, stats) in &mirrors {
            let counts = sum_counts(stats.iter().map(|stats| stats.dropped.values()));
            for (reason, count) in DropReason::ALL.iter().zip(counts) {
                writer.write_counter(&[("route", route), ("reason", reason.label())], count)?;
            }
        }
        let mut writer = exposition.gauge("mirrored_requests_in_flight", "Mirrored copies in flight, by route")?;
        for (route, stats) in &mirrors {
            let in_flight = stats.iter().map(|stats| stats.in_flight() as u64).sum();
            writer.write_gauge(&[("route", route)], in_flight)?;
        }
        Ok(())
    }

    fn write_authentication(&self, exposition: &mut Exposition<'_>) -> fmt::Result {
        let mut writer = exposition.counter(
            "forward_auth_requests",
            "Requests by authentication server and result; cached: an earlier result of the server was used",
        )?;
        for (provider, counters) in self.request_metrics.forward_auth.all() {
            let counts = sum_counts(counters.iter().map(|counter| counter.values()));
            for (result, count) in AuthResult::ALL.iter().zip(counts) {
                writer.write_counter(&[("provider", &provider), ("result", result.label())], count)?;
            }
        }
        let config = self.config_handle.active().config.clone();
        let mut writer = exposition.counter("jwks_refreshes", "Attempts to fetch a key set by provider and result")?;
        for source in &config.auth.key_urls {
            for (result, count) in ["ok", "error"].iter().zip(source.keys.counts()) {
                writer.write_counter(&[("provider", &source.name), ("result", result)], count)?;
            }
        }
        let mut writer = exposition.gauge(
            "jwks_last_success_timestamp_seconds",
            "Time of the last successful fetch of the key set, in seconds since the Unix epoch; 0 before the first",
        )?;
        for source in &config.auth.key_urls {
            writer.write_gauge(&[("provider", &source.name)], source.keys.last_success_us() / 1_000_000)?;
        }
        Ok(())
    }

    fn write_acme(&self, exposition: &mut Exposition<'_>) -> fmt::Result {
        let active = self.config_handle.active();
        let results = active.config.acme.as_ref().map_or([0; 2], |acme| acme.certificates.results());
        let mut writer = exposition.counter("acme_orders", "Attempts to obtain a certificate by ACME, by result")?;
        for (result, count) in ["ok", "error"].iter().zip(results) {
            writer.write_counter(&[("result", result)], count)?;
        }
        let mut writer = exposition
            .gauge("acme_failed_attempts", "Failed attempts to obtain a certificate since the last success")?;
        for (acme, name) in active.config.acme.iter().flat_map(|acme| acme.names.iter().map(move |name| (acme, name))) {
            writer.write_gauge(&[("name", name)], u64::from(acme.certificates.get(name).failures))?;
        }
        Ok(())
    }

    fn write_quota_events(&self, exposition: &mut Exposition<'_>) -> fmt::Result {
        let all = self.delivery_stats.all();
        let destinations = || all.iter().flat_map(|(name, stats)| stats.iter().map(move |stats| (&**name, stats)));
        let mut writer = exposition.counter(
            "quota_events",
            "Quota events by destination and result; claimed: another gateway sends the event",
        )?;
        for (destination, stats) in destinations() {
            for (result, count) in DeliveryResult::ALL.iter().zip(stats.results.values()) {
                writer.write_counter(&[("destination", destination), ("result", result.label())], count)?;
            }
        }
        let mut writer = exposition
            .counter("quota_event_failed_attempts", "Failed attempts to deliver a quota event, by destination")?;
        for (destination, stats) in destinations() {
            writer.write_counter(&[("destination", destination)], stats.failed_attempts())?;
        }
        let mut writer = exposition.gauge("quota_events_pending", "Undelivered quota events by destination")?;
        for (destination, stats) in destinations() {
            writer.write_gauge(&[("destination", destination)], stats.pending())?;
        }
        exposition
            .counter(
                "quota_events_dropped",
                "Quota events that were dropped because the queue of the process was full",
            )?
            .write_counter(&[], self.event_queue.dropped())
    }

    fn write_dropped(&self, exposition: &mut Exposition<'_>) -> fmt::Result {
        let dropped = self.telemetry_sinks.access_log.as_ref().map_or(0, |access| access.dropped());
        exposition.counter("access_log_dropped", "Access log records that were lost")?.write_counter(&[], dropped)?;
        let lost = self.telemetry_sinks.trace_exporter.as_ref().map_or(0, |spans| spans.dropped());
        exposition.counter("trace_spans_dropped", "Trace spans that were lost")?.write_counter(&[], lost)
    }
}

/// The metrics of all workers by labels.
type Grouped<K, T> = BTreeMap<K, Vec<Arc<T>>>;

fn group<K: Ord, T>(all: Vec<(Box<str>, Vec<Arc<T>>)>, labels: impl Fn(&str) -> K) -> Grouped<K, T> {
    let mut grouped = Grouped::new();
    for (name, workers) in all {
        grouped.entry(labels(&name)).or_insert_with(Vec::new).extend(workers);
    }
    grouped
}

fn write_status_classes(
    mut writer: MetricWriter<'_>,
    label: &'static str,
    all: &Grouped<String, ResponseStats>,
) -> fmt::Result {
    for (name, response_stats) in all {
        let counts = sum_counts(response_stats.iter().map(|stats| stats.status_classes.values()));
        // For routes, omit the series for requests without a response, because the gateway always sends a response.
        let classes = STATUS_CLASSES
            .iter()
            .chain([&NO_RESPONSE])
            .zip(counts)
            .filter(|(class, _)| **class != NO_RESPONSE || label != "route");
        for (class, count) in classes {
            writer.write_counter(&[(label, name), ("status", class)], count)?;
        }
    }
    Ok(())
}

fn write_latency(
    mut writer: MetricWriter<'_>,
    label: &'static str,
    all: &Grouped<String, ResponseStats>,
) -> fmt::Result {
    for (name, response_stats) in all {
        write_histogram(&mut writer, &[(label, name)], response_stats.iter().map(|stats| &stats.latency))?;
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

// === Resource usage of the process, from `/proc/self` (proc(5)) ===

/// Resource usage of the process.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ProcessUsage {
    /// User and system CPU time in seconds.
    pub(super) cpu_s: f64,
    /// Resident memory in bytes.
    pub(super) resident_bytes: u64,
    /// Virtual memory in bytes.
    pub(super) virtual_bytes: u64,
    /// Open file descriptors.
    pub(super) open_files: u64,
    /// Maximum number of open file descriptors. `None` if there is no maximum.
    pub(super) max_files: Option<u64>,
}

impl ProcessUsage {
    /// Read the current usage. Return `None` on systems without `/proc`.
    pub(super) fn read() -> Option<Self> {
        let stat = fs::read_to_string("/proc/self/stat").ok()?;
        let memory = fs::read_to_string("/proc/self/statm").ok()?;
        let mut pages = memory.split(' ').map_while(|count| count.parse::<u64>().ok());
        let page_size = page_size() as u64;
        let virtual_pages = pages.next()?;
        let resident_pages = pages.next()?;
        // Subtract one, because the process uses a file descriptor to read the directory `/proc/self/fd`.
        let open_files = (fs::read_dir("/proc/self/fd").ok()?.count() as u64).saturating_sub(1);
        Some(ProcessUsage {
            cpu_s: cpu_ticks(&stat)? as f64 / clock_ticks_per_second() as f64,
            resident_bytes: resident_pages * page_size,
            virtual_bytes: virtual_pages * page_size,
            open_files,
            max_files: getrlimit(Resource::Nofile).current,
        })
    }
}

/// Return the user and system time of `/proc/PID/stat`, in clock ticks: the fields 14 and 15.
fn cpu_ticks(stat: &str) -> Option<u64> {
    // Field 2 is the name of the program in parentheses, which can contain spaces.
    let (_, fields) = stat.rsplit_once(") ")?;
    let mut times = fields.split(' ').skip(11);
    Some(times.next()?.parse::<u64>().ok()? + times.next()?.parse::<u64>().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_user_and_system_time() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 1 2 3 4 250 50 6 7 20 0 9 0 100 200 300";
        assert_eq!(cpu_ticks(stat), Some(300));
    }
}
