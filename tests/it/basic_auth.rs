//! End-to-end tests of Basic authentication, with password files that Apache's htpasswd wrote.

use std::process::Command;
use std::thread;

use crate::support::admin_listener::{metric, with_admin};
use crate::support::client::{Client, Reply};
use crate::support::eventually;
use crate::support::gateway::{Gateway, binary};
use crate::support::redis::Redis;
use crate::support::upstream::Upstream;
use aws_lc_rs::digest::{SHA256, digest};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;

/// Return a line of a password file. Apache's `htpasswd` creates it with these options.
pub(crate) fn htpasswd(options: &[&str], user: &str, password: &str) -> String {
    let output = Command::new("htpasswd").arg("-nb").args(options).args([user, password]).output();
    let output = output.expect("the test needs `htpasswd`; `make tools` installs it");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().trim_end().to_owned() + "\n"
}

fn credentials(user: &str, password: &str) -> String {
    format!("Basic {}", STANDARD.encode(format!("{user}:{password}")))
}

/// Return a configuration with the provider `[auth.users]` and a route for all paths. The route requires this provider
/// and applies `limits`. `keys` are further keys of the provider.
fn config(keys: &str, limits: &str, upstream: &Upstream) -> String {
    format!(
        "[auth.users]\nkind = \"basic\"\nusers = \"htpasswd\"\n{keys}\n[upstream.api]\nservers = [\"{}\"]\n\
         [[route]]\nname = \"api\"\npath = \"/{{*rest}}\"\nrequire = [\"users\"]\nlimits = [{limits}]\nupstream = \"api\"\n",
        upstream.url()
    )
}

fn login(client: &mut Client, user: &str, password: &str) -> Reply {
    client.get_with("/", &[("Authorization", &credentials(user, password))])
}

fn assert_rejected(reply: &Reply, what: &str) {
    reply.assert_problem(401, what);
    assert_eq!(reply.header("www-authenticate"), Some("Basic realm=\"my \\\"api\\\"\", charset=\"UTF-8\""), "{what}");
}

#[test]
fn users_of_htpasswd_log_in_with_their_password_only() {
    let users = [
        htpasswd(&["-B"], "alice", "secret"),
        htpasswd(&["-B", "-C", "4"], "colon", "a:b:c"),
        htpasswd(&["-m"], "bob", "p\u{e4}ssw\u{f6}rd"),
        htpasswd(&["-m"], "empty", ""),
        htpasswd(&["-B"], "jos\u{e9}", "s"),
        htpasswd(&["-B"], "long", &"x".repeat(72)),
    ];
    let file = format!("# users of the API\n\n{}", users.concat());
    let upstream = Upstream::start();
    let gateway = Gateway::start_with(&config("realm = 'my \"api\"'", "", &upstream), &[("htpasswd", &file)]);
    let mut client = gateway.client();
    let known = [
        ("alice", "secret"),
        ("colon", "a:b:c"),
        ("bob", "p\u{e4}ssw\u{f6}rd"),
        ("empty", ""),
        ("jos\u{e9}", "s"),
        ("long", &"x".repeat(72)),
    ];
    for _ in 0..2 {
        for (user, password) in known {
            assert_eq!(login(&mut client, user, password).status, 200, "{user}");
            assert!(upstream.last().headers("authorization").is_empty(), "not forwarded by default");
        }
        for (user, password) in [
            ("alice", "Secret"),
            ("alice", ""),
            ("alice", "secret "),
            ("Alice", "secret"),
            ("bob", "passwort"),
            ("mallory", "secret"),
            ("", "secret"),
            ("", ""),
            ("colon", "a"),
            ("# users of the API", ""),
        ] {
            assert_rejected(&login(&mut client, user, password), user);
        }
    }
    assert_rejected(&client.get("/"), "no credential");
    let token = STANDARD.encode("alice:secret");
    for (value, status) in [
        (format!("basic {token}"), 200),
        (format!("BASIC   {token}"), 200),
        (format!("Basic {}", token.trim_end_matches('=')), if token.ends_with('=') { 401 } else { 200 }),
        ("Basic".to_owned(), 401),
        ("Basic !!!".to_owned(), 401),
        (format!("Basic {}", STANDARD.encode("alice")), 401),
        (format!("Basic {}", STANDARD.encode("alice:secret\n")), 401),
        (format!("Basic {}", STANDARD.encode("alice:secret\0")), 401),
        (format!("Basic {}", STANDARD.encode(b"al\xefce:secret")), 401),
        (format!("Basic {}", STANDARD.encode("a".repeat(2000))), 401),
        (format!("Basic {token} {token}"), 401),
        (format!("Basic{token}"), 401),
        (format!("Bearer {token}"), 401),
    ] {
        let reply = client.get_with("/", &[("Authorization", &value)]);
        assert_eq!(reply.status, status, "{value}");
        assert!(!reply.text().contains(&token), "{value}: the credential is repeated");
    }
    let line = format!("Basic {token}");
    let twice = client.get_with("/", &[("Authorization", &line), ("authorization", &line)]);
    twice.assert_problem(400, "two `Authorization` headers");
}

#[test]
fn changed_file_takes_effect_at_once_and_a_faulty_one_is_ignored() {
    let upstream = Upstream::start();
    let alice = htpasswd(&["-B"], "alice", "old");
    let gateway = Gateway::start_with(&config("forward_credential = true", "", &upstream), &[("htpasswd", &alice)]);
    let mut client = gateway.client();
    assert_eq!(login(&mut client, "alice", "old").status, 200);
    assert_eq!(upstream.last().headers("authorization"), [credentials("alice", "old")], "forwarded if configured");
    gateway.put_file("htpasswd", &(htpasswd(&["-B"], "alice", "new") + &htpasswd(&[], "bob", "b")));
    eventually("the file is reloaded", || login(&mut client, "bob", "b").status == 200);
    assert_eq!(login(&mut client, "alice", "old").status, 401, "a reload discards verified credentials");
    assert_eq!(login(&mut client, "alice", "new").status, 200);
    for (faulty, reason) in [
        (format!("{alice}eve:plain\n"), "line 2: the password of `eve` is hashed with crypt, or not hashed at all"),
        (format!("eve:{{SHA}}x\n{alice}"), "line 1: the password of `eve` is hashed with SHA-1"),
        (String::new(), "no users"),
    ] {
        gateway.put_file("htpasswd", &faulty);
        eventually(reason, || gateway.log().contains(reason));
        assert_eq!(login(&mut client, "alice", "new").status, 200, "the previous users stay");
    }
    assert!(!gateway.log().contains("plain\n") && !gateway.log().contains("{SHA}x"), "hashes are not logged");
    // After invalid files, the gateway loads a valid file again.
    gateway.put_file("htpasswd", &alice);
    eventually("the file is reloaded", || login(&mut client, "alice", "old").status == 200);
}

#[test]
fn unusable_files_are_errors_that_name_user_and_line() {
    let upstream = Upstream::start();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("gateway.toml");
    std::fs::write(&path, config("", "", &upstream) + "[[listener]]\naddress = \"127.0.0.1:0\"\n").unwrap();
    let report = || {
        let output = binary().arg("check").arg("--offline").arg("--config").arg(&path).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, missing) = report();
    assert!(code == Some(2) && missing.contains("htpasswd -cB htpasswd USER"), "{missing}");
    for (options, expected) in [
        (&["-s"][..], "SHA-1"),
        (&["-d"], "crypt, or not hashed"),
        (&["-p"], "crypt, or not hashed"),
        (&["-2"], "SHA-256 crypt"),
        (&["-5"], "SHA-512 crypt"),
        (&["-B", "-C", "17"], "cost above 16"),
    ] {
        let line = match options {
            // Hashing with a cost of 17 takes seconds. So hash with the default cost of 5, and then change the cost in
            // the line.
            ["-B", ..] => htpasswd(&["-B"], "eve", "pw12").replace("$05$", "$17$"),
            options => htpasswd(options, "eve", "pw12"),
        };
        std::fs::write(directory.path().join("htpasswd"), format!("# one\n{line}")).unwrap();
        let (code, report) = report();
        assert_eq!(code, Some(2), "{report}");
        assert!(report.contains("line 2") && report.contains("`eve`") && report.contains(expected), "{report}");
        assert!(
            report.contains("htpasswd -B") && !report.contains(line.trim_end().split_once(':').unwrap().1),
            "{report}"
        );
    }
}

#[test]
fn users_have_limits_and_attempts_are_charged_to_the_address() {
    let (upstream, redis) = (Upstream::start(), Redis::start());
    let window = "algorithm = \"fixed-window\"\nstart = \"first-request\"";
    let text = with_admin(&format!(
        "{}{}[limit.ip]\nby = \"ip\"\nquota = \"7/hour\"\n{window}\n[limit.user]\nby = \"basic\"\nquota = \"2/hour\"\n{window}\n",
        redis.store(),
        config("", "\"ip\", \"user\"", &upstream)
    ));
    let users = htpasswd(&["-B"], "alice", "a") + &htpasswd(&[], "bob", "b");
    let gateway = Gateway::start_with(&text, &[("htpasswd", &users)]);
    let mut client = gateway.client();
    let mut remaining = |user: &str, password: &str| {
        let reply = login(&mut client, user, password);
        (reply.status, ["ip", "user"].map(|limit| reply.remaining(limit)))
    };
    let calls = || metric(&gateway, "sluicegate_store_calls_total");
    assert_eq!((remaining("alice", "a"), calls()), ((200, [6, 1]), 2.0), "a password that is hashed: two calls");
    assert_eq!((remaining("alice", "a"), calls()), ((200, [5, 0]), 3.0), "a cached password: one call");
    assert_eq!(login(&mut gateway.client(), "alice", "a").status, 429);
    assert_eq!(remaining("bob", "b"), (200, [4, 1]));
    for (count, password) in ["x", "x", "y", "y"].iter().enumerate() {
        assert_eq!(login(&mut client, "alice", password).status, 401, "attempt {count}");
    }
    assert_eq!(login(&mut client, "alice", "z").status, 429, "attempts are limited by address");
    assert_eq!(login(&mut client, "alice", "a").status, 429);
    let mut counts: Vec<_> = redis.keys().iter().map(|key| redis.state(key)[1]).collect();
    counts.sort_unstable();
    assert_eq!(counts, [1, 2, 7]);
}

#[test]
fn file_with_many_users_is_fine() {
    let hash = htpasswd(&[], "x", "pw");
    let hash = hash.trim_end().split_once(':').unwrap().1;
    let users: String = (0..10_000).map(|user| format!("user{user}:{hash}\n")).collect();
    let upstream = Upstream::start();
    let gateway = Gateway::start_with(&config("", "", &upstream), &[("htpasswd", &users)]);
    let mut client = gateway.client();
    assert_eq!(login(&mut client, "user9999", "pw").status, 200);
    assert_eq!(login(&mut client, "user10000", "pw").status, 401);
}

#[test]
fn verified_password_is_hashed_once_a_minute_and_unknown_users_cost_as_much_as_known_ones() {
    let upstream = Upstream::start();
    let users = htpasswd(&["-B", "-C", "10"], "alice", "a");
    let gateway = Gateway::start_with(&config("", "", &upstream), &[("htpasswd", &users)]);
    let mut client = gateway.client();
    let mut cost = |logins: &[(&str, &str)]| {
        let before = gateway.cpu_ms();
        logins.iter().for_each(|(user, password)| drop(login(&mut client, user, password)));
        gateway.cpu_ms() - before
    };
    let wrong = cost(&[("alice", "1"), ("alice", "2"), ("alice", "3"), ("alice", "4"), ("alice", "5")]);
    let unknown = cost(&[("u1", "a"), ("u2", "a"), ("u3", "a"), ("u4", "a"), ("", "a")]);
    assert!(unknown * 2 > wrong && wrong * 2 > unknown && wrong > 50, "{wrong} and {unknown} ms of CPU");
    let verified = cost(&[("alice", "a"); 20]);
    assert!(verified < wrong, "20 logins hash once: {verified} and {wrong} ms");
    let repeated = cost(&[("alice", "5"); 20]);
    assert!(repeated < wrong, "a wrong password is cached for seconds: {repeated} and {wrong} ms");
}

#[test]
fn flood_of_passwords_is_rejected_with_503_and_other_routes_are_served() {
    let upstream = Upstream::start();
    let open = "[[route]]\nname = \"open\"\npath = \"/open\"\nrespond = { status = 200 }\n";
    let users = htpasswd(&["-B", "-C", "11"], "alice", "a");
    let gateway = Gateway::start_with(&(config("", "", &upstream) + open), &[("htpasswd", &users)]);
    // Alice logs in before the flood of wrong passwords, so the gateway has cached her credential.
    let mut alice = gateway.client();
    assert_eq!(login(&mut alice, "alice", "a").status, 200);
    let mut clients: Vec<_> = (0..150).map(|_| gateway.client()).collect();
    for (number, client) in clients.iter_mut().enumerate() {
        let credentials = credentials("eve", &number.to_string());
        client.send(format!("GET / HTTP/1.1\r\nHost: a\r\nAuthorization: {credentials}\r\n\r\n").as_bytes());
    }
    assert_eq!(gateway.get("/open").status, 200, "the workers are free");
    assert_eq!(login(&mut alice, "alice", "a").status, 200, "a verified credential needs no hash");
    let replies: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = clients.iter_mut().map(|client| scope.spawn(|| client.reply().unwrap())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let (busy, rejected): (Vec<_>, Vec<_>) = replies.iter().partition(|reply| reply.status == 503);
    assert!(busy.len() >= 40 && !rejected.is_empty(), "{} and {}", busy.len(), rejected.len());
    assert!(rejected.iter().all(|reply| reply.status == 401));
    for reply in busy {
        reply.assert_problem(503, "busy");
        assert_eq!(reply.header("retry-after"), Some("1"));
    }
}

#[test]
fn flood_of_passwords_from_one_address_locks_out_no_user_of_another() {
    let upstream = Upstream::start();
    let users: String = (0..20).map(|user| htpasswd(&["-B", "-C", "8"], &format!("user{user}"), "right")).collect();
    let gateway = Gateway::start_with(&config("", "", &upstream), &[("htpasswd", &users)]);
    let mut flood: Vec<_> = (0..300).map(|_| gateway.client()).collect();
    for (number, client) in flood.iter_mut().enumerate() {
        let credentials = credentials("user0", &format!("wrong{number}"));
        client.send(format!("GET / HTTP/1.1\r\nHost: a\r\nAuthorization: {credentials}\r\n\r\n").as_bytes());
    }
    let statuses: Vec<_> = thread::scope(|scope| {
        let login = |user: usize| {
            let mut client = Client::connect_from([127, 0, 1, user as u8 + 1].into(), gateway.address);
            login(&mut client, &format!("user{user}"), "right").status
        };
        let threads: Vec<_> = (0..20).map(|user| scope.spawn(move || login(user))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(statuses, [200; 20], "fault 79: the users of other addresses are verified");
    let busy = flood.iter_mut().filter_map(Client::reply).filter(|reply| reply.status == 503).count();
    assert!(busy >= 100, "the flood has filled the queue: {busy}");
}

#[test]
fn rejection_after_the_password_check_names_the_consumer() {
    let key = digest(&SHA256, b"key-of-acme").as_ref().iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let consumers = format!("[[consumer]]\nname = \"acme\"\nkeys = [\"sha256:{key}\"]\n");
    let users = htpasswd(&["-B", "-C", "4"], "alice", "secret");
    let gateway = Gateway::start_with(
        "[auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\n\
         [auth.users]\nkind = \"basic\"\nusers = \"htpasswd\"\n\
         [limit.tenant]\nby = \"header:x-tenant\"\nquota = \"1/24h\"\n\
         [[route]]\nname = \"r\"\npath = \"/\"\nrequire = [[\"keys\", \"users\"]]\nlimits = [\"tenant\"]\n\
         respond = { status = 200 }\nresponse_headers = { set = { x-user = \"{consumer}\" }, on_errors = true }\n",
        &[("consumers.toml", &consumers), ("htpasswd", &users)],
    );
    let mut client = gateway.client();
    for (password, tenant, status) in
        [("wrong", "a", 401), ("secret", "", 400), ("secret", "a", 200), ("secret", "a", 429), ("wrong", "a", 401)]
    {
        let login = credentials("alice", password);
        let mut headers = vec![("X-Api-Key", "key-of-acme"), ("Authorization", &*login)];
        headers.extend(Some(("X-Tenant", tenant)).filter(|_| !tenant.is_empty()));
        let reply = client.get_with("/", &headers);
        assert_eq!((reply.status, reply.header("x-user")), (status, Some("acme")), "{password} {tenant}");
    }
}
