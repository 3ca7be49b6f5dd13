//! The streams of a client connection: the socket below TLS, with a read budget, and the stream below HTTP, which
//! limits HTTP/2 frames and adds problem documents to the error responses of hyper's HTTP/1 parser.

use std::future::Future;
use std::io;
use std::io::IoSlice;
use std::mem;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use std::time::Instant as StdInstant;

use bytes::{Buf, Bytes};
use http::StatusCode;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::sync::oneshot::{Receiver, Sender};
use tokio::time::{Instant, Sleep, sleep};

use crate::clock::monotonic;
use crate::http::flow::ConnectionActivity;
use crate::http::problem;
use crate::listener::handshake::{PREFACE, Protocol};
use crate::listener::metrics::ListenerMetrics;

/// Maximum number of bytes that a connection reads before it yields to other tasks. tokio's coop budget counts reads,
/// but a few reads can contain thousands of HTTP/2 frames.
const READ_BUDGET: u32 = 64 << 10;

/// A wrapper of a TCP stream. When the wrapper is dropped, it sends the stream to the receiver that [`Self::new`]
/// returned.
#[derive(Debug)]
pub(super) struct ReclaimableStream {
    /// `Some` until the wrapper is dropped.
    stream: Option<TcpStream>,
    return_sender: Option<Sender<TcpStream>>,
    /// Bytes that were put back: those at the positions in `prefix_range`. Reads return them before the bytes of the
    /// socket.
    prefix: [u8; PREFACE.len()],
    prefix_range: Range<u8>,
    /// Number of bytes read since the last yield.
    bytes_read: u32,
    metrics: Arc<ListenerMetrics>,
}

impl ReclaimableStream {
    pub(super) fn new(stream: TcpStream, metrics: Arc<ListenerMetrics>) -> (Self, Receiver<TcpStream>) {
        let (return_sender, returned) = oneshot::channel();
        (
            ReclaimableStream {
                stream: Some(stream),
                return_sender: Some(return_sender),
                prefix: [0; PREFACE.len()],
                prefix_range: 0..0,
                bytes_read: 0,
                metrics,
            },
            returned,
        )
    }

    /// Put back the first `count` of these bytes, which were already read, so that the next read returns them.
    pub(super) fn rewind(&mut self, bytes: [u8; PREFACE.len()], count: u8) {
        (self.prefix, self.prefix_range) = (bytes, 0..count);
    }

    fn stream(&mut self) -> io::Result<Pin<&mut TcpStream>> {
        self.stream.as_mut().map(Pin::new).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }
}

impl Drop for ReclaimableStream {
    fn drop(&mut self) {
        if let (Some(stream), Some(return_sender)) = (self.stream.take(), self.return_sender.take()) {
            // Ignore the error of `send`: if the receiver was dropped, the stream is not needed.
            let _ = return_sender.send(stream);
        }
    }
}

impl AsyncRead for ReclaimableStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.bytes_read >= READ_BUDGET {
            self.bytes_read = 0;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let before = buffer.filled().len();
        if !self.prefix_range.is_empty() {
            let start = usize::from(self.prefix_range.start);
            let count = self.prefix_range.len().min(buffer.remaining());
            buffer.put_slice(&self.prefix[start..start + count]);
            self.prefix_range.start += count as u8;
            let read_before = buffer.filled().len();
            // Continue with a read from the socket in the same call, because hyper allocates a larger buffer if headers
            // arrive in pieces. Ignore the result, because the next read reports an error or the end of the stream
            // again.
            let _ = self.stream()?.poll_read(cx, buffer);
            self.metrics.record_received(buffer.filled().len() - read_before);
            self.bytes_read += (buffer.filled().len() - before) as u32;
            return Poll::Ready(Ok(()));
        }
        let polled = self.stream()?.poll_read(cx, buffer);
        match polled {
            Poll::Pending => self.bytes_read = 0,
            Poll::Ready(_) => {
                let count = buffer.filled().len() - before;
                self.metrics.record_received(count);
                self.bytes_read += count as u32;
            }
        }
        polled
    }
}

impl AsyncWrite for ReclaimableStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let polled = self.stream()?.poll_write(cx, bytes);
        if let Poll::Ready(Ok(count)) = polled {
            self.metrics.record_sent(count);
        }
        polled
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream()?.poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream()?.poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = self.stream()?.poll_write_vectored(cx, slices);
        if let Poll::Ready(Ok(count)) = polled {
            self.metrics.record_sent(count);
        }
        polled
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.as_ref().is_some_and(AsyncWrite::is_write_vectored)
    }
}

// === Frame limits: how many control frames and short DATA frames a client may send on an HTTP/2 connection ===

/// Credit of a new connection: the number of control frames that the client may send at once. Each control frame uses
/// one unit of credit. Responses, and bytes that are sent to the client, add credit up to `MAX_CREDIT`, because a client
/// acknowledges each part of a response with WINDOW_UPDATE. A request that the client resets before its response adds no
/// credit.
const INITIAL_CREDIT: u32 = 1000;
const MAX_CREDIT: u32 = 10_000;

/// Number of control frames that a client may send per second after its credit is used up.
const FRAMES_PER_SECOND: u32 = 200;

/// Number of control frames, such as PRIORITY, WINDOW_UPDATE and RST_STREAM, for which each response earns credit.
const FRAMES_PER_RESPONSE: u32 = 4;

/// Number of bytes sent to the client that earn the credit for one control frame. The same number of DATA bytes from
/// the client earns the credit for one short DATA frame.
const BYTES_PER_FRAME: u32 = 256;

/// Maximum number of received DATA bytes that are saved as credit for short frames.
const MOST_RECEIVED: u32 = MAX_CREDIT * BYTES_PER_FRAME;

/// Size of the shortest gRPC message in bytes. DATA frames with fewer bytes count as control frames, unless longer DATA
/// frames have earned credit for short frames.
const SHORT: u32 = 5;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 4;
const PADDED: u32 = 8;

/// Maximum padding of a frame in bytes: the length byte and up to 255 bytes (RFC 9113 §6.1).
const PADDING: u32 = 256;

/// The GOAWAY frame with ENHANCE_YOUR_CALM and the highest stream ID (RFC 9113 §6.8, §7).
const GOAWAY_ENHANCE_YOUR_CALM: &[u8; 17] = b"\0\0\x08\x07\0\0\0\0\0\x7f\xff\xff\xff\0\0\0\x0b";

/// A stream that counts received HTTP/2 frames, and replaces the error responses of hyper's HTTP/1 parser with problem
/// documents.
#[derive(Debug)]
pub(super) struct MonitoredStream<S> {
    stream: S,
    activity: Arc<ConnectionActivity>,
    /// `None` for HTTP/1.x. Boxed, because the connection of an HTTP/1.x client needs no space for it.
    frames: Option<Box<FrameMonitor>>,
    /// Bytes that hyper had read but not parsed when the connection was suspended, or the byte that ended the
    /// suspension. Reads return these bytes before the bytes of `stream`.
    unparsed: Bytes,
    /// Whether hyper waits for data since its last poll: it reads, and then finds the end of the stream itself.
    is_read_pending: bool,
    /// `Some` after the client has ended its side of the connection.
    half_closed: Option<Box<HalfClosed>>,
    /// Maximum time without progress on the response after the client has ended its side of the connection.
    half_close_timeout: Duration,
    /// The unwritten part of the problem document that replaces a [`ParserError`].
    error_response: Option<Bytes>,
    /// Whether error responses have the header `Proxy-Status`.
    proxy_status: bool,
}

/// Frame counts of an HTTP/2 connection.
#[derive(Debug)]
struct FrameMonitor {
    input: FrameParser,
    output: FrameParser,
    /// Whether the client has sent only a part of a header block.
    in_header_block: bool,
    credit: u32,
    refilled_at: StdInstant,
    /// Number of bytes sent to the client that have not been converted to credit yet. Each response counts as
    /// additional bytes.
    uncredited_bytes: u32,
    /// Number of received DATA bytes that are saved as credit for short DATA frames.
    received: u32,
    is_exceeded: bool,
}

/// Finds frame headers in a byte stream (RFC 9113 §4.1).
#[derive(Debug, Default)]
struct FrameParser {
    header: [u8; 9],
    /// Number of bytes in `header`.
    header_bytes: usize,
    /// Number of bytes until the next frame header.
    remaining_payload: usize,
}

impl<S> MonitoredStream<S> {
    pub(super) fn new(
        stream: S,
        protocol: Protocol,
        activity: Arc<ConnectionActivity>,
        half_close_timeout: Duration,
        proxy_status: bool,
    ) -> Self {
        let frames = (protocol == Protocol::Http2).then(|| Box::new(FrameMonitor::new()));
        let unparsed = Bytes::new();
        MonitoredStream {
            stream,
            activity,
            frames,
            unparsed,
            is_read_pending: false,
            half_closed: None,
            half_close_timeout,
            error_response: None,
            proxy_status,
        }
    }

    fn record_written(&mut self, slices: &[IoSlice<'_>], count: usize) {
        if let Some(half_closed) = &mut self.half_closed {
            half_closed.record_progress(self.half_close_timeout);
        }
        let Some(frames) = &mut self.frames else { return };
        let mut rest = count;
        let mut responses = 0;
        for slice in slices {
            let part = &slice[..rest.min(slice.len())];
            frames.output.feed(part, |kind, _| responses += u32::from(kind == HEADERS));
            rest -= part.len();
        }
        let credited = count as u32 + responses * FRAMES_PER_RESPONSE * BYTES_PER_FRAME;
        frames.uncredited_bytes = frames.uncredited_bytes.saturating_add(credited);
    }
}

/// All bytes, so that no memory is allocated for a single byte.
static BYTES: [u8; 256] = {
    let mut bytes = [0; 256];
    let mut index = 0;
    while index < bytes.len() {
        bytes[index] = index as u8;
        index += 1;
    }
    bytes
};

fn single_byte(byte: u8) -> Bytes {
    Bytes::from_static(&BYTES[usize::from(byte)..][..1])
}

impl FrameMonitor {
    /// Create the monitor of a new connection.
    fn new() -> Self {
        FrameMonitor {
            input: FrameParser { remaining_payload: PREFACE.len(), ..FrameParser::default() },
            output: FrameParser::default(),
            in_header_block: false,
            credit: INITIAL_CREDIT,
            refilled_at: monotonic(),
            uncredited_bytes: 0,
            received: 0,
            is_exceeded: false,
        }
    }

    /// Count received frames. Return whether the control frames and short DATA frames exceed the limit.
    fn record_received(&mut self, bytes: &[u8]) -> bool {
        let mut control = 0;
        let mut in_header_block = self.in_header_block;
        let mut received = self.received;
        self.input.feed(bytes, |kind, [length, flags]| match kind {
            HEADERS | CONTINUATION => in_header_block = flags & u32::from(END_HEADERS) == 0,
            // DATA frames of at least `SHORT` bytes earn credit for shorter ones, because a client that splits an
            // upload at buffer and window boundaries sends both.
            DATA if length > 0 => match length.saturating_sub(if flags & PADDED == 0 { 0 } else { PADDING }) {
                data @ SHORT.. => received = MOST_RECEIVED.min(received.saturating_add(data)),
                _ if received >= BYTES_PER_FRAME => received -= BYTES_PER_FRAME,
                _ => control += 1,
            },
            _ => control += 1,
        });
        (self.in_header_block, self.received) = (in_header_block, received);
        if control == 0 {
            return self.is_exceeded;
        }
        self.add_credit(self.uncredited_bytes / BYTES_PER_FRAME, MAX_CREDIT);
        self.uncredited_bytes %= BYTES_PER_FRAME;
        if control > self.credit {
            let seconds = self.refilled_at.elapsed().as_secs_f64().min(60.0);
            self.refilled_at = monotonic();
            self.add_credit((seconds * f64::from(FRAMES_PER_SECOND)) as u32, INITIAL_CREDIT);
        }
        self.is_exceeded |= control > self.credit;
        self.credit = self.credit.saturating_sub(control);
        self.is_exceeded
    }

    fn add_credit(&mut self, credit: u32, max: u32) {
        self.credit = self.credit.max(max.min(self.credit.saturating_add(credit)));
    }

    /// Return whether request headers are incomplete.
    fn has_partial_headers(&self) -> bool {
        self.in_header_block || self.input.is_in_frame(HEADERS) || self.input.is_in_frame(CONTINUATION)
    }
}

impl FrameParser {
    /// Parse bytes. Call `on_frame` with the type, the length and the flags of each frame.
    fn feed(&mut self, mut bytes: &[u8], mut on_frame: impl FnMut(u8, [u32; 2])) {
        loop {
            let skipped = self.remaining_payload.min(bytes.len());
            self.remaining_payload -= skipped;
            bytes = &bytes[skipped..];
            if bytes.is_empty() {
                return;
            }
            let copied = (self.header.len() - self.header_bytes).min(bytes.len());
            self.header[self.header_bytes..self.header_bytes + copied].copy_from_slice(&bytes[..copied]);
            self.header_bytes += copied;
            bytes = &bytes[copied..];
            if self.header_bytes == self.header.len() {
                let length = u32::from_be_bytes([0, self.header[0], self.header[1], self.header[2]]);
                (self.header_bytes, self.remaining_payload) = (0, length as usize);
                on_frame(self.header[3], [length, self.header[4].into()]);
            }
        }
    }

    /// Return whether the last frame is complete.
    fn is_between_frames(&self) -> bool {
        self.header_bytes == 0 && self.remaining_payload == 0
    }

    /// Return whether a frame of this type is incomplete. The type of a frame is known as soon as four bytes of the
    /// frame header have arrived.
    fn is_in_frame(&self, kind: u8) -> bool {
        (self.header_bytes > 3 || self.remaining_payload > 0) && self.header[3] == kind
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> MonitoredStream<S> {
    /// Send GOAWAY if the output is at a frame boundary and the socket takes the whole GOAWAY frame at once. Return the
    /// error that ends the connection.
    fn send_goaway(&mut self, cx: &mut Context<'_>) -> io::Error {
        if self.frames.as_ref().is_some_and(|frames| frames.output.is_between_frames()) {
            let written = Pin::new(&mut self.stream).poll_write(cx, GOAWAY_ENHANCE_YOUR_CALM);
            if let Poll::Ready(Ok(_)) = written {
                let _ = Pin::new(&mut self.stream).poll_flush(cx);
            }
        }
        io::Error::other(
            "the client sent too many HTTP/2 control frames or short DATA frames, or reset too many requests",
        )
    }

    /// Detect a client that goes away, or ends its side of the connection, while it waits for the response to an
    /// HTTP/1.x request. hyper itself does not read in this time (`half_close`).
    ///
    /// # Errors
    /// The client has gone away, or does not read the response within `half_close_timeout`.
    fn poll_client(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        if let Some(half_closed) = &mut self.half_closed {
            return match half_closed.poll_expired(cx) {
                Poll::Pending => Ok(()),
                Poll::Ready(()) => Err(io::ErrorKind::TimedOut.into()),
            };
        }
        // The client has sent a part of its next request. hyper reads it after the response.
        if !self.unparsed.is_empty() {
            return Ok(());
        }
        let mut byte = [0];
        let mut buffer = ReadBuf::new(&mut byte);
        let Poll::Ready(read) = Pin::new(&mut self.stream).poll_read(cx, &mut buffer) else { return Ok(()) };
        read?;
        if let [byte] = buffer.filled() {
            self.unparsed = single_byte(*byte);
            return Ok(());
        }
        let Some(mut half_closed) = HalfClosed::start(self.half_close_timeout) else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        // Register the waker. The timeout has just been set, so it cannot have expired.
        let _ = half_closed.poll_expired(cx);
        self.half_closed = Some(Box::new(half_closed));
        Ok(())
    }

    /// Return whether the end of an HTTP/2 connection must not reach h2 yet, because h2 would reset all streams.
    fn delays_end(&mut self, cx: &mut Context<'_>) -> bool {
        if !self.frames.as_ref().is_some_and(|frames| frames.input.is_between_frames()) {
            return false;
        }
        if let Some(half_closed) = &mut self.half_closed {
            return self.activity.has_unwritten_response() && half_closed.poll_expired(cx).is_pending();
        }
        self.half_closed = HalfClosed::start(self.half_close_timeout).map(Box::new);
        // h2 may have read requests that hyper has not started yet. Read the end again afterwards.
        cx.waker().wake_by_ref();
        self.half_closed.is_some()
    }

    /// Put back bytes that hyper has read but not parsed, so that the next read returns them.
    pub(super) fn put_back(&mut self, bytes: Bytes) {
        debug_assert!(self.unparsed.is_empty());
        self.unparsed = bytes;
    }

    /// Return `Poll::Ready` when a read returns data or the end of the stream.
    pub(super) fn poll_readable(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.unparsed.is_empty() {
            // Read a byte, because only a read can tell whether a TLS stream has data.
            let mut byte = [0];
            let mut buffer = ReadBuf::new(&mut byte);
            ready!(Pin::new(&mut *self).poll_read(cx, &mut buffer))?;
            self.unparsed = buffer.filled().first().map_or_else(Bytes::new, |byte| single_byte(*byte));
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for MonitoredStream<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let count = self.unparsed.len().min(buffer.remaining());
        buffer.put_slice(&self.unparsed.split_to(count));
        // Read from the stream also after unparsed bytes, because hyper allocates a larger buffer if headers arrive in
        // pieces.
        let mut polled = Pin::new(&mut self.stream).poll_read(cx, buffer);
        self.is_read_pending = polled.is_pending();
        if count > 0 && polled.is_pending() {
            polled = Poll::Ready(Ok(()));
        }
        let Some(received) = buffer.filled().get(before..).filter(|received| !received.is_empty()) else {
            let is_end = matches!(polled, Poll::Ready(Ok(()))) && buffer.remaining() > 0;
            return if is_end && self.delays_end(cx) { Poll::Pending } else { polled };
        };
        let MonitoredStream { frames, activity, .. } = &mut *self;
        let Some(frames) = frames else {
            // In HTTP/1.1, treat all received bytes as incomplete headers until hyper starts the next request.
            activity.record_headers(true);
            return polled;
        };
        let is_exceeded = frames.record_received(received) || activity.has_too_many_resets();
        activity.record_headers(frames.has_partial_headers());
        if is_exceeded { Poll::Ready(Err(self.send_goaway(cx))) } else { polled }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for MonitoredStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.frames.is_none()
            && let Some(error) = ParserError::parse(bytes)
            && !self.activity.has_unwritten_response()
        {
            let response = error.response(self.proxy_status);
            return self.poll_write_parser_error(cx, response, bytes.len());
        }
        let polled = Pin::new(&mut self.stream).poll_write(cx, bytes);
        if let Poll::Ready(Ok(count)) = polled {
            self.record_written(&[IoSlice::new(bytes)], count);
        }
        polled
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = ready!(Pin::new(&mut self.stream).poll_flush(cx));
        // hyper flushes the stream only when hyper has no bytes left to write.
        self.activity.record_flushed();
        let is_read_pending = mem::take(&mut self.is_read_pending);
        if self.frames.is_some() {
            if self.half_closed.is_some() && !self.activity.has_unwritten_response() {
                // All responses are written: read the end of the connection again.
                cx.waker().wake_by_ref();
            }
        } else if flushed.is_ok() && !is_read_pending && self.activity.awaits_response() {
            return Poll::Ready(self.poll_client(cx));
        }
        Poll::Ready(flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // hyper ends when its connection is suspended, but the stream stays open.
        if self.activity.is_suspended() {
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    // Only HTTP/2 uses vectored writes, so the error responses of the HTTP/1 parser are written with `poll_write`.
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        if let Poll::Ready(Ok(count)) = polled {
            self.record_written(slices, count);
        }
        polled
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

// === Half-closed connections: the client has ended its side of the connection, and waits for the response ===

/// Maximum number of half-closed connections. If there are more, the end of the client's side cancels the request.
const MAX_HALF_CLOSED: usize = 1024;

/// Number of half-closed connections of the process.
static HALF_CLOSED: AtomicUsize = AtomicUsize::new(0);

/// The time for which a half-closed connection still waits for its response. The time starts again with each part of
/// the response that is written. If the client has in fact closed the whole connection, the kernel of the client
/// responds to the first part with a reset, and the next write fails.
#[derive(Debug)]
struct HalfClosed(Pin<Box<Sleep>>);

impl HalfClosed {
    /// Return `None` if no connection may be half-closed, or if there are [`MAX_HALF_CLOSED`] such connections.
    fn start(timeout: Duration) -> Option<Self> {
        if timeout.is_zero() {
            return None;
        }
        let half_closed = HalfClosed(Box::pin(sleep(timeout)));
        // If there are too many connections, drop `half_closed`, which decrements the number again.
        (HALF_CLOSED.fetch_add(1, Ordering::Relaxed) < MAX_HALF_CLOSED).then_some(half_closed)
    }

    fn record_progress(&mut self, timeout: Duration) {
        self.0.as_mut().reset(Instant::now() + timeout);
    }

    fn poll_expired(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.0.as_mut().poll(cx)
    }
}

impl Drop for HalfClosed {
    fn drop(&mut self) {
        HALF_CLOSED.fetch_sub(1, Ordering::Relaxed);
    }
}

// === Errors of the HTTP/1 parser: hyper responds to requests that it cannot parse ===

/// A response of hyper to a request that it cannot parse. The response has no body and no `Cache-Control`, and hyper
/// closes the connection after it. The gateway sends a problem document instead.
///
/// The gateway recognizes the response of hyper by its bytes, but only if all responses to earlier requests are
/// written. The gateway therefore never replaces the content of a response that contains the same bytes. If a malformed
/// request arrives before the end of an earlier response (pipelining), the client receives the response of hyper.
#[derive(Debug)]
struct ParserError<'a> {
    status: StatusCode,
    detail: &'static str,
    /// Value of the header `Date` in the error response.
    date: &'a str,
}

/// The first bytes of hyper's error responses, up to the value of `date`. Each entry also contains the status and the
/// detail of the problem document that replaces the response.
const PARSER_ERRORS: [(&[u8], StatusCode, &str); 3] = [
    (
        b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\ndate: ",
        StatusCode::BAD_REQUEST,
        "the request is malformed",
    ),
    (
        b"HTTP/1.1 414 URI Too Long\r\nconnection: close\r\ncontent-length: 0\r\ndate: ",
        StatusCode::URI_TOO_LONG,
        "the request target is too long",
    ),
    (
        b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\ndate: ",
        StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
        "the request has too many or too large headers, or a Content-Length that is too large",
    ),
];

/// Length of the value of `Date` (RFC 9110 §5.6.7).
const DATE_LENGTH: usize = "Sun, 06 Nov 1994 08:49:37 GMT".len();

/// Header line of the responses to requests that cannot be parsed (RFC 9209 §2.3.1).
pub(super) const PARSER_PROXY_STATUS: &str = "proxy-status: sluicegate;error=http_request_error\r\n";

impl<'a> ParserError<'a> {
    /// Parse the bytes of an error response of hyper. Return `None` if the bytes are not an error response of hyper.
    fn parse(bytes: &'a [u8]) -> Option<Self> {
        let head = bytes.strip_suffix(b"\r\n\r\n")?;
        let (head, date) = head.split_at_checked(head.len().checked_sub(DATE_LENGTH)?)?;
        let (_, status, detail) = PARSER_ERRORS.iter().find(|(known, ..)| *known == head)?;
        Some(ParserError { status: *status, detail, date: str::from_utf8(date).ok()? })
    }

    /// Return the error response with a problem document as its body.
    fn response(&self, proxy_status: bool) -> Bytes {
        let mut headers = format!("date: {}\r\n", self.date);
        if proxy_status {
            headers += PARSER_PROXY_STATUS;
        }
        problem::raw_response(self.status, self.detail, &headers).into()
    }
}

impl<S: AsyncWrite + Unpin> MonitoredStream<S> {
    /// Write `response` instead of hyper's error response, which has a length of `replaced` bytes.
    fn poll_write_parser_error(
        &mut self,
        cx: &mut Context<'_>,
        response: Bytes,
        replaced: usize,
    ) -> Poll<io::Result<usize>> {
        let rest = self.error_response.get_or_insert(response);
        while !rest.is_empty() {
            match ready!(Pin::new(&mut self.stream).poll_write(cx, rest))? {
                0 => return Poll::Ready(Ok(0)),
                count => rest.advance(count),
            }
        }
        Poll::Ready(Ok(replaced))
    }
}

#[cfg(test)]
mod parser_error_tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::http::body_limits::BufferBudget;
    use crate::http::flow::StreamFlow;

    #[tokio::test]
    async fn content_that_is_not_written_yet_is_never_taken_for_a_response_of_hyper() {
        let text = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\
                     date: Sun, 06 Nov 1994 08:49:37 GMT\r\n\r\n";
        let activity = ConnectionActivity::new();
        let (stream, mut client) = tokio::io::duplex(4096);
        let mut stream = MonitoredStream::new(stream, Protocol::Http1, activity.clone(), Duration::ZERO, true);
        let flow = StreamFlow::for_connection(Arc::new(BufferBudget::new(1 << 20)));
        // The response has ended, and bytes of the next request arrive before the response is written.
        drop(activity.start_request(flow.clone()));
        client.write_all(b"GE").await.unwrap();
        stream.read_exact(&mut [0; 2]).await.unwrap();
        stream.write_all(text).await.unwrap();
        let mut received = vec![0; text.len()];
        client.read_exact(&mut received).await.unwrap();
        assert_eq!(received, text);
        // A flush while a request is in flight does not mean that the response to the request is written.
        let in_flight = activity.start_request(flow);
        stream.flush().await.unwrap();
        drop(in_flight);
        stream.write_all(text).await.unwrap();
        client.read_exact(&mut received).await.unwrap();
        assert_eq!(received, text);
        // After the next flush, no response of the gateway is pending, so the bytes can only come from hyper.
        stream.flush().await.unwrap();
        stream.write_all(text).await.unwrap();
        drop(stream);
        let mut received = String::new();
        client.read_to_string(&mut received).await.unwrap();
        let (head, body) = received.split_once("\r\n\r\n").unwrap();
        assert!(head.contains("date: Sun, 06 Nov 1994 08:49:37 GMT\r\n"), "{head}");
        assert!(body.contains("the request is malformed"), "{body}");
    }
}
