//! `cargo +nightly fuzz run conditions`
#![no_main]

#[path = "../targets/conditions.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::run(data));
