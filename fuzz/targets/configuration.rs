//! Loading a configuration never panics. Each file is accepted, or rejected with a report.

use sluicegate::snapshot::CompiledConfig;

thread_local! {
    static DIRECTORY: tempfile::TempDir = {
        let directory = tempfile::tempdir().expect("a folder");
        // Files that the example configurations refer to.
        for (name, text) in [
            ("consumers.toml", include_str!("../../consumers.toml")),
            ("jwks.json", include_str!("../../tests/certs/jwks.json")),
            // The user `u` with the password `p`, as `htpasswd` writes it.
            ("htpasswd", "u:$apr1$01234567$Hxhr8xh.ujGiqqlDGh50P/\n"),
            ("blocked.txt", "# networks\n192.0.2.0/24\n2001:db8::/32\n"),
        ] {
            std::fs::write(directory.path().join(name), text).expect("a file");
        }
        directory
    };
}

pub(crate) fn run(data: &[u8]) {
    DIRECTORY.with(|directory| {
        let path = directory.path().join("gateway.toml");
        std::fs::write(&path, data).expect("a file");
        if let Err(error) = CompiledConfig::load(&path, &|name| (name == "GIVEN").then(|| "127.0.0.1".into())) {
            let report = error.to_string();
            assert!(report.starts_with("error: "), "{report}");
        }
    });
}
