//! The storage directory, with one file per record. Files have mode 0600 and are replaced atomically.

use std::collections::BTreeMap;
use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io;
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use http::Uri;
use tracing::warn;

/// The contents of the stored files, by file name.
pub(super) type Records = BTreeMap<String, Vec<u8>>;

/// Name of the file that is locked by the process that places orders.
const LOCK_FILE: &str = "lock";

/// Suffix of a file while it is being written.
const TEMPORARY_SUFFIX: &str = ".tmp";

/// The directory of one CA in the storage directory.
#[derive(Debug)]
pub(super) struct Directory {
    path: PathBuf,
}

impl Directory {
    /// Open or create the directory for a CA.
    ///
    /// # Errors The directory cannot be created.
    pub(super) fn open(storage: &Path, ca: &Uri) -> io::Result<Self> {
        let path = storage.join(directory_name(ca));
        DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
        // Open the lock file once, so that the start fails if the directory is not writable.
        open_lock(&path)?;
        Ok(Directory { path })
    }

    /// Return the path of the directory.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Read all records.
    ///
    /// # Errors
    /// A file cannot be read.
    pub(super) fn read_all(&self) -> io::Result<Records> {
        let mut records = Records::new();
        for entry in self.path.read_dir()? {
            let Ok(name) = entry?.file_name().into_string() else { continue };
            if name == LOCK_FILE || name.ends_with(TEMPORARY_SUFFIX) {
                continue;
            }
            match std::fs::read(self.path.join(&name)) {
                Ok(content) => drop(records.insert(name, content)),
                // Skip a file that was removed after the directory was listed.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(records)
    }

    /// Write a record. After a crash, the record has either the old or the new content.
    ///
    /// # Errors
    /// The file cannot be written. The old content remains.
    pub(super) fn write(&self, name: &str, content: &[u8]) -> io::Result<()> {
        let temporary = self.path.join(format!("{name}{TEMPORARY_SUFFIX}"));
        // Remove the temporary file of a process that was killed, because the file may have another mode.
        let _ = std::fs::remove_file(&temporary);
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
        file.write_all(content)?;
        file.sync_all()?;
        std::fs::rename(&temporary, self.path.join(name))?;
        File::open(&self.path)?.sync_all()
    }

    /// Write a local copy of a record from the shared store. If writing fails, only log the error.
    pub(super) fn keep_copy(&self, name: &str, content: &[u8]) {
        if let Err(error) = self.write(name, content) {
            let directory = self.path.display();
            warn!(%directory, record = name, %error, "cannot write a certificate to acme.storage: after a restart, the gateway must read it from Redis");
        }
    }

    /// Remove a record.
    ///
    /// # Errors
    /// The file cannot be removed. A missing file is not an error.
    pub(super) fn remove(&self, name: &str) -> io::Result<()> {
        match std::fs::remove_file(self.path.join(name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            result => result,
        }
    }

    /// Lock the directory against other processes until the returned value is dropped. Return `None` if another process
    /// has locked it.
    ///
    /// # Errors
    /// The file system has no locks, or the file cannot be opened.
    pub(super) fn try_lock(&self) -> io::Result<Option<File>> {
        let file = open_lock(&self.path)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(file)),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }
}

fn open_lock(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path.join(LOCK_FILE))
}

/// Return host, port and path of the URL as a file name, such as `acme-v02.api.letsencrypt.org-directory`.
pub(super) fn directory_name(ca: &Uri) -> String {
    let authority = ca.authority().map_or("", |authority| authority.as_str());
    let path = ca.path().trim_matches('/');
    let is_kept = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-');
    format!("{authority}-{path}").chars().map(|c| if is_kept(c) { c.to_ascii_lowercase() } else { '-' }).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn records_are_private_and_replaced_atomically() {
        let storage = tempfile::tempdir().unwrap();
        let ca = Uri::from_static("https://ca.test:14000/Dir/x");
        let directory = Directory::open(&storage.path().join("new/acme"), &ca).unwrap();
        assert!(directory.path().ends_with("new/acme/ca.test-14000-dir-x"), "{directory:?}");
        // The test creates the temporary file that a process leaves if it is killed while it writes.
        std::fs::write(directory.path().join("a.pem.tmp"), "half").unwrap();
        directory.write("a.pem", b"one").unwrap();
        directory.write("a.pem", b"two").unwrap();
        assert_eq!(directory.read_all().unwrap(), Records::from([("a.pem".to_owned(), b"two".to_vec())]));
        let mode = |path: &Path| path.metadata().unwrap().mode() & 0o777;
        assert_eq!(mode(&directory.path().join("a.pem")), 0o600);
        assert_eq!(mode(directory.path()), 0o700);
        let lock = directory.try_lock().unwrap();
        assert!(lock.is_some() && directory.try_lock().unwrap().is_none());
        drop(lock);
        assert!(directory.try_lock().unwrap().is_some());
        directory.remove("a.pem").unwrap();
        directory.remove("a.pem").unwrap();
        assert!(directory.read_all().unwrap().is_empty());
    }
}
