//! `cargo +nightly fuzz run json_body`
#![no_main]

#[path = "../targets/json_body.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::run(data));
