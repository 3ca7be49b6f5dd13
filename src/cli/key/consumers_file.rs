//! The consumers file: edits keep comments, order and whitespace, and replace the file atomically.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, fchown};
use std::path::{Path, PathBuf};
use std::{fmt, fs};

use anyhow::{Context, anyhow, bail};
use toml_edit::{Array, ArrayOfTables, DocumentMut, Item, Table, TableLike, Value, value};

use crate::cli::{env_var, load_for};
use crate::config::file as config;
use crate::config::file::closest_name;
use crate::snapshot::CompiledConfig;

/// The parsed consumers file with its formatting.
pub(super) struct ConsumersDoc(DocumentMut);

/// A consumer in the output of `key list`.
pub(super) struct ConsumerRow {
    pub(super) name: String,
    pub(super) tier: String,
    /// Hashes as written.
    pub(super) keys: Vec<String>,
}

impl ConsumersDoc {
    pub(super) fn parse(text: &str) -> anyhow::Result<Self> {
        Ok(ConsumersDoc(text.parse()?))
    }

    pub(super) fn rows(&self) -> Vec<ConsumerRow> {
        let text = |table: &dyn TableLike, key: &str| table.get(key).and_then(Item::as_str).unwrap_or("").to_owned();
        let keys = |table: &dyn TableLike| {
            let keys = table.get("keys").and_then(Item::as_array).into_iter().flatten();
            keys.filter_map(Value::as_str).map(str::to_owned).collect()
        };
        let row = |table: &dyn TableLike| ConsumerRow {
            name: text(table, "name"),
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
        // Keep comments at the end of the file before the new table.
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
    pub(super) fn add_key(&mut self, name: &str, hash: &str) -> anyhow::Result<()> {
        let table = self.consumer_tables().into_iter().find(|table| consumer_name(&**table) == Some(name));
        let Some(table) = table else { return Err(self.unknown_consumer(name)) };
        let keys = table.entry("keys").or_insert(value(Array::new()));
        let keys = keys.as_array_mut().ok_or_else(|| anyhow!("`keys` of `{name}` is not a list"))?;
        push_key(keys, hash);
        Ok(())
    }

    /// Remove the only key whose hash begins with these digits. Return its consumer and hash.
    pub(super) fn revoke_key(&mut self, digits: &str) -> anyhow::Result<(String, String)> {
        let mut matches = Vec::new();
        for row in self.rows() {
            let hashes =
                row.keys.iter().enumerate().filter_map(|(index, key)| Some((index, key.strip_prefix("sha256:")?)));
            let matching = hashes.filter(|(_, hash)| hash.starts_with(digits));
            matches.extend(matching.map(|(index, hash)| (row.name.clone(), index, hash.to_owned())));
        }
        let (name, index, hash) = match &matches[..] {
            [(name, index, hash)] => (name.clone(), *index, hash.clone()),
            [] => bail!("no key has a hash that begins with {}", digits.get(..12).unwrap_or(digits)),
            several => {
                let hashes: Vec<_> =
                    several.iter().map(|(name, _, hash)| format!("{} of `{name}`", &hash[..16])).collect();
                bail!("several keys begin with {digits}: {}", hashes.join(", "));
            }
        };
        let table = self.consumer_tables().into_iter().find(|table| consumer_name(&**table) == Some(&name));
        if let Some(keys) = table.and_then(|table| table.get_mut("keys")?.as_array_mut()) {
            remove_key(keys, index);
        }
        Ok((name, hash))
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
        anyhow!("there is no consumer `{name}`\n  {suggestion}--create adds one")
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

/// Append a key in the style of the last key of the list: on the same line, or on its own line.
fn push_key(keys: &mut Array, hash: &str) {
    let mut key = Value::from(hash);
    let has_trailing_comma = keys.trailing_comma();
    if let Some(last) = keys.len().checked_sub(1).and_then(|last| keys.get_mut(last)) {
        let prefix = decor_text(last.decor().prefix());
        let suffix = decor_text(last.decor().suffix());
        last.decor_mut().set_suffix("");
        // The comment on the last key follows the last comma.
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

/// Remove a key and the comment after it. Keep the comment on the previous key.
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

// The file on disk: replaced atomically, and only by content that the gateway accepts.

/// Keys of the configuration that determine which consumers are valid.
const NEEDED_KEYS: &[&str] = &["api_key", "limit"];

const EMPTY_FILE: &str =
    "# The API keys of consumers, as hashes. `sluicegate key new` creates keys and adds their hashes.\n";

/// The consumers file, locked against other `sluicegate key` commands.
pub(super) struct ConsumersFile {
    path: PathBuf,
    text: String,
    config: CompiledConfig,
    /// Lock of the folder, because the file itself is replaced.
    _lock: File,
}

impl ConsumersFile {
    /// Open and lock the file that a configuration names. Create an empty one if it is missing.
    ///
    /// # Errors
    /// The configuration or the consumers file is invalid, or the file cannot be opened, created or locked.
    pub(super) fn open(config_path: &Path) -> anyhow::Result<Self> {
        let gateway_file = config::read_gateway(config_path, &env_var)?;
        let Some(name) = &gateway_file.value.api_key.consumers else {
            bail!(
                "{} names no consumers file\n  add: [api_key] with consumers = \"consumers.toml\"",
                config_path.display()
            );
        };
        if gateway_file.unresolved.iter().any(|value| value.is_within(&name.span())) {
            // The configuration is invalid: its error names the variable.
            load_for(config_path, NEEDED_KEYS)?;
        }
        let path = config_path.parent().unwrap_or(Path::new("")).join(name.get_ref());
        // Replace the target of a symbolic link, not the link.
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
                // Remove the file that was created above. The error of the configuration is returned.
                let _ = fs::remove_file(&path);
            }
        })?;
        let text = fs::read_to_string(&path).with_context(|| format!("{} cannot be read", path.display()))?;
        Ok(ConsumersFile { path, text, config, _lock: lock })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn document(&self) -> anyhow::Result<ConsumersDoc> {
        ConsumersDoc::parse(&self.text).with_context(|| format!("{} cannot be read", self.path.display()))
    }

    /// Replace the file atomically with the document, if a running gateway would accept it.
    ///
    /// # Errors
    /// The document is invalid or the file cannot be written. The file is unchanged.
    pub(super) fn replace(&mut self, document: &ConsumersDoc) -> anyhow::Result<()> {
        let text = document.to_string();
        self.config.reload_consumers(&self.path, text.as_bytes(), &env_var)?;
        let new_path = self.path.with_added_extension(format!("{}.new", std::process::id()));
        let result = self.write_new(&new_path, &text);
        if result.is_err() {
            // The new file may not exist.
            let _ = fs::remove_file(&new_path);
        }
        result.with_context(|| format!("{} cannot be replaced", self.path.display()))
    }

    fn write_new(&self, new_path: &Path, text: &str) -> std::io::Result<()> {
        let previous = fs::metadata(&self.path)?;
        let mut file = File::create_new(new_path)?;
        // Until `fchown`, the owner may differ from that of the previous file: no access for others.
        file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
        let metadata = file.metadata()?;
        if (metadata.uid(), metadata.gid()) != (previous.uid(), previous.gid()) {
            fchown(&file, Some(previous.uid()), Some(previous.gid()))?;
        }
        file.set_permissions(previous.permissions())?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(new_path, &self.path)?;
        // fsync the folder, so that the rename survives a crash.
        File::open(parent_dir(&self.path))?.sync_all()
    }
}

fn parent_dir(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}
