//! Detection and redaction of secrets in a configuration. Error reports, the log and `/api/config` use the same lists
//! of secret names.

use std::borrow::Cow;
use std::hash::{BuildHasher, RandomState};
use std::ops::Range;

use serde_json::Value;
use toml::Spanned;
use toml::de::{DeTable, DeValue};
use toml::value::Datetime;

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

/// Keys of header rules. Any header may contain a credential, regardless of its name.
const HEADER_RULE_KEYS: [&str; 2] = ["request_headers", "response_headers"];

/// Tables whose keys are names that the administrator chooses.
const NAMED_TABLES: [&str; 5] = ["auth", "limit", "upstream", "tiers", "notify"];

/// Keys of `[auth.NAME]` whose values are not secret, regardless of the names of nested keys.
const PUBLIC_AUTH_KEYS: [&str; 5] = ["forward_credential", "claims", "request_headers", "response_headers", "cache"];

/// Keys in `cost` of a limit that are not secret, although their names contain `token`.
const PUBLIC_COST_KEYS: [&str; 4] = ["bytes_per_token", "image_tokens", "audio_tokens", "document_tokens"];

/// Query parameters of store URLs that are not secret.
const PUBLIC_QUERY_PARAMETERS: [&str; 2] = ["db", "protocol"];

/// Return whether the value of a key with this name is a secret.
pub(super) fn is_secret_name(name: &str) -> bool {
    let name = name.to_ascii_lowercase().replace('-', "_");
    SECRET_WORDS.iter().any(|word| name.contains(word))
}

/// Return whether the whole value `text` is a secret. `path` contains the keys that lead to the value. The items of a
/// list have the path of the list.
pub(super) fn is_secret(path: &[&str], text: &str) -> bool {
    if let ["auth", _, key, ..] = path
        && PUBLIC_AUTH_KEYS.contains(key)
    {
        return false;
    }
    if has_url(path) && !text.contains("://") && text.contains('@') {
        // A URL without a scheme, whose text before `@` may be a user name and a password.
        return true;
    }
    if let ["store", .., "password_file"] = path {
        // The path of a file is not secret.
        return false;
    }
    if let ["limit", _, "cost", "models", ..] = path {
        // The keys of `models` are names of models, which are not secret.
        return false;
    }
    if let ["notify", _, "webhook"] = path {
        // The whole URL of a webhook is secret, because many webhook URLs contain a secret in the path.
        return true;
    }
    if let ["limit", _, "cost", key] = path
        && PUBLIC_COST_KEYS.contains(key)
    {
        return false;
    }
    if path.contains(&HEADER_RULE_KEYS[0]) || path.contains(&HEADER_RULE_KEYS[1]) {
        // Header names in `remove` are not secret. All other values in header rules may be secret.
        return path.last() != Some(&"remove");
    }
    if let [.., "keys"] | [.., "keys", "hash"] = path {
        // The operator may have pasted an API key instead of its hash.
        return !text.starts_with("sha256:");
    }
    if let [.., "keys", "created" | "expires"] = path {
        // The operator may have pasted an API key instead of a time. `text` is empty if the value is not a string.
        return !text.is_empty() && text.parse::<Datetime>().is_err();
    }
    if let [.., "keys", "disabled"] = path {
        // The same mistake, instead of `true` or `false`.
        return !text.is_empty() && text.parse::<bool>().is_err();
    }
    if let [.., "keys", "routes"] = path {
        // The same mistake, instead of a list.
        return true;
    }
    let misspelled = |key: &str| {
        key != "socket" && FUZZY_SECRET_WORDS.iter().any(|word| strsim::damerau_levenshtein(key, word) <= 2)
    };
    path.iter().enumerate().any(|(depth, key)| {
        // A top-level table `[api_key]` is not secret. The error about this unsupported table quotes its values.
        let is_table = depth == 0 && path.len() > 1 && *key == "api_key";
        // `credentials` in `cors` is a boolean, not a secret.
        let is_cors = depth > 0 && path[depth - 1] == "cors" && *key == "credentials";
        let is_named = depth > 0 && NAMED_TABLES.contains(&path[depth - 1]) && path.len() > depth + 1;
        !is_table && !is_named && !is_cors && (is_secret_name(key) || misspelled(key))
    })
}

/// Return whether the value at this path is the URL of a server.
fn has_url(path: &[&str]) -> bool {
    matches!(path, [.., "servers" | "url" | "jwks_url" | "trace_endpoint" | "directory"] | [.., "redirect", "to"])
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
            DeValue::Array(items) if matches!(path[..], [.., "keys", "routes"]) => {
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
        ] {
            assert_eq!(is_secret(path, text), expected, "{path:?} {text}");
        }
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
        let (one, other) = (hashed("planted"), hashed("other"));
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
