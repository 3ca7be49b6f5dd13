//! The text of a configuration as it may be shown: reports of errors end up in logs.

/// Keys whose values nobody is to see.
const SECRETS: [&str; 3] = ["token", "secret", "password"];

/// The same text with asterisks for what is secret in it; every byte keeps its place.
pub(super) fn masked(text: &str) -> String {
    text.split_inclusive('\n').map(line).collect()
}

fn line(line: &str) -> String {
    let key = line.split('=').next().unwrap_or_default();
    let is_secret = |word: &str| {
        let word = word.trim_matches(['"', '\'']);
        SECRETS.iter().any(|secret| word.contains(secret) || strsim::damerau_levenshtein(word, secret) <= 2)
    };
    if key.len() < line.len() && key.split(|sign: char| sign.is_whitespace() || ".{,".contains(sign)).any(is_secret) {
        return hide(line, key.len(), line.len());
    }
    let mut shown = line.to_owned();
    // Whatever stands before the last @ of a URL: a password may have any sign in it, above all where that is the fault.
    for (scheme, _) in line.match_indices("://") {
        let from = scheme + "://".len();
        let end = line[from..].find(['"', '\'', '\n']).map_or(line.len(), |end| from + end);
        if let Some(at) = line[from..end].rfind('@') {
            shown = hide(&shown, from, from + at);
        }
    }
    for (name, _) in line.match_indices("password=") {
        let from = name + "password=".len();
        let end = line[from..].find(['"', '\'', '&', '\n']).map_or(line.len(), |end| from + end);
        shown = hide(&shown, from, end);
    }
    shown
}

/// With asterisks for letters and digits; names of environment variables are no secrets.
fn hide(line: &str, from: usize, to: usize) -> String {
    let (before, rest) = line.split_at(from);
    let (secret, after) = rest.split_at(to - from);
    let (mut hidden, mut rest) = (String::with_capacity(line.len()), secret);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_hidden_and_the_rest_is_as_it_was() {
        for (text, shown) in [
            ("secret = \"s3cret\"\n", "secret = \"******\"\n"),
            ("sekret = \"pässe\"", "sekret = \"******\""),
            ("token = [\"abc\"]", "token = [\"***\"]"),
            ("admin.token = 'a b'\n", "admin.token = '* *'\n"),
            ("secret = \"${NAME}\"", "secret = \"${NAME}\""),
            ("secret = \"a${NAME:-dflt}b\"", "secret = \"*${NAME******}*\""),
            ("url = \"redis://me:p/a@ss@host:1/0\"", "url = \"redis://*********@host:1/0\""),
            (
                "url = \"redis+sentinel://a,b/m?sentinel_password=abc&db=1\"",
                "url = \"redis+sentinel://a,b/m?sentinel_password=***&db=1\"",
            ),
            ("servers = [\"http://a:1\", \"http://u:p@b:1\"]", "servers = [\"http://a:1\", \"http://***@b:1\"]"),
            ("name = \"search\"\npath = \"/token\"\n", "name = \"search\"\npath = \"/token\"\n"),
            ("[limit.tokens]\nquota = \"1/s\"\n", "[limit.tokens]\nquota = \"1/s\"\n"),
        ] {
            assert_eq!(masked(text), shown);
            assert_eq!(masked(text).len(), text.len(), "places stay what they were");
        }
    }
}
