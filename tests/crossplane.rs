//! The tokenizer of `sluicegate import nginx` beside crossplane, the parser of nginx, Inc. `make test-clients` installs
//! crossplane, sets `CROSSPLANE_PYTHON` to its interpreter, and runs this test.

use std::process::Command;

use sluicegate::tools::import::Input;
use sluicegate::tools::import::model::Model;
use sluicegate::tools::import::nginx::syntax::{Directive, Reader};

const CASES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/import/nginx");

/// Print the directives of a file as crossplane reads them: name, line, arguments and block.
const CROSSPLANE: &str = r#"
import crossplane, json, sys
parsed = crossplane.parse(sys.argv[1], single=True, strict=False, check_ctx=False, check_args=False)
assert parsed["status"] == "ok", parsed["errors"]
def reduced(directives):
    return [[d["directive"], d["line"], d["args"], reduced(d["block"]) if "block" in d else None] for d in directives]
print(json.dumps(reduced(parsed["config"][0]["parsed"])))
"#;

/// Return directives in the form of [`CROSSPLANE`].
fn reduced(directives: &[Directive]) -> serde_json::Value {
    let one = |directive: &Directive| {
        let block = directive.block.as_deref().map(reduced);
        let mut args = directive.args.clone();
        if directive.name == "if" {
            // crossplane removes the parentheses.
            let last = args.len() - 1;
            args[0] = args[0].trim_start_matches('(').to_owned();
            args[last] = args[last].trim_end_matches(')').to_owned();
            args.retain(|argument| !argument.is_empty());
        }
        serde_json::json!([directive.name, directive.origin.line, args, block])
    };
    directives.iter().map(one).collect()
}

#[test]
fn syntax_of_nginx_is_that_of_crossplane() {
    let python = std::env::var("CROSSPLANE_PYTHON").expect("`make test-clients` sets CROSSPLANE_PYTHON");
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.conf");
    let unusual = "map $a $b { \"x y\" \"1\"; ~^a\\.b 2; '' 3; default \"it's\"; }\n\
                   server { # a comment; {\n location ~ \\.php$ { return 200 \"a;b{c}#d\"; }\n\
                   set $v ${host}x${a}; if ($host = 'a b') { rewrite ^/(.*)$ /$1\n break; }\n\
                   add_header 'X-A' a\\ b;\tlisten\r\n80 default_server; }\n";
    let sites = ["site.conf", "fragment.conf", "snippets/rewrites.conf"];
    let sites = sites.map(|name| std::fs::read_to_string(format!("{CASES}/{name}")).unwrap());
    for text in [unusual.to_owned()].into_iter().chain(sites).map(|text| text.replace("include ", "included ")) {
        std::fs::write(&path, &text).unwrap();
        let output = Command::new(&python).arg("-c").arg(CROSSPLANE).arg(&path).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let expected: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let mut model = Model::default();
        let input = Input { name: "a.conf".into(), directory: None, text };
        let found = reduced(&Reader::new(&mut model, 0).read(&input).unwrap());
        assert_eq!(found, expected, "{}", input.text);
    }
}
