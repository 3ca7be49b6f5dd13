//! Included configuration files: errors name the file and the line, and the file watcher notices changed, new and
//! removed files.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Output;

use crate::support::eventually;
use crate::support::gateway::{Gateway, binary};
use crate::support::reload::{ask, metric, with_admin};
use serde_json::Value;

const MAIN: &str = "include = [\"routes/*.toml\"]\n";

const LISTENER: &str = "[[listener]]\naddress = \"127.0.0.1:0\"\n";

fn route(name: &str) -> String {
    format!("[[route]]\nname = \"{name}\"\npath = \"/{name}\"\nrespond = {{ status = 200, body = \"{name}\" }}\n")
}

/// Write the files of a configuration, and create their directories.
fn put(directory: &Path, files: &[(&str, &str)]) {
    for (name, text) in files {
        let path = directory.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
}

fn run(directory: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = binary();
    command.current_dir(directory).args(arguments).args(["--config", "gateway.toml"]).env("GIVEN", "given");
    let Output { status, stdout, stderr } = command.output().unwrap();
    (status.code(), String::from_utf8([stdout, stderr].concat()).unwrap())
}

fn check(files: &[(&str, &str)]) -> (Option<i32>, String) {
    let directory = tempfile::tempdir().unwrap();
    put(directory.path(), files);
    run(directory.path(), &["check"])
}

/// Write the files to a new directory, and start a gateway there.
fn start(files: &[(&str, &str)]) -> (tempfile::TempDir, Gateway) {
    let directory = tempfile::tempdir().unwrap();
    put(directory.path(), files);
    let gateway = Gateway::start_file(&directory.path().join("gateway.toml"));
    (directory, gateway)
}

fn with_listener(text: &str) -> String {
    with_admin(&format!("{LISTENER}[log]\naccess = \"off\"\n{text}"))
}

#[test]
fn tables_of_all_files_are_one_configuration() {
    let upstreams = "[upstream.api]\nservers = [\"https://127.0.0.1:1\"]\ntls = { ca = \"ca.pem\" }\n";
    let main = format!(
        "{MAIN}{LISTENER}[limit.shared]\nby = \"ip\"\nquota = \"1/day\"\n{}limits = [\"in-file\"]\n",
        route("main")
    );
    let one =
        format!("{}limits = [\"shared\"]\n[limit.in-file]\nby = \"global\"\nquota = \"1/day\"\n", route("${GIVEN}"));
    let two = "[[route]]\nname = \"api\"\npath = \"/api\"\nupstream = \"api\"\n";
    let ca = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/certs/one.pem")).unwrap();
    let files = [
        ("gateway.toml", main.as_str()),
        ("routes/10-one.toml", &one),
        ("routes/20-two.toml", two),
        // Paths are relative to the file that contains them.
        ("routes/upstreams.toml", upstreams),
        ("routes/ca.pem", &ca),
        // These files do not match the pattern.
        ("routes/.hidden.toml", "no toml"),
        ("routes/two.toml~", "no toml"),
        ("routes/deeper/three.toml", "no toml"),
    ];
    let (code, out) = check(&files);
    assert_eq!(code, Some(0), "{out}");
    assert!(out.contains("valid: 1 listener, 3 routes, 2 limits, 1 upstream"), "{out}");
    let directory = tempfile::tempdir().unwrap();
    put(directory.path(), &files);
    let (code, out) = run(directory.path(), &["explain", "GET", "http://a.test/given", "--offline"]);
    assert_eq!(code, Some(0), "{out}");
    assert!(out.contains("Route given: /given") && out.contains("shared"), "{out}");
    // Include a pattern, a path without a wildcard, and an absolute path.
    let absolute = directory.path().join("routes/upstreams.toml");
    let patterns =
        format!("include = [\"${{GIVEN:-x}}/?.toml\", \"routes/20-two.toml\", \"{}\"]\n", absolute.display());
    put(directory.path(), &[("gateway.toml", &main.replace(MAIN, &patterns)), ("given/a.toml", &one)]);
    let (code, out) = run(directory.path(), &["check"]);
    assert!(code == Some(0) && out.contains("3 routes, 2 limits, 1 upstream"), "{out}");
}

#[test]
fn provider_of_an_included_file_has_its_consumers_beside_that_file() {
    let main = format!("{MAIN}{LISTENER}{}require = [\"keys\"]\n", route("main"));
    let auth = "[auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.conf\"\n";
    let directory = tempfile::tempdir().unwrap();
    put(directory.path(), &[("gateway.toml", &main), ("routes/auth.toml", auth)]);
    let (code, out) = run(directory.path(), &["key", "new", "--consumer", "acme", "--create"]);
    assert_eq!(code, Some(0), "{out}");
    let (code, out) = run(directory.path(), &["check"]);
    assert_eq!(code, Some(0), "{out}");
    let consumers = fs::read_to_string(directory.path().join("routes/consumers.conf")).unwrap();
    assert!(consumers.contains("name = \"acme\""), "{consumers}");
    assert!(!directory.path().join("consumers.conf").exists());
}

#[test]
fn errors_name_the_included_file_with_its_line() {
    let main = format!("{MAIN}{LISTENER}{}[limit.l]\nby = \"ip\"\nquota = \"1/s\"\n", route("main"));
    let bad = "\n# a comment\n[[route]]\nname = \"main\"\npath = \"a\"\nrespnd = {}\n[limit.l]\nby = \"ip\"\n";
    for (files, expected) in [
        (
            // Errors in both files, each with its file and line.
            vec![("gateway.toml", main.replace("by = \"ip\"", "by = \"adress\"")), ("routes/a.toml", bad.to_owned())],
            vec![
                "gateway.toml:9:6",
                "9 | by = \"adress\"",
                "duplicate route `main`",
                "routes/a.toml:4:8",
                "4 | name = \"main\"",
                "the first one is in line 5 of gateway.toml",
                "a path starts with `/`",
                "routes/a.toml:5:8",
                "unknown key `respnd`",
                "routes/a.toml:6:1",
                "did you mean `respond`?",
                "duplicate limit `l`",
                "routes/a.toml:7:8",
                "the first one is in line 8 of gateway.toml",
            ],
        ),
        (
            vec![
                ("gateway.toml", main.clone()),
                ("routes/a.toml", "[upstream.api]\nservers = [\"http://a\"]\n".to_owned()),
                ("routes/b.toml", format!("{}\n[upstream.api]\nservers = []\n", route("b"))),
            ],
            vec!["duplicate upstream `api`", "routes/b.toml:6:11", "line 1 of routes/a.toml"],
        ),
        (
            vec![("gateway.toml", main.clone()), ("routes/a.toml", "[server]\nworkers = 1\n".to_owned())],
            vec![
                "`server` is not valid in an included file",
                "routes/a.toml:1:2",
                "move `server` to gateway.toml: an included file may contain only [[route]], [[descriptor]], [limit.NAME], [upstream.NAME], [auth.NAME] and [prices.NAME]",
            ],
        ),
        (
            vec![("gateway.toml", main.clone()), ("routes/a.toml", "[[routes]]\nname = \"x\"\n".to_owned())],
            vec!["unknown key `routes`", "routes/a.toml:1:3", "did you mean `route`?"],
        ),
        (
            vec![("gateway.toml", main.clone()), ("routes/a.toml", "[route]\nname = \"x\"\n".to_owned())],
            vec!["`route` has the wrong form", "routes/a.toml:1:2"],
        ),
        (
            vec![("gateway.toml", main.clone()), ("routes/a.toml", "[[consumer]]\nname = \"acme\"\n".to_owned())],
            vec!["a consumers file cannot be included", "routes/a.toml:1:3", "to another directory"],
        ),
        (
            vec![("gateway.toml", main.clone()), ("routes/a.toml", "include = [\"b.toml\"]\n".to_owned())],
            vec!["an included file cannot include other files", "routes/a.toml:1:1", "`include` of gateway.toml"],
        ),
        (
            // Syntax errors in several files.
            vec![
                ("gateway.toml", main.clone()),
                ("routes/a.toml", "\n[limit.x\n".to_owned()),
                ("routes/b.toml", "x = unquoted\n".to_owned()),
            ],
            vec!["routes/a.toml:2:9", "routes/b.toml:1:5", "put strings in quotes: x = \"unquoted\""],
        ),
        (
            vec![("gateway.toml", main.clone()), ("routes/a.toml", "\n[[route]]\nname = 7\n".to_owned())],
            vec!["`name` must be a string, not an integer", "routes/a.toml:3:8", "put the value in quotes"],
        ),
        (
            vec![
                ("gateway.toml", main.clone()),
                ("routes/a.toml", format!("{}limits = [\"${{UNSET_HERE}}\"]\n", route("a"))),
            ],
            vec!["environment variable `UNSET_HERE` is not set", "routes/a.toml:5:11"],
        ),
        (
            vec![("gateway.toml", main.replace(MAIN, "include = [\"none.toml\"]\n"))],
            vec!["none.toml cannot be read: No such file", "gateway.toml:1:12"],
        ),
        (
            vec![("gateway.toml", main.replace(MAIN, "include = [\"none/*.toml\"]\n"))],
            vec!["the directory none cannot be read: No such file", "gateway.toml:1:12"],
        ),
        (
            vec![("gateway.toml", main.replace(MAIN, "include = [\"*/a.toml\", \"routes/\"]\n"))],
            vec![
                "`*/a.toml` has a wildcard in the name of a directory",
                "only in the file name",
                "`routes/` is not a file",
            ],
        ),
        (
            vec![("gateway.toml", main.replace(MAIN, "include = [\"*.toml\"]\n"))],
            vec!["gateway.toml includes itself", "include = [\"routes/*.toml\"]"],
        ),
        (
            vec![
                (
                    "gateway.toml",
                    main.replace(MAIN, "include = [\n  \"routes/*.toml\",\n  \"routes/../routes/a.toml\",\n]\n"),
                ),
                ("routes/a.toml", route("a")),
            ],
            vec!["routes/../routes/a.toml is included twice", "gateway.toml:3:3", "is in line 2"],
        ),
        (
            vec![("gateway.toml", main.replace(MAIN, "include = [\"${UNSET_HERE}/*.toml\"]\n"))],
            vec!["environment variable `UNSET_HERE` is not set", "gateway.toml:1:12"],
        ),
        (
            vec![("gateway.toml", main.replace(MAIN, "include = \"routes/*.toml\"\n"))],
            vec!["`include` must be a list, not a string", "gateway.toml:1:11", "write a list in brackets"],
        ),
        (
            vec![
                ("gateway.toml", main.clone()),
                (
                    "routes/a.toml",
                    "host = 1\n[[route]]\nname = \"a\"\npath = \"/a\"\nhost = 'a.test'\nrespond = { status = 200 }\n"
                        .to_owned(),
                ),
            ],
            vec![
                "`host` is not valid in an included file",
                "routes/a.toml:1:1",
                "unknown key `host`",
                "routes/a.toml:5:1",
                "write hosts = ['a.test']",
            ],
        ),
    ] {
        let files: Vec<_> = files.iter().map(|(name, text)| (*name, text.as_str())).collect();
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("routes")).unwrap();
        put(directory.path(), &files);
        let (code, out) = run(directory.path(), &["check"]);
        assert_eq!(code, Some(2), "{files:#?}\n{out}");
        let mut rest = out.as_str();
        for part in expected {
            let Some(at) = rest.find(part) else { panic!("the report does not contain next: {part}\n\n{out}") };
            rest = &rest[at + part.len()..];
        }
        let (code, json) = run(directory.path(), &["check", "--json"]);
        let json: Value = serde_json::from_str(&json).unwrap();
        let findings = json["errors"].as_array().unwrap().iter().filter(|finding| finding["line"].is_u64());
        let places = findings
            .map(|finding| format!("{}:{}:{}", finding["file"].as_str().unwrap(), finding["line"], finding["column"]));
        let places: Vec<_> = places.collect();
        assert!(code == Some(2) && !places.is_empty(), "{json:#}");
        assert!(places.iter().all(|place| out.contains(place.as_str())), "{places:?}\n{out}");
    }
}

#[test]
fn warnings_name_the_included_file() {
    let main = format!("{MAIN}{LISTENER}{}", route("main"));
    let unused = "[limit.unused]\nby = \"ip\"\nquota = \"1/s\"\n";
    let (code, out) = check(&[("gateway.toml", &main), ("routes/a.toml", &format!("{}\n{unused}", route("a")))]);
    assert_eq!(code, Some(0), "{out}");
    assert!(out.contains("no route uses `unused`") && out.contains("routes/a.toml:6:1"), "{out}");
    assert!(out.ends_with("\n1 warning\n"), "{out}");
}

#[test]
fn links_to_one_file_are_the_same_file() {
    let main = format!("{MAIN}{LISTENER}{}", route("main"));
    let directory = tempfile::tempdir().unwrap();
    put(directory.path(), &[("gateway.toml", &main), ("routes/a.toml", &route("a"))]);
    symlink("a.toml", directory.path().join("routes/b.toml")).unwrap();
    let (code, out) = run(directory.path(), &["check"]);
    assert!(code == Some(2) && out.contains("routes/b.toml is included twice"), "{out}");
}

#[test]
fn changed_new_and_removed_files_are_reloaded() {
    let main = with_listener("").replacen("[admin]", &format!("{MAIN}[admin]"), 1);
    let (directory, gateway) = start(&[("gateway.toml", &main), ("routes/a.toml", &route("a"))]);
    let status = |path: &str| gateway.get(path).status;
    assert_eq!((status("/a"), status("/b")), (200, 404));
    put(directory.path(), &[("routes/a.toml", &route("changed"))]);
    eventually("a changed file", || (status("/a"), status("/changed")) == (404, 200));
    put(directory.path(), &[("routes/b.toml", &route("b"))]);
    eventually("a new file", || status("/b") == 200);
    fs::remove_file(directory.path().join("routes/a.toml")).unwrap();
    eventually("a removed file", || (status("/changed"), status("/b")) == (404, 200));
    // A file that does not match the pattern changes nothing.
    let reloads = || metric(&gateway, "config_reloads_total{result=\"ok\"}");
    let before = reloads();
    put(directory.path(), &[("routes/c.toml~", "no toml")]);
    // The file watcher compares all files in one pass. When the gateway has applied this later change, the file watcher
    // has also seen the earlier one.
    put(directory.path(), &[("routes/c.toml", &route("c"))]);
    eventually("a file beside it", || status("/c") == 200);
    assert_eq!(reloads() - before, 1.0);
    let shown = ask(&gateway, "GET", "/api/config").json();
    let names = |value: &Value| -> Vec<String> {
        let names = value.as_array().unwrap().iter().map(|name| name.as_str().unwrap().to_owned());
        names.map(|name| Path::new(&name).file_name().unwrap().to_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names(&shown["included"]), ["b.toml", "c.toml"], "{shown:#}");
    let routes = shown["configuration"]["route"].as_array().unwrap().iter().map(|route| route["name"].clone());
    assert_eq!(routes.collect::<Vec<_>>(), ["b", "c"]);
    assert_eq!(shown["configuration"]["include"][0], "routes/*.toml");
}

#[test]
fn invalid_included_file_changes_nothing_until_it_is_corrected() {
    let main = with_listener("").replacen("[admin]", &format!("{MAIN}[admin]"), 1);
    let (directory, gateway) = start(&[("gateway.toml", &main), ("routes/a.toml", &route("a"))]);
    let status = |path: &str| gateway.get(path).status;
    put(directory.path(), &[("routes/b.toml", "[[route]]\nname = \"b\"\npath = \"b\"\n")]);
    eventually("the error is logged", || gateway.log().contains("routes/b.toml:3:8"));
    let shown = ask(&gateway, "GET", "/api/config").json();
    assert!(shown["last_error"]["error"].as_str().unwrap().contains("a path starts with `/`"), "{shown:#}");
    assert_eq!((status("/a"), status("/b")), (200, 404));
    let reply = ask(&gateway, "POST", "/api/reload");
    assert!(reply.status == 422 && reply.text().contains("routes/b.toml"), "{}", reply.text());
    put(directory.path(), &[("routes/b.toml", &route("b"))]);
    eventually("the corrected file", || status("/b") == 200);
}

/// The new `include` makes the configuration invalid, because the included file is invalid. The file watcher must watch
/// the new directory nevertheless.
#[test]
fn new_include_is_watched_although_its_first_file_is_invalid() {
    let (directory, gateway) = start(&[("gateway.toml", &with_listener(&route("main")))]);
    put(directory.path(), &[("more/a.toml", "[[route]]\nname = \"a\"\n")]);
    let main = with_listener(&route("main")).replacen("[admin]", "include = [\"more/*.toml\"]\n[admin]", 1);
    put(directory.path(), &[("gateway.toml", &main)]);
    eventually("the error is logged", || gateway.log().contains("more/a.toml:1:1"));
    assert_eq!(gateway.get("/main").status, 200);
    put(directory.path(), &[("more/a.toml", &route("a"))]);
    eventually("the corrected file", || gateway.get("/a").status == 200);
    // The file watcher also notices when a missing directory is created.
    let main = main.replace("more/*.toml", "other/*.toml");
    put(directory.path(), &[("gateway.toml", &main)]);
    eventually("the error is logged", || gateway.log().contains("other cannot be read"));
    assert_eq!(gateway.get("/a").status, 200);
    fs::create_dir(directory.path().join("other")).unwrap();
    eventually("the directory without files", || gateway.get("/a").status == 404);
    put(directory.path(), &[("other/b.toml", &route("b"))]);
    eventually("the first file in it", || gateway.get("/b").status == 200);
}
