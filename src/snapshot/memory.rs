//! The memory that the process may use, the bounds that follow from it, and whether it is nearly used up.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use rustix::param::page_size;

/// Memory of a process without connections, in bytes.
const PROCESS: u64 = 24 << 20;

/// Memory of a client connection with a request in flight, and of its upstream connection, in bytes.
const CONNECTION: u64 = 16 << 10;
const TLS_CONNECTION: u64 = 32 << 10;

/// Memory that a new connection may need soon, in bytes: its buffers, and what the kernel has received of a request body
/// and not yet sent to the upstream.
const BUSY_CONNECTION: u64 = 384 << 10;

/// Time between two measurements while much memory is used.
pub const MEASURE_INTERVAL: Duration = Duration::from_millis(10);

/// Time after which a connection is expected to use all the memory that its first request needs.
pub const SETTLING_TIME: Duration = Duration::from_millis(200);

/// Time between two connections that each worker accepts while the memory is nearly used up.
const FULL_ACCEPT_DELAY: Duration = Duration::from_millis(50);

/// Minimum of the bounds, so that a gateway with little memory still serves requests.
const MIN_CONNECTIONS: u64 = 64;
const MIN_BUFFERED: u64 = 1 << 20;

/// The gateway refuses work from this part of the limit on, in 1/16, until it uses less than the other part.
const FULL_FROM: u64 = 12;
const FULL_UNTIL: u64 = 11;

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
        let free_pages = match is_version_2 {
            true => ["inactive_file ", "active_file "],
            false => ["total_inactive_file ", "total_active_file "],
        };
        let (usage, statistics) = (group.join(usage), group.join("memory.stat"));
        // `max`, and a number close to 2^63 in version 1, mean that there is no limit.
        let bytes = number_in(&group.join(limit)).filter(|limit| *limit < 1 << 62)?;
        Some(MemoryLimit { bytes, group: Some(Group { usage, statistics, free_pages }) })
    }

    /// Return the number of bytes that count towards the limit: those of the control group, or the pages of this
    /// process.
    pub fn used(&self) -> Option<u64> {
        let Some(Group { usage, statistics, free_pages }) = &self.group else {
            let pages = fs::read_to_string("/proc/self/statm").ok()?;
            let mut pages = pages.split(' ').skip(1).map_while(|count| count.parse::<u64>().ok());
            let resident = pages.next()?;
            return Some(resident.saturating_sub(pages.next()?) * page_size() as u64);
        };
        let statistics = fs::read_to_string(statistics).ok()?;
        let pages = |line: &str| free_pages.iter().find_map(|name| line.strip_prefix(name)?.parse::<u64>().ok());
        Some(number_in(usage)?.saturating_sub(statistics.lines().filter_map(pages).sum()))
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

/// Whether the memory is nearly used up. New connections then wait, and new requests are refused.
#[derive(Debug)]
pub struct MemoryGuard {
    is_full: AtomicBool,
    used: AtomicU64,
    /// Number of connections that the gateway may accept until the next measurement.
    room: AtomicI64,
    /// Number of connections that the gateway has accepted, without those that ended within [`SETTLING_TIME`].
    accepted: AtomicU64,
}

impl Default for MemoryGuard {
    /// The default is a guard without a limit.
    fn default() -> Self {
        let [used, accepted] = [(); 2].map(|()| AtomicU64::default());
        MemoryGuard { is_full: AtomicBool::default(), used, room: AtomicI64::new(i64::MAX / 2), accepted }
    }
}

impl MemoryGuard {
    /// Return whether the memory is nearly used up.
    pub fn is_full(&self) -> bool {
        self.is_full.load(Ordering::Relaxed)
    }

    /// Return the number of bytes that were last measured. 0 without a limit.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Return the time after which the next connection may be accepted. `None`: at once.
    pub fn accept_delay(&self) -> Option<Duration> {
        match self.is_full() {
            // The allocator returns memory to the kernel only when it is used, so a few connections must be accepted.
            true => Some(FULL_ACCEPT_DELAY),
            false => (self.room.load(Ordering::Relaxed) <= 0).then_some(MEASURE_INTERVAL),
        }
    }

    /// Count an accepted connection.
    pub fn count_connection(&self) {
        self.room.fetch_sub(1, Ordering::Relaxed);
        self.accepted.fetch_add(1, Ordering::Relaxed);
    }

    /// Count the end of a connection of this age. A young one makes room for another one: after a flood, the accept queue
    /// is full of connections that their clients have already closed.
    pub fn count_end(&self, age: Duration) {
        if age < SETTLING_TIME {
            self.room.fetch_add(1, Ordering::Relaxed);
            self.accepted.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Return the number of connections that the gateway has accepted, without those that ended soon.
    pub fn accepted(&self) -> u64 {
        self.accepted.load(Ordering::Relaxed)
    }

    /// Set the number of bytes in use, which do not contain all memory that the `new` last connections will need. Return
    /// whether the memory is nearly used up.
    pub fn set_used(&self, used: u64, limit: u64, new: u64) -> bool {
        self.used.store(used, Ordering::Relaxed);
        let part = if self.is_full() { FULL_UNTIL } else { FULL_FROM };
        let is_full = used >= limit / 16 * part;
        self.is_full.store(is_full, Ordering::Relaxed);
        let room = (limit / 16 * FULL_FROM).saturating_sub(used) / BUSY_CONNECTION;
        self.room.store(i64::try_from(room.saturating_sub(new)).unwrap_or(i64::MAX), Ordering::Relaxed);
        is_full
    }
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
    fn guard_refuses_work_until_enough_memory_is_free() {
        let guard = MemoryGuard::default();
        let is_full = [1100, 1199, 1200, 1600, 1100, 1099, 1199, 1200].map(|used| guard.set_used(used, 1600, 0));
        assert_eq!(is_full, [false, false, true, true, true, false, false, true]);
        assert!(!guard.set_used(0, 16 * BUSY_CONNECTION, 10) && guard.accept_delay().is_none());
        guard.count_connection();
        guard.count_connection();
        assert_eq!(
            (guard.accept_delay(), guard.accepted()),
            (Some(MEASURE_INTERVAL), 2),
            "room for 12, of which 10 are new"
        );
    }

    #[test]
    fn connections_that_end_soon_make_room_for_others() {
        let guard = MemoryGuard::default();
        let limit = 64 << 20;
        guard.set_used(limit / 16 * FULL_FROM - 2 * BUSY_CONNECTION, limit, 0);
        for _ in 0..2 {
            assert_eq!(guard.accept_delay(), None);
            guard.count_connection();
        }
        assert_eq!(guard.accept_delay(), Some(MEASURE_INTERVAL), "there is room for two connections");
        guard.count_end(SETTLING_TIME);
        assert_eq!((guard.accept_delay(), guard.accepted()), (Some(MEASURE_INTERVAL), 2), "its memory is in `used`");
        guard.count_end(SETTLING_TIME - Duration::from_millis(1));
        assert_eq!((guard.accept_delay(), guard.accepted()), (None, 1));
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
