//! `cargo +nightly fuzz run htpasswd`
#![no_main]

#[path = "../targets/htpasswd.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::run(data));
