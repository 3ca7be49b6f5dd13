//! `cargo +nightly fuzz run ratelimit_call`
#![no_main]

#[path = "../targets/ratelimit_call.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::run(data));
