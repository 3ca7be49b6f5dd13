//! The memory that the process may use, and the bounds that follow from it.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::param::page_size;

use crate::http::memory_guard::SocketBuffers;

/// Memory of a process without connections, in bytes.
const PROCESS: u64 = 24 << 20;

/// Memory of a client connection with a request in flight, and of its upstream connection, in bytes.
const CONNECTION: u64 = 16 << 10;
const TLS_CONNECTION: u64 = 32 << 10;

/// Maximum number of bytes that the kernel buffers for a connection and has not sent.
const UNSENT: u32 = 64 << 10;

/// Size of the receive buffers of connections in bytes, if the limit is smaller than [`SMALL_LIMIT`]. It bounds the
/// throughput of a connection to 64 KiB per round-trip time.
const RECEIVED: u32 = 64 << 10;
const SMALL_LIMIT: u64 = 256 << 20;

/// Minimum of the bounds, so that a gateway with little memory still serves requests.
const MIN_CONNECTIONS: u64 = 64;
const MIN_BUFFERED: u64 = 1 << 20;

/// The memory that the process may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryLimit {
    /// The limit in bytes.
    pub bytes: u64,
    /// The control group with this limit. `None`: the limit was configured.
    group: Option<Group>,
}

/// The files of a control group that contain its usage of memory, and the cached pages that the kernel can free.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Group {
    usage: PathBuf,
    /// The file with the memory of the buffers of sockets, if `usage` does not contain it.
    sockets: Option<PathBuf>,
    statistics: PathBuf,
    free_pages: [&'static str; 2],
}

impl MemoryLimit {
    /// Create a configured limit.
    pub fn of_bytes(bytes: u64) -> Self {
        MemoryLimit { bytes, group: None }
    }

    /// Return the memory limit of the control group of this process. Return `None` without a limit.
    pub fn of_cgroup() -> Option<Self> {
        let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
        MemoryLimit::from_cgroups(&groups, Path::new("/sys/fs/cgroup"))
    }

    /// Return the smallest limit of the groups in `/proc/self/cgroup` and of the groups above them (cgroups(7)).
    fn from_cgroups(groups: &str, mount: &Path) -> Option<Self> {
        let limits = groups.lines().filter_map(|line| {
            let (controllers, group) = line.split_once(':')?.1.split_once(':')?;
            let is_version_2 = controllers.is_empty();
            if !is_version_2 && !controllers.split(',').any(|name| name == "memory") {
                return None;
            }
            let mount = if is_version_2 { mount.to_owned() } else { mount.join("memory") };
            let group = mount.join(group.trim_start_matches('/'));
            // A container may see the path of its group on the machine, but only its own group, at the mount point.
            let above = group.ancestors().take_while(|directory| directory.starts_with(&mount));
            above.filter_map(|group| MemoryLimit::of_group(group, is_version_2)).min_by_key(|limit| limit.bytes)
        });
        limits.min_by_key(|limit| limit.bytes)
    }

    fn of_group(group: &Path, is_version_2: bool) -> Option<Self> {
        let [limit, usage] = match is_version_2 {
            true => ["memory.max", "memory.current"],
            false => ["memory.limit_in_bytes", "memory.usage_in_bytes"],
        };
        // Version 1 counts the buffers of sockets separately, and only if they have a limit.
        let sockets = (!is_version_2).then(|| group.join("memory.kmem.tcp.usage_in_bytes"));
        let free_pages = match is_version_2 {
            true => ["inactive_file ", "active_file "],
            false => ["total_inactive_file ", "total_active_file "],
        };
        let (usage, statistics) = (group.join(usage), group.join("memory.stat"));
        // `max`, and a number close to 2^63 in version 1, mean that there is no limit.
        let bytes = number_in(&group.join(limit)).filter(|limit| *limit < 1 << 62)?;
        Some(MemoryLimit { bytes, group: Some(Group { usage, sockets, statistics, free_pages }) })
    }

    /// Return the number of bytes that count towards the limit: those of the control group, or the pages of this
    /// process.
    pub fn used(&self) -> Option<u64> {
        let Some(Group { usage, sockets, statistics, free_pages }) = &self.group else {
            let pages = fs::read_to_string("/proc/self/statm").ok()?;
            let mut pages = pages.split(' ').skip(1).map_while(|count| count.parse::<u64>().ok());
            let resident = pages.next()?;
            return Some(resident.saturating_sub(pages.next()?) * page_size() as u64);
        };
        let statistics = fs::read_to_string(statistics).ok()?;
        let pages = |line: &str| free_pages.iter().find_map(|name| line.strip_prefix(name)?.parse::<u64>().ok());
        let usage = number_in(usage)? + sockets.as_deref().and_then(number_in).unwrap_or_default();
        Some(usage.saturating_sub(statistics.lines().filter_map(pages).sum()))
    }

    /// Return the bounds of what the kernel buffers for a connection.
    pub fn socket_buffers(&self) -> SocketBuffers {
        SocketBuffers { unsent: UNSENT, received: (self.bytes < SMALL_LIMIT).then_some(RECEIVED) }
    }

    /// Return the maximum number of client connections. A quarter of the memory is for buffers and for what the kernel
    /// counts, such as sockets.
    pub fn connections(&self, has_tls: bool) -> u64 {
        let size = if has_tls { TLS_CONNECTION } else { CONNECTION };
        let free = (self.bytes / 4 * 3).saturating_sub(PROCESS);
        (free / size).max(MIN_CONNECTIONS)
    }

    /// Return the maximum number of bytes for buffered bodies.
    pub fn buffered(&self) -> u64 {
        (self.bytes / 8).max(MIN_BUFFERED)
    }
}

fn number_in(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn smallest_limit_of_a_group_and_its_parents_applies() {
        let directory = tempfile::tempdir().unwrap();
        let mount = directory.path();
        let limit = |groups: &str| MemoryLimit::from_cgroups(groups, mount).map(|limit| limit.bytes);
        let write = |file: &str, text: &str| {
            let path = mount.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        assert_eq!(limit("0::/\n"), None, "the root group has no file");
        write("pods/a/memory.max", "max\n");
        assert_eq!(limit("0::/pods/a\n"), None);
        write("pods/memory.max", "600\n");
        assert_eq!(limit("0::/pods/a\n"), Some(600), "a parent has a limit");
        write("pods/a/memory.max", "500\n");
        assert_eq!(limit("0::/pods/a\n"), Some(500));
        write("memory/memory.limit_in_bytes", "9223372036854771712\n");
        let one = "9:cpu,cpuacct:/x\n4:memory:/docker/b\n1:name=systemd:/\n";
        assert_eq!(limit(one), None);
        write("memory/docker/b/memory.limit_in_bytes", "400\n");
        assert_eq!(limit(one), Some(400), "version 1");
        write("memory/memory.limit_in_bytes", "300\n");
        assert_eq!(limit("4:memory:/not/visible/in/the/container\n"), Some(300));
        assert_eq!(limit(&format!("{one}0::/pods/a\n")), Some(300), "both versions");
        assert_eq!(limit("garbage\n\n::\n"), None);
    }

    #[test]
    fn bounds_fit_into_the_limit() {
        for mebibytes in [48, 64, 512, 16_384] {
            let limit = MemoryLimit::of_bytes(mebibytes << 20);
            for (has_tls, size) in [(false, CONNECTION), (true, TLS_CONNECTION)] {
                assert!(PROCESS + limit.connections(has_tls) * size + limit.buffered() <= limit.bytes, "{mebibytes}");
            }
        }
        let bounds = |bytes| {
            let limit = MemoryLimit::of_bytes(bytes);
            [limit.connections(false), limit.buffered()]
        };
        assert_eq!([bounds(64 << 20), bounds(1)], [[1536, 8 << 20], [64, 1 << 20]]);
    }

    #[test]
    fn cached_pages_that_the_kernel_can_free_do_not_count() {
        let directory = tempfile::tempdir().unwrap();
        for (name, text) in [
            ("memory.max", "1000\n"),
            ("memory.current", "900\n"),
            ("memory.stat", "anon 500\ninactive_file 300\nactive_file 100\n"),
        ] {
            fs::write(directory.path().join(name), text).unwrap();
        }
        let limit = MemoryLimit::from_cgroups("0::/\n", directory.path()).unwrap();
        assert_eq!((limit.bytes, limit.used()), (1000, Some(500)));
        assert!(MemoryLimit::of_bytes(1).used() > Some(1 << 16), "the pages of this process");
    }
}
