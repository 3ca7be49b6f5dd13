//! A configuration is taken or refused with a report; it never panics, whatever the file says.

use sluicegate::snapshot::CompiledConfig;

thread_local! {
    static DIRECTORY: tempfile::TempDir = {
        let directory = tempfile::tempdir().expect("a folder");
        // What the shipped configuration names.
        std::fs::write(directory.path().join("consumers.toml"), include_str!("../../consumers.toml")).expect("a file");
        directory
    };
}

pub(crate) fn run(data: &[u8]) {
    DIRECTORY.with(|directory| {
        let path = directory.path().join("gateway.toml");
        std::fs::write(&path, data).expect("a file");
        if let Err(error) = CompiledConfig::load(&path, &|name| (name == "GIVEN").then(|| "127.0.0.1".to_owned())) {
            let report = error.to_string();
            assert!(report.starts_with("error: "), "{report}");
        }
    });
}
