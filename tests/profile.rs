//! What stands between cargo and rustc: a release is laid out by the profile, everything else is compiled as cargo says.

use std::path::Path;
use std::process::Command;

/// What rustc gets when cargo says this.
fn passed_on(said: &[&str], count_into: Option<&str>) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut command = Command::new(root.join(".cargo/rustc"));
    command.arg("echo").args(said).env_remove("COUNT_INTO").envs(count_into.map(|folder| ("COUNT_INTO", folder)));
    let output = command.output().expect("it runs");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().trim_end().to_owned()
}

#[test]
fn a_release_is_laid_out_by_the_profile_or_writes_one_and_nothing_else_changes() {
    let profile = Path::new(env!("CARGO_MANIFEST_DIR")).join(".cargo/release.profdata");
    // Of an indexed profile (llvm/ProfileData/InstrProf.h).
    assert!(std::fs::read(&profile).expect("the profile is there").starts_with(b"\xfflprofi\x81"));
    let release = ["--crate-name", "a b", "-C", "opt-level=3"];
    let said = format!("--crate-name a b -C opt-level=3 -Cprofile-use={}", profile.display());
    assert_eq!(passed_on(&release, None), said + " -Cllvm-args=-no-pgo-warn-mismatch");
    assert_eq!(passed_on(&release, Some("/counts")), "--crate-name a b -C opt-level=3 -Cprofile-generate=/counts");
    for said in [["-vV"].as_slice(), &["--crate-name", "a", "-C", "opt-level=1"], &["build.rs", "-C", "debuginfo=1"]] {
        assert_eq!(passed_on(said, None), said.join(" "));
        assert_eq!(passed_on(said, Some("/counts")), said.join(" "));
    }
}
