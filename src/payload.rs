//! Payloads: what the bodies of requests and responses say. Without IO.

/// JSON of request bodies: values at pointers and JSON-RPC messages, read in one pass.
pub mod json {
    pub mod body;
    pub mod rpc;
}

/// Token usage of LLM APIs: what a request may use, what its response has used, and what that costs.
pub mod llm {
    pub mod json_scanner;
    pub mod request;
    pub mod response;
    pub mod usage;
}
