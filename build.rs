//! Build script: sets the commit, compiler, target and PGO flag for `sluicegate --version`.

use std::env;
use std::process::Command;

fn main() {
    let release = env::var("PROFILE").is_ok_and(|profile| profile == "release");
    // Release builds only: otherwise each commit would recompile the crate in development.
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

/// The first line of the output of a command. None if the command fails.
fn output(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.lines().next()?.to_owned())
}
