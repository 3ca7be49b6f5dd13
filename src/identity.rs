//! Identities of requests: the credentials that providers verify, the client address, and the other attributes by which
//! limits distinguish clients.

pub mod access;
pub mod api_key;
pub mod auth;
pub mod basic;
pub mod client_cert;
pub mod consumer;
pub mod display;
pub mod forward;
pub mod hash_queue;
pub mod jwt;
pub mod spec;
pub mod verification;
