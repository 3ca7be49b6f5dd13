//! Connections: accept, protocol, deadlines, drain.

mod bell;
pub mod connections;
mod conversation;
mod handshake;
mod lent;
mod linger;
mod protocol;
pub mod proxy;
mod watched;

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

use crate::gateway::{Gateway, Peer};
use crate::http::activity::Activity;
use crate::identity::client_cert;
use crate::limit::clock;
use crate::runtime::{Listener, Runtime};
use bell::Bell;
use connections::Connections;
use conversation::{BoxError, Conversation, End};
use lent::Lent;
use linger::{linger, reset};
use protocol::Protocol;
use proxy::Sender;

/// Connections that may wait to be accepted, for each socket.
pub const BACKLOG: usize = 4096;

/// After a failed accept (out of descriptors, mostly) nothing is gained by trying again at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// At the end, for leases to be released and late costs to be charged.
const SETTLE: Duration = Duration::from_secs(2);

/// Whoever is not a proxy and comes where proxies are expected could fill the log.
static STRANGER: Once = Once::new();

/// While connections wait, it is told at most so often.
const FULL_AGAIN: Duration = Duration::from_secs(60);

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
    pub fn new(gateway: Arc<Gateway>, connections: Arc<Connections>, stop: CancellationToken) -> Self {
        let (end, tasks) = (CancellationToken::new(), TaskTracker::new());
        Server { gateway, stop, end, tasks, connections }
    }

    /// Serves sockets, each of the listener at its place, until it is stopped, then lets what runs finish, for
    /// `drain_timeout` at most.
    pub async fn run(self, sockets: Vec<(usize, TcpListener)>) {
        let accept = |(place, socket)| tokio::spawn(self.clone().accept(socket, place));
        let accepting: Vec<_> = sockets.into_iter().map(accept).collect();
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
        // What the kernel has queued for this socket would be reset when it closes. Taken before any of it is served, and no
        // more than the queue holds: whoever keeps connecting would keep this from its end.
        let Ok(socket) = socket.into_std() else { return };
        let waiting: Vec<_> = iter::from_fn(|| socket.accept().ok()).take(BACKLOG).collect();
        drop(socket);
        for (stream, address) in waiting {
            if let Ok(stream) = stream.set_nonblocking(true).and_then(|()| TcpStream::from_std(stream)) {
                self.open(stream, address, listener).await;
            }
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
            let (end, mut bell) = (server.end.clone(), Bell::new());
            let (mut ended, mut served) = (pin!(end.cancelled()), pin!(server.serve(stream, address, listener)));
            // `run_until_cancelled` would keep room for the future twice, and ask for the end whenever something comes.
            let served = poll_fn(|cx| {
                let ends = bell.answer(cx).is_some_and(|mut cx| ended.as_mut().poll(&mut cx).is_ready());
                if ends { Poll::Ready(Ok(())) } else { served.as_mut().poll(cx) }
            });
            if let Err(error) = served.await {
                debug!(%error, "a connection ended with an error");
            }
        });
    }

    async fn serve(self, mut stream: TcpStream, address: SocketAddr, listener: usize) -> Result<(), BoxError> {
        // Answers are written whole; waiting for more would only delay them.
        stream.set_nodelay(true)?;
        let gateway = self.gateway.clone();
        let runtime = gateway.runtime();
        let (listener, settings) = (&runtime.listeners[listener], runtime.server.clone());
        // A PROXY header and the handshake spend of the same time as the first head.
        let deadline = Instant::now() + settings.header_timeout;
        let activity = Activity::new();
        let mut peer = timeout_at(deadline, self.peer(&mut stream, address, listener, &runtime)).await??;
        let connections = self.connections.clone();
        // A trusted proxy brings many clients.
        let _seat = if connections.by_network() && !peer.origin.trusted && !settings.exempts(peer.address) {
            let network = runtime.client_ip.network(peer.address);
            let Some(seat) = connections.seat(network) else { return Ok(()) };
            Some(seat)
        } else {
            None
        };
        let acceptor = listener.tls.as_ref().map(|tls| tls.tls.acceptor());
        let hello = match acceptor {
            Some(_) => timeout_at(deadline, Box::pin(handshake::first_bytes(&stream))).await??,
            None => Vec::new(),
        };
        let (mut stream, mut back) = Lent::new(stream);
        // A connection may last, and must not keep a configuration that nobody serves any more.
        drop(runtime);
        let farewell = settings.farewell();
        let budget = connections.budget();
        let stop = self.stop.clone();
        let talk = |peer| Conversation { gateway, peer: Arc::new(peer), settings, activity, budget, stop };
        // On the heap, each with its own size: a task keeps room for the largest of what it may ever do.
        let end = match acceptor {
            None => {
                let protocol = tokio::select! {
                    biased;
                    protocol = timeout_at(deadline, Protocol::said(&mut stream)) => protocol??,
                    // Nobody waits for an answer.
                    () = self.farewell(farewell) => return Ok(()),
                };
                Box::pin(talk(peer).run(stream, protocol)).await?
            }
            Some(acceptor) => {
                let handshake = Box::pin(acceptor.accept(stream));
                let shaken = timeout_at(deadline, handshake).await?;
                let stream = Box::new(shaken.inspect_err(|error| handshake::failed(error, peer.address, &hello))?);
                drop(hello);
                let session = stream.get_ref().1;
                if let Some([certificate, ..]) = session.peer_certificates() {
                    peer.subject = client_cert::subject(certificate, (clock::unix_us() / 1_000_000) as i64)?;
                }
                let protocol = Protocol::agreed(session.alpn_protocol());
                Box::pin(talk(peer).run(stream, protocol)).await?
            }
        };
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

    /// Is over so long after no new connections are wanted.
    async fn farewell(&self, after: Duration) {
        self.stop.cancelled().await;
        sleep(after).await;
    }

    /// Who is at the other end: the socket's address, or on a listener for proxies whom they speak for.
    async fn peer(
        &self,
        stream: &mut TcpStream,
        socket: SocketAddr,
        listener: &Listener,
        runtime: &Runtime,
    ) -> Result<Peer, BoxError> {
        let scheme = if listener.tls.is_some() { "https" } else { "http" };
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
                Sender::Unknown => peer.hide(),
            }
        }
        Ok(peer)
    }
}
