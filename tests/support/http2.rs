//! Load over HTTP/2.

use std::net::SocketAddr;

use http_body_util::{BodyExt, Empty};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

/// Streams that one connection has open at once.
const STREAMS: usize = 4;

/// Sends `total` GETs over `connections` connections at once, several streams on each; the statuses of all.
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
