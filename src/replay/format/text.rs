//! Fields of text lines: where they end, and what their escapes stand for.

use std::borrow::Cow;

/// The place of the next quote that no backslash stands before.
pub(super) fn closing_quote(text: &[u8]) -> Option<usize> {
    let mut from = 0;
    loop {
        let position = from + memchr::memchr2(b'"', b'\\', &text[from..])?;
        if text[position] == b'"' {
            return Some(position);
        }
        from = position + 2;
        if from > text.len() {
            return None;
        }
    }
}

/// What a field says: `\"`, `\\`, `\n`, `\t`, `\xHH` of nginx and Apache, `\uHHHH` of JSON.
pub(super) fn unescape(text: &[u8]) -> Cow<'_, [u8]> {
    let Some(first) = memchr::memchr(b'\\', text) else { return Cow::Borrowed(text) };
    let mut out = text[..first].to_vec();
    let mut rest = &text[first..];
    while let Some((&byte, tail)) = rest.split_first() {
        rest = tail;
        if byte != b'\\' {
            out.push(byte);
            continue;
        }
        let Some((&kind, tail)) = rest.split_first() else {
            out.push(b'\\');
            break;
        };
        rest = tail;
        match kind {
            b'x' if parse_hex(rest, 2).is_some() => {
                out.push(parse_hex(rest, 2).unwrap_or_default() as u8);
                rest = &rest[2..];
            }
            b'u' if parse_hex(rest, 4).is_some() => {
                let code = parse_hex(rest, 4).and_then(char::from_u32).unwrap_or(char::REPLACEMENT_CHARACTER);
                out.extend_from_slice(code.encode_utf8(&mut [0; 4]).as_bytes());
                rest = &rest[4..];
            }
            b'n' => out.push(b'\n'),
            b't' => out.push(b'\t'),
            b'r' => out.push(b'\r'),
            other => out.push(other),
        }
    }
    Cow::Owned(out)
}

fn parse_hex(text: &[u8], digits: usize) -> Option<u32> {
    let text = text.get(..digits)?;
    text.iter().try_fold(0, |number, digit| Some(number * 16 + char::from(*digit).to_digit(16)?))
}

/// A field that says something: `-` and nothing are nothing.
pub(super) fn non_empty(text: &[u8]) -> Option<&[u8]> {
    (!text.is_empty() && text != b"-").then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unescape_decodes_escapes() {
        for (text, expected) in [
            (r"plain", "plain"),
            (r#"a \"b\" c"#, "a \"b\" c"),
            (r"\x22\x5Cx", "\"\\x"),
            (r"\u0041\u00e9", "A\u{e9}"),
            (r"a\\n\n\t", "a\\n\n\t"),
            (r"\xZZ", "xZZ"),
            (r"end\", "end\\"),
        ] {
            assert_eq!(unescape(text.as_bytes()), expected.as_bytes(), "{text}");
        }
    }

    #[test]
    fn closing_quote_skips_escaped_quotes() {
        for (text, expected) in [
            (r#"abc" d"#, Some(3)),
            (r#"a\"b" d"#, Some(4)),
            (r#"a\\" d"#, Some(3)),
            (r#"abc"#, None),
            (r#"abc\"#, None),
            (r#"abc\""#, None),
        ] {
            assert_eq!(closing_quote(text.as_bytes()), expected, "{text}");
        }
    }
}
