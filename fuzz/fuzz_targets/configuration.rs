//! `cargo +nightly fuzz run configuration`
#![no_main]

#[path = "../targets/configuration.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::run(data));
