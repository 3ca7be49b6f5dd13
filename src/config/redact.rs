//! Redacts secrets in configuration text. Error reports may be written to logs.

use std::borrow::Cow;
use std::ops::Range;

use serde_json::Value;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::config::secrets::{MASK, is_secret, is_secret_name, redact, secret_ranges};

/// A text with its secrets redacted.
#[derive(Debug)]
pub(super) struct RedactedText {
    /// The text with asterisks instead of secrets. Each byte keeps its offset in the text.
    pub(super) text: String,
    /// The secrets, as they are written in the file.
    secrets: Vec<String>,
}

impl RedactedText {
    pub(super) fn new(text: &str) -> Self {
        let mut redacted = RedactedText { text: text.to_owned(), secrets: Vec::new() };
        match DeTable::parse(text) {
            Ok(table) => redacted.redact_table(text, table.get_ref(), &mut Vec::new()),
            // If the text is not valid TOML, redact it line by line. The result may hide more than the secrets, but
            // never less.
            Err(_) => redacted.text = text.split_inclusive('\n').map(redact_line).collect(),
        }
        redacted
    }

    /// Return the message without secrets, and without the secret parts of quoted URLs.
    pub(super) fn redact_message(&self, text: &str) -> String {
        let message = self.redact_hint(text);
        let mut out = String::new();
        for (index, quoted) in message.split('`').enumerate() {
            out.push_str(if index == 0 { "" } else { "`" });
            // Messages quote values in backticks. URLs outside of backticks are only examples.
            out.push_str(&if index % 2 == 1 { redact(quoted) } else { quoted.to_owned() });
        }
        out
    }

    /// Return the hint without secrets. URLs in hints are only examples.
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
            DeValue::Array(items) => items.iter().for_each(|item| self.redact_value(text, item, path)),
            DeValue::String(string) if is_secret(path, string) => self.hide_value(span, string),
            DeValue::String(string) => {
                let found = secret_ranges(string);
                let within = text.get(span.clone()).and_then(|raw| raw.find(&**string));
                match within {
                    // Short parts of a URL are often common words, so they are not searched for. Messages quote the
                    // whole URL, which `redact_message` covers.
                    Some(from) => found.into_iter().for_each(|part| {
                        let start = span.start + from;
                        self.text = mask_range(&self.text, start + part.start, start + part.end);
                        self.remember_secret(&string[part], 6);
                    }),
                    // The string contains escape sequences, so the offsets of its parts are unknown.
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

    /// Record a secret for `redact_message`. Ignore short texts, because they also occur in words that are not secret.
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

/// Return whether a line of invalid TOML may contain a secret.
pub(super) fn has_secret(line: &str) -> bool {
    redact_line(line) != line
}

fn redact_line(line: &str) -> String {
    let Some(key) = line.find('=') else { return line.to_owned() };
    let words = line.split(|sign: char| !sign.is_ascii_alphanumeric() && !"-_".contains(sign));
    let rules = line.contains("_headers") || line.contains("set");
    if rules || words.clone().any(|word| is_secret_name(word) || is_secret(&["", word], "")) {
        return mask_range(line, key, line.len());
    }
    let mut redacted_line = line.to_owned();
    for part in secret_ranges(line.trim_end_matches(['"', '\'', '\n', ' ', ']', '}'])) {
        redacted_line = mask_range(&redacted_line, part.start, part.end);
    }
    redacted_line
}

/// Replace letters and digits with asterisks, except in the names of environment variables.
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

/// Parse a file and the files that it includes. Return the values of all files as JSON, without substitution of
/// environment variables and with masked secrets.
///
/// # Errors
/// A text is not valid TOML.
pub fn redacted_config<'t>(texts: impl IntoIterator<Item = Cow<'t, str>>) -> Result<Value, toml::de::Error> {
    let mut all = Value::Null;
    for text in texts {
        let value = toml::from_str(&text)?;
        if all.is_null() { all = value } else { merge(&mut all, value) }
    }
    redact_value(&mut all, &mut Vec::new());
    Ok(all)
}

/// Add the tables of an included file.
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

fn redact_value<'k>(value: &'k mut Value, path: &mut Vec<&'k str>) {
    match value {
        Value::String(text) if text.is_empty() => {}
        Value::String(text) if is_secret(path, text) => *text = MASK.to_owned(),
        Value::String(text) => *text = redact(text),
        Value::Array(items) => {
            for item in items {
                redact_value(item, path);
            }
        }
        Value::Object(table) => {
            for (key, value) in table {
                path.push(key);
                redact_value(value, path);
                path.pop();
            }
        }
        Value::Bool(_) | Value::Number(_) if is_secret(path, "") => *value = MASK.into(),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            // A text that is not valid TOML is redacted as well.
            ("a = { set = { authorization = \"abc\" }", "a = { *** = { ************* = \"***\" }"),
            ("a = 1, secret = \"abc", "a = ** ****** = \"***"),
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
