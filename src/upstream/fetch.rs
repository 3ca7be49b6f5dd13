//! Single HTTP/1.1 exchanges, each on its own connection. The gateway uses these exchanges to export traces, fetch the
//! key sets of token issuers, call webhooks and obtain certificates by ACME.

use std::error::Error;
use std::io;
use std::net::IpAddr;

use bytes::Bytes;
use http::header::HOST;
use http::{HeaderValue, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1::handshake;
use hyper::rt::{Read, Write};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::task::AbortHandle;

use crate::http::url::HttpUrl;
use crate::upstream::connector::EndpointTls;

/// The reason why a request has no response.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The name cannot be resolved, or no connection could be established.
    #[error("cannot connect: {0}")]
    Connect(#[source] io::Error),
    /// The TLS handshake failed.
    #[error("TLS handshake failed: {0}")]
    Tls(#[source] io::Error),
    /// The connection ended before the end of the response, or the response is not HTTP.
    #[error("no valid response: {0}")]
    Http(#[source] hyper::Error),
    /// The response body is longer than the maximum.
    #[error("the response is longer than {max} bytes")]
    TooLarge {
        /// The maximum length of the body in bytes.
        max: usize,
        /// The HTTP status of the response.
        status: StatusCode,
    },
}

/// Send a request to a URL, and return the response with its whole body. The URL replaces the request target. `tls` is
/// required for `https://` URLs. The connection is closed after the response. This function has no timeout, so the
/// caller must set a timeout.
///
/// # Errors
/// See [`FetchError`]. A response body longer than `max_body` bytes is an error.
pub async fn send(
    url: &HttpUrl,
    mut request: Request<Bytes>,
    tls: Option<&EndpointTls>,
    max_body: usize,
) -> Result<Response<Bytes>, FetchError> {
    // The conversion cannot fail, because an authority is a valid header value.
    let host = HeaderValue::from_str(url.authority()).ok().map(|host| (HOST, host));
    request.headers_mut().extend(host);
    *request.uri_mut() = Uri::from(url.target());
    let stream = open(url).await?;
    match tls {
        None => send_over(TokioIo::new(stream), request, max_body).await,
        Some(tls) => {
            let stream = tls.connect(stream).await.map_err(FetchError::Tls)?;
            send_over(TokioIo::new(stream), request, max_body).await
        }
    }
}

/// Connect to the server in a URL, with a TLS handshake for `https://`, and close the connection. This function has no
/// timeout, so the caller must set a timeout.
///
/// # Errors
/// See [`FetchError`].
pub async fn connect(url: &HttpUrl, tls: Option<&EndpointTls>) -> Result<(), FetchError> {
    let stream = open(url).await?;
    match tls {
        None => Ok(()),
        Some(tls) => tls.connect(stream).await.map(drop).map_err(FetchError::Tls),
    }
}

async fn open(url: &HttpUrl) -> Result<TcpStream, FetchError> {
    let stream = match url.host().parse::<IpAddr>() {
        Ok(address) => TcpStream::connect((address, url.port())).await,
        Err(_) => TcpStream::connect((url.host(), url.port())).await,
    };
    stream.map_err(FetchError::Connect)
}

async fn send_over(
    stream: impl Read + Write + Unpin + Send + 'static,
    request: Request<Bytes>,
    max_body: usize,
) -> Result<Response<Bytes>, FetchError> {
    let (mut sender, connection) = handshake(stream).await.map_err(FetchError::Http)?;
    // Ignore the error of the connection task, because the request returns an error as well. The task is aborted when
    // this future ends, even if the server continues to send.
    let _connection = AbortOnDrop(tokio::spawn(connection).abort_handle());
    let (parts, body) = sender.send_request(request.map(Full::new)).await.map_err(FetchError::Http)?.into_parts();
    let body = Limited::new(body, max_body).collect().await;
    let body = body.map_err(|error| body_error(error, max_body, parts.status))?.to_bytes();
    Ok(Response::from_parts(parts, body))
}

/// Aborts the connection task when the exchange ends.
struct AbortOnDrop(AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn body_error(error: Box<dyn Error + Send + Sync>, max: usize, status: StatusCode) -> FetchError {
    match error.downcast::<hyper::Error>() {
        Ok(error) => FetchError::Http(*error),
        // Any other error comes from `Limited`, and means that the body is too long.
        Err(_) => FetchError::TooLarge { max, status },
    }
}
