//! The file watcher reports files with new content. It watches the configuration, and the key, consumers and
//! certificate files that the configuration refers to.
//!
//! The watcher watches directories, so that it also detects renamed files and replaced symbolic links. It compares file
//! contents, so that it reports each change only once. If a file is invalid, its previous content stays in use.
//!
//! The kernel reports no events for network file systems, for directories whose path contains a symbolic link that is
//! replaced, and when inotify is exhausted. The watcher therefore also compares the files at an interval.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use notify::{Event, RecommendedWatcher, RecursiveMode, Watcher as _};
use tracing::{info, warn};

use crate::admin::current::{ConfigHandle, FileKind, ReloadCause};
use crate::clock;
use crate::clock::LogThrottle;
use crate::config::include::ConfigFiles;
use crate::config::sources::FileSnapshot;
use crate::identity::auth::ProviderKind;
use crate::identity::jwt::KeySet;
use crate::snapshot::CompiledConfig;
use crate::snapshot::descriptor_files::DescriptorFiles;

/// Delay between the first event and the comparison. All events of one write operation then count as one change.
const DEBOUNCE: Duration = Duration::from_millis(100);

/// Interval of comparisons without an event.
const POLL_INTERVAL: Duration = Duration::from_secs(10);

/// Minimum interval between two warnings that files cannot be watched.
const LOG_INTERVAL: Duration = Duration::from_secs(600);

/// Callback that receives a group of files when at least one of them has new content, or when all files are reported.
/// It returns whether the content is valid and therefore in use.
pub(crate) type OnChange = Box<dyn Fn(&[FileSnapshot], Content) -> bool + Send>;

/// Whether the content of a group is already in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Content {
    /// The content is new, or was invalid when it was reported before.
    New,
    /// The content is in use.
    Known,
}

/// Reads the files of a group. An error contains the path of the file that cannot be read.
pub(crate) type ReadFiles = Box<dyn Fn(&[FileSnapshot]) -> Result<Vec<FileSnapshot>, (PathBuf, io::Error)> + Send>;

/// A group of files whose changes are reported together.
pub(crate) struct FileGroup {
    /// Contents of the files when they were last read.
    pub(crate) files: Vec<FileSnapshot>,
    /// Reads the files again. The result may contain other files than `FileGroup::files`.
    pub(crate) read: ReadFiles,
    /// Directories in which more files of the group may appear.
    pub(crate) directories: BTreeSet<PathBuf>,
    pub(crate) on_change: OnChange,
}

impl FileGroup {
    /// Create a group with a fixed list of files.
    pub(crate) fn fixed(files: Vec<FileSnapshot>, on_change: OnChange) -> Self {
        let read = |files: &[FileSnapshot]| {
            let read = |file: &FileSnapshot| file.read_again().map_err(|error| (file.path.clone(), error));
            files.iter().map(read).collect()
        };
        FileGroup { files, read: Box::new(read), directories: BTreeSet::new(), on_change }
    }
}

/// Handle of the watcher. Dropping it stops the watcher.
#[derive(Debug)]
pub(crate) struct FileWatcher {
    /// `None` if the system has no more inotify instances.
    watcher: Option<RecommendedWatcher>,
    directories: BTreeSet<PathBuf>,
    wake: SyncSender<()>,
    /// Whether the watcher thread must report all files when it wakes up next.
    report_all: Arc<AtomicBool>,
}

impl FileWatcher {
    /// Also watch these directories. The groups keep the contents that they read last. For the files that the active
    /// configuration refers to, a new watcher would start with the contents from the load of this configuration, which
    /// may be older.
    pub(crate) fn add_directories(&mut self, directories: BTreeSet<PathBuf>) {
        for directory in directories {
            if self.directories.contains(&directory) {
                continue;
            }
            watch_directory(self.watcher.as_mut(), &directory);
            self.directories.insert(directory);
            // A file may have changed before its directory was watched.
            let _ = self.wake.try_send(());
        }
    }

    /// Report all files, even if they have not changed.
    pub(crate) fn report_all(&self) {
        self.report_all.store(true, Ordering::SeqCst);
        let _ = self.wake.try_send(());
    }
}

/// Watch groups of files. Call the callback of a group on a separate thread when one of its files has new content, or
/// when files were added to or removed from the group. While a file of a group cannot be read, the callback is not
/// called.
///
/// # Errors
/// The thread cannot be started.
pub(crate) fn watch(groups: Vec<FileGroup>) -> io::Result<FileWatcher> {
    let (wake, wakes) = sync_channel(1);
    let report_all = Arc::<AtomicBool>::default();
    // Compare once at the start: a file may have changed after it was read and before it was watched.
    let _ = wake.try_send(());
    let on_event = wake.clone();
    let watcher = notify::recommended_watcher(move |event: notify::Result<Event>| {
        // Ignore access events. The comparison itself reads the files, so it would trigger itself.
        if !event.is_ok_and(|event| event.kind.is_access()) {
            // If the channel is full, a wake-up is already pending.
            let _ = on_event.try_send(());
        }
    });
    let mut watcher = watcher.map_err(|error| log_polling(None, &error)).ok();
    let parent = |file: &FileSnapshot| file.path.parent().unwrap_or(Path::new("")).to_owned();
    let of_groups = groups.iter().flat_map(|group| group.files.iter().map(parent).chain(group.directories.clone()));
    let directories: BTreeSet<_> = of_groups.collect();
    for directory in &directories {
        watch_directory(watcher.as_mut(), directory);
    }
    let run = {
        let all = Arc::downgrade(&report_all);
        move || watch_loop(groups, &wakes, &all)
    };
    thread::Builder::new().name("watch".to_owned()).spawn(run)?;
    Ok(FileWatcher { watcher, directories, wake, report_all })
}

fn watch_directory(watcher: Option<&mut RecommendedWatcher>, directory: &Path) {
    if let Some(Err(error)) = watcher.map(|watcher| watcher.watch(directory, RecursiveMode::NonRecursive)) {
        log_polling(Some(directory), &error);
    }
}

fn log_polling(directory: Option<&Path>, error: &notify::Error) {
    static LOG_THROTTLE: LogThrottle = LogThrottle::new();
    if LOG_THROTTLE.should_log(LOG_INTERVAL) {
        let directory = directory.map(|directory| directory.display().to_string());
        warn!(
            directory,
            %error,
            "cannot watch files, so changes are noticed within {POLL_INTERVAL:?}; see fs.inotify.max_user_instances and \
             fs.inotify.max_user_watches of sysctl"
        );
    }
}

/// A group with the results of its last comparison.
struct WatchedGroup {
    group: FileGroup,
    /// Whether all files of the group could be read.
    readable: bool,
    /// Whether the callback has accepted the content that it received last.
    in_use: bool,
}

/// Compare all files at each wake-up, and at an interval, until the watcher is dropped.
fn watch_loop(groups: Vec<FileGroup>, wakes: &Receiver<()>, watcher: &Weak<AtomicBool>) {
    let mut groups: Vec<_> =
        groups.into_iter().map(|group| WatchedGroup { group, readable: true, in_use: true }).collect();
    while wakes.recv_timeout(POLL_INTERVAL) != Err(RecvTimeoutError::Disconnected) {
        thread::sleep(DEBOUNCE);
        // Discard a wake-up that arrived during the delay. The next comparison covers it.
        let _ = wakes.try_recv();
        let Some(report_all) = watcher.upgrade().map(|all| all.swap(false, Ordering::SeqCst)) else { return };
        for WatchedGroup { group: FileGroup { files, read, on_change, .. }, readable, in_use } in &mut groups {
            // Stop if the callback of the previous group has replaced this watcher, as a reload does.
            if watcher.strong_count() == 0 {
                return;
            }
            match read(files) {
                Ok(current) => {
                    let was_readable = std::mem::replace(readable, true);
                    let same = current == *files;
                    *files = current;
                    let content = if same && *in_use { Content::Known } else { Content::New };
                    if report_all || !same || !was_readable {
                        *in_use = on_change(files, content);
                    }
                }
                Err((path, error)) => {
                    // Log the error only once, until the file is readable again.
                    if std::mem::replace(readable, false) || report_all {
                        let file = path.display();
                        warn!(%file, %error, "cannot read the file: its previous content stays in force");
                    }
                }
            }
        }
    }
}

// === The files that a configuration refers to ===

/// Watch the files of the active configuration until the returned watcher is dropped. Return `None` if there can be no
/// watcher.
pub(crate) fn watch_files(configuration: &Arc<ConfigHandle>) -> Option<FileWatcher> {
    let named = watched_files(configuration).into_iter().map(|files| files.into_group(configuration));
    let yaml = descriptor_files(configuration);
    let groups = std::iter::once(configuration_files(configuration)).chain(yaml).chain(named);
    let watcher = watch(groups.collect());
    let watcher = watcher.map_err(|error| warn!(%error, "cannot watch files for changes: reload with SIGHUP"));
    watcher.ok()
}

/// Return the group of the configuration file and the files that it includes. It must be the first group: a successful
/// reload also reads the files of the other groups, and replaces this watcher.
fn configuration_files(configuration: &Arc<ConfigHandle>) -> FileGroup {
    // Include the directories in the comparison, because a new directory must be watched even if it is empty.
    let all = |ConfigFiles { main, included, directories }| -> Vec<FileSnapshot> {
        let directories = directories.into_iter().map(|path| FileSnapshot { path, content: [].into() });
        std::iter::once(main).chain(included).chain(directories).collect()
    };
    let last = configuration.last_attempt();
    let path = last.main.path.clone();
    let directories = last.directories.clone();
    let read = move |_: &[FileSnapshot]| {
        let files = ConfigFiles::read(&path, &|name| std::env::var_os(name));
        files.map(all).map_err(|error| (path.clone(), error))
    };
    let configuration = configuration.clone();
    let reload = move |files: &[FileSnapshot], _: Content| {
        if all(configuration.last_attempt()) != files {
            // The reload thread logs the result.
            let _ = configuration.reload(ReloadCause::FileChanged).blocking_recv();
        }
        configuration.last_failure().is_none()
    };
    FileGroup { files: all(last), read: Box::new(read), directories, on_change: Box::new(reload) }
}

/// Return the group of the YAML files of `[ratelimit]`. They are a part of the configuration, so a change reloads it.
fn descriptor_files(configuration: &Arc<ConfigHandle>) -> Option<FileGroup> {
    let DescriptorFiles { path, files } = configuration.active().config.descriptor_files.clone();
    let path = path?;
    // A directory on the way to the files may be a symlink, which is replaced to change all files at once.
    let links = path.ancestors().filter(|path| path.is_symlink()).filter_map(Path::parent).map(Path::to_owned);
    let directories = links.chain(path.is_dir().then(|| path.clone())).collect();
    let read = move |_: &[FileSnapshot]| DescriptorFiles::read(&path);
    let configuration = configuration.clone();
    let reload = move |_: &[FileSnapshot], content: Content| {
        if content == Content::New {
            // The reload thread logs the result.
            let _ = configuration.reload(ReloadCause::FileChanged).blocking_recv();
        }
        configuration.last_failure().is_none()
    };
    Some(FileGroup { files, read: Box::new(read), directories, on_change: Box::new(reload) })
}

/// Return the other files of the active configuration, in groups that are reloaded together.
fn watched_files(configuration: &Arc<ConfigHandle>) -> Vec<WatchedFiles> {
    let config = &configuration.active().config;
    let mut files = Vec::new();
    for (index, file) in &config.auth.jwks_files {
        let config = config.clone();
        let index = *index;
        let reload = move |files: &[FileSnapshot], _: Content| {
            let ProviderKind::Jwt(verifier) = &config.auth.providers[index].kind else { return Ok(()) };
            let keys = KeySet::parse(&files[0].content).map(|keys| verifier.keys.store(Some(Arc::new(keys))));
            rejection(&files[0], keys)
        };
        files.push(WatchedFiles { kind: FileKind::Jwks, files: vec![file.clone()], reload: Box::new(reload) });
    }
    for (index, file) in &config.auth.users_files {
        let config = config.clone();
        let index = *index;
        let reload = move |files: &[FileSnapshot], _: Content| {
            let ProviderKind::Basic(basic) = &config.auth.providers[index].kind else { return Ok(()) };
            rejection(&files[0], basic.reload_users(&files[0]))
        };
        files.push(WatchedFiles { kind: FileKind::Users, files: vec![file.clone()], reload: Box::new(reload) });
    }
    for (index, consumers) in config.auth.consumers_files.iter().enumerate() {
        let config = config.clone();
        let reload = move |files: &[FileSnapshot], content: Content| {
            let read = config.reload_consumers(index, &files[0].content, &|name| std::env::var_os(name));
            if read.is_ok() && content == Content::New {
                for (_, warning) in config.auth.key_warnings(Duration::from_micros(clock::unix_us())) {
                    warn!("{warning}");
                }
            }
            rejection(&files[0], read)
        };
        files.push(WatchedFiles {
            kind: FileKind::Consumers,
            files: vec![consumers.file.clone()],
            reload: Box::new(reload),
        });
    }
    for (index, networks) in config.network_files.iter().enumerate() {
        let config = config.clone();
        let reload = move |files: &[FileSnapshot], _: Content| {
            rejection(&files[0], config.reload_networks(index, &files[0].content))
        };
        files.push(WatchedFiles {
            kind: FileKind::Networks,
            files: vec![networks.file.clone()],
            reload: Box::new(reload),
        });
    }
    for (index, tls) in config.upstream_tls.iter().enumerate().filter(|(_, tls)| !tls.files().is_empty()) {
        let config = config.clone();
        let reload = move |files: &[FileSnapshot], _: Content| {
            let now = Duration::from_micros(clock::unix_us());
            let read = config.upstream_tls[index].reload(files, now);
            let file = read.as_ref().map_or_else(|(file, _)| *file, |()| &files[0]);
            rejection(file, read.map_err(|(_, error)| error))
        };
        files.push(WatchedFiles { kind: FileKind::UpstreamTls, files: tls.files(), reload: Box::new(reload) });
    }
    for index in 0..config.listeners.len() {
        watch_listener_tls(config, index, &mut files);
    }
    files
}

/// Add the certificate files and the CA files of a listener.
fn watch_listener_tls(config: &Arc<CompiledConfig>, index: usize, files: &mut Vec<WatchedFiles>) {
    let Some(tls) = &config.listeners[index].tls else { return };
    for (certificate_index, pair) in tls.certificates.iter().enumerate() {
        let config = config.clone();
        let reload = move |files: &[FileSnapshot], _: Content| {
            let Some(tls) = &config.listeners[index].tls else { return Ok(()) };
            let now = Duration::from_micros(clock::unix_us());
            let read = tls.reload_certificate(certificate_index, &files[0].content, &files[1].content, now);
            rejection(&files[0], read)
        };
        files.push(WatchedFiles { kind: FileKind::Certificate, files: pair.to_vec(), reload: Box::new(reload) });
    }
    for (clients_index, clients) in tls.clients.iter().enumerate() {
        let Some((file, auth)) = &clients.ca else { continue };
        let config = config.clone();
        let auth = *auth;
        let reload = move |files: &[FileSnapshot], _: Content| {
            let Some(tls) = &config.listeners[index].tls else { return Ok(()) };
            let read = tls.reload_client_ca(clients_index, &files[0].content, auth);
            rejection(&files[0], read)
        };
        files.push(WatchedFiles { kind: FileKind::ClientCa, files: vec![file.clone()], reload: Box::new(reload) });
    }
}

/// The reason why the newest content of a file is not in use.
struct Rejection {
    file: PathBuf,
    error: String,
}

/// Reads the new content of a group of files.
type Reload = Box<dyn Fn(&[FileSnapshot], Content) -> Result<(), Rejection> + Send>;

/// A group of files that the configuration refers to.
struct WatchedFiles {
    kind: FileKind,
    files: Vec<FileSnapshot>,
    reload: Reload,
}

impl WatchedFiles {
    /// Log and record each result. The record of a group has the path of its first file.
    fn into_group(self, configuration: &Arc<ConfigHandle>) -> FileGroup {
        let WatchedFiles { kind, files, reload } = self;
        let first = files[0].path.clone();
        let record = {
            let configuration = configuration.clone();
            move |result| configuration.record_file(kind, &first, result)
        };
        let on_change = {
            let record = record.clone();
            move |files: &[FileSnapshot], content: Content| {
                let result = reload(files, content);
                record(result.as_ref().map(|_| ()).map_err(|rejection| rejection.error.clone()));
                log_result(&files[0], &result, content);
                result.is_ok()
            }
        };
        let mut group = FileGroup::fixed(files, Box::new(on_change));
        let read = group.read;
        group.read = Box::new(move |files| {
            read(files).inspect_err(|(path, error)| record(Err(format!("cannot read {}: {error}", path.display()))))
        });
        group
    }
}

fn rejection(file: &FileSnapshot, result: Result<(), impl Display>) -> Result<(), Rejection> {
    result.map_err(|error| Rejection { file: file.path.clone(), error: error.to_string() })
}

/// Log the result of reloading a file. If the content was in use before, log only an error.
fn log_result(first: &FileSnapshot, result: &Result<(), Rejection>, content: Content) {
    match result {
        Ok(()) if content == Content::New => info!(file = %first.path.display(), "file reloaded"),
        Ok(()) => {}
        Err(Rejection { file, error }) => {
            let file = file.display();
            warn!(%file, %error, "cannot reload the file: its previous content stays in force");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::sync::mpsc::channel;

    const TIMEOUT: Duration = Duration::from_secs(20);

    fn group(files: Vec<FileSnapshot>, on_change: impl Fn(&[FileSnapshot]) + Send + 'static) -> FileGroup {
        let on_change: OnChange = Box::new(move |files, _| {
            on_change(files);
            true
        });
        FileGroup::fixed(files, on_change)
    }

    #[test]
    fn each_change_is_reported_once_even_one_before_the_watch() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "one").unwrap();
        let read = FileSnapshot::read(&path).unwrap();
        fs::write(&path, "two").unwrap();
        let (reported, contents) = channel();
        // The log is another file in the watched directory. Writing it must not be reported.
        let log = folder.path().join("log");
        let on_change = move |files: &[FileSnapshot]| {
            fs::write(&log, &files[0].content).unwrap();
            reported.send(String::from_utf8(files[0].content.to_vec()).unwrap()).unwrap();
        };
        let watcher = watch(vec![group(vec![read], on_change)]).unwrap();
        assert_eq!(contents.recv_timeout(TIMEOUT).unwrap(), "two");
        for content in ["two", "three"] {
            let new = folder.path().join("new");
            fs::write(&new, content).unwrap();
            fs::rename(&new, &path).unwrap();
        }
        assert_eq!(contents.recv_timeout(TIMEOUT).unwrap(), "three");
        watcher.report_all();
        assert_eq!(contents.recv_timeout(TIMEOUT).unwrap(), "three", "`report_all` reports it again");
        drop(watcher);
        assert_eq!(contents.recv_timeout(TIMEOUT), Err(RecvTimeoutError::Disconnected), "the thread has ended");
    }

    #[test]
    fn content_is_known_only_if_the_callback_has_accepted_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "one").unwrap();
        let read = FileSnapshot::read(&path).unwrap();
        let (reported, reports) = channel();
        let (decide, decisions) = channel();
        let on_change: OnChange = Box::new(move |files, content| {
            reported.send((String::from_utf8(files[0].content.to_vec()).unwrap(), content)).unwrap();
            decisions.recv().unwrap()
        });
        let watcher = watch(vec![FileGroup::fixed(vec![read], on_change)]).unwrap();
        // Each step: the new content, or `None` for `report_all`; then the report, and whether the callback accepts it.
        for (change, text, content, is_accepted) in [
            (None, "one", Content::Known, true),
            (Some("two"), "two", Content::New, true),
            (None, "two", Content::Known, true),
            (Some("three"), "three", Content::New, false),
            (None, "three", Content::New, false),
            (None, "three", Content::New, true),
            (None, "three", Content::Known, true),
        ] {
            match change {
                Some(text) => {
                    let new = folder.path().join("new");
                    fs::write(&new, text).unwrap();
                    fs::rename(&new, &path).unwrap();
                }
                None => watcher.report_all(),
            }
            assert_eq!(reports.recv_timeout(TIMEOUT).unwrap(), (text.to_owned(), content));
            decide.send(is_accepted).unwrap();
        }
        drop(watcher);
    }

    #[test]
    fn group_is_reported_only_when_all_files_can_be_read() {
        let folder = tempfile::tempdir().unwrap();
        let paths = ["one", "other"].map(|name| folder.path().join(name));
        paths.iter().for_each(|path| fs::write(path, "old").unwrap());
        let read = || paths.iter().map(|path| FileSnapshot::read(path).unwrap()).collect::<Vec<_>>();
        let before = read();
        let (reported, contents) = channel();
        let on_change = move |files: &[FileSnapshot]| {
            reported.send(files.iter().map(|file| file.content.to_vec()).collect()).unwrap()
        };
        let watcher = watch(vec![group(before, on_change)]).unwrap();
        // While one file of a group is missing, changes of the other file are not reported.
        fs::remove_file(&paths[0]).unwrap();
        fs::write(&paths[1], "new").unwrap();
        assert!(contents.recv_timeout(5 * DEBOUNCE).is_err());
        fs::write(folder.path().join("renamed"), "new").unwrap();
        fs::rename(folder.path().join("renamed"), &paths[0]).unwrap();
        let both: Vec<Vec<u8>> = contents.recv_timeout(TIMEOUT).unwrap();
        assert_eq!(both, [b"new", b"new"]);
        drop(watcher);
    }

    #[test]
    fn reading_a_file_does_not_trigger_another_comparison() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "one").unwrap();
        let (access, accesses) = channel();
        let mut witness = notify::recommended_watcher(move |event: notify::Result<Event>| {
            if event.unwrap().kind.is_access() {
                let _ = access.send(());
            }
        })
        .unwrap();
        witness.watch(folder.path(), RecursiveMode::NonRecursive).unwrap();
        let watcher = watch(vec![group(vec![FileSnapshot::read(&path).unwrap()], |_| {})]).unwrap();
        accesses.recv_timeout(TIMEOUT).unwrap();
        let more = std::iter::from_fn(|| accesses.recv_timeout(3 * DEBOUNCE).ok()).take(20).count();
        assert!(more < 20, "the watcher stops reading");
        drop(watcher);
    }

    #[test]
    fn missing_file_is_logged_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let log = folder.path().join("log");
        let gone = FileSnapshot { path: path.clone(), content: [].into() };
        let (wake, wakes) = sync_channel(4);
        // Each iteration of the loop receives two wake-ups, so four wake-ups cause two iterations.
        (0..4).for_each(|_| wake.send(()).unwrap());
        drop(wake);
        let lines = tracing_subscriber::fmt().with_writer(std::sync::Arc::new(fs::File::create(&log).unwrap()));
        tracing::subscriber::with_default(lines.finish(), || {
            let watcher = Arc::<AtomicBool>::default();
            watch_loop(vec![group(vec![gone], |_| panic!("nothing was read"))], &wakes, &Arc::downgrade(&watcher));
        });
        let log = fs::read_to_string(log).unwrap();
        assert_eq!(log.matches(path.to_str().unwrap()).count(), 1, "{log}");
    }
}
