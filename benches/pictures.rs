//! Draws the pictures of docs/reference/limits.md with the model of the algorithms: `make pictures`. With `--check`, or
//! if `cargo test` runs this program, it only reports the pictures that differ from the model.

#[path = "../tests/support/pictures.rs"]
#[allow(unreachable_pub)] // shared with the test that compares the pictures
mod pictures;

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/pictures");
    // `cargo bench` passes `--bench`. Other commands, such as `cargo test`, do not.
    let asked = |word: &str| std::env::args().any(|argument| argument == word);
    let check = asked("--check") || !asked("--bench");
    let mut differ = false;
    for (name, svg) in pictures::all() {
        let path = folder.join(&name);
        if std::fs::read_to_string(&path).is_ok_and(|committed| committed == svg) {
            continue;
        }
        differ = true;
        if check {
            println!("docs/pictures/{name} is not what the model draws");
        } else {
            std::fs::create_dir_all(&folder).expect("docs/pictures can be made");
            std::fs::write(&path, svg).expect("the picture can be written");
            println!("docs/pictures/{name} written");
        }
    }
    ExitCode::from(u8::from(check && differ))
}
