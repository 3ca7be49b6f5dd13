//! Connections to Redis: TLS with a private CA and a client certificate, Unix sockets, and users with minimal
//! permissions.

use std::io::Write;
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::support::gateway::{Gateway, binary};
use crate::support::redis::{Redis, free_port, redis_version};
use crate::support::{eventually, upstream};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};

/// One limit per algorithm, so that the scripts use all of their commands.
const KINDS: [&str; 6] =
    ["token-bucket", "fixed-window", "sliding-window", "sliding-buckets", "sliding-log", "concurrency"];

/// Start a gateway with this store. It denies requests in an outage.
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

/// Write a CA certificate, and certificates that this CA has signed, as PEM files.
fn certificates(folder: &Path, authority: &str, names: &[&str]) {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    // If a certificate had the same name as its issuer, it would look self-signed.
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
fn redis_over_tls_needs_a_valid_certificate() {
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
    let other_ca = format!("cert = \"{}\", key = \"{}\"", file("stranger.pem"), file("stranger.key"));
    let ca = format!("ca = \"{}\"", file("ca.pem"));
    let other = format!("ca = \"{}\"", file("other-ca.pem"));
    assert_counts(&gateway(&store(&format!("{ca}, {client}"))), "our CA, our certificate");
    for (what, tls) in [
        ("an unknown CA", format!("{other}, {client}")),
        ("no certificate", ca.clone()),
        ("a certificate of another CA", format!("{ca}, {other_ca}")),
    ] {
        // If a certificate is missing or rejected, the request waits for the whole timeout, so use a shorter timeout.
        let gateway = gateway(&store(&tls).replace("5s", "2s"));
        gateway.get("/r").assert_problem(503, what);
        eventually(what, || gateway.log().contains("the store is down"));
    }
}

#[test]
fn each_reason_of_an_outage_is_logged_once() {
    let port = free_port();
    let gateway = gateway(&format!("url = \"redis://127.0.0.1:{port}/0\"\ntimeout = \"2s\""));
    eventually("the gateway cannot connect", || gateway.log().contains("the store is down"));
    let text = port.to_string();
    let redis = Redis::start_with(port, &["--port", &text, "--requirepass", "secret"])
        .expect("a server that requires a password");
    eventually("a password is wanted", || gateway.log().contains("the store is still down, with another error"));
    drop(redis);
    let _redis = Redis::start_on(port).expect("a server without client authentication");
    eventually("the gateway has connected", || gateway.log().contains("the store answers again"));
    assert_eq!(gateway.log().matches("with another error").count(), 1, "{}", gateway.log());
}

#[test]
fn redis_is_reached_over_a_unix_socket() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("redis.sock").display().to_string();
    let port = free_port();
    let _redis = Redis::start_with(port, &["--port", "0", "--unixsocket", &socket]).expect("a server on a socket");
    assert_counts(&gateway(&format!("url = \"redis+unix://{socket}?db=3\"\ntimeout = \"5s\"")), "a unix socket");
}

#[test]
fn overrides_key_of_another_program_is_named_in_the_log() {
    let redis = Redis::start();
    let gateway = gateway(&format!("url = \"{}\"\ntimeout = \"5s\"", redis.url()));
    redis::cmd("SET").arg("rl:overrides").arg("a text").exec(&mut redis.connection()).unwrap();
    let expected = "cannot read overrides: another program uses the key";
    eventually("the key of another program is logged", || gateway.log().contains(expected));
    assert!(
        gateway.log().contains("rl:overrides") && !gateway.log().contains("lacks a permission"),
        "{}",
        gateway.log()
    );
    assert_counts(&gateway, "limits apply although the overrides cannot be read");
}

#[test]
fn redis_user_of_the_manual_has_sufficient_permissions() {
    let redis = Redis::start();
    // Create the Redis user with the command in the manual.
    let manual = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/how-to/redis.md")).unwrap();
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
    eventually("overrides are polled", || redis.calls("hgetall") > 0);
    assert!(!right.log().contains("cannot read overrides"), "{}", right.log());
    // Reading overrides requires separate permissions.
    redis::cmd("ACL").arg("SETUSER").arg("gateway").arg("-hgetall").exec(&mut redis.connection()).unwrap();
    let expected = "cannot read overrides: the Redis user lacks a permission";
    eventually("the missing permission is logged", || right.log().contains(expected));
    let before = redis.calls("evalsha");
    assert_eq!(right.get("/r").status, 429);
    let without = gateway(&store("gateway:secret").replace("/2\"", "/3\""));
    assert_counts(&without, "a user without permission to read overrides");
    assert!(redis.calls("evalsha") > before && !without.log().contains("the store is down"), "{}", without.log());
    let wrong = gateway(&store("gateway:wrong").replace("5s", "2s"));
    wrong.get("/r").assert_problem(503, "a wrong password");
    eventually("the wrong password is logged", || wrong.log().contains("the store is down"));
    assert!(!wrong.log().contains(":wrong@"), "{}", wrong.log());
    // The user has no other permissions.
    let mut connection = redis::Client::open(format!("redis://gateway:secret@127.0.0.1:{}", redis.port))
        .unwrap()
        .get_connection()
        .unwrap();
    for words in [&["KEYS", "*"][..], &["FLUSHALL"], &["SET", "mine", "1"], &["CONFIG", "GET", "*"]] {
        let error = redis::cmd(words[0]).arg(&words[1..]).exec(&mut connection).unwrap_err();
        assert_eq!(error.code(), Some("NOPERM"), "{words:?}: {error}");
    }
}

#[test]
fn passwords_with_any_character_come_from_variables_and_files() {
    const PASSWORD: &str = "p@ss:w/o?r#d %40'é";
    let redis = Redis::start();
    let mut command = redis::cmd("ACL");
    command
        .arg("SETUSER")
        .arg("gateway")
        .arg("on")
        .arg(format!(">{PASSWORD}"))
        .arg("~*")
        .arg("+@all")
        .arg("allchannels");
    command.exec(&mut redis.connection()).unwrap();
    redis::cmd("CONFIG").arg(&["SET", "requirepass", "another"]).exec(&mut redis.connection()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("password"), format!("{PASSWORD}\n")).unwrap();
    let file = folder.path().join("password").display().to_string();
    let environment = [("STORE_USER", "gateway"), ("PASSWORD", PASSWORD), ("SENTINEL_PASSWORD", "s@#/?")];
    let sentinel_port = free_port();
    let conf = format!(
        "port {sentinel_port}\nbind 127.0.0.1\ndir {}\nrequirepass \"s@#/?\"\nsentinel monitor m 127.0.0.1 {} 1\n\
         sentinel auth-user m gateway\nsentinel auth-pass m \"{PASSWORD}\"\n",
        folder.path().display(),
        redis.port
    );
    let conf_path = folder.path().join("sentinel.conf");
    std::fs::write(&conf_path, conf).unwrap();
    let _sentinel = Redis::start_with(sentinel_port, &[conf_path.to_str().unwrap(), "--sentinel"]).expect("a Sentinel");
    let server = |database: u8| format!("redis://127.0.0.1:{}/{database}", redis.port);
    let sentinel = format!("redis+sentinel://127.0.0.1:{sentinel_port}/m?db=3");
    for (url, keys) in [
        (server(1), "password = \"${PASSWORD}\"".to_owned()),
        (server(2), format!("password_file = \"{file}\"")),
        (sentinel, "password = \"${PASSWORD}\"\nsentinel.password = \"${SENTINEL_PASSWORD}\"".to_owned()),
    ] {
        let text = format!(
            "[store]\nurl = \"{url}\"\nusername = \"${{STORE_USER}}\"\n{keys}\ntimeout = \"5s\"\n\
             [limit.l]\nby = \"ip\"\nalgorithm = \"fixed-window\"\nquota = \"3/24h\"\non_store_error = \"deny\"\n\
             [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"l\"]\nrespond = {{ status = 200 }}\n"
        );
        let gateway = Gateway::start_by_with(&text, &[], |path| {
            let mut command = binary();
            command.envs(environment).arg("--config").arg(path);
            command
        });
        assert_counts(&gateway, &keys);
        assert!(!gateway.log().contains("p@ss"), "{}", gateway.log());
        for command in ["check", "doctor"] {
            let path = gateway.directory().join("gateway.toml");
            let output = binary().envs(environment).arg(command).arg("--config").arg(path).output().unwrap();
            let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
            assert!(
                said.contains("redis")
                    && !said.contains("p@ss")
                    && !said.contains("s@#")
                    && !said.contains("rejects this user"),
                "{command}: {said}"
            );
        }
    }
}

/// Start a server with these arguments.
fn server(arguments: &[&str]) -> Redis {
    let port = free_port();
    Redis::start_with(port, &[&["--port", &port.to_string()], arguments].concat()).expect("a server")
}

fn sentinel(folder: &Path) -> Redis {
    let port = free_port();
    let file = folder.join("sentinel.conf");
    std::fs::write(&file, format!("port {port}\nbind 127.0.0.1\ndir {}\n", folder.display())).unwrap();
    let child = Command::new("redis-server").arg(file).arg("--sentinel").stdout(Stdio::null()).spawn().unwrap();
    eventually("the Sentinel listens", || TcpStream::connect(("127.0.0.1", port)).is_ok());
    Redis { port, child, directory: tempfile::tempdir().unwrap() }
}

#[test]
fn redis_of_a_test_writes_into_its_own_directory() {
    let redis = Redis::start();
    let (_, directory): (String, String) =
        redis::cmd("CONFIG").arg(&["GET", "dir"]).query(&mut redis.connection()).unwrap();
    assert_eq!(Path::new(&directory), redis.directory.path().canonicalize().unwrap());
}

/// `check`, `doctor` and the gateway's log describe an error of a store URL with the same sentence.
#[test]
fn store_errors_say_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    certificates(folder.path(), "ca.pem", &["server"]);
    let file = |name: &str| folder.path().join(name).display().to_string();
    let here = folder.path().display().to_string();
    let redis = Redis::start();
    let locked = server(&["--requirepass", "secret"]);
    let replica = server(&["--replicaof", "127.0.0.1", &redis.port.to_string(), "--dir", &here]);
    let node = server(&["--cluster-enabled", "yes", "--dir", &here]);
    let sentinel = sentinel(folder.path());
    let port = free_port();
    let pair = ["--tls-cert-file", &file("server.pem"), "--tls-key-file", &file("server.key")];
    let tls = [
        "--port",
        "0",
        "--tls-port",
        &port.to_string(),
        "--tls-auth-clients",
        "no",
        "--tls-ca-cert-file",
        &file("ca.pem"),
    ];
    let tls = Redis::start_with(port, &[&tls[..], &pair].concat()).expect("a server with TLS");
    let web = Gateway::start("[[route]]\nname = \"r\"\npath = \"/\"\nrespond = { status = 200 }\n");
    let web = &web.address;
    let page = upstream::serve(|mut stream| drop(stream.write_all(b"<html><body>Bad request</body></html>\r\n")));
    let mail = upstream::serve(|mut stream| drop(stream.write_all(b"220 mail.example.com ESMTP\r\n")));
    let (at, free, long) = (|redis: &Redis| format!("127.0.0.1:{}", redis.port), free_port(), "x".repeat(70));
    let mut gateways = Vec::new();
    for (url, expected) in [
        (format!("redis://127.0.0.1:{free}"), format!("nothing listens at 127.0.0.1:{free}; start Redis there")),
        (
            format!("redis+unix://{here}/none.sock"),
            format!("there is no socket {here}/none.sock; start Redis with this socket"),
        ),
        // A label of more than 63 characters is invalid, so no name server is queried.
        (
            format!("redis://{long}.invalid"),
            format!("the host name of {long}.invalid:6379 does not resolve; correct the host"),
        ),
        (
            format!("redis://gateway:wrong@{}", at(&redis)),
            "Redis rejects this user or password; correct store.username".to_owned(),
        ),
        (format!("redis://{}", at(&locked)), "Redis requires a password; set store.password".to_owned()),
        (format!("redis://{}/99", at(&redis)), "this Redis has no database with this number; correct".to_owned()),
        (format!("redis://{}", at(&replica)), format!("{} is a replica; give the address of its master", at(&replica))),
        (format!("redis://{}", at(&node)), format!("{0} is a node of a cluster; use redis+cluster://{0}", at(&node))),
        (format!("redis://{}/1", at(&node)), "this Redis is a node of a cluster; use redis+cluster://".to_owned()),
        (format!("redis://{}", at(&sentinel)), format!("{0} is a Sentinel; use redis+sentinel://{0}/", at(&sentinel))),
        (
            format!("redis://{}/1", at(&sentinel)),
            "so it may be a Sentinel; for a Sentinel, use redis+sentinel://".to_owned(),
        ),
        (
            format!("redis://{}", at(&tls)),
            format!(
                "{} closes the connection before it answers; raise maxclients of Redis if it is reached, or use rediss:// if",
                at(&tls)
            ),
        ),
        (
            format!("rediss://{}", at(&tls)),
            format!("the certificate of {} is not accepted (UnknownIssuer); name its CA", at(&tls)),
        ),
        (
            format!("rediss://{}", at(&redis)),
            format!("{} does not answer the TLS handshake in time; if Redis does not use TLS", at(&redis)),
        ),
        (format!("redis://{web}"), format!("the server at {web} is a web server; correct the address")),
        (format!("redis://:secret@{web}"), format!("the server at {web} is a web server; correct the address")),
        (format!("rediss://{web}"), format!("{web} does not use TLS; use redis://, or correct the port")),
        (format!("redis://{page}"), format!("the server at {page} is a web server; correct the address")),
        (format!("redis://{mail}"), format!("the server at {mail} is not Redis; correct the address")),
    ] {
        // A silent server delays the command by the whole timeout.
        let timeout = if expected.contains("in time") { "300ms" } else { "5s" };
        let config = format!(
            "[store]\nurl = \"{url}\"\ntimeout = \"{timeout}\"\n[limit.l]\nby = \"ip\"\nquota = \"3/24h\"\n[[listener]]\naddress = \"127.0.0.1:0\"\n\
             [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"l\"]\nrespond = {{ status = 200 }}\n"
        );
        let path = folder.path().join("gateway.toml");
        std::fs::write(&path, &config).unwrap();
        let run = |command: &str| {
            let output = binary().arg(command).arg("--config").arg(&path).output().unwrap();
            (output.status.code(), String::from_utf8(output.stdout).unwrap())
        };
        let (code, said) = run("check");
        assert_eq!(code, Some(0), "the file is valid: {said}");
        assert!(said.contains("warning: store: ") && said.contains(&expected), "{url}: {said}\nlacks {expected}");
        let (code, said) = run("doctor");
        assert_eq!(code, Some(1), "{said}");
        assert!(said.contains("  failed    ") && said.contains(&expected), "{url}: {said}\nlacks {expected}");
        gateways.push((Gateway::start(&config), url, expected));
    }
    // Meanwhile, the gateways have tried to connect.
    for (gateway, url, expected) in gateways {
        eventually("the store is down", || gateway.log().contains("the store is down"));
        assert!(gateway.log().contains(&expected), "{url}: {}\nlacks {expected}", gateway.log());
        // One of the configuration warnings names the key `secret`.
        let log: String = gateway.log().lines().filter(|line| !line.contains("gateway.toml")).collect();
        assert!(!log.contains("secret") && !log.contains("wrong@"), "{log}");
    }
}

#[test]
fn missing_redis_permission_is_named() {
    let redis = Redis::start();
    let user = ["gateway", "on", ">secret", "~*", "+@all"];
    let set_user = |words: &[&str]| redis::cmd("ACL").arg("SETUSER").arg(words).exec(&mut redis.connection()).unwrap();
    set_user(&user);
    let store = format!("url = \"redis://gateway:secret@127.0.0.1:{}\"\ntimeout = \"5s\"", redis.port);
    // If the user lacks a permission that the gateway needs to connect, `check` reports the error as well.
    set_user(&["gateway", "-script"]);
    let expected = "the Redis user lacks a permission that the gateway needs, +script|load; grant the permissions that docs/how-to/redis.md lists";
    let without = gateway(&store);
    eventually("the store is down", || without.log().contains("the store is down"));
    assert!(without.log().contains(expected), "{}", without.log());
    let check = binary().arg("check").arg("--config").arg(without.directory().join("gateway.toml")).output().unwrap();
    let said = String::from_utf8(check.stdout).unwrap();
    assert!(check.status.success() && said.contains(&format!("warning: store: {expected}\n")), "{said}");
    // If the user lacks a permission that only checks of limits need, the first check logs the error.
    set_user(&["gateway", "+script", "-set"]);
    let without = gateway(&store);
    // Before the first request, a warning names the permission. Redis before 7.0 cannot tell it.
    if redis_version() >= (7, 0) {
        eventually("the missing permission is logged at the start", || {
            without.log().contains("the Redis user lacks permissions") && without.log().contains("missing: +set (of")
        });
    }
    // Redis 7.0 does not name the command that a script may not run. Later versions do.
    let expected = |named: &str| {
        format!("the Redis user lacks a permission that the gateway needs, {named}; grant the permissions")
    };
    eventually("the missing permission is logged", || {
        without.get("/r").assert_problem(503, "a decision that may not write");
        let permissions = ["a command that the gateway's Lua scripts call", "+set"];
        permissions.iter().any(|named| without.log().contains(&expected(named)))
    });
}
