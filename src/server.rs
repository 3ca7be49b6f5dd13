//! Connections: accept, protocol, deadlines, drain.

pub mod proxy;

use std::convert::Infallible;
use std::error::Error;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::{Arc, Once};
use std::time::Duration;

use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, warn};

use crate::gateway::{Gateway, Peer};
use crate::http::activity::Activity;
use crate::identity::client_cert;
use crate::limit::clock;
use crate::runtime::{Listener, ServerSettings};
use proxy::Sender;

/// After a failed accept (out of descriptors, mostly) nothing is gained by trying again at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// At the end, for leases to be released and late costs to be charged.
const SETTLE: Duration = Duration::from_secs(2);

/// hyper's own bound, which it keeps room for on the stack; setting any bound costs an allocation for each request.
const HYPER_MAX_HEADERS: usize = 100;

/// Whoever is not a proxy and comes where proxies are expected could fill the log.
static STRANGER: Once = Once::new();

/// How a connection ends when it does not end well: the socket's, the handshake's or the protocol's error.
type BoxError = Box<dyn Error + Send + Sync>;

/// One worker's side of all listeners.
#[derive(Debug, Clone)]
pub struct Server {
    gateway: Arc<Gateway>,
    /// Cancelled when no new requests are wanted.
    stop: CancellationToken,
    /// Cancelled when the running ones have had their time.
    end: CancellationToken,
    /// The connections that are open.
    connections: TaskTracker,
}

impl Server {
    /// A server without connections.
    pub fn new(gateway: Gateway, stop: CancellationToken) -> Self {
        Server { gateway: Arc::new(gateway), stop, end: CancellationToken::new(), connections: TaskTracker::new() }
    }

    /// Serves the listeners of the runtime, in its order, until it is stopped, then lets what runs finish, for `drain_timeout` at most.
    pub async fn run(self, listeners: Vec<TcpListener>) {
        let accepting: Vec<_> = listeners
            .into_iter()
            .enumerate()
            .map(|(place, socket)| tokio::spawn(self.clone().accept(socket, place)))
            .collect();
        for task in accepting {
            if let Err(error) = task.await {
                warn!(%error, "a listener ended");
            }
        }
        self.connections.close();
        let drain = self.gateway.runtime().server.drain_timeout;
        if timeout(drain, self.connections.wait()).await.is_err() {
            warn!(connections = self.connections.len(), "drain_timeout is over: connections are closed");
            self.end.cancel();
            self.connections.wait().await;
        }
        if timeout(SETTLE, self.gateway.settle()).await.is_err() {
            warn!("the store did not take the last releases and charges");
        }
    }

    async fn accept(self, listener: TcpListener, place: usize) {
        loop {
            tokio::select! {
                biased;
                () = self.stop.cancelled() => break,
                accepted = listener.accept() => match accepted {
                    Ok((stream, address)) => self.open(stream, address, place),
                    Err(error) => {
                        warn!(%error, "a connection could not be accepted");
                        sleep(ACCEPT_PAUSE).await;
                    }
                },
            }
        }
        // What the kernel has queued for this socket would be reset when it closes.
        while let Ok(Ok((stream, address))) = timeout(Duration::ZERO, listener.accept()).await {
            self.open(stream, address, place);
        }
    }

    fn open(&self, stream: TcpStream, address: SocketAddr, place: usize) {
        let server = self.clone();
        self.connections.spawn(async move {
            let end = server.end.clone();
            if let Some(Err(error)) = end.run_until_cancelled(server.serve(stream, address, place)).await {
                debug!(%error, "a connection ended with an error");
            }
        });
    }

    async fn serve(self, mut stream: TcpStream, address: SocketAddr, place: usize) -> Result<(), BoxError> {
        // Answers are written whole; waiting for more would only delay them.
        stream.set_nodelay(true)?;
        let activity = Activity::new();
        let gateway = self.gateway.clone();
        let listener = &gateway.runtime().listeners[place];
        // A PROXY header and the handshake spend of the same time as the first head.
        let deadline = Instant::now() + gateway.runtime().server.header_timeout;
        let mut peer = timeout_at(deadline, self.peer(&mut stream, address, listener)).await??;
        match &listener.tls {
            None => self.converse(stream, peer, activity).await,
            Some(tls) => {
                let stream = timeout_at(deadline, tls.tls.acceptor().accept(stream)).await??;
                if let Some([certificate, ..]) = stream.get_ref().1.peer_certificates() {
                    peer.subject = client_cert::subject(certificate, (clock::unix_us() / 1_000_000) as i64)?;
                }
                self.converse(stream, peer, activity).await
            }
        }
    }

    /// Who is at the other end: the socket's address, or on a listener for proxies whom they speak for.
    async fn peer(&self, stream: &mut TcpStream, socket: SocketAddr, listener: &Listener) -> Result<Peer, BoxError> {
        let scheme = if listener.tls.is_some() { "https" } else { "http" };
        let runtime = self.gateway.runtime();
        let mut peer = Peer::new(socket.ip(), scheme, runtime);
        if listener.proxy_protocol {
            if !peer.origin.trusted {
                STRANGER.call_once(|| {
                    warn!(
                        "{} is closed to {}, which is not in client_ip.trusted_proxies; others like it are not told",
                        listener.address, peer.address
                    );
                });
                return Err(format!("{} is no trusted proxy", peer.address).into());
            }
            match proxy::sender(stream).await? {
                Sender::Client(client) => peer = Peer::new(client, scheme, runtime),
                Sender::Proxy => {}
                // The proxy is believed, but not what passes through it.
                Sender::Unknown => peer.origin.trusted = false,
            }
        }
        Ok(peer)
    }

    /// Serves one connection to its end.
    async fn converse<S>(self, stream: S, peer: Peer, activity: Arc<Activity>) -> Result<(), BoxError>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let settings = &self.gateway.runtime().server;
        let peer = Arc::new(peer);
        let service = service_fn(|request| {
            let in_flight = activity.enter();
            // HTTP/2 runs requests as tasks of their own.
            let (gateway, peer) = (self.gateway.clone(), peer.clone());
            async move {
                let response = gateway.handle(request, &peer).await;
                Ok::<_, Infallible>(response.map(|body| body.holding(in_flight)))
            }
        });
        let builder = protocols(settings);
        let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
        let mut stopped = pin!(self.stop.cancelled());
        let mut draining = false;
        // One timer for a connection, looked at when it fires; none is set for each request.
        let grace = || activity.grace(settings.header_timeout, settings.idle_timeout);
        let mut deadline = pin!(sleep(grace().unwrap_or_default()));
        loop {
            tokio::select! {
                biased;
                result = connection.as_mut() => return result,
                () = stopped.as_mut(), if !draining => {
                    draining = true;
                    connection.as_mut().graceful_shutdown();
                }
                () = deadline.as_mut() => match grace() {
                    Some(grace) => deadline.as_mut().reset(Instant::now() + grace),
                    None => return Ok(()),
                },
            }
        }
    }
}

/// HTTP/1.x, and HTTP/2 by prior knowledge, with bounds on what a client can make us hold.
fn protocols(settings: &ServerSettings) -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    // A head and a small body are one copy into one write: cheaper than a vectored one.
    builder.http1().writev(false).max_buf_size(settings.max_header_size);
    if settings.max_headers != HYPER_MAX_HEADERS {
        builder.http1().max_headers(settings.max_headers);
    }
    builder
        .http2()
        .max_concurrent_streams(settings.http2_max_streams)
        .max_header_list_size(settings.max_header_size as u32);
    builder
}
