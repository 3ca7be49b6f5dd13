//! Reading of a socket that mostly has nothing: who has asked in vain only looks, until the kernel has said more.
//!
//! hyper asks its socket at each turn of its task, several times for a request. tokio then takes a lock and writes down who is
//! to be woken, though the same task stands there already.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use tokio::io::{AsyncRead, Interest, ReadBuf};
use tokio::net::TcpStream;

/// Who asked last, and whether it was in vain: then tokio knows the waker as well. It forgets it only when it has noted
/// that there is something to read, and that note stays until a read finds nothing.
#[derive(Debug, Default)]
pub struct Quiet {
    asked: Option<Waker>,
    waits: bool,
}

impl Quiet {
    /// As `TcpStream::poll_read`, of a stream that is read in no other way.
    ///
    /// # Errors
    /// Those of the socket.
    pub fn poll_read(
        &mut self,
        stream: &mut TcpStream,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let same = self.asked.as_ref().is_some_and(|waker| waker.will_wake(cx.waker()));
        if same && self.waits && nothing_heard(stream) {
            return Poll::Pending;
        }
        let polled = Pin::new(stream).poll_read(cx, buffer);
        self.waits = polled.is_pending();
        if self.waits && !same {
            self.asked = Some(cx.waker().clone());
        }
        polled
    }
}

/// Looks at what tokio has noted: no call of the kernel, and nothing is written.
fn nothing_heard(stream: &TcpStream) -> bool {
    matches!(stream.try_io(Interest::READABLE, || Ok(())), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
}
