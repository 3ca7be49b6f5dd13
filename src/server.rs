//! Connections: accept, protocol, deadlines, drain.

pub mod connections;
mod lent;
mod linger;

use std::convert::Infallible;
use std::error::Error;
use std::future::{Future, poll_fn};
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::rt::Executor;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
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
use crate::http::flow::Watch;
use crate::runtime::ServerSettings;
use connections::Connections;
use lent::Lent;
use linger::{linger, reset};

/// After a failed accept (out of descriptors, mostly) nothing is gained by trying again at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// At the end, for leases to be released and late costs to be charged.
const SETTLE: Duration = Duration::from_secs(2);

/// hyper's own bound, which it keeps room for on the stack; setting any bound costs an allocation for each request.
const HYPER_MAX_HEADERS: usize = 100;

/// While connections wait, it is told at most so often.
const FULL_AGAIN: Duration = Duration::from_secs(60);

/// Bytes of a request that a stream holds for an upstream that does not take them.
const HTTP2_WINDOW: u32 = 256 << 10;

/// Bytes of a response that a stream holds for a client that does not take them, besides the piece that goes over it.
const HTTP2_SEND_BUFFER: usize = 128 << 10;

/// How a connection ends when it does not end well: the socket's, the handshake's or the protocol's error.
type BoxError = Box<dyn Error + Send + Sync>;

/// How a connection ends otherwise.
enum End {
    /// All is said.
    Done,
    /// The client may still be sending what nobody reads.
    Cut,
    /// A deadline is over.
    Overdue,
    /// The client does not take the response.
    Stalled,
}

/// Runs the streams of an HTTP/2 connection, each for as long as its client takes what there is.
#[derive(Debug, Clone)]
struct Streams {
    body_idle_timeout: Duration,
}

/// One worker's side of all listeners.
#[derive(Debug, Clone)]
pub struct Server {
    gateway: Arc<Gateway>,
    /// Cancelled when no new requests are wanted.
    stop: CancellationToken,
    /// Cancelled when the running ones have had their time.
    end: CancellationToken,
    /// The connections that are open.
    tasks: TaskTracker,
    /// Those of all workers.
    connections: Arc<Connections>,
}

impl Server {
    /// A server without connections.
    pub fn new(gateway: Gateway, connections: Arc<Connections>, stop: CancellationToken) -> Self {
        let (end, tasks) = (CancellationToken::new(), TaskTracker::new());
        Server { gateway: Arc::new(gateway), stop, end, tasks, connections }
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
        self.tasks.close();
        let drain = self.gateway.runtime().server.drain_timeout;
        if timeout(drain, self.tasks.wait()).await.is_err() {
            warn!(connections = self.tasks.len(), "drain_timeout is over: connections are closed");
            self.end.cancel();
            self.tasks.wait().await;
        }
        if timeout(SETTLE, self.gateway.settle()).await.is_err() {
            warn!("the store did not take the last releases and charges");
        }
    }

    async fn accept(self, listener: TcpListener, tls: Option<TlsAcceptor>) {
        let mut told = None;
        loop {
            tokio::select! {
                biased;
                () = self.stop.cancelled() => break,
                accepted = listener.accept() => match accepted {
                    Ok((stream, address)) => {
                        if self.connections.are_full() && told.is_none_or(|told: Instant| told.elapsed() > FULL_AGAIN) {
                            warn!("there are max_connections connections: more have to wait");
                            told = Some(Instant::now());
                        }
                        self.open(stream, address, tls.clone()).await;
                    }
                    Err(error) => {
                        warn!(%error, "a connection could not be accepted");
                        sleep(ACCEPT_PAUSE).await;
                    }
                },
            }
        }
        // What the kernel has queued for this socket would be reset when it closes.
        while let Ok(Ok((stream, address))) = timeout(Duration::ZERO, listener.accept()).await {
            self.open(stream, address, tls.clone()).await;
        }
    }

    /// Serves a connection as soon as there may be one more; the next one waits in the kernel's queue meanwhile.
    async fn open(&self, stream: TcpStream, address: SocketAddr, tls: Option<TlsAcceptor>) {
        // Taken after the connection is there: nobody keeps a place for one that may never come.
        let place = tokio::select! {
            biased;
            place = self.connections.open() => place,
            // No place comes free for it while the others are waited for.
            () = self.stop.cancelled() => None,
        };
        let Some(place) = place else { return };
        let server = self.clone();
        self.tasks.spawn(async move {
            let _place = place;
            let end = server.end.clone();
            if let Some(Err(error)) = end.run_until_cancelled(server.serve(stream, address, tls)).await {
                debug!(%error, "a connection ended with an error");
            }
        });
    }

    async fn serve(self, stream: TcpStream, address: SocketAddr, tls: Option<TlsAcceptor>) -> Result<(), BoxError> {
        let client_ip = &self.gateway.runtime().client_ip;
        let peer = address.ip().to_canonical();
        // A trusted proxy brings many clients.
        let _seat = if self.connections.by_network() && !client_ip.trusts(peer) {
            let Some(seat) = self.connections.seat(client_ip.network(peer)) else { return Ok(()) };
            Some(seat)
        } else {
            None
        };
        // Answers are written whole; waiting for more would only delay them.
        stream.set_nodelay(true)?;
        let connections = self.connections.clone();
        let (stream, mut back) = Lent::new(stream);
        let activity = Activity::new();
        let end = match tls {
            None => self.converse(stream, address.ip(), "http", activity).await,
            Some(tls) => {
                // The handshake spends of the same time as the first head.
                let stream = timeout(self.gateway.runtime().server.header_timeout, tls.accept(stream)).await??;
                self.converse(stream, address.ip(), "https", activity).await
            }
        }?;
        if let Ok(stream) = back.try_recv() {
            match end {
                End::Done | End::Overdue => {}
                End::Stalled => reset(&stream),
                End::Cut => {
                    if let Some(_leave) = connections.linger() {
                        // On the heap: few connections end like this.
                        Box::pin(linger(stream)).await;
                    }
                }
            }
        }
        Ok(())
    }

    /// Serves one connection to its end.
    async fn converse<S>(
        self,
        stream: S,
        peer: IpAddr,
        scheme: &'static str,
        activity: Arc<Activity>,
    ) -> Result<End, BoxError>
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
                Ok::<_, Infallible>(response.map(|body| body.holding(in_flight)))
            }
        });
        let builder = protocols(settings);
        let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
        let mut watch = Watch::new(settings.body_idle_timeout);
        let mut stopped = pin!(self.stop.cancelled());
        let mut draining = false;
        // One timer for a connection, looked at when it fires; none is set for each request.
        let grace = || activity.grace(settings.header_timeout, settings.idle_timeout);
        let mut deadline = pin!(sleep(grace().unwrap_or_default()));
        loop {
            tokio::select! {
                biased;
                ended = poll_fn(|cx| watch.poll(connection.as_mut(), cx)) => return match ended {
                    None => Ok(End::Stalled),
                    Some(Ok(())) => Ok(if watch.flow().is_cut() { End::Cut } else { End::Done }),
                    // The answer to a head that is too long, say, comes before its end.
                    Some(Err(error)) if is_parse(&*error) => Ok(End::Cut),
                    Some(Err(error)) => Err(error),
                },
                () = stopped.as_mut(), if !draining => {
                    draining = true;
                    connection.as_mut().graceful_shutdown();
                }
                () = deadline.as_mut() => match grace() {
                    Some(grace) => deadline.as_mut().reset(Instant::now() + grace),
                    None => return Ok(End::Overdue),
                },
            }
        }
    }
}

fn is_parse(error: &(dyn Error + Send + Sync + 'static)) -> bool {
    error.downcast_ref::<hyper::Error>().is_some_and(hyper::Error::is_parse)
}

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Streams {
    fn execute(&self, stream: F) {
        let mut watch = Watch::new(self.body_idle_timeout);
        let mut stream = Box::pin(stream);
        // Dropping the stream resets it.
        tokio::spawn(poll_fn(move |cx| watch.poll(stream.as_mut(), cx).map(drop)));
    }
}

/// HTTP/1.x, and HTTP/2 by prior knowledge, with bounds on what a client can make us hold.
fn protocols(settings: &ServerSettings) -> Builder<Streams> {
    let mut builder = Builder::new(Streams { body_idle_timeout: settings.body_idle_timeout });
    // A head and a small body are one copy into one write: cheaper than a vectored one.
    builder.http1().writev(false).max_buf_size(settings.max_header_size);
    if settings.max_headers != HYPER_MAX_HEADERS {
        builder.http1().max_headers(settings.max_headers);
    }
    builder
        .http2()
        .max_concurrent_streams(settings.http2_max_streams)
        .initial_stream_window_size(HTTP2_WINDOW)
        .max_send_buf_size(HTTP2_SEND_BUFFER)
        .max_header_list_size(settings.max_header_size as u32);
    builder
}
