//! File descriptors: how many this process may have.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// What a system without a limit is taken to have.
const ASSUMED_LIMIT: u64 = 1 << 20;

/// The most that can be had without privileges: the hard limit.
pub fn hard_limit() -> u64 {
    getrlimit(Resource::Nofile).maximum.unwrap_or(ASSUMED_LIMIT)
}

/// Raises the soft limit to the hard one: the low default of shells is there for programs that use select(2).
pub fn raise_soft_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    // Where it is refused, the soft limit stays, and accept pauses when descriptors run out.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}
