//! Connections: accept, protocol, deadlines, drain.

use std::convert::Infallible;
use std::error::Error;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, warn};

use crate::gateway::{Gateway, Peer};
use crate::http::activity::Activity;
use crate::runtime::ServerSettings;

/// After a failed accept (out of descriptors, mostly) nothing is gained by trying again at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// At the end, for leases to be released and late costs to be charged.
const SETTLE: Duration = Duration::from_secs(2);

/// hyper's own bound, which it keeps room for on the stack; setting any bound costs an allocation for each request.
const HYPER_MAX_HEADERS: usize = 100;

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

    /// Serves listeners until it is stopped, then lets what runs finish, for `drain_timeout` at most.
    pub async fn run(self, listeners: Vec<(TcpListener, Option<TlsAcceptor>)>) {
        let accepting: Vec<_> =
            listeners.into_iter().map(|(listener, tls)| tokio::spawn(self.clone().accept(listener, tls))).collect();
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

    async fn accept(self, listener: TcpListener, tls: Option<TlsAcceptor>) {
        loop {
            tokio::select! {
                biased;
                () = self.stop.cancelled() => break,
                accepted = listener.accept() => match accepted {
                    Ok((stream, address)) => self.open(stream, address, tls.clone()),
                    Err(error) => {
                        warn!(%error, "a connection could not be accepted");
                        sleep(ACCEPT_PAUSE).await;
                    }
                },
            }
        }
        // What the kernel has queued for this socket would be reset when it closes.
        while let Ok(Ok((stream, address))) = timeout(Duration::ZERO, listener.accept()).await {
            self.open(stream, address, tls.clone());
        }
    }

    fn open(&self, stream: TcpStream, address: SocketAddr, tls: Option<TlsAcceptor>) {
        let server = self.clone();
        self.connections.spawn(async move {
            let end = server.end.clone();
            if let Some(Err(error)) = end.run_until_cancelled(server.serve(stream, address, tls)).await {
                debug!(%error, "a connection ended with an error");
            }
        });
    }

    async fn serve(self, stream: TcpStream, address: SocketAddr, tls: Option<TlsAcceptor>) -> Result<(), BoxError> {
        // Answers are written whole; waiting for more would only delay them.
        stream.set_nodelay(true)?;
        let activity = Activity::new();
        match tls {
            None => self.converse(stream, address.ip(), "http", activity).await,
            Some(tls) => {
                // The handshake spends of the same time as the first head.
                let stream = timeout(self.gateway.runtime().server.header_timeout, tls.accept(stream)).await??;
                self.converse(stream, address.ip(), "https", activity).await
            }
        }
    }

    /// Serves one connection to its end.
    async fn converse<S>(
        self,
        stream: S,
        peer: IpAddr,
        scheme: &'static str,
        activity: Arc<Activity>,
    ) -> Result<(), BoxError>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let settings = &self.gateway.runtime().server;
        let peer = Arc::new(Peer::new(peer, scheme, self.gateway.runtime()));
        let service = service_fn(|request| {
            let in_flight = activity.enter();
            // HTTP/2 runs requests as tasks of their own.
            let (gateway, peer) = (self.gateway.clone(), peer.clone());
            async move {
                let response = gateway.handle(request, &peer).await;
                Ok::<_, Infallible>(in_flight.answer(response))
            }
        });
        let builder = protocols(settings);
        let mut connection = pin!(builder.serve_connection_with_upgrades(TokioIo::new(stream), service));
        let mut stopped = pin!(self.stop.cancelled());
        let mut draining = false;
        // One timer for a connection, looked at when it fires; none is set for each request.
        let grace = || activity.grace(settings.header_timeout, settings.idle_timeout);
        let mut deadline = pin!(sleep(grace().unwrap_or_default()));
        loop {
            tokio::select! {
                biased;
                result = connection.as_mut() => {
                    result?;
                    break;
                }
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
        if let Some(tunnel) = activity.switched() {
            // On the heap: few connections need the room.
            Box::pin(tunnel.pass()).await;
        }
        Ok(())
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
