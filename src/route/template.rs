//! Where a request goes instead: a path and a query with parameters of its route's path in them.
//!
//! What a client sends cannot change their structure: in a path a parameter stays in its place as the canonical form that it has,
//! in a query it is one value.

use std::fmt::Write;

use super::PathPattern;

/// `/internal/{rest}`, `/search?of={id}`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RewriteTemplate {
    path: Vec<Piece>,
    /// None = it has none of its own.
    query: Option<Vec<Piece>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Piece {
    Literal(Box<str>),
    Parameter(Box<str>),
}

/// Why a text is no template.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum TemplateError {
    #[error("a path starts with `/`")]
    NoSlash,
    #[error("a brace belongs to a parameter of the path: `{{id}}`, `{{rest}}`")]
    Brace,
    #[error("`{{*{0}}}` is how the path writes it: here it is `{{{0}}}`")]
    Wildcard(String),
    #[error("`#` begins what servers are not told")]
    Fragment,
    #[error("nothing follows `?`; the query of the request is kept in any case")]
    EmptyQuery,
}

impl std::str::FromStr for RewriteTemplate {
    type Err = TemplateError;

    fn from_str(text: &str) -> Result<Self, TemplateError> {
        if !text.starts_with('/') {
            return Err(TemplateError::NoSlash);
        }
        if text.contains('#') {
            return Err(TemplateError::Fragment);
        }
        let (path, query) = match text.split_once('?') {
            Some((_, "")) => return Err(TemplateError::EmptyQuery),
            Some((path, query)) => (path, Some(parse_pieces(query)?)),
            None => (text, None),
        };
        Ok(RewriteTemplate { path: parse_pieces(path)?, query })
    }
}

fn parse_pieces(mut text: &str) -> Result<Vec<Piece>, TemplateError> {
    let mut pieces = Vec::new();
    while let Some(brace) = text.find(['{', '}']) {
        let (literal, parameter) = text.split_at(brace);
        let (name, rest) =
            parameter.strip_prefix('{').and_then(|inner| inner.split_once('}')).ok_or(TemplateError::Brace)?;
        if let Some(name) = name.strip_prefix('*') {
            return Err(TemplateError::Wildcard(name.to_owned()));
        }
        if name.is_empty() || name.contains('{') {
            return Err(TemplateError::Brace);
        }
        if !literal.is_empty() {
            pieces.push(Piece::Literal(literal.into()));
        }
        pieces.push(Piece::Parameter(name.into()));
        text = rest;
    }
    if !text.is_empty() {
        pieces.push(Piece::Literal(text.into()));
    }
    Ok(pieces)
}

impl RewriteTemplate {
    /// The parameters in it, in their order.
    pub fn parameters(&self) -> impl Iterator<Item = &str> {
        self.path.iter().chain(self.query.iter().flatten()).filter_map(|piece| match piece {
            Piece::Literal(_) => None,
            Piece::Parameter(name) => Some(&**name),
        })
    }

    /// Whether a parameter of the path has whole segments to itself, wherever it stands: one that may be empty or many would else
    /// make something new of its neighbours.
    pub fn has_whole_segments(&self, parameter: &str) -> bool {
        let ends = |piece: Option<&Piece>| matches!(piece, Some(Piece::Literal(text)) if text.ends_with('/'));
        let begins = |piece: Option<&Piece>| match piece {
            Some(Piece::Literal(text)) => text.starts_with('/'),
            Some(Piece::Parameter(_)) => false,
            None => true,
        };
        self.path.iter().enumerate().all(|(index, piece)| match piece {
            Piece::Parameter(name) if **name == *parameter => {
                ends(index.checked_sub(1).and_then(|before| self.path.get(before))) && begins(self.path.get(index + 1))
            }
            Piece::Parameter(_) | Piece::Literal(_) => true,
        })
    }

    /// Its path and query, with `value` for every parameter.
    pub fn fill(&self, value: &str) -> (String, Option<String>) {
        let fill = |pieces: &[Piece]| pieces.iter().map(|piece| piece.text(|_| value)).collect();
        (fill(&self.path), self.query.as_deref().map(fill))
    }

    /// The target for a request whose canonical `path` its route's pattern matches. The query of the request follows that of the
    /// template.
    pub fn expand(&self, pattern: &PathPattern, path: &str, query: Option<&str>) -> String {
        let value = |name: &str| pattern.capture(path, name).unwrap_or_default();
        let mut out = String::with_capacity(path.len() + query.map_or(0, str::len) + 64);
        for piece in &self.path {
            let text = piece.text(value);
            // What takes the rest of a path may be empty, or end in a slash.
            out.push_str(if out.ends_with('/') { text.strip_prefix('/').unwrap_or(text) } else { text });
        }
        let mut separator = '?';
        for piece in self.query.iter().flatten() {
            if separator == '?' {
                out.push('?');
                separator = '&';
            }
            match piece {
                Piece::Literal(text) => out.push_str(text),
                Piece::Parameter(name) => push_encoded(&mut out, value(name)),
            }
        }
        if let Some(query) = query.filter(|query| separator == '?' || !query.is_empty()) {
            out.push(separator);
            out.push_str(query);
        }
        out
    }
}

impl Piece {
    fn text<'t>(&'t self, value: impl Fn(&'t str) -> &'t str) -> &'t str {
        match self {
            Piece::Literal(text) => text,
            Piece::Parameter(name) => value(name),
        }
    }
}

/// As a value in a query: of a path in canonical form only unreserved characters and what is encoded stay as they are.
fn push_encoded(out: &mut String, text: &str) {
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~%".contains(&byte) {
            out.push(char::from(byte));
        } else {
            // Writing to memory does not fail.
            let _ = write!(out, "%{byte:02X}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(template: &str, pattern: &str, path: &str, query: Option<&str>) -> String {
        let (template, pattern): (RewriteTemplate, PathPattern) = (template.parse().unwrap(), pattern.parse().unwrap());
        template.expand(&pattern, path, query)
    }

    #[test]
    fn parameters_stand_where_the_template_says() {
        for (template, pattern, path, expected) in [
            ("/internal/{rest}", "/v1/{*rest}", "/v1/a/b", "/internal/a/b"),
            ("/internal/{rest}", "/v1/{*rest}", "/v1/a/b/", "/internal/a/b/"),
            ("/internal/{rest}", "/v1/{*rest}", "/v1/", "/internal/"),
            ("/{rest}", "/v1/{*rest}", "/v1/", "/"),
            ("/{rest}/end", "/v1/{*rest}", "/v1/", "/end"),
            ("/{rest}/end", "/v1/{*rest}", "/v1/a/", "/a/end"),
            ("/x/{rest}/{rest}/", "/v1/{*rest}", "/v1/a", "/x/a/a/"),
            ("/x/{rest}/{rest}/", "/v1/{*rest}", "/v1/", "/x/"),
            ("/u-{id}.json", "/v1/{id}", "/v1/7", "/u-7.json"),
            ("/{b}{a}", "/{a}/{b}", "/1/2", "/21"),
            ("/.{a}", "/{a}", "/.x", "/..x"),
            ("/fixed", "/{*rest}", "/anything", "/fixed"),
            ("/{rest}", "/v1/{*rest}", "/v1/a%3Fb%25c", "/a%3Fb%25c"),
        ] {
            assert_eq!(target(template, pattern, path, None), expected, "{template} for {path}");
        }
    }

    #[test]
    fn queries_follow_each_other_and_parameters_are_single_values() {
        for (template, path, query, expected) in [
            ("/x", "/v1/7", Some("b=2"), "/x?b=2"),
            ("/x", "/v1/7", Some(""), "/x?"),
            ("/x?a={id}", "/v1/7", Some("b=2"), "/x?a=7&b=2"),
            ("/x?a={id}", "/v1/7", Some(""), "/x?a=7"),
            ("/x?a={id}", "/v1/7", None, "/x?a=7"),
            ("/x?a={id}&c={id}", "/v1/7&a=8", None, "/x?a=7%26a%3D8&c=7%26a%3D8"),
            ("/x?a={id}", "/v1/a+b;c", None, "/x?a=a%2Bb%3Bc"),
            ("/x?a={id}", "/v1/%C3%A9%3F", None, "/x?a=%C3%A9%3F"),
        ] {
            assert_eq!(target(template, "/v1/{id}", path, query), expected, "{template} for {path} {query:?}");
        }
        assert_eq!(target("/x?a={rest}", "/v1/{*rest}", "/v1/a/b", None), "/x?a=a%2Fb");
    }

    #[test]
    fn what_is_no_template_says_why() {
        for (text, expected) in [
            ("x", TemplateError::NoSlash),
            ("", TemplateError::NoSlash),
            ("/{", TemplateError::Brace),
            ("/}", TemplateError::Brace),
            ("/{a", TemplateError::Brace),
            ("/{}", TemplateError::Brace),
            ("/{a{b}}", TemplateError::Brace),
            ("/x?a={", TemplateError::Brace),
            ("/{*rest}", TemplateError::Wildcard("rest".to_owned())),
            ("/x#y", TemplateError::Fragment),
            ("/x?", TemplateError::EmptyQuery),
        ] {
            assert_eq!(text.parse::<RewriteTemplate>(), Err(expected), "{text}");
        }
    }

    #[test]
    fn what_takes_the_rest_stands_between_slashes() {
        for (template, apart) in [
            ("/{rest}", true),
            ("/a/{rest}/b", true),
            ("/{rest}?a={rest}", true),
            ("/a?b=x{rest}y", true),
            ("/a{rest}", false),
            ("/{rest}b", false),
            ("/.{rest}", false),
            ("/{id}{rest}", false),
            ("/{rest}{id}", false),
            ("/{rest}/.{rest}", false),
        ] {
            assert_eq!(template.parse::<RewriteTemplate>().unwrap().has_whole_segments("rest"), apart, "{template}");
        }
    }
}
