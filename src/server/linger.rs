//! Closing a connection so that the client can read the last answer.
//!
//! A socket that is closed while bytes arrive is reset, and the reset throws away what the other side has not read
//! yet. So the end is sent, and what still comes is read and thrown away until the client closes, too.

use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Duration, timeout};

/// A client that goes on sending is read for so long, as in nginx's `lingering_time`.
const LINGERING_TIME: Duration = Duration::from_secs(30);

/// A client that sends nothing more is waited for so long, as in nginx's `lingering_timeout`.
const LINGERING_TIMEOUT: Duration = Duration::from_secs(5);

/// Bytes that are thrown away at a time.
const LINGERING_BUFFER_SIZE: usize = 16 << 10;

/// Sends the end and waits for the client's.
pub(super) async fn lingering_close(mut stream: TcpStream) {
    // It may have been sent before.
    let _ = stream.shutdown().await;
    let mut buffer = vec![0; LINGERING_BUFFER_SIZE];
    let discard = async { while let Ok(Ok(1..)) = timeout(LINGERING_TIMEOUT, stream.read(&mut buffer)).await {} };
    let _ = timeout(LINGERING_TIME, discard).await;
}

/// Closes so that nothing that was sent before looks complete, and the kernel keeps nothing for a client that does
/// not read.
pub(super) fn reset_on_close(stream: &TcpStream) {
    // Where it fails the connection is gone already.
    let _ = SockRef::from(stream).set_linger(Some(Duration::ZERO));
}
