//! Client certificates: which clients can connect, and which identity a client gets from its certificate.

use std::path::Path;

use crate::hot_restart::hot_restart;
use crate::support::certificates::{Authority, FUTURE, NOW, PAST, Pair, TlsClient, ask, tls, tls_with_chain};
use crate::support::eventually;
use crate::support::gateway::{Gateway, binary};
use crate::support::reload::{reloads, with_admin};
use crate::support::upstream::Upstream;
use hyper::client::conn::http2::SendRequest;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rcgen::{DnType, ExtendedKeyUsagePurpose};
use rustls::ClientConfig;
use rustls::version::{TLS12, TLS13};
use sluicegate::clock;

const NAME: &str = "gate.test";

/// The route `who` has a limit by client certificate. The route `open` has no limits.
const ROUTES: &str = "[limit.who]\nby = \"client-cert\"\nquota = \"100/24h\"\nexempt = [\"client-cert=CN=monitor,O=Acme\"]\n\
                      [[route]]\nname = \"who\"\npath = \"/who\"\nlimits = [\"who\"]\nrespond = { status = 200 }\n\
                      [[route]]\nname = \"open\"\npath = \"/open\"\nrespond = { status = 200 }\n";

/// Write the server certificate and the client CA certificates to the folder. Return the configuration of a listener.
fn listener(folder: &Path, server: &Pair, authorities: &str, auth: Option<&str>) -> String {
    for (name, content) in [("server.pem", &*server.cert), ("server.key", &server.key), ("ca.pem", authorities)] {
        std::fs::write(folder.join(name), content).unwrap();
    }
    let path = |name: &str| folder.join(name).display().to_string();
    let clients = auth.map_or(String::new(), |auth| {
        format!("tls.client_ca = \"{}\"\ntls.client_auth = \"{auth}\"\n", path("ca.pem"))
    });
    let pair = format!("{{ cert = \"{}\", key = \"{}\" }}", path("server.pem"), path("server.key"));
    format!("[[listener]]\naddress = \"127.0.0.1:0\"\ntls.certificates = [{pair}]\n{clients}")
}

#[test]
fn client_auth_decides_which_certificates_connect() {
    let folder = tempfile::tempdir().unwrap();
    let (ours, other) = (Authority::new("ours"), Authority::new("other"));
    let server = Pair::server(NAME, NOW);
    let listeners: String = [Some("required"), Some("optional"), None]
        .map(|auth| listener(folder.path(), &server, &ours.pem(), auth))
        .concat();
    let gateway = Gateway::start(&format!("{ROUTES}{listeners}"));
    let [required, optional, none] = gateway.addresses()[..] else { panic!("three listeners") };

    let alice = [(DnType::CommonName, "alice")];
    let good = ours.client(&alice, NOW);
    let untrusted = [
        ("of another authority", other.client(&alice, NOW)),
        ("of an authority with our authority's name", Authority::new("ours").client(&alice, NOW)),
        ("that signed itself", Pair::server("alice", NOW)),
        ("that has expired", ours.client(&alice, PAST)),
        ("that is not valid yet", ours.client(&alice, FUTURE)),
        ("of a server", ours.sign(&alice, NOW, ExtendedKeyUsagePurpose::ServerAuth)),
    ];
    for version in [&TLS12, &TLS13] {
        let status = |pair: Option<&Pair>, address, path| {
            // Each connection uses a new TLS client configuration. It cannot resume a session, so the gateway verifies
            // the certificate.
            ask(&tls(&[&server.der], pair, &[version]), address, NAME, path).map(|reply| reply.status)
        };
        for (what, pair, address, who, open) in [
            ("required, none", None, required, None, None),
            ("required, good", Some(&good), required, Some(200), Some(200)),
            ("optional, none", None, optional, Some(401), Some(200)),
            ("optional, good", Some(&good), optional, Some(200), Some(200)),
            ("not asked for", Some(&good), none, Some(401), Some(200)),
        ] {
            assert_eq!(status(pair, address, "/who"), who, "{what}, {version:?}");
            assert_eq!(status(pair, address, "/open"), open, "{what}, {version:?}");
        }
        for (what, pair) in &untrusted {
            for (listener, address) in [("required", required), ("optional", optional)] {
                assert_eq!(status(Some(pair), address, "/open"), None, "a certificate {what}, {listener}, {version:?}");
            }
        }
    }
    let reply = ask(&tls(&[&server.der], None, &[&TLS13]), optional, NAME, "/who").unwrap();
    reply.assert_problem(401, "no certificate");
    assert!(reply.header("www-authenticate").is_some(), "{reply:?}");
    assert!(reply.text().contains("subject of a client certificate"), "{}", reply.text());
    let warning = "`who` counts by client-cert, but 127.0.0.1:0 has no tls.client_ca";
    assert_eq!(gateway.log().matches(warning).count(), 1, "only for the third listener:\n{}", gateway.log());
}

#[test]
fn certificates_of_one_subject_share_one_identity() {
    let folder = tempfile::tempdir().unwrap();
    let (one, other) = (Authority::new("one"), Authority::new("other"));
    let server = Pair::server(NAME, NOW);
    let listener = listener(folder.path(), &server, &(one.pem() + &other.pem()), Some("optional"));
    let gateway = Gateway::start(&format!("{ROUTES}{listener}"));
    let remaining = |pair: &Pair| {
        let reply = ask(&tls(&[&server.der], Some(pair), &[&TLS13]), gateway.address, NAME, "/who").unwrap();
        assert_eq!(reply.status, 200, "{reply:?}");
        reply.remaining("who")
    };
    let (cn, o, ou) = (DnType::CommonName, DnType::OrganizationName, DnType::OrganizationalUnitName);
    let alice = [(o.clone(), "Acme"), (cn.clone(), "alice")];
    // Three certificates with the same subject: two of one CA with different keys, and one of another CA.
    for (left, pair) in [99, 98, 97].into_iter().zip([
        one.client(&alice, NOW),
        one.client(&alice, [2001, 3000]),
        other.client(&alice, NOW),
    ]) {
        assert_eq!(remaining(&pair), left, "the same subject");
    }
    for subject in [
        vec![(o.clone(), "Acme"), (cn.clone(), "bob")],
        vec![(o.clone(), "Acme"), (cn.clone(), "Alice")],
        vec![(o.clone(), "Acme Ltd"), (cn.clone(), "alice")],
        vec![(cn.clone(), "alice"), (o.clone(), "Acme")],
        vec![(o.clone(), "Acme"), (ou, "IT"), (cn.clone(), "alice")],
        vec![(cn.clone(), "alice")],
        vec![(cn.clone(), "alice,O=Acme")],
        vec![(cn.clone(), "alice\\,O=Acme")],
        vec![(o.clone(), "Acme"), (cn.clone(), "alice ")],
    ] {
        assert_eq!(remaining(&one.client(&subject, NOW)), 99, "{subject:?} is another identity");
    }
    // An empty subject is not an identity, because many clients may have certificates with an empty subject.
    let client = tls(&[&server.der], Some(&one.client(&[], NOW)), &[&TLS13]);
    assert_eq!(ask(&client, gateway.address, NAME, "/who").unwrap().status, 401);
    // The limit exempts this subject. `exempt` contains it in the text form that the documentation describes.
    let monitor = tls(&[&server.der], Some(&one.client(&[(o, "Acme"), (cn, "monitor")], NOW)), &[&TLS13]);
    let reply = ask(&monitor, gateway.address, NAME, "/who").unwrap();
    assert_eq!((reply.status, reply.header("ratelimit")), (200, None), "{reply:?}");
}

#[test]
fn resumed_session_keeps_its_identity_and_opens_no_other_listener() {
    let folder = tempfile::tempdir().unwrap();
    let ours = Authority::new("ours");
    let server = Pair::server(NAME, NOW);
    let listeners: String =
        [Some("required"), None].map(|auth| listener(folder.path(), &server, &ours.pem(), auth)).concat();
    let gateway = Gateway::start(&format!("{ROUTES}{listeners}"));
    let [required, none] = gateway.addresses()[..] else { panic!("two listeners") };
    let alice = ours.client(&[(DnType::CommonName, "alice")], NOW);
    for (version, first) in [(&TLS12, 99), (&TLS13, 96)] {
        let client = tls(&[&server.der], Some(&alice), &[version]);
        for (count, kind) in
            (0..3).zip([rustls::HandshakeKind::Full, rustls::HandshakeKind::Resumed, rustls::HandshakeKind::Resumed])
        {
            let mut connection = TlsClient::handshake(&client, required, NAME).unwrap();
            assert_eq!(connection.get("/who").remaining("who"), first - count, "{version:?}");
            assert_eq!(handshake_kind(&connection), kind, "{version:?}, connection {count}");
        }
        // A TLS session of a listener without client authentication must not be accepted by a listener that requires
        // it.
        let without_certificate = tls(&[&server.der], None, &[version]);
        for kind in [rustls::HandshakeKind::Full, rustls::HandshakeKind::Resumed] {
            let mut connection = TlsClient::handshake(&without_certificate, none, NAME).unwrap();
            assert_eq!(connection.get("/open").status, 200);
            assert_eq!(handshake_kind(&connection), kind, "{version:?}");
        }
        assert!(ask(&without_certificate, required, NAME, "/open").is_none(), "{version:?}");
    }
}

#[test]
fn session_does_not_outlive_its_certificate() {
    let folder = tempfile::tempdir().unwrap();
    let ours = Authority::new("ours");
    let server = Pair::server(NAME, NOW);
    let listeners: String =
        [Some("required"), Some("optional")].map(|auth| listener(folder.path(), &server, &ours.pem(), auth)).concat();
    let gateway = Gateway::start(&format!("{ROUTES}{listeners}"));
    let now_s = || clock::unix_us() / 1_000_000;
    // The certificate is valid for this second and five more, which is enough time for four handshakes.
    let until = now_s() + 5;
    let alice = ours.client_until(&[(DnType::CommonName, "alice")], until);
    let sessions = [&TLS12, &TLS13].map(|version| tls(&[&server.der], Some(&alice), &[version]));
    for (client, address) in sessions.iter().zip(gateway.addresses()) {
        for kind in [rustls::HandshakeKind::Full, rustls::HandshakeKind::Resumed] {
            let mut connection = TlsClient::handshake(client, address, NAME).unwrap();
            assert_eq!((connection.get("/who").status, handshake_kind(&connection)), (200, kind));
        }
    }
    eventually("the certificate has expired", || now_s() > until);
    for (client, address) in sessions.iter().zip(gateway.addresses()) {
        let mut connection = TlsClient::handshake(client, address, NAME).unwrap();
        // When rustls resumes a session, it does not verify the certificate again.
        assert_eq!(handshake_kind(&connection), rustls::HandshakeKind::Resumed);
        let _ =
            std::io::Write::write_all(connection.stream.get_mut(), b"GET /open HTTP/1.1\r\nHost: gate.test\r\n\r\n");
        assert!(connection.reply().is_none(), "an expired certificate counts as no certificate");
    }
}

/// Return the kind of handshake. A handshake with HelloRetryRequest counts as a full one.
fn handshake_kind(client: &TlsClient) -> rustls::HandshakeKind {
    match client.stream.get_ref().conn.handshake_kind().unwrap() {
        rustls::HandshakeKind::FullWithHelloRetryRequest => rustls::HandshakeKind::Full,
        kind => kind,
    }
}

#[test]
fn reload_of_client_ca_file_ends_sessions_of_removed_ones() {
    let folder = tempfile::tempdir().unwrap();
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let server = Pair::server(NAME, NOW);
    let listener = listener(folder.path(), &server, &old.pem(), Some("required"));
    let gateway = Gateway::start(&format!("{ROUTES}{listener}"));
    let alice = [(DnType::CommonName, "alice")];
    let [of_old, of_new] =
        [&old, &new].map(|authority| tls(&[&server.der], Some(&authority.client(&alice, NOW)), &[&TLS13]));
    let gets_in = |client| ask(client, gateway.address, NAME, "/who").is_some();
    assert!(gets_in(&of_old) && !gets_in(&of_new), "at first");
    let mut running = TlsClient::handshake(&of_old, gateway.address, NAME).unwrap();
    assert_eq!(running.get("/who").status, 200);

    std::fs::write(folder.path().join("ca.pem"), new.pem()).unwrap();
    eventually("the new CA is trusted", || gets_in(&of_new));
    assert!(!gets_in(&of_old), "a session of the old CA is not resumed");
    for (content, reason) in [
        ("", "there is no certificate"),
        ("garbage", "there is no certificate"),
        ("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "not a usable CA certificate"),
        ("-----BEGIN CERTIFICATE-----\nAAAA\n", "cannot be read"),
    ] {
        let refusals = || gateway.log().matches("cannot reload the file").count();
        let before = refusals();
        std::fs::write(folder.path().join("ca.new"), content).unwrap();
        std::fs::rename(folder.path().join("ca.new"), folder.path().join("ca.pem")).unwrap();
        eventually(reason, || refusals() > before);
        let log = gateway.log();
        let line = log.lines().rfind(|line| line.contains("cannot reload the file")).unwrap();
        assert!(line.contains(reason) && line.contains("ca.pem") && line.contains("WARN"), "{reason}: {line}");
        assert!(gets_in(&of_new) && !gets_in(&of_old), "{reason}: the previous CA certificates stay in use");
    }
    let rejected = running.get("/who");
    rejected.assert_problem(401, "the client certificate has expired or is no longer trusted");
    assert_eq!(rejected.header("connection"), Some("close"));
    assert!(running.reply().is_none(), "the gateway closes the connection");
}

#[test]
fn open_connection_is_verified_again_after_a_reload_of_the_client_ca() {
    let folder = tempfile::tempdir().unwrap();
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let server = Pair::server(NAME, NOW);
    let config = |auth| format!("{ROUTES}{}", listener(folder.path(), &server, &old.pem(), auth));
    // Without `client_ca`, no limit may count by client certificate.
    let without_limit =
        format!("[[route]]{}", ROUTES.split_once("[[route]]").unwrap().1.replace("limits = [\"who\"]\n", ""));
    let alice = [(DnType::CommonName, "alice")];
    let client = tls(&[&server.der], Some(&old.client(&alice, NOW)), &[&TLS13]);
    for (content, auth, status) in [
        (old.pem() + &new.pem(), Some("required"), 200),
        (old.pem(), Some("optional"), 200),
        (new.pem(), Some("required"), 401),
        (new.pem(), Some("optional"), 401),
        (new.pem(), None, 401),
    ] {
        let gateway = Gateway::start(&with_admin(&config(Some("required"))));
        let connect = || TlsClient::handshake(&client, gateway.address, NAME).unwrap();
        let (mut first, mut second) = (connect(), connect());
        assert_eq!([first.get("/open").status, second.get("/who").status], [200, 200]);
        let after = if auth.is_some() { config(auth) } else { config(auth).replace(ROUTES, &without_limit) };
        std::fs::write(folder.path().join("ca.pem"), content).unwrap();
        reloads(&gateway, &after);
        for (connection, path) in [(&mut first, "/open"), (&mut second, "/who")] {
            let reply = connection.get(path);
            assert_eq!(reply.status, status, "{path} {auth:?} {}", reply.text());
            assert_eq!(reply.header("connection"), (status == 401).then_some("close"), "{path} {auth:?}");
        }
    }
}

#[test]
fn open_connection_does_not_outlive_its_certificate() {
    let folder = tempfile::tempdir().unwrap();
    let ours = Authority::new("ours");
    let server = Pair::server(NAME, NOW);
    let gateway =
        Gateway::start(&format!("{ROUTES}{}", listener(folder.path(), &server, &ours.pem(), Some("required"))));
    let now_s = || clock::unix_us() / 1_000_000;
    let until = now_s() + 5;
    let alice = ours.client_until(&[(DnType::CommonName, "alice")], until);
    let client = tls(&[&server.der], Some(&alice), &[&TLS13]);
    let mut connections = [(); 2].map(|()| TlsClient::handshake(&client, gateway.address, NAME).unwrap());
    for connection in &mut connections {
        assert_eq!(connection.get("/who").status, 200);
    }
    eventually("the certificate has expired", || now_s() > until);
    for (connection, path) in connections.iter_mut().zip(["/who", "/open"]) {
        connection.get(path).assert_problem(401, "the client certificate has expired or is no longer trusted");
        assert!(connection.reply().is_none(), "the gateway closes the connection");
    }
}

/// Open an HTTP/2 connection. The task ends with the connection.
async fn http2_client(
    client: &ClientConfig,
    gateway: &Gateway,
    name: &'static str,
) -> (SendRequest<EmptyBody>, Connection) {
    let mut client = client.clone();
    client.alpn_protocols = vec![b"h2".to_vec()];
    let stream = tokio::net::TcpStream::connect(gateway.address).await.unwrap();
    let connector = tokio_rustls::TlsConnector::from(std::sync::Arc::new(client));
    let stream = connector.connect(name.try_into().unwrap(), stream).await.unwrap();
    let (sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    (sender, tokio::spawn(connection))
}

type EmptyBody = http_body_util::Empty<&'static [u8]>;
type Connection = tokio::task::JoinHandle<hyper::Result<()>>;

fn get(host: &str, path: &str) -> http::Request<EmptyBody> {
    http::Request::builder().uri(format!("https://{host}{path}")).body(EmptyBody::new()).unwrap()
}

#[tokio::test]
async fn http2_connection_is_closed_when_its_certificate_is_no_longer_trusted() {
    let folder = tempfile::tempdir().unwrap();
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let server = Pair::server(NAME, NOW);
    let config = format!("{ROUTES}{}", listener(folder.path(), &server, &old.pem(), Some("required")));
    let gateway = Gateway::start(&with_admin(&config));
    let client = tls(&[&server.der], Some(&old.client(&[(DnType::CommonName, "alice")], NOW)), &[&TLS13]);
    let (mut sender, connection) = http2_client(&client, &gateway, NAME).await;
    let request = || get(NAME, "/who");
    assert_eq!(sender.send_request(request()).await.unwrap().status(), 200);
    std::fs::write(folder.path().join("ca.pem"), new.pem()).unwrap();
    reloads(&gateway, &config);
    assert_eq!(sender.send_request(request()).await.unwrap().status(), 401);
    // GOAWAY ends the connection, although the client keeps its sender.
    tokio::time::timeout(crate::support::MAX_WAIT, connection).await.expect("the connection ends").unwrap().unwrap();
    assert!(sender.send_request(request()).await.is_err());
}

#[test]
fn certificate_headers_of_clients_are_removed() {
    let upstream = Upstream::start();
    let gateway = Gateway::start(&format!(
        "[client_ip]\ntrusted_proxies = [\"127.0.0.9/32\"]\n[upstream.u]\nservers = [\"{}\"]\n\
         [[route]]\nname = \"r\"\npath = \"/\"\nupstream = \"u\"\n",
        upstream.url()
    ));
    let fields = ["Client-Cert", "client-cert-chain", "Client_Cert", "CLIENT.CERT", "X-Forwarded-Client-Cert"];
    for field in fields {
        assert_eq!(gateway.client().get_with("/", &[(field, ":YQ==:")]).status, 200);
        assert!(!upstream.last().head.contains("YQ=="), "{field}: {}", upstream.last().head);
    }
    let mut proxy = crate::support::client::Client::connect_from([127, 0, 0, 9].into(), gateway.address);
    assert_eq!(proxy.get_with("/", &[(fields[0], ":YQ==:")]).status, 200);
    assert_eq!(upstream.last().headers("client-cert"), [":YQ==:"], "a trusted proxy may send the header");
}

#[test]
fn reload_with_another_client_ca_ends_sessions_of_the_old_one() {
    let folder = tempfile::tempdir().unwrap();
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let server = Pair::server(NAME, NOW);
    std::fs::write(folder.path().join("new.pem"), new.pem()).unwrap();
    let alice = [(DnType::CommonName, "alice")];
    for (version, auth) in [(&TLS12, "required"), (&TLS13, "required"), (&TLS12, "optional"), (&TLS13, "optional")] {
        let before = format!("{ROUTES}{}", listener(folder.path(), &server, &old.pem(), Some(auth)));
        let gateway = Gateway::start(&with_admin(&before));
        let connect = |client| {
            let connection = TlsClient::handshake(client, gateway.address, NAME).ok();
            connection.map(|connection| handshake_kind(&connection))
        };
        let [of_old, of_new] =
            [&old, &new].map(|authority| tls(&[&server.der], Some(&authority.client(&alice, NOW)), &[version]));
        let accepted = |client| ask(client, gateway.address, NAME, "/who").is_some();
        assert!(accepted(&of_old) && !accepted(&of_new), "before the reload, {version:?}, {auth}");
        // A reload that does not change client authentication keeps the sessions.
        reloads(&gateway, &format!("{before}[[route]]\nname = \"x\"\npath = \"/x\"\nrespond = {{ status = 200 }}\n"));
        assert_eq!(connect(&of_old), Some(rustls::HandshakeKind::Resumed), "{version:?}, {auth}");

        reloads(&gateway, &before.replace("ca.pem", "new.pem"));
        assert!(!accepted(&of_old), "a session of the old CA is not resumed, {version:?}, {auth}");
        assert!(accepted(&of_new), "the new CA is trusted, {version:?}, {auth}");
    }
}

#[test]
fn reload_that_requires_client_certificates_ends_sessions_without_one() {
    let folder = tempfile::tempdir().unwrap();
    let ours = Authority::new("ours");
    let server = Pair::server(NAME, NOW);
    let config = |auth| {
        let route = "[[route]]\nname = \"open\"\npath = \"/open\"\nrespond = { status = 200 }\n";
        format!("{route}{}", listener(folder.path(), &server, &ours.pem(), auth))
    };
    let [optional, required, without_ca] = [Some("optional"), Some("required"), None].map(config);
    for (version, before) in [(&TLS12, &optional), (&TLS13, &optional), (&TLS12, &without_ca), (&TLS13, &without_ca)] {
        let gateway = Gateway::start(&with_admin(before));
        let anonymous = tls(&[&server.der], None, &[version]);
        for kind in [rustls::HandshakeKind::Full, rustls::HandshakeKind::Resumed] {
            let mut connection = TlsClient::handshake(&anonymous, gateway.address, NAME).unwrap();
            assert_eq!((connection.get("/open").status, handshake_kind(&connection)), (200, kind), "{version:?}");
        }
        reloads(&gateway, &required);
        assert!(ask(&anonymous, gateway.address, NAME, "/open").is_none(), "{version:?}");
    }
}

#[test]
fn reload_back_to_the_first_client_ca_ends_sessions_of_the_second() {
    let folder = tempfile::tempdir().unwrap();
    let (first, other) = (Authority::new("first"), Authority::new("other"));
    let server = Pair::server(NAME, NOW);
    let config = format!("{ROUTES}{}", listener(folder.path(), &server, &first.pem(), Some("required")));
    let gateway = Gateway::start(&with_admin(&config));
    let alice = [(DnType::CommonName, "alice")];
    let [of_first, of_other] =
        [&first, &other].map(|authority| tls(&[&server.der], Some(&authority.client(&alice, NOW)), &[&TLS13]));
    let accepted = |client| ask(client, gateway.address, NAME, "/open").is_some();
    assert!(accepted(&of_first) && !accepted(&of_other), "at first");
    std::fs::write(folder.path().join("ca.pem"), other.pem()).unwrap();
    eventually("the other CA is trusted", || accepted(&of_other));
    // The reload itself reads the changed file, without waiting for the file watcher.
    std::fs::write(folder.path().join("ca.pem"), first.pem()).unwrap();
    reloads(&gateway, &config);
    assert!(!accepted(&of_other), "a session of the intermediate CA file is not resumed");
    assert!(accepted(&of_first));
}

#[test]
fn running_connection_keeps_its_subject_when_a_reload_changes_trusted_proxies() {
    let folder = tempfile::tempdir().unwrap();
    let ours = Authority::new("ours");
    let server = Pair::server(NAME, NOW);
    let config = format!("{ROUTES}{}", listener(folder.path(), &server, &ours.pem(), Some("required")));
    let gateway = Gateway::start(&with_admin(&config));
    let client = tls(&[&server.der], Some(&ours.client(&[(DnType::CommonName, "alice")], NOW)), &[&TLS13]);
    let mut connection = TlsClient::handshake(&client, gateway.address, NAME).unwrap();
    assert_eq!(connection.get("/who").remaining("who"), 99);
    reloads(&gateway, &format!("{config}[client_ip]\ntrusted_proxies = [\"127.0.0.9\"]\n"));
    assert_eq!(connection.get("/who").remaining("who"), 98);
}

#[test]
fn missing_certificates_are_charged_to_limits_by_ip() {
    let folder = tempfile::tempdir().unwrap();
    let ours = Authority::new("ours");
    let server = Pair::server(NAME, NOW);
    let alice = ours.client(&[(DnType::CommonName, "alice")], NOW);
    for limits in ["\"ip\", \"cert\"", "\"cert\", \"ip\""] {
        let fixed = "algorithm = \"fixed-window\"\nstart = \"first-request\"";
        let config = format!(
            "[limit.ip]\nby = \"ip\"\nquota = \"3/day\"\n{fixed}\n[limit.cert]\nby = \"client-cert\"\nquota = \"100/day\"\n\
             {fixed}\n[[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [{limits}]\nrespond = {{ status = 200 }}\n{}",
            listener(folder.path(), &server, &ours.pem(), Some("optional"))
        );
        let gateway = Gateway::start(&config);
        let reply =
            |pair: Option<&Pair>| ask(&tls(&[&server.der], pair, &[&TLS13]), gateway.address, NAME, "/r").unwrap();
        let with = reply(Some(&alice));
        assert_eq!((with.status, with.remaining("ip"), with.remaining("cert")), (200, 2, 99), "{limits}");
        assert_eq!([(); 4].map(|()| reply(None).status), [401, 401, 429, 429], "{limits}: on connections of their own");
        assert_eq!(reply(Some(&alice)).status, 429, "{limits}: a certificate does not bypass the limit");
    }
}

/// Send a request with these headers. Return the certificate headers (RFC 9440) that the upstream received.
fn certificate_headers(
    upstream: &Upstream,
    client: &mut TlsClient,
    path: &str,
    sent: &[(&str, &str)],
) -> [Vec<String>; 3] {
    assert_eq!(client.get_with(path, sent).status, 200);
    let seen = upstream.last();
    ["client-cert", "client-cert-chain", "client_cert"]
        .map(|name| seen.headers(name).into_iter().map(str::to_owned).collect())
}

#[test]
fn client_certificate_is_forwarded_where_the_upstream_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new("ours");
    let server = Pair::server(NAME, NOW);
    let upstream = Upstream::start();
    let listeners = listener(folder.path(), &server, &authority.pem(), Some("optional"));
    let routes = |names: &[&str]| -> String {
        let route = |name: &&str| format!("[[route]]\nname = \"{name}\"\npath = \"/{name}\"\nupstream = \"{name}\"\n");
        names.iter().map(route).collect()
    };
    let upstreams = format!(
        "[upstream.told]\nservers = [\"{0}\"]\nclient_cert_header = true\n[upstream.other]\nservers = [\"{0}\"]\n",
        upstream.url()
    );
    let config = format!("{upstreams}{}{listeners}", routes(&["told", "other"]));
    for trusted in ["", "[client_ip]\ntrusted_proxies = [\"127.0.0.1\"]\n"] {
        let gateway = Gateway::start(&format!("{config}{trusted}"));
        let alice = authority.client(&[(DnType::CommonName, "alice")], NOW);
        let forged = [
            ("Client-Cert", ":AAAA:"),
            ("Client-Cert", ":BBBB:"),
            ("Client_Cert", ":AAAA:"),
            ("Client-Cert-Chain", ":AAAA:"),
            ("Connection", "client-cert"),
        ];
        let encoded = |der: &[u8]| {
            use base64::Engine;
            format!(":{}:", base64::engine::general_purpose::STANDARD.encode(der))
        };
        let ca = authority.certificate();
        // Three TLS client configurations: the client sends its certificate alone, its certificate with the CA
        // certificate, or no certificate.
        let alone = tls(&[&server.der], Some(&alice), &[&TLS13]);
        let with_chain = tls_with_chain(&[&server.der], &alice, &[&alice.der, &ca.der]);
        let none = tls(&[&server.der], None, &[&TLS13]);
        for (config, certificate, chain) in [
            (&alone, vec![encoded(&alice.der)], vec![]),
            (&with_chain, vec![encoded(&alice.der)], vec![encoded(&ca.der)]),
            (&none, vec![], vec![]),
        ] {
            let mut client = TlsClient::handshake(config, gateway.address, NAME).unwrap();
            let seen = certificate_headers(&upstream, &mut client, "/told", &forged);
            assert_eq!(seen, [certificate.clone(), chain, vec![]], "trusted: {}", !trusted.is_empty());
            if let [certificate] = &certificate[..] {
                let item: sfv::Item = sfv::Parser::new(certificate).parse().unwrap();
                assert_eq!(item.bare_item.as_byte_sequence().unwrap(), &alice.der[..], "a Byte Sequence");
            }
            // For the upstream `other`, the gateway adds no certificate headers. It forwards the certificate headers of
            // the client only if the client is a trusted proxy.
            let [seen, _, alias] = certificate_headers(&upstream, &mut client, "/other", &forged[..3]);
            assert_eq!((seen.len(), alias), (if trusted.is_empty() { 0 } else { 2 }, vec![]));
        }
    }
}

#[test]
fn copies_have_the_client_certificate_only_if_their_own_upstream_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new("ours");
    let server = Pair::server(NAME, NOW);
    let alice = authority.client(&[(DnType::CommonName, "alice")], NOW);
    let client = tls(&[&server.der], Some(&alice), &[&TLS13]);
    let listeners = listener(folder.path(), &server, &authority.pem(), Some("optional"));
    for (is_told, is_copy_told) in [(false, false), (true, false), (false, true), (true, true)] {
        let (upstream, mirror) = (Upstream::start(), Upstream::start());
        let config = format!(
            "[upstream.api]\nservers = [\"{}\"]\nclient_cert_header = {is_told}\n\
             [upstream.next]\nservers = [\"{}\"]\nclient_cert_header = {is_copy_told}\n\
             [[route]]\nname = \"r\"\npath = \"/r\"\nupstream = \"api\"\nmirror = {{ upstream = \"next\" }}\n{listeners}",
            upstream.url(),
            mirror.url()
        );
        let gateway = Gateway::start(&config);
        assert_eq!(ask(&client, gateway.address, NAME, "/r").unwrap().status, 200);
        eventually("the copy arrives", || mirror.count() == 1);
        let has_certificate = [&upstream, &mirror].map(|server| !server.last().headers("client-cert").is_empty());
        assert_eq!(has_certificate, [is_told, is_copy_told]);
    }
}

/// Start a gateway whose host `staff.test` requires a certificate of `staff`, whose subdomains of `partners.test` accept
/// certificates of `partners`, and which requests no certificates for all other hosts. Return the configuration, too.
fn gateway_of_hosts(folder: &Path, server: &Pair, staff: &Authority, partners: &Authority) -> (Gateway, String) {
    for (name, authority) in [("staff.pem", staff), ("partners.pem", partners)] {
        std::fs::write(folder.join(name), authority.pem()).unwrap();
    }
    let ca = |name: &str| folder.join(name).display().to_string();
    let listener = format!(
        "{}tls.per_host = [\n  {{ hosts = [\"staff.test\"], client_ca = \"{}\", client_auth = \"required\" }},\n  \
         {{ hosts = [\"*.partners.test\"], client_ca = \"{}\" }},\n]\n",
        listener(folder, server, "", None),
        ca("staff.pem"),
        ca("partners.pem"),
    );
    let config = format!("{ROUTES}{listener}");
    (Gateway::start(&with_admin(&config)), config)
}

/// The names of the certificate of the server. A client that connects to an address sends no SNI.
const HOSTS: [&str; 5] = ["www.test", "staff.test", "a.partners.test", "b.a.partners.test", "127.0.0.1"];

#[test]
fn each_host_demands_the_certificates_of_its_own_ca() {
    let folder = tempfile::tempdir().unwrap();
    let [staff, partners] = ["staff", "partners"].map(Authority::new);
    let sites = Authority::new("sites");
    let (gateway, _) = gateway_of_hosts(folder.path(), &sites.server(&HOSTS, NOW), &staff, &partners);
    let alice = [(DnType::CommonName, "alice")];
    let [of_staff, of_partners] = [&staff, &partners].map(|authority| authority.client(&alice, NOW));
    let trusted = sites.certificate();
    for version in [&TLS12, &TLS13] {
        let status = |pair: Option<&Pair>, host, path| {
            ask(&tls(&[&trusted.der], pair, &[version]), gateway.address, host, path).map(|reply| reply.status)
        };
        for (what, pair, host, who, open) in [
            ("none", None, "www.test", Some(401), Some(200)),
            ("not asked for", Some(&of_staff), "www.test", Some(401), Some(200)),
            ("none", None, "staff.test", None, None),
            ("staff", Some(&of_staff), "staff.test", Some(200), Some(200)),
            ("of another host", Some(&of_partners), "staff.test", None, None),
            ("none", None, "a.partners.test", Some(401), Some(200)),
            ("partners", Some(&of_partners), "a.partners.test", Some(200), Some(200)),
            ("partners", Some(&of_partners), "b.a.partners.test", Some(200), Some(200)),
            ("of another host", Some(&of_staff), "a.partners.test", None, None),
        ] {
            assert_eq!(status(pair, host, "/who"), who, "{what}, {host}, {version:?}");
            assert_eq!(status(pair, host, "/open"), open, "{what}, {host}, {version:?}");
        }
    }
}

#[test]
fn connection_of_one_host_serves_no_host_with_another_client_ca() {
    let folder = tempfile::tempdir().unwrap();
    let [staff, partners] = ["staff", "partners"].map(Authority::new);
    let sites = Authority::new("sites");
    let (gateway, _) = gateway_of_hosts(folder.path(), &sites.server(&HOSTS, NOW), &staff, &partners);
    let alice = [(DnType::CommonName, "alice")];
    let [of_staff, of_partners] = [&staff, &partners].map(|authority| authority.client(&alice, NOW));
    let trusted = sites.certificate();
    for (server_name, pair, target, host, status) in [
        ("www.test", None, "/open", "other.test", 200),
        ("www.test", None, "/open", "WWW.test:443", 200),
        ("www.test", None, "/open", "staff.test", 421),
        ("www.test", None, "/open", "STAFF.test.:8443", 421),
        ("www.test", None, "https://staff.test/open", "www.test", 421),
        ("www.test", None, "/open", "a.partners.test", 421),
        ("www.test", None, "/nowhere", "staff.test", 421),
        ("127.0.0.1", None, "/open", "staff.test", 421),
        ("127.0.0.1", None, "/open", "www.test", 200),
        ("staff.test", Some(&of_staff), "/who", "staff.test", 200),
        ("staff.test", Some(&of_staff), "/who", "www.test", 421),
        ("staff.test", Some(&of_staff), "/who", "a.partners.test", 421),
        ("a.partners.test", Some(&of_partners), "/who", "b.a.partners.test", 200),
        ("a.partners.test", Some(&of_partners), "/who", "staff.test", 421),
    ] {
        let client = tls(&[&trusted.der], pair, &[&TLS13]);
        let mut client = TlsClient::handshake(&client, gateway.address, server_name).unwrap();
        client.send(format!("GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes());
        let reply = client.reply().unwrap();
        assert_eq!(reply.status, status, "{server_name} {target} {host}: {}", reply.text());
        if status == 421 {
            reply.assert_problem(421, "open another connection for the host");
            client.send(format!("GET /open HTTP/1.1\r\nHost: {server_name}\r\n\r\n").as_bytes());
            assert_eq!(client.reply().unwrap().status, 200, "the connection stays usable for its own host");
        }
    }
}

#[tokio::test]
async fn http2_connection_of_one_host_serves_no_host_with_another_client_ca() {
    let folder = tempfile::tempdir().unwrap();
    let [staff, partners] = ["staff", "partners"].map(Authority::new);
    let sites = Authority::new("sites");
    let (gateway, _) = gateway_of_hosts(folder.path(), &sites.server(&HOSTS, NOW), &staff, &partners);
    let alice = staff.client(&[(DnType::CommonName, "alice")], NOW);
    let trusted = sites.certificate();
    for (server_name, pair, statuses) in
        [("www.test", None, [200, 421, 421, 200]), ("staff.test", Some(&alice), [421, 200, 421, 421])]
    {
        let (mut sender, _connection) =
            http2_client(&tls(&[&trusted.der], pair, &[&TLS13]), &gateway, server_name).await;
        let mut got = Vec::new();
        for host in ["www.test", "staff.test", "a.partners.test", "other.test"] {
            got.push(sender.send_request(get(host, "/open")).await.unwrap().status().as_u16());
        }
        assert_eq!(got, statuses, "{server_name}");
    }
}

#[test]
fn open_connections_obey_the_client_certificates_of_the_new_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let [staff, partners, new] = ["staff", "partners", "new"].map(Authority::new);
    let sites = Authority::new("sites");
    let (gateway, config) = gateway_of_hosts(folder.path(), &sites.server(&HOSTS, NOW), &staff, &partners);
    let alice = [(DnType::CommonName, "alice")];
    let [of_staff, of_partners, of_new] = [&staff, &partners, &new].map(|authority| authority.client(&alice, NOW));
    let trusted = sites.certificate();
    let connect = |pair: Option<&Pair>, host: &str| {
        TlsClient::handshake(&tls(&[&trusted.der], pair, &[&TLS13]), gateway.address, host).unwrap()
    };
    let ask = |connection: &mut TlsClient, host: &str| {
        connection.send(format!("GET /open HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes());
        connection.reply().unwrap().status
    };
    let mut anonymous = connect(None, "a.partners.test");
    let mut partner = connect(Some(&of_partners), "a.partners.test");
    let mut employee = connect(Some(&of_staff), "staff.test");
    let mut www = connect(None, "www.test");
    assert_eq!(ask(&mut anonymous, "a.partners.test"), 200);
    assert_eq!(ask(&mut www, "shop.test"), 200);
    // A file with other CA certificates applies to its host only.
    std::fs::write(folder.path().join("staff.pem"), new.pem()).unwrap();
    eventually("the new CA is trusted", || {
        let client = tls(&[&trusted.der], Some(&of_new), &[&TLS13]);
        crate::support::certificates::ask(&client, gateway.address, "staff.test", "/open").is_some()
    });
    assert_eq!(ask(&mut partner, "a.partners.test"), 200);
    assert_eq!(ask(&mut employee, "staff.test"), 401);
    assert!(employee.reply().is_none(), "the gateway closes the connection");
    // The certificate becomes mandatory, and another host gets its own CA.
    let shop = "{ hosts = [\"shop.test\"], client_ca = \"staff.pem\" },\n]";
    gateway.put_file("staff.pem", &staff.pem());
    let mandatory = config.replace("partners.pem\" }", "partners.pem\", client_auth = \"required\" }");
    reloads(&gateway, &mandatory.replace("\n]", &format!("\n{shop}")));
    assert_eq!(ask(&mut anonymous, "a.partners.test"), 421);
    assert!(anonymous.reply().is_none(), "the gateway closes the connection");
    assert_eq!(ask(&mut partner, "a.partners.test"), 200);
    assert_eq!(ask(&mut www, "shop.test"), 421);
    assert_eq!(ask(&mut www, "www.test"), 200);
}

#[test]
fn hosts_keep_their_tls_sessions_while_their_own_client_ca_is_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let [staff, partners] = ["staff", "partners"].map(Authority::new);
    let sites = Authority::new("sites");
    let (gateway, config) = gateway_of_hosts(folder.path(), &sites.server(&HOSTS, NOW), &staff, &partners);
    let alice = [(DnType::CommonName, "alice")];
    let trusted = sites.certificate();
    let client_of = |authority: &Authority| tls(&[&trusted.der], Some(&authority.client(&alice, NOW)), &[&TLS13]);
    let [of_staff, of_partners] = [&staff, &partners].map(client_of);
    let connect = |client, host| {
        let mut connection = TlsClient::handshake(client, gateway.address, host).unwrap();
        connection.send(format!("GET /open HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes());
        assert_eq!(connection.reply().unwrap().status, 200);
        handshake_kind(&connection)
    };
    assert_eq!(connect(&of_staff, "staff.test"), rustls::HandshakeKind::Full);
    assert_eq!(connect(&of_partners, "a.partners.test"), rustls::HandshakeKind::Full);
    let both = partners.pem() + &staff.pem();
    std::fs::write(folder.path().join("both.pem"), both).unwrap();
    reloads(&gateway, &config.replace("partners.pem", "both.pem"));
    assert_eq!(connect(&of_staff, "staff.test"), rustls::HandshakeKind::Resumed);
    assert_eq!(connect(&of_partners, "a.partners.test"), rustls::HandshakeKind::Full);
}

#[test]
fn explain_names_the_client_certificate_that_a_host_demands() {
    let folder = tempfile::tempdir().unwrap();
    let [staff, partners] = ["staff", "partners"].map(Authority::new);
    let (gateway, _) = gateway_of_hosts(folder.path(), &Pair::server(NAME, NOW), &staff, &partners);
    let explain = |url: &str| {
        let config = gateway.directory().join("gateway.toml");
        let output = binary().args(["explain", "GET", url, "--config"]).arg(config).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let demanded = explain("https://staff.test/open");
    let line = demanded.lines().find(|line| line.trim_start().starts_with("client certificate")).unwrap();
    assert!(line.ends_with("staff.pem") && line.contains("required, issued by a CA in"), "{demanded}");
    for url in ["https://www.test/open", "https://a.partners.test/open"] {
        assert!(!explain(url).contains("client certificate"), "{url}");
    }
}

#[test]
fn hot_restart_starts_to_demand_client_certificates_of_single_hosts() {
    let folder = tempfile::tempdir().unwrap();
    let [staff, partners] = ["staff", "partners"].map(Authority::new);
    let sites = Authority::new("sites");
    let (mut gateway, config) = gateway_of_hosts(folder.path(), &sites.server(&HOSTS, NOW), &staff, &partners);
    gateway.put(&config.replace("\"*.partners.test\"", "\"*.partners.test\", \"www.test\""));
    let _new = hot_restart(&mut gateway);
    let trusted = sites.certificate();
    let alice = [(DnType::CommonName, "alice")];
    let [of_staff, of_partners] = [&staff, &partners].map(|authority| authority.client(&alice, NOW));
    let is_served = |pair: Option<&Pair>, host| {
        ask(&tls(&[&trusted.der], pair, &[&TLS13]), gateway.address, host, "/who")
            .is_some_and(|reply| reply.status == 200)
    };
    assert_eq!(
        [None, Some(&of_staff), Some(&of_partners)].map(|pair| is_served(pair, "staff.test")),
        [false, true, false]
    );
    assert_eq!(
        [None, Some(&of_staff), Some(&of_partners)].map(|pair| is_served(pair, "www.test")),
        [false, false, true]
    );
}

#[tokio::test]
async fn listeners_for_proxies_and_programs_obey_the_client_certificates_of_the_new_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let ours = Authority::new("ours");
    let server = Pair::server(NAME, NOW);
    let config = |auth: &str| {
        let of = |protocol: &str| {
            format!("{}protocol = \"{protocol}\"\n", listener(folder.path(), &server, &ours.pem(), Some(auth)))
        };
        let decisions = of("decisions") + "api_token = \"sesame\"\n";
        let limits = "[limit.all]\nby = \"global\"\nquota = \"100/day\"\n\
                      [[descriptor]]\ndomain = \"edge\"\nentries = [\"a=b\"]\nlimits = [\"all\"]\n";
        let proxies = "[client_ip]\ntrusted_proxies = [\"127.0.0.1\"]\n";
        let open = "[[route]]\nname = \"open\"\npath = \"/open\"\nrespond = { status = 200 }\n";
        format!("{proxies}{limits}{open}{decisions}{}{}", of("ratelimit-http"), of("ratelimit"))
    };
    let gateway = Gateway::start(&with_admin(&config("optional")));
    let [decisions, json, service] = gateway.addresses()[..] else { panic!("three listeners") };
    let client = tls(&[&server.der], None, &[&TLS13]);
    let described = "GET /decide/forwarded HTTP/1.1\r\nHost: a\r\nX-Forwarded-For: 192.0.2.1\r\nX-Forwarded-Proto: https\r\n\
                     X-Forwarded-Host: a\r\nX-Forwarded-Method: GET\r\nX-Forwarded-Uri: /open\r\n\r\n";
    let post = |path: &str, body: &str| {
        let token = "Authorization: Bearer sesame";
        format!("POST {path} HTTP/1.1\r\nHost: a\r\n{token}\r\nContent-Length: {}\r\n\r\n{body}", body.len())
    };
    let checked = post("/v1/check", "{\"limits\":[{\"limit\":\"all\",\"identity\":{},\"cost\":1}]}");
    let descriptors =
        post("/json", "{\"domain\":\"edge\",\"descriptors\":[{\"entries\":[{\"key\":\"a\",\"value\":\"b\"}]}]}");
    let open = |address| TlsClient::handshake(&client, address, NAME).unwrap();
    let mut connections = [
        ("described request", described, open(decisions), 403),
        ("API of decisions", &*checked, open(decisions), 421),
        ("descriptors", &*descriptors, open(json), 421),
    ];
    for (what, request, connection, _) in &mut connections {
        connection.send(request.as_bytes());
        let reply = connection.reply().unwrap();
        assert_eq!(reply.status, 200, "{what}: {}", reply.text());
    }
    let call = || {
        let request = http::Request::post(format!("https://{NAME}/grpc.health.v1.Health/Check"));
        let request = request.header("content-type", "application/grpc");
        request.body(http_body_util::Full::new(&b"\0\0\0\0\0"[..])).unwrap()
    };
    let stream = tokio::net::TcpStream::connect(service).await.unwrap();
    let mut h2 = (*client).clone();
    h2.alpn_protocols = vec![b"h2".to_vec()];
    let connector = tokio_rustls::TlsConnector::from(std::sync::Arc::new(h2));
    let stream = connector.connect(NAME.try_into().unwrap(), stream).await.unwrap();
    let (mut sender, driver) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    let driver = tokio::spawn(driver);
    let answer = sender.send_request(call()).await.unwrap();
    assert_eq!(answer.headers().get("grpc-status"), None, "the status follows in the trailers");

    reloads(&gateway, &config("required"));
    for (what, request, connection, status) in &mut connections {
        connection.send(request.as_bytes());
        let reply = connection.reply().unwrap();
        assert_eq!(reply.status, *status, "{what}: {}", reply.text());
        assert!(reply.text().contains("demands a client certificate since a reload"), "{what}: {}", reply.text());
        assert!(connection.reply().is_none(), "{what}: the gateway closes the connection");
    }
    let answer = sender.send_request(call()).await.unwrap();
    assert_eq!(answer.headers()["grpc-status"], "16", "unauthenticated");
    tokio::time::timeout(crate::support::MAX_WAIT, driver).await.expect("the connection ends").unwrap().unwrap();
}
