//! `sluicegate key`: makes API keys, and keeps their hashes in the file of consumers.

mod book;
mod file;
mod secret;

use std::io::{BufRead, IsTerminal, Write, stderr, stdin, stdout};
use std::path::Path;

use anyhow::{Context, bail};
use book::ConsumersDoc;
use clap::Subcommand;
use file::ConsumersFile;
use secret::{KeyPrefix, Secret};

use crate::identity::api_key::KeyHash;

/// Hex digits of a hash by which people tell keys apart.
const FINGERPRINT_DIGITS: usize = 12;

/// A shorter one is as likely a slip as a choice.
const MIN_FINGERPRINT_DIGITS: usize = 6;

#[derive(Debug, Subcommand)]
pub(super) enum Action {
    /// Make a key, print it once, and write its hash to the file of consumers
    ///
    /// Without --consumer nothing is written: the hash is printed as well.
    New {
        /// Whose key it is
        #[arg(long, value_name = "NAME")]
        consumer: Option<String>,
        /// Add the consumer to the file
        #[arg(long, requires = "consumer")]
        create: bool,
        /// The tier of the new consumer
        #[arg(long, requires = "create")]
        tier: Option<String>,
        /// What the key begins with: lower-case letters, digits and _, with a _ at the end
        #[arg(long, default_value = "sg_live_", value_parser = KeyPrefix::parse)]
        prefix: KeyPrefix,
    },
    /// Print the hash of the key on standard input
    ///
    /// A key is never an argument: all users of a machine see those, and shells remember them.
    Hash,
    /// Show the consumers and the fingerprints of their keys
    List,
    /// Take a key out of the file of consumers: by its fingerprint, or the one on standard input
    Revoke {
        /// The first digits of its hash, as `key list` shows them
        fingerprint: Option<String>,
    },
}

pub(super) fn run(config_path: &Path, action: &Action) -> anyhow::Result<()> {
    match action {
        Action::New { consumer: None, prefix, .. } => {
            let secret = Secret::generate(prefix)?;
            writeln!(stderr(), "keys = [\"{}\"]", format_hash(&secret.hash()))?;
            writeln!(stdout(), "{secret}")?;
        }
        Action::New { consumer: Some(consumer), create, tier, prefix } => {
            let secret = Secret::generate(prefix)?;
            let mut file = ConsumersFile::open(config_path)?;
            let mut document = file.document()?;
            if *create {
                document.add_consumer(consumer, tier.as_deref())?;
            }
            document.add_key(consumer, &format_hash(&secret.hash()))?;
            file.replace(&document)?;
            let path = file.path().display();
            writeln!(
                stderr(),
                "{path}: `{consumer}` has the key {}. This is the only time that it is shown:",
                fingerprint(&secret.hash())
            )?;
            writeln!(stdout(), "{secret}")?;
        }
        Action::Hash => writeln!(stdout(), "{}", format_hash(&read_secret()?.hash()))?,
        Action::List => print_list(&ConsumersFile::open(config_path)?.document()?)?,
        Action::Revoke { fingerprint } => {
            let digits = match fingerprint {
                Some(text) => parse_fingerprint(text)?,
                None => to_hex(&read_secret()?.hash()),
            };
            let mut file = ConsumersFile::open(config_path)?;
            let mut document = file.document()?;
            let (consumer, hash) = document.revoke_key(&digits)?;
            file.replace(&document)?;
            let short = hash.get(..FINGERPRINT_DIGITS).unwrap_or(&hash);
            writeln!(stderr(), "{}: the key {short} of `{consumer}` is out", file.path().display())?;
        }
    }
    Ok(())
}

/// The key on standard input.
fn read_secret() -> anyhow::Result<Secret> {
    if stdin().is_terminal() {
        write!(stderr(), "key: ")?;
    }
    let mut line = String::new();
    stdin().lock().read_line(&mut line).context("standard input cannot be read")?;
    Secret::parse(line.trim_end_matches(['\r', '\n']))
}

/// What a fingerprint begins with.
fn parse_fingerprint(text: &str) -> anyhow::Result<String> {
    let digits = text.strip_prefix("sha256:").unwrap_or(text).to_ascii_lowercase();
    if !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) || digits.len() > 64 {
        // It may be a key: it is not repeated.
        bail!(
            "this is no fingerprint, which has hex digits only\n  `sluicegate key list` shows them; a key is given to \
             standard input, as all users of this machine see arguments"
        );
    }
    if digits.len() < MIN_FINGERPRINT_DIGITS {
        bail!("`{digits}` is too short: {MIN_FINGERPRINT_DIGITS} digits or more");
    }
    Ok(digits)
}

fn print_list(document: &ConsumersDoc) -> anyhow::Result<()> {
    let consumers = document.rows();
    let width = |column: fn(&book::ConsumerRow) -> &str, header: &str| {
        consumers.iter().map(|row| column(row).chars().count()).max().unwrap_or(0).max(header.len())
    };
    let (name, tier) = (width(|row| &row.name, "consumer"), width(|row| &row.tier, "tier"));
    let mut out = stdout().lock();
    writeln!(out, "{:name$}  {:tier$}  keys", "consumer", "tier")?;
    for row in &consumers {
        // A line for each key: what `grep` and `awk` find is whole.
        let none = ["none".to_owned()];
        let keys = if row.keys.is_empty() { &none[..] } else { &row.keys };
        for key in keys {
            let key = key.strip_prefix("sha256:").map_or(&**key, |hash| hash.get(..FINGERPRINT_DIGITS).unwrap_or(hash));
            writeln!(out, "{:name$}  {:tier$}  {key}", row.name, row.tier)?;
        }
    }
    Ok(())
}

fn format_hash(hash: &KeyHash) -> String {
    format!("sha256:{}", to_hex(hash))
}

fn fingerprint(hash: &KeyHash) -> String {
    to_hex(&hash[..FINGERPRINT_DIGITS / 2])
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
