//! What a client sends on a connection, watched on its way to hyper: whether a request head has begun, and over HTTP/2 how many
//! frames come that carry no request, or next to nothing of its body.

use std::io;
use std::io::IoSlice;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::http::idle::ConnectionActivity;
use crate::limiter::clock::monotonic;
use crate::listener::handshake::{PREFACE, Protocol};

/// Control frames that a connection may send at once, and at most after it was sent much: of a large response each piece is
/// acknowledged.
const INITIAL_CREDIT: u32 = 1000;
const MAX_CREDIT: u32 = 10_000;

/// Control frames each second.
const FRAMES_PER_SECOND: u32 = 200;

/// Control frames for each request: it may be cancelled, weighed and acknowledged.
const FRAMES_PER_REQUEST: u32 = 4;

/// Bytes to the client that are worth a control frame, and bytes of DATA from it that are worth a short DATA frame.
const BYTES_PER_FRAME: u32 = 256;

/// Bytes of DATA that count for short frames at most.
const MOST_RECEIVED: u32 = MAX_CREDIT * BYTES_PER_FRAME;

/// Bytes of the shortest gRPC message: DATA frames with less count as control frames, as far as longer ones do not pay for them.
const SHORT: u32 = 5;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 4;
const PADDED: u32 = 8;

/// Bytes of a padded frame that may be padding: its length, and as much as that says (RFC 9113 §6.1).
const PADDING: u32 = 256;

/// GOAWAY for all streams, ENHANCE_YOUR_CALM (RFC 9113 §6.8, §7).
const GOAWAY_ENHANCE_YOUR_CALM: &[u8; 17] = b"\0\0\x08\x07\0\0\0\0\0\x7f\xff\xff\xff\0\0\0\x0b";

/// A stream that is watched.
#[derive(Debug)]
pub(super) struct MonitoredStream<S> {
    stream: S,
    activity: Arc<ConnectionActivity>,
    frames: Option<FrameMonitor>,
}

/// What is known of an HTTP/2 connection.
#[derive(Debug)]
struct FrameMonitor {
    input: FrameParser,
    output: FrameParser,
    /// A header block has begun.
    in_header_block: bool,
    credit: u32,
    refilled_at: Instant,
    /// Bytes to the client that are not counted yet.
    uncredited_bytes: u32,
    /// Bytes of DATA from the client that short frames may still use.
    received: u32,
    is_exceeded: bool,
}

/// Finds frames in a stream of bytes (RFC 9113 §4.1).
#[derive(Debug, Default)]
struct FrameParser {
    header: [u8; 9],
    /// Bytes of the head that have come.
    header_bytes: usize,
    /// Bytes until the next head.
    remaining_payload: usize,
}

impl<S> MonitoredStream<S> {
    pub(super) fn new(stream: S, protocol: Protocol, activity: Arc<ConnectionActivity>) -> Self {
        let frames = (protocol == Protocol::Http2).then(|| FrameMonitor {
            input: FrameParser { remaining_payload: PREFACE.len(), ..FrameParser::default() },
            output: FrameParser::default(),
            in_header_block: false,
            credit: INITIAL_CREDIT,
            refilled_at: monotonic(),
            uncredited_bytes: 0,
            received: 0,
            is_exceeded: false,
        });
        MonitoredStream { stream, activity, frames }
    }

    fn record_written(&mut self, slices: &[IoSlice<'_>], count: usize) {
        let Some(frames) = &mut self.frames else { return };
        let mut rest = count;
        for slice in slices {
            let part = &slice[..rest.min(slice.len())];
            frames.output.feed(part, |_, _| ());
            rest -= part.len();
        }
        frames.uncredited_bytes = frames.uncredited_bytes.saturating_add(count as u32);
    }
}

impl FrameMonitor {
    /// Counts what came; whether it is too much.
    fn record_received(&mut self, bytes: &[u8]) -> bool {
        let (mut control, mut requests, mut in_header_block, mut received) =
            (0, 0, self.in_header_block, self.received);
        self.input.feed(bytes, |kind, [length, flags]| match kind {
            HEADERS | CONTINUATION => {
                requests += u32::from(kind == HEADERS);
                in_header_block = flags & u32::from(END_HEADERS) == 0;
            }
            // Clients divide uploads as their buffers and windows fall, also into short frames.
            DATA if length > 0 => match length.saturating_sub(if flags & PADDED == 0 { 0 } else { PADDING }) {
                data @ SHORT.. => received = MOST_RECEIVED.min(received.saturating_add(data)),
                _ if received >= BYTES_PER_FRAME => received -= BYTES_PER_FRAME,
                _ => control += 1,
            },
            _ => control += 1,
        });
        (self.in_header_block, self.received) = (in_header_block, received);
        if control == 0 && requests == 0 {
            return self.is_exceeded;
        }
        self.add_credit(requests * FRAMES_PER_REQUEST + self.uncredited_bytes / BYTES_PER_FRAME, MAX_CREDIT);
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

    /// Whether a request head is under way.
    fn has_partial_headers(&self) -> bool {
        self.in_header_block || self.input.is_in_frame(HEADERS) || self.input.is_in_frame(CONTINUATION)
    }
}

impl FrameParser {
    /// Takes bytes; `each` is told of each frame's kind, length and flags.
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

    /// Whether a frame has come to its end.
    fn is_between_frames(&self) -> bool {
        self.header_bytes == 0 && self.remaining_payload == 0
    }

    /// Whether there is a part of a frame, which may be of this kind.
    fn is_in_frame(&self, kind: u8) -> bool {
        (self.header_bytes > 3 || self.remaining_payload > 0) && self.header[3] == kind
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> MonitoredStream<S> {
    /// Tells the client why the connection ends, if that can be said at once.
    fn send_goaway(&mut self, cx: &mut Context<'_>) -> io::Error {
        if self.frames.as_ref().is_some_and(|frames| frames.output.is_between_frames()) {
            let written = Pin::new(&mut self.stream).poll_write(cx, GOAWAY_ENHANCE_YOUR_CALM);
            if let Poll::Ready(Ok(_)) = written {
                let _ = Pin::new(&mut self.stream).poll_flush(cx);
            }
        }
        io::Error::other("the client sends too many control frames or short DATA frames of HTTP/2")
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for MonitoredStream<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(cx, buffer);
        let Some(received) = buffer.filled().get(before..).filter(|received| !received.is_empty()) else {
            return polled;
        };
        let MonitoredStream { frames, activity, .. } = &mut *self;
        let Some(frames) = frames else {
            activity.record_headers(true);
            return polled;
        };
        let is_exceeded = frames.record_received(received);
        activity.record_headers(frames.has_partial_headers());
        if is_exceeded { Poll::Ready(Err(self.send_goaway(cx))) } else { polled }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for MonitoredStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(cx, bytes);
        if let Poll::Ready(Ok(count)) = polled {
            self.record_written(&[IoSlice::new(bytes)], count);
        }
        polled
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

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
