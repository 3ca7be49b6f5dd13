//! `cargo +nightly fuzz run access_log`
#![no_main]

#[path = "../targets/access_log.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::run(data));
