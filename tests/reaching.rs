//! Ways to reach a Redis: TLS with a CA of one's own and a client certificate, unix sockets, users of least privilege.

mod support;

use std::path::Path;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use support::eventually;
use support::gateway::Gateway;
use support::redis::{Redis, free_port};

/// A limit of each kind, so that every command of the scripts is used.
const KINDS: [&str; 6] =
    ["token-bucket", "fixed-window", "sliding-window", "sliding-buckets", "sliding-log", "concurrency"];

/// A gateway on this store; requests are refused when it does not answer.
fn gateway(store: &str) -> Gateway {
    let limit = |kind: &&str| {
        let quota = if *kind == "concurrency" { "3" } else { "3/24h" };
        format!("[limit.{kind}]\nby = \"ip\"\nalgorithm = \"{kind}\"\nquota = \"{quota}\"\non_store_error = \"deny\"\n")
    };
    let limits: String = KINDS.iter().map(limit).collect();
    Gateway::start(&format!(
        "[store]\n{store}\n{limits}\
         [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = {KINDS:?}\nrespond = {{ status = 200 }}\n"
    ))
}

fn assert_counts(gateway: &Gateway, what: &str) {
    let statuses = [0; 5].map(|_| gateway.get("/r").status);
    assert_eq!(statuses, [200, 200, 200, 429, 429], "{what}\n{}", gateway.log());
}

/// A CA, and certificates that it signed, as PEM files in a folder.
fn certificates(folder: &Path, authority: &str, names: &[&str]) {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    // A certificate with the name of its issuer would look as if it had signed itself.
    params.distinguished_name.push(DnType::CommonName, authority);
    let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    std::fs::write(folder.join(authority), ca.pem()).unwrap();
    for name in names {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned(), "localhost".to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, *name);
        let certificate = params.signed_by(&key, &ca).unwrap();
        std::fs::write(folder.join(format!("{name}.pem")), certificate.pem()).unwrap();
        std::fs::write(folder.join(format!("{name}.key")), key.serialize_pem()).unwrap();
    }
}

#[test]
fn redis_is_reached_by_tls_and_only_the_right_one() {
    let folder = tempfile::tempdir().unwrap();
    certificates(folder.path(), "ca.pem", &["server", "client"]);
    certificates(folder.path(), "other-ca.pem", &["stranger"]);
    let file = |name: &str| folder.path().join(name).display().to_string();
    let (port, text) = (free_port(), |port: u16| port.to_string());
    let server = ["--port", "0", "--tls-port", &text(port), "--tls-cert-file", &file("server.pem")];
    let rest =
        ["--tls-key-file", &file("server.key"), "--tls-ca-cert-file", &file("ca.pem"), "--tls-auth-clients", "yes"];
    let _redis = Redis::start_with(port, &[&server[..], &rest[..]].concat()).expect("a server with TLS");
    let store = |tls: &str| format!("url = \"rediss://127.0.0.1:{port}/0\"\ntimeout = \"5s\"\ntls = {{ {tls} }}");
    let client = format!("cert = \"{}\", key = \"{}\"", file("client.pem"), file("client.key"));
    let stranger = format!("cert = \"{}\", key = \"{}\"", file("stranger.pem"), file("stranger.key"));
    let ca = format!("ca = \"{}\"", file("ca.pem"));
    let other = format!("ca = \"{}\"", file("other-ca.pem"));
    assert_counts(&gateway(&store(&format!("{ca}, {client}"))), "our CA, our certificate");
    for (what, tls) in [
        ("an unknown CA", format!("{other}, {client}")),
        ("no certificate", ca.clone()),
        ("a certificate of somebody else", format!("{ca}, {stranger}")),
    ] {
        // Whoever is refused waits for the deadline.
        let gateway = gateway(&store(&tls).replace("5s", "2s"));
        gateway.get("/r").assert_problem(503, what);
        eventually(what, || gateway.log().contains("the store fails"));
    }
}

#[test]
fn redis_is_reached_by_a_unix_socket() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("redis.sock").display().to_string();
    let port = free_port();
    let _redis = Redis::start_with(port, &["--port", "0", "--unixsocket", &socket]).expect("a server on a socket");
    assert_counts(&gateway(&format!("url = \"redis+unix://{socket}?db=3\"\ntimeout = \"5s\"")), "a unix socket");
}

#[test]
fn a_user_of_least_privilege_is_enough() {
    let redis = Redis::start();
    // As the manual has it.
    let manual = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/configuration.md")).unwrap();
    let line =
        manual.lines().find_map(|line| line.trim().strip_prefix("ACL SETUSER ")).expect("the manual has the user");
    let mut command = redis::cmd("ACL");
    command.arg("SETUSER");
    for word in line.split(' ') {
        command.arg(word.replace(">…", ">secret"));
    }
    command.exec(&mut redis.connection()).unwrap();
    let store = |user: &str| format!("url = \"redis://{user}@127.0.0.1:{}/2\"\ntimeout = \"5s\"", redis.port);
    let right = gateway(&store("gateway:secret"));
    assert_counts(&right, "the right user");
    assert!(!right.log().contains("refused"), "{}", right.log());
    let calls = redis.calls("evalsha") + redis.calls("eval");
    assert!(calls > 0, "scripts were called");
    let wrong = gateway(&store("gateway:wrong").replace("5s", "2s"));
    wrong.get("/r").assert_problem(503, "a wrong password");
    eventually("it is told", || wrong.log().contains("the store fails"));
    assert!(!wrong.log().contains(":wrong@"), "{}", wrong.log());
    // The user can do nothing else.
    let mut connection = redis::Client::open(format!("redis://gateway:secret@127.0.0.1:{}", redis.port))
        .unwrap()
        .get_connection()
        .unwrap();
    for words in [&["KEYS", "*"][..], &["FLUSHALL"], &["SET", "mine", "1"], &["CONFIG", "GET", "*"]] {
        let error = redis::cmd(words[0]).arg(&words[1..]).exec(&mut connection).unwrap_err();
        assert_eq!(error.code(), Some("NOPERM"), "{words:?}: {error}");
    }
}
