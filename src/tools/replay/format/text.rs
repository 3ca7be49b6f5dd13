//! Parsers of text access logs: templates in the syntax of nginx's `log_format`, and CloudFront logs.

use std::borrow::Cow;

use http::HeaderName;
use http::header::{COOKIE, REFERER, USER_AGENT};
use percent_encoding::percent_decode;

use crate::tools::replay::format::{
    FieldMapping, FormatCapabilities, LineError, LogEntry, LoggedHeaders, TimestampCache, TimestampFormat,
    closing_quote, non_empty, parse_address, parse_iso8601, parse_status, parse_unix, seconds_to_us, unescape,
};

pub(super) const COMMON: &str = r#"$remote_addr $ident $remote_user [$time_local] "$request" $status $body_bytes_sent"#;

pub(super) const COMBINED: &str = r#"$remote_addr $ident $remote_user [$time_local] "$request" $status $body_bytes_sent "$http_referer" "$http_user_agent""#;

/// Access logs of AWS Application Load Balancers:
/// <https://docs.aws.amazon.com/elasticloadbalancing/latest/application/load-balancer-access-logs.html>. `$rest`
/// contains all further fields, because AWS may append new fields.
pub(super) const ALB: &str = r#"$type $time_iso8601 $elb $client_port $target_port $request_processing_time $target_processing_time $response_processing_time $elb_status_code $target_status_code $received_bytes $sent_bytes "$request" "$http_user_agent" $ssl_cipher $ssl_protocol $target_group_arn "$trace_id" "$domain_name" "$chosen_cert_arn" $matched_rule_priority $request_creation_time $rest"#;

/// The reason why a text is not a valid `log_format`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// The text is neither the name of a format nor a template with variables.
    #[error(
        "`{0}` is not a format: use one of {names}, or an nginx log_format such as '$remote_addr …'",
        names = crate::tools::replay::format::FORMAT_NAMES.join(", ")
    )]
    Unknown(String),
    /// The template has two variables without text between them.
    #[error("`{0}` and `{1}` are adjacent: separate them by text")]
    Adjacent(String, String),
    /// The template has no variable with the time of the request.
    #[error("the format has no time: $time_local, $time_iso8601 or $msec")]
    NoTime,
    /// The template has neither a variable with the request line nor variables with the method and the target.
    #[error("the format has no request: $request, or $request_method and $request_uri")]
    NoRequest,
}

/// The part of a request or response that a variable contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FieldRole {
    Other,
    Client,
    Time(TimestampFormat),
    /// The time at which the request started. [`FieldRole::Time`] is the time at which it ended.
    StartTime,
    Duration,
    /// The duration in ms, in logs of the gateway.
    Milliseconds,
    Request,
    Method,
    Target,
    Query,
    Host,
    Status,
    Subject,
}

#[derive(Debug, Clone)]
struct Variable {
    name: String,
    role: FieldRole,
    /// The name of the cookie that the variable contains.
    cookie: Option<String>,
    /// The headers of the replayed request that are set to the value of the variable.
    headers: Vec<HeaderName>,
    /// The fixed text between this variable and the next variable.
    delimiter: Vec<u8>,
}

/// Parser of a template: variables separated by fixed text.
#[derive(Debug, Clone)]
pub struct NginxFormat {
    prefix: Vec<u8>,
    variables: Vec<Variable>,
    /// The most precise time format in the template. Time variables in other formats are ignored.
    time_format: TimestampFormat,
    timestamp_cache: TimestampCache,
}

impl NginxFormat {
    pub(super) fn new(text: &str) -> Result<NginxFormat, FormatError> {
        let mut pieces = text.split('$');
        let prefix = pieces.next().unwrap_or_default().as_bytes().to_vec();
        let mut variables: Vec<Variable> = Vec::new();
        for piece in pieces {
            let (name, delimiter) = match piece.strip_prefix('{').and_then(|piece| piece.split_once('}')) {
                Some(split) => split,
                None => {
                    piece.split_at(piece.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(piece.len()))
                }
            };
            if let Some(previous) = variables.last().filter(|before| before.delimiter.is_empty()) {
                return Err(FormatError::Adjacent(format!("${}", previous.name), format!("${name}")));
            }
            variables.push(Variable::new(name, delimiter));
        }
        let time_formats = variables.iter().filter_map(|variable| match variable.role {
            FieldRole::Time(time_format) => Some(time_format),
            _ => None,
        });
        let time_format = time_formats.max().ok_or(FormatError::NoTime)?;
        let template = NginxFormat { prefix, variables, time_format, timestamp_cache: TimestampCache::default() };
        let has_request =
            template.has(FieldRole::Request) || template.has(FieldRole::Method) && template.has(FieldRole::Target);
        if has_request { Ok(template) } else { Err(FormatError::NoRequest) }
    }

    fn has(&self, role: FieldRole) -> bool {
        self.variables.iter().any(|variable| variable.role == role)
    }

    pub(super) fn map_fields(&mut self, mappings: &[FieldMapping]) -> Result<(), (String, Vec<String>)> {
        for FieldMapping { field, header } in mappings {
            let name = field.trim_start_matches('$');
            match self.variables.iter_mut().find(|variable| variable.name == name) {
                Some(variable) => variable.headers.push(header.clone()),
                None => {
                    return Err((field.clone(), self.variables.iter().map(|variable| variable.name.clone()).collect()));
                }
            }
        }
        Ok(())
    }

    pub(super) fn capabilities(&self) -> FormatCapabilities {
        let headers = self.variables.iter().flat_map(|variable| &variable.headers).cloned().collect();
        FormatCapabilities {
            client: self.has(FieldRole::Client),
            // ALB logs contain the host in absolute URLs, which the parser splits.
            host: self.has(FieldRole::Host) || self.variables.iter().any(|variable| variable.name == "elb"),
            query: self.has(FieldRole::Request) || self.has(FieldRole::Target) || self.has(FieldRole::Query),
            certificate_subject: self.has(FieldRole::Subject),
            duration: self.has(FieldRole::Duration)
                || self.has(FieldRole::Milliseconds)
                || self.has(FieldRole::StartTime),
            status: self.has(FieldRole::Status),
            headers: LoggedHeaders::Listed(headers),
            route: false,
            identity_hashes: false,
        }
    }

    pub(super) fn parse<'l>(&mut self, line: &'l [u8]) -> Result<LogEntry<'l>, LineError> {
        let mut rest = line.strip_prefix(&*self.prefix).ok_or(LineError::Malformed)?;
        let mut entry = LogEntry::default();
        let mut line_time_us = None;
        let mut start_time_us = None;
        let mut query = None;
        let mut is_quoted = self.prefix.last() == Some(&b'"');
        for variable in &self.variables {
            let (value, tail) = variable.split_value(rest, is_quoted).ok_or(LineError::Malformed)?;
            rest = tail;
            is_quoted = variable.delimiter.last() == Some(&b'"');
            match variable.role {
                FieldRole::Other => {}
                FieldRole::Client => {
                    entry.client = parse_address(value);
                    entry.is_client_resolved = variable.name == "client";
                }
                FieldRole::Time(time_format) if time_format == self.time_format => {
                    line_time_us = Some(self.timestamp_cache.parse(time_format, value).ok_or(LineError::InvalidTime)?);
                }
                FieldRole::Time(_) => {}
                FieldRole::StartTime => {
                    start_time_us = non_empty(value).and_then(crate::tools::replay::format::parse_iso8601)
                }
                FieldRole::Duration => entry.duration_us = non_empty(value).and_then(parse_unix),
                FieldRole::Milliseconds => entry.duration_us = non_empty(value).and_then(parse_milliseconds),
                FieldRole::Request => entry.set_request_line(unescape(value)),
                FieldRole::Method => entry.method = value,
                FieldRole::Target => entry.target = unescape(value),
                FieldRole::Query => query = non_empty(value).map(unescape),
                FieldRole::Host => entry.host = non_empty(value).map(unescape),
                FieldRole::Status => entry.status = parse_status(value),
                FieldRole::Subject => entry.certificate_subject = non_empty(value).map(unescape),
            }
            if let Some(value) = non_empty(value).filter(|_| !variable.headers.is_empty()) {
                for header in &variable.headers {
                    let value = match &variable.cookie {
                        Some(name) if *header == COOKIE => {
                            Cow::Owned([name.as_bytes(), b"=", &*unescape(value)].concat())
                        }
                        _ => unescape(value),
                    };
                    entry.headers.push((header.clone(), value));
                }
            }
        }
        let at = line_time_us.ok_or(LineError::InvalidTime)?;
        match (start_time_us, entry.duration_us) {
            (Some(start_time_us), _) => {
                (entry.time_us, entry.duration_us) = (start_time_us, Some(at.saturating_sub(start_time_us)))
            }
            // Subtract the duration, because servers write a line at the end of the request.
            (None, Some(duration_us)) => entry.time_us = at.saturating_sub(duration_us),
            (None, None) => entry.time_us = at,
        }
        if let Some(query) = query.filter(|_| !entry.target.contains(&b'?')) {
            entry.target = Cow::Owned([&*entry.target, b"?", &*query].concat());
        }
        Ok(entry)
    }
}

/// Return a number of ms in µs.
fn parse_milliseconds(text: &[u8]) -> Option<u64> {
    seconds_to_us(std::str::from_utf8(text).ok()?.parse::<f64>().ok()? / 1000.0)
}

impl Variable {
    fn new(name: &str, delimiter: &str) -> Self {
        let role = match name {
            "remote_addr" | "client_port" | "client" => FieldRole::Client,
            "time_local" => FieldRole::Time(TimestampFormat::Local),
            "time_iso8601" => FieldRole::Time(TimestampFormat::Iso8601),
            "msec" => FieldRole::Time(TimestampFormat::Unix),
            "request_creation_time" => FieldRole::StartTime,
            "request_time" => FieldRole::Duration,
            "request" => FieldRole::Request,
            "duration_ms" => FieldRole::Milliseconds,
            "request_method" | "method" => FieldRole::Method,
            "request_uri" | "uri" | "path" => FieldRole::Target,
            "args" | "query_string" => FieldRole::Query,
            "host" | "http_host" => FieldRole::Host,
            "status" | "elb_status_code" => FieldRole::Status,
            "ssl_client_s_dn" => FieldRole::Subject,
            _ => FieldRole::Other,
        };
        let field = match name {
            "user_agent" | "referer" => Some(name),
            _ => name.strip_prefix("http_").filter(|field| *field != "host"),
        };
        let cookie = name.strip_prefix("cookie_").map(str::to_owned);
        let header = match (&cookie, field) {
            (Some(_), _) => Some(COOKIE),
            (None, Some(field)) => field.replace('_', "-").parse().ok(),
            (None, None) => None,
        };
        let headers = header.into_iter().collect();
        Variable { name: name.to_owned(), role, cookie, headers, delimiter: delimiter.as_bytes().to_vec() }
    }

    /// Split `rest` into the value of this variable and the text after its delimiter.
    fn split_value<'l>(&self, rest: &'l [u8], is_quoted: bool) -> Option<(&'l [u8], &'l [u8])> {
        if self.delimiter.is_empty() {
            return Some((rest, &[]));
        }
        let position = match &*self.delimiter {
            [b'"', ..] if is_quoted => closing_quote(rest)?,
            [byte] => memchr::memchr(*byte, rest)?,
            delimiter => memchr::memmem::find(rest, delimiter)?,
        };
        let (value, tail) = rest.split_at(position);
        Some((value, tail.strip_prefix(&*self.delimiter)?))
    }
}

// === CloudFront: tab-separated columns, named by a `#Fields` line
// (<https://docs.aws.amazon.com/AmazonCloudFront/latest/DeveloperGuide/standard-logs-reference.html>) ===

/// The part of a request or response that a column contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ColumnRole {
    Other,
    Date,
    Time,
    Client,
    Method,
    Path,
    Query,
    Host,
    Status,
    Duration,
}

#[derive(Debug, Clone)]
struct Column {
    name: String,
    role: ColumnRole,
    headers: Vec<HeaderName>,
}

/// Parser of CloudFront logs, with the columns of the last `#Fields` line.
#[derive(Debug, Clone, Default)]
pub struct CloudFrontFormat {
    columns: Vec<Column>,
    mappings: Vec<FieldMapping>,
    /// The last parsed date and time as text, and in µs since the Unix epoch.
    last_second: (Vec<u8>, u64),
}

impl CloudFrontFormat {
    pub(super) fn map_fields(
        &mut self,
        mappings: &[FieldMapping],
        sample: &[&[u8]],
    ) -> Result<(), (String, Vec<String>)> {
        let mut parsed_header = CloudFrontFormat::default();
        for line in sample {
            let _ = parsed_header.parse(line);
        }
        let names: Vec<_> = parsed_header.columns.into_iter().map(|column| column.name).collect();
        self.mappings.extend_from_slice(mappings);
        match mappings.iter().find(|mapping| !names.contains(&mapping.field)) {
            Some(missing) => Err((missing.field.clone(), names)),
            None => Ok(()),
        }
    }

    pub(super) fn capabilities(&self, sample: &[&[u8]]) -> FormatCapabilities {
        let mut parsed_header = CloudFrontFormat { mappings: self.mappings.clone(), ..CloudFrontFormat::default() };
        for line in sample {
            let _ = parsed_header.parse(line);
        }
        let has = |role| parsed_header.columns.iter().any(|column| column.role == role);
        FormatCapabilities {
            client: has(ColumnRole::Client),
            host: has(ColumnRole::Host),
            query: has(ColumnRole::Query),
            certificate_subject: false,
            duration: has(ColumnRole::Duration),
            status: has(ColumnRole::Status),
            headers: LoggedHeaders::Listed(
                parsed_header.columns.iter().flat_map(|column| column.headers.clone()).collect(),
            ),
            route: false,
            identity_hashes: false,
        }
    }

    pub(super) fn parse<'l>(&mut self, line: &'l [u8]) -> Result<Option<LogEntry<'l>>, LineError> {
        if let Some(directive) = line.strip_prefix(b"#") {
            if let Some(names) = directive.strip_prefix(b"Fields:") {
                let names = String::from_utf8_lossy(names);
                self.columns = names.split_whitespace().map(|name| Column::new(name, &self.mappings)).collect();
            }
            return Ok(None);
        }
        if self.columns.is_empty() {
            return Err(LineError::MissingFieldsLine);
        }
        let mut entry = LogEntry::default();
        let mut query = None;
        let mut date = None;
        let mut cells = 0;
        let mut second = None;
        for (column, cell) in self.columns.iter().zip(line.split(|byte| *byte == b'\t')) {
            cells += 1;
            match column.role {
                ColumnRole::Other => {}
                ColumnRole::Date => date = Some(cell),
                ColumnRole::Time => second = date.map(|date| [date, b"T", cell, b"Z"].concat()),
                ColumnRole::Client => entry.client = parse_address(cell),
                ColumnRole::Method => entry.method = cell,
                ColumnRole::Path => entry.target = Cow::Borrowed(cell),
                ColumnRole::Query => query = non_empty(cell),
                ColumnRole::Host => entry.host = non_empty(cell).map(Cow::Borrowed),
                ColumnRole::Status => entry.status = parse_status(cell),
                ColumnRole::Duration => entry.duration_us = non_empty(cell).and_then(parse_unix),
            }
            for header in non_empty(cell).map_or(&[][..], |_| &column.headers) {
                entry.headers.push((header.clone(), percent_decode(cell).into()));
            }
        }
        if cells < self.columns.len() {
            return Err(LineError::Malformed);
        }
        let second = second.ok_or(LineError::InvalidTime)?;
        if self.last_second.0 != second {
            let us = parse_iso8601(&second).ok_or(LineError::InvalidTime)?;
            self.last_second = (second, us);
        }
        // Subtract the duration, because CloudFront logs the time at which the response ended.
        entry.time_us = self.last_second.1.saturating_sub(entry.duration_us.unwrap_or(0));
        if let Some(query) = query {
            entry.target = Cow::Owned([&*entry.target, b"?", query].concat());
        }
        Ok(Some(entry))
    }
}

impl Column {
    fn new(name: &str, mappings: &[FieldMapping]) -> Self {
        let role = match name {
            "date" => ColumnRole::Date,
            "time" => ColumnRole::Time,
            "c-ip" => ColumnRole::Client,
            "cs-method" => ColumnRole::Method,
            "cs-uri-stem" => ColumnRole::Path,
            "cs-uri-query" => ColumnRole::Query,
            // Ignore `cs(Host)`, which is the domain name of the distribution, not the host that the client requested.
            "x-host-header" => ColumnRole::Host,
            "sc-status" => ColumnRole::Status,
            "time-taken" => ColumnRole::Duration,
            _ => ColumnRole::Other,
        };
        let header = match name {
            "cs(Referer)" => Some(REFERER),
            "cs(User-Agent)" => Some(USER_AGENT),
            "cs(Cookie)" => Some(COOKIE),
            "x-forwarded-for" => Some(HeaderName::from_static("x-forwarded-for")),
            _ => None,
        };
        let mapped_headers =
            mappings.iter().filter(|mapping| mapping.field == name).map(|mapping| mapping.header.clone());
        Column { name: name.to_owned(), role, headers: header.into_iter().chain(mapped_headers).collect() }
    }
}
