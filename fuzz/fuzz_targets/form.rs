//! `cargo +nightly fuzz run form`
#![no_main]

#[path = "../targets/form.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::run(data));
