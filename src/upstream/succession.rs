//! How an upstream that has other settings takes the place of the one before: its servers stay what they are.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Upstream;
use super::condition::Condition;
use super::fleet::{Fleet, literal};
use super::member::Member;
use super::settings::UpstreamSettings;
use crate::limit::clock::monotonic;

impl Fleet {
    /// The same with other settings: servers that both have are as they were, with the requests that they have.
    pub fn succeeding(settings: Arc<UpstreamSettings>, before: &Fleet) -> Self {
        let queue = before.queue.clone();
        queue.resize(settings.max_queue);
        let known = before.members();
        let mut members = Vec::new();
        for (index, server) in settings.servers.iter().enumerate() {
            let same = known.iter().filter(|member| member.server.is_at(server));
            let first = members.len();
            members.extend(same.map(|member| Arc::new(member.under(&settings, index))));
            if members.len() == first {
                let condition = Condition::joining(monotonic());
                members.push(Arc::new(Member::new(
                    &settings,
                    index,
                    literal(&settings, index),
                    condition,
                    queue.clone(),
                )));
            }
        }
        for gone in known.iter().filter(|known| !members.iter().any(|member| member.is(known))) {
            gone.state.usable.store(false, Ordering::Relaxed);
        }
        let fleet = Fleet::of(settings, members, queue);
        // Some may be out, and come back.
        fleet.review(&fleet.changing());
        fleet
    }
}

impl Upstream {
    /// The way to a fleet that has taken the place of another. Connections to servers that both have stay.
    pub fn succeeding(fleet: Arc<Fleet>, before: &Upstream) -> Self {
        let speaks = |fleet: &Fleet| (fleet.settings.protocol, fleet.settings.pool_idle_timeout);
        let (links, members) = (before.links.load(), fleet.members());
        let known = links.all.iter().filter(|_| speaks(&fleet) == speaks(&before.fleet));
        let known = known.filter_map(|link| members.iter().find_map(|member| link.to(member))).map(Arc::new);
        let known: Vec<_> = known.collect();
        Upstream::knowing(fleet, &known)
    }
}
