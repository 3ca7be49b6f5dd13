//! Changed certificate files: a valid certificate is used at once. If the new one is invalid, the gateway keeps the old
//! one.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use crate::hot_restart::hot_restart;
use crate::support::certificates::{FUTURE, NOW, PAST, Pair, TlsClient, tls};
use crate::support::gateway::Gateway;
use crate::support::{eventually, signal};
use rustls::ClientConfig;
use rustls::HandshakeKind;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::version::{TLS12, TLS13};

const NAME: &str = "gate.test";

fn gateway(folder: &Path, more: &str) -> Gateway {
    let path = |name: &str| folder.join(name).display().to_string();
    Gateway::start(&format!(
        "{more}[[listener]]\naddress = \"127.0.0.1:0\"\n\
         tls.certificates = [{{ cert = \"{}\", key = \"{}\" }}]\n\
         [[route]]\nname = \"hello\"\npath = \"/hello\"\nrespond = {{ status = 200 }}\n",
        path("server.pem"),
        path("server.key"),
    ))
}

fn write(folder: &Path, pair: &Pair) {
    std::fs::write(folder.join("server.pem"), &pair.cert).unwrap();
    std::fs::write(folder.join("server.key"), &pair.key).unwrap();
}

/// Replace a file by renaming.
fn put(folder: &Path, name: &str, content: &str) {
    std::fs::write(folder.join("new"), content).unwrap();
    std::fs::rename(folder.join("new"), folder.join(name)).unwrap();
}

fn trusting(pairs: &[&Pair]) -> Arc<ClientConfig> {
    tls(&pairs.iter().map(|pair| &pair.der).collect::<Vec<_>>(), None, &[&TLS13])
}

/// Return whether new clients get this certificate.
fn is_used(gateway: &Gateway, pair: &Pair) -> bool {
    TlsClient::handshake(&trusting(&[pair]), gateway.address, NAME).is_ok()
}

fn kind(client: &TlsClient) -> HandshakeKind {
    client.stream.get_ref().conn.handshake_kind().unwrap()
}

fn refusals(gateway: &Gateway) -> usize {
    gateway.log().matches("cannot reload the file").count()
}

#[test]
fn renamed_certificate_files_are_used_and_connections_and_sessions_continue() {
    let folder = tempfile::tempdir().unwrap();
    let (old, new) = (Pair::server(NAME, NOW), Pair::server(NAME, NOW));
    write(folder.path(), &old);
    let gateway = gateway(folder.path(), "");
    let client = trusting(&[&old, &new]);
    let mut running = TlsClient::handshake(&client, gateway.address, NAME).unwrap();
    assert_eq!(running.get("/hello").status, 200);
    assert_eq!(running.peer_certificate(), &old.der);

    // Replace one file after the other, as certificate tools do. Until both files are replaced, certificate and key do
    // not match.
    put(folder.path(), "server.pem", &new.cert);
    eventually("the mismatched pair is detected", || refusals(&gateway) == 1);
    assert!(gateway.log().contains("certificate and key do not match"), "{}", gateway.log());
    assert!(is_used(&gateway, &old), "the old certificate is used until the new key is written");
    put(folder.path(), "server.key", &new.key);
    eventually("the new certificate is used", || is_used(&gateway, &new));
    assert!(!is_used(&gateway, &old));
    eventually("the reload is logged", || gateway.log().contains("reloaded"));

    assert_eq!(running.get("/hello").status, 200, "an open connection continues");
    let resumed = TlsClient::handshake(&client, gateway.address, NAME).unwrap();
    assert_eq!(kind(&resumed), HandshakeKind::Resumed, "a session is resumed");
}

#[test]
fn certificate_files_written_in_place_are_used() {
    let folder = tempfile::tempdir().unwrap();
    let (old, new) = (Pair::server(NAME, NOW), Pair::server(NAME, NOW));
    write(folder.path(), &old);
    let gateway = gateway(folder.path(), "");
    assert!(is_used(&gateway, &old));
    write(folder.path(), &new);
    eventually("the new certificate is used", || is_used(&gateway, &new));
    eventually("the reload is logged", || gateway.log().contains("reloaded"));
    assert_eq!(gateway.log().matches("reloaded").count(), 1, "two changed files cause one reload:\n{}", gateway.log());
}

#[test]
fn replaced_symlink_of_a_certificate_is_used() {
    // Kubernetes mounts files through two symlinks: `server.pem` → `..data/server.pem`, and `..data` → a directory with
    // a generated name.
    let folder = tempfile::tempdir().unwrap();
    let (old, new) = (Pair::server(NAME, NOW), Pair::server(NAME, NOW));
    for (name, pair) in [("..1", &old), ("..2", &new)] {
        std::fs::create_dir(folder.path().join(name)).unwrap();
        write(&folder.path().join(name), pair);
    }
    symlink("..1", folder.path().join("..data")).unwrap();
    for name in ["server.pem", "server.key"] {
        symlink(Path::new("..data").join(name), folder.path().join(name)).unwrap();
    }
    let gateway = gateway(folder.path(), "");
    assert!(is_used(&gateway, &old));
    symlink("..2", folder.path().join("..tmp")).unwrap();
    std::fs::rename(folder.path().join("..tmp"), folder.path().join("..data")).unwrap();
    eventually("the new certificate is used", || is_used(&gateway, &new));
}

#[test]
fn invalid_certificate_is_rejected_and_the_old_one_stays() {
    let folder = tempfile::tempdir().unwrap();
    let (old, other) = (Pair::server(NAME, NOW), Pair::server(NAME, NOW));
    let (past, future) = (Pair::server(NAME, PAST), Pair::server(NAME, FUTURE));
    write(folder.path(), &old);
    let gateway = gateway(folder.path(), "");
    let mut running = TlsClient::handshake(&trusting(&[&old]), gateway.address, NAME).unwrap();
    let half = &other.cert[..other.cert.len() / 2];
    for (cert, key, reason) in [
        (&*old.cert, &*other.key, "certificate and key do not match"),
        (&other.cert, &old.key, "certificate and key do not match"),
        (&past.cert, &past.key, "the certificate has expired on Jan  1 00:00:00 2001"),
        (&future.cert, &future.key, "the certificate is not valid before Jan  1 00:00:00 3999"),
        ("", &old.key, "there is no certificate"),
        (&old.key, &old.key, "there is no certificate"),
        (half, &other.key, "the certificate cannot be read"),
        ("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", &other.key, "the certificate is malformed"),
        (&old.cert, "", "the key cannot be read"),
        (&old.cert, "garbage", "the key cannot be read"),
        (&old.cert, &old.cert, "the key cannot be read"),
    ] {
        let before = refusals(&gateway);
        put(folder.path(), "server.pem", cert);
        put(folder.path(), "server.key", key);
        let last =
            || gateway.log().lines().rfind(|line| line.contains("cannot reload the file")).unwrap_or("").to_owned();
        eventually(reason, || refusals(&gateway) > before && last().contains(reason));
        let line = last();
        assert!(line.contains("server.pem") && line.contains("WARN"), "{reason}: {line}");
        assert!(!line.contains("PRIVATE KEY"), "{line}");
        assert!(is_used(&gateway, &old), "{reason}: the old certificate stays");
        // After an error, the gateway accepts a valid certificate again.
        let reloads = || gateway.log().matches("reloaded").count();
        let before = reloads();
        put(folder.path(), "server.pem", &old.cert);
        put(folder.path(), "server.key", &old.key);
        eventually("the valid certificate is reloaded", || reloads() > before);
    }
    std::fs::remove_file(folder.path().join("server.key")).unwrap();
    eventually("the removal of the file is detected", || {
        gateway.log().lines().any(|line| line.contains("cannot read the file") && line.contains("server.key"))
    });
    assert!(is_used(&gateway, &old), "the old certificate stays if a file is missing");
    assert_eq!(running.get("/hello").status, 200, "an open connection continues");
}

#[test]
fn sighup_reloads_certificates() {
    // The file watcher does not see changes behind a symlink to another directory.
    let (folder, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (old, new) = (Pair::server(NAME, NOW), Pair::server(NAME, NOW));
    write(elsewhere.path(), &old);
    for name in ["server.pem", "server.key"] {
        symlink(elsewhere.path().join(name), folder.path().join(name)).unwrap();
    }
    let gateway = gateway(folder.path(), "");
    assert!(is_used(&gateway, &old));
    write(elsewhere.path(), &new);
    signal(&gateway.child, "HUP");
    eventually("the new certificate is used", || is_used(&gateway, &new));
    // A reload that was requested is logged even if the files have not changed.
    let reloads = || gateway.log().matches("configuration reloaded").count();
    eventually("the reload is logged", || reloads() == 1);
    signal(&gateway.child, "HUP");
    eventually("the second reload is logged", || reloads() == 2);
    std::fs::write(elsewhere.path().join("server.key"), "garbage").unwrap();
    let rejections = || gateway.log().matches("cannot reload the configuration").count();
    for count in 1..3 {
        // The watcher compares all files once after each reload, so it may report the file before the signal.
        let before = refusals(&gateway);
        signal(&gateway.child, "HUP");
        eventually("the fault is logged each time", || rejections() == count && refusals(&gateway) > before);
    }
    assert!(is_used(&gateway, &new));
}

#[test]
fn sighup_without_certificates_does_not_end_the_process() {
    let gateway = Gateway::start("[[route]]\nname = \"r\"\npath = \"/\"\nrespond = { status = 200 }\n");
    signal(&gateway.child, "HUP");
    eventually("the reload is logged", || gateway.log().contains("reloaded"));
    assert_eq!(gateway.get("/").status, 200);
}

#[test]
fn expired_certificate_at_start_is_a_warning() {
    let folder = tempfile::tempdir().unwrap();
    let (past, now) = (Pair::server(NAME, PAST), Pair::server(NAME, NOW));
    write(folder.path(), &past);
    let gateway = gateway(folder.path(), "");
    let warning = "server.pem: the certificate has expired on Jan  1 00:00:00 2001";
    assert!(gateway.log().contains(warning), "{}", gateway.log());
    let config = gateway.directory().join("gateway.toml");
    let check = crate::support::gateway::binary().arg("check").arg("--config").arg(config).output().unwrap();
    let out = String::from_utf8(check.stdout).unwrap();
    assert!(out.contains("warning: ") && out.contains(warning), "{out}");
    assert!(!is_used(&gateway, &past), "the client rejects the expired certificate");
    write(folder.path(), &now);
    eventually("the renewed certificate is used", || is_used(&gateway, &now));
}

#[test]
fn sessions_are_resumed_by_every_worker() {
    let folder = tempfile::tempdir().unwrap();
    let pair = Pair::server(NAME, NOW);
    write(folder.path(), &pair);
    for (layout, version) in
        [("per-core", &TLS12), ("per-core", &TLS13), ("work-stealing", &TLS12), ("work-stealing", &TLS13)]
    {
        let gateway = gateway(folder.path(), &format!("[server]\nworkers = 4\nthreading = \"{layout}\"\n"));
        let client = tls(&[&pair.der], None, &[version]);
        // Open enough connections to reach the socket of every worker.
        for count in 0..20 {
            let mut connection = TlsClient::handshake(&client, gateway.address, NAME).unwrap();
            assert_eq!(connection.get("/hello").status, 200);
            let resumed = kind(&connection) == HandshakeKind::Resumed;
            assert_eq!(resumed, count > 0, "{layout}, {version:?}, connection {count}");
        }
    }
}

/// Return the certificate that OpenSSL gets, or `None` if the handshake fails. `name` is the server name that it sends.
fn openssl(gateway: &Gateway, name: Option<&str>, options: &[&str]) -> Option<CertificateDer<'static>> {
    let address = gateway.address.to_string();
    let server_name = name.map_or(vec!["-noservername"], |name| vec!["-servername", name]);
    let arguments = [&["s_client", "-connect", &address][..], &server_name, options].concat();
    let output = Command::new("openssl").args(&arguments).stdin(Stdio::null()).output().unwrap();
    CertificateDer::from_pem_slice(&output.stdout).ok()
}

#[test]
fn client_gets_the_certificate_whose_key_it_supports() {
    const ECDSA: &str = "ecdsa_secp256r1_sha256";
    const RSA: &str = "rsa_pss_rsae_sha256:rsa_pkcs1_sha256";
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let pair = |name: &str| {
        format!("{{ cert = \"{}\", key = \"{}\" }}", path(&format!("{name}.pem")), path(&format!("{name}.key")))
    };
    let put_pair = |name: &str, pair: &Pair| {
        put(folder.path(), &format!("{name}.key"), &pair.key);
        put(folder.path(), &format!("{name}.pem"), &pair.cert);
    };
    let (rsa, ecdsa, other) = (Pair::rsa_server(NAME, NOW), Pair::server(NAME, NOW), Pair::server("other.test", NOW));
    for (name, pair) in [("rsa", &rsa), ("ecdsa", &ecdsa), ("other", &other)] {
        put_pair(name, pair);
    }
    let config = |certificates: [&str; 3]| {
        format!(
            "[[listener]]\naddress = \"127.0.0.1:0\"\ntls.certificates = [{}]\n\
             [[route]]\nname = \"hello\"\npath = \"/hello\"\nrespond = {{ status = 200 }}\n",
            certificates.map(pair).join(", ")
        )
    };
    let check = |gateway: &Gateway, rsa: &Pair, ecdsa: &Pair| {
        let cases: [(Option<&str>, &[&str], Option<&Pair>); 10] = [
            (Some(NAME), &["-sigalgs", RSA], Some(rsa)),
            (Some(NAME), &["-sigalgs", ECDSA], Some(ecdsa)),
            (Some(NAME), &["-sigalgs", "rsa_pss_rsae_sha256:ecdsa_secp256r1_sha256"], Some(ecdsa)),
            (Some(NAME), &["-sigalgs", RSA, "-alpn", "h2"], Some(rsa)),
            (Some(NAME), &["-sigalgs", RSA, "-tls1_2"], Some(rsa)),
            // A client of TLS 1.2 restricts the keys by its cipher suites as well (RFC 5246 §7.4.2).
            (Some(NAME), &["-tls1_2", "-cipher", "ECDHE-RSA-AES128-GCM-SHA256"], Some(rsa)),
            (Some(NAME), &["-tls1_2", "-cipher", "ECDHE-ECDSA-AES128-GCM-SHA256"], Some(ecdsa)),
            // The key of the certificate for this name has another type.
            (Some("other.test"), &["-sigalgs", RSA, "-tls1_3"], None),
            (Some("other.test"), &[], Some(&other)),
            (None, &["-sigalgs", RSA], Some(rsa)),
        ];
        for (name, options, expected) in cases {
            let found = openssl(gateway, name, options);
            assert!(found.as_ref() == expected.map(|pair| &pair.der), "{name:?} {options:?}");
        }
    };
    let mut gateway = Gateway::start(&config(["rsa", "ecdsa", "other"]));
    check(&gateway, &rsa, &ecdsa);
    // Each of the certificates is replaced for its clients.
    let (new_rsa, new_ecdsa) = (Pair::rsa_server(NAME, NOW), Pair::server(NAME, NOW));
    put_pair("rsa", &new_rsa);
    put_pair("ecdsa", &new_ecdsa);
    eventually("both certificates are replaced", || {
        is_used(&gateway, &new_ecdsa) && {
            openssl(&gateway, Some(NAME), &["-sigalgs", RSA]).as_ref() == Some(&new_rsa.der)
        }
    });
    check(&gateway, &new_rsa, &new_ecdsa);
    let _successor = hot_restart(&mut gateway);
    check(&gateway, &new_rsa, &new_ecdsa);
    // The order of the list decides only between keys of one type.
    let gateway = Gateway::start(&config(["other", "ecdsa", "rsa"]));
    check(&gateway, &new_rsa, &new_ecdsa);
}
