//! The trace exporter. A separate thread sends spans to an OpenTelemetry collector, with OTLP over HTTP/1.1 in protobuf
//! encoding (<https://opentelemetry.io/docs/specs/otlp/>).

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::{Request, Response};
use opentelemetry_http::{HttpClient, HttpError};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SpanData, SpanExporter as _};
use rustls::pki_types::ServerName;
use tokio::time::timeout;
use tracing::warn;
use uuid::Uuid;

use crate::clock::LogThrottle;
use crate::http::url::HttpUrl;
use crate::snapshot::settings::TraceSettings;
use crate::telemetry::trace::TraceExporter;
use crate::tls::TrustRoots;
use crate::upstream::connector;
use crate::upstream::connector::{EndpointTls, UpstreamTlsConfig};
use crate::upstream::fetch;

/// Maximum time to export a batch, including the time to connect.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum size of a response in bytes. A response contains only the number of rejected spans.
const MAX_RESPONSE_BYTES: usize = 64 << 10;

/// Minimum interval between two log messages about lost spans.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Start the exporter thread. The `OTEL_*` environment variables of the OpenTelemetry specification determine the
/// headers of export requests and the resource attributes.
///
/// # Errors
/// An environment variable is invalid, the system has no CA certificates, or the thread cannot be started.
pub(super) fn start(settings: &TraceSettings) -> anyhow::Result<TraceExporter> {
    let endpoint = &settings.endpoint;
    let last_error = Arc::<Mutex<Option<String>>>::default();
    let client = OtlpHttpClient { url: endpoint.clone(), tls: tls(endpoint)?, last_error: last_error.clone() };
    let exporter = SpanExporter::builder().with_http().with_http_client(client);
    let exporter =
        exporter.with_protocol(Protocol::HttpBinary).with_endpoint(endpoint.to_string()).with_timeout(EXPORT_TIMEOUT);
    let mut exporter = exporter.build()?;
    exporter.set_resource(&resource(&settings.resource));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    // Log only host and port, because path and query may contain secrets.
    let name = endpoint.authority().to_owned();
    let log_throttle = LogThrottle::new();
    Ok(TraceExporter::start(settings.sample, move |batch: Vec<SpanData>| {
        let spans = batch.len() as u64;
        let Err(error) = runtime.block_on(exporter.export(batch)) else { return 0 };
        let reason = last_error.lock().unwrap_or_else(PoisonError::into_inner).take();
        if log_throttle.should_log(LOG_INTERVAL) {
            let error = reason.unwrap_or(error.to_string());
            warn!(spans, collector = %name, %error, "cannot export spans: these spans are lost");
        }
        spans
    })?)
}

fn tls(endpoint: &HttpUrl) -> anyhow::Result<Option<EndpointTls>> {
    if !endpoint.is_https() {
        return Ok(None);
    }
    let tls = UpstreamTlsConfig::new(TrustRoots::from_system()?, None, connector::Protocol::Http1)?;
    Ok(Some(EndpointTls { tls: Arc::new(tls), server_name: ServerName::try_from(endpoint.host().to_owned())? }))
}

/// Return the resource attributes: those of the configuration, then those of `OTEL_SERVICE_NAME` and
/// `OTEL_RESOURCE_ATTRIBUTES`, then the defaults.
fn resource(configured: &BTreeMap<String, String>) -> Resource {
    let from_environment = Resource::builder().build();
    let has = |key: &'static str| {
        from_environment.get(&key.into()).filter(|value| !value.as_str().starts_with("unknown_service"))
    };
    let own = [
        ("service.name", "sluicegate".to_owned()),
        ("service.version", env!("CARGO_PKG_VERSION").to_owned()),
        ("service.instance.id", Uuid::new_v4().to_string()),
    ];
    let missing = own.into_iter().filter(|(key, _)| has(key).is_none());
    let missing = missing.map(|(key, value)| opentelemetry::KeyValue::new(key, value));
    let configured = configured.iter().map(|(key, value)| opentelemetry::KeyValue::new(key.clone(), value.clone()));
    Resource::builder().with_attributes(missing).with_attributes(configured).build()
}

/// HTTP/1.1 client for the collector. It opens one connection per batch.
#[derive(Debug)]
struct OtlpHttpClient {
    url: HttpUrl,
    tls: Option<EndpointTls>,
    /// The last transport error, for log messages. The exporter's own error does not contain it.
    last_error: Arc<Mutex<Option<String>>>,
}

#[async_trait]
impl HttpClient for OtlpHttpClient {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let exchange = fetch::send(&self.url, request, self.tls.as_ref(), MAX_RESPONSE_BYTES);
        let response = match timeout(EXPORT_TIMEOUT, exchange).await {
            Ok(response) => response.map_err(HttpError::from),
            Err(_) => Err(io::Error::from(io::ErrorKind::TimedOut).into()),
        };
        if let Err(error) = &response {
            *self.last_error.lock().unwrap_or_else(PoisonError::into_inner) = Some(error.to_string());
        }
        response
    }
}
