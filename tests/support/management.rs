//! A management server (xDS, state of the world) over HTTP/2.

use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use bytes::{Buf, Bytes, BytesMut};
use prost::Message;
use sluicegate::payload::xds::{Any, DiscoveryRequest, DiscoveryResponse, RATE_LIMIT_CONFIG, RateLimitConfig};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;

use super::MAX_WAIT;
use super::grpc::framed;

/// A running server. Its connections end when it is dropped.
pub struct Management {
    pub address: SocketAddr,
    requests: Receiver<DiscoveryRequest>,
    /// The last stream that a client has opened.
    stream: Arc<Mutex<Option<h2::SendStream<Bytes>>>>,
    _runtime: Runtime,
}

impl Management {
    /// Start a server on this port, or on a free one if it is 0.
    pub fn start(port: u16) -> Management {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        socket.set_reuse_address(true).unwrap();
        socket.bind(&SocketAddr::from(([127, 0, 0, 1], port)).into()).unwrap();
        socket.listen(16).unwrap();
        socket.set_nonblocking(true).unwrap();
        let (sender, requests) = channel();
        let stream = Arc::<Mutex<Option<_>>>::default();
        let address = socket.local_addr().unwrap().as_socket().unwrap();
        let current = stream.clone();
        runtime.spawn(async move {
            let listener = TcpListener::from_std(socket.into()).unwrap();
            loop {
                let (tcp, _) = listener.accept().await.unwrap();
                tokio::spawn(serve(tcp, sender.clone(), current.clone()));
            }
        });
        Management { address, requests, stream, _runtime: runtime }
    }

    /// Wait for the next request.
    #[track_caller]
    pub fn request(&self) -> DiscoveryRequest {
        self.requests.recv_timeout(MAX_WAIT).expect("a request of the gateway")
    }

    /// Send these resources. The nonce is `nonce-VERSION`.
    pub fn send(&self, version: &str, resources: &[RateLimitConfig]) {
        let any = |config: &RateLimitConfig| Any {
            type_url: RATE_LIMIT_CONFIG.to_owned(),
            value: config.encode_to_vec().into(),
        };
        self.send_raw(version, resources.iter().map(any).collect());
    }

    /// Send these encoded resources.
    pub fn send_raw(&self, version: &str, resources: Vec<Any>) {
        let response = DiscoveryResponse {
            version_info: version.to_owned(),
            resources,
            type_url: RATE_LIMIT_CONFIG.to_owned(),
            nonce: format!("nonce-{version}"),
        };
        self.send_bytes(framed(&response.encode_to_vec()));
    }

    /// Send bytes on the stream.
    pub fn send_bytes(&self, bytes: Bytes) {
        self.stream.lock().unwrap().as_mut().unwrap().send_data(bytes, false).unwrap();
    }

    /// Send these resources, and return the request that accepts or rejects them.
    #[track_caller]
    pub fn exchange(&self, version: &str, resources: &[RateLimitConfig]) -> DiscoveryRequest {
        self.send(version, resources);
        let reply = self.request();
        assert_eq!(reply.response_nonce, format!("nonce-{version}"));
        reply
    }
}

async fn serve(tcp: TcpStream, requests: Sender<DiscoveryRequest>, current: Arc<Mutex<Option<h2::SendStream<Bytes>>>>) {
    let Ok(mut connection) = h2::server::handshake(tcp).await else { return };
    while let Some(Ok((request, mut respond))) = connection.accept().await {
        assert_eq!(
            request.uri().path(),
            "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources"
        );
        assert_eq!(request.headers()["content-type"], "application/grpc");
        let response = http::Response::builder().header("content-type", "application/grpc").body(()).unwrap();
        *current.lock().unwrap() = Some(respond.send_response(response, false).unwrap());
        let mut body = request.into_body();
        let requests = requests.clone();
        tokio::spawn(async move {
            let mut bytes = BytesMut::new();
            while let Some(Ok(data)) = body.data().await {
                body.flow_control().release_capacity(data.len()).unwrap();
                bytes.extend_from_slice(&data);
                while bytes.len() >= 5 {
                    let length = u32::from_be_bytes(bytes[1..5].try_into().unwrap()) as usize;
                    if bytes.len() < 5 + length {
                        break;
                    }
                    bytes.advance(5);
                    // The test may have ended.
                    let _ = requests.send(DiscoveryRequest::decode(bytes.split_to(length).freeze()).unwrap());
                }
            }
        });
    }
}
