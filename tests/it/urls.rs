//! URLs of the configuration: each row of `tests/config/urls.tsv` is accepted or rejected as the row states.

use std::path::Path;
use std::process::Output;

use crate::support::gateway::binary;

/// One row of the table.
struct Case<'a> {
    key: &'a str,
    /// The value, as in a TOML string in double quotes.
    value: &'a str,
    is_valid: bool,
    /// A part of the output. Empty for most valid values.
    message: &'a str,
}

fn cases(table: &str) -> Vec<Case<'_>> {
    let rows = table.lines().skip(1).map(|line| {
        let columns: Vec<_> = line.split('\t').collect();
        let [key, value, verdict @ ("ok" | "error"), message] = columns[..] else { panic!("not a row: {line}") };
        Case { key, value, is_valid: verdict == "ok", message }
    });
    rows.collect()
}

/// Return a configuration with this value at this key, in addition to a listener and a route.
fn config(key: &str, value: &str) -> String {
    let (tables, route) = match key {
        "servers" => (format!("[upstream.u]\nservers = [\"{value}\"]\n"), "upstream = \"u\"".to_owned()),
        "store.url" => (format!("[store]\nurl = \"{value}\"\n"), String::new()),
        "jwks_url" => (
            format!("[auth.a]\nkind = \"jwt\"\njwks_url = \"{value}\"\nissuer = \"i\"\n"),
            "require = [\"a\"]".to_owned(),
        ),
        "forward.url" => (format!("[auth.a]\nkind = \"forward\"\nurl = \"{value}\"\n"), "require = [\"a\"]".to_owned()),
        "webhook" => {
            let secret = "whsec_a2tra2tra2tra2tra2tra2tra2tra2tra2tra2tra2s=";
            (format!("[notify.n]\nwebhook = \"{value}\"\nsecret = \"{secret}\"\n"), String::new())
        }
        "trace_endpoint" => (format!("[log]\ntrace_endpoint = \"{value}\"\n"), String::new()),
        "redirect.to" => (String::new(), format!("redirect = {{ to = \"{value}\" }}")),
        "cors.origins" => (String::new(), format!("cors = {{ origins = [\"{value}\"] }}")),
        "acme.directory" => (
            format!(
                "[acme]\naccept_terms = true\ndirectory = \"{value}\"\n[[listener]]\naddress = \"127.0.0.1:0\"\n\
                 tls = {{ acme = true, names = [\"a.test\"] }}\n"
            ),
            String::new(),
        ),
        key => panic!("unknown key {key}"),
    };
    let action =
        if route.starts_with("upstream") || route.starts_with("redirect") { "" } else { "respond.status = 200" };
    format!(
        "{tables}[[listener]]\naddress = \"127.0.0.1:0\"\n[[route]]\nname = \"r\"\npath = \"/\"\n{route}\n{action}\n"
    )
}

/// Run the command that reads the value.
fn run(case: &Case<'_>, path: &Path) -> Output {
    let (key, value, arguments) = match case.key {
        "--admin" => ("redirect.to", "/x", vec!["status", "--admin", case.value]),
        "--url" => ("redirect.to", "/x", vec!["probe", "--url", case.value]),
        "explain" => ("redirect.to", "/x", vec!["explain", "GET", case.value]),
        key => (key, case.value, vec!["check", "--offline"]),
    };
    std::fs::write(path, config(key, value)).unwrap();
    binary().args(arguments).arg("--config").arg(path).output().unwrap()
}

#[test]
fn urls_of_the_configuration_are_accepted_or_rejected_with_the_reason() {
    let cases = cases(include_str!("../config/urls.tsv"));
    assert!(cases.len() > 200, "{} cases", cases.len());
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("gateway.toml");
    let mut wrong = Vec::new();
    for case in cases {
        let output = run(&case, &path);
        let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        // One mistake is one error. Other commands than `check` print no `error: `.
        let errors = said.matches("error: ").count();
        let has_verdict = output.status.success() == case.is_valid && errors <= usize::from(!case.is_valid);
        if !has_verdict || !said.contains(case.message) || said.contains("plan") && case.value.contains('@') {
            wrong.push(format!("{} = {} is not: {}\n{said}", case.key, case.value, case.message));
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}
