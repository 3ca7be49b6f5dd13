//! Standard logs of CloudFront: columns between tabs, named by a `#Fields` line
//! (<https://docs.aws.amazon.com/AmazonCloudFront/latest/DeveloperGuide/standard-logs-reference.html>).

use std::borrow::Cow;

use http::HeaderName;
use http::header::{COOKIE, REFERER, USER_AGENT};
use percent_encoding::percent_decode;

use super::instant::{epoch, iso};
use super::text::said;
use super::{Entry, Headers, LineError, Mapped, Provides, address, status};

/// What a column is of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Other,
    Date,
    Time,
    Client,
    Method,
    Path,
    Query,
    Host,
    Status,
    Took,
}

#[derive(Debug, Clone)]
struct Column {
    name: String,
    role: Role,
    headers: Vec<HeaderName>,
}

/// The columns of the last `#Fields` line.
#[derive(Debug, Clone, Default)]
pub struct CloudFront {
    columns: Vec<Column>,
    mapped: Vec<Mapped>,
    /// The second that was read last.
    last: (Vec<u8>, u64),
}

impl CloudFront {
    pub(super) fn map(&mut self, mapped: &[Mapped], sample: &[&[u8]]) -> Result<(), (String, Vec<String>)> {
        let mut header = CloudFront::default();
        for line in sample {
            let _ = header.parse(line);
        }
        let names: Vec<_> = header.columns.into_iter().map(|column| column.name).collect();
        self.mapped.extend_from_slice(mapped);
        match mapped.iter().find(|mapped| !names.contains(&mapped.field)) {
            Some(missing) => Err((missing.field.clone(), names)),
            None => Ok(()),
        }
    }

    pub(super) fn provides(&self, sample: &[&[u8]]) -> Provides {
        let mut header = CloudFront { mapped: self.mapped.clone(), ..CloudFront::default() };
        for line in sample {
            let _ = header.parse(line);
        }
        let has = |role| header.columns.iter().any(|column| column.role == role);
        Provides {
            client: has(Role::Client),
            host: has(Role::Host),
            query: has(Role::Query),
            subject: false,
            took: has(Role::Took),
            status: has(Role::Status),
            headers: Headers::Listed(header.columns.iter().flat_map(|column| column.headers.clone()).collect()),
            route: false,
            hashed: false,
        }
    }

    pub(super) fn parse<'l>(&mut self, line: &'l [u8]) -> Result<Option<Entry<'l>>, LineError> {
        if let Some(directive) = line.strip_prefix(b"#") {
            if let Some(names) = directive.strip_prefix(b"Fields:") {
                let names = String::from_utf8_lossy(names);
                self.columns = names.split_whitespace().map(|name| Column::new(name, &self.mapped)).collect();
            }
            return Ok(None);
        }
        if self.columns.is_empty() {
            return Err(LineError::NoFields);
        }
        let mut entry = Entry::default();
        let (mut query, mut date, mut cells) = (None, None, 0);
        let mut second = None;
        for (column, cell) in self.columns.iter().zip(line.split(|byte| *byte == b'\t')) {
            cells += 1;
            match column.role {
                Role::Other => {}
                Role::Date => date = Some(cell),
                Role::Time => second = date.map(|date| [date, b"T", cell, b"Z"].concat()),
                Role::Client => entry.client = address(cell),
                Role::Method => entry.method = cell,
                Role::Path => entry.target = Cow::Borrowed(cell),
                Role::Query => query = said(cell),
                Role::Host => entry.host = said(cell).map(Cow::Borrowed),
                Role::Status => entry.status = status(cell),
                Role::Took => entry.took_us = said(cell).and_then(epoch),
            }
            for header in said(cell).map_or(&[][..], |_| &column.headers) {
                entry.fields.push((header.clone(), percent_decode(cell).into()));
            }
        }
        if cells < self.columns.len() {
            return Err(LineError::Shape);
        }
        let second = second.ok_or(LineError::Time)?;
        if self.last.0 != second {
            let us = iso(&second).ok_or(LineError::Time)?;
            self.last = (second, us);
        }
        // The time is that of the answer.
        entry.at_us = self.last.1.saturating_sub(entry.took_us.unwrap_or(0));
        if let Some(query) = query {
            entry.target = Cow::Owned([&*entry.target, b"?", query].concat());
        }
        Ok(Some(entry))
    }
}

impl Column {
    fn new(name: &str, mapped: &[Mapped]) -> Self {
        let role = match name {
            "date" => Role::Date,
            "time" => Role::Time,
            "c-ip" => Role::Client,
            "cs-method" => Role::Method,
            "cs-uri-stem" => Role::Path,
            "cs-uri-query" => Role::Query,
            // `cs(Host)` is the name of the distribution, not what the client asked for.
            "x-host-header" => Role::Host,
            "sc-status" => Role::Status,
            "time-taken" => Role::Took,
            _ => Role::Other,
        };
        let header = match name {
            "cs(Referer)" => Some(REFERER),
            "cs(User-Agent)" => Some(USER_AGENT),
            "cs(Cookie)" => Some(COOKIE),
            "x-forwarded-for" => Some(HeaderName::from_static("x-forwarded-for")),
            _ => None,
        };
        let stands_for = mapped.iter().filter(|mapped| mapped.field == name).map(|mapped| mapped.header.clone());
        Column { name: name.to_owned(), role, headers: header.into_iter().chain(stands_for).collect() }
    }
}
