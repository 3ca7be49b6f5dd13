//! The formats of access logs, and what each says of a request.

pub(crate) mod caddy;
pub(crate) mod cloudfront;
pub(crate) mod native;
pub mod nginx;
pub(crate) mod timestamp;

use std::borrow::Cow;
use std::net::{IpAddr, SocketAddr};

use http::HeaderName;

use crate::tools::replay::format::caddy::CaddyFormat;
use crate::tools::replay::format::cloudfront::CloudFrontFormat;
use crate::tools::replay::format::native::NativeFormat;
use crate::tools::replay::format::nginx::{FormatError, NginxFormat};

/// What a line says of a request. Whatever it does not say is empty.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct LogEntry<'l> {
    /// When it came, or was decided, µs since the Unix epoch.
    pub time_us: u64,
    /// How long it took, µs.
    pub duration_us: Option<u64>,
    /// Who sent it.
    pub client: Option<IpAddr>,
    /// Its method.
    pub method: &'l [u8],
    /// Its target.
    pub target: Cow<'l, [u8]>,
    /// The host that it was sent to.
    pub host: Option<Cow<'l, [u8]>>,
    /// The status of its answer.
    pub status: Option<u16>,
    /// The subject of the client's certificate.
    pub certificate_subject: Option<Cow<'l, [u8]>>,
    /// Fields of its header section, and what [`Mapped`] stands for.
    pub headers: Vec<(HeaderName, Cow<'l, [u8]>)>,
    /// Whether `client` is whose request it is, proxies before it being seen through.
    pub is_client_resolved: bool,
    /// The route that it took.
    pub route: Option<Cow<'l, str>>,
    /// What it cost each of its limits.
    pub costs: Vec<(Cow<'l, str>, u64)>,
}

/// A field of the log that stands for a header of the request.
#[derive(Debug, Clone)]
pub struct FieldMapping {
    /// How the log calls it.
    pub field: String,
    /// The header.
    pub header: HeaderName,
}

/// Which parts of requests a format has.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct FormatCapabilities {
    pub client: bool,
    pub host: bool,
    pub query: bool,
    pub certificate_subject: bool,
    pub duration: bool,
    pub status: bool,
    pub headers: LoggedHeaders,
    /// Which route a request took.
    pub route: bool,
    /// Whether each line has the hashes of whoever asked its limits.
    pub identity_hashes: bool,
}

/// Which header fields a format has.
#[derive(Debug, Clone)]
pub enum LoggedHeaders {
    /// These.
    Listed(Vec<HeaderName>),
    /// All but those that carry secrets.
    NonSecret,
}

impl LoggedHeaders {
    /// Whether a field that the client sent would be there.
    pub fn contains(&self, name: &HeaderName) -> bool {
        match self {
            LoggedHeaders::Listed(names) => names.contains(name),
            LoggedHeaders::NonSecret => !SECRET_HEADERS.contains(&name.as_str()),
        }
    }
}

/// What Caddy replaces by REDACTED unless it is told to log credentials.
const SECRET_HEADERS: [&str; 4] = ["authorization", "cookie", "proxy-authorization", "set-cookie"];

/// Why a line says nothing of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum LineError {
    #[error("not a line of this format")]
    Malformed,
    #[error("no time that can be read")]
    InvalidTime,
    #[error("a `#Fields` line is missing before it")]
    MissingFieldsLine,
    #[error("longer than a mebibyte")]
    TooLong,
}

/// A format, with what it remembers from line to line.
#[derive(Debug, Clone)]
pub enum Format {
    /// Common, combined, ALB, or a `log_format` of nginx.
    Template(Box<NginxFormat>),
    /// Standard logs of CloudFront.
    CloudFront(CloudFrontFormat),
    /// Caddy's JSON.
    Caddy(CaddyFormat),
    /// Our own JSON.
    Native(NativeFormat),
}

/// The names of formats, and what they are, as `--format` takes them.
pub const FORMAT_NAMES: [&str; 6] = ["common", "combined", "caddy", "alb", "cloudfront", "sluicegate"];

impl Format {
    /// The format of this name, or the one that a `log_format` of nginx describes.
    ///
    /// # Errors
    /// It is neither, or lacks a time or a request.
    pub fn from_name(name: &str) -> Result<Format, FormatError> {
        let template = |text| NginxFormat::new(text).map(|template| Format::Template(Box::new(template)));
        match name {
            "common" => template(nginx::COMMON),
            "combined" => template(nginx::COMBINED),
            "alb" => template(nginx::ALB),
            "caddy" => Ok(Format::Caddy(CaddyFormat::default())),
            "cloudfront" => Ok(Format::CloudFront(CloudFrontFormat::default())),
            "sluicegate" => Ok(Format::Native(NativeFormat::default())),
            text if text.contains('$') => template(text),
            other => Err(FormatError::Unknown(other.to_owned())),
        }
    }

    /// The first format, and its name, that reads most of these lines.
    pub fn detect(lines: &[&[u8]]) -> Option<(&'static str, Format)> {
        // Combined before common, which reads its lines as well.
        let order = ["sluicegate", "caddy", "cloudfront", "alb", "combined", "common"];
        let try_format = |name: &'static str| {
            let mut format = Format::from_name(name).ok()?;
            let (mut read_count, mut total) = (0, 0);
            for line in lines {
                match format.parse(line) {
                    Ok(Some(_)) => (read_count, total) = (read_count + 1, total + 1),
                    Ok(None) => {}
                    Err(_) => total += 1,
                }
            }
            (read_count * 2 > total).then_some((read_count, name, format))
        };
        // On equal terms the first one.
        let best = order.into_iter().rev().filter_map(try_format).max_by_key(|(read_count, _, _)| *read_count);
        best.map(|(_, name, format)| (name, format))
    }

    /// Lets fields of the log stand for headers. `sample` is the beginning of the log.
    ///
    /// # Errors
    /// The log has no field of this name: the name, and those that it has.
    pub fn map_fields(&mut self, mappings: &[FieldMapping], sample: &[&[u8]]) -> Result<(), (String, Vec<String>)> {
        match self {
            Format::Template(template) => template.map_fields(mappings),
            Format::CloudFront(cloudfront) => cloudfront.map_fields(mappings, sample),
            // Fields of JSON come and go: each line is looked at.
            Format::Caddy(CaddyFormat { mappings: own_mappings, .. })
            | Format::Native(NativeFormat { mappings: own_mappings, .. }) => {
                own_mappings.extend_from_slice(mappings);
                Ok(())
            }
        }
    }

    /// Which parts of requests there are. `sample` is the beginning of the log.
    pub fn capabilities(&self, sample: &[&[u8]]) -> FormatCapabilities {
        match self {
            Format::Template(template) => template.capabilities(),
            Format::CloudFront(cloudfront) => cloudfront.capabilities(sample),
            Format::Caddy(_) => caddy::capabilities(),
            Format::Native(_) => native::capabilities(sample),
        }
    }

    /// Reads a line without its end; none if it is a comment.
    ///
    /// # Errors
    /// Why it cannot be read.
    pub fn parse<'l>(&mut self, line: &'l [u8]) -> Result<Option<LogEntry<'l>>, LineError> {
        match self {
            Format::Template(template) => template.parse(line).map(Some),
            Format::CloudFront(cloudfront) => cloudfront.parse(line),
            Format::Caddy(caddy) => caddy.parse(line),
            Format::Native(native) => native.parse(line).map(Some),
        }
    }
}

impl<'l> LogEntry<'l> {
    /// Takes `GET /path HTTP/1.1` apart; what is no such line leaves method and target empty.
    fn set_request_line(&mut self, line: Cow<'l, [u8]>) {
        let Some((method, target)) = split_request_line(&line) else { return };
        match line {
            Cow::Borrowed(line) => {
                self.method = &line[..method];
                self.target = Cow::Borrowed(&line[target]);
            }
            Cow::Owned(mut line) => {
                // Escapes are in the target; a method that has one is no method.
                let Some(method) = known_method(&line[..method]) else { return };
                self.method = method;
                line.truncate(target.end);
                line.drain(..target.start);
                self.target = Cow::Owned(line);
            }
        }
    }
}

/// Where the method ends, and where the target stands. Without a version it is HTTP/0.9, or none of it at all.
fn split_request_line(line: &[u8]) -> Option<(usize, std::ops::Range<usize>)> {
    let method = memchr::memchr(b' ', line)?;
    let version = memchr::memrchr(b' ', line)?;
    let is_request = method > 0 && version > method + 1 && line[version + 1..].starts_with(b"HTTP/");
    is_request.then_some((method, method + 1..version))
}

fn known_method(text: &[u8]) -> Option<&'static [u8]> {
    const KNOWN_METHODS: [&[u8]; 7] = [b"GET", b"POST", b"PUT", b"DELETE", b"HEAD", b"OPTIONS", b"PATCH"];
    KNOWN_METHODS.into_iter().find(|method| *method == text)
}

/// An address, with a port or without; IPv4-mapped ones as IPv4.
fn parse_address(text: &[u8]) -> Option<IpAddr> {
    let text = std::str::from_utf8(text).ok()?;
    let plain = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    let address = plain.parse().ok().or_else(|| text.parse::<SocketAddr>().ok().map(|socket| socket.ip()));
    Some(address?.to_canonical())
}

fn parse_status(text: &[u8]) -> Option<u16> {
    let text = std::str::from_utf8(text).ok()?;
    text.parse().ok().filter(|status| (100..1000).contains(status))
}

// Fields of text lines: where they end, and what their escapes stand for.

/// The place of the next quote that no backslash stands before.
pub(crate) fn closing_quote(text: &[u8]) -> Option<usize> {
    let mut from = 0;
    loop {
        let position = from + memchr::memchr2(b'"', b'\\', &text[from..])?;
        if text[position] == b'"' {
            return Some(position);
        }
        from = position + 2;
        if from > text.len() {
            return None;
        }
    }
}

/// What a field says: `\"`, `\\`, `\n`, `\t`, `\xHH` of nginx and Apache, `\uHHHH` of JSON.
pub(crate) fn unescape(text: &[u8]) -> Cow<'_, [u8]> {
    let Some(first) = memchr::memchr(b'\\', text) else { return Cow::Borrowed(text) };
    let mut out = text[..first].to_vec();
    let mut rest = &text[first..];
    while let Some((&byte, tail)) = rest.split_first() {
        rest = tail;
        if byte != b'\\' {
            out.push(byte);
            continue;
        }
        let Some((&kind, tail)) = rest.split_first() else {
            out.push(b'\\');
            break;
        };
        rest = tail;
        match kind {
            b'x' if parse_hex(rest, 2).is_some() => {
                out.push(parse_hex(rest, 2).unwrap_or_default() as u8);
                rest = &rest[2..];
            }
            b'u' if parse_hex(rest, 4).is_some() => {
                let code = parse_hex(rest, 4).and_then(char::from_u32).unwrap_or(char::REPLACEMENT_CHARACTER);
                out.extend_from_slice(code.encode_utf8(&mut [0; 4]).as_bytes());
                rest = &rest[4..];
            }
            b'n' => out.push(b'\n'),
            b't' => out.push(b'\t'),
            b'r' => out.push(b'\r'),
            other => out.push(other),
        }
    }
    Cow::Owned(out)
}

fn parse_hex(text: &[u8], digits: usize) -> Option<u32> {
    let text = text.get(..digits)?;
    text.iter().try_fold(0, |number, digit| Some(number * 16 + char::from(*digit).to_digit(16)?))
}

/// A field that says something: `-` and nothing are nothing.
pub(crate) fn non_empty(text: &[u8]) -> Option<&[u8]> {
    (!text.is_empty() && text != b"-").then_some(text)
}

#[cfg(test)]
mod text_tests {
    use super::*;

    #[test]
    fn unescape_decodes_escapes() {
        for (text, expected) in [
            (r"plain", "plain"),
            (r#"a \"b\" c"#, "a \"b\" c"),
            (r"\x22\x5Cx", "\"\\x"),
            (r"\u0041\u00e9", "A\u{e9}"),
            (r"a\\n\n\t", "a\\n\n\t"),
            (r"\xZZ", "xZZ"),
            (r"end\", "end\\"),
        ] {
            assert_eq!(unescape(text.as_bytes()), expected.as_bytes(), "{text}");
        }
    }

    #[test]
    fn closing_quote_skips_escaped_quotes() {
        for (text, expected) in [
            (r#"abc" d"#, Some(3)),
            (r#"a\"b" d"#, Some(4)),
            (r#"a\\" d"#, Some(3)),
            (r#"abc"#, None),
            (r#"abc\"#, None),
            (r#"abc\""#, None),
        ] {
            assert_eq!(closing_quote(text.as_bytes()), expected, "{text}");
        }
    }
}
