//! A connection to a server: TCP, with TLS on it where its URL is `https:`.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

use super::advice::TlsDiagnosis;
use super::tls::EndpointTls;

/// What HTTP is spoken on.
#[derive(Debug)]
pub(super) enum UpstreamStream {
    Tcp(TcpStream),
    /// With the name that the server goes by.
    Tls(Box<(TlsStream<TcpStream>, ServerName<'static>)>),
}

impl UpstreamStream {
    /// Makes what a server expects of a connection to it.
    ///
    /// # Errors
    /// The handshake fails.
    pub(super) async fn handshake(stream: TcpStream, tls: Option<&EndpointTls>) -> io::Result<UpstreamStream> {
        // Requests are written whole; waiting for more would only delay them.
        stream.set_nodelay(true)?;
        match tls {
            None => Ok(UpstreamStream::Tcp(stream)),
            // On the heap: inside this future it would take room for every request.
            Some(tls) => {
                Ok(UpstreamStream::Tls(Box::new((Box::pin(tls.connect(stream)).await?, tls.server_name.clone()))))
            }
        }
    }

    pub(super) fn is_tls(&self) -> bool {
        matches!(self, UpstreamStream::Tls(_))
    }
}

impl AsyncRead for UpstreamStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            UpstreamStream::Tcp(stream) => Pin::new(stream).poll_read(cx, buf),
            UpstreamStream::Tls(tls) => {
                let (stream, name) = &mut **tls;
                Pin::new(stream).poll_read(cx, buf).map_err(|error| TlsDiagnosis::from_read_error(error, name))
            }
        }
    }
}

impl AsyncWrite for UpstreamStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            UpstreamStream::Tcp(stream) => Pin::new(stream).poll_write(cx, buf),
            UpstreamStream::Tls(tls) => Pin::new(&mut tls.0).poll_write(cx, buf).map_err(TlsDiagnosis::from_io_error),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            UpstreamStream::Tcp(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            UpstreamStream::Tls(tls) => {
                Pin::new(&mut tls.0).poll_write_vectored(cx, bufs).map_err(TlsDiagnosis::from_io_error)
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            UpstreamStream::Tcp(stream) => stream.is_write_vectored(),
            UpstreamStream::Tls(tls) => tls.0.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            UpstreamStream::Tcp(stream) => Pin::new(stream).poll_flush(cx),
            UpstreamStream::Tls(tls) => Pin::new(&mut tls.0).poll_flush(cx).map_err(TlsDiagnosis::from_io_error),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            UpstreamStream::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            UpstreamStream::Tls(tls) => Pin::new(&mut tls.0).poll_shutdown(cx),
        }
    }
}
