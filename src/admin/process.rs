//! Resource usage of the process, from `/proc/self` (proc(5)).

use std::fs;

use rustix::param::{clock_ticks_per_second, page_size};
use rustix::process::{Resource, getrlimit};

/// Resource usage of the process.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ProcessUsage {
    /// User and system CPU time in seconds.
    pub(super) cpu_s: f64,
    /// Resident memory in bytes.
    pub(super) resident_bytes: u64,
    /// Virtual memory in bytes.
    pub(super) virtual_bytes: u64,
    /// Open file descriptors.
    pub(super) open_files: u64,
    /// Maximum number of open file descriptors. `None` = no maximum.
    pub(super) max_files: Option<u64>,
}

impl ProcessUsage {
    /// Read the current usage. Return `None` on systems without `/proc`.
    pub(super) fn read() -> Option<Self> {
        let stat = fs::read_to_string("/proc/self/stat").ok()?;
        let memory = fs::read_to_string("/proc/self/statm").ok()?;
        let mut pages = memory.split(' ').map_while(|count| count.parse::<u64>().ok());
        let page_size = page_size() as u64;
        let (virtual_pages, resident_pages) = (pages.next()?, pages.next()?);
        // Subtract one, because reading the directory `/proc/self/fd` itself uses a descriptor.
        let open_files = (fs::read_dir("/proc/self/fd").ok()?.count() as u64).saturating_sub(1);
        Some(ProcessUsage {
            cpu_s: cpu_ticks(&stat)? as f64 / clock_ticks_per_second() as f64,
            resident_bytes: resident_pages * page_size,
            virtual_bytes: virtual_pages * page_size,
            open_files,
            max_files: getrlimit(Resource::Nofile).current,
        })
    }
}

/// Return the user and system time of `/proc/PID/stat`, in clock ticks: the fields 14 and 15.
fn cpu_ticks(stat: &str) -> Option<u64> {
    // Field 2 is the name of the program in parentheses, which can contain spaces.
    let (_, fields) = stat.rsplit_once(") ")?;
    let mut times = fields.split(' ').skip(11);
    Some(times.next()?.parse::<u64>().ok()? + times.next()?.parse::<u64>().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_user_and_system_time() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 1 2 3 4 250 50 6 7 20 0 9 0 100 200 300";
        assert_eq!(cpu_ticks(stat), Some(300));
    }
}
