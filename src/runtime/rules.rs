//! `request_headers` and `response_headers` of a route.

use std::ops::Range;

use crate::config::Spanned;
use http::HeaderName;

use super::reader::Validator;
use crate::config::HeaderRules;
use crate::config::error::Issue;
use crate::http::headers::HeaderAliases;
use crate::http::rules::{Direction, HeaderMutations, reserved_reason};

pub(super) fn header_mutations(
    written: Option<&Spanned<HeaderRules>>,
    section: Direction,
    reader: &mut Validator<'_>,
) -> HeaderMutations {
    let mut mutations = HeaderMutations::default();
    let Some(written) = written.map(|written| written.get_ref()) else { return mutations };
    let mut seen = Vec::new();
    for text in &written.remove {
        mutations.remove.extend(mutated_header(text.span(), text.get_ref(), section, &mut seen, reader));
    }
    for (name, value) in &written.set {
        let name = mutated_header(value.span(), name, section, &mut seen, reader);
        mutations.set.extend(name.zip(reader.header_value(value)));
    }
    if section == Direction::Request {
        mutations.aliases =
            HeaderAliases::from_names(mutations.set.iter().map(|(name, _)| name).chain(&mutations.remove));
    }
    mutations
}

/// A field that rules may have, once.
fn mutated_header(
    span: Range<usize>,
    name: &str,
    section: Direction,
    seen: &mut Vec<HeaderName>,
    reader: &mut Validator<'_>,
) -> Option<HeaderName> {
    let name = reader.header_name(span.clone(), name)?;
    if let Some(reason) = reserved_reason(&name, section) {
        reader.push_issue(
            Issue::new(span, format!("`{name}` cannot be set or removed: {reason}")).with_hint("leave it out"),
        );
        return None;
    }
    if seen.contains(&name) {
        let issue = Issue::new(span, format!("a second rule for `{name}`"));
        reader.push_issue(issue.with_hint("to set a field is to replace all that it had"));
    }
    seen.push(name.clone());
    Some(name)
}
