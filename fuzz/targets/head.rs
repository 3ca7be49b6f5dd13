//! Arbitrary bytes on an HTTP/1 connection, handled by hyper and by the gateway (routes, identities, limits,
//! responses). Nothing panics, and the output is HTTP.

use std::convert::Infallible;
use std::sync::Arc;

use http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use sluicegate::http::body::complete_response;
use sluicegate::http::body_limits::BufferBudget;
use sluicegate::http::flow::ConnectionActivity;
use sluicegate::http::flow::StreamFlow;
use sluicegate::http::request_body::RequestBody;
use sluicegate::limiter::Limiter;
use sluicegate::proxy::request::Peer;
use sluicegate::proxy::{Gateway, GatewayWorker};
use sluicegate::snapshot::CompiledConfig;
use sluicegate::telemetry::access_log::TelemetrySinks;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const CONFIG: &str = r#"
listener = [{ address = "127.0.0.1:8080" }]
[client_ip]
trusted_proxies = ["127.0.0.0/8"]
[auth.keys]
kind = "api-key"
on_unknown = "accept"
on_missing = "anonymous"
[limit.all]
by = ["ip", "api-key", "host", "method", "route"]
quota = "1000000/s"
[limit.named]
by = ["user:x-user-id", "header:x-a", "cookie:sid", "query:id", "path:id"]
quota = "1000000/s"
[limit.some]
by = "query:id"
on_missing = "skip"
quota = "1000000/s"
[[route]]
name = "named"
path = "/v1/{id}"
identify = ["keys"]
limits = ["all", "named"]
respond = { status = 200, body = "named" }
[[route]]
name = "host"
hosts = ["*.b.test"]
path = "/{*rest}"
identify = ["keys"]
limits = ["all", "some"]
respond = { status = 204 }
[[route]]
name = "get"
path = "/get"
methods = ["GET"]
match.headers.x-version.exact = "2"
respond = { status = 200, body = "get" }
[[route]]
name = "expression"
path_regex = '(?i)/x/(?<id>[^/]+).*'
match.query = { id.prefix = "a", debug.absent = true }
identify = ["keys"]
limits = ["all"]
respond = { status = 200, body = "expression" }
[[route]]
name = "secure"
path = "/secure/{*rest}"
trailing_slash = "redirect"
redirect = { scheme = "https" }
"#;

/// Size of the connection's buffer in bytes, in each direction.
const BUFFER: usize = 1 << 20;

struct Fixture {
    executor: tokio::runtime::Runtime,
    gateway: Gateway,
    peer: Peer,
}

fn fixture() -> Fixture {
    let directory = tempfile::tempdir().expect("a folder");
    let path = directory.path().join("gateway.toml");
    std::fs::write(&path, CONFIG).expect("a file");
    let config = Arc::new(CompiledConfig::load(&path, &|_| None).unwrap_or_else(|error| panic!("{error}")));
    let limiter = Limiter::in_memory(10_000);
    let peer = Peer::new([127, 0, 0, 1].into(), "http", &config);
    let executor = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("an executor");
    let gateway = Gateway::new(config, limiter, &[], TelemetrySinks::default(), GatewayWorker::default());
    Fixture { executor, gateway, peer }
}

thread_local! {
    static FIXTURE: Fixture = fixture();
}

pub(crate) fn run(data: &[u8]) {
    let said = FIXTURE.with(|Fixture { executor, gateway, peer }| executor.block_on(converse(gateway, peer, data)));
    assert!(said.is_empty() || said.starts_with(b"HTTP/1."), "{}", said.escape_ascii());
    // Each `HTTP/1.1 ` in the output starts a response. A status other than 500 must follow.
    for (at, _) in said.windows(9).enumerate().filter(|(_, bytes)| bytes.starts_with(b"HTTP/1.1 ")) {
        let status = said.get(at + 9..at + 12).expect("a status");
        assert!(status.iter().all(u8::is_ascii_digit), "{}", said.escape_ascii());
        assert_ne!(status, b"500", "{}", said.escape_ascii());
    }
}

async fn converse(gateway: &Gateway, peer: &Peer, data: &[u8]) -> Vec<u8> {
    let (mut client, server) = tokio::io::duplex(BUFFER);
    client.write_all(&data[..data.len().min(BUFFER)]).await.expect("the data fits into the buffer");
    client.shutdown().await.expect("the connection is open");
    let activity = ConnectionActivity::new();
    let flow = StreamFlow::for_connection(Arc::new(BufferBudget::new(usize::MAX)));
    let service = service_fn(|request: Request<Incoming>| {
        let in_flight = activity.start_request(flow.clone());
        let request = Box::new(request.map(|body| RequestBody::new(body, false, &in_flight)));
        let flow = &flow;
        async move {
            let mut response = gateway.handle(request, peer, flow).await;
            complete_response(in_flight, &mut response);
            Ok::<_, Infallible>(*response)
        }
    });
    let _ = http1::Builder::new()
        .half_close(true)
        .max_buf_size(32 << 10)
        .serve_connection(TokioIo::new(server), service)
        .await;
    let mut said = Vec::new();
    client.read_to_end(&mut said).await.expect("the server has closed the connection");
    said
}
