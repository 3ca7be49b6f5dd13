//! `sluicegate explain`: what the gateway would do with a request, and why; nothing is sent, nothing is charged.

mod arguments;
mod neighbour;
mod page;

use std::io::{Write, stdout};
use std::path::Path;
use std::process::ExitCode;

pub(super) use arguments::Arguments;
use neighbour::Neighbour;

use super::BAD_CONFIG;
use crate::explain::Explainer;
use crate::explain::counters::{Counters, Remote, Unseen};
use crate::explain::facts::Explanation;
use crate::runtime::CompiledConfig;

/// So many other routes are explained without `--all`.
const NEAREST: usize = 10;

pub(super) fn explain(arguments: &Arguments, runtime: &CompiledConfig, config: &Path) -> anyhow::Result<ExitCode> {
    let asked = match arguments.asked(runtime) {
        Ok(asked) => asked,
        Err(error) => {
            anstream::eprintln!("sluicegate explain: {error}");
            return Ok(ExitCode::from(BAD_CONFIG));
        }
    };
    let with = |counters: &dyn Counters| {
        let routes = if arguments.all { usize::MAX } else { NEAREST };
        Explainer { runtime, counters, routes }.explain(&asked.request, &asked.peer)
    };
    let facts: Explanation = if arguments.offline {
        with(&Unseen("--offline".to_owned()))
    } else {
        match Remote::open(runtime)? {
            Some(remote) => with(&remote),
            None => with(&Neighbour::of(config, runtime)),
        }
    };
    if arguments.json {
        writeln!(stdout(), "{}", serde_json::to_string_pretty(&facts)?)?;
    } else {
        // Colours on a terminal only, and none where NO_COLOR asks for it.
        page::write(&facts, &mut anstream::stdout().lock())?;
    }
    Ok(ExitCode::SUCCESS)
}
