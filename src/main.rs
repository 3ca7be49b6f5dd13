//! Arguments in, exit code out; everything else is in the library.

use std::process::ExitCode;

use clap::Parser;
use sluicegate::cli::{self, Arguments};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    match cli::execute(&Arguments::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("sluicegate: {error}");
            ExitCode::FAILURE
        }
    }
}
