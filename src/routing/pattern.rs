//! Path patterns of routes and rewrite templates.

use std::fmt::Write;
use std::str::FromStr;

use crate::routing::condition::{Expression, ExpressionError};

/// A path pattern: path segments such as `/v1/users/{id}` or `/v1/{*rest}`, or a regular expression.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathPattern(pub(super) PathForm);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PathForm {
    Segments(Vec<Segment>),
    Regex(Expression),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Segment {
    Literal(Box<str>),
    Parameter(Box<str>),
    Rest(Box<str>),
}

/// An error in a path pattern.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PathPatternError {
    /// The pattern does not start with `/`.
    #[error("a path starts with `/`")]
    NoSlash,
    /// A segment follows the catch-all parameter, which must be the last segment.
    #[error("`{{*{0}}}` matches the rest of the path: nothing may follow it")]
    RestNotLast(String),
    /// A segment contains braces, but is not a valid parameter.
    #[error("a parameter must be a whole segment with a name, such as `{{id}}` or `{{*rest}}`, not `{0}`")]
    InvalidParameter(String),
    /// Two parameters have the same name.
    #[error("duplicate parameter `{0}`")]
    DuplicateParameter(String),
    /// A segment contains `*` outside of a catch-all parameter.
    #[error("`*` alone is not supported: `{{*rest}}` matches the rest of the path")]
    BareWildcard,
}

impl FromStr for PathPattern {
    type Err = PathPatternError;

    fn from_str(text: &str) -> Result<Self, PathPatternError> {
        let segments = text.strip_prefix('/').ok_or(PathPatternError::NoSlash)?;
        let mut names = Vec::new();
        let mut parsed = Vec::new();
        for segment in segments.split('/') {
            if let Some(Segment::Rest(name)) = parsed.last() {
                return Err(PathPatternError::RestNotLast(name.to_string()));
            }
            let inner = segment.strip_prefix('{').and_then(|segment| segment.strip_suffix('}'));
            let (name, make): (&str, fn(Box<str>) -> Segment) = match inner {
                Some(inner) => match inner.strip_prefix('*') {
                    Some(name) => (name, Segment::Rest),
                    None => (inner, Segment::Parameter),
                },
                None if segment.contains('*') => return Err(PathPatternError::BareWildcard),
                None if segment.contains(['{', '}']) => {
                    return Err(PathPatternError::InvalidParameter(segment.to_owned()));
                }
                None => {
                    parsed.push(Segment::Literal(segment.into()));
                    continue;
                }
            };
            if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-') {
                return Err(PathPatternError::InvalidParameter(segment.to_owned()));
            }
            if names.contains(&name) {
                return Err(PathPatternError::DuplicateParameter(name.to_owned()));
            }
            names.push(name);
            parsed.push(make(name.into()));
        }
        Ok(PathPattern(PathForm::Segments(parsed)))
    }
}

/// Convert a path in the syntax of another program to a pattern that probably has the same meaning. Supported are
/// `:id`, `<id>`, `*` and regular expressions. Return `None` if the path has no such syntax, or if its meaning is
/// unclear.
pub fn suggestion(text: &str) -> Option<String> {
    // The matchers of Traefik.
    if let Some((matcher, rest)) = text.split_once("(`") {
        let path = rest.split('`').next()?.trim_end_matches('/');
        return match matcher.rsplit([' ', '!', '(']).next()? {
            "PathPrefix" | "PathPrefixStrip" => Some(format!("{path}/{{*rest}}")),
            "Path" | "PathStrip" => Some(path.to_owned()),
            _ => None,
        };
    }
    // Remove nginx location modifiers and the anchors of regular expressions.
    let path = text.trim_start_matches(['~', '*', '=', ' ', '^']).trim_end_matches('$');
    // Before splitting at slashes, replace `[^/]`: it is the only common expression that contains a slash.
    let path = path.replace("[^/]", "[^.]");
    let mut segments = Vec::new();
    let mut parameters: usize = 0;
    let mut rest = path.strip_prefix('/')?.split('/').peekable();
    while let Some(segment) = rest.next() {
        let is_wildcard = matches!(segment, "*" | "**" | ".*" | ".+" | "(.*)" | "(.+)" | "{*}");
        // If segments follow the wildcard, use a parameter for a single segment.
        segments.push(match foreign_parameter(segment) {
            Some(name) => name,
            None if is_wildcard && rest.peek().is_none() => "{*rest}".to_owned(),
            None if is_wildcard || is_regex(segment) => {
                parameters += 1;
                if parameters == 1 { "{id}".to_owned() } else { format!("{{id{parameters}}}") }
            }
            None => segment.to_owned(),
        });
    }
    // A regular expression without `$` also matches longer paths, so append a catch-all parameter.
    let is_prefix = text.trim_start_matches(['~', '*', ' ']).starts_with('^') && !text.ends_with('$');
    if is_prefix && segments.last().is_none_or(|last: &String| !last.starts_with("{*")) {
        segments.retain(|segment| !segment.is_empty());
        segments.push("{*rest}".to_owned());
    }
    let path = format!("/{}", segments.join("/"));
    (path != text && path.parse::<PathPattern>().is_ok()).then_some(path)
}

/// Convert `:id`, `<id>`, `<int:id>`, `{id:EXPRESSION}` or `{rest...}` to a parameter.
fn foreign_parameter(segment: &str) -> Option<String> {
    let enclosed = |open: char, close: char| segment.strip_prefix(open)?.strip_suffix(close);
    let (name, expression) = if let Some(name) = segment.strip_prefix(':') {
        (name.trim_end_matches('?'), "")
    } else if let Some(inner) = enclosed('<', '>') {
        let (kind, name) = inner.split_once(':').unwrap_or(("", inner));
        (name, if kind == "path" { ".*" } else { "" })
    } else if let Some(name) = enclosed('{', '}').and_then(|inner| inner.strip_suffix("...")) {
        (name, ".*")
    } else {
        enclosed('{', '}')?.split_once(':')?
    };
    let name = name.trim();
    let is_name = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
    let star = if matches!(expression, ".*" | ".+") { "*" } else { "" };
    is_name.then(|| format!("{{{star}{name}}}"))
}

/// Return whether a segment is a regular expression instead of literal text.
fn is_regex(segment: &str) -> bool {
    let is_group = segment.starts_with('(') && segment.ends_with(')');
    is_group || segment.contains(".+") || segment.contains(".*") || segment.contains(['[', ']', '\\'])
}

impl PathPattern {
    /// Create a pattern from a regular expression that must match the whole path. The named groups of the expression
    /// are parameters.
    ///
    /// # Errors
    /// The expression is invalid or too large.
    pub fn from_regex(text: &str) -> Result<Self, ExpressionError> {
        Ok(PathPattern(PathForm::Regex(Expression::new(text)?)))
    }

    /// Return a pattern that matches paths in lower case. `fold_case` converts literal segments to lower case.
    #[must_use]
    pub fn ignoring_case(self, fold_case: fn(&str) -> String) -> Self {
        PathPattern(match self.0 {
            PathForm::Segments(segments) => PathForm::Segments(
                segments
                    .into_iter()
                    .map(|segment| match segment {
                        Segment::Literal(text) => Segment::Literal(fold_case(&text).into()),
                        Segment::Parameter(_) | Segment::Rest(_) => segment,
                    })
                    .collect(),
            ),
            PathForm::Regex(expression) => PathForm::Regex(expression.ignoring_case()),
        })
    }

    /// Return whether the pattern is a regular expression.
    pub fn is_regex(&self) -> bool {
        matches!(self.0, PathForm::Regex(_))
    }

    /// Return the segments. The list is empty for a regular expression.
    fn segments(&self) -> &[Segment] {
        match &self.0 {
            PathForm::Segments(segments) => segments,
            PathForm::Regex(_) => &[],
        }
    }

    /// Return the pattern with the trailing slash added or removed. The result is `/a/` for `/a`, and `/a` for `/a/`
    /// and `/a/{*rest}`. Return `None` for `/`, `/{*rest}` and regular expressions.
    pub fn with_other_slash(&self) -> Option<PathPattern> {
        let PathForm::Segments(segments) = &self.0 else { return None };
        let ends_in_slash = match segments.last()? {
            Segment::Rest(_) => true,
            Segment::Literal(text) => text.is_empty(),
            Segment::Parameter(_) => false,
        };
        let other = match ends_in_slash {
            true => segments[..segments.len() - 1].to_vec(),
            false => segments.iter().cloned().chain([Segment::Literal("".into())]).collect(),
        };
        (!other.is_empty()).then_some(PathPattern(PathForm::Segments(other)))
    }

    /// Return a path that matches the pattern. `value` replaces each parameter. Return `None` for regular expressions.
    pub fn sample(&self, value: &str) -> Option<String> {
        let PathForm::Segments(segments) = &self.0 else { return None };
        let text = |segment: &Segment| match segment {
            Segment::Literal(text) => format!("/{text}"),
            Segment::Parameter(_) | Segment::Rest(_) => format!("/{value}"),
        };
        Some(segments.iter().map(text).collect())
    }

    /// Return whether the pattern has no parameters and is no regular expression.
    pub fn is_literal(&self) -> bool {
        let PathForm::Segments(segments) = &self.0 else { return false };
        segments.iter().all(|segment| matches!(segment, Segment::Literal(_)))
    }

    /// Return the value of a parameter in a path that matches the pattern.
    pub fn capture<'p>(&self, path: &'p str, name: &str) -> Option<&'p str> {
        let segments = match &self.0 {
            PathForm::Segments(segments) => segments,
            PathForm::Regex(expression) => return expression.capture(path, name),
        };
        let mut rest = path.strip_prefix('/')?;
        for segment in segments {
            let (part, next) = rest.split_once('/').unwrap_or((rest, ""));
            match segment {
                Segment::Rest(rest_name) => return (**rest_name == *name).then_some(rest),
                Segment::Parameter(parameter) if **parameter == *name => return Some(part),
                Segment::Parameter(_) | Segment::Literal(_) => rest = next,
            }
        }
        None
    }

    /// Return whether both patterns match the same paths. Regular expressions are compared by their text, so the result
    /// can be false for two expressions that match the same paths.
    pub fn matches_same_paths(&self, other: &PathPattern) -> bool {
        let (one, other) = match (&self.0, &other.0) {
            (PathForm::Segments(one), PathForm::Segments(other)) => (one, other),
            (one, other) => return one == other,
        };
        let alike = |(one, other): (&Segment, &Segment)| match (one, other) {
            (Segment::Literal(one), Segment::Literal(other)) => one == other,
            (Segment::Parameter(_), Segment::Parameter(_)) | (Segment::Rest(_), Segment::Rest(_)) => true,
            (Segment::Literal(_) | Segment::Parameter(_) | Segment::Rest(_), _) => false,
        };
        one.len() == other.len() && one.iter().zip(other).all(alike)
    }

    /// Return whether the pattern has a parameter with this name.
    pub fn has_parameter(&self, name: &str) -> bool {
        self.parameter_names().any(|parameter| parameter == name)
    }

    /// Return the names of all parameters.
    pub fn parameter_names(&self) -> impl Iterator<Item = &str> + Clone {
        let groups = match &self.0 {
            PathForm::Segments(_) => None,
            PathForm::Regex(expression) => Some(expression.names()),
        };
        let parameters = self.segments().iter().filter_map(|segment| match segment {
            Segment::Literal(_) => None,
            Segment::Parameter(name) | Segment::Rest(name) => Some(&**name),
        });
        parameters.chain(groups.into_iter().flatten())
    }

    /// Return the name of the catch-all parameter.
    pub fn rest_parameter(&self) -> Option<&str> {
        match self.segments().last() {
            Some(Segment::Rest(name)) => Some(name),
            _ => None,
        }
    }

    /// Return whether the pattern starts with the literal segments in `prefix`.
    pub fn has_prefix(&self, prefix: &str) -> bool {
        let mut segments = self.segments().iter();
        let is_next = |text: &str| matches!(segments.next(), Some(Segment::Literal(literal)) if **literal == *text);
        prefix.split('/').skip(1).all(is_next)
    }
}

// Rewrite templates: a path and a query that may contain path parameters of the route.
//
// Clients cannot change the structure of the result. In the path, the value of a parameter keeps its canonical form. In
// the query, it is percent-encoded.

/// A rewrite template, such as `/internal/{rest}` or `/search?of={id}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RewriteTemplate {
    path: Vec<Piece>,
    /// `None` if the template has no query.
    query: Option<Vec<Piece>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Piece {
    Literal(Box<str>),
    Parameter(Box<str>),
}

/// An error in a rewrite template.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// The template does not start with `/`.
    #[error("a path starts with `/`")]
    NoSlash,
    /// A brace is not part of a parameter.
    #[error("braces must enclose a parameter of the path: `{{id}}`, `{{rest}}`")]
    Brace,
    /// The template contains a catch-all parameter in the syntax of a path pattern, such as `{*rest}`.
    #[error("`{{*{0}}}` is valid only in `path`: write `{{{0}}}`")]
    Wildcard(String),
    /// The template contains a fragment.
    #[error("a fragment (`#`) is never sent to servers")]
    Fragment,
    /// The template contains `?`, but its query is empty.
    #[error("the query after `?` is empty; the query of the request is always kept")]
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
    /// Return the names of the parameters, in the order in which they occur.
    pub fn parameters(&self) -> impl Iterator<Item = &str> {
        self.path.iter().chain(self.query.iter().flatten()).filter_map(|piece| match piece {
            Piece::Literal(_) => None,
            Piece::Parameter(name) => Some(&**name),
        })
    }

    /// Return whether each occurrence of the parameter in the template's path is a whole path segment. Otherwise, a
    /// value that is empty or has several segments would change the adjacent segments.
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

    /// Return the path and the query, with `value` in place of each parameter.
    pub fn fill(&self, value: &str) -> (String, Option<String>) {
        let fill = |pieces: &[Piece]| pieces.iter().map(|piece| piece.text(|_| value)).collect();
        (fill(&self.path), self.query.as_deref().map(fill))
    }

    /// Expand the template for a request. Return the request target. The canonical `path` of the request must match the
    /// pattern. The query of the request is appended to the query of the template.
    pub fn expand(&self, pattern: &PathPattern, path: &str, query: Option<&str>) -> String {
        let value = |name: &str| pattern.capture(path, name).unwrap_or_default();
        let mut out = String::with_capacity(path.len() + query.map_or(0, str::len) + 64);
        let keeps_slashes = path.contains("//");
        for piece in &self.path {
            let text = piece.text(value);
            // The value of a catch-all parameter may be empty or end with a slash, so avoid a double slash. But keep a
            // double slash of the request: without it, the path may be that of another route.
            let is_kept = keeps_slashes && matches!(piece, Piece::Parameter(_));
            let has_slash = out.ends_with('/') && !is_kept;
            out.push_str(if has_slash { text.strip_prefix('/').unwrap_or(text) } else { text });
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

/// Append a parameter value to a query. Keep unreserved characters and existing percent-encoding. Percent-encode all
/// other characters.
fn push_encoded(out: &mut String, text: &str) {
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~%".contains(&byte) {
            out.push(char::from(byte));
        } else {
            // Writing to a string cannot fail.
            let _ = write!(out, "%{byte:02X}");
        }
    }
}

#[cfg(test)]
mod template_tests {
    use super::*;

    fn target(template: &str, pattern: &str, path: &str, query: Option<&str>) -> String {
        let (template, pattern): (RewriteTemplate, PathPattern) = (template.parse().unwrap(), pattern.parse().unwrap());
        template.expand(&pattern, path, query)
    }

    #[test]
    fn template_expands_parameters_in_the_path() {
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
    fn template_query_precedes_request_query_and_encodes_parameters() {
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
    fn invalid_templates_are_rejected_with_the_reason() {
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
    fn catch_all_parameter_needs_whole_segments() {
        for (template, is_whole) in [
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
            assert_eq!(template.parse::<RewriteTemplate>().unwrap().has_whole_segments("rest"), is_whole, "{template}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_slash_form_adds_or_removes_the_slash() {
        for (text, expected) in [
            ("/a", Some("/a/")),
            ("/a/", Some("/a")),
            ("/a/{id}", Some("/a/{id}/")),
            ("/a/{id}/", Some("/a/{id}")),
            ("/a/{*rest}", Some("/a")),
            ("/{id}/{*rest}", Some("/{id}")),
            ("/", None),
            ("/{*rest}", None),
        ] {
            let pattern: PathPattern = text.parse().unwrap();
            assert_eq!(pattern.with_other_slash(), expected.map(|text| text.parse().unwrap()), "{text}");
        }
        assert_eq!(PathPattern::from_regex("/a").unwrap().with_other_slash(), None);
    }

    /// A path captures the same parameters with and without its trailing slash.
    #[test]
    fn parameters_are_captured_with_either_slash() {
        for (pattern, path, name, expected) in [
            ("/a/{id}", "/a/7/", "id", "7"),
            ("/a/{id}/", "/a/7", "id", "7"),
            ("/a/{*rest}", "/a", "rest", ""),
            ("/{id}/{*rest}", "/7", "id", "7"),
            ("/{id}/{*rest}", "/7", "rest", ""),
        ] {
            let pattern: PathPattern = pattern.parse().unwrap();
            assert_eq!(pattern.capture(path, name), Some(expected), "{pattern:?} of {path}");
        }
    }

    #[test]
    fn foreign_paths_have_a_suggestion() {
        for (text, expected) in [
            ("/users/:id", Some("/users/{id}")),
            ("/users/:id/posts/:post", Some("/users/{id}/posts/{post}")),
            ("/users/<int:id>", Some("/users/{id}")),
            ("/files/<path:name>", Some("/files/{*name}")),
            ("/api/*", Some("/api/{*rest}")),
            ("/api/*/items", Some("/api/{id}/items")),
            ("/api/{path...}", Some("/api/{*path}")),
            ("/users/{id:[0-9]+}", Some("/users/{id}")),
            ("/users/[0-9]+", Some("/users/{id}")),
            ("^/users/[^/]+/a/(\\d+)$", Some("/users/{id}/a/{id2}")),
            ("~* ^/api/.*$", Some("/api/{*rest}")),
            ("^/api", Some("/api/{*rest}")),
            ("^/api/$", Some("/api/")),
            ("/api*", None),
            ("/v1/{id}/{*rest}", None),
            ("/v1/books:batch", None),
            ("api", None),
        ] {
            assert_eq!(suggestion(text).as_deref(), expected, "{text}");
        }
    }
}
