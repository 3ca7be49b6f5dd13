//! Reload of changed files: the configuration, and the keys, consumers and certificates that it names. If a file is
//! invalid, the gateway keeps using its previous content.

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use tracing::{info, warn};

use crate::app::reload::file_watcher::{FileGroup, FileWatcher, OnChange, watch};
use crate::config::file::FileSnapshot;
use crate::config::include::ConfigFiles;
use crate::identity::auth::ProviderKind;
use crate::identity::jwt::KeySet;
use crate::limiter::clock;
use crate::snapshot::CompiledConfig;
use crate::snapshot::current::{ConfigHandle, ReloadCause};

/// Watch the files of the active configuration until the returned value is dropped. Log and return `None` if a
/// directory cannot be watched.
pub(crate) fn watch_files(configuration: &Arc<ConfigHandle>) -> Option<FileWatcher> {
    let named = watched_files(configuration).into_iter().map(FileGroup::from);
    let watcher = watch(std::iter::once(configuration_files(configuration)).chain(named).collect());
    let watcher = watcher.map_err(|error| warn!(%error, "cannot watch files for changes: reload with SIGHUP"));
    watcher.ok()
}

/// Return the configuration file and the files that it includes. This group is the first one, because a successful
/// reload also reads the other files and replaces this watcher.
fn configuration_files(configuration: &Arc<ConfigHandle>) -> FileGroup {
    // The directories are part of the group: a new directory must be watched, even if it is empty.
    let all = |ConfigFiles { main, included, directories }| -> Vec<FileSnapshot> {
        let directories = directories.into_iter().map(|path| FileSnapshot { path, content: Vec::new() });
        std::iter::once(main).chain(included).chain(directories).collect()
    };
    let last = configuration.last_attempt();
    let path = last.main.path.clone();
    let directories = last.directories.clone();
    let read = move |_: &[FileSnapshot]| {
        let files = ConfigFiles::read(&path, &|name| std::env::var(name).ok());
        files.map(all).map_err(|error| (path.clone(), error))
    };
    let configuration = configuration.clone();
    let reload = move |files: &[FileSnapshot]| {
        if all(configuration.last_attempt()) != files {
            // Ignore the result, because the reload thread logs it.
            let _ = configuration.reload(ReloadCause::FileChanged).blocking_recv();
        }
    };
    FileGroup { files: all(last), read: Box::new(read), directories, on_change: Box::new(reload) }
}

/// Return the files that the active configuration names, in the groups that are reloaded together.
fn watched_files(configuration: &Arc<ConfigHandle>) -> Vec<(Vec<FileSnapshot>, OnChange)> {
    let config = &configuration.active().config;
    let mut files: Vec<(Vec<FileSnapshot>, OnChange)> = Vec::new();
    for (index, file) in &config.auth.jwks_files {
        let config = config.clone();
        let index = *index;
        let reload = move |files: &[FileSnapshot]| {
            let ProviderKind::Jwt(verifier) = &config.auth.providers[index].kind else { return };
            let keys = KeySet::parse(&files[0].content).map(|keys| verifier.keys.store(Some(Arc::new(keys))));
            log_result(&files[0], keys);
        };
        files.push((vec![file.clone()], Box::new(reload)));
    }
    for (index, file) in &config.auth.users_files {
        let config = config.clone();
        let index = *index;
        let reload = move |files: &[FileSnapshot]| {
            let ProviderKind::Basic(basic) = &config.auth.providers[index].kind else { return };
            log_result(&files[0], basic.reload_users(&files[0]));
        };
        files.push((vec![file.clone()], Box::new(reload)));
    }
    for (index, consumers) in config.auth.consumers_files.iter().enumerate() {
        let config = config.clone();
        let reload = move |files: &[FileSnapshot]| {
            let read = config.reload_consumers(index, &files[0].content, &|name| std::env::var(name).ok());
            let is_reloaded = read.is_ok();
            log_result(&files[0], read);
            for (_, warning) in config.auth.key_warnings(Duration::from_micros(clock::unix_us())) {
                if is_reloaded {
                    warn!("{warning}");
                }
            }
        };
        files.push((vec![consumers.file.clone()], Box::new(reload)));
    }
    for (index, networks) in config.network_files.iter().enumerate() {
        let config = config.clone();
        let reload = move |files: &[FileSnapshot]| {
            log_result(&files[0], config.reload_networks(index, &files[0].content));
        };
        files.push((vec![networks.file.clone()], Box::new(reload)));
    }
    for (index, tls) in config.upstream_tls.iter().enumerate().filter(|(_, tls)| !tls.files().is_empty()) {
        let config = config.clone();
        let reload = move |files: &[FileSnapshot]| {
            let now = Duration::from_micros(clock::unix_us());
            let read = config.upstream_tls[index].reload(files, now);
            let file = read.as_ref().map_or_else(|(file, _)| *file, |()| &files[0]);
            log_result(file, read.map_err(|(_, error)| error));
        };
        files.push((tls.files(), Box::new(reload)));
    }
    for index in 0..config.listeners.len() {
        watch_listener_tls(config, index, &mut files);
    }
    files
}

/// Add the certificate and CA files of a listener.
fn watch_listener_tls(config: &Arc<CompiledConfig>, index: usize, files: &mut Vec<(Vec<FileSnapshot>, OnChange)>) {
    let Some(tls) = &config.listeners[index].tls else { return };
    for (certificate_index, pair) in tls.certificates.iter().enumerate() {
        let config = config.clone();
        let reload = move |files: &[FileSnapshot]| {
            let Some(tls) = &config.listeners[index].tls else { return };
            let now = Duration::from_micros(clock::unix_us());
            let read = tls.reload_certificate(certificate_index, &files[0].content, &files[1].content, now);
            log_result(&files[0], read);
        };
        files.push((pair.to_vec(), Box::new(reload)));
    }
    if let Some((file, auth)) = &tls.client_ca {
        let config = config.clone();
        let auth = *auth;
        let reload = move |files: &[FileSnapshot]| {
            let Some(tls) = &config.listeners[index].tls else { return };
            let read = tls.reload_client_ca(&files[0].content, auth);
            log_result(&files[0], read);
        };
        files.push((vec![file.clone()], Box::new(reload)));
    }
}

fn log_result(file: &FileSnapshot, result: Result<(), impl Display>) {
    let file = file.path.display();
    match result {
        Ok(()) => info!(%file, "file reloaded"),
        Err(error) => warn!(%file, %error, "cannot reload the file: its previous content stays in force"),
    }
}
