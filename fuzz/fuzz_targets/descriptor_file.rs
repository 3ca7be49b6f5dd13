//! `cargo +nightly fuzz run descriptor_file`
#![no_main]

#[path = "../targets/descriptor_file.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::run(data));
