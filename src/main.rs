//! Arguments in, exit code out; everything else is in the library.

use std::io::{Write, stderr};
use std::process::ExitCode;

use clap::Parser;

use sluicegate::cli;
use sluicegate::cli::Arguments;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    match cli::execute(&Arguments::parse()) {
        Ok(code) => code,
        Err(error) => {
            // Where standard error is closed, the exit code says it all the same.
            let _ = writeln!(stderr(), "sluicegate: {error}");
            ExitCode::FAILURE
        }
    }
}
