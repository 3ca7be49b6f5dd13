//! What several commands use: loading the configuration, and exit codes.

use std::ffi::OsString;
use std::path::Path;

use annotate_snippets::{Level, Renderer};

use crate::config::error::ConfigError;
use crate::config::file::UnsetVariables;
use crate::snapshot::CompiledConfig;

/// Exit code for an invalid configuration.
pub(super) const EXIT_INVALID_CONFIG: u8 = 2;

/// Load the configuration.
pub(super) fn load(path: &Path) -> Result<CompiledConfig, ConfigError> {
    CompiledConfig::load(path, &env_var)
}

/// Load the configuration for a command that needs only the keys in `needed`. An unset environment variable in another
/// key is only a warning.
pub(super) fn load_for(path: &Path, needed: &[&str]) -> Result<CompiledConfig, ConfigError> {
    let (config, file) = CompiledConfig::load_with_source(path, &env_var, UnsetVariables::WarnExcept(needed))?;
    if !file.warnings.is_empty() {
        for warnings in file.sources.by_file(file.warnings) {
            anstream::eprintln!("{}", warnings.report(&Level::WARNING, &Renderer::styled()));
        }
    }
    Ok(config)
}

pub(super) fn env_var(name: &str) -> Option<OsString> {
    std::env::var_os(name)
}

pub(super) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let kind = error.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
    kind == Some(std::io::ErrorKind::BrokenPipe)
}
