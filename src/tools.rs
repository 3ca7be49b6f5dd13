//! The implementation of the commands `check`, `doctor`, `explain` and `replay`, which never serve a request.

pub mod check;
pub mod doctor;
pub mod explain;
pub mod replay;
