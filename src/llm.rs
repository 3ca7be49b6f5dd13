//! Token usage of LLM APIs: what a request may use, what its response has used, and what that costs. Without IO.

pub mod json_scanner;
pub mod provider;
pub mod request;
pub mod response;
pub mod usage;
pub mod weights;
