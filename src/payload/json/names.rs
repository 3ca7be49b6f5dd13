//! Finds the known names that a member name of a JSON object equals except for case, in a time that does not depend on
//! the number of names.

/// Maximum number of names of an index.
const MAX_NAMES: usize = 64;

/// An index of at most 64 names. Names are identified by their number.
#[derive(Debug)]
pub struct NameIndex {
    /// The folded names.
    folded: Vec<Box<[u8]>>,
    /// For each [hash](hash) of a folded name, the bit set of the names with this hash.
    by_hash: [u64; MAX_NAMES],
    /// Length of the longest folded name in bytes.
    longest: usize,
    /// Whether all folded names are ASCII.
    is_ascii: bool,
    /// A character that is ignored in comparisons.
    ignored: Option<char>,
}

impl NameIndex {
    /// Create an index of these names. A name that is `None` is never found, but has a number. The character `ignored`
    /// is ignored in comparisons.
    pub fn new<'n>(names: impl Iterator<Item = Option<&'n str>>, ignored: Option<char>) -> Self {
        let mut index = NameIndex { folded: Vec::new(), by_hash: [0; MAX_NAMES], longest: 0, is_ascii: true, ignored };
        for (number, name) in names.take(MAX_NAMES).enumerate() {
            let mut folded = Vec::new();
            let kept = name.unwrap_or_default().chars().filter(|character| Some(*character) != ignored);
            kept.for_each(|character| fold(character, &mut folded));
            if name.is_some() {
                index.by_hash[hash(&folded)] |= 1 << number;
                index.longest = index.longest.max(folded.len());
                index.is_ascii &= folded.is_ascii();
            }
            index.folded.push(folded.into());
        }
        index
    }

    /// Return the names in the bit set `among` that equal `key` except for case. `buffer` is only memory for the
    /// function.
    pub fn similar(&self, among: u64, key: &str, buffer: &mut Vec<u8>) -> u64 {
        let has_ignored = || self.ignored.is_some_and(|ignored| key.contains(ignored));
        let is_plain = key.is_ascii() && !has_ignored();
        let key = match is_plain {
            true if key.len() > self.longest => return 0,
            true => key.as_bytes(),
            false => match self.fold(key, buffer) {
                Some(folded) => folded,
                None => return 0,
            },
        };
        let candidates = among & self.by_hash[hash(key)];
        let is_similar = |number: &usize| self.folded[*number].eq_ignore_ascii_case(key);
        bits(candidates).filter(is_similar).fold(0, |found, number| found | 1 << number)
    }

    /// Fold a key. Return `None` as soon as it certainly equals no name.
    fn fold<'b>(&self, key: &str, buffer: &'b mut Vec<u8>) -> Option<&'b [u8]> {
        buffer.clear();
        for character in key.chars().filter(|character| Some(*character) != self.ignored) {
            match ascii_fold(character) {
                Some(folded) => buffer.extend_from_slice(folded),
                // The tables of std take too much time for a key in which each character is looked up.
                None if !character.is_ascii() && self.is_ascii => return None,
                None => fold(character, buffer),
            }
            if buffer.len() > self.longest {
                return None;
            }
        }
        Some(buffer)
    }
}

/// Return the indices of the bits that are set.
pub fn bits(mut set: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let index = (set != 0).then(|| set.trailing_zeros() as usize)?;
        set &= set - 1;
        Some(index)
    })
}

/// Return a hash below 64 of a name. ASCII letters that differ only in case have the same hash.
fn hash(name: &[u8]) -> usize {
    let at = |byte: Option<&u8>| usize::from(byte.copied().unwrap_or_default().to_ascii_lowercase());
    (name.len() * 13 + at(name.first()) * 5 + at(name.last())) % MAX_NAMES
}

/// Append a character with its case folded. As in Unicode, `ſ` becomes `s`, and the Kelvin sign becomes `k`, because
/// some servers fold case in this way.
fn fold(character: char, text: &mut Vec<u8>) {
    if character.is_ascii() {
        text.push((character as u8).to_ascii_lowercase());
        return;
    }
    for folded in character.to_uppercase().flat_map(char::to_lowercase) {
        text.extend_from_slice(folded.encode_utf8(&mut [0; 4]).as_bytes());
    }
}

/// Return the folded form of a character that is not ASCII, if this form is ASCII.
fn ascii_fold(character: char) -> Option<&'static [u8]> {
    Some(match character {
        'ß' => b"ss",
        'ı' => b"i",
        'ſ' => b"s",
        '\u{212a}' => b"k",
        'ﬀ' => b"ff",
        'ﬁ' => b"fi",
        'ﬂ' => b"fl",
        'ﬃ' => b"ffi",
        'ﬄ' => b"ffl",
        'ﬅ' | 'ﬆ' => b"st",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn characters_with_an_ascii_form_are_those_of_unicode() {
        for character in ('\0'..=char::MAX).filter(|character| !character.is_ascii()) {
            let mut folded = Vec::new();
            fold(character, &mut folded);
            let expected = folded.is_ascii().then_some(&*folded);
            assert_eq!(ascii_fold(character), expected, "{character:?}");
        }
    }

    fn folded(text: &str) -> String {
        text.chars().flat_map(char::to_uppercase).flat_map(char::to_lowercase).filter(|c| *c != '_').collect()
    }

    #[test]
    fn name_is_found_in_every_spelling() {
        let names = ["model", "max_tokens", "stream", "straße", "É", "", "k"];
        let index = NameIndex::new(names.into_iter().map(Some), Some('_'));
        for (key, expected) in [
            ("model", 0b1),
            ("mOdEL", 0b1),
            ("__model_", 0b1),
            ("models", 0),
            ("maxTokens", 0b10),
            ("max_to\u{212a}en\u{17f}", 0b10),
            ("\u{17f}tream", 0b100),
            ("STRASSE", 0b1000),
            ("stra\u{1e9e}e", 0),
            ("é", 0b1_0000),
            ("_", 0b10_0000),
            ("\u{212a}", 0b100_0000),
        ] {
            let mut buffer = Vec::new();
            assert_eq!(index.similar(u64::MAX, key, &mut buffer), expected, "{key}");
            assert_eq!(index.similar(!expected, key, &mut buffer), 0, "{key}");
        }
    }

    proptest! {
        /// The index finds exactly the names whose folded form is equal.
        #[test]
        fn similar_names_are_those_with_the_same_folded_form(
            names in proptest::collection::vec("[aAbsSkK_ſK\u{df}é]{0,3}", 1..64),
            keys in proptest::collection::vec("[aAbsSkK_ſK\u{df}éÉ]{0,4}", 1..20),
        ) {
            let index = NameIndex::new(names.iter().map(|name| Some(&**name)), Some('_'));
            for key in keys {
                let similar = |name: &String| folded(name) == folded(&key);
                let expected: u64 = names.iter().enumerate().map(|(number, name)| u64::from(similar(name)) << number).sum();
                prop_assert_eq!(index.similar(u64::MAX, &key, &mut Vec::new()), expected, "{}", key);
            }
        }
    }
}
