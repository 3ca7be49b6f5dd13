//! How hyper handles hostile requests without the gateway's code. The gateway relies on some of this behaviour, and
//! adds the checks that hyper lacks.
//!
//! If a case fails after an update of hyper, review the code of the gateway that relies on this behaviour.

#![allow(clippy::disallowed_methods)] // the test measures times

use std::convert::Infallible;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use crate::support::MAX_WAIT;
use crate::support::client::Client;
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;

/// Start a hyper server like the one in `src/listener.rs`, but without the gateway. The body of each response describes
/// the request as text. The server reads request bodies, except for paths that start with `/early`.
fn bare(configure: impl FnOnce(&mut Builder<TokioExecutor>)) -> SocketAddr {
    let mut builder = Builder::new(TokioExecutor::new());
    configure(&mut builder);
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            tell.send(listener.local_addr().unwrap()).unwrap();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let builder = builder.clone();
                tokio::spawn(async move {
                    let _ = builder.serve_connection(TokioIo::new(stream), service_fn(answer)).await;
                });
            }
        });
    });
    told.recv().unwrap()
}

async fn answer(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let (parts, body) = request.into_parts();
    let mut said = format!("{} {}", parts.method, parts.uri);
    for name in ["host", "content-length", "transfer-encoding", "cookie", "expect", "x-a", "x_a", "x.a"] {
        for value in parts.headers.get_all(name) {
            said.push_str(&format!("|{name}={}", value.as_bytes().escape_ascii()));
        }
    }
    if !parts.uri.path().starts_with("/early") {
        match body.collect().await {
            Ok(body) => said.push_str(&format!("|body={}", body.to_bytes().escape_ascii())),
            Err(_) => said.push_str("|body aborted"),
        }
    }
    Ok(Response::new(Full::new(Bytes::from(said))))
}

/// Send `bytes`, and then a GET request for `/last` with `Connection: close`. Return all responses as text.
fn exchange(address: SocketAddr, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(MAX_WAIT)).unwrap();
    let last = b"GET /last HTTP/1.1\r\nHost: l\r\nConnection: close\r\n\r\n";
    let _ = stream.write_all(&[bytes, last].concat());
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

/// Return the statuses and bodies of the responses.
fn summary(answer: &str) -> String {
    let answers = answer.split("HTTP/1.1 ").skip(1).map(|answer| {
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((answer, ""));
        format!("{} {body}", &head[..3]).trim().to_owned()
    });
    answers.collect::<Vec<_>>().join(" / ")
}

/// Each case has a claim, the bytes to send, and the expected responses of hyper. If hyper keeps the connection open,
/// the last response is the one for `/last`.
const HTTP_1: &[(&str, &str, &str)] = &[
    // ---- framing
    (
        "length and chunks: the length is dropped, and the connection ends",
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
        "200 POST /|host=a|transfer-encoding=chunked|body=x",
    ),
    (
        "chunks and length: the length is dropped, and the connection ends",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n1\r\nx\r\n0\r\n\r\n",
        "200 POST /|host=a|transfer-encoding=chunked|body=x",
    ),
    (
        "length and chunks with keep-alive: the connection ends nevertheless",
        "POST / HTTP/1.1\r\nHost: a\r\nConnection: keep-alive\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "200 POST /|host=a|transfer-encoding=chunked|body=",
    ),
    (
        "a bad length behind chunks is not looked at",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: x\r\n\r\n0\r\n\r\n",
        "200 POST /|host=a|transfer-encoding=chunked|body=",
    ),
    (
        "identity, then chunked",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "200 POST /|host=a|transfer-encoding=identity|transfer-encoding=chunked|body= / 200 GET /last|host=l|body=",
    ),
    (
        "gzip, chunked",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        "200 POST /|host=a|transfer-encoding=gzip, chunked|body= / 200 GET /last|host=l|body=",
    ),
    (
        "chunked, chunked",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
        "200 POST /|host=a|transfer-encoding=chunked, chunked|body= / 200 GET /last|host=l|body=",
    ),
    (
        "chunked is not last: 400",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
        "400",
    ),
    ("identity alone: 400", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: identity\r\n\r\n", "400"),
    (
        "equal lengths become one",
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\nx",
        "200 POST /|host=a|content-length=1|body=x / 200 GET /last|host=l|body=",
    ),
    ("different lengths: 400", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx", "400"),
    (
        "zeros in front of a length stay",
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 01\r\n\r\nx",
        "200 POST /|host=a|content-length=01|body=x / 200 GET /last|host=l|body=",
    ),
    (
        "a length of 2^64 - 1 is 431",
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 18446744073709551615\r\n\r\n",
        "431",
    ),
    (
        "lines may end in LF",
        "GET / HTTP/1.1\nHost: a\nX-A: 1\n\n",
        "200 GET /|host=a|x-a=1|body= / 200 GET /last|host=l|body=",
    ),
    (
        "a space behind a chunk's size",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1 \t\r\nx\r\n0\r\n\r\n",
        "200 POST /|host=a|transfer-encoding=chunked|body=x / 200 GET /last|host=l|body=",
    ),
    (
        "a trailer that ends in LF swallows what follows",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nx: y\n\r\nGET /swallowed HTTP/1.1\r\nHost: a\r\n\r\n",
        "200 POST /|host=a|transfer-encoding=chunked|body= / 200 GET /last|host=l|body=",
    ),
    (
        "an LF in place of the last line takes the next request for trailers",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\nGET /swallowed HTTP/1.1\r\nHost: a\r\n\r\n",
        "200 POST /|host=a|transfer-encoding=chunked|body= / 200 GET /last|host=l|body=",
    ),
    (
        "a GET may have a body",
        "GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
        "200 GET /|host=a|transfer-encoding=chunked|body=x / 200 GET /last|host=l|body=",
    ),
    // ---- host and target
    ("no Host", "GET / HTTP/1.1\r\n\r\n", "200 GET /|body= / 200 GET /last|host=l|body="),
    (
        "two Hosts",
        "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        "200 GET /|host=a|host=b|body= / 200 GET /last|host=l|body=",
    ),
    (
        "any Host",
        "GET / HTTP/1.1\r\nHost: a/b c@d\r\n\r\n",
        "200 GET /|host=a/b c@d|body= / 200 GET /last|host=l|body=",
    ),
    (
        "an absolute target beside another Host",
        "GET http://b/ HTTP/1.1\r\nHost: a\r\n\r\n",
        "200 GET http://b/|host=a|body= / 200 GET /last|host=l|body=",
    ),
    (
        "any scheme",
        "GET gopher://b/x HTTP/1.1\r\nHost: a\r\n\r\n",
        "200 GET gopher://b/x|host=a|body= / 200 GET /last|host=l|body=",
    ),
    (
        "a user in the target",
        "GET http://u@b/ HTTP/1.1\r\nHost: a\r\n\r\n",
        "200 GET http://u@b/|host=a|body= / 200 GET /last|host=l|body=",
    ),
    ("GET *", "GET * HTTP/1.1\r\nHost: a\r\n\r\n", "200 GET *|host=a|body= / 200 GET /last|host=l|body="),
    (
        "a target that is an authority",
        "GET a:80 HTTP/1.1\r\nHost: a\r\n\r\n",
        "200 GET a:80|host=a|body= / 200 GET /last|host=l|body=",
    ),
    (
        "a fragment is cut off",
        "GET /a#b HTTP/1.1\r\nHost: a\r\n\r\n",
        "200 GET /a|host=a|body= / 200 GET /last|host=l|body=",
    ),
    (
        "raw UTF-8 in a path",
        "GET /caf\u{e9} HTTP/1.1\r\nHost: a\r\n\r\n",
        "200 GET /caf\u{e9}|host=a|body= / 200 GET /last|host=l|body=",
    ),
    (
        "a backslash in a path",
        "GET /a\\b HTTP/1.1\r\nHost: a\r\n\r\n",
        "200 GET /a\\b|host=a|body= / 200 GET /last|host=l|body=",
    ),
    (
        "encodings of what is dangerous",
        "GET /%00%2F%5C%23%3F%25%zz HTTP/1.1\r\nHost: a\r\n\r\n",
        "200 GET /%00%2F%5C%23%3F%25%zz|host=a|body= / 200 GET /last|host=l|body=",
    ),
    (
        "dots",
        "GET /a/../b//c/%2e%2e HTTP/1.1\r\nHost: a\r\n\r\n",
        "200 GET /a/../b//c/%2e%2e|host=a|body= / 200 GET /last|host=l|body=",
    ),
    ("TRACE", "TRACE / HTTP/1.1\r\nHost: a\r\n\r\n", "200 TRACE /|host=a|body= / 200 GET /last|host=l|body="),
    ("any method", "GeT! / HTTP/1.1\r\nHost: a\r\n\r\n", "200 GeT! /|host=a|body= / 200 GET /last|host=l|body="),
    // ---- header fields
    (
        "underscores and dots in names",
        "GET / HTTP/1.1\r\nHost: a\r\nX_A: 1\r\nX.A: 2\r\n\r\n",
        "200 GET /|host=a|x_a=1|x.a=2|body= / 200 GET /last|host=l|body=",
    ),
    (
        "an unknown Expect",
        "GET / HTTP/1.1\r\nHost: a\r\nExpect: x\r\n\r\n",
        "200 GET /|host=a|expect=x|body= / 200 GET /last|host=l|body=",
    ),
    ("a space before the colon: 400", "GET / HTTP/1.1\r\nHost: a\r\nX-A : 1\r\n\r\n", "400"),
    ("a folded line: 400", "GET / HTTP/1.1\r\nHost: a\r\nX-A: 1\r\n 2\r\n\r\n", "400"),
    ("a CR within a line: 400", "GET / HTTP/1.1\r\nHost: a\r\nX-A: 1\r2\r\n\r\n", "400"),
    ("a NUL in a value: 400", "GET / HTTP/1.1\r\nHost: a\r\nX-A: 1\x002\r\n\r\n", "400"),
    (
        "bytes above ASCII in a value",
        "GET / HTTP/1.1\r\nHost: a\r\nX-A: \u{e9}\r\n\r\n",
        "200 GET /|host=a|x-a=\\xc3\\xa9|body= / 200 GET /last|host=l|body=",
    ),
    // ---- 100-continue
    (
        "100 goes out when the body is first asked for",
        "POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 0\r\n\r\n",
        "200 POST /|host=a|content-length=0|expect=100-continue|body= / 200 GET /last|host=l|body=",
    ),
];

#[test]
fn hyper_handles_hostile_http1_as_expected() {
    let address = bare(|_| {});
    let mut wrong = String::new();
    for (claim, sent, expected) in HTTP_1 {
        let found = summary(&exchange(address, sent.as_bytes()));
        if found != *expected {
            wrong.push_str(&format!("{claim}\n  expected {expected}\n  found    {found}\n"));
        }
    }
    println!("hyper: {} claims about HTTP/1", HTTP_1.len());
    assert!(wrong.is_empty(), "{wrong}");
}

/// hyper sends `100 Continue` when the service polls the body, and never if the service does not read the body.
#[test]
fn hyper_sends_100_continue_when_the_body_is_polled() {
    let address = bare(|_| {});
    for (path, first) in [("/early", 200), ("/", 100)] {
        let mut client = Client::connect(address);
        client.send(
            format!("POST {path} HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\n").as_bytes(),
        );
        assert_eq!(client.head().unwrap().status, first, "{path}");
    }
}

/// If the service responds without reading the body and the client continues to send, hyper resets the connection, and
/// the client may lose the response.
#[test]
fn hyper_does_not_drain_unread_bodies() {
    let address = bare(|_| {});
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(MAX_WAIT)).unwrap();
    stream.write_all(b"POST /early HTTP/1.1\r\nHost: a\r\nContent-Length: 67108864\r\n\r\n").unwrap();
    let block = vec![0; 64 << 10];
    let written = (0..1024).take_while(|_| stream.write_all(&block).is_ok()).count();
    assert!(written < 1024, "the server closes while the client sends");
}

/// Without a timer, hyper has no timeout for incomplete request headers. With a timer, it has no timeout while it does
/// not know yet whether the client uses HTTP/1 or HTTP/2.
#[test]
fn hyper_has_no_default_head_timeout() {
    let address = bare(|_| {});
    let timed = bare(|builder| {
        builder.http1().timer(hyper_util::rt::TokioTimer::new()).header_read_timeout(Duration::from_millis(100));
    });
    let closes = |address, bytes: &[u8], wait| {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(bytes).unwrap();
        stream.set_read_timeout(Some(wait)).unwrap();
        // After the timeout, hyper sends 408 or nothing, and then closes the connection.
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).is_ok()
    };
    let short = Duration::from_millis(500);
    for (what, address, bytes, wait, expected) in [
        ("no timer", address, &b"GET / HTTP/1.1\r\n"[..], short, false),
        ("a timer", timed, b"GET / HTTP/1.1\r\n", MAX_WAIT, true),
        ("a timer, but no byte", timed, b"", short, false),
        ("a timer, but the preface of HTTP/2 may come", timed, b"PRI * HT", short, false),
        (
            "a timer, but the preface of HTTP/2 is all there is",
            timed,
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            short,
            false,
        ),
    ] {
        assert_eq!(closes(address, bytes, wait), expected, "{what}");
    }
}

/// hyper rejects request headers that exceed its maximum size, which is far above 32 KiB by default.
#[test]
fn hyper_buffers_heads_up_to_its_limit() {
    let heads = |address, length: usize| {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(MAX_WAIT)).unwrap();
        let head = [&b"GET / HTTP/1.1\r\nHost: a\r\nX-A: "[..], &vec![b'a'; length], b"\r\n\r\n"].concat();
        let _ = stream.write_all(&head);
        let mut first = [0; 12];
        stream.read_exact(&mut first).ok().map(|()| String::from_utf8_lossy(&first[9..]).into_owned())
    };
    let address = bare(|_| {});
    assert_eq!(heads(address, 300 << 10).as_deref(), Some("200"), "by default, hyper accepts far more than 32 KiB");
    // One last read may exceed the limit and complete the headers. hyper may therefore accept headers of up to twice
    // the limit.
    assert!(matches!(heads(address, 900 << 10).as_deref(), None | Some("431")), "the bound of hyper is 417,792 bytes");
    let small = bare(|builder| {
        builder.http1().max_buf_size(32 << 10);
    });
    assert_eq!(heads(small, 16 << 10).as_deref(), Some("200"), "below a configured bound");
    assert!(matches!(heads(small, 64 << 10).as_deref(), None | Some("431")), "above a configured bound");
    let uri = |length: usize| {
        let answer = exchange(address, format!("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", "a".repeat(length)).as_bytes());
        answer.get(9..12).map(str::to_owned)
    };
    assert_eq!(uri(60_000).as_deref(), Some("200"), "targets of less than 64 KiB");
    assert_eq!(uri(70_000).as_deref(), Some("414"), "longer targets are rejected");
    let lines = |count: usize| {
        let lines = "x: 1\r\n".repeat(count - 1);
        exchange(address, format!("GET / HTTP/1.1\r\nHost: a\r\n{lines}\r\n").as_bytes()).get(9..12).map(str::to_owned)
    };
    assert_eq!((lines(100).as_deref(), lines(101).as_deref()), (Some("200"), Some("431")), "100 headers by default");
}

/// In HTTP/2, hyper does not join `Cookie` headers, and it accepts an `:authority` that differs from `Host`.
#[test]
fn hyper_handles_hostile_http2_as_expected() {
    let address = bare(|_| {});
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let talk = async {
        let stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let handshake = hyper::client::conn::http2::handshake::<_, _, Full<Bytes>>;
        let (mut sender, connection) = handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let request = Request::get("http://b/x")
            .header("host", "a")
            .header("cookie", "a=1")
            .header("cookie", "b=2")
            .header("x_a", "1")
            .body(Full::default());
        let response = sender.send_request(request.unwrap()).await.unwrap();
        String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
    };
    let said = runtime.block_on(async { tokio::time::timeout(MAX_WAIT, talk).await.expect("a response over HTTP/2") });
    assert_eq!(said, "GET http://b/x|host=a|cookie=a=1|cookie=b=2|x_a=1|body=");
}
