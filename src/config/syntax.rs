//! TOML syntax errors, each with a hint: files in another format, typographic characters, and values without quotes.

use std::ops::Range;

use serde_json::Value;
use toml::de::DeTable;

use crate::config::error::Issue;
use crate::config::file_schema::FileKind;
use crate::config::secrets::has_secret;
use crate::config::value_types::{RequiredType, boolean_hint};

/// Quotation marks that word processors and web pages put in place of `"` and `'`.
const TYPOGRAPHIC_QUOTES: [char; 15] = [
    '\u{201c}', '\u{201d}', '\u{201e}', '\u{201f}', '\u{2018}', '\u{2019}', '\u{201a}', '\u{201b}', '\u{ab}', '\u{bb}',
    '\u{2039}', '\u{203a}', '\u{ff02}', '\u{ff07}', '\u{2033}',
];

/// Parse the text of a file. After an error, return the issues of the file.
///
/// # Errors
/// The text is not valid TOML.
pub(super) fn parse(text: &str, file: FileKind) -> Result<DeTable<'_>, Vec<Issue>> {
    let (table, errors) = DeTable::parse_recoverable(text);
    if errors.is_empty() {
        return Ok(table.into_inner());
    }
    if let Some(format) = Format::detect(text) {
        return Err(vec![format.issue(text)]);
    }
    // One mistake may cause several errors. Report the first error of each line, and only the first error of the file
    // if a bracket or a string is not closed, because the parser then misreads the lines that follow.
    let mut issues: Vec<Issue> = Vec::new();
    let mut last_line = None;
    for error in &errors {
        let span = error.span().unwrap_or(0..0);
        let line = text.get(..span.start).map_or(0, |before| before.matches('\n').count());
        if last_line == Some(line) {
            continue;
        }
        last_line = Some(line);
        let message = error.message().replace('\n', ", ");
        let is_unclosed = message.starts_with("unclosed")
            || message.starts_with("missing comma between array elements")
            || message.contains("invalid multi-line");
        let issue = issue(text, message, span, file);
        let is_repeated = issue.hint.is_some() && issues.last().is_some_and(|last| last.hint == issue.hint);
        if !is_repeated {
            issues.push(issue);
        }
        if is_unclosed {
            break;
        }
    }
    Err(issues)
}

/// Return the issue for a syntax error.
fn issue(text: &str, message: String, span: Range<usize>, file: FileKind) -> Issue {
    let line = Line::at(text, span.start);
    if let Some(issue) = foreign_character(&line) {
        return issue;
    }
    let hint = if message.contains("duplicate key") {
        line.first_definition(text).map(|first| format!("the first one is in line {first}"))
    } else if message.starts_with("invalid basic string") || message.starts_with("invalid literal string") {
        Some("a string ends on its line with the quote with which it starts; in \"…\", write \\ as \\\\".to_owned())
    } else if message.starts_with("missing comma between array elements") {
        Some("separate the items with commas, and end the list with ]".to_owned())
    } else {
        line.header_hint().or_else(|| line.hint(text, &span, file)).or_else(|| {
            let is_directive = line.text.trim_end().ends_with(';');
            is_directive.then(|| "remove the `;` at the end of the line".to_owned())
        })
    };
    Issue { span: Some(span), message, hint }
}

/// Return an issue for a character outside of strings that looks like a quotation mark or a space, but is none in TOML.
fn foreign_character(line: &Line<'_>) -> Option<Issue> {
    let mut quote = None;
    let mut is_escaped = false;
    for (offset, character) in line.text.char_indices() {
        if quote.is_none() && TYPOGRAPHIC_QUOTES.contains(&character) {
            let span = line.start + offset..line.start + offset + character.len_utf8();
            let straight = line.text.trim().replace(TYPOGRAPHIC_QUOTES, "\"");
            let hint = match has_secret(line.text) {
                true => format!("replace {character} with \""),
                false => format!("write {straight}"),
            };
            let message = format!("`{character}` is a typographic quotation mark: TOML has the quotes \" and '");
            return Some(Issue::new(span, message).with_hint(hint));
        }
        if let Some(name) = invisible_name(character).filter(|_| quote.is_none()) {
            let column = line.text[..offset].chars().count() + 1;
            let span = line.start + offset..line.start + offset + character.len_utf8();
            let message = format!("column {column} has the character U+{:04X} ({name})", u32::from(character));
            return Some(Issue::new(span, message).with_hint("replace it with a space, or remove it"));
        }
        match (quote, character) {
            (None, '#') => return None,
            (None, '"' | '\'') => quote = Some(character),
            (Some(open), _) if open == character && !is_escaped => quote = None,
            _ => {}
        }
        is_escaped = character == '\\' && quote == Some('"') && !is_escaped;
    }
    None
}

/// Return the name of a character that looks like a space, or that is invisible.
pub(super) fn invisible_name(character: char) -> Option<&'static str> {
    Some(match character {
        '\u{a0}' => "no-break space",
        '\u{ad}' => "soft hyphen",
        '\u{1680}' | '\u{2000}'..='\u{200a}' | '\u{205f}' => "typographic space",
        '\u{200b}' => "zero-width space",
        '\u{200c}' | '\u{200d}' | '\u{2060}' => "zero-width joiner",
        '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => "direction mark",
        '\u{2028}' | '\u{2029}' => "line separator",
        '\u{202f}' => "narrow no-break space",
        '\u{3000}' => "ideographic space",
        '\u{feff}' => "byte order mark",
        _ => return None,
    })
}

/// A line of a file.
struct Line<'t> {
    text: &'t str,
    /// Offset of the line in the file.
    start: usize,
}

/// A value without quotes, and its key.
struct Unquoted<'t> {
    key: &'t str,
    value: &'t str,
    /// Whether the value is an item of a list.
    is_item: bool,
}

impl<'t> Line<'t> {
    fn at(text: &'t str, offset: usize) -> Self {
        let before = text.get(..offset).unwrap_or(text);
        let start = before.rfind('\n').map_or(0, |at| at + 1);
        Line { text: text[start..].lines().next().unwrap_or_default(), start }
    }

    /// Return a hint for a table header with missing or surplus brackets.
    fn header_hint(&self) -> Option<String> {
        let line = self.text.trim();
        let name = line.trim_matches(['[', ']']).trim();
        let is_header = line.starts_with('[') && is_key(name) && !name.is_empty();
        let own = line.split(name).map(str::len).collect::<Vec<_>>();
        let is_list = matches!(name, "route" | "listener" | "consumer" | "group");
        let right = if is_list { format!("[[{name}]]") } else { format!("[{name}]") };
        (is_header && own != [1, 1] && own != [2, 2]).then(|| format!("write {right}"))
    }

    /// Return a hint for a value without quotes, or for a colon in place of an equals sign.
    fn hint(&self, text: &str, span: &Range<usize>, file: FileKind) -> Option<String> {
        if let Some((key, value)) = self.text.trim().split_once(':').filter(|(key, _)| is_key(key)) {
            let value = if has_secret(&format!("{key}={value}")) { "…" } else { value.trim() };
            return Some(format!("write `=` between key and value: {key} = {value}"));
        }
        let unquoted = self.unquoted(span)?;
        let Unquoted { key, value, is_item } = unquoted;
        let path = table_path(&text[..self.start]);
        let path: Vec<_> = path.iter().map(String::as_str).chain(key.split('.')).collect();
        let schema = file.value_schema(&path).unwrap_or(&Value::Null);
        let value = if has_secret(self.text) { "…" } else { value };
        if is_item {
            return Some(format!("put strings in quotes: \"{value}\""));
        }
        let required = RequiredType::from_schema(schema);
        Some(match required {
            RequiredType::Boolean | RequiredType::Integer | RequiredType::Number if value.starts_with('$') => {
                let name = value.trim_matches(['$', '{', '}']);
                format!("variables work in strings: {key} = \"${{{name}}}\"")
            }
            RequiredType::Boolean => boolean_hint(key, value).unwrap_or("write `true` or `false`".to_owned()),
            RequiredType::Integer | RequiredType::Number => {
                let digits = value.split(|c: char| !c.is_ascii_digit()).find(|part| !part.is_empty());
                let example = schema["minimum"].as_i64().unwrap_or_default().max(1);
                let number = digits.and_then(|digits| digits.parse().ok()).unwrap_or(example);
                format!("write a number: {key} = {number}")
            }
            RequiredType::List if value.starts_with("${") => {
                format!("variables work in strings: {key} = [\"{value}\"]")
            }
            RequiredType::List => format!("write a list of strings in quotes: {key} = [\"{value}\"]"),
            RequiredType::Text | RequiredType::Table | RequiredType::Other => {
                format!("put strings in quotes: {key} = \"{value}\"")
            }
        })
    }

    /// Return the value at a span, if it has no quotes.
    fn unquoted(&self, span: &Range<usize>) -> Option<Unquoted<'t>> {
        let line = self.text;
        let offset = span.start.saturating_sub(self.start).min(line.len());
        // The value that contains the error begins after the last `=`. In a list, it begins after the last `[` or `,`.
        // The parser may report the position of the `=`, the start of the value, or a position after the value.
        let before = line.get(..offset + usize::from(line[offset..].starts_with('=')))?;
        let equals = before.find('=').filter(|_| !before.contains('{')).or(before.rfind('='))?;
        let key = before[..equals].rsplit(['{', ',', ' ', '\t']).find(|word| !word.is_empty())?;
        let is_item = line[equals + 1..].trim_start().starts_with('[');
        let start = if is_item { equals + 1 + before[equals + 1..].rfind(['[', ','])? + 1 } else { equals + 1 };
        let value = value_text(&line[start..], before[..equals].contains('{') || is_item);
        let value = value.trim_end_matches(';');
        let is_quoted = value.starts_with(['"', '\'', '[', '{']) || value.ends_with(['"', '\'']);
        (!value.is_empty() && !is_quoted).then_some(Unquoted { key, value, is_item })
    }

    /// Return the number of the first line in `text` that defines the same table or the same key of the same table.
    fn first_definition(&self, text: &str) -> Option<usize> {
        let definition = |line: &str| {
            let line = line.trim();
            let end = if line.starts_with('[') { line.rfind(']').map(|at| at + 1) } else { line.find('=') };
            end.map(|end| line[..end].replace([' ', '\t'], ""))
        };
        let name = definition(self.text)?;
        let mut first = None;
        for (index, line) in text[..self.start].lines().enumerate() {
            let is_header = line.trim_start().starts_with('[');
            if definition(line).as_ref() == Some(&name) {
                first = first.or(Some(index + 1));
            } else if is_header && !name.starts_with('[') {
                // The following keys belong to another table, so discard the match.
                first = None;
            }
        }
        first
    }
}

/// Return the value at the start of a text without quotes: up to a comment, or up to the next delimiter if the value is
/// nested in a list or an inline table. The braces of a variable belong to the value.
fn value_text(text: &str, is_nested: bool) -> &str {
    let mut in_variable = false;
    let mut last = ' ';
    for (offset, character) in text.char_indices() {
        let is_comment = character == '#' && last.is_whitespace();
        let is_delimiter = is_nested && matches!(character, ',' | '}' | ']');
        match character {
            '{' if last == '$' => in_variable = true,
            '}' if in_variable => in_variable = false,
            _ if !in_variable && (is_comment || is_delimiter) => return text[..offset].trim(),
            _ => {}
        }
        last = character;
    }
    text.trim()
}

fn is_key(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
}

/// Return the path of the last table header in a text.
fn table_path(before: &str) -> Vec<String> {
    let header = before.lines().rev().map(str::trim).find(|line| line.starts_with('[') && line.contains(']'));
    let header = header.map_or("", |line| line.trim_start_matches('[').split(']').next().unwrap_or_default());
    let segments = header.split('.').map(|segment| segment.trim().trim_matches(['"', '\'']));
    segments.filter(|segment| !segment.is_empty()).map(str::to_owned).collect()
}

// === Files in another format ===

/// A format of other programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Json,
    Yaml,
    Nginx,
    Caddyfile,
    HaProxy,
    Xml,
    Pem,
}

impl Format {
    /// Return the format of a text that is not TOML. `None` if most of its lines look like TOML.
    fn detect(text: &str) -> Option<Self> {
        let start = text.trim_start_matches('\u{feff}').trim_start();
        if start.starts_with('{') || start.strip_prefix('[').is_some_and(|rest| rest.trim_start().starts_with('{')) {
            return Some(Format::Json);
        }
        if start.starts_with('<') {
            return Some(Format::Xml);
        }
        if start.starts_with("-----BEGIN ") {
            return Some(Format::Pem);
        }
        let lines = || text.lines().map(|line| line.split(" #").next().unwrap_or_default().trim());
        let lines = || lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
        let count = |is_counted: fn(&str) -> bool| lines().filter(|line| is_counted(line)).count();
        let toml = count(is_toml_line);
        let is_directive = |line: &str| line.ends_with(';') && !line.contains('=');
        let formats = [
            (Format::Yaml, count(is_yaml_line)),
            (Format::Nginx, count(|line| line.ends_with(';') && !line.contains(" = "))),
            (Format::HaProxy, count(is_haproxy_line)),
            (Format::Caddyfile, count(|line| line.ends_with('{') && !line.contains('='))),
        ];
        let has_blocks = lines().any(|line| line.ends_with('{'));
        let has_directives = lines().any(is_directive);
        let is_possible = |format: Format| match format {
            Format::Nginx => has_blocks || has_directives,
            Format::Caddyfile => has_blocks && !has_directives && lines().any(|line| line == "}"),
            Format::Yaml | Format::HaProxy | Format::Json | Format::Xml | Format::Pem => true,
        };
        let found = formats.into_iter().find(|(format, lines)| *lines > toml && is_possible(*format));
        found.map(|(format, _)| format)
    }

    fn name(self) -> &'static str {
        match self {
            Format::Json => "JSON",
            Format::Yaml => "YAML",
            Format::Nginx => "a configuration of nginx",
            Format::Caddyfile => "a Caddyfile",
            Format::HaProxy => "a configuration of HAProxy",
            Format::Xml => "XML",
            Format::Pem => "a PEM file",
        }
    }

    /// Return the issue for a whole file in this format.
    fn issue(self, text: &str) -> Issue {
        let start = text.find(|c: char| !c.is_whitespace() && c != '\u{feff}').unwrap_or(0);
        let end = text[start..].find('\n').map_or(text.len(), |end| start + end);
        let message = format!("this file looks like {}, but the configuration is TOML", self.name());
        Issue::new(start..end, message).with_hint(
            "`sluicegate init` creates a commented configuration; `sluicegate init --help` lists the templates",
        )
    }
}

/// Return whether a line is a table header, or a key and a value in TOML.
fn is_toml_line(line: &str) -> bool {
    let is_header = line.starts_with('[') && line.ends_with(']');
    let key = line.split_once('=').map(|(key, _)| key.trim());
    is_header || key.is_some_and(|key| is_key(&key.replace(['"', '\''], ""))) && !line.ends_with([';', '{'])
}

/// Return whether a line is a key with a colon, a list item or a document mark in YAML.
fn is_yaml_line(line: &str) -> bool {
    let item = line.strip_prefix("- ").unwrap_or(line);
    let key = item.split_once(": ").map(|(key, _)| key).or(item.strip_suffix(':'));
    line == "---" || key.is_some_and(|key| is_key(key.trim_matches(['"', '\'']))) && !line.ends_with([';', '{'])
}

/// Return whether a line begins a section of HAProxy, or is a common directive in one.
fn is_haproxy_line(line: &str) -> bool {
    let mut words = line.split_whitespace();
    let first = words.next().unwrap_or_default();
    let is_section = matches!((first, words.next()), ("global" | "defaults", None));
    let is_directive = matches!(
        first,
        "frontend" | "backend" | "listen" | "bind" | "mode" | "balance" | "default_backend" | "use_backend" | "acl"
    );
    is_section
        || is_directive
        || matches!(first, "server" | "timeout" | "http-request" | "stick-table" | "option")
            && !line.contains(['=', '{', ';'])
}
