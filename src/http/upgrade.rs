//! Protocol upgrades (RFC 9110 §7.8): the protocols that a client offers, the protocols that the upstream selects, and
//! the tunnel between client and upstream.

use std::io;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use aws_lc_rs::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures_util::future::join;
use http::header::{
    CONNECTION, HeaderName, HeaderValue, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_VERSION, UPGRADE,
};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use hyper::ext::Protocol;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf, copy_bidirectional};
use tokio::time::timeout;
use uuid::Uuid;

use crate::clock::monotonic;

/// Protocols that carry HTTP requests, possibly inside TLS. Inside a tunnel, such requests would bypass routes and
/// limits.
const REQUEST_PROTOCOLS: [&str; 5] = ["h2c", "h2", "h3", "http", "tls"];

/// The protocols to which a client offers to upgrade.
#[derive(Debug)]
pub struct UpgradeRequest(HeaderValue);

impl UpgradeRequest {
    /// Return the offered protocols that may be forwarded, or `None` if there are none.
    pub fn from_headers(headers: &HeaderMap) -> Option<Self> {
        // A client that offers an upgrade also sends the option `upgrade` in `Connection`. Without this option, ignore
        // `Upgrade`, because it was meant for another connection (RFC 9110 §7.8).
        if !tokens(headers, &CONNECTION).any(|name| name.eq_ignore_ascii_case("upgrade")) {
            return None;
        }
        let protocols: Vec<_> = tokens(headers, &UPGRADE).filter(|protocol| !carries_requests(protocol)).collect();
        let value = HeaderValue::from_str(&protocols.join(", ")).ok();
        value.filter(|value| !value.is_empty()).map(UpgradeRequest)
    }

    /// Return whether the client offers to open a WebSocket.
    pub fn offers_websocket(&self) -> bool {
        split_list(&self.0).any(|protocol| protocol.eq_ignore_ascii_case(WEBSOCKET))
    }

    /// Set `Connection` and `Upgrade` in the headers of the upstream request.
    pub fn insert_into(&self, headers: &mut HeaderMap) {
        set_upgrade_headers(headers, self.0.clone());
    }

    /// Return the protocols to which a response switches, or `None` if the response names none, or one that was not
    /// offered.
    pub fn accepted_protocols(&self, response_headers: &HeaderMap) -> Option<HeaderValue> {
        let is_offered = |protocol: &str| split_list(&self.0).any(|offered| offered.eq_ignore_ascii_case(protocol));
        let protocols: Vec<_> = tokens(response_headers, &UPGRADE).collect();
        let all_offered = !protocols.is_empty() && protocols.iter().all(|protocol| is_offered(protocol));
        HeaderValue::from_str(&protocols.join(", ")).ok().filter(|_| all_offered)
    }
}

/// Set `Connection` and `Upgrade` to the protocols that are offered or selected.
pub fn set_upgrade_headers(headers: &mut HeaderMap, protocols: HeaderValue) {
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, protocols);
}

fn carries_requests(protocol: &str) -> bool {
    let name = protocol.split('/').next().unwrap_or_default();
    REQUEST_PROTOCOLS.iter().any(|other| name.eq_ignore_ascii_case(other))
}

fn tokens<'a>(headers: &'a HeaderMap, name: &'a HeaderName) -> impl Iterator<Item = &'a str> {
    headers.get_all(name).iter().flat_map(split_list)
}

fn split_list(value: &HeaderValue) -> impl Iterator<Item = &str> {
    value.to_str().unwrap_or_default().split(',').map(str::trim).filter(|token| !token.is_empty())
}

// === WebSockets over HTTP/2 (RFC 8441): an extended CONNECT request becomes an HTTP/1.1 upgrade ===

const WEBSOCKET: &str = "websocket";

/// The text that the server appends to the key before it hashes the key (RFC 6455 §4.2.2).
const ACCEPT_SUFFIX: &str = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

/// Marks an upgrade request that the gateway has made from an extended CONNECT request. Contains the value of
/// `Sec-WebSocket-Accept` that the upstream must send.
#[derive(Debug, Clone)]
pub struct ExtendedConnect(HeaderValue);

/// If this is an extended CONNECT request for a WebSocket, convert it into the upgrade request of HTTP/1.1: GET with
/// `Upgrade: websocket` and a new `Sec-WebSocket-Key`. Routes and limits then handle it as such a request.
pub fn convert_extended_connect<B>(request: &mut Request<B>) {
    let protocol = request.extensions().get::<Protocol>();
    if !protocol.is_some_and(|protocol| protocol.as_str().eq_ignore_ascii_case(WEBSOCKET)) {
        return;
    }
    let key = STANDARD.encode(Uuid::new_v4().as_bytes());
    let accept = STANDARD.encode(digest(&SHA1_FOR_LEGACY_USE_ONLY, format!("{key}{ACCEPT_SUFFIX}").as_bytes()));
    let (Ok(key), Ok(accept)) = (HeaderValue::try_from(key), HeaderValue::try_from(accept)) else { return };
    *request.method_mut() = Method::GET;
    request.extensions_mut().insert(ExtendedConnect(accept));
    let headers = request.headers_mut();
    set_upgrade_headers(headers, HeaderValue::from_static(WEBSOCKET));
    headers.insert(SEC_WEBSOCKET_KEY, key);
    headers.entry(SEC_WEBSOCKET_VERSION).or_insert(HeaderValue::from_static("13"));
}

impl ExtendedConnect {
    /// Return whether the upstream has accepted the WebSocket (RFC 6455 §4.1).
    pub fn is_accepted(&self, response_headers: &HeaderMap) -> bool {
        response_headers.get(SEC_WEBSOCKET_ACCEPT) == Some(&self.0)
    }

    /// Convert the 101 response of the upstream into the response to the extended CONNECT request (RFC 8441 §5).
    pub fn convert_response<B>(response: &mut Response<B>) {
        *response.status_mut() = StatusCode::OK;
        for name in [CONNECTION, UPGRADE, SEC_WEBSOCKET_ACCEPT] {
            response.headers_mut().remove(name);
        }
    }
}

// === Tunnel: bytes are copied between two upgraded connections until both directions have ended ===

/// A tunnel on which client and upstream have agreed. The tunnel starts when the upgrade of both connections is
/// complete.
#[derive(Debug)]
pub struct Tunnel {
    /// Resolves to the byte stream of the client connection after the upgrade.
    pub downstream: OnUpgrade,
    /// Resolves to the byte stream of the upstream connection after the upgrade.
    pub upstream: OnUpgrade,
    /// Maximum time for which neither direction carries data.
    pub idle_timeout: Duration,
}

impl Tunnel {
    /// Copy bytes in both directions, and count the bytes sent to the client. If one side closes its direction, close
    /// this direction on the other connection, and keep the opposite direction open. Return whether both directions
    /// ended without an error or a timeout.
    pub async fn run(self, bytes_sent: &mut u64) -> bool {
        let (Ok(downstream), Ok(upstream)) = join(self.downstream, self.upstream).await else { return false };
        let activity = TunnelActivity { started_at: monotonic(), last_activity_ms: AtomicU64::new(0) };
        let mut bytes_received = 0;
        let mut downstream =
            CountingIo { io: TokioIo::new(downstream), bytes_written: bytes_sent, activity: &activity };
        let mut upstream =
            CountingIo { io: TokioIo::new(upstream), bytes_written: &mut bytes_received, activity: &activity };
        let mut copied = pin!(copy_bidirectional(&mut downstream, &mut upstream));
        while let Some(remaining) =
            self.idle_timeout.checked_sub(activity.idle_time()).filter(|remaining| !remaining.is_zero())
        {
            if let Ok(ended) = timeout(remaining, &mut copied).await {
                return ended.is_ok();
            }
        }
        false
    }
}

/// The time of the last activity in a tunnel.
struct TunnelActivity {
    started_at: Instant,
    /// Last activity in ms after `started_at`.
    last_activity_ms: AtomicU64,
}

impl TunnelActivity {
    fn record(&self) {
        self.last_activity_ms.store(self.started_at.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    fn idle_time(&self) -> Duration {
        self.started_at.elapsed().saturating_sub(Duration::from_millis(self.last_activity_ms.load(Ordering::Relaxed)))
    }
}

/// A connection that counts written bytes and records activity.
struct CountingIo<'a> {
    io: TokioIo<Upgraded>,
    bytes_written: &'a mut u64,
    activity: &'a TunnelActivity,
}

impl AsyncRead for CountingIo<'_> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let read = ready!(Pin::new(&mut self.io).poll_read(cx, buf));
        self.activity.record();
        Poll::Ready(read)
    }
}

impl AsyncWrite for CountingIo<'_> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.io).poll_write(cx, buf))?;
        *self.bytes_written += written as u64;
        self.activity.record();
        Poll::Ready(Ok(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in lines {
            map.append(*name, HeaderValue::from_static(value));
        }
        map
    }

    #[test]
    fn upgrade_to_request_protocols_is_not_forwarded() {
        for (lines, expected) in [
            (&[("connection", "Upgrade"), ("upgrade", "websocket")][..], Some("websocket")),
            (&[("connection", "keep-alive, upgrade"), ("upgrade", "WebSocket , chat/2")], Some("WebSocket, chat/2")),
            (&[("connection", "upgrade"), ("upgrade", "h2c, websocket"), ("upgrade", "a")], Some("websocket, a")),
            (&[("connection", "upgrade"), ("upgrade", "H2C")], None),
            (&[("connection", "upgrade"), ("upgrade", "HTTP/2.0")], None),
            (&[("connection", "upgrade"), ("upgrade", "TLS/1.2, http/1.1")], None),
            (&[("connection", "upgrade"), ("upgrade", ", ,")], None),
            (&[("connection", "keep-alive"), ("upgrade", "websocket")], None),
            (&[("upgrade", "websocket")], None),
            (&[("connection", "upgrade")], None),
        ] {
            let offer = UpgradeRequest::from_headers(&map(lines));
            assert_eq!(offer.as_ref().map(|offer| offer.0.to_str().unwrap()), expected, "{lines:?}");
        }
    }

    #[test]
    fn only_offered_protocols_are_accepted() {
        let offer = UpgradeRequest(HeaderValue::from_static("websocket, chat/2"));
        for (answer, expected) in [
            (&[("upgrade", "WebSocket")][..], Some("WebSocket")),
            (&[("upgrade", "chat/2, websocket")], Some("chat/2, websocket")),
            (&[("upgrade", "chat")], None),
            (&[("upgrade", "websocket, h2c")], None),
            (&[("upgrade", "")], None),
            (&[], None),
        ] {
            let accepted = offer.accepted_protocols(&map(answer));
            assert_eq!(accepted.as_ref().map(|value| value.to_str().unwrap()), expected, "{answer:?}");
        }
    }
}
