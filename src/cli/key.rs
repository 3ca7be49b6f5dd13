//! `sluicegate key`: generates API keys and manages their hashes in the consumers file.

mod consumers_file;

use std::fmt;
use std::io::{BufRead, IsTerminal, Write, stderr, stdin, stdout};
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, anyhow, bail};
use aws_lc_rs::digest::{SHA256, digest};
use aws_lc_rs::rand::{SecureRandom, SystemRandom};
use clap::{Args, Subcommand};
use data_encoding::HEXLOWER;
use jiff::Timestamp;
use toml_edit::Datetime;

use crate::cli::key::consumers_file::{ConsumerRow, ConsumersDoc, ConsumersFile, KeyDetails, KeyRow};
use crate::clock;
use crate::config::file::config_option;
use crate::config::shorthand::datetime_us;
use crate::identity::consumer::KeyHash;
use crate::limiter::quota::parse_duration_us;

/// Number of hex digits in a fingerprint. A fingerprint consists of the first digits of a key's hash.
const FINGERPRINT_DIGITS: usize = 12;

/// Minimum number of hex digits in a fingerprint argument. A shorter argument could select a key by mistake.
const MIN_FINGERPRINT_DIGITS: usize = 6;

/// The label of a new key, on standard error.
const SHOWN_ONCE: &str = "The key is shown only once:";

/// Create, list, disable and revoke API keys
#[derive(Debug, Args)]
#[command(after_help = examples![
    "sluicegate key new --consumer acme > key.txt",
    "sluicegate key list",
    "sluicegate key revoke < key.txt",
])]
pub(super) struct Arguments {
    /// Use the consumers file of the provider `[auth.NAME]`; required if the configuration names several consumers
    /// files
    #[arg(long, value_name = "NAME", global = true)]
    auth: Option<String>,
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
pub(super) enum Action {
    /// Create a key, print it once, and add its hash to the consumers file
    ///
    /// Without --consumer, the command changes no file. It prints the key to standard output and the hash to standard
    /// error.
    #[command(after_help = examples![
        "sluicegate key new",
        "sluicegate key new --consumer acme > key.txt",
        "sluicegate key new --consumer globex --create --tier pro",
        "sluicegate key new --consumer acme --name ci --expires 90d",
    ])]
    New {
        /// Add the key to this consumer
        #[arg(long, value_name = "NAME")]
        consumer: Option<String>,
        /// Add the consumer to the file; the command fails if the consumer exists already
        #[arg(long, requires = "consumer")]
        create: bool,
        /// Set the tier of the new consumer
        #[arg(long, requires = "create")]
        tier: Option<String>,
        /// Give the key this name, which `key list` and the log show
        #[arg(long, requires = "consumer")]
        name: Option<String>,
        /// Reject the key after this time: a duration such as 90d, a date such as 2027-01-31, or a time such as
        /// 2027-01-31T12:00:00Z
        #[arg(long, value_name = "TIME", requires = "consumer", value_parser = parse_expiry)]
        expires: Option<Datetime>,
        /// Make the key valid only for this route; may be repeated to name several routes
        #[arg(long, value_name = "ROUTE", requires = "consumer")]
        route: Vec<String>,
        /// Begin the key with this prefix, which consists of lower-case letters, digits and _ and ends with _
        #[arg(long, default_value = "sg_live_", value_parser = KeyPrefix::parse)]
        prefix: KeyPrefix,
    },
    /// Read a key from standard input and print its hash
    ///
    /// The key is not an argument, because all users of the machine can see the arguments of commands, and shells store
    /// them in their history.
    #[command(after_help = examples![
        "sluicegate key hash < key.txt",
        "printf %s \"$KEY\" | sluicegate key hash",
    ])]
    Hash,
    /// List the consumers and the fingerprints of their keys
    #[command(after_help = examples![
        "sluicegate key list",
        "sluicegate key list --config gateway.toml | grep acme",
        "sluicegate key list --json",
    ])]
    List {
        /// Print a JSON list
        #[arg(long)]
        json: bool,
    },
    /// Disable a key, so that requests with it get 401
    ///
    /// Select the key by its fingerprint. Without a fingerprint, the command reads the key from standard input.
    #[command(after_help = examples![
        "sluicegate key disable 2f9c41d07ab3",
        "sluicegate key disable 2f9c41d07ab3 --config gateway.toml",
    ])]
    Disable {
        /// Disable the key whose hash begins with these digits, which `key list` shows
        fingerprint: Option<String>,
    },
    /// Enable a disabled key
    ///
    /// Select the key by its fingerprint. Without a fingerprint, the command reads the key from standard input.
    #[command(after_help = examples![
        "sluicegate key enable 2f9c41d07ab3",
        "sluicegate key enable 2f9c41d07ab3 --config gateway.toml",
    ])]
    Enable {
        /// Enable the key whose hash begins with these digits, which `key list` shows
        fingerprint: Option<String>,
    },
    /// Remove a key from the consumers file
    ///
    /// Select the key by its fingerprint. Without a fingerprint, the command reads the key from standard input.
    #[command(after_help = examples![
        "sluicegate key revoke 2f9c41d07ab3",
        "sluicegate key revoke < key.txt",
    ])]
    Revoke {
        /// Remove the key whose hash begins with these digits, which `key list` shows
        fingerprint: Option<String>,
    },
}

/// Run `sluicegate key ACTION`. `provider` is the NAME of the table `[auth.NAME]` whose consumers file is used.
/// `provider` may be `None` if the configuration names only one consumers file.
pub(super) fn run(arguments: &Arguments, config_path: &Path) -> anyhow::Result<ExitCode> {
    let provider = arguments.auth.as_deref();
    let action = &arguments.action;
    let open = || ConsumersFile::open(config_path, provider);
    match action {
        Action::New { consumer: None, prefix, .. } => {
            let secret = Secret::generate(prefix)?;
            writeln!(
                stderr(),
                "The hash of the key, for a consumer in the consumers file:\nkeys = [\"{}\"]\n{SHOWN_ONCE}",
                format_hash(&secret.hash())
            )?;
            writeln!(stdout(), "{secret}")?;
        }
        Action::New { consumer: Some(consumer), create, tier, prefix, name, expires, route } => {
            let secret = Secret::generate(prefix)?;
            let mut file = open()?;
            let mut document = file.document()?;
            if *create {
                document.add_consumer(consumer, tier.as_deref())?;
            }
            let name = name.clone();
            let created = seconds_from_now(0);
            let details = KeyDetails { name, created, expires: *expires, routes: route.clone() };
            document.add_key(consumer, &format_hash(&secret.hash()), details)?;
            file.replace(&document)?;
            let path = file.path().display();
            writeln!(stderr(), "{path}: added the key {} to `{consumer}`. {SHOWN_ONCE}", fingerprint(&secret.hash()))?;
            writeln!(stdout(), "{secret}")?;
            let tiers = file.tiers();
            if *create && tier.is_none() && !tiers.is_empty() {
                let tiers = tiers.into_iter().collect::<Vec<_>>().join(", ");
                writeln!(
                    stderr(),
                    "`{consumer}` has no tier, so the default quotas apply. To choose a tier, set `tier` of the \
                     consumer in {path}: {tiers}"
                )?;
            }
        }
        Action::Hash => writeln!(stdout(), "{}", format_hash(&read_secret()?.hash()))?,
        Action::List { json: true } => {
            writeln!(stdout(), "{}", serde_json::to_string_pretty(&open()?.document()?.rows())?)?;
        }
        Action::List { json: false } => print_list(&open()?.document()?)?,
        Action::Disable { fingerprint } | Action::Enable { fingerprint } | Action::Revoke { fingerprint } => {
            let digits = match fingerprint {
                Some(text) => parse_fingerprint(text, config_path)?,
                None => HEXLOWER.encode(&read_secret()?.hash()),
            };
            let mut file = open()?;
            let mut document = file.document()?;
            let key = document.find_key(&digits)?;
            let verb = match action {
                Action::Disable { .. } => {
                    document.set_disabled(&key, true);
                    "disabled"
                }
                Action::Enable { .. } => {
                    document.set_disabled(&key, false);
                    "enabled"
                }
                _ => {
                    document.revoke_key(&key);
                    "removed"
                }
            };
            file.replace(&document)?;
            let short = key.hash.get(..FINGERPRINT_DIGITS).unwrap_or(&key.hash);
            writeln!(stderr(), "{}: {verb} the key {short} of `{}`", file.path().display(), key.consumer)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Return the UTC time `seconds` from now.
fn seconds_from_now(seconds: u64) -> Option<Datetime> {
    let seconds = clock::unix_us() / 1_000_000 + seconds;
    Timestamp::from_second(i64::try_from(seconds).ok()?).ok()?.to_string().parse().ok()
}

/// Parse the value of `--expires`: a duration from now, or a time in the future.
fn parse_expiry(text: &str) -> Result<Datetime, String> {
    if let Some(us) = parse_duration_us(text) {
        return seconds_from_now(us.div_ceil(1_000_000)).ok_or_else(|| "the time is too far in the future".to_owned());
    }
    let time = text.parse::<Datetime>().ok();
    match time.and_then(|time| Some((time, datetime_us(&time)?))) {
        Some((time, us)) if us > clock::unix_us() => Ok(time),
        Some(_) => Err("the time is in the past".to_owned()),
        None => {
            Err("write a duration (90d), a date (2027-01-31) or a time with a UTC offset (2027-01-31T12:00:00Z)"
                .to_owned())
        }
    }
}

/// Read the key from standard input.
fn read_secret() -> anyhow::Result<Secret> {
    if stdin().is_terminal() {
        write!(stderr(), "key: ")?;
    }
    let mut line = String::new();
    stdin().lock().read_line(&mut line).context("standard input cannot be read")?;
    Secret::parse(line.trim_end_matches(['\r', '\n']))
}

/// Validate a fingerprint argument and return its hex digits in lower case.
fn parse_fingerprint(text: &str, config_path: &Path) -> anyhow::Result<String> {
    let digits = text.strip_prefix("sha256:").unwrap_or(text).to_ascii_lowercase();
    if !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) || digits.len() > 64 {
        // Do not print the argument: it may be a key instead of a fingerprint.
        bail!(
            "this is not a fingerprint: a fingerprint consists of hex digits\n  `sluicegate key list{}` shows the \
             fingerprints; pass a key on standard input, because all users of this machine can see arguments",
            config_option(config_path)
        );
    }
    if digits.len() < MIN_FINGERPRINT_DIGITS {
        bail!("the fingerprint `{digits}` is too short: give at least {MIN_FINGERPRINT_DIGITS} digits");
    }
    Ok(digits)
}

fn print_list(document: &ConsumersDoc) -> anyhow::Result<()> {
    let consumers = document.rows();
    let has_details =
        |key: &KeyRow| key.name.is_some() || key.expires.is_some() || key.routes.is_some() || key.status != "active";
    let is_detailed = consumers.iter().flat_map(|row| &row.keys).any(has_details);
    let mut lines = vec![["consumer", "tier", "keys", "name", "status", "expires", "routes"].map(str::to_owned)];
    for ConsumerRow { name, tier, keys } in &consumers {
        let line = |details: [String; 5]| {
            let [key, key_name, status, expires, routes] = details;
            [name.clone(), tier.clone().unwrap_or_default(), key, key_name, status, expires, routes]
        };
        // Print the consumer on the line of each key, so that `grep` and `awk` can select the keys of a consumer.
        lines.extend(keys.iter().map(|key| {
            line([
                key.fingerprint.clone(),
                key.name.clone().unwrap_or_default(),
                key.status.to_owned(),
                key.expires.clone().unwrap_or_default(),
                key.routes.as_ref().map_or_else(String::new, |routes| routes.join(",")),
            ])
        }));
        if keys.is_empty() {
            lines.push(line(["none", "", "", "", ""].map(str::to_owned)));
        }
    }
    let columns = if is_detailed { 7 } else { 3 };
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<_> = (0..columns).map(width).collect();
    let mut out = stdout().lock();
    for line in &lines {
        let cells = line.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        writeln!(out, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
    }
    Ok(())
}

fn format_hash(hash: &KeyHash) -> String {
    format!("sha256:{}", HEXLOWER.encode(hash))
}

fn fingerprint(hash: &KeyHash) -> String {
    HEXLOWER.encode(&hash[..FINGERPRINT_DIGITS / 2])
}

// Format of keys: a prefix, random characters and a checksum.
//
// The format is the same as for GitHub tokens: the prefix, 30 random base-62 characters, and 6 characters with the
// CRC-32 of all characters before them. Secret scanners can find keys with the pattern `sg_live_[0-9A-Za-z]{36}`, and
// verify the checksum of a match offline.

const BASE62_DIGITS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/// Number of random characters in a key. Together, they have 178 bits of entropy.
const RANDOM_CHARS: usize = 30;

/// Number of checksum characters in a key. 62^6 is greater than 2^32, so the CRC-32 fits.
const CHECKSUM_CHARS: usize = 6;

/// A key with this prefix is assumed to come from `key new`, so its checksum is verified.
const GATEWAY_KEY_PREFIX: &str = "sg_";

/// The prefix of a generated key.
#[derive(Debug, Clone)]
pub(super) struct KeyPrefix(String);

/// An API key in clear text.
pub(crate) struct Secret(String);

impl KeyPrefix {
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
        match text.bytes().all(is_allowed) && text.ends_with('_') && text.len() <= 32 {
            true => Ok(KeyPrefix(text.to_owned())),
            false => Err("use lower-case letters, digits and _, with a _ at the end, such as acme_test_".to_owned()),
        }
    }
}

impl Secret {
    /// Generate a random key.
    fn generate(KeyPrefix(prefix): &KeyPrefix) -> anyhow::Result<Self> {
        let mut text = prefix.clone();
        let random = SystemRandom::new();
        while text.len() < prefix.len() + RANDOM_CHARS {
            let mut byte = [0];
            random.fill(&mut byte).map_err(|_| anyhow!("the random number generator of the system failed"))?;
            // Discard bytes of 248 (4 × 62) and above, so that all characters are equally likely.
            if byte[0] < 248 {
                text.push(char::from(BASE62_DIGITS[usize::from(byte[0]) % BASE62_DIGITS.len()]));
            }
        }
        let sum = checksum(&text);
        Ok(Secret(text + &sum))
    }

    /// Parse a key in any format. A key with the prefix of generated keys must have a valid checksum, which detects
    /// truncation and typing errors.
    pub(crate) fn parse(text: &str) -> anyhow::Result<Self> {
        if text.is_empty() {
            bail!("standard input contains no key: use printf %s KEY | sluicegate key …");
        }
        if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            bail!("a key must be ASCII without spaces, because clients send it in a header");
        }
        let (body, found_checksum) = text.split_at(text.len().saturating_sub(CHECKSUM_CHARS));
        if text.starts_with(GATEWAY_KEY_PREFIX) && checksum(body) != found_checksum {
            bail!("the checksum of this key is wrong: a character is missing or mistyped");
        }
        Ok(Secret(text.to_owned()))
    }

    pub(crate) fn hash(&self) -> KeyHash {
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

/// Return the CRC-32 of a text in base 62, with the most significant digit first.
fn checksum(text: &str) -> String {
    let crc = crc32(text.as_bytes());
    let digit = |position: usize| BASE62_DIGITS[(u64::from(crc) / 62_u64.pow(position as u32) % 62) as usize];
    (0..CHECKSUM_CHARS).rev().map(|position| char::from(digit(position))).collect()
}

/// Return the CRC-32 of IEEE 802.3, which zip and zlib use.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes
        .iter()
        .fold(u32::MAX, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), |crc, _| crc >> 1 ^ (0xEDB8_8320 * (crc & 1))))
}

#[cfg(test)]
mod secret_tests {
    use super::*;

    #[test]
    fn generated_keys_are_random_and_have_a_checksum() {
        assert_eq!(crc32(b"123456789"), 0xCBF4_3926);
        let prefix = KeyPrefix::parse("sg_test_").unwrap();
        let keys: std::collections::HashSet<_> =
            (0..1000).map(|_| Secret::generate(&prefix).unwrap().to_string()).collect();
        assert_eq!(keys.len(), 1000);
        // The keys contain 30,000 random characters, so each of the 62 digits should occur about 484 times.
        let count = |digit: &u8| keys.iter().flat_map(|key| key[8..38].bytes()).filter(|byte| byte == digit).count();
        assert!(BASE62_DIGITS.iter().map(count).all(|count| (300..700).contains(&count)));
        for key in &keys {
            assert!(Secret::parse(key).is_ok() && key.len() == 44, "{key}");
            assert!(Secret::parse(&key[..43]).is_err(), "{key}: a truncated key is rejected");
            let mut other = key.clone();
            other.replace_range(20..21, if &key[20..21] == "x" { "y" } else { "x" });
            assert!(Secret::parse(&other).is_err(), "{other}: a changed key is rejected");
        }
        assert!(Secret::parse("demo-key").is_ok(), "keys in other formats need no checksum");
        assert!(
            KeyPrefix::parse("sg-live").is_err() && KeyPrefix::parse("SG_").is_err() && KeyPrefix::parse("sg").is_err()
        );
    }
}
