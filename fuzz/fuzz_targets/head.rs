//! `cargo +nightly fuzz run head`
#![no_main]

#[path = "../targets/head.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::run(data));
