//! `cargo +nightly fuzz run canonical_path`
#![no_main]

#[path = "../targets/canonical_path.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::run(data));
