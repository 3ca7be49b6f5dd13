//! A client of unary gRPC calls over HTTP/2, which sends exactly the given bytes.

use std::net::SocketAddr;

use bytes::{BufMut, Bytes, BytesMut};
use http::{HeaderMap, Request};
use prost::Message;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::runtime::Runtime;

use super::MAX_WAIT;

/// A connection for calls.
pub struct Grpc {
    runtime: Runtime,
    sender: h2::client::SendRequest<Bytes>,
}

/// The end of a call.
#[derive(Debug)]
pub struct Reply {
    /// HTTP status.
    pub status: u16,
    /// Headers and trailers.
    pub fields: HeaderMap,
    /// Body with the prefix of its message.
    pub body: Bytes,
}

/// Return a message with its prefix.
pub fn framed(message: &[u8]) -> Bytes {
    let mut bytes = BytesMut::new();
    bytes.put_u8(0);
    bytes.put_u32(message.len() as u32);
    bytes.extend_from_slice(message);
    bytes.freeze()
}

impl Reply {
    /// Return the status of gRPC.
    #[track_caller]
    pub fn code(&self) -> u32 {
        self.fields["grpc-status"].to_str().unwrap().parse().unwrap()
    }

    /// Return the message of a successful call.
    #[track_caller]
    pub fn message<M: Message + Default>(&self) -> M {
        assert_eq!(self.code(), 0, "{self:?}");
        assert_eq!(self.body[0], 0, "the message is not compressed");
        assert_eq!(u32::from_be_bytes(self.body[1..5].try_into().unwrap()) as usize, self.body.len() - 5);
        M::decode(self.body.slice(5..)).unwrap()
    }
}

impl Grpc {
    /// Connect with prior knowledge.
    pub fn connect(address: SocketAddr) -> Grpc {
        Grpc::over(async move { TcpStream::connect(address).await.unwrap() })
    }

    /// Start HTTP/2 on the stream that the future returns.
    pub fn over<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(stream: impl Future<Output = S>) -> Grpc {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let sender = runtime.block_on(async {
            let (sender, connection) = h2::client::handshake(stream.await).await.unwrap();
            tokio::spawn(connection);
            sender
        });
        Grpc { runtime, sender }
    }

    /// Begin a call with this part of a body. The call does not end before the connection.
    pub fn begin(&self, path: &str, part: Bytes) {
        let request = Request::builder().method("POST").uri(format!("http://gateway.test{path}"));
        let request = request.header("content-type", "application/grpc").body(()).unwrap();
        let mut sender = self.sender.clone();
        self.runtime.spawn(async move {
            let Ok((response, mut stream)) = sender.send_request(request, false) else { return };
            let _ = stream.send_data(part, false);
            let _ = response.await;
            std::future::pending::<()>().await;
        });
    }

    /// Send a call, and reset its stream at once.
    pub fn abandon(&self, path: &str, body: Bytes) {
        let request = Request::builder().method("POST").uri(format!("http://gateway.test{path}"));
        let request = request.header("content-type", "application/grpc").body(()).unwrap();
        let sender = self.sender.clone();
        self.runtime.spawn(async move {
            let Ok(mut sender) = sender.ready().await else { return };
            let Ok((_, mut stream)) = sender.send_request(request, false) else { return };
            let _ = stream.send_data(body, true);
            stream.send_reset(h2::Reason::CANCEL);
        });
    }

    /// Send a body with these additional headers, and return the reply.
    pub fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: Bytes) -> Reply {
        let mut request = Request::builder().method(method).uri(format!("http://gateway.test{path}"));
        if !headers.iter().any(|(name, _)| *name == "content-type") {
            request = request.header("content-type", "application/grpc");
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(()).unwrap();
        let mut sender = self.sender.clone();
        let call = async move {
            sender = sender.ready().await.unwrap();
            let (response, mut stream) = sender.send_request(request, false).unwrap();
            // The gateway may answer before it has read the whole body, and then resets the stream.
            let mut rest = body;
            while !rest.is_empty() {
                let part = rest.split_to(rest.len().min(8 << 10));
                if stream.send_data(part, false).is_err() {
                    break;
                }
            }
            let _ = stream.send_data(Bytes::new(), true);
            let (parts, mut body) = response.await.unwrap().into_parts();
            let mut fields = parts.headers;
            let mut bytes = BytesMut::new();
            while let Some(data) = body.data().await {
                let data = data.unwrap();
                body.flow_control().release_capacity(data.len()).unwrap();
                bytes.extend_from_slice(&data);
            }
            fields.extend(
                body.trailers().await.unwrap().into_iter().flatten().filter_map(|(name, value)| Some((name?, value))),
            );
            Reply { status: parts.status.as_u16(), fields, body: bytes.freeze() }
        };
        self.runtime.block_on(async { tokio::time::timeout(MAX_WAIT, call).await.expect("a reply") })
    }

    /// Call a method with a message.
    pub fn call(&self, path: &str, message: &impl Message, headers: &[(&str, &str)]) -> Reply {
        self.send("POST", path, headers, framed(&message.encode_to_vec()))
    }
}
