//! HTTP as such: canonical paths, header rules, bodies, response fields. Knows no limits and no configuration.

pub mod activity;
pub mod body;
pub mod bounds;
pub mod budget;
pub mod fields;
pub mod flow;
pub mod headers;
pub mod host;
pub mod pace;
pub mod path;
pub mod reads;
pub mod response;
pub mod rules;
pub mod tunnel;
pub mod upgrade;
pub mod upload;
