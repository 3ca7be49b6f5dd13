//! Detection and redaction of secrets in a configuration, for error reports, the log and `/api/config`. The types of the
//! configuration say which values are secret. The names of unknown keys, such as misspellings, decide about their values.

use std::borrow::Cow;
use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use std::sync::LazyLock;

use serde_json::Value;
use toml::Spanned;
use toml::de::{DeTable, DeValue};
use toml::value::Datetime;

use crate::config::file_schema::{FileKind, child};

/// Placeholder for a secret.
pub(super) const MASK: &str = "***";

/// Words that mark the names of secret keys, headers and query parameters. A name that contains one of them has a
/// secret value. `-` in a name counts as `_`.
const SECRET_WORDS: [&str; 12] = [
    "token",
    "secret",
    "pass",
    "pwd",
    "authorization",
    "cookie",
    "credential",
    "api_key",
    "apikey",
    "session",
    "signature",
    "mac_key",
];

/// Words whose misspellings also mark a name as secret. `socket`, which is similar to `secret`, is not a misspelling.
const FUZZY_SECRET_WORDS: [&str; 3] = ["token", "secret", "password"];

/// Query parameters of store URLs that are not secret.
const PUBLIC_QUERY_PARAMETERS: [&str; 2] = ["db", "protocol"];

/// Return whether the value of a key with this name is a secret.
pub(super) fn is_secret_name(name: &str) -> bool {
    let name = name.to_ascii_lowercase().replace('-', "_");
    SECRET_WORDS.iter().any(|word| name.contains(word))
}

/// Return whether the whole value `text` is a secret. `path` contains the keys that lead to the value. The items of a
/// list have the path of the list. `text` is empty if the value is not a string.
pub(super) fn is_secret(path: &[&str], text: &str) -> bool {
    let Secrecy { mark, is_suspicious, is_known } = Secrecy::of(path);
    // A URL without a scheme, whose text before `@` may be a user name and a password.
    let has_credentials = || !text.contains("://") && text.contains('@');
    // The operator may have pasted an API key in place of a value of this form.
    let is_pasted = |has_form: bool| !text.is_empty() && !has_form;
    is_suspicious
        || match mark {
            Some("always" | "unless-list") => true,
            Some("url") => has_credentials(),
            Some("unless-hash") => !text.starts_with("sha256:"),
            Some("unless-time") => is_pasted(text.parse::<Datetime>().is_ok()),
            Some("unless-boolean") => is_pasted(text.parse::<bool>().is_ok()),
            _ => !is_known && path.last().is_some_and(|key| url_keys().contains(key)) && has_credentials(),
        }
}

/// What the types of the configuration and the names of the keys say about a value.
struct Secrecy {
    /// The attribute `secret` of the innermost key that has one: `always`, `never`, `url` (only its credentials are
    /// secret), `by-name` (the names in this table decide), or `unless-FORM` (secret if the value does not have this
    /// form).
    mark: Option<&'static str>,
    /// Whether the value has a name that marks a secret. The attribute of a key takes precedence over its name.
    is_suspicious: bool,
    /// Whether the configuration has this key.
    is_known: bool,
}

impl Secrecy {
    fn of(path: &[&str]) -> Self {
        // The defaults of routes have the keys of a route.
        let path = match path {
            ["route_defaults", keys @ ..] | ["route_group", _, keys @ ..] => [&["route"], keys].concat(),
            path => path.to_vec(),
        };
        let path = &*path;
        let mut schema = Some(FileKind::of(path).schema());
        let mut secrecy = Secrecy { mark: None, is_suspicious: false, is_known: true };
        for (depth, key) in path.iter().enumerate() {
            let child = schema.and_then(|schema| child(schema, key));
            // A top-level table `[api_key]` is not secret. The error about this unsupported table quotes its values.
            let is_table = depth == 0 && path.len() > 1 && *key == "api_key";
            // Names of tables that the administrator chooses, such as the name of a limit, mark no secrets.
            let is_chosen =
                child.is_some_and(|child| child.is_name) && path.len() > depth + 1 && secrecy.mark != Some("by-name");
            secrecy.is_suspicious |= !is_table && !is_chosen && is_suspicious(key);
            if let Some(mark) = child.and_then(|child| child.schema["secret"].as_str()) {
                (secrecy.mark, secrecy.is_suspicious) = (Some(mark), false);
            }
            schema = child.map(|child| child.schema);
        }
        secrecy.is_known = schema.is_some();
        secrecy
    }
}

/// Return whether a key with this name may have a secret value.
fn is_suspicious(key: &str) -> bool {
    let is_misspelled =
        || key != "socket" && FUZZY_SECRET_WORDS.iter().any(|word| strsim::damerau_levenshtein(key, word) <= 2);
    is_secret_name(key) || is_misspelled()
}

/// Return the names of all keys whose values are URLs. A misspelled table may contain such a key.
fn url_keys() -> &'static HashSet<&'static str> {
    fn collect(schema: &'static Value, keys: &mut HashSet<&'static str>) {
        for (key, value) in schema["properties"].as_object().into_iter().flatten() {
            keys.extend((value["secret"] == "url").then_some(key.as_str()));
            collect(value, keys);
        }
        for inner in [&schema["items"], &schema["additionalProperties"]].into_iter().filter(|inner| inner.is_object()) {
            collect(inner, keys);
        }
        schema["anyOf"].as_array().into_iter().flatten().for_each(|form| collect(form, keys));
    }
    static KEYS: LazyLock<HashSet<&str>> = LazyLock::new(|| {
        let mut keys = HashSet::new();
        collect(FileKind::Gateway.schema(), &mut keys);
        keys
    });
    &KEYS
}

/// Return the byte ranges of secrets in a text: the credentials of a URL, and the values of query parameters.
pub(super) fn secret_ranges(text: &str) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let scheme = text.find("://").map(|at| at + "://".len());
    // The credentials extend to the last `@`, because the password may contain an unescaped `@` or `/`. Such a
    // character may be the reason for the reported error.
    if let Some(from) = scheme
        && let Some(at) = text[from..].rfind('@')
    {
        found.push(from..from + at);
    }
    let from = found.last().map_or(0, |part| part.end);
    let Some(query) = text[from..].find('?').map(|at| from + at + 1) else { return found };
    let mut start = query;
    for pair in text[query..].split('&') {
        if let Some((name, value)) = pair.split_once('=') {
            let is_public =
                if scheme.is_some() { PUBLIC_QUERY_PARAMETERS.contains(&name) } else { !is_secret_name(name) };
            if !is_public && !value.is_empty() {
                found.push(start + name.len() + 1..start + pair.len());
            }
        } else if scheme.is_some() && !pair.is_empty() {
            found.push(start..start + pair.len());
        }
        start += pair.len() + 1;
    }
    found
}

/// Return the text with its secrets masked.
pub(super) fn redact(text: &str) -> String {
    redact_with(text, &|_| MASK.to_owned())
}

/// Return the text with its secrets replaced by their masks.
fn redact_with(text: &str, mask: &Mask<'_>) -> String {
    let mut text_without_secrets = text.to_owned();
    for part in secret_ranges(text).into_iter().rev() {
        let masked = mask(&text[part.clone()]);
        text_without_secrets.replace_range(part, &masked);
    }
    text_without_secrets
}

// === Redaction of configuration text: error reports may be written to logs ===

/// A configuration text with its secrets redacted.
#[derive(Debug)]
pub(super) struct RedactedText {
    /// The text with asterisks in place of secrets. Byte offsets are the same as in the original text.
    pub(super) text: String,
    /// The secrets, as written in the file.
    secrets: Vec<String>,
}

impl RedactedText {
    pub(super) fn new(text: &str) -> Self {
        let mut redacted = RedactedText { text: text.to_owned(), secrets: Vec::new() };
        match DeTable::parse(text) {
            Ok(table) => redacted.redact_table(text, table.get_ref(), &mut Vec::new()),
            // If the text is not valid TOML, redact it line by line. The result may hide other text as well, but it
            // hides all secrets.
            Err(_) => redacted.text = text.split_inclusive('\n').map(redact_line).collect(),
        }
        redacted
    }

    /// Return the message with all recorded secrets masked, and with the secret parts of quoted URLs masked.
    pub(super) fn redact_message(&self, text: &str) -> String {
        let message = self.redact_hint(text);
        let mut out = String::new();
        for (index, quoted) in message.split('`').enumerate() {
            out.push_str(if index == 0 { "" } else { "`" });
            // Messages quote values in backticks. URLs outside of backticks are only examples, which contain no
            // secrets.
            out.push_str(&if index % 2 == 1 { redact(quoted) } else { quoted.to_owned() });
        }
        out
    }

    /// Return the hint with all recorded secrets masked. URLs in hints are only examples, which contain no secrets.
    pub(super) fn redact_hint(&self, hint: &str) -> String {
        self.secrets.iter().fold(hint.to_owned(), |redacted_hint, secret| redacted_hint.replace(secret, MASK))
    }

    fn redact_table<'t>(&mut self, text: &str, table: &'t DeTable<'_>, path: &mut Vec<&'t str>) {
        for (key, value) in table {
            path.push(key.get_ref());
            self.redact_value(text, value, path);
            path.pop();
        }
    }

    fn redact_value<'t>(&mut self, text: &str, value: &'t Spanned<DeValue<'_>>, path: &mut Vec<&'t str>) {
        let span = value.span();
        match value.get_ref() {
            DeValue::Table(table) => self.redact_table(text, table, path),
            // The items are names of routes. Only a string instead of this list may be an API key.
            DeValue::Array(items) if Secrecy::of(path).mark == Some("unless-list") => {
                items.iter().for_each(|item| self.redact_value(text, item, &mut Vec::new()));
            }
            DeValue::Array(items) => items.iter().for_each(|item| self.redact_value(text, item, path)),
            DeValue::String(string) if is_secret(path, string) => self.hide_value(span, string),
            DeValue::String(string) => {
                let found = secret_ranges(string);
                let within = text.get(span.clone()).and_then(|raw| raw.find(&**string));
                match within {
                    // Do not record parts of a URL with fewer than 6 bytes, because they may be common words. If a
                    // message quotes the whole URL, `redact_message` masks these parts.
                    Some(from) => found.into_iter().for_each(|part| {
                        let start = span.start + from;
                        self.text = mask_range(&self.text, start + part.start, start + part.end);
                        self.remember_secret(&string[part], 6);
                    }),
                    // The string contains escape sequences, so the offsets of its parts are unknown. Hide the whole
                    // value.
                    None if !found.is_empty() => self.hide_value(span, string),
                    None => {}
                }
            }
            _ if is_secret(path, "") => {
                let raw = text.get(span.clone()).unwrap_or_default().to_owned();
                self.hide_value(span, &raw);
            }
            _ => {}
        }
    }

    /// Record a secret for `redact_message`. Ignore secrets with fewer than `min_length` bytes, because they may also
    /// be a part of other words.
    fn remember_secret(&mut self, secret: &str, min_length: usize) {
        if secret.len() >= min_length && !secret.contains("${") {
            self.secrets.push(secret.to_owned());
        }
    }

    fn hide_value(&mut self, span: Range<usize>, secret: &str) {
        self.text = mask_range(&self.text, span.start, span.end);
        self.remember_secret(secret, 3);
    }
}

/// Return whether a line may contain a secret. The line need not be valid TOML.
pub(super) fn has_secret(line: &str) -> bool {
    redact_line(line) != line
}

fn redact_line(line: &str) -> String {
    let Some(key) = line.find('=') else { return line.to_owned() };
    let words = line.split(|sign: char| !sign.is_ascii_alphanumeric() && !"-_".contains(sign));
    let rules = line.contains("_headers") || line.contains("set");
    // A URL without a scheme may contain a password before `@`.
    let text = if line.contains('@') && !line.contains("://") { "@" } else { "" };
    if rules || words.clone().any(|word| is_secret_name(word) || is_secret(&["", word], text)) {
        return mask_range(line, key, line.len());
    }
    let mut redacted_line = line.to_owned();
    for part in secret_ranges(line.trim_end_matches(['"', '\'', '\n', ' ', ']', '}'])) {
        redacted_line = mask_range(&redacted_line, part.start, part.end);
    }
    redacted_line
}

/// Replace each byte in a range with an asterisk, except whitespace, quotes, brackets, `=` and the names of environment
/// variables in `${NAME}`. Default values of environment variables are replaced.
fn mask_range(line: &str, from: usize, to: usize) -> String {
    let (before, rest) = line.split_at(from);
    let (secret, after) = rest.split_at(to - from);
    let mut hidden = String::with_capacity(line.len());
    let mut rest = secret;
    while let Some(start) = rest.find("${") {
        let end = rest[start..].find([':', '}']).map_or(rest.len(), |end| start + end);
        hidden.push_str(&asterisks(&rest[..start]));
        hidden.push_str(&rest[start..end]);
        rest = &rest[end..];
    }
    format!("{before}{hidden}{}{after}", asterisks(rest))
}

fn asterisks(text: &str) -> String {
    let hidden = |sign: char| match sign {
        ' ' | '=' | '"' | '\'' | '[' | ']' | '{' | '}' | '\t' | '\r' | '\n' => sign.to_string(),
        sign => "*".repeat(sign.len_utf8()),
    };
    text.chars().map(hidden).collect()
}

/// Parse the texts of a file and of the files that it includes. Return their merged values as JSON, with masked secrets
/// and without substituted environment variables.
///
/// # Errors
/// A text is not valid TOML.
pub fn redacted_config<'t>(texts: impl IntoIterator<Item = Cow<'t, str>>) -> Result<Value, toml::de::Error> {
    masked_config(texts, &|_| MASK.to_owned())
}

/// Like [`redacted_config`], but append a keyed hash to each masked secret, so that two configurations with different
/// secrets differ. Remove the hashes with [`without_hashes`] before the text leaves the process.
///
/// # Errors
/// A text is not valid TOML.
pub(crate) fn hashed_config<'t>(
    texts: impl IntoIterator<Item = Cow<'t, str>>,
    hasher: &RandomState,
) -> Result<Value, toml::de::Error> {
    masked_config(texts, &|secret| format!("{MASK}{HASH_MARK}{:0HASH_DIGITS$x}", hasher.hash_one(secret)))
}

/// Private-use character between the mask and the hash of a secret.
const HASH_MARK: char = '\u{E000}';

/// Number of hexadecimal digits of a hash.
const HASH_DIGITS: usize = 16;

/// Remove the hashes of [`hashed_config`] from a text.
pub(crate) fn without_hashes(text: &str) -> String {
    let mut parts = text.split(HASH_MARK);
    let start = parts.next().unwrap_or_default().to_owned();
    parts.fold(start, |text, part| text + part.get(HASH_DIGITS..).unwrap_or_default())
}

/// Returns the mask of a secret.
type Mask<'a> = dyn Fn(&str) -> String + 'a;

fn masked_config<'t>(texts: impl IntoIterator<Item = Cow<'t, str>>, mask: &Mask<'_>) -> Result<Value, toml::de::Error> {
    let mut all = Value::Null;
    for text in texts {
        let value = toml::from_str(&text)?;
        if all.is_null() { all = value } else { merge(&mut all, value) }
    }
    redact_value(&mut all, &mut Vec::new(), mask);
    Ok(all)
}

/// Add the values of an included file to the values of all other files.
fn merge(all: &mut Value, included: Value) {
    match (all, included) {
        (Value::Array(all), Value::Array(items)) => all.extend(items),
        (Value::Object(all), Value::Object(entries)) => {
            for (key, value) in entries {
                match all.get_mut(&key) {
                    Some(existing) => merge(existing, value),
                    None => drop(all.insert(key, value)),
                }
            }
        }
        _ => {}
    }
}

fn redact_value<'k>(value: &'k mut Value, path: &mut Vec<&'k str>, mask: &Mask<'_>) {
    match value {
        Value::String(text) if text.is_empty() => {}
        Value::String(text) if is_secret(path, text) => *text = mask(text),
        Value::String(text) => *text = redact_with(text, mask),
        Value::Array(items) => {
            for item in items {
                redact_value(item, path, mask);
            }
        }
        Value::Object(table) => {
            for (key, value) in table {
                path.push(key);
                redact_value(value, path, mask);
                path.pop();
            }
        }
        Value::Bool(_) | Value::Number(_) if is_secret(path, "") => *value = mask(&value.to_string()).into(),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_names_determine_secrets() {
        for (path, text, expected) in [
            (&["admin", "token"][..], "x", true),
            (&["store", "sekret"], "x", true),
            (&["store", "password"], "x", true),
            (&["upstream", "u", "servers"], "me:pw@host:80", true),
            (&["upstream", "u", "servers", "url"], "me:pw@host:80", true),
            (&["store", "url"], "me:pw@host", true),
            (&["route", "redirect", "to"], "me:pw@host", true),
            (&["upstream", "u", "servers"], "host:80", false),
            (&["acme", "email"], "me@host", false),
            (&["store", "sentinel", "password"], "x", true),
            (&["store", "sentinel", "password_file"], "x", false),
            (&["store", "password_file"], "x", false),
            (&["route", "request_headers", "set", "x-a"], "x", true),
            (&["route", "response_headers", "x-a"], "x", true),
            (&["route", "response_headers", "remove"], "server", false),
            (&["route_defaults", "response_headers", "set", "x-a"], "x", true),
            (&["route_group", "g", "request_headers", "set", "x-a"], "x", true),
            (&["route_group", "g", "timeout"], "10s", false),
            (&["route", "headers", "Authorization"], "x", true),
            (&["route", "headers", "x-api-key"], "x", true),
            (&["route", "headers", "x-version"], "x", false),
            (&["consumer", "keys"], "my-key", true),
            (&["consumer", "keys"], "sha256:00", false),
            (&["limit", "tokens", "quota"], "1/s", false),
            (&["limit", "l", "tiers", "secret", "quota"], "1/s", false),
            (&["upstream", "session", "servers"], "http://a", false),
            (&["api_key", "header"], "x-api-key", false),
            (&["route", "cors", "credentials"], "true", false),
            (&["auth", "tokens", "issuer"], "https://a", false),
            (&["auth", "keys", "forward_credential"], "", false),
            (&["auth", "tokens", "claims", "token_use"], "access", false),
            (&["auth", "tokens", "secret"], "x", true),
            (&["consumer", "keys", "hash"], "my-key", true),
            (&["consumer", "keys", "hash"], "sha256:00", false),
            (&["consumer", "keys", "name"], "ci", false),
            (&["consumer", "keys", "expires"], "my-key", true),
            (&["consumer", "keys", "expires"], "2027-01-01", false),
            (&["limit", "l", "cost", "image_tokens"], "", false),
            (&["limit", "l", "cost", "models", "my-token-model", "input"], "", false),
            (&["log", "access"], "stdout", false),
            (&["notify", "token-hook", "stream"], "events", false),
            (&["notify", "billing", "webhook"], "https://hooks.example.com/T0/B0", true),
            (&["notify", "billing", "secret"], "whsec_", true),
            (&["limit", "l", "notify", "to"], "token-hook", false),
            (&["limit", "l", "notify", "to"], "me@h", false),
            (&["limits", "l", "url"], "me:pw@h", true),
            // A key of a table without its name.
            (&["notify", "secret"], "x", true),
        ] {
            assert_eq!(is_secret(path, text), expected, "{path:?} {text}");
        }
    }

    #[test]
    fn attribute_secret_has_a_known_value() {
        fn collect(schema: &Value, found: &mut std::collections::BTreeSet<String>) {
            match schema {
                Value::Array(items) => items.iter().for_each(|item| collect(item, found)),
                Value::Object(keys) => {
                    found.extend(schema["secret"].as_str().map(str::to_owned));
                    keys.values().for_each(|value| collect(value, found));
                }
                Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
            }
        }
        let mut found = std::collections::BTreeSet::new();
        collect(FileKind::Gateway.schema(), &mut found);
        collect(FileKind::Consumers.schema(), &mut found);
        let known =
            ["always", "by-name", "never", "unless-boolean", "unless-hash", "unless-list", "unless-time", "url"];
        assert!(found.iter().eq(known.iter()), "{found:?}");
    }

    #[test]
    fn credentials_and_query_values_of_urls_are_secret() {
        for (text, expected) in [
            ("redis://me:p/a@ss@host:1/0", vec!["me:p/a@ss"]),
            ("redis+sentinel://a,b/m?sentinel_password=abc&db=1", vec!["abc"]),
            ("http://a/?pass=abc&x=y&z", vec!["abc", "y", "z"]),
            ("http://a:b?c@host/?db=1", vec!["a:b?c"]),
            ("/path?token=abc&page=2", vec!["abc"]),
            ("/path/{id}", vec![]),
            ("http://a:1", vec![]),
        ] {
            let found: Vec<_> = secret_ranges(text).into_iter().map(|part| &text[part]).collect();
            assert_eq!(found, expected, "{text}");
        }
    }

    #[test]
    fn redaction_masks_only_secrets() {
        for (text, shown) in [
            ("secret = \"s3cret\"\n", "secret = \"******\"\n"),
            ("sekret = \"pässe\"", "sekret = \"******\""),
            ("token = [\"abc\"]", "token = [\"***\"]"),
            ("admin.token = 'a b'\n", "admin.token = '* *'\n"),
            ("secret = \"${NAME}\"", "secret = \"${NAME}\""),
            ("secret = \"a${NAME:-dflt}b\"", "secret = \"*${NAME******}*\""),
            ("token = 12", "token = **"),
            ("store = { url = \"redis://h\", secret = \"abc\" }", "store = { url = \"redis://h\", secret = \"***\" }"),
            ("url = \"redis://me:p/a@ss@host:1/0\"", "url = \"redis://*********@host:1/0\""),
            ("url = \"redis:/\\u002fa:b@c\"", ""),
            (
                "url = \"redis+sentinel://a,b/m?sentinel_password=abc&db=1\"",
                "url = \"redis+sentinel://a,b/m?sentinel_password=***&db=1\"",
            ),
            ("servers = [\"http://a:1\", \"http://u:p@b:1\"]", "servers = [\"http://a:1\", \"http://***@b:1\"]"),
            ("name = \"search\"\npath = \"/token\"\n", "name = \"search\"\npath = \"/token\"\n"),
            ("[limit.tokens]\nquota = \"1/s\"\n", "[limit.tokens]\nquota = \"1/s\"\n"),
            // Text that is not valid TOML is redacted line by line.
            ("a = { set = { authorization = \"abc\" }", "a = { *** = { ************* = \"***\" }"),
            ("a = 1, secret = \"abc", "a = ** ****** = \"***"),
            ("servers = [\"me:abc@h:1\"", "servers = [\"**********\""),
            ("email = \"me@h\"\na = [", "email = \"me@h\"\na = ["),
        ] {
            let redacted = RedactedText::new(text).text;
            assert_eq!(
                redacted.len(),
                text.chars().map(char::len_utf8).sum::<usize>(),
                "offsets do not change: {text}"
            );
            if !text.contains("\\u") {
                assert_eq!(redacted, shown);
            }
            assert!(!redacted.contains("abc") && !redacted.contains("a:b"), "{redacted}");
        }
    }

    #[test]
    fn redacted_messages_do_not_contain_secrets() {
        let redacted = RedactedText::new("secret = \"hunter2\"\nurl = \"http://u:pw@h\"");
        assert_eq!(
            redacted.redact_message("`hunter2` is not a size; `http://${X}:pw2@h/?a=b` is no URL"),
            "`***` is not a size; `http://***@h/?a=***` is no URL"
        );
    }
}

#[cfg(test)]
mod redacted_config_tests {
    use super::*;

    #[test]
    fn hashed_config_differs_if_a_secret_differs() {
        let text = |secret: &str| format!("admin.token = \"{secret}\"\nstore.url = \"redis://:{secret}@h/?db=1\"\n");
        let hasher = RandomState::new();
        let hashed = |secret: &str| hashed_config([text(secret).into()], &hasher).unwrap();
        assert_eq!(hashed("planted"), hashed("planted"));
        let one = hashed("planted");
        let other = hashed("other");
        for pointer in ["/admin/token", "/store/url"] {
            assert_ne!(one.pointer(pointer), other.pointer(pointer), "{pointer}");
        }
        let shown = redacted_config([text("planted").into()]).unwrap();
        assert_eq!(without_hashes(&one.to_string()), shown.to_string());
        assert_eq!(without_hashes("é"), "é");
    }

    #[test]
    fn redacted_config_masks_only_secrets() {
        let text = "[admin]\naddress = \"127.0.0.1:9180\"\ntoken = \"planted\"\n\
                    [store]\nurl = \"redis+sentinel://user:planted@h1,h2/mymaster?sentinel_password=planted\"\nsecret = \"${S:-planted}\"\n\
                    [server]\nworkers = 2\n[auth.keys]\nkind = \"api-key\"\nforward_credential = true\nconsumers = \"consumers.toml\"\n\
                    [upstream.api]\nservers = [\"http://${HOST}:80\", { url = \"https://a:planted@b\", weight = 2 }]\n\
                    [[route]]\nname = \"r\"\npath = \"/?\"\nrequest_headers.set = { authorization = \"planted\" }\n\
                    response_headers = { set = { x-a = \"planted\" }, remove = [\"server\"] }\n";
        let shown = redacted_config([text.into()]).unwrap();
        assert!(!shown.to_string().contains("planted"), "{shown}");
        for (pointer, expected) in [
            ("/admin/address", "127.0.0.1:9180"),
            ("/admin/token", "***"),
            ("/store/url", "redis+sentinel://***@h1,h2/mymaster?sentinel_password=***"),
            ("/store/secret", "***"),
            ("/auth/keys/consumers", "consumers.toml"),
            ("/upstream/api/servers/0", "http://${HOST}:80"),
            ("/upstream/api/servers/1/url", "https://***@b"),
            ("/route/0/path", "/?"),
            ("/route/0/request_headers/set/authorization", "***"),
            ("/route/0/response_headers/remove/0", "server"),
        ] {
            assert_eq!(shown.pointer(pointer), Some(&expected.into()), "{pointer} in {shown}");
        }
        assert_eq!(
            (&shown["server"]["workers"], &shown["auth"]["keys"]["forward_credential"]),
            (&2.into(), &true.into())
        );
    }
}
