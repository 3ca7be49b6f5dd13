//! Follows a document as a reader does: it writes the files, runs the commands and compares their output.

use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader, PipeReader, Read};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use serde_json::Value;

use super::MAX_WAIT;
use super::gateway::binary;
use super::pages::{are_like, blocks};

/// The ports in the documents. Each walk replaces them with free ports.
const PORTS: [&str; 6] = ["8080", "8081", "9000", "9180", "9181", "6379"];

/// Where the commands write their output.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Output {
    Pipe,
    Terminal,
}

impl Output {
    /// Open a pipe or a pseudo terminal. Return the end for reading, and the two ends for standard output and standard
    /// error.
    fn open(self) -> (Box<dyn Read + Send>, [Stdio; 2]) {
        match self {
            Output::Pipe => {
                let (reader, writer): (PipeReader, _) = std::io::pipe().unwrap();
                let error = writer.try_clone().unwrap();
                (Box::new(reader), [writer.into(), error.into()])
            }
            Output::Terminal => {
                let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
                grantpt(&terminal).unwrap();
                unlockpt(&terminal).unwrap();
                let name = ptsname(&terminal, Vec::new()).unwrap().into_string().unwrap();
                let writer = File::options().write(true).open(name).unwrap();
                let error = writer.try_clone().unwrap();
                (Box::new(File::from(terminal)), [writer.into(), error.into()])
            }
        }
    }
}

/// A reader of the documentation, with a working directory.
pub struct Walk {
    output: Output,
    directory: tempfile::TempDir,
    path: OsString,
    ports: Vec<(&'static str, u16)>,
    running: Vec<Child>,
}

impl Walk {
    pub fn new(output: Output) -> Walk {
        let folder = PathBuf::from(binary().get_program()).parent().unwrap().to_owned();
        let others = std::env::var_os("PATH").unwrap();
        let path = std::env::join_paths([folder].into_iter().chain(std::env::split_paths(&others))).unwrap();
        let ports = PORTS.into_iter().zip(free_ports(PORTS.len())).collect();
        Walk { output, directory: tempfile::tempdir().unwrap(), path, ports, running: Vec::new() }
    }

    pub fn folder(&self) -> &Path {
        self.directory.path()
    }

    /// Write a file to the working directory.
    pub fn put(&self, name: &str, text: &str) {
        // Set a longer timeout: with the default of 50 ms, a call may time out on a busy machine, which would change
        // the output.
        let mut text = self.with_ports(text);
        if text.contains("\nurl = \"redis") {
            text = text.replace("[store]\n", "[store]\ntimeout = \"5s\"\n");
        }
        let path = self.folder().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    /// Follow a document. `instead` maps each command of the document to the command to run, or to `None` to skip it.
    /// Return the number of commands that were run.
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
                let (mut child, reader) = self.spawn(&command);
                let said: Vec<_> = lines_of(reader).collect();
                let alike = are_like(&said.iter().map(String::as_str).collect::<Vec<_>>(), &expected);
                // If the page shows no output, the command only has to succeed.
                let succeeded = child.wait().unwrap().success();
                assert!(alike || (expected.is_empty() && succeeded), "{}", wrong(&said.join("\n")));
                if command.starts_with("sluicegate init") {
                    self.replace_ports_of_templates();
                }
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

    /// Start a command that runs until the end of the walk. Return the list to which a thread appends each line of the
    /// command's output.
    fn start(&mut self, command: &str) -> Arc<Mutex<Vec<String>>> {
        let (child, reader) = self.spawn(&format!("exec env {command}"));
        self.running.push(child);
        let said = Arc::new(Mutex::new(Vec::new()));
        let sink = said.clone();
        std::thread::spawn(move || {
            lines_of(reader).for_each(|line| sink.lock().unwrap().push(as_on_a_terminal(line)));
        });
        said
    }

    /// Run a command in a shell. Return a reader of its standard output and standard error, unless the command
    /// redirects them.
    fn spawn(&self, command: &str) -> (Child, Box<dyn Read + Send>) {
        let (reader, [output, error]) = self.output.open();
        let mut shell = Command::new("sh");
        shell.args(["-c", command]).stdin(Stdio::null()).stdout(output).stderr(error);
        shell.current_dir(self.folder()).env("PATH", &self.path);
        for name in ["SLUICEGATE_CONFIG", "SLUICEGATE_STORE_SECRET", "STORE_SECRET", "PORT"] {
            shell.env_remove(name);
        }
        (shell.spawn().unwrap(), reader)
    }

    /// Replace the ports in the files that `sluicegate init` has written.
    fn replace_ports_of_templates(&self) {
        for file in std::fs::read_dir(self.folder()).unwrap().map(|entry| entry.unwrap().path()) {
            if file.extension().is_some_and(|extension| extension == "toml") {
                std::fs::write(&file, self.with_ports(&std::fs::read_to_string(&file).unwrap())).unwrap();
            }
        }
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

/// Return lines as a person sees them, without colors. Reading from a pseudo terminal ends with an error.
fn lines_of(reader: Box<dyn Read + Send>) -> impl Iterator<Item = String> {
    let lines = BufReader::new(reader).lines().map_while(Result::ok);
    lines.map(|line| anstream::adapter::strip_str(line.trim_end_matches('\r')).to_string())
}

/// Convert a JSON log record to the text format that the gateway uses on a terminal.
fn as_on_a_terminal(line: String) -> String {
    let Ok(entry) = serde_json::from_str::<Value>(&line) else { return line };
    match (&entry["timestamp"], &entry["level"], &entry["message"]) {
        (Value::String(time), Value::String(level), Value::String(message)) => format!("{time} {level:>5} {message}"),
        _ => line,
    }
}

/// Return free ports below the ephemeral range, so that the kernel does not assign them to other sockets. No port
/// contains a port of the documents as a substring.
fn free_ports(count: usize) -> Vec<u16> {
    static WALKS: AtomicU16 = AtomicU16::new(0);
    let begin = 21_000 + (std::process::id() % 40) as u16 * 100;
    let begin = begin + WALKS.fetch_add(1, Ordering::Relaxed) % 80 * 8;
    let free = (begin..26_000).chain(21_000..begin).filter(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok());
    free.take(count).collect()
}
