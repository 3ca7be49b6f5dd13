//! `cargo +nightly fuzz run credentials`
#![no_main]

#[path = "../targets/credentials.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::run(data));
