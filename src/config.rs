//! The configuration files: their types, parsing, and errors.

pub mod diff;
pub mod environment;
pub mod error;
pub mod file;
pub mod file_schema;
pub(crate) mod foreign;
pub mod gateway;
pub mod include;
pub mod ratelimit_env;
mod route_defaults;
pub mod schema;
pub mod secrets;
pub mod shorthand;
pub mod sources;
pub mod spanned;
mod syntax;
pub mod tables;
pub mod unknown_keys;
pub mod value_path;
mod value_types;
pub mod yaml;
