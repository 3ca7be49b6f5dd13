//! `cargo +nightly fuzz run import_traefik`
#![no_main]

#[path = "../targets/import.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::traefik(data));
