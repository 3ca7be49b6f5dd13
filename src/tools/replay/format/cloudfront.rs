//! Standard logs of CloudFront: tab-separated columns, named by a `#Fields` line
//! (<https://docs.aws.amazon.com/AmazonCloudFront/latest/DeveloperGuide/standard-logs-reference.html>).

use std::borrow::Cow;

use http::HeaderName;
use http::header::{COOKIE, REFERER, USER_AGENT};
use percent_encoding::percent_decode;

use crate::tools::replay::format::timestamp::{parse_iso8601, parse_unix};
use crate::tools::replay::format::{
    FieldMapping, FormatCapabilities, LineError, LogEntry, LoggedHeaders, non_empty, parse_address, parse_status,
};

/// The part of a request that a column contains.
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
    /// The last parsed date and time, and its µs since the Unix epoch.
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
        let (mut query, mut date, mut cells) = (None, None, 0);
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
