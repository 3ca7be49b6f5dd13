//! Writes the JSON Schemas and the generated parts of docs/reference/: `make reference`.

#[path = "../tests/support/reference.rs"]
#[allow(unreachable_pub, dead_code)] // shared with the test that compares the files
mod reference;

use std::path::Path;

fn main() {
    // `cargo bench` passes `--bench`. Other commands, such as `cargo test`, do not.
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs");
    for (name, text) in reference::schemas() {
        std::fs::write(docs.join(name), text).expect("the schema can be written");
    }
    type Generate = fn(&str) -> String;
    let pages: [(&str, Generate); 2] =
        [("configuration.md", reference::filled), ("admin-api.md", reference::with_endpoints)];
    for (name, generate) in pages {
        let page = docs.join("reference").join(name);
        let text = std::fs::read_to_string(&page).expect("the page is there");
        std::fs::write(page, generate(&text)).expect("the page can be written");
    }
}
