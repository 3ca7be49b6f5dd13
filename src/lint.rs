//! What a configuration says that works, but hardly as it was meant: warnings, each with its place in the file.

mod clients;
mod limits;
mod routes;

use std::collections::BTreeMap;
use std::ops::Range;

use tokio::time::Duration;

use crate::config::error::Issue;
use crate::config::file::ParsedFile;
use crate::config::{Config, Limit, Route, Spanned};
use crate::runtime::{CompiledConfig, WarningSubject};

/// A configuration as written, and the same ready to use.
struct LintInput<'a> {
    parsed: &'a Config,
    config: &'a CompiledConfig,
}

/// All warnings, in no order.
pub fn warnings(parsed: &Config, config: &CompiledConfig, now: Duration) -> Vec<Issue> {
    let input = LintInput { parsed, config };
    let mut issues: Vec<_> =
        config.warnings(now).into_iter().map(|(subject, text)| input.warning_issue(&subject, text)).collect();
    issues.extend(limits::limit_warnings(&input));
    issues.extend(routes::route_warnings(&input));
    issues.extend(clients::client_warnings(&input));
    issues
}

/// What a start would refuse, and the configuration by itself does not show.
pub fn errors(file: &ParsedFile<Config>, config: &CompiledConfig) -> Vec<Issue> {
    let address = |index: usize| file.value.listener.get(index).and_then(|each| each.get_ref().address.as_ref());
    let issue = |(earlier, later): (usize, usize)| {
        let [earlier_address, later_address] = [earlier, later].map(|index| config.listeners[index].address);
        let (earlier, later) = (address(earlier)?.span(), address(later)?.span());
        let (line, _) = Issue::new(earlier, "").position(&file.text)?;
        let message = format!("{later_address} is taken by the [[listener]] on {earlier_address} in line {line}");
        Some(Issue::new(later, message).with_hint(
            "one of both, or another port: an unspecified address is every address; [::] may be IPv4 as well",
        ))
    };
    config.address_conflicts().filter_map(issue).collect()
}

/// What is neither wrong nor surprising, but good to know.
pub fn notes(parsed: &Config, config: &CompiledConfig) -> Vec<Issue> {
    routes::route_notes(&LintInput { parsed, config })
}

impl<'a> LintInput<'a> {
    fn limit(&self, name: &str) -> Option<&'a Spanned<Limit>> {
        let limits: &'a BTreeMap<_, _> = &self.parsed.limit;
        limits.get(name)
    }

    /// A route as it is written; none are left out, so that places are the same.
    fn route(&self, index: usize) -> Option<&'a Spanned<Route>> {
        self.parsed.route.get(index)
    }

    /// The place of a value of a limit, else of the limit itself.
    fn span_of<T>(&self, name: &str, value: impl Fn(&Limit) -> Option<&Spanned<T>>) -> Range<usize> {
        let Some(limit) = self.limit(name) else { return 0..0 };
        value(limit.get_ref()).map_or(limit.span(), |value| value.span())
    }

    fn warning_issue(&self, subject: &WarningSubject, text: String) -> Issue {
        let listener = |index: usize| self.parsed.listener.get(index);
        let span = match subject {
            WarningSubject::Upstream(name) => self.parsed.upstream.get(&**name).map(|upstream| upstream.span()),
            WarningSubject::Listener(index) => listener(*index).map(|listener| listener.span()),
            WarningSubject::Certificate(index, number) => listener(*index).and_then(|listener| {
                let tls = listener.get_ref().tls.as_ref()?;
                tls.get_ref().certificates.get(*number).map(|certificate| certificate.span())
            }),
        };
        Issue { span, message: text, hint: None }
    }
}
