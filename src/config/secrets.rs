//! Detection of secrets in a configuration, with one list of names for error reports, the log and `/api/config`.

use std::ops::Range;

use toml::value::Datetime;

/// Placeholder for a secret.
pub(super) const MASK: &str = "***";

/// Parts of the names of keys, headers and query parameters whose values are secrets. `-` and `_` are equal in these
/// names.
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

/// Names of keys whose misspellings also count as secrets. `socket` is the name of another key.
const FUZZY_SECRET_WORDS: [&str; 3] = ["token", "secret", "password"];

/// Keys that change headers. A header may contain a credential whatever its name is.
const HEADER_RULE_KEYS: [&str; 2] = ["request_headers", "response_headers"];

/// Tables whose keys are names that the administrator chooses.
const NAMED_TABLES: [&str; 5] = ["auth", "limit", "upstream", "tiers", "notify"];

/// Keys of `[auth.NAME]` that are not secret, regardless of their names and of the names below them.
const PUBLIC_AUTH_KEYS: [&str; 5] = ["forward_credential", "claims", "request_headers", "response_headers", "cache"];

/// Keys in `cost` of a limit that counts the tokens of an LLM API.
const PUBLIC_COST_KEYS: [&str; 3] = ["bytes_per_token", "image_tokens", "audio_tokens"];

/// Query parameters of store URLs that are not secret.
const PUBLIC_QUERY_PARAMETERS: [&str; 2] = ["db", "protocol"];

/// Return whether a key with this name has a secret as its value.
pub(super) fn is_secret_name(name: &str) -> bool {
    let name = name.to_ascii_lowercase().replace('-', "_");
    SECRET_WORDS.iter().any(|word| name.contains(word))
}

/// Return whether the whole value is a secret. `path` contains the keys that lead to the value; items of a list have
/// the keys of the list.
pub(super) fn is_secret(path: &[&str], text: &str) -> bool {
    if let ["auth", _, key, ..] = path
        && PUBLIC_AUTH_KEYS.contains(key)
    {
        return false;
    }
    if let ["limit", _, "cost", "models", ..] = path {
        // The keys of `models` are names of models, which are not secret.
        return false;
    }
    if let ["notify", _, "webhook"] = path {
        // The URL of a webhook is secret as a whole, because many webhooks have a secret in the path.
        return true;
    }
    if let ["limit", _, "cost", key] = path
        && PUBLIC_COST_KEYS.contains(key)
    {
        return false;
    }
    if path.contains(&HEADER_RULE_KEYS[0]) || path.contains(&HEADER_RULE_KEYS[1]) {
        // Header names in `remove` are not secret. Values in other positions may be secret.
        return path.last() != Some(&"remove");
    }
    if let [.., "keys"] | [.., "keys", "hash"] = path {
        // The value may be an API key that was pasted instead of its hash.
        return !text.starts_with("sha256:");
    }
    if let [.., "keys", "created" | "expires"] = path {
        // The value may be an API key that was pasted instead of a time. A value that is not a string has no text.
        return !text.is_empty() && text.parse::<Datetime>().is_err();
    }
    let misspelled = |key: &str| {
        key != "socket" && FUZZY_SECRET_WORDS.iter().any(|word| strsim::damerau_levenshtein(key, word) <= 2)
    };
    path.iter().enumerate().any(|(depth, key)| {
        // The former table `[api_key]` is not secret, because the error about it quotes its values.
        let is_table = depth == 0 && path.len() > 1 && *key == "api_key";
        // `credentials` in `cors` is a boolean, not a secret.
        let is_cors = depth > 0 && path[depth - 1] == "cors" && *key == "credentials";
        let is_named = depth > 0 && NAMED_TABLES.contains(&path[depth - 1]) && path.len() > depth + 1;
        !is_table && !is_named && !is_cors && (is_secret_name(key) || misspelled(key))
    })
}

/// Return the byte ranges of secrets in any text: the credentials of a URL, and query parameters.
pub(super) fn secret_ranges(text: &str) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let scheme = text.find("://").map(|at| at + "://".len());
    // The credentials are everything before the last `@`: a password may contain any character, especially if the
    // unescaped character is the error.
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

/// Return the text with its secret parts masked.
pub(super) fn redact(text: &str) -> String {
    let mut text_without_secrets = text.to_owned();
    for part in secret_ranges(text).into_iter().rev() {
        text_without_secrets.replace_range(part, MASK);
    }
    text_without_secrets
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
}
