//! A configuration is taken or refused with a report; it never panics, whatever the file says.

use sluicegate::runtime::Runtime;

thread_local! {
    static DIRECTORY: tempfile::TempDir = tempfile::tempdir().expect("a folder");
}

pub(crate) fn run(data: &[u8]) {
    DIRECTORY.with(|directory| {
        let path = directory.path().join("gateway.toml");
        std::fs::write(&path, data).expect("a file");
        if let Err(error) = Runtime::load(&path, &|name| (name == "GIVEN").then(|| "127.0.0.1".to_owned())) {
            let report = error.to_string();
            assert!(report.starts_with("error") && report.contains("gateway.toml"), "{report}");
        }
    });
}
