//! Lines with a fixed order of fields: common, combined, ALB, and whatever a `log_format` of nginx describes.

use std::borrow::Cow;

use http::HeaderName;
use http::header::COOKIE;

use super::instant::{Last, Style, epoch};
use super::text::{closing_quote, said, unescaped};
use super::{Entry, Headers, LineError, Mapped, Provides, address, status};

pub(super) const COMMON: &str = r#"$remote_addr $ident $remote_user [$time_local] "$request" $status $body_bytes_sent"#;

pub(super) const COMBINED: &str = r#"$remote_addr $ident $remote_user [$time_local] "$request" $status $body_bytes_sent "$http_referer" "$http_user_agent""#;

/// <https://docs.aws.amazon.com/elasticloadbalancing/latest/application/load-balancer-access-logs.html>, as far as it is of use:
/// fields have been added at the end before.
pub(super) const ALB: &str = r#"$type $time_iso8601 $elb $client_port $target_port $request_processing_time $target_processing_time $response_processing_time $elb_status_code $target_status_code $received_bytes $sent_bytes "$request" "$http_user_agent" $ssl_cipher $ssl_protocol $target_group_arn "$trace_id" "$domain_name" "$chosen_cert_arn" $matched_rule_priority $request_creation_time $rest"#;

/// Why a text describes no format.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum TemplateError {
    #[error(
        "`{0}` is not a format: there are {names}, and nginx's, as its log_format has it: '$remote_addr …'",
        names = super::NAMES.join(", ")
    )]
    Unknown(String),
    #[error("`{0}` and `{1}` stand next to each other: nothing tells where one ends")]
    Adjacent(String, String),
    #[error("the format has no time: $time_local, $time_iso8601 or $msec")]
    NoTime,
    #[error("the format has no request: $request, or $request_method and $request_uri")]
    NoRequest,
}

/// What a variable is of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Other,
    Client,
    At(Style),
    /// When it came; the time of the line is when it ended.
    Came,
    Took,
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
    role: Role,
    /// The cookie that it is.
    cookie: Option<String>,
    /// The headers that it stands for.
    headers: Vec<HeaderName>,
    /// What follows it.
    end: Vec<u8>,
}

/// Variables, each up to what follows it.
#[derive(Debug, Clone)]
pub struct Template {
    start: Vec<u8>,
    variables: Vec<Variable>,
    /// The style of the finest time that there is.
    style: Style,
    last: Last,
}

impl Template {
    pub(super) fn new(text: &str) -> Result<Template, TemplateError> {
        let mut pieces = text.split('$');
        let start = pieces.next().unwrap_or_default().as_bytes().to_vec();
        let mut variables: Vec<Variable> = Vec::new();
        for piece in pieces {
            let (name, end) = match piece.strip_prefix('{').and_then(|piece| piece.split_once('}')) {
                Some(found) => found,
                None => {
                    piece.split_at(piece.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(piece.len()))
                }
            };
            if let Some(before) = variables.last().filter(|before| before.end.is_empty()) {
                return Err(TemplateError::Adjacent(format!("${}", before.name), format!("${name}")));
            }
            variables.push(Variable::new(name, end));
        }
        let styles = variables.iter().filter_map(|variable| match variable.role {
            Role::At(style) => Some(style),
            _ => None,
        });
        let style = styles.max().ok_or(TemplateError::NoTime)?;
        let template = Template { start, variables, style, last: Last::default() };
        let whole = template.has(Role::Request) || template.has(Role::Method) && template.has(Role::Target);
        if whole { Ok(template) } else { Err(TemplateError::NoRequest) }
    }

    fn has(&self, role: Role) -> bool {
        self.variables.iter().any(|variable| variable.role == role)
    }

    pub(super) fn map(&mut self, mapped: &[Mapped]) -> Result<(), (String, Vec<String>)> {
        for Mapped { field, header } in mapped {
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

    pub(super) fn provides(&self) -> Provides {
        let headers = self.variables.iter().flat_map(|variable| &variable.headers).cloned().collect();
        Provides {
            client: self.has(Role::Client),
            // Load balancers write whole URLs.
            host: self.has(Role::Host) || self.variables.iter().any(|variable| variable.name == "elb"),
            query: self.has(Role::Request) || self.has(Role::Target) || self.has(Role::Query),
            subject: self.has(Role::Subject),
            took: self.has(Role::Took) || self.has(Role::Came),
            status: self.has(Role::Status),
            headers: Headers::Listed(headers),
            route: false,
            hashed: false,
        }
    }

    pub(super) fn parse<'l>(&mut self, line: &'l [u8]) -> Result<Entry<'l>, LineError> {
        let mut rest = line.strip_prefix(&*self.start).ok_or(LineError::Shape)?;
        let mut entry = Entry::default();
        let (mut at, mut came, mut query) = (None, None, None);
        let mut quoted = self.start.last() == Some(&b'"');
        for variable in &self.variables {
            let (value, behind) = variable.cut(rest, quoted).ok_or(LineError::Shape)?;
            rest = behind;
            quoted = variable.end.last() == Some(&b'"');
            match variable.role {
                Role::Other => {}
                Role::Client => entry.client = address(value),
                Role::At(style) if style == self.style => {
                    at = Some(self.last.read(style, value).ok_or(LineError::Time)?);
                }
                Role::At(_) => {}
                Role::Came => came = said(value).and_then(super::instant::iso),
                Role::Took => entry.took_us = said(value).and_then(epoch),
                Role::Request => entry.request_line(unescaped(value)),
                Role::Method => entry.method = value,
                Role::Target => entry.target = unescaped(value),
                Role::Query => query = said(value).map(unescaped),
                Role::Host => entry.host = said(value).map(unescaped),
                Role::Status => entry.status = status(value),
                Role::Subject => entry.subject = said(value).map(unescaped),
            }
            if let Some(value) = said(value).filter(|_| !variable.headers.is_empty()) {
                for header in &variable.headers {
                    let value = match &variable.cookie {
                        Some(name) if *header == COOKIE => {
                            Cow::Owned([name.as_bytes(), b"=", &*unescaped(value)].concat())
                        }
                        _ => unescaped(value),
                    };
                    entry.fields.push((header.clone(), value));
                }
            }
        }
        let at = at.ok_or(LineError::Time)?;
        match (came, entry.took_us) {
            (Some(came), _) => (entry.at_us, entry.took_us) = (came, Some(at.saturating_sub(came))),
            // A line is written when the request is over.
            (None, Some(took)) => entry.at_us = at.saturating_sub(took),
            (None, None) => entry.at_us = at,
        }
        if let Some(query) = query.filter(|_| !entry.target.contains(&b'?')) {
            entry.target = Cow::Owned([&*entry.target, b"?", &*query].concat());
        }
        Ok(entry)
    }
}

impl Variable {
    fn new(name: &str, end: &str) -> Self {
        let role = match name {
            "remote_addr" | "client_port" => Role::Client,
            "time_local" => Role::At(Style::Local),
            "time_iso8601" => Role::At(Style::Iso),
            "msec" => Role::At(Style::Epoch),
            "request_creation_time" => Role::Came,
            "request_time" => Role::Took,
            "request" => Role::Request,
            "request_method" => Role::Method,
            "request_uri" | "uri" => Role::Target,
            "args" | "query_string" => Role::Query,
            "host" | "http_host" => Role::Host,
            "status" | "elb_status_code" => Role::Status,
            "ssl_client_s_dn" => Role::Subject,
            _ => Role::Other,
        };
        let field = name.strip_prefix("http_").filter(|field| *field != "host");
        let cookie = name.strip_prefix("cookie_").map(str::to_owned);
        let header = match (&cookie, field) {
            (Some(_), _) => Some(COOKIE),
            (None, Some(field)) => field.replace('_', "-").parse().ok(),
            (None, None) => None,
        };
        let headers = header.into_iter().collect();
        Variable { name: name.to_owned(), role, cookie, headers, end: end.as_bytes().to_vec() }
    }

    /// Its value at the beginning of `rest`, and what comes behind what follows it.
    fn cut<'l>(&self, rest: &'l [u8], quoted: bool) -> Option<(&'l [u8], &'l [u8])> {
        if self.end.is_empty() {
            return Some((rest, &[]));
        }
        let at = match &*self.end {
            [b'"', ..] if quoted => closing_quote(rest)?,
            [byte] => memchr::memchr(*byte, rest)?,
            end => memchr::memmem::find(rest, end)?,
        };
        let (value, behind) = rest.split_at(at);
        Some((value, behind.strip_prefix(&*self.end)?))
    }
}
