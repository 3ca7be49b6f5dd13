//! `cargo +nightly fuzz run authorization_call`
#![no_main]

#[path = "../targets/authorization_call.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::run(data));
