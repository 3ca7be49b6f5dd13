//! Edits of the consumers file. An edit keeps the file's comments, order and whitespace, and replaces the file
//! atomically.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, fchown};
use std::path::{Path, PathBuf};
use std::{fmt, fs};

use anyhow::{Context, anyhow, bail};
use serde::Serialize;
use toml_edit::{Array, ArrayOfTables, Datetime, DocumentMut, InlineTable, Item, Table, TableLike, Value, value};

use crate::cli::key::FINGERPRINT_DIGITS;
use crate::cli::shared::{env_var, load_for};
use crate::clock;
use crate::config::file as config;
use crate::config::gateway::Config;
use crate::config::shorthand::datetime_us;
use crate::config::spanned::Spanned;
use crate::config::unknown_keys::closest_name;
use crate::snapshot::CompiledConfig;

/// The parsed consumers file, with its formatting.
pub(super) struct ConsumersDoc(DocumentMut);

/// A consumer in the output of `key list`.
#[derive(Debug, Serialize)]
pub(super) struct ConsumerRow {
    #[serde(rename = "consumer")]
    pub(super) name: String,
    pub(super) tier: Option<String>,
    pub(super) keys: Vec<KeyRow>,
}

/// A key in the output of `key list`.
#[derive(Debug, Serialize)]
pub(super) struct KeyRow {
    /// The hash as it is written in the file.
    #[serde(skip)]
    hash: String,
    pub(super) fingerprint: String,
    pub(super) name: Option<String>,
    pub(super) created: Option<String>,
    pub(super) expires: Option<String>,
    /// `active`, `disabled` or `expired`.
    pub(super) status: &'static str,
    /// Names of the routes that the key is valid for. `None` if the key is valid for all routes.
    pub(super) routes: Option<Vec<String>>,
}

/// The optional properties of a new key in the consumers file.
#[derive(Debug, Default)]
pub(super) struct KeyDetails {
    pub(super) name: Option<String>,
    pub(super) expires: Option<Datetime>,
    pub(super) routes: Vec<String>,
    /// Time at which the key was created. The file contains this time only for keys with a name, an expiry time or
    /// routes.
    pub(super) created: Option<Datetime>,
}

/// A key in the file: its consumer, and its index in the consumer's list of keys.
pub(super) struct FoundKey {
    pub(super) consumer: String,
    /// Hex digits of the hash.
    pub(super) hash: String,
    index: usize,
}

impl KeyRow {
    fn from_item(item: &dyn TableLike, now_us: u64) -> Self {
        let text = |key: &str| item.get(key).and_then(Item::as_str).map(str::to_owned);
        let time = |key: &str| item.get(key).and_then(Item::as_datetime).map(ToString::to_string);
        let routes = item.get("routes").and_then(Item::as_array);
        let expires = time("expires");
        let expires_us = expires.as_ref().and_then(|text| datetime_us(&text.parse().ok()?));
        let status = match item.get("disabled").and_then(Item::as_bool) {
            Some(true) => "disabled",
            _ if expires_us.is_some_and(|expires| expires <= now_us) => "expired",
            _ => "active",
        };
        let hash = text("hash").unwrap_or_default();
        KeyRow {
            fingerprint: fingerprint_of(&hash),
            hash,
            name: text("name"),
            created: time("created"),
            expires,
            status,
            routes: routes.map(|routes| routes.iter().filter_map(Value::as_str).map(str::to_owned).collect()),
        }
    }

    fn from_hash(hash: &str) -> Self {
        KeyRow {
            fingerprint: fingerprint_of(hash),
            hash: hash.to_owned(),
            name: None,
            created: None,
            expires: None,
            status: "active",
            routes: None,
        }
    }
}

/// Return the fingerprint of a key: the first hex digits of its hash.
fn fingerprint_of(hash: &str) -> String {
    let digits = hash.strip_prefix("sha256:").unwrap_or(hash);
    digits.get(..FINGERPRINT_DIGITS).unwrap_or(digits).to_owned()
}

impl KeyDetails {
    fn is_empty(&self) -> bool {
        self.name.is_none() && self.expires.is_none() && self.routes.is_empty()
    }

    fn into_table(self, hash: &str) -> InlineTable {
        let mut table = InlineTable::new();
        table.insert("hash", hash.into());
        let mut put = |key: &str, value: Option<Value>| {
            if let Some(value) = value {
                table.insert(key, value);
            }
        };
        put("name", self.name.map(Value::from));
        put("created", self.created.map(Value::from));
        put("expires", self.expires.map(Value::from));
        put("routes", (!self.routes.is_empty()).then(|| self.routes.into_iter().collect::<Array>().into()));
        table
    }
}

impl ConsumersDoc {
    pub(super) fn parse(text: &str) -> anyhow::Result<Self> {
        Ok(ConsumersDoc(text.parse()?))
    }

    pub(super) fn rows(&self) -> Vec<ConsumerRow> {
        let now_us = clock::unix_us();
        let key = |value: &Value| match value {
            Value::String(hash) => Some(KeyRow::from_hash(hash.value())),
            Value::InlineTable(table) => Some(KeyRow::from_item(table, now_us)),
            _ => None,
        };
        let keys = |table: &dyn TableLike| match table.get("keys") {
            Some(Item::Value(Value::Array(keys))) => keys.iter().filter_map(key).collect(),
            Some(Item::ArrayOfTables(keys)) => keys.iter().map(|table| KeyRow::from_item(table, now_us)).collect(),
            _ => Vec::new(),
        };
        let text = |table: &dyn TableLike, key: &str| table.get(key).and_then(Item::as_str).map(str::to_owned);
        let row = |table: &dyn TableLike| ConsumerRow {
            name: text(table, "name").unwrap_or_default(),
            tier: text(table, "tier"),
            keys: keys(table),
        };
        match self.0.get("consumer") {
            Some(Item::ArrayOfTables(tables)) => tables.iter().map(|table| row(table)).collect(),
            Some(Item::Value(Value::Array(tables))) => {
                tables.iter().filter_map(Value::as_inline_table).map(|table| row(table)).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Add a consumer without keys.
    pub(super) fn add_consumer(&mut self, name: &str, tier: Option<&str>) -> anyhow::Result<()> {
        if self.rows().iter().any(|row| row.name == name) {
            bail!("the consumer `{name}` exists already: omit --create to add a key to it");
        }
        let mut table = Table::new();
        table.insert("name", value(name));
        if let Some(tier) = tier {
            table.insert("tier", value(tier));
        }
        table.insert("keys", value(Array::new()));
        // Comments at the end of the file follow the last consumer. Keep them there, and put the new table after them.
        let trailing = decor_text(Some(self.0.trailing()));
        self.0.set_trailing("");
        table.decor_mut().set_prefix(format!("{trailing}\n"));
        let consumers = self.0.entry("consumer").or_insert(Item::ArrayOfTables(ArrayOfTables::new()));
        match consumers {
            Item::ArrayOfTables(tables) => tables.push(table),
            Item::Value(Value::Array(tables)) => tables.push(table.into_inline_table()),
            _ => bail!("`consumer` is not a list"),
        }
        Ok(())
    }

    /// Add the hash of a key to a consumer.
    pub(super) fn add_key(&mut self, name: &str, hash: &str, details: KeyDetails) -> anyhow::Result<()> {
        let table = self.consumer_tables().into_iter().find(|table| consumer_name(&**table) == Some(name));
        let Some(table) = table else { return Err(self.unknown_consumer(name)) };
        match table.entry("keys").or_insert(value(Array::new())) {
            Item::ArrayOfTables(keys) => keys.push(details.into_table(hash).into_table()),
            Item::Value(Value::Array(keys)) if details.is_empty() => push_key(keys, hash.into()),
            Item::Value(Value::Array(keys)) => push_key(keys, details.into_table(hash).into()),
            _ => bail!("`keys` of the consumer `{name}` must be a list"),
        }
        Ok(())
    }

    /// Find the key whose hash begins with these digits. Return an error if no key or more than one key matches.
    pub(super) fn find_key(&self, digits: &str) -> anyhow::Result<FoundKey> {
        let mut matches = Vec::new();
        for row in self.rows() {
            for (index, key) in row.keys.iter().enumerate() {
                if let Some(hash) = key.hash.strip_prefix("sha256:").filter(|hash| hash.starts_with(digits)) {
                    matches.push(FoundKey { consumer: row.name.clone(), hash: hash.to_owned(), index });
                }
            }
        }
        match (matches.pop(), &matches[..]) {
            (Some(only), []) => Ok(only),
            (None, _) => bail!("no key has a hash that begins with {}", digits.get(..12).unwrap_or(digits)),
            (Some(last), others) => {
                let all = others.iter().chain([&last]);
                let hashes: Vec<_> =
                    all.map(|FoundKey { consumer, hash, .. }| format!("{} of `{consumer}`", &hash[..16])).collect();
                bail!("several keys have a hash that begins with {digits}: {}", hashes.join(", "));
            }
        }
    }

    /// Remove a key.
    pub(super) fn revoke_key(&mut self, key: &FoundKey) {
        match self.keys_of(&key.consumer) {
            Some(Item::ArrayOfTables(keys)) => drop(keys.remove(key.index)),
            Some(Item::Value(Value::Array(keys))) => remove_key(keys, key.index),
            _ => {}
        }
    }

    /// Disable a key by `disabled = true`, or enable it by removing `disabled`.
    pub(super) fn set_disabled(&mut self, key: &FoundKey, disabled: bool) {
        fn set(table: &mut dyn TableLike, disabled: bool) {
            if disabled {
                table.insert("disabled", value(true));
            } else {
                table.remove("disabled");
            }
        }
        match self.keys_of(&key.consumer) {
            Some(Item::ArrayOfTables(keys)) => {
                if let Some(table) = keys.get_mut(key.index) {
                    set(table, disabled);
                }
            }
            Some(Item::Value(Value::Array(keys))) => match keys.get_mut(key.index) {
                Some(Value::InlineTable(table)) => {
                    set(table, disabled);
                    table.fmt();
                }
                Some(hash) if disabled => {
                    let mut table = InlineTable::new();
                    table.insert("hash", format!("sha256:{}", key.hash).into());
                    table.insert("disabled", true.into());
                    // Keep the comments before and after the hash.
                    *table.decor_mut() = hash.decor().clone();
                    *hash = Value::InlineTable(table);
                }
                _ => {}
            },
            _ => {}
        }
    }

    fn keys_of(&mut self, consumer: &str) -> Option<&mut Item> {
        let table = self.consumer_tables().into_iter().find(|table| consumer_name(&**table) == Some(consumer));
        table?.get_mut("keys")
    }

    fn consumer_tables(&mut self) -> Vec<&mut dyn TableLike> {
        match self.0.get_mut("consumer") {
            Some(Item::ArrayOfTables(tables)) => tables.iter_mut().map(|table| table as &mut dyn TableLike).collect(),
            Some(Item::Value(Value::Array(tables))) => tables
                .iter_mut()
                .filter_map(Value::as_inline_table_mut)
                .map(|table| table as &mut dyn TableLike)
                .collect(),
            _ => Vec::new(),
        }
    }

    fn unknown_consumer(&self, name: &str) -> anyhow::Error {
        let names: Vec<_> = self.rows().into_iter().map(|row| row.name).collect();
        let suggestion = closest_name(name, names.iter().map(String::as_str));
        let suggestion = suggestion.map_or(String::new(), |suggestion| format!("did you mean `{suggestion}`? "));
        anyhow!("there is no consumer `{name}`\n  {suggestion}to add a consumer, use --create")
    }
}

impl fmt::Display for ConsumersDoc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

fn consumer_name(table: &dyn TableLike) -> Option<&str> {
    table.get("name")?.as_str()
}

/// Append a key to the list. If the list has one key per line, put the key on a separate line.
fn push_key(keys: &mut Array, mut key: Value) {
    let has_trailing_comma = keys.trailing_comma();
    if let Some(last) = keys.len().checked_sub(1).and_then(|last| keys.get_mut(last)) {
        let prefix = decor_text(last.decor().prefix());
        let suffix = decor_text(last.decor().suffix());
        last.decor_mut().set_suffix("");
        // `push_formatted` adds a comma after the last key. Move a comment that follows the last key behind this comma.
        let tail = suffix + &decor_text(Some(keys.trailing()));
        if let Some((comment, _)) = tail.rsplit_once('\n') {
            let indentation = prefix.rsplit('\n').next().unwrap_or_default();
            key.decor_mut().set_prefix(format!("{comment}\n{indentation}"));
            keys.set_trailing("\n");
            keys.set_trailing_comma(true);
        } else {
            key.decor_mut().set_prefix(" ");
            keys.set_trailing(tail);
            keys.set_trailing_comma(has_trailing_comma);
        }
    }
    keys.push_formatted(key);
}

/// Remove a key and the comment after it. The comment after the previous key stays.
fn remove_key(keys: &mut Array, index: usize) {
    let prefix = keys.get(index).map_or_else(String::new, |key| decor_text(key.decor().prefix()));
    let suffix = keys.get(index).map_or_else(String::new, |key| decor_text(key.decor().suffix()));
    keys.remove(index);
    let join_comment = |after: &str| match (prefix.split_once('\n'), after.split_once('\n')) {
        (Some((comment, _)), Some((_, rest))) => format!("{comment}\n{rest}"),
        (None, Some(_)) => after.to_owned(),
        (_, None) => prefix.clone(),
    };
    match keys.get_mut(index) {
        Some(next) => {
            let after = join_comment(&decor_text(next.decor().prefix()));
            next.decor_mut().set_prefix(after);
        }
        None => {
            let tail = suffix + &decor_text(Some(keys.trailing()));
            let after = if tail.contains('\n') { join_comment(&tail) } else { String::new() };
            keys.set_trailing(if keys.is_empty() { String::new() } else { after });
        }
    }
}

fn decor_text(text: Option<&toml_edit::RawString>) -> String {
    text.and_then(toml_edit::RawString::as_str).unwrap_or_default().to_owned()
}

// The file on disk. The commands replace it atomically, and only with content that the gateway accepts.

/// Configuration keys that are necessary to validate consumers.
const NEEDED_KEYS: &[&str] = &["auth", "limit", "route.name"];

const EMPTY_FILE: &str =
    "# The API keys of consumers, as hashes. `sluicegate key new` creates keys and adds their hashes.\n";

/// The consumers file, locked against other `sluicegate key` commands.
pub(super) struct ConsumersFile {
    path: PathBuf,
    /// Index of the file in `auth.consumers_files` of the configuration.
    index: usize,
    text: String,
    config: CompiledConfig,
    /// Lock on the file's folder. A lock on the file itself would be lost when the file is replaced.
    _lock: File,
}

impl ConsumersFile {
    /// Open and lock the consumers file of a configuration. If the file does not exist, create it without consumers.
    /// `provider` is the NAME of the table `[auth.NAME]` whose consumers file is used. `provider` may be `None` if the
    /// configuration names only one consumers file.
    ///
    /// # Errors
    /// The configuration or the consumers file is invalid, or the file cannot be opened, created or locked.
    pub(super) fn open(config_path: &Path, provider: Option<&str>) -> anyhow::Result<Self> {
        let gateway_file = config::read_gateway(config_path, &env_var)?;
        let name = consumers_name(&gateway_file.value, config_path, provider)?;
        if gateway_file.unresolved.iter().any(|value| value.is_within(&name.span())) {
            // The path of the consumers file contains an unset variable. Load the configuration to fail with an error
            // that names the variable.
            load_for(config_path, NEEDED_KEYS)?;
        }
        let path = gateway_file.sources.directory_of(&name.span()).join(name.get_ref());
        let named_path = path.clone();
        // Replace the target of a symbolic link, not the link itself.
        let path =
            if path.is_symlink() { path.canonicalize().with_context(|| path.display().to_string())? } else { path };
        let lock = File::open(parent_dir(&path)).and_then(|folder| folder.lock().map(|()| folder));
        let lock = lock.with_context(|| format!("{} cannot be locked", parent_dir(&path).display()))?;
        let new = match File::create_new(&path) {
            Ok(mut file) => file.write_all(EMPTY_FILE.as_bytes()).map(|()| true),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(error),
        };
        let new = new.with_context(|| format!("{} cannot be created", path.display()))?;
        let config = load_for(config_path, NEEDED_KEYS).inspect_err(|_| {
            if new {
                // Remove the empty file that this function created above, and return the configuration error.
                let _ = fs::remove_file(&path);
            }
        })?;
        let text = fs::read_to_string(&path).with_context(|| format!("{} cannot be read", path.display()))?;
        let index = config.auth.consumers_files.iter().position(|file| file.file.path == named_path);
        Ok(ConsumersFile { path, index: index.unwrap_or_default(), text, config, _lock: lock })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Return the tiers that consumers can choose.
    pub(super) fn tiers(&self) -> BTreeSet<&str> {
        self.config.consumer_tiers()
    }

    pub(super) fn document(&self) -> anyhow::Result<ConsumersDoc> {
        ConsumersDoc::parse(&self.text).with_context(|| format!("{} cannot be read", self.path.display()))
    }

    /// Replace the file atomically with the document, if a running gateway would accept the document.
    ///
    /// # Errors
    /// The document is invalid or the file cannot be written. The file is unchanged after an error.
    pub(super) fn replace(&mut self, document: &ConsumersDoc) -> anyhow::Result<()> {
        let text = document.to_string();
        self.config.reload_consumers(self.index, text.as_bytes(), &env_var)?;
        let new_path = self.path.with_added_extension(format!("{}.new", std::process::id()));
        let result = self.write_new(&new_path, &text);
        if result.is_err() {
            // Ignore the result, because the file may not exist if `write_new` failed.
            let _ = fs::remove_file(&new_path);
        }
        result.with_context(|| format!("{} cannot be replaced", self.path.display()))
    }

    fn write_new(&self, new_path: &Path, text: &str) -> std::io::Result<()> {
        let previous = fs::metadata(&self.path)?;
        let mut file = File::create_new(new_path)?;
        // Deny other users access to the new file until `fchown` has set its owner to the owner of the previous file.
        file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
        let metadata = file.metadata()?;
        if (metadata.uid(), metadata.gid()) != (previous.uid(), previous.gid()) {
            fchown(&file, Some(previous.uid()), Some(previous.gid()))?;
        }
        file.set_permissions(previous.permissions())?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(new_path, &self.path)?;
        // Call fsync on the directory, so that the rename survives a crash.
        File::open(parent_dir(&self.path))?.sync_all()
    }
}

/// Return the path of a provider's consumers file. Without a provider, return the path of the configuration's only
/// consumers file.
fn consumers_name<'c>(
    config: &'c Config,
    config_path: &Path,
    provider: Option<&str>,
) -> anyhow::Result<&'c Spanned<String>> {
    let path = config_path.display();
    let files: Vec<_> = config
        .auth
        .iter()
        .filter(|(name, _)| provider.is_none_or(|provider| provider == *name))
        .filter_map(|(name, auth)| Some((name.as_str(), auth.get_ref().consumers.as_ref()?)))
        .collect();
    match (&files[..], provider) {
        ([], Some(provider)) => bail!("{path}: [auth.{provider}] names no consumers file"),
        ([], None) => bail!(
            "{path} names no consumers file\n  add: [auth.keys] with kind = \"api-key\" and consumers = \"consumers.toml\""
        ),
        ([(_, first), rest @ ..], _) if rest.iter().all(|(_, other)| other.get_ref() == first.get_ref()) => Ok(first),
        (several, _) => {
            let names: Vec<_> = several.iter().map(|(name, _)| format!("--auth {name}")).collect();
            bail!("{path} names several consumers files: choose one with {}", names.join(" or "))
        }
    }
}

fn parent_dir(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}
