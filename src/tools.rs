//! The implementation of the commands `check`, `doctor`, `explain`, `import` and `replay`. The gateway does not use these modules
//! to serve requests.

pub mod check;
pub mod doctor;
pub mod explain;
pub mod import;
pub mod replay;
