//! nginx's limits: `limit_req_zone` with `limit_req`, and `limit_conn_zone` with `limit_conn`.

use std::collections::BTreeMap;

use crate::tools::import::model::{Model, Origin, Relation, Table};
use crate::tools::import::nginx::keys::{Key, Meaning, Variables};
use crate::tools::import::nginx::scope::{Scope, Setting};
use crate::tools::import::nginx::syntax::Directive;
use crate::tools::import::units::duration;

/// A shared memory zone with the states of a limit.
#[derive(Debug)]
struct Zone {
    origin: Origin,
    expression: String,
    /// The count and the unit of `rate`: `10/s`. Empty for connections.
    quota: String,
    /// Milliseconds in which one request drains.
    interval: f64,
    /// `limit_req` and `limit_conn` that use the zone, each with the name of the limit.
    uses: BTreeMap<String, Option<String>>,
}

/// The zones of the files.
#[derive(Debug, Default)]
pub(super) struct Zones {
    zones: BTreeMap<String, Zone>,
}

impl Zones {
    /// Add `limit_req_zone KEY zone=NAME:SIZE rate=RATE` or `limit_conn_zone KEY zone=NAME:SIZE`.
    pub(super) fn add(&mut self, directive: &Directive, model: &mut Model) {
        let parameter = |name: &str| directive.args.iter().find_map(|arg| arg.strip_prefix(name));
        let Some(zone) = parameter("zone=") else {
            return model.no_equal(&directive.origin, format!("`{}`: `zone` is missing", directive.text()));
        };
        let name = zone.split(':').next().unwrap_or_default().to_owned();
        let mut quota = String::new();
        let mut interval = 0.0;
        if directive.name == "limit_req_zone" {
            let rate = parameter("rate=").unwrap_or_default();
            let (count, unit) = rate.split_once("r/").unwrap_or_default();
            let window = match unit {
                "s" => 1000.0,
                "m" => 60_000.0,
                _ => 0.0,
            };
            match count.parse::<u32>() {
                Ok(count) if count > 0 && window > 0.0 => {
                    quota = format!("{count}/{}", if unit == "s" { "s" } else { "min" });
                    interval = window / f64::from(count);
                }
                _ => return model.no_equal(&directive.origin, format!("`{}`: no valid rate", directive.text())),
            }
        }
        let expression = directive.arg(0).to_owned();
        let key = format!("{} {name}", directive.name.trim_end_matches("_zone"));
        self.zones
            .insert(key, Zone { origin: directive.origin.clone(), expression, quota, interval, uses: BTreeMap::new() });
    }

    /// Return the names of the limits of a level, in the order of the directives.
    pub(super) fn limits(&mut self, scope: &Scope, variables: &Variables, model: &mut Model) -> Vec<String> {
        let mut names = Vec::new();
        for kind in ["limit_req", "limit_conn"] {
            let status = scope.single(&format!("{kind}_status")).map_or("503", |setting| setting.arg(0));
            let is_dry = scope.single(&format!("{kind}_dry_run")).is_some_and(|setting| setting.arg(0) == "on");
            for setting in scope.several(kind) {
                let name = self.limit(setting, status, is_dry, variables, model);
                names.extend(name.filter(|name| !names.contains(name)));
            }
        }
        names
    }

    /// Report zones that no directive uses. In files without a `server`, another file uses them.
    pub(super) fn report_unused(&self, is_fragment: bool, variables: &Variables, model: &mut Model) {
        for (name, zone) in self.zones.iter().filter(|(_, zone)| zone.uses.is_empty()) {
            if !is_fragment {
                model.not_needed(&zone.origin, format!("the zone of `{name}` is used nowhere in these files"));
                continue;
            }
            let meaning = match variables.meaning(&zone.expression) {
                Meaning::Key(key) => format!("its key becomes `by = {:?}`", key.by),
                Meaning::Unlimited => "its key never limits a request".to_owned(),
                Meaning::Unknown(reason) => format!("its key has no equal: {reason}"),
            };
            let text = format!("the zone of `{name}`: give the files that use it as well; {meaning}");
            model.no_equal(&zone.origin, text);
        }
    }

    /// Return the name of the limit of one `limit_req` or `limit_conn`.
    fn limit(
        &mut self,
        setting: &Setting,
        status: &str,
        is_dry: bool,
        variables: &Variables,
        model: &mut Model,
    ) -> Option<String> {
        let zone_name = match &*setting.name {
            "limit_req" => setting.args.iter().find_map(|arg| arg.strip_prefix("zone=")).unwrap_or_default(),
            _ => setting.arg(0),
        };
        let Some(zone) = self.zones.get_mut(&format!("{} {zone_name}", setting.name)) else {
            let text = format!("`{}`: the zone is not defined in these files, so the limit is missing", setting.text());
            model.no_equal(&setting.origin, text);
            return None;
        };
        let use_key = format!("{} {status} {is_dry}", setting.args.join(" "));
        if let Some(name) = zone.uses.get(&use_key) {
            return name.clone();
        }
        if !zone.uses.is_empty() {
            let text = format!(
                "`{}`: in nginx, all directives with the zone `{zone_name}` share their states; here, limits with \
                 other parameters count separately",
                setting.text()
            );
            model.differs(&setting.origin, text);
        }
        let name =
            limit_table(zone, setting, status, is_dry, variables, model).map(|table| model.add_limit(zone_name, table));
        zone.uses.insert(use_key, name.clone());
        name
    }
}

/// Return the table of a limit. `None`: nothing is limited.
fn limit_table(
    zone: &Zone,
    setting: &Setting,
    status: &str,
    is_dry: bool,
    variables: &Variables,
    model: &mut Model,
) -> Option<Table> {
    let mut table = Table::from_origin(&zone.origin, &format!("zone for `{}`", zone.expression));
    table.comments.extend(Table::from_origin(&setting.origin, &setting.text()).comments);
    let mut is_shadow = is_dry;
    match variables.meaning(&zone.expression) {
        Meaning::Unlimited => {
            let text = format!("`{}`: the key `{}` never limits a request", setting.text(), zone.expression);
            model.not_needed(&setting.origin, text);
            return None;
        }
        Meaning::Key(key) => {
            for difference in &key.differences {
                model.differs(&zone.origin, difference.clone());
            }
            write_key(&key, &mut table);
        }
        Meaning::Unknown(reason) => {
            let text = format!(
                "`{}`: {reason}; the limit counts by client address and only logs denials (`shadow = true`): choose \
                 `by`, then remove `shadow`",
                zone.expression
            );
            model.no_equal(&zone.origin, text);
            table.set("by", "ip");
            is_shadow = true;
        }
    }
    if zone.quota.is_empty() {
        table.set("algorithm", "concurrency");
        table.set("quota", setting.arg(1));
        model.note(
            Relation::Differs,
            None,
            "limit_conn counts for one nginx; a limit with `concurrency` counts the requests in flight on all \
             gateways together. nginx counts a request that limit_conn denies at limit_req, Sluicegate at no limit",
        );
    } else {
        write_rate(zone, setting, &mut table, model);
    }
    match status.parse::<i64>() {
        Ok(429) => {}
        Ok(status @ 400..=599) => table.set("status", status),
        _ => model.no_equal(&setting.origin, format!("the status `{status}`: limits have a status from 400 to 599")),
    }
    if is_shadow {
        table.set("shadow", true);
    }
    Some(table)
}

fn write_key(key: &Key, table: &mut Table) {
    match &*key.by {
        [] => table.set("by", "global"),
        [single] => table.set("by", single.as_str()),
        several => table.set_list("by", several.to_vec()),
    }
    let is_always_present = |source: &String| matches!(&**source, "ip" | "host" | "method" | "route" | "global");
    if key.or_address {
        table.set("on_missing", "ip");
    } else if !key.by.iter().all(is_always_present) {
        table.set("on_missing", "skip");
    }
    table.set_list("exempt", key.exempt.iter().cloned());
    table.set_list("methods", key.methods.iter().cloned());
}

/// Write `burst`, `nodelay` and `delay`. The leaky bucket of nginx holds `burst` requests in addition to the one that
/// drains; a token bucket of `burst` + 1 admits the same requests.
fn write_rate(zone: &Zone, setting: &Setting, table: &mut Table, model: &mut Model) {
    let number = |name: &str| setting.args.iter().find_map(|arg| arg.strip_prefix(name)?.parse::<i64>().ok());
    let burst = number("burst=").unwrap_or(0).max(0);
    let undelayed = match number("delay=") {
        Some(delay) => delay.clamp(0, burst),
        None if setting.args.iter().any(|arg| arg == "nodelay") => burst,
        None => 0,
    };
    table.set("quota", zone.quota.as_str());
    table.set("burst", undelayed + 1);
    let queued = burst - undelayed;
    if queued > 0 {
        // `max_queue` bounds the queue. The last request waits for all requests before it, and some time to be checked.
        let wait = ((queued + 1) as f64 * zone.interval).ceil() as u64;
        table.set("max_wait", duration(wait));
        table.set("max_queue", queued);
    }
    if queued > 0 && undelayed > 0 {
        let text = format!(
            "`{}`: the first {undelayed} requests of a burst are not delayed; the next {queued} wait in a queue",
            setting.text()
        );
        model.differs(&setting.origin, text);
    }
    model.note(
        Relation::Differs,
        None,
        "limit_req counts for one nginx, in milliseconds. A limit counts for all gateways that share a store, in \
         microseconds: with N instances of nginx behind a load balancer, multiply the quotas by N. A request that one \
         limit denies is charged to no limit",
    );
}
