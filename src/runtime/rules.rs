//! `request_headers` and `response_headers` of a route.

use std::ops::Range;

use crate::config::Spanned;
use http::HeaderName;

use super::reader::Reader;
use crate::config::HeaderRules;
use crate::config::error::Issue;
use crate::http::headers::HeaderAliases;
use crate::http::rules::{HeaderMutations, Direction, reserved_reason};

pub(super) fn rules(written: Option<&Spanned<HeaderRules>>, section: Direction, reader: &mut Reader<'_>) -> HeaderMutations {
    let mut rules = HeaderMutations::default();
    let Some(written) = written.map(|written| written.get_ref()) else { return rules };
    let mut seen = Vec::new();
    for text in &written.remove {
        rules.remove.extend(field(text.span(), text.get_ref(), section, &mut seen, reader));
    }
    for (name, value) in &written.set {
        let name = field(value.span(), name, section, &mut seen, reader);
        rules.set.extend(name.zip(reader.header_value(value)));
    }
    if section == Direction::Request {
        rules.aliases = HeaderAliases::from_names(rules.set.iter().map(|(name, _)| name).chain(&rules.remove));
    }
    rules
}

/// A field that rules may have, once.
fn field(
    place: Range<usize>,
    name: &str,
    section: Direction,
    seen: &mut Vec<HeaderName>,
    reader: &mut Reader<'_>,
) -> Option<HeaderName> {
    let name = reader.header_name(place.clone(), name)?;
    if let Some(reason) = reserved_reason(&name, section) {
        reader.issue(Issue::at(place, format!("`{name}` cannot be set or removed: {reason}")).hint("leave it out"));
        return None;
    }
    if seen.contains(&name) {
        let issue = Issue::at(place, format!("a second rule for `{name}`"));
        reader.issue(issue.hint("to set a field is to replace all that it had"));
    }
    seen.push(name.clone());
    Some(name)
}
