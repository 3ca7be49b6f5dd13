//! The file of consumers on disk: read, changed as a whole or not at all, and refused where the gateway would refuse it.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, fchown};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use super::book::ConsumersDoc;
use crate::cli::env_var;
use crate::config::error::ConfigError;
use crate::config::file as config;
use crate::runtime::CompiledConfig;

const EMPTY_FILE: &str =
    "# Who has which API keys; only hashes stand here. `sluicegate key new` makes keys and adds them.\n";

/// The file of consumers, which nobody else of us changes meanwhile.
pub(super) struct ConsumersFile {
    path: PathBuf,
    text: String,
    config: CompiledConfig,
    /// Of the folder: the file itself is replaced.
    _lock: File,
}

impl ConsumersFile {
    /// The file that a configuration names; an empty one is made if there is none.
    ///
    /// # Errors
    /// One of the two files is wrong.
    pub(super) fn open(config_path: &Path) -> anyhow::Result<Self> {
        let gateway_file = config::read_gateway(config_path, &env_var)
            .map_err(|file_issues| ConfigError { files: vec![file_issues] })?;
        let Some(name) = &gateway_file.value.api_key.consumers else {
            bail!(
                "{} names no file of consumers\n  add: [api_key] with consumers = \"consumers.toml\"",
                config_path.display()
            );
        };
        let path = config_path.parent().unwrap_or(Path::new("")).join(name.get_ref());
        // What a link leads to is replaced, not the link.
        let path =
            if path.is_symlink() { path.canonicalize().with_context(|| path.display().to_string())? } else { path };
        let lock = File::open(parent_dir(&path)).and_then(|folder| folder.lock().map(|()| folder));
        let lock = lock.with_context(|| format!("{} cannot be locked", parent_dir(&path).display()))?;
        let new = match File::create_new(&path) {
            Ok(mut file) => file.write_all(EMPTY_FILE.as_bytes()).map(|()| true),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(error),
        };
        let new = new.with_context(|| format!("{} cannot be made", path.display()))?;
        let config = CompiledConfig::load(config_path, &env_var).inspect_err(|_| {
            if new {
                // It was not there before; what is wrong is told.
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

    /// Puts what the book says in the place of the file: whole, and only if a running gateway would take it over.
    ///
    /// # Errors
    /// It would not, or the file cannot be written; it stays as it was.
    pub(super) fn replace(&mut self, document: &ConsumersDoc) -> anyhow::Result<()> {
        let text = document.to_string();
        self.config.reload_consumers(&self.path, text.as_bytes(), &env_var)?;
        let new_path = self.path.with_added_extension(format!("{}.new", std::process::id()));
        let result = self.write_new(&new_path, &text);
        if result.is_err() {
            // It may not have been made.
            let _ = fs::remove_file(&new_path);
        }
        result.with_context(|| format!("{} cannot be replaced", self.path.display()))
    }

    fn write_new(&self, new_path: &Path, text: &str) -> std::io::Result<()> {
        let previous = fs::metadata(&self.path)?;
        let mut file = File::create_new(new_path)?;
        // First for nobody else to read: its owner is another one until here.
        file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
        let metadata = file.metadata()?;
        if (metadata.uid(), metadata.gid()) != (previous.uid(), previous.gid()) {
            fchown(&file, Some(previous.uid()), Some(previous.gid()))?;
        }
        file.set_permissions(previous.permissions())?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(new_path, &self.path)?;
        // So that the new name outlives a crash as well.
        File::open(parent_dir(&self.path))?.sync_all()
    }
}

fn parent_dir(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}
