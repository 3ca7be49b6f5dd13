//! Imports the configuration of `envoyproxy/ratelimit`.

use crate::config::yaml::Node;
use crate::tools::import::document::{Document, parse, read};
use crate::tools::import::model::{Model, Relation, Table, quoted};
use crate::tools::import::{ImportError, Input};

/// Maximum number of entries of a descriptor.
const MAX_ENTRIES: usize = 16;

/// Import files with a domain each, also as they are in a ConfigMap.
pub(super) fn import(inputs: &[Input]) -> Result<Model, ImportError> {
    let mut model = Model::default();
    let mut listener = Table::default();
    listener.comments.push("The address of the service in the configuration of Envoy".to_owned());
    listener.set("address", "127.0.0.1:8081");
    listener.set("protocol", "ratelimit");
    model.listeners.push(listener);
    for document in read(inputs)? {
        if document.root.text_of("kind") == "ConfigMap" {
            for pair in document.root.get("data").map(Node::pairs).unwrap_or_default() {
                let text = pair.value.text().unwrap_or_default();
                let line = if pair.value.line > pair.line { pair.value.line - 1 } else { pair.line };
                for inner in parse(&document.file, line, text)? {
                    domain(&inner, &mut model);
                }
            }
        } else {
            domain(&document, &mut model);
        }
    }
    let text = "descriptors match as in `envoyproxy/ratelimit`, except that an entry with a value does not exclude \
                descriptors without this value, and that the most specific wildcard matches instead of the first one";
    model.note(Relation::Differs, None, text);
    let text =
        "all limits of a call are one decision: if one descriptor denies the request, the others are not charged";
    model.note(Relation::Differs, None, text);
    let text = "while the store is unavailable, each gateway enforces its share of the limits (`on_store_error`)";
    model.note(Relation::Differs, None, text);
    Ok(model)
}

/// Import the descriptors of a domain.
fn domain(document: &Document, model: &mut Model) {
    let domain = document.root.text_of("domain");
    if domain.is_empty() {
        let text = "the document has no `domain`: it is not imported";
        return model.no_equal(&document.at(&document.root), text);
    }
    document.report_others(&document.root, &["domain", "name", "descriptors"], "the domain", model);
    let mut path = Vec::new();
    for node in document.root.items_of("descriptors") {
        descriptor(document, domain, node, &mut path, model);
    }
}

/// An entry on the path to a descriptor.
struct Entry {
    key: String,
    value: String,
    /// Whether all values that a wildcard matches share the limit.
    is_shared: bool,
}

fn descriptor(document: &Document, domain: &str, node: &Node, path: &mut Vec<Entry>, model: &mut Model) {
    let origin = document.at(node);
    if path.len() == MAX_ENTRIES {
        return model.no_equal(&origin, format!("the descriptor has more than {MAX_ENTRIES} entries"));
    }
    let known = [
        "key",
        "value",
        "rate_limit",
        "descriptors",
        "shadow_mode",
        "detailed_metric",
        "value_to_metric",
        "quota_mode",
        "share_threshold",
        "metadata",
    ];
    document.report_others(node, &known, "the descriptor", model);
    path.push(Entry {
        key: node.text_of("key").to_owned(),
        value: node.text_of("value").to_owned(),
        is_shared: node.is_true("share_threshold"),
    });
    for (name, reason) in [
        ("detailed_metric", "`descriptor_decisions_total` counts by descriptor"),
        ("value_to_metric", "metrics have no labels with values of clients"),
        ("metadata", "responses have no metadata of the configuration"),
    ] {
        if let Some(value) = node.get(name) {
            model.no_equal(&document.at(value), format!("`{name}`: {reason}"));
        }
    }
    if let Some(rate_limit) = node.get("rate_limit") {
        leaf(document, domain, node, rate_limit, path, model);
    }
    for child in node.items_of("descriptors") {
        descriptor(document, domain, child, path, model);
    }
    path.pop();
}

/// Add the descriptor and the limit of a `rate_limit`.
fn leaf(document: &Document, domain: &str, node: &Node, rate_limit: &Node, path: &[Entry], model: &mut Model) {
    let origin = document.at(node);
    let known = ["unit", "requests_per_unit", "unlimited", "name", "replaces"];
    document.report_others(rate_limit, &known, "`rate_limit`", model);
    let entries: Vec<String> = path
        .iter()
        .map(|entry| match &*entry.value {
            "" => entry.key.clone(),
            value => format!("{}={value}", entry.key),
        })
        .collect();
    let mut descriptor = Table::from_origin(&origin, &entries.join(", "));
    descriptor.set("domain", domain);
    descriptor.set_list("entries", entries.iter().cloned());
    if model
        .descriptors
        .iter()
        .any(|other| ["domain", "entries"].iter().all(|key| other.keys.get(*key) == descriptor.keys.get(*key)))
    {
        return model.no_equal(&origin, format!("`{}` occurs twice", quoted(&entries.join(", "))));
    }
    if rate_limit.is_true("unlimited") {
        descriptor.set("unlimited", true);
        model.descriptors.push(descriptor);
        return;
    }
    if let Some(replaces) = rate_limit.get("replaces") {
        let text = "`replaces`: the replaced limits apply as well; write one descriptor with the limits that remain";
        model.no_equal(&document.at(replaces), text);
    }
    let mut limit = Table::from_origin(&origin, &entries.join(", "));
    let counted: Vec<String> = path
        .iter()
        .filter(|entry| entry.value.is_empty() || entry.value.contains('*') && !entry.is_shared)
        .map(|entry| format!("entry:{}", entry.key))
        .collect();
    match &*counted {
        [] => limit.set("by", "global"),
        [single] => limit.set("by", single.as_str()),
        several => limit.set_list("by", several.iter().cloned()),
    }
    limit.set("algorithm", "fixed-window");
    let Some(unit) = unit(rate_limit.text_of("unit")) else {
        let text = format!("`unit: {}`: the descriptor is not imported", quoted(rate_limit.text_of("unit")));
        return model.no_equal(&document.at(rate_limit), text);
    };
    match rate_limit.integer_of("requests_per_unit") {
        Some(count) if count > 0 => limit.set("quota", format!("{count}/{unit}")),
        _ => {
            let text = "`requests_per_unit: 0`: a quota is at least 1, so the limit admits one request in 365 days";
            model.differs(&document.at(rate_limit), text);
            limit.set("quota", "1/365d");
        }
    }
    if node.is_true("shadow_mode") {
        limit.set("shadow", true);
    }
    if let Some(quota_mode) = node.get("quota_mode").filter(|_| node.is_true("quota_mode")) {
        limit.set("charge", "always");
        let text = "`quota_mode`: the limit denies like any other limit, also if other limits of the call admit it";
        model.differs(&document.at(quota_mode), text);
    }
    let named = rate_limit.text_of("name");
    let base = if named.is_empty() { format!("{domain} {}", entries.join(" ")) } else { named.to_owned() };
    // Each descriptor has its own counter, even if two limits are equal.
    let name = model.add_new_limit(&base, limit);
    descriptor.set_list("limits", [name]);
    model.descriptors.push(descriptor);
}

/// Return the unit of a quota. Months and years of the service have 30 and 365 days.
fn unit(unit: &str) -> Option<&'static str> {
    match unit.to_ascii_lowercase().as_str() {
        "second" | "1" => Some("s"),
        "minute" | "2" => Some("min"),
        "hour" | "3" => Some("hour"),
        "day" | "4" => Some("day"),
        "week" | "7" => Some("7d"),
        "month" | "5" => Some("30d"),
        "year" | "6" => Some("365d"),
        _ => None,
    }
}
