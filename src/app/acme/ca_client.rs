//! The HTTP client for the CA.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::header::{HeaderValue, RETRY_AFTER, USER_AGENT};
use http::{Request, Response};
use http_body_util::BodyExt;
use instant_acme::{BodyWrapper, BytesResponse, Error, HttpClient};
use rustls::pki_types::ServerName;
use tokio::time::timeout;

use crate::tls::{TlsError, TrustRoots};
use crate::upstream::Protocol;
use crate::upstream::connector::{EndpointTls, UpstreamTlsConfig};
use crate::upstream::fetch;

/// Error of a connection, of HTTP or of a URL.
type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Maximum time of a request, including the connection.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum size of a response in bytes. The largest responses are certificate chains.
const MAX_RESPONSE_BYTES: usize = 1 << 20;

/// User-Agent, which RFC 8555 §6.1 requires.
const USER_AGENT_VALUE: &str = concat!("sluicegate/", env!("CARGO_PKG_VERSION"), " instant-acme");

/// HTTPS client. Clones share the TLS sessions.
#[derive(Debug, Clone)]
pub(super) struct CaClient {
    tls: Arc<UpstreamTlsConfig>,
    /// `Retry-After` of the last error response that had this header.
    retry_after: Arc<Mutex<Option<Duration>>>,
}

impl CaClient {
    /// Create a client that trusts these CA certificates.
    ///
    /// # Errors
    /// rustls rejects the TLS configuration.
    pub(super) fn new(trust_roots: TrustRoots) -> Result<Self, TlsError> {
        let tls = Arc::new(UpstreamTlsConfig::new(trust_roots, None, Protocol::Http1)?);
        Ok(CaClient { tls, retry_after: Arc::default() })
    }

    /// Take the delay that the CA requested with its last error response.
    pub(super) fn take_retry_after(&self) -> Option<Duration> {
        self.retry_after.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    async fn send(self, request: Request<BodyWrapper<Bytes>>) -> Result<Response<Bytes>, BoxError> {
        let (mut parts, body) = request.into_parts();
        // Check that each URL uses https, because the URLs come from responses of the CA.
        if parts.uri.scheme_str() != Some("https") {
            return Err(format!("the CA sent the URL {}, which does not begin with https", parts.uri).into());
        }
        let server_name = ServerName::try_from(fetch::host(&parts.uri).to_owned())?;
        parts.headers.insert(USER_AGENT, HeaderValue::from_static(USER_AGENT_VALUE));
        let body = body.collect().await?.to_bytes();
        let tls = EndpointTls { tls: self.tls.clone(), server_name };
        let response = fetch::send(Request::from_parts(parts, body), Some(&tls), MAX_RESPONSE_BYTES).await?;
        if response.status().is_client_error() || response.status().is_server_error() {
            let seconds = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
            *self.retry_after.lock().unwrap_or_else(PoisonError::into_inner) = seconds.map(Duration::from_secs);
        }
        Ok(response)
    }
}

impl HttpClient for CaClient {
    fn request(
        &self,
        request: Request<BodyWrapper<Bytes>>,
    ) -> Pin<Box<dyn Future<Output = Result<BytesResponse, Error>> + Send>> {
        let host = request.uri().authority().map(ToString::to_string).unwrap_or_default();
        let sending = timeout(REQUEST_TIMEOUT, self.clone().send(request));
        Box::pin(async move {
            let result =
                sending.await.unwrap_or_else(|_| Err(format!("no response within {REQUEST_TIMEOUT:?}").into()));
            match result {
                Ok(response) => Ok(BytesResponse::from(response.map(http_body_util::Full::new))),
                Err(error) => Err(Error::Other(format!("request to the CA at {host}: {error}").into())),
            }
        })
    }
}
