//! Formats of access logs: detection and parsing.

pub(crate) mod json;
pub mod text;

use std::borrow::Cow;
use std::net::{IpAddr, SocketAddr};

use http::HeaderName;
use jiff::Timestamp;
use jiff::civil::DateTime;

use crate::tools::replay::format::json::{CaddyFormat, NativeFormat};
use crate::tools::replay::format::text::{CloudFrontFormat, FormatError, NginxFormat};

/// A parsed log line. Fields that the line lacks are empty.
#[derive(Debug, Default, PartialEq)]
pub struct LogEntry<'l> {
    /// Time at which the request started or at which its limits were checked, in µs since the Unix epoch.
    pub time_us: u64,
    /// Duration of the request in µs.
    pub duration_us: Option<u64>,
    /// Address of the client. If `is_client_resolved` is false, it may be the address of a proxy that connected to the
    /// server that wrote the log.
    pub client: Option<IpAddr>,
    /// The request method.
    pub method: &'l [u8],
    /// The request target (path and query).
    pub target: Cow<'l, [u8]>,
    /// The host that the client requested.
    pub host: Option<Cow<'l, [u8]>>,
    /// The status of the response.
    pub status: Option<u16>,
    /// The subject of the client certificate, if there is one.
    pub certificate_subject: Option<Cow<'l, [u8]>>,
    /// Request headers, and additional headers for log fields that the user maps to identities ([`FieldMapping`]).
    pub headers: Vec<(HeaderName, Cow<'l, [u8]>)>,
    /// Whether `client` is the address of the client even if the request came through a proxy, because the server has
    /// already evaluated the proxy's header.
    pub is_client_resolved: bool,
    /// The name of the route, if the log contains it.
    pub route: Option<Cow<'l, str>>,
    /// The cost of the request for each limit, if the log contains it.
    pub costs: Vec<(Cow<'l, str>, u64)>,
    /// Whether the gateway responded before it checked limits.
    pub is_unchecked: bool,
    /// Share of the successful requests that the gateway logged. `None` means all requests.
    pub sample_rate: Option<f64>,
}

/// A log field whose value becomes a header of the replayed request.
#[derive(Debug, Clone)]
pub struct FieldMapping {
    /// The name of the log field.
    pub field: String,
    /// The header with the value of the field.
    pub header: HeaderName,
}

/// Which parts of a request the logs of a format contain.
#[derive(Debug, Clone)]
pub struct FormatCapabilities {
    /// Whether logs contain the address of the client or of a proxy.
    pub client: bool,
    /// Whether logs contain the host that the client requested.
    pub host: bool,
    /// Whether logs contain the query string.
    pub query: bool,
    /// Whether logs contain the subject of the client certificate.
    pub certificate_subject: bool,
    /// Whether logs contain the duration of the request.
    pub duration: bool,
    /// Whether logs contain the status of the response.
    pub status: bool,
    /// The request headers that logs contain.
    pub headers: LoggedHeaders,
    /// Whether logs contain the matched route.
    pub route: bool,
    /// Whether logs contain the identity hashes of each limit.
    pub identity_hashes: bool,
}

/// The request headers that a log may contain.
#[derive(Debug, Clone)]
pub enum LoggedHeaders {
    /// A log contains only these headers.
    Listed(Vec<HeaderName>),
    /// A log contains all headers except those that carry credentials.
    NonSecret,
}

impl LoggedHeaders {
    /// Return whether the log has this header if the client sent the header.
    pub fn contains(&self, name: &HeaderName) -> bool {
        match self {
            LoggedHeaders::Listed(names) => names.contains(name),
            LoggedHeaders::NonSecret => !SECRET_HEADERS.contains(&name.as_str()),
        }
    }
}

/// Headers whose values Caddy logs as REDACTED unless `log_credentials` is set.
const SECRET_HEADERS: [&str; 4] = ["authorization", "cookie", "proxy-authorization", "set-cookie"];

/// The reason why a line cannot be parsed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LineError {
    /// The line does not match the format.
    #[error("not a line of this format")]
    Malformed,
    /// The time is missing or invalid.
    #[error("missing or invalid time")]
    InvalidTime,
    /// A line of a CloudFront log before the `#Fields` line.
    #[error("no `#Fields` line precedes this line")]
    MissingFieldsLine,
    /// The line is longer than 1 MiB.
    #[error("longer than 1 MiB")]
    TooLong,
}

/// A parser of a log format, with the parser's state.
#[derive(Debug, Clone)]
pub enum Format {
    /// The common or combined format, AWS ALB logs, or an nginx `log_format`.
    Template(Box<NginxFormat>),
    /// CloudFront standard logs.
    CloudFront(CloudFrontFormat),
    /// Caddy JSON logs.
    Caddy(CaddyFormat),
    /// JSON access logs of this gateway.
    Native(NativeFormat),
}

/// The names that `--format` accepts.
pub const FORMAT_NAMES: [&str; 6] = ["common", "combined", "caddy", "alb", "cloudfront", "sluicegate"];

impl Format {
    /// Return the format with this name, or parse the text as an nginx `log_format`.
    ///
    /// # Errors
    /// The text is neither the name of a format nor a valid `log_format`.
    pub fn from_name(name: &str) -> Result<Format, FormatError> {
        let template = |text| NginxFormat::new(text).map(|template| Format::Template(Box::new(template)));
        match name {
            "common" => template(text::COMMON),
            "combined" => template(text::COMBINED),
            "alb" => template(text::ALB),
            "caddy" => Ok(Format::Caddy(CaddyFormat::default())),
            "cloudfront" => Ok(Format::CloudFront(CloudFrontFormat::default())),
            "sluicegate" => Ok(Format::Native(NativeFormat::default())),
            text if text.contains('$') => template(text),
            other => Err(FormatError::Unknown(other.to_owned())),
        }
    }

    /// Detect the format: the format that parses the most of these lines, if it parses more than half of them. Return
    /// the name and the parser of the format.
    pub fn detect(lines: &[&[u8]]) -> Option<(&'static str, Format)> {
        // Try `combined` before `common`, because the parser of `common` also accepts lines in the combined format.
        let order = ["sluicegate", "caddy", "cloudfront", "alb", "combined", "common"];
        let try_format = |name: &'static str| {
            let mut format = Format::from_name(name).ok()?;
            let mut read_count = 0;
            let mut total = 0;
            for line in lines {
                match format.parse(line) {
                    Ok(Some(_)) => (read_count, total) = (read_count + 1, total + 1),
                    Ok(None) => {}
                    Err(_) => total += 1,
                }
            }
            (read_count * 2 > total).then_some((read_count, name, format))
        };
        // If several formats parse the same number of lines, the first format of the list must win. Reverse the order,
        // because `max_by_key` returns the last maximum.
        let best = order.into_iter().rev().filter_map(try_format).max_by_key(|(read_count, _, _)| *read_count);
        best.map(|(_, name, format)| (name, format))
    }

    /// Map log fields to request headers. `sample` is the first lines of the log.
    ///
    /// # Errors
    /// The log lacks a mapped field. The error contains the name of this field and the names of the log's fields.
    pub fn map_fields(&mut self, mappings: &[FieldMapping], sample: &[&[u8]]) -> Result<(), (String, Vec<String>)> {
        match self {
            Format::Template(template) => template.map_fields(mappings),
            Format::CloudFront(cloudfront) => cloudfront.map_fields(mappings, sample),
            // Look up the fields in each line, because the lines of JSON logs may have different fields.
            Format::Caddy(CaddyFormat { mappings: own_mappings, .. })
            | Format::Native(NativeFormat { mappings: own_mappings, .. }) => {
                own_mappings.extend_from_slice(mappings);
                Ok(())
            }
        }
    }

    /// Return the parts of requests that the log contains. `sample` is the first lines of the log.
    pub fn capabilities(&self, sample: &[&[u8]]) -> FormatCapabilities {
        match self {
            Format::Template(template) => template.capabilities(),
            Format::CloudFront(cloudfront) => cloudfront.capabilities(sample),
            Format::Caddy(_) => json::caddy_capabilities(),
            Format::Native(_) => json::native_capabilities(sample),
        }
    }

    /// Parse a line without its line ending. Return `None` if the line is a comment.
    ///
    /// # Errors
    /// The line does not match the format.
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
    /// Split a request line such as `GET /path HTTP/1.1`. Method and target stay empty if the line is invalid.
    fn set_request_line(&mut self, line: Cow<'l, [u8]>) {
        let Some((method, target)) = split_request_line(&line) else { return };
        match line {
            Cow::Borrowed(line) => {
                self.method = &line[..method];
                self.target = Cow::Borrowed(&line[target]);
            }
            Cow::Owned(mut line) => {
                // A line with escapes is an owned copy, which does not live long enough for `self.method`. Therefore,
                // use a constant for the method, which contains no escapes.
                let Some(method) = known_method(&line[..method]) else { return };
                self.method = method;
                line.truncate(target.end);
                line.drain(..target.start);
                self.target = Cow::Owned(line);
            }
        }
    }
}

/// Return the end of the method and the range of the request target. Return `None` if the line has no HTTP version,
/// because the request is then HTTP/0.9 or invalid.
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

/// Parse an IP address with or without a port. Convert IPv4-mapped addresses to IPv4.
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

// Quotes and escapes in text logs.

/// Return the position of the next quote that is not escaped.
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

/// Decode the escapes `\"`, `\\`, `\n`, `\t` and `\xHH`, which nginx and Apache write, and the JSON escape `\uHHHH`.
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

/// Return the value of a field. Return `None` if the field is empty or `-`.
pub(crate) fn non_empty(text: &[u8]) -> Option<&[u8]> {
    (!text.is_empty() && text != b"-").then_some(text)
}

// === Times and durations ===

/// Formats of times, from the least to the most precise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum TimestampFormat {
    /// Time of the common log format, such as `10/Oct/2000:13:55:36 -0700`.
    Local,
    /// ISO 8601 time, such as `2000-10-10T13:55:36.123-07:00`.
    Iso8601,
    /// Seconds since the Unix epoch, such as `971211336.123`.
    Unix,
}

/// The last parsed time. Consecutive lines often have the same time, so the cache saves parsing it again.
#[derive(Debug, Clone, Default)]
struct TimestampCache {
    text: Vec<u8>,
    us: u64,
}

impl TimestampCache {
    /// Parse a time. The result is in µs since the Unix epoch.
    fn parse(&mut self, format: TimestampFormat, text: &[u8]) -> Option<u64> {
        if format == TimestampFormat::Unix {
            return parse_unix(text);
        }
        if self.text == text && !text.is_empty() {
            return Some(self.us);
        }
        let us = if format == TimestampFormat::Local { parse_local(text)? } else { parse_iso8601(text)? };
        self.text.clear();
        self.text.extend_from_slice(text);
        self.us = us;
        Some(us)
    }
}

const MONTHS: [&[u8]; 12] =
    [b"Jan", b"Feb", b"Mar", b"Apr", b"May", b"Jun", b"Jul", b"Aug", b"Sep", b"Oct", b"Nov", b"Dec"];

/// Parse a time such as `10/Oct/2000:13:55:36 -0700`. The result is in µs since the Unix epoch.
fn parse_local(text: &[u8]) -> Option<u64> {
    let [d0, d1, b'/', month @ .., b'/', _, _, _, _, b':', _, _, b':', _, _, b':', _, _, b' ', sign, _, _, _, _] = text
    else {
        return None;
    };
    let month = MONTHS.iter().position(|name| *name == month)? + 1;
    let rest = &text[text.len() - 19..];
    let year = parse_digits(&rest[..4])?;
    let hour = parse_digits(&rest[5..7])?;
    let minute = parse_digits(&rest[8..10])?;
    let second = parse_digits(&rest[11..13])?;
    let zone_hours = parse_digits(&text[text.len() - 4..][..2])?;
    let zone_minutes = parse_digits(&text[text.len() - 2..])?;
    let day = parse_digits(&[*d0, *d1])?;
    // Replace second 60 with 59, because jiff rejects leap seconds.
    let second = second.min(59);
    let civil = DateTime::new(year as i16, month as i8, day as i8, hour as i8, minute as i8, second as i8, 0).ok()?;
    let utc = civil.to_zoned(jiff::tz::TimeZone::UTC).ok()?.timestamp().as_second();
    let offset = (zone_hours * 3600 + zone_minutes * 60) as i64;
    let seconds = match sign {
        b'+' => utc - offset,
        b'-' => utc + offset,
        _ => return None,
    };
    u64::try_from(seconds).ok()?.checked_mul(1_000_000)
}

/// Parse an RFC 3339 time, with `T` or a space between date and time. The result is in µs since the Unix epoch.
fn parse_iso8601(text: &[u8]) -> Option<u64> {
    let timestamp: Timestamp = std::str::from_utf8(text).ok()?.parse().ok()?;
    u64::try_from(timestamp.as_microsecond()).ok()
}

/// Parse a decimal number of seconds with an optional fraction. The result is in µs. Ignore digits after the sixth
/// decimal place.
fn parse_unix(text: &[u8]) -> Option<u64> {
    let (whole, fraction) = match memchr::memchr(b'.', text) {
        Some(dot) => (&text[..dot], &text[dot + 1..]),
        None => (text, &[][..]),
    };
    let mut us = parse_digits(whole)?.checked_mul(1_000_000)?;
    let mut unit = 100_000;
    for byte in fraction {
        if !byte.is_ascii_digit() {
            return None;
        }
        us = us.checked_add(u64::from(byte - b'0') * unit)?;
        unit /= 10;
    }
    // Reject times after the year 9999.
    (us < 253_402_300_800_000_000).then_some(us)
}

/// Convert a JSON number of seconds to µs. Return `None` if the number is negative, not finite or after the year 9999.
fn seconds_to_us(number: f64) -> Option<u64> {
    (0.0..253_402_300_800.0).contains(&number).then(|| (number * 1e6).round() as u64)
}

fn parse_digits(text: &[u8]) -> Option<u64> {
    let is_numeric = !text.is_empty() && text.len() <= 12 && text.iter().all(u8::is_ascii_digit);
    is_numeric.then(|| text.iter().fold(0, |number, digit| number * 10 + u64::from(digit - b'0')))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_parse_in_each_format() {
        let october = 971_211_336_000_000;
        for (format, text, expected) in [
            (TimestampFormat::Local, "10/Oct/2000:13:55:36 -0700", Some(october)),
            (TimestampFormat::Local, "10/Oct/2000:22:55:36 +0200", Some(october)),
            (TimestampFormat::Local, "10/Oct/2000:20:55:36 +0000", Some(october)),
            (TimestampFormat::Local, "31/Dec/2016:23:59:60 +0000", Some(1_483_228_799_000_000)),
            (TimestampFormat::Local, "29/Feb/2024:00:00:00 +0000", Some(1_709_164_800_000_000)),
            (TimestampFormat::Local, "29/Feb/2023:00:00:00 +0000", None),
            (TimestampFormat::Local, "10/Okt/2000:13:55:36 -0700", None),
            (TimestampFormat::Local, "10/Oct/2000:13:55:36", None),
            (TimestampFormat::Local, "", None),
            (TimestampFormat::Iso8601, "2000-10-10T13:55:36-07:00", Some(october)),
            (TimestampFormat::Iso8601, "2000-10-10T20:55:36.123456Z", Some(october + 123_456)),
            (TimestampFormat::Iso8601, "1960-10-10T20:55:36Z", None),
            (TimestampFormat::Iso8601, "yesterday", None),
            (TimestampFormat::Unix, "971211336", Some(october)),
            (TimestampFormat::Unix, "971211336.5", Some(october + 500_000)),
            (TimestampFormat::Unix, "971211336.1234567", Some(october + 123_456)),
            (TimestampFormat::Unix, "-1", None),
            (TimestampFormat::Unix, "99999999999999", None),
            (TimestampFormat::Unix, "9711.3.4", None),
        ] {
            let mut cache = TimestampCache::default();
            assert_eq!(cache.parse(format, text.as_bytes()), expected, "{text}");
            assert_eq!(cache.parse(format, text.as_bytes()), expected, "{text}, from the cache");
        }
        assert_eq!(seconds_to_us(971_211_336.123_457), Some(october + 123_457));
        assert_eq!(seconds_to_us(f64::NAN), None);
        assert_eq!(seconds_to_us(-1.0), None);
    }
}
