//! `init`, completions and man pages: their output works.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::gateway::{Gateway, binary};

const SITUATIONS: [&str; 4] = ["single-api", "plans", "cdn", "llm"];

fn init(folder: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    let output = binary().current_dir(folder).arg("init").args(arguments).output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn init_writes_configurations_that_serve_without_warnings() {
    for situation in SITUATIONS {
        let directory = tempfile::tempdir().unwrap();
        let (code, said) = init(directory.path(), &["--template", situation]);
        assert_eq!(code, Some(0), "{situation}: {said}");
        let check = binary().current_dir(directory.path()).args(["check", "--strict"]).output().unwrap();
        assert_eq!(check.status.code(), Some(0), "{situation}: {}", String::from_utf8_lossy(&check.stdout));
        let path = directory.path().join("gateway.toml");
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.lines().all(|line| line.len() <= 120), "{situation}");
        std::fs::write(&path, text.replace("127.0.0.1:8080", "127.0.0.1:0").replace("0.0.0.0:8080", "127.0.0.1:0"))
            .unwrap();
        let has_keys = text.contains("consumers = ");
        let secret = if has_keys {
            let new = ["key", "new", "--consumer", "acme", "--create", "--tier", "free"];
            let output = binary().current_dir(directory.path()).args(new).output().unwrap();
            assert!(output.status.success(), "{situation}: {}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8(output.stdout).unwrap()
        } else {
            String::new()
        };
        let gateway = Gateway::start_file(&path);
        let answer = gateway.client().get_with("/ping", &[("x-api-key", secret.trim())]);
        assert_eq!((answer.status, answer.text()), (200, "pong\n"), "{situation}");
        assert_eq!(gateway.get("/ping").status, if has_keys { 401 } else { 200 }, "{situation}");
    }
}

#[test]
fn init_overwrites_files_with_force_only() {
    for (situation, there) in [("single-api", "gateway.toml"), ("plans", "consumers.toml")] {
        let directory = tempfile::tempdir().unwrap();
        let mine = directory.path().join(there);
        std::fs::write(&mine, "# mine\n").unwrap();
        let (code, said) = init(directory.path(), &["--template", situation]);
        assert!(code == Some(1) && said.contains(&format!("{there} exists already: use --force")), "{said}");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1, "nothing is written");
        assert_eq!(std::fs::read_to_string(&mine).unwrap(), "# mine\n");
        assert_eq!(init(directory.path(), &["--template", situation, "--force"]).0, Some(0));
        assert_ne!(std::fs::read_to_string(&mine).unwrap(), "# mine\n");
    }
}

#[test]
fn completions_and_man_pages_have_all_commands() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let output = binary().args(["completions", shell]).output().unwrap();
        let script = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && script.contains("completions") && script.contains("strict"), "{shell}");
    }
    let page = String::from_utf8(binary().arg("man").output().unwrap().stdout).unwrap();
    assert!(page.contains(".TH sluicegate 1") && page.contains("sluicegate\\-check(1)"), "{page}");
}

/// A reader that closes standard output early causes no error message.
#[test]
fn closed_standard_output_is_no_error() {
    for command in ["schema", "man", "completions zsh"] {
        let program = PathBuf::from(binary().get_program());
        let script = format!("{{ '{}' {command}; echo $? >&2; }} | true", program.display());
        let output = Command::new("sh").args(["-c", &script]).output().unwrap();
        assert_eq!(String::from_utf8(output.stderr).unwrap(), "0\n", "{command}");
    }
}
