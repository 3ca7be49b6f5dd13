//! Compression of responses: which responses are compressed, with which content coding, and the compressor of a body.

use std::io;
use std::io::Write;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicUsize, Ordering};

use brotli::CompressorWriter;
use bytes::Bytes;
use flate2::write::GzEncoder;
use http::header::{
    ACCEPT_ENCODING, ACCEPT_RANGES, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG,
    HeaderName, HeaderValue, IF_NONE_MATCH,
};
use http::{HeaderMap, Method, Request, Response, StatusCode, Version};
use http_body::Body as _;
use zstd::stream::raw::CParameter;

use crate::http::body::{Body, BodyEnd, OnComplete};
use crate::http::body_limits::RestPermit;
use crate::http::headers::{add_vary, has_content_coding, has_list_member};

/// Maximum number of responses that the process compresses at the same time. A compressor needs about 2.3 MB (Brotli).
/// Further responses are sent without compression.
const MAX_COMPRESSORS: usize = 256;

/// Level of gzip: the default of nginx is 1, that of Apache and Caddy 6 and 5.
const GZIP_LEVEL: u32 = 5;

/// Quality of Brotli, as recommended for dynamic content.
const BROTLI_QUALITY: u32 = 4;

/// Binary logarithm of Brotli's window. It bounds the memory of a compressor.
const BROTLI_WINDOW: u32 = 17;

/// Level of Zstandard: its default.
const ZSTD_LEVEL: i32 = 3;

/// Binary logarithm of the window of Zstandard. It bounds the memory of a compressor, and clients must support windows
/// of up to 8 MiB (RFC 9659).
const ZSTD_WINDOW: u32 = 17;

/// Headers with a hash of the content, which differs after the compression (RFC 9530).
const DIGESTS: [HeaderName; 4] = [
    HeaderName::from_static("content-digest"),
    HeaderName::from_static("content-md5"),
    HeaderName::from_static("digest"),
    HeaderName::from_static("repr-digest"),
];

/// The media types that are compressed by default.
pub const DEFAULT_TYPES: [&str; 14] = [
    "text/html",
    "text/css",
    "text/plain",
    "text/xml",
    "text/csv",
    "text/javascript",
    "text/markdown",
    "application/javascript",
    "application/json",
    "application/problem+json",
    "application/ld+json",
    "application/xml",
    "application/wasm",
    "image/svg+xml",
];

/// A content coding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coding {
    /// Zstandard (RFC 8878).
    Zstd,
    /// Brotli (RFC 7932).
    Brotli,
    /// gzip (RFC 1952).
    Gzip,
}

/// The names of all codings, in the default order of preference.
pub const CODINGS: [(&str, Coding); 3] = [("zstd", Coding::Zstd), ("br", Coding::Brotli), ("gzip", Coding::Gzip)];

impl Coding {
    fn token(self) -> HeaderValue {
        HeaderValue::from_static(match self {
            Coding::Zstd => "zstd",
            Coding::Brotli => "br",
            Coding::Gzip => "gzip",
        })
    }
}

/// Which responses of a route are compressed.
#[derive(Debug)]
pub struct Compression {
    /// The codings in the order of preference.
    pub codings: Vec<Coding>,
    /// Media types in lower case. `text/*` stands for all types that begin with `text/`, `*/*` for all types.
    pub types: Vec<Box<str>>,
    /// Minimum `Content-Length`. A response without this header is compressed.
    pub min_size: u64,
}

/// What the compression of a response depends on, read from the request.
#[derive(Debug)]
pub struct CompressionOffer<'a> {
    compression: &'a Compression,
    /// `None` if the client accepts no coding, or if the request forbids transformations.
    coding: Option<Coding>,
    is_head: bool,
    if_none_match: Option<HeaderValue>,
}

impl Compression {
    /// Read what the response to a request depends on.
    pub fn offer<B>(&self, request: &Request<B>) -> CompressionOffer<'_> {
        let headers = request.headers();
        // HTTP/1.0 has no chunked coding, so a client could not detect a truncated response.
        let is_allowed =
            request.version() != Version::HTTP_10 && !has_list_member(headers, &CACHE_CONTROL, "no-transform");
        CompressionOffer {
            compression: self,
            coding: is_allowed.then(|| self.negotiate(headers)).flatten(),
            is_head: request.method() == Method::HEAD,
            if_none_match: headers.get(IF_NONE_MATCH).cloned(),
        }
    }

    /// Return the coding with the highest weight in `Accept-Encoding` (RFC 9110 §12.5.3). Among equal weights, the first
    /// coding of the list wins.
    fn negotiate(&self, headers: &HeaderMap) -> Option<Coding> {
        let mut best = None;
        for coding in &self.codings {
            let weight = accepted_weight(headers, *coding);
            if weight > best.map_or(0, |(weight, _)| weight) {
                best = Some((weight, *coding));
            }
        }
        best.map(|(_, coding)| coding)
    }

    fn has_type(&self, headers: &HeaderMap) -> bool {
        let Some(value) = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()) else { return false };
        let kind = value.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
        // gRPC frames are messages of a stream, with their own compression.
        if kind.starts_with("application/grpc") {
            return false;
        }
        self.types.iter().any(|pattern| match pattern.strip_suffix('*') {
            Some("*/") => true,
            Some(prefix) => kind.starts_with(prefix),
            None => **pattern == *kind,
        })
    }

    /// Return whether the content of a response may be compressed, without regard to the client.
    fn is_eligible(&self, status: StatusCode, headers: &HeaderMap) -> bool {
        // The other statuses have no content, or a part of a representation.
        let has_whole_content = !status.is_informational()
            && !matches!(status, StatusCode::NO_CONTENT | StatusCode::RESET_CONTENT | StatusCode::PARTIAL_CONTENT);
        let length = headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
        has_whole_content
            && !has_content_coding(headers)
            && !headers.contains_key(CONTENT_RANGE)
            && length.is_none_or(|length| length >= self.min_size)
            && !has_list_member(headers, &CACHE_CONTROL, "no-transform")
            && self.has_type(headers)
    }
}

impl CompressionOffer<'_> {
    /// Compress the response of an upstream, unless its headers forbid it. The headers of a response to HEAD are those
    /// of the response to GET.
    pub fn apply(self, response: &mut Response<Body>) {
        if response.status() == StatusCode::NOT_MODIFIED {
            return self.apply_not_modified(response.headers_mut());
        }
        let is_empty = !self.is_head && response.body().is_end_stream();
        if is_empty
            || !response.body().is_from_upstream()
            || !self.compression.is_eligible(response.status(), response.headers())
        {
            return;
        }
        let headers = response.headers_mut();
        add_vary(headers, "Accept-Encoding");
        let Some(coding) = self.coding else { return };
        let has_length = headers.contains_key(CONTENT_LENGTH);
        if self.is_head {
            set_coding(headers, coding);
            return response.body_mut().forget_length();
        }
        // A response whose length is unknown may pause for any time. Flush each chunk, so that the compressor does not
        // hold back data.
        let flush = if has_length { Flush::AtEnd } else { Flush::Always };
        let Some(compressor) = Compressor::new(coding, flush) else { return };
        set_coding(headers, coding);
        response.body_mut().change_content(|hook| Box::new(CompressingHook { hook, compressor: Some(compressor) }));
    }

    /// The upstream knows only its strong ETag. Return the ETag that the client has sent, which may be weak.
    fn apply_not_modified(self, headers: &mut HeaderMap) {
        let Some(sent) = self.if_none_match.as_ref().and_then(|value| value.to_str().ok()) else { return };
        let Some(weak) = headers.get(ETAG).and_then(weakened) else { return };
        if sent.split(',').any(|tag| tag.trim() == weak) {
            headers.insert(ETAG, weak);
            add_vary(headers, "Accept-Encoding");
        }
    }
}

/// Set the headers of a compressed response.
fn set_coding(headers: &mut HeaderMap, coding: Coding) {
    headers.insert(CONTENT_ENCODING, coding.token());
    headers.remove(CONTENT_LENGTH);
    // A range of the compressed content would need the same compressed bytes again.
    headers.remove(ACCEPT_RANGES);
    DIGESTS.iter().for_each(|name| drop(headers.remove(name)));
    // The compressed bytes may differ from time to time, so the validator is weak (RFC 9110 §8.8.1).
    if let Some(weak) = headers.get(ETAG).and_then(weakened) {
        headers.insert(ETAG, weak);
    }
}

/// Return the weak form of a strong ETag.
fn weakened(tag: &HeaderValue) -> Option<HeaderValue> {
    let tag = tag.as_bytes();
    tag.starts_with(b"\"").then(|| HeaderValue::from_bytes(&[b"W/", tag].concat()).ok()).flatten()
}

/// Return the weight of a coding in `Accept-Encoding` in thousandths. 0 means that the client does not accept it.
fn accepted_weight(headers: &HeaderMap, coding: Coding) -> u16 {
    let token = coding.token();
    let is_named = |name: &str| {
        name.as_bytes().eq_ignore_ascii_case(token.as_bytes())
            || (coding == Coding::Gzip && name.eq_ignore_ascii_case("x-gzip"))
    };
    let mut any = 0;
    let lines = headers.get_all(ACCEPT_ENCODING).iter().filter_map(|line| line.to_str().ok());
    for member in lines.flat_map(|line| line.split(',')) {
        let (name, weight) = match member.split_once(';') {
            Some((name, parameter)) => (name, weight(parameter)),
            None => (member, 1000),
        };
        match name.trim() {
            "*" => any = weight,
            name if is_named(name) => return weight,
            _ => {}
        }
    }
    any
}

/// Parse `q=0.5` (RFC 9110 §12.4.2). The weight of an invalid parameter is 0.
fn weight(parameter: &str) -> u16 {
    let value = parameter.trim().strip_prefix(['q', 'Q']).and_then(|rest| rest.trim_start().strip_prefix('='));
    let weight = value.and_then(|value| value.trim().parse::<f32>().ok()).filter(|weight| (0.0..=1.0).contains(weight));
    weight.map_or(0, |weight| (weight * 1000.0) as u16)
}

// === The compressor of a body ===

/// When a compressor writes what it has received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flush {
    /// When its block is full, and at the end of the body.
    AtEnd,
    /// After each chunk.
    Always,
}

struct Compressor {
    encoder: Encoder,
    flush: Flush,
    _permit: CompressorPermit,
}

enum Encoder {
    Zstd(zstd::stream::write::Encoder<'static, Vec<u8>>),
    Brotli(Box<CompressorWriter<Vec<u8>>>),
    Gzip(GzEncoder<Vec<u8>>),
}

/// Number of compressors that exist.
static COMPRESSORS: AtomicUsize = AtomicUsize::new(0);

/// Counts a compressor until it is dropped.
struct CompressorPermit;

impl CompressorPermit {
    fn acquire() -> Option<Self> {
        let permit = CompressorPermit;
        (COMPRESSORS.fetch_add(1, Ordering::Relaxed) < MAX_COMPRESSORS).then_some(permit)
    }
}

impl Drop for CompressorPermit {
    fn drop(&mut self) {
        COMPRESSORS.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Compressor {
    /// Create a compressor. Return `None` if too many exist.
    fn new(coding: Coding, flush: Flush) -> Option<Self> {
        let permit = CompressorPermit::acquire()?;
        let encoder = match coding {
            Coding::Zstd => {
                let mut encoder = zstd::stream::write::Encoder::new(Vec::new(), ZSTD_LEVEL).ok()?;
                encoder.set_parameter(CParameter::WindowLog(ZSTD_WINDOW)).ok()?;
                Encoder::Zstd(encoder)
            }
            Coding::Brotli => {
                Encoder::Brotli(Box::new(CompressorWriter::new(Vec::new(), 8 << 10, BROTLI_QUALITY, BROTLI_WINDOW)))
            }
            Coding::Gzip => Encoder::Gzip(GzEncoder::new(Vec::new(), flate2::Compression::new(GZIP_LEVEL))),
        };
        Some(Compressor { encoder, flush, _permit: permit })
    }

    /// Compress a chunk, and return the bytes that are ready.
    fn compress(&mut self, chunk: &[u8]) -> Bytes {
        // Ignore the results, because writing to a `Vec` cannot fail.
        let _ = self.encoder.write(chunk, self.flush);
        std::mem::take(self.encoder.output()).into()
    }

    /// Compress the last chunk, and return all remaining bytes.
    fn finish(mut self, chunk: &[u8]) -> Bytes {
        let _ = self.encoder.write(chunk, Flush::AtEnd);
        // Ignore the errors, because writing to a `Vec` cannot fail.
        match self.encoder {
            Encoder::Zstd(encoder) => encoder.finish().unwrap_or_default(),
            Encoder::Brotli(encoder) => encoder.into_inner(),
            Encoder::Gzip(encoder) => encoder.finish().unwrap_or_default(),
        }
        .into()
    }
}

impl Encoder {
    fn write(&mut self, chunk: &[u8], flush: Flush) -> io::Result<()> {
        let encoder: &mut dyn Write = match self {
            Encoder::Zstd(encoder) => encoder,
            Encoder::Brotli(encoder) => encoder,
            Encoder::Gzip(encoder) => encoder,
        };
        encoder.write_all(chunk)?;
        if flush == Flush::Always { encoder.flush() } else { Ok(()) }
    }

    fn output(&mut self) -> &mut Vec<u8> {
        match self {
            Encoder::Zstd(encoder) => encoder.get_mut(),
            Encoder::Brotli(encoder) => encoder.get_mut(),
            Encoder::Gzip(encoder) => encoder.get_mut(),
        }
    }
}

/// Compresses the data of a body, after the callbacks of the body have read and changed them.
struct CompressingHook {
    hook: Option<Box<dyn OnComplete>>,
    /// `None` after the end of the body.
    compressor: Option<Compressor>,
}

impl OnComplete for CompressingHook {
    fn on_data(&mut self, data: &mut Bytes) -> ControlFlow<()> {
        let end = self.hook.as_mut().map_or(ControlFlow::Continue(()), |hook| hook.on_data(data));
        if end.is_break() {
            if let Some(compressor) = self.compressor.take() {
                *data = compressor.finish(data);
            }
        } else if let Some(compressor) = &mut self.compressor {
            *data = if data.is_empty() { Bytes::new() } else { compressor.compress(data) };
        }
        end
    }

    fn holds_data(&self) -> bool {
        self.compressor.is_some()
    }

    fn on_end(&mut self) -> Bytes {
        let held = self.hook.as_mut().map_or_else(Bytes::new, |hook| hook.on_end());
        match self.compressor.take() {
            Some(compressor) => compressor.finish(&held),
            None => held,
        }
    }

    fn start_rest(&self) -> Option<RestPermit> {
        self.hook.as_ref().and_then(|hook| hook.start_rest())
    }

    fn on_complete(self: Box<Self>, bytes_sent: u64, end: BodyEnd) {
        if let Some(hook) = self.hook {
            hook.on_complete(bytes_sent, end);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coding_with_the_highest_weight_is_used() {
        let all = Compression { codings: CODINGS.map(|(_, coding)| coding).into(), types: Vec::new(), min_size: 0 };
        for (accepted, expected) in [
            ("", None),
            ("gzip", Some(Coding::Gzip)),
            ("X-GZIP", Some(Coding::Gzip)),
            ("gzip, deflate, br, zstd", Some(Coding::Zstd)),
            ("gzip;q=1.0, br;q=0.9, zstd;q=0", Some(Coding::Gzip)),
            ("br ; q = 0.5, *;q=0.7", Some(Coding::Zstd)),
            ("*", Some(Coding::Zstd)),
            ("*;q=0, gzip", Some(Coding::Gzip)),
            ("identity, *;q=0", None),
            ("gzip;q=2, br;q=x, zstd;q=-1", None),
            ("gzip;level=1", None),
            ("deflate", None),
        ] {
            let headers = HeaderMap::from_iter([(ACCEPT_ENCODING, HeaderValue::from_static(accepted))]);
            assert_eq!(all.negotiate(&headers), expected, "{accepted}");
        }
        assert_eq!(all.negotiate(&HeaderMap::new()), None);
    }

    #[test]
    fn media_types_match_exactly_or_by_their_first_part() {
        let compression = |types: &[&str]| Compression {
            codings: Vec::new(),
            types: types.iter().map(|kind| (*kind).into()).collect(),
            min_size: 0,
        };
        for (types, kind, expected) in [
            (&["text/html"][..], "Text/HTML; charset=utf-8", true),
            (&["text/html"], "text/htmlx", false),
            (&["text/*"], "text/event-stream", true),
            (&["text/*"], "textual/x", false),
            (&["*/*"], "image/png", true),
            (&["*/*"], "application/grpc", false),
            (&["*/*"], "application/grpc-web+proto", false),
        ] {
            let headers = HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static(kind))]);
            assert_eq!(compression(types).has_type(&headers), expected, "{types:?} {kind}");
        }
    }
}
