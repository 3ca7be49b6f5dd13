//! Runs the real gateway binary as a child process.

use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Instant;

use super::client::{Client, Reply};
use super::{MAX_WAIT, signal};

/// The consumers file of the repository: the consumer `demo` with the key `demo-key`.
pub const CONSUMERS: &str = include_str!("../../consumers.toml");

/// A running gateway. It is killed at the end of the test.
pub struct Gateway {
    pub address: SocketAddr,
    pub child: Child,
    /// The log file. Lines are visible in a file as soon as they are written. With a pipe, a line would be visible only
    /// after a reader thread has read it.
    log: tempfile::NamedTempFile,
    directory: tempfile::TempDir,
}

/// Return a command that runs the binary under test.
pub fn binary() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sluicegate"));
    command.stdin(Stdio::null()).env_remove("SLUICEGATE_CONFIG").env_remove("SLUICEGATE_STORE_SECRET");
    command
}

/// Add a listener and a `[log]` table if the configuration has none.
fn full(config: &str) -> String {
    let mut full = config.to_owned();
    if !config.contains("[log]") {
        full.push_str("\n[log]\naccess = \"off\"\n");
    }
    if !config.contains("[[listener]]") {
        full.push_str("\n[[listener]]\naddress = \"127.0.0.1:0\"\n");
    }
    full
}

impl Gateway {
    /// Start a gateway with a configuration. If missing, a listener on a free port and `access = "off"` are added.
    pub fn start(config: &str) -> Gateway {
        Gateway::start_with(config, &[])
    }

    /// Like [`Gateway::start`], with additional files next to the configuration.
    pub fn start_with(config: &str, files: &[(&str, &str)]) -> Gateway {
        Gateway::launch(config, files, |path| {
            let mut command = binary();
            command.arg("--config").arg(path);
            command
        })
    }

    fn launch(config: &str, files: &[(&str, &str)], command: impl Fn(&Path) -> Command) -> Gateway {
        let directory = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(directory.path().join(name), text).unwrap();
        }
        let path = directory.path().join("gateway.toml");
        std::fs::write(&path, full(config)).unwrap();
        Gateway::spawn(&mut command(&path), directory)
    }

    /// Like [`Gateway::start`], but start the gateway with another command.
    pub fn start_by(config: &str, command: impl Fn(&Path) -> Command) -> Gateway {
        Gateway::launch(config, &[], |path| {
            let mut command = command(path);
            command.stdin(Stdio::null());
            command
        })
    }

    /// Like [`Gateway::start_by`], but keep the standard input of the command.
    pub fn start_socket(config: &str, command: impl Fn(&Path) -> Command) -> Gateway {
        Gateway::launch(config, &[], command)
    }

    /// Like [`Gateway::start_by`], but keep the standard input of the command and write additional files next to the
    /// configuration.
    pub fn start_by_with(config: &str, files: &[(&str, &str)], command: impl Fn(&Path) -> Command) -> Gateway {
        Gateway::launch(config, files, command)
    }

    /// Return the CPU time that the gateway has used so far, in ms.
    pub fn cpu_ms(&self) -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        // The process name is in parentheses. User time and system time are the fields 14 and 15, in units of 10 ms.
        let fields: Vec<_> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
        (fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()) * 10
    }

    /// Start a gateway with a configuration file that is used unchanged.
    pub fn start_file(path: &Path) -> Gateway {
        Gateway::spawn(binary().arg("--config").arg(path), tempfile::tempdir().unwrap())
    }

    fn spawn(command: &mut Command, directory: tempfile::TempDir) -> Gateway {
        let log = tempfile::NamedTempFile::new().unwrap();
        let child = command.stdout(Stdio::null()).stderr(log.reopen().unwrap()).spawn().unwrap();
        let mut gateway = Gateway { address: ([0, 0, 0, 0], 0).into(), child, log, directory };
        let started = Instant::now();
        gateway.address = loop {
            let text = gateway.log();
            // A Unix socket may come before the first address.
            let list = text.split_once("listens on http").or(text.split_once("listens on unix:"));
            if let Some((_, rest)) = list.and_then(|(_, rest)| rest.split_once("://")) {
                break rest.split([';', ',']).next().unwrap().parse().unwrap();
            }
            let ended = gateway.child.try_wait().unwrap();
            assert!(ended.is_none() && started.elapsed() < MAX_WAIT, "the gateway did not start: {ended:?}\n{text}");
            std::thread::yield_now();
        };
        gateway
    }

    /// Replace the configuration by renaming, with the same additions as in [`Gateway::start`].
    pub fn put(&self, config: &str) {
        self.put_file("gateway.toml", &full(config));
    }

    /// Replace a file next to the configuration by renaming.
    pub fn put_file(&self, name: &str, text: &str) {
        let new = self.directory().join("new");
        std::fs::write(&new, text).unwrap();
        std::fs::rename(&new, self.directory().join(name)).unwrap();
    }

    /// Return the addresses of all listeners, in the order of the configuration.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        let log = self.log();
        let list = log.split("listens on ").nth(1).unwrap().split(';').next().unwrap();
        list.split(", ").filter_map(|url| Some(url.split_once("://")?.1.parse().unwrap())).collect()
    }

    /// Return the address of the admin listener.
    pub fn admin(&self) -> SocketAddr {
        let log = self.log();
        log.split_once("admin on http://").unwrap().1.split(';').next().unwrap().parse().unwrap()
    }

    /// Return the directory of the configuration.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Return all complete lines of the log so far.
    pub fn log(&self) -> String {
        let mut text = std::fs::read(self.log.path()).unwrap();
        text.truncate(text.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1));
        String::from_utf8(text).unwrap()
    }

    /// Return the warnings in the log, except those about the configuration, which the gateway logs at its start.
    pub fn warnings(&self) -> String {
        let is_warning = |line: &&str| line.contains("WARN") && !line.contains("gateway.toml");
        self.log().lines().filter(is_warning).collect()
    }

    /// Open a connection to the first listener.
    pub fn client(&self) -> Client {
        Client::connect(self.address)
    }

    /// Send one GET request on a new connection.
    pub fn get(&self, path: &str) -> Reply {
        self.client().get(path)
    }

    /// Wait until the process has ended. Return its exit status.
    pub fn wait(&mut self) -> ExitStatus {
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(started.elapsed() < MAX_WAIT, "the gateway does not end\n{}", self.log());
            std::thread::yield_now();
        }
    }

    /// Send SIGTERM.
    pub fn terminate(&self) {
        signal(&self.child, "TERM");
    }

    /// Return the resident memory of the process in bytes.
    pub fn memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("log of the gateway at {}:\n{}", self.address, self.log());
        }
    }
}
