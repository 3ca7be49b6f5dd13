//! Faults of the operating system: the clock is set back, inotify is exhausted, a directory is replaced.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use jiff::fmt::rfc2822;
use sluicegate::clock::unix_us;

use crate::support::eventually;
use crate::support::gateway::{Gateway, binary};
use crate::support::redis::Redis;
use crate::support::reload::says;

/// Compile the library that replaces functions of libc.
fn shim(directory: &Path) -> PathBuf {
    let library = directory.join("shim.so");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/shim.c");
    let compiled = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(source).status().unwrap();
    assert!(compiled.success());
    library
}

#[test]
fn date_follows_a_clock_that_is_set_back() {
    let folder = tempfile::tempdir().unwrap();
    let library = shim(folder.path());
    let offset = folder.path().join("offset");
    let set = |seconds: i64| {
        use std::os::unix::fs::FileExt;
        let file = std::fs::OpenOptions::new().write(true).create(true).truncate(false).open(&offset).unwrap();
        file.write_all_at(&seconds.to_ne_bytes(), 0).unwrap();
    };
    set(0);
    let gateway = Gateway::start_by(&says("x"), |config| {
        let mut command = binary();
        command.arg("--config").arg(config).env("LD_PRELOAD", &library).env("SHIM_CLOCK", &offset);
        command
    });
    let mut client = gateway.client();
    // Seconds by which `Date` is behind the clock of this process.
    let mut behind = || {
        let reply = client.get("/says");
        let date = rfc2822::parse(reply.header("date").unwrap()).unwrap().timestamp().as_second();
        (unix_us() / 1_000_000) as i64 - date
    };
    assert!((0..3).contains(&behind()));
    for back in [3600, 7200] {
        set(-back);
        eventually("the date follows", || (back..back + 3).contains(&behind()));
    }
    set(0);
    eventually("the date follows the clock forward", || (0..3).contains(&behind()));
}

#[test]
fn changes_are_noticed_without_inotify() {
    let folder = tempfile::tempdir().unwrap();
    let library = shim(folder.path());
    let gateway = Gateway::start_by(&says("one"), |config| {
        let mut command = binary();
        command.arg("--config").arg(config).env("LD_PRELOAD", &library).env("SHIM_NO_INOTIFY", "1");
        command
    });
    assert!(gateway.log().contains("cannot watch files"), "{}", gateway.log());
    gateway.put(&says("two"));
    eventually("the file is compared", || gateway.get("/says").text() == "two");
}

#[test]
fn change_behind_a_replaced_directory_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let listener = "[log]\naccess = \"off\"\n[[listener]]\naddress = \"127.0.0.1:0\"\n";
    let write = |version: &str, body: &str| {
        std::fs::write(path(version).join("gateway.toml"), format!("{listener}{}", says(body))).unwrap();
    };
    for version in ["v1", "v2"] {
        std::fs::create_dir(path(version)).unwrap();
        write(version, version);
    }
    symlink("v1", path("current")).unwrap();
    let gateway = Gateway::start_by("", |_| {
        let mut command = binary();
        command.arg("--config").arg(path("current").join("gateway.toml"));
        command
    });
    assert_eq!(gateway.get("/says").text(), "v1");
    symlink("v2", path("next")).unwrap();
    std::fs::rename(path("next"), path("current")).unwrap();
    eventually("the new directory is read", || gateway.get("/says").text() == "v2");
    write("v2", "v3");
    eventually("the new directory is watched", || gateway.get("/says").text() == "v3");
}

#[test]
fn redis_without_free_clients_or_with_renamed_commands_is_diagnosed() {
    let folder = tempfile::tempdir().unwrap();
    let config = |redis: &Redis| {
        format!("{}[limit.l]\nby = \"ip\"\nquota = \"3/day\"\n{}limits = [\"l\"]\n", redis.store(), says("x"))
    };
    let check = |redis: &Redis| {
        let path = folder.path().join("gateway.toml");
        std::fs::write(&path, format!("[[listener]]\naddress = \"127.0.0.1:0\"\n{}", config(redis))).unwrap();
        let output = binary().arg("check").arg("--config").arg(&path).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let full = Redis::start_as(&["--maxclients", "1"]);
    // The connection of this test is the only one that Redis permits.
    let _held = full.connection();
    eventually("it is diagnosed", || check(&full).contains("raise maxclients of Redis"));
    let renamed = Redis::start_as(&["--rename-command", "SET", ""]);
    let gateway = Gateway::start(&config(&renamed));
    eventually("it is diagnosed", || {
        gateway.get("/says");
        gateway.log().contains("Redis does not know a command that the gateway's Lua scripts call")
    });
    assert!(!gateway.log().contains("corrupt"), "{}", gateway.log());
}
