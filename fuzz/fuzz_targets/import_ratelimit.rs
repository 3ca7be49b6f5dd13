//! `cargo +nightly fuzz run import_ratelimit`
#![no_main]

#[path = "../targets/import.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::ratelimit(data));
