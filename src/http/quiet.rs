//! Reading of a socket that mostly has nothing: who has asked in vain only looks, until the kernel has said more.
//!
//! hyper asks its socket at each turn of its task, several times for a request. tokio then takes a lock and writes down who is
//! to be woken, though the same task stands there already.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use tokio::io::{AsyncRead, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::task::coop;

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
        // A task that has used up its turn is put off, and comes again: then tokio has not asked the socket.
        let asks = coop::has_budget_remaining();
        let polled = Pin::new(stream).poll_read(cx, buffer);
        self.waits = asks && polled.is_pending();
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

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::io::Write;
    use std::pin::pin;
    use std::time::Duration;

    use tokio::net::TcpListener;
    use tokio::sync::mpsc::unbounded_channel;
    use tokio::time::timeout;

    use super::*;

    /// Whether a second byte is read, which is written when it has been asked for in vain twice; the first time with or
    /// without a turn.
    async fn is_read(without_turn: bool) -> bool {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut stream, _) = listener.accept().await.unwrap();
        let (asked, mut in_vain) = unbounded_channel();
        let reader = tokio::spawn(async move {
            let (mut quiet, mut bytes, mut polls) = (Quiet::default(), [0; 8], 0);
            poll_fn(|cx| {
                polls += 1;
                let mut read = |cx: &mut Context<'_>| quiet.poll_read(&mut stream, cx, &mut ReadBuf::new(&mut bytes));
                if polls == 2 {
                    assert!(read(cx).is_ready(), "the first byte");
                    // Asked again: by tokio if it is put off, otherwise by itself.
                    match without_turn {
                        true => {
                            while coop::has_budget_remaining() {
                                let _ = pin!(coop::consume_budget()).poll(cx);
                            }
                        }
                        false => cx.waker().wake_by_ref(),
                    }
                }
                let polled = read(cx);
                asked.send(()).unwrap();
                polled
            })
            .await
        });
        in_vain.recv().await.unwrap();
        client.write_all(b"1").unwrap();
        in_vain.recv().await.unwrap();
        in_vain.recv().await.unwrap();
        client.write_all(b"2").unwrap();
        matches!(timeout(Duration::from_secs(10), reader).await, Ok(Ok(Ok(()))))
    }

    #[tokio::test]
    async fn whoever_asked_in_vain_is_woken() {
        assert!(is_read(false).await);
    }

    #[tokio::test]
    async fn whoever_was_put_off_for_others_is_woken_all_the_same() {
        assert!(is_read(true).await);
    }
}
