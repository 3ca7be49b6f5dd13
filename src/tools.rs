//! The engines of commands that never serve a request.

pub mod check;
pub mod doctor;
pub mod explain;
pub mod replay;
