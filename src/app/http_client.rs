//! HTTP/1.1 client of background tasks, with one connection per request.

use std::error::Error;
use std::net::IpAddr;

use bytes::Bytes;
use http::header::HOST;
use http::{HeaderValue, Request, Response, Uri};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper::rt::{Read, Write};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use crate::upstream::connector::EndpointTls;

/// Error of a connection or of HTTP.
pub(super) type BoxError = Box<dyn Error + Send + Sync>;

/// Return the host of a URI, without the brackets of an IPv6 address.
pub(super) fn host(uri: &Uri) -> &str {
    uri.host().unwrap_or_default().trim_matches(['[', ']'])
}

/// Send a request on a new connection, over TLS if `tls` is set, and read the response of at most `max_response` bytes.
///
/// # Errors
/// The server cannot be reached, or its response is malformed or too large.
pub(super) async fn send(
    tls: Option<&EndpointTls>,
    request: Request<Bytes>,
    max_response: usize,
) -> Result<Response<Bytes>, BoxError> {
    let uri = request.uri();
    let port = uri.port_u16().unwrap_or(if tls.is_some() { 443 } else { 80 });
    let stream = match host(uri).parse::<IpAddr>() {
        Ok(address) => TcpStream::connect((address, port)).await?,
        Err(_) => TcpStream::connect((host(uri), port)).await?,
    };
    match tls {
        None => send_over(TokioIo::new(stream), request, max_response).await,
        Some(tls) => send_over(TokioIo::new(tls.connect(stream).await?), request, max_response).await,
    }
}

async fn send_over(
    stream: impl Read + Write + Unpin + Send + 'static,
    mut request: Request<Bytes>,
    max_response: usize,
) -> Result<Response<Bytes>, BoxError> {
    let (mut sender, connection) = http1::handshake(stream).await?;
    // A connection error also fails the request.
    let connection = tokio::spawn(connection);
    let authority = request.uri().authority().map_or("", |authority| authority.as_str());
    let host = HeaderValue::from_str(authority)?;
    request.headers_mut().insert(HOST, host);
    let path = request.uri().path_and_query().cloned();
    *request.uri_mut() = path.map(Uri::from).unwrap_or_default();
    let (parts, body) = sender.send_request(request.map(Full::new)).await?.into_parts();
    let body = Limited::new(body, max_response).collect().await?.to_bytes();
    connection.abort();
    Ok(Response::from_parts(parts, body))
}
