//! Malformed HTTP/2 frames and requests, and HTTP/2 requests that are forwarded as HTTP/1.1: fault 5 in
//! docs/testing.md.

use std::convert::Infallible;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::Instant;

use crate::support::MAX_WAIT;
use crate::support::gateway::Gateway;
use crate::support::http2;
use crate::support::upstream::Upstream;
use bytes::Bytes;
use futures_util::stream;
use http_body_util::StreamBody;
use hyper::body::Frame;
use hyper_util::rt::{TokioExecutor, TokioIo};

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// Encode a frame (RFC 9113 §4.1).
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut out = (payload.len() as u32).to_be_bytes()[1..].to_vec();
    out.extend_from_slice(&[kind, flags]);
    out.extend_from_slice(&stream.to_be_bytes());
    out.extend_from_slice(payload);
    out
}

/// Encode a header field as a literal without indexing and without Huffman coding (RFC 7541 §6.2.2).
fn field(name: &[u8], value: &[u8]) -> Vec<u8> {
    let text = |text: &[u8]| match text.len() {
        length @ ..127 => [&[length as u8], text].concat(),
        length => {
            let mut rest = length - 127;
            let mut out = vec![127];
            while rest >= 128 {
                out.push((rest % 128) as u8 | 128);
                rest /= 128;
            }
            out.push(rest as u8);
            [&out, text].concat()
        }
    };
    [&[0], &text(name)[..], &text(value)].concat()
}

type Field<'a> = (&'a [u8], &'a [u8]);

fn block(fields: &[Field<'_>]) -> Vec<u8> {
    fields.iter().flat_map(|(name, value)| field(name, value)).collect()
}

/// How a stream ends.
#[derive(Debug, PartialEq, Clone, Copy)]
enum End {
    /// A response with this status.
    Status(u16),
    /// RST_STREAM with this code.
    Reset(u32),
    /// GOAWAY with this code, or a closed connection.
    Gone(u32),
}
use End::{Gone, Reset, Status};

/// The crate h2 sends this code for nearly all errors, even if the RFC specifies another code.
const PROTOCOL_ERROR: u32 = 1;
const FLOW_CONTROL_ERROR: u32 = 3;
const STREAM_CLOSED: u32 = 5;
const FRAME_SIZE_ERROR: u32 = 6;

struct Http2 {
    stream: TcpStream,
}

impl Http2 {
    fn connect(gateway: &Gateway) -> Http2 {
        let stream = TcpStream::connect(gateway.address).unwrap();
        stream.set_read_timeout(Some(MAX_WAIT)).unwrap();
        let mut connection = Http2 { stream };
        connection.send(&[&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &frame(SETTINGS, 0, 0, b"")].concat());
        connection
    }

    fn send(&mut self, bytes: &[u8]) {
        // The gateway may have closed the connection before all bytes are sent.
        let _ = self.stream.write_all(bytes);
    }

    /// Read the next frame: kind, stream, payload. Return `None` if the connection is closed.
    fn next(&mut self) -> Option<(u8, u32, Vec<u8>)> {
        let mut head = [0; 9];
        self.stream.read_exact(&mut head).ok()?;
        let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        self.stream.read_exact(&mut payload).ok()?;
        Some((head[3], u32::from_be_bytes(head[5..9].try_into().unwrap()), payload))
    }

    /// Read frames until this stream ends, and return how it ended.
    fn end_of(&mut self, stream: u32) -> End {
        loop {
            let Some((kind, id, payload)) = self.next() else { return Gone(0) };
            let number = |from: usize| u32::from_be_bytes(payload[from..from + 4].try_into().unwrap());
            match kind {
                HEADERS if id == stream => return Status(status(&payload)),
                RST_STREAM if id == stream => return Reset(number(0)),
                GOAWAY => return Gone(number(4)),
                _ => {}
            }
        }
    }
}

/// Return the status in a header block. It is the first field: an index, or Huffman-coded digits (RFC 7541 §6, Appendix
/// B).
fn status(block: &[u8]) -> u16 {
    // A dynamic table size update may precede the field.
    let block = if block[0] >> 5 == 1 { &block[1..] } else { block };
    match block[0] {
        index @ 0x88..=0x8e => [200, 204, 206, 304, 400, 404, 500][usize::from(index - 0x88)],
        _ => {
            let mut bits = block[2..2 + usize::from(block[1] & 127)]
                .iter()
                .flat_map(|byte| (0..8).rev().map(move |bit| byte >> bit & 1));
            let mut take = |count: u32| (0..count).fold(0, |number, _| number << 1 | u16::from(bits.next().unwrap()));
            (0..3).fold(0, |number, _| {
                let digit = match take(5) {
                    digit @ 0..=2 => digit,
                    more => (more << 1 | take(1)) - 0b011001 + 3,
                };
                number * 10 + digit
            })
        }
    }
}

fn gateway(upstream: &Upstream) -> Gateway {
    Gateway::start(&format!(
        "[server]\nworkers = 1\n[[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"api\"\n\
         [upstream.api]\nservers = [\"{}\"]\n",
        upstream.url()
    ))
}

/// A valid request, which the cases modify.
const GOOD: &[Field<'_>] =
    &[(b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"a.test"), (b":path", b"/spoiled")];

/// Each case has a name, an RFC with a section, header fields that follow those of a valid request, and the expected
/// end of the stream.
const FIELDS: &[(&str, &str, &[Field<'_>], End)] = &[
    ("a name in capitals", "9113 8.2.1", &[(b"X-Upper", b"1")], Gone(PROTOCOL_ERROR)),
    ("a name with a colon", "9113 8.2.1", &[(b"x:y", b"1")], Gone(PROTOCOL_ERROR)),
    ("a name with a space", "9113 8.2.1", &[(b"x y", b"1")], Gone(PROTOCOL_ERROR)),
    ("a name that ends in a space", "9113 8.2.1", &[(b"transfer-encoding ", b"chunked")], Gone(PROTOCOL_ERROR)),
    ("a name with CR LF", "9113 8.2.1", &[(b"x: y\r\ntransfer-encoding", b"chunked")], Gone(PROTOCOL_ERROR)),
    ("a name with NUL", "9113 8.2.1", &[(b"x\0", b"1")], Gone(PROTOCOL_ERROR)),
    ("a name above ASCII", "9113 8.2.1", &[(b"x\xe9", b"1")], Gone(PROTOCOL_ERROR)),
    ("no name", "9113 8.2.1", &[(b"", b"1")], Gone(PROTOCOL_ERROR)),
    ("a value with CR LF", "9113 8.2.1", &[(b"x", b"1\r\ntransfer-encoding: chunked")], Gone(PROTOCOL_ERROR)),
    ("a value with CR", "9113 8.2.1", &[(b"x", b"1\rx-user-id: bob")], Gone(PROTOCOL_ERROR)),
    ("a value with LF", "9113 8.2.1", &[(b"x", b"1\nx-user-id: bob")], Gone(PROTOCOL_ERROR)),
    ("a value with NUL", "9113 8.2.1", &[(b"x", b"1\0")], Gone(PROTOCOL_ERROR)),
    ("a value that begins with a space", "9113 8.2.1", &[(b"x", b" 1")], Reset(PROTOCOL_ERROR)),
    ("a value that ends in a tab", "9113 8.2.1", &[(b"x", b"1\t")], Reset(PROTOCOL_ERROR)),
    ("a value of one space", "9113 8.2.1", &[(b"x", b" ")], Reset(PROTOCOL_ERROR)),
    (
        "a value with two line ends",
        "9113 8.2.1",
        &[(b"x", b"1\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n")],
        Gone(PROTOCOL_ERROR),
    ),
    ("transfer-encoding", "9113 8.2.2", &[(b"transfer-encoding", b"chunked")], Reset(PROTOCOL_ERROR)),
    ("transfer-encoding: identity", "9113 8.2.2", &[(b"transfer-encoding", b"identity")], Reset(PROTOCOL_ERROR)),
    ("connection", "9113 8.2.2", &[(b"connection", b"x-user-id")], Reset(PROTOCOL_ERROR)),
    ("connection: close", "9113 8.2.2", &[(b"connection", b"close")], Reset(PROTOCOL_ERROR)),
    ("keep-alive", "9113 8.2.2", &[(b"keep-alive", b"1")], Reset(PROTOCOL_ERROR)),
    ("proxy-connection", "9113 8.2.2", &[(b"proxy-connection", b"close")], Reset(PROTOCOL_ERROR)),
    ("upgrade", "9113 8.2.2", &[(b"upgrade", b"websocket")], Reset(PROTOCOL_ERROR)),
    ("te other than trailers", "9113 8.2.2", &[(b"te", b"chunked")], Reset(PROTOCOL_ERROR)),
    ("a pseudo-field behind fields", "9113 8.3", &[(b"x", b"1"), (b":path", b"/other")], Reset(PROTOCOL_ERROR)),
    ("two methods", "9113 8.3", &[(b":method", b"GET")], Reset(PROTOCOL_ERROR)),
    ("two paths", "9113 8.3", &[(b":path", b"/other")], Reset(PROTOCOL_ERROR)),
    ("two schemes", "9113 8.3", &[(b":scheme", b"https")], Reset(PROTOCOL_ERROR)),
    ("two authorities", "9113 8.3", &[(b":authority", b"b.test")], Reset(PROTOCOL_ERROR)),
    ("a pseudo-field that there is not", "9113 8.3", &[(b":other", b"1")], Gone(PROTOCOL_ERROR)),
    ("a status", "9113 8.3.1", &[(b":status", b"200")], Reset(PROTOCOL_ERROR)),
    (":protocol without CONNECT", "8441 4", &[(b":protocol", b"websocket")], Reset(PROTOCOL_ERROR)),
    ("a length that is less than the body", "9113 8.1.1", &[(b"content-length", b"1")], Reset(PROTOCOL_ERROR)),
    ("a length that is more than the body", "9113 8.1.1", &[(b"content-length", b"99")], Reset(PROTOCOL_ERROR)),
    ("a length that is no number", "9113 8.1.1", &[(b"content-length", b"x")], Reset(PROTOCOL_ERROR)),
    ("a length with a sign", "9113 8.1.1", &[(b"content-length", b"+5")], Reset(PROTOCOL_ERROR)),
    ("a list of lengths", "9113 8.1.1", &[(b"content-length", b"5, 5")], Reset(PROTOCOL_ERROR)),
    ("two lengths", "9113 8.1.1", &[(b"content-length", b"5"), (b"content-length", b"6")], Reset(PROTOCOL_ERROR)),
    (
        "two lengths, the last of which is right",
        "9113 8.1.1",
        &[(b"content-length", b"0"), (b"content-length", b"5")],
        Reset(PROTOCOL_ERROR),
    ),
    ("an empty length", "9113 8.1.1", &[(b"content-length", b"")], Reset(PROTOCOL_ERROR)),
    ("two Hosts", "9110 7.2", &[(b"host", b"b.test"), (b"host", b"c.test")], Status(400)),
    ("a Host that is none", "9110 7.2", &[(b"host", b"a.test\t/x")], Status(400)),
];

/// Each case has a name, an RFC with a section, all pseudo-header fields of a request, and the expected end of the
/// stream.
const PSEUDO: &[(&str, &str, &[Field<'_>], End)] = &[
    (
        "no method",
        "9113 8.3.1",
        &[(b":scheme", b"http"), (b":authority", b"a"), (b":path", b"/spoiled")],
        Reset(PROTOCOL_ERROR),
    ),
    (
        "no scheme",
        "9113 8.3.1",
        &[(b":method", b"POST"), (b":authority", b"a"), (b":path", b"/spoiled")],
        Reset(PROTOCOL_ERROR),
    ),
    (
        "no path",
        "9113 8.3.1",
        &[(b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"a")],
        Reset(PROTOCOL_ERROR),
    ),
    (
        "an empty path",
        "9113 8.3.1",
        &[(b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"a"), (b":path", b"")],
        Reset(PROTOCOL_ERROR),
    ),
    (
        "no host at all",
        "9113 8.3.1",
        &[(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/spoiled")],
        Status(400),
    ),
    (
        "a method with a space",
        "9110 9.1",
        &[(b":method", b"GET /x HTTP/1.1"), (b":scheme", b"http"), (b":authority", b"a"), (b":path", b"/spoiled")],
        Gone(PROTOCOL_ERROR),
    ),
    (
        "a method with CR LF",
        "9110 9.1",
        &[(b":method", b"GET\r\nx: y"), (b":scheme", b"http"), (b":authority", b"a"), (b":path", b"/spoiled")],
        Gone(PROTOCOL_ERROR),
    ),
    (
        "a path with a space",
        "9113 8.3.1",
        &[(b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"a"), (b":path", b"/spoiled HTTP/1.1")],
        Reset(PROTOCOL_ERROR),
    ),
    (
        "a path with CR LF",
        "9113 8.3.1",
        &[(b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"a"), (b":path", b"/spoiled\r\nx: y")],
        Reset(PROTOCOL_ERROR),
    ),
    (
        "a path without a slash",
        "9113 8.3.1",
        &[(b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"a"), (b":path", b"spoiled")],
        Reset(PROTOCOL_ERROR),
    ),
    (
        "a path that is a URI",
        "9113 8.3.1",
        &[(b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"a"), (b":path", b"http://b/spoiled")],
        Reset(PROTOCOL_ERROR),
    ),
    (
        "a path that is a star",
        "9113 8.3.1",
        &[(b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"a"), (b":path", b"*")],
        Status(400),
    ),
    (
        "an authority with a user",
        "9113 8.3.1",
        &[(b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"u@a"), (b":path", b"/spoiled")],
        Status(400),
    ),
    (
        "an authority with CR LF",
        "9113 8.3.1",
        &[(b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"a\r\nx: y"), (b":path", b"/spoiled")],
        Reset(PROTOCOL_ERROR),
    ),
    (
        "an authority with a path",
        "9113 8.3.1",
        &[(b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"a/x"), (b":path", b"/spoiled")],
        Reset(PROTOCOL_ERROR),
    ),
    (
        "an empty authority",
        "9113 8.3.1",
        &[(b":method", b"POST"), (b":scheme", b"http"), (b":authority", b""), (b":path", b"/spoiled")],
        Reset(PROTOCOL_ERROR),
    ),
    (
        "a scheme that is none",
        "9113 8.3.1",
        &[(b":method", b"POST"), (b":scheme", b"h ttp"), (b":authority", b"a"), (b":path", b"/spoiled")],
        Reset(PROTOCOL_ERROR),
    ),
    (
        "a scheme with a second target",
        "9113 8.3.1",
        &[(b":method", b"POST"), (b":scheme", b"http://b/?"), (b":authority", b"a"), (b":path", b"/spoiled")],
        Reset(PROTOCOL_ERROR),
    ),
    (
        "another scheme",
        "9110 4.2",
        &[(b":method", b"POST"), (b":scheme", b"gopher"), (b":authority", b"a"), (b":path", b"/spoiled")],
        Status(400),
    ),
    ("CONNECT", "9113 8.5", &[(b":method", b"CONNECT"), (b":authority", b"a:443")], Status(501)),
    (
        "CONNECT with a path",
        "9113 8.5",
        &[(b":method", b"CONNECT"), (b":scheme", b"http"), (b":authority", b"a:443"), (b":path", b"/")],
        Reset(PROTOCOL_ERROR),
    ),
    (
        "CONNECT for a WebSocket",
        "8441 4",
        &[
            (b":method", b"CONNECT"),
            (b":protocol", b"websocket"),
            (b":scheme", b"http"),
            (b":authority", b"a"),
            (b":path", b"/spoiled"),
        ],
        Reset(PROTOCOL_ERROR),
    ),
    (
        "TRACE",
        "9110 9.3.8",
        &[(b":method", b"TRACE"), (b":scheme", b"http"), (b":authority", b"a"), (b":path", b"/spoiled")],
        Status(501),
    ),
];

#[test]
fn malformed_http2_requests_reset_their_streams_and_are_not_forwarded() {
    let upstream = Upstream::start();
    let gateway = gateway(&upstream);
    let mut failures = String::new();
    let spoiled = FIELDS.iter().map(|(name, section, fields, end)| {
        // Append the fields of the case to those of the valid request.
        (*name, *section, [GOOD, *fields].concat(), *end)
    });
    let all = spoiled.chain(PSEUDO.iter().map(|(name, section, fields, end)| (*name, *section, fields.to_vec(), *end)));
    let mut cases = 0;
    for (name, section, fields, expected) in all {
        let mut connection = Http2::connect(&gateway);
        connection.send(&frame(HEADERS, END_HEADERS, 1, &block(&fields)));
        connection.send(&frame(DATA, END_STREAM, 1, b"hello"));
        let found = connection.end_of(1);
        if found != expected {
            failures.push_str(&format!("{name} (RFC {section}): expected {expected:?}, found {found:?}\n"));
        }
        // The next request on this connection and the next request to the upstream must succeed.
        let before = upstream.count();
        if !matches!(found, Gone(_)) {
            let next = [GOOD[0], GOOD[1], GOOD[2], (b":path", b"/next")];
            connection.send(&frame(HEADERS, END_HEADERS, 3, &block(&next)));
            connection.send(&frame(DATA, END_STREAM, 3, b"next"));
            assert_eq!(connection.end_of(3), Status(200), "after {name}");
            assert_eq!((upstream.last().target(), &upstream.last().body[..]), ("/next", &b"next"[..]), "after {name}");
        }
        assert_eq!(gateway.get("/probe").status, 200, "after {name}");
        assert_eq!(upstream.last().target(), "/probe", "after {name}");
        let seen = upstream.seen.lock().unwrap();
        let others = seen[before..].iter().filter(|seen| !matches!(seen.target(), "/next" | "/probe")).count();
        assert_eq!(others, 0, "{name} is not forwarded");
        cases += 1;
    }
    assert!(failures.is_empty(), "{failures}");
    assert!(upstream.seen.lock().unwrap().iter().all(|seen| !seen.target().contains("spoiled")));
    assert!(!gateway.log().contains("panicked"), "{}", gateway.log());
    println!("fault 5: {cases} malformed requests, 0 forwarded, 0 panics");
}

#[test]
fn http2_protocol_violations_end_the_stream_or_connection() {
    let upstream = Upstream::start();
    let gateway = gateway(&upstream);
    let head = || frame(HEADERS, END_HEADERS, 1, &block(GOOD));
    let start = |stream, flags, bytes: &[u8]| frame(HEADERS, flags, stream, bytes);
    let good = block(GOOD);
    let window = |stream, size: u32| frame(WINDOW_UPDATE, 0, stream, &size.to_be_bytes());
    let cases = [
        ("DATA on stream 0", "6.1", vec![frame(DATA, 0, 0, b"x")], Gone(PROTOCOL_ERROR)),
        ("DATA before HEADERS", "5.1", vec![frame(DATA, 0, 1, b"x")], Gone(PROTOCOL_ERROR)),
        ("padding longer than DATA", "6.1", vec![head(), frame(DATA, 8, 1, &[9, 1])], Gone(PROTOCOL_ERROR)),
        ("HEADERS on stream 0", "6.2", vec![start(0, END_HEADERS, &good)], Gone(PROTOCOL_ERROR)),
        ("HEADERS on an even stream", "5.1.1", vec![start(2, END_HEADERS, &good)], Gone(PROTOCOL_ERROR)),
        (
            "a stream that is older than the last",
            "5.1.1",
            vec![start(5, END_HEADERS, &good), head()],
            Gone(PROTOCOL_ERROR),
        ),
        ("padding longer than HEADERS", "6.2", vec![start(1, END_HEADERS | 8, &[200, 0])], Gone(PROTOCOL_ERROR)),
        (
            "a stream that depends on itself",
            "5.3.1",
            vec![start(1, END_HEADERS | 32, &[&[0, 0, 0, 1, 0][..], &good].concat())],
            Reset(PROTOCOL_ERROR),
        ),
        ("an index of no entry", "7541 2.3.3", vec![start(1, END_HEADERS, &[0xff, 0x80, 0x01])], Gone(PROTOCOL_ERROR)),
        ("index 0", "7541 6.1", vec![start(1, END_HEADERS, &[0x80])], Gone(PROTOCOL_ERROR)),
        (
            "an integer without an end",
            "7541 5.1",
            vec![start(1, END_HEADERS, &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff])],
            Gone(PROTOCOL_ERROR),
        ),
        ("half a string", "7541 5.2", vec![start(1, END_HEADERS, &[0, 5, b'x'])], Gone(PROTOCOL_ERROR)),
        (
            "padding of Huffman code that is too long",
            "7541 5.2",
            vec![start(1, END_HEADERS, &[0, 1, b'x', 0x82, 0xff, 0xff])],
            Gone(PROTOCOL_ERROR),
        ),
        (
            "a table that is larger than allowed",
            "7541 6.3",
            vec![start(1, END_HEADERS, &[0x3f, 0xe1, 0xff, 0x03])],
            Gone(PROTOCOL_ERROR),
        ),
        (
            "something between HEADERS and CONTINUATION",
            "6.10",
            vec![start(1, 0, &good), frame(DATA, 0, 1, b"x")],
            Gone(PROTOCOL_ERROR),
        ),
        (
            "CONTINUATION of another stream",
            "6.10",
            vec![start(1, 0, &good), frame(CONTINUATION, END_HEADERS, 3, b"")],
            Gone(PROTOCOL_ERROR),
        ),
        ("CONTINUATION of nothing", "6.10", vec![frame(CONTINUATION, END_HEADERS, 1, &good)], Gone(PROTOCOL_ERROR)),
        ("RST_STREAM of a stream that is not", "6.4", vec![frame(RST_STREAM, 0, 1, &[0; 4])], Gone(PROTOCOL_ERROR)),
        ("RST_STREAM of five bytes", "6.4", vec![head(), frame(RST_STREAM, 0, 1, &[0; 5])], Gone(PROTOCOL_ERROR)),
        ("SETTINGS of a stream", "6.5", vec![frame(SETTINGS, 0, 1, b"")], Gone(PROTOCOL_ERROR)),
        ("SETTINGS of five bytes", "6.5", vec![frame(SETTINGS, 0, 0, &[0; 5])], Gone(PROTOCOL_ERROR)),
        ("SETTINGS with ACK and more", "6.5", vec![frame(SETTINGS, 1, 0, &[0; 6])], Gone(PROTOCOL_ERROR)),
        ("a window of 2^31", "6.5.2", vec![frame(SETTINGS, 0, 0, &[0, 4, 0x80, 0, 0, 0])], Gone(PROTOCOL_ERROR)),
        ("frames of 2^24", "6.5.2", vec![frame(SETTINGS, 0, 0, &[0, 5, 1, 0, 0, 0])], Gone(PROTOCOL_ERROR)),
        ("PUSH_PROMISE of a client", "8.4", vec![frame(5, END_HEADERS, 1, &[0, 0, 0, 2])], Gone(PROTOCOL_ERROR)),
        ("PING of seven bytes", "6.7", vec![frame(6, 0, 0, &[0; 7])], Gone(PROTOCOL_ERROR)),
        ("PING of a stream", "6.7", vec![frame(6, 0, 1, &[0; 8])], Gone(PROTOCOL_ERROR)),
        ("GOAWAY of a stream", "6.8", vec![frame(GOAWAY, 0, 1, &[0; 8])], Gone(PROTOCOL_ERROR)),
        ("WINDOW_UPDATE of nothing", "6.9", vec![window(0, 0)], Gone(PROTOCOL_ERROR)),
        (
            "WINDOW_UPDATE beyond 2^31",
            "6.9.1",
            vec![window(0, 0x7fff_ffff), window(0, 0x7fff_ffff)],
            Gone(FLOW_CONTROL_ERROR),
        ),
        ("WINDOW_UPDATE of three bytes", "6.9", vec![frame(WINDOW_UPDATE, 0, 0, &[0, 0, 1])], Gone(PROTOCOL_ERROR)),
        ("a frame that is larger than allowed", "4.2", vec![frame(DATA, 0, 1, &[0; 20_000])], Gone(FRAME_SIZE_ERROR)),
        (
            "DATA behind the end",
            "5.1",
            vec![start(1, END_HEADERS | END_STREAM, &good), frame(DATA, END_STREAM, 1, b"x")],
            Gone(PROTOCOL_ERROR),
        ),
        ("a second head that does not end", "8.1", vec![head(), start(1, END_HEADERS, &good)], Reset(PROTOCOL_ERROR)),
    ];
    let mut failures = String::new();
    for (name, section, frames, expected) in &cases {
        let mut connection = Http2::connect(&gateway);
        connection.send(&frames.concat());
        let found = connection.end_of(1);
        // The upstream may have responded before the invalid frame arrived.
        let whole = name.ends_with("behind the end") && matches!(found, Status(200) | Reset(STREAM_CLOSED));
        if found != *expected && !whole {
            failures.push_str(&format!("{name} (RFC 9113 {section}): expected {expected:?}, found {found:?}\n"));
        }
        assert_eq!(gateway.get("/probe").status, 200, "after {name}");
        assert_eq!(upstream.last().target(), "/probe", "after {name}");
    }
    assert!(failures.is_empty(), "{failures}");
    let whole =
        upstream.seen.lock().unwrap().iter().filter(|seen| seen.target() != "/probe").map(|seen| seen.body.len()).max();
    assert!(whole.is_none_or(|length| length == 0), "the upstream received a complete body of an invalid stream");
    assert!(!gateway.log().contains("panicked"), "{}", gateway.log());
    println!("fault 5: {} protocol violations, 0 panics", cases.len());
}

/// A request (its method, its fields after the pseudo-header fields, and its body), and the headers that the upstream
/// must receive.
type Downgrade =
    (&'static str, &'static [Field<'static>], &'static [u8], &'static [(&'static str, &'static [&'static str])]);

const DOWNGRADES: &[Downgrade] = &[
    ("GET", &[], b"", &[("content-length", &[]), ("transfer-encoding", &[])]),
    ("POST", &[(b"content-length", b"5")], b"hello", &[("content-length", &["5"]), ("transfer-encoding", &[])]),
    ("POST", &[(b"content-length", b"0005")], b"hello", &[("content-length", &["5"]), ("transfer-encoding", &[])]),
    ("POST", &[(b"content-length", b"5"), (b"content-length", b"5")], b"hello", &[("content-length", &["5"])]),
    ("POST", &[], b"hello", &[("content-length", &[]), ("transfer-encoding", &["chunked"])]),
    ("GET", &[], b"hello", &[("content-length", &[]), ("transfer-encoding", &["chunked"])]),
    ("GET", &[(b"content-length", b"5")], b"hello", &[("content-length", &["5"]), ("transfer-encoding", &[])]),
    ("POST", &[], b"0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n", &[("transfer-encoding", &["chunked"])]),
    ("POST", &[(b"content-length", b"0")], b"", &[("content-length", &["0"])]),
    ("POST", &[(b"content-length", b"")], b"", &[("content-length", &["0"])]),
    (
        "GET",
        &[(b"cookie", b"a=1"), (b"cookie", b"b=2"), (b"cookie", b"c=3; d=4")],
        b"",
        &[("cookie", &["a=1; b=2; c=3; d=4"])],
    ),
    ("GET", &[(b"host", b"other.test")], b"", &[("host", &["a.test"]), ("x-forwarded-host", &["a.test"])]),
    ("GET", &[(b"te", b"trailers")], b"", &[("te", &["trailers"])]),
    ("GET", &[(b"expect", b"100-continue")], b"", &[("expect", &[])]),
    (
        "GET",
        &[(b"x_forwarded_for", b"192.0.2.1"), (b"x-forwarded-for", b"192.0.2.2")],
        b"",
        &[("x-forwarded-for", &["127.0.0.1"]), ("x_forwarded_for", &[])],
    ),
    ("GET", &[(b"x", b": y"), (b"x", b"\xc3\xa9")], b"", &[]),
    ("M-SEARCH", &[(b"via", b"1.1 p")], b"", &[("via", &["1.1 p, 2.0 sluicegate"])]),
];

#[test]
fn http2_request_is_forwarded_as_one_valid_http1_request() {
    let upstream = Upstream::start();
    let gateway = gateway(&upstream);
    let mut connection = Http2::connect(&gateway);
    for (index, (method, fields, body, expected)) in DOWNGRADES.iter().enumerate() {
        let stream = 2 * index as u32 + 1;
        let path = format!("/{index}");
        let pseudo: [Field<'_>; 4] = [
            (b":method", method.as_bytes()),
            (b":scheme", b"https"),
            (b":authority", b"a.test"),
            (b":path", path.as_bytes()),
        ];
        let flags = if body.is_empty() { END_HEADERS | END_STREAM } else { END_HEADERS };
        connection.send(&frame(HEADERS, flags, stream, &block(&[&pseudo, *fields].concat())));
        if !body.is_empty() {
            // Send the body in two DATA frames, of which the last one is empty.
            connection.send(&[frame(DATA, 0, stream, body), frame(DATA, END_STREAM, stream, b"")].concat());
        }
        let what = format!("{method} {path} with {} fields", fields.len());
        assert_eq!(connection.end_of(stream), Status(200), "{what}");
        assert_eq!(upstream.count(), index + 1, "{what}: one request");
        let seen = upstream.last();
        assert!(seen.head.starts_with(&format!("{method} {path} HTTP/1.1\r\n")), "{what}: {}", seen.head);
        assert_eq!(seen.body, *body, "{what}");
        for (name, values) in *expected {
            assert_eq!(seen.headers(name), *values, "{what}: {name} in {}", seen.head);
        }
        for name in ["connection", "upgrade", "keep-alive", ":method", ":path"] {
            assert_eq!(seen.headers(name), [""; 0], "{what}: {name} in {}", seen.head);
        }
    }
    // The gateway drops trailers. h2 accepts pseudo-header fields in trailers, although RFC 9113 §8.1 forbids them.
    let stream = 2 * DOWNGRADES.len() as u32 + 1;
    let trailers = block(&[(b":path", b"/other"), (b"x-trailer", b"1"), (b"host", b"b.test")]);
    connection.send(&[frame(HEADERS, END_HEADERS, stream, &block(GOOD)), frame(DATA, 0, stream, b"hello")].concat());
    connection.send(&frame(HEADERS, END_HEADERS | END_STREAM, stream, &trailers));
    assert_eq!(connection.end_of(stream), Status(200));
    let seen = upstream.last();
    assert_eq!((seen.target(), &seen.body[..]), ("/spoiled", &b"hello"[..]), "{}", seen.head);
    assert_eq!((seen.headers("host"), seen.headers("x-trailer")), (vec!["a.test"], vec![]), "{}", seen.head);
    println!("fault 5: {} requests forwarded as HTTP/1.1, 0 second requests", DOWNGRADES.len());
}

/// Spaces and tabs before and after a header value. In HTTP/1.1, they are not part of the value (RFC 9110 §5.5).
const EDGES: [(&str, &str); 8] =
    [("", " "), (" ", ""), (" ", " "), ("", "\t"), ("\t", ""), ("\t ", " \t"), ("   ", ""), ("", "   ")];

/// Headers that the gateway interprets, each with a value.
const USES: [(&str, &str); 9] = [
    ("x-api-key", "k1"),
    ("x-tenant", "t1"),
    ("cookie", "sid=s1"),
    ("authorization", "Bearer abc"),
    ("x-plan", "free"),
    ("content-type", "application/grpc"),
    ("x-cost", "5"),
    ("x-forwarded-for", "192.0.2.1"),
    ("x-other", "1"),
];

#[test]
fn spaces_around_values_are_malformed_in_http2_and_trimmed_in_http1() {
    let upstream = Upstream::start();
    let limit = |name: &str, by: &str| {
        format!(
            "[limit.{name}]\nby = \"{by}\"\non_missing = \"ip\"\nalgorithm = \"fixed-window\"\n\
             start = \"first-request\"\nquota = \"1000/hour\"\n"
        )
    };
    let route = |name: &str, rest: &str| {
        format!(
            "[[route]]\nname = \"{name}\"\npath = \"/{{*rest}}\"\nupstream = \"api\"\n\
             identify = [\"keys\"]\nlimits = [\"key\", \"tenant\", \"session\"]\nresponse_headers = {{ set = {{ x-route = \"{name}\" }} }}\n{rest}"
        )
    };
    let gateway = Gateway::start(&format!(
        "[server]\nworkers = 1\n[auth.keys]\nkind = \"api-key\"\non_unknown = \"accept\"\nforward_credential = true\n{}{}{}{}{}[upstream.api]\nservers = [\"{}\"]\n",
        limit("key", "api-key"),
        limit("tenant", "header:x-tenant"),
        limit("session", "cookie:sid"),
        route("others", ""),
        route("free", "match.headers.x-plan.exact = \"free\"\n"),
        upstream.url()
    ));
    let plain: Vec<_> = USES.iter().filter(|(name, _)| *name != "x-forwarded-for").copied().collect();
    let mut left = 1000;
    let mut refused = 0;
    for (name, value) in USES {
        for (before, behind) in EDGES {
            let what = format!("{name}: {:?}", format!("{before}{value}{behind}"));
            let request = |edges: bool| {
                let mut request = http::Request::get("http://a.test/x");
                for (other, value) in USES {
                    let (before, behind) = if edges && other == name { (before, behind) } else { ("", "") };
                    request = request.header(other, format!("{before}{value}{behind}"));
                }
                request.body(&b""[..]).unwrap()
            };
            let count = upstream.count();
            let answers = http2::ask(gateway.address, [request(true), request(false)]);
            assert_eq!((answers[0].status(), answers[1].status()), (None, Some(200)), "{what}");
            assert_eq!(upstream.count(), count + 1, "{what}: a malformed request is not forwarded");
            refused += 1;
            // In HTTP/1.1, spaces around a value do not change its meaning. The same limits and the same route must
            // apply, and the upstream must receive the same bytes.
            let lines: Vec<_> = USES
                .iter()
                .map(|(other, value)| match *other == name {
                    true => (*other, format!("{before}{value}{behind}")),
                    false => (*other, (*value).to_owned()),
                })
                .collect();
            let lines: Vec<_> = lines.iter().map(|(name, value)| (*name, value.as_str())).collect();
            let reply = gateway.client().get_with("/x", &lines);
            left -= 2;
            for limit in ["key", "tenant", "session"] {
                assert_eq!(reply.remaining(limit), left, "{what}: {limit}");
            }
            assert_eq!(reply.header("x-route"), Some("free"), "{what}");
            for (name, value) in &plain {
                assert_eq!(upstream.last().headers(name), [*value], "{what}: {}", upstream.last().head);
            }
        }
    }
    assert_eq!(refused, USES.len() * EDGES.len());
    // Trailers with spaces around values are rejected as well.
    let mut connection = Http2::connect(&gateway);
    connection.send(&[frame(HEADERS, END_HEADERS, 1, &block(GOOD)), frame(DATA, 0, 1, b"hello")].concat());
    connection.send(&frame(HEADERS, END_HEADERS | END_STREAM, 1, &block(&[(b"x-trailer", b"1 ")])));
    assert_eq!(connection.end_of(1), Status(400));
}

#[test]
fn max_headers_applies_to_both_http_versions() {
    let upstream = Upstream::start();
    for (bound, config) in [(100, ""), (10, "max_headers = 10\n"), (200, "max_headers = 200\n")] {
        let gateway = Gateway::start(&format!(
            "[server]\nworkers = 1\n{config}[[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"api\"\n\
             [upstream.api]\nservers = [\"{}\"]\n",
            upstream.url()
        ));
        for (count, cookies, expected) in
            [(bound, 0, 200), (bound + 1, 0, 431), (800, 0, 431), (bound - 1, 90, 200), (bound, 90, 431)]
        {
            let what = format!("{count} headers and {cookies} cookies of {bound}");
            let before = upstream.count();
            let request = (0..count).fold(http::Request::get("http://a.test/x"), |request, _| request.header("x", "y"));
            let request = (0..cookies).fold(request, |request, index| request.header("cookie", format!("c{index}=1")));
            let answers = http2::ask(gateway.address, [request.body(&b""[..]).unwrap()]);
            assert_eq!(answers[0].status(), Some(expected), "{what} over HTTP/2");
            // In HTTP/1.1, `Host` counts as a header. In HTTP/2, `:authority` does not count.
            let lines = "x: y\r\n".repeat(count - 1);
            let cookies = if cookies > 0 { "Cookie: c=1\r\n" } else { "" };
            let mut client = gateway.client();
            client.send(format!("GET /x HTTP/1.1\r\nHost: a\r\n{lines}{cookies}\r\n").as_bytes());
            assert_eq!(client.head().unwrap().status, expected, "{what} over HTTP/1.1");
            assert_eq!(upstream.count(), before + if expected == 200 { 2 } else { 0 }, "{what}");
        }
    }
}

const PRIORITY: u8 = 2;
const PING: u8 = 6;
const PADDED: u8 = 8;
const ENHANCE_YOUR_CALM: u32 = 11;

#[test]
fn floods_of_small_frames_end_the_connection_with_goaway() {
    let upstream = Upstream::start();
    // Disable `min_body_rate`, so that the open request does not time out.
    let gateway = Gateway::start(&format!(
        "[server]\nworkers = 1\nmin_body_rate = \"0B\"\n[[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"api\"\n\
         [upstream.api]\nservers = [\"{}\"]\n",
        upstream.url()
    ));
    let open = frame(HEADERS, END_HEADERS, 1, &block(GOOD));
    for (what, frame) in [
        ("PING", frame(PING, 0, 0, &[0; 8])),
        ("PING with ACK", frame(PING, 1, 0, &[0; 8])),
        ("SETTINGS", frame(SETTINGS, 0, 0, b"")),
        ("PRIORITY", frame(PRIORITY, 0, 1, &[0, 0, 0, 0, 1])),
        ("WINDOW_UPDATE", frame(WINDOW_UPDATE, 0, 0, &[0, 0, 0, 1])),
        ("WINDOW_UPDATE of a stream", frame(WINDOW_UPDATE, 0, 1, &[0, 0, 0, 1])),
        ("a type that there is not", frame(0xfa, 0, 0, b"x")),
        ("empty DATA", frame(DATA, 0, 1, b"")),
        ("DATA of one byte", frame(DATA, 0, 1, b"x")),
        ("DATA of four bytes", frame(DATA, 0, 1, b"xxxx")),
        ("empty DATA with a length of padding", frame(DATA, PADDED, 1, &[0])),
        ("empty DATA with padding", frame(DATA, PADDED, 1, &[&[20][..], &[0; 20]].concat())),
        ("DATA of one byte with padding", frame(DATA, PADDED, 1, &[&[20, b'x'][..], &[0; 20]].concat())),
    ] {
        let mut connection = Http2::connect(&gateway);
        connection.send(&open);
        let mut sender = connection.stream.try_clone().unwrap();
        let flood = std::thread::spawn(move || {
            let _ = sender.write_all(&frame.repeat(20_000));
        });
        assert_eq!(connection.end_of(1), Gone(ENHANCE_YOUR_CALM), "{what}");
        flood.join().unwrap();
    }
    assert_eq!(gateway.get("/after").status, 200);
}

#[test]
fn control_frames_of_normal_traffic_do_not_end_the_connection() {
    let body = vec![b'x'; 32 << 20];
    let upstream = Upstream::responding(move |_| {
        [format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len()).as_bytes(), &body].concat()
    });
    let gateway = gateway(&upstream);
    let mut connection = Http2::connect(&gateway);
    connection.send(&frame(PING, 0, 0, &[0; 8]).repeat(500));
    let fields: &[Field<'_>] =
        &[(b":method", b"GET"), (b":scheme", b"http"), (b":authority", b"a.test"), (b":path", b"/large")];
    connection.send(&frame(HEADERS, END_HEADERS | END_STREAM, 1, &block(fields)));
    // Send WINDOW_UPDATE frames as curl and browsers do, but for every 2 KiB of received data. These are about 32,000
    // frames in total.
    let mut received = 0;
    while received < 32 << 20 {
        let mut head = [0; 9];
        connection.stream.read_exact(&mut head).expect("the connection stays open");
        let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        connection.stream.read_exact(&mut payload).expect("the connection stays open");
        assert_ne!(head[3], GOAWAY);
        if head[3] == DATA {
            received += payload.len();
            for part in payload.chunks(2048) {
                let size = (part.len() as u32).to_be_bytes();
                connection.send(&[frame(WINDOW_UPDATE, 0, 0, &size), frame(WINDOW_UPDATE, 0, 1, &size)].concat());
            }
        }
    }
}

/// Send POST requests over one connection, one after the other. Each body consists of DATA frames with these sizes in
/// bytes. Return the number of requests that got a response.
fn uploads(gateway: &Gateway, sizes: &[usize], requests: usize) -> usize {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let stream = tokio::net::TcpStream::connect(gateway.address).await.unwrap();
        let (mut sender, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        for answered in 0..requests {
            let frames: Vec<_> = sizes.iter().map(|size| Frame::data(Bytes::from(vec![b'x'; *size]))).collect();
            let body = StreamBody::new(stream::iter(frames.into_iter().map(Ok::<_, Infallible>)));
            let request = http::Request::post(format!("http://{}/upload", gateway.address)).body(body).unwrap();
            match sender.send_request(request).await {
                Ok(response) => assert_eq!(response.status(), 200),
                Err(_) => return answered,
            }
        }
        requests
    })
}

/// The crate h2 closes a connection if it has buffered too many short DATA frames. In this test, requests follow one
/// another, so the frames of only one request are buffered at a time.
#[test]
fn short_data_frames_count_unless_they_are_grpc_messages_or_remainders() {
    let upstream = Upstream::start();
    let gateway = gateway(&upstream);
    for (what, sizes) in
        [("one byte", vec![1; 500]), ("four bytes", vec![4; 500]), ("remainders of little", [255, 1, 1, 1].repeat(200))]
    {
        let answered = uploads(&gateway, &sizes, 40);
        assert!((1..40).contains(&answered), "{what}: {answered} requests are answered");
    }
    for (what, sizes) in [("gRPC messages without content", vec![5; 500]), ("remainders", [256, 1].repeat(500))] {
        assert_eq!(uploads(&gateway, &sizes, 40), 40, "{what}");
        assert_eq!(upstream.last().body.len(), sizes.iter().sum::<usize>(), "{what}");
    }
    assert_eq!(uploads(&gateway, &[1; 900], 1), 1, "a connection may send 900 short frames at once");
}

/// The cost of a PING flood is bounded: the gateway closes each flooding connection after a number of frames. During
/// the floods, it serves the requests of other clients.
#[test]
#[allow(clippy::disallowed_methods)] // the budget grows with time
fn client_is_served_during_ping_floods() {
    const FLOODERS: usize = 4;
    let upstream = Upstream::start();
    let gateway = gateway(&upstream);
    let served = AtomicBool::new(false);
    let (tell, ended) = channel();
    std::thread::scope(|scope| {
        for _ in 0..FLOODERS {
            let (tell, served, gateway) = (tell.clone(), &served, &gateway);
            scope.spawn(move || {
                while !served.load(Ordering::Relaxed) {
                    let begun = Instant::now();
                    let (answered, end) = flood_of_pings(gateway);
                    assert_eq!(end, Gone(ENHANCE_YOUR_CALM), "after {answered} answers");
                    // The gateway answers 1,000 PINGs at once, and then 200 per second. A few more answers may be in
                    // flight.
                    let most = 1_200 + 200 * (1 + begun.elapsed().as_secs());
                    assert!(answered <= most, "{answered} answers of {most}");
                    let _ = tell.send(());
                }
            });
        }
        drop(tell);
        let floods = ended.iter().take(FLOODERS).count();
        let mut client = gateway.client();
        let statuses: Vec<_> = (0..300).map(|_| client.get("/beside").status).collect();
        let meanwhile = ended.try_iter().count();
        served.store(true, Ordering::Relaxed);
        assert!(statuses.iter().all(|status| *status == 200), "{statuses:?}");
        assert_eq!(floods, FLOODERS);
        println!("300 requests beside {meanwhile} connections that each sent 20,000 PINGs");
    });
    assert_eq!(upstream.count(), 300);
}

/// Send PINGs until the connection ends. Return the number of acknowledgements, and how the connection ended.
fn flood_of_pings(gateway: &Gateway) -> (u64, End) {
    let mut connection = Http2::connect(gateway);
    let mut sender = connection.stream.try_clone().unwrap();
    let flood = std::thread::spawn(move || {
        let _ = sender.write_all(&frame(PING, 0, 0, &[0; 8]).repeat(20_000));
    });
    let mut answered = 0;
    let end = loop {
        match connection.next() {
            Some((PING, _, _)) => answered += 1,
            Some((GOAWAY, _, payload)) => break Gone(u32::from_be_bytes(payload[4..8].try_into().unwrap())),
            Some(_) => {}
            None => break Gone(0),
        }
    };
    flood.join().unwrap();
    (answered, end)
}

#[test]
fn warnings_of_h2_do_not_flood_the_log() {
    let upstream = Upstream::start();
    let gateway = gateway(&upstream);
    // h2 logs a warning for each unexpected acknowledgement.
    for _ in 0..5 {
        let mut connection = Http2::connect(&gateway);
        connection.send(&frame(PING, 1, 0, &[7; 8]).repeat(500));
        connection.send(&frame(HEADERS, END_HEADERS | END_STREAM, 1, &block(GOOD)));
        assert_eq!(connection.end_of(1), Status(200));
    }
    let lines = gateway.log().lines().filter(|line| line.contains("PING")).count();
    assert!((1..=20).contains(&lines), "{lines} lines");
}
