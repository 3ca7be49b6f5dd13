//! Compiles `request_headers` and `response_headers` of a route: headers to set and to remove.

use std::collections::BTreeMap;
use std::ops::Range;

use http::{HeaderName, HeaderValue};

use crate::config::Text;
use crate::config::error::Issue;
use crate::config::file::closest_name;
use crate::http::headers::{
    Direction, HeaderAliases, HeaderMutations, ParsedValue, TemplateError, ValueTemplate, Variable, reserved_reason,
};
use crate::snapshot::validator::Validator;

/// Maximum length in bytes of an unknown variable that an error message quotes. Values may be secrets that contain
/// braces.
const MAX_QUOTED_NAME: usize = 20;

/// Compile the header changes of one direction. `route` is the name of the route, which is the value of `{route}`.
pub(super) fn compile(
    set: &BTreeMap<String, Text>,
    remove: &[Text],
    section: Direction,
    route: &str,
    reader: &mut Validator<'_>,
) -> HeaderMutations {
    let mut mutations = HeaderMutations::default();
    let mut seen = Vec::new();
    for text in remove {
        mutations.remove.extend(mutated_header(text.span(), text.get_ref(), section, &mut seen, reader));
    }
    for (name, value) in set {
        let name = mutated_header(value.span(), name, section, &mut seen, reader);
        match (name, self::value(value, route, reader)) {
            (Some(name), Some(Value::Fixed(value))) => mutations.set.push((name, value)),
            (Some(name), Some(Value::Template(template))) => mutations.templates.push((name, template)),
            _ => {}
        }
    }
    if section == Direction::Request {
        let set = mutations.set.iter().map(|(name, _)| name);
        let rendered = mutations.templates.iter().map(|(name, _)| name);
        mutations.aliases = HeaderAliases::from_names(set.chain(rendered).chain(&mutations.remove));
    }
    mutations
}

/// The value of a header to set.
enum Value {
    Fixed(HeaderValue),
    Template(ValueTemplate),
}

fn value(text: &Text, route: &str, reader: &mut Validator<'_>) -> Option<Value> {
    match ParsedValue::parse(text.get_ref(), route) {
        Ok(ParsedValue::Literal(literal)) => reader.header_value_of(text.span(), &literal).map(Value::Fixed),
        Ok(ParsedValue::Template(template)) => {
            let literals = template.literals().collect::<String>();
            reader.header_value_of(text.span(), &literals).map(|_| Value::Template(template))
        }
        Err(error) => {
            reader.push_issue(template_issue(text.span(), &error));
            None
        }
    }
}

fn template_issue(span: Range<usize>, error: &TemplateError) -> Issue {
    let names = Variable::ALL.map(|(name, _)| name);
    let literal = "for literal braces write `{{` and `}}`";
    let TemplateError::UnknownVariable(name) = error else {
        let issue = Issue::new(span, error.to_string());
        return issue.with_hint(format!("write a variable as `{{NAME}}`; {literal}"));
    };
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    if name.len() > MAX_QUOTED_NAME || !name.bytes().all(is_word) {
        let issue = Issue::new(span, "the text in braces is not a variable");
        return issue.with_hint(format!("known: {}; {literal}", names.join(", ")));
    }
    let folded = name.to_ascii_lowercase().replace(['-', '.'], "_");
    let issue = Issue::new(span, error.to_string());
    issue.with_hint(match closest_name(&folded, names) {
        Some(near) => format!("did you mean `{{{near}}}`? {literal}"),
        None => format!("known: {}; {literal}", names.join(", ")),
    })
}

/// Return the name of a header that may be changed, unless the header is reserved or listed twice.
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
        let issue = Issue::new(span, format!("duplicate rule for `{name}`"));
        reader.push_issue(issue.with_hint("`set` replaces all existing values"));
    }
    seen.push(name.clone());
    Some(name)
}
