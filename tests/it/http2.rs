//! HTTP/2 upstreams: one connection for all requests, gRPC calls from client to upstream, and how streams and
//! connections end.

use std::future::{Future, poll_fn};
use std::io::Read;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::client::{Client, load};
use crate::support::frames;
use crate::support::frames::{DATA, END_HEADERS, END_STREAM, HEADERS, Http2, RST_STREAM, frame};
use crate::support::gateway::Gateway;
use crate::support::{MAX_WAIT, SetOnDrop, assert_silent, eventually};
use bytes::Bytes;
use h2::server::SendResponse;
use h2::{Reason, RecvStream, SendStream};
use http::{HeaderMap, Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use sluicegate::clock::monotonic;

/// What the test server does with a request in addition to responding.
#[derive(Clone, Copy)]
enum Then {
    GoOn,
    /// Send GOAWAY, so that this request is the last one of the connection.
    GoAway,
    /// Close the connection during the request.
    Drop,
    Reset(Reason),
}

/// An HTTP/2 server that records each request and the number of its connection.
struct Server {
    address: SocketAddr,
    seen: Arc<Mutex<Vec<(usize, http::request::Parts)>>>,
}

impl Server {
    /// Start a server. `then` and `answer` are called with the number of the request, counted from 0.
    fn start<Fut: Future<Output = ()> + 'static>(
        then: impl Fn(usize) -> Then + Send + Clone + 'static,
        answer: impl Fn(usize, Request<RecvStream>, SendResponse<Bytes>) -> Fut + Send + Clone + 'static,
    ) -> Server {
        Server::start_with(&h2::server::Builder::new(), then, answer)
    }

    /// Start a server with these settings of its connections.
    fn start_with<Fut: Future<Output = ()> + 'static>(
        builder: &h2::server::Builder,
        then: impl Fn(usize) -> Then + Send + Clone + 'static,
        answer: impl Fn(usize, Request<RecvStream>, SendResponse<Bytes>) -> Fut + Send + Clone + 'static,
    ) -> Server {
        let builder = builder.clone();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        listener.set_nonblocking(true).unwrap();
        let seen = Arc::<Mutex<Vec<_>>>::default();
        let record = seen.clone();
        let serve = async move {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            for connection in 0.. {
                let (stream, _) = listener.accept().await.unwrap();
                let (builder, then, answer, record) = (builder.clone(), then.clone(), answer.clone(), record.clone());
                tokio::task::spawn_local(async move {
                    let mut requests = builder.handshake(stream).await.unwrap();
                    while let Some(Ok((request, mut respond))) = requests.accept().await {
                        let (parts, body) = request.into_parts();
                        let number = {
                            let mut record = record.lock().unwrap();
                            record.push((connection, parts.clone()));
                            record.len() - 1
                        };
                        match then(number) {
                            Then::GoOn => {}
                            Then::GoAway => requests.graceful_shutdown(),
                            Then::Drop => return,
                            Then::Reset(reason) => {
                                respond.send_reset(reason);
                                continue;
                            }
                        }
                        tokio::task::spawn_local(answer(number, Request::from_parts(parts, body), respond));
                    }
                });
            }
        };
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            tokio::task::LocalSet::new().block_on(&runtime, serve);
        });
        Server { address, seen }
    }

    /// Start a server that returns the body of each request in its response.
    fn echo(then: impl Fn(usize) -> Then + Send + Clone + 'static) -> Server {
        Server::start(then, |_, request, respond| async move {
            let (body, _) = read(&mut request.into_body()).await;
            answer(respond, body);
        })
    }

    /// For each request so far, return the number of its connection.
    fn connections(&self) -> Vec<usize> {
        self.seen.lock().unwrap().iter().map(|(connection, _)| *connection).collect()
    }
}

/// Read a body and its trailers.
async fn read(body: &mut RecvStream) -> (Vec<u8>, Option<HeaderMap>) {
    let mut read = Vec::new();
    while let Some(Ok(data)) = body.data().await {
        body.flow_control().release_capacity(data.len()).unwrap();
        read.extend_from_slice(&data);
    }
    (read, body.trailers().await.ok().flatten())
}

fn answer(mut respond: SendResponse<Bytes>, body: impl Into<Bytes>) {
    let mut stream = respond.send_response(Response::new(()), false).unwrap();
    stream.send_data(body.into(), true).unwrap();
}

/// Start a gateway with one worker, so that it opens only one connection to the upstream. It cancels the request of a
/// client at once when the client disconnects.
fn gateway(upstream: SocketAddr, rest: &str) -> Gateway {
    let limits = if rest.contains("[limit.l]") { "limits = [\"l\"]" } else { "" };
    Gateway::start(&format!(
        "[server]\nworkers = 1\nhalf_close_timeout = \"0s\"\n\
         [[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"u\"\n{limits}\n\
         [upstream.u]\nservers = [\"http://{upstream}\"]\nprotocol = \"http2\"\n{rest}"
    ))
}

/// Connect an HTTP/2 client.
async fn client(gateway: &Gateway) -> h2::client::SendRequest<Bytes> {
    let stream = tokio::net::TcpStream::connect(gateway.address).await.unwrap();
    let (client, connection) = h2::client::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    client.ready().await.unwrap()
}

fn block_on<T>(talk: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(MAX_WAIT, talk).await.expect("a response in time") })
}

// ---- forwarding ----------------------------------------------------------------------------------

#[test]
fn one_http2_connection_carries_all_requests() {
    let server = Server::echo(|_| Then::GoOn);
    let gateway = gateway(server.address, "");
    assert!(load(&[gateway.address], 8, 80, "/a/../b?x=1", &[]).iter().all(|status| *status == 200));
    assert_eq!(server.connections(), [0; 80]);
    let (_, first) = server.seen.lock().unwrap()[0].clone();
    assert_eq!(first.uri, "http://gateway.test/b?x=1");
    for (name, value) in [("host", None), ("via", Some("1.1 sluicegate")), ("x-forwarded-for", Some("127.0.0.1"))] {
        assert_eq!(first.headers.get(name).map(|value| value.to_str().unwrap()), value, "{name}");
    }
    let mut client = gateway.client();
    let body = vec![7; 3 << 20];
    let reply = client.request("POST", "/", &[("Host", "shop.example:81"), ("Connection", "close, x-a")], &body);
    assert_eq!((reply.status, reply.body.len()), (200, body.len()));
    let (_, last) = server.seen.lock().unwrap().last().unwrap().clone();
    assert_eq!(last.uri, "http://shop.example:81/");
    assert_eq!(last.headers["content-length"], body.len().to_string());
    // An HTTP/1.0 client need not send `Host`. Without `Host`, the gateway sends the address of the upstream as
    // `:authority`.
    let mut client = gateway.client();
    client.send(b"GET /old HTTP/1.0\r\n\r\n");
    assert_eq!(client.reply().unwrap().status, 200);
    let (_, last) = server.seen.lock().unwrap().last().unwrap().clone();
    assert_eq!(last.uri.to_string(), format!("http://{}/old", server.address));
}

/// Encode a gRPC message: a flag that means no compression, the length, and the bytes.
fn message(bytes: &[u8]) -> Bytes {
    [&[0][..], &(bytes.len() as u32).to_be_bytes(), bytes].concat().into()
}

fn call(method: &str) -> Request<()> {
    Request::post(format!("http://grpc.test/pkg.Service/{method}"))
        .header("content-type", "application/grpc+proto")
        .header("te", "trailers")
        .body(())
        .unwrap()
}

fn map(name: &'static str, value: &'static str) -> HeaderMap {
    HeaderMap::from_iter([(http::HeaderName::from_static(name), http::HeaderValue::from_static(value))])
}

/// A gRPC server: it returns each message as soon as the message arrives. The method `Fail` returns an error without
/// messages.
async fn grpc(_: usize, request: Request<RecvStream>, mut respond: SendResponse<Bytes>) {
    let head = Response::builder().header("content-type", "application/grpc+proto");
    if request.uri().path().ends_with("/Fail") {
        let head = head.header("grpc-status", "5").header("grpc-message", "no such thing").body(()).unwrap();
        respond.send_response(head, true).unwrap();
        return;
    }
    let mut body = request.into_body();
    let mut stream: SendStream<Bytes> = respond.send_response(head.body(()).unwrap(), false).unwrap();
    while let Some(Ok(data)) = body.data().await {
        body.flow_control().release_capacity(data.len()).unwrap();
        stream.send_data(data, false).unwrap();
    }
    let mut trailers = map("grpc-status", "0");
    trailers.extend(body.trailers().await.ok().flatten().unwrap_or_default());
    stream.send_trailers(trailers).unwrap();
}

/// A gRPC client may pause between messages. For other uploads, the gateway times out if the client pauses for as long.
#[test]
fn grpc_streams_may_pause_and_other_uploads_may_not() {
    let server = Server::echo(|_| Then::GoOn);
    let gateway = gateway(server.address, "");
    block_on(async {
        let client = client(&gateway).await;
        let upload = |request: Request<()>| {
            let mut client = client.clone();
            async move {
                let (response, mut body) = client.send_request(request, false).unwrap();
                body.send_data(message(b"first"), false).unwrap();
                tokio::time::sleep(Duration::from_secs(7)).await;
                // Ignore the result, because the gateway may have closed the stream.
                let _ = body.send_data(message(b"second"), true);
                response.await.unwrap().status().as_u16()
            }
        };
        let other = Request::post("http://grpc.test/pkg.Service/Other").body(()).unwrap();
        assert_eq!(tokio::join!(upload(call("Collect")), upload(other)), (200, 408));
    });
}

#[test]
fn response_with_spaces_around_a_value_is_502_for_its_stream_alone() {
    let server = Server::start(
        |_| Then::GoOn,
        |_, request, mut respond| async move {
            let value = match request.uri().path() {
                "/before" => " 1",
                "/behind" => "1 ",
                "/tab" => "1\t",
                "/nothing" => " ",
                _ => "1 2",
            };
            respond.send_response(Response::builder().header("x", value).body(()).unwrap(), true).unwrap();
        },
    );
    let gateway = gateway(server.address, "");
    let mut client = gateway.client();
    for path in ["/before", "/behind", "/tab", "/nothing"] {
        client.get(path).assert_problem(502, path);
        assert_eq!(client.get("/good").status, 200, "after {path}");
    }
    let connections: Vec<_> = server.seen.lock().unwrap().iter().map(|(connection, _)| *connection).collect();
    assert_eq!(connections, [0; 8], "an error of one stream does not close the connection");
}

#[test]
fn grpc_trailers_are_forwarded() {
    let server = Server::start(|_| Then::GoOn, grpc);
    let log = "[log]\naccess = \"access.log\"\nformat = \"json\"\n[limit.l]\nby = \"ip\"\nquota = \"3/24h\"\n";
    let gateway = gateway(server.address, log);
    block_on(async {
        let mut client = client(&gateway).await;
        // A unary call: one message in each direction.
        let (response, mut stream) = client.send_request(call("Unary"), false).unwrap();
        stream.send_data(message(b"hello"), true).unwrap();
        let response = response.await.unwrap();
        assert_eq!(response.headers()["content-type"], "application/grpc+proto");
        let (body, trailers) = read(&mut response.into_body()).await;
        assert_eq!((body, trailers.unwrap()), (message(b"hello").to_vec(), map("grpc-status", "0")));
        // A streaming call: the server responds to each message before the client sends the next one.
        let (response, mut stream) = client.send_request(call("Stream"), false).unwrap();
        let mut body = response.await.unwrap().into_body();
        for text in ["one", "two", "three"] {
            stream.send_data(message(text.as_bytes()), false).unwrap();
            let data = body.data().await.unwrap().unwrap();
            body.flow_control().release_capacity(data.len()).unwrap();
            assert_eq!(data, message(text.as_bytes()));
        }
        stream.send_trailers(map("x-asked", "1")).unwrap();
        let (_, trailers) = read(&mut body).await;
        let trailers = trailers.unwrap();
        assert_eq!((&trailers["grpc-status"], &trailers["x-asked"]), (&"0".parse().unwrap(), &"1".parse().unwrap()));
        // A gRPC error response consists of trailers only.
        let (response, _) = client.send_request(call("Fail"), true).unwrap();
        let response = response.await.unwrap();
        assert_eq!((response.status().as_u16(), &response.headers()["grpc-status"]), (200, &"5".parse().unwrap()));
        assert!(response.into_body().is_end_stream());
        // The fourth request exceeds the limit.
        let (response, _) = client.send_request(call("Unary"), true).unwrap();
        let response = response.await.unwrap();
        assert_eq!((response.status().as_u16(), &response.headers()["grpc-status"]), (200, &"8".parse().unwrap()));
    });
    assert_eq!(server.connections(), [0; 3]);
    let (_, head) = server.seen.lock().unwrap()[0].clone();
    assert_eq!(
        (head.uri.authority().unwrap().as_str(), &head.headers["te"]),
        ("grpc.test", &"trailers".parse().unwrap())
    );
    let lines = || std::fs::read_to_string(gateway.directory().join("access.log")).unwrap();
    eventually("lines are written", || lines().lines().count() == 4);
    assert!(lines().lines().all(|line| line.contains("\"complete\":true")), "{}", lines());
}

#[test]
fn trailers_follow_the_compressed_content() {
    let text = "{\"a\":1}".repeat(1000);
    let content = text.clone();
    let server = Server::start(
        |_| Then::GoOn,
        move |_, _, mut respond| {
            let content = content.clone();
            async move {
                let head = Response::builder().header("content-type", "application/json").body(()).unwrap();
                let mut stream = respond.send_response(head, false).unwrap();
                stream.send_data(content.into(), false).unwrap();
                stream.send_trailers(map("x-checked", "1")).unwrap();
            }
        },
    );
    let gateway = Gateway::start(&format!(
        "[upstream.u]\nservers = [\"http://{}\"]\nprotocol = \"http2\"\n\
         [[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"u\"\ncompress = true\n",
        server.address
    ));
    block_on(async {
        let mut client = client(&gateway).await;
        let request = Request::get("http://a.test/x").header("accept-encoding", "gzip").header("te", "trailers");
        let (response, _) = client.send_request(request.body(()).unwrap(), true).unwrap();
        let response = response.await.unwrap();
        assert_eq!(response.headers()["content-encoding"], "gzip");
        let (body, trailers) = read(&mut response.into_body()).await;
        let mut decoded = String::new();
        flate2::read::GzDecoder::new(&*body).read_to_string(&mut decoded).unwrap();
        assert_eq!((decoded, trailers.unwrap()), (text, map("x-checked", "1")));
    });
}

/// An upstream may add trailers to the headers of a request. Therefore, trailers that the gateway would remove or replace
/// as headers, and all their aliases, are not forwarded.
#[test]
fn grpc_trailers_carry_no_field_that_a_client_must_not_send() {
    let server = Server::start(|_| Then::GoOn, grpc);
    let config = "request_headers = { set = { x-user = \"none\", x-request = \"{request_id}\" }, remove = [\"x-internal\"] }\n\
                  [limit.l]\nby = [\"header:x-tenant\"]\nquota = \"100/s\"\non_missing = \"ip\"\n\
                  [limit.u]\nby = \"user:x-account\"\nquota = \"100/s\"\non_missing = \"skip\"\n\
                  [client_ip]\ntrusted_proxies = [\"192.0.2.1/32\"]\n\
                  [auth.sso]\nkind = \"forward\"\nurl = \"http://127.0.0.1:1/\"\nresponse_headers = [\"x-identity\"]\n";
    let text = format!(
        "[[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"u\"\nlimits = [\"l\", \"u\"]\n{config}\
         [upstream.u]\nservers = [\"http://{}\"]\nprotocol = \"http2\"\n",
        server.address
    );
    let gateway = Gateway::start(&text);
    let protected = [
        "authorization",
        "proxy-authorization",
        "cookie",
        "host",
        "content-length",
        "content-type",
        "x-user",
        "x_user",
        "x.user",
        "x-request",
        "x-internal",
        "x!internal",
        "x-tenant",
        "x_tenant",
        "x-account",
        "x-identity",
        "x-forwarded-for",
        "x_forwarded_for",
        "x-forwarded-anything",
        "forwarded",
        "x-real-ip",
        "x-request-id",
        "client-cert",
        "traceparent",
        "via",
        "expect",
        "range",
        "x-sluicegate-mirror",
    ];
    let returned = block_on(async {
        let mut client = client(&gateway).await;
        let (response, mut stream) = client.send_request(call("Unary"), false).unwrap();
        stream.send_data(message(b"hello"), false).unwrap();
        let mut trailers = map("x-asked", "1");
        trailers.extend(protected.iter().flat_map(|name| map(name, "root")));
        stream.send_trailers(trailers).unwrap();
        let (body, trailers) = read(&mut response.await.unwrap().into_body()).await;
        assert_eq!(body, message(b"hello").to_vec());
        // Trailers that are all removed end the body as well.
        let (response, mut stream) = client.send_request(call("Unary"), false).unwrap();
        stream.send_trailers(map("authorization", "root")).unwrap();
        let (_, none) = read(&mut response.await.unwrap().into_body()).await;
        assert_eq!(none.unwrap(), map("grpc-status", "0"));
        trailers.unwrap()
    });
    let names: Vec<_> = returned.keys().map(|name| name.as_str()).collect();
    assert_eq!(names, ["grpc-status", "x-asked"], "{returned:?}");
}

#[test]
fn trailers_of_requests_without_grpc_are_dropped() {
    let (sender, trailers) = channel();
    let server = Server::start(
        |_| Then::GoOn,
        move |_, request, respond| {
            let sender: Sender<_> = sender.clone();
            async move {
                let (body, trailers) = read(&mut request.into_body()).await;
                sender.send((body, trailers)).unwrap();
                answer(respond, "ok");
            }
        },
    );
    let gateway = gateway(server.address, "");
    block_on(async {
        let mut client = client(&gateway).await;
        let request = Request::post("http://a.test/").header("te", "trailers").body(()).unwrap();
        let (response, mut stream) = client.send_request(request, false).unwrap();
        stream.send_data("body".into(), false).unwrap();
        stream.send_trailers(map("x-user-id", "eve")).unwrap();
        assert_eq!(response.await.unwrap().status(), 200);
    });
    assert_eq!(trailers.recv_timeout(MAX_WAIT).unwrap(), (b"body".to_vec(), None));
}

// ---- end of streams and connections --------------------------------------------------------------

#[test]
fn goaway_finishes_streams_and_closes_the_connection() {
    let (go_on, wait) = tokio::sync::watch::channel(false);
    let server = Server::start(
        |number| if number == 1 { Then::GoAway } else { Then::GoOn },
        move |number, _, respond| {
            let mut wait = wait.clone();
            async move {
                if number == 0 {
                    wait.wait_for(|go_on| *go_on).await.unwrap();
                }
                answer(respond, "ok");
            }
        },
    );
    let gateway = gateway(server.address, "");
    let mut held = gateway.client();
    held.send(b"GET /held HTTP/1.1\r\nHost: a\r\n\r\n");
    eventually("the first request has arrived", || server.connections().len() == 1);
    let mut client = gateway.client();
    for _ in 0..5 {
        let reply = client.request("POST", "/", &[], b"");
        assert_eq!((reply.status, reply.text()), (200, "ok"));
    }
    go_on.send(true).unwrap();
    assert_eq!(held.reply().unwrap().text(), "ok");
    assert_eq!(server.connections(), [0, 0, 1, 1, 1, 1]);
}

#[test]
fn lost_connection_fails_only_requests_that_may_have_been_processed() {
    for (method, body, status, seen) in
        [("GET", "", 200, &[0, 0, 1, 1][..]), ("DELETE", "", 502, &[0, 0, 1]), ("POST", "body", 502, &[0, 0, 1])]
    {
        let server = Server::echo(|number| if number == 1 { Then::Drop } else { Then::GoOn });
        let gateway = gateway(server.address, "");
        let mut client = gateway.client();
        assert_eq!(client.get("/").status, 200);
        assert_eq!(client.request(method, "/", &[], body.as_bytes()).status, status, "{method}");
        assert_eq!(gateway.get("/").status, 200, "{method}");
        assert_eq!(server.connections(), seen, "{method}");
    }
    // A request that fails on a new connection is not retried.
    let server = Server::echo(|_| Then::Drop);
    let gateway = gateway(server.address, "");
    gateway.get("/").assert_problem(502, "dropped at once");
    assert_eq!(server.connections(), [0]);
}

#[test]
fn unprocessed_request_is_retried_once() {
    let refused = Reason::REFUSED_STREAM;
    for (method, body, reason, times, status, seen) in [
        ("GET", "", refused, 1, 200, 2),
        ("DELETE", "", refused, 1, 200, 2),
        ("DELETE", "", refused, 9, 502, 2),
        ("POST", "body", refused, 9, 502, 1),
        ("GET", "", Reason::INTERNAL_ERROR, 9, 502, 1),
    ] {
        let server = Server::echo(move |number| if number < times { Then::Reset(reason) } else { Then::GoOn });
        let gateway = gateway(server.address, "");
        let mut client = gateway.client();
        let what = format!("{method} {reason:?} {times}");
        assert_eq!(client.request(method, "/", &[], body.as_bytes()).status, status, "{what}");
        assert_eq!(server.connections(), vec![0; seen], "{what}: the connection is good");
    }
}

/// Start a server that responds only to `/ok`, and reports how each other stream ended.
fn silent() -> (Server, std::sync::mpsc::Receiver<Reason>) {
    silent_with(&h2::server::Builder::new())
}

fn silent_with(builder: &h2::server::Builder) -> (Server, std::sync::mpsc::Receiver<Reason>) {
    let (sender, ended) = channel();
    let server = Server::start_with(
        builder,
        |_| Then::GoOn,
        move |_, request, mut respond| {
            let sender: Sender<_> = sender.clone();
            async move {
                if request.uri().path() == "/ok" {
                    return answer(respond, "ok");
                }
                // An error means that the gateway was stopped at the end of the test.
                if let Ok(reason) = poll_fn(|cx| respond.poll_reset(cx)).await {
                    sender.send(reason).unwrap();
                }
            }
        },
    );
    (server, ended)
}

/// The `grpc-status` of each call, from the headers or the trailers of its response.
fn grpc_statuses<const N: usize>(gateway: &Gateway, calls: [(Request<()>, &'static [u8]); N]) -> [String; N] {
    block_on(async {
        let mut client = client(gateway).await;
        let mut statuses = Vec::new();
        for (request, body) in calls {
            let (response, mut stream) = client.send_request(request, false).unwrap();
            stream.send_data(Bytes::from_static(body), true).unwrap();
            let response = response.await.unwrap();
            assert_eq!(response.status(), 200);
            let head = response.headers().get("grpc-status").cloned();
            let (_, trailers) = read(&mut response.into_body()).await;
            let status = head.or_else(|| trailers?.get("grpc-status").cloned());
            statuses.push(status.map_or(String::new(), |status| status.to_str().unwrap().to_owned()));
            client = client.ready().await.unwrap();
        }
        statuses.try_into().unwrap()
    })
}

#[test]
fn failures_of_the_gateway_are_grpc_statuses() {
    let (server, _ended) = silent();
    let route = |name: &str, keys: &str| format!("[[route]]\nname = \"{name}\"\npath = \"/{name}\"\n{keys}\n");
    let gateway = Gateway::start(&format!(
        "[upstream.u]\nservers = [\"http://{}\"]\nprotocol = \"http2\"\n\
         [upstream.slow]\nservers = [\"http://{}\"]\nprotocol = \"http2\"\nresponse_timeout = \"300ms\"\n\
         [upstream.dead]\nservers = [\"http://127.0.0.1:1\"]\nprotocol = \"http2\"\n\
         [limit.l]\nby = \"global\"\nalgorithm = \"sliding-log\"\nquota = \"1/hour\"\nrefund_on = [\"4xx\", \"5xx\"]\n{}{}{}{}{}",
        server.address,
        server.address,
        route("deadline", "upstream = \"u\"\nlimits = [\"l\"]"),
        route("timeout", "upstream = \"u\"\ntimeout = \"300ms\""),
        route("slow", "upstream = \"slow\""),
        route("large", "upstream = \"u\"\nmax_body = \"8B\""),
        route("dead", "upstream = \"dead\""),
    ));
    let call = |path: &str, timeout: &'static str| {
        let request = Request::post(format!("http://grpc.test/{path}")).header("content-type", "application/grpc");
        let request = if timeout.is_empty() { request } else { request.header("grpc-timeout", timeout) };
        (request.body(()).unwrap(), &b"123456789"[..])
    };
    let statuses = grpc_statuses(
        &gateway,
        [
            call("deadline", "300m"),
            call("deadline", "300m"),
            call("timeout", ""),
            call("timeout", "1H"),
            call("slow", ""),
            call("large", ""),
            call("dead", ""),
            call("nowhere", ""),
        ],
    );
    // The second call is denied, because a client must not get a refund by a short deadline.
    assert_eq!(statuses, ["4", "8", "4", "4", "4", "8", "14", "12"]);
    gateway.client().get("/dead").assert_problem(502, "a request that is no gRPC call");
}

#[test]
fn grpc_stream_that_exceeds_its_deadline_ends_with_trailers() {
    let server = Server::start(
        |_| Then::GoOn,
        |_, _, mut respond| async move {
            let head = Response::builder().header("content-type", "application/grpc").body(()).unwrap();
            let mut stream = respond.send_response(head, false).unwrap();
            stream.send_data(message(b"first"), false).unwrap();
            // Wait until the gateway resets the stream.
            let _ = poll_fn(|cx| stream.poll_reset(cx)).await;
        },
    );
    let gateway = gateway(server.address, "");
    let mut request = call("Stream");
    request.headers_mut().insert("grpc-timeout", "500m".parse().unwrap());
    assert_eq!(grpc_statuses(&gateway, [(request, b"")]), ["4"]);
}

#[test]
fn timed_out_request_is_cancelled_and_others_use_another_connection() {
    let (server, ended) = silent();
    let gateway = gateway(server.address, "response_timeout = \"500ms\"\n");
    let mut client = gateway.client();
    client.get("/slow").assert_problem(504, "no answer");
    assert_eq!(ended.recv_timeout(MAX_WAIT).unwrap(), Reason::CANCEL);
    assert_eq!(client.get("/ok").status, 200);
    assert_eq!(server.connections(), [0, 1]);
}

#[test]
fn route_timeout_cancels_the_request_and_others_use_another_connection() {
    let (server, ended) = silent();
    let gateway = Gateway::start(&format!(
        "[server]\nworkers = 1\n[upstream.u]\nservers = [\"http://{}\"]\nprotocol = \"http2\"\n\
         [[route]]\nname = \"all\"\npath = \"/v2/{{*rest}}\"\nstrip_prefix = \"/v2\"\n\
         upstream = \"u\"\ntimeout = \"500ms\"\n",
        server.address
    ));
    let mut client = gateway.client();
    client.get("/v2/slow").assert_problem(504, "no answer");
    assert_eq!(ended.recv_timeout(MAX_WAIT).unwrap(), Reason::CANCEL);
    assert_eq!(client.get("/v2/ok").status, 200);
    assert_eq!(server.connections(), [0, 1], "otherwise the gateway would never detect a dead connection");
}

#[test]
fn disconnected_client_cancels_its_stream_alone() {
    let (server, ended) = silent();
    let gateway = gateway(server.address, "");
    let mut client = gateway.client();
    client.send(b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n");
    eventually("the request has arrived", || server.connections().len() == 1);
    drop(client);
    assert_eq!(ended.recv_timeout(MAX_WAIT).unwrap(), Reason::CANCEL);
    assert_eq!(gateway.get("/ok").status, 200);
    assert_eq!(server.connections(), [0, 0]);
}

#[test]
fn idle_connection_is_closed_and_a_closed_one_is_not_reused() {
    let server = Server::echo(|_| Then::GoOn);
    let gateway = gateway(server.address, "pool_idle_timeout = \"1ms\"\n");
    let mut client: Client = gateway.client();
    // The pauses between requests are longer than this timeout, except by chance.
    eventually("an idle connection is not reused", || {
        assert_eq!(client.get("/").status, 200);
        server.connections().last() == Some(&1)
    });
}

#[test]
fn upstream_without_http2_is_502() {
    for answer in ["HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", "", "garbage"] {
        let upstream = crate::support::upstream::serve(move |mut stream| {
            use std::io::{Read, Write};
            let _ = stream.read(&mut [0; 1024]);
            let _ = stream.write_all(answer.as_bytes());
        });
        gateway(upstream, "").get("/").assert_problem(502, answer);
    }
}

// ---- resets of one client on connections that all clients share ----------------------------------

/// Start a server of hyper with its default settings, and one thread that is busy for `work` with each request. The
/// server never responds to `/never`. Return its address, and the errors with which its connections end.
fn busy_hyper_server(work: Duration) -> (SocketAddr, Arc<Mutex<Vec<String>>>) {
    use http_body_util::{BodyExt, Full};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    listener.set_nonblocking(true).unwrap();
    let errors = Arc::<Mutex<Vec<String>>>::default();
    let ended = errors.clone();
    let serve = async move {
        let listener = tokio::net::TcpListener::from_std(listener).unwrap();
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let service = hyper::service::service_fn(move |request: Request<hyper::body::Incoming>| async move {
                std::thread::sleep(work);
                if request.uri().path() == "/never" {
                    std::future::pending::<()>().await;
                }
                request.into_body().collect().await?;
                Ok::<_, hyper::Error>(Response::new(Full::new(Bytes::from_static(b"ok"))))
            });
            let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                .serve_connection(TokioIo::new(stream), service);
            let ended = ended.clone();
            tokio::spawn(async move {
                if let Err(error) = connection.await {
                    ended.lock().unwrap().push(format!("{error:?}"));
                }
            });
        }
    };
    std::thread::spawn(move || {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(serve);
    });
    (address, errors)
}

/// Send requests for `/never` in groups of 20, and reset each group after 2 ms, until `stop` is set. `flags` are the flags
/// of the HEADERS frames, and `body` is the part of the body that follows them. Count the requests in `requests`.
fn reset_requests(gateway: &Gateway, stop: &AtomicBool, requests: &AtomicUsize, (flags, body): (u8, &[u8])) {
    while !stop.load(Ordering::Relaxed) {
        let mut client = Http2::connect(gateway.address, &[]);
        let mut reader = client.stream.try_clone().unwrap();
        let discard = std::thread::spawn(move || drop(std::io::copy(&mut reader, &mut std::io::sink())));
        for group in (0..).map(|group| group * 20..group * 20 + 20) {
            let head = frames::block("POST", "/never", &[]);
            let start = |n: u32| [frame(HEADERS, flags, 2 * n + 1, &head), body_frame(2 * n + 1, body)].concat();
            let reset = |n: u32| frame(RST_STREAM, 0, 2 * n + 1, &8u32.to_be_bytes());
            let is_sent = client.send(&group.clone().flat_map(start).collect::<Vec<_>>());
            std::thread::sleep(Duration::from_millis(2));
            let is_reset = client.send(&group.flat_map(reset).collect::<Vec<_>>());
            if is_sent.and(is_reset).is_err() || stop.load(Ordering::Relaxed) {
                break;
            }
            requests.fetch_add(20, Ordering::Relaxed);
            // Leave the server some time for the requests of others.
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = client.stream.shutdown(std::net::Shutdown::Both);
        discard.join().unwrap();
    }
}

fn body_frame(stream: u32, body: &[u8]) -> Vec<u8> {
    if body.is_empty() { Vec::new() } else { frame(DATA, 0, stream, body) }
}

#[test]
fn resets_of_one_client_fail_no_request_of_others() {
    const OTHERS: usize = 20;
    for (what, flags, body) in
        [("without a body", END_HEADERS | END_STREAM, &b""[..]), ("with an unfinished body", END_HEADERS, &b"part"[..])]
    {
        let (server, errors) = busy_hyper_server(Duration::from_millis(1));
        let gateway = gateway(server, "response_timeout = \"1m\"\n");
        let (stop, requests) = (AtomicBool::new(false), AtomicUsize::new(0));
        let (gateway, requests) = (&gateway, &requests);
        let statuses: Vec<_> = std::thread::scope(|scope| {
            scope.spawn(|| reset_requests(gateway, &stop, requests, (flags, body)));
            let _stop = SetOnDrop(&stop);
            let others = (0..OTHERS).map(|index| {
                scope.spawn(move || {
                    let mut client = gateway.client();
                    let method = if index % 2 == 0 { "GET" } else { "POST" };
                    let mut statuses = Vec::new();
                    while statuses.len() < 5 || requests.load(Ordering::Relaxed) < 1000 {
                        statuses.push(client.request(method, "/", &[], b"").status);
                    }
                    statuses
                })
            });
            let others: Vec<_> = others.collect();
            others.into_iter().flat_map(|other| other.join().unwrap()).collect()
        });
        println!("{what}: {requests:?} requests reset, {} requests of others", statuses.len());
        let failed = statuses.iter().filter(|status| **status != 200).count();
        assert_eq!(failed, 0, "{what}: of {} requests", statuses.len());
        let errors = errors.lock().unwrap();
        assert!(!errors.iter().any(|error| error.contains("too_many_resets")), "{what}: {errors:?}");
    }
}

/// Resets of requests without a response are paced on a connection with requests of other clients, and sent at once if
/// there are none.
#[test]
fn resets_are_paced_while_others_use_the_connection() {
    // With a pace of 10 resets per second, 95 resets would take 9 s.
    for (is_shared, requests) in [(true, 25), (false, 95)] {
        let (server, ended) = silent();
        let gateway = gateway(server.address, "");
        let ask = || {
            let mut client = gateway.client();
            client.send(b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n");
            client
        };
        let other = is_shared.then(ask);
        let clients: Vec<_> = (0..requests).map(|_| ask()).collect();
        let all = requests + usize::from(is_shared);
        eventually("all requests have arrived", || server.connections().len() == all);
        let left = monotonic();
        drop(clients);
        let times: Vec<_> = (0..requests)
            .map(|_| {
                assert_eq!(ended.recv_timeout(MAX_WAIT).expect("the stream is reset"), Reason::CANCEL);
                left.elapsed()
            })
            .collect();
        if is_shared {
            assert!(times[10] > Duration::from_millis(900), "10 resets per second: {times:?}");
            assert!(times[20] > Duration::from_millis(1900), "10 resets per second: {times:?}");
        } else {
            assert!(times[requests - 1] < Duration::from_secs(8), "no reset is delayed: {times:?}");
        }
        // The other request continues, and new requests use another connection.
        assert!(ended.try_recv().is_err(), "the request of the other client is not reset");
        assert_eq!(gateway.get("/ok").status, 200);
        assert_eq!(server.connections().last(), Some(&1));
        drop(other);
    }
}

#[test]
fn response_shows_that_earlier_streams_may_be_reset() {
    // With a pace of 10 resets per second, 95 resets would take 9 s.
    const CLIENTS: usize = 95;
    let (server, ended) = silent();
    let gateway = gateway(server.address, "");
    let clients: Vec<_> = (0..=CLIENTS)
        .map(|_| {
            let mut client = gateway.client();
            client.send(b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n");
            client
        })
        .collect();
    eventually("all requests have arrived", || server.connections().len() == CLIENTS + 1);
    assert_eq!(gateway.get("/ok").status, 200);
    let mut clients = clients.into_iter();
    let _other = clients.next();
    let left = monotonic();
    drop(clients);
    for _ in 0..CLIENTS {
        assert_eq!(ended.recv_timeout(MAX_WAIT).expect("the stream is reset"), Reason::CANCEL);
    }
    assert!(left.elapsed() < Duration::from_secs(8), "no reset is delayed: {:?}", left.elapsed());
    assert_eq!(gateway.get("/ok").status, 200);
    assert_eq!(server.connections().last(), Some(&0));
}

#[test]
fn connection_without_free_streams_is_joined_by_others_up_to_a_maximum() {
    const STREAMS: usize = 2;
    const CONNECTIONS: usize = 4;
    let (server, _ended) = silent_with(h2::server::Builder::new().max_concurrent_streams(STREAMS as u32));
    let gateway = gateway(server.address, "");
    assert_eq!(gateway.get("/ok").status, 200);
    let mut held = Vec::new();
    for number in 0..STREAMS * CONNECTIONS {
        let mut client = gateway.client();
        client.send(b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n");
        held.push(client);
        eventually("the request has arrived", || server.connections().len() == number + 2);
    }
    assert_eq!(server.connections(), [0, 0, 0, 1, 1, 2, 2, 3, 3]);
    // All streams are in use. Another request waits until one is free.
    let mut waiting = gateway.client();
    waiting.send(b"GET /ok HTTP/1.1\r\nHost: a\r\n\r\n");
    assert_silent(waiting.stream.get_mut(), Duration::from_millis(300));
    held.clear();
    assert_eq!(waiting.reply().unwrap().status, 200);
    assert!(server.connections().into_iter().all(|connection| connection < CONNECTIONS));
}

#[test]
fn request_that_opened_a_shared_connection_is_retried_as_well() {
    let (sender, arrived) = channel();
    let server = Server::start(
        |number| if number == 1 { Then::Drop } else { Then::GoOn },
        move |number, request, respond| {
            let sender: Sender<_> = sender.clone();
            async move {
                if number == 0 {
                    sender.send(()).unwrap();
                    // Hold the request until the connection is closed.
                    let _ = read(&mut request.into_body()).await;
                    std::future::pending::<()>().await;
                }
                answer(respond, "ok");
            }
        },
    );
    let gateway = gateway(server.address, "");
    let mut first = gateway.client();
    first.send(b"GET /first HTTP/1.1\r\nHost: a\r\n\r\n");
    arrived.recv_timeout(MAX_WAIT).unwrap();
    assert_eq!(gateway.get("/second").status, 200);
    assert_eq!(first.reply().unwrap().status, 200);
    assert_eq!(server.connections(), [0, 0, 1, 1]);
}

#[test]
fn cancelled_grpc_streams_are_cancelled_at_the_upstream_within_a_second() {
    const CALLS: usize = 50;
    let (sender, ended) = channel();
    let server = Server::start(
        |_| Then::GoOn,
        move |_, request, mut respond| {
            let sender: Sender<_> = sender.clone();
            async move {
                // Half of the calls get response headers, and no call gets a message.
                let end = if request.uri().path().ends_with("/Headers") {
                    let mut stream = respond.send_response(Response::new(()), false).unwrap();
                    poll_fn(|cx| stream.poll_reset(cx)).await
                } else {
                    poll_fn(|cx| respond.poll_reset(cx)).await
                };
                // The gateway resets the stream, or closes the connection after the last stream of a connection with
                // many resets.
                match end {
                    Ok(reason) => assert_eq!(reason, Reason::CANCEL),
                    Err(error) => assert!(error.is_io(), "{error}"),
                }
                sender.send(()).unwrap();
            }
        },
    );
    let gateway = gateway(server.address, "");
    block_on(async {
        let mut client = client(&gateway).await;
        let mut calls = Vec::new();
        for number in 0..CALLS {
            client = client.ready().await.unwrap();
            let method = if number % 2 == 0 { "NoHeaders" } else { "Headers" };
            calls.push(client.send_request(call(method), false).unwrap());
        }
        let server = server.seen.clone();
        let all_arrived = move || eventually("all calls have arrived", || server.lock().unwrap().len() == CALLS);
        tokio::task::spawn_blocking(all_arrived).await.unwrap();
        let left = monotonic();
        drop(calls);
        let all_end = move || (0..CALLS).for_each(|_| ended.recv_timeout(MAX_WAIT).unwrap());
        tokio::task::spawn_blocking(all_end).await.unwrap();
        assert!(left.elapsed() < Duration::from_secs(1), "{:?}", left.elapsed());
    });
}
