//! `sluicegate key`: generating keys, editing the consumers file, and reloading it in a running gateway.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use crate::support::eventually;
use crate::support::gateway::{Gateway, binary};

const GATEWAY: &str = "[auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\n[limit.l]\nby = \"api-key\"\nquota = \"1000/hour\"\n\
                       tiers = { pro = { quota = \"2000/hour\" } }\n\
                       [[route]]\nname = \"r\"\npath = \"/r\"\nrespond = { status = 200 }\nidentify = [\"keys\"]\nlimits = [\"l\"]\n";

struct Said {
    code: Option<i32>,
    out: String,
    err: String,
}

impl Said {
    /// Return standard output, which must be one line.
    fn line(&self) -> &str {
        assert_eq!(self.code, Some(0), "{}", self.err);
        self.out.strip_suffix('\n').unwrap()
    }
}

/// Run `sluicegate key` in a directory.
fn key(folder: &Path, arguments: &[&str], input: &str) -> Said {
    let mut command = binary();
    command.current_dir(folder).arg("key").args(arguments);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // Ignore write errors: the process may have ended without reading its input.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    let output = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Said { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

/// Create a directory with a configuration and, if given, a consumers file.
fn folder(consumers: Option<&str>) -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let listener = "[[listener]]\naddress = \"127.0.0.1:0\"\n";
    std::fs::write(directory.path().join("gateway.toml"), format!("{listener}{GATEWAY}")).unwrap();
    let path = directory.path().join("consumers.toml");
    if let Some(consumers) = consumers {
        std::fs::write(&path, consumers).unwrap();
    }
    (directory, path)
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap()
}

fn hash(digit: char) -> String {
    format!("sha256:{}", digit.to_string().repeat(64))
}

#[test]
fn new_consumer_without_a_tier_is_noted_if_limits_have_tiers() {
    let (directory, _) = folder(Some(""));
    let new =
        |arguments: &[&str]| key(directory.path(), &[&["new", "--create", "--consumer"], arguments].concat(), "").err;
    let noted = new(&["acme"]);
    let expected = "`acme` has no tier, so the default quotas apply. To choose a tier, set `tier` of the consumer in";
    assert!(noted.contains(expected) && noted.trim_end().ends_with(": pro"), "{noted}");
    assert!(!new(&["globex", "--tier", "pro"]).contains("no tier"));
    // A consumer cannot have the tier `anonymous`. If limits have only this tier, no note about tiers is printed.
    let path = directory.path().join("gateway.toml");
    let anonymous_only = read(&path).replace("tiers = { pro", "tiers = { anonymous");
    std::fs::write(&path, &anonymous_only).unwrap();
    std::fs::write(directory.path().join("consumers.toml"), "").unwrap();
    assert!(!new(&["initech"]).contains("no tier"));
}

#[test]
fn running_gateway_reads_new_keys() {
    let gateway = Gateway::start_with(GATEWAY, &[("consumers.toml", "# no consumers yet\n")]);
    let status = |secret: &str| gateway.client().get_with("/r", &[("x-api-key", secret)]).status;
    let new = |arguments: &[&str]| {
        let said = key(gateway.directory(), &[&["new", "--consumer", "acme"], arguments].concat(), "");
        said.line().to_owned()
    };
    let first = new(&["--create", "--tier", "pro"]);
    eventually("the new key works", || status(&first) == 200);
    let second = new(&[]);
    eventually("the second key works", || status(&second) == 200);
    assert_eq!(key(gateway.directory(), &["revoke"], &format!("{first}\n")).code, Some(0));
    eventually("the first key is rejected", || status(&first) == 401);
    assert_eq!(status(&second), 200);
    // `revoke` with a fingerprint also removes the last key.
    let list = key(gateway.directory(), &["list"], "");
    let fingerprint = list.out.lines().last().unwrap().rsplit(' ').next().unwrap();
    assert_eq!(key(gateway.directory(), &["revoke", fingerprint], "").code, Some(0));
    eventually("no key is valid", || status(&second) == 401);
}

#[test]
fn generated_keys_have_a_format_and_a_sha256_hash() {
    let directory = tempfile::tempdir().unwrap();
    let said = key(directory.path(), &["new"], "");
    let secret = said.line();
    let body = secret.strip_prefix("sg_live_").unwrap();
    assert!(body.len() == 36 && body.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{secret}");
    let hashed = key(directory.path(), &["hash"], &format!("{secret}\r\n"));
    let labels = format!(
        "The hash of the key, for a consumer in the consumers file:\nkeys = [\"{}\"]\nThe key is shown only once:\n",
        hashed.line()
    );
    assert_eq!(said.err, labels);
    // The expected hash is the output of `printf %s demo-key | sha256sum`.
    let demo = "sha256:c48a01f49fd0f2cc404bc3cbbc80e91457a3d41bb429a695243de4c61794155c";
    assert_eq!(key(directory.path(), &["hash"], "demo-key").line(), demo);
    assert!(key(directory.path(), &["new", "--prefix", "acme_test_"], "").line().starts_with("acme_test_"));
    for (arguments, input, expected) in [
        (&["hash"][..], &secret[..43], "the checksum of this key is wrong"),
        (&["hash"], "", "standard input contains no key"),
        (&["hash"], "two words", "a key must be ASCII without spaces"),
        (&["new", "--prefix", "No-"], "", "lower-case letters, digits and _"),
        (&["new", "--tier", "pro"], "", "--create"),
    ] {
        let said = key(directory.path(), arguments, input);
        assert!(said.code != Some(0) && said.out.is_empty(), "{arguments:?}");
        assert!(said.err.contains(expected), "{arguments:?}: {}", said.err);
    }
    assert_eq!(
        std::fs::read_dir(directory.path()).unwrap().count(),
        0,
        "without `--consumer`, the command writes no file"
    );
}

#[test]
fn edits_keep_comments_order_and_file_mode() {
    let before = format!(
        "# Ours.\n[[consumer]]\nname = \"b\"   # second\nkeys = [\n  \"{}\",   # laptop\n  \"{}\",   # server\n]\n\n\
         [[consumer]]\ntier = \"pro\"\nname = \"a\"\nkeys = [\"{}\"]   # only one\n# The end.\n",
        hash('1'),
        hash('2'),
        hash('3')
    );
    let (directory, path) = folder(Some(&before));
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
    let new = |arguments: &[&str]| {
        let said = key(directory.path(), &[&["new"], arguments].concat(), "");
        key(directory.path(), &["hash"], said.line()).line().to_owned()
    };
    let (third, fourth, fifth) =
        (new(&["--consumer", "b"]), new(&["--consumer", "a"]), new(&["--consumer", "c", "--create"]));
    let expected = before
        .replace("# server\n", &format!("# server\n  \"{third}\",\n"))
        .replace("]   # only one", &format!(", \"{fourth}\"]   # only one"));
    let expected = format!("{expected}\n[[consumer]]\nname = \"c\"\nkeys = [\"{fifth}\"]\n");
    assert_eq!(read(&path), expected);
    // `revoke` removes the comment of the key. Other comments stay.
    for hash in [&third, &fourth, &hash('1')] {
        let said = key(directory.path(), &["revoke", hash], "");
        assert_eq!(said.code, Some(0), "{}", said.err);
    }
    let expected = before.replace(&format!("\n  \"{}\",   # laptop", hash('1')), "");
    assert_eq!(read(&path), format!("{expected}\n[[consumer]]\nname = \"c\"\nkeys = [\"{fifth}\"]\n"));
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
    let files: Vec<_> = std::fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(files.len(), 2, "no temporary file remains: {files:?}");
    let list = key(directory.path(), &["list"], "");
    let fingerprint = &fifth["sha256:".len()..][..12];
    let expected = format!(
        "consumer  tier  keys\nb               222222222222\na         pro   333333333333\nc               {fingerprint}\n"
    );
    assert_eq!(list.out, expected);
}

#[test]
fn edit_through_a_symlink_changes_its_target() {
    let (directory, path) = folder(None);
    let elsewhere = tempfile::tempdir().unwrap();
    std::fs::write(elsewhere.path().join("people.toml"), "").unwrap();
    std::os::unix::fs::symlink(elsewhere.path().join("people.toml"), &path).unwrap();
    assert_eq!(key(directory.path(), &["new", "--consumer", "a", "--create"], "").code, Some(0));
    assert!(path.is_symlink() && read(&elsewhere.path().join("people.toml")).contains("name = \"a\""));
}

#[test]
fn missing_file_is_created_and_inline_tables_are_edited() {
    let (directory, path) = folder(None);
    assert_eq!(key(directory.path(), &["new", "--consumer", "a", "--create"], "").code, Some(0));
    assert!(read(&path).starts_with("# The API keys of consumers") && read(&path).contains("name = \"a\""));
    let (directory, path) = folder(Some(&format!("consumer = [{{ name = \"a\", keys = [\"{}\"] }}]\n", hash('1'))));
    assert_eq!(key(directory.path(), &["new", "--consumer", "a"], "").code, Some(0));
    assert_eq!(key(directory.path(), &["revoke", "111111"], "").code, Some(0));
    assert_eq!(key(directory.path(), &["new", "--consumer", "b", "--create"], "").code, Some(0));
    let list = key(directory.path(), &["list"], "");
    assert!(list.out.lines().count() == 3 && !list.out.contains("1111111"), "{}{}", list.out, read(&path));
}

/// After an error, the consumers file is unchanged.
#[test]
fn invalid_file_or_name_changes_nothing() {
    let other = format!("sha256:111111{}", "2".repeat(58));
    let good = format!("[[consumer]]\nname = \"acme\"\nkeys = [\"{}\", \"{other}\"]\n", hash('1'));
    for (consumers, arguments, code, expected) in [
        ("[[consumer]\n", &["new", "--consumer", "acme"][..], 2, "consumers.toml:1:"),
        ("[[consumer]]\nname = \"acme\"\nkeys = [\"acme-key\"]\n", &["list"], 2, "this is not the hash of a key"),
        (&good, &["new", "--consumer", "amce"], 1, "did you mean `acme`? to add a consumer, use --create"),
        (&good, &["new", "--consumer", "acme", "--create"], 1, "the consumer `acme` exists already"),
        (&good, &["new", "--consumer", "b", "--create", "--tier", "por"], 2, "did you mean `pro`?"),
        (&good, &["revoke", "111111"], 1, "several keys have a hash that begins with 111111"),
        (&good, &["revoke", "222222"], 1, "no key has a hash that begins with 222222"),
        (&good, &["revoke", "1111"], 1, "give at least 6 digits"),
        (&good, &["revoke", "sg_live_0123"], 1, "all users of this machine can see arguments"),
    ] {
        let (directory, path) = folder(Some(consumers));
        let said = key(directory.path(), arguments, "");
        assert_eq!((said.code, said.out.as_str()), (Some(code), ""), "{arguments:?}: {}", said.err);
        assert!(said.err.contains(expected), "{arguments:?}: {}", said.err);
        assert!(!said.err.contains("sg_live_0123"), "the message contains the key: {}", said.err);
        assert_eq!(read(&path), consumers, "{arguments:?}");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 2, "no temporary file remains");
    }
    // The command fails if the gateway configuration has an error or names no consumers file.
    let (directory, path) = folder(None);
    let gateway = directory.path().join("gateway.toml");
    std::fs::write(&gateway, read(&gateway) + "[server]\nworkers = -1\n").unwrap();
    assert_eq!(key(directory.path(), &["new", "--consumer", "a", "--create"], "").code, Some(2));
    assert!(!path.exists());
    std::fs::write(&gateway, read(&gateway).replace("consumers = \"consumers.toml\"", "")).unwrap();
    assert!(key(directory.path(), &["list"], "").err.contains("names no consumers file"));
}

/// Concurrent edits of the consumers file lose no key.
#[test]
fn concurrent_edits_are_serialized() {
    let (directory, _) = folder(Some("[[consumer]]\nname = \"a\"\nkeys = []\n"));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| assert_eq!(key(directory.path(), &["new", "--consumer", "a"], "").code, Some(0)));
        }
    });
    assert_eq!(key(directory.path(), &["list"], "").out.lines().count(), 1 + 8);
}

#[test]
fn keys_have_a_name_an_expiry_and_routes() {
    let file = format!(
        "[[consumer]]\nname = \"a\"\nkeys = [\n  \"{}\",   # laptop\n  {{ hash = \"{}\", expires = 2020-01-01 }},\n]\n\
         [[consumer]]\nname = \"b\"\n[[consumer.keys]]\nhash = \"{}\"\nname = \"nested\"\n",
        hash('1'),
        hash('2'),
        hash('3')
    );
    let (directory, path) = folder(Some(&file));
    let new = |arguments: &[&str]| {
        let said = key(directory.path(), &[&["new", "--consumer", "a"], arguments].concat(), "");
        key(directory.path(), &["hash"], said.line()).line().to_owned()
    };
    let named = new(&["--name", "ci", "--expires", "90d", "--route", "r"]);
    let dated = new(&["--expires", "2999-01-31"]);
    assert_eq!(key(directory.path(), &["new", "--consumer", "b", "--name", "more"], "").code, Some(0));
    assert_eq!(key(directory.path(), &["disable", "111111"], "").code, Some(0));
    let text = read(&path);
    let lines = |hash: &str| text.lines().find(|line| line.contains(hash)).unwrap().to_owned();
    assert_eq!(lines(&hash('1')), format!("  {{ hash = \"{}\", disabled = true }},   # laptop", hash('1')));
    let line = lines(&named);
    assert!(line.contains("name = \"ci\", created = 20") && line.contains("routes = [\"r\"]"), "{line}");
    assert!(lines(&dated).ends_with("expires = 2999-01-31 },"), "{text}");
    assert_eq!(text.matches("[[consumer.keys]]").count(), 2, "{text}");

    let list: serde_json::Value =
        serde_json::from_str(&key(directory.path(), &["list", "--json"], "").out).expect("a list");
    let keys = list[0]["keys"].as_array().unwrap();
    let statuses: Vec<_> = keys.iter().map(|key| key["status"].as_str().unwrap()).collect();
    assert_eq!(statuses, ["disabled", "expired", "active", "active"]);
    assert_eq!((&list[0]["consumer"], &list[0]["tier"]), (&"a".into(), &serde_json::Value::Null));
    assert_eq!((&keys[2]["name"], &keys[2]["routes"]), (&"ci".into(), &serde_json::json!(["r"])));
    assert_eq!(keys[0]["fingerprint"], "111111111111");
    assert!(!list.to_string().contains(&named[..40]), "{list}");
    let table = key(directory.path(), &["list"], "");
    let line =
        |word: &str| table.out.lines().find(|line| line.contains(word)).unwrap_or_else(|| panic!("{}", table.out));
    assert!(
        line("consumer").ends_with("keys          name    status    expires               routes"),
        "{}",
        table.out
    );
    assert!(line("222222222222").contains("expired   2020-01-01") && line("ci ").ends_with("  r"), "{}", table.out);

    // After `enable`, the key is still a table, and its comment is kept.
    assert_eq!(key(directory.path(), &["enable", "111111"], "").code, Some(0));
    assert!(read(&path).contains(&format!("  {{ hash = \"{}\" }},   # laptop", hash('1'))), "{}", read(&path));
    for fingerprint in ["333333", "222222", "111111"] {
        assert_eq!(key(directory.path(), &["revoke", fingerprint], "").code, Some(0), "{fingerprint}");
    }
    assert_eq!(key(directory.path(), &["list"], "").out.lines().count(), 1 + 3);
    let before = read(&path);
    for (arguments, expected) in [
        (&["--expires", "2020-01-01"][..], "the time is in the past"),
        (&["--expires", "soon"], "a duration (90d), a date (2027-01-31) or a time with a UTC offset"),
        (&["--expires", "2999-01-31T12:00:00"], "a time with a UTC offset"),
        (&["--route", "s"], "unknown route `s`"),
    ] {
        let said = key(directory.path(), &[&["new", "--consumer", "a"], arguments].concat(), "");
        assert!(said.code != Some(0) && said.err.contains(expected), "{arguments:?}: {}", said.err);
    }
    assert!(key(directory.path(), &["new", "--name", "ci"], "").err.contains("--consumer"));
    assert_eq!(read(&path), before);
}

#[test]
fn several_consumers_files_are_chosen_by_provider() {
    let (directory, path) = folder(Some("[[consumer]]\nname = \"a\"\nkeys = []\n"));
    let gateway = directory.path().join("gateway.toml");
    let partners = "[auth.partners]\nkind = \"api-key\"\nheader = \"x-partner\"\nconsumers = \"partners.toml\"\n";
    std::fs::write(&gateway, read(&gateway) + partners).unwrap();
    std::fs::write(directory.path().join("partners.toml"), "[[consumer]]\nname = \"b\"\nkeys = []\n").unwrap();
    let said = key(directory.path(), &["list"], "");
    assert!(said.err.contains("choose one with --auth keys or --auth partners"), "{}", said.err);
    assert_eq!(key(directory.path(), &["new", "--auth", "partners", "--consumer", "b"], "").code, Some(0));
    assert_eq!(key(directory.path(), &["--auth", "keys", "new", "--consumer", "a"], "").code, Some(0));
    assert!(read(&path).contains("sha256:") && read(&directory.path().join("partners.toml")).contains("sha256:"));
    // Consumer names are unique across all files: a name from the other file is rejected.
    let said = key(directory.path(), &["new", "--auth", "keys", "--consumer", "b", "--create"], "");
    assert!(said.err.contains("another file already has a consumer `b`"), "{}", said.err);
    assert!(key(directory.path(), &["list", "--auth", "none"], "").err.contains("[auth.none] names no consumers file"));
    // If both providers use the same file, `--auth` is not required.
    std::fs::write(&gateway, read(&gateway).replace("partners.toml", "consumers.toml")).unwrap();
    assert_eq!(key(directory.path(), &["list"], "").code, Some(0));
}

/// `check` and the log warn about keys that expire within 14 days.
#[test]
fn keys_that_expire_soon_are_warned_of() {
    let (directory, path) = folder(Some("[[consumer]]\nname = \"a\"\nkeys = []\n"));
    let new = |arguments: &[&str]| {
        assert_eq!(key(directory.path(), &[&["new", "--consumer", "a"], arguments].concat(), "").code, Some(0));
    };
    new(&["--name", "soon", "--expires", "13d"]);
    new(&["--name", "later", "--expires", "15d"]);
    new(&["--expires", "90m"]);
    let config = directory.path().join("gateway.toml");
    let output = binary().args(["check", "--config"]).arg(&config).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("the key soon of `a` expires in 13 days"), "{said}");
    assert!(said.contains("of `a` expires in 2 hours") && !said.contains("later"), "{said}");
    assert_eq!(
        said.matches("consumers = \"consumers.toml\"").count(),
        2,
        "each warning shows the line of the configuration: {said}"
    );
    let gateway = Gateway::start_file(&config);
    let warnings =
        |text: &str| gateway.log().lines().filter(|line| line.contains("WARN") && line.contains(text)).count();
    assert_eq!((warnings("the key soon of `a` expires"), warnings("later")), (1, 0), "{}", gateway.log());
    std::fs::write(directory.path().join("new"), read(&path).replace("\"later\"", "\"renamed\"")).unwrap();
    std::fs::rename(directory.path().join("new"), &path).unwrap();
    eventually("the reload warns again", || warnings("the key soon of `a` expires") == 2);
}
