//! Values of header rules with variables, such as `user={consumer}`, which are rendered for each request.

use std::borrow::Cow;

use http::HeaderValue;

/// A variable in the value of a header rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variable {
    /// `{client_ip}`: IP address of the client.
    ClientIp,
    /// Request id.
    RequestId,
    /// Name of the consumer to which the request belongs.
    Consumer,
    /// Name of the route.
    Route,
    /// Host that was used for routing.
    Host,
    /// Method of the request.
    Method,
    /// Path in canonical form, without the query and before a rewrite.
    Path,
    /// `http` or `https`.
    Scheme,
}

impl Variable {
    /// All variables with their names.
    pub const ALL: [(&'static str, Variable); 8] = [
        ("client_ip", Variable::ClientIp),
        ("request_id", Variable::RequestId),
        ("consumer", Variable::Consumer),
        ("route", Variable::Route),
        ("host", Variable::Host),
        ("method", Variable::Method),
        ("path", Variable::Path),
        ("scheme", Variable::Scheme),
    ];

    /// Return whether `%` in the value of the variable is data. In a path, `%` starts an encoded byte (RFC 3986 §2.1).
    fn escapes_percent(self) -> bool {
        self != Variable::Path
    }
}

/// The reason why a value is not a template.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// The text has a `{` without `}`.
    #[error("`{{` without `}}`")]
    Unclosed,
    /// The text has a `}` without `{`.
    #[error("`}}` without `{{`")]
    Unopened,
    /// No variable has this name.
    #[error("unknown variable `{0}`")]
    UnknownVariable(String),
}

/// A value with at least one variable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ValueTemplate(Vec<Part>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Literal(String),
    Variable(Variable),
}

/// A parsed value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ParsedValue {
    /// The value is the same for each request.
    Literal(String),
    /// A value with variables.
    Template(ValueTemplate),
}

impl ParsedValue {
    /// Parse the value of a header rule. `{NAME}` is a variable; `{{` and `}}` are literal braces. `route` is the name
    /// of the route, which is the value of `{route}`.
    ///
    /// # Errors
    /// A brace has no counterpart, or a variable is unknown.
    pub fn parse(text: &str, route: &str) -> Result<Self, TemplateError> {
        let mut parts = Vec::new();
        let mut literal = String::new();
        let mut rest = text;
        while let Some(at) = rest.find(['{', '}']) {
            let (before, from) = rest.split_at(at);
            literal.push_str(before);
            let is_doubled = from.starts_with("{{") || from.starts_with("}}");
            if is_doubled {
                literal.push_str(&from[..1]);
                rest = &from[2..];
                continue;
            }
            let name = from.strip_prefix('{').ok_or(TemplateError::Unopened)?;
            let (name, behind) = name.split_once('}').ok_or(TemplateError::Unclosed)?;
            let known = Variable::ALL.iter().find(|(known, _)| *known == name);
            match known.ok_or_else(|| TemplateError::UnknownVariable(name.to_owned()))?.1 {
                Variable::Route => literal.push_str(route),
                variable => {
                    if !literal.is_empty() {
                        parts.push(Part::Literal(std::mem::take(&mut literal)));
                    }
                    parts.push(Part::Variable(variable));
                }
            }
            rest = behind;
        }
        literal.push_str(rest);
        if parts.is_empty() {
            return Ok(ParsedValue::Literal(literal));
        }
        if !literal.is_empty() {
            parts.push(Part::Literal(literal));
        }
        Ok(ParsedValue::Template(ValueTemplate(parts)))
    }
}

impl ValueTemplate {
    /// Return whether the value contains this variable.
    pub fn contains(&self, variable: Variable) -> bool {
        self.0.contains(&Part::Variable(variable))
    }

    /// Return the literal parts of the value.
    pub fn literals(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter_map(|part| match part {
            Part::Literal(text) => Some(text.as_str()),
            Part::Variable(_) => None,
        })
    }

    /// Return a template with `placeholder` instead of each literal part. The output shows the value without the parts
    /// of the configuration that may be secret.
    pub fn with_literals_replaced(&self, placeholder: &str) -> Self {
        let replaced = |part: &Part| match part {
            Part::Literal(_) => Part::Literal(placeholder.to_owned()),
            Part::Variable(variable) => Part::Variable(*variable),
        };
        ValueTemplate(self.0.iter().map(replaced).collect())
    }

    /// Return the value for a request, or `None` if a variable has no content. `content` returns the content of a
    /// variable.
    ///
    /// Some bytes are not valid in a header value, or servers interpret them differently: control characters, spaces at
    /// either end, and bytes beyond ASCII. Such bytes in the content are percent-encoded. `%` is percent-encoded as
    /// well, except in paths, which are already percent-encoded.
    pub fn render<'c>(&self, content: impl Fn(Variable) -> Option<Cow<'c, [u8]>>) -> Option<HeaderValue> {
        let mut value = Vec::new();
        for part in &self.0 {
            match part {
                Part::Literal(text) => value.extend_from_slice(text.as_bytes()),
                Part::Variable(variable) => {
                    let bytes = content(*variable).filter(|bytes| !bytes.is_empty())?;
                    push_escaped(&mut value, &bytes, variable.escapes_percent());
                }
            }
        }
        // The conversion cannot fail, because the literal parts were checked when they were compiled.
        HeaderValue::from_bytes(&value).ok()
    }
}

fn push_escaped(value: &mut Vec<u8>, bytes: &[u8], escapes_percent: bool) {
    const HEX: &[u8; 16] = b"0123456789ABCDEF";
    let last = bytes.len() - 1;
    for (index, &byte) in bytes.iter().enumerate() {
        let is_inner_space = byte == b' ' && index > 0 && index < last;
        if (byte.is_ascii_graphic() || is_inner_space) && !(byte == b'%' && escapes_percent) {
            value.push(byte);
        } else {
            value.extend_from_slice(&[b'%', HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 15)]]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(text: &str, content: &[u8]) -> Option<String> {
        match ParsedValue::parse(text, "r").unwrap() {
            ParsedValue::Literal(text) => Some(text),
            ParsedValue::Template(template) => {
                let value = template.render(|_| Some(Cow::Borrowed(content)));
                value.map(|value| value.to_str().unwrap().to_owned())
            }
        }
    }

    #[test]
    fn values_are_rendered_with_literal_braces_and_variables() {
        for (text, expected) in [
            ("plain", "plain"),
            ("", ""),
            ("{client_ip}", "x"),
            ("a{client_ip}b{host}c", "axbxc"),
            ("{route}", "r"),
            ("{route}/{method}", "r/x"),
            ("{{client_ip}}", "{client_ip}"),
            ("{{{client_ip}}}", "{x}"),
            ("{{\"a\":[1]}}", "{\"a\":[1]}"),
            ("${{A}}", "${A}"),
        ] {
            assert_eq!(render(text, b"x").as_deref(), Some(expected), "{text}");
        }
    }

    #[test]
    fn malformed_values_are_errors() {
        let unknown = |name: &str| TemplateError::UnknownVariable(name.to_owned());
        for (text, expected) in [
            ("{client-ip}", unknown("client-ip")),
            ("{}", unknown("")),
            ("{ host }", unknown(" host ")),
            ("{host", TemplateError::Unclosed),
            ("a}", TemplateError::Unopened),
            ("{{host}", TemplateError::Unopened),
            ("{host}}", TemplateError::Unopened),
        ] {
            assert_eq!(ParsedValue::parse(text, "r"), Err(expected), "{text}");
        }
    }

    #[test]
    fn content_is_escaped_and_missing_content_gives_no_value() {
        for (text, content, expected) in [
            ("{consumer}", &b"acme"[..], Some("acme")),
            ("{consumer}", b"CN=James Smith", Some("CN=James Smith")),
            ("{consumer}", b" a b ", Some("%20a b%20")),
            ("{consumer}", b" ", Some("%20")),
            ("{consumer}", b"a\r\nx-evil: 1\0\x7f\t", Some("a%0D%0Ax-evil: 1%00%7F%09")),
            ("{consumer}", "Lučić".as_bytes(), Some("Lu%C4%8Di%C4%87")),
            ("{consumer}", b"100%", Some("100%25")),
            ("{path}", b"/a%20b", Some("/a%20b")),
            ("{path}", b"/a\nb", Some("/a%0Ab")),
            ("user={consumer}", b"", None),
        ] {
            assert_eq!(render(text, content).as_deref(), expected, "{text} {content:?}");
        }
        let ParsedValue::Template(template) = ParsedValue::parse("{host}{consumer}", "r").unwrap() else { panic!() };
        assert_eq!(template.render(|variable| (variable == Variable::Host).then_some(Cow::Borrowed(b"h"))), None);
    }
}
