//! `sluicegate explain`: what the gateway would do with a request, and why; nothing is sent, nothing is charged.

mod arguments;
mod neighbour;
mod page;

use std::io::{Write, stdout};
use std::path::Path;
use std::process::ExitCode;

pub(super) use arguments::Arguments;
use neighbour::AdminCounters;

use super::EXIT_INVALID_CONFIG;
use crate::explain::Explainer;
use crate::explain::counters::{Counters, CountersUnavailable, RedisCounters};
use crate::explain::facts::Explanation;
use crate::runtime::CompiledConfig;

/// So many other routes are explained without `--all`.
const MAX_OTHER_ROUTES: usize = 10;

pub(super) fn run(arguments: &Arguments, config: &CompiledConfig, config_path: &Path) -> anyhow::Result<ExitCode> {
    let client_request = match arguments.to_request(config) {
        Ok(client_request) => client_request,
        Err(error) => {
            anstream::eprintln!("sluicegate explain: {error}");
            return Ok(ExitCode::from(EXIT_INVALID_CONFIG));
        }
    };
    let explain_with = |counters: &dyn Counters| {
        let routes = if arguments.all { usize::MAX } else { MAX_OTHER_ROUTES };
        Explainer { config, counters, max_other_routes: routes }.explain(&client_request.request, &client_request.peer)
    };
    let explanation: Explanation = if arguments.offline {
        explain_with(&CountersUnavailable("--offline".to_owned()))
    } else {
        match RedisCounters::open(config)? {
            Some(redis) => explain_with(&redis),
            None => explain_with(&AdminCounters::open(config_path, config)),
        }
    };
    if arguments.json {
        writeln!(stdout(), "{}", serde_json::to_string_pretty(&explanation)?)?;
    } else {
        // Colours on a terminal only, and none where NO_COLOR asks for it.
        page::write(&explanation, &mut anstream::stdout().lock())?;
    }
    Ok(ExitCode::SUCCESS)
}
