//! A page of metrics in the text forms that Prometheus reads, from plain names and numbers.

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};

/// Names and values, in the order in which they are written.
pub type Labels<'a> = &'a [(&'static str, &'a str)];

/// What there is to read; it writes itself anew each time.
pub trait MetricSource: fmt::Debug + Send + Sync + 'static {
    /// Writes all.
    ///
    /// # Errors
    /// Of the page.
    fn write(&self, page: &mut Exposition<'_>) -> fmt::Result;
}

/// The form of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpositionFormat {
    /// Prometheus text format 0.0.4.
    PrometheusText,
    /// OpenMetrics 1.0.
    OpenMetrics,
}

impl ExpositionFormat {
    /// What somebody who accepts this gets.
    pub fn from_accept(accept_header: &str) -> Self {
        if accept_header.contains("application/openmetrics-text") {
            ExpositionFormat::OpenMetrics
        } else {
            ExpositionFormat::PrometheusText
        }
    }

    /// Its media type.
    pub fn content_type(self) -> &'static str {
        match self {
            ExpositionFormat::PrometheusText => "text/plain; version=0.0.4; charset=utf-8",
            ExpositionFormat::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// What is being written.
#[derive(Debug)]
pub struct Exposition<'a>(DescriptorEncoder<'a>);

/// One metric's lines.
pub struct MetricWriter<'a>(MetricEncoder<'a>);

impl Exposition<'_> {
    /// Counts; their names get `_total`.
    ///
    /// # Errors
    /// Of the page.
    pub fn counter(&mut self, name: &'static str, help: &str) -> Result<MetricWriter<'_>, fmt::Error> {
        self.0.encode_descriptor(name, help, None, MetricType::Counter).map(MetricWriter)
    }

    /// States.
    ///
    /// # Errors
    /// Of the page.
    pub fn gauge(&mut self, name: &'static str, help: &str) -> Result<MetricWriter<'_>, fmt::Error> {
        self.0.encode_descriptor(name, help, None, MetricType::Gauge).map(MetricWriter)
    }

    /// Times; their names get `_seconds`.
    ///
    /// # Errors
    /// Of the page.
    pub fn histogram(&mut self, name: &'static str, help: &str) -> Result<MetricWriter<'_>, fmt::Error> {
        self.0.encode_descriptor(name, help, Some(&Unit::Seconds), MetricType::Histogram).map(MetricWriter)
    }
}

impl MetricWriter<'_> {
    /// Of one of several; without labels there is only one.
    fn encode<T>(
        &mut self,
        labels: Labels<'_>,
        write: impl FnOnce(&mut MetricEncoder<'_>) -> Result<T, fmt::Error>,
    ) -> Result<T, fmt::Error> {
        if labels.is_empty() { write(&mut self.0) } else { write(&mut self.0.encode_family(&labels)?) }
    }

    /// A count.
    ///
    /// # Errors
    /// Of the page.
    pub fn write_counter(&mut self, labels: Labels<'_>, value: u64) -> fmt::Result {
        self.encode(labels, |line| line.encode_counter::<NoLabelSet, _, u64>(&value, None))
    }

    /// A state.
    ///
    /// # Errors
    /// Of the page.
    pub fn write_gauge(&mut self, labels: Labels<'_>, value: u64) -> fmt::Result {
        self.encode(labels, |line| line.encode_gauge(&(value as i64)))
    }

    /// How often something took how long: upper bounds in µs with the times in each bucket, the last without a bound.
    ///
    /// # Errors
    /// Of the page.
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
struct CollectorAdapter<S>(Arc<S>);

impl<S: MetricSource> Collector for CollectorAdapter<S> {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.0.write(&mut Exposition(encoder))
    }
}

/// All that a source has to say now.
///
/// # Errors
/// It cannot be said in this form.
pub fn render<S: MetricSource>(source: &Arc<S>, format: ExpositionFormat) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("sluicegate");
    registry.register_collector(Box::new(CollectorAdapter(source.clone())));
    let mut output = String::new();
    text::encode(&mut output, &registry)?;
    Ok(match format {
        ExpositionFormat::OpenMetrics => output,
        ExpositionFormat::PrometheusText => to_prometheus_text(&output),
    })
}

/// The same in the older form, where a counter is called what its lines are called.
fn to_prometheus_text(page: &str) -> String {
    let mut text = String::with_capacity(page.len());
    // HELP comes before TYPE, and only the latter says which are counters.
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
                "# HELP sluicegate_requests_total Requests\n# TYPE sluicegate_requests_total counter\n\
                 sluicegate_requests_total{{route=\"a\\\"b\"}} 3\n\
                 # HELP sluicegate_open Open\n# TYPE sluicegate_open gauge\nsluicegate_open 2\n\
                 # HELP sluicegate_took_seconds Took\n# TYPE sluicegate_took_seconds histogram\n{lines}"
            )
        );
        assert_eq!(
            page(ExpositionFormat::OpenMetrics),
            format!(
                "# HELP sluicegate_requests Requests\n# TYPE sluicegate_requests counter\n\
                 sluicegate_requests_total{{route=\"a\\\"b\"}} 3\n\
                 # HELP sluicegate_open Open\n# TYPE sluicegate_open gauge\nsluicegate_open 2\n\
                 # HELP sluicegate_took_seconds Took\n# TYPE sluicegate_took_seconds histogram\n\
                 # UNIT sluicegate_took_seconds seconds\n{lines}# EOF\n"
            )
        );
    }
}
