//! `cargo +nightly fuzz run key_set`
#![no_main]

#[path = "../targets/key_set.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::run(data));
