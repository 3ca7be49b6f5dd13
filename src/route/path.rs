//! The paths of routes: literal segments, parameters, the rest.

use std::str::FromStr;

/// `/v1/users/{id}`, `/v1/{*rest}`, in segments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathPattern(pub(super) Vec<Segment>);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Segment {
    Literal(Box<str>),
    Parameter(Box<str>),
    Rest(Box<str>),
}

/// Why a text is no path pattern.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum PathPatternError {
    #[error("a path starts with `/`")]
    NoSlash,
    #[error("`{{*{0}}}` takes the rest of the path: nothing may follow it")]
    RestNotLast(String),
    #[error("a parameter is a whole segment with a name: `{{id}}` or `{{*rest}}`, not `{0}`")]
    InvalidParameter(String),
    #[error("the parameter `{0}` stands twice")]
    DuplicateParameter(String),
    #[error("`*` alone stands for nothing: `{{*rest}}` takes the rest of the path")]
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
        Ok(PathPattern(parsed))
    }
}

impl PathPattern {
    /// What a path that the pattern matches has in the place of a parameter.
    pub fn capture<'p>(&self, path: &'p str, name: &str) -> Option<&'p str> {
        let mut rest = path.strip_prefix('/')?;
        for segment in &self.0 {
            let (part, next) = rest.split_once('/').unwrap_or((rest, ""));
            match segment {
                Segment::Rest(rest_name) => return (**rest_name == *name).then_some(rest),
                Segment::Parameter(parameter) if **parameter == *name => return Some(part),
                Segment::Parameter(_) | Segment::Literal(_) => rest = next,
            }
        }
        None
    }

    /// Whether both match the same paths.
    pub fn matches_same_paths(&self, other: &PathPattern) -> bool {
        let alike = |(one, other): (&Segment, &Segment)| match (one, other) {
            (Segment::Literal(one), Segment::Literal(other)) => one == other,
            (Segment::Parameter(_), Segment::Parameter(_)) | (Segment::Rest(_), Segment::Rest(_)) => true,
            (Segment::Literal(_) | Segment::Parameter(_) | Segment::Rest(_), _) => false,
        };
        self.0.len() == other.0.len() && self.0.iter().zip(&other.0).all(alike)
    }

    /// Whether it has a parameter of this name.
    pub fn has_parameter(&self, name: &str) -> bool {
        self.parameter_names().any(|parameter| parameter == name)
    }

    /// The names of its parameters.
    pub fn parameter_names(&self) -> impl Iterator<Item = &str> + Clone {
        self.0.iter().filter_map(|segment| match segment {
            Segment::Literal(_) => None,
            Segment::Parameter(name) | Segment::Rest(name) => Some(&**name),
        })
    }

    /// The name of the parameter that takes the rest of the path.
    pub fn rest_parameter(&self) -> Option<&str> {
        match self.0.last() {
            Some(Segment::Rest(name)) => Some(name),
            _ => None,
        }
    }

    /// Whether all paths that it matches begin with the segments of this one.
    pub fn has_prefix(&self, prefix: &str) -> bool {
        let mut segments = self.0.iter();
        let is_next = |text: &str| matches!(segments.next(), Some(Segment::Literal(literal)) if **literal == *text);
        prefix.split('/').skip(1).all(is_next)
    }
}
