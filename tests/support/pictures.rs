//! Draws what each algorithm admits over time, according to the model. `make pictures` writes the files, and a test
//! compares them.

use std::collections::{BTreeSet, VecDeque};
use std::fmt::{Error, Write};

use sluicegate::clock::Clock;
use sluicegate::limiter::algorithm::Rule;
use sluicegate::limiter::algorithm::concurrency::Concurrency;
use sluicegate::limiter::algorithm::fixed_window::{FixedWindow, WindowStart};
use sluicegate::limiter::algorithm::sliding_buckets::SlidingBuckets;
use sluicegate::limiter::algorithm::sliding_log::SlidingLog;
use sluicegate::limiter::algorithm::sliding_window::SlidingWindow;
use sluicegate::limiter::algorithm::token_bucket::TokenBucket;
use sluicegate::limiter::key::{IdentityHasher, Key, StateName};
use sluicegate::limiter::memory::MemoryStore;
use sluicegate::limiter::verdict::{Charge, ChargeMode, Operation};

/// All pictures use 10 requests per 10 s, so that they are comparable.
const QUOTA: &str = "10/10s";
const LIMIT: usize = 10;
const WINDOW_MS: u64 = 10_000;

/// The time at the left edge: 5 s after the start of an aligned window, so that the requests begin in one window and
/// continue in the next.
const START_MS: u64 = 1_800_000_005_000;
const LENGTH_MS: u64 = 40_000;

/// The vertical lines in the background.
enum Lines {
    /// No lines, because the algorithm has no boundaries.
    None,
    /// The window boundaries that the verdicts report.
    Windows,
    /// Boundaries of parts with this length in ms.
    Parts(u64),
}

/// What the curve shows.
struct Counts {
    limit: &'static str,
    curve: &'static str,
    /// How long an admitted request counts, in ms.
    lasts_ms: u64,
}

const LAST_WINDOW: Counts = Counts { limit: "10 per 10 s", curve: "admitted in the last 10 s", lasts_ms: WINDOW_MS };
const IN_FLIGHT: Counts = Counts { limit: "10 in flight, each request takes 4 s", curve: "in flight", lasts_ms: 4_000 };

/// One request with its decision.
struct Asked {
    at_ms: u64,
    admitted: bool,
    window_end_ms: u64,
}

/// Return the file name and the content of each picture.
pub fn all() -> Vec<(String, String)> {
    let quota = QUOTA.parse().expect("a quota");
    let bucket = |burst| Rule::TokenBucket(TokenBucket::new(quota, burst).expect("a bucket"));
    let window = |start| Rule::FixedWindow(FixedWindow::new(quota, start).expect("a window"));
    let sliding = SlidingWindow::new(quota).expect("a window");
    let buckets = SlidingBuckets::new(quota, 10).expect("parts");
    let log = SlidingLog::new(quota).expect("a log");
    let scenes = [
        ("token-bucket", "token-bucket, burst 10", bucket(10), Lines::None),
        ("token-bucket-small-burst", "token-bucket, burst 2", bucket(2), Lines::None),
        ("fixed-window", "fixed-window", window(WindowStart::Aligned { phase: 0 }), Lines::Windows),
        ("first-request", "fixed-window, start = \"first-request\"", window(WindowStart::FirstRequest), Lines::Windows),
        ("sliding-window", "sliding-window", Rule::SlidingWindow(sliding), Lines::Parts(WINDOW_MS)),
        ("sliding-buckets", "sliding-buckets, 10 buckets", Rule::SlidingBuckets(buckets), Lines::Parts(WINDOW_MS / 10)),
        ("sliding-log", "sliding-log", Rule::SlidingLog(log), Lines::None),
        ("concurrency", "concurrency", Rule::Concurrency(Concurrency { limit: 10, ttl: 30_000_000 }), Lines::None),
    ];
    let draw = |(file, title, rule, lines): (&str, &str, Rule, Lines)| {
        let counts = if let Rule::Concurrency(_) = rule { IN_FLIGHT } else { LAST_WINDOW };
        let svg = draw(title, &ask(&rule, &counts), &lines, &counts).expect("writing to a string does not fail");
        (format!("{file}.svg"), svg)
    };
    scenes.into_iter().map(draw).collect()
}

/// Send requests of one identity: one at 4 s, then four per second from 11.5 s on. Return the decisions.
fn ask(rule: &Rule, counts: &Counts) -> Vec<Asked> {
    let clock = Clock::manual(0);
    let store = MemoryStore::new(1000, clock.clone());
    let hasher = IdentityHasher::new("pictures");
    let bucket = StateName::new(&hasher, "limit", &rule.shape());
    let key = Key { identity: hasher.hash(b"greedy"), state_name: &bucket };
    let (mode, usage) = (ChargeMode::Enforced, None);
    let charge = |lease| Charge { key, rule, cost: 1, mode, permit_id: lease, debt_before_us: 0, usage };
    let mut in_flight = VecDeque::new();
    let demand = std::iter::once(4_000).chain((11_500..LENGTH_MS).step_by(250));
    demand
        .map(|at_ms| {
            while let Some(began) = in_flight.pop_front_if(|began| *began + counts.lasts_ms <= at_ms) {
                clock.set((START_MS + began + counts.lasts_ms) * 1000);
                if let Rule::Concurrency(_) = rule {
                    store.decide(Operation::Refund { charged_at: 0 }, &[charge(began)]);
                }
            }
            clock.set((START_MS + at_ms) * 1000);
            let verdict = store.decide(Operation::Check, &[charge(at_ms)]);
            if verdict.granted == 1 {
                in_flight.push_back(at_ms);
            }
            let window_end_ms = at_ms + verdict.outcomes[0].reset_us / 1000;
            Asked { at_ms, admitted: verdict.granted == 1, window_end_ms }
        })
        .collect()
}

// ---- drawing, in units of the viewBox ------------------------------------------------------------

const LEFT: f64 = 34.0;
const PLOT_TOP: f64 = 34.0;
const PLOT_BOTTOM: f64 = 134.0;
const MARKS_TOP: f64 = 146.0;
const MARKS_BOTTOM: f64 = 164.0;
const PER_UNIT: f64 = (PLOT_BOTTOM - PLOT_TOP) / (2 * LIMIT) as f64;

fn x(ms: u64) -> f64 {
    LEFT + ms as f64 * 0.0168
}

fn y(units: usize) -> f64 {
    PLOT_BOTTOM - units as f64 * PER_UNIT
}

/// Colours are written twice, because some SVG viewers do not support CSS variables.
const STYLE: &str = "\
text{font:12px system-ui,sans-serif;fill:#59636e} .title{fill:#1f2328;font-weight:600} .paper{fill:#fff}
.axis{stroke:#c3cad2} .window{stroke:#59636e;stroke-dasharray:2 3} .part{stroke:#c3cad2;stroke-dasharray:1 3}
.limit{stroke:#1f2328;stroke-dasharray:6 3} .area{fill:#0969da;opacity:.2} .curve{fill:none;stroke:#0969da;stroke-width:1.5}
.over .area{fill:#d1480b;opacity:.4} .over .curve{stroke:#d1480b} .yes{fill:#0969da} .no{fill:#c3cad2}
@media(prefers-color-scheme:dark){text{fill:#9198a1} .title{fill:#e6edf3} .paper{fill:#0d1117} .axis{stroke:#444c56}
.window{stroke:#9198a1} .part{stroke:#57606a} .limit{stroke:#e6edf3} .area,.yes{fill:#58a6ff} .curve{stroke:#58a6ff}
.over .area{fill:#f0883e} .over .curve{stroke:#f0883e} .no{fill:#444c56}}
";

fn draw(title: &str, asked: &[Asked], lines: &Lines, counts: &Counts) -> Result<String, Error> {
    let curve = running(asked, counts);
    let most = curve.iter().map(|(_, units)| *units).max().unwrap_or(0);
    let admitted = asked.iter().filter(|request| request.admitted).count();
    let mut out = String::new();
    let svg = &mut out;
    writeln!(svg, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 720 208\" role=\"img\">")?;
    let name = title.replace('"', "&quot;");
    writeln!(
        svg,
        "<title>{name}: {}; {admitted} of {} admitted; {}: maximum {most}</title>",
        counts.limit,
        asked.len(),
        counts.curve
    )?;
    writeln!(svg, "<style>\n{STYLE}</style>")?;
    writeln!(svg, "<rect class=\"paper\" width=\"720\" height=\"208\"/>")?;
    writeln!(svg, "<text class=\"title\" x=\"{LEFT}\" y=\"20\">{name}: {}</text>", counts.limit)?;
    let right = x(LENGTH_MS);
    writeln!(svg, "<text x=\"{right}\" y=\"20\" text-anchor=\"end\">{}: maximum {most}</text>", counts.curve)?;
    axes(svg)?;
    boundaries(svg, asked, lines)?;

    // Draw the curve twice: first the complete curve, then the part above the limit in another colour.
    let (line, limit, last) = (steps(&curve), y(LIMIT), x(LENGTH_MS));
    let above = limit - PLOT_TOP + 1.0;
    writeln!(
        svg,
        "<clipPath id=\"above\"><rect x=\"0\" y=\"{}\" width=\"720\" height=\"{above}\"/></clipPath>",
        PLOT_TOP - 1.0
    )?;
    for group in ["<g>", "<g class=\"over\" clip-path=\"url(#above)\">"] {
        let area = format!("{line}V{PLOT_BOTTOM}H{LEFT}Z");
        writeln!(svg, "{group}<path class=\"area\" d=\"{area}\"/><path class=\"curve\" d=\"{line}\"/></g>")?;
    }
    writeln!(svg, "<path class=\"limit\" d=\"M{LEFT} {limit}H{last}\"/>")?;
    for request in asked {
        let class = if request.admitted { "yes" } else { "no" };
        mark(svg, class, x(request.at_ms), MARKS_TOP, MARKS_BOTTOM - MARKS_TOP)?;
    }
    legend(svg, lines, counts)?;
    writeln!(svg, "</svg>")?;
    Ok(out)
}

/// Return each time at which the number of counted requests changes, with the new number. A request counts for a
/// half-open interval.
fn running(asked: &[Asked], counts: &Counts) -> Vec<(u64, usize)> {
    let lasts_ms = counts.lasts_ms;
    let instants: Vec<_> = asked.iter().filter(|request| request.admitted).map(|request| request.at_ms).collect();
    let changes: BTreeSet<_> =
        instants.iter().flat_map(|at| [*at, at + lasts_ms]).filter(|at| *at < LENGTH_MS).collect();
    let live = |now: u64| instants.iter().filter(|at| **at <= now && now < *at + lasts_ms).count();
    changes.into_iter().map(|now| (now, live(now))).collect()
}

fn steps(curve: &[(u64, usize)]) -> String {
    let levels = curve.iter().map(|(at, units)| format!("H{:.1}V{:.1}", x(*at), y(*units)));
    format!("M{LEFT} {PLOT_BOTTOM}{}H{}", levels.collect::<String>(), x(LENGTH_MS))
}

fn axes(svg: &mut String) -> Result<(), Error> {
    let right = x(LENGTH_MS);
    writeln!(svg, "<path class=\"axis\" d=\"M{LEFT} {PLOT_BOTTOM}H{right}M{LEFT} {MARKS_BOTTOM}H{right}\"/>")?;
    for units in [0, LIMIT, 2 * LIMIT] {
        writeln!(svg, "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{units}</text>", LEFT - 6.0, y(units) + 4.0)?;
    }
    for ms in (0..=LENGTH_MS).step_by(5_000) {
        let text = if ms == LENGTH_MS { format!("{} s", ms / 1000) } else { (ms / 1000).to_string() };
        writeln!(svg, "<text x=\"{:.1}\" y=\"178\" text-anchor=\"middle\">{text}</text>", x(ms))?;
    }
    Ok(())
}

fn boundaries(svg: &mut String, asked: &[Asked], lines: &Lines) -> Result<(), Error> {
    let (instants, class): (BTreeSet<u64>, _) = match lines {
        Lines::None => return Ok(()),
        Lines::Windows => {
            let ends = asked.iter().map(|request| request.window_end_ms);
            (ends.flat_map(|end| [end.saturating_sub(WINDOW_MS), end]).collect(), "window")
        }
        Lines::Parts(length) => {
            let first = length - START_MS % length;
            let class = if *length == WINDOW_MS { "window" } else { "part" };
            ((first..LENGTH_MS).step_by(*length as usize).collect(), class)
        }
    };
    write!(svg, "<path class=\"{class}\" d=\"")?;
    for ms in instants.range(1..LENGTH_MS) {
        write!(svg, "M{:.1} {PLOT_TOP}V{MARKS_BOTTOM}", x(*ms))?;
    }
    writeln!(svg, "\"/>")
}

fn legend(svg: &mut String, lines: &Lines, counts: &Counts) -> Result<(), Error> {
    let y = 199.0;
    for (class, left, text) in [("yes", 34.0, "admitted"), ("no", 114.0, "denied"), ("curve", 182.0, counts.curve)] {
        if class == "curve" {
            writeln!(svg, "<path class=\"curve\" d=\"M{left} {}h14\"/>", y - 4.0)?;
        } else {
            mark(svg, class, left + 7.0, y - 11.0, 13.0)?;
        }
        writeln!(svg, "<text x=\"{}\" y=\"{y}\">{text}</text>", left + 18.0)?;
    }
    writeln!(svg, "<path class=\"limit\" d=\"M358 {0}h14\"/><text x=\"376\" y=\"{y}\">limit</text>", y - 4.0)?;
    let (class, text) = match lines {
        Lines::None => return Ok(()),
        Lines::Windows | Lines::Parts(WINDOW_MS) => ("window", "start of a window"),
        Lines::Parts(_) => ("part", "start of a bucket"),
    };
    writeln!(svg, "<path class=\"{class}\" d=\"M428 {}v15\"/><text x=\"436\" y=\"{y}\">{text}</text>", y - 12.0)
}

fn mark(svg: &mut String, class: &str, middle: f64, top: f64, height: f64) -> Result<(), Error> {
    let left = middle - 1.3;
    writeln!(svg, "<rect class=\"{class}\" x=\"{left:.1}\" y=\"{top}\" width=\"2.6\" height=\"{height}\"/>")
}
