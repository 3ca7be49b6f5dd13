//! The decisions of access rules and of the CORS policy.

use std::net::IpAddr;

use http::Request;
use http::header::ORIGIN;

use crate::http::cors::CorsDecision;
use crate::identity::access::{AccessDecision, AccessRules, ListSource};
use crate::tools::explain::report::{AccessReport, CorsReport};

/// Report what the access rules of the listener and of the route decide about a client.
pub(super) fn access_reports(rules: [Option<&AccessRules>; 2], client: IpAddr) -> Vec<AccessReport> {
    let reports = ["listener", "route"].into_iter().zip(rules).filter_map(|(rule, rules)| {
        let decision = rules?.decide(client);
        Some(AccessReport { rule, allowed: decision.is_allowed(), reason: reason(decision, client) })
    });
    reports.collect()
}

fn reason(decision: AccessDecision<'_>, client: IpAddr) -> String {
    let from = |source| match source {
        ListSource::Inline => String::new(),
        ListSource::File(name) => format!(", by the file {name}"),
    };
    match decision {
        AccessDecision::NotDenied => format!("{client} is not in `deny`"),
        AccessDecision::Allowed(source) => format!("{client} is in `allow`{}", from(source)),
        AccessDecision::Denied(source) => format!("{client} is in `deny`{}", from(source)),
        AccessDecision::NotAllowed => format!("{client} is not in `allow`"),
    }
}

/// Report the decision of the CORS policy about a request.
pub(super) fn cors_report(cors: &CorsDecision<'_>, request: &Request<()>, is_preflight: bool) -> CorsReport {
    let origin = request.headers().get(ORIGIN);
    CorsReport {
        origin: origin.map(|origin| String::from_utf8_lossy(origin.as_bytes()).into_owned()),
        allowed: cors.is_allowed(),
        preflight: is_preflight,
    }
}
