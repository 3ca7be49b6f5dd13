//! A connection to a server: TCP, with TLS on it where its URL is `https:`.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

use super::advice::NoTls;
use super::tls::ServerTls;

/// What HTTP is spoken on.
#[derive(Debug)]
pub(super) enum Stream {
    Tcp(TcpStream),
    /// With the name that the server goes by.
    Tls(Box<(TlsStream<TcpStream>, ServerName<'static>)>),
}

impl Stream {
    /// Makes what a server expects of a connection to it.
    ///
    /// # Errors
    /// The handshake fails.
    pub(super) async fn over(stream: TcpStream, tls: Option<&ServerTls>) -> io::Result<Stream> {
        // Requests are written whole; waiting for more would only delay them.
        stream.set_nodelay(true)?;
        match tls {
            None => Ok(Stream::Tcp(stream)),
            // On the heap: inside this future it would take room for every request.
            Some(tls) => Ok(Stream::Tls(Box::new((Box::pin(tls.connect(stream)).await?, tls.name.clone())))),
        }
    }

    pub(super) fn is_tls(&self) -> bool {
        matches!(self, Stream::Tls(_))
    }
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).poll_read(cx, buf),
            Stream::Tls(tls) => {
                let (stream, name) = &mut **tls;
                Pin::new(stream).poll_read(cx, buf).map_err(|error| NoTls::of_reading(error, name))
            }
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).poll_write(cx, buf),
            Stream::Tls(tls) => Pin::new(&mut tls.0).poll_write(cx, buf).map_err(NoTls::of),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            Stream::Tls(tls) => Pin::new(&mut tls.0).poll_write_vectored(cx, bufs).map_err(NoTls::of),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Stream::Tcp(stream) => stream.is_write_vectored(),
            Stream::Tls(tls) => tls.0.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).poll_flush(cx),
            Stream::Tls(tls) => Pin::new(&mut tls.0).poll_flush(cx).map_err(NoTls::of),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            Stream::Tls(tls) => Pin::new(&mut tls.0).poll_shutdown(cx),
        }
    }
}
