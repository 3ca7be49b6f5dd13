//! Compiles `allow` and `deny`, and reads the files of networks that they name.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use arc_swap::ArcSwap;

use crate::config::Text;
use crate::config::error::{ConfigError, FileIssues, Issue};
use crate::config::file;
use crate::config::file::FileSnapshot;
use crate::identity::access::{AccessRules, NetworkFile, NetworkList, NetworkSet, parse_network, parse_networks};
use crate::snapshot::CompiledConfig;
use crate::snapshot::identities::network_issue;
use crate::snapshot::validator::Validator;

/// Prefix of an item that names a file.
const FILE_PREFIX: &str = "file:";

/// The files of networks, in the order in which rules first name them. Each file is read once.
#[derive(Default)]
pub(super) struct NetworkFiles(pub(super) Vec<Arc<NetworkFile>>);

/// Compile `allow` and `deny` of the table at `span`. Return `None` if neither list is set.
pub(super) fn rules(
    allow: Option<&[Text]>,
    deny: Option<&[Text]>,
    span: &Range<usize>,
    files: &mut NetworkFiles,
    reader: &mut Validator<'_>,
) -> Option<AccessRules> {
    if allow.is_none() && deny.is_none() {
        return None;
    }
    if let Some([]) = allow {
        let issue = Issue::new(span.clone(), "`allow` is empty: every client would be rejected");
        reader.push_issue(issue.with_hint("remove `allow` to allow all clients"));
    }
    let allow = allow.map(|items| files.list(items, reader));
    let deny = files.list(deny.unwrap_or_default(), reader);
    Some(AccessRules { allow, deny })
}

impl NetworkFiles {
    fn list(&mut self, items: &[Text], reader: &mut Validator<'_>) -> NetworkList {
        let (mut networks, mut files) = (Vec::new(), Vec::new());
        for text in items {
            let item = text.get_ref();
            match (item.strip_prefix(FILE_PREFIX), parse_network(item)) {
                (Some(name), _) => files.extend(self.file(name, text, reader)),
                (None, Some(network)) => networks.push(network),
                (None, None) if item.ends_with(".txt") => {
                    let issue = Issue::new(text.span(), format!("`{item}` is not an address or a network"));
                    reader.push_issue(
                        issue.with_hint(format!("if this is the path of a file, write \"{FILE_PREFIX}{item}\"")),
                    );
                }
                (None, None) => network_issue(item, text.span(), reader),
            }
        }
        NetworkList { inline: NetworkSet::new(networks), files }
    }

    /// Return a file. The file is read only if no earlier rule has named it.
    fn file(&mut self, name: &str, text: &Text, reader: &mut Validator<'_>) -> Option<Arc<NetworkFile>> {
        if reader.is_unresolved(text) {
            reader.push_issue(Issue::new(
                text.span(),
                "cannot find the file of networks, because an environment variable is not set",
            ));
            return None;
        }
        let path = reader.resolve_relative(name, text.span());
        if let Some(known) = self.0.iter().find(|known| known.file.path == path) {
            return Some(known.clone());
        }
        let file = match FileSnapshot::read(&path) {
            Ok(file) => file,
            Err(error) => {
                let issue = Issue::new(text.span(), format!("{} cannot be read: {error}", path.display()));
                reader.push_issue(issue.with_hint("give the path of a text file with one network or address per line"));
                return None;
            }
        };
        let networks = parse(&path, &file.content).map_err(|faulty| reader.add_file_issues(faulty)).unwrap_or_default();
        let file = Arc::new(NetworkFile { name: name.into(), file, networks: ArcSwap::from_pointee(networks) });
        self.0.push(file.clone());
        Some(file)
    }
}

/// Parse the content of a file of networks.
fn parse(path: &Path, content: &[u8]) -> Result<NetworkSet, FileIssues> {
    let text = file::utf8_text(path, content.to_vec())?;
    parse_networks(&text).map_err(|(lines, further)| {
        let issue = |span: Range<usize>| {
            let line = &text[span.clone()];
            // Give a hint for lines in the syntax of other programs, such as `deny 10.0.0.1;` and `10.0.0.1, 10.0.0.2`.
            let mut words = line.split(|c: char| c.is_whitespace() || "\"',;".contains(c));
            let hint = match words.find(|word| parse_network(word).is_some()) {
                Some(network) => format!("write only the network in the line: {network}"),
                None => "write one network or address per line, such as 10.0.0.0/8; comments begin with `#`".to_owned(),
            };
            Issue::new(span, format!("`{line}` is not an address or a network")).with_hint(hint)
        };
        let mut issues: Vec<_> = lines.into_iter().map(|line| issue(line.span)).collect();
        if further > 0 {
            issues.push(Issue { span: None, message: format!("{further} further lines are not networks"), hint: None });
        }
        FileIssues { path: path.to_owned(), text: text.clone(), issues }
    })
}

impl CompiledConfig {
    /// Replace the networks of the file with this index by the networks in `content`.
    ///
    /// # Errors The file has errors, or is empty because a program is writing it. After an error, the active networks
    /// do not change.
    pub fn reload_networks(&self, index: usize, content: &[u8]) -> Result<(), ConfigError> {
        let NetworkFile { file, networks, .. } = &*self.network_files[index];
        let parsed = match content.trim_ascii().is_empty() {
            true => Err(FileIssues::from_message(
                &file.path,
                "the file is empty: if it lists no networks intentionally, write a comment into it",
            )),
            false => parse(&file.path, content),
        };
        networks.store(Arc::new(parsed.map_err(|faulty| ConfigError { files: vec![faulty] })?));
        Ok(())
    }
}
