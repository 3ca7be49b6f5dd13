//! Pebble, the test CA of Let's Encrypt, with the DNS server `pebble-challtestsrv`, which resolves every name to
//! 127.0.0.1.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::certificates::Authority;
use super::redis::free_port;

/// A running CA. It is killed at the end of the test.
pub struct Pebble {
    /// URL of the ACME directory.
    pub directory: String,
    /// Address of Pebble's ACME server.
    pub address: SocketAddr,
    /// The CA that issued the certificate of the ACME server.
    pub authority: Authority,
    /// The CA certificate of `authority`, as PEM.
    pub ca: String,
    /// Port at which Pebble validates HTTP-01 challenges.
    pub http_port: u16,
    /// Port at which Pebble validates TLS-ALPN-01 challenges.
    pub tls_port: u16,
    management: String,
    processes: Vec<Child>,
    files: tempfile::TempDir,
}

/// Start a program. Return when it has written a line that contains `ready`.
fn start(command: &mut Command, ready: &str, log: &Path) -> Child {
    let program = command.get_program().to_owned();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(std::fs::File::create(log.with_extension("err")).unwrap())
        .spawn()
        .unwrap_or_else(|error| panic!("{program:?}: {error}; `make tools` installs it"));
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.contains(ready)), "{program:?} does not start");
    let mut log = std::fs::File::create(log).unwrap();
    // Keep reading, so that the pipe never fills up.
    std::thread::spawn(move || {
        lines.for_each(|line| std::io::Write::write_all(&mut log, format!("{line}\n").as_bytes()).unwrap())
    });
    child
}

impl Pebble {
    /// Start a CA that validates without a delay and rejects no nonces.
    pub fn start() -> Pebble {
        Pebble::start_with(&[], "")
    }

    /// Start a CA with these environment variables and with additional keys in its configuration.
    pub fn start_with(environment: &[(&str, &str)], more: &str) -> Pebble {
        let files = tempfile::tempdir().unwrap();
        let [http_port, tls_port, port, management, dns, dns_management] = std::array::from_fn(|_| free_port());
        let authority = Authority::new("the CA of Pebble's own server");
        let server = authority.server(&["127.0.0.1", "localhost"], super::certificates::NOW);
        std::fs::write(files.path().join("server.pem"), &server.cert).unwrap();
        std::fs::write(files.path().join("server.key"), &server.key).unwrap();
        let path = |name: &str| files.path().join(name).display().to_string();
        let config = format!(
            r#"{{"pebble": {{"listenAddress": "127.0.0.1:{port}", "managementListenAddress": "127.0.0.1:{management}",
            "certificate": "{}", "privateKey": "{}", "httpPort": {http_port}, "tlsPort": {tls_port}{more}}}}}"#,
            path("server.pem"),
            path("server.key"),
        );
        std::fs::write(files.path().join("pebble.json"), config).unwrap();
        let dns_address = format!("127.0.0.1:{dns}");
        let dns = start(
            Command::new("pebble-challtestsrv")
                .args(["-defaultIPv4", "127.0.0.1", "-defaultIPv6", "", "-dns01", &dns_address])
                .args(["-http01", "", "-https01", "", "-tlsalpn01", ""])
                .args(["-management", &format!("127.0.0.1:{dns_management}")]),
            "Starting challenge servers",
            &files.path().join("dns.log"),
        );
        let pebble = start(
            Command::new("pebble")
                .args(["-config", &path("pebble.json"), "-dnsserver", &dns_address, "-strict"])
                .envs([("PEBBLE_VA_NOSLEEP", "1"), ("PEBBLE_WFE_NONCEREJECT", "0"), ("PEBBLE_AUTHZREUSE", "0")])
                .envs(environment.iter().copied()),
            "ACME directory available at",
            &files.path().join("pebble.log"),
        );
        Pebble {
            directory: format!("https://127.0.0.1:{port}/dir"),
            address: ([127, 0, 0, 1], port).into(),
            ca: authority.pem(),
            authority,
            http_port,
            tls_port,
            management: format!("https://127.0.0.1:{management}"),
            processes: vec![dns, pebble],
            files,
        }
    }

    /// Return Pebble's log so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.files.path().join("pebble.log")).unwrap()
    }

    /// Return how many orders have been placed.
    pub fn orders(&self) -> usize {
        self.count("Added order ")
    }

    /// Return how many certificates have been issued.
    pub fn issued(&self) -> usize {
        self.count("Issued certificate ")
    }

    /// Return how many lines of the log contain a text.
    pub fn count(&self, text: &str) -> usize {
        self.log().lines().filter(|line| line.contains(text)).count()
    }

    /// Return an `[acme]` table for this CA. The CA certificate must be in the file `ca.pem` next to the configuration.
    pub fn table(&self) -> String {
        let directory = &self.directory;
        format!("[acme]\naccept_terms = true\ndirectory = \"{directory}\"\nca = \"ca.pem\"\nstorage = \"acme\"\n")
    }

    /// Return the root certificate that verifies certificates issued by this CA, as PEM.
    pub fn root(&self) -> String {
        let fetched = Command::new("curl").args(["-sSfk", &format!("{}/roots/0", self.management)]).output().unwrap();
        assert!(fetched.status.success(), "{fetched:?}");
        String::from_utf8(fetched.stdout).unwrap()
    }
}

impl Drop for Pebble {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.kill();
            let _ = process.wait();
        }
        if std::thread::panicking() {
            eprintln!("log of Pebble:\n{}", self.log());
        }
    }
}
