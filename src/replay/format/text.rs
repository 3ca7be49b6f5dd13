//! Fields of text lines: where they end, and what their escapes stand for.

use std::borrow::Cow;

/// The place of the next quote that no backslash stands before.
pub(super) fn closing_quote(text: &[u8]) -> Option<usize> {
    let mut from = 0;
    loop {
        let at = from + memchr::memchr2(b'"', b'\\', &text[from..])?;
        if text[at] == b'"' {
            return Some(at);
        }
        from = at + 2;
        if from > text.len() {
            return None;
        }
    }
}

/// What a field says: `\"`, `\\`, `\n`, `\t`, `\xHH` of nginx and Apache, `\uHHHH` of JSON.
pub(super) fn unescaped(text: &[u8]) -> Cow<'_, [u8]> {
    let Some(first) = memchr::memchr(b'\\', text) else { return Cow::Borrowed(text) };
    let mut out = text[..first].to_vec();
    let mut rest = &text[first..];
    while let Some((&byte, behind)) = rest.split_first() {
        rest = behind;
        if byte != b'\\' {
            out.push(byte);
            continue;
        }
        let Some((&kind, behind)) = rest.split_first() else {
            out.push(b'\\');
            break;
        };
        rest = behind;
        match kind {
            b'x' if hex(rest, 2).is_some() => {
                out.push(hex(rest, 2).unwrap_or_default() as u8);
                rest = &rest[2..];
            }
            b'u' if hex(rest, 4).is_some() => {
                let code = hex(rest, 4).and_then(char::from_u32).unwrap_or(char::REPLACEMENT_CHARACTER);
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

fn hex(text: &[u8], digits: usize) -> Option<u32> {
    let text = text.get(..digits)?;
    text.iter().try_fold(0, |number, digit| Some(number * 16 + char::from(*digit).to_digit(16)?))
}

/// A field that says something: `-` and nothing are nothing.
pub(super) fn said(text: &[u8]) -> Option<&[u8]> {
    (!text.is_empty() && text != b"-").then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_stand_for_bytes() {
        for (text, expected) in [
            (r"plain", "plain"),
            (r#"a \"b\" c"#, "a \"b\" c"),
            (r"\x22\x5Cx", "\"\\x"),
            (r"\u0041\u00e9", "A\u{e9}"),
            (r"a\\n\n\t", "a\\n\n\t"),
            (r"\xZZ", "xZZ"),
            (r"end\", "end\\"),
        ] {
            assert_eq!(unescaped(text.as_bytes()), expected.as_bytes(), "{text}");
        }
    }

    #[test]
    fn quotes_end_where_none_is_escaped() {
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
