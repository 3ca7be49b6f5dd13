//! Connections: accept, protocol, deadlines, drain.

pub mod connections;
mod lent;
mod linger;
pub mod proxy;

use std::convert::Infallible;
use std::error::Error;
use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::{Arc, Once};
use std::time::Duration;

use hyper::rt::Executor;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use hyper_util::server::conn::auto::Builder;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, warn};

use crate::gateway::{Gateway, Peer};
use crate::http::activity::Activity;
use crate::http::flow::Watch;
use crate::identity::client_cert;
use crate::limit::clock;
use crate::runtime::{Listener, ServerSettings};
use connections::Connections;
use lent::Lent;
use linger::{linger, reset};
use proxy::Sender;

/// After a failed accept (out of descriptors, mostly) nothing is gained by trying again at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// At the end, for leases to be released and late costs to be charged.
const SETTLE: Duration = Duration::from_secs(2);

/// hyper's own bound, which it keeps room for on the stack; setting any bound costs an allocation for each request.
const HYPER_MAX_HEADERS: usize = 100;

/// Whoever is not a proxy and comes where proxies are expected could fill the log.
static STRANGER: Once = Once::new();

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
    /// A response broke off, and what there is of it looks whole.
    Torn,
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

    async fn accept(self, socket: TcpListener, listener: usize) {
        let mut told = None;
        loop {
            tokio::select! {
                biased;
                () = self.stop.cancelled() => break,
                accepted = socket.accept() => match accepted {
                    Ok((stream, address)) => {
                        if self.connections.are_full() && told.is_none_or(|told: Instant| told.elapsed() > FULL_AGAIN) {
                            warn!("there are max_connections connections: more have to wait");
                            told = Some(Instant::now());
                        }
                        self.open(stream, address, listener).await;
                    }
                    Err(error) => {
                        warn!(%error, "a connection could not be accepted");
                        sleep(ACCEPT_PAUSE).await;
                    }
                },
            }
        }
        // What the kernel has queued for this socket would be reset when it closes.
        while let Ok(Ok((stream, address))) = timeout(Duration::ZERO, socket.accept()).await {
            self.open(stream, address, listener).await;
        }
    }

    /// Serves a connection as soon as there may be one more; the next one waits in the kernel's queue meanwhile.
    async fn open(&self, stream: TcpStream, address: SocketAddr, listener: usize) {
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
            if let Some(Err(error)) = end.run_until_cancelled(server.serve(stream, address, listener)).await {
                debug!(%error, "a connection ended with an error");
            }
        });
    }

    async fn serve(self, mut stream: TcpStream, address: SocketAddr, listener: usize) -> Result<(), BoxError> {
        // Answers are written whole; waiting for more would only delay them.
        stream.set_nodelay(true)?;
        let gateway = self.gateway.clone();
        let listener = &gateway.runtime().listeners[listener];
        // A PROXY header and the handshake spend of the same time as the first head.
        let deadline = Instant::now() + gateway.runtime().server.header_timeout;
        let activity = Activity::new();
        let mut peer = timeout_at(deadline, self.peer(&mut stream, address, listener)).await??;
        let connections = self.connections.clone();
        // A trusted proxy brings many clients.
        let _seat = if connections.by_network() && !peer.origin.trusted {
            let network = gateway.runtime().client_ip.network(peer.address);
            let Some(seat) = connections.seat(network) else { return Ok(()) };
            Some(seat)
        } else {
            None
        };
        let (stream, mut back) = Lent::new(stream);
        let end = match &listener.tls {
            None => self.converse(stream, peer, activity).await,
            Some(tls) => {
                let stream = timeout_at(deadline, tls.tls.acceptor().accept(stream)).await??;
                if let Some([certificate, ..]) = stream.get_ref().1.peer_certificates() {
                    peer.subject = client_cert::subject(certificate, (clock::unix_us() / 1_000_000) as i64)?;
                }
                self.converse(stream, peer, activity).await
            }
        }?;
        if let Ok(stream) = back.try_recv() {
            match end {
                End::Done | End::Overdue => {}
                End::Stalled | End::Torn => reset(&stream),
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
    async fn converse<S>(self, stream: S, peer: Peer, activity: Arc<Activity>) -> Result<End, BoxError>
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
                Ok::<_, Infallible>(in_flight.answer(response))
            }
        });
        let builder = protocols(settings);
        let mut connection = pin!(builder.serve_connection_with_upgrades(TokioIo::new(stream), service));
        let mut watch = Watch::new(settings.body_idle_timeout);
        let mut stopped = pin!(self.stop.cancelled());
        let mut draining = false;
        // One timer for a connection, looked at when it fires; none is set for each request.
        let grace = || activity.grace(settings.header_timeout, settings.idle_timeout);
        let mut deadline = pin!(sleep(grace().unwrap_or_default()));
        loop {
            tokio::select! {
                biased;
                ended = poll_fn(|cx| watch.poll(connection.as_mut(), cx)) => match ended {
                    None => return Ok(End::Stalled),
                    Some(Ok(())) => break,
                    // The answer to a head that is too long, say, comes before its end.
                    Some(Err(error)) if is_parse(&*error) => return Ok(End::Cut),
                    Some(Err(_)) if watch.flow().is_unframed() => return Ok(End::Torn),
                    Some(Err(error)) => return Err(error),
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
        if let Some(tunnel) = activity.switched() {
            // On the heap: few connections need the room.
            Box::pin(tunnel.pass()).await;
        }
        Ok(if watch.flow().is_cut() { End::Cut } else { End::Done })
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
