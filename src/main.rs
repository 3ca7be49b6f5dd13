//! The `sluicegate` binary: parses the arguments, runs the command and returns its exit code.

use std::io::{Write, stderr};
use std::process::ExitCode;

use sluicegate::cli;
use sluicegate::cli::Arguments;

// Link mimalloc, whose `malloc` replaces the one of libc. The default allocator of Rust calls `malloc`.
use mimalloc as _;

fn main() -> ExitCode {
    match cli::execute(&Arguments::from_command_line()) {
        Ok(code) => code,
        Err(error) => {
            // If standard error is closed, only the exit code reports the error.
            let _ = writeln!(stderr(), "sluicegate: {error}");
            ExitCode::FAILURE
        }
    }
}
