//! Tells the program what it was built from, for `sluicegate --version`.

use std::env;
use std::process::Command;

fn main() {
    let release = env::var("PROFILE").is_ok_and(|profile| profile == "release");
    // Development builds name no commit: each commit would compile everything again.
    let commit = if release { output("git", &["rev-parse", "--short=12", "HEAD"]) } else { None };
    let rustc = env::var("RUSTC").ok().and_then(|rustc| output(&rustc, &["--version"]));
    let flags = env::var("CARGO_ENCODED_RUSTFLAGS").unwrap_or_default();
    set("COMMIT", commit.as_deref().unwrap_or("unknown"));
    set("RUSTC_VERSION", rustc.as_deref().unwrap_or("unknown"));
    set("TARGET", &env::var("TARGET").unwrap_or_default());
    set("PGO", if flags.contains("-Cprofile-use") { "yes" } else { "no" });
    println!("cargo::rerun-if-changed=build.rs");
    if release && let Some(head) = output("git", &["rev-parse", "--git-path", "logs/HEAD"]) {
        println!("cargo::rerun-if-changed={head}");
    }
}

fn set(name: &str, value: &str) {
    println!("cargo::rustc-env=SLUICEGATE_{name}={value}");
}

/// The first line that a command prints, if it succeeds.
fn output(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.lines().next()?.to_owned())
}
