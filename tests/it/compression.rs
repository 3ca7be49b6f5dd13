//! Compression of responses: content codings, headers, responses that must not change, and streams.

use std::io::{Read, Write};
use std::process::Command;
use std::sync::{Mutex, mpsc};

use flate2::read::GzDecoder;
use http::Request;

use crate::hot_restart::Successor;
use crate::support::client::Reply;
use crate::support::gateway::Gateway;
use crate::support::http2;
use crate::support::http2::Answer;
use crate::support::reload;
use crate::support::reload::with_admin;
use crate::support::upstream::{Upstream, read_request, serve};
use crate::support::{eventually, signal};

/// A JSON document of about 20 KB.
fn document() -> String {
    let items: Vec<_> = (0..500).map(|number| format!("{{\"id\":{number},\"name\":\"item {number}\"}}")).collect();
    format!("[{}]", items.join(","))
}

/// Start a gateway that compresses the responses of `upstream`, with these settings.
fn gateway(upstream: &str, compress: &str) -> Gateway {
    Gateway::start(&format!(
        "[upstream.api]\nservers = [\"{upstream}\"]\n\
         [[route]]\nname = \"r\"\npath = \"/{{*rest}}\"\nupstream = \"api\"\ncompress = {compress}\n"
    ))
}

fn decode(coding: Option<&str>, body: &[u8]) -> Vec<u8> {
    let mut decoded = Vec::new();
    match coding {
        Some("gzip") => drop(GzDecoder::new(body).read_to_end(&mut decoded).unwrap()),
        Some("br") => drop(brotli::Decompressor::new(body, 4096).read_to_end(&mut decoded).unwrap()),
        Some("zstd") => decoded = zstd::decode_all(body).unwrap(),
        None => decoded = body.to_vec(),
        Some(other) => panic!("{other}"),
    }
    decoded
}

/// Return a response with these headers and this body.
fn response(headers: &str, body: &str) -> Vec<u8> {
    format!("HTTP/1.1 200 OK\r\n{headers}Content-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

#[test]
fn response_has_the_coding_that_the_client_accepts() {
    let headers = "Content-Type: application/json; charset=utf-8\r\nETag: \"v1\"\r\nAccept-Ranges: bytes\r\n\
                   Content-Digest: sha-256=:AA==:\r\nVary: Origin\r\n";
    let upstream = Upstream::responding(move |_| response(headers, &document()));
    let gateway = gateway(&upstream.url(), "true");
    let mut client = gateway.client();
    for (accepted, coding) in [
        ("gzip", Some("gzip")),
        ("gzip, deflate, br", Some("br")),
        ("gzip, deflate, br, zstd", Some("zstd")),
        ("zstd;q=0.1, gzip;q=0.2", Some("gzip")),
        ("identity", None),
        ("*;q=0", None),
    ] {
        let reply = client.get_with("/a", &[("accept-encoding", accepted)]);
        assert_eq!((reply.status, reply.header("content-encoding")), (200, coding), "{accepted}");
        assert_eq!(decode(coding, &reply.body), document().as_bytes(), "{accepted}");
        let vary: Vec<_> = reply.headers.iter().filter(|(name, _)| name == "vary").map(|(_, value)| &**value).collect();
        assert_eq!(vary.join(", "), "Origin, Accept-Encoding");
        let changed = ["etag", "accept-ranges", "content-digest", "content-length"].map(|name| reply.header(name));
        match coding {
            Some(_) => {
                assert!(reply.body.len() < document().len() / 4, "{accepted}: {} bytes", reply.body.len());
                assert_eq!(changed, [Some("W/\"v1\""), None, None, None]);
            }
            None => {
                let length = document().len().to_string();
                assert_eq!(changed, [Some("\"v1\""), Some("bytes"), Some("sha-256=:AA==:"), Some(&*length)]);
            }
        }
    }
    let request = |method: &str, accepted: &str| {
        let request = Request::builder().method(method).uri("http://a.test/a").header("accept-encoding", accepted);
        request.body(&b""[..]).unwrap()
    };
    let requests = [request("GET", "gzip"), request("GET", "br"), request("GET", "zstd"), request("HEAD", "gzip")];
    for (answer, coding) in http2::ask(gateway.address, requests).iter().zip(["gzip", "br", "zstd", "gzip"]) {
        let Answer::Response(_, headers, body) = answer else { panic!("{answer:?}") };
        assert_eq!((&headers["content-encoding"], headers.get("content-length")), (&coding.parse().unwrap(), None));
        assert!(body.is_empty() || decode(Some(coding), body) == document().as_bytes());
    }
}

#[test]
fn curl_decodes_each_coding() {
    let upstream = Upstream::responding(|_| response("Content-Type: text/html\r\n", &document()));
    for (algorithm, version) in
        [("gzip", "--http1.1"), ("br", "--http1.1"), ("zstd", "--http1.1"), ("br", "--http2-prior-knowledge")]
    {
        let gateway = gateway(&upstream.url(), &format!("{{ algorithms = [\"{algorithm}\"] }}"));
        let url = format!("http://{}/a", gateway.address);
        let mut command = Command::new("curl");
        let written = "%{size_download} %header{content-encoding}";
        command.args(["-sS", "--compressed", version, "-w", written, &url]);
        let output = command.output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let (content, written) = text.split_at(document().len());
        assert_eq!(content, document(), "{algorithm}");
        let (size, coding) = written.split_once(' ').unwrap();
        assert!(coding == algorithm && size.parse::<usize>().unwrap() < document().len() / 4, "{algorithm}: {written}");
    }
}

/// Each compressor needs memory, so that only 256 may exist at the same time.
#[test]
fn compressors_are_free_again_after_their_responses() {
    let upstream = Upstream::responding(|_| response("Content-Type: application/json\r\n", &document()));
    let gateway = gateway(&upstream.url(), "true");
    let mut client = gateway.client();
    for number in 0..300 {
        let reply = client.get_with("/a", &[("accept-encoding", "zstd")]);
        assert_eq!(reply.header("content-encoding"), Some("zstd"), "response {number}");
    }
}

/// A response of the upstream, the headers of the request, and whether `Vary` is set.
#[test]
fn responses_that_must_not_change_are_not_compressed() {
    let json = "Content-Type: application/json\r\n";
    let responding = |status: &'static str, headers: String| {
        Upstream::responding(move |_| {
            let body = document();
            format!("HTTP/1.1 {status}\r\n{headers}Content-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
        })
    };
    for (what, status, headers, request, vary) in [
        ("a part", "206 Partial Content", format!("{json}Content-Range: bytes 0-9/99\r\n"), &[][..], None),
        ("no-transform", "200 OK", format!("{json}Cache-Control: private, no-transform\r\n"), &[], None),
        ("a coded response", "200 OK", format!("{json}Content-Encoding: br\r\n"), &[], None),
        ("an image", "200 OK", "Content-Type: image/png\r\n".to_owned(), &[], None),
        ("no type", "200 OK", String::new(), &[], None),
        ("events", "200 OK", "Content-Type: text/event-stream\r\n".to_owned(), &[], None),
        ("gRPC", "200 OK", "Content-Type: application/grpc-web\r\n".to_owned(), &[], None),
        (
            "a request with no-transform",
            "200 OK",
            json.to_owned(),
            &[("cache-control", "no-transform")],
            Some("Accept-Encoding"),
        ),
        ("no coding", "200 OK", json.to_owned(), &[("accept-encoding", "br;q=0")], Some("Accept-Encoding")),
    ] {
        let upstream = responding(status, headers);
        let gateway = gateway(&upstream.url(), "true");
        let is_listed = request.iter().any(|(name, _)| *name == "accept-encoding");
        let accepted = [("accept-encoding", "gzip, br, zstd")];
        let request = [request, if is_listed { &[] } else { &accepted }].concat();
        let reply = gateway.client().get_with("/a", &request);
        assert_eq!(reply.body, document().as_bytes(), "{what}");
        assert_eq!(
            (reply.header("vary"), reply.header("content-encoding").is_some()),
            (vary, what == "a coded response")
        );
    }
    let upstream = Upstream::responding(|_| response("Content-Type: application/json\r\n", "{\"short\":true}"));
    let gateway = gateway(&upstream.url(), "true");
    let reply = gateway.client().get_with("/a", &[("accept-encoding", "gzip")]);
    assert_eq!((reply.text(), reply.header("vary")), ("{\"short\":true}", None), "shorter than min_size");
    let mut client = gateway.client();
    client.send(b"GET /a HTTP/1.0\r\nHost: a\r\nAccept-Encoding: gzip\r\n\r\n");
    assert_eq!(client.reply().unwrap().header("content-encoding"), None, "HTTP/1.0");
}

/// Types, minimum size and algorithms of the route apply, and `route_defaults` may contain `compress`.
#[test]
fn settings_of_the_route_apply() {
    let upstream = Upstream::responding(|seen| {
        let kind = if seen.target().starts_with("/image") { "Image/BMP" } else { "text/html" };
        response(&format!("Content-Type: {kind}\r\n"), &"x".repeat(200))
    });
    let gateway = Gateway::start(&format!(
        "[route_defaults]\ncompress = {{ types = [\"image/*\"], min_size = \"100B\", algorithms = [\"gzip\", \"zstd\"] }}\n\
         [upstream.api]\nservers = [\"{}\"]\n\
         [[route]]\nname = \"r\"\npath = \"/{{*rest}}\"\nupstream = \"api\"\n\
         [[route]]\nname = \"off\"\npath = \"/image/off\"\nupstream = \"api\"\ncompress = false\n\
         [[route]]\nname = \"own\"\npath = \"/own\"\nrespond = {{ status = 200, body = \"ok\" }}\n",
        upstream.url()
    ));
    let mut client = gateway.client();
    for (path, coding) in [("/image", Some("gzip")), ("/html", None), ("/image/off", None), ("/own", None)] {
        let reply = client.get_with(path, &[("accept-encoding", "zstd, br, gzip")]);
        assert_eq!((reply.status, reply.header("content-encoding")), (200, coding), "{path}");
    }
}

#[test]
fn head_and_304_agree_with_get() {
    let upstream = Upstream::responding(|seen| {
        let headers = "Content-Type: application/json\r\nETag: \"v1\"\r\n";
        if !seen.headers("if-none-match").is_empty() {
            return format!("HTTP/1.1 304 Not Modified\r\n{headers}\r\n").into_bytes();
        }
        let whole = response(headers, &document());
        let is_head = seen.head.starts_with("HEAD ");
        let end = whole.windows(4).position(|bytes| bytes == b"\r\n\r\n").unwrap() + 4;
        if is_head { whole[..end].to_vec() } else { whole }
    });
    let gateway = gateway(&upstream.url(), "true");
    let mut client = gateway.client();
    let names = ["content-encoding", "vary", "etag", "content-length", "content-type"];
    let headers = |reply: &Reply| names.map(|name| reply.header(name).map(str::to_owned));
    let get = client.get_with("/a", &[("accept-encoding", "gzip")]);
    client.send(b"HEAD /a HTTP/1.1\r\nHost: a\r\nAccept-Encoding: gzip\r\n\r\n");
    let head = client.head().unwrap();
    assert_eq!(headers(&head), headers(&get));
    for (sent, etag) in [("W/\"v1\"", "W/\"v1\""), ("\"v0\", W/\"v1\"", "W/\"v1\""), ("\"v1\"", "\"v1\"")] {
        client.send(
            format!("GET /a HTTP/1.1\r\nHost: a\r\nAccept-Encoding: gzip\r\nIf-None-Match: {sent}\r\n\r\n").as_bytes(),
        );
        let reply = client.head().unwrap();
        assert_eq!((reply.status, reply.header("etag")), (304, Some(etag)), "{sent}");
    }
    assert_eq!(client.get("/a").status, 200, "no response has left bytes on the connection");
}

/// The upstream sends the second event only after the client has decoded the first.
#[test]
fn event_streams_are_flushed_after_each_event() {
    for coding in ["gzip", "br", "zstd"] {
        let (go, seen) = mpsc::channel();
        let seen = Mutex::new(seen);
        let upstream = serve(move |mut stream| {
            if read_request(&mut stream).is_none() {
                return;
            }
            let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
            stream.write_all(format!("{head}d\r\ndata: first\n\n\r\n").as_bytes()).unwrap();
            seen.lock().unwrap().recv().unwrap();
            stream.write_all(b"e\r\ndata: second\n\n\r\n0\r\n\r\n").unwrap();
        });
        let compress = format!("{{ types = [\"text/event-stream\"], algorithms = [\"{coding}\"] }}");
        let gateway = gateway(&format!("http://{upstream}"), &compress);
        let mut client = gateway.client();
        client.send(format!("GET /a HTTP/1.1\r\nHost: a\r\nAccept-Encoding: {coding}\r\n\r\n").as_bytes());
        assert_eq!(client.head().unwrap().header("content-encoding"), Some(coding));
        let mut received = Vec::new();
        while !starts_with(coding, &received, b"data: first\n\n") {
            received.extend(client.chunk().expect("the first event arrives before the second is sent"));
        }
        go.send(()).unwrap();
        while let Some(chunk) = client.chunk().filter(|chunk| !chunk.is_empty()) {
            received.extend(chunk);
        }
        assert_eq!(decode(Some(coding), &received), b"data: first\n\ndata: second\n\n", "{coding}");
    }
}

/// A stream in flight keeps its coding, and its client gets all of it.
#[test]
fn reload_and_hot_restart_change_the_coding_of_later_responses_only() {
    let (go, seen) = mpsc::channel();
    let seen = Mutex::new(seen);
    let upstream = serve(move |mut stream| {
        while let Some(request) = read_request(&mut stream) {
            let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
            stream.write_all(format!("{head}d\r\ndata: first\n\n\r\n").as_bytes()).unwrap();
            if request.target() == "/stream" {
                seen.lock().unwrap().recv().unwrap();
            }
            stream.write_all(b"e\r\ndata: second\n\n\r\n0\r\n\r\n").unwrap();
        }
    });
    let config = |coding: &str| {
        with_admin(&format!(
            "[upstream.api]\nservers = [\"http://{upstream}\"]\n[[route]]\nname = \"r\"\npath = \"/{{*rest}}\"\n\
             upstream = \"api\"\ncompress = {{ types = [\"text/event-stream\"], algorithms = [\"{coding}\"] }}\n"
        ))
    };
    let accept = "Accept-Encoding: gzip, br, zstd";
    let mut gateway = Gateway::start(&config("gzip"));
    let mut successors = Vec::new();
    for (before, after) in [("gzip", "br"), ("br", "zstd")] {
        let mut client = gateway.client();
        client.send(format!("GET /stream HTTP/1.1\r\nHost: a\r\n{accept}\r\n\r\n").as_bytes());
        assert_eq!(client.head().unwrap().header("content-encoding"), Some(before));
        let mut received = Vec::new();
        while !starts_with(before, &received, b"data: first\n\n") {
            received.extend(client.chunk().expect("the first event arrives before the second is sent"));
        }
        gateway.put(&config(after));
        if before == "gzip" {
            let reply = reload::ask(&gateway, "POST", "/api/reload");
            assert_eq!(reply.status, 200, "{}", reply.text());
        } else {
            signal(&gateway.child, "USR2");
            successors.push(Successor::of(&gateway));
            eventually("the old process accepts no connections", || {
                gateway.log().contains("stopping after the requests in flight")
            });
        }
        let is_changed = || {
            let reply = gateway.client().get_with("/short", &[("accept-encoding", "gzip, br, zstd")]);
            let coding = reply.header("content-encoding").unwrap().to_owned();
            assert_eq!(decode(Some(&coding), &reply.body), b"data: first\n\ndata: second\n\n");
            coding == after
        };
        eventually("the next response has the new coding", is_changed);
        go.send(()).unwrap();
        while let Some(chunk) = client.chunk().filter(|chunk| !chunk.is_empty()) {
            received.extend(chunk);
        }
        assert_eq!(decode(Some(before), &received), b"data: first\n\ndata: second\n\n", "{before}");
    }
    assert_eq!(gateway.wait().code(), Some(0), "{}", gateway.log());
}

/// Return whether the decoded part of a compressed body starts with these bytes.
fn starts_with(coding: &str, body: &[u8], expected: &[u8]) -> bool {
    let mut decoded = vec![0; expected.len()];
    let result = match coding {
        "gzip" => GzDecoder::new(body).read_exact(&mut decoded),
        "br" => brotli::Decompressor::new(body, 4096).read_exact(&mut decoded),
        _ => zstd::Decoder::new(body).and_then(|mut decoder| decoder.read_exact(&mut decoded)),
    };
    result.is_ok() && decoded == expected
}

/// The gateway counts the tokens of the response before it compresses it.
#[test]
fn tokens_are_counted_before_the_compression() {
    let upstream = Upstream::responding(|_| {
        let padding = "x".repeat(4000);
        let body = format!(
            "{{\"padding\":\"{padding}\",\"usage\":{{\"prompt_tokens\":3,\"completion_tokens\":4,\"total_tokens\":7}}}}"
        );
        response("Content-Type: application/json\r\n", &body)
    });
    let gateway = Gateway::start(&format!(
        "[limit.tokens]\nby = \"ip\"\nquota = \"1000/day\"\nunit = \"tokens\"\ncost.llm = \"auto\"\nalgorithm = \"fixed-window\"\n\
         [upstream.llm]\nservers = [\"{}\"]\n\
         [[route]]\nname = \"chat\"\npath = \"/v1/{{*rest}}\"\nupstream = \"llm\"\nlimits = [\"tokens\"]\ncompress = true\n",
        upstream.url()
    ));
    let mut client = gateway.client();
    let request = br#"{"model":"m","max_tokens":10,"messages":[{"role":"user","content":"hi"}]}"#;
    let headers = [("content-type", "application/json"), ("accept-encoding", "gzip")];
    let remaining = [0, 1].map(|_| {
        let reply = client.request("POST", "/v1/chat/completions", &headers, request);
        assert_eq!((reply.status, reply.header("content-encoding")), (200, Some("gzip")));
        assert!(String::from_utf8(decode(Some("gzip"), &reply.body)).unwrap().ends_with("\"total_tokens\":7}}"));
        reply.remaining("tokens")
    });
    assert_eq!(remaining[0] - remaining[1], 7, "{remaining:?}");
}
