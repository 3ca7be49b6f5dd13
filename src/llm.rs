//! Token usage of LLM APIs: the tokens that a request may use, the tokens that its response has used, and their cost.
//! Without IO.

pub mod json_scanner;
pub mod provider;
pub mod request;
pub mod response;
pub mod usage;
pub mod weights;
