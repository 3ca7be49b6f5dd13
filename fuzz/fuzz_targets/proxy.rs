//! `cargo +nightly fuzz run proxy`
#![no_main]

#[path = "../targets/proxy.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::run(data));
