//! Configurations: each bad file is refused with the message that it states, each good one is accepted.

mod support;

use std::path::{Path, PathBuf};

use support::gateway::binary;

fn files(folder: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/config").join(folder);
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "toml"));
    files.sort();
    files
}

fn check(path: &Path) -> (Option<i32>, String, String) {
    let output = binary().arg("check").arg("--config").arg(path).env("GIVEN", "127.0.0.1").output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// The lines `#! …` of a file are what the report must contain, in this order.
#[test]
fn bad_files_are_refused_with_their_reason() {
    let files = files("invalid");
    assert!(files.len() >= 30, "{} files found", files.len());
    for path in files {
        let text = std::fs::read_to_string(&path).unwrap();
        let (code, _, report) = check(&path);
        assert_eq!(code, Some(2), "{}: exit code\n{report}", path.display());
        let mut rest = report.as_str();
        let mut expectations = 0;
        for expected in text.lines().filter_map(|line| line.strip_prefix("#! ")) {
            let Some(at) = rest.find(expected) else {
                panic!("{}: the report lacks, after what came before: {expected}\n\n{report}", path.display())
            };
            rest = &rest[at + expected.len()..];
            expectations += 1;
        }
        assert!(expectations > 0, "{} states no message", path.display());
    }
}

#[test]
fn good_files_are_accepted() {
    let files = files("valid");
    assert!(files.len() >= 3, "{} files found", files.len());
    for path in files {
        let (code, out, report) = check(&path);
        assert_eq!((code, report.as_str()), (Some(0), ""), "{}", path.display());
        assert!(out.contains("fine"), "{out}");
    }
}

#[test]
fn the_shipped_file_is_accepted() {
    let (code, out, report) = check(&Path::new(env!("CARGO_MANIFEST_DIR")).join("gateway.toml"));
    assert_eq!((code, report.as_str()), (Some(0), ""));
    assert!(out.contains("3 routes, 3 limits"), "{out}");
    for guarantee in [
        "per-ip: at most 19 in any 1 s, 10 at once",
        "per-key: at most 100 in any 60 s, 100 at once",
        "hourly: at most 2000 in any 3600 s, 1000 at once",
    ] {
        assert!(out.contains(guarantee), "{guarantee} is missing in\n{out}");
    }
}

#[test]
fn a_file_that_cannot_be_used_gets_one_clear_message() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = directory.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    for (path, expected) in [
        (directory.path().join("none.toml"), "cannot be read: No such file"),
        (directory.path().to_owned(), "cannot be read: Is a directory"),
        (write("latin1.toml", b"# caf\xe9"), "the file must be UTF-8"),
        (write("broken.toml", b"[server\nworkers = 1\n"), "broken.toml:1:8"),
        (write("type.toml", b"[server]\nworkers = \"four\"\n"), "type.toml:2:11"),
        (write("empty.toml", b""), "there is no [[listener]]"),
    ] {
        let (code, _, report) = check(&path);
        assert_eq!(code, Some(2), "{}", path.display());
        assert!(report.contains(expected), "{}: {report}", path.display());
        let run = binary().arg("--config").arg(&path).output().unwrap();
        assert_eq!(run.status.code(), Some(2), "run refuses what check refuses: {}", path.display());
    }
}

#[test]
fn a_limit_that_nothing_uses_is_a_warning() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("gateway.toml");
    let used = "[[listener]]\naddress = \"127.0.0.1:0\"\n[limit.used]\nby = \"ip\"\nquota = \"1/s\"\n\
                [[route]]\nname = \"r\"\npath = \"/\"\nrespond = { status = 200 }\nlimits = [\"used\"]\n";
    std::fs::write(&path, format!("{used}[limit.idle]\nby = \"ip\"\nquota = \"1/s\"\n")).unwrap();
    let (code, out, _) = check(&path);
    assert_eq!(code, Some(0));
    assert!(out.contains("warning: no route uses `idle`") && !out.contains("uses `used`"), "{out}");
}

#[test]
fn unset_variables_and_bad_consumers_are_named() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(
        directory.path().join("people.toml"),
        "[[consumer]]\nname = \"a\"\nkeys = [\"secret-key\"]\ntier = \"pro\"\n[[consumer]]\nname = \"a\"\nnick = 1\n[[consumer]]\n",
    )
    .unwrap();
    let path = directory.path().join("gateway.toml");
    std::fs::write(
        &path,
        "[[listener]]\naddress = \"${NOT_GIVEN}:0\"\n[api_key]\nconsumers = \"people.toml\"\n\
         [[route]]\nname = \"r\"\npath = \"/\"\nrespond = { status = 200 }\n",
    )
    .unwrap();
    let (code, _, report) = check(&path);
    assert_eq!(code, Some(2));
    for expected in [
        "the environment has no `NOT_GIVEN`",
        "this is not the hash of a key",
        "people.toml:3:9",
        "no limit has a tier `pro`",
        "a second consumer `a`",
        "unknown key `nick`",
        "a consumer needs a `name`",
    ] {
        assert!(report.contains(expected), "{expected} is missing in\n{report}");
    }
}
