//! Numbers in sentences.

/// `1 key`, `2 keys`.
pub fn pluralize(number: u64, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}
