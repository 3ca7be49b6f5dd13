//! Tells when a file has new content. Whole folders are watched, so files that are renamed into place and swapped
//! symlinks count; contents are compared, so nothing is told twice.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;
use std::{fs, io, thread};

use notify::{Event, RecommendedWatcher, RecursiveMode, Watcher as _};
use tracing::warn;

/// From the first sign of a change to the look at the files: writing them is done by then, and its many events are one.
const SETTLE: Duration = Duration::from_millis(100);

/// What is done with the new content of a file.
pub type OnChange = Box<dyn Fn(&[u8]) + Send>;

/// A file as it was last read.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// Where it is.
    pub path: PathBuf,
    /// What was in it.
    pub content: Vec<u8>,
}

/// Watches as long as it lives.
#[derive(Debug)]
pub struct Watcher {
    _folders: RecommendedWatcher,
}

impl Snapshot {
    /// Reads a file.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn read(path: &Path) -> io::Result<Self> {
        Ok(Snapshot { path: path.to_owned(), content: fs::read(path)? })
    }
}

/// Calls back with the content of a file whenever it differs from what was last read, on a thread of its own. A file
/// that cannot be read stays as it was.
///
/// # Errors
/// The system refuses to watch a folder.
pub fn watch(files: Vec<(Snapshot, OnChange)>) -> Result<Watcher, notify::Error> {
    let (sign, signs) = sync_channel(1);
    // A file may have changed after it was read and before it was watched.
    let _ = sign.try_send(());
    let mut watcher = notify::recommended_watcher(move |event: notify::Result<Event>| {
        // Reading a file is an event, too: acting on that would never end.
        if !event.is_ok_and(|event| event.kind.is_access()) {
            // Where one sign waits already, another says nothing new.
            let _ = sign.try_send(());
        }
    })?;
    for (file, _) in &files {
        watcher.watch(file.path.parent().unwrap_or(Path::new("")), RecursiveMode::NonRecursive)?;
    }
    let run = move || compare(files, &signs);
    thread::Builder::new().name("watch".to_owned()).spawn(run).map_err(notify::Error::io)?;
    Ok(Watcher { _folders: watcher })
}

/// Compares all files at each sign, until the watcher is gone.
fn compare(files: Vec<(Snapshot, OnChange)>, signs: &Receiver<()>) {
    let mut files: Vec<_> = files.into_iter().map(|(file, on_change)| (file, on_change, true)).collect();
    while signs.recv().is_ok() {
        thread::sleep(SETTLE);
        // What came in the meantime is seen now.
        let _ = signs.try_recv();
        for (file, on_change, readable) in &mut files {
            match Snapshot::read(&file.path) {
                Ok(now) => {
                    *readable = true;
                    if now.content != file.content {
                        *file = now;
                        on_change(&file.content);
                    }
                }
                Err(error) => {
                    // Once, however often its folder changes until it is back.
                    if std::mem::replace(readable, false) {
                        warn!("{} cannot be read, what it said before stays in force: {error}", file.path.display());
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{RecvTimeoutError, channel};

    const PATIENCE: Duration = Duration::from_secs(20);

    #[test]
    fn each_change_is_told_once_even_one_before_the_watch() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "one").unwrap();
        let read = Snapshot::read(&path).unwrap();
        fs::write(&path, "two").unwrap();
        let (told, contents) = channel();
        // Writing into the watched folder, as a log would, tells nothing.
        let log = folder.path().join("log");
        let on_change = move |content: &[u8]| {
            fs::write(&log, content).unwrap();
            told.send(String::from_utf8(content.to_vec()).unwrap()).unwrap();
        };
        let watcher = watch(vec![(read, Box::new(on_change))]).unwrap();
        assert_eq!(contents.recv_timeout(PATIENCE).unwrap(), "two");
        for content in ["two", "three"] {
            let new = folder.path().join("new");
            fs::write(&new, content).unwrap();
            fs::rename(&new, &path).unwrap();
        }
        assert_eq!(contents.recv_timeout(PATIENCE).unwrap(), "three");
        drop(watcher);
        assert_eq!(contents.recv_timeout(PATIENCE), Err(RecvTimeoutError::Disconnected), "the thread has ended");
    }

    #[test]
    fn looking_at_a_file_is_no_reason_to_look_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "one").unwrap();
        let (look, looks) = channel();
        let mut witness = notify::recommended_watcher(move |event: notify::Result<Event>| {
            if event.unwrap().kind.is_access() {
                let _ = look.send(());
            }
        })
        .unwrap();
        witness.watch(folder.path(), RecursiveMode::NonRecursive).unwrap();
        let watcher = watch(vec![(Snapshot::read(&path).unwrap(), Box::new(|_| {}))]).unwrap();
        looks.recv_timeout(PATIENCE).unwrap();
        let more = std::iter::from_fn(|| looks.recv_timeout(3 * SETTLE).ok()).take(20).count();
        assert!(more < 20, "it comes to an end");
        drop(watcher);
    }

    #[test]
    fn a_file_that_is_gone_is_one_line_in_the_log() {
        let folder = tempfile::tempdir().unwrap();
        let (path, log) = (folder.path().join("file"), folder.path().join("log"));
        let gone = Snapshot { path: path.clone(), content: Vec::new() };
        let (sign, signs) = sync_channel(4);
        // Each look takes two of them.
        (0..4).for_each(|_| sign.send(()).unwrap());
        drop(sign);
        let lines = tracing_subscriber::fmt().with_writer(std::sync::Arc::new(fs::File::create(&log).unwrap()));
        tracing::subscriber::with_default(lines.finish(), || {
            compare(vec![(gone, Box::new(|_| panic!("nothing was read")))], &signs);
        });
        let log = fs::read_to_string(log).unwrap();
        assert_eq!(log.matches(path.to_str().unwrap()).count(), 1, "{log}");
    }
}
