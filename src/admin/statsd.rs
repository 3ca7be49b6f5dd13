//! Sends the counters of envoyproxy/ratelimit to a StatsD server, under the same names: `NAME:INCREASE|c`, one line each
//! (<https://github.com/statsd/statsd/blob/master/docs/metric_types.md>). A separate thread reads the counters.

use std::collections::HashMap;
use std::fmt::Write;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::{TcpStream, UdpSocket, lookup_host};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::admin::metrics::sum_counts;
use crate::admin::state::ProcessState;
use crate::clock::LogThrottle;
use crate::proxy::metrics::{CallResult, HIT_KINDS, split_hits_name};
use crate::snapshot::statsd::{StatsdSettings, TagFormat, Transport};

/// Maximum time for a delivery, including the time to connect.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum length of a datagram in bytes, which fits into a packet of 1500 bytes with IPv6, as the documentation of StatsD
/// recommends.
const MAX_DATAGRAM: usize = 1432;

/// Minimum interval between log records about failed deliveries.
const LOG_INTERVAL: Duration = Duration::from_secs(600);

/// The thread that delivers metrics.
#[derive(Debug)]
pub struct StatsdThread {
    stop: CancellationToken,
    thread: JoinHandle<()>,
}

impl StatsdThread {
    /// Start the thread.
    ///
    /// # Errors
    /// The tokio runtime or the thread cannot be started.
    pub fn start(settings: StatsdSettings, state: Arc<ProcessState>) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let mut exporter = Exporter {
            settings,
            state,
            delivered: HashMap::new(),
            connection: None,
            is_failing: false,
            throttle: LogThrottle::new(),
        };
        let run = move || {
            runtime.block_on(async {
                while stopped.run_until_cancelled(sleep(exporter.settings.interval)).await.is_some() {
                    exporter.deliver().await;
                }
                exporter.deliver().await;
            });
        };
        let thread = std::thread::Builder::new().name("statsd".to_owned()).spawn(run)?;
        Ok(StatsdThread { stop, thread })
    }

    /// Deliver the last increases, and end the thread.
    pub fn finish(self) {
        self.stop.cancel();
        // A panic of the thread has been logged.
        let _ = self.thread.join();
    }
}

struct Exporter {
    settings: StatsdSettings,
    state: Arc<ProcessState>,
    /// The counts that the server has received, by name.
    delivered: HashMap<String, u64>,
    /// The TCP connection, or the UDP socket.
    connection: Option<Connection>,
    is_failing: bool,
    throttle: LogThrottle,
}

enum Connection {
    Tcp(TcpStream),
    Udp(UdpSocket),
}

impl Exporter {
    /// Deliver the increases since the last delivery. If there is no connection, they are part of the next delivery.
    async fn deliver(&mut self) {
        let counts = self.state.reference_counts();
        let increases = counts.iter().map(|(name, count)| (name, increase(self.delivered.get(name).copied(), *count)));
        let lines: Vec<_> =
            increases.filter(|(_, increase)| *increase > 0).map(|(name, by)| self.line(name, by)).collect();
        if lines.is_empty() {
            return;
        }
        match timeout(TIMEOUT, self.send(&lines)).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
            Ok(()) => {
                self.delivered = counts.into_iter().collect();
                if std::mem::take(&mut self.is_failing) {
                    info!(server = %self.settings.address, "sending metrics to StatsD again");
                }
            }
            Err(error) => {
                self.connection = None;
                self.is_failing = true;
                if self.throttle.should_log(LOG_INTERVAL) {
                    let server = &self.settings.address;
                    warn!(%server, %error, "cannot send metrics to StatsD; they are sent when it is reachable");
                }
            }
        }
    }

    fn line(&self, name: &str, increase: u64) -> String {
        let StatsdSettings { format, tags, .. } = &self.settings;
        // Writing to a `String` cannot fail.
        let mut line = name.to_owned();
        if *format == TagFormat::Name {
            for (key, value) in tags {
                let _ = write!(line, ".__{key}={value}");
            }
        }
        let _ = write!(line, ":{increase}|c");
        if *format == TagFormat::Dogstatsd {
            for (index, (key, value)) in tags.iter().enumerate() {
                let separator = if index == 0 { "|#" } else { "," };
                let _ = write!(line, "{separator}{key}:{value}");
            }
        }
        line.push('\n');
        line
    }

    async fn send(&mut self, lines: &[String]) -> io::Result<()> {
        // A server that has closed the connection has not read what is written now.
        let is_closed = |stream: &TcpStream| !matches!(stream.try_read(&mut [0; 64]), Err(error) if error.kind() == io::ErrorKind::WouldBlock);
        if matches!(&self.connection, Some(Connection::Tcp(stream)) if is_closed(stream)) {
            self.connection = None;
        }
        let connection = match self.connection.take() {
            Some(connection) => connection,
            None => self.connect().await?,
        };
        match self.connection.insert(connection) {
            Connection::Tcp(stream) => stream.write_all(lines.concat().as_bytes()).await,
            Connection::Udp(socket) => {
                for datagram in datagrams(lines) {
                    socket.send(datagram.as_bytes()).await?;
                }
                Ok(())
            }
        }
    }

    async fn connect(&self) -> io::Result<Connection> {
        let address = &*self.settings.address;
        if self.settings.transport == Transport::Tcp {
            return Ok(Connection::Tcp(TcpStream::connect(address).await?));
        }
        let server = lookup_host(address).await?.next().ok_or(io::ErrorKind::NotFound)?;
        let any = if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let socket = UdpSocket::bind(SocketAddr::new(any, 0)).await?;
        socket.connect(server).await?;
        Ok(Connection::Udp(socket))
    }
}

/// Return the increase of a counter since the last delivery. A counter that has become smaller was dropped by a reload,
/// and has started again at 0.
fn increase(delivered: Option<u64>, count: u64) -> u64 {
    count.checked_sub(delivered.unwrap_or_default()).unwrap_or(count)
}

/// Join lines to datagrams of at most [`MAX_DATAGRAM`] bytes.
fn datagrams(lines: &[String]) -> Vec<String> {
    let mut datagrams: Vec<String> = Vec::new();
    for line in lines {
        match datagrams.last_mut() {
            Some(last) if last.len() + line.len() <= MAX_DATAGRAM => last.push_str(line),
            Some(_) | None => datagrams.push(line.clone()),
        }
    }
    datagrams
}

impl ProcessState {
    /// Return the counts of envoyproxy/ratelimit, by the names under which it sends them to StatsD.
    fn reference_counts(&self) -> Vec<(String, u64)> {
        let mut counts = Vec::new();
        for (name, workers) in self.request_metrics.hits.all() {
            let (domain, labels) = split_hits_name(&name);
            let domain = domain.replace([':', '|', '\n'], "_");
            let descriptor = format!("ratelimit.service.rate_limit.{domain}.{}", labels.join("."));
            let hits = sum_counts(workers.iter().map(|counter| counter.values()));
            counts.extend(HIT_KINDS.iter().zip(hits).map(|(kind, hits)| (format!("{descriptor}.{kind}"), hits)));
        }
        let calls = self.call_counts();
        let [loaded, rejected] = self.config_handle.reload_counts();
        counts.extend(
            [
                ("ratelimit_server.ShouldRateLimit.total_requests", calls.iter().sum()),
                ("ratelimit.service.call.should_rate_limit.redis_error", calls[CallResult::StoreError as usize]),
                ("ratelimit.service.call.should_rate_limit.service_error", calls[CallResult::Invalid as usize]),
                ("ratelimit.service.config_load_success", loaded),
                ("ratelimit.service.config_load_error", rejected),
            ]
            .map(|(name, count)| (name.to_owned(), count)),
        );
        counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counter_that_starts_again_loses_no_hits() {
        assert_eq!(
            [(None, 3), (Some(3), 5), (Some(5), 5), (Some(5), 2)].map(|(old, new)| increase(old, new)),
            [3, 2, 0, 2]
        );
    }

    #[test]
    fn datagrams_have_whole_lines_and_fit_into_a_packet() {
        let lines: Vec<_> = (0..100).map(|index| format!("{index}{}\n", "x".repeat(index * 3))).collect();
        let datagrams = datagrams(&lines);
        assert_eq!(datagrams.concat(), lines.concat());
        assert!(datagrams.iter().all(|datagram| datagram.len() <= MAX_DATAGRAM && datagram.ends_with('\n')));
        assert!(datagrams.len() < 20, "{}", datagrams.len());
    }
}
