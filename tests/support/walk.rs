//! Walks through a document as its reader: writes the files, runs the commands and compares their output.

use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use serde_json::Value;

use super::MAX_WAIT;
use super::gateway::binary;
use super::pages::{are_like, blocks};

/// The ports in the documents. Each walk replaces them by free ones.
const PORTS: [&str; 5] = ["8080", "8081", "9000", "9180", "6379"];

/// One reader with a working directory.
pub struct Walk {
    directory: tempfile::TempDir,
    path: OsString,
    ports: Vec<(&'static str, u16)>,
    running: Vec<Child>,
}

impl Walk {
    pub fn new() -> Walk {
        let folder = PathBuf::from(binary().get_program()).parent().unwrap().to_owned();
        let others = std::env::var_os("PATH").unwrap();
        let path = std::env::join_paths([folder].into_iter().chain(std::env::split_paths(&others))).unwrap();
        let ports = PORTS.into_iter().zip(free_ports(PORTS.len())).collect();
        Walk { directory: tempfile::tempdir().unwrap(), path, ports, running: Vec::new() }
    }

    pub fn folder(&self) -> &Path {
        self.directory.path()
    }

    /// Write a file into the directory.
    pub fn put(&self, name: &str, text: &str) {
        // The output must not depend on the load of this machine: with the default 50 ms a call may time out.
        let mut text = self.with_ports(text);
        if text.contains("\nurl = \"redis") {
            text = text.replace("[store]\n", "[store]\ntimeout = \"5s\"\n");
        }
        let path = self.folder().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    /// Follow the document. `instead` may return another command, or `None` to skip one.
    pub fn through(&mut self, document: &str, mut instead: impl FnMut(&str) -> Option<String>) -> usize {
        let mut typed = 0;
        for block in blocks(document) {
            if let Some(name) = block.file_name() {
                self.put(name, &block.text);
            }
            if block.language == "console" {
                for (command, expected) in block.commands() {
                    if let Some(command) = instead(&command) {
                        self.run(document, &command, &expected);
                        typed += 1;
                    }
                }
            }
        }
        typed
    }

    fn run(&mut self, document: &str, command: &str, expected: &[String]) {
        let (command, expected) = (self.with_ports(command), self.with_ports(&expected.join("\n")));
        let expected: Vec<_> = expected.lines().collect();
        let wrong = |said: &str| format!("{document}: $ {command}\n{said}\ninstead of\n{}", expected.join("\n"));
        match command.strip_suffix(" &") {
            None => {
                let output = self.shell(&command).output().unwrap();
                let said = String::from_utf8(output.stdout).unwrap();
                let alike = are_like(&said.lines().collect::<Vec<_>>(), &expected);
                // A page without output only requires that the command succeeds.
                assert!(alike || (expected.is_empty() && output.status.success()), "{}", wrong(&said));
            }
            Some(command) => {
                let said = self.start(command);
                let begun = [&expected[..], &["…"]].concat();
                let has_begun =
                    || are_like(&said.lock().unwrap().iter().map(String::as_str).collect::<Vec<_>>(), &begun);
                let started = Instant::now();
                while !has_begun() {
                    assert!(started.elapsed() < MAX_WAIT, "{}", wrong(&said.lock().unwrap().join("\n")));
                    std::thread::yield_now();
                }
            }
        }
    }

    /// Start a command that runs until the end of the walk. Return its output from now on.
    fn start(&mut self, command: &str) -> Arc<Mutex<Vec<String>>> {
        let mut child = self.shell(&format!("exec env {command}")).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        self.running.push(child);
        let said = Arc::new(Mutex::new(Vec::new()));
        let sink = said.clone();
        std::thread::spawn(move || {
            lines.map_while(Result::ok).for_each(|line| sink.lock().unwrap().push(as_on_a_terminal(line)));
        });
        said
    }

    /// Return a shell command whose terminal output, standard output and error, is captured. Output to files is not.
    fn shell(&self, command: &str) -> Command {
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("exec 2>&1; {command}")]).stdin(Stdio::null());
        shell.current_dir(self.folder()).env("PATH", &self.path);
        for name in ["SLUICEGATE_CONFIG", "SLUICEGATE_STORE_SECRET", "STORE_SECRET", "PORT"] {
            shell.env_remove(name);
        }
        shell
    }

    fn with_ports(&self, text: &str) -> String {
        self.ports.iter().fold(text.to_owned(), |text, (named, port)| text.replace(named, &port.to_string()))
    }
}

impl Drop for Walk {
    fn drop(&mut self) {
        for child in &mut self.running {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Convert a log line to the text format of a terminal.
fn as_on_a_terminal(line: String) -> String {
    let Ok(entry) = serde_json::from_str::<Value>(&line) else { return line };
    match (&entry["timestamp"], &entry["level"], &entry["message"]) {
        (Value::String(time), Value::String(level), Value::String(message)) => format!("{time} {level:>5} {message}"),
        _ => line,
    }
}

/// Return ports below the ephemeral range, so that the kernel assigns none of them to others. None contains a port of
/// the documents as a substring.
/// contains one that the documents name.
fn free_ports(count: usize) -> Vec<u16> {
    let begin = 21_000 + (std::process::id() % 40) as u16 * 100;
    let free = (begin..25_000).chain(21_000..begin).filter(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok());
    free.take(count).collect()
}
