//! Generated files and texts: the configurations that `sluicegate init` writes, shell completions, man pages, and the
//! examples in the help.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::support::gateway::{Gateway, binary};
use crate::support::redis::free_port;

const SITUATIONS: [&str; 4] = ["single-api", "plans", "cdn", "llm"];

fn init(folder: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    let output = binary().current_dir(folder).arg("init").args(arguments).output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn init_writes_configurations_that_serve_without_warnings() {
    for situation in SITUATIONS {
        let directory = tempfile::tempdir().unwrap();
        let option = if situation == "llm" { "--for" } else { "--template" };
        let (code, said) = init(directory.path(), &[option, situation]);
        assert_eq!(code, Some(0), "{situation}: {said}");
        let check = binary().current_dir(directory.path()).args(["check", "--strict", "--offline"]).output().unwrap();
        assert_eq!(check.status.code(), Some(0), "{situation}: {}", String::from_utf8_lossy(&check.stdout));
        let path = directory.path().join("gateway.toml");
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.lines().all(|line| line.len() <= 120), "{situation}");
        let addresses = ["127.0.0.1:8080", "0.0.0.0:8080", "127.0.0.1:9180"];
        let on_free_ports = addresses.iter().fold(text.clone(), |text, address| text.replace(address, "127.0.0.1:0"));
        std::fs::write(&path, on_free_ports).unwrap();
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
        assert!(
            code == Some(1) && said.contains(&format!("the file {there} exists already: overwrite it with --force")),
            "{said}"
        );
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

/// If the reader closes the pipe early, the commands print no error message.
#[test]
fn closed_standard_output_is_no_error() {
    for command in ["schema", "man", "completions zsh"] {
        let program = PathBuf::from(binary().get_program());
        let script = format!("{{ '{}' {command}; echo $? >&2; }} | true", program.display());
        let output = Command::new("sh").args(["-c", &script]).output().unwrap();
        assert_eq!(String::from_utf8(output.stderr).unwrap(), "0\n", "{command}");
    }
}

/// Return each command with its man page.
fn man_pages() -> Vec<(Vec<String>, String)> {
    let folder = tempfile::tempdir().unwrap();
    let output = binary().arg("man").arg(folder.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let files = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
    let mut pages: Vec<_> = files
        .map(|path| {
            let command = path.file_stem().unwrap().to_str().unwrap().split('-').skip(1).map(str::to_owned).collect();
            (command, std::fs::read_to_string(&path).unwrap())
        })
        .collect();
    pages.sort();
    pages
}

#[test]
fn man_pages_have_all_sections() {
    let pages = man_pages();
    assert!(pages.len() > 20, "{} pages", pages.len());
    for (command, page) in pages {
        // The text before the first section is the title and the roff preamble.
        let sections: Vec<_> = page.split("\n.SH ").skip(1).map(|section| section.split_once('\n').unwrap()).collect();
        let mut headings: Vec<_> = sections.iter().map(|(heading, _)| heading.trim_matches('"')).collect();
        headings.retain(|heading| *heading != "COMMANDS");
        let expected = [
            "NAME",
            "SYNOPSIS",
            "DESCRIPTION",
            "OPTIONS",
            "EXIT STATUS",
            "FILES",
            "ENVIRONMENT",
            "EXAMPLES",
            "SEE ALSO",
        ];
        assert_eq!(headings, expected, "{command:?}");
        for (heading, text) in sections {
            let has_text = text.lines().any(|line| !line.is_empty() && !line.starts_with('.'));
            assert!(has_text, "{command:?}: {heading} is empty");
        }
        assert!(page.is_ascii(), "{command:?}: groff reads other characters as Latin-1");
    }
}

/// Return the examples in the help of a command.
fn examples(command: &[String]) -> Vec<String> {
    let help = |flag| String::from_utf8(binary().args(command).arg(flag).output().unwrap().stdout).unwrap();
    let (long, short) = (help("--help"), help("-h"));
    let (_, examples) =
        long.split_once("\nExamples:\n").unwrap_or_else(|| panic!("{command:?} has no examples: {long}"));
    assert!(short.ends_with(examples), "{command:?}: {short}");
    examples.lines().map(|line| line.trim().to_owned()).collect()
}

/// Return a shell command that runs `script` in the directory and finds the binary under test.
fn shell(directory: &Path, script: &str) -> Command {
    let binaries = PathBuf::from(binary().get_program()).parent().unwrap().to_owned();
    let others = std::env::var_os("PATH").unwrap();
    let path = std::env::join_paths([binaries].into_iter().chain(std::env::split_paths(&others))).unwrap();
    let mut command = Command::new("sh");
    command.args(["-c", script]).current_dir(directory).env("PATH", path).env("KEY", "demo-key");
    command.env("SLUICEGATE_ADMIN_TOKEN", "open-sesame").env_remove("SLUICEGATE_CONFIG");
    command
}

/// The examples in the help use the names of the limits, the consumer and the files of this test.
#[test]
fn examples_of_the_help_work() {
    let port = free_port();
    let config = format!(
        "[admin]\naddress = \"127.0.0.1:{port}\"\ntoken = \"open-sesame\"\nsocket = \"admin.sock\"\n[client_ip]\ntrusted_proxies = []\n\
         [auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\n[limit.per-ip]\nby = \"ip\"\nquota = \"100/min\"\n\
         [limit.rate]\nby = \"api-key\"\nquota = \"10/s\"\nusage = true\ntiers = {{ pro = {{ quota = \"100/s\" }} }}\n\
         [[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nidentify = [\"keys\"]\nlimits = [\"per-ip\", \"rate\"]\nrespond = {{ status = 200 }}\n\
         [acme]\naccept_terms = true\ndirectory = \"https://127.0.0.1:1/\"\n[[listener]]\naddress = \"127.0.0.1:0\"\n\
         [[listener]]\naddress = \"127.0.0.1:0\"\ntls = {{ acme = true, names = [\"localhost\"] }}\n"
    );
    // The consumer has two keys, so that one is left after the example of `key revoke`. The admin API lists only
    // consumers with keys.
    let consumers =
        format!("[[consumer]]\nname = \"acme\"\nkeys = [\"sha256:2f9c41d07ab3{:052}\", \"sha256:{:064}\"]\n", 0, 1);
    let files = [
        ("consumers.toml", &*consumers),
        ("access.log", include_str!("../logs/common.log")),
        ("key.txt", "demo-key\n"),
        ("nginx.conf", "server { listen 8080; return 404 gone; }\n"),
        ("prices.json", include_str!("../../examples/model_prices.json")),
    ];
    let gateway = Gateway::start_with(&config, &files);
    let admin = gateway.admin().to_string();
    let mut count = 0;
    for (command, _) in man_pages() {
        let examples = examples(&command);
        assert!((2..=4).contains(&examples.len()), "{command:?}: {examples:?}");
        // These examples write a new configuration, so they run in an empty directory.
        let empty = tempfile::tempdir().unwrap();
        let writes_first = command.is_empty() || command == ["init"];
        let directory = if writes_first { empty.path() } else { gateway.directory() };
        for example in examples {
            assert!(example.len() <= 98, "the help would wrap {example}");
            count += 1;
            if example.contains("sluicegate run") {
                let served = "[[route]]\nname = \"r\"\npath = \"/\"\nrespond = { status = 200 }\n";
                let mut started =
                    Gateway::start_by(served, |path| shell(path.parent().unwrap(), &format!("exec env {example}")));
                assert_eq!(started.get("/").status, 200, "{example}");
                started.terminate();
                assert_eq!(started.wait().code(), Some(0), "{example}");
                continue;
            }
            let script = example.replace("127.0.0.1:9180", &admin).replace("/run/sluicegate/", "./");
            // `check` warns that the totals of `usage` are only in memory, so run it without `--strict`.
            let script = script.replace("api.example.com", "localhost").replace("check --strict", "check");
            // tests/it/drop_in.rs starts the service, which has fixed ports by default.
            let starts_service = script.ends_with("sluicegate ratelimit");
            let script = script + if starts_service { " --print" } else { "" };
            // This gateway never becomes ready, because its ACME CA does not exist. So probe only whether it is live.
            let is_ready_check = script.starts_with("sluicegate probe") && !script.contains("--live");
            let script = script + if is_ready_check { " --live" } else { "" };
            let script = format!("timeout 60 sh -c '{}'", script.replace('\'', r"'\''"));
            let Output { status, stderr, .. } = shell(directory, &script).output().unwrap();
            assert!(status.success(), "{example}: {}", String::from_utf8_lossy(&stderr));
        }
    }
    assert!(count > 40, "{count} examples");
}
