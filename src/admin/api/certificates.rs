//! `/api/certificates`: the certificates of all listeners, and requests to renew a certificate.

use http::StatusCode;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::admin::AdminResponse;
use crate::admin::api::{ApiContext, ApiError, Result, json_response};
use crate::snapshot::CompiledConfig;
use crate::tls::Certificate;

#[derive(Serialize)]
struct CertificatesResponse {
    certificates: Vec<CertificateView>,
}

/// One certificate. Times are RFC 3339.
#[derive(Serialize)]
struct CertificateView {
    /// DNS names and addresses of the certificate.
    names: Vec<String>,
    /// `file` or `acme`.
    source: &'static str,
    /// The issuer of the certificate. `None` until the first certificate is obtained.
    issuer: Option<String>,
    not_before: Option<String>,
    not_after: Option<String>,
    /// Time at which the next order is planned. `None` for certificates from files.
    next_renewal: Option<String>,
    /// Failed attempts since the last success.
    failures: u32,
    /// The reason why the last attempt failed.
    error: Option<Box<str>>,
}

/// Body of `POST /api/certificates/renew`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RenewRequest {
    name: String,
}

#[derive(Serialize)]
struct RenewResponse {
    name: String,
    requested: bool,
}

fn format_time(time_s: i64) -> Option<String> {
    Timestamp::from_second(time_s).ok().map(|time| time.to_string())
}

impl CertificateView {
    fn new(certificate: Option<&Certificate>, source: &'static str) -> Self {
        let (start, end) = certificate.map(Certificate::validity_s).unzip();
        CertificateView {
            names: certificate.map(Certificate::names).unwrap_or_default(),
            source,
            issuer: certificate.map(Certificate::issuer),
            not_before: start.and_then(format_time),
            not_after: end.and_then(format_time),
            next_renewal: None,
            failures: 0,
            error: None,
        }
    }
}

fn views(config: &CompiledConfig) -> Vec<CertificateView> {
    let tls = config.listeners.iter().filter_map(|listener| listener.tls.as_ref());
    let mut shown = Vec::new();
    let files = tls.flat_map(|tls| tls.tls.certificates()).filter(|certificate| {
        // List a certificate only once, even if several listeners use its file.
        let leaf = certificate.certified_key.cert.first().cloned();
        let is_new = !shown.contains(&leaf);
        shown.push(leaf);
        is_new
    });
    let mut views: Vec<_> = files.map(|certificate| CertificateView::new(Some(&certificate), "file")).collect();
    for (acme, name) in config.acme.iter().flat_map(|acme| acme.names.iter().map(move |name| (acme, name))) {
        let managed = acme.certificates.get(name);
        views.push(CertificateView {
            names: vec![name.to_string()],
            next_renewal: managed.next_order_s.and_then(|time_s| format_time(time_s as i64)),
            failures: managed.failures,
            error: managed.last_error,
            ..CertificateView::new(managed.certificate.as_deref(), "acme")
        });
    }
    views
}

/// Return the certificates of all listeners.
pub(super) fn list(context: &ApiContext<'_>) -> AdminResponse {
    json_response(&CertificatesResponse { certificates: views(context.config) })
}

/// Request the renewal of a certificate by ACME. The log and `GET /api/certificates` show the result.
pub(super) fn renew(context: &ApiContext<'_>, request: &RenewRequest) -> Result<AdminResponse> {
    let name = request.name.to_ascii_lowercase();
    match context.config.acme.as_ref().filter(|acme| acme.names.iter().any(|known| **known == *name)) {
        Some(acme) => {
            acme.certificates.request_renewal(&name);
            Ok(json_response(&RenewResponse { name, requested: true }))
        }
        None => Err(ApiError::new(
            StatusCode::NOT_FOUND,
            format!(
                "no listener obtains a certificate for `{name}` by ACME; `sluicegate certificates` lists all certificates"
            ),
        )),
    }
}
