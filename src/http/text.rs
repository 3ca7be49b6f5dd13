//! Text from clients in logs and on terminals: characters that change how the rest of a line is shown.

/// Return whether a terminal, an editor or a log viewer may show other text because of this character: a C1 control
/// character, a line or paragraph separator, a direction mark (<https://trojansource.codes/>), or a character without
/// width.
pub fn is_deceptive(c: char) -> bool {
    matches!(
        c,
        '\u{80}'..='\u{9f}'
            | '\u{ad}'
            | '\u{61c}'
            | '\u{180e}'
            | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}'
            | '\u{feff}'
            | '\u{fff9}'..='\u{fffb}'
            | '\u{e0000}'..='\u{e007f}'
    )
}

/// How to write a deceptive character.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Escape {
    /// `\u202E`, inside of a JSON string.
    Json,
    /// `%E2%80%AE`, as in a URL.
    Percent,
    /// `\u{202e}`, as in Rust.
    Braces,
}

impl Escape {
    fn append(self, c: char, out: &mut Vec<u8>) {
        match self {
            Escape::Json => {
                let units = c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")).collect::<String>();
                out.extend_from_slice(units.as_bytes());
            }
            Escape::Percent => {
                let bytes = c.encode_utf8(&mut [0; 4]).bytes().map(|byte| format!("%{byte:02X}")).collect::<String>();
                out.extend_from_slice(bytes.as_bytes());
            }
            Escape::Braces => out.extend_from_slice(c.escape_unicode().to_string().as_bytes()),
        }
    }
}

/// Escape the deceptive characters of a line from the byte `from` on. Lines in ASCII, which are usual, cost one pass.
pub fn escape_deceptive(line: &mut Vec<u8>, from: usize, escape: Escape) {
    let added = &line[from..];
    if added.is_ascii() {
        return;
    }
    // The writers of lines receive only texts, so the line is valid UTF-8.
    let Some(text) = str::from_utf8(added).ok().filter(|text| text.contains(is_deceptive)) else { return };
    let mut escaped = Vec::with_capacity(added.len() + 32);
    for c in text.chars() {
        if is_deceptive(c) {
            escape.append(c, &mut escaped);
        } else {
            escaped.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
        }
    }
    line.truncate(from);
    line.extend_from_slice(&escaped);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deceptive_characters_are_escaped_in_each_form() {
        for (text, json, percent, braces) in [
            ("/a b", "/a b", "/a b", "/a b"),
            ("/é\u{65e5}😀", "/é\u{65e5}😀", "/é\u{65e5}😀", "/é\u{65e5}😀"),
            ("/\u{85}x", "/\\u0085x", "/%C2%85x", "/\\u{85}x"),
            ("/é\u{202e}", "/é\\u202e", "/é%E2%80%AE", "/é\\u{202e}"),
            ("\u{2028}\u{feff}", "\\u2028\\ufeff", "%E2%80%A8%EF%BB%BF", "\\u{2028}\\u{feff}"),
            ("\u{e0041}", "\\udb40\\udc41", "%F3%A0%81%81", "\\u{e0041}"),
        ] {
            for (escape, expected) in [(Escape::Json, json), (Escape::Percent, percent), (Escape::Braces, braces)] {
                let mut line = "\u{202e}".as_bytes().to_vec();
                line.extend_from_slice(text.as_bytes());
                escape_deceptive(&mut line, 3, escape);
                assert_eq!(String::from_utf8(line).unwrap(), format!("\u{202e}{expected}"));
            }
            assert_eq!(serde_json::from_str::<String>(&format!("\"{json}\"")).unwrap(), text);
        }
    }
}
