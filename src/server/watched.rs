//! What a client sends on a connection, watched on its way to hyper: whether a request head has begun, and over HTTP/2 how many
//! frames come that carry no request, or next to nothing of its body.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::protocol::{PREFACE, Protocol};
use crate::http::activity::Activity;
use crate::limit::clock::monotonic;

/// Control frames that a connection may send at once, and at most after it was sent much: of a large response each piece is
/// acknowledged.
const BURST: u32 = 1000;
const MOST: u32 = 10_000;

/// Control frames each second.
const EACH_SECOND: u32 = 200;

/// Control frames for each request: it may be cancelled, weighed and acknowledged.
const EACH_REQUEST: u32 = 4;

/// Bytes to the client that are worth a control frame, and bytes of DATA from it that are worth a short DATA frame.
const BYTES_EACH: u32 = 256;

/// Bytes of DATA that count for short frames at most.
const MOST_RECEIVED: u32 = MOST * BYTES_EACH;

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
const CALM: &[u8; 17] = b"\0\0\x08\x07\0\0\0\0\0\x7f\xff\xff\xff\0\0\0\x0b";

/// A stream that is watched.
#[derive(Debug)]
pub(super) struct Watched<S> {
    stream: S,
    activity: Arc<Activity>,
    frames: Option<Frames>,
}

/// What is known of an HTTP/2 connection.
#[derive(Debug)]
struct Frames {
    input: Parser,
    output: Parser,
    /// A header block has begun.
    in_block: bool,
    left: u32,
    filled: Instant,
    /// Bytes to the client that are not counted yet.
    sent: u32,
    /// Bytes of DATA from the client that short frames may still use.
    received: u32,
    over: bool,
}

/// Finds frames in a stream of bytes (RFC 9113 §4.1).
#[derive(Debug, Default)]
struct Parser {
    head: [u8; 9],
    /// Bytes of the head that have come.
    have: usize,
    /// Bytes until the next head.
    skip: usize,
}

impl<S> Watched<S> {
    pub(super) fn new(stream: S, protocol: Protocol, activity: Arc<Activity>) -> Self {
        let frames = (protocol == Protocol::Http2).then(|| Frames {
            input: Parser { skip: PREFACE.len(), ..Parser::default() },
            output: Parser::default(),
            in_block: false,
            left: BURST,
            filled: monotonic(),
            sent: 0,
            received: 0,
            over: false,
        });
        Watched { stream, activity, frames }
    }

    fn wrote(&mut self, slices: &[IoSlice<'_>], count: usize) {
        let Some(frames) = &mut self.frames else { return };
        let mut rest = count;
        for slice in slices {
            let part = &slice[..rest.min(slice.len())];
            frames.output.pass(part, |_, _| ());
            rest -= part.len();
        }
        frames.sent = frames.sent.saturating_add(count as u32);
    }
}

impl Frames {
    /// Counts what came; whether it is too much.
    fn came(&mut self, bytes: &[u8]) -> bool {
        let (mut control, mut requests, mut in_block, mut received) = (0, 0, self.in_block, self.received);
        self.input.pass(bytes, |kind, [length, flags]| match kind {
            HEADERS | CONTINUATION => {
                requests += u32::from(kind == HEADERS);
                in_block = flags & u32::from(END_HEADERS) == 0;
            }
            // Clients divide uploads as their buffers and windows fall, also into short frames.
            DATA if length > 0 => match length.saturating_sub(if flags & PADDED == 0 { 0 } else { PADDING }) {
                data @ SHORT.. => received = MOST_RECEIVED.min(received.saturating_add(data)),
                _ if received >= BYTES_EACH => received -= BYTES_EACH,
                _ => control += 1,
            },
            _ => control += 1,
        });
        (self.in_block, self.received) = (in_block, received);
        if control == 0 && requests == 0 {
            return self.over;
        }
        self.earn(requests * EACH_REQUEST + self.sent / BYTES_EACH, MOST);
        self.sent %= BYTES_EACH;
        if control > self.left {
            let seconds = self.filled.elapsed().as_secs_f64().min(60.0);
            self.filled = monotonic();
            self.earn((seconds * f64::from(EACH_SECOND)) as u32, BURST);
        }
        self.over |= control > self.left;
        self.left = self.left.saturating_sub(control);
        self.over
    }

    fn earn(&mut self, more: u32, most: u32) {
        self.left = self.left.max(most.min(self.left.saturating_add(more)));
    }

    /// Whether a request head is under way.
    fn has_part_of_head(&self) -> bool {
        self.in_block || self.input.is_within(HEADERS) || self.input.is_within(CONTINUATION)
    }
}

impl Parser {
    /// Takes bytes; `each` is told of each frame's kind, length and flags.
    fn pass(&mut self, mut bytes: &[u8], mut each: impl FnMut(u8, [u32; 2])) {
        loop {
            let skipped = self.skip.min(bytes.len());
            self.skip -= skipped;
            bytes = &bytes[skipped..];
            if bytes.is_empty() {
                return;
            }
            let taken = (self.head.len() - self.have).min(bytes.len());
            self.head[self.have..self.have + taken].copy_from_slice(&bytes[..taken]);
            self.have += taken;
            bytes = &bytes[taken..];
            if self.have == self.head.len() {
                let length = u32::from_be_bytes([0, self.head[0], self.head[1], self.head[2]]);
                (self.have, self.skip) = (0, length as usize);
                each(self.head[3], [length, self.head[4].into()]);
            }
        }
    }

    /// Whether a frame has come to its end.
    fn is_between_frames(&self) -> bool {
        self.have == 0 && self.skip == 0
    }

    /// Whether there is a part of a frame, which may be of this kind.
    fn is_within(&self, kind: u8) -> bool {
        (self.have > 3 || self.skip > 0) && self.head[3] == kind
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Watched<S> {
    /// Tells the client why the connection ends, if that can be said at once.
    fn calm(&mut self, cx: &mut Context<'_>) -> io::Error {
        if self.frames.as_ref().is_some_and(|frames| frames.output.is_between_frames()) {
            let said = Pin::new(&mut self.stream).poll_write(cx, CALM);
            if let Poll::Ready(Ok(_)) = said {
                let _ = Pin::new(&mut self.stream).poll_flush(cx);
            }
        }
        io::Error::other("the client sends too many control frames or short DATA frames of HTTP/2")
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Watched<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(cx, buffer);
        let Some(came) = buffer.filled().get(before..).filter(|came| !came.is_empty()) else { return polled };
        let Watched { frames, activity, .. } = &mut *self;
        let Some(frames) = frames else {
            activity.head_came(true);
            return polled;
        };
        let over = frames.came(came);
        activity.head_came(frames.has_part_of_head());
        if over { Poll::Ready(Err(self.calm(cx))) } else { polled }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(cx, bytes);
        if let Poll::Ready(Ok(count)) = polled {
            self.wrote(&[IoSlice::new(bytes)], count);
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
            self.wrote(slices, count);
        }
        polled
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
