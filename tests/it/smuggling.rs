//! Request smuggling by conflicting framings, malformed lengths and chunks, and upgrades. The tests check what the
//! upstream received. Faults 1, 2 and 7 in docs/testing.md.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex};

use crate::support::MAX_WAIT;
use crate::support::client::Client;
use crate::support::gateway::Gateway;
use crate::support::upstream::{Upstream, read_head, serve};

/// Start a gateway with one worker, so that all requests share the upstream connections. Smuggling requires shared
/// connections.
fn gateway(upstream: &str) -> Gateway {
    Gateway::start(&format!(
        "[server]\nworkers = 1\n[[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"api\"\n\
         [upstream.api]\nservers = [\"{upstream}\"]\n"
    ))
}

/// Send all bytes at once and read until the gateway closes the connection.
fn exchange(gateway: &Gateway, bytes: &[u8], half_close: bool) -> Vec<u8> {
    let mut stream = TcpStream::connect(gateway.address).unwrap();
    stream.set_read_timeout(Some(MAX_WAIT)).unwrap();
    // If the gateway rejects the request, writing the rest may fail.
    let _ = stream.write_all(bytes);
    if half_close {
        let _ = stream.shutdown(Shutdown::Write);
    }
    let mut answer = Vec::new();
    if let Err(error) = stream.read_to_end(&mut answer) {
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "not closed after {}", bytes.escape_ascii());
    }
    answer
}

/// Return the statuses of all responses in order.
fn statuses(answer: &[u8]) -> Vec<u16> {
    let text = String::from_utf8_lossy(answer);
    text.split("HTTP/1.1 ").skip(1).map(|rest| rest[..3].parse().unwrap()).collect()
}

/// A last request, after which the gateway closes the connection.
const LAST: &[u8] = b"GET /last HTTP/1.1\r\nHost: a.test\r\nConnection: close\r\n\r\n";
const SMUGGLED: &str = "GET /smuggled HTTP/1.1\r\nHost: a.test\r\n\r\n";

/// How the gateway must handle a request with two framings.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Framing {
    /// Chunked framing applies. The connection is closed, because Content-Length contradicts it.
    Both,
    /// Chunked framing applies. The request has no Content-Length.
    Chunks,
    /// Content-Length applies. The request has no Transfer-Encoding.
    Length,
    /// The framing is ambiguous: the request is rejected with this status, and the connection is closed.
    Refused(u16),
}
use Framing::{Both, Chunks, Length, Refused};

/// Name, RFC and section, headers (`$` stands for the length), and the handling.
const TWO_FRAMINGS: &[(&str, &str, &str, Framing)] = &[
    ("length, then chunks", "9112 6.3", "Content-Length: $\r\nTransfer-Encoding: chunked", Both),
    ("chunks, then length", "9112 6.3", "Transfer-Encoding: chunked\r\nContent-Length: $", Both),
    ("a length twice", "9112 6.3", "Content-Length: $\r\nContent-Length: $\r\nTransfer-Encoding: chunked", Both),
    (
        "a length on both sides",
        "9112 6.3",
        "Content-Length: $\r\nTransfer-Encoding: chunked\r\nContent-Length: $",
        Both,
    ),
    (
        "two lengths behind chunks",
        "9112 6.3",
        "Transfer-Encoding: chunked\r\nContent-Length: $\r\nContent-Length: 1",
        Both,
    ),
    ("a bad length behind chunks", "9112 6.3", "Transfer-Encoding: chunked\r\nContent-Length: x", Both),
    ("another case", "9110 5.1", "content-length: $\r\ntransfer-encoding: Chunked", Both),
    ("capitals", "9110 5.1", "CONTENT-LENGTH: $\r\nTRANSFER-ENCODING: CHUNKED", Both),
    ("no space", "9112 5", "Content-Length:$\r\nTransfer-Encoding:chunked", Both),
    ("tabs and spaces", "9112 5", "Content-Length: $\r\nTransfer-Encoding: \t chunked\t ", Both),
    ("a line that ends in LF", "9112 2.2", "X: y\nContent-Length: $\nTransfer-Encoding: chunked", Both),
    (
        "nominated chunks",
        "9110 7.6.1",
        "Connection: transfer-encoding\r\nContent-Length: $\r\nTransfer-Encoding: chunked",
        Both,
    ),
    (
        "a nominated length",
        "9110 7.6.1",
        "Connection: content-length\r\nContent-Length: $\r\nTransfer-Encoding: chunked",
        Both,
    ),
    ("kept alive", "9112 6.1", "Connection: keep-alive\r\nContent-Length: $\r\nTransfer-Encoding: chunked", Both),
    ("with Expect", "9110 10.1.1", "Expect: 100-continue\r\nContent-Length: $\r\nTransfer-Encoding: chunked", Both),
    ("with TE", "9110 10.1.4", "TE: chunked\r\nContent-Length: $\r\nTransfer-Encoding: chunked", Both),
    ("an alias of the length", "3875 4.1.18", "Content_Length: $\r\nTransfer-Encoding: chunked", Chunks),
    ("a dotted length", "3875 4.1.18", "content.length: $\r\nTransfer-Encoding: chunked", Chunks),
    ("an alias of the coding", "3875 4.1.18", "Content-Length: $\r\nTransfer_Encoding: chunked", Length),
    ("a dotted coding", "3875 4.1.18", "Content-Length: $\r\ntransfer.encoding: chunked", Length),
    ("a name that goes on", "9110 5.1", "Content-Length: $\r\nTransfer-Encoding-: chunked", Length),
    ("a name that begins early", "9110 5.1", "Content-Length: $\r\nX-Transfer-Encoding: chunked", Length),
    ("a name without hyphen", "9110 5.1", "Content-Length: $\r\nTransferEncoding: chunked", Length),
    ("TE alone", "9110 10.1.4", "Content-Length: $\r\nTE: chunked", Length),
    ("Content-Encoding", "9110 8.4", "Content-Length: $\r\nContent-Encoding: chunked", Length),
    ("a coding that is none", "9112 6.1", "Content-Length: $\r\nTransfer-Encoding: xchunked", Refused(400)),
    ("identity", "9112 7", "Content-Length: $\r\nTransfer-Encoding: identity", Refused(400)),
    ("chunked is not last", "9112 6.3", "Content-Length: $\r\nTransfer-Encoding: chunked, identity", Refused(400)),
    ("gzip is last", "9112 6.3", "Content-Length: $\r\nTransfer-Encoding: chunked, gzip", Refused(400)),
    ("chunked twice", "9112 6.1", "Content-Length: $\r\nTransfer-Encoding: chunked, chunked", Refused(501)),
    ("gzip first", "9112 6.1", "Content-Length: $\r\nTransfer-Encoding: gzip, chunked", Refused(501)),
    ("an unknown coding first", "9112 6.1", "Content-Length: $\r\nTransfer-Encoding: x, chunked", Refused(501)),
    ("an empty element first", "9110 5.6.1", "Content-Length: $\r\nTransfer-Encoding: , chunked", Refused(501)),
    ("an empty element last", "9110 5.6.1", "Content-Length: $\r\nTransfer-Encoding: chunked,", Refused(400)),
    (
        "two lines",
        "9112 6.1",
        "Content-Length: $\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        Refused(501),
    ),
    (
        "identity in a line before",
        "9112 6.1",
        "Content-Length: $\r\nTransfer-Encoding: identity\r\nTransfer-Encoding: chunked",
        Refused(501),
    ),
    (
        "identity in a line behind",
        "9112 6.1",
        "Content-Length: $\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity",
        Refused(400),
    ),
    (
        "an empty line before",
        "9112 6.1",
        "Content-Length: $\r\nTransfer-Encoding:\r\nTransfer-Encoding: chunked",
        Refused(501),
    ),
    (
        "an empty line behind",
        "9112 6.1",
        "Content-Length: $\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding:",
        Refused(400),
    ),
    ("nothing but two lines", "9112 6.1", "Transfer-Encoding: x\r\nTransfer-Encoding: chunked", Refused(501)),
    ("a parameter", "9112 7", "Content-Length: $\r\nTransfer-Encoding: chunked;q=1", Refused(400)),
    ("in quotes", "9112 7", "Content-Length: $\r\nTransfer-Encoding: \"chunked\"", Refused(400)),
    ("a vertical tab before", "9110 5.5", "Content-Length: $\r\nTransfer-Encoding: \x0bchunked", Refused(400)),
    ("a vertical tab behind", "9110 5.5", "Content-Length: $\r\nTransfer-Encoding: chunked\x0b", Refused(400)),
    ("a NUL behind", "9110 5.5", "Content-Length: $\r\nTransfer-Encoding: chunked\0", Refused(400)),
    ("a letter that looks like k", "9110 5.5", "Content-Length: $\r\nTransfer-Encoding: chun\u{212a}ed", Refused(400)),
    ("a no-break space", "9110 5.5", "Content-Length: $\r\nTransfer-Encoding: \u{a0}chunked", Refused(400)),
    ("a space before the colon", "9112 5.1", "Content-Length: $\r\nTransfer-Encoding : chunked", Refused(400)),
    ("a tab before the colon", "9112 5.1", "Content-Length: $\r\nTransfer-Encoding\t: chunked", Refused(400)),
    ("a line that begins with a space", "9112 2.2", " Transfer-Encoding: chunked\r\nContent-Length: $", Refused(400)),
    ("folded from the name", "9112 5.2", "Content-Length: $\r\nTransfer-Encoding:\r\n chunked", Refused(400)),
    ("folded from another line", "9112 5.2", "Content-Length: $\r\nX: y\r\n Transfer-Encoding: chunked", Refused(400)),
    ("folded with a tab", "9112 5.2", "Content-Length: $\r\nX: y\r\n\tTransfer-Encoding: chunked", Refused(400)),
    ("a name in quotes", "9110 5.1", "Content-Length: $\r\n\"Transfer-Encoding\": chunked", Refused(400)),
    ("a NUL in the name", "9110 5.1", "Content-Length: $\r\nTransfer-Encoding\0: chunked", Refused(400)),
    (
        "a letter of another script in the name",
        "9110 5.1",
        "Content-Length: $\r\nTransfer-Enc\u{43e}ding: chunked",
        Refused(400),
    ),
    ("a CR before", "9112 2.2", "Content-Length: $\r\nX: y\rTransfer-Encoding: chunked", Refused(400)),
    ("a CR behind", "9112 2.2", "Content-Length: $\r\nTransfer-Encoding: chunked\rX: y", Refused(400)),
    ("a bad length before chunks", "9112 6.3", "Content-Length: x\r\nTransfer-Encoding: chunked", Refused(400)),
    (
        "two lengths before chunks",
        "9112 6.3",
        "Content-Length: $\r\nContent-Length: 1\r\nTransfer-Encoding: chunked",
        Refused(400),
    ),
];

#[test]
fn request_with_two_framings_is_never_read_as_two() {
    let upstream = Upstream::start();
    let gateway = gateway(&upstream.url());
    // With chunked framing, the body ends at once, and the second request follows. With Content-Length, the second
    // request is part of the body.
    let after = format!("0\r\n\r\n{SMUGGLED}");
    // With chunked framing, the second request is the body. With Content-Length, the second request follows the first
    // line of the body.
    let first = format!("{:x}\r\n", SMUGGLED.len());
    let inside = format!("{first}{SMUGGLED}\r\n0\r\n\r\n");
    let mut variants = 0;
    for (name, section, lines, framing) in TWO_FRAMINGS {
        for (method, (length, body)) in ["POST", "GET"]
            .into_iter()
            .flat_map(|method| [(method, (after.len(), &after)), (method, (first.len(), &inside))])
        {
            // With this framing, the second request is a separate, legitimate request: skip the case.
            let plain = if body == &after { Chunks } else { Length };
            if *framing == plain {
                continue;
            }
            let lines = lines.replace('$', &length.to_string());
            let head = format!("{method} /first HTTP/1.1\r\nHost: a.test\r\n{lines}\r\n\r\n");
            let what = format!("{name} (RFC {section}), {}", format!("{head}{body}").escape_debug());
            upstream.seen.lock().unwrap().clear();
            let answer = exchange(&gateway, &[head.as_bytes(), body.as_bytes(), LAST].concat(), false);
            let statuses: Vec<_> = statuses(&answer).into_iter().filter(|status| *status != 100).collect();
            let seen = std::mem::take(&mut *upstream.seen.lock().unwrap());
            let targets: Vec<_> = seen.iter().map(|seen| seen.target()).collect();
            let expected = match framing {
                Refused(status) => (vec![*status], &[][..]),
                Both => (vec![200], &["/first"][..]),
                Chunks | Length => (vec![200, 200], &["/first", "/last"][..]),
            };
            assert_eq!((statuses, &targets[..]), expected, "{what}");
            for seen in &seen {
                let framings = (seen.headers("content-length").len(), seen.headers("transfer-encoding"));
                assert!(
                    matches!(&framings, (1, codings) if codings.is_empty())
                        || framings == (0, vec!["chunked"])
                        || seen.target() == "/last",
                    "{what}: {}",
                    seen.head
                );
            }
            if let Some(seen) = seen.first() {
                let body = match framing {
                    Length => body,
                    _ if body == &after => "",
                    _ => SMUGGLED,
                };
                assert_eq!(seen.body, body.as_bytes(), "{what}");
            }
            variants += 1;
        }
    }
    let seconds = upstream.heads.lock().unwrap().iter().filter(|head| head.starts_with("GET /smuggled")).count();
    assert_eq!(seconds, 0);
    println!(
        "fault 1: {} families, {variants} variants, {seconds} second requests, 0 heads with both",
        TWO_FRAMINGS.len()
    );
    assert!(TWO_FRAMINGS.len() >= 40);
    // The upstream connections, which all requests shared, still work.
    assert_eq!(Client::connect(gateway.address).get("/").status, 200);
}

/// Malformed Content-Length headers for the body `hello`.
const LENGTHS: &[(&str, &str, &[u8])] = &[
    ("a sign", "9110 8.6", b"Content-Length: +5"),
    ("below zero", "9110 8.6", b"Content-Length: -5"),
    ("less than nothing", "9110 8.6", b"Content-Length: -0"),
    ("hexadecimal", "9110 8.6", b"Content-Length: 0x5"),
    ("octal", "9110 8.6", b"Content-Length: 0o5"),
    ("digits in groups", "9110 8.6", b"Content-Length: 0_5"),
    ("a fraction", "9110 8.6", b"Content-Length: 5.0"),
    ("an exponent", "9110 8.6", b"Content-Length: 5e0"),
    ("two numbers", "9110 8.6", b"Content-Length: 5 5"),
    ("a list", "9110 8.6", b"Content-Length: 5, 5"),
    ("a list of different ones", "9110 8.6", b"Content-Length: 5, 6"),
    ("a list with nothing", "9110 8.6", b"Content-Length: 5,"),
    ("a parameter", "9110 8.6", b"Content-Length: 5;q=1"),
    ("in quotes", "9110 8.6", b"Content-Length: \"5\""),
    ("empty", "9110 8.6", b"Content-Length:"),
    ("spaces", "9110 8.6", b"Content-Length:   "),
    ("a word", "9110 8.6", b"Content-Length: five"),
    ("no number", "9110 8.6", b"Content-Length: NaN"),
    ("a full-width digit", "9110 8.6", "Content-Length: \u{ff15}".as_bytes()),
    ("an Arabic digit", "9110 8.6", "Content-Length: \u{665}".as_bytes()),
    ("2^64", "9110 8.6", b"Content-Length: 18446744073709551616"),
    ("2^64 + 5", "9110 8.6", b"Content-Length: 18446744073709551621"),
    ("2^64 - 1", "9110 8.6", b"Content-Length: 18446744073709551615"),
    ("40 digits", "9110 8.6", b"Content-Length: 1000000000000000000000000000000000000005"),
    ("a vertical tab", "9110 5.5", b"Content-Length: 5\x0b"),
    ("a form feed", "9110 5.5", b"Content-Length: \x0c5"),
    ("a NUL", "9110 5.5", b"Content-Length: 5\0"),
    ("a no-break space", "9110 5.5", b"Content-Length: 5\xa0"),
    ("two lines", "9112 6.3", b"Content-Length: 5\r\nContent-Length: 6"),
    ("nothing in the second line", "9112 6.3", b"Content-Length: 5\r\nContent-Length:"),
    ("a sign in the second line", "9112 6.3", b"Content-Length: 5\r\nContent-Length: +5"),
    ("a space before the colon", "9112 5.1", b"Content-Length : 5"),
    ("a tab before the colon", "9112 5.1", b"Content-Length\t: 5"),
    ("a line that begins with a space", "9112 2.2", b" Content-Length: 5"),
    ("folded", "9112 5.2", b"Content-Length:\r\n 5"),
    ("folded behind", "9112 5.2", b"Content-Length: 5\r\n 0"),
    ("a CR", "9112 2.2", b"Content-Length: 5\rX: y"),
    ("HTTP/1.0 knows no chunks", "9112 6.1", b"Connection: keep-alive"),
];

/// Malformed chunked bodies (RFC 9112 §7.1). The data `hello` has five bytes.
const CHUNKS: &[(&str, &[u8])] = &[
    ("no size", b"\r\nhello\r\n0\r\n\r\n"),
    ("no chunk", b"hello\r\n0\r\n\r\n"),
    ("LF behind the size", b"5\nhello\r\n0\r\n\r\n"),
    ("CR behind the size", b"5\rhello\r\n0\r\n\r\n"),
    ("CR CR LF", b"5\r\r\nhello\r\n0\r\n\r\n"),
    ("a letter that is no digit", b"5g\r\nhello\r\n0\r\n\r\n"),
    ("a sign", b"+5\r\nhello\r\n0\r\n\r\n"),
    ("below zero", b"-5\r\nhello\r\n0\r\n\r\n"),
    ("a space before", b" 5\r\nhello\r\n0\r\n\r\n"),
    ("a tab before", b"\t5\r\nhello\r\n0\r\n\r\n"),
    ("0x", b"0x5\r\nhello\r\n0\r\n\r\n"),
    ("digits in groups", b"0_5\r\nhello\r\n0\r\n\r\n"),
    ("two sizes", b"5 5\r\nhello\r\n0\r\n\r\n"),
    ("a fraction", b"5.0\r\nhello\r\n0\r\n\r\n"),
    ("a NUL behind", b"5\0\r\nhello\r\n0\r\n\r\n"),
    ("a vertical tab behind", b"5\x0b\r\nhello\r\n0\r\n\r\n"),
    ("a full-width digit", "\u{ff15}\r\nhello\r\n0\r\n\r\n".as_bytes()),
    ("2^64", b"10000000000000000\r\nhello\r\n0\r\n\r\n"),
    ("2^64 + 5", b"10000000000000005\r\nhello\r\n0\r\n\r\n"),
    ("17 digits", b"fffffffffffffffff\r\nhello\r\n0\r\n\r\n"),
    ("an extension without a size", b";x=y\r\nhello\r\n0\r\n\r\n"),
    ("an extension with LF", b"5;x\ny\r\nhello\r\n0\r\n\r\n"),
    ("an extension with CR", b"5;x\ry\r\nhello\r\n0\r\n\r\n"),
    ("more than the size", b"5\r\nhello!\r\n0\r\n\r\n"),
    ("less than the size", b"5\r\nhel\r\n0\r\n\r\n"),
    ("LF behind the data", b"5\r\nhello\n0\r\n\r\n"),
    ("CR behind the data", b"5\r\nhello\r0\r\n\r\n"),
    ("nothing behind the data", b"5\r\nhello0\r\n\r\n"),
    ("LF behind the last size", b"5\r\nhello\r\n0\n\r\n"),
    ("a sign of the last size", b"5\r\nhello\r\n-0\r\n\r\n"),
    ("CR alone at the end", b"5\r\nhello\r\n0\r\n\rX"),
    ("LF in place of the last line", b"5\r\nhello\r\n0\r\n\n"),
    ("LF and CR LF in place of the last line", b"5\r\nhello\r\n0\r\n\n\r\n"),
    ("a trailer without a name", b"5\r\nhello\r\n0\r\n: y\r\n\r\n"),
    ("a trailer without a colon", b"5\r\nhello\r\n0\r\nx\r\n\r\n"),
    ("a trailer with a space in its name", b"5\r\nhello\r\n0\r\nx y: z\r\n\r\n"),
    ("a trailer with a NUL", b"5\r\nhello\r\n0\r\nx: y\0z\r\n\r\n"),
    ("a trailer with a space before the colon", b"5\r\nhello\r\n0\r\nx : y\r\n\r\n"),
];

/// Bodies that are truncated, because the client closes its side of the connection.
const TRUNCATED: &[(&str, &[u8])] = &[
    ("a length", b"Content-Length: 5\r\n\r\nhell"),
    ("a huge length", b"Content-Length: 1073741824\r\n\r\nhello"),
    ("no byte", b"Content-Length: 5\r\n\r\n"),
    ("in a size", b"Transfer-Encoding: chunked\r\n\r\n5"),
    ("in a chunk", b"Transfer-Encoding: chunked\r\n\r\n5\r\nhel"),
    ("behind a chunk", b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"),
    ("before the last line", b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n"),
    ("in a trailer", b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nx: y\r\n"),
    ("16 digits", b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nhello\r\n0\r\n\r\n"),
];

#[test]
fn malformed_lengths_and_chunks_are_never_forwarded_as_complete() {
    let upstream = Upstream::start();
    let gateway = gateway(&upstream.url());
    for (name, section, lines) in LENGTHS {
        let (version, coding) = match *name {
            "HTTP/1.0 knows no chunks" => ("1.0", &b"\r\nTransfer-Encoding: chunked"[..]),
            _ => ("1.1", &b""[..]),
        };
        let head = format!("POST / HTTP/{version}\r\nHost: a.test\r\n");
        let answer = exchange(&gateway, &[head.as_bytes(), lines, coding, b"\r\n\r\nhello", LAST].concat(), false);
        // hyper rejects the length 2^64 - 1 as too large.
        let status = if *name == "2^64 - 1" { 431 } else { 400 };
        assert_eq!(statuses(&answer), [status], "{name} (RFC {section})");
        assert_eq!(upstream.heads.lock().unwrap().len(), 0, "{name} (RFC {section}): nothing is forwarded");
    }
    let long = [b"5;".to_vec(), vec![b'x'; 17 << 10], b"\r\nhello\r\n0\r\n\r\n".to_vec()].concat();
    let many = [&b"5\r\nhello\r\n0\r\n"[..], &b"x: y\r\n".repeat(200), b"\r\n"].concat();
    let huge = [&b"5\r\nhello\r\n0\r\nx: "[..], &vec![b'y'; 64 << 10], b"\r\n\r\n"].concat();
    let generated = [("an endless extension", &long[..]), ("many trailers", &many), ("a huge trailer", &huge)];
    let bodies = CHUNKS.iter().copied().chain(generated);
    for (name, body) in bodies.clone() {
        for method in ["POST", "GET"] {
            let head = format!("{method} / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n");
            let answer = exchange(&gateway, &[head.as_bytes(), body, LAST].concat(), false);
            // If the connection is reset while the client sends, the client may miss the response.
            let statuses = statuses(&answer);
            assert!(statuses == [400] || statuses.is_empty() && body.len() > 10_000, "{method}, {name}: {statuses:?}");
            assert_eq!(upstream.count(), 0, "{method}, {name}: no body is completed");
        }
    }
    for (name, rest) in TRUNCATED {
        let answer = exchange(&gateway, &[b"POST / HTTP/1.1\r\nHost: a.test\r\n", *rest].concat(), true);
        assert!(!statuses(&answer).contains(&200), "{name}: {}", answer.escape_ascii());
        assert_eq!(upstream.count(), 0, "{name}: the truncated request is not completed");
    }
    assert_eq!(Client::connect(gateway.address).get("/after").status, 200);
    assert_eq!(upstream.count(), 1, "no truncated request becomes part of the next request");
    assert_eq!(upstream.last().target(), "/after");
    let variants = LENGTHS.len() + bodies.count() + TRUNCATED.len();
    println!("fault 2: {variants} anomalies, 0 forwarded or completed");
    assert!(variants >= 45);
}

/// Trailer sections with lines that end in a bare LF. hyper reads the bytes after such a line as trailers. Other
/// servers read them as a request.
const TRAILERS: &[(&str, &str, u16)] = &[
    ("no field", "\n", 400),
    ("a field", "x: y\n\r\n", 200),
    ("a field and LF", "x: y\n\n", 200),
    ("a field, then LF", "x: y\r\n\n", 200),
];

#[test]
fn connection_closes_after_a_request_with_trailers() {
    // One upstream responds after it has read the whole request, the other one before the end of the request.
    let whole = Upstream::start();
    let early = serve(|mut stream| {
        while let Some(head) = read_head(&mut stream) {
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
            let (mut body, mut byte) = (Vec::new(), [0]);
            while head.starts_with("POST") && !body.ends_with(b"0\r\n\r\n") {
                if !matches!(stream.read(&mut byte), Ok(1)) {
                    return;
                }
                body.push(byte[0]);
            }
        }
    });
    for (upstream, url) in [("whole", whole.url()), ("early", format!("http://{early}"))] {
        let gateway = gateway(&url);
        for (name, trailers, status) in TRAILERS {
            let what = format!("{name}, {upstream}");
            let head = "POST /first HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n";
            let last = String::from_utf8_lossy(LAST).replace("Connection: close\r\n", "");
            let mut stream = TcpStream::connect(gateway.address).unwrap();
            stream.set_read_timeout(Some(MAX_WAIT)).unwrap();
            let mut answer = Vec::new();
            stream.write_all(head.as_bytes()).unwrap();
            if upstream == "early" {
                // Read the beginning of the response before the end of the request is sent.
                answer.resize(12, 0);
                stream.read_exact(&mut answer).unwrap();
            }
            // The gateway may already have closed the connection.
            let _ = stream.write_all(format!("0\r\n{trailers}{SMUGGLED}{last}{last}").as_bytes());
            if let Err(error) = stream.read_to_end(&mut answer) {
                assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{what}: not closed");
            }
            let expected = if upstream == "early" { 200 } else { *status };
            assert_eq!(statuses(&answer), [expected], "{what}: {}", answer.escape_ascii());
        }
    }
    let heads = whole.heads.lock().unwrap();
    assert!(heads.iter().all(|head| head.starts_with("POST /first ")), "{heads:?}");
}

#[test]
fn valid_framings_are_normalized_for_the_upstream() {
    let upstream = Upstream::start();
    let gateway = gateway(&upstream.url());
    let mut client = gateway.client();
    for (what, framing, body, expected) in [
        ("zeros in front", "Content-Length: 0005", "hello", ("5", "")),
        ("a length twice", "Content-Length: 5\r\nContent-Length: 5", "hello", ("5", "")),
        ("no body", "Content-Length: 00", "", ("0", "")),
        ("chunks", "Transfer-Encoding: chunked", "2;a=b\r\nhe\r\n03 \r\nllo\r\n000\r\n\r\n", ("", "chunked")),
        (
            "trailers",
            "Trailer: x\r\nTransfer-Encoding: chunked",
            "5\r\nhello\r\n0\r\nx: y\r\nhost: z\r\n\r\n",
            ("", "chunked"),
        ),
    ] {
        for method in ["POST", "GET", "HEAD", "DELETE", "PURGE"] {
            client.send(format!("{method} / HTTP/1.1\r\nHost: a.test\r\n{framing}\r\n\r\n{body}").as_bytes());
            // A response to HEAD has no body, but this upstream sends one.
            if method == "HEAD" {
                assert_eq!(client.head().unwrap().status, 200, "{method}, {what}");
                client = gateway.client();
            } else {
                let reply = client.reply().unwrap();
                assert_eq!(reply.status, 200, "{method}, {what}");
                // hyper does not report where trailers end. The gateway therefore closes the connection, so that it
                // does not read the bytes after the trailers as a request.
                let last = what == "trailers";
                assert_eq!(reply.header("connection"), last.then_some("close"), "{method}, {what}");
                if last {
                    client.assert_closed(what);
                    client = gateway.client();
                }
            }
            let seen = upstream.last();
            let lines = (seen.headers("content-length").concat(), seen.headers("transfer-encoding").concat());
            assert_eq!((lines.0.as_str(), lines.1.as_str()), expected, "{method}, {what}: {}", seen.head);
            let body = if expected.0 == "0" { &b""[..] } else { b"hello" };
            assert_eq!(seen.body, body, "{method}, {what}");
            assert_eq!(seen.headers("trailer"), [""; 0], "{method}, {what}");
        }
    }
}

/// Upgrade requests: name, RFC and section, headers.
const UPGRADES: &[(&str, &str, &str)] = &[
    (
        "WebSocket",
        "6455 4.1",
        "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    ),
    (
        "WebSocket of a bad version",
        "6455 4.4",
        "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 777\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    ),
    ("WebSocket in capitals", "6455 4.1", "connection: UPGRADE\r\nupgrade: WebSocket"),
    ("not nominated", "9110 7.8", "Upgrade: websocket"),
    ("nothing nominated", "9110 7.8", "Connection: Upgrade"),
    ("kept alive as well", "9110 7.8", "Connection: keep-alive, Upgrade\r\nUpgrade: websocket"),
    ("several protocols", "9110 7.8", "Connection: Upgrade\r\nUpgrade: websocket, h2c"),
    ("two lines", "9110 7.8", "Connection: Upgrade\r\nUpgrade: websocket\r\nUpgrade: h2c"),
    (
        "HTTP/2",
        "7540 3.2",
        "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA",
    ),
    (
        "HTTP/2 with its settings kept",
        "7540 3.2.1",
        "Connection: Upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA",
    ),
    ("TLS", "2817 3", "Connection: Upgrade\r\nUpgrade: TLS/1.0"),
    ("an unknown protocol", "9110 7.8", "Connection: Upgrade\r\nUpgrade: x"),
    ("an empty one", "9110 7.8", "Connection: Upgrade\r\nUpgrade:"),
    ("an alias", "3875 4.1.18", "Connection: Upgrade, Up_grade\r\nUp_grade: websocket"),
    ("CONNECT's own field", "8441 4", "Connection: Upgrade\r\nUpgrade: websocket\r\nProtocol: websocket"),
];

/// Bytes after the request headers, which a tunnel would forward.
const TUNNELLED: &[u8] = b"\x81\x85\x01\x02\x03\x04tunnelled\r\n\r\n";

#[test]
fn upgrade_is_never_tunnelled_without_websocket_on_the_route() {
    // Start an upstream that always switches protocols and records all bytes.
    let bytes = Arc::<Mutex<Vec<u8>>>::default();
    let record = bytes.clone();
    let switching = serve(move |mut stream| {
        let Some(head) = read_head(&mut stream) else { return };
        record.lock().unwrap().extend_from_slice(head.as_bytes());
        let answer = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n";
        let _ = stream.write_all(answer);
        let mut rest = [0; 1024];
        while let Ok(count @ 1..) = stream.read(&mut rest) {
            record.lock().unwrap().extend_from_slice(&rest[..count]);
        }
    });
    let polite = Upstream::start();
    let (closed, open) = (gateway(&format!("http://{switching}")), gateway(&polite.url()));
    for (name, section, lines) in UPGRADES {
        let what = format!("{name} (RFC {section})");
        let head = format!("GET /chat HTTP/1.1\r\nHost: a.test\r\n{lines}\r\n\r\n");
        // The upstream switches protocols although the gateway has not requested it.
        let answer = exchange(&closed, &[head.as_bytes(), TUNNELLED].concat(), false);
        assert!(!statuses(&answer).contains(&101), "{what}: {}", answer.escape_ascii());
        assert_eq!(statuses(&answer).first(), Some(&502), "{what}: {}", answer.escape_ascii());
        // The upstream does not switch protocols. The bytes after the headers are an invalid request.
        let answer = exchange(&open, &[head.as_bytes(), TUNNELLED].concat(), false);
        assert_eq!(statuses(&answer), [200, 400], "{what}: {}", answer.escape_ascii());
        let seen = polite.last();
        for field in ["connection", "upgrade"] {
            assert_eq!(seen.headers(field), [""; 0], "{what}: {field} in {}", seen.head);
        }
        // Send the same headers in a request with a valid body.
        let head = format!("POST /chat HTTP/1.1\r\nHost: a.test\r\nContent-Length: 5\r\n{lines}\r\n\r\nhello");
        let answer = exchange(&open, &[head.as_bytes(), LAST].concat(), false);
        assert_eq!(statuses(&answer), [200, 200], "{what}: {}", answer.escape_ascii());
    }
    let bytes = bytes.lock().unwrap();
    let text = String::from_utf8_lossy(&bytes).to_lowercase();
    assert_eq!(text.matches("get /chat").count(), UPGRADES.len(), "all requests arrived");
    for tunnelled in ["tunnelled", "upgrade:", "\r\nconnection:"] {
        assert!(!text.contains(tunnelled), "the upstream saw {tunnelled:?}:\n{text}");
    }
    println!("fault 7: {} upgrade requests, 0 tunnelled", UPGRADES.len());
}

#[test]
fn expect_is_handled_by_the_gateway_and_not_forwarded() {
    let upstream = Upstream::start();
    let gateway = gateway(&upstream.url());
    for (expect, interim) in [
        ("Expect: 100-continue", true),
        ("Expect: 100-Continue", true),
        ("expect: 100-CONTINUE ", true),
        ("Expect: 100-continue, x", false),
        ("Expect: 200-ok", false),
        ("Expect:", false),
        ("Expect: x\r\nExpect: 100-continue", true),
        ("Expect: 100-continue\r\nExpect: x", false),
    ] {
        let head = format!("POST / HTTP/1.1\r\nHost: a.test\r\n{expect}\r\nContent-Length: 5\r\n\r\nhello");
        let answer = exchange(&gateway, &[head.as_bytes(), LAST].concat(), false);
        // A client that sends its body at once may get no interim response (RFC 9110 §10.1.1).
        let answers: Vec<_> = statuses(&answer).into_iter().filter(|status| !interim || *status != 100).collect();
        assert_eq!(answers, [200, 200], "{expect}: {}", answer.escape_ascii());
        let seen = upstream.seen.lock().unwrap();
        let first = &seen[seen.len() - 2];
        assert_eq!((first.headers("expect"), &first.body[..]), (vec![], &b"hello"[..]), "{expect}: {}", first.head);
    }
    println!("fault 7: 8 expectations, 0 forwarded");
}
