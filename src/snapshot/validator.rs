//! Validation of configuration values. All errors are collected, so that one run reports all of them.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::{Range, RangeInclusive};
use std::path::{Path, PathBuf};
use std::time::Duration;

use http::header::HOST;
use http::{HeaderName, HeaderValue, Method};

use crate::config::environment::{EnvLookup, UnresolvedValue};
use crate::config::error::{ConfigError, FileIssues, Issue};
use crate::config::file::{ParsedFile, UnsetVariables, resolve_issues};
use crate::config::foreign::meant_word;
use crate::config::sources::FileSnapshot;
use crate::config::sources::Sources;
use crate::config::spanned::{Spanned, Text};
use crate::config::unknown_keys::{UnknownKeys, closest_name};
use crate::http::target::canonical_host;
use crate::http::url::{HttpUrl, UrlError};
use crate::limiter::quota::parse_duration_us;

/// Maximum of sizes: 1 GiB, and 16 TiB for the memory of the process.
const MAX_SIZE: usize = 1 << 30;
const MAX_MEMORY: usize = 1 << 44;

/// Collects the issues of a configuration. After an error, each method returns a usable value or `None`, so that
/// validation can continue.
pub(super) struct Validator<'a> {
    sources: Sources,
    /// Issues that the parser found.
    parser_issues: Vec<Issue>,
    unknown_keys: UnknownKeys,
    issues: Vec<Issue>,
    unresolved: Vec<UnresolvedValue>,
    warnings: Vec<Issue>,
    /// Issues of other files that the configuration refers to.
    other_files: Vec<FileIssues>,
    pub(super) environment: EnvLookup<'a>,
}

impl<'a> Validator<'a> {
    /// Create a validator. Move the parser's issues out of `file`.
    pub(super) fn new<T>(file: &mut ParsedFile<T>, environment: EnvLookup<'a>) -> Self {
        Validator {
            sources: file.sources.clone(),
            parser_issues: std::mem::take(&mut file.issues),
            unknown_keys: std::mem::take(&mut file.unknown_keys),
            issues: Vec::new(),
            unresolved: std::mem::take(&mut file.unresolved),
            warnings: std::mem::take(&mut file.warnings),
            other_files: Vec::new(),
            environment,
        }
    }

    /// Return the warnings, if there are no errors.
    ///
    /// # Errors
    /// All errors that were collected.
    pub(super) fn finish(self, policy: UnsetVariables<'_>) -> Result<Vec<Issue>, ConfigError> {
        let mut issues = self.parser_issues;
        issues.extend(self.issues.into_iter().filter(|issue| !self.unknown_keys.hide(issue)));
        let (issues, warnings) = resolve_issues(&self.sources, issues, self.unresolved, self.warnings, policy);
        let mut files = self.sources.by_file(issues);
        files.extend(self.other_files);
        if files.is_empty() { Ok(warnings) } else { Err(ConfigError { files }) }
    }

    /// Return whether the value contains an environment variable that is not set. Such a value is only a placeholder.
    pub(super) fn is_unresolved<T>(&self, value: &Spanned<T>) -> bool {
        self.unresolved.iter().any(|unresolved| unresolved.is_within(&value.span()))
    }

    /// Return a hint that names the line of the first definition.
    pub(super) fn first_line_hint(&self, first: &Range<usize>) -> String {
        self.sources.first_line_hint(first)
    }

    pub(super) fn push_issue(&mut self, issue: Issue) {
        self.issues.push(issue);
    }

    /// Report a missing key. Do nothing if an unknown key in the same entry (such as a route or limit) may be a
    /// misspelling of the missing key.
    pub(super) fn push_missing(&mut self, issue: Issue) {
        if !self.unknown_keys.may_be_missing_in(&issue) {
            self.push_issue(issue);
        }
    }

    /// Report that something is missing elsewhere in the file. Do nothing if an unknown key in the file may be the
    /// cause.
    pub(super) fn push_missing_elsewhere(&mut self, issue: Issue) {
        if self.unknown_keys.is_empty() {
            self.push_issue(issue);
        }
    }

    pub(super) fn add_file_issues(&mut self, faulty: FileIssues) {
        self.other_files.push(faulty);
    }

    /// Report a missing table. Do nothing if an unknown table may be a misspelling of it.
    pub(super) fn missing_table(&mut self, message: &str, hint: &str) {
        self.push_missing_elsewhere(Issue { span: None, message: message.to_owned(), hint: Some(hint.to_owned()) });
    }

    /// Return the path of the main configuration file.
    pub(super) fn main_path(&self) -> &Path {
        self.sources.main().0
    }

    /// Resolve a path relative to the directory of the configuration file that contains `text`.
    pub(super) fn resolve_path(&self, text: &Text) -> PathBuf {
        self.resolve_relative(text.get_ref(), text.span())
    }

    /// Resolve a path relative to the directory of the configuration file that contains `span`.
    pub(super) fn resolve_relative(&self, path: &str, span: Range<usize>) -> PathBuf {
        self.sources.directory_of(&span).join(path)
    }

    /// Read a PEM file with certificates or a private key.
    pub(super) fn read_pem(&mut self, text: &Text) -> Option<FileSnapshot> {
        let path = self.resolve_path(text);
        match FileSnapshot::read(&path) {
            Ok(file) => Some(file),
            Err(error) => {
                let issue = Issue::new(text.span(), format!("{} cannot be read: {error}", path.display()));
                self.push_issue(
                    issue.with_hint("give the paths of PEM files; `make certs` creates some for development"),
                );
                None
            }
        }
    }

    /// Report an error if a required value is missing.
    pub(super) fn required<'t, T>(
        &mut self,
        value: Option<&'t T>,
        span: &Range<usize>,
        key: &str,
        example: &str,
    ) -> Option<&'t T> {
        if value.is_none() {
            let issue = Issue::new(span.clone(), format!("`{key}` is missing"));
            self.push_missing(issue.with_hint(format!("write a value, for example {key} = {example}")));
        }
        value
    }

    /// Parse a duration.
    pub(super) fn duration(&mut self, text: Option<&Text>, default: Duration) -> Duration {
        let Some(text) = text else { return default };
        match parse_duration_us(text.get_ref()) {
            Some(us) => Duration::from_micros(us),
            None => {
                let message = format!("`{}` is not a duration", text.get_ref());
                let example = || "write a duration with ms, s, m, h or d, such as \"250ms\"".to_owned();
                let hint = suggestion(text.get_ref(), &DURATION_UNITS).unwrap_or_else(example);
                self.push_issue(Issue::new(text.span(), message).with_hint(hint));
                default
            }
        }
    }

    /// Parse a duration whose default is `0s`.
    pub(super) fn duration_or_zero(&mut self, text: Option<&Text>) -> Duration {
        self.duration(text.filter(|text| text.get_ref() != "0s"), Duration::ZERO)
    }

    /// Parse a size from 1 byte to 1 GiB.
    pub(super) fn size(&mut self, text: Option<&Text>, default: usize) -> usize {
        self.size_within(1..=MAX_SIZE, text, default)
    }

    /// Parse a size from 0 to 1 GiB. 0 disables the feature.
    pub(super) fn size_or_off(&mut self, text: Option<&Text>, default: usize) -> usize {
        self.size_within(0..=MAX_SIZE, text, default)
    }

    /// Parse a size of the memory of the process, up to 16 TiB.
    pub(super) fn memory_size(&mut self, text: &Text) -> usize {
        self.size_within(0..=MAX_MEMORY, Some(text), 0)
    }

    fn size_within(&mut self, range: RangeInclusive<usize>, text: Option<&Text>, default: usize) -> usize {
        let Some(text) = text else { return default };
        let split = text.get_ref().find(|c: char| !c.is_ascii_digit()).unwrap_or(text.get_ref().len());
        let (count, unit) = text.get_ref().split_at(split);
        let factor = match unit {
            "B" => Some(1),
            "KiB" => Some(1 << 10),
            "MiB" => Some(1 << 20),
            "GiB" => Some(1 << 30),
            _ => None,
        };
        let bytes = count.parse::<usize>().ok().zip(factor).and_then(|(count, factor)| count.checked_mul(factor));
        match bytes.filter(|bytes| range.contains(bytes)) {
            Some(bytes) => bytes,
            None => {
                let message = format!("`{}` is not a size", text.get_ref());
                let example = || "write a size with B, KiB or MiB, such as \"64KiB\"".to_owned();
                let hint = suggestion(text.get_ref(), &SIZE_UNITS).unwrap_or_else(example);
                self.push_issue(Issue::new(text.span(), message).with_hint(hint));
                default
            }
        }
    }

    /// Check that a number is in the allowed range.
    pub(super) fn number(&mut self, value: Option<&Spanned<i64>>, allowed: Range<i64>, default: i64) -> i64 {
        let Some(value) = value else { return default };
        if allowed.contains(value.get_ref()) {
            return *value.get_ref();
        }
        let message = format!("{} is out of range", value.get_ref());
        self.push_issue(Issue::new(value.span(), message).with_hint(format!(
            "write a number from {} to {}",
            allowed.start,
            allowed.end - 1
        )));
        default
    }

    /// Check that a number is in the allowed range. The number may have a fraction.
    pub(super) fn fraction(&mut self, value: Option<&Spanned<f64>>, allowed: RangeInclusive<i32>, default: f64) -> f64 {
        let Some(value) = value else { return default };
        // NaN is not in any range, so it is rejected.
        if (f64::from(*allowed.start())..=f64::from(*allowed.end())).contains(value.get_ref()) {
            return *value.get_ref();
        }
        let message = format!("{} is out of range", value.get_ref());
        let hint = format!("write a number from {} to {}, such as 0.1", allowed.start(), allowed.end());
        self.push_issue(Issue::new(value.span(), message).with_hint(hint));
        default
    }

    /// Parse an address and port to listen on.
    pub(super) fn address(&mut self, text: &Text) -> Option<SocketAddr> {
        let address = text.get_ref().parse().ok();
        if address.is_none() {
            let (message, hint) = invalid_address(text.get_ref());
            self.push_issue(Issue::new(text.span(), message).with_hint(hint));
        }
        address
    }

    /// Parse the URL of a server. `example` is a valid value in quotes, and `credentials` says where credentials belong.
    pub(super) fn url(&mut self, text: &Text, example: &str, credentials: &str) -> Option<HttpUrl> {
        let parsed = text.get_ref().parse::<HttpUrl>();
        parsed.map_err(|error| self.invalid_url(text.span(), &error, example, credentials)).ok()
    }

    /// Report a text that is not the URL of a server.
    pub(super) fn invalid_url(&mut self, span: Range<usize>, error: &UrlError, example: &str, credentials: &str) {
        self.push_issue(Issue::new(span, error.to_string()).with_hint(error.hint(example, credentials)));
    }

    /// Parse a value from a fixed list.
    pub(super) fn one_of<T: Copy>(&mut self, text: Option<&Text>, default: T, variants: &[(&str, T)]) -> T {
        let Some(text) = text else { return default };
        match variants.iter().find(|(variant, _)| variant == text.get_ref()) {
            Some((_, value)) => *value,
            None => {
                let names = variants.iter().map(|(variant, _)| *variant);
                self.unknown_name(text.span(), "value", text.get_ref(), names);
                default
            }
        }
    }

    /// Report a name that is not defined. Do nothing if an unknown table defines this name.
    pub(super) fn unknown_name<'n>(
        &mut self,
        span: Range<usize>,
        what: &str,
        name: &str,
        known: impl Iterator<Item = &'n str> + Clone,
    ) {
        if self.unknown_keys.define(name) {
            return;
        }
        let issue = Issue::new(span, format!("unknown {what} `{name}`"));
        let hint = match meant_word(name, known.clone()).or_else(|| closest_name(name, known.clone())) {
            Some(near) => format!("did you mean `{near}`?"),
            None => match known.collect::<Vec<_>>().join(", ") {
                all if all.is_empty() => format!("no {what} is defined"),
                all => format!("known: {all}"),
            },
        };
        self.push_issue(issue.with_hint(hint));
    }

    /// Parse HTTP methods. If the list is absent, return an empty list, which means all methods.
    pub(super) fn methods(&mut self, list: Option<&[Text]>, span: &Range<usize>) -> Vec<Method> {
        if list.is_some_and(<[_]>::is_empty) {
            let issue = Issue::new(span.clone(), "`methods` is empty: no request would match");
            self.push_issue(issue.with_hint("remove `methods` to match all methods"));
        }
        let mut methods = Vec::new();
        for text in list.unwrap_or_default() {
            let upper = text.get_ref().to_ascii_uppercase();
            match upper.parse() {
                Ok(method) if upper == *text.get_ref() => methods.push(method),
                _ => {
                    let issue = Issue::new(text.span(), format!("`{}` is not a method", text.get_ref()));
                    self.push_issue(issue.with_hint(match upper.as_str() {
                        "*" | "ANY" | "ALL" => "remove `methods` to match all methods".to_owned(),
                        _ if upper.contains([',', '|', ' ']) => {
                            "write each method as an item of the list: [\"GET\", \"POST\"]".to_owned()
                        }
                        _ => format!("write methods in upper case: \"{upper}\""),
                    }));
                }
            }
        }
        methods
    }

    /// Compile `hosts`. An empty list means any host.
    pub(super) fn hosts(&mut self, list: &[Text], span: &Range<usize>) -> Vec<String> {
        if list.is_empty() {
            let issue = Issue::new(span.clone(), "`hosts` is empty: no request would match");
            self.push_issue(issue.with_hint("remove `hosts` to match any host"));
        }
        let mut hosts: Vec<String> = Vec::new();
        for text in list {
            let host = canonical_host(text.get_ref()).into_owned();
            if host == "*" {
                if list.len() > 1 {
                    let issue = Issue::new(text.span(), "`*` matches any host, so the other hosts have no effect");
                    self.push_issue(issue.with_hint("remove `*`, or remove `hosts`"));
                }
            } else if !is_host(host.strip_prefix("*.").unwrap_or(&host)) {
                let issue = Issue::new(text.span(), format!("`{}` is not a host", text.get_ref()));
                self.push_issue(
                    issue.with_hint("write a name without port, such as \"api.example.com\" or \"*.example.com\""),
                );
            } else if hosts.contains(&host) {
                let issue = Issue::new(text.span(), format!("the host `{host}` is listed twice"));
                self.push_issue(issue.with_hint("remove one of them"));
            } else {
                hosts.push(host);
            }
        }
        hosts
    }

    /// Parse a header name.
    pub(super) fn header_name(&mut self, span: Range<usize>, name: &str) -> Option<HeaderName> {
        let parsed = name.parse().ok();
        if parsed.is_none() {
            let issue = Issue::new(span, format!("`{name}` is not a header name"));
            self.push_issue(issue.with_hint("use letters, digits and `-`, such as \"x-version\""));
        }
        parsed
    }

    /// Parse the name of a header that is used for routing or as an identity. Reject `Host`, because the host of a
    /// request may be in its target and can be written in several ways. The hint then suggests `instead`.
    pub(super) fn routed_header_name(&mut self, span: Range<usize>, name: &str, instead: &str) -> Option<HeaderName> {
        let parsed = self.header_name(span.clone(), name)?;
        if parsed == HOST {
            let issue = Issue::new(span, "the host of a request may differ from its `Host` header");
            self.push_issue(issue.with_hint(format!("write {instead}")));
        }
        Some(parsed)
    }

    /// Parse a header value.
    pub(super) fn header_value(&mut self, text: &Text) -> Option<HeaderValue> {
        self.header_value_of(text.span(), text.get_ref())
    }

    /// Parse a header value. `span` is the span of the value in the file that contains it.
    pub(super) fn header_value_of(&mut self, span: Range<usize>, value: &str) -> Option<HeaderValue> {
        let parsed = HeaderValue::from_str(value).ok();
        if parsed.is_none() {
            let issue = Issue::new(span, "this is not a valid header value");
            self.push_issue(issue.with_hint("write one line without control characters"));
        }
        parsed
    }

    /// Check the characters and length of a name. Names appear in headers, state keys and metric labels.
    pub(super) fn check_name(&mut self, span: Range<usize>, name: &str) {
        let is_valid = !name.is_empty()
            && name.len() <= 64
            && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'));
        if !is_valid {
            let hint =
                "use 1 to 64 letters, digits, `-`, `_` or `.`, because names appear in headers, keys and metrics";
            self.push_issue(Issue::new(span, format!("`{name}` is not a valid name")).with_hint(hint));
        }
    }
}

/// Units of durations and sizes, each with the spellings of other programs in lower case. An empty spelling stands for a
/// number without a unit.
type Units = [(&'static str, &'static [&'static str])];

const DURATION_UNITS: [(&str, &[&str]); 5] = [
    ("ms", &["millis", "millisecond", "milliseconds", "msec"]),
    ("s", &["", "sec", "secs", "second", "seconds"]),
    ("m", &["min", "mins", "minute", "minutes"]),
    ("h", &["hr", "hrs", "hour", "hours"]),
    ("d", &["day", "days"]),
];

const SIZE_UNITS: [(&str, &[&str]); 4] = [
    ("B", &["", "b", "byte", "bytes"]),
    ("KiB", &["k", "kb", "kib", "ki"]),
    ("MiB", &["m", "mb", "mib", "mi"]),
    ("GiB", &["g", "gb", "gib", "gi"]),
];

/// Return a hint with the value that text in the notation of another program means, such as `30 seconds` or `1m`.
fn suggestion(text: &str, units: &Units) -> Option<String> {
    let text = text.trim().to_ascii_lowercase();
    let (count, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let (own, _) = units.iter().find(|(_, spellings)| spellings.contains(&unit.trim()))?;
    (!count.trim_start_matches('0').is_empty()).then(|| format!("did you mean \"{count}{own}\"?"))
}

/// Return the message and the hint for text that is not an IP address with a port. The hint understands the forms of
/// other programs: `localhost:8080`, `:8080`, `*:8080`, `8080`, `127.0.0.1` and `http://127.0.0.1:8080`.
fn invalid_address(text: &str) -> (String, String) {
    let message = format!("`{text}` is not an IP address with a port");
    let is_name = |host: &str| host.contains(|c: char| c.is_ascii_alphabetic()) && !host.contains([':', '[', '/']);
    // `parse` also accepts a plus sign.
    let is_port = |text: &str| text.parse::<u16>().is_ok() && !text.starts_with('+');
    let rest = ["http://", "https://"].iter().find_map(|scheme| text.strip_prefix(scheme));
    let address = rest.map_or(text, |rest| rest.trim_end_matches('/'));
    match address.rsplit_once(':').filter(|(_, port)| is_port(port)) {
        Some(_) if address.parse::<SocketAddr>().is_ok() => (message, format!("write \"{address}\", without a scheme")),
        Some(("localhost", port)) => {
            (format!("`{text}` has a host name instead of an IP address"), format!("write \"127.0.0.1:{port}\""))
        }
        Some((host, port)) if is_name(host) => (
            format!("`{text}` has a host name instead of an IP address"),
            format!("write an address of this machine, such as \"127.0.0.1:{port}\", or \"0.0.0.0:{port}\" for all"),
        ),
        Some(("" | "*", port)) => {
            (message, format!("write \"0.0.0.0:{port}\" for all IPv4 addresses, or \"[::]:{port}\" for IPv6"))
        }
        None if is_port(address) => (message, format!("write \"127.0.0.1:{address}\" or \"0.0.0.0:{address}\"")),
        _ if address.parse::<Ipv4Addr>().is_ok() => {
            (format!("`{text}` has no port"), format!("add a port, such as \"{address}:8080\""))
        }
        _ if address.trim_matches(['[', ']']).parse::<Ipv6Addr>().is_ok() => {
            let address = address.trim_matches(['[', ']']);
            (format!("`{text}` has no port"), format!("add a port, such as \"[{address}]:8080\""))
        }
        _ => (message, "such as \"127.0.0.1:8080\", \"0.0.0.0:80\" or \"[::]:80\"".to_owned()),
    }
}

/// Return whether a host can occur in a request: a name, an IPv4 address, or an IPv6 address in brackets, without a
/// port. `name` is in canonical form. For a wildcard, it is the part after `*.`.
fn is_host(name: &str) -> bool {
    let address = name.strip_prefix('[').and_then(|inner| inner.strip_suffix(']'));
    address.is_some_and(|address| address.parse::<Ipv6Addr>().is_ok())
        || (!name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte)))
}
