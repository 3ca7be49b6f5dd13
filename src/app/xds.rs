//! The client of a management server that sends descriptors (xDS, state of the world). It applies each response by a
//! reload, and accepts or rejects the response with the result.

use std::convert::Infallible;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::SyncSender;
use std::task::{Context, Poll};
use std::thread;
use std::thread::JoinHandle;
use std::time::Duration;
use std::{fs, io};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use http::header::{CONTENT_TYPE, TE};
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode};
use http_body::{Body, Frame};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use prost::Message;
use rustls::pki_types::ServerName;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::runtime::Builder;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};
use tokio_util::io::InspectReader;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tracing::{info, warn};

use crate::admin::current::{ConfigHandle, ReceivedDescriptors, ReloadCause};
use crate::app::AppError;
use crate::app::maintenance::with_jitter;
use crate::config::sources::FileSnapshot;
use crate::http::grpc;
use crate::payload::xds::{Any, DiscoveryRequest, DiscoveryResponse, RATE_LIMIT_CONFIG, RateLimitConfig, Status};
use crate::snapshot::xds::XdsSettings;
use crate::tls::{Certificate, TlsError, TrustRoots};
use crate::upstream::connector::{EndpointTls, Protocol, UpstreamTlsConfig};

/// The method of the aggregated discovery service.
const METHOD: &str = "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources";

/// Maximum time for the TCP connection and the handshakes, until the first bytes of HTTP/2 from the server. There is no
/// such time for its first response: servers that have no descriptors yet do not respond until they have them.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Delay before the first attempt after a failure. It doubles with each further failure.
const MIN_DELAY: Duration = Duration::from_millis(500);
const MAX_DELAY: Duration = Duration::from_secs(30);

/// Delay before the same resources are tried again after they were rejected. Some servers send them again at once.
const REPEATED_DELAY: Duration = Duration::from_secs(10);

/// Maximum length of a message in bytes.
const MAX_MESSAGE: usize = 64 << 20;

/// Receive window of HTTP/2 in bytes. Messages are usually smaller.
const WINDOW: u32 = 1 << 20;

/// Maximum length of the reason for a rejection in bytes.
const MAX_REASON: usize = 8 << 10;

/// Interval of PING frames, and maximum time for the reply. The process of the server may be stuck while its host
/// answers. Servers with gRPC close connections that have more PING frames than one in 5 minutes.
const PING_INTERVAL: Duration = Duration::from_secs(6 * 60);
const PING_TIMEOUT: Duration = Duration::from_secs(20);

/// Maximum time for which the server does not acknowledge what the gateway sends.
const UNACKNOWLEDGED_TIMEOUT: Duration = Duration::from_secs(60);

/// Time without data after which TCP probes the connection, interval between two probes, and their number. The server
/// may send nothing for days, and its host may disappear without closing the connection.
const KEEPALIVE: TcpKeepalive =
    TcpKeepalive::new().with_time(Duration::from_secs(30)).with_interval(Duration::from_secs(10)).with_retries(3);

/// The reason why a stream ended.
#[derive(Debug, thiserror::Error)]
enum StreamError {
    #[error("cannot connect: {0}")]
    Connect(io::Error),
    #[error("no connection within {} s", CONNECT_TIMEOUT.as_secs())]
    Timeout,
    #[error("cannot read {}: {error}", path.display())]
    File { path: PathBuf, error: io::Error },
    #[error("TLS: {0}")]
    Tls(#[from] TlsError),
    #[error("{0}")]
    Http(#[from] hyper::Error),
    #[error("the server responds with status {0}")]
    Status(StatusCode),
    #[error("the server ends the stream: {0}")]
    Ended(String),
    #[error("the server sends an invalid message: {0}")]
    Message(String),
}

/// The client of the management server.
pub(super) struct XdsClient {
    pub(super) settings: XdsSettings,
    pub(super) config_handle: Arc<ConfigHandle>,
    pub(super) stop: CancellationToken,
}

impl XdsClient {
    /// Start the thread of the client. `first` gets a value when the first response has been applied.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(super) fn start(self, first: SyncSender<()>) -> Result<JoinHandle<Result<(), AppError>>, AppError> {
        let runtime = Builder::new_current_thread().enable_all().build().map_err(AppError::Worker)?;
        let run = move || {
            let stop = self.stop.clone();
            runtime.block_on(async {
                tokio::select! { () = stop.cancelled() => {}, () = self.run(&first) => {} }
            });
            Ok(())
        };
        thread::Builder::new().name("xds".to_owned()).spawn(run).map_err(AppError::Worker)
    }

    /// Connect again and again.
    async fn run(&self, first: &SyncSender<()>) {
        let server = self.settings.url.origin();
        let mut delay = MIN_DELAY;
        loop {
            let accepted_before = self.received().accepted.load(Ordering::Relaxed);
            let Err(error) = self.stream(first).await;
            self.received().is_connected.store(false, Ordering::Relaxed);
            if self.received().accepted.load(Ordering::Relaxed) > accepted_before {
                delay = MIN_DELAY;
            }
            let wait = with_jitter(delay);
            warn!(%server, %error, retry_in = ?wait, "no stream from the xDS server: the descriptors do not change");
            sleep(wait).await;
            delay = (delay * 2).min(MAX_DELAY);
        }
    }

    fn received(&self) -> &ReceivedDescriptors {
        &self.config_handle.received
    }

    /// Open a stream, and handle its responses until it ends.
    async fn stream(&self, first: &SyncSender<()>) -> Result<Infallible, StreamError> {
        let (requests, body) = unbounded_channel();
        let (mut sender, _connection) =
            timeout(CONNECT_TIMEOUT, self.connect()).await.map_err(|_| StreamError::Timeout)??;
        let mut call = Request::new(Requests(body));
        *call.method_mut() = Method::POST;
        *call.uri_mut() = self.settings.url.clone().with_target(PathAndQuery::from_static(METHOD)).into_uri();
        call.headers_mut().extend(self.settings.headers.clone());
        call.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        call.headers_mut().insert(TE, HeaderValue::from_static("trailers"));
        let mut replies = Replies { requests, accepted_version: String::new() };
        replies.send(DiscoveryRequest { node: Some(self.settings.node.clone()), ..DiscoveryRequest::default() });
        let response = sender.send_request(call).await?;
        self.received().is_connected.store(true, Ordering::Relaxed);
        if response.status() != StatusCode::OK {
            return Err(StreamError::Status(response.status()));
        }
        if response.headers().contains_key(GRPC_STATUS) {
            return Err(StreamError::Ended(grpc_error(response.headers())));
        }
        let mut messages = Messages { body: response.into_body(), buffer: BytesMut::new() };
        let mut rejected: Option<Vec<Any>> = None;
        loop {
            let message = messages.next().await?;
            let response =
                DiscoveryResponse::decode(message).map_err(|error| StreamError::Message(error.to_string()))?;
            if response.type_url != RATE_LIMIT_CONFIG {
                continue;
            }
            if rejected.as_ref() == Some(&response.resources) {
                sleep(REPEATED_DELAY).await;
            }
            let result = self.apply(&response).await;
            if result.is_ok() {
                // The receiver may be gone.
                let _ = first.try_send(());
            }
            rejected = result.is_err().then(|| response.resources.clone());
            replies.reply(&response, result);
        }
    }

    async fn connect(
        &self,
    ) -> Result<(http2::SendRequest<Requests>, AbortOnDropHandle<Result<(), hyper::Error>>), StreamError> {
        let url = &self.settings.url;
        let stream = TcpStream::connect((url.host(), url.port())).await.map_err(StreamError::Connect)?;
        let socket = SockRef::from(&stream);
        socket.set_tcp_keepalive(&KEEPALIVE).map_err(StreamError::Connect)?;
        socket.set_tcp_user_timeout(Some(UNACKNOWLEDGED_TIMEOUT)).map_err(StreamError::Connect)?;
        stream.set_nodelay(true).map_err(StreamError::Connect)?;
        match self.tls()? {
            None => handshake(stream).await,
            Some(tls) => handshake(tls.connect(stream).await.map_err(StreamError::Connect)?).await,
        }
    }

    /// Read the certificates again for each connection, because they may have been renewed.
    fn tls(&self) -> Result<Option<EndpointTls>, StreamError> {
        let XdsSettings { url, server_name, ca, certificate, .. } = &self.settings;
        if !url.is_https() {
            return Ok(None);
        }
        let read = |path: &PathBuf| fs::read(path).map_err(|error| StreamError::File { path: path.clone(), error });
        let roots = match ca {
            Some(path) => TrustRoots::from_pem(&read(path)?)?,
            None => TrustRoots::from_system()?,
        };
        let own = match certificate {
            Some([cert, key]) => Some(Certificate::from_pem(&read(cert)?, &read(key)?)?),
            None => None,
        };
        let host = || {
            ServerName::try_from(url.host().to_owned()).map_err(|error| StreamError::Connect(io::Error::other(error)))
        };
        let server_name = server_name.clone().map_or_else(host, Ok)?;
        let tls = UpstreamTlsConfig::new(roots, own.as_ref(), Protocol::Http2)?;
        Ok(Some(EndpointTls { tls: Arc::new(tls), server_name }))
    }

    /// Use the descriptors of a response. An error says why they cannot be used: the previous ones then stay in use.
    async fn apply(&self, response: &DiscoveryResponse) -> Result<(), String> {
        let result = match files(&response.resources) {
            Ok(files) => self.use_files(files).await,
            Err(error) => Err(error),
        };
        let received = self.received();
        let version = &*response.version_info;
        match &result {
            Ok(()) => {
                received.accepted.fetch_add(1, Ordering::Relaxed);
                info!(version, domains = response.resources.len(), "descriptors of the xDS server are in use");
            }
            Err(error) => {
                received.rejected.fetch_add(1, Ordering::Relaxed);
                warn!(version, %error, "the descriptors of the xDS server are rejected: the previous ones stay in use");
            }
        }
        result
    }

    async fn use_files(&self, files: Vec<FileSnapshot>) -> Result<(), String> {
        let received = self.received();
        let previous = received.files();
        if previous.as_deref() == Some(&*files) {
            return Ok(());
        }
        received.set_files(Some(files.into()));
        let result = match self.config_handle.reload(ReloadCause::FileChanged).await {
            Ok(result) => result.map(drop),
            Err(_) => Err("the gateway is stopping".to_owned()),
        };
        if result.is_err() {
            received.set_files(previous);
        }
        result
    }
}

/// Return the YAML of each resource, in the order of the names.
fn files(resources: &[Any]) -> Result<Vec<FileSnapshot>, String> {
    let file = |(index, resource): (usize, &Any)| {
        if resource.type_url != RATE_LIMIT_CONFIG {
            return Err(format!("resource {index} has the type {}", resource.type_url));
        }
        let config = RateLimitConfig::decode(resource.value.clone())
            .map_err(|error| format!("resource {index} is not a RateLimitConfig: {error}"))?;
        let path = PathBuf::from(format!("xds:{}", config.name));
        Ok(FileSnapshot { path, content: config.to_yaml().into_bytes().into() })
    };
    let mut files: Vec<_> = resources.iter().enumerate().map(file).collect::<Result<_, _>>()?;
    // Servers send the resources in any order.
    files.sort_by(|one, other| (&one.path, &one.content).cmp(&(&other.path, &other.content)));
    Ok(files)
}

/// Start HTTP/2, and wait until the server sends its first bytes.
async fn handshake(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
) -> Result<(http2::SendRequest<Requests>, AbortOnDropHandle<Result<(), hyper::Error>>), StreamError> {
    let (answer, first_bytes) = oneshot::channel();
    let mut answer = Some(answer);
    let stream = InspectReader::new(stream, move |_: &[u8]| {
        // The receiver may be gone.
        let _ = answer.take().map(|answer| answer.send(()));
    });
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder.initial_stream_window_size(WINDOW).initial_connection_window_size(WINDOW);
    builder.timer(TokioTimer::new()).keep_alive_interval(PING_INTERVAL).keep_alive_timeout(PING_TIMEOUT);
    let (sender, connection) = builder.handshake(TokioIo::new(stream)).await?;
    let connection = AbortOnDropHandle::new(tokio::spawn(connection));
    // If the connection ends without bytes, the call returns the reason.
    let _ = first_bytes.await;
    Ok((sender, connection))
}

// === Requests ===

/// The body of the call: encoded messages with their prefix.
struct Requests(UnboundedReceiver<Bytes>);

impl Body for Requests {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        self.0.poll_recv(context).map(|message| message.map(|message| Ok(Frame::data(message))))
    }
}

/// Sends the requests of a stream. There is one for each response.
struct Replies {
    requests: UnboundedSender<Bytes>,
    /// Version of the last response of the stream that was accepted. It is empty at first, also on a new stream: a
    /// server that has restarted may use the same version for other resources.
    accepted_version: String,
}

impl Replies {
    /// Accept a response, or reject it with the reason.
    fn reply(&mut self, response: &DiscoveryResponse, result: Result<(), String>) {
        let error_detail = match result {
            Ok(()) => {
                self.accepted_version.clone_from(&response.version_info);
                None
            }
            Err(mut message) => {
                message.truncate(message.floor_char_boundary(MAX_REASON));
                Some(Status { code: grpc::Code::InvalidArgument as i32, message })
            }
        };
        let response_nonce = response.nonce.clone();
        self.send(DiscoveryRequest { response_nonce, error_detail, ..DiscoveryRequest::default() });
    }

    fn send(&self, request: DiscoveryRequest) {
        let version_info = self.accepted_version.clone();
        let request = DiscoveryRequest { version_info, type_url: RATE_LIMIT_CONFIG.to_owned(), ..request };
        let mut bytes = BytesMut::with_capacity(PREFIX + request.encoded_len());
        bytes.put_u8(0);
        bytes.put_u32(request.encoded_len() as u32);
        // `BytesMut` grows, so the encoding cannot fail. If the connection has ended, the body is gone.
        let _ = request.encode(&mut bytes);
        let _ = self.requests.send(bytes.freeze());
    }
}

// === Responses ===

/// Length of the prefix of a message: whether the message is compressed, and its length.
const PREFIX: usize = 5;

const GRPC_STATUS: &str = "grpc-status";

/// The messages of a response.
struct Messages {
    body: Incoming,
    buffer: BytesMut,
}

impl Messages {
    async fn next(&mut self) -> Result<Bytes, StreamError> {
        loop {
            if let Some(message) = self.take()? {
                return Ok(message);
            }
            let Some(frame) = self.body.frame().await else {
                return Err(StreamError::Ended("without a status".to_owned()));
            };
            match frame?.into_data() {
                Ok(data) => self.buffer.extend_from_slice(&data),
                Err(frame) => {
                    let trailers = frame.into_trailers().unwrap_or_default();
                    return Err(StreamError::Ended(grpc_error(&trailers)));
                }
            }
        }
    }

    /// Take a complete message from the buffer.
    fn take(&mut self) -> Result<Option<Bytes>, StreamError> {
        let Some(mut prefix) = self.buffer.get(..PREFIX) else { return Ok(None) };
        let is_compressed = prefix.get_u8() != 0;
        let length = prefix.get_u32() as usize;
        if is_compressed {
            return Err(StreamError::Message("it is compressed".to_owned()));
        }
        if length > MAX_MESSAGE {
            return Err(StreamError::Message(format!("it has {length} bytes, the maximum is {MAX_MESSAGE}")));
        }
        if self.buffer.len() < PREFIX + length {
            return Ok(None);
        }
        self.buffer.advance(PREFIX);
        Ok(Some(self.buffer.split_to(length).freeze()))
    }
}

/// Return the status and the message of gRPC.
fn grpc_error(headers: &HeaderMap) -> String {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    format!("status {} {}", text(GRPC_STATUS), text("grpc-message")).trim_end().to_owned()
}
