//! Compiles `request_headers`, `response_headers`, `cors`, `error_pages` and `compress` of a route.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderName, HeaderValue};

use crate::config::error::Issue;
use crate::config::shorthand::{Compress, CompressTable};
use crate::config::spanned::{Spanned, Text};
use crate::config::tables::{Cors, ErrorPages as ErrorPagesTable, ResponseHeaderRules, Route};
use crate::config::unknown_keys::closest_name;
use crate::http::compression::{CODINGS, Coding, Compression, DEFAULT_TYPES};
use crate::http::cors::{AllowedNames, AllowedOrigins, CorsPolicy, OriginError, OriginPattern, is_cors_header};
use crate::http::error_pages::ErrorPages;
use crate::http::headers::{
    Direction, HeaderAliases, HeaderMutations, ParsedValue, TemplateError, ValueTemplate, Variable, reserved_reason,
};
use crate::snapshot::validator::Validator;

/// Maximum length in bytes of an unknown variable that an error message quotes. Longer text in braces may be part of a
/// secret.
const MAX_QUOTED_NAME: usize = 20;

/// Compile the header changes for requests or for responses. `route` is the name of the route, which is the value of
/// `{route}`.
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

/// The value to which a header is set.
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

/// Return the name of a header to change. Report an error if the header is reserved or listed twice.
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
            Issue::new(span, format!("`{name}` cannot be set or removed: {reason}")).with_hint("remove this header"),
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

/// Compile the error pages of a route or of the server. The first table with a key takes precedence.
pub(super) fn error_pages(tables: &[&Option<Spanned<ErrorPagesTable>>]) -> Option<Arc<ErrorPages>> {
    let tables: Vec<_> = tables.iter().filter_map(|table| Some(table.as_ref()?.get_ref())).collect();
    let html = tables.iter().find_map(|table| table.html.as_ref());
    let json = tables.iter().find_map(|table| table.json.as_ref());
    let [html, json] = [html, json].map(|text| text.map(|text| text.get_ref().as_str()));
    (!tables.is_empty()).then(|| Arc::new(ErrorPages::parse(html, json)))
}

/// `min_size` of `compress`: shorter responses fit into one packet.
const MIN_COMPRESSED_SIZE: usize = 1 << 10;

/// Compile `compress` of a route.
pub(super) fn compression(route: &Route, reader: &mut Validator<'_>) -> Option<Compression> {
    let written = route.compress.as_ref()?;
    if route.upstream.is_none() {
        let issue = Issue::new(written.span(), "only responses of upstreams are compressed");
        reader.push_issue(issue.with_hint("remove `compress`, or set an `upstream` for the route"));
    }
    let default = CompressTable::default();
    let table = match written.get_ref() {
        Compress::On(false) => return None,
        Compress::On(true) => &default,
        Compress::Table(table) => table,
    };
    let codings = match &table.algorithms {
        None => CODINGS.map(|(_, coding)| coding).into(),
        Some(list) => {
            if list.get_ref().is_empty() {
                let issue = Issue::new(list.span(), "`algorithms` is empty: no response would be compressed");
                reader.push_issue(issue.with_hint("remove `algorithms`, or write compress = false"));
            }
            list.get_ref().iter().map(|name| reader.one_of(Some(name), Coding::Gzip, &CODINGS)).collect()
        }
    };
    let types = match &table.types {
        None => DEFAULT_TYPES.map(Into::into).into(),
        Some(list) => list.iter().filter_map(|kind| media_range(kind, reader)).collect(),
    };
    let min_size = reader.size_or_off(table.min_size.as_ref(), MIN_COMPRESSED_SIZE) as u64;
    Some(Compression { codings, types, min_size })
}

/// Return a media type or range in lower case.
fn media_range(text: &Text, reader: &mut Validator<'_>) -> Option<Box<str>> {
    let range = text.get_ref().to_ascii_lowercase();
    let is_token = |part: &str| {
        !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"!#$&^_.+-".contains(&byte))
    };
    let is_valid = range.split_once('/').is_some_and(|(kind, subtype)| match subtype {
        "*" => kind == "*" || is_token(kind),
        subtype => is_token(kind) && is_token(subtype),
    });
    if !is_valid {
        let issue = Issue::new(text.span(), format!("`{}` is not a media type", text.get_ref()));
        reader.push_issue(issue.with_hint("such as \"application/json\", \"text/*\" or \"*/*\", without parameters"));
    }
    is_valid.then(|| range.into())
}

// === CORS ===

/// Methods that preflight responses allow if neither `cors` nor the route lists methods. Browsers send requests with
/// these methods without a preflight ("CORS-safelisted method" in the Fetch standard).
const SAFELISTED_METHODS: HeaderValue = HeaderValue::from_static("GET, HEAD, POST");

/// Item in a list of `cors` that means all origins, methods or headers.
const ALL: &str = "*";

/// Compile the CORS policy of a route. `of_limits` lists the RateLimit headers, which the policy exposes as well.
pub(super) fn cors_policy(
    route: &Route,
    of_limits: Option<&HeaderValue>,
    reader: &mut Validator<'_>,
) -> Option<CorsPolicy> {
    let written = route.cors.as_ref()?;
    let span = written.span();
    let cors = written.get_ref();
    let credentials = cors.credentials.as_ref().is_some_and(|value| *value.get_ref());
    let origins = origins(cors, reader);
    if cors.origins.is_empty() {
        let issue = Issue::new(span, "`cors` needs `origins`");
        reader.push_missing(issue.with_hint("origins = [\"https://app.example.com\"]"));
    }
    if let (AllowedOrigins::Any, Some(value)) = (&origins, cors.credentials.as_ref().filter(|_| credentials)) {
        let issue = Issue::new(
            value.span(),
            "`credentials` cannot be combined with all origins: browsers reject this combination",
        );
        reader
            .push_issue(issue.with_hint("list the origins: [\"https://app.example.com\", \"https://*.example.com\"]"));
    }
    reserve_headers(route.response_headers.as_ref(), reader);
    let methods = match &cors.methods {
        Some(list) if is_all(list) => AllowedNames::Requested,
        Some(list) => {
            let methods = reader.methods(Some(list), &written.span());
            AllowedNames::Listed(list_value(methods.iter().map(|method| method.as_str())))
        }
        None => {
            let of_route = route.methods.iter().flatten().map(|method| method.get_ref().as_str());
            AllowedNames::Listed(list_value(of_route).or(Some(SAFELISTED_METHODS)))
        }
    };
    let headers = match cors.headers.as_deref() {
        Some(list) if is_all(list) => AllowedNames::Requested,
        list => {
            let names = header_names(list.unwrap_or_default(), reader);
            AllowedNames::Listed(list_value(names.iter().map(|name| name.as_str())))
        }
    };
    let expose = expose(cors, of_limits, credentials, reader);
    let private_network = cors.private_network.as_ref().is_some_and(|value| *value.get_ref());
    let max_age = max_age(cors.max_age.as_ref(), reader);
    Some(CorsPolicy { origins, methods, headers, credentials, max_age, expose, private_network })
}

fn origins(cors: &Cors, reader: &mut Validator<'_>) -> AllowedOrigins {
    let mut patterns = Vec::new();
    for text in &cors.origins {
        match text.get_ref().parse() {
            Ok(OriginPattern::Any) if cors.origins.len() > 1 => {
                let issue = Issue::new(text.span(), "`*` includes the other origins");
                reader.push_issue(issue.with_hint("keep either `*` or the remaining entries"));
            }
            Ok(pattern) => patterns.push(pattern),
            Err(error) => {
                let hint = match &error {
                    OriginError::Null => {
                        "remove it; serve the page from an origin such as \"https://app.example.com\"".to_owned()
                    }
                    OriginError::MissingScheme => format!("\"https://{}\"", text.get_ref()),
                    OriginError::HasPath(origin) => format!("\"{origin}\""),
                    OriginError::MisplacedWildcard => {
                        "\"https://*.example.com\", or \"*\" alone for all origins".to_owned()
                    }
                    OriginError::NotAscii => "\"https://xn--bcher-kva.example\" for https://bücher.example".to_owned(),
                    OriginError::Malformed => {
                        "write scheme, host and port: \"https://app.example.com:8443\"".to_owned()
                    }
                };
                let message = format!("`{}`: {error}", text.get_ref());
                reader.push_issue(Issue::new(text.span(), message).with_hint(hint));
            }
        }
    }
    AllowedOrigins::new(patterns)
}

/// Report header rules that change headers which the CORS policy sets.
fn reserve_headers(rules: Option<&Spanned<ResponseHeaderRules>>, reader: &mut Validator<'_>) {
    let Some(rules) = rules.map(|rules| rules.get_ref()) else { return };
    let set = rules.set.iter().map(|(name, value)| (name.as_str(), value.span()));
    let removed = rules.remove.iter().map(|name| (name.get_ref().as_str(), name.span()));
    for (name, span) in set.chain(removed) {
        if name.parse().is_ok_and(|name: HeaderName| is_cors_header(&name)) {
            let issue = Issue::new(span, format!("`cors` of this route already sets `{name}`"));
            reader.push_issue(issue.with_hint("remove this header"));
        }
    }
}

/// Convert `max_age` to a number of seconds.
fn max_age(text: Option<&Text>, reader: &mut Validator<'_>) -> Option<HeaderValue> {
    let text = text?;
    let age = reader.duration(Some(text), Duration::ZERO);
    if age.subsec_nanos() > 0 {
        let issue = Issue::new(text.span(), "`max_age` must be a whole number of seconds");
        reader.push_issue(issue.with_hint("write a duration such as \"10m\"; \"0s\" disables the cache of browsers"));
    }
    Some(HeaderValue::from(age.as_secs()))
}

/// Return the value of `Access-Control-Expose-Headers`: the RateLimit headers, `Retry-After`, and the headers in
/// `expose`.
fn expose(
    cors: &Cors,
    of_limits: Option<&HeaderValue>,
    credentials: bool,
    reader: &mut Validator<'_>,
) -> Option<HeaderValue> {
    if is_all(&cors.expose) {
        if let Some(text) = cors.expose.first().filter(|_| credentials) {
            let issue = Issue::new(text.span(), "`*` has no meaning for requests with credentials");
            reader.push_issue(issue.with_hint("list the headers: expose = [\"x-total-count\"]"));
        }
        return Some(HeaderValue::from_static(ALL));
    }
    let configured = header_names(&cors.expose, reader);
    let of_limits = of_limits.and_then(|names| names.to_str().ok()).into_iter().flat_map(|names| names.split(", "));
    let mut seen = HashSet::new();
    let names = of_limits.chain(["Retry-After"]).chain(configured.iter().map(|name| name.as_str()));
    list_value(names.filter(|name| seen.insert(name.to_ascii_lowercase())))
}

fn is_all(list: &[Text]) -> bool {
    matches!(list, [only] if only.get_ref() == ALL)
}

fn header_names(list: &[Text], reader: &mut Validator<'_>) -> Vec<HeaderName> {
    let mut names = Vec::new();
    for text in list {
        if text.get_ref() == ALL {
            let issue = Issue::new(text.span(), "`*` includes the other headers");
            reader.push_issue(issue.with_hint("keep either `*` or the remaining entries"));
            continue;
        }
        names.extend(reader.header_name(text.span(), text.get_ref()));
    }
    names
}

/// Return the value of a list header, or `None` if the list is empty. Tokens that are joined with commas are always a
/// valid value.
fn list_value<'t>(tokens: impl Iterator<Item = &'t str>) -> Option<HeaderValue> {
    let list = tokens.collect::<Vec<_>>().join(", ");
    HeaderValue::try_from(list).ok().filter(|value| !value.is_empty())
}
