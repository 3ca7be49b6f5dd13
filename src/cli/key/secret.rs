//! Keys: random, with a prefix that says what they are and a checksum that tells them from chance.
//!
//! The form is that of GitHub's tokens: the prefix, 30 random characters of base 62, and 6 with the CRC-32 of all before them. So who looks
//! for leaked keys finds `sg_live_[0-9A-Za-z]{36}`, and knows without asking anybody whether it is one.

use std::fmt;

use anyhow::{anyhow, bail};
use aws_lc_rs::digest::{SHA256, digest};
use aws_lc_rs::rand::{SecureRandom, SystemRandom};

use crate::identity::api_key::KeyHash;

const BASE62_DIGITS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/// 178 bits.
const RANDOM_CHARS: usize = 30;

/// 62^6 is more than 2^32.
const CHECKSUM_CHARS: usize = 6;

/// What our own keys begin with, whatever comes then.
const GATEWAY_KEY_PREFIX: &str = "sg_";

/// What a key begins with.
#[derive(Debug, Clone)]
pub(in crate::cli) struct KeyPrefix(String);

/// A key.
pub(super) struct Secret(String);

impl KeyPrefix {
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
        match text.bytes().all(is_allowed) && text.ends_with('_') && text.len() <= 32 {
            true => Ok(KeyPrefix(text.to_owned())),
            false => Err("lower-case letters, digits and _, with a _ at the end, such as acme_test_".to_owned()),
        }
    }
}

impl Secret {
    /// A new one.
    pub(super) fn generate(KeyPrefix(prefix): &KeyPrefix) -> anyhow::Result<Self> {
        let mut text = prefix.clone();
        let random = SystemRandom::new();
        while text.len() < prefix.len() + RANDOM_CHARS {
            let mut byte = [0];
            random.fill(&mut byte).map_err(|_| anyhow!("the system gives no random numbers"))?;
            // 248 is four times 62: each character is as likely as the others.
            if byte[0] < 248 {
                text.push(char::from(BASE62_DIGITS[usize::from(byte[0]) % BASE62_DIGITS.len()]));
            }
        }
        let sum = checksum(&text);
        Ok(Secret(text + &sum))
    }

    /// Any key; one of ours that was cut or mistyped is refused.
    pub(super) fn parse(text: &str) -> anyhow::Result<Self> {
        if text.is_empty() {
            bail!("there is no key on standard input: printf %s KEY | sluicegate key …");
        }
        if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            bail!("a key stands in a header field: it has no spaces, and letters of ASCII only");
        }
        let (body, found_checksum) = text.split_at(text.len().saturating_sub(CHECKSUM_CHARS));
        if text.starts_with(GATEWAY_KEY_PREFIX) && checksum(body) != found_checksum {
            bail!("the checksum of this key is wrong: a character is missing, or another one");
        }
        Ok(Secret(text.to_owned()))
    }

    pub(super) fn hash(&self) -> KeyHash {
        let mut hash = KeyHash::default();
        hash.copy_from_slice(digest(&SHA256, self.0.as_bytes()).as_ref());
        hash
    }
}

impl fmt::Display for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The CRC-32 of a text in base 62, the highest digit first.
fn checksum(text: &str) -> String {
    let crc = crc32(text.as_bytes());
    let digit = |position: usize| BASE62_DIGITS[(u64::from(crc) / 62_u64.pow(position as u32) % 62) as usize];
    (0..CHECKSUM_CHARS).rev().map(|position| char::from(digit(position))).collect()
}

/// That of IEEE 802.3, zip and zlib.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes
        .iter()
        .fold(u32::MAX, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), |crc, _| crc >> 1 ^ (0xEDB8_8320 * (crc & 1))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_keys_are_random_and_have_a_checksum() {
        assert_eq!(crc32(b"123456789"), 0xCBF4_3926);
        let prefix = KeyPrefix::parse("sg_test_").unwrap();
        let keys: std::collections::HashSet<_> =
            (0..1000).map(|_| Secret::generate(&prefix).unwrap().to_string()).collect();
        assert_eq!(keys.len(), 1000);
        // Each of the 62 characters is there, about as often as the others.
        let count = |digit: &u8| keys.iter().flat_map(|key| key[8..38].bytes()).filter(|byte| byte == digit).count();
        assert!(BASE62_DIGITS.iter().map(count).all(|count| (300..700).contains(&count)));
        for key in &keys {
            assert!(Secret::parse(key).is_ok() && key.len() == 44, "{key}");
            assert!(Secret::parse(&key[..43]).is_err(), "{key} without its end");
            let mut other = key.clone();
            other.replace_range(20..21, if &key[20..21] == "x" { "y" } else { "x" });
            assert!(Secret::parse(&other).is_err(), "{other} instead of {key}");
        }
        assert!(Secret::parse("demo-key").is_ok(), "keys that others made have no checksum of ours");
        assert!(
            KeyPrefix::parse("sg-live").is_err() && KeyPrefix::parse("SG_").is_err() && KeyPrefix::parse("sg").is_err()
        );
    }
}
