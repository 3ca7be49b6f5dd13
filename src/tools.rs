//! The implementation of the commands `check`, `doctor`, `explain` and `replay`. The code that serves requests does not
//! use these modules.

pub mod check;
pub mod doctor;
pub mod explain;
pub mod replay;
