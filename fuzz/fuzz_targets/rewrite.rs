//! `cargo +nightly fuzz run rewrite`
#![no_main]

#[path = "../targets/rewrite.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::run(data));
