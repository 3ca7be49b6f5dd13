//! Writes metrics in the Prometheus text format or in OpenMetrics. Callers pass plain names and numbers.

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};

/// Label names and values, in the order of the output.
pub type Labels<'a> = &'a [(&'static str, &'a str)];

/// A source of metrics. Each scrape calls its functions.
pub trait MetricSource: fmt::Debug + Send + Sync + 'static {
    /// Write all metrics except the process metrics. The names of these metrics get the prefix `sluicegate_`.
    ///
    /// # Errors
    /// Formatting fails.
    fn write(&self, page: &mut Exposition<'_>) -> fmt::Result;

    /// Write the process metrics and the metrics of other programs, whose names have no prefix.
    ///
    /// # Errors
    /// Formatting fails.
    fn write_process(&self, page: &mut Exposition<'_>) -> fmt::Result;
}

/// Format of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpositionFormat {
    /// Prometheus text format 0.0.4.
    PrometheusText,
    /// OpenMetrics 1.0.
    OpenMetrics,
}

impl ExpositionFormat {
    /// Choose the format by the `Accept` header of the scrape: OpenMetrics if the header names it, otherwise the
    /// Prometheus text format.
    pub fn from_accept(accept_header: &str) -> Self {
        if accept_header.contains("application/openmetrics-text") {
            ExpositionFormat::OpenMetrics
        } else {
            ExpositionFormat::PrometheusText
        }
    }

    /// Return the media type of the output.
    pub fn content_type(self) -> &'static str {
        match self {
            ExpositionFormat::PrometheusText => "text/plain; version=0.0.4; charset=utf-8",
            ExpositionFormat::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// A writer for metrics.
#[derive(Debug)]
pub struct Exposition<'a>(DescriptorEncoder<'a>);

/// A writer for the samples of one metric.
pub struct MetricWriter<'a>(MetricEncoder<'a>);

impl Exposition<'_> {
    /// Begin a counter. The names of its samples get the suffix `_total`.
    ///
    /// # Errors
    /// Formatting fails.
    pub fn counter(&mut self, name: &'static str, help: &str) -> Result<MetricWriter<'_>, fmt::Error> {
        self.0.encode_descriptor(name, help, None, MetricType::Counter).map(MetricWriter)
    }

    /// Begin a gauge.
    ///
    /// # Errors
    /// Formatting fails.
    pub fn gauge(&mut self, name: &'static str, help: &str) -> Result<MetricWriter<'_>, fmt::Error> {
        self.0.encode_descriptor(name, help, None, MetricType::Gauge).map(MetricWriter)
    }

    /// Begin a histogram of durations. Its name gets the suffix `_seconds`.
    ///
    /// # Errors
    /// Formatting fails.
    pub fn histogram(&mut self, name: &'static str, help: &str) -> Result<MetricWriter<'_>, fmt::Error> {
        self.0.encode_descriptor(name, help, Some(&Unit::Seconds), MetricType::Histogram).map(MetricWriter)
    }
}

impl MetricWriter<'_> {
    /// Write a sample. A sample with empty `labels` is the only sample of its metric.
    fn encode<T>(
        &mut self,
        labels: Labels<'_>,
        write: impl FnOnce(&mut MetricEncoder<'_>) -> Result<T, fmt::Error>,
    ) -> Result<T, fmt::Error> {
        if labels.is_empty() { write(&mut self.0) } else { write(&mut self.0.encode_family(&labels)?) }
    }

    /// Write a counter sample.
    ///
    /// # Errors
    /// Formatting fails.
    pub fn write_counter(&mut self, labels: Labels<'_>, value: u64) -> fmt::Result {
        self.encode(labels, |line| line.encode_counter::<NoLabelSet, _, u64>(&value, None))
    }

    /// Write a gauge sample.
    ///
    /// # Errors
    /// Formatting fails.
    pub fn write_gauge(&mut self, labels: Labels<'_>, value: u64) -> fmt::Result {
        self.encode(labels, |line| line.encode_gauge(&(value as i64)))
    }

    /// Write a sample of a counter whose value is a number of seconds.
    ///
    /// # Errors
    /// Formatting fails.
    pub fn write_seconds(&mut self, labels: Labels<'_>, seconds: f64) -> fmt::Result {
        self.encode(labels, |line| line.encode_counter::<NoLabelSet, _, u64>(&seconds, None))
    }

    /// Write a sample of a histogram. `bounds_us` has the upper bounds of the buckets in µs, and `bucket_counts` has
    /// the count of each bucket (not cumulative). The last bucket has no upper bound.
    ///
    /// # Errors
    /// Formatting fails.
    pub fn write_histogram(
        &mut self,
        labels: Labels<'_>,
        bounds_us: &[u64],
        bucket_counts: &[u64],
        sum_us: u64,
    ) -> fmt::Result {
        let bounds = bounds_us.iter().map(|us| *us as f64 / 1e6).chain([f64::INFINITY]);
        let buckets: Vec<_> = bounds.zip(bucket_counts.iter().copied()).collect();
        let count = buckets.iter().map(|(_, times)| times).sum();
        self.encode(labels, |line| line.encode_histogram::<NoLabelSet>(sum_us as f64 / 1e6, count, &buckets, None))
    }
}

#[derive(Debug)]
struct ProcessAdapter<S>(Arc<S>);

impl<S: MetricSource> Collector for ProcessAdapter<S> {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.0.write_process(&mut Exposition(encoder))
    }
}

#[derive(Debug)]
struct CollectorAdapter<S>(Arc<S>);

impl<S: MetricSource> Collector for CollectorAdapter<S> {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.0.write(&mut Exposition(encoder))
    }
}

/// Write the current metrics of a source as text.
///
/// # Errors
/// Formatting fails, for example because the source returns an error.
pub fn render<S: MetricSource>(source: &Arc<S>, format: ExpositionFormat) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(ProcessAdapter(source.clone())));
    registry.sub_registry_with_prefix("sluicegate").register_collector(Box::new(CollectorAdapter(source.clone())));
    let mut output = String::new();
    text::encode(&mut output, &registry)?;
    Ok(match format {
        ExpositionFormat::OpenMetrics => output,
        ExpositionFormat::PrometheusText => to_prometheus_text(&output),
    })
}

/// Convert OpenMetrics to the Prometheus text format 0.0.4, in which the name of a counter includes `_total`.
fn to_prometheus_text(page: &str) -> String {
    let mut text = String::with_capacity(page.len());
    // The HELP line of a counter must be renamed, but only the TYPE line after it shows whether a metric is a counter.
    // Therefore, look ahead by one line.
    let mut lines = page.lines().peekable();
    while let Some(line) = lines.next() {
        let counter = |line: &str| line.starts_with("# TYPE ") && line.ends_with(" counter");
        let renamed = match line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
            Some((name, help)) if lines.peek().is_some_and(|next| counter(next)) => {
                Some(format!("# HELP {name}_total {help}"))
            }
            _ => line.strip_suffix(" counter").filter(|_| counter(line)).map(|named| format!("{named}_total counter")),
        };
        if line == "# EOF" || line.starts_with("# UNIT ") {
            continue;
        }
        text.push_str(renamed.as_deref().unwrap_or(line));
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Example;

    impl MetricSource for Example {
        fn write(&self, page: &mut Exposition<'_>) -> fmt::Result {
            page.counter("requests", "Requests")?.write_counter(&[("route", "a\"b")], 3)?;
            page.gauge("open", "Open")?.write_gauge(&[], 2)?;
            page.histogram("took", "Took")?.write_histogram(&[], &[1_000, 2_000], &[1, 0, 2], 7_500_000)
        }

        fn write_process(&self, page: &mut Exposition<'_>) -> fmt::Result {
            page.counter("process_cpu_seconds", "CPU")?.write_seconds(&[], 1.5)
        }
    }

    #[test]
    fn prometheus_and_openmetrics_expose_the_same_values() {
        let page = |form| super::render(&Arc::new(Example), form).unwrap();
        let lines = "sluicegate_took_seconds_sum 7.5\nsluicegate_took_seconds_count 3\n\
                     sluicegate_took_seconds_bucket{le=\"0.001\"} 1\nsluicegate_took_seconds_bucket{le=\"0.002\"} 1\n\
                     sluicegate_took_seconds_bucket{le=\"+Inf\"} 3\n";
        assert_eq!(
            page(ExpositionFormat::PrometheusText),
            format!(
                "# HELP process_cpu_seconds_total CPU\n# TYPE process_cpu_seconds_total counter\n\
                 process_cpu_seconds_total 1.5\n\
                 # HELP sluicegate_requests_total Requests\n# TYPE sluicegate_requests_total counter\n\
                 sluicegate_requests_total{{route=\"a\\\"b\"}} 3\n\
                 # HELP sluicegate_open Open\n# TYPE sluicegate_open gauge\nsluicegate_open 2\n\
                 # HELP sluicegate_took_seconds Took\n# TYPE sluicegate_took_seconds histogram\n{lines}"
            )
        );
        assert_eq!(
            page(ExpositionFormat::OpenMetrics),
            format!(
                "# HELP process_cpu_seconds CPU\n# TYPE process_cpu_seconds counter\n\
                 process_cpu_seconds_total 1.5\n\
                 # HELP sluicegate_requests Requests\n# TYPE sluicegate_requests counter\n\
                 sluicegate_requests_total{{route=\"a\\\"b\"}} 3\n\
                 # HELP sluicegate_open Open\n# TYPE sluicegate_open gauge\nsluicegate_open 2\n\
                 # HELP sluicegate_took_seconds Took\n# TYPE sluicegate_took_seconds histogram\n\
                 # UNIT sluicegate_took_seconds seconds\n{lines}# EOF\n"
            )
        );
    }
}
