//! Load over HTTP/2, and single HTTP/2 requests with any headers.

use std::net::SocketAddr;

use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::{BodyExt, Empty, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

/// The number of concurrent streams per connection.
const STREAMS: usize = 4;

/// Send `total` GET requests over `connections` concurrent connections, with several streams on each. Return all
/// statuses.
pub fn load(addresses: &[SocketAddr], connections: usize, total: usize, path: &str, header: (&str, &str)) -> Vec<u16> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut tasks = JoinSet::new();
        for index in 0..connections {
            let address = addresses[index % addresses.len()];
            let share = total / connections + usize::from(index < total % connections);
            let request = http::Request::builder().uri(format!("http://{address}{path}")).header(header.0, header.1);
            let request = request.body(Empty::<&[u8]>::new()).unwrap();
            tasks.spawn(async move {
                let stream = TcpStream::connect(address).await.unwrap();
                let (sender, connection) =
                    hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
                tokio::spawn(connection);
                let mut streams = JoinSet::new();
                for lane in 0..STREAMS {
                    let (mut sender, request) = (sender.clone(), request.clone());
                    let share = share / STREAMS + usize::from(lane < share % STREAMS);
                    streams.spawn(async move {
                        let mut statuses = Vec::new();
                        for _ in 0..share {
                            let response = sender.send_request(request.clone()).await.unwrap();
                            statuses.push(response.status().as_u16());
                            response.into_body().collect().await.unwrap();
                        }
                        statuses
                    });
                }
                streams.join_all().await.concat()
            });
        }
        tasks.join_all().await.concat()
    })
}

/// The result of a request over HTTP/2.
#[derive(Debug)]
pub enum Answer {
    /// Status, headers and body of the response.
    Response(StatusCode, HeaderMap, Bytes),
    /// The stream was reset.
    Reset(h2::Reason),
}

impl Answer {
    /// Return the status of the response, or `None` if the stream was reset as malformed (RFC 9113 §8.1.1).
    #[track_caller]
    pub fn status(&self) -> Option<u16> {
        match self {
            Answer::Response(status, ..) => Some(status.as_u16()),
            Answer::Reset(reason) => {
                assert_eq!(*reason, h2::Reason::PROTOCOL_ERROR);
                None
            }
        }
    }
}

/// Send requests on one connection, one after the other.
pub fn ask(address: SocketAddr, requests: impl IntoIterator<Item = Request<&'static [u8]>>) -> Vec<Answer> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let talk = async {
        let stream = TcpStream::connect(address).await.unwrap();
        let handshake = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream));
        let (mut sender, connection) = handshake.await.unwrap();
        tokio::spawn(connection);
        let mut answers = Vec::new();
        for request in requests {
            let answer = sender.send_request(request.map(|body| Full::new(Bytes::from_static(body)))).await;
            answers.push(match answer {
                Ok(response) => {
                    let (parts, body) = response.into_parts();
                    Answer::Response(parts.status, parts.headers, body.collect().await.unwrap().to_bytes())
                }
                Err(error) => {
                    let source =
                        std::error::Error::source(&error).and_then(|source| source.downcast_ref::<h2::Error>());
                    Answer::Reset(source.and_then(h2::Error::reason).unwrap_or_else(|| panic!("{error:?}")))
                }
            });
        }
        answers
    };
    runtime.block_on(async { tokio::time::timeout(super::MAX_WAIT, talk).await.expect("a response over HTTP/2") })
}

/// Send POST requests on one connection. Each sends only a part of its body and never ends. Return the status of the
/// first response.
pub fn first_status_of_unfinished(address: SocketAddr, uri: &str, part: &'static [u8], requests: usize) -> u16 {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let talk = async {
        let stream = TcpStream::connect(address).await.unwrap();
        let (mut sender, connection) = h2::client::handshake(stream).await.unwrap();
        tokio::spawn(connection);
        let (mut bodies, mut responses) = (Vec::new(), JoinSet::new());
        for _ in 0..requests {
            sender = sender.ready().await.unwrap();
            let (response, mut body) = sender.send_request(Request::post(uri).body(()).unwrap(), false).unwrap();
            body.send_data(Bytes::from_static(part), false).unwrap();
            bodies.push(body);
            responses.spawn(async move { response.await.unwrap().status().as_u16() });
        }
        responses.join_next().await.unwrap().unwrap()
    };
    runtime.block_on(async { tokio::time::timeout(super::MAX_WAIT, talk).await.expect("a response over HTTP/2") })
}
