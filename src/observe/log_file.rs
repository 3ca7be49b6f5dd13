//! A file that lines are appended to, and that may be renamed or removed at any time, as by logrotate: the next batch goes to a new one.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Duration;

use tracing::{info, warn};

use crate::limit::clock::LogThrottle;

/// A file that cannot be opened again is mentioned this often.
const REOPEN_WARNING_INTERVAL: Duration = Duration::from_secs(60);

/// An open file, and where it was found.
#[derive(Debug)]
pub struct LogFile {
    path: PathBuf,
    file: File,
    /// Device and inode of the open file.
    file_id: (u64, u64),
    throttle: LogThrottle,
}

impl LogFile {
    /// Opens it, or makes it.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn open(path: PathBuf) -> io::Result<Self> {
        let file = open_for_append(&path)?;
        let file_id = file_id(&file.metadata()?);
        Ok(LogFile { path, file, file_id, throttle: LogThrottle::new() })
    }

    /// Opens what is at its path now, if that is another file or none. As long as there can be none the old one goes on.
    fn reopen_if_rotated(&mut self) {
        if self.path.metadata().is_ok_and(|metadata| file_id(&metadata) == self.file_id) {
            return;
        }
        let reopened = open_for_append(&self.path).and_then(|file| Ok((file_id(&file.metadata()?), file)));
        match reopened {
            Ok((file_id, file)) => {
                (self.file_id, self.file) = (file_id, file);
                info!("{} is another file now: it is written from here on", self.path.display());
            }
            Err(error) if self.throttle.should_log(REOPEN_WARNING_INTERVAL) => {
                warn!(%error, "{} is gone and cannot be made again: the file before goes on", self.path.display());
            }
            Err(_) => {}
        }
    }
}

impl Write for LogFile {
    fn write(&mut self, lines: &[u8]) -> io::Result<usize> {
        self.file.write(lines)
    }

    /// Whole lines only, so that none is torn between two files.
    fn write_all(&mut self, lines: &[u8]) -> io::Result<()> {
        self.reopen_if_rotated();
        self.file.write_all(lines)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

fn open_for_append(path: &PathBuf) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}

fn file_id(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}
