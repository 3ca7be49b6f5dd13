//! Who can be asked at the moment, and who is asked next. It is made anew when that changes, not for each request.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::balance::{Balance, Dice, Order, Owners};
use super::condition::Standing;
use super::member::Member;
use super::queue::Place;
use super::settings::UpstreamSettings;

/// So many members are drawn before all are looked at in turn.
const DRAWS: u32 = 8;

/// Weights are multiplied by this, so that addresses can share one.
const UNIT: u64 = 55_440;

/// The members of a fleet as they are at the moment.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) members: Arc<Vec<Arc<Member>>>,
    /// Those that can be asked.
    pub(super) usable: Box<[usize]>,
    /// Those that took no connection just now: for requests that have tried all others.
    spare: Box<[usize]>,
    order: Order,
    pub(super) owners: Option<Arc<Owners>>,
    /// Whether so many are out that ejections do not count.
    pub(super) panics: bool,
}

/// What one choice depends on.
pub(super) struct Draw<'a> {
    pub(super) balance: &'a Balance,
    /// The hash of the header that decides, if that is so.
    pub(super) key: Option<u64>,
    pub(super) dice: &'a Dice,
    /// Turns that were taken so far.
    pub(super) turns: &'a AtomicU64,
    /// Members that will not do.
    pub(super) tried: &'a [Arc<Member>],
}

impl Table {
    /// As things are now; with the instant at which they will be different, if nothing happens before.
    pub(super) fn new(
        settings: &UpstreamSettings,
        members: Arc<Vec<Arc<Member>>>,
        owners: Option<Arc<Owners>>,
        now: Instant,
    ) -> (Self, Option<Instant>) {
        let mut next = None;
        let shared = shared_weights(&members);
        let mut weights = Vec::with_capacity(members.len());
        let mut standings = Vec::with_capacity(members.len());
        for member in members.iter() {
            let condition = member.condition();
            let steps = u64::from(condition.steps(now, settings.slow_start));
            weights.push(shared[weights.len()] * steps);
            standings.push((condition.standing(now), condition.is_passed_over(now)));
            next = [next, condition.next_change(now, settings.slow_start)].into_iter().flatten().min();
        }
        let counts = |wanted: &dyn Fn(Standing) -> bool| {
            standings.iter().zip(&weights).filter(|((standing, _), weight)| **weight > 0 && wanted(*standing)).count()
        };
        let ejected = counts(&|standing| standing == Standing::Ejected);
        let panics = ejected > 0 && counts(&|standing| standing != Standing::In) * 2 > counts(&|_| true);
        // What a check says is believed to the last server; an ejection is a guess.
        let is_in = |standing| standing == Standing::In || (panics && standing == Standing::Ejected);
        let any_takes = standings
            .iter()
            .zip(&weights)
            .any(|((standing, passed), weight)| *weight > 0 && is_in(*standing) && !passed);
        let mut spare = Vec::new();
        for (index, ((standing, passed), weight)) in standings.iter().zip(&mut weights).enumerate() {
            let passed = *passed && any_takes;
            if passed && is_in(*standing) && *weight > 0 {
                spare.push(index);
            }
            if passed || !is_in(*standing) {
                *weight = 0;
            }
        }
        let usable = (0..members.len()).filter(|index| weights[*index] > 0).collect();
        (Table { members, usable, spare: spare.into(), order: Order::new(&weights), owners, panics }, next)
    }

    /// A place at one of them; none if there is no member or no room.
    pub(super) fn place(&self, draw: &Draw<'_>) -> Option<(usize, Place)> {
        let enter = |index: usize| {
            let member = &self.members[index];
            let tried = draw.tried.iter().any(|tried| Arc::ptr_eq(tried, member));
            let place = if tried { None } else { Member::enter(member) };
            place.map(|place| (index, place))
        };
        let again = || self.spare.iter().filter(|_| !draw.tried.is_empty()).find_map(|index| enter(*index));
        if let [only] = self.usable[..] {
            return enter(only).or_else(again);
        }
        for attempt in 0..DRAWS {
            if let Some(found) = enter(self.choose(draw, attempt)?) {
                return Some(found);
            }
        }
        let first = draw.key.unwrap_or_else(|| draw.dice.throw()) as usize % self.usable.len();
        let (before, after) = self.usable.split_at(first);
        after.iter().chain(before).find_map(|index| enter(*index)).or_else(again)
    }

    fn choose(&self, draw: &Draw<'_>, attempt: u32) -> Option<usize> {
        match (draw.balance, &self.owners, draw.key) {
            (Balance::RoundRobin, ..) => self.order.at(draw.turns.fetch_add(1, Ordering::Relaxed)),
            (Balance::Random, ..) => self.order.at(draw.dice.throw()),
            (Balance::Hash(_), Some(owners), Some(key)) => {
                // Who stands in for an owner that is out is drawn by the key as well: when it is back, so are its keys.
                let mut usable =
                    (0..2 * DRAWS).map(|draw| owners.of(key, draw)).filter(|owner| self.order.share(*owner) > 0);
                usable.nth(attempt as usize).or_else(|| self.order.at(key))
            }
            (Balance::LeastRequests | Balance::Hash(_), ..) => self.less_loaded(draw.dice),
        }
    }

    /// The power of two choices (Mitzenmacher 2001): both are drawn by weight, and with equal load the first is taken.
    fn less_loaded(&self, dice: &Dice) -> Option<usize> {
        let one = self.order.at(dice.throw())?;
        let mut others = (0..4).filter_map(|_| self.order.at(dice.throw()));
        let other = others.find(|other| *other != one).unwrap_or_else(|| self.any_but(one, dice));
        let load = |index: usize| self.members[index].in_flight() as u64;
        let (of_one, of_other) = (load(one) * self.order.share(other), load(other) * self.order.share(one));
        Some(if of_one <= of_other { one } else { other })
    }

    /// Another one that can be asked; there are two at least.
    fn any_but(&self, one: usize, dice: &Dice) -> usize {
        let at = dice.throw() as usize % self.usable.len();
        if self.usable[at] == one { self.usable[(at + 1) % self.usable.len()] } else { self.usable[at] }
    }
}

/// The weight of a server is that of all its addresses together.
pub(super) fn shared_weights(members: &[Arc<Member>]) -> Vec<u64> {
    let servers = members.iter().map(|member| member.index + 1).max().unwrap_or_default();
    let mut addresses = vec![0; servers];
    members.iter().for_each(|member| addresses[member.index] += 1);
    members.iter().map(|member| u64::from(member.server.weight) * UNIT / addresses[member.index]).collect()
}
