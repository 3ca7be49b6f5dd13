//! Connections: accept, protocol, deadlines, drain.

pub mod connection_limit;
mod frame_limits;
mod handshake;
mod http_connection;
pub mod proxy_protocol;
mod stream;

use std::future::{Future, poll_fn};
use std::iter;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::{Arc, Once};
use std::task::Poll;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, warn};

use crate::http::idle::ConnectionActivity;
use crate::identity::client_cert;
use crate::limiter::clock;
use crate::listener::connection_limit::ConnectionLimits;
use crate::listener::handshake::Protocol;
use crate::listener::http_connection::{BoxError, CloseReason, HttpConnection, lingering_close, reset_on_close};
use crate::listener::proxy_protocol::ProxySource;
use crate::listener::stream::{ReclaimableStream, SelectiveWaker};
use crate::proxy::Gateway;
use crate::proxy::client::Peer;
use crate::snapshot::{CompiledConfig, Listener};

/// Connections that may wait to be accepted, for each socket.
pub const BACKLOG: usize = 4096;

/// After a failed accept (out of descriptors, mostly) nothing is gained by trying again at once.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);

/// At the end, for leases to be released and late costs to be charged.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// Whoever is not a proxy and comes where proxies are expected could fill the log.
static UNTRUSTED_PROXY_LOGGED: Once = Once::new();

/// While connections wait, it is told at most so often.
const FULL_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// One worker's side of all listeners.
#[derive(Debug, Clone)]
pub struct Server {
    gateway: Arc<Gateway>,
    /// Cancelled when no new requests are wanted.
    drain: CancellationToken,
    /// Cancelled when the running ones have had their time.
    force_close: CancellationToken,
    /// The connections that are open.
    tasks: TaskTracker,
    /// Those of all workers.
    connection_limits: Arc<ConnectionLimits>,
}

impl Server {
    /// A server without connections.
    pub fn new(gateway: Arc<Gateway>, connection_limits: Arc<ConnectionLimits>, drain: CancellationToken) -> Self {
        let (force_close, tasks) = (CancellationToken::new(), TaskTracker::new());
        Server { gateway, drain, force_close, tasks, connection_limits }
    }

    /// Serves sockets, each of the listener at its place, until it is stopped, then lets what runs finish, for
    /// `drain_timeout` at most.
    pub async fn run(self, sockets: Vec<(usize, TcpListener)>) {
        let accept = |(listener_index, socket)| tokio::spawn(self.clone().accept(socket, listener_index));
        let accept_tasks: Vec<_> = sockets.into_iter().map(accept).collect();
        for task in accept_tasks {
            if let Err(error) = task.await {
                warn!(%error, "a listener ended");
            }
        }
        self.tasks.close();
        let drain_timeout = self.gateway.runtime().server.drain_timeout;
        if timeout(drain_timeout, self.tasks.wait()).await.is_err() {
            warn!(connections = self.tasks.len(), "drain_timeout is over: connections are closed");
            self.force_close.cancel();
            self.tasks.wait().await;
        }
        if timeout(FLUSH_TIMEOUT, self.gateway.flush_pending()).await.is_err() {
            warn!("the store did not take the last releases and charges");
        }
    }

    async fn accept(self, socket: TcpListener, listener_index: usize) {
        let mut logged_at = None;
        loop {
            tokio::select! {
                biased;
                () = self.drain.cancelled() => break,
                accepted = socket.accept() => match accepted {
                    Ok((stream, address)) => {
                        if self.connection_limits.is_full() && logged_at.is_none_or(|logged_at: Instant| logged_at.elapsed() > FULL_LOG_INTERVAL) {
                            warn!("there are max_connections connections: more have to wait");
                            logged_at = Some(Instant::now());
                        }
                        self.spawn_connection(stream, address, listener_index).await;
                    }
                    Err(error) => {
                        warn!(%error, "a connection could not be accepted");
                        sleep(ACCEPT_RETRY_DELAY).await;
                    }
                },
            }
        }
        // What the kernel has queued for this socket would be reset when it closes. Taken before any of it is served, and no
        // more than the queue holds: whoever keeps connecting would keep this from its end.
        let Ok(socket) = socket.into_std() else { return };
        let pending: Vec<_> = iter::from_fn(|| socket.accept().ok()).take(BACKLOG).collect();
        drop(socket);
        for (stream, address) in pending {
            if let Ok(stream) = stream.set_nonblocking(true).and_then(|()| TcpStream::from_std(stream)) {
                self.spawn_connection(stream, address, listener_index).await;
            }
        }
    }

    /// Serves a connection as soon as there may be one more; the next one waits in the kernel's queue meanwhile.
    async fn spawn_connection(&self, stream: TcpStream, address: SocketAddr, listener_index: usize) {
        // Taken after the connection is there: nobody keeps a place for one that may never come.
        let permit = tokio::select! {
            biased;
            permit = self.connection_limits.acquire() => permit,
            // No place comes free for it while the others are waited for.
            () = self.drain.cancelled() => None,
        };
        let Some(permit) = permit else { return };
        let server = self.clone();
        self.tasks.spawn(async move {
            let _permit = permit;
            let (force_close, mut waker) = (server.force_close.clone(), SelectiveWaker::new());
            let (mut force_closed, mut connection) =
                (pin!(force_close.cancelled()), pin!(server.serve_connection(stream, address, listener_index)));
            // `run_until_cancelled` would keep room for the future twice, and ask for the end whenever something comes.
            let closed = poll_fn(|cx| {
                let is_force_closed =
                    waker.take_context(cx).is_some_and(|mut cx| force_closed.as_mut().poll(&mut cx).is_ready());
                if is_force_closed { Poll::Ready(Ok(())) } else { connection.as_mut().poll(cx) }
            });
            if let Err(error) = closed.await {
                debug!(%error, "a connection ended with an error");
            }
        });
    }

    async fn serve_connection(
        self,
        mut stream: TcpStream,
        address: SocketAddr,
        listener_index: usize,
    ) -> Result<(), BoxError> {
        // Answers are written whole; waiting for more would only delay them.
        stream.set_nodelay(true)?;
        let gateway = self.gateway.clone();
        let runtime = gateway.runtime();
        let (listener, settings) = (&runtime.listeners[listener_index], runtime.server.clone());
        // A PROXY header and the handshake spend of the same time as the first head.
        let deadline = Instant::now() + settings.header_timeout;
        let activity = ConnectionActivity::new();
        let mut peer = timeout_at(deadline, self.identify_peer(&mut stream, address, listener, &runtime)).await??;
        let connection_limits = self.connection_limits.clone();
        // A trusted proxy brings many clients.
        let _permit = if connection_limits.has_per_ip_limit()
            && !peer.forwarded.trusted
            && !settings.is_exempt_from_per_ip(peer.address)
        {
            let network = runtime.client_ip.network(peer.address);
            let Some(permit) = connection_limits.permit(network) else { return Ok(()) };
            Some(permit)
        } else {
            None
        };
        let acceptor = listener.tls.as_ref().map(|tls| tls.tls.acceptor());
        let client_hello = match acceptor {
            Some(_) => timeout_at(deadline, Box::pin(handshake::peek_client_hello(&stream))).await??,
            None => Vec::new(),
        };
        let (mut stream, mut returned_stream) = ReclaimableStream::new(stream);
        // A connection may last, and must not keep a configuration that nobody serves any more.
        drop(runtime);
        let drain_grace = settings.drain_grace();
        let buffer_budget = connection_limits.buffer_budget();
        let drain = self.drain.clone();
        let new_connection =
            |peer| HttpConnection { gateway, peer: Arc::new(peer), settings, activity, buffer_budget, drain };
        // On the heap, each with its own size: a task keeps room for the largest of what it may ever do.
        let close_reason = match acceptor {
            None => {
                let protocol = tokio::select! {
                    biased;
                    protocol = timeout_at(deadline, Protocol::from_preface(&mut stream)) => protocol??,
                    // Nobody waits for an answer.
                    () = self.wait_for_drain(drain_grace) => return Ok(()),
                };
                Box::pin(new_connection(peer).run(stream, protocol)).await?
            }
            Some(acceptor) => {
                let handshake = Box::pin(acceptor.accept(stream));
                let accepted = timeout_at(deadline, handshake).await?;
                let stream =
                    Box::new(accepted.inspect_err(|error| handshake::log_failure(error, peer.address, &client_hello))?);
                drop(client_hello);
                let session = stream.get_ref().1;
                if let Some([certificate, ..]) = session.peer_certificates() {
                    peer.certificate_subject =
                        client_cert::subject(certificate, (clock::unix_us() / 1_000_000) as i64)?;
                }
                let protocol = Protocol::from_alpn(session.alpn_protocol());
                Box::pin(new_connection(peer).run(stream, protocol)).await?
            }
        };
        if let Ok(stream) = returned_stream.try_recv() {
            match close_reason {
                CloseReason::Complete | CloseReason::Timeout => {}
                CloseReason::WriteStalled | CloseReason::TruncatedResponse => reset_on_close(&stream),
                CloseReason::RequestUnread => {
                    if let Some(_permit) = connection_limits.try_acquire_lingering() {
                        // On the heap: few connections end like this.
                        Box::pin(lingering_close(stream)).await;
                    }
                }
            }
        }
        Ok(())
    }

    /// Is over so long after no new connections are wanted.
    async fn wait_for_drain(&self, grace: Duration) {
        self.drain.cancelled().await;
        sleep(grace).await;
    }

    /// Who is at the other end: the socket's address, or on a listener for proxies whom they speak for.
    async fn identify_peer(
        &self,
        stream: &mut TcpStream,
        socket_address: SocketAddr,
        listener: &Listener,
        runtime: &CompiledConfig,
    ) -> Result<Peer, BoxError> {
        let scheme = if listener.tls.is_some() { "https" } else { "http" };
        let mut peer = Peer::new(socket_address.ip(), scheme, runtime);
        if listener.proxy_protocol {
            if !peer.forwarded.trusted {
                UNTRUSTED_PROXY_LOGGED.call_once(|| {
                    warn!(
                        "{} is closed to {}, which is not in client_ip.trusted_proxies; others like it are not told",
                        listener.address, peer.address
                    );
                });
                return Err(format!("{} is no trusted proxy", peer.address).into());
            }
            match proxy_protocol::read_header(stream).await? {
                ProxySource::Proxied(client) => peer = Peer::new(client, scheme, runtime),
                ProxySource::Local => {}
                // The proxy is believed, but not what passes through it.
                ProxySource::Unknown => peer.distrust(),
            }
        }
        Ok(peer)
    }
}
