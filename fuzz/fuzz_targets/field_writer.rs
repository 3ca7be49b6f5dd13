//! `cargo +nightly fuzz run field_writer`
#![no_main]

#[path = "../targets/field_writer.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::run(data));
