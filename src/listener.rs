//! Listeners: accepting connections, connection limits, the PROXY protocol, TLS, the choice of the HTTP version, and
//! draining.

pub mod handshake;
mod http_connection;
pub mod metrics;
mod stream;

use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::net::TcpStream as StdStream;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};
use std::task::Poll;
use std::time::Duration;
use std::{io, iter};

use http::StatusCode;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::oneshot::Receiver;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, warn};

use crate::boxed::boxed;
use crate::clock;
use crate::clock::LogThrottle;
use crate::http::body_limits::BufferBudget;
use crate::http::flow::ConnectionActivity;
use crate::identity::client_cert::{ClientCertificate, TlsClient};
use crate::limiter::metrics::Counter;
use crate::listener::handshake::{Accepted, LOG_INTERVAL, Protocol, ProxyError, ProxySource};
use crate::listener::http_connection::{
    BoxError, CloseReason, HttpConnection, SelectiveWaker, lingering_close, reset_on_close,
};
use crate::listener::metrics::{HandshakeFailure, ListenerMetrics};
use crate::listener::stream::ReclaimableStream;
use crate::proxy::Gateway;
use crate::proxy::request::Peer;
use crate::snapshot::CompiledConfig;
use crate::snapshot::listeners::Listener;
use crate::snapshot::settings::ServerSettings;
use crate::upstream::connector::ProxiedConnection;

/// Length of the accept queue (backlog) of each listening socket.
pub const BACKLOG: usize = 4096;

/// Delay after a failed accept. The usual cause is that no file descriptors are free, so an immediate retry would fail
/// again.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);

/// Maximum time at shutdown to release permits, refund prefetched tokens and charge deferred costs.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// Whether the warning about an untrusted peer was logged. The warning is logged only once per process, because
/// untrusted peers could otherwise fill the log.
static UNTRUSTED_PROXY_LOGGED: Once = Once::new();

/// Limits the log messages about trusted proxies that send no PROXY header.
static NO_PROXY_HEADER_THROTTLE: LogThrottle = LogThrottle::new();

/// Minimum interval between log messages about `max_connections`.
const FULL_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Address of the clients of Unix sockets.
const UNIX_PEER: SocketAddr = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0);

/// A listening socket that is registered with the runtime of a worker.
#[derive(Debug)]
pub enum Acceptor {
    /// Accepts TCP connections.
    Tcp(TcpListener),
    /// Accepts connections to a Unix socket.
    Unix(UnixListener),
}

impl Acceptor {
    async fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        match self {
            Acceptor::Tcp(socket) => socket.accept().await,
            Acceptor::Unix(socket) => Ok((stream_of_unix(socket.accept().await?.0)?, UNIX_PEER)),
        }
    }

    /// Close the socket, and return the connections of its accept queue, at most [`BACKLOG`].
    fn close(self) -> io::Result<Vec<(TcpStream, SocketAddr)>> {
        Ok(match self {
            Acceptor::Tcp(socket) => {
                let socket = socket.into_std()?;
                let pending: Vec<_> = iter::from_fn(|| socket.accept().ok()).take(BACKLOG).collect();
                drop(socket);
                let register = |(stream, address): (StdStream, _)| {
                    stream.set_nonblocking(true).ok()?;
                    Some((TcpStream::from_std(stream).ok()?, address))
                };
                pending.into_iter().filter_map(register).collect()
            }
            Acceptor::Unix(socket) => {
                let socket = socket.into_std()?;
                let pending: Vec<_> = iter::from_fn(|| socket.accept().ok()).take(BACKLOG).collect();
                drop(socket);
                let register = |(stream, _): (StdUnixStream, _)| {
                    stream.set_nonblocking(true).ok()?;
                    Some((stream_of_unix(UnixStream::from_std(stream).ok()?).ok()?, UNIX_PEER))
                };
                pending.into_iter().filter_map(register).collect()
            }
        })
    }
}

/// Return a connection to a Unix socket as the type of TCP connections. The calls of the kernel that read, write and
/// close are the same for both. Only those with addresses and TCP options fail.
fn stream_of_unix(stream: UnixStream) -> io::Result<TcpStream> {
    TcpStream::from_std(OwnedFd::from(stream.into_std()?).into())
}

/// The server of one worker for all listeners.
#[derive(Debug, Clone)]
pub struct Server {
    gateway: Arc<Gateway>,
    /// A token that is cancelled when draining starts.
    drain: CancellationToken,
    /// A token that is cancelled when `drain_timeout` expires.
    force_close: CancellationToken,
    /// Tasks of open connections.
    tasks: TaskTracker,
    /// Connection limits of all workers.
    connection_limits: Arc<ConnectionLimits>,
    /// Metrics of this worker.
    metrics: Arc<ListenerMetrics>,
}

/// The future that serves the requests of a connection.
type Requests = Pin<Box<dyn Future<Output = Result<CloseReason, BoxError>> + Send>>;

/// A connection on which the first request can arrive.
struct OpenConnection {
    requests: Requests,
    /// Receives the socket when `requests` has ended.
    returned_stream: Receiver<TcpStream>,
    /// `None` if the connection does not count against `max_connections_per_ip`.
    _permit: Option<PerIpPermit>,
}

impl Server {
    /// Create a server without connections.
    pub fn new(
        gateway: Arc<Gateway>,
        connection_limits: Arc<ConnectionLimits>,
        metrics: Arc<ListenerMetrics>,
        drain: CancellationToken,
    ) -> Self {
        let force_close = CancellationToken::new();
        let tasks = TaskTracker::new();
        Server { gateway, drain, force_close, tasks, connection_limits, metrics }
    }

    /// Serve the connections of each socket until draining starts. Then wait until all connections are closed, at most
    /// for `drain_timeout`, and close the remaining connections. `sockets` contains each socket with the index of its
    /// listener.
    pub async fn run(self, sockets: Vec<(usize, Acceptor)>) {
        let accept = |(listener_index, socket)| tokio::spawn(self.clone().accept(socket, listener_index));
        let accept_tasks: Vec<_> = sockets.into_iter().map(accept).collect();
        for task in accept_tasks {
            if let Err(error) = task.await {
                warn!(%error, "listener task failed");
            }
        }
        self.tasks.close();
        let drain_timeout = self.gateway.config().server.drain_timeout;
        let deadline = Instant::now() + drain_timeout;
        if timeout_at(deadline, self.tasks.wait()).await.is_err() {
            warn!(connections = self.tasks.len(), "drain_timeout expired; closing connections");
            self.force_close.cancel();
            self.tasks.wait().await;
        }
        let copies = self.gateway.drain_mirrors(deadline).await;
        if copies > 0 {
            warn!(copies, "drain_timeout expired; dropping copies of mirrored requests");
        }
        if timeout(FLUSH_TIMEOUT, self.gateway.flush_pending()).await.is_err() {
            warn!("the store did not complete the last permit releases and charges in time");
        }
    }

    async fn accept(self, socket: Acceptor, listener_index: usize) {
        let mut logged_at = None;
        let mut is_delayed = false;
        loop {
            let delay = self.gateway.accept_delay().filter(|_| !is_delayed);
            tokio::select! {
                biased;
                () = self.drain.cancelled() => break,
                () = sleep(delay.unwrap_or_default()), if delay.is_some() => is_delayed = true,
                accepted = socket.accept(), if delay.is_none() => match accepted {
                    Ok((stream, address)) => {
                        is_delayed = false;
                        let is_due = logged_at.is_none_or(|at: Instant| at.elapsed() > FULL_LOG_INTERVAL);
                        if self.connection_limits.is_full() && is_due {
                            warn!("max_connections reached; further connections wait");
                            logged_at = Some(Instant::now());
                        }
                        self.spawn_connection(stream, address, listener_index).await;
                    }
                    Err(error) => {
                        warn!(%error, "cannot accept a connection");
                        sleep(ACCEPT_RETRY_DELAY).await;
                    }
                },
            }
        }
        // The kernel resets connections in the accept queue when the socket closes, so the gateway accepts them first.
        // It accepts at most `BACKLOG` connections, so that clients that keep connecting cannot delay the drain.
        for (stream, address) in socket.close().unwrap_or_default() {
            self.spawn_connection(stream, address, listener_index).await;
        }
    }

    /// Serve a connection once `max_connections` permits it. While this connection waits for its permit, further
    /// connections wait in the accept queue.
    async fn spawn_connection(&self, stream: TcpStream, address: SocketAddr, listener_index: usize) {
        // Acquire the permit after the accept, so that the worker holds no permit while it waits for a connection.
        let permit = tokio::select! {
            biased;
            permit = self.connection_limits.acquire(listener_index) => permit,
            // While draining, close the connection instead of waiting for a permit.
            () = self.drain.cancelled() => None,
        };
        let Some(permit) = permit else { return };
        let held = (permit, self.gateway.start_connection());
        let force_close = self.force_close.clone();
        let connection = self.serve_connection(stream, address, listener_index);
        self.tasks.spawn(async move {
            let mut waker = SelectiveWaker::new();
            let mut force_closed = pin!(force_close.cancelled());
            let mut connection = pin!(connection);
            // Do not use `CancellationToken::run_until_cancelled`, which would reserve space for the future twice, and
            // would poll the token at every wakeup of the task.
            let closed = poll_fn(|cx| {
                let is_force_closed =
                    waker.take_context(cx).is_some_and(|mut cx| force_closed.as_mut().poll(&mut cx).is_ready());
                if is_force_closed { Poll::Ready(Ok(())) } else { connection.as_mut().poll(cx) }
            });
            if let Err(error) = closed.await {
                debug!(%error, "connection ended with an error");
            }
            drop(held);
        });
    }

    /// Serve a connection until it is closed.
    fn serve_connection(
        &self,
        stream: TcpStream,
        address: SocketAddr,
        listener_index: usize,
    ) -> impl Future<Output = Result<(), BoxError>> + Send + use<> {
        // Box the future, so that its memory is free when the connection is open.
        let opening = boxed(|| self.clone().open_connection(stream, address, listener_index));
        let (metrics, connection_limits) = (self.metrics.clone(), self.connection_limits.clone());
        async move {
            let Some(OpenConnection { requests, mut returned_stream, _permit }) = opening.await? else { return Ok(()) };
            let close_reason = requests.await?;
            if let CloseReason::TooManyResets = close_reason {
                metrics.too_many_resets.increment(0);
            }
            let Ok(stream) = returned_stream.try_recv() else { return Ok(()) };
            match close_reason {
                CloseReason::Complete | CloseReason::Timeout | CloseReason::TooManyResets => {}
                CloseReason::WriteStalled | CloseReason::TruncatedResponse => reset_on_close(&stream),
                CloseReason::RequestUnread => {
                    if let Some(_permit) = connection_limits.try_acquire_lingering() {
                        // Box the future, because only few connections need space for a lingering close.
                        Box::pin(lingering_close(stream)).await;
                    }
                }
            }
            Ok(())
        }
    }

    /// Identify the client, accept its TLS handshake and detect the HTTP version. Return `None` if the connection has
    /// been closed without a request.
    async fn open_connection(
        self,
        mut stream: TcpStream,
        address: SocketAddr,
        listener_index: usize,
    ) -> Result<Option<OpenConnection>, BoxError> {
        let gateway = self.gateway.clone();
        let config = gateway.config();
        let listener = &config.listeners[listener_index];
        let is_tcp = listener.address.tcp().is_some();
        if is_tcp {
            // Set TCP_NODELAY, because Nagle's algorithm would only delay responses, which the gateway writes in one
            // piece.
            stream.set_nodelay(true)?;
            if let Some(memory) = &config.server.memory {
                memory.socket_buffers().apply_to(&stream)?;
            }
        }
        let settings = config.server.clone();
        // The PROXY header, the TLS handshake and the first request headers share one timeout.
        let deadline = Instant::now() + settings.header_timeout;
        let activity = ConnectionActivity::new();
        let mut peer = timeout_at(deadline, self.identify_peer(&mut stream, address, listener, &config)).await??;
        peer.listener = listener_index;
        let connection_limits = self.connection_limits.clone();
        // Exempt trusted proxies from `max_connections_per_ip`, because their connections carry the requests of many
        // clients. All clients of a Unix socket have the same address.
        let _permit = if connection_limits.has_per_ip_limit()
            && is_tcp
            && !peer.forwarded.trusted
            && !settings.is_exempt_from_per_ip(peer.address)
        {
            let network = config.client_ip.network(peer.address);
            let Some(permit) = connection_limits.permit(network) else { return Ok(None) };
            Some(permit)
        } else {
            None
        };
        let has_websockets = listener.has_websockets;
        let tls = listener.tls.as_ref().map(|tls| tls.tls.clone());
        let client_hello = match tls {
            Some(_) => timeout_at(deadline, Box::pin(handshake::peek_client_hello(&stream))).await??,
            None => Vec::new(),
        };
        if tls.is_some() && client_hello.is_empty() {
            // Do not log a client that closes the connection without sending a byte, as TCP health checks do.
            return Ok(None);
        }
        if tls.is_some() && handshake::is_plain_http(&client_hello) {
            drop(config);
            self.reject_plain_http(stream, peer.address, deadline).await?;
            return Ok(None);
        }
        let (mut stream, mut returned_stream) = ReclaimableStream::new(stream, self.metrics.clone());
        let serves = listener.protocol;
        // Release the configuration snapshot, because the connection may last longer than this configuration.
        drop(config);
        let drain_grace = settings.drain_grace();
        let buffer_budget = connection_limits.buffer_budget();
        let drain = self.drain.clone();
        let new_connection = |peer| {
            let peer = Arc::new(peer);
            HttpConnection { gateway, peer, settings, activity, serves, buffer_budget, drain, has_websockets }
        };
        let requests: Requests = match tls {
            None => {
                let protocol = tokio::select! {
                    biased;
                    protocol = timeout_at(deadline, Protocol::from_preface(&mut stream)) => protocol??,
                    // Close the connection when draining, because the client has sent no request and waits for no
                    // response.
                    () = self.wait_for_drain(drain_grace) => return Ok(None),
                };
                let Some(protocol) = protocol else {
                    drop(stream);
                    let Ok(stream) = returned_stream.try_recv() else { return Ok(None) };
                    self.reject_tls(stream, peer.address, deadline).await?;
                    return Ok(None);
                };
                boxed(|| new_connection(peer).run(stream, protocol))
            }
            Some(tls) => {
                let accepted = match timeout_at(deadline, Box::pin(handshake::accept(&tls, stream))).await {
                    Ok(Ok(accepted)) => accepted,
                    Ok(Err(error)) => {
                        let failure = HandshakeFailure::from_error(&error);
                        self.record_handshake_failure(failure, Some(&error), peer.address, &client_hello);
                        return Err(error.into());
                    }
                    Err(elapsed) => {
                        self.record_handshake_failure(HandshakeFailure::Timeout, None, peer.address, &client_hello);
                        return Err(elapsed.into());
                    }
                };
                // `None` means that a CA has validated a name. Close the connection, because the CA sends nothing after
                // the handshake (RFC 8737 §3).
                let Some(Accepted { stream, client_verifier }) = accepted else { return Ok(None) };
                let stream = Box::new(stream);
                let session = stream.get_ref().1;
                self.metrics.record_handshake(session.protocol_version(), session.alpn_protocol());
                let certificate = session.peer_certificates().zip(client_verifier).map(|(chain, verifier)| {
                    ClientCertificate::new(chain, verifier, (clock::unix_us() / 1_000_000) as i64)
                });
                let server_name = session.server_name().unwrap_or_default().to_ascii_lowercase().into();
                peer.tls = Some(Arc::new(TlsClient::new(server_name, certificate.transpose()?)));
                let protocol = Protocol::from_alpn(session.alpn_protocol());
                boxed(|| new_connection(peer).run(stream, protocol))
            }
        };
        Ok(Some(OpenConnection { requests, returned_stream, _permit }))
    }

    /// Count and log a failed TLS handshake.
    fn record_handshake_failure(
        &self,
        failure: HandshakeFailure,
        error: Option<&io::Error>,
        client: IpAddr,
        client_hello: &[u8],
    ) {
        self.metrics.record_failure(failure);
        let network = self.gateway.config().client_ip.format_network(client);
        handshake::log_failure(failure, error, &network, client_hello);
    }

    /// Respond with 400 to HTTP on a TLS listener, and close the connection.
    async fn reject_plain_http(&self, stream: TcpStream, client: IpAddr, deadline: Instant) -> Result<(), BoxError> {
        self.record_handshake_failure(HandshakeFailure::PlainHttp, None, client, &[]);
        self.reject(stream, handshake::PLAIN_HTTP, deadline).await
    }

    /// Respond with 400 to a TLS handshake on a listener without TLS, and close the connection.
    async fn reject_tls(&self, stream: TcpStream, client: IpAddr, deadline: Instant) -> Result<(), BoxError> {
        let network = self.gateway.config().client_ip.format_network(client);
        self.metrics.record_failure(HandshakeFailure::UnexpectedTls);
        handshake::log_unexpected_tls(stream.local_addr().ok(), &network);
        self.reject(stream, handshake::UNEXPECTED_TLS, deadline).await
    }

    /// Respond with 400 and this detail, and close the connection.
    async fn reject(&self, mut stream: TcpStream, detail: &str, deadline: Instant) -> Result<(), BoxError> {
        let response = handshake::tls_mismatch_response(detail, self.gateway.config().server.proxy_status);
        self.gateway.record_unparsed(StatusCode::BAD_REQUEST);
        timeout_at(deadline, stream.write_all(&response)).await??;
        self.metrics.record_sent(response.len());
        if let Some(_permit) = self.connection_limits.try_acquire_lingering() {
            // Box the future, because only few connections need space for a lingering close.
            Box::pin(lingering_close(stream)).await;
        }
        Ok(())
    }

    /// Wait until draining has started, and then for `grace`.
    async fn wait_for_drain(&self, grace: Duration) {
        self.drain.cancelled().await;
        sleep(grace).await;
    }

    /// Identify the client by the address of the socket, or by the PROXY header on listeners that expect this header.
    ///
    /// # Errors
    /// The listener expects a PROXY header, but the peer is not a trusted proxy, or its header is missing or malformed.
    async fn identify_peer(
        &self,
        stream: &mut TcpStream,
        socket_address: SocketAddr,
        listener: &Listener,
        config: &CompiledConfig,
    ) -> Result<Peer, BoxError> {
        let scheme = if listener.tls.is_some() { "https" } else { "http" };
        let mut peer = Peer::new(socket_address.ip(), scheme, config);
        if config.sends_proxy_headers {
            peer.set_connection(&ProxiedConnection::new(socket_address, stream.local_addr().ok()));
        }
        if listener.proxy_protocol {
            if !peer.forwarded.trusted {
                UNTRUSTED_PROXY_LOGGED.call_once(|| {
                    warn!(
                        listener = %listener.address,
                        client = %peer.address,
                        "connection to a listener with `proxy_protocol` rejected: the peer is not in \
                         client_ip.trusted_proxies; further rejections are not logged"
                    );
                });
                return Err(format!("`{}` is not a trusted proxy", peer.address).into());
            }
            let header = handshake::read_proxy_header(stream).await;
            if let Err(ProxyError::NoHeader) = header
                && NO_PROXY_HEADER_THROTTLE.should_log(LOG_INTERVAL)
            {
                warn!(
                    listener = %listener.address,
                    proxy = %peer.address,
                    "connection closed: the trusted proxy sent no PROXY header, which `proxy_protocol` requires; further \
                     connections without this header are not logged for a minute"
                );
            }
            match header? {
                ProxySource::Proxied(connection) => {
                    peer = Peer::new(connection.source.ip(), scheme, config);
                    peer.set_connection(&connection);
                }
                ProxySource::Local => {}
                // Trust the proxy, but do not trust the forwarding headers, because they come from the unknown client.
                ProxySource::Unknown => peer.distrust(),
            }
        }
        Ok(peer)
    }
}

// === Connection limits: for all connections together, for each client network, and for connections in lingering close
// ===

/// Maximum number of connections in lingering close at the same time. Above this number, connections are closed without
/// lingering.
const MAX_LINGERING: usize = 1024;

/// The numbers of open connections of all workers, and their limits.
#[derive(Debug)]
pub struct ConnectionLimits {
    permits: Arc<Semaphore>,
    capacity: Mutex<Capacity>,
    /// Number of open connections of each listener.
    open_by_listener: Box<[AtomicUsize]>,
    lingering_permits: Arc<Semaphore>,
    /// Number of open connections of each client network. Only networks with open connections have an entry. Clients
    /// can choose the keys of the map (their addresses), so the map uses the hasher of std, whose random seed prevents
    /// collision attacks.
    counts_by_network: Mutex<HashMap<IpAddr, usize>>,
    max_per_ip: AtomicUsize,
    /// Memory budget for the buffers of all connections.
    buffer_budget: Arc<BufferBudget>,
    /// Total number of connections that acquired a permit, and total number of connections that
    /// `max_connections_per_ip` rejected.
    counter: Counter<2>,
}

#[derive(Debug)]
struct Capacity {
    max: usize,
    /// Number of open connections above `max` after a reload has lowered `max`. This number of connections must end
    /// before a permit becomes available.
    excess: usize,
}

/// Permit of a connection. The connection counts against `max_connections` until the permit is dropped.
#[derive(Debug)]
struct ConnectionPermit {
    limits: Arc<ConnectionLimits>,
    permit: Option<OwnedSemaphorePermit>,
    listener_index: usize,
}

/// Permit of a connection. The connection counts against `max_connections_per_ip` until the permit is dropped.
#[derive(Debug)]
struct PerIpPermit {
    limits: Arc<ConnectionLimits>,
    network: IpAddr,
}

impl ConnectionLimits {
    /// Create the limits, without open connections. `listeners` is the number of listeners.
    pub fn new(settings: &ServerSettings, listeners: usize) -> Self {
        ConnectionLimits {
            permits: Arc::new(Semaphore::new(settings.max_connections)),
            capacity: Mutex::new(Capacity { max: settings.max_connections, excess: 0 }),
            open_by_listener: (0..listeners).map(|_| AtomicUsize::new(0)).collect(),
            lingering_permits: Arc::new(Semaphore::new(MAX_LINGERING)),
            counts_by_network: Mutex::default(),
            max_per_ip: settings.max_connections_per_ip.into(),
            buffer_budget: Arc::new(BufferBudget::new(settings.max_buffered)),
            counter: Counter::default(),
        }
    }

    /// Wait for a permit for a new connection to a listener. The result is always `Some`, because the semaphore is
    /// never closed.
    async fn acquire(self: &Arc<Self>, listener_index: usize) -> Option<ConnectionPermit> {
        let permit = self.permits.clone().acquire_owned().await.ok()?;
        self.counter.increment(0);
        self.open_by_listener[listener_index].fetch_add(1, Ordering::Relaxed);
        Some(ConnectionPermit { limits: self.clone(), permit: Some(permit), listener_index })
    }

    /// Apply new settings. Open connections above a lower limit stay open.
    pub fn resize(&self, settings: &ServerSettings) {
        self.max_per_ip.store(settings.max_connections_per_ip, Ordering::Relaxed);
        self.buffer_budget.resize(settings.max_buffered);
        let mut capacity = self.lock_capacity();
        let old_max = capacity.max;
        let new_max = settings.max_connections;
        capacity.max = new_max;
        if new_max >= old_max {
            let added = new_max - old_max;
            let absorbed = added.min(capacity.excess);
            capacity.excess -= absorbed;
            self.permits.add_permits(added - absorbed);
        } else {
            capacity.excess += old_max - new_max - self.permits.forget_permits(old_max - new_max);
        }
    }

    /// Return the number of open connections and their maximum.
    pub fn open_and_max(&self) -> (usize, usize) {
        let Capacity { max, excess } = *self.lock_capacity();
        (max + excess - self.permits.available_permits(), max)
    }

    /// Return the number of open connections of each listener.
    pub fn open_by_listener(&self) -> impl Iterator<Item = usize> {
        self.open_by_listener.iter().map(|open| open.load(Ordering::Relaxed))
    }

    /// Return the total number of connections that acquired a permit, and the total number of connections that
    /// `max_connections_per_ip` rejected.
    pub fn totals(&self) -> [u64; 2] {
        self.counter.values()
    }

    /// Return whether the next connection has to wait for a permit.
    fn is_full(&self) -> bool {
        self.permits.available_permits() == 0
    }

    /// Return the memory budget of all connections.
    fn buffer_budget(&self) -> Arc<BufferBudget> {
        self.buffer_budget.clone()
    }

    /// Acquire a permit for a lingering close.
    fn try_acquire_lingering(&self) -> Option<OwnedSemaphorePermit> {
        self.lingering_permits.clone().try_acquire_owned().ok()
    }

    /// Return whether the number of connections per client network is limited.
    fn has_per_ip_limit(&self) -> bool {
        self.max_per_ip.load(Ordering::Relaxed) > 0
    }

    /// Acquire a permit for a connection from `network`. Return `None` if the network is at its limit.
    fn permit(self: &Arc<Self>, network: IpAddr) -> Option<PerIpPermit> {
        let mut networks = self.counts_by_network.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = networks.get(&network).copied().unwrap_or(0);
        if taken >= self.max_per_ip.load(Ordering::Relaxed) {
            self.counter.increment(1);
            return None;
        }
        networks.insert(network, taken + 1);
        Some(PerIpPermit { limits: self.clone(), network })
    }
}

impl ConnectionLimits {
    fn lock_capacity(&self) -> MutexGuard<'_, Capacity> {
        self.capacity.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.limits.open_by_listener[self.listener_index].fetch_sub(1, Ordering::Relaxed);
        let mut capacity = self.limits.lock_capacity();
        if capacity.excess > 0
            && let Some(permit) = self.permit.take()
        {
            capacity.excess -= 1;
            permit.forget();
        }
    }
}

impl Drop for PerIpPermit {
    fn drop(&mut self) {
        let mut counts = self.limits.counts_by_network.lock().unwrap_or_else(PoisonError::into_inner);
        match counts.get_mut(&self.network) {
            Some(count) if *count > 1 => *count -= 1,
            _ => {
                counts.remove(&self.network);
            }
        }
    }
}
