//! JSON of request bodies: values at JSON pointers and JSON-RPC messages, read in one pass. Without IO.

pub mod body;
pub mod mcp;
pub mod pointer;
pub mod rpc;
