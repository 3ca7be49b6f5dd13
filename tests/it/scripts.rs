//! The files in `lua/`: each file is valid Lua by itself, and `lua/generated/` contains the scripts that the gateway
//! composes.
//!
//! After a change in `lua/`, run `UPDATE_GENERATED=1 cargo test --test it scripts::` to rewrite `lua/generated/`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::redis::Redis;
use sluicegate::limiter::redis::script::{AlgorithmSet, ScriptVariant, script};

fn lua_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("lua")
}

/// Return the Lua files of a folder, sorted by name.
fn lua_files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> =
        entries.filter(|path| path.extension().is_some_and(|extension| extension == "lua")).collect();
    files.sort();
    files
}

/// Return the name and the text of each file in `lua/generated/`.
fn generated() -> Vec<(String, String)> {
    let named = |variant: ScriptVariant, counts_usage: bool| {
        let (name, driver) = match variant {
            ScriptVariant::Generic => ("generic".to_owned(), "generic"),
            ScriptVariant::Single => ("single".to_owned(), "single"),
            ScriptVariant::Small(limits) => (format!("small_{limits}"), "small"),
        };
        let (suffix, blocks) = if counts_usage { ("_usage", ", with usage") } else { ("", "") };
        let header = format!(
            "-- Composed from lua/{driver}.lua and all algorithms that it supports{blocks}. Do not edit:\n\
             -- UPDATE_GENERATED=1 cargo test --test it scripts::\n\n"
        );
        let source = &script(variant, AlgorithmSet::ALL.with_usage(counts_usage)).source;
        (format!("{name}{suffix}.lua"), header + source)
    };
    let both = |variant| [named(variant, false), named(variant, true)];
    ScriptVariant::ALL.into_iter().flat_map(both).collect()
}

#[test]
fn every_lua_file_parses_by_itself() {
    let server = Redis::start();
    let mut connection = server.connection();
    let lua_5_4 = mlua::Lua::new();
    let files = lua_files(&lua_folder());
    let names = files.iter().map(|file| file.file_name().unwrap().to_str().unwrap().to_owned());
    let texts = names.zip(files.iter().map(|file| fs::read_to_string(file).unwrap()));
    let mut parsed = 0;
    for (name, text) in texts.chain(generated()) {
        // SCRIPT LOAD compiles the script with Lua 5.1 and does not run it.
        let loaded = redis::cmd("SCRIPT").arg("LOAD").arg(&text).exec(&mut connection);
        loaded.unwrap_or_else(|error| panic!("lua/{name}: {error}"));
        lua_5_4.load(&text).into_function().unwrap_or_else(|error| panic!("lua/{name}: {error}"));
        parsed += 1;
    }
    // Three drivers and their states, six algorithms, six more scripts (overrides, fenced hashes, usage, quota events,
    // gateways and the deletion of states), and the generated scripts.
    assert_eq!(parsed, 4 + 6 + 6 + 2 * ScriptVariant::ALL.len(), "files in lua/: {files:?}");
}

#[test]
fn generated_scripts_are_up_to_date() {
    let folder = lua_folder().join("generated");
    let generated = generated();
    if std::env::var_os("UPDATE_GENERATED").is_some() {
        fs::create_dir_all(&folder).unwrap();
        lua_files(&folder).iter().for_each(|file| fs::remove_file(file).unwrap());
        generated.iter().for_each(|(name, text)| fs::write(folder.join(name), text).unwrap());
    }
    let committed: Vec<_> = lua_files(&folder).iter().map(|file| file.file_name().unwrap().to_owned()).collect();
    let mut names: Vec<_> = generated.iter().map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    assert_eq!(committed, names, "the files of lua/generated/");
    for (name, text) in generated {
        let committed = fs::read_to_string(folder.join(&name)).unwrap();
        assert!(
            committed == text,
            "lua/generated/{name} is not what the gateway composes; run `UPDATE_GENERATED=1 cargo test --test it scripts::`"
        );
    }
}

/// `make test-stores` runs the modules of its list on several servers.
#[test]
fn list_of_the_store_tests_is_complete() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/stores/stores.py");
    let binary = std::env::current_exe().unwrap();
    let output = Command::new("python3").arg("-B").arg(script).arg("--check").arg(binary).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
