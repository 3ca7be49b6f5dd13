//! `cargo +nightly fuzz run llm`
#![no_main]

#[path = "../targets/llm.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::run(data));
