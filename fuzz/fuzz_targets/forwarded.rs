//! `cargo +nightly fuzz run forwarded`
#![no_main]

#[path = "../targets/forwarded.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::run(data));
