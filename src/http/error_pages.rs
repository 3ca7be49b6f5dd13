//! Error pages: the content of error responses that the gateway generates, from templates of the configuration.

use http::header::{ACCEPT, CONTENT_TYPE, HeaderMap, HeaderValue};
use http::{Response, StatusCode};

use crate::http::body::Body;
use crate::http::problem;

/// The templates of a route or of the server. Without a template, the content is a problem document.
#[derive(Debug, Default)]
pub struct ErrorPages {
    /// Page for clients that accept HTML.
    pub html: Option<PageTemplate>,
    /// JSON document for all other clients.
    pub json: Option<PageTemplate>,
}

/// The page for the client of one request.
#[derive(Debug, Clone, Copy)]
pub struct ErrorPage<'p> {
    template: &'p PageTemplate,
    format: PageFormat,
}

/// The format of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PageFormat {
    Html,
    Json,
}

/// A page with variables.
#[derive(Debug, PartialEq, Eq)]
pub struct PageTemplate(Vec<Piece>);

#[derive(Debug, PartialEq, Eq)]
enum Piece {
    Literal(Box<str>),
    Variable(PageVariable),
}

/// A variable of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PageVariable {
    Status,
    Reason,
    Detail,
    RequestId,
}

/// The variables of a page, as they are written in braces.
const VARIABLES: [(&str, PageVariable); 4] = [
    ("status", PageVariable::Status),
    ("reason", PageVariable::Reason),
    ("detail", PageVariable::Detail),
    ("request_id", PageVariable::RequestId),
];

impl PageTemplate {
    /// Parse a page. Other text in braces is literal, because pages contain CSS, scripts and JSON.
    pub fn parse(text: &str) -> Self {
        let mut pieces = Vec::new();
        let (mut literal, mut rest) = (0, 0);
        while let Some(open) = text[rest..].find('{').map(|at| rest + at) {
            rest = open + 1;
            let found = VARIABLES
                .iter()
                .find(|(name, _)| text[rest..].strip_prefix(name).is_some_and(|after| after.starts_with('}')));
            if let Some((name, variable)) = found {
                pieces.push(Piece::Literal(text[literal..open].into()));
                pieces.push(Piece::Variable(*variable));
                rest += name.len() + 1;
                literal = rest;
            }
        }
        pieces.push(Piece::Literal(text[literal..].into()));
        PageTemplate(pieces)
    }
}

impl ErrorPages {
    /// Parse the pages of a configuration.
    pub fn parse(html: Option<&str>, json: Option<&str>) -> Self {
        ErrorPages { html: html.map(PageTemplate::parse), json: json.map(PageTemplate::parse) }
    }

    /// Return the page for a client with these request headers. Return `None` if the client gets a problem document.
    pub fn select(&self, headers: &HeaderMap) -> Option<ErrorPage<'_>> {
        let html = self.html.as_ref().filter(|_| accepts_html(headers));
        let html = html.map(|template| ErrorPage { template, format: PageFormat::Html });
        html.or_else(|| Some(ErrorPage { template: self.json.as_ref()?, format: PageFormat::Json }))
    }
}

/// Return whether a client asks for HTML, as browsers do. `*/*` alone is what programs send.
fn accepts_html(headers: &HeaderMap) -> bool {
    let lines = headers.get_all(ACCEPT).iter().filter_map(|line| line.to_str().ok());
    lines.flat_map(|line| line.split(',')).any(|item| {
        let mut parts = item.split(';').map(str::trim);
        let is_html = parts.next().is_some_and(|kind| kind.eq_ignore_ascii_case("text/html"));
        let is_refused = |part: &str| {
            let weight = part.strip_prefix("q=").or_else(|| part.strip_prefix("Q="));
            weight.is_some_and(|weight| weight.parse() == Ok(0.0))
        };
        is_html && !parts.any(is_refused)
    })
}

impl ErrorPage<'_> {
    /// Replace the problem document of a response. Responses in another format, such as JSON-RPC errors, stay.
    pub fn apply(self, response: &mut Response<Body>, request_id: Option<&HeaderValue>) {
        if !problem::is_problem(response.headers()) {
            return;
        }
        let Some(document) = response.body_mut().take_content() else { return };
        let document: serde_json::Value = serde_json::from_slice(&document).unwrap_or_default();
        let detail = document["detail"].as_str().unwrap_or_default();
        let request_id = request_id.and_then(|id| id.to_str().ok()).unwrap_or_default();
        let page = self.render(response.status(), detail, request_id);
        *response.body_mut() = Body::full(page);
        let media_type = match self.format {
            PageFormat::Html => "text/html; charset=utf-8",
            PageFormat::Json => "application/json",
        };
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(media_type));
    }

    fn render(self, status: StatusCode, detail: &str, request_id: &str) -> String {
        let content = |variable: PageVariable| match variable {
            PageVariable::Status => status.as_str(),
            PageVariable::Reason => status.canonical_reason().unwrap_or("Error"),
            PageVariable::Detail => detail,
            PageVariable::RequestId => request_id,
        };
        let PageTemplate(pieces) = self.template;
        pieces.iter().fold(String::new(), |mut page, piece| {
            match (piece, self.format) {
                (Piece::Literal(text), _) => page.push_str(text),
                (Piece::Variable(variable), PageFormat::Html) => push_html(&mut page, content(*variable)),
                (Piece::Variable(variable), PageFormat::Json) => push_json(&mut page, content(*variable)),
            }
            page
        })
    }
}

fn push_html(page: &mut String, text: &str) {
    for character in text.chars() {
        match character {
            '&' => page.push_str("&amp;"),
            '<' => page.push_str("&lt;"),
            '>' => page.push_str("&gt;"),
            '"' => page.push_str("&quot;"),
            '\'' => page.push_str("&#39;"),
            other => page.push(other),
        }
    }
}

/// Append text as the inner part of a JSON string.
fn push_json(page: &mut String, text: &str) {
    let quoted = serde_json::Value::from(text).to_string();
    page.push_str(&quoted[1..quoted.len() - 1]);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rendered(format: PageFormat, template: &str, detail: &str) -> String {
        let template = &PageTemplate::parse(template);
        ErrorPage { template, format }.render(StatusCode::NOT_FOUND, detail, "id-1")
    }

    #[test]
    fn variables_are_escaped_and_other_braces_are_literal() {
        for (format, template, detail, expected) in [
            (
                PageFormat::Html,
                "<style>p{color:red}</style>{status} {reason}",
                "",
                "<style>p{color:red}</style>404 Not Found",
            ),
            (PageFormat::Html, "{detail}", "<a b=\"'\">&", "&lt;a b=&quot;&#39;&quot;&gt;&amp;"),
            (
                PageFormat::Json,
                "{\"e\":\"{detail}\",\"i\":\"{request_id}\"}",
                "a\"b",
                "{\"e\":\"a\\\"b\",\"i\":\"id-1\"}",
            ),
            (PageFormat::Json, "{{status}} {stat} {", "", "{404} {stat} {"),
        ] {
            assert_eq!(rendered(format, template, detail), expected);
        }
    }

    #[test]
    fn html_is_for_clients_that_ask_for_it() {
        for (accept, expected) in [
            ("text/html,application/xhtml+xml,*/*;q=0.8", true),
            ("application/json, Text/HTML;q=0.1", true),
            ("text/html;q=0, */*", false),
            ("text/html;q=0.0", false),
            ("*/*", false),
            ("application/json", false),
        ] {
            let headers = HeaderMap::from_iter([(ACCEPT, accept.parse().unwrap())]);
            assert_eq!(accepts_html(&headers), expected, "{accept}");
        }
    }
}
