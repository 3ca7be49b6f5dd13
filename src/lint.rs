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
struct Whole<'a> {
    written: &'a Config,
    runtime: &'a CompiledConfig,
}

/// All warnings, in no order.
pub fn warnings(written: &Config, runtime: &CompiledConfig, now: Duration) -> Vec<Issue> {
    let whole = Whole { written, runtime };
    let mut found: Vec<_> =
        runtime.warnings(now).into_iter().map(|(subject, text)| whole.about(&subject, text)).collect();
    found.extend(limits::limit_warnings(&whole));
    found.extend(routes::route_warnings(&whole));
    found.extend(clients::client_warnings(&whole));
    found
}

/// What a start would refuse, and the configuration by itself does not show.
pub fn errors(file: &ParsedFile<Config>, runtime: &CompiledConfig) -> Vec<Issue> {
    let address = |place: usize| file.value.listener.get(place).and_then(|each| each.get_ref().address.as_ref());
    let issue = |(earlier, later): (usize, usize)| {
        let [one, other] = [earlier, later].map(|place| runtime.listeners[place].address);
        let (earlier, later) = (address(earlier)?.span(), address(later)?.span());
        let (line, _) = Issue::new(earlier, "").position(&file.text)?;
        let message = format!("{other} is taken by the [[listener]] on {one} in line {line}");
        Some(Issue::new(later, message).with_hint(
            "one of both, or another port: an unspecified address is every address; [::] may be IPv4 as well",
        ))
    };
    runtime.address_conflicts().filter_map(issue).collect()
}

/// What is neither wrong nor surprising, but good to know.
pub fn notes(written: &Config, runtime: &CompiledConfig) -> Vec<Issue> {
    routes::route_notes(&Whole { written, runtime })
}

impl<'a> Whole<'a> {
    fn limit(&self, name: &str) -> Option<&'a Spanned<Limit>> {
        let limits: &'a BTreeMap<_, _> = &self.written.limit;
        limits.get(name)
    }

    /// A route as it is written; none are left out, so that places are the same.
    fn route(&self, index: usize) -> Option<&'a Spanned<Route>> {
        self.written.route.get(index)
    }

    /// The place of a value of a limit, else of the limit itself.
    fn place<T>(&self, name: &str, value: impl Fn(&Limit) -> Option<&Spanned<T>>) -> Range<usize> {
        let Some(limit) = self.limit(name) else { return 0..0 };
        value(limit.get_ref()).map_or(limit.span(), |value| value.span())
    }

    fn about(&self, subject: &WarningSubject, text: String) -> Issue {
        let listener = |place: usize| self.written.listener.get(place);
        let span = match subject {
            WarningSubject::Upstream(name) => self.written.upstream.get(&**name).map(|upstream| upstream.span()),
            WarningSubject::Listener(place) => listener(*place).map(|listener| listener.span()),
            WarningSubject::Certificate(place, number) => listener(*place).and_then(|listener| {
                let tls = listener.get_ref().tls.as_ref()?;
                tls.get_ref().certificates.get(*number).map(|certificate| certificate.span())
            }),
        };
        Issue { span, message: text, hint: None }
    }
}
