//! `cargo +nightly fuzz run origins`
#![no_main]

#[path = "../targets/origins.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::run(data));
