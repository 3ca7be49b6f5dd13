//! YAML files of envoyproxy/ratelimit are accepted, or rejected with a report of the file.

use sluicegate::snapshot::CompiledConfig;

const CONFIGURATION: &str = "[[listener]]\naddress = \"127.0.0.1:0\"\nprotocol = \"ratelimit\"\n\
                             [ratelimit]\nconfiguration = \"edge.yaml\"\nmerge_domains = true\n";

thread_local! {
    static DIRECTORY: tempfile::TempDir = {
        let directory = tempfile::tempdir().expect("a folder");
        std::fs::write(directory.path().join("gateway.toml"), CONFIGURATION).expect("a file");
        directory
    };
}

pub(crate) fn run(data: &[u8]) {
    DIRECTORY.with(|directory| {
        std::fs::write(directory.path().join("edge.yaml"), data).expect("a file");
        match CompiledConfig::load(&directory.path().join("gateway.toml"), &|_| None) {
            Ok(config) => assert!(config.descriptors.rules.len() <= 2 * data.len() + 2, "each rule has a text"),
            Err(error) => {
                let report = error.to_string();
                assert!(report.starts_with("error: ") && report.contains("edge.yaml"), "{report}");
            }
        }
    });
}
