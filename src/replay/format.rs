//! The formats of access logs, and what each says of a request.

mod caddy;
mod cloudfront;
mod instant;
pub(super) mod own;
mod template;
mod text;

use std::borrow::Cow;
use std::net::{IpAddr, SocketAddr};

use http::HeaderName;

use caddy::Caddy;
use cloudfront::CloudFront;
use own::Own;
use template::Template;
pub use template::TemplateError;

/// What a line says of a request. Whatever it does not say is empty.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Entry<'l> {
    /// When it came, or was decided, µs since the Unix epoch.
    pub at_us: u64,
    /// How long it took, µs.
    pub took_us: Option<u64>,
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
    pub subject: Option<Cow<'l, [u8]>>,
    /// Fields of its header section, and what [`Mapped`] stands for.
    pub fields: Vec<(HeaderName, Cow<'l, [u8]>)>,
    /// Whether `client` is whose request it is, proxies before it being seen through.
    pub resolved: bool,
    /// The route that it took.
    pub route: Option<Cow<'l, str>>,
    /// What it cost each of its limits.
    pub costs: Vec<(Cow<'l, str>, u64)>,
}

/// A field of the log that stands for a header of the request.
#[derive(Debug, Clone)]
pub struct Mapped {
    /// How the log calls it.
    pub field: String,
    /// The header.
    pub header: HeaderName,
}

/// Which parts of requests a format has.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct Provides {
    pub client: bool,
    pub host: bool,
    pub query: bool,
    pub subject: bool,
    pub took: bool,
    pub status: bool,
    pub headers: Headers,
    /// Which route a request took.
    pub route: bool,
    /// Whether each line has the hashes of whoever asked its limits.
    pub hashed: bool,
}

/// Which header fields a format has.
#[derive(Debug, Clone)]
pub enum Headers {
    /// These.
    Listed(Vec<HeaderName>),
    /// All but those that carry secrets.
    Harmless,
}

impl Headers {
    /// Whether a field that the client sent would be there.
    pub fn has(&self, name: &HeaderName) -> bool {
        match self {
            Headers::Listed(names) => names.contains(name),
            Headers::Harmless => !SECRET.contains(&name.as_str()),
        }
    }
}

/// What Caddy replaces by REDACTED unless it is told to log credentials.
const SECRET: [&str; 4] = ["authorization", "cookie", "proxy-authorization", "set-cookie"];

/// Why a line says nothing of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum LineError {
    #[error("not a line of this format")]
    Shape,
    #[error("no time that can be read")]
    Time,
    #[error("a `#Fields` line is missing before it")]
    NoFields,
    #[error("longer than a mebibyte")]
    TooLong,
}

/// A format, with what it remembers from line to line.
#[derive(Debug, Clone)]
pub enum Format {
    /// Common, combined, ALB, or a `log_format` of nginx.
    Template(Box<Template>),
    /// Standard logs of CloudFront.
    CloudFront(CloudFront),
    /// Caddy's JSON.
    Caddy(Caddy),
    /// Our own JSON.
    Own(Own),
}

/// The names of formats, and what they are, as `--format` takes them.
pub const NAMES: [&str; 6] = ["common", "combined", "caddy", "alb", "cloudfront", "sluicegate"];

impl Format {
    /// The format of this name, or the one that a `log_format` of nginx describes.
    ///
    /// # Errors
    /// It is neither, or lacks a time or a request.
    pub fn named(name: &str) -> Result<Format, TemplateError> {
        let template = |text| Template::new(text).map(|template| Format::Template(Box::new(template)));
        match name {
            "common" => template(template::COMMON),
            "combined" => template(template::COMBINED),
            "alb" => template(template::ALB),
            "caddy" => Ok(Format::Caddy(Caddy::default())),
            "cloudfront" => Ok(Format::CloudFront(CloudFront::default())),
            "sluicegate" => Ok(Format::Own(Own::default())),
            text if text.contains('$') => template(text),
            other => Err(TemplateError::Unknown(other.to_owned())),
        }
    }

    /// The first format, and its name, that reads most of these lines.
    pub fn detect(lines: &[&[u8]]) -> Option<(&'static str, Format)> {
        // Combined before common, which reads its lines as well.
        let order = ["sluicegate", "caddy", "cloudfront", "alb", "combined", "common"];
        let read = |name: &'static str| {
            let mut format = Format::named(name).ok()?;
            let (mut read, mut all) = (0, 0);
            for line in lines {
                match format.parse(line) {
                    Ok(Some(_)) => (read, all) = (read + 1, all + 1),
                    Ok(None) => {}
                    Err(_) => all += 1,
                }
            }
            (read * 2 > all).then_some((read, name, format))
        };
        // On equal terms the first one.
        let found = order.into_iter().rev().filter_map(read).max_by_key(|(read, _, _)| *read);
        found.map(|(_, name, format)| (name, format))
    }

    /// Lets fields of the log stand for headers. `sample` is the beginning of the log.
    ///
    /// # Errors
    /// The log has no field of this name: the name, and those that it has.
    pub fn map(&mut self, mapped: &[Mapped], sample: &[&[u8]]) -> Result<(), (String, Vec<String>)> {
        match self {
            Format::Template(template) => template.map(mapped),
            Format::CloudFront(cloudfront) => cloudfront.map(mapped, sample),
            // Fields of JSON come and go: each line is looked at.
            Format::Caddy(Caddy { mapped: own, .. }) | Format::Own(Own { mapped: own, .. }) => {
                own.extend_from_slice(mapped);
                Ok(())
            }
        }
    }

    /// Which parts of requests there are. `sample` is the beginning of the log.
    pub fn provides(&self, sample: &[&[u8]]) -> Provides {
        match self {
            Format::Template(template) => template.provides(),
            Format::CloudFront(cloudfront) => cloudfront.provides(sample),
            Format::Caddy(_) => caddy::provides(),
            Format::Own(_) => own::provides(sample),
        }
    }

    /// Reads a line without its end; none if it is a comment.
    ///
    /// # Errors
    /// Why it cannot be read.
    pub fn parse<'l>(&mut self, line: &'l [u8]) -> Result<Option<Entry<'l>>, LineError> {
        match self {
            Format::Template(template) => template.parse(line).map(Some),
            Format::CloudFront(cloudfront) => cloudfront.parse(line),
            Format::Caddy(caddy) => caddy.parse(line),
            Format::Own(own) => own.parse(line).map(Some),
        }
    }
}

impl<'l> Entry<'l> {
    /// Takes `GET /path HTTP/1.1` apart; what is no such line leaves method and target empty.
    fn request_line(&mut self, line: Cow<'l, [u8]>) {
        let Some((method, target)) = parts(&line) else { return };
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
fn parts(line: &[u8]) -> Option<(usize, std::ops::Range<usize>)> {
    let method = memchr::memchr(b' ', line)?;
    let version = memchr::memrchr(b' ', line)?;
    let is_request = method > 0 && version > method + 1 && line[version + 1..].starts_with(b"HTTP/");
    is_request.then_some((method, method + 1..version))
}

fn known_method(text: &[u8]) -> Option<&'static [u8]> {
    const KNOWN: [&[u8]; 7] = [b"GET", b"POST", b"PUT", b"DELETE", b"HEAD", b"OPTIONS", b"PATCH"];
    KNOWN.into_iter().find(|known| *known == text)
}

/// An address, with a port or without; IPv4-mapped ones as IPv4.
fn address(text: &[u8]) -> Option<IpAddr> {
    let text = std::str::from_utf8(text).ok()?;
    let plain = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    let address = plain.parse().ok().or_else(|| text.parse::<SocketAddr>().ok().map(|socket| socket.ip()));
    Some(address?.to_canonical())
}

fn status(text: &[u8]) -> Option<u16> {
    let text = std::str::from_utf8(text).ok()?;
    text.parse().ok().filter(|status| (100..1000).contains(status))
}
