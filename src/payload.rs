//! Parsers for the bodies of requests and responses. The parsers perform no I/O.

/// JSON of request bodies: values at pointers and JSON-RPC messages, read in one pass.
pub mod json {
    pub mod body;
    pub mod names;
    pub mod rpc;
}

pub mod envoy;
pub mod ext_authz;

pub mod form;
pub mod mcp_tools;
pub mod wildcard;
pub mod xds;

/// Token usage of LLM APIs: the estimated usage of a request, the usage of its response, and the cost of tokens.
pub mod llm {
    mod event_frames;
    pub mod image;
    pub mod json_scanner;
    pub mod learned_output;
    pub mod provider;
    pub mod request;
    pub mod response;
    pub mod text_tokens;
    pub mod usage;
}
