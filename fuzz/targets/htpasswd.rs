//! An htpasswd file is accepted if each line is valid and each user occurs once. Errors contain the number of the line,
//! but no hash.

use std::collections::HashSet;

use sluicegate::identity::basic::{BasicLookup, BasicVerifier, Htpasswd};

pub(crate) fn run(data: &[u8]) {
    let mut users = HashSet::new();
    let mut fault = None;
    for (index, line) in data.split(|byte| *byte == b'\n').enumerate() {
        let alone = Htpasswd::parse(line);
        let is_user = alone.as_ref().is_ok_and(|users| !users.is_empty());
        if alone.is_err() || is_user && !users.insert(accepted_user(line)) {
            fault = Some((index + 1, line));
            break;
        }
    }
    match (Htpasswd::parse(data), fault) {
        (Ok(file), None) => {
            assert_eq!(file.is_empty(), users.is_empty());
            if file.is_empty() {
                return;
            }
            let verifier = BasicVerifier::new(file);
            assert_eq!(verifier.user_count(), users.len(), "{}", data.escape_ascii());
            // A lookup alone, which computes no hash, must not verify any credential.
            assert!(!matches!(verifier.lookup(data), Ok(BasicLookup::Verified(_))));
        }
        (Err(error), Some((number, line))) => {
            assert_eq!(error.line, number, "{}", data.escape_ascii());
            let said = format!("{error} {error:?} {}", error.hint("FILE"));
            let line = String::from_utf8_lossy(line);
            let (user, rest) = line.split_once(':').unwrap_or((&line, ""));
            let hash = rest.split(':').next().unwrap_or_default().trim();
            assert!(hash.len() < 16 || user.contains(hash) || !said.contains(hash), "{said}");
        }
        (parsed, fault) => panic!("{parsed:?} {fault:?} of {}", data.escape_ascii()),
    }
}

/// Return the user of an accepted line. The hash must have one of the documented forms.
fn accepted_user(line: &[u8]) -> &str {
    let line = std::str::from_utf8(line).expect("an accepted line is text").trim_end();
    let (user, rest) = line.split_once(':').expect("an accepted line has a colon");
    assert!(!user.is_empty() && !user.starts_with('#'), "{line:?}");
    let hash = rest.split(':').next().unwrap_or_default();
    let is_digit = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'/');
    let is_documented = match hash.strip_prefix("$apr1$").and_then(|rest| rest.split_once('$')) {
        Some((salt, digest)) => (1..=8).contains(&salt.len()) && digest.len() == 22 && digest.bytes().all(is_digit),
        None => {
            let cost = hash.get(4..6).and_then(|cost| cost.parse::<u32>().ok());
            let has_prefix = ["$2y$", "$2b$", "$2a$"].iter().any(|prefix| hash.starts_with(prefix));
            let salt_and_digest = hash.get(7..).unwrap_or_default();
            has_prefix
                && cost.is_some_and(|cost| (4..=16).contains(&cost))
                && hash.as_bytes().get(6) == Some(&b'$')
                && salt_and_digest.len() == 53
                && salt_and_digest.bytes().all(is_digit)
        }
    };
    assert!(is_documented, "{line:?} is accepted");
    user
}
